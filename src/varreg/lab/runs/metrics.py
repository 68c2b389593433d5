"""Metrics of a run: loss and accuracy of a model, λ of a step and of a whole run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from varreg.lab.tasks.batches import Samples
from varreg.lab.tasks.definition import Task


@torch.no_grad()
def evaluate(
    model: nn.Module, split: Samples, task: Task, batch: int = 250, most: int | None = None
) -> tuple[float, float]:
    """Return mean loss and accuracy over the first `most` samples; nan for a task without
    accuracy.
    """
    n = min(len(split), most or len(split))
    was, total, right = model.training, 0.0, 0.0 if task.accuracy and n else math.nan
    model.eval()
    for begin in range(0, n, batch):
        x, y = split.rows(begin, min(begin + batch, n))
        output = model(x)
        total += float(task.loss(output, y)) * len(y)
        right += float(task.accuracy(output, y)) * len(y) if task.accuracy else 0.0
    model.train(was)
    return (total / n, right / n) if n else (math.nan, math.nan)


def effective_lambdas(optimizer: Any, named: Sequence[tuple[str, Tensor]]) -> dict[str, float]:
    """Return λ of the last step: its mean weighted by squared gradients, by the name of each
    parameter; under "", the same over all parameters; under "mean", its plain mean over all.
    """
    out, weighted, weight, plain, count = {}, 0.0, 0.0, 0.0, 0
    for name, p in named:
        lam = optimizer.lambda_of(p)
        if lam is None or p.grad is None:
            continue
        square = p.grad.square()
        a, b = float((square * lam).sum()), float(square.sum())
        out[name] = a / b if b else math.nan
        weighted, weight, plain, count = (
            weighted + a,
            weight + b,
            plain + float(lam.mean()) * p.numel(),
            count + p.numel(),
        )
    return {**out, "": weighted / weight, "mean": plain / count} if weight else out


def effective_lambda(result: dict[str, Any]) -> float:
    """Return λ of a run: the mean over time of the effective λ. 1 for an optimizer without λ."""
    values = [x for x in result["statistics"].get("lambda", []) if x == x]
    return statistics.fmean(values) if values else 1.0


def final(result: dict[str, Any], metric: str) -> float:
    """Return a metric at the end of a run. A run that diverged has infinite loss and accuracy 0."""
    value = float(result["evaluations"][metric][-1])
    if metric.endswith("loss"):
        return value if math.isfinite(value) and not result["diverged"] else math.inf
    has_accuracy = not math.isnan(result["evaluations"]["train_accuracy"][0])
    return 0.0 if result["diverged"] and has_accuracy else value


def time_to(result: dict[str, Any], goal: float, unit: str) -> float:
    """Return the steps or seconds until the validation loss reached the goal, by evaluations after
    each epoch; infinite if it never did.
    """
    seen = result["evaluations"]
    times = zip(seen[unit][1:], seen["valid_loss"][1:], strict=True)
    return next((float(t) for t, loss in times if loss <= goal), math.inf)
