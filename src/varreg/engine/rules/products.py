"""Linear layers, in all their spellings: y = x W, so a sample contributes Σ_r δ_r ⊗ x_r."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from varreg.engine.contribution import Contribution, Lazy, Outer
from varreg.engine.einsum import written_out
from varreg.engine.layout import Layout, Place, rows
from varreg.engine.rules.rule import Call, Contributions, bias_of, has_rows, row_sums, rule


def _folded_matmul(input: Tensor, other: Tensor) -> Tensor:
    """x @ W as one matrix product: what torch does when W needs a gradient, and not always when it is detached."""
    if input.dim() <= 2:
        return input @ other
    return (input.reshape(-1, input.shape[-1]) @ other).view(*input.shape[:-1], *other.shape[1:])


def _linear_forward(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if input.dim() <= 2 or input.is_contiguous():
        return F.linear(input, weight, bias)
    out = _folded_matmul(input, weight.t())
    return out if bias is None else out.add_(bias)


@rule(F.linear, saves="input", forward=_linear_forward)
def linear(call: Call, grads: list[Tensor], input: Tensor, weight: None, bias: None = None) -> Contributions:
    dy = call.rows(grads[0])
    out: Contributions = {}
    if "weight" in call.wants:
        out["weight"] = Outer(call.partition, dy, call.rows(input.to(dy.dtype), "input"), call.shapes["weight"])
    if "bias" in call.wants:
        out["bias"] = bias_of(out.get("weight"), lambda: row_sums(call, dy))
    return out


@rule(torch.addmm, serves="input mat2", saves="mat1", carries="mat1", when=lambda call: len(call.shapes["input"]) == 1)
def addmm(
    call: Call, grads: list[Tensor], input: None, mat1: Tensor, mat2: None, *, beta: float = 1, alpha: float = 1
) -> Contributions:
    """β·bias + α·x W, with W `[in, out]`: the linear layer of GPT-2."""
    dy = call.rows(grads[0])
    out: Contributions = {}
    if "mat2" in call.wants:
        out["mat2"] = Outer(call.partition, call.rows(mat1.to(dy.dtype), "mat1") * alpha, dy)
    if "input" in call.wants:
        out["input"] = row_sums(call, dy * beta if beta != 1 else dy)
    return out


@rule(
    *(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm),
    serves="other",
    saves="input",
    when=lambda call: len(call.shapes["other"]) <= 2 and len(call.shapes["input"]) > 1 and has_rows(call),
    forward=_folded_matmul,
)
def matmul(call: Call, grads: list[Tensor], input: Tensor, other: None) -> Contributions:
    """x @ W for a matrix W `[in, out]` or a vector `[in]`."""
    vector = len(call.shapes["other"]) == 1
    dy = call.rows(grads[0].unsqueeze(-1) if vector else grads[0])
    return {"other": Outer(call.partition, call.rows(input.to(dy.dtype), "input"), dy, call.shapes["other"])}


@rule(
    F.bilinear,
    saves="input1 input2",
    carries="input1 input2",
    when=lambda call: call.where("input1") == call.where("input2") is not None,
)
def bilinear(call: Call, grads: list[Tensor], input1: Tensor, input2: Tensor, weight: None, bias: None = None) -> Contributions:
    """y_o = x1ᵀ W_o x2 + b: a linear layer on the outer product of its inputs."""
    dy = call.rows(grads[0])
    out: Contributions = {}
    if "weight" in call.wants:
        at = call.where("input1")
        assert at is not None
        a, b = rows(input1, at), rows(input2, at)
        pairs = (a.unsqueeze(-1) * b.unsqueeze(-2)).flatten(2)
        out["weight"] = Outer(call.partition, dy, pairs, call.shapes["weight"])
    if "bias" in call.wants:
        out["bias"] = row_sums(call, dy)
    return out


def _is_plain_einsum(call: Call) -> bool:
    """Does every letter mean one dimension of one size, and does the batch stay apart?"""
    names = [f"operands.{i}" for i in range(len(call.arguments["operands"]))]
    equation = written_out(call.arguments["equation"], [len(call.shapes[n]) for n in names])
    sizes: dict[str, int] = {}
    for term, name in zip(equation.inputs, names, strict=True):
        if len(set(term)) != len(term):
            return False  # a diagonal
        if any(sizes.setdefault(c, n) != n for c, n in zip(term, call.shapes[name], strict=True)):
            return False  # a size of 1 that is expanded
    terms = dict(zip(names, equation.inputs, strict=True))
    places = call.layouts.items()
    letters = {terms[n][at.dim] for n, at in places if isinstance(at, Layout) and at.plain}
    if len(letters) != 1 or any(not (isinstance(at, Layout) and at.plain) for _, at in places):
        return False
    letter = letters.pop()
    if call.partition.batch == 1:
        return False  # with one sample, its dimension is not told from others
    for name in call.wants:
        others = "".join(term for n, term in terms.items() if n != name) + equation.output
        if letter in terms[name] or not set(terms[name]) <= set(others):
            return False
    return letter in equation.output


@rule(
    torch._VF.einsum,  # type: ignore[attr-defined]
    serves="operands",
    saves="operands",
    carries="operands",
    when=_is_plain_einsum,
    takes_over=False,
)
def einsum(call: Call, grads: list[Tensor], equation: str, operands: list[Tensor], path: Any = None) -> Contributions:
    """A sample contributes the product of its gradient with its part of the other operands."""
    terms = written_out(equation, [t.dim() for t in operands])
    dy = grads[0]
    out: Contributions = {}
    for name in call.wants:
        i = int(name.partition(".")[2])
        others = [(t, term) for j, (t, term) in enumerate(zip(operands, terms.inputs, strict=True)) if j != i]
        out[name] = _einsum_part(call, [(dy, terms.output), *others], terms.inputs[i], name)
    return out


def _einsum_part(call: Call, factors: list[tuple[Tensor, str]], term: str, name: str) -> Contribution:
    letter = factors[0][1][_dim(call.out)]
    given = ",".join(t for _, t in factors)

    def make(first: int, last: int, start: int, n: int) -> Tensor:
        count = (last - first) * n
        parts = [
            t.detach().to(factors[0][0].dtype).narrow(letters.index(letter), start, count)
            if letter in letters
            else t.detach().to(factors[0][0].dtype)
            for t, letters in factors
        ]
        c = torch.einsum(f"{given}->{letter}{term}", parts)
        summed: Tensor = c.unflatten(0, (last - first, n)).sum(1)
        return summed

    return Lazy(call.partition, call.shapes[name], make, lambda n: n * call.shapes[name].numel())


def _dim(at: Place) -> int:
    assert isinstance(at, Layout)
    return at.dim
