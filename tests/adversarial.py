"""Models and usages that try to make varreg say something wrong. Each row is one idea, with the outcome that keeps the promise.

"exact": equal to one sample at a time. "refused": an error of varreg's that says where. "either": one of them; never silence, never torch's
own message. Sizes are small and coincide on purpose: four samples, four time steps, four features. `python -m tests.adversarial [WORD]`
prints what comes out, for all rows or for those whose name or family contains the word.
"""

from __future__ import annotations

import collections
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.judge import Case, Inputs, Outcome, allowed, judge, loss_of
from tests.models import Fn
from tests.truth import losses

CASES: list[Case] = []
Made = Callable[[], nn.Module]


def row(expect: str) -> Callable[..., None]:
    def add(family: str, name: str, make: Made, inputs: Callable[[int], Inputs], **options: Any) -> None:
        CASES.append(Case(name, family, make, inputs, expect, **options))

    return add


exact, refused, either = row("exact"), row("refused"), row("either")


# ---- parts -----------------------------------------------------------------------------------------------------------


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


# ---- bilinear, and other rules with an argument that is made in forward ----------------------------------------------

_B = "argument-made-in-forward"
bilinear = {"bi": layer(nn.Bilinear, 3, 3, 2)}
exact(_B, "bilinear-cosine-of-the-input", made(lambda s, x: s.bi(x, x.cos()), **bilinear), normal(3))
exact(_B, "bilinear-detached-input", made(lambda s, x: s.bi(x, x.detach() * 2), **bilinear), normal(3))
either(_B, "bilinear-rows-from-a-list", made(lambda s, x: s.bi(x, outside(x).cos()), **bilinear), normal(3))
either(_B, "bilinear-first-argument-from-a-list", made(lambda s, x: s.bi(outside(x).cos(), x), **bilinear), normal(3))
either(
    _B,
    "functional-bilinear-rows-from-a-list",
    made(lambda s, x: F.bilinear(s.fc(x), outside(x).sin(), s.table, None), fc=linear(), table=weight(2, 3, 3)),
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
exact(_B, "bilinear-shared-row", made(lambda s, x: s.bi(x, torch.linspace(1, 2, 3).expand(len(x), 3)), **bilinear), normal(3))
exact(
    _B, "bilinear-shared-parameter", made(lambda s, x: s.bi(x, s.proto.expand(len(x), 3)), proto=weight(3), **bilinear), normal(3)
)
exact(_B, "bilinear-shared-ones", made(lambda s, x: s.bi(x, torch.ones_like(x)), **bilinear), normal(3))
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
    made(lambda s, x: s.bi(x.transpose(0, 1), torch.arange(12.0).view(4, 1, 3).expand(4, len(x), 3)).transpose(0, 1), **bilinear),
    normal(4, 3),
    batches=(4, 2, 1),
)
either(
    _B,
    "embedding-ids-from-a-list",
    made(lambda s, i: s.table(torch.tensor(i.tolist())) * s.gate, table=layer(nn.Embedding, 5, 3), gate=weight(3)),
    ids(4),
)
either(
    _B,
    "embedding-ids-counted",
    made(lambda s, x: s.fc(x) + s.table(torch.arange(len(x))), fc=linear(), table=layer(nn.Embedding, 5, 3)),
    normal(3),
    truth="graph",
)
either(_B, "linear-of-rows-from-a-list", made(lambda s, x: s.fc(outside(x)) * s.gate(x), fc=linear(), gate=linear()), normal(3))
either(
    _B,
    "matmul-of-rows-from-a-list",
    made(lambda s, x: s.gate(x) * (outside(x) @ s.mix), gate=linear(), mix=weight(3, 3)),
    normal(3),
)
either(
    _B,
    "bag-weights-from-a-list",
    made(lambda s, i: s.bag(i, per_sample_weights=outside(i.double()).cos()), bag=layer(nn.EmbeddingBag, 5, 3, mode="sum")),
    ids(4),
)
either(
    _B,
    "bag-offsets-counted",
    made(lambda s, i: s.bag(i.flatten(), torch.arange(len(i)) * 4), bag=layer(nn.EmbeddingBag, 5, 3)),
    ids(4),
)
exact(
    _B,
    "conv-of-a-shared-picture-times-input",
    made(lambda s, x: s.conv(torch.linspace(-1, 1, 12).view(1, 3, 4)) * x, conv=layer(nn.Conv1d, 3, 3, 3, padding=1)),
    normal(3, 4),
)
exact(
    _B,
    "layernorm-of-a-shared-row-times-input",
    made(lambda s, x: s.norm(torch.linspace(-1, 1, 4)) * x, norm=layer(nn.LayerNorm, 4)),
    normal(4),
)
either(_B, "cell-with-a-state-from-a-list", made(lambda s, x: s.cell(x, outside(x)), cell=layer(nn.GRUCell, 3, 3)), normal(3))
exact(
    _B,
    "cell-with-a-shared-state",
    made(lambda s, x: s.cell(x, s.state.expand(len(x), 3)), cell=layer(nn.GRUCell, 3, 3), state=weight(3)),
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
        lambda s, x: torch.baddbmm(s.bias.expand(len(x), 1, 3), outside(x)[:, None], s.mix.expand(len(x), 3, 3)) * x[:, None],
        bias=weight(3),
        mix=weight(3, 3),
    ),
    normal(3),
)


