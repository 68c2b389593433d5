"""Sums of several layers by one call: the numbers of the kernels that take a call for each, to the
bit, and those of the definition.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from varreg import native
from varreg.native import layer_sums, reductions
from varreg.native.contract import Layer
from varreg.native.many_layers import LayerSizes, ManyLayers

needs_compiler = pytest.mark.skipif(
    native.status() != "in use", reason=f"native kernel: {native.status()}"
)
CLOSE = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-4},
    torch.float64: {"rtol": 1e-11, "atol": 1e-11},
}
SAMPLES, ROWS, OUT, IN = 6, 5, 21, 34


def both_sums(c, groups):
    parts = torch.tensor_split(c, groups)
    units = torch.stack([part.sum(0) for part in parts])
    share = torch.tensor([len(part) for part in parts], dtype=c.dtype)
    return units.sum(0), (units.square() / share.view(-1, *[1] * (c.dim() - 1))).sum(0)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("groups", [SAMPLES, 4, 1])
def test_several_layers(dtype, threads, groups, monkeypatch):
    monkeypatch.setattr("varreg.native.many_layers.WORTH_THREADS", 1)  # threads for all sizes
    monkeypatch.setattr("varreg.native.many_layers.WORTH_THREADS_PRODUCTS", 0)
    torch.set_num_threads(threads)
    dy, x, y = (torch.randn(SAMPLES, ROWS, n, dtype=dtype) for n in (OUT, IN, OUT))
    values = torch.randn(SAMPLES, 7, dtype=dtype)
    matrix, vector = torch.Size((OUT, IN)), torch.Size((OUT,))
    layers = [
        (LayerSizes(Layer.DENSE, SAMPLES, groups, ROWS, OUT, IN), [matrix, vector], (dy, x)),
        (LayerSizes(Layer.VALUES, SAMPLES, groups, 1, 7), [torch.Size((7,))], (values, values)),
        (LayerSizes(Layer.NORM, SAMPLES, groups, ROWS, OUT, eps=1e-5), [vector, vector], (dy, y)),
        (
            LayerSizes(Layer.NORM, SAMPLES, groups, ROWS, OUT, eps=1e-3, centre=False),
            [vector],
            (dy, y),
        ),
        (LayerSizes(Layer.DENSE, SAMPLES, groups, ROWS, OUT, IN), [matrix], (dy, x)),
    ]
    sizes, shapes, tensors = zip(*layers, strict=True)
    found = ManyLayers(sizes, shapes).sums([t for pair in tensors for t in pair])
    S, W = (iter(part) for part in found)
    found = list(zip(S, W, strict=True))
    assert [s.shape for s, _ in found] == [shape for of in shapes for shape in of]

    outer = layer_sums.outer(dy, x, groups, True)
    centred, plain = (reductions.norm_rows(y, dy, *how) for how in ((1e-5,), (1e-3, False)))
    alone = [
        (outer.total, outer.square),
        tuple(outer.bias),
        layer_sums.sums(values, groups),
        *(layer_sums.sums(t, groups) for t in (*centred, plain[0])),
        layer_sums.outer(dy, x, groups)[:2],
    ]
    normal = F.layer_norm(y, (OUT,)), F.rms_norm(y, (OUT,), eps=1e-3)
    contributions = [
        torch.einsum("bro,bri->boi", dy, x),
        dy.sum(1),
        values,
        (dy * normal[0]).sum(1),
        dy.sum(1),
        (dy * normal[1]).sum(1),
        torch.einsum("bro,bri->boi", dy, x),
    ]
    for ours, one, c in zip(found, alone, contributions, strict=True):
        torch.testing.assert_close(ours, both_sums(c, groups), **CLOSE[dtype])
        for a, b in zip(ours, one, strict=True):
            assert torch.equal(a, b)
