"""Blocks of a program whose experts are not there before a step has chosen among them.

Such a block is computed in four parts: up to the choice; what needs no chosen expert, as shared
ones do not; what the chosen experts say; and the rest. The third one may be run several times, each
time with some of the experts: a pair of a token and an expert has rows of its own, and what is
written elsewhere meanwhile is written again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jitllm.kernels.dispatch import HEAD_BYTES, RECORD_BYTES, Dispatch
from jitllm.kernels.expert_matmul import ExpertMatMul
from jitllm.kernels.expert_matmul.cpu import addresses
from jitllm.kernels.op import Const, Op

if TYPE_CHECKING:
    from jitllm.devices.host import HostProgram, Pass

_HEAD, _RECORD = HEAD_BYTES // 4, RECORD_BYTES // 4  # in words


def parts(ops: Sequence[Op]) -> list[Sequence[Op]]:
    """A block of a mixture in its four parts, the second one maybe empty; any other in one."""
    chosen = [index for index, op in enumerate(ops) if isinstance(op, ExpertMatMul)]
    if not chosen:
        return [ops]
    known = next(index for index, op in enumerate(ops) if isinstance(op, Dispatch)) + 1
    first, stop = chosen[0], chosen[-1] + 1
    return [ops[:known], ops[known:first], ops[first:stop], ops[stop:]]


def _first(ops: Sequence[Op]) -> ExpertMatMul | None:
    """The first product with experts of a block."""
    return next((op for op in ops if isinstance(op, ExpertMatMul)), None)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Sections of a program that are run together. begun: blocks that begin there. block: whose
    experts are asked then, if it is not None; beside: what can be run while they come."""

    sections: range
    begun: range
    block: int | None
    beside: range = range(0)


class MixtureProgram:
    """A program of which some blocks have experts that come one by one."""

    def __init__(self, program: HostProgram, blocks: Sequence[Sequence[Op]]) -> None:
        """blocks: the ops of all blocks of the program, in order."""
        self._program = program
        found = {block: product for block, ops in enumerate(blocks) if (product := _first(ops))}
        # Blocks have their tables in the same memory, one after the other.
        ((self._table, self._used),) = {(op.table, op.used) for op in found.values()}
        self._sections = {block: program.blocks[block].start + 2 for block in found}
        self._starts = [sections.start for sections in program.blocks]
        self._blocks = {section: block for block, section in self._sections.items()}
        self._has_beside = {block: bool(parts(blocks[block])[1]) for block in found}
        self._addresses = {block: self._tables(blocks[block]) for block in found}
        self._panels: dict[int, list[list[int]]] = {}

    def _tables(self, ops: Sequence[Op]) -> list[tuple[Const, list[int]]]:
        """Where kernels find matrices of experts, and what stands there of a whole block."""
        products = (op for op in ops if isinstance(op, ExpertMatMul))
        tables = [addresses(op.weight, self._program) for op in products]
        return [(table, memoryview(table.data).cast("Q").tolist()) for table in tables]

    def stretches(
        self, start: int, stop: int, *, embeds: bool, begins: bool, ends: bool
    ) -> Iterator[Stretch]:
        """`HostProgram.run`, stretch by stretch."""
        for sections in self._program.sections(
            start, stop, embeds=embeds, begins=begins, ends=ends
        ):
            first = sections.start
            for section in sections:
                if (block := self._blocks.get(section)) is not None:
                    beside = range(section - 1, section) if self._has_beside[block] else range(0)
                    begun = self._begun(first, section)
                    yield Stretch(range(first, section - 1), begun, block, beside)
                    first = section + 1
            yield Stretch(range(first, sections.stop), self._begun(first, sections.stop), None)

    def _begun(self, first: int, stop: int) -> range:
        """The blocks whose first section is one of these."""
        return range(bisect_left(self._starts, first), bisect_left(self._starts, stop))

    def run(self, stretch: Stretch, passes: Iterable[Pass]) -> None:
        """One native call without passes; these are of blocks that begin there."""
        self._program.run_sections(stretch.sections, passes)

    def run_beside(self, stretch: Stretch) -> None:
        """What needs no chosen expert of the stretch's block."""
        self._program.run_sections(stretch.beside)

    def needed(self) -> tuple[int, ...]:
        """The experts that were chosen in the block that was computed last, each of them once."""
        words = self._words()
        stop = _HEAD + _RECORD * words[0]
        self._panels = {}
        for first in range(_HEAD, stop, _RECORD):
            expert = words[first + 1]
            self._panels.setdefault(expert, []).append(words[first + 1 : first + 4].tolist())
        return tuple(self._panels)

    def ask(self, block: int, experts: Sequence[int], places: Sequence[int]) -> None:
        """Compute what some of the needed experts of `block` say.

        They must be resident. places: for each of them, whose address of a whole block it has.
        """
        for table, whole in self._addresses[block]:
            entries = self._program.bytes_of(table).cast("Q")
            for expert, place in zip(experts, places, strict=True):
                entries[expert] = whole[place]
        words = self._words()
        panels = [panel for expert in experts for panel in self._panels[expert]]
        words[0] = len(panels)
        for first, panel in zip(range(_HEAD, len(words), _RECORD), panels, strict=False):
            for word, value in enumerate(panel, first + 1):
                words[word] = value
        section = self._sections[block]
        self._program.run_sections(range(section, section + 1))

    def rows_of(self, expert: int) -> tuple[int, ...]:
        """The rows of the step with a token that needs one of the needed experts."""
        words, row_of = self._words(), self._program.step.row_of
        places = (n for _, start, stop in self._panels[expert] for n in range(start, stop))
        pairs = (words[_HEAD + _RECORD * n] for n in places)
        return tuple(sorted({row_of[pair // self._used] for pair in pairs}))

    def _words(self) -> memoryview:
        """The table of `kernels/dispatch`."""
        return self._program.rows(self._table, self._program.limits.tokens).cast("i")
