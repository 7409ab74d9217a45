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


def write(
    path: Path,
    block_bytes: Sequence[int],
    dense_bytes: int = 5000,
    expert_bytes: Sequence[int] = (),
) -> FakeContainer:
    """A file with a dense region and one extent for each of `block_bytes`, clean on its disk.

    expert_bytes: of the experts of each block.
    """
    rng = random.Random(1)
    extents = []
    with path.open("wb") as file:
        file.write(b"header".ljust(PAGE, b"\0"))
        of_blocks = [size for own in block_bytes for size in (own, *expert_bytes)]
        for num_bytes in (dense_bytes, *of_blocks):
            offset = file.tell()
            data = rng.randbytes(num_bytes)
            file.write(data)
            extents.append(Extent(offset, num_bytes, xxhash.xxh3_64_intdigest(data)))
            file.write(bytes(-num_bytes % PAGE))
    drop_from_page_cache(path)
    dense, *rest = extents
    length = 1 + len(expert_bytes)
    experts = tuple(
        ExpertExtent(index // length, index % length - 1, extent)
        for index, extent in enumerate(rest)
        if index % length
    )
    return FakeContainer(path, FakeHeader(dense, tuple(rest[::length]), experts))


def drop_from_page_cache(path: Path) -> None:
    import os

    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
