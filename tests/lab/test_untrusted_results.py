"""Results of someone else, or damaged ones: nothing of theirs is run, and each file is named with
what to do.
"""

from __future__ import annotations

import csv
import dataclasses
import html.parser
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from tests.support.commands import command
from tests.support.once import folder_once
from varreg.lab import store
from varreg.lab.experiments.compare.plan import Comparison
from varreg.lab.runs.config import Config
from varreg.lab.runs.resume import StoppedError, resume, run
from varreg.lab.runs.run import Run as Going

COMPARE = (
    "compare",
    "SGD",
    "VRSGD",
    "--task",
    "logistic",
    "--trials",
    "2",
    "--tuning-seeds",
    "1",
    "--seeds",
    "2",
)
COMPARE += ("--epochs", "2", "--jobs", "1", "--no-ablations", "--out")
SCRIPT = "<script>alert(1)</script>"
THEORY = {"kind": "theory", "arguments": {}}


@pytest.fixture(autouse=True)
def _single_precision():
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Path:
    """A small comparison, run for real."""
    torch.set_default_dtype(torch.float32)
    made = folder_once(tmp_path_factory, "real", lambda folder: command(*COMPARE, folder / "out"))
    assert made[1] == ""
    return made[0] / "out"


@pytest.fixture
def out(real, tmp_path) -> Path:
    """A copy of it, to be changed."""
    return Path(shutil.copytree(real, tmp_path / "out"))


