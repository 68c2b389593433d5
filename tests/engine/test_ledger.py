"""The books: sums and counts since gradients were last cleared, whatever clears, reads, scales or
splits.
"""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, parametrizations

import varreg
from tests.support.measured import assert_moments
from tests.support.model_table import Fn, weight
from tests.support.optimizer_table import RULES
from tests.support.ranks import NEEDS_FSDP, launch
from tests.support.truth import losses, one_at_a_time, sample_weights
from varreg.engine.parameters import LEDGERS

# ---- gradients that were zero, and were cleared
# --------------------------------------------------------------------


def gated() -> nn.Module:
    """A LoRA pair whose second factor is zero, and a gate that is zero: `down`, `inner` get zero
    gradients.
    """
    model = Fn(
        lambda s, x: s.base(x) + x @ s.down @ s.up + s.gate * s.inner(x),
        base=nn.Linear(4, 3),
        inner=nn.Linear(4, 3),
        down=weight(4, 2),
        up=nn.Parameter(torch.zeros(2, 3)),
        gate=nn.Parameter(torch.zeros(1)),
    )
    return model.double()


def zero_grad(model):
    model.zero_grad(set_to_none=False)


def zero_each(model):
    for p in model.parameters():
        p.grad.zero_()


def zero_foreach(model):
    torch._foreach_zero_([p.grad for p in model.parameters()])


def replace(model):
    for p in model.parameters():
        p.grad = torch.zeros_like(p)


def replace_after_none(model):
    """The new zeros may lie where the old gradient did, and have its version."""
    for p in model.parameters():
        p.grad = None
        p.grad = torch.zeros_like(p)


CLEARS = [zero_grad, zero_each, zero_foreach, replace, replace_after_none]


