"""Everything that is private to torch and used here, each with its reason.

torch promises nothing about these names. torch 2.8, the oldest version that varreg supports, and
torch 2.13 have all of them with this meaning; comments name the ones that need a newer torch.
varreg looks them up when it is imported. No other module names a private function of torch. Private
attributes of torch's objects are read where they are needed; `ATTRIBUTES` lists them.
`tests/test_house.py` checks both rules. Names whose import takes long are looked up when they are
needed: those of the compiler, of DDP and of FSDP. `tests/test_versions.py` checks these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

# ---- torch functions and modes -------------------------------------------------------------------
# The stack of `TorchFunctionMode`s. If a forward was interrupted, its tracer stays on the stack and
# must be removed. A rehearsal inside of a forward must not be traced as a part of that forward. The
# public way to remove a mode, leaving its `with` block, is not possible after the interruption.
from torch._C import _len_torch_function_stack as len_mode_stack
from torch.overrides import _get_current_function_mode_stack as mode_stack
from torch.overrides import _pop_mode as pop_mode
from torch.overrides import _push_mode as push_mode

# Runs tensor functions past all modes and subclasses. No public alternative:
# `torch._C.DisableTorchFunctionSubclass` leaves modes on.
DisableTorchFunction = torch._C.DisableTorchFunction

# Where `torch.nn.functional` keeps functions that are written in C++. A mode receives these objects
# as the called function, so varreg must recognize them; some of them have no public name.
functions_of_nn = torch._C._nn
pad_sequence = torch._C._nn.pad_sequence
einsum: Any = torch._VF.einsum  # type: ignore[attr-defined]
pack_padded_sequence: Any = torch._VF._pack_padded_sequence
pad_packed_sequence: Any = torch._VF._pad_packed_sequence
fused_dropout: Any = torch._fused_dropout

# Copies many tensors in one call. `torch.optim` does the same; nothing public does.
foreach_copy = torch._foreach_copy_
foreach_add_into = torch._foreach_add_
foreach_addcmul_into = torch._foreach_addcmul_
foreach_sub = torch._foreach_sub
foreach_mul = torch._foreach_mul
foreach_div_into = torch._foreach_div_
foreach_mul_into = torch._foreach_mul_
foreach_lerp_into = torch._foreach_lerp_
foreach_sign_into = torch._foreach_sign_
foreach_clamp_min_into = torch._foreach_clamp_min_
foreach_clamp_max_into = torch._foreach_clamp_max_
foreach_norm = torch._foreach_norm
# Cuts one tensor into many, as DDP does: a view for each would take a call of Python.
unflatten: Callable[[Tensor, list[Tensor]], Sequence[Tensor]] = torch._C._nn.unflatten_dense_tensors
# Whether a tensor has memory of its own. A tensor that a transform (vmap) wrapped has none, and the
# public `untyped_storage` raises there.
has_storage: Callable[[Tensor], bool] = torch._C._has_storage

# The number of active modes of the dispatcher. If it is 0, `is_faking` need not be called.
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
# The modes themselves: a mode of the user may change the results of torch functions.
from torch.utils._python_dispatch import (  # noqa: E402
    _get_current_dispatch_mode_stack as dispatch_mode_stack,
)

_dispatch_mode = torch._C._get_dispatch_mode
_FAKE = torch._C._TorchDispatchModeKey.FAKE


def is_faking() -> bool:
    """Return whether new tensors are fake ones (`FakeTensorMode`), which have no memory: a kernel
    would write to nowhere.
    """
    return _dispatch_mode(_FAKE) is not None


# Operators as the dispatcher has them: their schema says which arguments are written to.
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket  # noqa: E402

# Trees of lists, tuples, dicts and registered classes. `torch.utils._pytree` has no public name;
# optree and jax have the same functions, and would be new dependencies.
from torch.utils._pytree import tree_leaves, tree_map  # noqa: E402

# ---- autograd ------------------------------------------------------------------------------------

# Whether the running backward will execute this node, that is, accumulate the gradient of the
# parameter behind it. `torch.autograd.grad` does not, and then nothing may be counted.
will_engine_execute = torch._C._will_engine_execute_node
# The number of the running backward, −1 outside of any: a checkpoint runs a forward inside of one.
current_graph_task = torch._C._current_graph_task_id
# The node whose backward runs. Next to it are the nodes that accumulate gradients of parameters:
# to make a view of each parameter for its node takes longer.
current_autograd_node: Callable[[], Any] = torch._C._current_autograd_node
# Call a function when the running backward ends, after the last gradient was accumulated. DDP and
# FSDP do the same. A hook on the last node would run too early.
queue_callback: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)
# Returns the innermost hooks on saved tensors: the cheapest sign that a checkpoint runs. The public
# `torch.autograd.graph.saved_tensors_hooks` sets these hooks; no public function reads them.
saved_tensors_hooks: Callable[[bool], Any] | None = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", None
)
# Restores a tensor's version after its values were restored, so that a graph that saved the tensor
# stays valid. `torch.autograd._unsafe_preserve_version_counter` is the same for a `with` block.
set_versions = torch._C._autograd._unsafe_set_version_counter
# `torch.autograd.Function.apply` checks this first: while a transform (vmap, grad, jvp) is active,
# our nodes cannot be used.
is_transform_active = torch._C._are_functorch_transforms_active
# Whether a transform wrapped a tensor, and the tensor inside, which has the memory.
is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
unwrap = torch._C._functorch.get_unwrapped
# Its `_current_level` is −1 unless forward-mode differentiation runs, for which our nodes have no
# rule.
forward_ad: Any = torch.autograd.forward_ad
# Checks all types of device at once; the public `torch.is_autocast_enabled` checks one type.
is_any_autocast_enabled = torch._C._is_any_autocast_enabled

# ---- what else runs a model ----------------------------------------------------------------------

# Not None while torch.jit.trace runs. The public `torch.jit.is_tracing` needs one more call.
jit_tracing_state = torch._C._get_tracing_state

_scripted_functions: Callable[[], Any] = torch.jit._state._python_cu.get_functions


def has_scripted_functions() -> bool:
    """Return whether the process has functions of TorchScript, whose calls no mode sees."""
    return bool(_scripted_functions())


# The code of a module's call, by which the frames of a forward are recognized.
MODULE_CALL = nn.Module._call_impl.__code__
# The function that runs a checkpoint that is not re-entrant: torch 2.15 split it off from the
# public function. While the checkpointed function runs, this call holds the object that will run it
# again.
PLAIN_CHECKPOINT = (
    "_checkpoint_impl" if hasattr(torch.utils.checkpoint, "_checkpoint_impl") else "checkpoint"
)
# The base class of all batch normalizations, in torch and in other libraries.
BatchNorm = nn.modules.batchnorm._BatchNorm
# The object that torch makes for each call of a module with backward hooks. It holds the user's
# hooks, and only the frames of that call hold it.
from torch.nn.modules.module import (  # noqa: E402
    _global_backward_pre_hooks as global_backward_pre_hooks,
)
from torch.nn.modules.module import _has_any_global_hook as has_global_hooks  # noqa: E402
from torch.utils.hooks import BackwardHook  # noqa: E402

APPLY_MODULE_HOOKS = BackwardHook._apply_on_tensors.__code__

# ---- the compiler --------------------------------------------------------------------------------

# "Never compile this function", without importing the compiler, which takes a second.
# `torch.compiler.disable` imports it.
from torch._C._dynamo.eval_frame import (  # noqa: E402
    _FrameAction,
    _FrameExecStrategy,
    get_eval_frame_callback,
    set_code_exec_strategy,
)
from torch._compile import _disable_dynamo as disable_dynamo  # noqa: E402

# Imported by torch when the first optimizer is made, which takes a second. The process that all
# runs of the lab are forked off imports it beforehand.
COMPILER = "torch._dynamo"

# Runs this frame uncompiled; the functions that it calls may be compiled.
RUN_AS_IT_IS = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT)

T = TypeVar("T")


def runs_while_compiling(function: Callable[..., T]) -> Callable[..., T]:
    """Mark a function so that the compiler calls it while it captures a graph, and treats its
    result as a constant of the graph. `torch.compiler.assume_constant_result` does the same, but
    imports the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@runs_while_compiling
