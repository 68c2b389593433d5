"""Run a model again without a trace: no dropout inside, and everything as it was afterwards."""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)


@contextlib.contextmanager
def rehearsal(model: nn.Module) -> Iterator[Rehearsal]:
    """Run `model` inside of this block as often as you like; afterwards nothing has happened.

    Inside, dropout of every kind is off (modules, functions, attention, recurrent layers; a
    randomized ReLU has its mean slope), while `model.training` stays what it is; parameters begin
    without a gradient; and an observed model is not observed. Afterwards parameters, gradients,
    buffers, attributes of modules, flags and random state are what they were, by identity and by
    value, also when the block raises. Attributes are followed through lists, dicts and sets, not
    into objects of other kinds.

    Returns:
        The `Rehearsal`: `is_random` says whether random numbers were drawn, `reset()` starts anew.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Dropout(0.5))
    >>> x = torch.ones(3, 4)
    >>> with rehearsal(model) as run:
    ...     same = torch.equal(model(x), model(x))
    >>> same, run.is_random
    (True, False)

    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"varreg: rehearsal expects a torch.nn.Module, got {type(model).__name__}.")
    run = Rehearsal(model)
    with _tracers_off(), _observers_off(model):
        try:
            run.reset()
            with run.mode:
                yield run
        finally:
            run.end()


class Rehearsal:
    """What is under way in a `rehearsal(model)`."""

    def __init__(self, model: nn.Module):
        self._state = _State(model)
        self._numbers = _RandomState(self._state.generators)
        self._grads = [(t, t.grad) for t in self._state.tensors if t.is_leaf and t.requires_grad]
        self._was_random = self._ended = False
        self.mode = _WithoutDropout(self._numbers)

    @property
    def is_random(self) -> bool:
        """Were random numbers drawn, other than by dropout? Says so inside and afterwards."""
        return self._was_random or (not self._ended and self._numbers.changed())

    @property
    def drawn(self) -> tuple[str, ...]:
        """The names of the random torch functions that were called; Python and NumPy have none."""
        return tuple(self.mode.drawn)

    @contextlib.contextmanager
    def with_dropout(self) -> Iterator[None]:
        """Let dropout be, in this block."""
        self.mode.drops = True
        try:
            yield
        finally:
            self.mode.drops = False

    def reset(self, numbers: bool = True) -> None:
        """Put everything back but hooks, gradients at None: the next run starts as the first did.

        Hooks are the caller's: a model that is observed inside of the rehearsal stays observed.
        Without `numbers`, random state goes on: the next run draws other numbers.
        """
        self._put_back(hooks=False, numbers=numbers)
        for t, _ in self._grads:
            t.grad = None

    def end(self) -> None:
        """Put everything back, gradients and hooks too."""
        self._put_back(hooks=True)
        for t, grad in self._grads:
            t.grad = grad
        self._ended = True

    def _put_back(self, hooks: bool, numbers: bool = True) -> None:
        self._was_random = self.is_random
        self._state.restore(hooks)
        if numbers:
            self._numbers.restore()


# ---- dropout -------------------------------------------------------------------------------------


def _keep(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return what dropout returns when it drops nothing: a new tensor, unless it is in place."""
    x = args[0] if args else kwargs["input"]
    in_place = kwargs.get("inplace", len(args) > 3 and args[3])
    return x if in_place or func.__name__.endswith("_") else x.clone()


