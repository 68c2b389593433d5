"""The comparison: its plan is fair, its numbers are right, and its words follow from them."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from varreg.lab.experiments.compare.analysis import analyze
from varreg.lab.experiments.compare.contrast import Contrast
from varreg.lab.experiments.compare.estimates import NOTHING, Estimate
from varreg.lab.experiments.compare.learning_rates import best, grid
from varreg.lab.experiments.compare.plan import Comparison
from varreg.lab.experiments.compare.trials import FRESH, ablations_of, log_grid, target
from varreg.lab.experiments.compare.verdict import final_words
from varreg.lab.experiments.execution import begin, carry_out
from varreg.lab.experiments.reproduce.analysis import analyze as analyze_reproduction
from varreg.lab.experiments.reproduce.analysis import verdict as verdict_of_reproduction
from varreg.lab.experiments.reproduce.plan import Reproduction
from varreg.lab.report.builder import build
from varreg.lab.report.format import text
from varreg.lab.runs.metrics import effective_lambda, time_to
from varreg.lab.store import write_json


@pytest.fixture(autouse=True)
def _single_precision():
    torch.set_default_dtype(torch.float32)


ENVIRONMENT = {"varreg": "0", "commit": "c", "torch": "t"}


def result(config, valid, test=None, seconds=1.0, accuracy=0.9, diverged=False, lam=None):
    """A result as a run would have it, from the validation losses after each epoch."""
    n = len(valid)
    nan = [math.nan] * n
    return {
        "config": dataclasses.asdict(config),
        "environment": ENVIRONMENT,
        "diverged": diverged,
        "step": 10 * (n - 1),
        "seconds": seconds,
        "evaluations": {
            "step": [10 * i for i in range(n)],
            "seconds": [seconds * i / max(1, n - 1) for i in range(n)],
            "train_loss": list(valid),
            "train_accuracy": [accuracy] * n,
            "valid_loss": list(valid),
            "valid_accuracy": [accuracy] * n,
            "test_loss": [*nan[1:], math.nan if test is None else test],
            "test_accuracy": [*nan[1:], accuracy],
        },
        "statistics": {"step": [1, 2], "lambda": [1.0, lam]} if lam else {"step": []},
        "losses": [1.0] * (10 * (n - 1)),
    }


SMALL = Comparison(
    "logistic", ("SGD", "VRSGD"), trials=4, s=(1.0, 3.0), tuning_seeds=2, seeds=8, lr=(0.01, 10.0)
)


def best_at(lr):
    """Validation losses that are lowest at a learning rate, from 2 down."""
    return lambda config: [2.0, 1.5, 1.0, 0.5 + abs(math.log10(config.lr / lr))]


def filled(comparison, valid, test):
    """Results of the whole plan, from functions of the configuration."""
    results = {}
    while True:
        new = {
            c.name: result(c, valid(c), test(c))
            for c in comparison.plan(results)
            if c.name not in results
        }
        if not new:
            return results
        results |= new


# The plan


def test_every_optimizer_has_the_same_budget():
    grids = {spec: grid(SMALL, spec) for spec in SMALL.optimizers}
    assert [len(grid) for grid in grids.values()] == [4, 4]
    assert [lr for lr, _ in grids["SGD"]] == [0.01, 0.1, 1.0, 10.0]
    assert grids["VRSGD"] == [
        (0.01, {"s": 1.0}),
        (10.0, {"s": 1.0}),
        (0.01, {"s": 3.0}),
        (10.0, {"s": 3.0}),
    ]
    assert len(grid(Comparison("digits", ("SGD", "DoG"), trials=5), "DoG")) == 1
    assert [
        o for _, o in grid(Comparison("digits", ("SGD", "VRSGD:s=1"), trials=3), "VRSGD:s=1")
    ] == [{"s": 1}] * 3


def test_seeds_and_splits_of_the_verdict_are_fresh():
    tuning = SMALL.plan({})
    assert {c.seed for c in tuning} == {0, 1}
    assert {c.test for c in tuning} == {"never"}
    results = filled(SMALL, best_at(0.1), lambda c: 1.0)
    verdict = [c for c in SMALL.plan(results) if c not in tuning]
    assert {c.seed for c in verdict} == set(range(FRESH, FRESH + 8))
    assert {c.test for c in verdict} == {"end"}
    assert len(SMALL.plan(results)) == SMALL.size()
    arms = {arm.name: arm.configs[0] for arm in SMALL.arms(results)}
    assert arms["SGD"].lr == 0.1
    assert arms["VRSGD, s = 0"].options == {"s": 0.0}
    assert arms["VRSGD, λ shuffled"].options == {"s": 1.0, "ablation": "shuffled"}
    assert len({config.lr for name, config in arms.items() if name != "SGD"}) == 1


def test_the_budget_is_equal_whatever_the_number_of_s():
    for trials, s in ((12, (0.5, 1.0, 2.0, 4.0, 8.0)), (11, (0.5, 2.0)), (5, (1.0, 2.0, 3.0))):
        made = Comparison("digits", ("SGD", "VRSGD"), trials=trials, s=s)
        assert [len(grid(made, spec)) for spec in made.optimizers] == [trials, trials]


def test_no_run_is_planned_twice():
    made = Comparison("digits", ("SGD", "VRSGD", "VRSGD:s=2.0"), lr=(0.1, 0.1001), trials=4)
    plan = made.plan({})
    assert len({c.name for c in plan}) == len(plan)


def test_ablations_that_would_change_nothing_are_left_out():
    assert list(ablations_of({"per": "model"})) == ["s = 0", "λ replaced by its mean"]
    assert list(ablations_of({"per": "tensor"})) == [
        "s = 0",
        "λ replaced by its mean",
        "λ shuffled",
    ]


def test_one_epoch_has_a_target():
    results = filled(SMALL, lambda c: [2.0, 0.5], lambda c: 1.0)
    assert target(best(SMALL, "SGD", results), results) == 0.5
    (config, *_) = SMALL.plan({})
    assert time_to(result(config, [0.4, 0.5]), 0.5, "step") == 10  # not before training


def test_target_and_times():
    results = filled(SMALL, lambda c: [2.0, 0.9, 0.7, 0.4, 0.2], lambda c: 1.0)
    goal = target(best(SMALL, "SGD", results), results)
    assert goal == pytest.approx(0.4)  # of four epochs, the first three
    (config, *_) = SMALL.plan({})
    assert time_to(result(config, [2.0, 0.3, 0.5, 0.2], seconds=3.0), 0.4, "step") == 10
    assert time_to(result(config, [2.0, 0.5, 0.5, 0.2], seconds=3.0), 0.4, "seconds") == 3.0
    assert time_to(result(config, [2.0, 0.5, 0.5, 0.5]), 0.4, "step") == math.inf


def test_a_log_grid():
    assert log_grid(0.1, 10, 3) == [0.1, 1.0, 10.0]
    assert log_grid(0.1, 10, 1) == [1.0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"optimizers": ("SGD",)}, "two or more different optimizers"),
        ({"optimizers": ("SGD", "SGD")}, "two or more different optimizers"),
        ({"optimizers": ("SGD", "VRSDG")}, "Did you mean 'VRSGD'"),
        (
            {"optimizers": ("SGD", "VRSGD:momentun=0.9")},
            "no option of VRSGD 'momentun'.*Did you mean 'momentum'",
        ),
        ({"optimizers": ("SGD", "VRSGD:lr=0.1")}, "lr is set by the experiment"),
        ({"optimizers": ("SGD", "VRSGD:form=round")}, "form must be one of"),
        ({"task": "digit"}, "Did you mean 'digits'"),
        ({"trials": 0}, "trials must be at least 1"),
        ({"trials": 1}, "too few for 2 values of s"),
        ({"seeds": 0}, "seeds must be at least 1"),
        ({"lr": (1.0, 0.1)}, "0 < low ≤ high"),
        ({"s": (-1.0,)}, "s must be"),
        ({"s": (2.0, 2.0)}, "values of s are given twice"),
        ({"optimizers": ("SGD", "SGD:")}, "two or more different optimizers"),
        ({"optimizers": ("SGD", "SGD:momentum=-1")}, "SGD does not take .*Invalid momentum value"),
        ({"optimizers": ("SGD", "Adam:betas=(0.9,)")}, "Adam does not take"),
    ],
)
def test_bad_arguments(arguments, words):
    with pytest.raises(ValueError, match=words):
        Comparison(**arguments)


# Words


def noise(c, scale=0.01):
    seed = zlib.crc32(f"{c._words} {c._checksum}".encode())
    return scale * float(np.random.default_rng(seed).normal())


def test_no_detectable_difference():
    results = filled(
        SMALL,
        best_at(0.1),
        lambda c: 1.0 + (0.01 if c.seed % 2 else -0.01) * (1 if c.optimizer == "SGD" else -1),
    )
    said = analyze(SMALL, results)["verdict"][0]
    assert said["kind"] == "same"
    assert "no detectable difference in test loss" in said["headline"]


def test_a_difference_is_detected_and_explained():
    """VRSGD is better by 0.2; without λ it is not; with λ replaced by its mean it is as good: so it
    was the step.
    """

    def test(c):
        gain = 0.2 if c.optimizer == "VRSGD" and c.options["s"] else 0.0
        return 1.0 - gain + noise(c)

    found = analyze(SMALL, filled(SMALL, best_at(0.1), test))
    said = found["verdict"][0]
    assert said["kind"] == "tuned"
    assert "VRSGD ends with a lower test loss than SGD" in said["headline"]
    assert "s = 0: −0.197 (" in said["why"]
    assert "what λ did could not be told from a factor of the learning rate" in said["why"]
    d = found["contrasts"][0]["differences"]["test_loss"]
    assert d["low"] < -0.2 < d["high"] < 0


def test_where_a_coordinate_matters():
    def test(c):
        return (
            1.0
            - (
                0.2
                if c.optimizer == "VRSGD" and c.options["s"] and "ablation" not in c.options
                else 0.0
            )
            + noise(c)
        )

    said = analyze(SMALL, filled(SMALL, best_at(0.1), test))["verdict"][0]
    assert (
        "more than a longer step does, and it matters which coordinate has which λ" in said["why"]
    )
    assert said["kind"] == "better"


def test_where_a_step_matters_and_a_coordinate_does_not():
    def test(c):
        return (
            1.0
            - (
                0.2
                if c.optimizer == "VRSGD" and c.options["s"] and c.options.get("ablation") != "mean"
                else 0.0
            )
            + noise(c)
        )

    said = analyze(SMALL, filled(SMALL, best_at(0.1), test))["verdict"][0]
    assert (
        "more than a longer step does; that it matters which coordinate has which λ could not be "
        "seen" in said["why"]
    )


def test_worse():
    found = analyze(
        SMALL,
        filled(SMALL, best_at(0.1), lambda c: 1.0 + 0.3 * (c.optimizer == "VRSGD") + noise(c)),
    )
    assert found["verdict"][0]["kind"] == "worse"
    assert "higher test loss" in found["verdict"][0]["headline"]


@pytest.mark.parametrize(("sign", "word"), [(-1, "lower"), (1, "higher")])
def test_one_run_that_broke_does_not_hide_what_the_others_say(sign, word):
    ten = dataclasses.replace(SMALL, seeds=10)

    def test(c):
        broke = c.seed == FRESH + 3
        return 1.0 + (c.optimizer == "VRSGD") * (-sign * 4.0 if broke else sign * 0.2) + noise(c)

    results = filled(ten, best_at(0.1), lambda c: 5 + test(c))
    said = analyze(ten, results)["verdict"][0]
    assert said["kind"] == "mixed"
    assert f"a {word} test loss than SGD on 9 of 10 seeds, but by the mean" in said["headline"]
    assert "median difference" in said["headline"]


def test_a_mean_that_the_median_does_not_show_is_said_to_be_one():
    """The base broke in some runs: the mean is lower, and the others cannot tell."""
    ten = dataclasses.replace(SMALL, seeds=10)

    def test(c):
        gain = c.optimizer == "VRSGD" and c.seed % 2 and c.seed < FRESH + 9
        return 3.0 - 2.0 * gain + noise(c, 0.1)

    said = analyze(ten, filled(ten, best_at(0.1), test))["verdict"][0]
    assert said["kind"] in ("better", "tuned")
    assert "by the mean; by the median it cannot be told" in said["headline"]


def test_a_mean_against_most_seeds_is_mixed():
    c = Contrast("VRSGD", "SGD", 0.95, {"test_loss": Estimate(-0.5, -0.9, -0.1)}, NOTHING, NOTHING)
    zeros = {"seeds": list(range(10)), "lost": [False] * 10, "broke": [False] * 10}
    a = {**zeros, "name": "VRSGD", "test_loss": [1.1] * 9 + [1.0]}
    b = {**zeros, "name": "SGD", "test_loss": [1.0] * 9 + [9.0]}
    kind, words = final_words(c, a, b)
    assert kind == "mixed"
    assert "lower mean test loss than SGD, but most seeds say the opposite" in words


def test_the_edge_of_the_grid_is_warned_of():
    found = analyze(SMALL, filled(SMALL, best_at(100.0), lambda c: 1.0))
    assert any(
        "SGD: its best learning rate, 10, is the highest of the grid" in w
        for w in found["warnings"]
    )
    inner = analyze(SMALL, filled(SMALL, best_at(0.1), lambda c: 1.0))
    assert not any(w.startswith("SGD: its best") for w in inner["warnings"])


def test_divergence_is_not_hidden():
    results = filled(SMALL, best_at(0.1), lambda c: 1.0 + noise(c))
    for arm in SMALL.arms(results):
        if arm.name == "VRSGD":
            for config in arm.configs[:3]:
                results[config.name] = result(config, [2.0, 1.0], diverged=True)
    found = analyze(SMALL, results)
    assert "diverged in 3 of 8 runs, SGD in 0 of 8" in found["verdict"][0]["headline"]
    assert found["verdict"][0]["kind"] == "unknown"  # three of eight may be chance
    for arm in SMALL.arms(results):
        if arm.name == "VRSGD":
            for config in arm.configs[3:7]:
                results[config.name] = result(
                    config, [2.0, 1.0], math.nan
                )  # a test loss that is not finite is no better
    said = analyze(SMALL, results)["verdict"][0]
    assert said["kind"] == "worse"
    assert "diverged in 7 of 8 runs, SGD in 0 of 8: it diverges more often." in said["headline"]
    assert any("VRSGD diverged in 3 of 8 runs" in w for w in found["warnings"])
    assert next(a for a in found["arms"] if a["name"] == "VRSGD")["test_loss"][:3] == [math.inf] * 3


def test_a_report_of_runs_that_diverged(tmp_path):
    """Runs that ended early have shorter lists: all figures and tables are made all the same."""
    short = dataclasses.replace(SMALL, epochs=3)
    results = filled(short, best_at(0.1), lambda c: 1.0 + noise(c))
    for arm in short.arms(results):
        for i, config in enumerate(arm.configs):
            lost = arm.name == "VRSGD" and i == 2
            results[config.name] = result(
                config, [2.0, 1.0] if lost else [2.0, 1.0, 0.7, 0.5], 1.0, diverged=lost
            )
            if config.optimizer == "VRSGD":
                steps = [1, 10] if lost else [1, 10, 20]
                keys = (
                    "lambda",
                    "rho",
                    "noise_scale",
                    "lambda/1.weight",
                    "rho/1",
                    "noise_scale/1",
                    "rho/_odd",
                )
                results[config.name]["statistics"] = {
                    "step": steps,
                    **{key: [1.0 + s for s in steps] for key in keys},
                }
    for name, value in results.items():
        (tmp_path / "runs" / name).mkdir(parents=True)
        write_json(tmp_path / "runs" / name / "result.json", value)
    environment = dict.fromkeys(("varreg", "commit", "torch", "python", "processor", "cores"), "")
    about = {
        "kind": "compare",
        "arguments": short.arguments(),
        "about": "<b>a task</b>",
        "command": ["varreg"],
        "environment": environment,
    }
    write_json(tmp_path / "experiment.json", about)
    page, found = build(tmp_path)
    assert found["complete"]
    assert "VRSGD diverged in 1 of 8 runs" in page.read_text()
    assert "&lt;b&gt;a task&lt;/b&gt;" in page.read_text()


def test_where_all_trials_diverge():
    results = {c.name: result(c, [2.0], diverged=c.optimizer == "SGD") for c in SMALL.plan({})}
    results |= {
        c.name: result(c, [2.0, 1.0], 1.0) for c in SMALL.plan(results) if c.name not in results
    }
    found = analyze(SMALL, results)
    assert any(w.startswith("SGD: all trials diverged") for w in found["warnings"])
    assert found["verdict"] == []


def test_partial_results():
    plan = SMALL.plan({})
    for k in (0, 1, len(plan) - 1, len(plan)):
        results = {c.name: result(c, best_at(0.1)(c)) for c in plan[:k]}
        found = analyze(SMALL, results)
        assert not found["complete"]
        assert "partial" in text(found)
    results |= {
        c.name: result(c, best_at(0.1)(c), 1.0)
        for c in SMALL.plan(results)[len(plan) : len(plan) + 2]
    }
    found = analyze(SMALL, results)
    said = found["verdict"][0]
    assert said["kind"] == "unknown"
    assert said["headline"].startswith("So far, with some runs to come: ")
    assert "too few for an interval; lower on 0 of 1 paired seed)" in said["headline"]


def test_partial_means_are_of_the_seeds_that_both_have():
    results = filled(SMALL, best_at(0.1), lambda c: 1.0 + (c.seed - FRESH) + noise(c))
    for arm in SMALL.arms(results):
        if arm.name == "VRSGD":
            for config in arm.configs[:4]:
                del results[config.name]
    headline = analyze(SMALL, results)["verdict"][0]["headline"]
    assert "(means 6.50 against 6.50, medians 6.50 against 6.50; " in headline  # of seeds 4 to 7


def test_a_target_that_half_of_the_runs_miss_is_said_in_words():
    results = filled(SMALL, best_at(0.1), lambda c: 1.0 + noise(c))
    for k, config in enumerate(SMALL.configs_by_arm(results)["VRSGD"]):
        if k % 2:  # its validation losses stay above the target
            results[config.name] = result(config, [2.0, 1.5, 1.4, 1.3], 1.0 + noise(config))
    speed = analyze(SMALL, results)["verdict"][0]["speed"]
    assert "is reached by VRSGD in 4 of 8 runs, by SGD in 8 of 8 runs." in speed
    assert speed.endswith("In half of the pairs of seeds or more, VRSGD does not reach it.")


def test_nothing_is_concluded_from_too_few_seeds():
    few = Comparison(
        "logistic",
        ("SGD", "VRSGD"),
        trials=4,
        s=(1.0, 3.0),
        tuning_seeds=1,
        seeds=3,
        lr=(0.01, 10.0),
    )
    found = analyze(
        few, filled(few, best_at(0.1), lambda c: 1.0 - 0.2 * (c.optimizer == "VRSGD") + noise(c))
    )
    said = found["verdict"][0]
    assert said["kind"] == "unknown"
    assert "too few for an interval" in said["headline"]
    assert "too few seeds for an interval" in said["speed"]
    assert said["why"].endswith("λ shuffled: cannot be compared.")
    assert "3 seeds are few for 2 optimizers: 6 or more can tell more." in found["warnings"]


def test_intervals_are_wider_for_more_candidates():
    assert analyze(Comparison("digits", ("SGD", "Adam", "VRSGD")), {})["level"] == pytest.approx(
        0.975
    )


# The real thing


class Silent:
    def planned(self, configs, done): ...
    def progress(self, name, step, total, loss): ...
    def warned(self, name, text): ...
    def ended(self, config, result): ...


def test_s_of_zero_is_found_identical(tmp_path):
    """Trained for real: VRSGD with s = 0 is SGD, to the bit, and the verdict says so."""
    made = Comparison(
        "logistic",
        ("SGD", "VRSGD:s=0"),
        trials=3,
        tuning_seeds=1,
        seeds=3,
        epochs=2,
        ablations=False,
    )
    results = carry_out(made, tmp_path, 2, None, Silent(), ["varreg"])
    found = analyze(made, results)
    assert "identical: the same test loss on every seed" in found["verdict"][0]["headline"]
    assert found["complete"]
    assert repr(sorted(made.read(tmp_path).items())) == repr(sorted(results.items()))
    with pytest.raises(ValueError, match="has another experiment in it"):
        begin(Comparison("logistic", ("SGD", "Adam")), tmp_path, None, ["varreg"])
    with pytest.raises(ValueError, match="task 'stream' is a stream without end"):
        begin(Comparison("stream", ("SGD", "SVRG")), tmp_path / "other", None, ["varreg"])


# The reproduction


def test_the_control_follows_from_lambda():
    made = Reproduction("cifar10", 3, 2)
    first = made.plan({})
    assert len(first) == 6
    assert {(c.lr, c.batch, c.epochs, c.test, c.task) for c in first} == {
        (0.01, 100, 3, "epochs", "cifar10-lenet:valid=0")
    }
    results = {
        c.name: result(c, [2.0, 1.0], 1.0, lam=2.0 if c.options.get("history") == "sum" else 1.5)
        for c in first
    }
    assert effective_lambda(results[first[1].name]) == 1.5  # the mean over time, of 1 and 2
    control = [c for c in made.plan(results) if c not in first]
    assert [c.lr for c in control] == [0.015, 0.015]
    assert [c.optimizer for c in control] == ["SGD", "SGD"]


@pytest.mark.parametrize(
    ("vr", "control", "words", "kind"),
    [
        (0.5, 0.5, "100 % of the gain", "explained"),
        (0.5, 0.9, "20 % of the gain", "reproduced"),
        (0.5, 1.1, "needs more than 2 epochs for the same", "reproduced"),
        (1.2, 0.9, "does not reproduce", "refuted"),
        (0.5, None, "nothing is concluded", "unknown"),
    ],
)
def test_what_the_reproduction_says(vr, control, words, kind):
    made = Reproduction("fashion-mnist", 2, 6)
    results: dict = {}
    for _ in range(2):
        for c in made.plan(results):
            end = vr if c.optimizer == "VRSGD" else 1.0 if c.lr == 0.01 else control
            results[c.name] = result(
                c,
                [2.0, 1.5, end or 1.5],
                1.0,
                lam=3.0 if c.optimizer == "VRSGD" else None,
                diverged=end is None,
            )
    found = analyze_reproduction(made, results)
    assert found["complete"]
    assert words in " ".join(found["verdict"][0].values())
    assert found["verdict"][0]["kind"] == kind
    assert ("diverged in 6 of 6 runs" in " ".join(found["warnings"])) == (control is None)


def reproduced(epochs, seeds, sgd, vr, control=0.9):
    """Results of a reproduction, from each arm's training losses at the end, seed by seed."""
    made, results = Reproduction("fashion-mnist", epochs, seeds), {}
    for _ in range(2):
        for c in made.plan(results):
            ends = vr if c.optimizer == "VRSGD" else sgd if c.lr == 0.01 else control
            end = ends[c.seed] if isinstance(ends, list) else ends
            lam = 3.0 if c.optimizer == "VRSGD" else None
            results[c.name] = result(c, [2.0] * epochs + [end], 1.0, lam=lam)
    return made, analyze_reproduction(made, results)


