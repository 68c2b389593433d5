"""`FisherSums`: sums of squared gradients of single samples, over batches and processes."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from varreg._torch import tree_map
from varreg.devices import has_float64
from varreg.engine import deferred
from varreg.engine.contribution import stat_dtype
from varreg.engine.number_range import leaves_range
from varreg.engine.observer import Observer
from varreg.engine.trace.arguments import tensors_of
from varreg.errors import VarregError
from varreg.noise.aside import measured_alone
from varreg.noise.fisher_kinds import KINDS, Loss, backwards, check_finite, check_loss, cut
from varreg.shards import is_sharded, like, local
from varreg.thresholds import SAME_PARAMETERS


class _Sums(NamedTuple):
    """The sums so far. They are replaced together: an interruption leaves them consistent."""

    samples: int
    batches: int
    squares: dict[str, Tensor]


class FisherSums:
    """The sums of `varreg.fisher` for your own loop: you can interrupt, continue and add them up.

    >>> import torch, varreg
    >>> model = torch.nn.Linear(3, 2)
    >>> with varreg.FisherSums(model, kind="sampled") as sums:
    ...     for _ in range(4):
    ...         sums.update(torch.randn(8, 3), torch.randint(0, 2, (8,)))
    >>> sums.samples, sorted(sums.diagonal())
    (32, ['bias', 'weight'])
    >>> other = varreg.FisherSums(model, kind="sampled")
    >>> other.merge(sums.state_dict())  # of another process, or another part of the data
    >>> other.samples
    32

    Args:
        model: As for `varreg.fisher`. So are `kind`, `loss`, `dtype` and `generator`.

    """

    def __init__(
        self,
        model: nn.Module,
        kind: str = "empirical",
        *,
        loss: Loss = F.cross_entropy,
        dtype: torch.dtype | None = None,
        generator: torch.Generator | None = None,
    ):
        _check(model, kind, loss, dtype)
        self.model, self.kind, self.loss, self.generator = model, kind, loss, generator
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._names = {id(p): n for n, p in self._parameters.items()}
        self._sums = _Sums(0, 0, {})
        for name, p in self._parameters.items():
            part = local(p.detach())
            self._sums.squares[name] = torch.zeros_like(part, dtype=dtype or stat_dtype(p.dtype))
        self._block: Any = None
        self._observer: Observer | None = None
        self._checked = False

    @property
    def samples(self) -> int:
        """Return N, the number of samples so far."""
        return self._sums.samples

    @property
    def batches(self) -> int:
        """Return the number of batches so far."""
        return self._sums.batches

    def __enter__(self) -> FisherSums:
        self._block = measured_alone(self.model)
        self._observer = self._block.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._observer = None
        self._block.__exit__(*error)

    def update(self, x: Any, y: Any, *, most: int | None = None) -> None:
        """Add the samples of a batch: all of them, or the first `most`."""
        if self._observer is None:
            raise VarregError("varreg: FisherSums.update expects to be called in `with sums:`.")
        device = next(iter(self._parameters.values())).device
        x, y = (_moved(t, device) for t in (x, y))
        m = next((t.shape[0] for t in tensors_of(x) if t.dim()), None)
        if m is None:
            raise VarregError("varreg: fisher expects inputs with samples along dimension 0.")
        if most is not None and most < m:
            x, y, m = cut(x, m, 0, most), cut(y, m, 0, most), most
        measured = None
        with torch.enable_grad():
            for _ in range(2 if m else 0):  # measure a second time if squares need float64
                if (measured := self._measure(self._observer, x, y, m)) is not None:
                    break
            else:
                if m:
                    raise VarregError(
                        "varreg: squares of gradients leave the range of float32, and their device "
                        "has no float64. Run on the CPU, or with model.double()."
                    )
        samples, added = measured or (0, {})
        squares = {
            n: (t + added[n].to(t.dtype) if n in added else t)
            for n, t in self._sums.squares.items()
        }
        check_finite(squares, added, self.batches)
        self._sums = _Sums(self.samples + samples, self.batches + 1, squares)

    def _measure(
        self, observer: Observer, x: Any, y: Any, m: int
    ) -> tuple[int, dict[str, Tensor]] | None:
        """Return N and Σ g_i² of a batch. Return None if squares left the range of float32; the
        next call adds them up in float64.
        """
        model = observer.model
        output = (
            model(**x) if isinstance(x, dict) else model(*x) if isinstance(x, tuple) else model(x)
        )
        if not self._checked or self.kind == "empirical":  # any batch may have targets to ignore
            check_loss(self.kind, self.loss, output, y, m)
            self._checked = True
        samples, is_known = m, True
        squares: dict[str, Tensor] = {}
        for backward in backwards(self.kind, self.loss, output, y, m, self.generator):
            backward()
            deferred.fetch([])
            for p, ledger in observer.parameters:
                if id(p) not in self._names:
                    continue
                moments = ledger.read(p)
                if moments is None and ledger.is_unmeasured(p):
                    raise VarregError(_unmeasured(ledger.name))
                if moments is not None:
                    if leaves_range(moments.total, moments.square):
                        ledger.is_float64 = has_float64(moments.square.device)
                        is_known = False
                    ranks = observer.grouping.world if is_sharded(p) else 1
                    samples = _counted(ledger.name, moments.count, m, is_sharded(p))
                    # FSDP averages over ranks: a sample contributes g_i/ranks
                    part = moments.square * ranks**2 if ranks > 1 else moments.square
                    name = self._names[id(p)]
                    squares[name] = squares[name] + part if name in squares else part
                p.grad = None
        return (samples, squares) if is_known else None

    def diagonal(self) -> dict[str, Tensor]:
        """Return the sums over N, by the parameters' names."""
        if not self.samples:
            raise VarregError(
                "varreg: fisher expects at least one sample, and the loader had none. An iterator "
                "can be used only once."
            )
        parts = {n: t / self.samples for n, t in self._sums.squares.items()}
        return {n: like(parts[n], p) for n, p in self._parameters.items()}

    def merge(self, state: dict[str, Any]) -> None:
        """Add the sums of another `state_dict()`: of another process, or other data."""
        self._check_state(state)
        squares = {n: t + state["squares"][n].to(t) for n, t in self._sums.squares.items()}
        self._sums = _Sums(
            self.samples + state["samples"], self.batches + state["batches"], squares
        )

    def all_reduce(self, group: Any = None) -> None:
        """Add up the sums of all processes, so that all processes have the same sums. The sums of
        sharded parameters contain all processes already.
        """
        unsharded = [
            t for n, t in self._sums.squares.items() if not is_sharded(self._parameters[n])
        ]
        if not unsharded:
            return
        numbers = torch.tensor([self.samples, self.batches], device=unsharded[0].device)
        for t in (*unsharded, numbers):
            torch.distributed.all_reduce(t, group=group)
        self._sums = self._sums._replace(samples=int(numbers[0]), batches=int(numbers[1]))

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, which loads with `weights_only=True`."""
        sums = self._sums
        generator_state = None if self.generator is None else self.generator.get_state()
        numbers = {"samples": sums.samples, "batches": sums.batches, "size": self._size()}
        squares = {n: t.clone() for n, t in sums.squares.items()}
        return {"kind": self.kind, **numbers, "generator": generator_state, "squares": squares}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint of the same model, with the same parameter values."""
        self._check_state(state)
        squares = {n: state["squares"][n].to(t, copy=True) for n, t in self._sums.squares.items()}
        self._sums = _Sums(state["samples"], state["batches"], squares)
        if self.generator is not None and state["generator"] is not None:
            self.generator.set_state(state["generator"])

    def _size(self) -> float:
        """Return Σ p² over all parameters. It shows whether a model has other parameter values."""
        return sum(
            float(local(p.detach()).double().square().sum()) for p in self.model.parameters()
        )

    def _check_state(self, state: Any) -> None:
        """Raise a VarregError unless a state is of the same kind and of the same parameters."""
        keys = {"kind", "samples", "batches", "size", "generator", "squares"}
        if not isinstance(state, dict) or set(state) != keys:
            raise VarregError("varreg: FisherSums expects the result of its state_dict().")
        if state["kind"] != self.kind:
            raise VarregError(
                f"varreg: these sums are of kind='{self.kind}', the checkpoint's are of "
                f"'{state['kind']}'."
            )
        shapes, others = (
            {n: t.shape for n, t in s.items()} for s in (self._sums.squares, state["squares"])
        )
        if shapes != others or not math.isclose(
            state["size"], self._size(), rel_tol=SAME_PARAMETERS
        ):
            what = "has other parameters" if shapes != others else "is at other parameter values"
            raise VarregError(
                f"varreg: the checkpoint's Fisher {what} than this model. Delete the checkpoint, "
                "or load the model that it was begun with."
            )


