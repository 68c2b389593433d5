"""The examples run, as a user would run them, and learn something. `test_frameworks.py` has those
with training frameworks, which it imports once.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_digits():
    assert "noise scale" in run("digits.py", "--epochs", "1")


def test_plain_loop():
    output = run("plain_loop.py", "--epochs", "3", "--seeds", "1")
    rows = dict(re.findall(r"^(.+?)\s{2,}\d\.\d\d\s+(\d\.\d+)", output, re.MULTILINE))
    assert list(rows)[:3] == ["SGD", "VR-SGD", "VR-SGD, geometric history"]
    assert len(rows) == 4
    losses = {k: float(v) for k, v in rows.items()}
    control = next(v for k, v in losses.items() if "×" in k)
    assert losses["VR-SGD"] < losses["SGD"]  # the longer step
    assert (
        abs(control - losses["VR-SGD"]) < losses["SGD"] - losses["VR-SGD"]
    )  # which explains most of it


@pytest.mark.slow
def test_ewc(tmp_path):
    out = tmp_path / "ewc.json"
    first = run("ewc_split_fashion_mnist.py", "--quick", "--out", str(out))
    rows = re.findall(r"^\| (.+?) \|.*?\| ([\d.]+) ± [\d.]+ \|", first, re.MULTILINE)
    arms = dict(rows)
    assert set(arms) >= {"none", "exact", "sampled", "empirical", "Adam's second moment"}
    assert all(float(accuracy) > 55 for accuracy in arms.values())  # half of it is chance
    table = run("ewc_split_fashion_mnist.py", "--table", str(out))
    assert table.strip() in first
    again = run("ewc_split_fashion_mnist.py", "--quick", "--out", str(out))  # from what was kept
    assert table.strip() in again
