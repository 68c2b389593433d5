"""The last rows of a `NoiseScale`: sums of each layer, update by update."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from varreg.engine.noise_summary import layer_of


class Recent:
    """The sums of each layer in the last `window` updates, of `updates` in all.

    Rows of Python numbers wait in a list until `rows()` is called, since a write to a tensor takes
    longer than the sums of a small model.
    """

    def __init__(
        self,
        window: int,
        updates: int = 0,
        layers: Sequence[str] = (),
        rows: Tensor | None = None,
    ):
        self.window, self.updates, self.layers = window, updates, list(layers)
        self._rows = rows  # [window, layers, sums], written in turn
        self._waiting: list[list[list[float]]] = []  # the last updates, which are not written yet
        self._names: list[str] = []  # the names of the parameters in the last update
        self._places: list[int] = []  # the layer of each
        self._index: Tensor | None = None  # the same as a tensor

    def add(self, names: list[str], sums: Tensor | list[list[float]]) -> None:
        """Add an update: the sums of each parameter, `[n, sums]`."""
        if names != self._names:
            self._learn(names)
        if isinstance(sums, Tensor):
            self.rows()  # rows that wait come before this one
            rows = self._room(sums)
            if self._index is None:
                self._index = torch.tensor(self._places, device=rows.device)
            rows[self.updates % self.window].zero_().index_add_(0, self._index, sums)
        else:
            row = [[0.0] * len(sums[0]) for _ in self.layers]
            for place, values in zip(self._places, sums, strict=True):
                layer = row[place]
                for i, value in enumerate(values):
                    layer[i] += value
            self._waiting.append(row)
        self.updates += 1
        if len(self._waiting) == self.window:
            self.rows()

    def rows(self) -> Tensor | None:
        """Return the sums, `[window, layers, sums]`, written in turn; None before an update."""
        if self._waiting:
            new = torch.tensor(self._waiting, dtype=torch.float64, device="cpu")
            rows = self._room(new)
            at = torch.arange(self.updates - len(new), self.updates) % self.window
            rows[at.to(rows.device)] = new.to(rows)
            self._waiting = []
        return self._rows

    def _learn(self, names: list[str]) -> None:
        """Find the layers of parameters, some of which may be new."""
        self.rows()  # rows that wait have the layers that are known so far
        for layer in map(layer_of, names):
            if layer not in self.layers:
                self.layers.append(layer)
        self._names, self._index = names, None
        self._places = [self.layers.index(layer_of(name)) for name in names]

    def _room(self, like: Tensor) -> Tensor:
        """Return the tensor of all sums, with room for all layers, on the device of the new sums. A
        new layer has zeros in all updates before, since it had no gradient.
        """
        if self._rows is not None and self._rows.device != like.device:  # the model was moved
            self._rows, self._index = self._rows.to(like), None
        known = 0 if self._rows is None else self._rows.shape[1]
        if self._rows is None or known < len(self.layers):
            larger = like.new_zeros(self.window, len(self.layers), like.shape[-1])
            if self._rows is not None:
                larger[:, :known] = self._rows
            self._rows = larger
        return self._rows
