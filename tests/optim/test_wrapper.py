"""`VarianceRegularized`: any other optimizer, with the change that it makes scaled by λ."""

from __future__ import annotations

import copy
import io
import pickle

import lion_pytorch
import pytest
import pytorch_optimizer
import torch
from torch import nn
from torch.optim import lr_scheduler

import varreg

BASES = {
    "Rprop": lambda p, **o: torch.optim.Rprop(p, **{"lr": 0.01, **o}),
    "ASGD": lambda p, **o: torch.optim.ASGD(p, **{"lr": 0.01, **o}),
    "RAdam": lambda p, **o: torch.optim.RAdam(p, **{"lr": 0.01, **o}),
    "RAdam, decoupled": lambda p, **o: torch.optim.RAdam(
        p, **{"lr": 0.01, "weight_decay": 0.3, "decoupled_weight_decay": True, **o}
    ),
    "Adamax": lambda p, **o: torch.optim.Adamax(p, **{"lr": 0.01, **o}),
    "Muon": lambda p, **o: torch.optim.Muon(p, **{"lr": 0.01, **o}),
    "Adafactor": lambda p, **o: torch.optim.Adafactor(p, **{"lr": 0.01, **o}),
    "SGD": lambda p, **o: torch.optim.SGD(
        p, **{"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1, **o}
    ),
    "Lion": lambda p, **o: lion_pytorch.Lion(p, **{"lr": 0.001, "weight_decay": 0.1, **o}),
    "AdaBelief": lambda p, **o: pytorch_optimizer.AdaBelief(p, **{"lr": 0.01, **o}),
}
if not hasattr(torch.optim, "Muon"):  # before torch 2.9
    del BASES["Muon"]


def observed(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(4, 5, bias=False), nn.Tanh(), nn.Linear(5, 3, bias=False)
    )  # Muon is for matrices
    varreg.observe(model)
    return model


def backward(model: nn.Module) -> torch.Tensor:
    model.zero_grad()
    loss = model(torch.randn(6, 4)).square().mean()
    loss.backward()
    return loss


@pytest.mark.parametrize("name", BASES)
def test_the_change_is_scaled_by_lambda(name):
    """Step by step: what the base would do from here, times λ as the formula has it."""
    model = observed()
    optimizer = varreg.VarianceRegularized(BASES[name](model.parameters()), s=2.0)
    rhos = {p: [] for p in model.parameters()}
    for _ in range(20):
        backward(model)
        before = {p: p.detach().clone() for p in model.parameters()}
        twin = copy.deepcopy(model)
        base = BASES[name](twin.parameters())
        base.load_state_dict(copy.deepcopy(optimizer.base.state_dict()))
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            q.grad = p.grad.clone()
        base.step()
        for p in model.parameters():
            rhos[p].append(varreg.moments(p).rho)
        optimizer.step()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            lam = 3 / (1 + 2 * rhos[p][-1] / torch.stack(rhos[p]).mean(0))
            torch.testing.assert_close(optimizer.lambda_of(p), lam, rtol=1e-9, atol=0)
            torch.testing.assert_close(
                p.detach(), before[p] + lam * (q.detach() - before[p]), rtol=1e-9, atol=1e-12
            )
    assert not torch.allclose(lam, torch.ones(()))


@pytest.mark.parametrize("name", BASES)
def test_s_0_is_the_base_bit_for_bit(name):
    model = observed()
    twin = copy.deepcopy(model)
    ours, theirs = (
        varreg.VarianceRegularized(BASES[name](model.parameters()), s=0),
        BASES[name](twin.parameters()),
    )
    for _ in range(20):
        backward(model)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            q.grad = p.grad.clone()
        ours.step()
        theirs.step()
        assert all(
            torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True)
        )


@pytest.mark.parametrize("name", BASES)
def test_resume_is_exact_through_a_file(name):
    runs = []
    for resume in (False, True):
        model = observed()
        optimizer = varreg.VarianceRegularized(BASES[name](model.parameters()), history="geometric")
        for step in range(12):
            if step == 6 and resume:
                file, rng = io.BytesIO(), torch.get_rng_state()
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
                file.seek(0)
                saved = torch.load(file, weights_only=True)
                model = observed(1)
                torch.set_rng_state(rng)
                model.load_state_dict(saved["model"])
                optimizer = varreg.VarianceRegularized(BASES[name](model.parameters(), lr=0.5))
                optimizer.load_state_dict(saved["optimizer"])
            backward(model)
            optimizer.step()
        runs.append(model)
    assert all(
        torch.equal(p, q) for p, q in zip(runs[0].parameters(), runs[1].parameters(), strict=True)
    )


