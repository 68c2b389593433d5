"""Normalization layers, y = x̂·w + b with x̂ recomputed without the affine part; and PReLU, which has one slope per channel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from varreg.engine.contribution import Dense
from varreg.engine.rules.rule import Call, Contributions, batch_first, channel_sums, images, row_sums, rule


def _affine(call: Call, dy: Tensor, normalized: Callable[[], Tensor], features: int) -> Contributions:
    """The affine parameters span the last `features` dimensions."""
    out: Contributions = {}
    if "weight" in call.wants:
        out["weight"] = row_sums(call, call.rows(dy * normalized().to(dy.dtype), features=features))
    if "bias" in call.wants:
        out["bias"] = row_sums(call, call.rows(dy, features=features))
    return out


def _affine_channels(call: Call, dy: Tensor, normalized: Callable[[], Tensor]) -> Contributions:
    """The affine parameters belong to dimension 1."""
    out: Contributions = {}
    if "weight" in call.wants:
        out["weight"] = channel_sums(call, images(dy * normalized().to(dy.dtype), call.out))
    if "bias" in call.wants:
        out["bias"] = channel_sums(call, images(dy, call.out))
    return out


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
    return _affine(call, grads[0], lambda: F.layer_norm(input, normalized_shape, eps=eps), len(normalized_shape))


@rule(F.rms_norm, torch.rms_norm, saves="input")
def rms_norm(
    call: Call, grads: list[Tensor], input: Tensor, normalized_shape: Any, weight: None = None, eps: float | None = None
) -> Contributions:
    return _affine(call, grads[0], lambda: F.rms_norm(input, normalized_shape, eps=eps), len(normalized_shape))


@rule(F.group_norm, torch.group_norm, saves="input", when=batch_first)
def group_norm(
    call: Call, grads: list[Tensor], input: Tensor, num_groups: int, weight: None = None, bias: None = None, eps: float = 1e-5
) -> Contributions:
    return _affine_channels(call, grads[0], lambda: F.group_norm(input, num_groups, eps=eps))


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
    return _affine_channels(call, grads[0], lambda: F.instance_norm(input, mean, var, use_input_stats=use_input_stats, eps=eps))


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
    return _affine_channels(call, grads[0], lambda: F.batch_norm(input, mean, var, training=training, eps=eps))


@rule(F.prelu, torch.prelu, Tensor.prelu, saves="input", when=batch_first)
def prelu(call: Call, grads: list[Tensor], input: Tensor, weight: None) -> Contributions:
    slope = torch.where(input < 0, input, 0) * grads[0]
    if call.shapes["weight"].numel() > 1:
        return {"weight": channel_sums(call, images(slope, call.out))}
    return {
        "weight": Dense(call.partition, call.rows(slope, features=0).sum(1, keepdim=True).reshape(-1, *call.shapes["weight"]))
    }
