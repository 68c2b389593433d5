"""Functions that an activation checkpoint runs again in the backward pass.

A checkpoint drops the tensors that a function saved for backward, and runs the function again when
they are needed. The engine must treat the second run like the first one: the same nodes, in the
same order, with the batch in the same places. If a module is checkpointed, its hooks call the
engine. If a function or method that uses parameters directly is checkpointed, no hook does. So the
first use of a parameter searches the stack of calls for a checkpoint, and replaces the checkpointed
function by `_SecondRun`, which traces the second run.

`_hooks` and `_held` depend on private parts of torch, which may change in another version.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from varreg import _torch
from varreg.engine.marks import (
    DERIVED,
    RUNNING,
    Derived,
    mark,
    mark_of,
    marks_of_forward,
    unmark,
)
from varreg.engine.trace.arguments import tensors_of
from varreg.engine.trace.layout import Where
from varreg.errors import VarregError

if TYPE_CHECKING:
    from varreg.engine.observer import Observer

Mark = Where | Derived | None

_CHECKPOINTS = vars(torch.utils.checkpoint)
_REENTRANT = torch.utils.checkpoint.CheckpointFunction.forward.__code__
_MODULE = _torch.MODULE_CALL
# If this version of torch cannot return the hooks on saved tensors, every use of a parameter
# searches for a checkpoint.
_hooks = _torch.saved_tensors_hooks


def are_possible() -> bool:
    """Return whether a checkpoint may be running. A checkpoint that is not re-entrant hooks saved
    tensors; a re-entrant one runs without gradients.
    """
    return _hooks is None or _hooks(True) is not None or not torch.is_grad_enabled()


def is_reentrant() -> bool:
    """Return whether this is the first run of a re-entrant checkpoint."""
    if torch.is_grad_enabled():
        return False
    return any(call.f_code is _REENTRANT for call in _calls())


def note(observer: Observer) -> None:
    """Note that a parameter is used. If checkpoints run this code, make sure that their second runs
    are traced like this one.
    """
    if _is_noted(observer):
        return
    inside: list[nn.Module] = []
    for call in _calls():
        if call.f_code is _MODULE:
            inside.append(call.f_locals["self"])
            continue
        around = observer.forward.modules_around(inside)
        if not around:
            return  # the whole forward will run again, and its hooks will start the trace
        held = _held(call)
        if held is not None:
            _wrap(held, observer, around)
        elif len(around) == len(observer.forward.modules_around([])):
            # otherwise, the hooks of a module in between will trace the second run
            raise VarregError(
                f"varreg: in {observer.forward.path()}, a checkpointed function uses a parameter, "
                f"and varreg does not know how torch {torch.__version__} runs it again. Move the "
                "function and its parameters into a module of their own, and checkpoint that."
            )


class _Held(NamedTuple):
    """The object in which a checkpoint keeps the function that it will run again, with the name of
    the attribute, and the arguments of the function.
    """

    holder: Any
    name: str
    args: tuple[Any, ...]

    @property
    def is_reentrant(self) -> bool:
        return self.name == "run_function"


def _held(call: FrameType) -> _Held | None:
    """Return the function that a call in `torch.utils.checkpoint` will run again; None if the call
    does not have the expected variables.
    """
    held = call.f_locals
    try:
        if call.f_code is _REENTRANT:
            found = _Held(held["ctx"], "run_function", held["args"])
        else:
            generator, args = held["gen"], held["args"]
            # torch 2.8 passes the keyword arguments as the first argument
            if "kwargs" not in generator.gi_code.co_cellvars:
                args = (held["kwargs"], *args)
            frame = generator.gi_frame.f_locals["new_frame"]
            found = _Held(frame, "recompute_fn", args)
        return found if callable(getattr(found.holder, found.name)) else None
    except (AttributeError, KeyError):
        return None


def _is_noted(observer: Observer) -> bool:
    """Return whether the innermost checkpoint was found before, and with it all checkpoints around
    it.
    """
    hooks = _hooks(True) if _hooks is not None and torch.is_grad_enabled() else None
    if hooks is None:
        return False
    closure = getattr(hooks[0], "__closure__", None) or ()
    if not closure:
        return False
    cells = dict(zip(hooks[0].__code__.co_freevars, closure, strict=True))
    if "target_frame_ref" in cells:
        return True  # this is the second run
    frame = cells["frame"].cell_contents if "frame" in cells else None
    return _is_wrapped(getattr(frame, "recompute_fn", None), observer)


def _is_wrapped(function: Any, observer: Observer) -> bool:
    while isinstance(function, _SecondRun):
        if function.observer is observer:
            return True
        function = function.function
    return False


def _calls() -> Iterator[FrameType]:
    """Yield the running calls of modules and checkpoints, innermost first."""
    call: FrameType | None = sys._getframe(1)
    while call is not None:
        code = call.f_code
        if code is _MODULE or code is _REENTRANT or _is_plain(call):
            yield call
        call = call.f_back


def _is_plain(call: FrameType) -> bool:
    """Return whether it is a call of `checkpoint` that is not re-entrant."""
    if call.f_globals is not _CHECKPOINTS or call.f_code.co_name != _torch.PLAIN_CHECKPOINT:
        return False
    held = call.f_locals
    # `_calls` finds a re-entrant one by `_REENTRANT`; while `gen` runs, the function has not begun
    # yet
    return not held.get("use_reentrant") and not getattr(held.get("gen"), "gi_running", False)


def _wrap(held: _Held, observer: Observer, around: list[nn.Module]) -> None:
    function = getattr(held.holder, held.name)
    if _is_wrapped(function, observer):
        return
    if held.is_reentrant:
        _refuse_parameters(observer, held.args)
    setattr(held.holder, held.name, _SecondRun(function, observer, around, held.args))


def _refuse_parameters(observer: Observer, args: tuple[Any, ...]) -> None:
    """Refuse parameters as arguments of a re-entrant checkpoint. It detaches its arguments and
    returns their gradients as sums over samples.
    """
    ours = [t for t in args if isinstance(t, Tensor) and t.requires_grad]
    if made := [t for t in ours if _mark(observer, t) is DERIVED]:
        raise VarregError(
            f"varreg: in {observer.forward.path()}, a re-entrant checkpoint is given "
            f"{observer.tracer.trace.names(made)} as an argument, and would return its gradient "
            "as a sum, without the contribution of each sample. Use use_reentrant=False, or let "
            "the function itself take the parameter from the module."
        )


def _mark(observer: Observer, t: Tensor) -> Mark:
    return DERIVED if observer.parameters.ledger(t) else mark_of(t)


class _SecondRun:
    """Runs a checkpointed function in the backward pass, traced as it was in the forward pass."""

    def __init__(
        self,
        function: Callable[..., Any],
        observer: Observer,
        around: list[nn.Module],
        args: tuple[Any, ...],
    ):
        self.function, self.observer, self.around = function, observer, around
        self.marking_forward, self.batch, self.forward = (
            RUNNING.number,
            observer.tracer.trace.batch,
            observer.forward.number,
        )
        self.marks = [_mark(observer, t) for t in tensors_of(args)]
        # The end of the forward removes these marks. Weak references suffice: code that needs an
        # input holds it.
        self.inputs = [(weakref.ref(t), mark_of(t)) for t in observer.forward.inputs]

    def __call__(self, *args: Any) -> Any:
        with marks_of_forward(self.marking_forward):
            marked = self._mark(args)
            try:
                here = sys._getframe()
                with self._resumed(here):
                    return self.function(*args)
            finally:
                for t in marked:
                    unmark(t)

    @contextlib.contextmanager
    def _resumed(self, frame: FrameType) -> Iterator[None]:
        """Trace a part of the forward that runs again in the call `frame`, inside of the `with`
        block.
        """
        forward, tracer = self.observer.forward, self.observer.tracer
        run, depth = forward.run, _torch.len_mode_stack()
        kept, state, before = dict(vars(run)), tracer.trace, forward.number
        forward.number = self.forward
        if _torch.current_graph_task() != -1:
            self.observer.window.queue()
        vars(run).update(modules=list(self.around), frame=frame, inputs=[], detached=None)
        try:
            tracer.resume(self.batch)
            yield
        finally:
            forward.restore_detached()
            while _torch.len_mode_stack() > depth:
                _torch.pop_mode()
            tracer.trace, forward.number = state, before
            vars(run).update(kept)

    def _mark(self, args: tuple[Any, ...]) -> list[Tensor]:
        """Mark the arguments as in the forward, and the inputs of the model. Return the marked
        inputs.
        """
        for t, where in zip(tensors_of(args), self.marks, strict=True):
            if where is not None and not self.observer.parameters.ledger(t):
                mark(t, where)
        marked = []
        for ref, where in self.inputs:
            x = ref()
            if x is not None and where is not None and mark_of(x) is None:
                mark(x, where)
                marked.append(x)
        return marked
