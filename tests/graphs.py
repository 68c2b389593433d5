"""Random models, each judged against the definition: `python -m tests.graphs --seconds 120`.

A graph is a program that a seed draws: a straight list of steps over named tensors. It is kept as data, so that it
can be printed as Python code, run, and shrunk while a failure stays. Some graphs mix samples on purpose. What is
right is decided by values alone: every sample is run by itself, in float64. Where the whole batch gives the same,
the engine must be exact or refuse; where it does not, samples meet, and the engine must refuse.
"""

from __future__ import annotations

import argparse
import collections
import copy
import math
import random
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import varreg

SENTINEL = 23  # the batch size while a graph is drawn: no other size is a multiple of it
LARGEST = 150  # elements of one sample's share of a tensor
TOLERANCE = 1e-9


# ---- what programs call ------------------------------------------------------------------------------------------------


def weight(*shape: int) -> nn.Parameter:
    """Draw a bare parameter."""
    return nn.Parameter(torch.randn(shape) * 0.7)


class Swish(torch.autograd.Function):
    """v·σ(v), in torch's own operations."""

    @staticmethod
    def forward(ctx, v):
        ctx.save_for_backward(v)
        return v * v.sigmoid()

    @staticmethod
    def backward(ctx, grad):
        (v,) = ctx.saved_tensors
        s = v.sigmoid()
        return grad * (s + v * s * (1 - s))


class Detour(torch.autograd.Function):
    """tanh by way of NumPy, where no tracer can follow."""

    @staticmethod
    def forward(ctx, v):
        out = torch.from_numpy(v.detach().numpy().copy()).tanh_()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        (out,) = ctx.saved_tensors
        return grad * (1 - out * out)


class Swap(torch.autograd.Function):
    """The first two dimensions change places, by way of NumPy."""

    @staticmethod
    def forward(ctx, v):
        return torch.from_numpy(v.detach().numpy().swapaxes(0, 1).copy())

    @staticmethod
    def backward(ctx, grad):
        return grad.transpose(0, 1)


class Scale(torch.autograd.Function):
    """v·w, where w may be a parameter."""

    @staticmethod
    def forward(ctx, v, w):
        ctx.save_for_backward(v, w)
        return v * w

    @staticmethod
    def backward(ctx, grad):
        v, w = ctx.saved_tensors
        return (grad * w).sum_to_size(v.shape), (grad * v).sum_to_size(w.shape)


@torch.jit.script
def scripted_gate(v: Tensor) -> Tensor:
    return v * v.sigmoid()


@torch.jit.script
def scripted_swap(v: Tensor) -> Tensor:
    return v.transpose(0, 1).tanh()


@torch.jit.script
def scripted_scale(v: Tensor, w: Tensor) -> Tensor:
    return v * w


NAMES = {
    "torch": torch, "nn": nn, "F": F, "checkpoint": checkpoint, "weight": weight, "Swish": Swish, "Detour": Detour,
    "Swap": Swap, "Scale": Scale, "scripted_gate": scripted_gate, "scripted_swap": scripted_swap,
    "scripted_scale": scripted_scale, "weight_norm": nn.utils.parametrizations.weight_norm,
}  # fmt: skip


# ---- a graph as data -----------------------------------------------------------------------------------------------------


class Input(NamedTuple):
    """An argument of forward, with the batch in front of `shape`."""

    name: str
    shape: tuple[int, ...]
    high: int = 0  # whole numbers below this; 0 for normal numbers, 2 for a mask

    def draw(self, batch: int, generator: torch.Generator) -> Tensor:
        shape = (batch, *self.shape)
        if self.high == 2:
            return torch.rand(shape, generator=generator) > 0.4
        if self.high:
            return torch.randint(self.high, shape, generator=generator)
        return torch.randn(shape, generator=generator, dtype=torch.float64)


class Step(NamedTuple):
    """Lines of Python that read some tensors and write one."""

    kind: str
    code: str
    reads: tuple[str, ...]
    writes: str


class Output(NamedTuple):
    """A tensor that forward returns, and where its batch is; None for a loss."""

    name: str
    dim: int | None


class Usage(NamedTuple):
    """How a graph is trained: micro-batches of each step, and what else goes on."""

    batches: tuple[tuple[int, ...], ...] = ((3,),)
    groups: int | None = None
    reduction: str = "mean"
    clearing: str = "none"  # or "zeros", or "each": p.grad = None
    between: str = ""  # or "no_grad", "abandoned", "grad": what happens between steps
    dead: tuple[int, ...] = ()  # steps whose inputs are zeros
    alike: tuple[int, ...] = ()  # steps in which all samples are the same
    unborn: bool = False  # are parameters zero in the first step?


@dataclass(frozen=True)
class Graph:
    """A model and its usage."""

    seed: int
    inputs: tuple[Input, ...]
    members: tuple[tuple[str, str], ...]  # name, and the code that makes it
    steps: tuple[Step, ...]
    outputs: tuple[Output, ...]
    form: str = "tuple"  # or "dict", "loss", "loss and outputs"
    usage: Usage = field(default_factory=Usage)

    @property
    def code(self) -> str:
        """The model as Python code."""
        lines = ["class Model(nn.Module):", "    def __init__(s):", "        super().__init__()"]
        lines += [f"        s.{name} = {code}" for name, code in self.members]
        names = [i.name for i in self.inputs]
        lines += ["", f"    def forward(s, {', '.join(names)}):", f"        B = {names[0]}.shape[0]"]
        lines += [f"        {line}" for step in self.steps for line in step.code.split("\n")]
        outputs = [o.name for o in self.outputs]
        if self.form == "dict":
            result = "{" + ", ".join(f'"{o}": {o}' for o in outputs) + "}"
        else:
            result = ", ".join(outputs) + ("," if len(outputs) > 1 else "")
        return "\n".join([*lines, f"        return {result}"])

    def __str__(self) -> str:
        shapes = ", ".join(f"{i.name} [B{''.join(f', {n}' for n in i.shape)}]{' below ' + str(i.high) if i.high else ''}"
                           for i in self.inputs)  # fmt: skip
        told = ", ".join(f"{k}={v!r}" for k, v in self.usage._asdict().items() if v != Usage._field_defaults[k])
        where = ", ".join(f"{o.name}: {'loss' if o.dim is None else o.dim}" for o in self.outputs)
        return f"# seed {self.seed}; inputs {shapes}; batch of outputs at {where}; {told or 'plain usage'}\n{self.code}"

    def build(self) -> nn.Module:
        """The model, in double precision, with parameters that the seed draws."""
        names: dict[str, Any] = dict(NAMES)
        exec(compile(self.code, f"<graph {self.seed}>", "exec"), names)
        torch.manual_seed(self.seed)
        return names["Model"]().double()


def live(graph: Graph) -> Graph:
    """The graph without steps, members and inputs that nothing reads. The first input stays."""
    wanted, steps = {o.name for o in graph.outputs}, []
    for step in reversed(graph.steps):
        if step.writes in wanted:
            wanted.update(step.reads)
            steps.append(step)
    text = "\n".join(step.code for step in steps)
    members = tuple(m for m in graph.members if re.search(rf"\bs\.{m[0]}\b", text))
    inputs = tuple(i for k, i in enumerate(graph.inputs) if k == 0 or i.name in wanted)
    return replace(graph, steps=tuple(reversed(steps)), members=members, inputs=inputs)


# ---- drawing -------------------------------------------------------------------------------------------------------------


class Misfit(Exception):
    """What was drawn does not fit: draw something else."""


class Value(NamedTuple):
    """A tensor of the program as it is while the graph is drawn."""

    name: str
    shape: tuple[int, ...]
    dim: int  # where the batch is
    outer: int = 1  # how many times the batch is there, one after the other
    high: int = 0  # whole numbers below this; 0 for real numbers

    @property
    def folded(self) -> bool:
        return self.shape[self.dim] != SENTINEL

    @property
    def rest(self) -> list[int]:
        """The dimensions without the batch."""
        return [d for d in range(len(self.shape)) if d != self.dim]


class Draft:
    """A graph that grows. Each step is run as it is drawn, with a batch of `SENTINEL` samples, which tells its shape."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.inputs: list[Input] = []
        self.members: list[tuple[str, str]] = []
        self.steps: list[Step] = []
        self.values: list[Value] = []
        self.me = SimpleNamespace()
        self.env: dict[str, Any] = {**NAMES, "s": self.me, "B": SENTINEL}
        self.last = 0

    # What there is to choose from.

    def size(self) -> int:
        return self.rng.choice((2, 3, 3, 4, 5))

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def one(self, *choices: Any) -> Any:
        return self.rng.choice(choices)

    def pick(self, fits: Callable[[Value], bool] = lambda v: True, whole: bool = False) -> Value:
        """A value of real numbers, a recent one more often than not."""
        found = [v for v in self.values if not v.high and fits(v) and not (whole and v.folded)]
        if not found:
            raise Misfit
        return found[-1] if self.chance(0.5) else self.rng.choice(found)

    def ids(self) -> Value:
        found = [v for v in self.values if v.high > 2]
        if not found:
            raise Misfit
        return self.rng.choice(found)

    def other(self, v: Value) -> int:
        """A dimension of `v` without the batch."""
        if not v.rest:
            raise Misfit
        return self.rng.choice(v.rest)

    def signed(self, dim: int, v: Value) -> int:
        """The dimension, counted from either end."""
        return dim - len(v.shape) if self.chance(0.5) else dim

    def text(self, *sizes: int) -> str:
        """Sizes as code: what is a multiple of the batch is written so."""
        return ", ".join(self._size(n) for n in sizes)

    def _size(self, n: int) -> str:
        times, left = divmod(n, SENTINEL)
        if left or not times:
            return str(n)
        return "B" if times == 1 else f"{times} * B"

    def member(self, prefix: str, code: str, again: float) -> str:
        """A new member of the model, or one that there is already."""
        same = [n for n, c in self.members if c == code]
        if same and self.chance(again):
            return f"s.{self.rng.choice(same)}"
        name = f"{prefix}{len(self.members)}"
        setattr(self.me, name, eval(code, self.env).double())
        self.members.append((name, code))
        return f"s.{name}"

    def module(self, code: str) -> str:
        if "Linear(" in code and self.chance(0.05):
            code = f"weight_norm({code})"
        return self.member("m", code, 0.4)

    def weight(self, *shape: int) -> str:
        """A bare parameter, or the weight of a layer of that shape."""
        tied = [
            f"s.{n}.{k}" for n, c in self.members if c.startswith("nn.")
            for k, p in getattr(self.me, n).named_parameters(recurse=False) if tuple(p.shape) == shape
        ]  # fmt: skip
        if tied and self.chance(0.3):
            return self.rng.choice(tied)
        return self.member("w", f"weight({', '.join(map(str, shape))})", 0.25)

    def shared(self, *shape: int) -> str:
        """An expression of parameters alone, of that shape."""
        if not shape or self.chance(0.6):
            return self.weight(*shape)
        n, k = len(shape), self.size()
        makers: list[Callable[[], str]] = [
            lambda: f"{self.weight(*shape)}.tanh()",
            lambda: f"({self.weight(*shape)} * {self.weight(*shape)})",
            lambda: f"({self.weight(*shape)} + 0.5)",
            lambda: f"F.normalize({self.weight(*shape)}, dim={self.rng.randrange(n)})",
            lambda: f"{self.weight(*shape)}.softmax({self.one('dim', 'axis') if 0 else ''}{self.rng.randrange(n)})",
            lambda: f"{self.weight(k, *shape)}[{self.rng.randrange(k)}]",
            lambda: f"{self.weight(k, *shape)}.sum({self.one('0', 'dim=0', 'axis=0')})",
            lambda: f"{self.weight(1, *shape)}.squeeze(0)",
            lambda: f"{self.weight(math.prod(shape))}.view({', '.join(map(str, shape))})",
            lambda: f"{self.weight(shape[0] + 2, *shape[1:])}[1:-1]",
            lambda: f"torch.stack([{', '.join(self.weight(*shape[1:]) for _ in range(shape[0]))}])",
            lambda: f"torch.cat([{self.weight(1, *shape[1:])}, {self.weight(*shape)}])[:{shape[0]}]",
            lambda: f"{self.weight(*shape)}.index_select(0, torch.arange({shape[0]}).flip(0))",
        ]
        if n == 2:
            a, b = shape
            makers += [
                lambda: f"({self.weight(a, k)} @ {self.weight(k, b)})",
                lambda: f"{self.weight(b, a)}.{self.one('T', 'mT', 't()')}",
                lambda: f"torch.outer({self.weight(a)}, {self.weight(b)})",
                lambda: f"torch.einsum('ik,kj->ij', {self.weight(a, k)}, {self.weight(k, b)})",
                lambda: f"F.layer_norm({self.weight(a, b)}, ({b},))",
                lambda: f"F.batch_norm({self.weight(a, b)}.view(1, {a}, -1), None, None, training=True).view({a}, {b})",
                lambda: f"torch.kron({self.weight(a, 1)}, {self.weight(1, b)})",
            ]
        return self.rng.choice(makers)()

    # What grows.

    def enter(self, name: str, shape: tuple[int, ...], high: int = 0) -> None:
        """An argument of forward."""
        spec = Input(name, shape, high)
        self.inputs.append(spec)
        self.env[name] = spec.draw(SENTINEL, torch.Generator().manual_seed(self.rng.randrange(1 << 30)))
        self.values.append(Value(name, (SENTINEL, *shape), 0, 1, high))

    def add(self, kind: str, expression: str, *reads: Value, outer: int = 0) -> Value:
        return self.block(kind, "", expression, *reads, outer=outer)

    def block(self, kind: str, lines: str, expression: str, *reads: Value, outer: int = 0) -> Value:
        """A step: some lines, then an expression whose value is kept. In lines, `$` is the name of what is kept."""
        name = f"v{len(self.steps)}"
        code = f"{lines}\n{name} = {expression}".strip("\n").replace("$", name)
        try:
            exec(code, self.env)
        except Exception as error:
            raise Misfit(f"{kind}: {error}") from error
        t = self.env[name]
        shape, high = tuple(t.shape), reads[0].high if reads and not t.is_floating_point() else 0
        where = [d for d, n in enumerate(shape) if n and n % SENTINEL == 0]
        if len(where) != 1 or t.numel() > LARGEST * SENTINEL or len(shape) > 5 or max(shape) > 20 * SENTINEL or 0 in shape:
            raise Misfit(f"{kind}: shape {shape}")
        if (
            t.is_complex()
            or (t.is_floating_point() and not bool((t.abs().amax() < 50)))
            or (not t.is_floating_point() and not high)
        ):
            raise Misfit(f"{kind}: values")
        dim = where[0]
        if not outer:
            outer = next((r.outer for r in reads if r.shape[r.dim] == shape[dim]), 0)
            if shape[dim] == SENTINEL:
                outer = 1
            if not outer:
                raise Misfit(f"{kind}: fold")
        value = Value(name, shape, dim, outer, high)
        self.steps.append(Step(kind, code, tuple(r.name for r in reads), name))
        self.values.append(value)
        return value

    def forget(self, v: Value) -> None:
        """The value was changed in place, and is not to be read again."""
        self.values = [u for u in self.values if u.name != v.name]


STEPS: list[tuple[float, Callable[[Draft], Any]]] = []
MIXING: list[Callable[[Draft], Any]] = []


def step(often: float = 1.0) -> Callable[[Callable[[Draft], Any]], Callable[[Draft], Any]]:
    """Register a kind of step that keeps samples apart."""

    def register(draw: Callable[[Draft], Any]) -> Callable[[Draft], Any]:
        STEPS.append((often, draw))
        return draw

    return register


def mixing(draw: Callable[[Draft], Any]) -> Callable[[Draft], Any]:
    """Register a kind of step in which samples meet."""
    MIXING.append(draw)
    return draw


def features(v: Value) -> bool:
    """Is the last dimension another than the batch's?"""
    return len(v.shape) > 1 and v.dim != len(v.shape) - 1


