"""Parameters of which each rank has a shard (DTensor); what is worked on is this rank's shard."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_sharded(t: Tensor) -> bool:
    """Return whether each rank has a part of a tensor."""
    return hasattr(t, "to_local")  # without importing DTensor, which takes a while and few need


def local(t: Tensor) -> Tensor:
    """Return the part that this rank has; all of a plain tensor."""
    sharded: Any = t
    part: Tensor = sharded.to_local() if is_sharded(t) else t
    return part


def like(part: Tensor, p: Any) -> Tensor:
    """Return the tensor of which `part` is this rank's, sharded as `p` is; for a plain `p`, or a
    number, the part itself.
    """
    if not is_sharded(p) or part.dim() == 0:
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )


def total(t: Tensor, of: Any) -> Tensor:
    """Return the sum over the ranks that share `of`, made in place."""
    if is_sharded(of):
        torch.distributed.all_reduce(t, group=of.device_mesh.get_group())
    return t


def number(t: Any) -> float:
    """Return a sum over all ranks, as a number."""
    return float(t.full_tensor() if is_sharded(t) else t)
