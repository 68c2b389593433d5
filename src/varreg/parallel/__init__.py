"""Moments over several processes that share a batch, under DDP and `fully_shard`.

`engine/processes.py` calls `attach` if there are several processes. Nothing else in the library
imports this package, except for `distributed.py`, with the public names.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from varreg.errors import VarregError

if TYPE_CHECKING:
    from varreg.engine.observer import Observer


def attach(observer: Observer) -> None:
    """Make an observer measure over all processes. It is called when a model is observed, and again
    at the start of each forward: the model may have been wrapped in DDP or sharded since.
    """
    from varreg.parallel import ddp
    from varreg.parallel.shared_ledger import SharedLedger, share

    if observer.per != "element":
        raise VarregError(
            f"varreg: per={observer.per!r} is not supported in several processes. Observe the "
            "model with varreg.observe(model)."
        )
    if observer.parameters.ledger_type is not SharedLedger:
        observer.parameters.ledger_type = SharedLedger
        for _, ledger in observer.parameters:
            share(ledger)
    ddp.attach(observer)
    # if FSDP is not imported, nothing is sharded; do not import it here, since that takes a while
    if "torch.distributed.fsdp" in sys.modules:
        from varreg.parallel import fsdp

        fsdp.attach(observer)
