"""Functions that sum or work along dimensions: reductions, products, einsum."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from varreg import _torch
from varreg.engine.trace.arguments import swap
from varreg.engine.trace.call import Call
from varreg.engine.trace.einsum import equation_of, operands_of
from varreg.engine.trace.follow.known import (
    Destination,
    Gone,
    agreed,
    follow_elements,
    follows,
    guess,
    mixing,
)
from varreg.engine.trace.functions import named
from varreg.engine.trace.layout import Place, Single

# ---- reductions ----------------------------------------------------------------------------------

_LINEAR = frozenset(named("sum", "mean", "nansum"))
_OTHERS = """amax amin prod logsumexp norm std var max min argmax argmin all any nanmean
count_nonzero median nanmedian mode aminmax var_mean std_mean"""


@follows(*_LINEAR, *named(*_OTHERS.split()))
def _reduce(call: Call, out: Tensor, which: int) -> Destination:
    """Place the output of a reduction: reduce a small tensor in which only the batch's dimension
    has size 2.
    """
    if len(call.tensors()) > 1:  # torch.max(a, b) works on one element after another
        return follow_elements(call, out, which)
    x, at = call.carriers[0]
    if isinstance(at, Single):
        return at
    small = torch.ones([2 if dim == at.dim else 3 for dim in range(x.dim())], dtype=_small_type(x))
    options = {k: v for k, v in call.kwargs.items() if k != "dtype"}
    args, options = swap(call.args, options, {id(x): small})
    shown = call.function(*args, **options)
    shape = list((shown if isinstance(shown, Tensor) else shown[which]).shape)
    return at._replace(dim=shape.index(2)) if 2 in shape else Gone(call.function in _LINEAR)


_ALONG = frozenset(
    named(
        "softmax", "log_softmax", "softmin", "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"
    )
)


@follows(*_ALONG)
def _along(call: Call, out: Tensor, which: int) -> Destination:
    """Place the output of a function that works along one dimension, named `dim` or `axis`."""
    x, at = call.carriers[0]
    dim = call.argument(1, "dim", call.kwargs.get("axis"))
    if not isinstance(dim, int) or isinstance(at, Single) or len(call.carriers) > 1:
        return guess(call.carriers, out)
    return mixing(call) if dim % x.dim() == at.dim else at


@follows(F.one_hot)
def _one_hot(call: Call, out: Tensor, which: int) -> Destination:
    return call.carriers[0][1]  # its classes are a new last dimension


def _small_type(x: Tensor) -> torch.dtype:
    return x.dtype if not x.is_floating_point() else torch.float32


# ---- products ------------------------------------------------------------------------------------


@follows(*named("matmul", "mm", "bmm", "mv"), Tensor.__matmul__, Tensor.__rmatmul__)
def _matmul(call: Call, out: Tensor, which: int) -> Destination:
    """Place the output of a matrix product, by counting dimensions from the right."""
    operands = call.tensors()
    if call.function is Tensor.__rmatmul__:
        operands.reverse()
    if len(operands) != 2 or operands[0] is operands[1]:
        return guess(call.carriers, out) if len(operands) != 2 else _square(call)
    places: list[Place | None] = []
    for x, at in call.carriers:
        if isinstance(at, Single):
            places.append(at)
            continue
        first = operands[0] is x
        other = operands[1] if first else operands[0]
        contracted = x.dim() - 1 if first else max(x.dim() - 2, 0)
        if at.dim == contracted:
            if other.dim() == 1 and len(call.carriers) == 1:
                return Gone(is_linear=True)  # Σ_b w_b x_b, with constants w_b
            return mixing(call) if out.dim() else guess(call.carriers, out)
        # a product with a vector removes its dimension, and later dimensions move
        drops = other.dim() == 1 and at.dim < contracted
        from_right = x.dim() - at.dim - (1 if drops else 0)
        dim = out.dim() - from_right
        fits = 0 <= dim < out.dim() and out.shape[dim] == at.size
        places.append(at._replace(dim=dim) if fits else None)
    return agreed(call, places)


def _square(call: Call) -> Destination:
    """Place x @ x, where the batch is a dimension of both factors."""
    x, at = call.carriers[0]
    if isinstance(at, Single):
        return at
    return at if at.dim < x.dim() - 2 else mixing(call)


@follows(torch.einsum, _torch.einsum)
def _einsum(call: Call, out: Tensor, which: int) -> Destination:
    """Place the output of an einsum, by the letter of the batch's dimension."""
    equation, operands = equation_of(call.args), operands_of(call.args)
    carriers = {id(x): at for x, at in call.carriers}
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
        return mixing(call)
    letter, share = letters.pop(), shares.pop()
    if isinstance(share, Single):
        return share
    carrying = [t for t, o in zip(equation.inputs, operands, strict=True) if id(o) in carriers]
    if any(t.count(letter) > 1 for t in carrying):
        return mixing(call)  # a diagonal
    if letter not in equation.output:
        return guess(call.carriers, out) if not out.dim() else mixing(call)
    return share._replace(dim=equation.output.index(letter))
