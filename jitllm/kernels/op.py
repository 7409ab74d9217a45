"""What every op contract is written in: buffers, weights, constants, launches.

An op is a frozen dataclass in `kernels/<op>/__init__.py`; its docstring is the contract. A graph
(`models/graph.py`) is a list of ops. `kernels/<op>/reference.py` computes it in NumPy for tests;
`kernels/<op>/cpu.py` emits it and says how it is launched. Knows no model and no device.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from typing import Protocol

from jitllm.kernels.layout import FormatCode, activation_row_bytes


class Rows(StrEnum):
    """What the rows of a buffer are: the step's tokens, or the tokens whose logits are wanted."""

    TOKENS = "tokens"
    OUTPUTS = "outputs"


class Element(StrEnum):
    """Element of a buffer. Q8 is the 64-byte group record of `layout.py`."""

    F32 = "f32"
    Q8 = "q8"
    I32 = "i32"


@dataclass(frozen=True, slots=True)
class Buffer:
    """An activation [rows, width], row-major. f32 rows are padded to a multiple of 32 elements
    (`stride_bytes`); the padding holds zeros and no op writes anything else there."""

    name: str
    width: int
    rows: Rows = Rows.TOKENS
    element: Element = Element.F32

    @property
    def stride_bytes(self) -> int:
        """Bytes from one row to the next."""
        if self.element is Element.Q8:
            return activation_row_bytes(self.width)
        return -(-self.width // 32) * 128


def written(dst: Buffer, quantized: Buffer | None, *, drops: bool) -> tuple[Buffer, ...]:
    """What an op writes that may give records of its result, too, and drop the result itself."""
    return (() if drops else (dst,)) + (() if quantized is None else (quantized,))


PAGES = Buffer("pages", 0)
"""Stands for KV pages in the reads and writes of ops that use them, so that order is kept."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of the container: a matrix [rows, cols] in its format's tiles, or, with `rows` 0, a
    plain f32 vector of `cols` elements (norms, biases). `block` is None in the dense region.

    experts: there are so many such matrices, one for each expert; 0 for a single one. They may lie
    apart: `of_expert` names one of them, and only that has an address.
    """

    role: str
    block: int | None
    format: FormatCode
    rows: int
    cols: int
    experts: int = 0
    expert: int | None = None

    def of_expert(self, expert: int) -> Weight:
        """The matrix of one expert."""
        return replace(self, experts=0, expert=expert)


@dataclass(frozen=True, slots=True)
class Const:
    """Bytes computed at load and kept beside the program (frequencies, tables)."""

    name: str
    data: bytes


class Count(IntEnum):
    """Index into the step context of a count that a launch's items are multiplied by."""

    ONE = 0
    TOKENS = 1
    OUTPUTS = 2
    TOKEN_PANELS = 3
    OUTPUT_PANELS = 4


PANEL_TOKENS = 64
"""Rows that a matrix product treats as one panel, so that its activations stay in cache."""


class Ctx(IntEnum):
    """The step context: an array of 64-bit words that every kernel gets. Addresses are absolute.

    words 0..4 are the counts of `Count`.
    tokens: i32 [tokens] ids. positions: i32 [tokens]. row_of: i32 [tokens], the sequence's row.
    outputs: i32 [outputs], token index of each output row.
    tables: u64 [rows], address of the row's page table: u64 [pages][blocks of this device], each
    entry the address of a KV page.
    sampling: address of one sampling record per output (`kernels/sample`).
    ranges: i64 [rows][2], the positions [from, to) whose keys attention takes in a launch.
    """

    ONE = 0
    NUM_TOKENS = 1
    NUM_OUTPUTS = 2
    TOKEN_PANELS = 3
    OUTPUT_PANELS = 4
    TOKENS = 5
    POSITIONS = 6
    ROW_OF = 7
    OUTPUTS = 8
    TABLES = 9
    SAMPLING = 10
    NUM_THREADS = 11
    RANGES = 12
    WORDS = 16


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """Names one compiled kernel: the folder under `kernels/` and the constants it is emitted for.

    params: hashable keyword arguments of `kernels/<op>/cpu.py: emit(k, **params)`.
    """

    op: str
    params: tuple[tuple[str, int | float | str | bool], ...]

    @staticmethod
    def of(op: str, **params: int | float | str | bool) -> KernelSpec:
        """A spec with its parameters in a canonical order."""
        return KernelSpec(op, tuple(sorted(params.items())))

    @property
    def symbol(self) -> str:
        """A readable C symbol: matmul__format_Q4_K__rows_8."""
        parts = [f"{k}_{v}".replace(".", "p").replace("-", "m") for k, v in self.params]
        return "__".join([self.op, *parts])


ALL_KEYS = (0, 1 << 62)
"""The range of a row whose attention is one launch."""


MAX_ARGS = 12


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel call of a step: `items = factor * ctx[count]` work items, split over the threads.

    args: up to 12 64-bit words (addresses and integers) that the kernel reads by index.
    barrier: wait for every earlier launch before this one starts. Launches that do not depend on
    their neighbour say False, and threads flow from one into the next.
    """

    kernel: KernelSpec
    count: Count
    factor: int
    args: tuple[int, ...]
    barrier: bool = True


def f32_bits(number: float) -> int:
    """A float as an argument word: its bits as f32, in the low half."""
    (bits,) = struct.unpack("<I", struct.pack("<f", number))
    return int(bits)


class Env(Protocol):
    """Where a program's buffers and weights are: absolute addresses that outlive the program."""

    num_blocks: int
    """Blocks on this device: the stride, in entries, of a page table."""

    page_tokens: int
    """Positions in one KV page."""

    kv_element: str
    """f16, f32 or q8_0."""

    def buffer(self, buffer: Buffer) -> int:
        """Address of row 0."""

    def weight(self, weight: Weight) -> int:
        """Address of the tensor's first byte."""

    def const(self, const: Const) -> int:
        """Address of the constant's bytes, 64-byte aligned."""

    def block_slot(self, block: int) -> int:
        """Column of a block in this device's page tables."""


class Op(Protocol):
    """What all op dataclasses offer to a graph: which buffers it reads and writes (names used by
    planners and tests) and which weights it needs."""

    @property
    def reads(self) -> tuple[Buffer, ...]: ...

    @property
    def writes(self) -> tuple[Buffer, ...]: ...

    @property
    def weights(self) -> tuple[Weight, ...]: ...
