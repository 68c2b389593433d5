"""One training run, in a folder of its own, that can be killed at any moment and goes on where it
was.

The folder has `config.json`; while it runs, `checkpoint.pt`; and at the end `result.json` and
`weights.pt`. A run that was killed and started again ends bit for bit as one that was not: batches
depend on the seed and the step alone, and a checkpoint holds all else, metrics included.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from varreg.lab import recipe, schema, store
from varreg.lab.environment import environment
from varreg.lab.runs.config import Config
from varreg.lab.runs.run import Run
from varreg.lab.tasks.definition import Splits

ANEW = "Delete it, and the same command runs this run anew; or restore it."


def read_result(folder: Path, config: Config) -> dict[str, Any] | None:
    """Return the result of a configuration from its run's folder, or None where it did not end yet.

    One that is damaged, or of another configuration, is a `store.DamagedError`.
    """
    path = folder / "result.json"
    store.check_inside(folder.parent, path)
    if not path.exists():
        return None
    result: dict[str, Any] = store.read_json(path, ANEW)
    _check_config(path, result, config)
    plain = recipe.split(config.options, config.optimizer)[0].is_plain
    if fault := schema.result_fault(result, config.epochs if plain else None):
        raise store.damaged(path, "the result of a run", fault, ANEW)
    return result


def _check_config(path: Path, content: Any, config: Config) -> None:
    """Refuse what was made with another configuration: the name of its folder proves nothing."""
    if fault := schema.table_fault(content, {"config": schema.is_table}):
        raise store.damaged(path, "the configuration that it was made with", fault, ANEW)
    other = schema.differences(content["config"], store.as_saved(asdict(config)))
    if other:
        raise store.DamagedError(
            f"varreg: {path} comes from another configuration ({store.printable(other)}). {ANEW}"
        )


def resume(running: Run, folder: Path) -> None:
    """Set a run to where the checkpoint in its folder says it was; without one, do nothing."""
    path, about = folder / "checkpoint.pt", folder / "config.json"
    if not path.exists():
        return
    state = store.read_tensors(path, ANEW)
    if schema.is_table(state) and "config" not in state and about.exists():  # of a version before
        said = store.read_json(about, ANEW)
        state["config"] = said.get("config") if schema.is_table(said) else said
    _check_config(path, state, running.config)
    if fault := running.fault_of(state):
        raise store.damaged(path, "a checkpoint of this run", fault, ANEW)
    try:
        running.load_state_dict(state)
    except Exception as error:  # of torch, NumPy or Python, each with kinds of its own
        came = f"one that does not fit ({type(error).__name__}: {error})"
        raise store.damaged(path, "a checkpoint of this run", came, ANEW) from error


Progress = Callable[[int, int, "float | None"], None]
"""Takes a step, the number of steps, and the loss; None during an evaluation."""


class StoppedError(Exception):
    """A run was asked to stop, and can be resumed."""


def run(
    config: Config,
    folder: Path,
    splits: Splits | None = None,
    data_dir: Path | None = None,
    every: float = 5.0,
    progress: Progress = lambda step, total, loss: None,
    stop: Callable[[], bool] = lambda: False,
    patience: float | None = None,
) -> dict[str, Any]:
    """Train to the end, from wherever the folder says the run was; return what `result.json` holds.

    A checkpoint is written `every` so many seconds. `progress` is called now and then, with the
    step, the number of steps and the loss, which is None during an evaluation; once `stop()` is
    true, a last checkpoint is written and `StoppedError` raised. Where another process is at work
    on the run for more than `patience` seconds, `store.BusyError` is raised.
    """
    runs, folder = folder, config.folder_in(folder)
    store.check_inside(runs, folder)
    store.check_writable(folder)
    with store.alone(folder, "this run", patience):
        done = read_result(folder, config)
        return (
            done
            if done is not None
            else train(Run(config, splits, data_dir), folder, every, progress, stop)
        )


def train(
    running: Run,
    folder: Path,
    every: float,
    progress: Progress,
    stop: Callable[[], bool],
) -> dict[str, Any]:
    """Do what `run` does, for a run that was built."""
    config = running.config
    store.sweep(folder)
    resume(running, folder)
    store.write_json(
        folder / "config.json", {"config": asdict(config), "environment": environment()}
    )
    written = shown = time.monotonic()
    running.evaluates = lambda: progress(math.floor(running.progress), running.total, None)
    while not running.is_done and not running.diverged:
        running.advance()
        now, stopped = time.monotonic(), stop()
        if now - written >= every or stopped:
            store.write_tensors(folder / "checkpoint.pt", running.state_dict())
            written = time.monotonic()
        if now - shown >= min(every, 0.2):
            progress(math.floor(running.progress), running.total, running.losses[-1])
            shown = now
        if stopped:
            raise StoppedError(config.name)
    store.write_tensors(folder / "weights.pt", running.model.state_dict())
    store.write_json(folder / "result.json", running.result())
    (folder / "checkpoint.pt").unlink(missing_ok=True)
    done: dict[str, Any] = store.read_json(folder / "result.json")
    return done
