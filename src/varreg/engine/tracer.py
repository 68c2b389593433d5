"""Where parameters meet the batch.

While an observed model runs forward, a `Tracer` sees every torch function. It knows three kinds of tensor: those that carry
the batch (and where: `layout.py`), those made of parameters alone (`Derived`: a reparametrized weight, a position embedding
before it is added), and constants. An operation that takes one of the first and one of the second kind is a *use*: the only
place where a parameter learns about samples. There,

- a function with a rule is run with the parameter detached, and a `Use` node takes over the parameter's gradient: the sum of the
  contributions that it also measures;
- an element-wise operation gets the parameter expanded along the batch, so that autograd itself delivers its gradient sample
  by sample (`Spread`); so does one that pairs a tensor made of parameters with the batch, such as attention's queries;
- anything else is run as it is, and the backward pass repeats it one group of samples at a time (`Repeat`), which is exact or,
  where the contributions do not add up to the gradient, an error.

Contributions to a tensor made of parameters are pulled back, group by group, through the graph that made it.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _len_torch_function_stack
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from varreg.engine.arguments import flatten, refill, swap, tensors_in, without_tensors
from varreg.engine.contribution import Contribution
from varreg.engine.eager import eager
from varreg.engine.layout import (
    ELEMENTWISE,
    Layout,
    Lost,
    Operation,
    Where,
    goes_by_values,
    is_guess,
    is_independent,
    name_of,
    propagate,
)
from varreg.engine.marks import DERIVED, Derived, mark, mark_of, payload_of
from varreg.engine.nodes import Repeat, Repetition, Spread, Target, Use
from varreg.engine.plans import Form, Place, Plan, Serving, form_of, results
from varreg.engine.rules import RULES, STACKED, Call, Rule

if TYPE_CHECKING:
    from varreg.engine.ledger import Ledger
    from varreg.engine.observer import Observer

_JOIN = frozenset((torch.cat, torch.concat, torch.concatenate, torch.stack))
# functions whose result depends on other tensors by their shape or type alone, and those whose result is a constant
_LIKE = ("view_as", "reshape_as", "expand_as", "type_as", "to")
_FIRST = frozenset(getattr(Tensor, name) for name in _LIKE)
_NEW = ("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor")
_CONSTANT = frozenset(
    [*(getattr(Tensor, name) for name in _NEW), torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like]
)
_CELLS = (torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell)
_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.baddbmm, Tensor.baddbmm)

_MOST_PLANS = 1 << 12  # forms of calls that are remembered: some models see new shapes all the time

_OUR_NODES = ("UseBackward", "SpreadBackward", "RepeatBackward")


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
        self._python: dict[Any, Callable[..., Any] | None] = {}
        self._tried: set[Any] = set()  # calls that are known to keep samples apart
        self._plans: dict[Form, Plan] = {}  # what was found out about calls, by their form
        self._split: Any = None  # groups, rank and world that they were made for
        self.lookups: dict[int, tuple[Tensor, Any, Tensor]] = {}  # made without a batch in this forward: result, its node, rows

    def begin(self, batch: int) -> None:
        """A forward begins, with so many samples."""
        self.batch, self.lookups = batch, {}
        split = self.observer.groups, self.observer.rank, self.observer.world
        if split != self._split:  # how batches are split is a part of plans
            self._plans.clear()
            self._split = split
        self.__enter__()

    def end(self) -> None:
        self.lookups = {}
        self.__exit__(None, None, None)

    @eager
    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        form = None
        if torch.is_grad_enabled():
            form, tensors = form_of(func, args, kwargs, self.observer.ledger)
            plan = None if form is None else self._plans.get(form)
            if plan is not None:
                if plan.serving is None:
                    return self._passed(plan, func, args, kwargs)
                if (out := self._served(plan, plan.serving, func, args, kwargs, tensors)) is not None:
                    return out
        return self._look(func, args, kwargs, form)

    def _passed(self, plan: Plan, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A call without parameters, like an earlier one; should its results be of other shapes, they are looked at."""
        out = func(*args, **kwargs)
        if plan.fits(out):
            plan.mark(results(out))
        else:
            batched = self._sorted(func, args, kwargs)[0]
            self._mark(out, lambda t, i: self.where(func, args, kwargs, batched, t, i))
        return out

    def _look(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], form: Form | None = None) -> Any:
        """A call of which nothing is known yet. With a form, what is found is kept for the next one, if it holds for all like it."""
        if func in _CONSTANT:
            return func(*args, **kwargs)
        batched, tracked, lost, unknown = self._sorted(func, args, kwargs)
        if not (batched or lost or tracked):
            return func(*args, **kwargs)
        if func is F.batch_norm:
            self.observer.check_batch_norm(args, kwargs)
        if tracked and (batched or lost):
            return self._meet(func, args, kwargs, batched, tracked, lost, form)
        if batched and func is Tensor.__setitem__:
            return self._write(args, batched, lost)
        if unknown and lost and any(x.requires_grad for x, _ in batched):
            self._check_mixed(
                func, lost._replace(why=f"{name_of(func)} combines samples with the result of {lost.why}", mixed=True)
            )
        out = func(*args, **kwargs)
        if lost:
            self._mark(out, lambda t, i: lost)
        elif batched:
            self._mark(out, lambda t, i: self.where(func, args, kwargs, batched, t, i))
            self._plan(form, func, args, kwargs, batched, results(out))
        elif torch.is_grad_enabled():
            self._mark(out, lambda t, i: DERIVED if t.requires_grad else None)
            if func is F.embedding:
                self._note_lookup(out, *args, **kwargs)
        return out

    def _sorted(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[list[tuple[Tensor, Layout]], list[Tensor], Lost | None, bool]:
        """The tensors of a call that carry the batch, those made of parameters; has one lost the batch, and does such a one need a gradient?"""
        batched: list[tuple[Tensor, Layout]] = []
        tracked: list[Tensor] = []
        lost: Lost | None = None
        unknown = False
        for t in args[:1] if func in _FIRST else tensors_in(args, kwargs):
            where = mark_of(t)
            if isinstance(where, Layout):
                batched.append((t, where))
            elif isinstance(where, Lost):
                lost = where
                unknown = unknown or t.requires_grad
            elif not t.requires_grad:
                pass  # a constant
            elif where is DERIVED or self.observer.ledger(t):
                tracked.append(t)
            elif t.grad_fn is not None:  # made where the tracer did not see it: the contract says that the batch comes first
                at = self.observer.contract(t, self.batch)
                if at is None and self._is_made_of_parameters(t):
                    tracked.append(t)
                elif at is None:
                    lost = Lost(f"a tensor of shape {tuple(t.shape)} was made by an operation that is not a torch function")
                else:
                    batched.append((t, at))
        return batched, tracked, lost, unknown

    def _plan(
        self, form: Form | None, func: Any, args: Sequence[Any], kwargs: dict[str, Any], batched: list[tuple[Tensor, Layout]],
        outs: Sequence[Any], serving: Serving | None = None,
    ) -> None:  # fmt: skip
        """Keep where the results carry the batch, if it is certain, and for every call of this form."""
        if form is None:
            return
        places: list[Place | None] = []
        for i, t in enumerate(outs):
            if not isinstance(t, Tensor):
                places.append(None)
                continue
            op, there, payload = Operation(func, args, kwargs, i), mark_of(t), payload_of(t)
            if (
                not isinstance(there, Layout)
                or payload is None
                or goes_by_values(op, batched)
                or not self._is_certain(op, batched, there)
            ):
                return
            places.append((t.shape, payload))
        if len(self._plans) >= _MOST_PLANS:
            self._plans.clear()
        self._plans[form] = Plan(tuple(places), serving)

    def _note_lookup(self, out: Tensor, ids: Tensor, table: Tensor, padding_idx: int | None = None, *_: Any, **__: Any) -> None:
        """Rows of a parameter, looked up once for all samples: what they receive can be put back without a detour through autograd."""
        rows = ids.flatten()
        distinct = len(rows.unique()) == len(rows) and (padding_idx is None or padding_idx % len(table) not in rows)
        if distinct and self.observer.ledger(table):
            self.lookups[id(out)] = (out, out.grad_fn, rows)

    def _mark(self, out: Any, where: Callable[[Tensor, int], Where | Derived | None]) -> None:
        for i, t in enumerate(out if isinstance(out, (list, tuple)) else (out,)):
            if isinstance(t, Tensor) and not self.observer.ledger(t) and (found := where(t, i)) is not None:
                mark(t, found)

    def where(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        batched: list[tuple[Tensor, Layout]],
        out: Tensor,
        index: int,
    ) -> Where:
        """Where the batch is in an output. A guess is tried, once for each kind of call; samples that are mixed are an error."""
        op = Operation(func, args, kwargs, index)
        there = propagate(op, batched, out)
        if self.observer.batch_norm == "contribution":  # samples may meet: what reaches a parameter through their rows is theirs
            return there
        if isinstance(there, Layout) and not self._is_certain(op, batched, there):
            independent = is_independent(op, batched, there)
            if independent:
                self._tried.add(_trial(op, batched, there))
            elif independent is False:
                there = Lost(f"{name_of(func)} mixes samples, or changes their order", mixed=True)
        if out.is_floating_point() and any(x.requires_grad for x, _ in batched):
            self._check_mixed(func, there)
        return there

    def _is_certain(self, op: Operation, batched: list[tuple[Tensor, Layout]], there: Layout) -> bool:
        """Is it more than a guess that the batch is there, or one that was tried?"""
        if self.observer.batch_norm == "contribution" or there.batch <= 1 or not is_guess(op.function):
            return True
        return _trial(op, batched, there) in self._tried and not goes_by_values(op, batched)

    def _check_mixed(self, func: Any, there: Where) -> None:
        if isinstance(there, Lost) and there.mixed and torch.is_grad_enabled() and self.observer.batch_norm == "refuse":
            raise ValueError(
                f"varreg: in {self.observer.path()}, {there.why}: a sample has no gradient of its own, and its variance does not "
                f"exist. Is the batch in dimension {self.observer.batch_dim} of every layer's input (MultiheadAttention and recurrent "
                "layers: batch_first=True; or observe(..., batch_dim=1))? If samples are meant to meet, observe(..., "
                "batch_norm='contribution') measures each sample's contribution to the gradient instead."
            )

    def _write(self, args: Sequence[Any], batched: list[tuple[Tensor, Layout]], lost: Lost | None) -> None:
        """`t[index] = value` with a value that carries the batch: `t` then carries it where the index takes it from."""
        t, index, value = args
        Tensor.__setitem__(t, index, value)
        if isinstance(mark_of(t), Layout) and not lost:
            return
        at = mark_of(value) if isinstance(value, Tensor) else None
        places = []
        op = Operation(Tensor.__getitem__, (t, index), {}, 0)
        if isinstance(at, Layout) and at.plain and not lost:
            for dim, size in enumerate(t.shape):
                part = propagate(op, [(t, Layout(at.batch, dim))], t[index]) if size == at.batch else None
                if isinstance(part, Layout) and part.dim - t[index].dim() == at.dim - value.dim():
                    places.append(Layout(at.batch, dim))
        mark(t, places[0] if len(places) == 1 else Lost(f"__setitem__ into a tensor of shape {tuple(t.shape)}"))

    # ---- a parameter meets the batch ---------------------------------------------------------------------------------

    def _meet(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], batched: list[tuple[Tensor, Layout]], tracked: list[Tensor],
        lost: Lost | None, form: Form | None,
    ) -> Any:  # fmt: skip
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
            self.expect(tracked)
            out = func(*args, **kwargs)
            self._mark(out, lambda t, i: lost or self.where(func, args, kwargs, batched, t, i))
            return out
        if lost:
            self._refuse(func, tracked, f"the batch cannot be followed to it: {lost.why}")
        if func is Tensor.__setitem__:
            self._refuse(
                func, tracked, "values made of parameters are written into a tensor; build it with torch.cat or torch.where"
            )
        if args and any(args[0] is t for t in tracked) and _in_place(func):
            self._refuse(func, tracked, "a tensor made of parameters is changed in place; write it as a new tensor")
        if func in ELEMENTWISE or func in _JOIN:
            return self._elementwise(func, args, kwargs, batched, tracked)
        if new := self._aligned(func, args, batched, tracked):
            args, kwargs = swap(args, kwargs, new)
            return self._look(func, args, kwargs)
        if rule and (out := self._ruled(rule, func, args, kwargs, batched, tracked, form)) is not None:
            return out
        return self._repeated(func, args, kwargs, batched, tracked)

    def _refuse(self, func: Any, tracked: list[Tensor], why: str) -> None:
        raise ValueError(
            f"varreg: in {self.observer.path()}, {name_of(func)} uses {self._names(tracked)} but {why}. Keep the batch in dimension "
            f"{self.observer.batch_dim} there (recurrent layers and attention: batch_first=True; a model whose inputs have it elsewhere: "
            "observe(..., batch_dim=)), freeze the parameter, or register a rule for the module with varreg.register_rule."
        )

    def _names(self, tracked: list[Tensor]) -> str:
        names = [ledger.name for t in tracked for _, ledger in self._leaves(t)]
        return ", ".join(f"'{n}'" for n in dict.fromkeys(names)) or "a tensor made of parameters"

    def _leaves(self, t: Tensor) -> list[tuple[Tensor, Ledger]]:
        """The observed parameters that a tracked tensor is made of."""
        if ledger := self.observer.ledger(t):
            return [(t, ledger)]
        leaves = (getattr(node, "variable", None) for node in _graph(t))
        found = {id(p): (p, ledger) for p in leaves if p is not None and (ledger := self.observer.ledger(p))}
        return list(found.values())

    def _is_made_of_parameters(self, t: Tensor) -> bool:
        """Does the graph of a tensor that was made out of sight lead to observed parameters, and to none of our nodes?"""
        for node in _graph(t):
            leaf = getattr(node, "variable", None)
            if node.name() in _OUR_NODES or (leaf is not None and not self.observer.ledger(leaf)):
                return False
        return True

    def expect(self, tracked: list[Tensor]) -> None:
        """A use without gradients, inside of a forward with them: a re-entrant checkpoint will run it again in the backward pass."""
        for t in tracked:
            for _, ledger in self._leaves(t):
                ledger.expected += 1

    def _written_in_python(self, func: Any) -> Callable[..., Any] | None:
        if func not in self._python:
            is_python = isinstance(func, types.FunctionType) and any("has_torch_function" in n for n in func.__code__.co_names)
            self._python[func] = without_override_check(func) if is_python else None
        return self._python[func]

    def target(self, t: Tensor, rule: str) -> Target:
        leaves = self._leaves(t)
        for _, ledger in leaves:
            ledger.served[rule] = None
        found = self.lookups.get(id(t)) if self.lookups else None
        return Target(self.observer, t, leaves, found[2] if found and found[1] is t.grad_fn else None)

    def _ruled(
        self, rule: Rule, func: Any, args: Sequence[Any], kwargs: dict[str, Any], batched: list[tuple[Tensor, Layout]],
        tracked: list[Tensor], form: Form | None,
    ) -> Any:  # fmt: skip
        """Let a rule serve the call, if it can; how is kept for the next call of this form."""
        bound = rule.bind(args, kwargs)
        flat = flatten(bound or {})
        ours = {id(t) for t in tracked}
        wanted = {name: i for i, (name, t) in enumerate(flat.items()) if id(t) in ours}
        if bound is None or not {name.partition(".")[0] for name in wanted} <= rule.serves:
            return None
        out, detached = _run_detached(rule, func, args, kwargs, tracked)
        places = [self.where(func, args, kwargs, batched, t, i) for i, t in enumerate(results(out))]
        if isinstance(places[0], Lost):
            return None
        layouts = {name: at for t, at in batched for name, u in flat.items() if u is t}
        shapes = {name: t.shape for name, t in flat.items()}
        call = Call(frozenset(wanted), shapes, layouts, places[0], self.observer.partition(places[0].batch))
        if not rule.when(call):
            return None
        kept = {name: i for i, name in enumerate(flat) if name.partition(".")[0] in rule.saves}
        serving = Serving(rule, call, without_tensors(bound), kept, wanted)
        used = self._use(serving, out, list(flat.values()), detached)
        for t, where in zip(used, places, strict=True):
            mark(t, where)
        self._plan(form, func, args, kwargs, batched, used, serving)
        return _shaped_like(out, used)

    def _served(
        self, plan: Plan, serving: Serving, func: Any, args: Sequence[Any], kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> Any:
        """A call that a rule serves, like an earlier one; None if it is unlike in what it returns."""
        out, detached = _run_detached(serving.rule, func, args, kwargs, serving.parameters(tensors))
        if not plan.fits(out):
            return None
        used = self._use(serving, out, tensors, detached)
        plan.mark(used)
        return _shaped_like(out, used)

    def _use(self, serving: Serving, out: Any, tensors: list[Tensor], detached: dict[int, Tensor]) -> tuple[Tensor, ...]:
        """The results, with a node behind them that takes over the gradients of the parameters."""
        outs, rule = results(out), serving.rule
        params = serving.parameters(tensors)
        kept = [detached.get(id(tensors[i]), tensors[i]) for i in serving.kept.values()]
        contributions = _Contributions(serving, [self.target(t, rule.name) for t in params])
        used: tuple[Tensor, ...] = Use.apply(contributions, rule.takes_over, len(outs), len(params), *outs, *params, *kept)
        return used

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
            aligned = there.batch == 1 or size == there.size != 1
            if not aligned and (size != 1 or func in _JOIN):
                self._refuse(func, [t], f"its shape {tuple(t.shape)} fits the batch of {there.batch} nowhere")
            shape = [there.size if d == there.dim else n for d, n in enumerate(padded.shape)]
            target = self.target(t, name_of(func).strip("_"))
            new[id(t)] = Spread.apply(t, target, shape, there, aligned, self.observer.partition(there.batch))
            mark(new[id(t)], there)
        args, kwargs = swap(args, kwargs, new)
        everything = [*batched, *((s, there) for s in new.values())]
        out = func(*args, **kwargs)
        self._mark(out, lambda t, i: self.where(func, args, kwargs, everything, t, i))
        return out

    def _aligned(
        self, func: Any, args: Sequence[Any], batched: list[tuple[Tensor, Layout]], tracked: list[Tensor]
    ) -> dict[int, Tensor]:
        """Tensors made of parameters that a function pairs with the batch, sample by sample: they carry it from here on."""
        x, at = batched[0]
        new = {}
        for t in tracked:
            if func is F.scaled_dot_product_attention:
                dim = at.dim if t.dim() == x.dim() and at.dim < x.dim() - 2 else None
            elif func in _PRODUCTS:
                dim = t.dim() - (x.dim() - at.dim) if x.dim() - at.dim > 2 else None
            elif func in STACKED or func in _CELLS:
                states = args[1] if isinstance(args[1], (list, tuple)) else (args[1],)
                dim = (1 if func in STACKED else 0) if any(t is state for state in states) else None
            elif func is F.bilinear:
                dim = at.dim if any(t is u for u in args[:2]) and at.dim < x.dim() - 1 else None
            else:
                dim = None
            if dim is not None and 0 <= dim < t.dim() and t.shape[dim] == at.size > 1:
                there = at._replace(dim=dim)
                target = self.target(t, name_of(func).strip("_"))
                new[id(t)] = Spread.apply(t, target, list(t.shape), there, True, self.observer.partition(at.batch))
                mark(new[id(t)], there)
        return new

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
            at = self.where(func, args, kwargs, batched, t, i)
            mark(t, at)
            if isinstance(at, Layout):
                call.partition = self.observer.partition(at.batch)
                call.watch(i, t, at)
            elif t.requires_grad:
                self._refuse(func, tracked, f"it is not known which part of its result belongs to which sample: {at.why}")
        return out


class _Contributions(NamedTuple):
    """What a rule says of one call, when its gradients and the tensors that were kept for it are there."""

    serving: Serving
    targets: list[Target]

    def __call__(self, grads: list[Tensor | None], saved: Sequence[Tensor]) -> list[tuple[Target, Contribution | None]]:
        if all(g is None for g in grads):
            return [(target, None) for target in self.targets]
        rule, call, bound, kept, wanted = self.serving
        found = rule.run(call, grads, **refill(bound, dict(zip(kept, saved, strict=True))))
        return [(target, found[name]) for name, target in zip(wanted, self.targets, strict=True)]


def _run_detached(
    rule: Rule, func: Any, args: Sequence[Any], kwargs: dict[str, Any], tracked: list[Tensor]
) -> tuple[Any, dict[int, Tensor]]:
    """What a function returns when its parameters are detached, if the rule takes over their gradients; and the detached ones."""
    detached = {id(t): t.detach() for t in tracked}
    if rule.takes_over:
        args, kwargs = swap(args, kwargs, detached)
    return (rule.forward or func)(*args, **kwargs), detached


def _shaped_like(out: Any, used: tuple[Tensor, ...]) -> Any:
    return used[0] if isinstance(out, Tensor) else type(out)(used)


def _in_place(func: Any) -> bool:
    name = name_of(func)
    return (name.endswith("_") and not name.endswith("__")) or (name.startswith("__i") and name.endswith("__"))


def _graph(t: Tensor) -> Iterator[Any]:
    """The nodes of the graph that made a tensor."""
    seen: set[Any] = set()
    stack = [t.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            stack += [n for n, _ in node.next_functions]


_PLAIN = (int, float, str, type(None))


def _trial(op: Operation, batched: list[tuple[Tensor, Layout]], there: Layout) -> tuple[Any, ...]:
    """What tells one kind of call from another, as far as its guess need not be tried again."""
    kinds: list[Any] = [a if isinstance(a, _PLAIN) else type(a) for a in op.args]
    kinds += [(k, v if isinstance(v, _PLAIN) else type(v)) for k, v in op.kwargs.items()]
    return op.function, op.output, there.dim, *kinds, *((x.dim(), at.dim, at.outer > 1, at.inner > 1) for x, at in batched)


def is_tracing() -> bool:
    """Is any observed model's forward being traced in this thread?"""
    return _len_torch_function_stack() > 0 and any(isinstance(mode, Tracer) for mode in _get_current_function_mode_stack())