def change(path: Path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_arguments(folder: Path, **values) -> None:
    path = folder / "experiment.json"
    change(path, arguments=json.loads(path.read_text())["arguments"] | values)


def runs(folder: Path) -> list[Path]:
    return sorted((folder / "runs").iterdir())


# Nothing is run


def disguise(folder: Path, task: str, optimizer: str) -> None:
    """The same results under another task and another name of SGD, as if its runs had been of
    these.
    """
    change_arguments(folder, task=task, optimizers=[optimizer, "VRSGD"])
    options = dict([optimizer.partition(":")[2].split("=", 1)])
    for path in runs(folder):
        result = json.loads((path / "result.json").read_text())
        other = options if result["config"]["optimizer"] == "SGD" else result["config"]["options"]
        result["config"] |= {"task": task, "options": other}
        result["statistics"] = {
            f"{k}{SCRIPT}$\\frac" if "/" in k else k: v for k, v in result["statistics"].items()
        }
        (path / "result.json").write_text(json.dumps(result))
        path.rename(path.parent / Config(**result["config"]).name)


SPY = """
import json, os, sys
from varreg import cli

def report(folder):
    sys.argv = ["varreg", "report", folder]
    try:
        cli.main()
    except SystemExit as end:
        return str(end.code or "")

benign, foreign = sys.argv[1:3]
report(benign)  # whatever varreg itself needs is imported now
seen, on = [], True
RUN = ("import", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn")
RUN += ("subprocess.Popen", "socket.", "pickle.")

def inside(path):
    return (os.path.realpath(path) + os.sep).startswith(os.path.realpath(foreign) + os.sep)

def spy(event, arguments):
    if not on:
        return
    if event.startswith(RUN):
        seen.append([event, repr(arguments[:1])])
    if event == "open" and isinstance(arguments[0], str):
        writes = arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if writes and not inside(arguments[0]):
            seen.append([event, arguments[0]])

modules = set(sys.modules)
sys.addaudithook(spy)
ended = report(foreign)
on = False
new = sorted(set(sys.modules) - modules)
print("SPIED " + json.dumps({"seen": seen, "new": new, "ended": ended}))
"""


def spied(benign: Path, foreign: Path, script: str = SPY) -> dict:
    """What `varreg report` did with a folder that the one before did not need."""
    done = subprocess.run(
        [sys.executable, "-c", script, str(benign), str(foreign)],
        capture_output=True,
        text=True,
        check=False,
        cwd=foreign,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.rpartition("SPIED ")[2])


def evil(folder: Path, mark: Path, *names: str) -> None:
    """Modules in the folder that leave a mark once they are imported."""
    text = f"from pathlib import Path\nPath({str(mark)!r}).write_text('run')\n"
    for name in ("evil", *names):
        (folder / f"{name}.py").write_text(text)


class Tags(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.bad: list[str] = []

    def handle_starttag(self, tag, attributes):
        if tag in ("script", "img", "iframe", "object", "embed") or any(
            name.startswith("on") for name, _ in attributes
        ):
            self.bad.append(self.get_starttag_text() or tag)
        self.bad += [
            value
            for name, value in attributes
            if name in ("src", "href", "xlink:href")
            and value[:5] not in ("data:", "")
            and not value.startswith("#")
        ]


def assert_harmless(page: Path) -> str:
    tags = Tags()
    tags.feed(page.read_text())
    assert tags.bad == []
    return page.read_text()


def test_a_page_of_foreign_results_runs_nothing(real, out, tmp_path):
    """Task, optimizers, words and layers are all hostile, and the page is made: of text."""
    mark = tmp_path / "mark"
    task = f"os:system,command='touch {mark}'"
    disguise(out, task, f"SGD:weight_decay={SCRIPT}")
    environment = {"varreg": SCRIPT, "commit": "\x1b[31m", "cores": {"a": SCRIPT}}
    change(
        out / "experiment.json",
        about=f"<img src=x onerror=alert(1)>{SCRIPT}",
        environment=environment,
    )
    change(out / "experiment.json", command=["varreg", f"</pre>{SCRIPT}"])
    assert spied(real, out) == {"seen": [], "new": [], "ended": ""}
    assert not mark.exists()
    text = assert_harmless(out / "report.html")
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "os:system" in text
    assert "\x1b" not in text
    assert text.count("<svg") >= 5


def test_the_spy_sees(real, out, tmp_path):
    """The same spy on a process that does import what a folder names."""
    named = (
        "sys.path.insert(0, ''); from varreg.lab import specs; "
        "ended = repr(specs.import_name('evil', 'Path')); import evil_too"
    )
    outside = f"open({str(tmp_path / 'outside')!r}, 'w').close()"
    script = SPY.replace("ended = report(foreign)", f"{named}; os.system('true'); {outside}")
    evil(out, tmp_path / "mark", "evil_too")
    found = spied(real, out, script)
    assert {event for event, _ in found["seen"]} == {"import", "os.system", "open"}
    assert found["new"] == ["evil", "evil_too"]
    assert (tmp_path / "mark").exists()


@pytest.mark.parametrize("task", ["os:system,command='touch {mark}'", "evil:task", "nowhere:task"])
@pytest.mark.parametrize("missing", [{"epochs": 0}, {"batch": 0}, {"epochs": 0, "batch": 0}])
def test_a_budget_that_only_the_task_knows_is_refused(task, missing, out, tmp_path, monkeypatch):
    """This is where a task was imported and called."""
    evil(out, tmp_path / "mark")
    monkeypatch.chdir(out)
    monkeypatch.syspath_prepend(str(out))
    change_arguments(out, task=task.format(mark=tmp_path / "mark"), **missing)
    said = command("report", out)
    assert "experiment.json is not what this version of varreg writes" in said
    assert f"0 for '{next(iter(missing))}', which must be a number from 1 up" in said
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"optimizers": ["os.system", "SGD"]}, "there is no optimizer 'os.system'"),
        ({"optimizers": ["SGD:__class__=1", 3]}, "which must be a list of texts"),
        ({"optimizers": ["SGD", "VRSGD:s=word"]}, "s must be a number"),
        ({"optimizers": ["SGD", "VRSGD:per={1: 2}"]}, "per must be a number or a word"),
        ({"optimizers": ["SGD", "VRSGD:per=" + "(" * 2000]}, "a name of 2010 characters"),
        ({"optimizers": ["SGD", "SGD"]}, "two or more different optimizers"),
        ({"optimizers": ["SGD", "VRSGD:per='\\x1b[31m'"]}, "per must be a number or a word"),
        ({"trials": 10**12}, "more than 1,000,000 runs"),
        ({"seeds": 10**12}, "more than 1,000,000 runs"),
        ({"seeds": True}, "true or false for 'seeds', which must be a number from 1 up"),
        ({"lr": [0.1]}, "which must be nothing or two numbers"),
        ({"more": 1}, "an unknown key 'more'"),
    ],
)
def test_arguments_of_an_experiment_are_looked_at(arguments, words, out):
    change_arguments(out, **arguments)
    said = command("report", out)
    assert said.startswith(
        f"varreg: {out}/experiment.json is not what this version of varreg writes"
    )
    assert words in said
    assert "Restore it" in said


