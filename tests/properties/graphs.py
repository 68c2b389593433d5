"""Random models, each judged against the definition.

`python -m tests.properties.graphs --seconds 120` judges fresh ones.

A graph is a program that a seed draws: a straight list of steps over named tensors. It is kept as
data, so that it can be printed as Python code, run, and shrunk while a failure stays. Some graphs
mix samples on purpose. What is right is decided by values alone: every sample is run by itself, in
float64. Where the whole batch gives the same, the engine must be exact or refuse; where it does
not, samples meet, and the engine must refuse.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import itertools
import math
import random
import re
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import varreg
from tests.support.judge import has_name

SENTINEL = 23  # the batch size while a graph is drawn: no other size is a multiple of it
LARGEST = 150  # elements of one sample's share of a tensor
TOLERANCE = 1e-9


# ---- what programs call --------------------------------------------------------------------------


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


def script(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compile a function by TorchScript, which torch discourages and people use."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(function)


@script
def scripted_gate(v: Tensor) -> Tensor:
    return v * v.sigmoid()


@script
def scripted_swap(v: Tensor) -> Tensor:
    return v.transpose(0, 1).tanh()


@script
def scripted_scale(v: Tensor, w: Tensor) -> Tensor:
    return v * w


NAMES = {
    "torch": torch, "nn": nn, "F": F, "checkpoint": checkpoint, "weight": weight, "Swish": Swish,
    "Detour": Detour, "Swap": Swap, "Scale": Scale, "scripted_gate": scripted_gate,
    "scripted_swap": scripted_swap, "scripted_scale": scripted_scale,
    "weight_norm": nn.utils.parametrizations.weight_norm,
}  # fmt: skip


# ---- a graph as data -----------------------------------------------------------------------------


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
    unborn: bool = False  # are bare parameters zero in the first step?
    frozen: str = ""  # a member that is not trained
    batch_dim: int = 0  # where inputs have the batch


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
        lines += ["", f"    def forward(s, {', '.join(names)}):"]
        if self.usage.batch_dim:
            lines += [f"        {n} = {n}.movedim({self.usage.batch_dim}, 0)" for n in names]
        lines += [f"        B = {names[0]}.shape[0]"]
        lines += [f"        {line}" for step in self.steps for line in step.code.split("\n")]
        outputs = [o.name for o in self.outputs]
        if self.form == "dict":
            result = "{" + ", ".join(f'"{o}": {o}' for o in outputs) + "}"
        else:
            result = ", ".join(outputs) + ("," if len(outputs) > 1 else "")
        return "\n".join([*lines, f"        return {result}"])

    def __str__(self) -> str:
        default = Usage._field_defaults
        told = [f"{k}={v!r}" for k, v in self.usage._asdict().items() if v != default[k]]
        high = [f" < {i.high}" if i.high else "" for i in self.inputs]
        shapes = [f"{i.name} {('B', *i.shape)}{h}" for i, h in zip(self.inputs, high, strict=True)]
        where = [f"{o.name}: {'a loss' if o.dim is None else o.dim}" for o in self.outputs]
        about = {"inputs": shapes, "batch of outputs": where, "usage": told or ["plain"]}
        lines = [f"#   {what}: {', '.join(parts)}" for what, parts in about.items()]
        return "\n".join([f"# seed {self.seed}", *lines, self.code])

    def build(self) -> nn.Module:
        """The model, in double precision, with parameters that the seed draws."""
        names: dict[str, Any] = dict(NAMES)
        exec(compile(self.code, f"<graph {self.seed}>", "exec"), names)
        torch.manual_seed(self.seed)
        model = names["Model"]().double()
        for name, p in model.named_parameters():
            p.requires_grad_(name.split(".")[0] != self.usage.frozen)
        return model


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


# ---- drawing -------------------------------------------------------------------------------------


class MisfitError(Exception):
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


def forms(text: str) -> tuple[str, ...]:
    """Split a table of templates: one in a line, or several with bars between them.

    In a template, `{v}` and `{u}` are tensors; other names in braces are numbers or texts; `<n k>`
    is an expression of parameters alone, of that shape; `[[nn.Linear({n}, {k})]]` is a layer of the
    model; `$` is the name of the result.
    """
    parts = (part.strip() for line in text.splitlines() for part in line.split(" | "))
    return tuple(part for part in parts if part)


class Draft:
    """A graph that grows. Each step is run as it is drawn: that tells its shape."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.inputs: list[Input] = []
        self.members: list[tuple[str, str]] = []
        self.steps: list[Step] = []
        self.values: list[Value] = []
        self.me = SimpleNamespace()
        self.env: dict[str, Any] = {**NAMES, "s": self.me, "B": SENTINEL}

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
            raise MisfitError
        return found[-1] if self.chance(0.5) else self.rng.choice(found)

    def twin(self, v: Value) -> Value:
        """A value of the same shape with the batch in the same place; it may be the same one."""
        return self.pick(lambda u: u[1:] == v[1:])

    def ids(self) -> Value:
        found = [v for v in self.values if v.high > 2]
        if not found:
            raise MisfitError
        return self.rng.choice(found)

    def mask(self, v: Value) -> Value:
        """A mask over the first dimensions of `v`."""
        found = [m for m in self.values if m.high == 2 and m.shape == v.shape[: len(m.shape)]]
        if not found:
            raise MisfitError
        return found[0]

    def other(self, v: Value) -> int:
        """A dimension of `v` without the batch."""
        if not v.rest:
            raise MisfitError
        return self.rng.choice(v.rest)

    def signed(self, dim: int, v: Value) -> int:
        """The dimension, counted from either end."""
        return dim - len(v.shape) if self.chance(0.5) else dim

    def text(self, *sizes: int) -> str:
        """Sizes as code: what is a multiple of the batch is written so."""
        times = [n // SENTINEL if n > 0 and n % SENTINEL == 0 else 0 for n in sizes]
        pairs = zip(sizes, times, strict=True)
        return ", ".join("B" if t == 1 else f"{t} * B" if t else str(n) for n, t in pairs)

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
            f"s.{n}.{k}"
            for n, c in self.members
            if c.startswith("nn.")
            for k, p in getattr(self.me, n).named_parameters(recurse=False)
            if tuple(p.shape) == shape
        ]
        if tied and self.chance(0.3):
            return self.rng.choice(tied)
        return self.member("w", f"weight({', '.join(map(str, shape))})", 0.25)

    def shared(self, *shape: int) -> str:
        """An expression of parameters alone, of that shape."""
        if not shape or self.chance(0.6):
            return self.weight(*shape)
        words = {
            "s": shape,
            "r": shape[1:],
            "o": shape[0] + 2,
            "k": self.size(),
            "m": math.prod(shape),
        }
        words |= {"at": self.rng.randrange(len(shape)), "first": shape[0]}
        words["sizes"] = ", ".join(map(str, shape))
        table = SHARED
        if len(shape) == 2:
            table += SHARED_MATRIX
            words |= {"a": shape[0], "b": shape[1]}
        return self.fill(self.rng.choice(table), words, self.weight)

    def fill(self, template: str, words: dict[str, Any], make: Callable[..., str]) -> str:
        """Put words, parameters and layers into a template."""

        def parameter(found: re.Match[str]) -> str:
            shape: list[int] = []
            for word in found[1].split():
                value = words.get(word, word)
                shape += value if isinstance(value, tuple) else (int(value),)
            return make(*shape)

        text = re.sub(r"<([a-z0-9 ]*)>", parameter, template)
        text = re.sub(r"\{(\w+)\}", lambda found: str(words[found[1]]), text)
        return re.sub(r"\[\[(nn\..+?)\]\]", lambda found: self.module(found[1]), text)

    # What grows.

    def enter(self, name: str, shape: tuple[int, ...], high: int = 0) -> None:
        """Add an argument of forward."""
        spec = Input(name, shape, high)
        self.inputs.append(spec)
        seed = self.rng.randrange(1 << 30)
        self.env[name] = spec.draw(SENTINEL, torch.Generator().manual_seed(seed))
        self.values.append(Value(name, (SENTINEL, *shape), 0, 1, high))

    def add(
        self, kind: str, table: str | tuple[str, ...], *reads: Value,
        lines: str | tuple[str, ...] = "", outer: int = 0, **words: Any,
    ) -> Value:  # fmt: skip
        """Add a step: some lines, then an expression that is kept, both drawn from tables."""
        v = reads[0] if reads else self.values[0]
        known = {
            "v": v.name,
            "u": reads[-1].name if reads else "",
            "n": v.shape[-1],
            "k": self.size(),
        }
        known |= {"word": self.one("", "dim=", "axis="), "only": self.one("", "dim=")}
        known |= {"keep": self.one("", ", keepdim=True"), **words}
        name = f"v{len(self.steps)}"
        parts = [p if isinstance(p, str) else self.rng.choice(p) for p in (lines, table)]
        before, kept = (self.fill(p, known, self.shared).replace("$", name) for p in parts)
        code, names = f"{before}\n{name} = {kept}".strip(), tuple(v.name for v in reads)
        return self.keep(Step(kind, code, names, name), reads, outer)

    def keep(self, step: Step, reads: tuple[Value, ...], outer: int) -> Value:
        """Run a step, and keep it if its result is of use."""
        try:
            exec(step.code, self.env)
        except Exception as error:
            raise MisfitError(f"{step.code}: {error}") from error
        t = self.env[step.writes]
        shape, real = tuple(t.shape), t.is_floating_point()
        where = [d for d, n in enumerate(shape) if n and n % SENTINEL == 0]
        if len(where) != 1 or 0 in shape or len(shape) > 5 or t.numel() > LARGEST * SENTINEL:
            raise MisfitError(f"{step.code}: shape {shape}")
        if (real and not bool(t.abs().amax() < 50)) or not (real or (reads and reads[0].high)):
            raise MisfitError(f"{step.code}: values")
        dim = where[0]
        if shape[dim] == SENTINEL:
            outer = 1
        elif not outer:
            outer = next((r.outer for r in reads if r.shape[r.dim] == shape[dim]), 0)
            if not outer:
                raise MisfitError(f"{step.code}: the batch is folded anew")
        value = Value(step.writes, shape, dim, outer, 0 if real else reads[0].high)
        self.steps.append(step)
        self.values.append(value)
        return value

    def forget(self, v: Value) -> None:
        """Leave out a value that was changed in place."""
        self.values = [u for u in self.values if u.name != v.name]


SHARED = forms("""
    <s>.tanh() | (<s> * <s>) | (<s> + 0.5) | F.normalize(<s>, dim={at}) | <s>.softmax({at})
    <k s>[0] | <k s>[-1] | <k s>.sum(0) | <k s>.sum(axis=0) | <1 s>.squeeze(0) | <m>.view({sizes})
    <o r>[1:-1] | torch.cat([<1 r>, <s>])[:{first}]
    <s>.index_select(0, torch.arange({first}).flip(0)) | torch.stack([<r>] * {first})
    (<s> - <s>.mean()) / (1 + <s>.std()) if {m} > 1 else <s>
""")
SHARED_MATRIX = forms("""
    (<a k> @ <k b>) | <b a>.T | <b a>.mT | <b a>.t() | torch.outer(<a>, <b>)
    torch.kron(<a 1>, <1 b>) | torch.einsum('ik,kj->ij', <a k>, <k b>) | F.layer_norm(<a b>, ({b},))
    F.batch_norm(<a b>.view(1, {a}, -1), None, None, training=True).view({a}, {b})
""")

Drawer = Callable[[Draft], Any]
STEPS: list[tuple[float, Drawer]] = []
MIXING: list[Drawer] = []


def step(often: float) -> Callable[[Drawer], Drawer]:
    """Register a kind of step that keeps samples apart."""

    def register(drawer: Drawer) -> Drawer:
        STEPS.append((often, drawer))
        return drawer

    return register


