"""Convolutions: a matrix product of the output gradient with what each kernel position sees, sample by sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from varreg import native
from varreg.engine.contribution import Contribution, Lazy
from varreg.engine.rules.rule import Call, Contributions, batch_first, bias_of, channel_sums, images, rule
from varreg.memory import scratch


def _tuple(value: Any, n: int) -> tuple[int, ...]:
    return tuple(value) * (n if len(value) == 1 else 1) if isinstance(value, list | tuple) else (value,) * n


def _windows(x: Tensor, kernel: torch.Size, out: torch.Size, stride: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """A view `[b, c, *kernel, *out]` on a padded `[b, c, *space]`: what each kernel position sees at each output position."""
    strides = x.stride()
    return x.as_strided(
        (*x.shape[:2], *kernel, *out),
        (
            *strides[:2],
            *(s * d for s, d in zip(strides[2:], dilation, strict=True)),
            *(s * t for s, t in zip(strides[2:], stride, strict=True)),
        ),
    )


def _conv_weight(
    call: Call,
    shape: torch.Size,
    x: Tensor,
    dy: Tensor,
    stride: Any,
    padding: Sequence[tuple[int, int]],
    dilation: Any,
    groups: int,
) -> Contribution:
    """c_b = Σ_r δ_br ⊗ window_br(x), for `x [b·k, C, …]` and `dy [b·k, O, …]`, k images a sample."""
    n = x.dim() - 2
    kernel, space = shape[2:], dy.shape[2:]
    stride, dilation = _tuple(stride, n), _tuple(dilation, n)
    pads = [p for pair in reversed(padding) for p in pair]
    channels, features = x.shape[1] // groups, dy.shape[1] // groups
    r, i = math.prod(space), channels * math.prod(kernel)
    images = x.shape[0] // max(call.partition.batch, 1)

    def make(first: int, last: int, start: int, n: int) -> Tensor:
        part = slice(start * images, (start + (last - first) * n) * images)
        chunk = F.pad(x[part], pads) if any(pads) else x[part]
        windows = _windows(chunk, kernel, space, stride, dilation)
        a = scratch("windows", windows.shape, x).copy_(windows).view(-1, i, r)  # b·g, i, r
        delta = dy[part].reshape(-1, features, r)  # b·g, o, r
        c = torch.bmm(delta, a.transpose(1, 2), out=scratch("gradients", (len(a), features, i), x))
        if n * images > 1:
            c = c.view(last - first, n * images, -1).sum(1)
        return c.view(last - first, *shape)

    def cost(n: int) -> int:
        return n * images * groups * max(i * features, i * r)

    def sums(bias: bool) -> native.sums.Sums | None:
        before = tuple([first for first, _ in padding])
        how: dict[str, Any] = {"per": images, "parts": groups, "bias": bias}
        return native.sums.conv(x, dy, tuple(kernel), stride, before, dilation, call.partition.groups, **how)

    def total() -> Tensor:
        """As autograd has it: also where gradients are batched (`is_grads_batched`)."""
        weight = x.new_zeros(()).expand(shape)
        given = F.pad(x, pads) if any(pads) else x
        seen: tuple[Any, ...] = (..., *(slice(reach) for reach in _reach(kernel, space, stride, dilation)))
        whole = (dy, given[seen], weight, None, stride, (0,) * n, dilation, False, (0,) * n, groups, (False, True, False))
        found: Tensor = torch.ops.aten.convolution_backward(*whole)[1]
        return found

    return Lazy(call.partition, shape, make, cost, sums, total)


def _reach(kernel: Sequence[int], space: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> list[int]:
    """How far the kernel gets in each dimension: what comes after is seen by nobody."""
    return [(s - 1) * t + (k - 1) * d + 1 for k, s, t, d in zip(kernel, space, stride, dilation, strict=True)]


def _same(kernel: Sequence[int], dilation: Sequence[int]) -> list[tuple[int, int]]:
    total = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    return [(t // 2, t - t // 2) for t in total]


def _is_batch(call: Call) -> bool:
    return batch_first(call) and len(call.shapes["input"]) == len(call.shapes["weight"])  # not a single image without a batch


@rule(F.conv1d, F.conv2d, F.conv3d, saves="input", when=_is_batch)
def conv(
    call: Call,
    grads: list[Tensor],
    input: Tensor,
    weight: None,
    bias: None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Contributions:
    dy = images(grads[0], call.out)
    n = dy.dim() - 2
    out: Contributions = {}
    if "weight" in call.wants:
        kernel = call.shapes["weight"][2:]
        if isinstance(padding, str):
            pads = _same(kernel, _tuple(dilation, n)) if padding == "same" else [(0, 0)] * n
        else:
            pads = [(p, p) for p in _tuple(padding, n)]
        x = images(input.to(dy.dtype), call.layouts["input"])
        out["weight"] = _conv_weight(call, call.shapes["weight"], x, dy, stride, pads, dilation, groups)
    if "bias" in call.wants:
        out["bias"] = bias_of(out.get("weight"), lambda: channel_sums(call, dy))
    return out


@rule(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d, saves="input", when=_is_batch)
def conv_transpose(
    call: Call,
    grads: list[Tensor],
    input: Tensor,
    weight: None,
    bias: None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Contributions:
    """The adjoint of a convolution: its weight gradient is the convolution's, with input and output gradient swapped."""
    dy = images(grads[0], call.out)
    out: Contributions = {}
    if "weight" in call.wants:
        n = dy.dim() - 2
        pads = [(p, p) for p in _tuple(padding, n)]
        x = images(input.to(dy.dtype), call.layouts["input"])
        out["weight"] = _conv_weight(call, call.shapes["weight"], dy, x, stride, pads, dilation, groups)
    if "bias" in call.wants:
        out["bias"] = channel_sums(call, dy)
    return out
