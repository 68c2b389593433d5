"""Where an operation takes the batch, for the functions that are known.

Known means: derived from the arguments, exactly, in whatever form they come. A function that only
moves data is shown sample numbers in place of the data, with all its other arguments, and where the
numbers come out is where the samples are. A reduction is shown a small tensor in which the
batch's dimension has a size of its own. So `dim`, `axis`, positions and keywords mean what torch
says they mean, and nothing is read from names.

A function that is not known gets a `Guess`, which has to be tried (`trial.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from varreg.engine.arguments import swap, tensors_in
from varreg.engine.einsum import equation_of, operands_of
from varreg.engine.layout import (
    NOBODY,
    Layout,
    Lost,
    Place,
    Ragged,
    Single,
    numbers,
    only_sample,
    owners_of,
    place_of,
)
from varreg.engine.packed import PACK, PAD, PAD_LIST, is_packed, order_of, place_along, place_packed


class Operation(NamedTuple):
    """A call of a torch function, and which of its outputs is asked for."""

    function: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]
    output: int


class Guess(NamedTuple):
    """Places that an output could have; a trial decides. None of them: it has no batch."""

    places: tuple[Place, ...]


class Gone(NamedTuple):
    """The batch is in no dimension of the output."""

    is_linear: bool
    """Is it a sum over samples of what each of them gives, by what the function is?"""


Found = Place | Lost | Guess | Gone
Batched = Sequence[tuple[Tensor, Place]]
Follow = Callable[[Operation, Batched, Tensor], Found]
_KNOWN: dict[Any, Follow] = {}


def _for(*functions: Any) -> Callable[[Follow], Follow]:
    def add(follow: Follow) -> Follow:
        for function in functions:
            _KNOWN[function] = follow
        return follow

    return add


def named(*names: str) -> Iterator[Any]:
    """Yield every spelling of an operation: `torch.x`, `Tensor.x`, `F.x`, with `_` in place."""
    for name in names:
        for home in (torch, Tensor, F, torch.special, torch._C._nn):
            for spelling in (name, f"{name}_"):
                if hasattr(home, spelling):
                    yield getattr(home, spelling)


def name_of(function: Any) -> str:
    """Return a readable name for a torch function, method or property."""
    owner = getattr(function, "__self__", None)
    name = getattr(function, "__name__", str(function))
    return getattr(owner, "__name__", name) if name == "__get__" else name


def is_in_place(function: Any) -> bool:
    """Does the function write into its first argument, by its name?"""
    name = name_of(function)
    return (name.endswith("_") and not name.endswith("__")) or (
        name.startswith("__i") and name.endswith("__") and name not in ("__invert__", "__index__")
    )


def mutated(function: Any) -> list[int]:
    """Return the positions of the arguments that an operator writes into, by its schema."""
    if not isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return []
    overloads = (
        [function] if isinstance(function, torch._ops.OpOverload) else [getattr(function, name) for name in function.overloads()]
    )
    return sorted(
        {
            i
            for overload in overloads
            for i, a in enumerate(overload._schema.arguments)
            if a.alias_info is not None and a.alias_info.is_write
        }
    )


def is_known(function: Any) -> bool:
    return function in _KNOWN


# ---- one element after the other -----------------------------------------------------------------

_ARITHMETIC = """add sub subtract mul multiply div divide true_divide floor_divide pow where maximum
minimum rsub addcmul addcdiv lerp fmax fmin fmod remainder atan2 arctan2 hypot logaddexp
logaddexp2 xlogy copysign clamp clip clamp_min clamp_max masked_fill float_power heaviside ldexp
bitwise_and bitwise_or bitwise_xor logical_and logical_or logical_xor gcd lcm nextafter
eq ne lt le gt ge not_equal less less_equal greater greater_equal isclose polar complex"""
_OPERATORS = """add radd iadd sub rsub isub mul rmul imul truediv rtruediv itruediv div rdiv idiv
floordiv rfloordiv pow rpow ipow mod rmod and rand iand or ror ior xor eq ne lt le gt ge"""
_ONE_BY_ONE = """abs absolute neg negative positive sign sgn signbit exp exp2 expm1 log log2 log10
log1p sqrt rsqrt square reciprocal sin cos tan asin acos atan arcsin arccos arctan sinh cosh tanh
asinh acosh atanh sinc floor ceil round trunc fix frac erf erfc erfinv lgamma digamma sigmoid logit
expit relu relu6 leaky_relu elu selu celu gelu silu mish hardswish hardsigmoid hardtanh softplus
softsign tanhshrink hardshrink softshrink threshold logsigmoid log_sigmoid dropout alpha_dropout
bitwise_not logical_not isnan isinf isfinite isposinf isneginf nan_to_num angle real imag conj
conj_physical resolve_conj resolve_neg deg2rad rad2deg clone detach contiguous to type float double half
bfloat16 int long short bool byte char cpu cuda type_as requires_grad_ real imag i0 ndtr log_ndtr
special_ndtr entr polygamma as_subclass"""

ELEMENTWISE = frozenset(
    [
        *named(*_ARITHMETIC.split()),
        *(getattr(Tensor, f"__{n}__") for n in _OPERATORS.split() if hasattr(Tensor, f"__{n}__")),
    ]
)
"""Functions of several tensors that broadcast, and then work on one element after the other."""

_UNARY = frozenset(
    [
        *named(*_ONE_BY_ONE.split()),
        *(getattr(Tensor, name) for name in ("__neg__", "__abs__", "__pos__", "__invert__")),
        *(getattr(Tensor, name).__get__ for name in ("real", "imag", "data")),
    ]
)
SUMS = frozenset([*named("add", "sub"), Tensor.__add__, Tensor.__radd__, Tensor.__sub__, Tensor.__iadd__])
SHAPE_ONLY = frozenset(getattr(Tensor, n) for n in ("view_as", "reshape_as", "expand_as", "type_as", "to"))
"""Functions to which other tensors than the first lend their shape or type alone."""


@_for(*ELEMENTWISE, *_UNARY)
def _elementwise(op: Operation, batched: Batched, out: Tensor) -> Found:
    if op.function is torch.where and len(op.args) + len(op.kwargs) == 1:
        return Gone(is_linear=False)  # places of what is True: as many as there are, by chance one a row
    return agreed(op, (_broadcast(at, x, out) for x, at in batched))


def _broadcast(at: Place, x: Tensor, out: Tensor) -> Place | None:
    if isinstance(at, Single):
        return at
    dim = at.dim + out.dim() - x.dim()
    return at._replace(dim=dim) if 0 <= dim < out.dim() and out.shape[dim] == at.size else None


def agreed(op: Operation, places: Iterator[Place | None]) -> Place | Lost | Gone:
    """Return the one place that all arguments lead to."""
    found = list(dict.fromkeys(places))
    if None in found:
        return Gone(is_linear=False)
    if op.function in SUMS and all(isinstance(at, Single) for at in found) and len(found) > 1:
        return Gone(is_linear=True)  # the losses of several samples are added up
    if len(found) == 1:
        return found[0]  # type: ignore[return-value]
    return Lost(f"{name_of(op.function)} combines rows of different samples", mixed=True)


# ---- data that only moves ------------------------------------------------------------------------

_LISTS = """cat concat concatenate stack hstack vstack dstack column_stack row_stack
atleast_1d atleast_2d atleast_3d block_diag broadcast_tensors"""
_VIEWS = """reshape view flatten unflatten ravel reshape_as view_as squeeze unsqueeze transpose permute
swapaxes swapdims movedim moveaxis t adjoint select narrow unbind split chunk tensor_split
split_with_sizes hsplit vsplit dsplit expand expand_as broadcast_to repeat tile repeat_interleave
flip fliplr flipud roll rot90 diagonal unfold index_select gather take_along_dim masked_select
narrow_copy unsafe_chunk unsafe_split take"""
MOVERS: dict[Any, tuple[int, ...]] = {
    **dict.fromkeys(named(*_VIEWS.split(), *_LISTS.split()), (0,)),
    **dict.fromkeys([getattr(Tensor, n).__get__ for n in ("T", "mT", "H", "mH")], (0,)),
    Tensor.__getitem__: (0,),
    Tensor.__iter__: (0,),
    Tensor.__setitem__: (0, 2),
    **dict.fromkeys([Tensor.copy_, Tensor.set_], (0, 1)),
    **dict.fromkeys(named("index_copy", "scatter"), (0, 3)),
    **dict.fromkeys(named("index_put", "masked_scatter"), (0, 2)),
    **dict.fromkeys(named("select_scatter", "slice_scatter", "diagonal_scatter"), (0, 1)),
    Tensor.data.__set__: (0, 1),  # type: ignore[attr-defined]
    **dict.fromkeys((PACK, PAD, PAD_LIST), (0,)),
}
"""Functions that move data and change none of it, and the positions of the arguments that hold
data; what else they take says where it goes."""

MOVERS.pop(F.unfold, None)  # im2col: another function of that name
_VARIADIC = frozenset(named("broadcast_tensors", "atleast_1d", "atleast_2d", "atleast_3d", "block_diag"))
"""Movers of which every argument holds data."""
RESHAPERS = frozenset(f for f in MOVERS if is_in_place(f) and MOVERS[f] == (0,))
"""Functions that change the shape of their argument in place."""
ADDERS: dict[Any, tuple[int, Any, Any]] = {
    **dict.fromkeys(named("index_add"), (3, torch.index_copy, torch.index_select)),
    **dict.fromkeys(named("scatter_add"), (3, torch.scatter, torch.gather)),
}
"""Functions that add rows to rows that an index names: the position of these rows among the
arguments, and the functions that write there, and read from there."""
WRITERS = frozenset(
    [
        *(f for f in MOVERS if is_in_place(f) and f not in RESHAPERS),
        Tensor.__setitem__,
        Tensor.data.__set__,  # type: ignore[attr-defined]
        *ADDERS,
    ]
)
_NAMES = {
    0: ("input", "self", "tensors", "x", "a"),
    1: ("src", "other"),
    2: ("values", "value", "source"),
    3: ("source", "src"),
}


def moved_data(op: Operation) -> list[Any]:
    """Return the arguments of a mover that hold data."""
    if op.function in _VARIADIC:
        return list(op.args)
    found = []
    places = (0, ADDERS[op.function][0]) if op.function in ADDERS else MOVERS[op.function]
    for place in places:
        if place < len(op.args):
            found.append(op.args[place])
        else:
            found += [op.kwargs[name] for name in _NAMES[place] if name in op.kwargs]
    return found


def index_of(op: Operation, batched: Batched) -> list[Tensor]:
    """Return the tensors among a mover's arguments that say where data goes."""
    data = {id(t) for a in moved_data(op) for t in tensors_in([a], {})}
    return [t for t in _all_tensors(op) if id(t) not in data]


