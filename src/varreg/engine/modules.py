"""Rules for whole modules, which users register for layers of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from varreg.engine.checks import place
from varreg.engine.contribution import Contribution, Dense
from varreg.engine.layout import Layout
from varreg.engine.marks import mark, mark_of
from varreg.engine.nodes import Target, Use

if TYPE_CHECKING:
    from varreg.engine.observer import Observer

ModuleRule = Callable[..., dict[str, Tensor]]
MODULE_RULES: dict[type[nn.Module], ModuleRule] = {}


def register_rule(module_type: type[nn.Module]) -> Callable[[ModuleRule], ModuleRule]:
    """Decorate a function that says what each sample contributes to the gradients of a module's own parameters.

    The rule gets the module, the gradient of its output and its inputs, all with the batch in dimension 0, and returns, for
    each of the module's parameters by name, a tensor `[batch, *parameter.shape]` whose sum over the batch is the gradient.
    Most modules need no rule: the engine follows their operations. A rule is for one that hides them (a custom
    `torch.autograd.Function`, a compiled kernel) or that can be served faster. It applies to exactly this type.

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
        raise ValueError(f"varreg: register_rule expects a subclass of torch.nn.Module, got {module_type!r}.")

    def add(rule: ModuleRule) -> ModuleRule:
        MODULE_RULES[module_type] = rule
        return rule

    return add


def detach_own(module: nn.Module) -> dict[str, nn.Parameter]:
    """Detach a module's own parameters, while its forward runs; returns them."""
    if any(p.requires_grad for child in module.children() for p in child.parameters()):
        raise ValueError(
            f"varreg: the rule for {type(module).__name__} is for its own parameters, but it has submodules with parameters. Register "
            "rules for those instead, or move the hidden operation into a submodule of its own."
        )
    own: dict[str, Any] = {n: p for n, p in module._parameters.items() if p is not None}
    for name, p in own.items():
        module._parameters[name] = p.detach()
    return own


def restore_own(module: nn.Module, own: dict[str, nn.Parameter]) -> None:
    module._parameters.update(own)


def use_rule(
    observer: Observer, name: str, module: nn.Module, own: dict[str, nn.Parameter], args: Any, kwargs: dict[str, Any], output: Any
) -> Tensor:
    """The output of a module whose parameters were detached, with the registered rule in charge of their gradients."""
    batch, kind = observer.tracer.batch, type(module).__name__
    inputs = [a for a in args if isinstance(a, Tensor)]
    if not isinstance(output, Tensor):
        raise ValueError(f"varreg: the rule for {place(name, module)} needs one tensor as output, got {type(output).__name__}.")
    for t in (*inputs, output):
        where = mark_of(t)
        if (isinstance(where, Layout) and where != Layout(batch)) or (t is output and (not t.dim() or t.shape[0] != batch)):
            raise ValueError(
                f"varreg: the rule for {place(name, module)} needs the batch of {batch} in dimension 0, got a tensor of shape "
                f"{tuple(t.shape)}."
            )
    wanted = {n: p for n, p in own.items() if observer.ledger(p)}
    if not wanted:
        mark(output, Layout(batch))
        return output
    rule, partition = MODULE_RULES[type(module)], observer.partition(batch)
    targets = {n: observer.tracer.target(p, f"{kind} (registered)") for n, p in wanted.items()}
    shapes = {n: (batch, *p.shape) for n, p in wanted.items()}
    others = [None if isinstance(a, Tensor) else a for a in args]

    def contributions(grads: list[Any], saved: Sequence[Tensor]) -> list[tuple[Target, Contribution | None]]:
        if grads[0] is None:
            return [(target, None) for target in targets.values()]
        it = iter(saved)
        given = [next(it) if is_tensor else a for a, is_tensor in zip(others, tensors, strict=True)]
        with torch.no_grad():
            found = rule(module, grads[0], *given, **kwargs)
        for n, shape in shapes.items():
            got = tuple(found[n].shape) if n in found else "nothing"
            if got != shape:
                raise ValueError(f"varreg: the rule for {kind} must return {n!r} of shape {shape}, got {got}.")
        return [(target, Dense(partition, found[n])) for n, target in targets.items()]

    contributions.places = (Layout(batch),)  # type: ignore[attr-defined]
    tensors = [isinstance(a, Tensor) for a in args]
    used: Tensor = Use.apply(contributions, True, 1, len(wanted), output, *wanted.values(), *inputs)[0]
    mark(used, Layout(batch))
    return used
