"""Data sets: find them on disk, or download them from their official sources, and check every byte.

They are searched in the given folder, then in `$VARREG_DATA`, then in the user's cache; otherwise
they are downloaded to the cache. Fashion-MNIST is its four `.gz` files under `fashion-mnist/`,
CIFAR-10 its binary version under `cifar-10-batches-bin/`. No pickle is read.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import tarfile
import tempfile
import zlib
from pathlib import Path
from typing import NamedTuple

import filelock
import pooch
import torch
from torch import Tensor

from varreg.errors import VarregError


class Images(NamedTuple):
    """One split: uint8 pixels [n, channels, height, width], and int64 labels [n]."""

    pixels: Tensor
    labels: Tensor


class File(NamedTuple):
    """The expected contents of a file, unpacked."""

    size: int
    sha256: str
    download: str | None = None
    """The checksum of the file at its official source, if it is downloaded as a single file."""


class Source(NamedTuple):
    """A data set: where it is, and what its files are."""

    folder: str
    url: str
    """The URL of the official folder of the files, or of an archive that contains `folder`."""
    files: dict[str, File]
    archive: str | None = None
    """The archive's checksum."""


FASHION_MNIST = Source(
    "fashion-mnist",
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    {
        "train-images-idx3-ubyte.gz": File(
            47040016,
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        ),
        "train-labels-idx1-ubyte.gz": File(
            60008,
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "md5:25c81989df183df01b3e8a0aad5dffbe",
        ),
        "t10k-images-idx3-ubyte.gz": File(
            7840016,
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "md5:bef4ecab320f06d8554ea6380940ec79",
        ),
        "t10k-labels-idx1-ubyte.gz": File(
            10008,
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
            "md5:bb300cfdad3c16e7a12a480ee83cd310",
        ),
    },
)
CIFAR_10 = Source(
    "cifar-10-batches-bin",
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    {
        "data_batch_1.bin": File(
            30730000, "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"
        ),
        "data_batch_2.bin": File(
            30730000, "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"
        ),
        "data_batch_3.bin": File(
            30730000, "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"
        ),
        "data_batch_4.bin": File(
            30730000, "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"
        ),
        "data_batch_5.bin": File(
            30730000, "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"
        ),
        "test_batch.bin": File(
            30730000, "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"
        ),
    },
    archive="md5:c32a1d4ab5d03f1284b67883e8d87530",
)


def fashion_mnist(data_dir: Path | str | None = None) -> tuple[Images, Images]:
    """Return 60,000 images of 28 × 28 pixels for training, 10,000 for testing, of ten classes."""
    folder = locate(FASHION_MNIST, data_dir)

    def split(name: str) -> Images:
        pixels = contents(folder, f"{name}-images-idx3-ubyte.gz", FASHION_MNIST)[16:].view(
            -1, 1, 28, 28
        )
        return Images(
            pixels, contents(folder, f"{name}-labels-idx1-ubyte.gz", FASHION_MNIST)[8:].long()
        )

    return split("train"), split("t10k")


def cifar10(data_dir: Path | str | None = None) -> tuple[Images, Images]:
    """Return 50,000 images of 3 × 32 × 32 pixels for training, 10,000 for testing, ten classes."""
    folder = locate(CIFAR_10, data_dir)

    def split(names: list[str]) -> Images:
        rows = torch.cat([contents(folder, name, CIFAR_10) for name in names]).view(
            -1, 3073
        )  # a label, then its pixels
        return Images(rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].long())

    return split([name for name in CIFAR_10.files if name.startswith("data")]), split(
        ["test_batch.bin"]
    )


def contents(folder: Path, name: str, source: Source) -> Tensor:
    """Return the bytes of a file, unpacked and checked."""
    path, expected = folder / name, source.files[name]
    try:
        data = gzip.decompress(path.read_bytes()) if name.endswith(".gz") else path.read_bytes()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise VarregError(
            f"varreg: {path} is truncated or corrupt ({error}). Delete it, and it is downloaded "
            "again."
        ) from error
    if len(data) != expected.size:
        raise VarregError(
            f"varreg: {path} should hold {expected.size:,} bytes and holds {len(data):,}. Delete "
            "it, and it is downloaded again."
        )
    checksum = hashlib.sha256(data).hexdigest()
    if checksum != expected.sha256:
        raise VarregError(
            f"varreg: {path} is corrupt: its SHA-256 should be {expected.sha256} and is "
            f"{checksum}. Delete it, and it is downloaded again."
        )
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def locate(source: Source, data_dir: Path | str | None = None) -> Path:
    """Return the folder with all files of a data set; download them if there is none.

    Raise a VarregError if a folder has only some of the files.
    """
    cache = Path(pooch.os_cache("varreg"))
    places = [Path(place) for place in (data_dir, os.environ.get("VARREG_DATA")) if place]
    for place in (*places, cache):
        folder = place / source.folder
        missing = [name for name in source.files if not (folder / name).is_file()]
        if not missing:
            return folder
        if folder.is_dir() and len(missing) < len(source.files):
            raise VarregError(
                f"varreg: {folder} lacks {', '.join(missing)}. Add them, or delete the folder, and "
                "it is downloaded."
            )
    if data_dir is not None and not Path(data_dir).is_dir():
        raise VarregError(f"varreg: the data folder {data_dir} does not exist.")
    return download(source, cache)


def download(source: Source, cache: Path) -> Path:
    """Download all files from the official source, with a progress bar, and return their folder.
    The folder appears only when it is complete.
    """
    folder = cache / source.folder
    cache.mkdir(parents=True, exist_ok=True)
    with (
        filelock.FileLock(cache / f".{source.folder}.lock"),
        tempfile.TemporaryDirectory(dir=cache) as temporary,
    ):
        if folder.is_dir():  # another process has downloaded them
            return folder
        try:
            if source.archive is None:
                for name, file in source.files.items():
                    pooch.retrieve(
                        source.url + name, file.download, name, temporary, progressbar=True
                    )
            else:
                archive = pooch.retrieve(
                    source.url, source.archive, "archive", temporary, progressbar=True
                )
                with tarfile.open(archive) as tar:
                    for name in source.files:
                        member = tar.extractfile(f"{source.folder}/{name}")
                        if member is None:
                            raise VarregError(f"varreg: {source.url} has no {name} in it.")
                        with (Path(temporary) / name).open("wb") as out:
                            shutil.copyfileobj(member, out)
        except (OSError, ValueError) as error:  # ValueError: a checksum that does not fit
            raise VarregError(
                f"varreg: {source.folder} is in none of the data folders, and cannot be downloaded "
                f"from {source.url} ({error}). Put "
                f"{', '.join(source.files)} into a folder {source.folder}/ and name its parent "
                "with --data-dir or $VARREG_DATA."
            ) from error
        for name in source.files:
            contents(Path(temporary), name, source)
        complete = Path(temporary) / "complete"
        complete.mkdir()
        for name in source.files:
            (Path(temporary) / name).replace(complete / name)
        complete.replace(folder)
    return folder
