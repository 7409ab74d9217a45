"""The prefix cache on devices that compute nothing, and that die: replies stay, files are right."""

from __future__ import annotations

import asyncio
import errno
import os
import random
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from actors.client import Client
from actors.local import LocalRef
from actors.mailbox import Lost
from actors.messages.device import Close, Open, Pack, Parcel, Restore, Step, StepDone, Unpacked
from actors.messages.pager import Reserve
from actors.messages.scheduler import SchedulerStatsRequest
from jitllm.engine import Finish, Request, SchedulerStats
from jitllm.memory.prefix_file import Draft, PrefixKind, decode
from jitllm.memory.prefix_store import PrefixFolder, PrefixStore, Saved
from tests.actors.test_losses import MortalDevice, at, ever
from tests.actors.test_park import content, whole
from tests.actors.test_scheduler import all_of, scheduling, tokens

KV_BYTES = (3, 2)
KIND = PrefixKind(b"the null model..", KV_BYTES, 4)
PROMPT = tuple(random.Random(3).choices(range(1, 900), k=300))


@dataclass
class RememberingDevice(MortalDevice):
    """Keys and values of a position are made of its block and its token, hidden states of the token
    alone.

    held: what a sequence has in its pages, by position. log: what came, in order.
    """

    log: list[str] = field(default_factory=list)
    num_computed: int = 0
    reserved: int = 0

    async def receive(self, message: Any) -> object:
        """See `actors.messages`."""
        if isinstance(message, Reserve):
            self.reserved = message.num_bytes
            return None
        if isinstance(message, Step | Restore | Pack):
            self.log.append(type(message).__name__)
        if isinstance(message, Pack | Restore):
            return self._carry(message)
        if isinstance(message, Step):
            if any(span.sequence not in self.promised for span in message.spans):
                raise Lost("device")
            if message.start == message.stop:
                [span] = message.spans
                assert message.hidden == hidden_of(span.tokens[-1])
                self.computed[span.sequence] -= 1  # its blocks have seen it already
            else:
                self.num_computed += sum(len(span.tokens) for span in message.spans)
        reply = await super().receive(message)
        if isinstance(message, Step) and isinstance(reply, StepDone):
            rows = tuple(
                (span.sequence, hidden_of(span.tokens[-1]))
                for span in message.spans
                if span.sequence in message.last_hidden
            )
            return StepDone(reply.step_id, reply.results, (), last_hidden=rows)
        return reply

    def _carry(self, message: Pack | Restore) -> Parcel | Unpacked:
        if self.dies(message):
            self.num_deaths += 1
            self.promised.clear()
            self.computed.clear()
            raise Lost("device")
        if isinstance(message, Pack):
            [piece] = message.pieces
            assert piece.stop <= self.computed[piece.sequence]
            data = content(message.blocks, piece)
            return Parcel(message.blocks, (piece,), data, 0.0, message.epoch, message.number)
        [piece] = message.parcel.pieces
        if piece.sequence not in self.promised:
            raise Lost("device")
        assert message.parcel.data == content(message.parcel.blocks, piece)
        assert piece.start <= message.start == self.computed[piece.sequence] < piece.stop
        assert message.whole == message.stop <= piece.stop
        self.computed[piece.sequence] = message.stop
        return Unpacked(1, 0.0)


def hidden_of(token: int) -> bytes:
    return token.to_bytes(4, "little")


@asynccontextmanager
async def remembering(
    device: RememberingDevice, folder: Path, max_bytes: int = 0, **choices: Any
) -> AsyncIterator[tuple[Client, LocalRef]]:
    """A client and a scheduler with a prefix cache."""
    kept = {"kv_bytes": KV_BYTES, "prefixes": PrefixFolder(folder, max_bytes, KIND)}
    async with scheduling(device, **kept, **choices) as (client, ref):
        yield client, ref
        await client.close()  # which writes what still waits


