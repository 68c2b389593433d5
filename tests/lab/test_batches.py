"""Tasks whose samples come from a Dataset or a DataLoader, with augmentation of its own."""

from __future__ import annotations

import contextlib
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

from tests.lab.test_runs import assert_same
from varreg.errors import VarregError
from varreg.lab import Split, Splits, Task
from varreg.lab.runs.config import Config
from varreg.lab.runs.resume import StoppedError, run
from varreg.lab.runs.run import Run
from varreg.lab.tasks import check_task, lookup
from varreg.lab.tasks.batches import DataSplit


@pytest.fixture(autouse=True)
def _single_precision():
    torch.set_default_dtype(torch.float32)


class Images(Dataset):
    """Small images, changed by the random numbers of torch, NumPy and Python."""

    def __init__(self, n: int, augments: bool):
        generator = torch.Generator().manual_seed(n)
        self.x = torch.randn(n, 1, 6, 6, generator=generator)
        self.y = (self.x.mean((1, 2, 3)) > 0).long()
        self.augments = augments

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        x = self.x[i]
        if self.augments:
            x = x.flip(-1) if random.random() < 0.5 else x
            x = x + 0.1 * torch.randn(x.shape) + 0.1 * float(np.random.rand())  # noqa: NPY002
        return x, self.y[i]


def pairs(samples):
    """A collate function of one's own."""
    return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])


def model():
    layers = (nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))
    return nn.Sequential(*layers)


def task_of(train) -> Task:
    splits = Splits(train, Images(40, False), DataLoader(Images(40, False), 16))
    return Task("images", lambda _: splits, model, batch=16, epochs=2)


TRAIN = {
    "dataset": lambda: Images(96, True),
    "loader": lambda: DataLoader(Images(96, True), 16, shuffle=True, collate_fn=pairs),
    "workers": lambda: DataLoader(Images(96, True), 16, shuffle=True, num_workers=2),
}


@pytest.fixture
def named(monkeypatch):
    """Gives a task a name."""

    def name(made: Task, spec: str = "mine") -> str:
        monkeypatch.setitem(lookup.TASKS, spec, lambda: made)
        lookup.task.cache_clear()
        lookup.load.cache_clear()
        return spec

    yield name
    lookup.task.cache_clear()
    lookup.load.cache_clear()


@pytest.mark.parametrize("optimizer", ["SGD", "VRSGD", "SVRG"])
@pytest.mark.parametrize("kind", TRAIN)
def test_a_run_goes_on_to_the_bit(kind, optimizer, named, tmp_path):
    """With augmentation and dropout, however often it is stopped."""
    named(task_of(TRAIN[kind]()))
    config = Config("mine", optimizer, 0.1, epochs=2, batch=16)
    run(config, tmp_path / "whole")
    for steps in (3, 4, 10**9):
        left = iter(range(steps))
        with contextlib.suppress(StoppedError):
            run(
                config,
                tmp_path / "broken",
                stop=lambda left=left, last=steps - 1: next(left) == last,
            )
    assert_same(tmp_path / "whole", tmp_path / "broken")


def test_all_ways_have_the_same_batches(named):
    """A Dataset, a DataLoader and one with processes: the lab draws, and they give."""
    seen = []
    for kind, make in TRAIN.items():
        running = Run(Config(named(task_of(make()), kind), "SGD", 0.1, epochs=2, batch=16))
        state, found = torch.get_rng_state(), []
        for step in (0, 1, 2, 9, 2):
            running.step = step
            found.append(running.batch())
        assert torch.equal(torch.get_rng_state(), state)  # nothing is drawn from a run's own
        assert torch.equal(found[2].x, found[4].x)
        seen.append(found)
    for a, b, c in zip(*seen, strict=True):
        assert torch.equal(a.x, b.x)
        assert torch.equal(a.x, c.x)
        assert torch.equal(a.y, c.y)
    first, second = seen[0][:2]
    assert not torch.equal(first.x, second.x)


def test_samples_are_those_of_tensors(named):
    """Without augmentation, a run of a Dataset is the run of its tensors, to the bit."""
    data = Images(96, False)
    ends = []
    for kind, train in (("a", Split(data.x, data.y)), ("b", data)):
        running = Run(Config(named(task_of(train), kind), "VRSGD", 0.1, epochs=1, batch=16))
        while not running.is_done:
            running.advance()
        ends.append((running.losses, running.evaluations["train_loss"]))
    assert ends[0] == ends[1]


def test_checks_and_fingerprint(named):
    prints = {check_task.check(named(task_of(TRAIN["dataset"]())), None, 16) for _ in range(2)}
    assert len(prints) == 1
    assert check_task.check(named(task_of(Images(80, True))), None, 16) not in prints


class Endless(IterableDataset):
    def __iter__(self):
        yield torch.zeros(1)


class Named(Images):
    def __getitem__(self, i):
        return {"x": self.x[i], "y": self.y[i]}


WRONG = [
    (lambda: Endless(), "a Dataset without a length.*Task\\(stream="),
    (
        lambda: DataLoader(Images(96, True), 16, sampler=WeightedRandomSampler([1.0] * 96, 96)),
        "a sampler of its own \\(WeightedRandomSampler\\)",
    ),
    (lambda: DataLoader(Images(96, True), 8), "batch_size 8, and the task has batch=16"),
    (lambda: Named(96, True), "must give \\(inputs, targets\\).*got dict"),
    (lambda: [1, 2], "a Dataset or a DataLoader; got list"),
]


@pytest.mark.parametrize(("train", "said"), WRONG)
def test_what_cannot_be_used_is_an_error(train, said, named):
    with pytest.raises(VarregError, match=said):
        check_task.check(named(task_of(train())), None, 16)


def test_fewer_than_were_asked_for(named):
    """A collate function that leaves samples out is found out."""
    short = DataLoader(Images(96, True), 16, collate_fn=lambda samples: pairs(samples[1:]))
    with pytest.raises(VarregError, match="16 samples are collated to inputs of shape"):
        DataSplit(short, "the split").rows(0, 16)
