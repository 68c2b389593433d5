"""The books: for every parameter, the sums over samples since its gradient was last cleared.

A *window* is one call of `backward()`. Within it, all uses of a parameter are added up per sample before squaring; between
windows, sums and counts add up (micro-batches), until the gradient is cleared, by whatever route.
"""

from __future__ import annotations

import math
import warnings
import weakref
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from varreg import native
from varreg.engine.contribution import Contribution, Partition, combine
from varreg.engine.shards import is_sharded, like, local

_BEGINNING = 1 << 8  # elements
_SMALL, _LARGE = 2.0**-80, 2.0**100  # the largest W: beyond these, sums are in float64
_INSIDE = 2.0**-66, 2.0**86  # and between these again in float32


@dataclass(frozen=True, repr=False)
class Moments:
    """Mean and variance of the per-sample gradients of one parameter (paper, section 4 and S2.2).

    With S = Σ c_i and W = Σ C_u²/n_u over K groups of the m samples (K = m is the exact case), for a loss that is a mean:

        ḡ = S,   v² = (m−1)/(K−1) · (m·W − S²),   ρ = v²/ḡ²

    For a loss that is a sum, ḡ is divided by m and v² by m². For K = m this is v² = (1/m) Σ (g_i − ḡ)² to the letter; for
    fewer groups it has the same expectation when samples are independent and alike. ρ depends neither on the reduction nor on
    any loss scale.
    """

    count: int
    """m: samples since gradients were last cleared, over all micro-batches."""
    groups: int
    """K: groups whose spread was measured; the same as `count` in the exact case."""
    total: Tensor
    """S: the sum of all contributions, which is what `backward()` added to `p.grad`."""
    square: Tensor
    """W: the sum of the squared contributions of the groups, each over its number of samples."""
    reduction: str = "mean"

    @property
    def mean(self) -> Tensor:
        """ḡ = (1/m) Σ g_i."""
        return self.total / self._scale

    @property
    def second_moment(self) -> Tensor:
        """(1/m) Σ g_i²; with groups, its estimate v² + ḡ²."""
        if self.groups == self.count:
            return self.square * (self.count / self._scale**2)
        return self.variance + self.mean.square()

    @property
    def variance(self) -> Tensor:
        """v² = (1/m) Σ (g_i − ḡ)², never negative; what rounding alone could leave is 0. One sample has 0, one *group* of several nan."""
        return self.variance_into(torch.empty_like(self.square))

    def variance_into(self, out: Tensor) -> Tensor:
        """The variance, in memory that is given."""
        if self.count == 1:
            return out.zero_()
        if self.groups < 2:
            return out.fill_(torch.nan)
        factor, rounding = self.constants
        factor /= self._scale**2
        if not is_sharded(out) and native.variance(self.total, self.square, self.count, factor, rounding, out):
            return out
        size = self.square * self.count
        torch.addcmul(size, self.total, self.total, value=-1, out=out)
        return out.mul_(factor).masked_fill_(out <= size.mul_(rounding * factor), 0.0)

    @property
    def constants(self) -> tuple[float, float]:
        """What m·W − S² is multiplied by, for a loss that is a mean; and what rounding may leave of it, relative to m·W."""
        return (self.count - 1) / (self.groups - 1), torch.finfo(self.square.dtype).eps * (4 + 2 * math.sqrt(self.count))

    @property
    def rho(self) -> Tensor:
        """ρ = v²/ḡ², the scale-free variance (S2.3). 0/0 is nan and v²/0 is inf: the regularizer knows what to do with both.

        Where squares are too small for their precision, it is not known: nan.
        """
        return (self.variance / self.mean.square()).masked_fill_(self.square < torch.finfo(self.square.dtype).tiny, torch.nan)

    def __repr__(self) -> str:
        kind = "exact" if self.groups == self.count else f"{self.groups} groups"
        shape = "×".join(map(str, self.total.shape)) or "scalar"
        if not self.total.numel() or is_sharded(self.total):
            return f"Moments(count={self.count}, {kind}, shape {shape}{', sharded' if is_sharded(self.total) else ''})"
        rho = self.rho
        middle = float(rho[~rho.isnan()].median()) if (~rho.isnan()).any() else math.nan
        size, spread = float(self.mean.norm()), float(self.variance.mean())
        return f"Moments(count={self.count}, {kind}, shape {shape}: |mean| {size:.3g}, mean variance {spread:.3g}, median rho {middle:.3g})"

    @property
    def _scale(self) -> int:
        return 1 if self.reduction == "mean" else self.count


