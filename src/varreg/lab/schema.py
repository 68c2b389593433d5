"""The contents that saved files must have. Each `…_fault` function returns a fault in words, or an
empty text.

A results folder may be damaged, of another version, or someone else's. Names in it are never
imported, built or called: its values are only compared with what varreg writes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

RUNS = 1_000_000
"""The largest number of runs that a file may ask for."""
SPLITS = ("train", "valid", "test")
EVALUATIONS = ("step", "seconds", *(f"{s}_{what}" for s in SPLITS for what in ("loss", "accuracy")))
"""The columns of a run's evaluations."""
SHOWN = ("varreg", "commit", "torch", "python", "processor", "cores")
"""The entries of the environment that a page shows."""


def kind(value: Any) -> str:
    """Return the name of the type of a JSON value.

    >>> kind([1]), kind(None), kind("a")
    ('a list', 'nothing', 'text')
    """
    if value is None:
        return "nothing"
    words = {dict: "a table", list: "a list", str: "text", bool: "true or false"}
    return words.get(type(value), "a number" if is_number(value) else type(value).__name__)


def is_number(value: Any) -> bool:
    """Return whether a value is a number, and not true or false."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_count(value: Any) -> bool:
    """Return whether a value is a whole number from 0 up."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_positive(value: Any) -> bool:
    """Return whether a value is a whole number from 1 up."""
    return is_count(value) and value > 0


def is_text(value: Any) -> bool:
    """Return whether a value is text."""
    return isinstance(value, str)


def is_flag(value: Any) -> bool:
    """Return whether a value is true or false."""
    return isinstance(value, bool)


def is_table(value: Any) -> bool:
    """Return whether a value is a table."""
    return isinstance(value, dict)


def is_numbers(value: Any) -> bool:
    """Return whether a value is a list of numbers."""
    return isinstance(value, list) and all(map(is_number, value))


def is_texts(value: Any) -> bool:
    """Return whether a value is a list of texts."""
    return isinstance(value, list) and all(map(is_text, value))


def is_range(value: Any) -> bool:
    """Return whether a value is nothing or two numbers."""
    return value is None or (is_numbers(value) and len(value) == 2)


Check = Callable[[Any], bool]
WORDS: dict[Check, str] = {
    is_number: "a number",
    is_count: "a number from 0 up",
    is_positive: "a number from 1 up",
    is_text: "text",
    is_flag: "true or false",
    is_table: "a table",
    is_numbers: "a list of numbers",
    is_texts: "a list of texts",
    is_range: "nothing or two numbers",
}


def table_fault(value: Any, checks: Mapping[str, Check], only: bool = False) -> str:
    """Return the fault of a table: a missing key, a value of another type, or a key that is not
    allowed (`only`).
    """
    if not is_table(value):
        return kind(value)
    for key, check in checks.items():
        if key not in value:
            return f"no {key!r}"
        if not check(value[key]):
            came = f"{value[key]}" if is_number(value[key]) else kind(value[key])
            return f"{came} for {key!r}, which must be {WORDS[check]}"
    unknown = [key for key in value if key not in checks] if only else []
    return f"an unknown key {unknown[0]!r}" if unknown else ""


def columns_fault(table: Mapping[str, Any], what: str) -> str:
    """Return the fault of columns: one is not a list of numbers, or has another length than the
    others.
    """
    for key, values in table.items():
        if not is_numbers(values):
            return f"{kind(values)} for {what} {key!r}, which must be a list of numbers"
    lengths = {key: len(values) for key, values in table.items()}
    if len(set(lengths.values())) > 1:
        short, long = min(lengths, key=lengths.__getitem__), max(lengths, key=lengths.__getitem__)
        return f"{what} of different lengths: {short!r} {lengths[short]}, {long!r} {lengths[long]}"
    return ""


_RECORD: dict[str, Check] = {
    "step": is_count,
    "seconds": is_number,
    "losses": is_numbers,
    "evaluations": is_table,
    "statistics": is_table,
}
_RESULT: dict[str, Check] = {
    "config": is_table,
    "environment": is_table,
    "diverged": is_flag,
    **_RECORD,
}


def record_fault(value: Any) -> str:
    """Return the fault of the record of a run: its losses, evaluations and statistics."""
    if fault := table_fault(value, _RECORD):
        return fault
    seen, measured = value["evaluations"], value["statistics"]
    if set(seen) != set(EVALUATIONS):
        other = sorted(set(seen) ^ set(EVALUATIONS))
        return f"unknown or missing evaluations: {', '.join(map(repr, other[:3]))}"
    if fault := columns_fault(seen, "evaluations"):
        return fault
    if "step" not in measured:
        return "statistics without 'step'"
    if fault := columns_fault(measured, "statistics"):
        return fault
    if len(value["losses"]) != value["step"]:
        return f"{len(value['losses'])} losses of {value['step']} steps"
    if any(not a < b for a, b in itertools.pairwise(seen["step"])):
        return "evaluations that are not in the order of their steps"
    return ""


def result_fault(value: Any, epochs: int | None) -> str:
    """Return the fault of the result of a run with this number of epochs; None: it was evaluated at
    other times.
    """
    if fault := table_fault(value, _RESULT) or record_fault(value):
        return fault
    for key in ("varreg", "commit", "torch"):
        if not isinstance(value["environment"].get(key), (str, type(None))):
            return f"{kind(value['environment'][key])} for {key!r} of its environment"
    steps = value["evaluations"]["step"]
    if not steps:
        return "no evaluations"
    count = len(steps) if epochs is None else epochs + 1
    if not value["diverged"] and (len(steps) != count or steps[-1] != value["step"]):
        seen = f"{len(steps)} evaluations up to step {steps[-1]}"
        of = "" if epochs is None else f"{epochs} epochs and "
        return f"{seen}, of {of}{value['step']} steps"
    return ""


def record_file_fault(value: Any) -> str:
    """Return the fault of an experiment.json, whatever its kind."""
    if fault := table_fault(value, {"kind": is_text, "arguments": is_table}):
        return fault
    optional = {
        "about": is_text,
        "command": is_texts,
        "environment": is_table,
        "fingerprint": is_text,
    }
    return table_fault(value, {key: check for key, check in optional.items() if key in value})


def environment_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the environment in an experiment.json, as far as a page shows it."""
    kept = record.get("environment", {})
    plain = {key: kept.get(key, "not saved") for key in SHOWN}
    return {k: v if v is None or is_text(v) or is_number(v) else kind(v) for k, v in plain.items()}


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the keys that differ, as `lr: 0.1 there, 0.3 asked for`; an empty text if none
    does.
    """
    keys: Sequence[str] = list({**now, **was})
    none = "nothing"
    return "; ".join(
        f"{key}: {was.get(key, none)} there, {now.get(key, none)} asked for"
        for key in keys
        if was.get(key, none) != now.get(key, none)
    )
