"""Rules for RNN, GRU and LSTM on packed sequences.

As in `recurrent.py`, the backward pass runs the recurrence once more, step by step, with a zero
added to each gate's input. A step has only the samples whose sequences have not ended: in the
forward direction their number falls, in the backward direction it rises. The activations and
gradients of all steps are joined as rows in the order of the packed data, so that each row belongs
to the same sample as in the data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from varreg.engine.contribution import Dense, Outer
from varreg.engine.rules.recurrent import CELLS, Cell, State, in_one_precision, run_stack
from varreg.engine.rules.rule import Contributions, Rule, Use, has_rows, make_rule

Names = tuple[str, str | None]  # of a weight and its bias


class _Taps:
    """Zeros that were added to the results of matrix products, and the inputs of these products, by
    step.
    """

    def __init__(self) -> None:
        self.steps: dict[Names, dict[int, tuple[Tensor, Tensor]]] = {}

    def linear(self, x: Tensor, w: Tensor, b: Tensor | None, names: Names, step: int = 0) -> Tensor:
        y = F.linear(x, w, b)
        zero = torch.zeros_like(y, requires_grad=True)
        self.steps.setdefault(names, {})[step] = zero, x.detach()
        return y + zero

    def contributions(
        self, use: Use, outputs: list[Tensor], grads: list[Tensor | None]
    ) -> Contributions:
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None]
        zeros = [zero for steps in self.steps.values() for zero, _ in steps.values()]
        ends, given = [o for o, _ in pairs], [g for _, g in pairs]
        gradients = iter(
            torch.autograd.grad(ends, zeros, given, allow_unused=True, materialize_grads=True)
        )
        out: Contributions = {}
        for names, steps in self.steps.items():
            deltas = {t: next(gradients) for t in steps}
            delta = use.rows(torch.cat([deltas[t] for t in sorted(steps)]))
            weight, bias = names
            if weight in use.wants:
                x = use.rows(torch.cat([steps[t][1] for t in sorted(steps)]))
                out[weight] = Outer(use.partition, delta, x)
            if bias is not None and bias in use.wants:
                out[bias] = Dense(use.partition, delta.sum(1))
        return out


def _direction(
    cell: Cell,
    taps: _Taps,
    x: Tensor,
    sizes: list[int],
    start: State,
    weights: list[Tensor],
    names: list[str],
    has_biases: bool,
    reverse: bool,
) -> tuple[Tensor, State]:
    """Return the outputs of one layer in one direction, as packed data, and its last states."""
    w_ih, w_hh, *rest = weights
    b_ih, b_hh = rest[:2] if has_biases else (None, None)
    biases = names[2:4] if has_biases else (None, None)
    projection = rest[-1] if len(rest) > (2 if has_biases else 0) else None
    gates = taps.linear(x, w_ih, b_ih, (names[0], biases[0])).split(sizes)
    steps: dict[int, Tensor] = {}
    ended: list[State] = []  # the states of samples whose sequences have ended, the shortest first
    state = tuple(h[: sizes[-1] if reverse else sizes[0]] for h in start)
    for t in reversed(range(len(sizes))) if reverse else range(len(sizes)):
        n, m = sizes[t], len(state[0])
        if n < m:
            ended.append(tuple(s[n:] for s in state))
            state = tuple(s[:n] for s in state)
        elif n > m:  # in reverse, more sequences begin here: this is their last step
            state = tuple(torch.cat([s, h[m:n]]) for s, h in zip(state, start, strict=True))
        state = cell(gates[t], taps.linear(state[0], w_hh, b_hh, (names[1], biases[1]), t), state)
        if projection is not None:
            state = (taps.linear(state[0], projection, None, (names[-1], None), t), *state[1:])
        steps[t] = state[0]
    parts = [state, *reversed(ended)]
    final = tuple(torch.cat([part[i] for part in parts]) for i in range(len(state)))
    return torch.cat([steps[t] for t in range(len(sizes))]), final


def _layers(
    cell: Cell,
    use: Use,
    grads: list[Tensor | None],
    data: Tensor,
    sizes: list[int],
    hx: list[Tensor],
    params: list[Tensor],
    has_biases: bool,
    layers: int,
    bidirectional: bool,
) -> Contributions:
    taps, finals = _Taps(), list[State]()
    per = len(params) // (layers * (2 if bidirectional else 1))
    x, *tensors = in_one_precision([data, *hx, *params])
    hx, params = [h.detach() for h in tensors[: len(hx)]], tensors[len(hx) :]
    with torch.enable_grad():
        x = x.detach()
        for _ in range(layers):
            ends = []
            for reverse in (False, True) if bidirectional else (False,):
                k = len(finals)
                ours = slice(k * per, (k + 1) * per)
                names = [f"params.{j}" for j in range(k * per, (k + 1) * per)]
                start = tuple(h[k] for h in hx)
                out, final = _direction(
                    cell, taps, x, sizes, start, params[ours], names, has_biases, reverse
                )
                ends.append(out)
                finals.append(final)
            x = torch.cat(ends, -1)
        outputs = [x, *(torch.stack(parts) for parts in zip(*finals, strict=True))]
        return taps.contributions(use, outputs, grads)


def _rule(cell: Cell, name: str) -> Rule:
    def run(
        use: Use, grads: list[Tensor | None], data: Tensor, batch_sizes: Tensor, hx: Any,
        params: Any, has_biases: bool, num_layers: int, dropout: float, train: bool,
        bidirectional: bool,
    ) -> Contributions:  # fmt: skip
        states = list(hx) if isinstance(hx, list | tuple) else [hx]
        sizes = batch_sizes.tolist()
        return _layers(
            cell,
            use,
            grads,
            data,
            sizes,
            states,
            list(params),
            has_biases,
            num_layers,
            bidirectional,
        )

    run.__name__ = name
    saves = "data batch_sizes hx params"
    return make_rule(
        run, serves="params", saves=saves, carries="data hx", when=has_rows, takes_over=False
    )


PACKED = {function: _rule(cell, function.__name__) for function, cell in CELLS.items()}
"""The rules for packed sequences. torch uses the same functions for packed and for padded
sequences.
"""


def packed_layer_by_layer(function: Any) -> Callable[..., Any]:
    """Return a function that computes stacked recurrent layers on packed sequences by one call of
    `function` per layer.
    """

    def run(
        data: Tensor, batch_sizes: Tensor, hx: Any, params: Any, has_biases: bool, num_layers: int,
        dropout: float, train: bool, bidirectional: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        def run_layer(x: Tensor, state: Any, weights: Any) -> Any:
            return function(
                x, batch_sizes, state, weights, has_biases, 1, 0.0, train, bidirectional
            )

        return run_stack(run_layer, data, hx, params, num_layers, dropout, train, bidirectional)

    return run


STACKED_PACKED = {function: packed_layer_by_layer(function) for function in CELLS}
