"""The lab from Python: `varreg.lab.compare(…)` does the same as `varreg compare` on the command
line.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from varreg.errors import VarregError

if TYPE_CHECKING:
    import pandas as pd

    from varreg.lab.tasks import Task


@dataclass(frozen=True)
class Compared:
    """The result of a comparison. `print` it for the verdict."""

    folder: Path
    """The folder of its runs, its page (`report.html`) and its tables."""
    findings: dict[str, Any]
    """The contents of the page in plain values, as in `results.json`."""

    @property
    def arms(self) -> list[dict[str, Any]]:
        """Return each arm at its tuned setting, with its values seed by seed."""
        arms: list[dict[str, Any]] = self.findings["arms"]
        return arms

    @property
    def page(self) -> Path:
        """Return the path of the page."""
        return self.folder / "report.html"

    def to_pandas(self, what: str = "runs") -> pd.DataFrame:
        """Return a DataFrame: of `"runs"`, one row for each run of an arm; of `"curves"`, one for
        each evaluation; of `"trials"`, one for each setting that was tried.

        It needs pandas.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise VarregError(
                "varreg: to_pandas() needs pandas, which is not installed: pip install pandas. "
                f"The same tables are {self.folder / 'runs.csv'} and curves.csv beside it."
            ) from error
        if what == "trials":
            return pd.DataFrame(self.findings["trials"])
        if what not in ("runs", "curves"):
            raise VarregError(
                f"varreg: to_pandas expects 'runs', 'curves' or 'trials'; got {what!r}."
            )
        return pd.read_csv(self.folder / f"{what}.csv")

    def __str__(self) -> str:
        from varreg.lab.report.format import text

        return f"{text(self.findings)}\n\nReport: {self.page}"


def compare(
    optimizers: Sequence[str],
    task: str | Callable[..., Task] = "digits",
    *,
    out: str | Path,
    trials: int = 12,
    lr: tuple[float, float] | None = None,
    s: Sequence[float] = (0.5, 2.0),
    tuning_seeds: int = 2,
    seeds: int = 10,
    epochs: int = 0,
    batch: int = 0,
    ablations: bool = True,
    schedules: Sequence[str] = (),
    recipe: dict[str, Any] | None = None,
    jobs: int = 0,
    data_dir: str | Path | None = None,
    progress: bool = True,
) -> Compared:
    """Compare optimizers fairly, as `varreg compare` does, and return the result.

    Runs are done in other processes, which import your file again. So a script must call this
    function below `if __name__ == "__main__":`. The same call with the same folder continues an
    interrupted comparison; with more seeds or trials, it extends the comparison.

    Args:
        optimizers: Two or more, the base first, with options: `"VRSGD:momentum=0.9"`,
            `"lion_pytorch:Lion"`.
        task: Its name, `"module:function"`, `"path.py:function"`, or a function in a file that
            returns a `varreg.lab.Task`.
        out: The folder for runs and report.
        trials: Settings that each optimizer may try.
        lr: The range of learning rates; None takes each optimizer's own.
        s: Values of s to try.
        tuning_seeds: Seeds for each trial.
        seeds: Fresh seeds for the verdict.
        epochs: 0 takes the task's own; so does `batch`.
        batch: See `epochs`.
        ablations: Whether to run also the ablations of regularized optimizers: s = 0, λ replaced by
            its mean, and λ shuffled.
        schedules: Tuned with the learning rate, in the same budget: constant, linear, cosine.
        recipe: Options of all optimizers that do not have their own: schedule, warmup, clip,
            weight_decay, augment, device, batch_norm.
        jobs: Runs at a time; 0 takes as many as there are cores.
        data_dir: Where data sets are.
        progress: Whether to show which runs have ended.

    """
    from varreg.lab import displays
    from varreg.lab.environment import cores
    from varreg.lab.experiments import execution
    from varreg.lab.experiments.compare.plan import Comparison
    from varreg.lab.report import builder

    spec = task if isinstance(task, str) else spec_of(task)
    comparison = Comparison(
        spec,
        tuple(optimizers),
        trials,
        lr,
        tuple(s),
        tuning_seeds,
        seeds,
        epochs,
        batch,
        ablations,
        dict(recipe or {}),
        tuple(schedules),
    )
    folder, data = Path(out), None if data_dir is None else Path(data_dir)
    console = displays.new_console(quiet=not progress)
    with displays.RunsDisplay(comparison.size(), console) as display:
        command = ["varreg.lab.compare", *optimizers, "--task", spec]
        execution.carry_out(comparison, folder, jobs or cores(), data, display, command)
    return Compared(folder, builder.build(folder)[1])


def spec_of(function: Callable[..., Task]) -> str:
    """Return a spec by which other processes can import a function: the path of its file, and its
    name.

    Raise a VarregError if the function is not at the top level of a file.
    """
    name = getattr(function, "__name__", "")
    path = inspect.getsourcefile(function) if inspect.isfunction(function) else None
    module = sys.modules.get(getattr(function, "__module__", ""))
    if path is None or not Path(path).is_file() or getattr(module, name, None) is not function:
        raise VarregError(
            "varreg: a task must be a name, or a function at the top of a file that other "
            f"processes can import; got {function!r}."
        )
    return f"{Path(path).resolve()}:{name}"