def _check(model: Any, kind: Any, loss: Any, dtype: Any) -> None:
    """Raise a VarregError if an argument is not valid."""
    if not isinstance(model, nn.Module):
        raise VarregError(f"varreg: fisher expects a torch.nn.Module, got {type(model).__name__}.")
    if kind not in KINDS:
        raise VarregError(f"varreg: kind must be one of {', '.join(KINDS)}; got {kind!r}.")
    if not callable(loss):
        raise VarregError(
            f"varreg: fisher expects a loss to call as loss(output, y); got {type(loss).__name__}."
        )
    if dtype not in (None, torch.float32, torch.float64):
        raise VarregError(f"varreg: dtype must be torch.float32 or torch.float64; got {dtype}.")
    if not any(p.requires_grad for p in model.parameters()):
        raise VarregError(
            f"varreg: {type(model).__name__} has no parameter that requires a gradient."
        )


def _moved(tree: Any, device: torch.device) -> Any:
    return tree_map(lambda t: t.to(device) if isinstance(t, Tensor) else t, tree)


def _counted(name: str, count: int, m: int, sharded: bool) -> int:
    """Return `count`, the number of measured samples. Raise a VarregError if it differs from m."""
    if count != m and not sharded:
        raise VarregError(
            f"varreg: '{name}' was measured over {count} samples, and the first input has {m} in "
            "dimension 0. Put samples into dimension 0 of every input."
        )
    return count


def _unmeasured(name: str) -> str:
    return (
        f"varreg: '{name}' has a gradient that was not measured: it came from a place that varreg "
        "does not see, such as the loss or a torch.autograd.Function. Use the parameter in a "
        "forward() of the model, register a rule with varreg.register_rule, or freeze it."
    )
