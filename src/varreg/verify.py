"""`verify(model, loss, batch)`: varreg against the definition, one sample at a time."""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from varreg.engine.arguments import tensors_of
from varreg.engine.checks import check_options
from varreg.engine.ledger import LEDGERS, moments
from varreg.engine.observer import observe
from varreg.engine.parting import Parting, compare, find_parting
from varreg.engine.rehearsal import Rehearsal, rehearsal
from varreg.samples import Data, Few, InputError, Loss
from varreg.tables import table

_RTOL = {torch.float64: 1e-7, torch.float32: 1e-3}
_COARSE = 5e-2
"""The tolerance for half precision."""
_MOST_WEIGHED = 1 << 27
"""Elements of gradients that are kept to find out how a loss weighs samples: 1 GiB in float64."""
_SHARES = (
    "varreg then measures each sample's share of the gradient: what flows back through its own "
    "outputs (times the number of samples, where the loss is a mean)."
)


@dataclass(frozen=True)
class Row:
    """The gaps of one parameter, each relative to the size of its per-sample gradients."""

    parameter: str
    shape: tuple[int, ...]
    used: bool
    """Has any sample a gradient for it?"""
    batch: float
    """The gradient of the whole batch against the mean (or sum) of those of single samples."""
    grad: float
    """`p.grad` with varreg against `p.grad` without."""
    mean: float
    """varreg's moments against the definition."""
    second_moment: float
    variance: float

    @property
    def gap(self) -> float:
        """The largest of them."""
        return max(self.batch, self.grad, self.mean, self.second_moment, self.variance)


@dataclass(frozen=True)
class Verification:
    """What `varreg.verify` found; truthy when verified, and `print` shows it to people."""

    status: str
    """"verified"; "different"; "refused" by varreg, with its message; or "unknown": cannot be."""
    reason: str = ""
    advice: str = ""
    samples: int = 0
    """How many were used."""
    rtol: float = math.nan
    rows: tuple[Row, ...] = ()
    """One for each parameter that is trained; none where nothing could be compared."""
    outputs: float = math.nan
    """The largest gap between outputs of the whole batch and of single samples; nan: none fit."""
    parting: Parting | None = None
    """The first operation where outputs of the whole batch and of single samples part."""

    @property
    def gap(self) -> float:
        """The largest relative gap of any parameter; nan where nothing could be compared."""
        return max((row.gap for row in self.rows), default=math.nan)

    @property
    def worst(self) -> Row:
        """The row with the largest gap."""
        return max(self.rows, key=lambda row: row.gap)

    def __bool__(self) -> bool:
        return self.status == "verified"

    def __str__(self) -> str:
        words = {"different": "not the same", "unknown": "cannot be verified"}
        lines = [f"varreg.verify: {words.get(self.status, self.status)}."]
        if self.rows:
            lines[0] += (
                f" {len(self.rows)} parameters, {self.samples} samples, one at a time: the largest "
                f"relative gap is {self.gap:.1e}, of '{self.worst.parameter}'; {self.rtol:.0e} is "
                "allowed."
            )
        lines += [text for text in (self.reason, self.advice) if text]
        return "\n".join([*lines, *([self._table()] if self.rows else [])])

    def _table(self) -> str:
        head = ("parameter", "shape", "batch", "p.grad", "mean", "2nd moment", "variance", "")
        return table(head, [self._cells(row) for row in self.rows], words=(0, 1, 7), total=False)

    def _cells(self, row: Row) -> tuple[str, ...]:
        gaps = (row.batch, row.grad, row.mean, row.second_moment, row.variance)
        note = "" if row.gap <= self.rtol else "not the same"
        note = note or ("" if row.used else "no gradient")
        shape = "×".join(map(str, row.shape)) or "scalar"
        return (row.parameter, shape, *(f"{gap:.1e}" if gap else "0" for gap in gaps), note)


