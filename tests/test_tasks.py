"""The tasks: their data, and one step of each."""

from __future__ import annotations

import sys

import pytest
import torch

from varreg.lab import Split, Splits, Task
from varreg.lab.names import parse
from varreg.lab.run import Config, Run
from varreg.lab.tasks import TASKS, check, fingerprint, hold_out, load, task

IMAGES = {"fashion-mnist": (1, 28, 28), "cifar10-lenet": (3, 32, 32), "cifar10-resnet": (3, 32, 32)}


@pytest.fixture(autouse=True)
def _single_precision():
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("optimizer", ["SGD", "VRSGD"])
def test_a_step_of_each(name, optimizer):
    made, small = task(name), None
    if name in IMAGES:  # in place of the data, which may not be there
        small = Splits(*(Split(torch.randn(40, *IMAGES[name]), torch.randint(0, 10, (40,))) for _ in range(3)))
    going = Run(Config(name, optimizer, 0.01, 0, 1, 16), small)
    for _ in range(2):
        going.advance()
    assert len(going.losses) == 2
    assert all(map(torch.isfinite, map(torch.tensor, going.losses)))
    assert made.about


def test_the_text_is_split_without_overlap():
    splits = load("char-gpt", None)
    assert [len(s) > 500 for s in splits] == [True, True, True]
    assert torch.equal(splits.train.x[:, 1:], splits.train.y[:, :-1])  # the next character
    assert int(splits.train.x.max()) < 128


@pytest.mark.parametrize("spread", [0.0, 0.7])
def test_the_noise_of_the_stream(spread):
    """Its mean square does not depend on the knob; how much it changes from batch to batch does."""
    made = task(f"stream:spread={spread},noise=0.5,dimension=4")
    truth = torch.linalg.lstsq(made.load(None).test.x, made.load(None).test.y).solution
    squares = torch.stack([(b.y - b.x @ truth).square().mean() for b in (made.stream(0, step, 256) for step in range(3000))])
    assert float(squares.mean()) == pytest.approx(0.25, rel=0.12)
    assert float(squares.log().std()) == pytest.approx(max(2 * spread, (2 / 256) ** 0.5), rel=0.1)
    again = made.stream(0, 5, 256)
    assert torch.equal(again.x, made.stream(0, 5, 256).x)
    assert not torch.equal(again.x, made.stream(1, 5, 256).x)


def test_svrg_has_no_full_gradient_on_a_stream():
    with pytest.raises(ValueError, match="stream without end"):
        Run(Config("stream", "SVRG", 0.1))


OWN = """
import torch
from varreg.lab import Split, Splits, Task

def tiny(width=3):
    x = torch.randn(60, 4)
    split = Split(x, (x.sum(1) > 0).long())
    return Task("a tiny task", lambda data_dir: Splits(split, split, split), lambda: torch.nn.Linear(4, 2), 10, 2)

def wrong():
    return 3
"""


def test_a_task_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "own_tasks.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    assert isinstance(task("own_tasks:tiny"), Task)
    assert task("own_tasks:tiny,width=5").batch == 10
    with pytest.raises(ValueError, match=r"must return a varreg.lab.Task, and returned int"):
        task("own_tasks:wrong")
    with pytest.raises(ValueError, match="module 'own_tasks' has no function 'absent'"):
        task("own_tasks:absent")
    with pytest.raises(ValueError, match=r"It takes width=3"):
        task("own_tasks:tiny,depth=5")
    sys.modules.pop("own_tasks")


def test_unknown_names_and_options():
    with pytest.raises(ValueError, match=r"there is no task 'cifar10'; there are: .* Did you mean 'cifar10-lenet'\?"):
        task("cifar10")
    with pytest.raises(ValueError, match=r"task 'stream:spred=1': .*It takes spread"):
        task("stream:spred=1")
    with pytest.raises(ValueError, match="cannot be imported"):
        task("no_such_module_at_all:function")
    with pytest.raises(ValueError, match="where option=value is expected"):
        parse("VRSGD:momentum")
    with pytest.raises(ValueError, match="gives s twice"):
        parse("VRSGD:s=1,s=2")
    with pytest.raises(ValueError, match="spread ≥ 0"):
        task("stream:spread=-1")


SPLIT = Split(torch.randn(20, 4), torch.randint(0, 2, (20,)))
NAN = Split(torch.full((20, 4), float("nan")), SPLIT.y)
EMPTY = Split(SPLIT.x[:0], SPLIT.y[:0])
LINEAR = lambda: torch.nn.Linear(4, 2)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (
            Task("", lambda _: [SPLIT, SPLIT], LINEAR, 10, 1),
            r"must load varreg.lab.Splits\(train, valid, test\), and loaded list",
        ),
        (
            Task("", lambda _: Splits([1], SPLIT, SPLIT), LINEAR, 10, 1),
            r"train split of task own must be varreg.lab.Split\(x, y\)",
        ),
        (
            Task("", lambda _: Splits(SPLIT, Split(SPLIT.x[:3], SPLIT.y), SPLIT), LINEAR, 10, 1),
            "valid split .* one of each is needed",
        ),
        (Task("", lambda _: Splits(SPLIT, NAN, SPLIT), LINEAR, 10, 1), "valid split of task own has inputs that are not finite"),
        (Task("", lambda _: Splits(SPLIT, SPLIT, EMPTY), LINEAR, 10, 1), "test split of task own is empty"),
        (Task("", lambda _: Splits(SPLIT, SPLIT, SPLIT), torch.nn.ReLU, 10, 1), "cannot be used on its data|has no parameters"),
        (Task("", lambda _: Splits(SPLIT, SPLIT, SPLIT), lambda: torch.nn.Linear(5, 2), 10, 1), "cannot be used on its data"),
        (
            Task("", lambda _: Splits(SPLIT, SPLIT, SPLIT), LINEAR, 10, 1, torch.nn.CrossEntropyLoss(reduction="none")),
            "its model and loss cannot be used on its data|must be a single number",
        ),
        (
            Task("", lambda _: Splits(SPLIT, SPLIT, SPLIT), LINEAR, 10, 1, torch.nn.CrossEntropyLoss(reduction="sum")),
            "not a mean over samples",
        ),
    ],
)
def test_a_task_that_cannot_be_trained_is_found_out_before(made, words, monkeypatch):
    monkeypatch.setattr("varreg.lab.tasks.task", lambda spec: made)
    load.cache_clear()
    with pytest.raises(ValueError, match=words):
        check("own", None, 10)
    load.cache_clear()


def test_the_fingerprint_tells_data_and_models_apart():
    model = torch.nn.Linear(4, 2)
    first = fingerprint("own", Splits(SPLIT, SPLIT, SPLIT), model)
    assert first == fingerprint("own", Splits(SPLIT, SPLIT, SPLIT), torch.nn.Linear(4, 2))
    other = Split(SPLIT.x + 1, SPLIT.y)
    assert first != fingerprint("own", Splits(other, SPLIT, SPLIT), model)
    assert first != fingerprint("own", Splits(SPLIT, SPLIT, SPLIT), torch.nn.Linear(4, 3))


def test_held_out():
    split = Split(torch.arange(10.0), torch.arange(10))
    made = hold_out(split, split, 3)
    assert sorted(made.train.y.tolist() + made.valid.y.tolist()) == list(range(10))
    assert len(hold_out(split, split, 0).train) == 10
    with pytest.raises(ValueError, match="cannot be held out"):
        hold_out(split, split, 10)
