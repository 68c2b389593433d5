"""The C kernel against its twin in PyTorch, and that nothing depends on it."""

from __future__ import annotations

import itertools
import math
import shutil
import subprocess
import sys

import pytest
import torch

from varreg import Moments, native
from varreg import regularizer as vr

needs_compiler = pytest.mark.skipif(native.status() != "in use", reason=f"native kernel: {native.status()}")
SPECIAL = [0.0, 1e-30, 0.5, 1.0, 1e3, 1e30, math.inf, math.nan]


def cases(dtype):
    """Every pair of special values, with and without a past, and enough ordinary ones for several threads."""
    variance, delta = (torch.tensor(t, dtype=dtype) for t in zip(*itertools.product(SPECIAL, SPECIAL), strict=True))
    variance = torch.cat([variance, variance, torch.rand(40_000, dtype=dtype)])
    delta = torch.cat([delta, -delta, torch.randn(40_000, dtype=dtype)])
    history, count = torch.zeros_like(delta), torch.zeros_like(delta)
    history[len(SPECIAL) ** 2 :], count[len(SPECIAL) ** 2 :] = 1.5, 3.0
    return variance, delta, history, count


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_it_is_in_use_where_there_is_a_compiler():
    """Else the tests of native code would be skipped, and nobody would know."""
    assert native.status() == "in use"


@needs_compiler
@pytest.mark.parametrize("absent", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", [{}, {"cap": 0.7}, {"lambda_min": 0.4, "lambda_max": 1.1}, {"scale_free": False}, {"s": 0.2}])
@pytest.mark.parametrize("form", ["rational", "affine"])
@pytest.mark.parametrize("history", ["sum", "mean", "harmonic"])
def test_the_kernel_equals_its_twin(history, form, options, dtype, absent):
    o = {**vr.DEFAULTS, "form": form, "history": history, **options}
    variance, delta, *past = cases(dtype)
    present = torch.rand_like(delta).gt(0.3).to(dtype) if absent else None
    ours, theirs = [t.clone() for t in past], [t.clone() for t in past]
    for _ in range(2):
        fast = native.lambdas(variance, delta, *ours, present, vr.limit(5, o), o)
        slow = vr.regularizer(*vr.ratio(variance, delta, *theirs, 5, o, present), o)
        tolerance = 1e-5 if dtype == torch.float32 else 1e-13
        torch.testing.assert_close(fast, slow, rtol=tolerance, atol=tolerance)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=0)
        assert fast.isfinite().all()
    if absent:
        assert (fast[present == 0] == 1).all() or "lambda_min" in options
        assert torch.equal(ours[1][present == 0], past[1][present == 0])


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_variance_equals_its_twin(dtype, monkeypatch):
    square, total, *_ = cases(dtype)
    finite = square.isfinite() & total.square().isfinite()
    square, total = square[finite], total[finite]
    for m in (Moments(5, 5, total, square), Moments(7, 3, total, square, "sum")):
        fast = m.variance
        with monkeypatch.context() as patch:
            patch.setattr(native, "variance", lambda *_: False)
            slow = m.variance
        rounding = 8 * torch.finfo(dtype).eps * (m.count * square + total.square())
        assert ((fast - slow).abs() <= rounding * 3).all()
        assert (fast >= 0).all()


@needs_compiler
@pytest.mark.parametrize(
    "changed",
    [{"history": "geometric"}, {"history": "ema"}, {"form": "sigmoid"}],
)
def test_what_it_leaves_to_pytorch(changed):
    assert native.lambdas(*(torch.ones(4) for _ in range(4)), None, None, {**vr.DEFAULTS, **changed}) is None


@needs_compiler
def test_memory_in_another_order_is_left_to_pytorch():
    tensors = [torch.ones(4, 3) for _ in range(3)]
    assert native.lambdas(torch.ones(3, 4).T, *tensors, None, None, vr.DEFAULTS) is None
    assert native.lambdas(torch.ones(4, 3, dtype=torch.float32), *tensors, None, None, vr.DEFAULTS) is None
    assert native.lambdas(*tensors, torch.ones(4, 3, dtype=torch.bfloat16), None, None, vr.DEFAULTS) is None


SCRIPT = """
import torch, varreg
from varreg import Moments, native
model = torch.nn.Linear(3, 2)
varreg.observe(model)
optimizer = varreg.VRSGD(model.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.randn(5, 3)).square().mean().backward()
    optimizer.step()
assert optimizer.lambda_of(model.weight).isfinite().all()
print(native.status())
"""


@pytest.mark.parametrize(
    ("environment", "status"),
    [
        ({"VARREG_NATIVE": "0"}, "switched off by VARREG_NATIVE=0"),
        ({"CC": "no-such-compiler"}, "no-such-compiler did not work: "),
        ({"CC": "false"}, "false did not work: "),
        ({"PATH": "", "CC": ""}, "no C compiler was found"),
    ],
)
def test_everything_works_without_a_compiler(environment, status, tmp_path, monkeypatch):
    for name, value in {**environment, "XDG_CACHE_HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(status)


@needs_compiler
def test_it_is_compiled_once_and_kept(tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
        assert done.stdout == "in use\n"
        (built,) = (tmp_path / "varreg").iterdir()
        assert built.suffix == ".so"
        with built.open("r+b") as file:  # a damaged one is made again
            file.truncate(20_000)
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")  # not writable: a temporary folder does
    assert subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True).stdout == "in use\n"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "")
    homeless = "import os; os.getuid = lambda: 987654\n" + SCRIPT
    assert subprocess.run([sys.executable, "-c", homeless], capture_output=True, text=True, check=True).stdout == "in use\n"
    assert not list((tmp_path / "temporary").glob("varreg-*"))


@needs_compiler
def test_a_compiler_with_arguments(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "cc -DNOTHING")
    assert subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True).stdout == "in use\n"
