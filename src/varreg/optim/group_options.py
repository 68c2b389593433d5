"""The regularizer's options in param groups: take them from arguments, check them, fix them, and
merge them with those of a checkpoint.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from varreg.errors import VarregError
from varreg.optim.scopes import check_model_groups
from varreg.options import DEFAULTS, check, check_choice

if TYPE_CHECKING:
    from varreg.optim.base import Regularized

_FIXED = ("history", "history_beta", "scale_free", "per")
FIXED = "vr_fixed"
"""The key of a param group under which `fix_groups` stores the fixed options."""
UNSUPPORTED = {
    "differentiable": "autograd cannot differentiate its step; leave it False",
    "capturable": "a step reads values once (to see whether the gradient was clipped or replaced), "
    "and a captured graph cannot; leave it False, and capture forward and backward",
}

Choices = Mapping[str, tuple[str, ...]]
"""Options that only one optimizer has: the values allowed, the default first."""


def defaults(extra: Choices) -> dict[str, Any]:
    """Return all options of an optimizer with their defaults."""
    return {**DEFAULTS, **{name: allowed[0] for name, allowed in extra.items()}}


def as_python(value: Any) -> Any:
    """Return a float of another library (NumPy's float64 is a subclass of float) as a Python float,
    so that a checkpoint holds only Python numbers. Return any other value as it is.
    """
    return float(value) if isinstance(value, float) else value


def signature(cls: type, extra: Choices) -> inspect.Signature:
    """Return the signature of `__init__` with the options in place of its `**` argument, for
    `help()` and editors.
    """
    given = inspect.signature(cls.__init__)  # type: ignore[misc]
    parameters = list(given.parameters.values())[1:]
    named = [p for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
    taken = {p.name for p in named}
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value)
        for name, value in defaults(extra).items()
        if name not in taken
    ]
    return given.replace(parameters=[*named, *options])


def check_group(cls: type[Regularized], group: Mapping[str, Any]) -> None:
    """Raise a VarregError if an option of a group has a value that is not allowed. The message
    names the allowed values.
    """
    check(group)
    for name, allowed in cls._extra_options.items():
        check_choice(name, group[name], allowed)
    for name, why in UNSUPPORTED.items():
        if group.get(name):
            raise VarregError(f"varreg: {cls.__name__} does not support {name}=True: {why}.")


def fix_groups(groups: list[dict[str, Any]], extra: Choices) -> None:
    """Store in each group the options that define its statistics. Raise a VarregError if they
    differ from those of the first regularized step.
    """
    check_model_groups(groups)
    names = (*_FIXED, *extra)
    for group in groups:
        now = tuple(str(group[name]) for name in names)
        before = tuple(group.setdefault(FIXED, now))
        if before != now:
            raise VarregError(
                f"varreg: {', '.join(names)} were {before} when the history began, and are {now} "
                "now: the recorded history would change its meaning. Do not change them, or create "
                "a new optimizer."
            )


def load_keeping_options(
    optimizer: Optimizer,
    load: Callable[[dict[str, Any]], None],
    state_dict: dict[str, Any],
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Load a checkpoint by torch's own method, and return it as the hooks have changed it.

    Options that the checkpoint does not have keep their current values, group by group.
    """
    present = [{name: group[name] for name in options} for group in optimizer.param_groups]
    final: dict[str, Any] = {}

    def merge(_: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        groups = saved["param_groups"]
        if len(groups) <= len(present):  # otherwise torch raises its own error
            groups = [{**mine, **group} for mine, group in zip(present, groups)]
        final.update({**saved, "param_groups": groups})
        return final

    hook = optimizer.register_load_state_dict_pre_hook(merge)
    try:
        load(state_dict)
    finally:
        hook.remove()
    return final
