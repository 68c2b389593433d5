"""Rules for RNN, GRU and LSTM, as layers and as cells.

The native kernels do not give the gradients of the gates. The backward pass runs the recurrence
once more, step by step, with a zero tensor added to each gate's input: the gradient of that zero is
δ, and a weight's contributions are Σ_t δ_t ⊗ a_t. The rules only measure: outputs and gradients are
still computed by torch's native kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from varreg.engine.contribution import Dense, Outer
from varreg.engine.rules.rule import Contributions, Use, batch_first, has_rows, rule
from varreg.engine.trace.layout import Single, samples

State = tuple[Tensor, ...]
Cell = Callable[
    [Tensor, Tensor, State], State
]  # gates from the input, gates from the state, state → new state


def _lstm(gi: Tensor, gh: Tensor, state: State) -> State:
    i, f, g, o = (gi + gh).chunk(4, -1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru(gi: Tensor, gh: Tensor, state: State) -> State:
    (ri, zi, ni), (rh, zh, nh) = gi.chunk(3, -1), gh.chunk(3, -1)
    z = (zi + zh).sigmoid()
    n = (ni + (ri + rh).sigmoid() * nh).tanh()
    return (n + z * (state[0] - n),)


def _tanh(gi: Tensor, gh: Tensor, state: State) -> State:
    return ((gi + gh).tanh(),)


def _relu(gi: Tensor, gh: Tensor, state: State) -> State:
    return ((gi + gh).relu(),)


class _Taps:
    """Zeros that were added to the results of matrix products, and the inputs of these products."""

    def __init__(self) -> None:
        self.zeros: list[Tensor] = []
        self.inputs: list[Tensor] = []
        self.names: list[tuple[str, str | None]] = []

    def linear(
        self, x: Tensor, w: Tensor, b: Tensor | None, names: tuple[str, str | None]
    ) -> Tensor:
        y = F.linear(x, w, b)
        zero = torch.zeros_like(y, requires_grad=True)
        self.zeros.append(zero)
        self.inputs.append(x.detach())
        self.names.append(names)
        return y + zero

    @staticmethod
    def _rows(use: Use, t: Tensor) -> Tensor:
        """Return a tensor of one step, `[b, o]`, or of all steps, `[t, b, o]`, as `[batch, rows,
        o]`. The layout of the output says how b contains the batch.
        """
        t = t.transpose(0, 1) if t.dim() == 3 else t.unsqueeze(1)
        at = use.output_place
        if at.batch == 1:
            return t.reshape(1, -1, t.shape[-1])
        assert not isinstance(at, Single)
        return t if at.plain else samples(t, at._replace(dim=0)).reshape(at.batch, -1, t.shape[-1])

    def contributions(
        self, use: Use, outputs: list[Tensor], grads: list[Tensor | None]
    ) -> Contributions:
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None]
        deltas = torch.autograd.grad(
            [o for o, _ in pairs], self.zeros, [g for _, g in pairs], allow_unused=True
        )
        pairs_of: dict[str, tuple[list[Tensor], list[Tensor]]] = {}
        for zero, delta, x, names in zip(self.zeros, deltas, self.inputs, self.names, strict=True):
            d = torch.zeros_like(zero) if delta is None else delta
            for name in names:
                if name in use.wants:
                    left, right = pairs_of.setdefault(str(name), ([], []))
                    left.append(self._rows(use, d))
                    right.append(self._rows(use, x))
        out: Contributions = {}
        for name, (left, right) in pairs_of.items():
            delta = torch.cat(left, 1)
            if len(use.shapes[name]) == 1:
                out[name] = Dense(use.partition, delta.sum(1))
            else:
                out[name] = Outer(use.partition, delta, torch.cat(right, 1))
        return out


def in_one_precision(tensors: list[Any]) -> list[Any]:
    """Return tensors in one precision, the finest of them: under autocast, a layer's input is in
    half precision, and its weights are not.
    """
    dtype = functools.reduce(torch.promote_types, (t.dtype for t in tensors if t is not None))
    return [None if t is None else t.to(dtype) for t in tensors]


def _layers(
    cell: Cell, use: Use, grads: list[Tensor | None], x: Tensor, hx: list[Tensor],
    params: list[Tensor], has_biases: bool, layers: int, bidirectional: bool, batch_first: bool,
) -> Contributions:  # fmt: skip
    taps = _Taps()
    per = len(params) // (layers * (2 if bidirectional else 1))
    projected = per - (4 if has_biases else 2)
    x, *tensors = in_one_precision([x, *hx, *params])
    hx, params = tensors[: len(hx)], tensors[len(hx) :]
    with torch.enable_grad():
        x = (x.transpose(0, 1) if batch_first else x).detach()
        finals: list[State] = []
        for _ in range(layers):
            ends = []
            for reverse in (False, True) if bidirectional else (False,):
                k = len(finals)
                w_ih, w_hh, *rest = params[k * per : (k + 1) * per]
                b_ih, b_hh = rest[:2] if has_biases else (None, None)
                names = [f"params.{k * per + j}" for j in range(per)]
                state = tuple(h[k].detach() for h in hx)
                gi = taps.linear(x, w_ih, b_ih, (names[0], names[2] if has_biases else None))
                steps = []
                for t in reversed(range(len(x))) if reverse else range(len(x)):
                    gh = taps.linear(
                        state[0], w_hh, b_hh, (names[1], names[3] if has_biases else None)
                    )
                    state = cell(gi[t], gh, state)
                    if projected:
                        state = (
                            taps.linear(state[0], rest[-1], None, (names[-1], None)),
                            *state[1:],
                        )
                    steps.append(state[0])
                finals.append(state)
                ends.append(torch.stack(steps[::-1] if reverse else steps))
            x = torch.cat(ends, -1)
        output = x.transpose(0, 1) if batch_first else x
        outputs = [output, *(torch.stack(parts) for parts in zip(*finals, strict=True))]
        return taps.contributions(use, outputs, grads)


def _cell_batch(use: Use) -> bool:
    if not has_rows(use):
        return False
    return use.output_place.batch == 1 or (
        batch_first(use) and len({*use.input_places.values()}) == 1
    )


def _register(layer: Any, step: Any, cell: Cell, name: str) -> None:
    def run(
        use: Use, grads: list[Tensor | None], input: Tensor, hx: Any, params: Any, has_biases: bool,
        num_layers: int, dropout: float, train: bool, bidirectional: bool, batch_first: bool,
    ) -> Contributions:  # fmt: skip
        states = list(hx) if isinstance(hx, list | tuple) else [hx]
        return _layers(
            cell,
            use,
            grads,
            input,
            states,
            list(params),
            has_biases,
            num_layers,
            bidirectional,
            batch_first,
        )

    def run_cell(
        use: Use,
        grads: list[Tensor | None],
        input: Tensor,
        hx: Any,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Any = None,
        b_hh: Any = None,
    ) -> Contributions:
        taps = _Taps()
        states = list(hx) if isinstance(hx, list | tuple) else [hx]
        tensors = [input, w_ih, w_hh, b_ih, b_hh, *states]
        x, w_ih, w_hh, b_ih, b_hh, *states = in_one_precision(tensors)
        with torch.enable_grad():
            state = tuple(h.detach() for h in states)
            gi = taps.linear(x.detach(), w_ih, b_ih, ("w_ih", "b_ih"))
            gh = taps.linear(state[0], w_hh, b_hh, ("w_hh", "b_hh"))
            return taps.contributions(use, list(cell(gi, gh, state)), grads)

    run.__name__, run_cell.__name__ = name, f"{name}_cell"
    carries = "input hx"
    rule(
        layer,
        serves="params",
        saves="input hx params",
        carries=carries,
        when=has_rows,
        takes_over=False,
    )(run)
    weights = "w_ih w_hh b_ih b_hh"
    saves = f"input hx {weights}"
    rule(step, serves=weights, saves=saves, carries=carries, when=_cell_batch, takes_over=False)(
        run_cell
    )


CELLS: dict[Any, Cell] = {
    torch.lstm: _lstm, torch.gru: _gru, torch.rnn_tanh: _tanh, torch.rnn_relu: _relu,
}  # fmt: skip
_register(torch.lstm, torch.lstm_cell, _lstm, "lstm")
_register(torch.gru, torch.gru_cell, _gru, "gru")
_register(torch.rnn_tanh, torch.rnn_tanh_cell, _tanh, "rnn_tanh")
_register(torch.rnn_relu, torch.rnn_relu_cell, _relu, "rnn_relu")


def run_stack(
    run_layer: Callable[[Tensor, Any, Any], Any],
    x: Tensor,
    hx: Any,
    params: Any,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[Tensor, ...]:
    """Run stacked recurrent layers with one native call for each layer, so that the dropout between
    them is a separate operation. Return their results. The arguments of `run_layer` are a layer's
    input, its states and its weights.
    """
    directions, per = 2 if bidirectional else 1, len(params) // num_layers
    finals = []
    for layer in range(num_layers):
        k = slice(layer * directions, (layer + 1) * directions)
        state = tuple(h[k] for h in hx) if isinstance(hx, list | tuple) else hx[k]
        x, *final = run_layer(x, state, params[layer * per : (layer + 1) * per])
        finals.append(final)
        if layer < num_layers - 1:
            x = F.dropout(x, dropout, train)
    return x, *(torch.cat(parts) for parts in zip(*finals, strict=True))


def layer_by_layer(function: Any) -> Callable[..., Any]:
    """Return a function that computes stacked recurrent layers by one call of `function` per
    layer.
    """

    def run(
        input: Tensor, hx: Any, params: Any, has_biases: bool, num_layers: int, dropout: float,
        train: bool, bidirectional: bool, batch_first: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        def run_layer(x: Tensor, state: Any, weights: Any) -> Any:
            return function(x, state, weights, has_biases, 1, 0.0, train, bidirectional, False)

        x = input.transpose(0, 1) if batch_first else input
        x, *states = run_stack(run_layer, x, hx, params, num_layers, dropout, train, bidirectional)
        return x.transpose(0, 1) if batch_first else x, *states

    return run


STACKED = {
    function: layer_by_layer(function)
    for function in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
}
