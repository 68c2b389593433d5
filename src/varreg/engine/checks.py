"""What cannot be observed, and the errors that say so: what was found, why it cannot be, what to do."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from varreg.engine.ledger import LEDGERS, Ledger

BATCH_NORM = nn.modules.batchnorm._BatchNorm


def _is_compiled(module: nn.Module) -> bool:
    dynamo = sys.modules.get("torch._dynamo")  # not imported by us: it takes a second
    return module._compiled_call_impl is not None or (dynamo is not None and isinstance(module, dynamo.OptimizedModule))


def place(name: str, module: nn.Module) -> str:
    """A module's path and type, for messages."""
    kind = type(module).__name__
    return f"'{name}' ({kind})" if name else f"the model itself ({kind})"


def check_options(model: Any, groups: Any, reduction: Any, batch_dim: Any, batch_norm: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"varreg: observe expects a torch.nn.Module, got {type(model).__name__}.")
    if groups is not None and (isinstance(groups, bool) or not isinstance(groups, int) or groups < 1):
        raise ValueError(f"varreg: groups must be a positive whole number, or None for exact moments; got {groups!r}.")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"varreg: reduction must be 'mean' or 'sum', whichever the loss does over samples; got {reduction!r}.")
    if isinstance(batch_dim, bool) or not isinstance(batch_dim, int) or batch_dim < 0:
        raise ValueError(f"varreg: batch_dim must be a whole number from 0 up; got {batch_dim!r}.")
    if batch_norm not in ("refuse", "contribution"):
        raise ValueError(f"varreg: batch_norm must be 'refuse' or 'contribution'; got {batch_norm!r}.")


def check_model(model: nn.Module, batch_norm: str, is_observed: Callable[[nn.Module], bool]) -> None:
    for name, m in model.named_modules():
        where = place(name, m)
        if _is_compiled(m):
            raise ValueError(
                f"varreg: {where} is compiled, and compiled code ignores the engine. Call observe() first, torch.compile after."
            )
        if isinstance(m, torch.jit.ScriptModule):
            raise ValueError(
                f"varreg: {where} is a TorchScript module, which the engine cannot follow. Observe the original module."
            )
        if isinstance(m, nn.DataParallel):
            raise ValueError(f"varreg: {where} is DataParallel, which runs copies of the model. Use DistributedDataParallel.")
        if is_observed(m):
            raise ValueError(
                f"varreg: {where} is already observed, itself or as part of a model. Call remove() on its observer first."
            )
        if isinstance(m, nn.Embedding | nn.EmbeddingBag) and (m.sparse or m.scale_grad_by_freq):
            which = "sparse" if m.sparse else "scale_grad_by_freq"
            raise ValueError(f"varreg: {where} has {which}=True, which is not supported; set it to False.")
        if batch_norm == "refuse" and isinstance(m, BATCH_NORM) and m.training:
            raise ValueError(batch_norm_message(where))
    parameters = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if not parameters:
        raise ValueError(
            f"varreg: {type(model).__name__} has no parameter that requires a gradient: there is nothing to observe."
        )
    for name, p in parameters:
        if p.is_complex():
            raise ValueError(
                f"varreg: parameter '{name}' is complex, which is not supported. Use its real view (torch.view_as_real)."
            )
        if LEDGERS.get(p) is not None:
            raise ValueError(
                f"varreg: parameter '{name}' is already observed, through another model. Call remove() on that observer first."
            )


def batch_norm_message(where: str) -> str:
    return (
        f"varreg: {where} is BatchNorm in training: it makes every sample's gradient depend on the others, so a per-sample variance "
        "does not exist. Use GroupNorm or LayerNorm; or put the layer in eval mode; or pass observe(..., batch_norm='contribution') "
        "to measure each sample's contribution to the gradient instead."
    )


def refuse_gradient(message: str) -> Callable[[Tensor], None]:
    """Return a tensor hook that raises when a gradient arrives. Zeros may pass: they are nobody's."""

    def refuse(grad: Tensor) -> None:
        if bool(grad.any()):
            raise RuntimeError(message)

    return refuse


