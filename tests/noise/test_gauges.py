"""Gauges: against their definitions, and against BackPACK's moments."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import varreg
from varreg import gauges

GAUGES = ("norm_test", "gsnr", "cabs", "evidence", "noise_scale", "noise_scale_l1")
LR, LOSS = 0.1, 2.5


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def batch():
    g = torch.Generator().manual_seed(1)
    return torch.randn(12, 5, generator=g), torch.randint(0, 3, (12,), generator=g)


def definitions(gradients: list[torch.Tensor]) -> dict[str, float]:
    """All gauges, from the gradients of single samples, [batch, *shape] of each parameter."""
    g = torch.cat([part.flatten(1) for part in gradients], 1)
    m, mean, s2 = len(g), g.mean(0), g.var(0)
    trace = float(s2.sum())
    e = (s2 / m).sqrt()
    size = mean.abs() - 1.5 * math.sqrt(2 / math.pi) * e * torch.exp(-4 * (mean / e).square())
    return {
        "norm_test": math.sqrt(trace / m) / float(mean.norm()),
        "gsnr": float((mean.square() / s2).mean()),
        "cabs": LR * trace / LOSS,
        "evidence": 1 - m * float((mean.square() / s2).mean()),
        "noise_scale": trace / (float(mean.square().sum()) - trace / m),
        "noise_scale_l1": float(s2.sqrt().sum() ** 2 / size.sum() ** 2),
    }


def true_gauges() -> dict[str, float]:
    """All gauges of the batch, one sample at a time."""
    net, (x, y) = model(), batch()
    rows = []
    for i in range(len(x)):
        net.zero_grad()
        cross_entropy(net(x[i : i + 1]), y[i : i + 1]).backward()
        rows.append([p.grad.clone() for p in net.parameters()])
    return definitions([torch.stack(column) for column in zip(*rows, strict=True)])


def read(net: nn.Module) -> dict[str, float]:
    moments = [varreg.moments(p) for p in net.parameters()]
    found = {name: getattr(gauges, name) for name in GAUGES if name != "cabs"}
    values = {name: gauge(moments) for name, gauge in found.items()}
    return {**values, "cabs": gauges.cabs(moments, LR, LOSS)}


def measured() -> dict[str, float]:
    net, (x, y) = model(), batch()
    with varreg.observe(net):
        cross_entropy(net(x), y).backward()
        return read(net)


def test_against_single_samples():
    assert measured() == pytest.approx(true_gauges(), rel=1e-9)


@pytest.mark.parametrize("sizes", [(1, 4, 7), (6, 1, 5), (3, 3, 3, 3)])
def test_uneven_micro_batches_have_the_gauges_of_the_whole_batch(sizes):
    net, (x, y) = model(), batch()
    with varreg.observe(net):
        for a, b in zip(x.split(sizes), y.split(sizes), strict=True):
            (cross_entropy(net(a), b, reduction="sum") / len(x)).backward()
        assert read(net) == pytest.approx(true_gauges(), rel=1e-9)


@pytest.mark.filterwarnings("ignore")
def test_against_backpack():
    backpack = pytest.importorskip(
        "backpack",
        reason="BackPACK is not installed: pip install --no-deps backpack-for-pytorch",
    )
    from backpack.extensions import BatchGrad

    net, (x, y) = backpack.extend(model()), batch()
    with backpack.backpack(BatchGrad()):
        backpack.extend(nn.CrossEntropyLoss())(net(x), y).backward()
    # BackPACK's are of samples' shares in the mean loss
    truth = definitions([p.grad_batch * len(x) for p in net.parameters()])
    assert measured() == pytest.approx(truth, rel=1e-6)


def test_it_is_what_the_summary_says():
    net, (x, y) = model(), batch()
    observer = varreg.observe(net)
    cross_entropy(net(x), y).backward()
    row, found = observer.summary().model, read(net)
    assert found["noise_scale"] == pytest.approx(row.noise_scale)
    assert found["norm_test"] == pytest.approx(1 / row.snr)


def test_a_sum_over_samples_has_the_same_gauges():
    net, (x, y) = model(), batch()
    with varreg.observe(net, reduction="sum"):
        cross_entropy(net(x), y, reduction="sum").backward()
        assert read(net) == pytest.approx(measured(), rel=1e-9)


def test_elements_that_no_sample_uses_are_left_out():
    table = nn.Embedding(10, 2)
    with varreg.observe(table):
        table(torch.tensor([0, 1, 1, 0])).mul(torch.randn(4, 2)).sum(1).mean().backward()
        m = varreg.moments(table.weight)
        used = [(m.mean[:2].square() / (m.variance[:2] * 4 / 3)).mean()]
        assert gauges.gsnr([m]) == pytest.approx(float(used[0]))


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_shows(bad):
    layer = nn.Linear(3, 1)
    observer = varreg.observe(layer)
    x = torch.randn(8, 3)
    x[5, 1] = bad  # all other elements are finite
    layer(x).mean().backward()
    moments = [varreg.moments(p) for p in layer.parameters()]
    for name in GAUGES:
        gauge = getattr(gauges, name)
        value = gauge(moments, LR, LOSS) if name == "cabs" else gauge(moments)
        assert not math.isfinite(value), name
    assert math.isnan(gauges.noise_scale(moments))
    assert observer.summary().model.text == "a gradient that is not finite"


def test_a_gradient_of_zeros():
    layer = nn.Linear(3, 1)
    observer = varreg.observe(layer)
    (layer(torch.randn(8, 3)) * 0).mean().backward()
    moments = [varreg.moments(p) for p in layer.parameters()]
    assert math.isnan(gauges.norm_test(moments))
    assert observer.summary().model.text == "no gradient"


def test_effective_lambda():
    net, (x, y) = model(), batch()
    optimizer = varreg.VRSGD(net.parameters(), lr=0.1)
    assert math.isnan(gauges.effective_lambda(optimizer))
    with varreg.observe(net):
        for _ in range(2):
            optimizer.zero_grad()
            cross_entropy(net(x), y).backward()
            optimizer.step()
    squares = [p.grad.square() for p in net.parameters()]
    lams = [optimizer.lambda_of(p) for p in net.parameters()]
    weighted = sum(float((a * b).sum()) for a, b in zip(squares, lams, strict=True))
    expected = weighted / sum(float(a.sum()) for a in squares)
    assert gauges.effective_lambda(optimizer) == pytest.approx(expected)


def test_bad_input():
    for bad in ([], [None], [varreg.Moments(1, 1, torch.ones(2), torch.ones(2))]):
        with pytest.raises(varreg.VarregError, match="moments of two samples or more"):
            gauges.norm_test(bad)
    good = [varreg.Moments(2, 2, torch.ones(2), torch.ones(2))]
    with pytest.raises(varreg.VarregError, match="a positive loss; got 0"):
        gauges.cabs(good, 0.1, 0)


def test_one_parameter_without_a_list_and_what_is_not_moments():
    layer = nn.Linear(3, 2)
    varreg.observe(layer)
    layer(torch.randn(8, 3)).square().mean().backward()
    one = varreg.moments(layer.weight)
    assert gauges.norm_test(one) == gauges.norm_test([one])
    for wrong in (3, [3], [layer.weight]):
        with pytest.raises(varreg.VarregError, match=r"what varreg\.moments\(p\) returns"):
            gauges.gsnr(wrong)
    with pytest.raises(varreg.VarregError, match="got none"):
        gauges.gsnr(None)
    with pytest.raises(varreg.VarregError, match="a positive lr; got 'a'"):
        gauges.cabs(one, "a", 1.0)
    with pytest.raises(varreg.VarregError, match="one of varreg's optimizers; got SGD"):
        gauges.effective_lambda(torch.optim.SGD(layer.parameters(), lr=0.1))
