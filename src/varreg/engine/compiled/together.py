"""Sites that are measured together, by one call of native code.

Which sites these are is found out from the contributions that their rules return for the first
gradients: native code can compute them if it finds all it needs in the gradient and in the saved
tensors, as they lie in memory. Shapes are the same for all calls with one certificate.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from varreg import native
from varreg.backends import BACKENDS
from varreg.engine.compiled.uses import RuleUse, SiteUse
from varreg.engine.contribution import Bias, Contribution, Dense, Outer
from varreg.engine.rules import RULES, Use
from varreg.native import library
from varreg.native.contract import Layer
from varreg.native.many_layers import LayerSizes, ManyLayers
from varreg.thresholds import LARGE_PAGES, MOST_CERTIFICATES

if TYPE_CHECKING:
    from varreg.engine.compiled.passes import Pass

_NORMS = {RULES[F.layer_norm]: True, RULES[F.rms_norm]: False}
"""Normalizations of rows: do they subtract the mean?"""


class Place(NamedTuple):
    """A site that native code measures."""

    sizes: LayerSizes
    order: tuple[int, ...]
    """The positions of the parameters at the site: of the weight, then of the bias."""
    inputs: tuple[int, int]
    """Which of the gradient (0) and the saved tensors (1, …) are δ and the input of the layer."""


def place_of(
    site: SiteUse, parameters: Sequence[Tensor], grad: Tensor, saved: Sequence[Tensor]
) -> Place | None:
    """Return how native code measures a site with these parameters; None if it cannot."""
    given = grad, *saved
    if BACKENDS[grad.device.type] is not native or not library.serves(*given, *parameters):
        return None
    if not all(t.is_contiguous() for t in given) or len({t.data_ptr() for t in given}) < len(given):
        return None
    if isinstance(site, RuleUse) and site.use.rule in _NORMS and "weight" in site.use.wants:
        return _normalization(site.use, grad, saved[0])
    contributions = site.contributions(grad, saved)
    if [c.shape for c in contributions] != [p.shape for p in parameters]:
        return None
    weight, *rest = sorted(contributions, key=_is_bias)
    if math.prod(weight.shape) >= LARGE_PAGES or not weight.partition.batch:
        return None
    order = tuple(contributions.index(c) for c in (weight, *rest))
    batch, groups = weight.partition
    if isinstance(weight, Outer) and type(weight) is Outer:
        if rest not in ([], [weight.bias]) or (weight.delta.shape[1] == 1 and groups == batch):
            return None  # one row for each sample has a faster way
        (_, r, o), i = weight.delta.shape, weight.a.shape[2]
        inputs = _found(weight.delta, given), _found(weight.a, given)
        sizes = LayerSizes(Layer.DENSE, batch, groups, r, o, i)
    elif isinstance(weight, Dense) and not rest:
        inputs = _found(weight.values, given), 0
        sizes = LayerSizes(Layer.VALUES, batch, groups, 1, math.prod(weight.shape))
    else:
        return None
    found = [i for i in inputs if i is not None]
    return Place(sizes, order, (found[0], found[1])) if len(found) == 2 and sizes.work else None


def _is_bias(c: Contribution) -> bool:
    return isinstance(c, Bias)


def _found(t: Tensor, given: Sequence[Tensor]) -> int | None:
    """Return which of the given tensors lies in memory as `t` does."""
    for i, one in enumerate(given):
        if one.data_ptr() == t.data_ptr() and one.numel() == t.numel() and t.is_contiguous():
            return i
    return None


def _normalization(use: Use, grad: Tensor, input: Tensor) -> Place | None:
    features, wants = len(use.arguments["normalized_shape"]), [*use.wants]
    dy, x = use.rows(grad, features=features), use.rows(input, "input", features)
    batch, groups = use.partition
    if _found(dy, [grad]) is None or _found(x, [input]) is None:
        return None
    centre, usual = _NORMS[use.rule], inspect.signature(use.rule.run).parameters["eps"].default
    eps = use.arguments.get("eps", usual)
    eps, o = torch.finfo(input.dtype).eps if eps is None else eps, math.prod(dy.shape[2:])
    sizes = LayerSizes(Layer.NORM, batch, groups, dy.shape[1], o, eps=eps, centre=centre)
    order = tuple(wants.index(name) for name in ("weight", "bias") if name in wants)
    return Place(sizes, order, (0, 1)) if sizes.work else None


class Together:
    """Some sites that native code measures by one call. `given` has the gradient of each, and the
    tensors that were saved for it.
    """

    def __init__(self, run: Pass, numbers: Sequence[int], given: Sequence[Sequence[Tensor]]):
        certificate = run.certificate
        self.numbers, self._shapes = numbers, [t.shape for of in given for t in of]
        self._sites = [certificate.sites[number] for number in numbers]
        self._places: list[Any] = [certificate.places[number] for number in numbers]
        self._partition = certificate.partition
        self._known = Contribution(self._partition, torch.Size())
        own = [
            [run.parameters[site.parameters[k]].shape for k in place.order]
            for site, place in zip(self._sites, self._places, strict=True)
        ]
        self._native = ManyLayers([place.sizes for place in self._places], own)

    def take(
        self, run: Pass, given: Sequence[Sequence[Tensor]]
    ) -> dict[int, list[Tensor | None]] | None:
        """Add the contributions at the sites to the ledgers. Return the gradients of each site's
        parameters; None if native code was prepared for other tensors.
        """
        every = [t for of in given for t in of]
        if [t.shape for t in every] != self._shapes or not library.serves(*every):
            return None
        for t in every:
            if not t.is_contiguous():
                return None
        leaves: list[Any] = [
            (run.parameters[i], run.ledgers[i]) for site in self._sites for i in site.parameters
        ]
        run.observer.window.open(leaves, self._partition, run.forward)
        tensors = [
            of[k] for of, place in zip(given, self._places, strict=True) for k in place.inputs
        ]
        sums = zip(*self._native.sums(tensors), strict=True)
        rest, found = iter(leaves), dict[int, list[Tensor | None]]()
        for number, site, place, of in zip(
            self.numbers, self._sites, self._places, given, strict=True
        ):
            by_position = {k: next(sums) for k in place.order}
            found[number] = own = []
            for k in range(len(place.order)):
                p, ledger = next(rest)
                c = self._known
                if ledger.is_check_due:  # then it may need the contributions in float64
                    c = Bias(self._partition, p.shape, functools.partial(_one, site, of, k))
                own.append(ledger.add(c, p.dtype, by_position[k]))
        return found


def _one(site: SiteUse, given: Sequence[Tensor], k: int) -> Contribution:
    """Return the contributions to a parameter of a site."""
    grad, *saved = given
    return site.contributions(grad, saved)[k]


def plan(
    run: Pass, numbers: Sequence[int], given: Sequence[Sequence[Tensor]]
) -> tuple[Together, list[Sequence[Tensor]]] | None:
    """Return what native code measures together, with the tensors that it is given; None if there
    is nothing.
    """
    certificate = run.certificate
    places, plans, fitting = certificate.places, certificate.plans, []
    for k, number in enumerate(numbers):
        site = certificate.sites[number]
        if number not in places:
            grad, *saved = given[k]
            met = [run.parameters[i] for i in site.parameters]
            is_usual = site.partition == certificate.partition
            places[number] = place_of(site, met, grad, saved) if is_usual else None
        if places[number] is not None and all(map(run.is_ordinary, site.parameters)):
            fitting.append(k)
    if not fitting:
        return None
    some, tensors = tuple([numbers[k] for k in fitting]), [given[k] for k in fitting]
    key = some, torch.get_num_threads()
    if key not in plans:
        if len(plans) >= MOST_CERTIFICATES:
            plans.clear()
        plans[key] = Together(run, some, tensors)
    return plans[key], tensors
