"""Measure a model in eval mode for a while, and restore its state afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from varreg.engine.observer import Observer, observe
from varreg.engine.rehearsal.pauses import ledgers_aside, observers_off


@contextlib.contextmanager
def measured_alone(model: nn.Module) -> Iterator[Observer]:
    """Observe a model in eval mode inside the `with` block; its gradients are cleared first.
    Afterwards, restore its modes, its gradients, its own observers and its compiled calls.

    A model inside DDP is measured in this process only. A model inside `torch.compile` runs
    eagerly.
    """
    inner: Any = model
    while isinstance(inner, DistributedDataParallel) or hasattr(inner, "_orig_mod"):
        inner = inner.module if isinstance(inner, DistributedDataParallel) else inner._orig_mod
    modules = list(inner.modules())
    modes = [m.training for m in modules]
    compiled = [m.__dict__.pop("_compiled_call_impl", None) for m in modules]
    grads = [(p, p.grad) for p in inner.parameters()]
    try:
        with observers_off(inner), ledgers_aside(inner):
            inner.eval()
            for p, _ in grads:
                p.grad = None
            with observe(inner) as observer:
                yield observer
    finally:
        for m, training, call in zip(modules, modes, compiled, strict=True):
            m.training = training
            if call is not None:
                m._compiled_call_impl = call
        for p, grad in grads:
            p.grad = grad
