"""A judge for models and usages. Does varreg give the exact moments, does it refuse, or is it
silently wrong?

The truth is the definition: each sample alone, in a copy of the model that varreg never saw. The
judge uses only the public names of varreg.
"""

from __future__ import annotations

import copy
import dataclasses
import re
import warnings as python_warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import varreg
from tests.support.truth import Gradients, losses, sample, sample_weights

# Words of varreg's warnings, one for each kind.
NO_MOMENTS = "there is a gradient and there are no moments"
OUTSIDE = "was called outside of the model's forward()"
WEIGHTED = "weights each sample by the labels of all samples"
ELSEWHERE = "If your loss takes them from there, ignore this"
SLOTS = "samples in another order would give them other gradients"
COUNTED = "it depends on the number of samples"
UNSCALED = "a hook changes gradients by their size"

Inputs = tuple[Any, ...]
Use = Callable[[nn.Module, Inputs, Tensor], Any]
"""Trains for one step: `use(model, inputs, weights)` sets the gradients, and returns the model's
output.
"""


def called(model: nn.Module, *inputs: Any) -> Any:
    return model(*inputs)


def itself(model: nn.Module) -> list[nn.Module]:
    return [model]


class Case(NamedTuple):
    """One case: a model or a usage, and what varreg should do with it."""

    name: str
    family: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]
    """Returns the inputs for a batch size: trees of tensors with the batch in dimension 0."""
    expect: str
    """"exact", "refused", or "either" of them. One sample meets no other: there, "refused" is
    "either".
    """
    batches: tuple[int, ...] = (4, 1)
    call: Callable[..., Any] = called
    """A function of the model and its inputs, if it is not `model(*inputs)`."""
    use: Use | None = None
    """In place of forward, loss, backward."""
    observed: Callable[[nn.Module], list[nn.Module]] = itself
    options: Mapping[str, Any] = {}
    """For `varreg.observe`."""
    truth: str = "alone"
    """"alone": each sample by itself. "graph": each sample's loss, differentiated on the graph of
    the whole batch.
    """
    warned: str = ""
    """Words of the warning that counts as a refusal where a parameter that it names has no
    moments.
    """
    told: str = ""
    """Words of the warning about what was taken for a sample, or for its loss, that counts as a
    refusal if numbers differ.
    """
    named: bool = True
    """Whether a refusal must name a module or a parameter."""
    after: Use | None = None
    """A step that must be exact on the same observed model, after a refusal too."""
    dtype: torch.dtype = torch.float64
    """In a precision other than float64, only ρ is compared, with ρ in float64."""


class Outcome(NamedTuple):
    kind: str
    """"exact", "refused", "silent" or "crash"."""
    message: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}" if self.message else self.kind


class SilentError(AssertionError):
    """Varreg said nothing, and something is wrong."""


# ---- a step
# --------------------------------------------------------------------------------------------------


