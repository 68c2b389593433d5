"""Parameters from which another tensor is made before it meets the batch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import varreg
from tests.support.model_table import Fn


@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
@pytest.mark.parametrize("layer", [nn.Linear(4, 3), nn.Conv1d(4, 3, 3, padding=1)])
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_a_weight_that_a_hook_makes_is_no_output(norm, layer):
    """Hooks leave it in an attribute of the layer, and forward() uses it from there."""
    model = nn.Sequential(nn.Tanh(), norm(copy.deepcopy(layer).double())).eval()
    x = torch.randn(5, 4, 6) if isinstance(layer, nn.Conv1d) else torch.randn(5, 4)

    def gradients(samples):
        model.zero_grad()
        model(samples).square().flatten(1).mean(1).mean().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    alone = [gradients(x[i : i + 1]) for i in range(len(x))]
    with varreg.observe(model):
        gradients(x)
        for name, p in model.named_parameters():
            each = torch.stack([one[name] for one in alone])
            expected = each.square().mean(0)
            torch.testing.assert_close(varreg.moments(p).second_moment, expected)
        model.zero_grad()
        loss = model(x).square().mean()
        penalty = model[1].weight.square().sum()  # it is no sample's
        with pytest.raises(varreg.VarregError, match="from outside"):
            (loss + penalty).backward()


def test_a_parameter_that_goes_through_a_coarser_type():
    """Mamba adds `bias.float().to(x.dtype)`: a gradient's rounding is that of float32, and no
    gradient from outside.
    """
    torch.manual_seed(0)
    bias, weight = nn.Parameter(torch.randn(64).double()), nn.Linear(64, 64).double()
    model = Fn(lambda s, x: s.l(x) + s.bias.float().to(x.dtype)[None], l=weight, bias=bias)
    x = torch.randn(16, 64).double()
    rows = []
    for i in range(len(x)):
        one = copy.deepcopy(model)
        one(x[i : i + 1]).square().sin().sum().backward()
        rows.append(one.bias.grad)
    truth = torch.stack(rows)
    varreg.observe(model)
    (model(x).square().sin().sum() / len(x)).backward()
    m = varreg.moments(bias)
    assert torch.allclose(m.mean, truth.mean(0), rtol=1e-5, atol=1e-6)
    assert torch.allclose(m.second_moment, truth.square().mean(0), rtol=1e-5, atol=1e-6)
