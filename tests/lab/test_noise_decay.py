"""NoiseDecay: λ against its formula, checkpoints, and what is refused; and the arms beside it."""

from __future__ import annotations

import contextlib
import io
import math

import pytest
import torch
from torch import nn

import varreg
from tests.lab.test_runs import assert_same
from varreg.lab.experiments.compare.analysis import lowest
from varreg.lab.noise_decay import NoiseDecay, factor_of
from varreg.lab.optimizers.averages import AveragedSGD, ScheduleFreeSGD
from varreg.lab.runs.config import Config
from varreg.lab.runs.early_stopping import Best
from varreg.lab.runs.resume import StoppedError, run
from varreg.lab.runs.run import Run
from varreg.thresholds import WINDOW

LR, BATCH, STEPS = 0.05, 16, 8


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))


def batch(step: int):
    g = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 4, generator=g)
    return x, x.sum(1, keepdim=True) + torch.randn(BATCH, 1, generator=g)


class Training:
    """A model, its optimizer, NoiseScale and NoiseDecay."""

    def __init__(self, power: float = 1.0, window: int = STEPS):
        self.net = model()
        self.optimizer = torch.optim.SGD(
            [
                {"params": self.net[0].parameters(), "lr": LR},
                {"params": self.net[2].parameters(), "lr": 2 * LR},
            ],
            momentum=0.9,
        )
        self.noise = varreg.NoiseScale(varreg.observe(self.net), window=window)
        self.decay = NoiseDecay(self.optimizer, self.noise, power)

    def step(self, t: int) -> tuple[float, float]:
        """Take a step; return tr Σ and |Ĝ|² of its batch, from single samples."""
        x, y = batch(t)
        self.optimizer.zero_grad()
        (self.net(x) - y).square().mean().backward()
        parameters = list(self.net.parameters())
        rows = []
        for i in range(BATCH):
            loss = (self.net(x[i : i + 1]) - y[i : i + 1]).square().mean()
            each = torch.autograd.grad(loss, parameters)
            rows.append(torch.cat([g.flatten() for g in each]))
        alone = torch.stack(rows)
        self.noise.update()
        self.optimizer.step()
        self.decay.step()
        trace = float(alone.var(0).sum())
        return trace, float(alone.mean(0).square().sum()) - trace / BATCH

    @property
    def rates(self):
        return [group["lr"] for group in self.optimizer.param_groups]


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_the_learning_rate_is_that_of_the_formula(power):
    training, seen, start = Training(power), [], math.nan
    lambdas = []
    for t in range(5 * STEPS):
        seen.append(training.step(t))
        expected = 1.0
        if len(seen) >= STEPS:
            trace, signal = (sum(column[-STEPS:]) for column in zip(*seen, strict=True))
            now = trace / signal if signal > 0 else math.inf
            if math.isnan(start) and math.isfinite(now):
                start = now
            expected = min(1.0, ((1 + now / BATCH) / (1 + start / BATCH)) ** -power)
        assert training.rates == pytest.approx([LR * expected, 2 * LR * expected], rel=1e-9)
        assert training.decay.get_last_lr() == training.rates
        lambdas.append(expected)
    assert training.decay.start == pytest.approx(start, rel=1e-9)
    assert lambdas[: STEPS - 1] == [1.0] * (STEPS - 1)
    assert min(lambdas) < 0.9


def test_the_bounds_of_the_factor():
    assert factor_of(10.0, 100.0, 32, 2.0) == 1.0  # less noise than at the start
    assert factor_of(math.inf, 100.0, 32, 0.5) == 0.0
    assert factor_of(100.0, 100.0, 32, 1.0) == 1.0
    assert factor_of(0.0, 1e6, 32, 1e3) == 1.0  # and no overflow


def test_the_start_is_the_first_finite_noise_scale_of_a_whole_window():
    training = Training(window=2)
    decay, noise = training.decay, training.noise
    decay._follow(math.inf)  # no signal yet: nothing to compare with
    assert decay.factor == 1.0
    noise.batch = BATCH
    decay._follow(math.nan)
    decay._follow(16.0)
    assert (decay.start, decay.factor) == (16.0, 1.0)
    decay._follow(48.0)
    assert decay.factor == 0.5
    decay._follow(math.nan)  # steps whose sums are not finite change nothing
    assert decay.factor == 0.5


