"""An experiment: a plan that says which runs are needed, given the results so far; and a folder that keeps them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from varreg.lab import store
from varreg.lab.environment import environment
from varreg.lab.pool import Pool
from varreg.lab.run import Config, Results, read_result


class Experiment(Protocol):
    """What both `Reproduction` and `Comparison` are."""

    @property
    def kind(self) -> str: ...

    def arguments(self) -> dict[str, Any]:
        """All that the plan depends on."""
        ...

    def plan(self, results: Results) -> list[Config]:
        """All runs that are known to be needed, given the results so far, by name. Pure."""
        ...


class Watcher(Protocol):
    """Told of what happens."""

    def planned(self, configs: list[Config], done: int) -> None: ...
    def progress(self, name: str, step: int, total: int) -> None: ...
    def ended(self, config: Config, result: dict[str, Any]) -> None: ...


def begin(experiment: Experiment, folder: Path, command: list[str]) -> None:
    """Write down what will be done; a folder that has another experiment in it is an error."""
    store.check_writable(folder)
    path = folder / "experiment.json"
    if path.exists():
        known = store.read_json(path)
        if known["kind"] != experiment.kind or known["arguments"] != _plain(experiment.arguments()):
            raise ValueError(
                f"varreg: {folder} has another experiment in it: {known['kind']} with {known['arguments']}; asked for: "
                f"{experiment.kind} with {_plain(experiment.arguments())}. Choose another folder with --out."
            )
        return
    about = {
        "kind": experiment.kind,
        "arguments": _plain(experiment.arguments()),
        "command": command,
        "environment": environment(),
    }
    store.write_json(path, about)


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


def carry_out(experiment: Experiment, folder: Path, jobs: int, data_dir: Path | None, watcher: Watcher) -> Results:
    """All runs, `jobs` at a time; those that are there are not run again."""
    with store.alone(folder, "this experiment"):
        results = results_of(experiment, folder)
        with contextlib.ExitStack() as stack:
            pool: Callable[..., Any] | None = None
            while True:
                todo = [config for config in experiment.plan(results) if config.name not in results]
                watcher.planned(todo, len(results))
                if not todo:
                    return results
                pool = pool or stack.enter_context(Pool(min(jobs, len(todo)), data_dir, tuple(sys.path[:1])))
                for config, result in pool(todo, folder / "runs", watcher.progress):
                    results[config.name] = result
                    watcher.ended(config, result)
