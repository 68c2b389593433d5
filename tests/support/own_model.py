"""A user's model and batch, as in the documentation; and some that cannot be measured."""

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(12, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 3)
        )

    def forward(self, x):
        return self.layers(x)


def batch(samples=16):
    return torch.randn(samples, 3, 4), torch.randint(0, 3, (samples,))


ready = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch(20)), batch_size=10)


class Two(nn.Module):
    """Two inputs, by name or in order; two outputs."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 2), nn.Linear(5, 2)

    def forward(self, a, b):
        return self.a(a), self.b(b)


def two_inputs():
    return (torch.randn(9, 4), torch.randn(9, 5)), torch.randn(9, 2)


def named_inputs():
    return {"b": torch.randn(9, 5), "a": torch.randn(9, 4)}, torch.randn(9, 2)


def both(output, y):
    return F.mse_loss(output[0], y) + F.l1_loss(output[1], y)


def normed():
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 3), nn.BatchNorm1d(3))


def noisy():
    class Noisy(nn.Linear):
        def forward(self, x):
            return super().forward(x.flatten(1)) + torch.randn(len(x), 3)

    return Noisy(12, 3)


class Fails(nn.Linear):
    def __init__(self):
        raise OSError("no weights here")


def needs(width):
    return nn.Linear(12, width)


def total(output, y):
    return F.cross_entropy(output, y, reduction="sum")


def each(output, y):
    return F.cross_entropy(output, y, reduction="none")


def item(output, y):
    return F.cross_entropy(output, y).item()


def endless(output, y):
    return F.cross_entropy(output, y) * float("inf")


def constant(output, y):
    return torch.zeros(())


def number():
    return 3


def uneven():
    return torch.randn(4, 12), torch.randint(0, 3, (5,))


def single():
    return batch(1)


def words():
    return torch.randn(4, 12), "targets"


def three():
    return torch.randn(4, 12), torch.randn(4), torch.randn(4)


seven = 7
