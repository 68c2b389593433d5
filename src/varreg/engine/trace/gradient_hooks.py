"""Hooks on gradients that try, when a real one arrives, whether something mixes samples there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from varreg._torch import BackwardHook
from varreg.engine.frames import hooks_being_applied
from varreg.engine.marks import mark_of
from varreg.engine.refusals import place
from varreg.engine.rehearsal.pauses import gradients_aside
from varreg.engine.trace.arguments import results
from varreg.engine.trace.layout import Place
from varreg.engine.trace.trial import Verdict, keeps_apart, undisturbed
from varreg.engine.trace.trial.trial_values import Run, is_close
from varreg.errors import MeasurementError

if TYPE_CHECKING:
    from varreg.engine.trace.trace import Trace


def register_user_hook(trace: Trace, t: Tensor, hook: Callable[[Tensor], Any]) -> Any:
    """Register a hook of the user's on a tensor that carries the batch, and return its handle. If
    it changes gradients, it is tried once: it must not mix samples.
    """
    at, path = mark_of(t), trace.observer.forward.path()
    if trace.lets_samples_meet or trace.batch <= 1 or not isinstance(at, Place):
        return t.register_hook(hook)
    there, is_tried = at, False

    def careful(grad: Tensor) -> Any:
        nonlocal is_tried
        version = grad._version
        result = hook(grad)  # once, as the user expects; the trial calls it again, undisturbed
        if result is grad and grad._version == version:
            return result  # FSDP's own hook only looks, in each backward
        if result is not None and not is_tried:
            is_tried = True
            verdict = _try_hook(
                trace, path, lambda given: [hook(given[0])], [grad], [there], [there]
            )
            if verdict is not Verdict.APART:
                raise MeasurementError(
                    f"varreg: in {path}, a hook on a tensor changes its gradient, and mixes "
                    "samples: a sample has no gradient of its own. Change each sample's gradient "
                    "by itself."
                )
        return result

    return t.register_hook(careful)


def watch_module_hooks(trace: Trace) -> bool:
    """Watch the backward hooks of a module, if torch is putting some into the graph: they are tried
    when they change a gradient. Return whether it is.
    """
    hooks, call = hooks_being_applied()
    if hooks is None:
        return False
    new = iter(call["new_tensors"])
    tensors = [next(new) if isinstance(a, Tensor) else None for a in call["args"]]
    if call["side"] == "setup_input_hook":
        hooks.user_hooks = _careful(trace, hooks.user_hooks, [_places(tensors)])
    else:
        watch_outputs(trace, hooks, tensors)
    return True


def watch_outputs(trace: Trace, hooks: BackwardHook | None, outputs: Any) -> None:
    """Let a module's hooks on the gradients of its outputs be tried."""
    if hooks is None:  # the forward is called in another way than torch's
        return
    places = _places(results(outputs))
    hooks.user_pre_hooks = _careful(trace, hooks.user_pre_hooks, [places])
    for hook in hooks.user_hooks:
        if isinstance(hook, _ModuleHook) and len(hook.places) == 1:
            hook.places.append(places)


def _places(tensors: Sequence[Any]) -> list[Place | None]:
    """Return where each of several tensors, and other things, carries the batch."""
    marks = [mark_of(t) if isinstance(t, Tensor) else None for t in tensors]
    return [at if isinstance(at, Place) else None for at in marks]


def _careful(trace: Trace, hooks: Sequence[Any], places: list[Sequence[Place | None]]) -> list[Any]:
    if trace.lets_samples_meet or trace.batch <= 1:
        return list(hooks)
    return [h if isinstance(h, _ModuleHook) else _ModuleHook(trace, h, [*places]) for h in hooks]


class _ModuleHook:
    """A backward hook of a module. If it changes gradients, it must not mix samples.

    `places` says where the gradients that it is given carry the batch: those of the inputs, and
    those of the outputs; or those of the outputs alone.
    """

    def __init__(self, trace: Trace, hook: Any, places: list[Sequence[Place | None]]):
        self.trace, self.hook, self.places = trace, hook, places

    def __call__(self, module: nn.Module, *grads: tuple[Any, ...]) -> Any:
        result = self.hook(module, *grads)
        if result is None or not self.trace.verdicts.due(("module hook", id(self.hook))):
            return result
        path = place(self.trace.observer.parameters.module_names.get(module, ""), module)
        if self._try(path, module, grads) is not Verdict.APART:
            raise MeasurementError(
                f"varreg: a backward hook of {path} changes gradients, and mixes "
                "samples: a sample has no gradient of its own. Change each sample's gradient by "
                "itself."
            )
        return result

    def _try(self, path: str, module: nn.Module, grads: tuple[tuple[Any, ...], ...]) -> Verdict:
        where = [
            (i, k, at)
            for i, places in enumerate(self.places[: len(grads)])
            for k, at in enumerate(places)
            if at is not None and k < len(grads[i]) and isinstance(grads[i][k], Tensor)
        ]
        changed = [(k, at) for i, k, at in where if i == 0]

        def run(given: list[Tensor]) -> list[Tensor]:
            new = [list(g) for g in grads]
            for (i, k, _), t in zip(where, given, strict=True):
                new[i][k] = t
            result = self.hook(module, *map(tuple, new))
            return [result[k] for k, _ in changed]

        given, given_places = [grads[i][k] for i, k, _ in where], [at for *_, at in where]
        if not changed:
            return Verdict.UNDECIDED
        output_places = [at for _, at in changed]
        return _try_hook(self.trace, path, run, given, given_places, output_places)


def _try_hook(
    trace: Trace,
    path: str,
    run: Run,
    grads: list[Tensor],
    places: Sequence[Place],
    output_places: Sequence[Place],
) -> Verdict:
    """Return whether a hook keeps samples apart. If twice the gradient does not give twice the
    result, warn: the gradient of a sample in a batch is a part of that of the sample alone.
    """
    with undisturbed():
        verdict = keeps_apart(run, grads, places, output_places, needs_proof=False)
        if verdict is Verdict.APART:
            once, twice = run(grads), run([2 * g for g in grads])
            if not all(bool(is_close(2 * a, b).all()) for a, b in zip(once, twice, strict=True)):
                trace.observer.notices.unscaled(path)
    return verdict


def check_arriving(
    trace: Trace, t: Tensor, goes_on_apart: Callable[[Tensor], bool], what: str
) -> None:
    """Try the gradient that really arrives at a tensor, and goes on out of sight: a backward of the
    user's may depend on its size. `what` is tried, for the message.
    """
    if trace.batch <= 1 or not t.requires_grad or trace.lets_samples_meet:
        return
    path, waits = trace.observer.forward.path(), True

    def check(grad: Tensor | None) -> None:
        nonlocal waits
        if grad is None or not waits:  # nothing arrives, or the trial itself sent it
            return
        waits = False
        with undisturbed(), gradients_aside(trace.observer.model):
            is_apart = goes_on_apart(grad)
        if not is_apart:
            raise MeasurementError(
                f"varreg: in {path}, {what} mixes samples: a sample has no gradient of its own."
            )

    t.register_hook(check)
