"""Every optimizer against its formula, in float64, over many steps of real gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import varreg
from tests.support.optimizer_table import RULES, SETTINGS
from tests.support.truth import losses, one_at_a_time, sample_weights
from tests.support.update_rules import Reference
from varreg.native import library, status
from varreg.optim import adam, increments

pytestmark = pytest.mark.sampled(4)
BATCH = 6
STEPS = 10  # they show a wrong formula, as tests below say
MANY_STEPS = 25 if status() == "in use" else 14  # of every setting


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def close(actual, expected, tolerance: float, what: str) -> None:
    torch.testing.assert_close(
        actual, expected, rtol=tolerance, atol=tolerance, msg=lambda m: f"{what}: {m}"
    )


def run(
    name: str,
    arguments: dict,
    regularizer: dict,
    steps: int = STEPS,
    clip=None,
    clip_reference=None,
    tolerance: float = 1e-9,
) -> None:
    """Train a model and its twin, one by varreg and one by the formulas, and compare after every
    step.
    """
    rule = RULES[name]
    model = make()
    twin = copy.deepcopy(model)
    varreg.observe(model)
    optimizer = rule.regularized(model.parameters(), **{**arguments, **regularizer})
    variance = optimizer.param_groups[0].get("variance")
    reference = Reference(
        twin,
        rule.reference,
        {**rule.defaults, **arguments, **regularizer, "direct": variance == "direct"},
    )
    weights = sample_weights(BATCH)
    for step in range(steps):
        x = torch.randn(BATCH, 4)
        optimizer.zero_grad()
        losses(model(x), weights).mean().backward()
        if clip:
            clip(model)
        optimizer.step()
        reference.step(one_at_a_time(twin, (x,), weights), clip_reference)
        for (n, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            lam, expected = optimizer.lambda_of(p), reference.lambdas[n]
            close(lam, expected, tolerance * 100, f"λ of {n} at step {step}")
            close(p.detach(), q.detach(), tolerance, f"{n} at step {step}")
    assert any(not torch.allclose(lam, torch.ones(())) for lam in reference.lambdas.values()), (
        "λ = 1 all along: nothing was tested"
    )


VERSIONS = [
    (n, s, o)
    for n, s in SETTINGS
    for o in ([{"variance": "simplified"}, {"variance": "direct"}] if RULES[n].adaptive else [{}])
]


@pytest.mark.parametrize(("name", "setting", "version"), VERSIONS)
def test_against_the_formula(name, setting, version):
    run(name, RULES[name].settings[setting], version, MANY_STEPS)


OPTIONS = {
    "history sum": {"history": "sum"},
    "history ema": {"history": "ema", "history_beta": 0.8},
    "history geometric": {"history": "geometric"},
    "history harmonic": {"history": "harmonic"},
    "sigmoid": {"form": "sigmoid", "s": 1.0},
    "affine": {"form": "affine", "history": "harmonic"},
    "bounds": {"lambda_min": 0.5, "lambda_max": 1.5},
    "raw variance": {"scale_free": False},
    "per tensor": {"per": "tensor"},
    "per model": {"per": "model", "history": "geometric"},
    "cap": {"cap": 0.5},
    "calibrated": {"calibrate": True},
    "calibrated per tensor": {"calibrate": True, "per": "tensor"},
    "calibrated, affine": {"calibrate": True, "form": "affine", "history": "harmonic"},
    "calibrated, bounds": {"calibrate": True, "lambda_min": 0.8, "lambda_max": 1.2},
    # slow enough to stay: where training diverges, rounding grows with it
    "strong": {"s": 15.0, "lr": 0.005},
    "weak": {"s": 0.1, "form": "affine"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", RULES)
def test_options_against_the_formula(name, options):
    run(name, RULES[name].settings["plain"], options)


@pytest.mark.parametrize("options", [{}, *OPTIONS.values()], ids=["defaults", *OPTIONS])
def test_without_the_compiled_kernel(options, monkeypatch):
    monkeypatch.setattr(library, "serves", lambda *_: False)
    for name, setting in (
        ("SGD", "plain"),
        ("SGD", "everything"),
        ("Adam", "plain"),
        ("AdamW", "plain"),
    ):
        run(name, RULES[name].settings[setting], options)


@pytest.mark.parametrize("name", RULES)
def test_default_variance_is_the_papers_implemented_version(name):
    optimizer = RULES[name].regularized([nn.Parameter(torch.zeros(2))], lr=0.1)
    version = "direct" if name == "Adagrad" else "simplified"
    expected = version if RULES[name].adaptive else None
    assert optimizer.param_groups[0].get("variance") == expected


def norm_clip(means):
    norm = torch.stack([g.norm() for g in means.values()]).norm()
    return {n: g * min(1.0, 0.05 / (norm + 1e-6)) for n, g in means.items()}


@pytest.mark.parametrize(("name", "setting"), SETTINGS)
def test_clipping_by_norm_leaves_rho_alone(name, setting):
    run(
        name,
        RULES[name].settings[setting],
        {},
        clip=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.05),
        clip_reference=norm_clip,
    )


@pytest.mark.parametrize("name", RULES)
def test_clipping_by_value_leaves_rho_alone(name):
    run(
        name,
        RULES[name].settings["plain"],
        {},
        clip=lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.05),
        clip_reference=lambda means: {n: g.clamp(-0.05, 0.05) for n, g in means.items()},
    )


WRONG = {
    "V of the heavy ball decays by μ": (
        ("SGD", "momentum"),
        "momentum",
        lambda V, s2, mu, dampening, first: (
            V.copy_(s2) if first else V.mul_(mu).add_(s2, alpha=(1 - dampening) ** 2)
        ),
    ),
    "Nesterov's last weight is squared alone": (
        ("SGD", "nesterov"),
        "nesterov",
        lambda V, s2, mu, dampening, first: (V * mu**2).add_(s2),
    ),
    "N decays by β": (
        ("Adam", "plain"),
        "numerator_weights",
        lambda beta: (beta, (1 - beta) ** 2),
    ),
    "C decays by β₁": (
        ("Adam", "plain"),
        "covariance_weights",
        lambda beta1, beta2: (beta1, (1 - beta1) * (1 - beta2)),
    ),
    "V decays by β, as the paper prints it": (
        ("Adam", "plain"),
        "denominator_weights",
        lambda beta: (beta, (1 - beta) ** 2),
    ),
    "V of RMSprop decays by α": (
        ("RMSprop", "plain"),
        "denominator_weights",
        lambda beta: (beta, (1 - beta) ** 2),
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_ten_steps_show_a_wrong_formula(wrong, monkeypatch):
    (name, setting), function, replacement = WRONG[wrong]
    monkeypatch.setattr(library, "serves", lambda *_: False)
    monkeypatch.setattr("varreg.native.serves", lambda *_: False)
    run(name, RULES[name].settings[setting], {}, steps=5)  # the right one passes
    monkeypatch.setattr(increments, function, replacement)
    with pytest.raises(AssertionError, match=r"λ of .* at step"):
        run(name, RULES[name].settings[setting], {})


@pytest.mark.parametrize("power", [0, 2])
def test_ten_steps_show_a_wrong_bias_correction(power, monkeypatch):
    """None, or its square, in place of the correction of Adam's average of squares."""
    monkeypatch.setattr("varreg.native.serves", lambda *_: False)
    right = increments.bracket
    monkeypatch.setattr(
        increments, "bracket", lambda slope, sums, unit: right(slope, sums, unit**power)
    )
    with pytest.raises(AssertionError, match=r"λ of .* at step"):
        run("Adam", RULES["Adam"].settings["plain"], {})


