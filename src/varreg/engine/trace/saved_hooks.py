"""Try a user's hooks on the tensors that autograd saves for the backward (`saved_tensors_hooks`):
the tensor that they return for one sample must not depend on other samples.
"""

from __future__ import annotations

from typing import Any

from varreg import _torch
from varreg.engine.trace.call import Call
from varreg.engine.trace.trace import Trace
from varreg.engine.trace.trial import Verdict, keeps_apart, undisturbed
from varreg.errors import VarregError


def try_saved_hooks(trace: Trace, call: Call) -> None:
    """Try the innermost hooks on saved tensors, if they are the user's, with a tensor that carries
    the batch. Raise if they mix samples. Hooks of torch, such as those of a checkpoint, change no
    values.
    """
    hooks = None if _torch.saved_tensors_hooks is None else _torch.saved_tensors_hooks(True)
    if hooks is None or trace.batch <= 1 or trace.lets_samples_meet:
        return
    pack, unpack = hooks[0], hooks[1]
    found = next(((t, at) for t, at in call.carriers if t.is_floating_point()), None)
    if found is None or (_is_of_torch(pack) and _is_of_torch(unpack)):
        return
    path = trace.observer.forward.path()
    if not trace.verdicts.is_due(("saved hooks", path)):
        return
    (t, at) = found
    with undisturbed():
        verdict = keeps_apart(lambda given: [unpack(pack(given[0]))], [t.detach()], [at], [at])
    if verdict is not Verdict.APART:
        trace.verdicts.forget(("saved hooks", path))
        raise VarregError(
            f"varreg: in {path}, saved_tensors_hooks change what autograd saves, and mix samples: "
            "a sample has no gradient of its own. Pack and unpack each sample by itself."
        )


def _is_of_torch(hook: Any) -> bool:
    return (getattr(hook, "__module__", None) or "").partition(".")[0] == "torch"
