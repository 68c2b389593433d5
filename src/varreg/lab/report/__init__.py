"""Reports: pure functions of saved results."""
