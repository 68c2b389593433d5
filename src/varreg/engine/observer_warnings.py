"""Warnings of an observer. Each is given once."""

from __future__ import annotations

import warnings


class Notices:
    """The warnings of an observer, each given once."""

    def __init__(self) -> None:
        self._given: set[str] = set()

    def once(self, subject: str, message: str) -> None:
        """Warn of something, once for each subject."""
        if subject not in self._given:
            self._given.add(subject)
            warnings.warn(message, UserWarning, stacklevel=2)

    def outside(self, where: str, batch_dim: int, batch: int) -> None:
        """Warn that a part of the model ran alone, after code that varreg did not see."""
        self.once(
            "outside",
            f"varreg: {where} was called outside of the model's forward(), by another method or by "
            f"yourself. varreg took the size of dimension {batch_dim} of its first input, {batch}, "
            "for the number of samples, and did not see what happened to the batch before. If that "
            "is right, ignore this. Otherwise call the model itself, so that forward() does it.",
        )

    def weighted(self, where: str, function: str) -> None:
        """Warn of a loss that weights each sample by the labels of all samples."""
        self.once(
            "weighted",
            f"varreg: in {where}, {function} weights each sample by the labels of all samples "
            "(ignored tokens, class weights). varreg measures each sample's share of the gradient, "
            "which differs from the gradient of its own loss alone. To make the two equal, sum the "
            "loss and divide it by a constant; varreg.verify shows the difference.",
        )

    def elsewhere(
        self, where: str, shape: tuple[int, ...], batch: int, dim: int, batch_dim: int
    ) -> None:
        """Warn that an output has the samples in another dimension than the inputs."""
        self.once(
            "elsewhere",
            f"varreg: an output of {where}, of shape {shape}, has the {batch} samples in dimension "
            f"{dim}. If your loss takes them from there, ignore this. If dimension {batch_dim} of "
            "the output counts samples, the inputs have them in another dimension: observe(..., "
            f"batch_dim={dim}).",
        )

    def row_per_sample(self, where: str, names: str, batch: int) -> None:
        """Warn of parameters that have a different row for each position in the batch."""
        self.once(
            "row per sample",
            f"varreg: in {where}, parameters ({names}) have a row for each of the {batch} "
            "positions in the batch: samples in another order would give them other gradients. "
            "varreg measures the samples in this order. If the batch is in another dimension, use "
            "observe(..., batch_dim=).",
        )

    def counted(self, where: str, batch: int) -> None:
        """Warn of outputs of a sample that depend on the number of samples."""
        self.once(
            "counted",
            f"varreg: in {where}, the output of a sample alone differs from its output in a batch "
            f"of {batch}: it depends on the number of samples, or on a count of them (as in h / "
            "len(x)). varreg measures each sample's gradient in a batch of this size. If that is "
            "intended, ignore this. Otherwise use a constant; varreg.verify shows the difference.",
        )

    def unscaled(self, where: str) -> None:
        """Warn of a hook on gradients whose result depends on the size of the batch."""
        self.once(
            "unscaled",
            f"varreg: in {where}, a hook changes gradients by their size (as clipping does). In a "
            "mean over the batch, the gradient of a sample is smaller than that of the sample "
            "alone, so the moments are valid for this batch size only. Clip after backward(), or "
            "use observe(..., reduction='sum') and a loss that is a sum.",
        )

    def untried_escape(self, where: str, function: str) -> None:
        """Warn that values of the batch left torch, where a trial is not possible."""
        self.once(
            "escapes",
            f"varreg: in {where}, {function} takes values of the batch out of torch. Parameters "
            "are sharded, so varreg does not try whether these values come back and make samples "
            "depend on each other. Call varreg.verify once in a single process.",
        )
