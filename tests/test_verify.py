"""`varreg.verify`: what it verifies, what it finds, and that it leaves nothing behind."""

import copy
import random
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import varreg
from tests.support.model_table import CASES, Fn
from varreg.engine.mechanisms.by_module import MODULE_RULES
from varreg.engine.parameters import LEDGERS
from varreg.verification.parting import find_parting

M = 12


def net(*middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), *middle, nn.Tanh(), nn.Linear(8, 3))


def pairs():
    return torch.randn(M, 4), torch.arange(M) % 3


def sines(output, y):
    """A mean over samples of something that is not linear, of outputs of any structure."""
    found = [
        t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.is_floating_point()
    ]
    return sum(t.reshape(len(y), -1).sin().sum(1).mean() for t in found)


# ---- verified ------------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_models_that_are_exact(case):
    x = case.inputs()
    found = varreg.verify(case.make(), sines, (x, torch.zeros(len(x[0]))))
    assert found.status == "verified", str(found)
    assert found
    assert found.gap < 1e-9
    assert found.samples == len(x[0])
    assert not found.reason


@pytest.mark.parametrize(
    "name", ["linear", "conv2d", "gpt", "transformer", "lstm", "tied", "attention"]
)
def test_float32(name):
    (case,) = (case for case in CASES if case.name == name)
    torch.set_default_dtype(torch.float32)
    x = case.inputs()
    found = varreg.verify(case.make(), sines, (x, torch.zeros(len(x[0]))))
    assert found, str(found)
    assert found.gap > 1e-10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    x, y = pairs()
    found = varreg.verify(net().to(dtype), F.cross_entropy, (x.to(dtype), y))
    assert found, str(found)


class NearAKink(nn.Module):
    """A batch rounds otherwise than a sample alone: by one unit, which opens a ReLU in float32."""

    def __init__(self, units: float = 1.0):
        super().__init__()
        self.units, self.shift, self.head = units, nn.Parameter(torch.zeros(4)), nn.Linear(4, 1)

    def forward(self, x):
        rounding = self.units * torch.finfo(x.dtype).eps * (len(x) > 1)
        return self.head((x + self.shift + rounding).relu())


def test_a_kink_that_rounding_crosses():
    """The gradient of the batch is not the mean of its samples', in float32 and without varreg; in
    float64 it is.
    """
    x = torch.randn(8, 4, dtype=torch.float32)
    x[2, 1] = -1e-8
    model = NearAKink().float()
    assert varreg.verify(model, lambda out: out.square().mean(), {"x": x})
    x[2, 1] = -1.0  # far from the kink, where no rounding can open it
    model = NearAKink(units=2.0**24)
    assert not varreg.verify(model.float(), lambda out: out.square().mean(), {"x": x})


def test_gradients_that_are_rounding():
    """The bias before a softmax over what it is added to has no gradient: all of it is rounding."""
    torch.set_default_dtype(torch.float32)
    model = Fn(
        lambda s, x: (s.a(x) + 1000 * s.b).softmax(1),
        a=nn.Linear(4, 8),
        b=nn.Parameter(torch.zeros(())),
    )
    found = varreg.verify(model, sines, pairs())
    assert found, str(found)
    assert found.rtol == 1e-7  # it took float64 to tell
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_dropout_and_modes():
    x, y = pairs()
    model = net(nn.Dropout(0.5))
    assert varreg.verify(model, F.cross_entropy, (x, y))
    assert model.training
    model.eval()
    assert varreg.verify(model, F.cross_entropy, (x, y))
    assert varreg.verify(net(nn.BatchNorm1d(8)).eval(), F.cross_entropy, (x, y))
    with torch.no_grad():
        assert varreg.verify(model, F.cross_entropy, (x, y))


def test_frozen_and_unused_parameters():
    model = net()
    model[0].weight.requires_grad_(False)
    model.extra = nn.Linear(2, 2)
    model.forward = lambda x: model[2](model[1](model[0](x)))
    found = varreg.verify(model, F.cross_entropy, pairs())
    assert found, str(found)
    used = {row.parameter: row.used for row in found.rows}
    assert used == {
        "0.bias": True,
        "2.weight": True,
        "2.bias": True,
        "extra.weight": False,
        "extra.bias": False,
    }
    assert str(found).count("no gradient") == 2


