"""What trials said, and for which calls it holds.

A verdict holds for calls of the same kind: the function, its plain arguments, and for each tensor its
type, its shape and what it is (where it carries the batch, or that it is a constant). After eight
different sizes have passed, sizes are taken to make no difference. Where values of a constant may
decide (an index, a mask, an adjacency as long as the batch), nothing is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from varreg.engine.arguments import tensors_in
from varreg.engine.layout import Layout, Place, Single
from varreg.engine.propagation import Batched, Operation, goes_by_values
from varreg.engine.trial import Verdict, try_affine, try_operation, try_sum, undisturbed

_ENOUGH = 8  # sizes that have passed
_MOST = 1 << 12  # verdicts that are kept
_PLAIN = (int, float, str, type(None))


class Verdicts:
    """Trials of calls, each made when it is needed, and remembered."""

    def __init__(self) -> None:
        self._said: dict[Any, Any] = {}
        self._sizes: dict[Any, set[Any]] = {}  # that have passed, by kind
        self._met: dict[Any, int] = {}

    def due(self, key: Any) -> bool:
        """Say yes the 1st, 2nd, 4th, 8th … time that something is met: what may change is tried
        again, for less and less of the time.
        """
        times = self._met[key] = self._met.get(key, 0) + 1
        return times & (times - 1) == 0

    def is_first(self, key: Any) -> bool:
        return self._met.get(key, 0) <= 1

    def forget(self, key: Any) -> None:
        """What was tried failed, or was not tried after all: it is due the next time."""
        self._met.pop(key, None)

    def of_operation(self, op: Operation, batched: Batched, there: Place) -> Verdict:
        """Say whether an operation takes each sample to its place, and to no other."""
        if goes_by_values(op, batched) or has_rows_for_samples(op, batched):
            with undisturbed():
                return try_operation(op, batched, there)
        kind = ("apart", _kind_of(op, batched), _form_of(there))

        def make() -> Verdict:
            return try_operation(op, batched, there)

        said: Verdict = self._kept(kind, _sizes_of(op), make, Verdict.APART)
        return said

    def of_sum(self, op: Operation, batched: Batched) -> bool:
        """Say whether an output without a batch is a sum of what each sample gives."""
        kind = ("sum", _kind_of(op, batched))
        return bool(self._kept(kind, _sizes_of(op), lambda: try_sum(op, batched), True))

    def of_affine(self, op: Operation, summed: Sequence[Tensor]) -> bool:
        """Say whether an operation is affine in sums over samples."""
        kind = ("affine", _kind_of(op, [(t, Single(1, 0)) for t in summed]))
        return bool(self._kept(kind, _sizes_of(op), lambda: try_affine(op, summed), True))

    def of_pairs(self, op: Operation, batched: Batched, make: Any) -> bool:
        """Say whether an operation uses row i of a tensor for sample i alone, as `make` finds out."""
        return bool(self._kept(("pairs", _kind_of(op, batched)), _sizes_of(op), make, True))

    def _kept(self, kind: Any, sizes: Any, make: Any, good: Any) -> Any:
        passed = self._sizes.setdefault(kind, set())
        if len(passed) >= _ENOUGH:
            return good
        said = self._said.get((kind, sizes))
        if said is None:
            with undisturbed():
                said = make()
            if len(self._said) >= _MOST:
                self._said.clear()
            self._said[(kind, sizes)] = said
            if said == good:
                passed.add(sizes)
        return said


def has_rows_for_samples(op: Operation, batched: Batched) -> bool:
    """Has a constant a dimension as long as the batch? Its values may say which samples meet."""
    carriers = {id(x) for x, _ in batched}
    lengths = {at.batch if isinstance(at, Single) else at.size for _, at in batched}
    others = [t for t in tensors_in(op.args, op.kwargs) if id(t) not in carriers]
    return any(n in lengths for t in others if not t.requires_grad for n in t.shape)


def _sizes_of(op: Operation) -> tuple[Any, ...]:
    return tuple(t.shape for t in tensors_in(op.args, op.kwargs))


def _kind_of(op: Operation, batched: Batched) -> tuple[Any, ...]:
    """Return what tells one kind of call from another, sizes left out."""
    roles = {id(x): _form_of(at) for x, at in batched}
    kinds = [_describe(a, roles) for a in op.args]
    kinds += [(k, _describe(v, roles)) for k, v in op.kwargs.items()]
    return op.function, op.output, tuple(kinds)


def _describe(a: Any, roles: dict[int, Any]) -> Any:
    if isinstance(a, _PLAIN):
        return type(a), a
    if isinstance(a, Tensor):
        return Tensor, a.dtype, a.dim(), tuple(n == 1 for n in a.shape), roles.get(id(a))
    if isinstance(a, (list, tuple)):
        return type(a), tuple(_describe(b, roles) for b in a)
    if isinstance(a, slice):
        return slice, tuple(_describe(b, roles) for b in (a.start, a.stop, a.step))
    return type(a)


def _form_of(at: Place) -> tuple[Any, ...]:
    if isinstance(at, Layout):
        return at.dim, at.outer > 1, at.inner > 1
    return type(at), 0 if isinstance(at, Single) else at.dim
