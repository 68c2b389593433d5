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
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from varreg.engine.arguments import flatten, refill, swap, tensors_in, without_tensors
from varreg.engine.contribution import Contribution
from varreg.engine.layout import ELEMENTWISE, Layout, Lost, Where, name_of, propagate
from varreg.engine.nodes import Repeat, Repetition, Spread, Target, Use
from varreg.engine.rules import RULES, STACKED, Call, Rule

if TYPE_CHECKING:
    from varreg.engine.ledger import Ledger
    from varreg.engine.observer import Observer

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
        self.counting = True  # False while a checkpoint runs a module again
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
            self.observer.check_batch_norm(args, kwargs)
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
        self.touch(tracked)
        if func in STACKED and isinstance(args[1], Tensor) and not args[1].is_floating_point():
            self._refuse(func, tracked, "packed sequences are not supported: pad them, and mask the loss")
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

    def touch(self, tracked: list[Tensor]) -> None:
        """Count the uses that a backward pass may bring. A checkpoint's second run was counted at its first."""
        for t in tracked if self.counting else ():
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
        self.touch([t])
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
            mark(t, at)
            if isinstance(at, Layout):
                call.partition = self.observer.partition(at.batch)
                call.watch(i, t, at)
            elif t.requires_grad:
                self._refuse(func, tracked, f"it is not known which part of its result belongs to which sample: {at.why}")
        return out


def forget(tree: Any) -> None:
    """Remove the tracer's marks from a structure of tensors that is about to be the user's."""
    for t in tree_leaves(tree):
        if isinstance(t, Tensor):
            unmark(t)
