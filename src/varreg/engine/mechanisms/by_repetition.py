"""By repetition: a function without a rule runs unchanged, and the backward pass repeats it for one
group of samples at a time.

The contributions are exact. If they do not add up to the gradient, an error is raised.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from varreg.engine import deferred
from varreg.engine.combined import Grouped
from varreg.engine.marks import mark
from varreg.engine.mechanisms.node import (
    Node,
    Recipient,
    measuring,
    pass_on,
    rounding_of,
    saved_tensors,
    take,
)
from varreg.engine.mechanisms.pull_back import autocast_rounding
from varreg.engine.partition import Partition
from varreg.engine.trace.arguments import results, swap
from varreg.engine.trace.call import Call
from varreg.engine.trace.decide import place_result
from varreg.engine.trace.layout import Lost, Place, narrow
from varreg.engine.trace.trace import Trace
from varreg.errors import MeasurementError
from varreg.thresholds import PARTS_ADD_UP

# ---- forward -------------------------------------------------------------------------------------


def measure(trace: Trace, call: Call) -> Any:
    """Run a call that the backward pass will repeat, and return its result."""
    rule = f"{call.name.strip('_')} (general)"
    recipients = [trace.recipient(t, rule) for t in call.parameters]
    repetition = _Repetition(call, recipients, f"{call.name} in {trace.observer.forward.path()}")
    # a call in place overwrites its input, but the repetition needs it
    before = [x.detach().clone() if call.is_in_place else x for x, _ in call.carriers]
    taps = RepeatNode.apply(repetition, *before, *call.parameters)
    new = {id(t): tap for t, tap in zip(call.parameters, taps, strict=True)}
    out = call.with_arguments(*swap(call.args, call.kwargs, new), ()).run()
    outs = results(out)
    _place_results(trace, call, repetition, before, outs)
    if call.is_in_place:
        repetition.watch(0, outs[0])
        mark(outs[0], repetition.places[0])
        return out
    used = ArriveNode.apply(repetition, *outs)
    for i, at in repetition.places.items():
        mark(used[i], at)
    return used[0] if isinstance(out, Tensor) else type(out)(used)


def _place_results(
    trace: Trace,
    call: Call,
    repetition: _Repetition,
    before: list[Tensor],
    outs: Sequence[Any],
) -> None:
    """Note where each result carries the batch. Refuse results that need a gradient and have no
    place.
    """
    unwritten = {id(x): b for (x, _), b in zip(call.carriers, before, strict=True)}
    carriers = [(b, at) for b, (_, at) in zip(before, call.carriers, strict=True)]
    shown = call.with_arguments(*swap(call.args, call.kwargs, unwritten), carriers)
    for i, t in enumerate(outs):
        if not isinstance(t, Tensor):
            continue
        at = place_result(trace, shown, t, i)
        if isinstance(at, Place):
            repetition.partition = trace.observer.grouping.partition(at.batch)
            repetition.places[i] = at
        elif t.requires_grad:
            why = at.why if isinstance(at, Lost) else "it is a sum over samples"
            trace.refuse(
                call, f"varreg cannot tell which part of its result belongs to which sample: {why}"
            )


class _Repetition:
    """The shared state of two nodes, for a call that the backward pass repeats: its arguments, with
    slots in place of tensors that autograd saves, and the gradients that have arrived.
    """

    def __init__(self, call: Call, recipients: list[Recipient], where: str):
        self.function, self.recipients, self.where = call.function, recipients, where
        self.writes = call.is_in_place
        self.inputs = [at for _, at in call.carriers]
        tensors = [*(t for t, _ in call.carriers), *call.parameters]
        slots = {id(t): _Slot(i) for i, t in enumerate(tensors)}
        self.args, self.kwargs = swap(call.args, call.kwargs, slots)
        self.places: dict[int, Place] = {}  # places of the results that get gradients
        self.partition = Partition(0, 0)
        device = call.parameters[0].device.type
        enabled = torch.is_autocast_enabled(device)
        self.autocast = device, torch.get_autocast_dtype(device), enabled
        self.rounding = autocast_rounding(call.parameters[0])
        self.grads: dict[int, Tensor] = {}

    def watch(self, index: int, out: Tensor) -> None:
        """Note the gradient of a result that was written in place, and stays the same tensor."""
        grads = self.grads

        def note(grad: Tensor | None) -> None:
            if grad is not None:
                grads[index] = grad

        if out.requires_grad:
            out.register_hook(note)

    def contributions(self, saved: Sequence[Tensor]) -> list[Tensor]:
        """Return `[groups, *shape]` for every tensor made of parameters."""
        inputs = saved[: len(self.inputs)]
        parameters = [t.detach().requires_grad_() for t in saved[len(self.inputs) :]]
        rows: list[list[Tensor]] = [[] for _ in parameters]
        for first, last, start, n in self.partition.runs():
            for u in range(last - first):
                a, b = start + u * n, start + (u + 1) * n
                part = [
                    narrow(t.detach(), at, a, b) for t, at in zip(inputs, self.inputs, strict=True)
                ]
                if self.writes:
                    part = [None if t is None else t.clone() for t in part]
                for i, c in enumerate(self._repeat([*part, *parameters], parameters, a, b)):
                    rows[i].append(c)
        return [torch.stack(r) for r in rows]

    def _repeat(
        self, tensors: Sequence[Tensor | None], parameters: list[Tensor], a: int, b: int
    ) -> Sequence[Tensor]:
        """Return the gradients of parameters for the samples `a:b` alone."""
        if any(t is None for t in tensors):  # these samples have no rows here
            return [torch.zeros_like(t) for t in parameters]
        device, dtype, enabled = self.autocast
        with torch.enable_grad(), torch.autocast(device, dtype, enabled=enabled):
            kwargs = {k: _fill_slots(v, tensors) for k, v in self.kwargs.items()}
            outs = results(self.function(*(_fill_slots(x, tensors) for x in self.args), **kwargs))
            pairs = [(outs[i], narrow(g, self.places[i], a, b)) for i, g in self.grads.items()]
            wanted = [(o, g) for o, g in pairs if g is not None]
            grads = torch.autograd.grad(
                [o for o, _ in wanted], parameters, [g for _, g in wanted], allow_unused=True
            )
        return [
            torch.zeros_like(t) if g is None else g for t, g in zip(parameters, grads, strict=True)
        ]


class _Slot(int):
    """The position of a tensor among the arguments of a repeated call."""


def _fill_slots(value: Any, tensors: Sequence[Tensor | None]) -> Any:
    """Return an argument with tensors in its slots."""
    if isinstance(value, _Slot):
        return tensors[value]
    if type(value) in (list, tuple):
        return type(value)([_fill_slots(v, tensors) for v in value])
    return value


# ---- backward ------------------------------------------------------------------------------------


class ArriveNode(Node):
    """Returns the results unchanged, and notes the gradients that arrive at them."""

    @staticmethod
    def forward(ctx: Any, repetition: _Repetition, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.repetition = repetition
        ctx.set_materialize_grads(False)
        return pass_on(ctx, outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.repetition.grads.update({i: g for i, g in enumerate(grads) if g is not None})
        return (None, *grads)

    @staticmethod
    def places(ctx: Any) -> Sequence[Place | None]:
        """Return where each of the results carries the batch."""
        places = ctx.repetition.places
        return [places.get(i) for i in range(max(places, default=-1) + 1)]


class RepeatNode(Node):
    """Stands between the parameters and the function, so that its backward runs last. It repeats
    the function group by group.
    """

    @staticmethod
    def forward(ctx: Any, repetition: _Repetition, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.repetition, ctx.recipients = repetition, repetition.recipients
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        return tuple(t.detach() for t in tensors[len(repetition.inputs) :])

    @staticmethod
    @measuring
    def backward(ctx: Any, *grads: Any) -> Any:
        repetition: _Repetition = ctx.repetition
        n_inputs = len(repetition.inputs)
        edges = ctx.next_functions[n_inputs:]
        if any(g is not None for g in grads) and not repetition.grads:
            raise MeasurementError(
                f"varreg: {repetition.where} has no rule, and no gradient of its result arrived: "
                "code that the engine does not see has replaced the result. Write the result as a "
                "new tensor, and change nothing in place."
            )
        if repetition.grads and repetition.partition.batch:
            contributions = _contributions(repetition, saved_tensors(ctx))
            rounding = rounding_of(list(repetition.grads.values()), repetition.rounding)
            for i, (grad, c) in enumerate(zip(grads, contributions, strict=True)):
                if grad is not None:
                    _check_sum(c, grad, rounding, repetition.where)
                    grouped = Grouped(repetition.partition, c)
                    take([ctx.recipients[i]], [grouped], [edges[i][0]], rounding, is_beside=True)
        repetition.grads.clear()
        return (None, *(None,) * n_inputs, *grads)


def _contributions(repetition: _Repetition, saved: Sequence[Tensor]) -> list[Tensor]:
    """Return contributions by repeating the call. Raise an error if the call cannot run on a part
    of the batch.
    """
    try:
        return repetition.contributions(saved)
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        raise MeasurementError(
            f"varreg: {repetition.where} has no rule, and cannot be repeated for a part of the "
            f"batch: {error}"
        ) from error


def _check_sum(c: Tensor, grad: Tensor, eps: float, where: str) -> None:
    """Refuse contributions that do not add up to the gradient within rounding. If the gradient
    overflowed, there is no check.
    """
    total = c.sum(0)
    if not total.numel():
        return
    units, at_most = PARTS_ADD_UP
    is_off = (total - grad).abs().max() > min(units * eps, at_most) * c.abs().sum(0).max()

    def complain() -> None:
        raise MeasurementError(
            f"varreg: {where} has no rule, and its gradients for parts of the batch do not add "
            "up to its gradient: it mixes samples or is random. Register a rule for its module "
            "with varreg.register_rule, or freeze the parameter."
        )

    deferred.check(is_off & total.isfinite().all() & grad.isfinite().all(), complain)
