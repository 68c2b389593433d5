"""The noise scale while training: against its definition, one sample at a time, in float64."""

from __future__ import annotations

import io
import math

import pytest
import torch
from torch import nn

import varreg
from tests.support.truth import losses, one_at_a_time, sample_weights
from varreg.noise import measure
from varreg.noise.measure import l1_sums
from varreg.noise.recent import Recent

CLOSE = {"rel": 1e-9}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def per_sample(net, x):
    """Gradients of each sample's own loss, [batch, *shape] by name."""
    return one_at_a_time(net, (x,), sample_weights(len(x)))


def backward(net, x, reduction="mean", parts=1):
    weights = sample_weights(len(x))
    for xs, ws in zip(x.chunk(parts), weights.chunk(parts), strict=True):
        total = losses(net(xs), ws).sum()
        (total if reduction == "sum" else total / len(x)).backward()


def definition(gradients, names=None):
    """tr Σ and |Ĝ|² of parameters, from the gradients of single samples."""
    trace = signal = 0.0
    for name, g in gradients.items():
        if names is None or name in names:
            s2 = g.var(0, unbiased=True)
            trace += float(s2.sum())
            signal += float((g.mean(0).square() - s2 / len(g)).sum())
    return trace, signal


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_averages_are_those_of_the_definition(reduction, parts):
    net = model()
    batches = [torch.randn(8, 4) for _ in range(5)]
    truths = [per_sample(net, x) for x in batches]
    noise = varreg.NoiseScale(varreg.observe(net, reduction=reduction))
    for x in batches:
        net.zero_grad()
        backward(net, x, reduction, parts)
        nn.utils.clip_grad_norm_(net.parameters(), 1e-3)  # moments are untouched
        noise.update()
    rows = [definition(g) for g in truths]
    trace, signal = (sum(column) / 5 for column in zip(*rows, strict=True))
    assert noise.model.noise == pytest.approx(trace, **CLOSE)
    assert noise.model.signal == pytest.approx(signal, **CLOSE)
    assert noise.value == pytest.approx(trace / signal, **CLOSE)
    assert noise.batch == 8
    assert [r.name for r in noise.layers] == ["0", "2"]
    for layer in noise.layers:
        mine = {f"{layer.name}.weight", f"{layer.name}.bias"}
        rows = [definition(g, mine) for g in truths]
        trace, signal = (sum(column) / 5 for column in zip(*rows, strict=True))
        assert (layer.noise, layer.signal) == pytest.approx((trace, signal), **CLOSE)
    low, high = noise.interval
    assert low < noise.value < high


