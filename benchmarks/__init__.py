"""Measurements: a speed is a ratio to a plain training step, interleaved in one run."""
