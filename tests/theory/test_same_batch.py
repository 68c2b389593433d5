"""λ and the error of its own batch: independent where samples are normal and λ is of v², and not
otherwise.
"""

from __future__ import annotations

import pytest

from varreg.theory.same_batch import own_batch


@pytest.mark.parametrize("noise", [0.1, 1.0, 3.0])
def test_of_normal_samples(noise):
    found = own_batch(scale_free=False, noise=noise)
    assert found.progress.is_equal
    assert found.noise.is_equal


def test_skewed_samples():
    """With the long tail along the gradient progress is lost, and against it won: λ cuts the
    batches short that have large samples.
    """
    along, against = (own_batch(False, "exponential", along) for along in (True, False))
    assert along.progress.value < 0.75
    assert against.progress.value > 1.25
    assert not along.noise.is_equal


@pytest.mark.parametrize("history", ["mean", "geometric", "harmonic"])
def test_rho_gives_long_steps_to_large_errors_and_those_go_further(history):
    found = own_batch(scale_free=True, noise=3.0, history=history)
    assert found.noise.value > 1.15
    assert found.progress.value > 1.15


def test_rho_without_noise():
    """Where the error is small against the gradient, ρ is v² over a constant, and all is well."""
    found = own_batch(scale_free=True, noise=0.01)
    assert found.progress.is_equal
    assert found.noise.is_equal


def test_bad_input():
    with pytest.raises(ValueError, match="must be one of normal, exponential"):
        own_batch(True, "square")
