"""Ways in which a batch's values got past the tracer once: each is exact now, or refused.

A row is one idea: a forward, its inputs, and what changes from step to step. The truth of every
step is the definition, in float64. A refusal is an error or a warning of varreg's; it may come at
any step, but no step before it may be wrong. Rows whose names begin with one number are of one
family.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import varreg
from tests.support.judge import (
    WEIGHTED,
    Case,
    Inputs,
    Outcome,
    Plain,
    SilentError,
    Use,
    clear,
    compare,
    depths,
    loss_of,
    refusal,
    run,
    seed,
    settle,
    size_of,
    trained,
    true_gradients,
    use_of,
)
from tests.support.truth import losses, sample_weights

# ---- models and inputs ---------------------------------------------------------------------------

PARTS: dict[str, Callable[[], Any]] = {
    "fc": lambda: nn.Linear(3, 3),
    "g": lambda: nn.Linear(3, 3),
    "fc5": lambda: nn.Linear(5, 5),
    "fc6": lambda: nn.Linear(6, 3),
    "attention": lambda: nn.MultiheadAttention(4, 2, batch_first=True),
    "w": lambda: nn.Parameter(torch.randn(3)),
    "w4": lambda: nn.Parameter(torch.randn(4)),
    "w5": lambda: nn.Parameter(torch.randn(5)),
    "gate": lambda: nn.Parameter(torch.zeros(3)),
    "scalar": lambda: nn.Parameter(torch.tensor(0.3)),
    "ema": lambda: torch.ones(3),
    "A": lambda: torch.eye(4),
}


class Attacked(nn.Module):
    """Calls a function of the model and its inputs; `step` counts the steps of training."""

    def __init__(self, function: Callable[..., Any], parts: str):
        super().__init__()
        self.function, self.step = function, 0
        for name in parts.split():
            part = PARTS[name]()
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


def normal(*shape: int) -> Callable[[int, int], Inputs]:
    return lambda batch, step: (torch.randn(batch, *shape),)


def growing(batch: int, step: int) -> Inputs:
    return (torch.randn(batch, 3) * (1000 if step else 1),)


def counted(batch: int, step: int) -> Inputs:
    return torch.randn(batch, 3), 1 + torch.arange(batch) % 4


def lengths(batch: int, step: int) -> Inputs:
    return torch.randn(batch, 5, 3), 1 + torch.arange(batch) % 4


def equal_lengths_first(batch: int, step: int) -> Inputs:
    x, n = lengths(batch, step)
    return x, n if step else torch.full((batch,), 3)


def pairs(batch: int, step: int) -> Inputs:
    return torch.randn(batch, 3), torch.randn(batch, 3)


def no_padding_first(batch: int, step: int) -> Inputs:
    kept = torch.arange(5) < 1 + torch.arange(batch)[:, None]
    return torch.randn(batch, 5, 3), kept | (step == 0)


def all_labels_first(batch: int, step: int) -> Inputs:
    x, kept = no_padding_first(batch, step)
    return x, torch.randint(0, 3, (batch, 5)).masked_fill(~kept, -100)


def one_class_first(batch: int, step: int) -> Inputs:
    return torch.randn(batch, 3), torch.arange(batch) % 3 * step


def no_nan_first(batch: int, step: int) -> Inputs:
    x, kept = no_padding_first(batch, step)
    return x[..., 0], torch.zeros(batch, 5).masked_fill(~kept, float("nan"))


def chosen(*samples: int) -> Callable[[int, int], Inputs]:
    """Return inputs whose first value is positive for these samples alone."""

    def make(batch: int, step: int) -> Inputs:
        x = torch.randn(batch, 5, 4)
        x[:, 0, 0] = -1.0
        x[list(samples), 0, 0] = 1.0
        return (x,)

    return make


# ---- functions out of the tracer's sight ---------------------------------------------------------


def scripted(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(function)


@scripted
def scripted_same(x: Tensor) -> Tensor:
    return x * 1.0


@scripted
def scripted_transpose(x: Tensor) -> Tensor:
    return x.transpose(0, 1) * 1.0


@scripted
def scripted_flag(x: Tensor, on: bool) -> Tensor:
    if on:
        x = x - x.mean(0)
    return x * 1.0


@scripted
def scripted_centre(x: Tensor) -> Tensor:
    return x - x.mean(0)


@scripted
def scripted_detached_centre(x: Tensor) -> Tensor:
    return x - x.detach().mean(0)


class FlipBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g.flip(0)


class Centre(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x - x.mean(0)

    @staticmethod
    def backward(ctx, g):
        return g - g.mean(0)


class NumpyCentre(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        values = x.detach().numpy()
        return torch.from_numpy(values - np.mean(values, 0))

    @staticmethod
    def backward(ctx, g):
        return g.clone()


class ScriptedCentre(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return scripted_centre(x)

    @staticmethod
    def backward(ctx, g):
        return g.clone()


class Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * min(1.0, 20.0 / float(g.norm()))


@torch.library.custom_op("attacked::flip_into", mutates_args={"out"})
def flip_into(x: Tensor, out: Tensor) -> None:
    out.copy_(x.flip(0))


@torch.library.custom_op("attacked::centre_", mutates_args={"x"})
def centre_(x: Tensor) -> None:
    x.sub_(x.mean(0))


def no_context(ctx: Any, inputs: Any, output: Any) -> None: ...


@torch.library.custom_op("attacked::clip_back", mutates_args=())
def clip_back(x: Tensor) -> Tensor:
    return x * 1.0


def clipped(ctx: Any, g: Tensor) -> Tensor:
    return g * min(1.0, 30.0 / float(g.norm()))


clip_back.register_autograd(clipped, setup_context=no_context)


@torch.library.custom_op("attacked::roll_two", mutates_args=())
def roll_two(x: Tensor) -> Tensor:
    return x.roll(2, 0)


roll_two.register_autograd(lambda ctx, g: g.roll(-2, 0), setup_context=no_context)


# ---- forwards ------------------------------------------------------------------------------------


def cat_out(s, x):
    buffer = torch.empty(len(x), 6)
    torch.cat([x, x * 2], 1, out=buffer)
    return s.fc6(buffer)


def stack_out(s, x):
    buffer = torch.empty(len(x), 2, 3)
    torch.stack([x, x * 2], 1, out=buffer)
    return s.fc(buffer)


def hstack_out(s, x):
    buffer = torch.empty(len(x), 3)
    torch.hstack([x[:, :1], x[:, 1:]], out=buffer)
    return s.fc(buffer)


def cat_samples_out(s, x):
    buffer = torch.empty(len(x) * 2, 3)
    torch.cat([x, x], 0, out=buffer)
    return s.fc(buffer[: len(x)])


def under(mode: Callable[[], Any], statistic: Callable[[Tensor], Any]) -> Callable[..., Tensor]:
    """Return a forward that scales by a statistic of the batch, taken under a mode of gradients."""

    def forward(s, x):
        h = s.fc(x)
        with mode():
            c = statistic(h)
        return h * c

    return forward


def scaled(statistic: Callable[..., Any]) -> Callable[..., Tensor]:
    """Return a forward that scales by a statistic of detached values, and of other inputs."""

    def forward(s, x, *others):
        h = s.fc(x)
        return h * statistic(h.detach(), *others)

    return forward


def added_no_grad(s, x):
    h = s.fc(x)
    with torch.no_grad():
        more = h * (h > 0).sum()
    return h + more


def cleared_slice(s, x, n):
    h = s.fc(x)
    h[:, n.max() :] = 0
    return h


def add_through_view(s, x):
    y = s.fc(x).clone()
    y[0].add_(y[1])
    return y


def centre_through_view(s, x):
    y = x.clone()
    y[:, :2].sub_(y[:, :2].mean(0))
    return s.fc(y)


def roll_through_views(s, x):
    y = torch.zeros_like(x)
    y[0].add_(x[-1])
    y[1:].add_(x[:-1])
    return s.fc(y) * s.g(x)


def centre_data(s, x):
    h = s.fc(x)
    h.data.sub_(h.data.mean(0))
    return s.g(h)


def centre_detached(s, x):
    h = s.fc(x)
    h.detach().sub_(h.detach().mean(0))
    return h


def flip_into_view(s, x):
    buffer = torch.empty(len(x), 3)
    torch.mul(x.flip(0), 2, out=buffer[:])
    return s.fc(buffer) * s.g(x)


def written(write: Callable[[nn.Module, Tensor], Any]) -> Callable[..., Tensor]:
    """Return a forward that writes a statistic into what the model keeps, and then uses it."""

    def forward(s, x):
        h = s.fc(x)
        with torch.no_grad():
            write(s, h)
        return h * (s.ema if hasattr(s, "ema") else s.w)

    return forward


def centre_no_grad(s, x):
    h = s.fc(x)
    with torch.no_grad():
        h.sub_(h.mean(0))
    return h


def stale_view(s, x):
    y = x.clone()
    v = y[:]
    y.copy_(x.flip(0))
    return s.fc(v)


def stale_view_of_result(s, x):
    h = s.fc(x)
    y = h.clone()
    v = y[:]
    y.copy_(h.flip(0))
    return v * 1


def reentrant(s, x):
    def centred(v):
        return s.fc(v) - s.fc(v).mean().item()

    return checkpoint(centred, x.requires_grad_(), use_reentrant=True)


def asks_grad_mode(s, x):
    h = s.fc(x)
    return h - h.detach().mean().item() if torch.is_grad_enabled() else h


def logs_then_scales(s, x):
    h = s.fc(x)
    total = abs(h.sum().item())
    return h * (total if s.step else 1)


def gated(s, x):
    h = s.fc(x)
    return x + s.gate * (h - h.mean().item())


def open_gate(model: nn.Module, step: int) -> None:
    model.gate.data.fill_(float(step))


def vmap_centre(x: Tensor) -> Tensor:
    return torch.vmap(lambda c: c - c.mean(), in_dims=1, out_dims=1)(x)


def custom_op_into(s, x):
    y = torch.empty_like(x)
    flip_into(x, y)
    return s.fc(y) * s.g(x)


def custom_op_in_place(s, x):
    y = x.clone()
    centre_(y)
    return s.fc(y)


def attend(s, x):
    h = s.fc(x)[None]
    return F.scaled_dot_product_attention(h, h, h, attn_mask=s.A > 0)[0]


def fill_adjacency(model: nn.Module, step: int) -> None:
    if step:
        model.A.copy_(torch.eye(4) + 0.25)


def distances(s, x):
    h, c = s.fc(x), torch.linspace(-1, 1, 12).view(4, 3)
    return torch.cdist(h, c) + 0.5 * torch.cdist(c, h)


def outers(s, x):
    h, v = s.fc(x)[:, 0], torch.linspace(1, 2, 4)
    return torch.outer(h, v) + torch.outer(v, h)


def of_loss(function: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """Return a forward that returns a function of a loss over the batch."""
    return lambda s, x: function(s.fc(x).square().mean())


def bias_alone(s, x):
    s.fc.weight.requires_grad_(False)
    y = x.clone()
    h = s.fc(y)
    y.add_(1)
    return h * y


def checkpointed_scale(s, x):
    return checkpoint(lambda v: s.g(s.fc(v).tanh()) * s.w, x, use_reentrant=False)


def attend_chosen(s, x):
    mask = x[:, 0, 0] > 0
    out = torch.zeros_like(x)
    out[mask] = s.attention(x[mask], x[mask], x[mask])[0]
    return out + s.w4


class Listed:
    def __init__(self, tensor: Tensor):
        self.items = [tensor]


class Slotted:
    __slots__ = ("items",)

    def __init__(self, tensor: Tensor):
        self.items = (tensor,)


# ---- uses ----------------------------------------------------------------------------------------


def use_items(model: nn.Module, inputs: Inputs, weights: Tensor) -> Tensor:
    (output,) = model(*inputs).items
    losses(output, weights).mean().backward()
    return output


def use_attribute(model: nn.Module, inputs: Inputs, weights: Tensor) -> Tensor:
    model(*inputs)
    output, model.kept = model.kept, None
    losses(output, weights).mean().backward()
    return output


def use_large(model: nn.Module, inputs: Inputs, weights: Tensor) -> Tensor:
    output = model(*inputs)
    (1e3 * loss_of(output, weights)).backward()
    return output


def use_centred_between(model: nn.Module, inputs: Inputs, weights: Tensor) -> Tensor:
    x, y = inputs
    first = model(x)
    output = model(first - first.mean(0) + y)
    loss_of(output, weights).backward()
    return output


def use_flipped_between(model: nn.Module, inputs: Inputs, weights: Tensor) -> Tensor:
    x, y = inputs
    output = model(model(x).flip(0) + y)
    loss_of(output, weights).backward()
    return output


def keep_flipped(s, x):
    s.kept = s.fc(x).flip(0)
    return x


# ---- the table -----------------------------------------------------------------------------------


class Row(NamedTuple):
    name: str
    forward: Callable[..., Any]
    expect: str = "refused"
    """"exact" or "refused", at the last step; "either" where both keep the promise."""
    parts: str = "fc"
    inputs: Callable[[int, int], Inputs] = normal(3)
    """Of the batch size and the step."""
    batches: tuple[int, ...] = (4, 4)
    """A batch size for each step."""
    setup: Callable[[nn.Module, int], None] | None = None
    """Changes the model before a step."""
    truth: str = "alone"
    use: Use | None = None
    told: str = ""
    """Words of the warning that counts as a refusal if numbers differ."""


no_grad = torch.no_grad
ROWS = [
    Row("1 cat(out=)", cat_out, "exact", "fc6"),
    Row("1 stack(out=)", stack_out, "exact"),
    Row("1 hstack(out=)", hstack_out, "exact"),
    Row("1 cat of samples (out=)", cat_samples_out, "exact"),
    Row("2 cdist both ways", distances, truth="graph"),
    Row("2 outer both ways", outers, truth="graph"),
    Row(
        "2 fmod both ways",
        of_loss(lambda v: torch.fmod(v, torch.tensor(1e9)) + torch.fmod(torch.tensor(2.0), v)),
    ),
    Row(
        "2 pow both ways",
        of_loss(lambda v: torch.pow(v, torch.tensor(1.0)) + torch.pow(torch.tensor(1.5), v)),
    ),
    Row("3 n / loss", of_loss(lambda v: torch.tensor(3.0) / v)),
    Row("3 reciprocal of a loss", of_loss(torch.reciprocal)),
    Row("3 negative power of a loss", of_loss(lambda v: v**-2)),
    *(
        Row(f"4 {name}, identity first", f, parts="fc A", setup=fill_adjacency, truth="graph")
        for name, f in {
            "addmm": lambda s, x: torch.addmm(torch.zeros(3), s.A, s.fc(x)),
            "tensordot": lambda s, x: torch.tensordot(s.A, s.fc(x), 1),
            "sparse.mm": lambda s, x: torch.sparse.mm(s.A.to_sparse(), s.fc(x)),
            "multi_dot": lambda s, x: torch.linalg.multi_dot([s.A, s.fc(x), torch.ones(3, 3)]),
            "attention": attend,
        }.items()
    ),
    Row(
        "5 group_norm of samples, batch 4 then 8",
        lambda s, x: F.group_norm(s.fc(x)[None], 4)[0] + s.fc(x),
        batches=(4, 8),
        truth="graph",
    ),
    Row(
        "5 channel_shuffle of samples, batch 4 then 8",
        lambda s, x: F.channel_shuffle(s.fc(x).view(1, -1, 3, 1), 4)[0, :, :, 0],
        batches=(4, 8),
        truth="graph",
    ),
    Row(
        "6 two scripted functions",
        lambda s, x: scripted_same(s.fc(x)) + 0.5 * scripted_transpose(s.fc(x)),
        inputs=normal(4, 3),
        truth="graph",
    ),
    Row("6 a scripted function's flag", lambda s, x: scripted_flag(s.fc(x), s.step > 0)),
    Row("7 logged, then used", logs_then_scales),
    Row("7 zero gate", gated, parts="fc gate", setup=open_gate),
    Row(
        "8 ignored labels, none first",
        lambda s, x, y: F.cross_entropy(s.fc(x).flatten(0, 1), y.flatten()),
        inputs=all_labels_first,
        told=WEIGHTED,
    ),
    Row(
        "8 class weights, one class first",
        lambda s, x, y: F.cross_entropy(s.fc(x), y, weight=torch.tensor([1.0, 2.0, 5.0])),
        inputs=one_class_first,
        told=WEIGHTED,
    ),
    Row(
        "8 nanmean, no NaN first",
        lambda s, x, y: (s.fc5(x).square() + y).nanmean(),
        parts="fc5",
        inputs=no_nan_first,
    ),
    Row("9 new_tensor", scaled(lambda h: h.new_tensor(h.mean(0)))),
    Row("9 full_like", scaled(lambda h: torch.full_like(h, h.mean()))),
    Row("9 new_full", scaled(lambda h: h.new_full((3,), h.mean()))),
    Row("10 untyped_storage", scaled(lambda h: sum(h.mean(0).untyped_storage().tolist()[:8]))),
    Row("10 storage", scaled(lambda h: h.mean(0).storage()[0])),
    Row("10 repr", scaled(lambda h: float(repr(h.mean())[7:-1]))),
    Row("10 str", scaled(lambda h: float(str(h.mean())[7:-1]))),
    Row("11 add_ through a view", add_through_view, truth="graph"),
    Row("11 centred through a view", centre_through_view),
    Row("11 rolled through views", roll_through_views, parts="fc g"),
    Row("11 .data.sub_", centre_data, parts="fc g"),
    Row("11 .detach().sub_", centre_detached),
    Row("11 out= a view", flip_into_view, parts="fc g"),
    *(
        Row(f"11 buffer {name}", written(f), parts="fc ema")
        for name, f in {
            ".data.add_": lambda s, h: s.ema.data.add_(h.mean(0)),
            ".view.add_": lambda s, h: s.ema.view(-1).add_(h.mean(0)),
            "[0].add_": lambda s, h: s.ema[0].add_(h.mean()),
            "lerp_": lambda s, h: s.ema.lerp_(h.mean(0), 0.1),
            "add(out=)": lambda s, h: torch.add(s.ema, h.mean(0), out=s.ema),
            "_foreach_lerp_": lambda s, h: torch._foreach_lerp_([s.ema], [h.mean(0)], 0.1),
        }.items()
    ),
    *(
        Row(f"12 parameter {name}", written(f), parts="fc w")
        for name, f in {
            "copy_": lambda s, h: s.w.copy_(h.mean(0)),
            "lerp_": lambda s, h: s.w.lerp_(h.mean(0), 0.1),
            ".data.lerp_": lambda s, h: s.w.data.lerp_(h.mean(0), 0.1),
        }.items()
    ),
    Row("13 stale view of an input", stale_view),
    Row("13 stale view of a result", stale_view_of_result),
    Row("14 centred under no_grad, as the output", centre_no_grad),
    Row("15 item in a re-entrant checkpoint", reentrant),
    Row("16 asks for the mode of gradients", asks_grad_mode),
    Row(
        "17 scripted centring of an input",
        lambda s, x: s.fc(scripted_centre(x)) * s.g(x),
        parts="fc g",
    ),
    Row(
        "17 scripted centring, scaled",
        lambda s, x: s.g(x) + s.w * scripted_centre(x),
        parts="g w",
    ),
    Row("17 vmap over an input", lambda s, x: s.fc(vmap_centre(x)) * s.g(x), parts="fc g"),
    Row("18 clip in a backward", lambda s, x: Clip.apply(s.fc(x)), use=use_large),
    Row(
        "19 slice to a tensor",
        lambda s, x, n: s.fc(x)[:, : n.max()].mean(1),
        inputs=lengths,
    ),
    Row("19 write to a slice from a tensor", cleared_slice, inputs=lengths),
    Row("19 nested tensor()", scaled(lambda h: torch.tensor([[h.mean()]]))),
    Row("19 nested as_tensor()", scaled(lambda h: torch.as_tensor([[h.mean()]]))),
    Row("19 nested new_tensor()", scaled(lambda h: h.new_tensor([[h.mean()]]))),
    Row(
        "19 slice of a parameter",
        lambda s, x, n: s.w5[: n.max()].sum() * s.fc(x),
        parts="fc w5",
        inputs=counted,
    ),
    Row(
        "20 crop, equal lengths first",
        lambda s, x, n: s.fc(x)[:, : int(n.max())].mean(1),
        inputs=equal_lengths_first,
    ),
    Row(
        "20 parameter at the largest number",
        lambda s, x, n: s.w5[int(n.max())] * s.fc(x),
        parts="fc w5",
        inputs=counted,
    ),
    Row(
        "21 renorm of the batch, small first",
        lambda s, x: torch.renorm(s.fc(x)[None], 2, 0, 100.0)[0],
        inputs=growing,
    ),
    Row(
        "21 renorm of features, small first",
        lambda s, x: torch.renorm(s.fc(x), 2, 1, 50.0),
        inputs=growing,
        truth="graph",
    ),
    Row("22 output in an object's list", lambda s, x: Listed(s.fc(x).flip(0)), use=use_items),
    Row("22 output in a slot", lambda s, x: Slotted(s.fc(x).flip(0)), use=use_items),
    Row("22 output in an attribute", keep_flipped, use=use_attribute),
    Row(
        "25 centred between forwards",
        lambda s, x: s.fc(x).tanh(),
        inputs=pairs,
        use=use_centred_between,
    ),
    Row(
        "25 flipped between forwards",
        lambda s, x: s.fc(x).tanh(),
        inputs=pairs,
        use=use_flipped_between,
    ),
    Row("27 item under no_grad", under(no_grad, lambda h: h.abs().mean().item())),
    Row("27 float under no_grad", under(no_grad, lambda h: float(h.abs().mean()))),
    Row("27 nonzero under no_grad", under(no_grad, lambda h: len((h > 0).nonzero()) + 1)),
    Row("27 count under no_grad", under(no_grad, lambda h: (h > 0).sum())),
    Row("27 inference_mode", under(torch.inference_mode, lambda h: h.abs().mean().item())),
    Row("27 product under no_grad", added_no_grad),
    Row("27 NumPy in a Function", lambda s, x: NumpyCentre.apply(s.fc(x))),
    Row("28 backward flips, as the output", lambda s, x: FlipBack.apply(s.fc(x))),
    Row("28 centring Function, as the output", lambda s, x: Centre.apply(s.fc(x))),
    Row(
        "29 scripted detached mean",
        lambda s, x: s.g(scripted_detached_centre(s.fc(x))),
        parts="fc g",
    ),
    Row(
        "29 Function of a scripted function",
        lambda s, x: s.g(ScriptedCentre.apply(s.fc(x))),
        parts="fc g",
    ),
    Row("30 custom op writes its argument", custom_op_into, parts="fc g"),
    Row("30 custom op in place", custom_op_in_place),
    Row("31 custom op clips its gradient", lambda s, x: clip_back(s.fc(x)) * 100),
    Row(
        "31 custom roll by two, batch 2 then 4",
        lambda s, x: roll_two(s.fc(x)),
        batches=(2, 4),
    ),
    Row("32 tril", lambda s, x: torch.tril(s.fc(x))),
    Row("32 fill_diagonal_", lambda s, x: s.fc(x).clone().fill_diagonal_(0.0)),
    Row("33 aten.item", scaled(lambda h: torch.ops.aten.item(h.mean()))),
    *(
        Row(f"34 {name}", scaled(f), inputs=counted)
        for name, f in {
            "arange().shape": lambda h, n: torch.arange(n.max()).shape[0],
            "zeros().numel()": lambda h, n: torch.zeros(n.max()).numel(),
            "arange().sum()": lambda h, n: torch.arange(n.max()).sum(),
            "one_hot().shape": lambda h, n: F.one_hot(n).shape[1],
            "len(repeat_interleave())": lambda h, n: len(h.repeat_interleave(n, 0)),
            "len(bincount())": lambda h, n: len(torch.bincount(n)),
        }.items()
    ),
    Row(
        "36 as_strided",
        lambda s, x: s.fc(x[:, :3].as_strided((len(x), 3), (3, 1))),
        inputs=normal(6),
    ),
    Row("C1 bias alone, input written after", bias_alone, "exact"),
    Row("C2 checkpoint with a bare parameter", checkpointed_scale, "exact", "fc g w"),
    Row("C4 masked_fill", lambda s, x: x.masked_fill(x > 0, s.scalar), "exact", "scalar"),
    Row(
        "C4 masked_fill with a sum",
        lambda s, x: s.fc(x).masked_fill(x > 0, s.w.sum()),
        "exact",
        "fc w",
    ),
    *(
        Row(f"F1 attention of samples {c}", attend_chosen, "either", "attention w4", chosen(*c))
        for c in ((0, 1, 2, 3), (0, 2), (1,))
    ),
]


ALONE = [row for row in ROWS if row.truth == "alone" and row.expect != "either"]


# ---- the test ------------------------------------------------------------------------------------


def case_of(row: Row) -> Case:
    """Return the row in the judge's words; the judge's own inputs are not used."""
    return Case(
        row.name,
        "attacked",
        lambda: Attacked(row.forward, row.parts),
        lambda batch: row.inputs(batch, 0),
        row.expect,
        use=row.use,
        truth=row.truth,
        told=row.told,
    )


def prepare(row: Row, model: nn.Module, step: int) -> None:
    model.step = step
    if row.setup is not None:
        row.setup(model, step)
    clear(model)


def steps_of(row: Row) -> list[tuple[Inputs, Tensor, Plain]]:
    """Return each step's inputs and weights, and what plain torch says of them."""
    seed(1)
    case = case_of(row)
    model, steps = case.make(), []
    for step, batch in enumerate(row.batches):
        seed(10 + step)
        inputs, weights = row.inputs(batch, step), sample_weights(batch)
        prepare(row, model, step)
        truth = true_gradients(case, model, copy.deepcopy(inputs), weights)
        output = run(use_of(case), model, copy.deepcopy(inputs), weights)
        grads = {n: p.grad for n, p in trained(model).items()}
        steps.append((inputs, weights, Plain(truth, grads, output)))
    return steps


