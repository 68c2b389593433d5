"""Linear layers, in all their spellings: y = x W, so a sample contributes Σ_r δ_r ⊗ x_r."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from varreg.engine.contribution import Outer
from varreg.engine.rules.rule import Call, Contributions, bias_of, row_sums, rule


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


@rule(torch.addmm, serves="input mat2", saves="mat1", when=lambda call: len(call.shapes["input"]) == 1)
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
    when=lambda call: len(call.shapes["other"]) <= 2 and len(call.shapes["input"]) > 1,
    forward=_folded_matmul,
)
def matmul(call: Call, grads: list[Tensor], input: Tensor, other: None) -> Contributions:
    """x @ W for a matrix W `[in, out]` or a vector `[in]`."""
    vector = len(call.shapes["other"]) == 1
    dy = call.rows(grads[0].unsqueeze(-1) if vector else grads[0])
    return {"other": Outer(call.partition, call.rows(input.to(dy.dtype), "input"), dy, call.shapes["other"])}


@rule(F.bilinear, saves="input1 input2")
def bilinear(call: Call, grads: list[Tensor], input1: Tensor, input2: Tensor, weight: None, bias: None = None) -> Contributions:
    """y_o = x1ᵀ W_o x2 + b: a linear layer on the outer product of its inputs."""
    dy = call.rows(grads[0])
    out: Contributions = {}
    if "weight" in call.wants:
        a, b = call.rows(input1, "input1"), call.rows(input2, "input2")
        out["weight"] = Outer(call.partition, dy, (a.unsqueeze(-1) * b.unsqueeze(-2)).flatten(2), call.shapes["weight"])
    if "bias" in call.wants:
        out["bias"] = row_sums(call, dy)
    return out
