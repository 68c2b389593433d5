"""`varreg.verify` leaves nothing behind in the model, the loss or the random state."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import _get_current_function_mode_stack

import varreg
from tests.support.verified import M, net, pairs
from varreg.engine.parameters import LEDGERS


class Careless(nn.Module):
    """Changes buffers, attributes and random state as it runs."""

    def __init__(self, fails=False):
        super().__init__()
        self.net, self.norm = net(nn.Dropout(0.5)), nn.BatchNorm1d(4).eval()
        self.register_buffer("steps", torch.zeros(()))
        self.fails, self.seen = fails, []

    def forward(self, x):
        self.steps += 1
        self.seen.append(len(x))
        with torch.no_grad():
            self.norm.running_mean += len(x)
        torch.rand(1), random.random(), np.random.rand()  # noqa: NPY002
        if self.fails and len(x) == 1:
            raise KeyError("one")
        return self.net(x)


class Uncopyable(Careless):
    def __deepcopy__(self, memo):
        raise TypeError("cannot be copied")


class Holding(Careless):
    """A copy of it still runs the original."""

    def __init__(self, fails=False):
        super().__init__(fails)
        inner = super().forward
        self.run = lambda x: inner(x)

    def forward(self, x):
        return self.run(x)


def picture(model):
    tensors = [*model.parameters(), *model.buffers()]
    bits = [(id(t), t._version, t.requires_grad, t.detach().numpy().tobytes()) for t in tensors]
    grads = [
        None if t.grad is None else (id(t.grad), t.grad._version, t.grad.tolist()) for t in tensors
    ]
    hooks = [
        (list(m._forward_hooks.values()), list(m._forward_pre_hooks.values()))
        for m in model.modules()
    ]
    flags = [m.training for m in model.modules()]
    legacy = np.random.get_state()[1].tolist()  # noqa: NPY002
    numbers = torch.get_rng_state().tolist(), random.getstate(), legacy
    ledgers = [id(LEDGERS.get(p)) for p in model.parameters()]
    return bits, grads, hooks, flags, numbers, list(model.seen), ledgers


@pytest.mark.parametrize("kind", [Careless, Uncopyable, Holding])
@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("ending", ["verified", "unknown", "refused", "raises"])
def test_nothing_is_left_behind(kind, observed, ending):
    model = kind(ending == "unknown")
    x, y = pairs()
    observer = varreg.observe(model) if observed else None
    F.cross_entropy(model(x), y).backward()
    m = [varreg.moments(p) for p in model.parameters()]
    sums = [(t.count, t.mean.tolist(), t.variance.tolist()) for t in m if t is not None]
    loss = F.cross_entropy
    if ending == "refused":
        model.norm.train()
    if ending == "raises":
        loss = lambda output, y: output
    before = picture(model)
    if ending == "raises":
        with pytest.raises(
            ValueError, match="varreg: verify expects a loss that is a single number"
        ):
            varreg.verify(model, loss, (x, y))
    else:
        found = varreg.verify(model, loss, (x, y))
        assert found.status == ending, str(found)
    assert picture(model) == before
    assert not _get_current_function_mode_stack()
    m = [varreg.moments(p) for p in model.parameters()]
    assert [(t.count, t.mean.tolist(), t.variance.tolist()) for t in m if t is not None] == sums
    assert bool(sums) == observed
    if observer is not None and ending != "refused":
        F.cross_entropy(model(x), y).backward() if not model.fails else None
        assert model.fails or varreg.moments(model.net[0].weight).count == 2 * M
        observer.remove()


def test_a_loss_with_a_state():
    """Its buffers go back too, and each sample meets the same ones."""

    class Moving(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("centre", torch.zeros(3))

        def forward(self, output, y):
            self.centre += 1
            return (output - self.centre).square().sum(1).mean()

    loss = Moving()
    assert varreg.verify(net(), loss, pairs())
    assert not loss.centre.any()


def test_an_observed_model_is_verified():
    model = net()
    with varreg.observe(model) as observer:
        assert varreg.verify(model, F.cross_entropy, pairs())
        assert observer.is_on
    assert varreg.verify(copy.deepcopy(model), F.cross_entropy, pairs())
