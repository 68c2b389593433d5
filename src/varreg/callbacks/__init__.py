"""Loggers and callbacks: they measure a training, and log the results to other tools.

Each is imported, together with its framework, when its name is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from varreg.callbacks.in_accelerate import AccelerateTracker
    from varreg.callbacks.in_lightning import LightningCallback
    from varreg.callbacks.in_trainer import TrainerCallback
    from varreg.callbacks.loggers import MLflow, TensorBoard, WandB

__all__ = [
    "AccelerateTracker",
    "LightningCallback",
    "MLflow",
    "TensorBoard",
    "TrainerCallback",
    "WandB",
]
_HOMES = {
    "AccelerateTracker": ("in_accelerate", "accelerate"),
    "LightningCallback": ("in_lightning", "lightning"),
    "TrainerCallback": ("in_trainer", "transformers"),
    "MLflow": ("loggers", ""),
    "TensorBoard": ("loggers", ""),
    "WandB": ("loggers", ""),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'varreg.callbacks' has no attribute '{name}'")
    module, needs = _HOMES[name]
    try:
        return getattr(importlib.import_module(f"varreg.callbacks.{module}"), name)
    except ModuleNotFoundError as error:
        if error.name != needs:  # the framework itself misses a module
            raise
        raise ImportError(
            f"varreg: varreg.callbacks.{name} needs {needs}: pip install {needs}."
        ) from error
