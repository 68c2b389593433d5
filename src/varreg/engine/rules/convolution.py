"""Convolutions: the contribution of a sample is a matrix product of its output gradient with the
inputs of each kernel position.

This file only makes the contributions. `Contribution.sums` (contribution.py) adds them up to S and
W; or a backend computes both in one pass (native/convolution.h, triton/convolutions.py).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from varreg.backends import BACKENDS
from varreg.engine.contribution import GRADIENTS, Bias, Weight
from varreg.engine.partition import Partition
from varreg.engine.rules.rule import Contributions, Use, batch_first, channel_sums, images, rule
from varreg.memory import Workspace
from varreg.native.layer_sums import Sums
from varreg.thresholds import GEOMETRIES

_WINDOWS = Workspace()  # for the inputs of each kernel position


class Geometry(NamedTuple):
    """How a kernel moves over an input, with a number for each of the input's dimensions."""

    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    before: tuple[int, ...]
    """The padding before the first pixel."""
    pads: tuple[int, ...]
    """All padding, as `F.pad` takes it; empty if there is none."""


def _geometry(kernel: torch.Size, stride: Any, padding: Any, dilation: Any) -> Geometry:
    """Return the geometry of a convolution. Lists become tuples, since the result is cached."""
    if isinstance(stride, list):
        stride = tuple(stride)
    if isinstance(padding, list):
        padding = tuple(padding)
    if isinstance(dilation, list):
        dilation = tuple(dilation)
    return _known_geometry(kernel, stride, padding, dilation)


