"""The result of `varreg.verify`: its status, and the gaps of every parameter."""

from __future__ import annotations

import math
from dataclasses import dataclass

from varreg.tables import table
from varreg.verification.parting import Parting


@dataclass(frozen=True)
class Row:
    """The gaps of one parameter, each relative to the size of its per-sample gradients."""

    parameter: str
    shape: tuple[int, ...]
    used: bool
    """True: some sample has a gradient for this parameter."""
    batch: float
    """The gap between the batch's gradient and the mean (or sum) of single samples' gradients."""
    grad: float
    """The gap between `p.grad` with varreg and `p.grad` without."""
    mean: float
    """The gap between varreg's mean and the definition; likewise for the next two."""
    second_moment: float
    variance: float

    @property
    def gap(self) -> float:
        """Return the largest of these gaps."""
        return max(self.batch, self.grad, self.mean, self.second_moment, self.variance)


@dataclass(frozen=True)
class Verification:
    """The result of `varreg.verify`; truthy when verified, and `print` shows it to people."""

    status: str
    """"verified"; "different"; "refused": varreg refused the model, and `reason` is its message; or
    "unknown": the model cannot be verified.
    """
    reason: str = ""
    """Why it is not verified, in words; empty if it is."""
    advice: str = ""
    """What to do about it."""
    samples: int = 0
    """The number of samples that were used."""
    rtol: float = math.nan
    """The gap that is allowed."""
    rows: tuple[Row, ...] = ()
    """One row for each trained parameter; no rows if nothing could be compared."""
    outputs: float = math.nan
    """The largest gap between outputs of the batch and of single samples; nan if no output can be
    compared.
    """
    parting: Parting | None = None
    """The first operation at which outputs of the batch and of single samples differ."""

    @property
    def gap(self) -> float:
        """Return the largest relative gap of any parameter; nan if nothing could be compared."""
        return max((row.gap for row in self.rows), default=math.nan)

    @property
    def worst(self) -> Row:
        """Return the row with the largest gap."""
        return max(self.rows, key=lambda row: row.gap)

    def __bool__(self) -> bool:
        return self.status == "verified"

    def __str__(self) -> str:
        words = {"different": "not the same", "unknown": "cannot be verified"}
        lines = [f"varreg.verify: {words.get(self.status, self.status)}."]
        if self.rows:
            lines[0] += (
                f" {len(self.rows)} parameters, {self.samples} samples, one at a time: the largest "
                f"relative gap is {self.gap:.1e}, of '{self.worst.parameter}'; {self.rtol:.0e} is "
                "allowed."
            )
        lines += [text for text in (self.reason, self.advice) if text]
        return "\n".join([*lines, *([self._table()] if self.rows else [])])

    def _table(self) -> str:
        head = ("parameter", "shape", "batch", "p.grad", "mean", "2nd moment", "variance", "")
        return table(head, [self._cells(row) for row in self.rows], words=(0, 1, 7), total=False)

    def _cells(self, row: Row) -> tuple[str, ...]:
        gaps = (row.batch, row.grad, row.mean, row.second_moment, row.variance)
        note = "" if row.gap <= self.rtol else "not the same"
        note = note or ("" if row.used else "no gradient")
        shape = "×".join(map(str, row.shape)) or "scalar"
        return (row.parameter, shape, *(f"{gap:.1e}" if gap else "0" for gap in gaps), note)


class CannotVerify(Exception):  # noqa: N818
    """The model cannot be verified. The exception carries the result that says why."""

    def __init__(self, reason: str, advice: str = "", status: str = "unknown"):
        super().__init__(reason)
        self.verification = Verification(status, reason, advice)
