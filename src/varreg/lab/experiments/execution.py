"""Carry out the runs of an experiment: check it first, divide the runs among processes, and save
them in its folder.
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import Any, Protocol

from varreg.errors import VarregError
from varreg.lab import schema, store
from varreg.lab.environment import environment
from varreg.lab.experiments.experiment import TrainingExperiment
from varreg.lab.experiments.record import FILE, RESTORE, read_record
from varreg.lab.experiments.theory.plan import Theory
from varreg.lab.runs.config import Config, Results
from varreg.lab.runs.pool import Pool
from varreg.lab.runs.run import Run
from varreg.lab.runs.team import Team
from varreg.lab.tasks import check_task, lookup

ELSEWHERE = "Choose another folder with --out."


class Watcher(Protocol):
    """The interface of an observer of an experiment's progress."""

    def planned(self, configs: list[Config], done: int) -> None: ...
    def progress(self, name: str, step: int, total: int, loss: float | None) -> None: ...
    def warned(self, name: str, text: str) -> None: ...
    def ended(self, config: Config, result: dict[str, Any]) -> None: ...


def begin(
    experiment: TrainingExperiment, folder: Path, data_dir: Path | None, command: list[str]
) -> str:
    """Check, before anything is trained, that an experiment can be done, and write its record.
    Return the fingerprint of its task.

    Raise a VarregError if the folder has another experiment in it, or if the task has changed since
    the record was written.
    """
    record = _known_record(experiment, folder)
    configs = experiment.plan({})
    fingerprint = check_task.check(configs[0].task, data_dir, configs[0].batch)
    for config in {config.optimizer: config for config in configs}.values():
        Run(config, None, data_dir).verify()
    lookup.load.cache_clear()  # the other processes read the data for themselves
    if record is not None and record.get("fingerprint") != fingerprint:
        raise VarregError(
            f"varreg: the data or the model of task {configs[0].task} are not those that the "
            f"results in {folder} come from. {ELSEWHERE}"
        )
    if record is None or record["arguments"] != store.as_saved(experiment.arguments()):
        record = {
            "kind": experiment.kind,
            "arguments": store.as_saved(experiment.arguments()),
            "about": experiment.about(),
            "fingerprint": fingerprint,
            "command": command,
            "environment": environment(),
        }
        store.write_json(folder / FILE, record)
    return fingerprint


def _known_record(experiment: TrainingExperiment, folder: Path) -> dict[str, Any] | None:
    """Return the record of this experiment if it was begun here; raise if another one was."""
    for name in (FILE, "runs", "figures"):
        store.check_inside(folder, folder / name)
    if Theory.is_saved_in(folder):
        raise VarregError(
            f"varreg: {folder} has another experiment in it (kind: {Theory.kind}). {ELSEWHERE}"
        )
    kept = ("config.json", "result.json", "checkpoint.pt")
    if not any(path for name in kept for path in (folder / "runs").glob(f"*/{name}")):
        return None  # nothing can be lost
    if not (folder / FILE).exists():
        raise VarregError(f"varreg: {folder} has runs and no {FILE}. {RESTORE}")
    record = read_record(folder / FILE)
    arguments = store.as_saved(experiment.arguments())
    if record["kind"] == experiment.kind and experiment.extends(record["arguments"]):
        return record
    other = schema.differences(
        {"kind": record["kind"], **record["arguments"]}, {"kind": experiment.kind, **arguments}
    )
    if other:
        raise VarregError(f"varreg: {folder} has another experiment in it ({other}). {ELSEWHERE}")
    return record


def _extended(experiment: TrainingExperiment, folder: Path) -> TrainingExperiment:
    """Return the experiment, extended by the saved arguments in its folder. `begin` checks whether
    the experiment fits these arguments.
    """
    store.check_inside(folder, folder / FILE)
    if not (folder / FILE).exists():
        return experiment
    record = read_record(folder / FILE)
    same = record["kind"] == experiment.kind and experiment.extends(record["arguments"])
    return experiment.extending(record["arguments"]) if same else experiment


def carry_out(
    experiment: TrainingExperiment,
    folder: Path,
    jobs: int,
    data_dir: Path | None,
    watcher: Watcher,
    command: list[str],
    team: Team | None = None,
) -> Results:
    """Do all runs that are not saved yet, `jobs` at a time; return the results of all. If the
    folder has the same experiment with fewer seeds or trials, it is extended.

    In a team, every process goes through the same plan and takes runs that no other process works
    on, until all have ended.
    """
    team = team or Team.alone()
    with contextlib.ExitStack() as stack:
        if team.first:
            stack.enter_context(store.removed_if_unused(folder))
        store.check_writable(folder)
        if team.first:
            stack.enter_context(store.alone(folder, "this experiment"))
        experiment = _extended(experiment, folder)
        fingerprint = team.from_first(lambda: begin(experiment, folder, data_dir, command))
        results = experiment.read(folder)
        pool: Pool | None = None
        planned: list[Config] = []
        while True:
            plan = experiment.plan(results)
            todo = [config for config in plan if config.name not in results]
            if plan != planned:
                watcher.planned(todo, len(results))
                planned = plan
            if not todo:
                return results
            pool = pool or stack.enter_context(
                Pool(jobs, data_dir, fingerprint, tuple(sys.path[:1]), shared=team.world > 1)
            )
            before = len(results)
            for config, result in pool(todo, folder / "runs", watcher):
                results[config.name] = result
                watcher.ended(config, result)
            if len(results) == before:
                time.sleep(0.1)  # other processes work on all remaining runs
