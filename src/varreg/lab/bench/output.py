"""The results of `varreg bench` as a file, as tables and in words."""

from __future__ import annotations

import datetime
from typing import Any

from varreg.lab.bench.bench_plan import EXACT, PLAIN, SUMS, Plan, groups_of
from varreg.lab.bench.costs import PHASES, threads_set_to
from varreg.lab.bench.timing import Peak, Ratio
from varreg.lab.environment import device_kernels, device_name, environment, machine
from varreg.tables import table


def record(plan: Plan, rows: list[dict[str, Any]], command: list[str]) -> dict[str, Any]:
    """Return all results, for a file."""
    with threads_set_to(plan.threads):
        head = f"{datetime.date.today()}, {machine(plan.device)}"
    about = {**environment(), "threads": plan.threads, "device": device_name(plan.device)}
    if plan.device != "cpu":
        about["device_kernels"] = device_kernels(plan.device)
    return {
        "command": command,
        "measured": head,
        "seconds": plan.seconds,
        "environment": about,
        "rows": rows,
    }


def results(rows: list[dict[str, Any]]) -> str:
    """Return a table of the time of training steps relative to torch's optimizer, and of peak
    memory. The name of a workload has its own line. If the table does not fit into 100 columns,
    memory has its own table.
    """
    head, lines = _cells(rows)
    apart: list[list[str]] = []
    for name, *cells in lines:
        apart += [[name, *[""] * (len(cells) - 1)]] * bool(name) + [[f"  {cells[0]}", *cells[1:]]]
    head = head[1:]
    parts = [range(len(head))]
    time = 2 + len(rows[0]["ratio"])
    if len(head) > time and len(_columns(head, apart, parts[0]).splitlines()[1]) > 100:
        parts = [range(time), range(time, len(head))]
    return "\n\n".join(_columns(head, apart, part) for part in parts)


def _columns(head: list[str], lines: list[list[str]], part: range) -> str:
    """Return a table of some columns, after the column of names. The names of workloads do not
    widen that column.
    """
    chosen = dict.fromkeys((0, *part))
    rows = [[row[i] for i in chosen] for row in lines]
    named = [row[0] if not any(row[1:]) else "" for row in rows]
    shown = table(
        [head[i] for i in chosen],
        [["" if name else row[0], *row[1:]] for name, row in zip(named, rows, strict=True)],
        total=False,
    ).splitlines()
    return "\n".join([*shown[:2], *(n or line for n, line in zip(named, shown[2:], strict=True))])


def _cells(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the table."""
    arms = list(rows[0]["ratio"])
    measured = arms if any(row.get("bytes") for row in rows) else []
    head = ["workload", "a step with", "plain, ms", *arms, *(f"memory, {arm}" for arm in measured)]
    lines, last = [], ""
    for row in rows:
        ratios = [str(Ratio(*row["ratio"][arm])) for arm in arms]
        used = [_used(row.get("bytes", {}), arm) for arm in measured]
        name = row["workload"] if row["workload"] != last else ""
        lines.append([name, row["optimizer"], f"{row['milliseconds'][PLAIN]:.1f}", *ratios, *used])
        last = row["workload"]
    return head, lines


def _used(peaks: dict[str, Peak | None], arm: str) -> str:
    """Return an arm's memory relative to the plain step's, and the difference.

    >>> _used({"plain": Peak(30 << 20, 110 << 20), "exact": Peak(36 << 20, 116 << 20)}, "exact")
    '1.20, +6 MiB'
    """
    plain, ours = peaks.get(PLAIN), peaks.get(arm)
    if plain is None or ours is None:
        return "-"
    return f"{ours[0] / plain[0]:.2f}, {(ours[0] - plain[0]) / 2**20:+.0f} MiB".replace("-", "−")


def about(plan: Plan) -> str:
    """Return an explanation of the numbers in the table."""
    memory = (
        "Memory: what training needs at its peak, over the plain one, in fresh processes; without "
        "torch's own code.\n"
        if plan.device == "cpu"
        else "Memory: what training needs of the device's memory at its peak, over the plain one.\n"
    )
    return (
        "Whole training steps (zero_grad, forward, backward, step) over the same with torch's "
        "optimizer:\n"
        f"median of the ratios of steps in the same round (10 %–90 %).\n{memory * plan.memory}"
        "Before, all moments were compared with those of a loop over single samples."
    )


def sentences(rows: list[dict[str, Any]]) -> str:
    """Return the results in words, one line for each workload."""
    lines: dict[str, list[str]] = {}
    for row in rows:
        costs = [f"{_moments(arm)} cost {_cost(Ratio(*r))}" for arm, r in row["ratio"].items()]
        lines.setdefault(row["workload"], []).append(f"with {row['optimizer']}, {', '.join(costs)}")
    return "\n".join(f"{name}: {'; '.join(said)}." for name, said in lines.items())


def _moments(arm: str) -> str:
    """Return the moments that an arm measures, in words."""
    if arm == SUMS:
        return "sums over elements, without λ,"
    return "exact moments and λ" if arm == EXACT else f"those of {groups_of(arm)} groups"


def _cost(r: Ratio) -> str:
    """Return how much longer a step takes, in words.

    >>> _cost(Ratio(1.128, 1.1, 1.2)), _cost(Ratio(0.99, 0.9, 1.02))
    ('13 % of a step (10 to 20 %)', 'nothing that could be measured (−10 to 2 %)')
    """
    low, middle, high = (100 * (x - 1) for x in (r.low, r.middle, r.high))
    said = f"{middle:.0f} % of a step" if middle >= 0.5 else "nothing that could be measured"
    return f"{said} ({low:.0f} to {high:.0f} %)".replace("-", "−")


def profiles(row: dict[str, Any], most: int = 12) -> str:
    """Return the profile of a step: its phases, and the operations in which an observed step takes
    longer; also the device's kernels, where torch's profiler sees them.
    """
    arms = list(row["milliseconds"])
    phases = [[phase, *(f"{row['phases'][arm][phase]:.2f}" for arm in arms)] for phase in PHASES]
    step = ["whole step", *(f"{row['milliseconds'][arm]:.2f}" for arm in arms)]
    times = row["operations"]
    rest = [max(0.0, row["milliseconds"][arm] - sum(times[arm].values())) for arm in arms]
    outside = ["outside of them: Python, varreg's C", *(f"{ms:.2f}" for ms in rest)]
    title = f"{row['workload']}, {row['optimizer']}: milliseconds"
    by_phase = table(["", *arms], [*phases, step])
    parts = [title, by_phase]
    for name, head, last in (("operations", "operation", [outside]), ("kernels", "kernel", [])):
        if found := row.get(name):
            lines = [*_largest(found, arms, name, most), *last]
            parts.append(table([head, *arms], lines, total=False))
    return "\n\n".join(parts)


def _largest(
    times: dict[str, dict[str, float]], arms: list[str], name: str, most: int
) -> list[list[str]]:
    """Return rows of the operations, or kernels, in which an observed step takes longer, and a row
    of the others.
    """
    grown = sorted(
        {each for arm in arms for each in times[arm]},
        key=lambda each: (
            -max(times[arm].get(each, 0.0) - times[PLAIN].get(each, 0.0) for arm in arms[1:]),
            each,
        ),
    )
    rows = [[each, *(f"{times[arm].get(each, 0.0):.2f}" for arm in arms)] for each in grown[:most]]
    rest = [sum(times[arm].get(each, 0.0) for each in grown[most:]) for arm in arms]
    return [*rows, [f"other {name}", *(f"{ms:.2f}" for ms in rest)]]
