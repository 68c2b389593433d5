"""Sums in one pass, in C, against their twins in PyTorch and against their definitions in double
precision.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import varreg
from varreg import native
from varreg.engine.contribution import Contribution, Dense, Partition
from varreg.engine.rules.embedding import SparseRows
from varreg.native import layer_sums, library, reductions

pytestmark = pytest.mark.skipif(
    native.status() != "in use", reason=f"native kernel: {native.status()}"
)

each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
each_partition = pytest.mark.parametrize(
    "partition", [(1, 1), (7, 7), (7, 3), (7, 1), (8, 8), (13, 8), (100, 8), (9, 2)]
)


def close(actual, expected, dtype, factor=1.0):
    """To the rounding of sums, relative to the largest entry."""
    assert actual.dtype == dtype
    assert actual.shape == expected.shape
    gap, size = (actual.double() - expected.double()).abs(), expected.abs()
    if gap.numel():
        assert gap.max() <= factor * 30 * torch.finfo(dtype).eps * max(float(size.max()), 1e-300)


@pytest.fixture
def without_native(monkeypatch):
    """Run something as if there were no compiler."""

    def run(f):
        with monkeypatch.context() as patch:
            patch.setattr(library, "serves", lambda *_: False)
            return f()

    return run


# ---- contributions at hand
# ---------------------------------------------------------------------------------------------


@each_partition
@each_dtype
@pytest.mark.parametrize("shape", [(), (1,), (5,), (17, 3), (0,), (513,), (5000,)])
def test_sums_of_what_is_at_hand(dtype, partition, shape):
    values = torch.randn(partition[0], *shape, dtype=dtype) + 1
    parts = values.double().tensor_split(partition[1])
    groups = torch.stack([p.sum(0) for p in parts])
    n = torch.tensor([len(p) for p in parts]).view(-1, *[1] * len(shape))
    for strided in (values, torch.stack([values, values], 1)[:, 1], values.flip(0).flip(0)):
        c = Dense(Partition(*partition), strided)
        assert layer_sums.sums(strided, partition[1]) is not None
        total, square = c.sums()
        close(total, groups.sum(0), dtype)
        close(square, (groups.square() / n).sum(0), dtype)
        close(c.total(), groups.sum(0), dtype)


@each_partition
@each_dtype
def test_sums_equal_their_twin(dtype, partition, without_native):
    c = Dense(Partition(*partition), torch.randn(partition[0], 33, dtype=dtype))
    for fast, slow in zip(
        (*c.sums(), c.total()), without_native(lambda: (*c.sums(), c.total())), strict=True
    ):
        close(fast, slow, dtype)


def test_memory_in_another_order_is_left_to_pytorch():
    values = torch.randn(4, 5, 6).transpose(1, 2)
    assert layer_sums.sums(values, 4) is None
    assert layer_sums.total(values) is None
    assert reductions.rows(values) is None
    assert reductions.pixels(values) is None
    total, square = Dense(Partition(4, 4), values).sums()
    torch.testing.assert_close(total, values.sum(0))
    torch.testing.assert_close(square, values.square().sum(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_left_to_pytorch(dtype):
    x = torch.randn(4, 5, 6).to(dtype)
    assert layer_sums.sums(x, 4) is None
    assert reductions.rows(x) is None
    assert reductions.pixels(x) is None
    assert reductions.norm_rows(x, x.float(), 1e-5) is None
    assert reductions.norm_channels(x, x, 1, 1e-5) is None
    assert (
        layer_sums.lookup(torch.zeros(4, 5, dtype=torch.long), x, torch.Size((3, 6)), 4, None)
        is None
    )


def test_an_empty_batch_has_no_sums():
    for c in (
        Dense(Partition(0, 0), torch.randn(0, 3)),
        SparseRows(
            Partition(0, 0),
            torch.Size((5, 3)),
            torch.zeros(0, 2, dtype=torch.long),
            torch.randn(0, 2, 3),
            None,
        ),
    ):
        assert c.sums() == (None, None)
    assert reductions.rows(torch.randn(0, 4, 3)).shape == (0, 3)
    assert reductions.pixels(torch.randn(0, 4, 3)).shape == (0, 4)
    assert reductions.norm_channels(torch.randn(0, 4, 3), torch.randn(0, 4, 3), 2, 1e-5)[
        0
    ].shape == (
        0,
        4,
    )
    assert reductions.norm_rows(torch.randn(0, 4, 3), torch.randn(0, 4, 3), 1e-5)[1].shape == (0, 3)


@each_dtype
@pytest.mark.parametrize("batch", [100, 1000, 3000])
def test_samples_that_agree_have_no_variance(batch, dtype):
    """S² and m·W are compared, and summed up one by one they would drift apart."""
    one = torch.rand(2000, dtype=dtype) + 0.5
    total, square = Dense(Partition(batch, batch), one.expand(batch, -1)).sums()
    assert not varreg.Moments(batch, batch, total, square).variance.any()


# ---- rows and pixels
# --------------------------------------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 4, 5), (5, 7, 33), (2, 0, 3), (6, 131, 70)])
def test_rows_and_pixels(dtype, shape):
    t = torch.randn(shape, dtype=dtype)
    for rows in (
        t,
        t.transpose(0, 1).contiguous().transpose(0, 1),
        t[:1].expand(shape),
        t[:, :1].expand(shape),
    ):
        close(reductions.rows(rows), rows.double().sum(1), dtype)
    close(reductions.rows(t.unflatten(2, (1, -1))), t.unsqueeze(2).double().sum(1), dtype)
    close(reductions.pixels(t), t.double().sum(2), dtype)


# ---- normalization
# --------------------------------------------------------------------------------------------------


def standard(x, dim):
    """x̂ in double precision, centred twice: the mean of large numbers is itself rounded."""
    x = x.double() - x.double().mean(dim, keepdim=True)
    x = x - x.mean(dim, keepdim=True)
    return x / (x.square().mean(dim, keepdim=True) + 1e-5).sqrt()


@each_dtype
@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize(
    "shape", [(1, 4, 1), (3, 8, 5), (5, 4, 7, 7), (2, 16, 4, 4), (2, 8, 33, 9)]
)
def test_normalized_channels(dtype, offset, shape):
    """A large mean against small deviations: x is centred before anything is multiplied."""
    x, dy = torch.randn(2, *shape, dtype=dtype)
    x = x + offset
    for groups in (1, 4, shape[1]):
        if shape[1] // groups * x[0, 0].numel() == 1:
            continue
        normalized = standard(x.view(shape[0], groups, -1), 2).view(shape)
        for a, b in (
            (x, dy),
            (x.transpose(0, -1).contiguous().transpose(0, -1), dy.flip(1).flip(1)),
        ):
            weight, bias = reductions.norm_channels(a, b, groups, 1e-5)
            close(weight, (dy * normalized).flatten(2).sum(2), dtype, 3)
            close(bias, dy.double().flatten(2).sum(2), dtype)
    mean, var = torch.randn(shape[1], dtype=dtype) + offset, torch.rand(shape[1], dtype=dtype) + 0.5
    normalized = F.batch_norm(x.double(), mean.double(), var.double(), eps=1e-3)
    weight, _ = reductions.norm_channels(x, dy, shape[1], 1e-3, mean, var)
    close(weight, (dy * normalized).flatten(2).sum(2), dtype, 3 + offset)


@each_dtype
@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize("shape", [(1, 1, 2), (3, 4, 5), (5, 7, 33), (2, 3, 4, 40), (4, 130, 100)])
def test_normalized_rows(dtype, offset, shape):
    x, dy = torch.randn(2, *shape, dtype=dtype)
    x = x + offset
    swapped = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (x, dy)]
    other = [t.transpose(0, -1).contiguous().transpose(0, -1) for t in (x, dy)]
    for centre, normalized in (
        (True, standard(x.flatten(2), 2).view(shape)),
        (False, F.rms_norm(x.double(), shape[2:], eps=1e-5)),
    ):
        for a, b in ((x, dy), swapped, other):
            weight, bias = reductions.norm_rows(a, b, 1e-5, centre)
            close(weight, (dy * normalized).sum(1), dtype, 3)
            close(bias, dy.double().sum(1), dtype)


# ---- lookups
# --------------------------------------------------------------------------------------------------


@each_partition
@each_dtype
@pytest.mark.parametrize("skip", [None, 2, -1])
@pytest.mark.parametrize(
    ("vocabulary", "tokens", "features"),
    [(5, 6, 3), (300, 4, 37), (3, 1, 16), (4, 0, 2), (11, 40, 130)],
)
def test_lookups(dtype, partition, skip, vocabulary, tokens, features, without_native):
    batch, shape = partition[0], torch.Size((vocabulary, features))
    ids, dy = (
        torch.randint(0, vocabulary, (batch, tokens)),
        torch.randn(batch, tokens, features, dtype=dtype),
    )
    for i, d in (
        (ids, dy),
        (ids.int(), dy.transpose(0, 1).contiguous().transpose(0, 1)),
        (ids.t().contiguous().t(), dy.mT.contiguous().mT),
    ):
        c = SparseRows(Partition(*partition), shape, i, d, skip)
        total, square = c.sums()
        slow = without_native(lambda c=c: Contribution.sums(c))  # every group's table, in full
        close(total, slow[0], dtype)
        close(square, slow[1], dtype)
        close(c.total(), slow[0], dtype)
        for a, b in zip(c.sums(), without_native(c.sums), strict=True):
            close(a, b, dtype)
    if skip is not None:
        assert not total[skip].any()


# ---- threads
# --------------------------------------------------------------------------------------------------


def test_the_number_of_threads_changes_nothing():
    x, dy = torch.randn(2, 19, 24, 130)
    ids = torch.randint(0, 50, (19, 24))

    def everything():
        return [
            *layer_sums.sums(x, 19),
            *layer_sums.sums(x, 4),
            layer_sums.total(x),
            reductions.rows(x),
            reductions.pixels(x),
            *reductions.norm_rows(x, dy, 1e-5),
            *reductions.norm_channels(x, dy, 8, 1e-5),
            *layer_sums.lookup(ids, dy, torch.Size((50, 130)), 5, 3),
        ]

    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(everything())
    finally:
        torch.set_num_threads(before)
    for one, two, three in zip(*found, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)


# ---- in models
# --------------------------------------------------------------------------------------------------

MODELS = {
    "group_norm": (lambda: nn.GroupNorm(2, 6), (6, 5, 3)),
    "group_norm_no_bias": (lambda: _frozen(nn.GroupNorm(2, 6), "bias"), (6, 5, 3)),
    "group_norm_bias_alone": (lambda: _frozen(nn.GroupNorm(2, 6), "weight"), (6, 5, 3)),
    "instance_norm": (lambda: nn.InstanceNorm2d(6, affine=True), (6, 5, 3)),
    "instance_norm_eval": (
        lambda: nn.InstanceNorm2d(6, affine=True, track_running_stats=True).eval(),
        (6, 5, 3),
    ),
    "batch_norm_eval": (lambda: nn.BatchNorm2d(6).eval(), (6, 5, 3)),
    "batch_norm": (lambda: nn.BatchNorm2d(6), (6, 5, 3)),
    "layer_norm": (lambda: nn.LayerNorm((5, 3)), (6, 5, 3)),
    "layer_norm_weight_alone": (lambda: nn.LayerNorm(3, bias=False), (6, 5, 3)),
    "rms_norm": (lambda: nn.RMSNorm(3), (6, 5, 3)),
    "channel_bias": (lambda: nn.Conv2d(6, 4, 2), (6, 5, 3)),
    "row_bias": (lambda: nn.Linear(3, 4), (6, 5, 3)),
}


def _frozen(module, name):
    getattr(module, name).requires_grad_(False)
    return module


@pytest.mark.parametrize("groups", [None, 3])
@pytest.mark.parametrize("memory", ["plain", "channels_last", "expanded", "images of a sample"])
@pytest.mark.parametrize("name", MODELS)
@each_dtype
def test_models_equal_their_twins(name, memory, groups, dtype, without_native):
    make, shape = MODELS[name]
    folded = memory == "images of a sample"
    x = (torch.randn(7, 2, *shape) if folded else torch.randn(7, *shape)).to(dtype)
    x = x.to(memory_format=torch.channels_last) if memory == "channels_last" else x

    def run():
        torch.manual_seed(0)
        inner = make().to(dtype)

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = inner

            def forward(self, x):
                return (
                    self.inner(x.flatten(0, 1)).unflatten(0, x.shape[:2])
                    if folded
                    else self.inner(x)
                )

        model = Model()
        varreg.observe(model, groups, batch_norm="contribution")
        y = model(x)
        y.sum().backward() if memory == "expanded" else (
            y.sin() * torch.linspace(1, 2, y.numel(), dtype=dtype).view_as(y)
        ).sum().backward()
        return [
            (m.total, m.square)
            for p in inner.parameters()
            if p.requires_grad and (m := varreg.moments(p)) is not None
        ]

    fast, slow = run(), without_native(run)
    assert len(fast) == len(slow) > 0
    size = max(float(s.abs().max()) for s, _ in slow)
    for (a, b), (c, d) in zip(fast, slow, strict=True):
        assert (a - c).abs().max() <= 100 * torch.finfo(dtype).eps * size
        assert (b - d).abs().max() <= 300 * torch.finfo(dtype).eps * size**2


def test_batches_of_gradients_are_left_to_pytorch():
    """A batch of gradients at once, for a Jacobian: there is no memory behind them."""
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    x = torch.randn(5, 3, requires_grad=True)
    expected = torch.autograd.functional.jacobian(model, x, vectorize=True)
    varreg.observe(model)
    torch.testing.assert_close(
        torch.autograd.functional.jacobian(model, x, vectorize=True), expected
    )
