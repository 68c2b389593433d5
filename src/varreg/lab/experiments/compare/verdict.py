"""The verdict of a comparison in words: which optimizer is better, and why."""

from __future__ import annotations

import math
import operator
import statistics
from typing import Any

from varreg.lab.experiments.compare.contrast import PRIMARY, Contrast, pick, shared_seeds
from varreg.lab.experiments.compare.estimates import Estimate, median_difference, sign_test
from varreg.lab.report.format import number, percent

WORDS = {-1: "lower", 1: "higher"}


def sentences(
    arms: dict[str, dict[str, Any]],
    contrasts: list[Contrast],
    ablations: list[Contrast],
    goal: float,
    complete: bool,
) -> list[dict[str, str]]:
    """Return a headline and its explanation, for each optimizer that is compared with the base."""
    out = []
    for c in contrasts:
        a, b = arms[c.arm], arms[c.against]
        kind, headline = final_words(c, a, b)
        if (
            kind == "better"
            and (mean := mean_ablation(c.arm, ablations)) is not None
            and not mean.high < 0
        ):
            kind = "tuned"
        said = {
            "kind": kind,
            "headline": headline,
            "speed": speed_words(c, a, b, goal),
            "why": why_words(a, ablations),
        }
        out.append(
            said
            if complete
            else {
                **said,
                "kind": "unknown",
                "headline": f"So far, with some runs to come: {headline}",
            }
        )
    return out


def final_words(c: Contrast, a: dict[str, Any], b: dict[str, Any]) -> tuple[str, str]:
    """Return "better", "worse", "same", "mixed" or "unknown", and the sentence that says so. Only
    seeds that both arms have count.

    The mean of the paired differences decides. The median stands beside it, which a run that broke
    does not move: where the two differ, the sentence says so.
    """
    seeds = shared_seeds(a, b)
    if any(pick(a, "lost", seeds) + pick(b, "lost", seeds)):
        return lost_words(c, pick(a, "lost", seeds), pick(b, "lost", seeds))
    if not seeds:
        return "unknown", f"{c.arm} and {c.against} have no seed in common yet."
    d = c.differences[PRIMARY]
    mean, median = (
        [number(of(pick(arm, PRIMARY, seeds))) for arm in (a, b)]
        for of in (statistics.fmean, statistics.median)
    )
    means = f"means {' against '.join(mean)}, medians {' against '.join(median)}"
    sure = (
        f"{percent(c.level)} interval {number(d.low)} to {number(d.high)}"
        if math.isfinite(d.high - d.low)
        else "too few for an interval"
    )
    x, y = (pick(arm, PRIMARY, seeds) for arm in (a, b))
    lower, higher = (sum(map(test, x, y)) for test in (operator.lt, operator.gt))
    middle = median_difference(x, y, c.level)
    pairs = f"{len(seeds)} paired seed{'s' * (len(seeds) != 1)}"
    said = f"{means}; difference {number(d.value)}, {sure}; lower on {lower} of {pairs}"
    if middle.is_bounded:
        bounds = f"{number(middle.low)} to {number(middle.high)}"
        said += f", median difference {number(middle.value)}, interval {bounds}"
    said += "".join(
        f"; {arm['name']} broke in {sum(broke)} of {len(seeds)}"
        for arm in (a, b)
        if any(broke := pick(arm, "broke", seeds))
    )
    if d.low == d.high == 0:
        return "same", f"{c.arm} and {c.against} are identical: the same test loss on every seed."
    by_mean, by_median = side_of(d), side_of(middle)
    if by_mean and by_median == -by_mean:
        return "mixed", (
            f"{c.arm} has a {WORDS[by_mean]} mean test loss than {c.against}, but most seeds say "
            f"the opposite ({said})."
        )
    if by_mean:
        only = ", by the mean; by the median it cannot be told" * (
            middle.is_bounded and not by_median
        )
        return ("better" if by_mean < 0 else "worse"), (
            f"{c.arm} ends with a {WORDS[by_mean]} test loss than {c.against}{only} ({said})."
        )
    if by_median:
        count = f"{lower if by_median < 0 else higher} of {len(seeds)} seeds"
        return "mixed", (
            f"{c.arm} ends with a {WORDS[by_median]} test loss than {c.against} on {count}, but by "
            f"the mean no difference can be told ({said})."
        )
    if not d.is_bounded:
        return (
            "unknown",
            f"{c.arm} and {c.against}: nothing can be said of their test losses ({said}).",
        )
    return "same", f"{c.arm} and {c.against}: no detectable difference in test loss ({said})."


