"""`observe(model)`: attach the engine to a model, and detach it again."""

from __future__ import annotations

from torch import nn
from torch.utils.hooks import RemovableHandle

from varreg.engine import coverage, processes
from varreg.engine.compiled.join import Graphs
from varreg.engine.forward import Enter, Forward, Leave, make_traceable_call
from varreg.engine.ledger import Ledger
from varreg.engine.noise_summary import Summary, summarize
from varreg.engine.norm_report import Norms, assemble
from varreg.engine.observer_warnings import Notices
from varreg.engine.parameters import Parameters, moments
from varreg.engine.partition import Grouping
from varreg.engine.refusals import (
    check_model,
    check_norms,
    check_options,
    check_per,
    is_traceable_call,
)
from varreg.engine.sample_norms import NormRecorder
from varreg.engine.totals_ledger import TotalsLedger
from varreg.engine.trace.tracer import Tracer
from varreg.engine.window import Window
from varreg.errors import VarregError


def observe(
    model: nn.Module,
    groups: int | None = None,
    *,
    reduction: str = "mean",
    batch_dim: int = 0,
    batch_norm: str = "refuse",
    norms: bool = False,
    per: str = "element",
) -> Observer:
    """Measure the moments of the per-sample gradients of `model` in every later `backward()`.

    Args:
        model: Any module. Its outputs, gradients and `state_dict()` do not change; gradients that
            are sums over samples agree to rounding.
        groups: None measures the variance over single samples, exactly. A number k splits each
            batch into k groups, and estimates the variance from the spread of their means. The
            estimate is unbiased for independent samples, noisier, and cheaper.
        reduction: `"mean"` if the loss is a mean over samples, `"sum"` if it is a sum. It only sets
            the scale of `mean` and `variance`; ρ does not depend on it.
        batch_dim: The dimension of the model's inputs that counts samples.
        batch_norm: BatchNorm in training makes samples depend on each other, so that a sample has
            no gradient of its own. `"refuse"` raises; `"contribution"` measures each sample's
            contribution to the gradient, whose sum is the gradient.
        norms: Also store the norm of each sample's gradient, for `observer.norms()`. It cannot be
            combined with `groups`.
        per: `"element"` keeps mean and variance of each element of a parameter. `"tensor"` and
            `"model"` keep their sums over elements alone; what that saves depends on the model.
            `varreg.moments(p)` is then a `Totals`. `NoiseScale`, `AdaScale`, `summary()` and
            optimizers with the same `per` need no more.

    Returns:
        The observer. Its `repr` is a table of the rule that measures each parameter. `remove()`, or
        the end of its `with` block, detaches it from the model. If the model is already observed
        with the same options, its observer is returned: a cell of a notebook may be run twice.

    """
    options = (groups, reduction, batch_dim, batch_norm, norms, per)
    known = _observer_of(model) if isinstance(model, nn.Module) else None
    if known is not None and known.options == options:
        return known
    return Observer(model, *options)


class Observer:
    """The engine on one model; `varreg.observe` returns it."""

    def __init__(
        self,
        model: nn.Module,
        groups: int | None,
        reduction: str,
        batch_dim: int,
        batch_norm: str,
        norms: bool,
        per: str,
    ):
        check_options(model, groups, reduction, batch_dim, batch_norm)
        check_norms(norms, groups)
        check_per(per, groups)
        check_model(model, batch_norm, _is_observed)
        self.options = (groups, reduction, batch_dim, batch_norm, norms, per)
        """The arguments of `observe`, without the model."""
        self.model, self.groups, self.reduction = model, groups, reduction
        self.batch_dim, self.batch_norm, self.per = batch_dim, batch_norm, per
        self.grouping = Grouping(groups)
        ledger_type = Ledger if per == "element" else TotalsLedger
        self.parameters = Parameters(model, reduction, ledger_type)
        self.window = Window(self.parameters)
        if norms:
            self.parameters.record(NormRecorder(self.window))
        self.tracer = Tracer(self)
        self.forward = Forward(self)
        self.graphs = Graphs(self)
        self.notices = Notices()
        self._handles = _put_hooks(self)
        model._compiled_call_impl = make_traceable_call(model)
        try:
            processes.attach(self)
        except Exception:
            self.remove()
            raise

    @property
    def is_on(self) -> bool:
        """Return whether the observer is attached: True until `remove()`."""
        return bool(self._handles)

    def move_hook_last(self, module: nn.Module) -> None:
        """Move our hook after hooks that a user registered later, so that it sees the output that
        they change. With several processes, leave the order: FSDP's hook must come last, since it
        frees parameters.
        """
        hooks = module._forward_hooks
        if not processes.are_several():
            for key, hook in list(hooks.items()):
                if isinstance(hook, Leave) and hook.observer is self:
                    hooks[key] = hooks.pop(key)
                    return

    def remove(self) -> None:
        """Detach the engine from the model. The model is as before `observe`, and `varreg.moments`
        returns nothing for its parameters.
        """
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.graphs.give_up()
        if is_traceable_call(self.model._compiled_call_impl):
            del self.model._compiled_call_impl
        self.forward.reset()
        self.parameters.forget()

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def summary(self, layers: bool = True) -> Summary:
        """Return gradient norm, signal-to-noise ratio and noise scale after the last backward, for
        each layer and for the whole model. Without `layers`, return them for the whole model alone.
        """
        known = self.parameters if self.is_on else ()
        named = [(ledger.name, moments(p)) for p, ledger in known if p.requires_grad]
        return summarize(named, layers)

    def norms(self) -> Norms:
        """Return the norm of each sample's gradient since gradients were cleared, in this process.
        It needs `observe(model, norms=True)`. Its text shows which samples dominate the step.
        """
        if not self.is_on:
            raise VarregError(
                "varreg: norms() was called on an observer that was removed. Call it before "
                "remove(), or observe the model again with varreg.observe(model, norms=True)."
            )
        if self.parameters.recorder is None:
            raise VarregError(
                "varreg: this observer does not store norms. Observe the model with "
                "varreg.observe(model, norms=True)."
            )
        return assemble(self.parameters)

    def coverage(self) -> list[coverage.CoverageRow]:
        """Return a row for every parameter: name, shape, the rule that measures it, and whether its
        moments are exact.
        """
        return coverage.rows(self)

    def __repr__(self) -> str:
        return coverage.text(self)


def _put_hooks(observer: Observer) -> list[RemovableHandle]:
    """Register hooks on every module that has parameters. Return handles that remove them."""
    handles = []
    for m in observer.model.modules():
        if any(True for _ in m.parameters()):
            enter, leave = (kind(observer, m is observer.model) for kind in (Enter, Leave))
            # ours comes first, so that the tracer sees how other hooks change the inputs
            before = m.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
            after = m.register_forward_hook(leave, with_kwargs=True, always_call=True)
            handles += [before, after]
    return handles


def _observer_of(model: nn.Module) -> Observer | None:
    """Return the observer of this model itself, not of a model around it; else None."""
    hooks = [hook for hook in model._forward_pre_hooks.values() if isinstance(hook, Enter)]
    return next((hook.observer for hook in hooks if hook.is_root), None)


def _is_observed(module: nn.Module) -> bool:
    hooks = module._forward_pre_hooks.values()
    return any(isinstance(hook, Enter) and hook.observer is not None for hook in hooks)
