"""Check or renew the tables of all pages, or print one table."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.tables.catalog import render
from tools.tables.marks import ROOT, Block, TableError, differences, renew

PAGES = ("README.md", "CONTRIBUTING.md", "docs/**/*.md")


def pages() -> list[Path]:
    """Return all pages that may have tables."""
    return [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]


def main(arguments: list[str] | None = None) -> int:
    """Do what the command line says; return 1 where a page has to be renewed."""
    parser = argparse.ArgumentParser(
        "python -m tools.tables", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--check", action="store_true", help="fail where a table is another")
    parser.add_argument("--write", action="store_true", help="renew all tables")
    parser.add_argument("table", nargs="*", help="the name of a table and its files, to print it")
    options = parser.parse_args(arguments)
    if options.table:
        name, *files = options.table
        print(render(Block(name, tuple(files), "")))
        return 0
    if options.check == options.write:
        parser.error("give --check, --write, or the name of a table and its files")
    try:
        if options.write:
            changed = [path for path in pages() if renew(path, render)]
            print("\n".join(f"renewed: {p.relative_to(ROOT)}" for p in changed) or "all were right")
            return 0
        found = [line for path in pages() for line in differences(path, render)]
    except TableError as error:
        print(error)
        return 1
    if found:
        print("\n".join(found), "\nRun python -m tools.tables --write.", sep="")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
