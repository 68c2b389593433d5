"""A step by kept tasks is the step by new tasks, to the bit, whatever changes in between."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import varreg
from varreg import native
from varreg.optim.prepared import PreparedStep
from varreg.optim.whole_step import repeats_torch

needs_compiler = pytest.mark.skipif(
    native.status() != "in use", reason=f"native kernel: {native.status()}"
)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)).double()


class Twin:
    """A model in training; with `is_fresh`, each step has new tasks."""

    def __init__(self, is_fresh, make=varreg.VRSGD, **options):
        self.is_fresh, self.model = is_fresh, model()
        self.observer = varreg.observe(self.model)
        self.optimizer = make(self.model.parameters(), lr=0.01, **options)
        self.optimizer._watches_lambda = False
        self.prepared = 0

    def backward(self, x):
        self.optimizer.zero_grad()
        self.model(x).square().sum(1).mean().backward()

    def step(self):
        if self.is_fresh:
            self.optimizer._prepared = None
        kept = self.optimizer._prepared
        self.optimizer.step()
        self.prepared += kept is not None and kept is self.optimizer._prepared


def clip(twin):
    nn.utils.clip_grad_norm_(twin.model.parameters(), 1e-3)


def clip_one(twin):
    twin.model[0].weight.grad.mul_(0.5)


def change_elements(twin):
    twin.model[0].weight.grad[0, 0] += 1


def drop_gradient(twin):
    twin.model[2].bias.grad = None


def replace_gradient(twin):
    twin.model[2].weight.grad = twin.model[2].weight.grad.clone()


def transpose_gradient(twin):
    grad = twin.model[2].weight.grad
    twin.model[2].weight.grad = grad.t().contiguous().t()


def change_rate(twin):
    twin.optimizer.param_groups[0]["lr"] *= 0.5


def change_momentum(twin):
    twin.optimizer.param_groups[0]["momentum"] = 0.5


def change_decay(twin):
    twin.optimizer.param_groups[0]["weight_decay"] = 0.1


def maximize(twin):
    twin.optimizer.param_groups[0]["maximize"] = True


def change_s(twin):
    twin.optimizer.param_groups[0]["s"] = 3.0


def move_parameter(twin):
    twin.model[0].weight.data = twin.model[0].weight.data.clone()


def move_state(twin):
    state = twin.optimizer.state[twin.model[0].weight]
    for key, value in state.items():
        state[key] = value.clone() if isinstance(value, torch.Tensor) else value


def move_values(twin):
    for value in twin.optimizer.state[twin.model[0].weight].values():
        if isinstance(value, torch.Tensor):
            value.data = value.data.clone()


def load(twin):
    twin.optimizer.load_state_dict(copy.deepcopy(twin.optimizer.state_dict()))


def forget_state(twin):
    twin.optimizer.state.clear()


def one_sample_less(twin):
    twin.backward(torch.randn(5, 5, generator=torch.Generator().manual_seed(7)).double())


def accumulate(twin):
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(8)).double()
    twin.model(x).square().sum(1).mean().backward()


def zero_a_column(twin):
    """Some elements have no gradient: their counts differ from the others'."""
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(9)).double()
    x[:, 0] = 0
    twin.backward(x)


def add_group(twin):
    extra = nn.Parameter(torch.ones(2, dtype=torch.float64))
    extra.grad = torch.ones_like(extra)
    twin.optimizer.add_param_group({"params": [extra]})


def freeze(twin):
    twin.model[2].requires_grad_(False)
    twin.backward(torch.randn(6, 5, generator=torch.Generator().manual_seed(10)).double())


def begin_again(twin):
    for value in twin.optimizer.state[twin.model[0].weight].values():
        if isinstance(value, torch.Tensor):
            value.zero_()


def change_betas(twin):
    twin.optimizer.param_groups[0]["betas"] = (0.8, 0.99)


OPTIONS = [
    {"momentum": 0.9},
    {},
    {"momentum": 0.9, "nesterov": True},
    {"make": varreg.VRAdam},
    {"make": varreg.VRAdamW, "weight_decay": 0.1},
]
EVENTS = [
    *(clip, clip_one, change_elements, drop_gradient, replace_gradient, transpose_gradient),
    *(change_rate, change_momentum, change_decay, maximize, change_s, move_parameter, move_state),
    *(move_values, load, forget_state, one_sample_less, accumulate, zero_a_column, add_group),
    *(freeze, change_betas, begin_again),
]


