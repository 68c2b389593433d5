"""S and W from tiles in registers, against the definition; and that PyTorch's twin takes over where
there is no compiler.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import varreg
from tests.support.model_table import Fn
from varreg import native
from varreg.engine.contribution import Outer, Partition
from varreg.native import layer_sums, library

needs_compiler = pytest.mark.skipif(
    native.status() != "in use", reason=f"native kernel: {native.status()}"
)
CLOSE = {torch.float32: {"rtol": 2e-4, "atol": 2e-4}, torch.float64: {"rtol": 1e-11, "atol": 1e-11}}


def both_sums(c, groups):
    """S and W of contributions `[b, …]`, by definition."""
    parts = [
        c[start : start + n * (last - first)].unflatten(0, (last - first, n)).sum(1)
        for first, last, start, n in runs(c, groups)
    ]
    sizes = torch.cat([torch.full((last - first,), n) for first, last, _, n in runs(c, groups)])
    grouped = torch.cat(parts)
    return grouped.sum(0), (grouped.square() / sizes.view(-1, *(1,) * (c.dim() - 1))).sum(0)


def runs(c, groups):
    return list(Partition(len(c), groups).runs())


@needs_compiler
@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 9),
    st.integers(1, 20),
    st.integers(1, 40),
    st.integers(1, 70),
    st.integers(1, 9),
    st.integers(1, 3),
    st.sampled_from([torch.float32, torch.float64]),
    st.booleans(),
)
def test_a_matrix_product_of_any_size(b, r, o, i, groups, threads, dtype, crossed):
    torch.set_num_threads(threads)
    groups = min(b, groups)
    delta, a = torch.randn(b, r, o, dtype=dtype), torch.randn(b, i, r, dtype=dtype).mT
    a = a if crossed else a.contiguous()
    found = layer_sums.outer(delta, a, groups, bias=True)
    total, square = both_sums(torch.einsum("bro,bri->boi", delta, a), groups)
    torch.testing.assert_close(found.total, total, **CLOSE[dtype])
    torch.testing.assert_close(found.square, square, **CLOSE[dtype])
    torch.testing.assert_close(tuple(found.bias), both_sums(delta.sum(1), groups), **CLOSE[dtype])
    again = layer_sums.outer(delta, a, groups, bias=True, norms=True)
    assert_norms(again, found, torch.einsum("bro,bri->boi", delta, a), groups)


def assert_again(found):
    """The second S is the first one to the bit, in memory of its own."""
    assert torch.equal(found.again, found.total)
    assert found.again.data_ptr() != found.total.data_ptr()


def assert_norms(found, plain, c, groups):
    """|c_b|² as by definition, if each group has one sample, and the same sums beside it."""
    assert_again(found)
    assert_again(plain)
    for name in ("total", "square", "bias"):
        both = getattr(found, name), getattr(plain, name)
        torch.testing.assert_close(
            *both, rtol=1e-4 if c.dtype == torch.float32 else 1e-11, atol=1e-6
        )
    if groups != len(c):
        assert found.norms is None
        return
    norms = c.double().flatten(1).square().sum(1)
    tolerance = 1e-4 if c.dtype == torch.float32 else 1e-11
    torch.testing.assert_close(found.norms, norms, rtol=tolerance, atol=tolerance)


@needs_compiler
@pytest.mark.parametrize("at_once", [1, 1 << 10, 1 << 14])
def test_a_product_in_pieces(at_once, monkeypatch):
    """Packed a few groups at a time, with more products than one thread gets, and the last panel
    narrow.
    """
    monkeypatch.setattr(layer_sums, "PACKED", at_once)
    torch.set_num_threads(2)
    delta, a = torch.randn(11, 16, 50), torch.randn(11, 16, 75)
    for groups in (11, 4, 1):
        found = layer_sums.outer(delta, a, groups, bias=True)
        total, square = both_sums(torch.einsum("bro,bri->boi", delta, a), groups)
        torch.testing.assert_close(found.total, total, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(found.square, square, rtol=1e-11, atol=1e-11)
        again = layer_sums.outer(delta, a, groups, bias=True, norms=True)
        assert_norms(again, found, torch.einsum("bro,bri->boi", delta, a), groups)


@needs_compiler
@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 150),
    st.integers(1, 40),
    st.integers(1, 140),
    st.integers(1, 3),
    st.sampled_from([torch.float32, torch.float64]),
    st.booleans(),
    st.integers(1, 5),
    st.integers(1, 150),
)
def test_one_row_for_each_sample(b, o, i, threads, dtype, crossed, panels, groups):
    torch.set_num_threads(threads)
    delta, a = torch.randn(b, o, dtype=dtype), torch.randn(i, b, dtype=dtype).t()
    a = a if crossed else a.contiguous()
    with pytest.MonkeyPatch.context() as patch:  # few panels at a time, and threads for all sizes
        patch.setattr(layer_sums, "SHARED_ROWS", panels * b * layer_sums.PANEL)
        patch.setattr(layer_sums, "WORTH_THREADS_PRODUCTS", 0)
        S, W, again = layer_sums.single_rows(delta, a)
    total, square = both_sums(torch.einsum("bo,bi->boi", delta, a), b)
    torch.testing.assert_close(S, total, **CLOSE[dtype])
    torch.testing.assert_close(W, square, **CLOSE[dtype])
    assert torch.equal(again, S)
    assert again.data_ptr() != S.data_ptr()
    for groups in {b, 1, min(b, 8), min(b, 60)}:
        rows = delta.unsqueeze(1), a.unsqueeze(1)
        S, W, again, *bias = layer_sums.single_rows(*rows, bias=True, groups=groups)
        total, square = both_sums(torch.einsum("bo,bi->boi", delta, a), groups)
        torch.testing.assert_close(S, total, **CLOSE[dtype])
        torch.testing.assert_close(W, square, **CLOSE[dtype])
        assert torch.equal(again, S)
        torch.testing.assert_close(tuple(bias), both_sums(delta, groups), **CLOSE[dtype])
    assert b <= 65 or layer_sums.single_rows(delta, a, groups=65) is None


@needs_compiler
@pytest.mark.parametrize("b", [100, 1000, 3000])
def test_equal_rows_have_no_variance(b):
    delta, a = torch.randn(1, 7).float().expand(b, 7), torch.randn(1, 9).float().expand(b, 9)
    S, W, _ = layer_sums.single_rows(delta, a)
    assert (varreg.Moments(b, b, S, W).variance == 0).all()


@needs_compiler
def test_torch_does_not_copy_the_gradient_of_a_dense_layer(monkeypatch):
    kernel, places = native.single_rows, []

    def noted(*rows):
        sums = kernel(*rows)
        places.append(sums[2].data_ptr())
        return sums

    monkeypatch.setattr(native, "single_rows", noted)
    layer = nn.Linear(250, 64).double()
    varreg.observe(layer)
    x = torch.randn(8, 250)
    layer(x).square().sum().backward()
    assert layer.weight.grad.data_ptr() == places[0]
    delta = 2 * layer(x).detach()
    total, square = both_sums(torch.einsum("bo,bi->boi", delta, x), 8)
    torch.testing.assert_close(layer.weight.grad, total, **CLOSE[x.dtype])
    torch.testing.assert_close(varreg.moments(layer.weight).square, square, **CLOSE[x.dtype])
    layer.weight.grad.zero_()
    assert varreg.moments(layer.weight) is None


@needs_compiler
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lengths_of_many_tensors(threads, dtype):
    torch.set_num_threads(threads)
    tensors = [torch.randn(n, dtype=dtype) for n in (70_000, 1, 0, 5)]
    found = native.lengths(tensors)
    for t, (size, square) in zip(tensors, found, strict=True):
        assert size == pytest.approx(float(t.double().abs().sum()), rel=1e-6)
        assert square == pytest.approx(float(t.double().square().sum()), rel=1e-6)
    assert native.lengths([torch.randn(3, 4, dtype=dtype).t()]) is None


CONVOLUTIONS = {  # channels, height, width, features, kernel, stride, padding, dilation, parts
    "one channel": (1, 12, 11, 20, (5, 5), 1, 0, 1, 1),
    "three channels": (3, 9, 8, 6, (5, 5), 1, 2, 1, 1),
    "taps as they lie": (20, 8, 8, 50, (5, 5), 1, 0, 1, 1),
    "full vectors": (32, 6, 6, 32, (3, 3), 1, 1, 1, 1),
    "stride": (8, 11, 10, 13, (3, 2), (2, 3), (1, 2), 1, 1),
    "dilation": (5, 12, 11, 7, (3, 2), 1, (2, 1), (2, 3), 1),
    "dilation of lines": (5, 12, 11, 7, (3, 2), 1, (2, 1), (2, 1), 1),
    "one pixel": (40, 5, 5, 30, (1, 1), 2, 0, 1, 1),
    "lines left over": (4, 10, 9, 5, (2, 2), 3, 0, 1, 1),
    "more padding than image": (2, 3, 3, 4, (3, 3), 2, 4, 1, 1),
    "a few lines at a time": (48, 20, 19, 9, (3, 3), 1, 1, 1, 1),
    "a few whole lines at a time": (64, 19, 20, 13, (3, 3), 1, 0, 1, 1),
    "shared sums": (96, 4, 4, 120, (3, 3), 1, 1, 1, 1),
    "depthwise": (8, 9, 10, 8, (3, 3), 1, 1, 1, 8),
    "depthwise, multiplied, stride": (5, 9, 10, 15, (3, 2), (2, 3), (1, 4), (1, 2), 5),
    "depthwise, more padding than image": (2, 3, 3, 4, (3, 3), 2, 4, 1, 2),
    "two parts": (6, 9, 10, 8, (3, 3), 1, 1, 1, 2),
}


@needs_compiler
@pytest.mark.parametrize("order", ["contiguous", "channels last", "crossed"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution(name, order):
    channels, height, width, features, kernel, stride, padding, dilation, parts = CONVOLUTIONS[name]
    weight = torch.randn(features, channels // parts, *kernel)
    x = torch.randn(6, channels, height, width)
    dy = torch.randn_like(F.conv2d(x, weight, None, stride, padding, dilation, parts))
    c = torch.stack(
        [
            _gradient(weight, x[i : i + 1], dy[i : i + 1], stride, padding, dilation, parts)
            for i in range(6)
        ]
    )
    if order == "channels last":
        x, dy = (t.to(memory_format=torch.channels_last) for t in (x, dy))
    elif order == "crossed":
        x, dy = (t.mT.contiguous().mT for t in (x, dy))
    pairs = [v if isinstance(v, tuple) else (v, v) for v in (stride, padding, dilation)]
    for groups, threads, per in ((6, 1, 1), (6, 3, 1), (4, 2, 1), (1, 2, 1), (3, 2, 2), (2, 1, 2)):
        torch.set_num_threads(threads)
        found = layer_sums.conv(x, dy, kernel, *pairs, groups, per=per, parts=parts, bias=True)
        total, square = both_sums(c.unflatten(0, (-1, per)).sum(1), groups)
        torch.testing.assert_close(found.total, total, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(found.square, square, rtol=1e-11, atol=1e-11)
        biases = both_sums(dy.sum((2, 3)).unflatten(0, (-1, per)).sum(1), groups)
        torch.testing.assert_close(tuple(found.bias), biases, rtol=1e-11, atol=1e-11)
        if parts == channels > 1:  # depthwise: PyTorch computes them
            continue
        how = {"per": per, "parts": parts, "bias": True, "norms": True}
        again = layer_sums.conv(x, dy, kernel, *pairs, groups, **how)
        assert_norms(again, found, c.unflatten(0, (-1, per)).sum(1), groups)


def _gradient(weight, x, dy, *how):
    weight = weight.clone().requires_grad_()
    return torch.autograd.grad(F.conv2d(x, weight, None, *how), weight, dy)[0]


@needs_compiler
def test_what_it_leaves_to_pytorch():
    d, a = torch.randn(3, 4, 5), torch.randn(3, 4, 6)
    assert layer_sums.outer(d.bfloat16(), a.bfloat16(), 3) is None
    assert layer_sums.outer(d.float(), a, 3) is None
    assert layer_sums.outer(d[:0], a[:0], 0) is None
    assert layer_sums.outer(d[:, :0], a[:, :0], 3) is None
    assert (
        layer_sums.conv(
            torch.randn(2, 3, 4, 4, 4),
            torch.randn(2, 3, 2, 2, 2),
            (3, 3, 3),
            (1,) * 3,
            (0,) * 3,
            (1,) * 3,
            2,
        )
        is None
    )


@needs_compiler
def test_the_twin_has_the_same_numbers(monkeypatch):
    model = nn.Sequential(
        *(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, stride=2, groups=2),
            nn.Flatten(2),
        ),
        *(nn.Conv1d(8, 6, 3, dilation=2), nn.Linear(45, 7), nn.Flatten(), nn.Linear(42, 5)),
    )
    x = torch.randn(9, 3, 15, 15)
    found = {}
    for kernels in ("native", "PyTorch"):
        if kernels == "PyTorch":
            monkeypatch.setattr(library, "load", lambda: (None, "switched off"))
        for groups in (None, 4):
            with varreg.observe(model, groups=groups):
                model.zero_grad()
                model(x).square().mean().backward()
                found[kernels, groups] = [
                    (m.total, m.square) for m in map(varreg.moments, model.parameters())
                ]
    for groups in (None, 4):
        for ours, theirs in zip(found["native", groups], found["PyTorch", groups], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-14)


@needs_compiler
def test_per_sample_gradients_are_not_asked_for(monkeypatch):
    """The fast path is the default path."""

    def refuse(*_):
        raise AssertionError("the twin ran")

    monkeypatch.setattr(Outer, "groups", refuse)
    monkeypatch.setattr("varreg.engine.rules.convolution.Convolution.groups", refuse)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(2), nn.Linear(16, 3))
    with varreg.observe(model):
        model(torch.randn(5, 1, 6, 6)).square().mean().backward()
        assert all(varreg.moments(p).count == 5 for p in model.parameters())


@needs_compiler
def test_infinities_stay_where_they_are():
    """In vectors that are filled up with whatever is there, nothing leaks into its neighbours."""
    delta, a = torch.randn(3, 4, 5), torch.randn(3, 4, 21)
    a[1, 2, 20] = torch.inf
    found = layer_sums.outer(delta, a, 3)
    assert found.total[:, :20].isfinite().all()
    assert not found.total[:, 20].isfinite().any()
    x, dy = torch.randn(3, 2, 5, 5), torch.randn(3, 4, 3, 3)
    x[2, 1, 0, 0] = torch.nan
    found = layer_sums.conv(x, dy, (3, 3), (1, 1), (0, 0), (1, 1), 3)
    assert found.total[:, 0].isfinite().all()
    assert found.total[:, 1, 0, 0].isnan().all()
    assert (
        found.total[:, 1].isnan().sum() == 4
    )  # the corner pixel is seen by one place of the kernel alone


NARROW = {  # ordinary code whose tensors have dimensions of size 1, with strides that say nothing
    "text": (
        lambda m, x: m[1](m[0](x).squeeze(-1).transpose(1, 2)),
        (4, 1, 9, 6),
        [nn.Conv2d(1, 5, (3, 6)), nn.Linear(5, 2)],
    ),
    "turned": (
        lambda m, x: m[0](x.unsqueeze(2).transpose(2, 3)),
        (4, 3, 8),
        [nn.Conv2d(3, 5, (3, 1))],
    ),
    "transposed": (
        lambda m, x: m[0](x.transpose(1, 2).unsqueeze(-1)),
        (4, 8, 3),
        [nn.ConvTranspose2d(3, 5, (3, 1))],
    ),
    "lines": (lambda m, x: m[0](x.transpose(1, 2)), (4, 8, 3), [nn.Conv1d(3, 5, 3)]),
    "one number": (lambda m, x: m[0](x).sum((1, 2, 3)), (1, 3, 4, 4), [nn.Conv2d(3, 1, 4)]),
    "expanded": (
        lambda m, x: m[0](x).mean((1, 2, 3)),
        (4, 3, 6, 6),
        [nn.Conv2d(3, 2, 3, groups=1)],
    ),
    "depthwise": (
        lambda m, x: m[0](x).mean((1, 2, 3)),
        (4, 3, 6, 1),
        [nn.Conv2d(3, 3, (3, 1), groups=3)],
    ),
}


@pytest.mark.parametrize("name", NARROW)
def test_strides_that_say_nothing(name):
    forward, shape, layers = NARROW[name]
    model = Fn(lambda self, x: forward(self.layers, x), layers=nn.ModuleList(layers).double())
    x = torch.randn(shape)
    forward(model.layers, x).square().mean().backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with varreg.observe(model):
        model(x).square().mean().backward()
        for p, grad in zip(model.parameters(), plain, strict=True):
            torch.testing.assert_close(p.grad, grad, rtol=1e-10, atol=1e-12)
            assert varreg.moments(p).count == shape[0]


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(6, 5),
        nn.Conv2d(3, 5, 3),
        nn.Conv2d(3, 3, 3, groups=3),
        nn.ConvTranspose2d(3, 4, 3),
        nn.Conv2d(3, 200, 5),
    ],
    ids=["linear", "conv", "depthwise", "transposed", "more features"],
)
def test_a_thousand_samples_that_agree_have_no_variance(layer):
    """In float32, where one addition after the other would drift away from what agrees."""
    layer, x = layer.float(), torch.randn(3, 6, 6, dtype=torch.float32).expand(1000, 3, 6, 6)
    with varreg.observe(layer):
        layer(x).square().mean().backward()
        for p in layer.parameters():
            m = varreg.moments(p)
            assert (m.variance <= 3e-6 * m.mean.square()).all()


def test_batched_gradients_of_a_convolution():
    """`autograd.grad` of several gradients at once, which is not for the parameters' own."""
    layer, x = nn.Conv2d(2, 3, 3, padding="same"), torch.randn(4, 2, 5, 5)
    several = torch.randn(6, 4, 3, 5, 5)
    truth = torch.autograd.grad(layer(x), layer.weight, several, is_grads_batched=True)[0]
    with varreg.observe(layer):
        found = torch.autograd.grad(layer(x), layer.weight, several, is_grads_batched=True)[0]
    torch.testing.assert_close(found, truth, rtol=1e-10, atol=1e-12)
