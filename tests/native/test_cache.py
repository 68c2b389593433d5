"""The folder of compiled libraries: nothing is taken from it that another user could have put
there, or that is damaged.
"""

from __future__ import annotations

import os
import stat
import sys

import pytest

from varreg.native import cache

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="owners and modes are POSIX's")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return cache.open_folder()


@pytest.fixture
def library(folder, tmp_path):
    made = tmp_path / "made.so"
    made.write_bytes(b"code")
    return cache.keep(folder, "key", made)


def test_it_is_private(folder):
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o777)
    assert cache.open_folder() == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_what_was_kept_is_found(folder, library):
    assert cache.find(folder, "key") == library
    assert cache.find(folder, "another") is None


def test_what_is_damaged_is_not_found_and_replaced(folder, library, tmp_path):
    library.write_bytes(b"c0de")
    assert cache.find(folder, "key") is None
    again = cache.keep(folder, "key", tmp_path / "made.so")
    assert cache.find(folder, "key") == again
    assert [path.name for path in folder.glob("kernels*")] == [again.name]


def test_a_file_that_others_can_write_is_not_found(folder, library):
    library.chmod(0o720)
    assert cache.find(folder, "key") is None


def test_a_link_is_not_found(folder, library, tmp_path):
    library.rename(tmp_path / "elsewhere")
    library.symlink_to(tmp_path / "elsewhere")
    assert cache.find(folder, "key") is None


def test_another_user_s_file_is_not_found(folder, library, monkeypatch):
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    assert cache.find(folder, "key") is None


def test_another_user_s_folder_is_refused_with_a_warning(folder, library, monkeypatch):
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    with pytest.warns(UserWarning, match="not a folder of this user.*XDG_CACHE_HOME"):
        assert cache.open_folder() is None


def test_a_link_to_a_folder_is_refused_with_a_warning(folder, tmp_path):
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.warns(UserWarning, match="not a folder of this user"):
        assert cache.open_folder() is None


def test_no_room_is_no_error(folder, tmp_path, monkeypatch):
    made = tmp_path / "made.so"
    made.write_bytes(b"code")
    folder.rename(tmp_path / "gone")
    assert cache.keep(folder, "key", made) == made