def test_ten_steps_show_a_wrong_bias_correction_of_the_numerator(monkeypatch):
    """It cancels in ρ of an element, and is a factor of the variance itself."""
    right = adam._average
    monkeypatch.setattr(adam, "_average", lambda *given: (*right(*given)[:3], 1.0))
    monkeypatch.setattr("varreg.native.serves", lambda *_: False)
    with pytest.raises(AssertionError, match=r"λ of .* at step"):
        run("Adam", RULES["Adam"].settings["plain"], {"scale_free": False}, steps=10)


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return (self.w * x).sum(1)


GIVEN = [[[1.0, 4.0], [3.0, 0.0]], [[1.0, 1.0], [1.0, 3.0]], [[-1.0, 2.0], [3.0, 2.0]]]
GOLDEN = {
    # ḡ = (2, 2), (1, 2), (1, 2); mean squares (5, 8), (1, 5), (5, 4); so ρ = (1/4, 1), (0, 1/4),
    # (4, 0).
    # Ω = (1/4, 1), (1/4, 5/4), (17/4, 5/4). α = 0.1, s = 2: λ = 3/(1 + 2ρ/Ω), and with the average
    # ρ̄ = Ω/t in place of Ω.
    "sum": [
        [(1, 1), (0.8, 0.8)],
        [(3, 15 / 7), (0.5, 13 / 35)],
        [(51 / 49, 3), (0.5 - 5.1 / 49, 13 / 35 - 0.6)],
    ],
    "mean": [
        [(1, 1), (0.8, 0.8)],
        [(3, 5 / 3), (0.5, 7 / 15)],
        [(51 / 113, 3), (0.5 - 5.1 / 113, 7 / 15 - 0.6)],
    ],
}


@pytest.mark.parametrize("history", GOLDEN)
def test_algorithm_1_by_hand(history):
    """Two samples, two parameters, three steps, worked out on paper."""
    model = Linear()
    varreg.observe(model)
    optimizer = varreg.VRSGD(model.parameters(), lr=0.1, s=2.0, history=history)
    for gradients, (lam, x) in zip(GIVEN, GOLDEN[history], strict=True):
        optimizer.zero_grad()
        model(torch.tensor(gradients)).mean().backward()
        optimizer.step()
        torch.testing.assert_close(
            optimizer.lambda_of(model.w), torch.tensor(lam, dtype=torch.float64), rtol=1e-14, atol=0
        )
        torch.testing.assert_close(model.w.detach(), torch.tensor(x), rtol=1e-14, atol=1e-15)


def test_momentum_that_changes_from_step_to_step():
    """As OneCycleLR does it: b = μ₃(μ₂g₁ + g₂) + g₃, and so Var = μ₃²(μ₂²v₁ + v₂) + v₃."""
    model = Linear()
    varreg.observe(model)
    optimizer = varreg.VRSGD(
        model.parameters(), lr=0.1, momentum=0.9, scale_free=False, history="sum"
    )
    for mu, gradients in zip((0.9, 0.7, 0.5), GIVEN, strict=True):
        optimizer.param_groups[0]["momentum"] = mu
        optimizer.zero_grad()
        model(torch.tensor(gradients)).mean().backward()
        optimizer.step()
    v = [torch.tensor(g).var(0, correction=0) for g in GIVEN]
    torch.testing.assert_close(
        optimizer.state[model.w]["vr_variance"], 0.25 * (0.49 * v[0] + v[1]) + v[2]
    )
