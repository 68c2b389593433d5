"""A rehearsal: dropout is off inside, and afterwards nothing has happened."""

import random
from collections import OrderedDict
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

import varreg
from tests.support.model_table import Fn
from varreg.engine.rehearsal import rehearsal

X = torch.linspace(-1, 1, 24, dtype=torch.float64).view(2, 3, 4)


def packed(s, x):
    rows = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 2]), batch_first=True)
    return s.m(rows)[0].data


def heads(s, x):
    return s.m(x, x, x, need_weights=False)[0]


def in_place(s, x):
    return F.dropout(x.clone(), 0.5, True, True)


class Twice(torch.autograd.Function):
    """Drops in its backward."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, dy):
        return 2 * F.dropout(dy, 0.5)


# each with a part that a backward pass runs
BACKWARDS = {
    "checkpoint": lambda h: checkpoint(
        lambda t: F.dropout(t.sin(), 0.5).sin(), h, use_reentrant=False
    ),
    "re-entrant": lambda h: checkpoint(
        lambda t: F.dropout(t.sin(), 0.5).sin(), h, use_reentrant=True
    ),
    "own function": Twice.apply,
}


# each with what it is without dropout
DROPS = {
    "Dropout": (nn.Dropout(0.5), None),
    "Dropout1d": (nn.Dropout1d(0.5), None),
    "Dropout2d": (Fn(lambda s, x: s.m(x[..., None])[..., 0], m=nn.Dropout2d(0.5)), None),
    "Dropout3d": (
        Fn(lambda s, x: F.dropout3d(x[..., None, None], 0.5)),
        lambda x: x[..., None, None],
    ),
    "AlphaDropout": (nn.AlphaDropout(0.5), None),
    "FeatureAlphaDropout": (nn.FeatureAlphaDropout(0.5), None),
    "F.dropout": (Fn(lambda s, x: F.dropout(x)), None),
    "F.dropout, keywords": (Fn(lambda s, x: F.dropout(input=x, p=0.3, training=True)), None),
    "F.dropout, in place": (Fn(in_place), None),
    "F.alpha_dropout": (Fn(lambda s, x: F.alpha_dropout(x, 0.5, True)), None),
    "torch.dropout": (Fn(lambda s, x: torch.dropout(x, 0.5, True)), None),
    "torch.dropout_": (Fn(lambda s, x: torch.dropout_(x.clone(), 0.5, True)), None),
    "torch.feature_dropout": (Fn(lambda s, x: torch.feature_dropout(x, 0.5, True)), None),
    "torch.feature_alpha_dropout": (
        Fn(lambda s, x: torch.feature_alpha_dropout(x, 0.5, True)),
        None,
    ),
    "torch.native_dropout": (Fn(lambda s, x: torch.native_dropout(x, 0.5, True)[0]), None),
    "RReLU": (nn.RReLU(0.1, 0.3), lambda x: F.leaky_relu(x, 0.2)),
    "F.rrelu": (
        Fn(lambda s, x: F.rrelu(x, 0.1, 0.3, training=True)),
        lambda x: F.leaky_relu(x, 0.2),
    ),
    "torch.rrelu": (
        Fn(lambda s, x: torch.rrelu(x, 0.1, 0.3, True)),
        lambda x: F.leaky_relu(x, 0.2),
    ),
    "attention, functional": (
        Fn(lambda s, x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)),
        lambda x: F.scaled_dot_product_attention(x, x, x),
    ),
    "attention, functional, positional": (
        Fn(lambda s, x: F.scaled_dot_product_attention(x, x, x, None, 0.5, True)),
        lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    ),
}

# each compared with itself in eval mode
LAYERS = {
    "MultiheadAttention": lambda: Fn(
        heads, m=nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)
    ),
    "MultiheadAttention, weights": lambda: Fn(
        lambda s, x: s.m(x, x, x)[0], m=nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)
    ),
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(
        4, 2, 8, dropout=0.5, batch_first=True
    ),
    "LSTM": lambda: Fn(lambda s, x: s.m(x)[0], m=nn.LSTM(4, 3, 2, dropout=0.5, batch_first=True)),
    "GRU": lambda: Fn(lambda s, x: s.m(x)[0], m=nn.GRU(4, 3, 2, dropout=0.5, batch_first=True)),
    "RNN": lambda: Fn(lambda s, x: s.m(x)[0], m=nn.RNN(4, 3, 3, dropout=0.5, batch_first=True)),
    "RNN, relu": lambda: Fn(
        lambda s, x: s.m(x)[0],
        m=nn.RNN(4, 3, 2, nonlinearity="relu", dropout=0.5, batch_first=True),
    ),
    "LSTM, packed": lambda: Fn(packed, m=nn.LSTM(4, 3, 2, dropout=0.5, batch_first=True)),
}


@pytest.mark.parametrize("name", DROPS)
def test_dropout_is_off(name):
    model, without = DROPS[name]
    x = X.abs() if without is None else X
    assert not torch.equal(model(x), model(x))
    with rehearsal(model) as run:
        out = model(x)
        assert model.training
        expected = x if without is None else without(x)
        assert torch.allclose(out, expected, rtol=0, atol=0 if without is None else 1e-15)
        assert not run.is_random
    assert not run.is_random
    assert not run.drawn
    assert not torch.equal(model(x), model(x))


@pytest.mark.parametrize("name", LAYERS)
def test_layers_without_dropout(name):
    model = LAYERS[name]()
    assert not torch.equal(model(X), model(X))
    with rehearsal(model) as run:
        out = model(X)
    assert not run.is_random
    assert torch.allclose(out, model.eval()(X), rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_an_observed_model(name):
    """A forward that is traced, with the rehearsal around it."""
    if "packed" in name:
        pytest.skip("its outputs are packed rows, in no order that a loss could know")
    model = LAYERS[name]()
    with rehearsal(model) as run, varreg.observe(model):
        model(X).sum(dim=(1, 2)).mean().backward()
        found = {n: varreg.moments(p).mean.clone() for n, p in model.named_parameters()}
    model.eval()
    model(X).sum(dim=(1, 2)).mean().backward()
    for n, p in model.named_parameters():
        assert torch.allclose(found[n], p.grad, rtol=0, atol=1e-12), n
    assert run.drawn == ()


def test_dropout_on_request():
    model = nn.Dropout(0.5)
    with rehearsal(model) as run:
        with run.with_dropout():
            assert not torch.equal(model(X), X)
        assert torch.equal(model(X), X)
        assert run.is_random


def test_the_result_is_a_new_tensor():
    """As it is in training: a model that changes it in place does not change what went in."""
    with rehearsal(nn.Linear(1, 1)):
        for f in (F.dropout, F.dropout1d, F.alpha_dropout, torch.native_dropout):
            x = torch.ones(2, 3)
            y = f(x, 0.5, True)
            (y if isinstance(y, torch.Tensor) else y[0]).add_(1)
            assert torch.equal(x, torch.ones(2, 3))


@pytest.mark.parametrize("name", BACKWARDS)
@pytest.mark.parametrize("how", ["backward", "autograd.backward", "autograd.grad"])
def test_dropout_in_a_backward_pass(name, how):
    """`Tensor.backward` is a torch function itself, under which no mode would be seen."""
    model = Fn(lambda s, x: BACKWARDS[name](s.m(x)), m=nn.Linear(4, 4))

    def gradient():
        loss = model(X).square().sum()
        if how == "autograd.grad":
            return torch.autograd.grad(loss, model.m.weight)[0]
        loss.backward() if how == "backward" else torch.autograd.backward(loss)
        return model.m.weight.grad

    if name == "re-entrant" and how == "autograd.grad":
        pytest.skip("torch has no autograd.grad through a re-entrant checkpoint")
    with rehearsal(model) as run:
        found = gradient()
        assert not run.is_random
        assert not run.drawn
    h = model.m(X)
    out = 2 * h if name == "own function" else h.sin().sin()
    (expected,) = torch.autograd.grad(out.square().sum(), model.m.weight)
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    assert not _get_current_function_mode_stack()


# ---- other random numbers ------------------------------------------------------------------------

OWN = torch.Generator()
RANDOM = {
    "rand": (lambda s, x: x + torch.rand(4), "rand"),
    "randn_like": (lambda s, x: x + torch.randn_like(x), "randn_like"),
    "bernoulli_": (lambda s, x: x * x.new_empty(x.shape[0], 1, 1).bernoulli_(0.5), "bernoulli_"),
    "gumbel": (lambda s, x: F.gumbel_softmax(x), "gumbel_softmax"),
    "normal, own generator": (
        lambda s, x: x + torch.normal(0.0, 1.0, (4,), generator=OWN),
        "normal",
    ),
    "python": (lambda s, x: x * random.random(), None),
    "numpy": (lambda s, x: x * float(np.random.rand()), None),  # noqa: NPY002
    "numpy, own generator": (lambda s, x: x * s.numbers.random(), None),
    "python, own generator": (lambda s, x: x * s.dice.random(), None),
    "scripted": (lambda s, x: s.script(x), None),
}


def generators(model):
    own = OWN.get_state(), model.numbers.bit_generator.state, model.dice.getstate()
    numpy = np.random.get_state()[1].tolist(), np.random.get_state()[2]  # noqa: NPY002
    return torch.get_rng_state().tolist(), random.getstate(), numpy, own[0].tolist(), own[1:]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.parametrize("fails", [False, True])
def test_random_numbers(name, fails):
    forward, called = RANDOM[name]
    script = torch.jit.trace(nn.Dropout(0.5), X, check_trace=False)
    model = Fn(forward, numbers=np.random.default_rng(0), dice=random.Random(0), script=script)
    model.layer = nn.Linear(4, 4)
    before = generators(model)
    with pytest.raises(KeyError) if fails else nullcontext(), rehearsal(model) as run:
        assert not run.is_random
        first = model(X)
        assert run.is_random
        run.reset()
        assert torch.equal(model(X), first)  # the same numbers again
        if fails:
            raise KeyError
    assert run.is_random
    assert run.drawn == (() if called is None else (called,))
    assert generators(model) == before


def test_numbers_of_others_afterwards_do_not_count():
    with rehearsal(nn.Linear(1, 1)) as run:
        pass
    torch.rand(1)
    assert not run.is_random


# ---- nothing has happened ------------------------------------------------------------------------


class Stateful(nn.Module):
    """Changes all that a module can hold."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.spectral = parametrizations.spectral_norm(nn.Linear(4, 4))
        self.layer, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("replaced", torch.zeros(3))
        self.register_buffer("nans", torch.tensor([float("nan"), -0.0, 0.0]))
        self.register_buffer("wide", torch.zeros(1).expand(5))
        self.register_buffer("late", None)
        self.register_buffer("z", torch.zeros(2, dtype=torch.complex128))
        self.steps, self.seen, self.cache = 0, [1, [2]], OrderedDict(a=torch.zeros(2))
        self.plain = torch.zeros(2)

    def forward(self, x):
        self.steps += 1
        self.seen.append(self.steps)
        self.seen[1].append(3)
        self.cache["a"] += 1
        self.cache["b"] = x
        self.plain.add_(1)
        self.replaced = self.replaced + 1
        self.late = torch.ones(2)
        self.nans.copy_(torch.tensor([1.0, 0.0, -0.0]))
        self.z += 1j
        self.fresh = nn.Linear(1, 1)
        self.register_buffer("new", torch.ones(1))
        self.layer.weight.data.mul_(2)
        self.layer.bias.data = torch.ones(4)
        with torch.no_grad():
            self.other.weight.clamp_(0, 0)
        self.other.bias = nn.Parameter(torch.ones(4))
        self.norm.eval()
        self.norm.weight.requires_grad_(False)
        nn.Module.train(self.spectral, True)
        y = self.spectral(self.layer(x))
        F.batch_norm(y, self.norm.running_mean, self.norm.running_var, training=True)
        return y


