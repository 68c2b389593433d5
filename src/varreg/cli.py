"""The command line: `varreg compare`, `varreg reproduce`, `varreg scaling`, `varreg theory`,
`varreg bench`, `varreg noise`, `varreg report`, `varreg list`.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Annotated

from varreg import __version__
from varreg.errors import VarregError

try:
    import typer
except ImportError as error:  # the core needs torch alone
    raise SystemExit(
        f"varreg: the command line needs the lab ({error}): pip install 'varreg[lab]'"
    ) from None

# Each command imports its modules itself, since torch takes seconds to import. So `--help` and the
# first line of a command appear at once.

app = typer.Typer(
    help="How much do the samples of a mini-batch disagree about a gradient, and does it help to "
    "know?",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Jobs = Annotated[
    int,
    typer.Option(
        "--jobs",
        "-j",
        help="Runs at a time, one thread each; 0: one for each core. Under torchrun: runs of each "
        "process.",
        min=0,
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        help="The folder of data sets; else $VARREG_DATA, the user's cache, or a download.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="The folder for runs and report. [default: runs/ and a name]"),
]


def print_version(asked: bool) -> None:
    """Print the version and exit, if `--version` is given."""
    if asked:
        print(f"varreg {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=print_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Take the options that all commands have in common."""


def say(words: str) -> None:
    """Print the first line of a command, before the slow imports. Under torchrun, only one of the
    processes prints it.
    """
    if os.environ.get("RANK", "0") == "0":
        print(words, flush=True)


def span(text: str | None) -> tuple[float, float] | None:
    """Return the two ends of a range such as `0.01:1`."""
    if text is None:
        return None
    try:
        low, high = (float(part) for part in text.split(":"))
    except ValueError:
        raise VarregError(f"varreg: --lr must be low:high, as in 0.001:1; got {text!r}.") from None
    return low, high


