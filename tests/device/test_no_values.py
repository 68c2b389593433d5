"""Tensors without values: an error that says so, and never a crash."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import varreg
from varreg.errors import VarregError

CASES = {
    "dense": (lambda: nn.Linear(4, 3), lambda: torch.randn(5, 4)),
    "conv": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.GroupNorm(3, 3), nn.Flatten()),
        lambda: torch.randn(5, 2, 6, 6),
    ),
    "lookup": (
        lambda: nn.Sequential(nn.Embedding(9, 4), nn.LayerNorm(4), nn.Flatten(), nn.Linear(8, 3)),
        lambda: torch.randint(0, 9, (5, 2)),
    ),
}
each_case = pytest.mark.parametrize(("make", "draw"), CASES.values(), ids=CASES)


@each_case
def test_inputs_without_values_are_refused(make, draw):
    model = make()
    varreg.observe(model)
    with pytest.raises(VarregError, match="without values"):
        model(draw().to("meta"))
    with (
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
        pytest.raises(VarregError, match="without values"),
    ):
        model(mode.from_tensor(draw()))
    with FakeTensorMode():
        fake, x = make(), draw()
        varreg.observe(fake)
        with pytest.raises(VarregError, match="without values"):
            fake(x)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's mode looks at that of the loss
@each_case
def test_no_phase_of_a_step_runs_where_tensors_are_fake(make, draw):
    model, x = make(), draw()
    varreg.observe(model)
    optimizer = varreg.VRAdam(model.parameters(), lr=0.01)
    before = [p.detach().clone() for p in model.parameters()]
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises(VarregError, match="without values"),
    ):
        model(x)
    loss = model(x).square().mean()
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises(VarregError, match=r"backward\(\) ran inside of FakeTensorMode"),
    ):
        loss.backward()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises(VarregError, match=r"moments\(\) ran inside of FakeTensorMode"),
    ):
        varreg.moments(next(model.parameters()))
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises(VarregError, match=r"step\(\) ran inside of FakeTensorMode"),
    ):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    optimizer.step()  # and outside of it, all is as it was
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def _plain_adam_takes_steps():
    """Return whether torch's own Adam works while the default device has no values."""
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([p])
    p.grad = torch.ones_like(p)
    try:
        with torch.device("meta"):
            optimizer.step()
    except RuntimeError:
        return False
    return True


@each_case
@pytest.mark.parametrize(
    "regularized",
    [lambda p: varreg.VRAdam(p, lr=0.01), lambda p: varreg.VRSGD(p, lr=0.01, momentum=0.9)],
    ids=["Adam", "SGD"],
)
def test_a_default_device_without_values_is_not_that_of_a_model(make, draw, regularized):
    here, there, x = make(), make(), draw()
    if not _plain_adam_takes_steps():
        pytest.skip("torch's own Adam raises: its counts are on the default device")
    there.load_state_dict(here.state_dict())
    for model, default in ((here, "cpu"), (there, "meta")):
        varreg.observe(model)
        optimizer = regularized(model.parameters())
        with torch.device(default):
            for _ in range(3):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
    for p, q in zip(here.parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=0, atol=0)
        torch.testing.assert_close(varreg.moments(q).square, varreg.moments(p).square)


def test_a_gradient_without_values_takes_the_plain_step():
    """As in torch, where a step on meta tensors does nothing."""
    layer = nn.Linear(3, 2, device="meta")
    optimizer = varreg.VRSGD(layer.parameters(), lr=0.1)
    layer.weight.grad = torch.empty_like(layer.weight)
    with pytest.warns(UserWarning, match="takes the plain step"):
        optimizer.step()


def test_capturing_a_graph_is_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"capturable=True.*reads values once"):
        varreg.VRAdam(nn.Linear(3, 2).parameters(), capturable=True)
