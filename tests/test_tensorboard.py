"""Statistics in a real TensorBoard log, read back."""

from __future__ import annotations

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
    expected: dict[str, list[float]] = {"rho/0": [], "noise_scale": [], "lambda/effective": [], "lambda/2.weight/mean": []}
    with SummaryWriter(tmp_path) as writer:
        for step in range(3):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(torch.randn(8, 4)), torch.randint(0, 2, (8,))).backward()
            optimizer.step()
            log(writer, step, observer, optimizer)
            first = [varreg.moments(p) for p in model[0].parameters()]
            expected["rho/0"].append(float(sum(m.variance.sum() for m in first) / sum(m.mean.square().sum() for m in first)))
            expected["noise_scale"].append(observer.summary().model.noise_scale)
            weights = [p.grad.square() for p in model.parameters()]
            lams = [optimizer.lambda_of(p) for p in model.parameters()]
            expected["lambda/effective"].append(
                float(sum((w * lam).sum() for w, lam in zip(weights, lams, strict=True)) / sum(w.sum() for w in weights))
            )
            expected["lambda/2.weight/mean"].append(float(optimizer.lambda_of(model[2].weight).mean()))
    events = EventAccumulator(str(tmp_path)).Reload()
    for tag, values in expected.items():
        found = events.Scalars(tag)
        assert [e.step for e in found] == [0, 1, 2]
        assert [e.value for e in found] == pytest.approx(values, rel=1e-6)


def test_bad_arguments():
    with pytest.raises(ValueError, match="needs an observer, a regularized optimizer, or both"):
        log(None, 0)
    with pytest.raises(ValueError, match="SGD has no λ to log"):
        log(None, 0, optimizer=torch.optim.SGD([torch.zeros(1)], lr=0.1))
