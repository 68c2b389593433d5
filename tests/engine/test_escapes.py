"""Values of the batch that leave torch, or that a choice for all samples is made from."""

from __future__ import annotations

import pytest
import torch

import varreg
from tests.support.model_table import BATCH, Fn
from tests.support.small_net import linear


def doubled_where(choose):
    """Double all samples where a choice says so, which no batch makes before the sixth step."""
    return lambda s, x: s.l(x) * (2.0 if choose(x) else 1.0)


CHOICES = {
    "answer": doubled_where(lambda x: (x > 3).any()),
    "item": doubled_where(lambda x: x.max().item() > 3),
    "float": doubled_where(lambda x: float(x.max()) > 3),
    "count": doubled_where(lambda x: int((x > 3).sum()) > 0),
    "smallest": doubled_where(lambda x: (-x).min().item() < -3),
    "where": lambda s, x: torch.where((x > 3).any(), 2 * s.l(x), s.l(x)),
    "where-of-features": lambda s, x: torch.where((x > 3).any(0), 2 * s.l(x), s.l(x)),
}


@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_that_is_first_made_between_two_trials_is_refused(name):
    model = Fn(CHOICES[name], l=linear(4, 4))
    varreg.observe(model)
    for step in range(6):
        x = torch.randn(BATCH, 4).clamp(-2, 2)
        x[0, 0] += 8 if step == 5 else 0
        if step < 5:
            model(x).square().sum().backward()
    with pytest.raises(varreg.VarregError, match="takes values of the batch out of torch"):
        model(x)


def test_numbers_that_grow_all_the_time_are_tried_seldom(monkeypatch):
    from varreg.engine import escapes

    tried = []
    trial = escapes.try_forward
    monkeypatch.setattr(escapes, "try_forward", lambda *a: tried.append(1) or trial(*a))
    model = Fn(lambda s, x: s.l(x) + 0 * x.max().item(), l=linear(4, 4))
    varreg.observe(model)
    for step in range(70):
        model(torch.randn(3, 4) + 9 * step)
    # the first 16 records, the 32nd and 64th; the first four times, and the 8th, 16th, … one
    assert len(tried) <= 22


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_function_is_found_in_code_without_a_module(tmp_path, monkeypatch):
    (tmp_path / "scripted_for_test.py").write_text(
        "import torch\n\n@torch.jit.script\ndef mean_of(x: torch.Tensor) -> float:\n"
        "    return float(x.mean())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    names = {}
    exec(
        "from scripted_for_test import mean_of\n"
        "def helper(x): return mean_of(x)\n"
        "def forward(s, x): return s.l(x) * helper(x)",
        names,
    )
    model = Fn(names["forward"], l=linear(4, 4))
    varreg.observe(model)
    with pytest.raises(varreg.VarregError, match="a scripted function takes values"):
        model(torch.randn(BATCH, 4))
