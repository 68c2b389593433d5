"""Check whether a checkpoint fits a run. Each function returns a fault in words, or an empty
text.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from varreg.lab import schema


def tensors_fault(was: dict[str, Any], now: dict[str, Any], what: str) -> str:
    """Return the fault of tensors: one is missing, unknown, or of another shape or dtype. torch
    itself would convert dtypes without a word.
    """
    if set(was) != set(now):
        return f"other names in its {what}: {', '.join(map(repr, sorted(set(was) ^ set(now))[:3]))}"
    for name, t in now.items():
        if isinstance(t, Tensor) and _form(was[name]) != _form(t):
            return f"{_form(was[name])} for {name!r} of its {what}, which is {_form(t)}"
    return ""


def _form(value: Any) -> str:
    """Return dtype and shape of a tensor, in words; of anything else its kind."""
    if not isinstance(value, Tensor):
        return schema.kind(value)
    return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"


def optimizer_fault(was: dict[str, Any], optimizer: Any) -> str:
    """Return the fault of an optimizer's state: an option or an entry does not fit this
    optimizer.
    """
    if fault := schema.table_fault(was, {"state": schema.is_table}):
        return f"an optimizer with {fault}"
    old, new = was.get("param_groups"), optimizer.state_dict()["param_groups"]
    if not isinstance(old, list) or len(old) != len(new) or not all(map(schema.is_table, old)):
        return "other groups of parameters in its optimizer"
    for a, b in zip(old, new, strict=True):
        if not set(b) <= set(a) or a["params"] != b["params"]:  # a step may add options
            return "other options or parameters in its optimizer"
    params = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
    for i, state in was["state"].items():
        if i not in params or not schema.is_table(state):
            return f"a state of its optimizer for an unknown parameter {i!r}"
        for key, t in state.items():
            if isinstance(t, Tensor) and t.dtype not in _state_dtypes(t, params[i]):
                return (
                    f"{_form(t)} for {key!r} of its optimizer, of a parameter of {_form(params[i])}"
                )
    return ""


def _state_dtypes(state: Tensor, p: Tensor) -> tuple[torch.dtype, ...]:
    """Return the dtypes that a parameter's state may have. For half precision, sums are float32."""
    if not state.is_floating_point() or not state.dim() or state.shape != p.shape:
        return (state.dtype,)
    return (p.dtype, torch.float32) if p.dtype.itemsize < 4 else (p.dtype,)