def test_modules_in_a_results_folder_are_not_found(out, tmp_path):
    """The command, as it is installed, given within the folder: its jinja2.py is not imported, and
    TeX is not run.
    """
    mark = tmp_path / "mark"
    evil(out, mark, "jinja2", "matplotlib", "csv", "shlex", "typer", "torch")
    entry = tmp_path / "bin" / "start.py"
    entry.parent.mkdir()
    entry.write_text("from varreg.cli import main\nmain()\n")
    (out / "matplotlibrc").write_text(
        "backend: module://evil\ntext.usetex: True\n"
    )  # matplotlib reads it, wherever it is
    (out / "report.html").unlink()
    done = subprocess.run(
        [sys.executable, entry, "report", "."], capture_output=True, text=True, check=False, cwd=out
    )
    assert done.returncode == 0, done.stderr
    assert (out / "report.html").exists()
    assert not mark.exists()


PUBLISHED = Path(__file__).parents[2] / "docs" / "results" / "theory" / "results.json"


@pytest.mark.skipif(not PUBLISHED.exists(), reason="needs the docs")
def test_a_page_of_foreign_theory_runs_nothing(real, tmp_path):
    formula = f"=cmd|'/c calc'!A1{SCRIPT}$\\frac"

    def hostile(value):
        """Hostile words in place of all words but the keys and what is looked up."""
        if isinstance(value, dict):
            return {
                k: formula if k in ("statement", "conditions", "verdict") else hostile(v)
                for k, v in value.items()
            }
        return [hostile(v) for v in value] if isinstance(value, list) else value

    (tmp_path / "experiment.json").write_text(
        json.dumps({**THEORY, "command": ["os:system"], "about": SCRIPT})
    )
    (tmp_path / "theory.json").write_text(json.dumps(hostile(json.loads(PUBLISHED.read_text()))))
    assert spied(real, tmp_path) == {"seen": [], "new": [], "ended": ""}
    text = assert_harmless(tmp_path / "report.html")
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert " checks: " in text  # the verdict comes from the numbers, not from the file
    rows = list(csv.DictReader((tmp_path / "checks.csv").read_text().splitlines()))
    assert {row["statement"] for row in rows} == {"'" + formula}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "os:system", "epochs": 1, "seeds": 1}, "there is no experiment 'os:system'"),
        ({"name": ["cifar10"], "epochs": 1, "seeds": 1}, "a list for 'name', which must be text"),
        (
            {"name": "cifar10", "epochs": "1", "seeds": 1},
            "text for 'epochs', which must be a number from 1 up",
        ),
        ({"name": "cifar10", "epochs": 1, "seeds": 10**12}, "more than 1,000,000 runs"),
        ({"name": "cifar10", "epochs": 1}, "no 'seeds'"),
    ],
)
def test_arguments_of_a_reproduction_are_looked_at(arguments, words, tmp_path):
    path = tmp_path / "experiment.json"
    path.write_text(json.dumps({"kind": "reproduce", "arguments": arguments}))
    said = command("report", tmp_path)
    assert said.startswith(f"varreg: {path} is not what this version of varreg writes")
    assert words in said


def test_an_older_folder_has_a_page_from_its_names_alone(out):
    path = out / "experiment.json"
    about = json.loads(path.read_text())
    path.write_text(json.dumps({key: about[key] for key in ("kind", "arguments")}))
    assert command("report", out) == ""
    text = (out / "report.html").read_text()
    assert "Task logistic. Trials:" in text
    assert "not saved" in text


def test_words_of_a_file_do_not_steer_a_terminal(out, capsys):
    change(out / "experiment.json", kind="\x1b[2J\u202e")
    assert "'\\\\x1b[2J\\\\u202e'" in command("report", out)