@functools.lru_cache(maxsize=GEOMETRIES)
def _known_geometry(kernel: torch.Size, stride: Any, padding: Any, dilation: Any) -> Geometry:
    n = len(kernel)
    stride, dilation = _per_dimension(stride, n), _per_dimension(dilation, n)
    if padding == "same":
        total = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        pairs = [(t // 2, t - t // 2) for t in total]
    elif padding == "valid":
        pairs = [(0, 0)] * n
    else:
        pairs = [(p, p) for p in _per_dimension(padding, n)]
    pads = tuple(p for pair in reversed(pairs) for p in pair)
    return Geometry(stride, dilation, tuple(p for p, _ in pairs), pads if any(pads) else ())


def _per_dimension(value: Any, n: int) -> tuple[int, ...]:
    if isinstance(value, tuple):
        return value * (n if len(value) == 1 else 1)
    return (value,) * n


class Convolution(Weight):
    """c_b = Σ_r δ_br ⊗ window_br(x), for x `[b·k, C, …]` and δ `[b·k, O, …]`, k images a sample.

    The window of x at r holds the input of each kernel position for output position r. `parts` is
    the number of parts into which the channels are divided (torch calls them groups).
    """

    def __init__(
        self,
        partition: Partition,
        shape: torch.Size,
        x: Tensor,
        delta: Tensor,
        geometry: Geometry,
        parts: int,
        bias: Bias | None = None,
    ):
        self.partition, self.shape, self.bias = partition, shape, bias
        self.x, self.delta, self.geometry, self.parts = x, delta, geometry, parts
        self.images = x.shape[0] // max(partition.batch, 1)  # of one sample

    def source(self) -> Tensor:
        return self.delta

    def groups(self, first: int, last: int, start: int, n: int) -> Tensor:
        part = slice(start * self.images, (start + (last - first) * n) * self.images)
        windows = self._windows(self._padded(self.x[part]))
        o, i, r = self._sizes
        a = _WINDOWS.take(windows.shape, self.x).copy_(windows).view(-1, i, r)  # b·g, i, r
        delta = self.delta[part].reshape(-1, o, r)  # b·g, o, r
        out = GRADIENTS.take((len(a), o, i), self.x)
        c = torch.bmm(delta, a.transpose(1, 2), out=out)
        if n * self.images > 1:
            c = c.view(last - first, n * self.images, -1).sum(1)
        return c.view(last - first, *self.shape)

    def _padded(self, x: Tensor) -> Tensor:
        return F.pad(x, self.geometry.pads) if self.geometry.pads else x

    def _windows(self, x: Tensor) -> Tensor:
        """Return a view `[b, c, *kernel, *out]` on a padded `[b, c, *space]`."""
        strides, (stride, dilation, _, _) = x.stride(), self.geometry
        return x.as_strided(
            (*x.shape[:2], *self.shape[2:], *self.delta.shape[2:]),
            (
                *strides[:2],
                *(s * d for s, d in zip(strides[2:], dilation, strict=True)),
                *(s * t for s, t in zip(strides[2:], stride, strict=True)),
            ),
        )

    def cost(self, n: int) -> int:
        o, i, r = self._sizes
        return n * self.images * self.parts * max(i * o, i * r)

    @property
    def _sizes(self) -> tuple[int, int, int]:
        """Return the numbers of output features and window elements in a part, and of positions."""
        i = self.x.shape[1] // self.parts * math.prod(self.shape[2:])
        return self.delta.shape[1] // self.parts, i, math.prod(self.delta.shape[2:])

    def sums_in_one_pass(self, kernels: Any = None) -> Sums | None:
        kernel, (stride, dilation, before, _) = tuple(self.shape[2:]), self.geometry
        sums: Sums | None = (kernels or BACKENDS[self.x.device.type]).conv(
            *(self.x, self.delta, kernel, stride, before, dilation, self.partition.groups),
            per=self.images,
            parts=self.parts,
            bias=self.bias is not None,
        )
        return sums

    def total(self) -> Tensor | None:
        """Return S as autograd computes it; this also works if gradients are batched
        (`is_grads_batched`).
        """
        if not self.partition.batch:
            return super().total()
        stride, dilation, _, _ = self.geometry
        seen = _reach(self.shape[2:], self.delta.shape[2:], stride, dilation)
        part: tuple[Any, ...] = (..., *(slice(n) for n in seen))
        x = self._padded(self.x)[part]
        weight, none = self.x.new_zeros(()).expand(self.shape), (0,) * len(stride)
        geometry = stride, none, dilation, False, none, self.parts
        wanted = False, True, False
        total: Tensor = torch.ops.aten.convolution_backward(
            self.delta, x, weight, None, *geometry, wanted
        )[1]
        return total


def _reach(
    kernel: Sequence[int], space: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> list[int]:
    """Return the size of the input that the kernel reaches in each dimension; the rest is not
    used.
    """
    return [
        (s - 1) * t + (k - 1) * d + 1
        for k, s, t, d in zip(kernel, space, stride, dilation, strict=True)
    ]


def _is_batch(use: Use) -> bool:
    """Return whether the input has a batch; a single image has none."""
    return batch_first(use) and len(use.shapes["input"]) == len(use.shapes["weight"])


@rule(F.conv1d, F.conv2d, F.conv3d, saves="input", when=_is_batch)
def conv(
    use: Use,
    grads: list[Tensor],
    input: Tensor,
    weight: None,
    bias: None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Contributions:
    dy = images(grads[0], use.output_place)
    if "weight" not in use.wants:
        return {"bias": channel_sums(use, dy)}
    shape, x = use.shapes["weight"], images(input.to(dy.dtype), use.input_places["input"])
    how = _geometry(shape[2:], stride, padding, dilation)
    if "bias" not in use.wants:
        return {"weight": Convolution(use.partition, shape, x, dy, how, groups)}
    of_bias = Bias(use.partition, shape[:1], lambda: channel_sums(use, dy))
    weights = Convolution(use.partition, shape, x, dy, how, groups, of_bias)
    return {"weight": weights, "bias": of_bias}


@rule(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d, saves="input", when=_is_batch)
def conv_transpose(
    use: Use,
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
    """Return contributions to the adjoint of a convolution: its weight gradient is the
    convolution's, with input and output gradient swapped.
    """
    dy = images(grads[0], use.output_place)
    out: Contributions = {}
    if "weight" in use.wants:
        shape, x = use.shapes["weight"], images(input.to(dy.dtype), use.input_places["input"])
        how = _geometry(shape[2:], stride, padding, dilation)
        out["weight"] = Convolution(use.partition, shape, dy, x, how, groups)
    if "bias" in use.wants:
        out["bias"] = channel_sums(use, dy)
    return out
