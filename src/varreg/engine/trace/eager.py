"""Keep torch.compile from compiling our own functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch.compiler import is_dynamo_compiling

from varreg._torch import (
    RUN_AS_IT_IS,
    disable_dynamo,
    is_exporting,
    set_code_exec_strategy,
)
from varreg.errors import VarregError

EXPORTED = (
    "varreg: torch.export runs an observed model, and would record the engine in place of the "
    "model. Call remove() on the observer first, or use copy.deepcopy(model), which "
    "is not observed."
)
P = ParamSpec("P")
T = TypeVar("T")


def uncompiled(
    function: Callable[P, T], in_graph: Callable[..., bool] = lambda *args, **kwargs: False
) -> Callable[P, T | None]:
    """Return a version of our function to call while torch.compile is on: neither the function nor
    anything that it calls is compiled.

    While torch.compile captures a graph, `in_graph` is called first. If it does the work in the
    graph, it returns True, and the function is not called.

    The function itself must check whether torch.compile is on, and must be decorated with
    `runs_as_it_is`. torch has a public decorator for this, but it imports the compiler, which takes
    a second, and each of its calls takes longer than many of our hooks.
    """
    run = disable_dynamo(function)

    def call(*args: P.args, **kwargs: P.kwargs) -> T | None:
        if is_exporting():
            raise VarregError(EXPORTED)
        if is_dynamo_compiling() and in_graph(*args, **kwargs):
            return None
        return run(*args, **kwargs)

    return runs_as_it_is(call)


def runs_as_it_is(function: Callable[P, T]) -> Callable[P, T]:
    """Mark a function so that the compiler runs it uncompiled; functions that it calls may be
    compiled.
    """
    set_code_exec_strategy(function.__code__, RUN_AS_IT_IS)
    return function
