"""The C kernel against its twin in PyTorch, and that nothing depends on it."""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from tests.support import forked
from tests.support.once import folder_once
from varreg import Moments, native
from varreg import regularizer as vr

needs_compiler = pytest.mark.skipif(
    native.status() != "in use", reason=f"native kernel: {native.status()}"
)
CLANG = shutil.which("clang") or (
    f"{sys.executable} -m ziglang cc" if importlib.util.find_spec("ziglang") else None
)
SPECIAL = [0.0, 1e-30, 0.5, 1.0, 1e3, 1e30, math.inf, math.nan]


def cases(dtype):
    """Every pair of special values, with and without a past, and enough ordinary ones for several
    threads.
    """
    variance, delta = (
        torch.tensor(t, dtype=dtype) for t in zip(*itertools.product(SPECIAL, SPECIAL), strict=True)
    )
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
@pytest.mark.parametrize(
    "options",
    [{}, {"cap": 0.7}, {"lambda_min": 0.4, "lambda_max": 1.1}, {"scale_free": False}, {"s": 0.2}],
)
@pytest.mark.parametrize("form", ["rational", "affine"])
@pytest.mark.parametrize("history", ["sum", "mean", "harmonic"])
def test_the_kernel_equals_its_twin(history, form, options, dtype, absent):
    o = {**vr.DEFAULTS, "form": form, "history": history, **options}
    variance, delta, *past = cases(dtype)
    present = torch.rand_like(delta).gt(0.3).to(dtype) if absent else None
    ours, theirs = [t.clone() for t in past], [t.clone() for t in past]
    for _ in range(2):
        fast = vr.native_lambdas(variance, delta, *ours, present, vr.limit(5, o), o)
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
    assert (
        vr.native_lambdas(
            *(torch.ones(4) for _ in range(4)), None, None, {**vr.DEFAULTS, **changed}
        )
        is None
    )


@needs_compiler
def test_memory_in_another_order_is_left_to_pytorch():
    tensors = [torch.ones(4, 3) for _ in range(3)]
    assert vr.native_lambdas(torch.ones(3, 4).T, *tensors, None, None, vr.DEFAULTS) is None
    assert (
        vr.native_lambdas(torch.ones(4, 3, dtype=torch.float32), *tensors, None, None, vr.DEFAULTS)
        is None
    )
    assert (
        vr.native_lambdas(*tensors, torch.ones(4, 3, dtype=torch.bfloat16), None, None, vr.DEFAULTS)
        is None
    )


SCRIPT = """
import torch, varreg
from varreg import native
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


def run(script=SCRIPT):
    return forked.run(script)


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
    done = run()
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(status)
    # one warning with the reason and the remedy, but for who asked for it
    wanted = 0 if "VARREG_NATIVE" in environment else 1
    assert done.stderr.count("varreg: native code is off") == wanted
    if wanted:
        assert status in done.stderr
        assert ".. " not in done.stderr
        assert "VARREG_NATIVE=0" in done.stderr


@pytest.fixture
def _unoptimized(monkeypatch):
    """Compiling without optimization takes a tenth of the time, and is the same otherwise."""
    flags = os.environ.get("VARREG_NATIVE_FLAGS", "")
    monkeypatch.setenv("VARREG_NATIVE_FLAGS", f"{flags} -O0")


@needs_compiler
@pytest.mark.usefixtures("_unoptimized")
def test_it_is_compiled_once_and_kept(tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "")
    notice = "varreg: compiling native code"
    for _ in range(2):
        done = run()
        assert done.stdout == "in use\n", done.stderr
        assert done.stderr.count(notice) == 1
        (built,) = (tmp_path / "varreg" / "native").glob("*.so")
        with monkeypatch.context() as patch:  # what was kept serves without a compiler
            patch.setenv("PATH", "")
            done = run()
            assert done.stdout == "in use\n"
            assert done.stderr == ""
        with built.open("r+b") as file:  # a damaged one is made again
            file.seek(20_000)
            file.write(b"damaged")
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")  # not writable: a temporary folder does
    done = run()
    assert done.stdout == "in use\n"
    assert f"{notice}, for this process alone" in done.stderr
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "")
    assert run("import os; os.getuid = lambda: 987654\n" + SCRIPT).stdout == "in use\n"
    assert not list((tmp_path / "temporary").glob("varreg-*"))


@needs_compiler
@pytest.mark.usefixtures("_unoptimized")
def test_several_processes_compile_once(tmp_path, monkeypatch):
    """With a compiler with arguments: a script that writes down when it is called."""
    script = tmp_path / "compiler"
    script.write_text(f'echo "$@" >> {tmp_path}/calls\nexec cc "$@"\n')
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", f"sh {script}")
    start = "from varreg import native; print(native.status())"
    together = [
        subprocess.Popen(
            [sys.executable, "-c", start], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    said = [process.communicate() for process in together]
    assert [out for out, _ in said] == ["in use\n"] * 3
    assert sum("compiling" in error for _, error in said) == 1
    calls = (tmp_path / "calls").read_text().splitlines()
    assert sum("kernels.c" in call for call in calls) == 1


@pytest.mark.slow
@needs_compiler
@pytest.mark.usefixtures("_unoptimized")
@pytest.mark.skipif(CLANG is None, reason="neither clang nor ziglang")
@pytest.mark.parametrize("shared", [True, False])
def test_threads_without_an_openmp_library(shared, tmp_path_factory, monkeypatch):
    """What clang makes has threads of its own, or works with torch's: the numbers are the same.

    Both use one folder: the kernels are compiled once. What ziglang keeps stays for the next time.
    """
    folder, _ = folder_once(tmp_path_factory, "clang", lambda _: "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setenv("CC", CLANG)
    kept = Path(tempfile.gettempdir()) / f"varreg-tests-{os.getuid()}"
    kept.mkdir(mode=0o700, exist_ok=True)
    monkeypatch.setenv("ZIG_GLOBAL_CACHE_DIR", str(kept / "zig"))  # it takes long to make
    start = "" if shared else "from varreg.native import library\nlibrary._share_threads = id\n"
    done = run(start + THREADS)
    assert done.stdout == "in use\n", done.stderr


THREADS = """
import torch
from varreg import native
from varreg.native import layer_sums, reductions
torch.manual_seed(0)
delta, a = torch.randn(2, 16, 32, 48).double()
x, out = torch.randn(32, 4, 12, 12).double(), torch.randn(32, 8, 12, 12).double()
same = (3, 3), (1, 1), (1, 1), (1, 1)
def everything(threads):
    torch.set_num_threads(threads)
    return [
        *layer_sums.outer(delta, a, 16, bias=True),
        *layer_sums.conv(x, out, *same, 32)[:2],
        *layer_sums.conv(x, out, *same, 3)[:2],
        *reductions.norm_rows(delta, a, 1e-5),
    ]
alone = everything(1)
for threads in (2, 3, 2, 5) * 20:
    for one, other in zip(everything(threads), alone, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
print(native.status())
"""
