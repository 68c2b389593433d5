"""Analyze a comparison: its findings in numbers. A pure function of saved results."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from varreg.lab import optimizers
from varreg.lab.experiments.compare import learning_rates
from varreg.lab.experiments.compare.contrast import METRICS, PRIMARY, contrast
from varreg.lab.experiments.compare.estimates import fewest_pairs
from varreg.lab.experiments.compare.trials import Arm, score, target
from varreg.lab.experiments.compare.verdict import sentences
from varreg.lab.report.format import PARTIAL
from varreg.lab.runs.config import Results
from varreg.lab.runs.metrics import effective_lambda, final, time_to

if TYPE_CHECKING:
    from varreg.lab.experiments.compare.plan import Comparison


def analyze(comparison: Comparison, results: Results) -> dict[str, Any]:
    """Return the findings that the report shows, in plain values, as in `results.json`."""
    base = learning_rates.best(comparison, comparison.optimizers[0], results)
    goal = target(base, results) if base else math.nan
    arms = [summary_of(arm, results, goal) for arm in comparison.arms(results)]
    arms = [arm for arm in arms if arm["seeds"]]
    by_name = {arm["name"]: arm for arm in arms}
    reference = by_name.get(comparison.optimizers[0])
    candidates = [arm for arm in arms if arm["role"] == "candidate"]
    level = 1 - 0.05 / max(1, len(comparison.optimizers) - 1)
    contrasts = [contrast(arm, reference, level) for arm in candidates] if reference else []
    ablations = [
        contrast(by_name[arm["of"]], arm, level)
        for arm in arms
        if arm["role"] == "ablation" and arm["of"] in by_name
    ]
    trials = trials_of(comparison, results)
    complete = all(config.name in results for config in comparison.plan(results))
    return {
        "complete": complete,
        "target": goal,
        "level": level,
        "arms": arms,
        "contrasts": [asdict(c) for c in contrasts],
        "ablations": [asdict(c) for c in ablations],
        "trials": trials,
        "warnings": warnings_of(comparison, results, trials, arms, complete),
        "verdict": sentences(by_name, contrasts, ablations, goal, complete),
    }


def summary_of(arm: Arm, results: Results, goal: float) -> dict[str, Any]:
    """Return the numbers of an arm, seed by seed."""
    runs = [results[config.name] for config in arm.configs if config.name in results]
    values = {metric: [final(run, metric) for run in runs] for metric in METRICS}
    return {
        "name": arm.name,
        "role": arm.role,
        "of": arm.of,
        "optimizer": arm.configs[0].optimizer,
        "lr": arm.configs[0].lr,
        "options": arm.configs[0].options,
        "seeds": [config.seed for config in arm.configs if config.name in results],
        "lost": [run["diverged"] or final(run, PRIMARY) == math.inf for run in runs],
        "broke": broken(runs),
        **{metric: column for metric, column in values.items() if not all(map(math.isnan, column))},
        **lowest(runs),
        "steps_to_target": [time_to(run, goal, "step") for run in runs],
        "seconds_to_target": [time_to(run, goal, "seconds") for run in runs],
        "seconds": [run["seconds"] for run in runs],
        "steps": runs[0]["step"] if runs else 0,
        "lambda": statistics.fmean(effective_lambda(run) for run in runs) if runs else math.nan,
    }


def lowest(runs: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the lowest validation loss of each run, as seen after its epochs, and its step."""
    losses, steps = [], []
    for run in runs:
        seen = run["evaluations"]
        loss, step = min(zip(map(_finite, seen["valid_loss"]), seen["step"], strict=True))
        losses.append(loss)
        steps.append(step)
    return {"lowest_valid_loss": losses, "step_of_lowest": steps}


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def broken(runs: list[dict[str, Any]]) -> list[bool]:
    """Return for each run whether it broke: it diverged, or at its end it had lost more than half
    of the median run's gain in training loss.
    """
    ends = [final(run, "train_loss") for run in runs]
    middle = statistics.median(ends) if ends else math.nan
    starts = [run["evaluations"]["train_loss"][0] for run in runs]
    return [
        run["diverged"] or end == math.inf or (middle < start and end > (start + middle) / 2)
        for run, start, end in zip(runs, starts, ends, strict=True)
    ]


