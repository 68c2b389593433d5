"""λ and the error of its own batch: independent where samples are normal and λ is of v², and not otherwise."""

from __future__ import annotations

import pytest

from varreg.theory.same_batch import share_of_error


def test_of_normal_samples():
    assert share_of_error(scale_free=False).is_equal


def test_of_skewed_samples():
    assert not share_of_error(scale_free=False, shape="exponential").is_equal


@pytest.mark.parametrize("history", ["mean", "geometric", "harmonic"])
def test_rho_gives_long_steps_to_large_errors(history):
    assert share_of_error(scale_free=True, noise=3.0, history=history).value > 1.15


def test_rho_without_noise():
    """Where the error is small against the gradient, ρ is v² over a constant, and all is well."""
    assert share_of_error(scale_free=True, noise=0.03).is_equal


def test_bad_input():
    with pytest.raises(ValueError, match="must be one of normal, exponential"):
        share_of_error(True, "square")
