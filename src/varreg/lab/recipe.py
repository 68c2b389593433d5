"""The recipe of a run, besides its optimizer: schedule, clipping, number of steps, AdaScale,
NoiseDecay, early stopping.

On the command line these stand among the options of an optimizer, as in
`SGD:momentum=0.9,schedule=cosine,warmup=0.05,clip=1`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from varreg.errors import VarregError
from varreg.lab import schema, specs

SCHEDULES = ("constant", "linear", "cosine")
EVALUATE = ("epochs", "end")
KEEP = ("last", "best")


@dataclass(frozen=True)
class Recipe:
    """How a run trains. The defaults are a constant learning rate and nothing else."""

    schedule: str = "constant"
    """The schedule of the learning rate: constant, linear (to 0) or cosine (to 0)."""
    warmup: float = 0.0
    """The part of all steps in which the learning rate first rises linearly from 0."""
    horizon: float = 1.0
    """The length of the schedule, as a multiple of the number of steps: usually 1."""
    clip: float = 0.0
    """The norm to which gradients are clipped; 0: no clipping."""
    steps: int = 0
    """The number of steps; 0: as many as the epochs have."""
    adascale: int = 0
    """The base batch of an AdaScale around the optimizer; 0: no AdaScale. With AdaScale, epochs and
    steps are those of the base.
    """
    noise: bool = False
    """Whether the noise scale is measured in every step."""
    noise_decay: float = 0.0
    """The power of a `NoiseDecay`; 0: without one."""
    keep: str = "last"
    """Which parameters are judged at the end: the last, or those of the evaluation with the lowest
    validation loss, which is early stopping.
    """
    evaluate: str = "epochs"
    """When the run is evaluated: after every epoch and at the end, or only at the end."""
    augment: str = ""
    """The augmentation of the images of a batch: crop, flip, crop+flip; empty: the task's own."""
    device: str = "cpu"
    groups: int = 0
    """`groups` of `varreg.observe`; 0: exact."""
    batch_norm: str = "refuse"
    """`batch_norm` of `varreg.observe`."""

    @property
    def is_plain(self) -> bool:
        """Return whether the run is evaluated after each of its epochs, and at no other time."""
        return not (self.steps or self.adascale) and self.evaluate == "epochs"

    def factor(self, step: float, total: float) -> float:
        """Return the factor of the learning rate at a step, counted from 0.

        >>> Recipe("linear", warmup=0.2).factor(0, 10), Recipe("cosine").factor(5, 10)
        (0.5, 0.5)
        """
        total = self.horizon * total
        risen = self.warmup * total
        if step < risen:
            return min((step + 1) / risen, 1.0)
        part = min((step - risen) / max(total - risen, 1e-12), 1.0)
        if self.schedule == "linear":
            return 1 - part
        return (1 + math.cos(math.pi * part)) / 2 if self.schedule == "cosine" else 1.0


def split(options: dict[str, Any], where: str) -> tuple[Recipe, dict[str, Any]]:
    """Split the options of an optimizer: return its recipe, checked, and the other options.

    `where` names the optimizer in errors.
    """
    known = {field.name for field in fields(Recipe)}
    recipe = Recipe(**{key: value for key, value in options.items() if key in known})
    _check(recipe, where)
    return recipe, {key: value for key, value in options.items() if key not in known}


def _check(recipe: Recipe, where: str) -> None:
    """Raise a VarregError if a recipe has invalid values."""
    from varreg.lab.tasks.augmentation import AUGMENTATIONS

    choices = {"schedule": SCHEDULES, "evaluate": EVALUATE, "augment": ("", *AUGMENTATIONS)}
    choices["keep"] = KEEP
    choices["batch_norm"] = ("refuse", "contribution")
    for key, among in choices.items():
        if getattr(recipe, key) not in among:
            error = specs.unknown_name(key, str(getattr(recipe, key)), [a for a in among if a])
            raise VarregError(f"{error} (in {where})")
    for key in ("steps", "adascale", "groups"):
        value = getattr(recipe, key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise VarregError(f"varreg: {where}: {key} must be a number from 0 up; got {value!r}.")
    for key, high in (("warmup", 1.0), ("clip", math.inf), ("noise_decay", math.inf)):
        value = getattr(recipe, key)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 <= value < high:
            range_ = "from 0 up" if high == math.inf else f"from 0 to below {high:g}"
            raise VarregError(f"varreg: {where}: {key} must be {range_}; got {value!r}.")
    if not schema.is_number(recipe.horizon) or not 0 < recipe.horizon < math.inf:
        raise VarregError(f"varreg: {where}: horizon must be above 0; got {recipe.horizon!r}.")
    if recipe.noise_decay and (recipe.noise or recipe.adascale):
        raise VarregError(
            f"varreg: {where}: noise_decay measures the noise by itself, and does not work with "
            "AdaScale: leave noise and adascale out."
        )
    if not isinstance(recipe.noise, bool):
        raise VarregError(f"varreg: {where}: noise must be True or False; got {recipe.noise!r}.")
    if not isinstance(recipe.device, str):
        raise VarregError(f"varreg: {where}: device must be a word; got {recipe.device!r}.")
