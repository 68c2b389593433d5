"""Per-sample gradients by their definitions, in several slow ways. Nothing here uses varreg."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

Gradients = dict[str, Tensor]  # parameter → [batch, *shape]


def losses(output, weights: Tensor) -> Tensor:
    """Return one loss per sample. It is non-linear in the output and weighted per sample, so that
    no sample can hide an error of another.
    """
    tensors = [t for t in (output if isinstance(output, tuple) else (output,)) if t is not None]
    flat = torch.cat([t.flatten(1) for t in tensors], 1)
    scale = torch.linspace(0.5, 1.5, flat.shape[1], dtype=flat.dtype, device=flat.device)
    return weights * ((flat * scale).sin() + flat.square()).sum(1)


def sample_weights(batch: int) -> Tensor:
    return torch.linspace(0.5, 3.0, batch, dtype=torch.float64)


def sample(inputs, i: int):
    return tree_map(lambda t: t[i : i + 1], inputs)


def one_at_a_time(model: nn.Module, inputs: tuple, weights: Tensor) -> Gradients:
    """Return the gradients by the definition: run each sample alone."""
    names = {n: p for n, p in model.named_parameters() if p.requires_grad}
    rows = []
    for i in range(len(weights)):
        model.zero_grad()
        losses(model(*sample(inputs, i)), weights[i : i + 1]).sum().backward()
        rows.append([torch.zeros_like(p) if p.grad is None else p.grad for p in names.values()])
    return {n: torch.stack([r[k] for r in rows]) for k, n in enumerate(names)}


def by_vmap(model: nn.Module, inputs: tuple, weights: Tensor) -> Gradients:
    """`torch.func`: the gradient function, vectorized over samples."""
    params = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}

    def loss(values, weight, *one):
        output = torch.func.functional_call(model, values, tree_map(lambda t: t.unsqueeze(0), one))
        return losses(output, weight.unsqueeze(0)).sum()

    in_dims = (None, 0, *(0 for _ in inputs))
    return torch.func.vmap(torch.func.grad(loss), in_dims=in_dims)(params, weights, *inputs)


def by_graph(model: nn.Module, inputs: tuple, weights: Tensor) -> Gradients:
    """Each sample's loss, differentiated on the graph of one forward of the whole batch: also right
    where the forward is random.
    """
    names = {n: p for n, p in model.named_parameters() if p.requires_grad}
    each = losses(model(*inputs), weights)
    rows = [
        torch.autograd.grad(
            loss, list(names.values()), retain_graph=True, allow_unused=True, materialize_grads=True
        )
        for loss in each
    ]
    return {n: torch.stack([r[k] for r in rows]) for k, n in enumerate(names)}


def scale_of(gradients: Gradients) -> float:
    return max(float(g.abs().max()) for g in gradients.values() if g.numel())


def assert_close(
    actual: Tensor, expected: Tensor, scale: float, what: str, rtol: float = 1e-9
) -> None:
    """Relative to the tensor's own size; a gradient that is zero by symmetry is noise, and judged
    by the whole model's size.
    """
    assert actual.shape == expected.shape, (
        f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    )
    if not expected.numel():
        return
    gap, size = float((actual - expected).abs().max()), float(expected.abs().max())
    assert gap <= rtol * size + 1e-12 * scale, f"{what}: off by {gap:.3g} of {size:.3g}"
