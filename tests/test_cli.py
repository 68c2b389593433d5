"""The command line, as people use it: each test runs it in a process of its own."""

from __future__ import annotations

import csv
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from varreg.lab.report import build
from varreg.lab.store import read_json

SMALL = ("--trials", "2", "--tuning-seeds", "1", "--seeds", "2", "--epochs", "2", "--jobs", "2")
OWN = Path(__file__).parent / "own_task.py"


def varreg(*arguments: str, cwd: Path, expect: int = 0, **kwargs) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "varreg", *arguments], cwd=cwd, capture_output=True, text=True, timeout=300, check=False, **kwargs
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def compared(tmp_path_factory) -> tuple[Path, str]:
    """A small comparison, run once for the tests that look at it."""
    folder = tmp_path_factory.mktemp("compared")
    return folder, varreg("compare", "SGD", "VRSGD", "--task", "logistic", *SMALL, "--out", "out", cwd=folder)


def test_compare(compared):
    folder, said = compared
    out = folder / "out"
    assert "logistic: SGD, VRSGD; 2 trials each, 14 runs in all." in said
    assert len(re.findall(r"^\[\d+/14\] ", said, re.MULTILINE)) == 14  # plain lines, since this is no terminal
    assert "VRSGD" in said
    assert "Report: out/report.html" in said
    found = json.loads((out / "results.json").read_text())
    assert found["complete"]
    assert [arm["name"] for arm in found["arms"]][:2] == ["SGD", "VRSGD"]
    assert (
        found["command"]
        == "varreg compare SGD VRSGD --task logistic --trials 2 --tuning-seeds 1 --seeds 2 --epochs 2 --jobs 2 --out out"
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
    assert set(config["environment"]) >= {"varreg", "commit", "torch", "python", "processor", "cores", "threads"}
    assert config["config"]["seed"] in (0, 1000, 1001)


def test_the_same_command_does_not_train_again(compared):
    folder, _ = compared
    before = {p: p.stat().st_mtime_ns for p in (folder / "out" / "runs").rglob("result.json")}
    said = varreg("compare", "SGD", "VRSGD", "--task", "logistic", *SMALL, "--out", "out", cwd=folder)
    assert "[1/14]" not in said
    assert before == {p: p.stat().st_mtime_ns for p in (folder / "out" / "runs").rglob("result.json")}


def test_the_report_is_built_from_saved_results_alone(compared, tmp_path):
    folder, _ = compared
    shutil.copytree(folder / "out", tmp_path / "copy")
    first = (tmp_path / "copy" / "report.html").read_bytes()
    for made in ("report.html", "results.json", "runs.csv", "curves.csv"):
        (tmp_path / "copy" / made).unlink()
    assert "Report:" in varreg("report", "copy", cwd=tmp_path)
    assert (tmp_path / "copy" / "report.html").read_bytes() == first


def test_the_page_needs_no_network(compared):
    html = (compared[0] / "out" / "report.html").read_text()
    assert not re.findall(r'(?:src|href)="(?!#|data:)[^"]*"', html)
    assert "@import" not in html
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', html))
    assert used <= set(ids)


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
)


