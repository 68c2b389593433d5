"""λ → step: the base class of all regularized optimizers.

A step runs the base optimizer's own step, as torch wrote it, and then sets each parameter to
x + λ·(x' − x): x is the value before the base's step, x' the value after it. So every feature of
the base works, and λ = 1 is the base to the bit. A subclass adds its increment (`_increment`), with
the increment's variance and, if there is one, its kernel.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from varreg import _torch
from varreg.errors import VarregError
from varreg.optim import group_options, step_warnings
from varreg.optim.collect import find_steps, judge_steps
from varreg.optim.group_options import Choices, check_group
from varreg.optim.increments import Increment
from varreg.optim.lambda_summary import LambdaSummary, overview, summarize
from varreg.optim.parameter_names import names
from varreg.optim.parameter_step import ParameterStep
from varreg.optim.prepared import Calls, PreparedStep, can_keep
from varreg.optim.repeated_lambda import RepeatedLambda
from varreg.optim.state import restore, with_counts
from varreg.optim.step import Lambdas, native_calls, take_steps
from varreg.optim.whole_step import unhooked, without
from varreg.shards import like, local
from varreg.thresholds import LAMBDA_EVERY


class Regularized(Optimizer):
    """Abstract: an optimizer whose increment is scaled by λ. The class after it in the bases is the
    torch optimizer.
    """

    __signature__: ClassVar[inspect.Signature]
    _base: ClassVar[type[Optimizer]]
    """The torch optimizer."""
    _extra_options: ClassVar[Choices] = {}
    """Options that only this optimizer has: the values allowed, the default first."""
    _scales_decay: ClassVar[bool] = False
    """Whether decoupled weight decay is a part of the change that λ scales."""
    _watches_lambda: bool = True
    """Whether to warn if λ stays large, so that steps stay longer than those of the base."""
    _replace_lambda: ClassVar[Callable[[Any, list[ParameterStep]], None] | None] = None
    """A hook for experiments. It may change `step.lam` of all steps before they are applied. With a
    hook, no step is native.
    """

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        bases: Any = cls.__mro__
        cls._base = next(c for c in bases if not issubclass(c, Regularized))
        generic = cls.__init__ is Regularized.__init__
        cls.__signature__ = group_options.signature(
            cls._base if generic else cls, cls._extra_options
        )

    def __init__(self, *args: Any, **kwargs: Any):
        """Take the regularizer's options by name; the other arguments are the torch optimizer's."""
        signature = group_options.signature(self._base, self._extra_options)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{type(self).__name__}.__init__() {error}") from None
        self._set_options(kwargs)
        super().__init__(*args, **{k: v for k, v in kwargs.items() if k not in self._options})

    def _set_options(self, given: Mapping[str, Any]) -> None:
        """Store the options among these arguments, and the defaults of the others."""
        known = group_options.defaults(self._extra_options)
        chosen = {k: group_options.as_python(v) for k, v in given.items() if k in known}
        self._options = {**known, **chosen}
        self._forget()

    def _forget(self) -> None:
        """Drop the state of the last step and of the groups: both are new."""
        self._lambdas: Lambdas = {}  # of the last step
        self._prepared: PreparedStep | None = None  # the tasks of the last step
        self._warned: set[Any] = set()  # warnings that the user has seen (`step_warnings.Notice`)
        self._step_count = 0
        self._large_lambda_flags: list[Tensor] = []  # of the last checks: True if λ was large
        self._checked: list[tuple[Any, ...]] = []  # options of each group at the last check
        self._groups_fixed = False  # True: options that may not change later are fixed

    def _check_changed(self) -> None:
        """Check the groups, if an option of one has changed since the last step."""
        watched = (*self._options, *group_options.UNSUPPORTED, group_options.FIXED)
        now = []
        for group in self.param_groups:
            values = tuple(map(group.get, watched))
            now.append((id(group), values, tuple(map(type, values))))  # types, since 1 == True
        if now != self._checked:
            for group in self.param_groups:
                check_group(type(self), group)
            self._checked, self._groups_fixed = now, False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        for name, value in self._options.items():
            self.defaults.setdefault(name, value)
        if isinstance(param_group, dict):
            check_group(type(self), {**self.defaults, **param_group})
            step_warnings.warn_typos(param_group, self.defaults)
            param_group = {
                k: group_options.as_python(v) if k in self._options else v
                for k, v in param_group.items()
            }
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_options" not in self.__dict__:  # unpickled, or copied
            known = group_options.defaults(self._extra_options)
            self._options = {name: self.defaults[name] for name in known}
        self._forget()
        for group in self.param_groups:
            for name, value in self._options.items():
                group.setdefault(name, value)
            check_group(type(self), group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint as torch does, with one difference: the regularizer's statistics keep
        their precision if parameters are in half precision.
        """
        load = super().load_state_dict
        restore(self, group_options.load_keeping_options(self, load, state_dict, self._options))

    # A GradScaler unscales before step(), or skips step(). Torch's fused optimizers set this
    # attribute, to no effect.
    _step_supports_amp_scaling: Any = property(lambda self: False, lambda self, value: None)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch does; in it, every element has a count of its own."""
        return with_counts(super().state_dict())

    def lambda_of(self, p: Tensor) -> Tensor | None:
        """Return λ of parameter `p` in the last step: a tensor of its shape, or a scalar with
        `per="tensor"` or `"model"`.

        Return None if the step was the base's own: no gradient, no moments, a batch of one sample,
        or s = 0.
        """
        if not isinstance(p, Tensor):
            raise VarregError(
                f"varreg: lambda_of expects a parameter (a tensor), got {type(p).__name__}."
            )
        lam = self._lambdas.get(p)
        if isinstance(lam, RepeatedLambda):
            return lam.tensor()
        return None if lam is None else like(lam.clone(), p)  # the next step writes to its memory

    def lambda_summary(self, parameters: bool = True) -> LambdaSummary:
        """Return a summary of λ in the last step, for each parameter and for the whole model: print
        it, or log its `as_dict()`. With `parameters=False`, return only the row of the whole model.
        That takes a fraction of the time: quantiles are then those of up to 65,536 elements, evenly
        spaced.

        If parameters are sharded, the summary covers this rank's shards. One rank may call it
        without the others.
        """
        rows = []
        for p, name in names(self).items():
            if (lam := self._lambdas.get(p)) is not None:
                grad = None if p.grad is None else local(p.grad)
                count = self.state[p].get("vr_count")
                count = None if count is None else local(count)
                lam = lam.tensor() if isinstance(lam, RepeatedLambda) else lam
                rows.append((name, lam, grad, count, local(p).numel()))
        return summarize(rows) if parameters else overview(rows)

    @_torch.disable_dynamo  # a step runs eagerly, even inside a compiled training step
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step of the base, with each parameter's change scaled by λ.

        If a `closure` is given, it runs first: it computes the loss and its gradients. Return its
        loss, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_changed()
        count = self._step_count + 1
        is_watched = self._watches_lambda and count % LAMBDA_EVERY == 0
        if self._prepared is not None and not is_watched:
            taken = self._prepared.take(self)
            if taken is not None and len(taken) == len(self._prepared.lambdas):
                self._lambdas, self._step_count = taken, count
                return loss
        else:
            taken = None
        self._prepared = None
        steps = find_steps(self)
        calls: Calls = []
        if taken is None:  # native code takes the base's step of all parameters, or of none
            is_whole = bool(steps) and steps[0].with_base_step
            taken, calls = native_calls(self, steps) if is_whole else ({}, [])
        with_gradient = 0
        for group in self.param_groups:
            for p in group["params"]:
                with_gradient += p.grad is not None
        if calls and len(taken) == with_gradient == len(steps) and can_keep(steps):
            self._prepared = PreparedStep(self, steps, calls, taken)
        if len(taken) < with_gradient:
            left = [step for step in steps if step.parameter not in taken]
            for step in left:
                step.with_base_step = False
            judge_steps(self, left)
            if not self._groups_fixed and any(step.regularized for step in left):
                group_options.fix_groups(self.param_groups, self._extra_options)
                self._groups_fixed = True
            with without(self.param_groups, taken):
                self._base_step()
            taken |= take_steps(self, left)
        self._lambdas, self._step_count = taken, count
        if is_watched:
            step_warnings.watch_lambda(self, steps)
        return loss

    def _base_step(self) -> None:
        unhooked(self._base)(self)  # our own step has the hooks and the profiling already

    def _increment(self, group: dict[str, Any]) -> Increment:
        """Return the increment of a param group with these options."""
        raise NotImplementedError
