"""The folder that keeps compiled libraries. It is private to the user, and the name of each file
contains the hash of its content.

A library is code. So no file is loaded that another user owns or could have written, or whose
content has changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

if sys.platform != "win32":
    import fcntl

SUFFIX = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")


def open_folder() -> Path | None:
    """Return the folder, and create it if it is missing; return None if it cannot be trusted."""
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = home / "varreg" / "native"
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=stat.S_IRWXU)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or not _is_own(found):
            warnings.warn(
                f"varreg: {folder} is not a folder of this user, so no library is taken from it "
                "or kept there. Remove it, or set XDG_CACHE_HOME to a folder of your own.",
                UserWarning,
                stacklevel=2,
            )
            return None
        # close it to other users; `find` then rejects files that they have written
        if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            folder.chmod(stat.S_IRWXU)
    except (OSError, RuntimeError):  # the folder cannot be written, or there is no home
        return None
    return folder


def find(folder: Path, key: str) -> Path | None:
    """Return the library that was kept under a key, if the user owns it and it has not changed."""
    for path in folder.glob(f"kernels-{key}-*{SUFFIX}"):
        found = path.lstat()
        own = stat.S_ISREG(found.st_mode) and _is_own(found)
        foreign = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if own and not foreign and path.name == _name(key, path):
            return path
    return None


def keep(folder: Path, key: str, library: Path) -> Path:
    """Copy a library into the folder, and return its path there; return the old path if the copy
    fails. Remove other files with that key: they are damaged.
    """
    try:
        for path in folder.glob(f"kernels-{key}-*{SUFFIX}"):
            path.unlink()
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            copy = Path(shutil.copyfile(library, Path(temporary) / library.name))
            copy.chmod(stat.S_IRWXU)
            # rename it when it is complete, so that no other process sees a part of it
            return copy.replace(folder / _name(key, copy))
    except OSError:
        return library


@contextlib.contextmanager
def locked(folder: Path | None) -> Iterator[None]:
    """Wait until no other process is in this block. On Windows no process waits: each compiles, and
    the last one's library is kept.
    """
    if folder is None or sys.platform == "win32":
        yield
        return
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed, or the process ends
        yield


def _name(key: str, path: Path) -> str:
    return f"kernels-{key}-{hashlib.sha256(path.read_bytes()).hexdigest()}{SUFFIX}"


def _is_own(found: os.stat_result) -> bool:
    return sys.platform == "win32" or found.st_uid == os.geteuid()
