"""The monitor over several processes: rank 0 writes what one process would."""

from __future__ import annotations

import pytest

from tests.support import monitor_ranks
from tests.support.once import folder_once
from tests.support.ranks import NEEDS_FSDP, launch
from varreg.monitor import read


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    return folder_once(
        tmp_path_factory,
        "monitor",
        lambda folder: launch(monitor_ranks.together, 2, str(folder)),
    )


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=NEEDS_FSDP)])
def test_rank_0_writes_what_one_process_would(several, tmp_path, kind):
    folder, ranks = several
    monitor_ranks.trained(0, 1, "alone", tmp_path)
    alone, found = read(tmp_path / "alone").records, read(folder / kind).records
    assert [r["step"] for r in found] == list(range(1, monitor_ranks.STEPS + 1))
    for a, b in zip(found, alone, strict=True):
        assert a.keys() == b.keys()
        for name in b.keys() - {"time", "loss", "cabs"}:  # the loss is that of rank 0
            assert a[name] == pytest.approx(b[name], rel=1e-5), name
    assert [rank[kind] for rank in ranks] == [6, 0 if kind == "ddp" else 6]
    assert len(list((folder / kind).iterdir())) == 2


@NEEDS_FSDP
def test_ranks_measure_at_the_same_steps_though_their_clocks_differ(several):
    folder, ranks = several
    a, b = (rank["clock"] for rank in ranks)
    assert a == b >= 2
    assert len(read(folder / "clock" / "fsdp").records) == a
