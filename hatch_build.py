"""Build a wheel with prebuilt kernels: `VARREG_WHEEL=linux-x86_64 python -m hatchling build`; and
write the readme for a package index.

Without `VARREG_WHEEL` the wheel is for any system, and compiles its kernels at first use. Nothing
in a wheel depends on the version of Python or torch. `make wheels` builds all of them. The readme's
links lead to the repository, since an index does not have the files: `VARREG_URL` says where they
can be read, if not at `URL`. If it is empty, links are left out.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

URL = "https://github.com/varreg/varreg/blob/main"


class System(NamedTuple):
    """A system that wheels are made for."""

    target: str
    """What zig calls it."""
    tag: str
    """What Python calls it."""
    suffix: str
    """Of libraries."""
    oldest: tuple[int, ...]
    """The oldest version of glibc or macOS that it promises, as `tag` does; () for Windows."""
    levels: tuple[str, ...] = ("baseline",)
    """Of `LEVELS` in native/build.py."""
    flags: tuple[str, ...] = ()
    """For the compiler."""


_ALL = ("avx512", "avx2", "baseline")
_LINUX = ("-Wl,-z,defs",)  # nothing may be left to be found at load
SYSTEMS = {
    "linux-x86_64": System(
        "x86_64-linux-gnu.2.17",
        "manylinux_2_17_x86_64.manylinux2014_x86_64",
        ".so",
        (2, 17),
        _ALL,
        _LINUX,
    ),
    "linux-arm64": System(
        "aarch64-linux-gnu.2.17",
        "manylinux_2_17_aarch64.manylinux2014_aarch64",
        ".so",
        (2, 17),
        flags=_LINUX,
    ),
    "macos-x86_64": System(
        "x86_64-macos.11.0", "macosx_11_0_x86_64", ".dylib", (11, 0), ("avx2", "baseline")
    ),
    "macos-arm64": System("aarch64-macos.11.0", "macosx_11_0_arm64", ".dylib", (11, 0)),
    "windows-x86_64": System("x86_64-windows-gnu", "win_amd64", ".dll", (), _ALL),
}


class Prebuilt(BuildHookInterface):
    """Puts the kernels of one system into the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile them."""
        name = os.environ.get("VARREG_WHEEL")
        if self.target_name != "wheel" or version == "editable" or not name:
            return
        if name not in SYSTEMS:
            raise ValueError(f"VARREG_WHEEL must be one of {', '.join(SYSTEMS)}; got {name}")
        system = SYSTEMS[name]
        sys.path.insert(0, str(Path(self.root) / "src"))
        from varreg.native import build, contract  # which need torch

        self._folder = tempfile.TemporaryDirectory(prefix="varreg-wheel-")
        for level in system.levels:
            made = Path(self._folder.name) / f"kernels-{level}{system.suffix}"
            flags = ["-target", system.target, "-s", *system.flags]
            for feature in build.LEVELS[level]:  # zig would compile its libc anew for -mcpu
                flags += ["-Xclang", "-target-feature", "-Xclang", f"+{feature}"]
            zig = [sys.executable, "-m", "ziglang", "cc"]
            build.build(zig, flags, contract.header(), made)
            build_data["force_include"][str(made)] = f"varreg/native/prebuilt/{made.name}"
        build_data["tag"] = f"py3-none-{system.tag}"
        build_data["pure_python"] = False

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()


class Readme(MetadataHookInterface):
    """Makes README.md fit for a page that is not in the repository."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the readme."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = absolute(text, os.environ.get("VARREG_URL", URL))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def absolute(text: str, url: str) -> str:
    """Return a text of which all links lead to below the URL; without one, links and pictures are
    left out. A page of GitHub's is no picture: that is under raw/ in place of blob/.
    """
    if not url:
        text = re.sub(r"!\[[^\]]*\]\((?!https?:)[^)]+\)\n*", "", text)
    raw = url.rstrip("/").replace("/blob/", "/raw/")
    text = re.sub(r"(!\[[^\]]*\])\((?!https?:)([^)]+)\)", rf"\1({raw}/\2)", text)
    to = rf"[\1]({url.rstrip('/')}/\2)" if url else r"\1"
    return re.sub(r"\[([^\]]+)\]\((?!https?:|#)([^)]+)\)", to, text)
