"""Comparisons with schedules that are tuned, that grow, and from Python."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

import varreg.lab
from tests.support.own_task import spirals
from varreg.lab import store
from varreg.lab.api import spec_of
from varreg.lab.experiments.compare.learning_rates import grid
from varreg.lab.experiments.compare.plan import Comparison
from varreg.lab.experiments.execution import carry_out
from varreg.lab.experiments.kinds import restore
from varreg.lab.experiments.record import read_record
from varreg.lab.report.builder import build


@pytest.fixture(autouse=True)
def _single_precision():
    torch.set_default_dtype(torch.float32)


class Silent:
    """Whoever is told of runs, and keeps their names."""

    def __init__(self):
        self.done: list[str] = []

    def planned(self, configs, done): ...
    def progress(self, name, step, total, loss): ...
    def warned(self, name, text): ...

    def ended(self, config, result):
        self.done.append(config.name)


SMALL = Comparison(
    "logistic", ("SGD", "Adam"), trials=3, tuning_seeds=1, seeds=2, epochs=1, batch=128
)


def test_schedules_share_the_trials():
    made = dataclasses.replace(SMALL, trials=7, schedules=("constant", "cosine"))
    points = grid(made, "SGD")
    assert len(points) == 7
    assert [options["schedule"] for _, options in points] == ["constant"] * 4 + ["cosine"] * 3
    fixed = grid(made, "SGD:schedule=linear")
    assert {options["schedule"] for _, options in fixed} == {"linear"}
    assert len(fixed) == 7
    both = grid(dataclasses.replace(made, optimizers=("SGD", "VRSGD"), s=(0.5, 2.0)), "VRSGD")
    assert len({(o["schedule"], o["s"]) for _, o in both}) == 4


def test_a_recipe_is_that_of_all_but_those_that_say_otherwise():
    made = dataclasses.replace(
        SMALL, optimizers=("SGD", "SGD:clip=2"), recipe={"clip": 1.0, "weight_decay": 0.1}
    )
    assert all(o == {"clip": 1.0, "weight_decay": 0.1} for _, o in grid(made, "SGD"))
    assert all(o == {"clip": 2, "weight_decay": 0.1} for _, o in grid(made, "SGD:clip=2"))
    with pytest.raises(ValueError, match="'weight_decay'"):
        dataclasses.replace(made, optimizers=("SGD", "DoG"))
    with pytest.raises(ValueError, match="Did you mean 'cosine'"):
        dataclasses.replace(made, schedules=("cosin",))


def test_what_is_saved_is_what_earlier_versions_saved_where_nothing_is_new():
    saved = SMALL.arguments()
    assert not {"recipe", "schedules", "tried"} & set(saved)
    assert Comparison.of(json.loads(json.dumps(saved))).arguments() == saved
    grown = dataclasses.replace(SMALL, recipe={"clip": 1.0}, schedules=("linear",), tried=(2,))
    again = Comparison.of(json.loads(json.dumps(grown.arguments())))
    assert grid(again, "SGD") == grid(grown, "SGD")


@pytest.mark.parametrize(
    "bad",
    [
        {"recipe": {"clip": [[1]]}},
        {"recipe": {"schedule": "no"}},
        {"tried": [-1]},
        {"tried": ["a"]},
    ],
)
def test_a_file_with_a_bad_recipe_is_refused(bad):
    with pytest.raises(ValueError, match="varreg"):
        Comparison.of({**json.loads(json.dumps(SMALL.arguments())), **bad})


def test_more_seeds_and_trials_extend_what_is_there(tmp_path):
    first, second, third = Silent(), Silent(), Silent()
    carry_out(SMALL, tmp_path, 2, None, first, ["varreg"])
    written = {p: p.stat().st_mtime_ns for p in tmp_path.glob("runs/*/result.json")}
    results = carry_out(
        dataclasses.replace(SMALL, seeds=3, trials=4), tmp_path, 2, None, second, ["varreg"]
    )
    assert len(written) == 2 * 3 + 2 * 2
    assert all(p.stat().st_mtime_ns == then for p, then in written.items())  # none is run again
    assert len(list(tmp_path.glob("runs/*/result.json"))) > len(written)
    record = read_record(tmp_path / "experiment.json")
    assert record["arguments"]["tried"] == [3]
    kept = restore(tmp_path, record)
    assert len(grid(kept, "SGD")) == 3 + 2  # 3 and 4 share both ends
    assert {config.name for config in kept.plan(results)} <= set(results)
    found = build(tmp_path)[1]
    assert found["complete"]
    assert all(len(arm["seeds"]) == 3 for arm in found["arms"])
    carry_out(dataclasses.replace(SMALL, seeds=3, trials=4), tmp_path, 2, None, third, ["varreg"])
    assert not third.done
    with pytest.raises(ValueError, match=r"another experiment in it .*seeds: 3 there, 2 asked for"):
        carry_out(SMALL, tmp_path, 2, None, Silent(), ["varreg"])


def test_from_python(tmp_path):
    came = varreg.lab.compare(
        ["SGD", "SGD:momentum=0.9"],
        spirals,
        out=tmp_path,
        trials=2,
        tuning_seeds=1,
        seeds=2,
        epochs=1,
        recipe={"schedule": "cosine"},
        jobs=2,
        progress=False,
    )
    assert [arm["name"] for arm in came.arms] == ["SGD", "SGD:momentum=0.9"]
    assert all(arm["options"]["schedule"] == "cosine" for arm in came.arms)
    assert str(came.page) in str(came)
    saved = store.read_json(tmp_path / "results.json")
    assert saved["arms"] == store.as_saved(came.arms)
    try:
        import pandas  # noqa: F401
    except ImportError:
        with pytest.raises(ValueError, match="pip install pandas"):
            came.to_pandas()
    else:
        assert len(came.to_pandas()) == 4
        assert set(came.to_pandas("curves")["seed"]) == {1000, 1001}
        with pytest.raises(ValueError, match="expects 'runs', 'curves' or 'trials'"):
            came.to_pandas("rows")


def test_a_task_must_be_one_that_other_processes_find():
    assert spec_of(spirals) == f"{Path(spirals.__code__.co_filename).resolve()}:spirals"
    with pytest.raises(ValueError, match="at the top of a file"):
        spec_of(lambda: None)
