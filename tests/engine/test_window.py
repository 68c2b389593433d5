"""One backward: the forwards that it belongs to, and the parameters that it reaches."""

from __future__ import annotations

import copy
import threading
import weakref

import pytest
import torch
from torch import nn

import varreg
from tests.support.measured import assert_moments
from tests.support.model_table import Fn
from tests.support.small_net import backward, batch, linear, net, truth
from tests.support.truth import losses, one_at_a_time, sample_weights


def test_forward_without_backward_retains_nothing_and_spoils_nothing():
    model = net()
    x, w = batch()
    g = truth(model, x, w)
    varreg.observe(model)
    abandoned = model(torch.randn(3, 4))
    with torch.no_grad():
        model(torch.randn(5, 4))
    node = weakref.ref(abandoned.grad_fn)
    del abandoned
    assert node() is None
    backward(model, x, w)
    assert_moments(model, g)


def test_an_abandoned_forward_that_is_still_alive():
    model = net()
    x, w = batch()
    g = truth(model, x, w)
    varreg.observe(model)
    kept = model(torch.randn(3, 4))
    backward(model, x, w)
    assert kept is not None
    assert_moments(model, g)


def test_backward_in_eval_mode():
    model = net().eval()
    x, w = batch()
    g = truth(model, x, w)
    varreg.observe(model)
    backward(model, x, w)
    assert_moments(model, g)


def test_two_forwards_one_backward_are_two_uses_of_each_sample():
    model = net()
    (x, w), y = batch(), torch.randn(6, 4)
    pair = Fn(lambda s, x, y: torch.cat([s.model(x), s.model(y)], 1), model=model)
    g = one_at_a_time(copy.deepcopy(pair), (x, y), w)
    varreg.observe(model)
    losses(torch.cat([model(x), model(y)], 1), w).mean().backward()
    assert_moments(model, {n.removeprefix("model."): v for n, v in g.items()})


def test_one_backward_over_batches_of_different_size_is_refused():
    model = net()
    varreg.observe(model)
    with pytest.raises(
        RuntimeError,
        match=r"'2\.weight' was used for .* samples, and another .*Call backward\(\) once for each "
        r"batch",
    ):
        (model(torch.randn(6, 4)).sum() + model(torch.randn(4, 4)).sum()).backward()


def test_a_second_backward_through_the_same_forward_is_refused_unless_cleared():
    model = net()
    x, w = batch()
    g = truth(model, x, w)
    varreg.observe(model)
    loss = losses(model(x), w).mean()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="Add the losses and call backward"):
        loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()
    assert_moments(model, g)


def test_tied_weights_in_a_second_backward_after_clearing():
    model = Fn(lambda s, x: s.l(torch.tanh(s.l(x))), l=nn.Linear(4, 4)).double()
    x, w = batch()
    g = truth(model, x, w)
    varreg.observe(model)
    loss = losses(model(x), w).mean()
    loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()
    assert_moments(model, g)


def test_a_failed_backward_does_not_spoil_the_next():
    model = net()
    x, w = batch()
    g = truth(model, x, w)
    varreg.observe(model)
    out = model(x)
    out.register_hook(lambda grad: None)
    with pytest.warns(
        UserWarning, match=r"'0' \(Linear\) was called outside of the model's forward"
    ):
        hidden = model[0](x)

    def fail(grad):
        raise KeyError("user error")

    hidden.register_hook(fail)
    with pytest.raises(KeyError):
        losses(model[2](torch.tanh(hidden)), w).mean().backward()
    model.zero_grad()
    backward(model, x, w)
    assert_moments(model, g)


def test_two_threads_in_backwards_of_one_model_are_refused():
    model = net()
    x, w = batch()
    g = truth(model, x, w)
    varreg.observe(model)
    first, second = model(x), model(x)
    started, may_go_on = threading.Event(), threading.Event()

    def wait(grad):
        if threading.current_thread() is worker:
            started.set()
            may_go_on.wait(60)

    hook = model[2].weight.register_hook(wait)
    worker = threading.Thread(target=lambda: losses(first, w).mean().backward())
    worker.start()
    try:
        assert started.wait(60)
        with pytest.raises(varreg.VarregError, match="two threads run a backward"):
            losses(second, w).mean().backward()
    finally:
        may_go_on.set()
        worker.join()
        hook.remove()
    model.zero_grad()
    backward(model, x, w)
    assert_moments(model, g)


