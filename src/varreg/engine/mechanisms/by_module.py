"""By a module's own rule: users register rules for layers of their own.

The module runs without the tracer and with its parameters detached, and a node computes their
gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from varreg.engine.contribution import Dense
from varreg.engine.marks import mark, mark_of
from varreg.engine.mechanisms.node import (
    Node,
    Recipient,
    measuring,
    pass_on,
    rounding_of,
    saved_tensors,
    take,
)
from varreg.engine.mechanisms.pull_back import autocast_rounding
from varreg.engine.partition import Partition
from varreg.engine.refusals import describe_module
from varreg.engine.trace.layout import Layout, Place
from varreg.errors import VarregError

if TYPE_CHECKING:
    from varreg.engine.observer import Observer

ModuleRule = Callable[..., dict[str, Tensor]]
MODULE_RULES: dict[type[nn.Module], ModuleRule] = {}


def register_rule(module_type: type[nn.Module]) -> Callable[[ModuleRule], ModuleRule]:
    """Decorate a function that returns the contribution of each sample to the gradients of a
    module's own parameters.

    The rule gets the module, the gradient of its output and its inputs, all with the batch in
    dimension 0. It returns a dict with a tensor `[batch, *parameter.shape]` for the name of each
    parameter, whose sum over the batch is the gradient. Most modules need no rule: the engine
    follows their operations. A rule is for a module that hides its operations (in a custom
    `torch.autograd.Function`, or a compiled kernel), or for more speed.

    Args:
        module_type: The type of the modules. The rule is not used for its subclasses.

    >>> import torch, varreg
    >>> class Scale(torch.nn.Module):
    ...     def __init__(self, features):
    ...         super().__init__()
    ...         self.weight = torch.nn.Parameter(torch.ones(features))
    ...     def forward(self, x):
    ...         return x * self.weight
    >>> @varreg.register_rule(Scale)
    ... def scale_rule(module, dy, x):
    ...     return {"weight": dy * x}
    >>> model = Scale(2)
    >>> observer = varreg.observe(model)
    >>> model(torch.tensor([[1.0, 2.0], [3.0, 2.0]])).sum(1).mean().backward()
    >>> varreg.moments(model.weight).variance.tolist()
    [1.0, 0.0]

    """
    if not (isinstance(module_type, type) and issubclass(module_type, nn.Module)):
        raise VarregError(
            f"varreg: register_rule expects a subclass of torch.nn.Module, got {module_type!r}."
        )

    def add(rule: ModuleRule) -> ModuleRule:
        if not callable(rule):
            raise VarregError(
                "varreg: register_rule expects a function of the module, the gradient of its "
                f"output and its inputs; got {rule!r:.60}."
            )
        MODULE_RULES[module_type] = rule
        return rule

    return add


# ---- forward -------------------------------------------------------------------------------------


def detach_own(module: nn.Module) -> dict[str, nn.Parameter]:
    """Detach a module's own parameters, while its forward runs; return them."""
    if any(p.requires_grad for child in module.children() for p in child.parameters()):
        raise VarregError(
            f"varreg: the rule for {type(module).__name__} is for its own parameters, but it has "
            "submodules with parameters. Register rules for those instead, or move the hidden "
            "operation into a submodule of its own."
        )
    own: dict[str, Any] = {n: p for n, p in module._parameters.items() if p is not None}
    for name, p in own.items():
        module._parameters[name] = p.detach()
    return own


def restore_own(module: nn.Module, own: dict[str, nn.Parameter]) -> None:
    """Put a module's own parameters back."""
    module._parameters.update(own)


