"""A fair comparison: an equal budget, declared before; tuned on one split and some seeds, judged on others.

Every optimizer gets the same number of trials, a logarithmic grid of learning rates, and of s where it has one. The best, by the
validation loss at the end, mean over the tuning seeds, is run again with fresh seeds, the same for all, so that differences are
paired. The test split is read once, at the end of those.
"""

from __future__ import annotations

import math
import statistics as st
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from varreg.lab import names, optimizers, saved, tasks
from varreg.lab.ablations import ABLATIONS
from varreg.lab.run import Config, Results

FRESH = 1000
"""The first seed of the verdict."""
LOG_EVERY = 20
TARGET_AT = 0.75
"""The target is the best that the tuned base reached in this part of its budget."""


class Trial(NamedTuple):
    """A learning rate and options, tried with the tuning seeds."""

    lr: float
    options: dict[str, Any]
    configs: list[Config]


class Arm(NamedTuple):
    """An optimizer at its best trial, or an ablation of it, run with the seeds of the verdict."""

    name: str
    role: str
    """base, candidate or ablation"""
    of: str
    """The optimizer that an ablation belongs to."""
    configs: list[Config]


_SAVED: dict[str, saved.Check] = {
    "task": saved.is_text,
    "optimizers": saved.is_texts,
    "trials": saved.is_positive,
    "lr": saved.is_range,
    "s": saved.is_numbers,
    "tuning_seeds": saved.is_positive,
    "seeds": saved.is_positive,
    "epochs": saved.is_positive,
    "batch": saved.is_positive,
    "ablations": saved.is_flag,
}
"""The arguments of a comparison in a file."""
LONGEST = 1000
"""Characters in the name and options of an optimizer, in a file."""


def _check_saved(spec: str) -> None:
    """Refuse an optimizer that a file names where there is none such, without building it."""
    if len(spec) > LONGEST:
        raise ValueError(f"varreg: an optimizer has a name of {len(spec)} characters.")
    name, options = names.parse(spec)
    optimizers.entry(name)
    if "s" in options and not saved.is_number(options["s"]):
        raise ValueError(f"varreg: {spec!r}: s must be a number.")
    for key, value in options.items():
        parts = value if isinstance(value, (tuple, list)) else (value,)
        if not all(v is None or saved.is_number(v) or _is_word(v) for v in parts):
            raise ValueError(f"varreg: {spec!r}: {key} must be a number or a word.")


def _is_word(value: Any) -> bool:
    return isinstance(value, bool) or (isinstance(value, str) and value.isprintable())