def side_of(e: Estimate) -> int:
    """Return -1 if an interval lies below 0, 1 if above; 0 if it has 0 in it, or no bounds."""
    return 0 if not e.is_bounded else (e.low > 0) - (e.high < 0)


def lost_words(c: Contrast, a: list[bool], b: list[bool]) -> tuple[str, str]:
    """Return the same for arms with runs that diverged, by a sign test over the pairs in which
    exactly one run diverged.
    """
    worse, better = (
        sum(x and not y for x, y in zip(a, b, strict=True)),
        sum(y and not x for x, y in zip(a, b, strict=True)),
    )
    counts = f"{c.arm} diverged in {sum(a)} of {len(a)} runs, {c.against} in {sum(b)} of {len(b)}"
    if sign_test(worse, better) > 1 - c.level:
        return (
            "unknown",
            (
                f"{counts}: their losses cannot be compared, and the difference in numbers may be "
                "chance."
            ),
        )
    return (
        ("worse", f"{counts}: it diverges more often.")
        if worse > better
        else ("better", f"{counts}: it diverges less often.")
    )


def speed_words(c: Contrast, a: dict[str, Any], b: dict[str, Any], goal: float) -> str:
    """Return the sentence on steps and seconds to the target."""
    reached = [sum(map(math.isfinite, arm["steps_to_target"])) for arm in (a, b)]
    runs = [f"in {k} of {len(arm['seeds'])} runs" for k, arm in zip(reached, (a, b), strict=True)]
    who = (
        f"The target, a validation loss of {number(goal)}, is reached by {c.arm} {runs[0]}, by "
        f"{c.against} {runs[1]}."
    )
    if not all(reached) or math.isnan(c.steps.value):
        return who
    if c.steps.value == math.inf:
        return f"{who} In half of the pairs of seeds or more, {c.arm} does not reach it."

    def times(e: Estimate, what: str) -> str:
        if e.low == 0 and e.high == math.inf:
            return f"{number(e.value)} times the {what} (too few seeds for an interval)"
        sure = "" if e.excludes(1) else ", no detectable difference"
        return f"{number(e.value)} times the {what} ({number(e.low)} to {number(e.high)}{sure})"

    both = f"{times(c.steps, 'steps')} and {times(c.seconds, 'seconds')}"
    return f"{who} It takes {both} of {c.against}."


def mean_ablation(arm: str, ablations: list[Contrast]) -> Estimate | None:
    """Return the difference between an arm and its ablation with the mean of λ."""
    return next(
        (
            c.differences.get(PRIMARY)
            for c in ablations
            if c.arm == arm and c.against.endswith("mean")
        ),
        None,
    )


def why_words(a: dict[str, Any], ablations: list[Contrast]) -> str:
    """Return the sentences on whether the information in λ helps."""
    contrasts = [c for c in ablations if c.arm == a["name"]]
    if not contrasts:
        return ""
    parts = []
    for c in contrasts:
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
    comparisons = (
        f"Its λ was {number(a['lambda'])} on average. Against its ablations, at the same learning "
        f"rate, in test loss: {'; '.join(parts)}."
    )
    last_words = {c.against.rpartition(" ")[2]: c.differences.get(PRIMARY) for c in contrasts}
    return f"{comparisons} {conclusion(last_words)}".strip()


def conclusion(differences: dict[str, Estimate | None]) -> str:
    """Return the conclusion from the differences to λ replaced by its `mean`, and to λ
    `shuffled`.
    """
    mean, shuffled = (
        d if d is not None and d.is_bounded else None
        for d in (differences.get(k) for k in ("mean", "shuffled"))
    )
    if mean is None:
        return ""
    if not mean.excludes(0):
        return "So what λ did could not be told from a factor of the learning rate."
    if mean.value > 0:
        return "So a plain factor of the learning rate does better than λ."
    if shuffled is not None and shuffled.excludes(0) and shuffled.value < 0:
        return "So λ did more than a longer step does, and it matters which coordinate has which λ."
    return (
        "So λ did more than a longer step does; that it matters which coordinate has which λ could "
        "not be seen."
    )
