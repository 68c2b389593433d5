"""The table of checks: its cells, for a page and for a terminal."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from varreg.lab.experiments.theory.analysis import all_checks
from varreg.lab.report.document import Findings
from varreg.lab.report.format import number

HEAD = ("claim", "statement", "conditions", "measured", "", "bound", "slack", "verdict")


def slack(check: dict[str, Any]) -> str:
    """Return the distance to the bound: a factor for an inequality, a percentage for an equation, a
    difference for an exponent.

    >>> slack({"relation": "=", "measured": 1.1, "bound": 1.0, "slack": 0.909})
    '+10 %'
    """
    measured, bound = check["measured"], check["bound"]
    if check["relation"] == "=":
        off = 100 * (measured / bound - 1)
        return f"{off:+,.{1 if abs(off) < 10 else 0}f} %".replace("-", "−")
    if measured < 0:
        return f"{bound - measured:+.2f}".replace("-", "−")
    return f"{number(check['slack'])}×" if measured else "–"


def measured(check: dict[str, Any]) -> str:
    """Return the measured value, with two standard errors if there are any."""
    error = check["error"]
    return number(check["measured"]) + (f" ± {2 * error:.1g}" if error else "")


def cells(check: dict[str, Any]) -> list[str]:
    """Return the cells of a check, as `HEAD` has them."""
    return [
        *(check["claim"], check["statement"], check["conditions"]),
        *(measured(check), check["relation"], number(check["bound"])),
        *(slack(check), check["verdict"]),
    ]


def terminal_table(findings: Findings) -> Table:
    """Return the table of claims for a terminal: a row for each statement that holds, and one for
    each case in which it does not hold. The page has every check.
    """
    table = Table(box=box.SIMPLE_HEAD, show_lines=False, pad_edge=False)
    table.add_column("claim", max_width=22)
    table.add_column("statement, and where it does not hold")
    table.add_column("of its checks", no_wrap=True)
    statements: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for check in all_checks(findings):
        statements.setdefault((check["claim"], check["statement"]), []).append(check)
    last = ""
    for (claim, statement), checks in statements.items():
        if last not in ("", claim):
            table.add_section()
        count = f"{sum(check['holds'] for check in checks)} of {len(checks)} hold"
        table.add_row(*map(Text, (claim if claim != last else "", statement, count)))
        for check in checks:
            if not check["holds"]:
                found = f"{measured(check)}, not {check['relation']} {number(check['bound'])}"
                cells_ = Padding(Text(check["conditions"]), (0, 0, 0, 2)), Text(found)
                table.add_row("", *cells_, style="yellow")
        last = claim
    return table