@pytest.mark.parametrize("clear", CLEARS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("read", [False, True], ids=["unread", "read"])
def test_cleared_gradients_that_were_zero(clear, read):
    model = gated()
    varreg.observe(model)
    for n in (5, 7, 6):
        x, w = torch.randn(n, 4), sample_weights(n)
        g = one_at_a_time(copy.deepcopy(model), (x,), w)
        losses(model(x), w).mean().backward()
        assert_moments(model, g)
        assert not varreg.moments(model.down).variance.any()
        clear(model)
        if read:
            assert all(varreg.moments(p) is None for p in model.parameters())


def test_zeros_that_were_there_before_the_first_backward():
    model = gated()
    replace(model)
    varreg.observe(model)
    x, w = torch.randn(5, 4), sample_weights(5)
    g = one_at_a_time(copy.deepcopy(model), (x,), w)
    losses(model(x), w).mean().backward()
    assert_moments(model, g)
    zero_grad(model)
    outside = sum(100 * p.sum() for p in model.parameters())
    with pytest.raises(RuntimeError, match="received a gradient from outside"):
        (losses(model(x), w).mean() + outside).backward()


@pytest.mark.parametrize("buffer", ["own", "shared"])
def test_zero_gradients_accumulate(buffer):
    """Nothing writes between micro-batches. In one buffer for all gradients, a write to one counts
    as a write to all.
    """
    model = gated()
    if buffer == "shared":
        parameters = list(model.parameters())
        flat = torch.zeros(sum(p.numel() for p in parameters))
        for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            p.grad = part.view(p.shape)
    varreg.observe(model)
    x, w = torch.randn(9, 4), sample_weights(9)
    for _ in range(2):
        g = one_at_a_time(copy.deepcopy(model), (x,), w)
        for part in (slice(0, 2), slice(2, 5), slice(5, 9)):
            (losses(model(x[part]), w[part]).sum() / 9).backward()
        assert_moments(model, g)
        zero_grad(model)


@pytest.mark.parametrize("clip", [False, True], ids=["as is", "clipped"])
def test_a_step_takes_zero_gradients_that_were_clipped_as_measured(clip):
    """Clipping writes zeros over zeros. The variance of momentum decays all the same."""
    model = gated()
    varreg.observe(model)
    optimizer = varreg.VRSGD(model.parameters(), lr=0.0, momentum=0.9)
    model.up.data.normal_()
    found = []
    for t in range(3):
        optimizer.zero_grad(set_to_none=False)
        losses(model(torch.randn(6, 4)), sample_weights(6)).mean().backward()
        if clip:
            clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        found.append(optimizer.state[model.down]["vr_variance"].clone())
        if t == 0:
            model.up.data.zero_()
    torch.testing.assert_close(found[1], found[0] * 0.81)
    torch.testing.assert_close(found[2], found[0] * 0.81**2)


def several(rank: int, world: int, how: str):
    """Counts of all parameters, when gradients are cleared by zeros, and when they are not."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model = gated()
    if how == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        net = model
    else:
        net = DistributedDataParallel(model, gradient_as_bucket_view=how == "ddp views")
    varreg.observe(model)
    found = []
    for step in range(4):
        for _ in range(2):
            losses(net(torch.randn(3, 4)), sample_weights(3)).mean().backward()
            found.append(
                {
                    (None if (m := varreg.moments(p)) is None else m.count)
                    for p in model.parameters()
                }
            )
        if step != 1:
            zero_grad(model)
            found.append({varreg.moments(p) for p in model.parameters()})
    return found


@pytest.mark.parametrize("how", ["ddp", "ddp views", pytest.param("fsdp", marks=NEEDS_FSDP)])
def test_cleared_gradients_that_were_zero_among_processes(how):
    each = [{6}, {12}, {None}]
    for found in launch(several, 2, how):
        assert found == [*each, {6}, {12}, {18}, {24}, {None}, *each]


# ---- moments that a user keeps
# -------------------------------------------------------------------------------------


def values(m) -> list:
    found = [m.count, m.groups, m.total, m.square, m.mean, m.second_moment, m.variance, m.rho]
    return [v.clone() if isinstance(v, torch.Tensor) else v for v in found]


@pytest.mark.parametrize("groups", [None, 2])
def test_moments_that_are_kept_stay_what_they_were(groups):
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    varreg.observe(model, groups=groups)
    kept = []
    for n in (5, 4, 6):
        losses(model(torch.randn(n, 4)), sample_weights(n)).mean().backward()
        kept += [(m, values(m)) for p in model.parameters() if (m := varreg.moments(p)) is not None]
    clip_grad_norm_(model.parameters(), 1e-3)
    model.zero_grad(set_to_none=False)
    losses(model(torch.randn(6, 4)), sample_weights(6)).mean().backward()
    assert len(kept) == 12
    for m, before in kept:
        torch.testing.assert_close(values(m), before, rtol=0, atol=0)


def test_sums_that_nobody_keeps_are_added_to_in_place():
    model = nn.Linear(4, 3).double()
    varreg.observe(model)
    places = set()
    for n in range(2, 5):
        model(torch.randn(n, 4)).square().mean().backward()
        places.add(LEDGERS[model.weight].square.data_ptr())
    assert len(places) == 1
    assert varreg.moments(model.weight).count == 9
    held = varreg.moments(model.weight).square
    model(torch.randn(3, 4)).square().mean().backward()
    assert held.data_ptr() in places
    assert LEDGERS[model.weight].square.data_ptr() not in places


# ---- gradients that are nothing but rounding
# ------------------------------------------------------------------------


def attention(bias, **parts) -> nn.Module:
    """Softmax takes no notice of what is added to all of a row."""

    def forward(s, x):
        scores = s.q(x) @ s.k(x).transpose(1, 2) / 3 + bias(s)
        return scores.softmax(-1) @ s.v(x)

    return Fn(forward, q=nn.Linear(8, 8), k=nn.Linear(8, 8), v=nn.Linear(8, 8), **parts)


def weight_normed() -> nn.Module:
    """v/|v| of one number is its sign."""
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(1, 8)), nn.Tanh(), nn.Linear(8, 1))


def relative_positions() -> nn.Module:
    offsets = torch.randn(6, 6, 2)
    table = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))
    return attention(lambda s: s.table(offsets).squeeze(-1), table=table)


def table_of_positions() -> nn.Module:
    index = torch.arange(6)[:, None] - torch.arange(6)[None, :] + 5
    return attention(
        lambda s: s.table[index] + s.row * torch.ones(6), table=weight(11), row=weight(1)
    )


def uses_that_cancel() -> nn.Module:
    return Fn(
        lambda s, x: s.l(x) - s.l(x + 1) + s.l(x) - s.l(x - 1) + s.o(x),
        l=nn.Linear(8, 5),
        o=nn.Linear(8, 5),
    )


def scalars() -> nn.Module:
    """One number, used twice and by way of a graph: contributions have no shape."""
    return Fn(
        lambda s, x: (s.l(x) * s.a.exp() * s.a + s.a.sin() + s.b * torch.ones(5)).softmax(-1),
        l=nn.Linear(8, 5),
        a=weight(),
        b=weight(),
    )


def direction() -> nn.Module:
    return Fn(lambda s, x: s.l(x) @ (s.w / s.w.norm()).view(1, 1), l=nn.Linear(8, 1), w=weight(1))


# model: the shape of its input without the batch, and the parameters whose true gradient is 0
NOISE = {
    weight_normed: ((1,), ["0.parametrizations.weight.original1"]),
    relative_positions: ((6, 8), ["k.bias", "table.2.bias"]),
    table_of_positions: ((6, 8), ["k.bias", "row"]),
    uses_that_cancel: ((8,), ["l.weight", "l.bias"]),
    direction: ((8,), ["w"]),
    scalars: ((8,), ["b"]),
}


def noise_loss(model, x, autocast: bool = False):
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = model(x)
    return out.to(x.dtype).sin().square().sum(-1).mean()


@pytest.mark.parametrize("make", NOISE, ids=lambda f: f.__name__)
@pytest.mark.parametrize("precision", ["float64", "float32", "bfloat16"])
def test_rounding_is_no_gradient_from_outside(make, precision):
    torch.set_default_dtype(torch.float64 if precision == "float64" else torch.float32)
    for seed in range(5):
        torch.manual_seed(seed)
        model = make()
        varreg.observe(model)
        for _ in range(3):
            model.zero_grad()
            noise_loss(model, torch.randn(16, *NOISE[make][0]), precision == "bfloat16").backward()
    assert all(varreg.moments(p).count == 16 for p in model.parameters())


@pytest.mark.parametrize("make", NOISE, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_gradient_from_outside_is_found_at_the_first_step(make, dtype):
    """2 % of the gradient's norm; where the true gradient is 0, 1/1000 of the largest one's."""
    torch.set_default_dtype(dtype)
    shape, zero = NOISE[make]
    model, x = make(), torch.randn(16, *shape)
    noise_loss(model, x).backward()
    sizes = {n: float(p.grad.norm()) for n, p in model.named_parameters()}
    assert all((sizes[n] < 1e-4 * max(sizes.values())) == (n in zero) for n in sizes)
    for name, p in model.named_parameters():
        model.zero_grad()
        outside = torch.randn_like(p)
        outside *= (
            1e-3 * max(sizes.values()) if name in zero else 0.02 * sizes[name]
        ) / outside.norm()
        with (
            varreg.observe(model),
            pytest.raises(RuntimeError, match=f"'{name}' received a gradient from outside"),
        ):
            (noise_loss(model, x) + (outside * p).sum()).backward()


# ---- micro-batches that are empty, or leave parameters out
# --------------------------------------------------------------


def several_layers() -> nn.Module:
    parts = {
        "conv": nn.Conv1d(2, 3, 2),
        "norm": nn.GroupNorm(1, 3),
        "lstm": nn.LSTM(4, 3, batch_first=True),
    }
    parts |= {
        "l": nn.Linear(9, 3),
        "w": weight(3, 3),
        "scale": weight(3),
        "weighed": parametrizations.weight_norm(nn.Linear(3, 3)),
    }

    def forward(s, x):
        h = s.norm(s.conv(x)).transpose(1, 2)
        h = s.l(torch.cat([s.lstm(x)[0][:, -1], h[:, 0], h[:, 1]], 1)) * s.scale
        return s.weighed(torch.einsum("bi,ij->bj", h, s.w).tanh())

    return Fn(forward, **parts).double()


@pytest.mark.parametrize("at", [0, 1, 2], ids=["first", "middle", "last"])
@pytest.mark.parametrize("groups", [None, 2])
def test_an_empty_micro_batch_is_as_if_it_were_not_there(at, groups):
    model = several_layers()
    plain, bare = copy.deepcopy(model), copy.deepcopy(model)
    x, w = torch.randn(7, 2, 4), sample_weights(7)
    parts = [slice(0, 3), slice(3, 7)]
    with varreg.observe(bare, groups=groups):
        for part in parts:
            (losses(bare(x[part]), w[part]).sum() / 7).backward()
        expected = [varreg.moments(p) for p in bare.parameters()]
    parts.insert(at, slice(0, 0))
    varreg.observe(model, groups=groups)
    for part in parts:
        for m in (model, plain):
            (losses(m(x[part]), w[part]).sum() / 7).backward()
    for p, q, m in zip(model.parameters(), plain.parameters(), expected, strict=True):
        found = varreg.moments(p)
        assert (found.count, found.groups) == (7, 7 if groups is None else 4)
        torch.testing.assert_close(
            (found.total, found.square), (m.total, m.square), rtol=1e-10, atol=1e-14
        )
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-14)
    if groups is None:
        assert_moments(model, one_at_a_time(copy.deepcopy(plain), (x,), w))


def heads() -> nn.Module:
    """A trunk, and heads that a forward chooses from."""
    return Fn(
        lambda s, x, *which: torch.cat([s.heads[k](s.trunk(x).tanh()) for k in which], 1),
        trunk=nn.Linear(4, 5),
        heads=nn.ModuleList(nn.Linear(5, 2) for _ in range(4)),
    ).double()


def by_turns(model, x, w, turns) -> dict:
    """Each sample's gradient alone, the definition; turns: (samples, heads)."""
    rows = []
    for part, which in turns:
        for i in range(len(x))[part]:
            one = copy.deepcopy(model)
            one.zero_grad()
            losses(one(x[i : i + 1], *which), w[i : i + 1]).sum().backward()
            rows.append(
                {
                    n: torch.zeros_like(p) if p.grad is None else p.grad
                    for n, p in one.named_parameters()
                }
            )
    return {n: torch.stack([row[n] for row in rows]) for n in rows[0]}


def take_turns(model, x, w, turns) -> None:
    for part, which in turns:
        (losses(model(x[part], *which), w[part]).sum() / len(x)).backward()


def assert_reached(model, g) -> None:
    """Moments where there is a gradient; none where there is none."""
    for name, p in model.named_parameters():
        m = varreg.moments(p)
        assert (m is None) == (p.grad is None or not g[name].any()), name
        if m is not None:
            assert m.count == len(g[name])
            torch.testing.assert_close(m.mean, g[name].mean(0), rtol=1e-9, atol=1e-13)
            torch.testing.assert_close(
                m.variance, g[name].var(0, correction=0), rtol=1e-9, atol=1e-13
            )


TURNS = [
    [(slice(0, 3), (0,)), (slice(3, 5), (1,)), (slice(5, 9), (2,))],
    [(slice(0, 4), (0, 1)), (slice(4, 9), (2,))],
    [(slice(0, 2), (1,)), (slice(2, 9), (0, 2, 3))],
    [(slice(0, 9), (3,))],
]


@pytest.mark.parametrize("clear", ["none", "zeros", "by turns"])
def test_heads_that_take_turns(clear):
    model = heads()
    varreg.observe(model)
    for step, turns in enumerate([*TURNS, *TURNS[::-1]]):
        x, w = torch.randn(9, 4), sample_weights(9)
        g = by_turns(model, x, w, turns)
        take_turns(model, x, w, turns)
        assert_reached(model, g)
        model.zero_grad(set_to_none=clear == "none" or (clear == "by turns" and step % 2 == 0))


def test_a_trunk_that_no_optimizer_has_is_never_cleared():
    """Its gradients say nothing about whether those of the heads were cleared."""
    model = heads()
    varreg.observe(model)
    for turns in TURNS * 2:
        x, w = torch.randn(9, 4), sample_weights(9)
        g = by_turns(model, x, w, turns)
        take_turns(model, x, w, turns)
        for name, p in model.heads.named_parameters():
            m = varreg.moments(p)
            assert (m is None) == (not g[f"heads.{name}"].any())
            assert m is None or m.count == 9
        model.heads.zero_grad()
    assert varreg.moments(model.trunk.weight).count == 72


def test_gradients_cleared_for_one_parameter_alone():
    model = heads()
    varreg.observe(model)
    x, w = torch.randn(9, 4), sample_weights(9)
    for _ in range(
        2
    ):  # all are cleared together once, so that all are known to be cleared at times
        model.zero_grad()
        take_turns(model, x, w, [(slice(0, 3), (0,))])
    model.heads[0].weight.grad = None
    take_turns(model, x, w, [(slice(3, 9), (0,))])
    counts = {
        n: None if (m := varreg.moments(p)) is None else m.count
        for n, p in model.named_parameters()
    }
    assert counts["heads.0.weight"] == 6
    assert counts["heads.0.bias"] == counts["trunk.weight"] == 9
    model.heads[0].weight.grad = None
    message = (
        r"'heads\.1\.(weight|bias)' has its first gradient after 9 samples.*"
        r"'heads\.0\.weight' was cleared"
    )
    with pytest.raises(RuntimeError, match=message):
        take_turns(model, x, w, [(slice(3, 9), (1,))])


# ---- gradients whose squares leave the range of float32
# -------------------------------------------------------------------

SIZES = [1e-30, 1e-20, 1e-16, 1e-8, 1.0, 1e12, 1e25]


def layers() -> nn.Module:
    """Each way to add up: one row per sample and several, a convolution, a lookup, a general rule,
    a pull-back, two uses.
    """
    parts = {
        "conv": nn.Conv1d(3, 4, 2),
        "rows": nn.Linear(4, 4),
        "norm": nn.LayerNorm(4),
        "one": nn.Linear(4, 3),
    }
    parts |= {
        "table": nn.Embedding(5, 3),
        "w": weight(3, 3),
        "weighed": parametrizations.weight_norm(nn.Linear(3, 3)),
    }

    def forward(s, ids):
        x = s.table(ids).transpose(1, 2)
        h = s.one(s.norm(s.rows(s.conv(x).transpose(1, 2)).tanh()).mean(1))
        return s.weighed((s.weighed(h) @ s.w).tanh())

    return Fn(forward, **parts)


def scaled_loss(model, ids, w, size) -> torch.Tensor:
    return losses(model(ids), w).mean() * size


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("groups", [None, 3])
def test_rho_does_not_depend_on_the_size_of_gradients(size, groups):
    torch.set_default_dtype(torch.float32)
    model, ids, w = layers(), torch.randint(0, 5, (8, 4)), sample_weights(8).float()
    plain = copy.deepcopy(model)
    varreg.observe(model, groups=groups)
    scaled_loss(model, ids[:5], w[:5], 1.0).backward()
    scaled_loss(model, ids[5:], w[5:], 1.0).backward()
    expected = {n: varreg.moments(p).rho for n, p in model.named_parameters()}
    fresh = copy.deepcopy(plain)
    varreg.observe(fresh, groups=groups)
    for part in (slice(0, 5), slice(5, 8)):
        for m in (fresh, plain):
            scaled_loss(m, ids[part], w[part], size).backward()
    for (name, p), q in zip(fresh.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=float(q.grad.abs().max()) * 1e-5)
        m = varreg.moments(p)
        assert p.grad.dtype == torch.float32
        assert m.square.dtype == (torch.float32 if 1e-9 < size < 1e14 else torch.float64)
        sure = expected[name] < 1e4  # else the mean is rounding
        torch.testing.assert_close(m.rho[sure].float(), expected[name][sure], rtol=5e-3, atol=1e-4)


@pytest.mark.parametrize(
    "rule", ["SGD", "Adam", "AdamW", "NAdam", "RMSprop", "Adagrad", "Adadelta"]
)
@pytest.mark.parametrize("size", [1e-20, 1e25])
@pytest.mark.parametrize(
    "options", [{}, {"per": "tensor"}, {"per": "model"}, {"history": "ema"}], ids=str
)
def test_optimizers_take_the_step_that_float64_takes(rule, size, options):
    """λ of a float32 model is that of its float64 twin, for each setting; native code or not."""
    for arguments in RULES[rule].settings.values():
        if size < 1 and arguments.get(
            "centered"
        ):  # E g² − (E g)² of the base itself is rounding in float32
            continue
        models = [
            nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(t)
            for t in (torch.float32, torch.float64)
        ]
        models[1].load_state_dict(models[0].state_dict())
        arguments = {**arguments, "lr": 0.0, "weight_decay": 0.0}
        optimizers = [
            RULES[rule].regularized(m.parameters(), **arguments, **options) for m in models
        ]
        for m in models:
            varreg.observe(m)
        for _ in range(4):
            x, w = torch.randn(8, 4), sample_weights(8)
            for m, o in zip(models, optimizers, strict=True):
                o.zero_grad()
                (
                    losses(m(x.to(m[0].weight.dtype)), w.to(m[0].weight.dtype)).mean() * size
                ).backward()
                o.step()
            for p, q in zip(*(m.parameters() for m in models), strict=True):
                found, expected = (o.lambda_of(t) for o, t in zip(optimizers, (p, q), strict=True))
                if (
                    size > 1 and RULES[rule].adaptive
                ):  # g² of the base itself is infinite in float32
                    assert found.isfinite().all()
                    continue
                torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=2e-3)


