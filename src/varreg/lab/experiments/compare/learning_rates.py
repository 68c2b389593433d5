"""Tune an optimizer in a comparison: its grid of learning rates and options, and the best trial."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from varreg.lab import optimizers
from varreg.lab.experiments.compare.trials import Trial, log_grid, score
from varreg.lab.runs.config import Results

if TYPE_CHECKING:
    from varreg.lab.experiments.compare.plan import Comparison


def s_of(comparison: Comparison, spec: str) -> tuple[float, ...]:
    """Return the values of s to try: none if the optimizer has no s, or if its s is given."""
    name, options = optimizers.parse(spec)
    return comparison.s if optimizers.entry(name).has_s and "s" not in options else ()


def extras_of(comparison: Comparison, spec: str) -> list[dict[str, Any]]:
    """Return the options that are tuned beside the learning rate: s and the schedule, if there is
    a choice.
    """
    fixed = "schedule" in optimizers.parse(spec)[1]
    schedules = [{"schedule": name} for name in comparison.schedules if not fixed] or [{}]
    values = [{"s": s} for s in s_of(comparison, spec)] or [{}]
    return [{**schedule, **value} for schedule in schedules for value in values]


def grid(comparison: Comparison, spec: str) -> list[tuple[float, dict[str, Any]]]:
    """Return learning rates and options to try: `trials` of them, or one if the optimizer has no
    learning rate. Values of s, and schedules, share the trials evenly.
    """
    name, options = optimizers.parse(spec)
    entry, extras = optimizers.entry(name), extras_of(comparison, spec)
    low, high = entry.low, entry.high
    if comparison.lr and low < high:
        low, high = comparison.lr
    options = {**comparison.recipe, **options}
    points: list[tuple[float, dict[str, Any]]] = []
    for i, extra in enumerate(extras):
        for trials in (*comparison.tried, comparison.trials):
            n = trials // len(extras) + (i < trials % len(extras))
            new = ((lr, {**options, **extra}) for lr in log_grid(low, high, n))
            points += [point for point in new if point not in points]
    return points


def trials_of(comparison: Comparison, spec: str) -> list[Trial]:
    """Return the trials that tune an optimizer."""
    seeds = range(comparison.tuning_seeds)
    return [
        Trial(lr, options, comparison.configs_of(spec, lr, options, seeds, "never"))
        for lr, options in grid(comparison, spec)
    ]


def best(comparison: Comparison, spec: str, results: Results) -> Trial | None:
    """Return the trial with the lowest validation loss at the end, mean over seeds; None if all of
    them diverged, or some have not ended.
    """
    trials = trials_of(comparison, spec)
    if any(config.name not in results for trial in trials for config in trial.configs):
        return None
    chosen = min(trials, key=lambda trial: score(trial, results))
    return chosen if score(chosen, results) < math.inf else None
