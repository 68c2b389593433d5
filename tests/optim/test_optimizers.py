"""Behaviour that users of torch.optim take for granted, driven by PyTorch's own `OptimizerInfo`
wherever it can be used.
"""

from __future__ import annotations

import copy
import inspect
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.testing._internal.common_optimizers import OptimizerErrorEnum

import varreg
from tests.support.optimizer_table import RULES, SETTINGS
from tests.test_regularizer import BAD
from varreg.regularizer import DEFAULTS

BATCH = 6


def make(dtype=torch.float64) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def backward(model: nn.Module, batch: int = BATCH) -> torch.Tensor:
    p = next(model.parameters())
    model.zero_grad()
    loss = model(torch.randn(batch, 4, dtype=p.dtype)).square().mean()
    loss.backward()
    return loss


def train(model: nn.Module, optimizer, steps: int, scheduler=None) -> None:
    for _ in range(steps):
        backward(model)
        optimizer.step()
        if scheduler:
            scheduler.step()


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def observed(dtype=torch.float64) -> nn.Module:
    model = make(dtype)
    varreg.observe(model)
    return model


def inputs(name: str):
    """PyTorch's own arguments for the base, and its implementations."""
    info = RULES[name].info
    flags = [{}, {"foreach": False}, {"foreach": True}]
    if "fused" in info.supported_impls:
        flags.append({"fused": True})
    for given in info.optim_inputs_func(device="cpu"):
        for flag in flags:
            if not (flag.get("foreach") and isinstance(given.kwargs.get("lr"), torch.Tensor)):
                yield pytest.param(name, {**given.kwargs, **flag}, id=f"{name}-{given.desc}-{flag}")


INPUTS = [p for name in RULES for p in inputs(name)]


# With s = 0 nothing is kept of a history: each precision is tried with one, and with one scope.
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("dtype", "history", "per"),
    [
        (torch.float32, "mean", "tensor"),
        (torch.float64, "geometric", "element"),
        (torch.bfloat16, "mean", "element"),
    ],
)
@pytest.mark.parametrize(("name", "arguments"), INPUTS)
def test_s_0_is_the_base_bit_for_bit(name, arguments, dtype, history, per):
    rule, model = RULES[name], observed(dtype)
    twin = copy.deepcopy(model)
    ours = rule.regularized(
        model.parameters(),
        **arguments,
        s=0,
        history=history,
        per=per,
    )
    theirs = rule.base(twin.parameters(), **arguments)
    for _ in range(8):
        backward(model)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            q.grad = p.grad.clone()
        ours.step()
        theirs.step()
        assert equal(model, twin)
    assert not any(key.startswith("vr_") for state in ours.state.values() for key in state)


@pytest.mark.parametrize("name", RULES)
def test_signature_is_the_counterparts_and_then_ours(name):
    rule = RULES[name]
    ours, theirs = (
        list(inspect.signature(c).parameters.values()) for c in (rule.regularized, rule.base)
    )
    assert [(p.name, p.default, p.kind) for p in ours[: len(theirs)]] == [
        (p.name, p.default, p.kind) for p in theirs
    ]
    rest = {p.name: p.default for p in ours[len(theirs) :]}
    assert all(p.kind is p.KEYWORD_ONLY for p in ours[len(theirs) :])
    assert {k: rest[k] for k in DEFAULTS} == DEFAULTS
    assert set(rest) - set(DEFAULTS) == ({"variance"} if rule.adaptive else set())
    assert issubclass(rule.regularized, rule.base)


@pytest.mark.parametrize("name", RULES)
def test_errors_on_construction_are_the_counterparts(name):
    rule = RULES[name]
    for error in rule.info.optim_error_inputs_func(device="cpu", dtype=torch.float64):
        given = error.optimizer_error_input
        assert error.error_on is OptimizerErrorEnum.CONSTRUCTION_ERROR
        if issubclass(error.error_type, Warning):
            with pytest.warns(error.error_type, match=error.error_regex):
                rule.regularized(given.params, **given.kwargs)
        else:
            with pytest.raises(error.error_type, match=error.error_regex):
                rule.regularized(given.params, **given.kwargs)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("bad", "message"), BAD)