# Layers.


@step(4)
def linear(d):
    v = d.pick(features)
    bias = d.one("", ", bias=False")
    d.add("Linear", f"{d.module(f'nn.Linear({v.shape[-1]}, {d.size()}{bias})')}({v.name})", v)


@step(1)
def functional_linear(d):
    v, k = d.pick(features), d.size()
    bias = f", {d.shared(k)}" if d.chance(0.5) else ""
    d.add("F.linear", f"F.linear({v.name}, {d.shared(k, v.shape[-1])}{bias})", v)


@step(1.5)
def conv(d):
    n = d.one(1, 2)
    v = d.pick(lambda v: len(v.shape) == n + 2 and v.dim == 0)
    k, pad, out, c = d.one(1, 2, 3), d.one(0, 1), d.size(), v.shape[1]
    stride = d.one(1, 1, 2)
    if min(v.shape[2:]) + 2 * pad < k:
        raise Misfit
    if d.chance(0.6):
        groups = c if d.chance(0.3) else 1
        made = d.module(f"nn.Conv{n}d({c}, {out * groups}, {k}, padding={pad}, stride={stride}, groups={groups})")
        d.add("Conv", f"{made}({v.name})", v)
    else:
        d.add("F.conv", f"F.conv{n}d({v.name}, {d.shared(out, c, *[k] * n)}, padding={pad}, stride={stride})", v)


@step(1)
def conv_transpose(d):
    v = d.pick(lambda v: len(v.shape) == 3 and v.dim == 0)
    d.add("ConvTranspose", f"{d.module(f'nn.ConvTranspose1d({v.shape[1]}, {d.size()}, 2, stride={d.one(1, 2)})')}({v.name})", v)


@step(1.5)
def norms(d):
    v = d.pick(features)
    n = v.shape[-1]
    kind = d.one("LayerNorm", "RMSNorm", "GroupNorm", "F.layer_norm", "two")
    if kind == "GroupNorm":
        if v.dim != 0:
            raise Misfit
        groups = d.one(1, v.shape[1])
        d.add(kind, f"{d.module(f'nn.GroupNorm({groups}, {v.shape[1]})')}({v.name})", v)
    elif kind == "two":
        if len(v.shape) < 3 or v.dim >= len(v.shape) - 2:
            raise Misfit
        d.add("LayerNorm", f"{d.module(f'nn.LayerNorm({list(v.shape[-2:])})')}({v.name})", v)
    elif kind == "F.layer_norm":
        d.add(kind, f"F.layer_norm({v.name}, ({n},), {d.shared(n)}, {d.shared(n)})", v)
    else:
        d.add(kind, f"{d.module(f'nn.{kind}({n})')}({v.name})", v)


@step(1.5)
def embedding(d):
    i, n = d.ids(), d.size()
    form = d.one("module", "F", "index", "second", "select", "bag")
    if form == "module":
        d.add("Embedding", f"{d.module(f'nn.Embedding({i.high}, {n})')}({i.name})", i)
    elif form == "F":
        d.add("F.embedding", f"F.embedding({i.name}, {d.shared(i.high, n)})", i)
    elif form == "index":
        d.add("parameter[index]", f"{d.shared(i.high, n)}[{i.name}]", i)
    elif form == "second":
        d.add("parameter[:, index]", f"{d.shared(n, i.high)}[:, {i.name}]", i)
    elif form == "select":
        d.add(
            "index_select of a parameter",
            f"torch.index_select({d.shared(i.high, n)}, 0, {i.name}.flatten()).view(*{i.name}.shape, {n})",
            i,
        )
    else:
        if len(i.shape) != 2 or i.dim != 0:
            raise Misfit
        d.add("EmbeddingBag", f"{d.module(f'nn.EmbeddingBag({i.high}, {n})')}({i.name})", i)


@step(0.7)
def recurrent(d):
    v = d.pick(lambda v: len(v.shape) == 3 and v.dim < 2)
    kind, n, first = d.one("RNN", "LSTM", "GRU"), d.one(2, 3), v.dim == 0
    options = f", batch_first={first}" + d.one("", ", bidirectional=True", ", num_layers=2")
    part = d.one("[0]", "[0]", "[1][-1]" if kind != "LSTM" else "[1][0][-1]")
    d.add(kind, f"{d.module(f'nn.{kind}({v.shape[-1]}, {n}{options})')}({v.name}){part}", v)


@step(0.7)
def attention(d):
    v = d.pick(lambda v: len(v.shape) == 3 and v.dim < 2)
    n, first = v.shape[-1], v.dim == 0
    heads = d.one(1, n if n < 4 else 1)
    options = f"batch_first={first}, bias={d.chance(0.7)}"
    weights = d.one("False", "True")
    d.add("MultiheadAttention", f"{d.module(f'nn.MultiheadAttention({n}, {heads}, {options})')}({v.name}, {v.name}, {v.name}, need_weights={weights})[0]", v)  # fmt: skip


@step(0.5)
def dot_attention(d):
    v = d.pick(lambda v: len(v.shape) >= 3 and v.dim == 0)
    n = v.shape[-1]
    w = d.shared(n, n)
    d.add(
        "scaled_dot_product_attention",
        f"F.scaled_dot_product_attention({v.name} @ {w}, {v.name}, {v.name}, is_causal={d.chance(0.3)})",
        v,
    )


@step(0.7)
def bilinear(d):
    v = d.pick(features)
    u = d.pick(lambda u: u.shape[:-1] == v.shape[:-1] and u.dim == v.dim and u.outer == v.outer)
    k = d.size()
    second = u.name if d.chance(0.7) else f"({u.name} * 2.0).detach()"
    if d.chance(0.5):
        d.add("Bilinear", f"{d.module(f'nn.Bilinear({v.shape[-1]}, {u.shape[-1]}, {k})')}({v.name}, {second})", v, u)
    else:
        d.add("F.bilinear", f"F.bilinear({v.name}, {second}, {d.shared(k, v.shape[-1], u.shape[-1])}, {d.shared(k)})", v, u)


@step(0.6)
def prelu(d):
    v = d.pick(lambda v: len(v.shape) > 1 and v.dim != 1)
    d.add("PReLU", f"{d.module(f'nn.PReLU({d.one(1, v.shape[1])})')}({v.name})", v)


@step(0.6)
def cells(d):
    v = d.pick(lambda v: len(v.shape) == 3 and v.dim < 2, whole=True)
    n, kind = d.one(2, 3), d.one("GRUCell", "RNNCell")
    cell = d.module(f"nn.{kind}({v.shape[-1]}, {n})")
    t = 1 - v.dim
    item = f"{v.name}[:, t]" if t else f"{v.name}[t]"
    result = d.one("h$", f"torch.stack(out$, {d.one(0, 1, 2)})")
    d.block(
        "loop over time",
        f"h$, out$ = None, []\nfor t in range({v.name}.shape[{t}]):\n    h$ = {cell}({item}, h$)\n    out$.append(h$)",
        result.replace("$", f"v{len(d.steps)}"),
        v,
    )


# Bare parameters, and element by element.


def broadcast(d: Draft, v: Value) -> tuple[int, ...]:
    """A shape without the batch that broadcasts against `v`, and leaves its shape."""
    first = d.rng.randrange(len(v.shape) + 1)
    return tuple(1 if k == v.dim or d.chance(0.25) else n for k, n in enumerate(v.shape))[first:]


@step(3)
def with_parameter(d):
    v = d.pick()
    w = d.shared(*broadcast(d, v))
    form = d.one("{v} * {w}", "{v} + {w}", "{w} - {v}", "{w} * {v}", "{v} / (1.5 + {w}.square())", "torch.mul({v}, {w})", "torch.add({v}, {w}, alpha=2)",
                 "torch.where({v} > 0, {v}, {w} * {v})", "torch.maximum({v}, {w})", "torch.minimum({w}, {v})", "torch.atan2({v}, 1 + {w}.square())",
                 "torch.addcmul({v}, {v}, {w})", "torch.lerp({v}, {w}, 0.3)", "({v} + {w}).tanh()", "{v}.mul({w})", "{v}.sub({w})", "torch.hypot({v}, {w})",
                 "torch.sigmoid({w}) * {v}", "{v}.addcdiv({w}, 1 + {v}.square())", "torch.logaddexp({v}, {w})", "torch.where({w} > 0, {v}, {w})",
                 "({v}.abs() + 0.5) ** {w}.sigmoid()", "{v} * {w}.exp().clamp(max=3)", "torch.exp2({v} * 0.1) * {w}", "(1 + {w}) * {v} + {w}",
                 "Scale.apply({v}, {w})", "scripted_scale({v}, {w})", "{v}.clone().mul_({w})", "{v}.clone().add_({w})")  # fmt: skip
    d.add("element-wise with a parameter", form.format(v=v.name, w=w), v)


