"""The table of coverage: for every parameter, the rule that measures it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from varreg.engine.mechanisms import by_module
from varreg.engine.refusals import BATCH_NORM

if TYPE_CHECKING:
    from varreg.engine.observer import Observer

# The function in which the parameters of each layer meet the batch, for the table before the first
# step. After it, the ledgers have the names of the rules.
_FUNCTIONS: dict[type[nn.Module], str] = {
    nn.Linear: "linear",
    nn.Bilinear: "bilinear",
    nn.Conv1d: "conv",
    nn.Conv2d: "conv",
    nn.Conv3d: "conv",
    nn.ConvTranspose1d: "conv_transpose",
    nn.ConvTranspose2d: "conv_transpose",
    nn.ConvTranspose3d: "conv_transpose",
    nn.Embedding: "embedding",
    nn.EmbeddingBag: "embedding_bag",
    nn.LayerNorm: "layer_norm",
    nn.RMSNorm: "rms_norm",
    nn.GroupNorm: "group_norm",
    nn.InstanceNorm1d: "instance_norm",
    nn.InstanceNorm2d: "instance_norm",
    nn.InstanceNorm3d: "instance_norm",
    BATCH_NORM: "batch_norm",
    nn.MultiheadAttention: "linear",
    nn.LSTM: "lstm",
    nn.GRU: "gru",
    nn.RNN: "rnn",
    nn.LSTMCell: "lstm_cell",
    nn.GRUCell: "gru_cell",
    nn.RNNCell: "rnn_cell",
    nn.PReLU: "prelu",
}

CoverageRow = tuple[str, tuple[int, ...], str, str]


def rows(observer: Observer) -> list[CoverageRow]:
    """Return, for every parameter: name, shape, the rule that measures it, and whether its moments
    are exact.
    """
    groups = observer.grouping.groups
    kind = "exact" if groups is None else f"estimated from {groups} groups"
    if observer.batch_norm == "contribution":
        kind += " (contributions: samples may meet)"
    owners = {
        id(p): type(m)
        for m in observer.model.modules()
        for p in m._parameters.values()
        if p is not None
    }
    table = []
    for name, p in observer.model.named_parameters():
        shape = () if isinstance(p, nn.parameter.UninitializedParameter) else tuple(p.shape)
        if p.requires_grad:
            entry = observer.parameters.known.get(id(p))
            rules = " + ".join(entry[1].rules) if entry else ""
            table.append((name, shape, rules or _rule_before(owners[id(p)]), kind))
        else:
            table.append((name, shape, "-", "frozen"))
    return table


def _rule_before(owner: type[nn.Module]) -> str:
    """Return the rule that will probably measure a module's parameters, before its first
    forward.
    """
    if owner in by_module.MODULE_RULES:
        return f"{owner.__name__} (registered)"
    return next(
        (rule for kind, rule in _FUNCTIONS.items() if issubclass(owner, kind)),
        "followed at the first step",
    )


def text(observer: Observer) -> str:
    """Return the table as text."""
    table = [(n, "×".join(map(str, s)) or "scalar", r, k) for n, s, r, k in rows(observer)]
    cells = [("parameter", "shape", "rule", "moments"), *table]
    widths = [max(len(row[i]) for row in cells) for i in range(4)]
    lines = [
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]
    state = "" if observer.is_on else " (removed)"
    head = f"varreg observer of {type(observer.model).__name__}{state}"
    return "\n".join([head, lines[0], "─" * max(map(len, lines)), *lines[1:]])
