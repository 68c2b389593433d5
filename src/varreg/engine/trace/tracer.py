"""The tracer: sees every call of a torch function in an observed forward, and chooses how it runs.

`Tracer.run_new` sorts calls by kind. `decide.py` then decides where the results of a call carry the
batch: it knows the function, tries it, or refuses the result.

There are three kinds of tensors: tensors that carry the batch (`layout.py` says where), tensors
made of parameters alone (a reparametrized weight, a position embedding before it is added), and
constants. A call that takes one of the first and one of the second kind is a *use*. Per-sample
gradients arise at uses, and nowhere else. A mechanism measures each use (`mechanisms/`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from varreg import _torch
from varreg.engine.mechanisms import by_rule, choose
from varreg.engine.refusals import refuse_batch_norm
from varreg.engine.trace import checkpoints
from varreg.engine.trace.arguments import results, tensors_in
from varreg.engine.trace.call import Call
from varreg.engine.trace.decide import place_result
from varreg.engine.trace.eager import runs_as_it_is
from varreg.engine.trace.functions import (
    CALLBACKS,
    CREATORS,
    DETACH,
    ESCAPES,
    RESHAPERS,
    WRITERS,
)
from varreg.engine.trace.gradient_hooks import register_user_hook
from varreg.engine.trace.plans import Key, Plan, key_of
from varreg.engine.trace.results import mark_results
from varreg.engine.trace.saved_hooks import try_saved_hooks
from varreg.engine.trace.sorting import hides_samples, sort_tensors
from varreg.engine.trace.trace import Trace
from varreg.engine.trace.trial import Verdicts
from varreg.engine.trace.unseen import hand_out
from varreg.engine.trace.values_out import (
    is_size_of_sequences,
    lets_values_out,
    mark_constants,
    may_count_samples,
    note_failure,
    read_positions,
    run_callback,
)
from varreg.engine.trace.writes import (
    lose_written,
    mark_written,
    note_alias,
    write,
    writes_parameter,
)

if TYPE_CHECKING:
    from varreg.engine.observer import Observer


GRAD_FN = Tensor.grad_fn.__get__  # type: ignore[union-attr]


class Tracer(TorchFunctionMode):
    """Follows the batch through the forward passes of one observed model."""

    def __init__(self, observer: Observer):
        super().__init__()
        self.observer = observer
        self.verdicts = Verdicts()
        self.plans: dict[Key, Plan] = {}
        self.trace = Trace(observer, self.verdicts)
        self._split: Any = None  # groups, rank and world that the plans were made for

    # ---- a forward -------------------------------------------------------------------------------

    def begin(self, batch: int) -> Trace:
        """Return the state of a new forward of `batch` samples. `__enter__` begins the trace."""
        split = self.observer.grouping.key
        if split != self._split:  # plans depend on how batches are split
            self.plans.clear()
            self._split = split
        self.trace = Trace(self.observer, self.verdicts, batch)
        return self.trace

    def end(self) -> None:
        """End the trace. The state of the forward stays until the next one."""
        self.trace.lookups, self.trace.aliases = {}, {}
        self.__exit__(None, None, None)

    def resume(self, batch: int) -> None:
        """Trace a part of a forward of `batch` samples that a checkpoint runs again."""
        self.trace = self.trace.resumed(batch)
        if not any(mode is self for mode in _torch.mode_stack()):
            self.__enter__()

    @contextlib.contextmanager
    def following(self, batch: int) -> Iterator[Trace]:
        """Follow the batch through a hook of a forward of `batch` samples."""
        before, self.trace = self.trace, self.trace.resumed(batch)
        try:
            with self:
                yield self.trace
        finally:
            self.trace = before

    # ---- a call ----------------------------------------------------------------------------------

    @runs_as_it_is
    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a call: by the plan of its key if there is one, else as a new call."""
        if is_dynamo_compiling() or _torch.get_eval_frame_callback() is not None:
            return _run_uncompiled(self, func, types, args, kwargs)
        key, kwargs = None, kwargs or {}
        try:
            if torch.is_grad_enabled() and not self.trace.rewritten:
                parameters = self.observer.parameters
                key, tensors, ledgers = key_of(func, args, kwargs, parameters.ledger)
                plan = None if key is None else self.plans.get(key)
                if plan is not None:
                    if plan.use is not None:
                        out = by_rule.replay(self.trace, plan, func, args, kwargs, tensors, ledgers)
                        if out is not None:
                            return out
                    else:
                        out = func(*args, **kwargs)
                        if plan.fits(out):
                            plan.mark((out,) if isinstance(out, Tensor) else out)
                        else:
                            self._mark_again(Call(func, args, kwargs), out)
                        return out
            return self.run_new(func, args, kwargs, key)
        except Exception as error:
            note_failure(self.trace, func, args, kwargs, error)
            raise

    def _mark_again(self, call: Call, out: Any) -> None:
        """Mark results whose shapes differ from those in the plan of the call."""
        sort_tensors(self.trace, call)
        self.trace.mark_each(out, lambda t, i: place_result(self.trace, call, t, i))

    def run_new(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], key: Key | None = None
    ) -> Any:
        """Run a call that has no plan yet, and return its result. If the call has a key, make a
        plan for all calls with that key, if one plan can serve them all.

        Under a transform of `torch.func` (vmap, grad) inside of the forward, a call that uses
        parameters is refused here. Of other calls under a transform, only the result is followed,
        as a tensor of unknown origin (`unseen.py`). `refusals.refuse_transform` refuses a transform
        of the whole model.
        """
        trace, call = self.trace, Call(func, args, kwargs, key=key)
        if hides_samples(args):
            trace.escape(func)
        if _torch.dispatch_modes() and has_foreign_mode():
            trace.escape("a torch dispatch mode")
        if func in CREATORS and not tensors_in(args[1:], call.kwargs):
            return mark_constants(call.run())
        if func is torch.broadcast_tensors:  # each result is made of one argument alone
            sizes = torch.broadcast_shapes(*(t.shape for t in call.tensors()))
            return tuple(self.run_new(Tensor.expand, (t, sizes), {}) for t in call.tensors())
        sort_tensors(trace, call)
        if call.lost:
            read_positions(trace, call)
        if func in DETACH:
            note_alias(trace, args[0])
        if not (call.parameters or call.depends_on_batch):
            return mark_constants(call.run())
        if call.carriers:
            try_saved_hooks(trace, call)
            trace.is_counted = trace.is_counted or may_count_samples(trace, call)
            if func is Tensor.register_hook:
                return register_user_hook(trace, *args, **kwargs)
            if func == GRAD_FN:
                return hand_out(trace, args[0])
        if call.parameters and checkpoints.are_possible():
            checkpoints.note(self.observer)
        if call.parameters and not call.depends_on_batch and checkpoints.is_reentrant():
            trace.expect(call.parameters)  # the second run uses the tensors made here
        if func in ESCAPES:
            out = call.run()
            if call.depends_on_batch and not is_size_of_sequences(trace, call):
                trace.escape(func, out)
            return mark_constants(out)
        if func is F.batch_norm and (call.carriers or call.lost):
            refuse_batch_norm(self.observer, args, kwargs)
        if call.parameters and _torch.is_transform_active():
            trace.refuse(call, "it runs under a torch.func transform (vmap, grad, jvp)")
        if call.depends_on_batch:
            if func in CALLBACKS:
                return run_callback(trace, call)
            if writes_parameter(trace, call):
                return lose_written(trace, call)
            if call.parameters:
                return choose.measure(self, call)
            if func in WRITERS or func in RESHAPERS:
                return write(trace, call)
        return self._follow(call)

    def _follow(self, call: Call) -> Any:
        """Run a call without a use, mark its results, and return them."""
        trace, out = self.trace, call.run()
        if lets_values_out(trace, call, out):
            trace.escape(call.function)
        if any(isinstance(t, Tensor) for t in results(out)):
            mark_results(trace, self.plans, call, out)
        if call.depends_on_batch:
            mark_written(trace, call)
        return out


# the same method with the compiler switched off
_run_uncompiled = _torch.disable_dynamo(Tracer.__torch_function__)


def has_foreign_mode() -> bool:
    """Return whether a mode of the user is active, for torch functions or for the dispatcher. Such
    a mode may change the results of functions.
    """
    return any(
        type(mode).__module__.partition(".")[0] not in ("torch", "varreg")
        for mode in (*_torch.mode_stack(), *_torch.dispatch_mode_stack())
    )


def is_tracing() -> bool:
    """Return whether this thread traces the forward of any observed model."""
    return _torch.len_mode_stack() > 0 and any(
        isinstance(mode, Tracer) for mode in _torch.mode_stack()
    )