UNARY = (
    "{v}.tanh()", "{v}.sigmoid()", "torch.sin({v})", "F.relu({v})", "F.gelu({v})", "F.silu({v})", "F.softplus({v})", "F.elu({v})",
    "{v}.abs()", "{v}.square()", "(1 + {v} * {v}).sqrt()", "torch.log1p({v}.square())", "{v}.clamp(-1, 1)", "F.leaky_relu({v}, 0.2)",
    "torch.erf({v})", "{v}.atan()", "-{v}", "{v} / (1 + {v}.abs())", "torch.where({v} > 0, {v}, 0.1 * {v})",
    "{v}.masked_fill({v} < 0, 0.5)", "{v}.contiguous()", "{v}.clone()", "{v} * {v}.detach()", "{v}.detach()", "{v}.nan_to_num()",
    "torch.complex({v}, {v} * 0.5).abs()", "F.hardtanh({v})", "F.relu6({v})", "{v}.exp().clamp(max=2.0)", "F.dropout({v}, 0.5, False)",
    "Swish.apply({v})", "Detour.apply({v})", "scripted_gate({v})", "torch.zeros_like({v}) + {v}", "{v} * torch.ones_like({v})",
    "{v} * {v}.new_full((), 0.7)", "F.threshold({v}, 0.1, 0.0)", "{v}.pow(3) * 0.1", "torch.sinc({v})", "{v}.relu().sqrt().add(1)" if 0 else "{v}.relu()",
    "{v}.to(torch.float64, copy=True)", "F.logsigmoid({v})", "torch.square({v}).neg().exp()", "2 ** {v}.clamp(max=2)", "{v} % 1.5", "{v}.round() + {v}",
)  # fmt: skip


@step(3)
def unary(d):
    v = d.pick()
    form = d.one(*UNARY)
    d.add("element-wise: " + form.replace("{v}", "v"), form.format(v=v.name), v)


@step(2.5)
def binary(d):
    v = d.pick()
    u = d.pick(lambda u: u.shape == v.shape and u.dim == v.dim and u.outer == v.outer)
    form = d.one("{v} + {u}", "{v} - {u}", "{v} * {u}", "torch.maximum({v}, {u})", "torch.where({v} > {u}, {v}, {u} * 0.5)", "{v} / (1 + {u}.square())",
                 "torch.lerp({v}, {u}, 0.5)", "{v} * {u}.sigmoid()", "torch.addcmul({v}, {u}, {u})", "{v}.clone().copy_({u}) + {v}",
                 "{v} * {u}.softmax(-1)" if features(v) else "{v} + {u}")  # fmt: skip
    d.add("element-wise of two", form.format(v=v.name, u=u.name), v, u)


@step(1)
def gate(d):
    """A number per sample, from one tensor, multiplies another."""
    v, u = d.pick(whole=True), d.pick(lambda u: u.dim == 0, whole=True)
    shape = d.text(*(n if k == v.dim else 1 for k, n in enumerate(v.shape)))
    one = f"{u.name}.flatten(1).{d.one('sum(1)', 'mean(1)', 'amax(1)', 'mean(dim=-1)')}" if len(u.shape) > 1 else u.name
    d.add("gate", f"{v.name} * {one}.view({shape})", v, u)


@step(0.8)
def masked(d):
    m = next((v for v in d.values if v.high == 2), None)
    v = d.pick(lambda v: v.dim == 0, whole=True)
    if m is None or len(m.shape) > len(v.shape) or m.shape != v.shape[: len(m.shape)]:
        raise Misfit
    shaped = f"{m.name}.view({d.text(*m.shape, *[1] * (len(v.shape) - len(m.shape)))})"
    form = d.one(
        "{v} * {m}",
        "{v}.masked_fill({m}, 0.3)",
        "torch.where({m}, {v}, {v} * 0.5)",
        "{v}.masked_fill(~{m}, -2.0).softmax(-1)" if features(v) else "{v} * {m}",
    )
    d.add("mask", form.format(v=v.name, m=shaped), v, m)


@step(0.7)
def masked_write(d):
    """Rows or positions that a mask chooses go through a layer, and are put back."""
    m = next((v for v in d.values if v.high == 2), None)
    v = d.pick(lambda v: v.dim == 0 and features(v), whole=True)
    if m is None or len(m.shape) >= len(v.shape) or m.shape != v.shape[: len(m.shape)]:
        raise Misfit
    n = v.shape[-1]
    f = d.module(f"nn.Linear({n}, {n})")
    form = d.one(
        f"$ = {v.name}.clone()\n$[{m.name}] = {f}({v.name}[{m.name}])",
        f"$ = torch.zeros_like({v.name})\n$[{m.name}] = {f}({v.name})[{m.name}]",
        f"i$ = {m.name}.nonzero(as_tuple=True)\n$ = torch.zeros_like({v.name}).index_put(i$, {f}({v.name}[i$]))",
    )
    d.block("masked write", form, "$ * 1.0".replace("$", f"v{len(d.steps)}"), v, m)


# Shapes.


@step(2.5)
def reshape(d):
    v = d.pick(whole=True)
    shape = list(v.shape)
    kind = d.one("merge", "split", "flat", "wild")
    if kind == "merge":
        k = d.rng.randrange(max(len(shape) - 1, 1))
        if len(shape) < 3 or v.dim in (k, k + 1):
            raise Misfit
        code = d.one(f"{v.name}.flatten({k}, {k + 1})", f"torch.flatten({v.name}, start_dim={k}, end_dim={k + 1})",
                     f"{v.name}.reshape({d.text(*shape[:k], -1, *shape[k + 2:])})")  # fmt: skip
    elif kind == "split":
        k = d.other(v)
        n = shape[k]
        a = d.rng.choice([f for f in range(1, n + 1) if n % f == 0])
        code = d.one(f"{v.name}.unflatten({d.signed(k, v)}, ({a}, {n // a}))", f"{v.name}.view({d.text(*shape[:k], a, n // a, *shape[k + 1:])})",
                     f"{v.name}.reshape(({d.text(*shape[:k], a, n // a, *shape[k + 1:])}))")  # fmt: skip
    elif kind == "flat":
        if v.dim != 0 or len(shape) < 2:
            raise Misfit
        code = d.one(
            f"{v.name}.flatten(1)",
            f"{v.name}.reshape(B, -1)",
            f"{v.name}.reshape(len({v.name}), -1)",
            f"torch.flatten({v.name}, 1)",
        )
    else:
        if v.dim != 0 or len(shape) < 2:
            raise Misfit
        new = [n for n in shape[1:] if n > 1]
        d.rng.shuffle(new)
        code = d.one(
            f"{v.name}.reshape({d.text(SENTINEL, *new)})",
            f"torch.reshape({v.name}, ({d.text(-1, *new)}{',' if not new else ''}))",
        )
    d.add("reshape", code, v)


@step(1.5)
def fold(d):
    """The batch and a neighbour become one dimension."""
    v = d.pick(lambda v: len(v.shape) > 1, whole=True)
    if v.dim < len(v.shape) - 1 and d.chance(0.7):
        d.add(
            "fold",
            d.one(
                f"{v.name}.flatten({v.dim}, {v.dim + 1})",
                f"{v.name}.reshape({d.text(*v.shape[: v.dim], -1, *v.shape[v.dim + 2 :])})",
            ),
            v,
            outer=1,
        )
    elif v.dim > 0:
        n = v.shape[v.dim - 1]
        d.add(
            "fold",
            d.one(
                f"{v.name}.flatten({v.dim - 1}, {v.dim})",
                f"{v.name}.reshape({d.text(*v.shape[: v.dim - 1], -1, *v.shape[v.dim + 1 :])})",
            ),
            v,
            outer=n,
        )


def unfolded(d: Draft, v: Value) -> Value:
    """The batch has a dimension of its own again."""
    inner = v.shape[v.dim] // SENTINEL // v.outer
    parts = [n for n in (v.outer, SENTINEL, inner) if n != 1]
    shape = d.text(*v.shape[: v.dim], *parts, *v.shape[v.dim + 1 :])
    return d.add(
        "unfold",
        d.one(
            f"{v.name}.unflatten({v.dim}, ({d.text(*parts)}))",
            f"{v.name}.reshape({shape})",
            f"{v.name}.view({shape})" if 0 else f"{v.name}.reshape({shape})",
        ),
        v,
    )


@step(2)
def unfold(d):
    v = d.pick(lambda v: v.folded)
    unfolded(d, v)


@step(3)
def move(d):
    v = d.pick(lambda v: len(v.shape) > 1)
    n = len(v.shape)
    a, b = d.rng.sample(range(n), 2)
    order = d.rng.sample(range(n), n)
    forms = [f"{v.name}.transpose({d.signed(a, v)}, {d.signed(b, v)})", f"torch.transpose({v.name}, {a}, {b})", f"{v.name}.permute({', '.join(map(str, order))})",
             f"{v.name}.movedim({d.signed(a, v)}, {d.signed(b, v)})", f"torch.moveaxis({v.name}, {a}, {b})", f"torch.permute({v.name}, {tuple(order)})",
             f"{v.name}.swapaxes({a}, {b})", f"{v.name}.permute(dims={tuple(order)})", f"torch.swapdims({v.name}, {a}, {b})",
             f"torch.einsum('{'abcde'[:n]}->{''.join('abcde'[k] for k in order)}', {v.name})"]  # fmt: skip
    forms += [f"{v.name}.mT"] + ([f"{v.name}.T", f"{v.name}.t()"] if n == 2 else [])
    d.add("move", d.rng.choice(forms), v)


@step(1)
def scripted_move(d):
    v = d.pick(lambda v: len(v.shape) > 1 and v.dim < 2)
    d.add("move out of sight", d.one(f"scripted_swap({v.name})", f"Swap.apply({v.name})"), v)


@step(1.5)
def ones(d):
    v = d.pick()
    if 1 in v.shape and d.chance(0.6):
        k = v.shape.index(1)
        d.add(
            "squeeze",
            d.one(
                f"{v.name}.squeeze({d.signed(k, v)})",
                f"torch.squeeze({v.name}, dim={k})",
                f"{v.name}.select({k}, 0)",
                f"{v.name}.squeeze(({k},))",
            ),
            v,
        )
    else:
        k = d.rng.randrange(len(v.shape) + 1)
        index = ", ".join([":"] * k + ["None"])
        d.add("unsqueeze", d.one(f"{v.name}.unsqueeze({k})", f"{v.name}[{index}]", f"torch.unsqueeze({v.name}, dim={k})"), v)


@step(1)
def repeat(d):
    v = d.pick(lambda v: len(v.shape) < 4)
    k, n = d.rng.randrange(len(v.shape) + 1), d.size()
    shape = list(v.shape)
    if d.chance(0.5):
        sizes = d.text(*shape[:k], n, *shape[k:])
        minus = ", ".join(["-1"] * k + [str(n)] + ["-1"] * (len(shape) - k))
        d.add(
            "expand",
            d.one(
                f"{v.name}.unsqueeze({k}).expand({sizes})",
                f"{v.name}.unsqueeze({k}).expand({minus})",
                f"torch.broadcast_to({v.name}.unsqueeze({k}), ({sizes}))",
            ),
            v,
        )
        return
    k = d.other(v)
    times = ", ".join("2" if j == k else "1" for j in range(len(shape)))
    d.add(
        "repeat",
        d.one(
            f"{v.name}.repeat({times})",
            f"torch.tile({v.name}, ({times}))",
            f"{v.name}.repeat_interleave(2, dim={d.signed(k, v)})",
        ),
        v,
    )


@step(0.8)
def spread(d):
    """A parameter is given to every sample, as a tensor with a batch."""
    n, k = d.size(), d.size()
    w = d.shared(n, k)
    v = d.values[0]
    d.add("expanded parameter", d.one(f"{w}.expand(B, -1, -1)", f"{w}.unsqueeze(0).repeat(B, 1, 1)", f"{w}.unsqueeze(1).expand({n}, B, {k})",
                                      f"{w}[None].expand(B, {n}, {k})", f"torch.stack([{w}] * B)", f"{w}.new_zeros(B, {n}, {k}) + {w}"), v)  # fmt: skip


