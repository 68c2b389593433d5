"""Find the first operation whose result for the batch differs from the results for single
samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from varreg.verification.recorder import ModulePaths, RecordedCall, Recorder
from varreg.verification.sample_part import compare_part

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Operation:
    """One call of a torch function, described for people."""

    function: str
    module: str
    """The path and type of the module whose forward made the call."""
    whole: Shape
    """The shape of its result for the batch."""
    single: Shape
    """The shape of its result for one sample."""

    def __str__(self) -> str:
        return f"`{self.function}` in {self.module}"


@dataclass(frozen=True)
class Parting:
    """The first difference between the batch and its single samples."""

    at: Operation
    """The first operation in whose result the row of a sample depends on other samples."""
    source: Operation | None
    """The first operation before it that combined all samples to one value, such as their mean."""
    instead: str = ""
    """The function that a single sample calls in its place, if that is another function; otherwise
    empty. From there on, the calls differ.
    """

    def __str__(self) -> str:
        if self.instead:
            return f"{self.at}, where one sample goes on with `{self.instead}`"
        shapes = f"shape {self.at.whole}; {self.at.single} for one sample"
        after = (
            "" if self.source is None else f", after {self.source}, which depends on all samples"
        )
        return f"{self.at} ({shapes}){after}"


def find_parting(
    model: nn.Module, run: Callable[[int | None], object], n: int, rtol: float
) -> Parting | None:
    """Run the batch, `run(None)`, and each sample, `run(i)`. Return their first difference.

    Calls are compared up to the first call of another function. If no result differs before that
    call, the call itself is the difference. This need not be an error: a loop over samples makes
    more calls for the batch. Return None if both make the same calls with the same results.
    """
    paths = ModulePaths(model)
    calls: list[RecordedCall] = []

    def record(call: RecordedCall) -> None:
        calls.append(call._replace(results=[t.detach().clone() for t in call.results]))

    partings: list[tuple[bool, int, Parting]] = []
    with paths.follow():
        with Recorder(paths, record):
            run(None)
        for i in range(n):
            comparison = _Comparison(calls, i, n, rtol)
            with Recorder(paths, comparison.hear):
                run(i)
            if comparison.parting is not None:
                partings.append(
                    (bool(comparison.parting.instead), comparison.at, comparison.parting)
                )
    return min(partings, key=lambda entry: entry[:2])[2] if partings else None


class _Comparison:
    """Compares the calls of one sample with those of the batch, one by one."""

    def __init__(self, calls: Sequence[RecordedCall], i: int, n: int, rtol: float):
        self.calls, self.i, self.n, self.rtol = calls, i, n, rtol
        self.at = 0
        self.parting: Parting | None = None
        self.source: Operation | None = None

    def hear(self, call: RecordedCall) -> None:
        """Compare one call with the batch's call at the same position; note the first
        difference.
        """
        if self.parting is not None or self.at >= len(self.calls):
            return
        batch_call = self.calls[self.at]
        if batch_call.function != call.function or len(batch_call.results) != len(call.results):
            operation = Operation(batch_call.function, batch_call.module, (), ())
            self.parting = Parting(operation, None, call.function)
            return
        for a, b in zip(batch_call.results, call.results, strict=True):
            part = compare_part(a, b, self.i, self.n)
            if part is None or part.gap <= self.rtol:
                continue
            operation = Operation(call.function, batch_call.module, tuple(a.shape), tuple(b.shape))
            if part.has_rows:
                self.parting = Parting(operation, self.source)
                return
            self.source = self.source or operation
        self.at += 1
