"""Parameters: tensor → ledger and name, for one observed model and for all of them.

The public `varreg.moments(p)` is here.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from varreg import _torch
from varreg.devices import has_float64, refuse_fake_mode
from varreg.engine import deferred
from varreg.engine.ledger import Ledger
from varreg.engine.mean_variance import Moments
from varreg.engine.number_range import leaves_range, with_unknown_squares
from varreg.engine.totals import Totals
from varreg.errors import VarregError
from varreg.shards import is_sharded, like

Pairs = Callable[[nn.Module], list[tuple[Tensor, Tensor]]]
"""Returns the gathered parameters of a model, each with the sharded one that it stands for."""


class Parameters:
    """The parameters of one observed model, each with its ledger."""

    def __init__(self, model: nn.Module, reduction: str, ledger_type: type[Ledger] = Ledger):
        self.model, self.reduction = model, reduction
        self.known: dict[int, tuple[Tensor, Ledger]] = {}  # by id
        self.module_names: dict[nn.Module, str] = {}
        self.ledger_type = ledger_type  # several processes use another type
        self.recorder: Any = None  # records the norms of samples, if norms=True
        self._pairs: Pairs | None = None
        # gathered parameters by id, each with the sharded one that it stands for
        self.gathered: dict[int, tuple[Tensor, Tensor]] = {}
        self.learn()

    def learn(self) -> None:
        """Register the model's parameters, some of which may be new."""
        self.module_names = {m: name for name, m in self.model.named_modules()}
        pairs = () if self._pairs is None else self._pairs(self.model)
        self.gathered = {id(t): (t, p) for t, p in pairs}
        self._lasting = {id(t) for t in (*self.model.buffers(), *self.model.parameters())}
        before, self.known = self.known, {}
        for name, t in self.model.named_parameters():
            p = self.shard_of(t)
            old = before.get(id(p))
            ledger = old[1] if old and old[0] is p else self.ledger_type(name, self.reduction)
            ledger.recorder = self.recorder
            self.known[id(p)] = p, ledger
            LEDGERS[p] = ledger

    def record(self, recorder: Any) -> None:
        """Make all ledgers record the norms of samples."""
        self.recorder = recorder
        for _, ledger in self:
            ledger.recorder = recorder

    def __iter__(self) -> Iterator[tuple[Tensor, Ledger]]:
        """Yield each parameter with its ledger."""
        return iter(self.known.values())

    def ledger(self, t: Tensor) -> Ledger | None:
        """Return the ledger of an observed parameter, also if the model got it after `observe`;
        None for any other tensor.
        """
        if not t.requires_grad:
            return None
        p = self.shard_of(t) if self.gathered else t
        entry = self.known.get(id(p))
        if entry is not None and entry[0] is p:
            return entry[1]
        if t.grad_fn is None and isinstance(t, nn.Parameter):
            self.learn()
            entry = self.known.get(id(self.shard_of(t)))
            return entry[1] if entry else None
        return None

    def ledger_of(self, p: Tensor) -> Ledger | None:
        """Return the ledger of a parameter that the optimizer has."""
        entry = self.known.get(id(p))
        return entry[1] if entry is not None and entry[0] is p else None

    def shard_of(self, t: Tensor) -> Tensor:
        """Return the sharded parameter, which the optimizer has, for a parameter that was gathered
        for a forward. Return any other tensor itself.
        """
        entry = self.gathered.get(id(t))
        return entry[1] if entry is not None and entry[0] is t else t

    def follow_shards(self, pairs: Pairs) -> None:
        """Treat gathered parameters as the sharded ones that they stand for."""
        self._pairs = pairs
        self.learn()

    def is_buffer(self, t: Tensor) -> bool:
        """Return whether a tensor is a buffer or parameter of the model, which existed before the
        batch.
        """
        return id(t) in self._lasting

    def release(self) -> None:
        """Free the sums of parameters whose gradients were set to None."""
        for p, ledger in self.known.values():
            if p.grad is None and ledger.total is not None:
                ledger.release(p)

    def forget(self) -> None:
        """Remove these parameters from `varreg.moments`."""
        for p, ledger in self:
            if LEDGERS.get(p) is ledger:
                del LEDGERS[p]


