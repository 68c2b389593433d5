"""Embeddings: a sample contributes only to the rows that it looked up."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from varreg.backends import BACKENDS
from varreg.engine.contribution import Contribution, Sums, stat_dtype
from varreg.engine.partition import Partition
from varreg.engine.rules.rule import Contributions, Use, rule
from varreg.engine.trace.layout import Single, as_rows, samples


class SparseRows(Contribution):
    """A lookup: the rows `ids [b, r]` of a table receive `dy [b, r, features]`, except for the row
    `skip`.

    Only the rows that a group looked up are not zero, so only these are squared.
    """

    def __init__(
        self, partition: Partition, shape: torch.Size, ids: Tensor, dy: Tensor, skip: int | None
    ):
        super().__init__(partition, shape)
        self.ids, self._dy, self._skip = ids, dy, None if skip is None else skip % shape[0]

    def source(self) -> Tensor:
        return self._dy

    @functools.cached_property
    def dy(self) -> Tensor:
        """Return dy, zero where the row is skipped."""
        return (
            self._dy
            if self._skip is None
            else self._dy.masked_fill((self.ids == self._skip).unsqueeze(-1), 0)
        )

    def groups(self, first: int, last: int, start: int, n: int) -> Tensor:
        part = slice(start, start + (last - first) * n)
        group = torch.arange(last - first, device=self.ids.device).repeat_interleave(n)
        flat = (self.ids[part] + (group * self.shape[0]).unsqueeze(1)).flatten()
        out = self.dy.new_zeros((last - first) * self.shape[0], self.shape[1])
        return out.index_add_(0, flat, self.dy[part].flatten(0, 1)).view(last - first, *self.shape)

    def sums(self) -> Sums:
        if not self.partition.batch:
            return None, None
        if sums := BACKENDS[self._dy.device.type].lookup(
            self.ids, self._dy, self.shape, self.partition.groups, self._skip
        ):
            return sums
        vocabulary, features = self.shape
        dtype = stat_dtype(self.dy.dtype)
        if not self.ids.numel():
            zeros = self.dy.new_zeros(self.shape, dtype=dtype)
            return zeros, zeros.clone()
        group, shares = _groups(self.partition, self.ids, dtype)
        # (group, row) pairs in order: equal ones are neighbours, and their rows are added up
        keys, order = (self.ids + (group * vocabulary).unsqueeze(1)).flatten().sort()
        place = torch.cat([keys.new_zeros(1), (keys[1:] != keys[:-1]).cumsum(0)])
        c = self.dy.new_zeros(len(keys), features, dtype=dtype).index_add_(
            0, place, self.dy.flatten(0, 1).to(dtype).index_select(0, order)
        )
        row = torch.zeros_like(keys).scatter_(0, place, keys % vocabulary)
        total = c.new_zeros(self.shape).index_add_(0, row, c)
        c = c.square_()
        if shares is not None:
            pair = torch.zeros_like(keys).scatter_(0, place, keys // vocabulary)
            c = c.mul_(shares[pair].unsqueeze(1))
        return total, c.new_zeros(self.shape).index_add_(0, row, c)

    def total(self) -> Tensor | None:
        if self.partition.batch and (
            sums := BACKENDS[self._dy.device.type].lookup(
                self.ids, self._dy, self.shape, 1, self._skip, squares=False
            )
        ):
            return sums[0]
        zeros = self.dy.new_zeros(self.shape)
        return zeros.index_add_(0, self.ids.flatten(), self.dy.flatten(0, 1))


def _groups(partition: Partition, ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return the group of each sample, and one over the number of samples in each group; None if
    that is 1.
    """
    runs, device = list(partition.runs()), ids.device
    each = [torch.arange(a, b, device=device).repeat_interleave(n) for a, b, _, n in runs]
    group = each[0] if len(each) == 1 else torch.cat(each)
    if all(n == 1 for *_, n in runs):
        return group, None
    share = [torch.full((b - a,), 1 / n, dtype=dtype, device=device) for a, b, _, n in runs]
    return group, torch.cat(share)


