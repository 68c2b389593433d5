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
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import _len_torch_function_stack
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from varreg.engine import checkpoints
from varreg.engine.arguments import flatten, refill, results, swap, tensors_in, without_tensors
from varreg.engine.checks import refuse_gradient
from varreg.engine.contribution import Contribution
from varreg.engine.eager import eager
from varreg.engine.einsum import equation_of, operands_of
from varreg.engine.layout import (
    Layout,
    Lost,
    Place,
    Ragged,
    Single,
    Summed,
    Where,
    numbers,
    place_of,
)
from varreg.engine.marks import (
    DERIVED,
    Derived,
    is_constant,
    is_unseen,
    mark,
    mark_constant,
    mark_of,
    payload_of,
)
from varreg.engine.nodes import Arrive, Repeat, Repetition, Spread, Target, Use, backwards, graph_of, places_of
from varreg.engine.packed import is_packed, place_packed, sizes_in
from varreg.engine.plans import Form, Plan, Serving, form_of
from varreg.engine.plans import Place as PlanPlace
from varreg.engine.propagation import (
    ELEMENTWISE,
    MOVERS,
    RESHAPERS,
    SHAPE_ONLY,
    SUMS,
    WRITERS,
    Gone,
    Guess,
    Operation,
    goes_by_values,
    index_of,
    is_in_place,
    is_known,
    moved_data,
    mutated,
    name_of,
    named,
    propagate,
    written,
)
from varreg.engine.rules import PACKED, RULES, STACKED, STACKED_PACKED, Call, Rule
from varreg.engine.trial import (
    Verdict,
    is_weighted,
    keeps_apart,
    try_operation,
    undisturbed,
)
from varreg.engine.unseen import are_mixed, candidates_for, place_unseen, sends_back
from varreg.engine.verdicts import Verdicts, has_rows_for_samples

if TYPE_CHECKING:
    from varreg.engine.ledger import Ledger
    from varreg.engine.observer import Observer

_JOIN = frozenset((torch.cat, torch.concat, torch.concatenate, torch.stack))
_NEW = ("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor")
_LIKE = ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like")
# functions whose result depends on their arguments by shape and type alone
_CONSTANT = frozenset([*(getattr(Tensor, name) for name in _NEW), *(getattr(torch, name) for name in _LIKE)])
_SELECTS = (torch.index_select, Tensor.index_select)
_RECURRENT = (nn.RNN, nn.GRU, nn.LSTM)
_CELLS = (torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell)
_PRODUCTS = frozenset((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.baddbmm, Tensor.baddbmm))
# functions through which values of the batch leave torch, and may come back as constants
_ESCAPES = frozenset(
    getattr(Tensor, name)
    for name in (
        *("item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__"),
        *("__complex__", "__contains__", "__dlpack__", "is_nonzero", "data_ptr", "equal", "allclose"),
        "__format__",
    )
    if hasattr(Tensor, name)
) | {torch.equal, torch.allclose, torch.is_nonzero, torch.zeros, torch.ones, torch.empty}  # as sizes
# functions whose result has a size that values say, and which Python can then read
_SIZED = frozenset(
    named(
        *("nonzero", "argwhere", "unique", "unique_consecutive", "masked_select", "bincount", "histc"),
        *("arange", "linspace", "logspace", "eye", "full", "rand", "randn", "randint", "randperm"),
        *("one_hot", "repeat_interleave", "combinations", "cartesian_prod", "tril_indices"),
    )
)

# functions that return what shapes and types say, and nothing of values
_SHAPES = """shape size dim ndim ndimension numel nelement stride storage_offset dtype device layout
element_size itemsize nbytes requires_grad grad_fn grad _version names get_device sparse_dim dense_dim
__len__ __hash__ retain_grad register_hook output_nr is_leaf type result_type promote_types can_cast
retains_grad backward _backward_hooks broadcast_shapes name data_ptr __dir__ _base"""
_METADATA = frozenset(_SHAPES.split())
_DETACH = frozenset((Tensor.detach, torch.detach, Tensor.data.__get__))  # type: ignore[attr-defined]
_FILLS = (torch.masked_fill, Tensor.masked_fill)  # which want a number to fill with
UNKNOWN = "a tensor of unknown origin"
_MOST_PLANS = 1 << 12  # forms of calls that are remembered: some models see new shapes all the time


def without_override_check(function: types.FunctionType) -> Callable[..., Any]:
    """A torch function written in Python, to be run in full, so that the functions that it calls are seen."""
    no: Callable[..., bool] = lambda *_: False  # noqa: E731
    checks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    namespace = {**function.__globals__, **dict.fromkeys(checks, no)}
    copy = types.FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


class Seen(NamedTuple):
    """The tensors of a call, by what they are."""

    batched: list[tuple[Tensor, Place]]
    """Those that carry the batch."""
    tracked: list[Tensor]
    """Those made of parameters alone."""
    lost: list[tuple[Tensor, Lost]]
    """Those that depend on the batch, and have lost it."""
    summed: list[Tensor]
    """Sums over samples."""

    @property
    def knows_samples(self) -> bool:
        return bool(self.batched or self.lost or self.summed)