# ---- gradients that are cleared where they were exactly zero ---------------------------------------------------------

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
    """Return a use that accumulates over micro-batches; `call(model, k)` may say how the k-th one is run."""

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
    lambda s, x: s.out(F.relu(s.fc(x) - s.shift)), fc=linear(), out=linear(), shift=lambda: nn.Parameter(torch.full((3,), 50.0))
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
exact(_C, "zero-inputs-set-to-zero", made(lambda s, x: s.fc(x), fc=linear()), zeros(3), use=two_steps(to_zero, nothing))
exact(_C, "zeros-accumulate", lora, normal(3), batches=(4, 3, 1), use=accumulated(2))


# ---- false alarms: the true gradient is zero -------------------------------------------------------------------------

_Z = "false-alarm"
exact(_Z, "weight-norm-of-one-column", lambda: parametrizations.weight_norm(nn.Linear(1, 8)), normal(1), batches=(4, 8, 1))
exact(
    _Z,
    "weight-norm-of-one-column-huge",
    made(lambda s, x: s.fc(x * 1e3), fc=lambda: parametrizations.weight_norm(nn.Linear(1, 8))),
    normal(1),
)
exact(_Z, "bias-under-a-softmax", made(lambda s, x: (s.fc(x) + s.shift).softmax(-1), fc=linear(), shift=weight(1)), normal(3))
exact(_Z, "bias-under-a-softmax-of-one", made(lambda s, x: s.fc(x).softmax(-1) * x, fc=linear(3, 1)), normal(3))
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
exact(_Z, "norm-after-a-bias", made(lambda s, x: F.layer_norm(s.fc(x) + s.shift, (3,)), fc=linear(), shift=weight(1)), normal(3))
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
exact(_Z, "used-and-taken-away", made(lambda s, x: s.fc(x) + s.gain * x - s.gain * x, fc=linear(), gain=weight(3)), normal(3))
exact(_Z, "multiplied-by-zero", made(lambda s, x: s.fc(x) + 0.0 * s.other(x), fc=linear(), other=linear()), normal(3))
exact(_Z, "clamped-away", made(lambda s, x: s.fc(x) + s.other(x).clamp(min=100.0), fc=linear(), other=linear()), normal(3))
exact(
    _Z,
    "spread-of-softmaxes",
    made(
        lambda s, x: s.fc(x).softmax(-1) - (s.fc(x) + s.shift).softmax(-1) + s.out(x), fc=linear(), out=linear(), shift=weight(1)
    ),
    normal(3),
)


# ---- operations in place on results that hold parameters -------------------------------------------------------------

_I = "in-place"