@rule(F.embedding, serves="weight", saves="input")
def embedding(
    use: Use,
    grads: list[Tensor],
    input: Tensor,
    weight: None,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Contributions:
    at = use.input_places["input"]
    ids = as_rows(samples(input, at))
    return {
        "weight": SparseRows(
            use.partition, use.shapes["weight"], ids, use.rows(grads[0]), padding_idx
        )
    }


def _rows_are_bags(use: Use) -> bool:
    return not isinstance(use.output_place, Single) and use.output_place.dim == 0


@rule(
    F.embedding_bag,
    saves="input offsets per_sample_weights weight",
    serves="weight",
    carries="input offsets per_sample_weights",
    when=_rows_are_bags,
)
def embedding_bag(
    use: Use,
    grads: list[Tensor],
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Contributions:
    """Return the contributions of the samples, one bag each. Bags of different lengths are padded
    to the same length with a row that is then skipped.
    """
    dy, vocabulary = grads[0], use.shapes["weight"][0]
    flat = input.flatten()
    bag = _bags(input, offsets, include_last_offset)
    is_padding = (
        torch.zeros_like(flat, dtype=torch.bool)
        if padding_idx is None
        else flat == padding_idx % vocabulary
    )
    share = dy[bag]  # the gradient of each looked-up row
    if mode == "mean":
        n = torch.zeros(len(dy), dtype=dy.dtype, device=dy.device).index_add_(
            0, bag, (~is_padding).to(dy.dtype)
        )
        share = share / n.clamp(min=1)[bag].unsqueeze(1)
    elif mode == "max":
        values = weight[flat].masked_fill(is_padding.unsqueeze(1), -torch.inf)
        share = share * _is_largest(values, bag, len(dy)).to(dy.dtype)
    elif per_sample_weights is not None:
        share = share * per_sample_weights.flatten().unsqueeze(1)
    share = share.masked_fill(is_padding.unsqueeze(1), 0)
    if "weight" not in use.wants:
        return {}
    position = torch.arange(len(flat), device=flat.device) - torch.searchsorted(bag, bag)
    longest = input.shape[-1] if offsets is None or not len(flat) else int(position.max()) + 1
    ids = flat.new_zeros(len(dy), longest).index_put((bag, position), flat)
    padded = share.new_zeros(len(dy), longest, share.shape[1]).index_put((bag, position), share)
    ids, padded = as_rows(samples(ids, use.output_place)), use.rows(padded)
    return {"weight": SparseRows(use.partition, use.shapes["weight"], ids, padded, None)}


def _bags(input: Tensor, offsets: Tensor | None, include_last_offset: bool) -> Tensor:
    """Return the number of the bag of each looked-up row: the row of the input, or the bag given by
    the offsets.
    """
    if offsets is None:
        return torch.arange(input.shape[0], device=input.device).repeat_interleave(input.shape[1])
    if include_last_offset:
        starts, ends = offsets[:-1], offsets[1:]
    else:
        starts, ends = offsets, torch.cat([offsets[1:], offsets.new_tensor([len(input)])])
    bags = torch.arange(len(starts), device=input.device)
    return bags.repeat_interleave(ends - starts, output_size=len(input))


def _is_largest(values: Tensor, bag: Tensor, bags: int) -> Tensor:
    """Return where the largest value of each feature in each bag is. A tie goes to the first."""
    n, places = len(values), bag.unsqueeze(1).expand_as(values)
    lowest = values.new_full((bags, values.shape[1]), -torch.inf)
    best = lowest.scatter_reduce(0, places, values, "amax")
    order = torch.arange(n, device=bag.device).unsqueeze(1).expand_as(values)
    order = order.masked_fill(values != best[bag], n)
    first = torch.full_like(best, n, dtype=torch.long).scatter_reduce(0, places, order, "amin")
    return order == first[bag]
