"""The costs of a training step: the tables of docs/evidence/speed.md, and README's."""

from __future__ import annotations

from typing import Any

from tools.tables.cells import markdown, once, ratio

Saved = dict[str, Any]
# The words in a table for a tool that cannot be timed.
SHORTLY = {"gives moments for": "incomplete", "raises": "cannot run", "second moments": "wrong"}


def _name(row: Saved) -> str:
    """Return the optimizer with its options, without the momentum: a page says which that is.

    >>> _name({"optimizer": "VRSGD:momentum=0.9"})
    '`VRSGD`'
    >>> _name({"optimizer": "VRSGD:momentum=0.9,calibrate=True"})
    '`VRSGD`, `calibrate=True`'
    """
    name, _, options = row["optimizer"].partition(":")
    shown = [each for each in options.split(",") if each and not each.startswith("momentum=")]
    return ", ".join(f"`{each}`" for each in (name, *shown))


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
    """Return whole steps and second moments alone in one small table of medians, from both files,
    with a sentence about `calibrate` where no step was measured with it, and one about memory.
    """
    rows = {(_name(row), row["workload"]): row for row in steps["rows"]}
    found = tools["results"]
    names = list(dict.fromkeys([*(work for _, work in rows), *found]))

    def whole(optimizer: str) -> list[str]:
        here = (rows.get((optimizer, name)) for name in names)
        return [f"{row['ratio']['exact'][0]:.2f}" if row else "–" for row in here]

    def alone(tool: str) -> list[str]:
        cells = (_peer(found[name][tool]) if name in found else "–" for name in names)
        return [cell.split(" (")[0] for cell in cells]

    optimizers = sorted(dict.fromkeys(optimizer for optimizer, _ in rows), key=_group)
    table = [[f"**{name}** over {_base(name)}", *whole(name)] for name in optimizers]
    table += [
        [about, *alone(tool)]
        for about, tool in (
            ("second moments alone: **varreg**", "varreg"),
            ("BackPACK", "BackPACK SumGradSquared"),
            ("`vmap(grad)`", "vmap(grad)"),
            ("Opacus", "Opacus"),
            ("one sample at a time", "one sample at a time"),
        )
    ]
    return f"{markdown(['a step over a plain one', *names], table)}\n\n{_in_words(steps)}"


def _group(optimizer: str) -> str:
    """Return what rows are sorted by: those of one optimizer stand together."""
    return {"`VRSGD`": "0", "`VRAdam`": "1"}.get(optimizer.split(",")[0], "2") + optimizer


def _base(optimizer: str) -> str:
    return optimizer.split(",")[0].replace("VR", "")


def _in_words(steps: Saved) -> str:
    """Return the sentences below the small table."""
    used = [row["bytes"] for row in steps["rows"] if "bytes" in row]
    memory = [peaks["exact"][0] / peaks["plain"][0] for peaks in used]
    said = []
    if memory:
        span = f"{min(memory):.2f} to {max(memory):.2f}"
        said = [f"Peak memory is {span} times that of plain training."]
    if not any("calibrate=True" in row["optimizer"] for row in steps["rows"]):
        said.insert(0, "These steps are without `calibrate=True`, which adds a pass over memory.")
    return "\n".join(said)


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
