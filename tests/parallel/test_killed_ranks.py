"""Real processes, started by torchrun, that are killed: no hang, and from the last whole checkpoint
to the same end.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.support.commands import LIMIT
from tests.support.once import folder_once

EXAMPLE = Path(__file__).parents[2] / "examples" / "torchrun_digits.py"
FAULTY = Path(__file__).parents[1] / "support" / "faulty.py"
TIMEOUT = 600
"""Of the process group, in seconds: where it ends a job, something was not noticed."""
OPTIONS = ("--epochs", "3", "--batch", "60", "--timeout", str(TIMEOUT), "--float64")
HANG = 30
"""The time-out where it is what ends the job. It must be longer than ranks wait for each other on a
busy machine.
"""
STEPS = 1347 // 60
"""In an epoch. Each has two calls of all_reduce, one for gradients and one for moments; so has the
backward at the start.
"""
ABORTED = "terminate called without an active exception"
"""Said by torch 2.13 with gloo when a process has ended, now and then, with plain DDP as well:
nothing is lost by it.
"""


def torchrun(
    *arguments: object, ranks: int = 2, restarts: int = 0, faults: str = ""
) -> tuple[int, str, float]:
    """Its exit code, all that it said, and how many seconds it took from the last fault to its
    end.
    """
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        ranks,
        "--max-restarts",
        restarts,
    ]
    command += [FAULTY, *arguments] if faults else arguments
    done = subprocess.run(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=LIMIT,
        env={
            **os.environ,
            "FAULTS": faults,
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        },
    )
    struck = re.findall(r"(?:killed|hung) in \w+ at ([\d.]+)", done.stdout)
    return done.returncode, done.stdout, time.time() - float(struck[-1]) if struck else 0.0


def train(folder: Path, **options) -> str:
    """To the end."""
    code, said, _ = torchrun(EXAMPLE, *OPTIONS, "--folder", folder, **options)
    assert code == 0 or (ABORTED in said and (folder / "epoch-003.pt").exists()), said
    return said


def alone(folder: Path) -> str:
    """One process, without torchrun."""
    command = [sys.executable, str(EXAMPLE), *OPTIONS, "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def lines(said: str) -> list[str]:
    return re.findall(r"^epoch .*mean λ \d.*$", said, re.MULTILINE)


def saved(folder: Path) -> dict:
    """All that the last checkpoint holds: parameters, momentum, variances and their history."""
    return torch.load(folder / "epoch-003.pt", weights_only=True)


def parameters(folder: Path) -> dict:
    return saved(folder)["model"]


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> tuple[Path, str]:
    return folder_once(tmp_path_factory, "one-rank", alone)


@pytest.fixture(scope="module")
def three(tmp_path_factory) -> tuple[Path, str]:
    """With three processes, a sum depends on the order in which it is made: bits are not the same
    by themselves, as they are with two.
    """
    return folder_once(tmp_path_factory, "three-ranks", lambda folder: train(folder, ranks=3))


@pytest.mark.slow
def test_processes_end_where_one_does(one, three):
    torch.testing.assert_close(parameters(three[0]), parameters(one[0]), rtol=1e-10, atol=1e-10)
    assert lines(three[1]) == lines(one[1])  # said once, with the same loss, accuracy and λ
    found = [
        tuple(map(float, re.findall(r"[\d.]+", line.partition(":")[2]))) for line in lines(one[1])
    ]
    assert len(found) == 3
    assert found[-1][1] > 85
    assert all(lam > 1.1 for _, _, lam in found)


def test_a_killed_rank_ends_the_job(one, tmp_path):
    """In the middle of a backward pass of the third epoch, between gradients and moments. Then on
    from the last whole checkpoint.
    """
    code, said, _ = torchrun(
        EXAMPLE,
        *OPTIONS,
        "--folder",
        tmp_path,
        faults=f"1:all_reduce:{2 * (1 + 2 * STEPS + 5)}:killed",
    )
    assert code != 0
    assert "killed in all_reduce" in said
    assert "Signal 9 (SIGKILL)" in said
    assert not re.search(r"[Tt]imed out", said), said  # the others saw it end, at once
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch-001.pt", "epoch-002.pt"]

    whole = (tmp_path / "epoch-002.pt").read_bytes()  # cut short: as if a disk had lost its end
    (tmp_path / "epoch-002.pt").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "epoch-003.tmp").write_bytes(
        whole[:1000]
    )  # and what a process leaves that is killed while it writes
    assert lines(alone(tmp_path)) == lines(one[1])[1:]
    torch.testing.assert_close(parameters(tmp_path), parameters(one[0]), rtol=1e-10, atol=1e-10)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "epoch-001.pt",
        "epoch-002.pt",
        "epoch-003.pt",
    ]


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_job(tmp_path):
    """One that lives, and does not answer: only the time-out ends that."""
    options = [str(HANG) if option == str(TIMEOUT) else option for option in OPTIONS]
    code, said, seconds = torchrun(
        EXAMPLE, *options, "--folder", tmp_path, faults="1:all_reduce:8:hung"
    )
    assert code != 0
    assert "hung in all_reduce" in said
    # the time-out that was set, not torch's own, which is 60 times as long
    assert re.search(rf"[Tt]imed out waiting {1000 * HANG}ms", said), said
    assert seconds > HANG - 1


@pytest.mark.slow
def test_torchrun_restarts(three, tmp_path):
    """Killed in a backward pass, and after the restart while it writes a checkpoint: the end is the
    same, to the bit.
    """
    faults = f"2:all_reduce:{2 * (1 + STEPS + 5)}:killed 0:fsync:1:killed"
    said = train(tmp_path, ranks=3, restarts=2, faults=faults)
    assert "killed in all_reduce" in said
    assert "killed in fsync" in said
    assert re.search("Connection (closed|reset) by peer", said)  # the others say why they ended
    assert "INTERNAL ASSERT" not in said
    assert lines(said) == lines(three[1])  # each epoch came to its end once
    found, expected = (
        (checkpoint["model"], checkpoint["optimizer"]["state"])
        for checkpoint in map(saved, (tmp_path, three[0]))
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
