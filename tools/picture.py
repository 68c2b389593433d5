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
WIDTH, GAP, TOP, LINE = 244, 26, 74, 21


def draw() -> str:
    """Return the picture as SVG."""
    height = TOP + LINE * max(len(files) for _, _, *files in STAGES) + 4
    total = len(STAGES) * (WIDTH + GAP) - GAP + 8
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {height}" '
            'font-family="sans-serif" font-size="13">'
        ),
        "<title>The way of the data: forward, backward, moments, λ, step</title>",
    ]
    for i, (title, question, *files) in enumerate(STAGES):
        x = 4 + i * (WIDTH + GAP)
        parts.append(
            f'<rect x="{x}" y="4" width="{WIDTH}" height="{height - 8}" rx="8" fill="#f4faf9" '
            'stroke="#00897b"/>'
            f'<text x="{x + 12}" y="28" font-size="17" font-weight="bold" fill="#00695c">{title}'
            "</text>"
            f'<text x="{x + 12}" y="49" fill="#555">{question}</text>'
        )
        for k, file in enumerate(files):
            y = TOP + LINE * k
            parts.append(
                f'<text x="{x + 12}" y="{y}" font-family="monospace" font-size="11" fill="#222">'
                f"{file}</text>"
            )
        if i:
            y = height // 2
            parts.append(
                f'<path d="M{x - GAP + 4} {y}h{GAP - 12}m-6 -5l6 5l-6 5" fill="none" '
                'stroke="#00897b" stroke-width="2"/>'
            )
    return "\n".join([*parts, "</svg>", ""])


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
