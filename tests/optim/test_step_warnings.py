"""The warning of steps that stay long."""

from __future__ import annotations

import warnings

import pytest

from tests.support.noisy_regression import STRETCH, training
from varreg.thresholds import LAMBDA_EVERY


def messages(**options):
    """The warnings of a training, each with the number of its step."""
    found = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step, _ in enumerate(training(STRETCH + 3 * LAMBDA_EVERY, **options), 1):
            found += [(step, str(w.message)) for w in caught]
            caught.clear()
    return found


@pytest.mark.parametrize("options", [{}, {"per": "tensor", "history": "sum"}, {"momentum": 0.9}])
def test_steps_that_stay_long_are_warned_of_once(options):
    given = {"history": "sum", **options}
    [(step, said)] = messages(**given)
    assert step == STRETCH
    assert "VRSGD" in said
    assert "calibrate=True" in said
    assert "smaller learning rate" in said


def test_who_calibrates_is_told_what_is_left():
    [(_, said)] = messages(history="sum", calibrate=True, lambda_min=2.5)
    assert "calibrate" not in said
    assert "smaller learning rate" in said


@pytest.mark.parametrize(
    "options", [{"calibrate": True}, {"history": "harmonic"}, {"s": 0.5, "history": "sum"}]
)
def test_steps_of_the_usual_length_are_not_warned_of(options):
    assert messages(**options) == []


def test_a_few_long_steps_are_not_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step, (_, optimizer) in enumerate(training(2 * STRETCH, history="sum"), 1):
            optimizer.param_groups[0]["s"] = 0.3 if step // LAMBDA_EVERY % 3 == 2 else 2.0
