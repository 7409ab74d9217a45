"""Blocks whose experts are elsewhere, or are not there before a step has chosen among them.

Such a block is computed in four parts: up to the choice; what needs no chosen expert, as shared
ones do not; what the chosen experts say; and the rest. The third one may be run several times, each
time with some of the experts: a pair of a token and an expert has rows of its own, and what is
written elsewhere meanwhile is written again. It may be run on another device, too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jitllm.kernels.dispatch import HEAD_BYTES, RECORD_BYTES, Dispatch
from jitllm.kernels.expert_matmul import ExpertMatMul
from jitllm.kernels.expert_matmul.cpu import addresses
from jitllm.kernels.op import Buffer, Const, Op

if TYPE_CHECKING:
    from jitllm.devices.host import HostProgram

_HEAD, _RECORD = HEAD_BYTES // 4, RECORD_BYTES // 4  # in words


def parts(ops: Sequence[Op]) -> list[Sequence[Op]]:
    """A block of a mixture in its four parts, the second one maybe empty; any other in one."""
    chosen = [index for index, op in enumerate(ops) if isinstance(op, ExpertMatMul)]
    if not chosen:
        return [ops]
    known = next(index for index, op in enumerate(ops) if isinstance(op, Dispatch)) + 1
    first, stop = chosen[0], chosen[-1] + 1
    needed, beside = _divided(ops[known:first], ops[first:stop])
    return [(*ops[:known], *needed), beside, ops[first:stop], ops[stop:]]


def _divided(ops: Sequence[Op], products: Sequence[Op]) -> tuple[list[Op], list[Op]]:
    """Ops before products: those that these need, and the others, each in order."""
    needed: list[Op] = []
    others: list[Op] = []
    names = {buffer.name for op in products for buffer in op.reads}
    for op in reversed(ops):
        is_needed = any(buffer.name in names for buffer in op.writes)
        (needed if is_needed else others).append(op)
        if is_needed:
            names |= {buffer.name for buffer in op.reads}
    return needed[::-1], others[::-1]


def expert_blocks(blocks: Sequence[Sequence[Op]]) -> frozenset[int]:
    """The blocks with experts."""
    return frozenset(block for block, ops in enumerate(blocks) if _first(ops) is not None)


def _first(ops: Sequence[Op]) -> ExpertMatMul | None:
    """The first product with experts of a block."""
    return next((op for op in ops if isinstance(op, ExpertMatMul)), None)


@dataclass(frozen=True, slots=True)
class Crossing:
    """What goes to another device for a block's products with experts, and what comes back: rows of
    tokens of some buffers, one buffer behind the other."""

    takes: tuple[Buffer, ...]
    gives: tuple[Buffer, ...]

    @staticmethod
    def of(ops: Sequence[Op]) -> Crossing:
        """That of a block with experts."""
        _, _, products, rest = parts(ops)
        written = {buffer for op in products for buffer in op.writes}
        taken = (buffer for op in products for buffer in op.reads if buffer not in written)
        given = (buffer for op in rest for buffer in op.reads if buffer in written)
        return Crossing(tuple(dict.fromkeys(taken)), tuple(dict.fromkeys(given)))

    def num_bytes(self, num_tokens: int) -> int:
        """The most that goes one way, for so many tokens."""
        return max(rows_bytes(self.takes, num_tokens), rows_bytes(self.gives, num_tokens))


def rows_bytes(buffers: Iterable[Buffer], num_tokens: int) -> int:
    """What rows of so many tokens take."""
    return num_tokens * sum(buffer.stride_bytes for buffer in buffers)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Sections of a program that are run together. begun: blocks that begin there. block: whose
    experts are asked then, if it is not None; beside: what can be run while they come. begins,
    ends: as of the run that it is of."""

    sections: range
    begun: range
    block: int | None
    beside: range
    begins: bool
    ends: bool