@pytest.mark.parametrize("name", RULES)
def test_bad_options(name, bad, message):
    cls = RULES[name].regularized
    with pytest.raises(ValueError, match=message):
        cls(make().parameters(), lr=0.1, **bad)
    with pytest.raises(ValueError, match=message):
        cls([{"params": make().parameters(), **bad}], lr=0.1)
    optimizer = cls(make().parameters(), lr=0.1)
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": make().parameters(), **bad})
    assert len(optimizer.param_groups) == 1


def test_other_bad_arguments():
    params = list(make().parameters())
    with pytest.raises(
        TypeError, match=r"VRSGD.__init__\(\) got an unexpected keyword argument 'impact'"
    ):
        varreg.VRSGD(params, lr=0.1, impact=2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'variance'"):
        varreg.VRSGD(params, lr=0.1, variance="direct")
    with pytest.raises(
        ValueError, match="variance must be one of 'simplified', 'direct'; got 'exact'"
    ):
        varreg.VRAdam(params, variance="exact")
    with pytest.raises(ValueError, match="VRSGD does not support differentiable=True"):
        varreg.VRSGD(params, lr=0.1, differentiable=True)
    with pytest.raises(ValueError, match="VRAdam does not support capturable=True"):
        varreg.VRAdam(params, capturable=True)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "setting"), SETTINGS)
def test_implementations_agree(name, setting):
    rule, results = RULES[name], []
    flags = [
        {"foreach": False},
        {"foreach": True},
        *([{"fused": True}] if "fused" in rule.info.supported_impls else []),
    ]
    for flag in flags:
        torch.manual_seed(0)
        model = observed()
        train(model, rule.regularized(model.parameters(), **rule.settings[setting], **flag), 20)
        results.append(model)
    for other in results[1:]:
        for p, q in zip(results[0].parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-11)


def test_parts_large_and_small_make_no_difference(monkeypatch):
    results = []
    for small, large in ((1 << 14, 1 << 19), (0, 7), (0, 1 << 19), (6, 7)):
        monkeypatch.setattr("varreg.optim.parts.SMALL_PARAMETER", small)
        monkeypatch.setattr("varreg.optim.parts.LARGE_PARAMETER", large)
        torch.manual_seed(0)
        model = observed()
        train(model, varreg.VRAdam(model.parameters(), lr=0.01, amsgrad=True), 10)
        train(model, varreg.VRSGD(model.parameters(), lr=0.01, momentum=0.9, per="tensor"), 10)
        results.append(model)
    for other in results[1:]:
        for p, q in zip(results[0].parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-13)


def test_channels_last():
    results = []
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 4 * 4, 2)).to(
            memory_format=layout
        )
        varreg.observe(model)
        optimizer = varreg.VRSGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(5, 3, 6, 6).to(memory_format=layout)).square().mean().backward()
            optimizer.step()
        results.append(model)
    for p, q in zip(results[0].parameters(), results[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", RULES)
def test_closure_is_run_once_with_gradients_on(name):
    model, calls = observed(), []
    optimizer = RULES[name].regularized(model.parameters(), lr=0.01)

    def closure():
        assert torch.is_grad_enabled()
        calls.append(backward(model))
        return calls[-1]

    with torch.no_grad():
        assert optimizer.step(closure) is calls[0]
    assert len(calls) == 1
    assert optimizer.lambda_of(model[0].weight) is not None
    assert optimizer.step() is None


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "setting"), SETTINGS)
def test_step_leaves_gradients_alone(name, setting):
    model = observed()
    optimizer = RULES[name].regularized(model.parameters(), **RULES[name].settings[setting])
    for _ in range(3):
        backward(model)
        before = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))


