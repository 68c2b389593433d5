"""Schedules for s."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import varreg


def optimizer(**options):
    return varreg.VRSGD(
        [
            {"params": [nn.Parameter(torch.ones(1))]},
            {"params": [nn.Parameter(torch.ones(1))], "s": 1.0},
        ],
        lr=0.1,
        **options,
    )


SCHEDULES = {
    "inverse time": (lambda o, **k: varreg.InverseTimeS(o, half=4, **k), lambda t: 1 / (1 + t / 4)),
    "cosine": (
        lambda o, **k: varreg.CosineS(o, total=8, **k),
        lambda t: (1 + math.cos(math.pi * min(t, 8) / 8)) / 2,
    ),
    "lambda": (lambda o, **k: varreg.LambdaS(o, lambda t: 0.9**t, **k), lambda t: 0.9**t),
}


@pytest.mark.parametrize(("make", "factor"), SCHEDULES.values(), ids=SCHEDULES)
def test_schedules_fall_as_their_formula(make, factor):
    o = optimizer(s=2.0)
    schedule = make(o)
    for t in range(12):
        assert [g["s"] for g in o.param_groups] == pytest.approx([2 * factor(t), factor(t)])
        assert schedule.get_last_s() == [g["s"] for g in o.param_groups]
        schedule.step()


@pytest.mark.parametrize(("make", "factor"), SCHEDULES.values(), ids=SCHEDULES)
def test_state(make, factor):
    o = optimizer()
    schedule = make(o)
    for _ in range(3):
        schedule.step()
    saved, groups = schedule.state_dict(), o.state_dict()
    torch.save(saved, "/dev/null")
    assert not any(callable(v) for v in saved.values())
    again = optimizer(s=5.0)
    resumed = make(again)
    again.load_state_dict(groups)
    resumed.load_state_dict(saved)
    for _ in range(3):
        schedule.step()
        resumed.step()
        assert resumed.get_last_s() == schedule.get_last_s()
    assert make(again, last_epoch=resumed.last_epoch).last_epoch == resumed.last_epoch + 1


def test_a_group_that_joins_later_has_a_schedule_too():
    o = optimizer(s=2.0)
    schedule = varreg.InverseTimeS(o, half=1)
    schedule.step()
    o.add_param_group({"params": [nn.Parameter(torch.ones(1))], "s": 4.0})
    schedule.step()
    assert schedule.get_last_s() == pytest.approx([2 / 3, 1 / 3, 4 / 3])


def test_a_schedule_made_anew_keeps_where_s_began():
    o = optimizer(s=2.0)
    varreg.InverseTimeS(o, half=1).step()
    assert o.param_groups[0]["s"] == 1.0
    varreg.InverseTimeS(o, half=1)
    assert o.param_groups[0]["initial_s"] == 2.0


def test_s_at_0_is_the_base():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    varreg.observe(model)
    o = varreg.VRSGD(model.parameters(), lr=0.1)
    schedule = varreg.CosineS(o, total=2)
    for _ in range(4):
        o.zero_grad()
        model(torch.randn(5, 3)).square().mean().backward()
        o.step()
        schedule.step()
    assert o.lambda_of(model.weight) is None
    assert float(o.state[model.weight]["vr_count"].max()) == 2


def test_bad_input():
    with pytest.raises(ValueError, match="param group 0 of SGD has no s"):
        varreg.CosineS(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), 3)
    with pytest.raises(ValueError, match="expects an optimizer, got int"):
        varreg.CosineS(3, 3)
    with pytest.raises(ValueError, match="total must be positive, got 0"):
        varreg.CosineS(optimizer(), 0)
    with pytest.raises(ValueError, match="half must be positive, got -1"):
        varreg.InverseTimeS(optimizer(), -1)
    with pytest.raises(ValueError, match="function must be callable, got float"):
        varreg.LambdaS(optimizer(), 0.5)
    with pytest.raises(ValueError, match=r"LambdaS has factor -1 at t = 0"):
        varreg.LambdaS(optimizer(), lambda t: -1)
    with pytest.raises(KeyError, match="initial_s"):
        varreg.CosineS(optimizer(), 3, last_epoch=2)
