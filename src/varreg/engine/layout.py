"""Where the batch is in a tensor, and where an operation takes it.

A tensor that carries the batch has a `Layout`: its dimension `dim` is, in row-major order, `[outer, batch, inner]`
flattened. A plain batch-first tensor has `dim=0, outer=inner=1`; attention's `[time·batch, features]` has `outer=time`;
`[batch·windows, …]` has `inner=windows`. Following the layout from operation to operation is what lets a rule say which
row of a matrix product belongs to which sample, however the model folds its tensors.

Where an operation is unknown and its shapes do not settle the question, the answer is `Lost`, never a guess: a parameter
that meets such a tensor is an error that names the operation.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from varreg.engine.arguments import swap, tensors_in


class Layout(NamedTuple):
    """The batch of `batch` samples sits in dimension `dim`, which is `[outer, batch, inner]` flattened."""

    batch: int
    dim: int = 0
    outer: int = 1
    inner: int = 1

    @property
    def plain(self) -> bool:
        return self.outer == self.inner == 1

    @property
    def size(self) -> int:
        return self.outer * self.batch * self.inner


class Lost(NamedTuple):
    """The tensor depends on the batch, but which part of it belongs to which sample is not known."""

    why: str
    mixed: bool = False
    """Samples were mixed, or their order changed: from here on, no sample has a gradient of its own."""


Where = Layout | Lost


def samples(t: Tensor, at: Layout) -> Tensor:
    """The tensor with the batch in front: `[batch, …before, (outer, inner,) …after]`."""
    if at.plain:
        return t.movedim(at.dim, 0) if at.dim else t
    unfolded: Tensor = t.unflatten(at.dim, (at.outer, at.batch, at.inner))
    return unfolded.movedim(at.dim + 1, 0)


def rows(t: Tensor, at: Layout, features: int = 1) -> Tensor:
    """`[batch, rows, …features]`: everything of a sample that is not one of the last `features` dimensions is a row."""
    t = samples(t, at)
    tail = t.shape[t.dim() - features :]
    return t.reshape(at.batch, math.prod(t.shape[1 : t.dim() - features]), *tail)


def narrow(t: Tensor, at: Layout, start: int, stop: int) -> Tensor:
    """The samples `start:stop` alone, in the same layout."""
    if at.plain:
        return t.narrow(at.dim, start, stop - start)
    part: Tensor = t.unflatten(at.dim, (at.outer, at.batch, at.inner)).narrow(at.dim + 1, start, stop - start)
    return part.flatten(at.dim, at.dim + 2)


# ---- propagation: one small function per kind of operation -------------------------------------------------------------


class Operation(NamedTuple):
    """A call of a torch function, and which of its outputs is asked for."""

    function: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]
    output: int


Propagate = Callable[[Layout, Tensor, Tensor, Operation], Where | None]
_PROPAGATE: dict[Any, Propagate] = {}


def _for(*functions: Any) -> Callable[[Propagate], Propagate]:
    def add(rule: Propagate) -> Propagate:
        for function in functions:
            _PROPAGATE[function] = rule
        return rule

    return add


def _named(*names: str) -> Iterator[Any]:
    """Every spelling of an operation: `torch.x`, `Tensor.x`, `F.x`."""
    for name in names:
        for home in (torch, Tensor, F):
            if hasattr(home, name):
                yield getattr(home, name)


ELEMENTWISE = frozenset(
    _named(
        *("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "pow", "where", "maximum", "minimum"),
        *("add_", "sub_", "mul_", "div_", "__add__", "__radd__", "__iadd__", "__sub__", "__rsub__", "__isub__", "rsub"),
        *("__mul__", "__rmul__", "__imul__", "__truediv__", "__rtruediv__", "__itruediv__", "__pow__", "__rpow__"),
        *("addcmul", "addcdiv", "lerp", "fmax", "fmin", "atan2", "hypot", "logaddexp", "__rdiv__", "__div__", "__idiv__"),
        *("eq", "ne", "lt", "le", "gt", "ge", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"),
        *(
            "logical_and",
            "logical_or",
            "__and__",
            "__or__",
            "clamp",
            "clip",
            "masked_fill",
            "masked_fill_",
            "addcmul_",
            "addcdiv_",
            "lerp_",
        ),
    )
)


def _broadcast(at: Layout, x: Tensor, out: Tensor, op: Operation) -> Where | None:
    dim = at.dim + out.dim() - x.dim()
    return at._replace(dim=dim) if out.shape[dim] == at.size else None


_for(*ELEMENTWISE)(_broadcast)
_for(*_named("expand", "expand_as", "repeat", "tile", "broadcast_to"))(_broadcast)


@_for(*_named("reshape", "view", "flatten", "unflatten", "ravel", "reshape_as", "view_as", "squeeze", "unsqueeze"))
def _reshape(at: Layout, x: Tensor, out: Tensor, op: Operation) -> Where | None:
    before = math.prod(x.shape[: at.dim]) * at.outer  # row-major order is [before, batch, after], whatever the shape
    passed = 1
    for dim, size in enumerate(out.shape):
        if before % passed == 0:
            outer = before // passed
            if size and size % (outer * at.batch) == 0 if at.batch else size == 0:
                return Layout(at.batch, dim, outer, size // (outer * at.batch) if at.batch else 1)
        passed *= size
    return None


@_for(*_named("sum", "mean", "amax", "amin", "prod", "logsumexp", "norm", "std", "var", "max", "min", "argmax", "argmin"))
@_for(*_named("all", "any", "nansum", "nanmean", "count_nonzero", "median"))
def _reduce(at: Layout, x: Tensor, out: Tensor, op: Operation) -> Where | None:
    """A tiny tensor of the same rank, whose only dimension of size 2 is the batch's, shows where the batch goes."""
    if any(isinstance(a, Tensor) for a in op.args[1:]):  # torch.max(a, b) is elementwise
        return _broadcast(at, x, out, op)
    options = {k: v for k, v in op.kwargs.items() if k not in ("input", "self", "dtype", "out")}
    stand_in = torch.ones([2 if dim == at.dim else 1 for dim in range(x.dim())])
    shown = op.function(stand_in, *op.args[1:], **options)
    shape = (shown if isinstance(shown, Tensor) else shown[0]).shape
    return at._replace(dim=list(shape).index(2)) if 2 in shape else None


