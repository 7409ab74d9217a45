"""Files of the prefix cache: what goes in comes out, or nothing does."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jitllm.memory.prefix import root
from jitllm.memory.prefix_file import (
    GRANULE_TOKENS,
    PIECE_TOKENS,
    Damaged,
    Draft,
    PrefixFile,
    PrefixKind,
    decode,
    encode,
)
from jitllm.memory.prefix_store import Catalogue, PrefixFolder, PrefixStore, Stretch

KIND = PrefixKind(b"identity of a kv", (3, 2, 4), 8)
HIDDEN = b"hidden.."


def store_in(folder: Path, max_bytes: int = 0, kind: PrefixKind = KIND) -> PrefixStore:
    return PrefixStore(PrefixFolder(folder, max_bytes, kind))


def draft_of(
    tokens: tuple[int, ...], start: int = 0, *, hidden: bytes = b"", parent: bytes = b""
) -> Draft:
    """Of the tokens from `start` on, with bytes that nothing else has."""
    if start:
        parent = Draft(parent, 0, tokens[:start], b"").names()[-1]
    dice = random.Random(repr((tokens, start)))
    data = dice.randbytes(KIND.position_bytes * (len(tokens) - start))
    return Draft(parent, start, tokens[start:], data, hidden)


def tokens_of(seed: int, count: int) -> tuple[int, ...]:
    dice = random.Random(seed)
    return tuple(dice.randrange(1000) for _ in range(count))


def saved(store: PrefixStore, draft: Draft) -> PrefixFile:
    file = store.save(draft).file
    assert file is not None
    return file


def contents(file: PrefixFile) -> bytes:
    return b"".join(file.read(number) for number in range(len(file.pieces())))


@pytest.mark.parametrize("start", [0, 16, 80])
@pytest.mark.parametrize("count", [1, 16, 63, 64, 65, 200])
@pytest.mark.parametrize("hidden", [b"", HIDDEN])
def test_another_process_finds_what_one_has_stored(
    tmp_path: Path, start: int, count: int, hidden: bytes
) -> None:
    draft = draft_of(tokens_of(1, start + count), start, hidden=hidden)
    written = saved(store_in(tmp_path), draft)
    scan = store_in(tmp_path).scan()
    assert (scan.num_damaged, scan.problem) == (0, "")
    [found] = scan.files
    assert tuple(found.tokens) == draft.tokens
    assert (found.start, found.stop) == (start, start + count)
    assert contents(found) == contents(written) == draft.data
    assert found.has_end is bool(hidden)
    if hidden:
        assert found.read_hidden() == hidden
    assert found.num_bytes == found.path.stat().st_size
    assert set(found.digests) <= set(draft.names())
    assert os.listdir(tmp_path) == [KIND.identity.hex()]
    assert len(os.listdir(tmp_path / KIND.identity.hex())) == 1


def test_pieces_are_cut_where_pages_of_the_usual_size_are() -> None:
    assert list(KIND.pieces(16, 200)) == [(16, 64), (64, 128), (128, 192), (192, 200)]
    assert list(KIND.pieces(64, 64)) == []
    assert PIECE_TOKENS % GRANULE_TOKENS == 0


@pytest.mark.parametrize(
    ("position_bytes", "expected"), [(1, 64), (18 << 10, 64), (100 << 10, 32), (1 << 20, 16)]
)
def test_pieces_of_large_models_have_fewer_positions(position_bytes: int, expected: int) -> None:
    kind = PrefixKind(b"", (position_bytes,), 0)
    assert kind.piece_tokens == expected
    assert kind.parcel_bytes == expected * position_bytes
    assert next(kind.pieces(0, 40)) == (0, min(expected, 40))


def test_blocks_lie_one_after_the_other_and_go_in_groups() -> None:
    assert list(KIND.runs((0, 1, 2), 10)) == [(0, 90)]
    assert list(KIND.runs((0, 2), 10)) == [(0, 30), (50, 40)]
    assert list(KIND.runs((), 10)) == []
    assert KIND.groups((0, 1, 2), 10, 1000) == [(0, 1, 2)]
    assert KIND.groups((0, 1, 2), 10, 50) == [(0, 1), (2,)]
    assert KIND.groups((0, 1, 2), 10, 1) == [(0,), (1,), (2,)]
    assert KIND.groups((), 10, 1) == [()]


# --- what is not whole ----------------------------------------------------------------------------


def served_bytes(path: Path, draft: Draft) -> None:
    """Whatever the file says is what was stored, or it is said to be damaged."""
    try:
        file = decode(path, KIND)
    except Damaged:
        return
    found = (file.parent, file.start, tuple(file.tokens))
    assert found == (draft.parent, draft.start, draft.tokens)
    whole, size = memoryview(draft.data), KIND.position_bytes
    for number, (start, stop) in enumerate(file.pieces()):
        try:
            data = file.read(number)
        except Damaged:
            continue
        assert data == whole[(start - file.start) * size : (stop - file.start) * size]
    try:
        assert file.read_hidden() == draft.hidden
    except Damaged:
        return


def test_no_changed_byte_is_ever_served(tmp_path: Path) -> None:
    draft = draft_of(tokens_of(2, 100), hidden=HIDDEN)
    path = saved(store_in(tmp_path), draft).path
    good = path.read_bytes()
    for at in range(len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 0x41]) + good[at + 1 :])
        served_bytes(path, draft)
    path.write_bytes(good)
    assert contents(decode(path, KIND)) == draft.data


def test_no_part_of_a_file_is_a_file(tmp_path: Path) -> None:
    draft = draft_of(tokens_of(3, 100), hidden=HIDDEN)
    path = saved(store_in(tmp_path), draft).path
    good = path.read_bytes()
    for count in (*range(0, len(good), 7), len(good) - 1):
        path.write_bytes(good[:count])
        with pytest.raises(Damaged):
            decode(path, KIND)
    path.write_bytes(good + b"more")
    with pytest.raises(Damaged):
        decode(path, KIND)


@pytest.mark.parametrize(
    "kind",
    [
        replace(KIND, identity=b"another identity"),
        replace(KIND, kv_bytes=(3, 2)),
        replace(KIND, hidden_bytes=12),
    ],
)
def test_a_file_of_another_model_is_none(tmp_path: Path, kind: PrefixKind) -> None:
    theirs = saved(store_in(tmp_path), draft_of(tokens_of(4, 40), hidden=HIDDEN)).path
    ours = tmp_path / kind.identity.hex()
    ours.mkdir(exist_ok=True)
    foreign = ours / "foreign.kv"
    foreign.write_bytes(theirs.read_bytes())
    (ours / "text.kv").write_text("no such file")
    scan = store_in(tmp_path, kind=kind).scan()
    assert scan.files == ()
    assert scan.num_damaged >= 2
    assert not foreign.exists()


@pytest.mark.parametrize("depth", [0, 16, 48])
def test_positions_are_where_the_tokens_before_them_say(tmp_path: Path, depth: int) -> None:
    """A stranger's file with all sums right, that begins elsewhere than what it builds on ends."""
    tokens = tokens_of(1, 100)
    told = replace(draft_of(tokens, depth), start=32)
    path = tmp_path / "told.kv"
    path.write_bytes(encode(told, KIND)[0] + told.data)
    catalogue = Catalogue()
    if depth:
        catalogue.add(decode(path, KIND))
    else:
        with pytest.raises(Damaged, match="makes no sense"):
            decode(path, KIND)
    digests = draft_of(tokens).names()
    assert catalogue.find(digests, depth) == []