@needs_compiler
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("event", EVENTS)
def test_kept_tasks_take_the_same_step(event, options):
    twins = [Twin(is_fresh, **options) for is_fresh in (False, True)]
    random = torch.Generator().manual_seed(1)
    for turn in range(9):
        x = torch.randn(6, 5, generator=random).double()
        for twin in twins:
            twin.backward(x)
            if turn == 5:
                event(twin)
            twin.step()
        kept, fresh = twins
        for p, q in zip(kept.model.parameters(), fresh.model.parameters(), strict=True):
            assert torch.equal(p, q)
            a, b = kept.optimizer.lambda_of(p), fresh.optimizer.lambda_of(q)
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b)
        states = [list(twin.optimizer.state_dict()["state"].values()) for twin in twins]
        for ours, theirs in zip(*states, strict=True):
            assert ours.keys() == theirs.keys()
            for key, value in ours.items():
                assert value is theirs[key] is None or torch.equal(value, theirs[key]), key
    assert kept.prepared >= 3  # before the event and after it
    assert not fresh.prepared


@needs_compiler
def test_tasks_are_not_kept_where_the_base_takes_a_step():
    net = model()
    varreg.observe(net)
    other = nn.Parameter(torch.ones(3, dtype=torch.float64))
    groups = [{"params": [*net.parameters()]}, {"params": [other], "s": 0.0}]
    optimizer = varreg.VRSGD(groups, lr=0.1, momentum=0.9)
    for _ in range(4):
        optimizer.zero_grad()
        net(torch.randn(6, 5).double()).square().sum(1).mean().backward()
        other.grad = torch.ones_like(other)
        before = other.detach().clone()
        optimizer.step()
        assert not torch.equal(other, before)
        assert optimizer._prepared is None


@needs_compiler
def test_an_optimizer_is_copied_without_its_tasks():
    twin = Twin(False, momentum=0.9)
    for _ in range(4):
        twin.backward(torch.randn(6, 5).double())
        twin.step()
    assert isinstance(twin.optimizer._prepared, PreparedStep)
    assert copy.deepcopy(twin.optimizer)._prepared is None


@needs_compiler
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("options", OPTIONS)
def test_tasks_of_a_first_step_are_not_kept(options):
    """A layer that is held for two steps begins its sums when the others are in their third."""
    twins = [Twin(is_fresh, **options) for is_fresh in (False, True)]
    for turn in range(9):
        x = torch.randn(6, 5).double()
        for twin in twins:
            twin.backward(x)
            if turn < 2:
                twin.model[2].weight.grad.zero_()
            twin.step()
    kept, fresh = twins
    assert kept.prepared >= 3
    for p, q in zip(kept.model.parameters(), fresh.model.parameters(), strict=True):
        assert torch.equal(p, q)
        assert torch.equal(kept.optimizer.lambda_of(p), fresh.optimizer.lambda_of(q))


@needs_compiler
@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[3]])
def test_tasks_are_not_kept_for_another_shape(options):
    """Addresses are the same, and native code would read beyond what is left."""
    twin = Twin(False, **options)
    for _ in range(5):
        twin.backward(torch.randn(6, 5).double())
        twin.step()
    twin.backward(torch.randn(6, 5).double())
    prepared = twin.optimizer._prepared
    assert prepared._ready(twin.optimizer) is not None
    state = twin.optimizer.state[twin.model[2].bias]
    name = "momentum_buffer" if "momentum_buffer" in state else "exp_avg"
    state[name].resize_(1, 3)
    assert prepared._ready(twin.optimizer) is None
    state[name].resize_(3)
    assert prepared._ready(twin.optimizer) is not None
    twin.optimizer.state[twin.model[0].weight]["vr_history"].t_()
    assert prepared._ready(twin.optimizer) is None


@needs_compiler
def test_a_trial_of_torchs_step_runs_no_hooks_of_users():
    seen = []
    handle = register_optimizer_step_post_hook(
        lambda optimizer, *_: seen.append(type(optimizer).__name__)
    )
    try:
        repeats_torch.cache_clear()
        twin = Twin(False, make=varreg.VRAdam)
        for _ in range(4):
            twin.backward(torch.randn(6, 5).double())
            twin.step()
    finally:
        handle.remove()
    assert seen == ["VRAdam"] * 4