def _all_tensors(op: Operation) -> list[Tensor]:
    found = tensors_in(op.args, op.kwargs)
    for a in op.args:  # x[(slice, index)]
        if isinstance(a, (list, tuple)):
            found += [t for b in a if isinstance(b, (list, tuple)) for t in tensors_in(b, {})]
    return found


@_for(*(f for f in MOVERS if f not in WRITERS))
def _move(op: Operation, batched: Batched, out: Tensor) -> Found:
    carriers = {id(x): at for x, at in batched}
    data = [t for a in moved_data(op) for t in tensors_in([a], {})]
    found: Found | None = None
    if op.function in RESHAPES and isinstance(at := carriers.get(id(data[0])), Layout):
        found = _reshaped(at, data[0], out)
    chosen_by = [t for t in index_of(op, batched) if id(t) in carriers]
    if found is None:
        choosers = [_chooser(op, t, carriers[id(t)], out) for t in chosen_by]
        if all(c is not None for c in choosers):
            return _follow_numbers(op, data, carriers, out, [c for c in choosers if c is not None])
        found = _follow_numbers(op, data, carriers, out)
    if not chosen_by or not isinstance(found, Place | Gone):
        return found
    # The samples choose what is moved. A mask beside the data lets each sample choose its own rows;
    # of other indices, only a trial tells.
    if isinstance(found, Place) and all(t.dtype is torch.bool for t in chosen_by):
        same = {carriers.get(id(data[0])), *(carriers[id(t)] for t in chosen_by)}
        return found if len(same) == 1 else mixing(op)
    return guess(op, batched, out) if isinstance(found, Gone) else Guess((found,))


