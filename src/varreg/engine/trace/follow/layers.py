"""Functions that layers call: they keep the dimensions in front of the features."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from varreg.engine.trace.call import Call
from varreg.engine.trace.follow.known import (
    Destination,
    Gone,
    agreed,
    follow_elements,
    follows,
    guess,
    mixing,
)
from varreg.engine.trace.follow.moves import follow_numbers
from varreg.engine.trace.functions import named
from varreg.engine.trace.layout import (
    NOBODY,
    Layout,
    Place,
    Ragged,
    Single,
    numbers,
    owners_of,
    place_of,
)
from varreg.engine.trace.packed import (
    PACK,
    PAD,
    PAD_LIST,
    is_packed,
    order_of,
    place_along,
    place_packed,
)


def _kept(call: Call, out: Tensor, features: int) -> Destination:
    """Return the place of the first argument for `out`, if only this argument carries the batch,
    and in a dimension before the last `features` ones.
    """
    x = call.argument(0, "input")
    if len(call.carriers) != 1 or call.carriers[0][0] is not x:
        return guess(call.carriers, out)
    at = call.carriers[0][1]
    if isinstance(at, Single):
        return at
    return at if at.dim < x.dim() - features else guess(call.carriers, out)


@follows(F.linear)
def _linear(call: Call, out: Tensor, which: int) -> Destination:
    return _kept(call, out, 1)


@follows(F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm)
def _norm(call: Call, out: Tensor, which: int) -> Destination:
    shape = call.argument(1, "normalized_shape")
    return _kept(call, out, 1 if isinstance(shape, int) else len(shape))


_CONVOLUTIONS = [f"conv{t}{n}d" for t in ("", "_transpose") for n in (1, 2, 3)]


@follows(*named(*_CONVOLUTIONS))
def _conv(call: Call, out: Tensor, which: int) -> Destination:
    x, weight = call.argument(0, "input"), call.argument(1, "weight")
    return _kept(call, out, x.dim() - (1 if x.dim() == weight.dim() else 0))


_POOLS = {
    f: n
    for n in (1, 2, 3)
    for f in named(
        *(
            f"{adaptive}{kind}_pool{n}d"
            for adaptive in ("", "adaptive_")
            for kind in ("max", "avg")
        ),
        *(f"max_pool{n}d_with_indices", f"lp_pool{n}d"),
    )
}


@follows(*_POOLS)
def _pool(call: Call, out: Tensor, which: int) -> Destination:
    """Place the output of a function of images `[batch, channels, …]`; an image without a batch has
    one dimension less.
    """
    x = call.argument(0, "input")
    return _kept(call, out, x.dim() - (1 if x.dim() == _POOLS[call.function] + 2 else 0))


@follows(F.interpolate, *named("pixel_shuffle", "pixel_unshuffle"))
def _images(call: Call, out: Tensor, which: int) -> Destination:
    return _kept(call, out, min(call.argument(0, "input").dim(), out.dim()) - 1)


@follows(F.pad)
def _pad(call: Call, out: Tensor, which: int) -> Destination:
    """Place the output of padding. Its argument has a pair of numbers for each padded dimension,
    from the last one on.
    """
    pairs = call.argument(1, "pad")
    return (
        _kept(call, out, len(pairs) // 2)
        if isinstance(pairs, (list, tuple))
        else guess(call.carriers, out)
    )


@follows(F.group_norm, torch.group_norm)
def _group_norm(call: Call, out: Tensor, which: int) -> Destination:
    return _kept(call, out, call.argument(0, "input").dim() - 1)


@follows(F.scaled_dot_product_attention)
def _attention(call: Call, out: Tensor, which: int) -> Destination:
    if any(not isinstance(at, Single) and at.dim >= x.dim() - 2 for x, at in call.carriers):
        return guess(call.carriers, out)
    return follow_elements(call, out, which)


@follows(torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
def _recurrent(call: Call, out: Tensor, which: int) -> Destination:
    """Place outputs: the sequence keeps its order; states are `[layers, batch, features]`."""
    if is_packed(call.function, call.args):
        return place_packed(call.args, call.carriers, which) or mixing(call)
    batch_first = len(call.args) > 8 and call.args[8]

    def place(x: Tensor, at: Place) -> Place | None:
        if isinstance(at, Single):
            return at
        expected = 0 if x is call.args[0] and batch_first else 1
        moved = at._replace(dim=0 if which == 0 and batch_first else 1)
        return moved if at.dim == expected else None

    destination = agreed(call, (place(x, at) for x, at in call.carriers))
    return guess(call.carriers, out) if isinstance(destination, Gone) else destination


@follows(PACK)
def _pack(call: Call, out: Tensor, which: int) -> Destination:
    """Place packed rows: the lengths decide where they go. Each sample's length must depend on that
    sample only.
    """
    carriers = {id(x): at for x, at in call.carriers}
    x, lengths = call.args[:2]
    if which or id(x) not in carriers:
        return Gone(is_linear=False)
    at, lengths_at = carriers[id(x)], carriers.get(id(lengths))
    if isinstance(at, Single) or isinstance(lengths_at, Single):
        return mixing(call)
    if lengths_at is not None and not torch.equal(owners_of(at), owners_of(lengths_at)):
        return mixing(call)
    return follow_numbers(call, [x], carriers, out, which)


@follows(PAD)
def _pad_packed(call: Call, out: Tensor, which: int) -> Destination:
    """Place unpacked rows: they return to their sequences, and the padding belongs to no sample.
    Lengths are sorted from the longest to the shortest.
    """
    (data, at), sizes = call.carriers[0], call.args[1]
    if isinstance(at, Single) or (order := order_of(at, sizes)) is None:
        return mixing(call)
    if which:
        return place_along(order, at.batch, 0)
    args = [*call.args[:3], NOBODY, *call.args[4:]]
    shown = call.with_arguments(args, call.kwargs, call.carriers)
    return follow_numbers(shown, [data], {id(data): at}, out, which)


@follows(PAD_LIST)
def _pad_list(call: Call, out: Tensor, which: int) -> Destination:
    """Place padded sequences: the padding behind the shorter ones belongs to no sample."""
    if len(call.args) < 3:
        return guess(call.carriers, out)
    args = [*call.args[:2], NOBODY, *call.args[3:]]
    shown = call.with_arguments(args, call.kwargs, call.carriers)
    carriers = {id(x): at for x, at in call.carriers}
    return follow_numbers(shown, list(call.args[0]), carriers, out, which)


@follows(F.embedding, torch.embedding)
def _lookup(call: Call, out: Tensor, which: int) -> Destination:
    """Place the output: the indices' dimensions, then the features."""
    ids = call.argument(0 if call.function is F.embedding else 1, "input")
    if len(call.carriers) == 1 and call.carriers[0][0] is ids:
        return call.carriers[0][1]
    return guess(call.carriers, out)


