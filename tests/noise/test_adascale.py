"""AdaScale: the gain against its formula, the clock of schedules, and what it leaves behind."""

from __future__ import annotations

import math

import pytest
import pytorch_optimizer
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

import varreg
from varreg.lab.optimizers.baselines import DoG
from varreg.noise.adascale import gain_of

BASE = 4


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))


def backward(net: nn.Module, samples: int, seed: int) -> None:
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(seed))
    net.zero_grad()
    (net(x) - x.sum(1, keepdim=True)).square().mean().backward()


def definition(net: nn.Module) -> tuple[float, float]:
    """tr Σ and |Ĝ|², from the moments."""
    found = [varreg.moments(p) for p in net.parameters()]
    m = found[0].count
    trace = sum(float(f.variance.sum()) for f in found) * m / (m - 1)
    return trace, sum(float(f.mean.square().sum()) for f in found) - trace / m


def test_the_gain_is_that_of_the_formula():
    """With running averages, and a scale that changes from step to step."""
    net = model()
    varreg.observe(net)
    ada = varreg.AdaScale(torch.optim.SGD(net.parameters(), lr=0.1), BASE)
    trace = signal = progress = 0.0
    for t, scale in enumerate((4, 1, 8, 2, 8)):
        backward(net, scale * BASE, t)
        new = definition(net)
        trace, signal = 0.9 * trace + 0.1 * new[0], 0.9 * signal + 0.1 * new[1]
        assert signal > 0
        ada.step()
        expected = (trace / BASE + signal) / (trace / (scale * BASE) + signal)
        assert ada.gain == pytest.approx(expected, rel=1e-9)
        assert 1 <= ada.gain <= scale
        progress += expected
    assert ada.progress == pytest.approx(progress, rel=1e-9)


@pytest.mark.parametrize("scale", [1.0, 4.0, 64.0])
def test_the_bounds_of_the_gain(scale):
    assert gain_of(0.0, 2.0, scale, 32) == 1.0
    assert gain_of(3.0, 0.0, scale, 32) == scale
    assert gain_of(3.0, -1.0, scale, 32) == scale  # an estimate may be negative
    assert gain_of(-1e-20, 1.0, scale, 32) == 1.0
    assert gain_of(0.0, 0.0, scale, 32) == 1.0
    assert 1 <= gain_of(3.0, 0.01, scale, 32) <= scale


OPTIMIZERS = {
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01), 1.0),
    "ASGD": (lambda p: torch.optim.ASGD(p, lr=0.1), 1.0),
    "Adam": (lambda p: torch.optim.Adam(p, lr=0.1), 0.5),
    "AdamW": (lambda p: torch.optim.AdamW(p, lr=0.1), 0.5),
    "RMSprop": (lambda p: torch.optim.RMSprop(p, lr=0.1), 0.5),
    "tensor": (lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)), 0.5),
    "VRSGD": (lambda p: varreg.VRSGD(p, lr=0.1, momentum=0.9), 1.0),
    "VRAdam": (lambda p: varreg.VRAdam(p, lr=0.1), 0.5),
    "wrapped": (lambda p: varreg.VarianceRegularized(torch.optim.RAdam(p, lr=0.1)), 0.5),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_the_optimizers_at_its_learning_rate_times_the_gain(name):
    make, power = OPTIMIZERS[name]
    net, twin = model(), model()
    varreg.observe(net)
    varreg.observe(twin)
    optimizer, plain = make(net.parameters()), make(twin.parameters())
    ada = varreg.AdaScale(optimizer, BASE)
    for t in range(4):
        backward(net, 5 * BASE, t)
        backward(twin, 5 * BASE, t)
        before = optimizer.param_groups[0]["lr"]
        ada.step()
        assert optimizer.param_groups[0]["lr"] is before
        for group in plain.param_groups:
            group["lr"] = 0.1 * ada.gain**power
        plain.step()
        assert ada.gain > 1
        for p, q in zip(net.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)


