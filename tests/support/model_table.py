"""The table of models on which every property of the engine is tested. A new layer is a new row."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

BATCH = 7


class Case(NamedTuple):
    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple]
    vmap: bool = True
    """Can `torch.func.vmap(grad)` run it?"""
    random: bool = False
    """Is its forward random?"""


class Fn(nn.Module):
    """A forward given as a function, with named modules and parameters."""

    def __init__(self, forward: Callable[..., Tensor], **parts):
        super().__init__()
        self.run = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs):
        return self.run(self, *inputs)


def normal(*shape: int) -> Callable[[], tuple]:
    return lambda: (torch.randn(BATCH, *shape),)


def ids(*shape: int, high: int = 9) -> Callable[[], tuple]:
    return lambda: (torch.randint(0, high, (BATCH, *shape)),)


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def seq(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*layers)


def first(module: nn.Module) -> nn.Module:
    return Fn(lambda s, x: s.module(x)[0], module=module)


def states(module: nn.Module) -> nn.Module:
    """All outputs of a recurrent layer, batch first."""

    def run(s, x):
        y, h = s.module(x)
        return (y, *(t.transpose(0, 1) for t in (h if isinstance(h, tuple) else (h,))))

    return Fn(run, module=module)


def loop(cell: nn.Module, features: int) -> nn.Module:
    """A cell shared over time."""

    def run(s, x):
        zero = torch.zeros(x.shape[0], features, dtype=x.dtype)
        state = (zero, zero) if isinstance(s.cell, nn.LSTMCell) else zero
        for t in range(x.shape[1]):
            state = s.cell(x[:, t], state)
        return state

    return Fn(run, cell=cell)


def attention(
    mask: bool = False, seq_first: bool = False, cross: bool = False, **options
) -> nn.Module:
    def run(s, x):
        other = x[:, :3] if cross else x
        if "kdim" in options:
            key, value = other[..., : options["kdim"]], other[..., : options["vdim"]]
        else:
            key, value = other, other
        padding = (x[..., 0] > 1.0) & (torch.arange(x.shape[1]) > 0) if mask else None
        causal = (
            torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), 1) if mask else None
        )
        q = x
        if seq_first:
            q, key, value = (t.transpose(0, 1) for t in (q, key, value))
        y, w = s.attention(q, key, value, key_padding_mask=padding, attn_mask=causal)
        return (y.transpose(0, 1) if seq_first else y), w

    return Fn(run, attention=nn.MultiheadAttention(8, 2, batch_first=not seq_first, **options))


def conv_cases() -> list[Case]:
    cases = []
    for d, conv, transpose in (
        (1, nn.Conv1d, nn.ConvTranspose1d),
        (2, nn.Conv2d, nn.ConvTranspose2d),
        (3, nn.Conv3d, nn.ConvTranspose3d),
    ):
        x = normal(4, *(7, 6, 5)[:d])
        k = (3, 2, 3)[:d]
        cases += [
            Case(
                f"conv{d}d",
                lambda c=conv, k=k: nn.Sequential(c(4, 6, k), nn.Tanh(), c(6, 5, 1, bias=False)),
                x,
            ),
            Case(
                f"conv{d}d-options",
                lambda c=conv: c(4, 6, 3, stride=2, padding=2, dilation=2, groups=2),
                x,
            ),
            Case(
                f"conv{d}d-depthwise",
                lambda c=conv: nn.Sequential(c(4, 8, 2, groups=4), nn.Tanh(), c(8, 8, 2, groups=8)),
                x,
            ),
            Case(f"conv{d}d-same", lambda c=conv, k=k: c(4, 3, k, padding="same", dilation=2), x),
            Case(f"conv{d}d-valid", lambda c=conv: c(4, 3, 2, padding="valid", stride=2), x),
            *(
                Case(
                    f"conv{d}d-{mode}",
                    lambda c=conv, m=mode: c(4, 3, 3, padding=1, padding_mode=m),
                    x,
                )
                for mode in ("reflect", "replicate", "circular")
            ),
            Case(
                f"conv_transpose{d}d",
                lambda t=transpose: nn.Sequential(t(4, 3, 2), nn.Tanh(), t(3, 2, 2, bias=False)),
                x,
            ),
            Case(
                f"conv_transpose{d}d-options",
                lambda t=transpose: t(
                    4, 6, 3, stride=3, padding=1, output_padding=2, groups=2, dilation=2
                ),
                x,
            ),
        ]
    return cases


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x):
        return F.relu(self.norm(self.b(F.relu(self.a(x)))) + x)


class Square(torch.autograd.Function):
    """An operation that is not a torch function, and so is not seen."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, dy):
        return 2 * ctx.saved_tensors[0] * dy