def test_lstm_with_dropout_and_a_checkpoint():
    lstm = Fn(
        lambda s, x: checkpoint(s.head, s.lstm(x)[0][:, -1], use_reentrant=False),
        lstm=nn.LSTM(4, 5, 2, dropout=0.5, batch_first=True),
        head=net()[2],
    )
    lstm.head = nn.Linear(5, 3)
    found = varreg.verify(lstm, F.cross_entropy, (torch.randn(M, 6, 4), torch.arange(M) % 3))
    assert found, str(found)


def test_a_loss_that_is_a_sum():
    loss = nn.CrossEntropyLoss(reduction="sum")
    assert varreg.verify(net(), loss, pairs(), reduction="sum")


def test_random_numbers_without_effect():
    """As models have it that skip layers at random, with a probability of 0."""
    model = Fn(lambda s, x: s.net(x) if float(torch.rand(())) < 2 else x, net=net())
    assert varreg.verify(model, F.cross_entropy, pairs())


# ---- batches of all kinds ------------------------------------------------------------------------


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(5, 3)

    def forward(self, a, b, scale=1.0):
        return self.a(a) + scale * self.b(b)


A, B = torch.randn(M, 4, dtype=torch.float64), torch.randn(M, 5, dtype=torch.float64)


@pytest.mark.parametrize(
    "x", [(A, B), [A, B], {"b": B, "a": A}, (A, B, 2.0), {"a": A, "b": B, "scale": 0.5}]
)
def test_inputs(x):
    found = varreg.verify(Two(), F.cross_entropy, (x, torch.arange(M) % 3), samples=5)
    assert found, str(found)
    assert found.samples == 5


def test_targets_in_a_tree():
    def loss(output, y):
        return F.cross_entropy(output, y["label"]) + F.mse_loss(output, y["more"][0])

    y = {"label": torch.arange(M) % 3, "more": [torch.randn(M, 3)], "name": "x"}
    assert varreg.verify(Two(), loss, ((A, B), y))


def test_the_batch_in_another_dimension():
    model = Fn(lambda s, x: s.lstm(x)[0].transpose(0, 1), lstm=nn.LSTM(4, 3))
    loss = lambda output, y: (output[:, -1] - y).square().sum(1).mean()
    assert varreg.verify(model, loss, (torch.randn(5, M, 4), torch.randn(M, 3)), batch_dim=1)
    turned = lambda output, y: (output - y.transpose(0, 1)).square().sum((1, 2)).mean()
    assert varreg.verify(model, turned, (torch.randn(5, M, 4), torch.randn(5, M, 3)), batch_dim=1)


def test_what_is_everybodys_is_not_cut():
    """A mask of as many rows as samples are used by default: the engine would take it for
    samples.
    """
    model = Fn(lambda s, x, mask: (s.l(x) * mask).sum(1), l=nn.Linear(4, 4))
    found = varreg.verify(model, sines, ((torch.randn(M, 8, 4), torch.rand(8, 4)), torch.zeros(M)))
    assert found, str(found)
    assert found.samples == 7


class Own(nn.Module):
    """Computes its own loss."""

    def __init__(self, form):
        super().__init__()
        self.net, self.form = net(), form

    def forward(self, x, y):
        return self.form(F.cross_entropy(self.net(x), y))


class Output:
    def __init__(self, loss):
        self.loss = loss


@pytest.mark.parametrize(
    "form", [lambda loss: loss, Output, lambda loss: {"loss": loss}, lambda loss: loss[None]]
)
@pytest.mark.parametrize("named", [False, True])
def test_models_with_their_own_loss(form, named):
    x, y = pairs()
    assert varreg.verify(Own(form), None, {"x": x, "y": y} if named else (x, y))


def test_a_dict_and_a_loss_of_the_output():
    found = varreg.verify(Two(), lambda output: output.square().sum(1).mean(), {"a": A, "b": B})
    assert found, str(found)


# ---- Hugging Face --------------------------------------------------------------------------------


def gpt2(**options):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=23,
        n_positions=16,
        n_embd=8,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        **options,
    )
    return transformers.GPT2LMHeadModel(config).train()


