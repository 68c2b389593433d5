"""Sharded tensors (DTensor): this rank's shard, and sums over all shards. `parallel/fsdp.py` cuts
and reduces the moments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_sharded(t: Tensor) -> bool:
    """Return whether each rank has a part of a tensor."""
    return hasattr(t, "to_local")  # without importing DTensor: the import takes a while


def local(t: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor; a plain tensor itself."""
    sharded: Any = t
    part: Tensor = sharded.to_local() if is_sharded(t) else t
    return part


def like(part: Tensor, p: Any) -> Tensor:
    """Return a tensor that is sharded as `p` is, with `part` as this rank's shard. Return `part`
    itself if `p` is not sharded or `part` is a scalar.
    """
    if not is_sharded(p) or part.dim() == 0:
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )


def total(t: Tensor, of: Any) -> Tensor:
    """Add up `t` in place over the ranks that share the tensor `of`, and return it."""
    if is_sharded(of):
        torch.distributed.all_reduce(t, group=of.device_mesh.get_group())
    return t


def number(t: Any) -> float:
    """Return a scalar as a number; a sharded one is the sum over all ranks."""
    return float(t.full_tensor() if is_sharded(t) else t)