def test_a_checkpoint_goes_on_to_the_bit():
    whole, first = Training(2.0), Training(2.0)
    for t in range(20):
        whole.step(t)
    for t in range(11):
        first.step(t)
    kept = {
        name: getattr(first, name).state_dict() for name in ("net", "optimizer", "noise", "decay")
    }
    buffer = io.BytesIO()
    torch.save(kept, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    second = Training(2.0)
    for name, state in loaded.items():
        getattr(second, name).load_state_dict(state)
    for t in range(11, 20):
        second.step(t)
    assert second.rates == whole.rates
    assert second.decay.state_dict() == whole.decay.state_dict()
    for p, q in zip(second.net.parameters(), whole.net.parameters(), strict=True):
        assert torch.equal(p, q)


def test_bad_input_is_an_error():
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    observer = varreg.observe(net)
    noise = varreg.NoiseScale(observer)
    with pytest.raises(varreg.VarregError, match="expects an optimizer of torch, got Sequential"):
        NoiseDecay(net, noise)
    with pytest.raises(varreg.VarregError, match=r"expects a varreg\.NoiseScale, got Observer"):
        NoiseDecay(optimizer, observer)
    with pytest.raises(varreg.VarregError, match="got one with l1=True"):
        NoiseDecay(optimizer, varreg.NoiseScale(observer, l1=True))
    for power in (0, -1.0, math.inf, math.nan, "2", True):
        with pytest.raises(varreg.VarregError, match="power must be a number above 0"):
            NoiseDecay(optimizer, noise, power)
    decay = NoiseDecay(optimizer, noise, 2.0)
    optimizer.step()
    with pytest.raises(varreg.VarregError, match=r"call noise\.update\(\)"):
        decay.step()
    state = decay.state_dict()
    with pytest.raises(varreg.VarregError, match=r"expects the result of its state_dict\(\)"):
        decay.load_state_dict({"power": 2.0})
    with pytest.raises(varreg.VarregError, match=r"power=2\.0, this one 1\.0"):
        NoiseDecay(optimizer, noise, 1.0).load_state_dict(state)


def test_it_is_not_among_the_public_names():
    assert not hasattr(varreg, "NoiseDecay")


# ---- in the lab


@pytest.fixture
def _single_precision():
    torch.set_default_dtype(torch.float32)


def config_of(name: str, epochs: int = 2, **options) -> Config:
    return Config("logistic", name, 0.05, epochs=epochs, batch=128, options=options)


@pytest.mark.usefixtures("_single_precision")
def test_a_run_with_noise_decay_is_a_bare_loop_with_it(monkeypatch):
    monkeypatch.setattr("varreg.lab.runs.run.WINDOW", 5)
    config = config_of("SGD", epochs=4, momentum=0.9, noise_decay=2)
    running = Run(config)
    torch.manual_seed(config.seed)
    net = running.task.model()
    noise = varreg.NoiseScale(varreg.observe(net), window=5)
    optimizer = torch.optim.SGD(net.parameters(), lr=config.lr, momentum=0.9)
    decay = NoiseDecay(optimizer, noise, 2)
    while not running.is_done:
        x, y = running.batch()
        optimizer.zero_grad()
        running.task.loss(net(x), y).backward()
        noise.update()
        optimizer.step()
        decay.step()
        running.advance()
    assert decay.factor < 0.9
    assert running.decay.factor == pytest.approx(decay.factor, rel=1e-4)
    assert running.statistics["lambda"][-1] == running.decay.factor
    for p, q in zip(net.parameters(), running.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


def test_the_window_of_the_lab_is_the_default_one():
    assert Run(config_of("SGD", noise_decay=1)).noise.window == WINDOW


@pytest.mark.usefixtures("_single_precision")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {"momentum": 0.9, "noise_decay": 2}),
        ("SGD", {"momentum": 0.9, "keep": "best"}),
        ("AveragedSGD", {"momentum": 0.9}),
        ("ScheduleFreeSGD", {"beta": 0.9}),
    ],
)
def test_runs_go_on_to_the_bit(name, options, tmp_path, monkeypatch):
    monkeypatch.setattr("varreg.lab.runs.run.WINDOW", 3)
    config = config_of(name, **options)
    run(config, tmp_path / "whole")
    for steps in (3, 9, 10**9):
        left = iter(range(steps))
        with contextlib.suppress(StoppedError):
            run(
                config,
                tmp_path / "broken",
                stop=lambda left=left, last=steps - 1: next(left) == last,
            )
    assert_same(tmp_path / "whole", tmp_path / "broken")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"noise_decay": -1}, "noise_decay must be from 0 up"),
        ({"noise_decay": 1, "noise": True}, "leave noise and adascale out"),
        ({"noise_decay": 1, "adascale": 8}, "leave noise and adascale out"),
        ({"horizon": 0}, "horizon must be above 0"),
        ({"keep": "bets"}, "Did you mean 'best'"),
    ],
)
def test_a_recipe_that_cannot_be_followed_is_an_error(options, said):
    with pytest.raises(varreg.VarregError, match=said):
        Run(config_of("SGD", **options))


