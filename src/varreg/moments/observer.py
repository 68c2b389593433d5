"""`observe(model)`: attach the engine to a model, and take it off again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from varreg.moments.contribution import Dense, Partition
from varreg.moments.layout import Layout
from varreg.moments.ledger import LEDGERS, Ledger
from varreg.moments.summary import Summary, summarize
from varreg.moments.tracer import DERIVED, Tracer, Use, forget, mark, mark_of

ModuleRule = Callable[..., dict[str, Tensor]]
MODULE_RULES: dict[type[nn.Module], ModuleRule] = {}

_EXPECTED = {  # the function through which each layer's parameters meet the batch, for the coverage table before the first step
    nn.Linear: "linear", nn.Bilinear: "bilinear", nn.Conv1d: "conv", nn.Conv2d: "conv", nn.Conv3d: "conv",
    nn.ConvTranspose1d: "conv_transpose", nn.ConvTranspose2d: "conv_transpose", nn.ConvTranspose3d: "conv_transpose",
    nn.Embedding: "embedding", nn.EmbeddingBag: "embedding_bag", nn.LayerNorm: "layer_norm", nn.RMSNorm: "rms_norm",
    nn.GroupNorm: "group_norm", nn.InstanceNorm1d: "instance_norm", nn.InstanceNorm2d: "instance_norm", nn.InstanceNorm3d: "instance_norm",
    nn.BatchNorm1d: "batch_norm", nn.BatchNorm2d: "batch_norm", nn.BatchNorm3d: "batch_norm", nn.MultiheadAttention: "linear",
    nn.LSTM: "lstm", nn.GRU: "gru", nn.RNN: "rnn", nn.LSTMCell: "lstm_cell", nn.GRUCell: "gru_cell", nn.RNNCell: "rnn_cell",
    nn.PReLU: "prelu",
}  # fmt: skip
_BATCH_NORM = (nn.modules.batchnorm._BatchNorm,)


def register_rule(module_type: type[nn.Module]) -> Callable[[ModuleRule], ModuleRule]:
    """Decorate a function that says what each sample contributes to the gradients of a module's own parameters.

    The rule gets the module, the gradient of its output and its inputs, all with the batch in dimension 0, and returns, for each
    of the module's parameters by name, a tensor `[batch, *parameter.shape]` whose sum over the batch is the gradient. Most
    modules need no rule: the engine follows their operations. A rule is for one that hides them (a custom
    `torch.autograd.Function`, a compiled kernel) or that can be served faster. It applies to exactly this type.

    >>> import torch, varreg
    >>> class Scale(torch.nn.Module):
    ...     def __init__(self, features):
    ...         super().__init__()
    ...         self.weight = torch.nn.Parameter(torch.ones(features))
    ...     def forward(self, x):
    ...         return x * self.weight
    >>> @varreg.register_rule(Scale)
    ... def scale_rule(module, dy, x):
    ...     return {"weight": dy * x}
    >>> model = Scale(2)
    >>> observer = varreg.observe(model)
    >>> model(torch.tensor([[1.0, 2.0], [3.0, 2.0]])).sum(1).mean().backward()
    >>> varreg.moments(model.weight).variance.tolist()
    [1.0, 0.0]
    """
    if not (isinstance(module_type, type) and issubclass(module_type, nn.Module)):
        raise ValueError(f"varreg: register_rule expects a subclass of torch.nn.Module, got {module_type!r}.")

    def add(rule: ModuleRule) -> ModuleRule:
        MODULE_RULES[module_type] = rule
        return rule

    return add


def observe(
    model: nn.Module, groups: int | None = None, *, reduction: str = "mean", batch_dim: int = 0, batch_norm: str = "refuse"
) -> Observer:
    """Measure the moments of the per-sample gradients of `model` in every ordinary `backward()` from here on.

    Args:
        model: Any module. Its outputs, gradients and `state_dict()` stay what they are; where a gradient is summed up from
            samples it agrees to rounding.
        groups: None measures the variance over single samples, exactly. A number k splits each batch into k groups and
            estimates it from the spread of their means: cheaper, and unbiased for independent samples.
        reduction: Is the loss a `"mean"` over samples or a `"sum"`? It only sets the scale of `mean` and `variance`; ρ does not
            depend on it.
        batch_dim: The dimension of the model's inputs that counts samples.
        batch_norm: BatchNorm in training makes samples depend on each other, so that a sample has no gradient of its own.
            `"refuse"` raises; `"contribution"` measures each sample's contribution to the gradient, whose sum is the gradient.

    Returns:
        The observer. Its `repr` is a table of what serves each parameter; `remove()`, or leaving its `with` block, takes it off.
    """
    return Observer(model, groups, reduction, batch_dim, batch_norm)


class Observer:
    """The engine on one model; made by `varreg.observe`."""

    def __init__(self, model: nn.Module, groups: int | None, reduction: str, batch_dim: int, batch_norm: str):
        _check_options(model, groups, reduction, batch_dim, batch_norm)
        _check_model(model, batch_norm)
        self.model, self.groups, self.reduction, self.batch_dim, self.batch_norm = model, groups, reduction, batch_dim, batch_norm
        self.tracer = Tracer(self)
        self._known: dict[int, tuple[Tensor, Ledger]] = {}
        self._names: dict[nn.Module, str] = {}
        self._stack: list[_Frame] = []
        self._window: dict[int, tuple[Tensor, Ledger]] = {}
        self._queued = False
        self._recalled: dict[
            nn.Module, list[Any]
        ] = {}  # where the batch was in the inputs of a module that a checkpoint may run again
        self._learn()
        self._handles = [h for m in model.modules() for h in self._hook(m)]

    # ---- for users ---------------------------------------------------------------------------------------------------

    def remove(self) -> None:
        """Take the engine off: the model is as it was, and `varreg.moments` knows its parameters no more."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for p, ledger in self._known.values():
            if LEDGERS.get(p) is ledger:
                del LEDGERS[p]

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def summary(self) -> Summary:
        """Gradient norm, signal-to-noise ratio and noise scale, per layer and for the whole model, as of the last backward."""
        return summarize([(ledger.name, ledger.read(p)) for p, ledger in self._known.values() if p.requires_grad])

    def coverage(self) -> list[tuple[str, tuple[int, ...], str, str]]:
        """For every parameter: name, shape, the rule that serves it, and whether its moments are exact."""
        rows = []
        owners = {id(p): m for m in self.model.modules() for p in m._parameters.values() if p is not None}
        kind = "exact" if self.groups is None else f"estimated from {self.groups} groups"
        if self.batch_norm == "contribution" and any(isinstance(m, _BATCH_NORM) for m in self.model.modules()):
            kind += " (contributions: BatchNorm)"
        for name, p in self.model.named_parameters():
            ledger = self._known[id(p)][1] if id(p) in self._known else None
            if not p.requires_grad:
                rows.append((name, tuple(p.shape), "-", "frozen"))
                continue
            owner = type(owners.get(id(p)))
            rule = " + ".join(ledger.served) if ledger and ledger.served else _expected(owner)
            shape = () if isinstance(p, nn.parameter.UninitializedParameter) else tuple(p.shape)
            rows.append((name, shape, rule, kind))
        return rows

    def __repr__(self) -> str:
        rows = [
            ("parameter", "shape", "rule", "moments"),
            *((n, "×".join(map(str, s)) or "scalar", r, k) for n, s, r, k in self.coverage()),
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        state = "" if self._handles else " (removed)"
        return f"varreg observer of {type(self.model).__name__}{state}\n" + "\n".join([lines[0], "─" * len(lines[0]), *lines[1:]])

    # ---- for the tracer ----------------------------------------------------------------------------------------------

    def ledger(self, t: Tensor) -> Ledger | None:
        """The ledger of an observed parameter; None for any other tensor. Learns of parameters that came after `observe`."""
        found = self._known.get(id(t))
        if found is not None and found[0] is t:
            return found[1] if t.requires_grad else None
        if t.grad_fn is None and t.requires_grad and isinstance(t, nn.Parameter):
            self._learn()
            found = self._known.get(id(t))
            return found[1] if found else None
        return None

    def contract(self, t: Tensor, batch: int) -> Layout | None:
        """Where the batch is in a tensor of which nothing else is known."""
        dim = self.batch_dim
        return Layout(batch, dim) if t.dim() > dim and t.shape[dim] == batch else None

    def partition(self, batch: int) -> Partition:
        groups = batch if self.groups is None else self.groups
        if groups > batch > 0:
            raise ValueError(
                f"varreg: groups={groups} needs at least {groups} samples in a batch, got {batch}. Use fewer groups, larger batches, or "
                "drop the last incomplete batch (DataLoader(drop_last=True))."
            )
        return Partition(batch, min(groups, batch))

    def check(self, args: Any, kwargs: dict[str, Any]) -> None:
        """Refuse BatchNorm in training, wherever it is called from."""
        if (
            torch.is_grad_enabled()
            and self.batch_norm == "refuse"
            and (args[5] if len(args) > 5 else kwargs.get("training", False))
        ):
            raise ValueError(_batch_norm_message(self.path()))

    def path(self) -> str:
        """The path of the module whose forward is running, with its type."""
        module = self._stack[-1].module if self._stack else self.model
        name = self._names.get(module, "")
        return f"'{name}' ({type(module).__name__})" if name else f"the model itself ({type(module).__name__})"

    def records(self, node: Any) -> bool:
        """Is the running backward pass one that accumulates this parameter's gradient? `torch.autograd.grad` is not."""
        try:
            return bool(torch._C._will_engine_execute_node(node))
        except RuntimeError:
            return False

    def open(self, parameters: list[Tensor]) -> None:
        """Contributions to these parameters arrive: the window is open until the backward pass ends."""
        self._queue()
        for p in parameters:
            if id(p) not in self._window and (known := self._known.get(id(p))):
                known[1].open(p)
                self._window[id(p)] = known

    # ---- windows -----------------------------------------------------------------------------------------------------

    def _queue(self) -> None:
        """Close the window when the backward pass that is running now ends; the outermost one, where they are nested."""
        if not self._queued:
            torch.autograd.Variable._execution_engine.queue_callback(self._close)
            self._queued = True

    def abort(self) -> None:
        """The backward pass fails: what arrived stays counted, as what it added to `p.grad` does, and the window is over."""
        self._close(check=False)

    def _close(self, check: bool = True) -> None:
        window, self._window, self._queued = self._window, {}, False
        for p, ledger in window.values():
            ledger.close(p)
            if check:
                _check_whole(p, ledger)
        self._recalled = {}

    # ---- hooks -------------------------------------------------------------------------------------------------------

    def _learn(self) -> None:
        """Take stock of the model's parameters, which may have been replaced."""
        self._names = {m: name for name, m in self.model.named_modules()}
        known = {}
        for name, p in self.model.named_parameters():
            old = self._known.get(id(p))
            ledger = old[1] if old and old[0] is p else Ledger(name, self.reduction)
            known[id(p)] = (p, ledger)
            LEDGERS[p] = ledger
        self._known = known

    def _hook(self, module: nn.Module) -> Iterator[RemovableHandle]:
        yield module.register_forward_pre_hook(_Enter(self), with_kwargs=True)
        yield module.register_forward_hook(_Leave(self), with_kwargs=True, always_call=True)

    def enter(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        frame = _Frame(module)
        if not self._stack:
            if torch.is_grad_enabled():
                self._begin(module, args, kwargs)
                frame.began = tuple(t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor))
        elif self._stack[0].began is not None and not torch.is_grad_enabled():
            with torch._C.DisableTorchFunction():
                self._recalled[module] = [mark_of(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        self._stack.append(frame)
        if type(module) in MODULE_RULES and self._stack[0].began is not None and torch.is_grad_enabled() and not self._ruled():
            frame.free = _free(module, self)
            self.tracer.__exit__(None, None, None)

    def _ruled(self) -> bool:
        return any(frame.free is not None for frame in self._stack)

    def _begin(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        again = torch._C._current_graph_task_id() != -1  # inside a backward pass: a checkpoint runs this module again
        if again:
            self._queue()
        elif self._queued or self._window:  # an earlier backward pass failed and never closed its window
            self.abort()
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        recalled = self._recalled.get(module) if again else None
        self.tracer.recount = not again
        if recalled and len(recalled) == len(inputs):
            for t, where in zip(inputs, recalled, strict=True):
                if where is not None:
                    mark(t, where)
            self.tracer.batch = next((w.batch for w in recalled if isinstance(w, Layout)), 0)
        else:
            sizes = [t.shape[self.batch_dim] for t in inputs if t.dim() > self.batch_dim]
            self.tracer.batch = sizes[0] if sizes else 0
            for t in inputs:
                if (at := self.contract(t, self.tracer.batch)) and not (t.is_leaf and self.ledger(t)):
                    mark(t, at)
        self.tracer.__enter__()

    def leave(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if not self._stack or self._stack[-1].module is not module:
            return None  # its forward never began: a hook before ours raised
        frame = self._stack.pop()
        result = None
        try:
            if frame.free is not None:
                _bind(module, frame.free)
                self.tracer.__enter__()
                if output is not None:
                    with torch._C.DisableTorchFunction():
                        result = output = self._use_rule(module, frame.free, args, kwargs, output)
        finally:
            if frame.began is not None:
                self.tracer.__exit__(None, None, None)
                self._refuse_derived(output)
                forget((frame.began, output))
        return result

    def _use_rule(
        self, module: nn.Module, free: dict[str, nn.Parameter], args: Any, kwargs: dict[str, Any], output: Any
    ) -> Tensor:
        if not isinstance(output, Tensor):
            raise ValueError(
                f"varreg: the rule for {type(module).__name__} needs one tensor as output, got {type(output).__name__}."
            )
        batch = self.tracer.batch
        at = Layout(batch)
        rule, wanted = MODULE_RULES[type(module)], {n: p for n, p in free.items() if p.requires_grad and self.ledger(p)}
        inputs = [t for t in args if isinstance(t, Tensor)]
        for t in (*inputs, output):
            where = mark_of(t)
            if (isinstance(where, Layout) and where != at) or (t is output and (not t.dim() or t.shape[0] != batch)):
                raise ValueError(
                    f"varreg: the rule for {type(module).__name__} at {self._names.get(module)!r} needs the batch of {batch} in dimension 0, "
                    f"got a tensor of shape {tuple(t.shape)}."
                )
        if not wanted:
            mark(output, at)
            return output
        self.tracer._touch(list(wanted.values()))
        targets = {n: self.tracer.target(p, f"{type(module).__name__} (registered)") for n, p in wanted.items()}
        partition = self.partition(batch)

        def contributions(grads: list[Any], saved: Any) -> list[Any]:
            if grads[0] is None:
                return [(target, None) for target in targets.values()]
            it = iter(saved)
            with torch.no_grad():
                found = rule(module, grads[0], *(next(it) if isinstance(a, Tensor) else a for a in args), **kwargs)
            for name, p in wanted.items():
                expected = (batch, *p.shape)
                if name not in found or tuple(found[name].shape) != expected:
                    got = tuple(found[name].shape) if name in found else "nothing"
                    raise ValueError(
                        f"varreg: the rule for {type(module).__name__} must return {name!r} of shape {expected}, got {got}."
                    )
            return [(target, Dense(partition, found[name])) for name, target in targets.items()]

        used: Tensor = Use.apply(contributions, True, 1, len(wanted), output, *wanted.values(), *inputs)[0]
        mark(used, at)
        return used

    def _refuse_derived(self, output: Any) -> None:
        for t in tree_leaves(output):
            if isinstance(t, Tensor) and mark_of(t) is DERIVED and t.requires_grad and not t.is_leaf:
                t.register_hook(_never_met(tuple(t.shape)))


class _Frame:
    """A module whose forward is running."""

    def __init__(self, module: nn.Module):
        self.module = module
        self.began: tuple[Tensor, ...] | None = None  # the inputs, if tracing began here
        self.free: dict[str, nn.Parameter] | None = None  # the parameters, if a registered rule serves this module


class _Enter:
    """A forward pre-hook. A copy of the model, by deepcopy or pickle, carries a hook that does nothing: it is not observed."""

    def __init__(self, observer: Observer | None = None):
        self.observer = observer

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if self.observer is not None:
            self.observer.enter(module, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


class _Leave(_Enter):
    """A forward hook, called even when the forward raised."""

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any = None) -> Any:  # type: ignore[override]
        return None if self.observer is None else self.observer.leave(module, args, kwargs, output)


def _free(module: nn.Module, observer: Observer) -> dict[str, nn.Parameter]:
    """Detach a module's own parameters while its forward runs."""
    own: dict[str, Any] = {n: p for n, p in module._parameters.items() if p is not None}
    for name, p in own.items():
        module._parameters[name] = p.detach()  # type: ignore[assignment]
    return own


def _bind(module: nn.Module, own: dict[str, nn.Parameter]) -> None:
    module._parameters.update(own)


def _never_met(shape: tuple[int, ...]) -> Callable[[Tensor], None]:
    def refuse(grad: Tensor) -> None:
        raise RuntimeError(
            f"varreg: an output of the observed model, of shape {shape}, was made of parameters alone, or of inputs that varreg could not find "
            "(tensors in nested lists and dicts are found), so its gradient cannot be told apart by samples. Let the model combine it with "
            "the batch, or freeze those parameters."
        )

    return refuse


def _check_whole(p: Tensor, ledger: Ledger) -> None:
    """Once per parameter: is what was measured all that went into `p.grad`? A use outside of the model's forward is not seen."""
    if ledger.checked or p.grad is None or ledger.total is None:
        return
    ledger.checked = True
    if p._backward_hooks or (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    total, grad = ledger.total.to(p.grad.dtype), p.grad
    gap, size = (total - grad).norm(), max(grad.norm(), total.norm())
    if torch.isfinite(gap) and gap > 0.05 * size:
        raise RuntimeError(
            f"varreg: '{ledger.name}' received a gradient from outside of the observed model's forward (its norm is {float(grad.norm()):.4g}; "
            f"what was measured has {float(total.norm()):.4g}). Move that use of the parameter into a forward() of the model, or clear "
            "gradients before the first observed backward()."
        )


def _expected(owner: type) -> str:
    if owner in MODULE_RULES:
        return f"{owner.__name__} (registered)"
    for kind, rule in _EXPECTED.items():
        if issubclass(owner, kind):
            return rule
    return "followed at the first step"


def _batch_norm_message(where: str) -> str:
    return (
        f"varreg: {where} is BatchNorm in training: it makes every sample's gradient depend on the others, so a per-sample variance "
        "does not exist. Use GroupNorm or LayerNorm; or put the layer in eval mode; or pass observe(..., batch_norm='contribution') to "
        "measure each sample's contribution to the gradient instead."
    )


def _check_options(model: Any, groups: Any, reduction: Any, batch_dim: Any, batch_norm: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"varreg: observe expects a torch.nn.Module, got {type(model).__name__}.")
    if groups is not None and (isinstance(groups, bool) or not isinstance(groups, int) or groups < 1):
        raise ValueError(f"varreg: groups must be a positive whole number, or None for exact moments; got {groups!r}.")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"varreg: reduction must be 'mean' or 'sum', whichever the loss does over samples; got {reduction!r}.")
    if isinstance(batch_dim, bool) or not isinstance(batch_dim, int) or batch_dim < 0:
        raise ValueError(f"varreg: batch_dim must be a whole number from 0 up; got {batch_dim!r}.")
    if batch_norm not in ("refuse", "contribution"):
        raise ValueError(f"varreg: batch_norm must be 'refuse' or 'contribution'; got {batch_norm!r}.")


def _check_model(model: nn.Module, batch_norm: str) -> None:
    for name, m in model.named_modules():
        where = f"'{name}' ({type(m).__name__})" if name else f"the model itself ({type(m).__name__})"
        if isinstance(m, torch._dynamo.eval_frame.OptimizedModule) or m._compiled_call_impl is not None:
            raise ValueError(
                f"varreg: {where} is compiled, and compiled code ignores the engine. Call observe() first, torch.compile after."
            )
        if isinstance(m, torch.jit.ScriptModule):
            raise ValueError(
                f"varreg: {where} is a TorchScript module, which the engine cannot follow. Observe the original module."
            )
        if isinstance(m, nn.DataParallel):
            raise ValueError(f"varreg: {where} is DataParallel, which runs copies of the model. Use DistributedDataParallel.")
        if any(isinstance(h, _Enter) and h.observer is not None for h in m._forward_pre_hooks.values()):
            raise ValueError(f"varreg: {where} is already observed. Call remove() on its observer first.")
        if isinstance(m, nn.Embedding | nn.EmbeddingBag) and (m.sparse or m.scale_grad_by_freq):
            which = "sparse" if m.sparse else "scale_grad_by_freq"
            raise ValueError(f"varreg: {where} has {which}=True, which is not supported; set it to False.")
        if batch_norm == "refuse" and isinstance(m, _BATCH_NORM) and m.training:
            raise ValueError(_batch_norm_message(where))
    parameters = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if not parameters:
        raise ValueError(
            f"varreg: {type(model).__name__} has no parameter that requires a gradient: there is nothing to observe."
        )
    for name, p in parameters:
        if p.is_complex():
            raise ValueError(
                f"varreg: parameter '{name}' is complex, which is not supported. Use its real view (torch.view_as_real)."
            )
        if LEDGERS.get(p) is not None:
            raise ValueError(
                f"varreg: parameter '{name}' is already observed, through another model. Call remove() on that observer first."
            )