def test_sizes_that_change_while_training():
    """Found a step late, by the optimizer: never garbage in between, and native again when sizes
    are ordinary.
    """
    torch.set_default_dtype(torch.float32)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    varreg.observe(model)
    optimizer = varreg.VRSGD(model.parameters(), lr=0.0, momentum=0.9)
    x, w = torch.randn(8, 4), sample_weights(8).float()
    kinds, plain = [], []
    for t, size in enumerate([1.0] * 3 + [1e-20] * 300 + [1.0] * 3 + [1e25] * 3 + [1.0] * 600):
        optimizer.zero_grad()
        scaled_loss(model, x, w, size).backward()
        told = (
            pytest.warns(UserWarning, match=r"its gradients are too.*step on\. Training diverges")
            if t == 306
            else nullcontext()
        )
        with told:
            optimizer.step()
        state = optimizer.state[model[0].weight]
        kinds.append((varreg.moments(model[0].weight).square.dtype, state["vr_variance"].dtype))
        found = [optimizer.lambda_of(p) for p in model.parameters()]
        assert all(lam is None or ((lam > 0) & (lam <= 3)).all() for lam in found)
        plain.append(any(lam is None for lam in found))
    assert kinds[2] == (torch.float32, torch.float32)
    assert kinds[5] == kinds[308] == (torch.float64, torch.float64)
    assert kinds[305] == kinds[-1] == (torch.float32, torch.float32)
    assert [t for t, is_plain in enumerate(plain) if is_plain] == [306]
    assert state["vr_variance"].isfinite().all()
    again = varreg.VRSGD(model.parameters(), lr=0.0, momentum=0.9)
    again.load_state_dict(optimizer.state_dict())
    assert again.state[model[0].weight]["vr_variance"].dtype == torch.float32


