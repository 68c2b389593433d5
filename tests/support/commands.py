"""Run the command line: in its own process, if the test needs one; otherwise in this process."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from varreg import cli

LIMIT = 1800
"""Seconds after which a process counts as hung: many times what it takes on a busy machine."""


def varreg(*arguments: str, cwd: Path, expect: int = 0, **kwargs) -> str:
    """Run the command in a process, and return all that it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "varreg", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
        **kwargs,
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout + done.stderr


def command(*arguments: str | Path) -> str:
    """Run the real entry point in this process; return the error that it ends with, or nothing."""
    before, sys.argv = sys.argv, ["varreg", *map(str, arguments)]
    code = None
    try:
        cli.main()
    except SystemExit as end:
        code = end.code
    finally:
        sys.argv = before
    assert not code or isinstance(code, str), code  # text: exit code 1, and no traceback
    return code or ""


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    """Return once the condition holds; fail if the process has ended before."""
    end = time.monotonic() + LIMIT
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.02)
