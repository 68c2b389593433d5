"""The command line: `varreg compare`, `varreg reproduce`, `varreg theory`, `varreg bench`, `varreg report`, `varreg list`."""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    from rich.console import Console
    from rich.markup import escape
except ImportError as error:  # the core needs torch alone
    raise SystemExit(f"varreg: the command line needs the lab ({error}): pip install 'varreg[lab]'") from None

# What commands need is imported in them: so that --help comes at once, and the processes of the lab, which import this too, start sooner.

app = typer.Typer(
    help="How much do the samples of a mini-batch disagree about a gradient, and does it help to know?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Jobs = Annotated[
    int,
    typer.Option(
        "--jobs",
        "-j",
        help="Runs at a time, one thread each; 0: as many as there are cores. Under torchrun: of each process; 0: it shares the cores.",
        min=0,
    ),
]
Data = Annotated[
    Path | None, typer.Option("--data-dir", help="Where data sets are; then $VARREG_DATA, the user's cache, and a download.")
]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="The folder for runs and report. [default: runs/ and a name]")]


def span(text: str | None) -> tuple[float, float] | None:
    """`0.01:1`, a range."""
    if text is None:
        return None
    try:
        low, high = (float(part) for part in text.split(":"))
    except ValueError:
        raise ValueError(f"varreg: --lr must be low:high, as in 0.001:1; got {text!r}.") from None
    return low, high


