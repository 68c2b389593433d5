"""Values of the batch that leave torch (`item()`, NumPy) and may return as constants. A second run
of the forward with other samples tests whether these values make samples depend on each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from varreg import _torch
from varreg.engine.marks import mark_of
from varreg.engine.mechanisms.node import BackwardRuns
from varreg.engine.trace.arguments import tensors_of
from varreg.engine.trace.layout import Place, Ragged, Summed, Where
from varreg.engine.trace.trace import UNKNOWNS
from varreg.engine.trace.trial import Verdict, undisturbed
from varreg.engine.trace.trial.alone import depends_on_number
from varreg.engine.trace.trial.rerun import try_forward
from varreg.errors import VarregError

if TYPE_CHECKING:
    from varreg.engine.observer import Observer


SCRIPTED = "a scripted function"
_UNCERTAIN = (*UNKNOWNS, SCRIPTED)
"""Names of escapes for which nothing shows that values of the batch left torch."""


def try_escapes(
    observer: Observer,
    module: nn.Module,
    args: Any,
    kwargs: dict[str, Any],
    inputs: list[Tensor],
    outputs: list[Tensor],
) -> None:
    """Run the forward again with other samples, once, if values of the batch left torch. Refuse the
    model if samples depend on each other, or if the test was not possible.
    """
    trace, verdicts = observer.tracer.trace, observer.tracer.verdicts
    if not trace.escapes:
        return
    if _torch.current_graph_task() != -1:
        return  # a checkpoint runs the forward again
    # a forward with a backward inside of it must not run again
    ran_backward = trace.backwards != BackwardRuns.backwards
    if ran_backward and all(name in _UNCERTAIN for name, *_ in trace.escapes):
        return
    left = [
        key
        for key, numbers in trace.escapes.items()
        if verdicts.is_record(key, numbers) | verdicts.is_due(("escape", *key))
    ]
    if not left:
        return
    function, path, _ = left[0]
    is_hint = function == SCRIPTED  # it is not known whether the model calls one
    if not is_hint and any(ledger.is_sharded for _, ledger in observer.parameters):
        observer.notices.untried_escape(path, function)
        return
    given, wanted = _placed(inputs, outputs)
    passed = {id(t) for t in tensors_of((args, kwargs))}  # a hook may have replaced inputs
    given = [(t, at) for t, at in given if id(t) in passed]
    if not wanted:
        return  # no tensor that could depend on the value gets a gradient
    if is_hint and any(isinstance(where, Ragged) for _, where in wanted):
        return  # samples are in another order: another check refuses that, with a better reason
    verdict, why = Verdict.UNDECIDED, "no input of it carries the batch"
    if ran_backward:
        why = "a backward runs inside of the forward, and must not run again"
    elif given:
        early = any(verdicts.is_early(("escape", *key)) for key in left)
        by_number = trace.has_row_per_sample or any(
            trace.batch in b.shape for b in observer.model.buffers()
        )
        with undisturbed():
            verdict, why = try_forward(
                observer.model, module, args, kwargs, given, wanted, early, not by_number
            )
    if verdict is Verdict.APART or (is_hint and verdict is Verdict.UNDECIDED):
        return
    for key in left:
        verdicts.forget(("escape", *key))
    if verdict is Verdict.MIXED:
        result = (
            "with other samples beside it, a sample's output changes: a sample has no gradient of "
            "its own"
        )
    else:
        result = (
            "varreg could not try whether they come back and make samples depend on each other "
            f"({why})"
        )
    raise VarregError(
        f"varreg: in {path}, {function} takes values of the batch out of torch, and {result}. "
        "Compute it for each sample, or before forward() and pass it as an input; or observe(..., "
        "batch_norm='contribution') to measure each sample's contribution to the gradient instead."
    )


def try_alone(
    observer: Observer,
    module: nn.Module,
    args: Any,
    kwargs: dict[str, Any],
    inputs: list[Tensor],
    outputs: list[Tensor],
) -> None:
    """Warn, once, if a sample's outputs depend on the number of samples. This is tested if the
    forward used a number that could be the number of samples, or if values of the batch left torch.
    """
    trace, verdicts = observer.tracer.trace, observer.tracer.verdicts
    if trace.batch <= 1 or trace.lets_samples_meet:
        return
    if not verdicts.is_due("alone") or not verdicts.is_early("alone"):
        return
    if _torch.current_graph_task() != -1 or trace.backwards != BackwardRuns.backwards:
        return  # a checkpoint runs the forward again, or a backward ran inside of it
    if trace.has_row_per_sample or any(ledger.is_sharded for _, ledger in observer.parameters):
        return
    given, wanted = _placed(inputs, outputs)
    if not (given and wanted):
        return
    with undisturbed():
        if depends_on_number(observer.model, module, args, kwargs, given, wanted):
            observer.notices.counted(observer.forward.path(), trace.batch)


def _placed(
    inputs: list[Tensor], outputs: list[Tensor]
) -> tuple[list[tuple[Tensor, Place]], list[tuple[int, Where]]]:
    """Return the places of the inputs, and the outputs that get a gradient, by their positions."""
    given = [(t, at) for t in inputs if isinstance(at := mark_of(t), Place)]
    wanted: list[tuple[int, Where]] = [
        (i, where)
        for i, t in enumerate(outputs)
        if t.requires_grad and isinstance(where := mark_of(t), Place | Summed)
    ]
    return given, wanted
