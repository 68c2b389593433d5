"""Run a script in which things go wrong: `faulty.py script arguments`, with $FAULTS =
"rank:function:call:what", one for each (re)start.

When that rank comes to that call of `all_reduce` (in the middle of a backward pass) or of `fsync`
(of a checkpoint), it is "killed" or "hung".
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
from pathlib import Path

import torch.distributed as dist

PLACES = {"all_reduce": dist, "fsync": os}


def arm(function: str, call: int, what: str) -> None:
    place = PLACES[function]
    original, calls = getattr(place, function), 0

    def faulty(*arguments, **options):
        nonlocal calls
        calls += 1
        if calls == call:
            print(f"{what} in {function} at {time.time()}", flush=True)
            if what == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1000)
        return original(*arguments, **options)

    setattr(place, function, faulty)


if __name__ == "__main__":
    faults, start = os.environ["FAULTS"].split(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if start < len(faults):
        rank, function, call, what = faults[start].split(":")
        if rank == os.environ["RANK"]:
            arm(function, int(call), what)
    script = sys.argv[1]
    sys.argv[:] = sys.argv[1:]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")
