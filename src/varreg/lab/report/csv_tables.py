"""Tables of a report as CSV: runs, and their evaluations."""

from __future__ import annotations

import csv
import io
from typing import Any

from varreg.lab import specs
from varreg.lab.runs.config import Arms
from varreg.lab.runs.metrics import effective_lambda

Rows = list[dict[str, Any]]
CURVES = (
    "train_loss",
    "train_accuracy",
    "valid_loss",
    "valid_accuracy",
    "test_loss",
    "test_accuracy",
)


def runs_table(arms: Arms) -> Rows:
    """Return one row for each run of an arm."""
    rows = []
    for name, runs in arms.items():
        for run in runs:
            config = run["config"]
            rows.append(
                {
                    "arm": name,
                    "optimizer": specs.spell(config["optimizer"], config["options"]),
                    "lr": config["lr"],
                    "seed": config["seed"],
                    "diverged": run["diverged"],
                    "steps": run["step"],
                    "seconds": run["seconds"],
                    "effective_lambda": effective_lambda(run),
                    **{metric: run["evaluations"][metric][-1] for metric in CURVES},
                }
            )
    return rows


def curves_table(arms: Arms) -> Rows:
    """Return one row for each evaluation of each run."""
    return [
        {
            "arm": name,
            "seed": run["config"]["seed"],
            **{key: values[i] for key, values in run["evaluations"].items()},
        }
        for name, runs in arms.items()
        for run in runs
        for i in range(len(run["evaluations"]["step"]))
    ]


def csv_of(rows: Rows) -> bytes:
    """Return rows as the bytes of a CSV file."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _cell(value) for key, value in row.items()} for row in rows)
    return buffer.getvalue().encode()


def _cell(value: Any) -> Any:
    """Return a value that no spreadsheet interprets as a formula."""
    formula = isinstance(value, str) and len(value) > 1 and value[0] in "=+-@"
    return f"'{value}" if formula else value
