"""Where parameters meet the batch.

While an observed model runs forward, a `Tracer` sees every torch function. It knows three kinds of tensor: those that carry
the batch (and where: `layout.py`), those made of parameters alone (`Derived`: a reparametrized weight, a position embedding
before it is added), and constants. An operation that takes one of the first and one of the second kind is a *use*: the only
place where a parameter learns about samples. There,

- a function with a rule is run with the parameter detached, and a `Use` node takes over the parameter's gradient: the sum of the
  contributions that it also measures;
- an element-wise operation gets the parameter expanded along the batch, so that autograd itself delivers its gradient sample
  by sample (`Spread`);
- anything else is run as it is, and the backward pass repeats it one group of samples at a time (`Repeat`), which is exact or,
  where the contributions do not add up to the gradient, an error.

Contributions to a tensor made of parameters are pulled back, group by group, through the graph that made it.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from varreg.moments.contribution import Contribution, Dense, Grouped, Partition
from varreg.moments.layout import ELEMENTWISE, Layout, Lost, Where, name_of, narrow, propagate, samples
from varreg.moments.recurrent import STACKED
from varreg.moments.rules import RULES, Call, Rule

if TYPE_CHECKING:
    from varreg.moments.ledger import Ledger
    from varreg.moments.observer import Observer

_MARK = "_varreg_where"


class Derived:
    """Marks a tensor that was made of parameters alone."""


DERIVED = Derived()
_EXPAND = frozenset(
    (Tensor.expand, Tensor.expand_as, Tensor.repeat, torch.broadcast_to, Tensor.broadcast_to, torch.tile, Tensor.tile)
)
_JOIN = frozenset((torch.cat, torch.concat, torch.concatenate, torch.stack))
_SHAPE_ONLY = frozenset(
    (Tensor.view_as, Tensor.reshape_as, Tensor.type_as, Tensor.to, torch.zeros_like, torch.ones_like, Tensor.new_zeros)
)


def mark_of(t: Tensor) -> Where | Derived | None:
    return t.__dict__.get(_MARK)


def mark(t: Tensor, where: Where | Derived) -> None:
    t.__dict__[_MARK] = where


def unmark(t: Tensor) -> None:
    t.__dict__.pop(_MARK, None)


def tensors_in(args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for a in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(a, Tensor):
            yield a
        elif isinstance(a, list | tuple):
            for b in a:
                if isinstance(b, Tensor):
                    yield b


def replaced(value: Any, new: dict[int, Any]) -> Any:
    """An argument with some tensors, named by their id, replaced; also those in a list or tuple."""
    if isinstance(value, Tensor):
        return new.get(id(value), value)
    return type(value)([replaced(v, new) for v in value]) if type(value) in (list, tuple) else value


def swap(args: Sequence[Any], kwargs: dict[str, Any], new: dict[int, Any]) -> tuple[list[Any], dict[str, Any]]:
    return [replaced(a, new) for a in args], {k: replaced(v, new) for k, v in kwargs.items()}


def without_override_check(function: types.FunctionType) -> Callable[..., Any]:
    """A torch function written in Python, to be run in full, so that the functions that it calls are seen."""
    no: Callable[..., bool] = lambda *_: False  # noqa: E731
    checks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    namespace = {**function.__globals__, **dict.fromkeys(checks, no)}
    copy = types.FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


class Tracer(TorchFunctionMode):
    """Follows the batch through one forward pass, and puts a node into the graph wherever a parameter meets it."""

    def __init__(self, observer: Observer):
        super().__init__()
        self.observer = observer
        self.batch = 0  # of the forward pass under way
        self.recount = True  # False while a checkpoint runs a module again
        self._python: dict[Any, Callable[..., Any] | None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        batched: list[tuple[Tensor, Layout]] = []
        tracked: list[Tensor] = []
        lost: Lost | None = None
        for t in tensors_in(args, kwargs):
            where = mark_of(t)
            if isinstance(where, Layout):
                batched.append((t, where))
            elif isinstance(where, Lost):
                lost = where
            elif where is DERIVED or self.observer.ledger(t):
                tracked.append(t)
            elif t.grad_fn is not None:  # made where the tracer did not see it: the contract says that the batch comes first
                at = self.observer.contract(t, self.batch)
                if at is None:
                    lost = Lost(f"a tensor of shape {tuple(t.shape)} was made by an operation that is not a torch function")
                else:
                    batched.append((t, at))
        if not (batched or lost or tracked):
            return func(*args, **kwargs)
        if func is F.batch_norm:
            self.observer.check(args, kwargs)
        if tracked and (batched or lost) and func not in _SHAPE_ONLY:
            return self._meet(func, args, kwargs, batched, tracked, lost)
        out = func(*args, **kwargs)
        if lost:
            self._mark(func, args, out, lambda t, i: lost)
        elif batched:
            self._mark(func, args, out, lambda t, i: propagate(func, args, kwargs, batched, t, i))
        elif torch.is_grad_enabled():
            if func in _EXPAND and isinstance(out, Tensor) and (at := self._expanded(tracked[0], out)):
                return self._spread_expanded(tracked[0], out, at)
            self._mark(func, args, out, lambda t, i: DERIVED)
        return out

    def _mark(self, func: Any, args: Sequence[Any], out: Any, where: Callable[[Tensor, int], Where | Derived]) -> None:
        if isinstance(out, Tensor):
            if not self.observer.ledger(out):
                mark(out, where(out, 0))
        elif isinstance(out, list | tuple):
            for i, t in enumerate(out):
                if isinstance(t, Tensor):
                    mark(t, where(t, i))
        elif out is None and func is Tensor.__setitem__ and not isinstance(mark_of(args[0]), Layout):
            at = self.observer.contract(args[0], self.batch)
            mark(args[0], at if at else Lost(f"__setitem__ into a tensor of shape {tuple(args[0].shape)}"))

    # ---- a parameter meets the batch ---------------------------------------------------------------------------------

    def _meet(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], batched: list[tuple[Tensor, Layout]], tracked: list[Tensor],
        lost: Lost | None,
    ) -> Any:  # fmt: skip
        self._touch(tracked)
        if func in STACKED and args[4] > 1 and args[5] > 0 and args[6]:
            with self:
                return STACKED[func](*args, **kwargs)
        rule = RULES.get(func)
        if rule is None and (python := self._written_in_python(func)):
            with self:
                return python(*args, **kwargs)
        if not torch.is_grad_enabled():
            out = func(*args, **kwargs)
            self._mark(func, args, out, lambda t, i: lost or propagate(func, args, kwargs, batched, t, i))
            return out
        if lost:
            self._refuse(func, tracked, f"the batch cannot be followed to it: {lost.why}")
        if func is Tensor.__setitem__:
            self._refuse(
                func, tracked, "values made of parameters are written into a tensor; build it with torch.cat or torch.where"
            )
        if func in ELEMENTWISE or func in _JOIN:
            return self._elementwise(func, args, kwargs, batched, tracked)
        if rule and (out := self._ruled(rule, func, args, kwargs, batched, tracked)) is not None:
            return out
        return self._repeated(func, args, kwargs, batched, tracked)

    def _refuse(self, func: Any, tracked: list[Tensor], why: str) -> None:
        raise ValueError(
            f"varreg: in {self.observer.path()}, {name_of(func)} uses {self._names(tracked)} but {why}. Keep the batch in dimension "
            f"{self.observer.batch_dim} there, freeze the parameter, or register a rule for the module with varreg.register_rule."
        )

    def _names(self, tracked: list[Tensor]) -> str:
        names = [ledger.name for t in tracked for _, ledger in self._leaves(t)]
        return ", ".join(f"'{n}'" for n in dict.fromkeys(names)) or "a tensor made of parameters"

    def _leaves(self, t: Tensor) -> list[tuple[Tensor, Ledger]]:
        """The observed parameters that a tracked tensor is made of."""
        if ledger := self.observer.ledger(t):
            return [(t, ledger)]
        found: dict[int, tuple[Tensor, Ledger]] = {}
        seen: set[Any] = set()
        stack = [t.grad_fn]
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            leaf = getattr(node, "variable", None)
            if leaf is not None and (ledger := self.observer.ledger(leaf)):
                found[id(leaf)] = (leaf, ledger)
            stack += [n for n, _ in node.next_functions]
        return list(found.values())

    def _touch(self, tracked: list[Tensor]) -> None:
        """Count the uses that a backward pass may bring. A checkpoint's second run was counted at its first."""
        for t in tracked if self.recount else ():
            for _, ledger in self._leaves(t):
                ledger.touches += 1

    def _written_in_python(self, func: Any) -> Callable[..., Any] | None:
        if func not in self._python:
            is_python = isinstance(func, types.FunctionType) and any("has_torch_function" in n for n in func.__code__.co_names)
            self._python[func] = without_override_check(func) if is_python else None
        return self._python[func]

    def target(self, t: Tensor, rule: str) -> Target:
        leaves = self._leaves(t)
        for _, ledger in leaves:
            ledger.served[rule] = None
        return Target(self.observer, t, leaves)

    def _ruled(
        self, rule: Rule, func: Any, args: Sequence[Any], kwargs: dict[str, Any], batched: list[tuple[Tensor, Layout]],
        tracked: list[Tensor],
    ) -> Any:  # fmt: skip
        bound = rule.bind(args, kwargs)
        flat = flatten(bound)
        params = {id(t): t for t in tracked}
        wants = frozenset(name for name, t in flat.items() if id(t) in params)
        detached = {i: t.detach() for i, t in params.items()}
        layouts = {name: where for name, t in flat.items() if isinstance(where := mark_of(t), Layout)}
        for t, at in batched:  # those that follow the contract carry no mark
            layouts |= {name: at for name, u in flat.items() if u is t}
        free_args, free_kwargs = swap(args, kwargs, detached if rule.takes_over else {})
        out = (rule.forward or func)(*free_args, **free_kwargs)
        outs = [out] if isinstance(out, Tensor) else list(out)
        places = [propagate(func, args, kwargs, batched, t, i) for i, t in enumerate(outs)]
        if isinstance(places[0], Lost):
            return None
        partition = self.observer.partition(places[0].batch)
        call = Call(wants, {n: t.shape for n, t in flat.items()}, layouts, places[0], partition)
        if not rule.when(call):
            return None
        keep = {name: detached.get(id(t), t) for name, t in flat.items() if name.partition(".")[0] in rule.saves}
        names = tuple(keep)
        order = [name for name in flat if name in wants]
        targets = [(name, self.target(flat[name], rule.name)) for name in order]
        bound = without_tensors(bound)

        def contributions(grads: list[Tensor | None], saved: Sequence[Tensor]) -> list[tuple[Target, Contribution | None]]:
            values = refill(bound, dict(zip(names, saved, strict=True)))
            found = rule.run(call, grads, **values) if any(g is not None for g in grads) else {}
            return [(target, found.get(name)) for name, target in targets]

        used = Use.apply(contributions, rule.takes_over, len(outs), len(order), *outs, *(flat[n] for n in order), *keep.values())
        for t, where in zip(used, places, strict=True):
            mark(t, where)
        return used[0] if isinstance(out, Tensor) else type(out)(used)

    # ---- element-wise operations, expansions and joins ---------------------------------------------------------------

    def _elementwise(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], batched: list[tuple[Tensor, Layout]], tracked: list[Tensor]
    ) -> Any:
        x, at = batched[0]
        rank = max(t.dim() for t in tensors_in(args, kwargs))
        there = at._replace(dim=at.dim + rank - x.dim())
        new = {}
        for t in tracked:
            padded = t if func in _JOIN else t[(None,) * (rank - t.dim())]
            size = padded.shape[there.dim] if padded.dim() else 1
            if (
                size not in (1, there.size)
                or (size == there.size != 1 and not there.plain)
                or (size == 1 and func in _JOIN and there.size != 1)
            ):
                self._refuse(func, [t], f"its shape {tuple(t.shape)} fits the batch of {there.batch} nowhere")
            aligned = size == there.size != 1
            shape = [there.size if d == there.dim else n for d, n in enumerate(padded.shape)]
            target = self.target(t, name_of(func).strip("_"))
            new[id(t)] = Spread.apply(t, target, shape, there, aligned, self.observer.partition(there.batch))
            mark(new[id(t)], there)
        args, kwargs = swap(args, kwargs, new)
        everything = [*batched, *((s, there) for s in new.values())]
        out = func(*args, **kwargs)
        self._mark(func, args, out, lambda t, i: propagate(func, args, kwargs, everything, t, i))
        return out

    def _expanded(self, t: Tensor, out: Tensor) -> Layout | None:
        """Was a tensor without a batch expanded to the batch? Then it has one from here on."""
        shape = (1,) * (out.dim() - t.dim()) + tuple(t.shape)
        for dim, (old, new) in enumerate(zip(shape, out.shape, strict=True)):
            if old == 1 and new == self.batch > 1:
                return Layout(self.batch, dim)
        return None

    def _spread_expanded(self, t: Tensor, out: Tensor, at: Layout) -> Tensor:
        self._touch([t])
        shape = [at.size if d == at.dim else n for d, n in enumerate((1,) * (out.dim() - t.dim()) + tuple(t.shape))]
        spread = Spread.apply(t, self.target(t, "expand"), shape, at, False, self.observer.partition(at.batch))
        multiples = [o // s for o, s in zip(out.shape, shape, strict=True)]
        result: Tensor = spread if all(m == 1 for m in multiples) else spread.repeat(multiples)
        mark(result, at)
        return result

    # ---- everything else ---------------------------------------------------------------------------------------------

    def _repeated(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], batched: list[tuple[Tensor, Layout]], tracked: list[Tensor]
    ) -> Any:
        where = f"{name_of(func)} in {self.observer.path()}"
        targets = [self.target(t, f"{name_of(func).strip('_')} (general)") for t in tracked]
        call = Repetition(func, args, kwargs, batched, tracked, targets, where)
        taps = Repeat.apply(call, *(t for t, _ in batched), *tracked)
        new = {id(t): tap for t, tap in zip(tracked, taps, strict=True)}
        out = func(*swap(args, kwargs, new)[0], **swap(args, kwargs, new)[1])
        outs = [t for t in ([out] if isinstance(out, Tensor) else out) if isinstance(t, Tensor)]
        for i, t in enumerate(outs):
            at = propagate(func, args, kwargs, batched, t, i)
            if t.requires_grad:
                if isinstance(at, Lost):
                    self._refuse(func, tracked, f"it is not known which part of its result belongs to which sample: {at.why}")
                call.watch(i, t, at)
            mark(t, at)
        if outs and isinstance(at := mark_of(outs[0]), Layout):
            call.partition = self.observer.partition(at.batch)
        return out