@dataclass(frozen=True)
class Merged:
    """Sums over all ranks, as of the last time that gradients were synchronised."""

    count: int
    groups: int
    square: Tensor


class Ledger:
    """The sums of one parameter. Holds no reference to the parameter itself."""

    def __init__(self, name: str, reduction: str):
        self.name, self.reduction = name, reduction
        self.told = False  # was it said that the engine cannot see where it is used?
        self.served: dict[str, None] = {}  # names of the rules that served it, in order of appearance
        self.uses: set[int] = set()  # of the graphs that are alive, and may still arrive, by id
        self.expected = 0  # uses that a re-entrant checkpoint will bring: their graphs do not exist yet
        self.precise = False  # are sums in float64, since squares would leave the range of float32?
        self.examined = True  # is it looked at closely in the next window: at first, and then in turn?
        self.shared = False  # more than one use was seen in one window: always wait for all of them
        self.pending: list[Contribution] = []
        self.arrived = 0  # uses in this window
        self.arriving: set[int] = set()  # the forwards of these uses; those of a checkpoint have no number
        self.in_window = False
        self.looked = False  # was clearing looked for in the backward that runs?
        self.was_cleared = False  # since the last window closed
        self.is_cleared = False  # was it ever?
        self.sharded = False  # has each rank a part of the parameter? Then `merged` and `total` are of this one's part
        self._restart()

    def _restart(self) -> None:
        self.epoch = object()  # changes whenever sums restart
        self.count = self.groups = 0
        self.total: Tensor | None = None
        self.square: Tensor | None = None
        self.forwards: set[int] = set()  # whose samples are counted
        self.used: set[int] = set()  # those of them that have contributed
        self.lent = False  # was W handed out since it was last added to?
        self.added = 0.0  # a size of what was added up, before it cancelled; known where sums are examined
        self.precision = 0.0  # the rounding error of p.grad where it is autograd's own, beside what is measured; else 0
        self.whole = False  # did the sums start together with p.grad?
        self.unclear: tuple[str, str] | None = None  # whose gradients were cleared since its count began, and whose were not
        self.awaits_gradient = False  # will the total be p.grad, as it is at the end of the window?
        self.merged: Merged | None = None  # with it, count, groups and square are this rank's own since then; total is of all
        self._seen: tuple[int, int, int] | None = None  # address and version of p.grad when the last window closed
        self._grad: TensorWeakRef | None = None  # p.grad itself

    def written(self, p: Tensor) -> bool:
        """Is p.grad another tensor than when the last window closed, or was it written to since?"""
        grad = p.grad
        assert grad is not None
        return self._seen != _trace(grad) or self._grad is None or self._grad() is not grad

    def cleared(self, p: Tensor, look: bool) -> bool:
        """Were gradients cleared since the last window? By None, or by zeros that somebody wrote.

        Zeros are cleared if p.grad was not zero before, or if it was written to. Nothing writes between
        micro-batches. Clipping and unscaling do, before a step, and leave zeros that were zeros: those
        look like cleared ones, and sums restart, as they do after a step. `look` searches for zeros also
        where no write is known: `p.grad.data` and NumPy leave no trace.
        """
        if p.grad is None:
            return self._seen is not None
        written = self.written(p)
        if not (look or written) or not is_zero(local(p.grad)):
            return False
        return written or (self.total is not None and not is_zero(self.total))

    def release(self, p: Tensor) -> None:
        """Gradients were cleared by None: let go of the memory, which the forward pass may need. They would start anew in any case."""
        if p.grad is None and self.total is not None and not (self.in_window or self.sharded or self.merged):
            self._clear()

    def look(self, p: Tensor) -> None:
        """Start anew if gradients were cleared; once in a backward, before it writes to any gradient.

        Later would be too late where gradients are views of one buffer, as DDP has them: a write to one
        of them counts as a write to all.
        """
        if not (self.looked or self.in_window):
            self._begin(p)
        self.looked = True

    def open(self, p: Tensor) -> None:
        """A window begins for this parameter."""
        self.look(p)
        self.check_count()
        self.in_window = True

    def _clear(self) -> None:
        """Gradients were cleared: sums start together with p.grad."""
        if self._seen is not None:
            self.was_cleared = self.is_cleared = True
        self._restart()
        self.whole = True

    def _begin(self, p: Tensor) -> None:
        """Start anew if gradients were cleared. What is to be synchronised yet waits elsewhere than in the gradient of a sharded parameter."""
        self.sharded = is_sharded(p) and p.device_mesh.size() > 1  # type: ignore[attr-defined]
        if self.sharded:  # whether there are zeros in all shards is found out when they are reduced
            cleared = p.grad is None and not self.count
        else:
            cleared = self.cleared(p, look=True) or (p.grad is None and self.total is not None and self.merged is None)
        if cleared:
            self._clear()
        elif p.grad is None and not self.sharded:
            self.whole = True

    @property
    def has_gradient(self) -> bool:
        """Had it one when the last window closed, which was not cleared since?"""
        return self._seen is not None

    def waits(self, p: Tensor) -> bool:
        """Did it count samples, and has no gradient yet? Then it cannot tell by itself when gradients are cleared."""
        counted = (self.count > 0 and self.total is None) or (self.merged is not None and self._seen is None)
        return p.grad is None and counted and not self.sharded

    def forget(self) -> None:
        """Gradients were cleared, of which this parameter has none: what it counted was before."""
        self._restart()
        self.whole = True

    def check_count(self) -> None:
        """Refuse a count of which nobody can tell where it begins."""
        if self.unclear is not None:
            cleared, kept = self.unclear
            raise RuntimeError(
                f"varreg: '{self.name}' has its first gradient after {self.count} samples that did not reach it, and whether they "
                f"belong to the same accumulation cannot be told: the gradient of '{cleared}' was cleared since then, that of "
                f"'{kept}' was not. Clear all gradients together; or with zero_grad(set_to_none=False), which leaves a trace."
            )

    def add(self, contribution: Contribution, dtype: torch.dtype) -> Tensor | None:
        """Take a use's contributions; returns their sum, which is the gradient to hand on."""
        self.arrived += 1
        # a use that a checkpoint will bring may be there already, or not: to wait is right in any case
        if self.shared or self.pending or len(self.uses) + self.expected > 1:
            self.pending.append(contribution)
            total = contribution.total()
            if self.examined:
                self.added += contribution.size()
        else:
            total = self._enter(contribution)
        return total if total is None or total.dtype == dtype else total.to(dtype)

    def _enter(self, contribution: Contribution) -> Tensor | None:
        total, square = self._sums(contribution)
        if total is not None and square is not None:
            if not (self.sharded and self.merged):  # else it will be what p.grad is
                self.total = total if self.total is None else self.total + total
            if self.square is None:
                self.square = square
            else:  # somebody may keep what was handed out
                self.square = self.square + square if self.lent else self.square.add_(square)
            self.lent = False
        if not self._is_counted(self.arriving):
            self.count += contribution.partition.batch
            self.groups += contribution.partition.groups
        return total

    def _is_counted(self, forwards: set[int]) -> bool:
        """Are the samples of these forwards counted? Two losses of one forward are of the same ones."""
        return bool(forwards) and forwards <= self.forwards

    def expect_use(self, forward: int) -> None:
        """A use of this forward arrives; 0 is one of a checkpoint, which runs again for another one."""
        if not forward:
            return
        if forward in self.used:
            raise RuntimeError(
                f"varreg: backward() ran a second time through the same forward pass, and gradients of '{self.name}' were not "
                "cleared in between: what one sample contributes to both cannot be told. Add the losses and call backward() once."
            )
        self.arriving.add(forward)

    def _sums(self, contribution: Contribution) -> tuple[Tensor | None, Tensor | None]:
        """S and W; in float64 if the squares of all that float32 can hold as a gradient cannot be held.

        ρ does not depend on the size of gradients, so it must not fail for 1e-20 or 1e25.
        """
        total, square = contribution.precise_sums() if self.precise else contribution.sums()
        if total is None or square is None:
            return None, None
        if self.precise and _INSIDE[0] < _largest(square) < _INSIDE[1]:
            self.precise = False
            return total.float(), square.float()
        if not self.precise and self.examined and leaves_range(total, square):
            self.precise = True
            return contribution.precise_sums()
        return total, square

    def watch(self, m: Moments, W: float) -> None:
        """For those who know ΣW: if squares leave the range, the next sums are in float64."""
        if not _SMALL <= W <= _LARGE:
            self.precise = self.precise or leaves_range(m.total, m.square)

    def settle(self, p: Tensor) -> None:
        """All uses have arrived: square what had to wait."""
        if self.pending:
            self.shared |= len(self.pending) > 1
            with torch.autocast(p.device.type, enabled=False):  # backward() may have been called under it
                self._enter(combine(self.pending))
            self.pending = []

    def close(self, p: Tensor) -> None:
        """The window ends: note the state of `p.grad`."""
        self.settle(p)
        self.expected = max(0, self.expected - self.arrived)
        self.arrived = 0
        self.forwards |= self.arriving
        self.used |= self.arriving
        self.arriving = set()
        self.in_window = False
        self.note(p)

    def note(self, p: Tensor) -> None:
        """Note the state of `p.grad`, to know later whether it was written to."""
        self._seen = None if p.grad is None else _trace(p.grad)
        self._grad = None if p.grad is None else TensorWeakRef(p.grad)

    def is_measured(self, p: Tensor) -> bool:
        """Is `p.grad` still the tensor that was measured? Its values may have changed, by clipping or unscaling."""
        return p.grad is not None and (self.merged is not None or (self._grad is not None and self._grad() is p.grad))

    def pass_by(self, p: Tensor, partition: Partition, forwards: set[int]) -> None:
        """A window closed in which the parameter had no use: its samples count, and contribute nothing.

        That holds before its first use, too: it may come in a later micro-batch.
        """
        there = p.grad is not None
        counts = (self.count or (self.merged is not None and there)) if self.sharded else (p.requires_grad or there)
        if counts and not self._is_counted(forwards):
            self.count += partition.batch
            self.groups += partition.groups
            self.forwards |= forwards
        self.note(p)

    def own(self, p: Tensor, partition: Partition | None) -> tuple[int, int, Tensor | None, bool]:
        """The sums of this rank since the last synchronisation: m, groups, W; and is there more in `p.grad` than they say?

        Where the parameter had no use in the window under way, `partition` is that of its batch, whose samples count all the same.
        """
        self.settle(p)
        self.look(p)
        if partition is not None:
            self.count, self.groups = self.count + partition.batch, self.groups + partition.groups
        return self.count, self.groups, self.square, not self.whole

    def take_gradient(self, p: Tensor) -> None:
        """Where the gradient is sharded, it is there when the window ends, and not when the sums are merged."""
        if self.awaits_gradient and p.grad is not None:
            self.total = local(p.grad).to(self.merged.square.dtype, copy=True) if self.merged is not None else None
            self.awaits_gradient = False

    def signs(self, p: Tensor) -> tuple[bool, bool]:
        """Of a sharded parameter, before gradients are reduced: is there something in this rank's part of its gradient; and, if not, was there,
        or was it written to since?
        """
        now = p.grad is not None and not is_zero(local(p.grad))
        if now or self.merged is None:
            return now, False
        lost = self.total is not None and not is_zero(self.total)
        return now, lost or p.grad is None or self.written(p)

    def merge(self, count: int, groups: int, square: Tensor, total: Tensor | None) -> None:
        """The sums of all ranks since the last synchronisation, and the gradient that they now share."""
        if self.merged is not None:
            count, groups, square = self.merged.count + count, self.merged.groups + groups, self.merged.square + square
        self.merged, self.total = Merged(count, groups, square), total
        self.count, self.groups, self.square = 0, 0, None

    def is_unmeasured(self, p: Tensor) -> bool:
        """Has the parameter a gradient of which nothing was measured?"""
        if p.grad is None or self.total is not None or self.merged is not None or not p.requires_grad:
            return False
        return not self.awaits_gradient and not is_zero(local(p.grad))

    def read(self, p: Tensor, stepping: bool = False) -> Moments | None:
        """The moments; where `p` is sharded, of this rank's part.

        An optimizer that is `stepping` takes p.grad as it is: zeros that were measured as zeros are still
        what was measured, whoever wrote them (a clip, an unscaling).
        """
        if self.sharded and (self.merged is None or self.count):
            return None  # not synchronised: the sums are of whole tensors, and of this rank's samples
        count, groups, square = self.count, self.groups, self.square
        if self.merged is not None:
            count, groups = self.merged.count + count, self.merged.groups + groups
            square = self.merged.square if square is None else self.merged.square + square
        if count == 0 or self.total is None or square is None or (self.merged is not None and p.grad is None):
            return None
        if self.cleared(p, look=False) and not (stepping and p.grad is not None and is_zero(self.total)):
            return None
        self.lent = True
        return Moments(count, groups, self.total, square, self.reduction)