SCHEDULERS = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 4),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.9),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(
        o, 1e-3, 1e-2, 2, cycle_momentum="momentum" in o.defaults
    ),
    "CyclicLR without momentum": lambda o: lr_scheduler.CyclicLR(
        o, 1e-3, 1e-2, 2, cycle_momentum=False
    ),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(
        o, 0.01, 10, cycle_momentum="momentum" in o.defaults or "betas" in o.defaults
    ),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], o
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
}
MOMENTUM = {"SGD": {"momentum": 0.9}, "RMSprop": {"momentum": 0.9}}


@pytest.mark.filterwarnings("ignore:The epoch parameter in")  # SequentialLR's own, in torch 2.8
@pytest.mark.sampled(4)
@pytest.mark.parametrize("make_scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize("name", RULES)
def test_schedulers(name, make_scheduler):
    """With s = 0 the base and its schedule to the bit; with s = 2, λ around that same schedule."""
    rule, model = RULES[name], observed()
    twin, third = copy.deepcopy(model), observed()
    theirs = rule.base(twin.parameters(), lr=0.01, **MOMENTUM.get(name, {}))
    zero, ours = (
        rule.regularized(m.parameters(), lr=0.01, s=s, **MOMENTUM.get(name, {}))
        for m, s in ((model, 0), (third, 2.0))
    )
    schedulers = [make_scheduler(o) for o in (theirs, zero, ours)]
    for _ in range(8):
        backward(model)
        backward(third)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            q.grad = p.grad.clone()
        for optimizer, scheduler in zip((theirs, zero, ours), schedulers, strict=True):
            optimizer.step()
            scheduler.step()
        assert equal(model, twin)
        assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]
    assert all(p.isfinite().all() for p in third.parameters())


def test_reduce_on_plateau():
    model = observed()
    optimizer = varreg.VRSGD(model.parameters(), lr=0.1)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for _ in range(3):
        backward(model)
        optimizer.step()
        scheduler.step(1.0)
    assert optimizer.param_groups[0]["lr"] < 0.1


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "setting"), SETTINGS)
def test_resume_is_exact_through_a_file(name, setting):
    rule = RULES[name]
    arguments = {**rule.settings[setting], "history": "geometric", "calibrate": True}
    runs = []
    for resume in (False, True):
        torch.manual_seed(1)
        model = observed()
        optimizer = rule.regularized(model.parameters(), **arguments)
        train(model, optimizer, 6)
        if resume:
            file = io.BytesIO()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            file.seek(0)
            saved = torch.load(file, weights_only=True)
            rng = torch.get_rng_state()
            model = observed()
            torch.set_rng_state(rng)
            model.load_state_dict(saved["model"])
            optimizer = rule.regularized(model.parameters(), lr=0.5)
            optimizer.load_state_dict(saved["optimizer"])
        train(model, optimizer, 6)
        runs.append(model)
    assert equal(*runs)


@pytest.mark.parametrize("name", RULES)
def test_a_checkpoint_of_the_base_loads(name):
    rule, model = RULES[name], observed()
    base = rule.base(model.parameters(), lr=0.01)
    train(model, base, 3)
    ours = rule.regularized(model.parameters(), lr=0.5, s=1.5, form="sigmoid")
    ours.load_state_dict(base.state_dict())
    group = ours.param_groups[0]
    assert (group["lr"], group["s"], group["form"]) == (0.01, 1.5, "sigmoid")
    train(model, ours, 3)
    assert ours.lambda_of(model[0].weight) is not None


def test_a_checkpoint_of_the_base_leaves_each_groups_options_alone():
    model = make()
    base = torch.optim.SGD(
        [{"params": model[0].parameters()}, {"params": model[2].parameters()}], lr=0.01
    )
    ours = varreg.VRSGD(
        [
            {"params": model[0].parameters(), "s": 0.0},
            {"params": model[2].parameters(), "s": 0.5, "history": "ema"},
        ],
        lr=0.5,
    )
    ours.load_state_dict(base.state_dict())
    assert [(g["lr"], g["s"], g["history"]) for g in ours.param_groups] == [
        (0.01, 0.0, "mean"),
        (0.01, 0.5, "ema"),
    ]
    with pytest.raises(ValueError, match="different number of parameter groups"):
        ours.load_state_dict(torch.optim.SGD(model.parameters(), lr=0.1).state_dict())