@app.command(short_help="Does it help? Optimizers tuned and judged fairly.")
def compare(
    optimizers: Annotated[
        list[str] | None,
        typer.Argument(
            help="Two or more, the base first, with options: SGD VRSGD:history=geometric [default: "
            "SGD VRSGD]"
        ),
    ] = None,
    task: Annotated[
        str,
        typer.Option(
            "--task",
            "-t",
            help="A task by name (varreg list), or your own: module:function or path.py:function.",
        ),
    ] = "digits",
    trials: Annotated[int, typer.Option(help="Settings to try for each optimizer.", min=1)] = 12,
    lr: Annotated[
        str | None,
        typer.Option(help="Range of learning rates, low:high. [default: each optimizer's own]"),
    ] = None,
    s: Annotated[
        list[float] | None,
        typer.Option("-s", "--s", help="Values of s to try. [default: 0.5 and 2]"),
    ] = None,
    tuning_seeds: Annotated[int, typer.Option(help="Seeds for each trial.", min=1)] = 2,
    seeds: Annotated[int, typer.Option(help="Fresh seeds for the verdict.", min=1)] = 10,
    epochs: Annotated[int, typer.Option(help="Epochs of a run; 0: the task's own.", min=0)] = 0,
    batch: Annotated[int, typer.Option(help="Batch size; 0: the task's own.", min=0)] = 0,
    ablations: Annotated[
        bool, typer.Option(help="Also run s = 0, λ replaced by its mean, and λ shuffled.")
    ] = True,
    schedule: Annotated[
        list[str] | None,
        typer.Option(
            help="constant, linear or cosine; several are tuned with the learning rate. [default: "
            "constant]"
        ),
    ] = None,
    warmup: Annotated[
        float | None,
        typer.Option(help="The share of all steps in which the learning rate rises from 0."),
    ] = None,
    clip: Annotated[float | None, typer.Option(help="Clip gradients to this norm.")] = None,
    weight_decay: Annotated[
        float | None, typer.Option(help="Of all optimizers without a weight decay of their own.")
    ] = None,
    augment: Annotated[
        str | None, typer.Option(help="Change images at random: crop, flip or crop+flip.")
    ] = None,
    batch_norm: Annotated[
        str | None, typer.Option(help="contribution: allow BatchNorm, as in varreg.observe.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="The device of all runs: cpu, cuda, cuda:1, mps, xpu.")
    ] = None,
    jobs: Jobs = 0,
    data_dir: Data = None,
    out: Out = None,
) -> None:
    """Compare optimizers fairly: an equal budget, tuned on a validation split, judged on fresh
    paired seeds; the test split is read once.
    """
    given = tuple(optimizers or ("SGD", "VRSGD"))
    look_here(task, *given)
    say(f"compare {task}: {', '.join(given)}")
    from varreg.lab.experiments.compare.plan import Comparison
    from varreg.lab.experiments.conduct import conduct

    schedules = tuple(schedule or ())
    common = {"warmup": warmup, "clip": clip, "weight_decay": weight_decay, "augment": augment}
    common |= {"batch_norm": batch_norm, "device": device}
    if len(schedules) == 1:
        common["schedule"], schedules = schedules[0], ()
    comparison = Comparison(
        task,
        given,
        trials,
        span(lr),
        tuple(s or (0.5, 2.0)),
        tuning_seeds,
        seeds,
        epochs,
        batch,
        ablations,
        {key: value for key, value in common.items() if value is not None},
        schedules,
    )
    size = comparison.size()
    name = re.sub(r"[^\w.-]+", "_", f"compare {task} {' '.join(given)}")
    folder = out or Path("runs") / name[:100]
    about = f"{trials} trials each, {size} runs in all, to {folder}."
    leave(conduct(comparison, about, folder, jobs, data_dir, size, command_of(sys.argv)))


@app.command(short_help="The paper's experiments, with the control that they lack.")
def reproduce(
    name: Annotated[str, typer.Argument(help="fashion-mnist or cifar10")],
    epochs: Annotated[
        int, typer.Option(help="Epochs of a run; 0: 20 for fashion-mnist, 60 for cifar10.", min=0)
    ] = 0,
    seeds: Annotated[int, typer.Option(help="Seeds of each of the four arms.", min=1)] = 6,
    jobs: Jobs = 0,
    data_dir: Data = None,
    out: Out = None,
) -> None:
    """Repeat the paper's experiment, with the control that explains its result: SGD whose learning
    rate is multiplied by the mean λ, so that its steps are as long.
    """
    say(f"reproduce {name}")
    from varreg.lab.experiments.conduct import conduct
    from varreg.lab.experiments.reproduce.plan import Reproduction
    from varreg.lab.report.format import count

    reproduction = Reproduction(name, epochs, seeds)
    about = f"4 arms × {count(seeds, 'seed')} × {count(reproduction.epochs, 'epoch')}."
    folder = out or Path("runs") / f"reproduce_{name}"
    leave(conduct(reproduction, about, folder, jobs, data_dir, 4 * seeds, command_of(sys.argv)))


@app.command(short_help="Larger batches, by AdaScale or by the noise scale's plan.")
def scaling(
    question: Annotated[
        str, typer.Argument(help="plan: the noise scale's number of steps; adascale: AdaScale.")
    ],
    task: Annotated[
        str, typer.Option("--task", "-t", help="A task by name (varreg list), or your own.")
    ] = "digits",
    optimizer: Annotated[
        str, typer.Option(help="An optimizer with its options, including a schedule.")
    ] = "SGD:momentum=0.9,schedule=cosine",
    batch: Annotated[int, typer.Option(help="The base batch.", min=1)] = 8,
    scales: Annotated[str, typer.Option(help="Larger batches over the base batch.")] = "4,16,64",
    epochs: Annotated[int, typer.Option(help="Epochs of the base; 0: the task's.", min=0)] = 0,
    trials: Annotated[int, typer.Option(help="Learning rates of each tuning.", min=1)] = 7,
    lr: Annotated[
        str | None,
        typer.Option(help="Range for the base, low:high. [default: the optimizer's own]"),
    ] = None,
    tuning_seeds: Annotated[int, typer.Option(help="Seeds for each trial.", min=1)] = 2,
    seeds: Annotated[int, typer.Option(help="Fresh seeds for the verdict.", min=1)] = 10,
    jobs: Jobs = 0,
    data_dir: Data = None,
    out: Out = None,
) -> None:
    """Tune at a small batch, go to larger ones by a plan of the noise scale or by AdaScale, and
    compare with simple rules and with tuning again.
    """
    look_here(task, optimizer)
    say(f"scaling {question}: {task}, {optimizer}, batch {batch} × {scales}")
    from varreg.lab.experiments.conduct import conduct
    from varreg.lab.experiments.scaling.plan import Scaling

    larger = tuple(batch_sizes(scales, "--scales"))
    experiment = Scaling(
        question, task, optimizer, batch, larger, epochs, trials, span(lr), tuning_seeds, seeds
    )
    size = experiment.size()
    about = f"About {size} runs."
    name = re.sub(r"[^\w.-]+", "_", f"scaling {question} {task}")
    folder = out or Path("runs") / name[:100]
    leave(conduct(experiment, about, folder, jobs, data_dir, size, command_of(sys.argv)))


@app.command(short_help="The paper's claims, checked one by one.")
def theory(
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The folder for figures and report.")
    ] = Path("runs/theory"),
) -> None:
    """Check the paper's claims, one by one, and compute what the best regularizer in hindsight
    would gain. It takes a minute, and needs no data.
    """
    say("theory: checks of the paper's claims")
    from varreg.lab.experiments.conduct import conduct_theory

    leave(conduct_theory(out, command_of(sys.argv)))


