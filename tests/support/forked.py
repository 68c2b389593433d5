"""Run code in a new process that has imported torch and varreg already: it is forked off a server,
which saves the two seconds that these imports take. Where imports are tested, start Python instead.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import NamedTuple

import torch.multiprocessing as mp

from varreg._torch import COMPILER

# What the server imports. There is one for all that asks: ranks of the distributed tests, and the
# pool of the lab.
PRELOADED = [
    COMPILER,
    "tests.support.ranks",
    "tests.support.sharded_ranks",
    "varreg.lab.runs.pool",
]


class Ended(NamedTuple):
    """How a process ended, as `subprocess.run` would say it."""

    returncode: int
    stdout: str
    stderr: str


def run(code: str) -> Ended:
    """Run code in this process's environment; return how it ended and all that it said."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(target=_child, args=(code, folder, dict(os.environ)))
        process.start()
        process.join()
        said = [(Path(folder) / name).read_text() for name in ("stdout", "stderr")]
        return Ended(process.exitcode, *said)


def _child(code: str, folder: str, environment: dict[str, str]) -> None:
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        file = os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(file, descriptor)
    os.environ.clear()
    os.environ.update(environment)
    ended = 0
    try:
        exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})
    except BaseException:
        traceback.print_exc()
        ended = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ended)
