"""Code of ours that torch.compile is to leave alone."""

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
    "varreg: torch.export runs the model itself, which is observed: it would record the engine in "
    "place of the model. Call remove() on the observer first, or use copy.deepcopy(model), which "
    "is not observed."
)
P = ParamSpec("P")
T = TypeVar("T")


def uncompiled(
    function: Callable[P, T], in_graph: Callable[..., bool] = lambda *args, **kwargs: False
) -> Callable[P, T | None]:
    """Return what to call in place of a function of ours while torch.compile is on: the function,
    never compiled, nor anything that it calls.

    While torch.compile captures a graph, `in_graph` is asked first. It may do in the graph what is
    needed there: then it returns True, and the function is not called.

    The function asks itself whether torch.compile is on, and is `runs_as_it_is` there. torch's own
    way to say this imports the compiler, which takes a second, and costs more at each call than
    many a hook does.
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
    """Tell the compiler to run a function as it is written; what it calls may be compiled."""
    set_code_exec_strategy(function.__code__, RUN_AS_IT_IS)
    return function
