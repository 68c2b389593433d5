"""Build the sdist and a wheel for each system, and check their contents.

    python -m tools.wheels                   # everything, into dist/
    python -m tools.wheels linux-x86_64      # the wheel of one system

The kernels are compiled by `ziglang` from the package index, which has the headers of all systems.
For every library, format, processor, names and the oldest system that can load it are checked. If
this machine or an emulator on it can run a library (qemu-aarch64 with Debian's libc6-arm64-cross;
wine), selftest.c compares its results with the definition. The printed line of a wheel says which
of its levels were run.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from hatch_build import SYSTEMS, System

from varreg.native.build import LEVELS

ROOT = Path(__file__).parent.parent
# What a library begins with, and where the number of its processor is: ELF, Mach-O, PE.
_X86, _ARM = "x86_64", "arm64"
_MACHO_ARM = 0x0100000C
_SIGNATURE, _BUILD_VERSION = 0x1D, 0x32  # commands of Mach-O
_PROCESSORS = {
    "linux": {0x3E: _X86, 0xB7: _ARM},
    "macos": {0x01000007: _X86, _MACHO_ARM: _ARM},
    "windows": {0x8664: _X86, 0xAA64: _ARM},
}
_EMULATORS = {
    "linux-arm64": ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"],
    "windows-x86_64": ["wine"],
}
_EXPORTED = (b"outer_float32", b"conv_float64", b"update_float32", b"share_threads")


def main() -> int:
    """Build what was asked for, print each file with its size, and return 0 if all is well."""
    parser = argparse.ArgumentParser("python -m tools.wheels", description=__doc__.split("\n")[0])
    parser.add_argument("systems", nargs="*", metavar="SYSTEM", help=f"of {', '.join(SYSTEMS)}")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    options = parser.parse_args()
    if not options.systems:
        print(_describe(build("sdist", None, options.out)))
        print(_describe(build("wheel", None, options.out)))
    for name in options.systems or SYSTEMS:
        wheel = build("wheel", name, options.out)
        print(_describe(wheel), _check(wheel, name, SYSTEMS[name]))
    return 0


def build(kind: str, system: str | None, out: Path) -> Path:
    """Return the file that was made."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(out.resolve())],
        cwd=ROOT,
        env={**os.environ, "VARREG_WHEEL": system or ""},
        stderr=subprocess.DEVNULL,  # the file's name; an error is on stdout
        check=True,
    )
    return max(out.iterdir(), key=lambda path: path.stat().st_mtime)


def _check(wheel: Path, name: str, system: System) -> str:
    """Check a wheel's libraries, and return which were run and which were not."""
    done = []
    with (
        zipfile.ZipFile(wheel) as archive,
        # wine's server lives for seconds longer than what it served
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
    ):
        for level in system.levels:
            member = f"varreg/native/prebuilt/kernels-{level}{system.suffix}"
            content = archive.read(member)
            found = library_system(content)
            if found != name:
                raise ValueError(f"{member} of {wheel.name} is for {found}, not {name}")
            if oldest_system(content) > system.oldest:
                raise ValueError(
                    f"{member} of {wheel.name} needs version {oldest_system(content)} of its "
                    f"system, and the wheel promises {system.oldest}"
                )
            ran = _run(Path(archive.extract(member, folder)), name, system.target, level)
            done.append(f"{level}: {'run' if ran else 'not run'}")
    return ", ".join(done)


def _run(library: Path, system: str, target: str, level: str) -> bool:
    """Run a library against the definition, if this machine can; raise an error if it is wrong."""
    emulator = _EMULATORS.get(system, ["no emulator"])
    here = system == this_system()
    if level not in _own_levels() or not (here or shutil.which(emulator[0])):
        return False
    program = library.parent / "selftest.exe"
    zig = [sys.executable, "-m", "ziglang", "cc", "-target", target, "-O1"]
    own = str(Path(__file__).parent / "selftest.c")
    subprocess.run([*zig, own, "-lm", "-o", str(program)], check=True)
    command = [*([] if here else emulator), str(program), str(library)]
    wine = {"WINEPREFIX": str(library.parent / "wine"), "WINEDEBUG": "-all"}
    subprocess.run(
        command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, **({} if here else wine)}
    )
    return True


def this_system() -> str:
    """Return the name of this machine in `SYSTEMS`."""
    names = {"Linux": "linux", "Darwin": "macos", "Windows": "windows"}
    arm = platform.machine() in ("aarch64", "arm64")
    return f"{names.get(platform.system())}-{_ARM if arm else _X86}"


def _own_levels() -> list[str]:
    """Return the levels that this processor has, if Linux says so."""
    info = Path("/proc/cpuinfo")
    flags = info.read_text().split() if info.exists() else []
    return [level for level, needs in LEVELS.items() if set(needs) <= set(flags)]


def library_system(content: bytes) -> str:
    """Return the system that a library is for; raise a ValueError if it is none of ours."""
    missing = [name.decode() for name in _EXPORTED if name not in content]
    if missing:
        raise ValueError(f"the library has no {', '.join(missing)}")
    if content[:4] == b"\x7fELF":
        system, number = "linux", struct.unpack_from("<H", content, 18)[0]
    elif content[:4] == b"\xcf\xfa\xed\xfe":
        system, number = "macos", struct.unpack_from("<I", content, 4)[0]
    elif content[:2] == b"MZ":
        header = struct.unpack_from("<I", content, 60)[0]
        system, number = "windows", struct.unpack_from("<H", content, header + 4)[0]
    else:
        raise ValueError(f"no library of a known system begins with {content[:4]!r}")
    return f"{system}-{_PROCESSORS[system][number]}"


def oldest_system(content: bytes) -> tuple[int, ...]:
    """Return the oldest version of glibc or macOS that can load a library, according to the
    library; () for Windows, whose libraries do not say. Raise a ValueError if the library is for
    macOS on arm64 and unsigned, since macOS would refuse it.
    """
    if content[:4] == b"\x7fELF":
        found = re.findall(rb"GLIBC_(\d+)\.(\d+)(?:\.(\d+))?\0", content)
        return max(tuple(int(n) for n in version if n) for version in found)
    if content[:4] != b"\xcf\xfa\xed\xfe":
        return ()
    commands, at = {}, 32
    for _ in range(struct.unpack_from("<I", content, 16)[0]):
        kind, size = struct.unpack_from("<II", content, at)
        commands[kind] = at
        at += size
    if struct.unpack_from("<I", content, 4)[0] == _MACHO_ARM and _SIGNATURE not in commands:
        raise ValueError("the library has no signature, and macOS on arm64 loads none without")
    version = struct.unpack_from("<I", content, commands[_BUILD_VERSION] + 12)[0]
    return version >> 16, version >> 8 & 0xFF


def _describe(path: Path) -> str:
    return f"{path.name}  {path.stat().st_size / 1e3:.0f} kB"


if __name__ == "__main__":
    sys.exit(main())
