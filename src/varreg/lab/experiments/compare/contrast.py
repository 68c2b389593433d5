"""One arm of a comparison against another, over the seeds that both have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from varreg.lab.experiments.compare.estimates import Estimate, mean_difference, median_ratio

METRICS = ("train_loss", "valid_loss", "test_loss", "test_accuracy")
PRIMARY = "test_loss"
"""The metric of the verdict, fixed before any run."""


@dataclass(frozen=True)
class Contrast:
    """One arm against another, over paired seeds: differences (first minus second) of metrics,
    ratios of times to the target.
    """

    arm: str
    against: str
    level: float
    differences: dict[str, Estimate]
    steps: Estimate
    seconds: Estimate


def contrast(a: dict[str, Any], b: dict[str, Any], level: float) -> Contrast:
    """Compare the summaries of two arms."""
    seeds = shared_seeds(a, b)
    differences = {
        m: mean_difference(pick(a, m, seeds), pick(b, m, seeds), level)
        for m in METRICS
        if m in a and m in b
    }
    ratios = (
        median_ratio(pick(a, key, seeds), pick(b, key, seeds), level)
        for key in ("steps_to_target", "seconds_to_target")
    )
    return Contrast(a["name"], b["name"], level, differences, *ratios)


def shared_seeds(a: dict[str, Any], b: dict[str, Any]) -> list[int]:
    """Return the seeds that both arms have."""
    return [seed for seed in a["seeds"] if seed in b["seeds"]]


def pick(arm: dict[str, Any], key: str, seeds: list[int]) -> list[Any]:
    """Return an arm's values at these seeds, in their order."""
    return [arm[key][arm["seeds"].index(seed)] for seed in seeds]
