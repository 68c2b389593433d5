"""The errors for parameters whose moments are those of one process."""

from __future__ import annotations

import pytest
import torch

from tests.support.noisy_regression import training
from varreg.errors import MeasurementError
from varreg.optim.synchronized import check_synchronized


def test_who_has_no_s_is_not_told_of_it(monkeypatch):
    model, _ = next(training(1))
    model.zero_grad()
    model(torch.randn(3, 6).double()).sum().backward()
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(MeasurementError, match="or use s=0"):
        check_synchronized(model.parameters())
    with pytest.raises(MeasurementError) as raised:
        check_synchronized(model.parameters(), steps=False)
    assert "s=0" not in str(raised.value)
