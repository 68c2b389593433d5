"""The step in one native pass, against its twin in PyTorch: every step of a training is taken
twice, once by each.
"""

from __future__ import annotations

import copy
import functools
import math

import pytest
import torch
from torch import nn

import varreg
from varreg import Moments, native
from varreg.backends import TWINS, use
from varreg.lab.optimizers.ablations import ABLATIONS, ablated
from varreg.noise import measure
from varreg.optim.gradient import products
from varreg.optim.increments import Increment
from varreg.optim.repeated_lambda import RepeatedLambda
from varreg.optim.state import NARROW

pytestmark = pytest.mark.skipif(
    native.status() != "in use", reason=f"native kernel: {native.status()}"
)
BATCH = 8
SGD, ADAM, ADAMW = varreg.VRSGD, varreg.VRAdam, varreg.VRAdamW
FUSED = {
    "plain": (SGD, {"lr": 0.1}),
    "plain, decay": (SGD, {"lr": 0.1, "weight_decay": 0.3}),
    "plain, decay, maximize": (SGD, {"lr": 0.01, "weight_decay": 0.3, "maximize": True}),
    "momentum": (SGD, {"lr": 0.05, "momentum": 0.9}),
    "momentum, dampening, decay": (
        SGD,
        {"lr": 0.05, "momentum": 0.8, "dampening": 0.3, "weight_decay": 0.1},
    ),
    "momentum, foreach": (SGD, {"lr": 0.05, "momentum": 0.9, "foreach": True}),
    "momentum, fused": (SGD, {"lr": 0.05, "momentum": 0.9, "fused": True}),
    "momentum, lr in a tensor": (SGD, {"lr": torch.tensor(0.05), "momentum": 0.9}),
    "nesterov": (SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "nesterov, decay, maximize": (
        SGD,
        {"lr": 1e-3, "momentum": 0.9, "nesterov": True, "weight_decay": 0.2, "maximize": True},
    ),
    "nesterov, foreach": (
        SGD,
        {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.2, "foreach": True},
    ),
    "Adam": (ADAM, {"lr": 0.01}),
    "Adam, betas": (ADAM, {"lr": 0.02, "betas": (0.7, 0.9), "eps": 1e-3}),
    "Adam, decay, maximize": (ADAM, {"lr": 0.01, "weight_decay": 0.1, "maximize": True}),
    "Adam, decoupled": (ADAM, {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "Adam, foreach": (ADAM, {"lr": 0.01, "foreach": True}),
    "Adam, fused": (ADAM, {"lr": 0.01, "fused": True}),
    "AdamW": (ADAMW, {"lr": 0.01, "weight_decay": 0.3}),
    "calibrated": (SGD, {"lr": 0.1, "calibrate": True, "weight_decay": 0.3}),
    "calibrated, momentum": (SGD, {"lr": 0.05, "momentum": 0.9, "calibrate": True}),
    "calibrated, nesterov": (
        SGD,
        {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "calibrate": True},
    ),
    "calibrated, AdamW": (ADAMW, {"lr": 0.01, "weight_decay": 0.3, "calibrate": True}),
}
NOT_FUSED = {
    "decay of more than half": (SGD, {"lr": 0.1, "weight_decay": 6.0}),
    "amsgrad": (ADAM, {"lr": 0.01, "amsgrad": True}),
    "direct": (ADAMW, {"lr": 0.01, "variance": "direct"}),
    "NAdam": (varreg.VRNAdam, {"lr": 0.01}),
    "per tensor": (SGD, {"lr": 0.1, "per": "tensor"}),
    "calibrated per tensor": (SGD, {"lr": 0.1, "per": "tensor", "calibrate": True}),
    "sigmoid": (ADAM, {"lr": 0.01, "form": "sigmoid"}),
    "geometric": (SGD, {"lr": 0.1, "momentum": 0.9, "history": "geometric"}),
}
OPTIONS = {
    "sum": {"history": "sum"},
    "harmonic": {"history": "harmonic"},
    "affine": {"form": "affine"},
    "bounds": {"lambda_min": 0.7, "lambda_max": 1.1},
    "variance itself": {"scale_free": False},
    "cap": {"cap": 0.2},
    "weak": {"s": 0.3},
    "calibrated": {"calibrate": True},
    "calibrated, affine": {"calibrate": True, "form": "affine", "history": "harmonic"},
    "calibrated, bounds": {"calibrate": True, "lambda_min": 0.7, "lambda_max": 1.1},
}


class Model(nn.Module):
    """With rows that no sample reaches, a scalar, and a layer that is large enough for several
    blocks and threads.
    """

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.wide = nn.Linear(4, 300)
        self.scale = nn.Parameter(torch.ones(()))
        self.deep = nn.Linear(300, 130)

    def forward(self, rows):
        return self.deep(torch.tanh(self.wide(self.table(rows))) * self.scale)


def training(cls, options, dtype=torch.float64, steps=6, between=None, groups=None, make=Model):
    """Yields the model and its optimizer before each step."""
    torch.manual_seed(1)
    model = make().to(dtype)
    varreg.observe(model)
    optimizer = cls(groups(model) if groups else model.parameters(), **options)
    for step in range(steps):
        optimizer.zero_grad()
        rows = torch.randint(0, 3 + step % 3, (BATCH,))
        (model(rows).square().mean(1) * torch.rand(BATCH, dtype=dtype)).mean().backward()
        if between:
            between(model, step)
        yield model, optimizer


def train(*args, **kwargs):
    for last in training(*args, **kwargs):
        last[1].step()
    return last


def taken(optimizer):
    """What a step did: parameters, λ and state, by name. In memory, counts may have another form
    than in a state dict.
    """
    found, states = {}, optimizer.state_dict()["state"]
    for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        values = {"x": p.detach(), "λ": optimizer.lambda_of(p), **states.get(i, {})}
        found |= {f"{key} of {i}": v.clone() for key, v in values.items() if v is not None}
    return found


def undo(optimizer, before, grads):
    own = {p: dict(state) for p, state in optimizer.state.items()}
    optimizer.state.clear()
    for (p, x, state), grad in zip(before, grads, strict=True):
        p.data.copy_(x)
        if p.grad is not None:
            p.grad.data.copy_(grad)  # which some of torch's own steps change
        if state is not None:
            for k, v in state.items():  # a count may be shared now, and not before
                optimizer.state[p][k] = own[p][k].copy_(v) if own[p][k].shape == v.shape else v


@pytest.fixture
def twice(monkeypatch):
    """Takes every step of a training twice, and compares. Says how many parameters' steps were
    native.
    """

    rest, whole = native.update, native.whole

    def take_whole(calls, here, tasks, *args):
        whole(tasks, *args)
        # not those by which `repeats_torch` tries native code
        calls.extend(task for task in tasks if task.x in here and not task.is_left)

    def run(*args, **kwargs):
        calls = []
        for last in training(*args, **kwargs):
            optimizer = last[1]
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            states = [
                {k: v.clone() for k, v in optimizer.state[p].items()}
                if p in optimizer.state
                else None
                for p in parameters
            ]
            before = [(p, p.detach().clone(), s) for p, s in zip(parameters, states, strict=True)]
            grads = [None if p.grad is None else p.grad.clone() for p in parameters]
            with use("cpu", TWINS), monkeypatch.context() as patch:
                patch.setattr("varreg.native.step.run", None)  # no kernel of the step
                optimizer.step()
            expected, order = (
                taken(optimizer),
                [r.name for r in optimizer.lambda_summary().parameters],
            )
            undo(optimizer, before, grads)
            with monkeypatch.context() as patch:
                patch.setattr(
                    native,
                    "update",
                    lambda like, tasks, *args: calls.extend(tasks) or rest(like, tasks, *args),
                )
                here = {p.data_ptr() for p in parameters}
                patch.setattr(native, "whole", functools.partial(take_whole, calls, here))
                optimizer.step()
            same(
                taken(optimizer),
                expected,
                ROUNDING["sums" if isinstance(optimizer, SGD) else "brackets"],
            )
            assert [r.name for r in optimizer.lambda_summary().parameters] == order
        return *last, len(calls)

    return run


ROUNDING = {
    "sums": {torch.float32: (2e-5, 2e-3), torch.float64: (1e-11, 0.0)},
    "brackets": {torch.float32: (2e-5, 0.1), torch.float64: (1e-7, 0.05)},
}
"""What differs by more than a tolerance: for at most so many of the elements. δ̄ may be a small
difference (g + decay·x), and so is Adam's bracket.
"""
OF_MEANS = {torch.float32: 1e-4, torch.float64: 1e-7}
"""The tolerance for means of λ over a tensor, in which these few elements are."""


def same(found, expected, rounding):
    assert list(found) == list(expected)
    for key, value in found.items():
        assert value.dtype == expected[key].dtype
        tolerance, few = rounding[value.dtype]
        if "vr_lambda_" in key:
            tolerance = max(tolerance, OF_MEANS[value.dtype])
        far = ~torch.isclose(value, expected[key], rtol=tolerance, atol=tolerance, equal_nan=True)
        assert far.sum() <= few * far.numel(), (key, value[far], expected[key][far])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", FUSED)
def test_the_fused_step_equals_its_twin(name, dtype, twice):
    cls, settings = FUSED[name]
    model, optimizer, calls = twice(cls, settings, dtype)
    assert calls == 6 * len(list(model.parameters()))
    assert (optimizer.lambda_of(model.deep.weight) != 1).any()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", ["plain", "momentum", "nesterov", "Adam"])
def test_options(name, options, twice):
    cls, settings = FUSED[name]
    assert twice(cls, {**settings, **options})[2] == 6 * 6


WHOLE = ["plain", "plain, decay, maximize", "momentum", "momentum, dampening, decay", "nesterov"]


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", WHOLE)
def test_the_base_s_step_is_in_the_same_pass(name, dtype, clipped, monkeypatch):
    """After the second step, torch's own is not called; it would have come to the same bits, which
    λ = 1 shows.
    """
    cls, settings = FUSED[name]
    one = {**settings, "lambda_min": 1.0, "lambda_max": 1.0}
    between = BETWEEN["clipped by norm"] if clipped else None
    with monkeypatch.context() as patch:
        counted = Counted(cls._base.step)
        patch.setattr(cls, "_base_step", counted)
        model, optimizer = train(cls, one, dtype, between=between)
    assert counted.calls == 2
    twin, expected = train(cls, {**settings, "s": 0.0}, dtype, between=between)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
        assert optimizer.state[p].keys() >= expected.state[q].keys()


class Counted:
    """A base's step that counts its calls."""

    def __init__(self, step):
        while getattr(step, "hooked", False):
            step = step.__wrapped__
        self.step, self.calls = step, 0

    def __get__(self, optimizer, cls):
        return functools.partial(self, optimizer)

    def __call__(self, optimizer):
        self.calls += 1
        self.step(optimizer)


def test_what_native_code_leaves_goes_through_torch(twice):
    """One gradient of six was changed element by element: its step alone is torch's."""

    def change(model, step):
        model.wide.weight.grad[0] *= 0.5

    _, optimizer, calls = twice(*FUSED["momentum"], between=change)
    assert calls == 6 * 5
    assert len(optimizer.param_groups[0]["params"]) == 6


class SmallColumn(nn.Module):
    """A weight with gradients whose squares vanish in sums over all elements."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(4, 300)
        self.register_buffer("x", torch.randn(6, 4) * torch.tensor([1e-12, 1.0, 1.0, 1.0]))

    def forward(self, rows):
        return self.wide(self.x[rows])


def test_a_change_that_no_sum_shows(twice):
    """The variance is still that of the measured gradient, not of the changed one."""

    def change(model, step):
        model.wide.weight.grad.data[:, 0] *= 1.5

    assert twice(*FUSED["momentum"], between=change, make=SmallColumn)[2] == 6 * 2


def test_where_native_code_differs_torch_takes_its_step(monkeypatch):
    monkeypatch.setattr("varreg.optim.step.repeats_torch", lambda *_: False)
    with monkeypatch.context() as patch:
        counted = Counted(SGD._base.step)
        patch.setattr(SGD, "_base_step", counted)
        train(*FUSED["momentum"])
    assert counted.calls == 6


@pytest.mark.parametrize("name", NOT_FUSED)
def test_what_goes_through_pytorch(name, twice):
    assert twice(*NOT_FUSED[name])[2] == 0


BETWEEN = {
    "clipped by norm": lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 0.01),
    "clipped by value": lambda model, _: nn.utils.clip_grad_value_(model.parameters(), 1e-3),
    "scaled behind the back": lambda model, _: [p.grad.data.mul_(0.5) for p in model.parameters()],
    "now and then": lambda model, step: (
        step % 2 and nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    ),
    "without a gradient": lambda model, step: (
        setattr(model.wide.weight, "grad", None) if step in (0, 3) else None
    ),
    "zeros": lambda model, step: (
        [p.grad.zero_() for p in model.wide.parameters()] if step in (0, 3) else None
    ),
    "infinite": lambda model, step: model.wide.bias.grad.fill_(math.inf) if step == 5 else None,
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
@pytest.mark.parametrize(
    "name", ["plain, decay", "momentum", "nesterov, foreach", "Adam", "AdamW", "calibrated"]
)
@pytest.mark.filterwarnings("ignore:varreg")
def test_what_happens_before_the_step(name, between, twice):
    cls, settings = FUSED[name]
    assert twice(cls, settings, between=between)[2]


@pytest.mark.parametrize("cls", [SGD, ADAM])
def test_both_ways_in_one_model(cls, twice):
    def groups(model):
        return [
            {"params": model.table.parameters(), "form": "sigmoid"},
            {"params": [*model.wide.parameters(), model.scale], "s": 0.5, "lr": 0.03},
            {"params": [model.deep.weight], "s": 0.0},
            {"params": [model.deep.bias], "history": "sum", "calibrate": True},
        ]

    model, optimizer, calls = twice(cls, {"lr": 0.01}, groups=groups)
    assert calls == 6 * 4
    assert optimizer.lambda_of(model.deep.weight) is None


class Mixed(nn.Module):
    """Two precisions, and memory in another order."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(6, 36)
        self.conv = nn.Conv2d(4, 5, 3)
        self.out = nn.Linear(5, 3)

    def to(self, dtype):
        self.table.double(), self.conv.float(), self.out.double()
        self.conv.to(memory_format=torch.channels_last)
        return self

    def forward(self, rows):
        return self.out(self.conv(self.table(rows).view(-1, 4, 3, 3).float()).flatten(1).double())


@pytest.mark.parametrize("name", ["momentum", "Adam"])
def test_two_precisions_and_memory_in_another_order(name, twice):
    cls, settings = FUSED[name]
    model, _, calls = twice(cls, settings, make=Mixed)
    assert not model.conv.weight.is_contiguous()
    assert calls == 6 * 4


@pytest.mark.parametrize("name", ["momentum", "nesterov", "Adam"])
def test_the_first_step_is_the_base_s_to_the_bit(name):
    """λ = 1, as there is no history but itself."""
    cls, options = FUSED[name]
    model, optimizer = train(cls, {**options, "s": 0.7}, torch.float32, steps=1)
    twin, _ = train(cls, {**options, "s": 0.0}, torch.float32, steps=1)
    assert (optimizer.lambda_of(model.deep.weight) == 1).all()
    assert all(
        torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True)
    )


@pytest.mark.parametrize("name", ["momentum", "Adam", "calibrated"])
def test_threads_do_not_matter(name):
    """A step is the same to the bit. A whole training is compared in float64: torch's own sums
    depend on threads, and Adam magnifies their rounding where a gradient is almost zero.
    """
    steps, trainings = [], []
    for threads in (1, 2, 3):
        torch.set_num_threads(1)
        for last in training(*FUSED[name], torch.float32):
            torch.set_num_threads(threads)
            last[1].step()
            torch.set_num_threads(1)
        steps.append(list(last[0].parameters()))
        torch.set_num_threads(threads)
        trainings.append(list(train(*FUSED[name])[0].parameters()))
    for p, *others in (*zip(*steps, strict=True), *zip(*trainings, strict=True)):
        for q in others:
            close = 0 if p.dtype == torch.float32 else 1e-9
            torch.testing.assert_close(p, q, rtol=close, atol=close)


@pytest.mark.parametrize("name", ["plain", "momentum", "Adam", "calibrated, momentum"])
def test_lambda_is_ones_own(name):
    """What was handed out does not change, whether λ is kept or repeated; and until the next step,
    it is the last one's.
    """
    model, optimizer = train(*FUSED[name])
    weights = model.table.weight, model.deep.weight  # with elements that have no ρ, and without
    given = [optimizer.lambda_of(w) for w in weights]
    before = [lam.clone() for lam in given]
    optimizer.zero_grad()
    model(torch.arange(6)).square().mean().backward()
    for w, lam in zip(weights, before, strict=True):
        assert torch.equal(optimizer.lambda_of(w), lam)
    optimizer.step()
    for w, lam, old in zip(weights, given, before, strict=True):
        assert torch.equal(lam, old)
        assert not torch.equal(optimizer.lambda_of(w), old)


@pytest.mark.parametrize("name", ["momentum", "nesterov", "AdamW", "calibrated, momentum"])
def test_counts_are_shared_only_in_memory(name):
    """Checkpoints have a count for each element, as those by PyTorch have, also where some elements
    stop having a ρ; and training goes on from one to the same end.
    """
    cls, options = FUSED[name]
    model, optimizer = train(cls, options, steps=7)
    with use("cpu", TWINS):
        _, twin = train(cls, options, steps=7)
    saved, expected = optimizer.state_dict()["state"], twin.state_dict()["state"]
    for ours, theirs in zip(saved.values(), expected.values(), strict=True):
        assert torch.equal(ours["vr_count"], theirs["vr_count"])
    assert len(saved[1]["vr_count"].unique()) > 1  # of the table
    kept = optimizer.state[model.deep.weight]["vr_count"]
    assert kept.dim() == (0 if "momentum" in name else 2)
    again = cls(model.parameters(), **options)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch shares what it loads
    ends = []
    for each in (optimizer, again):
        start = [p.detach().clone() for p in model.parameters()]
        each.zero_grad()
        model(torch.arange(5)).square().mean().backward()
        each.step()
        ends.append([p.detach().clone() for p in model.parameters()])
        with torch.no_grad():
            for p, x in zip(model.parameters(), start, strict=True):
                p.copy_(x)
    assert all(map(torch.equal, *ends))
    assert again.state[model.deep.weight]["vr_count"].dim() == kept.dim()


def test_an_element_that_loses_its_gradient_late():
    """Until then all elements share a count; from then on each has its own."""
    layer = nn.Linear(3, 2)
    varreg.observe(layer)
    optimizer = SGD(layer.parameters(), lr=0.01, momentum=0.9)
    x = torch.randn(4, 3)
    for t in range(5):
        optimizer.zero_grad()
        if t == 3:
            x[:, 1] = 0
        layer(x).square().mean().backward()
        optimizer.step()
        assert optimizer.state[layer.weight]["vr_count"].dim() == (0 if t < 3 else 2)
    assert optimizer.state[layer.weight]["vr_count"].tolist() == [[5.0, 3.0, 5.0]] * 2
    assert (optimizer.lambda_of(layer.weight)[:, 1] == 1).all()
    assert optimizer.state[layer.bias]["vr_count"].dim() == 0


def statistics_of(optimizer, p):
    """The bytes of our statistics for each element, and of λ of the last step."""
    ours = [v for k, v in optimizer.state[p].items() if k.startswith("vr_") and v.dim()]
    lam = optimizer._lambdas[p]
    ours += [lam.absent if isinstance(lam, RepeatedLambda) else lam]
    return sum(t.numel() * t.element_size() for t in ours) / p.numel()


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("plain", 10),
        ("momentum", 10 + 1 / 8),
        ("nesterov", 14),
        ("calibrated, momentum", 10.125),
        ("AdamW", 18.125),
    ],
)
def test_what_a_step_keeps_where_elements_have_no_gradient(name, most):
    """λ is not kept if it can be worked out again, and a count takes two bytes."""
    model, optimizer = train(*FUSED[name], torch.float32, steps=7)
    table, deep = (statistics_of(optimizer, p) for p in (model.table.weight, model.deep.weight))
    assert table == most
    assert deep == most - (2 if "momentum" in name else 0)


