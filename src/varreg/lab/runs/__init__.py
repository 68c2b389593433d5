"""Training runs: one at a time, resumable; many at once."""