def test_a_scaler_is_spoken_of_where_there_may_be_one():
    torch.set_default_dtype(torch.float32)
    model = nn.Linear(4, 3)
    varreg.observe(model)
    optimizer = varreg.VRSGD(model.parameters(), lr=0.0)
    for size in (1.0, 1e25):
        optimizer.step()
        optimizer.zero_grad()
        scaled_loss(model, torch.randn(8, 4), sample_weights(8).float(), size).backward()
    for p in model.parameters():
        p.grad.mul_(1e-25)  # as unscale_() does
    with pytest.warns(UserWarning, match="If a GradScaler scales the loss"):
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_large_loss_scales_of_mixed_precision(dtype):
    """As large as gradients allow: ρ is that of no scale at all."""
    torch.set_default_dtype(torch.float32)
    model, x, w = (
        nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)),
        torch.randn(8, 4),
        sample_weights(8).float(),
    )
    varreg.observe(model)
    rho = []
    for scale in (1.0, 65536.0, 2.0**70):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16 if scale > 1e6 else dtype):
            out = model(x)
        (losses(out.float(), w).mean() * scale).backward()
        if scale > 1e6:  # all sums are examined at first, then one in turn
            with pytest.warns(UserWarning, match="have left the range of float32"):
                assert all(
                    varreg.moments(p).square.dtype == torch.float64 for p in model.parameters()
                )
            model.zero_grad()
            (losses(model(x), w).mean() * scale).backward()
        rho.append(torch.cat([varreg.moments(p).rho.flatten().float() for p in model.parameters()]))
        assert rho[-1].isfinite().all()
    sure = rho[0] < 10
    torch.testing.assert_close(rho[1][sure].log1p(), rho[0][sure].log1p(), rtol=0.1, atol=0.1)
    torch.testing.assert_close(rho[2][sure].log1p(), rho[0][sure].log1p(), rtol=0.1, atol=0.1)


