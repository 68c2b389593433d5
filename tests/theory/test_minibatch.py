"""S2.2, with the engine itself: E[v²] = (m − 1)σ² for samples that are drawn independently, and not
otherwise.
"""

from __future__ import annotations

import pytest

from varreg.theory.minibatch import ratio


@pytest.mark.parametrize("m", [2, 5, 16])
def test_s2_2(m):
    found = ratio(m, 1500)
    assert found.error < 0.05 * (m - 1)
    assert found.value == pytest.approx(m - 1, abs=4 * found.error)


def test_samples_that_depend_on_each_other_are_found_out():
    """16 of 40 samples without replacement: the mean varies less, by (n − m)/(n − 1), and the ratio
    is larger.
    """
    found = ratio(16, 1500, replace=False)
    assert found.value > 15 + 8 * found.error
    assert found.value == pytest.approx(15 * 40 / 24, abs=4 * found.error)


def test_a_batch_of_one():
    with pytest.raises(ValueError, match="at least 2 samples"):
        ratio(1, 10)
