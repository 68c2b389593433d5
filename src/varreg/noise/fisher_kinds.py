"""The three kinds of Fisher: where their labels come from, and their backward passes.

With g_i(y) the gradient of −log p(y|x_i), one batch adds to the diagonal

    empirical   Σ_i g_i(y_i)²                 the labels of the data
    sampled     Σ_i g_i(ŷ)²,  ŷ ~ p(·|x_i)    labels drawn from the model
    exact       Σ_i Σ_y p(y|x_i) g_i(y)²      √p(y|x_i) weights the loss of label y: C backwards

Each backward pass starts at the *sum* of losses, so that a sample contributes g_i itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from varreg._torch import tree_map
from varreg.engine.trace.arguments import tensors_of
from varreg.errors import VarregError
from varreg.thresholds import LOSS_ROUNDING

Loss = Callable[..., Any]
KINDS = ("empirical", "sampled", "exact")


def backwards(
    kind: str, loss: Loss, output: Any, y: Any, m: int, generator: torch.Generator | None
) -> Iterator[Callable[[], None]]:
    """Yield the backward passes of one batch of m samples. Call each before asking for the next."""
    if kind == "exact":
        yield from _for_every_label(loss, logits_of(kind, output, y), m)
        return
    labels = y if kind == "empirical" else draw(logits_of(kind, output, y), generator)
    value = m * value_of(loss, output, labels)
    yield lambda: value.backward()


def _for_every_label(loss: Loss, logits: Tensor, m: int) -> Iterator[Callable[[], None]]:
    """Yield one backward pass for each label y. It weights the loss of sample i with √p(y|x_i)."""
    roots = F.softmax(logits.detach(), 1).sqrt()
    classes = logits.shape[1]
    for y in range(classes):
        leaf = logits.detach().requires_grad_()
        value = value_of(loss, leaf, torch.full((m,), y, device=logits.device))
        (grad,) = torch.autograd.grad(value, leaf)
        weighted = grad * (m * roots[:, y]).unsqueeze(1)

        def run(grad: Tensor = weighted, is_last: bool = y == classes - 1) -> None:
            logits.backward(grad, retain_graph=not is_last)

        yield run


def draw(logits: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return a label for each sample (and each position), drawn from the model's softmax."""
    p = F.softmax(logits.detach(), 1).movedim(1, -1)
    if not p.isfinite().all():  # on a GPU, multinomial would end the process
        raise VarregError(
            "varreg: kind='sampled' draws labels from the model's softmax, and its output is not "
            "finite. Look for values in the inputs that are not; has the model diverged?"
        )
    home = p.device if generator is None else generator.device
    drawn = torch.multinomial(p.flatten(0, -2).to(home), 1, generator=generator)
    return drawn.view(p.shape[:-1]).to(logits.device)


def value_of(loss: Loss, output: Any, y: Any) -> Tensor:
    """Return the loss, which must be one number."""
    value = loss(output, y)
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise VarregError(
            "varreg: fisher expects a loss that is the mean over samples, one number; it returned "
            f"{got}. Leave its reduction at 'mean'."
        )
    return value.reshape(())


def logits_of(kind: str, output: Any, y: Any) -> Tensor:
    """Return the model's output, checked to be logits of classes."""
    what = f"varreg: kind='{kind}' takes labels from the model's softmax, and so expects"
    if not isinstance(output, Tensor):
        raise VarregError(
            f"{what} logits [samples, classes] as its output; got {type(output).__name__}. Wrap "
            "the model so that it returns its logits, or use kind='empirical'."
        )
    most = 2 if kind == "exact" else math.inf
    if not (2 <= output.dim() <= most and output.shape[1] > 1 and output.is_floating_point()):
        instead = "sampled' or '" if kind == "exact" and output.dim() > 2 else ""
        raise VarregError(
            f"{what} logits [samples, classes] as its output; got shape {tuple(output.shape)} of "
            f"{output.dtype}. Use kind='{instead}empirical'."
        )
    if any(t.is_floating_point() for t in tensors_of(y)):
        raise VarregError(
            f"{what} labels that are whole numbers; the loader's targets are of {y.dtype}, as for "
            "a regression. Use kind='empirical'."
        )
    return output