def test_numbers_of_numpy_do_not_get_into_a_checkpoint():
    optimizer = varreg.VRSGD(
        [{"params": make().parameters(), "cap": np.float64(1.5)}], lr=0.1, s=np.float64(2)
    )
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["param_groups"][0]["cap"] == 1.5


def test_an_older_checkpoint_without_newer_keys_loads():
    model = observed()
    ours = varreg.VRAdam(model.parameters())
    train(model, ours, 3)
    saved = ours.state_dict()
    for group in saved["param_groups"]:
        for key in ("calibrate", "cap", "variance"):
            del group[key]
    again = varreg.VRAdam(model.parameters())
    again.load_state_dict(saved)
    assert again.param_groups[0]["variance"] == "simplified"
    train(model, again, 3)


def test_a_checkpoint_with_bad_options_is_refused():
    ours = varreg.VRSGD(make().parameters(), lr=0.1)
    saved = ours.state_dict()
    saved["param_groups"][0]["s"] = -1.0
    with pytest.raises(ValueError, match="s must be a finite number"):
        ours.load_state_dict(saved)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", RULES)
def test_statistics_stay_in_float32(name, dtype):
    rule, model = RULES[name], observed(dtype)
    eps = (
        {"eps": 1e-3} if "eps" in inspect.signature(rule.base).parameters else {}
    )  # 1e-8 is 0 in float16, for torch too
    optimizer = rule.regularized(model.parameters(), lr=0.01, **eps)
    train(model, optimizer, 3)
    twin = rule.regularized(model.parameters(), lr=0.01, **eps)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p in model.parameters():
        ours = {k: v for k, v in optimizer.state[p].items() if k.startswith("vr_")}
        assert len(ours) >= 2
        for key, value in ours.items():
            assert value.dtype == torch.float32
            assert twin.state[p][key].dtype == torch.float32
            assert torch.equal(twin.state[p][key], value)
        assert not torch.equal(
            ours["vr_history"], ours["vr_history"].to(dtype).float()
        )  # it would have been lost
        assert p.isfinite().all()


def test_loading_runs_hooks_and_they_may_change_the_state():
    model = observed()
    ours = varreg.VRSGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, ours, 3)
    again = varreg.VRSGD(model.parameters(), lr=0.1, momentum=0.9)

    def double(optimizer, state):
        state = copy.deepcopy(state)
        state["state"][0]["vr_history"] *= 2
        return state

    again.register_load_state_dict_pre_hook(double)
    again.load_state_dict(ours.state_dict())
    p = model[0].weight
    torch.testing.assert_close(again.state[p]["vr_history"], ours.state[p]["vr_history"] * 2)
    assert len(again._optimizer_load_state_dict_pre_hooks) == 1


@pytest.mark.parametrize("name", RULES)
def test_copies(name):
    rule, model = RULES[name], observed()
    optimizer = rule.regularized(model.parameters(), lr=0.01, s=1.5)
    train(model, optimizer, 3)
    for again in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert repr(again) == repr(optimizer)
        assert type(again) is type(optimizer)
        p, q = again.param_groups[0]["params"][0], model[0].weight
        assert p is not q
        assert torch.equal(again.state[p]["vr_history"], optimizer.state[q]["vr_history"])
        again.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
        assert again.param_groups[1]["s"] == 1.5
        for p in again.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        with pytest.warns(
            UserWarning, match="no gradient variance"
        ):  # the copy's parameters are not observed
            again.step()
    pair = copy.deepcopy((model, optimizer))  # together, they are one again
    varreg.observe(pair[0])
    train(*pair, 1)
    assert pair[1].lambda_of(pair[0][0].weight) is not None


def test_repr_shows_the_options():
    text = repr(varreg.VRSGD(make().parameters(), lr=0.1))
    assert text.startswith("VRSGD (")
    assert "history: mean" in text
    assert "s: 2.0" in text


