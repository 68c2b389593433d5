"""The shared parts of all mechanisms: nodes in the graph where parameters are used on the batch,
and recipients, which add the measured contributions to ledgers.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from varreg import _torch
from varreg.devices import without_autocast
from varreg.engine.contribution import Contribution, Weight
from varreg.engine.mechanisms.pull_back import PullBack, eps_of
from varreg.engine.partition import Partition
from varreg.engine.trace.layout import Place
from varreg.errors import MeasurementError
from varreg.memory import empty_like
from varreg.thresholds import LARGE_PAGES

if TYPE_CHECKING:
    from varreg.engine.ledger import Ledger
    from varreg.engine.observer import Observer


class Node(torch.autograd.Function):
    """A node of varreg in the autograd graph. Its context has `recipients`, which take the measured
    contributions.

    A subclass that knows where its outputs carry the batch defines `places(ctx)`.
    """

    def __init_subclass__(cls) -> None:
        places = getattr(cls, "places", None)
        if places is not None:
            _PLACES[f"{cls.__name__}Backward"] = places

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Put the node into the graph.

        This skips checks of torch, and takes a fourth of the time. Under a torch.func transform
        (vmap, grad), torch's own version raises an error.
        """
        if _torch.is_transform_active():
            return super().apply(*args)
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]


_PLACES: dict[str, Callable[[Any], Sequence[Place | None]]] = {}


def places_of(node: Any) -> Sequence[Place | None] | None:
    """Return where each output of one of our nodes carries the batch; None for other nodes."""
    places = _PLACES.get(node.name())
    return None if places is None else places(node)