# Nothing leads out of the folder


@pytest.mark.parametrize("name", ["figures", "runs", "experiment.json", "a run", "a result"])
def test_a_link_that_leads_out_is_refused(name, out, tmp_path):
    path = {"a run": runs(out)[0], "a result": runs(out)[0] / "result.json"}.get(name, out / name)
    outside = tmp_path / "outside"
    path.rename(outside)
    path.symlink_to(outside)
    before = sorted((p, p.stat().st_mtime_ns) for p in [outside, *outside.rglob("*")])
    said = command("report", out)
    assert (
        f"varreg: {path if name != 'a run' else path / 'result.json'} is a link that leads out of"
        in said
    )
    if name != "experiment.json":
        assert "is a link that leads out of" in command(*COMPARE, out)
    assert before == sorted((p, p.stat().st_mtime_ns) for p in [outside, *outside.rglob("*")])


def test_a_link_in_place_of_a_page_is_replaced(out, tmp_path):
    pages = ("report.html", "results.json", "runs.csv", "curves.csv", "figures/sensitivity.svg")
    for i, name in enumerate(pages):
        (tmp_path / f"outside{i}").write_text("theirs")
        (out / name).unlink()
        (out / name).symlink_to(tmp_path / f"outside{i}")
    assert command("report", out) == ""
    for i, name in enumerate(pages):
        assert (tmp_path / f"outside{i}").read_text() == "theirs", name
        assert not (out / name).is_symlink(), name


def test_a_lock_that_is_a_link_empties_nothing(out, tmp_path):
    (tmp_path / "outside").write_text("theirs")
    (out / ".lock").unlink(missing_ok=True)
    (out / ".lock").symlink_to(tmp_path / "outside")
    assert ".lock is a link that leads out of" in command(*COMPARE, out)
    assert (tmp_path / "outside").read_text() == "theirs"


def test_a_link_without_end(out):
    (out / "figures").rename(out / "old")
    (out / "figures").symlink_to(out / "figures")
    assert "figures" in command("report", out)


def test_a_report_makes_no_folder(tmp_path):
    assert command("report", tmp_path / "typo") == f"varreg: {tmp_path / 'typo'} is not a folder."
    assert not (tmp_path / "typo").exists()


# Damaged files


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def foreign(path: Path) -> None:
    path.write_text('{"name": "something-else", "version": "1.0"}')


def a_list(path: Path) -> None:
    path.write_text("[1, 2, 3]")


def binary(path: Path) -> None:
    path.write_bytes(bytes(range(256)))


def deep(path: Path) -> None:
    path.write_text("[" * 200_000)


def digits(path: Path) -> None:
    path.write_text("9" * 10_000)


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES = [
    (cut, "expected JSON; got "),
    (empty, "expected JSON; got an empty file"),
    (foreign, "got no '"),
    (a_list, "got a list"),
    (binary, "expected JSON; got 'utf-8' codec"),
    (deep, "expected JSON; got brackets within brackets without end"),
    (digits, "expected JSON; got Exceeds the limit"),
    (a_folder, "expected JSON; got a folder"),
    (a_pipe, "expected JSON; got no regular file"),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGES)
@pytest.mark.parametrize("name", ["result.json", "experiment.json"])
def test_a_damaged_file_is_named(name, damage, words, out):
    path = out / name if name == "experiment.json" else runs(out)[1] / name
    damage(path)
    for arguments in (("report", out), (*COMPARE, out)):
        said = command(*arguments)
        assert said.startswith(
            f"varreg: {path} is not what this version of varreg writes: expected "
        )
        assert words in said
        assert said.endswith(
            "Restore it, or choose another folder: without it, the origin of the runs is unknown."
            if name == "experiment.json"
            else "Delete it, and the same command runs this run anew; or restore it."
        )