@pytest.mark.parametrize("name", RULES)
def test_hooks_run_once(name):
    rule, model, seen = RULES[name], observed(), []
    rule.base(make().parameters(), lr=0.1)  # whose class's step is wrapped from now on
    optimizer = rule.regularized(model.parameters(), lr=0.01)
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    everywhere = register_optimizer_step_post_hook(lambda *_: seen.append("global"))
    try:
        train(model, optimizer, 2)
    finally:
        everywhere.remove()
    assert seen == ["pre", "post", "global"] * 2


def test_groups_have_options_of_their_own():
    model = observed()
    optimizer = varreg.VRSGD(
        [
            {"params": model[0].parameters(), "s": 0.0},
            {"params": model[2].parameters(), "per": "tensor"},
        ],
        lr=0.1,
    )
    train(model, optimizer, 3)
    assert optimizer.lambda_of(model[0].weight) is None
    assert optimizer.lambda_of(model[2].weight).shape == ()
    optimizer.param_groups[1]["per"] = "element"
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(
        ValueError,
        match=r"the history of parameter '2.weight' has shape \(\); with per='element' it must "
        r"have \(3, 5\)",
    ):
        train(model, optimizer, 1)
    assert all(
        torch.equal(v, before[k]) for k, v in model.state_dict().items()
    )  # nothing was changed


def test_add_param_group_later():
    model = observed()
    optimizer = varreg.VRSGD(model[0].parameters(), lr=0.1, s=1.0)
    train(model, optimizer, 2)
    optimizer.add_param_group({"params": model[2].parameters(), "s": 3.0})
    train(model, optimizer, 2)
    assert [g["s"] for g in optimizer.param_groups] == [1.0, 3.0]
    counts = [float(optimizer.state[m.weight]["vr_count"].max()) for m in (model[0], model[2])]
    assert counts == [4.0, 2.0]


def test_named_parameters_name_the_rows():
    model = observed()
    optimizer = varreg.VRSGD([(f"my.{n}", p) for n, p in model.named_parameters()], lr=0.1)
    train(model, optimizer, 2)
    assert [r.name for r in optimizer.lambda_summary().parameters] == [
        "my.0.weight",
        "my.0.bias",
        "my.2.weight",
        "my.2.bias",
    ]


@pytest.mark.parametrize("name", RULES)
def test_tensor_lr(name):
    runs = []
    for lr in (0.01, torch.tensor(0.01)):
        torch.manual_seed(0)
        model = observed()
        train(model, RULES[name].regularized(model.parameters(), lr=lr, foreach=False), 10)
        runs.append(model)
    for p, q in zip(runs[0].parameters(), runs[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


def test_lambda_of_and_its_summary():
    model = observed()
    optimizer = varreg.VRSGD(model.parameters(), lr=0.1)
    assert str(optimizer.lambda_summary()).startswith(
        "varreg: no λ: no step yet, or the last one was plain"
    )
    assert optimizer.lambda_summary().as_dict() == {}
    train(model, optimizer, 5)
    summary = optimizer.lambda_summary()
    assert [r.name for r in summary.parameters] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    p = model[0].weight
    lam, row = optimizer.lambda_of(p), summary.parameters[0]
    assert lam.shape == p.shape
    assert row.mean == pytest.approx(float(lam.mean()))
    assert row.effective == pytest.approx(float((lam * p.grad**2).sum() / (p.grad**2).sum()))
    assert row.quantiles[1] == pytest.approx(float(lam.flatten().sort().values[10]))
    assert summary.model.elements == sum(p.numel() for p in model.parameters())
    flat = summary.as_dict()
    assert flat["lambda/0.weight/mean"] == row.mean
    assert flat["lambda/q90"] == summary.model.quantiles[2]
    assert str(summary).splitlines()[-1].startswith("all ")
    optimizer.zero_grad()
    assert "nan" in str(optimizer.lambda_summary())  # the weighted mean needs gradients