def leaves_range(total: Tensor, square: Tensor) -> bool:
    """Are squares in float32 too small, or too large, though the gradient is not?"""
    if square.dtype != torch.float32 or is_sharded(square) or not square.numel():
        return False
    largest = _largest(square)
    if largest < _SMALL:
        return not is_zero(total)
    return not largest <= _LARGE and bool(total.isfinite().all())


def _as_known(m: Moments) -> Moments:
    """Moments whose squares left the range of float32, in float64: nan where they are not known any more."""
    known = (m.square >= torch.finfo(m.square.dtype).tiny) & m.square.isfinite() | (m.total == 0) & (m.square == 0)
    return replace(m, total=m.total.double(), square=m.square.double().masked_fill_(~known, torch.nan))


def _largest(square: Tensor) -> float:
    return float(square.max()) if square.numel() else 0.0


def unmeasured_message(names: list[str]) -> str:
    """Return what to say of parameters that have a gradient and no moments."""
    which = ", ".join(f"'{n}'" for n in names)
    return (
        f"varreg: {which}: there is a gradient and there are no moments. It came from where the engine cannot look: the "
        "loss, a scripted function, a torch.autograd.Function, torch.func, a method other than forward(), "
        "or a function under re-entrant checkpointing. Use the parameter in a forward() of the model, or "
        "register a rule for its module with varreg.register_rule."
    )


