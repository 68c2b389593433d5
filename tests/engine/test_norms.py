"""The norms of single samples: exact for every model of the table, and what they are good for."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import varreg
from tests.support.measured import prepared, run, truth_of
from tests.support.model_table import CASES, Fn
from varreg import native
from varreg.backends import TWINS, use
from varreg.engine import sample_norms

each_case = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)


def norms_of(g):
    """n_i, from the gradients of single samples."""
    return sum(t.reshape(len(t), -1).square().sum(1) for t in g.values()).sqrt()


def assert_norms(found: varreg.Norms, g, rtol: float = 1e-9) -> None:
    truth, scale = norms_of(g), float(norms_of(g).max())
    torch.testing.assert_close(found.values, truth, rtol=rtol, atol=1e-12 * scale)
    assert set(found.by_parameter) <= set(g)
    for name, t in g.items():
        alone = t.reshape(len(t), -1).norm(dim=1)
        if name not in found.by_parameter:
            assert not alone.any(), name
            continue
        # a Gram matrix has rounding errors of the size of what it adds up
        torch.testing.assert_close(found.by_parameter[name], alone, rtol=rtol, atol=1e-7 * scale)


@pytest.mark.sampled(4)
@each_case
def test_norms_are_those_of_single_samples(case):
    model, inputs, weights = prepared(case)
    g = truth_of(case, model, inputs, weights)
    observer = varreg.observe(model, norms=True)
    for _ in range(2):  # the second repeats the plans of the first
        model.zero_grad()
        run(model, inputs, weights)
        assert_norms(observer.norms(), g)


@pytest.mark.sampled(8)
@each_case
def test_every_fast_way_is_its_definition(case, monkeypatch):
    """What is found from chunks of contributions, for each of them."""
    model, inputs, weights = prepared(case)
    varreg.observe(model, norms=True)
    fast, compared = sample_norms.squared, []

    def both(c):
        a, b = fast(c), sample_norms.from_chunks(c)
        compared.append((a.double(), b.double()))
        return a

    monkeypatch.setattr(sample_norms, "squared", both)
    run(model, inputs, weights)
    size = max((float(b.max()) for _, b in compared if len(b)), default=0.0)
    for a, b in compared:
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-13 * size)


@pytest.mark.parametrize("rows", [1, 2, 40])
@pytest.mark.parametrize("backend", ["native", "twins"])
def test_dense_layers_of_all_lengths(rows, backend):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 3)).double()
    x = torch.randn(5, rows, 16, dtype=torch.float64)
    truth = []
    for one in x:
        net.zero_grad()
        net(one[None]).square().sum().backward()
        truth.append(torch.cat([p.grad.flatten() for p in net.parameters()]).norm())
    net.zero_grad()
    observer = varreg.observe(net, norms=True, reduction="sum")
    if backend == "twins":
        with use("cpu", TWINS):
            net(x).square().sum().backward()
    else:
        net(x).square().sum().backward()
    torch.testing.assert_close(observer.norms().values, torch.stack(truth), rtol=1e-9, atol=0)


@pytest.mark.skipif(native.status() != "in use", reason=f"native kernel: {native.status()}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("repeated", [False, True])
def test_layers_with_many_rows_compute_norms_beside_their_sums(dtype, repeated, monkeypatch):
    """Not a second time from chunks, unless a parameter is used twice: cross terms count."""
    torch.manual_seed(0)
    first, rest = nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.Conv2d(3, 4, 5)
    again = [first, nn.Tanh()] if repeated else []
    net = nn.Sequential(first, nn.Tanh(), *again, rest, nn.Flatten(2), nn.Linear(64, 3))
    net, x = net.to(dtype), torch.randn(6, 3, 12, 12, dtype=dtype)
    truth = []
    for one in x:
        net.zero_grad()
        net(one[None]).square().sum().backward()
        truth.append(torch.cat([p.grad.flatten() for p in net.parameters()]).double().norm())
    net.zero_grad()
    chunks, calls = sample_norms.from_chunks, []
    monkeypatch.setattr(sample_norms, "from_chunks", lambda *c: [calls.append(c), chunks(*c)][1])
    observer = varreg.observe(net, norms=True, reduction="sum")
    net(x).square().sum().backward()
    rtol = 1e-5 if dtype == torch.float32 else 1e-9
    found = observer.norms().values.double()
    torch.testing.assert_close(found, torch.stack(truth), rtol=rtol, atol=0)
    assert len(calls) == repeated


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def data(n: int, seed: int = 1):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=g, dtype=torch.float64)
    return x, torch.randint(0, 3, (n,), generator=g)


def singles(net, x, y):
    net, rows = copy.deepcopy(net), []
    for i in range(len(y)):
        net.zero_grad()
        cross_entropy(net(x[i : i + 1]), y[i : i + 1]).backward()
        rows.append(torch.cat([p.grad.flatten() for p in net.parameters()]).norm())
    return torch.stack(rows)


def test_accumulation_has_the_samples_of_all_micro_batches():
    net = small()
    (x, y), (a, b) = data(4), data(4, 2)
    truth = torch.cat([singles(net, x, y), singles(net, a, b)])
    observer = varreg.observe(net, norms=True)
    for inputs, labels in ((x, y), (a, b)):
        (cross_entropy(net(inputs), labels) / 2).backward()
    found = observer.norms()
    torch.testing.assert_close(found.values, truth, rtol=1e-9, atol=0)
    assert found.batches.tolist() == [0] * 4 + [1] * 4
    assert found.indices.tolist() == [0, 1, 2, 3] * 2
    net.zero_grad()
    cross_entropy(net(a), b).backward()  # a new step begins anew
    torch.testing.assert_close(observer.norms().values, truth[4:], rtol=1e-9, atol=0)
    for p in net.parameters():
        p.grad.zero_()
    cross_entropy(net(x), y).backward()
    torch.testing.assert_close(observer.norms().values, truth[:4], rtol=1e-9, atol=0)


def test_two_losses_of_one_forward_are_of_the_same_samples():
    torch.manual_seed(0)
    net = Fn(lambda s, x: (s.a(x), s.b(x)), a=nn.Linear(6, 3), b=nn.Linear(6, 3)).double()
    x, y = data(5)
    both = varreg.observe(net, norms=True)
    sum(cross_entropy(o, y) for o in net(x)).backward()
    truth = both.norms().values
    net.zero_grad()
    for o in net(x):
        cross_entropy(o, y).backward()
    torch.testing.assert_close(both.norms().values, truth)
    assert len(truth) == 5


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_checkpoints(reentrant):
    net = small()
    x, y = data(5)
    truth = singles(net, x, y)
    observer = varreg.observe(Outside(net, reentrant), norms=True)
    cross_entropy(observer.model(x.requires_grad_()), y).backward()
    torch.testing.assert_close(observer.norms().values, truth, rtol=1e-9, atol=0)


class Outside(nn.Module):
    def __init__(self, net, reentrant):
        super().__init__()
        self.net, self.reentrant = net, reentrant

    def forward(self, x):
        return checkpoint(self.net, x, use_reentrant=self.reentrant)


def test_squares_out_of_range():
    net = nn.Linear(6, 1, bias=False)
    x = torch.randn(4, 6)
    observer = varreg.observe(net, norms=True)
    (net(x) * 1e-24).mean().backward()
    truth = x.double().norm(dim=1) * 1e-24
    torch.testing.assert_close(observer.norms().values, truth, rtol=1e-5, atol=0)


def test_moments_and_gradients_are_what_they_are_without_norms():
    plain, net = small(), small()
    x, y = data(7)
    varreg.observe(plain)
    varreg.observe(net, norms=True)
    for model in (plain, net):
        cross_entropy(model(x), y).backward()
    for p, q in zip(plain.parameters(), net.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
        assert torch.equal(varreg.moments(p).square, varreg.moments(q).square)


# ---- who made this step? -------------------------------------------------------------------------


def test_planted_samples_with_a_large_gradient_and_an_ordinary_loss_are_found():
    """Their inputs are far larger, along what the model does not see: the loss is as it was."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 4))
    with torch.no_grad():
        net[0].weight[:, -1] = 0  # the last input is not used (yet)
    x, y = torch.randn(256, 20), torch.randint(0, 4, (256,))
    planted = [17, 101, 200]
    x[planted, -1] = 150.0
    losses = cross_entropy(net(x), y, reduction="none")
    middle = losses.sort().values
    assert middle[5] < losses[planted].min()
    assert losses[planted].max() < middle[-5]  # nobody finds them by their loss
    observer = varreg.observe(net, norms=True)
    cross_entropy(net(x), y).backward()
    found = observer.norms()
    assert {s.index for s in found.largest(3)} == set(planted)
    assert {s.index for s in found.dominant(0.5)} <= set(planted)
    assert sum(s.share for s in found.largest(3)) > 0.8
    assert found.effective < 5
    said = str(found)
    assert "of 256 samples make" in said
    assert str(found.largest(1)[0].index) in said
    assert repr(found) == f"Norms(256 samples, as good as {found.effective:.3g} equal ones)"


