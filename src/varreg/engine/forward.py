"""The forward of an observed model: hooks before and after each module, and its running state."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from varreg import _torch
from varreg._torch import get_eval_frame_callback
from varreg.engine import processes
from varreg.engine.compiled import join
from varreg.engine.frames import is_on_stack
from varreg.engine.inputs_outputs import Outputs, place_inputs, refuse_inputs
from varreg.engine.marks import begin_forward, mark, mark_of
from varreg.engine.mechanisms import by_module
from varreg.engine.partition import Partition
from varreg.engine.refusals import TRACEABLE, describe_module, refuse_transform
from varreg.engine.trace.arguments import tensors_of
from varreg.engine.trace.eager import runs_as_it_is, uncompiled
from varreg.engine.trace.layout import Place
from varreg.engine.trace.tracer import has_foreign_mode, is_tracing
from varreg.engine.trace.unseen import check_input

if TYPE_CHECKING:
    from varreg.engine.observer import Observer

# ---- the hooks -----------------------------------------------------------------------------------


class Hook:
    """A hook of an observer, on a module with parameters. A copy of the model, by deepcopy or
    pickle, has a hook that does nothing: the copy is not observed.
    """

    def __init__(self, observer: Observer | None = None, is_root: bool = False):
        self.observer, self.is_root = observer, is_root

    def __getattr__(self, name: str) -> Any:
        # TorchScript asks a hook for its name
        if name == "__name__" and self.__dict__.get("observer") is not None:
            raise AttributeError(
                f"varreg: {describe_module('', self.__dict__['observer'].model)} is observed, and "
                "torch.jit.script cannot compile an observed model. Call remove() on the observer "
                "first, or use copy.deepcopy(model), which is not observed."
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    is_inside = join.is_inside

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


class Enter(Hook):
    """Called before a module's forward."""

    @runs_as_it_is
    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if is_dynamo_compiling() or get_eval_frame_callback() is not None:
            _enter_uncompiled(self, module, args, kwargs)
        elif self.observer is not None:
            self.observer.forward.enter(module, args, kwargs)


class Leave(Hook):
    """Called after a module's forward, even when that raised."""

    @runs_as_it_is
    def __call__(
        self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any = None
    ) -> Any:
        if is_dynamo_compiling() or get_eval_frame_callback() is not None:
            return _leave_uncompiled(self, module, args, kwargs, output)
        if self.observer is None:
            return None
        return self.observer.forward.leave(module, args, kwargs, output)


_enter_uncompiled = uncompiled(Enter.__call__, join.enter)
_leave_uncompiled = uncompiled(Leave.__call__, join.leave)


