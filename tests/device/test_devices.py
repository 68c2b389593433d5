"""Tests on the pretend device. To register it changes the process: each run is one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import pretend_device
from tests.support.commands import LIMIT

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    pretend_device.why_not() is not None, reason=str(pretend_device.why_not())
)


def run(*arguments: str, **environment: str) -> None:
    """Run tests with the plugin; fail with their output."""
    plugin = "tests.support.pretend_device.plugin"
    command = [sys.executable, "-m", "pytest", "-p", plugin, "-n", "0", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=4 * LIMIT,  # whole files of tests in one process
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.fixture
def is_short(request) -> bool:
    """Whether this is `make test`. All tests of a file share one process, whose start is slow."""
    return request.config.option.markexpr == "not slow"


def test_what_holds_on_any_device(is_short):
    run("tests/device/on_pretend_device.py", *(("-m", "not slow") if is_short else ()))


CONFORMANCE = "tests/properties/test_conformance.py"
MOMENTS = "test_moments_are_those_of_single_samples"
UPDATE_RULES = "tests/properties/test_update_rules.py"
FORMULA = "test_against_the_formula"


@pytest.mark.parametrize(("path", "name"), [(CONFORMANCE, MOMENTS), (UPDATE_RULES, FORMULA)])
def test_against_the_definition(path, name, is_short):
    """The samples of these tables; in `make test`, of one property."""
    run(f"{path}::{name}" if is_short else path, "-m", "not slow", PRETEND_DEFAULT="1")