def mixing(drawer: Drawer) -> Drawer:
    """Register a kind of step in which samples meet."""
    MIXING.append(drawer)
    return drawer


def features(v: Value) -> bool:
    """Is the last dimension another than the batch's?"""
    return len(v.shape) > 1 and v.dim != len(v.shape) - 1


def in_front(v: Value) -> bool:
    return v.dim == 0


def sequence(v: Value) -> bool:
    """Three dimensions, of which the last is not the batch's?"""
    return len(v.shape) == 3 and v.dim < 2


# Layers.


@step(4)
def linear(d):
    table = forms("[[nn.Linear({n}, {k})]]({v}) | [[nn.Linear({n}, {k}, bias=False)]]({v})")
    d.add("Linear", table, d.pick(features))


@step(1)
def functional_linear(d):
    d.add("F.linear", forms("F.linear({v}, <k n>) | F.linear({v}, <k n>, <k>)"), d.pick(features))


@step(1.5)
def conv(d):
    n = d.one(1, 2)
    v = d.pick(lambda v: len(v.shape) == n + 2 and v.dim == 0)
    c, size, groups = v.shape[1], d.one(1, 2, 3), d.one(1, 1, v.shape[1])
    table = forms("""
        [[nn.Conv{d}d({c}, {o}, {size}, padding={pad}, stride={stride}, groups={groups})]]({v})
        F.conv{d}d({v}, <k c kernel>, padding={pad}, stride={stride})
    """)
    kernel, out = (size,) * n, d.size() * groups
    d.add("convolution", table, v, d=n, c=c, o=out, size=size, kernel=kernel, groups=groups,
          pad=d.one(0, 1), stride=d.one(1, 1, 2))  # fmt: skip


@step(0.7)
def conv_transpose(d):
    v = d.pick(lambda v: len(v.shape) == 3 and v.dim == 0)
    d.add(
        "ConvTranspose",
        "[[nn.ConvTranspose1d({c}, {k}, 2, stride={s})]]({v})",
        v,
        c=v.shape[1],
        s=d.one(1, 2),
    )


@step(1.5)
def norm(d):
    v = d.pick(features)
    table = forms("""
        [[nn.LayerNorm({n})]]({v}) | [[nn.RMSNorm({n})]]({v}) | F.layer_norm({v}, ({n},), <n>, <n>)
    """)
    if len(v.shape) > 2 and v.dim < len(v.shape) - 2:
        table += ("[[nn.LayerNorm({two})]]({v})",)
    if v.dim == 0:
        table += forms("[[nn.GroupNorm(1, {c})]]({v}) | [[nn.GroupNorm({c}, {c})]]({v})")
    d.add("normalization", table, v, two=list(v.shape[-2:]), c=v.shape[1])


@step(1.5)
def embedding(d):
    i = d.ids()
    table = forms("""
        [[nn.Embedding({h}, {k})]]({v}) | F.embedding({v}, <h k>) | <h k>[{v}] | <k h>[:, {v}]
        <h k>[{v}, :] | torch.index_select(<h k>, 0, {v}.flatten()).view(*{v}.shape, {k})
    """)
    if len(i.shape) == 2 and i.dim == 0:
        table += ("[[nn.EmbeddingBag({h}, {k})]]({v})",)
    d.add("embedding", table, i, h=i.high)


@step(0.7)
def recurrent(d):
    v, kind = d.pick(sequence), d.one("RNN", "LSTM", "GRU")
    options = f"batch_first={v.dim == 0}" + d.one("", ", bidirectional=True", ", num_layers=2")
    part = d.one("[0]", "[0]", "[1][0][-1]" if kind == "LSTM" else "[1][-1]")
    d.add("recurrent layer", f"[[nn.{kind}({{n}}, {d.one(2, 3)}, {options})]]({{v}}){part}", v)


@step(0.7)
def attention(d):
    v = d.pick(sequence)
    table = forms("""
        [[nn.MultiheadAttention({n}, {h}, {options})]]({v}, {v}, {v}, need_weights={weights})[0]
        F.scaled_dot_product_attention({v} @ <n n>, {v}, {v}, is_causal={weights})
    """)
    if v.dim:
        table = table[:1]
    heads, options = d.one(1, v.shape[-1]), f"batch_first={v.dim == 0}, bias={d.chance(0.7)}"
    d.add("attention", table, v, h=heads, options=options, weights=d.chance(0.5))


@step(0.8)
def bilinear(d):
    v = d.pick(features)
    u = d.pick(lambda u: u.shape[:-1] == v.shape[:-1] and u[2:] == v[2:])
    table = forms("""
        [[nn.Bilinear({n}, {m}, {k})]]({v}, {u}) | F.bilinear({v}, {u}, <k n m>, <k>)
        F.bilinear({v}, ({u} * 2.0).detach(), <k n m>) | F.bilinear({v}, {v}.tanh(), <k n n>, <k>)
        F.bilinear({v}, torch.ones({ones}), <k n 3>)
    """)
    d.add("bilinear", table, v, u, m=u.shape[-1], ones=d.text(*v.shape[:-1], 3))


@step(0.6)
def prelu(d):
    v = d.pick(lambda v: len(v.shape) > 1 and v.dim != 1)
    table = forms("[[nn.PReLU({c})]]({v}) | [[nn.PReLU(1)]]({v}) | F.prelu({v}, <c>)")
    d.add("PReLU", table, v, c=v.shape[1])


@step(0.6)
def cell(d):
    v = d.pick(sequence, whole=True)
    f, at = d.module(f"nn.{d.one('GRUCell', 'RNNCell')}({v.shape[-1]}, {d.one(2, 3)})"), 1 - v.dim
    item = f"{v.name}[:, t]" if at else f"{v.name}[t]"
    loop = f"for t in range({v.name}.shape[{at}]):\n    h$ = {f}({item}, h$)\n    all$.append(h$)"
    table = forms("""
        h$ | torch.stack(all$) | torch.stack(all$, 1) | torch.stack(all$, dim=-1)
        torch.cat(all$, 1)
    """)
    d.add("loop over time", table, v, lines=f"h$, all$ = None, []\n{loop}")


# Element by element.


def broadcast(d: Draft, v: Value) -> tuple[int, ...]:
    """A shape without the batch that broadcasts against `v`, and leaves its shape."""
    first = d.rng.randrange(len(v.shape) + 1)
    return tuple(1 if k == v.dim or d.chance(0.25) else n for k, n in enumerate(v.shape))[first:]


WITH_PARAMETER = forms("""
    {v} * <w> | {v} + <w> | <w> - {v} | <w> * {v} | {v} / (1.5 + <w>.square()) | torch.mul({v}, <w>)
    torch.add({v}, <w>, alpha=2) | torch.where({v} > 0, {v}, <w> * {v}) | torch.maximum({v}, <w>)
    torch.minimum(<w>, {v}) | torch.atan2({v}, 1 + <w>.square()) | torch.addcmul({v}, {v}, <w>)
    torch.lerp({v}, <w>, 0.3) | ({v} + <w>).tanh() | {v}.mul(<w>) | {v}.sub(<w>)
    torch.hypot({v}, <w>) | torch.sigmoid(<w>) * {v} | {v}.addcdiv(<w>, 1 + {v}.square())
    torch.logaddexp({v}, <w>) | torch.where(<w> > 0, {v}, <w>) | ({v}.abs() + 0.5) ** <w>.sigmoid()
    {v} * <w>.exp().clamp(max=3) | torch.exp2({v} * 0.1) * <w> | (1 + <w>) * {v} + <w>
    Scale.apply({v}, <w>) | scripted_scale({v}, <w>) | {v}.clone().mul_(<w>) | {v}.clone().add_(<w>)
    {v} * <w>.detach() + <w> | torch.sub({v}, other=<w>)
""")


@step(3)
def with_parameter(d):
    v = d.pick()
    d.add("element-wise with a parameter", WITH_PARAMETER, v, w=broadcast(d, v))


UNARY = forms("""
    {v}.tanh() | {v}.sigmoid() | torch.sin({v}) | F.relu({v}) | F.gelu({v}) | F.silu({v})
    F.softplus({v}) | F.elu({v}) | {v}.abs() | {v}.square() | (1 + {v} * {v}).sqrt()
    torch.log1p({v}.square()) | -{v} | {v}.clamp(-1, 1) | F.leaky_relu({v}, 0.2) | torch.erf({v})
    {v}.atan() | {v} / (1 + {v}.abs()) | torch.where({v} > 0, {v}, 0.1 * {v})
    {v}.masked_fill({v} < 0, 0.5) | {v}.contiguous() | {v}.clone() | {v} * {v}.detach()
    {v}.detach() | {v}.nan_to_num() | torch.complex({v}, {v} * 0.5).abs() | {v}.relu()
    F.hardtanh({v}) | F.relu6({v}) | {v}.exp().clamp(max=2.0) | F.dropout({v}, 0.5, False)
    F.logsigmoid({v}) | Swish.apply({v}) | Detour.apply({v}) | scripted_gate({v})
    torch.zeros_like({v}) + {v} | torch.sinc({v}) | {v} * torch.ones_like({v})
    {v} * {v}.new_full((), 0.7) | F.threshold({v}, 0.1, 0.0) | {v}.pow(3) * 0.1
    {v}.to(torch.float64, copy=True) | torch.square({v}).neg().exp() | 2 ** {v}.clamp(max=2)
    {v} % 1.5 | {v}.round() + {v} | {v}.type_as({v}) * 2
    torch.view_as_real(torch.complex({v}, {v})).sum(-1) | {v}.sign() + {v}
""")


@step(2.5)
def unary(d):
    d.add("element-wise", UNARY, d.pick())


BINARY = forms("""
    {v} + {u} | {v} - {u} | {v} * {u} | torch.maximum({v}, {u})
    torch.where({v} > {u}, {v}, {u} * 0.5) | {v} / (1 + {u}.square()) | torch.lerp({v}, {u}, 0.5)
    {v} * {u}.sigmoid() | torch.addcmul({v}, {u}, {u}) | {v}.clone().copy_({u}) + {v}
    torch.hypot({v}, 1 + {u}) | {v} + {u}.detach() | {v}.add({u}, alpha=0.5)
""")


@step(2)
def binary(d):
    v = d.pick()
    d.add("element-wise of two", BINARY, v, d.twin(v))


@step(1)
def gate(d):
    """A number of each sample, from one tensor, multiplies another."""
    v, u = d.pick(whole=True), d.pick(lambda u: u.dim == 0 and len(u.shape) > 1, whole=True)
    shape = d.text(*(n if k == v.dim else 1 for k, n in enumerate(v.shape)))
    table = forms("""
        {v} * {u}.flatten(1).sum(1).view({s}) | {v} * {u}.flatten(1).mean(dim=-1).reshape({s})
        {v} + {u}.flatten(1).amax(1).view({s}) | {v} * {u}.flatten(1)[:, 0].sigmoid().view({s})
    """)
    d.add("gate", table, v, u, s=shape)


@step(0.8)
def masked(d):
    v = d.pick(in_front, whole=True)
    m = d.mask(v)
    shape = d.text(*m.shape, *[1] * (len(v.shape) - len(m.shape)))
    table = forms("""
        {v} * {m} | {v}.masked_fill({m}, 0.3) | torch.where({m}, {v}, {v} * 0.5)
        {v}.where({m}, {v}.tanh())
    """)
    d.add("mask", table, v, m, m=f"{m.name}.view({shape})")