def use_rule(
    observer: Observer,
    name: str,
    module: nn.Module,
    own: dict[str, nn.Parameter],
    args: Any,
    kwargs: dict[str, Any],
    output: Any,
) -> Tensor:
    """Return the output of a module whose parameters were detached, with a node that computes their
    gradients by the registered rule.
    """
    trace, kind = observer.tracer.trace, type(module).__name__
    batch = trace.batch
    inputs = [a for a in args if isinstance(a, Tensor)]
    _check_batch(describe_module(name, module), batch, inputs, output)
    wanted = {n: p for n, p in own.items() if observer.parameters.ledger(p)}
    if not wanted:
        mark(output, Layout(batch))
        return output  # type: ignore[no-any-return]
    run = _Run(module, args, kwargs, wanted, observer.grouping.partition(batch))
    recipients = [trace.recipient(p, f"{kind} (registered)") for p in wanted.values()]
    used: Tensor = ModuleNode.apply(run, recipients, output, *wanted.values(), *inputs)[0]
    mark(used, Layout(batch))
    return used


def _check_batch(where: str, batch: int, inputs: list[Tensor], output: Any) -> None:
    """Refuse a module whose inputs or output do not have the batch in dimension 0."""
    if not isinstance(output, Tensor):
        raise VarregError(
            f"varreg: the rule for {where} needs one tensor as output, got {type(output).__name__}."
        )
    for t in (*inputs, output):
        at = mark_of(t)
        is_elsewhere = isinstance(at, Layout) and at != Layout(batch)
        if is_elsewhere or (t is output and (not t.dim() or t.shape[0] != batch)):
            raise VarregError(
                f"varreg: the rule for {where} needs the batch of {batch} in dimension 0, got a "
                f"tensor of shape {tuple(t.shape)}."
            )


# ---- backward ------------------------------------------------------------------------------------


class _Run:
    """One run of a module that a registered rule measures; autograd saves the tensors."""

    def __init__(
        self,
        module: nn.Module,
        args: Any,
        kwargs: dict[str, Any],
        wanted: dict[str, nn.Parameter],
        partition: Partition,
    ):
        self.module, self.kwargs, self.partition = module, kwargs, partition
        self.shapes = {name: (partition.batch, *p.shape) for name, p in wanted.items()}
        self.rule = MODULE_RULES[type(module)]
        self.args = [_TENSOR if isinstance(a, Tensor) else a for a in args]

    def contributions(self, grad: Tensor, saved: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the rule's contributions. Raise a VarregError if their shapes are wrong."""
        tensors = iter(saved)
        args = [next(tensors) if a is _TENSOR else a for a in self.args]
        with torch.no_grad():
            contributions = self.rule(self.module, grad, *args, **self.kwargs)
        for name, shape in self.shapes.items():
            got = tuple(contributions[name].shape) if name in contributions else "nothing"
            if got != shape:
                raise VarregError(
                    f"varreg: the rule for {type(self.module).__name__} must return {name!r} of "
                    f"shape {shape}, got {got}."
                )
        return contributions


_TENSOR = object()  # in place of a tensor among the arguments


class ModuleNode(Node):
    """Returns a module's output unchanged, and computes the gradients of its parameters."""

    @staticmethod
    def forward(
        ctx: Any, run: _Run, recipients: list[Recipient], output: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the output. `tensors` are the parameters and the module's inputs."""
        ctx.run, ctx.recipients = run, recipients
        ctx.rounding = autocast_rounding(output)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors[len(recipients) :])
        return pass_on(ctx, [output])

    @staticmethod
    @measuring
    def backward(ctx: Any, grad: Any) -> Any:
        run, recipients, saved = ctx.run, ctx.recipients, saved_tensors(ctx)
        totals: list[Tensor | None] = [None] * len(recipients)
        if grad is not None:
            contributions = run.contributions(grad, saved)
            rounding = rounding_of([grad], ctx.rounding)
            dense = [Dense(run.partition, contributions[name]) for name in run.shapes]
            nodes = [node for node, _ in ctx.next_functions[1 : 1 + len(dense)]]
            totals = take(recipients, dense, nodes, rounding)
        return (None, None, grad, *totals, *(None,) * len(saved))

    @staticmethod
    def places(ctx: Any) -> Sequence[Place | None]:
        """Return where the output carries the batch."""
        return [Layout(ctx.run.partition.batch)]
