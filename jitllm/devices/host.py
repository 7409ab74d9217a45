"""The CPU as a device: a model's ops as a table of launches in native memory.

A program is compiled once at load. Its launches lie in order (prologue, block after block,
epilogue), so a run of blocks is a slice of the table and one native call. Knows ops, addresses
and the thread team. Knows no model, no sequence, no budget.
"""

from __future__ import annotations

import importlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from jitllm.devices.fuse import fused
from jitllm.devices.memory import Memory, Span
from jitllm.devices.mixtures import parts
from jitllm.devices.order import ordered
from jitllm.jit.cpu import Compiler, Progress
from jitllm.jit.team import Team
from jitllm.kernels.op import ALL_KEYS, PANEL_TOKENS, Buffer, Const, Ctx, Launch, Op, Rows, Weight
from jitllm.kernels.team import RECORD_BYTES, table

_ALIGN = 64
_TABLES, _FIRST_BLOCK = 1, 2  # sections of a program: embed, tables, parts of blocks, head


@dataclass(frozen=True, slots=True)
class Limits:
    """What one step may hold: tokens, output rows and sequences."""

    tokens: int
    outputs: int
    rows: int


@dataclass(frozen=True, slots=True)
class Section:
    """Launches [start, stop) of the table."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Pass:
    """One launch of a block's attention: the keys [from, to) of each row of the step, as
    `kernels.attention` says."""

    block: int
    ranges: tuple[tuple[int, int], ...]


class HostProgram:
    """A compiled stack of blocks: `Env` of its ops, owner of their buffers.

    embed makes hidden states of tokens; tables (rotary ones) run in every step before the first
    block that runs here; head (with sampling) comes after the last. blocks: (block number, ops) in
    order. weight_address: where a weight lies for the program's life.
    """

    def __init__(
        self,
        embed: Sequence[Op],
        tables: Sequence[Op],
        blocks: Sequence[tuple[int, Sequence[Op]]],
        head: Sequence[Op],
        *,
        limits: Limits,
        memory: Memory,
        weight_address: Callable[[Weight], int],
        page_tokens: int,
        kv_element: str,
        compiler: Compiler,
        team: Team,
        progress: Progress | None = None,
    ) -> None:
        self.limits = limits
        self.num_blocks = len(blocks)
        self.page_tokens = page_tokens
        self.kv_element = kv_element
        self._team = team
        self._weight_address = weight_address
        self._slots = {block: slot for slot, (block, _) in enumerate(blocks)}
        self._memory = memory
        self._consts: dict[str, Span] = {}
        self.step = StepMemory(limits)

        sections = [embed, tables]
        self.blocks: list[range] = []
        """The sections of each block."""
        for _, ops in blocks:
            found = parts(fused(ops))
            self.blocks.append(range(len(sections), len(sections) + len(found)))
            sections += found
        sections.append(fused(head))
        self._offsets, self.scratch_bytes = self._lay_out(sections)
        self._scratch: Span = memory.reserve(self.scratch_bytes)
        launches: list[Launch] = []
        self._sections: list[Section] = []
        for ops in sections:
            start = len(launches)
            launches += self._launches(ops)
            self._sections.append(Section(start, len(launches)))
        self._attention = {
            block: n
            for block, numbers in enumerate(self.blocks)
            for section in self._sections[numbers.start : numbers.stop]
            for n in range(section.start, section.stop)
            if launches[n].kernel.op == "attention"
        }
        addresses = compiler.build((launch.kernel for launch in launches), progress)
        self._table = array("Q", table(launches, addresses))
        self._table_address = self._table.buffer_info()[0]

    @staticmethod
    def _op_launches(op: Op, env: HostProgram) -> list[Launch]:
        emitter = importlib.import_module(f"{type(op).__module__}.cpu")
        launches: list[Launch] = emitter.launches(op, env)
        return launches

    def _launches(self, ops: Sequence[Op]) -> list[Launch]:
        """Launches with barriers only where an op depends on one since the last barrier."""
        found: list[Launch] = []
        for op, depends in ordered(ops):
            for part, launch in enumerate(self._op_launches(op, self)):
                found.append(launch if part else replace(launch, barrier=depends))
        return found

    # --- Env ---------------------------------------------------------------------------------

    def _lay_out(self, sections: Sequence[Sequence[Op]]) -> tuple[dict[str, int], int]:
        """Offsets of all buffers in scratch, by name, and the bytes they take in all."""
        offsets: dict[str, int] = {}
        end = 0
        for buffer in (b for ops in sections for op in ops for b in (*op.reads, *op.writes)):
            if buffer.name not in offsets:
                offsets[buffer.name] = end
                rows = self.limits.outputs if buffer.rows is Rows.OUTPUTS else self.limits.tokens
                end += -(-rows * buffer.stride_bytes // _ALIGN) * _ALIGN
        return offsets, end

    def buffer(self, buffer: Buffer) -> int:
        """Address of row 0 of a buffer; equal names are one buffer."""
        return self._scratch.address + self._offsets[buffer.name]

    def weight(self, weight: Weight) -> int:
        """Address of a weight's first byte."""
        return self._weight_address(weight)

    def const(self, const: Const) -> int:
        """Address of a constant; equal names are one constant."""
        if const.name not in self._consts:
            span = self._consts[const.name] = self._memory.reserve(len(const.data))
            span.view()[:] = const.data
        return self._consts[const.name].address

    def bytes_of(self, const: Const) -> memoryview:
        """The bytes of a constant, which may be changed between two calls."""
        return self._consts[const.name].view()

    def block_slot(self, block: int) -> int:
        """Column of a block in page tables."""
        return self._slots[block]

    # --- running -----------------------------------------------------------------------------

    def run(
        self,
        start: int,
        stop: int,
        *,
        embeds: bool,
        begins: bool,
        ends: bool,
        passes: Iterable[Pass] = (),
    ) -> None:
        """Compute blocks [start, stop) of this device's stack for the step in `self.step`.

        embeds: make the hidden states of the step's tokens first. begins: nothing of the step ran
        here before. ends: go on to the head. passes: of blocks whose attention is not one launch,
        block by block, all of them in order; each is asked for when the one before it has run. One
        native call without passes, or two when the run begins with a later block; the GIL is
        released. Everything the launches touch must be resident.
        """
        *opening, last = self.sections(start, stop, embeds=embeds, begins=begins, ends=ends)
        for sections in opening:
            self.run_sections(sections)
        self.run_sections(last, passes)

    def sections(
        self, start: int, stop: int, *, embeds: bool, begins: bool, ends: bool
    ) -> Iterator[range]:
        """What `run` consists of: what comes before a later block, if it does, then the blocks."""
        first = self._before(start)
        if begins and stop > start:
            opening = 0 if embeds else _TABLES
            if start:
                yield range(opening, _FIRST_BLOCK)
            else:
                first = opening
        yield range(first, len(self._sections) if ends else self._before(stop))

    def run_sections(self, sections: range, passes: Iterable[Pass] = ()) -> None:
        """Some neighbouring sections, if there is anything to do. passes: of blocks there."""
        if sections:
            begin, end = self._sections[sections[0]].start, self._sections[sections[-1]].stop
            self._run(self._run_passes(begin, passes), end)

    def _run_passes(self, begin: int, passes: Iterable[Pass]) -> int:
        """Launches from `begin` on, as far as passes go; the launch after them."""
        try:
            for one in passes:
                attention = self._attention[one.block]
                if begin <= attention:  # the first one of its block
                    self.step.take_all_keys()
                    self._run(begin, attention)
                self.step.take_keys(one.ranges)
                self._run(attention, begin := attention + 1)
        finally:
            self.step.take_all_keys()
        return begin

    def _run(self, begin: int, end: int) -> None:
        """Launches [begin, end)."""
        if begin < end:
            launches = self._table_address + RECORD_BYTES * begin
            self._team.run(launches, end - begin, self.step.address)

    def _before(self, block: int) -> int:
        """The first section of a block, or of the head."""
        return self.blocks[block].start if block < self.num_blocks else len(self._sections) - 1

    def rows(self, buffer: Buffer, num_rows: int) -> memoryview:
        """The first rows of a buffer, as bytes."""
        return self._scratch.view(self._offsets[buffer.name], num_rows * buffer.stride_bytes)

    def close(self) -> None:
        """Give the memory back; the program must not run any more."""
        for span in (self._scratch, *self._consts.values()):
            span.close()