def test_early_stopping_of_an_average_is_refused():
    with pytest.raises(varreg.VarregError, match="judged at its average"):
        Run(config_of("AveragedSGD", keep="best"))


def test_a_schedule_for_another_horizon_is_stretched():
    right, long = Run(config_of("SGD", schedule="cosine")), None
    long = Run(config_of("SGD", schedule="cosine", horizon=2))
    total = right.total
    for t in range(total):
        expected = (1 + math.cos(math.pi * t / (2 * total))) / 2
        assert long.recipe.factor(t, total) == pytest.approx(expected)
    short = Run(config_of("SGD", schedule="linear", horizon=0.5))
    assert short.recipe.factor(total // 2, total) == pytest.approx(0.0, abs=1e-9)
    assert short.recipe.factor(total - 1, total) == 0.0


@pytest.mark.usefixtures("_single_precision")
def test_early_stopping_judges_the_parameters_of_the_lowest_validation_loss():
    config = Config("logistic", "SGD", 30.0, epochs=6, batch=128, options={"keep": "best"})
    running = Run(config)
    while not running.is_done:
        running.advance()
    losses = running.evaluations["valid_loss"]
    plain = Run(Config("logistic", "SGD", 30.0, epochs=6, batch=128))
    while not plain.is_done:
        plain.advance()
    assert losses[:-1] == plain.evaluations["valid_loss"][:-1]
    assert losses[-1] == min(plain.evaluations["valid_loss"]) < plain.evaluations["valid_loss"][-1]


def test_the_lowest_validation_loss_of_a_run_and_its_step():
    seen = {"step": [0, 5, 10, 15], "valid_loss": [2.0, math.nan, 0.5, 0.7]}
    never = {"step": [0, 5], "valid_loss": [math.nan, math.inf]}
    assert lowest([{"evaluations": seen}, {"evaluations": never}]) == {
        "lowest_valid_loss": [0.5, math.inf],
        "step_of_lowest": [10, 0],
    }


def test_best_keeps_copies():
    net, best = nn.Linear(1, 1), Best()
    first = net.weight.detach().clone()
    best.see(1.0, 3, net)
    with torch.no_grad():
        net.weight.add_(1)
    best.see(2.0, 4, net)
    best.see(math.nan, 5, net)
    best.put_back(net)
    assert torch.equal(net.weight, first)
    assert best.step == 3


def test_the_average_is_that_of_its_formula():
    p = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer, average, seen = AveragedSGD([p], lr=0.1, momentum=0.9), None, []
    for t in range(1, 6):
        p.grad = p.detach() * t
        optimizer.step()
        w = 9 / (t + 8)
        x = p.detach().clone()
        average = x if average is None else (1 - w) * average + w * x
        seen.append(x)
    optimizer.swap_average()
    torch.testing.assert_close(p.detach(), average)
    optimizer.swap_average()
    assert torch.equal(p.detach(), seen[-1])


def test_schedule_free_sgd_is_that_of_its_paper():
    """With z and x written out over all gradients; β = 0 is SGD, judged at the mean of z."""
    for beta in (0.0, 0.9):
        p = nn.Parameter(torch.tensor([1.0, -2.0]))
        optimizer = ScheduleFreeSGD([p], lr=0.1, beta=beta)
        zs = [p.detach().clone()]
        for t in range(1, 6):
            mean = sum(zs[1:]) / (t - 1) if t > 1 else zs[0]
            torch.testing.assert_close(p.detach(), (1 - beta) * zs[-1] + beta * mean)
            p.grad = p.detach() * t
            zs.append(zs[-1] - 0.1 * p.grad)
            optimizer.step()
        optimizer.swap_average()
        torch.testing.assert_close(p.detach(), sum(zs[1:]) / 5)
    with pytest.raises(varreg.VarregError, match="beta in"):
        ScheduleFreeSGD([p], lr=0.1, beta=1.0)