async def totals_of(ref: LocalRef) -> Any:
    stats: SchedulerStats = await ref.ask(SchedulerStatsRequest())
    return stats.prefix_totals


async def written(ref: LocalRef) -> SchedulerStats:
    """Once nothing waits for the disk."""
    while True:
        stats: SchedulerStats = await ref.ask(SchedulerStatsRequest())
        if not stats.prefix_waiting_bytes:
            return stats
        await asyncio.sleep(0.001)


def check_files(folder: Path) -> None:
    """Every file says what its tokens lead to."""
    paths = list(folder.glob("*/*.kv"))
    assert paths
    for path in paths:
        file = decode(path, KIND)
        for number, (start, stop) in enumerate(file.pieces()):
            named = file.piece_tokens(start, stop)
            expected = b"".join(
                bytes((block + 7 * token) % 251 for token in named) * KV_BYTES[block]
                for block in range(len(KV_BYTES))
            )
            assert file.read(number) == expected
        if file.has_end:
            assert file.read_hidden() == hidden_of(file.tokens[-1])


def held_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*/*.kv"))


def check_use(folder: Path) -> None:
    """Every file can be found: what it builds on is there too."""
    files = [decode(path, KIND) for path in folder.glob("*/*.kv")]
    known = {digest for file in files for digest in file.digests}
    assert all(file.start == 0 or file.parent in known for file in files)


REQUESTS = (
    Request(PROMPT, max_tokens=40),
    Request(PROMPT[:200], max_tokens=3),
    Request((*PROMPT[:150], *PROMPT[:100]), max_tokens=20),
    Request(PROMPT[:10], max_tokens=50),
)


async def test_what_one_scheduler_has_stored_the_next_one_fills_in(tmp_path: Path) -> None:
    for computed in (sum(len(r.prompt) + (r.max_tokens or 0) - 1 for r in REQUESTS[:1]), 39):
        device = RememberingDevice()
        async with remembering(device, tmp_path) as (client, ref):
            assert tokens(await all_of(client, REQUESTS[0])) == whole(REQUESTS[0])
            assert device.num_computed == computed
            totals = (await written(ref)).prefix_totals
            assert device.reserved == 0
        assert device.promised == {}
        check_files(tmp_path)
    assert (totals.whole, totals.tokens, totals.failures) == (1, len(PROMPT), 0)
    device = RememberingDevice()
    async with remembering(device, tmp_path) as (client, ref):
        for request in REQUESTS[1:]:
            assert tokens(await all_of(client, request)) == whole(request)
        assert (await totals_of(ref)).tokens == 192 + 144  # of 200, and of 150 in common


@pytest.mark.parametrize("kind", [Pack, Restore, Step, Open, Close])
@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize("late", [False, True])
async def test_no_reply_changes_when_a_device_dies_of_it(
    tmp_path: Path, kind: Any, number: int, late: bool
) -> None:
    async with remembering(RememberingDevice(), tmp_path) as (client, _):
        await all_of(client, Request(PROMPT[:250], max_tokens=2))
    device = RememberingDevice(dies=at(kind, number), late=late)
    async with remembering(device, tmp_path) as (client, ref):
        replies = await asyncio.gather(*(all_of(client, request) for request in REQUESTS))
        for request, deltas in zip(REQUESTS, replies, strict=True):
            assert tokens(deltas) == whole(request)
            assert deltas[-1].finish is Finish.LENGTH
        assert tokens(await all_of(client, REQUESTS[0])) == whole(REQUESTS[0])
        assert (await totals_of(ref)).failures == 0
    assert device.num_deaths == 1
    assert device.promised == {}
    check_files(tmp_path)


