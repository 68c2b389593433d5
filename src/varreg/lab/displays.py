"""Progress displays: live on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from varreg.lab import specs
from varreg.lab.runs.config import Config

PHASES = {"never": "tuning", "end": "judging", "epochs": "training"}
"""The purpose of a run, by when it reads the test split."""


def new_console(**options: Any) -> Console:
    """Return a console that prints text unchanged: `:cancer:` does not become an emoji, nor `[x]` a
    style.
    """
    return Console(emoji=False, markup=False, highlight=False, **options)


def title_of(config: Config) -> str:
    """Return the name of a run on the terminal."""
    return f"{specs.spell(config.optimizer, config.options)} lr={config.lr:g} seed={config.seed}"


def _words(form: str, width: int | None = None) -> TextColumn:
    """Return a column of plain words, cut to a width."""
    return TextColumn(form, markup=False, table_column=Column(max_width=width, no_wrap=True))


class _Bars(Progress):
    """Progress bars, and the warnings of runs below them."""

    notes: tuple[str, ...] = ()

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        yield from (Text(note, style="yellow") for note in self.notes)


class RunsDisplay:
    """A watcher of an experiment's runs; use it in `with`. `total` runs are expected."""

    def __init__(self, total: int, console: Console):
        self.console, self.total, self.done, self.begun = console, total, 0, time.monotonic()
        columns = (
            _words("{task.description}", 40),
            BarColumn(16),
            _words("{task.fields[said]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self.live = (
            _Bars(*columns, console=console, transient=True) if console.is_terminal else None
        )
        self.bars: dict[str, TaskID] = {}
        self.configs: dict[str, Config] = {}
        self.over: set[str] = set()
        self.warnings: dict[str, list[str]] = {}
        """Each warning, with the runs that gave it."""

    def __enter__(self) -> RunsDisplay:
        if self.live:
            self.live.start()
            self.bars[""] = self.live.add_task("all runs", total=self.total, said="starting")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.live:
            self.live.stop()
            for note in self.notes:
                self.console.print(note)

    def planned(self, configs: list[Config], done: int) -> None:
        """Show the number of finished runs, and the number of runs to do."""
        self.done, self.total = done, max(self.total, done + len(configs))
        self.configs |= {config.name: config for config in configs}
        if self.live:
            self._show_all()
        elif done and configs:
            self.console.print(
                f"{done} of {self.total} runs are there; {len(configs)} to go now.", soft_wrap=True
            )

    def progress(self, name: str, step: int, total: int, loss: float | None) -> None:
        """Move the bar of a run, on a terminal."""
        if self.live is None or name in self.over:
            return
        if name not in self.bars:
            title = title_of(self.configs[name]) if name in self.configs else name
            self.bars[name] = self.live.add_task(title, total=None, said="starting")
            self._show_all()
        if total:
            now = "evaluating" if loss is None else f"loss {loss:.4g}"
            self.live.update(
                self.bars[name], completed=step, total=total, said=f"{step}/{total}  {now}"
            )

    def _show_all(self) -> None:
        """Show the number of finished runs, and the purpose of the current ones."""
        assert self.live is not None
        running = [self.configs[name] for name in self.bars if name in self.configs]
        phases = sorted({PHASES[config.test] for config in running}, reverse=True)
        said = "  ".join([f"{self.done}/{self.total}", ", ".join(phases)])
        self.live.update(self.bars[""], completed=self.done, total=self.total, said=said)

    def warned(self, name: str, text: str) -> None:
        """Show a warning of a run, each warning once; on a terminal, below the bars."""
        runs = self.warnings.setdefault(text, [])
        config = self.configs.get(name)
        runs.append(name if config is None else title_of(config))
        if self.live:
            self.live.notes = self.notes
        elif len(runs) == 1:
            self.console.print(self.notes[-1], soft_wrap=True)

    @property
    def notes(self) -> tuple[str, ...]:
        """Return each warning in a line, with the run that had it first."""
        return tuple(
            f"{runs[0]}{f' and {len(runs) - 1} more' if len(runs) > 1 else ''} warned: {text}"
            for text, runs in self.warnings.items()
        )

    def ended(self, config: Config, result: dict[str, Any]) -> None:
        """Show that a run has ended, and at which loss."""
        self.done += 1
        self.over.add(config.name)
        if self.live:
            if config.name in self.bars:
                self.live.remove_task(self.bars.pop(config.name))
            self._show_all()
            return
        seen = result["evaluations"]
        metric = "valid_loss" if math.isfinite(seen["valid_loss"][-1]) else "train_loss"
        end = (
            "diverged"
            if result["diverged"]
            else f"{metric.replace('_', ' ')} {seen[metric][-1]:.4g}"
        )
        now, phase = time.monotonic() - self.begun, PHASES[config.test]
        self.console.print(
            f"[{self.done}/{self.total}] {now:.0f} s  {phase}  {title_of(config)}: {end}",
            soft_wrap=True,
        )


@contextlib.contextmanager
def ended_parts(console: Console, total: int) -> Iterator[Callable[[str, float], None]]:
    """Show parts as they end. Yield a function to call with a part and its seconds, 0 for a part
    that was saved before.
    """
    if not console.is_terminal:
        yield lambda name, seconds: print(
            f"{name}: {seconds:.1f} s" if seconds else f"{name}: from before", flush=True
        )
        return
    columns = (BarColumn(), _words("{task.completed}/{task.total}"), TimeElapsedColumn())
    with Progress(*columns, _words("{task.description}"), console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda name, seconds: bar.update(task, advance=1, description=f"{name} done")


@contextlib.contextmanager
def measured_parts(console: Console, total: int) -> Iterator[Callable[[str, float], None]]:
    """Show parts as they are measured. Yield a function to call with a part and the share of it
    that is done.

    The bar moves only when the function is called, so that it does not disturb the measurement.
    """
    shares: dict[str, float] = {}
    if not console.is_terminal:

        def line(name: str, share: float) -> None:
            if name not in shares:
                print(name, flush=True)
            shares[name] = share

        yield line
        return
    columns = (
        BarColumn(),
        _words("{task.percentage:3.0f} %"),
        TimeElapsedColumn(),
        _words("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
        task, last = bar.add_task("", total=total), 0.0

        def move(name: str, share: float) -> None:
            nonlocal last
            new = name not in shares
            shares[name] = share
            if new or share == 1.0 or time.monotonic() - last > 0.5:
                bar.update(task, completed=sum(shares.values()), description=name, refresh=True)
                last = time.monotonic()

        yield move
