"""Every update rule, directly from its formula: all past gradients are kept, and each sum over them
is written out.

Nothing here uses varreg, or torch.optim. A rule returns δ̄ and its variance for one parameter, from
the list of its past gradients `g` and their variances `s2`, both as the optimizer sees them (with
sign and coupled weight decay).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def total(weights, values) -> Tensor:
    return sum(w * v for w, v in zip(weights, values, strict=True))


def sgd(g, s2, o):
    t, mu, d = len(g), o.get("momentum", 0), o.get("dampening", 0)
    a = [mu ** (t - 1 - k) * (1 if k == 0 or mu == 0 else 1 - d) for k in range(t)]
    if o.get("nesterov"):
        a = [mu * w for w in a]
        a[-1] += 1
    return total(a, g), total([w**2 for w in a], s2)


def ratio(a, b, g, s2, p2, eps, direct, center=0.0):
    """n/D with n = Σ a g and D = p₂ + eps; Var = (1/D²)[Σa²σ² − 2δ Σ a b (g−c)σ²/p₂ + δ² Σ
    b²(g−c)²σ²/p₂²].
    """
    delta = total(a, g) / (p2 + eps)
    u = [(x - center) / p2 for x in g] if direct else [delta.sign() for _ in g]
    numerator = total([w**2 for w in a], s2)
    covariance = total(
        [w * v for w, v in zip(a, b, strict=True)], [x * y for x, y in zip(u, s2, strict=True)]
    )
    denominator = total([v**2 for v in b], [x**2 * y for x, y in zip(u, s2, strict=True)])
    size = numerator + delta**2 * denominator
    bracket = size - 2 * delta * covariance
    return delta, torch.where(bracket > 1e-9 * size, bracket, torch.nan) / (
        p2 + eps
    ) ** 2  # what rounding leaves is not known


def adam(g, s2, o):
    (beta1, beta2), t, eps = o.get("betas", (0.9, 0.999)), len(g), o.get("eps", 1e-8)
    a = [(1 - beta1) * beta1 ** (t - 1 - k) / (1 - beta1**t) for k in range(t)]
    if "momentum_decay" in o:
        mu = [beta1 * (1 - 0.5 * 0.96 ** (k * o["momentum_decay"])) for k in range(1, t + 2)]
        c1, c2 = (1 - mu[t - 1]) / (1 - math.prod(mu[:t])), mu[t] / (1 - math.prod(mu))
        a = [c2 * (1 - beta1) * beta1 ** (t - 1 - k) for k in range(t)]
        a[-1] += c1

    def weights(now):  # of the squares, `now` steps in
        return [(1 - beta2) * beta2 ** (now - 1 - k) if k < now else 0.0 for k in range(t)]

    def rooted(b):
        b = [w / (1 - beta2**t) for w in b]
        return b, total(b, [x**2 for x in g]).sqrt()

    if not o.get("amsgrad"):
        b, p2 = rooted(weights(t))
        return ratio(a, b, g, s2, p2, eps, o["direct"])
    results = [
        (p2, *ratio(a, b, g, s2, p2, eps, o["direct"]))
        for b, p2 in (rooted(weights(now)) for now in range(1, t + 1))
    ]
    _, delta, variance = results[0]
    largest = results[0][0]
    for p2, d, v in results[1:]:  # the latest step at which the maximum was reached
        delta, variance = (
            torch.where(p2 >= largest, d, delta),
            torch.where(p2 >= largest, v, variance),
        )
        largest = torch.maximum(p2, largest)
    return delta, variance


def rmsprop(g, s2, o):
    alpha, mu, eps = o.get("alpha", 0.99), o.get("momentum", 0), o.get("eps", 1e-8)
    steps = []
    for t in range(1, len(g) + 1):
        a, b = [0.0] * (t - 1) + [1.0], [(1 - alpha) * alpha ** (t - 1 - k) for k in range(t)]
        square, center = total(b, [x**2 for x in g[:t]]), 0.0
        if o.get("centered"):
            center = total(b, g[:t])
            square = square - center**2
        steps.append(ratio(a, b, g[:t], s2[:t], square.sqrt(), eps, o["direct"], center))
    if not mu:
        return steps[-1]
    powers = [mu ** (len(steps) - 1 - k) for k in range(len(steps))]
    return total(powers, [d for d, _ in steps]), total(
        [w**2 for w in powers], [v.nan_to_num(nan=0.0) for _, v in steps]
    )


def adagrad(g, s2, o):
    square = sum(x**2 for x in g) + o.get("initial_accumulator_value", 0)
    a = [0.0] * (len(g) - 1) + [1.0]
    delta, variance = ratio(
        a, [1.0] * len(g), g, s2, square.sqrt(), o.get("eps", 1e-10), o["direct"]
    )
    return delta, variance


def adadelta(g, s2, o):
    rho, eps = o.get("rho", 0.9), o.get("eps", 1e-6)
    acc = torch.zeros_like(g[0])
    for t in range(1, len(g) + 1):
        a, b = [0.0] * (t - 1) + [1.0], [(1 - rho) * rho ** (t - 1 - k) for k in range(t)]
        p2 = (total(b, [x**2 for x in g[:t]]) + eps).sqrt()
        z, variance = ratio(a, b, g[:t], s2[:t], p2, 0.0, o["direct"])
        A = (acc + eps).sqrt()
        acc = rho * acc + (1 - rho) * (A * z) ** 2
    return A * z, A**2 * variance


def mean_of(x: Tensor, kind: str, beta: float) -> Tensor:
    if kind == "ema":
        w = beta ** torch.arange(len(x) - 1, -1, -1, dtype=x.dtype)
        return (w * x).sum() / w.sum()
    if kind == "geometric":
        return x.log().mean().exp()
    if kind == "harmonic":
        return 1 / (1 / x).mean()
    return x.sum() if kind == "sum" else x.mean()


def average(rhos: list[Tensor], kind: str, beta: float) -> Tensor:
    """ρ̄ over the finite ρ of each element's past; nan where there is none."""
    means = []
    for column in torch.stack(rhos).reshape(len(rhos), -1).T:
        x = column[column.isfinite()]
        if kind in ("geometric", "harmonic"):
            x = x[x > 0]
        means.append(mean_of(x, kind, beta) if len(x) else torch.tensor(math.nan))
    return torch.stack(means).reshape(rhos[0].shape)


