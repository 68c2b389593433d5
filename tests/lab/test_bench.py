"""`varreg bench`, and the scripts in benchmarks/. What is tested is what they say, never how long
anything takes.
"""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from benchmarks import first_step, growth, growth_figures, noise_truth, optimizer_cost, peers
from tools.tables import speed
from tools.tables.__main__ import main as print_table
from typer.testing import CliRunner

import varreg
from varreg import backends
from varreg.cli import app, main
from varreg.engine.contribution import Outer
from varreg.lab import environment
from varreg.lab.bench import costs, timing
from varreg.lab.bench.bench_plan import Plan, arms_of, base_of
from varreg.lab.bench.output import profiles, results, sentences
from varreg.lab.bench.single_samples import by_single_samples, check_moments
from varreg.lab.bench.timing import Peak, Ratio, quantile, ratio, rounds
from varreg.lab.bench.training import Training
from varreg.lab.bench.user_workload import UserWorkload
from varreg.lab.bench.workloads import WORKLOADS, YARDSTICK, Workload, built, images

TINY = ("--input", "3,4", "--classes", "3", "--batch-size", "16")
QUICK = ("--seconds", "0.02", "--threads", "1")


def workload(
    model=lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3)), batch=10
) -> Workload:
    return Workload("tiny", model, images(batch, 3, 4, classes=3))


def run(*arguments: str):
    return CliRunner().invoke(app, ["bench", *arguments])


