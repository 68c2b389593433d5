"""Several processes: the moments of parameters whose batch they share, under DDP and `fully_shard`.

The core knows of other processes in one place, `engine/processes.py`, which calls `attach` here.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from varreg.engine.observer import Observer


def attach(observer: Observer) -> None:
    """Let an observer measure over all processes. Called when a model is observed, and as a forward
    begins: it may have come into DDP, or been sharded, since.
    """
    from varreg.parallel import ddp
    from varreg.parallel.shared_ledger import SharedLedger, share

    if observer.parameters.ledger_type is not SharedLedger:
        observer.parameters.ledger_type = SharedLedger
        for _, ledger in observer.parameters:
            share(ledger)
    ddp.attach(observer)
    # if nobody has imported it, nobody has sharded anything; its import would take a while
    if "torch.distributed.fsdp" in sys.modules:
        from varreg.parallel import fsdp

        fsdp.attach(observer)
