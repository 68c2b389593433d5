"""Many runs at once: one process each, one thread each, so that results do not depend on how many there are."""

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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from varreg.lab import tasks
from varreg.lab.run import Config, StoppedError, run
from varreg.lab.store import BusyError

Result = dict[str, Any]
_messages: Any = None
_stop: Any = None


def _start(messages: Any, stop: Any, paths: list[str]) -> None:
    """In a new process."""
    import sys

    global _messages, _stop
    _messages, _stop = messages, stop
    sys.path[:0] = [path for path in paths if path not in sys.path]
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process decides, and tells the others
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)  # runs can be killed at any moment

    threading.Thread(target=follow, daemon=True).start()


def _work(config: Config, folder: Path, data_dir: Path | None, fingerprint: str, shared: bool) -> Result | None:
    if _stop.is_set():
        return None
    try:
        with contextlib.suppress(StoppedError, *([BusyError] if shared else [])):
            _messages.put((config.name, 0, 1))
            _check_data(config.task, data_dir, fingerprint)

            def progress(step: int, total: int) -> None:
                _messages.put((config.name, step, total))

            return run(config, folder, None, data_dir, progress=progress, stop=_stop.is_set, patience=0 if shared else None)
    except Exception as error:
        if str(error).startswith("varreg: "):
            raise
        raise RuntimeError(
            f"varreg: the run {config.name!r} failed.\n{traceback.format_exc()}"
        ) from None  # one that can be sent to another process
    return None


@functools.cache
def _check_data(task: str, data_dir: Path | None, expected: str) -> None:
    splits = tasks.load(task, data_dir)
    with tasks.seeded(0):
        model = tasks.task(task).model()
    if tasks.fingerprint(task, splits, model) != expected:
        raise ValueError(
            f"varreg: task {task} gives other data or another model in each process: make what it loads depend on nothing random."
        )


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """Processes that are started here do not hear Ctrl-C, from their first moment on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Pool:
    """Processes that are kept from one call to the next; use it in `with`. If runs are `shared` with others, those that they are at are left out."""

    def __init__(self, jobs: int, data_dir: Path | None, fingerprint: str, paths: tuple[str, ...] = (), shared: bool = False):
        if jobs < 1:
            raise ValueError(f"varreg: at least one job is needed; got {jobs}.")
        context = multiprocessing.get_context("spawn")
        self.arguments = (data_dir, fingerprint, shared)
        self.messages, self.stop = context.Queue(), context.Event()
        arguments = (self.messages, self.stop, list(paths))
        self.executor = futures.ProcessPoolExecutor(jobs, context, _start, arguments)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop.set()
        with _deaf():  # a second Ctrl-C changes nothing: runs under way are saving where they are
            self.executor.shutdown(cancel_futures=True)

    def __call__(
        self, configs: list[Config], folder: Path, progress: Callable[[str, int, int], None]
    ) -> Iterator[tuple[Config, Result]]:
        """Results as they come. Where the caller stops in between, by Ctrl-C say, runs under way save where they are, and can be gone on with."""
        with _deaf():
            waiting = {self.executor.submit(_work, config, folder, *self.arguments): config for config in configs}
        try:
            while waiting:
                done, _ = futures.wait(waiting, timeout=0.1, return_when=futures.FIRST_COMPLETED)
                with contextlib.suppress(queue.Empty):
                    while True:
                        progress(*self.messages.get_nowait())
                for future in done:
                    config, result = waiting.pop(future), future.result()
                    if result is not None:
                        yield config, result
        except futures.process.BrokenProcessPool as error:
            raise RuntimeError(
                "varreg: a process of the lab ended by itself: out of memory, or killed. The same command goes on; "
                "with fewer --jobs it needs less memory."
            ) from error
