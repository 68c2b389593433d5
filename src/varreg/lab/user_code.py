"""Errors in a user's own code: return the part of the traceback in that code."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

_NOT_THEIRS = (
    str(Path(__file__).parents[1]),
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    "<frozen ",
)


def traceback_of(error: BaseException) -> str:
    """Return the traceback of the cause of an error, from the user's code on; an empty text if no
    frame is the user's.
    """
    cause = error.__cause__
    trace = None if cause is None else cause.__traceback__
    while trace is not None and not _is_theirs(trace):
        trace = trace.tb_next
    if trace is None:
        return ""
    assert cause is not None
    return "".join(traceback.format_exception(type(cause), cause, trace))


def _is_theirs(trace: TracebackType) -> bool:
    return not trace.tb_frame.f_code.co_filename.startswith(_NOT_THEIRS)