@step(1.5)
def join(d):
    v = d.pick()
    u = d.pick(
        lambda u: u.dim == v.dim and len(u.shape) == len(v.shape) and u.outer == v.outer and u.shape[u.dim] == v.shape[v.dim]
    )
    if u.shape == v.shape and d.chance(0.5):
        k = d.rng.randrange(len(v.shape) + 1)
        d.add("stack", f"torch.stack({d.one(f'[{v.name}, {u.name}]', f'({v.name}, {u.name})')}, {d.one(k, f'dim={k}')})", v, u)
    else:
        k = d.other(v)
        d.add("cat", f"torch.{d.one('cat', 'concat')}([{v.name}, {u.name}], {d.one(k, f'dim={k}', f'axis={k}')})", v, u)


@step(0.6)
def flat_join(d):
    v, u = (d.pick(lambda v: v.dim == 0 and len(v.shape) > 1, whole=True) for _ in range(2))
    d.add(
        "cat",
        d.one(
            f"torch.cat([{v.name}.flatten(1), {u.name}.flatten(1)], 1)",
            f"torch.hstack([{v.name}.flatten(1), {u.name}.flatten(1)])",
        ),
        v,
        u,
    )


@step(0.6)
def token(d):
    """A parameter goes in front of every sequence."""
    v = d.pick(lambda v: len(v.shape) == 3 and v.dim == 0, whole=True)
    n = v.shape[-1]
    d.add("class token", f"torch.cat([{d.shared(1, 1, n)}.expand(B, -1, -1), {v.name}], dim=1)", v)


@step(0.8)
def two_views(d):
    """Two views of the batch, one after the other, go through a layer and part again."""
    v = d.pick(lambda v: v.dim == 0 and features(v), whole=True)
    u = d.pick(lambda u: u.shape == v.shape and u.dim == 0, whole=True)
    f = d.module(f"nn.Linear({v.shape[-1]}, {d.size()})")
    part = d.one(
        ".chunk(2)", ".chunk(2, dim=0)", ".split(B)", ".split([B, B])", ".tensor_split(2)", ".unflatten(0, (2, B)).unbind(0)"
    )
    d.block("cat over the batch and chunk", f"a$, b$ = {f}(torch.cat([{v.name}, {u.name}])){part}", d.one("a$ * b$", "a$ - b$", "torch.cat([a$, b$], 1)", "a$.tanh() + b$").replace("$", f"v{len(d.steps)}"), v, u)  # fmt: skip


@step(1.2)
def part(d):
    v = d.pick()
    k = d.other(v)
    n = v.shape[k]
    s = d.signed(k, v)
    forms = [f"{v.name}.unbind({s})[{d.rng.randrange(n)}]", f"torch.unbind({v.name}, dim={k})[-1]", f"sum({v.name}.unbind({s}))", f"{v.name}.narrow({s}, 0, 1)",
             f"torch.stack({v.name}.unbind({k}), {d.rng.randrange(len(v.shape))})", f"torch.stack([t.tanh() for t in {v.name}.unbind({s})], {k})",
             f"{v.name}.split(1, dim={s})[0]", f"torch.cat({v.name}.split(1, {k})[::-1], {k})", f"{v.name}.chunk(2, {s})[0]", f"torch.tensor_split({v.name}, 2, dim={k})[0]"]  # fmt: skip
    if n % 2 == 0:
        forms += [
            f"(lambda a, b: a * b)(*{v.name}.chunk(2, dim={s}))",
            f"(lambda a, b: a + b.tanh())(*torch.split({v.name}, {n // 2}, {k}))",
            f"F.glu({v.name}, {s})",
        ]
    d.add("split", d.rng.choice(forms), v)


# Indexing.


@step(3)
def index(d):
    v = d.pick()
    items = []
    advanced = False
    for k, n in enumerate(v.shape):
        if k == v.dim or d.chance(0.4):
            items.append(":")
            continue
        choices = [
            ":",
            str(d.rng.randrange(n)),
            "-1",
            "1:" if n > 1 else ":",
            ":-1" if n > 1 else ":",
            "::2",
            "None, :",
            f"{n - 1}:",
        ]
        if not advanced:
            choices += [f"[{', '.join(str(d.rng.randrange(n)) for _ in range(d.size()))}]", f"torch.arange({n}).flip(0)",
                        f"torch.tensor([{', '.join(d.one('True', 'False') for _ in range(n - 1))}{', ' if n > 1 else ''}True])", "[0]"]  # fmt: skip
        item = d.rng.choice(choices)
        advanced |= item[0] in "[t"
        items.append(item)
    while items and items[-1] == ":" and d.chance(0.5) and len(items) > 1:
        items.pop()
    if d.chance(0.2) and items[0] == ":" and v.dim == 0:
        items[0] = "..."
        items = ["...", *items[1:]] if len(items) == len(v.shape) else [":", *items[1:]]
    d.add("index", f"{v.name}[{', '.join(items)}]", v)


@step(1.5)
def gather(d):
    v = d.pick()
    k = d.other(v)
    n = v.shape[k]
    s = d.signed(k, v)
    m = d.size()
    fixed = "[" + ", ".join(str(d.rng.randrange(n)) for _ in range(m)) + "]"
    forms = [f"{v.name}.index_select({s}, torch.tensor({fixed}))", f"torch.index_select({v.name}, dim={s}, index=torch.tensor({fixed}))",
             f"{v.name}.gather({s}, {v.name}.argsort({s}))", f"torch.take_along_dim({v.name}, {v.name}.argmax({k}, keepdim=True), dim={k})", f"torch.gather({v.name}, {k}, {v.name}.argmax({k}, keepdim=True))",
             f"{v.name}.roll(1, {s})", f"torch.roll({v.name}, shifts=1, dims={k})", f"{v.name}.flip({s})", f"torch.flip({v.name}, dims=({k},))",
             f"{v.name}.select({s}, {d.rng.randrange(n)})", f"{v.name}.unfold({s}, {d.one(1, n)}, 1)", f"{v.name}.diff(dim={s})" if n > 1 else f"{v.name}.flip({s})",
             f"{v.name}.index_fill({s}, torch.tensor([0]), 0.5)", f"{v.name}.diagonal(dim1={k}, dim2={d.other(v)})", f"{v.name}.rot90(1, ({k}, {d.other(v)}))"]  # fmt: skip
    d.add("gather", d.rng.choice(forms), v)


@step(0.6)
def gather_by_sample(d):
    """Each sample has an index of its own."""
    i = d.ids()
    v = d.pick(lambda v: v.dim == 0 and len(v.shape) == 2 and v.shape[1] >= i.high, whole=True)
    if len(i.shape) == 1:
        d.add(
            "index of each sample",
            d.one(
                f"{v.name}.gather(1, {i.name}[:, None])",
                f"{v.name}[torch.arange(B), {i.name}]",
                f"torch.take_along_dim({v.name}, {i.name}.unsqueeze(1), 1)",
            ),
            v,
            i,
        )
    elif len(i.shape) == 2 and i.dim == 0:
        d.add(
            "index of each sample",
            d.one(
                f"{v.name}.gather(1, {i.name})",
                f"{v.name}[torch.arange(B)[:, None], {i.name}]",
                f"torch.take_along_dim({v.name}, {i.name}, dim=1)",
            ),
            v,
            i,
        )


@step(0.5)
def index_of_ids(d):
    i = d.ids()
    if len(i.shape) < 2:
        raise Misfit
    d.add(
        "index",
        d.one(
            f"{i.name}.flatten(1)[:, 0]",
            f"{i.name}.flip(1)",
            f"{i.name}[:, 1:]",
            f"{i.name}.T" if len(i.shape) == 2 else f"{i.name}.flatten(1)",
            f"{i.name}.unsqueeze(1)",
        ),
        i,
    )


@step(0.8)
def pad(d):
    v = d.pick(features)
    where = d.one("(1, 0)", "(0, 1)", "(1, 1)")
    d.add("pad", d.one(f"F.pad({v.name}, {where})", f"F.pad({v.name}, {where}, value=0.5)"), v)


@step(0.5)
def pool(d):
    v = d.pick(lambda v: len(v.shape) == 3 and v.dim < 2 and v.shape[2] > 1)
    d.add(
        "pool",
        d.one(
            f"F.max_pool1d({v.name}, 2, 1)",
            f"F.avg_pool1d({v.name}, 2, 1)",
            f"F.adaptive_avg_pool1d({v.name}, 1)",
            f"F.interpolate({v.name}, scale_factor=2)",
        ),
        v,
    )


# Writes.


@step(2)
def write(d):
    v = d.pick()
    u = d.pick(lambda u: u.shape == v.shape and u.dim == v.dim and u.outer == v.outer)
    k = d.other(v)
    n = v.shape[k]
    j = d.rng.randrange(n)
    at = ", ".join([":"] * k + [str(j)])
    rest = [m for q, m in enumerate(v.shape) if q != k]
    w = d.shared(*(1 if m == v.shape[v.dim] else m for m in rest)) if rest else "0.5"
    base = d.one(f"{v.name}.clone()", f"{v.name} * 1.0", f"torch.zeros_like({v.name})", f"torch.zeros({d.text(*v.shape)})", f"{v.name}.new_empty({d.text(*v.shape)}).copy_({v.name})",
                 f"torch.empty_like({v.name}).copy_({v.name})")  # fmt: skip
    line = d.one(f"$[{at}] = {u.name}[{at}]", f"$[{at}] = {w}", f"$[{at}] += {u.name}[{at}]", f"$[{at}] *= {w}", f"$.copy_({u.name})", f"$[...] = {u.name}", f"$[:] = {u.name}",
                 f"$.select({k}, {j}).copy_({u.name}.select({k}, 0))", f"$ += {u.name}", f"$ *= {u.name}.sigmoid()", f"$.add_({u.name}, alpha=0.5)", f"$.masked_fill_({u.name} > 0, 0.5)",
                 f"$.narrow({k}, 0, 1).mul_(2.0)", f"$.index_copy_({k}, torch.tensor([{j}]), {u.name}.narrow({k}, 0, 1))", f"$.index_add_({k}, torch.tensor([{j}]), {u.name}.narrow({k}, 0, 1))",
                 f"$[{u.name} > 0] = 0.25", f"$[{at}].zero_()", f"for t in range({n}):\n    $[{', '.join([':'] * k + ['t'])}] = {u.name}[{at}] * (t + 1)",
                 f"$.scatter_({k}, {u.name}.argsort({k}), {u.name})", f"$.swapaxes_(0, 0)", f"$[{at}] = {u.name}[{at}].detach()")  # fmt: skip
    d.block("write", f"$ = {base}\n{line}", d.one("$", "$ * 1.0", "$.tanh()").replace("$", f"v{len(d.steps)}"), v, u)


@step(1.5)
def in_place(d):
    """The result of another step is changed in place."""
    if not d.steps or not d.values or d.values[-1].name != d.steps[-1].writes or d.values[-1].high:
        raise Misfit
    v = d.values[-1]
    w = d.shared(*broadcast(d, v))
    d.add(
        "in place",
        f"{v.name}."
        + d.one(
            "relu_()",
            "tanh_()",
            "mul_(0.5)",
            "add_(1.0)",
            "clamp_(-1, 1)",
            f"masked_fill_({v.name} < 0, 0.1)",
            f"mul_({w})",
            f"add_({w})",
            "neg_()",
            "sigmoid_()",
            "unsqueeze_(-1)",
        ),
        v,
    )
    d.forget(v)


@step(0.5)
def write_moved(d):
    """Values are written into a buffer in which the batch is elsewhere."""
    v = d.pick(lambda v: len(v.shape) > 1, whole=True)
    k = d.other(v)
    order = list(range(len(v.shape)))
    order[v.dim], order[k] = k, v.dim
    shape = d.text(*(v.shape[j] for j in order))
    d.block("write time first", f"$ = torch.zeros({shape})\n" + d.one(f"$[:] = {v.name}.transpose({v.dim}, {k})", f"$.copy_({v.name}.transpose({v.dim}, {k}))", f"$.transpose({v.dim}, {k}).copy_({v.name})",
                                                               f"for t in range({v.shape[k]}):\n    $.select({v.dim}, t).copy_({v.name}.transpose({v.dim}, {k}).select({v.dim}, t))"), f"v{len(d.steps)} * 1.0", v)  # fmt: skip


# Products.


