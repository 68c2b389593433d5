"""The public interface: coverage, summary, rules, groups, batch dimension; and controls that must
fail.
"""

from __future__ import annotations

import copy
import math
import weakref

import pytest
import torch
from torch import nn

import varreg
from tests.support.measured import assert_moments
from tests.support.model_table import Fn, weight
from tests.support.truth import assert_close, losses, one_at_a_time, sample_weights, scale_of
from varreg.engine.contribution import Contribution
from varreg.engine.ledger import Ledger


def backward(model, x, w):
    losses(model(x), w).mean().backward()


def square_each_use(self, contribution: Contribution, dtype, sums=None):
    """Square every use on its own: the mistake that the engine has to avoid."""
    already = self.count
    total = self._add_sums(contribution)
    if already:
        self.count = already
    return total.to(dtype)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Fn(lambda s, x: s.l(torch.tanh(s.l(x))), l=nn.Linear(4, 4)),
        lambda: Fn(
            lambda s, x: s.cell(x, s.cell(x, torch.zeros(len(x), 4))), cell=nn.RNNCell(4, 4)
        ),
    ],
    ids=["a layer called twice", "a cell over time"],
)
def test_squaring_each_use_on_its_own_would_be_noticed(make, monkeypatch):
    model, x, w = make().double(), torch.randn(6, 4), sample_weights(6)
    g = one_at_a_time(copy.deepcopy(model), (x,), w)
    varreg.observe(model)
    backward(model, x, w)
    assert_moments(model, g)
    monkeypatch.setattr(Ledger, "add", square_each_use)
    model.zero_grad()
    backward(model, x, w)
    with pytest.raises(AssertionError, match="second moment: off by"):
        assert_moments(model, g)


def test_squaring_each_time_step_on_its_own_would_be_noticed():
    model, x, w = nn.Linear(4, 3).double(), torch.randn(6, 5, 4), sample_weights(6)
    g = one_at_a_time(copy.deepcopy(model), (x,), w)
    y = model(x)
    y.retain_grad()
    losses(y, w).mean().backward()
    wrong = 6 * torch.einsum("bto,bti->oi", y.grad.square(), x.square())
    with pytest.raises(AssertionError, match="off by"):
        assert_close(wrong, g["weight"].square().mean(0), scale_of(g) ** 2, "weight")


def test_counting_a_batchless_input_as_a_sample_would_be_noticed():
    model = Fn(lambda s, x: x + s.pos(torch.arange(6)), pos=nn.Embedding(6, 4)).double()
    x, w = torch.randn(6, 6, 4), sample_weights(6)
    g = one_at_a_time(copy.deepcopy(model), (x,), w)
    varreg.observe(model)
    backward(model, x, w)
    assert_moments(model, g)
    naive = 6 * model.pos.weight.grad.square()  # each position taken for one sample
    with pytest.raises(AssertionError, match="off by"):
        assert_close(naive, g["pos.weight"].square().mean(0), scale_of(g) ** 2, "pos")


def test_observe_prints_nothing_and_repr_is_a_coverage_table(capsys):
    model = nn.Sequential(
        nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(8, 2), Fn(lambda s, x: x * s.w, w=weight(2))
    )
    model[2].bias.requires_grad_(False)
    observer = varreg.observe(model)
    assert capsys.readouterr() == ("", "")
    table = [line.split() for line in repr(observer).splitlines()]
    assert table[0] == ["varreg", "observer", "of", "Sequential"]
    assert table[3:] == [
        ["0.weight", "2×1×2×2", "conv", "exact"],
        ["0.bias", "2", "conv", "exact"],
        ["2.weight", "2×8", "linear", "exact"],
        ["2.bias", "2", "-", "frozen"],
        ["3.w", "2", "followed", "at", "the", "first", "step", "exact"],
    ]
    model(torch.randn(3, 1, 3, 3)).sum().backward()
    assert repr(observer).splitlines()[-1].split() == ["3.w", "2", "mul", "exact"]


def test_the_table_says_how_moments_are_estimated():
    model = nn.Linear(2, 2)
    assert "estimated from 4 groups" in repr(varreg.observe(model, groups=4))


