"""How many kernels a training step launches with Triton, over plain training's."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
)
from triton.runtime.interpreter import InterpretedFunction

import varreg
from varreg import backends, triton
from varreg.lab.models import GPT

_NO_KERNEL = {
    *("aten.empty", "aten.new_empty", "aten.empty_like", "aten.empty_strided", "aten.detach"),
    *("aten.new_empty_strided", "aten.lift_fresh", "aten._local_scalar_dense", "aten.item"),
}


class Launches(TorchDispatchMode):
    """Counts operations that launch a kernel on a GPU: all but views and new memory. An operation
    counts as one, also where a GPU takes several (a sort, an attention).
    """

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).rpartition(".")[0]
        if not func.is_view and name not in _NO_KERNEL:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def small_cnn():
    return nn.Sequential(
        *(nn.Conv2d(1, 3, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(3, 4, 2)),
        *(nn.ReLU(), nn.Flatten(), nn.Linear(16, 5), nn.ReLU(), nn.Linear(5, 3)),
    )


WORKLOADS = {
    "GPT": (
        lambda: GPT(layers=2, width=4, heads=2, vocabulary=5, context=4),
        lambda: (torch.randint(5, (2, 3)), torch.randint(5, (6,))),
    ),
    "CNN": (small_cnn, lambda: (torch.randn(2, 1, 8, 8), torch.randint(3, (2,)))),
}
OPTIMIZERS = {
    "SGD": (torch.optim.SGD, varreg.VRSGD, {"lr": 0.1, "momentum": 0.9}),
    "Adam": (torch.optim.Adam, varreg.VRAdam, {"lr": 0.01}),
}


def launches_of(model, optimizer, x, y):
    """Return the launches of a training step in the steady state: the sixth. The engine tries the
    first forwards under a mode that it does not know, and the counter is one.
    """
    for _ in range(6):
        with Launches() as counted:
            optimizer.zero_grad()
            F.cross_entropy(model(x).flatten(0, -2), y).backward()
            optimizer.step()
    return counted.names


@pytest.mark.parametrize(("name", "kind"), [("GPT", "SGD"), ("CNN", "Adam")])
def test_launches_are_at_most_one_and_a_half_times_those_of_plain_training(
    name, kind, monkeypatch, capsys
):
    make, draw = WORKLOADS[name]
    base, ours, options = OPTIMIZERS[kind]
    x, y = draw()
    plain = make()
    expected = launches_of(plain, base(plain.parameters(), foreach=True, **options), x, y)
    run = InterpretedFunction.run

    def note(kernel, *args, **meta):
        mode = _get_current_dispatch_mode()
        if mode is not None:
            mode.names.append(kernel.fn.__name__)
        with _disable_current_modes():
            return run(kernel, *args, **meta)

    monkeypatch.setattr(InterpretedFunction, "run", note)
    model = make()
    optimizer = ours(model.parameters(), foreach=True, **options)
    with backends.use("cpu", triton), varreg.observe(model):
        found = launches_of(model, optimizer, x, y)
    with capsys.disabled():  # for docs/understand/kernels.md
        print(f"{name}, {kind}: {len(found)} launches, {len(expected)} of plain training")
    assert {"update_kernel", "compare_kernel"} <= set(found)
    assert len(found) <= 1.5 * len(expected), Counter(found) - Counter(expected)
