"""Layer rules: what each sample contributes to the gradient of a layer's parameters, given dL/d(output).

A rule serves one torch function. It takes the function's arguments by name and returns a `Contribution` for each of the
arguments that `call.wants`. Only the tensors named in `saves` are kept for it; the others come as None. The layers of
`torch.nn` are served because they call these functions; so is any other module that does.

Shapes are normalized once, at the door, by `call.rows`: `[batch, rows, features]`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from varreg.moments.contribution import Contribution, Dense, Lazy, Outer, Partition, scratch, stat_dtype
from varreg.moments.layout import Layout, rows, samples

Contributions = dict[str, Contribution]


class Call(NamedTuple):
    """One call of a torch function in which parameters met the batch."""

    wants: frozenset[str]
    """The arguments whose contributions are asked for."""
    shapes: dict[str, torch.Size]
    """The shape of every tensor argument."""
    layouts: dict[str, Layout]
    """Where the batch is, for every argument that carries it."""
    out: Layout
    """Where the batch is in the (first) output."""
    partition: Partition

    def rows(self, t: Tensor, name: str | None = None, features: int = 1) -> Tensor:
        """`[batch, rows, …features]` of the argument `name`, or of the output."""
        at = self.out if name is None else self.layouts.get(name)
        if at is None:  # an argument without a batch, used for every sample
            flat = t.reshape(1, -1, *t.shape[t.dim() - features :])
            return flat.expand(self.out.batch, *flat.shape[1:])
        return rows(t, at, features)


class Rule(NamedTuple):
    name: str
    names: tuple[str, ...]
    """The served function's arguments, in order."""
    saves: frozenset[str]
    """The tensor arguments that are kept for the backward pass."""
    run: Callable[..., Contributions]
    when: Callable[[Call], bool]
    """Does the rule serve this call? If not, the general one does."""
    forward: Callable[..., Any] | None
    """What to call in place of the function, for the same result to the last bit when its parameters are detached."""
    takes_over: bool
    """Do the contributions replace autograd's own gradient of the parameters? If not, they are measured beside it."""

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**dict(zip(self.names, args, strict=False)), **kwargs}


RULES: dict[Any, Rule] = {}


def rule(
    *functions: Any,
    saves: str = "",
    when: Callable[[Call], bool] = lambda call: True,
    forward: Callable[..., Any] | None = None,
    takes_over: bool = True,
) -> Callable[[Callable[..., Contributions]], Callable[..., Contributions]]:
    """Register the decorated function, `rule(call, grads, *the function's own arguments)`, for torch functions."""

    def add(run: Callable[..., Contributions]) -> Callable[..., Contributions]:
        names = tuple(inspect.signature(run).parameters)[2:]
        for function in functions:
            RULES[function] = Rule(run.__name__, names, frozenset(saves.split()), run, when, forward, takes_over)
        return run

    return add


def _batch_first(call: Call) -> bool:
    return call.layouts.get("input", call.out).dim == 0 and call.out.dim == 0


def _row_sums(call: Call, t: Tensor) -> Dense:
    """`[b, r, *shape]` → Σ_r: the contribution of whatever is added to every row."""
    return Dense(call.partition, t.sum(1) if t.shape[1] != 1 else t[:, 0])


# ---- matrix products ---------------------------------------------------------------------------------------------------


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
        out["bias"] = _row_sums(call, dy)
    return out


@rule(torch.addmm, saves="mat1", when=lambda call: "mat1" not in call.wants and len(call.shapes["input"]) == 1)
def addmm(
    call: Call, grads: list[Tensor], input: None, mat1: Tensor, mat2: None, *, beta: float = 1, alpha: float = 1
) -> Contributions:
    """β·bias + α·x W, with W `[in, out]`: the linear layer of GPT-2."""
    dy = call.rows(grads[0])
    out: Contributions = {}
    if "mat2" in call.wants:
        out["mat2"] = Outer(call.partition, call.rows(mat1.to(dy.dtype), "mat1") * alpha, dy)
    if "input" in call.wants:
        out["input"] = _row_sums(call, dy * beta if beta != 1 else dy)
    return out


