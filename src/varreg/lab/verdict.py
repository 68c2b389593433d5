"""What a comparison says: tables of numbers, and the same in words. A pure function of saved results."""

from __future__ import annotations

import math
import statistics as st
from dataclasses import asdict, dataclass
from typing import Any

from varreg.lab import names
from varreg.lab.compare import Arm, Comparison, final, score, target, time_to
from varreg.lab.reproduce import effective_lambda
from varreg.lab.run import Results
from varreg.lab.statistics import Estimate, mean_difference, median_ratio, sign_test

METRICS = ("train_loss", "valid_loss", "test_loss", "test_accuracy")
PRIMARY = "test_loss"
"""The metric of the verdict, declared before."""
WORDS = {
    "train_loss": "training loss",
    "valid_loss": "validation loss",
    "test_loss": "test loss",
    "test_accuracy": "test accuracy",
}


@dataclass(frozen=True)
class Contrast:
    """One arm against another, over paired seeds: differences (first minus second) of metrics, ratios of times to the target."""

    arm: str
    against: str
    level: float
    differences: dict[str, Estimate]
    steps: Estimate
    seconds: Estimate


def summary_of(arm: Arm, results: Results, goal: float) -> dict[str, Any]:
    """The numbers of an arm, seed by seed."""
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
        **{metric: column for metric, column in values.items() if not all(map(math.isnan, column))},
        "steps_to_target": [time_to(run, goal, "step") for run in runs],
        "seconds_to_target": [time_to(run, goal, "seconds") for run in runs],
        "seconds": [run["seconds"] for run in runs],
        "steps": runs[0]["step"] if runs else 0,
        "lambda": st.fmean(effective_lambda(run) for run in runs) if runs else math.nan,
    }


def shared_seeds(a: dict[str, Any], b: dict[str, Any]) -> list[int]:
    return [seed for seed in a["seeds"] if seed in b["seeds"]]


def pick(arm: dict[str, Any], key: str, seeds: list[int]) -> list[Any]:
    """The values of these seeds, in their order."""
    return [arm[key][arm["seeds"].index(seed)] for seed in seeds]


def contrast(a: dict[str, Any], b: dict[str, Any], level: float) -> Contrast:
    seeds = shared_seeds(a, b)
    differences = {m: mean_difference(pick(a, m, seeds), pick(b, m, seeds), level) for m in METRICS if m in a and m in b}
    ratios = (median_ratio(pick(a, key, seeds), pick(b, key, seeds), level) for key in ("steps_to_target", "seconds_to_target"))
    return Contrast(a["name"], b["name"], level, differences, *ratios)


def analyze(comparison: Comparison, results: Results) -> dict[str, Any]:
    """All that the report shows, in plain values: `results.json`."""
    base = comparison.best(comparison.optimizers[0], results)
    goal = target(base, results) if base else math.nan
    arms = [summary_of(arm, results, goal) for arm in comparison.arms(results)]
    arms = [arm for arm in arms if arm["seeds"]]
    by_name = {arm["name"]: arm for arm in arms}
    reference = by_name.get(comparison.optimizers[0])
    candidates = [arm for arm in arms if arm["role"] == "candidate"]
    level = 1 - 0.05 / max(1, len(comparison.optimizers) - 1)
    contrasts = [contrast(arm, reference, level) for arm in candidates] if reference else []
    ablations = [contrast(by_name[arm["of"]], arm, level) for arm in arms if arm["role"] == "ablation" and arm["of"] in by_name]
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


def trials_of(comparison: Comparison, results: Results) -> list[dict[str, Any]]:
    """What tuning saw: one row for each trial that has ended."""
    rows = []
    for spec in comparison.optimizers:
        best = comparison.best(spec, results)
        for trial in comparison.trials_of(spec):
            runs = [results[config.name] for config in trial.configs if config.name in results]
            if len(runs) == len(trial.configs):
                losses = [final(run, "valid_loss") for run in runs]
                rows.append(
                    {
                        "optimizer": spec,
                        "lr": trial.lr,
                        "options": trial.options,
                        "s": trial.options.get("s"),
                        "valid_loss": score(trial, results),
                        "low": min(losses),
                        "high": max(losses),
                        "diverged": sum(run["diverged"] for run in runs),
                        "best": best is not None and trial == best,
                    }
                )
    return rows


