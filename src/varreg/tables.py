"""Plain-text tables: words to the left, numbers to the right."""

from __future__ import annotations

from collections.abc import Sequence


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    words: Sequence[int] = (0,),
    total: bool = True,
) -> str:
    """Return a table. The columns in `words` are aligned to the left; with `total`, the last row is
    set apart.

    >>> print(table(("layer", "size"), [("first", "9"), ("whole", "10")]))
    layer  size
    ───────────
    first     9
    ───────────
    whole    10
    """
    cells = [head, *rows]
    widths = [max(len(c[i]) for c in cells) for i in range(len(head))]
    lines = [
        "  ".join(
            c.ljust(w) if i in words else c.rjust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    rule = "─" * max(map(len, lines))
    return "\n".join(
        [lines[0], rule, *(lines[1:] if not total else [*lines[1:-1], rule, lines[-1]])]
    )
