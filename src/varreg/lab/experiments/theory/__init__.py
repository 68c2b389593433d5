"""`varreg theory`: the paper's claims, checked."""
