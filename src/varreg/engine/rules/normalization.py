"""Normalization layers, y = x̂·w + b with x̂ normalized once more, from x; and PReLU, which has one slope per channel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from varreg import native
from varreg.engine.contribution import Contribution, Dense
from varreg.engine.rules.rule import Call, Contributions, batch_first, channel_sums, images, row_sums, rule

Sums = tuple[Tensor, Tensor] | None  # of dy·x̂, and of dy; None where it takes PyTorch


def _affine(
    call: Call, dy: Tensor, x: Tensor, features: int, sums: Callable[..., Sums], twin: Callable[..., Tensor]
) -> Contributions:
    """The affine parameters span the last `features` dimensions: `sums` are over rows, `twin` is x̂."""
    rows = call.rows(dy, features=features)
    out: Contributions = {}
    if "weight" in call.wants:
        if found := sums(call.rows(x, "input", features), rows):
            return _both(call, *(Dense(call.partition, t) for t in found))
        out["weight"] = row_sums(call, call.rows(dy * twin(x).to(dy.dtype), features=features))
    if "bias" in call.wants:
        out["bias"] = row_sums(call, rows)
    return out


def _affine_channels(call: Call, dy: Tensor, x: Tensor, sums: Callable[..., Sums], twin: Callable[..., Tensor]) -> Contributions:
    """The affine parameters belong to dimension 1: `sums` are over pixels, `twin` is x̂."""
    out: Contributions = {}
    if "weight" in call.wants:
        if found := sums(x, dy):
            return _both(call, *(channel_sums(call, images(t, call.out)) for t in found))
        out["weight"] = channel_sums(call, images(dy * twin(x).to(dy.dtype), call.out))
    if "bias" in call.wants:
        out["bias"] = channel_sums(call, images(dy, call.out))
    return out


def _both(call: Call, weight: Contribution, bias: Contribution) -> Contributions:
    return {name: c for name, c in (("weight", weight), ("bias", bias)) if name in call.wants}


@rule(F.layer_norm, torch.layer_norm, saves="input")
def layer_norm(
    call: Call,
    grads: list[Tensor],
    input: Tensor,
    normalized_shape: Any,
    weight: None = None,
    bias: None = None,
    eps: float = 1e-5,
) -> Contributions:
    sums = functools.partial(native.reduce.norm_rows, eps=eps)
    return _affine(call, grads[0], input, len(normalized_shape), sums, lambda x: F.layer_norm(x, normalized_shape, eps=eps))


@rule(F.rms_norm, torch.rms_norm, saves="input")
def rms_norm(
    call: Call, grads: list[Tensor], input: Tensor, normalized_shape: Any, weight: None = None, eps: float | None = None
) -> Contributions:
    sums = functools.partial(native.reduce.norm_rows, eps=torch.finfo(input.dtype).eps if eps is None else eps, centre=False)
    return _affine(call, grads[0], input, len(normalized_shape), sums, lambda x: F.rms_norm(x, normalized_shape, eps=eps))


@rule(F.group_norm, torch.group_norm, saves="input", when=batch_first)
def group_norm(
    call: Call, grads: list[Tensor], input: Tensor, num_groups: int, weight: None = None, bias: None = None, eps: float = 1e-5
) -> Contributions:
    sums = functools.partial(native.reduce.norm_channels, groups=num_groups, eps=eps)
    return _affine_channels(call, grads[0], input, sums, lambda x: F.group_norm(x, num_groups, eps=eps))


@rule(F.instance_norm, saves="input running_mean running_var", when=batch_first)
def instance_norm(
    call: Call,
    grads: list[Tensor],
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: None = None,
    bias: None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Contributions:
    mean, var = (None, None) if use_input_stats else (running_mean, running_var)
    sums = functools.partial(native.reduce.norm_channels, groups=input.shape[1], eps=eps, mean=mean, var=var)
    twin = functools.partial(F.instance_norm, running_mean=mean, running_var=var, use_input_stats=use_input_stats, eps=eps)
    return _affine_channels(call, grads[0], input, sums, twin)


@rule(F.batch_norm, saves="input running_mean running_var", when=batch_first)
def batch_norm(
    call: Call,
    grads: list[Tensor],
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: None = None,
    bias: None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Contributions:
    mean, var = (None, None) if training else (running_mean, running_var)

    def sums(x: Tensor, dy: Tensor) -> Sums:
        v, m = torch.var_mean(x, [d for d in range(x.dim()) if d != 1], correction=0) if training else (var, mean)
        return native.reduce.norm_channels(x, dy, x.shape[1], eps, m, v)

    return _affine_channels(call, grads[0], input, sums, lambda x: F.batch_norm(x, mean, var, training=training, eps=eps))


@rule(F.prelu, torch.prelu, Tensor.prelu, saves="input", when=batch_first)
def prelu(call: Call, grads: list[Tensor], input: Tensor, weight: None) -> Contributions:
    slope = torch.where(input < 0, input, 0) * grads[0]
    if call.shapes["weight"].numel() > 1:
        return {"weight": channel_sums(call, images(slope, call.out))}
    return {
        "weight": Dense(call.partition, call.rows(slope, features=0).sum(1, keepdim=True).reshape(-1, *call.shapes["weight"]))
    }