class Tracer(TorchFunctionMode):
    """Follows the batch through one forward pass, and puts a node into the graph wherever a
    parameter meets it.
    """

    def __init__(self, observer: Observer):
        super().__init__()
        self.observer = observer
        self.batch = 0  # of the forward pass under way
        self._python: dict[Any, Callable[..., Any] | None] = {}
        self.verdicts = Verdicts()
        self._plans: dict[Form, Plan] = {}  # what was found out about calls, by their form
        self._split: Any = None  # groups, rank and world that they were made for
        # made without a batch in this forward: result, its node, rows
        self.lookups: dict[int, tuple[Tensor, Any, Tensor]] = {}
        self.aliases: dict[int, list[Tensor]] = {}  # tensors that a detached one shares memory with
        self.escapes: dict[tuple[str, str], None] = {}  # where values of the batch left, in this forward
        self.backwards = 0  # nodes of ours that had run backward when the forward began
        self._unseen = 0  # tensors of unknown origin in this forward
        self._placed: dict[Any, Place] = {}  # where those carry the batch
        self.rewritten: dict[int, Tensor] = {}  # memory whose rows changed owners, with what keeps it
        self._fresh: set[int] = set()  # tensors that were marked after that

    @property
    def _lets_samples_meet(self) -> bool:
        return self.observer.batch_norm == "contribution"

    def begin(self, batch: int) -> None:
        """A forward begins, with so many samples."""
        self.batch, self.lookups, self.escapes, self.aliases = batch, {}, {}, {}
        self._unseen, self.rewritten, self._fresh = 0, {}, set()
        self.backwards = backwards()
        split = self.observer.groups, self.observer.rank, self.observer.world
        if split != self._split:  # how batches are split is a part of plans
            self._plans.clear()
            self._split = split
        self.__enter__()

    def end(self) -> None:
        self.lookups, self.aliases = {}, {}
        self.__exit__(None, None, None)

    @property
    def state(self) -> tuple[Any, ...]:
        """What is kept for the forward under way."""
        return self.batch, self.lookups, self.escapes, self.rewritten, self._fresh

    @state.setter
    def state(self, state: tuple[Any, ...]) -> None:
        self.batch, self.lookups, self.escapes, self.rewritten, self._fresh = state

    def resume(self, batch: int) -> None:
        """A checkpoint runs a part of a forward again, with so many samples."""
        self.state = batch, {}, {}, {}, set()
        if not any(mode is self for mode in _get_current_function_mode_stack()):
            self.__enter__()

    @eager
    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        form = None
        if torch.is_grad_enabled() and not self.rewritten:
            form, tensors = form_of(func, args, kwargs, self.observer.ledger)
            plan = None if form is None else self._plans.get(form)
            if plan is not None:
                if plan.serving is None:
                    return self._passed(plan, func, args, kwargs)
                if (out := self._served(plan, plan.serving, func, args, kwargs, tensors)) is not None:
                    return out
        return self._look(func, args, kwargs, form)

    def _passed(self, plan: Plan, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a call without parameters that is like an earlier one; should its results be of other
        shapes, they are looked at.
        """
        out = func(*args, **kwargs)
        if plan.fits(out):
            plan.mark(results(out))
        else:
            seen = self._sorted(func, args, kwargs)
            self._mark(out, lambda t, i: self.where(func, args, kwargs, seen.batched, t, i))
        return out

    def _look(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], form: Form | None = None) -> Any:
        """Run a call of which nothing is known yet. With a form, what is found is kept for the
        next one, if it holds for all like it.
        """
        given = {k: v for k, v in kwargs.items() if k != "out"} if "out" in kwargs else kwargs
        if self._hides(args):
            self._escape(func)
        if func in _CONSTANT and not tensors_in(args[1:], given):
            return self._constant(func(*args, **kwargs))
        seen = self._sorted(func, args, given)
        if func in _DETACH:
            shared = self.aliases.setdefault(args[0].untyped_storage().data_ptr(), [])
            shared.append(args[0])
        if not (seen.tracked or seen.knows_samples):
            return self._constant(func(*args, **kwargs))
        if func is Tensor.register_hook and seen.batched:
            return self._register_hook(*args, **kwargs)
        if seen.tracked and checkpoints.are_possible():
            checkpoints.note(self.observer)
        if func in _ESCAPES:
            if seen.knows_samples and not self._is_size(seen):
                self._escape(func)
            return self._constant(func(*args, **kwargs))
        if func is F.batch_norm and (seen.batched or seen.lost):
            self.observer.check_batch_norm(args, kwargs)
        if seen.tracked and torch._C._are_functorch_transforms_active():
            self._refuse(func, seen.tracked, "it runs under a torch.func transform (vmap, grad, jvp)")
        if seen.knows_samples and self._writes_parameter(func, args):
            return self._lose(func, args, kwargs, "a parameter was written with what the batch says")
        if seen.tracked and seen.knows_samples:
            return self._meet(func, args, kwargs, seen, form)
        if (func in WRITERS or func in RESHAPERS) and seen.knows_samples:
            return self._write(func, args, given, seen)
        out = func(*args, **kwargs)
        if seen.knows_samples and self._lets_values_out(func, args, out) and not self._is_size(seen):
            self._escape(func)
        if any(isinstance(t, Tensor) for t in results(out)):
            self._mark_results(func, args, given, seen, out, form)
        if seen.knows_samples:
            self._mark_written(func, args, kwargs)
        return out

    def _mark_results(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], seen: Seen, out: Any, form: Form | None
    ) -> None:
        if seen.lost or seen.summed:
            where = self._without_place(Operation(func, args, kwargs, 0), seen)
            self._mark(out, lambda t, i: where or self.where(func, args, kwargs, seen.batched, t, i))
        elif seen.batched:
            self._mark(out, lambda t, i: self.where(func, args, kwargs, seen.batched, t, i))
            # what a detached tensor shares memory with has to be known each time; so have views
            # that are written to
            if func not in _DETACH and not (is_in_place(func) and args[0] is not seen.batched[0][0]):
                self._plan(form, func, args, kwargs, seen.batched, results(out))
        elif torch.is_grad_enabled():
            self._mark(out, lambda t, i: DERIVED if t.requires_grad else None)
            if func is F.embedding:
                self._note_lookup(out, *args, **kwargs)

    def _mark_written(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """What an operation wrote into, in place or by `out=`, may share its memory with others."""
        written_to = [args[0]] if args and isinstance(args[0], Tensor) and is_in_place(func) else []
        written_to += tensors_in((), {"out": kwargs["out"]}) if "out" in kwargs else []
        for t in written_to:
            where = mark_of(t)
            if isinstance(where, Summed):
                where = Lost("a sum over the batch was written into it", mixed=True)
            if isinstance(where, Place | Lost) and func not in RESHAPERS:
                self._mark_aliases(t, where)
        for i in mutated(func):
            if i < len(args) and isinstance(args[i], Tensor):
                mark(args[i], lost := Lost(f"{name_of(func)} writes into it", mixed=True))
                self._refuse_later(args[i], lost)

    def _writes_parameter(self, func: Any, args: Sequence[Any]) -> bool:
        """Is a parameter itself the target, as in a codebook that follows the batch?"""
        if not args or not isinstance(args[0], Tensor) or not (func in WRITERS or is_in_place(func)):
            return False
        memory = args[0].untyped_storage().data_ptr()
        shared = (args[0], *self.aliases.get(memory, ()))
        return any(self.observer.ledger(t) is not None for t in shared)

    def _lose(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], why: str) -> Any:
        out = func(*args, **kwargs)
        for t in (args[0], *self.aliases.get(args[0].untyped_storage().data_ptr(), ())):
            mark(t, Lost(why, mixed=True))
        return out

    def _hides(self, args: Sequence[Any]) -> bool:
        """Are there values of the batch in slices or nested lists? Torch reads them by itself."""
        found: list[Tensor] = []
        for a in args:
            if isinstance(a, (slice, list, tuple)):
                _find_hidden(a, found, depth=0)
        return any(isinstance(mark_of(t), Place | Lost | Summed) for t in found)

    def _lets_values_out(self, func: Any, args: Sequence[Any], out: Any) -> bool:
        """Does a function return something else than tensors and what shapes say, or tensors of a
        size that values decide?
        """
        if _is_sized_by_values(func, args):
            return True
        name = name_of(func)
        if name in _METADATA or name.startswith(("is_", "_is_", "has_")) or func is Tensor.requires_grad_:
            return False
        return any(not isinstance(t, (Tensor, type(None))) for t in results(out)) and not isinstance(out, torch.Size)

    def _constant(self, out: Any) -> Any:
        """Mark what was seen to be made of constants alone, if its sizes could be taken for the batch's."""
        for t in results(out):
            if isinstance(t, Tensor) and not t.requires_grad and self.batch in t.shape:
                mark_constant(t)
        return out

    # ---- what tensors are --------------------------------------------------------------------------

    def _sorted(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Seen:
        seen = Seen([], [], [], [])
        tensors = args[:1] if func in SHAPE_ONLY and args else tensors_in(args, kwargs)
        if func in _CONSTANT:  # of the first argument, shape and type alone count
            tensors = tensors_in(args[1:], {k: v for k, v in kwargs.items() if k not in ("input", "self")})
        sizes = sizes_in(func, args)
        for t in tensors:
            if type(t) is not Tensor and type(t).__name__ == "FakeTensor":
                continue  # a compiler looks at shapes, and calls what it makes of them later
            if t is sizes:
                continue
            where = mark_of(t)
            if self.rewritten and id(t) not in self._fresh and t.untyped_storage().data_ptr() in self.rewritten:
                where = Lost("something was written behind it", mixed=True)
            if where is None and not t.requires_grad:
                self._note_unknown(t)
            elif where is None and t.requires_grad:
                if self.observer.ledger(t):
                    where = DERIVED
                elif t.grad_fn is not None:
                    where = self._place(t, candidates_for(t, self.batch))
            elif isinstance(where, Layout) and is_unseen(t):
                where = self._place(t, [where])
            if isinstance(where, Place):
                if not any(t is x for x, _ in seen.batched):
                    seen.batched.append((t, where))
            elif isinstance(where, Lost):
                seen.lost.append((t, where))
            elif isinstance(where, Summed):
                seen.summed.append(t)
            elif where is DERIVED and t.requires_grad:
                seen.tracked.append(t)
        return seen

    def _note_unknown(self, t: Tensor) -> None:
        """A constant with as many rows as there are samples that nobody saw being made: an attribute of
        the model, or what a scripted function made of an input. A trial of the whole forward tells.
        """
        if self.batch > 1 and self.batch in t.shape and not is_constant(t) and not self.observer.is_buffer(t):
            self._escape(UNKNOWN)

    def check_input(self, t: Tensor, where: Where) -> Where:
        """Return where an input carries the batch. One that comes from an earlier forward may come
        with samples mixed, or in another order.
        """
        if t.grad_fn is None or self.batch <= 1 or self._lets_samples_meet or not isinstance(where, Place):
            return where
        if self.verdicts.due(("input", t.grad_fn.name(), t.shape)):
            with undisturbed():
                if are_mixed(t, where, self._name):
                    return Lost("samples of an input met, or changed places, before it came", mixed=True)
        return where

    def place(self, t: Tensor) -> Where | Derived:
        """Place an output that has no mark: something unseen made it."""
        return self._place(t, candidates_for(t, self.batch))

    def _place(self, t: Tensor, candidates: list[Place]) -> Where | Derived:
        """Place a tensor that was made out of sight, and mark it."""
        assert t.grad_fn is not None
        self._unseen += 1
        key = ("unseen", self._unseen, t.grad_fn.name(), t.shape, t.dtype, tuple(candidates))
        place: Where | Derived | None = self._placed.get(key)
        if self.verdicts.due(key) or place is None or not torch.is_grad_enabled():
            with undisturbed():
                place = place_unseen(t, self.batch, candidates, self._name)
            if isinstance(place, Place):
                self._placed[key] = place
                self._check_arriving(t, place)
        if isinstance(place, Place) and places_of(t.grad_fn) is None:
            self._escape(t.grad_fn.name())
        mark(t, place)
        if isinstance(place, Lost):
            self._refuse_later(t, place)
        return place

    def _check_arriving(self, t: Tensor, place: Place) -> None:
        """Try the gradient that really arrives, too: a backward of the user's may depend on its size."""
        path, waits = self.observer.path(), True

        def check(grad: Tensor) -> None:
            nonlocal waits
            if not waits:  # the trial itself sends gradients here
                return
            waits = False
            with undisturbed():
                apart = sends_back(t, place, self._name, grad)
            if not apart:
                raise RuntimeError(
                    f"varreg: in {path}, the backward of an operation that is not a torch function mixes samples: a "
                    "sample has no gradient of its own."
                )

        if self.batch > 1 and t.requires_grad and not self._lets_samples_meet:
            t.register_hook(check)

    def _name(self, t: Tensor) -> str | None:
        ledger = self.observer.ledger(t)
        return None if ledger is None else ledger.name

    def _register_hook(self, t: Tensor, hook: Callable[[Tensor], Any]) -> Any:
        """Register a hook of the user's. If it changes gradients, it is tried once: it must not mix
        samples.
        """
        at, path = mark_of(t), self.observer.path()
        if self._lets_samples_meet or self.batch <= 1 or not isinstance(at, Place):
            return t.register_hook(hook)
        place, tried = at, False

        def careful(grad: Tensor) -> Any:
            nonlocal tried
            result = hook(grad)
            if result is not None and not tried:
                tried = True
                with undisturbed():
                    said = keeps_apart(lambda given: [hook(given[0])], [grad], [place], [place], needs_proof=False)
                if said is not Verdict.APART:
                    raise RuntimeError(
                        f"varreg: in {path}, a hook on a tensor changes its gradient, and mixes samples: a sample has "
                        "no gradient of its own. Change each sample's gradient by itself."
                    )
            return result

        return t.register_hook(careful)

    def _is_size(self, seen: Seen) -> bool:
        """Is it the number of packed sequences that torch's own recurrent layers ask for?"""
        modules = self.observer.modules_around([])
        return not seen.batched and bool(modules) and type(modules[-1]) in _RECURRENT

    def _escape(self, func: Any) -> None:
        """Values of the batch leave torch, or choose where others go: when the forward ends, a trial
        says whether they came back and made samples depend on each other.
        """
        if self.batch > 1 and not self._lets_samples_meet:
            name = func if isinstance(func, str) else name_of(func)
            self.escapes[(name, self.observer.path())] = None

    # ---- where results carry the batch -------------------------------------------------------------

    def _mark(self, out: Any, where: Callable[[Tensor, int], Where | Derived | None]) -> None:
        for i, t in enumerate(results(out)):
            if isinstance(t, Tensor) and not self.observer.ledger(t):
                if (found := where(t, i)) is not None:
                    self._note(t, found)
                if isinstance(found, Lost):
                    self._refuse_later(t, found)

    def _note(self, t: Tensor, where: Where | Derived) -> None:
        mark(t, where)
        if self.rewritten:
            self._fresh.add(id(t))
            self.rewritten[-id(t)] = t  # kept, so that no other tensor gets its id

    def _refuse_later(self, t: Tensor, lost: Lost) -> None:
        """A gradient that arrives at a tensor without a place is an error: whose would it be? Where
        samples were mixed, there is no need to wait for it.
        """
        if not (t.requires_grad and t.grad_fn is not None and torch.is_grad_enabled()):
            return
        if self._lets_samples_meet or self.batch <= 1:
            return
        if lost.mixed:
            raise ValueError(self._why_no_gradient(lost))
        t.register_hook(refuse_gradient(self._why_no_gradient(lost)))

    def _why_no_gradient(self, lost: Lost) -> str:
        observer = self.observer
        if not lost.mixed:
            return (
                f"varreg: in {observer.path()}, the batch cannot be followed: {lost.why}. A gradient arrives "
                "there, and which sample it belongs to is not known. Write the operation another way, "
                "or detach its result if it is no part of the loss."
            )
        return (
            f"varreg: in {observer.path()}, {lost.why}: a sample has no gradient of its own, and its variance "
            f"does not exist. Is the batch in dimension {observer.batch_dim} of every layer's input "
            "(MultiheadAttention and recurrent layers: batch_first=True; or observe(..., batch_dim=1))? If "
            "samples are meant to meet, observe(..., batch_norm='contribution') measures each sample's "
            "contribution to the gradient instead."
        )

    def _without_place(self, op: Operation, seen: Seen) -> Where | None:
        """Return what a call with tensors that have no place gives; None if only the others count."""
        name = name_of(op.function)
        if seen.lost:
            if seen.batched and not any(t.is_floating_point() for t, _ in seen.lost):
                index = {id(t) for t in index_of(op, seen.batched)} if op.function in MOVERS else set()
                ids = {id(t) for t, _ in seen.lost}
                if op.function in ELEMENTWISE or ids <= index:  # masks and positions, as in routing
                    self._escape(op.function)
                    return None
            lost = seen.lost[0][1]
            if not seen.batched or lost.mixed:
                return lost
            return Lost(f"{name} combines samples with the result of: {lost.why}", mixed=True)
        if seen.batched:
            if op.function in SUMS and all(isinstance(at, Single) for _, at in seen.batched):
                return Summed(self.batch)  # one more sample's loss is added
            return Lost(f"{name} combines samples with a sum over the batch", mixed=True)
        if self._lets_samples_meet:
            return Summed(self.batch)
        if self.verdicts.of_affine(op, seen.summed):
            return Summed(self.batch)
        return Lost(f"{name} is not linear in a sum over the batch", mixed=True)

    def where(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        batched: list[tuple[Tensor, Place]],
        out: Tensor,
        index: int,
    ) -> Where:
        """Return where the batch is in an output. What is not known is tried, once for each kind of
        call.
        """
        op = Operation(func, args, kwargs, index)
        found = propagate(op, batched, out)
        if isinstance(found, Guess):
            found = self._try(op, batched, found, out)
        if isinstance(found, Gone):
            return self._gone(op, batched, found, out)
        return found

    def _try(self, op: Operation, batched: list[tuple[Tensor, Place]], guess: Guess, out: Tensor) -> Place | Lost | Gone:
        if self._lets_samples_meet:
            return guess.places[0] if guess.places else Gone(is_linear=False)
        name, mixed = name_of(op.function), False
        for place in guess.places:
            verdict = self.verdicts.of_operation(op, batched, place)
            if verdict is Verdict.APART:
                return place
            mixed |= verdict is Verdict.MIXED
        if not mixed:
            return Gone(is_linear=False)
        if not out.dim() or not out.requires_grad:
            return Gone(is_linear=False)
        return Lost(f"{name} mixes samples, or changes their order", mixed=True)

    def _gone(self, op: Operation, batched: list[tuple[Tensor, Place]], gone: Gone, out: Tensor) -> Summed | Lost:
        """Return what an output is that has no place for the batch: a sum over samples, or lost."""
        shapes = " and ".join(str(tuple(x.shape)) for x, _ in batched)
        lost = Lost(f"{name_of(op.function)} takes {shapes} to {tuple(out.shape)}")
        if self._lets_samples_meet or not (out.requires_grad and out.is_floating_point()):
            return lost
        if name_of(op.function) in ("nanmean", "nanmedian"):  # values decide what counts
            return lost
        if any(isinstance(at, Ragged) and at.repeats for _, at in batched):
            return Lost(f"{name_of(op.function)} adds up some samples twice, and others not at all", mixed=True)
        if not gone.is_linear and not self.verdicts.of_sum(op, batched):
            return lost
        if not gone.is_linear and self.verdicts.due(("weighted", op.function, self.observer.path())):
            with undisturbed():
                weighted = is_weighted(op, batched)
            if weighted:
                self.observer.warn_weighted(name_of(op.function))
        return Summed(self.batch)

    def _plan(
        self,
        form: Form | None,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        batched: list[tuple[Tensor, Place]],
        outs: Sequence[Any],
        serving: Serving | None = None,
    ) -> None:
        """Keep where the results carry the batch, if that holds for every call of this form."""
        op = Operation(func, args, kwargs, 0)
        if form is None or goes_by_values(op, batched):
            return
        if not is_known(func) and has_rows_for_samples(op, batched):
            return  # values of a constant may say which samples meet
        places: list[PlanPlace | None] = []
        for t in outs:
            if not isinstance(t, Tensor):
                places.append(None)
                continue
            payload = payload_of(t)
            if payload is None or not isinstance(mark_of(t), Layout):
                return
            places.append((t.shape, payload))
        if len(self._plans) >= _MOST_PLANS:
            self._plans.clear()
        self._plans[form] = Plan(tuple(places), serving)

    def _note_lookup(self, out: Tensor, ids: Tensor, table: Tensor, padding_idx: int | None = None, *_: Any, **__: Any) -> None:
        """Rows of a parameter, looked up once for all samples: what they receive can be put back
        without a detour through autograd.
        """
        rows = ids.flatten()
        distinct = len(rows.unique()) == len(rows)
        skips = padding_idx is not None and padding_idx % len(table) in rows
        if distinct and not skips and self.observer.ledger(table):
            self.lookups[id(out)] = (out, out.grad_fn, rows)

    # ---- writes ------------------------------------------------------------------------------------

    def _write(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], seen: Seen) -> Any:
        """Run a function that writes into its first argument, or into a copy of it, which then
        carries the batch where both of them say.
        """
        op = Operation(func, args, kwargs, 0)
        t = moved_data(op)[0]
        place = self._place_written(op, t, seen)
        out = func(*args, **kwargs)
        if isinstance(out, Tensor) and out is not t:  # `index_add` leaves `t` as it is
            self._mark(out, lambda *_: place)
            return out
        before = mark_of(t)
        if isinstance(before, Place) and before != place and func not in RESHAPERS:
            self.rewritten[t.untyped_storage().data_ptr()] = t  # earlier views of it are out of date
        self._note(t, place)
        if isinstance(place, Lost):
            self._refuse_later(t, place)
        if func not in RESHAPERS and isinstance(place, Place | Lost):
            self._mark_aliases(t, place)
        return out

    def _place_written(self, op: Operation, t: Tensor, seen: Seen) -> Where:
        name = name_of(op.function)
        data = [a for a in moved_data(op) if isinstance(a, Tensor)]
        index = {id(a) for a in index_of(op, seen.batched)}
        if any(a is x for a in data for x, _ in seen.lost) or seen.summed:
            why = seen.lost[0][1].why if seen.lost else "a sum over the batch"
            return Lost(f"{name} writes the result of: {why}", mixed=True)
        if any(id(x) in index for x, _ in seen.lost):
            self._escape(op.function)
        places = {id(x): at for x, at in seen.batched if id(x) not in index}
        target = places.get(id(t))
        is_chosen = any(id(x) in index for x, _ in seen.batched) and self.batch > 1
        if self._stays(op, t, places) and not is_chosen:
            assert target is not None
            return target
        is_constant = not any(id(a) in places for a in data[1:])
        if target is not None and is_constant and not is_chosen and op.function not in RESHAPERS:
            return target  # a constant is everybody's
        found = written(op, places, t, self.batch) if places else None
        if isinstance(found, Gone) or found is None:
            found = target or Lost(f"{name} into a tensor of shape {tuple(t.shape)}")
        if isinstance(found, Place) and is_chosen:
            masks = [(x, at) for x, at in seen.batched if id(x) in index]
            if all(x.dtype is torch.bool for x, _ in masks):  # each sample chooses its own rows
                own = all(at == found for _, at in masks)
                return found if own else Lost(f"{name} mixes samples", mixed=True)
            with undisturbed():
                verdict = try_operation(op, seen.batched, found)
            if verdict is not Verdict.APART:
                return Lost(f"{name} mixes samples, or changes their order", mixed=True)
        assert not isinstance(found, Guess)
        return found

    def _stays(self, op: Operation, t: Tensor, places: dict[int, Place]) -> bool:
        """Are rows written where rows of the same samples are? Found without a copy of anything."""
        target, value = places.get(id(t)), op.args[-1] if len(op.args) > 1 else None
        is_plain = op.function is Tensor.__setitem__ and not tensors_in([op.args[1]], {})
        if not (isinstance(value, Tensor) and (is_plain or op.function is Tensor.copy_)):
            return False
        if not isinstance(target, Layout | Ragged) or not isinstance(at := places.get(id(value)), Layout | Ragged):
            return False
        region = numbers(t, target)[op.args[1] if is_plain else ...]
        found = place_of(region, self.batch) if region._is_view() else None
        if not isinstance(found, Layout | Ragged) or region.dim() < value.dim():
            return False
        return found == at._replace(dim=at.dim + region.dim() - value.dim())

    def _mark_aliases(self, t: Tensor, place: Place | Lost) -> None:
        """What was written through a view, or behind a detached tensor, is in the others as well."""
        if t._is_view() and t._base is not None:
            self._mark_base(t, place)
        for other in self.aliases.get(t.untyped_storage().data_ptr(), ()):
            if other is not t:
                same = other.shape == t.shape and other.stride() == t.stride()
                found = place if same else Lost("something was written behind it", mixed=True)
                self._note(other, found)
                if isinstance(found, Lost):
                    self._refuse_later(other, found)

    def _mark_base(self, t: Tensor, place: Place | Lost) -> None:
        """What was written through a view is in the tensor that it is a view of."""
        base: Any = t._base
        before = mark_of(base)
        if isinstance(before, Lost) or isinstance(place, Lost) or not base.is_contiguous():
            self._note(base, lost := place if isinstance(place, Lost) else Lost("a view of it was written to"))
            self._refuse_later(base, lost)
            return
        owners = numbers(base, before if isinstance(before, Place) else None).contiguous()
        offset = t.storage_offset() - base.storage_offset()
        owners.as_strided(t.shape, t.stride(), offset).copy_(numbers(t, place))
        found = place_of(owners, self.batch)
        self._note(base, where := found or Lost("a view of it was written to", mixed=True))
        if isinstance(where, Lost):
            self._refuse_later(base, where)

    # ---- a parameter meets the batch ---------------------------------------------------------------

    def _meet(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], seen: Seen, form: Form | None) -> Any:
        batched, tracked = seen.batched, seen.tracked
        packed = is_packed(func, args)
        layers, dropout, training = args[5:8] if packed else args[4:7] if func in STACKED else (0, 0, 0)
        if layers > 1 and dropout > 0 and training:
            with self:
                return (STACKED_PACKED if packed else STACKED)[func](*args, **kwargs)
        rule = PACKED[func] if packed else RULES.get(func)
        if rule is None and (python := self._written_in_python(func)):
            with self:
                return python(*args, **kwargs)
        if not torch.is_grad_enabled():
            self.expect(tracked)
            out = func(*args, **kwargs)
            lost = seen.lost[0][1] if seen.lost else None
            self._mark(out, lambda t, i: lost or self.where(func, args, kwargs, batched, t, i))
            return out
        if self._is_reordered(Operation(func, args, kwargs, 0), seen):
            self._escape(func)
            out = func(*args, **kwargs)
            self._mark(out, lambda t, i: DERIVED if t.requires_grad else None)
            return out
        if seen.lost or seen.summed:
            why = seen.lost[0][1].why if seen.lost else "it was summed up"
            self._refuse(func, tracked, f"the batch cannot be followed to it: {why}")
        if func in WRITERS:
            self._refuse(
                func,
                tracked,
                "values made of parameters are written into a tensor; build it with torch.cat or torch.where",
            )
        if args and any(args[0] is t for t in tracked) and is_in_place(func):
            self._refuse(func, tracked, "a tensor made of parameters is changed in place; write it as a new tensor")
        if any(isinstance(at, Ragged) and not at.is_whole for _, at in batched):
            self._refuse(func, tracked, "some rows of the batch belong to no sample yet")
        if len({at.batch for _, at in batched}) > 1:
            self._refuse(func, tracked, "it meets batches of different sizes")
        if func in _FILLS and args[2:] and args[2] is tracked[0] and not tracked[0].dim():
            return self._look(torch.where, (args[1], args[2], args[0]), {})
        if func in ELEMENTWISE or func in _JOIN or self._broadcasts(func, batched, tracked):
            return self._elementwise(func, args, kwargs, batched, tracked)
        if new := self._aligned(func, args, kwargs, batched, tracked):
            args, kwargs = swap(args, kwargs, new)
            return self._look(func, args, kwargs)
        if rule and (out := self._ruled(rule, func, args, kwargs, batched, tracked, form)) is not None:
            return out
        if packed and self.batch > 1:
            self._refuse(func, tracked, "it is not known whose the rows of the packed sequences are")
        return self._repeated(func, args, kwargs, batched, tracked)

    def _is_reordered(self, op: Operation, seen: Seen) -> bool:
        """Are all rows of a tensor made of parameters put in an order that depends on the batch, as
        states that are learned are put in that of packed sequences?
        """
        if op.function not in _SELECTS or len(op.args) != 3 or seen.batched or seen.summed:
            return False
        t, dim, index = op.args
        if not (isinstance(t, Tensor) and len(seen.lost) == 1 and seen.lost[0][0] is index):
            return False
        return torch.equal(index.sort().values, torch.arange(t.shape[dim], device=index.device))

    def _broadcasts(self, func: Any, batched: list[tuple[Tensor, Place]], tracked: list[Tensor]) -> bool:
        """Is it a product of matrices for each sample, with matrices that all samples share?"""
        if func not in _PRODUCTS or len(batched) != 1 or len(tracked) != 1:
            return False
        (x, at), t = batched[0], tracked[0]
        if isinstance(at, Single) or t.dim() <= 2 or at.dim >= x.dim() - 2:
            return False
        dim = at.dim + max(x.dim(), t.dim()) - x.dim() - (max(x.dim(), t.dim()) - t.dim())
        return dim < 0 or t.shape[dim] == 1

    def _refuse(self, func: Any, tracked: list[Tensor], why: str) -> None:
        raise ValueError(
            f"varreg: in {self.observer.path()}, {name_of(func)} uses {self.names(tracked)} but {why}. Keep the batch in dimension "
            f"{self.observer.batch_dim} there (recurrent layers and attention: batch_first=True; a model whose inputs have it elsewhere: "
            "observe(..., batch_dim=)), freeze the parameter, or register a rule for the module with varreg.register_rule."
        )

    def names(self, tracked: list[Tensor]) -> str:
        names = [ledger.name for t in tracked for _, ledger in self._leaves(t)]
        return ", ".join(f"'{n}'" for n in dict.fromkeys(names)) or "a tensor made of parameters"

    def _leaves(self, t: Tensor) -> list[tuple[Tensor, Ledger]]:
        """The observed parameters that a tracked tensor is made of."""
        if ledger := self.observer.ledger(t):
            return [(t, ledger)]
        leaves = (getattr(node, "variable", None) for node in graph_of(t))
        found = {id(p): (p, ledger) for p in leaves if p is not None and (ledger := self.observer.ledger(p))}
        return list(found.values())

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
        self,
        rule: Rule,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        batched: list[tuple[Tensor, Place]],
        tracked: list[Tensor],
        form: Form | None,
    ) -> Any:
        """Let a rule serve the call, if it can; how is kept for the next call of this form."""
        bound = rule.bind(args, kwargs)
        flat = flatten(bound or {})
        ours = {id(t) for t in tracked}
        wanted = {name: i for i, (name, t) in enumerate(flat.items()) if id(t) in ours}
        if bound is None or not _arguments(wanted) <= rule.serves:
            return None
        layouts = {name: at for t, at in batched for name, u in flat.items() if u is t}
        if not _arguments(layouts) <= rule.carries or not layouts:
            return None
        shapes = {name: t.shape for name, t in flat.items()}
        first, plain = next(iter(layouts.values())), without_tensors(bound)
        partition = self.observer.partition(first.batch)
        call = Call(frozenset(wanted), shapes, layouts, first, partition, plain)
        if not rule.when(call):
            return None
        out, detached = _run_detached(rule, func, args, kwargs, tracked)
        wheres = [self.where(func, args, kwargs, batched, t, i) for i, t in enumerate(results(out))]
        places = [at for at in wheres if isinstance(at, Place)]
        if len(places) < len(wheres):
            return None
        call = call._replace(out=places[0], partition=self.observer.partition(places[0].batch))
        if not rule.when(call):
            return None
        saves = rule.saves if _arguments(wanted) != {"bias"} else frozenset()  # a bias needs no input
        kept = {name: i for i, name in enumerate(flat) if name.partition(".")[0] in saves}
        serving = Serving(rule, call, plain, kept, wanted, tuple(places))
        used = self._use(serving, out, list(flat.values()), detached)
        for t, where in zip(used, places, strict=True):
            mark(t, where)
        self._plan(form, func, args, kwargs, batched, used, serving)
        return _shaped_like(out, used)

    def _served(
        self, plan: Plan, serving: Serving, func: Any, args: Sequence[Any], kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> Any:
        """A call that a rule serves, like an earlier one; None if it is unlike in what it returns."""
        if checkpoints.are_possible():
            checkpoints.note(self.observer)
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
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        batched: list[tuple[Tensor, Place]],
        tracked: list[Tensor],
    ) -> Any:
        x, at = batched[0]
        rank = max(t.dim() for t in tensors_in(args, kwargs))
        there = at if isinstance(at, Single) else at._replace(dim=at.dim + rank - x.dim())
        new = {}
        for t in tracked:
            shape, aligned = self._spread_shape(func, t, there, rank)
            target = self.target(t, name_of(func).strip("_"))
            partition = self.observer.partition(there.batch)
            new[id(t)] = Spread.apply(t, target, shape, there, aligned, partition)
            mark(new[id(t)], there)
        args, kwargs = swap(args, kwargs, new)
        everything = [*batched, *((s, there) for s in new.values())]
        out = func(*args, **kwargs)
        self._mark(out, lambda t, i: self.where(func, args, kwargs, everything, t, i))
        if func in _JOIN and not _has_rows_of(out, there) and not all(_is_expanded(t, there) for t in tracked):
            self._refuse(func, tracked, "it becomes rows of the batch that belong to no sample")
        return out

    def _spread_shape(self, func: Any, t: Tensor, there: Place, rank: int) -> tuple[list[int], bool]:
        """Return the shape of a tensor that is expanded along the batch; has it a row for each sample?"""
        if isinstance(there, Single):
            return list(t.shape), True
        padded = t if func in _JOIN else t[(None,) * (rank - t.dim())]
        size = padded.shape[there.dim] if padded.dim() else 1
        aligned = there.batch == 1 or size == there.size != 1
        if not aligned and (size != 1 or func in _JOIN):
            self._refuse(func, [t], f"its shape {tuple(t.shape)} fits the batch of {there.batch} nowhere")
        return [there.size if d == there.dim else n for d, n in enumerate(padded.shape)], aligned

    def _pairs_rows(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        batched: list[tuple[Tensor, Place]],
        tracked: list[Tensor],
        t: Tensor,
    ) -> bool:
        """Does a function of no known kind use row i of `t` for sample i alone? Where the sizes
        allow it, it is tried.
        """
        x, at = batched[0]
        if isinstance(at, Single) or len(tracked) != 1 or func in RULES or self._lets_samples_meet:
            return False
        if t.dim() != x.dim() or t.shape[at.dim] != at.size or at.size <= 1:
            return False
        op = Operation(func, args, kwargs, 0)

        def find() -> bool:
            with torch.no_grad():
                out = results(func(*args, **kwargs))[0]
            both = [*batched, (t, at)]
            found = propagate(op, both, out)
            places = found.places if isinstance(found, Guess) else (found,)
            return any(isinstance(p, Place) and try_operation(op, both, p) is Verdict.APART for p in places)

        return self.verdicts.of_pairs(op, batched, find)

    def _aligned(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        batched: list[tuple[Tensor, Place]],
        tracked: list[Tensor],
    ) -> dict[int, Tensor]:
        """Return tensors made of parameters that a function pairs with the batch, sample by sample:
        they carry it from here on.
        """
        x, at = batched[0]
        new: dict[int, Tensor] = {}
        if is_packed(func, args):
            at = place_packed(args, batched, 1) or at
        if isinstance(at, Single):
            return new
        for t in tracked:
            dim = _paired_dim(func, args, x, at.dim, t)
            if dim is None and self._pairs_rows(func, args, kwargs, batched, tracked, t):
                dim = at.dim
            if dim is not None and 0 <= dim < t.dim() and t.shape[dim] == at.size > 1:
                there = at._replace(dim=dim)
                target = self.target(t, name_of(func).strip("_"))
                partition = self.observer.partition(at.batch)
                new[id(t)] = Spread.apply(t, target, list(t.shape), there, True, partition)
                mark(new[id(t)], there)
        return new

    # ---- everything else ---------------------------------------------------------------------------

    def _repeated(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        batched: list[tuple[Tensor, Place]],
        tracked: list[Tensor],
    ) -> Any:
        where = f"{name_of(func)} in {self.observer.path()}"
        targets = [self.target(t, f"{name_of(func).strip('_')} (general)") for t in tracked]
        call = Repetition(func, args, kwargs, batched, tracked, targets, where)
        before = [x.detach().clone() if is_in_place(func) else x for x, _ in batched]
        taps = Repeat.apply(call, *before, *tracked)
        new = {id(t): tap for t, tap in zip(tracked, taps, strict=True)}
        given, options = swap(args, kwargs, new)
        out = func(*given, **options)
        outs = results(out)
        as_they_were = {id(x): b for (x, _), b in zip(batched, before, strict=True)}
        shown, shown_options = swap(args, kwargs, as_they_were)
        carriers = [(b, at) for b, (_, at) in zip(before, batched, strict=True)]
        for i, t in enumerate(outs):
            if not isinstance(t, Tensor):
                continue
            at = self.where(func, shown, shown_options, carriers, t, i)
            if isinstance(at, Place):
                call.partition = self.observer.partition(at.batch)
                call.places[i] = at
            elif t.requires_grad:
                why = at.why if isinstance(at, Lost) else "it is a sum over samples"
                self._refuse(func, tracked, f"it is not known which part of its result belongs to which sample: {why}")
        if is_in_place(func):
            call.watch(0, outs[0])
            mark(outs[0], call.places[0])
            return out
        used = Arrive.apply(call, *outs)
        for i, at in call.places.items():
            mark(used[i], at)
        return _shaped_like(out, used)