# ---- checks of the loss, and of sums -------------------------------------------------------------


def check_loss(kind: str, loss: Loss, output: Any, y: Any, m: int) -> None:
    """Raise a VarregError if the loss is not a mean over samples. If labels come from the model,
    raise one also if the loss is not −log of the model's softmax.
    """
    with torch.no_grad():
        output = _map(lambda t: t.detach(), output)
        _check_mean(loss, output, y, m)
        if kind == "empirical":
            return
        logits = logits_of(kind, output, y)
        shape = (m, *logits.shape[2:])
        labels = torch.arange(math.prod(shape), device=logits.device) % logits.shape[1]
        labels = labels.view(shape)
        ours, theirs = F.cross_entropy(logits, labels), value_of(loss, logits, labels)
        if not _is_close(float(ours), float(theirs), logits.dtype):
            raise VarregError(
                f"varreg: kind='{kind}' expects a loss that is −log p(y|x) with p the softmax of "
                f"the output, as F.cross_entropy is ({float(ours):.6g} here); this one is "
                f"{float(theirs):.6g}. Use F.cross_entropy without weights or smoothing, or "
                "kind='empirical'."
            )


def _check_mean(loss: Loss, output: Any, y: Any, m: int) -> None:
    """Compare the loss of the batch with those of its two parts."""
    whole = float(value_of(loss, output, y))
    if not math.isfinite(whole):
        raise VarregError(
            f"varreg: fisher expects a finite loss; that of a batch is {whole}. Look for values "
            "in its inputs or targets that are not; has the model diverged?"
        )
    if m < 2:
        return
    n = max(1, m // 3)  # unequal parts: their plain mean is not the mean over samples
    a, b = (
        float(value_of(loss, _map(part, output), _map(part, y)))
        for part in (lambda t: _cut(t, m, 0, n), lambda t: _cut(t, m, n, m))
    )
    dtype = next((t.dtype for t in tensors_of(output)), torch.float32)
    if _is_close(whole, (n * a + (m - n) * b) / m, dtype):
        return
    is_sum = _is_close(whole, a + b, dtype)
    raise VarregError(
        "varreg: fisher expects a loss that is the mean over samples; this one "
        + (
            "is a sum over them. Leave its reduction at 'mean'."
            if is_sum
            else f"is {whole:.6g} for a batch whose parts of {n} and {m - n} samples have {a:.6g} "
            f"and {b:.6g}: it has weights, ignores some targets, or mixes samples. Let each sample "
            "count the same."
        )
    )


def check_finite(squares: dict[str, Tensor], added: dict[str, Tensor], batch: int) -> None:
    """Raise a VarregError if a batch makes sums of squares infinite or nan; `added` is what it
    adds.
    """
    for name, t in squares.items():
        if t.isfinite().all():
            continue
        if name in added and added[name].isfinite().all():
            raise VarregError(
                f"varreg: the squared gradients of '{name}' are too large for sums of {t.dtype}. "
                "Use dtype=torch.float64."
            )
        raise VarregError(
            f"varreg: the gradient of '{name}' is not finite in batch {batch}, counted from 0. "
            "Look for values in its inputs or targets that are not; has the model diverged? The "
            "sums are those of the batches before it."
        )


def cut(tree: Any, m: int, start: int, stop: int) -> Any:
    """Cut all tensors that have m samples in dimension 0: return their samples `start:stop`."""
    return _map(lambda t: _cut(t, m, start, stop), tree)


def _cut(t: Tensor, m: int, start: int, stop: int) -> Tensor:
    return t[start:stop] if t.dim() and t.shape[0] == m else t


def _map(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    return tree_map(lambda t: function(t) if isinstance(t, Tensor) else t, tree)


def _is_close(a: float, b: float, dtype: torch.dtype) -> bool:
    """Return whether two losses are equal up to rounding."""
    eps = torch.finfo(dtype if dtype.is_floating_point else torch.float32).eps
    units, at_most, floor = LOSS_ROUNDING
    return abs(a - b) <= min(units * eps, at_most) * max(abs(a), abs(b)) + floor * eps