@pytest.mark.parametrize("l1", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_without_native_code_it_is_the_same(l1, reduction, monkeypatch):
    """For all parameters, and where native code serves only some of them."""
    serves, rows = varreg.native.serves, []
    for served in (lambda t: True, lambda t: False, lambda t: t.dim() == 2):
        with monkeypatch.context() as patch:
            patch.setattr(
                "varreg.native.serves", lambda *t, served=served: served(t[0]) and serves(*t)
            )
            net = model()
            noise = varreg.NoiseScale(varreg.observe(net, reduction=reduction), l1=l1)
            for seed in range(3):
                torch.manual_seed(seed)
                net.zero_grad()
                backward(net, torch.randn(6, 4), reduction)
                noise.update()
            rows.append(noise.state_dict()["rows"][:3])
    assert rows[0].shape == (3, 2, 5 if l1 else 2)
    for other in rows[1:]:
        torch.testing.assert_close(rows[0], other, rtol=1e-9, atol=0)


def test_groups_estimate_the_same():
    """Over many batches at fixed parameters, the averages from 4 groups are those of samples."""
    found = []
    for groups in (None, 4):
        torch.manual_seed(1)
        net = nn.Linear(3, 1, bias=False)
        noise = varreg.NoiseScale(varreg.observe(net, groups=groups), window=150)
        for _ in range(150):  # gradients are the inputs
            net.zero_grad()
            net(torch.tensor([1.0, 0.0, -1.0]) + 2 * torch.randn(8, 3)).mean().backward()
            noise.update()
        found.append(noise)
    exact, grouped = found
    assert exact.model.noise == pytest.approx(12, rel=0.06)
    assert grouped.model.noise == pytest.approx(12, rel=0.1)
    for noise in found:
        assert noise.interval[0] < 6 < noise.interval[1]  # tr Σ/|G|² = 12/2


def test_the_ratio_of_averages_and_not_the_average_of_ratios():
    """Batches far below the noise scale: many single ratios are infinite."""
    torch.manual_seed(0)
    net = nn.Linear(4, 1, bias=False)
    noise = varreg.NoiseScale(varreg.observe(net), window=400)
    for _ in range(400):
        net.zero_grad()
        net(0.35 + torch.randn(2, 4)).mean().backward()
        noise.update()
    truth = 1 / 0.35**2
    assert noise.interval[0] < truth < noise.interval[1]
    assert noise.value == pytest.approx(truth, rel=0.3)
    signals = noise.state_dict()["rows"][:, 0, 1]
    assert (signals <= 0).sum() > 80


def test_pure_noise_is_at_least_something():
    torch.manual_seed(0)
    net = nn.Linear(10, 1, bias=False)
    noise = varreg.NoiseScale(varreg.observe(net))
    for _ in range(50):
        net.zero_grad()
        net(torch.randn(8, 10)).mean().backward()
        noise.update()
    low, high = noise.interval
    assert math.isinf(high)
    assert low > 8
    assert noise.model.text.startswith("at least ")
    assert "at least" in str(noise)
    assert "at least" in repr(noise)


def test_values_without_signal_noise_or_updates():
    reading = varreg.noise.Reading
    assert reading("", 3.0, -1.0, (1.0, math.inf)).value == math.inf
    assert reading("", 0.0, 2.0, (0.0, 0.0)).value == 0.0
    assert reading("", 3.0, 1.5, (1.0, 4.0)).text == "2.0 (1.0 to 4.0)"
    unknown = reading("", 3.0, 1.5, (0.0, math.inf)).text
    assert unknown == "unknown (too few or too different updates)"
    assert reading("", 3.0, 0.0, (math.inf, math.inf)).text == "infinite (no signal at all)"
    noise = varreg.NoiseScale(varreg.observe(nn.Linear(1, 1)))
    assert math.isnan(noise.value)
    assert "no noise scale yet; call update()" in str(noise)
    assert repr(noise) == "NoiseScale(not measured yet, from 0 updates)"


def test_the_window_forgets():
    net = nn.Linear(2, 1, bias=False)
    noise = varreg.NoiseScale(varreg.observe(net), window=3)
    traces = []
    for spread in (1.0, 2.0, 3.0, 4.0, 5.0):
        net.zero_grad()
        x = spread * torch.randn(6, 2)
        net(x).mean().backward()
        noise.update()
        traces.append(float(x.var(0).sum()))
    assert noise.model.noise == pytest.approx(sum(traces[2:]) / 3, **CLOSE)
    assert noise.updates == 5


def test_a_checkpoint_goes_on(tmp_path):
    torch.manual_seed(3)
    batches = [torch.randn(6, 4) for _ in range(7)]
    net = model()
    whole = varreg.NoiseScale(varreg.observe(net), window=4)
    for t, x in enumerate(batches):
        net.zero_grad()
        backward(net, x)
        whole.update()
        if t == 4:
            torch.save(whole.state_dict(), tmp_path / "noise.pt")
    again = model()
    resumed = varreg.NoiseScale(varreg.observe(again))
    resumed.load_state_dict(torch.load(tmp_path / "noise.pt", weights_only=True))
    for x in batches[5:]:
        again.zero_grad()
        backward(again, x)
        resumed.update()
    assert (resumed.value, resumed.interval) == (whole.value, whole.interval)
    assert [r.value for r in resumed.layers] == [r.value for r in whole.layers]
    assert (resumed.window, resumed.updates, resumed.batch) == (4, 7, 6)


def test_a_checkpoint_of_something_else():
    noise = varreg.NoiseScale(varreg.observe(model()))
    other = nn.Sequential(nn.Linear(4, 2))
    wrong = varreg.NoiseScale(varreg.observe(other))
    backward(other, torch.randn(4, 4))
    wrong.update()
    good = wrong.state_dict()
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    with pytest.raises(varreg.VarregError, match="of another model: this one has no layer 0"):
        varreg.NoiseScale(varreg.observe(net)).load_state_dict(good)
    with pytest.raises(varreg.VarregError, match="l1=False, this one True"):
        varreg.NoiseScale(varreg.observe(model()), l1=True).load_state_dict(good)
    changes = {
        "updates": ("many", -1, True, 0),
        "layers": (["0", "0"], [0]),
        "rows": (good["rows"][:3], good["rows"].int(), None),
        "window": (1, 3.0),
        "batch": (-4,),
    }
    bads = [{**good, key: value} for key, values in changes.items() for value in values]
    for bad in ({}, None, 3, [1], *bads):
        with pytest.raises(varreg.VarregError, match=r"expects the result of its state_dict\(\)"):
            noise.load_state_dict(bad)


def test_steps_that_are_not_finite_are_left_out():
    net = model()
    noise = varreg.NoiseScale(varreg.observe(net))
    for t in range(4):
        net.zero_grad()
        x = torch.randn(6, 4)
        backward(net, x * (math.inf if t == 2 else 1.0))
        noise.update()
    assert math.isfinite(noise.value)
    assert noise.updates == 4
    assert "Averages over 3 updates;" in str(noise)
    assert str(noise).endswith("Left out, since not finite: 1 of the last 4.")


def test_sums_follow_a_model_that_is_moved():
    """`meta` is a device that holds no data."""
    recent = Recent(3)
    recent.add(["a.weight"], [[1.0, 2.0]])
    recent.add(["a.weight"], torch.ones(1, 2))
    assert recent.rows()[:2].tolist() == [[[1.0, 2.0]], [[1.0, 1.0]]]
    recent.add(["a.weight"], torch.ones(1, 2, device="meta"))
    assert recent.rows().device.type == "meta"


def test_a_layer_that_joins_late_had_no_gradient_before():
    net = model()
    net[2].requires_grad_(False)
    noise = varreg.NoiseScale(varreg.observe(net))
    backward(net, torch.randn(6, 4))
    noise.update()
    assert [r.name for r in noise.layers] == ["0"]
    net.requires_grad_(True)
    net.zero_grad()
    x = torch.randn(6, 4)
    backward(net, x)
    noise.update()
    trace, _ = definition(per_sample(net, x), {"2.weight", "2.bias"})
    assert [r.name for r in noise.layers] == ["0", "2"]
    assert noise.layers[1].noise == pytest.approx(trace / 2, **CLOSE)


def test_nothing_is_read_back():
    """An update on a device that holds no data: it cannot read a number."""
    rows = torch.randn(6, 4)
    net = model()
    noise = varreg.NoiseScale(varreg.observe(net))
    backward(net, rows)
    found = noise._measured()
    meta = [
        measure.Measured(
            f.parameter.to("meta"),
            f.ledger,
            varreg.Moments(
                f.moments.count,
                f.moments.groups,
                f.moments.total.to("meta"),
                f.moments.square.to("meta"),
            ),
        )
        for f in found
    ]
    assert measure.estimates(meta).shape == (4, 2)
    assert measure.estimates(meta, l1=True).shape == (4, 5)


def test_bad_input():
    net = model()
    observer = varreg.observe(net)
    with pytest.raises(
        varreg.VarregError, match=r"the observer that varreg.observe\(model\) returns"
    ):
        varreg.NoiseScale(net)
    for window in (1, 2.0, True):
        with pytest.raises(varreg.VarregError, match="window must be a whole number"):
            varreg.NoiseScale(observer, window=window)
    noise = varreg.NoiseScale(observer)
    with pytest.raises(varreg.VarregError, match=r"finds no moments\. Call it after backward"):
        noise.update()
    with pytest.raises(varreg.VarregError, match="nothing to plan with"):
        noise.plan([32])
    backward(net, torch.randn(1, 4))
    with pytest.warns(UserWarning, match="leaves out a batch of one sample"):
        noise.update()
    noise.update()  # said once
    assert noise.updates == 0
    observer.remove()
    with pytest.raises(varreg.VarregError, match="observer was removed"):
        noise.update()


def test_a_gradient_that_is_not_measured_is_an_error():
    net = model()
    net.extra = nn.Parameter(torch.ones(2))
    noise = varreg.NoiseScale(varreg.observe(net))
    x = torch.randn(6, 4)
    with pytest.warns(UserWarning, match="no moments"):
        (net(x).square().mean() + net.extra.square().sum()).backward()
    with pytest.raises(varreg.VarregError, match="'extra' has a gradient that was not measured"):
        noise.update()
    assert noise.updates == 0
    net.zero_grad()
    net(x).square().mean().backward()
    noise.update()  # nothing asks for the other one
    assert [r.name for r in noise.layers] == ["extra", "0", "2"]


# ---- ℓ1 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "bias"), [(0.0, 0.42), (0.3, 0.17), (1.0, 0.12), (2.0, 0.08), (5.0, 0.02)]
)
def test_the_truth_is_between_the_two_estimates_of_its_size(size, bias):
    """Of 20,000 elements with a mean of `size` standard errors, s = 1; and their middle is off by
    no more than `bias` standard errors.
    """
    m = 200
    torch.manual_seed(0)
    mean = (size + torch.randn(20_000)) / math.sqrt(m)
    variance = torch._standard_gamma(torch.full((20_000,), (m - 1) / 2)) * 2 / m
    moments = varreg.Moments(m, m, mean, (variance + mean.square()) / m)
    s, upper, excess = l1_sums(moments).tolist()
    truth = 20_000 * size / math.sqrt(m)
    slack = 20_000 / math.sqrt(m) * 0.03  # 4 standard errors of the sums
    assert s == pytest.approx(20_000, rel=0.01)
    assert upper - excess - slack < truth < upper + slack
    middle = upper - excess / 2
    assert abs(middle - truth) < bias * 20_000 / math.sqrt(m)


