"""One page that says what came out, from saved results alone: HTML that needs no network, and the same as figures and tables beside it.

The folder may be someone else's: nothing that it names is imported or run, and no link is followed out of it.
"""

from __future__ import annotations

import csv
import io
import shlex
from pathlib import Path
from typing import Any

import jinja2

from varreg.lab import compare, experiment, names, reproduce, saved, store, theory, verdict
from varreg.lab.pages import Arms, Page, compare_page, reproduce_page, theory_page
from varreg.lab.run import Config, Results

TAGS = {
    "better": "lower test loss",
    "tuned": "lower test loss, but no sign that λ did it",
    "worse": "higher test loss",
    "same": "no detectable difference",
    "unknown": "cannot be said",
    "explained": "it reproduces, and a longer step explains it",
    "reproduced": "it reproduces",
    "refuted": "it does not reproduce",
    "theory": "what holds, and what does not",
    "unexpected": "not what was found before",
}
CURVES = ("train_loss", "train_accuracy", "valid_loss", "valid_accuracy", "test_loss", "test_accuracy")
KINDS: dict[str, Any] = {"compare": compare.Comparison.of, "reproduce": reproduce.Reproduction.of}
"""What makes an experiment of its saved arguments."""


def read_about(folder: Path) -> dict[str, Any]:
    """What was written down about the experiment in a folder."""
    path = folder / "experiment.json"
    if not folder.is_dir():
        raise ValueError(f"varreg: {folder} is no folder.")
    if not path.exists():
        raise ValueError(
            f"varreg: {folder} has no experiment.json: it is not a folder of `varreg compare`, `varreg reproduce` or `varreg theory`."
        )
    store.check_inside(folder, path)
    return experiment.read_about(path)


def read(folder: Path, about: dict[str, Any]) -> tuple[experiment.Experiment, Results]:
    """The experiment in a folder, and the results that are there."""
    path = folder / "experiment.json"
    if about["kind"] not in KINDS:
        known = ", ".join([*KINDS, "theory"])
        raise store.damaged(path, f"one of the kinds {known}", repr(about["kind"]), experiment.RESTORE)
    try:
        made: experiment.Experiment = KINDS[about["kind"]](about["arguments"])
    except ValueError as error:
        came = str(error).removeprefix("varreg: ")
        raise store.damaged(path, "the arguments of an experiment", came, experiment.RESTORE) from error
    return made, experiment.results_of(made, folder)


def _build_theory(folder: Path, about: dict[str, Any]) -> dict[str, Any]:
    path = folder / "theory.json"
    remedy = "Restore it; or delete it, and run `varreg theory` again."
    store.check_inside(folder, path)
    kept = store.read_json(path, remedy)
    page = Page()
    try:
        found = theory.analyze(kept)
        title, subtitle = theory_page(page, found)
        tables = {"checks": theory.all_checks(found), "hindsight": theory.hindsight_table(found)}
        contents = _contents(page, about, found, tables, title, subtitle)
    except Exception as error:  # all of it is arithmetic and drawing with what the file holds
        came = f"something else ({type(error).__name__}: {error})"
        raise store.damaged(path, "what `varreg theory` saves", came, remedy) from error
    _write(folder, contents)
    return found


def build(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The page, and what it says. All files are written whole or not at all."""
    about = read_about(folder)
    store.check_writable(folder)
    page = Page()
    if about["kind"] == "theory":
        return folder / "report.html", _build_theory(folder, about)
    made, results = read(folder, about)
    if isinstance(made, compare.Comparison):
        found = verdict.analyze(made, results)
        arms = runs_of({arm.name: arm.configs for arm in made.arms(results)}, results)
        title, subtitle = compare_page(page, made, about.get("about") or f"Task {made.task}", found, arms)
    else:
        assert isinstance(made, reproduce.Reproduction)
        found = reproduce.analyze(made, results)
        arms = runs_of(made.arms(results), results)
        title, subtitle = reproduce_page(page, made, found, arms)
    tables = {"runs": runs_table(arms), "curves": curves_table(arms)}
    _write(folder, _contents(page, about, found, tables, title, subtitle))
    return folder / "report.html", found


def runs_of(arms: dict[str, list[Config]], results: Results) -> Arms:
    """The runs of each arm that have ended; arms without any are left out."""
    found = {name: [results[c.name] for c in configs if c.name in results] for name, configs in arms.items()}
    return {name: runs for name, runs in found.items() if runs}


Rows = list[dict[str, Any]]


def _write(folder: Path, contents: dict[str, bytes]) -> None:
    """Files by their names. Each takes the place of what was there, so that no link is followed; a folder might be one."""
    store.check_inside(folder, folder / "figures")
    try:
        (folder / "figures").mkdir(exist_ok=True)
        for name, content in contents.items():
            store.write(folder / name, content)
    except OSError as error:
        raise ValueError(f"varreg: the page cannot be written to {folder}: {error}.") from error


def _contents(
    page: Page, about: dict[str, Any], found: dict[str, Any], tables: dict[str, Rows], title: str, subtitle: str
) -> dict[str, bytes]:
    """All files of a report, by their names."""
    contents: dict[str, bytes] = {}
    for name, (svg, png) in page.figures.items():
        contents |= {f"figures/{name}.svg": svg.encode(), f"figures/{name}.png": png}
    contents |= {f"{name}.csv": _csv(rows) for name, rows in tables.items()}
    command, environment = shlex.join(about.get("command", [])), saved.environment_of(about)
    said = {"title": title, "about": subtitle, "command": command, "environment": environment}
    contents["results.json"] = store.json_of({**said, "arguments": about["arguments"], **found})
    loader = jinja2.PackageLoader("varreg.lab")
    templates = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    shown = {
        **said,
        "verdict": found["verdict"],
        "warnings": found["warnings"],
        "sections": page.sections,
        "tags": TAGS,
        "tables": list(tables),
    }
    contents["report.html"] = templates.get_template("report.html").render(shown).encode()
    return contents


def runs_table(arms: Arms) -> Rows:
    """One row for each run of an arm."""
    rows = []
    for name, runs in arms.items():
        for run in runs:
            config, last = run["config"], {metric: run["evaluations"][metric][-1] for metric in CURVES}
            spec = names.spell(config["optimizer"], config["options"])
            said = {"arm": name, "optimizer": spec, "lr": config["lr"], "seed": config["seed"], "diverged": run["diverged"]}
            rows.append(
                {
                    **said,
                    "steps": run["step"],
                    "seconds": run["seconds"],
                    "effective_lambda": reproduce.effective_lambda(run),
                    **last,
                }
            )
    return rows


def curves_table(arms: Arms) -> Rows:
    """One row for each evaluation of each run."""
    return [
        {"arm": name, "seed": run["config"]["seed"], **{key: values[i] for key, values in run["evaluations"].items()}}
        for name, runs in arms.items()
        for run in runs
        for i in range(len(run["evaluations"]["step"]))
    ]


def _csv(rows: Rows) -> bytes:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _cell(value) for key, value in row.items()} for row in rows)
    return buffer.getvalue().encode()


def _cell(value: Any) -> Any:
    """Return text so that no spreadsheet takes it for a formula."""
    formula = isinstance(value, str) and len(value) > 1 and value[0] in "=+-@"
    return f"'{value}" if formula else value