def test_gpt2():
    """Dropout, a tied head, and a loss of its own, over tokens of which as many count
    everywhere.
    """
    model, ids = gpt2(), torch.randint(0, 23, (M, 7))
    found = varreg.verify(model, None, {"input_ids": ids, "labels": ids})
    assert found, str(found)
    assert varreg.verify(model.float(), None, {"input_ids": ids, "labels": ids})


def test_gpt2_with_tokens_that_are_ignored():
    ids = torch.randint(0, 23, (M, 7))
    labels = torch.where(torch.arange(7) >= 3 + torch.arange(M)[:, None] % 4, -100, ids)
    found = varreg.verify(gpt2(), None, {"input_ids": ids, "labels": labels})
    assert found.status == "different"
    assert "The loss weighs samples" in found.reason
    assert "That is exact here" in found.advice


# ---- refused -------------------------------------------------------------------------------------


def test_refused():
    found = varreg.verify(net(nn.BatchNorm1d(8)), F.cross_entropy, pairs())
    assert found.status == "refused"
    assert not found
    assert found.reason.startswith("varreg: '1' (BatchNorm1d) is BatchNorm in training")
    assert str(found).startswith("varreg.verify: refused.\nvarreg: '1' (BatchNorm1d)")
    assert not found.rows
    sparse = nn.Sequential(nn.Embedding(5, 3, sparse=True))
    found = varreg.verify(sparse, sines, (torch.randint(0, 5, (M, 2)), torch.zeros(M)))
    assert found.status == "refused"
    assert "sparse=True" in found.reason


def test_refused_in_forward():
    model = Fn(lambda s, x: s.b(s.a(x).cumsum(0)), a=nn.Linear(4, 4), b=nn.Linear(4, 3))
    found = varreg.verify(model, F.cross_entropy, pairs())
    assert found.status == "refused"
    assert found.reason.startswith("varreg: in ")
    assert not _get_current_function_mode_stack()


def test_refused_in_training_alone():
    """The engine repeats a call that has no rule, which gives other numbers where it drops some."""

    def forward(s, x):
        q = s.q.expand(len(x), -1, -1) + x[:, None]
        return F.scaled_dot_product_attention(
            q, s.k, s.k, dropout_p=s.p if s.training else 0.0
        ).sum(1)

    model = Fn(forward, q=nn.Parameter(torch.randn(3, 4)), k=nn.Parameter(torch.randn(5, 4)))
    for model.p in (0.5, 0.0):
        expected = "verified"
        try:
            with varreg.observe(model):
                F.cross_entropy(model(pairs()[0]), pairs()[1]).backward()
        except (RuntimeError, ValueError):
            expected = "refused"
        model.zero_grad()
        assert varreg.verify(model, F.cross_entropy, pairs()).status == expected
    assert expected == "verified"


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return x * self.weight


def with_rule(rule):
    class Mine(Scaled):
        pass

    varreg.register_rule(Mine)(rule)
    return nn.Sequential(nn.Linear(4, 4), Mine()), Mine


def test_errors_under_varreg():
    def rule(module, dy, x):
        raise KeyError("weight")

    model, kind = with_rule(rule)
    found = varreg.verify(model, sines, pairs())
    del MODULE_RULES[kind]
    assert found.status == "refused"
    assert "fails with it (KeyError: 'weight')" in found.reason
    assert "please report it" in found.advice


# ---- different -----------------------------------------------------------------------------------


class Centred(nn.Module):
    def forward(self, x):
        return x - x.detach().mean(0)


class Standard(nn.Module):
    def forward(self, x):
        return x / x.std().item()


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x):
        return self.net(x) if len(x) > 1 else self.net(-x)


def written(s, x):
    """Everybody's first number, written into everybody's row."""
    h = s.net(x)
    h[:, 0] = x.detach()[:, 0].max()
    return h


def turned(s, x):
    """Time first, folded into the batch, and centred over both."""
    h = s.net(x).transpose(0, 1).flatten(0, 1)
    return s.centre(h).unflatten(0, (x.shape[1], -1)).transpose(0, 1)


def outside(s, x):
    """NumPy is no torch function: the first operation to show it is the one that takes it in."""
    return s.net(x + float(np.max(x.numpy())))