def test_the_l1_version():
    torch.manual_seed(0)
    net = nn.Linear(50, 1, bias=False)
    mean, spread = torch.linspace(-1, 1, 50), torch.linspace(0.5, 2, 50)
    noise = varreg.NoiseScale(varreg.observe(net), l1=True)
    for _ in range(60):
        net.zero_grad()
        net(mean + spread * torch.randn(32, 50)).mean().backward()
        noise.update()
    truth = float(spread.sum() ** 2 / mean.abs().sum() ** 2)
    assert noise.interval[0] < truth < noise.interval[1]
    assert noise.value == pytest.approx(truth, rel=0.1)
    assert "ℓ1" in repr(noise)
    buffer = io.BytesIO()
    torch.save(noise.state_dict(), buffer)
    buffer.seek(0)
    again = varreg.NoiseScale(noise.observer, l1=True)
    again.load_state_dict(torch.load(buffer, weights_only=True))
    assert again.value == noise.value


@pytest.mark.parametrize("every", [1, 3, 50])
def test_reading_in_between_changes_nothing(every):
    """Rows wait as Python numbers until they are read: also where the window is full, and where a
    layer joins in between.
    """
    net, other = model(), model()
    net[2].requires_grad_(False)
    noise = varreg.NoiseScale(varreg.observe(net), window=5)
    truths = []
    for t in range(12):
        if t == 8:
            net.requires_grad_(True)
        net.zero_grad()
        x = torch.randn(6, 4)
        gradients = per_sample(other, x)
        backward(net, x)
        noise.update()
        mine = [n for n, p in net.named_parameters() if p.requires_grad]
        truths.append(definition(gradients, mine))
        if t % every == 0:
            assert noise.latest.sum(0).tolist() == pytest.approx(truths[-1], **CLOSE)
    trace, signal = (sum(column) / 5 for column in zip(*truths[-5:], strict=True))
    assert (noise.model.noise, noise.model.signal) == pytest.approx((trace, signal), **CLOSE)
    assert [r.name for r in noise.layers] == ["0", "2"]
