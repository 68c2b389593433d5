"""`observe(model)`: attach the engine to a model, and take it off again."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _len_torch_function_stack
from torch.overrides import _get_current_function_mode_stack, _pop_mode
from torch.utils.hooks import RemovableHandle

from varreg.engine.arguments import tensors_of
from varreg.engine.checks import (
    BATCH_NORM,
    batch_norm_message,
    check_model,
    check_options,
    check_whole,
    derived_output_message,
    place,
    refuse_gradient,
    refuse_inputs,
    refuse_transforms,
)
from varreg.engine.contribution import Partition
from varreg.engine.eager import eager
from varreg.engine.layout import Layout, Lost, Place, Ragged, Single, Summed, Where
from varreg.engine.ledger import LEDGERS, Ledger, moments, unmeasured_message
from varreg.engine.marks import DERIVED, forget, is_unseen, mark, mark_of, new_epoch
from varreg.engine.modules import MODULE_RULES, detach_own, restore_own, use_rule
from varreg.engine.nodes import backwards
from varreg.engine.packed import packed_inputs
from varreg.engine.summary import Summary, summarize
from varreg.engine.tracer import UNKNOWN, Tracer, is_tracing
from varreg.engine.trial import Verdict, undisturbed
from varreg.engine.whole_forward import try_forward

_EXPECTED = {  # the function through which each layer's parameters meet the batch, for the coverage table before the first step
    nn.Linear: "linear", nn.Bilinear: "bilinear", nn.Conv1d: "conv", nn.Conv2d: "conv", nn.Conv3d: "conv",
    nn.ConvTranspose1d: "conv_transpose", nn.ConvTranspose2d: "conv_transpose", nn.ConvTranspose3d: "conv_transpose",
    nn.Embedding: "embedding", nn.EmbeddingBag: "embedding_bag", nn.LayerNorm: "layer_norm", nn.RMSNorm: "rms_norm",
    nn.GroupNorm: "group_norm", nn.InstanceNorm1d: "instance_norm", nn.InstanceNorm2d: "instance_norm",
    nn.InstanceNorm3d: "instance_norm", BATCH_NORM: "batch_norm", nn.MultiheadAttention: "linear", nn.LSTM: "lstm",
    nn.GRU: "gru", nn.RNN: "rnn", nn.LSTMCell: "lstm_cell", nn.GRUCell: "gru_cell", nn.RNNCell: "rnn_cell", nn.PReLU: "prelu",
}  # fmt: skip


def observe(
    model: nn.Module, groups: int | None = None, *, reduction: str = "mean", batch_dim: int = 0, batch_norm: str = "refuse"
) -> Observer:
    """Measure the moments of the per-sample gradients of `model` in every ordinary `backward()` from here on.

    Args:
        model: Any module. Its outputs, gradients and `state_dict()` stay what they are; where a gradient is summed up from
            samples it agrees to rounding.
        groups: None measures the variance over single samples, exactly. A number k splits each batch into k groups and
            estimates it from the spread of their means: unbiased for independent samples, noisier, and less to add up.
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
        check_options(model, groups, reduction, batch_dim, batch_norm)
        check_model(model, batch_norm, lambda m: any(_is_ours(h) for h in m._forward_pre_hooks.values()))
        self.model, self.groups, self.reduction, self.batch_dim, self.batch_norm = model, groups, reduction, batch_dim, batch_norm
        self.tracer = Tracer(self)
        self._known: dict[int, tuple[Tensor, Ledger]] = {}  # parameters by id
        self._names: dict[nn.Module, str] = {}
        self._run = _Run()
        self._window: dict[int, tuple[Tensor, Ledger]] = {}  # parameters that the running backward has reached
        self._partition: Partition | None = None  # of the running backward's batch
        self._windows = 0
        self.forward = 0  # the number of the forward that runs, or ran last; 0 in a checkpoint's
        self._forwards: set[int] = set()  # of which uses arrived in the running backward
        self._forward_numbers = itertools.count(1)
        self._looked = False  # were gradients that were cleared looked for, for the running backward?
        self._queued = False  # will the running backward close the window when it ends?
        self._recalled: dict[nn.Module, list[list[Any]]] = {}  # the marks of inputs that a checkpoint will want again
        self._passed: set[int] = set()  # parameters without a use in the running backward that are counted already
        self._expected: Partition | None = None  # the batch of the last forward
        self.rank, self.world = 0, 1  # among those that share the batch
        self._pairs: Callable[[nn.Module], list[tuple[Tensor, Tensor]]] = lambda model: []
        self._whole: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # gathered parameters by id, each with the sharded one that it stands for
        self._warned: set[str] = set()
        self._learn()
        self._aside: set[tuple[nn.Module, str]] = set()  # attributes in which parts of a forward were left
        self._handles = [h for m in model.modules() if any(True for _ in m.parameters()) for h in self._hook(m)]
        try:
            self._attach()
        except Exception:
            self.remove()
            raise

    # ---- for users ---------------------------------------------------------------------------------------------------

    def remove(self) -> None:
        """Take the engine off: the model is as it was, and `varreg.moments` knows its parameters no more."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._reset()
        for p, ledger in self._known.values():
            if LEDGERS.get(p) is ledger:
                del LEDGERS[p]

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def summary(self) -> Summary:
        """Gradient norm, signal-to-noise ratio and noise scale, per layer and for the whole model, as of the last backward."""
        known = self._known.values() if self._handles else ()
        return summarize([(ledger.name, moments(p)) for p, ledger in known if p.requires_grad])

    def coverage(self) -> list[tuple[str, tuple[int, ...], str, str]]:
        """For every parameter: name, shape, the rule that serves it, and whether its moments are exact."""
        owners = {id(p): type(m) for m in self.model.modules() for p in m._parameters.values() if p is not None}
        kind = "exact" if self.groups is None else f"estimated from {self.groups} groups"
        if self.batch_norm == "contribution":
            kind += " (contributions: samples may meet)"
        rows = []
        for name, p in self.model.named_parameters():
            known = self._known.get(id(p))
            rule = " + ".join(known[1].served) if known and known[1].served else _expected(owners[id(p)])
            shape = () if isinstance(p, nn.parameter.UninitializedParameter) else tuple(p.shape)
            rows.append((name, shape, rule, kind) if p.requires_grad else (name, shape, "-", "frozen"))
        return rows

    def __repr__(self) -> str:
        table = [(n, "×".join(map(str, s)) or "scalar", r, k) for n, s, r, k in self.coverage()]
        rows = [("parameter", "shape", "rule", "moments"), *table]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        state = "" if self._handles else " (removed)"
        return "\n".join(
            [f"varreg observer of {type(self.model).__name__}{state}", lines[0], "─" * max(map(len, lines)), *lines[1:]]
        )

    # ---- for the tracer ----------------------------------------------------------------------------------------------

    def ledger(self, t: Tensor) -> Ledger | None:
        """The ledger of an observed parameter; None for any other tensor. Learns of parameters that came after `observe`."""
        if not t.requires_grad:
            return None
        p = self._shard_of(t)
        found = self._known.get(id(p))
        if found is not None and found[0] is p:
            return found[1]
        if t.grad_fn is None and isinstance(t, nn.Parameter):
            self._learn()
            found = self._known.get(id(self._shard_of(t)))
            return found[1] if found else None
        return None

    def _shard_of(self, t: Tensor) -> Tensor:
        """The parameter that the optimizer has; in a forward it may be there as a whole that was gathered from its shards."""
        found = self._whole.get(id(t))
        return found[1] if found is not None and found[0] is t else t

    def follow_shards(self, pairs: Callable[[nn.Module], list[tuple[Tensor, Tensor]]]) -> None:
        """From now on, parameters are there as gathered wholes in a forward: `pairs` has each whole and the sharded one that it stands for."""
        self._pairs = pairs
        self._learn()

    def is_buffer(self, t: Tensor) -> bool:
        """Is it a buffer or parameter of the model, which was there before the batch came?"""
        return id(t) in self._lasting

    def contract(self, t: Tensor, batch: int) -> Layout | None:
        """Where the batch is in a tensor of which nothing else is known."""
        dim = self.batch_dim
        return Layout(batch, dim) if t.dim() > dim and t.shape[dim] == batch else None

    def partition(self, batch: int) -> Partition:
        groups = batch if self.groups is None else self._own_groups(self.groups)
        if self.world > 1:
            groups = min(groups, batch)  # another rank may have more: counts are added up
        if groups > batch > 0:
            raise ValueError(
                f"varreg: groups={groups} needs at least {groups} samples in a batch, got {batch}. Use fewer groups, larger batches, "
                "or drop the last incomplete batch (DataLoader(drop_last=True))."
            )
        return Partition(batch, min(groups, batch))

    def _own_groups(self, groups: int) -> int:
        """Groups are of the global batch: each rank has its share of them, and one at least."""
        return max(1, groups // self.world + (self.rank < groups % self.world))

    def check_batch_norm(self, args: Any, kwargs: dict[str, Any]) -> None:
        """Refuse BatchNorm in training, wherever `F.batch_norm` is called from."""
        training = args[5] if len(args) > 5 else kwargs.get("training", False)
        if training and self.batch_norm == "refuse" and torch.is_grad_enabled():
            raise ValueError(batch_norm_message(self.path()))

    def path(self) -> str:
        """The path of the module whose forward is running, with its type."""
        module = self._run.modules[-1] if self._run.modules else self.model
        return place(self._names.get(module, ""), module)

    # ---- for checkpoints -----------------------------------------------------------------------------

    @property
    def inputs(self) -> list[Tensor]:
        """The inputs of the forward that is traced."""
        return self._run.inputs or []

    def modules_around(self, inside: list[nn.Module]) -> list[nn.Module]:
        """Return the modules whose forward is running, without the innermost ones that are given."""
        modules = list(self._run.modules)
        for module in inside:
            if modules and modules[-1] is module:
                modules.pop()
        return modules

    @contextlib.contextmanager
    def resume(self, modules: list[nn.Module], batch: int, forward: int, frame: Any) -> Iterator[None]:
        """Trace a part of an earlier forward that is run again, in the call `frame`."""
        run, depth = self._run, _len_torch_function_stack()
        kept, state, number = dict(vars(run)), self.tracer.state, self.forward
        self.forward = forward
        if torch._C._current_graph_task_id() != -1:
            self._queue()
        vars(run).update(modules=list(modules), frame=frame, inputs=[], detached=None)
        try:
            self.tracer.resume(batch)
            yield
        finally:
            if run.detached is not None:
                restore_own(*run.detached)
            while _len_torch_function_stack() > depth:
                _pop_mode()
            self.tracer.state, self.forward = state, number
            vars(run).update(kept)

    # ---- for the nodes -------------------------------------------------------------------------------------------------

    def records(self, node: Any) -> bool:
        """Is the running backward pass one that accumulates this parameter's gradient? `torch.autograd.grad` is not."""
        try:
            return bool(torch._C._will_engine_execute_node(node))
        except RuntimeError:
            return False

    def open(self, leaves: list[tuple[Tensor, Ledger]], partition: Partition, forward: int) -> None:
        """Contributions to these parameters arrive: the window is open until the backward pass ends."""
        self._queue()
        self.look()
        if self._partition is None:
            self._partition = partition
        elif self._partition != partition:
            raise RuntimeError(
                f"varreg: in one backward(), '{leaves[0][1].name}' was used for {partition.batch} samples, and another parameter or "
                f"use for {self._partition.batch}: samples cannot be matched. Call backward() once for each batch; and if a layer's "
                "input folds other dimensions into the batch, let the fold happen inside of the model's own forward()."
            )
        self._forwards.add(forward)
        for t, ledger in leaves:
            p = self._shard_of(t)
            if id(p) not in self._window:
                ledger.open(p)
                self._window[id(p)] = (p, ledger)
            ledger.expect_use(forward)

    def ledger_of(self, p: Tensor) -> Ledger | None:
        """The ledger of a parameter, where it is this observer's."""
        found = self._known.get(id(p))
        return found[1] if found is not None and found[0] is p and self._handles else None

    def partition_of(self, p: Tensor) -> Partition | None:
        """The batch of the running backward, for a parameter that has no use in it, once; None for one that has."""
        if id(p) in self._window or id(p) in self._passed:
            return None
        self._queue()
        self.look()
        self._passed.add(id(p))
        return self._partition or self._expected

    def look(self) -> None:
        """Whose gradients were cleared? Seen once, before the next backward writes to any of them."""
        if self._looked:
            return
        self._looked = True
        waiting = []
        for p, ledger in self._known.values():
            ledger.look(p)
            if ledger.waits(p):
                waiting.append(ledger)
        if waiting:
            self._judge(waiting)

    def _judge(self, waiting: list[Ledger]) -> None:
        """Were gradients cleared, for those that have none? By what became of the others: all cleared, or none.

        Those that nobody ever cleared, since no optimizer has them, say nothing.
        """
        ledgers = [ledger for _, ledger in self._known.values()]
        cleared = [ledger for ledger in ledgers if ledger.was_cleared]
        kept = [ledger for ledger in ledgers if ledger.has_gradient]
        if cleared:
            kept = [ledger for ledger in kept if ledger.is_cleared]
        for ledger in waiting:
            if not kept:
                ledger.forget()
            elif cleared:
                ledger.unclear = cleared[0].name, kept[0].name

    def abort(self) -> None:
        """The backward pass fails: what arrived stays counted, as what it added to `p.grad` does, and the window is over."""
        self._close(check=False)

    def _queue(self) -> None:
        """Close the window when the backward pass that is running now ends; the outermost one, where they are nested."""
        if not self._queued:
            torch.autograd.Variable._execution_engine.queue_callback(self._close)
            self._queued = True

    def _close(self, check: bool = True) -> None:
        window, partition = self._window, self._partition
        passed, self._passed = self._passed, set()
        self._window, self._partition, self._queued, self._recalled = {}, None, False, {}
        forwards, self._forwards = self._forwards - {0}, set()
        self._windows += 1
        self._looked = False
        for _, ledger in self._known.values():
            ledger.looked = ledger.was_cleared = False
        for p, ledger in [*window.values(), *(self._known[key] for key in passed if key in self._known)]:
            ledger.take_gradient(p)
            ledger.close(p)
        if partition is not None:
            for key, (p, ledger) in self._known.items():
                if key not in window and key not in passed:
                    ledger.pass_by(p, partition, forwards)
        if len(window) < len(self._known):
            self._warn_unmeasured([x for key, x in self._known.items() if key not in window])
        if self._is_distributed() and torch._C._current_graph_task_id() != -1:
            torch.autograd.Variable._execution_engine.queue_callback(self._note)
        if check and window:  # every parameter at first, then one at a time, in turn
            reached = list(window.values())
            examined = [(p, ledger) for p, ledger in reached if ledger.examined]
            for _, ledger in examined:
                ledger.examined = False
            reached[self._windows % len(reached)][1].examined = True
            for p, ledger in examined:
                check_whole(p, ledger)

    @staticmethod
    def _is_distributed() -> bool:
        return torch.distributed.is_available() and torch.distributed.is_initialized()

    def _note(self) -> None:
        """Note gradients as they are after all that DDP and FSDP write to them at the end of a backward."""
        for p, ledger in self._known.values():
            ledger.note(p)

    # ---- hooks -------------------------------------------------------------------------------------------------------

    def _learn(self) -> None:
        """Take stock of the model's parameters, some of which may be new."""
        self._names = {m: name for name, m in self.model.named_modules()}
        known: dict[int, tuple[Tensor, Ledger]] = {}
        self._whole = {id(whole): (whole, p) for whole, p in self._pairs(self.model)}
        self._lasting = {id(t) for t in (*self.model.buffers(), *self.model.parameters())}
        for name, t in self.model.named_parameters():
            p = self._shard_of(t)
            old = self._known.get(id(p))
            ledger = old[1] if old and old[0] is p else Ledger(name, self.reduction)
            known[id(p)] = (p, ledger)
            LEDGERS[p] = ledger
        self._known = known

    @property
    def is_on(self) -> bool:
        """Until it is removed."""
        return bool(self._handles)

    def _attach(self) -> None:
        """Where there are several processes: moments are to be those of all of them."""
        if self._is_distributed():
            from varreg import distributed

            distributed.attach(self)

    def _hook(self, module: nn.Module) -> Iterator[RemovableHandle]:
        # ours comes first, so that what other hooks do to the inputs is seen
        yield module.register_forward_pre_hook(_Enter(self), with_kwargs=True, prepend=True)
        yield module.register_forward_hook(_Leave(self), with_kwargs=True, always_call=True)

    def enter(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """A module's forward begins; with the outermost one's, tracing does."""
        run, grad = self._run, torch.is_grad_enabled()
        if run.modules and module is run.modules[0] and not _is_on_stack(run.frame):
            self._reset()  # an earlier forward was interrupted, and its hooks never called
            run = self._run
        if not run.modules:
            run.frame = _calling_frame()
            if grad:
                self._begin(module, args, kwargs)
        elif not grad and run.inputs is not None:  # a re-entrant checkpoint runs forward without gradients, and again later
            with torch._C.DisableTorchFunction():
                marks = [mark_of(t) for t in tensors_of((args, kwargs))]
            self._recalled.setdefault(module, []).append(marks)
        run.modules.append(module)
        if grad and type(module) in MODULE_RULES and run.inputs is not None and run.detached is None:
            run.detached = module, detach_own(module)
            self.tracer.__exit__(None, None, None)

    def leave(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """A module's forward ends, or failed, which leaves no output."""
        run, result = self._run, None
        if not run.modules or run.modules[-1] is not module:
            return None  # its forward never began: another hook raised before ours was called
        try:
            if run.detached is not None and run.detached[0] is module:
                own, run.detached = run.detached[1], None
                restore_own(module, own)
                self.tracer.__enter__()
                if output is not None:
                    with torch._C.DisableTorchFunction():
                        result = output = use_rule(self, self._names.get(module, ""), module, own, args, kwargs, output)
        finally:
            run.modules.pop()
            if not run.modules:
                run.frame = None
                if run.inputs is not None:
                    self._end(module, args, kwargs, output)
        return result

    def _begin(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        refuse_transforms(self.model)
        again = torch._C._current_graph_task_id() != -1  # a checkpoint runs this module again
        if again:
            self._queue()
        elif self._queued or self._window:  # an earlier backward failed and never closed its window
            self.abort()
        self.forward = 0 if again else next(self._forward_numbers)
        if not again:
            for p, ledger in self._known.values():
                ledger.release(p)
        self._attach()
        if not is_tracing():
            new_epoch()
        inputs = tensors_of((args, kwargs))
        refuse_inputs(inputs, self.path)
        recalled = self._recalled.get(module) if again else None
        marks: list[Any] = recalled.pop() if recalled else []
        if again and marks and len(marks) == len(inputs):
            batch = next((where.batch for where in marks if isinstance(where, Place)), 0)
        else:
            dim = self.batch_dim
            batch, packed = packed_inputs(args, kwargs)
            others = [t for t in inputs if id(t) not in packed and not self.ledger(t)]
            sizes = [t.shape[dim] for t in others if t.dim() > dim]
            batch = batch or (sizes[0] if sizes else 0)
            self._run.is_certain = sizes.count(batch) == len(sizes)
            marks = [None if self.ledger(t) else self.contract(t, batch) for t in inputs]
            if packed:
                marks = [packed.get(id(t), at) for t, at in zip(inputs, marks, strict=True)]
        self.tracer.batch = batch
        for t, where in zip(inputs, marks, strict=True):
            if where is not None:
                mark(t, where if again else self.tracer.check_input(t, where))
        self._run.inputs = inputs
        if not again and module is not self.model:
            self._tell_outside(module, batch)
        if not again and batch:
            self._expected = self.partition(batch)
        self.tracer.begin(batch)

    def _tell_outside(self, module: nn.Module, batch: int) -> None:
        """A part of the model runs alone: what its caller did to the batch was not seen."""
        if "outside" not in self._warned:
            where = place(self._names.get(module, ""), module)
            self.warn_once(
                "outside",
                f"varreg: {where} was called outside of the model's forward(), by another method or by yourself. "
                f"The size of dimension {self.batch_dim} of its first input, {batch}, was taken for the number of samples; "
                "what was done to the batch before was not seen. Is that so? Then ignore this. Else call "
                "the model itself, and let forward() do it.",
            )

    def _end(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        inputs, self._run.inputs = self._run.inputs, None
        self.tracer.end()
        outputs = tensors_of(output)
        if not is_tracing():  # another observed model, around this one, may take it from here
            alone = {at.sample for t in outputs if isinstance(at := mark_of(t), Single)}
            for t in (*outputs, *self._left_aside(outputs)):
                self._check_output(t, len(alone) == self.tracer.batch)
            if output is not None:
                self._try_escapes(module, args, kwargs, inputs or [], outputs)
            forget((inputs, output))

    def _left_aside(self, outputs: list[Tensor]) -> list[Tensor]:
        """Return tensors of this forward that were left in attributes, as auxiliary losses are. They
        are searched for now and then, and then looked at each time.
        """
        if self.tracer.verdicts.due("attributes"):
            for module in self.model.modules():
                for name, value in vars(module).items():
                    if isinstance(value, Tensor) and value.grad_fn is not None and mark_of(value) is not None:
                        self._aside.add((module, name))
        found = [getattr(module, name, None) for module, name in self._aside]
        ids = {id(t) for t in outputs}
        return [t for t in found if isinstance(t, Tensor) and id(t) not in ids and mark_of(t) is not None]

    def _check_output(self, t: Tensor, has_all: bool) -> None:
        """What the loss gets must tell samples apart; where it does not, no gradient may arrive.

        `has_all` says that each sample has an output of its own, as in a list of their losses.
        """
        if not t.requires_grad or t.is_leaf or not torch.is_grad_enabled():
            return
        where = mark_of(t)
        if where is None or is_unseen(t):
            where = self.tracer.place(t)
        why = None
        if where is DERIVED:
            why = derived_output_message(tuple(t.shape), self.tracer.names([t]))
        elif self.batch_norm != "contribution":
            why = self._fault_of(t, where, has_all)
        if why is not None:
            about = f"varreg: an output of {self.path()}, of shape {tuple(t.shape)}, "
            t.register_hook(refuse_gradient(why if why.startswith("varreg: ") else about + why))

    def _fault_of(self, t: Tensor, where: Any, has_all: bool) -> str | None:
        """Return why a loss could not tell samples apart in an output; None where it can."""
        batch, dim = self.tracer.batch, self.batch_dim
        size = t.shape[dim] if t.dim() > dim else None
        if isinstance(where, Lost):
            return f"has lost the batch: {where.why}. Which sample its gradient belongs to is not known."
        if isinstance(where, Summed):
            if t.numel() <= 1:
                return None
            return (
                "is a sum over the batch: what a loss makes of it may mix samples. Return it with the batch, "
                "or finish the loss inside of forward()."
            )
        if batch == 1:
            if self._run.is_certain or size in (1, None):
                return None
            return (
                f"has size {size} in dimension {dim}, but the first input has 1 there, which was taken for the "
                "batch, and others differ. Pass the input that carries the batch first."
            )
        if isinstance(where, Single) and not has_all:
            return (
                f"belongs to sample {where.sample} alone, and not every sample has an output: a loss would take it for "
                "that of the whole batch."
            )
        if size == batch and where != Layout(batch, dim) and not isinstance(where, Single):
            return (
                f"has as many rows in dimension {dim} as there are samples, but they are not the samples in their "
                "order: a loss would pair them with others' targets. Return samples in the order in "
                f"which they came, in dimension {dim}."
            )
        if isinstance(where, Ragged) and (where.repeats or not where.is_in_order):
            return (
                "has its samples in another order than the inputs: a loss would pair them with others' "
                "targets. Put them back in order."
            )
        if isinstance(where, Layout) and where.dim != dim and not self._run.is_certain:
            return (
                f"has the batch of {batch} in dimension {where.dim}; inputs differ in the size of dimension {dim}, and the "
                "first one's was taken for the batch. Pass the input that carries the batch first."
            )
        return None

    def warn_once(self, about: str, message: str) -> None:
        """Warn of something, once for each subject."""
        if about not in self._warned:
            self._warned.add(about)
            warnings.warn(message, UserWarning, stacklevel=2)

    def warn_weighted(self, function: str) -> None:
        self.warn_once(
            "weighted",
            f"varreg: in {self.path()}, {function} weights samples by what the labels of all of them say (ignored "
            "tokens, class weights). What is measured is each sample's share of the gradient, which is not "
            "the gradient of its own loss alone. To make them the same, sum the loss and divide by a "
            "constant; varreg.verify shows the difference.",
        )

    def _warn_unmeasured(self, unreached: list[tuple[Tensor, Ledger]]) -> None:
        """Name the parameters that got a gradient from where the engine cannot look."""
        new = [ledger for p, ledger in unreached if not ledger.told and ledger.is_unmeasured(p)]
        if new:
            for ledger in new:
                ledger.told = True
            names = [ledger.name for ledger in new]
            warnings.warn(unmeasured_message(names), UserWarning, stacklevel=2)

    def _try_escapes(
        self, module: nn.Module, args: Any, kwargs: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]
    ) -> None:
        """Where values of the batch left torch: run the forward again with other samples, once."""
        tracer = self.tracer
        if not tracer.escapes or torch._C._current_graph_task_id() != -1:
            return
        if tracer.backwards != backwards() and all(name == UNKNOWN for name, _ in tracer.escapes):
            return  # a backward ran inside of this forward: it must not run again
        left = [key for key in tracer.escapes if tracer.verdicts.due(("escape", *key))]
        if not left:
            return
        if any(ledger.sharded for _, ledger in self._known.values()):
            self.warn_once(
                "escapes",
                f"varreg: in {left[0][1]}, {left[0][0]} takes values of the batch out of sight. Whether they come back and "
                "make samples depend on each other is not tried where parameters are sharded. Call "
                "varreg.verify once in a single process.",
            )
            return
        given = [(t, at) for t in inputs if isinstance(at := mark_of(t), Place)]
        wanted: list[tuple[int, Where]] = [
            (i, where) for i, t in enumerate(outputs) if t.requires_grad and isinstance(where := mark_of(t), Place | Summed)
        ]
        if not wanted:
            return  # nothing that could depend on it gets a gradient
        said, why = Verdict.UNDECIDED, "no input of it carries the batch"
        if tracer.backwards != backwards():
            why = "a backward runs inside of the forward, and must not run again"
        elif given and wanted:
            first = any(tracer.verdicts.is_first(("escape", *key)) for key in left)
            with undisturbed():
                said, why = try_forward(self.model, module, args, kwargs, given, wanted, first)
        if said is Verdict.APART:
            return
        for key in left:
            tracer.verdicts.forget(("escape", *key))
        function, path = left[0]
        found = (
            "with other samples beside it, a sample's output changes: a sample has no gradient of its own"
            if said is Verdict.MIXED
            else f"whether it comes back and makes samples depend on each other could not be tried ({why})"
        )
        raise ValueError(
            f"varreg: in {path}, {function} takes values of the batch out of sight, and {found}. Compute it "
            "for each sample, or before forward() and pass it as an input; or observe(..., "
            "batch_norm='contribution') to measure each sample's contribution to the gradient instead."
        )

    def _reset(self) -> None:
        """Forget a forward that never ended."""
        if self._run.detached is not None:
            restore_own(*self._run.detached)
        while any(mode is self.tracer for mode in _get_current_function_mode_stack()):
            _pop_mode()
        self._run = _Run()


class _Run(threading.local):
    """The forward that is running, in each thread."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []  # whose forward is running, outermost first
        self.frame: Any = None  # the outermost one's call
        self.inputs: list[Tensor] | None = None  # of the forward that is traced; None while none is
        self.is_certain = True  # do all inputs agree about the size of the batch?
        self.detached: tuple[nn.Module, dict[str, nn.Parameter]] | None = None  # a module that a registered rule serves, running


def _calling_frame() -> Any:
    """The call of the module whose hook is running."""
    here: Any = sys._getframe(1)
    while here is not None and here.f_code is not nn.Module._call_impl.__code__:
        here = here.f_back
    return here


def _is_on_stack(frame: Any) -> bool:
    here: Any = sys._getframe(1)
    while here is not None:
        if here is frame:
            return True
        here = here.f_back
    return False


class _Enter:
    """A forward pre-hook. A copy of the model, by deepcopy or pickle, carries a hook that does nothing: it is not observed."""

    def __init__(self, observer: Observer | None = None):
        self.observer = observer

    @eager
    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if self.observer is not None:
            self.observer.enter(module, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(_no_attribute(self, name))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


class _Leave:
    """A forward hook, called even when the forward raised."""

    def __init__(self, observer: Observer | None = None):
        self.observer = observer

    @eager
    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any = None) -> Any:
        return None if self.observer is None else self.observer.leave(module, args, kwargs, output)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(_no_attribute(self, name))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


def _no_attribute(hook: Any, name: str) -> str:
    """Return what to say of an attribute that our hooks do not have. TorchScript asks for a name."""
    if name == "__name__" and hook.__dict__.get("observer") is not None:
        return (
            f"varreg: {place('', hook.observer.model)} is observed, and torch.jit.script cannot compile an observed model. "
            "Call remove() on the observer first, or use copy.deepcopy(model), which is not observed."
        )
    return f"{type(hook).__name__!r} object has no attribute {name!r}"


def _is_ours(hook: Any) -> bool:
    return isinstance(hook, _Enter) and hook.observer is not None


def _expected(owner: type[nn.Module]) -> str:
    if owner in MODULE_RULES:
        return f"{owner.__name__} (registered)"
    return next((rule for kind, rule in _EXPECTED.items() if issubclass(owner, kind)), "followed at the first step")
