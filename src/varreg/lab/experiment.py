"""An experiment: a plan that says which runs are needed, given the results so far; and a folder that keeps them."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import Any, Protocol

from varreg.lab import saved, store, tasks
from varreg.lab.environment import environment
from varreg.lab.pool import Pool
from varreg.lab.run import Config, Results, Run, read_result
from varreg.lab.team import Team


class Experiment(Protocol):
    """What both `Reproduction` and `Comparison` are."""

    @property
    def kind(self) -> str: ...

    def arguments(self) -> dict[str, Any]:
        """All that the plan depends on."""
        ...

    def about(self) -> str:
        """The task, in words."""
        ...

    def plan(self, results: Results) -> list[Config]:
        """All runs that are known to be needed, given the results so far, by name. Pure."""
        ...


class Watcher(Protocol):
    """Told of what happens."""

    def planned(self, configs: list[Config], done: int) -> None: ...
    def progress(self, name: str, step: int, total: int) -> None: ...
    def ended(self, config: Config, result: dict[str, Any]) -> None: ...


RESTORE = "Restore it, or choose another folder: without it, nobody knows what the runs come from."


def read_about(path: Path) -> dict[str, Any]:
    """What an experiment.json says: at least a kind and arguments."""
    about: dict[str, Any] = store.read_json(path, RESTORE)
    if fault := saved.about_fault(about):
        raise store.damaged(path, "what was written down of an experiment", fault, RESTORE)
    return about


def begin(experiment: Experiment, folder: Path, data_dir: Path | None, command: list[str]) -> str:
    """Check that it can be done, before anything is trained, and write down what will be; the fingerprint of its task.

    A folder that has another experiment in it is an error, as is a task that has changed since.
    """
    path = folder / "experiment.json"
    for name in ("experiment.json", "runs", "figures"):
        store.check_inside(folder, folder / name)
    if (folder / "theory.json").exists():
        raise ValueError(f"varreg: {folder} has another experiment in it (kind: theory). Choose another folder with --out.")
    kept = ("config.json", "result.json", "checkpoint.pt")
    begun = any(path for name in kept for path in (folder / "runs").glob(f"*/{name}"))  # else nothing can be lost
    if begun and not path.exists():
        raise ValueError(f"varreg: {folder} has runs and no experiment.json. {RESTORE}")
    known = read_about(path) if begun else None
    if known is not None:
        arguments = store.as_saved(experiment.arguments())
        other = saved.differences({"kind": known["kind"], **known["arguments"]}, {"kind": experiment.kind, **arguments})
        if other:
            raise ValueError(f"varreg: {folder} has another experiment in it ({other}). Choose another folder with --out.")
    configs = experiment.plan({})
    found = tasks.check(configs[0].task, data_dir, configs[0].batch)
    for config in {config.optimizer: config for config in configs}.values():
        Run(config, None, data_dir).verify()
    tasks.load.cache_clear()  # the other processes have their own
    if known is not None and known.get("fingerprint") != found:
        raise ValueError(
            f"varreg: the data or the model of task {configs[0].task} are not those that the results in {folder} come from. "
            "Choose another folder with --out."
        )
    if known is None:
        about = {"kind": experiment.kind, "arguments": store.as_saved(experiment.arguments()), "about": experiment.about()}
        store.write_json(path, {**about, "fingerprint": found, "command": command, "environment": environment()})
    return found


def results_of(experiment: Experiment, folder: Path) -> Results:
    """Those that are there, by name. One that is damaged, or of another configuration, is an error."""
    store.check_inside(folder, folder / "runs")
    results: Results = {}
    while True:
        new = {}
        for config in experiment.plan(results):
            if config.name not in results:
                result = read_result(folder / "runs" / config.name, config)
                if result is not None:
                    new[config.name] = result
        if not new:
            return results
        results |= new


def carry_out(
    experiment: Experiment,
    folder: Path,
    jobs: int,
    data_dir: Path | None,
    watcher: Watcher,
    command: list[str],
    team: Team | None = None,
) -> Results:
    """All runs, `jobs` at a time; those that are there are not run again.

    In a team, every process goes through the same plan and takes the runs that no other one is at, until all of them have ended.
    """
    team = team or Team.alone()
    store.check_writable(folder)
    with contextlib.ExitStack() as stack:
        if team.first:
            stack.enter_context(store.alone(folder, "this experiment"))
        fingerprint = team.from_first(lambda: begin(experiment, folder, data_dir, command))
        results = results_of(experiment, folder)
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
            pool = pool or stack.enter_context(Pool(jobs, data_dir, fingerprint, tuple(sys.path[:1]), shared=team.world > 1))
            before = len(results)
            for config, result in pool(todo, folder / "runs", watcher.progress):
                results[config.name] = result
                watcher.ended(config, result)
            if len(results) == before:
                time.sleep(0.1)  # others are at all that is left
