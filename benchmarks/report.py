"""Turn what `varreg bench --json` or `benchmarks.peers --json` wrote into a table in Markdown.

varreg bench --json benchmarks/results/bench.json
python -m benchmarks.report benchmarks/results/bench.json
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks import peers
from varreg.lab import bench
from varreg.lab.store import read_json


def markdown(saved: dict[str, Any]) -> str:
    return bench.markdown(saved["rows"]) if "rows" in saved else peers.table(saved["results"])


def main(arguments: list[str] | None = None) -> None:
    (path,) = arguments or sys.argv[1:]
    saved = read_json(Path(path))
    print(f"Measured {saved['measured']}.\n\n{markdown(saved)}")


if __name__ == "__main__":
    main()
