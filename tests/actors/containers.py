"""Containers of random bytes, as the pager sees them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from jitllm.formats.jlm_head import ExpertExtent, Extent

PAGE = 4096


@dataclass(frozen=True)
class FakeHeader:
    dense: Extent
    blocks: tuple[Extent, ...]
    experts: tuple[ExpertExtent, ...] = ()


@dataclass(frozen=True)
class FakeContainer:
    path: Path
    header: FakeHeader

    def payload(self, extent: Extent) -> bytes:
        with self.path.open("rb") as file:
            file.seek(extent.offset)
            return file.read(extent.length)


def write(path: Path, block_bytes: Sequence[int], dense_bytes: int = 5000) -> FakeContainer:
    """A file with a dense region and one extent for each of `block_bytes`, clean on its disk."""
    rng = random.Random(1)
    extents = []
    with path.open("wb") as file:
        file.write(b"header".ljust(PAGE, b"\0"))
        for num_bytes in (dense_bytes, *block_bytes):
            offset = file.tell()
            data = rng.randbytes(num_bytes)
            file.write(data)
            extents.append(Extent(offset, num_bytes, xxhash.xxh3_64_intdigest(data)))
            file.write(bytes(-num_bytes % PAGE))
    drop_from_page_cache(path)
    return FakeContainer(path, FakeHeader(extents[0], tuple(extents[1:])))


def drop_from_page_cache(path: Path) -> None:
    import os

    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
