"""What of torch is private is looked for when a name of varreg is first used."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import varreg
from varreg import _torch


def test_a_torch_without_a_private_name_is_refused_at_first_use():
    script = "import torch; del torch._C._will_engine_execute_node; from varreg import observe"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: varreg: torch ")
    assert "_will_engine_execute_node" in last
    assert "2.8 and newer" in last


def test_fully_shard_is_refused_where_torch_is_too_old_for_it(monkeypatch):
    monkeypatch.setattr(_torch, "CAN_JOIN_FSDP", False)
    varreg.observe(torch.nn.Linear(2, 1))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sharded = fully_shard(torch.nn.Linear(2, 1))
        with pytest.raises(varreg.VarregError, match=r"fully_shard needs torch 2\.13 or newer"):
            varreg.observe(sharded)
    finally:
        dist.destroy_process_group()
