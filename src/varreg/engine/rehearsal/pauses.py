"""Pause varreg's observers and tracers while a model is rehearsed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from varreg import _torch


@contextlib.contextmanager
def observers_off(model: nn.Module) -> Iterator[None]:
    """Switch off the hooks of varreg's observers inside of the `with` block."""
    from varreg.engine.forward import Hook  # it imports this package

    hooks = [h for m in model.modules() for h in _hooks(m) if isinstance(h, Hook)]
    observers = [hook.observer for hook in hooks]
    for hook in hooks:
        hook.observer = None
    try:
        yield
    finally:
        for hook, observer in zip(hooks, observers, strict=True):
            hook.observer = observer


@contextlib.contextmanager
def ledgers_aside(model: nn.Module) -> Iterator[None]:
    """Set the ledgers of parameters aside inside of the `with` block, so that the parameters can be
    observed anew. Restore the ledgers afterwards.
    """
    from varreg.engine.parameters import LEDGERS

    waiting = [(p, ledger) for p in model.parameters() if (ledger := LEDGERS.get(p)) is not None]
    for p, _ in waiting:
        del LEDGERS[p]
    try:
        yield
    finally:
        for p, ledger in waiting:
            LEDGERS[p] = ledger


@contextlib.contextmanager
def gradients_aside(model: nn.Module) -> Iterator[None]:
    """Protect the gradients from the backward of a trial inside of the `with` block: copies replace
    the gradients of parameters, and observers are off. A user's backward may add to `p.grad`
    itself, or run modules again.
    """
    waiting = [(p, p.grad) for p in model.parameters()]
    for p, grad in waiting:
        p.grad = None if grad is None else grad.clone()
    try:
        with observers_off(model):
            yield
    finally:
        for p, grad in waiting:
            p.grad = grad


def _hooks(module: nn.Module) -> list[Any]:
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


@contextlib.contextmanager
def tracers_off() -> Iterator[None]:
    """Remove our tracers from the stack of modes inside of the `with` block: a rehearsal inside of
    a forward is not part of that forward.
    """
    from varreg.engine.trace.tracer import Tracer

    stack = _torch.mode_stack()
    if not any(isinstance(mode, Tracer) for mode in stack):
        yield
        return
    _set_stack([mode for mode in stack if not isinstance(mode, Tracer)])
    try:
        yield
    finally:
        _set_stack(stack)


def _set_stack(modes: Sequence[Any]) -> None:
    """Replace the active modes."""
    for _ in _torch.mode_stack():
        _torch.pop_mode()
    for mode in modes:
        _torch.push_mode(mode)