def gpt(s, x):
    """Positions are looked up once for the whole batch; the head is tied to the embedding."""
    h = s.tokens(x) + s.positions(torch.arange(x.shape[1]))
    return F.linear(s.norm(h + torch.tanh(s.mlp(h))), s.tokens.weight)


def windows(s, x):
    """Swin's trick: windows become part of the batch dimension, and return."""
    b, h, w, c = x.shape
    x = x.view(b, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, c)
    return torch.tanh(s.proj(x)).view(b, -1)


def vit(s, x):
    x = torch.cat([s.cls.expand(x.shape[0], -1, -1), s.patch(x)], 1) + s.pos
    return s.block(x)[:, 0]


def checkpointed(reentrant: bool, shared: bool = False) -> nn.Module:
    def run(s, x):
        x = torch.tanh(s.first(x))
        for _ in range(2 if shared else 1):
            x = checkpoint(s.segment, x, use_reentrant=reentrant)
        return s.last(x)

    segment = nn.Sequential(nn.Linear(5, 6), nn.ReLU(inplace=True), nn.Linear(6, 5))
    return Fn(run, first=nn.Linear(4, 5), segment=segment, last=nn.Linear(5, 2))


def linear() -> nn.Module:
    return nn.Linear(4, 3)


CASES: list[Case] = [
    Case(
        "linear",
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3, bias=False)),
        normal(4),
    ),
    Case(
        "linear-inner",
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)),
        normal(2, 3, 4),
    ),
    Case(
        "bilinear",
        lambda: Fn(lambda s, x: s.b(x[..., :3], x[..., 3:]), b=nn.Bilinear(3, 2, 4)),
        normal(2, 5),
    ),
    *conv_cases(),
    Case("embedding", lambda: nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3)), ids(5)),
    Case(
        "embedding-padding",
        lambda: nn.Sequential(nn.Embedding(9, 4, padding_idx=2), nn.Linear(4, 3)),
        ids(5, 2),
    ),
    *(
        Case(
            f"embedding-bag-{mode}",
            lambda m=mode: nn.Sequential(nn.EmbeddingBag(9, 4, mode=m, padding_idx=1), nn.Tanh()),
            ids(5),
            vmap=False,
        )
        for mode in ("sum", "mean", "max")
    ),
    Case(
        "embedding-bag-weighted",
        lambda: Fn(
            lambda s, i, w: s.bag(i, per_sample_weights=w), bag=nn.EmbeddingBag(9, 4, mode="sum")
        ),
        lambda: (torch.randint(0, 9, (BATCH, 5)), torch.rand(BATCH, 5)),
        vmap=False,
    ),
    Case(
        "layer-norm",
        lambda: nn.Sequential(nn.LayerNorm((3, 5)), nn.Tanh(), nn.LayerNorm(5)),
        normal(3, 5),
    ),
    Case(
        "rms-norm",
        lambda: nn.Sequential(nn.RMSNorm(5), nn.Tanh(), nn.RMSNorm((3, 5), eps=1e-3)),
        normal(3, 5),
    ),
    Case(
        "group-norm",
        lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.Tanh(), nn.GroupNorm(4, 4)),
        normal(4, 3, 2),
    ),
    Case(
        "instance-norm",
        lambda: nn.Sequential(nn.InstanceNorm2d(4, affine=True), nn.Tanh()),
        normal(4, 3, 2),
    ),
    Case(
        "instance-norm-eval",
        lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True).eval(),
        normal(4, 3),
    ),
    Case(
        "batch-norm-eval",
        lambda: nn.Sequential(nn.Conv2d(4, 4, 2), nn.BatchNorm2d(4).eval(), nn.Tanh()),
        normal(4, 3, 3),
    ),
    Case("attention", attention, normal(5, 8)),
    Case("attention-masks", lambda: attention(mask=True), normal(5, 8)),
    Case("attention-seq-first", lambda: attention(mask=True, seq_first=True), normal(5, 8)),
    Case("attention-cross", lambda: attention(cross=True), normal(5, 8)),
    Case(
        "attention-dims",
        lambda: attention(cross=True, kdim=6, vdim=4, add_bias_kv=True, add_zero_attn=True),
        normal(5, 8),
    ),
    Case(
        "transformer",
        lambda: nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True),
        normal(5, 8),
    ),
    Case(
        "transformer-decoder",
        lambda: Fn(
            lambda s, x: s.layer(x.transpose(0, 1), x[:, :3].transpose(0, 1)).transpose(0, 1),
            layer=nn.TransformerDecoderLayer(8, 2, 12, dropout=0.0),
        ),
        normal(5, 8),
    ),
    *(
        Case(
            f"{kind.__name__.lower()}{tag}",
            lambda k=kind, o=options: states(k(4, 3, batch_first=True, **o)),
            normal(5, 4),
            vmap=False,
        )
        for kind in (nn.RNN, nn.GRU, nn.LSTM)
        for tag, options in (
            ("", {}),
            ("-layers", {"num_layers": 2, "bidirectional": True}),
            ("-no-bias", {"bias": False}),
        )
    ),
    Case(
        "rnn-relu",
        lambda: states(nn.RNN(4, 3, nonlinearity="relu", batch_first=True)),
        normal(5, 4),
        vmap=False,
    ),
    Case(
        "lstm-projection",
        lambda: states(nn.LSTM(4, 5, 2, proj_size=3, bidirectional=True, batch_first=True)),
        normal(5, 4),
        vmap=False,
    ),
    Case(
        "lstm-seq-first",
        lambda: Fn(lambda s, x: s.lstm(x.transpose(0, 1))[0].transpose(0, 1), lstm=nn.LSTM(4, 3)),
        normal(5, 4),
        vmap=False,
    ),
    Case(
        "lstm-learned-state",
        lambda: Fn(
            lambda s, x: s.lstm(
                x,
                (
                    s.h.expand(-1, x.shape[0], -1).contiguous(),
                    s.c.expand(-1, x.shape[0], -1).contiguous(),
                ),
            )[0],
            lstm=nn.LSTM(4, 3, batch_first=True),
            h=weight(1, 1, 3),
            c=weight(1, 1, 3),
        ),
        normal(5, 4),
        vmap=False,
    ),
    Case("lstm-cell", lambda: loop(nn.LSTMCell(4, 3), 3), normal(5, 4), vmap=False),
    Case("gru-cell", lambda: loop(nn.GRUCell(4, 3), 3), normal(5, 4), vmap=False),
    Case("rnn-cell", lambda: loop(nn.RNNCell(4, 3), 3), normal(5, 4), vmap=False),
    Case("prelu", lambda: nn.Sequential(nn.Linear(4, 3), nn.PReLU(), nn.PReLU(3)), normal(4)),
    Case("prelu-channels", lambda: nn.Sequential(nn.PReLU(3), nn.Tanh(), nn.PReLU()), normal(3, 4)),
    # a user's own layers and bare parameters
    Case(
        "scale-and-shift",
        lambda: Fn(lambda s, x: x * s.w + s.b, w=weight(4), b=weight(3, 1)),
        normal(3, 4),
    ),
    Case("scalar", lambda: Fn(lambda s, x: s.w.exp() * x / (1 + s.w**2), w=weight()), normal(3)),
    Case(
        "in-place-add",
        lambda: Fn(lambda s, x: s.l(x).mul_(s.w).add_(s.w), l=nn.Linear(4, 3), w=weight(3)),
        normal(4),
    ),
    Case(
        "where",
        lambda: Fn(lambda s, x: torch.where(x > 0, x * s.a, s.b), a=weight(3), b=weight(3)),
        normal(2, 3),
    ),
    Case(
        "matmul",
        lambda: Fn(lambda s, x: torch.tanh(x @ s.w) @ s.v, w=weight(4, 3), v=weight(3)),
        normal(5, 4),
    ),
    Case("matmul-left", lambda: Fn(lambda s, x: s.w @ x, w=weight(3, 5)), normal(5, 4)),
    Case(
        "matmul-transposed",
        lambda: Fn(lambda s, x: torch.tanh(x @ s.w.t()) @ s.w, w=weight(4, 3)),
        normal(5, 3),
    ),
    Case(
        "einsum",
        lambda: Fn(lambda s, x: torch.einsum("bij,jk->bki", x, s.w), w=weight(4, 3)),
        normal(5, 4),
    ),
    Case(
        "addmm",
        lambda: Fn(
            lambda s, x: torch.addmm(s.b, x.view(-1, 4), s.w).view(*x.shape[:-1], 3),
            b=weight(3),
            w=weight(4, 3),
        ),
        normal(5, 4),
    ),
    Case(
        "no-rule",
        lambda: Fn(
            lambda s, x: torch.cdist(x, s.w) + s.table[(x[..., 0] > 0).long()],
            w=weight(3, 4),
            table=weight(2, 3),
        ),
        normal(5, 4),
    ),
    Case(
        "unseen-function",
        lambda: Fn(lambda s, x: s.b(Square.apply(s.a(x))), a=nn.Linear(4, 3), b=nn.Linear(3, 2)),
        normal(4),
        vmap=False,
    ),
    Case(
        "latent-queries",
        lambda: Fn(
            lambda s, x: F.scaled_dot_product_attention(
                s.q.expand(x.shape[0], -1, -1), s.k(x), s.v(x)
            ),
            q=weight(3, 4),
            k=nn.Linear(4, 4),
            v=nn.Linear(4, 4),
        ),
        normal(5, 4),
    ),
    # uses
    Case(
        "called-twice",
        lambda: Fn(lambda s, x: s.l(torch.tanh(s.l(x))), l=nn.Linear(4, 4)),
        normal(4),
    ),
    Case(
        "conv-called-twice",
        lambda: Fn(lambda s, x: s.c(torch.tanh(s.c(x))), c=nn.Conv2d(3, 3, 2)),
        normal(3, 5, 5),
    ),
    Case(
        "tied",
        lambda: Fn(lambda s, x: F.linear(torch.tanh(s.e(x)), s.e.weight), e=nn.Embedding(9, 4)),
        ids(5),
    ),
    Case(
        "gpt",
        lambda: Fn(
            gpt,
            tokens=nn.Embedding(9, 4),
            positions=nn.Embedding(12, 4),
            norm=nn.LayerNorm(4),
            mlp=nn.Linear(4, 4),
        ),
        ids(5),
    ),
    Case(  # as many positions as samples: shapes alone would not tell them apart
        "gpt-square",
        lambda: Fn(
            gpt,
            tokens=nn.Embedding(9, 4),
            positions=nn.Embedding(12, 4),
            norm=nn.LayerNorm(4),
            mlp=nn.Linear(4, 4),
        ),
        ids(BATCH),
    ),
    Case(
        "weight-norm",
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 5)), nn.Tanh()),
        normal(4),
    ),
    Case(
        "weight-norm-conv", lambda: parametrizations.weight_norm(nn.Conv1d(2, 3, 2)), normal(2, 4)
    ),
    Case(
        "weights-through-a-custom-function",
        lambda: Fn(lambda s, x: F.linear(x, Square.apply(s.w)), w=weight(3, 4)),
        normal(4),
        vmap=False,
    ),
    Case(
        "positions-repeated",
        lambda: Fn(
            lambda s, x: s.e(x) + s.p(torch.tensor([0, 1, 0, 2, 1])),
            e=nn.Embedding(9, 4),
            p=nn.Embedding(5, 4),
        ),
        ids(5),
    ),
    Case(
        "positions-shared",
        lambda: Fn(
            lambda s, x: s.e(x) * s.p(torch.arange(5)) + s.p(torch.arange(5).flip(0)),
            e=nn.Embedding(9, 4),
            p=nn.Embedding(6, 4, padding_idx=5),
        ),
        ids(5),
    ),
    Case(
        "spectral-norm", lambda: parametrizations.spectral_norm(nn.Linear(4, 5)).eval(), normal(4)
    ),
    Case(
        "lora",
        lambda: Fn(
            lambda s, x: F.linear(x, s.base.weight + s.b @ s.a),
            base=nn.Linear(4, 3).requires_grad_(False),
            a=weight(2, 4),
            b=weight(3, 2),
        ),
        normal(4),
    ),
    # where the batch goes
    Case(
        "flattened",
        lambda: Fn(lambda s, x: s.l(x.view(-1, 4)).view(x.shape[0], -1), l=nn.Linear(4, 3)),
        normal(5, 4),
    ),
    Case(
        "time-major",
        lambda: Fn(
            lambda s, x: (
                s.l(x.transpose(0, 1).reshape(-1, 4)).view(x.shape[1], -1, 3).transpose(0, 1)
            ),
            l=nn.Linear(4, 3),
        ),
        normal(5, 4),
    ),
    Case(
        "frames",
        lambda: Fn(lambda s, x: s.c(x.flatten(0, 1)).view(x.shape[0], -1), c=nn.Conv2d(2, 3, 2)),
        normal(3, 2, 4, 4),
    ),
    Case(
        "windows-with-bias",
        lambda: Fn(
            lambda s, x: (
                x.flatten(0, 1)
                + s.bias.repeat(x.shape[0], 1, 1)
                * torch.arange(1.0, 3.0).repeat(x.shape[0])[:, None, None]
            ).view(x.shape),
            bias=weight(2, 3, 4),
        ),
        normal(2, 3, 4),
    ),
    Case("windows", lambda: Fn(windows, proj=nn.Linear(3, 3)), normal(4, 6, 3)),
    Case(
        "vit",
        lambda: Fn(
            vit,
            patch=nn.Linear(4, 8),
            cls=weight(1, 1, 8),
            pos=weight(1, 6, 8),
            block=nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True),
        ),
        normal(5, 4),
    ),
    Case(
        "last-step",
        lambda: Fn(
            lambda s, x: s.l(x[torch.arange(x.shape[0]), (x[..., 0] > 0).sum(1).clamp(max=4)]),
            l=nn.Linear(4, 3),
        ),
        normal(5, 4),
        vmap=False,
    ),
    Case(
        "written-into",
        lambda: Fn(lambda s, x: s.l(_stacked(s.a(x))), a=nn.Linear(4, 3), l=nn.Linear(3, 2)),
        normal(4),
        vmap=False,
    ),
    # what the engine has to survive
    Case(
        "in-place-activations",
        lambda: nn.Sequential(
            nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3), nn.Hardtanh(inplace=True)
        ),
        normal(4),
    ),
    Case(
        "residual",
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3),
            Residual(),
            Residual(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4, 3),
        ),
        normal(2, 6, 6),
    ),
    Case("checkpoint", lambda: checkpointed(reentrant=False), normal(4), vmap=False),
    Case(
        "checkpoint-shared",
        lambda: checkpointed(reentrant=False, shared=True),
        normal(4),
        vmap=False,
    ),
    Case("checkpoint-reentrant", lambda: checkpointed(reentrant=True), normal(4), vmap=False),
    Case(
        "checkpoint-reentrant-shared",
        lambda: checkpointed(reentrant=True, shared=True),
        normal(4),
        vmap=False,
    ),
    Case(
        "two-outputs",
        lambda: Fn(lambda s, x: (s.a(x), s.b(s.a(x))), a=nn.Linear(4, 3), b=nn.Linear(3, 2)),
        normal(4),
    ),
    Case(
        "two-inputs",
        lambda: Fn(lambda s, x, y: s.a(x) * s.b(y), a=nn.Linear(4, 3), b=nn.Linear(2, 3)),
        lambda: (torch.randn(BATCH, 4), torch.randn(BATCH, 2)),
    ),
    Case(
        "dropout",
        lambda: nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3)),
        normal(4),
        vmap=False,
        random=True,
    ),
    Case(
        "lstm-dropout",
        lambda: states(nn.LSTM(4, 3, 3, dropout=0.5, bidirectional=True, batch_first=True)),
        normal(5, 4),
        vmap=False,
        random=True,
    ),
    Case(
        "gru-dropout",
        lambda: states(nn.GRU(4, 3, 2, dropout=0.5, batch_first=True)),
        normal(5, 4),
        vmap=False,
        random=True,
    ),
    Case(
        "attention-dropout", lambda: attention(dropout=0.3), normal(5, 8), vmap=False, random=True
    ),
]


def _stacked(y: Tensor) -> Tensor:
    out = torch.zeros(y.shape[0], 2, y.shape[1], dtype=y.dtype)
    out[:, 0] = y
    out[:, 1] = y.square()
    return out
