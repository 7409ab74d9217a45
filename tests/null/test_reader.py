"""Positioned reads: right bytes, nothing in the page cache, and clear errors."""

import ctypes
import errno
import mmap
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from jitllm.devices.memory import PAGE_BYTES, HostMemory, round_up
from jitllm.errors import PageError
from jitllm.formats.reader import Reader
from tests.actors import containers

MIB = 1 << 20


@pytest.fixture(params=["disk", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder on a filesystem with direct reads (if the temporary one has them), and tmpfs."""
    if request.param == "disk":
        yield tmp_path
        return
    path = Path("/dev/shm") / f"jitllm-test-{os.getpid()}"
    path.mkdir()
    yield path
    for file in path.iterdir():
        file.unlink()
    path.rmdir()


def cached_pages(path: Path) -> int:
    """Pages of `path` in the page cache, by mincore."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as pages:
        num_pages = -(-len(pages) // PAGE_BYTES)
        present = (ctypes.c_ubyte * num_pages)()
        first = ctypes.c_char.from_buffer(pages)
        libc = ctypes.CDLL(None, use_errno=True)
        assert not libc.mincore(ctypes.byref(first), ctypes.c_size_t(len(pages)), present)
        del first
        return sum(page & 1 for page in present)


def read_bytes() -> int:
    """What the kernel fetched from storage for this process."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def has_direct_reads(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("num_bytes", [1, 4095, 4096, MIB, 3 * MIB + 4097, 5 * MIB - 1])
def test_it_reads_what_is_there(folder: Path, direct: bool, num_bytes: int) -> None:
    container = containers.write(folder / "x", [num_bytes, 9000])
    with Reader(container.path, direct=direct) as reader, HostMemory().reserve(6 * MIB) as span:
        assert reader.is_direct == (direct and has_direct_reads(container.path))
        for extent in container.header.blocks:
            view = span.view(0, round_up(extent.length))
            reader.read_extent(extent, view)
            assert view[: extent.length] == container.payload(extent)
            view.release()
        assert reader.num_reads == 2


@pytest.mark.parametrize("direct", [True, False])
def test_nothing_stays_in_the_page_cache(tmp_path: Path, direct: bool) -> None:
    container = containers.write(tmp_path / "x", [3 * MIB + 5000] * 2)
    assert cached_pages(container.path) == 0
    with Reader(container.path, direct=direct) as reader, HostMemory().reserve(4 * MIB) as span:
        for extent in container.header.blocks:
            reader.read_extent(extent, span.view())
            assert cached_pages(container.path) == 0


def test_bytes_read_is_what_the_kernel_counts(tmp_path: Path) -> None:
    container = containers.write(tmp_path / "x", [3 * MIB + 5000, MIB, 100])
    if not has_direct_reads(container.path):
        pytest.skip("no direct reads here")
    with Reader(container.path) as reader, HostMemory().reserve(4 * MIB) as span:
        before = read_bytes()
        for _ in range(3):
            for extent in container.header.blocks:
                reader.read_extent(extent, span.view())
        counted = read_bytes() - before
    assert counted == pytest.approx(reader.bytes_read, rel=0.001)
    assert reader.bytes_read == 3 * sum(round_up(e.length) for e in container.header.blocks)


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_that_ends_early_is_a_short_read(tmp_path: Path, direct: bool) -> None:
    container = containers.write(tmp_path / "x", [3 * MIB])
    (extent,) = container.header.blocks
    os.truncate(container.path, extent.offset + MIB + 777)
    with Reader(container.path, direct=direct) as reader, HostMemory().reserve(3 * MIB) as span:
        with pytest.raises(PageError, match="short read") as caught:
            reader.read_extent(extent, span.view())
        assert caught.value.path == str(container.path)
        assert extent.offset + MIB <= caught.value.offset <= extent.offset + 3 * MIB


def test_the_last_page_of_a_file_may_be_cut(tmp_path: Path) -> None:
    container = containers.write(tmp_path / "x", [MIB + 777])
    (extent,) = container.header.blocks
    os.truncate(container.path, extent.offset + extent.length)
    with Reader(container.path) as reader, HostMemory().reserve(2 * MIB) as span:
        reader.read_extent(extent, span.view())


def test_a_wrong_checksum_names_file_and_offset(tmp_path: Path) -> None:
    container = containers.write(tmp_path / "x", [MIB])
    (extent,) = container.header.blocks
    with container.path.open("r+b") as file:
        file.seek(extent.offset + 1234)
        file.write(bytes([container.payload(extent)[1234] ^ 1]))
    containers.drop_from_page_cache(container.path)
    with Reader(container.path) as reader, HostMemory().reserve(MIB) as span:
        with pytest.raises(PageError, match=f"at byte {extent.offset}: the checksum is wrong"):
            reader.read_extent(extent, span.view())
        reader.read_extent(extent, span.view(), verify=False)


@pytest.mark.parametrize("piece_bytes", [PAGE_BYTES, 3 * PAGE_BYTES, 99 * PAGE_BYTES])
def test_extents_behind_one_another_are_read_as_one(tmp_path: Path, piece_bytes: int) -> None:
    """Each with its own checksum, wherever the pieces begin."""
    sizes = [2 * PAGE_BYTES + 5, 77, PAGE_BYTES, 5 * PAGE_BYTES - 1]
    file = containers.write(tmp_path / "f", sizes)
    run = file.header.blocks
    num_bytes = run[-1].offset + run[-1].length - run[0].offset
    starts = range(0, num_bytes, piece_bytes)
    pieces = [range(start, min(start + piece_bytes, num_bytes)) for start in starts]
    with Reader(file.path) as reader, HostMemory().reserve(round_up(num_bytes)) as span:
        reader.read_run(run, span.view(), pieces=pieces)
        for extent in run:
            found = span.view(extent.offset - run[0].offset, extent.length)
            assert found.tobytes() == file.payload(extent)
        for extent in run:
            original = file.payload(extent)
            for at in (0, extent.length - 1):
                damaged = bytearray(original)
                damaged[at] ^= 1
                overwrite(file.path, extent.offset, damaged)
                with pytest.raises(PageError, match=f"byte {extent.offset}.*checksum"):
                    reader.read_run(run, span.view(), pieces=pieces)
            overwrite(file.path, extent.offset, original)


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.mark.parametrize("num_bytes", [1, PAGE_BYTES, 5 * PAGE_BYTES + 77])
def test_an_extent_in_pieces_is_the_same_extent(tmp_path: Path, num_bytes: int) -> None:
    file = containers.write(tmp_path / "f", [num_bytes])
    extent = file.header.blocks[0]
    sizes = (2 * PAGE_BYTES, PAGE_BYTES)
    for size in sizes:
        with Reader(file.path) as reader, HostMemory().reserve(round_up(num_bytes)) as span:
            starts = range(0, num_bytes, size)
            pieces = [range(start, min(start + size, num_bytes)) for start in starts]
            reader.read_extent(extent, span.view(), pieces=pieces)
            assert span.view(0, num_bytes).tobytes() == file.payload(extent)
            assert reader.num_reads == len(pieces)
            with file.path.open("r+b") as out:
                out.seek(extent.offset + num_bytes - 1)
                out.write(bytes([file.payload(extent)[-1] ^ 1]))
            with pytest.raises(PageError, match="checksum"):
                reader.read_extent(extent, span.view(), pieces=pieces)
            reader.read_extent(extent, span.view(), pieces=pieces, verify=False)
        containers.write(file.path, [num_bytes])


def test_an_io_error_names_file_and_offset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    container = containers.write(tmp_path / "x", [3 * MIB])
    (extent,) = container.header.blocks
    real = os.preadv

    def fails(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset >= extent.offset + 2 * MIB:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", fails)
    with Reader(container.path) as reader, HostMemory().reserve(3 * MIB) as span:
        with pytest.raises(PageError, match="Input/output error") as caught:
            reader.read_extent(extent, span.view())
        assert caught.value.offset == extent.offset + 2 * MIB


def test_reads_that_come_in_pieces_are_put_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    container = containers.write(tmp_path / "x", [3 * MIB + 5000])
    (extent,) = container.header.blocks
    real, rng = os.preadv, random.Random(3)

    def stutters(fd: int, buffers: list[memoryview], offset: int) -> int:
        (view,) = buffers
        num_bytes = rng.randrange(1, len(view) + 1)
        got = real(fd, [view[: round_up(num_bytes)]], offset)
        return min(num_bytes if num_bytes >= PAGE_BYTES else got, got)

    monkeypatch.setattr(os, "preadv", stutters)
    with Reader(container.path) as reader, HostMemory().reserve(4 * MIB) as span:
        reader.read_extent(extent, span.view())


def test_direct_reads_that_are_refused_late_become_buffered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    container = containers.write(tmp_path / "x", [3 * MIB])
    (extent,) = container.header.blocks
    with Reader(container.path) as reader, HostMemory().reserve(3 * MIB) as span:
        real, direct_fd = os.preadv, reader._direct_fd

        def refuses(fd: int, buffers: list[memoryview], offset: int) -> int:
            if fd == direct_fd:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return real(fd, buffers, offset)

        monkeypatch.setattr(os, "preadv", refuses)
        reader.read_extent(extent, span.view())
        assert not reader.is_direct
    assert cached_pages(container.path) == 0


def test_a_missing_file_is_a_page_error(tmp_path: Path) -> None:
    with pytest.raises(PageError, match="No such file"):
        Reader(tmp_path / "none")


def test_what_is_not_aligned_is_refused(tmp_path: Path) -> None:
    container = containers.write(tmp_path / "x", [MIB])
    with Reader(container.path) as reader, HostMemory().reserve(MIB) as span:
        with pytest.raises(ValueError, match="not aligned"):
            reader.read(100, 4096, span.view())
        with pytest.raises(ValueError, match="not aligned"):
            reader.read(4096, 4097, span.view(0, 4097))