def derived_output_message(shape: tuple[int, ...], names: str) -> str:
    return (
        f"varreg: an output of the observed model, of shape {shape}, was made of parameters alone ({names}), or of "
        "inputs that varreg could not find (tensors in sequences, mappings and dataclasses are found), "
        "so its gradient cannot be told apart by samples. Let the model combine it with the batch, or "
        "freeze those parameters."
    )


def refuse_inputs(inputs: Sequence[Tensor], path: Callable[[], str]) -> None:
    """Refuse inputs of kinds that have no rows to follow."""
    for t in inputs:
        if t.is_nested or t.layout is not torch.strided:
            kind = "a nested tensor" if t.is_nested else f"a tensor of layout {t.layout}"
            raise ValueError(
                f"varreg: an input of {path()} is {kind}, in which samples cannot be followed. Pass padded, dense tensors."
            )


def refuse_transforms(model: nn.Module) -> None:
    """Refuse to run where something else than training runs the model: it would see our nodes."""
    what = None
    if torch.compiler.is_exporting():
        what = "torch.export"
    elif torch._C._get_tracing_state() is not None:
        what = "torch.jit.trace"
    elif torch.autograd.forward_ad._current_level >= 0:
        what = "forward-mode differentiation (torch.autograd.forward_ad, torch.func.jvp)"
    elif torch._C._are_functorch_transforms_active():
        what = "a torch.func transform (grad, vmap, jvp)"
    if what is not None:
        raise ValueError(
            f"varreg: {what} runs {place('', model)}, which is observed: it would record the engine in place of "
            "the model. Call remove() on the observer first, or use copy.deepcopy(model), which is not "
            "observed."
        )


def rounding_of(grad: Tensor, ledger: Ledger) -> float:
    """How far rounding alone takes a gradient from what was measured.

    It is relative to what was added up: √(m·ΣW), which no cancellation among samples makes small, and
    where uses, or the pieces of a pull-back, may cancel in each sample, the size of those.
    """
    assert ledger.square is not None
    eps = max(torch.finfo(grad.dtype).eps, ledger.precision)
    return eps * (math.sqrt(ledger.count * float(ledger.square.sum())) + 2 * ledger.added)


def _slack(grad: Tensor, ledger: Ledger) -> float:
    """Return the part of a gradient that may come from elsewhere unnoticed."""
    return min(0.01, math.sqrt(max(torch.finfo(grad.dtype).eps, ledger.precision)))


def check_whole(p: Tensor, ledger: Ledger) -> None:
    """Is what was measured all that went into `p.grad`? A use outside of the model's forward is not seen.

    Hooks on the parameter and reductions over ranks change `p.grad` on purpose; there, nothing is checked.
    """
    if p.grad is None or ledger.total is None or not ledger.whole or p._backward_hooks:
        return
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return
    coarse = max(torch.finfo(p.grad.dtype).eps, ledger.precision) > 1e-4
    if coarse and ledger.shared:  # several uses, and what they cancel in each sample is not in the sums: rounding has no bound
        return
    total, grad = ledger.total, p.grad.to(ledger.total.dtype)
    if torch.equal(total, grad):  # which is one look at each, where what follows takes many
        return
    gap, size = (total - grad).norm(), max(grad.norm(), total.norm())
    if torch.isfinite(gap) and gap > _slack(p.grad, ledger) * size + 2 * rounding_of(p.grad, ledger):
        raise RuntimeError(
            f"varreg: '{ledger.name}' received a gradient from outside of the observed model's forward (its norm is "
            f"{float(grad.norm()):.4g}; what was measured has {float(total.norm()):.4g}). Move that use of the parameter into a "
            "forward() of the model, or clear gradients before the first observed backward(). A penalty on weights belongs into the "
            "optimizer's weight_decay: it is no sample's."
        )