@step(3)
def matmul(d):
    v = d.pick(lambda v: len(v.shape) > 1)
    k, shape = d.size(), v.shape
    at = d.one("@", "matmul")
    if d.chance(0.65):
        if not features(v):
            raise Misfit
        n = shape[-1]
        choices: list[tuple[int, ...]] = [(n,), (n, k), (n, k), (1, n, k), (k, n, 2), (1, 1, n, k)]
        if len(shape) > 2 and v.dim != len(shape) - 3:
            choices += [(shape[-3], n, k)] * 2
        if len(shape) > 3 and v.dim != len(shape) - 4 and v.dim != len(shape) - 3:
            choices += [(shape[-4], shape[-3], n, k)]
        w = d.shared(*d.rng.choice(choices))
        d.add("matmul", f"{v.name} @ {w}" if at == "@" else d.one(f"torch.matmul({v.name}, {w})", f"{v.name}.matmul({w})"), v)
    else:
        n = shape[-2]
        if v.dim == len(shape) - 2:
            raise Misfit
        choices = [(n,), (k, n), (k, n), (1, k, n)]
        if len(shape) > 2 and v.dim != len(shape) - 3:
            choices += [(shape[-3], k, n)]
        w = d.shared(*d.rng.choice(choices))
        d.add("matmul with a parameter on the left", f"{w} @ {v.name}" if at == "@" else f"torch.matmul({w}, {v.name})", v)


@step(3)
def einsum(d):
    v = d.pick(lambda v: len(v.shape) < 5)
    letters = d.rng.sample("abcdefgh", len(v.shape) + 2)
    mine, new = letters[: len(v.shape)], letters[len(v.shape) :]
    batch, rest = mine[v.dim], [c for k, c in enumerate(mine) if k != v.dim]
    sizes = dict(zip(mine, v.shape))
    sizes.update({c: d.size() for c in new})
    used = [c for c in rest if d.chance(0.7)] + [c for c in new if d.chance(0.5)]
    d.rng.shuffle(used)
    if not used:
        raise Misfit
    operands = [("".join(mine), v.name), ("".join(used), d.shared(*(sizes[c] for c in used)))]
    reads = [v]
    extra = d.rng.random()
    if extra < 0.2:
        third = d.rng.sample([c for c in {*mine, *used} - {batch}], 1)
        operands.append(("".join(third), d.shared(*(sizes[c] for c in third))))
    elif extra < 0.4:
        operands.append(("".join(mine), v.name if d.chance(0.5) else f"{v.name}.tanh()"))
    elif extra < 0.5:
        operands[1] = ("".join(mine), v.name)
    present = {c for s, _ in operands for c in s}
    out = [batch] + [c for c in present - {batch} if d.chance(0.6)]
    d.rng.shuffle(out) if d.chance(0.5) else None
    out.sort(key=lambda c: c) if d.chance(0.1) else None
    d.rng.shuffle(operands) if d.chance(0.5) else None
    equation = ",".join(s for s, _ in operands) + "->" + "".join(out)
    if v.dim == 0 and len(v.shape) > 2 and d.chance(0.25):
        n = v.shape[-1]
        k = d.size()
        d.add("einsum with an ellipsis", d.one(f"torch.einsum('...d,dk->...k', {v.name}, {d.shared(n, k)})", f"torch.einsum('kd,...d->...k', {d.shared(k, n)}, {v.name})",
                                               f"torch.einsum('b...,...->b', {v.name}, {d.shared(*v.shape[1:])})", f"torch.einsum('b...d,d->b...', {v.name}, {d.shared(n)})",
                                               f"torch.einsum('...d,d->...d', {v.name}, {d.shared(n)})"), v)  # fmt: skip
        return
    names = ", ".join(n for _, n in operands)
    if d.chance(0.1):
        number = {c: k for k, c in enumerate(sorted(present))}
        parts = ", ".join(f"{n}, {[number[c] for c in s]}" for s, n in operands)
        d.add("einsum of lists", f"torch.einsum({parts}, {[number[c] for c in out]})", *reads)
    elif d.chance(0.15):
        d.add(
            "einsum, in place",
            f"torch.einsum('{equation}', {names})."
            + d.one("relu_()", "mul_(0.5)", "tanh_()", "masked_fill_(torch.tensor(False), 0.0)"),
            *reads,
        )
    else:
        d.add("einsum", f"torch.einsum('{equation}', {names})", *reads)


@step(1.5)
def products(d):
    v = d.pick(whole=True)
    k, n = d.size(), v.shape[-1]
    form = d.one(
        "bmm",
        "bmm parameter",
        "outer",
        "tensordot",
        "cdist",
        "cdist first",
        "baddbmm",
        "addmm",
        "inner",
        "self",
        "addbmm" if 0 else "self",
    )
    if form == "bmm" and len(v.shape) == 3 and v.dim == 0:
        d.add("bmm", d.one(f"torch.bmm({v.name}, {v.name}.mT)", f"{v.name}.bmm({d.shared(1, n, k)}.expand(B, -1, -1))"), v)
    elif form == "bmm parameter" and len(v.shape) == 3 and v.dim == 1:
        d.add("bmm with a parameter per head", f"torch.bmm({v.name}, {d.shared(v.shape[0], n, k)})", v)
    elif form == "outer" and len(v.shape) == 1:
        d.add(
            "outer",
            d.one(
                f"torch.outer({v.name}, {d.shared(k)})", f"torch.outer({d.shared(k)}, {v.name})", f"{v.name}.ger({d.shared(k)})"
            ),
            v,
        )
    elif form == "tensordot" and features(v):
        if len(v.shape) > 2 and v.dim < len(v.shape) - 2 and d.chance(0.4):
            d.add("tensordot", f"torch.tensordot({v.name}, {d.shared(v.shape[-2], n, k)}, dims=2)", v)
        else:
            d.add(
                "tensordot",
                d.one(
                    f"torch.tensordot({v.name}, {d.shared(n, k)}, dims=1)",
                    f"torch.tensordot({d.shared(k, n)}, {v.name}, dims=([1], [{len(v.shape) - 1}]))",
                    f"torch.tensordot({v.name}, {d.shared(k, n)}, ([-1], [-1]))",
                ),
                v,
            )
    elif form == "cdist" and features(v):
        d.add("cdist", f"torch.cdist({v.name}, {d.shared(k, n)})", v)
    elif form == "cdist first" and features(v):
        d.add("cdist with a parameter first", f"torch.cdist({d.shared(k, n)}, {v.name})", v)
    elif form == "baddbmm" and len(v.shape) == 3 and v.dim == 0:
        d.add(
            "baddbmm",
            d.one(
                f"torch.baddbmm({d.shared(1, v.shape[1], k)}, {v.name}, {d.shared(1, n, k)}.expand(B, -1, -1))",
                f"torch.baddbmm({d.shared(k)}, {v.name}, {d.shared(n, k)}.expand(B, {n}, {k}))",
            ),
            v,
        )
    elif form == "addmm" and len(v.shape) == 2 and v.dim == 0:
        d.add(
            "addmm",
            d.one(
                f"torch.addmm({d.shared(k)}, {v.name}, {d.shared(n, k)})",
                f"torch.addmm({d.shared(1, k)}, {v.name}, {d.shared(n, k)}, beta=0.5, alpha=2)",
                f"torch.mm({v.name}, {d.shared(n, k)})",
                f"torch.mv({v.name}, {d.shared(n)})",
                f"torch.addmv({d.shared(1)}, {v.name}, {d.shared(n)})",
            ),
            v,
        )
    elif form == "addmm" and len(v.shape) == 2:
        d.add(
            "mm with a parameter on the left",
            d.one(
                f"torch.mm({d.shared(k, v.shape[0])}, {v.name})",
                f"torch.addmm({d.shared(k, 1)}, {d.shared(k, v.shape[0])}, {v.name})",
            ),
            v,
        )
    elif form == "inner" and features(v):
        d.add(
            "inner",
            d.one(
                f"torch.inner({v.name}, {d.shared(k, n)})",
                f"F.cosine_similarity({v.name}, {d.shared(n)}, dim=-1)",
                f"torch.linalg.vecdot({v.name}, {d.shared(n)})",
            ),
            v,
        )
    elif form == "self" and len(v.shape) > 2 and v.dim < len(v.shape) - 2:
        d.add(
            "product with itself",
            d.one(
                f"{v.name} @ {v.name}.mT",
                f"{v.name}.mT @ {v.name}",
                f"({v.name} @ {v.name}.transpose(-1, -2)).softmax(-1) @ {v.name}",
            ),
            v,
        )
    else:
        raise Misfit


@step(0.5)
def hyper(d):
    """Weights that are made for each sample."""
    v = d.pick(lambda v: v.dim == 0 and len(v.shape) == 2, whole=True)
    n, k = v.shape[1], d.size()
    f = d.module(f"nn.Linear({n}, {n * k})")
    d.add(
        "weights of each sample",
        f"torch.einsum('bi,bij->bj', {v.name}, {f}({v.name}).view(B, {n}, {k}))"
        if d.chance(0.5)
        else f"({v.name}.unsqueeze(1) @ {f}({v.name}).view(-1, {n}, {k})).squeeze(1)",
        v,
    )


# Reductions.


@step(3)
def reduction(d):
    v = d.pick()
    k = d.other(v)
    dim, keep = d.signed(k, v), d.one("", ", keepdim=True")
    dims = tuple(d.signed(j, v) for j in d.rng.sample(v.rest, d.rng.randint(1, len(v.rest)))) if d.chance(0.3) else dim
    word = d.one("", "dim=", "axis=")
    only = d.one("", "dim=")
    n = v.name
    forms = [f"{n}.sum({word}{dims}{keep})", f"{n}.mean({word}{dims}{keep})", f"torch.sum({n}, {word}{dims}{keep})", f"torch.mean({n}, {word}{dims}{keep})",
             f"{n}.amax({word}{dims}{keep})", f"torch.amin({n}, {word}{dims}{keep})", f"torch.logsumexp({n}, {only}{dims}{keep})", f"{n}.logsumexp({only}{dim}{keep})",
             f"{n}.max({word}{dim}{keep})[0]", f"{n}.min({word}{dim}{keep}).values", f"(1 + {n}.square()).prod({word}{dim}{keep})", f"({n} + 2).norm(dim={dim}{keep})",
             f"torch.linalg.vector_norm(1 + {n}.square(), dim={dims}{keep})", f"{n}.nansum({word}{dims}{keep})", f"{n}.median({dim}{keep})[0]", f"{n}.topk(1, {dim})[0]"]  # fmt: skip
    if v.shape[k] > 1:
        forms += [
            f"{n}.var({word}{dim}{keep})",
            f"torch.var({n}, {word}{dim}, correction=0{keep})",
            f"(1 + {n}.var({dim}{keep})).sqrt()",
            f"torch.var_mean({n}, {word}{dim}{keep})[0]",
        ]
    d.add("reduction", d.rng.choice(forms), v)


@step(2)
def along(d):
    v = d.pick()
    k = d.other(v)
    dim = d.signed(k, v)
    word, only = d.one("", "dim=", "axis="), d.one("", "dim=")
    n = v.name
    forms = [f"{n}.softmax({only}{dim})", f"F.softmax({n}, {only}{dim})", f"torch.softmax({n}, {only}{dim})", f"F.log_softmax({n}, {only}{dim})", f"{n}.cumsum({word}{dim})", f"torch.cumsum({n}, {word}{dim})",
             f"{n}.sort({only}{dim})[0]", f"torch.sort({n}, {only}{dim}, descending=True).values", f"{n}.topk({v.shape[k]}, dim={dim}).values", f"F.normalize({n} + 0.1, dim={dim})",
             f"{n} - {n}.mean({word}{dim}, keepdim=True)", f"{n}.cummax({dim})[0]", f"torch.logcumsumexp({n}, {only}{dim})", f"{n}.flip({dim}).cumsum({dim})", f"({n} - {n}.amax({word}{dim}, keepdim=True)).exp()",
             f"torch.fft.rfft({n}, dim={dim}).abs()", f"torch.fft.fft({n}, dim={dim}).real", f"{n} - {n}.detach().mean({word}{dim}, keepdim=True)", f"torch.cumprod({n}, {word}{dim})", f"F.softmin({n}, dim={dim})",
             f"torch.renorm({n}, 2, {v.dim}, 1.0)" if not v.folded else f"{n}.cumsum({dim})"]  # fmt: skip
    d.add("along a dimension", d.rng.choice(forms), v)


# Functions in functions.