@pytest.mark.parametrize("seed", range(10))
async def test_no_reply_changes_whenever_it_dies(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    device = RememberingDevice(dies=ever(dice, 150), late=dice.random() < 0.5)
    async with remembering(device, tmp_path) as (client, _):
        for _ in range(2):
            replies = await asyncio.gather(*(all_of(client, request) for request in REQUESTS))
            for request, deltas in zip(REQUESTS, replies, strict=True):
                assert [deltas[-1].error, *tokens(deltas)] == [None, *whole(request)]
    assert device.promised == {}
    check_files(tmp_path)


async def test_replies_go_on_while_a_long_history_is_filled_in(tmp_path: Path) -> None:
    async with remembering(RememberingDevice(), tmp_path) as (client, _):
        await all_of(client, REQUESTS[0])
    device = RememberingDevice()
    async with (
        remembering(device, tmp_path) as (client, _),
        aclosing(client.generate(Request((1,), max_tokens=400))) as other,
    ):
        await anext(other)
        device.log.clear()
        assert tokens(await all_of(client, REQUESTS[0])) == whole(REQUESTS[0])
    first, last = device.log.index("Restore"), len(device.log) - device.log[::-1].index("Restore")
    assert "Step" in device.log[first:last]


async def test_a_client_that_goes_while_its_prompt_is_filled_in_leaves_nothing(
    tmp_path: Path,
) -> None:
    async with remembering(RememberingDevice(), tmp_path) as (client, _):
        await all_of(client, REQUESTS[0])
    for num_turns in range(0, 60, 3):
        device = RememberingDevice()
        async with remembering(device, tmp_path) as (client, ref):
            task = asyncio.create_task(all_of(client, REQUESTS[0]))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert tokens(await all_of(client, REQUESTS[1])) == whole(REQUESTS[1])
            stats = await written(ref)
            assert (stats.running, stats.waiting, device.reserved) == (0, 0, 0)
        assert device.promised == {}


@pytest.mark.parametrize("max_bytes", [1, 100, 600, 1200, 2000])
async def test_of_a_prompt_larger_than_the_room_its_beginning_is_stored(
    tmp_path: Path, max_bytes: int
) -> None:
    """Once, and not its end in place of what that builds on."""
    stored = []
    for _ in range(3):
        async with remembering(RememberingDevice(), tmp_path, max_bytes) as (client, ref):
            assert tokens(await all_of(client, REQUESTS[0])) == whole(REQUESTS[0])
            await written(ref)
            totals = await totals_of(ref)
        stored.append((totals.files, totals.tokens))
        check_use(tmp_path)
        assert held_bytes(tmp_path) <= max_bytes
        assert (totals.skipped > 0) == (totals.evictions == 0) == (totals.failures == 0)
    assert stored[1] == stored[2] == (0, stored[1][1])
    assert (stored[1][1] > 0) == (max_bytes >= 600)


@pytest.mark.parametrize("number", range(4))
async def test_what_builds_on_a_file_that_could_not_be_written_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    save, count = PrefixStore.save, 0

    def failing(self: PrefixStore, draft: Draft) -> Saved:
        nonlocal count
        count += 1
        if count == 1 + number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return save(self, draft)

    monkeypatch.setattr("actors.remember.FILE_TOKENS", 64)
    monkeypatch.setattr(PrefixStore, "save", failing)
    async with remembering(RememberingDevice(), tmp_path) as (client, ref):
        assert tokens(await all_of(client, REQUESTS[0])) == whole(REQUESTS[0])
        totals = (await written(ref)).prefix_totals
    check_use(tmp_path)
    assert (totals.files, totals.failures) == (number, 1)
    assert totals.skipped > 0
    async with remembering(RememberingDevice(), tmp_path) as (client, ref):  # the disk takes it now
        assert tokens(await all_of(client, REQUESTS[0])) == whole(REQUESTS[0])
        await written(ref)
    check_use(tmp_path)
    async with remembering(RememberingDevice(), tmp_path) as (client, ref):
        assert tokens(await all_of(client, REQUESTS[0])) == whole(REQUESTS[0])
        assert (await totals_of(ref)).whole == 1
