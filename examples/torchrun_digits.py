r"""Train on scikit-learn's digits in several processes, with VR-SGD, and go on from the last
complete checkpoint if one of them dies.

    torchrun --nproc-per-node 2 examples/torchrun_digits.py
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nproc-per-node 2 --max-restarts 3 \
        examples/torchrun_digits.py --folder runs/torchrun

The second one starts all processes again if one of them dies. (Without the variable they may meet
at the addresses of those that are dead: pytorch/pytorch#135712.) Started without torchrun, it is
one process, which takes the same steps up to rounding.
"""

from __future__ import annotations

import argparse
import os
import zipfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import varreg
from digits import data
from varreg.lab.models import digits_cnn


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint whole or not at all: into a file of another name, through to the disk, and
    then under its name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    begun = path.with_suffix(".tmp")
    with begun.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    begun.replace(path)


def last_saved(folder: Path) -> dict[str, Any] | None:
    """Return the last complete checkpoint. The end of a zip file, which is what torch saves, lists
    what is in it: without one, it was cut short.
    """
    complete = [path for path in sorted(folder.glob("epoch-*.pt")) if zipfile.is_zipfile(path)]
    return torch.load(complete[-1], weights_only=True) if complete else None


def main() -> None:
    """Train in one of the processes, from the last checkpoint on."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument(
        "--batch", type=int, default=64, help="samples in a step, of all processes together"
    )
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument(
        "--folder",
        type=Path,
        help="save a checkpoint here after each epoch, and go on from the last one",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=60,
        help="seconds to wait for another process before it is an error",
    )
    parser.add_argument("--float64", action="store_true", help="in double precision")
    options = parser.parse_args()
    rank, world = (
        int(os.environ.get("RANK", 0)),
        int(os.environ.get("WORLD_SIZE", 1)),
    )  # torchrun sets them
    if options.batch % world:
        parser.error(
            f"a batch of {options.batch} cannot be shared out evenly between {world} processes"
        )
    if world > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=options.timeout))
    if options.float64:
        torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    x, y, x_test, y_test = data(0)
    x, x_test = x.to(torch.get_default_dtype()), x_test.to(torch.get_default_dtype())

    model = digits_cnn()
    varreg.observe(model)  # the first line
    optimizer = varreg.VRSGD(model.parameters(), lr=options.lr, momentum=0.9)  # the second
    first = 1
    box = [last_saved(options.folder) if options.folder and rank == 0 else None]
    if world > 1:
        dist.broadcast_object_list(box)  # what the first process has is what all go on from
    if (saved := box[0]) is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"] + 1
    parallel = DistributedDataParallel(model) if world > 1 else model
    # DDP puts gradients into another order after its first backward, and the last bits of a sum
    # over more than two processes depend on it.
    # With a backward for nothing, all steps have the same order, also those of a run that goes on.
    F.cross_entropy(parallel(x[:1]), y[:1]).backward()

    for epoch in range(first, options.epochs + 1):
        order = torch.randperm(
            len(x), generator=torch.Generator().manual_seed(epoch)
        )  # of the epoch alone: nothing else to save
        for batch in order.split(options.batch)[: len(x) // options.batch]:
            mine = batch[rank::world]  # the same number for all: then samples weigh the same
            optimizer.zero_grad()
            F.cross_entropy(parallel(x[mine]), y[mine]).backward()
            optimizer.step()  # with the moments of the whole batch, and so the same on all
        if rank == 0:
            if options.folder:
                state = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "epoch": epoch,
                }
                save(options.folder / f"epoch-{epoch:03d}.pt", state)
            with torch.no_grad():
                output = model(x_test)
            loss, accuracy = (
                F.cross_entropy(output, y_test),
                (output.argmax(1) == y_test).double().mean(),
            )
            whole = optimizer.lambda_summary().model
            print(
                f"epoch {epoch}: test loss {loss:.4f}, accuracy {accuracy:.1%}, mean λ "
                f"{whole.mean if whole else 1:.4f}",
                flush=True,
            )
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
