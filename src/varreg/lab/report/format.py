"""Numbers and findings as text, for people."""

from __future__ import annotations

import math
import statistics
from typing import Any

WORDS = {
    "train_loss": "training loss",
    "valid_loss": "validation loss",
    "test_loss": "test loss",
    "test_accuracy": "test accuracy",
}


PARTIAL = "This report is partial: not all runs have ended. The same command continues them."


def number(x: float) -> str:
    """Return a number with three digits.

    >>> number(0.12345), number(-1234.5), number(math.inf), number(1e-7)
    ('0.123', '−1,234', '∞', '1.00e−07')
    """
    if not math.isfinite(x) or x == 0:
        return "0" if x == 0 else {math.inf: "∞", -math.inf: "−∞"}.get(x, "–")
    return (f"{x:#.3g}" if abs(x) < 100 else f"{x:,.0f}").replace("-", "−")


def percent(level: float) -> str:
    """Return a level as a percentage."""
    return f"{100 * level:.3g} %"


def count(n: int, what: str) -> str:
    """Return a number of things.

    >>> count(1, "epoch"), count(20, "epoch")
    ('1 epoch', '20 epochs')
    """
    return f"{n} {what}{'s' * (n != 1)}"


def mean(values: list[float]) -> str:
    """Return the mean of values, with three digits."""
    return number(statistics.fmean(values))


def spread(values: list[float], factor: float = 1.0) -> str:
    """Return the mean and the range of values, times a factor."""
    scaled = [factor * v for v in values]
    return f"{mean(scaled)} ({number(min(scaled))}–{number(max(scaled))})"


def text(findings: dict[str, Any]) -> str:
    """Return the verdict and the warnings, for a terminal."""
    lines = [
        v
        for said in findings["verdict"]
        for v in (said["headline"], said["speed"], said["why"])
        if v
    ]
    return "\n".join([*lines, *(f"Warning: {w}" for w in findings["warnings"])])
