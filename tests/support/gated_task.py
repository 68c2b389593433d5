"""The task of `own_task`, whose training waits where a test wants it to. So no test depends on the
speed of a machine.

The file is copied into the folder in which a command runs, beside `own_task`. While there is a file
"hold" with a number in it, every process that trains waits at that evaluation of its loss, and
leaves a file "held-…". While there is a file "meet", it waits for a second such process.
"""

import dataclasses
import itertools
import multiprocessing
import os
import time
from pathlib import Path

import torch.nn.functional as F

from varreg.lab import Task

calls = itertools.count(1)


def loss(output, y):
    if multiprocessing.parent_process() is not None:  # this process trains, and does nothing else
        call, hold = next(calls), Path("hold")
        if hold.exists() and call >= int(hold.read_text()):
            Path(f"held-{os.getpid()}").touch()
            while hold.exists():
                time.sleep(0.02)
        if Path("meet").exists():
            Path(f"met-{os.getpid()}").touch()
            while len(list(Path().glob("met-*"))) < 2:
                time.sleep(0.02)
    return F.cross_entropy(output, y)


def spirals() -> Task:
    import own_task  # in the folder where the command is given

    return dataclasses.replace(own_task.spirals(), loss=loss)
