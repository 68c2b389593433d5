"""Do many runs at once. Each run has a process with one thread, so that results do not depend on
the number of processes.
"""

from __future__ import annotations

import concurrent.futures as futures
import contextlib
import functools
import multiprocessing
import os
import queue
import signal
import threading
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from varreg._torch import COMPILER
from varreg.errors import MeasurementError, VarregError
from varreg.lab.runs.config import Config
from varreg.lab.runs.resume import StoppedError, run
from varreg.lab.store import BusyError
from varreg.lab.tasks import check_task, lookup, randomness

Result = dict[str, Any]
_messages: Any = None
_stop: Any = None
_run = ""
"""The run that this process works on."""


class Listener(Protocol):
    """The interface of an object that receives messages of runs in other processes."""

    def progress(self, name: str, step: int, total: int, loss: float | None) -> None: ...
    def warned(self, name: str, text: str) -> None: ...


def _context() -> Any:
    """Return how processes are started: forked off a server that has imported this module, where
    the system can do that. So torch is imported once, with its compiler, which it imports when the
    first optimizer is made; and not in each of them.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, COMPILER])
    return context


def _start(messages: Any, stop: Any, paths: list[str], environment: dict[str, str]) -> None:
    """Prepare a new process."""
    import sys

    global _messages, _stop
    _messages, _stop = messages, stop
    # A server has the environment of the moment at which it was started.
    os.environ.clear()
    os.environ.update(environment)
    warnings.showwarning = _pass_on  # standard error would disturb the display
    sys.path[:0] = [path for path in paths if path not in sys.path]
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process stops the others
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)  # runs can be killed at any moment

    threading.Thread(target=follow, daemon=True).start()


def _pass_on(message: Warning | str, *_: Any, **__: Any) -> None:
    """Send a warning to the first process."""
    _messages.put(("warned", _run, str(message)))


def _work(
    config: Config, folder: Path, data_dir: Path | None, fingerprint: str, shared: bool
) -> Result | None:
    """Do one run in this process. Return None if it was stopped, or if another process works on
    it.
    """
    global _run
    if _stop.is_set():
        return None
    _run = config.name
    try:
        with contextlib.suppress(StoppedError, *([BusyError] if shared else [])):
            _messages.put(("progress", config.name, 0, 0, None))
            _check_data(config.task, data_dir, fingerprint)

            def progress(step: int, total: int, loss: float | None) -> None:
                _messages.put(("progress", config.name, step, total, loss))

            return run(
                config,
                folder,
                None,
                data_dir,
                progress=progress,
                stop=_stop.is_set,
                patience=0 if shared else None,
            )
    except Exception as error:
        if isinstance(error, VarregError):
            raise
        raise MeasurementError(
            f"varreg: the run {config.name!r} failed.\n{traceback.format_exc()}"
        ) from None  # an error that can be sent to another process
    return None


@functools.cache
def _check_data(task: str, data_dir: Path | None, expected: str) -> None:
    """Raise a VarregError if the task has another fingerprint here than in the first process."""
    splits = lookup.load(task, data_dir)
    with randomness.seeded(0):
        model = lookup.task(task).model()
    if check_task.fingerprint(task, splits, model) != expected:
        raise VarregError(
            f"varreg: task {task} gives other data or another model in each process: let its data "
            "and model depend on nothing random."
        )


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Ignore Ctrl-C inside of the `with` block. Processes that are started in it inherit that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Pool:
    """A pool of processes, kept from one call to the next; use it in `with`. If runs are `shared`
    with processes outside of the pool, runs that these work on are skipped.
    """

    def __init__(
        self,
        jobs: int,
        data_dir: Path | None,
        fingerprint: str,
        paths: tuple[str, ...] = (),
        shared: bool = False,
    ):
        if jobs < 1:
            raise VarregError(f"varreg: at least one job is needed; got {jobs}.")
        context = _context()
        self.arguments = (data_dir, fingerprint, shared)
        self.messages, self.stop = context.Queue(), context.Event()
        arguments = (self.messages, self.stop, list(paths), dict(os.environ))
        self.executor = futures.ProcessPoolExecutor(jobs, context, _start, arguments)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop.set()
        # A second Ctrl-C changes nothing: runs in progress are writing their checkpoints.
        with _interrupts_ignored():
            self.executor.shutdown(cancel_futures=True)

    def __call__(
        self, configs: list[Config], folder: Path, listener: Listener
    ) -> Iterator[tuple[Config, Result]]:
        """Yield results as runs end. If the caller stops early, for example by Ctrl-C, running runs
        write a checkpoint and can be resumed.
        """
        with _interrupts_ignored():
            waiting = {
                self.executor.submit(_work, config, folder, *self.arguments): config
                for config in configs
            }
        try:
            while waiting:
                done, _ = futures.wait(waiting, timeout=0.1, return_when=futures.FIRST_COMPLETED)
                self._hear(listener)
                for future in done:
                    config, result = waiting.pop(future), future.result()
                    if result is not None:
                        yield config, result
            self._hear(listener)
        except futures.process.BrokenProcessPool as error:
            raise MeasurementError(
                "varreg: a process of the lab ended unexpectedly: out of memory, or killed. The "
                "same command continues; with fewer --jobs it needs less memory."
            ) from error

    def _hear(self, listener: Listener) -> None:
        """Pass the new messages of runs to the listener."""
        with contextlib.suppress(queue.Empty):
            while True:
                kind, *said = self.messages.get_nowait()
                getattr(listener, kind)(*said)