@app.command(short_help="What a training step costs, on this machine.")
def bench(
    only: Annotated[
        str | None, typer.Option(help="Only those of varreg's workloads with this in their name.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Your model: package.module:name of a class or function that makes it; options "
            "follow, as in my_file:Net,width=64."
        ),
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option(
            help="For --model: package.module:function that returns (inputs, targets), or a "
            "DataLoader."
        ),
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(
            help="For --model: package.module:function of output and targets. [default: "
            "F.cross_entropy]"
        ),
    ] = None,
    input: Annotated[
        str | None,
        typer.Option(help="In place of --batch: the shape of a random input, as in 3,32,32."),
    ] = None,
    classes: Annotated[
        int | None, typer.Option(help="With --input: the number of random classes.", min=1)
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="With --input: the batch size. [default: 64]", min=2)
    ] = None,
    optimizers: Annotated[
        list[str] | None,
        typer.Option(
            help="A regularized optimizer with its options; may be repeated. [default: "
            "VRSGD:momentum=0.9 and VRAdam]"
        ),
    ] = None,
    groups: Annotated[
        str,
        typer.Option(help="Moments to measure: exact, numbers of groups, or model (sums only)."),
    ] = "exact,8",
    device: Annotated[
        str, typer.Option(help="The device of the models: cpu, cuda, cuda:1, mps, xpu.")
    ] = "cpu",
    seconds: Annotated[float, typer.Option(help="Seconds of a workload and optimizer.")] = 20.0,
    threads: Annotated[int, typer.Option(help="Threads; 0: torch's own number.", min=0)] = 0,
    memory: Annotated[
        bool, typer.Option(help="Also measure peak memory (Linux), in fresh processes.")
    ] = True,
    profile: Annotated[
        bool, typer.Option(help="Also show the time of phases of a step, and of operations.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Also write all results to this file.")] = None,
) -> None:
    """Measure the cost of variance regularization on this machine: the time of a whole training
    step over that with torch's optimizer, for varreg's models or for yours.
    """
    look_here(model, batch, loss)
    say("bench: the moments are checked first, then steps are timed")
    from varreg.lab.bench.bench import conduct
    from varreg.lab.bench.bench_plan import plan
    from varreg.lab.bench.user_workload import workload_of_command

    user = workload_of_command(model, batch, loss, input, classes, batch_size)
    made = plan(only, user, optimizers or (), groups, seconds, threads, memory, profile, device)
    leave(conduct(made, json, command_of(sys.argv)))