@pytest.mark.parametrize("name", ["momentum", "momentum, foreach", "calibrated, momentum"])
def test_lambda_is_one_where_no_sample_has_a_gradient(name):
    """Whether it is so of some elements, or of all; and in every step in which it is so."""
    layer = nn.Linear(11, 2)
    varreg.observe(layer)
    cls, options = FUSED[name]
    optimizer = cls(layer.parameters(), **options)
    for step in range(8):
        x = torch.randn(4, 11)
        if step in (3, 4):
            x[:, 2::3] = 0
        if step == 6:
            x[:] = 0
        optimizer.zero_grad()
        layer(x).square().mean().backward()
        optimizer.step()
        lam = optimizer.lambda_of(layer.weight)
        assert ((lam == 1) | (x != 0).any(0)).all()
        assert not step or ((lam != 1) | (x == 0).all(0)).all()


@pytest.mark.parametrize("shared", [False, True])
def test_counts_become_wide_before_they_overflow(shared, twice):
    """Native code goes on counting where a narrow number ends, and like its twin."""
    most = torch.iinfo(NARROW).max

    made = []

    class Remembered(SGD):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    def count_far(model, step):
        for p in (model.table.weight, model.deep.weight) if step == 2 else ():
            state = made[-1].state[p]
            assert state["vr_count"].dtype == (NARROW if state["vr_count"].dim() else p.dtype)
            state["vr_count"] += most - 5
            state["vr_history"] *= most

    settings = {**FUSED["momentum"][1], "nesterov": not shared}
    model, optimizer, calls = twice(Remembered, settings, steps=9, between=count_far)
    assert calls == 9 * 6
    table, deep = (optimizer.state[p]["vr_count"] for p in (model.table.weight, model.deep.weight))
    assert table.dtype == torch.float64
    assert most < table.max() < deep.max() == most - 5 + 9
    assert deep.dim() == (0 if shared else 2)


