"""Compile the kernels: at first use for this processor (`library.py`), and for wheels
(`hatch_build.py`).
"""

from __future__ import annotations

import subprocess
from pathlib import Path

SOURCES = Path(__file__).parent
FLAGS = (
    "-O3",
    "-ffp-contract=fast",
    "-fno-trapping-math",
    "-fno-math-errno",
    "-std=gnu99",
    "-shared",
    "-fPIC",
)
# The features that torch requires of a processor for its own kernels of that name
# (`torch.backends.cpu.get_cpu_capability()`), best first.
LEVELS = {
    "avx512": ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma"),
    "avx2": ("avx2", "fma"),
    "baseline": (),
}


def sources() -> str:
    """Return the text of all files that are compiled, except the contract."""
    return "".join(path.read_text() for path in sorted(SOURCES.glob("*.[ch]")))


def build(compiler: list[str], flags: list[str], header: str, output: Path) -> None:
    """Compile the kernels to the file `output`, with threads if possible. Raise a RuntimeError if
    the compiler fails.

    With gcc, the threads are those of libgomp, which torch has loaded. With clang, they are those
    of threads.c, which needs no OpenMP library.
    """
    (output.parent / "contract.h").write_text(header)
    kernels, threads = str(SOURCES / "kernels.c"), str(SOURCES / "threads.c")
    common = [*compiler, *FLAGS, *flags, f"-I{output.parent}", kernels, "-o", str(output)]
    if "clang" in _run([*compiler, "--version"]):
        _run([*common, threads, "-Xclang", "-fopenmp", "-pthread"])
        return
    try:
        _run([*common, "-fopenmp"])
    except RuntimeError:  # compile without threads
        _run([*common, "-Wno-unknown-pragmas"])


def _run(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        message = str(getattr(error, "stderr", "") or error).strip().splitlines()
        raise RuntimeError(f"{command[0]} did not work: {message[-1]}") from error
