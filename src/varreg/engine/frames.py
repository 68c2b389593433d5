"""Read the interpreter's stack: has a call ended, and which backward hooks has a module's call?"""

from __future__ import annotations

import sys
from types import CodeType
from typing import Any

from varreg._torch import APPLY_MODULE_HOOKS, MODULE_CALL, BackwardHook


def is_on_stack(frame: Any) -> bool:
    """Return whether a call is still running."""
    here: Any = sys._getframe(1)
    while here is not None:
        if here is frame:
            return True
        here = here.f_back
    return False


def is_called_by(code: CodeType) -> bool:
    """Return whether a call of this code is running, inside of the innermost module's call."""
    here: Any = sys._getframe(1)
    while here is not None and here.f_code is not MODULE_CALL:
        if here.f_code is code:
            return True
        here = here.f_back
    return False


def hooks_of_call() -> BackwardHook | None:
    """Return the backward hooks of the module whose forward hook is running, if it has any."""
    here: Any = sys._getframe(1)
    while here is not None and here.f_code is not MODULE_CALL:
        if isinstance(found := here.f_locals.get("bw_hook"), BackwardHook):
            return found
        here = here.f_back
    return None


def hooks_being_applied() -> tuple[BackwardHook | None, dict[str, Any]]:
    """Return the backward hooks of a module that torch is adding to the graph, and the local
    variables of the torch call that adds them, with the name of its caller as `side`; None and an
    empty dict if torch is adding no hooks.
    """
    here: Any = sys._getframe(1)
    while here is not None and here.f_code is not MODULE_CALL:
        if here.f_code is APPLY_MODULE_HOOKS:
            return here.f_locals["self"], {**here.f_locals, "side": here.f_back.f_code.co_name}
        here = here.f_back
    return None, {}