class StepMemory:
    """The native memory that a step is described in: context words and per-token arrays."""

    def __init__(self, limits: Limits) -> None:
        self._ctx = array("q", bytes(8 * Ctx.WORDS))
        self.tokens = array("i", bytes(4 * limits.tokens))
        self.positions = array("i", bytes(4 * limits.tokens))
        self.row_of = array("i", bytes(4 * limits.tokens))
        self.outputs = array("i", bytes(4 * limits.outputs))
        self.tables = array("Q", bytes(8 * limits.rows))
        self._all_keys = array("q", ALL_KEYS * limits.rows)
        self._ranges = self._all_keys[:]
        for word, values in (
            (Ctx.TOKENS, self.tokens),
            (Ctx.POSITIONS, self.positions),
            (Ctx.ROW_OF, self.row_of),
            (Ctx.OUTPUTS, self.outputs),
            (Ctx.TABLES, self.tables),
            (Ctx.RANGES, self._ranges),
        ):
            self._ctx[word] = values.buffer_info()[0]
        self._ctx[Ctx.ONE] = 1
        self.num_tokens = 0

    @property
    def address(self) -> int:
        """Address of the context."""
        return self._ctx.buffer_info()[0]

    def set(self, word: Ctx, value: int) -> None:
        """Set a context word."""
        self._ctx[word] = value

    def take_keys(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Attention takes these keys of the first rows from now on."""
        keys = array("q", chain.from_iterable(ranges))
        self._ranges[: len(keys)] = keys

    def take_all_keys(self) -> None:
        """Attention takes all keys from now on."""
        self._ranges[:] = self._all_keys

    def set_counts(self, num_tokens: int, num_outputs: int) -> None:
        """Set the counts that launches are multiplied by."""
        self.num_tokens = num_tokens
        self._ctx[Ctx.NUM_TOKENS] = num_tokens
        self._ctx[Ctx.NUM_OUTPUTS] = num_outputs
        self._ctx[Ctx.TOKEN_PANELS] = -(-num_tokens // PANEL_TOKENS)
        self._ctx[Ctx.OUTPUT_PANELS] = -(-num_outputs // PANEL_TOKENS)
