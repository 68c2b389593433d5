"""A progress bar on the terminal, by tqdm or rich, whichever is installed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from varreg.errors import VarregError


def bar(items: Iterable[Any], what: str, total: int | None, wanted: bool | None) -> Iterator[Any]:
    """Yield the items, and show a progress bar.

    If `wanted` is None, show it only on a terminal, and only if tqdm or rich is installed. If True,
    show it always; raise a VarregError if neither is installed.
    """
    if wanted is False or (wanted is None and not sys.stderr.isatty()):
        yield from items
        return
    if (tqdm := _imported("tqdm.auto")) is not None:
        yield from tqdm.tqdm(items, desc=what, total=total, unit="batch")
    elif (rich := _imported("rich.progress")) is not None:
        yield from rich.track(items, description=what, total=total)
    elif wanted:
        raise VarregError(
            "varreg: progress=True needs tqdm or rich: `pip install tqdm`, or leave it out."
        )
    else:
        yield from items


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