def warnings_of(
    comparison: Comparison, results: Results, trials: list[dict[str, Any]], arms: list[dict[str, Any]], complete: bool
) -> list[str]:
    out = [] if complete else ["This report is partial: not all runs have ended. The same command goes on."]
    for spec in comparison.optimizers:
        out += grid_warnings(comparison, spec, [row for row in trials if row["optimizer"] == spec])
        if names.parse(spec)[0] == "SVRG":
            out.append(
                "SVRG computes two gradients in a step, and that of all samples once in an epoch: compare it by seconds, not by steps."
            )
    out += [
        f"{a['name']} diverged in {sum(a['lost'])} of {len(a['seeds'])} runs at its tuned learning rate."
        for a in arms
        if any(a["lost"])
    ]
    enough = 1 + math.ceil(-math.log2(0.05 / (len(comparison.optimizers) - 1)))
    if comparison.seeds < enough:
        out.append(
            f"{comparison.seeds} seeds are few for {len(comparison.optimizers)} optimizers: {enough} or more can tell more."
        )
    used = {(run["environment"]["varreg"], run["environment"]["commit"], run["environment"]["torch"]) for run in results.values()}
    if len(used) > 1:
        out.append(f"Runs come from different versions: {'; '.join(sorted(' '.join(map(str, u)) for u in used))}.")
    return out


def grid_warnings(comparison: Comparison, spec: str, rows: list[dict[str, Any]]) -> list[str]:
    """Of an optimizer whose grid may have missed its best."""
    out, best = [], next((row for row in rows if row["best"]), None)
    if len(rows) == len(comparison.grid(spec)) and best is None:
        out.append(f"{spec}: all trials diverged, so that there is no verdict on it. Try lower learning rates with --lr.")
    values_of_s = {row["s"] for row in rows}
    if len(rows) > 1 and min(sum(row["s"] == s for row in rows) for s in values_of_s) < 3:
        each = " with each s" if len(values_of_s) > 1 else ""
        out.append(f"{spec}: fewer than three learning rates were tried{each}. More --trials would find better ones.")
    for what, word in (("lr", "learning rate"), ("s", "s")):
        values = sorted({row[what] for row in rows if row[what] is not None})
        if best is not None and len(values) >= (2 if what == "lr" else 3) and best[what] in (values[0], values[-1]):
            side, way = ("lowest", "lower") if best[what] == values[0] else ("highest", "higher")
            out.append(
                f"{spec}: its best {word}, {best[what]:g}, is the {side} of the grid. A {way} one may be better: widen the grid."
            )
    return out


# In words ----------------------------------------------------------------------------------------------------------------------------


def number(x: float) -> str:
    """Three digits, for people.

    >>> number(0.12345), number(-1234.5), number(math.inf), number(1e-7)
    ('0.123', '−1,234', '∞', '1.00e−07')
    """
    if not math.isfinite(x) or x == 0:
        return "0" if x == 0 else {math.inf: "∞", -math.inf: "−∞"}.get(x, "–")
    return (f"{x:#.3g}" if abs(x) < 100 else f"{x:,.0f}").replace("-", "−")


def percent(level: float) -> str:
    return f"{100 * level:.3g} %"


def sentences(
    arms: dict[str, dict[str, Any]], contrasts: list[Contrast], ablations: list[Contrast], goal: float, complete: bool
) -> list[dict[str, str]]:
    """A headline and what explains it, for each optimizer that is compared with the base."""
    out = []
    for c in contrasts:
        a, b = arms[c.arm], arms[c.against]
        kind, headline = final_words(c, a, b)
        if kind == "better" and (mean := mean_ablation(c.arm, ablations)) is not None and not mean.high < 0:
            kind = "tuned"
        said = {"kind": kind, "headline": headline, "speed": speed_words(c, a, b, goal), "why": why_words(a, ablations)}
        out.append(said if complete else {**said, "kind": "unknown", "headline": f"So far, with some runs to come: {headline}"})
    return out


def final_words(c: Contrast, a: dict[str, Any], b: dict[str, Any]) -> tuple[str, str]:
    """better, worse, same or unknown; and the sentence. Over the seeds that both have."""
    seeds = shared_seeds(a, b)
    if any(pick(a, "lost", seeds) + pick(b, "lost", seeds)):
        return lost_words(c, pick(a, "lost", seeds), pick(b, "lost", seeds))
    if not seeds:
        return "unknown", f"{c.arm} and {c.against} have no seed in common yet."
    d = c.differences[PRIMARY]
    means = " against ".join(number(st.fmean(pick(arm, PRIMARY, seeds))) for arm in (a, b))
    sure = (
        f"{percent(c.level)} interval {number(d.low)} to {number(d.high)}"
        if math.isfinite(d.high - d.low)
        else "too few for an interval"
    )
    lower = sum(x < y for x, y in zip(pick(a, PRIMARY, seeds), pick(b, PRIMARY, seeds), strict=True))
    said = f"{means}; difference {number(d.value)}, {sure}; lower on {lower} of {len(seeds)} paired seed{'s' * (len(seeds) != 1)}"
    if d.low == d.high == 0:
        return "same", f"{c.arm} and {c.against} are identical: the same test loss on every seed."
    if not d.is_bounded:
        return "unknown", f"{c.arm} and {c.against}: nothing can be said of their test losses ({said})."
    if not d.excludes(0):
        return "same", f"{c.arm} and {c.against}: no detectable difference in test loss ({said})."
    kind, word = ("better", "lower") if d.value < 0 else ("worse", "higher")
    return kind, f"{c.arm} ends with a {word} test loss than {c.against} ({said})."


