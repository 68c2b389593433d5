"""Packed sequences: exact for every recurrent layer, in any order of lengths; or refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import varreg
from tests.properties.adversarial import Inputs
from tests.support.judge import Case, judge
from tests.support.model_table import Fn, weight
from tests.support.truth import losses, sample_weights

TIME, FEATURES = 5, 3
LENGTHS = {4: [2, 5, 1, 3], 3: [3, 1, 3], 2: [1, 4], 1: [3]}


def batch_of(batch: int, sort: bool = False, alike: bool = False) -> Inputs:
    """Return padded sequences and their lengths."""
    lengths = (
        [3] * batch if alike else sorted(LENGTHS[batch], reverse=True) if sort else LENGTHS[batch]
    )
    return torch.randn(batch, TIME, FEATURES), torch.tensor(lengths)


def packed(
    s: Any,
    x: Tensor,
    lengths: Tensor,
    *,
    sort: bool = False,
    first: bool = True,
    total: int | None = TIME,
    states: Any = None,
) -> tuple[Tensor, ...]:
    """Return outputs and last states, with the batch in front."""
    x = x if first else x.transpose(0, 1)
    pack = pack_padded_sequence(x, lengths, batch_first=first, enforce_sorted=sort)
    y, h = s.rnn(pack) if states is None else s.rnn(pack, states)
    y, _ = pad_packed_sequence(y, batch_first=first, total_length=total)
    ends = [t.transpose(0, 1) for t in (h if isinstance(h, tuple) else (h,))]
    return (y if first else y.transpose(0, 1), *ends)


def case(
    forward: Callable[..., Any],
    layer: Callable[[], nn.Module],
    inputs: Callable[[int], Inputs] = batch_of,
    expect: str = "exact",
    **options: Any,
) -> Case:
    def make() -> nn.Module:
        return Fn(
            forward,
            rnn=layer(),
            fc=nn.Linear(FEATURES, FEATURES),
            out=nn.Linear(4, 2),
            h=weight(1, 1, 4),
        )

    return Case("packed", "packed", make, inputs, expect, **options)


def exactly(case: Case, batch: int) -> None:
    outcome = judge(case, batch)
    assert outcome.kind == "exact", str(outcome)


def layer_of(kind: type[nn.RNNBase], **options: Any) -> Callable[[], nn.Module]:
    return lambda: kind(FEATURES, 4, **{"batch_first": True, **options})


LAYERS = {
    "rnn": layer_of(nn.RNN),
    "rnn-relu": layer_of(nn.RNN, nonlinearity="relu"),
    "gru": layer_of(nn.GRU),
    "lstm": layer_of(nn.LSTM),
    "rnn-both-ways": layer_of(nn.RNN, bidirectional=True),
    "gru-both-ways": layer_of(nn.GRU, bidirectional=True, bias=False),
    "lstm-both-ways": layer_of(nn.LSTM, bidirectional=True),
    "rnn-two-layers": layer_of(nn.RNN, num_layers=2),
    "gru-two-layers-both-ways": layer_of(nn.GRU, num_layers=2, bidirectional=True),
    "lstm-three-layers": layer_of(nn.LSTM, num_layers=3, bias=False),
    "lstm-projected": layer_of(nn.LSTM, proj_size=2),
    "lstm-projected-both-ways-two-layers": layer_of(
        nn.LSTM, proj_size=2, num_layers=2, bidirectional=True
    ),
    "lstm-projected-without-biases": layer_of(nn.LSTM, proj_size=2, bias=False),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("batch", [4, 3, 1])
@pytest.mark.parametrize("sort", [False, True], ids=["any-order", "sorted"])
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer(name, sort, batch):
    forward = lambda s, x, lengths: packed(s, x, lengths, sort=sort)
    exactly(case(forward, LAYERS[name], lambda b: batch_of(b, sort)), batch)


@pytest.mark.parametrize("name", LAYERS)
def test_time_first(name):
    def make() -> nn.Module:
        layer = LAYERS[name]()
        layer.batch_first = False
        return layer

    for sort in (False, True):
        forward = lambda s, x, n, sort=sort: packed(s, x, n, sort=sort, first=False)
        exactly(case(forward, make, lambda b, sort=sort: batch_of(b, sort)), 4)


@pytest.mark.parametrize("sort", [False, True])
@pytest.mark.parametrize("batch", [4, 1])
def test_all_of_one_length(batch, sort):
    forward = lambda s, x, n: packed(s, x, n, sort=sort)
    exactly(
        case(forward, layer_of(nn.LSTM, bidirectional=True), lambda b: batch_of(b, alike=True)),
        batch,
    )


@pytest.mark.parametrize("sort", [False, True])
@pytest.mark.parametrize("batch", [4, 3, 1])
def test_padded_to_the_longest(batch, sort):
    """A sample alone would be padded to its own length; so each loss is taken on the graph
    of all.
    """

    def forward(s: Any, x: Tensor, n: Tensor) -> tuple[Tensor, ...]:
        y, h = packed(s, s.fc(x), n, sort=sort, total=None)
        return s.out(y), h

    exactly(case(forward, layer_of(nn.GRU), lambda b: batch_of(b, sort), truth="graph"), batch)


def test_a_mean_over_the_longest_length_is_refused():
    """Here the padding of one sample does depend on another's length."""
    forward = lambda s, x, n: packed(s, x, n, total=None)[0].mean(1)
    assert judge(case(forward, LAYERS["gru"], expect="refused"), 4).kind == "refused"