@functools.lru_cache(maxsize=64)
def _numbers(size: int, device: torch.device) -> Tensor:
    return torch.arange(size, device=device)


@_for(*_named("transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "adjoint", "select", "unbind"))
@_for(*(getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH")), Tensor.__getitem__)
def _move(at: Layout, x: Tensor, out: Tensor, op: Operation) -> Where | None:
    """Data that only moves: do the same to a tensor that holds its own batch index (of no memory: all strides but one are 0)."""
    size = max(at.size, 2)  # a size of 1 has no stride to follow
    numbers = _numbers(size, x.device)
    shape = [size if dim == at.dim else n for dim, n in enumerate(x.shape)]
    index = numbers.as_strided(shape, [int(dim == at.dim) for dim in range(x.dim())])
    options = {k: v for k, v in op.kwargs.items() if k not in ("input", "self")}
    moved = op.function(index, *op.args[1:], **options)
    moved = moved if isinstance(moved, Tensor) else moved[0]
    is_view = moved._is_view()
    for dim, n in enumerate(moved.shape):
        if n == size:
            if is_view and moved.stride(dim) == 1 and moved.storage_offset() == 0:
                return at._replace(dim=dim)
            kept = numbers.view([-1 if d == dim else 1 for d in range(moved.dim())])
            if not is_view and torch.equal(moved, kept.expand_as(moved)):
                return at._replace(dim=dim)
    return None


@_for(*_named("stack"))
def _stack(at: Layout, x: Tensor, out: Tensor, op: Operation) -> Where | None:
    dim = op.kwargs.get("dim", op.args[1] if len(op.args) > 1 else 0) % out.dim()
    return at._replace(dim=at.dim + (dim <= at.dim))


@_for(*_named("cat", "concat", "concatenate", "cumsum", "cumprod", "softmax", "log_softmax"))
def _along(at: Layout, x: Tensor, out: Tensor, op: Operation) -> Where | None:
    dim = op.kwargs.get("dim", op.args[1] if len(op.args) > 1 else 0)
    return None if dim is not None and dim % x.dim() == at.dim else _default(at, x, out, op)


def _mixing(op: Operation) -> Lost:
    return Lost(f"{name_of(op.function)} combines samples with each other", mixed=True)


@_for(*_named("matmul", "mm", "bmm", "__matmul__", "__rmatmul__"))
def _matmul(at: Layout, x: Tensor, out: Tensor, op: Operation) -> Where | None:
    operands = [t for t in (*op.args, *op.kwargs.values()) if isinstance(t, Tensor)]
    if op.function is Tensor.__rmatmul__:
        operands.reverse()
    if len(operands) != 2 or operands[0] is operands[1]:
        return _mixing(op)
    first, other = operands[0] is x, operands[1] if operands[0] is x else operands[0]
    contracted = x.dim() - 1 if first else max(x.dim() - 2, 0)
    if at.dim == contracted:
        return _mixing(op)
    from_right = x.dim() - at.dim - (1 if first and other.dim() == 1 else 0)  # a vector on the right drops the last dimension
    dim = out.dim() - from_right
    return at._replace(dim=dim) if 0 <= dim < out.dim() and out.shape[dim] == at.size else None


@_for(torch.einsum)
def _einsum(at: Layout, x: Tensor, out: Tensor, op: Operation) -> Where | None:
    equation, *rest = op.args
    if not isinstance(equation, str) or "." in equation or "->" not in equation:
        return _default(at, x, out, op)
    inputs, output = equation.replace(" ", "").split("->")
    operands = rest[0] if isinstance(rest[0], (list, tuple)) else rest
    places = {letters[at.dim] for letters, operand in zip(inputs.split(","), operands, strict=True) if operand is x}
    if len(places) != 1:
        return _mixing(op)
    if not places <= set(output):
        return None
    return at._replace(dim=output.index(places.pop()))


@_for(torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
def _recurrent(at: Layout, x: Tensor, out: Tensor, op: Operation) -> Where | None:
    """The sequence keeps its order; states are `[layers, batch, features]`."""
    batch_first = len(op.args) > 8 and op.args[8]
    expected = 0 if x is op.args[0] and batch_first else 1
    return at._replace(dim=0 if op.output == 0 and batch_first else 1) if at.dim == expected else None


@_for(F.embedding)
def _lookup(at: Layout, x: Tensor, out: Tensor, op: Operation) -> Where | None:
    return at if x is op.args[0] else None  # the indices' dimensions, then the features


@_for(F.embedding_bag)
def _bags(at: Layout, x: Tensor, out: Tensor, op: Operation) -> Where | None:
    """Without offsets, a row is a bag; with them, the model's inputs do not tell: a bag is a sample."""
    return at if op.args[0].dim() == 2 and at.dim == 0 else Layout(out.shape[0])


def _default(at: Layout, x: Tensor, out: Tensor, op: Operation) -> Where | None:
    """An operation of no known kind: the sizes make a guess, which has to be tried (`is_independent`)."""
    if out.dim() == x.dim() and out.shape[at.dim] == at.size:
        return at
    if at.dim == 0 and out.dim() and out.shape[0] == at.size:
        return at
    return None


def propagate(op: Operation, batched: Sequence[tuple[Tensor, Layout]], out: Tensor) -> Where:
    """Where the batch is in the output `out` of an operation, given where it is in the batched arguments."""
    if all(at.batch == 1 for _, at in batched):
        return only_sample(out)
    rule = _PROPAGATE.get(op.function, _default)
    if rule in (_move, _reduce):  # these follow their first argument; another one is an index
        moving = [(x, at) for x, at in batched if (op.args and x is op.args[0]) or x is op.kwargs.get("input")]
        rule, batched = (rule, moving) if moving else (_default, batched)
    found: dict[Where, None] = {}
    why = None
    for x, at in batched:
        there = rule(at, x, out, op)
        if there is None:
            why = f"{name_of(op.function)} takes {tuple(x.shape)} to {tuple(out.shape)}"
        else:
            found[there] = None
    if why is not None:
        return Lost(why)
    if len(found) > 1:
        places = " and ".join(f"dimension {w.dim}" for w in found if isinstance(w, Layout))
        return Lost(f"{name_of(op.function)} combines tensors that carry the batch in {places}", mixed=True)
    return next(iter(found))


def goes_by_values(op: Operation, batched: Sequence[tuple[Tensor, Layout]]) -> bool:
    """Do values, those of an index, say where the batch goes? Else shapes and plain arguments are all that counts."""
    tensors = tensors_in(op.args, op.kwargs)
    if _PROPAGATE.get(op.function) is _move:
        return len(tensors) > 1
    carriers = {id(x) for x, _ in batched}
    return is_guess(op.function) and any(_is_integer(t) and id(t) not in carriers for t in tensors)


def _is_integer(t: Tensor) -> bool:
    return not (t.is_floating_point() or t.is_complex() or t.dtype is torch.bool)


def only_sample(t: Tensor) -> Where:
    """In a batch of one everything belongs to the only sample, wherever its dimension went."""
    return Layout(1, 0, 1, t.shape[0]) if t.dim() else Lost("a batch of one became a number")


def is_guess(function: Any) -> bool:
    """Does `propagate` go by sizes for this function? Then its answer has to be tried."""
    return _PROPAGATE.get(function, _default) in (_default, _along, _matmul, _einsum)


def is_independent(op: Operation, batched: Sequence[tuple[Tensor, Layout]], there: Layout) -> bool | None:
    """Try it: when the first sample takes the second one's values, does only the first sample's part of the output change?

    Two samples are enough, unless an argument fits the whole batch alone. None if nothing can be told, as when the two are the same.
    """
    for size in (2, there.batch):
        part = {id(x): narrow(x.detach(), at, 0, size).clone() for x, at in batched}
        views = [samples(part[id(x)], at._replace(batch=size)) for x, at in batched]
        if all(torch.equal(v[0], v[1]) for v in views):
            return None
        try:
            before = _others(op, part, there._replace(batch=size))
            for v in views:
                v[0] = v[1]
            after = _others(op, part, there._replace(batch=size))
        except (RuntimeError, IndexError, ValueError, TypeError):  # it needs the whole batch, or other values
            continue
        if before is None or after is None or before.shape != after.shape:
            return False
        scale = float(before.abs().nan_to_num().max()) if before.is_floating_point() and before.numel() else 0.0
        return torch.allclose(before.double(), after.double(), rtol=1e-4, atol=1e-6 * scale, equal_nan=True)
    return None


def _others(op: Operation, part: dict[int, Tensor], there: Layout) -> Tensor | None:
    """All but the first sample of an output, for other inputs. Nothing is changed, and random functions see the same random numbers."""
    devices = {t.device for t in part.values() if t.device.type == "cuda"}
    copies = {id(t): part.get(id(t), t.detach()).clone() for t in tensors_in(op.args, op.kwargs)}
    given, options = swap(op.args, op.kwargs, copies)
    with torch.no_grad(), torch.random.fork_rng(devices):
        out = op.function(*given, **options)
    out = (out if isinstance(out, Tensor) else out[op.output]).detach()  # `requires_grad_` asks for one even here
    return samples(out, there)[1:] if out.dim() > there.dim and out.shape[there.dim] == there.size else None


def name_of(function: Any) -> str:
    """A readable name for a torch function, method or property."""
    owner = getattr(function, "__self__", None)
    name = getattr(function, "__name__", str(function))
    return getattr(owner, "__name__", name) if name == "__get__" else name