def _follow_numbers(
    op: Operation,
    data: list[Tensor],
    carriers: dict[int, Place],
    out: Tensor,
    choosers: Sequence[Tensor] = (),
) -> Found:
    """Return where samples are when their numbers are moved in place of the data.

    An element is of the sample that it came from, and of those that chose it: they must be the same.
    """
    batch = next(iter(carriers.values())).batch
    shown = {id(t): numbers(t, carriers.get(id(t))) for t in data}
    try:
        with torch.no_grad():
            args, kwargs = swap(op.args, op.kwargs, shown)
            moved = op.function(*args, **kwargs)
    except (RuntimeError, TypeError, NotImplementedError):  # it does not take whole numbers
        return guess(op, [(t, at) for t in data if (at := carriers.get(id(t)))], out)
    if not isinstance(moved, Tensor):
        moved = list(moved)[op.output]
    if not out.numel() and len(carriers) == 1 and len(data) == 1:
        at = next(iter(carriers.values()))  # nothing is in it, but its rows may still be there
        if not isinstance(at, Single) and data[0].dim() == out.dim() and out.shape[at.dim] == at.size:
            return at
    if moved.shape != out.shape:
        return Lost(f"{name_of(op.function)} depends on the values that it moves")
    for chooser in choosers:
        if bool(((moved != chooser) & (moved != NOBODY) & (chooser != NOBODY)).any()):
            return mixing(op)
        moved = torch.where(moved == NOBODY, chooser, moved)
    found = place_of(moved, batch)
    if found is not None:
        return found
    if bool((moved < 0).all()):
        return Gone(is_linear=True)
    return Lost(f"{name_of(op.function)} puts rows of several samples side by side", mixed=True)


