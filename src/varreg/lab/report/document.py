"""The document of a report: sections of figures and tables, added one by one."""

from __future__ import annotations

import hashlib
import io
import re
from typing import Any

from matplotlib.figure import Figure

from varreg.lab.report.csv_tables import Rows
from varreg.lab.report.style import save

Findings = dict[str, Any]
"""The findings from results in plain values, as in `results.json`. All have a `verdict` and
`warnings`.
"""


class Page:
    """The contents of a page, added piece by piece. The rows of `tables` are saved as CSV."""

    def __init__(self, title: str, about: str, tables: dict[str, Rows]) -> None:
        self.title, self.about, self.tables = title, about, tables
        self.sections: list[dict[str, Any]] = []
        self.figures: dict[str, tuple[str, bytes]] = {}
        """SVG and PNG, by name."""

    def section(self, title: str, text: str = "") -> None:
        """Begin a section, to which figures and tables are added."""
        self.sections.append({"title": title, "text": text, "figures": [], "tables": []})

    def figure(self, name: str, made: Figure, caption: str, tab: str = "") -> None:
        """Add a figure to the last section. Several figures of a section are shown under tabs."""
        self.figures[name] = svg(made, name), png(made)
        width = round(made.get_figwidth() * 104)
        self.sections[-1]["figures"].append(
            {"svg": self.figures[name][0], "caption": caption, "tab": tab or name, "width": width}
        )

    def table(
        self,
        head: list[str],
        rows: list[tuple[str, list[str]]],
        title: str = "",
        prose: bool = False,
    ) -> None:
        """Add a table to the last section. A table with a title is collapsed, below the figures. A
        table with `prose` has sentences in its second and third column.
        """
        cells = [{"kind": kind, "cells": row} for kind, row in rows]
        self.sections[-1]["tables"].append(
            {"head": head, "rows": cells, "title": title, "prose": prose}
        )


def png(made: Figure) -> bytes:
    """Draw a figure as PNG."""
    buffer = io.BytesIO()
    save(made, buffer, format="png", dpi=150, metadata={"Software": None})
    return buffer.getvalue()


def svg(made: Figure, name: str) -> str:
    """Draw a figure as a part of a page: without a header, and with ids that are unique there."""
    buffer = io.StringIO()
    metadata = {"Date": None, "Creator": None, "Format": None, "Type": None}
    save(made, buffer, format="svg", metadata=metadata)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    mark = "f" + hashlib.sha256(name.encode()).hexdigest()[:6]
    text = re.sub(r'\bid="', f'id="{mark}-', text)
    text = re.sub(r'((?:xlink:)?href)="#', rf'\1="#{mark}-', text)
    return text.replace("url(#", f"url(#{mark}-")
