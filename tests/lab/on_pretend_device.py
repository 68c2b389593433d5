"""A run of the lab on a device that is not the CPU. Run by test_recipes.py, in a process of its
own.
"""

from __future__ import annotations

import contextlib

import pytest
import torch

from tests.lab.test_runs import assert_same, outcome
from varreg.lab.runs.config import Config
from varreg.lab.runs.resume import StoppedError, run
from varreg.lab.runs.run import Run

DEVICE = "pretend"  # it is registered only where these tests run


def on(device: str, name: str, **options) -> Config:
    options = {"device": device, "clip": 1.0, "schedule": "cosine", **options}
    return Config("logistic", name, 0.05, epochs=2, batch=128, options=options)


CASES = [("SGD", {"momentum": 0.9}), ("VRSGD", {"s": 1.0}), ("VRAdam", {"noise": True})]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_run_trains_there_as_on_the_cpu(name, options, tmp_path):
    torch.set_default_dtype(torch.float32)
    running = Run(on(DEVICE, name, **options))
    assert {p.device.type for p in running.model.parameters()} == {DEVICE}
    assert running.batch().x.device.type == DEVICE
    for device in ("cpu", DEVICE):
        run(on(device, name, **options), tmp_path / device)
    (result, weights), (there, weights_there) = (outcome(tmp_path / d) for d in ("cpu", DEVICE))
    torch.testing.assert_close(there["losses"], result["losses"], rtol=1e-4, atol=1e-5)
    assert there["evaluations"].keys() == result["evaluations"].keys()
    for key, value in weights.items():
        torch.testing.assert_close(weights_there[key].cpu(), value, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("name", "options"), CASES[1:])
def test_a_run_goes_on_there_to_the_bit(name, options, tmp_path):
    torch.set_default_dtype(torch.float32)
    config = on(DEVICE, name, **options)
    run(config, tmp_path / "whole")
    for steps in (3, 10**9):
        left = iter(range(steps))
        with contextlib.suppress(StoppedError):
            run(
                config,
                tmp_path / "broken",
                stop=lambda left=left, last=steps - 1: next(left) == last,
            )
    assert_same(tmp_path / "whole", tmp_path / "broken")