def is_exporting() -> bool:
    """Return whether torch.export runs. In torch 2.8, the compiler evaluates the public function to
    True in every graph that it captures.
    """
    return torch.compiler.is_exporting()


set_code_exec_strategy(is_exporting.__code__, RUN_AS_IT_IS)  # nor is it to be captured alone


def graph_in_capture() -> Any:
    """Return the graph that the compiler captures now; None if the graph will not be called
    unchanged, or if this version of torch has another compiler.
    """
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        output: Any = InstructionTranslator.current_tx().output
        is_part = output.current_tracer.parent is not None  # the body of another operation
        return None if output.export or is_part or not output.call_user_compiler else output
    except (ImportError, AttributeError):
        return None


def replace_compiler(output: Any, compile_graph: Callable[[Any, Any, Any], Any]) -> None:
    """Make torch compile a captured graph by `compile_graph(compiler, module, inputs)`, where
    `compiler` is the user's. The public alternative is a backend of our own, which users would have
    to select.
    """
    compiler = output.call_user_compiler
    output.call_user_compiler = lambda module, inputs: compile_graph(compiler, module, inputs)


def restart_capture(why: str) -> None:
    """Make the compiler capture the same code again, from its beginning."""
    from torch._dynamo.exc import UnspecializeRestartAnalysis

    raise UnspecializeRestartAnalysis(restart_reason=why)


