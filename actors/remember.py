"""Prefixes that outlive their sequences and their process: from pages to files, and back.

What a prompt's steps computed is copied out after them, while the sequence has its seats, and
written beside the steps to come. A prompt that begins like one of those is filled in when it gets
its seats, between two steps, wherever blocks are by then. Whatever goes wrong with a file costs
computing what it would have saved. Knows devices, parcels and files. Decides nothing about who
runs.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from time import perf_counter
from typing import Any

from actors.beside import beside
from actors.charge import HostCharge
from actors.mailbox import Stopped
from actors.messages.device import Pack, Parcel, Piece, Restore
from actors.park import packed
from actors.route import Route
from jitllm.engine import PrefixTotals
from jitllm.errors import JitllmError, OutOfPages
from jitllm.log import logger
from jitllm.memory.prefix import extend
from jitllm.memory.prefix_file import (
    GRANULE_TOKENS,
    Damaged,
    Draft,
    PrefixFile,
    end_digest,
)
from jitllm.memory.prefix_store import Catalogue, PrefixFolder, PrefixStore, Saved, Scan, Stretch
from jitllm.schedule.sequence import Sequence as TokenStream

FILE_TOKENS, FILE_BYTES = 256, 8 << 20
"""Most positions of a file, and what they may take; but for one piece, which may take more."""

WAITING_BYTES = 64 << 20
"""What may wait for the disk at once. It is charged to the host's budget while it does."""

CHARGED_AS = "prefixes"

_PIECES_AHEAD = 2

_ROOM = "raise -kv-cache-max"

_REMEDY = "free some space, or name another folder with -kv-cache"

_log = logger(__name__)


@dataclass(slots=True)
class _Trail:
    """A sequence as the cache knows it. digests: of its tokens so far, one for each granule.

    num_kept: positions that are in files, or on their way there. is_over: no more of it is stored.
    """

    digests: list[bytes] = field(default_factory=list)
    num_kept: int = 0
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class _Job:
    """A piece of a file to be read, and which positions of it are wanted."""

    file: PrefixFile
    number: int
    start: int
    stop: int
    first: int
    last: int

    def read(self, _: object = None) -> bytes | Exception:
        """The whole piece, or why there is none."""
        try:
            return self.file.read(self.number)
        except (Damaged, OSError) as error:
            return error