def console(page: Path, folder: Path) -> tuple[str, list[str]]:
    """The page as a browser has it once it is loaded, and what stood on the console."""
    done = subprocess.run(
        [BROWSER, *FLAGS, "--disable-sync", f"--user-data-dir={folder}", "--enable-logging=stderr", "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
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
    folder = tmp_path_factory.mktemp("theory")
    return folder, varreg("theory", "--out", "out", cwd=folder)


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
    for name in ("lemma-1", "rates", "trade-off", "forms", "hindsight-synthetic", "hindsight-real", "series"):
        assert (folder / "out" / "figures" / f"{name}.svg").stat().st_size > 1000


def test_the_theory_page_is_built_again_from_what_was_saved(theory, tmp_path):
    shutil.copytree(theory[0] / "out", tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_bytes()
    (tmp_path / "out" / "report.html").unlink()
    varreg("report", "out", cwd=tmp_path)
    assert (tmp_path / "out" / "report.html").read_bytes() == page


def test_theory_says_so_where_a_check_turns_out_otherwise(theory, tmp_path):
    shutil.copytree(theory[0] / "out", tmp_path / "out")
    saved = json.loads((tmp_path / "out" / "theory.json").read_text())
    saved["Lemma 1"][0].update(holds=False, verdict="does not hold – UNEXPECTED")
    (tmp_path / "out" / "theory.json").write_text(json.dumps(saved))
    said = varreg("report", "out", cwd=tmp_path)
    assert "Warning: Lemma 1" in said
    assert build(tmp_path / "out")[1]["unexpected"] == 1


def test_theory_does_not_write_over_an_experiment(compared):
    said = varreg("theory", "--out", "out", cwd=compared[0], expect=1)
    assert "has another experiment in it" in said


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_theory_in_a_browser(theory, tmp_path):
    dom, messages = console(theory[0] / "out" / "report.html", tmp_path / "a")
    assert messages == []
    assert dom.count("<svg") == dom.count("</svg>") == 7


def test_own_task(tmp_path):
    shutil.copy(OWN, tmp_path / "own_task.py")
    said = varreg("compare", "--task", "own_task:spirals,turns=0.5", *SMALL, "--no-ablations", "--out", "out", cwd=tmp_path)
    assert "Report: out/report.html" in said
    assert "two spirals" in (tmp_path / "out" / "report.html").read_text()


def test_own_task_that_changes(tmp_path):
    """A report needs no code of the user's; and results are not taken for those of a task that has changed."""
    shutil.copy(OWN, tmp_path / "own_task.py")
    command = ("compare", "--task", "own_task:spirals", *SMALL, "--no-ablations", "--out", "out")
    varreg(*command, cwd=tmp_path)
    (tmp_path / "own_task.py").write_text(OWN.read_text().replace("0.02", "0.03"))
    assert "are not those that the results in out come from" in varreg(*command, cwd=tmp_path, expect=1)
    (tmp_path / "own_task.py").unlink()
    assert "Report: out/report.html" in varreg("report", "out", cwd=tmp_path)


def test_own_task_that_is_random(tmp_path):
    """Seeded before it is loaded, so that all processes have the same data; and one that finds other randomness is found out."""
    text = OWN.read_text().replace("torch.Generator().manual_seed(seed)", "None")
    early = text.replace(
        "    return Task(", "    three = Splits(split(1000, 1), split(300, 2), split(300, 3))\n\n    return Task("
    )
    (tmp_path / "seeded.py").write_text(early.replace("Splits(split(1000, 1), split(300, 2), split(300, 3)),", "three,"))
    assert "Report:" in varreg("compare", "--task", "seeded:spirals", *SMALL, "--no-ablations", "--out", "a", cwd=tmp_path)
    wild = text.replace("generator = None", "generator = torch.Generator().manual_seed(__import__('os').getpid())")
    (tmp_path / "wild.py").write_text(wild)
    said = varreg("compare", "--task", "wild:spirals", *SMALL, "--no-ablations", "--out", "b", cwd=tmp_path, expect=1)
    assert "gives other data or another model in each process" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("compare", "SGD", "VRSDG"), "Did you mean 'VRSGD'?"),
        (("compare", "--task", "digit"), "Did you mean 'digits'?"),
        (("compare", "--lr", "fast"), "--lr must be low:high"),
        (("compare", "--out", "/proc/nowhere"), "results cannot be written to /proc/nowhere"),
        (("reproduce", "cifar"), "there is no experiment 'cifar'; there are: fashion-mnist, cifar10. Did you mean 'cifar10'?"),
        (("report", "."), "has no experiment.json"),
        (("reproduce", "cifar10", "--data-dir", "nowhere"), "the data folder nowhere does not exist"),
    ],
)
def test_bad_input(arguments, words, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "VARREG_DATA"} | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    said = varreg(*arguments, cwd=tmp_path, expect=1, env=environment)
    assert words in said
    assert "Traceback" not in said


def test_list(tmp_path):
    said = varreg("list", cwd=tmp_path)
    assert "char-gpt" in said
    assert "VRAdam" in said
    assert "LDoG" in said


LONGER = ("compare", "--trials", "2", "--tuning-seeds", "1", "--seeds", "1", "--epochs", "8", "--jobs", "2", "--out", "out")


def outcome(out: Path) -> dict[str, object]:
    """All results, without the times they took and where."""
    found = {}
    for path in (out / "runs").rglob("result.json"):
        result = read_json(path)
        del result["seconds"], result["evaluations"]["seconds"]
        found[path.parent.name] = repr(result)
    return found


def start(cwd: Path, **kwargs) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "varreg", *LONGER],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def test_interrupted_and_killed(tmp_path):
    """Ctrl-C leaves a report and says how to go on; a SIGKILL of the first process ends the others; the end is as if nothing had happened."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    varreg(*LONGER, cwd=whole)

    process = start(broken)
    wait_for(lambda: list((broken / "out" / "runs").glob("*/config.json")), process)
    time.sleep(1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all processes; and an impatient person does it twice
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "The same command goes on" in said
    assert "Traceback" not in said
    assert "partial" in (broken / "out" / "report.html").read_text()

    process = start(broken)
    time.sleep(random.uniform(4, 8))
    process.kill()
    process.communicate()
    assert "Report:" in varreg(*LONGER, cwd=broken)
    assert outcome(broken / "out") == outcome(whole / "out")


def wait_for(condition, process) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)


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
    return re.sub(r"[^.;,]*\bseconds\b[^.;,]*", "", value) if isinstance(value, str) else value


def test_torchrun_shares_out_the_runs(compared, tmp_path):
    """The same runs, to the bit, and the same report; said once."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    done = subprocess.run(
        [*torchrun, "-m", "varreg", "compare", "SGD", "VRSGD", "--task", "logistic", *SMALL[:-1], "1", "--out", "out"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    said = "2 processes from torchrun: runs are shared out between them; each run is trained by one process. 1 at a time in each"
    assert done.stdout.count(said) == 1
    assert sorted(map(int, re.findall(r"^\[(\d+)/14\] ", done.stdout, re.MULTILINE))) == list(range(1, 15))
    assert done.stdout.count("Report: out/report.html") == 1
    spans = sorted(
        tuple((run / f"{name}.json").stat().st_mtime_ns for name in ("config", "result"))
        for run in (tmp_path / "out/runs").iterdir()
    )
    assert any(end > begin for (_, end), (begin, _) in itertools.pairwise(spans))  # both were at work, at the same time
    assert outcome(tmp_path / "out") == outcome(compared[0] / "out")
    here, there = (json.loads((folder / "out" / "results.json").read_text()) for folder in (tmp_path, compared[0]))
    assert here.pop("command") == there.pop("command").replace("--jobs 2", "--jobs 1")
    assert without_seconds(here) == without_seconds(there)