def changed(name: str, change: Callable[[Tensor, Tensor], Any], expect: Callable[..., None] = exact) -> None:
    """Add the change after einsum, matmul and a general operation, each with a second use of the parameter."""

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
changed("index_put_", lambda h, x: h.index_put_((torch.arange(len(h)), torch.zeros(len(h), dtype=torch.long)), x[:, 1]), either)
changed("slice-assigned", assigned_slice)
exact(
    _I,
    "einsum-relu_-of-a-view",
    made(lambda s, x: (h := torch.einsum("btd,de->bte", x, s.mix), h[:, 0].relu_(), h)[2], mix=weight(3, 3)),
    normal(4, 3),
)
exact(
    _I,
    "einsum-half-of-it-changed",
    made(
        lambda s, x: (h := torch.einsum("btd,de->bte", x, s.mix), h.narrow(1, 0, 2).mul_(x[:, :2]), h.tanh())[2], mix=weight(3, 3)
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
    made(lambda s, x: (w := s.mix * 2, w.__setitem__((slice(None), 0), 0.0), x @ w)[2], mix=weight(3, 3)),
    normal(3),
)
exact(
    _I,
    "functional-inplace-flags",
    made(
        lambda s, x: F.leaky_relu(F.relu(torch.einsum("bd,de->be", x, s.mix), inplace=True) - 1, inplace=True), mix=weight(3, 3)
    ),
    normal(3),
)
exact(_I, "addmm_-with-a-parameter", made(lambda s, x: s.fc(x).addmm_(x, s.mix), fc=linear(), mix=weight(3, 3)), normal(3))
exact(_I, "squeeze_-and-t_", made(lambda s, x: s.fc(x)[:, None].squeeze_(1).t_().t_(), fc=linear()), normal(3), batches=(4, 3, 1))
either(_I, "resized-by-set_", made(lambda s, x: s.fc(x) * x.clone().set_(x.clone()), fc=linear()), normal(3))


# ---- two threads -----------------------------------------------------------------------------------------------------

_T = "threads"


def in_threads(model: nn.Module, inputs: Inputs, weights: Tensor) -> Any:
    """Train the two halves of the model at the same time, twenty steps each."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(2)

    def train(part: nn.Module) -> None:
        try:
            for _ in range(20):
                barrier.wait(10)
                part.zero_grad()
                loss_of(part(*inputs), weights).backward()
        except BaseException as e:
            errors.append(e)
            barrier.abort()

    workers = [threading.Thread(target=train, args=(part,)) for part in (model.left, model.right)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    real = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
    if real:
        raise real[0]


def tower() -> nn.Module:
    return Fn(
        lambda s, x: torch.einsum("btd,de->bte", s.b(s.a(x).tanh()).sin(), s.mix),
        a=nn.Linear(3, 3),
        b=nn.Linear(3, 3),
        mix=nn.Parameter(torch.randn(3, 3)),
    )


exact(
    _T,
    "two-models-two-threads",
    made(lambda s, x: None, left=tower, right=tower),
    normal(4, 3),
    use=in_threads,
    observed=lambda m: [m.left, m.right],
    batches=(4,),
)
exact(
    _T,
    "one-observed-one-plain",
    made(lambda s, x: None, left=tower, right=tower),
    normal(4, 3),
    use=in_threads,
    observed=lambda m: [m.left],
    batches=(4,),
)


# ---- samples that are permuted or mixed ------------------------------------------------------------------------------

_M = "mixed"


def mixed(name: str, mix: Callable[[Tensor], Tensor], **options: Any) -> None:
    """Add the mixing between two layers, and with alike first samples."""
    make = made(lambda s, x: s.out(mix(s.fc(x))), fc=linear(3, 4), out=linear(4, 3))
    refused(_M, name, make, options.pop("inputs", normal(3)), **options)


isolated = torch.tensor([[1.0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 1, 0]], dtype=torch.float64)
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
mixed("isolated-node-sparse", lambda h: torch.sparse.mm(isolated[: len(h), : len(h)].to_sparse(), h))
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
mixed("scatter-add", lambda h: torch.zeros_like(h).scatter_add(0, (torch.arange(len(h)) // 2)[:, None].expand(-1, 4), h))
mixed("index-add", lambda h: h.index_add(0, order(h), h))
mixed("index-copy", lambda h: h.index_copy(0, order(h), h))
mixed("segment-mean-back", lambda h: torch.zeros_like(h).index_add(0, torch.arange(len(h)) // 2, h)[torch.arange(len(h)) // 2])
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
mixed("attention-over-samples", lambda h: F.scaled_dot_product_attention(h[None], h[None], h[None])[0])
mixed("fft-over-samples", lambda h: torch.fft.fft(h, dim=0).real)
mixed("fft-over-both", lambda h: torch.fft.fft2(h).real)
mixed("convolved-over-samples", lambda h: F.avg_pool1d(h.t()[None], 3, 1, 1)[0].t())
mixed("interpolated-over-samples", lambda h: F.interpolate(h.t()[None], size=2 * len(h))[0].t()[::2].roll(1, 0))
mixed("unfolded-over-samples", lambda h: F.pad(h, (0, 0, 1, 1), mode="constant").unfold(0, 3, 1).sum(-1))
mixed("neighbours-by-slices", lambda h: torch.cat([h[1:], h[:1]]))
mixed("neighbours-by-stack", lambda h: torch.stack([h[i - 1] for i in range(len(h))]))
mixed("neighbours-by-unbind", lambda h: torch.stack([*h.unbind(0)[1:], h[0]]))
mixed("nearest-neighbour", lambda h: h[torch.cdist(h, h).fill_diagonal_(1e9).argmin(1)] if len(h) > 1 else h)
mixed("mixup", lambda h: 0.7 * h + 0.3 * h[torch.randperm(len(h))], batches=(5, 1))
mixed("renormalised-by-instance-norm", lambda h: F.instance_norm(h.t()[None])[0].t() if len(h) > 1 else h)
mixed("batch-norm-function", lambda h: F.batch_norm(h, None, None, training=True) if len(h) > 1 else h)
mixed("kthvalue-back", lambda h: h - h.kthvalue(1, 0).values)
mixed("median-back", lambda h: h - h.median(0).values)
mixed("zero-layer-hides-it", lambda h: (h * 0).roll(1, 0) + h.roll(2, 0))
mixed("tril-mix", lambda h: torch.ones(len(h), len(h)).tril() @ h)
mixed("map-over-transposed", lambda h: torch.vmap(lambda v: v - v.mean(), in_dims=1, out_dims=1)(h))
mixed("where-of-neighbours", lambda h: torch.where(h > h.roll(2, 0), h, h.roll(2, 0)))
mixed("maximum-with-the-flipped", lambda h: torch.maximum(h, h.flip(0)))
mixed("bucketised-by-the-batch", lambda h: h * torch.searchsorted(h.detach().flatten().sort().values, h.detach()).double())
mixed("rank-of-each", lambda h: h * h.detach().argsort(0).argsort(0).double())
mixed("normalised-over-samples", lambda h: F.normalize(h, dim=0))
mixed("softmax-over-samples", lambda h: h.softmax(0))
mixed("pairwise-distance-to-the-first", lambda h: h + F.pairwise_distance(h, h[:1].expand_as(h))[:, None])
refused(_M, "zero-initialised-roll", made(lambda s, x: (x @ s.mix).roll(len(x) // 2, 0) * x, mix=zero(3, 3)), normal(3))
refused(
    _M,
    "alike-samples-rolled-after",
    made(lambda s, x: (s.fc(x) * torch.linspace(1, 2, 4)[: len(x), None]).roll(2, 0), fc=linear()),
    alike(3),
)


# ---- the table on the command line -----------------------------------------------------------------------------------


def main(words: list[str]) -> None:
    """Print the outcome of every row whose name or family contains one of the words; of all rows without words."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    counts: collections.Counter[str] = collections.Counter()
    for case in CASES:
        if words and not any(w in f"{case.family}/{case.name}" for w in words):
            continue
        for batch in case.batches:
            start = time.perf_counter()
            try:
                outcome = judge(case, batch)
            except Exception as error:
                outcome = Outcome("broken", f"plain torch fails: {error}")
            verdict = "ok" if outcome.kind in allowed(case, batch) else "FAIL"
            counts[f"{verdict} {outcome.kind}"] += 1
            seconds = time.perf_counter() - start
            print(f"{verdict}\t{case.family}/{case.name}\tbatch {batch}\t{case.expect}\t{outcome}\t{seconds:.2f} s", flush=True)
    print(", ".join(f"{n} {kind}" for kind, n in sorted(counts.items())))


if __name__ == "__main__":
    main(sys.argv[1:])