def flatten(bound: dict[str, Any]) -> dict[str, Tensor]:
    """Tensor arguments by name; the elements of a list as `name.0`, `name.1`, …"""
    flat = {}
    for name, value in bound.items():
        if isinstance(value, Tensor):
            flat[name] = value
        elif isinstance(value, list | tuple):
            flat |= {f"{name}.{i}": v for i, v in enumerate(value) if isinstance(v, Tensor)}
    return flat


def without_tensors(bound: dict[str, Any]) -> dict[str, Any]:
    """The arguments with None for each tensor, so that keeping them keeps no memory."""
    return {
        name: None
        if isinstance(v, Tensor)
        else [None if isinstance(u, Tensor) else u for u in v]
        if isinstance(v, list | tuple)
        else v
        for name, v in bound.items()
    }


def refill(bound: dict[str, Any], saved: dict[str, Tensor]) -> dict[str, Any]:
    """The arguments again, with the tensors that were saved, and None for those that were not."""
    full = dict(bound)
    for name, t in saved.items():
        base, dot, index = name.partition(".")
        if dot:
            full[base] = [t if i == int(index) else v for i, v in enumerate(full[base])]
        else:
            full[base] = t
    return full


class Target:
    """Takes contributions to a tensor, and enters them into the ledgers of the parameters that it is made of."""

    def __init__(self, observer: Observer, t: Tensor, leaves: list[tuple[Tensor, Ledger]]):
        self.observer, self.leaves = observer, leaves
        self.dtype = t.dtype
        self.direct = len(leaves) == 1 and leaves[0][0] is t
        self.edge = None if self.direct else torch.autograd.graph.get_gradient_edge(t)
        self._epochs: list[object] = []

    def take(self, contribution: Contribution, node: torch.autograd.graph.Node | None) -> Tensor | None:
        """Enter the contributions, and return their sum. Nothing is entered when the running backward is not for the parameter."""
        if not self.leaves or not self.observer.records(node):
            total = contribution.total()
            return None if total is None else total.to(self.dtype)
        try:
            return self._take(contribution)
        except Exception:
            self.observer.abort()
            raise

    def _take(self, contribution: Contribution) -> Tensor | None:
        self._open()
        if self.direct:
            return self.leaves[0][1].add(contribution, self.dtype)
        groups = contribution.all_groups() if contribution.partition.batch else None
        if groups is None:
            return None
        edge = self.edge
        assert edge is not None
        with torch.enable_grad():
            pulled = [
                torch.autograd.grad([edge], [p for p, _ in self.leaves], [c.to(self.dtype)], retain_graph=True, allow_unused=True)
                for c in groups
            ]
        for i, (p, ledger) in enumerate(self.leaves):
            rows = [g[i] if g[i] is not None else torch.zeros_like(p) for g in pulled]
            ledger.add(Grouped(contribution.partition, torch.stack(rows)), p.dtype)
        return groups.sum(0).to(self.dtype)

    def _open(self) -> None:
        self.observer.open([p for p, _ in self.leaves])
        epochs = [ledger.epoch for _, ledger in self.leaves]
        if any(old is new for old, new in zip(self._epochs, epochs, strict=False)):
            raise RuntimeError(
                f"varreg: backward() ran a second time through the same forward pass, and gradients of '{self.leaves[0][1].name}' were not "
                "cleared in between: what one sample contributes to both cannot be told. Add the losses and call backward() once."
            )
        self._epochs = epochs


