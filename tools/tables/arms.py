"""Arms of an experiment beside each other: `varreg scaling` by batch, `varreg compare` in full."""

from __future__ import annotations

import math
import statistics
from typing import Any

from tools.tables.cells import markdown, once
from tools.tables.experiments import optimizer_cell
from tools.tables.marks import ROOT
from varreg.lab.report.format import number

Saved = dict[str, Any]


def scaling(saved: Saved) -> str:
    """Return an experiment on scaling, with its command: a row for each batch and rule. Steps and
    samples are parts of the base's. Below, of a plan: the noise scales that it was made from.
    """
    base = next(arm for arm in saved["arms"] if arm["scale"] == 1)
    others = [arm for arm in saved["arms"] if arm["scale"] > 1]
    against = {"base": "against the base", "adascale": "against AdaScale"}
    shown = [key for key in against if any(arm[f"against_{key}"] for arm in others)]
    first = [f"{base['batch']}", "base, tuned", _median(base["test_loss"]), *[""] * len(shown)]
    rows = [[*first, _rate(saved, base, "the base"), f"{base['steps']:,.0f} steps", ""]]
    rows += [
        [
            f"{arm['batch']:,}",
            arm["name"],
            _median(arm["test_loss"]),
            *(_says(arm, key) for key in shown),
            _rate(saved, arm, f"{arm['name']}, batch {arm['batch']}"),
            *(_times(arm[key]) for key in ("steps_of_base", "samples_of_base")),
        ]
        for arm in sorted(others, key=lambda arm: arm["batch"])
    ]
    head = ["batch", "", "test loss", *(against[key] for key in shown)]
    head += ["learning rate", "steps", "samples"]
    tenths = ", ".join(map(number, saved["noise_scales"]))
    below = f"\n\n$B_n$ of the base, part by part: {tenths}." if tenths else ""
    return f"`{saved['command']}`\n\n{markdown(head, once(rows))}{below}"


def _rate(saved: Saved, arm: Saved, name: str) -> str:
    """Return the learning rate of an arm, and whether tuning found it at the edge of its grid.

    >>> warned = {"warnings": ["SGD: its best learning rate, 0.3, is the highest of the grid."]}
    >>> _rate(warned, {"lr": 0.3}, "SGD"), _rate(warned, {"lr": 0.3}, "SGD:momentum=0.9")
    ('0.3 (edge of grid)', '0.3')
    """
    warned = (text.startswith(f"{name}: its best learning rate, ") for text in saved["warnings"])
    return f"{arm['lr']:.3g}{' (edge of grid)' * any(warned)}"


def _times(value: float) -> str:
    """Return a multiple of the base's; nothing if every run broke, so that there is none."""
    return f"{value:.3g} ×" if math.isfinite(value) else ""


def _says(arm: Saved, against: str) -> str:
    """Return whether a loss is higher or lower by the interval of paired differences; nothing where
    there is no detectable difference.
    """
    _, low, high = (arm[f"against_{against}"] or {}).get("test_loss", (math.nan,) * 3)
    return "higher" if low > 0 else "lower" if high < 0 else ""


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
                f"{optimizer_cell(arm['name'])}{s}",
                _median(arm["test_loss"]),
                _difference(against.get(arm["name"])),
                f"{100 * statistics.median(accuracy):.1f}" if accuracy else "",
                *(_median(arm[key]) for key in ("train_loss", "valid_loss")),
                _lowest(arm),
                _rate(saved, arm, arm["name"]),
                f"{arm['lambda']:.3g}",
            ]
        )
    head = ["", "test loss", "against the first", "accuracy, %", "training loss"]
    head += ["validation loss", "lowest, at step", "learning rate", "mean λ"]
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
