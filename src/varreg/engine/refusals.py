"""Models and inputs that cannot be observed, and the errors that say what was found, why it is
refused, and what to do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from varreg import _torch
from varreg.engine import deferred
from varreg.engine.parameters import LEDGERS
from varreg.engine.totals import PER
from varreg.errors import MeasurementError, VarregError

if TYPE_CHECKING:
    from varreg.engine.observer import Observer

BATCH_NORM = _torch.BatchNorm
TRACEABLE = "_varreg_traceable_call"
"""The attribute of the function that calls an observed model (`forward.make_traceable_call`)."""


def is_traceable_call(function: Any) -> bool:
    """Return whether a function is the traceable call of an observed model."""
    return TRACEABLE in getattr(function, "__dict__", ())


def _is_compiled(module: nn.Module) -> bool:
    dynamo = sys.modules.get("torch._dynamo")  # not imported by us: it takes a second
    compiled = module._compiled_call_impl
    return (compiled is not None and not is_traceable_call(compiled)) or (
        dynamo is not None and isinstance(module, dynamo.OptimizedModule)
    )


def describe_module(name: str, module: nn.Module) -> str:
    """Return a module's path and type, for messages."""
    kind = type(module).__name__
    return f"'{name}' ({kind})" if name else f"the model itself ({kind})"


def check_options(model: Any, groups: Any, reduction: Any, batch_dim: Any, batch_norm: Any) -> None:
    """Raise a VarregError for values that `observe` does not accept."""
    if not isinstance(model, nn.Module):
        raise VarregError(f"varreg: observe expects a torch.nn.Module, got {type(model).__name__}.")
    if groups is not None and (
        isinstance(groups, bool) or not isinstance(groups, int) or groups < 1
    ):
        raise VarregError(
            "varreg: groups must be a positive whole number, or None for exact moments; got "
            f"{groups!r}."
        )
    if reduction not in ("mean", "sum"):
        raise VarregError(
            "varreg: reduction must be 'mean' or 'sum', whichever the loss does over samples; got "
            f"{reduction!r}."
        )
    if isinstance(batch_dim, bool) or not isinstance(batch_dim, int) or batch_dim < 0:
        raise VarregError(f"varreg: batch_dim must be a whole number from 0 up; got {batch_dim!r}.")
    if batch_norm not in ("refuse", "contribution"):
        raise VarregError(
            f"varreg: batch_norm must be 'refuse' or 'contribution'; got {batch_norm!r}."
        )


def check_norms(norms: Any, groups: Any) -> None:
    """Refuse norms of single samples where groups are measured."""
    if not isinstance(norms, bool):
        raise VarregError(f"varreg: norms must be True or False; got {norms!r}.")
    if norms and groups is not None:
        raise VarregError(
            f"varreg: norms=True is for single samples, and groups={groups} adds them up. Leave "
            "groups out."
        )


def check_per(per: Any, groups: Any) -> None:
    """Refuse an unknown `per`, and groups where sums over elements are kept."""
    if per not in PER:
        raise VarregError(f"varreg: per must be one of {', '.join(map(repr, PER))}; got {per!r}.")
    if per != "element" and groups is not None:
        raise VarregError(
            f"varreg: per={per!r} measures single samples at almost no cost, and groups={groups} "
            "would only make it less precise. Leave groups out."
        )


