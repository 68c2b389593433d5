"""Code of ours that torch.compile is to leave alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, get_eval_frame_callback, set_code_exec_strategy
from torch._compile import _disable_dynamo
from torch.compiler import is_dynamo_compiling

P = ParamSpec("P")
T = TypeVar("T")

_AS_IT_IS = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT)  # but what it calls may be compiled


def eager(function: Callable[P, T]) -> Callable[P, T]:
    """The function, never compiled, nor anything that it calls.

    Where nothing is being compiled, as everywhere outside of a compiled function, it is called as it is: torch's own way to say this
    imports the compiler, which takes a second, and then costs more at each call than many a hook does.
    """
    apart = _disable_dynamo(function)

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if is_dynamo_compiling() or get_eval_frame_callback() is not None:
            return apart(*args, **kwargs)
        return function(*args, **kwargs)

    set_code_exec_strategy(call.__code__, _AS_IT_IS)
    return functools.wraps(function)(call)
