"""A run: killed at any moment and started again, it ends as if nothing had happened."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.commands import LIMIT
from varreg.lab import store
from varreg.lab.optimizers import OPTIMIZERS
from varreg.lab.optimizers.ablations import ABLATIONS
from varreg.lab.runs.config import Config, batches
from varreg.lab.runs.resume import StoppedError, run
from varreg.lab.runs.run import Run
from varreg.lab.tasks import TASKS
from varreg.lab.tasks.lookup import task

SMALL = {"epochs": 2, "batch": 128}


@pytest.fixture(autouse=True)
def _single_precision():
    torch.set_default_dtype(torch.float32)


def outcome(folder: Path) -> tuple[dict, dict]:
    """What must be the same: all but the time it took."""
    (only,) = folder.iterdir()
    result = json.loads((only / "result.json").read_text())
    del result["seconds"], result["evaluations"]["seconds"]
    return result, torch.load(only / "weights.pt", weights_only=True)


def assert_same(a: Path, b: Path) -> None:
    (result_a, weights_a), (result_b, weights_b) = outcome(a), outcome(b)
    assert json.dumps(result_a) == json.dumps(result_b)
    assert all(torch.equal(weights_a[k], weights_b[k]) for k in weights_a)


DRIVER = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from varreg.lab.runs.config import Config
from varreg.lab.runs.resume import run

torch.set_num_threads(1)
rng, kills, seed = random.Random(0), 0, 0
while kills < 30:
    seed += 1
    options = {"momentum": 0.9, "history": "geometric"}
    config = Config("digits", "VRSGD", 0.05, seed, 4, 64, options, test="end")
    run(config, Path(sys.argv[1]) / f"whole{seed}")
    while True:
        child = os.fork()
        if child == 0:
            run(config, Path(sys.argv[1]) / f"broken{seed}", every=0.003)
            os._exit(0)
        limit = rng.uniform(0.0, 0.5) if kills < 30 else float("inf")  # then it may end
        end, status = time.monotonic() + limit, (0, 0)
        while time.monotonic() < end and status[0] == 0:
            status = os.waitpid(child, os.WNOHANG)
            time.sleep(0.002)
        if status[0] == 0:
            os.kill(child, signal.SIGKILL)
            status = os.waitpid(child, 0)
        if status[1] == 0:
            break
        assert os.WIFSIGNALED(status[1]), status
        kills += 1
print(kills, seed)
"""


def test_killed_at_random_moments(tmp_path):
    """SIGKILL, at least 30 times, at random moments of starting, training, evaluating and
    writing.
    """
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    kills, runs = map(int, done.stdout.split())
    assert kills >= 30
    for seed in range(1, runs + 1):
        assert_same(tmp_path / f"whole{seed}", tmp_path / f"broken{seed}")


CASES = [(name, {}) for name in OPTIMIZERS] + [
    ("VRSGD", {"momentum": 0.9, "ablation": how}) for how in ABLATIONS
]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_every_optimizer_goes_on_to_the_bit(name, options, tmp_path):
    config = Config("digits", name, 0.01, **SMALL, options=options)
    run(config, tmp_path / "whole")

    for steps in (3, 6, 3, 10**9):  # stopped after so many, and at last not at all
        left = iter(range(steps))
        with contextlib.suppress(StoppedError):
            run(
                config,
                tmp_path / "broken",
                stop=lambda left=left, last=steps - 1: next(left) == last,
            )
    assert_same(tmp_path / "whole", tmp_path / "broken")


class Odd(torch.nn.Module):
    """Dropout, random numbers of NumPy and Python, and a buffer that is not in the state dict."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(64, 10)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x):
        if self.training:
            self.calls += 1
        x = torch.nn.functional.dropout(x.flatten(1), 0.3, self.training)
        return (
            self.linear(x)
            * (
                1
                + 0.01 * np.random.rand()  # noqa: NPY002
                + 0.01 * random.random()
            )
            + 0.001 * self.calls
        )


@pytest.mark.parametrize("optimizer", ["SGD", "SVRG", "DoG"])
def test_a_model_with_random_numbers_goes_on_to_the_bit(optimizer, tmp_path, monkeypatch):
    made = dataclasses.replace(task("logistic"), model=Odd)
    monkeypatch.setattr("varreg.lab.tasks.lookup.task", lambda spec: made)
    config = Config("logistic", optimizer, 0.05, **SMALL)
    run(config, tmp_path / "whole")
    for steps in (5, 4, 10**9):
        left = iter(range(steps))
        with contextlib.suppress(StoppedError):
            run(
                config,
                tmp_path / "broken",
                stop=lambda left=left, last=steps - 1: next(left) == last,
            )
    assert_same(tmp_path / "whole", tmp_path / "broken")


class Half(torch.nn.Module):
    """In half precision, where optimizers keep some states in single."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(64, 10).bfloat16()

    def forward(self, x):
        return self.linear(x.flatten(1).bfloat16()).float()


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "VRSGD", "VRAdam", "VRAdadelta"])
def test_a_model_in_half_precision_goes_on_to_the_bit(optimizer, tmp_path, monkeypatch):
    made = dataclasses.replace(task("logistic"), model=Half)
    monkeypatch.setattr("varreg.lab.tasks.lookup.task", lambda spec: made)
    config = Config("logistic", optimizer, 0.05, **SMALL)
    run(config, tmp_path / "whole")
    for steps in (5, 10**9):
        left = iter(range(steps))
        with contextlib.suppress(StoppedError):
            run(
                config,
                tmp_path / "broken",
                stop=lambda left=left, last=steps - 1: next(left) == last,
            )
    assert_same(tmp_path / "whole", tmp_path / "broken")