# each with the function where samples part, its module, and what made one value of all of them
MEETINGS = {
    "detached mean": (
        Fn(lambda s, x: s.centre(s.net(x)), net=net(), centre=Centred()),
        "sub",
        "'centre' (Centred)",
        "mean",
    ),
    "item": (nn.Sequential(Standard(), net()), "div", "'0' (Standard)", "std"),
    "numpy": (Fn(outside, net=net()), "add", "the model itself (Fn)", None),
    "roll": (
        Fn(lambda s, x: s.net(x).roll(4, 0), net=net()),
        "roll",
        "the model itself (Fn)",
        None,
    ),
    "softmax": (
        Fn(lambda s, x: s.net(x).softmax(0), net=net()),
        "softmax",
        "the model itself (Fn)",
        None,
    ),
    "written": (Fn(written, net=net()), "__setitem__", "the model itself (Fn)", "max"),
    "time first": (Fn(turned, net=net(), centre=Centred()), "sub", "'centre' (Centred)", "mean"),
}


@pytest.mark.parametrize("name", MEETINGS)
def test_where_samples_part(name):
    model, function, module, source = MEETINGS[name]
    model.double()
    x = torch.randn(M, 5, 4) if name == "time first" else torch.randn(M, 4)
    rows = x.split(1)
    found = find_parting(model, lambda i: model(x if i is None else rows[i]), M, 1e-9)
    assert found.at.function == function
    assert found.at.module == module
    assert found.at.whole[0] % M == 0
    assert found.at.single[0] * M == found.at.whole[0]
    assert (found.source and found.source.function) == source
    assert str(found).startswith(f"`{function}` in {module} (shape ")
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("name", [name for name in MEETINGS if name != "time first"])
def test_samples_that_meet(name):
    """Found out, or refused by the engine itself."""
    found = varreg.verify(MEETINGS[name][0].double().train(), F.cross_entropy, pairs())
    assert found.status in ("different", "refused"), str(found)
    if found.status == "different":
        assert "Samples meet in the model" in found.reason
        assert found.parting.at.function == MEETINGS[name][1]
        assert str(found.parting) in str(found)
        assert "GroupNorm" in found.advice
        assert found.outputs > 1e-3
        assert f"'{found.worst.parameter}'" in str(found)
    else:
        assert found.reason.startswith("varreg: ")


def test_samples_that_do_not_meet_part_nowhere():
    model, x = net(nn.LayerNorm(8)), torch.randn(M, 4)
    rows = x.split(1)
    assert find_parting(model, lambda i: model(x if i is None else rows[i]), M, 1e-9) is None


def test_a_model_that_does_something_else_for_one_sample():
    found = varreg.verify(Branching(), F.cross_entropy, pairs())
    assert found.status == "different"
    assert (found.parting.at.function, found.parting.instead) == ("linear", "neg")
    assert "`linear` in 'net.0' (Linear), where one sample goes on with `neg`" in str(found)


def test_a_hook_that_clips():
    """It changes what flows back, and the loss is what it should be: not taken for a
    factor of it.
    """

    def forward(s, x):
        h = s.net(x)
        if h.requires_grad:
            h.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        return h

    found = varreg.verify(Fn(forward, net=net()), F.cross_entropy, pairs())
    assert found.status == "different"
    assert "a hook or a backward function" in found.reason


def hook_after_forward(output, y):
    output.register_hook(lambda grad: grad - grad.mean(0))
    return F.cross_entropy(output, y)


def node_after_forward(output, y):
    output.grad_fn.register_prehook(lambda grads: (grads[0] - grads[0].mean(0),))
    return F.cross_entropy(output, y)


@pytest.mark.parametrize("loss", [hook_after_forward, node_after_forward])
def test_a_hook_put_on_after_the_forward(loss):
    found = varreg.verify(net(), loss, pairs())
    assert found.status == "different"
    assert "a hook or a backward function" in found.reason


def zero_first(h):
    h = h.clone()
    h[0] = 0
    return h


@pytest.mark.parametrize(
    "change",
    [
        zero_first,
        lambda h: h.pow(len(h)),
        lambda h: h / len(h),
        lambda h: h * torch.linspace(1, 2, M)[: len(h), None],
    ],
    ids=["first row", "power of the number", "divided by the number", "constant rows"],
)
def test_samples_by_their_number(change):
    """What no tracer can tell from what is meant: one sample alone is another function."""
    model = Fn(lambda s, x: s.out(change(s.fc(x))), fc=nn.Linear(4, 8), out=nn.Linear(8, 3))
    found = varreg.verify(model, F.cross_entropy, pairs())
    assert found.status == "different"
    assert found.parting is not None


