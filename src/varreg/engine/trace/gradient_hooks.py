"""Trials of gradient hooks: when a gradient arrives, test whether a user's hook mixes samples."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from varreg import _torch
from varreg._torch import BackwardHook
from varreg.engine.frames import hooks_being_applied
from varreg.engine.marks import (
    RUNNING,
    mark_constant,
    mark_of,
    marks_of_forward,
    with_marks,
)
from varreg.engine.refusals import describe_module
from varreg.engine.rehearsal.pauses import gradients_aside
from varreg.engine.trace.arguments import results
from varreg.engine.trace.layout import Place
from varreg.engine.trace.trace import UNKNOWNS, Trace
from varreg.engine.trace.trial import Verdict, keeps_apart, undisturbed
from varreg.engine.trace.trial.trial_values import FAILURES, Run, is_close, is_trial_running
from varreg.errors import MeasurementError, VarregError


def register_user_hook(trace: Trace, t: Tensor, hook: Callable[[Tensor], Any]) -> Any:
    """Register a user's hook on a tensor that carries the batch, and return its handle. If the hook
    changes gradients, a trial tests once that it does not mix samples.
    """
    at, path = mark_of(t), trace.observer.forward.path()
    if trace.lets_samples_meet or trace.batch <= 1 or not isinstance(at, Place):
        return t.register_hook(hook)
    there, is_tried, kept = at, False, KeptMarks(trace, t)
    is_multi_grad = getattr(hook, "__module__", "") == torch.autograd.graph.__name__

    def run(given: list[Tensor]) -> list[Tensor]:
        changed = given[0].clone()
        result = hook(changed)
        return [changed if result is None else result]

    def run_and_try(grad: Tensor) -> Any:
        nonlocal is_tried
        watch = Watch(trace, [grad], path)
        result = hook(grad)  # once, as the user expects; the trial calls it again, undisturbed
        is_change = watch.is_written() or not (result is None or result is grad)
        if is_change and not is_tried:
            is_tried = True
            if is_multi_grad:  # it counts its calls, and cannot be tried
                verdict = Verdict.UNDECIDED
            else:
                verdict = _try_hook(trace, path, run, [grad], [there], [there], kept)
            if verdict is not Verdict.APART:
                raise MeasurementError(
                    f"varreg: in {path}, a hook on a tensor changes its gradient, and mixes "
                    "samples: a sample has no gradient of its own. Change each sample's gradient "
                    "by itself."
                )
        return result

    return t.register_hook(run_and_try)


class Watch:
    """Detects writes into gradients by their versions; and now and then by their values, since
    NumPy and `.data` do not change versions.
    """

    def __init__(self, trace: Trace, grads: Sequence[Any], path: str):
        self.grads = [g for g in grads if isinstance(g, Tensor)]
        self.versions = [g._version for g in self.grads]
        is_new = trace.verdicts.is_due(("writes of a hook", path))
        self.values = [g.detach().clone() for g in self.grads] if is_new else []

    def is_written(self) -> bool:
        """Return whether a gradient was written to since the watch began."""
        if any(g._version != v for g, v in zip(self.grads, self.versions, strict=True)):
            return True
        with torch.no_grad(), _torch.DisableTorchFunction():
            return any(
                bool(((g != v) & ~(g.isnan() & v.isnan())).any())
                for g, v in zip(self.grads, self.values, strict=False)
            )


class KeptMarks:
    """The marks of tensors of a forward, kept for a hook that runs after the forward."""

    def __init__(self, trace: Trace, *tensors: Tensor):
        self.trace, self.number = trace, RUNNING.number
        placed = [*trace.observer.forward.inputs, *tensors]  # they lose their marks at the end
        self._marks = [(weakref.ref(t), mark_of(t)) for t in placed]

    def keeps_apart(self, run: Run, grads: list[Tensor], places: Sequence[Place]) -> bool:
        """Run a function of gradients, which may hold tensors of the forward, under the tracer.
        Return whether its results have the samples of these tensors in the given places, and no
        values of the samples left torch.
        """
        tracer, found = self.trace.observer.tracer, [(ref(), at) for ref, at in self._marks]
        known = [(t, at) for t, at in found if t is not None and at is not None]
        copies = [g.detach().clone() for g in grads]
        with (
            marks_of_forward(self.number),
            with_marks(known),
            tracer.following(self.trace.batch) as trace,
        ):
            for t in copies:
                mark_constant(t)
            try:
                marks = [mark_of(t) for t in run(copies)]
            except VarregError:
                return False
            except FAILURES:  # the hook does not accept copies
                return True
        if any(name not in UNKNOWNS for name, *_ in trace.escapes):
            return False
        return all(at is None or at == there for at, there in zip(marks, places, strict=True))


def watch_module_hooks(trace: Trace) -> bool:
    """Arrange a trial of a module's backward hooks, if torch is adding them to the graph. The trial
    is made when a hook changes a gradient. Return whether torch is adding hooks.
    """
    hooks, call = hooks_being_applied()
    if hooks is None:
        return False
    new = iter(call["new_tensors"])
    tensors = [next(new) if isinstance(a, Tensor) else None for a in call["args"]]
    if call["side"] == "setup_input_hook":
        hooks.user_hooks = _watched_hooks(trace, hooks.user_hooks, [_places(tensors)])
    else:
        watch_outputs(trace, hooks, tensors)
    return True


def watch_outputs(trace: Trace, hooks: BackwardHook | None, outputs: Any) -> None:
    """Arrange trials of a module's hooks on the gradients of its outputs."""
    if hooks is None:  # the forward was not called by torch's Module.__call__
        return
    places = _places(results(outputs))
    hooks.user_pre_hooks = _watched_hooks(trace, hooks.user_pre_hooks, [places])
    for hook in hooks.user_hooks:
        if isinstance(hook, _ModuleHook) and len(hook.places) == 1:
            hook.places.append(places)


