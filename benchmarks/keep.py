"""Keep the parts of a results folder that the docs show: its numbers, and embedded figures.

    varreg compare SGD VRSGD --out runs/demo
    python -m benchmarks.keep runs/demo docs/results/demo
    python -m benchmarks.keep runs/stream-1 docs/results/stream-1 curves-steps sensitivity
    python -m benchmarks.keep benchmarks/results/bench.json benchmarks/results/bench.json

The numbers are all of `results.json`, one record per line, except for the folder in its command.
Figures are named without `.svg`. They are the same pictures, without parts that a browser does not
need, such as unused names and the seventh digit of a coordinate. Pages, tables and other figures
are left out: the command in `results.json` makes them again.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
from pathlib import Path
from typing import Any, TypeVar

DEPTH = 2
"""Tables and lists that lie deeper than this are written on one line."""
FONTS = re.compile(r"font-family: '[^;\"]*sans-serif")
COORDINATE = re.compile(r"-?\d+\.\d{3,}")


def compact(value: Any, depth: int = DEPTH) -> str:
    """Return JSON with one record per line.

    >>> print(compact({"a": [1, 2], "b": [{"c": [3, 4]}, {"c": [5]}]}))
    {
    "a": [1, 2],
    "b": [
    {"c": [3, 4]},
    {"c": [5]}
    ]
    }
    """
    containers = (dict, list)
    children = list(value.values() if isinstance(value, dict) else value) if depth else []
    if not depth or not any(isinstance(child, containers) for child in children):
        return json.dumps(value, ensure_ascii=False)
    parts = [
        compact(child, depth - 1) if isinstance(child, containers) else compact(child, 0)
        for child in children
    ]
    if isinstance(value, dict):
        keys = [json.dumps(key, ensure_ascii=False) for key in value]
        parts = [f"{key}: {part}" for key, part in zip(keys, parts, strict=True)]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return "\n".join((opening, ",\n".join(parts), closing))


Command = TypeVar("Command", str, list[str])


def without_out(command: Command) -> Command:
    """Return a command, a line or its words, without the folder of its results, which readers do
    not need.

    >>> without_out("varreg compare SGD VRSGD --out runs/demo --jobs 1")
    'varreg compare SGD VRSGD --jobs 1'
    >>> without_out(["varreg", "bench", "--json", "bench.json"])
    ['varreg', 'bench', '--json', 'bench.json']
    """
    words = shlex.split(command) if isinstance(command, str) else list(command)
    while at := next((i for i, word in enumerate(words) if word in ("--out", "-o")), None):
        del words[at : at + 2]
    return shlex.join(words) if isinstance(command, str) else words


def shrink(svg: str) -> str:
    r"""Return the same picture in a smaller file, with a line for each text in it.

    >>> shrink('<svg>\n <g id="a">\n  <path d="M 1.23456 2 \nL 3 4 \n"/>\n </g>\n</svg>')
    '<svg><path d="M 1.23 2L 3 4"/></svg>\n'
    >>> shrink('<svg><text x="1.2345">0.0001</text></svg>')  # a number that is read stays
    '<svg>\n<text x="1.23">0.0001</text></svg>\n'
    """
    svg = re.sub(r"<(metadata)>.*?</\1>|<\?xml.*?\?>|<!DOCTYPE.*?>", "", svg, flags=re.DOTALL)
    svg = FONTS.sub("font-family: 'DejaVu Sans', Verdana, sans-serif", svg)
    svg = re.sub(r' transform="rotate\(-0 [^"]*"', "", svg)
    used = set(re.findall(r"#([\w.-]+)", svg))
    svg = re.sub(r' id="([^"]+)"', lambda m: m[0] if m[1] in used else "", svg)
    svg = re.sub(r"<[^>]*>", lambda tag: COORDINATE.sub(_rounded, tag[0]), svg)
    svg = re.sub(r" ?\n *(?=[A-Za-z\"])", "", svg)  # between the commands of a path
    svg = re.sub(r"\n\s*", "", svg)
    svg = re.sub(r"(?<=style=\")[^\"]*", lambda m: m[0].replace(": ", ":").replace("; ", ";"), svg)
    while (bare := _without_bare_groups(svg)) != svg:
        svg = bare
    return svg.replace("<text", "\n<text").strip() + "\n"


def _rounded(number: re.Match[str]) -> str:
    """Return a coordinate with two digits behind the point."""
    return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")


def _without_bare_groups(svg: str) -> str:
    """Return the picture without groups that have no attribute and no group in them."""
    return re.sub(r"<g>((?:(?!</?g[> ]).)*)</g>", r"\1", svg, flags=re.DOTALL)


def keep(source: Path, target: Path, figures: list[str]) -> None:
    """Write what is kept of a results folder, or of a single file of JSON."""
    if source.is_file():
        saved = json.loads(source.read_text())
        if isinstance(saved, dict) and "command" in saved:
            saved["command"] = without_out(saved["command"])
        target.write_text(compact(saved) + "\n")
        return
    if not (source / "results.json").is_file():
        raise SystemExit(f"{source} has no results.json: has its command ended?")
    target.mkdir(parents=True, exist_ok=True)
    keep(source / "results.json", target / "results.json", [])
    if figures:
        (target / "figures").mkdir(exist_ok=True)
    for name in figures:
        picture = (source / "figures" / f"{name}.svg").read_text()
        (target / "figures" / f"{name}.svg").write_text(shrink(picture))


def main(arguments: list[str] | None = None) -> None:
    """Read the command line and keep what it names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="a results folder, or a file of JSON")
    parser.add_argument("target", type=Path, help="where the docs keep it")
    parser.add_argument("figures", nargs="*", help="that the docs embed, without .svg")
    options = parser.parse_args(arguments)
    keep(options.source, options.target, options.figures)


if __name__ == "__main__":
    main()