def form(r: Tensor, kind: str, s: float) -> Tensor:
    half = (math.e * s - 1) / (1 + s)  # λ₀/2
    if kind == "rational":
        return (1 + s) / (1 + s * r)
    exact = (1 + half) / r - half
    return (
        (1 + 1 / math.e) / (1 + torch.exp(-exact)) if kind == "sigmoid" else exact.clamp(0, 1 + s)
    )


def bounds_of(o: dict) -> tuple[float, float]:
    """λ_min and λ_max: those that are given; else the affine form's own."""
    high = 1 + o["s"] if o["form"] == "affine" else math.inf
    return o.get("lambda_min", 0.0), o.get("lambda_max", high)


class Reference:
    """Trains a model of its own by the formulas. `o` has the optimizer's arguments and the
    regularizer's, `direct` among them.
    """

    def __init__(self, model: nn.Module, rule, o: dict):
        self.model, self.rule = model, rule
        o = {
            "s": 2.0,
            "form": "rational",
            "history": "mean",
            "scale_free": True,
            "per": "element",
            "history_beta": 0.99,
        } | o
        self.o, self.t = o, 0
        self.past = {n: ([], [], []) for n, _ in model.named_parameters()}
        self.lambdas, self.sums = {}, {}

    @torch.no_grad()
    def step(self, each: dict[str, Tensor], clip=None) -> None:
        """One step from the per-sample gradients [batch, *shape] of every parameter; `clip` maps
        mean gradients to what is used.
        """
        o, params, self.t = self.o, dict(self.model.named_parameters()), self.t + 1
        means = {n: e.mean(0) for n, e in each.items()}
        used = clip(means) if clip else means
        made = {}
        for n, e in each.items():
            kappa = torch.where(means[n] == 0, 1.0, used[n] / means[n])
            g, s2 = used[n], e.var(0, correction=0) * kappa**2
            sign, decay = (
                -1 if o.get("maximize") else 1,
                0 if o.get("decoupled_weight_decay") else o.get("weight_decay", 0),
            )
            gs, s2s, _ = self.past[n]
            gs.append(sign * g + decay * params[n])
            s2s.append(s2)
            made[n] = self.rule(gs, s2s, o)
        for n, (delta, _variance) in made.items():
            lam = self.regularizer(
                n, len(each[n]), made, {k: (e != 0).any(0) for k, e in each.items()}
            )
            x = params[n]
            if o.get("decoupled_weight_decay"):
                x.mul_(1 - o["lr"] * o["weight_decay"])
            lr = o["lr"] / (1 + (self.t - 1) * o.get("lr_decay", 0))
            x.sub_(lr * lam * delta)
            self.lambdas[n] = lam

    def regularizer(self, n: str, m: int, made, present) -> Tensor:
        o, which = self.o, made if self.o["per"] == "model" else [n]
        made = {
            k: (d, torch.where(present[k], v, torch.nan)) for k, (d, v) in made.items()
        }  # no gradient at all: nothing is known
        delta, variance = made[n]
        if o["per"] != "element":
            variance = sum(made[k][1].nansum() for k in which)
            delta = sum(made[k][0][~made[k][1].isnan()].square().sum() for k in which).sqrt()
        rho = variance / delta**2 if o["scale_free"] else variance
        if o.get("cap"):
            rho = rho.clamp(max=o["cap"] * m)
        rhos = self.past[n][2]
        rhos.append(rho)
        lam = form(rho / average(rhos, o["history"], o["history_beta"]), o["form"], o["s"])
        lam = lam.clamp(*bounds_of(o)).nan_to_num(nan=1.0)
        there = present[n] if o["per"] == "element" else torch.ones_like(lam, dtype=torch.bool)
        if o.get("calibrate") and there.any():
            means, spent = self.sums.setdefault(n, ([], []))
            means.append(lam[there].mean())
            t = len(means)
            weights = [0.9 ** (t - 1 - k) for k in range(t)]
            scaled = lam / (total(weights, means) / sum(weights)) * t / (sum(spent) + 1)
            low, high = bounds_of(o)
            lam = torch.where(there, scaled.clamp(low, high), lam)
            spent.append(lam[there].mean())
        return lam
