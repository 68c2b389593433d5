"""The examples run, as a user would run them, and learn something."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, str(EXAMPLES / name), *arguments], capture_output=True, text=True, check=False)
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
    assert abs(control - losses["VR-SGD"]) < losses["SGD"] - losses["VR-SGD"]  # which explains most of it


def test_lightning():
    output = run("lightning_digits.py", "--epochs", "3")
    accuracy = float(re.search(r"accuracy\s+│\s+([\d.]+)", output)[1])
    assert accuracy > 0.3
