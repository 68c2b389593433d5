"""The optimizers that can be compared, by name: torch's, varreg's, related methods, and any that
can be imported (`lion_pytorch:Lion`). `VarianceRegularized` can wrap any of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from varreg.errors import VarregError
from varreg.lab import recipe, specs
from varreg.lab.optimizers import averages, baselines
from varreg.lab.optimizers.ablations import ABLATIONS, ablated
from varreg.optim import REGULARIZED
from varreg.optim.base import Regularized
from varreg.optim.wrapper import VarianceRegularized
from varreg.options import DEFAULTS


class Entry(NamedTuple):
    """An optimizer, with the default range of learning rates for its tuning."""

    cls: type[Optimizer]
    """The class of the optimizer. An entry imports nothing: for an optimizer that must be imported,
    this is torch's base class.
    """
    low: float
    high: float

    @property
    def regularized(self) -> bool:
        """Return whether the optimizer is one of varreg's."""
        return issubclass(self.cls, Regularized)

    @property
    def has_s(self) -> bool:
        """Return whether it has an impact factor s."""
        return self.regularized or "s" in inspect.signature(self.cls).parameters


_SGD, _ADAM = (3e-3, 3.0), (1e-4, 1e-1)
_RANGES = {"SGD": _SGD, "ASGD": _SGD, "Adagrad": (1e-3, 1.0), "Adadelta": (0.03, 30.0)}
"""Ranges of learning rates, by torch's name of an optimizer; all others have Adam's range."""
_UNREGULARIZED = ("RAdam", "Adamax", "ASGD")


def _entry(name: str, cls: type[Optimizer]) -> Entry:
    return Entry(cls, *_RANGES.get(name, _ADAM))


OPTIMIZERS: dict[str, Entry] = {
    **{name: _entry(name, getattr(torch.optim, name)) for name in (*REGULARIZED, *_UNREGULARIZED)},
    **{f"VR{name}": _entry(name, cls) for name, cls in REGULARIZED.items()},
    "SVRG": Entry(baselines.SVRG, *_SGD),
    "MSVAG": Entry(baselines.MSVAG, *_SGD),
    "DoG": Entry(baselines.DoG, 1.0, 1.0),
    "LDoG": Entry(baselines.LDoG, 1.0, 1.0),
    "LossSGD": Entry(baselines.LossSGD, *_SGD),
    "AveragedSGD": Entry(averages.AveragedSGD, *_SGD),
    "ScheduleFreeSGD": Entry(averages.ScheduleFreeSGD, *_SGD),
}
_SWITCH = "ablation"


WRAPPER = "VarianceRegularized"
"""The name of the wrapper. Its option `base` is the wrapped optimizer:
`VarianceRegularized:base=lion_pytorch:Lion,s=2`.
"""


def parse(spec: str) -> tuple[str, dict[str, Any]]:
    """Split a spec into the name of an optimizer, or `module:class` of one to import, and its
    options.

    >>> parse("SGD:momentum=0.9"), parse("lion_pytorch:Lion,weight_decay=0.1")
    (('SGD', {'momentum': 0.9}), ('lion_pytorch:Lion', {'weight_decay': 0.1}))
    """
    name, _, text = spec.partition(":")
    imported, _, rest = text.partition(",")
    if name not in (*OPTIMIZERS, WRAPPER) and imported and "=" not in imported:
        return f"{name}:{imported}", specs.parse_options(rest, spec)
    return specs.parse(spec)


def entry(name: str) -> Entry:
    """Return an optimizer's entry by its name. Nothing is imported."""
    if name == WRAPPER:
        return _entry(name, VarianceRegularized)
    module, _, cls = name.partition(":")
    if cls.isidentifier() and specs.is_module(module):
        return _entry(name, Optimizer)
    if name not in OPTIMIZERS:
        raise specs.unknown_name("optimizer", name, [*OPTIMIZERS, WRAPPER, "package.module:Class"])
    return OPTIMIZERS[name]


def class_of(name: str) -> Any:
    """Return the class of an optimizer; import it if it is neither varreg's nor torch's."""
    module, _, imported = name.partition(":")
    return specs.import_name(module, imported) if imported else entry(name).cls


def check(name: str, options: dict[str, Any]) -> None:
    """Raise a VarregError, before any training, if an optimizer does not take these options.
    Options of the recipe are left out.
    """
    rest = recipe.split(options, name)[1]
    build(name, [("p", torch.nn.Parameter(torch.zeros(1)))], 1.0, rest)


def build(
    name: str,
    params: Iterable[Tensor] | Iterable[tuple[str, Tensor]],
    lr: float,
    options: dict[str, Any],
) -> Optimizer:
    """Build an optimizer, and return it. The option `ablation` of a regularized one replaces its λ:
    "mean" or "shuffled".
    """
    given: list[Any] = list(params)
    options = dict(options)
    cls = class_of(name)
    how = options.pop(_SWITCH, None)
    if how is not None:
        if not entry(name).regularized or how not in ABLATIONS:
            raise VarregError(
                f"varreg: {name} has no {_SWITCH}={how!r}; regularized optimizers have: "
                f"{', '.join(ABLATIONS)}."
            )
        cls = ablated(cls, how)
    if "lr" in options:
        raise VarregError(
            f"varreg: {name}: lr is set by the experiment; leave it out of the options."
        )
    try:
        if name == WRAPPER:
            return _wrapped(cls, given, lr, options)
        _check_options(name, cls, options)
        # Optimizers of other libraries may not accept named parameters.
        plain = [p[1] if ":" in name and isinstance(p, tuple) else p for p in given]
        made = cls(plain, lr=lr, **options)
    except Exception as error:  # torch's own checks raise many kinds
        if isinstance(error, VarregError):
            raise
        what = ", ".join(f"{key}={value}" for key, value in (options or {"lr": lr}).items())
        raise VarregError(f"varreg: {name} does not take {what}: {error}") from error
    if not isinstance(made, Optimizer):
        raise VarregError(
            f"varreg: {name} must be a class of torch optimizers, or a function that makes one; it "
            f"made {type(made).__name__}."
        )
    return made


def _check_options(name: str, cls: Any, options: dict[str, Any]) -> None:
    """Raise a VarregError if the class has no such option."""
    try:
        taken = inspect.signature(cls).parameters
    except (TypeError, ValueError):  # not callable, or written in C: it will raise its own error
        return
    if any(p.kind is p.VAR_KEYWORD for p in taken.values()) and ":" in name:
        return
    known = [p for p in taken if p not in ("params", "lr")]
    for option in options:
        if option not in known:
            raise specs.unknown_name(f"option of {name}", option, known)


def _wrapped(cls: Any, params: list[Any], lr: float, options: dict[str, Any]) -> Optimizer:
    """Build `VarianceRegularized` around the optimizer of its option `base`. That optimizer takes
    all options that are not the regularizer's.
    """
    base = options.pop("base", None)
    if not isinstance(base, str):
        raise VarregError(
            f"varreg: {WRAPPER} needs the optimizer that it wraps, as in "
            f"{WRAPPER}:base=RAdam or {WRAPPER}:base=lion_pytorch:Lion."
        )
    own = {key: value for key, value in options.items() if key in DEFAULTS}
    rest = {key: value for key, value in options.items() if key not in DEFAULTS}
    made: Optimizer = cls(build(base, params, lr, rest), **own)
    return made