def test_exit_code_and_no_traceback(out):
    """In a process of its own, as people see it."""
    cut(runs(out)[0] / "result.json")
    done = subprocess.run(
        [sys.executable, "-m", "varreg", "report", out], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("varreg: ")
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1


def shorter(result):
    result["evaluations"]["valid_loss"].pop()


RESULTS = [
    (lambda r: r.pop("evaluations"), "got no 'evaluations'"),
    (lambda r: r.update(step="10"), "got text for 'step', which must be a number from 0 up"),
    (lambda r: r.update(losses=["1"]), "got a list for 'losses', which must be a list of numbers"),
    (lambda r: r["losses"].pop(), "losses of"),
    (shorter, "evaluations of different lengths: 'valid_loss' 2, 'step' 3"),
    (lambda r: [values.pop() for values in r["evaluations"].values()], "2 evaluations up to step"),
    (lambda r: r["evaluations"].pop("test_loss"), "unknown or missing evaluations: 'test_loss'"),
    (lambda r: r["evaluations"].update(f1=[0, 0, 0]), "unknown or missing evaluations: 'f1'"),
    (lambda r: r["evaluations"]["step"].reverse(), "not in the order of their steps"),
    (lambda r: r["statistics"].pop("step"), "statistics without 'step'"),
    (lambda r: r["statistics"].update(rho=[None]), "got a list for statistics 'rho'"),
    (lambda r: r["environment"].update(torch=["2"]), "a list for 'torch' of its environment"),
    (lambda r: r.update(diverged=0), "0 for 'diverged', which must be true or false"),
]


@pytest.mark.parametrize(("damage", "words"), RESULTS)
def test_a_result_of_another_form_is_named(damage, words, out):
    path = runs(out)[0] / "result.json"
    result = json.loads(path.read_text())
    damage(result)
    path.write_text(json.dumps(result))
    for arguments in (("report", out), (*COMPARE, out)):
        said = command(*arguments)
        assert said.startswith(
            f"varreg: {path} is not what this version of varreg writes: expected the result of a "
            "run; got "
        )
        assert words in said


def test_a_result_of_another_configuration_is_refused(out):
    """Two results change places; nothing but what they say of themselves tells."""
    a, b = (path / "result.json" for path in runs(out)[:2])
    one, two = a.read_bytes(), b.read_bytes()
    a.write_bytes(two)
    b.write_bytes(one)
    there, here = json.loads(two)["config"], json.loads(one)["config"]
    (key, *_) = [key for key in here if here[key] != there[key]]
    for arguments in (("report", out), (*COMPARE, out)):
        said = command(*arguments)
        assert "result.json comes from another configuration (" in said
        assert (
            f"{key}: {there[key]} there, {here[key]} asked for" in said
            or f"{key}: {here[key]} there, {there[key]} asked for" in said
        )
        assert "Delete it, and the same command runs this run anew" in said


def test_the_remedy_is_one(real, out):
    """The file that is named is deleted: the run is made anew, and all is as it was."""
    path = runs(out)[0] / "result.json"
    whole = json.loads(path.read_text())
    cut(path)
    assert str(path) in command(*COMPARE, out)
    path.unlink()
    assert command(*COMPARE, out) == ""
    again = json.loads(path.read_text())
    for result in (whole, again):
        del result["seconds"], result["evaluations"]["seconds"]
    assert again == whole


def test_runs_without_their_experiment_are_not_used(out):
    (out / "experiment.json").unlink()
    said = command(*COMPARE, out)
    assert f"{out} has runs and no experiment.json" in said
    assert not (out / "experiment.json").exists()


def test_what_a_report_makes_is_never_read(out):
    before = (out / "report.html").read_bytes()
    for name in (
        "results.json",
        "runs.csv",
        "curves.csv",
        "report.html",
        "figures/sensitivity.svg",
    ):
        binary(out / name)
    assert command("report", out) == ""
    assert (out / "report.html").read_bytes() == before
    (out / "curves.csv").unlink()
    (out / "curves.csv").mkdir()
    assert f"varreg: the page cannot be written to {out}: " in command("report", out)


@pytest.mark.parametrize(
    ("damage", "words"),
    [*DAMAGES[:2], (foreign, "what `varreg theory` saves; got something else"), *DAMAGES[4:]],
)
def test_a_damaged_theory_is_named(damage, words, tmp_path):
    (tmp_path / "experiment.json").write_text(json.dumps(THEORY))
    path = tmp_path / "theory.json"
    path.write_text('{"Lemma 1": []}')
    damage(path)
    said = command("report", tmp_path)
    assert said.startswith(f"varreg: {path} is not what this version of varreg writes")
    assert words in said
    assert "run `varreg theory` again" in said


def test_a_comparison_does_not_go_into_a_folder_of_theory(tmp_path):
    (tmp_path / "experiment.json").write_text(json.dumps(THEORY))
    (tmp_path / "theory.json").write_text("{}")
    assert "has another experiment in it (kind: theory)" in command(*COMPARE, tmp_path)


def test_theory_in_a_folder_with_a_damaged_experiment(tmp_path):
    a_list(tmp_path / "experiment.json")
    said = command("theory", "--out", tmp_path)
    assert f"varreg: {tmp_path}/experiment.json is not what this version of varreg writes" in said


# Checkpoints

CONFIG = Config("logistic", "VRAdam", 0.01, epochs=2, batch=128)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """The folder of a run that was stopped after five steps."""
    torch.set_default_dtype(torch.float32)
    folder, left = tmp_path_factory.mktemp("stopped"), iter(range(5))
    with pytest.raises(StoppedError):
        run(CONFIG, folder, stop=lambda: next(left) == 4)
    return folder


@pytest.fixture
def at(stopped, tmp_path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "runs"))