@step(1.2)
def checkpointed(d):
    v = d.pick(features)
    n, k = v.shape[-1], d.size()
    f, w = d.module(f"nn.Linear({n}, {k})"), d.shared(k)
    body = d.one("{f}(a).tanh() * {w}", "{f}(a)", "(a * a.sigmoid()) @ {g}", "torch.relu({f}(a) + {w})", "a * {h} + a.tanh()")
    body = body.format(f=f, w=w, g=d.shared(n, k), h=d.shared(n))
    d.block(
        "checkpoint",
        f"def f$(a):\n    return {body}",
        f"checkpoint(f{f'v{len(d.steps)}'}, {v.name}, use_reentrant={d.chance(0.5)})",
        v,
    )


@step(0.3)
def checkpointed_layer(d):
    v = d.pick(features)
    d.add(
        "checkpoint",
        f"checkpoint({d.module(f'nn.Linear({v.shape[-1]}, {d.size()})')}, {v.name}, use_reentrant={d.chance(0.5)})",
        v,
    )


@step(0.8)
def vmapped(d):
    v = d.pick(lambda v: len(v.shape) > 1)
    k = d.other(v)
    n = v.shape[-1]
    body = d.one(
        "a.tanh() * 2",
        "a * a.sum()" if 0 else "a.sin()",
        "a * a",
        f"a * {d.shared()}" if d.chance(0.5) else "a.exp().clamp(max=2)",
    )
    if k != len(v.shape) - 1 and features(v) and d.chance(0.6):
        body = d.one("a.softmax(-1)", f"F.linear(a, {d.shared(d.size(), n)})", f"a * {d.shared(n)}", "a.cumsum(-1)", "a.flip(-1)")
    d.add("vmap over another dimension", f"torch.func.vmap(lambda a: {body}, in_dims={k}, out_dims={d.one(k, 0)})({v.name})", v)


@step(0.4)
def looped(d):
    """A loop over samples."""
    v = d.pick(lambda v: v.dim == 0 and features(v), whole=True)
    f = d.module(f"nn.Linear({v.shape[-1]}, {d.size()})")
    d.add("loop over samples", d.one(f"torch.stack([{f}(a) for a in {v.name}])", f"torch.stack([{f}({v.name}[b]) for b in range(B)])", f"torch.cat([{f}({v.name}[b : b + 1]) for b in range(B)])",
                                     f"torch.stack([{f}(a) for a in {v.name}.unbind(0)], 1)"), v)  # fmt: skip


@step(0.3)
def vmapped_samples(d):
    v = d.pick(lambda v: features(v), whole=True)
    w = d.shared(v.shape[-1], d.size())
    d.add("vmap over samples", f"torch.func.vmap(lambda a: a @ {w}, in_dims={v.dim})({v.name})", v)


# Steps in which samples meet. Each leaves the shape.


def front(d: Draft) -> Value:
    return d.pick(lambda v: v.dim == 0, whole=True)


@mixing
def mix_along(d):
    v = d.pick()
    n, k = v.name, d.signed(v.dim, v)
    word, only = d.one("", "dim=", "axis="), d.one("", "dim=")
    d.add("mixing", d.one(f"{n}.roll(1, {k})", f"torch.roll({n}, B // 2, {k})", f"{n}.flip({k})", f"{n}.softmax({only}{k})", f"{n}.cumsum({word}{k})", f"{n} - {n}.mean({word}{k}, keepdim=True)",
                          f"{n} - {n}.detach().mean({word}{k}, keepdim=True)", f"{n}.sort({only}{k})[0]", f"{n} - {n}.amax({word}{k}, keepdim=True)", f"{n} / (1 + {n}.norm(dim={k}, keepdim=True))",
                          f"{n} / (1 + {n}.var({word}{k}, correction=0, keepdim=True))", f"{n} + {n}.sum({word}{k}, keepdim=True) * 0.1", f"{n}.cummax({k})[0]", f"F.log_softmax({n}, {only}{k})",
                          f"{n} - {n}.logsumexp({only}{k}, keepdim=True)", f"{n} + {n}.median({k}, keepdim=True)[0]", f"F.normalize({n} + 0.1, dim={k})", f"torch.fft.fft({n}, dim={k}).real",
                          f"{n}.index_select({v.dim}, torch.arange({n}.shape[{v.dim}]).flip(0))", f"torch.stack({n}.unbind({v.dim})[::-1], {v.dim})", f"torch.cat([{n}.narrow({v.dim}, 1, {n}.shape[{v.dim}] - 1), {n}.narrow({v.dim}, 0, 1)], {v.dim})",
                          f"{n} * (1 + {n}.detach().std({word}{k}, correction=0, keepdim=True))", f"{n}.gather({k}, {n}.argsort({k}))", f"{n} - {n}.mean({word}{k}, keepdim=True) + {n}.detach().mean({word}{k}, keepdim=True)"), v)  # fmt: skip


@mixing
def mix_all(d):
    v = d.pick()
    n = v.name
    d.add("mixing", d.one(f"{n} - {n}.mean()", f"{n} / (1 + {n}.abs().max())", f"{n} * (1 + {n}.mean().item())", f"{n} * float({n}.detach().mean() + 1)", f"{n} / (1 + {n}.norm())", f"{n} - {n}.detach().mean()",
                          f"F.layer_norm({n}, {n}.shape)", f"{n} if {n}.mean() > 0 else -{n}", f"{n} * ({n}.sum() > 0)", f"{n} * sum({n}.flatten().tolist())", f"{n} * torch.tensor({n}.detach().mean().item())",
                          f"{n}.flatten().softmax(0).view({n}.shape)", f"{n}.flatten().sort()[0].view({n}.shape)", f"{n} * torch.from_numpy({n}.detach().numpy().mean(keepdims=True))"), v)  # fmt: skip


@mixing
def mix_rows(d):
    v = front(d)
    n = v.name
    dots = ":" + ", None" * (len(v.shape) - 1)
    d.add("mixing", d.one(f"{n}[torch.arange(B).roll(1)]", f"{n}[torch.arange(B - 1, -1, -1)]", f"{n}[[0] + list(range(B - 1, 0, -1))]", f"{n}[:1] + {n}", f"{n} * {n}[-1:]", f"{n} + {n}.flatten(1).sum(1).cumsum(0)[{dots}]" if len(v.shape) > 1 else f"{n} + {n}.cumsum(0)",
                          f"torch.einsum('ab,b...->a...', torch.ones(B, B) / B, {n})", f"(torch.ones(B, B).tril() @ {n}.reshape(B, -1)).view({n}.shape)", f"torch.tensordot(torch.ones(B, B) - torch.eye(B), {n}, dims=1)",
                          f"torch.zeros_like({n}).index_add(0, torch.arange(B).roll(1), {n})", f"torch.take_along_dim({n}, {n}.argsort(0), 0)", f"{n}.flatten().view(-1, B).T.reshape({n}.shape)" if len(v.shape) > 1 else f"{n}.flip(0)",
                          f"torch.vstack([{n}[1:], {n}[:1]])" if len(v.shape) > 1 else f"{n}.roll(1)", f"torch.cat([{n}[B // 2 :], {n}[: B // 2]])", f"torch.stack([{n}[(b + 1) % B] for b in range(B)])"), v)  # fmt: skip


@mixing
def mix_writes(d):
    v = front(d)
    n = v.name
    d.block("mixing", f"$ = {n}.clone()\n" + d.one(f"$[1:] = {n}[:-1]", f"$[0] = {n}[-1]", f"$[0] += {n}[B - 1]", f"$[torch.arange(B).flip(0)] = {n}", f"$.index_copy_(0, torch.arange(B).roll(1), {n})", f"$.copy_({n}.flip(0))", f"$[:] = {n}.roll(1, 0)",
                                                   f"$.index_add_(0, torch.zeros(B, dtype=torch.long), {n})", f"$ -= $.mean(0)", f"$[0] = $.sum(0)", f"$.mul_($.detach().mean())"), f"v{len(d.steps)} * 1.0", v)  # fmt: skip


@mixing
def mix_with_layers(d):
    v = d.pick(lambda v: len(v.shape) == 3 and v.dim < 2, whole=True)
    first = v.dim == 1  # as it should not be
    n = v.shape[-1]
    d.add("mixing", d.one(f"{d.module(f'nn.RNN({n}, 3, batch_first={first})')}({v.name})[0]", f"{d.module(f'nn.MultiheadAttention({n}, 1, batch_first={first})')}({v.name}, {v.name}, {v.name})[0]",
                          f"F.batch_norm({v.name}, None, None, training=True)" if v.dim == 0 else f"F.instance_norm({v.name}.transpose(1, 2)).transpose(1, 2)"), v)  # fmt: skip


@mixing
def mix_flat(d):
    v = d.pick(lambda v: len(v.shape) == 2 and v.dim == 0, whole=True)
    n, w = v.name, v.shape[1]
    d.add("mixing", d.one(f"({n} @ {n}.T).softmax(1) @ {n}", f"torch.cdist({n}, {n}) @ {n}", f"F.conv1d({n}.T, {d.shared(w, w, 3)}, padding=1).T", f"{n}.T.contiguous().view(B, {w})", f"{n} @ ({n}.T @ {n})", f"{n} @ torch.linalg.inv(torch.eye({w}) + {n}.T @ {n})",
                          f"{n}.T.reshape({n}.shape)", f"{n} / torch.linalg.matrix_norm({n} + 0.1)", f"scripted_swap({n}).reshape(B, {w})", f"Swap.apply({n}).cumsum(1).T", f"torch.func.vmap(lambda a: a - a.mean(), in_dims=1, out_dims=1)({n})"), v)  # fmt: skip


# Losses in forward. Each is a text with `{v}` for a tensor with the batch in front, `{r}` for "mean" or "sum".

LOSSES = (
    "{v}.flatten(1).square().sum(1).{r}()", "{v}.sin().flatten(1).sum(1).{r}()", "F.mse_loss({v}.flatten(1).sum(1), torch.full((B,), 0.3), reduction='{r}')",
    "F.smooth_l1_loss({v}.flatten(1).mean(1), torch.zeros(B), reduction='{r}')", "-F.log_softmax({v}.flatten(1), 1)[:, 0].{r}()", "F.cross_entropy({v}.flatten(1), torch.zeros(B, dtype=torch.long), reduction='{r}')",
    "torch.{r}({v}.flatten(1).logsumexp(1))", "F.softplus({v}.flatten(1).sum(1)).{r}(dim=0)", "torch.stack([a.square().sum() for a in {v}]).{r}()", "{v}.flatten(1).norm(dim=1).{r}()", "torch.einsum('b->', {v}.flatten(1).tanh().sum(1)) / (B if '{r}' == 'mean' else 1)",
)  # fmt: skip
JOINT_LOSSES = (
    "{v}.mean(0).square().sum()", "{v}.flatten(1).sum(1).logsumexp(0)", "{v}.flatten(1).sum(1).amax()", "({v} + 0.1).norm()", "{v}.flatten(1).sum(1).var(correction=0)", "{v}.square().mean().log1p()",
    "F.cross_entropy({v}.flatten(1) @ {v}.flatten(1).T, torch.arange(B))", "{v}.sum() ** 2", "{v}.flatten(1).softmax(0).square().sum()", "{v}.flatten(1).sum(1).sort()[0].cumsum(0).{r}()", "{v}.square().sum().sqrt()", "{v}.square().max()",
    "({v}.flatten(1).sum(1) * {v}.detach().mean()).{r}()", "({v}.flatten(1).sum(1) / {v}.detach().abs().sum()).{r}()", "F.mse_loss({v}.flatten(1), {v}.flatten(1).roll(1, 0), reduction='{r}')", "{v}.flatten(1).cumsum(0).square().{r}()",
    "{v}.flatten(1).T.cov(correction=0).square().sum()", "{v}.flatten(1).sum(1).square().{r}() ** 0.5", "torch.cdist({v}.flatten(1), {v}.flatten(1).flip(0)).sum()",
)  # fmt: skip


