"""`observer.norms()`: the gradient norms of single samples, and which of them dominate a step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from varreg.engine.ledger import Ledger
from varreg.engine.sample_norms import NormsOfWindow
from varreg.errors import MeasurementError, VarregError
from varreg.tables import table


@dataclass(frozen=True)
class Sample:
    """One sample of a step."""

    batch: int
    """The number of its `backward()` since gradients were cleared, from 0."""
    index: int
    """Its position in that batch."""
    norm: float
    """n_i = |g_i|."""
    share: float
    """n_i²/Σ n_j²."""


@dataclass(frozen=True, repr=False)
class Norms:
    """The norms n_i = |g_i| of the gradients of single samples, over all parameters.

    n_i² = Σ_p g_ip². g_i is the gradient of the sample's own loss, as for `varreg.moments`: m·c_i
    for a loss that is a mean over the m samples of this process.

    A sample's *share* of a step is n_i²/Σ n_j²: its share of the squared length of the step, if the
    directions of samples were unrelated.
    """

    values: Tensor
    """n_i of all samples since gradients were cleared, in the order of the batches."""
    batches: Tensor
    """The number of each sample's batch, from 0; with gradient accumulation there are several
    batches.
    """
    indices: Tensor
    """The position of each sample in its batch."""
    by_parameter: dict[str, Tensor]
    """n_i of each parameter alone, by its name."""

    @property
    def shares(self) -> Tensor:
        """Return n_i²/Σ n_j² of all samples; zeros where no sample has a gradient. If norms of some
        samples are infinite or nan, these samples have equal shares, and all others have none.
        """
        broken = ~self.values.isfinite()
        if broken.any():
            return broken.to(self.values.dtype) / broken.sum()
        squares = self.values.square()
        return (squares / squares.sum()).nan_to_num(0.0) if squares.any() else squares

    @property
    def effective(self) -> float:
        """Return (Σ n²)²/Σ n⁴: the number of equal samples that would give the same
        concentration.
        """
        shares = self.shares
        return 1 / float(shares.square().sum()) if shares.any() else math.nan

    def largest(self, k: int = 10) -> list[Sample]:
        """Return the k samples with the largest gradients, the largest first."""
        order = self.values.sort(descending=True, stable=True).indices[:k]
        every = self.batches, self.indices, self.values, self.shares
        columns = (t[order.to(t.device)].tolist() for t in every)
        return [Sample(*row) for row in zip(*columns, strict=True)]

    def dominant(self, share: float = 0.5) -> list[Sample]:
        """Return the fewest samples that have this share of the step together."""
        if not 0 < share <= 1:
            raise VarregError(f"varreg: share must be above 0 and at most 1; got {share}.")
        ordered = self.shares.sort(descending=True).values.cumsum(0)
        few = int((ordered < share * (1 - torch.finfo(ordered.dtype).eps)).sum()) + 1
        return self.largest(few) if self.shares.any() else []

    def __len__(self) -> int:
        return len(self.values)

    def __repr__(self) -> str:
        return f"Norms({len(self)} samples, as good as {self.effective:.3g} equal ones)"

    def __str__(self) -> str:
        few = self.dominant()
        if not few:
            return f"varreg: none of {len(self)} samples has a gradient."
        part = sum(s.share for s in few)
        verb = "makes" if len(few) == 1 else "make"
        head = f"{len(few)} of {len(self)} samples {verb} {part:.0%} of this step."
        middle = float(self.values.where(self.values.isfinite(), math.nan).nanmedian())
        rows = [
            (str(s.batch), str(s.index), f"{s.norm:.3g}", _times(s.norm, middle), f"{s.share:.1%}")
            for s in self.largest(max(3, min(len(few), 10)))
        ]
        names = ("batch", "index", "norm", "over the median", "share")
        return f"{head}\n{table(names, rows, words=(), total=False)}"


def _times(norm: float, middle: float) -> str:
    return f"{norm / middle:.3g} ×" if middle > 0 else "–"


def assemble(parameters: Iterable[tuple[Tensor, Ledger]]) -> Norms:
    """Return the norms of all samples whose gradients are in the `p.grad` of parameters."""
    kept: dict[str, list[NormsOfWindow]] = {}
    reduction = "mean"
    for p, ledger in parameters:
        reduction = ledger.reduction
        if ledger.is_unmeasured(p):
            raise MeasurementError(
                f"varreg: '{ledger.name}' has a gradient that was not measured, so that norms "
                "would lack it. Use the parameter in a forward() of the model, or register a rule "
                "for its module with varreg.register_rule."
            )
        if p.requires_grad and ledger.norms and not _is_cleared(p, ledger):
            kept[ledger.name] = ledger.norms
    places = _batches([part for parts in kept.values() for part in parts])
    if not places:
        raise VarregError(
            "varreg: there are no norms. Call observer.norms() after backward(), before gradients "
            "are cleared."
        )
    sizes = [0] * (max(places.values()) + 1)
    for parts in kept.values():
        for part in parts:
            sizes[places[part.window]] = len(part.squares)
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    m = sum(sizes)
    some = next(iter(kept.values()))[0].squares
    scale = m if reduction == "mean" else 1
    squares = {name: some.new_zeros(m) for name in kept}
    for name, parts in kept.items():
        for part in parts:
            start = starts[places[part.window]]
            squares[name][start : start + len(part.squares)] += part.squares.to(some.device)
    total = torch.stack(list(squares.values())).sum(0)
    return Norms(
        total.sqrt() * scale,
        torch.cat([torch.full((n,), k) for k, n in enumerate(sizes)]),
        torch.cat([torch.arange(n) for n in sizes]),
        {name: t.sqrt() * scale for name, t in squares.items()},
    )


def _is_cleared(p: Tensor, ledger: Ledger) -> bool:
    """Return whether a gradient was cleared since its norms were recorded. A gradient that FSDP has
    not reduced yet is not in `p.grad`, and counts as not cleared.
    """
    if p.grad is None:
        return not (ledger.is_sharded and ledger.count)
    return ledger.gradient.is_cleared(p.grad, ledger.total, search=False)


def _batches(parts: list[NormsOfWindow]) -> dict[int, int]:
    """Return the number of the batch of each window, by the number of the window. Windows of the
    same forward have the same batch.
    """
    forwards: dict[int, frozenset[int]] = {}
    for part in parts:
        forwards[part.window] = forwards.get(part.window, frozenset()) | part.forwards
    batches: list[frozenset[int]] = []
    places: dict[int, int] = {}
    for window in sorted(forwards):
        own = forwards[window]
        known = [k for k, other in enumerate(batches) if own and own <= other]
        if not known:
            batches.append(own)
        places[window] = known[0] if known else len(batches) - 1
    return places
