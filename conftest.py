"""What holds before anything is collected: what pytest leaves out of `src`, and which instructions
oneDNN may use; and where examples run.
"""

import os
from importlib.util import find_spec

import pytest

# Where Triton is not installed, its kernels cannot be imported.
collect_ignore = [] if find_spec("triton") else ["src/varreg/triton"]

# Some virtual machines announce Intel's AMX and do not allow it: a product in bfloat16 then ends
# the process with an illegal instruction, in plain torch too. oneDNN reads this at its first use.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")


@pytest.fixture(autouse=True)
def examples_run_in_a_folder_of_their_own(request):
    """Change to an empty folder for the examples of docs and docstrings: some write files."""
    if isinstance(request.node, pytest.DoctestItem):
        request.getfixturevalue("monkeypatch").chdir(request.getfixturevalue("tmp_path"))
