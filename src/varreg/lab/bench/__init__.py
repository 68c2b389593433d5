"""`varreg bench`: what variance regularization costs on this machine."""
