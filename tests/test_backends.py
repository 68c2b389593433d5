"""Which kernels serve a tensor, and that all of them have the same functions."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch

import varreg
from varreg import backends, few_launches, native
from varreg.engine import Moments

FUNCTIONS = [n for n in dir(backends.Backend) if not n.startswith("_")]

# of native code only: native/spread.py, and WITH_NORMS in native/layer_sums.py
NATIVE_ONLY = {"sum_only", "norms"}


def names_of(function):
    return list(inspect.signature(function).parameters)


def test_the_cpu_has_the_kernels_in_c():
    assert backends.BACKENDS["cpu"] is native
    assert {"outer", "conv", "sums", "norm_rows", "lookup", "update"} <= set(FUNCTIONS)
    for name in FUNCTIONS:
        ours, asked = names_of(getattr(native, name)), names_of(getattr(backends.Backend, name))[1:]
        assert ours[: len(asked)] == asked
        assert set(ours) - set(asked) <= NATIVE_ONLY


def test_those_in_triton_have_the_same_functions():
    pytest.importorskip("triton")
    from varreg import triton

    for name in (*FUNCTIONS, "KNOWS_SINGLE_ROWS"):
        ours, theirs = getattr(triton, name), getattr(native, name)
        if callable(ours):
            assert names_of(ours) == [n for n in names_of(theirs) if n not in NATIVE_ONLY], name


def test_a_device_without_kernels_leaves_the_step_to_pytorch():
    kernels = backends.BACKENDS["meta"]
    x = torch.ones(2, 3, device="meta")
    assert kernels.total(x) is None
    assert not kernels.serves(x)
    assert kernels.status() == "there are no kernels for meta"


@pytest.mark.parametrize("groups", [6, 3])
def test_sums_in_few_launches(groups):
    n = 6 // groups
    c = torch.randn(6, 4, 5, dtype=torch.float64).unflatten(0, (groups, n)).sum(1)
    delta, a = torch.randn(6, 2, 4).double(), torch.randn(6, 2, 5).double()
    each = torch.einsum("bro,bri->boi", delta, a).unflatten(0, (groups, n)).sum(1)
    bias = delta.sum(1).unflatten(0, (groups, n)).sum(1)
    found = few_launches.outer(delta, a, groups, bias=True)
    total, square = few_launches.both_sums(c, n=n)
    assert few_launches.outer(delta, a, 4) is None  # groups of different sizes
    few_launches.finish_squares()
    for values, (S, W) in (
        (c, (total, square)),
        (each, (found.total, found.square)),
        (bias, found.bias),
    ):
        torch.testing.assert_close(S, values.sum(0))
        torch.testing.assert_close(W, values.square().sum(0) / n)


@pytest.mark.parametrize("cached", [0, 50, 1 << 20])
@pytest.mark.parametrize("bias", [False, True])
def test_one_row_per_sample_in_few_launches(bias, cached, monkeypatch):
    """With per-sample gradients where they are few, and without them; then at any batch."""
    monkeypatch.setattr(few_launches, "DEVICE_CACHED", cached)
    monkeypatch.setattr(few_launches, "DEVICE_CHUNK", 1 << 20 if bias and cached > 50 else 0)
    delta, a = torch.randn(6, 1, 4).double(), torch.randn(6, 1, 5).double()
    found = few_launches.outer(delta, a, 6, bias=bias)
    few_launches.finish_squares()
    each = torch.einsum("bro,bri->boi", delta, a)
    torch.testing.assert_close(found.total, each.sum(0))
    torch.testing.assert_close(found.square, each.square().sum(0))
    assert (found.bias is not None) == bias
    for sums, values in zip(found.bias or (), (delta, delta.square())):
        torch.testing.assert_close(sums, values.sum((0, 1)))


@pytest.mark.parametrize("cached", [0, 500, 1 << 20])
def test_samples_that_agree_have_no_variance_in_few_launches(cached, monkeypatch):
    monkeypatch.setattr(few_launches, "DEVICE_CACHED", cached)
    for rows in 1, 3:
        delta, a = (torch.randn(1, rows, n).repeat(100, 1, 1) for n in (4, 5))
        found = few_launches.outer(delta, a, 100, bias=True)
        few_launches.finish_squares()
        for S, W in ((found.total, found.square), found.bias):
            assert not Moments(100, 100, S, W).variance.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_added_up_in_float32_in_few_launches(dtype):
    delta, a = torch.randn(50, 3, 4).to(dtype), torch.randn(50, 3, 5).to(dtype)
    found = few_launches.outer(delta, a, 50, bias=True)
    few_launches.finish_squares()
    each, bias = (delta.transpose(1, 2) @ a).float(), delta.sum(1).float()
    for values, (S, W) in ((each, (found.total, found.square)), (bias, found.bias)):
        torch.testing.assert_close(S, values.sum(0), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(W, values.square().sum(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("m", "factor"), [(2, 1.0), (100, 99 / 7)])
def test_the_variance_in_few_launches(m, factor):
    total = torch.randn(50).double()
    square = total.square() / m * (1 + torch.rand(50).double())
    square[:3] = total[:3].square() / m * torch.tensor([1.0, 1 + 1e-9, 1 - 1e-9])  # rounding alone
    square[3] = torch.nan
    found = few_launches.variance(total, square, m, m * factor, 1e-6, torch.empty_like(square))
    expected = factor * (m * square - total.square())
    assert not found[:3].any()
    assert found[3].isnan()
    torch.testing.assert_close(found[4:], expected[4:])


def test_values_where_a_condition_is_positive():
    values, condition = torch.tensor([1.0, 2, 3, 4]), torch.tensor([1.0, 0, -1, torch.nan])
    found = few_launches.where_positive(values, condition)
    assert found[0] == 1
    assert found[1:].isnan().all()


def test_the_same_moments_without_kernels():
    """The twins are what other devices run on."""
    x = torch.randn(5, 4, 3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    found = []
    with varreg.observe(model):
        for backend in (native, backends.TWINS):
            model.zero_grad()
            with backends.use("cpu", backend):
                model(x).square().sum().backward()
                found.append([varreg.moments(p).variance for p in model.parameters()])
            assert backends.BACKENDS["cpu"] is native
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("code", "said"),
    [("", "switched off by VARREG_TRITON=0"), ("del os.environ['VARREG_TRITON']", "Triton ")],
)
def test_triton_is_found_or_it_is_said_why_not(code, said, monkeypatch):
    monkeypatch.setenv("VARREG_TRITON", "0")
    script = (
        f"import os\n{code}\nfrom varreg.backends import BACKENDS as b\nprint(b['cuda'].status())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(said)