def test_summary_estimates_the_noise_scale():
    """Gradients with a known mean and covariance: a linear model with loss −z·w has gradient −z."""
    model = nn.Linear(3, 1, bias=False).double()
    observer = varreg.observe(model)
    assert str(observer.summary()) == "varreg: no moments yet; call backward() first."
    z = torch.tensor([1.0, 0.0, -2.0]) + 3.0 * torch.randn(20_000, 3)
    model(z).mean().backward()
    row = observer.summary().model
    trace, signal = 3 * 9.0, 5.0
    assert row.count == 20_000
    assert row.trace == pytest.approx(trace, rel=0.03)
    assert row.noise_scale == pytest.approx(trace / signal, rel=0.05)
    assert row.grad_norm == pytest.approx(math.sqrt(signal), rel=0.02)
    assert row.snr == pytest.approx(math.sqrt(signal / (trace / 20_000)), rel=0.03)
    assert row.signal == pytest.approx(signal, rel=0.05)
    assert row.text == "more signal than noise in 20000 samples"


def test_a_summary_says_what_one_batch_can_say():
    model = nn.Linear(1, 1, bias=False).double()
    observer = varreg.observe(model)
    for values, said in (
        ([1.0, -1.0, 1.0, -1.0], "no signal above the noise of 4 samples"),
        ([1.0, -0.5, 1.2, 0.2], "less signal than noise in 4 samples"),
        ([1.0, 0.9, 1.0, 1.1], "more signal than noise in 4 samples"),
        ([1.0], "too few samples to tell"),
    ):
        model.zero_grad()
        model(torch.tensor(values).unsqueeze(1)).mean().backward()
        assert observer.summary().model.text == said
    head, *_, last, note = str(observer.summary()).splitlines()
    words = ["layer", "parameters", "|ḡ|", "SNR", "what", "one", "batch", "says"]
    assert head.split() == words
    assert last.startswith("whole model")
    assert note == "For a batch size: varreg.NoiseScale."


