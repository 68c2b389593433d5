"""Shapes and options drawn by hypothesis, against one sample at a time."""

from __future__ import annotations

import copy

import hypothesis.strategies as st
import torch
from hypothesis import HealthCheck, given, settings
from torch import nn

import varreg
from tests.support.measured import assert_moments
from tests.support.model_table import Fn
from tests.support.truth import losses, one_at_a_time, sample_weights

drawn = settings(
    max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
small = st.integers(1, 3)
batches = st.integers(1, 5)


def check(model: nn.Module, x: torch.Tensor) -> None:
    model = model.double()
    w = sample_weights(len(x))
    g = one_at_a_time(copy.deepcopy(model), (x,), w)
    with varreg.observe(model):
        losses(model(x), w).mean().backward()
        assert_moments(model, g)


@drawn
@given(
    batch=batches,
    inner=st.lists(small, max_size=3),
    inputs=small,
    outputs=small,
    bias=st.booleans(),
)
def test_linear(batch, inner, inputs, outputs, bias):
    check(nn.Linear(inputs, outputs, bias=bias), torch.randn(batch, *inner, inputs))


@st.composite
def convolutions(draw):
    d = draw(st.integers(1, 3))
    groups = draw(small)
    options = {
        "kernel_size": tuple(draw(st.lists(small, min_size=d, max_size=d))),
        "dilation": tuple(draw(st.lists(st.integers(1, 2), min_size=d, max_size=d))),
        "groups": groups,
        "bias": draw(st.booleans()),
    }
    space = draw(st.lists(st.integers(5, 8), min_size=d, max_size=d))
    return d, groups * draw(small), groups * draw(small), options, space


@drawn
@given(batch=batches, conv=convolutions(), data=st.data())
def test_conv(batch, conv, data):
    d, inputs, outputs, options, space = conv
    padding = data.draw(st.sampled_from(["same", "valid", "numbers"]))
    options["stride"] = (
        1 if padding == "same" else tuple(data.draw(st.lists(small, min_size=d, max_size=d)))
    )
    options["padding"] = (
        tuple(data.draw(st.lists(st.integers(0, 2), min_size=d, max_size=d)))
        if padding == "numbers"
        else padding
    )
    options["padding_mode"] = data.draw(
        st.sampled_from(["zeros", "reflect", "replicate", "circular"])
    )
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[d - 1](inputs, outputs, **options)
    check(layer, torch.randn(batch, inputs, *space))


@drawn
@given(batch=batches, conv=convolutions(), data=st.data())
def test_conv_transpose(batch, conv, data):
    d, inputs, outputs, options, space = conv
    options["stride"] = stride = tuple(data.draw(st.lists(small, min_size=d, max_size=d)))
    options["padding"] = tuple(data.draw(st.lists(st.integers(0, 1), min_size=d, max_size=d)))
    options["output_padding"] = tuple(
        data.draw(st.integers(0, max(s, t) - 1))
        for s, t in zip(stride, options["dilation"], strict=True)
    )
    layer = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[d - 1](
        inputs, outputs, **options
    )
    check(layer, torch.randn(batch, inputs, *space))


@drawn
@given(
    batch=batches,
    shape=st.lists(small, min_size=1, max_size=2),
    rows=st.integers(2, 6),
    width=small,
    padding=st.integers(-2, 1),
)
def test_embedding(batch, shape, rows, width, padding):
    layer = nn.Embedding(rows, width, padding_idx=None if padding == -2 else padding)
    check(layer, torch.randint(0, rows, (batch, *shape)))


@drawn
@given(
    batch=batches,
    length=st.integers(1, 4),
    layers=small,
    bidirectional=st.booleans(),
    bias=st.booleans(),
    batch_first=st.booleans(),
    kind=st.sampled_from([nn.RNN, nn.GRU, nn.LSTM]),
)
def test_recurrent(batch, length, layers, bidirectional, bias, batch_first, kind):
    layer = kind(2, 3, layers, bias=bias, batch_first=batch_first, bidirectional=bidirectional)
    swap = (lambda t: t) if batch_first else (lambda t: t.transpose(0, 1))
    check(Fn(lambda s, x: swap(s.layer(swap(x))[0]), layer=layer), torch.randn(batch, length, 2))


@drawn
@given(
    batch=batches,
    length=st.integers(1, 5),
    heads=small,
    width=small,
    batch_first=st.booleans(),
    bias=st.booleans(),
    weights=st.booleans(),
)
def test_attention(batch, length, heads, width, batch_first, bias, weights):
    layer = nn.MultiheadAttention(heads * width, heads, bias=bias, batch_first=batch_first)
    swap = (lambda t: t) if batch_first else (lambda t: t.transpose(0, 1))
    check(
        Fn(
            lambda s, x: swap(s.layer(swap(x), swap(x), swap(x), need_weights=weights)[0]),
            layer=layer,
        ),
        torch.randn(batch, length, heads * width),
    )


@drawn
@given(
    batch=st.integers(2, 5),
    outer=small,
    inner=small,
    features=small,
    order=st.permutations(range(4)),
)
def test_any_folding_of_the_batch(batch, outer, inner, features, order):
    """Permute, flatten three dimensions into rows, and back: the rows of a sample are found
    wherever they are.
    """
    order = list(order)

    def run(s, x):
        y = x.permute(*order)
        shape = y.shape
        y = y.reshape(-1, shape[-1])
        y = torch.tanh(s.layer(y)).view(*shape[:-1], 2)
        back = [order.index(i) for i in range(4)]
        return y.movedim(order.index(0), 0) if order[-1] != 0 else y.permute(*back)

    x = torch.randn(batch, outer, inner, features)
    if order[-1] == 0:
        return  # the batch would be the features: not a model of samples
    check(Fn(run, layer=nn.Linear(x.shape[order[-1]], 2)), x)
