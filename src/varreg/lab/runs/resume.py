"""Do one training run in its own folder. It can be killed at any moment, and resumes from its
checkpoint.

The folder has `config.json`; while it runs, `checkpoint.pt`; and at the end `result.json` and
`weights.pt`. A run that was killed and resumed ends bit for bit like an uninterrupted one: batches
depend on the seed and the step alone, and a checkpoint holds everything else, including metrics.
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
    """Return the result of a configuration from its run's folder; None if the run has not ended
    yet.

    Raise a `store.DamagedError` if the result is damaged, or of another configuration.
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
    """Raise a `store.DamagedError` if a file was made with another configuration. The name of its
    folder does not prove that it was made with this one.
    """
    if fault := schema.table_fault(content, {"config": schema.is_table}):
        raise store.damaged(path, "the configuration that it was made with", fault, ANEW)
    other = schema.differences(content["config"], store.as_saved(asdict(config)))
    if other:
        raise store.DamagedError(
            f"varreg: {path} comes from another configuration ({store.printable(other)}). {ANEW}"
        )


def resume(running: Run, folder: Path) -> None:
    """Load the checkpoint in a run's folder into the run; without a checkpoint, do nothing."""
    path, about = folder / "checkpoint.pt", folder / "config.json"
    if not path.exists():
        return
    state = store.read_tensors(path, ANEW)
    if schema.is_table(state) and "config" not in state and about.exists():  # an earlier version
        said = store.read_json(about, ANEW)
        state["config"] = said.get("config") if schema.is_table(said) else said
    _check_config(path, state, running.config)
    if fault := running.fault_of(state):
        raise store.damaged(path, "a checkpoint of this run", fault, ANEW)
    try:
        running.load_state_dict(state)
    except Exception as error:  # torch, NumPy and Python raise many kinds of errors
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
    """Train to the end, from the checkpoint in the folder if there is one; return the contents of
    `result.json`.

    A checkpoint is written every `every` seconds. `progress` is called from time to time with the
    step, the number of steps and the loss (None during an evaluation). When `stop()` returns True,
    a last checkpoint is written and a `StoppedError` raised. If another process works on the run
    for more than `patience` seconds, a `store.BusyError` is raised.
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
    """Do the same as `run`, for a `Run` that is already built."""
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
