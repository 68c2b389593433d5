"""What to call a parameter; and what users are told when λ cannot be had, or an option is not understood."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from varreg.engine.ledger import LEDGERS
from varreg.engine.shards import is_sharded


def names(optimizer: Optimizer) -> dict[Tensor, str]:
    """By the name that the optimizer was given, or the observed model has for it, or its place in the param groups."""
    found = {}
    for i, group in enumerate(optimizer.param_groups):
        given = group.get("param_names", [None] * len(group["params"]))
        for j, (p, name) in enumerate(zip(group["params"], given, strict=True)):
            ledger = LEDGERS.get(p)
            found[p] = name or (ledger.name if ledger is not None else f"param_groups[{i}]['params'][{j}]")
    return found


def warn_missing(optimizer: Optimizer, parameters: list[Tensor], warned: set[int]) -> None:
    """One warning for all parameters that have a gradient and no variance; none for those that were named before, or whose gradient is 0."""
    new = [p for p in parameters if id(p) not in warned and p.grad is not None and (p.grad.is_sparse or bool(p.grad.any()))]
    if not new:
        return
    warned.update(map(id, new))
    name = names(optimizer)
    warnings.warn(
        f"varreg: {type(optimizer).__name__} takes the plain step (λ = 1) for parameters that have a gradient but no gradient variance. Call "
        "varreg.observe(model) before the forward pass, not with groups=1, and let the gradient be the one that was measured; or put them "
        f"into a param group with s=0. They are: {', '.join(f'{name[p]} {tuple(p.shape)}' for p in new)}.",
        stacklevel=8,  # the step() of a user, through two frames of torch.compile
    )


def warn_lone(optimizer: Optimizer, warned: set[int]) -> None:
    """A batch of one has no variance. That is nothing to speak of at the end of an epoch, but at the beginning it is."""
    if 0 not in warned and not any("vr_history" in state for state in optimizer.state.values()):
        warned.add(0)
        warnings.warn(
            f"varreg: {type(optimizer).__name__} takes plain steps (λ = 1) as long as batches have one sample: there is no variance in one. "
            "Use larger batches, or accumulate several before step().",
            stacklevel=8,  # the step() of a user, through two frames of torch.compile
        )


def warn_overflow(optimizer: Optimizer, p: Tensor, warned: set[int]) -> None:
    """A GradScaler lets the loss scale grow until gradients overflow; their squares do so long before."""
    if -1 not in warned:
        warned.add(-1)
        warnings.warn(
            f"varreg: {type(optimizer).__name__} takes the plain step (λ = 1) for '{names(optimizer)[p]}', and others like it: the squares of "
            "its gradients are too large for their precision, though the gradients are not. In one process, they are summed up in float64 from "
            "the next step on. The loss scale has grown too far: bfloat16 needs none; or create the GradScaler with a growth_interval that "
            "is longer than the training.",
            stacklevel=8,  # the step() of a user, through two frames of torch.compile
        )


def warn_typos(group: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """torch takes any key in a param group. One that is nearly an option is probably meant to be it."""
    for key in group:
        if key not in known and key not in ("params", "param_names", "initial_lr", "initial_s"):
            for like in difflib.get_close_matches(key, known, 1, cutoff=0.8):
                warnings.warn(
                    f"varreg: param group has a key {key!r}, which is not an option; did you mean {like!r}?", stacklevel=4
                )


def check_merged(parameters: Iterable[Tensor]) -> None:
    """Among several processes, moments must be those of all of them, or their parameters would drift apart."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        return
    for p in parameters:
        ledger = LEDGERS.get(p)
        alone = is_sharded(p) and p.device_mesh.size() == 1  # type: ignore[attr-defined]
        if ledger is not None and not alone and ledger.count:
            raise RuntimeError(
                "varreg: there are several processes, and the moments are those of this one's samples only: parameters would drift apart. Wrap "
                "the model in DistributedDataParallel or fully_shard, and let the last backward() before step() synchronise (not in no_sync, nor "
                "with set_requires_gradient_sync(False)); or use s=0."
            )
