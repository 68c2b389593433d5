"""Find, compare and replace the tables between the marks of a page."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
BEGIN = re.compile(r"^<!-- table: (?P<name>[\w-]+)(?: from\s(?P<files>[^>]+?))? -->$", re.M)
END = "<!-- end of table -->"


class TableError(ValueError):
    """A page whose marks or files are wrong."""


class Block(NamedTuple):
    """A table on a page: its function, its files, and the text as it stands there."""

    name: str
    files: tuple[str, ...]
    text: str


Render = Callable[[Block], str]


def split(text: str, page: str = "") -> Iterator[str | Block]:
    """Yield the text of a page and its tables, in turn."""
    place = 0
    if len(BEGIN.findall(text)) != len(re.findall(r"^<!-- table:", text, re.M)):
        raise TableError(f"{page}: a mark is not written as <!-- table: NAME from FILE … -->")
    for match in BEGIN.finditer(text):
        if match.start() < place:
            raise TableError(f"{page}: the table {match['name']} begins inside of another")
        end = text.find(END, match.end())
        if end < 0:
            raise TableError(f"{page}: the table {match['name']} has no end: {END}")
        yield text[place : match.end()]
        yield Block(
            match["name"], tuple((match["files"] or "").split()), text[match.end() : end].strip()
        )
        place = end
    yield text[place:]


def renewed(text: str, render: Render, page: str = "") -> str:
    """Return a page with all of its tables rendered again."""
    return "".join(
        part if isinstance(part, str) else f"\n\n{render(part)}\n\n" for part in split(text, page)
    )


def renew(path: Path, render: Render) -> bool:
    """Renew the tables of a file; return whether there was something to change."""
    text = path.read_text()
    new = renewed(text, render, path.name)
    if new != text:
        path.write_text(new)
    return new != text


def differences(path: Path, render: Render) -> Iterator[str]:
    """Yield a message for each table of a page that is another: the page, the table, and the first
    line that differs.
    """
    page = str(path.relative_to(ROOT))
    for part in split(path.read_text(), page):
        if isinstance(part, str):
            continue
        lines = itertools.zip_longest(part.text.splitlines(), render(part).splitlines())
        differing = next(((old, new) for old, new in lines if old != new), None)
        if differing:
            old, new = ("(no line)" if line is None else line for line in differing)
            yield f"{page}, table {part.name}:\n  page: {old}\n  file: {new}"