# ---- memory that is not shared -------------------------------------------------------------------

WRITES = {
    "in place": lambda p: p.grad.mul_(0.5),
    "without a trace": lambda p: p.grad.data.mul_(0.5),
    "by NumPy": lambda p: p.grad.numpy().__imul__(0.5),
    "clipped": lambda p: torch.nn.utils.clip_grad_norm_([p], 1e-3),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_to_a_gradient_leaves_its_sum(write):
    torch.manual_seed(0)
    layer = torch.nn.Linear(96, 96)
    with varreg.observe(layer):
        layer(torch.randn(6, 96)).square().mean().backward()
        p, total = layer.weight, varreg.moments(layer.weight).total
        assert p.grad.data_ptr() != total.data_ptr()
        before = total.clone()
        write(p)
        assert torch.equal(varreg.moments(p).total, before)
        assert not torch.equal(p.grad, before)


def test_zeros_of_which_somebody_took_the_address_were_not_cleared():
    layer = torch.nn.Linear(96, 96)
    with varreg.observe(layer):
        for _ in range(2):
            layer(torch.zeros(6, 96)).mean().backward()
            layer.weight.grad.numpy()
        assert varreg.moments(layer.weight).count == 12


def test_threads_may_write_to_one_gradient():
    """Memory that torch copies at the first write (`torch._lazy_clone`) ends in a crash there."""
    layer = torch.nn.Linear(700, 600)
    with varreg.observe(layer):
        for _ in range(5):
            layer.zero_grad()
            layer(torch.randn(4, 700)).square().mean().backward()
            grad = layer.weight.grad
            before = grad.clone()
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(lambda _, grad=grad: grad.mul_(1.0), range(4)))
            assert torch.equal(grad, before)


def test_gradients_that_are_zeroed_without_a_trace_were_cleared():
    torch.manual_seed(0)
    layer = torch.nn.Linear(96, 96)
    with varreg.observe(layer):
        for _ in range(2):
            for p in layer.parameters():
                if p.grad is not None:
                    p.grad.data.zero_()
            layer(torch.randn(6, 96)).mean().backward()
        assert varreg.moments(layer.weight).count == 6
