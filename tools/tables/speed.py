"""The costs of a training step: the tables of docs/evidence/speed.md, and README's."""

from __future__ import annotations

from typing import Any

from tools.tables.cells import markdown, once, ratio

Saved = dict[str, Any]
# The words in a table for a tool that cannot be timed.
SHORTLY = {"gives moments for": "incomplete", "raises": "cannot run", "second moments": "wrong"}


def _name(row: Saved) -> str:
    """Return the optimizer without its options: a page says which they are."""
    return f"`{row['optimizer'].split(':')[0]}`"


def bench(saved: Saved) -> str:
    """Return whole training steps over plain ones, from `varreg bench`."""
    arms = list(saved["rows"][0]["ratio"])
    rows = [
        [row["workload"], _name(row), f"{row['milliseconds']['plain']:.1f}"]
        + [ratio(row["ratio"][arm]) for arm in arms]
        for row in saved["rows"]
    ]
    return markdown(["", "a step with", "plain, ms", *arms], once(rows))


def phases(saved: Saved) -> str:
    """Return where the time of a step goes, from `varreg bench --profile`."""
    arms = list(saved["rows"][0]["phases"])
    rows = [
        [row["workload"], _name(row)]
        + [" / ".join(f"{ms:.1f}" for ms in row["phases"][arm].values()) for arm in arms]
        for row in saved["rows"]
    ]
    return markdown(["forward / backward / step, ms", "a step with", *arms], once(rows))


def memory(saved: Saved) -> str:
    """Return peak memory over that of plain training, without torch's code."""
    rows = []
    for row in saved["rows"]:
        (plain, _), *others = row["bytes"].values()
        cells = [f"{used / plain:.2f} ({(used - plain) / 2**20:+.0f} MiB)" for used, _ in others]
        rows.append([row["workload"], _name(row), *(c.replace("-", "−") for c in cells)])
    return markdown(["", "a step with", *list(saved["rows"][0]["bytes"])[1:]], once(rows))


def growth(saved: Saved) -> str:
    """Return exact moments over a plain step at each size, from `benchmarks.growth`."""
    rows = [
        [line["model"], line["grows"]]
        + [
            f"{value:,}: {point['exact']['ratio'][0]:.2f}"
            for value, point in zip(line["values"], line["points"], strict=True)
        ]
        for line in saved["lines"].values()
    ]
    return markdown(["", "what grows", "smallest", "", "", "largest"], rows)


def _peer(row: Saved) -> str:
    """Return a cell: a ratio, or a word for what is wrong."""
    if "error" not in row:
        return ratio(row["ratio"])
    return next(word for begin, word in SHORTLY.items() if row["error"].startswith(begin))


def peers(saved: Saved) -> str:
    """Return a step with second moments over a plain one, tool by tool, from `make bench`: its
    time, and its memory after the semicolon.
    """
    results = saved["results"]
    arms = [arm for arm in next(iter(results.values())) if arm != "plain"]
    rows = []
    for arm in arms:
        used = [found[arm].get("memory") for found in results.values()]
        after = [f"; {memory:.2f}" if memory else "" for memory in used]
        times = [_peer(found[arm]) for found in results.values()]
        rows.append([arm, *(time + memory for time, memory in zip(times, after, strict=True))])
    plain = [f"{found['plain']['milliseconds']:.0f}" for found in results.values()]
    return markdown(["", *results], [*rows, ["plain step, ms", *plain]])


def in_short(steps: Saved, tools: Saved) -> str:
    """Return whole steps and second moments alone in one small table, from both files."""
    names = list(dict.fromkeys(row["workload"] for row in steps["rows"]))

    def whole(optimizer: str, arm: str) -> list[str]:
        chosen = [row for row in steps["rows"] if row["optimizer"].split(":")[0] == optimizer]
        return [ratio(row["ratio"][arm]) for row in chosen]

    def alone(tool: str) -> list[str]:
        return [_peer(tools["results"][name][tool]) for name in names]

    rows = [
        ["**`VRSGD`** over `SGD`", *whole("VRSGD", "exact")],
        ["**`VRAdam`** over `Adam`", *whole("VRAdam", "exact")],
        ["second moments alone: **varreg**", *alone("varreg")],
        ["BackPACK", *alone("BackPACK SumGradSquared")],
        ["`vmap(grad)`", *alone("vmap(grad)")],
        ["Opacus", *alone("Opacus")],
        ["one sample at a time", *alone("one sample at a time")],
    ]
    return markdown(["a training step over a plain one", *names], rows)


def optimizers(saved: Saved) -> str:
    """Return what each optimizer's `step()` and state cost, from `benchmarks.optimizer_cost`."""
    results = saved["results"]
    first = next(iter(results.values()))
    rows = []
    for name in [key for key in first if not key.startswith("VR ")]:
        ours = f"VR {name}"
        cells = [
            f"{100 * found[ours]['share'][0]:.0f} % ({100 * found[name]['share'][0]:.0f} %); "
            f"{ratio(found[ours]['ratio'])}"
            for found in results.values()
        ]
        rows.append([name, *cells, f"{first[ours]['state']:g} ({first[name]['state']:g})"])
    return markdown(["optimizer (torch's)", *results, "state"], rows)


def distributed(saved: Saved) -> str:
    """Return a step over a plain one in several processes, from `benchmarks.distributed`."""
    rows = []
    for name, row in saved["rows"].items():
        about, _, ranks = name.rpartition(", ")
        sent = [f"{row['bytes'][arm]:,}" for arm in ("plain", "exact")]
        ratios = [ratio(row[arm]) for arm in ("exact", "groups=8")]
        rows.append([about, ranks, f"{row['plain_ms']:.1f}", *ratios, *sent])
    head = ["", "ranks", "plain, ms", "exact", "groups=8", "bytes reduced: plain", "exact"]
    return markdown(head, once(rows))


def first_step(saved: Saved) -> str:
    """Return what the first observed step takes, from `benchmarks.first_step`."""
    rows = [
        [row["name"], *(f"{1000 * row[key]:.0f}" for key in ("plain", "first", "warm"))]
        for row in saved["rows"]
    ]
    return markdown(["ms", "plain step", "first observed step", "a later one"], rows)


def launches(saved: Saved) -> str:
    """Return the kernels that a step launches on a device, from `benchmarks.launches`."""
    return markdown(
        ["", "", "forward", "backward", "step", "all", "over plain", "waits"], once(saved["rows"])
    )


def compiled(saved: Saved) -> str:
    """Return steps that are observed and compiled over plain ones, from `benchmarks.compiled`."""
    rows = [
        [
            row["name"],
            str(row["threads"]),
            *(f"{row['milliseconds'][name]:.1f}" for name in ("plain", "observed")),
            ratio(row["ratio"]),
        ]
        for row in saved["rows"]
    ]
    head = ["model", "threads", "plain, compiled, ms", "observed, compiled, ms", "ratio"]
    return markdown(head, once(rows))


def roofline() -> str:
    """Return what kernels would cost at best, as `benchmarks.roofline` computes it."""
    from benchmarks.roofline import tables

    return tables().strip()