# ---- FSDP2 ---------------------------------------------------------------------------------------

# Whether varreg's reduction can replace FSDP's. That needs `_reduce_scatter_comm` (2.9) and
# `_fsdp_param_groups` (2.12); the public `reduce_scatter_single` came last, with 2.13.
CAN_JOIN_FSDP = hasattr(torch.distributed, "reduce_scatter_single")

# ---- attributes of torch's objects ---------------------------------------------------------------

ATTRIBUTES = {
    "_current_level": "of `forward_ad`: does forward-mode differentiation run?",
    "_base": "of a tensor: the one whose memory it views",
    "_version": "of a tensor: how often it was written to",
    "_is_view": "of a tensor: does another tensor own its memory?",
    "_post_accumulate_grad_hooks": "of a parameter: they may write to its gradient in a backward",
    "_backward_hooks": "of a parameter: its hooks, which may change what was measured",
    "_input_metadata": "of a node: the types of the gradients that it is given",
    "_schema": "of an operator: which arguments it writes to",
    "_parameters": "of a module: its own parameters, to take them out and put them back",
    "_forward_hooks": "of a module: is ours the last of them?",
    "_backward_pre_hooks": "of a module: does it change the gradients of its outputs?",
    "_forward_pre_hooks": "of a module: is it observed?",
    "_compiled_call_impl": "of a module: was `module.compile()` called? Ours lets torch.compile "
    "see the hooks of the model itself",
    "_orig_mod": "of what torch.compile returned: the module itself",
    "_call_impl": "of a module: what it calls if it is not compiled",
    "_forward_cls": "of a node: the class of ours that it is of",
    "_comm_hooks": "of DDP: has a user registered a hook? There can be one only",
    "_join_config": "of DDP: is it inside of `join()`?",
    "_divide_by_initial_world_size": "of DDP: what `join()` was asked to divide by",
    "_has_rebuilt_buckets": "of DDP: gradients may move to other memory until then",
    "_use_python_reducer": "of DDP: does compiled autograd reduce, and call no hook?",
    "_get_active_ddp_module": "of DDP: the one whose forward runs",
    "_get_fsdp_state": "of an FSDP module: the groups of parameters that it gathers together",
    "_fsdp_param_groups": "of that state: the groups",
    "_unsharded_param": "of an FSDP parameter: the gathered one, which a forward sees",
    "_reduce_scatter_comm": "of a group: what reduces its gradients. "
    "`set_custom_reduce_scatter` sets it, and nothing public reads what was set before",
    "_checkpoint_impl": "of `torch.utils.checkpoint`: what runs a checkpoint, since 2.15",
    "_step_supports_amp_scaling": "of an optimizer: may a GradScaler leave the unscaling to it?",
}
"""Private attributes that are read or set where they are needed, and why."""

AT_IMPORT: dict[Any, str] = {
    forward_ad: "_current_level",
    Tensor: "_base _version _is_view _post_accumulate_grad_hooks _backward_hooks",
    nn.Module(): "_parameters _forward_hooks _backward_pre_hooks _forward_pre_hooks"
    " _compiled_call_impl _call_impl",
    torch.ops.aten.add.Tensor: "_schema",
}
"""Those that are there from the start: where one is missing, the import of varreg fails. For the
others, `tests/test_versions.py` makes the objects.
"""
[getattr(owner, name) for owner, names in AT_IMPORT.items() for name in names.split()]

# names of torch that are passed on unchanged
__all__ = [
    "BackwardHook",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "disable_dynamo",
    "dispatch_mode_stack",
    "get_eval_frame_callback",
    "global_backward_pre_hooks",
    "has_global_hooks",
    "len_mode_stack",
    "mode_stack",
    "pop_mode",
    "push_mode",
    "set_code_exec_strategy",
    "tree_leaves",
    "tree_map",
]
