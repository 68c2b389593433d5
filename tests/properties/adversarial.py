"""Models and usages that try to make varreg say something wrong. Each row is one idea, with the
outcome that keeps the promise.

"exact": equal to one sample at a time. "refused": an error of varreg's that says where. "either":
one of them; never silence, never torch's own message. Sizes are small and coincide on purpose: four
samples, four steps, four features. What the contract leaves to the user is not here: a loss that
mixes samples, an input whose batch is not where `observe` was told.

`python -m tests.properties.adversarial [WORD ...]` prints what comes out, for all rows or for those
whose family/name contains a word.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import copy
import dataclasses
import functools
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import varreg
from tests.support.judge import (
    COUNTED,
    ELSEWHERE,
    NO_MOMENTS,
    OUTSIDE,
    SLOTS,
    UNSCALED,
    WEIGHTED,
    Case,
    Inputs,
    Outcome,
    SilentError,
    Use,
    allowed,
    judge,
    loss_of,
)
from tests.support.model_table import Fn
from tests.support.truth import losses

CASES: list[Case] = []
Made = Callable[[], nn.Module]


def row(expect: str) -> Callable[..., None]:
    def add(
        family: str, name: str, make: Made, inputs: Callable[[int], Inputs], **options: Any
    ) -> None:
        CASES.append(Case(name, family, make, inputs, expect, **options))

    return add


exact, refused, either = row("exact"), row("refused"), row("either")


# ---- parts
# --------------------------------------------------------------------------------------------------


def made(forward: Callable[..., Any], **parts: Callable[[], Any]) -> Made:
    """Return a factory of models with this forward and these parts, each made anew."""
    return lambda: Fn(forward, **{n: part() for n, part in parts.items()})


def linear(i: int = 3, o: int = 3, bias: bool = True) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(i, o, bias=bias)


def layer(kind: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
    return lambda: kind(*args, **kwargs)


def weight(*shape: int) -> Callable[[], nn.Parameter]:
    return lambda: nn.Parameter(torch.randn(shape))


def zero(*shape: int) -> Callable[[], nn.Parameter]:
    return lambda: nn.Parameter(torch.zeros(shape))


def normal(*shape: int) -> Callable[[int], Inputs]:
    return lambda batch: (torch.randn(batch, *shape),)


def pair(*shape: int) -> Callable[[int], Inputs]:
    return lambda batch: (torch.randn(batch, *shape), torch.randn(batch, *shape))


def alike(*shape: int) -> Callable[[int], Inputs]:
    """Give every sample the same values."""
    return lambda batch: (torch.randn(1, *shape).expand(batch, *shape).contiguous(),)


def first_two_alike(*shape: int) -> Callable[[int], Inputs]:
    def inputs(batch: int) -> Inputs:
        x = torch.randn(batch, *shape)
        x[: min(2, batch)] = x[0].clone()
        return (x,)

    return inputs


def zeros(*shape: int) -> Callable[[int], Inputs]:
    return lambda batch: (torch.zeros(batch, *shape),)


def ids(*shape: int, high: int = 5) -> Callable[[int], Inputs]:
    return lambda batch: (torch.randint(0, high, (batch, *shape)),)


def labelled(features: int = 3, classes: int = 3) -> Callable[[int], Inputs]:
    return lambda batch: (torch.randn(batch, features), torch.randint(0, classes, (batch,)))


def outside(t: Tensor) -> Tensor:
    """Return the same numbers by a way that no tracer sees."""
    return torch.tensor(t.tolist(), dtype=t.dtype)


# ---- bilinear, and other rules with an argument that is made in forward
# ----------------------------------------------

_B = "argument-made-in-forward"
bilinear = {"bi": layer(nn.Bilinear, 3, 3, 2)}
exact(
    _B, "bilinear-cosine-of-the-input", made(lambda s, x: s.bi(x, x.cos()), **bilinear), normal(3)
)
exact(
    _B, "bilinear-detached-input", made(lambda s, x: s.bi(x, x.detach() * 2), **bilinear), normal(3)
)
either(
    _B,
    "bilinear-rows-from-a-list",
    made(lambda s, x: s.bi(x, outside(x).cos()), **bilinear),
    normal(3),
)
either(
    _B,
    "bilinear-first-argument-from-a-list",
    made(lambda s, x: s.bi(outside(x).cos(), x), **bilinear),
    normal(3),
)
either(
    _B,
    "functional-bilinear-rows-from-a-list",
    made(
        lambda s, x: F.bilinear(s.fc(x), outside(x).sin(), s.table, None),
        fc=linear(),
        table=weight(2, 3, 3),
    ),
    normal(3),
)
either(
    _B,
    "bilinear-rows-counted",
    made(lambda s, x: s.bi(x, torch.arange(1.0, len(x) + 1)[:, None].expand(-1, 3)), **bilinear),
    normal(3),
    truth="graph",
)
either(
    _B,
    "bilinear-rows-counted-square",
    made(
        lambda s, x: s.bi(s.fc(x), torch.arange(1.0, 1 + x.shape[0] * 4).view(-1, 4).cos()),
        bi=layer(nn.Bilinear, 4, 4, 4),
        fc=linear(4, 4),
    ),
    normal(4),
    truth="graph",
)
exact(
    _B,
    "bilinear-shared-row",
    made(lambda s, x: s.bi(x, torch.linspace(1, 2, 3).expand(len(x), 3)), **bilinear),
    normal(3),
)
exact(
    _B,
    "bilinear-shared-parameter",
    made(lambda s, x: s.bi(x, s.proto.expand(len(x), 3)), proto=weight(3), **bilinear),
    normal(3),
)
exact(
    _B,
    "bilinear-shared-ones",
    made(lambda s, x: s.bi(x, torch.ones_like(x)), **bilinear),
    normal(3),
)
exact(
    _B,
    "bilinear-time-first",
    made(lambda s, x: s.bi(x.transpose(0, 1), x.transpose(0, 1).cos()).transpose(0, 1), **bilinear),
    normal(4, 3),
    batches=(4, 2, 1),
)
either(
    _B,
    "bilinear-time-first-constant",
    made(
        lambda s, x: s.bi(
            x.transpose(0, 1), torch.arange(12.0).view(4, 1, 3).expand(4, len(x), 3)
        ).transpose(0, 1),
        **bilinear,
    ),
    normal(4, 3),
    batches=(4, 2, 1),
)
either(
    _B,
    "embedding-ids-from-a-list",
    made(
        lambda s, i: s.table(torch.tensor(i.tolist())) * s.gate,
        table=layer(nn.Embedding, 5, 3),
        gate=weight(3),
    ),
    ids(4),
)
either(
    _B,
    "embedding-ids-counted",
    made(
        lambda s, x: s.fc(x) + s.table(torch.arange(len(x))),
        fc=linear(),
        table=layer(nn.Embedding, 5, 3),
    ),
    normal(3),
    truth="graph",
)
either(
    _B,
    "linear-of-rows-from-a-list",
    made(lambda s, x: s.fc(outside(x)) * s.gate(x), fc=linear(), gate=linear()),
    normal(3),
)
either(
    _B,
    "matmul-of-rows-from-a-list",
    made(lambda s, x: s.gate(x) * (outside(x) @ s.mix), gate=linear(), mix=weight(3, 3)),
    normal(3),
)
either(
    _B,
    "bag-weights-from-a-list",
    made(
        lambda s, i: s.bag(i, per_sample_weights=outside(i.double()).cos()),
        bag=layer(nn.EmbeddingBag, 5, 3, mode="sum"),
    ),
    ids(4),
)
either(
    _B,
    "bag-offsets-counted",
    made(
        lambda s, i: s.bag(i.flatten(), torch.arange(len(i)) * 4), bag=layer(nn.EmbeddingBag, 5, 3)
    ),
    ids(4),
)
exact(
    _B,
    "conv-of-a-shared-picture-times-input",
    made(
        lambda s, x: s.conv(torch.linspace(-1, 1, 12).view(1, 3, 4)) * x,
        conv=layer(nn.Conv1d, 3, 3, 3, padding=1),
    ),
    normal(3, 4),
)
exact(
    _B,
    "layernorm-of-a-shared-row-times-input",
    made(lambda s, x: s.norm(torch.linspace(-1, 1, 4)) * x, norm=layer(nn.LayerNorm, 4)),
    normal(4),
)
either(
    _B,
    "cell-with-a-state-from-a-list",
    made(lambda s, x: s.cell(x, outside(x)), cell=layer(nn.GRUCell, 3, 3)),
    normal(3),
)
exact(
    _B,
    "cell-with-a-shared-state",
    made(
        lambda s, x: s.cell(x, s.state.expand(len(x), 3)),
        cell=layer(nn.GRUCell, 3, 3),
        state=weight(3),
    ),
    normal(3),
)
exact(
    _B,
    "attention-with-shared-keys",
    made(
        lambda s, x: s.att(x, s.keys.expand(len(x), 4, 4), s.keys.expand(len(x), 4, 4))[0],
        att=layer(nn.MultiheadAttention, 4, 2, batch_first=True),
        keys=weight(4, 4),
    ),
    normal(4, 4),
)
either(
    _B,
    "baddbmm-with-rows-from-a-list",
    made(
        lambda s, x: (
            torch.baddbmm(
                s.bias.expand(len(x), 1, 3), outside(x)[:, None], s.mix.expand(len(x), 3, 3)
            )
            * x[:, None]
        ),
        bias=weight(3),
        mix=weight(3, 3),
    ),
    normal(3),
)


# ---- gradients that are cleared where they were exactly zero
# ---------------------------------------------------------

_C = "cleared"


def two_steps(clearing: Callable[[nn.Module], None], between: Callable[[nn.Module], None]):
    """Return a use with two steps, of which the second alone counts."""

    def use(model: nn.Module, inputs: Inputs, weights: Tensor) -> Any:
        loss_of(model(*inputs), weights).backward()
        clearing(model)
        with torch.no_grad():
            between(model)
        output = model(*inputs)
        loss_of(output, weights).backward()
        return output

    return use


def accumulated(size: int, call: Callable[..., Any] | None = None):
    """Return a use that accumulates over micro-batches; `call(model, k)` may say how the k-th one
    is run.
    """

    def use(model: nn.Module, inputs: Inputs, weights: Tensor) -> None:
        for k, at in enumerate(range(0, len(weights), size)):
            part = tuple(t[at : at + size] for t in inputs)
            run = (call and call(model, k)) or model
            (losses(run(*part), weights[at : at + size]).sum() / len(weights)).backward()

    return use


def to_zero(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)


def zero_in_place(model: nn.Module) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.zero_()


def zero_by_data(model: nn.Module) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.data = torch.zeros_like(p.grad)


def zero_by_foreach(model: nn.Module) -> None:
    torch._foreach_zero_([p.grad for p in model.parameters() if p.grad is not None])


def zero_by_product(model: nn.Module) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.0)


def nothing(model: nn.Module) -> None:
    pass


def fill(name: str, value: float = 0.5) -> Callable[[nn.Module], None]:
    return lambda model: model.get_parameter(name).fill_(value)


lora = made(lambda s, x: s.fc(x) + x @ s.down @ s.up, fc=linear(), down=weight(3, 2), up=zero(2, 3))
rezero = made(lambda s, x: x + s.gate * s.fc(x), fc=linear(), gate=zero(1))
gated = made(lambda s, x: s.out(x) + s.gate * s.fc(x), out=linear(), fc=linear(), gate=zero(3))
dead = made(
    lambda s, x: s.out(F.relu(s.fc(x) - s.shift)),
    fc=linear(),
    out=linear(),
    shift=lambda: nn.Parameter(torch.full((3,), 50.0)),
)
exact(_C, "lora-set-to-zero", lora, normal(3), use=two_steps(to_zero, fill("up")))
exact(_C, "lora-twice-zero", lora, normal(3), use=two_steps(to_zero, nothing))
exact(_C, "lora-zeroed-in-place", lora, normal(3), use=two_steps(zero_in_place, fill("up")))
exact(_C, "lora-zeroed-by-foreach", lora, normal(3), use=two_steps(zero_by_foreach, fill("up")))
either(_C, "lora-zeroed-by-data", lora, normal(3), use=two_steps(zero_by_data, fill("up")))
exact(_C, "lora-multiplied-by-zero", lora, normal(3), use=two_steps(zero_by_product, fill("up")))
exact(_C, "rezero-set-to-zero", rezero, normal(3), use=two_steps(to_zero, fill("gate")))
exact(
    _C,
    "rezero-layers-grads-zeroed-apart",
    rezero,
    normal(3),
    use=two_steps(lambda m: (m.fc.zero_grad(set_to_none=False), m.zero_grad()), fill("gate")),
)
exact(_C, "gate-set-to-zero", gated, normal(3), use=two_steps(to_zero, fill("gate")))
exact(_C, "dead-units-set-to-zero", dead, normal(3), use=two_steps(to_zero, fill("shift", 0.0)))
exact(
    _C,
    "zero-inputs-set-to-zero",
    made(lambda s, x: s.fc(x), fc=linear()),
    zeros(3),
    use=two_steps(to_zero, nothing),
)
exact(_C, "zeros-accumulate", lora, normal(3), batches=(4, 3, 1), use=accumulated(2))


# ---- false alarms: the true gradient is zero
# -------------------------------------------------------------------------

_Z = "false-alarm"
exact(
    _Z,
    "weight-norm-of-one-column",
    lambda: parametrizations.weight_norm(nn.Linear(1, 8)),
    normal(1),
    batches=(4, 8, 1),
)
exact(
    _Z,
    "weight-norm-of-one-column-huge",
    made(lambda s, x: s.fc(x * 1e3), fc=lambda: parametrizations.weight_norm(nn.Linear(1, 8))),
    normal(1),
)
exact(
    _Z,
    "bias-under-a-softmax",
    made(lambda s, x: (s.fc(x) + s.shift).softmax(-1), fc=linear(), shift=weight(1)),
    normal(3),
)
exact(
    _Z,
    "bias-under-a-softmax-of-one",
    made(lambda s, x: s.fc(x).softmax(-1) * x, fc=linear(3, 1)),
    normal(3),
)
exact(
    _Z,
    "key-bias-of-attention",
    lambda: Fn(lambda s, x: s.att(x, x, x)[0], att=nn.MultiheadAttention(4, 2, batch_first=True)),
    normal(4, 4),
)
exact(
    _Z,
    "relative-positions",
    made(
        lambda s, x: (x @ s.mix @ x.mT + s.table(torch.arange(4))[None]).softmax(-1) @ x,
        mix=weight(3, 3),
        table=lambda: nn.Embedding(4, 1),
    ),
    normal(4, 3),
)
exact(
    _Z,
    "norm-after-a-bias",
    made(lambda s, x: F.layer_norm(s.fc(x) + s.shift, (3,)), fc=linear(), shift=weight(1)),
    normal(3),
)
exact(
    _Z,
    "scale-before-a-norm",
    made(lambda s, x: F.normalize(s.fc(x) * s.gain.exp(), dim=1), fc=linear(), gain=weight(1)),
    normal(3),
)
exact(
    _Z,
    "groupnorm-of-one-value",
    made(
        lambda s, x: s.norm(s.fc(x))[..., 0] * x,
        fc=linear(4, 4),
        norm=lambda: Fn(lambda s, h: s.norm(torch.stack([h, h], -1)), norm=nn.GroupNorm(4, 4)),
    ),
    normal(4),
)
exact(
    _Z,
    "used-and-taken-away",
    made(lambda s, x: s.fc(x) + s.gain * x - s.gain * x, fc=linear(), gain=weight(3)),
    normal(3),
)
exact(
    _Z,
    "multiplied-by-zero",
    made(lambda s, x: s.fc(x) + 0.0 * s.other(x), fc=linear(), other=linear()),
    normal(3),
)
exact(
    _Z,
    "clamped-away",
    made(lambda s, x: s.fc(x) + s.other(x).clamp(min=100.0), fc=linear(), other=linear()),
    normal(3),
)
exact(
    _Z,
    "spread-of-softmaxes",
    made(
        lambda s, x: s.fc(x).softmax(-1) - (s.fc(x) + s.shift).softmax(-1) + s.out(x),
        fc=linear(),
        out=linear(),
        shift=weight(1),
    ),
    normal(3),
)


# ---- operations in place on results that hold parameters
# -------------------------------------------------------------

_I = "in-place"


def changed(
    name: str, change: Callable[[Tensor, Tensor], Any], expect: Callable[..., None] = exact
) -> None:
    """Add the change after einsum, matmul and a general operation, each with a second use of the
    parameter.
    """

    def product(s: Any, x: Tensor) -> Tensor:
        h = torch.einsum("btd,de->bte", x, s.mix)
        return s.out(h if (y := change(h, x)) is None else y)

    def used_twice(s: Any, x: Tensor) -> Tensor:
        h = torch.einsum("...d,de", x, s.mix)
        return (h if (y := change(h, x)) is None else y) + x @ s.mix

    def matmul(s: Any, x: Tensor) -> Tensor:
        h = x @ s.mix
        return s.out(h if (y := change(h, x)) is None else y)

    def general(s: Any, x: Tensor) -> Tensor:
        h = torch.tensordot(x, s.mix, dims=([2], [0]))
        return h if (y := change(h, x)) is None else y

    parts = {"mix": weight(3, 3), "out": linear()}
    expect(_I, f"einsum-{name}", made(product, **parts), normal(4, 3))
    expect(_I, f"einsum-{name}-used-twice", made(used_twice, mix=weight(3, 3)), normal(4, 3))
    expect(_I, f"matmul-{name}", made(matmul, **parts), normal(4, 3))
    expect(_I, f"tensordot-{name}", made(general, mix=weight(3, 3)), normal(4, 3))


def reshaped_in_place(s: Any, x: Tensor) -> Tensor:
    """Reshape in place what a measurement needs: torch itself saved a copy of it."""
    h = F.interpolate(x, scale_factor=2)
    y = torch.einsum("btd,d->b", h, s.mix)
    z = h.reshape(-1, 6).unsqueeze_(-1).unflatten(0, (len(x), -1)).sum((1, 2, 3))
    return (y + z).unsqueeze(-1)


either(_I, "einsum-input-reshaped", made(reshaped_in_place, mix=weight(6)), normal(4, 3))


def assigned_product(h: Tensor, x: Tensor) -> Tensor:
    h *= x
    return h


def assigned_slice(h: Tensor, x: Tensor) -> None:
    h[:, 0] = 0.0


def copied_half(h: Tensor, x: Tensor) -> None:
    h[:, :2].copy_(x[:, :2])


changed("relu_", lambda h, x: h.relu_())
changed("product-assigned", assigned_product)
changed("masked_fill_", lambda h, x: h.masked_fill_(x > 0, -1.0))
changed("add_", lambda h, x: h.add_(x, alpha=2.0))
changed("clamp_", lambda h, x: h.clamp_(-1.0, 1.0))
changed("lerp_", lambda h, x: h.lerp_(x, 0.5))
changed("copy_-into-half", copied_half)
changed(
    "index_put_",
    lambda h, x: h.index_put_(
        (torch.arange(len(h)), torch.zeros(len(h), dtype=torch.long)), x[:, 1]
    ),
    either,
)
changed("slice-assigned", assigned_slice)
exact(
    _I,
    "einsum-relu_-of-a-view",
    made(
        lambda s, x: (h := torch.einsum("btd,de->bte", x, s.mix), h[:, 0].relu_(), h)[2],
        mix=weight(3, 3),
    ),
    normal(4, 3),
)
exact(
    _I,
    "einsum-half-of-it-changed",
    made(
        lambda s, x: (
            h := torch.einsum("btd,de->bte", x, s.mix),
            h.narrow(1, 0, 2).mul_(x[:, :2]),
            h.tanh(),
        )[2],
        mix=weight(3, 3),
    ),
    normal(4, 3),
)
either(
    _I,
    "derived-weight-changed",
    made(lambda s, x: x @ (s.left @ s.right).relu_(), left=weight(3, 2), right=weight(2, 3)),
    normal(3),
)
either(
    _I,
    "derived-weight-slice-assigned",
    made(
        lambda s, x: (w := s.mix * 2, w.__setitem__((slice(None), 0), 0.0), x @ w)[2],
        mix=weight(3, 3),
    ),
    normal(3),
)
exact(
    _I,
    "functional-inplace-flags",
    made(
        lambda s, x: F.leaky_relu(
            F.relu(torch.einsum("bd,de->be", x, s.mix), inplace=True) - 1, inplace=True
        ),
        mix=weight(3, 3),
    ),
    normal(3),
)
exact(
    _I,
    "addmm_-with-a-parameter",
    made(lambda s, x: s.fc(x).addmm_(x, s.mix), fc=linear(), mix=weight(3, 3)),
    normal(3),
)
exact(
    _I,
    "squeeze_-and-t_",
    made(lambda s, x: s.fc(x)[:, None].squeeze_(1).t_().t_(), fc=linear()),
    normal(3),
    batches=(4, 3, 1),
)
either(
    _I,
    "resized-by-set_",
    made(lambda s, x: s.fc(x) * x.clone().set_(x.clone()), fc=linear()),
    normal(3),
)


# ---- two threads
# --------------------------------------------------------------------------------------------------

_T = "threads"


def same(a: Any, b: Any) -> bool:
    """Tell whether two counts and second moments, either of them None, are the same but for
    rounding.
    """
    return (a is None) == (b is None) and (
        a is None or (a[0] == b[0] and torch.allclose(a[1], b[1], rtol=1e-9))
    )


def in_threads(model: nn.Module, inputs: Inputs, weights: Tensor) -> Any:
    """Train the two halves of the model at the same time, with the same step again and again."""
    errors: list[BaseException] = []
    steps = 1 if len(weights) == 1 else 60  # one sample is a truth, which needs no repetition

    def train(part: nn.Module, x: Tensor) -> None:
        first: list[Any] = []
        try:
            for _ in range(steps):
                part.zero_grad()
                loss_of(part(x), weights).backward()
                seen = [varreg.moments(p) for p in part.parameters()]
                now = [None if m is None else (m.count, m.second_moment) for m in seen]
                first = first or now
                if not all(same(a, b) for a, b in zip(now, first, strict=True)):
                    raise SilentError("the same step has other moments the next time")
        except BaseException as e:
            errors.append(e)

    (x,) = inputs
    parts = ((model.left, x), (model.right, x[:, :3]))
    workers = [threading.Thread(target=train, args=args) for args in parts]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # so that threads take turns within a step
    try:
        for w in workers:
            w.start()
        for w in workers:
            w.join()
    finally:
        sys.setswitchinterval(interval)
    if errors:
        raise errors[0]


class Tower(nn.Module):
    """A model that can pause in the middle of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.mix = nn.Linear(3, 3), nn.Linear(3, 3), nn.Parameter(torch.randn(3, 3))
        self.pause: Callable[[], Any] | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(
            x.transpose(0, 1)
        ).tanh()  # steps first, so that what was known before the pause matters
        if self.pause is not None:
            self.pause()
        return torch.einsum("tbd,de->tbe", self.b(h).sin(), self.mix).transpose(0, 1)


def one_waits(model: Any, inputs: Inputs, weights: Tensor) -> Any:
    """Pause one model in its forward, for a whole step of the other in another thread."""
    errors: list[BaseException] = []

    def train() -> None:
        try:
            loss_of(model.right(*inputs), weights).backward()
        except BaseException as e:
            errors.append(e)

    def wait() -> None:
        other = threading.Thread(target=train)
        other.start()
        other.join()

    model.left.pause = wait
    try:
        output = model.left(*inputs)
    finally:
        model.left.pause = None
    loss_of(output, weights).backward()
    if errors:
        raise errors[0]
    return output


def one_inside(model: Any, inputs: Inputs, weights: Tensor) -> Any:
    """Pause one model in its forward, for a whole step of the other in the same thread."""
    model.left.pause = lambda: loss_of(model.right(*inputs), weights).backward()
    try:
        output = model.left(*inputs)
    finally:
        model.left.pause = None
    loss_of(output, weights).backward()
    return output


def forwards_in_turns(model: Any, inputs: Inputs, weights: Tensor) -> Any:
    """Run both forwards, then both backwards, the first one last."""
    left, right = model.left(*inputs), model.right(*(t[:, :2] for t in inputs))
    loss_of(right, weights).backward()
    loss_of(left, weights).backward()
    return left, right


towers = made(lambda s, x: None, left=Tower, right=Tower)
exact(
    _T,
    "one-waits-for-the-other",
    towers,
    normal(4, 3),
    use=one_waits,
    observed=lambda m: [m.left, m.right],
)
exact(
    _T,
    "one-inside-of-the-other",
    towers,
    normal(4, 3),
    use=one_inside,
    observed=lambda m: [m.left, m.right],
)
exact(
    _T,
    "forwards-in-turns",
    towers,
    normal(4, 3),
    use=forwards_in_turns,
    observed=lambda m: [m.left, m.right],
)
exact(
    _T,
    "two-models-two-threads",
    made(lambda s, x: None, left=Tower, right=Tower),
    normal(4, 3),
    use=in_threads,
    observed=lambda m: [m.left, m.right],
    batches=(4,),
)
exact(
    _T,
    "one-observed-one-plain",
    made(lambda s, x: None, left=Tower, right=Tower),
    normal(4, 3),
    use=in_threads,
    observed=lambda m: [m.left],
    batches=(4,),
)


# ---- samples that are permuted or mixed
# ------------------------------------------------------------------------------

_M = "mixed"


def mixed(name: str, mix: Callable[[Tensor], Tensor], **options: Any) -> None:
    """Add the mixing between two layers, and with alike first samples."""
    make = made(lambda s, x: s.out(mix(s.fc(x))), fc=linear(3, 4), out=linear(4, 3))
    refused(_M, name, make, options.pop("inputs", normal(3)), **options)


isolated = torch.tensor(
    [[1.0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 1, 0]], dtype=torch.float64
)
leaves_first = [0, 2, 3, 1]


def order(h: Tensor) -> Tensor:
    return torch.tensor(leaves_first)[: len(h)] if len(h) == 4 else torch.arange(len(h))


