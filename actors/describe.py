"""A step as kernels read it, written down before it is computed.

Knows spans, seats and pages. Keeps nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable

from actors.seats import Seat, Seats
from jitllm.devices.runner import Runner
from jitllm.kernels.sample import RECORD_BYTES, Settings
from jitllm.memory.pages import KvPages
from jitllm.schedule.step import Span, SpanOutputs


def describe(
    spans: Iterable[Span],
    runner: Runner,
    pages: KvPages,
    seats: Seats,
    wants_logits: Collection[int] = (),
) -> None:
    """Write a step down for kernels: per token, per row, per output. wants_logits: sequences whose
    logits are read after it."""
    step = runner.step
    token = output = 0
    for row, span in enumerate(spans):
        count, stop = len(span.tokens), token + len(span.tokens)
        ids = array("i", span.tokens)
        step.tokens[token:stop] = ids
        step.positions[token:stop] = array("i", range(span.start, span.stop))
        step.row_of[token:stop] = array("i", [row]) * count
        step.tables[row] = pages.table_address(span.sequence)
        seat = seats[span.sequence]
        seat.memory.write(span.start, ids)
        first = token if span.outputs is SpanOutputs.ALL else stop - 1
        num = span.num_outputs
        step.outputs[output : output + num] = array("i", range(first, first + num))
        keeps = span.sequence in wants_logits
        _describe_sampling(span, runner, seat, output, keep_logits=keeps)
        token, output = stop, output + num
    step.set_counts(token, output)


def _describe_sampling(
    span: Span, runner: Runner, seat: Seat, output: int, *, keep_logits: bool
) -> None:
    sampling = seat.sampling
    targets = [*span.tokens[1:], span.target][-span.num_outputs :]
    for index, target in enumerate(targets if span.num_outputs else ()):
        position = span.stop - span.num_outputs + index
        settings = Settings(
            seed=sampling.seed,
            position=position + 1,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            repeat_penalty=sampling.repeat_penalty,
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
            target=target,
            want_logprob=seat.logprobs,
            keep_logits=keep_logits,
        )
        record = settings.pack(
            *seat.history(position),
            bias=seat.memory.biases,
            num_bias=len(sampling.logit_bias),
            top=runner.top_at(output + index),
            num_top=seat.num_top(span),
        )
        start = RECORD_BYTES * (output + index)
        runner.records[start : start + RECORD_BYTES] = record