def contrastive(z, y):
    z = F.normalize(z, dim=1)
    return F.cross_entropy(z @ z.T, torch.arange(len(z)))


def test_a_loss_that_mixes_samples():
    found = varreg.verify(net(), contrastive, pairs())
    assert found.status == "different"
    assert "The loss mixes samples" in found.reason
    assert found.parting is None
    assert found.outputs < 1e-12
    assert "share of the gradient" in found.advice


def per_token(output, y):
    return F.cross_entropy(output.flatten(0, 1), y.flatten())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_ignored_tokens(dtype):
    x, y = torch.randn(M, 5, 4, dtype=dtype), torch.randint(0, 3, (M, 5))
    model = net().to(dtype)
    assert varreg.verify(model, per_token, (x, y))
    y[::2, 2:] = -100
    found = varreg.verify(model, per_token, (x, y), samples=M)
    assert found.status == "different"
    # 2 of 2 + 5 for every two samples, times two
    assert "counts 0.571 to 1.43 times as much" in found.reason
    assert "That is exact here" in found.advice
    constant = lambda output, y: per_token(output, y) * (y >= 0).sum() / (5 * len(y))
    assert varreg.verify(model, constant, (x, y))


def test_class_weights():
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    found = varreg.verify(net(), loss, pairs(), samples=M)
    assert found.status == "different"
    assert "counts 0.5 to 1.5 times as much" in found.reason
    assert "class weights" in found.reason


@pytest.mark.parametrize(("reduction", "other"), [("mean", "sum"), ("sum", "mean")])
def test_the_wrong_reduction(reduction, other):
    loss = nn.CrossEntropyLoss(reduction=other)
    found = varreg.verify(net(), loss, pairs(), reduction=reduction)
    assert found.status == "different"
    assert f"The loss is a {other} over samples" in found.reason
    assert f"Pass reduction='{other}'" in found.advice


def test_another_factor():
    loss = lambda output, y: F.cross_entropy(output, y) * len(y) ** 0.5
    found = varreg.verify(net(), loss, pairs(), samples=9)
    assert found.status == "different"
    assert "is 3 times the mean" in found.reason


def test_samples_that_are_alike_do_not_show_their_weights():
    """More samples than parameters: many weights would explain the gradient, so none is named."""
    model = nn.Linear(1, 1, bias=False)
    x, y = torch.randn(M, 1), torch.rand(M, 1)
    loss = lambda output, y: ((output - y).square() * y).sum() / y.sum()
    found = varreg.verify(model, loss, (x, y))
    assert found.status == "different"
    assert "counts" not in found.reason


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (lambda m, dy, x: {"weight": 1.5 * dy * x}, "p.grad of '1.weight' with varreg differs"),
        (
            lambda m, dy, x: {"weight": (dy * x).mean(0).expand(len(x), -1)},
            (
                r"varreg's (second moment|variance) for '1.weight' is not the true one "
                r"\(served by: Mine"
            ),
        ),
    ],
)
def test_an_error_of_varreg(rule, words):
    """A rule that is wrong, in the gradient or in the moments alone."""
    model, kind = with_rule(rule)
    found = varreg.verify(model, sines, pairs())
    del MODULE_RULES[kind]
    assert found.status == "different"
    assert re.search(words, found.reason)
    assert "please report it" in found.advice
    rows = {row.parameter: row.gap for row in found.rows}
    assert rows.pop("1.weight") > 0.01
    assert max(rows.values()) < 1e-12
    assert str(found).count("not the same") == 2  # the heading, and the row


def test_squares_that_leave_the_range():
    """Exact in float64, but not in the precision that is used: not excused as rounding."""
    torch.set_default_dtype(torch.float32)
    loss = lambda output, y: F.cross_entropy(output, y) * 1e-22
    found = varreg.verify(net(), loss, pairs())
    model = net()
    with varreg.observe(model):
        loss(model(pairs()[0]), pairs()[1]).backward()
        there = varreg.moments(model[0].weight).second_moment.any()
    assert bool(found) == bool(there)