_BY_INDEX = frozenset(named("index_select", "gather"))


def _chooser(op: Operation, index: Tensor, at: Place, out: Tensor) -> Tensor | None:
    """Return, for each element of the output, the sample whose element of the index chose it; None
    where the form of the call is not known.

    The index gets sample numbers in place of its values, and the data are what the index finds
    there: the numbers themselves, along the dimension that the index is for.
    """
    data = moved_data(op)[0]
    dim = _indexed_dim(op, index, data)
    if dim is None or index.dtype not in (torch.int64, torch.int32):
        return None
    nobody = at.batch  # the last row of the stand-in: -1 would mean it, but not everywhere
    along = torch.arange(nobody + 1, dtype=torch.int32, device=data.device)
    along = along.view([-1 if d == dim else 1 for d in range(data.dim())])
    sizes = [nobody + 1 if d == dim else n for d, n in enumerate(data.shape)]
    owner = numbers(index, at).to(index.dtype)
    owner = owner.masked_fill(owner == NOBODY, nobody)
    args, kwargs = swap(op.args, op.kwargs, {id(data): along.expand(sizes), id(index): owner})
    chooser: Tensor = op.function(*args, **kwargs)
    return chooser.masked_fill(chooser == nobody, NOBODY) if chooser.shape == out.shape else None


def _indexed_dim(op: Operation, index: Tensor, data: Tensor) -> int | None:
    """Return the dimension of the data in which an index chooses; None where it is not known."""
    if op.function in _BY_INDEX:
        dim = _argument(op, 1, "dim", op.kwargs.get("axis"))
        return dim % data.dim() if isinstance(dim, int) and data.dim() else None
    if op.function is not Tensor.__getitem__:
        return None
    items = op.args[1] if isinstance(op.args[1], tuple) else (op.args[1],)
    if not all(i is None or i is ... or type(i) in (int, slice) or _is_index(i) for i in items):
        return None
    if sum(i is index for i in items) != 1:
        return None
    taken = sum(i is not None and i is not ... for i in items)
    dim = 0
    for item in items:
        if item is index:
            return dim
        dim += data.dim() - taken if item is ... else item is not None
    return None


