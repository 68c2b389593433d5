"""The lab and `varreg bench` check moments before they train."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.support.model_table import Fn
from tests.support.verified import net, pairs


def lab_task(model, loss):
    from varreg.lab import tasks

    def load(data_dir):
        parts = [tasks.Split(*pairs()) for _ in range(3)]
        return tasks.Splits(*parts)

    return tasks.Task("tiny", load, model, 8, 1, loss)


def shifted():
    """What a batch's inputs have in common goes in without a gradient."""
    return Fn(lambda s, x: s.net(x + float(np.max(x.numpy()))), net=net())


def noisy():
    return Fn(lambda s, x: s.net(x + torch.randn_like(x)), net=net())


@pytest.mark.parametrize(
    ("model", "optimizer", "outcome"),
    [
        (net, "VRSGD", "begins"),
        (shifted, "VRSGD", "stops"),
        (shifted, "SGD", "begins"),
        (noisy, "VRAdam", "notes"),
    ],
)
def test_the_lab_verifies_before_it_trains(
    model, optimizer, outcome, monkeypatch, tmp_path, capsys
):
    from varreg.lab import tasks
    from varreg.lab.experiments.compare.plan import Comparison
    from varreg.lab.experiments.execution import begin
    from varreg.lab.tasks import lookup

    lookup.task.cache_clear()
    lookup.load.cache_clear()
    monkeypatch.setitem(tasks.TASKS, "tiny", lambda: lab_task(model, F.cross_entropy))
    made = Comparison("tiny", (optimizer, "Adam"), trials=2, s=(2.0,))
    if outcome == "stops":
        with pytest.raises(
            ValueError, match=f"varreg: {optimizer} cannot be used for task tiny"
        ) as raised:
            begin(made, tmp_path, None, ["varreg"])
        assert "Samples meet in the model" in str(raised.value) or "varreg: in " in str(
            raised.value
        )
        assert not (tmp_path / "experiment.json").exists()
    else:
        begin(made, tmp_path, None, ["varreg"])
        assert (tmp_path / "experiment.json").exists()
    assert (
        "varreg: note: the moments of task tiny cannot be verified." in capsys.readouterr().err
    ) == (outcome == "notes")
    lookup.task.cache_clear()
    lookup.load.cache_clear()


def test_bench_says_why():
    from varreg.lab.bench.single_samples import check_moments
    from varreg.lab.bench.workloads import Workload

    check_moments(Workload("tiny", net, pairs), ["exact", "groups=4"])
    with pytest.raises((RuntimeError, ValueError), match="varreg: ") as raised:
        check_moments(Workload("tiny", shifted, pairs), ["exact"])
    assert "Samples meet in the model" in str(raised.value) or "varreg: in " in str(raised.value)
