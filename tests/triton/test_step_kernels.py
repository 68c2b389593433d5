"""λ and what it is made of by Triton's interpreter, against their twins in PyTorch."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from varreg import Moments, backends, triton
from varreg import regularizer as vr
from varreg.optim.gradient import products

SPECIAL = [0.0, 1e-30, 0.5, 1e3, 1e30, math.inf, math.nan]


def cases(dtype):
    """Every pair of special values, with and without a past."""
    pairs = zip(*itertools.product(SPECIAL, SPECIAL), strict=True)
    variance, delta = (torch.tensor(t, dtype=dtype) for t in pairs)
    variance, delta = torch.cat([variance, variance]), torch.cat([delta, -delta])
    history, count = torch.zeros_like(delta), torch.zeros_like(delta)
    history[len(SPECIAL) ** 2 :], count[len(SPECIAL) ** 2 :] = 1.5, 3.0
    return variance, delta, history, count


@pytest.mark.parametrize(
    ("dtype", "absent", "options"),
    [
        (torch.float32, False, {"history": "mean"}),
        (torch.float32, True, {"history": "sum", "cap": 0.7}),
        (torch.float64, True, {"history": "harmonic"}),
        (torch.float32, False, {"form": "affine", "lambda_min": 0.4, "lambda_max": 1.1}),
        (torch.float64, False, {"form": "affine", "history": "harmonic", "scale_free": False}),
    ],
)
def test_lambda_equals_its_twin(dtype, absent, options):
    o = {**vr.DEFAULTS, **options}
    variance, delta, *past = cases(dtype)
    present = torch.rand_like(delta).gt(0.3).to(dtype) if absent else None
    ours, theirs = [t.clone() for t in past], [t.clone() for t in past]
    for _ in range(2):
        with backends.use("cpu", triton):
            fast = vr.native_lambdas(variance, delta, *ours, present, vr.limit(5, o), o)
        slow = vr.regularizer(*vr.ratio(variance, delta, *theirs, 5, o, present), o)
        tolerance = 1e-5 if dtype == torch.float32 else 1e-13
        torch.testing.assert_close(fast, slow, rtol=tolerance, atol=tolerance)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_variance_equals_its_twin(dtype):
    total, square = torch.randn(1500, dtype=dtype), torch.rand(1500, dtype=dtype)
    for m in (Moments(5, 5, total, square), Moments(7, 3, total, square, "sum")):
        with backends.use("cpu", triton):
            fast = m.variance
        with backends.use("cpu", backends.TWINS):
            slow = m.variance
        rounding = 24 * torch.finfo(dtype).eps * (m.count * square + total.square())
        assert ((fast - slow).abs() <= rounding).all()


def test_products_of_all_parameters_at_once():
    rows = []
    for n, dtype in ((3, torch.float32), (2500, torch.float32), (5, torch.float64)):
        total = torch.randn(n, dtype=dtype)
        grad = total.clone() if n == 3 else torch.randn_like(total)
        rows.append((total, grad, torch.rand_like(total)))
    for found, (total, grad, square) in zip(triton.compare(rows), rows, strict=True):
        m = Moments(2, 2, total.double(), square.double())
        torch.testing.assert_close(torch.tensor(found).double(), products(m, grad.double()))
    SS, gS, gg, _ = triton.compare(rows)[0]
    assert SS == gS == gg  # nothing has touched it: to the bit


def test_what_is_left_to_pytorch():
    x = torch.ones(3, 4)
    assert not triton.serves(x, x.t())
    assert not triton.serves(x, x.double())
    assert not triton.serves(x.half())
    assert triton.serves(x, torch.nn.Parameter(x))
    assert not triton.variance(x[:0], x[:0], 2, 1.0, 0.0, x[:0])
