"""Turn the results of `benchmarks.peers --json` into the table of docs/speed.md.

python -m benchmarks.peers --json benchmarks/results/peers.json
python -m benchmarks.report benchmarks/results/peers.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def cell(row: dict[str, Any]) -> str:
    if "error" in row:
        kind, _, text = row["error"].partition(": ")
        return text if kind == "ValueError" else f"raises {kind}"
    memory = f"; {row['memory']:.2f}" if row.get("memory") else ""
    return f"**{row['ratio']:.2f}** ({row['low']:.2f}–{row['high']:.2f}){memory}"


def main() -> None:
    saved = json.loads(Path(sys.argv[1]).read_text())
    results = saved["results"]
    arms = list(next(iter(results.values())))
    print(f"Measured {saved['machine']}.\n")
    print("| | " + " | ".join(results) + " |\n| --- |" + " --- |" * len(results))
    order = [
        "plain",
        *(a for a in arms if a.startswith("varreg")),
        *(a for a in arms if a != "plain" and not a.startswith("varreg")),
    ]
    for arm in order:
        print(f"| {arm} | " + " | ".join(cell(rows[arm]) for rows in results.values()) + " |")
    print("| plain step, ms | " + " | ".join(f"{rows['plain']['milliseconds']:.0f}" for rows in results.values()) + " |")


if __name__ == "__main__":
    main()
