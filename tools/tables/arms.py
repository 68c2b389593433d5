"""Arms of an experiment beside each other: `varreg scaling` by batch, `varreg compare` in full."""

from __future__ import annotations

import math
import statistics
from typing import Any

from tools.tables.cells import markdown
from tools.tables.marks import ROOT
from varreg.lab.report.format import number

Saved = dict[str, Any]


def scaling(saved: Saved) -> str:
    """Return an experiment on scaling, with its command: a column for each batch."""
    base = next(arm for arm in saved["arms"] if arm["scale"] == 1)
    others = [arm for arm in saved["arms"] if arm["scale"] > 1]
    batches = list(dict.fromkeys(arm["batch"] for arm in others))
    by_place = {(arm["name"], arm["batch"]): arm for arm in others}
    names = dict.fromkeys(arm["name"] for arm in others)
    rows = [[name, *(_cell(by_place.get((name, batch))) for batch in batches)] for name in names]
    loss = _median(base["test_loss"])
    about = f"base: {loss}; {base['lr']:g}; batch {base['batch']}, {base['steps']:,.0f} steps"
    head = [about, *(f"batch {batch:,}" for batch in batches)]
    return f"`{saved['command']}`\n\n{markdown(head, rows)}"


def _cell(arm: Saved | None) -> str:
    """Return the test loss of an arm, with marks, its learning rate, and its steps and samples."""
    if arm is None:
        return ""
    marks = [_mark(arm, key, letter) for key, letter in (("base", "b"), ("adascale", "a"))]
    said = f" ({', '.join(filter(None, marks))})" if any(marks) else ""
    cost = f"{arm['steps_of_base']:.3g}, {arm['samples_of_base']:.3g}"
    return f"{_median(arm['test_loss'])}{said}; {arm['lr']:g}; {cost}"


def _mark(arm: Saved, against: str, letter: str) -> str:
    """Return +b where a loss is higher than the base's, −b where it is lower, by the interval of
    paired differences; nothing where there is no detectable difference.
    """
    _, low, high = (arm[f"against_{against}"] or {}).get("test_loss", (math.nan,) * 3)
    return f"+{letter}" if low > 0 else f"−{letter}" if high < 0 else ""


def comparison(saved: Saved) -> str:
    """Return a comparison, with its command: medians over seeds, and the interval of the paired
    differences in test loss to the first.
    """
    against = {c["arm"]: c["differences"]["test_loss"] for c in saved["contrasts"]}
    rows = []
    for arm in saved["arms"]:
        s = f", s={arm['options']['s']:g}" if "s" in arm["options"] else ""
        accuracy = arm.get("test_accuracy")
        rows.append(
            [
                f"`{arm['name']}`{s}",
                f"{arm['lr']:g}",
                *(_median(arm[key]) for key in ("train_loss", "valid_loss", "test_loss")),
                f"{100 * statistics.median(accuracy):.1f}" if accuracy else "",
                _difference(against.get(arm["name"])),
                _lowest(arm),
                f"{arm['lambda']:.3g}",
            ]
        )
    head = ["", "learning rate", "training loss", "validation loss", "test loss", "accuracy, %"]
    head += ["test loss, against the first", "lowest validation loss, at step", "mean λ"]
    return f"`{saved['command']}`\n\n{markdown(head, rows)}"


def _median(values: list[float]) -> str:
    return number(statistics.median(values))


def _difference(gap: Saved | None) -> str:
    """Return a mean difference with its interval, in bold where that does not hold 0."""
    if gap is None:
        return ""
    text = f"{number(gap['value'])} ({number(gap['low'])} to {number(gap['high'])})"
    return f"**{text}**" if gap["low"] > 0 or gap["high"] < 0 else text


def _lowest(arm: Saved) -> str:
    """Return the median of the lowest validation losses of runs, and of their steps."""
    if "lowest_valid_loss" not in arm:  # saved by a version before
        return ""
    step = statistics.median(arm["step_of_lowest"])
    return f"{_median(arm['lowest_valid_loss'])}, {step:.0f} of {arm['steps']}"


def ewc(saved: Saved) -> str:
    """Return the arms of `examples/ewc_split_fashion_mnist.py`, with its command."""
    from importlib import util

    path = ROOT / "examples" / "ewc_split_fashion_mnist.py"
    spec = util.spec_from_file_location("ewc", path)
    assert spec is not None
    assert spec.loader is not None
    example = util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return f"`{saved['command']}`\n\n{example.table(saved)}"


def ewc_unfinished(saved: Saved) -> str:
    """Return the arms of a stopped run that were judged: test accuracies, and in how many pairs of
    seeds an arm is above the first.
    """
    judged: dict[str, list[float]] = {}
    for key, (accuracy, _) in saved["runs"].items():
        arm, strength, _, part, _ = key.split(", ")
        if part == "test":
            name = arm if arm == "none" else f"{arm}, {strength}"
            judged.setdefault(name, []).append(accuracy)
    first = next(iter(judged.values()))
    rows = []
    for name, found in judged.items():
        above = sum(a > b for a, b in zip(found, first, strict=True))
        pairs = "" if found is first else f"{above} of {len(found)}"
        mean, low, high = statistics.mean(found), min(found), max(found)
        rows.append([name, f"{mean:.1f} ({low:.1f}–{high:.1f})", pairs])
    head = ["importance", "mean test accuracy, % (range over seeds)", "above the first, seeds"]
    said = f"Of {saved['date']}; the file does not say on which machine."
    return f"`{saved['command']}`\n\n{markdown(head, rows)}\n\n{said}"
