"""Uses without a rule, in low precision."""

from __future__ import annotations

import pytest
import torch

import varreg
from tests.support.model_table import Fn, weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_general_rule_in_low_precision(dtype):
    model = Fn(lambda s, x: torch.einsum("btd,de->bte", x, s.w), w=weight(256, 256)).float()
    varreg.observe(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        out = model(torch.randn(2, 128, 256, dtype=torch.float32))
    out.float().square().mean().backward()
    assert varreg.moments(model.w).count == 2
    model.zero_grad()
    (
        model(torch.randn(2, 8, 256, dtype=torch.float32)).sum() * torch.inf
    ).backward()  # a loss scale that is too large