def test_autograd_grad_measures_nothing_and_is_right():
    model = net()
    x, w = batch()
    plain = copy.deepcopy(model)
    varreg.observe(model)
    x.requires_grad_()
    actual = torch.autograd.grad(losses(model(x), w).mean(), [x, *model.parameters()])
    expected = torch.autograd.grad(losses(plain(x), w).mean(), [x, *plain.parameters()])
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert all(varreg.moments(p) is None for p in model.parameters())


def test_an_attack_on_the_inputs_between_micro_batches_leaves_the_moments():
    model = net()
    x, w = batch()
    g = truth(model, x, w)
    varreg.observe(model)
    (losses(model(x[:3]), w[:3]).sum() / 6).backward()
    x2 = x[3:].clone().requires_grad_()
    torch.autograd.grad(model(x2).sum(), x2)
    losses(model(x2), w[3:]).sum().backward(inputs=[x2])
    (losses(model(x[3:]), w[3:]).sum() / 6).backward()
    assert_moments(model, g)


def test_second_derivatives_are_refused():
    model = net()
    varreg.observe(model)
    x = torch.randn(6, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


def test_a_parameter_used_outside_of_forward_is_noticed():
    model = net()
    x, w = batch()
    varreg.observe(model)
    with pytest.raises(RuntimeError, match=r"'2\.bias' received a gradient from outside"):
        (losses(model(x), w).mean() + 10 * model[2].bias.square().sum()).backward()


def test_several_forwards_and_separate_backwards():
    model = linear(3, 2).double()
    varreg.observe(model)
    x1, x2, x3 = torch.randn(3, 4, 3)
    a, b, c = model(x1), model(x2), model(x3)
    a.square().sum().backward()
    model.zero_grad()
    pair = Fn(lambda s, x, y: torch.cat([s.m(x), s.m(y)], 1), m=copy.deepcopy(model))
    w = sample_weights(4)
    g = one_at_a_time(pair, (x2, x3), w)
    losses(torch.cat([b, c], 1), w).mean().backward()
    assert_moments(model, {n.removeprefix("m."): v for n, v in g.items()})


def test_methods_that_count_different_batches_are_refused():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.e, self.d = linear(), linear()

        def step(self, x):
            return self.d(self.e(x.flatten(0, 1)).view(x.shape).tanh())

    model = Model().double()
    varreg.observe(model)
    outside = pytest.warns(UserWarning, match=r"'e' \(Linear\) was called outside")
    with (
        outside,
        pytest.raises(
            RuntimeError, match="used for 20 samples, and another parameter or use for 4"
        ),
    ):
        model.step(torch.randn(4, 5, 3)).square().mean().backward()


def test_a_micro_batch_that_does_not_reach_a_parameter_counts():
    model = nn.ModuleDict({"trunk": linear(), "a": linear(), "b": linear()}).double()
    whole = Fn(lambda s, x, head: s.m[head](s.m["trunk"](x)), m=model)
    varreg.observe(whole)
    x = torch.randn(8, 3)
    (whole(x[:4], "a").square().sum() / 8).backward()
    (whole(x[4:], "b").square().sum() / 8).backward()
    assert varreg.moments(model["trunk"].weight).count == 8
    assert varreg.moments(model["a"].weight).count == 8
    assert (
        varreg.moments(model["b"].weight).count == 8
    )  # also those that passed it by before its first use


def test_a_penalty_that_starts_later_is_noticed():
    model = nn.Sequential(linear(), linear()).double()
    varreg.observe(model)

    def step(penalty):
        model.zero_grad()
        (
            model(torch.randn(4, 3)).square().mean() + penalty * model[1].weight.square().sum()
        ).backward()

    for _ in range(5):
        step(0.0)
    with pytest.raises(RuntimeError, match=r"'1\.weight' received a gradient from outside"):
        [step(1.0) for _ in range(4)]
