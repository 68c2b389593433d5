"""Tables in Markdown, and their cells."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

NUMBER = re.compile(r"[−+]?[\d∞–]")


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown. Columns that are mostly numbers are aligned to the right; the
    site does not break their lines.

    >>> print(markdown(["", "loss"], [["SGD", "0.5"], ["Adam", "0.4"]]))
    |  | loss |
    | --- | ---: |
    | SGD | 0.5 |
    | Adam | 0.4 |
    """
    rows = list(rows)
    columns = list(zip(*rows, strict=True))
    rule = ["---:" if _is_numbers(column) else "---" for column in columns]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))


def _is_numbers(column: Sequence[str]) -> bool:
    """Return whether most cells that are not empty are numbers."""
    filled = [cell for cell in column if cell]
    return 2 * sum(bool(NUMBER.match(cell)) for cell in filled) > len(filled)


def ratio(values: Sequence[float], digits: int = 2) -> str:
    """Return a median with the 10 % and 90 % quantiles.

    >>> ratio([1.0482, 0.9359, 1.2155])
    '1.05 (0.94–1.22)'
    """
    middle, low, high = (f"{value:.{digits}f}" for value in values)
    return f"{middle} ({low}–{high})"


def once(rows: Iterable[list[str]]) -> list[list[str]]:
    """Return rows in which a first cell is left out if the row before has the same.

    >>> once([["a", "1"], ["a", "2"], ["b", "3"]])
    [['a', '1'], ['', '2'], ['b', '3']]
    """
    made: list[list[str]] = []
    last = ""
    for row in rows:
        made.append([row[0] if row[0] != last else "", *row[1:]])
        last = row[0]
    return made
