"""Statistics in a real TensorBoard log, read back."""

from __future__ import annotations

import math

import pytest
import torch

import varreg
from varreg.tensorboard import log

# Protobuf, which the writer needs, warns of its own past.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def test_what_is_written_is_what_was_measured(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    observer = varreg.observe(model)
    optimizer = varreg.VRSGD(model.parameters(), lr=0.1)
    expected: dict[str, list[float]] = {
        "rho/0": [],
        "noise_scale": [],
        "lambda/effective": [],
        "lambda/2.weight/mean": [],
    }
    with SummaryWriter(tmp_path) as writer:
        for step in range(3):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(
                model(torch.randn(8, 4)), torch.randint(0, 2, (8,))
            ).backward()
            optimizer.step()
            log(writer, step, observer, optimizer, layers=True)
            first = [varreg.moments(p) for p in model[0].parameters()]
            expected["rho/0"].append(
                float(
                    sum(m.variance.sum() for m in first) / sum(m.mean.square().sum() for m in first)
                )
            )
            expected["noise_scale"].append(observer.summary().model.noise_scale)
            weights = [p.grad.square() for p in model.parameters()]
            lams = [optimizer.lambda_of(p) for p in model.parameters()]
            expected["lambda/effective"].append(
                float(
                    sum((w * lam).sum() for w, lam in zip(weights, lams, strict=True))
                    / sum(w.sum() for w in weights)
                )
            )
            expected["lambda/2.weight/mean"].append(
                float(optimizer.lambda_of(model[2].weight).mean())
            )
    events = EventAccumulator(str(tmp_path)).Reload()
    for tag, values in expected.items():
        found = events.Scalars(tag)
        finite = {i: x for i, x in enumerate(values) if math.isfinite(x)}
        assert {e.step: e.value for e in found} == pytest.approx(finite, rel=1e-6)
    assert all(map(math.isfinite, expected["rho/0"] + expected["lambda/effective"]))


def test_the_whole_model_by_default_and_finite_numbers():
    class Writer(dict):
        def add_scalar(self, tag, value, step):
            self[tag] = value

    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    observer = varreg.observe(model)
    optimizer = varreg.VRSGD(model.parameters(), lr=0.1)
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    few, all_of_them = Writer(), Writer()
    log(few, 0, observer, optimizer)
    log(all_of_them, 0, observer, optimizer, layers=True)
    assert set(few) == {tag for tag in all_of_them if tag.count("/") == tag.startswith("lambda/")}
    assert few == pytest.approx({tag: all_of_them[tag] for tag in few})
    model.zero_grad()
    model(torch.zeros(1, 4)).square().mean().backward()  # one sample has no variance
    one = Writer()
    log(one, 0, observer)
    assert "noise_scale" not in one


def test_bad_arguments():
    with pytest.raises(ValueError, match="needs an observer, a regularized optimizer, or both"):
        log(None, 0)
    with pytest.raises(ValueError, match="SGD has no λ to log"):
        log(None, 0, optimizer=torch.optim.SGD([torch.zeros(1)], lr=0.1))
    with pytest.raises(ValueError, match=r"a writer with add_scalar.*got int"):
        log(3, 0, varreg.observe(torch.nn.Linear(2, 2)))
    with pytest.raises(ValueError, match=r"expects the observer.*got Linear"):
        log(type("W", (), {"add_scalar": None})(), 0, torch.nn.Linear(2, 2))
