"""The tasks: their data, and one step of each."""

from __future__ import annotations

import sys

import pytest
import torch

from varreg.errors import VarregError
from varreg.lab import Split, Splits, Task
from varreg.lab.runs.config import Config
from varreg.lab.runs.run import Run
from varreg.lab.specs import parse
from varreg.lab.tasks import TASKS
from varreg.lab.tasks.check_task import check, fingerprint
from varreg.lab.tasks.lookup import load, task
from varreg.lab.tasks.preparation import hold_out

IMAGES = {
    "fashion-mnist": (1, 28, 28),
    "fashion-mlp": (1, 14, 14),
    "cifar10-lenet": (3, 32, 32),
    "cifar10-resnet": (3, 32, 32),
}


@pytest.fixture(autouse=True)
def _single_precision():
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("optimizer", ["SGD", "VRSGD"])
def test_a_step_of_each(name, optimizer, monkeypatch, request):
    if name in ("uneven-labels", "uneven-classes"):  # they keep what they have loaded
        images_of(10, monkeypatch)
        for kept in (task, load):
            kept.cache_clear()
            request.addfinalizer(kept.cache_clear)
    made, small = task(name), None
    if name in IMAGES:  # in place of the data, which may not be there
        small = Splits(
            *(Split(torch.randn(40, *IMAGES[name]), torch.randint(0, 10, (40,))) for _ in range(3))
        )
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
    squares = torch.stack(
        [
            (b.y - b.x @ truth).square().mean()
            for b in (made.stream(0, step, 256) for step in range(3000))
        ]
    )
    assert float(squares.mean()) == pytest.approx(0.25, rel=0.12)
    assert float(squares.log().std()) == pytest.approx(max(2 * spread, (2 / 256) ** 0.5), rel=0.1)
    again = made.stream(0, 5, 256)
    assert torch.equal(again.x, made.stream(0, 5, 256).x)
    assert not torch.equal(again.x, made.stream(1, 5, 256).x)


def test_images_of_another_norm(monkeypatch):
    from varreg.lab.tasks import datasets

    pixels = torch.randint(1, 255, (60, 3, 32, 32), dtype=torch.uint8)
    images = datasets.Images(pixels, torch.arange(60) % 10)
    monkeypatch.setattr(datasets, "cifar10", lambda data_dir: (images, images))
    for name, norm in (("cifar10-lenet:valid=10", 1.0), ("cifar10-lenet:valid=10,scale=55", 55.0)):
        for split in task(name).load(None):
            norms = split.x.flatten(1).norm(dim=1)
            assert torch.allclose(norms, torch.full_like(norms, norm))
    with pytest.raises(VarregError, match="scale must be above 0; got 0"):
        task("cifar10-lenet:scale=0")


def test_svrg_has_no_full_gradient_on_a_stream():
    with pytest.raises(ValueError, match="stream without end"):
        Run(Config("stream", "SVRG", 0.1))


