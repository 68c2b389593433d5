"""The equation of an `einsum`, written out: one letter for each dimension of each operand."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor


class Equation(NamedTuple):
    """Letters of each operand and of the result, without ellipsis or implicit output."""

    inputs: tuple[str, ...]
    output: str


def operands_of(args: Sequence[Any]) -> list[Tensor]:
    """Return the operands of a call of `einsum`, in any of its spellings."""
    if not isinstance(args[0], str):
        return [a for a in args if isinstance(a, Tensor)]
    return list(args[1]) if isinstance(args[1], (list, tuple)) else list(args[1:])


def equation_of(args: Sequence[Any]) -> Equation:
    """Return the equation of a call, for the operands that it has."""
    shapes = [t.dim() for t in operands_of(args)]
    if isinstance(args[0], str):
        return written_out(args[0], shapes)
    lists = [a for a in args if not isinstance(a, Tensor)]
    terms = ["".join("..." if i is Ellipsis else string.ascii_letters[i] for i in x) for x in lists]
    arrow = f"->{terms[-1]}" if len(terms) > len(shapes) else ""
    return written_out(",".join(terms[: len(shapes)]) + arrow, shapes)


def written_out(equation: str, dims: Sequence[int]) -> Equation:
    """Return the equation for operands with the given numbers of dimensions."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    free = [c for c in string.ascii_letters if c not in equation]
    widths = [d - len(t.replace("...", "")) for t, d in zip(terms, dims, strict=True)]
    rest = "".join(free[: max([0, *(w for t, w in zip(terms, widths, strict=True) if "..." in t)])])

    def spelled(term: str, width: int) -> str:
        return term.replace("...", rest[len(rest) - width :] if width else "")

    inputs = tuple(spelled(t, w) for t, w in zip(terms, widths, strict=True))
    if arrow:
        return Equation(inputs, spelled(right, len(rest)))
    joined = left.replace(",", "").replace("...", "")
    return Equation(inputs, rest + "".join(sorted(c for c in set(joined) if joined.count(c) == 1)))