def flipped(path: Path) -> None:
    """One bit of one number, which torch itself loads without a word."""
    content, weight = (
        bytearray(path.read_bytes()),
        torch.load(path, weights_only=True)["model"]["1.weight"],
    )
    at = content.find(weight.numpy().tobytes())
    assert at > 0
    content[at + 2] ^= 1
    path.write_bytes(content)
    assert not torch.equal(torch.load(path, weights_only=True)["model"]["1.weight"], weight)


def zipped(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("notes.txt", "something else")


class Hostile:
    def __reduce__(self):
        return os.system, (f"touch {Hostile.mark}",)

    mark = ""


def hostile(path: Path) -> None:
    Hostile.mark = str(path.with_name("mark"))
    torch.save({"model": Hostile()}, path)


def pickled(path: Path) -> None:
    Hostile.mark = str(path.with_name("mark"))
    path.write_bytes(pickle.dumps(Hostile()))


def edited(edit):
    def damage(path: Path) -> None:
        state = torch.load(path, weights_only=True)
        edit(state)
        torch.save(state, path)

    return damage


def to_double(state):
    state["model"] = {name: t.double() for name, t in state["model"].items()}


def state_to_half(state):
    first = state["optimizer"]["state"][0]
    key = next(k for k, t in first.items() if isinstance(t, torch.Tensor) and t.dim() == 2)
    first[key] = first[key].half()


CHECKPOINTS = {
    "cut": (cut, "expected a whole archive of torch; got File is not a zip file"),
    "empty": (empty, "got an empty file"),
    "binary": (binary, "expected a whole archive of torch"),
    "a folder": (a_folder, "expected a whole archive of torch"),
    "flipped": (flipped, "a wrong checksum of"),
    "zipped": (zipped, "one that torch does not load"),
    "hostile": (hostile, "one that torch does not load"),
    "pickled": (pickled, "expected a whole archive of torch"),
    "a tensor": (lambda path: torch.save(torch.ones(3), path), "got Tensor"),
    "keys": (edited(lambda s: s.pop("random")), "got no 'random'"),
    "model": (edited(lambda s: s["model"].pop("1.bias")), "other names in its model: '1.bias'"),
    "shape": (
        edited(lambda s: s["model"].update({"1.bias": torch.ones(3)})),
        "float32 of shape (3,) for '1.bias' of its model, which is float32 of shape (10,)",
    ),
    "dtype": (
        edited(to_double),
        "float64 of shape (10, 64) for '1.weight' of its model, which is float32",
    ),
    "half": (edited(state_to_half), "float16 of shape (10, 64) for"),
    "groups": (
        edited(lambda s: s["optimizer"].update(param_groups=[])),
        "other groups of parameters",
    ),
    "options": (
        edited(lambda s: s["optimizer"]["param_groups"][0].pop("lr")),
        "other options or parameters",
    ),
    "states": (edited(lambda s: s["optimizer"]["state"].update({9: {}})), "an unknown parameter 9"),
    "losses": (edited(lambda s: s["losses"].pop()), "got 4 losses of 5 steps"),
    "step": (edited(lambda s: s.update(step=99, losses=[0.0] * 99)), "step 99 of 16"),
    "random": (
        edited(lambda s: s["random"].update(torch=torch.zeros(3))),
        "one that does not fit (TypeError",
    ),
    "config": (
        edited(lambda s: s["config"].update(lr=0.5)),
        "another configuration (lr: 0.5 there, 0.01 asked for)",
    ),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_damaged_checkpoint_is_named(name, at):
    damage, words = CHECKPOINTS[name]
    path = at / CONFIG.name / "checkpoint.pt"
    damage(path)
    with pytest.raises(store.DamagedError) as caught:
        run(CONFIG, at)
    said = str(caught.value)
    assert said.startswith(f"varreg: {path} ")
    assert words in said
    assert said.endswith("Delete it, and the same command runs this run anew; or restore it.")
    assert "\n" not in said
    assert not path.with_name("mark").exists()
    assert not path.with_name("result.json").exists()


def test_a_checkpoint_of_a_version_before(at):
    """It has no configuration: that of config.json beside it counts."""
    path = at / CONFIG.name / "checkpoint.pt"
    edited(lambda s: s.pop("config"))(path)
    going = Going(CONFIG)
    resume(going, path.parent)
    assert going.step == 5
    about = path.with_name("config.json")
    change(about, config=json.loads(about.read_text())["config"] | {"lr": 0.5})
    with pytest.raises(
        store.DamagedError, match=r"another configuration \(lr: 0.5 there, 0.01 asked for\)"
    ):
        run(CONFIG, at)
    about.unlink()
    with pytest.raises(
        store.DamagedError,
        match="expected the configuration that it was made with; got no 'config'",
    ):
        run(CONFIG, at)


@pytest.mark.slow
def test_a_damaged_checkpoint_in_a_comparison(out):
    """By the real command, from another process; and once it is deleted, the command ends."""
    made = Comparison.of(json.loads((out / "experiment.json").read_text())["arguments"])
    config, left = made.plan({})[0], iter(range(3))
    (out / "runs" / config.name / "result.json").unlink()
    with pytest.raises(StoppedError):
        run(config, out / "runs", stop=lambda: next(left) == 2)
    path = out / "runs" / config.name / "checkpoint.pt"
    cut(path)
    said = command(*COMPARE, out)
    assert said.startswith(
        f"varreg: {path} is not what this version of varreg writes: expected a whole archive of "
        "torch"
    )
    path.unlink()
    assert command(*COMPARE, out) == ""


# Small ones


def test_names_of_runs_fit_into_a_file_system(tmp_path):
    config = Config("logistic", "SGD", 0.1, options={"word": "λ" * 300})
    assert len(config.name.encode()) <= 255
    (tmp_path / config.name).mkdir()
    assert dataclasses.replace(config, seed=1).name != config.name


def test_a_dtype_is_part_of_a_fingerprint():
    from varreg.lab.tasks.check_task import fingerprint
    from varreg.lab.tasks.lookup import load, task

    splits, model = load("logistic", None), task("logistic").model()
    single = fingerprint("logistic", splits, model)
    assert fingerprint("logistic", splits, model.double()) != single


def test_tensors_come_back_to_the_bit(tmp_path):
    store.write_tensors(tmp_path / "t.pt", {"a": torch.arange(5)})
    assert torch.equal(store.read_tensors(tmp_path / "t.pt", "")["a"], torch.arange(5))
    buffer = io.BytesIO()
    torch.save({"a": torch.arange(5)}, buffer, _use_new_zipfile_serialization=False)
    (tmp_path / "t.pt").write_bytes(buffer.getvalue())
    with pytest.raises(store.DamagedError, match="expected a whole archive of torch"):
        store.read_tensors(tmp_path / "t.pt", "")
