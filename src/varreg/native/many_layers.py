"""Compute S and W of several small layers by one call.

The kernels are those of `layer_sums.py` and `reductions.py`; their definitions in PyTorch are named
there. A call from Python takes as long as the work of a small layer.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from varreg import _torch
from varreg.memory import Workspace
from varreg.native import library
from varreg.native.contract import Layer, LayerTask
from varreg.thresholds import PACKED, PANEL, WORTH_THREADS, WORTH_THREADS_PRODUCTS

_SCRATCH = Workspace()


class LayerSizes(NamedTuple):
    """A layer: what is computed for it, and the sizes."""

    kind: Layer
    batch: int
    groups: int
    r: int
    """Rows of a sample."""
    o: int
    """Features of δ."""
    i: int = 0
    """Features of the input of a dense layer."""
    eps: float = 0.0
    """Of a normalization."""
    centre: bool = True
    """Whether a normalization subtracts the mean."""

    @property
    def work(self) -> int:
        """Return the number of products, or of elements where there are none."""
        return self.batch * self.r * self.o * max(self.i, 1)

    @property
    def uses_threads(self) -> bool:
        """Return whether the work is worth threads."""
        dense = self.kind is Layer.DENSE
        return self.work > WORTH_THREADS_PRODUCTS if dense else self.work >= WORTH_THREADS


class ManyLayers:
    """Some layers whose sums are computed together, each with the shapes of the parameters that
    get them: of the weight first, then of the bias, if there is one.
    """

    def __init__(self, layers: Sequence[LayerSizes], shapes: Sequence[Sequence[torch.Size]]):
        self._array = (LayerTask * len(layers))()
        self._threads = torch.get_num_threads()
        self._room = self._size = 0
        nothing = torch.empty((), device="cpu")
        self._like = [nothing.expand(shape) for of in shapes for shape in of]
        for task, layer, own in zip(self._array, layers, shapes, strict=True):
            task.kind, task.batch, task.groups = layer.kind, layer.batch, layer.groups
            task.r, task.o, task.i = layer.r, layer.o, layer.i
            task.eps, task.centre = layer.eps, layer.centre
            task.uses_threads = layer.uses_threads
            group = -(-layer.batch // layer.groups) * layer.r  # rows of the largest group
            row = layer.o + PANEL * self._threads  # packed numbers per row
            at_once = min(max(1, PACKED // (group * row)), layer.groups)
            task.at_once, task.bias = at_once, -1
            room = 3 * layer.batch * layer.o
            room += group * at_once * row + 2 * PANEL * (self._threads + 1)
            self._room = max(self._room, room)
            task.weight, self._size = self._size, self._size + math.prod(own[0])
            if len(own) == 2:
                task.bias, self._size = self._size, self._size + math.prod(own[1])

    def sums(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return S and W of all parameters. `tensors` has δ and the input of each layer, contiguous
        tensors for which `library.serves` is true.
        """
        like = tensors[0]
        total, square = like.new_empty(self._size), like.new_empty(self._size)
        addresses = (ctypes.c_void_p * len(tensors))(*[t.data_ptr() for t in tensors])
        memory = _SCRATCH.room(self._room, like)
        pointers = total.data_ptr(), square.data_ptr(), memory.data_ptr()
        threads = min(self._threads, torch.get_num_threads())
        run = library.for_layers(like.dtype)
        run(len(self._array), self._array, addresses, *pointers, threads)
        return _torch.unflatten(total, self._like), _torch.unflatten(square, self._like)