# ---- ratios
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 5, 10])
@pytest.mark.parametrize("q", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_quantiles(n, q):
    values = torch.randn(n)
    assert quantile(values.tolist(), q) == pytest.approx(float(values.quantile(q)))


def test_ratios_are_paired():
    """A machine that is ten times slower for a while changes nothing."""
    plain = [1.0, 10.0, 1.0, 10.0, 2.0]
    assert ratio([1.5 * t for t in plain], plain) == pytest.approx((1.5, 1.5, 1.5))
    assert str(ratio([1.0, 1.2, 1.4], [1.0, 1.0, 1.0])) == "1.20 (1.04–1.36)"


def test_every_step_runs_once_in_each_round_and_none_has_the_better_place():
    ran: list[str] = []
    steps = {name: (lambda name=name: ran.append(name) or (0.25, 0.5)) for name in "abc"}
    shares = []
    times = rounds(steps, 0.0, least=200, warm_up=1, tick=shares.append)
    ran = ran[3:]
    orders = [tuple(ran[i : i + 3]) for i in range(0, len(ran), 3)]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert all(order == other[::-1] for order, other in zip(orders[::2], orders[1::2], strict=True))
    assert set(orders) == set(itertools.permutations("abc"))
    assert {name: len(found) for name, found in times.items()} == dict.fromkeys("abc", 200)
    assert timing.totals(times["a"][:2]) == [0.75, 0.75]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_parts_of_a_step_are_timed_in_their_order():
    ran: list[int] = []
    parts = timing.timed(lambda: ran.append(1), lambda: ran.append(2))()
    assert ran == [1, 2]
    assert len(parts) == 2
    assert min(parts) >= 0


# ---- tables
# --------------------------------------------------------------------------------------------------

ROW = {
    "workload": "paper's CNN",
    "optimizer": "VRSGD:momentum=0.9",
    "base": "SGD:momentum=0.9",
    "rounds": 7,
    "ratio": {"exact": Ratio(1.128, 1.1, 1.2), "groups=8": Ratio(0.999, 0.98, 1.02)},
    "milliseconds": {"plain": 10.0, "exact": 11.3, "groups=8": 10.0},
    "phases": {
        arm: {"forward": 3.0, "backward": 6.0, "step": 1.0}
        for arm in ("plain", "exact", "groups=8")
    },
    "bytes": {
        "plain": Peak(100 << 20, 190 << 20),
        "exact": Peak(120 << 20, 210 << 20),
        "groups=8": None,
    },
    "operations": {
        "plain": {"aten::mm": 8.0},
        "exact": {"aten::mm": 8.0, "aten::bmm": 2.5},
        "groups=8": {"aten::mm": 12.0},
    },
}


def test_the_table():
    rows = [ROW, {**ROW, "optimizer": "VRAdam", "base": "Adam", "bytes": {}}]
    head, _, name, first, second = results(rows).splitlines()
    assert head.split("  ")[0] == "a step with"
    assert name == "paper's CNN"  # it is said once
    assert "1.13 (1.10–1.20)" in first
    assert "1.20, +20 MiB" in first
    assert first.endswith("-")
    assert second.startswith("  VRAdam")
    rows = speed.bench({"rows": [ROW]}).splitlines()
    assert rows[2].startswith("| paper's CNN | `VRSGD` | 10.0 | 1.13 (1.10–1.20)")


def test_the_table_fits_into_100_columns():
    """Of the usual arms in one part; of more, memory is a table of its own."""
    long = {**ROW, "workload": "ResNet-18, width 32, GroupNorm, batch 32, and many more words"}
    assert max(map(len, results([ROW, long]).splitlines())) <= 100
    ratio = {**ROW["ratio"], "groups=16": Ratio(1.128, 1.1, 1.2)}
    memory = {arm: Peak(120 << 20, 210 << 20) for arm in ("plain", *ratio)}
    wide = results([{**long, "ratio": ratio, "bytes": memory}])
    assert max(map(len, wide.splitlines())) <= 100
    assert wide.count(long["workload"]) == 2
    assert "memory, groups=16" in wide


def test_the_sentence():
    expected = (
        "paper's CNN: with VRSGD:momentum=0.9, exact moments and λ cost 13 % of a step "
        "(10 to 20 %), those of 8 groups cost nothing that could be measured (−2 to 2 %)."
    )
    assert sentences([ROW]) == expected


def test_the_profile():
    said = profiles(ROW)
    assert [line.split() for line in said.splitlines() if line.startswith("backward")] == [
        ["backward", "6.00", "6.00", "6.00"]
    ]
    operations = said.partition("operation ")[2].splitlines()[2:]
    assert operations[0].split() == ["aten::mm", "8.00", "8.00", "12.00"]  # grew by 4
    assert operations[1].split() == ["aten::bmm", "0.00", "2.50", "0.00"]
    assert operations[-1].split()[-3:] == ["2.00", "0.80", "0.00"]


def test_the_profile_of_a_device_has_its_kernels():
    kernels = {"plain": {"gemm": 1.0}, "exact": {"outer_kernel": 2.0}, "groups=8": {}}
    said = profiles({**ROW, "kernels": kernels}).partition("kernel ")[2].splitlines()[2:]
    assert said[0].split() == ["outer_kernel", "0.00", "2.00", "0.00"]
    assert said[1].split() == ["gemm", "1.00", "0.00", "0.00"]


def test_what_the_profiler_records(monkeypatch):
    CPU, CUDA = torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA
    monkeypatch.setattr(torch.profiler, "supported_activities", lambda: {CPU, CUDA})
    assert costs.activities("cuda:0") == [CPU, CUDA]
    assert costs.activities("cpu") == costs.activities("mps") == [CPU]
    monkeypatch.setattr(torch.profiler, "supported_activities", lambda: {CPU})
    assert costs.activities("cuda") == [CPU]
    on_host, kernels = costs.operations(lambda: torch.ones(3) + 1, steps=1)
    assert on_host["aten::add"] > 0
    assert not kernels


def test_a_record_of_a_device_says_which_kernels_served_it(monkeypatch):
    assert environment.device_kernels("mps") == {
        "status": "there are no kernels for mps",
        "triton": False,
    }
    triton = pytest.importorskip("varreg.triton", exc_type=ImportError)
    monkeypatch.setitem(backends.BACKENDS, "mps", triton)
    found = environment.device_kernels("mps")
    assert found["triton"]
    assert found["precision"] == "ieee"
    assert len(found["tile"]) == 4
    assert found["status"] in environment._kernels("mps")
    assert ", ieee, tile 32×32×16, 4 warps" in environment._kernels("mps")


# ---- what is compared
# --------------------------------------------------------------------------------------------------


def test_the_base_has_the_options_that_it_knows():
    assert base_of("VRAdam:betas=(0.8, 0.9),s=3,variance=direct") == ("Adam", {"betas": (0.8, 0.9)})
    assert base_of("VRSGD") == ("SGD", {})


def test_groups():
    assert arms_of(" 4, exact,4") == ("groups=4", "exact")
    assert arms_of("exact,model") == ("exact", "per=model")


@pytest.mark.parametrize(("arm", "momentum"), [("plain", 0.9), ("exact", 0.9), ("groups=4", 0.9)])
def test_a_training_step(arm, momentum):
    training = Training(workload(), "VRSGD:momentum=0.9", arm)
    assert isinstance(training.optimizer, torch.optim.SGD if arm == "plain" else varreg.VRSGD)
    assert training.optimizer.param_groups[0]["momentum"] == momentum
    assert len(training.timed()()) == 3
    (p, *_) = training.model.parameters()
    assert (varreg.moments(p) is None) == (arm == "plain")
    assert p.grad is not None


def test_all_workloads_can_be_made():
    assert len(YARDSTICK) == 4 < len(WORKLOADS) == 6
    for w in WORKLOADS.values():
        x, y = w.batch()
        assert len(x) == len(y)
        assert sum(p.numel() for p in w.make().parameters()) > 10_000


# ---- are the numbers right?
# ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [10, 7])
def test_single_samples_by_definition(batch):
    """Mean and variance, exact and of uneven groups, as torch has them for gradients in a row."""
    w = workload(batch=batch)
    model, x, y = built(w)
    rows = []
    for i in range(batch):
        model.zero_grad()
        w.loss(model(x[i : i + 1]), y[i : i + 1]).backward()
        rows.append(model[1].weight.grad.clone())
    rows = torch.stack(rows)
    exact, grouped = by_single_samples(w, [batch, 3])
    assert torch.allclose(exact["1.weight"][0], rows.mean(0))
    assert torch.allclose(exact["1.weight"][1], rows.var(0, unbiased=False))
    parts = rows.tensor_split(3)
    between = sum(len(part) * (part.mean(0) - rows.mean(0)) ** 2 for part in parts) / 2
    assert torch.allclose(grouped["1.weight"][1], (batch - 1) / batch * between)


def test_wrong_numbers_are_never_timed(monkeypatch):
    check_moments(workload(), ["exact", "groups=4"])
    right = Outer.sums_with_bias

    def too_large(self):
        (total, square, *copies), bias = right(self)
        return (total, square * 1.3, *copies), bias

    monkeypatch.setattr(Outer, "sums_with_bias", too_large)
    with pytest.raises(
        RuntimeError,
        match=r"varreg: tiny, exact: the variance of the gradients of '1.weight' is off by .* "
        r"please report",
    ):
        check_moments(workload(), ["exact"])
    measured = []
    monkeypatch.setattr(costs, "measure", lambda *arguments: measured.append(1))
    monkeypatch.setattr(costs, "workload_of", lambda case, device: workload())
    with pytest.raises(RuntimeError, match="off by"):
        list(costs.run(Plan(("tiny",), ("VRSGD",), ("exact",), 0.1, 1, False, False)))
    assert not measured


def test_moments_that_are_missing_are_found_out(monkeypatch):
    monkeypatch.setattr(varreg, "moments", lambda p: None)
    with pytest.raises(
        RuntimeError, match=r"the mean of the gradients of '1.weight' is off by 100.0%"
    ):
        check_moments(workload(), ["exact"])


def test_too_few_samples_for_so_many_groups():
    with pytest.raises(
        ValueError,
        match=r"groups=8 needs a batch of at least 8 samples; tiny has 7\. Use --groups exact",
    ):
        check_moments(workload(batch=7), ["exact", "groups=8"])


# ---- the command
# --------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _own_models(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "support")


def test_a_model_of_ones_own(tmp_path):
    out = tmp_path / "new" / "bench.json"
    spec = (
        "--optimizers",
        "VRSGD:momentum=0.9 VRAdam",
        "--profile",
        "--no-memory",
        "--json",
        str(out),
    )
    done = run("--model", "own_model:Net,width=4", *TINY, *QUICK, *spec)
    assert done.exit_code == 0, done.output
    said = done.output
    assert (
        "own_model:Net,width=4: moments against a loop over samples\nown_model:Net,width=4: "
        "VRSGD:momentum=0.9\n" in said
    )
    assert "memory" not in said.partition("plain, ms")[2].partition("\n")[0]
    assert "1 thread on " in said
    assert "native library" in said
    assert said.count("exact moments and λ cost ") == 2
    assert "outside of them" in said
    assert "Optimizer.step#VRAdam.step" in said

    found = json.loads(out.read_text())
    assert {"commit", "torch", "processor", "kernels"} < set(found["environment"])
    assert found["environment"]["threads"] == 1
    assert found["measured"] in said
    assert [(row["optimizer"], row["base"]) for row in found["rows"]] == [
        ("VRSGD:momentum=0.9", "SGD:momentum=0.9"),
        ("VRAdam", "Adam"),
    ]
    for row in found["rows"]:
        assert row["rounds"] >= 5
        assert list(row["ratio"]) == ["exact", "groups=8"]
        for middle, low, high in row["ratio"].values():
            assert 0 < low <= middle <= high
        for arm in ("plain", "exact", "groups=8"):
            phases = row["phases"][arm]
            assert list(phases) == ["forward", "backward", "step"]
            assert all(0 < ms < math.inf for ms in phases.values())
    assert speed.bench(found).startswith("|  | a step with | plain, ms |")
    assert [path.name for path in out.parent.iterdir()] == ["bench.json"]


@pytest.mark.parametrize(
    "given",
    [
        ("own_model:ready", "--batch", "own_model:batch,samples=12"),
        ("own_model:ready", "--batch", "own_model:loader"),
        ("own_model:Two", "--batch", "own_model:two_inputs", "--loss", "own_model:both"),
        ("own_model:Two", "--batch", "own_model:named_inputs", "--loss", "own_model:both"),
        ("own_model:Net", *TINY, "--loss", "torch.nn:CrossEntropyLoss,label_smoothing=0.1"),
    ],
)
def test_ways_to_name_them(given):
    done = run(
        "--model", *given, *QUICK, "--optimizers", "VRSGD", "--groups", "exact", "--no-memory"
    )
    assert done.exit_code == 0, done.output + repr(done.exception)
    assert "exact moments and λ cost" in done.output
    assert "groups=8" not in done.output


NET = ("--model", "own_model:Net")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("--only", "VGG"),
            "no workload has 'VGG' in its name; there are: paper's CNN, batch 100; LeNet",
        ),
        (("--only", "GPT", *NET), "Leave one of them out"),
        (("--seconds", "0"), "--seconds must be more than 0; got 0"),
        (("--groups", "exact,1"), "--groups must be exact, model or numbers of groups"),
        (("--groups", "all"), "as in exact,8; got 'all'"),
        (
            ("--optimizers", "VRSDG"),
            "there is no regularized optimizer 'VRSDG'; there are: VRSGD, .* Did you mean 'VRSGD'",
        ),
        (("--optimizers", "SGD"), "there is no regularized optimizer 'SGD'"),
        (("--optimizers", "VRSGD:momentun=1"), "Did you mean 'momentum'"),
        (("--json", "."), "--json must be a file, and . is a folder"),
        (("--json", "/proc/nowhere/x.json"), "results cannot be written to /proc/nowhere"),
        (
            ("--batch", "own_model:batch"),
            "--batch is for a model of your own: --model package.module:name",
        ),
        (
            (*NET, "--batch", "own_model:batch", "--classes", "3"),
            "--batch gives the whole batch, and --classes a part of a random one",
        ),
        (
            NET,
            (
                "--model needs a batch: --batch package.module:function.* or .* as in --input "
                "3,32,32 "
                "--classes 10"
            ),
        ),
        (
            (*NET, "--input", "3,x", "--classes", "3"),
            "--input must be the shape of one input, as in 3,32,32; got '3,x'",
        ),
        ((*NET, "--input", "3,0", "--classes", "3"), "--input must be the shape of one input"),
        (
            ("--model", "resnet", *TINY),
            "--model must be package.module:name or path.py:name, as in my_file:my_function",
        ),
        (
            ("--model", "no_such_file:Net", *TINY),
            r"cannot be imported \(ModuleNotFoundError.* Modules are looked for in this folder",
        ),
        (
            ("--model", "own_model:Nt", *TINY),
            "module 'own_model' has no function 'Nt'. Did you mean 'Net'",
        ),
        (
            ("--model", "own_model:seven", *TINY),
            "must be a class or function that makes a model, or a model; got int",
        ),
        (
            ("--model", "own_model:number", *TINY),
            "--model own_model:number must make a torch.nn.Module, and made int",
        ),
        (
            ("--model", "own_model:needs", *TINY),
            "missing a required argument: 'width'. It takes width",
        ),
        (
            ("--model", "own_model:Net,depth=2", *TINY),
            "unexpected keyword argument 'depth'. It takes width=8",
        ),
        (
            ("--model", "own_model:ready,width=2", *TINY),
            "a model that exists already, takes no options; got width",
        ),
        (
            ("--model", "own_model:Fails", *TINY),
            "--model own_model:Fails failed: OSError: no weights here",
        ),
        (
            ("--model", "own_model:normed", *TINY),
            "'2' .BatchNorm1d. is BatchNorm in training.*Use GroupNorm or LayerNorm",
        ),
        (("--model", "own_model:noisy", *TINY), "own_model:noisy is random also in eval mode"),
        (
            ("--model", "torch.nn:ReLU", *TINY),
            "cannot be used on an output|does not depend on any parameter",
        ),
        (
            (*NET, "--input", "5", "--classes", "3"),
            r"--model own_model:Net does not take the batch \(RuntimeError: mat1 and mat2",
        ),
        (
            (*NET, "--input", "12", "--classes", "9", "--batch-size", "99"),
            "cannot be used on an output of shape .99, 3. and targets",
        ),
        ((*NET, "--batch", "own_model:number"), r"must give \(inputs, targets\), and gave int"),
        (
            (*NET, "--batch", "own_model:three"),
            r"must give \(inputs, targets\), and gave tuple of 3",
        ),
        ((*NET, "--batch", "own_model:seven"), r"must give \(inputs, targets\), and gave int"),
        (
            (*NET, "--batch", "own_model:loader,x=1"),
            "which is not a function, takes no options; got x",
        ),
        ((*NET, "--batch", "own_model:uneven"), r"got \(4, 12\) as inputs and \(5,\) as targets"),
        ((*NET, "--batch", "own_model:words"), r"got \(4, 12\) as inputs and str as targets"),
        ((*NET, "--batch", "own_model:single"), "two or more samples"),
        (
            (*NET, *TINY, "--loss", "own_model:seven"),
            "must be a function of output and targets; got int",
        ),
        (
            (*NET, *TINY, "--loss", "own_model:each"),
            r"must be a single number, a mean over samples; got shape \(16,\)",
        ),
        (
            (*NET, *TINY, "--loss", "own_model:item"),
            "must be a single number, a mean over samples; got float",
        ),
        (
            (*NET, *TINY, "--loss", "own_model:total"),
            "--loss own_model:total is not a mean over samples",
        ),
        ((*NET, *TINY, "--loss", "own_model:endless"), "is inf: there is nothing to measure"),
        (
            (*NET, *TINY, "--loss", "own_model:constant"),
            "does not depend on any parameter of --model own_model:Net",
        ),
        (
            (*NET, *TINY, "--loss", "torch.nn.functional:mse_loss"),
            "cannot be used on an output of shape .* Name another: --loss",
        ),
        (
            (*NET, *TINY[:-1], "4"),
            "groups=8 needs a batch of at least 8 samples; own_model:Net has 4",
        ),
    ],
)
@pytest.mark.filterwarnings(
    "ignore:Using a target size"
)  # torch's own, about the mean squared error
def test_bad_input(arguments, words, capsys, monkeypatch):
    """Each says what was expected, and what came; through `main`, as people see it."""
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "varreg",
            "bench",
            *arguments,
            *([] if "--seconds" in arguments else QUICK),
            "--no-memory",
        ],
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit, match=words) as stopped:
        main()
    assert str(stopped.value).startswith("varreg: ")
    assert "plain, ms" not in capsys.readouterr().out


