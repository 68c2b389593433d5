"""What people see of a command: its first line, its help, what is shown meanwhile, its tables."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import varreg
from tests.support.commands import command
from varreg.lab import displays
from varreg.lab.experiments import conduct, execution
from varreg.lab.experiments.compare.page import terminal_table
from varreg.lab.experiments.compare.plan import Comparison
from varreg.lab.experiments.theory import plan, rows
from varreg.lab.experiments.theory.computations import Part
from varreg.lab.listing import listing
from varreg.lab.optimizers import OPTIMIZERS
from varreg.lab.runs.config import Config
from varreg.lab.runs.resume import run
from varreg.lab.tasks import TASKS
from varreg.theory.claims.claim import Check


def python(code: str, *arguments: str, **variables: str) -> str:
    """Run code in a new process, and return all that it said."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
        check=False,
    )
    return done.stdout + done.stderr


MAIN = """
import sys
from varreg.cli import main
try:
    main()
except SystemExit:
    pass
print("torch" in sys.modules)
"""


HELP = (("-h",), ("--help",), ("compare", "-h"), ("--version",), ("--show-completion", "bash"))


@pytest.mark.parametrize("arguments", HELP)
def test_help_needs_no_torch(arguments):
    said = python(MAIN, *arguments, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert said.splitlines()[-1] == "False", said
    assert len(said.splitlines()) > 1
    assert max(map(len, said.splitlines())) <= 100 or "completion" in arguments[0]


def test_the_version(capsys):
    assert command("--version") == ""
    assert capsys.readouterr().out == f"varreg {varreg.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "first"),
    [
        (("compare", "SGD", "Adam"), "compare digits: SGD, Adam"),
        (("reproduce", "cifar10"), "reproduce cifar10"),
        (("scaling", "plan"), "scaling plan: digits, SGD:momentum=0.9,schedule=cosine"),
        (("theory",), "theory: checks of the paper's claims"),
        (("bench",), "bench: "),
        (("noise",), "noise: digits, SGD, 500 steps"),
        (("report", "."), "report: ."),
    ],
)
def test_the_first_line_comes_before_torch(arguments, first, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('torch is asked for')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    said = python(MAIN, *arguments, PYTHONPATH=path)
    assert said.startswith(first)
    assert "torch is asked for" in said
    assert python(MAIN, *arguments, PYTHONPATH=path, RANK="1").startswith("Traceback")


def test_any_module_can_be_imported_first():
    """Names of the package come when they are asked for; none of its modules needs them before."""
    homes = ("engine", "optim", "noise", "monitor", "verification", "parallel", "lab.runs.run")
    for home in (*homes, "theory.claims", "backends"):
        code = f"import varreg.{home}, varreg; print(varreg.observe, varreg.verify, varreg.VRSGD)"
        said = python(code)
        assert said.count("<function") == 2, said
        assert "Error" not in said


def test_names_of_the_package():
    assert {"observe", "VRSGD", "Monitor", "__version__"} <= set(varreg.__all__) <= set(dir(varreg))
    assert python("from varreg import *; print(VRAdam, observe)").count("varreg") == 1
    with pytest.raises(AttributeError, match="module 'varreg' has no attribute 'nothing'"):
        _ = varreg.nothing


def new_display(terminal: bool) -> tuple[displays.RunsDisplay, io.StringIO]:
    file = io.StringIO()
    made = displays.new_console(file=file, force_terminal=terminal, width=100)
    return displays.RunsDisplay(4, made), file


TUNED = Config("mytask:cancer", "VRSGD", 0.1, options={"s": 2.0})
JUDGED = Config("mytask:cancer", "SGD", 0.1, test="end")
RESULT = {"evaluations": {"valid_loss": [0.5], "train_loss": [0.4]}, "diverged": False}


def test_words_are_printed_as_they_are(capsys):
    file = io.StringIO()
    console = displays.new_console(file=file)
    console.print("mytask:cancer: [bold]x[/bold] 1", soft_wrap=True)
    assert file.getvalue() == "mytask:cancer: [bold]x[/bold] 1\n"
    display, _ = new_display(terminal=True)
    with display:
        display.planned([TUNED], 0)
        display.progress("emoji:train:[red]", 1, 2, 0.5)
        assert "emoji:train:[red]" in frame(display)


def frame(display: displays.RunsDisplay) -> str:
    """What is on the terminal at this moment."""
    file = io.StringIO()
    console = displays.new_console(file=file, width=100)
    console.print(display.live.get_renderable())
    return file.getvalue()


def test_the_live_display_has_loss_and_phase_and_warnings_below():
    display, file = new_display(terminal=True)
    with display:
        assert "starting" in frame(display)
        display.planned([TUNED, JUDGED], 2)
        display.progress(TUNED.name, 0, 0, None)
        assert "2/4  tuning" in frame(display)
        assert "VRSGD:s=2.0 lr=0.1 seed=0" in frame(display)
        display.progress(TUNED.name, 30, 600, 0.51234)
        assert "30/600  loss 0.5123" in frame(display)
        display.progress(TUNED.name, 600, 600, None)
        assert "600/600  evaluating" in frame(display)
        for _ in range(3):
            display.warned(TUNED.name, "mind the gap")
        *bars, last = frame(display).splitlines()
        assert last == "VRSGD:s=2.0 lr=0.1 seed=0 and 2 more warned: mind the gap"
        assert not any("mind" in line for line in bars)
        display.progress(JUDGED.name, 1, 600, 0.5)
        display.ended(TUNED, RESULT)
        display.progress(TUNED.name, 600, 600, 0.5)  # a message that comes late
        assert "3/4  judging" in frame(display)
        assert "VRSGD:s=2.0 lr=0.1 seed=0 ━" not in frame(display)
        assert max(map(len, frame(display).splitlines())) <= 100
    assert file.getvalue().count("mind the gap") >= 1  # which stays


def test_lines_have_loss_and_phase():
    display, file = new_display(terminal=False)
    with display:
        display.planned([TUNED], 0)
        display.progress(TUNED.name, 1, 2, 0.5)
        display.warned(TUNED.name, "mind the gap")
        display.warned(TUNED.name, "mind the gap")
        display.ended(TUNED, RESULT)
        display.ended(JUDGED, {**RESULT, "diverged": True})
    warned, first, second = file.getvalue().splitlines()
    assert warned == "VRSGD:s=2.0 lr=0.1 seed=0 warned: mind the gap"
    assert first.endswith("s  tuning  VRSGD:s=2.0 lr=0.1 seed=0: valid loss 0.5")
    assert second.endswith("s  judging  SGD lr=0.1 seed=0: diverged")


WARNS = """
import multiprocessing, warnings
def mine():
    made = spirals(turns=0.5)
    loss = made.loss
    def warns(output, y):
        if output.requires_grad and multiprocessing.parent_process():
            warnings.warn("the loss of a run")
        return loss(output, y)
    return dataclasses.replace(made, loss=warns)
"""


def test_warnings_of_workers_come_to_the_display(tmp_path):
    own = Path(__file__).parents[1] / "support" / "own_task.py"
    (tmp_path / "warns.py").write_text(f"{own.read_text()}\nimport dataclasses\n{WARNS}")
    torch.set_default_dtype(torch.float32)
    one = {"trials": 1, "tuning_seeds": 1, "seeds": 1, "epochs": 1, "ablations": False}
    made = Comparison(f"{tmp_path / 'warns.py'}:mine", ("SGD", "Adam"), **one)
    display, file = new_display(terminal=False)
    with display:
        execution.carry_out(made, tmp_path / "out", 1, None, display, ["test"])
    assert file.getvalue().count("warned: the loss of a run") == 1
    losses = [line for line in file.getvalue().splitlines() if "valid loss" in line]
    assert len(losses) == 4


def test_a_run_says_its_loss_and_when_it_evaluates(tmp_path):
    torch.set_default_dtype(torch.float32)
    heard = []
    config = Config("logistic", "SGD", 0.1, epochs=1, batch=512)
    run(config, tmp_path, every=0.0, progress=lambda *said: heard.append(said))
    assert heard[0][2] is None
    assert any(loss is not None and loss > 0 for _, _, loss in heard)
    assert heard[-1][0] == heard[-1][1]


BREAKS = """
def helper():
    raise ZeroDivisionError("mine")
def early():
    helper()
def late():
    made = spirals()
    return dataclasses.replace(made, load=lambda _: helper())
def model():
    return dataclasses.replace(spirals(), loss=lambda output, y: helper())
"""


@pytest.mark.parametrize("name", ["early", "late", "model"])
def test_own_code_keeps_its_traceback(name, tmp_path, capsys):
    own = Path(__file__).parents[1] / "support" / "own_task.py"
    path = tmp_path / "breaks.py"
    path.write_text(f"{own.read_text()}\nimport dataclasses\n{BREAKS}")
    torch.set_default_dtype(torch.float32)
    error = command("compare", "--task", f"{path}:{name}", "--out", tmp_path / "out")
    said = capsys.readouterr().err
    assert "ZeroDivisionError: mine" in error
    assert said.startswith("Traceback (most recent call last):")
    assert f'File "{path}", line' in said.splitlines()[1]
    assert "in helper" in said
    assert str(Path(varreg.__file__).parent) not in said


def test_folders_of_runs_have_no_spaces_and_colons(tmp_path):
    torch.set_default_dtype(torch.float32)
    config = Config("stream:spread=2", "VRSGD", 0.1, options={"s": 2.0})
    assert not set(config.name) & set(" :/\\\"'<>|*?()[]")
    earlier = f"stream:spread=2 VRSGD:s=2.0 lr=0.1 seed=0 {config.name[-8:]}"
    assert config.folder_in(tmp_path) == tmp_path / config.name
    (tmp_path / earlier).mkdir()  # of an earlier version: its runs are not lost
    assert config.folder_in(tmp_path) == tmp_path / earlier


def test_the_table_of_arms_fits_into_100_columns():
    name = "VRSGD:momentum=0.9,history=geometric,per=tensor, λ replaced by its mean"
    arm = {"name": name, "optimizer": name, "lr": 0.000123, "options": {"schedule": "cosine"}}
    arm |= {"test_loss": [0.123, 1234.0], "test_accuracy": [0.5, 0.25], "broke": [False, True]}
    shown = terminal_table({"arms": [{**arm, "lambda": 2.5}]})
    assert max(map(len, shown.splitlines())) <= 100
    assert "".join(shown.split()).count("cosine") == 1
    for word in ("617", "1 of 2", "37.50 %", "2.50"):
        assert word in shown
    nothing = {key: value for key, value in {**arm, "lambda": 1.0}.items() if "acc" not in key}
    assert "accuracy" not in terminal_table({"arms": [nothing]})


def test_the_list_fits_into_100_columns_and_cuts_nothing():
    shown = listing()
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 100
    for name, entry in OPTIMIZERS.items():
        (line,) = (line for line in lines if line.startswith(f"  {name} "))
        assert re.match(rf"  {name} +(no learning rate|\S+ to \S+)  +\S", line), line
        assert entry.cls.__doc__
    joined = " ".join(shown.split())
    for task in TASKS.values():
        (sentence, *_) = " ".join(task.__doc__.split("\n\n")[0].split()).split(". ")
        assert sentence in joined
    entries = re.split(r"\n  (?=\S)", shown.replace("\n\n", "\n  "))
    ends = [entry.rstrip()[-1] for entry in entries if not entry.startswith(("Tasks", "Opt"))]
    assert set(ends) == {"."}


def a_check(holds: bool, conditions: str) -> dict[str, object]:
    words = ("Theorem 1, for VR-SGD", "E[λε²]/(E[λ]σ²) = 1, " + "a statement of many words " * 5)
    return {
        **dict(zip(("claim", "statement"), words, strict=True)),
        **{"conditions": conditions, "measured": 1.5, "error": 0.1, "relation": "=", "bound": 1.0},
        **{"holds": holds, "expected": True, "verdict": "holds" if holds else "does not hold"},
    }


def test_the_table_of_claims_fits_into_100_columns(monkeypatch):
    monkeypatch.setattr("varreg.lab.experiments.theory.analysis.CHECKS", ("A",))
    checks = [a_check(True, "first"), a_check(False, "a quadratic, " * 12), a_check(True, "last")]
    file = io.StringIO()
    displays.new_console(file=file, width=100).print(rows.terminal_table({"A": checks}))
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= 100
    text = file.getvalue()
    assert "E[λε²]/(E[λ]σ²) = 1" in text  # brackets are no markup
    assert "2 of 3 hold" in text
    assert "1.50 ± 0.2, not = 1.00" in text
    assert "…" not in text
    assert "first" not in text  # what holds is counted; the page has each


@pytest.fixture
def parts(monkeypatch):
    """Three parts of a theory, of which the last is stopped by Ctrl-C at first."""
    done: list[str] = []

    def compute(name):
        done.append(name)
        if name == "c" and done.count("c") == 1:
            raise KeyboardInterrupt
        return [name]

    made = tuple(Part(name, lambda name=name: compute(name)) for name in "abc")
    monkeypatch.setattr(plan, "PARTS", made)
    monkeypatch.setattr(conduct, "PARTS", made)
    return done


def test_theory_goes_on_where_it_was_stopped(parts, tmp_path, capsys):
    assert conduct.conduct_theory(tmp_path, ["varreg", "theory"]) == conduct.INTERRUPTED
    said = capsys.readouterr().out
    assert "the same command continues from here" in said
    assert not (tmp_path / "theory.json").exists()
    heard = []
    plan.carry_out(tmp_path, ["varreg"], lambda *said: heard.append(said))
    assert parts == ["a", "b", "c", "c"]
    assert [seconds == 0 for _, seconds in heard] == [True, True, False]
    assert json.loads((tmp_path / "theory.json").read_text()) == {x: [x] for x in "abc"}
    assert sorted(p.name for p in tmp_path.glob("theory*")) == ["theory.json"]
    plan.carry_out(tmp_path, ["varreg"], lambda *said: None)  # all anew, as before
    assert parts[4:] == ["a", "b", "c"]


@pytest.mark.parametrize("damage", ["another machine", "cut short", "of another kind"])
def test_what_theory_cannot_use_is_computed_anew(parts, damage, tmp_path):
    conduct.conduct_theory(tmp_path, ["varreg", "theory"])
    path = tmp_path / plan.PARTIAL
    saved = json.loads(path.read_text())
    saved["environment"]["torch"] = "1.0"
    other = {"another machine": json.dumps(saved), "cut short": path.read_text()[:50]}
    path.write_text(other.get(damage, "[]"))
    plan.carry_out(tmp_path, ["varreg"], lambda *said: None)
    assert parts == ["a", "b", "c", "a", "b", "c"]


def test_checks_have_what_the_table_shows():
    fields = set(Check.__dataclass_fields__)
    assert {"claim", "statement", "conditions", "measured", "error", "relation", "bound"} <= fields
