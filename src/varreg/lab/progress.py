"""What is under way: a live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from varreg.lab import names
from varreg.lab.run import Config


def said(config: Config) -> str:
    return f"{names.spell(config.optimizer, config.options)} lr={config.lr:g} seed={config.seed}"


class Display:
    """A watcher of an experiment; use it in `with`. `total` runs are expected."""

    def __init__(self, total: int, console: Console):
        self.console, self.total, self.done, self.begun = console, total, 0, time.monotonic()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self.live = Progress(*columns, console=console, transient=True) if console.is_terminal else None
        self.bars: dict[str, TaskID] = {}
        self.titles: dict[str, str] = {}
        self.over: set[str] = set()

    def __enter__(self) -> Display:
        if self.live:
            self.live.start()
            self.bars[""] = self.live.add_task("[bold]all runs", total=self.total)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.live:
            self.live.stop()

    def planned(self, configs: list[Config], done: int) -> None:
        self.done, self.total = done, max(self.total, done + len(configs))
        self.titles |= {config.name: said(config) for config in configs}
        if self.live:
            self.live.update(self.bars[""], completed=done, total=self.total)
        elif done and configs:
            self.console.print(
                f"{done} of {self.total} runs are there; {len(configs)} to go now.", highlight=False, soft_wrap=True
            )

    def progress(self, name: str, step: int, total: int) -> None:
        if self.live and name not in self.over:
            if name not in self.bars:
                self.bars[name] = self.live.add_task(self.titles.get(name, name), total=total)
            self.live.update(self.bars[name], completed=step, total=total)

    def ended(self, config: Config, result: dict[str, Any]) -> None:
        self.done += 1
        self.over.add(config.name)
        if self.live:
            if config.name in self.bars:
                self.live.remove_task(self.bars.pop(config.name))
            self.live.update(self.bars[""], completed=self.done)
            return
        seen = result["evaluations"]
        metric = "valid_loss" if math.isfinite(seen["valid_loss"][-1]) else "train_loss"
        end = "diverged" if result["diverged"] else f"{metric.replace('_', ' ')} {seen[metric][-1]:.4g}"
        now = time.monotonic() - self.begun
        self.console.print(
            f"[{self.done}/{self.total}] {now:.0f} s  {said(config)}: {end}", highlight=False, markup=False, soft_wrap=True
        )