OWN = """
import torch
from varreg.errors import VarregError
from varreg.lab import Split, Splits, Task

def tiny(width=3):
    x = torch.randn(60, 4)
    split = Split(x, (x.sum(1) > 0).long())
    splits = Splits(split, split, split)
    return Task("a tiny task", lambda data_dir: splits, lambda: torch.nn.Linear(4, 2), 10, 2)

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
    with pytest.raises(
        ValueError,
        match=r"there is no task 'cifar10'; there are: .* Did you mean 'cifar10-lenet'\?",
    ):
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
            "valid split .* each sample needs one input and one target",
        ),
        (
            Task("", lambda _: Splits(SPLIT, NAN, SPLIT), LINEAR, 10, 1),
            "valid split of task own has inputs that are not finite",
        ),
        (
            Task("", lambda _: Splits(SPLIT, SPLIT, EMPTY), LINEAR, 10, 1),
            "test split of task own is empty",
        ),
        (
            Task("", lambda _: Splits(SPLIT, SPLIT, SPLIT), torch.nn.ReLU, 10, 1),
            "cannot be used on its data|has no parameters",
        ),
        (
            Task("", lambda _: Splits(SPLIT, SPLIT, SPLIT), lambda: torch.nn.Linear(5, 2), 10, 1),
            "cannot be used on its data",
        ),
        (
            Task(
                "",
                lambda _: Splits(SPLIT, SPLIT, SPLIT),
                LINEAR,
                10,
                1,
                torch.nn.CrossEntropyLoss(reduction="none"),
            ),
            "its model and loss cannot be used on its data|must be a single number",
        ),
        (
            Task(
                "",
                lambda _: Splits(SPLIT, SPLIT, SPLIT),
                LINEAR,
                10,
                1,
                torch.nn.CrossEntropyLoss(reduction="sum"),
            ),
            "not a mean over samples",
        ),
    ],
)
def test_a_task_that_cannot_be_trained_is_found_out_before(made, words, monkeypatch):
    monkeypatch.setattr("varreg.lab.tasks.lookup.task", lambda spec: made)
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


def test_batches_of_one_source_and_of_several():
    """A batch of text is of prose or of code, and mixed of both."""
    from varreg.lab.tasks import uneven

    prose, code = uneven.read_texts()
    assert len(prose) == len(code) > 100_000
    windows = [
        {text[i : i + 17] for i in range(0, len(text) - 17, 16)}
        for text in (prose.encode(errors="replace"), code.encode(errors="replace"))
    ]
    assert windows[0] != windows[1]
    made = uneven.uneven_text()
    splits = made.load(None)
    assert len(splits.train) > len(splits.valid) > 100

    def sources(task, steps=12):
        """For each batch, the parts of its windows that are in either text."""
        texts = ["".join(chr(min(ord(c), 127)) for c in text) for text in (prose, code)]
        found = []
        for step in range(steps):
            x, _ = task.stream(0, step, 8)
            rows = ["".join(map(chr, row)) for row in x.tolist()]
            found.append([sum(row in text for row in rows) / 8 for text in texts])
        return found

    assert all(max(parts) == 1 for parts in sources(made))
    assert {parts.index(max(parts)) for parts in sources(made)} == {0, 1}
    mixed = uneven.uneven_text(mixed=True)
    mixed.load(None)
    assert any(max(parts) < 1 for parts in sources(mixed))
    assert torch.equal(made.stream(3, 5, 8).x, made.stream(3, 5, 8).x)
    assert not torch.equal(made.stream(3, 5, 8).x, made.stream(4, 5, 8).x)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("uneven-labels:sources=0", "sources ≥ 1"),
        ("uneven-classes:mixed=2", "mixed must be True or False"),
    ],
)
def test_uneven_tasks_that_cannot_be(spec, expected):
    with pytest.raises(VarregError, match=expected):
        task(spec)


def images_of(classes, monkeypatch):
    """Fashion-MNIST in the small: a pixel says which class an image is of."""
    from varreg.lab.tasks import datasets, uneven

    labels = torch.arange(400) % classes
    pixels = torch.zeros(400, 1, 28, 28, dtype=torch.uint8)
    pixels[torch.arange(400), 0, 2 * labels, 0] = 255
    images = datasets.Images(pixels, labels)
    monkeypatch.setattr(datasets, "fashion_mnist", lambda data_dir: (images, images))
    monkeypatch.setattr(uneven, "VALID", 100)
    return uneven


def test_label_noise_is_that_of_the_batchs_source(monkeypatch):
    uneven = images_of(10, monkeypatch)
    made = uneven.uneven_labels()
    made.load(None)
    wrong = []
    for step in range(60):
        x, y = made.stream(0, step, 400)
        truth = x.sum((1, 3)).argmax(1)
        wrong.append(float((truth != y).double().mean()))
    # of source k, k/10 are replaced, of which a tenth by what they were
    rates = torch.tensor([0.09 * k for k in range(10)])
    nearest = (torch.tensor(wrong)[:, None] - rates).abs().min(1)
    assert nearest.values.max() < 0.09
    assert len(set(nearest.indices.tolist())) >= 8
    mixed = uneven.uneven_labels(mixed=True)
    mixed.load(None)
    x, y = mixed.stream(0, 0, 4000)
    assert float((x.sum((1, 3)).argmax(1) != y).double().mean()) == pytest.approx(0.405, abs=0.05)


def test_batches_are_of_easy_or_of_hard_classes(monkeypatch):
    uneven = images_of(10, monkeypatch)
    made = uneven.uneven_classes()
    made.load(None)
    batches = [set(made.stream(0, step, 64).y.tolist()) for step in range(20)]
    hard = set(uneven.HARD)
    assert all(batch <= hard or batch.isdisjoint(hard) for batch in batches)
    assert {batch <= hard for batch in batches} == {True, False}
    mixed = uneven.uneven_classes(mixed=True)
    assert len(set(mixed.stream(0, 0, 200).y.tolist())) == 10
