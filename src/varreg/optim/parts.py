"""What a regularized step works on: parameters, in parts that are neither too large for the cache nor too small for their overhead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from varreg.engine import Moments
from varreg.engine.shards import local

LARGE = 1 << 19  # elements: larger parameters are split
SMALL = 1 << 16  # elements: smaller ones are worked on together
_FIELDS = ("total", "square", "grad", "x", "kappa2")  # names of what is not in the state


@dataclass
class Work:
    """A parameter whose step is regularized; where it is sharded, this rank's part of it."""

    owner: Tensor
    """The parameter that the optimizer has."""
    p: Tensor
    """What of it is worked on here."""
    group: dict[str, Any]
    state: dict[str, Any]
    moments: Moments
    grad: Tensor
    """Its gradient as the base sees it. Not `p.grad`, which some of torch's own steps change."""
    kappa2: Tensor | float
    """κ²: the variance of the gradient that the base sees is κ²v²."""
    x: Tensor
    """Where the parameter was before the step."""
    first: bool = True
    """Are the sums of the increment's variance new, and 0?"""
    lambdas: list[Tensor] = field(default_factory=list)
    """λ of each part."""

    def __getitem__(self, name: str) -> Tensor:
        """`x`; `grad`; `total` and `square` of the moments; `kappa2`; or what is in the state."""
        of = self.moments if name in ("total", "square") else self
        found: Tensor = getattr(of, name) if name in _FIELDS else local(self.state[name])
        return found

    def common(self) -> tuple[Any, ...]:
        """What parameters must have in common to be worked on together."""
        steps = tuple(float(v) for v in self.state.values() if isinstance(v, Tensor) and v.dim() == 0)
        kappa2 = self.kappa2 if isinstance(self.kappa2, float) else None
        m = self.moments
        return id(self.group), m.count, m.groups, m.total.device, m.square.dtype, self.p.dtype, self.first, kappa2, steps

    @property
    def lam(self) -> Tensor:
        """λ of the whole parameter."""
        return self.lambdas[0] if len(self.lambdas) == 1 else torch.cat(self.lambdas).view_as(self.p)

    @lam.setter
    def lam(self, value: Tensor) -> None:
        self.lambdas = [value]


class Part:
    """Elements that are worked on together: of one parameter, or of several small ones, one after the other.

    `part[name]` is what a `Work` has under that name, for these elements; `part.g` and `part.s2` are the gradient as the base uses it,
    and its variance σ².
    """

    g: Tensor
    s2: Tensor

    def __init__(self, works: list[Work], span: slice | None = None):
        self.works, self.span = works, span
        self.group, self.first, self.moments, self.kappa2 = works[0].group, works[0].first, works[0].moments, works[0].kappa2
        self._joined: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        t = self.works[0][name]
        if t.dim() == 0 or (len(self.works) == 1 and self.span is None):
            return t
        if self.span is not None:
            return t.view(-1)[self.span]
        if name not in self._joined:
            self._joined[name] = torch.cat([w[name].reshape(-1) for w in self.works])
        return self._joined[name]

    def put_back(self, lam: Tensor) -> None:
        """Hand λ to the parameters, and write what was joined of our statistics back to where it came from."""
        if len(self.works) == 1:
            self.works[0].lambdas.append(lam)
            return
        sizes = [w.p.numel() for w in self.works]
        for w, piece in zip(self.works, lam.split(sizes), strict=True):
            w.lambdas.append(piece.view(w.p.shape))
        for name, joined in self._joined.items():
            if name.startswith("vr_"):
                own = [w[name] for w in self.works]
                torch._foreach_copy_(own, [piece.view(t.shape) for t, piece in zip(own, joined.split(sizes), strict=True)])


def parts(works: Iterable[Work]) -> Iterator[Part]:
    """All elements of all parameters: large ones in pieces, small ones together."""
    together: dict[tuple[Any, ...], list[Work]] = {}
    for w in works:
        if w.p.dim() > 0 and w.p.numel() <= SMALL:
            together.setdefault(w.common(), []).append(w)
        else:
            yield from pieces(w)
    yield from map(Part, together.values())


def pieces(w: Work) -> Iterator[Part]:
    """One parameter, whole; or in pieces if it is large, and all that belongs to it lies in one order."""
    own = (*map(local, (t for t in w.state.values() if isinstance(t, Tensor))), w.kappa2)
    tensors = [w.x, w.grad, w["total"], w["square"], *(t for t in own if isinstance(t, Tensor))]
    n = w.p.numel()
    if n <= LARGE or not all(t.is_contiguous() for t in tensors):
        yield Part([w])
        return
    for i in range(0, n, LARGE):
        yield Part([w], slice(i, i + LARGE))