@pytest.mark.parametrize("vr", [0.5, 1.5])
@pytest.mark.parametrize(("epochs", "seeds"), [(1, 3), (3, 1), (1, 1), (2, 2), (20, 5), (1, 6)])
def test_one_seed_or_one_epoch_reproduces_nothing(epochs, seeds, vr):
    """Nor does it refute anything: too few say neither."""
    _, found = reproduced(epochs, seeds, 1.0, vr)
    (said,) = found["verdict"]
    assert said["kind"] == "unknown"
    assert "too few to say that the paper's claim reproduces" in said["headline"]
    assert "reproduces." not in said["headline"]
    assert "does not reproduce" not in " ".join(said.values())
    assert any("use --seeds 6 or more" in w for w in found["warnings"]) == (seeds < 6)


def test_a_tie_does_not_refute():
    _, found = reproduced(20, 10, 1.0, [0.5] * 9 + [1.0])
    (said,) = found["verdict"]
    assert said["kind"] == "reproduced"
    assert "lower on 9 of 10 seeds" in said["headline"]
    assert "95 % interval −0.500 to −0.500" in said["headline"]


def test_a_broken_seed_does_not_decide():
    _, found = reproduced(20, 10, 1.0, [0.5] * 9 + [90.0], [0.5] * 9 + [80.0])
    (said,) = found["verdict"]
    assert said["kind"] == "explained"
    assert "100 % of the gain" in said["speed"]
    assert "VR-SGD needs 20 epochs for what SGD reaches in 20" in said["headline"]


