"""Large pages: the system is asked for them where sums are large, and numbers stay the same."""

import sys

import pytest
import torch
from torch import nn

import varreg
from varreg import memory, native
from varreg.engine.mechanisms import node
from varreg.native import layer_sums

MODELS = {
    "a row for each sample": (lambda: nn.Linear(40, 30), lambda: torch.randn(6, 40)),
    "tokens": (lambda: nn.Linear(40, 30), lambda: torch.randn(6, 3, 40)),
    "images": (lambda: nn.Conv2d(3, 8, 3), lambda: torch.randn(6, 3, 9, 9)),
    "ids": (lambda: nn.Embedding(50, 20), lambda: torch.randint(0, 50, (6, 3))),
}


@pytest.fixture
def asked(monkeypatch):
    """Count every tensor as large, and note where large pages were asked for."""
    pointers = set()

    def advise(start, size, advice):
        pointers.add(start)
        return 0

    for module in (memory, node, layer_sums):
        monkeypatch.setattr(module, "LARGE_PAGES", 1)
    monkeypatch.setattr(memory, "_advise", lambda: advise)
    monkeypatch.setattr(memory, "PAGE", 1)
    return pointers


def moments_of(model, x):
    varreg.observe(model)
    for _ in range(2):  # the second step adds to nothing that the first one left
        model.zero_grad()
        model(x).square().flatten(1).sum(1).mean().backward()
    return [(p, varreg.moments(p)) for p in model.parameters()]


@pytest.mark.parametrize("name", MODELS)
def test_sums_are_the_same_in_large_pages(name, asked, monkeypatch):
    make, data = MODELS[name]
    torch.manual_seed(0)
    model, x = make().double(), data()
    x = x.double() if x.is_floating_point() else x
    found = moments_of(model, x)
    m = found[0][1]
    if native.status() == "in use":
        assert {m.total.data_ptr(), m.square.data_ptr()} <= asked
    for p, m in found:
        assert p.grad.data_ptr() in asked, "torch has copied p.grad again"
        assert p.grad.data_ptr() != m.total.data_ptr()
    monkeypatch.undo()
    torch.manual_seed(0)
    for (p, m), (q, other) in zip(found, moments_of(make().double(), x), strict=True):
        pairs = (p.grad, q.grad), (m.total, other.total), (m.square, other.square)
        for here, there in pairs:
            torch.testing.assert_close(here, there, rtol=1e-12, atol=1e-14)


def test_s_stays_when_the_gradient_is_changed(asked):
    model, x = nn.Linear(40, 30), torch.randn(6, 40)
    (p, m), _ = moments_of(model, x)
    before = m.total.clone()
    p.grad.zero_()
    assert torch.equal(m.total, before)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux has this advice")
def test_the_system_takes_the_advice():
    large = torch.empty(memory.LARGE_PAGES)
    start = -(-large.data_ptr() // memory.PAGE) * memory.PAGE
    assert memory._advise()(start, large.nbytes // 2, memory.HUGE) in (0, -1)  # -1: none are there
    assert memory.empty_like(large).fill_(1).sum() == large.numel()
