"""The next token of each output, drawn on the device that holds the output head."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from jitllm.kernels.op import Buffer, Rows, Weight

RECORD_BYTES = 128
"""One sampling record: two cache lines. The first holds settings, the second results and lists."""

PAIR_BYTES = 8
"""One pair of an i32 token id and an f32: an entry of the bias list and of the top list."""


class Field(IntEnum):
    """Byte offset of each field of a record.

    SEED, POSITION and the addresses HISTORY, BIAS and TOP: u64. NUM_HISTORY, NUM_BIAS, NUM_TOP:
    u32. TOP_K, TARGET, FLAGS, TOKEN: i32. The rest f32.
    TOKEN, TOKEN_LOGPROB and TARGET_LOGPROB are written, everything else is read.
    """

    SEED = 0
    POSITION = 8
    HISTORY = 16
    NUM_HISTORY = 24
    TOP_K = 28
    TEMPERATURE = 32
    TOP_P = 36
    MIN_P = 40
    REPEAT_PENALTY = 44
    FREQUENCY_PENALTY = 48
    PRESENCE_PENALTY = 52
    TARGET = 56
    FLAGS = 60
    TOKEN = 64
    TOKEN_LOGPROB = 68
    TARGET_LOGPROB = 72
    BIAS = 80
    TOP = 88
    NUM_BIAS = 96
    NUM_TOP = 100


NUM_PEAKS = 128
"""Slices of an output's logits, each a pair of the first id of its largest logit and that one: so
many tiles of the vocabulary, rounded up, are a slice, and the last ones may have fewer or none."""

WANT_LOGPROB = 1
"""Flag: compute TOKEN_LOGPROB too (it costs a pass over the vocabulary)."""

PEAK_ONLY = 2
"""Flag: of this output's logits nothing is read but the largest, so they need not be written."""

MIN_TEMPERATURE = 2.0**-20
"""Below it sampling is greedy."""

WEIGHT_BITS = 40
"""A probability is a fixed-point number of this many fraction bits, relative to the largest one."""

_SETTINGS = struct.Struct("<QQQIiffffffii")
_HISTORY = struct.Struct("<QI")
_RESULTS = struct.Struct("<iff")
_LISTS = struct.Struct("<QQII")
_PAIR = struct.Struct("<if")


def pack_pairs(pairs: Iterable[tuple[int, float]]) -> bytes:
    """A bias list: PAIR_BYTES for each (token id, bias)."""
    return b"".join(_PAIR.pack(token, bias) for token, bias in pairs)


def unpack_top(area: bytes | bytearray | memoryview) -> tuple[tuple[int, float], ...]:
    """The (token id, log-probability) pairs of a top list, without its unused end."""
    return tuple((token, logprob) for token, logprob in _PAIR.iter_unpack(area) if token >= 0)


@dataclass(frozen=True, slots=True)
class Settings:
    """How to choose one token; the defaults are greedy. `pack` makes the record.

    seed, position: the random number is a function of these two, whatever the batch.
    top_k: 0 for off. top_p: 1 for off. min_p: 0 for off. repeat_penalty: 1 for off.
    target: an id whose log-probability is wanted, or -1. keep_logits: somebody reads them later.
    """

    seed: int = 0
    position: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    target: int = -1
    want_logprob: bool = False
    keep_logits: bool = True

    @property
    def _is_peak(self) -> bool:
        """Whether the largest logit as it came is all that anybody asks for, biases and the top
        list apart."""
        penalties = (self.repeat_penalty, self.frequency_penalty, self.presence_penalty)
        is_greedy = not self.temperature >= MIN_TEMPERATURE
        wants_more = self.keep_logits or self.want_logprob or self.target >= 0
        return is_greedy and penalties == (1, 0, 0) and not wants_more

    def pack(
        self,
        history: int = 0,
        num_history: int = 0,
        *,
        bias: int = 0,
        num_bias: int = 0,
        top: int = 0,
        num_top: int = 0,
    ) -> bytes:
        """The record, results zero. history: address of `num_history` i32 ids to penalise. bias:
        address of `num_bias` pairs (`pack_pairs`). top: address of room for `num_top` pairs. All
        of it must stay there until the step is done."""
        flags = WANT_LOGPROB if self.want_logprob else 0
        if self._is_peak and not num_bias and not num_top:
            flags |= PEAK_ONLY
        settings = _SETTINGS.pack(
            self.seed % 2**64,
            self.position,
            history,
            num_history,
            self.top_k,
            self.temperature,
            self.top_p,
            self.min_p,
            self.repeat_penalty,
            self.frequency_penalty,
            self.presence_penalty,
            self.target,
            flags,
        )
        lists = _LISTS.pack(bias, top, num_bias, num_top)
        return (settings.ljust(Field.BIAS, b"\0") + lists).ljust(RECORD_BYTES, b"\0")