def lost_words(c: Contrast, a: list[bool], b: list[bool]) -> tuple[str, str]:
    """Where runs diverged: by a sign test over the pairs of which one did."""
    worse, better = sum(x and not y for x, y in zip(a, b, strict=True)), sum(y and not x for x, y in zip(a, b, strict=True))
    counts = f"{c.arm} diverged in {sum(a)} of {len(a)} runs, {c.against} in {sum(b)} of {len(b)}"
    if sign_test(worse, better) > 1 - c.level:
        return "unknown", f"{counts}: their losses cannot be compared, and the difference in numbers may be chance."
    return ("worse", f"{counts}: it diverges more often.") if worse > better else ("better", f"{counts}: it diverges less often.")


def speed_words(c: Contrast, a: dict[str, Any], b: dict[str, Any], goal: float) -> str:
    """Steps and seconds to the target."""
    reached = [sum(map(math.isfinite, arm["steps_to_target"])) for arm in (a, b)]
    runs = [f"in {k} of {len(arm['seeds'])} runs" for k, arm in zip(reached, (a, b), strict=True)]
    who = f"The target, a validation loss of {number(goal)}, is reached by {c.arm} {runs[0]}, by {c.against} {runs[1]}."
    if not all(reached) or math.isnan(c.steps.value):
        return who

    def times(e: Estimate, what: str) -> str:
        if e.low == 0 and e.high == math.inf:
            return f"{number(e.value)} times the {what} (too few seeds for an interval)"
        sure = "" if e.excludes(1) else ", no detectable difference"
        return f"{number(e.value)} times the {what} ({number(e.low)} to {number(e.high)}{sure})"

    return f"{who} It takes {times(c.steps, 'steps')} and {times(c.seconds, 'seconds')} of {c.against}."


def mean_ablation(arm: str, ablations: list[Contrast]) -> Estimate | None:
    """The difference to λ replaced by its mean."""
    return next((c.differences.get(PRIMARY) for c in ablations if c.arm == arm and c.against.endswith("mean")), None)


def why_words(a: dict[str, Any], ablations: list[Contrast]) -> str:
    """Is it the information in λ?"""
    own = [c for c in ablations if c.arm == a["name"]]
    if not own:
        return ""
    parts = []
    for c in own:
        d, name = c.differences.get(PRIMARY), c.against.removeprefix(a["name"] + ", ")
        if d is None or not d.is_bounded:
            parts.append(f"{name}: cannot be compared")
        else:
            word = (
                "no detectable difference"
                if not d.excludes(0)
                else "λ as it is does better"
                if d.value < 0
                else "λ as it is does worse"
            )
            parts.append(f"{name}: {number(d.value)} ({number(d.low)} to {number(d.high)}), {word}")
    said = f"Its λ was {number(a['lambda'])} on average. Against its ablations, at the same learning rate, in test loss: {'; '.join(parts)}."
    return f"{said} {conclusion({c.against.rpartition(' ')[2]: c.differences.get(PRIMARY) for c in own})}".strip()


def conclusion(differences: dict[str, Estimate | None]) -> str:
    """From the differences to λ replaced by its `mean`, and to λ `shuffled`."""
    mean, shuffled = (d if d is not None and d.is_bounded else None for d in (differences.get(k) for k in ("mean", "shuffled")))
    if mean is None:
        return ""
    if not mean.excludes(0):
        return "So what λ did could not be told from a factor of the learning rate."
    if mean.value > 0:
        return "So a plain factor of the learning rate does better than λ."
    if shuffled is not None and shuffled.excludes(0) and shuffled.value < 0:
        return "So λ did more than a longer step does, and it matters which coordinate has which λ."
    return "So λ did more than a longer step does; that it matters which coordinate has which λ could not be seen."


def text(found: dict[str, Any]) -> str:
    """For a terminal."""
    lines = [v for said in found["verdict"] for v in (said["headline"], said["speed"], said["why"]) if v]
    return "\n".join([*lines, *(f"Warning: {w}" for w in found["warnings"])])
