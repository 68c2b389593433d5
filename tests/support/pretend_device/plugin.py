"""A pytest plugin: tests have the pretend device, and with PRETEND_DEFAULT=1 it is their default
device.

    python -m pytest -p tests.support.pretend_device.plugin tests/device/on_pretend_device.py
"""

from __future__ import annotations

import os

import pytest
import torch

from tests.support import pretend_device


def pytest_configure():
    pretend_device.load()


def pytest_collection_modifyitems(items):
    for item in items:
        if item.name.startswith("test_moments_agree_with_vmap"):
            item.add_marker(pytest.mark.skip(reason="its attention has no batching rule"))


@pytest.fixture(autouse=True)
def _default_device(_repeatable):
    if os.environ.get("PRETEND_DEFAULT") == "1":
        torch.set_default_device(pretend_device.NAME)
    yield
    torch.set_default_device("cpu")
