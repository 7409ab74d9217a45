"""The mailbox: order, bound, closing, and what cancelling leaves behind."""

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.mailbox import Mailbox, MailboxStatistics, Stopped


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_what_is_put_first_is_taken_first() -> None:
    box: Mailbox[int] = Mailbox("box", 10)
    for number in range(5):
        await box.put(number)
    assert [await box.take() for _ in range(5)] == [0, 1, 2, 3, 4]


async def test_a_full_mailbox_delays_and_never_reorders() -> None:
    box: Mailbox[int] = Mailbox("box", 2)
    senders = [asyncio.create_task(box.put(number)) for number in range(6)]
    await settle()
    assert [sender.done() for sender in senders] == [True, True, False, False, False, False]
    assert box.statistics() == MailboxStatistics(
        num_queued=2, max_queued=2, num_waiting=4, peak_queued=2, num_put=2, is_closed=False
    )
    assert await box.take() == 0
    late = asyncio.create_task(box.put(6))
    await settle()
    assert [await box.take() for _ in range(6)] == [1, 2, 3, 4, 5, 6]
    await asyncio.gather(*senders, late)


@given(
    counts=st.lists(st.integers(1, 8), min_size=1, max_size=5),
    max_queued=st.integers(1, 4),
    pauses=st.randoms(use_true_random=False),
)
def test_each_sender_keeps_its_order(
    counts: list[int], max_queued: int, pauses: random.Random
) -> None:
    async def send(box: Mailbox[tuple[int, int]], sender: int, count: int) -> None:
        for number in range(count):
            await box.put((sender, number))
            for _ in range(pauses.randrange(3)):
                await asyncio.sleep(0)

    async def main() -> list[tuple[int, int]]:
        box: Mailbox[tuple[int, int]] = Mailbox("box", max_queued)
        taken = []
        async with asyncio.TaskGroup() as group:
            for sender, count in enumerate(counts):
                group.create_task(send(box, sender, count))
            for _ in range(sum(counts)):
                taken.append(await box.take())
                assert box.statistics().num_queued <= max_queued
                for _ in range(pauses.randrange(3)):
                    await asyncio.sleep(0)
        assert box.statistics().peak_queued <= max_queued
        return taken

    taken = asyncio.run(main())
    for sender, count in enumerate(counts):
        assert [number for who, number in taken if who == sender] == list(range(count))


async def test_taking_waits_and_cancelling_it_loses_nothing() -> None:
    box: Mailbox[int] = Mailbox("box", 1)
    taker = asyncio.create_task(box.take())
    await settle()
    await box.put(7)
    taker.cancel()
    await asyncio.wait([taker])
    assert await box.take() == 7


async def test_a_sender_that_gives_up_takes_its_message_back() -> None:
    box: Mailbox[int] = Mailbox("box", 1)
    await box.put(0)
    senders = [asyncio.create_task(box.put(number)) for number in (1, 2, 3)]
    await settle()
    senders[1].cancel()
    await settle()
    assert [await box.take() for _ in range(3)] == [0, 1, 3]
    assert box.statistics().num_waiting == 0


async def test_closing_refuses_and_hands_out_what_was_queued() -> None:
    box: Mailbox[int] = Mailbox("box", 2)
    for number in range(2):
        await box.put(number)
    sender = asyncio.create_task(box.put(2))
    await settle()
    assert box.close() == [0, 1]
    with pytest.raises(Stopped, match="box has stopped"):
        await sender
    with pytest.raises(Stopped):
        await box.put(3)
    with pytest.raises(Stopped):
        await box.take()
    assert box.close() == []
    assert box.statistics().is_closed


async def test_closing_wakes_who_waits_for_a_message() -> None:
    box: Mailbox[int] = Mailbox("box", 2)
    taker = asyncio.create_task(box.take())
    await settle()
    box.close()
    with pytest.raises(Stopped):
        await taker


def test_the_bound_must_be_one() -> None:
    with pytest.raises(ValueError, match="holds nothing"):
        Mailbox("box", 0)
