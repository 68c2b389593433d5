"""The hooks of an observed model while torch.compile captures it: the observed forward joins the
graph, or breaks it.

torch.compile traces these functions in place of the eager hooks. They mark the beginning and the
end of the observed forward in the graph, and make sure that the graph is rewritten before it is
compiled.

torch.compile guards each object and attribute that it reads here, before each later call. So the
hooks of the many modules inside of the model read as little as possible: the guards of the model's
own hook hold for all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from varreg import _torch
from varreg.engine import processes

if TYPE_CHECKING:
    from varreg.engine.forward import Hook
    from varreg.engine.observer import Observer

_PLAIN = (int, float, bool, str, type(None))


def enter(hook: Hook, module: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Mark the beginning of an observed forward in the graph. Return whether it can join."""
    if not hook.is_root and torch.is_grad_enabled():
        return _tensors_of((args, kwargs)) is not None and hook.is_inside()
    if hook.observer is None:
        return True
    graphs = hook.observer.graphs
    if not graphs.can_join:
        return False
    if not torch.is_grad_enabled():
        return True  # there is nothing to measure
    inputs = _tensors_of((args, kwargs))
    if inputs is None or not graphs.enter(hook.is_root):
        return False
    if hook.is_root:
        torch.ops.varreg.enter(inputs, graphs.token)
    return True


def leave(hook: Hook, module: Any, args: Any, kwargs: dict[str, Any], output: Any = None) -> bool:
    """Mark the end of an observed forward in the graph. Return whether it has joined."""
    if not hook.is_root and torch.is_grad_enabled():
        return _tensors_of(output) is not None and hook.is_inside()
    if hook.observer is None:
        return True
    graphs = hook.observer.graphs
    if not graphs.can_join:
        return False
    if not torch.is_grad_enabled():
        return True
    outputs = _tensors_of(output)
    if outputs is None or not graphs.leave(hook.is_root):
        return False
    if hook.is_root:
        torch.ops.varreg.leave(outputs)
    return True


@_torch.runs_while_compiling
def is_inside(hook: Hook) -> bool:
    """Return whether a module's forward is inside of an observed forward that has joined the graph
    which torch.compile captures now.
    """
    if hook.observer is None:
        return True
    output, graphs = _torch.graph_in_capture(), hook.observer.graphs
    return graphs.can_join and output is not None and vars(output).get(_INSIDE) is graphs


def _tensors_of(tree: Any) -> list[Tensor] | None:
    """Return the tensors in plain sequences and mappings; None if there may be tensors
    elsewhere.
    """
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, _PLAIN):
        return []
    values = tree.values() if isinstance(tree, dict) else tree
    if not isinstance(tree, (list, tuple, dict)):
        return None
    found: list[Tensor] = []
    for value in values:
        tensors = _tensors_of(value)
        if tensors is None:
            return None
        found += tensors
    return found


class Graphs:
    """Decides whether the forward of one observed model joins graphs of torch.compile."""

    def __init__(self, observer: Observer):
        self.observer = observer
        self.can_join = True
        """A guard: torch.compile compiles again when this changes."""
        self.token = torch.zeros((), dtype=torch.int64)
        """An input of the graph. Each call of the compiled graph passes a token of its own in its
        place.
        """

    def give_up(self) -> None:
        """Run the observed forward eagerly from now on, since a graph cannot contain it."""
        self.can_join = False

    @_torch.runs_while_compiling
    def enter(self, is_root: bool) -> bool:
        """Return whether a module's forward is inside of an observed forward that has joined the
        graph. The forward of the model itself joins the graph now.
        """
        output = _torch.graph_in_capture()
        if output is None:
            return False
        if not is_root:
            return vars(output).get(_INSIDE) is self
        from varreg.engine.compiled.graph import compile_observed
        from varreg.engine.mechanisms.by_module import MODULE_RULES
        from varreg.engine.trace.tracer import is_tracing

        if _INSIDE in vars(output) or is_tracing() or processes.are_several():
            return False
        if self.observer.batch_norm != "refuse":  # graphs do not measure contributions
            return False
        if any(type(m) in MODULE_RULES for m in self.observer.model.modules()):
            return False
        if _has_hooks(self.observer.model):
            return False
        vars(output)[_INSIDE] = self
        _torch.replace_compiler(output, compile_observed(self.observer))
        return True

    @_torch.runs_while_compiling
    def leave(self, is_root: bool) -> bool:
        """Return whether a module's forward was inside of an observed forward that has joined the
        graph. The forward of the model itself ends now.
        """
        output = _torch.graph_in_capture()
        if output is None or vars(output).get(_INSIDE) is not self:
            return False
        if is_root:
            vars(output)[_INSIDE] = None
        return True


def _has_hooks(model: nn.Module) -> bool:
    """Return whether a module has hooks of others that may change outputs or gradients. Only the
    eager forward can watch them.
    """
    if _torch.has_global_hooks() or len(model._forward_hooks) > 1:
        return True
    return any(m._backward_hooks or m._backward_pre_hooks for m in model.modules())


_INSIDE = "_varreg_inside"
"""The attribute of a captured graph that names the observed model whose forward it is in."""
