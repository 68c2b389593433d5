"""One observed forward: what begins and ends it, and what runs beside or inside of it."""

from __future__ import annotations

import copy
import io
import threading

import pytest
import torch
from torch import nn

import varreg
from tests.support.measured import assert_moments
from tests.support.model_table import Fn
from tests.support.small_net import backward, batch, linear, net, truth
from tests.support.truth import assert_close, losses, one_at_a_time, sample_weights, scale_of


def test_a_failed_forward_does_not_spoil_the_next():
    model = net()
    x, w = batch()
    g = truth(model, x, w)
    varreg.observe(model)
    with pytest.raises(RuntimeError):
        model(torch.randn(6, 5))
    assert not torch.overrides._get_current_function_mode_stack()
    backward(model, x, w)
    assert_moments(model, g)


def test_a_submodule_called_on_its_own():
    model = net()
    x, w = batch()
    g = truth(model, x, w)
    varreg.observe(model)
    with pytest.warns(
        UserWarning, match=r"'0' \(Linear\) was called outside .* first input, 6, for the number"
    ):
        losses(model[2](torch.tanh(model[0](x))), w).mean().backward()
    assert_moments(model, g)


def test_a_functional_call_with_other_parameters_is_not_observed():
    model = net()
    x, w = batch()
    varreg.observe(model)
    other = {n: torch.randn_like(p, requires_grad=True) for n, p in model.named_parameters()}
    out = torch.func.functional_call(model, other, x)
    losses(out, w).mean().backward()
    assert all(varreg.moments(p) is None for p in model.parameters())
    assert all(p.grad is not None for p in other.values())


def test_an_activation_that_is_told_to_require_a_gradient():
    """As transformers does for checkpoints of models whose first layers are frozen. It says
    nothing, and changes nothing.
    """
    model = Fn(
        lambda s, x: s.b(s.a(x).requires_grad_(True).tanh()), a=nn.Linear(4, 5), b=nn.Linear(5, 3)
    ).double()
    x, w = batch()
    g = truth(model, x, w)
    varreg.observe(model)
    backward(model, x, w)
    for name, p in model.named_parameters():
        assert_close(
            varreg.moments(p).second_moment, g[name].square().mean(0), scale_of(g) ** 2, name
        )


def test_exceptions_of_ones_own_code_keep_their_traceback():
    class Broken(nn.Linear):
        def forward(self, x):
            return super().forward(x) + self.missing()

        def missing(self):
            raise KeyError("mine")

    model = Broken(2, 2)
    varreg.observe(model)
    with pytest.raises(KeyError, match="mine") as caught:
        model(torch.randn(3, 2))
    assert [entry.name for entry in caught.traceback][-2:] == ["forward", "missing"]
    assert caught.value.__cause__ is None


def test_an_interrupted_forward_leaves_nothing_behind():
    model = nn.Sequential(linear(), linear()).double()
    observer = varreg.observe(model)

    def stop(*_):
        raise KeyboardInterrupt

    handle = model[1].register_forward_pre_hook(stop)
    x, w = torch.randn(4, 3), sample_weights(4)
    with pytest.raises(KeyboardInterrupt):
        model(x)
    handle.remove()
    g = one_at_a_time(copy.deepcopy(model), (x,), w)
    losses(model(x), w).mean().backward()
    assert_moments(model, g)
    handle = model[1].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        model(x)
    observer.remove()
    assert not torch.overrides._get_current_function_mode_stack()


def test_tensors_kept_by_the_user_can_be_saved_and_loaded():
    kept = []
    model = nn.Sequential(linear(), nn.Tanh(), linear())
    model[0].register_forward_hook(lambda m, a, out: kept.append(out.detach()))
    varreg.observe(model)
    model(torch.randn(4, 3))
    torch.save(kept[0], file := io.BytesIO())
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), kept[0])


def test_a_buffer_that_forward_updates():
    def forward(s, x):
        s.c.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return s.l(x)

    model = Fn(forward, l=linear()).double()
    model.register_buffer("c", torch.zeros(3))
    varreg.observe(model)
    for _ in range(2):
        model.zero_grad()
        model(torch.randn(4, 3)).sum().backward()
        assert varreg.moments(model.l.weight).count == 4


def test_an_evaluation_thread_beside_the_training_thread():
    model = nn.Sequential(linear(), nn.Tanh(), linear()).double()
    x, w = torch.randn(6, 3), sample_weights(6)
    g = one_at_a_time(copy.deepcopy(model), (x,), w)
    varreg.observe(model)
    done = threading.Event()

    def evaluate():
        while not done.is_set():
            with torch.no_grad():
                model(torch.randn(5, 3, dtype=torch.float64))

    thread = threading.Thread(target=evaluate)
    thread.start()
    try:
        for _ in range(100):
            model.zero_grad()
            losses(model(x), w).mean().backward()
            assert_moments(model, g)
    finally:
        done.set()
        thread.join()


def test_an_observed_model_inside_of_another():
    inner = linear().double()
    outer = Fn(
        lambda s, x: s.k(s.inner[0](s.l(x)).transpose(0, 1)).transpose(0, 1), l=linear(), k=linear()
    ).double()
    outer.inner = [inner]  # not a submodule
    x, w = torch.randn(5, 5, 3), sample_weights(5)
    g = one_at_a_time(copy.deepcopy(outer), (x,), w)
    varreg.observe(inner), varreg.observe(outer)
    losses(outer(x), w).mean().backward()
    assert_moments(outer, g)
    assert varreg.moments(inner.weight).count == 5


def test_a_module_that_calls_itself():
    class Recursive(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = linear()

        def forward(self, x, depth=3):
            return x if depth == 0 else self(torch.tanh(self.layer(x)), depth - 1)

    model, x, w = Recursive().double(), torch.randn(5, 3), sample_weights(5)
    g = one_at_a_time(copy.deepcopy(model), (x,), w)
    varreg.observe(model)
    losses(model(x), w).mean().backward()
    assert_moments(model, g)
