"""Intervals of a ratio of averages: how often they hold a truth that is known."""

from __future__ import annotations

import math

import pytest
import torch
from benchmarks import noise_interval, noise_truth

from varreg.noise.interval import covariance_of_mean, quantile, ratio_intervals

M, D = 16, 20  # samples of a batch, and elements of a gradient with variance 1 each


def series(repeats: int, n: int, square: float, alike: float = 0.0, spread: float = 0.0):
    """(tr Σ, |Ĝ|²) of n batches of normal gradients; the true gradient, of the given square, is
    multiplied by 1 + spread·a, with a of first-order autocorrelation `alike`.

    The second result is B_n: from the expectations, and from the averages of each series.
    """
    true = math.sqrt(square) * (1 + spread * alike_path(repeats, n, alike))
    over_time = D / true.square().mean(1)
    truth = D / (square * (1 + spread**2)) if square else math.inf
    return batches(true, M), truth, over_time


def alike_path(repeats: int, n: int, alike: float) -> torch.Tensor:
    """Return normal series of first-order autocorrelation `alike`."""
    a = torch.randn(repeats, n)
    for t in range(1, n):
        a[:, t] = alike * a[:, t - 1] + math.sqrt(1 - alike**2) * a[:, t]
    return a


def batches(true: torch.Tensor, m: int, noise: torch.Tensor | float = 1.0) -> torch.Tensor:
    """Return (tr Σ, |Ĝ|²) of batches of m samples, whose true gradients have these lengths, and
    whose elements have this variance.
    """
    noise = torch.as_tensor(noise).expand(true.shape)
    mean = torch.randn(*true.shape, D) * (noise / m).sqrt().unsqueeze(-1)
    mean[..., 0] += true
    trace = torch._standard_gamma(torch.full(true.shape, (m - 1) * D / 2)) * 2 / (m - 1) * noise
    return torch.stack([trace, mean.square().sum(-1) - trace / m], -1)


def coverage(intervals, truths) -> float:
    pairs = list(zip(intervals, truths, strict=True))
    return sum(low <= truth <= high for (low, high), truth in pairs) / len(pairs)


@pytest.mark.parametrize("square", [10.0, 1.0, 0.1, 0.001])
@pytest.mark.parametrize("n", [20, 100])
def test_it_holds_the_truth_19_times_in_20(n, square):
    rows, truth, _ = series(600, n, square)
    found = ratio_intervals(rows)
    assert 0.915 <= coverage(found, [truth] * 600) <= 0.995
    if square >= 1:  # and it is no wider than it has to be: bounded, where there is a signal
        assert sum(math.isinf(high) for _, high in found) < 0.05 * 600


@pytest.mark.parametrize(("alike", "least"), [(0.5, 0.89), (0.8, 0.82), (0.95, 0.5)])
def test_neighbours_that_are_alike(alike, least):
    """Fewer intervals hold the mean of the process; what was true in these steps, as many."""
    rows, truth, over_time = series(500, 150, 1.0, alike, 0.4)
    found = ratio_intervals(rows)
    assert coverage(found, [truth] * 500) > least
    assert coverage(found, over_time.tolist()) > 0.94  # what was true in these steps


t = torch.arange(150.0)
DRIFTS = {  # |G|² and tr Σ/D over 150 steps
    "the signal falls early": (10 * torch.exp(-t / 15) + 0.3, 1.0),
    "the signal grows ten times": (0.2 + 2 * t / 150, 1.0),
    "both grow": (0.2 + 2 * t / 150, 0.2 + 2 * t / 150),
    "few steps have most of the signal": (torch.where(t % 30 == 7, 30.0, 0.5), 1.0),
}


@pytest.mark.parametrize("name", DRIFTS)
def test_a_truth_that_drifts(name):
    """The interval holds B_n of the steps together. Steps that differ only make it wider."""
    square, noise = (torch.as_tensor(x).expand(300, 150) for x in DRIFTS[name])
    rows = batches(square.sqrt(), M, noise)
    truth = D * float(noise[0].mean() / square[0].mean())
    assert coverage(ratio_intervals(rows), [truth] * 300) > 0.93


