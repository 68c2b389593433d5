"""Train a classifier on scikit-learn's embedded digits with VR-SGD, and print what the samples'
gradients say, layer by layer.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import varreg
from varreg.lab.models import digits_cnn
from varreg.tables import table


def data(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return 1,797 images of 8 × 8 pixels and labels, a quarter of them for testing."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train, test = train_test_split(
        range(len(labels)), test_size=0.25, random_state=seed, stratify=labels
    )
    return images[train], labels[train], images[test], labels[test]


def layer_table(model: nn.Module) -> str:
    """Return mean, variance and ρ of the per-sample gradients of every parameter, as a table."""
    head = ("parameter", "mean |ḡ|", "mean v²", "median ρ", "share with ρ < m")
    rows = []
    for name, p in model.named_parameters():
        m = varreg.moments(p)
        if m is None:
            continue
        rho = m.rho.nan_to_num(0.0)
        clear = (rho < m.count).double().mean()
        rows.append(
            (
                name,
                f"{m.mean.abs().mean():.2e}",
                f"{m.variance.mean():.2e}",
                f"{rho.median():.1f}",
                f"{clear:.0%}",
            )
        )
    return table(head, rows, total=False)


def main() -> None:
    """Train, and print what the samples' gradients say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument(
        "--groups", type=int, default=None, help="estimate from this many groups; default: exact"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    x, y, x_test, y_test = data(options.seed)
    model = digits_cnn()
    optimizer = varreg.VRSGD(model.parameters(), lr=options.lr, momentum=0.9, calibrate=True)

    observer = varreg.observe(model, groups=options.groups)
    print("Which rule serves which parameter:\n")
    print(observer, "\n")

    noise = varreg.NoiseScale(observer)
    print("epoch   loss  test accuracy  gradient noise scale  effective λ")
    for epoch in range(1, options.epochs + 1):
        order, total = torch.randperm(len(x)), 0.0
        batches = order.split(options.batch)[: len(x) // options.batch]
        for index in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[index]), y[index])
            loss.backward()  # an ordinary backward: the moments are there now
            noise.update()
            optimizer.step()
            total += loss.item()
        with torch.no_grad():
            accuracy = (model(x_test).argmax(1) == y_test).double().mean()
        lam = optimizer.lambda_summary().model
        effective = lam.effective if lam else float("nan")
        print(
            f"{epoch:5d}  {total / len(batches):5.3f}  {accuracy:13.1%}  {noise.value:20,.1f}  "
            f"{effective:11.2f}",
            flush=True,
        )

    print(f"\nThe last batch of {options.batch}, parameter by parameter:\n")
    print(layer_table(model))
    print(
        "\n  ḡ   the mean gradient: what the batch as a whole asks for\n"
        "  v²  the variance of the single samples' gradients: how much they disagree\n"
        f"  ρ   v²/ḡ²: disagreement in units of the signal. The mean of m = {options.batch} "
        "samples has noise v²/m, so where\n"
        "      ρ reaches m the mean cannot be told from zero. The regularizer makes steps shorter "
        "where ρ is large."
    )
    print("\nWhat the regularizer made of it, in the last step:\n")
    print(optimizer.lambda_summary())
    print(
        "\n  λ          each element's step is λ times that of SGD: below 1 where samples disagree "
        "more than they used to\n"
        "  effective  the mean of λ weighted by squared gradients: by how much the steps were "
        "longer, all in all. SGD with\n"
        "             its learning rate multiplied by it is the control for any gain; "
        "examples/plain_loop.py makes it."
    )
    print("\nLayer by layer, over the last steps:\n")
    print(noise)
    print("\n  noise scale  tr Σ/|G|²: the batch size at which noise and signal are equal")
    print("\nWhat other batches would cost, and the learning rate that they want:\n")
    print(noise.plan([factor * options.batch for factor in (1, 4, 16)]))


if __name__ == "__main__":
    main()
