"""Blocks of a program on a Vulkan device whose experts come to it one by one.

The table of chosen experts is read back once they are known; kernels find those that are there by a
table of addresses, which is written anew for each part of them. Knows no pager and no frames.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence

from jitllm.devices.mixtures import Chosen, table_of
from jitllm.devices.vulkan.program import VulkanProgram
from jitllm.devices.vulkan.runner import VulkanRunner
from jitllm.kernels.dispatch import HEAD_BYTES
from jitllm.kernels.expert_matmul import ExpertMatMul
from jitllm.kernels.op import Const, Op, Weight


class VulkanMixture:
    """See above. blocks: the ops of all blocks of the program, in order; carded: those whose
    experts come one by one. address: where a matrix of an expert lies that is there."""

    def __init__(
        self,
        program: VulkanProgram,
        runner: VulkanRunner,
        blocks: Sequence[Sequence[Op]],
        carded: Iterable[int],
        address: Callable[[Weight], int],
    ) -> None:
        self._program = program
        self._runner = runner
        self._address = address
        self._table, self._used = table_of(blocks)
        self._weights = {
            block: [op.weight for op in blocks[block] if isinstance(op, ExpertMatMul)]
            for block in carded
        }
        self._entries = {
            weight: array("Q", bytes(8 * weight.experts))
            for weights in self._weights.values()
            for weight in weights
        }
        self._words = memoryview(bytearray(HEAD_BYTES))
        self._chosen = Chosen(self._words.cast("i"), self._used)
        self._is_cut = False

    def needed(self) -> tuple[int, ...]:
        """The experts that were chosen in the block that was computed last, each of them once."""
        num_tokens = self._runner.step.num_tokens
        self._words = memoryview(bytearray(num_tokens * self._table.stride_bytes))
        self._program.read(self._table, self._words)
        self._chosen = Chosen(self._words.cast("i"), self._used)
        self._is_cut = False
        return self._chosen.experts

    def ask(self, block: int, experts: Sequence[int]) -> None:
        """Compute what some of the needed experts of `block` say. They must be there."""
        for weight in self._weights[block]:
            entries = self._entries[weight]
            for expert in experts:
                entries[expert] = self._address(weight.of_expert(expert))
            self._program.const(Const(f"{weight.role}.{weight.block}", entries.tobytes()))
        if self._is_cut or len(experts) < len(self._chosen.experts):  # else it is as it should be
            self._is_cut = True
            self._chosen.keep(experts)
            self._program.write(self._table, self._words)
        section = self._program.blocks[block].stop - 2
        self._runner.run_sections(range(section, section + 1), begins=False, ends=False)

    def rows_of(self, expert: int) -> tuple[int, ...]:
        """The rows of the step with a token that needs one of the needed experts."""
        return self._chosen.rows_of(expert, self._runner.step.row_of)