def _refuse_second_order() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "varreg: a backward pass with create_graph=True runs through an observed model, and second derivatives would miss the observed "
            "parameters. Compute it on an unobserved model: `observer.remove()` first, or a copy.deepcopy of the model."
        )


class Use(torch.autograd.Function):
    """Passes a function's outputs on, and takes over the gradients of the parameters that were detached in it."""

    @staticmethod
    def forward(
        ctx: Any, contributions: Any, takes_over: bool, n_outputs: int, n_params: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.contributions, ctx.takes_over, ctx.n_outputs, ctx.n_params = contributions, takes_over, n_outputs, n_params
        ctx.set_materialize_grads(False)
        saved = tensors[n_outputs + n_params :]
        ctx.save_for_backward(*saved)
        ctx.n_saved = len(saved)
        outputs = tuple(t.detach() for t in tensors[:n_outputs])
        ctx.mark_non_differentiable(*(t for t in outputs if not t.is_floating_point()))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _refuse_second_order()
        first = ctx.n_outputs
        found = ctx.contributions(list(grads), ctx.saved_tensors)
        edges = ctx.next_functions[first : first + ctx.n_params]  # one per tensor input; other inputs have none
        totals = [None if c is None else target.take(c, edge[0]) for (target, c), edge in zip(found, edges, strict=True)]
        if not ctx.takes_over:
            totals = [None] * ctx.n_params
        return (None, None, None, None, *grads, *totals, *(None,) * ctx.n_saved)


class Spread(torch.autograd.Function):
    """Expands a tensor along the batch; its gradient then arrives sample by sample."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, target: Target, shape: list[int], at: Layout, aligned: bool, partition: Partition) -> Tensor:
        ctx.target, ctx.at, ctx.aligned, ctx.partition, ctx.shape = target, at, aligned, partition, t.shape
        return t.detach() if aligned else t.reshape((1,) * (len(shape) - t.dim()) + tuple(t.shape)).expand(shape).detach()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        _refuse_second_order()
        at: Layout = ctx.at
        if ctx.aligned:  # row i of the tensor is used by sample i alone
            values = grad.new_zeros(at.batch, *grad.shape)
            index = torch.arange(at.batch, device=grad.device)
            values.movedim(at.dim + 1, 1)[index, index] = grad.movedim(at.dim, 0)
        else:
            values = samples(grad, at)
            if not at.plain:
                values = values.sum((at.dim + 1, at.dim + 2))
        contribution = Dense(ctx.partition, values.reshape(at.batch, *ctx.shape))
        return (ctx.target.take(contribution, ctx.next_functions[0][0]), None, None, None, None, None)


class Repetition:
    """A call that the backward pass repeats, one group of samples at a time."""

    def __init__(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], batched: list[tuple[Tensor, Layout]], tracked: list[Tensor],
        targets: list[Target], where: str,
    ):  # fmt: skip
        self.func, self.targets, self.where = func, targets, where
        self.layouts = [at for _, at in batched]
        slots = {id(t): _Slot(i) for i, t in enumerate([*(t for t, _ in batched), *tracked])}
        self.args, self.kwargs = swap(args, kwargs, slots)
        self.partition = Partition(0, 0)
        self.grads: dict[int, tuple[Tensor, Layout]] = {}

    def watch(self, index: int, out: Tensor, at: Layout) -> None:
        grads = self.grads

        def note(grad: Tensor) -> None:
            grads[index] = (grad, at)

        out.register_hook(note)

    def contributions(self, saved: Sequence[Tensor]) -> list[Tensor]:
        """`[groups, *shape]` for every tracked tensor."""
        inputs, tracked = saved[: len(self.layouts)], [t.detach().requires_grad_() for t in saved[len(self.layouts) :]]
        rows: list[list[Tensor]] = [[] for _ in tracked]
        for first, last, start, n in self.partition.runs():
            for u in range(last - first):
                a, b = start + u * n, start + (u + 1) * n
                part = [narrow(t.detach(), at, a, b) for t, at in zip(inputs, self.layouts, strict=True)]
                for i, c in enumerate(self._one([*part, *tracked], tracked, a, b)):
                    rows[i].append(c)
        return [torch.stack(r) for r in rows]

    def _one(self, tensors: list[Tensor], tracked: list[Tensor], a: int, b: int) -> list[Tensor]:
        with torch.enable_grad():
            out = self.func(*(_filled(x, tensors) for x in self.args), **{k: _filled(v, tensors) for k, v in self.kwargs.items()})
            outs = [t for t in ([out] if isinstance(out, Tensor) else out) if isinstance(t, Tensor)]
            pairs = [(outs[i], narrow(g, at, a, b)) for i, (g, at) in self.grads.items()]
            grads = torch.autograd.grad([o for o, _ in pairs], tracked, [g for _, g in pairs], allow_unused=True)
        return [torch.zeros_like(t) if g is None else g for t, g in zip(tracked, grads, strict=True)]


class _Slot(int):
    """A tensor's place in the arguments of a repeated call."""


def _filled(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, _Slot):
        return tensors[value]
    return type(value)([_filled(v, tensors) for v in value]) if type(value) in (list, tuple) else value


class Repeat(torch.autograd.Function):
    """Stands between a parameter and a function that has no rule; repeats the function group by group when its gradient is known."""

    @staticmethod
    def forward(ctx: Any, call: Repetition, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        return tuple(t.detach() for t in tensors[len(call.layouts) :])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _refuse_second_order()
        call: Repetition = ctx.call
        skip = len(call.layouts)
        totals: list[Tensor | None] = list(grads)
        edges = ctx.next_functions[skip:]
        if call.grads and call.partition.batch:
            try:
                found = call.contributions(ctx.saved_tensors)
            except RuntimeError as error:
                raise RuntimeError(
                    f"varreg: {call.where} has no rule, and cannot be repeated for a part of the batch: {error}"
                ) from error
            for i, (target, grad, c) in enumerate(zip(call.targets, grads, found, strict=True)):
                if grad is not None:
                    _check_sum(c, grad, call.where)
                    target.take(Grouped(call.partition, c), edges[i][0])
        call.grads.clear()
        return (None, *(None,) * skip, *totals)


def _check_sum(c: Tensor, grad: Tensor, where: str) -> None:
    eps = torch.finfo(grad.dtype).eps
    scale = c.abs().sum(0).to(grad.dtype)
    if not torch.all((c.sum(0) - grad).abs() <= 1e3 * eps * scale + 1e-30):
        raise RuntimeError(
            f"varreg: {where} has no rule, and what it gives for parts of the batch does not add up to its gradient: it mixes samples or is "
            "random. Register a rule for its module with varreg.register_rule, or freeze the parameter."
        )


def forget(tree: Any) -> None:
    """Remove the tracer's marks from a structure of tensors that is about to be the user's."""
    for t in tree_leaves(tree):
        if isinstance(t, Tensor):
            unmark(t)


__all__ = ["DERIVED", "Tracer", "Use", "forget", "mark", "mark_of", "unmark"]