def test_at_the_base_batch_it_is_the_optimizer_to_the_bit():
    ends = []
    for wrap in (False, True):
        net = model()
        varreg.observe(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        ada = varreg.AdaScale(optimizer, BASE) if wrap else optimizer
        for t in range(5):
            backward(net, BASE, t)
            ada.step()
        ends.append([p.detach().clone() for p in net.parameters()])
    assert all(map(torch.equal, *ends))
    assert (ada.gain, ada.progress) == (1.0, 5.0)


def test_a_batch_of_one_at_a_base_of_one():
    net = model()
    varreg.observe(net)
    ada = varreg.AdaScale(torch.optim.SGD(net.parameters(), lr=0.1), 1)
    backward(net, 1, 0)
    ada.step()
    assert ada.gain == 1.0


def warm(optimizer):
    parts = [LambdaLR(optimizer, lambda t: (t + 1) / 5), LambdaLR(optimizer, lambda t: 1 / (1 + t))]
    return SequentialLR(optimizer, parts, milestones=[5])


SCHEDULES = {
    "LambdaLR": lambda optimizer: LambdaLR(optimizer, lambda t: 1 / (1 + t)),
    "CosineAnnealingLR": lambda optimizer: CosineAnnealingLR(optimizer, T_max=40),
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=41),
    "SequentialLR": warm,
}


@pytest.mark.filterwarnings("ignore:The epoch parameter in")  # SequentialLR's own, in torch 2.8
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_follow_the_clock(name):
    """The learning rate of each step is the one of the base's step ⌊τ⌋."""

    def start(net):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.02)
        return optimizer, SCHEDULES[name](optimizer)

    base, scheduler = start(model())
    table = []  # lr of the base's steps
    for _ in range(40):
        table.append(base.param_groups[0]["lr"])
        base.step()
        scheduler.step()
    net = model()
    varreg.observe(net)
    optimizer, scheduler = start(net)
    ada = varreg.AdaScale(optimizer, BASE)
    steps = 0
    while ada.progress < 30:
        assert optimizer.param_groups[0]["lr"] == pytest.approx(table[math.floor(ada.progress)])
        backward(net, 8 * BASE, steps)
        ada.step()
        ada.advance(scheduler)
        steps += 1
    assert 30 / 8 <= steps < 30


def test_a_checkpoint_goes_on(tmp_path):
    def start():
        net = model()
        varreg.observe(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
        scheduler = CosineAnnealingLR(optimizer, T_max=100)
        return net, optimizer, scheduler, varreg.AdaScale(optimizer, BASE)

    def train(parts, steps):
        net, _, scheduler, ada = parts
        for t in steps:
            backward(net, 6 * BASE, t)
            ada.step()
            ada.advance(scheduler)

    whole = start()
    train(whole, range(4))
    torch.save([part.state_dict() for part in whole], tmp_path / "checkpoint.pt")
    train(whole, range(4, 8))
    again = start()
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    for part, state in zip(again, saved, strict=True):
        part.load_state_dict(state)
    train(again, range(4, 8))
    assert again[3].state_dict() == whole[3].state_dict()
    for p, q in zip(again[0].parameters(), whole[0].parameters(), strict=True):
        assert torch.equal(p, q)
    changed = [{**saved[3], "progress": value} for value in ("far", math.inf, math.nan)]
    for bad in ({}, None, *changed, {**saved[3], "trace": math.nan}):
        with pytest.raises(varreg.VarregError, match="expects the result of its state_dict"):
            again[3].load_state_dict(bad)
    with pytest.raises(varreg.VarregError, match="has base_batch=4, this one 8"):
        varreg.AdaScale(again[1], 8).load_state_dict(saved[3])


def test_accumulation_is_one_large_batch():
    gains = []
    for parts in (1, 4):
        net = model()
        varreg.observe(net)
        ada = varreg.AdaScale(torch.optim.SGD(net.parameters(), lr=0.1), BASE)
        x = torch.randn(32, 4, generator=torch.Generator().manual_seed(5))
        ada.zero_grad()
        for part in x.chunk(parts):
            (net(part).square().mean() / parts).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.01)
        ada.step()
        gains.append(ada.gain)
    assert gains[0] == pytest.approx(gains[1], rel=1e-9)
    assert gains[0] > 1


def test_a_closure_comes_first():
    net = model()
    varreg.observe(net)
    ada = varreg.AdaScale(torch.optim.SGD(net.parameters(), lr=0.1), BASE)
    calls = []

    def closure():
        calls.append(1)
        backward(net, 16, 0)
        return torch.tensor(7.0)

    assert ada.step(closure) == 7.0
    assert len(calls) == 1
    assert ada.gain > 1


def test_a_scaler_can_drive_it():
    net = model().float()
    varreg.observe(net)
    ada = varreg.AdaScale(torch.optim.SGD(net.parameters(), lr=0.1), BASE)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for poison in (False, True):
        x = torch.randn(16, 4, dtype=torch.float32)
        ada.zero_grad()
        scaler.scale(net(x * (math.inf if poison else 1)).square().mean()).backward()
        scaler.step(ada)
        scaler.update()
    assert 1 < ada.gain <= 4
    assert ada.progress == ada.gain  # the second one was left out


