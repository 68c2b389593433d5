"""Linear layers, in all their spellings: y = x W, so a sample contributes Σ_r δ_r ⊗ x_r."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from varreg import _torch
from varreg.engine.contribution import Bias, Contribution, Outer
from varreg.engine.rules.rule import (
    Contributions,
    Use,
    has_batch_in_rows,
    has_rows,
    row_sums,
    rule,
)
from varreg.engine.trace.einsum import written_out
from varreg.engine.trace.layout import Layout, rows


def _folded_matmul(input: Tensor, other: Tensor) -> Tensor:
    """Return x @ W as one matrix product. torch computes it so if W requires a gradient, but not
    always if W is detached.
    """
    if input.dim() <= 2:
        return input @ other
    return (input.reshape(-1, input.shape[-1]) @ other).view(*input.shape[:-1], *other.shape[1:])


def _linear_forward(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if input.dim() <= 2 or input.is_contiguous():
        return F.linear(input, weight, bias)
    out = _folded_matmul(input, weight.t())
    return out if bias is None else out.add_(bias)


def _is_layer(use: Use) -> bool:
    """Return whether the weight is a matrix, and the bias has a number for each output feature.
    torch also takes a vector as the weight, and expands a bias.
    """
    weight = use.shapes["weight"]
    is_usual = len(weight) == 2 and use.shapes.get("bias", weight[:1]) == weight[:1]
    return is_usual and has_batch_in_rows(use, "input")


def are_few(rows: int, o: int, i: int) -> bool:
    """Return whether products of the rows of each sample cost less than W `[o, i]`."""
    return rows == 1 or 2 * rows * (o + i) < o * i


def _has_few_rows(use: Use) -> bool:
    """Return whether the lengths of contributions are computed from the rows of each sample."""
    o, i = use.shapes["weight"]
    rows = use.shapes["input"].numel() // max(use.partition.batch * i, 1)
    return are_few(rows, o, i)


@rule(F.linear, saves="input", forward=_linear_forward, when=_is_layer, spares_sum=_has_few_rows)
def linear(
    use: Use, grads: list[Tensor], input: Tensor, weight: None, bias: None = None
) -> Contributions:
    dy = use.rows(grads[0])
    if "weight" not in use.wants:
        return {"bias": row_sums(use, dy)}
    x = use.rows(input if input.dtype == dy.dtype else input.to(dy.dtype), "input")
    shape = use.shapes["weight"]
    if "bias" not in use.wants:
        return {"weight": Outer(use.partition, dy, x, shape)}
    of_bias = Bias(use.partition, shape[:1], lambda: row_sums(use, dy))
    return {"weight": Outer(use.partition, dy, x, shape, of_bias), "bias": of_bias}


@rule(
    torch.addmm,
    serves="input mat2",
    saves="mat1",
    carries="mat1",
    when=lambda use: (
        use.shapes["input"] == use.shapes["mat2"][1:] and has_batch_in_rows(use, "mat1")
    ),
)
def addmm(
    use: Use,
    grads: list[Tensor],
    input: None,
    mat1: Tensor,
    mat2: None,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Contributions:
    """Return the contributions to β·bias + α·x W, with W `[in, out]`: the linear layer of GPT-2."""
    dy = use.rows(grads[0])
    out: Contributions = {}
    if "mat2" in use.wants:
        out["mat2"] = Outer(use.partition, use.rows(mat1.to(dy.dtype), "mat1") * alpha, dy)
    if "input" in use.wants:
        out["input"] = row_sums(use, dy * beta if beta != 1 else dy)
    return out


@rule(
    *(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm),
    serves="other",
    saves="input",
    when=lambda use: (
        len(use.shapes["other"]) <= 2 and len(use.shapes["input"]) > 1 and has_rows(use)
    ),
    forward=_folded_matmul,
)
def matmul(use: Use, grads: list[Tensor], input: Tensor, other: None) -> Contributions:
    """Return the contributions to x @ W for a matrix W `[in, out]` or a vector `[in]`."""
    vector = len(use.shapes["other"]) == 1
    dy = use.rows(grads[0].unsqueeze(-1) if vector else grads[0])
    return {
        "other": Outer(
            use.partition, use.rows(input.to(dy.dtype), "input"), dy, use.shapes["other"]
        )
    }


@rule(
    F.bilinear,
    saves="input1 input2",
    carries="input1 input2",
    when=lambda use: (
        use.where("input1") == use.where("input2") is not None
        and has_batch_in_rows(use, "input1", "input2")
    ),
)
def bilinear(
    use: Use, grads: list[Tensor], input1: Tensor, input2: Tensor, weight: None, bias: None = None
) -> Contributions:
    """Return the contributions to y_o = x1ᵀ W_o x2 + b: a linear layer on the outer product of its
    inputs.
    """
    dy = use.rows(grads[0])
    out: Contributions = {}
    if "weight" in use.wants:
        at = use.where("input1")
        assert at is not None
        a, b = rows(input1, at), rows(input2, at)
        pairs = (a.unsqueeze(-1) * b.unsqueeze(-2)).flatten(2)
        out["weight"] = Outer(use.partition, dy, pairs, use.shapes["weight"])
    if "bias" in use.wants:
        out["bias"] = row_sums(use, dy)
    return out


def _is_plain_einsum(use: Use) -> bool:
    """Return whether every letter means one dimension of one size, and the batch stays apart."""
    names = [f"operands.{i}" for i in range(len(use.arguments["operands"]))]
    equation = written_out(use.arguments["equation"], [len(use.shapes[n]) for n in names])
    sizes: dict[str, int] = {}
    for term, name in zip(equation.inputs, names, strict=True):
        if len(set(term)) != len(term):
            return False  # a diagonal
        if any(sizes.setdefault(c, n) != n for c, n in zip(term, use.shapes[name], strict=True)):
            return False  # a size of 1 that is expanded
    terms = dict(zip(names, equation.inputs, strict=True))
    places = use.input_places.items()
    letters = {terms[n][at.dim] for n, at in places if isinstance(at, Layout) and at.plain}
    if len(letters) != 1 or any(not (isinstance(at, Layout) and at.plain) for _, at in places):
        return False
    letter = letters.pop()
    if use.partition.batch == 1:
        return False  # with one sample, any dimension of size 1 could be the batch
    for name in use.wants:
        others = "".join(term for n, term in terms.items() if n != name) + equation.output
        if letter in terms[name] or not set(terms[name]) <= set(others):
            return False
    return letter in equation.output


@rule(
    _torch.einsum,
    serves="operands",
    saves="operands",
    carries="operands",
    when=_is_plain_einsum,
    takes_over=False,
)
def einsum(
    use: Use, grads: list[Tensor], equation: str, operands: list[Tensor], path: Any = None
) -> Contributions:
    """Return each sample's contribution: the product of its gradient with its part of the other
    operands.
    """
    terms = written_out(equation, [t.dim() for t in operands])
    dy = grads[0]
    out: Contributions = {}
    for name in use.wants:
        i = int(name.partition(".")[2])
        others = [
            (t, term)
            for j, (t, term) in enumerate(zip(operands, terms.inputs, strict=True))
            if j != i
        ]
        out[name] = _Einsum(use, [(dy, terms.output), *others], terms.inputs[i], name)
    return out


class _Einsum(Contribution):
    """Contributions to one operand of an `einsum`: for each sample, the product of the other
    `factors`. Each factor has its letters; the first one is the gradient.
    """

    def __init__(self, use: Use, factors: list[tuple[Tensor, str]], term: str, name: str):
        super().__init__(use.partition, use.shapes[name])
        assert isinstance(use.output_place, Layout)
        dtype = factors[0][0].dtype
        self.letter = factors[0][1][use.output_place.dim]  # of the batch
        self.factors = [(t.detach().to(dtype), letters) for t, letters in factors]
        self.equation = f"{','.join(letters for _, letters in factors)}->{self.letter}{term}"

    def cost(self, n: int) -> int:
        return n * self.shape.numel()

    def groups(self, first: int, last: int, start: int, n: int) -> Tensor:
        parts = [
            t.narrow(letters.index(self.letter), start, (last - first) * n)
            if self.letter in letters
            else t
            for t, letters in self.factors
        ]
        c = torch.einsum(self.equation, parts)
        summed: Tensor = c.unflatten(0, (last - first, n)).sum(1)
        return summed
