"""The public names for several processes; the work is done in `varreg.parallel`."""

from varreg.parallel.ddp import register_comm_hook

__all__ = ["register_comm_hook"]
