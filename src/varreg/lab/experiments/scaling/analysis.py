"""Analyze an experiment on larger batches: its findings in numbers and in words. A pure function of
saved results.
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Any

from varreg.lab.experiments.compare.estimates import Estimate, mean_difference
from varreg.lab.report.format import PARTIAL, number
from varreg.lab.runs.config import Results
from varreg.lab.runs.metrics import final

if TYPE_CHECKING:
    from varreg.lab.experiments.scaling.plan import Arm, Scaling

LEVEL = 0.95
METRICS = ("train_loss", "valid_loss", "test_loss", "test_accuracy")


def analyze(experiment: Scaling, results: Results) -> dict[str, Any]:
    """Return the findings that the report shows, in plain values, as in `results.json`."""
    arms = [_summary(experiment, arm, results) for arm in experiment.arms(results)]
    arms = [arm for arm in arms if arm["seeds"]]
    base = next((arm for arm in arms if arm["scale"] == 1), None)
    best = experiment.best(experiment.base_trials(), results)
    own = {arm["scale"]: arm for arm in arms if arm["name"] == "AdaScale"}
    for arm in arms:
        arm["samples_of_base"] = arm["samples"] / base["samples"] if base else math.nan
        arm["steps_of_base"] = arm["steps"] / base["steps"] if base else math.nan
        arm["against_base"] = _difference(arm, base)
        arm["against_adascale"] = _difference(arm, own.get(arm["scale"]))
    complete = all(config.name in results for config in experiment.plan(results))
    probed = best is not None and experiment.is_probed(best.lr, results)
    measures = probed and experiment.question == "plan"
    noise = experiment.noise_scales(best.lr, results) if measures and best else []
    warnings = [] if complete else [PARTIAL]
    if best is None:
        warnings.append("No learning rate of the base has ended without breaking yet.")
    warnings += _edges(experiment, results)
    return {
        "complete": complete,
        "arms": arms,
        "noise_scales": noise,
        "warnings": warnings,
        "verdict": [] if base is None else _verdict(experiment, arms, base),
    }


def _summary(experiment: Scaling, arm: Arm, results: Results) -> dict[str, Any]:
    """Return the numbers of an arm, seed by seed."""
    runs = [results[config.name] for config in arm.configs if config.name in results]
    batch = experiment.batch * arm.scale
    steps = (
        statistics.fmean(run["step"] for run in runs if not run["diverged"])
        if any(not run["diverged"] for run in runs)
        else math.nan
    )
    values = {metric: [final(run, metric) for run in runs] for metric in METRICS}
    return {
        "name": arm.name,
        "scale": arm.scale,
        "batch": batch,
        "lr": arm.configs[0].lr,
        "options": arm.configs[0].options,
        "seeds": [run["config"]["seed"] for run in runs],
        "broke": sum(loss == math.inf for loss in values["test_loss"]),
        "steps": steps,
        "samples": steps * batch,
        "seconds": statistics.fmean(run["seconds"] for run in runs) if runs else math.nan,
        **{metric: column for metric, column in values.items() if not all(map(math.isnan, column))},
    }


def _difference(arm: dict[str, Any], other: dict[str, Any] | None) -> dict[str, Any]:
    """Return the paired differences to another arm, for training and test loss: value, low, high.

    There is no difference for a run that broke.
    """
    if other is None or other is arm:
        return {}
    seeds = [seed for seed in arm["seeds"] if seed in other["seeds"]]
    out = {}
    for metric in ("train_loss", "test_loss"):
        a, b = (
            [which[metric][which["seeds"].index(seed)] for seed in seeds] for which in (arm, other)
        )
        e = mean_difference(a, b, LEVEL)
        out[metric] = [e.value, e.low, e.high]
    return out


def _edges(experiment: Scaling, results: Results) -> list[str]:
    """Return warnings where the best learning rate is at the edge of what was tried."""
    out, base = [], experiment.best(experiment.base_trials(), results)
    if base is None:
        return []
    tried = [("the base", experiment.base_trials())]
    if experiment.is_probed(base.lr, results):
        for scale in experiment.scales:
            for name, options in experiment.variants(scale, base.lr, results).items():
                again = experiment.trials_again(base.lr, scale, options, results)
                tried.append((f"{name}, batch {experiment.batch * scale}", again))
    for name, trials in tried:
        best = experiment.best(trials, results)
        if best is not None and best.lr in (trials[0].lr, trials[-1].lr) and len(trials) > 2:
            out.append(f"{name}: its best learning rate, {best.lr:g}, is at the edge of the grid.")
    return out


def words(arm: dict[str, Any], difference: list[float]) -> str:
    """Return how a loss compares with another one."""
    e = Estimate(*difference)
    if arm["broke"]:
        return f"broke in {arm['broke']} of {len(arm['seeds'])} runs"
    if math.isnan(e.value):
        return "cannot be compared"
    if not e.is_bounded:
        return "too few seeds to compare"
    word = "no detectable difference"
    if e.excludes(0):
        word = "lower" if e.value < 0 else "higher"
    return f"{word} ({number(e.low)} to {number(e.high)})"


def _verdict(
    experiment: Scaling, arms: list[dict[str, Any]], base: dict[str, Any]
) -> list[dict[str, str]]:
    """Return a sentence for each scale."""
    out = []
    main = "AdaScale" if experiment.question == "adascale" else "planned steps, tuned"
    for arm in arms:
        if arm["name"] != main:
            continue
        loss = statistics.median(arm["test_loss"])
        headline = (
            f"Batch {arm['batch']:,}, {main}: test loss {number(loss)} against the base's "
            f"{number(statistics.median(base['test_loss']))} (medians), "
            f"{words(arm, arm['against_base']['test_loss'])}; {arm['steps_of_base']:.3g} times its "
            f"steps, {arm['samples_of_base']:.3g} times its samples."
        )
        others = [
            f"{other['name']} {number(statistics.median(other['test_loss']))}"
            + (f" ({other['broke']} of {len(other['seeds'])} broke)" if other["broke"] else "")
            for other in arms
            if other["scale"] == arm["scale"] and other is not arm
        ]
        why = f"Beside it: {'; '.join(others)}." if others else ""
        out.append({"kind": "same", "headline": headline, "speed": why, "why": ""})
    return out