def by_list(s: Any, x: Tensor, lengths: Tensor) -> Any:
    return packed(s, s.fc(x), lengths.tolist())


def by_mask(s: Any, x: Tensor, lengths: Tensor) -> Any:
    mask = torch.arange(TIME) < lengths[:, None]
    return packed(s, s.fc(x) * mask[..., None], mask.sum(1))


def sorted_by_hand(s: Any, x: Tensor, lengths: Tensor) -> Any:
    lengths, order = lengths.sort(descending=True)
    outs = packed(s, s.fc(x)[order], lengths, sort=True)
    back = order.argsort()
    return tuple(t[back] for t in outs)


def last_of_each(s: Any, x: Tensor, lengths: Tensor) -> Any:
    y, _ = packed(s, x, lengths)
    return s.out(y.gather(1, (lengths - 1).view(-1, 1, 1).expand(-1, 1, y.shape[2])).squeeze(1))


def layer_on_rows(s: Any, x: Tensor, lengths: Tensor) -> Any:
    pack = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    y, h = s.rnn(pack._replace(data=s.fc(pack.data).tanh()))
    y, n = pad_packed_sequence(y._replace(data=s.out(y.data)), batch_first=True, total_length=TIME)
    return y / n[:, None, None], h[0]


def decoder(s: Any, x: Tensor, lengths: Tensor) -> Any:
    """States of the whole sequences begin the next run."""
    _, h = packed(s, x, lengths)
    return packed(s, x.sin(), lengths, states=h.transpose(0, 1).tanh())


def used_twice(s: Any, x: Tensor, lengths: Tensor) -> Any:
    (y, h), (z, _) = packed(s, x, lengths), packed(s, x.flip(2), lengths.flip(0).flip(0))
    return y * z, h


FORWARDS = [by_list, by_mask, last_of_each, layer_on_rows, decoder, used_twice, sorted_by_hand]


@pytest.mark.parametrize("batch", [4, 1])
@pytest.mark.parametrize("forward", FORWARDS, ids=lambda f: f.__name__)
def test_in_many_ways(forward, batch):
    exactly(case(forward, LAYERS["gru"]), batch)


@pytest.mark.parametrize("sort", [False, True])
@pytest.mark.parametrize("batch", [4, 1])
def test_a_state_that_is_learned(batch, sort):
    """One for all samples; put in the order of their lengths if need be."""

    def forward(s: Any, x: Tensor, lengths: Tensor) -> Any:
        return packed(s, x, lengths, sort=sort, states=s.h.expand(1, len(x), 4).contiguous())

    exactly(case(forward, LAYERS["gru"], lambda b: batch_of(b, sort)), batch)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("batch", [4, 1])
def test_in_a_checkpoint(batch, reentrant):
    def forward(s: Any, x: Tensor, lengths: Tensor) -> Tensor:
        def block(h: Tensor, lengths: Tensor) -> Tensor:
            return packed(s, h.sin(), lengths)[0] @ s.h[0].mT

        return checkpoint(block, s.fc(x), lengths, use_reentrant=reentrant)

    exactly(case(forward, LAYERS["lstm"]), batch)


def test_a_row_that_the_whole_batch_chooses_is_refused():
    """The largest value of all samples picks the same row of a parameter for all."""

    def forward(s: Any, x: Tensor, lengths: Tensor) -> Tensor:
        return s.fc(x) * s.fc.weight[x.amax((1, 2)).argmax() % 3]

    assert judge(case(forward, LAYERS["gru"], expect="refused"), 4).kind == "refused"


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("batch", [4, 1])
def test_a_list_of_sequences(batch, order):
    """`pack_sequence` of a batch that is taken apart: each sample has a length of its own."""

    def forward(s: Any, x: Tensor) -> tuple[Tensor, ...]:
        sequences = [v[: 5 - i if order else 1 + 2 * i % 5] for i, v in enumerate(s.fc(x))]
        y, h = s.rnn(pack_sequence(sequences, enforce_sorted=order))
        return pad_packed_sequence(y, batch_first=True, total_length=TIME)[0], h[0]

    inputs = lambda b: (torch.randn(b, TIME, FEATURES),)
    exactly(case(forward, LAYERS["gru"], inputs, truth="graph"), batch)


