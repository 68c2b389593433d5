"""Conduct `varreg bench`: measure, print and save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from varreg.errors import VarregError
from varreg.lab import displays, store
from varreg.lab.bench import costs, output
from varreg.lab.bench.bench_plan import Plan

INTERRUPTED = 130
"""The exit code of a command that Ctrl-C stopped."""


def conduct(plan: Plan, json: Path | None, command: list[str]) -> int:
    """Carry out a plan: measure, print and save. Return the exit code."""
    if json is not None:
        store.check_writable(json.absolute().parent)
        if json.is_dir():
            raise VarregError(f"varreg: --json must be a file, and {json} is a folder.")
    console = displays.new_console()
    rows: list[dict[str, Any]] = []
    stopped = False
    try:
        with displays.measured_parts(console, plan.parts()) as report:
            rows.extend(costs.run(plan, report))
    except KeyboardInterrupt:
        stopped = True
    record = output.record(plan, rows, command)
    if rows:
        profiles = [output.profiles(row) for row in rows if plan.profile]
        texts = [
            output.results(rows),
            output.about(plan),
            record["measured"],
            *profiles,
            output.sentences(rows),
        ]
        print("\n" + "\n\n".join(texts))
    if stopped:
        print("Stopped; nothing was saved.")
        return INTERRUPTED
    if json is not None:
        store.write_json(json, record)
    return 0
