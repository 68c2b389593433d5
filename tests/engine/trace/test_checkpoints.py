"""Activation checkpoints of functions and methods: the second run meets the engine as the first
did.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import (
    checkpoint,
    checkpoint_sequential,
    set_checkpoint_early_stop,
)

import varreg
from tests.properties.adversarial import normal
from tests.support.judge import Case, judge
from tests.support.model_table import Fn, weight
from tests.support.truth import assert_close, by_graph, losses, one_at_a_time, sample_weights

BATCHES = (4, 3, 1)


def linear() -> nn.Linear:
    return nn.Linear(3, 3)


def layers() -> dict[str, nn.Module]:
    return {"fc": linear(), "mid": linear(), "out": linear()}


def again(function: Callable[..., Any], *args: Any, reentrant: bool = False, **options: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=reentrant, **options)


# ---- forwards, each with a checkpointed function in it; `r` says whether it is re-entrant
# ---------


def two_layouts(s: Any, x: Tensor, r: bool) -> Tensor:
    """One function, checkpointed three times: batch first, time first, folded."""

    def block(h: Tensor) -> Tensor:
        return torch.tanh(s.mid(h) @ s.mix)

    h = again(block, s.fc(x), reentrant=r)
    h = again(block, h.transpose(0, 1), reentrant=r).transpose(0, 1)
    return again(block, h.flatten(0, 1), reentrant=r).view(x.shape)


def nested(s: Any, x: Tensor, r: bool) -> Tensor:
    def inner(h: Tensor) -> Tensor:
        return (h @ s.mix).tanh()

    def middle(h: Tensor) -> Tensor:
        return s.mid(again(inner, (h @ s.mix).sin(), reentrant=r).transpose(0, 1)).transpose(0, 1)

    return again(
        lambda h: again(middle, h * s.gain, reentrant=r).cos() @ s.mix, s.fc(x), reentrant=r
    )


def parameter_in_the_inner(s: Any, x: Tensor) -> Tensor:
    """The inner checkpoint gets parameters, and what is made of them, as arguments."""

    def inner(h: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return (h @ w).tanh() * v

    return again(lambda h: again(inner, h.sin(), s.mix, s.gain.exp()).cos(), s.fc(x))


def mixed_kinds(s: Any, x: Tensor, r: bool) -> Tensor:
    """A checkpoint of the one kind in one of the other."""

    def inner(h: Tensor) -> Tensor:
        return (s.mid(h) @ s.mix).tanh()

    return s.out(
        again(lambda h: again(inner, h.sin(), reentrant=not r) * s.gain, s.fc(x), reentrant=r)
    )


def closed_over(s: Any, x: Tensor, r: bool) -> Tensor:
    """What the function closes over carries the batch, too: another tensor, and the input
    itself.
    """
    other = s.mid(x).detach().transpose(0, 1)

    def block(h: Tensor) -> Tensor:
        return (h @ s.mix) * (x @ s.mix) + (other @ s.mix).transpose(0, 1)

    return s.out(again(block, s.fc(x), reentrant=r))


def keywords(s: Any, x: Tensor) -> Tensor:
    def block(h: Tensor, *, scale: Tensor, name: str) -> Tensor:
        return (h @ s.mix) * scale.transpose(0, 1) + s.gain

    return again(block, s.fc(x), scale=s.mid(x).transpose(0, 1).sin(), name="n")


def structures(s: Any, x: Tensor, r: bool) -> Tensor:
    def block(h: Tensor, rest: Any, k: int) -> tuple[Tensor, Tensor]:
        return h @ s.mix, (rest["x"][0] @ s.mix) * k

    a, b = again(block, s.fc(x), {"x": [x.sin()]}, 3, reentrant=r)
    return s.out(a * b)


def made_inside(s: Any, x: Tensor, r: bool) -> Tensor:
    """A weight is made of parameters inside."""
    return again(lambda h: F.linear(h, (s.mix * s.gain).tanh()), s.fc(x), reentrant=r)


def made_outside(s: Any, x: Tensor) -> Tensor:
    w = (s.mix * s.gain).tanh()
    return again(lambda h, w: F.linear(h, w).sin() + w[0], s.fc(x), w)


def positions(s: Any, x: Tensor, r: bool) -> Tensor:
    table = F.embedding(torch.arange(x.shape[1]) % 3, s.mix)
    return again(lambda h: s.mid(h + table) @ s.mix, s.fc(x), reentrant=r)


def general(s: Any, x: Tensor, r: bool) -> Tensor:
    """Operations that have no rule, and one that is tried."""

    def block(h: Tensor) -> Tensor:
        h = torch.cdist(h, s.mix) + F.cosine_similarity(h.unsqueeze(-2), s.mix, dim=-1)
        return torch.cumsum(F.pairwise_distance(h, h.roll(1, -1), keepdim=True) * h, -1).relu_()

    return s.out(again(block, s.fc(x), reentrant=r))


def in_place(s: Any, x: Tensor, r: bool) -> Tensor:
    def block(h: Tensor) -> Tensor:
        h = torch.einsum("btd,de->bte", h, s.mix)
        h *= s.gain
        return h.relu_()

    return again(block, s.fc(x), reentrant=r)


def grown(s: Any, x: Tensor, r: bool) -> Tensor:
    """All of a deep stack, and its parameters also elsewhere."""
    h = s.fc(x) @ s.mix
    for _ in range(3):
        h = again(lambda h: h + (s.mid(h) @ s.mix).tanh(), h, reentrant=r)
    return s.out(h @ s.mix)


def offloaded(s: Any, x: Tensor) -> Tensor:
    def block(h: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            h = (h @ s.mix).sin()
        return (h @ s.mix).tanh()

    with torch.autograd.graph.save_on_cpu():
        return again(block, s.fc(x))


BOTH = [
    two_layouts,
    nested,
    mixed_kinds,
    closed_over,
    structures,
    made_inside,
    positions,
    general,
    in_place,
    grown,
]
PLAIN = [parameter_in_the_inner, keywords, made_outside, offloaded]


def case(forward: Callable[..., Tensor], *flags: bool, **options: Any) -> Case:
    def make() -> nn.Module:
        parts = {"mix": weight(3, 3), "gain": weight(3)}
        return Fn(lambda s, x: forward(s, x, *flags), **layers(), **parts)

    return Case(forward.__name__, "checkpoint", make, normal(4, 3), "exact", **options)


CASES = [
    *(pytest.param(f, (False,), id=f"{f.__name__}-plain") for f in BOTH),
    *(pytest.param(f, (True,), id=f"{f.__name__}-reentrant") for f in BOTH),
    *(pytest.param(f, (), id=f.__name__) for f in PLAIN),
]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("forward", "flags"), CASES)
def test_moments_are_exact(forward, flags, batch):
    outcome = judge(case(forward, *flags), batch)
    assert outcome.kind == "exact", str(outcome)


def model_of(forward: Callable[..., Tensor], *flags: bool) -> nn.Module:
    torch.manual_seed(0)
    return case(forward, *flags).make().double()


def batch_of(size: int = 4, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 4, 3, dtype=torch.float64, generator=generator)
    return x, sample_weights(size)


def assert_exact(model: nn.Module, truth: dict[str, Tensor]) -> None:
    scale = max(float(g.detach().abs().max()) for g in truth.values())
    for name, p in model.named_parameters():
        m, g = varreg.moments(p), truth[name].detach()
        if m is None:
            assert float(g.abs().max()) == 0.0, name
            continue
        assert m.count == len(g)
        assert_close(m.mean, g.mean(0), scale, name)
        assert_close(m.variance, g.var(0, correction=0), scale**2, name)


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("forward", [two_layouts, nested, closed_over, general, mixed_kinds])
def test_with_and_without_early_stop(forward, early_stop):
    model, (x, weights) = model_of(forward, False), batch_of()
    truth = one_at_a_time(copy.deepcopy(model), (x,), weights)
    with varreg.observe(model), set_checkpoint_early_stop(early_stop):
        for _ in range(3):
            model.zero_grad()
            losses(model(x), weights).mean().backward()
            assert_exact(model, truth)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("forward", [two_layouts, nested, closed_over])
def test_micro_batches_are_accumulated(forward, reentrant):
    """Also where both forwards run before the first backward."""
    model, (x, weights) = model_of(forward, reentrant), batch_of(5)
    truth = one_at_a_time(copy.deepcopy(model), (x,), weights)
    parts = [slice(0, 2), slice(2, 5)]
    with varreg.observe(model, reduction="sum"):
        for together in (False, True):
            model.zero_grad()
            if together:
                for loss in [losses(model(x[k]), weights[k]).sum() for k in parts]:
                    loss.backward()
            else:
                for k in parts:
                    losses(model(x[k]), weights[k]).sum().backward()
            assert_exact(model, truth)


@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_draws_the_same_numbers_again(reentrant):
    def forward(s: Any, x: Tensor) -> Tensor:
        return again(
            lambda h: F.dropout(s.mid(h) @ s.mix, 0.5) @ s.mix, s.fc(x), reentrant=reentrant
        )

    model, (x, weights) = model_of(forward), batch_of()
    twin = Fn(
        lambda s, x: F.dropout(s.mid(s.fc(x)) @ s.mix, 0.5) @ s.mix,
        **dict(copy.deepcopy(model).named_children()),
    )
    twin.mix, twin.gain = (nn.Parameter(p.detach().clone()) for p in (model.mix, model.gain))
    with varreg.observe(model):
        for seed in range(3):
            torch.manual_seed(seed)
            truth = by_graph(twin, (x,), weights)
            torch.manual_seed(seed)
            model.zero_grad()
            losses(model(x), weights).mean().backward()
            assert_exact(model, truth)


@pytest.mark.parametrize("reentrant", [False, True])
def test_autocast_is_as_it_was(reentrant):
    """The gradient is that of the plain model, to the bit or to bfloat16's rounding."""
    model = model_of(two_layouts, reentrant).float()
    twin, (x, weights) = copy.deepcopy(model), batch_of()
    x, weights = x.float(), weights.float()
    with varreg.observe(model):
        for _ in range(2):
            for m in (model, twin):
                m.zero_grad()
                with torch.autocast("cpu", torch.bfloat16):
                    loss = losses(m(x).float(), weights).mean()
                loss.backward()
            for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                if q.grad is None:
                    assert p.grad is None
                    continue
                torch.testing.assert_close(
                    p.grad, q.grad, rtol=0.05, atol=0.02 * float(q.grad.abs().max())
                )
                torch.testing.assert_close(
                    varreg.moments(p).mean, p.grad, rtol=0.05, atol=0.02 * float(q.grad.abs().max())
                )