@step(0.7)
def masked_write(d):
    """Rows or positions that a mask chooses go through a layer, and are put back."""
    v = d.pick(lambda v: v.dim == 0 and features(v), whole=True)
    m = d.mask(v)
    if len(m.shape) == len(v.shape):
        raise MisfitError
    lines = (
        "$ = {v}.clone()\n$[{u}] = {f}({v}[{u}])",
        "$ = torch.zeros_like({v})\n$[{u}] = {f}({v})[{u}]",
        "i$ = {u}.nonzero(as_tuple=True)\n$ = torch.zeros_like({v}).index_put(i$, {f}({v}[i$]))",
        (
            "i$ = {u}.flatten().nonzero().squeeze(1)\nh$ = {v}.reshape(-1, {n})\n"
            "$ = torch.zeros_like(h$).index_add(0, i$, {f}(h$[i$])).view({v}.shape)"
        ),
    )
    d.add(
        "experts",
        "$ * 1.0",
        v,
        m,
        lines=lines,
        f=d.module(f"nn.Linear({v.shape[-1]}, {v.shape[-1]})"),
    )


# Shapes.


@step(2.5)
def reshape(d):
    v = d.pick(whole=True)
    shape, k = list(v.shape), d.other(v)
    factor = d.rng.choice([f for f in range(1, shape[k] + 1) if shape[k] % f == 0])
    pair = factor, shape[k] // factor
    split = d.text(*shape[:k], *pair, *shape[k + 1 :])
    table = forms("{v}.unflatten({dim}, {pair}) | {v}.view({split}) | {v}.reshape(({split}))")
    if k + 1 in v.rest:
        table += forms("""
            {v}.flatten({at}, {next}) | torch.flatten({v}, start_dim={at}, end_dim={next})
        """)
    new = [n for n in shape if n != SENTINEL]
    d.rng.shuffle(new)
    if v.dim == 0:
        table += forms("""
            {v}.flatten(1) | {v}.reshape(B, -1) | {v}.reshape(len({v}), -1) | torch.flatten({v}, 1)
            {v}.reshape(B, {new}) | {v}.reshape(-1, {new}) | torch.reshape({v}, (B, {new}))
        """)
    d.add(
        "reshape",
        table,
        v,
        dim=d.signed(k, v),
        at=k,
        next=k + 1,
        pair=pair,
        split=split,
        new=d.text(*new),
    )


@step(1.5)
def fold(d):
    """The batch and a neighbour become one dimension."""
    v = d.pick(lambda v: len(v.shape) > 1, whole=True)
    behind = v.dim < len(v.shape) - 1 and (v.dim == 0 or d.chance(0.6))
    at = v.dim if behind else v.dim - 1
    flat = d.text(*v.shape[:at], -1, *v.shape[at + 2 :])
    table = forms("{v}.flatten({at}, {next}) | {v}.reshape({flat})")
    d.add("fold", table, v, outer=1 if behind else v.shape[at], at=at, next=at + 1, flat=flat)


