"""How runs train: schedules, clipping, augmentation, AdaScale, and optimizers that are imported."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

import varreg
from tests.device.test_devices import run as run_on_pretend_device
from tests.lab.test_runs import assert_same
from tests.support import pretend_device
from varreg.lab import optimizers, recipe
from varreg.lab.experiments.compare.plan import Comparison
from varreg.lab.recipe import Recipe
from varreg.lab.runs.config import Config
from varreg.lab.runs.resume import StoppedError, run
from varreg.lab.runs.run import Run
from varreg.lab.tasks.augmentation import AUGMENTATIONS, crop, flip, generator_of
from varreg.lab.tasks.lookup import task
from varreg.lab.variances import Recorded, record

OWN = """
import torch


class Signed(torch.optim.Optimizer):
    '''Steps by signs; takes no parameters with names.'''

    def __init__(self, params, lr, weight_decay=0.0):
        params = list(params)
        assert all(isinstance(p, torch.Tensor) for p in params)
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure() if closure else None
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(p.grad.sign(), alpha=group["lr"])
        return loss


def not_one(params, lr):
    return "no optimizer"
"""


OWN_TASKS = """
import dataclasses
from torch import nn


def normed():
    def model():
        return nn.Sequential(
            nn.Linear(2, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2)
        )
    return dataclasses.replace(spirals(), model=model)


def with_recipe():
    return dataclasses.replace(spirals(), recipe={"schedule": "cosine", "clip": 0.5})
