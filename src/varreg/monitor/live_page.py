"""Make one self-contained page from the lines of a journal. It needs no network."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

from varreg.monitor.journal import Log
from varreg.thresholds import PAGE_STALE

ASSETS = Path(__file__).parent / "assets"


def html(log: Log, status: dict[str, Any]) -> str:
    """Return the page as HTML, with the records as they are in the file.

    `status` has the values that change while training runs. Its `refresh` is the interval, in
    seconds, at which the page reloads itself; without it, the page does not.
    """
    about = {
        "sessions": log.sessions,
        "layers": log.layers,
        "end": log.end,
        "stale": PAGE_STALE,
        **status,
    }
    data = f'{{"about":{json.dumps(about)},"records":[{",".join(log.lines)}]}}'
    before, after = _frame()
    # only these two sequences could end the script element in which the data are
    return before + data.replace("</", "<\\/").replace("<!--", "<\\u0021--") + after


def write(path: Path, text: str) -> None:
    """Write a page completely, or leave the old one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


@functools.cache
def _frame() -> tuple[str, str]:
    """Return the parts of the page before and after the data."""

    def asset(name: str) -> str:
        return (ASSETS / name).read_text(encoding="utf-8")

    text = asset("page.html")
    for name in ("uplot/uPlot.min.css", "page.css", "uplot/uPlot.iife.min.js", "page.js"):
        text = text.replace(f"/* {name} */", asset(name))
    before, after = text.split("/* data */")
    return before, after
