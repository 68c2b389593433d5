"""The costs of measurements beside a step: tables of noise scale, Fisher, norms and monitor."""

from __future__ import annotations

from typing import Any

from tools.tables.cells import markdown, once, ratio

Saved = dict[str, Any]


def fisher(saved: Saved) -> str:
    """Return the time of a diagonal Fisher, tool by tool, from `benchmarks.fisher_cost`."""
    results = saved["results"]
    rows = []
    for name, found in results.items():
        ours, *others = found.values()
        cells = [f"{row['seconds']:.3f}, {row['over varreg']}" for row in others]
        rows.append([name, f"{ours['seconds']:.3f}", *cells])
    return markdown(["seconds, and over varreg", *next(iter(results.values()))], rows)


def steady_memory(saved: Saved) -> str:
    """Return peaks and what many steps leave, from `benchmarks.steady_memory`."""
    rows = []
    for row in saved["rows"]:
        peaks = [f"{value / 2**20:.0f}" for arm in ("plain", "exact") for value in row[arm]]
        (first, before), (last, after) = row["steady"].items()
        left = f"{(after - before) / 2**20:+.1f}".replace("-", "−")
        rows.append([row["name"], *peaks, f"{int(first):,} to {int(last):,}: {left}"])
    head = ["plain: first step", "later ones", "`VRSGD`: first step", "later ones"]
    return markdown(["MiB", *head, "more after steps"], rows)


def ideas(saved: Saved) -> str:
    """Return what each idea brought to a step with exact moments, from `benchmarks.ideas`."""
    rows = []
    for one in saved["ideas"]:
        for workload, by_optimizer in one["rows"].items():
            for spec, row in by_optimizer.items():
                before, after = row["before"], row["after"]
                cells = [
                    f"{before['ratio'][arm][0]:.2f} → {after['ratio'][arm][0]:.2f}"
                    for arm in ("exact", "groups=8")
                ]
                sizes = [side["memory"].get("exact") for side in (before, after)]
                memory = " → ".join(f"{size:.2f}" for size in sizes if size is not None)
                name = one["idea"] if one["kept"] else f"{one['idea']} (dropped)"
                rows.append([name, workload, f"`{spec.split(':')[0]}`", *cells, memory])
    return markdown(["idea", "", "a step with", "exact", "groups=8", "memory, exact"], once(rows))


def norms(saved: Saved) -> str:
    """Return a step with norms over one without, from `benchmarks.norms_cost`."""
    head = ["a training step with SGD, exact moments", "with norms over without"]
    return markdown(head, [list(item) for item in saved["ratios"].items()])


def monitor(saved: Saved) -> str:
    """Return training with the monitor over training without, from `benchmarks.monitor_cost`."""
    rows = [
        [
            name,
            ratio([row[key] for key in ("ratio", "low", "high")], digits=3),
            f"{row['share']:.2%}",
            f"{row['records']} in {row['steps']:,}",
            *(f"{row[key]:.2f}" for key in ("record", "all layers")),
        ]
        for name, row in saved["rows"].items()
    ]
    return markdown(
        [
            *("", "training with / without it", "its own account", "records in steps"),
            *("one record, in steps", "`tensorboard.log` of all layers, in steps"),
        ],
        rows,
    )


def noise(saved: Saved) -> str:
    """Return an update's share of a step in percent, from `benchmarks.noise_cost`."""
    parts = list(next(iter(saved["rows"].values())))
    rows = [[name, *(ratio(row[part]) for part in parts)] for name, row in saved["rows"].items()]
    return markdown(["share of a step, %", *parts], rows)


def noise_truth(saved: Saved) -> str:
    """Return estimates of the noise scale over the truth, from `benchmarks.noise_truth`."""
    from benchmarks.noise_truth import table

    return table(saved)


def noise_interval(saved: Saved) -> str:
    """Return how often the interval held three truths, from `benchmarks.noise_interval`."""
    from benchmarks.noise_interval import table

    return table(saved)


def noise_held(saved: Saved) -> str:
    """Return the same of all optimizers together, in a sentence."""
    from benchmarks.noise_interval import TRUTHS, checks, share

    found = [f"that of {about} in {share(checks(saved), key)}" for key, about in TRUTHS.items()]
    return (
        "On digits, where $B_n$ of each step is known, of all checks it held "
        f"{', '.join(found[:-1])}, and {found[-1]}."
    )


def lab_loop(saved: Saved) -> str:
    """Return what the lab's loop adds to a bare one in percent, from `benchmarks.lab_loop`."""
    rows = [[name, *map(ratio, parts.values())] for name, parts in saved["rows"].items()]
    return markdown(["%", "the loop adds", "with evaluations"], rows)
