"""The table of docs/develop/architecture.md."""

from __future__ import annotations

from tools.tables.cells import markdown


def limits(saved: dict[str, dict[str, float]]) -> str:
    """Return what `tools.house` measured: before, now, and the aim."""
    rows = [
        [name, *(f"{row[key]:g}" if key in row else "" for key in ("0.1", "limit", "aim"))]
        for name, row in saved.items()
    ]
    return markdown(["", "0.1", "now", "aim"], rows)
