"""All tables by name. Each is a function of the contents of its files."""

from __future__ import annotations

from collections.abc import Callable

from tools.tables import arms, cost, experiments, house, speed, theory
from tools.tables.marks import ROOT, Block, TableError
from varreg.lab.store import read_json

TABLES: dict[str, Callable[..., str]] = {
    "measured": experiments.measured,
    "bench": speed.bench,
    "phases": speed.phases,
    "memory": speed.memory,
    "growth": speed.growth,
    "peers": speed.peers,
    "cost": speed.in_short,
    "optimizers": speed.optimizers,
    "distributed": speed.distributed,
    "first-step": speed.first_step,
    "launches": speed.launches,
    "compiled": speed.compiled,
    "roofline": speed.roofline,
    "steady-memory": cost.steady_memory,
    "ideas": cost.ideas,
    "fisher": cost.fisher,
    "norms": cost.norms,
    "monitor": cost.monitor,
    "noise-cost": cost.noise,
    "noise-truth": cost.noise_truth,
    "noise-interval": cost.noise_interval,
    "noise-held": cost.noise_held,
    "lab-loop": cost.lab_loop,
    "reproduction": experiments.reproduction,
    "seeds": experiments.seeds,
    "comparisons": experiments.comparisons,
    "ablations": experiments.ablations,
    "scaling": arms.scaling,
    "comparison": arms.comparison,
    "ewc": arms.ewc,
    "commands": experiments.commands,
    "increments": theory.increments,
    "claims": theory.claims,
    "own-error": theory.own_error,
    "hindsight": theory.hindsight,
    "real-batches": theory.real_batches,
    "house": house.limits,
}


def render(block: Block) -> str:
    """Return a table from its files.

    >>> render(Block("bench", ("no.json",), ""))
    Traceback (most recent call last):
    tools.tables.marks.TableError: the table bench: there is no file no.json
    """
    if block.name not in TABLES:
        raise TableError(f"there is no table {block.name}; there are: {', '.join(sorted(TABLES))}")
    missing = [name for name in block.files if not (ROOT / name).is_file()]
    if missing:
        raise TableError(f"the table {block.name}: there is no file {', '.join(missing)}")
    return TABLES[block.name](*(read_json(ROOT / name) for name in block.files))
