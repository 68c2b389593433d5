"""The command line, as people use it: in a process of its own where that matters."""

from __future__ import annotations

import csv
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.browser import FLAGS
from tests.support.browser import PROGRAM as BROWSER
from tests.support.commands import LIMIT, command, varreg, wait_for
from tests.support.once import folder_once
from varreg.lab.report.builder import build
from varreg.lab.store import read_json

SMALL = ("--trials", "2", "--tuning-seeds", "1", "--seeds", "2", "--epochs", "2", "--jobs", "2")
COMPARE = ("compare", "SGD", "VRSGD", "--task", "logistic", *SMALL, "--out", "out")
OWN = Path(__file__).parents[1] / "support" / "own_task.py"


@pytest.fixture(autouse=True)
def _single_precision():
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def here(monkeypatch, capsys):
    """Runs a command in this process, which saves starting one; returns all that it said."""

    def run(*arguments: str, cwd: Path, fails: bool = False) -> str:
        monkeypatch.chdir(cwd)
        error = command(*arguments)
        assert bool(error) == fails, error
        return capsys.readouterr().out + error

    return run


@pytest.fixture(scope="module")
def compared(tmp_path_factory) -> tuple[Path, str]:
    """A small comparison, run once for the tests that look at it."""
    return folder_once(tmp_path_factory, "compared", lambda folder: varreg(*COMPARE, cwd=folder))


def test_compare(compared):
    folder, said = compared
    out = folder / "out"
    assert "compare logistic: SGD, VRSGD\n2 trials each, 14 runs in all, to out." in said
    assert (
        len(re.findall(r"^\[\d+/14\] ", said, re.MULTILINE)) == 14
    )  # plain lines, since this is no terminal
    assert "VRSGD" in said
    assert "Report: out/report.html" in said
    found = json.loads((out / "results.json").read_text())
    assert found["complete"]
    assert [arm["name"] for arm in found["arms"]][:2] == ["SGD", "VRSGD"]
    assert (
        found["command"]
        == "varreg compare SGD VRSGD --task logistic --trials 2 --tuning-seeds 1 --seeds 2 "
        "--epochs 2 --jobs 2 --out out"
    )
    for suffix in ("svg", "png"):
        assert (out / "figures" / f"curves-steps.{suffix}").stat().st_size > 1000
    rows = list(csv.DictReader((out / "runs.csv").read_text().splitlines()))
    assert len(rows) == 10
    assert {row["seed"] for row in rows} == {"1000", "1001"}
    curves = list(csv.DictReader((out / "curves.csv").read_text().splitlines()))
    assert len(curves) == 10 * 3  # at the start, and after each of two epochs
    (a_run, *_) = sorted((out / "runs").iterdir())
    config = read_json(a_run / "config.json")
    assert set(config["environment"]) >= {
        "varreg",
        "commit",
        "torch",
        "python",
        "processor",
        "cores",
        "threads",
    }
    assert config["config"]["seed"] in (0, 1000, 1001)


def test_the_same_command_does_not_train_again(compared, here, tmp_path):
    folder = shutil.copytree(compared[0], tmp_path / "copy")
    before = {p: p.stat().st_mtime_ns for p in (folder / "out" / "runs").rglob("result.json")}
    assert len(before) == 14
    said = here(*COMPARE, cwd=folder)
    assert "[1/14]" not in said
    assert before == {
        p: p.stat().st_mtime_ns for p in (folder / "out" / "runs").rglob("result.json")
    }


def test_the_report_is_built_from_saved_results_alone(compared, here, tmp_path):
    folder, _ = compared
    shutil.copytree(folder / "out", tmp_path / "copy")
    first = (tmp_path / "copy" / "report.html").read_bytes()
    for made in ("report.html", "results.json", "runs.csv", "curves.csv"):
        (tmp_path / "copy" / made).unlink()
    assert "Report:" in here("report", "copy", cwd=tmp_path)
    assert (tmp_path / "copy" / "report.html").read_bytes() == first


def test_the_page_needs_no_network(compared):
    html = (compared[0] / "out" / "report.html").read_text()
    assert not re.findall(r'(?:src|href)="(?!#|data:)[^"]*"', html)
    assert "@import" not in html
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', html))
    assert used <= set(ids)


