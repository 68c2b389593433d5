"""An observed forward inside of a compiled graph: the moments and gradients of an eager one, in one
graph where rules serve every parameter, and eagerly elsewhere.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import varreg
from varreg.lab.models import GPT, Residual

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


@pytest.fixture(autouse=True)
def _afresh():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


class Fn(nn.Module):
    """A model whose forward is a function of itself and an input."""

    def __init__(self, forward, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.run = forward

    def forward(self, x):
        return self.run(self, x)


def weight(*shape):
    return nn.Parameter(torch.randn(*shape) / 2)


def tokens(n=6):
    return torch.randint(0, 50, (n, 8))


def rows(n=6):
    return torch.randn(n, 5, 4)


def vectors(n=6):
    return torch.randn(n, 4)


def pixels(n=6):
    return torch.randn(n, 3, 8, 8)


def tied():
    table = nn.Embedding(50, 4)
    return Fn(lambda m, x: F.linear(m.table(x), m.table.weight), table=table)


def positions(padding):
    return Fn(
        lambda m, x: m.out(m.words(x) + m.places(torch.arange(8) % 3)),
        words=nn.Embedding(50, 4, padding_idx=1),
        places=nn.Embedding(9, 4, padding_idx=padding),
        out=nn.Linear(4, 3),
    )


IN_GRAPH = {
    "gpt": (lambda: GPT(2, 16, 2, 50, 32), tokens),
    "tied weights": (tied, tokens),
    "repeated positions": (lambda: positions(None), tokens),
    "padded positions": (lambda: positions(2), tokens),
    "cnn": (
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), Residual(4, 8, 2)),
            *(nn.Flatten(), nn.Linear(32, 5)),
        ),
        pixels,
    ),
    "added and multiplied": (
        lambda: Fn(
            lambda m, x: m.scale * (m.layer(x) + m.shift),
            layer=nn.Linear(4, 4, bias=False),
            shift=weight(1, 5, 4),
            scale=weight(4),
        ),
        rows,
    ),
    "matrix products": (
        lambda: Fn(lambda m, x: x @ m.a @ m.b, a=weight(4, 3), b=weight(3, 2)),
        rows,
    ),
    "bias alone": (
        lambda: Fn(lambda m, x: m.layer(x), layer=_frozen_weight(nn.Linear(4, 3))),
        rows,
    ),
    "bias of a norm": (
        lambda: nn.Sequential(nn.Linear(4, 3), _frozen_weight(nn.LayerNorm(3))),
        rows,
    ),
    "folded rows": (
        lambda: nn.Sequential(nn.Flatten(0, 1), nn.Linear(4, 3), nn.Unflatten(0, (-1, 5))),
        rows,
    ),
    "one row": (lambda: nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3)), vectors),
    "rms norm": (lambda: nn.Sequential(nn.RMSNorm(4), nn.Linear(4, 3), nn.PReLU()), rows),
}


def _frozen_weight(layer):
    layer.weight.requires_grad_(False)
    return layer


ELSEWHERE = {
    "made of parameters": (lambda: Fn(lambda m, x: x @ (m.w * 2), w=weight(4, 3)), rows),
    "lstm": (lambda: Fn(lambda m, x: m.lstm(x)[0], lstm=nn.LSTM(4, 3, batch_first=True)), rows),
    "no rule": (lambda: Fn(lambda m, x: torch.cdist(x, m.w), w=weight(6, 4)), rows),
    "routed by values": (
        lambda: Fn(
            lambda m, x: m.b(torch.where(m.a(x).sum((1, 2), keepdim=True) > 0, x, -x)),
            a=nn.Linear(4, 3),
            b=nn.Linear(4, 3),
        ),
        rows,
    ),
    "a break in it": (lambda: Fn(lambda m, x: _with_break(m.a(x)), a=nn.Linear(4, 3)), rows),
    "under no_grad in it": (
        lambda: Fn(lambda m, x: m.a(x) + _still(m, x), a=nn.Linear(4, 3)),
        rows,
    ),
    "batch second": (
        lambda: Fn(lambda m, x: m.a(x.transpose(0, 1)).transpose(0, 1), a=nn.Linear(4, 3)),
        rows,
    ),
}


def _with_break(x):
    torch._dynamo.graph_break()
    return x * 2


def _still(m, x):
    with torch.no_grad():
        return m.a(x)


def loss_of(out):
    weights = torch.linspace(0.5, 2, len(out)).view(-1, *[1] * (out.dim() - 1))
    return (out.square() * weights).flatten(1).sum(1).mean()


def training(make, is_compiled, groups=None, **options):
    torch.manual_seed(0)
    model = make()
    varreg.observe(model, groups)
    return model, torch.compile(model, backend="aot_eager", **options) if is_compiled else model


def measured(model):
    """Gradient, count and square of every parameter."""
    return [
        (p.grad, m.count, m.square)
        for p in model.parameters()
        if p.requires_grad and (m := varreg.moments(p)) is not None
    ]


def assert_same(one, other):
    assert len(measured(one)) == len(measured(other)) > 0
    for (g, m, w), (h, n, v) in zip(measured(one), measured(other), strict=True):
        assert m == n
        torch.testing.assert_close(g, h, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(w, v, rtol=1e-9, atol=1e-12)


def both(make, train, **options):
    """Let a compiled and an eager model train alike, and compare."""
    one, call = training(make, True, **options)
    other, eager = training(make, False, options.get("groups"))
    train(one, call)
    train(other, eager)
    assert_same(one, other)


def counted(name):
    return (
        torch._dynamo.utils.counters["stats"]["unique_graphs"]
        if name == "graphs"
        else sum(torch._dynamo.utils.counters["graph_break"].values())
    )


@pytest.mark.parametrize("name", IN_GRAPH)
def test_one_graph_measures_what_an_eager_forward_does(name):
    make, inputs = IN_GRAPH[name]
    one, call = training(make, True, fullgraph=True)
    other, eager = training(make, False)
    for size in (6, 6, 6):
        x = inputs(size)
        for model, run in ((one, call), (other, eager)):
            model.zero_grad()
            loss_of(run(x)).backward()
        assert_same(one, other)
    assert one._compiled_call_impl is not None
    assert (counted("graphs"), counted("breaks")) == (1, 0)


def test_the_compiled_graph_runs_and_not_the_captured_one(monkeypatch):
    from varreg.engine.compiled.graph import ObservedGraph

    make, inputs = IN_GRAPH["cnn"]
    model, call = training(make, True, fullgraph=True)
    call(inputs())
    monkeypatch.setattr(ObservedGraph, "_run", None)  # what runs eagerly
    loss_of(call(inputs())).backward()
    assert all(varreg.moments(p).count == 6 for p in model.parameters())


@pytest.mark.parametrize("name", ["gpt", "cnn", "added and multiplied"])
def test_two_graphs_serve_batches_of_all_sizes(name):
    make, inputs = IN_GRAPH[name]
    one, call = training(make, True, fullgraph=True)
    other, eager = training(make, False)
    for size in (6, 6, 4, 4, 5, 3, 6, 4, 7, 7):
        x = inputs(size)
        for model, run in ((one, call), (other, eager)):
            model.zero_grad()
            loss_of(run(x)).backward()
        assert_same(one, other)
    assert counted("graphs") <= 2
    assert counted("breaks") == 0


@pytest.mark.parametrize("name", ELSEWHERE)
def test_elsewhere_the_observed_forward_runs_eagerly(name):
    make, inputs = ELSEWHERE[name]
    one, call = training(make, True)
    other, eager = training(make, False)
    for size in (6, 6, 4, 6):
        x = inputs(size)
        for model, run in ((one, call), (other, eager)):
            model.zero_grad()
            loss_of(run(x)).backward()
        assert_same(one, other)


@pytest.mark.parametrize("room", [None, 0])
def test_small_sites_are_measured_by_one_call_and_large_ones_alone(room, monkeypatch):
    from varreg.engine.compiled import rewrite
    from varreg.engine.compiled.passes import Pass
    from varreg.native.many_layers import ManyLayers

    if room is not None:
        monkeypatch.setattr(rewrite, "SITES_TOGETHER", room)
    calls, layers, sums = [], [], ManyLayers.sums
    take = Pass.take

    def noted_take(run, numbers, *tensors):
        calls.append(numbers)
        return take(run, numbers, *tensors)

    def noted_sums(sites, tensors):
        layers.append(len(tensors) // 2)
        return sums(sites, tensors)

    monkeypatch.setattr(Pass, "take", noted_take)
    monkeypatch.setattr(ManyLayers, "sums", noted_sums)
    x = tokens()
    one, call = training(IN_GRAPH["gpt"][0], True, fullgraph=True)
    other, eager = training(IN_GRAPH["gpt"][0], False)
    for _ in range(3):
        for model, run in ((one, call), (other, eager)):
            model.zero_grad()
            loss_of(run(x)).backward()
        assert_same(one, other)
    # two tables, six sites in each of two blocks, and two after these; the first pass is eager
    assert sorted(n for call in calls for n in call) == sorted([*range(16)] * 2)
    assert [len(call) for call in calls] == ([16, 16] if room is None else [1] * 32)
    if varreg.native.status() == "in use":  # rows are looked up by calls of their own
        assert layers == ([14, 14] if room is None else [1] * 28)


def check_as_eager(read, **options):
    """Check that a compiled GPT and an eager one measure the same. `read` takes the numbers from
    the observer and the model.
    """
    x = tokens()
    found = []
    for is_compiled in (True, False):
        torch.manual_seed(0)
        model = IN_GRAPH["gpt"][0]()
        observer = varreg.observe(model, **options)
        call = torch.compile(model, backend="aot_eager") if is_compiled else model
        for _ in range(3):
            model.zero_grad()
            loss_of(call(x)).backward()
        found.append(read(observer, model))
        observer.remove()
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("per", ["tensor", "model"])
def test_sums_over_elements(per):
    check_as_eager(
        lambda _, model: [float(varreg.moments(p).spread) for p in model.parameters()], per=per
    )


def test_norms_of_samples():
    check_as_eager(lambda observer, _: observer.norms().values, norms=True)


def test_a_parameter_whose_sums_are_in_float64():
    x = tokens()

    def train(model, call):
        ledger = varreg.engine.parameters.LEDGERS[model.head.weight]
        for k in range(4):
            ledger.is_float64 = k > 1
            model.zero_grad()
            loss_of(call(x)).backward()

    both(IN_GRAPH["gpt"][0], train)


def test_a_backward_for_some_parameters_counts_for_them_alone():
    x = tokens()

    def train(model, call):
        some = [*model.parameters()][3:7]
        for _ in range(3):
            model.zero_grad()
            loss_of(call(x)).backward(inputs=some)

    both(IN_GRAPH["gpt"][0], train)


@pytest.mark.parametrize("groups", [2, 3])
def test_groups(groups):
    x = tokens()

    def train(model, call):
        for _ in range(2):
            model.zero_grad()
            loss_of(call(x)).backward()

    both(IN_GRAPH["gpt"][0], train, groups=groups)


def test_micro_batches_add_up_and_clearing_restarts():
    x, y = tokens(), tokens(4)

    def train(model, call):
        for _ in range(3):
            model.zero_grad(set_to_none=False)
            loss_of(call(x)).backward()
            loss_of(call(y)).backward()

    both(IN_GRAPH["gpt"][0], train)


def test_two_forwards_in_one_backward():
    x, y = tokens(), tokens()

    def train(model, call):
        for _ in range(3):
            model.zero_grad()
            (loss_of(call(x)) + loss_of(call(y))).backward()

    both(IN_GRAPH["tied weights"][0], train)


def test_a_forward_without_backward_is_forgotten():
    x = tokens()

    def train(model, call):
        for _ in range(3):
            call(x)
            model.zero_grad()
            loss_of(call(x)).backward()

    both(IN_GRAPH["gpt"][0], train)


def test_gradients_for_other_tensors_count_nothing():
    model, call = training(IN_GRAPH["cnn"][0], True)
    for _ in range(2):
        out = call(pixels())
        torch.autograd.grad(loss_of(out), [model[0].weight])
    assert measured(model) == []


def test_a_second_backward_through_one_forward_is_refused():
    _, call = training(IN_GRAPH["cnn"][0], True)
    call(pixels())
    with torch._functorch.config.patch(donated_buffer=False):
        loss = loss_of(call(pixels()))
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="ran a second time"):
            loss.backward()


@pytest.mark.parametrize(
    "mix",
    [lambda m, x: m.a(x - x.mean(0)), lambda m, x: m.a(x).cumsum(0), lambda m, x: m.a(x.flip(0))],
)
def test_samples_that_meet_are_refused(mix):
    _, call = training(lambda: Fn(mix, a=nn.Linear(4, 3)), True)
    with pytest.raises((ValueError, RuntimeError), match="varreg"):
        loss_of(call(rows())).backward()


def test_a_parameter_in_the_loss_is_refused():
    model, call = training(IN_GRAPH["cnn"][0], True)
    for _ in range(3):
        model.zero_grad()
        loss_of(call(pixels())).backward()

    def train():
        for _ in model.parameters():  # one of them is looked at closely in each backward
            model.zero_grad()
            (loss_of(call(pixels())) + model[0].weight.square().sum()).backward()

    with pytest.raises(RuntimeError, match="from outside of the observed model"):
        train()


def test_what_is_left_in_an_attribute_is_seen():
    def forward(m, x):
        m.aux = m.a(x)
        return m.b(x)

    make = lambda: Fn(forward, a=nn.Linear(4, 3), b=nn.Linear(4, 3))
    x = rows()

    def train(model, call):
        for _ in range(3):
            model.zero_grad()
            (loss_of(call(x)) + loss_of(model.aux)).backward()

    both(make, train)


@pytest.mark.parametrize(
    "hook",
    [
        lambda model: model.register_forward_hook(lambda m, args, out: out - out.mean(0)),
        lambda model: model[2].register_full_backward_hook(lambda m, g, h: (g[0] - g[0].mean(0),)),
    ],
)
def test_hooks_of_users_that_mix_samples_are_refused(hook):
    make = lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    torch.manual_seed(0)
    model = make()
    varreg.observe(model)
    hook(model)
    call = torch.compile(model, backend="aot_eager")
    with pytest.raises((ValueError, RuntimeError), match="varreg"):
        loss_of(call(rows())).backward()


def test_loss_and_model_in_one_compiled_function():
    torch.manual_seed(0)
    make, inputs = IN_GRAPH["gpt"]
    model = make()
    other = copy.deepcopy(model)
    for m in (model, other):
        varreg.observe(m)
    step = torch.compile(lambda x: loss_of(model(x)), backend="aot_eager", fullgraph=True)
    for _ in range(3):
        x = inputs()
        for m, run in ((model, step), (other, lambda x: loss_of(other(x)))):
            m.zero_grad()
            run(x).backward()
        assert_same(model, other)
    assert counted("graphs") == 1


def test_without_gradients_nothing_is_observed():
    model, call = training(IN_GRAPH["cnn"][0], True, fullgraph=True)
    with torch.no_grad():
        call(pixels())
    assert measured(model) == []
    assert counted("breaks") == 0


def test_autocast():
    x = rows(8).float()

    def make():
        return nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.Linear(16, 3)).float()

    one, call = training(make, True)
    other, eager = training(make, False)
    for _ in range(3):
        for model, run in ((one, call), (other, eager)):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                out = run(x)
            loss_of(out.float()).backward()
    for (g, m, w), (h, n, v) in zip(measured(one), measured(other), strict=True):
        assert m == n
        torch.testing.assert_close(g, h, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(w, v, rtol=5e-2, atol=2e-2)


def test_a_checkpoint_around_a_compiled_model():
    x = rows()

    def train(model, call):
        for _ in range(3):
            model.zero_grad()
            out = torch.utils.checkpoint.checkpoint(call, x, use_reentrant=False)
            loss_of(out).backward()

    both(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)), train)


def test_compiled_code_goes_on_without_an_observer_that_is_removed():
    model, call = training(IN_GRAPH["gpt"][0], True)
    observer = next(h.observer for h in model._forward_pre_hooks.values())
    x = tokens()
    for _ in range(2):
        loss_of(call(x)).backward()
    observer.remove()
    model.zero_grad()
    loss_of(call(x)).backward()
    plain = copy.deepcopy(model)
    plain.zero_grad()
    loss_of(plain(x)).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert varreg.moments(p) is None
        torch.testing.assert_close(p.grad, q.grad)
    assert model._compiled_call_impl is None
    assert "_compiled_call_impl" not in vars(model)


def test_copies_are_not_observed():
    model = nn.Sequential(nn.Linear(4, 3))
    varreg.observe(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin._compiled_call_impl is None
        twin(torch.randn(2, 4)).sum().backward()
        assert varreg.moments(twin[0].weight) is None


def test_an_optimizer_steps_as_with_an_eager_model():
    one, call = training(IN_GRAPH["gpt"][0], True)
    other, eager = training(IN_GRAPH["gpt"][0], False)
    optimizers = [varreg.VRSGD(m.parameters(), 0.01, momentum=0.9) for m in (one, other)]
    for _ in range(4):
        x = tokens()
        for run, optimizer in zip((call, eager), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(run(x)).backward()
            optimizer.step()
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-10)
