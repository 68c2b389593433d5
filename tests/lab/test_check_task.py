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


@pytest.fixture
def fresh_tasks():
    """Forget the tasks that were looked up, before and after a test."""
    from varreg.lab.tasks import lookup

    for cached in (lookup.task, lookup.load):
        cached.cache_clear()
    yield
    for cached in (lookup.task, lookup.load):
        cached.cache_clear()


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
    model, optimizer, outcome, monkeypatch, tmp_path, capsys, fresh_tasks
):
    from varreg.lab import tasks
    from varreg.lab.experiments.compare.plan import Comparison
    from varreg.lab.experiments.execution import begin

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


@pytest.mark.parametrize("has_notes", [False, True])
def test_what_is_refused_leaves_no_folder_but_one_that_was_there(
    has_notes, monkeypatch, tmp_path, fresh_tasks
):
    from varreg.lab import tasks
    from varreg.lab.experiments.compare.plan import Comparison
    from varreg.lab.experiments.execution import carry_out

    monkeypatch.setitem(tasks.TASKS, "tiny", lambda: lab_task(shifted, F.cross_entropy))
    folder = tmp_path / "out"
    if has_notes:
        folder.mkdir()
        (folder / "notes.txt").write_text("mine")
    made = Comparison("tiny", ("VRSGD", "Adam"), trials=2, s=(2.0,))
    with pytest.raises(ValueError, match="VRSGD cannot be used for task tiny"):
        carry_out(made, folder, 1, None, None, ["varreg"])
    assert folder.exists() == has_notes
    assert not has_notes or (folder / "notes.txt").read_text() == "mine"


def test_bench_says_why():
    from varreg.lab.bench.single_samples import check_moments
    from varreg.lab.bench.workloads import Workload

    check_moments(Workload("tiny", net, pairs), ["exact", "groups=4"])
    with pytest.raises((RuntimeError, ValueError), match="varreg: ") as raised:
        check_moments(Workload("tiny", shifted, pairs), ["exact"])
    assert "Samples meet in the model" in str(raised.value) or "varreg: in " in str(raised.value)
