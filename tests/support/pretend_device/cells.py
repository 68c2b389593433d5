"""The fused cells of LSTM and GRU, which every accelerator must have, by other operations."""

from __future__ import annotations

import torch
from torch import Tensor

Maybe = Tensor | None


def _biased(gates: Tensor, bias: Maybe) -> Tensor:
    return gates if bias is None else gates + bias


def lstm_cell(
    igates: Tensor, hgates: Tensor, cx: Tensor, ib: Maybe = None, hb: Maybe = None
) -> tuple[Tensor, ...]:
    i, f, g, o = (_biased(igates, ib) + _biased(hgates, hb)).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def lstm_cell_backward(
    grad_hy: Maybe, grad_cy: Maybe, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Maybe, ...]:
    i, f, g, o = workspace.chunk(4, 1)
    out = cy.tanh()
    dh = torch.zeros_like(cy) if grad_hy is None else grad_hy
    dc = dh * o * (1 - out * out) + (0 if grad_cy is None else grad_cy)
    gates = torch.cat(
        [
            dc * g * i * (1 - i),
            dc * cx * f * (1 - f),
            dc * i * (1 - g * g),
            dh * out * o * (1 - o),
        ],
        1,
    )
    return gates, dc * f, gates.sum(0) if has_bias else None


def gru_cell(
    igates: Tensor, hgates: Tensor, hx: Tensor, ib: Maybe = None, hb: Maybe = None
) -> tuple[Tensor, ...]:
    ir, iz, new = _biased(igates, ib).chunk(3, 1)
    hr, hz, hn = _biased(hgates, hb).chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (new + r * hn).tanh()
    return n + z * (hx - n), torch.cat([r, z, n, hx, hn], 1)


def gru_cell_backward(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Maybe, ...]:
    r, z, n, hx, hn = workspace.chunk(5, 1)
    dn = grad_hy * (1 - z) * (1 - n * n)
    dz = grad_hy * (hx - n) * z * (1 - z)
    dr = dn * hn * r * (1 - r)
    igates, hgates = torch.cat([dr, dz, dn], 1), torch.cat([dr, dz, dn * r], 1)
    biases = (igates.sum(0), hgates.sum(0)) if has_bias else (None, None)
    return igates, hgates, grad_hy * z, *biases


def register() -> torch.library.Library:
    """Return the library that has them: they are there as long as it lives."""
    library = torch.library.Library("aten", "IMPL")
    for name, function in {
        "_thnn_fused_lstm_cell": lstm_cell,
        "_thnn_fused_lstm_cell_backward_impl": lstm_cell_backward,
        "_thnn_fused_gru_cell": gru_cell,
        "_thnn_fused_gru_cell_backward": gru_cell_backward,
    }.items():
        library.impl(name, function, "PrivateUse1")
    return library
