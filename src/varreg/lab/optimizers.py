"""The optimizers that can be compared, by name: torch's, ours, and related methods."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

import varreg
from varreg.lab import baselines, names
from varreg.lab.ablations import ABLATIONS, ablated
from varreg.optim.regularized import Regularized


class Entry(NamedTuple):
    """An optimizer, and the learning rates in which its best one is looked for unless a range is given."""

    cls: type[Optimizer]
    low: float
    high: float

    @property
    def regularized(self) -> bool:
        return issubclass(self.cls, Regularized)


_SGD, _ADAM = (3e-3, 3.0), (1e-4, 1e-1)
_RANGES = {
    "SGD": _SGD,
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "NAdam": _ADAM,
    "RMSprop": _ADAM,
    "Adagrad": (1e-3, 1.0),
    "Adadelta": (0.03, 30.0),
}
_MORE = {"RAdam": _ADAM, "Adamax": _ADAM, "ASGD": _SGD}

OPTIMIZERS: dict[str, Entry] = {
    **{name: Entry(getattr(torch.optim, name), *span) for name, span in (_RANGES | _MORE).items()},
    **{f"VR{name}": Entry(getattr(varreg, f"VR{name}"), *span) for name, span in _RANGES.items()},
    "SVRG": Entry(baselines.SVRG, *_SGD),
    "MSVAG": Entry(baselines.MSVAG, *_SGD),
    "DoG": Entry(baselines.DoG, 1.0, 1.0),
    "LDoG": Entry(baselines.LDoG, 1.0, 1.0),
}
_SWITCH = "ablation"


def entry(name: str) -> Entry:
    if name not in OPTIMIZERS:
        raise names.unknown("optimizer", name, OPTIMIZERS)
    return OPTIMIZERS[name]


def check(name: str, options: dict[str, Any]) -> None:
    """Before any training: does this optimizer take these options?"""
    build(name, [torch.nn.Parameter(torch.zeros(1))], 1.0, options)


def build(name: str, params: Iterable[Tensor] | Iterable[tuple[str, Tensor]], lr: float, options: dict[str, Any]) -> Optimizer:
    """The option `ablation` of a regularized one replaces its λ: "mean" or "shuffled"."""
    cls: Any = entry(name).cls
    options = dict(options)
    how = options.pop(_SWITCH, None)
    if how is not None:
        if not entry(name).regularized or how not in ABLATIONS:
            raise ValueError(f"varreg: {name} has no {_SWITCH}={how!r}; regularized optimizers have: {', '.join(ABLATIONS)}.")
        cls = ablated(cls, how)
    if "lr" in options:
        raise ValueError(f"varreg: {name}: lr is set by the experiment; leave it out of the options.")
    known = [p for p in inspect.signature(cls).parameters if p not in ("params", "lr")]
    for option in options:
        if option not in known:
            raise names.unknown(f"option of {name}", option, known)
    try:
        made: Optimizer = cls(params, lr=lr, **options)
    except Exception as error:  # torch's own checks raise many kinds
        if str(error).startswith("varreg: "):
            raise
        raise ValueError(f"varreg: {name} does not take {options}: {error}") from error
    return made
