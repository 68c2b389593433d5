"""Augmentation: random changes of the images of a batch. They depend only on the run's seed and the
step, so that a resumed run gets the same changes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Augmentation = Callable[[Tensor, torch.Generator], Tensor]
"""A function of the inputs of a batch and a generator on the CPU. It returns inputs of the same
shape.
"""


def flip(x: Tensor, generator: torch.Generator) -> Tensor:
    """Return images `[m, …, width]` of which half, by chance, are mirrored."""
    chosen = torch.rand(len(x), generator=generator) < 0.5
    return torch.where(chosen.view(-1, *[1] * (x.dim() - 1)).to(x.device), x.flip(-1), x)


def crop(x: Tensor, generator: torch.Generator) -> Tensor:
    """Return images `[m, channels, height, width]`, each moved by up to an eighth of its size and
    padded with zeros.
    """
    m, _, height, width = x.shape
    down, right = height // 8, width // 8
    padded = F.pad(x, (right, right, down, down))
    rows = torch.randint(2 * down + 1, (m, 1), generator=generator) + torch.arange(height)
    columns = torch.randint(2 * right + 1, (m, 1), generator=generator) + torch.arange(width)
    i, j = rows.to(x.device)[:, None, :, None], columns.to(x.device)[:, None, None, :]
    k, c = torch.arange(m, device=x.device), torch.arange(x.shape[1], device=x.device)
    return padded[k[:, None, None, None], c[None, :, None, None], i, j]


def crop_and_flip(x: Tensor, generator: torch.Generator) -> Tensor:
    """Return images that are moved, and mirrored by chance."""
    return flip(crop(x, generator), generator)


AUGMENTATIONS: dict[str, Augmentation] = {
    "crop": crop,
    "flip": flip,
    "crop+flip": crop_and_flip,
}


def generator_of(seed: int, step: int) -> torch.Generator:
    """Return the generator of a step."""
    return torch.Generator().manual_seed((1_000_003 * (seed + 1) + step) ^ 0x5EED)
