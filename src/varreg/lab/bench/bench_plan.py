"""The plan of `varreg bench`: workloads, optimizers and arms, checked before anything runs."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from varreg.errors import VarregError
from varreg.lab import optimizers, specs
from varreg.lab.bench.user_workload import UserWorkload
from varreg.lab.bench.workloads import WORKLOADS, Workload, on_device
from varreg.lab.runs.training_device import check_device

PLAIN, EXACT, SUMS = "plain", "exact", "per=model"
DEFAULTS = ("VRSGD:momentum=0.9", "VRAdam")
Case = str | UserWorkload
"""A workload of ours by its name, or the user's."""


class Plan(NamedTuple):
    """All planned measurements; made by `plan`."""

    cases: tuple[Case, ...]
    optimizers: tuple[str, ...]
    """Regularized optimizers, with options."""
    arms: tuple[str, ...]
    """`exact`, `groups=8`, or `per=model`: torch's optimizer, and a model observed with
    per="model".
    """
    seconds: float
    threads: int
    memory: bool
    profile: bool
    device: str = "cpu"
    """Where models are trained."""

    def parts(self) -> int:
        """Return the number of parts that the measurement reports."""
        return len(self.cases) * (1 + len(self.optimizers) * (1 + self.memory + self.profile))


def plan(
    only: str | None,
    user: UserWorkload | None,
    optimizers: Sequence[str],
    groups: str,
    seconds: float,
    threads: int,
    memory: bool,
    profile: bool,
    device: str = "cpu",
) -> Plan:
    """Return the plan for the arguments of the command line; raise a VarregError if it cannot be
    carried out.
    """
    if user is not None and only is not None:
        raise VarregError(
            "varreg: --only chooses among varreg's own workloads; with --model there is one. Leave "
            "one of them out."
        )
    cases: tuple[Case, ...] = tuple(WORKLOADS) if user is None else (user,)
    if only is not None:
        cases = tuple(name for name in WORKLOADS if only.lower() in name.lower())
        if not cases:
            raise VarregError(
                f"varreg: no workload has {only!r} in its name; there are: {'; '.join(WORKLOADS)}."
            )
    chosen = tuple(spec for text in optimizers or DEFAULTS for spec in text.split())
    for spec in chosen:
        base_of(spec)
    if not seconds > 0:
        raise VarregError(f"varreg: --seconds must be more than 0; got {seconds:g}.")
    check_device(device)
    threads = threads or torch.get_num_threads()
    return Plan(cases, chosen, arms_of(groups), seconds, threads, memory, profile, device)


def arms_of(groups: str) -> tuple[str, ...]:
    """Return the arms, by the moments that they measure.

    >>> arms_of("exact,8")
    ('exact', 'groups=8')
    """
    arms = []
    for word in (word.strip() for word in groups.split(",")):
        known = {"exact": EXACT, "model": SUMS}.get(word)
        if known is None and not (word.isdecimal() and int(word) > 1):
            raise VarregError(
                "varreg: --groups must be exact, model or numbers of groups (2 or more), with "
                f"commas, as in exact,8; got {groups!r}."
            )
        arms.append(known or f"groups={int(word)}")
    return tuple(dict.fromkeys(arms))


def groups_of(arm: str) -> int | None:
    """Return the number of groups of an arm; None where moments are exact."""
    return None if arm in (EXACT, SUMS) else int(arm.removeprefix("groups="))


def observed_by(arm: str) -> dict[str, Any]:
    """Return the options of `varreg.observe` in an arm.

    >>> observed_by("groups=8"), observed_by("per=model")
    ({'groups': 8}, {'per': 'model'})
    """
    return {"per": "model"} if arm == SUMS else {"groups": groups_of(arm)}


def base_of(spec: str) -> tuple[str, dict[str, Any]]:
    """Return the base of a regularized optimizer, with those options that the base has, too.

    >>> base_of("VRSGD:momentum=0.9,history=geometric")
    ('SGD', {'momentum': 0.9})
    """
    name, options = specs.parse(spec)
    known = [n for n, entry in optimizers.OPTIMIZERS.items() if entry.regularized]
    if name not in known:
        raise specs.unknown_name("regularized optimizer", name, known)
    optimizers.check(name, options)
    base = name.removeprefix("VR")
    shared = inspect.signature(optimizers.entry(base).cls).parameters
    return base, {k: v for k, v in options.items() if k in shared}


def workload_of(case: Case, device: str) -> Workload:
    """Return the workload on a device; build and check it if it is the user's."""
    w = case.workload() if isinstance(case, UserWorkload) else WORKLOADS[case]
    return w if device == "cpu" else on_device(w, device)