def test_it_is_an_optimizer_that_shares_all_with_its_base():
    model = observed()
    base = torch.optim.RAdam(model[0].parameters(), lr=0.1)
    optimizer = varreg.VarianceRegularized(base, s=1.0)
    assert isinstance(optimizer, torch.optim.Optimizer)
    optimizer.add_param_group({"params": model[2].parameters(), "s": 3.0})
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    other = lr_scheduler.MultiplicativeLR(base, lambda t: 1.0)
    assert base.param_groups is optimizer.param_groups
    assert [g["s"] for g in base.param_groups] == [1.0, 3.0]
    loss = optimizer.step(lambda: backward(model))
    assert loss.requires_grad
    scheduler.step()
    other.step()
    assert base.param_groups[0]["lr"] == 0.05
    assert base.state is optimizer.state
    assert "vr_history" in base.state[model[0].weight]
    optimizer.zero_grad()
    assert model[0].weight.grad is None
    assert repr(optimizer).startswith("VarianceRegularized RAdam (")
    optimizer.load_state_dict(optimizer.state_dict())
    assert base.state is optimizer.state
    assert base.param_groups is optimizer.param_groups
    assert (
        len(optimizer.lambda_summary().parameters) == 0
    )  # of the last step, which another run may have made


def test_the_base_may_load_a_checkpoint_too():
    model = observed()
    base = torch.optim.RAdam(model.parameters(), lr=0.1)
    optimizer = varreg.VarianceRegularized(base, s=1.0)
    backward(model)
    optimizer.step()
    base.load_state_dict(copy.deepcopy(base.state_dict()))
    assert optimizer.state is base.state
    assert optimizer.param_groups is base.param_groups
    backward(model)
    optimizer.step()
    assert float(base.state[model[0].weight]["vr_count"].max()) == 2


def test_copies():
    model = observed()
    optimizer = varreg.VarianceRegularized(torch.optim.RAdam(model.parameters(), lr=0.1), s=1.0)
    backward(model)
    optimizer.step()
    for again in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert repr(again) == repr(optimizer)
        assert again.base.state is again.state
        p = again.param_groups[0]["params"][0]
        assert torch.equal(
            again.state[p]["vr_history"], optimizer.state[model[0].weight]["vr_history"]
        )


def test_attributes_of_the_base():
    model = observed()
    optimizer = varreg.VarianceRegularized(
        pytorch_optimizer.ScheduleFreeAdamW(model.parameters(), lr=0.01)
    )
    optimizer.train()  # a method of the base
    backward(model)
    optimizer.step()
    optimizer.eval()
    with pytest.raises(AttributeError, match="no_such"):
        optimizer.no_such  # noqa: B018


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p, "expects a torch.optim.Optimizer, got list"),
        (lambda p: varreg.VRSGD(p, lr=0.1), "VRSGD is regularized already"),
        (lambda p: torch.optim.LBFGS(p), "LBFGS is not a first-order method"),
        (
            lambda p: varreg.VarianceRegularized(torch.optim.RAdam(p)).base,
            "this RAdam is wrapped already",
        ),
    ],
)
def test_what_cannot_be_wrapped(make, message):
    with pytest.raises(ValueError, match=message):
        varreg.VarianceRegularized(make(list(observed().parameters())))


def test_bad_options_leave_the_base_alone():
    base = torch.optim.RAdam(observed().parameters())
    with pytest.raises(ValueError, match="s must be a finite number"):
        varreg.VarianceRegularized(base, s=-1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'impact'"):
        varreg.VarianceRegularized(base, impact=1)
    assert "s" not in base.param_groups[0]
    optimizer = varreg.VarianceRegularized(base)
    with pytest.raises(ValueError, match="form must be one of"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "form": "linear"})
    assert len(base.param_groups) == 1