@pytest.mark.parametrize("reentrant", [False, True])
def test_an_error_in_the_second_run_leaves_nothing_behind(reentrant):
    fails = [False]

    def forward(s: Any, x: Tensor) -> Tensor:
        def block(h: Tensor) -> Tensor:
            h = s.mid(h @ s.mix)
            if fails[0]:
                raise KeyError("no more")
            return (h @ s.mix).tanh()

        return s.out(again(block, s.fc(x), reentrant=reentrant))

    model, (x, weights) = model_of(forward), batch_of()
    truth = one_at_a_time(copy.deepcopy(model), (x,), weights)
    with varreg.observe(model):
        for _ in range(2):
            loss = losses(model(x), weights).mean()
            fails[0] = True
            with pytest.raises(KeyError):
                loss.backward()
            fails[0] = False
            assert not _get_current_function_mode_stack()
            assert not hasattr(x, "_varreg_where")
            model.zero_grad()
            losses(model(x), weights).mean().backward()
            assert_exact(model, truth)


def test_a_second_backward_runs_the_function_a_third_time():
    model, (x, weights) = model_of(nested, False), batch_of()
    truth = one_at_a_time(copy.deepcopy(model), (x,), weights)
    with varreg.observe(model):
        loss = losses(model(x), weights).mean()
        for _ in range(2):
            model.zero_grad()
            loss.backward(retain_graph=True)
            assert_exact(model, truth)


