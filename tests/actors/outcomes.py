"""What a device that computes nothing says that it sampled."""

from __future__ import annotations

import struct
from collections.abc import Iterable

from actors.messages.device import Outcome, StepDone
from jitllm.kernels.sample import Field, Settings
from jitllm.schedule.step import Span


def outcome_of(spans: Iterable[Span], done: StepDone) -> Outcome:
    """Records of a step in which every span has one output at most."""
    records = []
    for span, result in zip(spans, done.results, strict=True):
        record = bytearray(Settings().pack())
        struct.pack_into("<if", record, Field.TOKEN, result.token or 0, result.logprob)
        records += [bytes(record)] * span.num_outputs
    return Outcome(b"".join(records), b"", done.is_short)
