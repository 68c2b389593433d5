"""The verdicts of trials, and for which calls a verdict is valid.

A verdict is valid for calls of the same kind: with the same function and plain arguments, and
tensors of the same types, shapes and places. (A constant has no place.) After eight different sizes
have passed, the size is assumed to make no difference, except for batches of up to four samples: a
function may treat a small number as a special case. If values of a constant may decide (an index, a
mask, an adjacency as long as the batch; or any constant or parameter whose other values change the
verdict), the verdict is not stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from varreg.engine.trace.call import Call
from varreg.engine.trace.follow import goes_by_values
from varreg.engine.trace.layout import Layout, Place, Single
from varreg.engine.trace.trial.runners import (
    fixed_tensors,
    with_other_constants,
    with_other_parameters,
)
from varreg.engine.trace.trial.trial_values import Verdict, undisturbed
from varreg.engine.trace.trial.try_call import is_weighted, try_affine, try_call, try_sum
from varreg.thresholds import EARLY, ENOUGH_SIZES, MOST_VERDICTS, RECORDS, SMALL_BATCH

Escape = tuple[str, str, bool | None]
"""How values of the batch left torch: the function, the module, and the value, if it was True or
False.
"""
Range = tuple[float, float]
_PLAIN = (int, float, str, type(None))
_BY_VALUES = "by values"
"""Stands for a verdict that is valid only for the values of constants in its trial."""


class Verdicts:
    """The verdicts on calls: each trial is made when it is needed first, and its verdict is
    stored.
    """

    def __init__(self) -> None:
        self._verdicts: dict[Any, Any] = {}
        self._passed: dict[Any, set[Any]] = {}  # sizes that have passed, by kind
        self._times: dict[Any, int] = {}  # number of calls of `is_due`, by subject
        self._ranges: dict[Escape, Range] = {}  # of numbers that left torch
        self.places: dict[Any, Place] = {}  # of tensors of unknown origin

    def is_due(self, key: Any) -> bool:
        """Return whether a subject is to be tried at this call.

        It is in the first four calls, then in the 8th, 16th, 32nd … call: a behaviour that may
        change is tried again, more and more rarely.
        """
        times = self._times[key] = self._times.get(key, 0) + 1
        return times <= EARLY or times & (times - 1) == 0

    def is_record(self, key: Escape, numbers: Range | None) -> bool:
        """Return whether to try numbers that left torch because they are larger or smaller than all
        earlier ones: code may take another branch beyond some limit. The first 16 such numbers are
        tried, then the 32nd, 64th, …, since some numbers grow in every step.
        """
        if numbers is None:
            return False
        low, high = self._ranges.get(key, numbers)
        is_inside = low <= numbers[0] and numbers[1] <= high
        self._ranges[key] = min(low, numbers[0]), max(high, numbers[1])
        if is_inside:
            return False
        times = self._times[("record", key)] = self._times.get(("record", key), 0) + 1
        return times <= RECORDS or times & (times - 1) == 0

    def is_early(self, key: Any) -> bool:
        """Return whether a subject was looked up four times at most."""
        return self._times.get(key, 0) <= EARLY

    def forget(self, key: Any) -> None:
        """Make a subject due the next time: its trial failed, or was not made."""
        self._times.pop(key, None)

    def of_call(self, call: Call, there: Place, which: int) -> Verdict:
        """Return whether each sample of a call affects only its own place in a result."""
        if goes_by_values(call) or has_rows_for_samples(call):
            return self.of_values(call, there, which)
        kind = ("apart", _kind_of(call, which), _key_of_place(there))
        verdict: Verdict = self._remember(
            call, kind, lambda other: try_call(other, there, which), Verdict.APART
        )
        return verdict

    def of_values(self, call: Call, there: Place, which: int) -> Verdict:
        """Return whether each sample of a call affects only its own place in a result, for the
        given values of all tensors. Make a trial each time, since values may decide.
        """
        with undisturbed():
            return try_call(call, there, which)

    def of_sum(self, call: Call, which: int) -> bool:
        """Return whether a result without a batch is a sum over samples."""
        kind = ("sum", _kind_of(call, which))
        return bool(self._remember(call, kind, lambda other: try_sum(other, which), True))

    def of_weights(self, call: Call, which: int) -> bool:
        """Return whether the labels of one sample change the weight of another, for these
        labels.
        """
        with undisturbed():
            return is_weighted(call, which)

    def of_affine(self, call: Call, which: int) -> bool:
        """Return whether a call is affine in sums over samples."""
        sums = call.with_carriers([(t, Single(1, 0)) for t in call.summed])
        kind = ("affine", _kind_of(sums, which))
        return bool(self._remember(call, kind, lambda other: try_affine(other, which), True))

    def of_pairs(self, call: Call, trial: Callable[[], bool]) -> bool:
        """Return whether a call uses row i of a tensor for sample i alone.

        `trial` makes the trial.
        """
        kind = ("pairs", _kind_of(call, 0))
        return bool(self._remember(call, kind, lambda _: trial(), True))

    def _remember(self, call: Call, kind: Any, trial: Callable[[Call], Any], good: Any) -> Any:
        """Return the stored verdict on calls of a kind and of these sizes; make the trial if there
        is none, or if values of constants may change it.
        """
        sizes = _sizes_of(call)
        passed = self._passed.setdefault(kind, set())
        if len(passed) >= ENOUGH_SIZES and not _is_small(call):
            return good
        verdict = self._verdicts.get((kind, sizes))
        if verdict is not None and verdict is not _BY_VALUES:
            return verdict
        with undisturbed():
            found = trial(call)
            if verdict is None:
                other = with_other_constants(call) if found == good else None
                holds = other is None or trial(other) == good
                if holds and found is Verdict.APART:
                    new = with_other_parameters(call)
                    holds = new is None or trial(new) is not Verdict.MIXED
                verdict = found if holds else _BY_VALUES
                if len(self._verdicts) >= MOST_VERDICTS:
                    self._verdicts.clear()
                self._verdicts[(kind, sizes)] = verdict
        if verdict is _BY_VALUES:
            call.key = None  # values of a constant decide: no plan is valid
        elif found == good:
            passed.add(sizes)
        return found


def has_rows_for_samples(call: Call) -> bool:
    """Return whether a constant has a dimension as long as the batch.

    Its values may decide which samples mix.
    """
    lengths = {at.batch if isinstance(at, Single) else at.size for _, at in call.carriers}
    return any(n in lengths for t in fixed_tensors(call) if not t.requires_grad for n in t.shape)


def _is_small(call: Call) -> bool:
    """Return whether there are so few samples that their number may be a special case, as three
    rows are for `torch.cross` without a dimension.
    """
    return any(at.batch <= SMALL_BATCH for _, at in call.carriers)


def _sizes_of(call: Call) -> tuple[Any, ...]:
    return tuple(t.shape for t in call.tensors())


def _kind_of(call: Call, which: int) -> tuple[Any, ...]:
    """Return the key of a kind of call: everything that matters except sizes."""
    roles = {id(x): _key_of_place(at) for x, at in call.carriers}
    kinds = [_describe(a, roles) for a in call.args]
    kinds += [(k, _describe(v, roles)) for k, v in call.kwargs.items()]
    return call.function, which, tuple(kinds)


def _describe(a: Any, roles: dict[int, Any]) -> Any:
    """Return the part of the key for one argument."""
    if isinstance(a, _PLAIN):
        return type(a), a
    if isinstance(a, Tensor):
        return Tensor, a.dtype, a.dim(), tuple(n == 1 for n in a.shape), roles.get(id(a))
    if isinstance(a, (list, tuple)):
        return type(a), tuple(_describe(b, roles) for b in a)
    if isinstance(a, slice):
        return slice, tuple(_describe(b, roles) for b in (a.start, a.stop, a.step))
    return type(a)


def _key_of_place(at: Place) -> tuple[Any, ...]:
    """Return the part of the key for one place."""
    if isinstance(at, Layout):
        return at.dim, at.outer > 1, at.inner > 1
    return type(at), 0 if isinstance(at, Single) else at.dim
