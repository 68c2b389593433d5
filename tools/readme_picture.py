"""Draw README's picture: the noise scale and λ of a real small training, from a monitor's data.

python -m tools.readme_picture     # writes docs/assets/noise-and-lambda.svg, in a few seconds
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path

import matplotlib as mpl
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import nn

import varreg
from varreg.lab.report.style import COLORS, STYLE, new_figure, save
from varreg.monitor.journal import Log

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs" / "assets" / "noise-and-lambda.svg"
BATCH = 64


def train(steps: int, folder: Path) -> Log:
    """Train a small classifier of digits, and return what a monitor recorded."""
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    model = nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    optimizer = varreg.VRSGD(model.parameters(), lr=0.02, momentum=0.9, calibrate=True)
    with varreg.Monitor(varreg.observe(model), optimizer, folder, every=10) as monitor:
        for _ in range(steps):
            batch = torch.randint(len(x), (BATCH,))
            loss = F.cross_entropy(model(x[batch]), y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss)
    return varreg.monitor.read(folder)


def draw(log: Log) -> Figure:
    """Return the noise scale beside the batch, and λ, over the steps of a training."""
    rows = {name: [r.get(name, math.nan) for r in log.records] for name in log.records[-1]}
    step, low, high = (rows[k] for k in ("step", "noise_scale_low", "noise_scale_high"))
    figure, (left, right) = new_figure(2, height=2.8)
    top = 4 * max(v for v in rows["noise_scale"] if math.isfinite(v))
    left.fill_between(step, low, [min(h, top) for h in high], color=COLORS[1], alpha=0.2, lw=0)
    left.plot(step, rows["noise_scale"], color=COLORS[1], label="noise scale, and its interval")
    left.axhline(BATCH, color=COLORS[0], ls="--", label=f"batch: {BATCH}")
    left.set(title="Which batch size?", xlabel="step", ylabel="samples")
    left.set_yscale("log")
    left.set_ylim(10, top)
    right.fill_between(
        step, rows["lambda_q10"], rows["lambda_q90"], color=COLORS[2], alpha=0.2, lw=0
    )
    right.plot(step, rows["lambda_q50"], color=COLORS[2], label="median, and 80 % of all elements")
    right.set(title="λ, which scales each step", xlabel="step", ylabel="λ")
    for axes in (left, right):
        axes.legend(loc="best")
    return figure


def main() -> None:
    """Train, and write the picture."""
    parser = argparse.ArgumentParser("python -m tools.readme_picture", description=__doc__)
    parser.add_argument("--steps", type=int, default=800)
    with tempfile.TemporaryDirectory() as folder:
        log = train(parser.parse_args().steps, Path(folder))
    with mpl.rc_context(STYLE):
        save(draw(log), PICTURE, metadata={"Date": None})
    print(f"{PICTURE.relative_to(ROOT)}: noise scale {log.records[-1]['noise_scale']:.3g}")


if __name__ == "__main__":
    main()