def _places(tensors: Sequence[Any]) -> list[Place | None]:
    """Return the place of each value; None for values that do not carry the batch."""
    marks = [mark_of(t) if isinstance(t, Tensor) else None for t in tensors]
    return [at if isinstance(at, Place) else None for at in marks]


def _watched_hooks(
    trace: Trace, hooks: Sequence[Any], places: list[Sequence[Place | None]]
) -> list[Any]:
    if trace.lets_samples_meet or trace.batch <= 1:
        return list(hooks)
    kept = KeptMarks(trace)
    return [
        h if isinstance(h, _ModuleHook) else _ModuleHook(trace, h, [*places], kept) for h in hooks
    ]


class _ModuleHook:
    """A backward hook of a module. If it changes gradients, it must not mix samples.

    `places` has the places of the gradients that the hook receives: of the inputs and of the
    outputs, or of the outputs alone.
    """

    def __init__(
        self, trace: Trace, hook: Any, places: list[Sequence[Place | None]], kept: KeptMarks
    ):
        self.trace, self.hook, self.places, self.kept = trace, hook, places, kept

    def __call__(self, module: nn.Module, *grads: tuple[Any, ...]) -> Any:
        path = describe_module(self.trace.observer.parameters.module_names.get(module, ""), module)
        watch = Watch(self.trace, [g for some in grads for g in some], path)
        result = self.hook(module, *grads)
        if result is None and not watch.is_written():
            return result
        if not self.trace.verdicts.is_due(("module hook", id(self.hook))):
            return result
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
                new[i][k] = t.clone()
            result = self.hook(module, *map(tuple, new))
            if result is None:  # it writes into its arguments
                result = new[0]
            result = result if isinstance(result, (tuple, list)) else (result,)
            return [new[0][k] if result[k] is None else result[k] for k, _ in changed]

        given, given_places = [grads[i][k] for i, k, _ in where], [at for *_, at in where]
        if not changed:
            return Verdict.UNDECIDED
        output_places = [at for _, at in changed]
        return _try_hook(self.trace, path, run, given, given_places, output_places, self.kept)


def _try_hook(
    trace: Trace,
    path: str,
    run: Run,
    grads: list[Tensor],
    places: Sequence[Place],
    output_places: Sequence[Place],
    kept: KeptMarks,
) -> Verdict:
    """Return whether a hook keeps samples apart. If twice the gradient does not give twice the
    result, warn: a sample has a smaller gradient in a batch than alone.

    A hook may hold tensors of the forward. So it also runs once under the tracer, with gradients as
    constants: where its result depends on these tensors, each sample must be in its place.
    """
    with undisturbed():
        if not kept.keeps_apart(run, grads, output_places):
            return Verdict.MIXED
        verdict = keeps_apart(run, grads, places, output_places, needs_proof=False)
        if verdict is Verdict.APART:
            once, twice = run(grads), run([2 * g for g in grads])
            if not all(bool(is_close(2 * a, b).all()) for a, b in zip(once, twice, strict=True)):
                trace.observer.notices.unscaled(path)
    return verdict


def check_arriving(
    trace: Trace, t: Tensor, is_separate: Callable[[Tensor], bool], what: str
) -> None:
    """Test a backward that the tracer does not see, once, with the gradient that arrives at a
    tensor: what it does may depend on the size of the gradient. `what` names it in the message.
    """
    if trace.batch <= 1 or not t.requires_grad or trace.lets_samples_meet:
        return
    path, is_due = trace.observer.forward.path(), True

    def check(grad: Tensor | None) -> None:
        nonlocal is_due
        # no gradient arrived, or a trial sent it: this trial, or that of another hook
        if grad is None or not is_due or is_trial_running():
            return
        is_due = False
        with undisturbed(), gradients_aside(trace.observer.model):
            is_apart = is_separate(grad)
        if not is_apart:
            raise MeasurementError(
                f"varreg: in {path}, {what} mixes samples: a sample has no gradient of its own."
            )

    t.register_hook(check)