def pass_on(ctx: Any, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return a node's inputs as its outputs; whole numbers have no gradient."""
    outputs, integers = [], []
    for t in tensors:
        out = t.detach()
        outputs.append(out)
        if not (out.is_floating_point() or out.is_complex()):
            integers.append(out)
    if integers:
        ctx.mark_non_differentiable(*integers)
    return tuple(outputs)


# ---- the backward half ---------------------------------------------------------------------------


class BackwardRuns:
    """The number of backward runs of all nodes of varreg, in all models."""

    backwards = 0
    received: dict[int, Sequence[Tensor | None]] | None = None
    """In a trial, the gradients that each node received, by its id. A hook may have changed them
    after they arrived."""


def measuring(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the backward of a node that measures: refuse second derivatives, and switch autocast
    off.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        BackwardRuns.backwards += 1
        compiled = sys.modules.get(_COMPILED_AUTOGRAD)
        if compiled is not None and compiled.in_compiled_autograd_region:
            refuse_compiled_autograd()
        if BackwardRuns.received is not None:
            BackwardRuns.received[id(ctx)] = grads
        if torch.is_grad_enabled():
            _refuse_second_order(ctx)
        if not _torch.is_any_autocast_enabled():
            return backward(ctx, *grads)
        device = next((g.device for g in grads if g is not None), torch.device("cpu"))
        with without_autocast(device):
            return backward(ctx, *grads)

    return run


def saved_tensors(ctx: Any) -> Sequence[Tensor]:
    """Return the tensors that a node saved for its measurement. Raise a MeasurementError if one was
    written to since then.

    torch also raises for tensors that it saves itself. But it does not save all tensors that a
    measurement needs: `einsum` may save a copy, and a function without a gradient saves nothing.
    """
    try:
        saved: Sequence[Tensor] = ctx.saved_tensors
    except RuntimeError as error:
        refuse_changed(ctx, error)
        raise
    return saved


def refuse_changed(ctx: Any, error: RuntimeError) -> None:
    """Raise a MeasurementError if torch's error is that a saved tensor was changed in place."""
    if "modified by an inplace operation" not in str(error):
        return
    which = ", ".join(f"'{ledger.name}'" for r in ctx.recipients for _, ledger in r.leaves)
    raise MeasurementError(
        f"varreg: a tensor that was used with {which} was changed in place later in the "
        "forward pass, or reshaped in place, and its values are needed to measure that use. "
        "Change a copy: for example, y = x.unsqueeze(0) in place of x.unsqueeze_(0). torch says: "
        f"{str(error).partition(' Hint')[0]}"
    ) from error


_COMPILED_AUTOGRAD = "torch._dynamo.compiled_autograd"  # a module that varreg does not import


def refuse_compiled_autograd() -> None:
    """Raise a MeasurementError if compiled autograd runs, which would not measure."""
    module = sys.modules.get(_COMPILED_AUTOGRAD)
    if module is None or not module.in_compiled_autograd_region:
        return
    raise MeasurementError(
        "varreg: compiled autograd runs the backward pass of an observed model, and would not "
        "measure it. Set torch._dynamo.config.compiled_autograd = False; torch.compile itself "
        "works."
    )


def _refuse_second_order(ctx: Any) -> None:
    names = [ledger.name for recipient in ctx.recipients for _, ledger in recipient.leaves]
    who = ", ".join(f"'{n}'" for n in dict.fromkeys(names)) or "an observed parameter"
    raise MeasurementError(
        f"varreg: {who}: a backward pass with create_graph=True runs through an observed model, "
        "and second derivatives would miss the observed parameters. Compute them on an unobserved "
        "model: call observer.remove() first, or use copy.deepcopy(model)."
    )


def rounding_of(grads: Sequence[Tensor | None], at_least: float) -> float:
    """Return the unit of rounding of the coarsest gradient."""
    rounding = at_least
    for g in grads:
        if g is not None:
            rounding = max(rounding, eps_of(g.dtype))
    return rounding


# ---- recipients ----------------------------------------------------------------------------------


class Recipient:
    """Takes contributions to a tensor, and adds them to the ledgers of the parameters that the
    tensor is made of. It lives as long as the graph of its use.
    """

    __slots__ = ("dtype", "forward", "leaves", "observer", "pull_back")

    def __init__(
        self,
        observer: Observer,
        t: Tensor,
        leaves: list[tuple[Tensor, Ledger]],
        rows: Tensor | None = None,
    ):
        self.observer, self.leaves = observer, leaves
        self.dtype = t.dtype
        self.forward = observer.forward.number
        # contributions to a parameter itself need no pull-back
        is_direct = len(leaves) == 1 and leaves[0][0] is t
        self.pull_back = None if is_direct else PullBack(t, leaves, rows)
        for _, ledger in leaves:
            ledger.uses.add(id(self))

    def __del__(self) -> None:
        """Remove the use from the ledgers: its graph is gone, and no contribution will arrive."""
        for _, ledger in self.leaves:
            ledger.uses.discard(id(self))


def take(
    recipients: Sequence[Recipient],
    contributions: Sequence[Contribution],
    nodes: Sequence[Any],
    rounding: float = 0.0,
    is_beside: bool = False,
) -> list[Tensor | None]:
    """Add the contributions of one use to the ledgers of its recipients, and return their sums. A
    recipient that the running backward does not reach adds nothing.

    `nodes` are the next nodes towards the parameters. `rounding` is the rounding error of the
    arriving gradient. `is_beside` says that autograd computes the gradients beside these sums.
    """
    totals: list[Tensor | None] = []
    sums: dict[Contribution, Any] = {}  # of a weight and of its bias, computed together
    try:
        reached = _open(recipients, nodes, contributions[0].partition)
        for recipient, c, is_reached in zip(recipients, contributions, reached, strict=True):
            if is_reached and isinstance(c, Weight) and c.bias and recipient.pull_back is None:
                sums[c], sums[c.bias] = recipient.leaves[0][1].sums_with_bias(c, is_beside)
        for recipient, c, is_reached in zip(recipients, contributions, reached, strict=True):
            pull_back = recipient.pull_back
            if not is_reached:
                total = c.total()
                totals.append(None if total is None else total.to(recipient.dtype))
                continue
            if pull_back is None:
                p, ledger = recipient.leaves[0]
                total = ledger.add(c, recipient.dtype, sums.get(c))
                if total is not None and total.numel() >= LARGE_PAGES and total is ledger.total:
                    # a copy for p.grad: the one that torch would make takes longer
                    total = empty_like(total).copy_(total) if p.grad is None else total
                totals.append(total)
            else:
                totals.append(pull_back.take(c, recipient.dtype))
            for _, ledger in recipient.leaves:
                # pending or pulled-back contributions are summed twice, for gradient and moments:
                # the two sums round differently
                if is_beside or ledger.pending or pull_back is not None:
                    is_same = ledger.by_gradient and rounding <= eps_of(recipient.dtype)
                    if not (is_same and is_beside):  # else S is p.grad itself
                        ledger.precision = max(ledger.precision, rounding)
    except Exception:
        recipients[0].observer.window.abort()
        raise
    return totals


def _open(
    recipients: Sequence[Recipient], nodes: Sequence[Any], partition: Partition
) -> list[bool]:
    """Open the window for the recipients that the running backward reaches. Return which these are:
    `torch.autograd.grad` for other tensors reaches none.
    """
    reached = []
    leaves: list[tuple[Tensor, Ledger]] = []
    for recipient, node in zip(recipients, nodes, strict=True):
        ends = (node,) if recipient.pull_back is None else recipient.pull_back.ends
        try:
            is_reached = bool(recipient.leaves) and any(map(_torch.will_engine_execute, ends))
        except RuntimeError:  # torch.autograd.grad for these very parameters
            is_reached = False
        reached.append(is_reached)
        if is_reached:
            leaves += recipient.leaves
    if leaves:
        recipients[0].observer.window.open(leaves, partition, recipients[0].forward)
    return reached