def _find_hidden(a: Any, found: list[Tensor], depth: int) -> None:
    """Find tensors in slices, and in lists below the first level, which the tracer looks through."""
    if isinstance(a, Tensor):
        if depth > 1:
            found.append(a)
    elif isinstance(a, slice):
        found += [b for b in (a.start, a.stop, a.step) if isinstance(b, Tensor)]
    elif isinstance(a, (list, tuple)):
        for b in a:
            _find_hidden(b, found, depth + 1)


def _is_sized_by_values(func: Any, args: Sequence[Any]) -> bool:
    """Do values decide the size of the result?"""
    if func is Tensor.__getitem__:
        return any(t.dtype is torch.bool for t in tensors_in(args[1:], {}))
    return func in _SIZED or (func is torch.where and len(args) == 1)


def _arguments(names: Iterable[str]) -> set[str]:
    """Return the names of arguments, without the positions in them."""
    return {name.partition(".")[0] for name in names}


def _has_rows_of(out: Tensor, there: Place) -> bool:
    """Has the result of a join as many rows of the batch as its arguments?"""
    where = mark_of(out)
    if isinstance(there, Single) or there.batch == 1:
        return isinstance(where, Place)
    return isinstance(where, Layout | Ragged) and where.size == there.size


def _is_expanded(t: Tensor, there: Place) -> bool:
    """Are all rows of a tensor the same one? Then each sample may have one of them."""
    return not isinstance(there, Single) and t.stride(there.dim) == 0