def picture(model):
    """All of it: objects, memory, versions, bits, flags, gradients."""
    tensors = [*model.parameters(), *model.buffers(), model.plain, *model.cache.values()]
    bits = [
        (
            id(t),
            t.data_ptr(),
            t._version,
            t.requires_grad,
            t.shape,
            str(t.dtype),
            t.detach().numpy().tobytes(),
        )
        for t in tensors
    ]
    grads = [
        None if t.grad is None else (id(t.grad), t.grad._version, t.grad.tolist()) for t in tensors
    ]
    flags = [(name, m.training, id(m)) for name, m in model.named_modules()]
    names = [list(m.__dict__) for m in model.modules()], [n for n, _ in model.named_buffers()]
    return bits, grads, flags, names, model.steps, str(model.seen), list(model.cache)


@pytest.mark.parametrize("end", ["quiet", "resets", "fails"])
def test_nothing_has_happened(end):
    model = Stateful()
    x = torch.randn(5, 4)
    model.layer(x).sum().backward()
    before = picture(model)
    try:
        with rehearsal(model) as run:
            assert all(p.grad is None for p in model.parameters())
            model(x).square().sum().backward()
            assert picture(model) != before
            first = model.layer.weight.grad.clone()
            if end == "resets":
                run.reset()
                assert model.layer.weight.grad is None
                model(x).square().sum().backward()
                assert torch.equal(model.layer.weight.grad, first)
            if end == "fails":
                raise KeyError
    except KeyError:
        assert end == "fails"
    assert picture(model) == before