def _keep_with_mask(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    x = args[0] if args else kwargs["input"]
    return x.clone(), torch.ones_like(x, dtype=torch.bool)


def _with(name: str, value: Any, place: int) -> Callable[..., Any]:
    """Return a replacement that calls the function with one argument set."""

    def call(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if len(args) > place:
            return func(*args[:place], value, *args[place + 1 :], **kwargs)
        return func(*args, **{**kwargs, name: value})

    return call


def _recurrent(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a stack of recurrent layers with dropout 0 between them."""
    packed = len(args) > 1 and isinstance(args[1], Tensor) and not args[1].is_floating_point()
    return _with("dropout", 0.0, 6 if packed else 5)(func, args, kwargs)


def _place(function: Callable[..., Any], name: str) -> int:
    return list(inspect.signature(function).parameters).index(name)


_KEEP = (
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
    torch.dropout, torch.dropout_, torch.feature_dropout, torch.feature_dropout_,
    torch.alpha_dropout, torch.alpha_dropout_, torch.feature_alpha_dropout,
    torch.feature_alpha_dropout_,
)  # fmt: skip


@functools.cache
def _replacements() -> dict[Any, Callable[..., Any]]:
    """Return, for every function that drops, how it is called so that it does not."""
    heads = F.multi_head_attention_forward
    return {
        **dict.fromkeys(_KEEP, _keep),
        **dict.fromkeys((torch.native_dropout, torch._fused_dropout), _keep_with_mask),
        **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _recurrent),
        **dict.fromkeys((F.rrelu, torch.rrelu, torch.rrelu_), _with("training", False, 3)),
        F.scaled_dot_product_attention: _with("dropout_p", 0.0, 4),
        heads: _with("dropout_p", 0.0, _place(heads, "dropout_p")),
    }


_RANDOM = frozenset(
    (
        "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal",
        "normal_", "bernoulli", "bernoulli_", "binomial", "poisson", "multinomial", "uniform_",
        "random_", "exponential_", "geometric_", "cauchy_", "log_normal_", "gumbel_softmax",
        "fractional_max_pool2d", "fractional_max_pool2d_with_indices", "fractional_max_pool3d",
        "fractional_max_pool3d_with_indices",
    )
)  # fmt: skip


_BACKWARD = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)


@functools.cache
def _unchecked(function: Any) -> Callable[..., Any]:
    """Return a function of torch's that does not hand itself to a mode again."""
    from varreg.engine.tracer import without_override_check

    return without_override_check(function)


class _WithoutDropout(TorchFunctionMode):
    """Replaces dropout wherever it is called, and notes the names of other random functions."""

    def __init__(self, numbers: _RandomState):
        super().__init__()
        self.numbers, self.replacements = numbers, _replacements()
        self.drawn: dict[str, None] = {}
        self.drops = False

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        replacement = self.replacements.get(func)
        if replacement is not None and not self.drops:
            return replacement(func, args, kwargs)
        if func in _BACKWARD:  # which may run forwards again: in checkpoints, in repeated calls
            with self:
                return _unchecked(func)(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _RANDOM:
            for value in (*args, *kwargs.values()):
                if isinstance(value, torch.Generator):
                    self.numbers.watch(value)
            self.drawn[name] = None
        return func(*args, **kwargs)


# ---- random numbers ------------------------------------------------------------------------------


def _read(source: Any) -> Any:
    """Return the state of a generator of random numbers, of any of the kinds that are known."""
    if isinstance(source, torch.Generator):
        return source.get_state()
    if isinstance(source, random.Random):
        return source.getstate()
    if hasattr(source, "bit_generator"):
        return source.bit_generator.state
    return source.get_state(legacy=False)


def _write(source: Any, state: Any) -> None:
    if isinstance(source, torch.Generator):
        source.set_state(state)
    elif isinstance(source, random.Random):
        source.setstate(state)
    elif hasattr(source, "bit_generator"):
        source.bit_generator.state = state
    else:
        source.set_state(state)


def _is_generator(value: Any) -> bool:
    if isinstance(value, (torch.Generator, random.Random)):
        return True
    numpy = sys.modules.get("numpy.random")  # not imported by us
    return numpy is not None and isinstance(value, (numpy.Generator, numpy.RandomState))


def _same(a: Any, b: Any) -> bool:
    """Are two states the same? They are tensors, arrays, or structures of those."""
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(v, b[k]) for k, v in a.items())
    if hasattr(a, "tobytes"):
        return bool(a.tobytes() == b.tobytes())
    return bool(a == b)


class _RandomState:
    """The state of all generators: the global ones, the model's, those that functions are given."""

    def __init__(self, own: Sequence[Any]):
        self.kept: dict[int, tuple[Any, Any]] = {}
        self.watch(torch.default_generator)
        self.watch(random._inst)
        numpy = sys.modules.get("numpy.random")
        if numpy is not None:
            self.watch(numpy.mtrand._rand)
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            for generator in torch.cuda.default_generators:
                self.watch(generator)
        for source in own:
            self.watch(source)

    def watch(self, source: Any) -> None:
        """Keep the state that a generator has now, if it is not kept already."""
        if id(source) not in self.kept:
            self.kept[id(source)] = source, _read(source)

    def changed(self) -> bool:
        return any(not _same(state, _read(source)) for source, state in self.kept.values())

    def restore(self) -> None:
        for source, state in self.kept.values():
            _write(source, state)


# ---- the model -----------------------------------------------------------------------------------


class _State:
    """All that a model holds: attributes of its modules, and the values of all tensors in them."""

    def __init__(self, model: nn.Module):
        self.tensors: list[Tensor] = []
        self.generators: list[Any] = []
        self._containers: list[tuple[Any, Any]] = []
        self._seen: dict[int, Any] = {}
        self._hooks: set[int] = set()
        self._visit(model)
        self._kept = [_Kept(t) for t in self.tensors]

    def _visit(self, root: Any) -> None:
        stack = [root]
        while stack:
            value = stack.pop()
            is_module = isinstance(value, nn.Module)
            if id(value) in self._seen:
                continue
            if isinstance(value, Tensor):
                self.tensors.append(value)
            elif _is_generator(value):
                self.generators.append(value)
            elif is_module or isinstance(value, dict):
                held = value.__dict__ if is_module else value
                self._containers.append((held, dict(held)))
                if is_module:
                    self._hooks |= {id(v) for k, v in held.items() if "_hooks" in k}
                stack += list(held.values())
            elif isinstance(value, (list, set, deque)):
                self._containers.append((value, list(value)))
                stack += list(value)
            elif isinstance(value, tuple):
                stack += list(value)
            else:
                continue
            self._seen[id(value)] = value  # kept alive, so that no other object has its id

    def restore(self, hooks: bool) -> None:
        for held, before in self._containers:
            if hooks or id(held) not in self._hooks:
                _refill(held, before)
        for kept in self._kept:
            kept.restore()


def _refill(held: Any, before: Any) -> None:
    """Put the contents of a container back, if they are not the same objects in the same order."""
    pairs = isinstance(before, dict)
    now, old = ([*held.items()], [*before.items()]) if pairs else ([*held], before)
    if len(now) == len(old):
        if not pairs and all(a is b for a, b in zip(now, old, strict=True)):
            return
        if pairs and all(a[0] is b[0] and a[1] is b[1] for a, b in zip(now, old, strict=True)):
            return
    held.clear()
    held.extend(before) if isinstance(held, (list, deque)) else held.update(before)


class _Kept:
    """One tensor, with all that may change about it."""

    def __init__(self, t: Tensor):
        if is_lazy(t):
            raise ValueError(
                "varreg: the model has a lazy parameter or buffer without a shape, which cannot be "
                "put back. Run the model once, model(x), so that all of its tensors exist."
            )
        self.tensor, self.needs, self.leaf = t, t.requires_grad, t.is_leaf
        self.data, self.values = t.data, t.detach().clone()
        self.version = None if t.is_inference() else t._version

    def restore(self) -> None:
        t = self.tensor
        if self.leaf and t.requires_grad != self.needs:
            t.requires_grad_(self.needs)
        if not _is_same_memory(t, self.data):
            t.data = self.data
        if not _is_equal(t.data, self.values):
            self.data.copy_(self.values)
        if self.version is not None and t._version != self.version:
            # The values are the old ones, so a graph that saved them may go on.
            torch._C._autograd._unsafe_set_version_counter((t,), (self.version,))


def _is_same_memory(a: Tensor, b: Tensor) -> bool:
    if a.layout is not torch.strided or type(a.data) is not Tensor:
        return a.shape == b.shape
    same = a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
    return same and a.device == b.device and a.data_ptr() == b.data_ptr()


_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _is_equal(a: Tensor, b: Tensor) -> bool:
    """Are they equal bit for bit, a nan and a negative zero too? If that cannot be seen, no."""
    try:
        if a.is_complex():
            a, b = torch.view_as_real(a), torch.view_as_real(b)
        if a.is_floating_point() and a.layout is torch.strided:
            a, b = a.view(_INTEGER[a.element_size()]), b.view(_INTEGER[b.element_size()])
        return torch.equal(a, b)
    except (RuntimeError, TypeError):
        return False


# ---- the engine ----------------------------------------------------------------------------------


@contextlib.contextmanager
def _observers_off(model: nn.Module) -> Iterator[None]:
    """Let the hooks of varreg's observers do nothing."""
    from varreg.engine.observer import _Enter, _Leave  # the observer itself may need a rehearsal

    hooks = [h for m in model.modules() for h in _hooks(m) if isinstance(h, (_Enter, _Leave))]
    before = [hook.observer for hook in hooks]
    for hook in hooks:
        hook.observer = None
    try:
        yield
    finally:
        for hook, observer in zip(hooks, before, strict=True):
            hook.observer = observer


def _hooks(module: nn.Module) -> list[Any]:
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


@contextlib.contextmanager
def _tracers_off() -> Iterator[None]:
    """Take tracers off the stack of modes: a rehearsal in a forward is no part of that forward."""
    from varreg.engine.tracer import Tracer

    stack = _get_current_function_mode_stack()
    if not any(isinstance(mode, Tracer) for mode in stack):
        yield
        return
    _set_stack([mode for mode in stack if not isinstance(mode, Tracer)])
    try:
        yield
    finally:
        _set_stack(stack)


def _set_stack(modes: Sequence[Any]) -> None:
    for _ in _get_current_function_mode_stack():
        _pop_mode()
    for mode in modes:
        _push_mode(mode)
