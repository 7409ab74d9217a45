"""Steps that go on by themselves: what they leave in records and histories."""

from __future__ import annotations

import struct
from array import array
from types import SimpleNamespace
from typing import Any, cast

import pytest

from actors.decode import Decode
from actors.describe import describe
from actors.seats import Seat, Seats
from jitllm.devices.host_runner import HostSeat
from jitllm.devices.runner import Runner
from jitllm.engine import Sampling
from jitllm.kernels.sample import RECORD_BYTES, Field
from jitllm.memory.pages import KvPages
from jitllm.schedule.step import Span, SpanOutputs

NUM_STEPS = 5
PROMPTS = ((3, 1, 4), (1, 5), (9, 2, 6, 5))
PENALTIES = Sampling(repeat_penalty=1.5, repeat_last_n=4)


class Steps:
    """What a runner is described a step in; it computes nothing."""

    def __init__(self) -> None:
        self.tokens, self.positions = array("i", bytes(64)), array("i", bytes(64))
        self.row_of, self.outputs = array("i", bytes(64)), array("i", bytes(64))
        self.tables = array("Q", bytes(64))

    def set_counts(self, num_tokens: int, num_outputs: int) -> None:
        """Nothing runs."""


def fields(records: memoryview, output: int) -> tuple[int, int, int]:
    """POSITION, HISTORY and NUM_HISTORY of a record."""
    return struct.unpack_from("<QQI", records, RECORD_BYTES * output + Field.POSITION)


@pytest.mark.parametrize("penalised", [(), (1,), (0, 2)])
def test_histories_have_every_token_and_records_every_position(penalised: tuple[int, ...]) -> None:
    """Whoever is penalised needs its tokens at once, the others when nobody goes on."""
    seats = {
        number: Seat(
            PENALTIES if number in penalised else Sampling(),
            logprobs=False,
            top_logprobs=0,
            memory=HostSeat(40, b""),
            max_tokens=40,
            promised_tokens=40,
            shares=True,
            num_published=0,
            digest=b"",
            stop_ids=frozenset(),
            namespace=b"",
        )
        for number in range(3)
    }
    memory = array("B", bytes(RECORD_BYTES * 3))
    records = memoryview(memory)
    tops = memoryview(b"")
    runner = SimpleNamespace(step=Steps(), records=records, tops=tops, top_at=lambda output: 0)
    pages = SimpleNamespace(table_address=lambda sequence: 0)

    def write_down(spans: Any) -> None:
        describe(spans, cast("Runner", runner), cast("KvPages", pages), cast("Seats", seats))

    spans = tuple(
        Span(number, 0, prompt, SpanOutputs.LAST, sample=True)
        for number, prompt in enumerate(PROMPTS)
    )
    write_down(spans)
    decode = Decode(
        cast("Runner", runner), spans, list(seats.values()), 39, write_down, is_short=False
    )
    drawn: list[list[int]] = [list(prompt) for prompt in PROMPTS]
    for step in range(NUM_STEPS):
        for row, tokens in enumerate(drawn):
            tokens.append(100 * row + step)
            struct.pack_into("<i", records, RECORD_BYTES * row + Field.TOKEN, tokens[-1])
        assert decode.advance(decode.outcome())
        for row, (tokens, seat) in enumerate(zip(drawn, seats.values(), strict=True)):
            last = len(tokens) - 1
            assert runner.step.tokens[row] == tokens[-1]
            assert runner.step.positions[row] == last
            position, address, count = fields(records, row)
            assert position == last + 1
            if row in penalised:
                assert (address, count) == seat.history(last)
                assert count == min(4, last + 1)
                assert seat.memory.history[: last + 1].tolist() == tokens
    decode.settle()
    for tokens, seat in zip(drawn, seats.values(), strict=True):
        assert seat.memory.history[: len(tokens)].tolist() == tokens
    decode.settle()
    assert seats[0].memory.history[: len(drawn[0])].tolist() == drawn[0]