def tensors_of(output: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors of a tree of tuples, lists, dicts and dataclasses; complex
    ones as real.
    """
    if isinstance(output, Tensor):
        if output.is_complex():
            yield torch.view_as_real(output)
        elif output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors_of(value)
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from tensors_of(value)
    elif dataclasses.is_dataclass(output):
        for field in dataclasses.fields(output):
            yield from tensors_of(getattr(output, field.name))


def loss_of(output: Any, weights: Tensor) -> Tensor:
    """Return the loss that the model made itself, or else the mean of the samples' losses."""
    tensors = tuple(tensors_of(output))
    if tensors[0].dim() == 0:
        return tensors[0]
    return losses(tensors, weights).mean()


def use_of(case: Case) -> Use:
    if case.use is not None:
        return case.use

    def use(model: nn.Module, inputs: Inputs, weights: Tensor) -> Any:
        output = case.call(model, *inputs)
        loss_of(output, weights).backward()
        return output

    return use


def clear(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = None


def seed(value: int) -> None:
    """Seed the CPU's generator only: `torch.manual_seed` also queues a call for each kind of
    device, and that takes longer than a case.
    """
    torch.default_generator.manual_seed(value)


def run(use: Use, model: nn.Module, inputs: Inputs, weights: Tensor) -> Any:
    seed(2)
    return use(model, inputs, weights)


# ---- the truth
# --------------------------------------------------------------------------------------------------


def trained(model: nn.Module) -> dict[str, Tensor]:
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


def alone(use: Use, model: nn.Module, inputs: Inputs, weights: Tensor) -> Gradients:
    """Return each parameter's gradients, one sample at a time, each in a copy of its own."""
    rows: dict[str, list[Tensor]] = {}
    for i in range(len(weights)):
        one = copy.deepcopy(model)
        run(use, one, sample(inputs, i), weights[i : i + 1])
        for n, p in trained(one).items():
            rows.setdefault(n, []).append(torch.zeros_like(p) if p.grad is None else p.grad)
    return {n: torch.stack(r) for n, r in rows.items()}


def on_the_graph(case: Case, model: nn.Module, inputs: Inputs, weights: Tensor) -> Gradients:
    """Return each parameter's gradients of each sample's loss, of one forward of the whole
    batch.
    """
    model = copy.deepcopy(model)
    params = trained(model)
    seed(2)
    each = losses(tuple(tensors_of(case.call(model, *inputs))), weights)
    rows = [
        torch.autograd.grad(
            loss,
            list(params.values()),
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        for loss in each
    ]
    return {n: torch.stack([r[k] for r in rows]) for k, n in enumerate(params)}


def true_gradients(case: Case, model: nn.Module, inputs: Inputs, weights: Tensor) -> Gradients:
    if case.truth == "graph":
        return on_the_graph(case, model, inputs, weights)
    return alone(use_of(case), model, inputs, weights)


def model_of(case: Case) -> nn.Module:
    seed(1)
    return case.make().to(case.dtype)


def data_of(case: Case, batch: int, round_: int = 0) -> tuple[Inputs, Tensor]:
    """Return the case's inputs, which differ from round to round, and the weights of samples."""
    seed(10 + round_)
    return cast(case.inputs(batch), case.dtype), sample_weights(batch).to(case.dtype)


def cast(tree: Any, dtype: torch.dtype) -> Any:
    def one(t: Any) -> Any:
        return t.to(dtype) if isinstance(t, Tensor) and t.dtype == torch.float64 else t

    return torch.utils._pytree.tree_map(one, tree)


# ---- the verdict
# --------------------------------------------------------------------------------------------------


def judge(case: Case, batch: int, plain: list[Plain] | None = None) -> Outcome:
    """Run the case with varreg twice, with fresh inputs, and return the verdict.

    The second run uses the plans of the first. If the *plain* model fails, the table is wrong, and
    the error is raised. Give `plain_steps(case, batch)` if you have them.
    """
    model = model_of(case)
    plain = plain_steps(case, batch) if plain is None else plain
    before = depths()
    with python_warnings.catch_warnings(record=True) as caught:
        python_warnings.simplefilter("always")
        try:
            outcome = observed(case, model, batch, plain, caught)
        finally:
            left = settle(before)
    if left:
        return Outcome("silent", f"left on the stack of modes: {left}; {outcome}")
    return outcome


class Plain(NamedTuple):
    gradients: Gradients
    grads: dict[str, Tensor | None]
    output: Any


def plain_step(case: Case, batch: int, round_: int) -> Plain:
    """Return torch's own results: the gradients of each sample, and `p.grad` and outputs of the
    whole batch.
    """
    model, (inputs, weights) = model_of(case), data_of(case, batch, round_)
    if case.dtype != torch.float64:
        model, inputs, weights = model.double(), cast_up(inputs), weights.double()
    with python_warnings.catch_warnings():
        python_warnings.simplefilter("ignore")
        truth = true_gradients(case, model, inputs, weights)
        output = run(use_of(case), model, inputs, weights)
    return Plain(truth, {n: p.grad for n, p in trained(model).items()}, output)


def plain_steps(case: Case, batch: int) -> list[Plain]:
    """Return torch's own results of both runs that `judge` takes."""
    return [plain_step(case, batch, r) for r in range(2)]


def cast_up(tree: Any) -> Any:
    def one(t: Any) -> Any:
        return t.double() if isinstance(t, Tensor) and t.is_floating_point() else t

    return torch.utils._pytree.tree_map(one, tree)


def observed(
    case: Case, model: nn.Module, batch: int, plain: list[Plain], caught: list[Any]
) -> Outcome:
    observers: list[varreg.Observer] = []
    start = copy.deepcopy(model.state_dict())
    outcome = Outcome("exact")
    try:
        observers += [varreg.observe(m, **case.options) for m in case.observed(model)]
        for round_, expected in enumerate(plain):
            model.load_state_dict(start, strict=False)  # buffers and weights that a step changes
            clear(model)
            inputs, weights = data_of(case, batch, round_)
            output = run(use_of(case), model, inputs, weights)
            told = compare(case, model, output, expected, caught)
            outcome = told or outcome
    except SilentError as wrong:
        return Outcome("silent", str(wrong))
    except Exception as error:
        outcome = refusal(error, [model, *case.observed(model)], case.named)
    try:
        if outcome.kind == "refused" and case.after is None:
            for o in observers:
                o.remove()
            check_left_as_it_was(case, model, start, batch, plain[0])
        if outcome.kind != "crash" and case.after is not None:
            check_after(case, model, start, batch)
    except SilentError as wrong:
        return Outcome("silent", f"{wrong} (after: {outcome})")
    except Exception as error:
        return Outcome("crash", f"{type(error).__name__}: {first_line(error)} (after: {outcome})")
    finally:
        for o in observers:
            o.remove()
    return outcome


def check_left_as_it_was(
    case: Case, model: nn.Module, start: Any, batch: int, plain: Plain
) -> None:
    """Check that the model trains as if never observed, after a refusal and `remove()`."""
    if case.dtype != torch.float64:
        return
    model.load_state_dict(start, strict=False)
    clear(model)
    inputs, weights = data_of(case, batch)
    run(use_of(case), model, inputs, weights)
    compare_grads(model, plain)


def check_after(case: Case, model: nn.Module, start: Any, batch: int) -> None:
    """Check that an ordinary step of the same observed model is exact, after the case's usage."""
    assert case.after is not None
    ordinary = case._replace(use=case.after)
    expected = plain_step(ordinary, batch, 0)
    model.load_state_dict(start)
    clear(model)
    inputs, weights = data_of(ordinary, batch)
    compare(ordinary, model, run(case.after, model, inputs, weights), expected, [])


def refusal(error: Exception, models: list[nn.Module], named: bool) -> Outcome:
    """Return "refused" if the message is varreg's and names the place; "crash" otherwise."""
    message = str(error)
    if error.__cause__ is not None and "varreg: " in str(
        error.__cause__
    ):  # a compiler wraps what it met
        message = "varreg: " + str(error.__cause__).partition("varreg: ")[2]
    if not message.startswith("varreg:"):
        return Outcome("crash", f"{type(error).__name__}: {first_line(error)}")
    if named and not any(names_a_place(message, m) for m in models):
        return Outcome("crash", f"names no module and no parameter: {first_line(error)}")
    return Outcome("refused", message.splitlines()[0])


def names_a_place(message: str, model: nn.Module) -> bool:
    paths = {n for n, _ in model.named_modules() if n} | {n for n, _ in model.named_parameters()}
    if any(re.search(rf"['\"`]([\w.]*\.)?{re.escape(p)}['\"`]", message) for p in paths):
        return True
    return "the model itself" in message or f"({type(model).__name__})" in message


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def compare(
    case: Case, model: nn.Module, output: Any, plain: Plain, caught: list[Any]
) -> Outcome | None:
    """Raise SilentError if a number is wrong or missing. Return a refusal if a warning told of the
    missing number.
    """
    if case.dtype != torch.float64:
        compare_rho(model, plain)
        return None
    for mine, theirs in zip(tensors_of(output), tensors_of(plain.output), strict=True):
        check(
            mine.detach(),
            theirs.detach(),
            float(theirs.detach().abs().max()) if theirs.numel() else 0.0,
            "an output",
        )
    compare_grads(model, plain)
    try:
        return compare_moments(case, model, plain.gradients, caught)
    except SilentError:
        warning = case.told and warning_of(caught, case.told)
        if not warning:
            raise
        return Outcome("refused", f"by a warning: {warning.splitlines()[0]}")


def warning_of(caught: list[Any], words: str, name: str = "") -> str:
    """Return the first warning of varreg's with these words, which must name a parameter if one is
    given; "" if there is none.
    """
    for message in (str(w.message) for w in caught):
        named = not name or has_name(message, name)
        if named and words in message and message.startswith("varreg: "):
            return message
    return ""


def has_name(message: str, name: str) -> bool:
    """Tell whether a message has this name as a whole, and not as a part of another."""
    return re.search(rf"(?<![\w.]){re.escape(name)}(?!\.?\w)", message) is not None


def compare_grads(model: nn.Module, plain: Plain) -> None:
    scale = size_of(plain.grads.values())
    for n, p in trained(model).items():
        want = plain.grads[n]
        if (p.grad is None) != (want is None):
            got, expected = ("None" if g is None else "a gradient" for g in (p.grad, want))
            if want is None or want.any():
                raise SilentError(f"'{n}'.grad is {got}, expected {expected}")
        if p.grad is not None and want is not None:
            check(p.grad, want, scale, f"'{n}'.grad")


def compare_moments(
    case: Case, model: nn.Module, truth: Gradients, caught: list[Any]
) -> Outcome | None:
    ids = {id(p) for m in case.observed(model) for p in m.parameters()}
    scale, told = size_of(truth.values()), None
    for n, p in trained(model).items():
        if id(p) not in ids:
            continue
        m, g = varreg.moments(p), truth[n]
        if m is None:
            if float(g.abs().max() if g.numel() else 0.0) <= 1e-11 * scale:
                continue
            warning = case.warned and warning_of(caught, case.warned, n)
            if not warning:
                raise SilentError(f"'{n}' has a gradient, no moments, and nothing was said")
            told = Outcome("refused", f"by a warning: {warning.splitlines()[0]}")
            continue
        if m.count != len(g):
            raise SilentError(f"'{n}': {m.count} samples were counted, expected {len(g)}")
        check(m.mean, g.mean(0), scale, f"'{n}': mean")
        check(m.second_moment, g.square().mean(0), scale**2, f"'{n}': second moment")
        check(m.variance, g.var(0, correction=0), scale**2, f"'{n}': variance")
    return told


def compare_rho(model: nn.Module, plain: Plain) -> None:
    """Compare ρ. It has no unit, so it must be right even if squares of gradients leave the range
    of their format.
    """
    for n, p in trained(model).items():
        m, g = varreg.moments(p), plain.gradients[n]
        if m is None:
            raise SilentError(f"'{n}' has a gradient, no moments, and nothing was said")
        want = g.var(0, correction=0) / g.mean(0).square()
        plain_enough = want < 1e3  # beyond, the mean is what rounding left of it
        gap = ((m.rho.double() - want).abs() / (want + 1e-3))[plain_enough]
        if gap.numel() and not float(gap.max()) <= 1e-3:
            raise SilentError(f"'{n}': ρ is off by {float(gap.max()):.3g}, relative")


def size_of(tensors: Any) -> float:
    return max((float(t.abs().max()) for t in tensors if t is not None and t.numel()), default=0.0)


def check(actual: Tensor, expected: Tensor, scale: float, what: str, rtol: float = 1e-9) -> None:
    """Raise SilentError if two tensors differ by more than rounding. `scale` is the size of these
    values over the whole model.
    """
    if actual.shape != expected.shape:
        raise SilentError(f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    if not expected.numel():
        return
    gap, size = float((actual - expected).abs().max()), float(expected.abs().max())
    if not gap <= rtol * size + 1e-12 * scale:
        raise SilentError(f"{what}: off by {gap:.3g} of {size:.3g}")


# ---- what is left behind
# ---------------------------------------------------------------------------------------------


class Depths(NamedTuple):
    functions: int
    dispatch: int
    forward_level: int


def depths() -> Depths:
    """Return how deep torch's stacks of modes are."""
    return Depths(
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        torch.autograd.forward_ad._current_level,
    )


def settle(before: Depths) -> str:
    """Remove what was left on the stacks, and return it, so that the next case finds them empty."""
    left = []
    while torch._C._len_torch_function_stack() > before.functions:
        left.append(repr(torch._C._pop_torch_function_stack()))
    while torch._C._len_torch_dispatch_stack() > before.dispatch:
        left.append(repr(torch._C._pop_torch_dispatch_stack()))
    while torch.autograd.forward_ad._current_level > before.forward_level:
        left.append("a level of forward-mode differentiation")
        torch.autograd.forward_ad.exit_dual_level()
    return ", ".join(left)


# ---- what the table says of itself
# -----------------------------------------------------------------------------------


def samples_meet(case: Case, plain: Plain) -> bool:
    """Return whether the batch's gradient differs from the sum over its samples, by plain torch."""
    scale = size_of(plain.gradients.values())
    for n, each in plain.gradients.items():
        total = each.sum(0) if case.options.get("reduction") == "sum" else each.mean(0)
        grad = plain.grads[n]
        gap = (
            float((total - (torch.zeros_like(total) if grad is None else grad)).abs().max())
            if total.numel()
            else 0.0
        )
        if gap > 1e-9 * max(scale, 1e-9):
            return True
    return False


# ---- allowed outcomes
# ------------------------------------------------------------------------------------------------


def allowed(case: Case, batch: int) -> set[str]:
    """Return the allowed outcomes. A batch of one sample may be exact, since it meets no other
    sample.
    """
    if case.expect == "either" or (case.expect == "refused" and batch == 1):
        return {"exact", "refused"}
    return {case.expect}