def test_stopped(monkeypatch, tmp_path):
    """What was measured until then is shown, and no file is written."""

    def two(plan, told):
        yield ROW
        raise KeyboardInterrupt

    monkeypatch.setattr(costs, "run", two)
    done = run("--json", str(tmp_path / "x.json"))
    assert done.exit_code == 130
    assert "1.13 (1.10–1.20)" in done.output
    assert "Stopped; nothing was saved." in done.output
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(not timing.PEAK_IS_KNOWN, reason="needs Linux")
def test_memory_in_processes_of_their_own(tmp_path):
    """The example of the documentation, as a user gives the command, in the folder of the model."""
    page = (Path(__file__).parents[2] / "docs" / "evidence" / "speed.md").read_text()
    (tmp_path / "mine.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    command = [
        sys.executable,
        "-m",
        "varreg",
        "bench",
        "--model",
        "mine:Net,width=64",
        "--batch",
        "mine:batch",
        *QUICK,
    ]
    done = subprocess.run(
        [*command, "--optimizers", "VRSGD", "--groups", "exact", "--json", "x.json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "x.json").read_text())["rows"]
    plain, ours = (row["bytes"][arm][0] for arm in ("plain", "exact"))
    assert min(plain, ours) > 2 * 64 * 64 * 15 * 15 * 4  # what the convolution and its norm put out
    assert " MiB" in done.stdout


def test_elsewhere_memory_is_not_known(monkeypatch):
    monkeypatch.setattr(timing, "PEAK_IS_KNOWN", False)
    assert costs.memory(YARDSTICK[0], "VRSGD", "exact", 1) is None


def test_own_is_words_alone():
    """Another process can build the same from it."""
    own = UserWorkload("own_model:Net", "own_model:batch")
    first, second = (own.workload() for _ in range(2))
    for a, b in zip(built(first)[0].parameters(), built(second)[0].parameters(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(built(first)[1], built(second)[1])


# ---- benchmarks/
# --------------------------------------------------------------------------------------------------


def test_peers(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(WORKLOADS, "tiny", workload())
    arms = ["varreg", "varreg groups=8", "vmap(grad)", peers.LOOP]
    peers.main(
        [
            "--only",
            "tiny",
            "--arms",
            *arms,
            "--seconds",
            "0.01",
            "--threads",
            "1",
            "--no-memory",
            "--json",
            str(tmp_path / "p"),
        ]
    )
    said = capsys.readouterr().out
    assert "| vmap(grad) | " in said
    print_table(["peers", str(tmp_path / "p")])
    assert capsys.readouterr().out in said


def test_a_peer_that_is_wrong_is_not_timed(monkeypatch):
    def off(w):
        step, read = peers.vmap(w)
        return step, lambda: [2 * t for t in read()]

    def half(w):
        step, read = peers.vmap(w)
        return step, lambda: read()[:1]

    monkeypatch.setitem(peers.ARMS, "off", off)
    monkeypatch.setitem(peers.ARMS, "half", half)
    rows = peers.measure(workload(), ["plain", "off", "half"], 0.0)
    assert rows["off"] == {"error": "second moments are off by 100%"}
    assert rows["half"] == {"error": "gives moments for 1 of 2 parameters"}
    assert rows["plain"]["ratio"] == (1.0, 1.0, 1.0)


def test_optimizers(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(WORKLOADS, "tiny", workload())
    optimizer_cost.main(
        ["--only", "tiny", "--seconds", "0", "--threads", "1", "--json", str(tmp_path / "o")]
    )
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(lines) == 2 + len(optimizer_cost.SPECS) + 1
    found = json.loads((tmp_path / "o").read_text())["results"]["tiny"]
    assert found["VR SGD, momentum"]["state"] > found["SGD, momentum"]["state"] == 1


@pytest.mark.parametrize(
    ("make", "escapes"), [(lambda: first_step.Fourier(4, 1), 0), (lambda: first_step.Checked(4), 2)]
)
def test_first_step(monkeypatch, make, escapes):
    """Its own models are tried as they say, and give moments."""
    batch = images(3, 1, 28, 28)
    monkeypatch.setitem(first_step.MODELS, "tiny", Workload("tiny", make, batch))
    row = first_step.measure("tiny")
    assert row["name"] == "tiny"
    assert min(row["plain"], row["first"], row["warm"]) > 0
    model = make()
    with varreg.observe(model) as observer:
        model(batch()[0]).square().mean().backward()
        assert all(varreg.moments(p) is not None for p in model.parameters())
        assert len(observer.tracer.trace.escapes) == escapes


def test_growth(monkeypatch, tmp_path, capsys):
    """With a tool that is too slow at the second point, and one that is wrong."""
    line = growth.Line("tiny", "batch", lambda batch: workload(batch=batch), (8, 16))

    clock = [0.0]  # so that no machine is too slow for the first point

    def slow(w):
        step, read = peers.vmap(w)

        def slowly():
            step()
            clock[0] += 0.1 * (len(w.batch()[0]) > 8)

        return slowly, read

    monkeypatch.setattr(growth, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(growth, "LINES", {"tiny: batch": line})
    monkeypatch.setitem(peers.ARMS, "vmap(grad)", slow)
    monkeypatch.setitem(peers.ARMS, "Opacus", lambda w: (lambda: None, list))
    for module in (growth, growth_figures):
        monkeypatch.setattr(module, "PEERS", {"vmap(grad)": "vmap(grad)", "Opacus": "Opacus"})
    out = tmp_path / "growth.json"
    arguments = [
        "--points",
        "2",
        "--seconds",
        "0",
        "--threads",
        "1",
        "--patience",
        "0.09",
        "--out",
        str(out),
        "--figures",
        str(tmp_path),
    ]
    growth.main(arguments)
    found = json.loads(out.read_text())["lines"]["tiny: batch"]
    assert "ratio" in found["points"][0]["vmap(grad)"]
    assert found["points"][1]["vmap(grad)"]["error"] == "takes 0.1 s"
    assert found["points"][0]["Opacus"]["error"] == "gives moments for 0 of 2 parameters"
    assert all(point[arm]["ratio"][0] > 0 for point in found["points"] for arm in growth.OURS)
    drawn = (tmp_path / "growth.svg").read_text()
    assert "varreg, exact" in drawn
    assert "from 16: takes 0.1 s" in drawn
    capsys.readouterr()
    growth.main([*arguments, "--draw"])
    assert (tmp_path / "growth.svg").read_text() == drawn


def test_the_figure_of_memory():
    points = [
        {
            "plain": 5 << 20,
            "exact": 6 << 20,
            "groups=8": 6 << 20,
            **{tool: {"error": "raises"} for tool in growth.PEERS},
        }
    ]
    points += [{**points[0], "Opacus": 90 << 20}]
    line = {"model": "tiny", "values": [16, 64], "points": points, "parameters": 1000}
    figure = growth_figures.memories({"memory": {"tiny": line}})
    assert {text.get_text() for text in figure.axes[0].texts} >= {
        "varreg, exact",
        "plain step",
        "Opacus",
        "batch × parameters",
    }


@pytest.mark.skipif(not timing.PEAK_IS_KNOWN, reason="needs Linux")
def test_too_much_memory_is_an_error_and_nobody_is_ended():
    with pytest.raises(RuntimeError) as raised, growth.limited(0.5):
        torch.empty(1 << 28).fill_(1)  # 2 GiB in double precision
    assert growth.reason(raised.value, growth.Limits(1, 0.5)) == "needs more than 0.5 GB"
    assert torch.empty(1 << 27).numel()  # and afterwards there is as much as before


def test_runs_of_another_file_are_merged_into_the_truth_of_the_noise_scale(tmp_path, monkeypatch):
    """A run of the same title is replaced, whatever its steps are; others stay, in their order."""
    row = {"step": 200, "truth": [1.0, 1.0], "interval": [0.5, 2.0]}
    row |= {key: [1.0, 1.0] for key in noise_truth.ESTIMATORS}
    again = [row | {"along": [2.0, 1.0]}]
    saved = {"runs": {"char-GPT, SGD": [row, row], "char-GPT, Adam": [row]}, "machines": {}}
    more = {"paper's CNN, Fashion-MNIST, Adam": [row], "char-GPT, SGD": again}
    machines = dict.fromkeys(more, "there")
    for name, found in {"results": saved, "more": {"runs": more, "machines": machines}}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(found | noise_truth.settings()))
    arguments = ["--out", str(tmp_path), "--merge", str(tmp_path / "more.json")]
    monkeypatch.setattr("sys.argv", ["noise_truth", *arguments])
    noise_truth.main()
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["runs"] == {**saved["runs"], **more}
    assert next(iter(found["runs"])) == "paper's CNN, Fashion-MNIST, Adam"
    assert found["machines"] == machines
    assert (tmp_path / "ratios.svg").exists()
    other = {"runs": more, "machines": {}, **noise_truth.settings(), "samples": 9}
    with pytest.raises(ValueError, match="the truth is of 9 samples"):
        noise_truth.merged(found, other)
