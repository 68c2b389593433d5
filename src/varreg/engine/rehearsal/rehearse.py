"""Run a model again: without dropout, and with everything restored afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from varreg.engine.rehearsal.dropout import WithoutDropout
from varreg.engine.rehearsal.model_state import ModelState
from varreg.engine.rehearsal.pauses import observers_off, tracers_off
from varreg.engine.rehearsal.random_state import RandomState
from varreg.errors import VarregError


@contextlib.contextmanager
def rehearsal(model: nn.Module) -> Iterator[Rehearsal]:
    """Run `model` inside of this block as often as you like. After the block, the model and all
    random states are restored.

    Inside, dropout of every kind is off (modules, functions, attention, recurrent layers; a
    randomized ReLU has its mean slope), and `model.training` does not change. Parameters begin
    without a gradient. An observed model is not observed. Afterwards parameters, gradients,
    buffers, attributes of modules, flags and random state are the same as before, by identity and
    by value, also if the block raises. Attributes are followed through lists, dicts and sets, not
    into objects of other kinds.

    Returns:
        The `Rehearsal`: `is_random` says whether random numbers were drawn, `reset()` starts anew.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Dropout(0.5))
    >>> x = torch.ones(3, 4)
    >>> with rehearsal(model) as run:
    ...     same = torch.equal(model(x), model(x))
    >>> same, run.is_random
    (True, False)

    """
    if not isinstance(model, nn.Module):
        raise VarregError(
            f"varreg: rehearsal expects a torch.nn.Module, got {type(model).__name__}."
        )
    run = Rehearsal(model)
    with tracers_off(), observers_off(model):
        try:
            run.reset()
            with run.mode:
                yield run
        finally:
            run.end()


class Rehearsal:
    """A running rehearsal: its random numbers, its dropout, and its reset."""

    def __init__(self, model: nn.Module):
        self._state = ModelState(model)
        self._numbers = RandomState(self._state.generators)
        self._grads = [(t, t.grad) for t in self._state.tensors if t.is_leaf and t.requires_grad]
        self._was_random = self._ended = False
        self.mode = WithoutDropout(self._numbers)

    @property
    def is_random(self) -> bool:
        """Return whether random numbers were drawn, except by dropout. Valid inside of the block
        and after it.
        """
        return self._was_random or (not self._ended and self._numbers.has_changed())

    @property
    def drawn(self) -> tuple[str, ...]:
        """Return the names of the random torch functions that were called. Functions of Python and
        NumPy are not recorded.
        """
        return tuple(self.mode.drawn)

    @contextlib.contextmanager
    def with_dropout(self) -> Iterator[None]:
        """Switch dropout on inside of the `with` block."""
        self.mode.drops = True
        try:
            yield
        finally:
            self.mode.drops = False

    def reset(self, numbers: bool = True) -> None:
        """Restore everything except hooks, and set gradients to None: the next run starts as the
        first did.

        Hooks belong to the caller: a model that is observed inside of the rehearsal stays observed.
        Without `numbers`, the random state is not restored: the next run draws other numbers.
        """
        self._put_back(hooks=False, numbers=numbers)
        for t, _ in self._grads:
            t.grad = None

    def end(self) -> None:
        """Restore everything, including gradients and hooks."""
        self._put_back(hooks=True)
        for t, grad in self._grads:
            t.grad = grad
        self._ended = True

    def _put_back(self, hooks: bool, numbers: bool = True) -> None:
        """Restore the model, and the random state if `numbers` is True."""
        self._was_random = self.is_random
        self._state.restore(hooks)
        if numbers:
            self._numbers.restore()