def test_a_summary_carries_what_can_be_averaged():
    """The ratio of averages of `trace` and `signal` is what NoiseScale has."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    observer = varreg.observe(model)
    noise, kept = varreg.NoiseScale(observer), []
    for _ in range(4):
        model.zero_grad()
        backward(model, torch.randn(8, 4), sample_weights(8))
        noise.update()
        kept.append(observer.summary().as_dict())
    for at, reading in (("", noise.model), ("/2", noise.layers[1])):
        trace, signal = (sum(k[f"{what}{at}"] for k in kept) for what in ("trace", "signal"))
        assert trace / signal == pytest.approx(reading.noise / reading.signal, rel=1e-9)


def test_summary_groups_parameters_by_layer():
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    observer = varreg.observe(model)
    backward(model, torch.randn(8, 4), sample_weights(8))
    summary = observer.summary()
    assert [(r.name, r.parameters) for r in summary.layers] == [("0", 15), ("2", 8)]
    assert summary.model.trace == pytest.approx(sum(r.trace for r in summary.layers))


def test_the_group_estimate_is_unbiased_for_uneven_groups():
    """The mean over many batches of independent samples, within five standard errors."""
    estimates, exact = [], []
    for _ in range(4000):
        z = torch.randn(7, 1) * 2 + 1
        for groups, out in ((3, estimates), (None, exact)):
            model = nn.Linear(1, 1, bias=False).double()
            with varreg.observe(model, groups=groups):
                model(z).mean().backward()
                out.append(varreg.moments(model.weight).variance.item())
    a, b = torch.tensor(estimates), torch.tensor(exact)
    error = a.std() / math.sqrt(len(a))
    assert abs(a.mean() - 4 * 6 / 7) < 5 * error
    assert abs(b.mean() - 4 * 6 / 7) < 5 * b.std() / math.sqrt(len(b))
    assert a.std() > b.std()


def test_one_group_says_nothing_about_the_variance_until_there_is_a_second():
    model = nn.Linear(1, 1, bias=False).double()
    varreg.observe(model, groups=1)
    (model(torch.tensor([[1.0], [2.0]])).sum() / 4).backward()
    assert varreg.moments(model.weight).variance.isnan().all()
    (model(torch.tensor([[3.0], [6.0]])).sum() / 4).backward()
    m = varreg.moments(model.weight)
    # group means 1.5 and 4.5 of 2 samples each: σ² = 2·(1.5² + 1.5²) = 9; v² = 3/4 σ²
    assert m.variance.item() == pytest.approx(6.75)
    assert m.mean.item() == pytest.approx(3.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(4, 3),
        lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0),
        lambda: Fn(lambda s, x: s.r(x)[0], r=nn.GRU(4, 3)),
    ],
)
def test_batch_dim(make):
    model = make().double()
    x, w = torch.randn(5, 6, 4), sample_weights(6)
    turned = Fn(lambda s, x: s.model(x.transpose(0, 1)).transpose(0, 1), model=copy.deepcopy(model))
    g = one_at_a_time(turned, (x.transpose(0, 1),), w)
    varreg.observe(model, batch_dim=1)
    losses(model(x).transpose(0, 1), w).mean().backward()
    assert_moments(model, {n.removeprefix("model."): v for n, v in g.items()})


def test_inputs_in_dicts_and_keywords():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 3), nn.Linear(2, 3)

        def forward(self, batch, *, extra):
            return {"logits": self.a(batch["x"]) + self.b(extra[0])}

    model = Named().double()
    x, y, w = torch.randn(6, 4), torch.randn(6, 2), sample_weights(6)
    flat = Fn(lambda s, x, y: s.a(x) + s.b(y), a=copy.deepcopy(model.a), b=copy.deepcopy(model.b))
    g = one_at_a_time(flat, (x, y), w)
    varreg.observe(model)
    losses(model({"x": x}, extra=[y])["logits"], w).mean().backward()
    assert_moments(model, g)


def test_embedding_bag_with_offsets():
    model = Fn(
        lambda s, text, offsets: s.l(s.bag(text, offsets)),
        bag=nn.EmbeddingBag(9, 4),
        l=nn.Linear(4, 2),
    ).double()
    text, offsets, w = torch.randint(0, 9, (11,)), torch.tensor([0, 3, 4, 8]), sample_weights(4)
    rows = []
    for a, b, v in zip([0, 3, 4, 8], [3, 4, 8, 11], w, strict=True):
        model.zero_grad()
        losses(model(text[a:b], torch.tensor([0])), v.view(1)).sum().backward()
        rows.append({n: p.grad for n, p in model.named_parameters()})
    g = {n: torch.stack([r[n] for r in rows]) for n in rows[0]}
    model.zero_grad()
    varreg.observe(model)
    losses(model(text, offsets), w).mean().backward()
    assert_moments(model, g)


def test_moments_of_a_tensor_that_is_not_observed():
    assert varreg.moments(nn.Parameter(torch.ones(2))) is None


def test_moments_expects_a_tensor():
    with pytest.raises(ValueError, match=r"moments expects a parameter \(a tensor\), got str"):
        varreg.moments("0.weight")


def test_moments_print_as_a_line():
    model = nn.Linear(1, 1, bias=False).double()
    observer = varreg.observe(model)
    model(torch.tensor([[1.0], [2.0], [6.0]])).mean().backward()
    assert (
        repr(varreg.moments(model.weight))
        == "Moments(count=3, exact, shape 1×1: |mean| 3, mean variance 4.67, median rho 0.519)"
    )
    observer.remove()
    assert observer.summary().model is None


def test_cleared_sums_let_go_of_their_memory_before_the_next_forward():
    """It is then that memory is short: activations are made, and plain training has no
    gradients.
    """
    model = torch.nn.Linear(3, 2)
    observer = varreg.observe(model)
    x = torch.randn(5, 3)
    model(x).square().mean().backward()
    kept = [
        weakref.ref(t)
        for p in model.parameters()
        for t in (varreg.moments(p).total, varreg.moments(p).square)
    ]
    model.zero_grad()
    seen = []
    handle = model.register_forward_pre_hook(lambda *_: seen.extend(r() is None for r in kept))
    loss = model(x).square().mean()
    handle.remove()
    assert seen == [True] * 4
    loss.backward()
    assert all(varreg.moments(p).count == 5 for p in model.parameters())
    model(x).square().mean().backward()  # nothing was cleared: sums go on
    assert all(varreg.moments(p).count == 10 for p in model.parameters())
    observer.remove()
