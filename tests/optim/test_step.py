"""The two implementations of a step, and the choice between them."""

from __future__ import annotations

import copy
import functools
import inspect
import platform
import sys

import pytest
import torch
from torch import nn

import varreg
from tests.support.small_net import backward, batch, net
from varreg import native
from varreg.native.torch_root import torch_root
from varreg.optim.collect import find_steps
from varreg.optim.step import native_step, torch_step

NEEDS_NATIVE = pytest.mark.skipif(native.status() != "in use", reason="native code is off")


def trained(make=varreg.VRSGD, **options):
    model = net()
    varreg.observe(model)
    if make is varreg.VRSGD:
        options = {"lr": 0.1, "momentum": 0.9, **options}
    optimizer = make(model.parameters(), **options)
    for _ in range(2):
        optimizer.zero_grad()
        backward(model, *batch())
        optimizer.step()
    optimizer.zero_grad()
    backward(model, *batch())
    return model, optimizer


def test_both_implementations_have_one_signature():
    assert inspect.signature(torch_step) == inspect.signature(native_step)


MAKERS = [
    varreg.VRSGD,
    functools.partial(varreg.VRAdam, lr=0.01),
    functools.partial(varreg.VRAdam, lr=0.01, weight_decay=0.1, maximize=True),
    functools.partial(varreg.VRAdamW, lr=0.01, weight_decay=0.1),
]


@NEEDS_NATIVE
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("with_base_step", [False, True])
def test_both_implementations_have_one_result(make, with_base_step):
    """Each takes the same step from the same start: to the same parameters, with the same λ."""
    model, optimizer = trained(make)
    if with_base_step and not all(step.with_base_step for step in find_steps(optimizer)):
        pytest.skip("native code does not repeat torch's step on this machine")
    start, saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    results = []
    for by_native in (True, False):
        model.load_state_dict(start)
        optimizer.load_state_dict(copy.deepcopy(saved))
        steps = find_steps(optimizer)
        for step in steps:
            step.native, step.with_base_step = by_native, by_native and with_base_step
            step.regularized, step.grad = True, step.moments.total
            step.p, step.x = step.parameter, step.parameter.detach().clone()
        with torch.no_grad():
            if not steps[0].with_base_step:
                optimizer._base_step()
            lambdas = (native_step if by_native else torch_step)(optimizer, steps)
        optimizer._lambdas = lambdas
        assert set(lambdas) == set(model.parameters())
        results.append([p.detach().clone() for p in model.parameters()])
        results[-1] += [optimizer.lambda_of(p) for p in model.parameters()]
        counts = [s["step"] for s in optimizer.state.values() if "step" in s]
        assert all(count == 3 for count in counts)
    # Adam's variance is a difference of sums, in which rounding errors grow
    exact = make is varreg.VRSGD
    close = {"rtol": 1e-12 if exact else 1e-9, "atol": 1e-14 if exact else 1e-12}
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, **close)


@NEEDS_NATIVE
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("make", MAKERS[1:])
def test_a_whole_step_has_the_roots_of_torch(make, dtype):
    """With λ = 1, native code takes torch's own step to the bit: also of zeros and tiny numbers."""
    model = nn.Linear(700, 3, bias=False).to(dtype)
    varreg.observe(model)
    ours = make.func(model.parameters(), **make.keywords, lambda_min=1.0, lambda_max=1.0)
    p = nn.Parameter(model.weight.detach().clone())
    theirs = make.func._base([p], **make.keywords)
    for turn in range(6):
        x = torch.randn(5, 700, dtype=dtype)
        x[:, :100] = 0
        x[:, 100:200] *= 1e-18
        ours.zero_grad()
        model(x).square().mean().backward()
        p.grad = model.weight.grad.clone()
        if turn > 2 and not find_steps(ours)[0].with_base_step:
            pytest.skip("native code does not repeat torch's step on this machine")
        ours.step()
        theirs.step()
        assert torch.equal(model.weight, p)
        for key in KEPT:
            assert torch.equal(ours.state[model.weight][key], theirs.state[p][key])


KEPT = ("step", "exp_avg", "exp_avg_sq")


@NEEDS_NATIVE
@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="no MKL")
def test_the_root_of_torch_is_found():
    """Where torch has MKL, its roots are not the nearest numbers: repeating its step needs them."""
    x = torch.rand(10_007)
    if torch.backends.mkl.is_available():
        assert all(torch_root(torch.float32))
    elif torch.equal(x.sqrt(), x.double().sqrt().float()):
        assert torch_root(torch.float32) == (None, None)


@NEEDS_NATIVE
def test_native_code_takes_the_bases_step_of_all_parameters_or_of_none():
    model, optimizer = trained()
    assert all(step.with_base_step for step in find_steps(optimizer))
    optimizer.state[model[2].bias]["vr_history"] = torch.zeros(6)[::2]  # no kernel takes that
    assert [step.native for step in find_steps(optimizer)] == [True, True, True, False]
    assert not any(step.with_base_step for step in find_steps(optimizer))


@NEEDS_NATIVE
@pytest.mark.parametrize("options", [{"per": "tensor"}, {"per": "model"}, {"history": "ema"}])
def test_native_code_does_not_take_a_step_whose_options_it_does_not_know(options):
    _, optimizer = trained(**options)
    assert not any(step.native for step in find_steps(optimizer))


@NEEDS_NATIVE
def test_a_gradient_of_which_elements_were_clipped_is_left_to_pytorch():
    """Kernels know one κ² for a tensor."""
    from varreg.optim.collect import judge_steps

    model, optimizer = trained()
    weight = model[0].weight
    nn.utils.clip_grad_value_([weight], float(weight.grad.abs().median()))
    steps = find_steps(optimizer)
    assert all(step.native for step in steps)
    with torch.no_grad():
        assert weight not in native_step(optimizer, steps)  # it finds that while it runs
        left = [step for step in steps if step.parameter is weight]
        assert not left[0].with_base_step
        judge_steps(optimizer, left)
    assert not left[0].native


@NEEDS_NATIVE
def test_a_clipped_step_that_native_code_leaves_is_that_of_pytorch(monkeypatch):
    results = []
    for by_native in (True, False):
        torch.manual_seed(0)
        model, optimizer = trained()
        nn.utils.clip_grad_value_([model[0].weight], float(model[0].weight.grad.abs().median()))
        if not by_native:
            monkeypatch.setattr("varreg.optim.collect.choose", lambda *_: None)
        optimizer.step()
        results.append([p.detach().clone() for p in model.parameters()])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