def trials_of(comparison: Comparison, results: Results) -> list[dict[str, Any]]:
    """Return the results of tuning: one row for each trial that has ended."""
    rows = []
    for spec in comparison.optimizers:
        best = learning_rates.best(comparison, spec, results)
        for trial in learning_rates.trials_of(comparison, spec):
            runs = [results[config.name] for config in trial.configs if config.name in results]
            if len(runs) == len(trial.configs):
                losses = [final(run, "valid_loss") for run in runs]
                rows.append(
                    {
                        "optimizer": spec,
                        "lr": trial.lr,
                        "options": trial.options,
                        "s": trial.options.get("s"),
                        "schedule": trial.options.get("schedule", "constant"),
                        "valid_loss": score(trial, results),
                        "low": min(losses),
                        "high": max(losses),
                        "diverged": sum(run["diverged"] for run in runs),
                        "best": best is not None and trial == best,
                    }
                )
    return rows


def warnings_of(
    comparison: Comparison,
    results: Results,
    trials: list[dict[str, Any]],
    arms: list[dict[str, Any]],
    complete: bool,
) -> list[str]:
    """Return the warnings for the reader."""
    out = [] if complete else [PARTIAL]
    for spec in comparison.optimizers:
        out += grid_warnings(comparison, spec, [row for row in trials if row["optimizer"] == spec])
        if optimizers.parse(spec)[0] == "SVRG":
            out.append(
                "SVRG computes two gradients in a step, and that of all samples once in an epoch: "
                "compare it by seconds, not by steps."
            )
    out += [
        f"{a['name']} diverged in {sum(a['lost'])} of {len(a['seeds'])} runs at its tuned learning "
        "rate."
        for a in arms
        if any(a["lost"])
    ]
    out += [
        f"{a['name']} broke in {sum(a['broke'])} of {len(a['seeds'])} runs: at the end they had "
        "lost over half of what its median run gained. Look at medians, not at means."
        for a in arms
        if sum(a["broke"]) > sum(a["lost"])
    ]
    enough = fewest_pairs(1 - 0.05 / (len(comparison.optimizers) - 1))
    if comparison.seeds < enough:
        out.append(
            f"{comparison.seeds} seeds are few for {len(comparison.optimizers)} optimizers: "
            f"{enough} or more can tell more."
        )
    used = {
        (run["environment"]["varreg"], run["environment"]["commit"], run["environment"]["torch"])
        for run in results.values()
    }
    if len(used) > 1:
        out.append(
            "Runs come from different versions: "
            f"{'; '.join(sorted(' '.join(map(str, u)) for u in used))}."
        )
    return out


def grid_warnings(comparison: Comparison, spec: str, rows: list[dict[str, Any]]) -> list[str]:
    """Return warnings about an optimizer whose grid may have missed its best."""
    out, best = [], next((row for row in rows if row["best"]), None)
    if len(rows) == len(learning_rates.grid(comparison, spec)) and best is None:
        out.append(
            f"{spec}: all trials diverged, so that there is no verdict on it. Try lower learning "
            "rates with --lr."
        )
    tuned = [(row["s"], row["schedule"]) for row in rows]
    if len(rows) > 1 and min(map(tuned.count, tuned)) < 3:
        each = " with each s" if len({s for s, _ in tuned}) > 1 else ""
        each += " and each schedule" if len({name for _, name in tuned}) > 1 else ""
        out.append(
            f"{spec}: fewer than three learning rates were tried{each}. More --trials would find "
            "better ones."
        )
    for what, word in (("lr", "learning rate"), ("s", "s")):
        values = sorted({row[what] for row in rows if row[what] is not None})
        if (
            best is not None
            and len(values) >= (2 if what == "lr" else 3)
            and best[what] in (values[0], values[-1])
        ):
            side, way = ("lowest", "lower") if best[what] == values[0] else ("highest", "higher")
            out.append(
                f"{spec}: its best {word}, {best[what]:g}, is the {side} of the grid. A {way} one "
                "may be better: widen the grid."
            )
    return out
