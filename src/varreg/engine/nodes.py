"""The nodes that stand in the graph where parameters meet the batch, and enter what they measure into the ledgers."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from varreg.engine.arguments import results, swap
from varreg.engine.contribution import Contribution, Dense, Grouped, Partition, Scattered, length
from varreg.engine.layout import Place, Single, narrow, owners_of, per_sample, samples
from varreg.engine.propagation import is_in_place

if TYPE_CHECKING:
    from varreg.engine.ledger import Ledger
    from varreg.engine.observer import Observer


class Target:
    """Takes contributions to a tensor, and enters them into the ledgers of the parameters that it is made of."""

    __slots__ = (
        *("direct", "dtype", "edge", "ends", "forward", "leaves", "observer"),
        *("rounding", "rows", "value"),
    )

    def __init__(self, observer: Observer, t: Tensor, leaves: list[tuple[Tensor, Ledger]], rows: Tensor | None = None):
        self.observer, self.leaves = observer, leaves
        self.rows = rows  # the rows of the only parameter that the tensor is, if it is a lookup
        self.dtype = t.dtype
        self.direct = len(leaves) == 1 and leaves[0][0] is t
        self.edge = None if self.direct else torch.autograd.graph.get_gradient_edge(t)
        examined = not self.direct and any(ledger.examined for _, ledger in leaves)
        self.value = t.detach() if examined else None
        # Of a pull-back, which runs in the precision of the graph that made the tensor.
        self.rounding = 0.0 if self.direct else max(_graph_rounding(t), _autocast_rounding(t))
        self.forward = observer.forward
        gradient_edge = torch.autograd.graph.get_gradient_edge
        self.ends = [] if self.direct else [gradient_edge(p).node for p, _ in leaves]
        for _, ledger in leaves:
            ledger.uses.add(id(self))

    def __del__(self) -> None:
        """The graph is gone, and will not arrive any more."""
        for _, ledger in self.leaves:
            ledger.uses.discard(id(self))

    def take(
        self, contribution: Contribution, node: torch.autograd.graph.Node | None, rounding: float = 0.0, own: bool = False
    ) -> Tensor | None:
        """Enter the contributions, and return their sum. In a backward pass that is not for the parameter, enter nothing.

        `rounding` is the error of what arrived, and `own` says that the gradient is not that sum, but autograd's own.
        """
        if not self.leaves or not self._records(node):
            total = contribution.total()
            return None if total is None else total.to(self.dtype)
        try:
            self._open(contribution.partition)
            total = self.leaves[0][1].add(contribution, self.dtype) if self.direct else self._pull_back(contribution)
            for _, ledger in self.leaves:
                # What waits, or is pulled back, is summed up twice: for the gradient, and for the moments.
                if own or ledger.pending or not self.direct:
                    ledger.precision = max(ledger.precision, rounding, self.rounding)
            return total
        except Exception:
            self.observer.abort()
            raise

    def _open(self, partition: Partition) -> None:
        self.observer.open(self.leaves, partition, self.forward)

    def _records(self, node: Any) -> bool:
        """Is the backward that runs one that accumulates gradients? `torch.autograd.grad` is not."""
        if self.direct:
            return self.observer.records(node)
        return any(self.observer.records(end) for end in self.ends)

    def _pull_back(self, contribution: Contribution) -> Tensor | None:
        """Through the graph that made the tensor of parameters, one group at a time."""
        edge, parameters = self.edge, [p for p, _ in self.leaves]
        assert edge is not None
        if self.rows is not None:
            p, ledger = self.leaves[0]
            ledger.add(Scattered(contribution, self.rows, p.shape), p.dtype)
            total = contribution.total()
            return None if total is None else total.to(self.dtype)
        total, rows, size = None, [], 0.0
        for _, chunk in contribution.chunks():
            c = chunk.to(self.dtype)
            total = c.sum(0) if total is None else total.add_(c.sum(0))
            if self.value is not None:
                size += length(c)
            rows.append(_vjp(edge, parameters, c.clone()))
        for i, (p, ledger) in enumerate(self.leaves if rows else ()):
            values = torch.cat([row[i] for row in rows])
            ledger.add(Grouped(contribution.partition, values), p.dtype)
            if self.value is not None:
                ledger.added += size * self._slope(p)
        return total

    def _slope(self, p: Tensor) -> float:
        """How much a gradient grows on its way back to `p`, before anything cancels: |t|/|p|, if t is of any degree in it."""
        assert self.value is not None
        length = float(p.detach().norm())
        return max(1.0, float(self.value.norm()) / length) if length else 1.0


def _vjp(edge: Any, parameters: list[Tensor], grads: Tensor) -> list[Tensor]:
    """The gradients of parameters for each of several gradients `[n, …]` at an edge of the graph: `[n, *parameter.shape]`."""
    options: dict[str, Any] = {"retain_graph": True, "allow_unused": True}
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a slow batching rule: it is still faster than one by one
        try:
            found = torch.autograd.grad([edge], parameters, [grads], is_grads_batched=True, **options)
        except RuntimeError:  # a function in the graph has no batched gradient
            each = [torch.autograd.grad([edge], parameters, [g], materialize_grads=True, **options) for g in grads]
            found = tuple(torch.stack(rows) for rows in zip(*each, strict=True))
    return [p.new_zeros(len(grads), *p.shape) if g is None else g for g, p in zip(found, parameters, strict=True)]


def _refuse_second_order(ctx: Any) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"varreg: {_names_of(ctx)}: a backward pass with create_graph=True runs through an observed model, and "
            "second derivatives would miss the observed parameters. Compute it on an unobserved model: "
            "`observer.remove()` first, or a copy.deepcopy of the model."
        )


def _names_of(ctx: Any) -> str:
    """Return the names of the parameters that a node is for."""
    targets = getattr(ctx.use[0], "targets", []) if hasattr(ctx, "use") else []
    targets = targets or ([ctx.target] if hasattr(ctx, "target") else getattr(getattr(ctx, "call", None), "targets", []))
    names = [ledger.name for target in targets for _, ledger in target.leaves]
    return ", ".join(f"'{n}'" for n in dict.fromkeys(names)) or "an observed parameter"


def _refuse_compiled() -> None:
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled is not None and compiled.in_compiled_autograd_region:
        raise RuntimeError(
            "varreg: compiled autograd runs the backward pass of an observed model, and would not measure it. Set "
            "torch._dynamo.config.compiled_autograd = False; torch.compile itself may stay."
        )


_ran = [0]


def backwards() -> int:
    """Return how often a node of ours has run backward, in any model."""
    return _ran[0]


def _measuring(backward: Callable[..., Any]) -> Callable[..., Any]:
    """What all nodes need: first derivatives alone, computed as they are written, also if `backward()` is called under autocast."""

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        _ran[0] += 1
        _refuse_compiled()
        _refuse_second_order(ctx)
        if not torch._C._is_any_autocast_enabled():
            return backward(ctx, *grads)
        device = next((g.device.type for g in grads if g is not None), "cpu")
        with torch.autocast(device, enabled=False):
            return backward(ctx, *grads)

    return run


def _rounding(grads: Sequence[Tensor | None], at_least: float) -> float:
    """That of the coarsest gradient."""
    return max([at_least, *(_eps(g.dtype) for g in grads if g is not None)])


@functools.cache
def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def graph_of(t: Tensor) -> Iterator[Any]:
    """Yield the nodes of the graph that made a tensor."""
    seen: set[Any] = set()
    stack = [t.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            stack += [n for n, _ in node.next_functions]


def _graph_rounding(t: Tensor) -> float:
    """That of the coarsest type on the way back to parameters: `weight.float().double()` goes through float32."""
    types = {m.dtype for node in graph_of(t) for m in node._input_metadata}
    return max([_eps(t.dtype), *(_eps(dtype) for dtype in types if dtype.is_floating_point)])


def _autocast_rounding(t: Tensor) -> float:
    """Of what is computed now, whatever comes in and goes out: a GRU takes and gives float32 under autocast."""
    if not (torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(t.device.type)):
        return 0.0
    return torch.finfo(torch.get_autocast_dtype(t.device.type)).eps


class _Node(torch.autograd.Function):
    """A node that is made at every use, and hence in little time."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """As torch does it where no functorch transform is active; where one is, torch says what is wrong."""
        if torch._C._are_functorch_transforms_active():
            return super().apply(*args)
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]


class Use(_Node):
    """Passes a function's outputs on, and takes over the gradients of the parameters that were
    detached in it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        contributions: Any,
        takes_over: bool,
        n_outputs: int,
        n_params: int,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        saved = tensors[n_outputs + n_params :]
        rounding = _autocast_rounding(tensors[0])
        ctx.use = contributions, takes_over, n_outputs, n_params, len(saved), rounding
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        return _passed_on(ctx, tensors[:n_outputs])

    @staticmethod
    @_measuring
    def backward(ctx: Any, *grads: Any) -> Any:
        contributions, takes_over, n_outputs, n_params, n_saved, rounding = ctx.use
        found = contributions(list(grads), ctx.saved_tensors)
        # one edge for each tensor among the inputs; other inputs have none
        edges = ctx.next_functions[n_outputs : n_outputs + n_params]
        how = _rounding(grads, rounding), not takes_over
        totals = [None if c is None else target.take(c, edge[0], *how) for (target, c), edge in zip(found, edges, strict=True)]
        if not takes_over:
            totals = [None] * n_params
        return (None, None, None, None, *grads, *totals, *(None,) * n_saved)


