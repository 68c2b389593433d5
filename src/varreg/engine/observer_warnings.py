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
        """Warn that a part of the model ran alone: what its caller did before was not seen."""
        self.once(
            "outside",
            f"varreg: {where} was called outside of the model's forward(), by another method or by "
            f"yourself. The size of dimension {batch_dim} of its first input, {batch}, was taken "
            "for the number of samples; what was done to the batch before was not seen. Is that "
            "so? Then ignore this. Else call the model itself, and let forward() do it.",
        )

    def weighted(self, where: str, function: str) -> None:
        """Warn of a loss that weights samples by the labels of all."""
        self.once(
            "weighted",
            f"varreg: in {where}, {function} weights samples by what the labels of all of them say "
            "(ignored tokens, class weights). What is measured is each sample's share of the "
            "gradient, which is not the gradient of its own loss alone. To make them the same, sum "
            "the loss and divide by a constant; varreg.verify shows the difference.",
        )

    def elsewhere(
        self, where: str, shape: tuple[int, ...], batch: int, dim: int, batch_dim: int
    ) -> None:
        """Warn that an output has the samples in another dimension than the inputs."""
        self.once(
            "elsewhere",
            f"varreg: an output of {where}, of shape {shape}, has the {batch} samples in dimension "
            f"{dim}. Does your loss take them from there? Then ignore this. If dimension "
            f"{batch_dim} of it counts samples, the inputs have them elsewhere: observe(..., "
            f"batch_dim={dim}).",
        )

    def slots(self, where: str, names: str, batch: int) -> None:
        """Warn of parameters that have a row for each sample, by its number."""
        self.once(
            "slots",
            f"varreg: in {where}, parameters ({names}) have a row for each of the {batch} "
            "samples, by its number: another order of the samples would give them other "
            "gradients. What is measured is that of each sample in its row. Is the batch in "
            "another dimension? Then use observe(..., batch_dim=).",
        )

    def counted(self, where: str, batch: int) -> None:
        """Warn of outputs of a sample that depend on how many samples there are."""
        self.once(
            "counted",
            f"varreg: in {where}, the output of a sample alone is another one than in a batch of "
            f"{batch}: the number of samples, or a count of them, is a part of it (as in h / "
            "len(x)). What is measured is each sample's gradient in a batch of this size. Is that "
            "meant? Then ignore this. Else use a constant; varreg.verify shows the difference.",
        )

    def unscaled(self, where: str) -> None:
        """Warn of a hook on gradients whose result depends on the size of the batch."""
        self.once(
            "unscaled",
            f"varreg: in {where}, a hook changes gradients by their size (as clipping does). In a "
            "mean over the batch, the gradient of a sample is smaller than that of the sample "
            "alone, so what is measured holds for this size of batch only. Clip after backward(), "
            "or use observe(..., reduction='sum') and a loss that is a sum.",
        )

    def untried_escape(self, where: str, function: str) -> None:
        """Warn that values of the batch left torch, where a trial is not possible."""
        self.once(
            "escapes",
            f"varreg: in {where}, {function} takes values of the batch out of sight. Whether they "
            "come back and make samples depend on each other is not tried where parameters are "
            "sharded. Call varreg.verify once in a single process.",
        )