def test_a_gradient_inside_of_forward_runs_the_function_again_there():
    """The trace of the forward goes on as before. Of a batch of one: the gradient of a sum over
    samples is refused."""

    def forward(s: Any, x: Tensor) -> Tensor:
        h = s.fc(x)
        y = again(lambda h: (h @ s.mix).tanh(), h)
        (g,) = torch.autograd.grad(y.square().sum(), h, retain_graph=True)
        return s.out(y * g.detach().sin()) @ s.mix

    model, (x, weights) = model_of(forward), batch_of(1)
    truth = one_at_a_time(copy.deepcopy(model), (x,), weights)
    with varreg.observe(model):
        for _ in range(2):
            model.zero_grad()
            losses(model(x), weights).mean().backward()
            assert_exact(model, truth)


def test_two_forwards_take_turns():
    """Each second run is traced with the batch of its own forward."""
    model, weights = model_of(nested, False), sample_weights(5)
    x, _ = batch_of(5)
    truth = one_at_a_time(copy.deepcopy(model), (x,), weights)
    with varreg.observe(model, reduction="sum"):
        first = losses(model(x[:3]), weights[:3]).sum()
        second = losses(model(x[3:]), weights[3:]).sum()
        first.backward()
        with torch.no_grad():
            model(x)
        second.backward()
        assert_exact(model, truth)


@pytest.mark.parametrize("argument", ["parameter", "made of parameters"])
def test_a_reentrant_checkpoint_that_is_given_parameters_is_refused(argument):
    def forward(s: Any, x: Tensor) -> Tensor:
        w = s.mix if argument == "parameter" else s.mix.tanh()
        return again(lambda h, w: s.mid(h) @ w, s.fc(x), w, reentrant=True)

    model, (x, _) = model_of(forward), batch_of()
    with (
        varreg.observe(model),
        pytest.raises(
            ValueError, match=r"re-entrant checkpoint is given 'mix'.*use_reentrant=False"
        ),
    ):
        model(x)
    assert not _get_current_function_mode_stack()


