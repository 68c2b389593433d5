"""Every row of the table of adversarial cases comes out as the promise says: exact, or a refusal that says where."""

from __future__ import annotations

import pytest

from tests.adversarial import CASES
from tests.judge import allowed, judge

ROWS = [pytest.param(case, batch, id=f"{case.family}/{case.name}-{batch}") for case in CASES for batch in case.batches]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("case", "batch"), ROWS)
def test_nothing_is_silent(case, batch):
    outcome = judge(case, batch)
    assert outcome.kind in allowed(case, batch), f"expected {case.expect}, got {outcome}"