def unfolded(d: Draft, v: Value) -> Value:
    """The batch has a dimension of its own again."""
    parts = [n for n in (v.outer, SENTINEL, v.shape[v.dim] // SENTINEL // v.outer) if n != 1]
    shape = d.text(*v.shape[: v.dim], *parts, *v.shape[v.dim + 1 :])
    table = forms("{v}.unflatten({at}, ({parts})) | {v}.reshape({shape})")
    return d.add("unfold", table, v, at=v.dim, parts=d.text(*parts), shape=shape)


@step(2)
def unfold(d):
    unfolded(d, d.pick(lambda v: v.folded))


MOVES = forms("""
    {v}.transpose({sa}, {sb}) | torch.transpose({v}, {a}, {b}) | {v}.permute({order})
    {v}.movedim({sa}, {sb}) | torch.moveaxis({v}, {a}, {b}) | torch.permute({v}, ({order}))
    {v}.swapaxes({a}, {b}) | {v}.mT | {v}.permute(dims=({order})) | torch.swapdims({v}, {a}, {b})
    torch.einsum('{old}->{new}', {v})
""")


@step(3)
def move(d):
    v = d.pick(lambda v: len(v.shape) > 1)
    n = len(v.shape)
    (a, b), order = d.rng.sample(range(n), 2), d.rng.sample(range(n), n)
    words = {
        "a": a,
        "b": b,
        "sa": d.signed(a, v),
        "sb": d.signed(b, v),
        "order": ", ".join(map(str, order)),
    }
    new = "".join("abcde"[k] for k in order)
    d.add(
        "move",
        MOVES
        + (
            forms("""
        {v}.T | {v}.t()
    """)
            if n == 2
            else ()
        ),
        v,
        old="abcde"[:n],
        new=new,
        **words,
    )


@step(0.8)
def move_out_of_sight(d):
    v = d.pick(lambda v: len(v.shape) > 1 and v.dim < 2)
    d.add("move out of sight", forms("scripted_swap({v}) | Swap.apply({v})"), v)


@step(1.5)
def ones(d):
    v = d.pick()
    if 1 in v.shape and d.chance(0.6):
        table = forms("""
            {v}.squeeze({dim}) | torch.squeeze({v}, dim={dim}) | {v}.select({dim}, 0)
            {v}.squeeze(({dim},))
        """)
        d.add("squeeze", table, v, dim=d.signed(v.shape.index(1), v))
    else:
        k = d.rng.randrange(len(v.shape) + 1)
        table = forms("{v}.unsqueeze({at}) | {v}[{index}] | torch.unsqueeze({v}, dim={at})")
        d.add("unsqueeze", table, v, at=k, index=", ".join([":"] * k + ["None"]))


@step(1)
def repeat(d):
    v = d.pick(lambda v: len(v.shape) < 4)
    k, at, n, m = d.other(v), d.rng.randrange(len(v.shape) + 1), d.size(), len(v.shape)
    sizes = d.text(*v.shape[:at], n, *v.shape[at:])
    minus = ", ".join(["-1"] * at + [str(n)] + ["-1"] * (m - at))
    times = ", ".join("2" if j == k else "1" for j in range(m))
    table = forms("""
        {v}.unsqueeze({at}).expand({sizes}) | {v}.unsqueeze({at}).expand({minus})
        torch.broadcast_to({v}.unsqueeze({at}), ({sizes})) | {v}.repeat({times})
        torch.tile({v}, ({times})) | {v}.repeat_interleave(2, dim={dim})
    """)
    d.add("repeat", table, v, at=at, sizes=sizes, minus=minus, times=times, dim=d.signed(k, v))


@step(0.5)
def spread(d):
    """A parameter is given to every sample, as a tensor with a batch."""
    table = forms("""
        <m k>.expand(B, -1, -1) | <m k>.unsqueeze(0).repeat(B, 1, 1)
        <m k>.unsqueeze(1).expand({m}, B, {k}) | <m k>[None].expand(B, {m}, {k})
        torch.stack([<m k>] * B) | torch.zeros(B, {m}, {k}) + <m k>
    """)
    d.add("expanded parameter", table, m=d.size())


@step(1.5)
def join(d):
    v = d.pick()
    k = d.other(v)
    u = d.pick(lambda u: u.rest == v.rest and u[2:] == v[2:] and u.shape[:k] == v.shape[:k]
               and u.shape[k + 1 :] == v.shape[k + 1 :])  # fmt: skip
    table = forms("torch.cat([{v}, {u}], {word}{dim}) | torch.concat(({v}, {u}), {only}{dim})")
    if u.shape == v.shape:
        table += forms("torch.stack([{v}, {u}], {only}{at}) | torch.stack(({v}, {u}), {only}{at})")
    d.add("join", table, v, u, dim=d.signed(k, v), at=d.rng.randrange(len(v.shape) + 1))


@step(0.6)
def flat_join(d):
    v, u = (d.pick(lambda v: v.dim == 0 and len(v.shape) > 1, whole=True) for _ in range(2))
    table = forms("""
        torch.cat([{v}.flatten(1), {u}.flatten(1)], 1)
        torch.hstack([{v}.flatten(1), {u}.flatten(1)])
    """)
    d.add("join", table, v, u)


@step(0.6)
def token(d):
    """A parameter goes in front of every sequence."""
    v = d.pick(lambda v: len(v.shape) == 3 and v.dim == 0, whole=True)
    d.add("class token", "torch.cat([<1 1 n>.expand(B, -1, -1), {v}], dim=1)", v)


@step(0.8)
def two_views(d):
    """Two views of the batch, one after the other, go through a layer and part again."""
    v = d.pick(lambda v: v.dim == 0 and features(v), whole=True)
    u, f = d.twin(v), d.module(f"nn.Linear({v.shape[-1]}, {d.size()})")
    part = d.one(".chunk(2)", ".chunk(2, dim=0)", ".split(B)", ".split([B, B])", ".tensor_split(2)",
                 ".unflatten(0, (2, B)).unbind(0)")  # fmt: skip
    table = forms("a$ * b$ | a$ - 2 * b$ | torch.cat([a$, b$], 1) | a$.tanh() + b$")
    d.add(
        "two views of the batch",
        table,
        v,
        u,
        lines=f"a$, b$ = {f}(torch.cat([{v.name}, {u.name}])){part}",
    )


PARTS = forms("""
    {v}.unbind({dim})[0] | torch.unbind({v}, dim={dim})[-1] | sum({v}.unbind({dim}))
    {v}.narrow({dim}, 0, 1) | torch.stack({v}.unbind({dim}), {at})
    torch.stack([t.tanh() for t in {v}.unbind({dim})], {at}) | {v}.split(1, dim={dim})[0]
    torch.cat({v}.split(1, {dim})[::-1], {dim}) | {v}.chunk(2, {dim})[0]
    torch.tensor_split({v}, 2, dim={dim})[0]
""")
HALVES = forms("""
    (lambda a, b: a * b)(*{v}.chunk(2, dim={dim})) | F.glu({v}, {dim})
    (lambda a, b: a + b.tanh())(*torch.split({v}, {half}, {dim}))
""")


@step(1.2)
def part(d):
    v = d.pick()
    k = d.other(v)
    half, left = divmod(v.shape[k], 2)
    at = d.rng.randrange(len(v.shape))
    d.add("part", PARTS if left else PARTS + HALVES, v, dim=d.signed(k, v), at=at, half=half)


# Indexing.


@step(3)
def index(d):
    v = d.pick()
    items, advanced = [], False
    for k, n in enumerate(v.shape):
        if k == v.dim or d.chance(0.4):
            items.append(":")
            continue
        choices = [
            ":",
            str(d.rng.randrange(n)),
            "-1",
            "::2",
            "None, :",
            f"{n - 1}:",
            *(["1:", ":-1"] if n > 1 else []),
        ]
        if not advanced:
            few = ", ".join(str(d.rng.randrange(n)) for _ in range(d.size()))
            mask = ", ".join([*(d.one("True", "False") for _ in range(n - 1)), "True"])
            choices += [f"[{few}]", f"torch.arange({n}).flip(0)", f"torch.tensor([{mask}])", "[0]"]
        items.append(d.rng.choice(choices))
        advanced |= items[-1][0] in "[t"
    if v.dim == 0 and d.chance(0.2):
        items[0] = "..."
    elif d.chance(0.3):
        while len(items) > 1 and items[-1] == ":":
            items.pop()
    d.add("index", f"{{v}}[{', '.join(items)}]", v)


GATHERS = forms("""
    {v}.index_select({dim}, torch.tensor({few}))
    torch.index_select({v}, dim={dim}, index=torch.tensor({few}))
    {v}.gather({dim}, {v}.argsort({dim}))
    torch.take_along_dim({v}, {v}.argmax({at}, keepdim=True), dim={at})
    torch.gather({v}, {at}, {v}.argmax({at}, keepdim=True)) | {v}.roll(1, {dim})
    torch.flip({v}, dims=({at},)) | torch.roll({v}, shifts=1, dims={at}) | {v}.flip({dim})
    {v}.select({dim}, 0) | {v}.unfold({dim}, {size}, 1) | {v}.diff(dim={dim})
    {v}.index_fill({dim}, torch.tensor([0]), 0.5) | {v}.diagonal(dim1={at}, dim2={other})
    {v}.rot90(1, ({at}, {other})) | {v}.roll((1, 1), ({at}, {other}))
    torch.fliplr({v}) if {at} == 1 else {v}
""")


@step(1.5)
def gather(d):
    v = d.pick()
    k = d.other(v)
    few = [d.rng.randrange(v.shape[k]) for _ in range(d.size())]
    d.add(
        "gather",
        GATHERS,
        v,
        dim=d.signed(k, v),
        at=k,
        other=d.other(v),
        few=few,
        size=d.one(1, v.shape[k]),
    )


@step(0.6)
def own_index(d):
    """Each sample has an index of its own."""
    i = d.ids()
    v = d.pick(lambda v: v.dim == 0 and len(v.shape) == 2 and v.shape[1] >= i.high, whole=True)
    if i.dim or len(i.shape) > 2:
        raise MisfitError
    one = forms("""
        {v}.gather(1, {u}[:, None]) | {v}[torch.arange(B), {u}]
        torch.take_along_dim({v}, {u}.unsqueeze(1), 1)
    """)
    two = forms("""
        {v}.gather(1, {u}) | {v}[torch.arange(B)[:, None], {u}]
        torch.take_along_dim({v}, {u}, dim=1)
    """)
    d.add("index of each sample", one if len(i.shape) == 1 else two, v, i)


@step(0.5)
def index_of_ids(d):
    i = d.ids()
    if len(i.shape) != 2:
        raise MisfitError
    table = forms("{v}.flatten(1)[:, 0] | {v}.flip(1) | {v}[:, 1:] | {v}.T | {v}.unsqueeze(1)")
    d.add("index", table, i)


@step(0.8)
def pad(d):
    table = forms("""
        F.pad({v}, {where}) | F.pad({v}, {where}, value=0.5) | F.pad({v}, {where}, 'constant', 1.0)
    """)
    d.add("pad", table, d.pick(features), where=d.one("(1, 0)", "(0, 1)", "(1, 1)"))


@step(0.5)
def pool(d):
    v = d.pick(lambda v: sequence(v) and v.shape[2] > 1)
    table = forms("""
        F.max_pool1d({v}, 2, 1) | F.avg_pool1d({v}, 2, 1) | F.adaptive_avg_pool1d({v}, 1)
    """)
    d.add("pool", table + (forms("F.interpolate({v}, scale_factor=2)") if v.dim == 0 else ()), v)


# Writes.

BUFFERS = forms("""
    $ = {v}.clone() | $ = {v} * 1.0 | $ = torch.zeros_like({v}) | $ = torch.zeros({sizes})
    $ = {v}.new_empty({sizes}).copy_({v}) | $ = torch.empty_like({v}).copy_({v})
""")
WRITES = forms("""
    $[{at}] = {u}[{at}] | $[{at}] = <w> | $[{at}] += {u}[{at}] | $[{at}] *= <w> | $.copy_({u})
    $[...] = {u} | $[:] = {u} | $.select({k}, {j}).copy_({u}.select({k}, 0)) | $ += {u}
    $ *= {u}.sigmoid() | $[{at}].zero_() | $.add_({u}, alpha=0.5) | $.masked_fill_({u} > 0, 0.5)
    $.narrow({k}, 0, 1).mul_(2.0) | $[{u} > 0] = 0.25
    $.index_copy_({k}, torch.tensor([{j}]), {u}.narrow({k}, 0, 1)) | $[{at}] = {u}[{at}].detach()
    $.index_add_({k}, torch.tensor([{j}]), {u}.narrow({k}, 0, 1))
    $.scatter_({k}, {u}.argsort({k}), {u}) | $.addcmul_({u}, {u})
    $.unbind({k})[0].copy_({u}.select({k}, 0)) | $.flatten()[:] = {u}.flatten()
    for t in range({n}): $.select({k}, t).copy_({u}.select({k}, {j}) * (t + 1))
""")


@step(2)
def write(d):
    v = d.pick()
    k = d.other(v)
    j = d.rng.randrange(v.shape[k])
    rest = tuple(1 if q == v.dim else m for q, m in enumerate(v.shape) if q != k)
    words = {"k": k, "j": j, "at": ", ".join([":"] * k + [str(j)]), "w": rest, "n": v.shape[k]}
    lines = f"{d.rng.choice(BUFFERS)}\n{d.rng.choice(WRITES)}"
    table = forms("$ | $ * 1.0 | $.tanh()")
    d.add("write", table, v, d.twin(v), lines=lines, sizes=d.text(*v.shape), **words)


IN_PLACE = forms("""
    {v}.relu_() | {v}.tanh_() | {v}.mul_(0.5) | {v}.add_(1.0) | {v}.clamp_(-1, 1) | {v}.neg_()
    {v}.sigmoid_() | {v}.masked_fill_({v} < 0, 0.1) | {v}.mul_(<w>) | {v}.add_(<w>)
    {v}.unsqueeze_(-1) | {v}.transpose_(0, -1) | {v}.exp_().clamp_(max=3) | {v}.square_()
    F.relu({v}, inplace=True)
""")


@step(1.5)
def in_place(d):
    """The result of the last step is changed in place."""
    v = d.values[-1]
    if not d.steps or v.name != d.steps[-1].writes or v.high:
        raise MisfitError
    d.add("in place", IN_PLACE, v, w=broadcast(d, v))
    d.forget(v)


@step(0.5)
def write_moved(d):
    """Values are written into a buffer in which the batch is elsewhere."""
    v = d.pick(lambda v: len(v.shape) > 1, whole=True)
    k, order = d.other(v), list(range(len(v.shape)))
    order[v.dim], order[k] = k, v.dim
    lines = forms("""
        $[:] = {v}.transpose({a}, {k}) | $.copy_({v}.transpose({a}, {k}))
        $.transpose({a}, {k}).copy_({v})
        for t in range({n}): $.select({a}, t).copy_({v}.select({k}, t))
    """)[: 4 if abs(k - v.dim) == 1 else 3]
    zeros = f"$ = torch.zeros({d.text(*(v.shape[j] for j in order))})\n"
    table = tuple(zeros + line for line in lines)
    d.add("write with the batch elsewhere", "$ * 1.0", v, lines=table, a=v.dim, k=k, n=v.shape[k])


# Products.


@step(2.5)
def matmul(d):
    v = d.pick(features)
    n, k, shape = v.shape[-1], d.size(), v.shape
    sizes: list[tuple[int, ...]] = [(n,), (n, k), (n, k), (1, n, k), (k, n, 2), (1, 1, n, k)]
    if len(shape) > 2 and v.dim != len(shape) - 3:
        sizes += [(shape[-3], n, k)] * 2
    if len(shape) > 3 and v.dim == len(shape) - 2:
        sizes += [(*shape[-4:-2], n, k)]
    table = forms("{v} @ <w> | torch.matmul({v}, <w>) | {v}.matmul(<w>)")
    d.add("matmul", table, v, w=d.rng.choice(sizes))


@step(1)
def matmul_from_the_left(d):
    v = d.pick(lambda v: len(v.shape) > 1 and v.dim != len(v.shape) - 2)
    n, k = v.shape[-2], d.size()
    sizes: list[tuple[int, ...]] = [(n,), (k, n), (k, n), (1, k, n), (2, 1, k, n)]
    if len(v.shape) > 2 and v.dim != len(v.shape) - 3:
        sizes += [(v.shape[-3], k, n)]
    table = forms("<w> @ {v} | torch.matmul(<w>, {v})")
    d.add("matmul from the left", table, v, w=d.rng.choice(sizes))


@step(3)
def einsum(d):
    """An equation that is drawn: the batch goes anywhere; two or three operands, in any order."""
    v = d.pick(lambda v: len(v.shape) < 5)
    letters = d.rng.sample("abcdefgh", len(v.shape) + 2)
    mine, new = letters[: len(v.shape)], letters[len(v.shape) :]
    sizes = dict(zip(letters, (*v.shape, d.size(), d.size()), strict=True))
    batch = mine[v.dim]
    used = [c for c in mine if c != batch and d.chance(0.7)] + [c for c in new if d.chance(0.5)]
    d.rng.shuffle(used)
    operands = [(mine, v.name), (used, d.shared(*(sizes[c] for c in used)))]
    third = d.rng.random()
    if third < 0.2 and used:
        operands.append((used[:1], d.shared(sizes[used[0]])))
    elif third < 0.4:
        operands.append((mine, f"{v.name}.tanh()"))
    elif third < 0.5:
        operands[1] = (mine, v.name)
    if d.chance(0.5):
        d.rng.shuffle(operands)
    present = sorted({c for s, _ in operands for c in s})
    out = [batch, *(c for c in present if c != batch and d.chance(0.6))]
    if d.chance(0.5):
        d.rng.shuffle(out)
    equation = ",".join("".join(s) for s, _ in operands) + "->" + "".join(out)
    numbers = ", ".join(f"{name}, {[present.index(c) for c in s]}" for s, name in operands)
    table = forms("""
        torch.einsum('{equation}', {names}) | torch.einsum('{equation}', {names})
        torch.einsum('{equation}', [{names}]) | torch.einsum('{equation}', {names}).relu_()
        torch.einsum('{equation}', {names}).mul_(0.5) | torch.einsum({numbers}, {out})
    """)
    names = ", ".join(name for _, name in operands)
    d.add(
        "einsum",
        table,
        v,
        equation=equation,
        names=names,
        numbers=numbers,
        out=[present.index(c) for c in out],
    )


@step(0.8)
def einsum_with_dots(d):
    v = d.pick(lambda v: v.dim == 0 and len(v.shape) > 1)
    table = forms("""
        torch.einsum('...d,dk->...k', {v}, <n k>) | torch.einsum('kd,...d->...k', <k n>, {v})
        torch.einsum('b...,...->b', {v}, <r>) | torch.einsum('b...d,d->b...', {v}, <n>)
        torch.einsum('...d,d->...d', {v}, <n>) | torch.einsum('b...,b...->b', {v}, {v})
        torch.einsum('...d,kd->k...', {v}, <k n>) | torch.einsum('b...d,d', {v}, <n>)
    """)
    d.add("einsum with an ellipsis", table, v, r=v.shape[1:])


PRODUCTS = {
    "vector": forms("""
        torch.outer({v}, <k>) | torch.outer(<k>, {v}) | {v}.ger(<k>)
        torch.outer({v}, {v} * 0 + 1)[:, 0]
    """),
    "features": forms("""
        torch.tensordot({v}, <n k>, dims=1) | torch.tensordot(<k n>, {v}, dims=([1], [{last}]))
        torch.inner({v}, <k n>) | torch.tensordot({v}, <k n>, ([-1], [-1]))
        torch.cdist({v}, <k n>) | torch.cdist(<k n>, {v}) | F.cosine_similarity({v}, <n>, dim=-1)
        torch.linalg.vecdot({v}, <n>) | torch.cdist({v}, <k n>, p=1.0)
    """),
    "rows": forms("""
        torch.addmm(<k>, {v}, <n k>) | torch.addmm(<1 k>, {v}, <n k>, beta=0.5, alpha=2)
        torch.mm({v}, <n k>) | torch.mv({v}, <n>) | torch.addmv(<1>, {v}, <n>) | {v}.mm(<n k>)
        F.pairwise_distance({v}, <1 n>) | torch.linalg.multi_dot([{v}, <n k>, <k 2>])
    """),
    "columns": forms("torch.mm(<k c>, {v}) | torch.addmm(<k 1>, <k c>, {v}) | <k c>.mm({v})"),
    "matrices": forms("""
        torch.bmm({v}, {v}.mT) | {v}.bmm(<1 n k>.expand(B, -1, -1)) | {v} @ {v}.mT | {v}.mT @ {v}
        torch.baddbmm(<1 t k>, {v}, <1 n k>.expand(B, -1, -1))
        torch.tensordot({v}, <t n k>, dims=2) | torch.baddbmm(<k>, {v}, <n k>.expand(B, {n}, {k}))
        ({v} @ {v}.transpose(-1, -2)).softmax(-1) @ {v}
    """),
    "heads": forms("""
        torch.bmm({v}, <c n k>) | torch.baddbmm(<c 1 k>, {v}, <c n k>) | {v} @ <c n k>
    """),
}  # fmt: skip


@step(2)
def product(d):
    v = d.pick(whole=True)
    place = len(v.shape), v.dim
    kind = {
        (1, 0): "vector",
        (2, 0): "rows",
        (2, 1): "columns",
        (3, 0): "matrices",
        (3, 1): "heads",
    }.get(place, "features")
    if kind in ("rows", "matrices", "heads") and d.chance(0.5):
        kind = "features"
    if kind == "features" and not features(v):
        raise MisfitError
    d.add("product", PRODUCTS[kind], v, c=v.shape[0], t=v.shape[-2:-1], last=len(v.shape) - 1)


@step(0.5)
def hyper(d):
    """Weights that are made for each sample."""
    v = d.pick(lambda v: v.dim == 0 and len(v.shape) == 2, whole=True)
    table = forms("""
        torch.einsum('bi,bij->bj', {v}, {f}({v}).view(B, {n}, {k}))
        ({v}.unsqueeze(1) @ {f}({v}).view(-1, {n}, {k})).squeeze(1)
    """)
    k = d.size()
    d.add(
        "weights of each sample",
        table,
        v,
        k=k,
        f=d.module(f"nn.Linear({v.shape[1]}, {v.shape[1] * k})"),
    )


# Reductions.

REDUCTIONS = forms("""
    {v}.sum({word}{dims}{keep}) | {v}.mean({word}{dims}{keep}) | torch.sum({v}, {word}{dims}{keep})
    torch.mean({v}, {word}{dims}{keep}) | {v}.amax({word}{dims}{keep})
    torch.amin({v}, {word}{dims}{keep}) | torch.logsumexp({v}, {only}{dims}{keep})
    {v}.logsumexp({only}{dim}{keep}) | {v}.max({word}{dim}{keep})[0]
    {v}.min({word}{dim}{keep}).values | (1 + {v}.square()).prod({word}{dim}{keep})
    {v}.topk(1, {dim})[0] | ({v} + 2).norm(dim={dim}{keep})
    torch.linalg.vector_norm(1 + {v}.square(), dim={dims}{keep}) | {v}.nansum({word}{dims}{keep})
    {v}.contiguous().median({dim}{keep})[0] | {v}.var({word}{dim}, correction=0{keep})
    torch.var({v}, {word}{dims}, correction=0{keep})
    torch.var_mean({v}, {only}{dim}, correction=0{keep})[0] | (2 + {v}).std({word}{dim}{keep})
    torch.einsum('b...->b', {v}) if {front} else {v}.sum({dim})
""")
ALONG = forms("""
    {v}.softmax({only}{dim}) | F.softmax({v}, {only}{dim}) | torch.softmax({v}, {only}{dim})
    {v}.cumsum({word}{dim}) | F.log_softmax({v}, {only}{dim}) | torch.cumsum({v}, {word}{dim})
    {v}.sort({only}{dim})[0] | {v}.cummax({dim})[0]
    torch.sort({v}, {only}{dim}, descending=True).values | {v}.topk({size}, dim={dim}).values
    F.softmin({v}, dim={dim}) | F.normalize({v} + 0.1, dim={dim})
    {v} - {v}.mean({word}{dim}, keepdim=True) | torch.logcumsumexp({v}, {only}{dim})
    {v}.flip({dim}).cumsum({dim}) | ({v} - {v}.amax({word}{dim}, keepdim=True)).exp()
    torch.cumprod({v}, {word}{dim}) | torch.fft.rfft({v}, dim={dim}).abs()
    torch.fft.fft({v}, dim={dim}).real | torch.renorm({v}, 2, {batch}, 1.0)
    {v} - {v}.detach().mean({word}{dim}, keepdim=True) | torch.trapezoid({v}, dim={dim})
    {v}.cummin({dim}).values
""")


def dims_of(d: Draft, v: Value) -> dict[str, Any]:
    """Words for a reduction of `v`: one other dimension, or some."""
    k = d.other(v)
    some = tuple(d.signed(j, v) for j in d.rng.sample(v.rest, d.rng.randint(1, len(v.rest))))
    dim = d.signed(k, v)
    return {
        "dim": dim,
        "dims": some if d.chance(0.3) else dim,
        "size": v.shape[k],
        "batch": v.dim,
        "front": v.dim == 0,
    }


@step(2.5)
def reduction(d):
    v = d.pick()
    d.add("reduction", REDUCTIONS, v, **dims_of(d, v))


@step(2)
def along(d):
    v = d.pick()
    d.add("along a dimension", ALONG, v, **dims_of(d, v))


# Functions in functions.


@step(1.2)
def checkpointed(d):
    v = d.pick(features)
    bodies = forms("""
        {f}(a).tanh() * <k> | {f}(a) | (a * a.sigmoid()) @ <n k> | torch.relu({f}(a) + <k>)
        a * <n> + a.tanh()
    """)
    lines = tuple(f"def f$(a):\n    return {body}" for body in bodies)
    k = d.size()
    f = d.module(f"nn.Linear({v.shape[-1]}, {k})")
    table = forms("""
        checkpoint(f$, {v}, use_reentrant={old}) | checkpoint({f}, {v}, use_reentrant={old})
    """)
    d.add("checkpoint", table, v, lines=lines, k=k, f=f, old=d.chance(0.5))


@step(0.6)
def vmapped(d):
    v = d.pick(lambda v: len(v.shape) > 1)
    k = d.other(v)
    table = forms("a.tanh() * 2 | a.sin() | a * a | a * <> | a.exp().clamp(max=2)")
    if k != len(v.shape) - 1 and features(v):
        table += forms("a.softmax(-1) | F.linear(a, <k n>) | a * <n> | a.cumsum(-1) | a.flip(-1)")
    call = f"torch.func.vmap(lambda a: %s, in_dims={k}, out_dims={d.one(k, 0)})({{v}})"
    d.add("vmap over another dimension", tuple(call % body for body in table), v)


@step(0.5)
def one_by_one(d):
    """Samples take turns."""
    v = d.pick(lambda v: v.dim == 0 and features(v), whole=True)
    table = forms("""
        torch.stack([{f}(a) for a in {v}]) | torch.stack([{f}({v}[b]) for b in range(B)])
        torch.cat([{f}({v}[b : b + 1]) for b in range(B)])
        torch.stack([{f}(a) for a in {v}.unbind(0)], 1) | torch.func.vmap(lambda a: a @ <n k>)({v})
    """)
    f = d.module(f"nn.Linear({v.shape[-1]}, {d.size()})")
    d.add("one sample after the other", table, v, f=f)


# Steps in which samples meet.

MIX_ALONG = forms("""
    {v}.roll(1, {dim}) | torch.roll({v}, B // 2, {dim}) | {v}.flip({dim}) | {v}.softmax({only}{dim})
    {v}.cumsum({word}{dim}) | {v} - {v}.mean({word}{dim}, keepdim=True) | {v}.sort({only}{dim})[0]
    {v} - {v}.detach().mean({word}{dim}, keepdim=True) | {v} - {v}.amax({word}{dim}, keepdim=True)
    {v} / (1 + {v}.norm(dim={dim}, keepdim=True)) | {v} + {v}.sum({word}{dim}, keepdim=True) * 0.1
    {v} / (1 + {v}.var({word}{dim}, correction=0, keepdim=True)) | {v}.cummax({dim})[0]
    F.log_softmax({v}, {only}{dim}) | {v} - {v}.logsumexp({only}{dim}, keepdim=True)
    {v} + {v}.contiguous().median({dim}, keepdim=True)[0] | F.normalize({v} + 0.1, dim={dim})
    torch.fft.fft({v}, dim={dim}).real | {v}.gather({dim}, {v}.argsort({dim}))
    {v}.index_select({at}, torch.arange({v}.shape[{at}]).flip(0))
    torch.stack({v}.unbind({at})[::-1], {at})
    torch.cat([{v}.narrow({at}, 1, {v}.shape[{at}] - 1), {v}.narrow({at}, 0, 1)], {at})
    {v} * (1 + {v}.detach().std({word}{dim}, correction=0, keepdim=True))
    {v}.movedim({at}, 0).flip(0).movedim(0, {at})
    {v} - {v}.mean({word}{dim}, keepdim=True) + {v}.detach().mean({word}{dim}, keepdim=True)
""")
MIX_ALL = forms("""
    {v} - {v}.mean() | {v} / (1 + {v}.abs().max()) | {v} * (1 + {v}.mean().item())
    {v} / (1 + {v}.norm()) | {v} * float({v}.detach().mean() + 1) | {v} - {v}.detach().mean()
    F.layer_norm({v}, {v}.shape) | {v} if {v}.mean() > 0 else -{v} | {v} * ({v}.sum() > 0)
    {v} * sum({v}.flatten().tolist()) | {v} * torch.tensor({v}.detach().mean().item())
    {v}.flatten().softmax(0).view({v}.shape) | {v}.flatten().sort()[0].view({v}.shape)
    {v} * torch.from_numpy({v}.detach().numpy().mean(keepdims=True))
    {v} * (1 + {v}.detach().max().numpy()) | {v}.clamp(max={v}.mean().item())
    {v} * len({v}.unique()) / 9
""")
MIX_ROWS = forms("""
    {v}[torch.arange(B).roll(1)] | {v}[torch.arange(B - 1, -1, -1)]
    {v}[[0] + list(range(B - 1, 0, -1))] | {v}[:1] + {v} | {v} * {v}[-1:]
    torch.einsum('ab,b...->a...', torch.ones(B, B) / B, {v})
    (torch.ones(B, B).tril() @ {v}.reshape(B, -1)).view({v}.shape)
    torch.cat([{v}[B // 2 :], {v}[: B // 2]])
    torch.tensordot(torch.ones(B, B) - torch.eye(B), {v}, dims=1)
    torch.take_along_dim({v}, {v}.argsort(0), 0)
    torch.zeros_like({v}).index_add(0, torch.arange(B).roll(1), {v})
    torch.stack([{v}[(b + 1) % B] for b in range(B)])
    {v}.flatten().view(-1, B).T.reshape({v}.shape) | torch.cat([{v}[1:], {v}[:1]])
    {v} * {v}.flatten(0)[0] | torch.zeros_like({v}).index_put((torch.arange(B).flip(0),), {v})
    {v}[torch.arange(B) // 2 * 2] | {v} + {v}[0]
    torch.zeros_like({v}).scatter(0, {v}.argsort(0), {v})
""")
MIX_WRITES = forms("""
    $[1:] = {v}[:-1] | $[0] = {v}[-1] | $[0] += {v}[B - 1] | $[torch.arange(B).flip(0)] = {v}
    $.copy_({v}.flip(0)) | $.index_copy_(0, torch.arange(B).roll(1), {v}) | $[:] = {v}.roll(1, 0)
    $ -= $.mean(0) | $[0] = $.sum(0) | $.index_add_(0, torch.zeros(B, dtype=torch.long), {v})
    $.mul_($.detach().mean()) | $[B // 2 :] = {v}[0]
""")
MIX_MATRIX = forms("""
    ({v} @ {v}.T).softmax(1) @ {v} | torch.cdist({v}, {v}) @ {v}
    F.conv1d({v}.T, <n n 3>, padding=1).T | {v}.T.contiguous().view(B, {n}) | {v} @ ({v}.T @ {v})
    {v} @ torch.linalg.inv(torch.eye({n}) + {v}.T @ {v}) | {v}.T.reshape({v}.shape)
    {v} / torch.linalg.matrix_norm({v} + 0.1) | scripted_swap({v}).reshape(B, {n})
    Swap.apply({v}).cumsum(1).T
    torch.func.vmap(lambda a: a - a.mean(), in_dims=1, out_dims=1)({v})
    [[nn.MultiheadAttention({n}, 1)]]({v}, {v}, {v})[0] | [[nn.RNN({n}, 3)]]({v})[0]
    F.instance_norm({v}.T[None])[0].T | F.batch_norm({v}, None, None, training=True)
    torch.linalg.qr({v})[0] if B > {n} else {v} @ ({v}.T @ {v})
""")


@mixing
def mix_along(d):
    v = d.pick()
    d.add("mixing", MIX_ALONG, v, dim=d.signed(v.dim, v), at=v.dim)


@mixing
def mix_all(d):
    d.add("mixing", MIX_ALL, d.pick())


@mixing
def mix_rows(d):
    d.add("mixing", MIX_ROWS, d.pick(in_front, whole=True))


@mixing
def mix_writes(d):
    lines = tuple("$ = {v}.clone()\n" + line for line in MIX_WRITES)
    d.add("mixing", "$ * 1.0", d.pick(in_front, whole=True), lines=lines)


@mixing
def mix_matrix(d):
    d.add("mixing", MIX_MATRIX, d.pick(lambda v: len(v.shape) == 2 and v.dim == 0, whole=True))


@mixing
def mix_sequences(d):
    """A layer takes the batch for time."""
    v = d.pick(sequence, whole=True)
    table = forms("""
        [[nn.RNN({n}, 3, batch_first={first})]]({v})[0]
        [[nn.MultiheadAttention({n}, 1, batch_first={first})]]({v}, {v}, {v})[0]
    """)
    d.add("mixing", table, v, first=v.dim == 1)


# Losses in forward, of a tensor with the batch in front; {r} is "mean" or "sum".

LOSSES = forms("""
    {v}.flatten(1).square().sum(1).{r}() | {v}.sin().flatten(1).sum(1).{r}()
    {v}.flatten(1).norm(dim=1).{r}()
    F.mse_loss({v}.flatten(1).sum(1), torch.full((B,), 0.3), reduction='{r}')
    torch.{r}({v}.flatten(1).logsumexp(1))
    F.smooth_l1_loss({v}.flatten(1).mean(1), torch.zeros(B), reduction='{r}')
    -F.log_softmax({v}.flatten(1), 1)[:, 0].{r}()
    F.cross_entropy({v}.flatten(1), torch.zeros(B, dtype=torch.long), reduction='{r}')
    F.softplus({v}.flatten(1).sum(1)).{r}(dim=0)
    torch.stack([a.square().sum() for a in {v}]).{r}()
    torch.einsum('b->', {v}.flatten(1).tanh().sum(1)) / (B if '{r}' == 'mean' else 1)
""")
JOINT_LOSSES = forms("""
    {v}.mean(0).square().sum() | {v}.flatten(1).sum(1).logsumexp(0) | {v}.flatten(1).sum(1).amax()
    ({v} + 0.1).norm() | {v}.flatten(1).sum(1).var(correction=0) | {v}.square().mean().log1p()
    {v}.sum() ** 2 | {v}.square().max()
    F.cross_entropy({v}.flatten(1) @ {v}.flatten(1).T, torch.arange(B))
    {v}.flatten(1).softmax(0).square().sum() | {v}.flatten(1).sum(1).sort()[0].cumsum(0).{r}()
    {v}.square().sum().sqrt() | {v}.flatten(1).cumsum(0).square().{r}()
    ({v}.flatten(1).sum(1) * {v}.detach().mean()).{r}()
    ({v}.flatten(1).sum(1) / {v}.detach().abs().sum()).{r}()
    F.mse_loss({v}.flatten(1), {v}.flatten(1).roll(1, 0), reduction='{r}')
    {v}.flatten(1).T.cov(correction=0).square().sum() | {v}.flatten(1).sum(1).square().{r}() ** 0.5
    torch.cdist({v}.flatten(1), {v}.flatten(1).flip(0)).sum() | {v}.flatten(1).sum(1).tanh().prod()
    -F.log_softmax({v}.flatten(1), 0).{r}() | {v}.square().mean(axis=0).sqrt().sum()
""")


def draw(seed: int) -> Graph:
    """Draw the graph of a seed. Raises `MisfitError` where it comes to nothing."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    d = Draft(rng)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for spec in draw_inputs(d):
            d.enter(*spec)
        length, mixed = rng.randint(2, 14), d.chance(0.3)
        at = rng.randrange(length) if mixed and d.chance(0.6) else length - 1
        often, kinds = zip(*STEPS, strict=True)
        for k in range(length):
            grow(d, lambda: rng.choices(kinds, often)[0])
            if mixed and k == at:
                grow(d, lambda: rng.choice(MIXING))
        graph = finish(d, seed)
    if not graph.members:
        raise MisfitError("no parameters")
    return graph


def draw_inputs(d: Draft) -> list[tuple[str, tuple[int, ...], int]]:
    """Real numbers; sometimes more of them, whole numbers (in front or behind), and a mask."""
    shape = tuple(d.size() for _ in range(d.one(0, 1, 1, 2, 2, 2, 3)))
    specs: list[tuple[str, tuple[int, ...], int]] = [("x", shape, 0)]
    if d.chance(0.2):
        specs.append(("z", shape if d.chance(0.5) else (d.size(),), 0))
    if d.chance(0.3):
        specs.insert(d.one(0, 1), ("i", (d.size(),) if d.chance(0.6) else (), d.one(3, 4, 5)))
    if d.chance(0.2):
        specs.append(("k", shape[: d.one(0, 1)], 2))
    return specs


def grow(d: Draft, choose: Callable[[], Drawer]) -> None:
    """Add a step: the first that fits. What one that does not fit has left is taken away."""
    for _ in range(30):
        members, steps, values = len(d.members), len(d.steps), list(d.values)
        with contextlib.suppress(MisfitError):
            choose()(d)
        if len(d.steps) > steps:
            return
        del d.members[members:]
        d.values = values


def depends(d: Draft) -> set[str]:
    """Names of tensors that depend on an input."""
    found = {i.name for i in d.inputs}
    for s in d.steps:
        if found & set(s.reads):
            found.add(s.writes)
    return found


def finish(d: Draft, seed: int) -> Graph:
    """Choose outputs, or a loss, and a usage."""
    read, alive = {name for s in d.steps for name in s.reads}, depends(d)
    ends = [v for v in d.values if v.name not in read and not v.high]
    ends = [v for v in ends if v.name in alive or d.chance(0.1)]
    ends = ends[-1:] + d.rng.sample(ends[:-1], min(len(ends[:-1]), d.one(0, 1, 2)))
    if not ends:
        raise MisfitError("no outputs")
    ends = [unfolded(d, v) if v.folded else v for v in ends]
    usage = draw_usage(d)
    outputs = [Output(v.name, v.dim) for v in ends]
    if d.chance(0.25):
        v, name = ends[0], f"v{len(d.steps)}"
        moved = v.name if v.dim == 0 else f"{v.name}.movedim({v.dim}, 0)"
        moved = f"{moved}.unsqueeze(1)" if len(v.shape) == 1 else moved
        joint = d.chance(0.4)
        code = d.fill(
            d.one(*(JOINT_LOSSES if joint else LOSSES)),
            {"v": moved, "r": usage.reduction},
            d.shared,
        )
        d.steps.append(Step("joint loss" if joint else "loss", f"{name} = {code}", (v.name,), name))
        outputs = [Output(name, None), *(outputs[1:] if d.chance(0.5) else ())]
    parts = tuple(d.inputs), tuple(d.members), tuple(d.steps), tuple(outputs)
    return live(Graph(seed, *parts, d.one("tuple", "tuple", "dict"), usage))


def draw_usage(d: Draft) -> Usage:
    steps = d.one(2, 2, 3)
    batches = [(d.rng.randint(1, 6),) for _ in range(steps)]
    if d.chance(0.5):
        batches = [batches[0]] * steps
    if d.chance(0.2):
        batches[-1] = (d.rng.randint(1, 5), d.rng.randint(1, 5))
    smallest = min(b for step in batches for b in step)
    between = ["", "", "", "no_grad", "abandoned", "grad"]
    if any("use_reentrant=True" in s.code for s in d.steps):
        between.remove("grad")  # torch refuses it
    return Usage(
        batches=tuple(batches),
        groups=d.rng.randint(1, smallest) if d.chance(0.1) else None,
        reduction=d.one("mean", "mean", "sum"),
        clearing=d.one("none", "none", "zeros", "each"),
        between=d.one(*between),
        dead=(d.rng.randrange(steps - 1),) if d.chance(0.1) else (),
        alike=(d.rng.randrange(steps - 1),) if d.chance(0.1) else (),
        unborn=d.chance(0.1),
        frozen=d.rng.choice(d.members)[0] if d.members and d.chance(0.1) else "",
        batch_dim=1 if all(i.shape for i in d.inputs) and d.chance(0.1) else 0,
    )


# ---- the truth -----------------------------------------------------------------------------------


class UnclearError(Exception):
    """Values do not decide what is right (ties, rounding, overflow): draw another graph."""


class Truth(NamedTuple):
    """What plain torch gives for one micro-batch, whole and one sample at a time."""

    gradients: dict[str, Tensor]  # of each sample's own loss: parameter → [batch, *shape]
    whole: dict[str, Tensor]  # p.grad of the whole batch
    outputs: list[Tensor]
    meet: bool  # do samples depend on each other?
    scale: float  # the largest gradient there is


class Call(NamedTuple):
    """A micro-batch: inputs with the batch in front, and the weight of each sample in the loss."""

    inputs: tuple[Tensor, ...]
    weights: Tensor

    def row(self, i: int) -> Call:
        return Call(tuple(t[i : i + 1] for t in self.inputs), self.weights[i : i + 1])

    def with_others(self, i: int, fresh: Call) -> Call:
        """The same with other samples in place of all but the i-th."""
        keep = torch.arange(len(self.weights)) == i
        pairs = zip(self.inputs, fresh.inputs, strict=True)
        shape = (-1, *[1] * 9)
        mixed = (torch.where(keep.view(shape[: a.dim()]), a, b) for a, b in pairs)
        return self._replace(inputs=tuple(mixed))


def run(graph: Graph, model: nn.Module, call: Call) -> list[Tensor]:
    """Call the model, and return its outputs in order. It may write into what it gets."""
    result = model(*(t.clone().movedim(0, graph.usage.batch_dim) for t in call.inputs))
    if graph.form == "dict":
        return [result[o.name] for o in graph.outputs]
    return list(result) if isinstance(result, tuple) else [result]


def loss_of(graph: Graph, outputs: list[Tensor], weights: Tensor, total: int) -> Tensor:
    """Return the loss of a micro-batch out of `total` samples.

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


def trained(model: nn.Module) -> dict[str, Tensor]:
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


def differentiate(
    graph: Graph,
    model: nn.Module,
    call: Call,
    total: int,
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Run plain torch, forward and backward: outputs and gradients."""
    outputs = run(graph, model, call)
    loss = loss_of(graph, outputs, call.weights, total)
    model.zero_grad()
    if not loss.requires_grad:
        raise UnclearError("no parameter is reached")
    loss.backward()
    named = trained(model).items()
    return outputs, {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named}


def gap_of(actual: Tensor, expected: Tensor) -> float:
    gap = float((actual - expected).abs().max()) if expected.numel() else 0.0
    return math.inf if math.isnan(gap) else gap


def size_of(tensors: Iterable[Tensor], least: float) -> float:
    """Return the largest finite number there is."""
    return max([least, *(float(t.nan_to_num(0, 0, 0).abs().max()) for t in tensors if t.numel())])


def gap_of_outputs(graph: Graph, whole: list[Tensor], singles: list[list[Tensor]]) -> float:
    """How far are outputs of the whole batch from those of single samples?

    Only those that have a gradient count: on others no parameter depends.
    """
    gap = 0.0
    for k, (o, t) in enumerate(zip(graph.outputs, whole, strict=True)):
        alone = [outputs[k] for outputs in singles]
        if o.dim is None:
            joined = torch.stack(alone)
            joined = joined.mean() if graph.usage.reduction == "mean" else joined.sum()
        else:
            if any(a.shape[o.dim] != 1 for a in alone):
                raise UnclearError("the shape depends on the batch")
            joined = torch.cat(alone, o.dim)
        if joined.shape != t.shape:
            raise UnclearError("the shape depends on the batch")
        if t.requires_grad:
            gap = max(gap, gap_of(joined, t))
    return gap


def truth_of(graph: Graph, model: nn.Module, call: Call, fresh: Call, total: int) -> Truth:
    """Run a micro-batch whole, and one sample at a time.

    Where the two differ, other samples from `fresh` tell whether samples meet. Where gradients are
    those of single samples all the same, whatever outputs are, an engine may be right.
    """
    batch = len(call.weights)
    outputs, whole = differentiate(graph, model, call, total)
    if not all(bool(t.isfinite().all()) for t in (*whole.values(), *outputs)):
        raise UnclearError("overflow")
    singles = [differentiate(graph, model, call.row(i), 1) for i in range(batch)]
    gradients = {n: torch.stack([g[n] for _, g in singles]) for n in whole}
    # Much less than a hundredth is zero but for rounding.
    scale = size_of([*whole.values(), *gradients.values()], 0.01)
    if scale > 1e6:
        raise UnclearError("gradients are large")
    factor = total if graph.usage.reduction == "mean" else 1
    gap = max(gap_of(whole[n], g.sum(0) / factor) for n, g in gradients.items()) / scale
    shown = gap_of_outputs(graph, outputs, [o for o, _ in singles]) / size_of(outputs, 1.0)
    if gap <= 1e-11:
        return Truth(gradients, whole, outputs, False, scale)
    if gap < 1e-6 and shown < 1e-6:
        raise UnclearError("rounding")
    if not influence(graph, model, call, fresh, shown):
        raise UnclearError("ties, or the size of the batch")
    for other in elsewhere(graph, outputs, batch):
        if not influence(other, model, call, fresh, 0.0):
            raise UnclearError("the loss takes another dimension for the batch")
    return Truth(gradients, whole, outputs, True, scale)


def elsewhere(graph: Graph, outputs: list[Tensor], batch: int) -> Iterator[Graph]:
    """Yield the graph with losses that take other dimensions of outputs for the batch.

    Where sizes coincide, a step that moves the batch leaves samples apart. The loss is not the
    engine's.
    """
    dims = [
        [None] if o.dim is None else [d for d, n in enumerate(t.shape) if n == batch]
        for o, t in zip(graph.outputs, outputs, strict=True)
    ]
    for choice in itertools.islice(itertools.product(*dims), 64):
        pairs = zip(graph.outputs, choice, strict=True)
        other = tuple(o._replace(dim=dim) for o, dim in pairs)
        if other != tuple(graph.outputs):
            yield replace(graph, outputs=other)


def influence(graph: Graph, model: nn.Module, call: Call, fresh: Call, shown: float) -> bool:
    """Does a sample's output or gradient depend on others? Is a loss of forward's own no sum?"""
    has_loss = any(o.dim is None for o in graph.outputs)
    if shown > 1e-6 and has_loss and not adds_up(graph, model, call, fresh):
        return True
    for i in range(len(call.weights)):
        (a, da), (b, db) = (slopes(graph, model, c) for c in (call, call.with_others(i, fresh)))
        for o, s, t in zip(graph.outputs, a, b, strict=True):
            counts = o.dim is not None and s.requires_grad
            if counts and gap_of(s.select(o.dim, i), t.select(o.dim, i)) > 1e-9:
                return True
        if any(gap_of(s[i], t[i]) > 1e-9 for s, t in zip(da, db, strict=True)):
            return True
    return False


def adds_up(graph: Graph, model: nn.Module, call: Call, fresh: Call) -> bool:
    """Is the loss a sum of what each sample gives, in a batch of this size?

    Then L(a, b) + L(a', b') = L(a', b) + L(a, b') for any sample and the others, and so are its
    gradients. It may still be another function for one sample alone: sizes that coincide with the
    batch's do that, and no samples meet.
    """
    fresh = fresh._replace(weights=call.weights)
    for i in range(len(call.weights)):
        corners = (call, fresh, call.with_others(i, fresh), fresh.with_others(i, call))
        ends = [differentiate(graph, model, c, len(call.weights)) for c in corners]
        rows = [
            [*(t.detach() for o, t in zip(graph.outputs, out, strict=True) if o.dim is None), *g]
            for out, g in ((out, list(grads.values())) for out, grads in ends)
        ]
        for a, b, c, d in zip(*rows, strict=True):
            if gap_of(a + b, c + d) > 1e-9 * size_of([a, b, c, d], 1.0):
                return False
    return True


def slopes(graph: Graph, model: nn.Module, call: Call) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and the gradient of the summed loss with respect to every input of real numbers."""
    inputs = tuple(t.clone().requires_grad_() if t.is_floating_point() else t for t in call.inputs)
    real = [t for t in inputs if t.requires_grad]
    outputs = run(graph, model, call._replace(inputs=inputs))
    loss = loss_of(graph, outputs, call.weights, len(call.weights))
    loss.backward()
    return outputs, [torch.zeros_like(t) if t.grad is None else t.grad for t in real]


# ---- the judge -----------------------------------------------------------------------------------


class Engine(NamedTuple):
    """What is judged: how to observe a model, and how to get moments."""

    observe: Callable[..., Any] = varreg.observe
    moments: Callable[[Tensor], Any] = varreg.moments


ENGINE = Engine()


class Verdict(NamedTuple):
    """What came of a graph: exact, refused or unclear; any other kind is a failure.

    Silent: samples meet, and nothing was said. Wrong: a number. Missing: moments. Crash: an error
    that is not the engine's own. Leftover: a mode on torch's stack.
    """

    kind: str
    told: str = ""
    meet: bool = False
    where: str = ""  # the function of the engine that raised

    @property
    def failed(self) -> bool:
        return self.kind not in ("exact", "refused", "unclear")


def judge(graph: Graph, engine: Engine = ENGINE) -> Verdict:
    """Train a graph as its usage says, and compare the first and last step with the truth."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            verdict = judge_steps(graph, engine, told)
    except UnclearError as reason:
        verdict = Verdict("unclear", str(reason))
    finally:
        torch.set_default_dtype(default)
        left = torch.overrides._get_current_function_mode_stack()
        for _ in left:
            torch.overrides._pop_mode()
    if left and not verdict.failed:
        return Verdict("leftover", f"after '{verdict.kind}', a mode is left on the stack")
    return verdict


def judge_steps(graph: Graph, engine: Engine, told: list[Any]) -> Verdict:
    usage, last = graph.usage, len(graph.usage.batches) - 1
    model = graph.build()
    plain, generator = copy.deepcopy(model), torch.Generator().manual_seed(graph.seed)
    if not trained(model):
        raise UnclearError("no parameter is trained")
    try:
        options = {
            "groups": usage.groups,
            "reduction": usage.reduction,
            "batch_dim": usage.batch_dim,
        }
        observer = engine.observe(model, **options)
    except Exception as error:
        return raised(error, False)
    found = Verdict("exact")
    try:
        for k, batches in enumerate(usage.batches):
            calls = [draw_call(graph, n, k, generator) for n in batches]
            move_parameters((model, plain), k, usage.unborn, generator)
            truths = truths_of(graph, plain, calls, generator) if k in (0, last) else []
            try:
                shown = train(graph, model, calls, k)
            except Exception as error:
                truths = truths or truths_of(graph, plain, calls, generator)
                return raised(error, any(t.meet for t in truths))
            if truths:
                found = compare(graph, engine, model, truths, shown, told)
                if found.kind == "wrong" and is_rounding(graph, plain, calls, truths, found.told):
                    raise UnclearError("rounding")
                if found.failed:
                    return found._replace(told=f"step {k}: {found.told}")
    finally:
        observer.remove()
    return found


def is_rounding(
    graph: Graph, plain: nn.Module, calls: list[Call], truths: list[Truth], told: str
) -> bool:
    """Is the true gradient of the parameter that is told of nothing but rounding, and the gap, too?

    Then it is another one when inputs move by a unit of rounding. Norms of constants do that: they
    divide what rounding left of a difference by what it left of a deviation.
    """
    names = [n for n in truths[0].whole if told.startswith((f"{n}: ", f"{n}.grad "))]
    total, gap = sum(len(c.weights) for c in calls), re.search(r"off by ([\d.e+-]+)", told)
    for call, truth in zip(calls, truths, strict=True):
        near = tuple(t * (1 + 2e-16) if t.is_floating_point() else t for t in call.inputs)
        moved = call._replace(inputs=near)
        singles = [
            differentiate(graph, plain, moved.row(i), 1)[1] for i in range(len(call.weights))
        ]
        whole = differentiate(graph, plain, moved, total)[1]
        for n in names:
            each = torch.stack([g[n] for g in singles])
            noise = max(gap_of(each, truth.gradients[n]), gap_of(whole[n], truth.whole[n]))
            size = size_of([truth.gradients[n], truth.whole[n]], 0.0)
            if gap is None or max(size, float(gap[1])) > 1e3 * noise:
                return False
    return bool(names)


def raised(error: Exception, meet: bool) -> Verdict:
    """Tell a refusal from a crash."""
    told, package = str(error), str(Path(varreg.__file__).parent)
    frames = traceback.extract_tb(error.__traceback__)
    where = next((f.name for f in reversed(frames) if f.filename.startswith(package)), "")
    if "varreg:" in told:
        return Verdict("refused", told[told.index("varreg:") :], meet, where)
    return Verdict("crash", f"{type(error).__name__}: {told}", meet, where)


def draw_call(graph: Graph, batch: int, k: int, generator: torch.Generator) -> Call:
    """Draw fresh inputs for a step."""
    inputs = [i.draw(batch, generator) for i in graph.inputs]
    if k in graph.usage.dead:
        inputs = [torch.zeros_like(t) if t.is_floating_point() else t for t in inputs]
    if k in graph.usage.alike:
        inputs = [t[:1].expand(t.shape).clone() for t in inputs]
    return Call(tuple(inputs), torch.rand(batch, generator=generator) + 0.5)


def move_parameters(
    models: tuple[nn.Module, nn.Module],
    k: int,
    unborn: bool,
    generator: torch.Generator,
) -> None:
    """Move parameters a little, in place, as an optimizer would. Unborn ones begin as zeros."""
    with torch.no_grad():
        for (n, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            noise = torch.randn(p.shape, generator=generator) * 0.3
            for t in (p, q):
                if k:
                    t.add_(noise)
                elif unborn and n.startswith("w"):
                    t.zero_()


def truths_of(
    graph: Graph,
    plain: nn.Module,
    calls: list[Call],
    generator: torch.Generator,
) -> list[Truth]:
    sizes = [len(c.weights) for c in calls]
    fresh = [draw_call(graph, n, -1, generator) for n in sizes]
    try:
        pairs = zip(calls, fresh, strict=True)
        return [truth_of(graph, plain, c, other, sum(sizes)) for c, other in pairs]
    except UnclearError:
        raise
    except Exception as error:
        raise UnclearError(f"plain torch fails: {type(error).__name__}") from error


def train(graph: Graph, model: nn.Module, calls: list[Call], k: int) -> list[list[Tensor]]:
    """Take one step of the observed model: all micro-batches. Returns their outputs."""
    usage, shown = graph.usage, []
    if usage.clearing == "each":
        for p in model.parameters():
            p.grad = None
    else:
        model.zero_grad(set_to_none=usage.clearing == "none")
    total = sum(len(c.weights) for c in calls)
    for call in calls:
        outputs = run(graph, model, call)
        loss_of(graph, outputs, call.weights, total).backward()
        shown.append([t.detach() for t in outputs])
    if k == 0 and usage.between:
        with torch.set_grad_enabled(usage.between != "no_grad"):
            outputs = run(graph, model, calls[0])
        if usage.between == "grad":
            loss = loss_of(graph, outputs, calls[0].weights, total)
            torch.autograd.grad(loss, list(trained(model).values()), allow_unused=True)
    return shown


def compare(
    graph: Graph,
    engine: Engine,
    model: nn.Module,
    truths: list[Truth],
    shown: list[list[Tensor]],
    told: list[Any],
) -> Verdict:
    """Compare what the engine left with the truth."""
    if any(t.meet for t in truths):
        return Verdict("silent", "samples meet, and nothing was said", True)
    for t, outputs in zip(truths, shown, strict=True):
        for a, b in zip(outputs, t.outputs, strict=True):
            if a.shape != b.shape or gap_of(a, b) > 1e-10 * size_of([b], 1.0):
                return Verdict("wrong", "outputs are not those of the plain model")
    warned = [str(w.message) for w in told if re.match("varreg: .*no moments", str(w.message))]
    scale = max(t.scale for t in truths)
    for name, p in trained(model).items():
        whole = sum((t.whole[name] for t in truths), torch.zeros(()))
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        gap, size = gap_of(grad, whole), size_of([whole], 0.0)
        if gap > TOLERANCE * size + 1e-10 * scale:
            return Verdict("wrong", f"{name}.grad is off by {gap:.3g} of {size:.3g}")
        parts = [t.gradients[name] for t in truths]
        m = engine.moments(p)
        if m is not None:
            found = compare_moments(name, m, parts, graph.usage, scale)
            if found.failed:
                return found
        elif size_of(parts, 0.0) > 1e-11 * scale and not any(has_name(w, name) for w in warned):
            return Verdict("missing", f"{name} has a gradient and no moments")
    return Verdict("exact")


def compare_moments(name: str, m: Any, parts: list[Tensor], usage: Usage, scale: float) -> Verdict:
    """Compare a parameter's moments with its gradients, one part for each micro-batch."""
    each = torch.cat(parts)
    if m.count != len(each):
        return Verdict("wrong", f"{name}: count is {m.count}, not {len(each)}")
    expected = {"mean": each.mean(0)}
    if usage.groups is None:
        expected["second_moment"] = each.square().mean(0)
        expected["variance"] = each.var(0, correction=0)
    else:
        expected |= grouped(usage.groups, parts)
    size, most = size_of([each], 0.0), scale * (len(each) if usage.reduction == "mean" else 1)
    for what, value in expected.items():
        power, gap = 1 if what == "mean" else 2, gap_of(getattr(m, what), value)
        if gap > TOLERANCE * size**power + 1e-12 * most**power:
            told = f"{name}: {what} is off by {gap:.3g} of {size_of([value], 0.0):.3g}"
            return Verdict("wrong", told)
    return Verdict("exact")


def grouped(k: int, parts: list[Tensor]) -> dict[str, Tensor]:
    """Return the variance as the means of k groups of each micro-batch estimate it, if they can."""
    groups = [g for part in parts for g in part.tensor_split(k)]
    m, n = sum(len(g) for g in groups), len(groups)
    if n < 2:
        return {}
    mean = torch.cat(parts).mean(0)
    spread = torch.stack([len(g) * (g.mean(0) - mean).square() for g in groups]).sum(0)
    return {"variance": spread * (m - 1) / (n - 1) / m}


# ---- shrinking -----------------------------------------------------------------------------------


def simpler(graph: Graph) -> Iterator[Graph]:
    """Graphs that have less than this one."""
    usage = graph.usage
    if len(usage.batches) > 1:
        last = usage._replace(batches=usage.batches[-1:], dead=(), alike=(), between="")
        yield replace(graph, usage=last)
        yield replace(graph, usage=usage._replace(batches=usage.batches[:1]))
    if len(usage.batches) > 2:
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
            outputs = (Output(step.writes, 0),)
            yield live(replace(graph, outputs=outputs, steps=graph.steps[: k + 1]))
    if graph.form == "dict":
        yield replace(graph, form="tuple")


def without(graph: Graph, k: int, source: str) -> Graph:
    """The graph without its k-th step: `source` takes the place of what it wrote."""
    name = graph.steps[k].writes
    rest = [
        s._replace(
            code=re.sub(rf"\b{name}\b", source, s.code),
            reads=tuple(source if r == name else r for r in s.reads),
        )
        for s in graph.steps[k + 1 :]
    ]
    outputs = tuple(o._replace(name=source) if o.name == name else o for o in graph.outputs)
    return replace(graph, steps=(*graph.steps[:k], *rest), outputs=outputs)


def shrink(graph: Graph, failure: Verdict, engine: Engine = ENGINE, tries: int = 150) -> Graph:
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
    text = re.sub(r"'[\w.]+'( \(\w+\))?", "'·'", told.split("\n")[0])
    text = re.sub(r"-?\d[\d.]*(e[+-]?\d+)?", "#", text)
    return re.sub(r"\((#,? ?)+\)", "(#)", text)[:150]


# ---- the command ---------------------------------------------------------------------------------


class Tally:
    """Counts of what came of many graphs."""

    def __init__(self) -> None:
        self.kinds: collections.Counter[str] = collections.Counter()
        self.refusals: collections.Counter[str] = collections.Counter()
        self.unclear: collections.Counter[str] = collections.Counter()
        self.failures: dict[str, list[int]] = {}  # seeds by what failures have in common

    def add(self, verdict: Verdict) -> None:
        kind = verdict.kind
        if kind == "refused" and verdict.meet:
            kind = "refused, samples meet"
        self.kinds[kind] += 1
        if kind == "refused":
            self.refusals[f"{kind_of(verdict.told)} [{verdict.where}]"] += 1
        if kind == "unclear":
            self.unclear[kind_of(verdict.told)] += 1

    def report(self, seconds: float) -> str:
        again, refused = self.kinds["unclear"], self.kinds["refused"]
        judged, apart = self.kinds.total() - again, self.kinds["exact"] + refused
        rate, share = judged / max(seconds, 1e-9), 100 * refused / max(apart, 1)
        lines = [f"{judged} graphs in {seconds:.0f} s ({rate:.0f} a second); {again} drawn again"]
        lines += _rows({k: n for k, n in self.kinds.items() if k != "unclear"}, 9)
        lines += [f"refused though samples are apart: {refused} of {apart} ({share:.1f} %)"]
        lines += [*_rows(self.refusals, 40), "drawn again:", *_rows(self.unclear, 12)]
        for told, seeds in sorted(self.failures.items(), key=lambda item: -len(item[1])):
            few = ", ".join(map(str, seeds[:6]))
            lines += [f"FAILED {len(seeds)} times: {told}", f"        seeds {few}"]
        return "\n".join(lines)


def _rows(counts: dict[str, int], most: int) -> list[str]:
    return [f"  {n:6}  {what}" for what, n in collections.Counter(counts).most_common(most)]


def signature(graph: Graph, verdict: Verdict) -> str:
    """What a failure is about: its message, and the step that samples meet in, or parameters."""
    told = re.sub(r"^step \d+: ", "", verdict.told)
    if verdict.kind == "crash":
        return cause(verdict)
    if verdict.kind == "wrong" and "count" in told:
        clearing, between = graph.usage.clearing, graph.usage.between or "nothing"
        return f"wrong count; gradients cleared by '{clearing}', '{between}' between steps"
    steps = [s for s in graph.steps if s.kind in ("mixing", "joint loss")]
    if not steps:
        kinds = dict.fromkeys(s.kind for s in graph.steps)
        return f"{verdict.kind}: " + " + ".join(kinds if len(kinds) < 5 else list(kinds)[-4:])
    code = "; ".join(steps[-1].code.split("\n"))
    code = re.sub(r"\.movedim\(\d, 0\)|\.unsqueeze\(1\)|^v\d+ = ", "", code)
    return f"{verdict.kind}: " + re.sub(r"\b[a-z]*v[0-9]+|\b[xz]\b", "v", code)


def draw_or_none(seed: int) -> Graph | None:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return draw(seed)
    except MisfitError:
        return None
    finally:
        torch.set_default_dtype(default)


def tell(graph: Graph, verdict: Verdict, smaller: Graph) -> str:
    """Return the report of one failure."""
    where = f" [{verdict.where}]" if verdict.where else ""
    told = f"FAILURE, seed {graph.seed}: {verdict.kind}: {verdict.told[:400]}{where}"
    return f"\n{told}\nrepeat: python -m tests.properties.graphs --show {graph.seed}\n{smaller}"


def main(arguments: list[str] | None = None, engine: Engine = ENGINE) -> int:
    parser = argparse.ArgumentParser(
        "python -m tests.properties.graphs", description=__doc__.split("\n")[0]
    )
    option = parser.add_argument
    option("--seconds", type=float, default=120, help="how long (default: 120)")
    option("--count", type=int, default=sys.maxsize, help="at most so many graphs")
    option("--seed", type=int, help="the first seed (default: a fresh one)")
    option("--show", type=int, metavar="SEED", help="print and judge one graph")
    option("--shrink", type=int, default=10, metavar="N", help="shrink N failures (default: 10)")
    option("--note", type=Path, help="a file that holds the seed that is judged")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.show is not None:
        return show(options.show, engine)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 40)
    print(f"seeds from {seed}", flush=True)
    tally, begin, judged, failed = Tally(), time.monotonic(), 0, 0
    while time.monotonic() - begin < options.seconds and judged < options.count:
        graph = draw_or_none(seed)
        seed += 1
        if graph is None:
            continue
        if options.note:
            options.note.write_text(str(graph.seed))
        verdict = judge(graph, engine)
        tally.add(verdict)
        judged += verdict.kind != "unclear"
        if verdict.failed:
            failed += 1
            smaller = shrink(graph, verdict, engine) if failed <= options.shrink else graph
            tally.failures.setdefault(signature(smaller, verdict), []).append(graph.seed)
            print(tell(graph, verdict, smaller), flush=True)
    print("\n" + tally.report(time.monotonic() - begin))
    return 1 if failed else 0


def show(seed: int, engine: Engine) -> int:
    graph = draw_or_none(seed)
    if graph is None:
        print(f"seed {seed} comes to nothing: no graph is drawn from it")
        return 0
    verdict = judge(graph, engine)
    print(f"{graph}\n\n{verdict.kind}{', samples meet' if verdict.meet else ''}: {verdict.told}")
    if not verdict.failed:
        return 0
    smaller = shrink(graph, verdict, engine)
    print(f"\nshrunk, {judge(smaller, engine).told}:\n{smaller}")
    return 1


def supervise(arguments: list[str], module: str = "tests.properties.graphs") -> int:
    """Run `main` in a process of its own, so that a crash of the interpreter is told, too."""
    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder) / "seed"
        command = [sys.executable, "-X", "faulthandler", "-c"]
        code = f"import sys; from {module} import main; sys.exit(main())"
        ended = subprocess.run([*command, code, *arguments, "--note", str(note)]).returncode
        if ended < 0:
            seed = note.read_text() if note.exists() else "none"
            print(
                f"CRASH: signal {-ended} at seed {seed}; --show {seed} judges it alone, and "
                "--seed with the first seed, which is above, repeats what led there"
            )
    return abs(ended)


if __name__ == "__main__":
    sys.exit(supervise(sys.argv[1:]))
