"""An experiment: a plan that says which runs are needed, given the results so far; and a folder that keeps them."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import Any, Protocol

from varreg.lab import store, tasks
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


def begin(experiment: Experiment, folder: Path, data_dir: Path | None, command: list[str]) -> str:
    """Check that it can be done, before anything is trained, and write down what will be; the fingerprint of its task.

    A folder that has another experiment in it is an error, as is a task that has changed since.
    """
    path = folder / "experiment.json"
    begun = any((folder / "runs").glob("*/config.json"))  # where no run was, nothing can be lost
    known = store.read_json(path) if begun and path.exists() else None
    if known is not None:
        was, now = (
            {"kind": k, **a} for k, a in ((known["kind"], known["arguments"]), (experiment.kind, _plain(experiment.arguments())))
        )
        other = "; ".join(f"{k}: {was.get(k)} there, {now.get(k)} asked for" for k in {**was, **now} if was.get(k) != now.get(k))
        if other:
            raise ValueError(f"varreg: {folder} has another experiment in it ({other}). Choose another folder with --out.")
    configs = experiment.plan({})
    found = tasks.check(configs[0].task, data_dir, configs[0].batch)
    for config in {config.optimizer: config for config in configs}.values():
        Run(config, None, data_dir).verify()
    tasks.load.cache_clear()  # the other processes have their own
    if known is not None and known["fingerprint"] != found:
        raise ValueError(
            f"varreg: the data or the model of task {configs[0].task} are not those that the results in {folder} come from. "
            "Choose another folder with --out."
        )
    if known is None:
        about = {"kind": experiment.kind, "arguments": _plain(experiment.arguments()), "about": experiment.about()}
        store.write_json(path, {**about, "fingerprint": found, "command": command, "environment": environment()})
    return found


def _plain(value: Any) -> Any:
    """As it comes back from a file."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def results_of(experiment: Experiment, folder: Path) -> Results:
    """Those that are there, by name."""
    results: Results = {}
    while True:
        new = {}
        for config in experiment.plan(results):
            if config.name not in results:
                result = read_result(folder / "runs" / config.name)
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