def _paired_dim(func: Any, args: Sequence[Any], x: Tensor, dim: int, t: Tensor) -> int | None:
    """Return the dimension of `t` that a function pairs with dimension `dim` of `x`."""
    if func is F.scaled_dot_product_attention:
        return dim if t.dim() == x.dim() and dim < x.dim() - 2 else None
    if func in _PRODUCTS:
        return t.dim() - (x.dim() - dim) if x.dim() - dim > 2 else None
    if func in STACKED or func in _CELLS:
        states = args[2 if is_packed(func, args) else 1]
        states = states if isinstance(states, (list, tuple)) else (states,)
        return (1 if func in STACKED else 0) if any(t is state for state in states) else None
    if func is torch._VF.einsum:  # type: ignore[attr-defined]
        terms, operands = equation_of(args).inputs, operands_of(args)
        letter = next(c[dim] for c, o in zip(terms, operands, strict=True) if o is x)
        return next((c.find(letter) for c, o in zip(terms, operands, strict=True) if o is t), None)
    if func is F.bilinear:
        return dim if any(t is u for u in args[:2]) and dim < x.dim() - 1 else None
    return None


class _Contributions(NamedTuple):
    """What a rule says of one call, when its gradients and the tensors that were kept for it are there."""

    serving: Serving
    targets: list[Target]

    @property
    def places(self) -> Sequence[Any]:
        return self.serving.places

    def __call__(self, grads: list[Tensor | None], saved: Sequence[Tensor]) -> list[tuple[Target, Contribution | None]]:
        if all(g is None for g in grads):
            return [(target, None) for target in self.targets]
        rule, call, bound, kept, wanted, _ = self.serving
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


def is_tracing() -> bool:
    """Is any observed model's forward being traced in this thread?"""
    return _len_torch_function_stack() > 0 and any(isinstance(mode, Tracer) for mode in _get_current_function_mode_stack())
