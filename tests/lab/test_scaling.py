"""Larger batches: the plan is fair, its steps follow from the noise, and its words from numbers."""

from __future__ import annotations

import json
import math
import statistics

import pytest
import torch
from tools.tables import arms

from tests.lab.test_compare import noise, result
from tests.lab.test_extending import Silent
from varreg.lab.experiments.compare.trials import FRESH
from varreg.lab.experiments.execution import carry_out
from varreg.lab.experiments.scaling.plan import Scaling, planned_part
from varreg.lab.report.builder import build
from varreg.lab.report.format import number
from varreg.noise.batch_plan import make_plan
from varreg.noise.reading import Reading

PLAN = Scaling("plan", "logistic", batch=32, scales=(4, 16), epochs=2, trials=3, lr=(0.01, 1.0))
ADA = Scaling("adascale", "logistic", batch=8, scales=(4, 16), epochs=2, trials=3, lr=(0.01, 1.0))
STEPS = 200
B_N = 96.0


@pytest.fixture(autouse=True)
def _single_precision():
    torch.set_default_dtype(torch.float32)


def fake(config, experiment):
    """A result as a run would have it: best at 0.1 times the scale's root, with known noise."""
    scale = config.batch / experiment.batch
    steps = config.options.get("steps") or STEPS
    if config.options.get("adascale"):
        steps = round(STEPS / math.sqrt(scale))
    loss = 0.5 + abs(math.log(config.lr / 0.1 / math.sqrt(scale)))
    made = result(config, [2.0, loss], 1.0 + loss + noise(config))
    made |= {"step": steps, "losses": [1.0] * steps}
    made["evaluations"]["step"] = [0, steps]
    if config.options.get("noise"):
        rows = STEPS // 10
        signal = [1.0] * (rows // 2) + [0.5] * (rows - rows // 2)
        made["statistics"] = {
            "step": list(range(10, STEPS + 1, 10)),
            "trace": [B_N * x for x in signal],
            "signal": signal,
        }
    return made


def filled(experiment, until=10**9):
    """Results of the whole plan, stage by stage."""
    results, stages = {}, 0
    while stages < until:
        new = [c for c in experiment.plan(results) if c.name not in results]
        if not new:
            break
        results |= {c.name: fake(c, experiment) for c in new}
        stages += 1
    return results, stages


def test_a_part_of_the_plan_is_that_of_the_planner():
    for batch in (32, 128, 2048):
        row = make_plan(Reading("all", B_N, 1.0, (B_N, B_N)), [batch], 32)[0]
        assert planned_part(B_N, batch, 32) == pytest.approx(row.steps)


def test_the_planned_number_of_steps_follows_from_the_noise():
    results, _ = filled(PLAN)
    assert PLAN.best(PLAN.base_trials(), results).lr == 0.1
    assert PLAN.noise_scales(0.1, results) == [pytest.approx(B_N)] * 10
    for scale in PLAN.scales:
        exact = STEPS * (1 + B_N / (32 * scale)) / (1 + B_N / 32)
        assert PLAN.steps(scale, 0.1, results) == math.ceil(exact)
    arms = {(arm.name, arm.scale): arm.configs for arm in PLAN.arms(results)}
    assert len(arms) == 1 + 2 * 3
    planned = arms["planned steps and learning rate", 4][0]
    assert planned.lr == pytest.approx(0.1 * STEPS / planned.options["steps"], rel=1e-2)
    assert arms["base's samples, tuned", 4][0].options["steps"] == STEPS // 4


def test_rules_and_tuning_again_take_the_number_of_steps_of_adascale():
    results, stages = filled(ADA)
    assert stages == 4  # the base; how many steps AdaScale takes; tuned again; what is left
    arms = {(arm.name, arm.scale): arm.configs for arm in ADA.arms(results)}
    assert len(arms) == 1 + 2 * 7
    for scale in ADA.scales:
        own = arms["AdaScale", scale]
        assert own[0].options["adascale"] == 8
        assert "steps" not in own[0].options
        steps = {c.options["steps"] for (name, s), cs in arms.items() for c in cs
                 if s == scale and name != "AdaScale"}  # fmt: skip
        assert steps == {round(STEPS / math.sqrt(scale))}
        rates = {name: cs[0].lr for (name, s), cs in arms.items() if s == scale}
        assert rates["AdaScale"] == rates["no rule"] == 0.1
        assert rates["square root"] == pytest.approx(0.1 * math.sqrt(scale), rel=1e-2)
        assert rates["linear"] == rates["linear, warm-up"] == pytest.approx(0.1 * scale)
        assert arms["linear, warm-up", scale][0].options["warmup"] == 0.05
        assert arms["tuned again, warm-up", scale][0].options["warmup"] == 0.05


@pytest.mark.parametrize("experiment", [PLAN, ADA])
def test_choices_are_made_without_the_seeds_and_the_split_of_the_verdict(experiment):
    results, _ = filled(experiment)
    fresh = {c.name for arm in experiment.arms(results) for c in arm.configs}
    for config in experiment.plan(results):
        assert (config.seed >= FRESH) == (config.name in fresh) == (config.test == "end")
    seeds = {tuple(c.seed for c in arm.configs) for arm in experiment.arms(results)}
    assert len(seeds) == 1  # paired
    assert len(experiment.plan(results)) <= experiment.size()


def test_the_numbers_are_paired_differences():
    results, _ = filled(ADA)
    found = ADA.analyze(results)
    assert found["complete"]
    arms = {(a["name"], a["scale"]): a for a in found["arms"]}
    base, own, none = arms["base", 1], arms["AdaScale", 16], arms["no rule", 16]
    assert own["steps_of_base"] == pytest.approx(0.25)
    assert own["samples_of_base"] == pytest.approx(4.0)
    mean = sum(a - b for a, b in zip(none["test_loss"], own["test_loss"], strict=True)) / 10
    assert none["against_adascale"]["test_loss"][0] == pytest.approx(mean)
    assert base["against_base"] == {}
    assert len(found["verdict"]) == 2
    assert max(map(len, ADA.terminal_table(found).splitlines())) <= 100


def table_of(found) -> list[list[str]]:
    """Return the cells of the docs' table, without the text around it."""
    made = arms.scaling({**found, "command": "varreg scaling"})
    lines = [line for line in made.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


@pytest.mark.parametrize("experiment", [PLAN, ADA])
def test_the_table_of_the_docs_has_every_arm(experiment):
    found = experiment.analyze(filled(experiment)[0])
    _, _, *rows = table_of(found)
    base, *others = found["arms"]
    assert [row[1] for row in rows] == ["base, tuned", *(arm["name"] for arm in others)]
    assert [int(row[0].replace(",", "")) for row in rows if row[0]] == [
        base["batch"],
        *dict.fromkeys(arm["batch"] for arm in others),
    ]
    one = others[-1]
    for interval, says in ([0.1, 0.3], "higher"), ([-0.3, -0.1], "lower"), ([-0.1, 0.3], ""):
        one["against_base"]["test_loss"] = [0.2, *interval]
        one["against_adascale"] = {}
        last = table_of(found)[-1]
        assert last[2] == number(statistics.median(one["test_loss"]))
        assert last[3] == says


def test_a_broken_run_is_counted_and_never_averaged():
    results, _ = filled(ADA)
    linear = next(arm for arm in ADA.arms(results) if (arm.name, arm.scale) == ("linear", 16))
    results[linear.configs[0].name]["diverged"] = True
    found = ADA.analyze(results)
    row = next(a for a in found["arms"] if (a["name"], a["scale"]) == ("linear", 16))
    assert row["broke"] == 1
    assert math.isnan(row["against_base"]["test_loss"][0])
    assert any("linear" in v["speed"] and "1 of 10 broke" in v["speed"] for v in found["verdict"])


def test_parts_of_a_report_are_there_before_the_end():
    for stages in range(5):
        results, _ = filled(ADA, stages)
        found = ADA.analyze(results)
        assert found["complete"] == (stages == 4)
        ADA.page(results, found, "")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"question": "both"}, "plan or adascale"),
        ({"scales": (1, 4)}, "from 2 up"),
        ({"scales": (4, 4)}, "different"),
        ({"seeds": 0}, "seeds must be at least 1"),
        ({"lr": (1.0, 0.1)}, "0 < low ≤ high"),
        ({"optimizer": "SGD:steps=5"}, "steps is set by the experiment"),
        ({"optimizer": "SGDD"}, "there is no optimizer"),
    ],
)
def test_bad_input(change, said):
    with pytest.raises(ValueError, match=said):
        Scaling(**{"question": "plan", "task": "logistic", **change})


def test_a_file_of_someone_else_is_checked_and_nothing_is_imported():
    saved = json.loads(json.dumps(ADA.arguments()))
    assert Scaling.of(saved) == ADA
    Scaling.of({**saved, "task": "no_such_module:task", "optimizer": "no_such_module:Optimizer"})
    for bad in ({"scales": ["4"]}, {"question": 3}, {"seeds": 10**9}, {"optimizer": "SGD:clip=-1"}):
        with pytest.raises(ValueError, match="varreg"):
            Scaling.of({**saved, **bad})


@pytest.mark.parametrize("question", ["plan", "adascale"])
def test_from_runs_to_a_page(question, tmp_path):
    made = Scaling(
        question, "logistic", batch=32, scales=(4,), epochs=1, trials=2, tuning_seeds=1, seeds=2
    )
    carry_out(made, tmp_path, 1, None, Silent(), ["varreg", "scaling"])
    page, found = build(tmp_path)
    assert found["complete"]
    assert page.exists()
    own = [arm for arm in found["arms"] if arm["scale"] == 4]
    assert all(8 <= arm["steps"] <= 33 for arm in own)