def test_a_file_that_is_replaced_after_it_was_found_is_damaged(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    file = saved(store, draft_of(tokens_of(5, 40)))
    other = saved(store, draft_of(tokens_of(6, 40)))
    os.replace(other.path, file.path)
    with pytest.raises(Damaged):
        file.read(0)
    file.path.unlink()
    with pytest.raises(FileNotFoundError):
        file.read(0)


def test_bytes_that_come_slowly_are_put_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = draft_of(tokens_of(7, 100), hidden=HIDDEN)
    saved(store_in(tmp_path), draft)
    whole = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, count, at: whole(fd, min(count, 11), at))
    [found] = store_in(tmp_path).scan().files
    assert contents(found) == draft.data


def test_what_is_no_file_is_passed_over(tmp_path: Path) -> None:
    """A pipe that nobody writes to would be waited for."""
    good = saved(store_in(tmp_path), draft_of(tokens_of(1, 40)))
    folder = good.path.parent
    os.mkfifo(folder / "0pipe.kv")
    (folder / "0folder.kv").mkdir()
    (folder / "0loop.kv").symlink_to("0loop.kv")
    (folder / "0nowhere.kv").symlink_to("nothing")
    (folder / "0zero.kv").symlink_to("/dev/zero")
    os.mkfifo(folder / "0pipe.part")
    store = store_in(tmp_path, 2 * good.num_bytes)
    scan = store.scan()
    assert [file.path for file in scan.files] == [good.path]
    assert store.held_bytes == good.num_bytes
    for seed in range(2, 8):
        saved(store, draft_of(tokens_of(seed, 40)))
    assert store.held_bytes <= 2 * good.num_bytes
    assert (folder / "0folder.kv").is_dir()


