"""Data sets: read in full where they are, and refused where a byte is wrong."""

from __future__ import annotations

import concurrent.futures
import functools
import gzip
import hashlib
import http.server
import io
import os
import tarfile
import threading
from pathlib import Path

import pytest
import torch

from varreg.lab.tasks import datasets as data
from varreg.lab.tasks.datasets import File, Source

HERE = Path(os.environ.get("VARREG_DATA", "/nowhere"))
needs_fashion = pytest.mark.skipif(
    not (HERE / "fashion-mnist").is_dir(), reason="Fashion-MNIST is not in $VARREG_DATA"
)
needs_cifar = pytest.mark.skipif(
    not (HERE / "cifar-10-batches-bin").is_dir(), reason="CIFAR-10 is not in $VARREG_DATA"
)


@needs_fashion
def test_fashion_mnist():
    train, test = data.fashion_mnist()
    assert (train.pixels.shape, test.pixels.shape) == ((60000, 1, 28, 28), (10000, 1, 28, 28))
    assert torch.bincount(train.labels).tolist() == [6000] * 10
    assert torch.bincount(test.labels).tolist() == [1000] * 10
    assert train.labels[:8].tolist() == [9, 0, 0, 3, 0, 2, 7, 2]
    assert float(train.pixels.double().mean()) / 255 == pytest.approx(0.2860, abs=1e-4)


@needs_cifar
def test_cifar10():
    train, test = data.cifar10(HERE)
    assert (train.pixels.shape, test.pixels.shape) == ((50000, 3, 32, 32), (10000, 3, 32, 32))
    assert torch.bincount(train.labels).tolist() == [5000] * 10
    assert torch.bincount(test.labels).tolist() == [1000] * 10
    means = train.pixels.double().mean((0, 2, 3)) / 255
    torch.testing.assert_close(means, torch.tensor([0.4914, 0.4822, 0.4465]), atol=1e-4, rtol=0)


FILES = {"a.bin": b"first file", "b.gz": gzip.compress(b"second file")}


def plain(name: str) -> bytes:
    return gzip.decompress(FILES[name]) if name.endswith(".gz") else FILES[name]


def source(url: str, archive: str | None = None, files=FILES) -> Source:
    described = {
        n: File(
            len(plain(n)),
            hashlib.sha256(plain(n)).hexdigest(),
            f"sha256:{hashlib.sha256(files[n]).hexdigest()}",
        )
        for n in files
    }
    return Source("tiny", url, described, archive)


@pytest.fixture
def server(tmp_path):
    """A real web server on this machine."""
    folder = tmp_path / "web"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=folder)
    ) as web:
        thread = threading.Thread(target=web.serve_forever, daemon=True)
        thread.start()
        yield folder, f"http://127.0.0.1:{web.server_port}/"
        web.shutdown()
        thread.join()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("pooch.os_cache", lambda name: tmp_path / "cache" / name)
    monkeypatch.delenv("VARREG_DATA", raising=False)
    return tmp_path / "cache" / "varreg"


def put(folder: Path, files=FILES) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def test_download_of_files(server, cache):
    folder, url = server
    put(folder)
    found = data.locate(source(url))
    assert found == cache / "tiny"
    assert [bytes(data.contents(found, n, source(url)).numpy()) for n in FILES] == [
        plain(n) for n in FILES
    ]
    assert seen(cache) == ["tiny"]  # nothing else is left
    for n in FILES:
        (folder / n).unlink()
    assert data.locate(source(url)) == found  # not asked for again


def seen(folder: Path) -> list[str]:
    """What is in a folder, without the lock, which stays."""
    return [p.name for p in folder.iterdir() if not p.name.endswith(".lock")]


def test_two_that_download_at_once(server, cache):
    """The slower one waits, and uses what the other brought."""
    folder, url = server
    put(folder)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: data.download(source(url), cache), range(4)))
    assert found == [cache / "tiny"] * 4
    assert seen(cache) == ["tiny"]


def test_download_of_an_archive(server, cache):
    folder, url = server
    with tarfile.open(folder / "tiny.tar.gz", "w:gz") as tar:
        for name, content in FILES.items():
            info = tarfile.TarInfo(f"tiny/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    checksum = f"sha256:{hashlib.sha256((folder / 'tiny.tar.gz').read_bytes()).hexdigest()}"
    found = data.locate(source(url + "tiny.tar.gz", checksum))
    assert sorted(p.name for p in found.iterdir()) == ["a.bin", "b.gz"]


def test_a_download_that_is_not_what_it_should_be(server, cache):
    folder, url = server
    put(folder, {**FILES, "b.gz": b"something else"})
    with pytest.raises(
        ValueError, match=r"tiny is in none of the data folders, and cannot be downloaded .*hash"
    ):
        data.locate(source(url))
    assert not (cache / "tiny").exists()


def test_no_connection(cache):
    with pytest.raises(
        ValueError,
        match=r"is in none of the data folders, and cannot be downloaded from http://127.0.0.1:9/",
    ):
        data.locate(source("http://127.0.0.1:9/"))
    assert not seen(cache)


def test_where_it_is_looked_for(tmp_path, cache, monkeypatch):
    nowhere = source("http://127.0.0.1:9/")
    put(cache / "tiny")
    assert data.locate(nowhere) == cache / "tiny"
    monkeypatch.setenv("VARREG_DATA", str(tmp_path / "mine"))
    put(tmp_path / "mine" / "tiny")
    assert data.locate(nowhere) == tmp_path / "mine" / "tiny"
    put(tmp_path / "given" / "tiny")
    assert data.locate(nowhere, tmp_path / "given") == tmp_path / "given" / "tiny"
    (tmp_path / "given" / "tiny" / "b.gz").unlink()
    with pytest.raises(ValueError, match=r"given/tiny lacks b.gz"):
        data.locate(nowhere, tmp_path / "given")


def test_a_data_folder_that_does_not_exist(tmp_path, cache):
    with pytest.raises(ValueError, match=r"data folder .*/typo does not exist"):
        data.locate(source("http://127.0.0.1:9/"), tmp_path / "typo")


DAMAGE = {
    "truncated": ("a.bin", lambda c: c[:-3], r"a.bin should hold 10 bytes and holds 7"),
    "too long": ("a.bin", lambda c: c + b"!", r"a.bin should hold 10 bytes and holds 11"),
    "changed": (
        "a.bin",
        lambda c: b"F" + c[1:],
        r"a.bin is corrupt: its SHA-256 should be [0-9a-f]{64} and is [0-9a-f]{64}",
    ),
    "truncated gzip": ("b.gz", lambda c: c[:-9], r"b.gz is truncated or corrupt"),
    "changed gzip": ("b.gz", lambda c: c[:-6] + b"??????", r"b.gz is truncated or corrupt"),
    "not gzip": ("b.gz", lambda c: b"hello", r"b.gz is truncated or corrupt"),
    "empty": ("b.gz", lambda c: b"", r"b.gz should hold 11 bytes and holds 0"),
}


@pytest.mark.parametrize(("name", "damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damaged_files(name, damage, message, tmp_path):
    folder = put(tmp_path / "tiny", {**FILES, name: damage(FILES[name])})
    with pytest.raises(ValueError, match=message):
        data.contents(folder, name, source("http://127.0.0.1:9/"))