def carry_out(made: Any, about: str, out: Path, jobs: int, data_dir: Path | None, total: int, command: list[str]) -> None:
    """Runs, progress, report; Ctrl-C leaves a partial report and what is needed to go on. Of a team, the first one speaks and reports."""
    from varreg.lab import experiment, report
    from varreg.lab.environment import cores
    from varreg.lab.progress import Display
    from varreg.lab.team import Team
    from varreg.lab.verdict import text

    team = Team.of_torchrun()
    jobs = jobs or max(cores() // team.here, 1)
    console = Console(quiet=not team.first)
    console.print(about, highlight=False, markup=False, soft_wrap=True)
    if team.world > 1:
        shared = f"{team.world} processes from torchrun: runs are shared out between them; each run is trained by one process."
        console.print(f"{shared} {jobs} at a time in each of them (--jobs).", highlight=False, soft_wrap=True)
    stopped = False
    try:
        with Display(total, console) as display:
            experiment.carry_out(made, out, jobs, data_dir, display, command, team)
    except KeyboardInterrupt:
        stopped = True
    if stopped and not (team.first and (out / "experiment.json").exists()):
        raise typer.Exit(130)
    if not team.first:
        return
    page, found = report.build(out)
    console.print(text(found), highlight=False, markup=False, soft_wrap=not console.is_terminal)
    console.print(f"\nReport: {page}", highlight=False, markup=False, soft_wrap=True)
    if stopped:
        console.print("Stopped. The same command goes on where it was.", highlight=False)
        raise typer.Exit(130)


@app.command()
def compare(
    optimizers: Annotated[
        list[str] | None,
        typer.Argument(help="Two or more, the base first, with options: SGD VRSGD:history=geometric [default: SGD VRSGD]"),
    ] = None,
    task: Annotated[
        str, typer.Option("--task", "-t", help="A task by name (varreg list), or your own: package.module:function.")
    ] = "digits",
    trials: Annotated[int, typer.Option(help="Settings that each optimizer may try.", min=1)] = 12,
    lr: Annotated[str | None, typer.Option(help="Range of learning rates, low:high. [default: each optimizer's own]")] = None,
    s: Annotated[list[float] | None, typer.Option("-s", "--s", help="Values of s to try. [default: 0.5 and 2]")] = None,
    tuning_seeds: Annotated[int, typer.Option(help="Seeds for each trial.", min=1)] = 2,
    seeds: Annotated[int, typer.Option(help="Fresh seeds for the verdict.", min=1)] = 10,
    epochs: Annotated[int, typer.Option(help="0: the task's own.", min=0)] = 0,
    batch: Annotated[int, typer.Option(help="0: the task's own.", min=0)] = 0,
    ablations: Annotated[bool, typer.Option(help="Also s = 0, λ replaced by its mean, λ shuffled.")] = True,
    jobs: Jobs = 0,
    data_dir: Data = None,
    out: Out = None,
) -> None:
    """Compare optimizers fairly: an equal budget, tuned on a validation split, judged on fresh paired seeds; the test split is read once."""
    look_here(task)
    from varreg.lab.compare import Comparison

    given = tuple(optimizers or ("SGD", "VRSGD"))
    made = Comparison(task, given, trials, span(lr), tuple(s or (0.5, 2.0)), tuning_seeds, seeds, epochs, batch, ablations)
    about = f"{task}: {', '.join(given)}; {trials} trials each, {made.size()} runs in all."
    name = re.sub(r"[^\w.-]+", "_", f"compare {task} {' '.join(given)}")
    carry_out(made, about, out or Path("runs") / name[:100], jobs, data_dir, made.size(), command_of(sys.argv))


@app.command()
def reproduce(
    name: Annotated[str, typer.Argument(help="fashion-mnist or cifar10")],
    epochs: Annotated[int, typer.Option(help="0: 20 for fashion-mnist, 60 for cifar10.", min=0)] = 0,
    seeds: Annotated[int, typer.Option(help="For each of the four arms.", min=1)] = 3,
    jobs: Jobs = 0,
    data_dir: Data = None,
    out: Out = None,
) -> None:
    """Repeat the paper's experiment, with the control that explains its result: SGD with a learning rate as much larger as λ made the step."""
    from varreg.lab.reproduce import Reproduction

    made = Reproduction(name, epochs, seeds)
    about = f"{name}: 4 arms × {seeds} seeds × {made.epochs} epochs."
    carry_out(made, about, out or Path("runs") / f"reproduce_{name}", jobs, data_dir, 4 * seeds, command_of(sys.argv))


@app.command()
def theory(
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder for figures and report.")] = Path("runs/theory"),
) -> None:
    """Check the paper's claims, one by one, and what the best regularizer in hindsight would gain; a minute, and no data is needed."""
    from varreg.lab import report as reports
    from varreg.lab import theory as checks
    from varreg.lab.verdict import text

    console = Console() if sys.stdout.isatty() else Console(width=200)
    names = checks.parts()
    try:
        with progress(console, len(names)) as told:
            checks.carry_out(out, command_of(sys.argv), told)
    except KeyboardInterrupt:
        console.print("Stopped; nothing was saved.", highlight=False)
        raise typer.Exit(130) from None
    page, found = reports.build(out)
    console.print(checks.shown(found))
    console.print(text(found), highlight=False, markup=False, soft_wrap=not console.is_terminal)
    console.print(f"\nReport: {page}", highlight=False, markup=False, soft_wrap=True)
    if found["unexpected"]:
        raise typer.Exit(1)


@contextlib.contextmanager
def progress(console: Console, total: int) -> Iterator[Callable[[str, float], None]]:
    """A bar on a terminal, plain lines elsewhere, for parts that end one after the other."""
    from rich.progress import Progress

    if not console.is_terminal:
        yield lambda name, seconds: print(f"{name}: {seconds:.1f} s", flush=True)
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("checks", total=total)
        yield lambda name, seconds: bar.update(task, advance=1, description=name)


@app.command()
def bench(
    only: Annotated[str | None, typer.Option(help="Of varreg's own workloads, those with this in their name.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Your own: package.module:name of a class or function that makes it; options follow: my_file:Net,width=64."
        ),
    ] = None,
    batch: Annotated[
        str | None, typer.Option(help="For --model: package.module:function that returns (inputs, targets), or a DataLoader.")
    ] = None,
    loss: Annotated[
        str | None, typer.Option(help="For --model: package.module:function of output and targets. [default: F.cross_entropy]")
    ] = None,
    input: Annotated[str | None, typer.Option(help="In place of --batch: the shape of a random input, as in 3,32,32.")] = None,
    classes: Annotated[int | None, typer.Option(help="With --input: of random targets.", min=1)] = None,
    batch_size: Annotated[int | None, typer.Option(help="With --input. [default: 64]", min=2)] = None,
    optimizers: Annotated[
        list[str] | None,
        typer.Option(help="A regularized one, with options; may be repeated. [default: VRSGD:momentum=0.9 and VRAdam]"),
    ] = None,
    groups: Annotated[str, typer.Option(help="What is measured of the samples: exact, and numbers of groups.")] = "exact,8",
    seconds: Annotated[float, typer.Option(help="For each workload and optimizer.")] = 20.0,
    threads: Annotated[int, typer.Option(help="0: as many as torch takes.", min=0)] = 0,
    memory: Annotated[bool, typer.Option(help="Measure peak memory too (Linux), in processes of their own.")] = True,
    profile: Annotated[bool, typer.Option(help="Also where the time goes: phases of a step, and operations.")] = False,
    json: Annotated[Path | None, typer.Option(help="Also write all of it to this file.")] = None,
) -> None:
    """What variance regularization costs here: a whole training step over that of torch's optimizer; on our models, or on yours."""
    look_here(model, batch, loss)
    from varreg.lab import bench as measuring
    from varreg.lab import store
    from varreg.lab.workloads import Own

    given = {"--batch": batch, "--loss": loss, "--input": input, "--classes": classes, "--batch-size": batch_size}
    alone = [name for name, value in given.items() if value is not None]
    if model is None and alone:
        raise ValueError(f"varreg: {alone[0]} is for a model of your own: --model package.module:name.")
    if batch is not None and (wrong := [name for name in ("--input", "--classes", "--batch-size") if given[name] is not None]):
        raise ValueError(f"varreg: --batch gives the whole batch, and {wrong[0]} a part of a random one. Leave one of them out.")
    own = None if model is None else Own(model, batch, loss, input, classes, batch_size)
    plan = measuring.plan(only, own, optimizers or (), groups, seconds, threads, memory, profile)
    if json is not None:
        store.check_writable(json.absolute().parent)
        if json.is_dir():
            raise ValueError(f"varreg: --json must be a file, and {json} is a folder.")
    console = Console() if sys.stdout.isatty() else Console(width=200)
    rows: list[dict[str, Any]] = []
    stopped = False
    try:
        with meter(console, plan.parts()) as told:
            rows.extend(measuring.run(plan, told))
    except KeyboardInterrupt:
        stopped = True
    found = measuring.record(plan, rows, command_of(sys.argv))
    if rows:
        pages = [measuring.profiles(row) for row in rows if profile]
        shown = [measuring.results(rows), measuring.about(plan), found["measured"], *pages, measuring.sentences(rows)]
        print("\n" + "\n\n".join(shown))
    if stopped:
        print("Stopped; nothing was saved.")
        raise typer.Exit(130)
    if json is not None:
        store.write_json(json, found)


@contextlib.contextmanager
def meter(console: Console, total: int) -> Iterator[Callable[[str, float], None]]:
    """For parts that are under way: a bar on a terminal that moves only when it is told to, so that it takes no time from what is
    measured; plain lines elsewhere.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    begun: dict[str, float] = {}
    if not console.is_terminal:

        def line(name: str, share: float) -> None:
            if begun.setdefault(name, -1.0) < 0:
                print(name, flush=True)
            begun[name] = share

        yield line
        return
    columns = (BarColumn(), TextColumn("{task.percentage:3.0f} %"), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
        task, last = bar.add_task("", total=total), 0.0

        def move(name: str, share: float) -> None:
            nonlocal last
            new = name not in begun
            begun[name] = share
            if new or share == 1.0 or time.monotonic() - last > 0.5:
                bar.update(task, completed=sum(begun.values()), description=escape(name), refresh=True)
                last = time.monotonic()

        yield move


@app.command()
def report(folder: Annotated[Path, typer.Argument(help="Of `varreg compare`, `varreg reproduce` or `varreg theory`.")]) -> None:
    """Build the page, figures and tables again, from saved results alone."""
    from varreg.lab.report import build
    from varreg.lab.verdict import text

    page, found = build(folder)
    print(text(found))
    print(f"\nReport: {page}")


@app.command(name="list")
def list_() -> None:
    """The tasks and optimizers that there are."""
    from varreg.lab import names
    from varreg.lab.optimizers import OPTIMIZERS
    from varreg.lab.tasks import TASKS

    print("Tasks, with their options:")
    for name, function in TASKS.items():
        options = {p.name: p.default for p in inspect.signature(function).parameters.values()}
        print(f"  {names.spell(name, options):42} {(function.__doc__ or '').splitlines()[0]}")
    print("\nOptimizers, and the learning rates in which they are tuned:")
    for name, entry in OPTIMIZERS.items():
        tuned = f"{entry.low:g} to {entry.high:g}" if entry.low < entry.high else "no learning rate"
        print(f"  {name:12}{tuned:20}{(entry.cls.__doc__ or '').strip().partition(chr(10))[0]}")


def look_here(*named: str | None) -> None:
    """Let Python find a user's own module in the folder where the command is given, if he names one.

    Only then: a command that is given within someone else's results must not find modules there.
    """
    if any(name and ":" in name for name in named) and "" not in sys.path:
        sys.path.insert(0, "")


def command_of(arguments: list[str]) -> list[str]:
    """As a person would type it."""
    return ["varreg", *arguments[1:]]


def main() -> None:
    try:
        app()
    except (ValueError, RuntimeError) as error:
        if not str(error).startswith("varreg: "):
            raise
        from varreg.lab.store import printable

        raise SystemExit(printable(str(error))) from None


if __name__ == "__main__":
    main()