def test_a_file_that_became_a_pipe_is_damaged(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    file = saved(store, draft_of(tokens_of(1, 40), hidden=HIDDEN))
    file.path.unlink()
    os.mkfifo(file.path)
    for read in (lambda: file.read(0), file.read_hidden):
        with pytest.raises(Damaged, match="it is no file"):
            read()


# --- disks that say no ----------------------------------------------------------------------------


def refusing(number: int) -> Callable[..., Any]:
    def refuse(*_: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return refuse


@pytest.mark.parametrize("name", ["write", "fsync", "rename"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_what_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    store = store_in(tmp_path)
    saved(store, draft_of(tokens_of(8, 40)))
    before = store.held_bytes
    with monkeypatch.context() as patch:
        patch.setattr(os, name, refusing(number))
        with pytest.raises(OSError, match=os.strerror(number)):
            store.save(draft_of(tokens_of(9, 40)))
    assert store.held_bytes == before
    assert len(os.listdir(tmp_path / KIND.identity.hex())) == 1
    saved(store, draft_of(tokens_of(9, 40)))
    assert len(store_in(tmp_path).scan().files) == 2


def test_a_file_that_cannot_be_read_or_removed_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [saved(store_in(tmp_path), draft_of(tokens_of(seed, 40))) for seed in range(6)]
    first, second, *rest = sorted(file.path for file in files)
    first.write_bytes(b"damaged")
    whole = os.open

    def locked(path: Any, *flags: Any) -> int:
        return refusing(errno.EACCES)() if path == second else whole(path, *flags)

    monkeypatch.setattr(os, "open", locked)
    monkeypatch.setattr(Path, "unlink", refusing(errno.EROFS))
    scan = store_in(tmp_path).scan()
    assert [file.path for file in scan.files] == rest
    assert scan.num_damaged == 1
    assert scan.problem == f"{second}: Permission denied"


def test_a_folder_that_there_cannot_be_is_no_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("in the way")
    store = store_in(tmp_path / "there" / "none")
    assert store.scan().files == ()
    with pytest.raises(OSError, match="Not a directory"):
        store.save(draft_of(tokens_of(1, 40)))


def test_what_a_dead_process_left_unfinished_goes_and_what_is_written_stays(tmp_path: Path) -> None:
    import fcntl

    saved(store_in(tmp_path), draft_of(tokens_of(1, 40)))
    folder = tmp_path / KIND.identity.hex()
    (folder / "dead.part").write_bytes(b"half")
    (tmp_path / "another model").mkdir()
    (tmp_path / "another model" / "dead.part").write_bytes(b"half")
    with (folder / "alive.part").open("wb") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)
        store_in(tmp_path).scan()
        assert not list(tmp_path.glob("*/dead.part"))
        assert (folder / "alive.part").exists()


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.null.test_prefix_store import draft_of, saved, store_in, tokens_of
store = store_in(Path(sys.argv[1]))
for seed in range(100000):
    saved(store, draft_of(tokens_of(seed, 300), hidden=b"hidden.."))
    print(seed, flush=True)
"""


def test_killing_a_writer_costs_what_it_was_writing(tmp_path: Path) -> None:
    here = str(Path(__file__).parents[2])
    for _ in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), here], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        done = [int(child.stdout.readline()) for _ in range(20)]
        child.send_signal(signal.SIGKILL)
        done += map(int, child.stdout.read().split())
        child.wait()
        child.stdout.close()
        scan = store_in(tmp_path).scan()
        assert (scan.num_damaged, scan.problem) == (0, "")
        assert {tokens_of(seed, 300) for seed in done} <= {
            tuple(file.tokens) for file in scan.files
        }
        for file in scan.files:
            assert contents(file) == draft_of(tuple(file.tokens)).data
        assert not list(tmp_path.glob("*/*.part"))


# --- room -----------------------------------------------------------------------------------------


def test_what_was_used_last_stays_longest(tmp_path: Path) -> None:
    one = saved(store_in(tmp_path), draft_of(tokens_of(0, 300))).num_bytes
    store = store_in(tmp_path, 10 * one)
    store.scan()
    files = [saved(store, draft_of(tokens_of(seed, 300))) for seed in range(1, 10)]
    for number, file in enumerate(files):  # a file system may know no more than ticks
        os.utime(file.path, (1000 + number, 1000 + number))
    store.used([files[0], files[3]])
    gone = store.save(draft_of(tokens_of(10, 300))).gone
    assert files[1].path in gone
    assert not {files[0].path, files[3].path, files[8].path} & set(gone)
    held = sum(path.stat().st_size for path in tmp_path.glob("*/*.kv"))
    assert held == store.held_bytes <= 10 * one
    assert all(not path.exists() for path in gone)
    assert store.save(draft_of(tokens_of(11, 4000))).file is None  # it alone is too much
    assert store.held_bytes == held


def test_processes_that_share_a_folder_share_its_room(tmp_path: Path) -> None:
    one = saved(store_in(tmp_path), draft_of(tokens_of(0, 300))).num_bytes
    most, stores = 50 * one, [store_in(tmp_path, 50 * one) for _ in range(3)]
    for store in stores:
        store.scan()
    for seed in range(1, 300):
        saved(stores[seed % 3], draft_of(tokens_of(seed, 300)))
        held = sum(path.stat().st_size for path in tmp_path.glob("*/*.kv"))
        assert held <= most + 2 * most // 16  # what two of them have not told the third


def test_a_bound_that_became_smaller_holds_from_the_start(tmp_path: Path) -> None:
    files = [saved(store_in(tmp_path), draft_of(tokens_of(seed, 300))) for seed in range(10)]
    for number, file in enumerate(files):
        os.utime(file.path, (1000 + number, 1000 + number))
    store = store_in(tmp_path, 4 * files[0].num_bytes)
    scan = store.scan()
    assert {file.path for file in scan.files} == {file.path for file in files[7:]}
    assert scan.num_gone == 7
    assert store.held_bytes == 3 * files[0].num_bytes


def test_the_bound_holds_whatever_the_clock_says(tmp_path: Path) -> None:
    """Files of a time to come were not used less lately than one that is written now."""
    one = saved(store_in(tmp_path), draft_of(tokens_of(0, 300)))
    store = store_in(tmp_path, 10 * one.num_bytes)
    for seed in range(1, 40):
        file = saved(store, draft_of(tokens_of(seed, 300)))
        assert file.path.exists()
        assert sum(path.stat().st_size for path in tmp_path.glob("*/*.kv")) <= 10 * one.num_bytes
        os.utime(file.path, (1 << 33, 1 << 33))


def test_models_share_the_room(tmp_path: Path) -> None:
    other = replace(KIND, identity=b"another identity")
    first = saved(store_in(tmp_path, kind=other), draft_of(tokens_of(0, 300)))
    os.utime(first.path, (1000, 1000))
    store = store_in(tmp_path, first.num_bytes + 10)
    store.scan()
    assert store.held_bytes == first.num_bytes
    saved(store, draft_of(tokens_of(1, 300)))
    assert not first.path.exists()


# --- what is where --------------------------------------------------------------------------------


def test_a_prompt_finds_what_it_has_in_common(tmp_path: Path) -> None:
    store, catalogue = store_in(tmp_path), Catalogue()
    tokens = tokens_of(1, 100)
    first = saved(store, draft_of(tokens[:80]))
    catalogue.add(first)
    names = draft_of(tokens).names()
    assert catalogue.find(names, 0) == [Stretch(first, 0, 80)]
    assert catalogue.find(names, 20) == [Stretch(first, 20, 80)]
    assert catalogue.find(names, 90) == []
    later = saved(store, draft_of(tokens, 80, hidden=HIDDEN))
    catalogue.add(later)
    assert catalogue.find(names, 0) == [Stretch(first, 0, 80), Stretch(later, 80, 96)]
    assert catalogue.end(later.end) is later
    assert catalogue.end(names[-1]) is None
    diverging = (*tokens[:40], *tokens_of(2, 60))
    assert catalogue.find(draft_of(diverging).names(), 0) == [Stretch(first, 0, 32)]
    assert catalogue.find(draft_of(tokens, parent=root("tenant")).names(), 0) == []
    catalogue.drop(first.path)
    assert catalogue.find(names, 0) == []
    assert catalogue.find(names, 80) == [Stretch(later, 80, 96)]  # the rest is in memory
    catalogue.drop(later.path)
    assert len(catalogue) == 0
    assert catalogue.end(later.end) is None
