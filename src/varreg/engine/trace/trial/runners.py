"""Turn a call of a torch function into a function of the tensors that carry the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from varreg.engine.trace.arguments import swap
from varreg.engine.trace.call import Call
from varreg.engine.trace.trial.trial_values import Run, random_like, same_random_numbers


def fixed_tensors(call: Call) -> list[Tensor]:
    """Return the tensors among a call's arguments that do not carry the batch."""
    carriers = {id(x) for x, _ in call.carriers}
    return [t for t in call.tensors() if id(t) not in carriers]


def with_other_constants(call: Call) -> Call | None:
    """Return the call with random numbers in place of constants; None if it has no constants."""
    known = {id(t) for t, _ in call.lost} | {id(t) for t in call.summed}
    constants = [t for t in fixed_tensors(call) if not t.requires_grad and id(t) not in known]
    return _with_random(call, constants, positive=True)


def with_other_parameters(call: Call) -> Call | None:
    """Return the call with random numbers in place of tensors made of parameters; None if it has no
    such tensors. Parameters that are zero or the identity at first change in training.
    """
    known = {id(t) for t, _ in call.lost} | {id(t) for t in call.summed}
    made = [t for t in fixed_tensors(call) if t.requires_grad and id(t) not in known]
    return _with_random(call, made, positive=False)


def _with_random(call: Call, tensors: list[Tensor], positive: bool) -> Call | None:
    """Return the call with random numbers in place of these tensors; None if it takes none."""
    other = {id(t): random_like(t.detach(), positive) for t in tensors if _is_number(t)}
    if not other:
        return None
    new = call.with_arguments(*swap(call.args, call.kwargs, other), call.carriers)
    new.parameters, new.lost, new.summed = call.parameters, call.lost, call.summed
    return new


def _is_number(t: Tensor) -> bool:
    """Return whether random numbers may replace the values of a tensor. Those of an index may not
    be replaced.
    """
    return t.layout is torch.strided and (t.is_floating_point() or t.is_complex())


def make_runner(call: Call, which: int, dtype: torch.dtype | None) -> tuple[Run, list[Tensor]]:
    """Return one result of a call as a function of the tensors that carry the batch, and these
    tensors.

    Floating-point tensors are cast to `dtype`; None leaves them as they are.
    """
    ids = [id(x) for x, _ in call.carriers]

    def cast(t: Tensor) -> Tensor:
        return t.to(dtype) if dtype is not None and t.is_floating_point() else t

    fixed = {id(t): cast(t.detach()) for t in fixed_tensors(call)}

    def run(inputs: list[Tensor]) -> list[Tensor]:
        # Copies, since the function may write into its arguments.
        copies = {k: t.clone() for k, t in fixed.items()}
        copies |= dict(zip(ids, inputs, strict=True))
        if not any(t.requires_grad for t in inputs):
            copies |= {k: t.clone() for k, t in zip(ids, inputs, strict=True)}
        args, kwargs = swap(call.args, call.kwargs, copies)
        with same_random_numbers(inputs):
            out = call.function(*args, **kwargs)
        if out is None:  # `t[index] = value`
            return [args[0]]
        return [out if isinstance(out, Tensor) else list(out)[which]]

    return _without_gradients(run), [cast(x.detach()).clone() for x, _ in call.carriers]


def _without_gradients(run: Run) -> Run:
    """Return the function, without a graph if no input requires a gradient."""

    def run_plain(inputs: list[Tensor]) -> list[Tensor]:
        if any(t.requires_grad for t in inputs):
            return run(inputs)
        with torch.no_grad():
            return [t.detach() for t in run(inputs)]

    return run_plain


def add_gradients(forward: Run, inputs: list[Tensor], out: Tensor) -> Run | None:
    """Return a function that also returns the vector-Jacobian product; None if the function has no
    gradient.

    It takes the inputs and a cotangent, and returns the output and the gradients of the inputs.
    """
    if not (out.is_floating_point() and any(t.is_floating_point() for t in inputs)):
        return None

    def run(values: list[Tensor]) -> list[Tensor]:
        *values, cotangent = values
        with torch.enable_grad():
            leaves = [t.detach().clone() for t in values]
            variables = [t.requires_grad_() for t in leaves if t.is_floating_point()]
            # Products with 1 are not leaves, so the function may write into them.
            result = forward([t.mul(1) if t.requires_grad else t for t in leaves])[0]
            if not result.requires_grad:
                return [result.detach(), *(torch.zeros_like(t) for t in variables)]
            options: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
            grads = torch.autograd.grad([result], variables, [cotangent], **options)
        return [result.detach(), *grads]

    return run
