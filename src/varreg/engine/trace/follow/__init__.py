"""Known functions: derive where the batch is in their results. `trace/decide.py` calls them."""

from varreg.engine.trace.follow import contractions, layers, moves
from varreg.engine.trace.follow.known import KNOWN, Destination, Gone, Guess, guess, is_known
from varreg.engine.trace.follow.moves import goes_by_values, index_of, moved_data, written

__all__ = ["KNOWN", "Destination", "Gone", "Guess", "goes_by_values", "guess", "index_of"]
__all__ += ["is_known", "moved_data", "written"]
__all__ += ["contractions", "layers", "moves"]  # imported for the functions that they register
