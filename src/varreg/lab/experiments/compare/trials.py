"""Trials that tune an optimizer, arms that are run for the verdict, and the target."""

from __future__ import annotations

import math
import statistics
from typing import Any, NamedTuple

from varreg.lab.optimizers.ablations import ABLATIONS
from varreg.lab.runs.config import Config, Results
from varreg.lab.runs.metrics import final

FRESH = 1000
"""The first seed of the verdict."""
LOG_EVERY = 20
"""Steps between two measurements of λ, ρ and the noise."""
TARGET_AT = 0.75
"""The target is the lowest validation loss of the tuned base in this part of its budget."""


class Trial(NamedTuple):
    """A learning rate and options, tried with the tuning seeds."""

    lr: float
    options: dict[str, Any]
    configs: list[Config]


class Arm(NamedTuple):
    """An optimizer at its best trial, or an ablation of it, run with the seeds of the verdict."""

    name: str
    role: str
    """base, candidate or ablation"""
    of: str
    """The optimizer that an ablation belongs to."""
    configs: list[Config]


def ablations_of(options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the names and options of ablations. Leave out one that would change nothing."""
    words = {"mean": "λ replaced by its mean", "shuffled": "λ shuffled"}
    hows = [how for how in ABLATIONS if not (how == "shuffled" and options.get("per") == "model")]
    return {"s = 0": {**options, "s": 0.0}} | {
        words[how]: {**options, "ablation": how} for how in hows
    }


def distinct(configs: list[Config]) -> list[Config]:
    """Return each run once, in order."""
    return list({config.name: config for config in configs}.values())


def log_grid(low: float, high: float, n: int) -> list[float]:
    """Return n numbers from low to high, in equal steps of the logarithm, to three digits.

    >>> log_grid(0.001, 1.0, 4)
    [0.001, 0.01, 0.1, 1.0]
    """
    if low == high or n == 1:
        return [float(f"{math.sqrt(low * high):.3g}")]
    return list(
        dict.fromkeys(float(f"{low * (high / low) ** (i / (n - 1)):.3g}") for i in range(n))
    )


def score(trial: Trial, results: Results) -> float:
    """Return the score of a trial: the validation loss at the end, mean over seeds."""
    return statistics.fmean(final(results[config.name], "valid_loss") for config in trial.configs)


def target(base: Trial, results: Results) -> float:
    """Return the validation loss to reach: the lowest that the tuned base had in three quarters of
    its budget, mean over the tuning seeds.
    """
    lowest = []
    for config in base.configs:
        seen = results[config.name]["evaluations"]
        first, last = seen["step"][1], seen["step"][-1]
        losses = [
            v
            for v, step in zip(seen["valid_loss"], seen["step"], strict=True)
            if 0 < step <= max(TARGET_AT * last, first)
        ]
        lowest.append(min(losses))
    return statistics.fmean(lowest)
