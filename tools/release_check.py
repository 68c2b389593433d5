"""Check a release: build the packages, install them in new environments, run README's examples.

    make release-check

The wheel of this system and the sdist are built. Each is installed in its own environment, with
torch as `constraints.txt` pins it. README's examples run there, outside of the repository, so that
they import the package and not the sources.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from tools.wheels import ROOT, build

SYSTEMS = {
    ("Linux", "x86_64"): "linux-x86_64",
    ("Linux", "aarch64"): "linux-arm64",
    ("Darwin", "arm64"): "macos-arm64",
    ("Darwin", "x86_64"): "macos-x86_64",
    ("Windows", "AMD64"): "windows-x86_64",
}
EXAMPLES = ["-m", "doctest", "-o", "NORMALIZE_WHITESPACE", "-o", "ELLIPSIS", "README.md"]
STATUS = "import varreg.native; print(varreg.__version__, varreg.native.status())"


def check(package: Path, folder: Path) -> None:
    """Install a package in a new environment, and run README's examples with it."""
    venv.create(folder / "env", with_pip=True)
    python = folder / "env" / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    pip: list[str | Path] = [python, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    run([*pip, "install", "-c", ROOT / "constraints.txt", package, "numpy"], folder)
    run([*pip, "check"], folder)
    (folder / "README.md").write_bytes((ROOT / "README.md").read_bytes())
    run([python, *EXAMPLES], folder)
    print(package.name, "works:", run([python, "-c", STATUS], folder).strip(), flush=True)


def run(command: list[str | Path], folder: Path) -> str:
    """Run a command in a folder, and return what it printed; end with its output if it fails."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        words = " ".join(map(str, command))
        raise SystemExit(f"{words}\nended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> int:
    """Build and check the wheel of this system and the sdist."""
    system = SYSTEMS.get((platform.system(), platform.machine()))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        packages = [build("wheel", system, folder / "dist"), build("sdist", None, folder / "dist")]
        for package in packages:
            place = folder / package.suffix.strip(".")
            place.mkdir()
            check(package, place)
    return 0


if __name__ == "__main__":
    sys.exit(main())
