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
from varreg.engine.contribution import Contribution
from varreg.engine.mechanisms.pull_back import PullBack, eps_of
from varreg.engine.trace.layout import Place
from varreg.errors import MeasurementError

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


def note_backward() -> None:
    """Count a backward run of a node. Refuse compiled autograd, which would not measure."""
    BackwardRuns.backwards += 1
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")  # not imported by us
    if compiled is not None and compiled.in_compiled_autograd_region:
        _refuse_compiled()


def measuring(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the backward of a node that measures: refuse second derivatives, and switch autocast
    off.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        note_backward()
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


def _refuse_compiled() -> None:
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
        self,
        contribution: Contribution,
        node: torch.autograd.graph.Node | None,
        rounding: float = 0.0,
        is_beside: bool = False,
    ) -> Tensor | None:
        """Add the contributions to the ledgers, and return their sum. In a backward pass that is
        not for the parameter (`torch.autograd.grad`), add nothing.

        `node` is the next node towards the parameter. `rounding` is the rounding error of the
        arriving gradient. `is_beside` says that autograd computes the gradient beside this sum.
        """
        observer, leaves, pull_back = self.observer, self.leaves, self.pull_back
        ends = [node] if pull_back is None else pull_back.ends
        if not leaves or not any(map(_accumulates, ends)):
            total = contribution.total()
            return None if total is None else total.to(self.dtype)
        try:
            observer.window.open(leaves, contribution.partition, self.forward)
            total = (
                leaves[0][1].add(contribution, self.dtype)
                if pull_back is None
                else pull_back.take(contribution, self.dtype)
            )
            if pull_back is not None:
                rounding = max(rounding, pull_back.rounding)
            for _, ledger in leaves:
                # pending or pulled-back contributions are summed twice, for gradient and moments:
                # the two sums round differently
                if is_beside or ledger.pending or pull_back is not None:
                    ledger.precision = max(ledger.precision, rounding)
            return total
        except Exception:
            observer.window.abort()
            raise


def _accumulates(node: Any) -> bool:
    """Return whether the running backward accumulates gradients at a node: `torch.autograd.grad`
    for other tensors does not.
    """
    try:
        return bool(_torch.will_engine_execute(node))
    except RuntimeError:
        return False