def outcome_of(row: Row, steps: list[tuple[Inputs, Tensor, Plain]]) -> Outcome:
    """Train an observed model by the same steps, and say how it came out."""
    seed(1)
    case = case_of(row)
    model, outcome = case.make(), Outcome("exact")
    with warnings.catch_warnings(record=True) as caught, varreg.observe(model):
        warnings.simplefilter("always")
        try:
            for step, (inputs, weights, plain) in enumerate(steps):
                prepare(row, model, step)
                output = run(use_of(case), model, copy.deepcopy(inputs), weights)
                outcome = compare(case, model, output, plain, caught) or outcome
        except SilentError as wrong:
            return Outcome("silent", f"step {step}: {wrong}")
        except Exception as error:
            return refusal(error, [model], named=True)
    return outcome


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_no_step_is_silent(row):
    steps, before = steps_of(row), depths()
    try:
        outcome = outcome_of(row, steps)
    finally:
        left = settle(before)
    assert not left
    kinds = {"exact", "refused"} if row.expect == "either" else {row.expect}
    if outcome.kind not in kinds:
        pytest.fail(f"expected {row.expect}, got {outcome}", pytrace=False)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("row", ALONE, ids=lambda row: row.name)
def test_samples_meet_where_a_refusal_is_expected(row):
    """With plain torch: the batch's gradient is another than the mean of samples alone."""
    meet = False
    for _, _, plain in steps_of(row):
        scale = size_of(plain.gradients.values())
        for n, each in plain.gradients.items():
            grad = plain.grads[n]
            gap = each.mean(0) - (torch.zeros_like(each[0]) if grad is None else grad)
            meet |= float(gap.abs().max()) > 1e-9 * scale
    assert meet == (row.expect == "refused")


def test_names_are_unique():
    assert len({row.name for row in ROWS}) == len(ROWS)
