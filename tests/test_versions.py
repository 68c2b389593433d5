"""What of torch is private is looked for when a name of varreg is first used."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch.distributed.fsdp import fully_shard

import varreg
from varreg import _torch


@pytest.mark.parametrize(
    "name",
    [
        *("_C._will_engine_execute_node", "_C._get_dispatch_mode", "jit._state._python_cu"),
        *("_ops.HigherOrderOperator", "nn.Module._call_impl", "autograd.forward_ad._current_level"),
    ],
)
def test_a_torch_without_a_private_name_is_refused_at_first_use(name):
    script = f"import torch; del torch.{name}; from varreg import observe"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: varreg: torch ")
    assert name.rpartition(".")[2] in last
    assert "2.8 and newer" in last


def test_the_compiler_has_the_names_that_are_imported_later():
    from torch._dynamo.exc import UnspecializeRestartAnalysis
    from torch._dynamo.output_graph import OutputGraph
    from torch._dynamo.symbolic_convert import InstructionTranslator

    UnspecializeRestartAnalysis(restart_reason="to capture the graph again")
    assert callable(InstructionTranslator.current_tx)
    assert callable(OutputGraph.call_user_compiler)
    assert isinstance(OutputGraph.current_tracer, property)
    marked = torch._dynamo.assume_constant_result(lambda: 0)
    assert marked._dynamo_marked_constant


@pytest.fixture
def _alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_alone")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, while it imports itself
def test_every_private_attribute_is_there():
    """Those of objects that exist at once are looked for when varreg is imported, the others
    here.
    """
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    with ddp.join():  # which sets an attribute
        ddp(torch.ones(3, 2)).sum().backward()
    y = (torch.ones(1, requires_grad=True) * 2).exp()
    there = {
        "_input_metadata": y.grad_fn,
        "_orig_mod": torch.compile(nn.Linear(2, 1)),
        "_forward_cls": Doubled.apply(y).grad_fn,
        "_checkpoint_impl": torch.utils.checkpoint,
        "_step_supports_amp_scaling": torch.optim.SGD([y.detach()], fused=True),
    }
    there |= dict.fromkeys((*_OF_DDP, "_get_active_ddp_module"), ddp)
    if _torch.CAN_JOIN_FSDP:
        module = fully_shard(nn.Linear(2, 1))
        module(torch.ones(3, 2))
        state = module._get_fsdp_state()
        (group,) = state._fsdp_param_groups
        there |= {"_get_fsdp_state": module, "_fsdp_param_groups": state}
        there |= {"_unsharded_param": group.fsdp_params[0], "_reduce_scatter_comm": group}
    else:
        there |= dict.fromkeys(_OF_FSDP)
    at_import = set(" ".join(_torch.AT_IMPORT.values()).split())
    assert at_import | there.keys() == set(_torch.ATTRIBUTES)
    for name, owner in there.items():
        is_newer = name == "_checkpoint_impl"  # where it is missing, `checkpoint` is taken
        assert owner is None or is_newer or hasattr(owner, name), name


_OF_DDP = (
    *("_comm_hooks", "_join_config", "_divide_by_initial_world_size", "_has_rebuilt_buckets"),
    "_use_python_reducer",
)
_OF_FSDP = ("_get_fsdp_state", "_fsdp_param_groups", "_unsharded_param", "_reduce_scatter_comm")


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def test_fully_shard_is_refused_where_torch_is_too_old_for_it(monkeypatch):
    monkeypatch.setattr(_torch, "CAN_JOIN_FSDP", False)
    varreg.observe(nn.Linear(2, 1))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sharded = fully_shard(nn.Linear(2, 1))
        with pytest.raises(varreg.VarregError, match=r"fully_shard needs torch 2\.13 or newer"):
            varreg.observe(sharded)
    finally:
        dist.destroy_process_group()
