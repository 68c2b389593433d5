"""Check that moments cover the samples of all processes, if there are several."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from varreg.engine.parameters import LEDGERS
from varreg.errors import MeasurementError
from varreg.shards import is_sharded

DRIFT = "parameters would drift apart"
WRONG = "the result would be that of one process"


def check_synchronized(parameters: Iterable[Tensor], steps: bool = True) -> None:
    """Raise a MeasurementError if there are several processes and moments cover only the samples of
    this one. With `steps`, the message is for an optimizer, whose parameters would differ between
    processes.
    """
    if torch.distributed.get_world_size() == 1:
        return
    for p in parameters:
        ledger = LEDGERS.get(p)
        alone = is_sharded(p) and p.device_mesh.size() == 1  # type: ignore[attr-defined]
        if ledger is not None and not alone and ledger.count:
            raise MeasurementError(
                "varreg: there are several processes, and the moments are those of this one's "
                f"samples only: {DRIFT if steps else WRONG}. Wrap the model in "
                "DistributedDataParallel or fully_shard, and let the last backward() "
                f"before {'step()' if steps else 'this'} synchronise (not in no_sync, nor with "
                f"set_requires_gradient_sync(False)){'; or use s=0' if steps else ''}."
            )
