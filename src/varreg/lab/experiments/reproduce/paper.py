"""The settings of the paper's experiments."""

from __future__ import annotations

TASKS = {"fashion-mnist": "fashion-mnist:valid=0", "cifar10": "cifar10-lenet:valid=0"}
EPOCHS = {"fashion-mnist": 20, "cifar10": 60}
"""For about the first 30 epochs on CIFAR-10, nothing is learned: images of unit norm and this
learning rate begin on a plateau.
"""
LR, BATCH, S = 0.01, 100, 2.0
"""The paper's."""
LOG_EVERY = 50
"""Steps between two measurements of λ, ρ and the noise."""