def draw(seed: int) -> Graph:
    """The graph of a seed. Raises `Misfit` where it comes to nothing."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    d = Draft(rng)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        specs = [("x", tuple(d.size() for _ in range(d.one(0, 1, 1, 2, 2, 2, 3))), 0)]
        if d.chance(0.2):
            specs.append(("z", specs[0][1] if d.chance(0.5) else (d.size(),), 0))
        if d.chance(0.3):
            specs.insert(d.rng.randrange(2), ("i", (d.size(),) if d.chance(0.6) else (), d.one(3, 4, 5)))
        if d.chance(0.2):
            specs.append(("k", specs[0][1][: d.one(0, 1)], 2))
        for name, shape, high in specs:
            d.enter(name, shape, high)
        length, mixed = rng.randint(2, 14), d.chance(0.3)
        at = rng.randrange(length) if mixed and d.chance(0.6) else length - 1
        kinds, often = [f for _, f in STEPS], [w for w, _ in STEPS]
        for k in range(length):
            grow(d, lambda: rng.choices(kinds, often)[0])
            if mixed and k == at:
                grow(d, lambda: rng.choice(MIXING))
        graph = finish(d, seed)
    if not graph.members:
        raise Misfit("no parameters")
    return graph


def grow(d: Draft, choose: Callable[[], Callable[[Draft], Any]]) -> None:
    """Add a step: the first that fits. What one that does not fit has left is taken away."""
    for _ in range(30):
        members, steps, values = len(d.members), len(d.steps), list(d.values)
        try:
            choose()(d)
        except Misfit:
            pass
        if len(d.steps) > steps:
            return
        del d.members[members:]
        d.values = values


def finish(d: Draft, seed: int) -> Graph:
    """Choose outputs, or a loss, and a usage."""
    read = {name for s in d.steps for name in s.reads}
    ends = [v for v in d.values if v.name not in read and not v.high]
    ends = ends[-1:] + d.rng.sample(ends[:-1], min(len(ends[:-1]), d.one(0, 1, 2)))
    if not ends:
        raise Misfit("no outputs")
    ends = [unfolded(d, v) if v.folded else v for v in ends]
    usage = draw_usage(d)
    outputs, form = [Output(v.name, v.dim) for v in ends], d.one("tuple", "tuple", "dict")
    if d.chance(0.25):
        v, name = ends[0], f"v{len(d.steps)}"
        moved = v.name if v.dim == 0 else f"{v.name}.movedim({v.dim}, 0)"
        moved = f"{moved}.unsqueeze(1)" if len(v.shape) == 1 else moved
        kind = d.chance(0.4)
        code = d.one(*(JOINT_LOSSES if kind else LOSSES)).format(v=moved, r=usage.reduction)
        d.steps.append(Step("joint loss" if kind else "loss", f"{name} = {code}", (v.name,), name))
        outputs, form = [Output(name, None), *(outputs[1:] if d.chance(0.5) else ())], d.one("tuple", "dict")
    return live(Graph(seed, tuple(d.inputs), tuple(d.members), tuple(d.steps), tuple(outputs), form, usage))


def draw_usage(d: Draft) -> Usage:
    steps = d.one(2, 2, 3)
    batches = [(d.rng.randint(1, 6),) for _ in range(steps)]
    if d.chance(0.5):
        batches = [batches[0]] * steps
    if d.chance(0.2):
        batches[-1] = (d.rng.randint(1, 5), d.rng.randint(1, 5))
    smallest = min(b for step in batches for b in step)
    return Usage(
        tuple(batches),
        d.rng.randint(1, smallest) if d.chance(0.1) else None,
        d.one("mean", "mean", "sum"),
        d.one("none", "none", "zeros", "each"),
        d.one("", "", "", "no_grad", "abandoned", "grad"),
        (d.rng.randrange(steps - 1),) if d.chance(0.1) else (),
        (d.rng.randrange(steps - 1),) if d.chance(0.1) else (),
        d.chance(0.1),
    )


# ---- the truth -----------------------------------------------------------------------------------------------------------


class Unclear(Exception):
    """Values do not decide what is right (ties, rounding, overflow): draw another graph."""


class Truth(NamedTuple):
    """What plain torch gives for one micro-batch, whole and one sample at a time."""

    gradients: dict[str, Tensor]  # of each sample's own loss: parameter → [batch, *shape]
    whole: dict[str, Tensor]  # p.grad of the whole batch
    outputs: list[Tensor]
    meet: bool  # do samples depend on each other?
    scale: float  # the largest gradient there is


Call = tuple[tuple[Tensor, ...], Tensor]  # inputs, and the weight of each sample in the loss


def outputs_of(graph: Graph, result: Any) -> list[Tensor]:
    if graph.form == "dict":
        return [result[o.name] for o in graph.outputs]
    return list(result) if isinstance(result, tuple) else [result]


def loss_of(graph: Graph, outputs: list[Tensor], weights: Tensor, total: int) -> Tensor:
    """The loss of a micro-batch out of `total` samples: of the graph's own making, and of its outputs.

    It is not linear in outputs, and samples have different weights, so that nothing cancels.
    """
    mean = graph.usage.reduction == "mean"
    loss = torch.zeros(())
    for o, t in zip(graph.outputs, outputs, strict=True):
        if o.dim is None:
            loss = loss + (t * (len(weights) / total) if mean else t)
            continue
        flat = t.movedim(o.dim, 0).reshape(len(weights), -1)
        scale = torch.linspace(0.5, 1.5, flat.shape[1])
        each = weights * ((flat * scale).sin() + 0.3 * flat.square() * scale).sum(1)
        loss = loss + (each.sum() / total if mean else each.sum())
    return loss


def gradients_of(graph: Graph, model: nn.Module, call: Call, total: int) -> tuple[list[Tensor], Tensor, dict[str, Tensor]]:
    """Run plain torch: outputs, loss, gradients."""
    outputs = outputs_of(graph, model(*call[0]))
    loss = loss_of(graph, outputs, call[1], total)
    named = dict(model.named_parameters())
    for p in named.values():
        p.grad = None
    if not loss.requires_grad:
        raise Unclear("no parameter is reached")
    loss.backward()
    found = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named.items()}
    return outputs, loss.detach(), found


def row(call: Call, i: int) -> Call:
    return tuple(t[i : i + 1] for t in call[0]), call[1][i : i + 1]


def gap_of(actual: Tensor, expected: Tensor) -> float:
    gap = float((actual - expected).abs().max()) if expected.numel() else 0.0
    return math.inf if math.isnan(gap) else gap


def truth_of(graph: Graph, model: nn.Module, call: Call, fresh: Call, total: int) -> Truth:
    """Run a micro-batch whole and one sample at a time. `fresh` has other samples, for the case that the two differ."""
    batch, mean = len(call[1]), graph.usage.reduction == "mean"
    outputs, loss, whole = gradients_of(graph, model, call, total)
    if not (all(bool(g.isfinite().all()) for g in whole.values()) and all(bool(t.isfinite().all()) for t in outputs)):
        raise Unclear("overflow")
    singles = [gradients_of(graph, model, row(call, i), 1) for i in range(batch)]
    gradients = {n: torch.stack([s[2][n] for s in singles]) for n in whole}
    scale = max(float(g.abs().max()) for g in [*whole.values(), *gradients.values()] if g.numel())
    size = max(1.0, *(float(t.abs().max()) for t in outputs if t.numel()))
    factor = total if mean else 1
    apart = max(gap_of(whole[n], g.sum(0) / factor) for n, g in gradients.items())
    shown = abs(float(sum(s[1] for s in singles)) / factor - float(loss))
    for k, o in enumerate(graph.outputs):
        if o.dim is not None:
            alone = [s[0][k] for s in singles]
            if any(t.shape[o.dim] != 1 for t in alone) or outputs[k].shape[o.dim] != batch:
                raise Unclear("the shape depends on the batch")
            joined = torch.cat(alone, o.dim)
            if joined.shape != outputs[k].shape:
                raise Unclear("the shape depends on the batch")
            if outputs[k].requires_grad:  # no gradient depends on what another output is
                shown = max(shown, gap_of(joined, outputs[k]))
    shown = math.inf if math.isnan(shown) else shown
    if apart <= 1e-11 * scale and shown <= 1e-10 * size:
        if not 1e-6 < scale < 1e6:
            raise Unclear("gradients of no usual size")
        return Truth(gradients, whole, outputs, False, scale)
    if apart < 1e-6 * scale and shown < 1e-6 * size:
        raise Unclear("rounding")
    if apart <= 1e-11 * scale:  # here, at these values, gradients are those of single samples all the same
        return Truth(gradients, whole, outputs, False, scale)
    if not influence(graph, model, call, fresh):
        raise Unclear("ties")
    return Truth(gradients, whole, outputs, True, scale)


def influence(graph: Graph, model: nn.Module, call: Call, fresh: Call) -> bool:
    """Does a sample change another's outputs, or their gradients, or a loss that is no sum?"""
    batch = len(call[1])
    if any(o.dim is None for o in graph.outputs):
        return True
    for i in range(batch):
        keep = torch.arange(batch) == i
        mixed = tuple(torch.where(keep.view(-1, *[1] * (a.dim() - 1)), a, b) for a, b in zip(call[0], fresh[0], strict=True))
        for o, a, b in zip(graph.outputs, outputs_of(graph, model(*call[0])), outputs_of(graph, model(*mixed)), strict=True):
            if gap_of(a.select(o.dim, i), b.select(o.dim, i)) > 1e-9:
                return True
    inputs = tuple(t.clone().requires_grad_() if t.is_floating_point() else t for t in call[0])
    real = [t for t in inputs if t.requires_grad]
    for o, t in zip(graph.outputs, outputs_of(graph, model(*inputs)), strict=True):
        for i in range(batch if t.requires_grad and real else 0):
            found = torch.autograd.grad(t.select(o.dim, i).square().sum(), real, retain_graph=True, allow_unused=True)
            others = torch.arange(batch) != i
            if any(g is not None and float(g[others].abs().sum()) > 1e-9 for g in found):
                return True
    return False


# ---- the judge -----------------------------------------------------------------------------------------------------------


class Engine(NamedTuple):
    """What is judged: how to observe a model, and how to get moments."""

    observe: Callable[..., Any] = varreg.observe
    moments: Callable[[Tensor], Any] = varreg.moments


class Verdict(NamedTuple):
    """What came of a graph. Kinds: exact, refused, unclear; silent, wrong, missing, crash, leftover are failures."""

    kind: str
    told: str = ""
    meet: bool = False
    where: str = ""  # the function of the engine that refused

    @property
    def failed(self) -> bool:
        return self.kind not in ("exact", "refused", "unclear")


