"""Measure the house: how far a batch travels through the code, and how large its parts are.

    python -m tools.house            # print the table
    python -m tools.house --check    # and fail if a figure is over its limit
    python -m tools.house --trace    # print the way of one step, file by file
    python -m tools.house --write    # lower the limits to today's figures, here and in the docs

The limits are the figures that were reached. They may fall; they must not rise.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from tools.tables.catalog import render
from tools.tables.marks import ROOT, renew

SOURCE = ROOT / "src" / "varreg"
LIMITS = Path(__file__).parent / "limits.json"
PAGE = ROOT / "docs" / "develop" / "architecture.md"
COLUMNS = 100
# Not part of the core: one need not read these to follow a batch to its step.
BESIDE = ("lab", "theory", "cli.py", "tensorboard.py")
# A list of independent numbers, which may be longer than other files.
TABLE = "thresholds.py"
GENERATED = ("docs/results/", "benchmarks/results/")
# A record carries a torch call if it has one of the first fields, and the step of a parameter if it
# has one of the second.
CALL_FIELDS = frozenset(("function", "arguments", "rule"))
STEP_FIELDS = frozenset(("lam",))
# The guide must name all files of the core.
GUIDE = ROOT / "CONTRIBUTING.md"


class Way(NamedTuple):
    """The functions of varreg that ran, in order, as (file, function)."""

    calls: list[tuple[str, str]]

    @property
    def files(self) -> int:
        """Count the files."""
        return len({file for file, _ in self.calls})

    @property
    def changes(self) -> int:
        """Count how often the next function is in another file."""
        return sum(a[0] != b[0] for a, b in itertools.pairwise(self.calls))


def _name(frame: FrameType) -> str:
    return str(getattr(frame.f_code, "co_qualname", frame.f_code.co_name))  # from Python 3.11 on


def follow(run: Callable[[], Any]) -> Way:
    """Return the way that a function takes through varreg."""
    calls: list[tuple[str, str]] = []
    inside = str(SOURCE)

    def note(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(inside):
            calls.append((str(Path(name).relative_to(SOURCE)), _name(frame)))

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return Way(calls)


def follow_step() -> dict[str, Way]:
    """Return the way of the sixth step of a small network: of forward, backward and step, and of
    all three together.

    The engine checks the first four forwards more closely, and then the 8th, 16th, 32nd …
    (`thresholds.EARLY`). The sixth step is typical of all others.
    """
    import torch
    from torch import nn

    import varreg

    torch.manual_seed(0)
    torch.set_num_threads(1)  # backward then runs in this thread, so that its calls are seen
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4 * 13 * 13, 10)
    )
    optimizer = varreg.VRSGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y = torch.randn(8, 1, 28, 28), torch.randint(10, (8,))
    ways: dict[str, Way] = {}
    with varreg.observe(model):
        for _ in range(6):
            optimizer.zero_grad()
            out: list[torch.Tensor] = []
            ways["forward"] = follow(lambda out=out: out.append(model(x)))  # type: ignore[misc]
            loss = nn.functional.cross_entropy(out[0], y)
            ways["backward"] = follow(loss.backward)
            ways["step"] = follow(optimizer.step)
    ways["all"] = Way([call for way in ways.values() for call in way.calls])
    return ways


class Class(NamedTuple):
    """A class, where it is, and how many methods it defines itself."""

    name: str
    file: str
    methods: int


def classes(path: Path) -> Iterator[Class]:
    """Yield the classes of a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef):
            methods = [n for n in node.body if isinstance(n, ast.FunctionDef)]
            yield Class(node.name, str(path.relative_to(SOURCE)), len(methods))


def core_files() -> list[Path]:
    """Return the modules of the core, sorted."""
    found = sorted(SOURCE.rglob("*.py"))
    return [p for p in found if p.relative_to(SOURCE).parts[0] not in BESIDE]


