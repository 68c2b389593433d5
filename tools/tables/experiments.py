"""The lab's findings: the tables of docs/evidence/results.md and reproduction.md."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from typing import Any

from tools.tables.cells import markdown, once
from varreg.lab.report.format import mean, number, spread

Saved = dict[str, Any]
SAYS = {
    "same": "no detectable difference",
    "better": "**lower**",
    "tuned": "lower, not by λ",
    "worse": "higher",
    "mixed": "most seeds and the mean differ",
    "unknown": "not known",
}
"""A verdict in few words."""


def _says(kind: str, arm: str, ablations: list[Saved]) -> str:
    """Return the verdict. λ itself helps if the arm does better than with the mean of λ.

    >>> _says("better", "VRSGD", [{"arm": "VRSGD"}]), _says("better", "SGD:clip=1", [])
    ('**lower, by λ**', '**lower**')
    """
    tried = kind == "better" and any(row["arm"] == arm for row in ablations)
    return "**lower, by λ**" if tried else SAYS[kind]


def measured(*saved: Saved) -> str:
    """Return a sentence with the date and the machine, as the files have them. Where a file has no
    date, it has the commit.
    """
    places: dict[str, list[str]] = {}
    for when, where in map(_when_and_where, _apart(saved)):
        times = places.setdefault(where, [])
        times += [when] if when and when not in times else []
    said = [f"{' and '.join(times)} on {where}".strip() for where, times in places.items()]
    return f"Measured {'; '.join(said)}."


def _apart(saved: tuple[Saved, ...]) -> Iterator[Saved]:
    """Yield each file, or what says where it was measured for each of its runs."""
    for one in saved:
        yield from [{"measured": about} for about in one.get("machines", {}).values()] or [one]


def _when_and_where(saved: Saved) -> tuple[str, str]:
    """Return the date or the commit of a file, and the machine.

    >>> _when_and_where({"measured": "2026-11-16, AMD EPYC, 2 threads on 2 cores"})
    ('2026-11-16', 'AMD EPYC, 2 threads on 2 cores')
    >>> _when_and_where({"measured": "AMD EPYC, 2 threads on 2 cores"})
    ('', 'AMD EPYC, 2 threads on 2 cores')
    """
    if "environment" in saved and "measured" not in saved:
        about = saved["environment"]
        versions = f"Python {about['python']}, torch {about['torch']}"
        where = f"{about['processor']}, {about['cores']} cores, one thread per run, {versions}"
        return f"with varreg {about['commit'][:7]}" if about["commit"] else "", where
    if "date" in saved:
        return saved["date"], saved["machine"]
    said = re.sub(r", \d+ threads$", "", str(saved.get("measured") or saved["about"]))  # is in it
    date = re.match(r"(\d{4}-\d\d-\d\d), ", said)
    return (date[1], said[date.end() :]) if date else ("", said)


def commands(*saved: Saved) -> str:
    """Return the commands that made the files."""
    lines = [re.sub(r" --out \S+", "", one["command"]) for one in saved]
    return "\n".join(["```bash", *lines, "```"])


def reproduction(saved: Saved) -> str:
    """Return the arms of `varreg reproduce`: mean over seeds, and their range."""
    rows = [
        [
            arm["name"],
            f"{arm['lr']:.3g}",
            number(arm["lambda"]) if "lambda" in arm and arm["optimizer"] != "SGD" else "1",
            spread(arm["train_loss"]),
            spread(arm["train_accuracy"], 100),
            spread(arm["test_loss"]),
            spread(arm["test_accuracy"], 100),
        ]
        for arm in saved["arms"]
    ]
    head = [f"after {saved['arguments']['epochs']} epochs", "learning rate", "λ"]
    head += [
        f"{split} {what}" for split in ("training", "test") for what in ("loss", "accuracy, %")
    ]
    return markdown(head, rows)


def seeds(saved: Saved) -> str:
    """Return the training loss at the end, seed by seed."""
    arms = saved["arms"]
    head = ["training loss at the end", *(f"seed {seed}" for seed in arms[0]["seeds"])]
    return markdown(head, [[a["name"], *(f"{v:.4f}" for v in a["train_loss"])] for a in arms])


def _loss(arm: Saved) -> str:
    """Return the mean test loss of an arm, and the median, which one broken run does not move."""
    return f"{mean(arm['test_loss'])} ({number(statistics.median(arm['test_loss']))})"


def _interval(row: Saved) -> str:
    return f"{number(row['value'])} ({number(row['low'])} to {number(row['high'])})"


def optimizer_cell(spec: str) -> str:
    """Return an optimizer with its options, so that a line can break between them.

    >>> optimizer_cell("VRSGD:per=model,s=2")
    '`VRSGD` per=model, s=2'
    """
    name, _, options = spec.partition(":")
    return f"`{name}` {options.replace(',', ', ')}".strip()


def comparisons(*saved: Saved) -> str:
    """Return each optimizer of `varreg compare` against the tuned base."""
    rows = []
    for one in saved:
        losses = {arm["name"]: _loss(arm) for arm in one["arms"]}
        for found, said in zip(one["contrasts"], one["verdict"], strict=True):
            difference = found["differences"]["test_loss"]
            rows.append(
                [
                    f"{one['arguments']['task']}, {found['against']}: {losses[found['against']]}",
                    optimizer_cell(found["arm"]),
                    _says(said["kind"], found["arm"], one["ablations"]),
                    losses[found["arm"]],
                    f"{number(difference['low'])} to {number(difference['high'])}",
                    *(number(found[key]["value"]) for key in ("steps", "seconds")),
                ]
            )
    head = ["task, base: its test loss", "optimizer", "its test loss is", "mean (median)"]
    return markdown([*head, "difference", "steps, times", "seconds, times"], once(rows))


def ablations(saved: Saved) -> str:
    """Return how each optimizer does without a part of it: the test loss of either."""
    losses = {arm["name"]: _loss(arm) for arm in saved["arms"]}
    rows = [
        [
            optimizer_cell(found["arm"]),
            found["against"].removeprefix(f"{found['arm']}, "),
            losses[found["arm"]],
            losses[found["against"]],
            _interval(found["differences"]["test_loss"]),
        ]
        for found in saved["ablations"]
    ]
    head = ["optimizer", "without a part", "mean (median) test loss", "without it"]
    return markdown([*head, "difference (interval)"], once(rows))
