"""Settings of all tests: seeds, precision and threads; and the choice of tests for `make test`.

`make test` leaves out tests that are marked `slow`; `make test-all` and plain pytest run all tests.
If the test of a table is marked `sampled(n)`, the rows outside of the sample are `slow`.
"""

from __future__ import annotations

import gc
import os
import re
import zlib

# Processes that tests start have one thread each, as the tests have: two workers fill two cores,
# and OpenMP's threads spin while they wait for each other. Set this before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch

# A test must not fail because the machine is busy.
hypothesis.settings.register_profile(
    "varreg", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("varreg")

# `torch.manual_seed` keeps the call stack for each kind of device that could still come, which
# takes long. Where there is no such device, there is nothing to seed.
for absent in (torch.cuda, torch.xpu, torch.mtia):
    if not absent.is_available():
        absent.manual_seed_all = lambda seed: None


@pytest.fixture(autouse=True)
def _repeatable():
    """Every test starts from the same seed, in double precision, on one thread of its own."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(default)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow all rows of sampled tables that are not in the sample.

    A row is in the sample of a test marked `sampled(n)` if it is the first of its family, which is
    the first word of its name without a number at its end, or if the CRC-32 of the test's and the
    row's name is divisible by n. The same rows come out on every machine, and a row that is added
    changes nothing for the others.
    """
    seen = set()
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if sampled is None or not hasattr(item, "callspec"):
            continue
        row = item.callspec.id
        family = (
            item.parent.nodeid,
            item.originalname,
            re.match(r"[^-/ ]*", row)[0].rstrip("0123456789"),
        )
        if family in seen and zlib.crc32(f"{item.originalname}[{row}]".encode()) % sampled.args[0]:
            item.add_marker(pytest.mark.slow)
        seen.add(family)


def pytest_collection_finish() -> None:
    """Keep modules and collected tests out of every garbage collection to come."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Give back what was kept out: extensions complain of objects that are never collected."""
    gc.unfreeze()