def test_a_gradient_that_is_not_finite_leaves_the_averages_alone():
    net = model()
    varreg.observe(net)
    ada = varreg.AdaScale(torch.optim.SGD(net.parameters(), lr=0.0), BASE)
    backward(net, 16, 0)
    ada.step()
    gain, kept = ada.gain, ada.state_dict()["trace"]
    net.zero_grad()
    net(torch.full((16, 4), math.inf)).mean().backward()
    ada.step()
    assert (ada.gain, ada.state_dict()["trace"]) == (gain, kept)


def test_an_error_in_a_step_leaves_the_learning_rate_as_it_was():
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise RuntimeError("no")

    net = model()
    varreg.observe(net)
    ada = varreg.AdaScale(Failing(net.parameters(), lr=0.1), BASE)
    backward(net, 16, 0)
    with pytest.raises(RuntimeError, match="no"):
        ada.step()
    assert ada.param_groups[0]["lr"] == 0.1
    assert ada.progress == 0


def refuses(match: str, optimizer, *args, **kwargs) -> None:
    with pytest.raises(varreg.VarregError, match=match):
        varreg.AdaScale(optimizer, *args, **kwargs)


def test_bad_input():
    net = model()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    refuses("expects a torch.optim.Optimizer, got Sequential", net, 4)
    refuses("expects a torch.optim.Optimizer, got AdaScale", varreg.AdaScale(sgd, 4), 4)
    for base in (0, 2.5, True, None):
        refuses("base_batch must be a positive whole number", sgd, base)
    refuses("power must be between 0 and 1", sgd, 4, power=2)
    refuses("smoothing must be at least 0 and below 1", sgd, 4, smoothing=1.0)
    with pytest.raises(varreg.VarregError, match="a number of steps, got ReduceLROnPlateau"):
        varreg.AdaScale(sgd, 4).advance(ReduceLROnPlateau(sgd))
    varreg.observe(net)
    ada = varreg.AdaScale(sgd, 8)
    backward(net, 6, 0)
    with pytest.raises(varreg.VarregError, match="a batch of 6 samples, below base_batch=8"):
        ada.step()


def test_an_optimizer_with_its_own_idea_of_scale():
    params = list(model().parameters())
    own = {
        "it sets its own step size": torch.optim.Adafactor(params),
        "it sets its own step sizes": torch.optim.Rprop(params),
        "evaluates the model many times": torch.optim.LBFGS(params),
        "schedule-free": pytorch_optimizer.ScheduleFreeSGD(params),
        "D-adaptation": pytorch_optimizer.Prodigy(params),
        r"\(relative_step\)": pytorch_optimizer.AdaFactor(params),
        "distance over gradients": DoG(params),
    }
    for reason, optimizer in own.items():
        refuses(reason, optimizer, 4)
    inner = pytorch_optimizer.ScheduleFreeSGD(params)
    refuses("schedule-free", varreg.VarianceRegularized(inner), 4)
    unknown = varreg.VRAdadelta(params)
    refuses("does not know how the learning rate of VRAdadelta follows the batch", unknown, 4)
    lion = pytorch_optimizer.Lion(params)
    refuses("does not know how the learning rate of Lion follows the batch", lion, 4)
    assert varreg.AdaScale(lion, 4, power=0.5).power == 0.5


def test_parameters_that_are_not_observed():
    net, other = model(), nn.Linear(1, 1)
    varreg.observe(net)
    both = [*net.parameters(), *other.parameters()]
    ada = varreg.AdaScale(torch.optim.SGD(both, lr=0.1), BASE)
    with pytest.raises(varreg.VarregError, match="These have none: all of them"):
        ada.step()
    x = torch.randn(8, 4)
    other(net(x)).mean().backward()
    with pytest.raises(varreg.VarregError, match=r"have none: param_groups\[0\]\['params'\]\[4\]"):
        ada.step()
    net.zero_grad()
    other.zero_grad()
    net(x).mean().backward()
    ada.step()  # nothing asks for the other one


def test_one_group_has_no_variance():
    net = model()
    varreg.observe(net, groups=1)
    ada = varreg.AdaScale(torch.optim.SGD(net.parameters(), lr=0.1), BASE)
    backward(net, 16, 0)
    with pytest.raises(varreg.VarregError, match="groups=1 has one"):
        ada.step()
