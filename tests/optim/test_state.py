"""Checkpoints of many processes: `torch.distributed.checkpoint`."""

from __future__ import annotations

import pytest
import torch

import varreg
from tests.support.optimizer_table import RULES
from tests.support.trained_state import BATCH, make, same, statistics


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