def test_a_graph_from_before_can_go_on():
    """Restored values have their old versions: backward() of an earlier forward is not stopped."""
    model = Fn(lambda s, x: s.layer(x) * s.scale, layer=nn.Linear(4, 4))
    model.register_buffer("scale", torch.ones(4))
    loss = model(X).sum()
    with rehearsal(model):
        model.scale.mul_(2)
    loss.backward()
    assert torch.allclose(model.layer.bias.grad, torch.full((4,), 6.0))


def test_an_observed_model_measures_nothing():
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))
    with varreg.observe(model) as observer:
        model(X).sum(dim=(1, 2)).mean().backward()
        m = varreg.moments(model[0].weight)
        before = m.count, m.mean.tolist(), m.variance.tolist()
        with rehearsal(model):
            model(X).sum().backward()
        m = varreg.moments(model[0].weight)
        assert (m.count, m.mean.tolist(), m.variance.tolist()) == before
        model(X).sum(dim=(1, 2)).mean().backward()  # another micro-batch
        assert varreg.moments(model[0].weight).count == 4
        assert observer.is_on


@pytest.mark.filterwarnings("ignore:varreg. 'layer' .* was called outside")
def test_inside_of_an_observed_forward():
    """The tracer of the forward around it sees nothing, and goes on afterwards."""
    inner = nn.Linear(4, 4)

    def forward(s, x):
        y = s.layer(x)
        with rehearsal(inner):
            assert not [
                m for m in _get_current_function_mode_stack() if "Tracer" in type(m).__name__
            ]
            inner(y.detach().sum(0)).sum().backward()
        return y * s.w

    model = Fn(forward, layer=nn.Linear(4, 4), w=nn.Parameter(torch.ones(4)))
    with varreg.observe(model):
        model(X).sum(dim=(1, 2)).mean().backward()
        found = varreg.moments(model.w)
        each = model.layer(X).detach().sum(1)
        assert torch.allclose(found.second_moment, each.square().mean(0), rtol=0, atol=1e-12)
    assert not _get_current_function_mode_stack()


def test_bad_input():
    with (
        pytest.raises(ValueError, match=r"varreg: rehearsal expects a torch.nn.Module, got int"),
        rehearsal(3),
    ):
        pass
    with (
        pytest.raises(ValueError, match="varreg: the model has a lazy parameter"),
        rehearsal(nn.LazyLinear(2)),
    ):
        pass