@pytest.mark.parametrize("far", [0, torch.iinfo(NARROW).max - 2, 40_000])
def test_a_shared_count_becomes_one_for_each_element(far):
    """Narrow where the largest count allows it, else in the history's type."""
    torch.manual_seed(0)
    layer = nn.Linear(5, 3)
    varreg.observe(layer)
    optimizer = SGD(layer.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        x = torch.randn(8, 5)
        if step == 2:
            x[:, 1] = 0
        optimizer.zero_grad()
        layer(x).square().sum(1).mean().backward()
        optimizer.step()
        count = optimizer.state[layer.weight]["vr_count"]
        if not step:
            count += far
    expected = torch.full((3, 5), far + 4)
    expected[:, 1] -= 1
    assert count.dtype == (layer.weight.dtype if far else NARROW)
    assert torch.equal(count.long(), expected)


def test_lambda_outlives_the_state():
    model, optimizer = train(*FUSED["momentum"])
    lam = optimizer.lambda_of(model.deep.weight)
    optimizer.state.clear()
    assert torch.equal(optimizer.lambda_of(model.deep.weight), lam)


def test_a_model_that_changes_its_precision(monkeypatch):
    """Its state follows at its next step, in which memory is not what native code would take it
    for.
    """
    model, optimizer = train(*FUSED["momentum"], torch.float64)
    model.float()
    optimizer.zero_grad()
    model(torch.arange(6)).square().mean().backward()
    monkeypatch.setattr(native, "update", None)
    monkeypatch.setattr(native, "whole", None)
    optimizer.step()
    assert optimizer.state[model.wide.weight]["vr_history"].dtype == torch.float32


def with_another_increment(cls):
    """A subclass whose increment is its own, though its variance is the same."""

    class Other(cls):
        def _increment(self, group):
            base = super()._increment(group)
            return Increment(lambda step: base.variance(step), base.reads, base.sums)

    return Other


@pytest.mark.parametrize("name", [*ABLATIONS, "increment"])
@pytest.mark.parametrize("cls", [SGD, ADAM])
def test_a_subclass_that_does_something_else(cls, name, monkeypatch):
    other = with_another_increment(cls) if name == "increment" else ablated(cls, name)
    monkeypatch.setattr(native, "update", None)
    monkeypatch.setattr(native, "whole", None)
    train(other, {"lr": 0.01})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.0, 1e-30, 1e25, math.inf, math.nan])