def _passed_on(ctx: Any, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    outputs = [t.detach() for t in tensors]
    if whole := [t for t in outputs if not (t.is_floating_point() or t.is_complex())]:
        ctx.mark_non_differentiable(*whole)
    return tuple(outputs)


class Spread(_Node):
    """Expands a tensor along the batch; its gradient then arrives sample by sample."""

    @staticmethod
    def forward(
        ctx: Any,
        t: Tensor,
        target: Target,
        shape: list[int],
        at: Place,
        aligned: bool,
        partition: Partition,
    ) -> Tensor:
        ctx.target, ctx.at, ctx.aligned, ctx.partition, ctx.shape = target, at, aligned, partition, t.shape
        if aligned:
            return t.detach()
        return t.reshape((1,) * (len(shape) - t.dim()) + tuple(t.shape)).expand(shape).detach()

    @staticmethod
    @_measuring
    def backward(ctx: Any, grad: Any) -> Any:
        at: Place = ctx.at
        contribution: Contribution
        if isinstance(at, Single):
            contribution = Dense(ctx.partition, samples(grad, at))
        elif not ctx.aligned:
            contribution = Dense(ctx.partition, per_sample(grad, at).reshape(at.batch, *ctx.shape))
        elif at.batch == 1:
            contribution = Dense(ctx.partition, grad.unsqueeze(0))
        else:  # row i of the tensor is used by its owner alone
            contribution = _Rows(ctx.partition, grad, owners_of(at), at.dim)
        return (ctx.target.take(contribution, ctx.next_functions[0][0]), None, None, None, None, None)


class _Rows(Contribution):
    """Contributions to a tensor of which each sample uses its own rows alone: elsewhere, its
    gradient is zero.
    """

    chunk = 1  # one group at a time: each is as large as the whole tensor

    def __init__(self, partition: Partition, grad: Tensor, owners: Tensor, dim: int):
        super().__init__(partition, grad.shape)
        self.grad, self.owners, self.dim = grad, owners, dim

    def groups(self, first: int, last: int, start: int, n: int) -> Tensor:
        out = self.grad.new_zeros(last - first, *self.shape)
        for u in range(last - first):
            a, b = start + u * n, start + (u + 1) * n
            mine = ((self.owners >= a) & (self.owners < b)).nonzero().flatten().to(out.device)
            out[u].index_copy_(self.dim, mine, self.grad.index_select(self.dim, mine))
        return out


class Repetition:
    """A call that the backward pass repeats, one group of samples at a time."""

    def __init__(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        batched: Sequence[tuple[Tensor, Place]],
        tracked: list[Tensor],
        targets: list[Target],
        where: str,
    ):
        self.func, self.targets, self.where = func, targets, where
        self.writes = is_in_place(func)
        self.inputs = [at for _, at in batched]
        slots = {id(t): _Slot(i) for i, t in enumerate([*(t for t, _ in batched), *tracked])}
        self.args, self.kwargs = swap(args, kwargs, slots)
        self.places: dict[int, Place] = {}  # of the outputs whose gradients are waited for
        self.partition = Partition(0, 0)
        device = tracked[0].device.type
        enabled = torch.is_autocast_enabled(device)
        self.autocast = device, torch.get_autocast_dtype(device), enabled
        self.rounding = _autocast_rounding(tracked[0])
        self.grads: dict[int, Tensor] = {}

    def watch(self, index: int, out: Tensor) -> None:
        """Note the gradient of an output that was written in place, and stays the same tensor."""
        grads = self.grads

        def note(grad: Tensor) -> None:
            grads[index] = grad

        if out.requires_grad:
            out.register_hook(note)

    @property
    def precision(self) -> float:
        """The rounding error of the coarsest gradient that arrived."""
        return _rounding(list(self.grads.values()), self.rounding)

    def contributions(self, saved: Sequence[Tensor]) -> list[Tensor]:
        """Return `[groups, *shape]` for every tracked tensor."""
        inputs = saved[: len(self.inputs)]
        tracked = [t.detach().requires_grad_() for t in saved[len(self.inputs) :]]
        rows: list[list[Tensor]] = [[] for _ in tracked]
        for first, last, start, n in self.partition.runs():
            for u in range(last - first):
                a, b = start + u * n, start + (u + 1) * n
                part = [narrow(t.detach(), at, a, b) for t, at in zip(inputs, self.inputs, strict=True)]
                if self.writes:
                    part = [None if t is None else t.clone() for t in part]
                for i, c in enumerate(self._one([*part, *tracked], tracked, a, b)):
                    rows[i].append(c)
        return [torch.stack(r) for r in rows]

    def _one(self, tensors: Sequence[Tensor | None], tracked: list[Tensor], a: int, b: int) -> Sequence[Tensor]:
        if any(t is None for t in tensors):  # these samples have no rows here
            return [torch.zeros_like(t) for t in tracked]
        device, dtype, enabled = self.autocast
        with torch.enable_grad(), torch.autocast(device, dtype, enabled=enabled):
            kwargs = {k: _filled(v, tensors) for k, v in self.kwargs.items()}
            outs = results(self.func(*(_filled(x, tensors) for x in self.args), **kwargs))
            pairs = [(outs[i], narrow(g, self.places[i], a, b)) for i, g in self.grads.items()]
            wanted = [(o, g) for o, g in pairs if g is not None]
            grads = torch.autograd.grad([o for o, _ in wanted], tracked, [g for _, g in wanted], allow_unused=True)
        return [torch.zeros_like(t) if g is None else g for t, g in zip(tracked, grads, strict=True)]


class _Slot(int):
    """A tensor's place in the arguments of a repeated call."""


def _filled(value: Any, tensors: Sequence[Tensor | None]) -> Any:
    if isinstance(value, _Slot):
        return tensors[value]
    if type(value) in (list, tuple):
        return type(value)([_filled(v, tensors) for v in value])
    return value


class Repeat(_Node):
    """Stands between a parameter and a function that has no rule; repeats the function group by
    group when its gradient is known.
    """

    @staticmethod
    def forward(ctx: Any, call: Repetition, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        return tuple(t.detach() for t in tensors[len(call.inputs) :])

    @staticmethod
    @_measuring
    def backward(ctx: Any, *grads: Any) -> Any:
        call: Repetition = ctx.call
        skip = len(call.inputs)
        edges = ctx.next_functions[skip:]
        if any(g is not None for g in grads) and not call.grads:
            raise RuntimeError(
                f"varreg: {call.where} has no rule, and the gradient of its result never arrived: something "
                "that the engine cannot see took its place. Write the result as a new tensor, and "
                "change nothing in place."
            )
        if call.grads and call.partition.batch:
            try:
                found = call.contributions(ctx.saved_tensors)
            except (RuntimeError, IndexError, ValueError, TypeError) as error:
                raise RuntimeError(
                    f"varreg: {call.where} has no rule, and cannot be repeated for a part of the batch: {error}"
                ) from error
            for i, (target, grad, c) in enumerate(zip(call.targets, grads, found, strict=True)):
                if grad is not None:
                    _check_sum(c, grad, call.precision, call.where)
                    contribution = Grouped(call.partition, c)
                    target.take(contribution, edges[i][0], call.precision, own=True)
        call.grads.clear()
        return (None, *(None,) * skip, *grads)


class Arrive(_Node):
    """Passes on the outputs of a function that has no rule, and notes their gradients."""

    @staticmethod
    def forward(ctx: Any, call: Repetition, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return _passed_on(ctx, outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.call.grads.update({i: g for i, g in enumerate(grads) if g is not None})
        return (None, *grads)


def places_of(node: Any) -> Sequence[Place | None] | None:
    """Return where each output of one of our nodes carries the batch; None for other nodes."""
    name = node.name()
    if name == "UseBackward":
        found: Sequence[Place | None] = node.use[0].places
        return found
    if name == "SpreadBackward":
        return [node.at]
    if name == "ArriveBackward":
        places = node.call.places
        return [places.get(i) for i in range(max(places, default=-1) + 1)]
    return None


def _check_sum(c: Tensor, grad: Tensor, eps: float, where: str) -> None:
    """Do the parts add up to the whole, to within rounding? Where the gradient overflowed, nothing can be told."""
    total = c.sum(0)
    if not (total.numel() and bool(total.isfinite().all()) and bool(grad.isfinite().all())):
        return
    if (total - grad).abs().max() > min(1e3 * eps, 0.05) * c.abs().sum(0).max():
        raise RuntimeError(
            f"varreg: {where} has no rule, and what it gives for parts of the batch does not add up to its gradient: it mixes samples "
            "or is random. Register a rule for its module with varreg.register_rule, or freeze the parameter."
        )
