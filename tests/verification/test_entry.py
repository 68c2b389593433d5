"""`varreg.verify`: models, batches and losses that are verified, and bad arguments."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

import varreg
from tests.support.model_table import CASES, Fn
from tests.support.verified import M, net, pairs, sines


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


@pytest.mark.parametrize("is_made", [False, True])
def test_inputs_that_require_a_gradient(is_made):
    """Each step has its own graph, and leaves the user's tensors alone."""
    a, b = A.clone().requires_grad_(), B.clone().requires_grad_()
    x = (a.sin(), b) if is_made else (a, b)
    found = varreg.verify(Two(), F.cross_entropy, (x, torch.arange(M) % 3), samples=5)
    assert found, str(found)
    gain = torch.ones(3, dtype=torch.float64, requires_grad=True)
    shared = Fn(lambda s, x, gain: s.net(x) * gain, net=net())
    if is_made:
        gain = gain * 2
    found = varreg.verify(shared, F.cross_entropy, ((a, gain), torch.arange(M) % 3))
    assert found, str(found)
    assert a.grad is None
    assert b.grad is None
    assert is_made or gain.grad is None


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