def tokens_in(records: bytes) -> list[int]:
    """TOKEN of every record."""
    return memoryview(records).cast("i")[Field.TOKEN // 4 :: RECORD_BYTES // 4].tolist()


def move_to(records: memoryview, positions: array[int]) -> None:
    """Have records that were packed for one token stand for other ones of the same sequences, at
    `positions`: u64, of the first records. Their histories are where they were."""
    stride = RECORD_BYTES // 8
    stop = len(positions) * stride
    records.cast("Q")[Field.POSITION // 8 : stop : stride] = positions


def move_history(records: memoryview, output: int, history: int, num_history: int) -> None:
    """Have the record of an output look at another piece of its sequence."""
    _HISTORY.pack_into(records, RECORD_BYTES * output + Field.HISTORY, history, num_history)


@dataclass(frozen=True, slots=True)
class Sampled:
    """Results of one record. A log-probability that was not asked for is NaN."""

    token: int
    token_logprob: float
    target_logprob: float

    @staticmethod
    def unpack(record: bytes | bytearray | memoryview) -> Sampled:
        """The results in a record of RECORD_BYTES bytes."""
        return Sampled(*_RESULTS.unpack_from(record, Field.TOKEN))


@dataclass(frozen=True, slots=True)
class Sample:
    """One token per output from `logits`, f32 [outputs, vocab], which are never written.

    `Ctx.SAMPLING` addresses one record (`Field`) per output. scratch: `scratch_buffer`, for the
    changed logits and the candidates; greedy sampling without biases and penalties touches none of
    it. peaks: `peaks_buffer`, where the product that made the logits left the largest of each slice
    (`MatMul.peaks`); None on a device that looks for them itself.

    A NaN counts as absent. The stages, in this order:

    0. Biases: for each pair of the record's bias list, in its order, l = l + bias. Ids outside the
       vocabulary are skipped.
    1. Penalties, where `repeat`, `frequency` or `presence` is on. c = how often an id occurs in the
       history (ids outside the vocabulary are skipped). Where c > 0:
       l = (l <= 0 ? l * repeat : l / repeat) - (float(c) * frequency + presence).
    2. Greedy, where temperature < 2^-20 or the largest l, m, is not finite: the lowest id whose l
       equals m; id 0 if all are NaN. The stages below do not happen.
    3. The candidates in order: larger l first, then lower id.
       top-k: the first k. top-p: the shortest prefix whose weight reaches
       max(1, floor(total * floor(top_p 2^32) / 2^32)), where the weight of a candidate is
       floor(exp(l - m) 2^40) and total is the sum over what top-k left. min-p: l >= m + ln(min_p).
    4. Draw: weights floor(exp((l - m) * (1 / temperature)) 2^40) of what is left, total their sum;
       r = floor(R total / 2^64); the first candidate, by id, at which the running sum exceeds r.

    Weights are 64-bit integers, so their sums are exact and no order of summation exists that
    could matter. R is the first two words (low word first) of Philox4x32-10 (Salmon et al., 2011)
    with the counter (position low, position high, 0, 0) and the key (seed low, seed high).

    Log-probabilities are of the logits as they came, without biases, penalties or temperature:
    (l - m) - ln(float(W) 2^-40), W the sum of floor(exp(l - m) 2^40) over the vocabulary. NaN
    where not asked for, where the id is outside the vocabulary, and where m is not finite.

    The top list, where NUM_TOP > 0: pairs (id, log-probability) of the NUM_TOP largest logits above
    -inf, larger first, then lower id. What is left of it is (-1, NaN): all of it where m is not
    finite.
    """

    logits: Buffer
    scratch: Buffer
    peaks: Buffer | None = None

    @staticmethod
    def peaks_buffer(name: str) -> Buffer:
        """Room for the pairs of all slices: an i32 and an f32 each."""
        return Buffer(name, NUM_PEAKS * PAIR_BYTES // 4, Rows.OUTPUTS)

    @staticmethod
    def scratch_buffer(name: str, vocab: int) -> Buffer:
        """Scratch for a vocabulary: 8 bytes an id and output. The first half of a row is f32
        values, the second half i32 ids, each half padded to a multiple of 32."""
        return Buffer(name, -(-vocab // 32) * 64, Rows.OUTPUTS)

    @property
    def reads(self) -> tuple[Buffer, ...]:
        """The logits and their peaks; the settings come from the step context."""
        return (self.logits,) if self.peaks is None else (self.logits, self.peaks)

    @property
    def writes(self) -> tuple[Buffer, ...]:
        """Scratch; the results go to the step context."""
        return (self.scratch,)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """None."""
        return ()