@follows(F.embedding_bag)
def _bags(call: Call, out: Tensor, which: int) -> Destination:
    """Place bags. Without offsets, each row is a bag. With offsets, a bag belongs to the sample of
    all its rows. If the model's input is one long list of rows, each bag is a sample. Weights of
    rows must belong to the same samples as the rows.
    """
    ids, at = call.args[0], call.carriers[0][1]
    weights = call.argument(8, "per_sample_weights")
    if len({place for t, place in call.carriers if t is ids or t is weights}) > 1:
        return mixing(call)
    if isinstance(at, Single) or (ids.dim() == 2 and at.dim == 0 and call.carriers[0][0] is ids):
        return at
    offsets = call.argument(2, "offsets")
    carriers = {id(x): place for x, place in call.carriers}
    place = carriers.get(id(ids))
    if not isinstance(offsets, Tensor) or not isinstance(place, Layout | Ragged):
        return guess(call.carriers, out)
    if place == Layout(len(ids)) and len(ids) != len(out):
        return Layout(len(out))
    call.key = None  # values of the offsets decide the owners of bags: no plan is valid
    ends = torch.cat([offsets[1:].cpu(), torch.tensor([len(ids)], device="cpu")])
    bag = torch.arange(len(offsets), device="cpu").repeat_interleave(ends - offsets.cpu())[
        : len(ids)
    ]
    owners = numbers(ids, place).cpu()
    first = torch.full((len(out),), NOBODY, dtype=owners.dtype, device="cpu").index_copy(
        0, bag, owners
    )
    if not torch.equal(first[bag], owners):
        return mixing(call)
    return place_of(first, place.batch) or mixing(call)