class PrefixCache:
    """The prefixes of one model on disk; without a folder there are none.

    undisturbed: nothing is on its way between devices within it. others: lets the sequences that
    run have a step. begin: runs work beside the actor's handler. wake: called when the budget is to
    be charged anew.
    """

    def __init__(
        self,
        route: Route,
        folder: PrefixFolder | None,
        undisturbed: Callable[[], AbstractAsyncContextManager[None]],
        others: Callable[[], Awaitable[None]],
        begin: Callable[[Coroutine[Any, Any, object], str], None],
        wake: Callable[[], None],
    ) -> None:
        self._route = route
        self._store = None if folder is None else PrefixStore(folder)
        self._undisturbed = undisturbed
        self._others = others
        self._begin = begin
        self._wake = wake
        self._charge = HostCharge(route, CHARGED_AS)
        self._scanned = asyncio.Event()
        self._catalogue = Catalogue()
        self._trails: dict[int, _Trail] = {}
        self._hidden: dict[int, bytes] = {}
        self._drafts: deque[Draft] = deque()
        self._coming: set[bytes] = set()  # digests of what waits for the disk
        self._is_writing = False
        self._said: set[str] = set()
        self._waiting_bytes = self._reading_bytes = 0  # for the disk, from the disk
        self.totals = PrefixTotals()

    @property
    def held_bytes(self) -> int:
        """What files of all models in the folder take."""
        return 0 if self._store is None else self._store.held_bytes

    @property
    def waiting_bytes(self) -> int:
        """What is on its way between memory and disk, and charged to the host's budget."""
        return max(self._waiting_bytes + self._reading_bytes, self._charge.num_bytes)

    async def scan(self) -> None:
        """Find out what is there; prompts wait for it."""
        if (store := self._store) is None:
            return
        try:
            found: Scan = await beside(lambda _: store.scan())
            for file in found.files:
                self._catalogue.add(file)
            self._count(
                damaged=found.num_damaged,
                evictions=found.num_gone,
                failures=bool(found.problem),
            )
            if found.num_damaged:
                _log.warning("%s: %d damaged files are passed over", store.root, found.num_damaged)
            if found.problem:
                self._warn(found.problem)
        finally:
            self._scanned.set()

    def forget(self, sequence: int) -> None:
        """A sequence has ended."""
        self._trails.pop(sequence, None)
        self._hidden.pop(sequence, None)

    async def charge(self) -> None:
        """Take what waits for the disk, or comes from it, from the budget of this host."""
        await self._charge.set(self._waiting_bytes + self._reading_bytes)

    async def close(self) -> None:
        """Write what still waits; whoever wrote was cancelled."""
        await self._write_all()

    # --- in ----------------------------------------------------------------------------------

    async def restore(self, sequence: TokenStream, num_cached: int) -> int:
        """Fill in what follows the first `num_cached` positions of a sequence that got its seats.

        Returns how many positions are there then. All of them: `take_hidden` has what the reply
        begins with. Steps of others go on meanwhile. Raises `Stopped` when a device dies.
        """
        if (store := self._store) is None or sequence.all_outputs:
            return num_cached
        await self._scanned.wait()
        began_s = perf_counter()
        hidden, end = await self._end(sequence)
        stretches, stop = self._plan(sequence, num_cached, end)
        jobs, reached, num_bytes = list(_jobs(stretches)), num_cached, 0
        async with self._charged(len(jobs)), aclosing(_read(jobs)) as reading:
            async for job, data in reading:
                if isinstance(data, Exception):
                    await self._lose(job.file, data)
                    break
                try:
                    await self._deliver(sequence, job, data)
                except Stopped:
                    raise
                except OutOfPages:  # its steps say so too
                    break
                except JitllmError as error:
                    self._count(failures=1)
                    self._warn(str(error))
                    break
                reached, num_bytes = job.last, num_bytes + len(data)
                await self._others()
        is_whole = end is not None and reached == stop == sequence.num_tokens
        is_hit = is_whole or reached > num_cached
        if is_whole:
            self._hidden[sequence.id] = hidden
        if is_hit:
            files = dict.fromkeys(
                [*(stretch.file for stretch in stretches), *([end] if end else [])]
            )
            self._begin(beside(lambda _: store.used(files)), "note what was used")
        self._count(
            hits=is_hit,
            misses=not is_hit and sequence.num_tokens - num_cached > GRANULE_TOKENS,
            whole=is_whole,
            tokens=reached - num_cached,
            bytes_in=num_bytes,
            restore_s=perf_counter() - began_s,
        )
        return reached

    def take_hidden(self, sequence: int) -> bytes | None:
        """The hidden state of the last token of a prompt that is all there; once."""
        return self._hidden.pop(sequence, None)

    async def _end(self, sequence: TokenStream) -> tuple[bytes, PrefixFile | None]:
        """The hidden state of the last token, and the file that ends with it, if there is one."""
        if (file := self._catalogue.end(self._end_digest(sequence, sequence.num_tokens))) is None:
            return b"", None
        try:
            return await beside(lambda _: file.read_hidden()), file
        except (Damaged, OSError) as error:
            await self._lose(file, error)
            return b"", None

    def _plan(
        self, sequence: TokenStream, num_cached: int, end: PrefixFile | None
    ) -> tuple[list[Stretch], int]:
        """What to fill in, and up to where. Without its end, the last token is computed."""
        most = sequence.num_tokens - (end is None)
        digests = self._trail(sequence).digests[: most // GRANULE_TOKENS]
        stretches = self._catalogue.find(digests, num_cached)
        stop = max(num_cached, stretches[-1].stop if stretches else 0)
        if end is not None and end.start <= stop and sequence.num_tokens - stop < GRANULE_TOKENS:
            if stop < sequence.num_tokens:
                stretches.append(Stretch(end, stop, sequence.num_tokens))
            stop = sequence.num_tokens
        return stretches, stop

    @asynccontextmanager
    async def _charged(self, num_pieces: int) -> AsyncIterator[None]:
        """Charge what is read ahead of its use; that it is over is known at the next turn."""
        assert self._store is not None
        kind, most = self._store.kind, min(num_pieces, 1 + _PIECES_AHEAD)
        self._reading_bytes = most * kind.piece_tokens * kind.position_bytes
        try:
            await self.charge()
            yield
        finally:
            self._reading_bytes = 0
            self._wake()

    async def _deliver(self, sequence: TokenStream, job: _Job, data: bytes) -> None:
        """Hand a piece to whoever owns its blocks; who has the head needs the tokens."""
        assert self._store is not None
        kind, count = self._store.kind, job.stop - job.start
        named = (Piece(sequence.id, job.start, job.file.piece_tokens(job.start, job.stop)),)
        epoch = self._route.placement.epoch
        for name, blocks in self._route.owners().items():
            groups = kind.groups(blocks, count)
            for number, group in enumerate(groups, 1):
                part = _cut(data, kind.runs(group, count))
                parcel = Parcel(group, named, part, 0.0, epoch, 0)
                whole = job.last if number == len(groups) else 0
                restore = Restore(parcel, job.first, job.last, whole)
                await self._route.sites[name].device.ask(restore)

    async def _lose(self, file: PrefixFile, error: Exception) -> None:
        """A file cannot be read: it is as if it were not there."""
        assert (store := self._store) is not None
        self._catalogue.drop(file.path)
        if isinstance(error, FileNotFoundError):
            return  # another process needed the room
        if isinstance(error, Damaged):
            await beside(lambda _: store.remove(file))
            self._count(damaged=1)
        else:
            self._count(failures=1)
        self._warn(f"a prefix is computed again: {_reason(error)}")

    # --- out ---------------------------------------------------------------------------------

    def wants_hidden(self, sequence: TokenStream, stop: int) -> bool:
        """Whether the step that computes positions up to `stop` should hand out the hidden state
        of the last of them."""
        if self._store is None or sequence.all_outputs:
            return False
        is_end = stop == sequence.num_prompt == sequence.num_tokens >= GRANULE_TOKENS
        if not is_end or stop > self._store.most_tokens or self._trail(sequence).is_over:
            return False
        return not self._has_end(self._end_digest(sequence, stop))

    async def keep(
        self, sequence: TokenStream, *, hidden: bytes = b"", is_over: bool = False
    ) -> None:
        """Store what is computed of a sequence, after a step: what fills a file, and at the end of
        its prompt and of its reply the rest.

        hidden: of the last token of its prompt, which is all that is computed of it. Raises
        `Stopped` when a device dies.
        """
        if self._store is None or sequence.all_outputs or (trail := self._trail(sequence)).is_over:
            return
        computed = min(sequence.num_computed, self._store.most_tokens)
        if computed < sequence.num_computed:
            hidden, is_over, trail.is_over = b"", True, True
            self._count(skipped=1)
            self._warn(f"no more of a prompt is stored than {computed} tokens; {_ROOM}")
        cut = GRANULE_TOKENS if is_over or computed >= sequence.num_prompt else self._file_tokens
        stop = computed if hidden else computed - computed % cut
        start = trail.num_kept
        while start + GRANULE_TOKENS <= stop and self._has(trail.digests[start // GRANULE_TOKENS]):
            start += GRANULE_TOKENS
        trail.num_kept = start
        while start < stop or hidden:
            cut = min(start - start % self._file_tokens + self._file_tokens, stop)
            ending = hidden if cut == stop else b""
            if not await self._store_some(sequence, trail, start, cut, ending):
                trail.is_over = True
                return
            start = cut
            trail.num_kept = start - start % GRANULE_TOKENS
            if cut == stop:
                return

    @property
    def _file_tokens(self) -> int:
        assert self._store is not None
        size = self._store.kind.piece_tokens
        num_pieces = FILE_BYTES // max(self._store.kind.position_bytes * size, 1)
        return min(max(num_pieces, 1) * size, FILE_TOKENS)

    async def _store_some(
        self, sequence: TokenStream, trail: _Trail, start: int, stop: int, hidden: bytes
    ) -> bool:
        """Copy positions out and have them written; False if that cannot be: too much waits for the
        disk, say."""
        assert self._store is not None
        num_bytes = (stop - start) * self._store.kind.position_bytes + len(hidden)
        if self._drafts and self._waiting_bytes + num_bytes > WAITING_BYTES:
            self._count(skipped=1)
            return False
        self._waiting_bytes += num_bytes
        try:
            await self.charge()
            async with self._undisturbed():
                data = await self._packed(sequence, start, stop)
        except BaseException as error:
            self._waiting_bytes -= num_bytes
            if isinstance(error, Stopped) or not isinstance(error, JitllmError):
                raise
            self._count(failures=1)
            self._warn(f"a prefix was not stored: {error}")
            return False
        parent = trail.digests[start // GRANULE_TOKENS - 1] if start else sequence.namespace
        draft = Draft(parent, start, tuple(sequence.tokens[start:stop]), data, hidden)
        self._coming.update(draft.names())
        self._drafts.append(draft)
        if not self._is_writing:
            self._is_writing = True
            self._begin(self._write_all(), "write prefixes")
        return True

    async def _packed(self, sequence: TokenStream, start: int, stop: int) -> bytearray:
        """Keys and values of positions, as they lie in a file."""
        assert self._store is not None
        kind, epoch = self._store.kind, self._route.placement.epoch
        whole = bytearray((stop - start) * kind.position_bytes)
        view = memoryview(whole)
        for first, last in kind.pieces(start, stop):
            count = last - first
            named = (Piece(sequence.id, first, tuple(sequence.tokens[first:last])),)
            room = view[(first - start) * kind.position_bytes :]
            for name, blocks in self._route.owners().items():
                device = self._route.sites[name].device
                for group in kind.groups(blocks, count) if blocks else ():
                    rest = memoryview(await packed(device, Pack(group, named, True, epoch, 0)))
                    for offset, num_bytes in kind.runs(group, count):
                        room[offset : offset + num_bytes] = rest[:num_bytes]
                        rest = rest[num_bytes:]
        return whole

    # --- the disk ----------------------------------------------------------------------------

    async def _write_all(self) -> None:
        """Write what waits, one after the other."""
        while self._drafts:
            await self._write(self._drafts[0])
            draft = self._drafts.popleft()
            self._waiting_bytes -= draft.num_bytes
            self._coming.difference_update(draft.names())
            self._wake()
        self._is_writing = False

    async def _write(self, draft: Draft) -> None:
        assert (store := self._store) is not None
        if draft.start and draft.parent not in self._catalogue:
            self._count(skipped=1)  # nobody would find it: what it builds on could not be stored
            return
        try:
            saved: Saved = await beside(lambda _: store.save(draft))
        except OSError as error:
            self._count(failures=1)
            self._warn(f"a prefix was not stored in {store.root}: {_reason(error)}; {_REMEDY}")
            return
        except Exception:  # nobody may wait for a mistake of ours
            self._count(failures=1)
            _log.exception("a prefix was not stored")
            return
        for path in saved.gone:
            self._catalogue.drop(path)
        self._count(evictions=len(saved.gone))
        if saved.file is None:
            self._count(skipped=1)
            self._warn(f"a prefix is larger than all of them may be; {_ROOM}")
            return
        self._catalogue.add(saved.file)
        self._count(files=1, bytes_out=saved.file.num_bytes)

    # --- names -------------------------------------------------------------------------------

    def _trail(self, sequence: TokenStream) -> _Trail:
        """With a digest for each granule of its tokens by now."""
        trail = self._trails.setdefault(sequence.id, _Trail())
        digests, size = trail.digests, GRANULE_TOKENS
        while (stop := (len(digests) + 1) * size) <= sequence.num_tokens:
            last = digests[-1] if digests else sequence.namespace
            digests.append(extend(last, sequence.tokens[stop - size : stop]))
        return trail

    def _end_digest(self, sequence: TokenStream, stop: int) -> bytes:
        """The name of its first `stop` tokens as a whole prompt."""
        number = stop // GRANULE_TOKENS
        last = self._trail(sequence).digests[number - 1] if number else sequence.namespace
        return end_digest(last, sequence.tokens[number * GRANULE_TOKENS : stop])

    def _has(self, digest: bytes) -> bool:
        """Whether a granule is in a file, or will be."""
        return digest in self._catalogue or digest in self._coming

    def _has_end(self, digest: bytes) -> bool:
        return self._catalogue.end(digest) is not None or digest in self._coming

    def _count(self, **more: float) -> None:
        totals = {name: getattr(self.totals, name) + number for name, number in more.items()}
        self.totals = replace(self.totals, **totals)

    def _warn(self, text: str) -> None:
        """Say it once: what is wrong with a disk is wrong with every file."""
        level_is_new = text not in self._said and len(self._said) < 100
        self._said.add(text)
        (_log.warning if level_is_new else _log.debug)("%s", text)


def _jobs(stretches: Iterable[Stretch]) -> Iterator[_Job]:
    """The pieces that stretches lie in, in order."""
    for stretch in stretches:
        for number, (start, stop) in enumerate(stretch.file.pieces()):
            first, last = max(start, stretch.start), min(stop, stretch.stop)
            if first < last:
                yield _Job(stretch.file, number, start, stop, first, last)


async def _read(jobs: Sequence[_Job]) -> AsyncGenerator[tuple[_Job, bytes | Exception], None]:
    """Pieces in order; those that come next are read while one is used."""
    rest = iter(jobs)
    coming: deque[tuple[_Job, asyncio.Task[bytes | Exception]]] = deque()
    try:
        while True:
            for job in islice(rest, 1 + _PIECES_AHEAD - len(coming)):
                coming.append((job, asyncio.create_task(beside(partial(_Job.read, job)))))
            if not coming:
                return
            job, reading = coming[0]
            data = await reading
            coming.popleft()
            yield job, data
    finally:
        for _, reading in coming:
            reading.cancel()
        await asyncio.gather(*(reading for _, reading in coming), return_exceptions=True)


def _cut(data: bytes, runs: Iterable[tuple[int, int]]) -> bytes:
    """Those parts of a piece, one after the other."""
    parts = [data[offset : offset + num_bytes] for offset, num_bytes in runs]
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
