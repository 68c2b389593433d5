"""What the tutorials tell people to run, run as they say. (Sessions in them are doctests.)"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "learn" / "compare-optimizers.md"


@pytest.mark.slow
def test_the_comparison_of_the_tutorial(tmp_path):
    text = PAGE.read_text()
    name, code = re.search(r'```python title="(.*?)"\n(.*?)```', text, re.S).groups()
    (tmp_path / name).write_text(code)
    command = re.search(r"```bash\nvarreg (.*?)```", text, re.S)[1].replace("\\\n", " ")
    args = [*shlex.split(command), "--out", "came", "--epochs", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "varreg", *args], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "came" / "report.html").is_file()
    assert re.search("VRAdamW", done.stdout)
    assert re.search("no detectable difference|lower|higher", done.stdout)
