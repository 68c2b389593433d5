"""One page that says what came out, from saved results alone: HTML that needs no network, and the same as figures and tables beside it."""

from __future__ import annotations

import csv
import io
import json
import shlex
from pathlib import Path
from typing import Any

import jinja2

from varreg.lab import compare, experiment, names, reproduce, store, theory, verdict
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
SHOWN = ("varreg", "commit", "torch", "python", "processor", "cores")
"""Of the environment."""


def read(folder: Path) -> tuple[experiment.Experiment, dict[str, Any], Results]:
    """The experiment in a folder, what was written down about it, and the results that are there."""
    path = folder / "experiment.json"
    if not path.is_file():
        raise ValueError(
            f"varreg: {folder} has no experiment.json: it is not a folder of `varreg compare`, `varreg reproduce` or `varreg theory`."
        )
    try:
        about = store.read_json(path)
        kinds: dict[str, Any] = {"compare": compare.Comparison.of, "reproduce": lambda a: reproduce.Reproduction(**a)}
        made: experiment.Experiment = kinds[about["kind"]](about["arguments"])
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"varreg: {path} is not what this version of varreg writes ({type(error).__name__}: {error})."
        ) from error
    return made, about, experiment.results_of(made, folder)


def build(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The page, and what it says. All files are written whole or not at all."""
    store.check_writable(folder)
    page = Page()
    if (folder / "theory.json").is_file():
        found = theory.analyze(store.read_json(folder / "theory.json"))
        about = store.read_json(folder / "experiment.json")
        title, subtitle = theory_page(page, found)
        tables = {"checks": theory.all_checks(found), "hindsight": theory.hindsight_table(found)}
        _write(folder, page, about, found, tables, title, subtitle)
        return folder / "report.html", found
    made, about, results = read(folder)
    if isinstance(made, compare.Comparison):
        found = verdict.analyze(made, results)
        arms = runs_of({arm.name: arm.configs for arm in made.arms(results)}, results)
        title, subtitle = compare_page(page, made, about["about"], found, arms)
    else:
        assert isinstance(made, reproduce.Reproduction)
        found = reproduce.analyze(made, results)
        arms = runs_of(made.arms(results), results)
        title, subtitle = reproduce_page(page, made, found, arms)
    _write(folder, page, about, found, {"runs": runs_table(arms), "curves": curves_table(arms)}, title, subtitle)
    return folder / "report.html", found


def runs_of(arms: dict[str, list[Config]], results: Results) -> Arms:
    """The runs of each arm that have ended; arms without any are left out."""
    found = {name: [results[c.name] for c in configs if c.name in results] for name, configs in arms.items()}
    return {name: runs for name, runs in found.items() if runs}


Rows = list[dict[str, Any]]


def _write(
    folder: Path, page: Page, about: dict[str, Any], found: dict[str, Any], tables: dict[str, Rows], title: str, subtitle: str
) -> None:
    (folder / "figures").mkdir(exist_ok=True)
    for name, (svg, png) in page.figures.items():
        store.write(folder / "figures" / f"{name}.svg", svg.encode())
        store.write(folder / "figures" / f"{name}.png", png)
    for name, rows in tables.items():
        store.write(folder / f"{name}.csv", _csv(rows))
    environment = {key: about["environment"][key] for key in SHOWN}
    said = {"title": title, "about": subtitle, "command": shlex.join(about["command"]), "environment": environment}
    store.write_json(folder / "results.json", {**said, "arguments": about["arguments"], **found})
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
    store.write(folder / "report.html", templates.get_template("report.html").render(shown).encode())


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
    writer.writerows(rows)
    return buffer.getvalue().encode()