def verify(
    model: nn.Module,
    loss: Loss | None,
    batch: Any,
    *,
    reduction: str = "mean",
    batch_dim: int = 0,
    samples: int = 8,
    rtol: float | None = None,
    batch_norm: str = "refuse",
) -> Verification:
    """Compare varreg's moments with their definition: the gradients of single samples.

    A few samples go through model and loss one at a time, which gives their gradients g_i. The
    gradient of the batch of them must be the mean of the g_i; varreg's count, mean, second moment
    and variance must be theirs; and `p.grad` must be what it is without varreg. Where it is not
    so, the result says why. Dropout is off meanwhile. The model, its buffers, gradients and
    observers, and all random state stay as they are.

    Args:
        model: Any module, observed or not, in training or not.
        loss: A function of output and targets, `loss(model(x), y)`. None: the model computes its
            own, which is `output.loss`, or the output itself if that is a single number.
        batch: A pair `(x, y)`. `x` is a tensor, a tuple of positional arguments, or a dict of
            keyword arguments; `y` is a tensor, or any tree of tensors. A dict is all keyword
            arguments, and the loss, if there is one, has the output alone. Where the loss is
            None, a tensor or tuple is all positional arguments.
        reduction: Is the loss a `"mean"` over samples or a `"sum"`? As for `varreg.observe`.
        batch_dim: The dimension of the model's inputs that counts samples. Targets without such
            a dimension of the batch's size have samples in dimension 0.
        samples: Use so many samples at most, spread evenly over the batch.
        rtol: The largest gap that is allowed, relative to the size of what is added up. None: 1e-7
            in float64, 1e-3 in float32 (and what looks like rounding is run again in float64).
        batch_norm: As for `varreg.observe`. `"contribution"` cannot be verified.

    Returns:
        A `Verification`: truthy when verified; `print` shows a table.

    >>> import torch, varreg
    >>> import torch.nn.functional as F
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    >>> x, y = torch.randn(32, 4), torch.randint(0, 3, (32,))
    >>> bool(varreg.verify(model, F.cross_entropy, (x, y)))
    True
    >>> def total(output, y):
    ...     return F.cross_entropy(output, y, reduction="sum")
    >>> varreg.verify(model, total, (x, y)).status
    'different'

    """
    _check_arguments(model, loss, samples, rtol)
    check_options(model, None, reduction, batch_dim, batch_norm)
    data = Data(loss, batch, batch_dim)
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(
            f"varreg: verify expects a model with a parameter that requires a gradient; {type(model).__name__} has none."
        )
    if data.size < 2:
        return Verification(
            "unknown",
            "The batch has one sample, and the variance of one sample is not defined.",
            "Pass a batch of two samples or more.",
        )
    if batch_norm == "contribution":
        return Verification(
            "unknown",
            "batch_norm='contribution' measures shares of a gradient that samples make together: "
            "a single sample has none of its own to compare with.",
        )
    if _is_distributed():
        return Verification(
            "unknown",
            "Several processes share the batch, and moments are those of all of them.",
            "Verify in one process, before torch.distributed is initialized.",
        )
    setting = _Setting(reduction, batch_dim, _tolerance(model) if rtol is None else rtol)
    few = data.few(samples)
    with torch.enable_grad():
        return _verify_precisely(model, loss, few, setting)


def _check_arguments(model: Any, loss: Any, samples: Any, rtol: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"varreg: verify expects a torch.nn.Module, got {type(model).__name__}.")
    if loss is not None and not callable(loss):
        raise ValueError(
            f"varreg: verify expects a loss that can be called as loss(model(x), y), or None for a "
            f"model that computes its own; got {type(loss).__name__}."
        )
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 2:
        raise ValueError(f"varreg: verify expects samples of 2 or more, got {samples!r}.")
    if rtol is not None and not (isinstance(rtol, (int, float)) and 0 < rtol < math.inf):
        raise ValueError(f"varreg: verify expects rtol to be a positive number, got {rtol!r}.")


def _is_distributed() -> bool:
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return there and torch.distributed.get_world_size() > 1


class _Setting(NamedTuple):
    reduction: str
    batch_dim: int
    rtol: float