def test_what_is_compared(value, dtype):
    rows = []
    for n in (1, 511, 512, 513, 70_000):
        S, W = torch.randn(n, dtype=dtype), torch.rand(n, dtype=dtype)
        S[n // 2] = value
        rows += [(S, S.clone(), W), (S, S * 0.3, W), (S, torch.randn_like(S), W)]
    for (S, g, W), sums in zip(rows, native.compare(rows), strict=True):
        expected = products(Moments(4, 4, S, W), g)
        tolerance = 1e-6 if dtype == torch.float32 else 1e-12
        torch.testing.assert_close(
            torch.tensor(sums), expected, rtol=tolerance, atol=tolerance, equal_nan=True
        )
        assert sums[0] == sums[1] == sums[2] or not torch.equal(g, S)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_for_the_l1_noise_scale(dtype, reduction):
    """Elements with and without noise, without any gradient, and far from zero: exp(−4z²) from 1 to
    0, by way of numbers that are too small for their precision.
    """
    torch.manual_seed(0)
    samples, rows = 32, []
    for n in (1, 511, 512, 513, 70_000):
        sizes = torch.tensor([0.0, 0.1, 0.5, 1.0, 30.0])
        means = torch.randn(n, dtype=torch.float64) * sizes[torch.randint(5, (n,))]
        g = means + torch.randn(samples, n, dtype=torch.float64)
        g[:, ::7], g[:, ::11] = 0.5, 0.0
        c = g if reduction == "sum" else g / samples
        S, W = c.sum(0).to(dtype), c.square().sum(0).to(dtype)
        rows.append(Moments(samples, samples, S, W, reduction))
    made = native.noise_sums([(m.total, m.square, measure._l1_numbers(m)) for m in rows], True)
    plain = native.noise_sums([(m.total, m.square, measure._l1_numbers(m)) for m in rows])
    assert [each[:2] + [0.0] * 3 for each in made] == plain
    for m, (SS, W, s, size, excess) in zip(rows, made, strict=True):
        expected = measure.l1_sums(m).double()
        got = torch.tensor([s, size, measure._NOISE_OF_ZERO * excess], dtype=torch.float64)
        tolerance = 1e-5 if dtype == torch.float32 else 1e-12
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=0.0)
        expected = products(m, m.total)[[0, 3]].double()
        tolerance = 1e-6 if dtype == torch.float32 else 1e-12
        got = torch.tensor([SS, W], dtype=torch.float64)
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_for_the_l1_noise_scale_of_what_is_not_finite(dtype):
    for value in (math.inf, math.nan):
        S, W = torch.ones(600, dtype=dtype), torch.ones(600, dtype=dtype)
        S[300] = W[300] = value
        m = Moments(4, 4, S, W)
        ((_, _, s, size, _),) = native.noise_sums([(S, W, measure._l1_numbers(m))], True)
        assert not (math.isfinite(s) and math.isfinite(size))
        assert not measure.l1_sums(m)[:2].isfinite().all()
