"""The table of regularized optimizers: for each, its base, its reference, and the settings of its
tests. A new optimizer is a new row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.testing._internal.common_optimizers import OptimizerInfo, optim_db

import varreg
from tests.support import update_rules


class Rule(NamedTuple):
    regularized: type[torch.optim.Optimizer]
    base: type[torch.optim.Optimizer]
    reference: Callable
    settings: dict[str, dict]
    """Arguments by a name."""
    defaults: dict = {}  # noqa: RUF012
    """What the reference cannot know: defaults that are not 0."""
    adaptive: bool = True
    """Has a denominator, and so the option `variance`."""

    @property
    def info(self) -> OptimizerInfo:
        return next(i for i in optim_db if i.optim_cls is self.base)


RULES = {
    "SGD": Rule(
        varreg.VRSGD,
        torch.optim.SGD,
        update_rules.sgd,
        {
            "plain": {"lr": 0.1},
            "momentum": {"lr": 0.05, "momentum": 0.9},
            "dampening": {"lr": 0.1, "momentum": 0.8, "dampening": 0.3},
            "nesterov": {"lr": 0.05, "momentum": 0.9, "nesterov": True},
            "decay": {"lr": 0.1, "weight_decay": 0.05},
            "everything": {
                "lr": 1e-3,
                "momentum": 0.9,
                "weight_decay": 0.05,
                "nesterov": True,
                "maximize": True,
            },
        },
        adaptive=False,
    ),
    "Adam": Rule(
        varreg.VRAdam,
        torch.optim.Adam,
        update_rules.adam,
        {
            "plain": {"lr": 0.01},
            "betas": {"lr": 0.02, "betas": (0.7, 0.9), "eps": 1e-3},
            "decay": {"lr": 0.01, "weight_decay": 0.1, "maximize": True},
            "amsgrad": {"lr": 0.01, "amsgrad": True, "betas": (0.8, 0.6)},
            "decoupled": {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True},
        },
    ),
    "AdamW": Rule(
        varreg.VRAdamW,
        torch.optim.AdamW,
        update_rules.adam,
        {
            "plain": {"lr": 0.01},
            "amsgrad": {"lr": 0.02, "amsgrad": True, "betas": (0.8, 0.6), "weight_decay": 0.3},
        },
        {"weight_decay": 0.01, "decoupled_weight_decay": True},
    ),
    "NAdam": Rule(
        varreg.VRNAdam,
        torch.optim.NAdam,
        update_rules.adam,
        {
            "plain": {"lr": 0.01},
            "decay": {"lr": 0.01, "weight_decay": 0.1, "momentum_decay": 0.2, "betas": (0.8, 0.9)},
            "decoupled": {
                "lr": 0.01,
                "weight_decay": 0.1,
                "decoupled_weight_decay": True,
                "maximize": True,
            },
        },
        {"momentum_decay": 4e-3},
    ),
    "RMSprop": Rule(
        varreg.VRRMSprop,
        torch.optim.RMSprop,
        update_rules.rmsprop,
        {
            "plain": {"lr": 0.01},
            "centered": {"lr": 0.005, "centered": True, "alpha": 0.9},
            "momentum": {"lr": 0.005, "momentum": 0.8, "weight_decay": 0.1},
            "everything": {
                "lr": 0.002,
                "centered": True,
                "momentum": 0.5,
                "alpha": 0.8,
                "eps": 1e-2,
                "maximize": True,
            },
        },
    ),
    "Adagrad": Rule(
        varreg.VRAdagrad,
        torch.optim.Adagrad,
        update_rules.adagrad,
        {
            "plain": {"lr": 0.05},
            "everything": {
                "lr": 0.05,
                "lr_decay": 0.1,
                "weight_decay": 0.1,
                "initial_accumulator_value": 0.1,
                "eps": 1e-3,
            },
            "maximize": {"lr": 0.02, "maximize": True},
        },
    ),
    "Adadelta": Rule(
        varreg.VRAdadelta,
        torch.optim.Adadelta,
        update_rules.adadelta,
        {
            "plain": {},
            "decay": {"lr": 2.0, "rho": 0.8, "eps": 1e-3, "weight_decay": 0.1},
            "maximize": {"maximize": True},
        },
        {"lr": 1.0},
    ),
}

SETTINGS = [(name, setting) for name, rule in RULES.items() for setting in rule.settings]