def check_model(
    model: nn.Module, batch_norm: str, is_observed: Callable[[nn.Module], bool]
) -> None:
    """Refuse a model that cannot be observed."""
    for name, m in model.named_modules():
        where = describe_module(name, m)
        if _is_compiled(m):
            raise VarregError(
                f"varreg: {where} is compiled, and compiled code ignores the engine. Call "
                "observe() first, torch.compile after."
            )
        if isinstance(m, torch.jit.ScriptModule):
            raise VarregError(
                f"varreg: {where} is a TorchScript module, which the engine cannot follow. Observe "
                "the original module."
            )
        if isinstance(m, nn.DataParallel):
            raise VarregError(
                f"varreg: {where} is DataParallel, which runs copies of the model. Use "
                "DistributedDataParallel."
            )
        if is_observed(m):
            raise VarregError(
                f"varreg: {where} is already observed, with other options or as part of another "
                "model. Call remove() on its observer first; observe() of the same model with the "
                "same options returns it."
            )
        if isinstance(m, nn.Embedding | nn.EmbeddingBag) and (m.sparse or m.scale_grad_by_freq):
            which = "sparse" if m.sparse else "scale_grad_by_freq"
            raise VarregError(
                f"varreg: {where} has {which}=True, which is not supported; set it to False."
            )
        if batch_norm == "refuse" and isinstance(m, BATCH_NORM) and m.training:
            raise VarregError(batch_norm_message(where))
    parameters = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if not parameters:
        raise VarregError(
            f"varreg: {type(model).__name__} has no parameter that requires a gradient: there is "
            "nothing to observe."
        )
    for name, p in parameters:
        if p.is_complex():
            raise VarregError(
                f"varreg: parameter '{name}' is complex, which is not supported. Use its real view "
                "(torch.view_as_real)."
            )
        if LEDGERS.get(p) is not None:
            raise VarregError(
                f"varreg: parameter '{name}' is already observed, through another model. Call "
                "remove() on that observer first."
            )


def batch_norm_message(where: str) -> str:
    """Return the message about BatchNorm in training."""
    return (
        f"varreg: {where} is BatchNorm in training: it makes every sample's gradient depend on the "
        "others, so a per-sample variance does not exist. Use GroupNorm or LayerNorm; or put the "
        "layer in eval mode; or pass observe(..., batch_norm='contribution') to measure each "
        "sample's contribution to the gradient instead."
    )


def refuse_batch_norm(observer: Observer, args: Any, kwargs: dict[str, Any]) -> None:
    """Refuse a call of `F.batch_norm` in training, wherever it comes from."""
    training = args[5] if len(args) > 5 else kwargs.get("training", False)
    if training and observer.batch_norm == "refuse" and torch.is_grad_enabled():
        raise VarregError(batch_norm_message(observer.forward.path()))


def refuse_gradient(message: str) -> Callable[[Tensor | None], None]:
    """Return a tensor hook that raises if a gradient that is not zero arrives."""

    def complain() -> None:
        raise MeasurementError(message)

    def refuse(grad: Tensor | None) -> None:
        if grad is None:  # None stands for zeros
            return
        if _torch.is_transform_active():  # its values cannot be read
            complain()
        deferred.check(grad.any(), complain)

    return refuse


def derived_output_message(shape: tuple[int, ...], names: str) -> str:
    """Return the message about an output that is made of parameters alone."""
    return (
        f"varreg: an output of the observed model, of shape {shape}, was made of parameters alone "
        f"({names}), or of inputs that varreg could not find (tensors in sequences, mappings and "
        "dataclasses are found), so its gradient cannot be divided among the samples. Let the "
        "model combine it with the batch, or freeze those parameters."
    )


def refuse_transform(model: nn.Module) -> None:
    """Refuse to run if a transform, an export or a trace runs the whole model: it would record our
    nodes. A transform inside of the forward is handled by `Tracer.run_new`.
    """
    what = "a torch.func transform (grad, vmap, jvp)"
    if torch.compiler.is_exporting():
        what = "torch.export"
    elif _torch.jit_tracing_state() is not None:
        what = "torch.jit.trace"
    elif _torch.forward_ad._current_level >= 0:
        what = "forward-mode differentiation (torch.autograd.forward_ad, torch.func.jvp)"
    raise VarregError(
        f"varreg: {what} runs {describe_module('', model)}, which is observed, and would record "
        "the engine in place of the model. Call remove() on the observer first, or use "
        "copy.deepcopy(model), which is not observed."
    )