@dataclass(frozen=True)
class Comparison:
    """What is compared and with which budget: all that the plan depends on. The first optimizer is the base."""

    task: str = "digits"
    optimizers: tuple[str, ...] = ("SGD", "VRSGD")
    trials: int = 12
    lr: tuple[float, float] | None = None
    s: tuple[float, ...] = (0.5, 2.0)
    tuning_seeds: int = 2
    seeds: int = 10
    epochs: int = 0
    """0: the task's own; batch too."""
    batch: int = 0
    ablations: bool = True

    kind = "compare"

    def __post_init__(self) -> None:
        """Check what a person asked for. It may name a task of his own, which is imported."""
        self._check_budget()
        if not self.epochs or not self.batch:  # what is saved has both, and does not depend on the task's code any more
            task = tasks.task(self.task)
            object.__setattr__(self, "epochs", self.epochs or task.epochs)
            object.__setattr__(self, "batch", self.batch or task.batch)
        for spec in self.optimizers:
            name, options = names.parse(spec)
            optimizers.check(name, options)
            if len(self.s_of(spec)) > self.trials:
                raise ValueError(f"varreg: {self.trials} trials are too few for {len(self.s)} values of s.")
            for _, options in self.grid(spec):
                optimizers.check(name, options)

    def _check_budget(self) -> None:
        """Check all that can be checked by looking."""
        parsed = [str(names.parse(spec)) for spec in self.optimizers]
        if len(parsed) < 2 or len(set(parsed)) < len(parsed):
            raise ValueError(
                f"varreg: name two or more different optimizers, the base first; got {', '.join(self.optimizers) or 'none'}."
            )
        for what in ("trials", "tuning_seeds", "seeds"):
            if getattr(self, what) < 1:
                raise ValueError(f"varreg: {what} must be at least 1; got {getattr(self, what)}.")
        if self.tuning_seeds > FRESH:
            raise ValueError(f"varreg: at most {FRESH} tuning seeds; got {self.tuning_seeds}.")
        if self.epochs < 0 or self.batch < 0:
            raise ValueError(f"varreg: epochs and batch must be positive; got {self.epochs} and {self.batch}.")
        if self.lr is not None and not 0 < self.lr[0] <= self.lr[1] < math.inf:
            raise ValueError(f"varreg: a range of learning rates needs 0 < low ≤ high; got {self.lr[0]:g} to {self.lr[1]:g}.")
        if len(set(self.s)) < len(self.s):
            raise ValueError(f"varreg: values of s are given twice: {', '.join(f'{s:g}' for s in self.s)}.")

    @classmethod
    def of(cls, arguments: dict[str, Any]) -> Comparison:
        """From what `arguments` gave, as it comes back from a file, which may be someone else's.

        Nothing is imported, built or called: `__post_init__` is not for files.
        """
        if fault := saved.table_fault(arguments, _SAVED, only=True):
            raise ValueError(f"varreg: a comparison has {fault}.")
        made = object.__new__(cls)
        for key, value in arguments.items():
            object.__setattr__(made, key, tuple(value) if isinstance(value, list) else value)
        for spec in made.optimizers:
            _check_saved(spec)
        many = max(made.trials, len(made.s)) * made.tuning_seeds + 4 * made.seeds
        if many * len(made.optimizers) > saved.RUNS:
            raise ValueError(f"varreg: a comparison has more than {saved.RUNS:,} runs.")
        made._check_budget()
        return made

    def arguments(self) -> dict[str, Any]:
        return asdict(self)

    def about(self) -> str:
        return tasks.task(self.task).about

    # The plan ----------------------------------------------------------------------------------------------------------------------

    def s_of(self, spec: str) -> tuple[float, ...]:
        """The values of s to try: none where there is no s, or where it is given."""
        name, options = names.parse(spec)
        return self.s if optimizers.entry(name).regularized and "s" not in options else ()

    def grid(self, spec: str) -> list[tuple[float, dict[str, Any]]]:
        """Learning rates and options: `trials` of them for all but those without a learning rate. Values of s share them evenly."""
        name, options = names.parse(spec)
        entry = optimizers.entry(name)
        low, high = self.lr if self.lr and entry.low < entry.high else (entry.low, entry.high)
        extras: list[dict[str, Any]] = [{"s": s} for s in self.s_of(spec)] or [{}]
        counts = [self.trials // len(extras) + (i < self.trials % len(extras)) for i in range(len(extras))]
        return [(lr, {**options, **extra}) for extra, n in zip(extras, counts, strict=True) for lr in log_grid(low, high, n)]

    def _configs(self, spec: str, lr: float, options: dict[str, Any], seeds: range, test: Any) -> list[Config]:
        name = names.parse(spec)[0]
        return [Config(self.task, name, lr, seed, self.epochs, self.batch, options, LOG_EVERY, test) for seed in seeds]

    def trials_of(self, spec: str) -> list[Trial]:
        seeds = range(self.tuning_seeds)
        return [Trial(lr, options, self._configs(spec, lr, options, seeds, "never")) for lr, options in self.grid(spec)]

    def best(self, spec: str, results: Results) -> Trial | None:
        """The trial with the lowest validation loss at the end, mean over seeds; None where all of them diverged, or some have not ended."""
        trials = self.trials_of(spec)
        if any(config.name not in results for trial in trials for config in trial.configs):
            return None
        chosen = min(trials, key=lambda trial: score(trial, results))
        return chosen if score(chosen, results) < math.inf else None

    def arms(self, results: Results) -> list[Arm]:
        """Those that are known, given the results so far."""
        arms = []
        for i, spec in enumerate(self.optimizers):
            best = self.best(spec, results)
            if best is None:
                continue

            def fresh(options: dict[str, Any], spec: str = spec, lr: float = best.lr) -> list[Config]:
                return self._configs(spec, lr, options, range(FRESH, FRESH + self.seeds), "end")

            arms.append(Arm(spec, "candidate" if i else "base", spec, fresh(best.options)))
            if self.ablations and optimizers.entry(names.parse(spec)[0]).regularized and "ablation" not in best.options:
                arms += [
                    Arm(f"{spec}, {word}", "ablation", spec, fresh(options))
                    for word, options in ablations_of(best.options).items()
                ]
        return arms

    def plan(self, results: Results) -> list[Config]:
        """All runs that are known to be needed, given those that are there: first the trials of all, then the arms."""
        trials = [config for spec in self.optimizers for trial in self.trials_of(spec) for config in trial.configs]
        if any(config.name not in results for config in trials):
            return distinct(trials)
        arms = [arm.configs for arm in self.arms(results)]
        return distinct(trials + [configs[i] for i in range(self.seeds) for configs in arms])

    def size(self) -> int:
        """How many runs there will be."""
        ablated = sum(optimizers.entry(names.parse(spec)[0]).regularized for spec in self.optimizers) * 3 * self.ablations
        return (
            sum(len(self.grid(spec)) for spec in self.optimizers) * self.tuning_seeds
            + (len(self.optimizers) + ablated) * self.seeds
        )


def ablations_of(options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What they are called, and their options; one that would change nothing is left out."""
    words = {"mean": "λ replaced by its mean", "shuffled": "λ shuffled"}
    hows = [how for how in ABLATIONS if not (how == "shuffled" and options.get("per") == "model")]
    return {"s = 0": {**options, "s": 0.0}} | {words[how]: {**options, "ablation": how} for how in hows}


def distinct(configs: list[Config]) -> list[Config]:
    return list({config.name: config for config in configs}.values())


def log_grid(low: float, high: float, n: int) -> list[float]:
    """From low to high, in equal steps of the logarithm, to three digits.

    >>> log_grid(0.001, 1.0, 4)
    [0.001, 0.01, 0.1, 1.0]
    """
    if low == high or n == 1:
        return [float(f"{math.sqrt(low * high):.3g}")]
    return list(dict.fromkeys(float(f"{low * (high / low) ** (i / (n - 1)):.3g}") for i in range(n)))


def final(result: dict[str, Any], metric: str) -> float:
    """At the end of a run; the loss of a run that diverged is infinite, its accuracy 0."""
    value = float(result["evaluations"][metric][-1])
    if metric.endswith("loss"):
        return value if math.isfinite(value) and not result["diverged"] else math.inf
    has_accuracy = not math.isnan(result["evaluations"]["train_accuracy"][0])
    return 0.0 if result["diverged"] and has_accuracy else value


def score(trial: Trial, results: Results) -> float:
    """What trials are chosen by."""
    return st.fmean(final(results[config.name], "valid_loss") for config in trial.configs)


def target(base: Trial, results: Results) -> float:
    """The validation loss to reach: the lowest that the tuned base had in three quarters of its budget, mean over the tuning seeds."""
    lowest = []
    for config in base.configs:
        seen = results[config.name]["evaluations"]
        first, last = seen["step"][1], seen["step"][-1]
        losses = [v for v, step in zip(seen["valid_loss"], seen["step"], strict=True) if 0 < step <= max(TARGET_AT * last, first)]
        lowest.append(min(losses))
    return st.fmean(lowest)


def time_to(result: dict[str, Any], goal: float, unit: str) -> float:
    """Steps or seconds until the validation loss was at the goal, as seen after each epoch; infinite where it never was."""
    seen = result["evaluations"]
    times = zip(seen[unit][1:], seen["valid_loss"][1:], strict=True)
    return next((float(t) for t, loss in times if loss <= goal), math.inf)