def test_no_detectable_difference_is_no_refutation():
    _, found = reproduced(20, 6, 1.0, [0.5, 1.5] * 3)
    (said,) = found["verdict"]
    assert said["kind"] == "same"
    assert "no detectable difference" in said["headline"]
    assert "does not reproduce" not in said["headline"]


def test_a_part_of_the_gain_is_no_explanation():
    """The control's gain is smaller, but too scattered to be told from VR-SGD's."""
    _, found = reproduced(20, 6, 1.0, 0.5, [0.3, 0.4, 0.8, 0.8, 0.9, 0.9])
    (said,) = found["verdict"]
    assert said["kind"] == "reproduced"
    assert "cannot be told" in said["speed"]


def test_numbers_of_a_reproduction_are_words_and_a_table():
    made, found = reproduced(1, 1, 1.0, 0.5)
    words = text(found)
    assert "after 1 epoch:" in words
    assert "1 epochs" not in words
    shown = made.terminal_table(found)
    assert max(map(len, shown.splitlines())) <= 100
    assert "VR-SGD, averaged history" in shown
    assert "0 of 1" in shown
    assert made.terminal_table({"arms": []}) == ""
    part = reproduced(2, 6, 1.0, 0.5)[1]
    assert "2 of the experiment's 20 epochs" in text(part)
    assert "of the experiment's" not in text(reproduced(20, 6, 1.0, 0.5)[1])


