"""`fisher(model, loader)`: the diagonal of the Fisher information, exact per sample."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable, Mapping, Sized
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from varreg.errors import VarregError
from varreg.noise.fisher_kinds import Loss
from varreg.noise.fisher_sums import FisherSums
from varreg.noise.progress import bar
from varreg.thresholds import CHECKPOINT_SECONDS


def fisher(
    model: nn.Module,
    loader: Iterable[Any],
    kind: str = "empirical",
    *,
    loss: Loss = F.cross_entropy,
    dtype: torch.dtype | None = None,
    generator: torch.Generator | None = None,
    samples: int | None = None,
    batches: int | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> dict[str, Tensor]:
    """Return the diagonal of the Fisher information of each trained parameter, by name.

    With g_i(y) the gradient of loss(model(x_i), y), which is −log p(y|x_i), over N samples:

        empirical   (1/N) Σ_i g_i(y_i)²
        sampled     (1/N) Σ_i g_i(ŷ_i)²,  ŷ_i drawn from the model
        exact       (1/N) Σ_i Σ_y p(y|x_i) g_i(y)², over the C classes; takes C backward passes

    The squares are of the gradients of single samples, for any batch size. The model runs in eval
    mode; its modes, gradients, hooks and observers are restored afterwards.

    Args:
        model: Any module that `varreg.observe` accepts, observed or not.
        loader: Yields `(x, y)` with samples along dimension 0. `x` is a tensor, a tuple of
            positional arguments or a dict of keyword arguments. Batches may differ in size.
        kind: `"empirical"`, `"sampled"` or `"exact"`. The latter two need logits `[samples,
            classes]` as the model's output; `"sampled"` also takes `[samples, classes, …]`.
        loss: `loss(output, y)`, a mean over samples.
        dtype: The type of the sums over batches. None: that of the parameter, at least float32.
        generator: Draws labels for `"sampled"`. None: torch's default generator.
        samples: Stop after this number of samples; the last batch is cut.
        batches: Stop after this number of batches.
        checkpoint: A file. The sums are saved there every minute, and when the pass is interrupted.
            Another call continues from the file, if the loader yields the same batches again.
        progress: None shows a bar on a terminal, if tqdm or rich is installed.

    Returns:
        `{name: diagonal}`, each of the shape of its parameter. Under DDP the diagonal is over the
        samples of all ranks, which may have different numbers of batches. Under `fully_shard` it is
        over all ranks, too, and sharded as parameters are; all ranks must have the same number of
        batches. Without either, each process has the sums of its own samples: `FisherSums` adds
        them up.

    >>> import torch, varreg
    >>> model = torch.nn.Linear(1, 2, bias=False)
    >>> _ = torch.nn.init.zeros_(model.weight)  # p(y|x) = 1/2, so that g² = x²/4 for either label
    >>> data = [(torch.tensor([[2.0], [4.0]]), torch.tensor([0, 1]))]
    >>> varreg.fisher(model, data, kind="exact")["weight"].flatten()  # (4 + 16)/2/4
    tensor([2.5000, 2.5000])

    """
    for name, limit in (("samples", samples), ("batches", batches)):
        if limit is not None and (
            isinstance(limit, bool) or not isinstance(limit, int) or limit < 1
        ):
            raise VarregError(f"varreg: {name} must be a whole number from 1 up; got {limit!r}.")
    sums = FisherSums(model, kind, loss=loss, dtype=dtype, generator=generator)
    if not isinstance(loader, Iterable):
        raise VarregError(
            "varreg: fisher expects a loader, or another iterable, of pairs (x, y); got "
            f"{type(loader).__name__}."
        )
    path = None if checkpoint is None else Path(checkpoint)
    if path is not None:
        _load(sums, path)
    total = len(loader) if isinstance(loader, Sized) else None
    if batches is not None:
        total = batches if total is None else min(batches, total)
    rest = itertools.islice(iter(loader), sums.batches, batches)
    batches_left = None if total is None else total - sums.batches
    saved = time.monotonic()
    try:
        with sums:
            for batch in bar(rest, f"Fisher, {kind}", batches_left, progress):
                if samples is not None and sums.samples >= samples:
                    break
                sums.update(*_pair(batch), most=None if samples is None else samples - sums.samples)
                if path is not None and time.monotonic() - saved > CHECKPOINT_SECONDS:
                    _save(sums, path)
                    saved = time.monotonic()
    finally:
        if path is not None and sums.batches:
            _save(sums, path)
    if isinstance(model, DistributedDataParallel):
        sums.all_reduce(model.process_group)
    return sums.diagonal()


def _pair(batch: Any) -> tuple[Any, Any]:
    """Return inputs and targets."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        got = type(batch).__name__
        got += f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""
        raise VarregError(
            f"varreg: fisher expects a loader of pairs (x, y); got {got}. Several inputs are a "
            "tuple, ((a, b), y), or a dict of keyword arguments."
        )
    x, y = batch
    x = dict(x) if isinstance(x, Mapping) else tuple(x) if isinstance(x, list) else x
    return x, y


def _load(sums: FisherSums, path: Path) -> None:
    """Continue from a checkpoint, if there is one. Raise a VarregError if the file is not a
    checkpoint, or if none can be written there: an error now is better than one after a long pass.
    """
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise VarregError(
            f"varreg: checkpoint must be a file in a folder in which you may write; {path} is not."
        )
    if not path.exists():
        return
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # torch.load raises many kinds
        raise VarregError(
            f"varreg: {path} is not a checkpoint of varreg.fisher, or it is damaged "
            f"({type(error).__name__}). Delete it, or choose another file."
        ) from error
    sums.load_state_dict(state)


def _save(sums: FisherSums, path: Path) -> None:
    """Write a checkpoint whole, or not at all."""
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")
    torch.save(sums.state_dict(), beside)
    beside.replace(path)