def test_two_processes_do_not_work_on_one_run(tmp_path, monkeypatch):
    config = Config("logistic", "SGD", 0.1, **SMALL)
    monkeypatch.setattr("varreg.lab.store.PATIENCE", 0.1)
    (tmp_path / config.name).mkdir()
    with (
        store.alone(tmp_path / config.name, "this run"),
        pytest.raises(ValueError, match="another process is at work on this run"),
    ):
        run(config, tmp_path)


def test_a_result_that_is_there_is_not_computed_again(tmp_path):
    config = Config("logistic", "SGD", 0.1, **SMALL)
    first = run(config, tmp_path)
    (folder,) = tmp_path.iterdir()
    written = (folder / "weights.pt").stat().st_mtime_ns
    assert run(config, tmp_path) == first
    assert (folder / "weights.pt").stat().st_mtime_ns == written


def test_when_the_test_split_is_read(tmp_path):
    for when, times in (
        ("never", 0),
        ("end", 1),
        ("epochs", 3),
    ):  # all in one folder: none is taken for another
        result = run(Config("logistic", "SGD", 0.1, **SMALL, test=when), tmp_path)
        assert sum(map(math.isfinite, result["evaluations"]["test_loss"])) == times
        assert sum(map(math.isfinite, result["evaluations"]["valid_loss"])) == 3


def test_divergence_is_recorded(tmp_path):
    result = run(Config("digits", "SGD", 1e6, **SMALL), tmp_path)
    assert result["diverged"]
    assert not math.isfinite(result["losses"][-1])


def test_batches_depend_on_seed_and_epoch_alone():
    a, b = batches(100, 30, 1, 2), batches(100, 30, 1, 2)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert [len(x) for x in a] == [30, 30, 30]
    assert not torch.equal(a[0], batches(100, 30, 1, 3)[0])
    assert len(torch.cat(a).unique()) == 90


def test_splits_do_not_overlap_and_never_change():
    splits = TASKS["digits"]().load(None)
    rows = [set(map(tuple, s.x.flatten(1).tolist())) for s in splits]
    assert [len(s) for s in splits] == [1077, 360, 360]
    assert len(rows[0] & rows[2]) <= 2  # two digits are the same image twice in the data themselves
    again = TASKS["digits"]().load(None)
    assert torch.equal(splits.valid.x, again.valid.x)


def test_lambda_is_logged(tmp_path):
    result = run(Config("digits", "VRSGD", 0.05, **SMALL, log_every=1), tmp_path)
    found = result["statistics"]
    assert found["step"] == list(range(1, len(result["losses"]) + 1))
    assert found["lambda"][0] == pytest.approx(1)
    assert 1 < found["lambda"][-1] <= 3
    assert set(found) >= {
        "lambda/0.weight",
        "rho/0",
        "noise_scale/0",
        "rho",
        "noise_scale",
        "lambda/mean",
    }
    assert {len(values) for values in found.values()} == {len(found["step"])}


def test_unknown_names():
    with pytest.raises(
        ValueError, match=r"no task 'digit'; there are: digits, .* Did you mean 'digits'\?"
    ):
        task("digit")
    with pytest.raises(
        ValueError, match=r"no optimizer 'VRSDG'; there are: SGD, .* Did you mean 'VRSGD'\?"
    ):
        Run(Config("digits", "VRSDG", 0.1))


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="results cannot be written to"):
        run(Config("digits", "SGD", 0.1), tmp_path / "file")


def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    store.write_json(path, {"a": 1})
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        store.write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]