def make_traceable_call(module: nn.Module) -> Callable[..., Any]:
    """Return a function that calls a module with its hooks, and that torch.compile can trace.

    `torch.compile(module)` would call the hooks, and then trace `forward` alone. This function, the
    module's `_compiled_call_impl`, is traced in its place. Copies of the module do not have it.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    call.__code__ = call.__code__.replace()  # torch stores compiled code by code object
    vars(call)[TRACEABLE] = True
    return call


# ---- the forward ---------------------------------------------------------------------------------


class Forward:
    """The forward of an observed model. Hooks call `enter` and `leave` for each module."""

    def __init__(self, observer: Observer):
        self.observer = observer
        self.number = 0  # number of the running or last forward; 0 if a checkpoint repeats it
        self._numbers = itertools.count(1)
        self._outputs = Outputs(observer)
        self.run = Run()

    @property
    def inputs(self) -> list[Tensor]:
        """Return the inputs of the forward that is traced."""
        return self.run.inputs or []

    def path(self) -> str:
        """Return the path of the module whose forward is running, with its type."""
        module = self.run.modules[-1] if self.run.modules else self.observer.model
        return describe_module(self._name_of(module), module)

    def _name_of(self, module: nn.Module) -> str:
        return self.observer.parameters.module_names.get(module, "")

    def modules_around(self, inside: list[nn.Module]) -> list[nn.Module]:
        """Return the modules whose forward is running, without the innermost ones given."""
        modules = list(self.run.modules)
        for module in inside:
            if modules and modules[-1] is module:
                modules.pop()
        return modules

    # ---- hooks -----------------------------------------------------------------------------------

    def enter(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Begin a module's forward. The forward of the outermost module also begins a trace."""
        run, grad = self.run, torch.is_grad_enabled()
        if run.modules and module is run.modules[0] and not is_on_stack(run.frame):
            self.reset()  # an earlier forward was interrupted before our second hook
            run = self.run
        if not run.modules:
            run.frame = _calling_frame()
            if grad:
                self._begin(module, args, kwargs)
        elif not grad and run.inputs is not None:
            # a re-entrant checkpoint runs it without gradients now, and again in the backward
            with _torch.DisableTorchFunction():
                marks = [mark_of(t) for t in tensors_of((args, kwargs))]
            self.observer.window.recalled.setdefault(module, []).append(marks)
        run.modules.append(module)
        if (
            grad
            and type(module) in by_module.MODULE_RULES
            and run.inputs is not None
            and run.detached is None
        ):
            run.detached = module, by_module.detach_own(module)
            self.observer.tracer.__exit__(None, None, None)

    def leave(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """End a module's forward; if it failed, `output` is None. Return the output that replaces
        `output`, or None to leave it.
        """
        run, result = self.run, None
        if not run.modules or run.modules[-1] is not module:
            return None  # another hook raised before our first hook was called
        try:
            if run.detached is not None and run.detached[0] is module:
                parameters, run.detached = run.detached[1], None
                by_module.restore_own(module, parameters)
                self.observer.tracer.__enter__()
                if output is not None:
                    name = self._name_of(module)
                    with _torch.DisableTorchFunction():
                        result = output = by_module.use_rule(
                            self.observer, name, module, parameters, args, kwargs, output
                        )
        finally:
            run.modules.pop()
            if not run.modules:
                run.frame = None
                if run.inputs is not None:
                    self._end(module, args, kwargs, output)
        return result

    def _begin(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        observer, window = self.observer, self.observer.window
        if is_transformed():
            refuse_transform(observer.model)
        if not isinstance(next(reversed(module._forward_hooks.values())), Leave):
            observer.move_hook_last(module)
        # inside of a backward, a checkpoint runs this module again
        is_recomputation = _torch.current_graph_task() != -1
        if is_recomputation:
            window.queue()
            self.number = 0
        else:
            self.start()
        if processes.are_several():
            processes.attach(observer)
        if not is_tracing():
            begin_forward()
        inputs = tensors_of((args, kwargs))
        refuse_inputs(inputs, self.path)
        recalled = window.recalled.get(module) if is_recomputation else None
        marks: list[Any] = recalled.pop() if recalled else []
        if marks and len(marks) == len(inputs):
            batch = next((where.batch for where in marks if isinstance(where, Place)), 0)
        else:
            batch, marks, self.run.is_certain = place_inputs(
                inputs, args, kwargs, observer.batch_dim, observer.parameters.ledger
            )
        trace = observer.tracer.begin(batch)
        for t, where in zip(inputs, marks, strict=True):
            if where is not None:
                if not (is_recomputation or t.grad_fn is None):  # from an earlier forward
                    where = check_input(trace, t, where)
                mark(t, where)
        self.run.inputs = inputs
        if (_torch.len_mode_stack() or _torch.dispatch_modes()) and has_foreign_mode():
            trace.escape("a torch function mode, or a dispatch mode, around the model")
        if not is_recomputation:
            if module is not observer.model:
                where = describe_module(self._name_of(module), module)
                observer.notices.outside(where, observer.batch_dim, batch)
            if batch:
                window.last_partition = observer.grouping.partition(batch)
        observer.tracer.__enter__()

    def start(self, partition: Partition | None = None) -> None:
        """Begin a forward that is no recomputation, of a batch with this partition."""
        window = self.observer.window
        if window.is_open:  # an earlier backward failed and never closed its window
            window.abort()
        self.number = next(self._numbers)
        self.observer.parameters.release()
        if partition is not None:
            window.last_partition = partition

    def _end(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        inputs, self.run.inputs = self.run.inputs or [], None
        self.observer.tracer.end()
        if is_tracing():  # an observed model around this one continues the trace
            return
        self._outputs.check(module, args, kwargs, inputs, output, self.run.is_certain)

    def restore_detached(self) -> None:
        """Restore the parameters of a module with a registered rule."""
        if self.run.detached is not None:
            by_module.restore_own(*self.run.detached)

    def reset(self) -> None:
        """Drop the state of a forward that never ended."""
        self.restore_detached()
        tracer = self.observer.tracer
        while any(mode is tracer for mode in _torch.mode_stack()):
            _torch.pop_mode()
        self.run = Run()


def is_transformed() -> bool:
    """Return whether an export, a trace or a transform runs the model, and not training."""
    return (
        torch.compiler.is_exporting()
        or _torch.jit_tracing_state() is not None
        or _torch.forward_ad._current_level >= 0
        or _torch.is_transform_active()
    )


class Run(threading.local):
    """The state of the running forward, in each thread."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []  # modules whose forward is running, outermost first
        self.frame: Any = None  # the Python frame of the outermost module's call
        self.inputs: list[Tensor] | None = None  # inputs of the traced forward; None outside of it
        self.is_certain = True  # True: all inputs agree about the size of the batch
        # a running module with a registered rule, and its parameters, which are detached meanwhile
        self.detached: tuple[nn.Module, dict[str, nn.Parameter]] | None = None


def _calling_frame() -> Any:
    """Return the Python frame of the module call whose hook is running.

    An interrupted forward (by Ctrl-C, or by an error in another hook) never calls our second hook.
    The forward was interrupted if this frame is no longer on the interpreter's stack.
    """
    here: Any = sys._getframe(1)
    while here is not None and here.f_code is not _torch.MODULE_CALL:
        here = here.f_back
    return here
