"""By rule: the function runs with detached parameters, and a node computes their gradients.

The node's backward calls the function's rule (`rules/`), which returns the contribution of each
sample. The sum of the contributions is the gradient. Some rules do not take over the gradient
(`takes_over=False`, recurrent layers): then autograd computes it, and the rule only measures. So it
is for a parameter with a hook that runs when its gradient is complete: the hook may change the
parameter, and our node would complete the gradient before the function's backward reads its value.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from varreg import _torch
from varreg.engine.marks import mark
from varreg.engine.mechanisms.node import (
    Node,
    Recipient,
    measuring,
    pass_on,
    refuse_changed,
    rounding_of,
    take,
)
from varreg.engine.mechanisms.pull_back import autocast_rounding, eps_of
from varreg.engine.rules import Rule, Use
from varreg.engine.rules.rule import Contributions
from varreg.engine.trace import checkpoints
from varreg.engine.trace.arguments import flatten, refill, results, swap, without_tensors
from varreg.engine.trace.call import Call
from varreg.engine.trace.decide import place_result
from varreg.engine.trace.layout import Place
from varreg.engine.trace.plans import Plan, store_plan
from varreg.engine.trace.trace import Trace

# ---- forward -------------------------------------------------------------------------------------


def measure(trace: Trace, plans: dict[Any, Plan], call: Call, rule: Rule) -> Any:
    """Run a call that a rule measures, and return its result; None if the rule does not apply.
    Store a plan for later calls with the same key.
    """
    bound = rule.bind(call.args, call.kwargs)
    flat = flatten(bound or {})
    parameters = {id(t) for t in call.parameters}
    wanted = {name: i for i, (name, t) in enumerate(flat.items()) if id(t) in parameters}
    if bound is None or not _arguments(wanted) <= rule.serves:
        return None
    if any(t.is_complex() for t in flat.values()):
        return None  # rules multiply real numbers: a complex gradient has conjugates in it
    input_places = {name: at for t, at in call.carriers for name, u in flat.items() if u is t}
    if not _arguments(input_places) <= rule.carries or not input_places:
        return None
    shapes = {name: t.shape for name, t in flat.items()}
    first = next(iter(input_places.values()))
    # a bias depends on the output's gradient alone: save no input for it
    saves = rule.saves if _arguments(wanted) != {"bias"} else frozenset()
    saved = {name: i for i, name in enumerate(flat) if name.partition(".")[0] in saves}
    tensors = list(flat.values())
    positions = _positions(call, [tensors[i] for i in wanted.values()])
    partition = trace.observer.grouping.partition(first.batch)
    if any(t._post_accumulate_grad_hooks for t in call.parameters):
        rule = rule._replace(takes_over=False)
    ledger_of = trace.observer.parameters.ledger
    sums_only = all((ledger := ledger_of(t)) and ledger.sums_only for t in call.parameters)
    arguments = without_tensors(bound)
    use = Use(
        rule,
        wants=wanted,
        saved=saved,
        positions=positions,
        shapes=shapes,
        input_places=input_places,
        output_place=first,
        partition=partition,
        arguments=arguments,
        is_in_lists=not saved.keys() <= arguments.keys(),
    )
    if not rule.when(use):
        return None
    detached = {i: tensors[i].detach() for i in wanted.values()}
    out = _run_detached(use, call.function, call.args, call.kwargs, tensors, detached)
    found = [place_result(trace, call, t, i) for i, t in enumerate(results(out))]
    output_places = tuple(at for at in found if isinstance(at, Place))
    if len(output_places) < len(found):
        return None
    first = output_places[0]
    partition = trace.observer.grouping.partition(first.batch)
    use = use._replace(output_place=first, output_places=output_places, partition=partition)
    if not rule.when(use):
        return None
    recipients = [trace.recipient(tensors[i], rule.name) for i in wanted.values()]
    used = _add_node(use, recipients, out, tensors, detached)
    for t, at in zip(used, output_places, strict=True):
        mark(t, at)
    beside = None
    if sums_only and rule.takes_over and rule.spares_sum(use):
        beside = use._replace(rule=rule._replace(takes_over=False))
    store_plan(plans, call, Plan(use=use, beside=beside), used)
    return used[0] if isinstance(out, Tensor) else type(out)(used)


def replay(
    trace: Trace,
    plan: Plan,
    function: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    tensors: list[Tensor],
    ledgers: list[Any],
) -> Any:
    """Run a call by the plan of an earlier one, and return its result; None if the result does not
    fit the plan.
    """
    use = plan.use
    assert use is not None
    if _torch.saved_tensors_hooks is None or _torch.saved_tensors_hooks(True) is not None:
        checkpoints.note(trace.observer)  # both runs of a checkpoint must save the same tensors
    elif plan.beside is not None:
        for i in use.wants.values():
            if ledgers[i].is_check_due:  # S is compared with p.grad: let p.grad be S
                break
        else:
            use = plan.beside
    detached = {}
    for i in use.wants.values():
        if tensors[i]._post_accumulate_grad_hooks and use.rule.takes_over:
            return None
        detached[i] = tensors[i].detach()
    out = _run_detached(use, function, args, kwargs, tensors, detached)
    if not plan.fits(out):
        return None
    recipients = []
    for i in detached:
        ledgers[i].rules[use.rule.name] = None
        recipients.append(Recipient(trace.observer, tensors[i], [(tensors[i], ledgers[i])]))
    used = _add_node(use, recipients, out, tensors, detached)
    plan.mark(used)
    return used[0] if isinstance(out, Tensor) else type(out)(used)


def _run_detached(
    use: Use,
    function: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    tensors: list[Tensor],
    detached: dict[int, Tensor],
) -> Any:
    """Run a function and return its result. If the rule takes over the gradients of parameters,
    they are detached.
    """
    rule = use.rule
    if rule.takes_over:
        if use.positions is None:
            new = {id(tensors[i]): t for i, t in detached.items()}
            args, kwargs = swap(args, kwargs, new)
        else:
            args = list(args)
            for position, t in zip(use.positions, detached.values(), strict=True):
                if type(position) is int:
                    args[position] = t
                else:
                    kwargs = {**kwargs, str(position): t}
        function = rule.forward or function
    return function(*args, **kwargs)


def _add_node(
    use: Use,
    recipients: list[Recipient],
    out: Any,
    tensors: list[Tensor],
    detached: dict[int, Tensor],
) -> tuple[Tensor, ...]:
    """Return the results, with a node behind them that takes over the gradients of parameters."""
    outs = (out,) if isinstance(out, Tensor) else out
    # saved tensors need no edges: their gradients do not pass through this node
    saved = [detached.get(i, tensors[i]) for i in use.saved.values()]
    used: tuple[Tensor, ...] = RuleNode.apply(
        use, recipients, saved, len(outs), *outs, *map(tensors.__getitem__, detached)
    )
    return used


def _arguments(names: Iterable[str]) -> set[str]:
    """Return the names of arguments, without the positions in them."""
    return {name.partition(".")[0] for name in names}


def _positions(call: Call, parameters: list[Tensor]) -> tuple[int | str, ...] | None:
    """Return positions and names of parameters among the arguments; None if some are in lists."""
    at: list[int | str] = []
    for t in parameters:
        where: list[int | str] = [i for i, a in enumerate(call.args) if a is t]
        where += [name for name, a in call.kwargs.items() if a is t]
        if len(where) != 1:
            return None
        at += where
    return tuple(at)


# ---- backward ------------------------------------------------------------------------------------


def contributions_of(use: Use, grads: list[Any], saved: Sequence[Tensor]) -> Contributions:
    """Return the contributions of the samples to the parameters of a use, by its rule."""
    tensors = dict(zip(use.saved, saved, strict=True))
    if use.is_in_lists:
        return use.rule.run(use, grads, **refill(use.arguments, tensors))
    return use.rule.run(use, grads, **{**use.arguments, **tensors})


class RuleNode(Node):
    """Returns a function's results unchanged, and computes the gradients of the parameters that
    were detached in it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        use: Use,
        recipients: list[Recipient],
        saved: list[Tensor],
        n_outputs: int,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return the results. `tensors` are the results and the parameters; `saved` are the tensors
        that are saved for the rule.
        """
        ctx.use, ctx.recipients, ctx.n_outputs = use, recipients, n_outputs
        is_autocast = _torch.is_any_autocast_enabled()
        ctx.rounding = autocast_rounding(tensors[0]) if is_autocast else 0.0
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        if n_outputs == 1 and tensors[0].is_floating_point():  # the usual case, without a call
            return (tensors[0].detach(),)
        return pass_on(ctx, tensors[:n_outputs])

    @staticmethod
    @measuring
    def backward(ctx: Any, *grads: Any) -> Any:
        use, recipients = ctx.use, ctx.recipients
        try:
            saved: Sequence[Tensor] = ctx.saved_tensors
        except RuntimeError as error:
            refuse_changed(ctx, error)
            raise
        totals: list[Tensor | None] = [None] * len(recipients)
        for g in grads:
            if g is not None:
                break
        else:
            return (None, None, None, None, *grads, *totals)
        contributions = contributions_of(use, list(grads), saved)
        # one edge for each tensor among the inputs; other inputs have none
        edges = ctx.next_functions[ctx.n_outputs : ctx.n_outputs + len(recipients)]
        wanted = tuple(map(contributions.__getitem__, use.wants))
        is_beside = not use.rule.takes_over
        if len(grads) == 1:
            rounding = max(ctx.rounding, eps_of(g.dtype))
        else:
            rounding = rounding_of(grads, ctx.rounding)
        nodes, _ = zip(*edges, strict=True)
        sums = take(recipients, wanted, nodes, rounding, is_beside)
        if not is_beside:  # else autograd computes the gradients
            totals = sums
        return (None, None, None, None, *grads, *totals)

    @staticmethod
    def places(ctx: Any) -> Sequence[Place | None]:
        """Return where each of the results carries the batch."""
        output_places: tuple[Place, ...] = ctx.use.output_places
        return output_places
