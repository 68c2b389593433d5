"""Normalization layers, y = x̂·w + b, with x̂ computed again from x; and PReLU, which has one slope
per channel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from varreg.backends import BACKENDS
from varreg.engine.contribution import Bias, Contribution, Dense, Sums, Weight
from varreg.engine.partition import Partition
from varreg.engine.rules.rule import (
    Contributions,
    Use,
    batch_first,
    channel_sums,
    has_batch_in_rows,
    images,
    row_sums,
    rule,
)
from varreg.few_launches import both_sums

SampleSums = tuple[Tensor, Tensor] | Tensor | None
"""The sums of dy·x̂ and of dy for each sample; None where PyTorch is needed."""


def _affine(
    use: Use,
    dy: Tensor,
    x: Tensor,
    features: int,
    sums: Callable[..., SampleSums],
    normalize: Callable[..., Tensor],
) -> Contributions:
    """Return contributions to affine parameters that span the last `features` dimensions. `sums`
    returns Σ dy·x̂ and Σ dy over rows, `normalize` returns x̂.
    """
    rows = use.rows(dy, features=features)
    out: Contributions = {}
    if "weight" in use.wants:
        if (both := sums(use.rows(x, "input", features), rows)) is not None:
            return _pair(use, both, lambda t: Dense(use.partition, t))
        out["weight"] = row_sums(use, use.rows(dy * normalize(x).to(dy.dtype), features=features))
    if "bias" in use.wants:
        out["bias"] = row_sums(use, rows)
    return out


def _affine_channels(
    use: Use,
    dy: Tensor,
    x: Tensor,
    sums: Callable[..., SampleSums],
    normalize: Callable[..., Tensor],
) -> Contributions:
    """Return contributions to affine parameters of dimension 1. `sums` returns Σ dy·x̂ and Σ dy
    over pixels, `normalize` returns x̂.
    """
    out: Contributions = {}
    if "weight" in use.wants:
        if (both := sums(x, dy)) is not None:
            return _pair(use, both, lambda t: channel_sums(use, images(t, use.output_place)))
        out["weight"] = channel_sums(use, images(dy * normalize(x).to(dy.dtype), use.output_place))
    if "bias" in use.wants:
        out["bias"] = channel_sums(use, images(dy, use.output_place))
    return out


def _pair(
    use: Use, both: tuple[Tensor, Tensor] | Tensor, contribution: Callable[[Tensor], Contribution]
) -> Contributions:
    """Return the contributions of weight and bias, given the sums of both for each sample; as one
    stack, if they are in one tensor.
    """
    if isinstance(both, Tensor) and "bias" in use.wants and both.shape[1] == use.partition.batch:
        bias = Bias(use.partition, both.shape[2:], lambda: contribution(both[1]))
        return {"weight": Stacked(use.partition, both, bias), "bias": bias}
    named = zip(("weight", "bias"), both, strict=True)
    return {name: contribution(t) for name, t in named if name in use.wants}


class Stacked(Weight):
    """Contributions to a weight and to its bias in one tensor, `[2, b, *shape]`."""

    def __init__(self, partition: Partition, values: Tensor, bias: Bias):
        super().__init__(partition, values.shape[2:])
        self.bias, self.values, self._weight = bias, values, Dense(partition, values[0])

    def source(self) -> Tensor:
        return self.values

    def groups(self, first: int, last: int, start: int, n: int) -> Tensor:
        return self._weight.groups(first, last, start, n)

    def sums_with_bias(self) -> tuple[Sums, Sums | None]:
        if not self.partition.batch or self.partition.groups != self.partition.batch:
            return self._weight.sums(), None
        total, square = both_sums(self.values, dim=1)
        return (total[0].data, square[0]), (total[1].data, square[1])


def _normalizes_rows(use: Use) -> bool:
    features = len(use.arguments["normalized_shape"])
    return has_batch_in_rows(use, "input", features=features)


@rule(F.layer_norm, torch.layer_norm, saves="input", when=_normalizes_rows)
def layer_norm(
    use: Use,
    grads: list[Tensor],
    input: Tensor,
    normalized_shape: Any,
    weight: None = None,
    bias: None = None,
    eps: float = 1e-5,
) -> Contributions:
    sums = functools.partial(BACKENDS[grads[0].device.type].norm_rows, eps=eps)
    return _affine(
        use,
        grads[0],
        input,
        len(normalized_shape),
        sums,
        lambda x: F.layer_norm(x, normalized_shape, eps=eps),
    )


@rule(F.rms_norm, torch.rms_norm, saves="input", when=_normalizes_rows)
def rms_norm(
    use: Use,
    grads: list[Tensor],
    input: Tensor,
    normalized_shape: Any,
    weight: None = None,
    eps: float | None = None,
) -> Contributions:
    sums = functools.partial(
        BACKENDS[grads[0].device.type].norm_rows,
        eps=torch.finfo(input.dtype).eps if eps is None else eps,
        centre=False,
    )
    return _affine(
        use,
        grads[0],
        input,
        len(normalized_shape),
        sums,
        lambda x: F.rms_norm(x, normalized_shape, eps=eps),
    )


@rule(F.group_norm, torch.group_norm, saves="input", when=batch_first)
def group_norm(
    use: Use,
    grads: list[Tensor],
    input: Tensor,
    num_groups: int,
    weight: None = None,
    bias: None = None,
    eps: float = 1e-5,
) -> Contributions:
    kernels = BACKENDS[grads[0].device.type]
    sums = functools.partial(kernels.norm_channels, groups=num_groups, eps=eps)
    return _affine_channels(
        use, grads[0], input, sums, lambda x: F.group_norm(x, num_groups, eps=eps)
    )


@rule(F.instance_norm, saves="input running_mean running_var", when=batch_first)
def instance_norm(
    use: Use,
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
    kernels = BACKENDS[grads[0].device.type]
    sums = functools.partial(
        kernels.norm_channels, groups=input.shape[1], eps=eps, mean=mean, var=var
    )
    normalize = functools.partial(
        F.instance_norm,
        running_mean=mean,
        running_var=var,
        use_input_stats=use_input_stats,
        eps=eps,
    )
    return _affine_channels(use, grads[0], input, sums, normalize)


@rule(F.batch_norm, saves="input running_mean running_var", when=batch_first)
def batch_norm(
    use: Use,
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

    def sums(x: Tensor, dy: Tensor) -> SampleSums:
        v, m = (
            torch.var_mean(x, [d for d in range(x.dim()) if d != 1], correction=0)
            if training
            else (var, mean)
        )
        return BACKENDS[x.device.type].norm_channels(x, dy, x.shape[1], eps, m, v)

    return _affine_channels(
        use,
        grads[0],
        input,
        sums,
        lambda x: F.batch_norm(x, mean, var, training=training, eps=eps),
    )


@rule(F.prelu, torch.prelu, Tensor.prelu, saves="input", when=batch_first)
def prelu(use: Use, grads: list[Tensor], input: Tensor, weight: None) -> Contributions:
    slope = torch.where(input < 0, input, 0) * grads[0]
    if use.shapes["weight"].numel() > 1:
        return {"weight": channel_sums(use, images(slope, use.output_place))}
    return {
        "weight": Dense(
            use.partition,
            use.rows(slope, features=0).sum(1, keepdim=True).reshape(-1, *use.shapes["weight"]),
        )
    }