def test_a_version_of_torch_that_is_unknown_is_an_error(monkeypatch):
    """Modules are served by their hooks all the same; a bare parameter is not."""
    from varreg.engine.trace import checkpoints

    monkeypatch.setattr(checkpoints, "_held", lambda call: None)
    model, (x, weights) = model_of(grown, False), batch_of()
    with (
        varreg.observe(model),
        pytest.raises(ValueError, match=r"checkpointed.*a module of their own"),
    ):
        model(x)

    def modules(s: Any, x: Tensor) -> Tensor:
        return s.out(again(s.mid, s.fc(x)))

    model = model_of(modules)
    truth = one_at_a_time(copy.deepcopy(model), (x,), weights)
    with varreg.observe(model):
        losses(model(x), weights).mean().backward()
        assert_exact(model, truth)


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_whole_model_and_segments_of_it(reentrant):
    """Checkpoints around an observed model, and around parts of a `Sequential`."""
    torch.manual_seed(0)
    stack = nn.Sequential(*(m for _ in range(4) for m in (linear(), nn.Tanh()))).double()
    x, weights = batch_of()
    truth = one_at_a_time(copy.deepcopy(stack), (x,), weights)
    x.requires_grad_()
    with varreg.observe(stack):
        for _ in range(2):
            stack.zero_grad()
            losses(again(stack, x, reentrant=reentrant), weights).mean().backward()
            assert_exact(stack, truth)

    def segments(s: Any, x: Tensor) -> Tensor:
        parts = [s.fc, lambda h: (h @ s.mix).tanh(), s.mid, lambda h: h * s.gain, s.out]
        return checkpoint_sequential(parts, 2, x.requires_grad_(), use_reentrant=reentrant)

    model = model_of(segments)
    truth = one_at_a_time(copy.deepcopy(model), (x.detach(),), weights)
    with varreg.observe(model):
        for _ in range(2):
            model.zero_grad()
            losses(model(x.detach().clone()), weights).mean().backward()
            assert_exact(model, truth)


def test_with_contexts_of_its_own():
    """`context_fn`: the second run goes through the user's context as well."""
    seen: list[str] = []

    class Context:
        def __init__(self, name: str):
            self.name = name

        def __enter__(self) -> None:
            seen.append(self.name)

        def __exit__(self, *_: object) -> None:
            pass

    def forward(s: Any, x: Tensor) -> Tensor:
        contexts = lambda: (Context("first"), Context("second"))
        return again(lambda h: (s.mid(h) @ s.mix).tanh(), s.fc(x), context_fn=contexts)

    model, (x, weights) = model_of(forward), batch_of()
    truth = one_at_a_time(copy.deepcopy(model), (x,), weights)
    seen.clear()
    with varreg.observe(model):
        losses(model(x), weights).mean().backward()
        assert_exact(model, truth)
    assert seen == ["first", "second"]


def test_registered_rules_and_groups():
    """With groups, the estimate is that of the model without checkpoints."""
    model, (x, weights) = model_of(two_layouts, False), batch_of(4)

    def plainly(s: Any, x: Tensor) -> Tensor:
        h = s.fc(x)
        for _ in range(3):
            h = torch.tanh(s.mid(h) @ s.mix)
        return h

    twin = copy.deepcopy(model)
    twin.forward = lambda x: plainly(twin, x)  # type: ignore[method-assign]
    with varreg.observe(model, groups=2), varreg.observe(twin, groups=2):
        for m in (model, twin):
            losses(m(x), weights).mean().backward()
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            if q.grad is not None:
                torch.testing.assert_close(
                    varreg.moments(p).variance,
                    varreg.moments(q).variance,
                    rtol=1e-9,
                    atol=1e-12,
                    msg=name,
                )


def test_nothing_is_kept_after_the_step():
    """The graph, with all that a checkpoint holds, is gone when the loss is."""
    import gc
    import weakref

    model, (x, weights) = model_of(nested, False), batch_of()
    with varreg.observe(model):
        loss = losses(model(x), weights).mean()
        loss.backward()
        dead = weakref.ref(x)
        gc.collect()
        gc.disable()
        try:
            del loss, x
            assert dead() is None
        finally:
            gc.enable()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_parameter_used_inside_and_outside(reentrant):
    """What a sample contributes to both uses belongs under one square."""

    def forward(s, x):
        inside = checkpoint(lambda v: s.l(v), x, use_reentrant=reentrant)
        return inside * s.l.bias.softmax(0)

    model = Fn(forward, l=nn.Linear(3, 3)).double()
    x, w = torch.randn(4, 3).requires_grad_(), sample_weights(4)
    g = one_at_a_time(copy.deepcopy(model), (x.detach().requires_grad_(),), w)
    varreg.observe(model)
    for _ in range(2):
        model.zero_grad()
        losses(model(x), w).mean().backward()
        m = varreg.moments(model.l.bias)
        assert m.count == 4
        assert_close(m.variance, g["l.bias"].var(0, correction=0), 1.0, "l.bias")
