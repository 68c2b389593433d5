"""`experiment.json`: the record of an experiment, written before it begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from varreg.errors import VarregError
from varreg.lab import schema, store

FILE = "experiment.json"
RESTORE = "Restore it, or choose another folder: without it, the origin of the runs is unknown."


def read_record(path: Path) -> dict[str, Any]:
    """Return the contents of an experiment.json: at least a kind and arguments."""
    record: dict[str, Any] = store.read_json(path, RESTORE)
    if fault := schema.record_file_fault(record):
        raise store.damaged(path, "the record of an experiment", fault, RESTORE)
    return record


def read_record_of(folder: Path) -> dict[str, Any]:
    """Return the record of the experiment in a folder, which may be someone else's."""
    path = folder / FILE
    if not folder.is_dir():
        raise VarregError(f"varreg: {folder} is not a folder.")
    if not path.exists():
        raise VarregError(
            f"varreg: {folder} has no experiment.json: it is not a folder of `varreg compare`, "
            "`reproduce`, `scaling` or `theory`."
        )
    store.check_inside(folder, path)
    return read_record(path)
