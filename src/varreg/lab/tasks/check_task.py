"""Check a task before any training: can its model be trained on its data? And compute its
fingerprint, which shows later changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from varreg._torch import tree_leaves, tree_map
from varreg.errors import VarregError
from varreg.lab.tasks import lookup
from varreg.lab.tasks.batches import Split
from varreg.lab.tasks.definition import Splits
from varreg.lab.tasks.randomness import seeded


def fingerprint(spec: str, splits: Splits, model: nn.Module) -> str:
    """Return a checksum of a task's data and of the names and shapes of its model's parameters, to
    detect changes. Of each split it contains all targets and a thousand inputs; of a Dataset, a
    hundred samples.
    """
    checksum = hashlib.sha256()
    for split in splits:
        n = len(split)
        if isinstance(split, Split):
            x, y = split.x[:: max(1, n // 1000)], split.y
        else:
            x, y = split.take(range(0, n, max(1, n // 100)), 0) if n else (torch.empty(0),) * 2
        for t in (x.contiguous(), y):
            checksum.update(f"{t.dtype} {tuple(t.shape)} {n}".encode())
            checksum.update(
                t.cpu().contiguous().view(torch.uint8).numpy().tobytes() if t.numel() else b""
            )
    for name, p in model.named_parameters():
        # Leave float32 out, so that the checksums of earlier versions, without dtypes, stay valid.
        dtype = "" if p.dtype == torch.float32 else f" {p.dtype}"
        checksum.update(f"{name} {tuple(p.shape)}{dtype}".encode())
    return checksum.hexdigest()[:16]


def check(spec: str, data_dir: Path | None, batch: int) -> str:
    """Check, before any training, that the model can be trained on the data; return the task's
    fingerprint.
    """
    made, splits = lookup.task(spec), lookup.load(spec, data_dir)
    for name, split in zip(Splits._fields, splits, strict=True):
        if name != "valid" and not len(split):
            raise VarregError(f"varreg: the {name} split of task {spec} is empty.")
    try:
        with seeded(0):
            model = made.model()
        x, y = splits.train.rows(0, batch)
        model.eval()
        output = model(x)
        loss = made.loss(output, y)
        check_loss(made.loss, loss, output, y, f"the loss of task {spec}")
    except Exception as error:
        if isinstance(error, VarregError):
            raise
        raise VarregError(
            f"varreg: task {spec}: its model and loss cannot be used on its data "
            f"({type(error).__name__}: {error})."
        ) from error
    if not list(model.parameters()):
        raise VarregError(f"varreg: the model of task {spec} has no parameters.")
    return fingerprint(spec, splits, model)


def check_loss(loss_of: Callable[..., Any], loss: Any, output: Any, y: Any, name: str) -> None:
    """Raise unless a loss is a single number and a mean over samples.

    A sum, or a loss that mixes samples, shows in the halves of the batch.
    """
    if not isinstance(loss, Tensor) or loss.dim():
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise VarregError(
            f"varreg: {name} must be a single number, a mean over samples; got {got}."
        )
    m = next(len(t) for t in tree_leaves(y) if isinstance(t, Tensor))
    if m < 2:
        return
    halves = []
    for half in (slice(0, m // 2), slice(m // 2, None)):
        these = tree_map(lambda t, half=half: t[half] if isinstance(t, Tensor) else t, (output, y))
        halves.append(loss_of(*these) * (len(range(m)[half]) / m))
    if not torch.isclose(loss, halves[0] + halves[1], rtol=1e-3, atol=1e-5):
        raise VarregError(
            f"varreg: {name} is not a mean over samples: of {m} samples it is {loss.item():.6g}, "
            "and the "
            f"weighted mean of its two halves is {(halves[0] + halves[1]).item():.6g}."
        )
