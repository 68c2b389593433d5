"""Write `checkpoints-0.1.0.pt`: checkpoints of an earlier release, and how training went on there.

Run it with that release's source, not with today's:

    git worktree add --detach ../earlier 31527f2
    PYTHONPATH=../earlier/src python tests/optim/data/write_checkpoints.py

That commit is the last one before the files of the optimizers were cut anew. The test of the
checkpoints uses the functions of this file, too, with today's source.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

import varreg

STEPS = 3
BATCH = 6


def make(name: str, model: nn.Module) -> Any:
    """Return the optimizer of a case."""
    p = model.parameters()
    if name == "SGD, momentum":
        return varreg.VRSGD(p, lr=0.1, momentum=0.9)
    if name == "SGD, calibrated, per tensor":
        return varreg.VRSGD(p, lr=0.1, weight_decay=0.01, per="tensor", calibrate=True)
    if name == "Adam":
        return varreg.VRAdam(p, lr=0.05)
    return varreg.VarianceRegularized(torch.optim.Adamax(p, lr=0.05), s=1.0)


CASES = ("SGD, momentum", "SGD, calibrated, per tensor", "Adam", "wrapped Adamax")


def train(model: nn.Module, optimizer: Any, inputs: Tensor) -> None:
    """Take one step for each batch of inputs."""
    for x in inputs:
        optimizer.zero_grad()
        model(x).sin().sum(1).mean().backward()
        optimizer.step()


def main() -> None:
    """Train for three steps, save model and optimizer, and train for three steps more."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    start, inputs = nn.Linear(3, 2), torch.randn(2 * STEPS, BATCH, 3)
    cases = {}
    for name in CASES:
        model = copy.deepcopy(start)
        varreg.observe(model)
        optimizer = make(name, model)
        train(model, optimizer, inputs[:STEPS])
        case = {
            "model": copy.deepcopy(model.state_dict()),
            "optimizer": copy.deepcopy(optimizer.state_dict()),
        }
        train(model, optimizer, inputs[STEPS:])
        case["parameters"] = parameters_to_vector(model.parameters()).detach().clone()
        lambdas = [optimizer.lambda_of(p).expand(p.shape) for p in model.parameters()]
        case["lambda"] = parameters_to_vector([lam.contiguous() for lam in lambdas])
        cases[name] = case
    versions = {"varreg": varreg.__version__, "torch": str(torch.__version__)}
    file = Path(__file__).with_name("checkpoints-0.1.0.pt")
    torch.save({"versions": versions, "inputs": inputs, "cases": cases}, file)


if __name__ == "__main__":
    main()
