"""Go from a base batch to larger ones. A learning rate is tuned at the base batch. Larger batches
then train for the number of steps that the noise scale plans, or that AdaScale takes by itself.

They are compared, at the same number of steps, with rules that cost nothing: the base's learning
rate, the square-root rule, and the linear rule with and without warm-up. And they are compared with
a learning rate that is tuned again, which costs most. All are judged on the same fresh seeds, so
that differences are paired.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from varreg.errors import VarregError
from varreg.lab import optimizers, recipe, schema
from varreg.lab.experiments.compare.trials import FRESH, Trial, distinct, log_grid, score
from varreg.lab.experiments.experiment import TrainingExperiment
from varreg.lab.experiments.scaling import analysis, page
from varreg.lab.report.document import Findings, Page
from varreg.lab.runs.config import Config, Results
from varreg.lab.tasks import lookup

QUESTIONS = ("plan", "adascale")
WARMUP = 0.05
"""The part of all steps in which the learning rate rises, in the arms with warm-up."""
LOG_EVERY = 10
PARTS = 10
"""Training is divided into this number of parts. Each has its own noise scale and plan."""
SAVED: dict[str, schema.Check] = {
    "question": schema.is_text,
    "task": schema.is_text,
    "optimizer": schema.is_text,
    "batch": schema.is_positive,
    "scales": schema.is_numbers,
    "epochs": schema.is_positive,
    "trials": schema.is_positive,
    "lr": schema.is_range,
    "tuning_seeds": schema.is_positive,
    "seeds": schema.is_positive,
}
"""The types of its arguments in a file."""


class Arm(NamedTuple):
    """An arm that is judged: runs with fresh seeds."""

    name: str
    scale: int
    """Its batch over the base batch; 1 is the base."""
    configs: list[Config]


def planned_part(noise_scale: float, batch: float, base: float) -> float:
    """Return (1 + B_n/B)/(1 + B_n/B₀): the steps at a batch of B for one step of the base.

    >>> planned_part(96.0, batch=32, base=32), planned_part(math.inf, 128, 32)
    (1.0, 0.25)
    """
    if math.isinf(noise_scale):
        return base / batch
    return (1 + noise_scale / batch) / (1 + noise_scale / base)


@dataclass(frozen=True)
class Scaling(TrainingExperiment):
    """The arguments of the experiment: task, optimizer, batches and budget."""

    question: str
    task: str = "digits"
    optimizer: str = "SGD:momentum=0.9,schedule=cosine"
    batch: int = 8
    """The base batch."""
    scales: tuple[int, ...] = (4, 16, 64)
    epochs: int = 0
    """The epochs of the base; 0: the task's own number."""
    trials: int = 7
    lr: tuple[float, float] | None = None
    tuning_seeds: int = 2
    seeds: int = 10

    kind = "scaling"

    def __post_init__(self) -> None:
        """Check arguments that a person gave."""
        if self.question not in QUESTIONS:
            raise VarregError(
                f"varreg: the question must be {' or '.join(QUESTIONS)}; got {self.question!r}."
            )
        if not self.scales or min(self.scales) < 2 or len(set(self.scales)) < len(self.scales):
            raise VarregError(
                "varreg: scales must be different whole numbers from 2 up, as in 4,16,64; got "
                f"{', '.join(map(str, self.scales))}."
            )
        for key in ("batch", "trials", "tuning_seeds", "seeds"):
            if getattr(self, key) < 1:
                raise VarregError(f"varreg: {key} must be at least 1; got {getattr(self, key)}.")
        if self.lr is not None and not 0 < self.lr[0] <= self.lr[1] < math.inf:
            raise VarregError("varreg: a range of learning rates needs 0 < low ≤ high.")
        task = lookup.task(self.task)
        object.__setattr__(self, "epochs", self.epochs or task.epochs)
        name, options = optimizers.parse(self.optimizer)
        optimizers.check(name, options)
        taken = {"steps", "adascale", "noise", "warmup", "evaluate"} & set(options)
        if taken:
            raise VarregError(
                f"varreg: {', '.join(sorted(taken))} is set by the experiment; leave it out of "
                f"{self.optimizer!r}."
            )

    @classmethod
    def of(cls, saved: dict[str, Any]) -> Scaling:
        """Return the experiment of saved arguments, from a file that may be someone else's. Nothing
        is imported, built or called.
        """
        if fault := schema.table_fault(saved, SAVED, only=True):
            raise VarregError(f"varreg: an experiment on scaling has {fault}.")
        made = object.__new__(cls)
        for key, value in saved.items():
            object.__setattr__(made, key, tuple(value) if isinstance(value, list) else value)
        if not all(map(schema.is_positive, made.scales)) or made.question not in QUESTIONS:
            raise VarregError(
                "varreg: an experiment on scaling has an unknown question, or scales that are not "
                "positive."
            )
        each = 2 * made.trials * made.tuning_seeds + 8 * made.seeds
        if each * len(made.scales) > schema.RUNS:
            raise VarregError(f"varreg: an experiment has more than {schema.RUNS:,} runs.")
        name, options = optimizers.parse(made.optimizer)
        optimizers.entry(name)
        recipe.split(options, name)
        return made

    def arguments(self) -> dict[str, Any]:
        """Return all arguments that the plan depends on."""
        return asdict(self)

    def about(self) -> str:
        """Return the task, in words."""
        return lookup.task(self.task).about

    # ---- runs

    def _runs(
        self, lr: float, batch: int, seeds: range, test: Any = "never", **options: Any
    ) -> list[Config]:
        """Return one run for each seed."""
        name, given = optimizers.parse(self.optimizer)
        options = {**given, "evaluate": "end", **options}
        lr = float(f"{lr:.3g}")
        return [
            Config(self.task, name, lr, seed, self.epochs, batch, options, LOG_EVERY, test)
            for seed in seeds
        ]

    def _tuning(self, lr: float, batch: int, **options: Any) -> list[Config]:
        """Return runs with the tuning seeds."""
        return self._runs(lr, batch, range(self.tuning_seeds), **options)

    def _fresh(self, lr: float, batch: int, **options: Any) -> list[Config]:
        """Return runs with the seeds of the verdict."""
        return self._runs(lr, batch, range(FRESH, FRESH + self.seeds), "end", **options)

    def base_trials(self) -> list[Trial]:
        """Return the trials at the base batch."""
        entry = optimizers.entry(optimizers.parse(self.optimizer)[0])
        low, high = self.lr or (entry.low, entry.high)
        return [
            Trial(lr, {}, self._tuning(lr, self.batch)) for lr in log_grid(low, high, self.trials)
        ]

    def trials_again(
        self, lr: float, scale: int, options: dict[str, Any], results: Results
    ) -> list[Trial]:
        """Return the trials at a larger batch, around the learning rates of the rules."""
        grid = log_grid(lr / 2, 2 * lr * scale, self.trials)
        batch = self.batch * scale
        return [Trial(x, options, self._tuning(x, batch, **options)) for x in grid]

    def probes(self, lr: float) -> dict[int, list[Config]]:
        """Return runs with the tuning seeds that show how many steps each scale takes: runs of the
        base with its noise measured, or runs of AdaScale.
        """
        if self.question == "plan":
            return {1: self._tuning(lr, self.batch, noise=True)}
        return {
            scale: self._tuning(lr, self.batch * scale, adascale=self.batch)
            for scale in self.scales
        }

    def steps(self, scale: int, lr: float, results: Results) -> int:
        """Return the number of steps of a scale, from the probes; that of the base for scale 1."""
        if self.question == "adascale" and scale > 1:
            found = [results[config.name]["step"] for config in self.probes(lr)[scale]]
            return int(statistics.median(found))
        runs = [results[config.name] for config in next(iter(self._base_runs(lr).values()))]
        total: int = max(run["step"] for run in runs)
        if scale == 1:
            return total
        batch = self.batch * scale
        parts = [planned_part(b, batch, self.batch) for b in self.noise_scales(lr, results)]
        return max(1, math.ceil(total * statistics.fmean(parts)))

    def _base_runs(self, lr: float) -> dict[int, list[Config]]:
        """Return the runs of the base that are needed anyway; they have the base's number of
        steps.
        """
        return self.probes(lr) if self.question == "plan" else {1: self._tuning(lr, self.batch)}

    def noise_scales(self, lr: float, results: Results) -> list[float]:
        """Return B_n in each tenth of the base's training, from averages over steps and seeds."""
        rows = [results[config.name]["statistics"] for config in self.probes(lr)[1]]
        n = min(len(row["trace"]) for row in rows)
        out = []
        for i in range(min(PARTS, n)):
            part = slice(i * n // min(PARTS, n), (i + 1) * n // min(PARTS, n))
            trace, signal = (
                statistics.fmean(v for row in rows for v in row[key][part])
                for key in ("trace", "signal")
            )
            out.append(trace / signal if signal > 0 else math.inf)
        return out

    def best(self, trials: list[Trial], results: Results) -> Trial | None:
        """Return the trial with the lowest validation loss; None if all diverged, or some have not
        ended.
        """
        if any(config.name not in results for trial in trials for config in trial.configs):
            return None
        chosen = min(trials, key=lambda trial: score(trial, results))
        return chosen if score(chosen, results) < math.inf else None

    def variants(self, scale: int, lr: float, results: Results) -> dict[str, dict[str, Any]]:
        """Return the arms that are tuned again at a scale: the options of their runs, by name."""
        steps = self.steps(scale, lr, results)
        if self.question == "adascale":
            return {
                "tuned again": {"steps": steps},
                "tuned again, warm-up": {"steps": steps, "warmup": WARMUP},
            }
        same = max(1, round(self.steps(1, lr, results) / scale))
        return {"planned steps, tuned": {"steps": steps}, "base's samples, tuned": {"steps": same}}

    def rules(self, scale: int, lr: float, results: Results) -> list[Arm]:
        """Return the arms of a scale that are not tuned."""
        batch, steps = self.batch * scale, self.steps(scale, lr, results)
        if self.question == "plan":
            factor = self.steps(1, lr, results) / steps
            name = "planned steps and learning rate"
            arms: dict[str, tuple[float, dict[str, Any]]] = {name: (lr * factor, {"steps": steps})}
        else:
            arms = {
                "AdaScale": (lr, {"adascale": self.batch}),
                "no rule": (lr, {"steps": steps}),
                "square root": (lr * math.sqrt(scale), {"steps": steps}),
                "linear": (lr * scale, {"steps": steps}),
                "linear, warm-up": (lr * scale, {"steps": steps, "warmup": WARMUP}),
            }
        return [
            Arm(name, scale, self._fresh(rate, batch, **options))
            for name, (rate, options) in arms.items()
        ]

    # ---- the plan

    def is_probed(self, lr: float, results: Results) -> bool:
        """Return whether the number of steps of all scales is known."""
        probes = [c for configs in self.probes(lr).values() for c in configs]
        return all(config.name in results for config in probes)

    def arms(self, results: Results) -> list[Arm]:
        """Return the arms that are known, given the results so far."""
        base = self.best(self.base_trials(), results)
        if base is None:
            return []
        arms = [Arm("base", 1, self._fresh(base.lr, self.batch))]
        if not self.is_probed(base.lr, results):
            return arms
        for scale in self.scales:
            arms += self.rules(scale, base.lr, results)
            for name, options in self.variants(scale, base.lr, results).items():
                best = self.best(self.trials_again(base.lr, scale, options, results), results)
                if best is not None:
                    fresh = self._fresh(best.lr, self.batch * scale, **options)
                    arms.append(Arm(name, scale, fresh))
        return arms

    def configs_by_arm(self, results: Results) -> dict[str, list[Config]]:
        """Return the runs of each arm that is known, given the results so far."""
        return {
            f"{arm.name}, batch {self.batch * arm.scale}": arm.configs for arm in self.arms(results)
        }

    def plan(self, results: Results) -> list[Config]:
        """Return all runs that are known to be needed."""
        trials = self.base_trials()
        tuning = [config for trial in trials for config in trial.configs]
        base = self.best(trials, results)
        if base is None:
            return distinct(tuning)
        tuning += [c for configs in self.probes(base.lr).values() for c in configs]
        if self.is_probed(base.lr, results):
            for scale in self.scales:
                for options in self.variants(scale, base.lr, results).values():
                    again = self.trials_again(base.lr, scale, options, results)
                    tuning += [config for trial in again for config in trial.configs]
        arms = [config for arm in self.arms(results) for config in arm.configs]
        return distinct(tuning + arms)

    def size(self) -> int:
        """Return the approximate number of runs."""
        adascale = self.question == "adascale"
        probes = len(self.scales) if adascale else 1
        arms = len(self.scales) * (7 if adascale else 3) + 1
        tuned = self.trials * (1 + 2 * len(self.scales)) + probes
        return tuned * self.tuning_seeds + arms * self.seeds

    # ---- the report

    def analyze(self, results: Results) -> Findings:
        """Return the findings from the results."""
        return analysis.analyze(self, results)

    def terminal_table(self, findings: Findings) -> str:
        """Return the table of arms for the terminal."""
        return page.terminal_table(findings)

    def page(self, results: Results, findings: Findings, about: str) -> Page:
        """Return the page that shows the findings."""
        return page.page_of(self, results, findings, about or f"Task {self.task}")
