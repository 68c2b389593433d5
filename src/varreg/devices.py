"""Differences between devices: float64, random number generators, and waiting for values.

Values on the CPU (`t.is_cpu`) can be read at once. To read a value on any other device, the caller
waits until the device has finished all earlier work.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from varreg import _torch
from varreg.errors import VarregError
from varreg.thresholds import CONSTANTS, FILLED

_NO_GENERATOR = ("cpu", "meta")  # the CPU's is torch.default_generator


@functools.cache
def has_float64(device: torch.device) -> bool:
    """Return whether a device supports double precision. Apple's GPUs do not."""
    try:
        torch.empty(0, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return False
    return True


def constant(value: float, like: Tensor) -> Tensor:
    """Return a number as a tensor with the type and device of another tensor. Callers must not
    write to it: on a device the tensor is cached, since making one costs a launch.
    """
    if like.is_cpu or type(like) is not Tensor:
        return like.new_full((), value)
    return _constant(value, like.dtype, like.device)


@functools.lru_cache(maxsize=CONSTANTS)
def _constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), value, dtype=dtype, device=device)


def filled(value: float, shape: torch.Size | tuple[int, ...], like: Tensor) -> Tensor:
    """Return the same for a tensor of equal numbers."""
    if like.is_cpu or type(like) is not Tensor:
        return like.new_full(shape, value)
    return _filled(value, tuple(shape), like.dtype, like.device)


@functools.lru_cache(maxsize=FILLED)
def _filled(
    value: float, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    return torch.full(shape, value, dtype=dtype, device=device)


def widest(t: Tensor) -> Tensor:
    """Return a tensor in double precision, or unchanged if its device has no double precision."""
    return t.double() if has_float64(t.device) else t


def in_double(t: Tensor) -> Tensor:
    """Return a copy in double precision; the copy is on the CPU if the device has no double
    precision.
    """
    return t.to("cpu" if not has_float64(t.device) else t.device).to(torch.float64, copy=True)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context manager that switches autocast off; it does nothing for types of device
    without autocast.
    """
    if not torch.amp.is_autocast_available(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


class DeviceGenerator:
    """The default generator of random numbers of one device."""

    def __init__(self, device: torch.device):
        self.device, self._module = device, torch.get_device_module(device)
        # Apple's module has one device, and no argument for it
        self._where: tuple[Any, ...] = () if device.type == "mps" else (device,)

    def get_state(self) -> Tensor:
        state: Tensor = self._module.get_rng_state(*self._where)
        return state

    def set_state(self, state: Tensor) -> None:
        self._module.set_rng_state(state, *self._where)

    def manual_seed(self, seed: int) -> None:
        index = self.device.index
        with contextlib.nullcontext() if index is None else torch.accelerator.device_index(index):
            self._module.manual_seed(seed)


@functools.cache
def generator_of(device: torch.device) -> DeviceGenerator | None:
    """Return the generator of a device other than the CPU; None if the device has no generator."""
    return None if device.type in _NO_GENERATOR else DeviceGenerator(device)


def generators() -> list[DeviceGenerator]:
    """Return the generators of this process's accelerator; none if the accelerator was not used
    yet.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return []
    module = torch.get_device_module(accelerator)
    if not getattr(module, "is_initialized", lambda: True)():
        return []
    device = torch.device(accelerator.type, torch.accelerator.current_device_index())
    found = generator_of(device)
    return [] if found is None else [found]


@contextlib.contextmanager
def kept_generators(devices: Iterable[torch.device] | None = None) -> Iterator[None]:
    """Restore the generators of the CPU and of the given devices, or of the accelerator, after the
    `with` block.
    """
    wanted = generators() if devices is None else map(generator_of, set(devices))
    found: list[Any] = [torch.default_generator, *(g for g in wanted if g is not None)]
    states = [g.get_state() for g in found]
    try:
        yield
    finally:
        for g, state in zip(found, states, strict=True):
            g.set_state(state)


def seed_generators(seed: int, devices: Iterable[torch.device] = ()) -> None:
    """Seed the generators of the CPU, of some devices, and of the accelerator if it was used.

    `torch.manual_seed` would also set a seed for devices that are not in use yet.
    """
    torch.default_generator.manual_seed(seed)
    found = {g for device in devices if (g := generator_of(device)) is not None}
    for g in found | set(generators()):
        g.manual_seed(seed)


def refuse_fake_mode(what: str) -> None:
    """Raise a VarregError if new tensors have no values: then nothing can be measured."""
    if _torch.is_faking():
        raise VarregError(
            f"varreg: {what} ran inside of FakeTensorMode, in which tensors have no values, and "
            "nothing can be measured. Leave the mode first, or call remove() on the observer."
        )
