"""Draw the way of the data, with the names of the files on it: docs/develop/way.svg.

python -m tools.picture            # write it
python -m tools.picture --check    # fail if a file is not there, or the picture is another
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs" / "develop" / "way.svg"
# Title, what happens there, and the files in the order in which a batch passes them.
STAGES = (
    (
        "forward",
        "parameters meet the batch",
        "engine/forward.py",
        "engine/inputs_outputs.py",
        "engine/trace/tracer.py",
        "engine/trace/plans.py",
        "engine/mechanisms/by_rule.py",
        "engine/mechanisms/by_spread.py",
        "engine/mechanisms/by_repetition.py",
        "engine/mechanisms/by_module.py",
    ),
    (
        "backward",
        "what each sample contributes",
        "engine/mechanisms/node.py",
        "engine/rules/",
        "engine/contribution.py",
        "native/layer_sums.py",
        "native/reductions.py",
    ),
    (
        "moments",
        "m, S, W → ḡ, v², ρ",
        "engine/window.py",
        "engine/ledger.py",
        "engine/mean_variance.py",
        "parallel/",
    ),
    (
        "λ",
        "ρ, ρ̄ → λ",
        "optim/collect.py",
        "optim/increments.py",
        "histories.py",
        "regularizer.py",
        "optim/scopes.py",
    ),
    (
        "step",
        "x + λ (x′ − x)",
        "optim/base.py",
        "optim/step.py",
        "native/step.py",
        "optim/sgd.py, adam.py, …",
    ),
)
WIDTH, GAP, LINE = 720, 24, 21
NAMES = (216, 472)
"""Where the two columns of files begin, right of what a stage is called."""


def draw() -> str:
    """Return the picture as SVG: a row for each stage, as wide as the text of a page."""
    parts, top = [], 4
    for i, (title, question, *files) in enumerate(STAGES):
        lines = -(-len(files) // len(NAMES))
        height = max(LINE * lines + 22, 62)
        parts.append(
            f'<rect x="4" y="{top}" width="{WIDTH - 8}" height="{height}" rx="8" fill="#f4faf9" '
            'stroke="#00897b"/>'
            f'<text x="16" y="{top + 26}" font-size="17" font-weight="bold" fill="#00695c">{title}'
            "</text>"
            f'<text x="16" y="{top + 47}" fill="#555">{question}</text>'
        )
        for k, file in enumerate(files):
            x, y = NAMES[k // lines], top + 26 + LINE * (k % lines)
            parts.append(
                f'<text x="{x}" y="{y}" font-family="monospace" font-size="11.5" fill="#222">'
                f"{file}</text>"
            )
        if i:
            parts.append(
                f'<path d="M{WIDTH // 2} {top - GAP + 4}v{GAP - 10}m-5 -6l5 6l5 -6" fill="none" '
                'stroke="#00897b" stroke-width="2"/>'
            )
        top += height + GAP
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top - GAP + 4}" '
        'font-family="sans-serif" font-size="12.5">'
    )
    title = "<title>The way of the data: forward, backward, moments, λ, step</title>"
    return "\n".join([head, title, *parts, "</svg>", ""])


def missing() -> list[str]:
    """Return the files in the picture that do not exist."""
    names = [file.split(",")[0] for _, _, *files in STAGES for file in files]
    return [name for name in names if not (ROOT / "src" / "varreg" / name).exists()]


def main() -> int:
    """Write the picture, or check it."""
    if gone := missing():
        print(f"in the picture, but not in src/varreg: {', '.join(gone)}")
        return 1
    if "--check" in sys.argv[1:]:
        if PICTURE.read_text() == draw():
            return 0
        print(f"{PICTURE.name} is out of date: run python -m tools.picture.")
        return 1
    PICTURE.write_text(draw())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