def is_zero(t: Tensor) -> bool:
    """Is there nothing in it? Mostly there is something right at the beginning."""
    if t.numel() > _BEGINNING and t.is_contiguous() and bool(t.view(-1)[:_BEGINNING].any()):
        return False
    return not bool(t.any())


def _trace(grad: Tensor) -> tuple[int, int, int]:
    """What changes when a gradient is another one, or is written to: as a whole, or, where it is sharded, in this rank's part."""
    part = local(grad)
    return part.data_ptr(), grad._version, part._version


class Ledgers:
    """Ledgers by parameter, for as long as the parameter lives. Optimizers ask for every parameter at every step."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[weakref.ref[Tensor], Ledger]] = {}

    def __setitem__(self, p: Tensor, ledger: Ledger) -> None:
        key, kept = id(p), self._kept
        kept[key] = (weakref.ref(p, lambda _: kept.pop(key, None)), ledger)  # before anything else can have that id

    def get(self, p: Tensor) -> Ledger | None:
        found = self._kept.get(id(p))
        return None if found is None else found[1]

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


def moments(p: Tensor) -> Moments | None:
    """The moments of the per-sample gradients of parameter `p`, after `backward()`; None where nothing was observed.

    They are sums over everything since the gradient was last cleared, as `p.grad` is, and are not touched by what happens to
    `p.grad` after `backward()`: clipping or unscaling leaves them as they were.

    >>> import torch, varreg
    >>> layer = torch.nn.Linear(1, 1, bias=False)
    >>> observer = varreg.observe(layer)
    >>> layer(torch.tensor([[1.0], [2.0], [6.0]])).mean().backward()
    >>> m = varreg.moments(layer.weight)
    >>> m.count, m.mean.item(), round(m.variance.item(), 4)  # gradients 1, 2, 6: variance 14/3
    (3, 3.0, 4.6667)
    """
    if not isinstance(p, Tensor):
        raise ValueError(f"varreg: moments expects a parameter (a tensor), got {type(p).__name__}.")
    ledger = LEDGERS.get(p)
    found = None if ledger is None else ledger.read(p)
    if found is None and ledger is not None and not ledger.told and ledger.is_unmeasured(p):
        ledger.told = True
        warnings.warn(unmeasured_message([ledger.name]), UserWarning, stacklevel=2)
    if found is not None and ledger is not None and leaves_range(found.total, found.square):
        if not ledger.precise:
            ledger.precise = True
            warnings.warn(
                f"varreg: the squares of the gradients of '{ledger.name}' have left the range of float32, though the gradients have "
                "not. From the next backward() on they are summed up in float64; until then, they are nan where they are not known.",
                stacklevel=2,
            )
        found = _as_known(found)
    if found is not None and is_sharded(p):
        return replace(found, total=like(found.total, p), square=like(found.square, p))
    return found
