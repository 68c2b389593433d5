"""Prepare a step: collect the parameters whose step is regularized, with their moments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from varreg import _torch
from varreg.backends import BACKENDS
from varreg.devices import refuse_fake_mode, widest
from varreg.engine import deferred, processes
from varreg.engine.number_range import choose_precision
from varreg.engine.parameters import LEDGERS
from varreg.engine.totals import Totals
from varreg.errors import VarregError
from varreg.optim import step_warnings
from varreg.optim.from_totals import set_moments
from varreg.optim.gradient import (
    NotFiniteError,
    OverflowedError,
    UnmeasuredError,
    as_seen,
    fetch_products,
    largest_sum,
    products,
)
from varreg.optim.parameter_names import names
from varreg.optim.parameter_step import ParameterStep
from varreg.optim.scopes import SCOPES
from varreg.optim.step import choose, reconsider
from varreg.optim.synchronized import check_synchronized
from varreg.shards import is_sharded, local, total
from varreg.thresholds import LARGEST_SQUARE, SMALLEST_SQUARE

if TYPE_CHECKING:
    from varreg.engine import Moments
    from varreg.engine.ledger import Ledger
    from varreg.optim.base import Regularized


def find_steps(optimizer: Regularized) -> list[ParameterStep]:
    """Return the step of each parameter that has a gradient and is in a group with s > 0, with the
    moments, if there are any. Decide for each whether native code takes it.
    """
    if _torch.dispatch_modes():
        refuse_fake_mode("step()")
    if processes.are_several():
        every = [p for group in optimizer.param_groups for p in group["params"]]
        deferred.take_numbers(ledger for ledger in LEDGERS.find(every) if ledger is not None)
    steps: list[ParameterStep] = []
    with_totals: list[ParameterStep] = []
    for group in optimizer.param_groups:
        if not group["s"]:
            continue
        parameters = [p for p in group["params"] if p.grad is not None and p.numel()]
        increment = optimizer._increment(group)
        for p, ledger in zip(parameters, LEDGERS.find(parameters), strict=True):
            m: Any = None if ledger is None else ledger.read(p, stepping=True)
            state: dict[str, Any] = {} if m is None else optimizer.state[p]
            steps.append(ParameterStep(p, group, increment, ledger, m, state, p.grad))
            if isinstance(m, Totals):
                with_totals.append(steps[-1])
    if with_totals:
        set_moments(optimizer, with_totals)
    choose(optimizer, steps)
    return steps


def judge_steps(optimizer: Regularized, steps: list[ParameterStep]) -> None:
    """Set `regularized` of each step: whether its parameter has the moments that λ needs. Copy the
    values that the base's step will overwrite. For the other parameters, warn why their step is
    the base's own. The optimizer itself does not change yet, since an error may follow.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        check_synchronized(step.parameter for step in steps)
    _set_products(steps)
    missing, has_single_sample = [], False
    for step in steps:
        p, m, ledger = step.parameter, step.moments, step.ledger
        if m is not None and m.count < 2:
            has_single_sample = True
            continue
        try:
            if ledger is None or m is None or m.groups < 2:
                raise UnmeasuredError
            if not step.native:  # native steps have equal shapes
                _check_shapes(optimizer, step, m)
            if step.products is None:
                raise UnmeasuredError
            SS, gS, gg, W = step.products
            # the usual case: the gradient has not changed since it was measured
            seen, step.kappa2 = m.total, 1.0
            if not (SS == gS == gg and SS + gg + m.count * W <= largest_sum(m.total.dtype)):
                grad = local(step.grad) if not step.native else step.grad
                is_same = ledger.is_measured(p)
                seen, step.kappa2 = as_seen(m, grad, step.products, is_same, ledger.precision)
                reconsider(step)
            if step.native:
                takes_gradient = step.increment.kernel.takes_gradient  # type: ignore[union-attr]
                # a copy: some of torch's own steps change p.grad
                step.grad = seen.clone() if takes_gradient and seen is not m.total else m.total
            else:
                _check_by_element(optimizer, step)
                step.grad = seen
            step.regularized = True
        except UnmeasuredError:
            missing.append(p)
        except OverflowedError:
            assert m is not None
            is_changed = not torch.equal(local(step.grad).to(m.total.dtype), m.total)
            step_warnings.warn_overflow(optimizer, p, optimizer._warned, is_changed)
        except NotFiniteError:
            pass  # the base's own step, as in torch
    for step in steps:
        if step.regularized and not step.native:
            _copy_before_base_step(steps)
            break
    if missing:
        step_warnings.warn_missing(optimizer, missing, optimizer._warned)
    if has_single_sample and not any(step.regularized for step in steps):
        step_warnings.warn_single_samples(optimizer, optimizer._warned)