mixed("roll-by-half", lambda h: h.roll(len(h) // 2, 0))
mixed("roll-by-half-of-six", lambda h: h.roll(len(h) // 2, 0), batches=(6, 2))
mixed("roll-flattened", lambda h: h.roll(4))
mixed("permutation-leaves-the-first", lambda h: h[order(h)])
mixed("permutation-leaves-the-first-two-alike", lambda h: h[order(h)], inputs=first_two_alike(3))
mixed("index-select", lambda h: h.index_select(0, order(h)))
mixed("take-along-dim", lambda h: torch.take_along_dim(h, order(h)[:, None].expand(-1, 4), 0))
mixed("gather", lambda h: h.gather(0, order(h)[:, None].expand(-1, 4)))
mixed("gather-by-values", lambda h: h.gather(0, h.argsort(0)))
mixed("take", lambda h: h.take(torch.arange(h.numel()).view_as(h).flip(0)))
mixed("isolated-node", lambda h: isolated[: len(h), : len(h)] @ h, inputs=normal(3))
mixed("isolated-node-einsum", lambda h: torch.einsum("ij,jd->id", isolated[: len(h), : len(h)], h))
mixed(
    "isolated-node-sparse", lambda h: torch.sparse.mm(isolated[: len(h), : len(h)].to_sparse(), h)
)
mixed("identity-but-the-last-two", lambda h: torch.cat([h[:-2], h[-2:].flip(0)]))
mixed("flip", lambda h: h.flip(0))
mixed("flipud", torch.flipud)
mixed("cumsum", lambda h: h.cumsum(0))
mixed("cumsum-by-axis", lambda h: torch.cumsum(h, axis=0))
mixed("cumprod", lambda h: h.cumprod(0))
mixed("logcumsumexp", lambda h: torch.logcumsumexp(h, 0))
mixed("cummax", lambda h: h.cummax(0).values)
mixed("sort", lambda h: h.sort(0).values)
mixed("sort-by-axis", lambda h: torch.sort(h, stable=True, dim=0)[0])
mixed("topk", lambda h: h.topk(len(h), 0).values)
mixed("diff-over-samples", lambda h: torch.diff(h, dim=0, prepend=h[:1]))
mixed("scatter", lambda h: torch.zeros_like(h).scatter(0, order(h)[:, None].expand(-1, 4), h))
mixed(
    "scatter-add",
    lambda h: torch.zeros_like(h).scatter_add(
        0, (torch.arange(len(h)) // 2)[:, None].expand(-1, 4), h
    ),
)
mixed("index-add", lambda h: h.index_add(0, order(h), h))
mixed("index-copy", lambda h: h.index_copy(0, order(h), h))
mixed(
    "segment-mean-back",
    lambda h: torch.zeros_like(h).index_add(0, torch.arange(len(h)) // 2, h)[
        torch.arange(len(h)) // 2
    ],
)
mixed("roll-half-of-the-features", lambda h: torch.cat([h[:, :2], h[:, 2:].roll(1, 0)], 1))
mixed("one-feature-shifted", lambda h: torch.cat([h[:, :3], h[:, 3:].roll(2, 0)], 1))
mixed("symmetric-sum-of-neighbours", lambda h: h + 0.5 * h.roll(2, 0))
mixed("minus-the-mean", lambda h: h - h.mean(0))
mixed("minus-the-mean-by-axis", lambda h: h - h.mean(axis=0, keepdims=True))
mixed("over-the-largest", lambda h: h / h.abs().amax())
mixed("by-the-norm-of-all", lambda h: h / h.norm())
mixed("transposed-square", lambda h: h @ h.t() @ h)
mixed("transposed-layer", lambda h: h.t(), batches=(4,), truth="graph")
mixed("reshaped-across", lambda h: h.t().reshape(len(h), 4))
mixed(
    "attention-over-samples", lambda h: F.scaled_dot_product_attention(h[None], h[None], h[None])[0]
)
mixed("fft-over-samples", lambda h: torch.fft.fft(h, dim=0).real)
mixed("fft-over-both", lambda h: torch.fft.fft2(h).real)
mixed("convolved-over-samples", lambda h: F.avg_pool1d(h.t()[None], 3, 1, 1)[0].t())
mixed(
    "interpolated-over-samples",
    lambda h: F.interpolate(h.t()[None], size=2 * len(h))[0].t()[::2].roll(1, 0),
)
mixed(
    "unfolded-over-samples",
    lambda h: F.pad(h, (0, 0, 1, 1), mode="constant").unfold(0, 3, 1).sum(-1),
)
mixed("neighbours-by-slices", lambda h: torch.cat([h[1:], h[:1]]))
mixed("neighbours-by-stack", lambda h: torch.stack([h[i - 1] for i in range(len(h))]))
mixed("neighbours-by-unbind", lambda h: torch.stack([*h.unbind(0)[1:], h[0]]))
mixed(
    "nearest-neighbour",
    lambda h: h[torch.cdist(h, h).fill_diagonal_(1e9).argmin(1)] if len(h) > 1 else h,
)
mixed("mixup", lambda h: 0.7 * h + 0.3 * h[torch.randperm(len(h))], batches=(5, 1))
mixed(
    "renormalised-by-instance-norm",
    lambda h: F.instance_norm(h.t()[None])[0].t() if len(h) > 1 else h,
)
mixed(
    "batch-norm-function", lambda h: F.batch_norm(h, None, None, training=True) if len(h) > 1 else h
)
mixed("kthvalue-back", lambda h: h - h.kthvalue(1, 0).values)
mixed("median-back", lambda h: h - h.median(0).values)
mixed("zero-layer-hides-it", lambda h: (h * 0).roll(1, 0) + h.roll(2, 0))
mixed("tril-mix", lambda h: torch.ones(len(h), len(h)).tril() @ h)
mixed("map-over-transposed", lambda h: torch.vmap(lambda v: v - v.mean(), in_dims=1, out_dims=1)(h))
mixed("where-of-neighbours", lambda h: torch.where(h > h.roll(2, 0), h, h.roll(2, 0)))
mixed("maximum-with-the-flipped", lambda h: torch.maximum(h, h.flip(0)))
mixed(
    "bucketised-by-the-batch",
    lambda h: h * torch.searchsorted(h.detach().flatten().sort().values, h.detach()).double(),
)
mixed("rank-of-each", lambda h: h * h.detach().argsort(0).argsort(0).double())
mixed("normalised-over-samples", lambda h: F.normalize(h, dim=0))
mixed("softmax-over-samples", lambda h: h.softmax(0))
mixed(
    "pairwise-distance-to-the-first",
    lambda h: h + F.pairwise_distance(h, h[:1].expand_as(h))[:, None],
)
refused(
    _M,
    "zero-initialised-roll",
    made(lambda s, x: (x @ s.mix).roll(len(x) // 2, 0) * x, mix=zero(3, 3)),
    normal(3),
)
refused(
    _M,
    "alike-samples-rolled-after",
    made(lambda s, x: (s.fc(x) * torch.linspace(1, 2, 4)[: len(x), None]).roll(2, 0), fc=linear()),
    alike(3),
)


# ---- mixing after the last parameter
# ---------------------------------------------------------------------------------

_L = "last-layer"


def last(
    name: str,
    finish: Callable[[Tensor], Any],
    expect: Callable[..., None] = refused,
    **options: Any,
) -> None:
    """Add the operation after the last parameter."""
    expect(
        _L,
        name,
        made(lambda s, x: finish(s.fc(x)), fc=linear(3, 4)),
        options.pop("inputs", normal(3)),
        **options,
    )


last("softmax", lambda h: h.softmax(0))
last("softmax-alike", lambda h: h.softmax(0), inputs=alike(3))
last("softmax-of-nothing", lambda h: h.softmax(0), inputs=zeros(3))
last("log-softmax", lambda h: F.log_softmax(h, 0))
last("softmin", lambda h: F.softmin(h, 0))
last("cumsum", lambda h: h.cumsum(0))
last("centred", lambda h: h - h.mean(0))
last("centred-detached", lambda h: h - h.detach().mean(0))
last("normalised", lambda h: F.normalize(h, dim=0))
last("over-the-std", lambda h: h / h.std(0, correction=0).clamp(min=0.1))
last("plus-the-sum", lambda h: h + h.sum(0, keepdim=True))
last("sum-expanded", lambda h: h.sum(0, keepdim=True).expand(len(h), -1) * 1.0)
last("similarities", lambda h: F.pad(h @ h.t(), (0, 4 - len(h))))
last("message-passing", lambda h: isolated[: len(h), : len(h)] @ h)
last("message-passing-einsum", lambda h: torch.einsum("ij,jd->id", isolated[: len(h), : len(h)], h))
last("message-passing-index-add", lambda h: h + torch.zeros_like(h).index_add(0, order(h), h))
last("flipped", lambda h: h.flip(0))
last("permuted", lambda h: h[order(h)])
last("sorted", lambda h: h.sort(0).values)
last("complex-flipped", lambda h: torch.complex(h, h.flip(0)))
last("fft-over-samples", lambda h: torch.fft.fft(h, dim=0))
last("rfft-over-features", lambda h: torch.fft.rfft(h, dim=1), exact)
last("complex", lambda h: torch.complex(h, h.cos()), exact)
last("complex-product", lambda h: torch.complex(h, h.cos()) * torch.complex(h.sin(), h), exact)
last("viewed-as-complex", lambda h: torch.view_as_complex(h.view(len(h), 2, 2)), exact)
last("polar-abs", lambda h: torch.polar(h.exp(), h).abs(), exact)
last("softmax-over-features", lambda h: h.softmax(1), exact)
last("scaled-by-the-largest", lambda h: h / h.detach().abs().max())
last("dict-of-outputs-one-mixed", lambda h: {"a": h, "b": h.roll(1, 0)})
last("tuple-of-outputs-one-mixed", lambda h: (h, (h, h.softmax(0))))
last("dict-of-outputs", lambda h: {"a": h, "b": [h.cos(), {"c": h.sin()}]}, exact)


# ---- losses inside of forward
# ----------------------------------------------------------------------------------------

_F = "loss-in-forward"


def own_loss(
    name: str, loss: Callable[[Tensor], Any], expect: Callable[..., None], **options: Any
) -> None:
    expect(_F, name, made(lambda s, x: loss(s.fc(x)), fc=linear(3, 4)), normal(3), **options)


def classified(
    name: str, loss: Callable[[Tensor, Tensor], Any], expect: Callable[..., None], **options: Any
) -> None:
    expect(
        _F, name, made(lambda s, x, y: loss(s.fc(x), y), fc=linear(3, 4)), labelled(3, 4), **options
    )


own_loss("mean-of-squares", lambda h: h.square().mean(), exact)
own_loss("mean-of-means", lambda h: h.square().mean(1).mean(), exact)
own_loss("sum", lambda h: h.square().sum(), exact, options={"reduction": "sum"})
own_loss("sum-over-the-batch-size", lambda h: h.square().sum() / len(h), exact)
own_loss("weighted-sum", lambda h: (h.square() @ torch.arange(1.0, 5.0)).mean(), exact)
own_loss(
    "weighted-by-itself", lambda h: (h.square().sum(1) * h.detach().sigmoid()[:, 0]).mean(), exact
)
own_loss("mean-by-einsum", lambda h: torch.einsum("bd,bd->", h, h) / len(h), exact)
own_loss("mean-by-dot", lambda h: torch.dot(h.flatten(), h.cos().flatten()) / len(h), exact)
own_loss(
    "mean-by-a-product", lambda h: (torch.ones(len(h)) / len(h)) @ h.square() @ torch.ones(4), exact
)
own_loss(
    "mean-of-several-terms",
    lambda h: h.square().mean() + 0.5 * h.cos().mean() - h[:, 0].exp().mean(),
    exact,
)
own_loss("mean-added-to-a-constant", lambda h: 3.0 - 2.0 * h.square().mean() / 5.0, exact)
own_loss("square-of-the-mean", lambda h: h.mean(0).square().sum(), refused)
own_loss("square-of-the-sum", lambda h: h.sum().square(), refused)
own_loss("product-of-means", lambda h: h.mean() * h.square().mean(), refused)
own_loss("root-of-the-mean", lambda h: h.square().mean().sqrt(), refused)
own_loss("log-of-the-mean", lambda h: h.square().mean().log(), refused)
own_loss("norm", lambda h: h.norm(), refused)
own_loss("variance", lambda h: h.var(0, correction=0).sum(), refused)
own_loss("logsumexp", lambda h: h.logsumexp(0).sum(), refused)
own_loss("logsumexp-of-all", lambda h: h.flatten().logsumexp(0), refused)
own_loss("largest", lambda h: h.max(), refused)
own_loss("largest-of-each", lambda h: h.amax(0).sum(), refused)
own_loss("median", lambda h: h.square().median(), refused)
own_loss("product", lambda h: h.sigmoid().prod(), refused)
own_loss("contrastive", lambda h: F.cross_entropy(h @ h.t(), torch.arange(len(h))), refused)
own_loss("decorrelation", lambda h: (h.t() @ h / len(h)).square().sum(), refused)
own_loss("hardest-half", lambda h: h.square().sum(1).topk((len(h) + 1) // 2).values.mean(), refused)
own_loss(
    "balanced-router",
    lambda h: (h.softmax(1).mean(0) * h.softmax(1).mean(0).detach()).sum(),
    refused,
)
own_loss("over-the-largest-loss", lambda h: h.square().mean() / h.detach().square().max(), refused)
own_loss(
    "mean-times-its-own-constant", lambda h: h.square().mean() * h.square().mean().detach(), refused
)
own_loss(
    "mean-of-shifted-rows",
    lambda h: (y := h.clone(), put(y, slice(1, None), h[:-1]), y.square().mean())[2],
    refused,
)
own_loss("mean-times-item", lambda h: h.square().mean() * h.square().mean().item(), refused)
own_loss("relu-of-the-mean", lambda h: F.relu(h.mean() + 9.0), either)
own_loss("clamped-mean", lambda h: h.square().mean().clamp(max=0.4), refused)
classified("cross-entropy", lambda h, y: F.cross_entropy(h, y), exact)
classified("cross-entropy-smoothed", lambda h, y: F.cross_entropy(h, y, label_smoothing=0.1), exact)
classified(
    "cross-entropy-probabilities", lambda h, y: F.cross_entropy(h, F.one_hot(y, 4).double()), exact
)
classified(
    "cross-entropy-of-none-reduced",
    lambda h, y: F.cross_entropy(h, y, reduction="none").mean(),
    exact,
)
classified("cross-entropy-module", lambda h, y: nn.CrossEntropyLoss()(h, y), exact)
classified("nll-of-log-softmax", lambda h, y: F.nll_loss(h.log_softmax(1), y), exact)
classified("picked-by-gather", lambda h, y: -h.log_softmax(1).gather(1, y[:, None]).mean(), exact)
classified(
    "picked-by-index", lambda h, y: -h.log_softmax(1)[torch.arange(len(y)), y].mean(), either
)
classified(
    "class-weights",
    lambda h, y: F.cross_entropy(h, y, torch.tensor([1.0, 2, 3, 4], dtype=h.dtype)),
    either,
    told=WEIGHTED,
)
classified(
    "binary", lambda h, y: F.binary_cross_entropy_with_logits(h, F.one_hot(y, 4).double()), exact
)
classified("mse", lambda h, y: F.mse_loss(h, F.one_hot(y, 4).double()), exact)
classified(
    "huber-sum",
    lambda h, y: F.huber_loss(h, F.one_hot(y, 4).double(), reduction="sum") / len(h),
    exact,
)
classified(
    "kl-batchmean",
    lambda h, y: F.kl_div(h.log_softmax(1), F.one_hot(y, 4).double(), reduction="batchmean"),
    exact,
)
classified("loss-in-a-dict", lambda h, y: {"loss": F.cross_entropy(h, y), "logits": h}, exact)
classified("loss-in-a-tuple", lambda h, y: (F.cross_entropy(h, y), h.detach()), exact)
classified(
    "loss-of-one-element", lambda h, y: {"loss": F.cross_entropy(h, y).view(1).squeeze()}, exact
)
classified(
    "supervised-contrastive",
    lambda h, y: ((h @ h.t()) * (y[:, None] == y[None]).double()).mean(),
    refused,
)
classified(
    "masked-mean-by-count",
    lambda h, y: (h.square().sum(1) * (y > 0)).sum() / (y > 0).sum().clamp(min=1),
    either,
)
classified(
    "two-losses-added", lambda h, y: F.cross_entropy(h, y) + 0.1 * h.square().sum(1).mean(), exact
)
exact(
    _F,
    "auto-encoder",
    made(lambda s, x: F.mse_loss(s.dec(s.enc(x).tanh()), x), enc=linear(3, 2), dec=linear(2, 3)),
    normal(3),
)
exact(
    _F,
    "language-model",
    made(
        lambda s, i: F.cross_entropy(s.out(s.table(i[:, :-1])).flatten(0, 1), i[:, 1:].flatten()),
        table=layer(nn.Embedding, 5, 3),
        out=linear(3, 5),
    ),
    ids(5),
    batches=(4, 1),
)
exact(
    _F,
    "language-model-transposed",
    made(
        lambda s, i: F.cross_entropy(s.out(s.table(i[:, :-1])).transpose(1, 2), i[:, 1:]),
        table=layer(nn.Embedding, 5, 3),
        out=linear(3, 5),
    ),
    ids(5),
    batches=(4, 1),
)
either(
    _F,
    "language-model-with-ignored-tokens",
    made(
        lambda s, i: F.cross_entropy(
            s.out(s.table(i)).flatten(0, 1),
            torch.where(i[:, :1] * (torch.arange(4) > 0) > 1, -100, i).flatten(),
        ),
        table=layer(nn.Embedding, 5, 3),
        out=linear(3, 5),
    ),
    ids(4),
    told=WEIGHTED,
)
refused(
    _F,
    "weights-in-the-loss-of-forward-squared",
    made(lambda s, x: (s.fc(x).mean() - s.target).square(), fc=linear(), target=weight()),
    normal(3),
)
either(
    _F,
    "penalty-in-forward",
    made(lambda s, x: s.fc(x).square().mean() + 0.1 * s.fc.weight.square().sum(), fc=linear()),
    normal(3),
)
either(
    _F,
    "loss-of-parameters-alone-in-forward",
    made(
        lambda s, x: s.fc(x).square().mean() + 0.1 * s.prior.square().sum(),
        fc=linear(),
        prior=weight(3),
    ),
    normal(3),
    warned=NO_MOMENTS,
)


# ---- writes
# --------------------------------------------------------------------------------------------------

_W = "writes"


def written(
    name: str,
    write: Callable[[Tensor, Tensor], Tensor],
    expect: Callable[..., None],
    **options: Any,
) -> None:
    """Add a write of h into a fresh y, which has the shape of the batch first, between two layers
    and after the last.
    """
    for where, make in {
        "": made(
            lambda s, x: s.out(write(torch.zeros_like(x), s.fc(x))),
            fc=linear(4, 4),
            out=linear(4, 4),
        ),
        "-last": made(lambda s, x: write(x * 0.5, s.fc(x)), fc=linear(4, 4)),
    }.items():
        expect(_W, name + where, make, normal(4, 4), **options)


def put(y: Tensor, at: Any, h: Tensor) -> Tensor:
    y[at] = h
    return y


def into_data(y: Tensor, h: Tensor) -> Tensor:
    y.detach()[:] = h.detach().roll(1, 0)
    return y + h


def into_rows(y: Tensor, h: Tensor) -> Tensor:
    for i in range(len(h)):
        y[i] = h[i]
    return y


def into_other_rows(y: Tensor, h: Tensor) -> Tensor:
    for i in range(len(h)):
        y[i] = h[i - 1]
    return y


def into_steps(y: Tensor, h: Tensor) -> Tensor:
    for t in range(4):
        y[:, t] = h[:, t] * (t + 1)
    return y


def into_views(y: Tensor, h: Tensor) -> Tensor:
    y.transpose(0, 1)[1:3] = h.transpose(0, 1)[:2]
    return y


def into_masked(y: Tensor, h: Tensor) -> Tensor:
    mask = h.detach() > 0
    y[mask] = h[mask]
    return y


def into_masked_wrongly(y: Tensor, h: Tensor) -> Tensor:
    mask = h.detach() > 0
    y[mask] = h[mask].flip(0)
    return y


written("all", lambda y, h: put(y, slice(None), h), exact)
written("ellipsis", lambda y, h: put(y, ..., h), exact)
written("rows-by-an-order", lambda y, h: put(y, order(h), h), refused)
written("rows-by-counting", lambda y, h: put(y, torch.arange(len(h)), h), either)
written("rows-reversed", lambda y, h: put(y, torch.arange(len(h)).flip(0), h), refused)
written("rows-shifted-by-slices", lambda y, h: put(y, slice(1, None), h[:-1]) + 0 * h, refused)
written(
    "transposed",
    lambda y, h: put(y, slice(None), h.transpose(0, 1)) if len(h) == 4 else put(y, slice(None), h),
    refused,
)
written("flipped", lambda y, h: put(y, slice(None), h.flip(0)), refused)
written("permuted-slice", lambda y, h: put(y, (slice(None), 0), h[order(h), 1]), refused)
written("one-step", lambda y, h: put(y, (slice(None), 2), h[:, 1]), exact)
written("steps", into_steps, exact)
written("columns", lambda y, h: put(y, (..., 1), h[..., 0]), exact)
written("columns-by-list", lambda y, h: put(y, (slice(None), [2, 0]), h[:, :2]), exact)
written("one-sample", lambda y, h: put(y, 0, h[0]), either, truth="graph")
written("first-sample-everywhere", lambda y, h: put(y, slice(None), h[0]), refused)
written("first-sample-at-a-step", lambda y, h: put(y, (slice(None), 0), h[0, 0]), refused)
written("mask-fill", lambda y, h: put(h * 1.0, h.detach() > 0, 0.5), exact)
written("masked", into_masked, either)
written("masked-wrongly", into_masked_wrongly, refused)
written("copied", lambda y, h: y.copy_(h), exact)
written("copied-transposed", lambda y, h: y.copy_(h.transpose(0, 1) if len(h) == 4 else h), refused)
written("copied-rolled", lambda y, h: y.copy_(h.roll(2, 0)), refused)
written("index-put", lambda y, h: y.index_put((order(h),), h), refused)
written(
    "index-put-at-steps",
    lambda y, h: y.index_put((torch.arange(len(h))[:, None], torch.tensor([[1, 3]])), h[:, :2]),
    either,
)
written(
    "index-put-accumulated",
    lambda y, h: y.index_put_((torch.zeros(len(h), dtype=torch.long),), h, accumulate=True),
    refused,
)
written("scatter_", lambda y, h: y.scatter_(0, order(h)[:, None, None].expand_as(h), h), refused)
written(
    "scatter_-over-steps",
    lambda y, h: y.scatter_(1, torch.tensor([3, 0, 1, 2])[None, :, None].expand_as(h), h),
    exact,
)
written(
    "masked_scatter", lambda y, h: y.masked_scatter(y.new_ones(y.shape) > 0, h.flip(0)), refused
)
written("slice_scatter", lambda y, h: y.slice_scatter(h[:, :2], dim=1, start=2), exact)
written(
    "slice_scatter-over-samples",
    lambda y, h: y.slice_scatter(h[:1], dim=0, start=len(h) - 1),
    refused,
)
written("select_scatter", lambda y, h: y.select_scatter(h[:, 0], 1, 3), exact)
written("select_scatter-over-samples", lambda y, h: y.select_scatter(h[0], 0, len(h) - 1), refused)
written("index_copy_", lambda y, h: y.index_copy_(0, order(h), h), refused)
written(
    "index_copy_-over-steps", lambda y, h: y.index_copy_(1, torch.tensor([3, 0]), h[:, :2]), exact
)
written("index_fill_", lambda y, h: (h * 1.0).index_fill_(1, torch.tensor([3, 0]), 0.5), exact)
written("row-by-row", into_rows, either)
written("other-rows", into_other_rows, refused)
written("into-a-view", into_views, exact)
written("into-detached", into_data, refused)
written("addition-in-place-of-rolled", lambda y, h: y.add_(h.roll(2, 0)), refused)
written(
    "time-first-buffer",
    lambda y, h: put(torch.zeros(4, len(h), 4), slice(None), h.transpose(0, 1)).transpose(0, 1),
    exact,
)
written("ones-by-a-diagonal", lambda y, h: torch.diag_embed(h).sum(-1), exact)
refused(
    _W,
    "state-kept-from-the-last-sample",
    made(
        lambda s, x: (h := s.fc(x), s.memory.copy_(h[-1].detach()), h + s.memory)[2],
        fc=linear(),
        memory=lambda: nn.Buffer(torch.zeros(3)),
    ),
    normal(3),
)
refused(
    _W,
    "out-argument-rolled",
    made(lambda s, x: s.fc(torch.add(x.roll(1, 0), 1.0, out=torch.empty_like(x))), fc=linear()),
    normal(3),
)
exact(
    _W,
    "out-argument",
    made(lambda s, x: s.fc(torch.add(x, 1.0, out=torch.empty_like(x))), fc=linear()),
    normal(3),
)
exact(
    _W,
    "out-argument-time-first",
    made(
        lambda s, x: s.fc(
            torch.mul(x.transpose(0, 1), 2.0, out=torch.empty(4, len(x), 3))
        ).transpose(0, 1),
        fc=linear(),
    ),
    normal(4, 3),
    batches=(4, 2, 1),
)
either(
    _W,
    "input-written-through-numpy",
    made(lambda s, x: (c := x.clone(), c.numpy().__imul__(2.0), s.fc(c))[2], fc=linear()),
    normal(3),
)
refused(
    _W,
    "input-rolled-through-numpy",
    made(
        lambda s, x: (
            c := x.clone(),
            c.numpy().__setitem__(slice(None), c.roll(1, 0).numpy()),
            s.fc(c),
        )[2],
        fc=linear(),
    ),
    normal(3),
)
refused(
    _W,
    "data-replaced",
    made(lambda s, x: (c := x.clone(), setattr(c, "data", x.flip(0)), s.fc(c))[2], fc=linear()),
    normal(3),
)


# ---- spellings
# --------------------------------------------------------------------------------------------------

_S = "spelling"


def spelled(name: str, reduce: Callable[[Tensor, int], Tensor]) -> None:
    """Add an operation over features, with positive and negative numbers, and over samples; sizes
    are the same.
    """

    def over(at: int) -> Made:
        return made(
            lambda s, x: s.out(s.fc(x) * 0.5 - reduce(s.fc(x), at)),
            fc=linear(4, 4),
            out=linear(4, 4),
        )

    exact(_S, f"{name}-over-features", over(1), normal(4))
    exact(_S, f"{name}-over-features-from-behind", over(-1), normal(4))
    refused(_S, f"{name}-over-samples", over(0), normal(4))
    refused(_S, f"{name}-over-samples-from-behind", over(-2), normal(4))


spelled("sum-axis", lambda h, a: h.sum(axis=a, keepdims=True))
spelled("sum-function", lambda h, a: torch.sum(input=h, axis=(a,), keepdim=True))
spelled("mean-axis", lambda h, a: torch.mean(h, axis=a, keepdims=True))
spelled("amax-axis", lambda h, a: torch.amax(h, axis=a, keepdim=True))
spelled("amin-list", lambda h, a: h.amin(dim=[a], keepdim=True))
spelled("max-axis", lambda h, a: torch.max(h, axis=a, keepdim=True).values)
spelled("min-dim", lambda h, a: h.min(dim=a, keepdim=True)[0])
spelled(
    "std-axis",
    lambda h, a: (
        torch.std(h.sin() + h, axis=a, correction=0, keepdim=True) if h.shape[a] > 1 else h * 0
    ),
)
spelled("var-mean", lambda h, a: torch.var_mean(h, dim=a, correction=0, keepdim=True)[0])
spelled("logsumexp-axis", lambda h, a: torch.logsumexp(h, axis=a, keepdim=True))
spelled("prod-axis", lambda h, a: torch.prod(h, axis=a, keepdim=True))
spelled("softmax-axis", lambda h, a: torch.softmax(h, axis=a))
spelled("functional-softmax", lambda h, a: F.softmax(input=h, dim=a))
spelled("log-softmax-module", lambda h, a: nn.LogSoftmax(dim=a)(h))
spelled("cumsum-axis", lambda h, a: h.cumsum(axis=a))
spelled("cumprod-keyword", lambda h, a: torch.cumprod(input=h, dim=a))
spelled("flip-dims", lambda h, a: torch.flip(input=h, dims=(a,)))
spelled("roll-keyword", lambda h, a: torch.roll(input=h, shifts=2, dims=a))
spelled("sort-keyword", lambda h, a: torch.sort(input=h, dim=a, descending=True).values)
spelled("norm-axis", lambda h, a: torch.norm(h, dim=a, keepdim=True))
spelled("vector-norm", lambda h, a: torch.linalg.vector_norm(x=h, dim=a, keepdim=True))
spelled("normalize", lambda h, a: F.normalize(h, 2.0, a))
spelled("diff-axis", lambda h, a: torch.diff(h, axis=a).sum(dim=a, keepdim=True))
spelled("nansum", lambda h, a: torch.nansum(h, dim=a, keepdim=True))
spelled("logcumsumexp", lambda h, a: torch.logcumsumexp(input=h, dim=a))
spelled("take-along-dim", lambda h, a: torch.take_along_dim(h, h.argsort(dim=a), dim=a))
spelled("gather-keyword", lambda h, a: torch.gather(input=h, dim=a, index=h.argsort(a)))
spelled("median-axis", lambda h, a: torch.median(h, axis=a, keepdim=True).values)
spelled("renorm", lambda h, a: torch.renorm(h, p=2, dim=1 - a % 2, maxnorm=0.1))
spelled(
    "glu",
    lambda h, a: (
        F.glu(h, dim=a).repeat(*((2, 1) if a % 2 == 0 else (1, 2))) if h.shape[a] > 1 else h
    ),
)
spelled("unbind-axis", lambda h, a: torch.stack(torch.unbind(h, dim=a)[::-1], dim=a))
spelled(
    "split-axis",
    lambda h, a: torch.cat(torch.split(tensor=h, split_size_or_sections=1, dim=a)[::-1], dim=a),
)


def arranged(
    name: str, arrange: Callable[[Tensor], Tensor], expect: Callable[..., None] = exact
) -> None:
    """Add a rearrangement of [batch, 4, 4] that ends batch first."""
    expect(
        _S,
        name,
        made(lambda s, x: s.out(arrange(s.fc(x))), fc=linear(4, 4), out=linear(4, 4)),
        normal(4, 4),
    )


arranged("swapaxes-keywords", lambda h: torch.swapaxes(h, axis0=1, axis1=2))
arranged("swapdims", lambda h: h.swapdims(0, 1).swapdims(1, 0))
arranged(
    "moveaxis-keywords",
    lambda h: torch.moveaxis(torch.moveaxis(h, source=0, destination=-1), -1, 0),
)
arranged("movedim-lists", lambda h: h.movedim((0, 1, 2), (2, 0, 1)).movedim((2, 0, 1), (0, 1, 2)))
arranged("transpose-keywords", lambda h: torch.transpose(input=h, dim0=-1, dim1=-2))
arranged(
    "permute-keywords", lambda h: torch.permute(input=h, dims=(1, 0, -1)).permute(dims=(1, 0, 2))
)
arranged("adjoint", lambda h: h.adjoint() + h.mT + h.mH)
arranged("rot90-inside", lambda h: torch.rot90(h, k=1, dims=(1, 2)))
arranged("rot90-with-samples", lambda h: torch.rot90(h, k=2, dims=(0, 1)), refused)
arranged("fliplr", torch.fliplr)
arranged("concatenate-axis", lambda h: torch.concatenate((h[:, :1], h[:, 1:].cos()), axis=1))
arranged("hstack", lambda h: torch.hstack((h[:, :2], h[:, 2:].cos())))
arranged("vstack-of-halves", lambda h: torch.vstack((h[1:], h[:1])), refused)
arranged("dstack", lambda h: torch.dstack((h[..., :1], h[..., 1:])))
arranged("squeeze-axis", lambda h: h[:, None].squeeze(axis=1))
arranged("squeeze-of-tuple", lambda h: h[:, None, :, None].squeeze((1, 3)))
arranged(
    "unsqueeze-keyword", lambda h: torch.unsqueeze(input=h, dim=1).flatten(start_dim=1, end_dim=2)
)
arranged("expand-dims-by-none", lambda h: h[None, :, None][0, :, 0])
arranged("stack-keyword", lambda h: torch.stack(tensors=[h, h.cos()], dim=1).sum(axis=1))
arranged("cat-from-behind", lambda h: torch.cat(tensors=[h[:, :1], h[:, 1:]], dim=-2))
arranged("tile", lambda h: torch.tile(h, dims=(1, 2, 1))[:, ::2])
arranged("tile-samples", lambda h: torch.tile(h, (2, 1, 1))[1 : len(h) + 1], refused)
arranged(
    "repeat-interleave-samples", lambda h: torch.repeat_interleave(h, 2, dim=0)[: len(h)], refused
)
arranged("repeat-interleave-steps", lambda h: h.repeat_interleave(repeats=2, dim=1)[:, 1::2])
arranged("select-keyword", lambda h: h.select(dim=1, index=2)[:, None].expand(-1, 4, -1))
arranged(
    "narrow-keyword", lambda h: torch.narrow(input=h, dim=1, start=1, length=2).repeat(1, 2, 1)
)
arranged("tensor-split-indices", lambda h: torch.cat(torch.tensor_split(h, (1, 3), dim=1)[::-1], 1))
arranged("view-flattened-wrongly", lambda h: h + h.transpose(0, 1).reshape(len(h), 4, 4), refused)
arranged("view-as-other", lambda h: h.reshape(4, -1, 4).reshape(len(h), 4, 4))
arranged("ravel-and-back", lambda h: h.ravel().view(h.shape))
arranged("as-strided", lambda h: h.contiguous().as_strided((len(h), 4, 4), (16, 1, 4)), either)
arranged(
    "as-strided-across",
    lambda h: torch.as_strided(h.contiguous(), (len(h), 4, 4), (4, 4, 1)),
    refused,
)
arranged(
    "unfold-steps", lambda h: F.pad(h, (0, 0, 1, 1)).unfold(dimension=1, size=3, step=1).sum(-1)
)
arranged(
    "tensordot-keywords", lambda h: torch.tensordot(h, torch.eye(4).flip(0), dims=([1], [0])).mT
)
arranged("kron", lambda h: torch.kron(h, torch.ones(1, 2, 1, dtype=h.dtype))[:, ::2])
arranged("meshgrid-free-outer", lambda h: torch.einsum("bi,bj->bij", h[:, 0], h[:, 1]))
arranged(
    "block-diagonal-of-samples",
    lambda h: torch.block_diag(*h).view(len(h), 4, len(h), 4).sum(2),
    either,
)
arranged("cartesian-of-samples", lambda h: (h[:, None] + h[None, :]).sum(1), refused)
arranged("pixel-shuffle", lambda h: F.pixel_shuffle(h[..., None], 2).reshape(len(h), 4, 4))
arranged("channel-shuffle", lambda h: F.channel_shuffle(h[..., None], 2)[..., 0])


# ---- out of sight
# --------------------------------------------------------------------------------------------------

_O = "out-of-sight"


class Times(torch.autograd.Function):
    """Double x, in torch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2.0


class TimeFirst(torch.autograd.Function):
    """Swap the first two dimensions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.transpose(0, 1).clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.transpose(0, 1).clone()


class ThroughNumpy(torch.autograd.Function):
    """Take the sine, with NumPy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.from_numpy(x.detach().numpy().copy()).sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return torch.from_numpy(g.numpy() * ctx.saved_tensors[0].detach().cos().numpy())


class TimeFirstThroughNumpy(torch.autograd.Function):
    """Swap the first two dimensions, with NumPy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy().swapaxes(0, 1).copy())

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return torch.from_numpy(g.numpy().swapaxes(0, 1).copy())


class RolledThroughNumpy(torch.autograd.Function):
    """Roll samples, with NumPy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy()).roll(2, 0)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.roll(-2, 0)


class Rolled(torch.autograd.Function):
    """Roll samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.roll(2, 0)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.roll(-2, 0)


class MeetsInBackward(torch.autograd.Function):
    """Leave values alone, and centre gradients over samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g - g.mean(0)


class WithWeights(torch.autograd.Function):
    """Multiply by a matrix."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w.t(), x.flatten(0, -2).t() @ g.flatten(0, -2)


class Reversal(torch.autograd.Function):
    """Reverse gradients, as adversarial domain adaptation does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -0.5 * g


def scripted(function: Callable[..., Any]) -> Any:
    """Return the scripted function; torch warns that scripting is on its way out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(function)


def compiled(function: Callable[..., Any]) -> Any:
    return torch.compile(function, backend="eager")


def _double(x: Tensor) -> Tensor:
    return torch.sin(x) * 2.0


def _time_first(x: Tensor) -> Tensor:
    return torch.transpose(x, 0, 1).contiguous()


def _rolled(x: Tensor) -> Tensor:
    return torch.roll(x, 2, 0)


def _centred(x: Tensor) -> Tensor:
    return x - torch.mean(x, 0, keepdim=True)


def _product(x: Tensor, w: Tensor) -> Tensor:
    return torch.matmul(x, w)


script_double, script_time_first, script_rolled = (
    scripted(_double),
    scripted(_time_first),
    scripted(_rolled),
)
script_centred, script_product = scripted(_centred), scripted(_product)


@torch.library.custom_op("adversarial::time_first", mutates_args=())
def op_time_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1).clone()


@torch.library.custom_op("adversarial::double", mutates_args=())
def op_double(x: Tensor) -> Tensor:
    return x * 2.0


@torch.library.custom_op("adversarial::rolled", mutates_args=())
def op_rolled(x: Tensor) -> Tensor:
    return x.roll(2, 0)


@torch.library.custom_op("adversarial::product", mutates_args=())
def op_product(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


torch.library.register_autograd("adversarial::time_first", lambda ctx, g: g.transpose(0, 1).clone())
torch.library.register_autograd("adversarial::double", lambda ctx, g: g * 2.0)
torch.library.register_autograd("adversarial::rolled", lambda ctx, g: g.roll(-2, 0))
torch.library.register_autograd(
    "adversarial::product",
    lambda ctx, g: (
        g @ ctx.saved_tensors[1].t(),
        ctx.saved_tensors[0].flatten(0, -2).t() @ g.flatten(0, -2),
    ),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)

for kind, elementwise, time_first, rolled in (
    ("script", script_double, script_time_first, script_rolled),
    ("function", Times.apply, TimeFirst.apply, Rolled.apply),
    ("numpy-function", ThroughNumpy.apply, TimeFirstThroughNumpy.apply, RolledThroughNumpy.apply),
    ("custom-op", op_double, op_time_first, op_rolled),
):
    for family_of, kept in (("", linear(3, 3)), ("-batch-of-features", linear(3, 4))):
        either(
            _O,
            f"{kind}-elementwise{family_of}",
            made(lambda s, x, f=elementwise: s.out(f(s.fc(x))[..., :3]), fc=kept, out=linear()),
            normal(4, 3),
        )
    either(
        _O,
        f"{kind}-elementwise-last",
        made(lambda s, x, f=elementwise: f(s.fc(x)), fc=linear()),
        normal(3),
    )
    either(
        _O,
        f"{kind}-elementwise-first",
        made(lambda s, x, f=elementwise: s.fc(f(x)), fc=linear()),
        normal(3),
    )
    either(
        _O,
        f"{kind}-time-first",
        made(
            lambda s, x, f=time_first: s.out(f(s.fc(x))).transpose(0, 1), fc=linear(), out=linear()
        ),
        normal(4, 3),
        batches=(4, 2, 1),
    )
    either(
        _O,
        f"{kind}-time-first-of-the-input",
        made(lambda s, x, f=time_first: s.out(f(x)).transpose(0, 1), out=linear()),
        normal(4, 3),
        batches=(4, 2, 1),
    )
    either(
        _O,
        f"{kind}-time-first-alike",
        made(
            lambda s, x, f=time_first: s.out(f(s.fc(x))).transpose(0, 1), fc=linear(), out=linear()
        ),
        alike(4, 3),
    )
    either(
        _O,
        f"{kind}-time-first-zero",
        made(
            lambda s, x, f=time_first: s.out(f(x @ s.mix)).transpose(0, 1),
            mix=zero(3, 3),
            out=linear(),
        ),
        normal(4, 3),
    )
    refused(
        _O,
        f"{kind}-rolled",
        made(lambda s, x, f=rolled: s.out(f(s.fc(x))), fc=linear(), out=linear()),
        normal(3),
    )
    refused(
        _O, f"{kind}-rolled-last", made(lambda s, x, f=rolled: f(s.fc(x)), fc=linear()), normal(3)
    )
    refused(
        _O, f"{kind}-rolled-input", made(lambda s, x, f=rolled: s.fc(f(x)), fc=linear()), normal(3)
    )
for kind, product in (
    ("script", script_product),
    ("function", WithWeights.apply),
    ("custom-op", op_product),
):
    either(
        _O,
        f"{kind}-with-a-parameter",
        made(lambda s, x, f=product: f(s.fc(x), s.mix), fc=linear(), mix=weight(3, 3)),
        normal(4, 3),
        warned=NO_MOMENTS,
    )
    either(
        _O,
        f"{kind}-with-the-only-parameter",
        made(lambda s, x, f=product: f(x, s.mix), mix=weight(3, 3)),
        normal(4, 3),
        warned=NO_MOMENTS,
    )
    either(
        _O,
        f"{kind}-with-a-shared-parameter",
        made(lambda s, x, f=product: f(x, s.mix) + x @ s.mix, mix=weight(3, 3)),
        normal(4, 3),
        warned=NO_MOMENTS,
    )
    either(
        _O,
        f"{kind}-with-a-derived-parameter",
        made(lambda s, x, f=product: f(x, s.mix * 2), mix=weight(3, 3)),
        normal(4, 3),
        warned=NO_MOMENTS,
    )
refused(
    _O,
    "script-centred",
    made(lambda s, x: s.out(script_centred(s.fc(x))), fc=linear(), out=linear()),
    normal(3),
)
either(
    _O,
    "reversed-gradient",
    made(lambda s, x: s.out(Reversal.apply(s.fc(x))), fc=linear(), out=linear()),
    normal(3),
)
refused(
    _O,
    "meets-in-backward",
    made(lambda s, x: s.out(MeetsInBackward.apply(s.fc(x))), fc=linear(), out=linear()),
    normal(3),
)
refused(
    _O,
    "meets-in-backward-by-a-hook",
    made(
        lambda s, x: (h := s.fc(x), h.register_hook(lambda g: g - g.mean(0)), s.out(h))[2],
        fc=linear(),
        out=linear(),
    ),
    normal(3),
)
either(
    _O,
    "scaled-in-backward-by-a-hook",
    made(
        lambda s, x: (h := s.fc(x), h.register_hook(lambda g: 2 * g), s.out(h))[2],
        fc=linear(),
        out=linear(),
    ),
    normal(3),
)
either(
    _O,
    "compiled-function",
    made(lambda s, x: s.out(compiled(_double)(s.fc(x))), fc=linear(), out=linear()),
    normal(4, 3),
    batches=(4,),
)
either(
    _O,
    "compiled-time-first",
    made(
        lambda s, x: s.out(compiled(_time_first)(s.fc(x))).transpose(0, 1),
        fc=linear(),
        out=linear(),
    ),
    normal(4, 3),
    batches=(4,),
)
refused(
    _O,
    "compiled-rolled",
    made(lambda s, x: s.out(compiled(_rolled)(s.fc(x))), fc=linear(), out=linear()),
    normal(3),
    batches=(4,),
)
either(
    _O,
    "compiled-with-a-parameter",
    made(lambda s, x: compiled(_product)(s.fc(x), s.mix), fc=linear(), mix=weight(3, 3)),
    normal(3),
    batches=(4,),
    warned=NO_MOMENTS,
)


# ---- statistics of the batch that come back as constants
# -------------------------------------------------------------

_K = "constants-from-the-batch"


def constant(
    name: str, of: Callable[[Tensor], Any], expect: Callable[..., None] = refused, **options: Any
) -> None:
    expect(
        _K,
        name,
        made(lambda s, x: s.out(s.fc(x) * of(s.fc(x))), fc=linear(), out=linear()),
        options.pop("inputs", normal(3)),
        **options,
    )


def quietly(h: Tensor) -> Tensor:
    with torch.no_grad():
        return h.mean(0)


def inferred(h: Tensor) -> Tensor:
    with torch.inference_mode():
        value = h.std(correction=0).add(1.0)
    return value.clone()


constant("detached-mean", lambda h: h.detach().mean(0))
constant("data-mean", lambda h: h.data.mean(0))
constant("mean-under-no-grad", quietly)
constant("inference-mode", inferred)
constant("mean-item", lambda h: h.mean().item())
constant("mean-float", lambda h: float(h.mean()))
constant("mean-tolist", lambda h: torch.tensor(h.mean(0).tolist(), dtype=h.dtype))
constant("mean-numpy", lambda h: torch.from_numpy(h.detach().numpy().mean(0)))
constant("round-trip-rolled", lambda h: torch.from_numpy(h.detach().numpy()[::-1].copy()))
constant("round-trip", lambda h: torch.from_numpy(h.detach().numpy().copy()), either)
constant("as-tensor-of-array", lambda h: torch.as_tensor(h.detach().numpy()), either)
constant("largest-int", lambda h: int((h.abs().max() * 10).long()))
constant("length-of-nonzero", lambda h: float(len((h > 0).nonzero())))
constant("count-of-masked", lambda h: float(h[h > 0].numel()))
constant("unique-count", lambda h: float(h.detach().round().unique().numel()))
constant("detached-flipped", lambda h: h.detach().flip(0))
constant("detached-itself", lambda h: h.detach(), exact)
constant("batch-size", lambda h: float(len(h)), exact, truth="graph")
constant("batch-size-of-shape", lambda h: h.shape[0] ** -0.5, exact, truth="graph")
constant("batch-size-of-numel", lambda h: 3.0 / h.numel(), exact, truth="graph")
constant("first-sample", lambda h: h[0].detach())
constant("first-sample-item", lambda h: h[0, 0].item())
constant("branch-on-the-mean", lambda h: 2.0 if h.mean() != h[0].mean() else 0.5)
constant("branch-on-any", lambda h: 2.0 if (h > h[:1] + 0.01).any() else 0.5)
constant("branch-on-all-finite", lambda h: 2.0 if torch.isfinite(h).all() else 0.5, either)
constant("format-of-the-mean", lambda h: float(f"{h.mean():.3f}"))
constant(
    "own-item-per-sample",
    lambda h: torch.stack([torch.tensor(r.mean().item(), dtype=h.dtype) for r in h])[:, None],
    either,
)
constant("index-of-the-largest", lambda h: float(h.flatten().argmax()) + 1.0)
either(
    _K,
    "longest-length",
    made(
        lambda s, x, n: (
            s.fc(x[:, : int(n.max())]) * (torch.arange(int(n.max())) < n[:, None])[..., None]
        ).sum(1),
        fc=linear(),
    ),
    lambda b: (torch.randn(b, 4, 3), torch.randint(1, 5, (b,))),
)
refused(
    _K,
    "over-the-longest-length",
    made(lambda s, x, n: s.fc(x).sum(1) / int(n.max()), fc=linear()),
    lambda b: (torch.randn(b, 4, 3), torch.arange(b) % 4 + 1),
)
refused(
    _K,
    "over-the-longest-length-as-tensor",
    made(lambda s, x, n: s.fc(x).sum(1) / n.max(), fc=linear()),
    lambda b: (torch.randn(b, 4, 3), torch.arange(b) % 4 + 1),
)


def running(use_new: bool) -> Callable[..., Tensor]:
    def forward(s: Any, x: Tensor) -> Tensor:
        h = s.fc(x)
        old = s.average.clone()
        with torch.no_grad():
            s.average.mul_(0.9).add_(0.1 * h.mean(0))
        return s.out(h - (s.average if use_new else old))

    return forward


refused(
    _K,
    "running-mean-updated-before-use",
    made(running(True), fc=linear(), out=linear(), average=lambda: nn.Buffer(torch.zeros(3))),
    normal(3),
)
either(
    _K,
    "running-mean-updated-after-use",
    made(running(False), fc=linear(), out=linear(), average=lambda: nn.Buffer(torch.zeros(3))),
    normal(3),
)
refused(
    _K,
    "batch-renorm-by-hand",
    made(
        lambda s, x: s.out(
            (h := s.fc(x), (h - h.detach().mean(0)) / (h.detach().var(0, correction=0) + 1).sqrt())[
                1
            ]
        ),
        fc=linear(),
        out=linear(),
    ),
    normal(3),
)
refused(
    _K,
    "data-dependent-scale-of-the-input",
    made(lambda s, x: s.fc(x / x.abs().max()), fc=linear()),
    normal(3),
)
refused(_K, "centred-input", made(lambda s, x: s.fc(x - x.mean(0)), fc=linear()), normal(3))
refused(
    _K,
    "centred-input-by-item",
    made(lambda s, x: s.fc(x - x.mean().item()), fc=linear()),
    normal(3),
)
refused(
    _K, "rank-of-the-input", made(lambda s, x: s.fc(x.argsort(0).double()), fc=linear()), normal(3)
)
refused(
    _K,
    "quantised-by-the-largest",
    made(
        lambda s, x: s.fc(
            torch.fake_quantize_per_tensor_affine(
                x.float(), float(x.abs().max()) / 7, 0, -8, 7
            ).double()
        ),
        fc=linear(),
    ),
    normal(3),
)
either(
    _K,
    "dropout-mask-shared-by-samples",
    made(lambda s, x: s.fc(x) * (torch.rand(1, 3, dtype=x.dtype) > 0.5), fc=linear()),
    normal(3),
)


# ---- other ways in than forward
# --------------------------------------------------------------------------------------

_E = "entry"


class Encoder(nn.Module):
    """A model with methods beside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(3, 3), nn.Linear(3, 3)
        self.mix, self.shift = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.encode(x))

    def encode(self, x: Tensor) -> Tensor:
        return self.fc(x.flatten(0, -2)).view(*x.shape[:-1], 3) @ self.mix + self.shift

    def fold(self, x: Tensor) -> Tensor:
        return self.fc(x.flatten(0, 1)).view(x.shape)

    def time_first(self, x: Tensor) -> Tensor:
        return self.fc(x.transpose(0, 1)).transpose(0, 1)

    def bare(self, x: Tensor) -> Tensor:
        return x @ self.mix + self.shift

    def shuffled(self, x: Tensor) -> Tensor:
        return self.out(self.fc(x).roll(2, 0))


exact(_E, "forward-that-calls-a-method", Encoder, normal(4, 3))
either(
    _E,
    "method-that-folds-time",
    Encoder,
    normal(4, 3),
    call=lambda m, x: m.fold(x),
    warned=NO_MOMENTS,
    told=OUTSIDE,
)
either(
    _E,
    "method-that-folds-one-step",
    Encoder,
    normal(1, 3),
    call=lambda m, x: m.fold(x),
    warned=NO_MOMENTS,
)
either(
    _E,
    "method-time-first",
    Encoder,
    normal(4, 3),
    call=lambda m, x: m.time_first(x),
    warned=NO_MOMENTS,
    told=OUTSIDE,
    batches=(4, 2, 1),
)
either(
    _E,
    "method-with-bare-parameters",
    Encoder,
    normal(3),
    call=lambda m, x: m.bare(x),
    warned=NO_MOMENTS,
)
either(
    _E,
    "method-with-both",
    Encoder,
    normal(4, 3),
    call=lambda m, x: m.encode(x),
    warned=NO_MOMENTS,
    told=OUTSIDE,
)
either(
    _E,
    "method-then-a-submodule",
    Encoder,
    normal(4, 3),
    call=lambda m, x: m.out(m.encode(x)),
    warned=NO_MOMENTS,
)
refused(_E, "method-that-shuffles", Encoder, normal(3), call=lambda m, x: m.shuffled(x))
either(_E, "submodule-alone", Encoder, normal(3), call=lambda m, x: m.fc(x))
either(
    _E,
    "submodule-alone-folded",
    Encoder,
    normal(4, 3),
    call=lambda m, x: m.fc(x.flatten(0, 1)).view(x.shape),
    warned=NO_MOMENTS,
    told=OUTSIDE,
)
either(_E, "submodules-by-hand", Encoder, normal(3), call=lambda m, x: m.out(m.fc(x).tanh()))
either(
    _E,
    "forward-and-method",
    Encoder,
    normal(4, 3),
    call=lambda m, x: m(x) + m.fold(x),
    warned=NO_MOMENTS,
)
either(
    _E,
    "forward-and-bare-parameter",
    Encoder,
    normal(4, 3),
    call=lambda m, x: m(x) @ m.mix,
    warned=NO_MOMENTS,
)
either(
    _E, "forward-twice-with-rolled-input", Encoder, normal(3), call=lambda m, x: m(x) + m(x.cos())
)
either(
    _E,
    "forward-by-its-name",
    Encoder,
    normal(4, 3),
    call=lambda m, x: m.forward(x),
    warned=NO_MOMENTS,
)
either(
    _E,
    "forward-unbound",
    Encoder,
    normal(4, 3),
    call=lambda m, x: type(m).forward(m, x),
    warned=NO_MOMENTS,
)
exact(_E, "keyword-input", Encoder, normal(4, 3), call=lambda m, x: m(x=x))
exact(_E, "several-forwards-one-backward", Encoder, pair(4, 3), call=lambda m, x, y: m(x) * m(y))


# ---- a first input that is not the batch
# -----------------------------------------------------------------------------

_1 = "first-input"


def distance(s: Any, prototypes: Tensor, x: Tensor) -> Tensor:
    return torch.cdist(s.fc(x), s.fc(prototypes))


def fixed(*shape: int) -> Tensor:
    return (
        torch.linspace(-1.0, 1.0, torch.Size(shape).numel(), dtype=torch.float64).view(shape).sin()
    )


class Distances(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, prototypes: Tensor, x: Tensor) -> Tensor:
        return distance(self, prototypes, x)


for count in (5, 4, 1):
    either(
        _1,
        f"{count}-prototypes-first",
        made(distance, fc=linear()),
        normal(3),
        call=lambda m, x, n=count: m(fixed(n, 3), x),
        batches=(4, 2, 1),
    )
    either(
        _1,
        f"{count}-positions-first",
        made(
            lambda s, p, x: s.fc(x[:, : len(p)]) + s.table(p),
            fc=linear(),
            table=layer(nn.Embedding, 5, 3),
        ),
        normal(5, 3),
        call=lambda m, x, n=count: m(torch.arange(n), x),
        batches=(4, 2, 1),
    )
    either(
        _1,
        f"{count}-keyword-first",
        Distances,
        normal(3),
        batches=(4, 2, 1),
        call=lambda m, x, n=count: m(prototypes=fixed(n, 3), x=x),
    )
either(
    _1,
    "temperature-first",
    made(lambda s, t, x: s.fc(x) / t, fc=linear()),
    normal(3),
    call=lambda m, x: m(torch.tensor(2.0), x),
)
either(
    _1,
    "one-temperature-first",
    made(lambda s, t, x: s.fc(x) / t, fc=linear()),
    normal(3),
    call=lambda m, x: m(torch.tensor([2.0]), x),
)
either(
    _1,
    "weights-of-features-first",
    made(lambda s, w, x: s.fc(x * w), fc=linear(4, 4)),
    normal(4),
    call=lambda m, x: m(fixed(4), x),
)
either(
    _1,
    "mask-of-steps-first",
    made(lambda s, m, x: (s.fc(x) * m[..., None]).sum(1), fc=linear()),
    normal(4, 3),
    call=lambda m, x: m(fixed(4) > 0, x),
    batches=(4, 2, 1),
)
either(
    _1,
    "square-mask-first",
    made(lambda s, m, x: (s.fc(x) @ x.mT).masked_fill(m, -1.0), fc=linear()),
    normal(4, 3),
    call=lambda m, x: m(torch.ones(4, 4).triu(1) > 0, x),
    batches=(4, 2, 1),
)
either(
    _1,
    "square-mask-second",
    made(lambda s, x, m: (s.fc(x) @ x.mT).masked_fill(m, -1.0), fc=linear()),
    normal(4, 3),
    call=lambda m, x: m(x, torch.ones(4, 4).triu(1) > 0),
    batches=(4, 2, 1),
)
either(
    _1,
    "support-set-second",
    made(lambda s, x, sup: s.fc(x) @ s.fc(sup).t(), fc=linear()),
    normal(3),
    call=lambda m, x: m(x, fixed(4, 3)),
    batches=(4, 2, 1),
)
either(
    _1,
    "graph-second",
    made(lambda s, x, a: a @ s.fc(x), fc=linear()),
    normal(4, 3),
    call=lambda m, x: m(x, fixed(4, 4)),
    batches=(4, 2, 1),
)
either(
    _1,
    "no-tensor-input",
    made(lambda s, rows: s.fc(torch.tensor(rows, dtype=torch.float64)), fc=linear()),
    normal(3),
    call=lambda m, x: m(x.tolist()),
)
either(
    _1,
    "input-from-an-attribute",
    made(lambda s: s.fc(s.held), fc=linear()),
    normal(3),
    call=lambda m, x: held(m, x),
)
exact(
    _1,
    "time-first-input-said",
    made(lambda s, x: s.fc(x), fc=linear()),
    normal(4, 3),
    batches=(4, 2, 1),
    call=lambda m, x: m(x.transpose(0, 1)).transpose(0, 1),
    options={"batch_dim": 1},
)
either(
    _1,
    "state-of-layers-first",
    made(lambda s, h, x: s.rnn(x, h)[0], rnn=layer(nn.RNN, 3, 3, batch_first=True)),
    normal(4, 3),
    call=lambda m, x: m(torch.zeros(1, len(x), 3), x),
    batches=(4, 2, 1),
)
exact(
    _1,
    "keyword-arguments-alone",
    made(lambda s, x: s.fc(x), fc=linear()),
    normal(3),
    call=lambda m, x: m(x),
)


def held(model: nn.Module, x: Tensor) -> Any:
    model.held = x
    try:
        return model()
    finally:
        del model.held


# ---- turns and micro-batches
# -----------------------------------------------------------------------------------------

_U = "turns"


def numbered(*shape: int) -> Callable[[int], Inputs]:
    return lambda batch: (torch.randn(batch, *shape), torch.arange(batch))


def in_turns(sizes: int, detail: Callable[[int], str]):
    """Return a use in which micro-batches of a few samples each take the head that their first
    number says.
    """

    def use(model: Any, inputs: Inputs, weights: Tensor) -> None:
        x, number = inputs
        for at in range(0, len(x), sizes):
            model.head = detail(int(number[at]) // sizes)
            part = slice(at, at + sizes)
            (losses(model(x[part]), weights[part]).sum() / len(x)).backward()

    return use


def by_head(s: Any, x: Tensor) -> Tensor:
    return getattr(s, s.head)(s.fc(x))


heads = made(by_head, fc=linear(), left=linear(), right=linear())
exact(
    _U,
    "two-heads",
    heads,
    numbered(3),
    use=in_turns(2, lambda k: ("left", "right")[k % 2]),
    batches=(4, 2, 1),
)
exact(
    _U,
    "two-heads-of-four-turns",
    heads,
    numbered(3),
    use=in_turns(1, lambda k: ("left", "right")[k % 2]),
)
exact(
    _U,
    "one-head-comes-last",
    heads,
    numbered(3),
    use=in_turns(1, lambda k: "right" if k == 3 else "left"),
)
exact(
    _U,
    "one-head-comes-first",
    heads,
    numbered(3),
    use=in_turns(1, lambda k: "right" if k == 0 else "left"),
)
exact(
    _U,
    "uneven-micro-batches",
    heads,
    numbered(3),
    use=in_turns(3, lambda k: "left"),
    batches=(4, 5),
)


def with_empty(sizes: tuple[int, ...]):
    def use(model: nn.Module, inputs: Inputs, weights: Tensor) -> None:
        at = 0
        for size in sizes:
            part = slice(at, at + size)
            (
                losses(model(*(t[part] for t in inputs)), weights[part]).sum() / len(weights)
            ).backward()
            at += size

    return use


plain = made(lambda s, x: torch.einsum("bd,de->be", s.fc(x), s.mix), fc=linear(), mix=weight(3, 3))
exact(_U, "empty-micro-batch-between", plain, normal(3), use=with_empty((1, 0, 3)), batches=(4,))
exact(_U, "empty-micro-batch-first", plain, normal(3), use=with_empty((0, 4)), batches=(4,))
exact(_U, "empty-micro-batch-last", plain, normal(3), use=with_empty((4, 0)), batches=(4,))
exact(_U, "accumulated-ones", plain, normal(3), use=accumulated(1))


def abandoned(model: nn.Module, inputs: Inputs, weights: Tensor) -> Any:
    """A forward without a backward, one under no_grad, one that fails; then a step."""
    model(*inputs)
    with torch.no_grad():
        model(*(t[:1] for t in inputs))
    with contextlib.suppress(RuntimeError):
        model(torch.ones(2, 7))
    output = model(*inputs)
    loss_of(output, weights).backward()
    return output


exact(_U, "abandoned-forwards", plain, normal(3), use=abandoned)


def kept_moments(model: nn.Module, inputs: Inputs, weights: Tensor) -> None:
    """Keep what was measured after the first micro-batch, and look at it again after the next."""
    (losses(model(*(t[:2] for t in inputs)), weights[:2]).sum() / len(weights)).backward()
    seen = [m for p in model.parameters() if (m := varreg.moments(p)) is not None]
    values = [(m.count, m.mean.clone(), m.second_moment.clone(), m.variance.clone()) for m in seen]
    if len(weights) > 2:
        (losses(model(*(t[2:] for t in inputs)), weights[2:]).sum() / len(weights)).backward()
    for m, (count, *kept) in zip(seen, values, strict=True):
        now = (m.mean, m.second_moment, m.variance)
        if m.count != count or not all(torch.equal(a, b) for a, b in zip(now, kept, strict=True)):
            raise SilentError("moments that were kept changed when the next micro-batch came")


exact(_U, "kept-moments", plain, normal(3), use=kept_moments, batches=(4, 5))
exact(
    _U,
    "kept-moments-of-a-bare-parameter",
    made(lambda s, x: x * s.gain, gain=weight(3)),
    normal(3),
    use=kept_moments,
    batches=(4, 5),
)


# ---- torch.func in forward
# -------------------------------------------------------------------------------------------

_V = "torch-func"


def ensemble(s: Any, x: Tensor) -> Tensor:
    members = (s.one, s.two)
    params, buffers = torch.func.stack_module_state(members)

    def run(p: Any, b: Any, v: Tensor) -> Any:
        return torch.func.functional_call(members[0], (p, b), (v,))

    return torch.vmap(run, in_dims=(0, 0, None), out_dims=1)(params, buffers, x)


def meta(s: Any, x: Tensor) -> Tensor:
    """Take one step of gradient descent inside of forward, for each batch."""
    params = dict(s.inner.named_parameters())
    inner = torch.func.functional_call(s.inner, params, (x,)).square().mean()
    grads = torch.autograd.grad(inner, list(params.values()), create_graph=True)
    fast = {n: p - 0.1 * g for (n, p), g in zip(params.items(), grads, strict=True)}
    return torch.func.functional_call(s.inner, fast, (x,))


def force(s: Any, x: Tensor) -> Tensor:
    """Return the derivative of an energy with respect to the input."""
    x = x.detach().requires_grad_()
    energy = s.out(s.fc(x).tanh()).sum()
    return torch.autograd.grad(energy, x, create_graph=True)[0]


either(
    _V,
    "vmap-with-a-parameter",
    made(lambda s, x: torch.vmap(lambda v: v @ s.mix)(x), mix=weight(3, 3)),
    normal(3),
    warned=NO_MOMENTS,
)
either(
    _V,
    "vmap-with-a-layer",
    made(lambda s, x: torch.vmap(s.fc)(x), fc=linear()),
    normal(3),
    warned=NO_MOMENTS,
)
either(
    _V,
    "vmap-of-steps",
    made(lambda s, x: torch.vmap(s.fc, in_dims=1, out_dims=1)(x), fc=linear()),
    normal(4, 3),
    warned=NO_MOMENTS,
    batches=(4, 2, 1),
)
either(
    _V,
    "vmap-after-a-layer",
    made(lambda s, x: torch.vmap(torch.sin)(s.fc(x)), fc=linear()),
    normal(3),
)
refused(
    _V,
    "vmap-over-features-that-mixes",
    made(
        lambda s, x: s.out(torch.vmap(lambda v: v.softmax(0), in_dims=1, out_dims=1)(s.fc(x))),
        fc=linear(),
        out=linear(),
    ),
    normal(3),
)
either(
    _V,
    "vmap-of-an-ensemble",
    made(ensemble, one=linear(), two=linear()),
    normal(3),
    warned=NO_MOMENTS,
)
either(
    _V,
    "functional-call-with-its-own",
    made(
        lambda s, x: torch.func.functional_call(s.fc, dict(s.fc.named_parameters()), (x,)),
        fc=linear(),
    ),
    normal(3),
    warned=NO_MOMENTS,
)
either(
    _V,
    "functional-call-with-others",
    made(
        lambda s, x: torch.func.functional_call(
            s.fc, {"weight": s.left @ s.right, "bias": s.fc.bias}, (x,)
        ),
        fc=linear(),
        left=weight(3, 2),
        right=weight(2, 3),
    ),
    normal(3),
    warned=NO_MOMENTS,
)
either(
    _V,
    "functional-call-of-the-observed",
    made(lambda s, x: s.fc(x), fc=linear()),
    normal(3),
    warned=NO_MOMENTS,
    call=lambda m, x: torch.func.functional_call(
        m, {n: p * 2 for n, p in m.named_parameters()}, (x,)
    ),
)
refused(_V, "meta-learning-step", made(meta, inner=linear()), normal(3))
either(
    _V,
    "derivative-of-an-energy",
    made(force, fc=linear(), out=linear(3, 1)),
    normal(3),
    warned=NO_MOMENTS,
)
either(
    _V,
    "jacobian-in-forward",
    made(
        lambda s, x: torch.vmap(torch.func.jacrev(lambda v: torch.tanh(v @ s.mix)))(x),
        mix=weight(3, 3),
    ),
    normal(3),
    warned=NO_MOMENTS,
)
either(
    _V,
    "jvp-in-forward",
    made(
        lambda s, x: torch.func.jvp(lambda v: torch.tanh(v @ s.mix), (x,), (torch.ones_like(x),))[
            1
        ],
        mix=weight(3, 3),
    ),
    normal(3),
    warned=NO_MOMENTS,
)
either(
    _V,
    "grad-of-a-function-in-forward",
    made(lambda s, x: torch.func.grad(lambda v: torch.tanh(v @ s.mix).sum())(x), mix=weight(3, 3)),
    normal(3),
    warned=NO_MOMENTS,
)


# ---- parameters that the loss uses
# -----------------------------------------------------------------------------------

_P = "used-by-the-loss"


def with_penalty(size: float, names: tuple[str, ...]):
    def use(model: nn.Module, inputs: Inputs, weights: Tensor) -> Any:
        output = model(*inputs)
        penalty = sum(model.get_parameter(n).square().sum() for n in names)
        (loss_of(output, weights) + size * penalty).backward()
        return output

    return use


def margin(model: Any, inputs: Inputs, weights: Tensor) -> Any:
    """Compare outputs with prototypes that live in the model and are used by the loss alone."""
    output = model(*inputs)
    loss_of(F.linear(F.normalize(output), F.normalize(model.prototypes)), weights).backward()
    return output


def sampled(model: Any, inputs: Inputs, weights: Tensor) -> Any:
    output = model(*inputs)
    loss_of(output * model.gain.exp() + model.gain, weights).backward()
    return output


body = made(lambda s, x: s.fc(x), fc=linear(), prior=weight(3))
either(_P, "penalty", body, normal(3), use=with_penalty(0.5, ("fc.weight",)), warned=NO_MOMENTS)
either(
    _P, "small-penalty", body, normal(3), use=with_penalty(1e-3, ("fc.weight",)), warned=NO_MOMENTS
)
either(
    _P,
    "penalty-on-the-loss's-own",
    body,
    normal(3),
    use=with_penalty(0.5, ("prior",)),
    warned=NO_MOMENTS,
)
either(
    _P,
    "prototypes-of-the-loss",
    made(lambda s, x: s.fc(x), fc=linear(), prototypes=weight(4, 3)),
    normal(3),
    use=margin,
    warned=NO_MOMENTS,
)
either(
    _P,
    "gain-of-the-loss",
    made(lambda s, x: s.fc(x), fc=linear(), gain=weight(1)),
    normal(3),
    use=sampled,
    warned=NO_MOMENTS,
)
either(
    _P,
    "gain-of-the-loss-and-of-forward",
    made(lambda s, x: s.fc(x) * s.gain, fc=linear(), gain=weight(1)),
    normal(3),
    use=sampled,
    warned=NO_MOMENTS,
)
either(
    _P,
    "layer-called-by-the-loss",
    made(lambda s, x: s.fc(x), fc=linear(), critic=linear(3, 1)),
    normal(3),
    warned=NO_MOMENTS,
    call=lambda m, x: m.critic(m(x)),
)
either(
    _P,
    "layer-called-by-the-loss-folded",
    made(lambda s, x: s.fc(x), fc=linear(), critic=linear(3, 1)),
    normal(4, 3),
    warned=NO_MOMENTS,
    call=lambda m, x: m.critic(m(x).flatten(0, 1)).view(len(x), 4),
)
either(
    _P,
    "tied-weights-in-the-loss",
    made(lambda s, i: s.table(i), table=layer(nn.Embedding, 5, 3)),
    ids(4),
    warned=NO_MOMENTS,
    call=lambda m, i: m(i) @ m.table.weight.t(),
)


# ---- gradients whose squares leave the range
# -------------------------------------------------------------------------

_R = "range"


def scaled(factor: float):
    def use(model: nn.Module, inputs: Inputs, weights: Tensor) -> Any:
        output = model(*inputs)
        (loss_of(output, weights) * factor).backward()
        return output

    return use


ranged = {
    "linear": (made(lambda s, x: s.fc(x), fc=linear()), normal(3)),
    "steps": (made(lambda s, x: s.fc(x), fc=linear()), normal(4, 3)),
    "bare": (made(lambda s, x: s.mix * x.sin() + s.mix, mix=weight(3)), normal(3)),
    "einsum": (
        made(lambda s, x: torch.einsum("btd,de->bte", x, s.mix), mix=weight(3, 3)),
        normal(4, 3),
    ),
    "conv": (made(lambda s, x: s.conv(x), conv=layer(nn.Conv1d, 3, 2, 2)), normal(3, 4)),
    "embedding": (
        made(lambda s, i: s.table(i) * s.gain, table=layer(nn.Embedding, 2, 3), gain=weight(3)),
        ids(4, high=2),
    ),
    "norm": (made(lambda s, x: s.norm(x), norm=layer(nn.LayerNorm, 3)), normal(4, 3)),
    "shared": (made(lambda s, x: s.fc(s.fc(x)), fc=linear()), normal(3)),
}
for kind, (make, inputs) in ranged.items():
    for factor in (1.0, 1e-20, 1e-30, 1e25):
        exact(
            _R,
            f"{kind}-times-{factor:g}",
            make,
            inputs,
            use=scaled(factor),
            dtype=torch.float32,
            batches=(4,),
        )


# ---- weights per head, and products with more dimensions
# -------------------------------------------------------------

_H = "per-head"


def product(
    name: str,
    forward: Callable[..., Tensor],
    *shape: int,
    expect: Callable[..., None] = exact,
    of: int = 4,
) -> None:
    """Add a product of [batch, 4, 2, 3] and of the result of a layer with `mix`, whose sizes meet
    the batch's.
    """
    expect(
        _H,
        name,
        made(forward, fc=linear(), mix=weight(*shape)),
        normal(*(of, 2, 3)),
        batches=(4, 2, 1),
    )


product("right", lambda s, x: s.fc(x) @ s.mix, 4, 3, 2)
product("right-of-the-input", lambda s, x: x @ s.mix, 4, 3, 2)
product("left", lambda s, x: s.mix @ s.fc(x), 4, 3, 2)
product("one-in-front", lambda s, x: s.fc(x) @ s.mix, 1, 3, 4)
product("two-in-front", lambda s, x: s.fc(x) @ s.mix, 1, 1, 3, 4)
product("one-in-front-of-three", lambda s, x: s.fc(x[:, 0]) @ s.mix, 1, 3, 4)
product("one-and-heads", lambda s, x: s.fc(x) @ s.mix, 1, 4, 3, 2)
product("vector", lambda s, x: s.fc(x) @ s.mix, 3)
product("vector-left", lambda s, x: s.mix @ s.fc(x), 2)
product(
    "heads-first-bmm",
    lambda s, x: torch.bmm(s.fc(x).transpose(0, 1).flatten(2), s.mix).transpose(0, 1),
    4,
    6,
    3,
)
product(
    "heads-first-bmm-left",
    lambda s, x: (
        torch.bmm(s.mix, s.fc(x).permute(1, 2, 3, 0).flatten(2))
        .unflatten(2, (3, -1))
        .permute(3, 0, 1, 2)
    ),
    4,
    3,
    2,
)
product(
    "heads-first-baddbmm",
    lambda s, x: torch.baddbmm(s.mix[:, :1], s.fc(x).transpose(0, 1).flatten(2), s.mix).transpose(
        0, 1
    ),
    4,
    6,
    6,
)
product("expanded-bmm", lambda s, x: torch.bmm(s.fc(x)[:, 0], s.mix.expand(len(x), 3, 4)), 3, 4)
product("repeated-bmm", lambda s, x: torch.bmm(s.fc(x)[:, 0], s.mix.repeat(len(x), 1, 1)), 3, 4)
product("summed-elementwise", lambda s, x: (s.fc(x)[..., None] * s.mix[:, None]).sum(-2), 4, 3, 2)
product("chosen-heads", lambda s, x: s.fc(x)[:, [2, 0]] @ s.mix[[1, 3]], 4, 3, 2)
product("heads-of-two", lambda s, x: s.fc(x).unflatten(1, (2, 2)) @ s.mix, 2, 2, 3, 2)
product("triangular", lambda s, x: s.fc(x) @ s.mix.tril(), 4, 3, 3)
product("inverse", lambda s, x: s.fc(x) @ torch.linalg.inv(s.mix + 5 * torch.eye(3)), 4, 3, 3)
product(
    "solved",
    lambda s, x: torch.linalg.solve(s.mix + 5 * torch.eye(3), s.fc(x).mT).mT,
    4,
    3,
    3,
    expect=either,
)
product("matrix-exponential", lambda s, x: s.fc(x) @ torch.linalg.matrix_exp(s.mix * 0.1), 4, 3, 3)
product("tensordot", lambda s, x: torch.tensordot(s.fc(x), s.mix, dims=([1, 3], [0, 1])), 4, 3, 2)
product(
    "tensordot-left",
    lambda s, x: torch.tensordot(s.mix, s.fc(x), dims=([0, 1], [1, 3])).transpose(0, 1),
    4,
    3,
    2,
)
product("inner", lambda s, x: torch.inner(s.fc(x), s.mix), 4, 3)
product("outer", lambda s, x: torch.outer(s.fc(x).flatten(), s.mix).view(len(x), 24, 2), 2)
product("kron", lambda s, x: torch.kron(s.fc(x)[:, 0], s.mix), 1, 2, 2, expect=either)
product(
    "multi-dot", lambda s, x: torch.linalg.multi_dot((s.fc(x).flatten(1), s.mix, s.mix.t())), 24, 4
)
product("chain-matmul", lambda s, x: x.flatten(0, 2).matmul(s.mix).view(len(x), 4, 2, 4), 3, 4)
product(
    "addmv", lambda s, x: torch.addmv(s.fc(x)[:, 0, 0, 0], s.fc(x).flatten(1), s.mix)[:, None], 24
)
product("addr", lambda s, x: torch.addr(s.fc(x)[:, 0, 0], s.fc(x)[:, 1, 1, 1], s.mix), 3)
product(
    "attention-with-shared-values",
    lambda s, x: F.scaled_dot_product_attention(
        s.fc(x), s.mix.expand(len(x), 4, 2, 3), s.mix.expand(len(x), 4, 2, 3)
    ),
    4,
    2,
    3,
)
product(
    "relative-attention",
    lambda s, x: F.scaled_dot_product_attention(s.fc(x), s.fc(x), x, attn_mask=s.mix),
    4,
    2,
    2,
)
product(
    "batch-as-heads",
    lambda s, x: (s.fc(x).transpose(0, 1) @ s.mix[:, None]).transpose(0, 1),
    4,
    3,
    2,
)
product(
    "conv-grouped-over-samples",
    lambda s, x: F.conv1d(
        s.fc(x).flatten(1, 2).reshape(1, -1, 3), s.mix.repeat(len(x), 1, 1), groups=len(x)
    ).view(len(x), 2, 2),
    2,
    8,
    2,
    expect=either,
)
product("unfold-and-product", lambda s, x: F.unfold(s.fc(x), (2, 2)).mT @ s.mix, 16, 3)
product("einsum-heads", lambda s, x: torch.einsum("bhtd,hdk->bhtk", s.fc(x), s.mix), 4, 3, 2)
product("sum-over-heads", lambda s, x: torch.einsum("bhtd,hdk->btk", s.fc(x), s.mix), 4, 3, 2)


# ---- checkpoints
# --------------------------------------------------------------------------------------------------

_Q = "checkpoint"


class Recomputed(nn.Module):
    """A method with a layer, then a bare parameter, that is checkpointed."""

    def __init__(self, reentrant: bool, fold: bool = False, first: bool = True) -> None:
        super().__init__()
        self.fc, self.out, self.mix = (
            nn.Linear(3, 3),
            nn.Linear(3, 3),
            nn.Parameter(torch.randn(3, 3)),
        )
        self.reentrant, self.fold, self.first = reentrant, fold, first

    def block(self, h: Tensor) -> Tensor:
        h = h.flatten(0, 1) if self.fold else h
        return (self.fc(h).tanh() @ self.mix).sin().view(-1, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.out(x) if self.first else x.requires_grad_()
        return self.out(checkpoint(self.block, h, use_reentrant=self.reentrant))


exact(_Q, "method-with-a-bare-parameter", lambda: Recomputed(False), normal(4, 3))
exact(_Q, "method-that-folds", lambda: Recomputed(False, fold=True), normal(4, 3))
exact(_Q, "method-of-the-input", lambda: Recomputed(False, first=False), normal(4, 3))
either(
    _Q,
    "reentrant-method-with-a-bare-parameter",
    lambda: Recomputed(True),
    normal(4, 3),
    warned=NO_MOMENTS,
)
either(
    _Q,
    "reentrant-method-that-folds",
    lambda: Recomputed(True, fold=True),
    normal(4, 3),
    warned=NO_MOMENTS,
)
for reentrant in (False, True):
    word = "reentrant" if reentrant else "plain"
    expect = either if reentrant else exact
    expect(
        _Q,
        f"{word}-function-with-a-parameter",
        made(
            lambda s, x, r=reentrant: checkpoint(
                lambda h: torch.tanh(h @ s.mix), s.fc(x), use_reentrant=r
            ),
            fc=linear(),
            mix=weight(3, 3),
        ),
        normal(3),
        warned=NO_MOMENTS,
    )
    expect(
        _Q,
        f"{word}-function-with-einsum",
        made(
            lambda s, x, r=reentrant: checkpoint(
                lambda h: torch.einsum("bd,de->be", h, s.mix).relu_(), s.fc(x), use_reentrant=r
            ),
            fc=linear(),
            mix=weight(3, 3),
        ),
        normal(3),
        warned=NO_MOMENTS,
    )
    exact(
        _Q,
        f"{word}-module",
        made(
            lambda s, x, r=reentrant: s.out(checkpoint(s.mid, s.fc(x), use_reentrant=r)),
            fc=linear(),
            mid=linear(),
            out=linear(),
        ),
        normal(3),
    )
    expect(
        _Q,
        f"{word}-time-first",
        made(
            lambda s, x, r=reentrant: checkpoint(
                lambda h: s.mid(h) @ s.mix, s.fc(x).transpose(0, 1), use_reentrant=r
            ).transpose(0, 1),
            fc=linear(),
            mid=linear(),
            mix=weight(3, 3),
        ),
        normal(4, 3),
        batches=(4, 2, 1),
        warned=NO_MOMENTS,
    )
    expect(
        _Q,
        f"{word}-twice-the-same",
        made(
            lambda s, x, r=reentrant: checkpoint(
                s.mid, checkpoint(s.mid, s.fc(x), use_reentrant=r).cos(), use_reentrant=r
            ),
            fc=linear(),
            mid=linear(),
        ),
        normal(3),
    )
    expect(
        _Q,
        f"{word}-inside-another",
        made(
            lambda s, x, r=reentrant: checkpoint(
                lambda h: checkpoint(s.mid, h, use_reentrant=r).sin(), s.fc(x), use_reentrant=r
            ),
            fc=linear(),
            mid=linear(),
        ),
        normal(3),
    )
    refused(
        _Q,
        f"{word}-that-mixes",
        made(
            lambda s, x, r=reentrant: s.out(
                checkpoint(lambda h: s.mid(h).roll(2, 0), s.fc(x), use_reentrant=r)
            ),
            fc=linear(),
            mid=linear(),
            out=linear(),
        ),
        normal(3),
    )
    expect(
        _Q,
        f"{word}-with-dropout",
        made(
            lambda s, x, r=reentrant: checkpoint(
                lambda h: F.dropout(s.mid(h), 0.5) @ s.mix, s.fc(x), use_reentrant=r
            ),
            fc=linear(),
            mid=linear(),
            mix=weight(3, 3),
        ),
        normal(3),
        batches=(1,),
        warned=NO_MOMENTS,
    )


# ---- weights that are standardised, normalised, made
# ------------------------------------------------------------------

_N = "made-weights"


def standardised(w: Tensor) -> Tensor:
    return F.batch_norm(
        w.reshape(1, len(w), -1), None, None, training=True, momentum=0.0, eps=1e-6
    ).reshape_as(w)


def by_hand(w: Tensor) -> Tensor:
    return (w - w.mean((1, 2), keepdim=True)) / (w.std((1, 2), keepdim=True) + 1e-6)


def standardised_by_hand(s: Any, x: Tensor) -> Tensor:
    return F.conv1d(x, by_hand(s.conv.weight) * s.gain, s.conv.bias)


class Squared(nn.Module):
    """A parametrization that holds a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, w: Tensor) -> Tensor:
        return w.square() * self.scale


def registered(kind: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        linear_ = nn.Linear(3, 3)
        parametrize.register_parametrization(linear_, "weight", kind())
        return linear_

    return make


conv = {"conv": layer(nn.Conv1d, 3, 4, 2), "gain": weight(4, 1, 1)}
exact(
    _N,
    "standardised-by-batch-norm",
    made(lambda s, x: F.conv1d(x, standardised(s.conv.weight) * s.gain, s.conv.bias), **conv),
    normal(3, 4),
    batches=(4, 3, 1),
)
exact(
    _N,
    "standardised-by-batch-norm-with-gain",
    made(
        lambda s, x: F.conv1d(
            x,
            F.batch_norm(
                s.conv.weight.view(1, 4, -1), None, None, weight=s.gain.view(-1), training=True
            ).view_as(s.conv.weight),
            s.conv.bias,
        ),
        **conv,
    ),
    normal(3, 4),
)
exact(
    _N,
    "standardised-linear",
    made(lambda s, x: F.linear(s.fc(x), standardised(s.mix)), fc=linear(), mix=weight(4, 3)),
    normal(3),
)
exact(
    _N,
    "standardised-by-layer-norm",
    made(lambda s, x: F.linear(s.fc(x), F.layer_norm(s.mix, (3,))), fc=linear(), mix=weight(4, 3)),
    normal(3),
)
exact(_N, "standardised-by-hand", made(standardised_by_hand, **conv), normal(3, 4))
either(
    _N,
    "batch-norm-layer-on-weights",
    made(
        lambda s, x: F.linear(s.fc(x), s.norm(s.mix)),
        fc=linear(),
        mix=weight(4, 3),
        norm=layer(nn.BatchNorm1d, 3),
    ),
    normal(3),
)
exact(
    _N,
    "weight-of-as-many-rows-as-samples",
    made(lambda s, x: F.linear(s.fc(x), s.mix.softmax(0)), fc=linear(), mix=weight(4, 3)),
    normal(3),
    batches=(4, 3, 1),
)
exact(
    _N,
    "weight-rolled",
    made(lambda s, x: F.linear(s.fc(x), s.mix.roll(1, 0)), fc=linear(), mix=weight(4, 3)),
    normal(3),
)
exact(
    _N,
    "weight-sorted",
    made(lambda s, x: F.linear(s.fc(x), s.mix.sort(0).values), fc=linear(), mix=weight(4, 3)),
    normal(3),
)
exact(
    _N,
    "weight-by-item",
    made(
        lambda s, x: F.linear(s.fc(x), s.mix / s.mix.norm().item()), fc=linear(), mix=weight(4, 3)
    ),
    normal(3),
)
exact(
    _N,
    "weight-norm",
    lambda: parametrizations.weight_norm(nn.Linear(3, 3)),
    normal(3),
    batches=(4, 3, 1),
)
exact(
    _N,
    "spectral-norm-in-eval",
    lambda: parametrizations.spectral_norm(nn.Linear(3, 3)).eval(),
    normal(3),
)
exact(_N, "spectral-norm", lambda: parametrizations.spectral_norm(nn.Linear(3, 3)), normal(3))
exact(
    _N,
    "orthogonal",
    lambda: parametrizations.orthogonal(nn.Linear(3, 3)),
    normal(3),
    batches=(4, 3, 1),
)
exact(_N, "own-parametrization", registered(Squared), normal(3))
exact(
    _N,
    "cached-parametrization",
    made(lambda s, x: cached(lambda: s.fc(x) + s.fc(x.cos())), fc=registered(Squared)),
    normal(3),
)
exact(
    _N,
    "low-rank",
    made(
        lambda s, x: F.linear(x, s.fc.weight + s.left @ s.right, s.fc.bias),
        fc=linear(),
        left=weight(3, 2),
        right=weight(2, 3),
    ),
    normal(3),
)
exact(
    _N,
    "hypernetwork-of-a-shared-code",
    made(lambda s, x: x @ s.fc(s.code).view(3, 3), fc=linear(3, 9), code=weight(3)),
    normal(3),
    batches=(4, 3, 1),
)
exact(
    _N,
    "hypernetwork-of-each-sample",
    made(lambda s, x: torch.bmm(x[:, None], s.fc(x).view(-1, 3, 3))[:, 0], fc=linear(3, 9)),
    normal(3),
    batches=(4, 3, 1),
)
exact(
    _N,
    "hypernetwork-of-a-table",
    made(
        lambda s, x: torch.einsum("bd,kde->bke", x, s.fc(s.code).view(4, 3, 3)),
        fc=linear(3, 9),
        code=weight(4, 3),
    ),
    normal(3),
    batches=(4, 3, 1),
)
either(
    _N,
    "parameter-made-in-forward",
    made(lambda s, x: s.fc(x) * nn.Parameter(torch.full((3,), 2.0)), fc=linear()),
    normal(3),
)
either(
    _N,
    "copy-of-a-layer-in-forward",
    made(lambda s, x: s.fc(x) + copy.deepcopy(s.fc)(x), fc=linear()),
    normal(3),
)
either(
    _N,
    "batch-norm-in-eval",
    made(lambda s, x: s.norm(s.fc(x)), fc=linear(), norm=lambda: nn.BatchNorm1d(3).eval()),
    normal(3),
)


@contextlib.contextmanager
def _cached():
    with parametrize.cached():
        yield


def cached(function: Callable[[], Any]) -> Any:
    with _cached():
        return function()


class Late(nn.Module):
    """A model that makes one of its parameters when it is first called."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.register_parameter("gain", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.gain is None:
            self.gain = nn.Parameter(torch.full((3,), 2.0, dtype=torch.float64))
        return self.fc(x) * self.gain


either(_N, "parameter-made-at-the-first-call", Late, normal(3), warned=NO_MOMENTS)


# ---- einsum
# --------------------------------------------------------------------------------------------------

_G = "einsum"


def equation(
    name: str,
    text: str,
    x: tuple[int, ...],
    *shapes: tuple[int, ...],
    back: Callable[[Tensor], Tensor] = lambda y: y,
    first: Callable[[Tensor], Tensor] = lambda x: x,
    expect: Callable[..., None] = exact,
    at: int = 0,
) -> None:
    """Add an equation of the batch and of parameters w0, w1, …; the batch is operand `at`."""

    def forward(s: Any, v: Tensor) -> Tensor:
        operands = [getattr(s, f"w{k}") for k in range(len(shapes))]
        operands.insert(at, first(v))
        return back(torch.einsum(text, *operands))

    parts = {f"w{k}": weight(*shape) for k, shape in enumerate(shapes)}
    expect(_G, name, made(forward, **parts), normal(*x), batches=(4, 2, 1))


def moved(x: Tensor) -> Tensor:
    return x.transpose(0, 1)


equation("plain", "bd,de->be", (4,), (4, 4))
equation("parameter-first", "de,bd->be", (4,), (4, 4), at=1)
equation("implicit", "bd,da", (4,), (4, 4), back=lambda y: y.t())
equation("implicit-in-order", "ab,bc", (4,), (4, 4))
equation("ellipsis", "...d,de->...e", (4, 4), (4, 4))
equation("ellipsis-in-front-of-both", "...d,...d->...", (4, 4), (4, 4))
equation("ellipsis-of-the-parameter", "b...,...->b...", (4, 4), (4, 4))
equation("ellipsis-at-the-end", "bd...,de->be...", (4, 4), (4, 4))
equation("ellipsis-moved", "b...d,de->...eb", (4, 4), (4, 4), back=lambda y: y.permute(2, 0, 1))
equation("batch-in-the-middle", "tbd,de->tbe", (4, 4), (4, 4), first=moved, back=moved)
equation("batch-moves-back", "btd,de->tbe", (4, 4), (4, 4), back=moved)
equation("batch-moves-last", "btd,de->teb", (4, 4), (4, 4), back=lambda y: y.permute(2, 0, 1))
equation("three-operands", "btd,de,ef->btf", (4, 4), (4, 4), (4, 4))
equation("three-operands-batch-last", "de,ef,btd->btf", (4, 4), (4, 4), (4, 4), at=2)
equation(
    "three-operands-batch-between",
    "de,btd,ef->tfb",
    (4, 4),
    (4, 4),
    (4, 4),
    at=1,
    back=lambda y: y.permute(2, 0, 1),
)
equation("four-operands", "bd,de,ef,f->be", (4,), (4, 4), (4, 4), (4,))
equation("diagonal-of-the-parameter", "bd,dd->bd", (4,), (4, 4))
equation("diagonal-of-the-input", "bdd,de->be", (4, 4), (4, 4))
equation("trace-of-the-parameter", "bd,ee->bd", (4,), (4, 4))
equation("summed-letter-of-the-parameter", "bd,de->bd", (4,), (4, 4))
equation("summed-letter-of-the-input", "btd,e->be", (4, 4), (4,))
equation("outer", "bd,e->bde", (4,), (4,))
equation("elementwise", "bd,d->bd", (4,), (4,))
equation("scalar-parameter", "bd,->bd", (4,), ())
equation("heads", "bhd,hde->bhe", (4, 4), (4, 4, 4))
equation("heads-summed", "bhd,hde->be", (4, 4), (4, 4, 4))
equation("capital-letters", "Bd,dE->BE", (4,), (4, 4))
equation("spaces", " b d , d e -> b e ", (4,), (4, 4))
equation("size-one-broadcast", "btd,xd->btd", (4, 4), (1, 4))
equation("to-one-number-each", "bd,d->b", (4,), (4,), back=lambda y: y[:, None])
equation("parameters-that-meet-first", "ij,jk,bi->bk", (4,), (4, 4), (4, 4), at=2)
equation(
    "folded-batch",
    "nd,de->ne",
    (4, 4),
    (4, 4),
    first=lambda x: x.flatten(0, 1),
    back=lambda y: y.view(-1, 4, 4),
)
equation(
    "folded-batch-inside",
    "nd,de->en",
    (4, 4),
    (4, 4),
    first=lambda x: x.transpose(0, 1).flatten(0, 1),
    back=lambda y: y.t().reshape(4, -1, 4).transpose(0, 1),
)
equation(
    "folded-batch-unfolded-wrongly",
    "nd,de->ne",
    (4, 4),
    (4, 4),
    first=lambda x: x.transpose(0, 1).flatten(0, 1),
    back=lambda y: y.view(-1, 4, 4).cos() + y.view(4, -1, 4).transpose(0, 1),
    expect=refused,
)


def with_einsum(
    name: str,
    forward: Callable[..., Any],
    expect: Callable[..., None] = exact,
    shape: tuple[int, ...] = (4, 4),
) -> None:
    parts = {"fc": linear(4, 4), "mix": weight(4, 4), "cube": weight(4, 4, 4)}
    expect(_G, name, made(forward, **parts), normal(*shape), batches=(4, 2, 1))


with_einsum("two-batches", lambda s, x: torch.einsum("btd,de,bue->btu", s.fc(x), s.mix, x))
with_einsum(
    "bilinear-of-two", lambda s, x: torch.einsum("bti,kij,btj->btk", s.fc(x), s.cube, x.cos())
)
with_einsum("sublists", lambda s, x: torch.einsum(s.fc(x), [0, 1, 2], s.mix, [2, 3], [0, 1, 3]))
with_einsum(
    "sublists-with-ellipsis", lambda s, x: torch.einsum(s.fc(x), [..., 2], s.mix, [2, 3], [..., 3])
)
with_einsum("sublists-implicit", lambda s, x: torch.einsum(s.fc(x), [0, 1, 2], s.mix, [2, 3]))
with_einsum("operands-in-a-list", lambda s, x: torch.einsum("btd,de->bte", [s.fc(x), s.mix]))
with_einsum(
    "with-a-constant",
    lambda s, x: torch.einsum("btd,tu,de->bue", s.fc(x), torch.ones(4, 4).tril(), s.mix),
)
with_einsum(
    "constant-over-samples",
    lambda s, x: torch.einsum("btd,bc,de->cte", s.fc(x), torch.ones(len(x), len(x)).tril(), s.mix),
    refused,
)
with_einsum(
    "constant-diagonal-over-samples",
    lambda s, x: torch.einsum("btd,bb,de->bte", s.fc(x), torch.ones(len(x), len(x)).tril(), s.mix),
    either,
)
with_einsum(
    "samples-summed", lambda s, x: torch.einsum("btd,de,cte->bc", s.fc(x), s.mix, x)[:, :1], refused
)
with_einsum(
    "samples-summed-and-broadcast",
    lambda s, x: x * torch.einsum("btd,de->te", s.fc(x), s.mix),
    refused,
)
with_einsum(
    "samples-against-samples",
    lambda s, x: torch.einsum("btd,cte->bde", s.fc(x), x) @ s.mix,
    refused,
)
with_einsum(
    "same-tensor-twice", lambda s, x: torch.einsum("btd,btd,de->bte", s.fc(x), s.fc(x), s.mix)
)
with_einsum("parameter-twice", lambda s, x: torch.einsum("btd,de,ef->btf", x, s.mix, s.mix))
with_einsum("made-weight", lambda s, x: torch.einsum("btd,de->bte", x, s.mix.tril() @ s.mix))
with_einsum(
    "attention", lambda s, x: torch.einsum("bqd,bkd->bqk", s.fc(x), x).softmax(-1) @ (x @ s.mix)
)
with_einsum(
    "attention-over-samples",
    lambda s, x: (
        torch.einsum("qtd,ktd->qkt", s.fc(x), x).softmax(1).mean(1, keepdim=True) + x @ s.mix
    ),
    refused,
)
with_einsum("parameters-alone", lambda s, x: s.fc(x) @ torch.einsum("ij,jk->ik", s.mix, s.mix))
with_einsum(
    "parameter-expanded-to-samples",
    lambda s, x: torch.einsum("btd,bde->bte", s.fc(x), s.mix.expand(len(x), 4, 4)),
)
with_einsum(
    "parameter-indexed-to-samples",
    lambda s, x: torch.einsum(
        "btd,bde->bte", s.fc(x), s.cube[(x.detach().abs().sum((1, 2)) * 10).long() % 4]
    ),
)
either(
    _G,
    "parameter-rows-for-samples",
    made(
        lambda s, x: torch.einsum("btd,bde->bte", s.fc(x), s.cube[: len(x)]),
        fc=linear(4, 4),
        cube=weight(4, 4, 4),
    ),
    normal(4, 4),
    batches=(4, 2, 1),
    truth="graph",
)


# ---- concatenated along the batch, and split again
# -------------------------------------------------------------------

_X = "cat-and-split"


def joined(
    name: str,
    forward: Callable[..., Any],
    expect: Callable[..., None] = exact,
    shape: tuple[int, ...] = (3,),
) -> None:
    parts = {"fc": linear(), "out": linear(), "null": weight(3)}
    expect(_X, name, made(forward, **parts), pair(*shape), batches=(4, 2, 1))


def halves(s: Any, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return s.out(s.fc(torch.cat([x, y])).relu()).chunk(2)


def guided(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.fc(torch.cat([x, x])) + torch.cat([s.out(y), s.null.expand(len(x), -1)])
    with_, without = s.out(h.tanh()).chunk(2)
    return without + 3.0 * (with_ - without)


def fix_match(s: Any, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    n = len(x)
    labelled_, weak, strong = s.out(s.fc(torch.cat((x, y, y.cos())))).split((n, n, n))
    return labelled_, weak.detach().softmax(-1) * strong


def contrasted(s: Any, x: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(s.fc(torch.cat([x, y])), dim=1)
    return F.cross_entropy(z @ z.t(), torch.arange(len(z)).roll(len(x)))


joined("two-views", halves)
joined("two-views-with-steps", halves, shape=(4, 3))
joined("two-views-multiplied", lambda s, x, y: torch.mul(*halves(s, x, y)))
joined("guidance", guided)
joined("fix-match", fix_match)
joined("split-by-size", lambda s, x, y: torch.cat(s.fc(torch.cat([x, y], dim=0)).split(len(x)), 1))
joined(
    "split-by-slices", lambda s, x, y: (h := s.fc(torch.cat([x, y])), h[: len(x)] * h[len(x) :])[1]
)
joined(
    "split-by-view",
    lambda s, x, y: s.fc(torch.cat([x, y])).view(2, len(x), 3).transpose(0, 1).flatten(1),
)
joined(
    "stacked-and-flattened",
    lambda s, x, y: s.out(s.fc(torch.stack([x, y]).flatten(0, 1)).unflatten(0, (2, -1)).sum(0)),
)
joined(
    "stacked-inside-and-flattened",
    lambda s, x, y: s.out(s.fc(torch.stack([x, y], 1).flatten(0, 1)).unflatten(0, (-1, 2)).sum(1)),
)
joined("stacked-time-first", lambda s, x, y: s.fc(torch.stack([x, y])).prod(0))
joined(
    "interleaved", lambda s, x, y: s.fc(x.repeat_interleave(2, 0)).view(len(x), 2, 3).prod(1) + y
)
joined("repeated", lambda s, x, y: s.fc(x.repeat(2, 1)).view(2, len(x), 3).prod(0) + y)
joined("vstack", lambda s, x, y: torch.mul(*s.fc(torch.vstack((x, y))).chunk(2)))
joined("concat-of-three", lambda s, x, y: sum(s.fc(torch.concat((x, y, x.cos()))).tensor_split(3)))
joined(
    "concatenate-axis",
    lambda s, x, y: torch.mul(*s.fc(torch.concatenate((x, y), axis=0)).chunk(chunks=2, dim=0)),
)
joined("joined-after-a-layer", lambda s, x, y: torch.mul(*s.out(torch.cat([s.fc(x), y])).chunk(2)))
joined("joined-twice", lambda s, x, y: sum(s.out(torch.cat([torch.cat([x, y]), s.fc(y)])).chunk(3)))
joined(
    "split-in-the-wrong-places",
    lambda s, x, y: (h := s.fc(torch.cat([x, y])), h[1 : len(x) + 1] * x)[1],
    refused,
)
joined(
    "split-in-quarters",
    lambda s, x, y: torch.cat(s.fc(torch.cat([x, y])).view(len(x), 2, 3).unbind(1), 1),
    refused,
)
joined(
    "second-half-flipped",
    lambda s, x, y: torch.mul(*(h if k else h.flip(0) for k, h in enumerate(halves(s, x, y)))),
    refused,
)
joined(
    "joined-in-another-order",
    lambda s, x, y: torch.mul(*s.fc(torch.cat([x, y.flip(0)])).chunk(2)),
    refused,
)
joined("contrastive", contrasted, refused)
joined(
    "centred-over-both-views",
    lambda s, x, y: sum((h := s.fc(torch.cat([x, y])), h - h.mean(0))[1].chunk(2)),
    refused,
)
joined(
    "with-a-shared-row",
    lambda s, x, y: s.out(torch.cat([s.fc(x), s.null[None]]))[: len(x)] * y,
    either,
)
joined(
    "with-shared-rows-in-front",
    lambda s, x, y: s.out(torch.cat([s.null.expand(len(x), 3), s.fc(x)]))[len(x) :] * y,
    either,
)
joined("padded-batch", lambda s, x, y: s.out(F.pad(s.fc(x), (0, 0, 0, 2)))[: len(x)] * y, either)
joined(
    "padded-batch-in-front",
    lambda s, x, y: s.out(F.pad(s.fc(x), (0, 0, 1, 0)))[: len(x)] * y,
    refused,
)
joined(
    "first-half-of-the-batch",
    lambda s, x, y: torch.cat([s.fc(x[: len(x) // 2]), s.fc(x[len(x) // 2 :])]) * y,
)
joined("halves-by-chunk", lambda s, x, y: torch.cat([s.fc(h) for h in x.chunk(2)]) * y)
joined(
    "halves-swapped", lambda s, x, y: torch.cat([s.fc(h) for h in x.chunk(2)][::-1]) * y, refused
)
joined("momentum-pairs-multiplied", lambda s, x, y: s.fc(x) * s.fc(y).detach())


# ---- experts, loops over samples, prototypes
# -------------------------------------------------------------------------

_J = "experts"


def experts(
    kind: Callable[..., Any],
    expect: Callable[..., None],
    name: str,
    shape: tuple[int, ...] = (4, 3),
    **options: Any,
) -> None:
    expect(
        _J,
        name,
        made(kind, router=linear(3, 2), one=linear(), two=linear()),
        normal(*shape),
        **options,
    )


def mixtral(s: Any, x: Tensor) -> Tensor:
    tokens = x.reshape(-1, 3)
    weights, chosen = s.router(tokens).softmax(-1).topk(1, -1)
    out = torch.zeros_like(tokens)
    for k, expert in enumerate((s.one, s.two)):
        rows, at = torch.where(chosen == k)
        out.index_add_(0, rows, expert(tokens[rows]) * weights[rows, at, None])
    return out.view(x.shape)


def mixtral_by_nonzero(s: Any, x: Tensor) -> Tensor:
    tokens = x.reshape(-1, 3)
    gate = s.router(tokens).softmax(-1)
    mask = F.one_hot(gate.argmax(-1), 2).t()
    out = torch.zeros_like(tokens)
    for k, expert in enumerate((s.one, s.two)):
        rows = mask[k].nonzero().squeeze(-1)
        if len(rows):
            out = out.index_add(
                0, rows, expert(tokens.index_select(0, rows)) * gate[rows, k].unsqueeze(-1)
            )
    return out.view(x.shape)


def switch(s: Any, x: Tensor) -> Tensor:
    gate = s.router(x).softmax(-1)
    chosen = gate.argmax(-1)
    out = x.clone()
    for k, expert in enumerate((s.one, s.two)):
        mask = chosen == k
        out[mask] = expert(x[mask])
    return out * gate.amax(-1, keepdim=True)


def dense(s: Any, x: Tensor) -> Tensor:
    gate = s.router(x).softmax(-1)
    return (
        torch.einsum("...k,k...d->...d", gate, torch.stack([s.one(x), s.two(x)]))
        if x.dim() == 2
        else sum(gate[..., k : k + 1] * e(x) for k, e in enumerate((s.one, s.two)))
    )


def dispatched(s: Any, x: Tensor) -> Tensor:
    """Dispatch by one-hot products, as GShard does, with room for everyone."""
    gate = s.router(x).softmax(-1)
    hot = F.one_hot(gate.argmax(-1), 2).to(x.dtype)
    inputs = torch.einsum("btk,btd->kbtd", hot, x)
    outs = torch.stack([s.one(inputs[0]), s.two(inputs[1])])
    return torch.einsum("kbtd,btk->btd", outs, hot * gate)


def with_capacity(s: Any, x: Tensor) -> Tensor:
    """Drop tokens beyond one for each expert, first come first served over the whole batch."""
    tokens = x.reshape(-1, 3)
    gate = s.router(tokens).softmax(-1)
    hot = F.one_hot(gate.argmax(-1), 2)
    room = (hot.cumsum(0) * hot <= 2) * hot
    return (
        (torch.stack([s.one(tokens), s.two(tokens)], 1) * (gate * room)[..., None])
        .sum(1)
        .view(x.shape)
    )


def sorted_by_expert(s: Any, x: Tensor) -> Tensor:
    """Sort tokens by expert, serve them in runs, and put them back, as Megablocks does."""
    tokens = x.reshape(-1, 3)
    gate = s.router(tokens).softmax(-1)
    chosen = gate.argmax(-1)
    order_ = chosen.argsort(stable=True)
    runs = tokens[order_].split(chosen.bincount(minlength=2).tolist())
    done = torch.cat([s.one(runs[0]), s.two(runs[1])])
    out = torch.empty_like(done)
    out[order_] = done
    return out.view(x.shape) * gate.amax(-1, keepdim=True).view(*x.shape[:-1], 1)


def wrongly_put_back(s: Any, x: Tensor) -> Tensor:
    tokens = x.reshape(-1, 3)
    order_ = s.router(tokens)[:, 0].detach().argsort()
    return s.two(s.one(tokens[order_]).view(x.shape))


def picked_samples(s: Any, x: Tensor) -> Tensor:
    mask = x.sum((1, 2)) > 0
    out = s.two(x)
    out[mask] = s.one(x[mask])
    return out


experts(mixtral, exact, "mixtral")
experts(mixtral_by_nonzero, exact, "mixtral-by-nonzero")
experts(mixtral_by_nonzero, exact, "mixtral-by-nonzero-one-token", shape=(1, 3))
experts(switch, exact, "switch")
experts(switch, exact, "switch-of-samples", shape=(3,))
experts(dense, exact, "all-experts")
experts(dispatched, exact, "one-hot-dispatch")
experts(with_capacity, refused, "capacity", batches=(5,))
experts(sorted_by_expert, exact, "sorted-by-expert")
experts(wrongly_put_back, refused, "sorted-and-left-so")
experts(picked_samples, exact, "samples-by-a-mask")
# Experts that are stacked in one parameter, as Hugging Face writes them: the number of an expert
# that somebody chose is a tensor, and reads a slice of the parameter.

_K = "moe"


def hit_experts(mask: Tensor) -> Tensor:
    """Return the numbers of the experts that any token of the batch chose, one in a row."""
    return torch.greater(mask.sum((-1, -2)), 0).nonzero()


def stacked(top: int, pick: Callable[[Tensor, Tensor], Tensor] = lambda w, e: w[e]):
    """Return a forward with the best `top` experts for each token; `pick(parameter, number)` reads
    the expert's slice.
    """

    def forward(s: Any, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, 3)
        weights, chosen = (s.router(tokens) + s.prefer).softmax(-1).topk(top, -1)
        out = torch.zeros_like(tokens)
        with torch.no_grad():
            mask = F.one_hot(chosen, len(s.up) + 1).permute(2, 1, 0)
            hit = hit_experts(mask)
        for row in hit:
            e = row[0]
            if e == len(s.up):
                continue
            at, rows = torch.where(mask[e])
            gate, up = F.linear(tokens[rows], pick(s.up, e), pick(s.shift, e)).chunk(2, -1)
            done = F.linear(F.silu(gate) * up, pick(s.down, e)) * weights[rows, at, None]
            out.index_add_(0, rows, done)
        return out.view(x.shape)

    return forward


def stack(experts: int, prefer: float = 0.0, **frozen: bool) -> dict[str, Callable[[], Any]]:
    """Return the parts of a layer of stacked experts. A large `prefer` keeps all tokens from the
    last expert. Parameters in `frozen` are not trained.
    """

    def part(name: str, *shape: int) -> Callable[[], nn.Parameter]:
        return lambda: nn.Parameter(torch.randn(shape), requires_grad=not frozen.get(name, False))

    def preference() -> nn.Parameter:
        values = torch.zeros(experts)
        values[-1] = -prefer
        return nn.Parameter(values, requires_grad=False)

    return {
        "router": linear(3, experts),
        "prefer": preference,
        "up": part("up", experts, 4, 3),
        "shift": part("shift", experts, 4),
        "down": part("down", experts, 3, 2),
    }


_sizes = {"batches": (4, 3, 2, 1)}
for _experts, _top in ((4, 1), (4, 2), (2, 2), (3, 1)):
    exact(_K, f"stacked-{_top}-of-{_experts}", made(stacked(_top), **stack(_experts)),
          normal(4, 3), **_sizes)  # fmt: skip
exact(_K, "stacked-one-token", made(stacked(1), **stack(4)), normal(1, 3), **_sizes)
exact(_K, "stacked-two-tokens", made(stacked(2), **stack(4)), normal(2, 3), **_sizes)
exact(_K, "stacked-samples-as-tokens", made(stacked(2), **stack(4)), normal(3), **_sizes)
exact(_K, "stacked-alike", made(stacked(1), **stack(4)), alike(4, 3), **_sizes)
exact(_K, "stacked-first-two-alike", made(stacked(2), **stack(3)), first_two_alike(4, 3), **_sizes)
for _top in (1, 2):
    exact(_K, f"stacked-{_top}-and-one-that-nobody-chose", made(stacked(_top), **stack(3, 99.0)),
          normal(4, 3), **_sizes)  # fmt: skip
    for _size in (1, 2, 3):
        exact(_K, f"stacked-{_top}-accumulated-by-{_size}", made(stacked(_top), **stack(4)),
              normal(4, 3), use=accumulated(_size))  # fmt: skip
for _name in ("up", "shift", "down"):
    exact(_K, f"stacked-frozen-{_name}", made(stacked(2), **stack(4, **{_name: True})),
          normal(4, 3), **_sizes)  # fmt: skip
exact(_K, "stacked-all-frozen", made(stacked(2), **stack(4, up=True, shift=True, down=True)),
      normal(4, 3), **_sizes)  # fmt: skip
for _name, _pick in {
    "ellipsis": lambda w, e: w[e, ...],
    "slice": lambda w, e: w[e, :],
    "int": lambda w, e: w[int(e)],
    "int32": lambda w, e: w[e.int()],
    "of-a-product": lambda w, e: (w * 2.0)[e],
}.items():
    exact(_K, f"stacked-by-{_name}", made(stacked(1, _pick), **stack(3)), normal(4, 3),
          **_sizes)  # fmt: skip
for _name, _pick in {
    "index-select": lambda w, e: w.index_select(0, e[None])[0],
    "select": lambda w, e: w.select(0, e),
    "unbind": lambda w, e: w.unbind(0)[e],
    "a-mask": lambda w, e: w[torch.arange(len(w)) == e][0],
}.items():
    either(_K, f"stacked-by-{_name}", made(stacked(1, _pick), **stack(3)), normal(4, 3),
           **_sizes)  # fmt: skip

# Tokens that are put back, of which the first ones are of one sample only.


def put_back(order: Callable[[int], list[int]], *, use: str = "index_add_"):
    """Return a forward that writes tokens to their positions: one, then the rest. `order(tokens)`
    tells which token comes to which position.
    """

    def forward(s: Any, x: Tensor) -> Tensor:
        tokens = s.fc(x.reshape(-1, 3))
        taken = torch.tensor(order(len(tokens)))
        out = torch.zeros_like(tokens)
        for part in (slice(1, 2), slice(0, 1), slice(2, None)):
            getattr(out, use)(0, torch.arange(len(tokens))[part], tokens[taken[part]])
        return s.gate(out.view(x.shape))

    return forward


def _turned(n: int) -> list[int]:
    return [*range(4, n), *range(min(n, 4))]


for _name in ("index_add_", "index_copy_"):
    exact(_K, f"one-token-first-{_name}",
          made(put_back(lambda n: list(range(n)), use=_name), fc=linear(), gate=linear()),
          normal(4, 3), **_sizes)  # fmt: skip
    refused(_K, f"one-token-first-of-another-sample-{_name}",
            made(put_back(_turned, use=_name), fc=linear(), gate=linear()),
            normal(4, 3), **_sizes)  # fmt: skip

# The number of an expert, where it lets samples meet.

for _name, _number in {
    "most-popular": lambda g: g.sum(0).argmax(),
    "largest-chosen": lambda g: g.argmax(1).max(),
    "first-hit": lambda g: hit_experts(F.one_hot(g.argmax(1), 4).permute(1, 0)[:, None])[0, 0],
    "last-hit": lambda g: hit_experts(F.one_hot(g.argmax(1), 4).permute(1, 0)[:, None])[-1, 0],
    "most-common": lambda g: g.argmax(1).bincount(minlength=4).argmax(),
    "count": lambda g: (g[:, 0] > 0.25).sum() % 4,
    "first-of-a-sort": lambda g: g.argmax(1).sort().values[0],
    "median": lambda g: g.argmax(1).median(),
}.items():
    refused(_K, f"{_name}-expert-for-all",
            made(lambda s, x, f=_number: s.fc(x) @ s.w[f(s.router(x).softmax(-1))],
                 fc=linear(), router=linear(3, 4), w=weight(4, 3, 3)),
            normal(3), batches=(4, 3, 1))  # fmt: skip
    refused(_K, f"{_name}-constant-for-all",
            made(lambda s, x, f=_number: s.fc(x) * torch.tensor([0.5, 1.0, 2.0, 3.0])[
                f(s.router(x).softmax(-1))], fc=linear(), router=linear(3, 4)),
            normal(3), batches=(4, 3, 1))  # fmt: skip
    # as many in each sample: then the number of samples alone decides, and a warning says so
    refused(_K, f"{_name}-feature-for-all",
            made(lambda s, x, f=_number: (h := s.fc(x)) * h[:, f(s.router(x).softmax(-1))][:, None],
                 fc=linear(3, 4), router=linear(3, 4)),
            normal(3), batches=(4, 3, 1), told=COUNTED)  # fmt: skip
refused(
    _K,
    "sample-that-the-batch-chose",
    made(
        lambda s, x: (h := s.fc(x)) + h[s.router(x).sum(1).argmax()],
        fc=linear(),
        router=linear(3, 4),
    ),
    normal(3),
    batches=(4, 3, 1),
)
refused(
    _K,
    "number-of-the-expert-as-a-factor",
    made(
        lambda s, x: s.fc(x) * (1 + s.router(x).sum(0).argmax()),
        fc=linear(),
        router=linear(3, 4),
    ),
    normal(3),
    batches=(4, 3, 1),
)
refused(
    _K,
    "experts-that-others-hit",
    made(
        lambda s, x: sum(
            F.linear(s.fc(x), s.w[row[0]])
            for row in F.one_hot(s.router(x).argmax(1), 4).sum(0).nonzero()
        ),
        fc=linear(),
        router=linear(3, 4),
        w=weight(4, 3, 3),
    ),
    normal(3),
    batches=(4, 3, 1),
)
refused(
    _K,
    "experts-that-others-hit-before-a-gate-of-zero",
    made(
        lambda s, x: (
            s.fc(x)
            + s.gate
            * sum(
                F.linear(s.fc(x), s.w[row[0]])
                for row in F.one_hot(s.router(x).argmax(1), 4).sum(0).nonzero()
            )
        ),
        fc=linear(),
        router=linear(3, 4),
        w=weight(4, 3, 3),
        gate=zero(3),
    ),
    normal(3),
    batches=(4, 3),
)
exact(
    _J,
    "expert-that-nobody-chose",
    made(
        lambda s, x: (y := s.one(x), m := x[:, 0] > 99, y.index_put((m,), s.two(x[m])))[2],
        one=linear(),
        two=linear(),
    ),
    normal(3),
)
either(
    _J,
    "tokens-by-a-mask-averaged-by-sample",
    made(lambda s, x: torch.stack([s.one(v[v[:, 0] > 0]).sum(0) for v in x]), one=linear()),
    normal(4, 3),
)
exact(
    _J,
    "nested-lists-of-lengths",
    made(
        lambda s, x, n: torch.stack(
            [s.one(v[: int(k)]).mean(0) for v, k in zip(x, n, strict=True)]
        ),
        one=linear(),
    ),
    lambda b: (torch.randn(b, 4, 3), torch.randint(1, 5, (b,))),
)
either(
    _J,
    "ragged-rows-and-index-add",
    made(
        lambda s, x, n: (
            m := torch.arange(4) < n[:, None],
            x.new_zeros(len(x), 3).index_add(0, m.nonzero()[:, 0], s.one(x[m])),
        )[1],
        one=linear(),
    ),
    lambda b: (torch.randn(b, 4, 3), torch.randint(1, 5, (b,))),
)
either(
    _J,
    "ragged-rows-and-scatter",
    made(
        lambda s, x, n: (
            m := torch.arange(4) < n[:, None],
            x.new_zeros(x.shape).masked_scatter(m[..., None], s.one(x[m])),
        )[1],
        one=linear(),
    ),
    lambda b: (torch.randn(b, 4, 3), torch.randint(1, 5, (b,))),
)

_Y = "loops"


def looped(
    name: str,
    forward: Callable[..., Any],
    expect: Callable[..., None] = exact,
    shape: tuple[int, ...] = (3,),
) -> None:
    expect(
        _Y,
        name,
        made(forward, fc=linear(), out=linear(), mix=weight(3, 3), cell=layer(nn.GRUCell, 3, 3)),
        normal(*shape),
        batches=(4, 3, 1),
    )


looped("by-number", lambda s, x: torch.stack([s.fc(x[i]) for i in range(len(x))]))
looped(
    "by-number-with-steps",
    lambda s, x: torch.stack([s.fc(x[i]).prod(0) for i in range(len(x))]),
    shape=(4, 3),
)
looped("by-iteration", lambda s, x: torch.stack([s.fc(v) for v in x]))
looped("by-enumeration", lambda s, x: torch.stack([s.fc(v) for _, v in enumerate(x)]))
looped("by-unbind", lambda s, x: torch.stack([s.fc(v) for v in x.unbind()]))
looped("by-split", lambda s, x: torch.cat([s.fc(v) for v in x.split(1)]))
looped("by-slices", lambda s, x: torch.cat([s.fc(x[i : i + 1]) for i in range(len(x))]))
looped("by-pairs", lambda s, x: torch.cat([s.fc(x[i : i + 2]) for i in range(0, len(x), 2)]))
looped(
    "into-rows",
    lambda s, x: (
        y := torch.zeros_like(x),
        [y.__setitem__(i, s.fc(x[i])) for i in range(len(x))],
        y,
    )[2],
)
looped("with-a-bare-parameter", lambda s, x: torch.stack([v @ s.mix for v in x]))
looped("with-einsum", lambda s, x: torch.stack([torch.einsum("d,de->e", v, s.mix) for v in x]))
looped("between-layers", lambda s, x: s.out(torch.stack([s.fc(v).tanh() for v in s.fc(x)])))
looped("only-after-layers", lambda s, x: torch.stack([v.softmax(0) for v in s.fc(x)]))
looped("into-a-list", lambda s, x: torch.stack([s.fc(v) for v in list(x)]))
looped("by-select", lambda s, x: torch.stack([s.fc(x.select(0, i)) for i in range(len(x))]))
looped(
    "by-index-tensor", lambda s, x: torch.cat([s.fc(x[torch.tensor([i])]) for i in range(len(x))])
)
looped("by-narrow", lambda s, x: torch.cat([s.fc(x.narrow(0, i, 1)) for i in range(len(x))]))
looped("stacked-behind", lambda s, x: torch.stack([s.fc(v) for v in x], 1).t())
looped("hstacked", lambda s, x: torch.hstack([s.fc(v) for v in x]).view(x.shape))
looped("losses-added", lambda s, x: sum(s.fc(v).square().sum() for v in x) / len(x))
looped("losses-stacked", lambda s, x: torch.stack([s.fc(v).square().sum() for v in x]).mean())
looped("reversed", lambda s, x: torch.stack([s.fc(v) for v in reversed(x)]), refused)
looped(
    "order-changed", lambda s, x: torch.stack([s.fc(x[i]) for i in [*range(1, len(x)), 0]]), refused
)
looped("state-carried-over-samples", lambda s, x: carried(s, x), refused)
looped("first-sample-for-all", lambda s, x: torch.stack([s.fc(x[0]) for _ in x]), refused)
looped(
    "neighbours-added",
    lambda s, x: torch.stack([s.fc(x[i] + x[i - 1]) for i in range(len(x))]),
    refused,
)
looped("over-steps", lambda s, x: torch.stack([s.fc(x[:, t]) for t in range(4)], 1), shape=(4, 3))
looped(
    "over-steps-first",
    lambda s, x: torch.stack([s.fc(v) for v in x.transpose(0, 1)]).transpose(0, 1),
    shape=(4, 3),
)
looped(
    "two-samples-multiplied",
    lambda s, x: torch.stack([s.fc(x[i]) * x[len(x) - 1 - i] for i in range(len(x))]),
    refused,
)


def carried(s: Any, x: Tensor) -> Tensor:
    h, outs = torch.zeros(1, 3, dtype=x.dtype), []
    for v in x:
        h = s.cell(v[None], h)
        outs.append(h[0])
    return torch.stack(outs)


_D = "prototypes"


def compared(
    name: str,
    forward: Callable[..., Any],
    expect: Callable[..., None] = exact,
    inputs: Any = None,
    truth: str = "alone",
) -> None:
    parts = {"fc": linear(), "proto": weight(4, 3), "table": weight(4, 5), "square": weight(5, 5)}
    expect(_D, name, made(forward, **parts), inputs or normal(3), batches=(4, 3, 1), truth=truth)


compared("cdist", lambda s, x: torch.cdist(s.fc(x), s.proto))
compared("cdist-prototypes-first", lambda s, x: torch.cdist(s.proto, s.fc(x)).t())
compared("cdist-of-one-norm", lambda s, x: torch.cdist(s.proto, s.fc(x), p=1).t())
compared(
    "cdist-batched", lambda s, x: torch.cdist(s.fc(x)[:, None], s.proto.expand(len(x), 4, 3))[:, 0]
)
compared("cdist-keywords", lambda s, x: torch.cdist(x1=s.proto, x2=s.fc(x), p=2.0).mT)
compared("differences", lambda s, x: (s.proto[:, None] - s.fc(x)[None]).square().sum(-1).t())
compared("differences-batch-first", lambda s, x: (s.fc(x)[:, None] - s.proto).abs().sum(-1))
compared("cosine", lambda s, x: F.cosine_similarity(s.proto[:, None], s.fc(x)[None], dim=-1).t())
compared(
    "pairwise", lambda s, x: F.pairwise_distance(s.fc(x), s.proto[:1].expand(len(x), 3))[:, None]
)
compared("product-prototypes-first", lambda s, x: (s.proto @ s.fc(x).t()).t())
compared("product-normalised", lambda s, x: (F.normalize(s.proto) @ F.normalize(s.fc(x)).mT).mT)
compared("softmax-over-prototypes", lambda s, x: (s.proto @ s.fc(x).t()).softmax(0).t())
compared("softmax-over-samples", lambda s, x: (s.proto @ s.fc(x).t()).softmax(1).t(), refused)
compared("nearest", lambda s, x: s.fc(x) - s.proto[torch.cdist(s.fc(x), s.proto).argmin(1)])
compared(
    "straight-through",
    lambda s, x: (
        h := s.fc(x),
        q := s.proto[torch.cdist(h, s.proto).argmin(1)],
        h + (q - h).detach(),
        (q - h.detach()).square(),
    )[2:],
)
compared("self-distances", lambda s, x: torch.cdist(s.fc(x), s.fc(x)).sum(1, keepdim=True), refused)
compared("sinkhorn", lambda s, x: (q := (s.fc(x) @ s.proto.t()).exp(), q / q.sum(0))[1], refused)
compared("rows-of-a-table", lambda s, i: s.table.t()[i], inputs=ids(4))
compared("columns-of-a-table", lambda s, i: s.table[:, i].permute(1, 2, 0), inputs=ids(4))
compared("columns-of-a-table-one-each", lambda s, i: s.table[:, i[:, 0]].t(), inputs=ids(4))
compared(
    "columns-by-index-select", lambda s, i: s.table.index_select(1, i[:, 0]).t(), inputs=ids(4)
)
compared("columns-by-ellipsis", lambda s, i: s.table[..., i].movedim(0, -1), inputs=ids(4))
compared("pairs-of-a-table", lambda s, i: s.square[i[:, :2], i[:, 2:]], inputs=ids(4))
compared("all-pairs-of-a-table", lambda s, i: s.square[i[:, :, None], i[:, None, :]], inputs=ids(4))
compared("embedding-of-a-transposed-table", lambda s, i: F.embedding(i, s.table.t()), inputs=ids(4))
compared(
    "gathered-from-an-expanded-table",
    lambda s, i: s.square.expand(len(i), 5, 5).gather(1, i[:, None].expand(-1, 1, 4))[:, 0],
    inputs=ids(4),
)
compared("take-of-a-table", lambda s, i: s.table.take(i), inputs=ids(4))
compared("one-hot-product", lambda s, i: F.one_hot(i, 5).double() @ s.square, inputs=ids(4))
compared("prototypes-of-as-many-as-samples", lambda s, x: s.fc(x)[:, None] * s.proto[None])
compared("row-for-each-sample", lambda s, x: s.fc(x) * s.proto[: len(x)], either, truth="graph")


# ---- inputs and outputs of other kinds
# -------------------------------------------------------------------------------

_A = "structures"


@dataclasses.dataclass
class Pack:
    x: Tensor
    mask: Tensor | None = None
    more: Any = None


@dataclasses.dataclass(frozen=True)
class FrozenPack:
    x: Tensor
    more: Any = None


@dataclasses.dataclass(slots=True)
class SlotPack:
    x: Tensor


class Named(NamedTuple):
    x: Tensor
    more: Any = None


class Bag:
    """A class of the user's own that holds tensors."""

    def __init__(self, x: Tensor, more: Any = None):
        self.x, self.more = x, more

    def doubled(self) -> Bag:
        return Bag(self.x * 2, self.more)


class UserBatch(collections.UserDict):
    """A mapping that is no dict."""


class Labelled(torch.Tensor):
    """A tensor with a name of its own."""


def unpacked(make: Callable[[Tensor], Any]) -> dict[str, Any]:
    return {"call": lambda m, x: m(make(x))}


packed = made(lambda s, b: s.out(s.fc(b.x) @ s.mix), fc=linear(), out=linear(), mix=weight(3, 3))
nested = made(
    lambda s, b: s.out(s.fc(b.more.x) @ s.mix) + b.x, fc=linear(), out=linear(), mix=weight(3, 3)
)
exact(_A, "dataclass", packed, normal(4, 3), **unpacked(Pack))
exact(_A, "frozen-dataclass", packed, normal(4, 3), **unpacked(FrozenPack))
exact(_A, "dataclass-with-slots", packed, normal(4, 3), **unpacked(SlotPack))
exact(
    _A, "nested-dataclass", nested, normal(4, 3), **unpacked(lambda x: Pack(x, None, FrozenPack(x)))
)
exact(
    _A,
    "dataclass-in-a-list",
    made(lambda s, b: s.fc(b[0].x), fc=linear()),
    normal(3),
    **unpacked(lambda x: [Pack(x)]),
)
exact(
    _A,
    "dataclass-of-dicts",
    made(lambda s, b: s.fc(b.more["x"]), fc=linear()),
    normal(3),
    **unpacked(lambda x: Pack(x, None, {"x": x})),
)
exact(_A, "named-tuple", packed, normal(4, 3), **unpacked(Named))
exact(_A, "nested-named-tuple", nested, normal(4, 3), **unpacked(lambda x: Named(x, Named(x))))
either(_A, "own-class", packed, normal(4, 3), **unpacked(Bag))
either(
    _A,
    "own-class-with-methods",
    made(lambda s, b: s.fc(b.doubled().x), fc=linear()),
    normal(4, 3),
    **unpacked(Bag),
)
either(
    _A,
    "own-class-folded",
    made(lambda s, b: s.fc(b.x.flatten(0, 1)).view(b.x.shape), fc=linear()),
    normal(4, 3),
    **unpacked(Bag),
)
either(
    _A,
    "own-class-time-first",
    made(lambda s, b: s.fc(b.x).transpose(0, 1), fc=linear()),
    normal(4, 3),
    batches=(4, 2, 1),
    told=ELSEWHERE,
    **unpacked(lambda x: Bag(x.transpose(0, 1))),
)
either(
    _A,
    "time-first",
    made(lambda s, x: s.fc(x).transpose(0, 1), fc=linear()),
    normal(4, 3),
    batches=(4, 2, 1),
    told=ELSEWHERE,
    call=lambda m, x: m(x.transpose(0, 1)),
)
exact(
    _A,
    "user-dict",
    made(lambda s, b: s.fc(b["x"]), fc=linear()),
    normal(4, 3),
    **unpacked(lambda x: UserBatch(x=x)),
)
exact(
    _A,
    "ordered-dict",
    made(lambda s, b: s.fc(b["x"]), fc=linear()),
    normal(4, 3),
    **unpacked(lambda x: collections.OrderedDict(n=3, x=x)),
)
exact(
    _A,
    "nested-lists",
    made(lambda s, b: s.fc(b[1][0]["x"]), fc=linear()),
    normal(4, 3),
    **unpacked(lambda x: (1, [{"x": x}])),
)
exact(
    _A,
    "deque",
    made(lambda s, b: s.fc(b[0]), fc=linear()),
    normal(4, 3),
    **unpacked(lambda x: collections.deque([x])),
)
either(
    _A,
    "generator",
    made(lambda s, b: s.fc(next(b)), fc=linear()),
    normal(4, 3),
    **unpacked(lambda x: iter([x])),
)
either(
    _A,
    "list-of-samples",
    made(lambda s, b: torch.stack([s.fc(v) for v in b]), fc=linear()),
    normal(3),
    **unpacked(list),
)
either(
    _A,
    "list-of-ragged-samples",
    made(lambda s, b: torch.stack([s.fc(v).sum(0) for v in b]), fc=linear()),
    normal(4, 3),
    **unpacked(lambda x: [v[: 1 + int(v[0, 0] > 0)] for v in x]),
)
either(
    _A, "tensor-subclass", packed, normal(4, 3), **unpacked(lambda x: Pack(x.as_subclass(Labelled)))
)
either(
    _A,
    "tensor-subclass-rolled-back",
    made(lambda s, x: s.fc(x), fc=linear()),
    normal(3),
    **unpacked(lambda x: x.as_subclass(Labelled)),
)
refused(
    _A,
    "tensor-subclass-rolled",
    made(lambda s, x: s.out(s.fc(x).roll(2, 0)), fc=linear(), out=linear()),
    normal(3),
    **unpacked(lambda x: x.as_subclass(Labelled)),
)
either(
    _A,
    "input-is-a-parameter",
    made(lambda s, x: s.fc(x), fc=linear()),
    normal(3),
    **unpacked(nn.Parameter),
)
exact(
    _A,
    "input-with-gradient",
    made(lambda s, x: s.fc(x), fc=linear()),
    normal(3),
    **unpacked(lambda x: x.clone().requires_grad_()),
)
exact(
    _A,
    "input-made-of-the-model",
    made(lambda s, x: s.fc(x), fc=linear()),
    normal(3),
    call=lambda m, x: m(m(x).detach()),
)
either(
    _A,
    "input-made-of-parameters",
    made(lambda s, x: s.fc(x), fc=linear()),
    normal(3),
    call=lambda m, x: m(x @ m.fc.weight),
    warned=NO_MOMENTS,
)
exact(
    _A,
    "input-expanded-view",
    made(lambda s, x: s.fc(x), fc=linear()),
    normal(1, 3),
    **unpacked(lambda x: x.expand(-1, 4, 3)),
)
exact(
    _A,
    "input-strided-view",
    made(lambda s, x: s.fc(x), fc=linear()),
    normal(4, 6),
    **unpacked(lambda x: x[:, ::2, ::2]),
)
exact(
    _A,
    "output-dataclass",
    made(lambda s, x: Pack(s.fc(x), None, [s.out(x)]), fc=linear(), out=linear()),
    normal(3),
)
exact(
    _A,
    "output-named-tuple",
    made(lambda s, x: Named(s.fc(x), {"y": s.out(x)}), fc=linear(), out=linear()),
    normal(3),
)
refused(
    _A,
    "output-dataclass-mixed",
    made(lambda s, x: Pack(s.fc(x), None, [s.out(x).softmax(0)]), fc=linear(), out=linear()),
    normal(3),
)
exact(
    _A,
    "output-one-unused",
    made(lambda s, x: (s.fc(x), s.out(x)), fc=linear(), out=linear()),
    normal(3),
    call=lambda m, x: m(x)[0],
)
exact(
    _A,
    "output-without-batch-unused",
    made(lambda s, x: (s.fc(x), s.fc.weight.norm(), s.fc(x).mean()), fc=linear()),
    normal(3),
    call=lambda m, x: m(x)[0],
)


def hugging_face(s: Any, b: Any) -> Any:
    from transformers.utils import ModelOutput

    @dataclasses.dataclass
    class Output(ModelOutput):
        y: Tensor | None = None

    return Output(y=s.fc(b["x"]))


exact(
    _A,
    "model-output",
    made(hugging_face, fc=linear()),
    normal(4, 3),
    **unpacked(lambda x: {"x": x}),
)


def lengths_of(x: Tensor) -> Tensor:
    """Return a length for each sample that its own values decide."""
    return 1 + (x[:, 0, 0] > 0).long() + 2 * (x[:, 0, 1] > 0).long()


def recurrent(s: Any, x: Tensor, *, sort: bool = True, last: bool = False) -> Tensor:
    pack = pack_padded_sequence(x, lengths_of(x), batch_first=True, enforce_sorted=not sort)
    y, h = s.rnn(pack)
    return h[0] if last else pad_packed_sequence(y, batch_first=True, total_length=4)[0]


rnn = {"rnn": layer(nn.RNN, 3, 3, batch_first=True)}
exact(_A, "packed-sequences", made(recurrent, **rnn), normal(4, 3), batches=(4, 2, 1))
exact(
    _A,
    "packed-sequences-last-state",
    made(lambda s, x: recurrent(s, x, last=True), **rnn),
    normal(4, 3),
    batches=(4, 2, 1),
)
exact(
    _A,
    "packed-lstm",
    made(
        lambda s, x: recurrent(s, x), rnn=layer(nn.LSTM, 3, 3, batch_first=True, bidirectional=True)
    ),
    normal(4, 3),
)
exact(
    _A,
    "packed-after-a-layer",
    made(lambda s, x: recurrent(s, s.fc(x)), fc=linear(), **rnn),
    normal(4, 3),
)
either(
    _A,
    "packed-data-in-a-layer",
    made(
        lambda s, x: (
            p := pack_padded_sequence(x, lengths_of(x), batch_first=True, enforce_sorted=False),
            pad_packed_sequence(p._replace(data=s.fc(p.data)), batch_first=True, total_length=4)[0],
        )[1],
        fc=linear(),
    ),
    normal(4, 3),
)
either(
    _A,
    "packed-input",
    made(lambda s, p: pad_packed_sequence(s.rnn(p)[0], batch_first=True, total_length=4)[0], **rnn),
    normal(4, 3),
    **unpacked(
        lambda x: pack_padded_sequence(x, lengths_of(x), batch_first=True, enforce_sorted=False)
    ),
)
either(
    _A,
    "nested-tensor",
    made(lambda s, n: torch.stack([s.fc(v).sum(0) for v in n.unbind()]), fc=linear()),
    normal(4, 3),
    **unpacked(
        lambda x: torch.nested.nested_tensor(
            [v[:k] for v, k in zip(x, lengths_of(x).tolist(), strict=True)]
        )
    ),
)


# ---- several losses, several backwards, second order
# -----------------------------------------------------------------

_2 = "several-losses"


def two_losses(model: nn.Module, inputs: Inputs, weights: Tensor) -> Any:
    one, two = model(*inputs)
    loss_of(one, weights).backward(retain_graph=True)
    loss_of(two.cos(), weights).backward()
    return one, two


def same_loss_twice(model: nn.Module, inputs: Inputs, weights: Tensor) -> Any:
    output = model(*inputs)
    loss = loss_of(output, weights)
    loss.backward(retain_graph=True)
    loss.backward()
    return output


def cleared_between(model: nn.Module, inputs: Inputs, weights: Tensor) -> Any:
    one, two = model(*inputs)
    loss_of(one, weights).backward(retain_graph=True)
    model.zero_grad()
    loss_of(two.cos(), weights).backward()
    return one, two


def two_sizes(model: nn.Module, inputs: Inputs, weights: Tensor) -> Any:
    """One backward of the whole batch, and of its first sample once more."""
    x, number = inputs
    loss = losses(model(x), weights).sum()
    if (first := number == 0).any():
        loss = loss + losses(model(x[first] * 2), weights[first]).sum()
    (loss / len(x)).backward()


def two_halves(model: nn.Module, inputs: Inputs, weights: Tensor) -> Any:
    (x,) = inputs
    parts = [
        losses(model(x[k]), weights[k]).sum() for k in (slice(0, 2), slice(2, None)) if len(x[k])
    ]
    (sum(parts) / len(x)).backward()


def penalised(model: nn.Module, inputs: Inputs, weights: Tensor) -> Any:
    """Add a penalty on the gradient of the input, as WGAN-GP does."""
    x = inputs[0].clone().requires_grad_()
    output = model(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    (loss_of(output, weights) + losses(slope, weights).mean()).backward()


def second_order(model: nn.Module, inputs: Inputs, weights: Tensor) -> Any:
    output = model(*inputs)
    loss_of(output, weights).backward(create_graph=True)
    for p in model.parameters():
        p.grad = p.grad.detach()
    return output


def by_grad(model: nn.Module, inputs: Inputs, weights: Tensor) -> Any:
    """Take gradients with torch.autograd.grad first; then a step."""
    torch.autograd.grad(
        loss_of(model(*inputs), weights), list(model.parameters()), allow_unused=True
    )
    output = model(*inputs)
    loss_of(output, weights).backward()
    return output


def some_inputs(model: Any, inputs: Inputs, weights: Tensor) -> Any:
    """Let backward reach one parameter alone."""
    output = model(*inputs)
    loss_of(output, weights).backward(inputs=[model.out.weight])
    return output


def input_alone(model: Any, inputs: Inputs, weights: Tensor) -> Any:
    """Perturb the input along its gradient, as adversarial training does; then a step."""
    x = inputs[0].clone().requires_grad_()
    loss_of(model(x), weights).backward(inputs=[x])
    output = model((x + 0.1 * x.grad.sign()).detach())
    loss_of(output, weights).backward()
    return output


def by_parts(model: nn.Module, inputs: Inputs, weights: Tensor) -> Any:
    output = model(*inputs)
    output.backward(torch.ones_like(output) * weights[:, None] / len(weights))
    return output


def vector_of_losses(model: nn.Module, inputs: Inputs, weights: Tensor) -> Any:
    output = model(*inputs)
    each = losses(output, weights)
    each.backward(torch.full_like(each, 1 / len(each)))
    return output


both = made(
    lambda s, x: (s.out(s.fc(x).tanh()), s.fc(x).sin() @ s.mix),
    fc=linear(),
    out=linear(),
    mix=weight(3, 3),
)
single = made(lambda s, x: s.out(s.fc(x).tanh()), fc=linear(), out=linear())
bent = made(lambda s, x: torch.tanh(s.fc(x) @ s.mix), fc=linear(), mix=weight(3, 3))
# what the first backward saw is gone when the second one comes: both belong under one square
either(_2, "two-losses-of-one-forward", both, normal(3), use=two_losses)
either(_2, "two-losses-of-one-forward-with-steps", both, normal(4, 3), use=two_losses)
either(_2, "same-loss-twice", single, normal(3), use=same_loss_twice)
exact(_2, "cleared-between-two-losses", both, normal(3), use=cleared_between)
either(_2, "two-batch-sizes", single, numbered(3), use=two_sizes, batches=(4, 2))
# halves of one size would be two uses of the same samples, as in siamese networks
either(_2, "two-parts-of-a-batch", single, normal(3), use=two_halves, batches=(5, 3))
either(_2, "two-parts-of-a-batch-bare", bent, normal(3), use=two_halves, batches=(5, 3))
either(_2, "gradient-penalty", single, normal(3), use=penalised)
either(_2, "gradient-penalty-bare", bent, normal(3), use=penalised)
either(_2, "create-graph", single, normal(3), use=second_order)
exact(
    _2,
    "autograd-grad-before",
    made(lambda s, x: s.out(s.fc(x)) @ s.mix, fc=linear(), out=linear(), mix=weight(3, 3)),
    normal(3),
    use=by_grad,
)
exact(_2, "inputs-of-backward", single, normal(3), use=some_inputs)
exact(_2, "adversarial-training", single, normal(3), use=input_alone)
exact(_2, "gradient-given-by-hand", single, normal(3), use=by_parts)
exact(_2, "vector-of-losses", single, normal(3), use=vector_of_losses)


# ---- trace, export, forward mode
# -------------------------------------------------------------------------------------

_3 = "modes"


class Plain(nn.Module):
    """A model that torch can trace, script and export."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out, self.mix = (
            nn.Linear(3, 3),
            nn.Linear(3, 3),
            nn.Parameter(torch.randn(3, 3)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.fc(x).tanh()) @ self.mix


def ordinary(model: nn.Module, inputs: Inputs, weights: Tensor) -> Any:
    output = model(*inputs)
    loss_of(output, weights).backward()
    return output


def mode(name: str, use: Callable[[nn.Module, Tensor], Any]) -> None:
    """Add a usage that runs the observed model in another way; an ordinary step must be exact after
    it.
    """

    def quiet(model: nn.Module, inputs: Inputs, weights: Tensor) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return use(model, *inputs)

    either(_3, name, Plain, normal(3), use=quiet, after=ordinary, named=False, batches=(4,))


def dual(model: nn.Module, x: Tensor) -> Any:
    with torch.autograd.forward_ad.dual_level():
        out = model(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
        return torch.autograd.forward_ad.unpack_dual(out).tangent


def stateless(model: nn.Module) -> tuple[dict[str, Tensor], Callable[..., Any]]:
    params = {n: p.detach() for n, p in model.named_parameters()}
    return params, lambda p, v: torch.func.functional_call(model, p, (v,))


def gradient_by_func(model: nn.Module, x: Tensor) -> Any:
    params, run = stateless(model)
    return torch.func.grad(lambda p: run(p, x).square().mean())(params)


def each_gradient_by_func(model: nn.Module, x: Tensor) -> Any:
    params, run = stateless(model)
    return torch.vmap(
        torch.func.grad(lambda p, v: run(p, v[None]).square().mean()), in_dims=(None, 0)
    )(params, x)


def parameters_dual(model: nn.Module, x: Tensor) -> Any:
    params, run = stateless(model)
    return torch.func.jvp(
        lambda p: run(p, x), (params,), ({n: torch.ones_like(p) for n, p in params.items()},)
    )[1]


mode("trace", lambda m, x: torch.jit.trace(m, (x,))(x).detach())
mode("trace-without-check", lambda m, x: torch.jit.trace(m, (x,), check_trace=False)(x).detach())
mode("trace-under-no-grad", lambda m, x: torch.no_grad()(torch.jit.trace)(m, (x,))(x).detach())
mode("export", lambda m, x: torch.export.export(m, (x,)).module()(x).detach())
if torch.__version__ >= (2, 9):  # torch 2.8 says of any error in a hook: "Observed exception"
    mode(
        "export-strict",
        lambda m, x: torch.export.export(m, (x,), strict=True).module()(x).detach(),
    )
mode("script", lambda m, x: torch.jit.script(m)(x).detach())
mode("symbolic-trace", lambda m, x: torch.fx.symbolic_trace(m)(x).detach())
mode("jvp", lambda m, x: torch.func.jvp(m, (x,), (torch.ones_like(x),))[1].detach())
mode("jvp-of-parameters", parameters_dual)
mode("forward-ad", lambda m, x: dual(m, x).detach())
mode("linearize", lambda m, x: torch.func.linearize(m, x)[1](torch.ones_like(x)).detach())
mode("vjp", lambda m, x: torch.func.vjp(m, x)[1](torch.ones_like(x))[0].detach())
mode("grad", gradient_by_func)
mode("vmap-of-grad", each_gradient_by_func)
mode("vmap-of-the-model", lambda m, x: torch.vmap(m)(x).detach())
mode("jacrev", lambda m, x: torch.func.jacrev(m)(x[0]).detach())
mode("jacfwd", lambda m, x: torch.func.jacfwd(m)(x[0]).detach())
mode("autograd-jacobian", lambda m, x: torch.autograd.functional.jacobian(m, x))
mode("autograd-hessian", lambda m, x: torch.autograd.functional.hessian(lambda v: m(v).sum(), x))
mode(
    "functional-call-under-no-grad",
    lambda m, x: torch.no_grad()(torch.func.functional_call)(m, dict(m.named_parameters()), (x,)),
)
mode("make-fx", lambda m, x: made_fx(m, x))
mode("fake-tensors", lambda m, x: fake(m, x))
mode(
    "meta-device",
    lambda m, x: torch.func.functional_call(
        m, {n: p.detach().to("meta") for n, p in m.named_parameters()}, (x.to("meta"),)
    ).shape.numel(),
)
mode("inference-mode", lambda m, x: torch.inference_mode()(m)(x).clone())
mode("deepcopy", lambda m, x: copy.deepcopy(m)(x).detach())
mode("flop-counter", lambda m, x: counted(m, x))
mode("anomaly-mode", lambda m, x: anomalous(m, x))
mode("saved-tensors-hooks", lambda m, x: saved_elsewhere(m, x))
mode(
    "gradcheck",
    lambda m, x: torch.tensor(float(torch.autograd.gradcheck(m, (x.clone().requires_grad_(),)))),
)


def made_fx(model: nn.Module, x: Tensor) -> Any:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(model)(x)(x).detach()


def fake(model: nn.Module, x: Tensor) -> Any:
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode_:
        return model(mode_.from_tensor(x)).shape.numel()


def counted(model: nn.Module, x: Tensor) -> Any:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False):
        return model(x).detach()


def anomalous(model: nn.Module, x: Tensor) -> Any:
    with torch.autograd.detect_anomaly(check_nan=True):
        output = model(x)
        output.square().mean().backward()
    model.zero_grad()
    return output.detach()


def saved_elsewhere(model: nn.Module, x: Tensor) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        output = model(x)
    output.square().mean().backward()
    model.zero_grad()
    return output.detach()


# ---- samples by their number, and few of them
# ----------------------------------------------------------------------------

_N = "by-number"
_few = {"batches": (4, 3, 2, 1)}

refused(
    _N,
    "diagonal-over-samples",
    made(lambda s, x: s.out(torch.diagonal(s.fc(x), 0, 0, 1).T), fc=linear(), out=linear()),
    normal(4, 3),
    batches=(4, 3, 2),
)
refused(
    _N,
    "diagonal-copied-over-samples",
    made(lambda s, x: s.out(torch.diagonal_copy(s.fc(x), 0, 0, 1).T), fc=linear(), out=linear()),
    normal(4, 3),
    batches=(4, 2),
)
exact(
    _N,
    "diagonal-of-each",
    made(lambda s, x: s.out(torch.diagonal(s.fc(x), 0, 1, 2)), fc=linear(), out=linear()),
    normal(3, 3),
    **_few,
)
refused(
    _N,
    "diagonal-written-over-samples",
    made(
        lambda s, x: s.out(torch.diagonal_scatter(s.fc(x), x.diagonal())), fc=linear(), out=linear()
    ),
    normal(3),
    batches=(4, 3, 2),
)
refused(
    _N,
    "triangle-over-samples",
    made(lambda s, x: s.out(torch.tril(s.fc(x), -1)), fc=linear(), out=linear()),
    normal(3),
    batches=(4, 3, 2),
)
refused(
    _N,
    "first-element-put",
    made(
        lambda s, x: s.out(s.fc(x).put(torch.tensor([0]), torch.zeros(1))),
        fc=linear(),
        out=linear(),
    ),
    normal(3),
    batches=(4, 3, 2),
)
either(
    _N,
    "parameter-with-a-row-for-each",
    made(lambda s, x: s.out(s.fc(x) + s.w), fc=linear(), out=linear(), w=weight(3, 3)),
    normal(3),
    batches=(3,),
    told=SLOTS,
)
either(
    _N,
    "parameter-cut-to-the-batch",
    made(lambda s, x: s.out(s.fc(x) * s.w[: len(x)]), fc=linear(), out=linear(), w=weight(5, 3)),
    normal(3),
    told=SLOTS,
    **_few,
)
either(
    _N,
    "embedding-of-row-numbers",
    made(
        lambda s, x: s.out(s.fc(x) + s.rows(torch.arange(len(x)))),
        fc=linear(),
        out=linear(),
        rows=layer(nn.Embedding, 5, 3),
    ),
    normal(3),
    told=SLOTS,
    **_few,
)
exact(
    _N,
    "embedding-of-time-steps",
    made(
        lambda s, x: s.out(s.fc(x) + s.rows(torch.arange(x.shape[1]))),
        fc=linear(),
        out=linear(),
        rows=layer(nn.Embedding, 5, 3),
    ),
    normal(4, 3),
    **_few,
)
exact(
    _N,
    "parameter-expanded-to-the-batch",
    made(
        lambda s, x: s.out(s.fc(x) * s.w.expand(len(x), 3)),
        fc=linear(),
        out=linear(),
        w=weight(1, 3),
    ),
    normal(3),
    **_few,
)
exact(
    _N,
    "parameter-repeated-to-the-batch",
    made(
        lambda s, x: s.out(s.fc(x) * s.w.repeat(len(x), 1)), fc=linear(), out=linear(), w=weight(3)
    ),
    normal(3),
    **_few,
)
either(
    _N,
    "sparse-and-back",
    made(lambda s, x: s.out(s.fc(x).to_sparse().to_dense()), fc=linear(), out=linear()),
    normal(3),
    **_few,
)


# ---- hooks of the user, wrappers, nesting
# ----------------------------------------------------------------------------

_4 = "hooks-and-nesting"


def hooked(
    attach: Callable[[Any], Any], expect: Callable[..., None], name: str, **options: Any
) -> None:
    def make() -> nn.Module:
        model = Fn(lambda s, x: s.out(s.fc(x).tanh()), fc=nn.Linear(3, 3), out=nn.Linear(3, 3))
        attach(model)
        return model

    expect(_4, name, make, normal(3), **options)


hooked(lambda m: m.fc.register_forward_hook(lambda mod, i, o: o * 2), exact, "output-doubled")
hooked(
    lambda m: m.fc.register_forward_hook(lambda mod, i, o: o.roll(2, 0)), refused, "output-rolled"
)
hooked(
    lambda m: m.register_forward_hook(lambda mod, i, o: o.softmax(1)), exact, "model-output-changed"
)
hooked(
    lambda m: m.register_forward_hook(lambda mod, i, o: o.roll(2, 0)),
    refused,
    "model-output-rolled",
)
hooked(
    lambda m: m.register_forward_hook(lambda mod, i, o: o - o.mean(0)),
    refused,
    "model-output-centred",
)
hooked(
    lambda m: m.register_forward_hook(lambda mod, i, o: o @ mod.fc.weight),
    either,
    "model-output-times-a-weight",
    warned=NO_MOMENTS,
)
hooked(lambda m: m.fc.register_forward_pre_hook(lambda mod, i: (i[0] * 2,)), exact, "input-doubled")
hooked(
    lambda m: m.fc.register_forward_pre_hook(lambda mod, i: (i[0].roll(2, 0),)),
    refused,
    "input-rolled",
)
hooked(
    lambda m: m.register_forward_pre_hook(lambda mod, i: (i[0].cos(),)),
    exact,
    "model-input-changed",
)
hooked(
    lambda m: m.register_forward_pre_hook(lambda mod, i: (i[0].roll(2, 0),)),
    either,
    "model-input-rolled",
    truth="graph",
)
hooked(
    lambda m: m.fc.register_full_backward_hook(lambda mod, gi, go: None),
    exact,
    "backward-looked-at",
)
hooked(
    lambda m: m.fc.register_full_backward_pre_hook(lambda mod, go: (go[0] * 2,)),
    either,
    "backward-doubled",
)
hooked(
    lambda m: m.out.register_full_backward_hook(lambda mod, gi, go: (gi[0] * 2,)),
    either,
    "gradient-of-the-input-doubled",
)


def centred(grads: tuple[Any, ...]) -> tuple[Any, ...]:
    """Take the mean over samples off each gradient that has one row for each of the four."""
    return tuple(g if g is None or len(g) != 4 else g - g.mean(0) for g in grads)


def global_hook(model: nn.Module) -> None:
    """Put a hook on all modules that there are; it does something for a layer of this one."""
    layer = weakref.ref(model.fc)  # the hook must not keep the model alive

    def hook(module: nn.Module, go: Any) -> Any:
        return centred(go) if module is layer() else None

    GLOBAL_HOOKS.append(nn.modules.module.register_module_full_backward_pre_hook(hook))


GLOBAL_HOOKS: list[Any] = []
"""Handles of hooks on all modules, of whatever model. They go after each row."""


def remove_global_hooks() -> None:
    while GLOBAL_HOOKS:
        GLOBAL_HOOKS.pop().remove()


hooked(
    lambda m: m.fc.register_full_backward_pre_hook(lambda mod, go: centred(go)),
    refused,
    "backward-centred",
)
hooked(
    lambda m: m.out.register_full_backward_pre_hook(lambda mod, go: centred(go)),
    refused,
    "backward-of-the-last-centred",
)
hooked(
    lambda m: m.out.register_full_backward_hook(lambda mod, gi, go: centred(gi)),
    refused,
    "gradient-of-the-input-centred",
)
hooked(
    lambda m: m.out.register_full_backward_hook(lambda mod, gi, go: (gi[0] * go[0].mean(),)),
    refused,
    "gradient-of-the-input-times-a-mean",
)
hooked(
    lambda m: m.register_full_backward_pre_hook(lambda mod, go: centred(go)),
    refused,
    "model-backward-centred",
)
hooked(
    lambda m: m.register_full_backward_pre_hook(lambda mod, go: (go[0].clamp(-0.1, 0.1),)),
    either,
    "model-backward-clipped",
    told=UNSCALED,
)
hooked(
    lambda m: m.fc.register_full_backward_hook(lambda mod, gi, go: gi and (gi[0],)),
    exact,
    "gradient-of-the-input-returned",
)
hooked(
    lambda m: m.out.register_backward_hook(lambda mod, gi, go: centred(gi)),
    refused,
    "backward-centred-by-an-old-hook",
)
hooked(global_hook, refused, "backward-centred-by-a-global-hook")


def behind(node: Any, name: str) -> Any:
    """Return the node of this name in the graph behind another."""
    nodes = [node]
    while nodes[0].name() != name:
        nodes = nodes[1:] + [n for n, _ in nodes[0].next_functions if n is not None]
    return nodes[0]


def on_the_node(attach: Callable[[Any], Any], expect: Callable[..., None], name: str) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        h = s.fc(s.first(x).sin())
        attach(h.grad_fn)
        return s.out(h.tanh())

    expect(_4, name, made(forward, first=linear(), fc=linear(), out=linear()), normal(3))


on_the_node(lambda node: node.name(), exact, "node-named")
on_the_node(lambda node: node.register_hook(lambda gi, go: None), exact, "node-looked-at")
on_the_node(
    lambda node: node.register_prehook(lambda go: (go[0] * 2,)), either, "node-before-doubled"
)
on_the_node(lambda node: node.register_prehook(centred), refused, "node-before-centred")
on_the_node(
    lambda node: node.register_hook(lambda gi, go: centred(gi)), refused, "node-after-centred"
)
on_the_node(
    lambda node: behind(node, "SinBackward0").register_prehook(centred),
    refused,
    "node-behind-it-centred",
)


class Passed(torch.autograd.Function):
    """Pass values on, and gradients as `how` says."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, way: str, how: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.how = how
        ways = {"view": x.view_as(x), "same": x, "slice": x[:], "flat": x.flatten(), "new": x * 1}
        return ways[way]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.how(grad).view(-1, 3), None, None


def passed(
    way: str, name: str, how: Callable[[Tensor], Tensor], expect: Callable[..., None]
) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        return s.out(Passed.apply(s.fc(x).tanh(), way, how).view(-1, 3))

    expect(_4, f"passed-as-{way}-{name}", made(forward, fc=linear(), out=linear()), normal(3))


for _way in ("view", "same", "slice", "new"):
    passed(_way, "reversed", lambda g: -g, exact)
    passed(_way, "centred", lambda g: g - g.mean(0), refused)
    passed(_way, "flipped", lambda g: g.flip(0), refused)
    passed(_way, "normed", lambda g: g / g.norm(), refused)


def hooked_late(attach: Callable[[Any], Any], expect: Callable[..., None], name: str) -> None:
    """A hook that is put on after `observe`."""

    def use(model: nn.Module, inputs: Inputs, weights: Tensor) -> Any:
        handle = attach(model)
        try:
            output = model(*inputs)
            loss_of(output, weights).backward()
        finally:
            handle.remove()
        return output

    two = made(lambda s, x: s.out(s.fc(x).tanh()), fc=linear(), out=linear())
    expect(_4, name, two, normal(3), use=use)


hooked_late(
    lambda m: m.register_forward_hook(lambda mod, i, o: o - o.mean(0)),
    refused,
    "late-model-output-centred",
)
hooked_late(
    lambda m: m.register_forward_hook(lambda mod, i, o: o.roll(1, 0)),
    refused,
    "late-model-output-rolled",
)
hooked_late(
    lambda m: m.register_forward_hook(lambda mod, i, o: o.softmax(1)),
    exact,
    "late-model-output-changed",
)
hooked_late(
    lambda m: m.register_forward_pre_hook(lambda mod, i: (i[0] - i[0].mean(0),)),
    refused,
    "late-model-input-centred",
)
hooked_late(
    lambda m: m.fc.register_full_backward_pre_hook(lambda mod, go: centred(go)),
    refused,
    "late-backward-centred",
)
hooked_late(
    lambda m: m.register_full_backward_pre_hook(lambda mod, go: centred(go)),
    refused,
    "late-model-backward-centred",
)
hooked(lambda m: m.fc.requires_grad_(False), exact, "one-layer-frozen")
hooked(lambda m: m.fc.bias.requires_grad_(False), exact, "one-bias-frozen")
exact(
    _4,
    "inner-model-observed",
    made(lambda s, x: s.out(s.body(x).sin()), body=Tower, out=linear()),
    normal(4, 3),
    observed=lambda m: [m.body],
)
either(
    _4,
    "inner-and-outer-observed",
    made(lambda s, x: s.out(s.body(x).sin()), body=Tower, out=linear()),
    normal(4, 3),
    observed=lambda m: [m.body, m],
)
either(
    _4,
    "outer-and-inner-observed",
    made(lambda s, x: s.out(s.body(x).sin()), body=Tower, out=linear()),
    normal(4, 3),
    observed=lambda m: [m, m.body],
)
exact(
    _4,
    "two-observed-in-a-row",
    made(lambda s, x: s.right(s.left(x)), left=Tower, right=Tower),
    normal(4, 3),
    observed=lambda m: [m.left, m.right],
)
exact(
    _4,
    "sequential-with-itself",
    made(lambda s, x: s.seq(x), seq=lambda: nn.Sequential(*[nn.Linear(3, 3)] * 3)),
    normal(3),
)
exact(_4, "shared-by-two-modules", lambda: tied(), normal(3))
exact(
    _4,
    "module-list-and-dict",
    made(
        lambda s, x: sum(m(x) for m in s.many) + s.some["a"](x),
        many=lambda: nn.ModuleList([nn.Linear(3, 3), nn.Tanh()]),
        some=lambda: nn.ModuleDict({"a": nn.Linear(3, 3)}),
    ),
    normal(3),
)
exact(
    _4,
    "parameter-list",
    made(
        lambda s, x: sum(x @ p for p in s.many),
        many=lambda: nn.ParameterList([nn.Parameter(torch.randn(3, 3)) for _ in range(3)]),
    ),
    normal(3),
)
exact(
    _4,
    "parameter-dict",
    made(
        lambda s, x: x @ s.some["a"] + s.some["b"],
        some=lambda: nn.ParameterDict({"a": torch.randn(3, 3), "b": torch.randn(3)}),
    ),
    normal(3),
)


def tied() -> nn.Module:
    model = Fn(
        lambda s, x: s.out(s.fc(x)) + x @ s.fc.weight, fc=nn.Linear(3, 3), out=nn.Linear(3, 3)
    )
    model.out.weight = model.fc.weight
    return model


# ---- sizes that coincide, ties, constants
# ----------------------------------------------------------------------------

_5 = "coincidence"


def square(
    name: str,
    forward: Callable[..., Any],
    expect: Callable[..., None] = exact,
    inputs: Any = None,
    truth: str = "alone",
    **parts: Any,
) -> None:
    parts = parts or {"fc": linear(4, 4), "out": linear(4, 4), "mix": weight(4, 4)}
    expect(_5, name, made(forward, **parts), inputs or normal(4, 4), batches=(4, 2, 1), truth=truth)


square("mixer", lambda s, x: s.out(s.fc(x.mT).mT))
square(
    "mixer-of-samples",
    lambda s, x: s.out(s.fc(x) + (s.mix[: len(x), : len(x)] @ x.flatten(1)).view(x.shape)),
    refused,
)
square("time-mixing-parameter", lambda s, x: s.mix @ s.fc(x))
square("time-mixing-parameter-of-one-vector", lambda s, x: s.mix @ s.fc(x[:, 0])[..., None])
square("sample-mixing-parameter", lambda s, x: s.mix[: len(x), : len(x)] @ s.fc(x[:, 0]), refused)
square("attention-of-steps", lambda s, x: (s.fc(x) @ x.mT).softmax(-1) @ s.out(x))
square(
    "steps-first-throughout",
    lambda s, x: s.out(s.fc(x.transpose(0, 1)).cumsum(0).softmax(0)).transpose(0, 1),
)
square(
    "steps-first-and-wrong",
    lambda s, x: s.out(s.fc(x.transpose(0, 1)).softmax(1)).transpose(0, 1),
    refused,
)
square("mean-over-steps-first", lambda s, x: s.out(s.fc(x.transpose(0, 1)).mean(0)))
square("positions", lambda s, x: s.fc(x) + s.mix)
square("positions-of-features", lambda s, x: s.fc(x[:, 0]) + s.mix[0])
square("positions-as-samples", lambda s, x: s.fc(x[:, 0]) + s.mix[: len(x)], either, truth="graph")
square("folded-and-unfolded", lambda s, x: s.out(s.fc(x.reshape(-1, 4)).reshape(-1, 4, 4).mT))
square(
    "folded-wrongly",
    lambda s, x: s.out(x + s.fc(x.transpose(0, 1).reshape(-1, 4)).reshape(-1, 4, 4)),
    refused,
)
square(
    "windows",
    lambda s, x: s.out(s.fc(x.view(-1, 2, 2, 4).flatten(0, 1)).view(-1, 2, 2, 4).flatten(1, 2)),
)
square(
    "windows-swapped",
    lambda s, x: s.out(
        s.fc(x.view(-1, 2, 2, 4).transpose(1, 2).flatten(0, 1)).view(-1, 2, 2, 4)
    ).flatten(1, 2),
)
square(
    "heads",
    lambda s, x: F.scaled_dot_product_attention(
        *(s.fc(x).view(-1, 4, 2, 2).transpose(1, 2) for _ in range(3))
    ).flatten(1),
)
square(
    "heads-folded-into-samples",
    lambda s, x: (
        torch.bmm(h := s.fc(x).view(-1, 4, 2, 2).transpose(1, 2).flatten(0, 1), h.mT)
        .softmax(-1)
        .view(-1, 2, 4, 4)
        .flatten(1)
    ),
)
square("zero-layer", lambda s, x: s.out(x @ s.mix), mix=zero(4, 4), out=linear(4, 4))
square(
    "zero-layer-transposed",
    lambda s, x: s.out((x.transpose(0, 1) @ s.mix).transpose(0, 1)),
    mix=zero(4, 4),
    out=linear(4, 4),
)
square("alike", lambda s, x: s.out(s.fc(x.transpose(0, 1)).transpose(0, 1)), inputs=alike(4, 4))
square("nothing", lambda s, x: s.out(s.fc(x.transpose(0, 1)).transpose(0, 1)), inputs=zeros(4, 4))
square("ties-in-max", lambda s, x: s.out(torch.amax(s.fc(x * 0), 1)))
square("ties-in-sort", lambda s, x: s.out(s.fc(x.round()).sort(1).values))
square(
    "ties-over-samples",
    lambda s, x: s.out(s.fc(x.round()) + s.fc(x * 0).amax(0)),
    either,
    alike(4, 4),
)
square("constant-output", lambda s, x: s.fc(x) * 0 + 1)
square("constant-of-the-input", lambda s, x: s.out(torch.sign(s.fc(x) + 100)))
square("rounded", lambda s, x: s.out(s.fc(x).round()) + s.mix)
square("one-hot-of-largest", lambda s, x: s.out(F.one_hot(s.fc(x).argmax(-1), 4).double()))
square(
    "largest-over-samples",
    lambda s, x: s.out(F.one_hot(s.fc(x).argmax(0), 4).double().mean(0) + s.fc(x)),
    refused,
)
square("hard-top-step", lambda s, x: s.out(s.fc(x).topk(2, 1).values))
square("dead-units", lambda s, x: s.out(F.relu(s.fc(x) - 100)) + s.mix)
square(
    "conv-over-samples",
    lambda s, x: s.conv(x.permute(1, 2, 0)).permute(2, 0, 1),
    refused,
    conv=layer(nn.Conv1d, 4, 4, 3, padding=1),
)
square("conv-over-steps", lambda s, x: s.conv(x), conv=layer(nn.Conv1d, 4, 4, 3, padding=1))
square("rnn-over-samples", lambda s, x: s.rnn(x)[0], refused, rnn=layer(nn.RNN, 4, 4))
square(
    "rnn-over-steps",
    lambda s, x: s.rnn(x.transpose(0, 1))[0].transpose(0, 1),
    rnn=layer(nn.RNN, 4, 4),
)
square(
    "attention-over-samples",
    lambda s, x: s.att(x, x, x)[0],
    refused,
    att=layer(nn.MultiheadAttention, 4, 2),
)
square(
    "attention-over-steps",
    lambda s, x: s.att(*[x.transpose(0, 1)] * 3)[0].transpose(0, 1),
    att=layer(nn.MultiheadAttention, 4, 2),
)
square(
    "transformer-wrong-way",
    lambda s, x: s.block(x),
    refused,
    block=lambda: nn.TransformerEncoderLayer(4, 2, 4, dropout=0.0),
)
square(
    "layer-norm-over-samples",
    lambda s, x: s.out(F.layer_norm(s.fc(x).transpose(0, -1), (x.shape[0],)).transpose(0, -1)),
    refused,
)
square("layer-norm-over-everything", lambda s, x: s.out(F.layer_norm(s.fc(x), x.shape)), refused)
square(
    "group-norm-of-samples-as-channels",
    lambda s, x: s.out(F.group_norm(s.fc(x)[None], 1)[0]),
    refused,
)
square(
    "embedding-bag-of-all",
    lambda s, i: s.out(s.bag(i.flatten(), torch.tensor([0]))).expand(len(i), 4),
    refused,
    ids(4),
    bag=layer(nn.EmbeddingBag, 5, 4),
    out=linear(4, 4),
)
square(
    "unflatten-of-one-sample",
    lambda s, x: s.out(s.fc(x[:1].squeeze(0)) if len(x) == 1 else s.fc(x).view(-1, 4, 4)).view(
        -1, 4, 4
    ),
)
square("squeeze-of-everything", lambda s, x: s.out(s.fc(x[:, :1]).squeeze()).view(-1, 4))


# ---- what random graphs found
# -----------------------------------------------------------------------------------

_G = "graphs-found"


def _rolled_then_vmap(s: Any, x: Tensor) -> Tensor:
    v = x.clone()
    v[1:] = x[:-1]
    return torch.func.vmap(torch.tanh)(s.fc(v * 1.0))


def _real_part(s: Any, x: Tensor) -> Tensor:
    v = torch.fft.fft(x, dim=1).real[:, :]
    return s.fc(v.masked_fill_(v < 0, 0.1))


def _derived_in_checkpoint(s: Any, x: Tensor) -> Tensor:
    h = checkpoint(lambda a: torch.relu(s.fc(a) + s.w * s.u), x, use_reentrant=True)
    return h * s.w


def _rows_by_number(s: Any, x: Tensor, k: Tensor) -> Tensor:
    rows, chosen = x.reshape(-1, 2), k.flatten().nonzero().squeeze(1)
    return torch.zeros_like(rows).index_add(0, chosen, s.fc(rows[chosen])).view(x.shape)


def _rows_and_ones(batch: int) -> Inputs:
    return torch.randn(batch, 2, 2), torch.ones(batch, dtype=torch.long)


refused(_G, "written-across-then-vmap", made(_rolled_then_vmap, fc=linear()), normal(3))
exact(_G, "write-into-a-real-part", made(_real_part, fc=linear()), normal(3))
exact(
    _G,
    "derived-in-a-reentrant-checkpoint",
    made(_derived_in_checkpoint, fc=linear(), w=weight(3), u=weight(3)),
    lambda batch: (torch.randn(batch, 3, requires_grad=True),),
)
exact(
    _G,
    "gradient-of-exactly-zero",
    made(lambda s, x: F.normalize(s.w, dim=0) - s.fc(x), w=weight(1), fc=linear(3, 1)),
    normal(3),
)
refused(
    _G,
    "alike-and-scaled-by-a-sum",
    made(lambda s, x: s.fc(x * sum(x.flatten().tolist())), fc=linear()),
    alike(3),
)
refused(_G, "rows-by-their-number", made(_rows_by_number, fc=linear(2, 2)), _rows_and_ones)


def alike_at_first(*shape: int) -> Callable[[int], Inputs]:
    """Give every sample the same values in the first round, which the judge seeds with 10."""
    return lambda batch: (alike if torch.initial_seed() == 10 else normal)(*shape)(batch)


for _name, _sorted in {
    "sort": lambda h: h.sort(0).values,
    "msort": torch.msort,
    "gather": lambda h: h.gather(0, h.argsort(0)),
    "topk": lambda h: h.topk(len(h), 0).values,
    "cummax": lambda h: h.cummax(0).values,
    "cummin": lambda h: h.cummin(0).values,
    "kthvalue": lambda h: h + h.kthvalue(1, 0).values,
    "median": lambda h: h + h.median(0).values,
    "quantile": lambda h: h + h.quantile(0.5, 0),
    "rows-by-order": lambda h: h[h[:, 0].argsort()],
    "rank": lambda h: h * torch.searchsorted(h.detach().flatten().sort().values, h.detach()),
    "number-of-different": lambda h: h * len(h.detach().unique(dim=0)),
}.items():
    either(
        _G,
        f"alike-at-first-then-{_name}",
        made(lambda s, x, f=_sorted: f(s.fc(x)), fc=linear(3, 1)),
        alike_at_first(3),
        batches=(2, 3),
    )


# ---- an attack from outside: small models for one idea each
# -----------------------------------------------------------------------------------

_7 = "from-outside"


def attack(
    expect: Callable[..., None],
    name: str,
    forward: Callable[..., Any],
    inputs: Callable[[int], Inputs] | None = None,
    **parts: Any,
) -> None:
    """Add a row of a model with two layers `fc` and `out` of four features, and other parts."""
    options = {k: parts.pop(k) for k in ("told", "batches") if k in parts}
    layers = {"fc": linear(4, 4), "out": linear(4, 4)} | parts
    options = {"batches": (4, 3, 2, 1)} | options
    expect(_7, name, made(forward, **layers), inputs or normal(4), **options)


def numbered(name: str, forward: Callable[..., Any], **options: Any) -> None:
    """Add a row of a model in which the number of samples counts, of which a warning tells."""
    attack(
        refused, f"number-of-samples-{name}", forward, told=COUNTED, batches=(3, 2, 1), **options
    )


def one_label(batch: int) -> Inputs:
    return torch.randn(batch, 4), torch.zeros(batch, dtype=torch.long)


numbered("as-power", lambda s, x: s.fc(x).pow(len(x)))
numbered("as-divisor", lambda s, x: s.fc(x) / x.shape[0])
numbered("under-a-root", lambda s, x: s.fc(x) * x.size(0) ** 0.5)
numbered("of-elements", lambda s, x: s.fc(x) * x.numel())
numbered("in-a-tensor", lambda s, x: s.fc(x) * x.new_full((), x.shape[0]))
numbered("by-a-sum-of-ones", lambda s, x: s.fc(x) / torch.ones_like(x[:, 0]).sum())
numbered("by-a-row-for-each", lambda s, x: s.fc(x) * torch.linspace(0.1, 1, len(x))[:, None])
numbered("by-turned-rows", lambda s, x: s.fc(x) * torch.arange(4.0 * len(x)).view(-1, 4).cos())
numbered(
    "with-one-label",
    lambda s, x, k: s.fc(x) * torch.bincount(k, minlength=3)[k][:, None],
    inputs=one_label,
)

attack(exact, "vmap-and-turned-back", lambda s, x: torch.vmap(torch.sin, 0, 1)(s.fc(x)).t())
attack(
    refused,
    "vmap-over-features",
    lambda s, x: torch.vmap(lambda v: v / (1 + v.norm()), in_dims=1, out_dims=1)(s.fc(x)),
)
attack(
    either,
    "vmap-of-jacobians",
    lambda s, x: s.fc(x) + torch.vmap(torch.func.jacrev(lambda v: v.tanh() * v.sum()))(x).sum(1),
)
attack(
    either,
    "vector-jacobian-product",
    lambda s, x: torch.func.vjp(lambda v: v.sin().cumsum(1), s.fc(x))[1](x)[0],
)
attack(
    refused,
    "vector-jacobian-product-over-samples",
    lambda s, x: torch.func.vjp(lambda v: v.sin().cumsum(0), s.fc(x))[1](x)[0],
)
attack(
    either,  # rounding depends on where it lies in memory, and may be more than a trial allows
    "least-squares-of-each",
    lambda s, x: torch.linalg.lstsq(s.fc(x) + 3 * torch.eye(4), x).solution,
    normal(4, 4),
)
attack(
    exact,
    "cholesky-of-each",
    lambda s, x: torch.linalg.cholesky(s.fc(x) @ s.fc(x).mT + torch.eye(4)),
    normal(4, 4),
)
attack(
    refused,
    "whitened",
    lambda s, x: torch.linalg.solve(torch.eye(4) + s.fc(x).t() @ s.fc(x), s.fc(x).t()).t(),
)
attack(
    exact,
    "segments-of-one",
    lambda s, x: torch.segment_reduce(
        s.fc(x), "mean", lengths=torch.ones(len(x), dtype=torch.long), axis=0
    ),
)
attack(
    refused,
    "segments-of-neighbours",
    lambda s, x: s.out(
        torch.segment_reduce(
            torch.cat([s.fc(x)] * 2), "sum", lengths=torch.full((len(x),), 2), axis=0
        )
    ),
)
attack(
    exact,
    "scatter-reduce-in-each",
    lambda s, x: torch.zeros(len(x), 2).scatter_reduce(
        1, torch.tensor([0, 1, 0, 1]).expand(len(x), 4), s.fc(x), "mean"
    ),
)
attack(
    refused,
    "index-reduce-to-the-first",
    lambda s, x: s.out(
        torch.ones(len(x), 4).index_reduce(
            0, torch.zeros(len(x), dtype=torch.long), s.fc(x) ** 2, "mean"
        )
    ),
)
attack(
    refused,
    "put-transposed",
    lambda s, x: s.out(torch.zeros(4, len(x)).put(torch.arange(x.numel()).view_as(x), s.fc(x)).t()),
    batches=(4, 3, 2),
)
attack(refused, "histogram-of-all", lambda s, x: s.fc(x) * torch.histc(x, 4))
attack(exact, "fftshift-of-features", lambda s, x: torch.fft.fftshift(s.fc(x), dim=1))
attack(refused, "fftshift-of-all", lambda s, x: torch.fft.fftshift(s.fc(x)), batches=(4, 3, 2))
attack(
    exact,
    "convolved-by-fft",
    lambda s, x: torch.fft.irfft(torch.fft.rfft(s.fc(x)) * torch.fft.rfft(s.k), n=4),
    k=weight(4),
)
attack(exact, "rotated-and-back", lambda s, x: s.fc(x).rot90(1, (0, 1)).rot90(-1, (0, 1)))
attack(refused, "rotated-by-half", lambda s, x: s.fc(x).rot90(2, (0, 1)), batches=(4, 3, 2))
attack(
    exact,
    "sampled-by-a-grid",
    lambda s, x: F.grid_sample(
        s.c(x),
        F.affine_grid(s.place(x.flatten(1)).view(-1, 2, 3), list(x.shape), align_corners=False),
        align_corners=False,
    ),
    normal(2, 4, 4),
    c=layer(nn.Conv2d, 2, 2, 1),
    place=linear(32, 6),
)
attack(
    exact,
    "ctc",
    lambda s, x: F.ctc_loss(
        s.fc(x).log_softmax(-1).transpose(0, 1),
        torch.ones(len(x), 2, dtype=torch.long),
        torch.full((len(x),), 4),
        torch.full((len(x),), 2),
    ),
    normal(4, 4),
)
attack(
    refused,
    "triplets-of-neighbours",
    lambda s, x: F.triplet_margin_loss(s.fc(x), s.fc(x * 2), s.fc(x).roll(1, 0)),
    batches=(4, 3, 2),
)
attack(
    refused,
    "dice-of-the-batch",
    lambda s, x: 1 - (s.fc(x).sigmoid() * (x > 0)).sum() / (s.fc(x).sigmoid().sum() + 1),
)
attack(
    exact,
    "padded-keys-and-weights",
    lambda s, x: s.att(x, x, x, key_padding_mask=x[:, :, 0] > 1, need_weights=True),
    lambda batch: (torch.randn(batch, 4, 4).clamp(max=0.9),),
    att=layer(nn.MultiheadAttention, 4, 2, batch_first=True, add_bias_kv=True),
)
attack(
    exact,
    "bias-of-attention-for-all",
    lambda s, x: F.scaled_dot_product_attention(*[s.fc(x)] * 3, attn_mask=s.bias),
    normal(4, 4),
    bias=weight(4, 4),
)
attack(
    refused,
    "samples-as-a-sequence",
    lambda s, x: F.scaled_dot_product_attention(*[s.fc(x)[None]] * 3)[0],
)
attack(
    exact,
    "orthogonal-by-householder",
    lambda s, x: s.turn(x),
    turn=lambda: parametrizations.orthogonal(nn.Linear(4, 4), orthogonal_map="householder"),
)
attack(refused, "mixup-of-features", lambda s, x: s.out(0.7 * (h := s.fc(x)) + 0.3 * h.roll(1, 0)))
attack(
    refused,
    "cut-and-mixed",
    lambda s, x: s.out(torch.cat([(h := s.fc(x))[:, :2], h.flip(0)], 1)),
    out=linear(6, 2),
)
attack(
    refused,
    "generated-by-the-mean",
    lambda s, x: F.linear(s.fc(x), s.hyper(x.mean(0)).view(4, 4)),
    hyper=linear(4, 16),
)
attack(
    exact,
    "generated-for-each",
    lambda s, x: torch.bmm(s.hyper(x).view(-1, 4, 4), s.fc(x)[:, :, None])[..., 0],
    hyper=linear(4, 16),
)
attack(refused, "step-by-the-norm-of-all", lambda s, x: x + s.fc(x) * min(1.0, 1 / float(x.norm())))


# ---- a second attack from outside: what it found, and its families
# -----------------------------------------------------------------------------------

_8 = "second-attack"


def again(
    expect: Callable[..., None],
    name: str,
    forward: Callable[..., Any],
    inputs: Callable[[int], Inputs] | None = None,
    **parts: Any,
) -> None:
    """Add a row of a model with two layers `fc` and `out` of four features, and other parts."""
    options = {k: parts.pop(k) for k in ("batches", "call", "truth", "warned") if k in parts}
    layers = {"fc": linear(4, 4), "out": linear(4, 4)} | parts
    options = {"batches": (4, 3, 1)} | options
    expect(_8, name, made(forward, **layers), inputs or normal(4), **options)


# Statistics of the batch that no torch function mode sees being made.


def unseen(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, run where modes do not reach."""

    def run(*args: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return f(*args)

    return run


def in_a_thread(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, run in another thread."""

    def run(*args: Any) -> Any:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            return pool.submit(f, *args).result()

    return run


@scripted
def _scripted_mean(x: Tensor) -> Tensor:
    return x.mean()


@scripted
def _scripted_mean_of_columns(x: Tensor) -> Tensor:
    return x.detach().mean(0)


@scripted
def _scripted_number(x: Tensor) -> float:
    return float(x.mean())


@scripted
def _scripted_answer(x: Tensor) -> bool:
    return bool(x[:, 0].mean() > 0.0)


class _MeanOfColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.mean(0)

    @staticmethod
    def backward(ctx, grad):
        return None


for _name, _statistic in {
    "without-modes": unseen(lambda t: t.detach().mean()),
    "without-modes-of-columns": unseen(lambda t: t.detach().mean(0)),
    "in-a-thread": in_a_thread(lambda t: t.detach().mean()),
    "scripted": _scripted_mean,
    "scripted-of-columns": _scripted_mean_of_columns,
    "scripted-number": _scripted_number,
    "scripted-answer": lambda t: 1.0 + _scripted_answer(t),
    "function": _MeanOfColumns.apply,
    "storage": lambda t: sum(t.clone().untyped_storage().tolist()) / 1e3,
    "bytes": lambda t: sum(bytes(t.clone().untyped_storage())) / 1e3,
    "array": lambda t: torch.from_numpy(t.numpy().mean(0)),
}.items():
    again(
        refused,
        f"statistic-of-the-input-{_name}",
        lambda s, x, f=_statistic: s.out(s.fc(x) * f(x)),
    )
    again(
        refused,
        f"statistic-of-features-{_name}",
        lambda s, x, f=_statistic: s.out((h := s.fc(x)) * f(h.detach())),
    )

_TWO = torch.full((4,), 2.0, dtype=torch.float64)
again(exact, "constant-of-the-file", lambda s, x: s.out(s.fc(x) * _TWO))
again(exact, "constant-of-the-file-as-long-as-the-batch", lambda s, x: s.out(s.fc(x) * _TWO[:4]))
again(exact, "layer-in-a-thread", lambda s, x: in_a_thread(s.out)(s.fc(x)))
again(either, "function-in-a-thread", lambda s, x: s.out(in_a_thread(torch.tanh)(s.fc(x))))
again(refused, "rolled-in-a-thread", lambda s, x: in_a_thread(lambda h: h.roll(1, 0))(s.fc(x)),
      batches=(4, 3, 2))  # fmt: skip
again(refused, "rolled-without-modes", lambda s, x: s.out(unseen(lambda h: h.roll(1, 0))(s.fc(x))),
      batches=(4, 3, 2))  # fmt: skip


# A backward of the user's that writes to gradients, or runs modules: a trial must leave no trace.


class _AddsItself(torch.autograd.Function):
    """Adds the gradient of its weight to `.grad` itself, as fused kernels do."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x)
        ctx.w = w
        return x @ w.detach().t()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        new = grad.t() @ x
        ctx.w.grad = new if ctx.w.grad is None else ctx.w.grad + new
        return grad @ ctx.w.detach(), None


class _RunsAgain(torch.autograd.Function):
    """Keeps nothing, and runs a module again in its backward, as reversible layers do."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.save_for_backward(x)
        ctx.module = module
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            torch.autograd.backward(ctx.module(x), grad)
        return x.grad, None


again(either, "backward-that-adds-to-a-gradient",
      lambda s, x: s.out(_AddsItself.apply(s.fc(x), s.w)), w=weight(4, 4),
      warned=NO_MOMENTS)  # fmt: skip
again(either, "backward-that-adds-to-a-gradient-that-is-measured",
      lambda s, x: s.out(_AddsItself.apply(s.fc(x), s.fc.weight)), warned=NO_MOMENTS)  # fmt: skip
again(exact, "backward-that-runs-a-module-again",
      lambda s, x: s.out(_RunsAgain.apply(s.fc(x), s.mid)), mid=linear(4, 4))  # fmt: skip
again(
    refused,
    "backward-that-runs-a-module-again-that-mixes",
    lambda s, x: s.out(_RunsAgain.apply(s.fc(x), s.mid)),
    mid=made(lambda s, x: s.fc(x - x.mean(0)), fc=linear(4, 4)),
)


# Modes of the user's.


class _Passes(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class _Rolls(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out.roll(1, 0) if func is torch.tanh else out


def within(mode: Callable[[], Any]) -> Callable[..., Any]:
    def call(model: nn.Module, x: Tensor) -> Any:
        with mode():
            return model(x)

    return call


def _tanh_between(s: Any, x: Tensor) -> Tensor:
    return s.out(torch.tanh(s.fc(x)))


again(exact, "mode-around-the-model", _tanh_between, call=within(_Passes))
again(exact, "device-around-the-model", _tanh_between, call=within(lambda: torch.device("cpu")))
again(refused, "mode-around-the-model-that-rolls", _tanh_between, call=within(_Rolls),
      batches=(4, 3, 2))  # fmt: skip


# Outputs in objects, closures and containers of the model.


class _Holder:
    def __init__(self, held: Any):
        self.held = held


def _left_in_a_list(s: Any, x: Tensor) -> Tensor:
    s.left = [s.fc(x)[x[:, 0].argsort()]]
    return s.out(x)


def _left_in_a_dict(s: Any, x: Tensor) -> Tensor:
    s.left = {"last": s.fc(x).t()}
    return s.out(x)


again(refused, "output-of-two-objects", lambda s, x: _Holder(_Holder(s.fc(x).roll(1, 0))),
      call=lambda model, x: model(x).held.held, batches=(4, 3, 2))  # fmt: skip
again(exact, "output-of-two-objects-in-order", lambda s, x: _Holder(_Holder(s.fc(x))),
      call=lambda model, x: model(x).held.held)  # fmt: skip
again(refused, "output-of-two-objects-time-first",
      lambda s, x: _Holder(_Holder(s.fc(x).transpose(0, 1))), normal(4, 4),
      call=lambda model, x: model(x).held.held, batches=(4,))  # fmt: skip
again(refused, "output-in-a-closure", lambda s, x: (lambda h: lambda: h)(s.fc(x).roll(1, 0)),
      call=lambda model, x: model(x)(), batches=(4, 3, 2))  # fmt: skip
again(refused, "output-in-a-partial", lambda s, x: functools.partial(max, s.fc(x).flip(0)),
      call=lambda model, x: model(x).args[0], batches=(4, 3, 2))  # fmt: skip
again(refused, "output-in-a-list-of-the-model", _left_in_a_list,
      call=lambda model, x: (model(x), model.left[0])[1], batches=(4, 3))  # fmt: skip
again(refused, "output-in-a-dict-of-the-model", _left_in_a_dict,
      call=lambda model, x: (model(x), model.left["last"])[1], batches=(4,))  # fmt: skip


# Others.

again(
    refused,
    "lookup-by-frequency",
    lambda s, i: F.embedding(i, s.w, scale_grad_by_freq=True).sum(1),
    ids(3),
    w=weight(5, 4),
    batches=(4, 3),
)
again(exact, "normal-with-a-fixed-deviation", lambda s, x: s.out(Normal(s.fc(x), 1.0).rsample()),
      truth="graph")  # fmt: skip
again(exact, "normal-with-a-learned-deviation",
      lambda s, x: Normal(s.fc(x), s.w.exp()).rsample(), w=weight(4), truth="graph")  # fmt: skip
again(exact, "density-with-a-learned-deviation",
      lambda s, x: Normal(s.fc(x), s.w.exp()).log_prob(x), w=weight(4))  # fmt: skip


# ---- a third attack from outside: what it found
# -----------------------------------------------------------------------------------

_9 = "third-attack"


def third(
    expect: Callable[..., None],
    name: str,
    forward: Callable[..., Any],
    inputs: Callable[[int], Inputs] | None = None,
    **parts: Any,
) -> None:
    """Add a row of a model with a layer `fc` of four features, and other parts."""
    options = {k: parts.pop(k) for k in ("batches", "named", "warned") if k in parts}
    layers = {"fc": linear(4, 4)} | parts
    options = {"batches": (4, 3, 2, 1)} | options
    expect(_9, name, made(forward, **layers), inputs or normal(4), **options)


# Complex layers: their gradients have conjugates in them.


def complex_layer(name: str, forward: Callable[..., Any], *shape: int, bias: int = 4) -> None:
    """Add a row of a model in which a complex weight, and a complex bias, meet a spectrum."""

    def run(s: Any, x: Tensor) -> Tensor:
        spectrum = torch.fft.fft(s.fc(x))
        out: Tensor = forward(spectrum, torch.complex(s.a, s.b), torch.complex(s.c, s.d))
        return out.abs()

    parts = dict.fromkeys("ab", weight(*shape)) | dict.fromkeys("cd", weight(bias))
    third(exact, f"complex-{name}", run, normal(4, 4), **parts)


complex_layer("matmul", lambda z, w, b: z @ w + b, 4, 4)
complex_layer("linear", lambda z, w, b: F.linear(z, w, b), 4, 4)
complex_layer("addmm", lambda z, w, b: torch.addmm(b, z.flatten(0, 1), w).view(z.shape), 4, 4)
complex_layer("convolution", lambda z, w, b: F.conv1d(z, w, b), 3, 4, 2, bias=3)
complex_layer("einsum", lambda z, w, b: torch.einsum("bki,kio->bko", z, w) + b, 4, 4, 4)
complex_layer("outer", lambda z, w, b: torch.einsum("bki,j->bkij", z, w) + b, 4)
third(
    exact,
    "complex-input-of-a-real-weight",
    lambda s, x: (torch.fft.fft(x) @ s.fc.weight.to(torch.complex128)).abs(),
)
third(
    exact,
    "fourier-neural-operator",
    lambda s, x: torch.fft.irfft(
        torch.einsum("bki,kio->bko", torch.fft.rfft(x, dim=1), torch.view_as_complex(s.w)), 4, 1
    ),
    normal(4, 4),
    w=weight(3, 4, 4, 2),
)


# Writers that add, by keywords, or write numbers.


def reversed_rows(x: Tensor) -> Tensor:
    """Return the numbers of rows in reverse, for each element of `x`."""
    return torch.arange(len(x)).flip(0)[:, None].expand(-1, x.shape[1])


def swapped_columns(x: Tensor) -> Tensor:
    return torch.tensor([1, 0, 3, 2]).expand(len(x), 4)


third(
    refused,
    "scatter-that-adds-over-samples",
    lambda s, x: (
        s.fc(x) * torch.zeros_like(x).scatter(0, reversed_rows(x), s.fc(x).detach(), reduce="add")
    ),
)
third(
    exact,
    "scatter-that-multiplies",
    lambda s, x: (
        s.fc(x)
        * torch.ones_like(x).scatter(1, swapped_columns(x), s.fc(x).detach(), reduce="multiply")
    ),
)
third(
    exact,
    "scatter-that-multiplies-in-place",
    lambda s, x: s.fc(x) * x.cos().scatter_(1, swapped_columns(x), x.sin(), reduce="multiply"),
)
third(
    exact,
    "index-add-by-keywords",
    lambda s, x: x.index_add(dim=0, index=torch.arange(len(x)), source=s.fc(x), alpha=2),
)
third(
    refused,
    "index-add-by-keywords-over-samples",
    lambda s, x: torch.index_add(
        input=x, dim=0, index=torch.arange(len(x)).flip(0), source=s.fc(x)
    ),
)
third(
    exact,
    "index-add-by-keywords-in-place",
    lambda s, x: (s.fc(x) + 0).index_add_(dim=1, index=torch.tensor([2]), source=x[:, :1]),
)
third(
    exact,
    "scatter-add-by-keywords",
    lambda s, x: torch.scatter_add(input=x, dim=1, index=swapped_columns(x), src=s.fc(x)),
)
third(
    exact,
    "index-put-by-keywords",
    lambda s, x: x.index_put(indices=(torch.arange(len(x)),), values=s.fc(x), accumulate=True),
)
third(exact, "largest-two-set-to-zero", lambda s, x: s.fc(x).scatter(1, x.topk(2).indices, 0.0))
third(
    exact,
    "largest-two-set-by-keyword",
    lambda s, x: s.fc(x).scatter(1, x.topk(2).indices, value=1.0),
)
third(
    exact,
    "mask-of-the-largest-two",
    lambda s, x: s.fc(x) * torch.zeros(x.shape).scatter_(1, x.topk(2).indices, 1.0),
)
third(
    exact,
    "mask-of-the-largest-two-of-ones",
    lambda s, x: (
        s.fc(x) * torch.zeros_like(x).scatter_add_(1, x.topk(2).indices, torch.ones_like(x))
    ),
)
third(
    refused,
    "mask-of-the-largest-sample",
    lambda s, x: s.fc(x) * torch.zeros_like(x).scatter_(0, x.argmax(0, keepdim=True), 1.0),
)


def marked(s: Any, x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return features, times a mask that is written at an index."""
    mask = torch.zeros_like(x)
    mask[rows, columns] = 1.0
    return s.fc(x) * mask


third(exact, "mask-written-at-an-index",
      lambda s, x: marked(s, x, torch.arange(len(x)), x.argmax(1)))  # fmt: skip
third(refused, "mask-written-at-an-index-of-samples",
      lambda s, x: marked(s, x, x.argmax(0), torch.arange(4)))  # fmt: skip


# ---- a fourth attack from outside: what it found, and its families
# -----------------------------------------------------------------------------------

_FOURTH = "fourth-attack"


def fourth(
    expect: Callable[..., None],
    name: str,
    forward: Callable[..., Any],
    inputs: Callable[[int], Inputs] | None = None,
    **parts: Any,
) -> None:
    """Add a row of a model with two layers `fc` and `out` of four features, and other parts."""
    options = {k: parts.pop(k) for k in ("batches", "call", "told", "use") if k in parts}
    layers = {"fc": linear(4, 4), "out": linear(4, 4)} | parts
    expect(_FOURTH, name, made(forward, **layers), inputs or normal(4),
           **{"batches": (4, 3, 2), **options})  # fmt: skip


# Hooks that write into the gradients that they are given, and return nothing.


def centre_in_place(*grads: Any) -> None:
    for g in grads:
        if g is not None:
            g.sub_(g.mean(0))


def double_in_place(*grads: Any) -> None:
    for g in grads:
        if g is not None:
            g.mul_(2.0)


def centre_by_array(grad: Tensor) -> None:
    """Write where no version counter tells."""
    array = grad.numpy()
    array -= array.mean(0)


def roll_data(grad: Tensor) -> None:
    grad.data.copy_(grad.data.roll(1, 0))


def with_hook(put: Callable[[Any, Tensor, Tensor], Any]) -> Callable[..., Tensor]:
    """Return a forward in which `put(model, h, k)` registers hooks on two tensors in a row."""

    def forward(s: Any, x: Tensor) -> Tensor:
        h = s.fc(x)
        k = h.tanh()
        put(s, h, k)
        out: Tensor = s.out(k)
        return out

    return forward


def next_node(t: Tensor) -> Any:
    return t.grad_fn.next_functions[0][0]  # type: ignore[union-attr]


for _name, _hook in {
    "in-place": centre_in_place,
    "by-array": centre_by_array,
    "by-data": roll_data,
}.items():
    fourth(refused, f"hook-that-writes-{_name}",
           with_hook(lambda s, h, k, f=_hook: h.register_hook(f)))  # fmt: skip
fourth(
    exact, "hook-that-doubles-in-place", with_hook(lambda s, h, k: k.register_hook(double_in_place))
)
fourth(refused, "hook-on-several-that-writes",
       with_hook(lambda s, h, k: torch.autograd.graph.register_multi_grad_hook(
           [h, k], lambda grads: centre_in_place(*grads))))  # fmt: skip
fourth(exact, "hook-on-several-that-looks",
       with_hook(lambda s, h, k: torch.autograd.graph.register_multi_grad_hook(
           [h, k], lambda grads: None)))  # fmt: skip


def hooked_module(
    expect: Callable[..., None], name: str, kind: str, part: str, change: Callable[..., None]
) -> None:
    """Add a row of a module's backward hook that writes into what it is given."""

    def make() -> nn.Module:
        model = Fn(lambda s, x: s.out(s.act(s.fc(x))), fc=nn.Linear(4, 4), act=nn.Tanh(),
                   out=nn.Linear(4, 4))  # fmt: skip
        getattr(model.get_submodule(part), kind)(lambda module, grads, *_: change(*grads))
        return model

    expect(_FOURTH, name, make, normal(4), batches=(4, 3, 2))


for _part in ("act", "out", ""):
    _of = _part or "the-model"
    hooked_module(refused, f"module-hook-of-{_of}-before", "register_full_backward_pre_hook", _part,
                  centre_in_place)  # fmt: skip
    hooked_module(exact, f"module-hook-of-{_of}-before-doubled", "register_full_backward_pre_hook",
                  _part, double_in_place)  # fmt: skip
for _part in ("act", "out"):
    hooked_module(refused, f"module-hook-of-{_part}", "register_full_backward_hook", _part,
                  centre_in_place)  # fmt: skip


# Hooks that hold statistics of the batch.

fourth(refused, "hook-times-a-mean", with_hook(
    lambda s, h, k: h.register_hook(lambda g: g * h.detach().mean(0))))  # fmt: skip
fourth(refused, "hook-times-a-mean-as-number", with_hook(
    lambda s, h, k: h.register_hook(lambda g: g * h.detach().mean().item())))  # fmt: skip
fourth(refused, "hook-times-rolled", with_hook(
    lambda s, h, k: h.register_hook(lambda g: g * k.detach().roll(1, 0))))  # fmt: skip
fourth(refused, "hook-in-place-times-a-mean", with_hook(
    lambda s, h, k: h.register_hook(
        lambda g: double_in_place(g.mul_(k.detach().mean(0))))))  # fmt: skip
fourth(exact, "hook-times-itself", with_hook(
    lambda s, h, k: h.register_hook(lambda g: g * k.detach())))  # fmt: skip
fourth(exact, "hook-times-a-weight", with_hook(
    lambda s, h, k: h.register_hook(lambda g: g * s.fc.bias.detach())))  # fmt: skip


def _times_mean_of_input(s: Any, x: Tensor) -> Tensor:
    h = s.fc(x)
    h.register_hook(lambda g: g * x.mean(0))
    out: Tensor = s.out(h)
    return out


def _times_input(s: Any, x: Tensor) -> Tensor:
    h = s.fc(x)
    h.register_hook(lambda g: g * x)
    out: Tensor = s.out(h)
    return out


fourth(refused, "hook-times-a-mean-of-the-input", _times_mean_of_input)
fourth(exact, "hook-times-the-input", _times_input)


# Hooks on nodes that were reached in other ways than by `grad_fn` of their tensor.

fourth(refused, "hook-on-the-node-behind", with_hook(
    lambda s, h, k: next_node(k).register_prehook(
        lambda go: (go[0] - go[0].mean(0),))))  # fmt: skip
fourth(exact, "hook-on-the-node-behind-doubled", with_hook(
    lambda s, h, k: next_node(k).register_prehook(lambda go: (go[0] * 2,))))  # fmt: skip
fourth(refused, "hook-on-the-node-of-an-edge", with_hook(
    lambda s, h, k: torch.autograd.graph.get_gradient_edge(k).node.register_prehook(
        lambda go: (go[0] - go[0].mean(0),))))  # fmt: skip
fourth(refused, "hook-on-a-node-asked-for-twice", with_hook(
    lambda s, h, k: k.grad_fn and k.grad_fn.register_prehook(
        lambda go: (go[0].roll(1, 0),))))  # fmt: skip


# Values that leave torch by other doors: sizes, errors, functions of Python's.


def caught(run: Callable[[Tensor], Any]) -> Callable[[Tensor], float]:
    """Return 2 where torch raises an error, else 1."""

    def number(t: Tensor) -> float:
        try:
            run(t)
        except (IndexError, RuntimeError):
            return 2.0
        return 1.0

    return number


def kept(t: Tensor) -> float:
    """Return a sum, by a function that is called with each element."""
    seen: list[float] = []
    t.clone().apply_(lambda v: seen.append(v) or v)
    return sum(seen)


def kept_of_two(t: Tensor) -> float:
    seen: list[float] = []
    t.clone().map_(t, lambda a, b: seen.append(a * b) or a)
    return sum(seen)


def one_is_large(batch: int) -> Inputs:
    x = torch.randn(batch, 4).clamp(max=0.5)
    x[0, 0] = 2.0
    return (x,)


def positive(t: Tensor) -> Tensor:
    return (t > 0).sum()


for _name, _statistic in {
    "function-of-elements": kept,
    "function-of-two-elements": kept_of_two,
    "size-to-expand": lambda t: 1.0 + torch.ones(1).expand(positive(t)).numel(),
    "times-to-repeat": lambda t: 1.0 + torch.ones(1).repeat(positive(t)).numel(),
    "length": lambda t: 1.0 + torch.arange(99.0).narrow(0, 0, positive(t)).numel(),
    "where-to-split": lambda t: 1.0 + torch.arange(99.0).tensor_split((t > 0).sum(0))[0].numel(),
    "compressed-rows": lambda t: 1.0 + (t > 0).double().to_sparse_csr().values().numel(),
}.items():
    # as many in each sample: then the number of samples alone decides, and a warning says so
    fourth(refused, f"{_name}-of-the-input", lambda s, x, f=_statistic: s.out(s.fc(x) * f(x)),
           told=COUNTED)  # fmt: skip
    fourth(refused, f"{_name}-of-features",
           lambda s, x, f=_statistic: s.out((h := s.fc(x)) * f(h.detach())),
           told=COUNTED)  # fmt: skip
fourth(refused, "error-that-is-caught", lambda s, x: s.out(s.fc(x) * caught(
    lambda t: torch.zeros(1)[(t.amax() > 1).long()])(x)), one_is_large)  # fmt: skip
fourth(refused, "error-of-a-lookup-that-is-caught", lambda s, x: s.out(s.fc(x) * caught(
    lambda t: F.embedding((t.amax() > 1).long(), torch.zeros(1, 2)))(x)), one_is_large)  # fmt: skip
fourth(exact, "error-that-is-always-caught",
       lambda s, x: s.out(s.fc(x) * caught(lambda t: t @ torch.ones(3, 3))(x)))  # fmt: skip
fourth(exact, "function-of-each-element",
       lambda s, x: s.out(s.fc(x) * x.clone().apply_(lambda v: v * v)))  # fmt: skip


# Modes of the dispatcher.


class _RollsBelow(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out.roll(1, 0) if func is torch.ops.aten.tanh.default else out


class _PassesBelow(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def _tanh_in_a_mode(s: Any, x: Tensor) -> Tensor:
    with _RollsBelow():
        h = s.fc(x).tanh()
    out: Tensor = s.out(h)
    return out


fourth(exact, "dispatch-mode-around-the-model", _tanh_between, call=within(_PassesBelow))
fourth(refused, "dispatch-mode-around-the-model-that-rolls", _tanh_between,
       call=within(_RollsBelow))  # fmt: skip
fourth(refused, "dispatch-mode-in-forward-that-rolls", _tanh_in_a_mode)


# Hooks on what autograd saves.


def saved_as(unpack: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def call(model: nn.Module, x: Tensor) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            return model(x)

    return call


def saved_in_forward_as(unpack: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def forward(s: Any, x: Tensor) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            h = s.fc(x).tanh()
        return s.out(h)

    return forward


def coarse(t: Tensor) -> Tensor:
    """Return a tensor in steps that its largest element sets."""
    step = t.abs().max() / 16
    return (t / step).round() * step


fourth(exact, "saved-and-copied", _tanh_between, call=saved_as(Tensor.clone))
fourth(refused, "saved-and-rolled", _tanh_between, call=saved_as(lambda t: t.roll(1, 0)))
fourth(refused, "saved-in-steps-by-the-largest", _tanh_between, call=saved_as(coarse))
fourth(exact, "saved-in-forward-and-copied", saved_in_forward_as(Tensor.clone))
fourth(refused, "saved-in-forward-and-rolled", saved_in_forward_as(lambda t: t.roll(1, 0)))
fourth(refused, "saved-in-forward-by-the-largest", saved_in_forward_as(coarse))


# What a model holds, after a trial ran its forward again.


class _Meter:
    """Counts, as meters of losses do."""

    def __init__(self) -> None:
        self.count, self.values = 0, [0.0]

    def update(self, value: float) -> None:
        self.count += 1
        self.values.append(value)


def _metered(s: Any, x: Tensor) -> Tensor:
    s.meter.update(x.max().item())
    out: Tensor = s.out(s.fc(x))
    return out


def with_meter(model: nn.Module, inputs: Inputs, weights: Tensor) -> Any:
    model.meter = _Meter()
    output = model(*inputs)
    output = output * model.meter.count * len(model.meter.values)
    loss_of(output, weights).backward()
    return output


fourth(exact, "meter-that-counts-forwards", _metered, use=with_meter)


# A function for which one size is a special case, after it has passed for many others.


def after_other_sizes(model: nn.Module, inputs: Inputs, weights: Tensor) -> Any:
    (x,) = inputs
    for size in range(5, 15) if len(x) > 1 else ():
        model(x.repeat(7, 1)[:size]).sum().backward()
        model.zero_grad()
    output = model(x)
    loss_of(output, weights).backward()
    return output


fourth(refused, "cross-product-of-three-samples",
       lambda s, x: torch.cross(s.fc(x)[:, :3], x[:, :3]), batches=(3,), use=after_other_sizes,
       out=linear(1, 1))  # fmt: skip
fourth(exact, "cross-product-of-four-samples",
       lambda s, x: torch.cross(s.fc(x)[:, :3], x[:, :3]), batches=(4, 2), use=after_other_sizes,
       out=linear(1, 1))  # fmt: skip


# Others.

fourth(
    either,
    "dict-whose-first-tensor-is-no-batch",
    lambda s, inputs: s.out(s.fc(inputs["x"]) * inputs["gain"]),
    call=lambda model, x: model({"gain": torch.arange(1.0, 5.0), "x": x}),
    batches=(4, 3, 2, 1),
)
fourth(either, "nested-rows", lambda s, x: s.out(
    torch.nested.as_nested_tensor(list(s.fc(x))).to_padded_tensor(0.0)))  # fmt: skip


# ---- a fifth attack from outside: what it found, and its families
# -----------------------------------------------------------------------------------

_FIFTH = "fifth-attack"


# Weights of an embedding bag, of other samples than its indices.


def looked_up(change: Callable[[Tensor], Tensor], **options: Any) -> Made:
    """Return a bag whose weights are made of a second input, and changed."""
    bag = layer(nn.EmbeddingBag, 5, 4, mode="sum", **options)
    return made(lambda s, i, x: s.bag(i, per_sample_weights=change(s.fc(x))), bag=bag, fc=linear())


def in_one_row(s: Any, i: Tensor, x: Tensor) -> Tensor:
    starts = torch.arange(0, i.numel(), 3)
    bags: Tensor = s.bag(i.flatten(), starts, s.fc(x).flatten(0, 1).flip(0))
    return bags


def ids_and_numbers(batch: int) -> Inputs:
    return torch.randint(0, 5, (batch, 3)), torch.randn(batch, 3)


_bag = {"bag": layer(nn.EmbeddingBag, 5, 4, mode="sum"), "fc": linear()}
refused(_FIFTH, "bag-weights-flipped", looked_up(lambda w: w.flip(0)), ids_and_numbers)
refused(_FIFTH, "bag-weights-rolled", looked_up(lambda w: w.roll(1, 0)), ids_and_numbers)
refused(_FIFTH, "bag-weights-flipped-with-offsets", made(in_one_row, **_bag), ids_and_numbers)
exact(_FIFTH, "bag-weights-of-each", looked_up(torch.sin), ids_and_numbers)
exact(_FIFTH, "bag-weights-without-padding", looked_up(torch.sin, padding_idx=1), ids_and_numbers)


# A linear layer's weight and bias in shapes that no module has.

for _name, _shape in {"number": (), "of-one": (1,), "row": (1, 4)}.items():
    _own = {"w": weight(4, 4), "b": weight(*_shape)}
    exact(_FIFTH, f"linear-bias-{_name}",
          made(lambda s, x: F.linear(x, s.w, s.b), **_own), normal(4))  # fmt: skip
    exact(_FIFTH, f"linear-bias-{_name}-weight-frozen",
          made(lambda s, x: F.linear(x, s.w.detach(), s.b), **_own), normal(4))  # fmt: skip
    exact(_FIFTH, f"addmm-bias-{_name}",
          made(lambda s, x: torch.addmm(s.b, x, s.w, beta=0.5), **_own), normal(4))  # fmt: skip
    if len(_shape) < 2:
        exact(_FIFTH, f"linear-bias-{_name}-with-steps",
              made(lambda s, x: F.linear(x, s.w, s.b), **_own), normal(3, 4))  # fmt: skip
exact(_FIFTH, "linear-weight-a-vector",
      made(lambda s, x: F.linear(x, s.w), w=weight(4)), normal(4, 4))  # fmt: skip
exact(_FIFTH, "linear-weight-a-vector-one-step",
      made(lambda s, x: F.linear(x, s.w)[:, None], w=weight(4)), normal(4))  # fmt: skip
if torch.__version__ >= (2, 9):  # torch 2.8 takes no bias there
    exact(
        _FIFTH,
        "linear-weight-a-vector-and-bias",
        made(lambda s, x: F.linear(x, s.w, s.b), w=weight(4), b=weight()),
        normal(4, 4),
    )


# A hook on a node of the graph that exchanges pairs of samples: each half of four samples is closed
# under one of these exchanges.


def exchanged_behind(order: list[int]) -> Callable[..., Tensor]:
    def forward(s: Any, x: Tensor) -> Tensor:
        k = s.fc(x).tanh()
        if k.grad_fn is not None:
            k.grad_fn.register_hook(lambda gi, go: (gi[0][[i for i in order if i < len(x)]],))
        out: Tensor = s.out(k)
        return out

    return forward


for _order in ([1, 0, 3, 2], [2, 3, 0, 1], [3, 2, 1, 0]):
    refused(_FIFTH, f"node-hook-exchanges-{''.join(map(str, _order))}",
            made(exchanged_behind(_order), fc=linear(4, 4), out=linear(4, 4)), normal(4),
            batches=(4,))  # fmt: skip


# A step in the backward: each parameter changes as soon as it has its gradient.


def stepping(model: nn.Module, inputs: Inputs, weights: Tensor) -> Any:
    def step(p: Tensor) -> None:
        with torch.no_grad():
            p.sub_(p.grad, alpha=0.1)  # type: ignore[arg-type]

    hooks = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
    output = model(*inputs)
    loss_of(output, weights).backward()
    for hook in hooks:
        hook.remove()
    return output


def twice_and_plain(model: nn.Module, inputs: Inputs, weights: Tensor) -> Any:
    """Step in the backward of a model whose forward has run before, without hooks."""
    start = copy.deepcopy(model.state_dict())
    loss_of(model(*inputs), weights).backward()
    model.zero_grad()
    output = stepping(model, inputs, weights)
    model.load_state_dict(start)
    return output


_two = {"fc": linear(4, 4), "out": linear(4, 4)}
for _name, _use in {"": stepping, "-after-a-plain-one": twice_and_plain}.items():
    exact(_FIFTH, f"step-in-backward{_name}",
          made(lambda s, x: s.out(s.fc(x).tanh()), **_two), normal(4), use=_use)  # fmt: skip
    exact(_FIFTH, f"step-in-backward-of-convolutions{_name}",
          made(lambda s, x: s.out(s.norm(s.fc(x)).tanh()), fc=layer(nn.Conv1d, 4, 4, 2),
               norm=layer(nn.GroupNorm, 2, 4), out=layer(nn.Conv1d, 4, 4, 2)),
          normal(4, 5), use=_use)  # fmt: skip
    exact(_FIFTH, f"step-in-backward-of-a-transposed-weight{_name}",
          made(lambda s, x: s.fc(x).tanh() @ s.w.t(), fc=linear(4, 4), w=weight(4, 4)),
          normal(3, 4), use=_use)  # fmt: skip


# Products over samples with parameters that are the identity at first: then they mix nothing.


def identity(*shape: int) -> Callable[[], nn.Parameter]:
    """Return a parameter that is 1 where all indices are equal, and 0 elsewhere."""

    def make() -> nn.Parameter:
        t = torch.zeros(shape)
        for i in range(min(shape)):
            t[(i,) * len(shape)] = 1.0
        return nn.Parameter(t)

    return make


def first_of(t: Tensor, x: Tensor) -> Tensor:
    return t[tuple(slice(len(x)) for _ in t.shape)]


def across(name: str, mix: Callable[[Tensor, Tensor], Tensor], dims: int = 2) -> None:
    """Add rows of a product over the samples of a batch, after a layer and as the first one."""
    parts = {"fc": linear(4, 4), "p": identity(*(4,) * dims)}
    refused(_FIFTH, f"{name}-at-the-identity",
            made(lambda s, x: mix(s.fc(x), first_of(s.p, x)), **parts), normal(4),
            batches=(4, 3, 1))  # fmt: skip
    refused(_FIFTH, f"{name}-at-the-identity-of-inputs",
            made(lambda s, x: mix(x, first_of(s.p, x)) * s.gain, p=parts["p"], gain=weight(4)),
            normal(4), batches=(4, 3, 1))  # fmt: skip
    if dims == 2:
        refused(_FIFTH, f"{name}-at-the-identity-bare",
                made(lambda s, x: mix(s.fc(x), s.p), **parts), normal(4),
                batches=(4,), truth="graph")  # fmt: skip


across("linear", lambda x, p: F.linear(x.t(), p).t())
across("linear-of-one-feature", lambda x, p: F.linear(x[:, 0], p)[:, None] + x)
across("linear-with-steps", lambda x, p: F.linear(x.t()[None], p)[0].t())
across("addmm", lambda x, p: torch.addmm(p[0], x.t(), p).t())
across("matmul", lambda x, p: (x.t() @ p).t())
across("einsum", lambda x, p: torch.einsum("bf,bc->cf", x, p))
across("convolution", lambda x, p: F.conv1d(x[None], p[:, :, None])[0])
across("prelu", lambda x, p: F.prelu(x[None], p.diagonal())[0].cumsum(0))
across("bilinear", lambda x, p: F.bilinear(x.t(), x.t(), p).t(), dims=3)
across(
    "embedding-bag",
    lambda x, p: F.embedding_bag(
        torch.arange(len(x))[None], x, per_sample_weights=p[:1], mode="sum"
    ).expand_as(x),
)


# Operators that mix samples, as soon as a parameter is not zero.


_SCHEMA = "(Tensor x, Tensor b) -> Tensor"


@torch.library.custom_op("varreg_tests::shift_by_mean", mutates_args=(), schema=_SCHEMA)
def shift_by_mean(x: Tensor, b: Tensor) -> Tensor:
    return x + b + (x.mean(0) if bool(b.any()) else 0.0)


def _of_shift(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    return grad + (grad.mean(0) if ctx.is_on else 0.0), grad.sum(0)


def _note_shift(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.is_on = bool(inputs[1].any())


shift_by_mean.register_autograd(_of_shift, setup_context=_note_shift)


def shifted(s: Any, x: Tensor) -> Tensor:
    y: Tensor = shift_by_mean(s.fc(x), s.b)
    return y


def changed_after(steps: int) -> Use:
    """Return a use that trains for steps with a bias of zero, and then for one with another."""

    def use(model: nn.Module, inputs: Inputs, weights: Tensor) -> Any:
        for _ in range(steps):
            loss_of(model(*inputs), weights).backward()
            model.zero_grad()
        with torch.no_grad():
            model.b.fill_(0.5)
        output = model(*inputs)
        loss_of(output, weights).backward()
        return output

    return use


_shift = {"fc": linear(4, 4), "b": zero(4)}
exact(_FIFTH, "operator-with-a-bias-of-zero", made(shifted, **_shift), normal(4))
for _steps in (0, 1, 6):
    refused(_FIFTH, f"operator-that-mixes-after-{_steps}-steps", made(shifted, **_shift), normal(4),
            use=changed_after(_steps))  # fmt: skip


# ---- the table on the command line
# -----------------------------------------------------------------------------------


def main(words: list[str]) -> None:
    """Print the outcome of every row whose name or family contains one of the words; of all rows
    without words.
    """
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    counts: collections.Counter[str] = collections.Counter()
    families: collections.Counter[str] = collections.Counter()
    for case in CASES:
        if words and not any(w in f"{case.family}/{case.name}" for w in words):
            continue
        for batch in case.batches:
            start = time.perf_counter()
            try:
                outcome = judge(case, batch)
            except Exception as error:
                outcome = Outcome("broken", f"plain torch fails: {error}")
            remove_global_hooks()
            verdict = "ok" if outcome.kind in allowed(case, batch) else "FAIL"
            counts[f"{verdict} {outcome.kind}"] += 1
            families[f"{case.family}: {verdict} {outcome.kind}"] += 1
            seconds = time.perf_counter() - start
            print(
                f"{verdict}\t{case.family}/{case.name}\tbatch "
                f"{batch}\t{case.expect}\t{outcome}\t{seconds:.2f} s",
                flush=True,
            )
    print("\n".join(f"{n:5d}  {kind}" for kind, n in sorted(families.items())))
    print(", ".join(f"{n} {kind}" for kind, n in sorted(counts.items())))


if __name__ == "__main__":
    main(sys.argv[1:])
