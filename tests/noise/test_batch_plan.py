"""The planner: what it says of other batch sizes."""

from __future__ import annotations

import math

import pytest

import varreg
from varreg.noise import Reading
from varreg.noise.batch_plan import make_plan


def test_the_formulas():
    """B_n = 96, from a batch of 32."""
    plan = make_plan(Reading("", 96.0, 1.0, (48.0, 192.0)), [16, 32, 96, 512], 32)
    rows = list(plan)
    assert len(plan) == 4
    assert [r.batch for r in rows] == [16, 32, 96, 512]
    assert [r.steps for r in rows] == pytest.approx([7 / 4, 1, 2 / 4, (1 + 96 / 512) / 4])
    expected = [(1 + b / 96) / (1 + 32 / 96) for b in (16, 32, 96, 512)]
    assert [r.samples for r in rows] == pytest.approx(expected)
    for r in rows:
        assert r.samples == pytest.approx(r.steps * r.batch / 32)
        assert r.lr == pytest.approx(1 / r.steps)
        assert r.lr_sqrt == pytest.approx(math.sqrt(r.lr))
        ends = [(1 + r.batch / b) / (1 + 32 / b) for b in (192.0, 48.0)]
        assert r.samples_range == pytest.approx(tuple(sorted(ends)))
    assert plan[1].lr == plan[1].lr_sqrt == plan[1].samples == 1


@pytest.mark.parametrize("batch", [8, 64, 4096])
def test_the_ends(batch):
    """Noise alone is the linear rule; signal alone gains nothing from samples."""
    noisy = make_plan(Reading("", 1.0, 0.0, (1e9, math.inf)), [batch], 32)[0]
    assert (noisy.lr, noisy.samples) == pytest.approx((batch / 32, 1.0))
    assert noisy.lr_sqrt == pytest.approx(math.sqrt(batch / 32))
    clean = make_plan(Reading("", 0.0, 1.0, (0.0, 0.0)), [batch], 32)[0]
    assert (clean.lr, clean.samples) == pytest.approx((1.0, batch / 32))


def test_what_it_prints_and_saves():
    plan = make_plan(Reading("", 96.0, 1.0, (48.0, 192.0)), [32, 512], 32)
    lines = str(plan).splitlines()
    assert lines[0].split() == ["batch", "steps", "samples", "(range)", "lr,", "SGD", "lr,", "Adam"]
    assert "0.297 ×" in lines[3]
    assert lines[-1].startswith("Noise scale 96 (48 to 190). To the same loss, relative to")
    saved = plan.as_dict()
    assert saved["now"] == 32
    assert saved["rows"][1]["batch"] == 512


def test_the_figure_shows_the_rows():
    pytest.importorskip("matplotlib")
    figure = make_plan(Reading("", 96.0, 1.0, (48.0, 192.0)), [32, 128, 512], 32).plot()
    left, right = figure.axes
    points = [line for line in left.lines if line.get_marker() == "o"]
    assert [list(line.get_xdata()) for line in points] == [[32, 128, 512]] * 2
    assert list(points[1].get_ydata()) == pytest.approx([1.0, (1 + 128 / 96) * 0.75, 4.75])
    assert [line.get_label() for line in right.lines][:2] == ["SGD", "Adam: its root"]


@pytest.mark.parametrize("batches", [[], [0], [-4], [2.5], 32, ["32"], [True]])
def test_bad_batches(batches):
    with pytest.raises(varreg.VarregError, match="plan\\(\\) expects batch sizes, positive whole"):
        make_plan(Reading("", 1.0, 1.0, (1.0, 1.0)), batches, 32)
    with pytest.raises(varreg.VarregError, match="now=0"):
        make_plan(Reading("", 1.0, 1.0, (1.0, 1.0)), [4], 0)
