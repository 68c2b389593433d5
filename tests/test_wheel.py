"""The wheel with prebuilt kernels: built, installed where there is no compiler, and used."""

from __future__ import annotations

import importlib.util
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import varreg
from varreg.native import cache

ROOT = Path(__file__).parent.parent
pytest.importorskip("hatchling")
hatch_build = importlib.import_module("hatch_build")
wheels = importlib.import_module("tools.wheels")

SCRIPT = """
import torch, varreg
from varreg.native import library
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 4))
varreg.observe(model)
optimizer = varreg.VRSGD(model.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.randn(512, 64)).square().mean().backward()
    optimizer.step()
assert optimizer.lambda_of(model[0].weight).isfinite().all()
print(varreg.__file__)
print(library.load()[0]._name)
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="no ziglang")
def test_the_wheel_s_kernels_are_used_without_a_compiler(tmp_path):
    """For the best that torch finds in this processor, and for less of it."""
    subprocess.run(
        [sys.executable, "-m", "tools.wheels", wheels.this_system(), "--out", str(tmp_path)],
        cwd=ROOT,
        check=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    subprocess.run([*pip, str(tmp_path / "site"), str(wheel)], check=True)
    best = torch.backends.cpu.get_cpu_capability().lower()
    wanted = {"default": "baseline"}
    if best in ("avx2", "avx512"):
        wanted.update({"avx2": "avx2", best: best})
    for asked, name in wanted.items():
        environment = {
            **os.environ,
            "PYTHONPATH": str(tmp_path / "site"),
            "PATH": "",
            "CC": "",
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "ATEN_CPU_CAPABILITY": asked,
        }
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", SCRIPT],
            capture_output=True,
            text=True,
            env=environment,
            cwd=tmp_path,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        file, library = map(Path, done.stdout.splitlines())
        assert file.is_relative_to(tmp_path / "site")
        assert library == file.parent / "native" / "prebuilt" / f"kernels-{name}{cache.SUFFIX}"
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("signed", [True, False])
def test_the_oldest_macos_and_the_signature_are_read_from_a_library(signed):
    build = struct.pack("<6I", 0x32, 24, 1, 11 << 16 | 3 << 8, 0, 0)  # LC_BUILD_VERSION
    signature = struct.pack("<4I", 0x1D, 16, 0, 0) if signed else b""
    head = struct.pack("<8I", 0xFEEDFACF, 0x0100000C, 0, 6, 1 + signed, 0, 0, 0)
    if signed:
        assert wheels.oldest_system(head + build + signature) == (11, 3)
    else:
        with pytest.raises(ValueError, match="no signature"):
            wheels.oldest_system(head + build)


def test_the_oldest_glibc_is_read_from_a_library():
    content = b"\x7fELF\0GLIBC_2.2.5\0GLIBC_2.17\0GLIBC_2.4\0"
    assert wheels.oldest_system(content) == (2, 17)


def test_links_of_the_readme_are_absolute_or_left_out():
    text = "[a](docs/a.md#b) and [c](https://c.org), [d\ne](CHANGELOG.md)"
    there = hatch_build.absolute(text, "https://here.org/main/")
    assert there == (
        "[a](https://here.org/main/docs/a.md#b) and [c](https://c.org), "
        "[d\ne](https://here.org/main/CHANGELOG.md)"
    )
    assert hatch_build.absolute(text, "") == "a and [c](https://c.org), d\ne"
    picture = "![p\nq](docs/p.svg)"
    assert hatch_build.absolute(f"{picture}\n\nx", "") == "x"
    assert (
        hatch_build.absolute(picture, "https://here.org") == "![p\nq](https://here.org/docs/p.svg)"
    )
    on_github = hatch_build.absolute(picture, hatch_build.URL)
    assert on_github == "![p\nq](https://github.com/varreg/varreg/raw/main/docs/p.svg)"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "](docs" not in hatch_build.absolute(readme, "")
    assert "](docs" not in hatch_build.absolute(readme, hatch_build.URL)


def test_all_files_have_one_version_and_one_address():
    address = hatch_build.URL.removesuffix("/blob/main")
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {varreg.__version__}\n" in citation
    released = re.search(r"date-released: (\S+)", citation)[1]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\n## {varreg.__version__} — {released}\n" in changelog
    for name in ("CITATION.cff", "pyproject.toml", "mkdocs.yml"):
        found = set(re.findall(r"https://github.com/[\w-]+/[\w-]+", (ROOT / name).read_text()))
        assert found == {address}, name