def _set_products(steps: list[ParameterStep]) -> None:
    """Set `step.products` of each step: the products of its gradient and its moments. For sharded
    parameters they are sums over all shards, by one small reduction for all parameters. The
    products also decide the precision of each ledger's next sums.

    Products stay None if they are missing, on this rank or on another, or if the gradient was
    cleared.
    """
    by_kernel: dict[str, tuple[list[ParameterStep], list[tuple[Tensor, ...]]]] = {}
    sharded, others = [], []
    for step in steps:
        p, m, row = step.parameter, step.moments, None
        if step.products is not None:
            continue  # they are known from `Totals`
        if m is not None and (step.native or m.total.shape == local(p).shape):
            device = m.total.device.type
            if step.native or BACKENDS[device].serves(m.total, step.grad, m.square):
                some, rows = by_kernel.setdefault(device, ([], []))
                some.append(step)
                rows.append((m.total, step.grad, m.square))
                continue
            if not is_sharded(p):
                others.append(step)
                continue
            row = widest(products(m, local(step.grad)))
        if is_sharded(p):
            # a fifth number counts the ranks that have products
            zeros = widest(torch.zeros(5, dtype=torch.float32, device=p.device))
            sharded.append((step, zeros if row is None else torch.cat([row, row.new_ones(1)])))
    for device, (some, rows) in by_kernel.items():
        for step, values in zip(some, BACKENDS[device].compare(rows), strict=True):
            step.products = values
    if others or deferred.PENDING:
        fetch_products(others)
    if sharded:
        first: Any = sharded[0][0].parameter
        summed = total(torch.stack([row for _, row in sharded]), first).tolist()
        for (step, _), (*sums, ranks) in zip(sharded, summed, strict=True):
            step.products = sums if ranks == first.device_mesh.size() else None
    for step in steps:
        m, ledger = step.moments, step.ledger
        if step.products is not None and ledger is not None and m is not None and m.groups > 1:
            SS, _, gg, W = step.products
            if gg == 0 != SS and _is_cleared(ledger, step.grad):
                step.products = None
            elif ledger.is_float64 or not (SMALLEST_SQUARE <= W <= LARGEST_SQUARE or SS == W == 0):
                choose_precision(ledger, m, SS, W)


def _is_cleared(ledger: Ledger, grad: Tensor) -> bool:
    """Return whether a gradient that is zero now was cleared after it was measured. Check only on a
    device: on the CPU, the ledger has checked that before.
    """
    return not local(grad).is_cpu and ledger.gradient.is_written(grad)


def _check_by_element(optimizer: Regularized, step: ParameterStep) -> None:
    """Raise a VarregError if each element of a shard has its own κ²."""
    p = step.parameter
    if isinstance(step.kappa2, Tensor) and is_sharded(p):
        raise VarregError(
            f"varreg: the gradient of '{names(optimizer)[p]}' was changed element by element (for "
            "example by clip_grad_value_), and each rank has only a shard of it: varreg cannot "
            "adapt its variance. Clip by norm, or use DistributedDataParallel."
        )


def _copy_before_base_step(steps: list[ParameterStep]) -> None:
    """Copy parameters and gradients: steps by PyTorch need their values before the base's step."""
    by_device: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
    for step in steps:
        if step.native or not step.regularized:
            continue
        step.p = local(step.parameter)
        step.x = torch.empty_like(step.p)
        copies, originals = by_device.setdefault(step.p.device, ([], []))
        copies.append(step.x)
        originals.append(step.p)
        if step.grad is not step.measured.total:
            grad, step.grad = step.grad, torch.empty_like(step.grad)
            copies.append(step.grad)
            originals.append(grad)
    for copies, originals in by_device.values():
        _torch.foreach_copy(copies, originals)


def _check_shapes(optimizer: Regularized, step: ParameterStep, m: Moments) -> None:
    """Raise a VarregError if parameter, moments and history do not fit together."""
    p, group = step.parameter, step.group
    if m.total.shape != local(p).shape:
        raise VarregError(
            f"varreg: parameter '{names(optimizer)[p]}' has shape {tuple(local(p).shape)}, but "
            f"moments of shape {tuple(m.total.shape)}: it was probably replaced after backward(). "
            "Clear its gradient, and call backward() again."
        )
    history = step.state.get("vr_history")
    expected = SCOPES[group["per"]].history_shape(p)
    if history is not None and history.shape != expected:
        raise VarregError(
            f"varreg: the history of parameter '{names(optimizer)[p]}' has shape "
            f"{tuple(history.shape)}; with per={group['per']!r} it must have {tuple(expected)}. It "
            "was begun with another `per`, or for another model. Use the same, or create a new "
            "optimizer."
        )
