"""A mode that switches dropout off: each function with dropout is replaced, or called with other
arguments.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from varreg import _torch
from varreg.engine.rehearsal.random_state import RandomState
from varreg.engine.trace.trial.trial_values import is_trial_running

_KEEP = (
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
    torch.dropout, torch.dropout_, torch.feature_dropout, torch.feature_dropout_,
    torch.alpha_dropout, torch.alpha_dropout_, torch.feature_alpha_dropout,
    torch.feature_alpha_dropout_,
)  # fmt: skip
"""Functions that return their input when they drop nothing."""
_RANDOM = frozenset(
    (
        "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal",
        "normal_", "bernoulli", "bernoulli_", "binomial", "poisson", "multinomial", "uniform_",
        "random_", "exponential_", "geometric_", "cauchy_", "log_normal_", "gumbel_softmax",
        "fractional_max_pool2d", "fractional_max_pool2d_with_indices", "fractional_max_pool3d",
        "fractional_max_pool3d_with_indices",
    )
)  # fmt: skip
"""Names of functions that draw random numbers."""
_BACKWARD = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)


class WithoutDropout(TorchFunctionMode):
    """Replaces dropout wherever it is called, and notes the names of other random functions."""

    def __init__(self, numbers: RandomState):
        super().__init__()
        self.numbers, self.replacements = numbers, _replacements()
        self.drawn: dict[str, None] = {}
        self.drops = False

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        replacement = self.replacements.get(func)
        if replacement is not None and not self.drops:
            return replacement(func, args, kwargs)
        if func in _BACKWARD:
            # This call may run forwards again (in checkpoints, in repeated calls), so the mode,
            # which torch switches off in here, is switched on again.
            with self:
                return _unchecked(func)(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _RANDOM and not is_trial_running():
            for value in (*args, *kwargs.values()):
                if isinstance(value, torch.Generator):
                    self.numbers.watch(value)
            self.drawn[name] = None
        return func(*args, **kwargs)


@functools.cache
def _replacements() -> dict[Any, Callable[..., Any]]:
    """Return a replacement without dropout for every function that has dropout."""
    heads = F.multi_head_attention_forward
    return {
        **dict.fromkeys(_KEEP, _keep),
        **dict.fromkeys((torch.native_dropout, _torch.fused_dropout), _keep_with_mask),
        **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _recur_without),
        **dict.fromkeys((F.rrelu, torch.rrelu, torch.rrelu_), _set_argument("training", False, 3)),
        F.scaled_dot_product_attention: _set_argument("dropout_p", 0.0, 4),
        heads: _set_argument("dropout_p", 0.0, _position(heads, "dropout_p")),
    }


def _keep(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the input as a new tensor, or the input itself if the dropout is in place."""
    x = args[0] if args else kwargs["input"]
    in_place = kwargs.get("inplace", len(args) > 3 and args[3])
    return x if in_place or func.__name__.endswith("_") else x.clone()


def _keep_with_mask(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the input and a mask that is True everywhere, as dropout with a mask does if nothing
    is dropped.
    """
    x = args[0] if args else kwargs["input"]
    return x.clone(), torch.ones_like(x, dtype=torch.bool)


def _set_argument(name: str, value: Any, position: int) -> Callable[..., Any]:
    """Return a replacement that calls the function with one argument set."""

    def call(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if len(args) > position:
            return func(*args[:position], value, *args[position + 1 :], **kwargs)
        return func(*args, **{**kwargs, name: value})

    return call


def _recur_without(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a stack of recurrent layers with dropout 0 between them."""
    # With packed sequences, batch sizes are the second argument, and there is one more.
    is_packed = len(args) > 1 and isinstance(args[1], Tensor) and not args[1].is_floating_point()
    return _set_argument("dropout", 0.0, 6 if is_packed else 5)(func, args, kwargs)


def _position(function: Callable[..., Any], name: str) -> int:
    """Return the position of an argument by its name."""
    return list(inspect.signature(function).parameters).index(name)


@functools.cache
def _unchecked(function: Any) -> Callable[..., Any]:
    """Return a torch function that does not pass itself to the active modes again."""
    from varreg.engine.trace.functions import without_override_check

    return without_override_check(function)