def _tolerance(model: nn.Module) -> float:
    """Return the tolerance for the coarsest type that is trained."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if any(torch.is_autocast_enabled(p.device.type) for p in trained):
        return _COARSE
    return max(_RTOL.get(p.dtype, _COARSE) for p in trained)


def _floor(rtol: float) -> float:
    """Return the size, relative to the model's largest gradient, below which numbers are rounding.

    Gradients that are zero but for rounding (a bias before a softmax) have no size of their own.
    """
    return min(1.0, max(1e-4, rtol))


# ---- running it ----------------------------------------------------------------------------------


class _Cannot(Exception):  # noqa: N818 - no error, but an answer
    """It cannot be verified."""

    def __init__(self, reason: str, advice: str = "", status: str = "unknown"):
        super().__init__(reason)
        self.verification = Verification(status, reason, advice)


def _verify_precisely(model: nn.Module, loss: Loss | None, few: Few, setting: _Setting) -> Verification:
    """Verify; where numbers differ, once more in float64, which tells what is rounding.

    A gap is rounding where float64 has none, and where single samples by themselves are as far
    from float64 as varreg is from them.
    """
    found, sums = _verify_safely(model, loss, few, setting)
    if found.status != "different" or setting.rtol <= _RTOL[torch.float64]:
        return found
    wide = setting._replace(rtol=_RTOL[torch.float64])
    try:
        made = _copied(model, loss)
        if made is None:
            return found
        for module in made:
            if isinstance(module, nn.Module):
                module.double()
        again, truth = _verify_safely(*made, few.to(torch.float64), wide)
    except Exception:  # it is made for its own precision alone
        return found
    if again.status == "different":
        return again
    noise = _noise(sums, truth, _floor(setting.rtol)) if again else {}
    large = [row for row in found.rows if row.gap > found.rtol]
    return again if noise and all(row.gap <= 10 * noise[row.parameter] for row in large) else found


def _verify_safely(model: nn.Module, loss: Loss | None, few: Few, setting: _Setting) -> tuple[Verification, dict[str, _Sums]]:
    """Verify a copy of the model, or the model itself where none can be made.

    A copy may still reach the original: a function that its forward calls may hold it. Then the
    original has gradients afterwards, and it is verified in place.
    """
    with _rehearsed(model, loss) as original:
        made = _copied(model, loss)
        if made is not None:
            with original.with_dropout(), _rehearsed(*made) as run:  # which is up to the second
                found = _Trial(made[0], made[1], few, setting, run).verify()
            if all(p.grad is None for p in model.parameters()):
                return found
            original.reset()
        with _ledgers_aside(model):
            return _Trial(model, loss, few, setting, original).verify()


def _copied(model: nn.Module, loss: Loss | None) -> tuple[nn.Module, Loss | None] | None:
    """Return copies, in one go, since they may share parameters; None where that fails."""
    try:
        if isinstance(loss, nn.Module):
            return copy.deepcopy((model, loss))
        return copy.deepcopy(model), loss
    except Exception:  # whatever it is that cannot be copied
        return None


@contextlib.contextmanager
def _rehearsed(model: nn.Module, loss: Loss | None) -> Iterator[Rehearsal]:
    """Rehearse the model, and the loss where it is a module with a state of its own."""
    with rehearsal(nn.ModuleList([model, loss] if isinstance(loss, nn.Module) else [model])) as run:
        yield run


@contextlib.contextmanager
def _ledgers_aside(model: nn.Module) -> Iterator[None]:
    """Let parameters be observed anew: their ledgers wait, and come back."""
    kept = [(p, ledger) for p in model.parameters() if (ledger := LEDGERS.get(p)) is not None]
    for p, _ in kept:
        del LEDGERS[p]
    try:
        yield
    finally:
        for p, ledger in kept:
            LEDGERS[p] = ledger


class _Step(NamedTuple):
    """One forward and backward."""

    loss: float
    output: list[Tensor]
    grads: dict[str, Tensor | None]


class _Measured(NamedTuple):
    """What varreg says of one parameter after a step; None where it has no moments."""

    grad: Tensor | None
    moments: tuple[int, Tensor, Tensor, Tensor] | None


class _Trial:
    """One verification, of a model that may be changed meanwhile."""

    def __init__(self, model: nn.Module, loss: Loss | None, few: Few, setting: _Setting, run: Rehearsal):
        self.model, self.loss, self.few, self.setting, self.run = model, loss, few, setting, run
        self.params = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.rules: dict[str, str] = {}

    def verify(self) -> tuple[Verification, dict[str, _Sums]]:
        """Return what was found, and the sums of the gradients of single samples."""
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="varreg: ")  # what it warns of is measured here
                return self._verify()
        except _Cannot as cannot:
            return replace(cannot.verification, samples=self.few.whole.size), {}

    def _verify(self) -> tuple[Verification, dict[str, _Sums]]:
        n, rtol = self.few.whole.size, self.setting.rtol
        whole = self._whole()
        random = self._random(whole)
        observed = self._observed()
        sums, outputs = self._singles(whole)
        rows = _rows(sums, whole.grads, observed, self.setting, _floor(rtol))
        if max(row.gap for row in rows) <= rtol and not outputs > rtol:
            return Verification("verified", "", "", n, rtol, rows, outputs), sums
        if random is not None:
            raise random
        found = Verification("different", "", "", n, rtol, rows, outputs)
        return self._explain(found, whole, observed), sums

    # ---- steps -----------------------------------------------------------------------------------

    def _step(self, data: Data, numbers: bool = True) -> _Step:
        self.run.reset(numbers)
        output = data.output(self.model)
        loss = data.loss(self.loss, output)
        loss.backward()
        kept = [t.detach() for t in tensors_of(output) if t.requires_grad]
        grads = {n: None if p.grad is None else p.grad.detach() for n, p in self.params.items()}
        return _Step(float(loss.detach()), kept, {n: _dense(g) for n, g in grads.items()})

    def _whole(self) -> _Step:
        few = self.few
        try:
            whole = self._step(few.whole)
        except InputError as error:
            raise ValueError(str(error)) from None
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            if few.whole.size == few.total:
                raise ValueError(f"varreg: verify cannot run the model and its loss on the batch ({said}).") from error
            raise _Cannot(
                f"The model or its loss fails on {few.whole.size} samples of the batch of {few.total} ({said}).",
                f"Pass samples={few.total} if it needs a batch of that size.",
            ) from error
        self._check_finite(whole, "the batch")
        return whole

    def _check_finite(self, step: _Step, what: str) -> None:
        advice = "Are all of its targets ignored? Pass a batch whose numbers are finite."
        if not math.isfinite(step.loss):
            raise _Cannot(f"The loss of {what} is {step.loss}.", advice)
        for name, grad in step.grads.items():
            if grad is not None and not grad.isfinite().all():
                raise _Cannot(f"The gradient of {what} for '{name}' is not finite.", advice)

    def _random(self, whole: _Step) -> _Cannot | None:
        """Return what to say of a model that draws random numbers, unless it is shown to matter.

        Some models draw numbers that have no effect; those can be verified.
        """
        if not self.run.is_random:
            return None
        names = ", ".join(f"`{name}`" for name in self.run.drawn)
        cannot = _Cannot(
            "The model or its loss draws random numbers, other than by dropout" + (f": {names}." if names else "."),
            "Switch them off while you verify: other numbers give a sample another gradient.",
        )
        for _ in range(3):
            again = self._step(self.few.whole, numbers=False)
            if not all(_is_same(again.grads[name], grad) for name, grad in whole.grads.items()):
                raise cannot
        return cannot

    def _observed(self) -> list[dict[str, _Measured]]:
        """Return what varreg says after two steps: plans that one makes, the next repeats."""
        found: list[dict[str, _Measured]] = []
        try:
            with observe(self.model, reduction=self.setting.reduction, batch_dim=self.setting.batch_dim) as observer:
                with self.run.with_dropout():
                    self._step(self.few.whole)  # what is refused in training is refused here
                for _ in range(2):
                    grads = self._step(self.few.whole).grads
                    found.append({n: _measured(p, grads[n]) for n, p in self.params.items()})
                self.rules = {row[0]: row[2] for row in observer.coverage()}
        except Exception as error:
            message = str(error)
            if message.startswith("varreg: "):
                raise _Cannot(message, status="refused") from error
            raise _Cannot(
                f"The model runs without varreg, and fails with it ({type(error).__name__}: {message}).",
                "This is an error in varreg: please report it, with the model.",
                status="refused",
            ) from error
        return found

    def _singles(self, whole: _Step) -> tuple[dict[str, _Sums], float]:
        """Return the sums of the gradients of single samples, and the largest gap of outputs."""
        sums, n = {name: _Sums(p) for name, p in self.params.items()}, self.few.whole.size
        gaps = []
        for i in range(n):
            step = self._single(i)
            for name, grad in step.grads.items():
                sums[name].add(grad)
            if len(step.output) == len(whole.output):
                pairs = zip(whole.output, step.output, strict=True)
                parts = [compare(a, b, i, n) for a, b in pairs]
                gaps += [part.gap for part in parts if part is not None and part.has_rows]
        return sums, max(gaps, default=math.nan)

    def _single(self, i: int) -> _Step:
        what = f"sample {self.few.which[i]} alone"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a batch of one, which is nobody's but ours
                step = self._step(self.few.singles[i])
        except Exception as error:
            raise _Cannot(
                f"The model or its loss fails on {what} ({type(error).__name__}: {error}).",
                "A sample has a gradient of its own only where it can be run by itself.",
            ) from error
        self._check_finite(step, what)
        return step

    # ---- why -------------------------------------------------------------------------------------

    def _explain(self, found: Verification, whole: _Step, observed: list[dict[str, _Measured]]) -> Verification:
        rtol, rows = found.rtol, found.rows
        mixed = max(row.batch for row in rows) > rtol
        parting = self._parting() if mixed or found.outputs > rtol else None
        if parting is not None and parting.instead and not found.outputs > rtol:
            parting = None  # they make other calls, to the same end
        if parting is not None or found.outputs > rtol:
            return _because(replace(found, parting=parting), _model_is_why(parting))
        if mixed:
            return _because(found, self._loss_is_why(whole, observed))
        why = _varreg_is_why(found.worst, self.rules.get(found.worst.parameter, ""), rtol)
        return _because(found, why)

    def _parting(self) -> Parting | None:
        def run(i: int | None) -> None:
            self.run.reset()
            (self.few.whole if i is None else self.few.singles[i]).output(self.model)

        return find_parting(self.model, run, self.few.whole.size, self.setting.rtol)

    def _loss_is_why(self, whole: _Step, observed: list[dict[str, _Measured]]) -> _Why:
        """Return what the loss does: one factor for all, one for each sample, or it mixes them."""
        n, setting = self.few.whole.size, self.setting
        if n * sum(p.numel() for p in self.params.values()) > _MOST_WEIGHED:
            return _loss_mixes(setting.reduction)
        singles = [self._single(i) for i in range(n)]
        steps = [step.grads for step in singles]
        each = torch.stack([_flat(step, self.params) for step in steps])
        target = _flat(whole.grads, self.params)
        scale = 1 if setting.reduction == "mean" else n
        factors = _factors(each, target / scale, setting.rtol)
        losses = torch.tensor([step.loss for step in singles], dtype=torch.float64)
        if factors is None or not _explain_loss(factors, losses, whole.loss / scale):
            return _loss_mixes(setting.reduction)
        if float(factors.max() - factors.min()) <= 1e-3 * float(factors.abs().max()):
            return _loss_has_factor(float(factors.mean()), n, setting.reduction)
        sums = {name: _Sums(p) for name, p in self.params.items()}
        for factor, step in zip(factors.tolist(), steps, strict=True):
            for name, grad in step.items():
                sums[name].add(None if grad is None else factor * grad)
        rows = _rows(sums, whole.grads, observed, setting, _floor(setting.rtol))
        return _loss_weighs(factors, max(row.gap for row in rows) <= 10 * setting.rtol)


# ---- numbers -------------------------------------------------------------------------------------


class _Sums:
    """Sums over samples of one parameter's gradients and their squares."""

    def __init__(self, p: Tensor):
        self.first = torch.zeros_like(p, dtype=torch.float64)
        self.second = torch.zeros_like(p, dtype=torch.float64)
        self.count, self.used = 0, False

    def add(self, grad: Tensor | None) -> None:
        self.count += 1
        if grad is not None:
            wide = grad.to(torch.float64)
            self.first += wide
            self.second += wide.square()
            self.used = True


