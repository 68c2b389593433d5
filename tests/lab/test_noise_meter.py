"""`varreg noise`: what it prints and saves, for a task of the lab and for one's own."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

import varreg
from varreg.cli import app
from varreg.lab.noise_meter import Measurement, measure


@pytest.fixture(autouse=True)
def _single():
    import torch

    torch.set_default_dtype(torch.float32)


def call(*arguments):
    return CliRunner().invoke(app, ["noise", *map(str, arguments)])


def test_what_it_prints_and_saves(tmp_path):
    done = call("--task", "logistic", "--steps", 30, "--plan", "16,64,256", "-o", tmp_path)
    assert done.exit_code == 0, done.output
    assert "whole model" in done.output
    assert "To the same loss, relative to a batch of 64" in done.output
    saved = json.loads((tmp_path / "noise.json").read_text())
    assert [row["batch"] for row in saved["plan"]["rows"]] == [16, 64, 256]
    assert saved["plan"]["rows"][1]["steps"] == 1
    assert saved["plan"]["now"] == saved["config"]["batch"] == 64
    assert saved["readings"].keys() == {"1", "whole model"}
    assert saved["curve"]["step"] == list(range(1, 31))
    assert saved["environment"]["varreg"] == varreg.__version__
    for name in ("noise", "plan"):
        assert (tmp_path / f"{name}.svg").read_text().startswith("<?xml")


def test_a_task_of_ones_own_and_the_l1_version(tmp_path):
    done = call("-t", "tests.support.own_task:spirals", "--steps", 4, "--l1", "-o", tmp_path)
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "noise.json").read_text())["measurement"]["l1"]


def test_the_same_numbers_as_by_hand():
    """A regularized optimizer has its observer already, and is measured all the same."""
    values = []
    for optimizer in ("SGD", "VRSGD:s=0.0"):
        noise, curve = measure(Measurement("logistic", optimizer, 0.1, 6, 32), None)
        assert noise.updates == 6
        assert curve["value"][-1] == noise.value
        values.append((noise.value, noise.interval, noise.batch))
    assert values[0] == values[1]


def test_a_wrong_plan_is_an_error_before_the_training(tmp_path, monkeypatch):
    monkeypatch.setattr("varreg.lab.noise_meter.measure", lambda *_: pytest.fail("it trained"))
    done = call("--task", "logistic", "--plan", "32,-1", "-o", tmp_path)
    assert "--plan must be whole numbers from 1 up" in str(done.exception)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--plan", "many"), "--plan must be whole numbers, as in 32,128; got 'many'"),
        (("--plan", "32,0"), "--plan must be whole numbers from 1 up, as in 32,128; got 32, 0."),
        (("--optimizer", "SDG"), "no optimizer 'SDG'"),
        (("-t", "digit"), "no task 'digit'"),
        (("--lr", 3e38, "--steps", 8), "Use a smaller --lr"),
        (("--lr", -1), "SGD does not take lr=-1.0: Invalid learning rate"),
    ],
)
def test_bad_input(arguments, said, tmp_path):
    done = call("--task", "logistic", "-o", tmp_path, *arguments)
    assert isinstance(done.exception, varreg.VarregError)
    assert said in str(done.exception)


@pytest.mark.parametrize("arguments", [("--plan", "0"), ("--optimizer", "SDG"), ("-t", "digit")])
def test_words_that_mean_nothing_leave_no_folder(arguments, tmp_path):
    call("--task", "logistic", "-o", tmp_path / "out", *arguments)
    assert not (tmp_path / "out").exists()