@pytest.mark.parametrize("batch", [4, 3, 1])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_dropout_between_layers(kind, batch):
    """Each sample's loss, differentiated on one graph, is the truth where numbers are random."""

    def call(model: nn.Module, *inputs: Any) -> Any:
        torch.default_generator.manual_seed(2)
        return model(*inputs)

    layer = layer_of(kind, num_layers=3, dropout=0.5, bidirectional=True)
    exactly(case(packed, layer, truth="graph", call=call), batch)


def test_frozen_layers_are_followed():
    """A frozen recurrent layer passes samples on to layers that are not."""

    def forward(s: Any, x: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        s.rnn.requires_grad_(False)
        y, h = packed(s, s.fc(x), lengths)
        return s.out(y), h

    exactly(case(forward, LAYERS["gru"]), 4)


@pytest.mark.parametrize(
    "forward",
    [
        lambda s, x, n: packed(s, x, n.max().expand(len(x))),
        lambda s, x, n: packed(
            s, x.transpose(0, 1), n.max().clamp(max=1).expand(TIME), total=len(x)
        )[0].transpose(0, 1),
        lambda s, x, n: packed(s, x, n.flip(0)),
        lambda s, x, n: (
            packed(s, x, n)[0]
            / s.rnn(pack_padded_sequence(x, n, True, False))[0].batch_sizes[0:1].float().exp()
        ),
    ],
    ids=["longest-for-all", "time-for-batch", "lengths-of-others", "sizes-as-values"],
)
def test_samples_that_meet_are_refused(forward):
    outcome = judge(case(forward, LAYERS["gru"], expect="refused"), 4)
    assert outcome.kind == "refused", str(outcome)


class Unpacked(nn.Module):
    """Takes a `PackedSequence`; and, where asked, another input beside it."""

    def __init__(self, layer: Callable[[], nn.Module]):
        super().__init__()
        self.rnn, self.out = layer(), nn.Linear(FEATURES, 4)

    def forward(self, pack: Any, other: Tensor | None = None) -> tuple[Tensor, ...]:
        y, h = self.rnn(pack)
        y, n = pad_packed_sequence(y, batch_first=True, total_length=TIME)
        ends = [t.transpose(0, 1) for t in (h if isinstance(h, tuple) else (h,))]
        return (y / n[:, None, None] + (0 if other is None else self.out(other)), *ends)


@pytest.mark.parametrize("batch", [4, 3, 1])
@pytest.mark.parametrize("sort", [False, True])
@pytest.mark.parametrize("name", ["gru", "lstm-both-ways"])
def test_a_packed_sequence_as_an_input(name, sort, batch):
    layer = (lambda: nn.GRU(FEATURES, 4)) if name == "gru" else LAYERS[name]
    both = name == "gru"

    def call(model: nn.Module, x: Tensor, lengths: Tensor) -> Any:
        pack = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=sort)
        return model(pack, x) if both else model(pack=pack)

    exactly(
        Case(
            "input",
            "packed",
            lambda: Unpacked(layer),
            lambda b: batch_of(b, sort),
            "exact",
            call=call,
        ),
        batch,
    )


def test_packed_outputs_are_refused():
    """Their rows are in no order that a loss could know."""
    torch.manual_seed(0)
    model = nn.GRU(FEATURES, 4)
    pack = pack_padded_sequence(*batch_of(4), batch_first=True, enforce_sorted=False)
    with varreg.observe(model):
        y, h = model(pack)
        with pytest.raises(RuntimeError, match=r"varreg: .*another order"):
            (y.data.square().sum() + h.sum()).backward()


def test_autocast_and_groups():
    torch.manual_seed(0)
    model = Fn(packed, rnn=layer_of(nn.LSTM)())
    x, lengths = batch_of(4)
    with varreg.observe(model, groups=2):
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(x, lengths)
        losses(tuple(t.float() for t in outputs), sample_weights(4).float()).mean().backward()
        for p in model.parameters():
            size = float(p.grad.abs().max())
            torch.testing.assert_close(varreg.moments(p).mean, p.grad, rtol=0.05, atol=0.02 * size)


def test_lengths_that_change_from_step_to_step():
    """Nothing of one step's lengths is left in the next one."""
    torch.manual_seed(0)
    model = Fn(packed, rnn=layer_of(nn.GRU, bidirectional=True)()).double()
    x = batch_of(3)[0].double()
    with varreg.observe(model):
        for lengths in itertools.permutations([1, 3, 5]):
            model.zero_grad()
            losses(model(x, torch.tensor(lengths)), sample_weights(3)).mean().backward()
            for p in model.parameters():
                torch.testing.assert_close(varreg.moments(p).mean, p.grad, rtol=1e-9, atol=1e-12)