@rule(
    *(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm),
    saves="input",
    when=lambda call: "input" not in call.wants and len(call.shapes["other"]) <= 2 and len(call.shapes["input"]) > 1,
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
        out["bias"] = _row_sums(call, dy)
    return out


# ---- convolutions ------------------------------------------------------------------------------------------------------


def _tuple(value: Any, n: int) -> tuple[int, ...]:
    return tuple(value) * (n if len(value) == 1 else 1) if isinstance(value, list | tuple) else (value,) * n


def _images(t: Tensor, at: Layout) -> Tensor:
    """`[batch·images, channels, …]` with the images of a sample side by side; a sample may have several."""
    return t if at.outer == 1 else samples(t, at).flatten(0, 2)


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

    return Lazy(call.partition, shape, make, cost)


def _same(kernel: Sequence[int], dilation: Sequence[int]) -> list[tuple[int, int]]:
    total = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    return [(t // 2, t - t // 2) for t in total]


@rule(F.conv1d, F.conv2d, F.conv3d, saves="input", when=_batch_first)
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
    dy = _images(grads[0], call.out)
    n = dy.dim() - 2
    out: Contributions = {}
    if "weight" in call.wants:
        kernel = call.shapes["weight"][2:]
        if isinstance(padding, str):
            pads = _same(kernel, _tuple(dilation, n)) if padding == "same" else [(0, 0)] * n
        else:
            pads = [(p, p) for p in _tuple(padding, n)]
        x = _images(input.to(dy.dtype), call.layouts["input"])
        out["weight"] = _conv_weight(call, call.shapes["weight"], x, dy, stride, pads, dilation, groups)
    if "bias" in call.wants:
        out["bias"] = _channel_sums(call, dy)
    return out


@rule(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d, saves="input", when=_batch_first)
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
    dy = _images(grads[0], call.out)
    out: Contributions = {}
    if "weight" in call.wants:
        n = dy.dim() - 2
        pads = [(p, p) for p in _tuple(padding, n)]
        x = _images(input.to(dy.dtype), call.layouts["input"])
        out["weight"] = _conv_weight(call, call.shapes["weight"], dy, x, stride, pads, dilation, groups)
    if "bias" in call.wants:
        out["bias"] = _channel_sums(call, dy)
    return out


def _channel_sums(call: Call, t: Tensor) -> Dense:
    """`[b·k, c, …]` → `[b, c]`."""
    summed = t.flatten(2).sum(2) if t.dim() > 2 else t
    return Dense(
        call.partition, summed.reshape(call.partition.batch, t.shape[0] // max(call.partition.batch, 1), t.shape[1]).sum(1)
    )


# ---- lookups -----------------------------------------------------------------------------------------------------------


def _lookup(call: Call, shape: torch.Size, ids: Tensor, dy: Tensor, skip: int | None) -> Contribution:
    """Rows `ids [b, r]` of a table receive `dy [b, r, features]`."""
    vocabulary = shape[0]
    if skip is not None:
        dy = dy.masked_fill((ids == skip % vocabulary).unsqueeze(-1), 0)

    def make(first: int, last: int, start: int, n: int) -> Tensor:
        part = slice(start, start + (last - first) * n)
        group = torch.arange(last - first, device=ids.device).repeat_interleave(n)
        flat = (ids[part] + (group * vocabulary).unsqueeze(1)).flatten()
        out = dy.new_zeros((last - first) * vocabulary, shape[1])
        return out.index_add_(0, flat, dy[part].flatten(0, 1)).view(last - first, *shape)

    return SparseRows(call.partition, shape, ids, dy, make)


class SparseRows(Lazy):
    """A lookup's contributions: only the rows that a group looked up are not zero, so only these are squared."""

    def __init__(
        self, partition: Partition, shape: torch.Size, ids: Tensor, dy: Tensor, make: Callable[[int, int, int, int], Tensor]
    ):
        super().__init__(partition, shape, make)
        self.ids, self.dy = ids, dy

    def sums(self) -> tuple[Tensor | None, Tensor | None]:
        if not self.partition.batch:
            return None, None
        vocabulary, features = self.shape
        dtype = stat_dtype(self.dy.dtype)
        sizes = [n for first, last, _, n in self.partition.runs() for _ in range(last - first)]
        n = torch.tensor(sizes, device=self.ids.device)
        group = torch.arange(len(sizes), device=self.ids.device).repeat_interleave(n)
        flat = (self.ids + (group * vocabulary).unsqueeze(1)).flatten()
        keys, where = torch.unique(flat, return_inverse=True)  # (group, row) pairs that occur
        c = self.dy.new_zeros(len(keys), features, dtype=dtype).index_add_(0, where, self.dy.flatten(0, 1).to(dtype))
        row = keys % vocabulary
        total = c.new_zeros(self.shape).index_add_(0, row, c)
        square = c.new_zeros(self.shape).index_add_(0, row, c.square_() / n[keys // vocabulary].unsqueeze(1))
        return total, square

    def total(self) -> Tensor | None:
        zeros = self.dy.new_zeros(self.shape)
        return zeros.index_add_(0, self.ids.flatten(), self.dy.flatten(0, 1))


@rule(F.embedding, saves="input")
def embedding(
    call: Call,
    grads: list[Tensor],
    input: Tensor,
    weight: None,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Contributions:
    if sparse or scale_grad_by_freq:
        which = "sparse=True" if sparse else "scale_grad_by_freq=True"
        raise ValueError(f"varreg: an embedding with {which} is not supported; set it to False.")
    at = call.layouts["input"]
    ids = samples(input, at).reshape(at.batch, -1)
    return {"weight": _lookup(call, call.shapes["weight"], ids, call.rows(grads[0]), padding_idx)}


@rule(F.embedding_bag, saves="input offsets per_sample_weights weight", when=lambda call: call.wants == {"weight"})
def embedding_bag(
    call: Call,
    grads: list[Tensor],
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Contributions:
    """A bag is a sample. Bags of different lengths are padded to one rectangle with a row that is then skipped."""
    if sparse or scale_grad_by_freq:
        which = "sparse=True" if sparse else "scale_grad_by_freq=True"
        raise ValueError(f"varreg: an embedding bag with {which} is not supported; set it to False.")
    dy, vocabulary = grads[0], call.shapes["weight"][0]
    flat = input.flatten()
    if offsets is None:
        bag = torch.arange(input.shape[0], device=input.device).repeat_interleave(input.shape[1])
    else:
        ends = offsets[1:] if include_last_offset else torch.cat([offsets[1:], offsets.new_tensor([len(flat)])])
        starts = offsets[:-1] if include_last_offset else offsets
        bag = torch.arange(len(starts), device=input.device).repeat_interleave(ends - starts)
    keep = flat != padding_idx % vocabulary if padding_idx is not None else torch.ones_like(flat, dtype=torch.bool)
    share = dy[bag]  # what each looked-up row receives
    if mode == "mean":
        n = torch.zeros(len(dy), dtype=dy.dtype, device=dy.device).index_add_(0, bag, keep.to(dy.dtype))
        share = share / n.clamp(min=1)[bag].unsqueeze(1)
    elif mode == "max":
        values = weight[flat].masked_fill(~keep.unsqueeze(1), -torch.inf)
        best = torch.full_like(dy, -torch.inf, dtype=values.dtype).scatter_reduce(
            0, bag.unsqueeze(1).expand_as(values), values, "amax"
        )
        hit = values == best[bag]
        order = torch.arange(len(flat), device=flat.device).unsqueeze(1).expand_as(hit).masked_fill(~hit, len(flat))
        first = torch.full_like(best, len(flat), dtype=torch.long).scatter_reduce(
            0, bag.unsqueeze(1).expand_as(order), order, "amin"
        )
        share = share * (order == first[bag]).to(dy.dtype)  # a tie goes to the first
    elif per_sample_weights is not None:
        share = share * per_sample_weights.flatten().unsqueeze(1)
    share = share.masked_fill(~keep.unsqueeze(1), 0)
    out: Contributions = {}
    if "weight" in call.wants:
        position = torch.arange(len(flat), device=flat.device) - torch.searchsorted(bag, bag)
        longest = int(position.max()) + 1 if len(flat) else 0
        ids = flat.new_zeros(len(dy), longest).index_put((bag, position), flat)
        padded = share.new_zeros(len(dy), longest, share.shape[1]).index_put((bag, position), share)
        out["weight"] = _lookup(call, call.shapes["weight"], ids, padded, None)
    return out


# ---- normalization: y = x̂·w + b, x̂ recomputed without the affine part -----------------------------------------------------


def _affine(call: Call, dy: Tensor, normalized: Callable[[], Tensor], features: int) -> Contributions:
    """The affine parameters span the last `features` dimensions."""
    out: Contributions = {}
    if "weight" in call.wants:
        out["weight"] = _row_sums(call, call.rows(dy * normalized().to(dy.dtype), features=features))
    if "bias" in call.wants:
        out["bias"] = _row_sums(call, call.rows(dy, features=features))
    return out


def _affine_channels(call: Call, dy: Tensor, normalized: Callable[[], Tensor]) -> Contributions:
    """The affine parameters belong to dimension 1."""
    out: Contributions = {}
    if "weight" in call.wants:
        out["weight"] = _channel_sums(call, _images(dy * normalized().to(dy.dtype), call.out))
    if "bias" in call.wants:
        out["bias"] = _channel_sums(call, _images(dy, call.out))
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


@rule(F.group_norm, torch.group_norm, saves="input", when=_batch_first)
def group_norm(
    call: Call, grads: list[Tensor], input: Tensor, num_groups: int, weight: None = None, bias: None = None, eps: float = 1e-5
) -> Contributions:
    return _affine_channels(call, grads[0], lambda: F.group_norm(input, num_groups, eps=eps))


@rule(F.instance_norm, saves="input running_mean running_var", when=_batch_first)
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


@rule(F.batch_norm, saves="input running_mean running_var", when=_batch_first)
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


@rule(F.prelu, torch.prelu, Tensor.prelu, saves="input", when=_batch_first)
def prelu(call: Call, grads: list[Tensor], input: Tensor, weight: None) -> Contributions:
    slope = torch.where(input < 0, input, 0) * grads[0]
    if call.shapes["weight"].numel() > 1:
        return {"weight": _channel_sums(call, _images(slope, call.out))}
    return {
        "weight": Dense(call.partition, call.rows(slope, features=0).sum(1, keepdim=True).reshape(-1, *call.shapes["weight"]))
    }