class Ledgers:
    """Ledgers by parameter, for as long as the parameter lives. Optimizers look up every parameter
    at every step.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[weakref.ref[Tensor], Ledger]] = {}

    def __setitem__(self, p: Tensor, ledger: Ledger) -> None:
        key, kept = id(p), self._kept
        # when the parameter is gone, its entry is removed before another tensor can get its id
        kept[key] = weakref.ref(p, lambda _: kept.pop(key, None)), ledger

    def get(self, p: Tensor) -> Ledger | None:
        entry = self._kept.get(id(p))
        return None if entry is None else entry[1]

    def find(self, parameters: list[Tensor]) -> list[Ledger | None]:
        """Return the ledger of each parameter; None for one that is not observed."""
        entries = map(self._kept.get, map(id, parameters))
        return [None if entry is None else entry[1] for entry in entries]

    def __getitem__(self, p: Tensor) -> Ledger:
        return self._kept[id(p)][1]

    def __delitem__(self, p: Tensor) -> None:
        del self._kept[id(p)]

    def __contains__(self, p: Tensor) -> bool:
        return id(p) in self._kept

    def __len__(self) -> int:
        return len(self._kept)


LEDGERS = Ledgers()
"""Every observed parameter's ledger."""


def moments(p: Tensor) -> Moments | Totals | None:
    """Return the moments of the per-sample gradients of parameter `p`, after `backward()`; None
    where nothing was observed: there was no backward since gradients were cleared, or no observer
    has the parameter. `varreg.is_observed(p)` distinguishes these two cases.

    Like `p.grad`, they are sums over all samples since the gradient was last cleared. Changes of
    `p.grad` after `backward()`, such as clipping or unscaling, do not change them.

    Args:
        p: A parameter of an observed model.

    Returns:
        A `Moments`, or a `Totals` if the model is observed with `per="tensor"` or `"model"`.

    >>> import torch, varreg
    >>> layer = torch.nn.Linear(1, 1, bias=False)
    >>> observer = varreg.observe(layer)
    >>> layer(torch.tensor([[1.0], [2.0], [6.0]])).mean().backward()
    >>> m = varreg.moments(layer.weight)
    >>> m.count, m.mean.item(), round(m.variance.item(), 4)  # gradients 1, 2, 6: variance 14/3
    (3, 3.0, 4.6667)

    """
    if not isinstance(p, Tensor):
        raise VarregError(
            f"varreg: moments expects a parameter (a tensor), got {type(p).__name__}."
        )
    ledger = LEDGERS.get(p)
    if ledger is None:
        return None
    if _torch.dispatch_modes():
        refuse_fake_mode("moments()")
    if deferred.PENDING:
        deferred.fetch([])
    m = ledger.read(p)
    if m is None:
        warn_unmeasured([(p, ledger)])
        return None
    if isinstance(m, Totals):
        return m
    if leaves_range(m.total, m.square):
        if not ledger.is_float64:
            ledger.is_float64 = has_float64(m.square.device)
            then = (
                "From the next backward() on they are summed up in float64; until then, they"
                if ledger.is_float64
                else "Their device has no float64; they"
            )
            warnings.warn(
                f"varreg: the squares of the gradients of '{ledger.name}' have left the range of "
                f"float32, though the gradients have not. {then} are nan where they are not known.",
                stacklevel=2,
            )
        m = with_unknown_squares(m)
    if is_sharded(p):
        return replace(m, total=like(m.total, p), square=like(m.square, p))
    return m


def is_observed(p: Tensor) -> bool:
    """Return whether an observer has parameter `p`: its moments are measured in the next
    `backward()`.

    Args:
        p: A parameter.

    >>> import torch, varreg
    >>> layer = torch.nn.Linear(1, 1, bias=False)
    >>> varreg.moments(layer.weight), varreg.is_observed(layer.weight)  # call varreg.observe
    (None, False)
    >>> observer = varreg.observe(layer)
    >>> varreg.moments(layer.weight), varreg.is_observed(layer.weight)  # call backward()
    (None, True)

    """
    if not isinstance(p, Tensor):
        raise VarregError(
            f"varreg: is_observed expects a parameter (a tensor), got {type(p).__name__}."
        )
    return p in LEDGERS


def warn_unmeasured(parameters: list[tuple[Tensor, Ledger]]) -> None:
    """Warn, once for each, of parameters that have a gradient and no moments."""
    new = [ledger for p, ledger in parameters if not ledger.was_warned and ledger.is_unmeasured(p)]
    if not new:
        return
    for ledger in new:
        ledger.was_warned = True
    which = ", ".join(f"'{ledger.name}'" for ledger in new)
    warnings.warn(
        f"varreg: {which}: there is a gradient and there are no moments. The gradient came from "
        "code that the engine does not see: the loss, a scripted function, a "
        "torch.autograd.Function, torch.func, a method other than forward(), or a function under "
        "re-entrant checkpointing. Use the parameter in a forward() of the model, or register a "
        "rule for its module with varreg.register_rule.",
        UserWarning,
        stacklevel=3,
    )
