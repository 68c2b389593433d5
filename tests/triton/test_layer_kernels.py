"""S and W of layers by Triton's interpreter, against their definitions in double precision."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import varreg
from varreg import triton
from varreg.engine.contribution import Contribution, Dense, Outer, Partition
from varreg.engine.rules.convolution import Convolution, Geometry
from varreg.engine.rules.embedding import SparseRows
from varreg.triton import launch, settings


def close(actual, expected, rounding=None):
    """To the rounding of sums, relative to the largest entry."""
    rounding = 30 * torch.finfo(actual[0].dtype).eps if rounding is None else rounding
    for a, e in zip(actual, expected, strict=True):
        assert a.shape == e.shape
        assert (a.double() - e).abs().max() <= rounding * e.abs().max()


def slow(contribution):
    """Return S and W by definition: no kernel is asked."""
    return Contribution.sums(contribution)


@pytest.fixture
def one_program(monkeypatch):
    """Let all groups be added up in one program."""
    monkeypatch.setattr(varreg.thresholds, "TRITON_PROGRAMS", 1)


# ---- dense layers
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("b", "r", "o", "i", "groups", "dtype"),
    [
        (4, 5, 40, 7, 4, torch.float32),
        (5, 20, 3, 35, 2, torch.float32),
        (5, 3, 4, 5, 5, torch.float64),
        (3, 4, 5, 6, 3, torch.float16),
        (20, 1, 3, 5, 20, torch.float32),
        (5, 1, 6, 4, 2, torch.float32),
        (5, 1, 6, 4, 5, torch.float16),
    ],
)
def test_dense_layers(b, r, o, i, groups, dtype):
    delta, a = torch.randn(b, r, o).to(dtype), torch.randn(b, r, i).to(dtype)
    partition = Partition(b, groups)
    expected = slow(Outer(partition, delta.double(), a.double()))
    sums = triton.outer(delta, a, groups, bias=True)
    close(sums[:2], expected)
    close(sums.bias[:2], slow(Dense(partition, delta.double().sum(1))))
    assert sums.total.equal(sums.again)
    assert sums.bias[0].equal(sums.bias[2])
    assert sums.total.dtype == launch.real(dtype)


@pytest.mark.parametrize("r", [1, 2])
def test_a_dense_layer_in_one_program(r, one_program):
    delta, a = torch.randn(4, r, 5), torch.randn(4, r, 4)
    sums = triton.outer(delta, a, 4)
    assert sums.bias is None
    close(sums[:2], slow(Outer(Partition(4, 4), delta.double(), a.double())))
    assert sums.total.equal(sums.again)
    assert sums.total.data_ptr() != sums.again.data_ptr()


def test_samples_that_agree_have_no_variance(one_program):
    """S² and m·W are compared, and summed up one by one they would drift apart."""
    batch = 120
    delta, a = (torch.rand(1, 2, n).add(0.5).expand(batch, 2, n) for n in (16, 16))
    one = delta[:, :1], a[:, :1]
    found = triton.outer(delta, a, batch), triton.outer(*one, batch), triton.sums(one[0], batch)
    for total, square, *_ in found:
        assert not varreg.Moments(batch, batch, total, square).variance.any()


def test_what_dense_layers_leave_to_pytorch():
    x = torch.randn(3, 2, 4)
    assert triton.outer(x[:0], x[:0], 0) is None
    assert triton.outer(x, x.double(), 3) is None
    assert triton.outer(x.int(), x.int(), 3) is None
    assert triton.outer(torch.nn.Parameter(x), x, 3) is None


def test_tiles_and_precision_are_options():
    delta, a = torch.randn(3, 20, 40), torch.randn(3, 20, 20)
    expected = slow(Outer(Partition(3, 3), delta.double(), a.double()))
    try:
        settings.configure(precision="tf32", tile=(64, 16, 32, 8))
        close(triton.outer(delta, a, 3)[:2], expected)  # the interpreter does not round
    finally:
        settings.configure(precision="ieee")
    assert settings.SETTINGS.tile == varreg.thresholds.TRITON_TILES["ieee"]
    for wrong in ({"precision": "fp8"}, {"tile": (32, 32, 32)}, {"tile": (8, 32, 32, 4)}):
        with pytest.raises(varreg.VarregError, match="Triton"):
            settings.configure(**wrong)


# ---- convolutions
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "c", "o", "kernel", "stride", "padding", "dilation", "per", "groups"),
    [
        (1, 2, 3, (3, 3), (1, 1), (1, 1), (1, 1), 1, 3),
        (2, 4, 6, (3, 2), (2, 1), (1, 0), (1, 2), 2, 2),
        (4, 4, 8, (3, 3), (1, 1), (0, 0), (1, 1), 1, 3),  # depthwise
        (1, 2, 3, (3,), (2,), (1,), (1,), 1, 3),
    ],
)
def test_convolutions(parts, c, o, kernel, stride, padding, dilation, per, groups):
    space = (4, 5)[-len(kernel) :]
    convolve = F.conv2d if len(kernel) == 2 else F.conv1d
    x, weight = torch.randn(3 * per, c, *space), torch.randn(o, c // parts, *kernel)
    delta = torch.randn_like(convolve(x, weight, None, stride, padding, dilation, parts))
    if len(kernel) == 2:
        delta = delta.contiguous(memory_format=torch.channels_last)
    pads = tuple(n for p in reversed(padding) for n in (p, p))
    how = Geometry(stride, dilation, padding, pads if any(pads) else ())
    partition = Partition(3, groups)
    expected = slow(Convolution(partition, weight.shape, x.double(), delta.double(), how, parts))
    sums = triton.conv(
        x, delta, kernel, stride, padding, dilation, groups, per=per, parts=parts, bias=True
    )
    close([t.view(weight.shape) for t in sums[:2]], expected)
    by_sample = delta.double().flatten(2).sum(2).view(3, per, o).sum(1)
    close(sums.bias[:2], slow(Dense(partition, by_sample)))


def test_convolutions_in_three_dimensions_are_left_to_pytorch():
    x = torch.randn(2, 3, 4, 4, 4)
    assert triton.conv(x, x, (1,) * 3, (1,) * 3, (0,) * 3, (1,) * 3, 2) is None


# ---- what is at hand
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("partition", [(1, 1), (7, 7), (7, 3), (40, 33)])
@pytest.mark.parametrize("shape", [(), (5,), (3, 50)])
def test_sums(partition, shape):
    values = torch.randn(partition[0], *shape)
    for strided in (values, torch.stack([values, values], 1)[:, 1]):
        total, square, again = triton.sums(strided, partition[1])
        close((total, square), slow(Dense(Partition(*partition), values.double())))
        assert total.equal(again)
    close([triton.total(values)], [values.double().sum(0)])


def test_memory_in_another_order_is_left_to_pytorch():
    assert triton.sums(torch.randn(4, 5, 6).transpose(1, 2), 4) is None


@pytest.mark.parametrize("skip", [None, 2])
@pytest.mark.parametrize(
    ("batch", "r", "groups", "rows", "features"),
    [(4, 3, 4, 5, 3), (5, 3, 2, 4, 140), (2, 20, 2, 2, 4)],
)
def test_lookups(skip, batch, r, groups, rows, features):
    ids, dy = torch.randint(rows, (batch, r)), torch.randn(batch, r, features)
    shape = torch.Size((rows, features))
    skip = None if skip is None else skip % rows
    total, square, again = triton.lookup(ids, dy, shape, groups, skip)
    assert total.equal(again)
    close(
        (total, square), slow(SparseRows(Partition(batch, groups), shape, ids, dy.double(), skip))
    )
    assert triton.lookup(ids, dy, shape, 1, skip, squares=False) is None


# ---- normalizations
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_normalized_rows(offset):
    x, dy = torch.randn(3, 4, 2, 9) + offset, torch.randn(3, 4, 2, 9)
    wide = x.double()
    normalized = F.layer_norm(wide, (2, 9), eps=1e-5), F.rms_norm(wide, (2, 9), eps=1e-5)
    for centre, hat in zip((True, False), normalized, strict=True):
        expected = (dy * hat).sum(1), dy.double().sum(1)
        close(triton.norm_rows(x, dy, 1e-5, centre), expected, 1e-5)
    swapped = x.transpose(0, 3).contiguous().transpose(0, 3)
    expected = (dy * normalized[0]).sum(1), dy.double().sum(1)
    close(triton.norm_rows(swapped, dy, 1e-5), expected, 1e-5)
    longer = torch.randn(1, 1, varreg.thresholds.TRITON_LONGEST_ROW + 1)
    assert triton.norm_rows(longer, longer, 1e-5) is None


@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_normalized_channels(offset, groups):
    x, dy = torch.randn(2, 4, 3, 3) + offset, torch.randn(2, 4, 3, 3)
    hat = F.group_norm(x.double(), groups, eps=1e-5)
    expected = (dy * hat).sum((2, 3)), dy.double().sum((2, 3))
    close(triton.norm_channels(x, dy, groups, 1e-5), expected, 1e-5)


def test_channels_normalized_by_given_statistics():
    x, dy, mean, var = torch.randn(2, 4, 5), torch.randn(2, 4, 5), torch.randn(4), torch.rand(4)
    hat = F.batch_norm(x.double(), mean.double(), var.double(), eps=1e-3)
    expected = (dy * hat).sum(2), dy.double().sum(2)
    close(triton.norm_channels(x, dy, 4, 1e-3, mean, var), expected, 1e-5)