def _rows(
    sums: dict[str, _Sums],
    whole: dict[str, Tensor | None],
    observed: list[dict[str, _Measured]],
    setting: _Setting,
    floor: float,
) -> tuple[Row, ...]:
    """Compare every parameter's numbers, element by element, relative to the size of the g_i."""
    rows, sizes = [], _sizes(sums, floor)
    for name, s in sums.items():
        n, mean, second, size = s.count, s.first / s.count, s.second / s.count, sizes[name]
        truth = mean, second, (second - mean.square()).clamp(min=0)
        scale = 1 if setting.reduction == "mean" else n
        plain = _wide(whole[name], mean)
        gaps = [_largest((plain / scale - mean) / size)]
        gaps.append(max(_largest((_wide(o[name].grad, mean) - plain) / scale / size) for o in observed))
        for i, power in enumerate((1, 2, 2)):
            gaps.append(max(_moment_gap(o[name].moments, i, truth[i], size**power, n) for o in observed))
        rows.append(Row(name, tuple(mean.shape), s.used, *gaps))
    return tuple(rows)


def _sizes(sums: dict[str, _Sums], floor: float) -> dict[str, Tensor]:
    """Return the size of each element's g_i: √((1/m) Σ g_i²), which no cancellation makes small.

    It is at least `floor` times the largest of any parameter.
    """
    sizes = {name: (s.second / s.count).sqrt() for name, s in sums.items()}
    least = floor * max(map(_largest, sizes.values()))
    return {name: size.clamp(min=least or 1.0) for name, size in sizes.items()}


