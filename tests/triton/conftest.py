"""The kernels in Triton's interpreter, on the CPU: `make kernels` sets TRITON_INTERPRET=1, which
must be there before anything imports them.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

collect_ignore = (
    []
    if os.environ.get("TRITON_INTERPRET") == "1"
    else ["test_layer_kernels.py", "test_step_kernels.py", "test_launches.py", "test_training.py"]
)


@pytest.fixture(autouse=True)
def _as_a_gpu():
    """In float32, and 0/0 is no warning."""
    torch.set_default_dtype(torch.float32)
    with np.errstate(all="ignore"):
        yield
