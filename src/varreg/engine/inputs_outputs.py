"""Inputs and outputs of an observed forward: where inputs carry the batch, and whether a loss can
separate the samples in outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from varreg import _torch
from varreg.engine.escapes import SCRIPTED, try_alone, try_escapes
from varreg.engine.frames import hooks_of_call
from varreg.engine.marks import DERIVED, forget, is_unseen, mark_of
from varreg.engine.refusals import derived_output_message, refuse_gradient
from varreg.engine.scripted import calls_scripted
from varreg.engine.trace.arguments import hidden_tensors, tensors_of
from varreg.engine.trace.gradient_hooks import watch_outputs
from varreg.engine.trace.layout import Layout, Lost, Owners, Ragged, Single, Summed, Where
from varreg.engine.trace.packed import rows_of_steps
from varreg.engine.trace.unseen import candidates_for, find_place
from varreg.errors import VarregError

if TYPE_CHECKING:
    from varreg.engine.observer import Observer

# ---- inputs --------------------------------------------------------------------------------------


class Inputs(NamedTuple):
    """The batch in the inputs of a forward, before it runs."""

    batch: int
    """The number of samples; 0 if no input carries the batch."""
    marks: list[Any]
    """Where each input carries the batch; None if it does not."""
    is_certain: bool
    """True: all inputs agree about the size of the batch."""


def place_inputs(
    inputs: Sequence[Tensor],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    dim: int,
    ledger: Callable[[Tensor], Any],
) -> Inputs:
    """Return where the inputs carry the batch: in dimension `dim`, if they have the same size there
    as the first input. Parameters, which have a ledger, do not carry the batch.
    """
    if len(args) == 1 == len(inputs) and args[0] is inputs[0] and not kwargs:  # the usual case
        t = inputs[0]
        if t.dim() > dim and not t.requires_grad and t.shape[dim]:
            return Inputs(t.shape[dim], [Layout(t.shape[dim], dim)], True)
    batch, packed = _place_packed(args, kwargs)
    # sizes of inputs that could carry the batch: they are not parameters, and have the dimension
    all_sizes = [
        None if t.dim() <= dim or (t.requires_grad and ledger(t)) else t.shape[dim] for t in inputs
    ]
    sizes = [
        size
        for t, size in zip(inputs, all_sizes, strict=True)
        if size is not None and id(t) not in packed
    ]
    batch = batch or (sizes[0] if sizes else 0)
    marks: list[Any] = [Layout(batch, dim) if size == batch else None for size in all_sizes]
    if packed:
        marks = [packed.get(id(t), at) for t, at in zip(inputs, marks, strict=True)]
    return Inputs(batch, marks, sizes.count(batch) == len(sizes))


def _place_packed(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[int, dict[int, Where]]:
    """Return the number of samples in the packed sequences among a model's arguments (0 if there
    are no packed sequences), and the marks of their tensors, by id.
    """
    batch, known = 0, dict[int, Where]()
    for pack in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(pack, PackedSequence):
            samples = int(pack.batch_sizes[0])
            order = (
                torch.arange(samples, device="cpu")
                if pack.sorted_indices is None
                else pack.sorted_indices.cpu()
            )
            rows = order[rows_of_steps(pack.batch_sizes)]
            lost = Lost("the order of packed sequences")
            known.update((id(t), lost) for t in pack[1:] if t is not None)
            alone = Layout(1, 0, 1, len(rows))
            known[id(pack.data)] = alone if samples == 1 else Ragged(samples, 0, Owners(rows))
            batch = batch or samples
    return batch, known


def refuse_inputs(inputs: Sequence[Tensor], path: Callable[[], str]) -> None:
    """Refuse inputs whose rows cannot be followed: sparse, nested, and tensors without values."""
    faking = _torch.dispatch_modes() and _torch.is_faking()
    for t in inputs:
        if t.is_nested or t.layout is not torch.strided:
            kind = "a nested tensor" if t.is_nested else f"a tensor of layout {t.layout}"
            raise VarregError(
                f"varreg: an input of {path()} is {kind}, in which samples cannot be followed. "
                "Pass padded, dense tensors."
            )
        if t.is_meta or faking or (type(t) is not Tensor and hasattr(t, "fake_mode")):
            raise VarregError(
                f"varreg: an input of {path()} is a tensor without values (meta, or fake), and "
                "varreg tells samples apart by their values. Call remove() on the observer for "
                "such a run, or pass a real batch."
            )


# ---- outputs -------------------------------------------------------------------------------------


class Outputs:
    """The tensors that a forward passes to the loss, as outputs or in attributes."""

    def __init__(self, observer: Observer):
        self.observer = observer
        # attributes in which parts of a forward were left
        self._attributes: set[tuple[nn.Module, str]] = set()
        self._looks = 0  # the number of close looks at outputs

    def check(
        self,
        module: nn.Module,
        args: Any,
        kwargs: dict[str, Any],
        inputs: list[Tensor],
        output: Any,
        is_certain: bool,
    ) -> None:
        """Check the output of a module's forward, and remove the marks of inputs and outputs. A
        forward that failed has no output.
        """
        outputs, trace = tensors_of(output), self.observer.tracer.trace
        is_due = self.observer.tracer.verdicts.is_due("outputs")  # look closely now and then
        self._looks += is_due
        is_deep = is_due and self._looks & (self._looks - 1) == 0
        hidden = hidden_tensors(output, outputs) if is_deep else []
        self.check_tensors([*outputs, *hidden], is_certain, is_due, is_deep)
        if is_deep and calls_scripted(self.observer.model):
            trace.escape(SCRIPTED)
        if output is not None and (trace.escapes or trace.is_counted):
            try_escapes(self.observer, module, args, kwargs, inputs, outputs)
            try_alone(self.observer, module, args, kwargs, inputs, outputs)
        if output is not None and (module._backward_pre_hooks or _torch.global_backward_pre_hooks):
            watch_outputs(trace, hooks_of_call(), output)
        forget([*inputs, *outputs])

    def check_tensors(
        self, outputs: list[Tensor], is_certain: bool, is_due: bool, is_deep: bool
    ) -> None:
        """Refuse gradients of outputs in which the samples cannot be separated.

        `is_certain` says that all inputs agreed about the size of the batch. If `is_due`, also
        search attributes of modules for tensors; if `is_deep`, also containers and objects that the
        model holds.
        """
        samples = {at.sample for t in outputs if isinstance(at := mark_of(t), Single)}
        # True if each sample has its own output, as in a list of their losses
        has_all = len(samples) == self.observer.tracer.trace.batch
        for t in (*outputs, *self._left_in_attributes(outputs, is_due, is_deep)):
            if t.requires_grad and not t.is_leaf and torch.is_grad_enabled():
                self._check(t, has_all, is_certain)
        if is_certain and is_due:
            self._warn_of_samples_elsewhere(outputs)

    def _warn_of_samples_elsewhere(self, outputs: list[Tensor]) -> None:
        """Warn if all outputs have the samples in another dimension than the inputs: then the
        inputs may have them elsewhere.
        """
        dim, first = self.observer.batch_dim, None
        for t in outputs:
            at = mark_of(t)
            if t.requires_grad and at is not None:
                if not (isinstance(at, Layout) and at.dim != dim < t.dim()):
                    return
                first = first or (tuple(t.shape), at.batch, at.dim)
        if first is not None:
            self.observer.notices.elsewhere(self.observer.forward.path(), *first, dim)

    def _left_in_attributes(
        self, outputs: list[Tensor], is_due: bool, is_deep: bool
    ) -> list[Tensor]:
        """Return tensors that this forward left in attributes, for example auxiliary losses. If
        `is_due`, search for such attributes; attributes that were found are read each time.
        """
        if is_due:
            for module in self.observer.model.modules():
                for name, value in vars(module).items():
                    if is_deep and name not in _OF_ALL_MODULES:
                        found = hidden_tensors(value)
                    else:
                        found = [value] if isinstance(value, Tensor) else []
                    if any(map(_is_of_forward, found)):
                        self._attributes.add((module, name))
        if not self._attributes:
            return []
        values = [getattr(module, name, None) for module, name in self._attributes]
        left = [t for v in values for t in hidden_tensors(v, outputs) if _is_of_forward(t)]
        for t in left:
            if mark_of(t) is DERIVED:
                # A hook leaves the weight that it makes of parameters where forward() uses it
                # (torch.nn.utils.weight_norm). A comparison of p.grad with the sums finds what a
                # loss adds to it.
                for _, ledger in self.observer.tracer.trace.leaves(t):
                    ledger.is_used_unseen = ledger.is_check_due = True
        return [t for t in left if mark_of(t) is not DERIVED]

    def _check(self, t: Tensor, has_all: bool, is_certain: bool) -> None:
        trace, where = self.observer.tracer.trace, mark_of(t)
        if where is None or is_unseen(t):
            where = find_place(trace, t, candidates_for(t, trace.batch))
        if where is DERIVED:
            message = derived_output_message(tuple(t.shape), trace.names([t]))
            t.register_hook(refuse_gradient(message))
        elif self.observer.batch_norm != "contribution":
            dim = self.observer.batch_dim
            why = _fault(t, where, trace.batch, dim, has_all, is_certain)
            if why is not None:
                path = self.observer.forward.path()
                message = f"varreg: an output of {path}, of shape {tuple(t.shape)}, {why}"
                t.register_hook(refuse_gradient(message))


_OF_ALL_MODULES = vars(nn.Module()).keys()


def _is_of_forward(t: Tensor) -> bool:
    return t.grad_fn is not None and mark_of(t) is not None


def _fault(
    t: Tensor, where: Any, batch: int, dim: int, has_all: bool, is_certain: bool
) -> str | None:
    """Return the reason why a loss could not separate the samples in an output; None if it can."""
    size = t.shape[dim] if t.dim() > dim else None
    if isinstance(where, Lost):
        return (
            f"has lost the batch: {where.why}. varreg does not know which sample its gradient "
            "belongs to."
        )
    if isinstance(where, Summed):
        if t.numel() <= 1:
            return None
        return (
            "is a sum over the batch: a loss that uses it may mix samples. Return it with the "
            "batch, or finish the loss inside of forward()."
        )
    if batch == 1:
        if is_certain or size in (1, None):
            return None
        return (
            f"has size {size} in dimension {dim}. The first input has size 1 there, which varreg "
            "took for the batch, and others differ. Pass the input that carries the batch first."
        )
    is_single = isinstance(where, Single)
    if isinstance(where, Single) and not has_all:
        return (
            f"belongs to sample {where.sample} alone, and not every sample has an output: a loss "
            "would treat it as the output of the whole batch."
        )
    if size == batch and where != Layout(batch, dim) and not is_single:
        return (
            f"has as many rows in dimension {dim} as there are samples, but they are not the "
            "samples in their order: a loss would pair them with others' targets. Return samples "
            f"in the order in which they came, in dimension {dim}."
        )
    whole = Layout(batch, dim), Layout(batch, 0)
    if dim and t.dim() and t.shape[0] == batch and where not in whole and not is_single:
        return (
            "has as many rows in dimension 0 as there are samples, but samples are inside of "
            "another dimension: a loss would take the rows for samples. Return samples in "
            f"dimension {dim}."
        )
    if isinstance(where, Ragged) and (where.repeats or not where.is_in_order):
        return (
            "has its samples in another order than the inputs: a loss would pair them with others' "
            "targets. Put them back in order."
        )
    if isinstance(where, Layout) and where.dim != dim and not is_certain:
        return (
            f"has the batch of {batch} in dimension {where.dim}. The inputs differ in the size of "
            f"dimension {dim}, and varreg took that of the first one for the batch. Pass the input "
            "that carries the batch first."
        )
    return None
