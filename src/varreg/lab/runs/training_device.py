"""The device of a run: check it, move data to it, and save its random state."""

from __future__ import annotations

from typing import Any

import torch

from varreg.errors import VarregError
from varreg.lab.tasks.definition import Splits

_KEY = "device_random"


def check_device(name: str) -> None:
    """Raise a VarregError if this machine has no such device, or if the device has no memory."""
    try:
        device = torch.device(name)
        works = device.type != "meta" and torch.ones(1, device=device).sum().item() == 1
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        works, why = False, str(error).splitlines()[0]
    else:
        why = "its tensors have no values"
    if not works:
        found = torch.accelerator.current_accelerator(check_available=True)
        there = "no accelerator" if found is None else f"the accelerator '{found}'"
        raise VarregError(
            f"varreg: --device {name} cannot be used here ({why}). Beside the CPU, torch "
            f"{torch.__version__} sees {there} on this machine."
        )


def on_device(splits: Splits, device: torch.device) -> Splits:
    """Return the splits on a device; the same objects if they are on it already."""
    if device.type == "cpu":
        return splits
    return Splits(*(split.to(device) for split in splits))


def device_random(device: torch.device) -> dict[str, Any]:
    """Return the random state of an accelerator for a checkpoint; an empty one for the CPU."""
    if device.type == "cpu":
        return {}
    return {_KEY: torch.get_device_module(device).get_rng_state()}


def set_device_random(device: torch.device, state: dict[str, Any]) -> None:
    """Set the random state of an accelerator to that of a checkpoint."""
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state[_KEY])