"""


@pytest.fixture
def own_tasks(tmp_path):
    """A file with a model with BatchNorm, and a task with a recipe."""
    path = tmp_path / "own_tasks.py"
    path.write_text(Path("tests/support/own_task.py").read_text() + OWN_TASKS)
    return str(path)


@pytest.fixture(autouse=True)
def _single_precision():
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own_optimizer.py"
    path.write_text(OWN)
    return str(path)


def options_of(name: str, **options):
    return Config("logistic", name, 0.05, epochs=2, batch=128, options=options)


# ---- schedules


@pytest.mark.parametrize("warmup", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_learning_rate_follows_its_schedule(schedule, warmup):
    total, made = 40, Recipe(schedule, warmup)
    factors = [made.factor(t, total) for t in range(total)]
    risen = int(warmup * total)
    for t, factor in enumerate(factors):
        part = (t - risen) / (total - risen)
        after = {
            "constant": 1.0,
            "linear": 1 - part,
            "cosine": 0.5 + 0.5 * math.cos(math.pi * part),
        }
        expected = (t + 1) / risen if t < risen else after[schedule]
        assert factor == pytest.approx(expected, abs=1e-12)
    assert max(factors) == pytest.approx(1.0)


@pytest.mark.parametrize("clip", [0.0, 0.05])
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_run_is_a_bare_loop_with_torchs_scheduler_and_clipping(schedule, clip):
    config = options_of("SGD", momentum=0.9, schedule=schedule, clip=clip)
    running = Run(config)
    torch.manual_seed(config.seed)
    model = running.task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9)
    shape = {
        "linear": lambda t: 1 - t / running.total,
        "cosine": lambda t: (1 + math.cos(math.pi * t / running.total)) / 2,
    }
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, shape[schedule])
    while not running.is_done:
        x, y = running.batch()
        optimizer.zero_grad()
        running.task.loss(model(x), y).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        scheduler.step()
        running.advance()
    for p, q in zip(model.parameters(), running.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"schedule": "cosin"}, "Did you mean 'cosine'"),
        ({"warmup": 1.0}, "warmup must be from 0 to below 1"),
        ({"clip": -1}, "clip must be from 0 up"),
        ({"steps": 0.5}, "steps must be a number from 0 up"),
        ({"augment": "crops"}, "Did you mean 'crop'"),
        ({"noise": 3}, "noise must be True or False"),
        ({"device": "cuda:77"}, "cannot be used here"),
        ({"device": "tpu77"}, "cannot be used here"),
    ],
)
def test_what_cannot_be_followed_is_an_error(options, said):
    with pytest.raises(ValueError, match=said):
        Run(options_of("SGD", **options))


# ---- steps, AdaScale and the noise


def test_a_number_of_steps_takes_the_place_of_epochs():
    running = Run(options_of("SGD", steps=11, evaluate="end"))
    while not running.is_done:
        running.advance()
    assert running.step == 11
    assert running.evaluations["step"] == [0, 11]


def test_adascale_in_the_lab_is_adascale_in_a_bare_loop():
    config = options_of("SGD", momentum=0.9, schedule="cosine", adascale=16)
    running = Run(config)
    assert running.total == 2 * (len(running.splits.train) // 16)
    torch.manual_seed(config.seed)
    model = running.task.model()
    varreg.observe(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9)
    ada = varreg.AdaScale(optimizer, 16)
    shape = lambda t: (1 + math.cos(math.pi * t / running.total)) / 2
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, shape)
    steps = 0
    while ada.progress < running.total:
        x, y = running.batch()
        optimizer.zero_grad()
        running.task.loss(model(x), y).backward()
        ada.step()
        ada.advance(scheduler)
        running.advance()
        steps += 1
    assert running.is_done
    assert running.step == steps < running.total / 2
    assert running.progress == pytest.approx(ada.progress, rel=1e-5)
    assert running.statistics["progress"][-1] == running.progress
    for p, q in zip(model.parameters(), running.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


def test_the_noise_that_a_run_records_is_that_of_noise_scale():
    config = dataclasses.replace(options_of("SGD", noise=True), log_every=5)
    running = Run(config)
    torch.manual_seed(config.seed)
    model = running.task.model()
    noise = varreg.NoiseScale(varreg.observe(model), window=5)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr)
    for _ in range(5):
        x, y = running.batch()
        optimizer.zero_grad()
        running.task.loss(model(x), y).backward()
        noise.update()
        optimizer.step()
        running.advance()
    assert running.statistics["step"] == [5]
    assert running.statistics["trace"] == [pytest.approx(noise.model.noise, rel=1e-5)]
    assert running.statistics["signal"] == [pytest.approx(noise.model.signal, rel=1e-4)]


GOES_ON = [
    ("SGD", {"schedule": "cosine", "warmup": 0.2, "clip": 0.1}),
    ("SGD", {"momentum": 0.9, "adascale": 32, "schedule": "linear"}),
    ("Adam", {"noise": True}),
    ("VRSGD", {"augment": "crop+flip", "momentum": 0.9}),
    ("VarianceRegularized", {"base": "RAdam", "s": 1.0}),
]


@pytest.mark.parametrize(("name", "options"), GOES_ON)
def test_every_recipe_goes_on_to_the_bit(name, options, tmp_path):
    goes_on(Config("digits", name, 0.01, epochs=2, batch=128, options=options), tmp_path)


def goes_on(config, tmp_path):
    """Stop a run twice, let it go on, and compare it with a run in one piece."""
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


# ---- options of observe


OBSERVED = [
    ("normed", {"batch_norm": "contribution"}),
    ("normed", {"batch_norm": "contribution", "groups": 5}),
    ("spirals", {"groups": 5}),
]


@pytest.mark.parametrize(("name", "options"), OBSERVED)
def test_options_of_observe_are_those_of_a_bare_loop(name, options, own_tasks, tmp_path):
    given = {"s": 1.0, "momentum": 0.9}
    config = Config(f"{own_tasks}:{name}", "VRSGD", 0.1, epochs=1, batch=50,
                    options={**given, **options})  # fmt: skip
    running = Run(config)
    torch.manual_seed(config.seed)
    model = running.task.model()
    groups = options.get("groups")
    observer = varreg.observe(model, groups, batch_norm=options.get("batch_norm", "refuse"))
    optimizer = varreg.VRSGD(model.named_parameters(), lr=config.lr, **given)
    while not running.is_done:
        x, y = running.batch()
        optimizer.zero_grad()
        running.task.loss(model(x), y).backward()
        moments = varreg.moments(model[0].weight)
        assert moments.count == 50
        assert moments.groups == (groups or 50)
        optimizer.step()
        running.advance()
    observer.remove()
    for p, q in zip(model.parameters(), running.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    goes_on(dataclasses.replace(config, epochs=2), tmp_path)


def test_batchnorm_is_refused_unless_it_is_allowed(own_tasks, tmp_path):
    config = Config(f"{own_tasks}:normed", "VRSGD", 0.1, epochs=1, batch=50, options={"s": 1.0})
    with pytest.raises(varreg.VarregError, match="BatchNorm"):
        run(config, tmp_path)


# ---- the recipe of a task


def test_the_recipe_of_a_task_is_that_of_its_runs(own_tasks):
    name = f"{own_tasks}:with_recipe"
    made = Comparison(name, ("SGD", "SGD:clip=2"), trials=3, seeds=1, recipe={"warmup": 0.1})
    recipes = {c.optimizer + str(c.options["clip"]): recipe.split(c.options, "")[0]
               for c in made.plan({})}  # fmt: skip
    assert recipes["SGD0.5"] == Recipe("cosine", 0.1, clip=0.5)
    assert recipes["SGD2"] == Recipe("cosine", 0.1, clip=2)
    own = Comparison(name, ("SGD", "Adam"), trials=3, seeds=1, recipe={"schedule": "linear"})
    assert {c.options["schedule"] for c in own.plan({})} == {"linear"}
    running = Run(made.plan({})[0])
    while not running.is_done:
        running.advance()
    assert running.optimizer.param_groups[0]["lr"] < 0.01 * running.config.lr  # at its end


# ---- another device


@pytest.mark.skipif(pretend_device.why_not() is not None, reason=str(pretend_device.why_not()))
def test_a_run_on_another_device():
    run_on_pretend_device("tests/lab/on_pretend_device.py")


def test_variances_of_a_run_are_recorded():
    columns, running = record(Recorded("logistic", 0.1, 1, 2), elements=1)
    assert len(columns["v2 model"]) == running.total // 2 > 0
    assert all(v > 0 for v in columns["v2 model"] + columns["g2 model"])


# ---- augmentation


def test_crops_are_shifts_with_zeros_and_flips_are_mirrors():
    x = torch.arange(1.0, 2 * 3 * 16 * 16 + 1).view(2, 3, 16, 16).repeat(20, 1, 1, 1)
    moved = crop(x, generator_of(0, 0))
    seen = set()
    for image, source in zip(moved, x, strict=True):
        padded = torch.nn.functional.pad(source, (2, 2, 2, 2))
        at = [
            (i, j)
            for i in range(5)
            for j in range(5)
            if torch.equal(image, padded[:, i : i + 16, j : j + 16])
        ]
        assert len(at) == 1
        seen.add(at[0])
    assert len(seen) > 10
    mirrored = flip(x, generator_of(0, 0))
    is_same = [torch.equal(a, b) for a, b in zip(mirrored, x, strict=True)]
    is_flip = [torch.equal(a, b.flip(-1)) for a, b in zip(mirrored, x, strict=True)]
    assert all(a != b for a, b in zip(is_same, is_flip, strict=True))
    assert 5 < sum(is_flip) < 35


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_augmentation_depends_on_seed_and_step_alone(name):
    a = Run(Config("digits", "SGD", 0.1, 3, 1, 64, {"augment": name}))
    b = Run(Config("digits", "SGD", 0.1, 3, 1, 64, {"augment": name}))
    first = a.batch()
    a.step = 5
    a.batch()
    a.step = 0
    assert torch.equal(first.x, a.batch().x)
    assert torch.equal(first.x, b.batch().x)
    b.step = 1
    assert not torch.equal(first.x, b.batch().x)


# ---- any importable optimizer


def test_an_optimizer_of_a_file_is_that_class(own, tmp_path):
    name, options = optimizers.parse(f"{own}:Signed,weight_decay=0.1")
    assert (name, options) == (f"{own}:Signed", {"weight_decay": 0.1})
    result = run(Config("logistic", name, 0.01, epochs=2, batch=128, options=options), tmp_path)
    assert result["evaluations"]["valid_loss"][-1] < 0.8 * result["evaluations"]["valid_loss"][0]


def test_lion_and_the_wrapper_around_it(tmp_path):
    """The example of the docs, of a package that is not ours."""
    lion = pytest.importorskip("lion_pytorch").Lion
    name, options = optimizers.parse("lion_pytorch:Lion,weight_decay=0.1")
    optimizers.check(name, options)
    plain = Run(dataclasses.replace(options_of(name, **options), lr=0.003))
    assert type(plain.optimizer) is lion
    torch.manual_seed(0)
    model = plain.task.model()
    bare = lion(model.parameters(), lr=0.003, weight_decay=0.1)
    while not plain.is_done:
        x, y = plain.batch()
        bare.zero_grad()
        plain.task.loss(model(x), y).backward()
        bare.step()
        plain.advance()
    for p, q in zip(model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
    assert plain.losses[-1] < plain.losses[0]
    around = options_of("VarianceRegularized", base="lion_pytorch:Lion", s=2.0, weight_decay=0.1)
    made = Run(around).optimizer
    assert type(made.base) is lion
    assert made.param_groups[0]["weight_decay"] == 0.1
    goes_on(dataclasses.replace(around, lr=0.003), tmp_path)


def test_the_wrapper_goes_around_what_it_is_given(own):
    running = Run(options_of("VarianceRegularized", base=f"{own}:Signed", s=0.5, weight_decay=0.1))
    made = running.optimizer
    assert type(made).__name__ == "VarianceRegularized"
    assert type(made.base).__name__ == "Signed"
    assert made.param_groups[0]["weight_decay"] == 0.1
    assert made.param_groups[0]["s"] == 0.5
    while not running.is_done:
        running.advance()
    assert "lambda" in running.statistics
    assert running.losses[-1] < running.losses[0]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("{own}:Sined", "Did you mean 'Signed'"),
        ("{own}:not_one", "must be a class of torch optimizers.*made str"),
        ("{own}:Signed,decay=1", "no option of .* 'decay'; there are: weight_decay"),
        ("no_such_module_at_all:Lion", "cannot be imported"),
        ("/no/such/file.py:Lion", "there is no file"),
        ("Lion", "there is no optimizer 'Lion'"),
        ("VarianceRegularized", "needs the optimizer that it wraps"),
        ("VarianceRegularized:base=VRSGD", "regularized already"),
    ],
)
def test_what_cannot_be_imported_is_an_error(own, spec, said):
    name, options = optimizers.parse(spec.format(own=own))
    with pytest.raises(ValueError, match=said):
        optimizers.check(name, options)


def test_an_entry_imports_nothing(own):
    Path(own).write_text("raise SystemExit('imported')")
    assert optimizers.entry(f"{own}:Signed").low < optimizers.entry(f"{own}:Signed").high
    assert not optimizers.entry(f"{own}:Signed").regularized
    assert optimizers.entry("VarianceRegularized").regularized


def test_a_task_of_a_file(tmp_path):
    source = Path("tests/support/own_task.py").read_text()
    (tmp_path / "elsewhere.py").write_text(source)
    made = task(f"{tmp_path / 'elsewhere.py'}:spirals")
    assert made.model() is not None


def test_options_are_split():
    got, rest = recipe.split({"momentum": 0.9, "clip": 1, "schedule": "linear"}, "SGD")
    assert (got, rest) == (Recipe("linear", clip=1), {"momentum": 0.9})
    assert json.dumps(dataclasses.asdict(got))
