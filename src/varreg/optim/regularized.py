"""λ → step: what all regularized optimizers share.

A step runs the base optimizer's own step, as torch wrote it, and then puts each parameter at x + λ·(x' − x) between where it was, x,
and where the base would have it, x'. So everything that the base can do stays as it is, and λ = 1 is the base to the bit. What a
subclass adds is the variance of its increment (`_increment`); where native code knows it, too (`_native`), all that comes after the
base's step is one pass over memory (fused.py), else it goes part by part (parts.py).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from varreg import native
from varreg.engine import Moments
from varreg.engine.contribution import stat_dtype
from varreg.engine.ledger import LEDGERS, Ledger
from varreg.engine.shards import is_sharded, like, local, total
from varreg.memory import scratch
from varreg.optim import fused
from varreg.optim.fused import HISTORY, Fused, Increment
from varreg.optim.gradient import NotFiniteError, OverflowedError, UnmeasuredError, as_seen, kept, products
from varreg.optim.names import check_merged, names, warn_lone, warn_missing, warn_overflow, warn_typos
from varreg.optim.parts import Part, Work, parts, pieces
from varreg.optim.summary import LambdaSummary, summarize
from varreg.regularizer import DEFAULTS, calibrated, check, lambdas, one_or_nan, plain, ratio, regularizer

_CALIBRATION = ("vr_lambda_recent", "vr_lambda_total", "vr_lambda_steps")
_STEPS = "vr_steps"
_DEFINING = ("_increment", "_increment_of", "_lambdas_of", "_replace_lambda", "_apply", "_base_step")  # what a step does
_FIXED = ("history", "history_beta", "scale_free", "per")
_OF_A_MODEL = ("history", "history_beta", "scale_free", "cap")
# Our keys in the state begin with vr_, so that they never meet the base's.


class Found(NamedTuple):
    """A parameter with a gradient, in a group with s > 0."""

    p: Tensor
    grad: Tensor
    group: dict[str, Any]
    ledger: Ledger | None
    moments: Moments | None
    increment: Increment | None
    """How native code would do it, if it may."""


class Regularized(Optimizer):
    """Abstract: an optimizer whose increment is scaled by λ. The class after it in the bases is the torch optimizer."""

    _extra: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Options that only this optimizer has: the values allowed, the default first."""
    _scales_decay: ClassVar[bool] = False
    """Is decoupled weight decay a part of the change that λ scales?"""

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if "_native" not in vars(cls) and any(name in vars(cls) for name in _DEFINING):
            cls._native = Regularized._native  # type: ignore[method-assign]  # it is not the parent's any more
        cls.__signature__ = _spelled_out(cls)  # type: ignore[attr-defined]

    def __init__(self, *args: Any, regularizer: Mapping[str, Any], **kwargs: Any):
        self._set_options(regularizer)
        super().__init__(*args, **kwargs)

    # Options and state -------------------------------------------------------------------------------------------------------------

    def _set_options(self, given: Mapping[str, Any]) -> None:
        known = {**DEFAULTS, **{name: allowed[0] for name, allowed in self._extra.items()}}
        for name in given:
            if name not in known:
                raise TypeError(f"{type(self).__name__}.__init__() got an unexpected keyword argument '{name}'")
        self._options = {**known, **{name: plain(value) for name, value in given.items()}}
        self._forget()

    def _forget(self) -> None:
        self._lambdas: dict[Tensor, Tensor] = {}
        self._warned: set[int] = set()

    def _check(self, group: Mapping[str, Any]) -> None:
        check(group)
        for name, allowed in self._extra.items():
            if group[name] not in allowed:
                raise ValueError(f"varreg: {name} must be one of {', '.join(map(repr, allowed))}; got {group[name]!r}.")
        for name in ("differentiable", "capturable"):
            if group.get(name):
                raise ValueError(f"varreg: {type(self).__name__} does not support {name}=True; leave it False.")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        for name, value in self._options.items():
            self.defaults.setdefault(name, value)
        if isinstance(param_group, dict):
            self._check({**self.defaults, **param_group})
            warn_typos(param_group, self.defaults)
            param_group = {k: plain(v) if k in self._options else v for k, v in param_group.items()}
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_options" not in self.__dict__:  # unpickled, or copied
            self._options = {name: self.defaults[name] for name in (*DEFAULTS, *self._extra)}
        for group in self.param_groups:
            for name, value in self._options.items():
                group.setdefault(name, value)
            self._check(group)
        self._forget()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but that the regularizer's statistics keep their precision where parameters are in half precision."""
        own = [{name: group[name] for name in self._options} for group in self.param_groups]
        final: dict[str, Any] = {}

        def last(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
            """After all other hooks: options that a checkpoint does not know stay as they are, group by group."""
            groups = [{**mine, **group} for mine, group in zip(own, state["param_groups"])]
            final.update(
                {**state, "param_groups": groups if len(groups) == len(state["param_groups"]) else state["param_groups"]}
            )
            return final

        hook = self.register_load_state_dict_pre_hook(last)
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
        ids = [i for group in final["param_groups"] for i in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for i, p in zip(ids, parameters, strict=True):
            for key, value in final["state"].get(i, {}).items():
                if key.startswith("vr_"):
                    self.state[p][key] = value.to(device=p.device)
            _narrow(self.state[p], stat_dtype(p.dtype))

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return False  # a GradScaler unscales before step(), and leaves step() out where it must

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        pass  # fused optimizers set it

    # What the last step did --------------------------------------------------------------------------------------------------------

    def lambda_of(self, p: Tensor) -> Tensor | None:
        """λ of parameter `p` in the last step: a tensor of its shape, or a scalar with `per="tensor"` or `"model"`.

        None where the step was the base's own: no gradient, no moments, a batch of one, or s = 0.
        """
        lam = self._lambdas.get(p)
        return None if lam is None else like(lam.clone(), p)  # its memory is that of the next step's, too

    def lambda_summary(self) -> LambdaSummary:
        """λ of the last step, summarized per parameter and for the whole model: print it, or log its `as_dict()`.

        Where parameters are sharded, it is of this rank's shards: it may be asked for on one rank alone.
        """
        name = names(self)
        own = ((p, self._lambdas[p], None if p.grad is None else local(p.grad)) for p in name if p in self._lambdas)
        return summarize([(name[p], lam, grad, local(p).numel()) for p, lam, grad in own])

    # The step ----------------------------------------------------------------------------------------------------------------------

    @_disable_dynamo  # a step is eager, also inside of a compiled training step
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform a single optimization step: the base's, with each parameter's change scaled by λ.

        `closure`, if given, computes the loss and its gradients again; its loss is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found = self._found()
        works, fast = self._gather(found)
        self._base_step()
        for f in found:  # also where there is nothing to do yet: distributed checkpointing asks for all of the state
            if f.ledger is not None:
                self._prepare(f.p, f.group, f.moments)
        self._regularize(works, fast)
        return loss

    def _base_step(self) -> None:
        step: Any = next(vars(c)["step"] for c in type(self).__mro__ if "step" in vars(c) and not issubclass(c, Regularized))
        while getattr(step, "hooked", False):  # hooks and profiling are around our own step, and must not run twice
            step = step.__wrapped__
        step(self)

    def _found(self) -> list[Found]:
        """The parameters that λ is wanted for, with what was measured of them."""
        found = []
        for group in self.param_groups:
            self._check(group)
            increment = self._native(group) if group["s"] and fused.usual(group) else None
            for p in group["params"] if group["s"] else ():
                if (grad := p.grad) is not None and p.numel():
                    ledger = LEDGERS.get(p)
                    m = None if ledger is None else ledger.read(p, stepping=True)
                    fast = increment is not None and m is not None and fused.serves(p, grad, m, self.state.get(p, {}), increment)
                    found.append(Found(p, grad, group, ledger, m, increment if fast else None))
        return found

    def _gather(self, found: list[Found]) -> tuple[list[Work], list[Fused]]:
        """The parameters that have what λ needs, as they are before the step: those that go part by part, and those that go all at once.

        Nothing is changed yet, in case of an error.
        """
        check_merged(f.p for f in found)
        works: list[Work] = []
        fast: list[Fused] = []
        missing, lone = [], False
        for f, both in zip(found, self._compared(found), strict=True):
            p, grad, group, ledger, m, increment = f
            if m is not None and m.count < 2:
                lone = True
                continue
            try:
                if ledger is None or m is None or m.groups < 2:
                    raise UnmeasuredError
                if both is not None:
                    ledger.watch(m, both[3])
                if increment is None:  # else all shapes are the same
                    self._check_shapes(p, m, group)
                if both is None:
                    raise UnmeasuredError
                seen, kappa2 = as_seen(m, local(grad), both, ledger.is_measured(p), ledger.precision)
                if isinstance(kappa2, Tensor) and is_sharded(p):
                    raise ValueError(
                        f"varreg: the gradient of '{names(self)[p]}' was changed element by element (by clip_grad_value_, say), and each rank has "
                        "only a shard of it: what that did to its variance cannot be told. Clip by norm, or use DistributedDataParallel."
                    )
                state = self.state[p]
                if increment is None and _is_wide(state) and m.square.dtype != torch.float64:
                    m, seen = replace(m, total=m.total.double(), square=m.square.double()), seen.double()
                if increment is not None and isinstance(kappa2, float):
                    fast.append(Fused(p, group, state, m, kept(seen, m) if increment.of_gradient else m.total, kappa2, increment))
                else:
                    works.append(Work(p, local(p), group, state, m, kept(seen, m), kappa2, local(p.detach()).clone()))
            except UnmeasuredError:
                missing.append(p)
            except OverflowedError:
                warn_overflow(self, p, self._warned)
            except NotFiniteError:
                pass  # the base's step, as torch would have it
        if missing:
            warn_missing(self, missing, self._warned)
        some = bool(works or fast)
        if lone and not some:
            warn_lone(self, self._warned)
        if some:
            self._check_model()
            for group in self.param_groups:
                self._fix(group)
        return works, fast

    @staticmethod
    def _compared(found: list[Found]) -> list[Sequence[float] | None]:
        """What there is to compare of gradients and moments; for parameters in shards, of the whole: one small reduction for all of them.

        None where it cannot be had, on this rank or on another.
        """
        out: list[Sequence[float] | None] = [None] * len(found)
        fast, shards = [], []
        for i, (p, grad, _, _, m, increment) in enumerate(found):
            row = None
            if m is not None and (increment is not None or m.total.shape == local(p).shape):
                if increment is not None or native.serves(m.total, grad, m.square):
                    fast.append((i, (m.total, grad, m.square)))
                    continue
                row = products(m, local(grad), is_sharded(p)).double()
                out[i] = tuple(row.tolist())
            if is_sharded(p):
                here = torch.zeros(5, dtype=torch.float64, device=p.device) if row is None else torch.cat([row, row.new_ones(1)])
                shards.append((i, here))
        for (i, _), values in zip(fast, native.compare([row for _, row in fast]), strict=True):
            out[i] = values
        if shards:
            whole: Any = found[shards[0][0]].p
            summed = total(torch.stack([row for _, row in shards]), whole).tolist()
            for (i, _), (*sums, ranks) in zip(shards, summed, strict=True):
                out[i] = tuple(sums) if ranks == whole.device_mesh.size() else None
        return out

    def _check_model(self) -> None:
        groups = [
            {name: group[name] for name in _OF_A_MODEL} for group in self.param_groups if group["per"] == "model" and group["s"]
        ]
        if any(group != groups[0] for group in groups):
            raise ValueError(
                f"varreg: param groups with per='model' share one history, and must have the same {', '.join(_OF_A_MODEL)}; got {groups}."
            )

    def _fix(self, group: dict[str, Any]) -> None:
        """From the first regularized step on, what the statistics mean must not change."""
        now = tuple(str(group[name]) for name in (*_FIXED, *self._extra))
        before = tuple(group.setdefault("vr_fixed", now))
        if before != now:
            raise ValueError(
                f"varreg: {', '.join((*_FIXED, *self._extra))} were {before} when the history began, and are {now} now: "
                "what was recorded would mean something else. Keep them, or start a new optimizer."
            )

    def _check_shapes(self, p: Tensor, m: Moments, group: dict[str, Any]) -> None:
        """Before anything is changed."""
        if m.total.shape != local(p).shape:
            raise ValueError(
                f"varreg: parameter '{names(self)[p]}' has shape {tuple(local(p).shape)}, but moments of shape "
                f"{tuple(m.total.shape)}: was it replaced after backward()? Clear its gradient, and call backward() again."
            )
        if group["calibrate"] and is_sharded(p):
            raise ValueError(
                f"varreg: calibrate=True needs the mean of λ over a parameter, of which each rank has a shard ('{names(self)[p]}'). Leave it False."
            )
        history = self.state[p].get("vr_history") if p in self.state else None
        expected = p.shape if group["per"] == "element" else torch.Size()
        if history is not None and history.shape != expected:
            raise ValueError(
                f"varreg: the history of parameter '{names(self)[p]}' has shape {tuple(history.shape)}; with per={group['per']!r} it must "
                f"have {tuple(expected)}. It was begun with another `per`, or for another model; keep to one, or start a new optimizer."
            )

    def _regularize(self, works: list[Work], fast: list[Fused]) -> None:
        before, self._lambdas = self._lambdas, {}
        if fast:
            self._lambdas = fused.run(fast, before)
        for w in works:
            w.first = float(w.state[_STEPS].add_(1)) == 1
        for part in parts(w for w in works if w.group["per"] == "element" and w.p.numel()):
            part.put_back(self._lambdas_of(part, *self._increment_of(part)))
        spreads = self._spreads([w for w in works if w.group["per"] != "element"])
        for w in works:
            if w.group["per"] == "tensor":
                w.lam = self._lambdas_of(w, *spreads[id(w)])
        self._regularize_model([w for w in works if w.group["per"] == "model"], spreads)
        for w in works:
            if w.group["calibrate"]:
                recent, total, steps = (w.state[key] for key in _CALIBRATION)
                w.lam = calibrated(w.lam, recent, total, steps, w.group["lambda_min"], w.group["lambda_max"])
        self._replace_lambda(works)
        for w in works:
            self._apply(w)

    def _regularize_model(self, works: list[Work], spreads: dict[int, tuple[Tensor, Tensor]]) -> None:
        """One ρ and one history for all. Each state has a copy of the history, since a state dict knows nothing but parameters."""
        if not works:
            return
        lead = works[0]
        deltas, variances = zip(*(spreads[id(w)] for w in works), strict=True)
        dtype = torch.float64 if any(v.dtype == torch.float64 for v in variances) else variances[0].dtype
        delta = torch.stack([d.to(deltas[0].device, dtype).square() for d in deltas]).sum().sqrt()
        variance = torch.stack([v.to(variances[0].device, dtype) for v in variances]).sum()
        rho, rho_bar = ratio(variance, delta, lead["vr_history"], lead["vr_count"], lead.moments.count, lead.group)
        for group in self.param_groups:
            for p in group["params"] if group["per"] == "model" else ():
                for key in HISTORY:
                    if key in self.state.get(p, {}):
                        self.state[p][key].copy_(lead.state[key])
        for w in works:
            w.lam = regularizer(rho, rho_bar, w.group).to(w.state["vr_history"])

    def _spreads(self, works: list[Work]) -> dict[int, tuple[Tensor, Tensor]]:
        """√Σδ̄² and Σσ² of each, over all elements of which the variance is known; sums over shards are one reduction for all."""
        sums = [self._spread(w) for w in works]
        sharded = [i for i, w in enumerate(works) if is_sharded(w.owner)]
        if sharded:
            whole = total(torch.stack([sums[i].double() for i in sharded]), works[sharded[0]].owner)
            for i, row in zip(sharded, whole, strict=True):
                sums[i] = row.to(sums[i].dtype)
        return {id(w): (s[0].sqrt(), s[1]) for w, s in zip(works, sums, strict=True)}

    def _spread(self, w: Work) -> Tensor:
        """Σδ̄² and Σσ² over the elements of a parameter that are here."""
        sums = w.moments.total.new_zeros(2)
        for part in pieces(w) if w.p.numel() else ():
            delta, variance = self._increment_of(part)
            known = variance * one_or_nan(part["square"])
            sums += torch.stack([(delta.square() + 0 * known).nansum(), known.nansum()])
        return sums

    def _increment_of(self, part: Part) -> tuple[Tensor, Tensor]:
        """δ̄ and its variance; the sums that the variance needs are brought up to date."""
        group, m = part.group, part.moments
        total = part["total"]
        part.s2 = Moments(m.count, m.groups, total, part["square"]).variance_into(scratch("variance", total.shape, total))
        if isinstance(part.kappa2, Tensor) or part.kappa2 != 1:
            part.s2.mul_(part["kappa2"] if isinstance(part.kappa2, Tensor) else part.kappa2)
        part.g = -part["grad"] if group.get("maximize") else part["grad"]
        decay = 0.0 if group.get("decoupled_weight_decay") else float(group.get("weight_decay", 0))
        if decay:
            part.g = part.g.add(part["x"], alpha=decay)
        return self._increment(part)

    def _prepare(self, p: Tensor, group: dict[str, Any], m: Moments | None) -> None:
        """Make the state that is missing. It is in float64 while the sums of squares are, which float32 could not hold."""
        dtype = stat_dtype(p.dtype)
        if m is not None and m.square.dtype != dtype:
            dtype = m.square.dtype
            _widen(self.state[p])
        elif dtype != torch.float64 and _is_wide(self.state[p]):
            dtype = _narrow(self.state[p], dtype)
        state, sums, calibration = self.state[p], self._accumulators(group), _CALIBRATION if group["calibrate"] else ()
        missing = [key for key in (*sums, *HISTORY, _STEPS, *calibration) if key not in state]
        if not missing:
            return
        if _STEPS in state and not set(sums).isdisjoint(missing):
            state[_STEPS].zero_()  # an option was switched on: its sums begin now
        full = {*sums, *(HISTORY if group["per"] == "element" else ())}
        for key in missing:
            zeros = torch.zeros_like(p, dtype=dtype) if key in full else torch.zeros((), dtype=dtype, device=p.device)
            state[key] = zeros if group["per"] != "model" or key not in HISTORY else self._model_history(key, zeros)

    def _model_history(self, key: str, zeros: Tensor) -> Tensor:
        """For a parameter that joins late: what the others have."""
        others = (self.state[p] for g in self.param_groups if g["per"] == "model" for p in g["params"] if p in self.state)
        return next((zeros.copy_(state[key]) for state in others if key in state), zeros)

    @staticmethod
    def _lambdas_of(w: Work | Part, delta: Tensor, variance: Tensor) -> Tensor:
        present = w["square"] if isinstance(w, Part) else None
        return lambdas(variance, delta, w["vr_history"], w["vr_count"], w.moments.count, w.group, present)

    def _apply(self, w: Work) -> None:
        """x + λ·(x' − x). Decoupled weight decay is not part of an increment: it moves x before."""
        if not w.p.numel():
            return
        p, group, lam = w.p, w.group, w.lam
        if group.get("decoupled_weight_decay") and not self._scales_decay:
            w.x.mul_(1 - float(group["lr"]) * float(group["weight_decay"]))
        if p.dtype == lam.dtype:
            torch.lerp(w.x, p, lam, out=p)
        else:
            p.copy_(torch.lerp(w.x.to(lam.dtype), p.to(lam.dtype), lam))
        self._lambdas[w.owner] = lam

    # For subclasses ----------------------------------------------------------------------------------------------------------------

    def _accumulators(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Names of the sums that `_increment` keeps in the state, each of the parameter's shape."""
        return ()

    def _native(self, group: dict[str, Any]) -> Increment | None:
        """The same as `_increment`, by native code that does the whole step; None where there is none for these options."""
        return None

    def _replace_lambda(self, works: list[Work]) -> None:
        """For experiments: a last word on `w.lam`, when those of all parameters are known and none is applied."""

    def _increment(self, part: Part) -> tuple[Tensor, Tensor]:
        """δ̄ and its variance, after the base's step, for a part of a parameter.

        `part` has the state by name, `part.g` the gradient with its sign and coupled weight decay, `part.s2` its σ². The accumulators
        are brought up to date, in place; `part.first` says that they are new, and 0.
        """
        raise NotImplementedError


def _ours(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if key.startswith("vr_")}


def _is_wide(state: Mapping[str, Any]) -> bool:
    """Are our statistics in float64?"""
    steps = state.get(_STEPS)
    return steps is not None and steps.dtype == torch.float64


def _widen(state: dict[str, Any]) -> None:
    """Our statistics in float64."""
    state.update({key: value.double() for key, value in _ours(state).items()})


def _narrow(state: dict[str, Any], dtype: torch.dtype) -> torch.dtype:
    """Our statistics in the given precision, all of them, if it can hold them; else in float64. Returns which it is."""
    ours = _ours(state)
    wide = [value for value in ours.values() if value.dtype == torch.float64 != dtype and value.numel()]
    sizes = [float(local(value).abs().max()) for value in wide if local(value).numel()]
    found = torch.float64 if any(0 < size < 1e-30 or 1e38 < size < math.inf for size in sizes) else dtype
    state.update({key: value.to(found) for key, value in ours.items()})
    return found


def _spelled_out(cls: type) -> inspect.Signature:
    """The signature of `__init__` with the regularizer's options in place of `**regularizer`, for `help()` and editors."""
    signature = inspect.signature(cls.__init__)  # type: ignore[misc]
    kinds = [p for p in list(signature.parameters.values())[1:] if p.kind is not inspect.Parameter.VAR_KEYWORD]
    extra = {name: allowed[0] for name, allowed in getattr(cls, "_extra", {}).items()}
    taken = {p.name for p in kinds}
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value)
        for name, value in {**DEFAULTS, **extra}.items()
        if name not in taken
    ]
    return signature.replace(parameters=[*kinds, *options])