def records(fields: frozenset[str]) -> list[str]:
    """Return the classes of engine, optim and native that have one of these named fields: named
    tuples, dataclasses, slotted classes and C structs.
    """
    found = []
    for path in core_files():
        if path.relative_to(SOURCE).parts[0] not in ("engine", "optim", "native"):
            continue
        nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ClassDef)]
        found += [node.name for node in nodes if _fields(node) & fields]
    return sorted(found)


def _fields(node: ast.ClassDef) -> set[str]:
    names: set[str] = set()
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            names.add(line.target.id)
        elif isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) in (
            "__slots__",
            "_fields_",
        ):
            words = [w.value for w in ast.walk(line.value) if isinstance(w, ast.Constant)]
            names |= set(" ".join(str(word) for word in words).split())
    return names


def comment_share() -> float:
    """Return the share of the core's lines that have a comment, in percent."""
    comments = lines = 0
    for path in core_files():
        with tokenize.open(path) as file:
            comments += sum(
                t.type == tokenize.COMMENT for t in tokenize.generate_tokens(file.readline)
            )
        lines += count_lines(path)
    return round(100 * comments / lines, 1)


def named_files(page: Path) -> Iterator[tuple[str, list[Path]]]:
    """Yield each path that a page names, with the files that it stands for: none if it does not
    exist.

    A path is relative to src/varreg, to the root, to a folder, or to the folder of a file, that the
    same row of a table or the same paragraph has named before.
    """
    folders: list[Path] = []
    for line in page.read_text().splitlines():
        if not line or line.startswith("|"):
            folders = []
        for name in re.findall(r"`([\w./-]+(?:\.(?:py|h|c|md)|/))`", line):
            places = [home / name for home in (SOURCE, ROOT, *folders)]
            places += [p for folder in folders for p in folder.rglob(name)]
            path = next((p for p in places if p.exists()), None)
            if path is None:
                yield name, []
                continue
            folders.append(path if path.is_dir() else path.parent)
            yield name, [path, *path.rglob("*.py")]


def faults_of_guides() -> list[str]:
    """Return the faults of the guides for contributors: files that they name but that do not exist,
    and files of the core that they name neither directly nor by their folder.
    """
    faults = []
    for page in (GUIDE, *sorted(PAGE.parent.glob("*.md"))):
        faults += [f"{page.name}: {name} is not there" for name, at in named_files(page) if not at]
    named = {path for _, paths in named_files(GUIDE) for path in paths}
    missing = [p for p in core_files() if p.name != "__init__.py" and p not in named]
    return faults + [f"{GUIDE.name} does not name {p.relative_to(SOURCE)}" for p in missing]


def naming(word: str) -> list[str]:
    """Return the source files that contain a word."""
    files = [p for p in SOURCE.rglob("*") if p.suffix in (".py", ".h", ".c")]
    found = [p for p in files if re.search(word, p.read_text(), re.IGNORECASE)]
    return sorted(str(p.relative_to(SOURCE)) for p in found)


def shared_stems() -> list[str]:
    """Return the names that modules of different subjects share.

    Two kinds of names are shared on purpose. Each kind of experiment in the lab has a plan, an
    analysis, a page and figures. And the optimizer's step is there in PyTorch, in C and in Triton.
    """
    stems: Counter[str] = Counter()
    for path in SOURCE.rglob("*.py"):
        folder = path.parent.relative_to(SOURCE)
        in_experiment = folder.parent == Path("lab/experiments")
        by_design = ("plan", "analysis", "page", "figures") if in_experiment else ()
        if path.stem == "step" and str(folder) in ("optim", "native", "triton"):
            continue
        if path.stem not in ("__init__", "__main__", *by_design):
            stems[path.stem] += 1
    return sorted(stem for stem, n in stems.items() if n > 1)


