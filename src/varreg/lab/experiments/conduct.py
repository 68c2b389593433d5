"""Conduct an experiment: do its runs, show progress, and print the report."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from varreg.lab import displays
from varreg.lab.environment import cores
from varreg.lab.experiments import execution
from varreg.lab.experiments.experiment import TrainingExperiment
from varreg.lab.experiments.record import FILE
from varreg.lab.experiments.theory import plan as theory
from varreg.lab.experiments.theory.computations import PARTS
from varreg.lab.experiments.theory.rows import terminal_table
from varreg.lab.report import builder
from varreg.lab.report.document import Findings
from varreg.lab.report.format import text
from varreg.lab.runs.team import Team

INTERRUPTED = 130
"""The exit code of a command that Ctrl-C stopped."""


def conduct(
    experiment: TrainingExperiment,
    about: str,
    out: Path,
    jobs: int,
    data_dir: Path | None,
    total: int,
    command: list[str],
) -> int:
    """Do the runs of an experiment, build and print its report; return the exit code.

    Ctrl-C leaves a partial report, and the experiment can be continued. In a team of processes,
    only the first one prints and writes the report.
    """
    team = Team.of_torchrun()
    jobs = jobs or max(cores() // team.here, 1)
    console = displays.new_console(quiet=not team.first)
    console.print(about, soft_wrap=True)
    if team.world > 1:
        console.print(
            f"{team.world} processes from torchrun: runs are shared out between them; each run is "
            f"trained by one process. {jobs} at a time in each of them (--jobs).",
            soft_wrap=True,
        )
    stopped = False
    try:
        with displays.RunsDisplay(total, console) as display:
            execution.carry_out(experiment, out, jobs, data_dir, display, command, team)
    except KeyboardInterrupt:
        stopped = True
    if stopped and not (team.first and (out / FILE).exists()):
        return INTERRUPTED
    if not team.first:
        return 0
    page, findings = builder.build(out)
    if arms := experiment.terminal_table(findings):
        console.print(f"\n{arms}\n", soft_wrap=True)
    _print_report(console, page, findings)
    if stopped:
        console.print("Stopped. The same command continues from here.")
        return INTERRUPTED
    return 0


def conduct_theory(out: Path, command: list[str]) -> int:
    """Check the paper's claims, build and print the report. Return the exit code: 1 if a result is
    unexpected.
    """
    console = displays.new_console(width=None if sys.stdout.isatty() else 100)
    try:
        with displays.ended_parts(console, len(PARTS)) as ended:
            theory.carry_out(out, command, ended)
    except KeyboardInterrupt:
        console.print("Stopped. Finished checks are saved: the same command continues from here.")
        return INTERRUPTED
    page, findings = builder.build(out)
    console.print(terminal_table(findings))
    _print_report(console, page, findings)
    return 1 if findings["unexpected"] else 0


def _print_report(console: Console, page: Path, findings: Findings) -> None:
    """Print the verdict and the path of the page."""
    console.print(text(findings), soft_wrap=not console.is_terminal)
    console.print(f"\nReport: {page}", soft_wrap=True)