def test_shares():
    net = nn.Linear(1, 1, bias=False)
    observer = varreg.observe(net, norms=True)
    net(torch.tensor([[1.0], [3.0], [0.0], [-2.0]])).mean().backward()
    found = observer.norms()
    assert found.values.tolist() == [1.0, 3.0, 0.0, 2.0]
    assert [(s.batch, s.index) for s in found.largest(2)] == [(0, 1), (0, 3)]
    torch.testing.assert_close(found.shares, torch.tensor([1, 9, 0, 4]).double() / 14)
    assert len(found.dominant(9 / 14)) == 1
    assert len(found.dominant(0.65)) == 2
    assert len(found.dominant(1.0)) == 3
    assert found.effective == pytest.approx(14**2 / (1 + 81 + 16))
    assert str(found).startswith("1 of 4 samples makes 64% of this step.")
    with pytest.raises(varreg.VarregError, match="share must be above 0"):
        found.dominant(0)


def test_no_gradient_at_all():
    net = nn.Linear(1, 1, bias=False)
    observer = varreg.observe(net, norms=True)
    (net(torch.ones(3, 1)) * 0).mean().backward()
    assert str(observer.norms()) == "varreg: none of 3 samples has a gradient."
    assert observer.norms().dominant() == []


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_samples_that_are_not_finite_make_the_step(bad):
    net = nn.Linear(2, 1)
    observer = varreg.observe(net, norms=True)
    x = torch.randn(6, 2)
    x[4] = bad
    net(x).square().mean().backward()
    found = observer.norms()
    assert found.shares.tolist() == [0.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    assert [s.index for s in found.dominant()] == [4]
    assert found.effective == 1.0
    assert str(found).startswith("1 of 6 samples makes 100% of this step.")
    net.zero_grad()
    net(x * bad).square().mean().backward()
    assert observer.norms().effective == pytest.approx(6)
    assert str(observer.norms()).startswith("3 of 6 samples make 50% of this step.")


# ---- errors --------------------------------------------------------------------------------------


def test_what_is_refused():
    with pytest.raises(varreg.VarregError, match="norms=True is for single samples, and groups=2"):
        varreg.observe(small(), groups=2, norms=True)
    with pytest.raises(varreg.VarregError, match="norms must be True or False"):
        varreg.observe(small(), norms=1)
    with pytest.raises(varreg.VarregError, match=r"varreg.observe\(model, norms=True\)"):
        varreg.observe(small()).norms()
    observer = varreg.observe(small(), norms=True)
    with pytest.raises(varreg.VarregError, match=r"no norms. Call observer.norms.. after"):
        observer.norms()
    x, y = data(3)
    cross_entropy(observer.model(x), y).backward()
    observer.model.zero_grad()
    with pytest.raises(varreg.VarregError, match="there are no norms"):
        observer.norms()
    observer.remove()
    with pytest.raises(varreg.VarregError, match="removed"):
        observer.norms()


def test_a_gradient_that_is_not_measured_is_an_error():
    net = small()
    net.extra = nn.Parameter(torch.ones(2))
    observer = varreg.observe(net, norms=True)
    x, y = data(3)
    with pytest.warns(UserWarning, match="no moments"):
        (cross_entropy(net(x), y) + net.extra.square().sum()).backward()
    with pytest.raises(varreg.VarregError, match="'extra' has a gradient that was not measured"):
        observer.norms()