def tracked() -> list[Path]:
    """Return the files that git tracks."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [p for name in listed.stdout.split("\0") if name and (p := ROOT / name).is_file()]


def count_lines(path: Path) -> int:
    """Count the lines of a text file; 0 for any other."""
    try:
        return path.read_text().count("\n")
    except UnicodeDecodeError:
        return 0


def measure() -> dict[str, float]:
    """Return all figures by name."""
    ways = follow_step()
    core = core_files()
    found = [c for p in core for c in classes(p)]
    names = tracked()
    sources = [p for p in names if p.suffix in (".py", ".c", ".h")]
    lines = [line for p in sources for line in p.read_text().splitlines()]
    generated = [p for p in names if str(p.relative_to(ROOT)).startswith(GENERATED)]
    share = sum(map(count_lines, generated)) / sum(map(count_lines, names))
    figures: dict[str, float] = {
        "files of one warm step": ways["all"].files,
        "Python calls of one warm step": len(ways["all"].calls),
        "changes of file in one warm step": ways["all"].changes,
        **{
            f"Python calls: {name}": len(ways[name].calls)
            for name in ("forward", "backward", "step")
        },
        "records that carry one torch call": len(records(CALL_FIELDS)),
        "records that carry one parameter's step": len(records(STEP_FIELDS)),
        "lines of the longest core file": max(count_lines(p) for p in core if p.name != TABLE),
        "methods of the largest core class": max(c.methods for c in found),
        "module names used for two subjects": len(shared_stems()),
        f"lines over {COLUMNS} columns": sum(len(line) > COLUMNS for line in lines),
        "source files that name one optimizer (Adadelta)": len(naming("adadelta")),
        "generated lines, % of tracked ones": round(100 * share, 1),
        "comments, % of the core's lines": comment_share(),
    }
    return figures


def largest() -> str:
    """Return the longest files and largest classes of the core, to see where to cut."""
    core = core_files()
    files = sorted(((count_lines(p), str(p.relative_to(SOURCE))) for p in core), reverse=True)[:8]
    found = sorted(((c.methods, c.name, c.file) for p in core for c in classes(p)), reverse=True)
    lines = [f"  {n:4}  {name}" for n, name in files]
    lines += [f"  {n:4} methods  {name} ({file})" for n, name, file in found[:6]]
    return "\n".join(lines)


def main() -> int:
    """Print the table; with `--check`, return 1 if a figure is over its limit."""
    parser = argparse.ArgumentParser("python -m tools.house", description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail if a figure is over its limit")
    parser.add_argument("--write", action="store_true", help="lower the limits to these figures")
    parser.add_argument("--trace", action="store_true", help="print the way of one step")
    options = parser.parse_args()
    if options.trace:
        for name, way in follow_step().items():
            counts = Counter(file for file, _ in way.calls)
            print(f"{name}: {len(way.calls)} calls, {way.files} files, {way.changes} changes")
            if name != "all":
                print("\n".join(f"    {file}  {function}" for file, function in way.calls))
            else:
                print("\n".join(f"    {n:4}  {file}" for file, n in counts.most_common()))
        return 0
    figures, limits = measure(), json.loads(LIMITS.read_text())
    over = [n for n, value in figures.items() if _is_over(n, value, limits[n])]
    for name, value in figures.items():
        print(f"{name:50} {value:8g}   (limit {limits[name]['limit']:g})")
    print(f"{largest()}\n  used twice: {', '.join(shared_stems()) or 'no name'}")
    if options.write:
        for name, value in figures.items():
            limits[name]["limit"] = value
        LIMITS.write_text(json.dumps(limits, indent=1) + "\n")
        renew(PAGE, render)
        return 0
    if options.check and over:
        print(f"over the limit: {', '.join(over)}. Cut it again.")
    faults = faults_of_guides()
    print("\n".join(faults), end="\n" if faults else "")
    over += faults
    return 1 if options.check and over else 0


def _is_over(name: str, value: float, row: dict[str, float]) -> bool:
    """Return whether a figure is over its limit. Shares in percent have another limit, since they
    change with everything else: results may grow up to their aim, and comments have no limit.
    """
    if name.startswith("comments"):
        return False
    return value > (row["aim"] if "%" in name else row["limit"])


if __name__ == "__main__":
    raise SystemExit(main())
