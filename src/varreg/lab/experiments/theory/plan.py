"""`varreg theory`: all checks, the comparison of regularizers with the best one in hindsight, and
the points of figures, in one saved result.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from varreg.errors import VarregError
from varreg.lab import schema, store
from varreg.lab.environment import environment
from varreg.lab.experiments.record import FILE, read_record
from varreg.lab.experiments.theory import analysis, page
from varreg.lab.experiments.theory.computations import PARTS, Computed, Part
from varreg.lab.report.document import Findings, Page

SAVED = "theory.json"
PARTIAL = "theory.partial.json"
REMEDY = "Restore it; or delete it, and run `varreg theory` again."


@dataclass(frozen=True)
class Theory:
    """The experiment `varreg theory`. It has no arguments."""

    kind = "theory"

    @classmethod
    def of(cls, saved: dict[str, Any]) -> Theory:
        """Return the experiment; arguments in a file are ignored."""
        return cls()

    @staticmethod
    def is_saved_in(folder: Path) -> bool:
        """Return whether a folder has results of `varreg theory`."""
        return (folder / SAVED).exists()

    def plan(self, results: Computed) -> list[Part]:
        """Return all parts."""
        return list(PARTS)

    def read(self, folder: Path) -> Computed:
        """Return the saved results of each part, by its name."""
        store.check_inside(folder, folder / SAVED)
        results: Computed = store.read_json(folder / SAVED, REMEDY)
        return results

    def analyze(self, results: Computed) -> Findings:
        """Return the findings from the results."""
        return analysis.analyze(results)

    def page(self, results: Computed, findings: Findings, about: str) -> Page:
        """Return the page that shows the findings."""
        return page.page_of(findings)

    @contextlib.contextmanager
    def guard(self, folder: Path) -> Iterator[None]:
        """Turn any error inside of the `with` block into a `DamagedError`. The block only uses the
        contents of the file, so the file must be the cause.
        """
        try:
            yield
        except Exception as error:
            got = f"something else ({type(error).__name__}: {error})"
            expected = "what `varreg theory` saves"
            raise store.damaged(folder / SAVED, expected, got, REMEDY) from error


def carry_out(folder: Path, command: list[str], ended: Callable[[str, float], None]) -> Computed:
    """Compute all parts, save them, and return them. `ended` is called with each part's name and
    its seconds; 0 if the part was saved before.

    Each part is saved when it ends. If a command was stopped, the same command continues with the
    saved parts, if versions and machine are the same.
    """
    store.check_writable(folder)
    with store.alone(folder, "varreg theory"):
        path, partial = folder / FILE, folder / PARTIAL
        if path.exists() and read_record(path)["kind"] != Theory.kind:
            raise VarregError(
                f"varreg: {folder} has another experiment in it. Choose another folder with --out."
            )
        about = environment()
        results = _kept(partial, about)
        threads = torch.get_num_threads()
        # Tensors are small: more threads would be slower.
        torch.set_num_threads(1)
        try:
            for part in Theory().plan({}):
                start = time.perf_counter()
                if part.name in results:
                    ended(part.name, 0.0)
                    continue
                results[part.name] = part.compute()
                store.write_json(partial, {"environment": about, "results": results})
                ended(part.name, time.perf_counter() - start)
        finally:
            torch.set_num_threads(threads)
        record = {
            "kind": Theory.kind,
            "arguments": {},
            "about": "",
            "command": command,
            "environment": about,
        }
        store.write_json(folder / SAVED, results)
        store.write_json(path, record)
        partial.unlink()
    return results


def _kept(partial: Path, about: dict[str, Any]) -> Computed:
    """Return the parts that a stopped command computed in this environment; empty if there are none
    that can be used.
    """
    store.check_inside(partial.parent, partial)
    try:
        saved = store.read_json(partial) if partial.exists() else {}
    except store.DamagedError:
        return {}
    known = {part.name for part in PARTS}
    if not schema.is_table(saved) or saved.get("environment") != store.as_saved(about):
        return {}
    return {name: saved["results"][name] for name in saved.get("results", {}) if name in known}
