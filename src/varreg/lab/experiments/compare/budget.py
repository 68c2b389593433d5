"""Check the arguments of a comparison, from a person or from a file."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from varreg.errors import VarregError
from varreg.lab import optimizers, recipe, schema, specs
from varreg.lab.experiments.compare.trials import FRESH

if TYPE_CHECKING:
    from varreg.lab.experiments.compare.plan import Comparison

SAVED: dict[str, schema.Check] = {
    "task": schema.is_text,
    "optimizers": schema.is_texts,
    "trials": schema.is_positive,
    "lr": schema.is_range,
    "s": schema.is_numbers,
    "tuning_seeds": schema.is_positive,
    "seeds": schema.is_positive,
    "epochs": schema.is_positive,
    "batch": schema.is_positive,
    "ablations": schema.is_flag,
    "recipe": schema.is_table,
    "schedules": schema.is_texts,
    "tried": schema.is_numbers,
}
"""The types of the arguments of a comparison in a file."""
LATER: dict[str, Any] = {"recipe": {}, "schedules": [], "tried": []}
"""Arguments that files of earlier versions do not have, with their values in such files."""
LONGEST = 1000
"""Characters in the name and options of an optimizer, in a file."""


def check_budget(comparison: Comparison) -> None:
    """Raise a VarregError for faults that can be found without importing or building anything."""
    parsed = [str(optimizers.parse(spec)) for spec in comparison.optimizers]
    if len(parsed) < 2 or len(set(parsed)) < len(parsed):
        raise VarregError(
            "varreg: name two or more different optimizers, the base first; got "
            f"{', '.join(comparison.optimizers) or 'none'}."
        )
    for key in ("trials", "tuning_seeds", "seeds"):
        if getattr(comparison, key) < 1:
            raise VarregError(f"varreg: {key} must be at least 1; got {getattr(comparison, key)}.")
    if comparison.tuning_seeds > FRESH:
        raise VarregError(f"varreg: at most {FRESH} tuning seeds; got {comparison.tuning_seeds}.")
    if comparison.epochs < 0 or comparison.batch < 0:
        raise VarregError(
            f"varreg: epochs and batch must be positive; got {comparison.epochs} and "
            f"{comparison.batch}."
        )
    if comparison.lr is not None and not 0 < comparison.lr[0] <= comparison.lr[1] < math.inf:
        raise VarregError(
            "varreg: a range of learning rates needs 0 < low ≤ high; got "
            f"{comparison.lr[0]:g} to {comparison.lr[1]:g}."
        )
    for schedule in comparison.schedules:
        if schedule not in recipe.SCHEDULES:
            raise specs.unknown_name("schedule", schedule, recipe.SCHEDULES)
    if len(set(comparison.schedules)) < len(comparison.schedules):
        raise VarregError(f"varreg: schedules are given twice: {', '.join(comparison.schedules)}.")
    if len(set(comparison.s)) < len(comparison.s):
        raise VarregError(
            f"varreg: values of s are given twice: {', '.join(f'{s:g}' for s in comparison.s)}."
        )


def check_saved_optimizer(spec: str) -> None:
    """Raise a VarregError if a file names an unknown optimizer. Nothing is built."""
    if len(spec) > LONGEST:
        raise VarregError(f"varreg: an optimizer has a name of {len(spec)} characters.")
    name, options = optimizers.parse(spec)
    optimizers.entry(name)
    check_saved_options(options, repr(spec))


def check_saved_options(options: dict[str, Any], where: str) -> None:
    """Raise a VarregError if a file has options that are neither numbers nor text, or an unknown
    recipe.
    """
    if "s" in options and not schema.is_number(options["s"]):
        raise VarregError(f"varreg: {where}: s must be a number.")
    for key, value in options.items():
        parts = value if isinstance(value, (tuple, list)) else (value,)
        if not all(v is None or schema.is_number(v) or _is_word(v) for v in parts):
            raise VarregError(f"varreg: {where}: {key} must be a number or a word.")
    recipe.split(options, where)


def check_saved_numbers(trials: tuple[Any, ...]) -> None:
    """Raise a VarregError unless all values are numbers of trials."""
    if not all(map(schema.is_positive, trials)):
        raise VarregError("varreg: a comparison has numbers of trials that are not positive.")


def _is_word(value: Any) -> bool:
    """Return whether a value is a flag or text that can be printed."""
    return isinstance(value, bool) or (isinstance(value, str) and value.isprintable())