class Stretches:
    """How a program is run where experts of some blocks are asked between two native calls.

    sections: of each block of the program, the last four of one with experts as in `parts`. blocks:
    the ops of all blocks, in order. asking: those whose experts are asked.
    """

    def __init__(
        self, sections: Sequence[range], blocks: Sequence[Sequence[Op]], asking: Iterable[int]
    ) -> None:
        self._starts = [of_block.start for of_block in sections]
        self._blocks = {sections[block].stop - 2: block for block in asking}
        self._has_beside = {block: bool(parts(blocks[block])[1]) for block in asking}

    def of(self, runs: Iterable[range], *, begins: bool, ends: bool) -> Iterator[Stretch]:
        """runs: sections of a program, in order."""
        found = [stretch for sections in runs for stretch in self._divided(sections)]
        last = len(found) - 1
        for number, (sections, begun, block, beside) in enumerate(found):
            is_first, is_last = number == 0, number == last
            yield Stretch(
                sections, begun, block, beside, begins=begins and is_first, ends=ends and is_last
            )

    def _divided(self, sections: range) -> Iterator[tuple[range, range, int | None, range]]:
        first = sections.start
        for section in sections:
            if (block := self._blocks.get(section)) is not None:
                beside = range(section - 1, section) if self._has_beside[block] else range(0)
                yield range(first, section - 1), self._begun(first, section), block, beside
                first = section + 1
        yield range(first, sections.stop), self._begun(first, sections.stop), None, range(0)

    def _begun(self, first: int, stop: int) -> range:
        """The blocks whose first section is one of these."""
        return range(bisect_left(self._starts, first), bisect_left(self._starts, stop))


class Chosen:
    """The experts that the tokens of a step go to, in the table of `kernels/dispatch`.

    words: the table, i32. used: experts of a token.
    """

    def __init__(self, words: memoryview, used: int) -> None:
        self._words = words
        self._used = used
        self._panels: dict[int, list[list[int]]] = {}
        for first in range(_HEAD, _HEAD + _RECORD * words[0], _RECORD):
            expert = words[first + 1]
            self._panels.setdefault(expert, []).append(words[first + 1 : first + 4].tolist())

    @property
    def experts(self) -> tuple[int, ...]:
        """Each of them once."""
        return tuple(self._panels)

    def keep(self, experts: Iterable[int]) -> None:
        """Leave the panels of some of them in the table, and of no others."""
        words = self._words
        panels = [panel for expert in experts for panel in self._panels[expert]]
        words[0] = len(panels)
        for first, panel in zip(range(_HEAD, len(words), _RECORD), panels, strict=False):
            for word, value in enumerate(panel, first + 1):
                words[word] = value

    def rows_of(self, expert: int, row_of: Sequence[int]) -> tuple[int, ...]:
        """The rows of the step with a token that goes to an expert. row_of: of each token."""
        places = (n for _, start, stop in self._panels[expert] for n in range(start, stop))
        pairs = (self._words[_HEAD + _RECORD * n] for n in places)
        return tuple(sorted({row_of[pair // self._used] for pair in pairs}))


def table_of(blocks: Sequence[Sequence[Op]]) -> tuple[Buffer, int]:
    """The table of `kernels/dispatch`, which blocks have in the same memory, and the experts of a
    token."""
    products = (product for ops in blocks if (product := _first(ops)))
    ((table, used),) = {(op.table, op.used) for op in products}
    return table, used


class MixtureProgram:
    """A program of the host, of which some blocks have experts that come one by one."""

    def __init__(self, program: HostProgram, blocks: Sequence[Sequence[Op]]) -> None:
        """blocks: the ops of all blocks of the program, in order."""
        self._program = program
        self._table, self._used = table_of(blocks)
        found = expert_blocks(blocks)
        self._sections = {block: program.blocks[block].stop - 2 for block in found}
        self._addresses = {block: self._tables(blocks[block]) for block in found}
        self._chosen = Chosen(memoryview(bytes(HEAD_BYTES)).cast("i"), self._used)

    def _tables(self, ops: Sequence[Op]) -> list[tuple[Const, list[int]]]:
        """Where kernels find matrices of experts, and what stands there of a whole block."""
        products = (op for op in ops if isinstance(op, ExpertMatMul))
        tables = [addresses(op.weight, self._program) for op in products]
        return [(table, memoryview(table.data).cast("Q").tolist()) for table in tables]

    def needed(self) -> tuple[int, ...]:
        """The experts that were chosen in the block that was computed last, each of them once."""
        words = self._program.rows(self._table, self._program.limits.tokens).cast("i")
        self._chosen = Chosen(words, self._used)
        return self._chosen.experts

    def ask(self, block: int, experts: Sequence[int], places: Sequence[int]) -> None:
        """Compute what some of the needed experts of `block` say.

        They must be resident. places: for each of them, whose address of a whole block it has.
        """
        for table, whole in self._addresses[block]:
            entries = self._program.bytes_of(table).cast("Q")
            for expert, place in zip(experts, places, strict=True):
                entries[expert] = whole[place]
        self._chosen.keep(experts)
        section = self._sections[block]
        self._program.run_sections(range(section, section + 1))

    def rows_of(self, expert: int) -> tuple[int, ...]:
        """The rows of the step with a token that needs one of the needed experts."""
        return self._chosen.rows_of(expert, self._program.step.row_of)
