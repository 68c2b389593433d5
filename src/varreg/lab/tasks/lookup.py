"""Find a task by its name or by a user's function, load its data, and check both."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from varreg.errors import VarregError
from varreg.lab import specs
from varreg.lab.tasks.batches import DataSplit, Samples, Split
from varreg.lab.tasks.catalog import TASKS
from varreg.lab.tasks.definition import Splits, Task
from varreg.lab.tasks.randomness import seeded


@functools.cache
def task(spec: str) -> Task:
    """Return a task by its name, with options (`stream:spread=2`), or by a user's function
    (`package.module:function,option=value`, or `path/to/file.py:function`).
    """
    name, _, rest = spec.partition(":")
    function, _, rest_of_function = rest.partition(",")
    if name in TASKS:
        make, options = TASKS[name], specs.parse_options(rest, spec)
    elif rest and "=" not in function:
        make = _import_function(name, function)
        options = specs.parse_options(rest_of_function, spec)
    else:
        raise specs.unknown_name("task", name, TASKS)
    with seeded(0):
        made = specs.call(make, options, f"task {spec!r}")
    if isinstance(made, Task) and (made.batch < 1 or made.epochs < 1):
        raise VarregError(
            f"varreg: task {spec} needs a batch and epochs of at least 1; got {made.batch} and "
            f"{made.epochs}."
        )
    if not isinstance(made, Task):
        raise VarregError(
            f"varreg: {spec} must return a varreg.lab.Task, and returned {type(made).__name__}."
        )
    return made


def _import_function(module: str, function: str) -> Callable[..., Task]:
    """Import a user's function that makes a task."""
    imported = specs.import_name(module, function, f" Tasks by name: {', '.join(TASKS)}.")
    if not callable(imported):
        raise VarregError(f"varreg: module {module!r} has no function {function!r}.")
    return cast("Callable[..., Task]", imported)


@functools.lru_cache(maxsize=1)
def load(spec: str, data_dir: Path | None) -> Splits:
    """Return the splits of a task, checked. They are read once in a process."""
    made = task(spec)
    with seeded(0):
        splits = specs.call(lambda: made.load(data_dir), {}, f"load of task {spec!r}")
    if not isinstance(splits, tuple) or len(splits) != 3:
        raise VarregError(
            f"varreg: task {spec} must load varreg.lab.Splits(train, valid, test), and loaded "
            f"{type(splits).__name__}."
        )
    if isinstance(splits[0], DataLoader) and splits[0].batch_size not in (None, made.batch):
        raise VarregError(
            f"varreg: the train split of task {spec} is a DataLoader with batch_size "
            f"{splits[0].batch_size}, and the task has batch={made.batch}: let both be the same."
        )
    return Splits(
        *(_checked(spec, name, split) for name, split in zip(Splits._fields, splits, strict=True))
    )


def _checked(spec: str, name: str, split: Any) -> Samples:
    """Return a split, or raise a VarregError. A split is two finite tensors of the same length; a
    Dataset or DataLoader becomes a `DataSplit`.
    """
    where = f"the {name} split of task {spec}"
    if isinstance(split, (Dataset, DataLoader)):
        return DataSplit(split, where)
    # Not len(split), which is the number of samples.
    pair = list(split) if isinstance(split, tuple) else []
    if len(pair) != 2 or not all(isinstance(t, Tensor) for t in pair):
        raise VarregError(
            f"varreg: {where} must be varreg.lab.Split(x, y), of two tensors, a Dataset or a "
            "DataLoader; got "
            f"{type(split).__name__}."
        )
    x, y = pair
    if not x.dim() or not y.dim() or len(x) != len(y):
        raise VarregError(
            f"varreg: {where} has inputs of shape {tuple(x.shape)} and targets of shape "
            f"{tuple(y.shape)}: each sample needs one input and one target."
        )
    for t, word in ((x, "inputs"), (y, "targets")):
        if t.is_floating_point() and not t.isfinite().all():
            raise VarregError(f"varreg: {where} has {word} that are not finite.")
    return Split(x, y)