def _noise(sums: dict[str, _Sums], truth: dict[str, _Sums], floor: float) -> dict[str, float]:
    """Return how far the sums of each parameter are from true ones, as gaps are measured."""
    gaps, sizes = {}, _sizes(sums, floor)
    for name, s in sums.items():
        first = (s.first - truth[name].first) / s.count / sizes[name]
        second = (s.second - truth[name].second) / s.count / sizes[name].square()
        gaps[name] = max(_largest(first), _largest(second))
    return gaps


def _moment_gap(found: tuple[int, Tensor, Tensor, Tensor] | None, which: int, truth: Tensor, size: Tensor, n: int) -> float:
    """Return the gap of one moment. No moments are right where there is nothing to measure."""
    if found is None:
        return math.inf if bool(truth.any()) else 0.0
    return _largest((found[1 + which] - truth) / size) if found[0] == n else math.inf


def _measured(p: Tensor, grad: Tensor | None) -> _Measured:
    m = moments(p)
    if m is None:
        return _Measured(grad, None)
    wide = [t.to(torch.float64, copy=True) for t in (m.mean, m.second_moment, m.variance)]
    return _Measured(grad, (m.count, wide[0], wide[1], wide[2]))


def _largest(t: Tensor) -> float:
    return float(t.abs().nan_to_num(math.inf).max()) if t.numel() else 0.0


