"""The models of the experiments and of the benchmarks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def digits_cnn() -> nn.Module:
    """Return a CNN for 8 × 8 digits: two convolutions and two dense layers."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def paper_cnn(width: int = 1) -> nn.Module:
    """Return two conv-pool-activation blocks and two dense layers, as in the paper's Fashion-MNIST
    experiment, with its width multiplied by a factor.
    """
    a, b, c = 20 * width, 50 * width, 500 * width
    return nn.Sequential(
        *(
            nn.Conv2d(1, a, 5),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(a, b, 5),
            nn.MaxPool2d(2),
            nn.ReLU(),
        ),
        *(nn.Flatten(), nn.Linear(16 * b, c), nn.ReLU(), nn.Linear(c, 10)),
    )


def lenet() -> nn.Module:
    """Return LeNet for CIFAR-10: two convolution blocks and three dense layers."""
    return nn.Sequential(
        *(
            nn.Conv2d(3, 6, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ),
        *(
            nn.Flatten(),
            nn.Linear(400, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, 10),
        ),
    )


def mlp() -> nn.Module:
    """Return three dense layers. They have many parameters and little computation, so that a cost
    per parameter is easy to measure.
    """
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, 512),
        nn.ReLU(),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


def small_mlp() -> nn.Module:
    """Return three dense layers for 14 × 14 images."""
    dense = (nn.Linear(196, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10))
    return nn.Sequential(nn.Flatten(), *dense)


class Residual(nn.Module):
    """Two convolutions and a shortcut around them."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(8, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(8, outputs)
        same = stride == 1 and inputs == outputs
        self.skip = (
            nn.Identity()
            if same
            else nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.GroupNorm(8, outputs)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.skip(x))


def resnet18(width: int = 32) -> nn.Module:
    """Return ResNet-18 for 32 × 32 images, with GroupNorm."""
    blocks: list[nn.Module] = []
    inputs = width
    for i, outputs in enumerate((width, 2 * width, 4 * width, 8 * width)):
        blocks += [Residual(inputs, outputs, 1 if i == 0 else 2), Residual(outputs, outputs, 1)]
        inputs = outputs
    stem = (nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.GroupNorm(8, width), nn.ReLU())
    return nn.Sequential(
        *stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 10)
    )


class Block(nn.Module):
    """A block of a transformer: attention and two dense layers."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (
            self.qkv(self.norm1(x))
            .view(b, t, 3, self.heads, c // self.heads)
            .permute(2, 0, 3, 1, 4)
            .unbind(0)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
        x = x + self.proj(y)
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class GPT(nn.Module):
    """A small decoder. Its learned positions are looked up once for the whole batch."""

    def __init__(
        self,
        layers: int = 4,
        width: int = 192,
        heads: int = 6,
        vocabulary: int = 256,
        context: int = 1024,
    ):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits
