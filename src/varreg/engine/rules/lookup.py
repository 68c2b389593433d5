"""Embeddings: a sample contributes to the rows that it looked up."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from varreg import native
from varreg.engine.contribution import Contribution, Partition, stat_dtype
from varreg.engine.layout import Single, samples
from varreg.engine.rules.rule import Call, Contributions, rule


class SparseRows(Contribution):
    """A lookup: the rows `ids [b, r]` of a table receive `dy [b, r, features]`, but for the row `skip`.

    Only the rows that a group looked up are not zero, so only these are squared.
    """

    def __init__(self, partition: Partition, shape: torch.Size, ids: Tensor, dy: Tensor, skip: int | None):
        super().__init__(partition, shape)
        self.ids, self._dy, self._skip = ids, dy, None if skip is None else skip % shape[0]

    @functools.cached_property
    def dy(self) -> Tensor:
        """Zero where the row is skipped."""
        return self._dy if self._skip is None else self._dy.masked_fill((self.ids == self._skip).unsqueeze(-1), 0)

    def groups(self, first: int, last: int, start: int, n: int) -> Tensor:
        part = slice(start, start + (last - first) * n)
        group = torch.arange(last - first, device=self.ids.device).repeat_interleave(n)
        flat = (self.ids[part] + (group * self.shape[0]).unsqueeze(1)).flatten()
        out = self.dy.new_zeros((last - first) * self.shape[0], self.shape[1])
        return out.index_add_(0, flat, self.dy[part].flatten(0, 1)).view(last - first, *self.shape)

    def sums(self) -> tuple[Tensor | None, Tensor | None]:
        if not self.partition.batch:
            return None, None
        if found := native.reduce.lookup(self.ids, self._dy, self.shape, self.partition.groups, self._skip):
            return found
        vocabulary, features = self.shape
        dtype = stat_dtype(self.dy.dtype)
        sizes = [n for first, last, _, n in self.partition.runs() for _ in range(last - first)]
        n = torch.tensor(sizes, device=self.ids.device)
        group = torch.arange(len(sizes), device=self.ids.device).repeat_interleave(n)
        flat = (self.ids + (group * vocabulary).unsqueeze(1)).flatten()
        keys, where = torch.unique(flat, return_inverse=True)  # (group, row) pairs that occur
        c = self.dy.new_zeros(len(keys), features, dtype=dtype).index_add_(0, where, self.dy.flatten(0, 1).to(dtype))
        row = keys % vocabulary
        total = c.new_zeros(self.shape).index_add_(0, row, c)
        square = c.new_zeros(self.shape).index_add_(0, row, c.square_() / n[keys // vocabulary].unsqueeze(1))
        return total, square

    def total(self) -> Tensor | None:
        if self.partition.batch and (found := native.reduce.lookup(self.ids, self._dy, self.shape, 1, self._skip, squares=False)):
            return found[0]
        zeros = self.dy.new_zeros(self.shape)
        return zeros.index_add_(0, self.ids.flatten(), self.dy.flatten(0, 1))


@rule(F.embedding, serves="weight", saves="input")
def embedding(
    call: Call,
    grads: list[Tensor],
    input: Tensor,
    weight: None,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Contributions:
    if sparse or scale_grad_by_freq:
        which = "sparse=True" if sparse else "scale_grad_by_freq=True"
        raise ValueError(f"varreg: an embedding with {which} is not supported; set it to False.")
    at = call.layouts["input"]
    ids = samples(input, at).reshape(at.batch, -1)
    return {"weight": SparseRows(call.partition, call.shapes["weight"], ids, call.rows(grads[0]), padding_idx)}


def _rows_are_bags(call: Call) -> bool:
    return not isinstance(call.out, Single) and call.out.dim == 0


@rule(
    F.embedding_bag,
    saves="input offsets per_sample_weights weight",
    serves="weight",
    carries="input offsets per_sample_weights",
    when=_rows_are_bags,
)
def embedding_bag(
    call: Call,
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
    """A bag is a sample. Bags of different lengths are padded to one rectangle with a row that is then skipped."""
    if sparse or scale_grad_by_freq:
        which = "sparse=True" if sparse else "scale_grad_by_freq=True"
        raise ValueError(f"varreg: an embedding bag with {which} is not supported; set it to False.")
    dy, vocabulary = grads[0], call.shapes["weight"][0]
    flat = input.flatten()
    if offsets is None:
        bag = torch.arange(input.shape[0], device=input.device).repeat_interleave(input.shape[1])
    else:
        ends = offsets[1:] if include_last_offset else torch.cat([offsets[1:], offsets.new_tensor([len(flat)])])
        starts = offsets[:-1] if include_last_offset else offsets
        bag = torch.arange(len(starts), device=input.device).repeat_interleave(ends - starts)
    keep = flat != padding_idx % vocabulary if padding_idx is not None else torch.ones_like(flat, dtype=torch.bool)
    share = dy[bag]  # what each looked-up row receives
    if mode == "mean":
        n = torch.zeros(len(dy), dtype=dy.dtype, device=dy.device).index_add_(0, bag, keep.to(dy.dtype))
        share = share / n.clamp(min=1)[bag].unsqueeze(1)
    elif mode == "max":
        values = weight[flat].masked_fill(~keep.unsqueeze(1), -torch.inf)
        best = torch.full_like(dy, -torch.inf, dtype=values.dtype).scatter_reduce(
            0, bag.unsqueeze(1).expand_as(values), values, "amax"
        )
        hit = values == best[bag]
        order = torch.arange(len(flat), device=flat.device).unsqueeze(1).expand_as(hit).masked_fill(~hit, len(flat))
        first = torch.full_like(best, len(flat), dtype=torch.long).scatter_reduce(
            0, bag.unsqueeze(1).expand_as(order), order, "amin"
        )
        share = share * (order == first[bag]).to(dy.dtype)  # a tie goes to the first
    elif per_sample_weights is not None:
        share = share * per_sample_weights.flatten().unsqueeze(1)
    share = share.masked_fill(~keep.unsqueeze(1), 0)
    out: Contributions = {}
    if "weight" in call.wants:
        position = torch.arange(len(flat), device=flat.device) - torch.searchsorted(bag, bag)
        longest = int(position.max()) + 1 if len(flat) else 0
        ids = flat.new_zeros(len(dy), longest).index_put((bag, position), flat)
        padded = share.new_zeros(len(dy), longest, share.shape[1]).index_put((bag, position), share)
        ids, padded = samples(ids, call.out).reshape(call.out.batch, -1), call.rows(padded)
        out["weight"] = SparseRows(call.partition, call.shapes["weight"], ids, padded, None)
    return out
