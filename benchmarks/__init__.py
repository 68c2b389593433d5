"""Measurements. A speed is the ratio to a plain training step; both run in turn, in one process."""