def judge(graph: Graph, engine: Engine = Engine()) -> Verdict:  # noqa: B008
    """Train a graph as its usage says, with the engine on it, and compare with the truth in the first and last step."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            return _judge(graph, engine, told)
    except Unclear as reason:
        return Verdict("unclear", str(reason))
    finally:
        torch.set_default_dtype(default)


def _judge(graph: Graph, engine: Engine, told: list[Any]) -> Verdict:
    usage = graph.usage
    try:
        model = graph.build()
        plain = copy.deepcopy(model)
    except Exception as error:
        raise Unclear(f"cannot be built: {error}") from error
    generator = torch.Generator().manual_seed(graph.seed)
    noise = {n: torch.randn(p.shape, generator=generator) * 0.3 for n, p in model.named_parameters()}
    if not noise:
        raise Unclear("no parameters")
    observer = engine.observe(model, groups=usage.groups, reduction=usage.reduction)
    meet = False
    try:
        for k, batches in enumerate(usage.batches):
            calls = [draw_call(graph, n, k, generator) for n in batches]
            set_parameters(model, noise, k, usage.unborn)
            set_parameters(plain, noise, k, usage.unborn)
            truths = truths_of(graph, plain, calls, generator) if k in (0, len(usage.batches) - 1) else []
            meet = any(t.meet for t in truths)
            try:
                shown = train(graph, model, calls, k)
            except Exception as error:
                if not truths:
                    truths = truths_of(graph, plain, calls, generator)
                return _raised(error, any(t.meet for t in truths))
            if truths:
                found = compare(graph, engine, model, truths, shown, told)
                if found.failed:
                    return found._replace(told=f"step {k}: {found.told}")
    finally:
        observer.remove()
        left = torch.overrides._get_current_function_mode_stack()
        for _ in left:
            torch.overrides._pop_mode()
    return Verdict("leftover", "a mode is left on the stack") if left else Verdict("exact", "", meet)


def _raised(error: Exception, meet: bool) -> Verdict:
    """A refusal, or a crash."""
    told = str(error)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "varreg" in f.filename and "<graph" not in f.filename]
    where = frames[-1].name if frames else ""
    if "varreg:" in told:
        return Verdict("refused", told[told.index("varreg:") :], meet, where)
    return Verdict("crash", f"{type(error).__name__}: {told}", meet, where)


def draw_call(graph: Graph, batch: int, k: int, generator: torch.Generator) -> Call:
    """Fresh inputs for a step."""
    inputs = [i.draw(batch, generator) for i in graph.inputs]
    if k in graph.usage.dead:
        inputs = [torch.zeros_like(t) if t.is_floating_point() else t for t in inputs]
    if k in graph.usage.alike:
        inputs = [t[:1].expand(t.shape).clone() for t in inputs]
    return tuple(inputs), torch.rand(batch, generator=generator) + 0.5


def set_parameters(model: nn.Module, noise: dict[str, Tensor], k: int, unborn: bool) -> None:
    """Move parameters a little, in place, as an optimizer would. Unborn ones are zero in the first step."""
    with torch.no_grad():
        for n, p in model.named_parameters():
            if not (unborn and n.split(".")[0].startswith("w")):
                p.add_(noise[n] * k)
            elif k == 0:
                p.zero_()
            else:
                p.add_(noise[n])


def truths_of(graph: Graph, plain: nn.Module, calls: list[Call], generator: torch.Generator) -> list[Truth]:
    total = sum(len(c[1]) for c in calls)
    try:
        return [truth_of(graph, plain, c, draw_call(graph, len(c[1]), -1, generator), total) for c in calls]
    except Unclear:
        raise
    except Exception as error:
        raise Unclear(f"plain torch fails: {type(error).__name__}") from error


def train(graph: Graph, model: nn.Module, calls: list[Call], k: int) -> list[list[Tensor]]:
    """One step of the observed model: all micro-batches. Returns their outputs."""
    usage, shown = graph.usage, []
    if usage.clearing == "each":
        for p in model.parameters():
            p.grad = None
    else:
        model.zero_grad(set_to_none=usage.clearing == "none")
    total = sum(len(c[1]) for c in calls)
    for call in calls:
        outputs = outputs_of(graph, model(*call[0]))
        loss_of(graph, outputs, call[1], total).backward()
        shown.append([t.detach() for t in outputs])
    if k == 0 and usage.between:
        inputs = calls[0][0]
        if usage.between == "no_grad":
            with torch.no_grad():
                model(*inputs)
        elif usage.between == "abandoned":
            model(*inputs)
        else:
            loss = loss_of(graph, outputs_of(graph, model(*inputs)), calls[0][1], total)
            torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return shown


def compare(
    graph: Graph, engine: Engine, model: nn.Module, truths: list[Truth], shown: list[list[Tensor]], told: list[Any]
) -> Verdict:
    """Compare what the engine left with the truth."""
    warned = " ".join(str(w.message) for w in told if "varreg:" in str(w.message))
    if any(t.meet for t in truths):
        return Verdict("silent", "samples meet, and nothing was said", True)
    total, mean = sum(len(o) for t in truths for o in list(t.gradients.values())[:1]), graph.usage.reduction == "mean"
    scale = max(t.scale for t in truths)
    for t, outputs in zip(truths, shown, strict=True):
        if any(
            a.shape != b.shape or gap_of(a, b) > 1e-10 * max(1.0, float(b.abs().max()))
            for a, b in zip(outputs, t.outputs, strict=True)
        ):
            return Verdict("wrong", "outputs are not those of the plain model")
    for name, p in model.named_parameters():
        whole = sum(t.whole[name] for t in truths)
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        if gap_of(grad, whole) > TOLERANCE * float(whole.abs().max()) + 1e-12 * scale:
            return Verdict("wrong", f"{name}.grad is off by {gap_of(grad, whole):.3g} of {float(whole.abs().max()):.3g}")
        m = engine.moments(p)
        each = torch.cat([t.gradients[name] for t in truths])
        if m is None:
            if float(each.abs().max()) > 1e-11 * scale and name not in warned:
                return Verdict("missing", f"{name} has a gradient and no moments")
            continue
        if m.count != total:
            return Verdict("wrong", f"{name}: count is {m.count}, not {total}")
        if graph.usage.groups is None:
            expected = {"mean": each.mean(0), "second_moment": each.square().mean(0), "variance": each.var(0, correction=0)}
        else:
            expected = {"mean": each.mean(0)} | grouped(graph.usage.groups, [t.gradients[name] for t in truths])
        size, most = float(each.square().mean(0).max()), scale * (1 if not mean else total)
        for what, value in expected.items():
            power = 1 if what == "mean" else 2
            bound = TOLERANCE * (math.sqrt(size) if power == 1 else size) + 1e-12 * most**power
            gap = gap_of(getattr(m, what), value)
            if gap > bound:
                return Verdict("wrong", f"{name}: {what} is off by {gap:.3g} of {float(value.abs().max()):.3g}")
    return Verdict("exact")


def grouped(k: int, parts: list[Tensor]) -> dict[str, Tensor]:
    """The variance as the means of k groups of each micro-batch estimate it."""
    groups = [g for part in parts for g in part.tensor_split(k)]
    m, n = sum(len(g) for g in groups), len(groups)
    if n < 2 or m == 1:
        return {}
    mean = torch.cat(parts).mean(0)
    spread = sum(len(g) * (g.mean(0) - mean).square() for g in groups)
    return {"variance": spread * (m - 1) / (n - 1) / m}


# ---- shrinking -----------------------------------------------------------------------------------------------------------


def simpler(graph: Graph) -> Iterator[Graph]:
    """Graphs that have less than this one."""
    usage = graph.usage
    if len(usage.batches) > 1:
        yield replace(graph, usage=usage._replace(batches=usage.batches[-1:], dead=(), alike=(), between=""))
        yield replace(graph, usage=usage._replace(batches=usage.batches[:1]))
        yield replace(graph, usage=usage._replace(batches=usage.batches[:1] + usage.batches[-1:]))
    for name, value in Usage._field_defaults.items():
        if name not in ("batches", "reduction") and getattr(usage, name) != value:
            yield replace(graph, usage=usage._replace(**{name: value}))
    if any(len(b) > 1 for b in usage.batches):
        yield replace(graph, usage=usage._replace(batches=tuple(b[:1] for b in usage.batches)))
    for k in range(len(graph.outputs) if len(graph.outputs) > 1 else 0):
        yield live(replace(graph, outputs=graph.outputs[:k] + graph.outputs[k + 1 :]))
    for k in reversed(range(len(graph.steps))):
        for source in dict.fromkeys(graph.steps[k].reads):
            yield live(without(graph, k, source))
    for k, step in enumerate(graph.steps):
        if graph.outputs[0].dim is not None and step.writes not in {o.name for o in graph.outputs}:
            yield live(replace(graph, outputs=(Output(step.writes, 0),), steps=graph.steps[: k + 1]))
    if graph.form == "dict":
        yield replace(graph, form="tuple")


def without(graph: Graph, k: int, source: str) -> Graph:
    """The graph without its k-th step: `source` takes the place of what it wrote."""
    name = graph.steps[k].writes
    rest = [
        s._replace(code=re.sub(rf"\b{name}\b", source, s.code), reads=tuple(source if r == name else r for r in s.reads))
        for s in graph.steps[k + 1 :]
    ]
    outputs = tuple(o._replace(name=source) if o.name == name else o for o in graph.outputs)
    return replace(graph, steps=(*graph.steps[:k], *rest), outputs=outputs)


def shrink(graph: Graph, failure: Verdict, engine: Engine = Engine(), tries: int = 150) -> Graph:  # noqa: B008
    """The smallest graph that is found to fail in the same way."""
    key = cause(failure)
    while True:
        for smaller in simpler(graph):
            tries -= 1
            if tries < 0:
                return graph
            found = judge(smaller, engine)
            if found.failed and cause(found) == key:
                graph = smaller
                break
        else:
            return graph


def cause(verdict: Verdict) -> str:
    """What failures have in common: kind, and the message without names and numbers."""
    if verdict.kind == "crash":
        return f"crash {kind_of(verdict.told)} in {verdict.where}"
    return verdict.kind


def kind_of(told: str) -> str:
    """The first line of a message without names and numbers."""
    text = re.sub(r"'[^']*'( \(\w+\))?", "'·'", told.split("\n")[0])
    text = re.sub(r"-?\d[\d.]*(e[+-]?\d+)?", "#", text)
    return re.sub(r"\((#,? ?)+\)", "(#)", text)[:150]


# ---- the command ----------------------------------------------------------------------------------------------------------


class Tally:
    """Counts of what came of many graphs."""

    def __init__(self) -> None:
        self.kinds: collections.Counter[str] = collections.Counter()
        self.refusals: collections.Counter[str] = collections.Counter()
        self.unclear: collections.Counter[str] = collections.Counter()
        self.failures: list[tuple[Graph, Verdict]] = []

    def add(self, graph: Graph, verdict: Verdict) -> None:
        self.kinds[verdict.kind + (", samples meet" if verdict.meet else "") if verdict.kind == "refused" else verdict.kind] += 1
        if verdict.kind == "refused" and not verdict.meet:
            self.refusals[f"{kind_of(verdict.told)} [{verdict.where}]"] += 1
        if verdict.kind == "unclear":
            self.unclear[kind_of(verdict.told)] += 1
        if verdict.failed:
            self.failures.append((graph, verdict))

    def report(self, seconds: float) -> str:
        judged = sum(self.kinds.values()) - self.kinds["unclear"]
        apart = self.kinds["exact"] + self.kinds["refused"]
        lines = [
            f"{judged} graphs in {seconds:.0f} s ({judged / max(seconds, 1e-9):.0f} a second), {self.kinds['unclear']} more were drawn again"
        ]
        lines += [f"  {n:6}  {kind}" for kind, n in self.kinds.most_common() if kind != "unclear"]
        lines += [
            f"refused though samples are apart: {self.kinds['refused']} of {apart} ({100 * self.kinds['refused'] / max(apart, 1):.1f} %)"
        ]
        lines += [f"  {n:6}  {kind}" for kind, n in self.refusals.most_common(40)]
        lines += ["drawn again:"] + [f"  {n:6}  {kind}" for kind, n in self.unclear.most_common(12)]
        return "\n".join(lines)


def draw_or_none(seed: int) -> Graph | None:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return draw(seed)
    except Misfit:
        return None
    finally:
        torch.set_default_dtype(default)


def tell(graph: Graph, verdict: Verdict, smaller: Graph) -> str:
    again = f"python -m tests.graphs --show {graph.seed}"
    return f"\nFAILURE, seed {graph.seed}: {verdict.kind}: {verdict.told[:400]} [{verdict.where}]\nrepeat: {again}\n{smaller}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.graphs", description="Judge random models against the definition.")
    parser.add_argument("--seconds", type=float, default=120, help="how long (default: 120)")
    parser.add_argument("--count", type=int, default=sys.maxsize, help="at most so many graphs")
    parser.add_argument("--seed", type=int, default=None, help="the first seed (default: a fresh one)")
    parser.add_argument("--show", type=int, metavar="SEED", help="print one graph, judge it, shrink it if it fails")
    parser.add_argument("--shrink", type=int, default=10, metavar="N", help="shrink the first N failures (default: 10)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.show is not None:
        return show(options.show)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 40)
    print(f"seeds from {seed}", flush=True)
    tally, begin, judged = Tally(), time.monotonic(), 0
    while time.monotonic() - begin < options.seconds and judged < options.count:
        graph = draw_or_none(seed)
        seed += 1
        if graph is None:
            continue
        verdict = judge(graph)
        tally.add(graph, verdict)
        judged += verdict.kind != "unclear"
        if verdict.failed:
            few = len(tally.failures) <= options.shrink
            print(tell(graph, verdict, shrink(graph, verdict) if few else graph), flush=True)
    print("\n" + tally.report(time.monotonic() - begin))
    return 1 if tally.failures else 0


def show(seed: int) -> int:
    graph = draw_or_none(seed)
    if graph is None:
        print(f"seed {seed} comes to nothing: no graph is drawn from it")
        return 0
    verdict = judge(graph)
    print(f"{graph}\n\n{verdict.kind}{', samples meet' if verdict.meet else ''}: {verdict.told}")
    if not verdict.failed:
        return 0
    smaller = shrink(graph, verdict)
    print(f"\nshrunk, {judge(smaller).told}:\n{smaller}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
