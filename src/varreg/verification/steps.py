"""Run training steps of a few samples, together or alone, each from the same state of the model."""

from __future__ import annotations

import math
import warnings
from typing import NamedTuple

import torch
from torch import Tensor, nn

from varreg.engine.rehearsal import Rehearsal
from varreg.engine.trace.arguments import tensors_of
from varreg.errors import VarregError
from varreg.verification.result import CannotVerify
from varreg.verification.samples import Batch, InputError, Loss, Selection


class Step(NamedTuple):
    """The loss, outputs and gradients of one forward and backward."""

    loss: float
    outputs: list[Tensor]
    grads: dict[str, Tensor | None]


class Steps:
    """Runs forward and backward of a model inside of a rehearsal, which restores the model
    afterwards.
    """

    def __init__(
        self, model: nn.Module, loss: Loss | None, selection: Selection, rehearsal: Rehearsal
    ):
        self.model, self.loss, self.selection, self.rehearsal = model, loss, selection, rehearsal
        self.params = {n: p for n, p in model.named_parameters() if p.requires_grad}

    @property
    def size(self) -> int:
        """Return the number of samples."""
        return self.selection.batch.size

    def run(self, batch: Batch, numbers: bool = True) -> Step:
        """Run one step from the initial state, and return it. Without `numbers`, it uses new random
        numbers.
        """
        self.rehearsal.reset(numbers)
        output = batch.output(self.model)
        loss = batch.loss(self.loss, output)
        loss.backward()
        outputs = [t.detach() for t in tensors_of(output) if t.requires_grad]
        grads = {n: None if p.grad is None else p.grad.detach() for n, p in self.params.items()}
        return Step(float(loss.detach()), outputs, {n: _dense(g) for n, g in grads.items()})

    def run_batch(self) -> Step:
        """Return the step of all samples together. Raise unless its numbers are finite."""
        chosen = self.selection
        try:
            step = self.run(chosen.batch)
        except InputError as error:
            raise VarregError(str(error)) from None
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            if chosen.batch.size == chosen.total:
                raise VarregError(
                    f"varreg: verify cannot run the model and its loss on the batch ({cause})."
                ) from error
            raise CannotVerify(
                f"The model or its loss fails on {chosen.batch.size} samples of the batch of "
                f"{chosen.total} ({cause}).",
                f"Pass samples={chosen.total} if it needs a batch of that size.",
            ) from error
        _check_finite(step, "the batch")
        return step

    def run_single(self, i: int) -> Step:
        """Return the step of sample i alone. Raise unless its numbers are finite."""
        subject = f"sample {self.selection.indices[i]} alone"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the user did not ask for a batch of one
                step = self.run(self.selection.singles[i])
        except Exception as error:
            raise CannotVerify(
                f"The model or its loss fails on {subject} ({type(error).__name__}: {error}).",
                "A sample has a gradient of its own only where it can be run by itself.",
            ) from error
        _check_finite(step, subject)
        return step

    def run_forward(self, i: int | None) -> None:
        """Run the forward of sample i, or of all samples if i is None."""
        self.rehearsal.reset()
        (self.selection.batch if i is None else self.selection.singles[i]).output(self.model)

    def check_randomness(self, step: Step) -> CannotVerify | None:
        """Raise a CannotVerify if other random numbers change the gradients of the batch's step.

        Return None if no random numbers are drawn. Otherwise return an error for the caller to
        raise, in case the batch's numbers differ from those of single samples: random numbers may
        be the cause. A model whose random numbers have no effect can be verified.
        """
        if not self.rehearsal.is_random:
            return None
        names = ", ".join(f"`{name}`" for name in self.rehearsal.drawn)
        error = CannotVerify(
            "The model or its loss draws random numbers, other than by dropout"
            + (f": {names}." if names else "."),
            "Switch them off while you verify: other numbers give a sample another gradient.",
        )
        for _ in range(3):
            again = self.run(self.selection.batch, numbers=False)
            if not all(_are_equal(again.grads[name], grad) for name, grad in step.grads.items()):
                raise error
        return error


def _check_finite(step: Step, subject: str) -> None:
    """Raise if a loss or a gradient is nan or infinite."""
    advice = "Are all of its targets ignored? Pass a batch whose numbers are finite."
    if not math.isfinite(step.loss):
        raise CannotVerify(f"The loss of {subject} is {step.loss}.", advice)
    for name, grad in step.grads.items():
        if grad is not None and not grad.isfinite().all():
            raise CannotVerify(f"The gradient of {subject} for '{name}' is not finite.", advice)


def _dense(t: Tensor | None) -> Tensor | None:
    return t.to_dense() if t is not None and t.is_sparse else t


def _are_equal(a: Tensor | None, b: Tensor | None) -> bool:
    return torch.equal(a, b) if a is not None and b is not None else a is b