# ---- unknown -------------------------------------------------------------------------------------

RANDOM = {
    "torch": (lambda s, x: s.net(x + torch.randn_like(x)), "`randn_like`"),
    "python": (lambda s, x: s.net(x * random.random()), "other than by dropout."),
    "skipped": (lambda s, x: s.net(x) if float(torch.rand(())) < 0.3 else s.net(2 * x), "`rand`"),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_models(name):
    forward, words = RANDOM[name]
    found = varreg.verify(Fn(forward, net=net()), F.cross_entropy, pairs())
    assert found.status == "unknown"
    assert words in found.reason
    assert str(found).startswith("varreg.verify: cannot be verified.\nThe model or its loss draws")


def test_random_loss():
    loss = lambda output, y: F.cross_entropy(output + torch.rand(3), y)
    assert varreg.verify(net(), loss, pairs()).status == "unknown"


def test_a_batch_of_one():
    x, y = pairs()
    found = varreg.verify(net(), F.cross_entropy, (x[:1], y[:1]))
    assert (found.status, found.rows) == ("unknown", ())
    assert "one sample" in found.reason


def test_contributions():
    found = varreg.verify(
        net(nn.BatchNorm1d(8)), F.cross_entropy, pairs(), batch_norm="contribution"
    )
    assert found.status == "unknown"
    assert "shares" in found.reason


def test_a_model_that_needs_several_samples():
    model = Fn(lambda s, x: s.net(x).view(2, -1).view(len(x), 3), net=net())
    found = varreg.verify(model, F.cross_entropy, pairs())
    assert found.status in ("unknown", "refused")
    if found.status == "unknown":
        assert "fails on sample 0 alone (RuntimeError: shape '[2, -1]' is invalid" in found.reason


def test_a_model_for_one_size_of_batch():
    model = Fn(lambda s, x: s.net(x).view(M, 3), net=net())
    found = varreg.verify(model, F.cross_entropy, pairs())
    assert found.status == "unknown"
    assert "fails on 8 samples of the batch of 12 (RuntimeError" in found.reason
    assert "samples=12" in found.advice


def test_numbers_that_are_not_finite():
    x, y = pairs()
    loss = lambda output, y: F.cross_entropy(output, y, ignore_index=0)
    found = varreg.verify(net(), loss, (x, y), samples=M)
    assert found.status == "unknown"
    assert "The loss of sample 0 alone is nan." in found.reason
    x[3] = float("inf")
    found = varreg.verify(net(), F.cross_entropy, (x, y), samples=M)
    assert found.status == "unknown"
    assert "the batch" in found.reason
    root = Fn(lambda s, x: s.l(x).abs().sqrt(), l=nn.Linear(4, 3))
    nn.init.zeros_(root.l.weight)
    nn.init.zeros_(root.l.bias)
    found = varreg.verify(root, F.cross_entropy, pairs())
    assert found.status == "unknown"
    assert "The gradient of the batch for 'l.weight' is not finite" in found.reason


# ---- nothing is left behind ----------------------------------------------------------------------


class Careless(nn.Module):
    """Changes buffers, attributes and random state as it runs."""

    def __init__(self, fails=False):
        super().__init__()
        self.net, self.norm = net(nn.Dropout(0.5)), nn.BatchNorm1d(4).eval()
        self.register_buffer("steps", torch.zeros(()))
        self.fails, self.seen = fails, []

    def forward(self, x):
        self.steps += 1
        self.seen.append(len(x))
        with torch.no_grad():
            self.norm.running_mean += len(x)
        torch.rand(1), random.random(), np.random.rand()  # noqa: NPY002
        if self.fails and len(x) == 1:
            raise KeyError("one")
        return self.net(x)


class Uncopyable(Careless):
    def __deepcopy__(self, memo):
        raise TypeError("cannot be copied")


class Holding(Careless):
    """A copy of it still runs the original."""

    def __init__(self, fails=False):
        super().__init__(fails)
        inner = super().forward
        self.run = lambda x: inner(x)

    def forward(self, x):
        return self.run(x)


def picture(model):
    tensors = [*model.parameters(), *model.buffers()]
    bits = [(id(t), t._version, t.requires_grad, t.detach().numpy().tobytes()) for t in tensors]
    grads = [
        None if t.grad is None else (id(t.grad), t.grad._version, t.grad.tolist()) for t in tensors
    ]
    hooks = [
        (list(m._forward_hooks.values()), list(m._forward_pre_hooks.values()))
        for m in model.modules()
    ]
    flags = [m.training for m in model.modules()]
    legacy = np.random.get_state()[1].tolist()  # noqa: NPY002
    numbers = torch.get_rng_state().tolist(), random.getstate(), legacy
    ledgers = [id(LEDGERS.get(p)) for p in model.parameters()]
    return bits, grads, hooks, flags, numbers, list(model.seen), ledgers


@pytest.mark.parametrize("kind", [Careless, Uncopyable, Holding])
@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("ending", ["verified", "unknown", "refused", "raises"])
def test_nothing_is_left_behind(kind, observed, ending):
    model = kind(ending == "unknown")
    x, y = pairs()
    observer = varreg.observe(model) if observed else None
    F.cross_entropy(model(x), y).backward()
    m = [varreg.moments(p) for p in model.parameters()]
    sums = [(t.count, t.mean.tolist(), t.variance.tolist()) for t in m if t is not None]
    loss = F.cross_entropy
    if ending == "refused":
        model.norm.train()
    if ending == "raises":
        loss = lambda output, y: output
    before = picture(model)
    if ending == "raises":
        with pytest.raises(
            ValueError, match="varreg: verify expects a loss that is a single number"
        ):
            varreg.verify(model, loss, (x, y))
    else:
        found = varreg.verify(model, loss, (x, y))
        assert found.status == ending, str(found)
    assert picture(model) == before
    assert not _get_current_function_mode_stack()
    m = [varreg.moments(p) for p in model.parameters()]
    assert [(t.count, t.mean.tolist(), t.variance.tolist()) for t in m if t is not None] == sums
    assert bool(sums) == observed
    if observer is not None and ending != "refused":
        F.cross_entropy(model(x), y).backward() if not model.fails else None
        assert model.fails or varreg.moments(model.net[0].weight).count == 2 * M
        observer.remove()


def test_a_loss_with_a_state():
    """Its buffers go back too, and each sample meets the same ones."""

    class Moving(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("centre", torch.zeros(3))

        def forward(self, output, y):
            self.centre += 1
            return (output - self.centre).square().sum(1).mean()

    loss = Moving()
    assert varreg.verify(net(), loss, pairs())
    assert not loss.centre.any()


def test_an_observed_model_is_verified():
    model = net()
    with varreg.observe(model) as observer:
        assert varreg.verify(model, F.cross_entropy, pairs())
        assert observer.is_on
    assert varreg.verify(copy.deepcopy(model), F.cross_entropy, pairs())


# ---- input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": 3}, "expects a torch.nn.Module, got int"),
        (
            {"loss": 3},
            r"expects a loss that can be called as loss\(model\(x\), y\), or None .* got int",
        ),
        ({"batch": A}, r"expects a batch \(inputs, targets\), or a dict .* got Tensor"),
        ({"batch": (A, A, A)}, "got tuple of 3. Several inputs are a tuple"),
        (
            {"batch": (torch.zeros(()), A)},
            r"an input tensor with samples along dimension 0; got \(\) as inputs",
        ),
        ({"batch": ("text", A)}, "along dimension 0; got str as inputs"),
        (
            {"batch": (A[:0], A[:0])},
            "a batch with samples in it, got .0, 4. as inputs: dimension 0 is empty",
        ),
        ({"batch": (A, torch.zeros(M + 1))}, r"targets for 12 samples, .* got \(13,\) as targets"),
        ({"samples": 1}, "expects samples of 2 or more, got 1"),
        ({"samples": 2.5}, "expects samples of 2 or more, got 2.5"),
        ({"rtol": -1}, "expects rtol to be a positive number, got -1"),
        ({"reduction": "none"}, "reduction must be 'mean' or 'sum'"),
        ({"batch_dim": -1}, "batch_dim must be a whole number"),
        ({"batch_norm": "train"}, "batch_norm must be 'refuse' or 'contribution'"),
        ({"model": nn.Tanh()}, "a model with a parameter that requires a gradient; Tanh has none"),
        ({"loss": lambda output, y: output}, r"a loss that is a single number; got shape \(8, 3\)"),
        ({"loss": lambda output, y: 1.0}, "a loss that is a single number; got float"),
        ({"loss": lambda output, y: y.sum().double()}, "a loss that depends on parameters"),
        ({"loss": None, "batch": A}, "an output that is a single number or has one as its .loss"),
        (
            {"loss": F.cross_entropy, "batch": (A, B[:, :1]), "samples": M},
            "cannot run the model and its loss on the batch",
        ),
        ({"model": nn.LazyLinear(3)}, "the model has a lazy parameter"),
    ],
)
def test_bad_input(change, words):
    y = torch.arange(M) % 3
    given = {"model": net(), "loss": F.cross_entropy, "batch": (A, y)} | change
    with pytest.raises(ValueError, match=words) as raised:
        varreg.verify(given.pop("model"), given.pop("loss"), given.pop("batch"), **given)
    assert str(raised.value).startswith("varreg: ")
    assert not _get_current_function_mode_stack()