@pytest.mark.parametrize("name", ["fashion-mnist", "cifar10"])
def test_what_is_published_of_a_reproduction_says_no_more_than_it_would_today(name):
    saved = json.loads(Path(f"docs/results/{name}/results.json").read_text())
    assert Reproduction.of(saved["arguments"]).seeds == 3
    assert saved["verdict"] == [
        verdict_of_reproduction(saved["arms"], saved["arguments"]["epochs"])
    ]
    assert saved["verdict"][0]["kind"] == "unknown"


def test_a_run_that_broke_is_counted_and_a_median_stands_beside_the_mean():
    def broke(c):
        return 1.9 if c.optimizer == "VRSGD" and c.seed == FRESH + 3 else 1.0

    results = filled(SMALL, best_at(0.1), lambda c: broke(c) + noise(c))
    for arm in SMALL.arms(results):
        for config in arm.configs:
            seen = results[config.name]["evaluations"]["train_loss"]
            seen[0], seen[-1] = 2.3, broke(config)
    found = analyze(SMALL, results)
    counts = {arm["name"]: sum(arm["broke"]) for arm in found["arms"]}
    assert counts["VRSGD"] == 1
    assert counts["SGD"] == 0
    headline = found["verdict"][0]["headline"]
    assert "VRSGD broke in 1 of 8" in headline
    assert "medians 1.0" in headline
    assert any("VRSGD broke in 1 of 8 runs" in w for w in found["warnings"])
    table = SMALL.terminal_table(found)
    assert "1 of 8" in table
    assert max(map(len, table.splitlines())) <= 100


@pytest.mark.skipif(not os.environ.get("VARREG_DATA"), reason="needs the data, in $VARREG_DATA")
def test_the_reproduction_trains_on_all_of_the_training_data():
    from varreg.lab.tasks.lookup import load

    splits = load("fashion-mnist:valid=0", None)
    assert [len(s) for s in splits] == [60_000, 0, 10_000]
    assert splits.train.x.flatten(1).norm(dim=1).sub(1).abs().max() < 1e-5