def console(page: Path, folder: Path) -> tuple[str, list[str]]:
    """The page as a browser has it once it is loaded, and what stood on the console."""
    done = subprocess.run(
        [
            BROWSER,
            *FLAGS,
            f"--user-data-dir={folder}",
            "--enable-logging=stderr",
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=True,
    )
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_in_a_browser(compared, tmp_path):
    dom, messages = console(compared[0] / "out" / "report.html", tmp_path / "a")
    assert messages == []
    assert dom.count("<svg") == dom.count("</svg>") >= 6
    assert "VRSGD against SGD on logistic" in dom

    bad = tmp_path / "bad.html"  # and a page with an error is found out
    bad.write_text("<script>undefined_function()</script>")
    assert console(bad, tmp_path / "b")[1]


@pytest.fixture(scope="module")
def theory(tmp_path_factory) -> tuple[Path, str]:
    """All checks, for real: a minute."""
    return folder_once(
        tmp_path_factory, "theory", lambda folder: varreg("theory", "--out", "out", cwd=folder)
    )


@pytest.mark.slow
def test_theory(theory):
    folder, said = theory
    found = json.loads((folder / "out" / "results.json").read_text())
    assert found["unexpected"] == 0
    assert re.search(r"\d+ checks: \d+ hold, \d+ do not", said)
    assert "UNEXPECTED" not in said
    assert "E[v²]/σ² = m − 1" in said  # brackets are no markup
    rows = list(csv.DictReader((folder / "out" / "checks.csv").read_text().splitlines()))
    claims = {
        "Lemma 1",
        "Theorem 1",
        "Theorem 2",
        "Theorem S0",
        "Corollary of S0",
        "Trade-off",
        "S2.2",
        "S2.4",
        "Theorem 3",
        "S1.5",
        "S2.1",
    }
    assert claims < {row["claim"] for row in rows}
    shares = list(csv.DictReader((folder / "out" / "hindsight.csv").read_text().splitlines()))
    assert {"Fashion-MNIST", "CIFAR-10"} < {row["series"].partition(",")[0] for row in shares}
    for name in (
        "lemma-1",
        "rates",
        "trade-off",
        "forms",
        "hindsight-synthetic",
        "hindsight-real",
        "series",
    ):
        assert (folder / "out" / "figures" / f"{name}.svg").stat().st_size > 1000


@pytest.mark.slow
def test_the_theory_page_is_built_again_from_what_was_saved(theory, here, tmp_path):
    shutil.copytree(theory[0] / "out", tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_bytes()
    (tmp_path / "out" / "report.html").unlink()
    here("report", "out", cwd=tmp_path)
    assert (tmp_path / "out" / "report.html").read_bytes() == page


@pytest.mark.slow
def test_theory_says_so_where_a_check_turns_out_otherwise(theory, here, tmp_path):
    shutil.copytree(theory[0] / "out", tmp_path / "out")
    saved = json.loads((tmp_path / "out" / "theory.json").read_text())
    saved["Lemma 1"][0].update(holds=False, verdict="does not hold – UNEXPECTED")
    (tmp_path / "out" / "theory.json").write_text(json.dumps(saved))
    said = here("report", "out", cwd=tmp_path)
    assert "Warning: Lemma 1" in said
    assert build(tmp_path / "out")[1]["unexpected"] == 1


def test_theory_does_not_write_over_an_experiment(compared, here):
    said = here("theory", "--out", "out", cwd=compared[0], fails=True)
    assert "has another experiment in it" in said


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_theory_in_a_browser(theory, tmp_path):
    dom, messages = console(theory[0] / "out" / "report.html", tmp_path / "a")
    assert messages == []
    assert dom.count("<svg") == dom.count("</svg>") == 7


TINY = ("--trials", "2", "--tuning-seeds", "1", "--seeds", "1", "--epochs", "2", "--jobs", "1")
TINY += ("--no-ablations", "--out", "out")
SPIRALS = ("compare", "--task", "own_task:spirals,turns=0.5", *TINY)


@pytest.fixture(scope="module")
def spirals(tmp_path_factory) -> tuple[Path, str]:
    """A small comparison on a task of one's own, in the folder where its module is."""

    def fill(folder: Path) -> str:
        shutil.copy(OWN, folder)
        return varreg(*SPIRALS, cwd=folder)

    return folder_once(tmp_path_factory, "spirals", fill)


def test_own_task(spirals):
    folder, said = spirals
    assert "Report: out/report.html" in said
    assert "two spirals" in (folder / "out" / "report.html").read_text()


def test_own_task_that_changes(spirals, here, tmp_path):
    """A report needs no code of the user's; and results are not taken for those of a task that has
    changed.
    """
    folder = shutil.copytree(spirals[0], tmp_path / "copy")
    (folder / "own_task.py").write_text(OWN.read_text().replace("0.02", "0.03"))
    assert "are not those that the results in out come from" in varreg(
        *SPIRALS, cwd=folder, expect=1
    )
    (folder / "own_task.py").unlink()
    assert "Report: out/report.html" in here("report", "out", cwd=folder)


@pytest.mark.slow
def test_own_task_that_is_random(tmp_path):
    """Seeded before it is loaded, so that all processes have the same data; and one that finds
    other randomness is found out.
    """
    text = OWN.read_text().replace("torch.Generator().manual_seed(seed)", "None")
    early = text.replace(
        "    return Task(",
        "    three = Splits(split(1000, 1), split(300, 2), split(300, 3))\n\n    return Task(",
    )
    (tmp_path / "seeded.py").write_text(
        early.replace("Splits(split(1000, 1), split(300, 2), split(300, 3)),", "three,")
    )
    assert "Report:" in varreg("compare", "--task", "seeded:spirals", *TINY, cwd=tmp_path)
    wild = text.replace(
        "generator = None", "generator = torch.Generator().manual_seed(__import__('os').getpid())"
    )
    (tmp_path / "wild.py").write_text(wild)
    said = varreg("compare", "--task", "wild:spirals", *TINY[:-1], "other", cwd=tmp_path, expect=1)
    assert "gives other data or another model in each process" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("compare", "SGD", "VRSDG"), "Did you mean 'VRSGD'?"),
        (("compare", "--task", "digit"), "Did you mean 'digits'?"),
        (("compare", "--lr", "fast"), "--lr must be low:high"),
        (("compare", "--out", "/proc/nowhere"), "results cannot be written to /proc/nowhere"),
        (
            ("reproduce", "cifar"),
            (
                "there is no experiment 'cifar'; there are: fashion-mnist, cifar10. Did you mean "
                "'cifar10'?"
            ),
        ),
        (("report", "."), "has no experiment.json"),
        (
            ("reproduce", "cifar10", "--data-dir", "nowhere"),
            "the data folder nowhere does not exist",
        ),
    ],
)
def test_bad_input(arguments, words, here, tmp_path, monkeypatch):
    monkeypatch.delenv("VARREG_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    said = here(*arguments, cwd=tmp_path, fails=True)
    assert words in said
    assert "Traceback" not in said


def test_list(here, tmp_path):
    said = here("list", cwd=tmp_path)
    assert "char-gpt" in said
    assert "VRAdam" in said
    assert "LDoG" in said


GATED = ("compare", "--task", "gated_task:spirals", "--trials", "2", "--tuning-seeds", "1")
GATED += ("--seeds", "1", "--epochs", "4", "--jobs", "2", "--out", "out")


def gated_folder(folder: Path) -> Path:
    """Return the folder, with the modules of the task in it."""
    for name in (OWN, OWN.with_name("gated_task.py")):
        shutil.copy(name, folder)
    return folder


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> tuple[Path, str]:
    return folder_once(
        tmp_path_factory,
        "undisturbed",
        lambda folder: varreg(*GATED, cwd=gated_folder(folder)),
    )


def outcome(out: Path) -> dict[str, object]:
    """All results, without the times they took and where."""
    found = {}
    for path in (out / "runs").rglob("result.json"):
        result = read_json(path)
        del result["seconds"], result["evaluations"]["seconds"]
        found[path.parent.name] = repr(result)
    return found


def start(cwd: Path) -> subprocess.Popen[str]:
    # tests that run in the background of a shell ignore Ctrl-C, and so would their children
    return subprocess.Popen(
        [sys.executable, "-m", "varreg", *GATED],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def hears_interrupts(process: subprocess.Popen[str]) -> bool:
    status = Path(f"/proc/{process.pid}/status").read_text()
    ignored = int(re.search(r"^SigIgn:\s*(\w+)", status, re.MULTILINE)[1], 16)
    return not ignored >> (signal.SIGINT - 1) & 1


def test_interrupted_and_killed(undisturbed, tmp_path):
    """Ctrl-C leaves a report and says how to go on; a SIGKILL of the first process ends the others;
    the end is as if nothing had happened.
    """
    hold = gated_folder(tmp_path) / "hold"
    hold.write_text("150")  # in the second run of a process
    process = start(tmp_path)
    wait_for(lambda: list(tmp_path.glob("held-*")) and hears_interrupts(process), process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all processes
    wait_for(lambda: not hears_interrupts(process), process)
    os.killpg(process.pid, signal.SIGINT)  # an impatient person does it twice
    hold.unlink()
    said, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 130, said
    assert "The same command continues" in said
    assert "Traceback" not in said
    assert "partial" in (tmp_path / "out" / "report.html").read_text()

    for held in tmp_path.glob("held-*"):
        held.unlink()
    hold.write_text("20")
    process = start(tmp_path)
    wait_for(lambda: list(tmp_path.glob("held-*")), process)
    process.kill()
    process.communicate(timeout=LIMIT)  # until no process is left that could write
    hold.unlink()
    assert "Report:" in varreg(*GATED, cwd=tmp_path)
    assert outcome(tmp_path / "out") == outcome(undisturbed[0] / "out")


def test_an_experiment_of_a_version_to_come(tmp_path):
    (tmp_path / "experiment.json").write_text('{"kind": "future", "arguments": {}}')
    with pytest.raises(ValueError, match="is not what this version of varreg writes"):
        build(tmp_path)


def without_seconds(value):
    """Of `results.json`: the times that training took, and what is said about them."""
    if isinstance(value, dict):
        return {k: without_seconds(v) for k, v in value.items() if "seconds" not in k}
    if isinstance(value, list):
        return [without_seconds(v) for v in value]
    # the whole number, with the digits before its point: a busy machine takes it from 0.9 to 1.1
    return (
        re.sub(r"\S+ times the seconds \([^)]*\)", "", value) if isinstance(value, str) else value
    )


def test_how_long_training_took_makes_no_other_result():
    words = "It takes 0.8 times the steps (0.5 to 1.2) and {} times the seconds ({}) of SGD."
    fast, slow = words.format("0.97", "0.9 to 1.1, no"), words.format("1.24", "too few seeds")
    assert without_seconds({"a": [fast], "seconds": 1}) == without_seconds({"a": [slow]})
    assert "0.8 times the steps (0.5 to 1.2)" in without_seconds(fast)


@pytest.mark.slow
def test_torchrun_shares_out_the_runs(undisturbed, tmp_path):
    """The same runs, to the bit, and the same report; said once."""
    (gated_folder(tmp_path) / "meet").touch()
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    alone = [*GATED]
    alone[GATED.index("--jobs") + 1] = "1"
    done = subprocess.run(
        [*torchrun, "-m", "varreg", *alone],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    said = (
        "2 processes from torchrun: runs are shared out between them; each run is trained by one "
        "process. 1 at a time in each"
    )
    assert done.stdout.count(said) == 1
    ended = re.findall(r"^\[(\d+)/9\] ", done.stdout, re.MULTILINE)
    assert sorted(map(int, ended)) == list(range(1, 10))
    assert done.stdout.count("Report: out/report.html") == 1
    spans = sorted(
        tuple((run / f"{name}.json").stat().st_mtime_ns for name in ("config", "result"))
        for run in (tmp_path / "out/runs").iterdir()
    )
    assert any(
        end > begin for (_, end), (begin, _) in itertools.pairwise(spans)
    )  # both were at work, at the same time
    assert outcome(tmp_path / "out") == outcome(undisturbed[0] / "out")
    here, there = (
        json.loads((folder / "out" / "results.json").read_text())
        for folder in (tmp_path, undisturbed[0])
    )
    assert here.pop("command") == there.pop("command").replace("--jobs 2", "--jobs 1")
    assert without_seconds(here) == without_seconds(there)