def test_the_table():
    found = varreg.verify(net(), F.cross_entropy, pairs())
    lines = str(found).splitlines()
    assert lines[0].startswith("varreg.verify: verified. 4 parameters, 8 samples, one at a time")
    assert lines[1].split() == [
        "parameter",
        "shape",
        "batch",
        "p.grad",
        "mean",
        "2nd",
        "moment",
        "variance",
    ]
    assert [line.split()[:2] for line in lines[3:]] == [
        ["0.weight", "8×4"],
        ["0.bias", "8"],
        ["2.weight", "3×8"],
        ["2.bias", "3"],
    ]
    assert "nan" not in str(found)


# ---- the lab and `varreg bench` ------------------------------------------------------------------


def lab_task(model, loss):
    from varreg.lab import tasks

    def load(data_dir):
        parts = [tasks.Split(*pairs()) for _ in range(3)]
        return tasks.Splits(*parts)

    return tasks.Task("tiny", load, model, 8, 1, loss)


def shifted():
    """What a batch's inputs have in common goes in without a gradient."""
    return Fn(lambda s, x: s.net(x + float(np.max(x.numpy()))), net=net())


def noisy():
    return Fn(lambda s, x: s.net(x + torch.randn_like(x)), net=net())


@pytest.mark.parametrize(
    ("model", "optimizer", "outcome"),
    [
        (net, "VRSGD", "begins"),
        (shifted, "VRSGD", "stops"),
        (shifted, "SGD", "begins"),
        (noisy, "VRAdam", "notes"),
    ],
)
def test_the_lab_verifies_before_it_trains(
    model, optimizer, outcome, monkeypatch, tmp_path, capsys
):
    from varreg.lab import tasks
    from varreg.lab.experiments.compare.plan import Comparison
    from varreg.lab.experiments.execution import begin
    from varreg.lab.tasks import lookup

    lookup.task.cache_clear()
    lookup.load.cache_clear()
    monkeypatch.setitem(tasks.TASKS, "tiny", lambda: lab_task(model, F.cross_entropy))
    made = Comparison("tiny", (optimizer, "Adam"), trials=2, s=(2.0,))
    if outcome == "stops":
        with pytest.raises(
            ValueError, match=f"varreg: {optimizer} cannot be used for task tiny"
        ) as raised:
            begin(made, tmp_path, None, ["varreg"])
        assert "Samples meet in the model" in str(raised.value) or "varreg: in " in str(
            raised.value
        )
        assert not (tmp_path / "experiment.json").exists()
    else:
        begin(made, tmp_path, None, ["varreg"])
        assert (tmp_path / "experiment.json").exists()
    assert (
        "varreg: note: the moments of task tiny cannot be verified." in capsys.readouterr().err
    ) == (outcome == "notes")
    lookup.task.cache_clear()
    lookup.load.cache_clear()


def test_bench_says_why():
    from varreg.lab.bench.single_samples import check_moments
    from varreg.lab.bench.workloads import Workload

    check_moments(Workload("tiny", net, pairs), ["exact", "groups=4"])
    with pytest.raises((RuntimeError, ValueError), match="varreg: ") as raised:
        check_moments(Workload("tiny", shifted, pairs), ["exact"])
    assert "Samples meet in the model" in str(raised.value) or "varreg: in " in str(raised.value)
