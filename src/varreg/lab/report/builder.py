"""Build the report of an experiment from saved results alone: an HTML page that needs no network,
with figures and tables as files beside it.

The folder may be someone else's: names in it are not imported or run, and links out of it are not
followed.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import jinja2

from varreg.errors import VarregError
from varreg.lab import schema, store
from varreg.lab.experiments.kinds import restore
from varreg.lab.experiments.record import read_record_of
from varreg.lab.report.csv_tables import csv_of
from varreg.lab.report.document import Findings, Page

TAGS = {
    "better": "lower test loss",
    "tuned": "lower test loss, but no sign that λ did it",
    "worse": "higher test loss",
    "same": "no detectable difference",
    "mixed": "most seeds and the mean differ",
    "unknown": "cannot be said",
    "explained": "it reproduces, and a longer step explains it",
    "reproduced": "it reproduces",
    "refuted": "it does not reproduce",
    "theory": "what holds, and what does not",
    "unexpected": "not what was found before",
}
"""The words of a page for each kind of verdict."""


def build(folder: Path) -> tuple[Path, Findings]:
    """Build the report in a results folder; return the path of the page, and the findings.

    Each file is written completely or not at all.
    """
    record = read_record_of(folder)
    store.check_writable(folder)
    experiment = restore(folder, record)
    results = experiment.read(folder)
    with experiment.guard(folder):
        findings = experiment.analyze(results)
        page = experiment.page(results, findings, record.get("about", ""))
        files = files_of(page, record, findings)
    _write(folder, files)
    return folder / "report.html", findings


def files_of(page: Page, record: dict[str, Any], findings: Findings) -> dict[str, bytes]:
    """Return all files of a report, by their names."""
    files: dict[str, bytes] = {}
    for name, (svg, png) in page.figures.items():
        files |= {f"figures/{name}.svg": svg.encode(), f"figures/{name}.png": png}
    files |= {f"{name}.csv": csv_of(rows) for name, rows in page.tables.items()}
    head = {
        "title": page.title,
        "about": page.about,
        "command": shlex.join(record.get("command", [])),
        "environment": schema.environment_of(record),
    }
    files["results.json"] = store.json_of({**head, "arguments": record["arguments"], **findings})
    files["report.html"] = _html(page, head, findings).encode()
    return files


def _html(page: Page, head: dict[str, Any], findings: Findings) -> str:
    """Return the page as HTML. All text is escaped."""
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("varreg.lab.report"),
        autoescape=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return templates.get_template("report.html").render(
        **head,
        verdict=findings["verdict"],
        warnings=findings["warnings"],
        sections=page.sections,
        tags=TAGS,
        tables=list(page.tables),
    )


def _write(folder: Path, files: dict[str, bytes]) -> None:
    """Write files by their names. Each replaces an existing file, so that links are not followed.
    The folder of figures might be a link.
    """
    store.check_inside(folder, folder / "figures")
    try:
        (folder / "figures").mkdir(exist_ok=True)
        for name, content in files.items():
            store.write(folder / name, content)
    except OSError as error:
        raise VarregError(f"varreg: the page cannot be written to {folder}: {error}.") from error
