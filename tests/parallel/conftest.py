"""What the tests over several processes compare with."""

from __future__ import annotations

import pytest

from tests.support import ranks
from tests.support.once import once


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process ends with."""
    return once(tmp_path_factory, "alone", lambda: ranks.together(0, 1))
