"""The whole way with Triton's interpreter in place of the C: moments against the definition, and
steps against those by PyTorch.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import varreg
from tests.support.measured import assert_moments
from tests.support.truth import losses, one_at_a_time, sample_weights
from varreg import backends, triton

BATCH = 3


class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.norm = nn.Embedding(5, 4, padding_idx=1), nn.LayerNorm(4)
        self.mixed, self.head = nn.Linear(4, 6), nn.Linear(6, 3, bias=False)

    def forward(self, ids):
        return self.head(self.mixed(self.norm(self.tokens(ids))).relu())


def images():
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Tanh()),
        *(nn.Conv2d(4, 4, 2, groups=4), nn.Tanh(), nn.Flatten(), nn.Linear(16, 2)),
    )


MODELS = {
    "text": (Text, lambda: torch.randint(5, (BATCH, 4))),
    "images": (images, lambda: torch.randn(BATCH, 2, 3, 3)),
}


@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.parametrize("name", MODELS)
def test_moments_are_those_of_the_definition(name, groups):
    make, draw = MODELS[name]
    model, x, weights = make(), draw(), sample_weights(BATCH)
    wide = copy.deepcopy(model).double()
    truth = one_at_a_time(wide, (x.double() if x.is_floating_point() else x,), weights)
    with backends.use("cpu", triton), varreg.observe(model, groups=groups):
        losses(model(x), weights.float()).mean().backward()
        found = {n: varreg.moments(p) for n, p in model.named_parameters()}
        if groups is None:
            assert_moments(model, truth, rtol=1e-5)
    for n, each in truth.items():
        parts = (each / BATCH).tensor_split(groups or BATCH)
        squares = sum(part.sum(0).square() / len(part) for part in parts)
        torch.testing.assert_close(found[n].total.double(), each.mean(0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found[n].square.double(), squares, rtol=1e-4, atol=1e-5)


OPTIMIZERS = {
    "SGD": lambda p: varreg.VRSGD(p, lr=0.1, maximize=True),
    "heavy ball": lambda p: varreg.VRSGD(p, lr=0.1, momentum=0.9, dampening=0.3),
    "Nesterov": lambda p: varreg.VRSGD(
        p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, history="harmonic"
    ),
    "Adam": lambda p: varreg.VRAdam(p, lr=0.01),
    "AdamW": lambda p: varreg.VRAdamW(p, lr=0.01, form="affine", history="sum"),
    "SGD, calibrated": lambda p: varreg.VRSGD(p, lr=0.1, weight_decay=0.1, calibrate=True),
    "heavy ball, calibrated": lambda p: varreg.VRSGD(p, lr=0.1, momentum=0.9, calibrate=True),
    "Nesterov, calibrated": lambda p: varreg.VRSGD(
        p, lr=0.1, momentum=0.9, nesterov=True, calibrate=True, lambda_min=0.8, lambda_max=1.1
    ),
    "AdamW, calibrated": lambda p: varreg.VRAdamW(p, lr=0.01, form="affine", calibrate=True),
    "calibrated and not": lambda p: varreg.VRSGD(
        [{"params": [q], "calibrate": q.dim() > 1} for q in p], lr=0.1
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_pytorch(name, monkeypatch):
    """Gradients and moments are the same for both; a block is short, for several in one tensor."""
    monkeypatch.setattr(varreg.thresholds, "TRITON_BLOCK", 16)
    xs = [torch.randn(5, 3) for _ in range(3)]

    def train(backend):
        torch.manual_seed(0)
        model = nn.Linear(3, 7).double()  # the bracket of Adam's variance is a small difference
        optimizer = OPTIMIZERS[name](model.parameters())
        with varreg.observe(model):
            for x in xs:
                optimizer.zero_grad()
                with backends.use("cpu", backends.TWINS):
                    model(x.double()).square().mean().backward()
                with backends.use("cpu", backend):
                    optimizer.step()
        found = [*model.parameters(), *map(optimizer.lambda_of, model.parameters())]
        return [*found, *(v for s in optimizer.state.values() for v in s.values())]

    launched, whole = [], triton.update
    monkeypatch.setattr(
        triton, "update", lambda like, tasks, n, c: launched.append(n) or whole(like, tasks, n, c)
    )
    found = train(triton)
    assert launched == [28, 28, 28]
    for fast, slow in zip(found, train(backends.TWINS), strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-7, atol=1e-9)


def test_a_step_in_float32():
    model, x = nn.Linear(3, 4), torch.randn(5, 3)
    twin = copy.deepcopy(model)
    for m, backend in ((model, triton), (twin, backends.TWINS)):
        optimizer = varreg.VRSGD(m.parameters(), lr=0.1, momentum=0.9)
        with varreg.observe(m), backends.use("cpu", backend):
            for _ in range(2):
                optimizer.zero_grad()
                m(x).square().mean().backward()
                optimizer.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
