"""Save and restore the state of random number generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from varreg import devices


class RandomState:
    """The saved states of generators: the global ones, those of the model, and those passed to
    functions.
    """

    def __init__(self, generators: Sequence[Any]):
        self.kept: dict[int, tuple[Any, Any]] = {}
        self.watch(torch.default_generator)
        self.watch(random._inst)
        numpy = sys.modules.get("numpy.random")
        if numpy is not None:
            self.watch(numpy.mtrand._rand)
        for source in devices.generators():
            self.watch(source)
        for source in generators:
            self.watch(source)

    def watch(self, source: Any) -> None:
        """Save the current state of a generator, if it is not saved already."""
        if id(source) not in self.kept:
            self.kept[id(source)] = source, _read(source)

    def has_changed(self) -> bool:
        """Return whether any generator has drawn a number."""
        return any(not _are_equal(state, _read(source)) for source, state in self.kept.values())

    def restore(self) -> None:
        """Restore the saved state of each generator."""
        for source, state in self.kept.values():
            _write(source, state)


def is_generator(value: Any) -> bool:
    """Return whether a value is a generator of random numbers: torch's, Python's or NumPy's."""
    if isinstance(value, (torch.Generator, random.Random)):
        return True
    numpy = sys.modules.get("numpy.random")  # varreg does not import it
    return numpy is not None and isinstance(value, (numpy.Generator, numpy.RandomState))


def _read(source: Any) -> Any:
    """Return the state of a random number generator of torch, Python or NumPy."""
    if isinstance(source, (torch.Generator, devices.DeviceGenerator)):
        return source.get_state()
    if isinstance(source, random.Random):
        return source.getstate()
    if hasattr(source, "bit_generator"):
        return source.bit_generator.state
    return source.get_state(legacy=False)


def _write(source: Any, state: Any) -> None:
    """Set the state of a generator."""
    if isinstance(source, (torch.Generator, devices.DeviceGenerator)):
        source.set_state(state)
    elif isinstance(source, random.Random):
        source.setstate(state)
    elif hasattr(source, "bit_generator"):
        source.bit_generator.state = state
    else:
        source.set_state(state)


def _are_equal(a: Any, b: Any) -> bool:
    """Return whether two states are the same: tensors, arrays, or structures of those."""
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_are_equal(v, b[k]) for k, v in a.items())
    if hasattr(a, "tobytes"):
        return bool(a.tobytes() == b.tobytes())
    return bool(a == b)