def _is_index(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dtype in (torch.int64, torch.int32)


RESHAPES = frozenset(named("reshape", "view", "flatten", "unflatten", "ravel", "reshape_as", "view_as", "squeeze", "unsqueeze"))


def _reshaped(at: Layout, x: Tensor, out: Tensor) -> Place | None:
    """Row-major order is `[before, batch, after]`, whatever the shape."""
    before = math.prod(x.shape[: at.dim]) * at.outer
    passed = 1
    for dim, size in enumerate(out.shape):
        if before % passed == 0:
            outer = before // passed
            if size and size % (outer * at.batch) == 0 if at.batch else size == 0:
                return Layout(at.batch, dim, outer, size // (outer * at.batch) if at.batch else 1)
        passed *= size
    return None


def written(op: Operation, places: dict[int, Place], t: Tensor, batch: int) -> Found:
    """Return where the batch is in `t` after an operation wrote into it, or into a copy of it."""
    data = [a for a in moved_data(op) if isinstance(a, Tensor)]
    shown = {id(a): numbers(a, places.get(id(a))).contiguous() for a in data}
    args, kwargs = swap(op.args, op.kwargs, shown)
    before = shown[id(t)].clone()
    with torch.no_grad():
        if adds(op):
            after, fits = _added(op, args, before)
        else:
            if op.function is Tensor.__setitem__ and not isinstance(args[2], Tensor):
                args[2] = NOBODY
            done = op.function(*args, **kwargs)
            after, fits = done if isinstance(done, Tensor) else shown[id(t)], True
    found = place_of(after, batch) if fits else None
    if found is not None:
        return found
    if fits and bool((after < 0).all()):
        return Gone(is_linear=True)
    return Lost(f"{name_of(op.function)} puts rows of several samples together", mixed=True)


def adds(op: Operation) -> bool:
    """Does it add to what is there?"""
    if op.function in ADDERS:
        return True
    is_put = op.function in _PUTS
    return is_put and bool(op.args[3] if len(op.args) > 3 else op.kwargs.get("accumulate"))


_PUTS = frozenset(named("index_put"))


def _added(op: Operation, args: list[Any], before: Tensor) -> tuple[Tensor, bool]:
    """Return owners after rows were added to others; does each row meet rows of its own sample?"""
    if op.function in _PUTS:
        index, values = tuple(args[1]), args[2]
        after = before.index_put(index, values.expand_as(before[index]))
        read = after[index]
        values = values.expand_as(read)
    else:
        at, write, read_back = ADDERS[op.function]
        dim, index, values = args[1], args[2], args[at]
        if op.function in frozenset(named("scatter_add")):
            values = values[tuple(slice(n) for n in index.shape)]
        after = write(before, dim, index, values)
        read = read_back(after, dim, index)
    alone = (before == NOBODY) | (after == NOBODY) | (before == after)
    fits = bool(((read == values) | (values == NOBODY)).all()) and bool(alone.all())
    return torch.where(after == NOBODY, before, after), fits


# ---- reductions ----------------------------------------------------------------------------------

_LINEAR = frozenset(named("sum", "mean", "nansum"))
_OTHERS = """amax amin prod logsumexp norm std var max min argmax argmin all any nanmean count_nonzero
median nanmedian mode aminmax var_mean std_mean"""


@_for(*_LINEAR, *named(*_OTHERS.split()))
def _reduce(op: Operation, batched: Batched, out: Tensor) -> Found:
    """A small tensor in which the batch's dimension alone has size 2 shows where the batch goes."""
    if len(tensors_in(op.args, op.kwargs)) > 1:  # torch.max(a, b) works on one element after another
        return _elementwise(op, batched, out)
    x, at = batched[0]
    if isinstance(at, Single):
        return at
    small = torch.ones([2 if dim == at.dim else 3 for dim in range(x.dim())], dtype=_small_type(x))
    options = {k: v for k, v in op.kwargs.items() if k not in ("dtype", "out")}
    args, options = swap(op.args, options, {id(x): small})
    shown = op.function(*args, **options)
    shape = list((shown if isinstance(shown, Tensor) else shown[op.output]).shape)
    return at._replace(dim=shape.index(2)) if 2 in shape else Gone(op.function in _LINEAR)


_ALONG = frozenset(named("softmax", "log_softmax", "softmin", "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"))


@_for(*_ALONG)
def _along(op: Operation, batched: Batched, out: Tensor) -> Found:
    """These work along one dimension, named `dim` or `axis`."""
    x, at = batched[0]
    dim = _argument(op, 1, "dim", op.kwargs.get("axis"))
    if not isinstance(dim, int) or isinstance(at, Single) or len(batched) > 1:
        return guess(op, batched, out)
    return mixing(op) if dim % x.dim() == at.dim else at


@_for(F.one_hot)
def _one_hot(op: Operation, batched: Batched, out: Tensor) -> Found:
    return batched[0][1]  # its classes are a new last dimension


def _small_type(x: Tensor) -> torch.dtype:
    return x.dtype if not x.is_floating_point() else torch.float32


# ---- products ------------------------------------------------------------------------------------


def mixing(op: Operation) -> Lost:
    return Lost(f"{name_of(op.function)} combines samples with each other", mixed=True)


@_for(*named("matmul", "mm", "bmm", "mv"), Tensor.__matmul__, Tensor.__rmatmul__)
def _matmul(op: Operation, batched: Batched, out: Tensor) -> Found:
    operands = tensors_in(op.args, op.kwargs)
    if op.function is Tensor.__rmatmul__:
        operands.reverse()
    if len(operands) != 2 or operands[0] is operands[1]:
        return guess(op, batched, out) if len(operands) != 2 else _square(op, batched, out)
    places: list[Place | None] = []
    for x, at in batched:
        if isinstance(at, Single):
            places.append(at)
            continue
        first = operands[0] is x
        other = operands[1] if first else operands[0]
        contracted = x.dim() - 1 if first else max(x.dim() - 2, 0)
        if at.dim == contracted:
            if other.dim() == 1 and len(batched) == 1:
                return Gone(is_linear=True)  # Σ_b w_b x_b, with constants w_b
            return mixing(op) if out.dim() else guess(op, batched, out)
        # a vector drops the dimension that it is multiplied along, and what follows moves
        drops = other.dim() == 1 and at.dim < contracted
        from_right = x.dim() - at.dim - (1 if drops else 0)
        dim = out.dim() - from_right
        fits = 0 <= dim < out.dim() and out.shape[dim] == at.size
        places.append(at._replace(dim=dim) if fits else None)
    return agreed(op, iter(places))


def _square(op: Operation, batched: Batched, out: Tensor) -> Found:
    """x @ x, where the batch is a dimension of both factors."""
    x, at = batched[0]
    if isinstance(at, Single):
        return at
    return at if at.dim < x.dim() - 2 else mixing(op)


@_for(torch.einsum, torch._VF.einsum)  # type: ignore[attr-defined]
def _einsum(op: Operation, batched: Batched, out: Tensor) -> Found:
    equation, operands = equation_of(op.args), operands_of(op.args)
    carriers = {id(x): at for x, at in batched}
    letters: set[str] = set()
    shares: set[Place] = set()
    for term, operand in zip(equation.inputs, operands, strict=True):
        at = carriers.get(id(operand))
        if at is None:
            continue
        if isinstance(at, Single):
            letters.add("")
            shares.add(at)
        else:
            letters.add(term[at.dim])
            shares.add(at._replace(dim=0))
    if len(letters) != 1 or len(shares) != 1:
        return mixing(op)
    letter, share = letters.pop(), shares.pop()
    if isinstance(share, Single):
        return share
    carrying = [t for t, o in zip(equation.inputs, operands, strict=True) if id(o) in carriers]
    if any(t.count(letter) > 1 for t in carrying):
        return mixing(op)  # a diagonal
    if letter not in equation.output:
        return guess(op, batched, out) if not out.dim() else mixing(op)
    return share._replace(dim=equation.output.index(letter))


# ---- layers --------------------------------------------------------------------------------------


def _argument(op: Operation, position: int, name: str, default: Any = None) -> Any:
    return op.args[position] if len(op.args) > position else op.kwargs.get(name, default)


def _kept(op: Operation, batched: Batched, out: Tensor, features: int) -> Found:
    """The first argument alone carries the batch, in front of `features` dimensions; so does `out`."""
    x = _argument(op, 0, "input")
    if len(batched) != 1 or batched[0][0] is not x:
        return guess(op, batched, out)
    at = batched[0][1]
    if isinstance(at, Single):
        return at
    return at if at.dim < x.dim() - features else guess(op, batched, out)


@_for(F.linear)
def _linear(op: Operation, batched: Batched, out: Tensor) -> Found:
    return _kept(op, batched, out, 1)


@_for(F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm)
def _norm(op: Operation, batched: Batched, out: Tensor) -> Found:
    shape = _argument(op, 1, "normalized_shape")
    return _kept(op, batched, out, 1 if isinstance(shape, int) else len(shape))


_CONVOLUTIONS = [f"conv{t}{n}d" for t in ("", "_transpose") for n in (1, 2, 3)]


@_for(*named(*_CONVOLUTIONS))
def _conv(op: Operation, batched: Batched, out: Tensor) -> Found:
    x, weight = _argument(op, 0, "input"), _argument(op, 1, "weight")
    return _kept(op, batched, out, x.dim() - (1 if x.dim() == weight.dim() else 0))


_POOLS = {
    f: n
    for n in (1, 2, 3)
    for f in named(
        *(f"{adaptive}{kind}_pool{n}d" for adaptive in ("", "adaptive_") for kind in ("max", "avg")),
        *(f"max_pool{n}d_with_indices", f"lp_pool{n}d"),
    )
}


@_for(*_POOLS)
def _pool(op: Operation, batched: Batched, out: Tensor) -> Found:
    """Images `[batch, channels, …]`; one without a batch has a dimension less."""
    x = _argument(op, 0, "input")
    return _kept(op, batched, out, x.dim() - (1 if x.dim() == _POOLS[op.function] + 2 else 0))


@_for(F.interpolate, *named("pixel_shuffle", "pixel_unshuffle"))
def _images(op: Operation, batched: Batched, out: Tensor) -> Found:
    return _kept(op, batched, out, min(_argument(op, 0, "input").dim(), out.dim()) - 1)


@_for(F.pad)
def _pad(op: Operation, batched: Batched, out: Tensor) -> Found:
    """Pairs of numbers, from the last dimension on."""
    padded = _argument(op, 1, "pad")
    return _kept(op, batched, out, len(padded) // 2) if isinstance(padded, (list, tuple)) else guess(op, batched, out)


@_for(F.group_norm, torch.group_norm)
def _group_norm(op: Operation, batched: Batched, out: Tensor) -> Found:
    return _kept(op, batched, out, _argument(op, 0, "input").dim() - 1)


@_for(F.scaled_dot_product_attention)
def _attention(op: Operation, batched: Batched, out: Tensor) -> Found:
    if any(not isinstance(at, Single) and at.dim >= x.dim() - 2 for x, at in batched):
        return guess(op, batched, out)
    return _elementwise(op, batched, out)


@_for(torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
def _recurrent(op: Operation, batched: Batched, out: Tensor) -> Found:
    """The sequence keeps its order; states are `[layers, batch, features]`."""
    if is_packed(op.function, op.args):
        return place_packed(op.args, batched, op.output) or mixing(op)
    batch_first = len(op.args) > 8 and op.args[8]

    def place(x: Tensor, at: Place) -> Place | None:
        if isinstance(at, Single):
            return at
        expected = 0 if x is op.args[0] and batch_first else 1
        moved = at._replace(dim=0 if op.output == 0 and batch_first else 1)
        return moved if at.dim == expected else None

    found = agreed(op, (place(x, at) for x, at in batched))
    return guess(op, batched, out) if isinstance(found, Gone) else found


@_for(PACK)
def _pack(op: Operation, batched: Batched, out: Tensor) -> Found:
    """Rows go where lengths say; each sample's length has to be its own."""
    carriers = {id(x): at for x, at in batched}
    x, lengths = op.args[:2]
    if op.output or id(x) not in carriers:
        return Gone(is_linear=False)
    at, own = carriers[id(x)], carriers.get(id(lengths))
    if isinstance(at, Single) or isinstance(own, Single):
        return mixing(op)
    if own is not None and not torch.equal(owners_of(at), owners_of(own)):
        return mixing(op)
    return _follow_numbers(op, [x], carriers, out)


@_for(PAD)
def _pad_packed(op: Operation, batched: Batched, out: Tensor) -> Found:
    """Rows go back; what is put between them is nobody's. Lengths come from the longest down."""
    (data, at), sizes = batched[0], op.args[1]
    if isinstance(at, Single) or (order := order_of(at, sizes)) is None:
        return mixing(op)
    if op.output:
        return place_along(order, at.batch, 0)
    shown = op._replace(args=[*op.args[:3], NOBODY, *op.args[4:]])
    return _follow_numbers(shown, [data], {id(data): at}, out)


@_for(PAD_LIST)
def _pad_list(op: Operation, batched: Batched, out: Tensor) -> Found:
    """Sequences side by side; what is put behind the shorter ones is nobody's."""
    if len(op.args) < 3:
        return guess(op, batched, out)
    shown = op._replace(args=[*op.args[:2], NOBODY, *op.args[3:]])
    return _follow_numbers(shown, list(op.args[0]), {id(x): at for x, at in batched}, out)


@_for(F.embedding, torch.embedding)
def _lookup(op: Operation, batched: Batched, out: Tensor) -> Found:
    """The indices' dimensions, then the features."""
    ids = _argument(op, 0 if op.function is F.embedding else 1, "input")
    if len(batched) == 1 and batched[0][0] is ids:
        return batched[0][1]
    return guess(op, batched, out)


@_for(F.embedding_bag)
def _bags(op: Operation, batched: Batched, out: Tensor) -> Found:
    """Without offsets, a row is a bag. With them, a bag belongs to the sample of all its rows; where
    the model's input is one long list, the inputs do not tell: a bag is a sample.
    """
    ids, at = op.args[0], batched[0][1]
    if isinstance(at, Single) or (ids.dim() == 2 and at.dim == 0 and batched[0][0] is ids):
        return at
    offsets = _argument(op, 2, "offsets")
    carriers = {id(x): place for x, place in batched}
    place = carriers.get(id(ids))
    if not isinstance(offsets, Tensor) or not isinstance(place, Layout | Ragged):
        return guess(op, batched, out)
    if place == Layout(len(ids)) and len(ids) != len(out):
        return Layout(len(out))
    ends = torch.cat([offsets[1:].cpu(), torch.tensor([len(ids)])])
    bag = torch.arange(len(offsets)).repeat_interleave(ends - offsets.cpu())[: len(ids)]
    owners = numbers(ids, place).cpu()
    first = torch.full((len(out),), NOBODY, dtype=owners.dtype).index_copy(0, bag, owners)
    if not torch.equal(first[bag], owners):
        return mixing(op)
    return place_of(first, place.batch) or mixing(op)


# ---- everything else -----------------------------------------------------------------------------


@_for(*named("as_strided", "as_strided_scatter"))
def _by_memory(op: Operation, batched: Batched, out: Tensor) -> Found:
    """Where rows come from depends on how the argument lies in memory."""
    return Lost(f"{name_of(op.function)} reads memory without regard to rows", mixed=True)


def guess(op: Operation, batched: Batched, out: Tensor) -> Guess:
    """Return the places that the sizes allow: the argument's own first, then any of its size."""
    places: dict[Place, None] = {}
    for x, at in batched:
        if isinstance(at, Single):
            places[at] = None
            continue
        dims = [d for d, n in enumerate(out.shape) if n == at.size]
        own = [at.dim] if out.dim() == x.dim() else [0, out.dim() - x.dim() + at.dim]
        for d in sorted(dims, key=lambda d: d not in own):
            places[at._replace(dim=d)] = None
    return Guess(tuple(places))


def propagate(op: Operation, batched: Batched, out: Tensor) -> Found:
    """Return where the batch is in the output `out` of an operation."""
    if all(at.batch == 1 for _, at in batched):
        return only_sample(out)
    if all(at.batch == 0 for _, at in batched) and 0 in out.shape:
        return Layout(0, list(out.shape).index(0))
    singles = {at for _, at in batched if isinstance(at, Single)}
    if len(singles) == len({at for _, at in batched}) == 1 and op.function not in WRITERS:
        # nothing but constants and one sample: whatever comes out is that sample's
        return next(iter(singles))
    return _KNOWN.get(op.function, guess)(op, batched, out)


def goes_by_values(op: Operation, batched: Batched) -> bool:
    """Do values, those of an index, say where the batch goes? Else shapes and plain arguments do."""
    if op.function in MOVERS:
        return bool(index_of(op, batched)) and op.function not in SHAPE_ONLY
    if is_known(op.function):
        return False
    carriers = {id(x) for x, _ in batched}
    tensors = tensors_in(op.args, op.kwargs)
    return any(_is_integer(t) and id(t) not in carriers for t in tensors)


def _is_integer(t: Tensor) -> bool:
    return not (t.is_floating_point() or t.is_complex() or t.dtype is torch.bool)