def _wide(t: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if t is None else t.to(torch.float64)


def _dense(t: Tensor | None) -> Tensor | None:
    return t.to_dense() if t is not None and t.is_sparse else t


def _is_same(a: Tensor | None, b: Tensor | None) -> bool:
    return torch.equal(a, b) if a is not None and b is not None else a is b


def _flat(grads: dict[str, Tensor | None], params: Mapping[str, Tensor]) -> Tensor:
    """Return all gradients as one row of numbers."""
    wide = [_wide(grads[n], torch.zeros_like(p, dtype=torch.float64)) for n, p in params.items()]
    return torch.cat([t.flatten() for t in wide])


def _factors(each: Tensor, target: Tensor, rtol: float) -> Tensor | None:
    """Return f with target = (1/n) Σ f_i g_i, equal ones where those will do; None: there is no f."""
    n, size = len(each), each.square().mean(0).sqrt().max()

    def fits(f: Tensor) -> bool:
        return bool((target - (f[:, None] * each).mean(0)).abs().max() <= 10 * rtol * size)

    mean = each.mean(0)
    if mean.any():
        equal = (target @ mean / (mean @ mean)).expand(n)
        if fits(equal):
            return equal
    gram = each @ each.T
    spectrum = torch.linalg.eigvalsh(gram)
    if spectrum[0] <= (1e-6 if rtol > 1e-5 else 1e-11) * spectrum[-1]:
        return None  # so alike that many factors would do
    f = n * torch.linalg.solve(gram, each @ target)
    return f if fits(f) else None


def _explain_loss(factors: Tensor, losses: Tensor, whole: float) -> bool:
    """Do the factors that explain the gradient explain the loss, and are they not all 1?"""
    is_same = math.isclose(float((factors * losses).mean()), whole, rel_tol=1e-2)
    return is_same and bool((factors - 1).abs().max() > 1e-2)


# ---- words ---------------------------------------------------------------------------------------


class _Why(NamedTuple):
    reason: str
    advice: str


def _because(found: Verification, why: _Why) -> Verification:
    return replace(found, reason=why.reason, advice=why.advice)


def _model_is_why(parting: Parting | None) -> _Why:
    at = "at an operation that is not a torch function" if parting is None else f"at {parting}"
    return _Why(
        "Samples meet in the model: a sample's output depends on the others of its batch. "
        f"Whole batch and single samples part {at}.",
        "A sample has no gradient of its own there. Let each sample be treated by itself "
        "(GroupNorm or LayerNorm in place of statistics of the batch; BatchNorm in eval mode), or "
        "measure shares, with observe(..., batch_norm='contribution').",
    )


def _loss_mixes(reduction: str) -> _Why:
    return _Why(
        "The loss mixes samples or weighs them (or a hook or a backward function does): outputs of "
        "the whole batch are those of single samples, but the gradient of its loss is not the "
        f"{reduction} of theirs.",
        f"If it is to be so, nothing needs to change: {_SHARES} Else write the loss as a mean of "
        "terms that depend on one sample each.",
    )


def _loss_has_factor(factor: float, n: int, reduction: str) -> _Why:
    other = "sum" if reduction == "mean" else "mean"
    if math.isclose(factor, n if reduction == "mean" else 1 / n, rel_tol=1e-3):
        return _Why(
            f"The loss is a {other} over samples, and reduction={reduction!r} says that it is a {reduction}.",
            f"Pass reduction={other!r}, to verify and to observe.",
        )
    return _Why(
        f"The loss of a batch is {factor:.4g} times the {reduction} of the losses of its samples.",
        "Its ρ is right; mean and variance have that factor in them. Let the loss be a mean over "
        "samples (reduction='mean') or a sum (reduction='sum').",
    )


def _loss_weighs(factors: Tensor, are_shares: bool) -> _Why:
    shares = _SHARES + (" That is exact here." if are_shares else "")
    return _Why(
        "The loss weighs samples by something that differs from sample to sample (the "
        "number of tokens that are not ignored, class weights): in a batch, a sample counts "
        f"{float(factors.min()):.3g} to {float(factors.max()):.3g} times as much as by itself.",
        "If a sample is to count as much as by itself, divide by something that does not "
        "depend on the batch: reduction='sum' over a constant, or each sample by its own count, "
        f"then the mean. If it is to be so, nothing needs to change: {shares}",
    )


def _varreg_is_why(row: Row, rule: str, rtol: float) -> _Why:
    if row.grad > rtol:
        what = f"p.grad of '{row.parameter}' with varreg is not what it is without"
    elif math.isinf(row.mean):
        what = f"varreg has no moments for '{row.parameter}', or of another number of samples"
    else:
        gaps = {"mean": row.mean, "second moment": row.second_moment, "variance": row.variance}
        what = f"varreg's {max(gaps, key=lambda k: gaps[k])} for '{row.parameter}' is not the true one"
    served = f" (served by: {rule})" if rule else ""
    return _Why(
        f"Model and loss treat each sample by itself, but {what}{served}.",
        "This is an error in varreg: please report it, with the model. Until it is "
        "mended, freeze the parameter, or register a rule with varreg.register_rule.",
    )