@pytest.mark.parametrize("alike", [0.0, 0.5, 0.8, 0.95])
def test_a_truth_from_ten_steps_has_an_error_of_its_own(alike):
    """|G|² changes from step to step by a factor of two and more. The interval holds what was true
    in these steps. What ten of the 200 steps say is outside of it more often: they are too few,
    which their own interval tells.
    """
    true = torch.exp(0.4 * alike_path(300, 200, alike))
    rows, points = batches(true, M), batches(true[:, 19::20], 500)
    intervals = ratio_intervals(rows)
    assert coverage(intervals, (D / true.square().mean(1)).tolist()) > 0.94
    checks = [
        {"NoiseScale": x.tolist(), "interval": i, "along": y.tolist(), "interval along": j}
        for x, i, y, j in zip(
            rows.mean(1), intervals, points.mean(1), ratio_intervals(points), strict=True
        )
    ]
    alone = sum(map(noise_truth.holds, checks)) / 300
    together = sum(noise_truth.holds(check, True) for check in checks) / 300
    assert together > 0.85
    assert alone < 0.7 or alike > 0.6


def test_the_checks_of_a_training_compare_with_three_truths():
    """B_n of a window's steps, of the steps after it, and of its last one."""
    square = torch.linspace(1.0, 2.0, 500, dtype=torch.float64)
    series = torch.cat([batches(square.sqrt(), M), torch.stack([0 * square + D, square], 1)], 1)
    first, second = noise_interval.judged(series)
    assert (first["step"], second["step"]) == (200, 400)
    assert first["last"] == series[199, 2:].tolist()
    assert first["steps"][1] == pytest.approx(float(square[:200].mean()))
    assert first["next"] == second["steps"]
    assert second["next"][1] == pytest.approx(float(square[400:].mean()))
    assert first["interval"] == list(ratio_intervals(series[None, :200, :2])[0])
    table = noise_interval.table({"runs": {"SGD": {"0": [first, second]}}})
    assert table.splitlines()[2].startswith("| SGD | 2 of 2 |")


def test_no_signal_means_at_least():
    rows, _, _ = series(300, 50, 0.0)
    found = ratio_intervals(rows)
    unbounded = [low for low, high in found if math.isinf(high)]
    assert len(unbounded) > 0.93 * 300
    # |Ĝ|² has standard deviation √(2D)/M: two standard errors of 50 averages
    expected = D / (2 * math.sqrt(2 * D) / M / math.sqrt(50))
    assert expected / 3 < sorted(unbounded)[len(unbounded) // 2] < 3 * expected


def test_the_covariance_of_independent_rows_is_the_textbook_one():
    rows = torch.randn(50, 500, 2) * torch.tensor([1.0, 5.0])
    rows[..., 1] += rows[..., 0]
    found, independent = covariance_of_mean(rows)
    expected = torch.tensor([[1.0, 1.0], [1.0, 26.0]]) / 500
    torch.testing.assert_close(found.mean(0), expected, rtol=0.1, atol=4e-4)
    assert (independent > 300).all()


def test_the_variance_of_the_mean_of_an_autocorrelated_series():
    a = torch.randn(400, 500)
    for t in range(1, 500):
        a[:, t] += 0.7 * a[:, t - 1]
    found, independent = covariance_of_mean(torch.stack([a, torch.randn(400, 500)], -1))
    assert float(found[:, 0, 0].mean()) == pytest.approx(float(a.mean(1).var()), rel=0.25)
    assert float(independent.mean()) == pytest.approx(500 * 0.3 / 1.7, rel=0.25)


def test_quantiles_are_those_of_student():
    """Two standard errors of a normal are 95.45 %; t with 4, 9 and 99 degrees of freedom."""
    expected = torch.tensor([2.869, 2.320, 2.025])
    torch.testing.assert_close(
        quantile(torch.tensor([5.0, 10.0, 100.0])), expected, rtol=0.02, atol=0
    )


def test_edges():
    assert ratio_intervals(torch.ones(1, 1, 2)) == [(0.0, math.inf)]  # one row says nothing
    none = torch.zeros(1, 5, 2)
    assert ratio_intervals(none + torch.tensor([0.0, 1.0])) == [(0.0, 0.0)]  # no noise
    assert ratio_intervals(none + torch.tensor([1.0, 0.0])) == [(math.inf, math.inf)]  # no signal
    ((low, high),) = ratio_intervals(none + torch.tensor([6.0, 2.0]))  # no doubt
    assert low == pytest.approx(3.0) == high
    tiny, _, _ = series(1, 50, 1.0)
    assert ratio_intervals(tiny * 1e-30)[0] == pytest.approx(ratio_intervals(tiny)[0])