@app.command(short_help="How noisy the gradients of a task are, and which batch fits.")
def noise(
    task: Annotated[
        str,
        typer.Option(
            "--task",
            "-t",
            help="A task by name (varreg list), or your own: module:function or path.py:function.",
        ),
    ] = "digits",
    optimizer: Annotated[
        str, typer.Option(help="An optimizer with its options, as in SGD:momentum=0.9.")
    ] = "SGD",
    lr: Annotated[
        float | None,
        typer.Option(help="The learning rate. [default: the middle of the optimizer's range]"),
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps to train.", min=2)] = 500,
    batch: Annotated[int, typer.Option(help="Batch size; 0: the task's own.", min=0)] = 0,
    window: Annotated[int, typer.Option(help="Average over this number of steps.", min=2)] = 200,
    plan: Annotated[
        str | None,
        typer.Option(help="Batches to plan, as in 32,128,512. [default: 1/4 to 64 times this one]"),
    ] = None,
    l1: Annotated[
        bool, typer.Option("--l1", help="The version for optimizers that step by signs.")
    ] = False,
    seed: Annotated[int, typer.Option(help="The seed of parameters and batches.")] = 0,
    data_dir: Data = None,
    out: Out = None,
) -> None:
    """Measure how noisy the gradients of a task are, in some steps of training, and plan other
    batch sizes.
    """
    look_here(task)
    say(f"noise: {task}, {optimizer}, {steps} steps")
    from varreg.lab.noise_meter import Measurement, conduct

    measurement = Measurement(task, optimizer, lr, steps, batch, window, l1, seed)
    name = re.sub(r"[^\w.-]+", "_", f"noise {task} {optimizer}")
    folder = out or Path("runs") / name[:100]
    leave(conduct(measurement, batch_sizes(plan), folder, data_dir, command_of(sys.argv)))


def batch_sizes(text: str | None, option: str = "--plan") -> list[int]:
    """Return the whole numbers in a text such as `32,128`; an empty list without a text."""
    try:
        return [int(part) for part in text.split(",")] if text is not None else []
    except ValueError:
        raise VarregError(
            f"varreg: {option} must be whole numbers, as in 32,128; got {text!r}."
        ) from None


@app.command(short_help="Build the page of a folder again, from saved results.")
def report(
    folder: Annotated[
        Path,
        typer.Argument(help="A folder of `varreg compare`, `reproduce`, `scaling` or `theory`."),
    ],
) -> None:
    """Build the page, figures and tables again, from saved results alone."""
    say(f"report: {folder}")
    from varreg.lab.report.builder import build
    from varreg.lab.report.format import text

    page, findings = build(folder)
    print(text(findings))
    print(f"\nReport: {page}")


@app.command(name="list", short_help="The available tasks and optimizers.")
def list_() -> None:
    """List the available tasks and optimizers."""
    from varreg.lab.listing import listing

    print(listing())


def leave(code: int) -> None:
    """End the command with an exit code, if it is not 0."""
    if code:
        raise typer.Exit(code)


def look_here(*named: str | None) -> None:
    """Make modules in the current folder importable, if the command names a user's module.

    Otherwise the folder is not searched: a command that runs inside someone else's results must not
    import modules from there.
    """
    if any(name and ":" in name for name in named) and "" not in sys.path:
        sys.path.insert(0, "")


def command_of(arguments: list[str]) -> list[str]:
    """Return the command as a person would type it."""
    return ["varreg", *arguments[1:]]


def main() -> None:
    """Run the command line. Errors of varreg become one message and an exit code; errors in a
    user's code keep their traceback.
    """
    try:
        app()
    except VarregError as error:
        from varreg.lab.store import printable
        from varreg.lab.user_code import traceback_of

        print(printable(traceback_of(error)), end="", file=sys.stderr)
        raise SystemExit(printable(str(error))) from None


if __name__ == "__main__":
    main()
