"""Checkpoints of an earlier release, and those of `torch.distributed.checkpoint`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector

import varreg
from tests.optim.data import write_checkpoints as earlier
from tests.support.optimizer_table import RULES
from tests.support.trained_state import BATCH, make, same, statistics


def continued(name, load):
    """Return parameters and λ after three steps more from a checkpoint of release 0.1.0, and those
    that release 0.1.0 had there. With `load`, the optimizer loads its state from the checkpoint.
    """
    file = Path(earlier.__file__).with_name("checkpoints-0.1.0.pt")
    saved = torch.load(file, weights_only=True)
    case, model = saved["cases"][name], nn.Linear(3, 2)
    model.load_state_dict(case["model"])
    varreg.observe(model)
    optimizer = earlier.make(name, model)
    if load:
        optimizer.load_state_dict(case["optimizer"])
    earlier.train(model, optimizer, saved["inputs"][earlier.STEPS :])
    lambdas = [optimizer.lambda_of(p).expand(p.shape).contiguous() for p in model.parameters()]
    now = parameters_to_vector(model.parameters()).detach(), parameters_to_vector(lambdas)
    return now, (case["parameters"], case["lambda"])


@pytest.mark.parametrize("by_native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("name", earlier.CASES)
def test_a_checkpoint_of_an_earlier_release_goes_on_as_it_did_there(name, by_native, monkeypatch):
    if not by_native:
        monkeypatch.setattr("varreg.optim.collect.choose", lambda *_: None)
    now, then = continued(name, load=True)
    for mine, theirs in zip(now, then, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", earlier.CASES)
def test_it_would_be_seen_if_the_state_of_a_checkpoint_were_not_loaded(name):
    now, then = continued(name, load=False)
    for mine, theirs in zip(now, then, strict=True):
        assert (mine - theirs).abs().max() > 1e-3


@pytest.mark.parametrize("name", RULES)
def test_distributed_checkpointing_makes_state_by_a_step_of_zeros(name):
    """A fresh optimizer's step() with zero gradients and lr 0: no error, no warning, no history.
    Then a real round trip.
    """
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    rule, model = RULES[name], make()
    varreg.observe(model)
    optimizer = rule.regularized(model.parameters(), **rule.settings["plain"])
    get_optimizer_state_dict(model, optimizer)
    assert not any(v.any() for v in statistics(optimizer).values())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(BATCH, 4)).square().mean().backward()
        optimizer.step()
    saved = get_optimizer_state_dict(model, optimizer)
    fresh = rule.regularized(model.parameters(), **rule.settings["plain"])
    set_optimizer_state_dict(model, fresh, saved)
    assert same(statistics(optimizer), statistics(fresh))


@pytest.mark.filterwarnings("ignore")  # torch.distributed's own
@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_a_distributed_checkpoint_in_a_folder(name, tmp_path):
    """Saved, and loaded into the state that a fresh optimizer makes for it: nothing is lost, and
    training goes on to the bit.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    rule, runs = RULES[name], []
    for resume in (False, True):
        torch.manual_seed(0)
        model = make()
        varreg.observe(model)
        optimizer = rule.regularized(
            model.parameters(),
            lr=0.01,
            **({"momentum": 0.9, "dampening": 0.5} if name == "SGD" else {}),
        )
        for step in range(8):
            if step == 4 and resume:
                rng = torch.get_rng_state()
                parts = get_state_dict(model, optimizer)
                dcp.save({"model": parts[0], "optimizer": parts[1]}, checkpoint_id=tmp_path)
                model = make()
                varreg.observe(model)
                optimizer = rule.regularized(
                    model.parameters(),
                    lr=0.01,
                    **({"momentum": 0.9, "dampening": 0.5} if name == "SGD" else {}),
                )
                loaded = dict(
                    zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)
                )
                dcp.load(loaded, checkpoint_id=tmp_path)
                set_state_dict(
                    model,
                    optimizer,
                    model_state_dict=loaded["model"],
                    optim_state_dict=loaded["optimizer"],
                )
                torch.set_rng_state(rng)
            optimizer.zero_grad()
            model(torch.randn(BATCH, 4)).square().mean().backward()
            optimizer.step()
        runs.append(model)
    assert all(
        torch.equal(p, q) for p, q in zip(runs[0].parameters(), runs[1].parameters(), strict=True)
    )
