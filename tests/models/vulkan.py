"""Runs a whole model on a Vulkan device, without actors: weights, KV pages and steps by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from jitllm.devices.host import Limits, Pass
from jitllm.devices.vulkan.arena import DeviceSpan
from jitllm.devices.vulkan.program import VulkanProgram
from jitllm.formats.jlm import Container
from jitllm.kernels.kv_write import page_bytes
from jitllm.kernels.op import Ctx, Weight
from jitllm.kernels.sample import RECORD_BYTES, Sample, Sampled, Settings
from jitllm.models.registry import graph_of
from tests.ops.vulkan import Gpu


class VulkanModel:
    """One sequence of a model on a device; `close` it.

    page_tokens, kv_element: of its KV pages, which are taken for `context_tokens` at once.
    """

    def __init__(
        self,
        path: Path,
        gpu: Gpu,
        *,
        step_tokens: int,
        context_tokens: int,
        page_tokens: int = 64,
        kv_element: str = "f32",
        has_passes: bool = False,
    ) -> None:
        self._gpu = gpu
        self._spans: list[DeviceSpan] = []
        self._weights: dict[tuple[str, int | None, int], DeviceSpan] = {}
        with Container.open(path) as container:
            self.graph = graph_of(container)
            for tensor in container.header.tensors:
                for expert in range(max(tensor.experts, 1)):
                    data = container.read(tensor, expert)
                    self._weights[tensor.role, tensor.block, expert] = self._put(data)
        graph = self.graph
        self.limits = Limits(step_tokens, step_tokens, 1)
        try:
            self.program = self._program(page_tokens, kv_element, has_passes)
        except BaseException:
            self._give_back()
            raise
        num_pages = -(-context_tokens // page_tokens)
        table = np.zeros((num_pages, len(graph.blocks)), np.uint64)
        for page in table:
            for block, kv in enumerate(graph.kv):
                dims = (kv.kv_heads, kv.k_dim, kv.v_dim)
                size = page_bytes(*dims, page_tokens, kv_element)
                page[block] = self._put(b"\xff" * size).address
        self._table = self._put(table.tobytes())
        self._position = 0

    def _program(self, page_tokens: int, kv_element: str, has_passes: bool) -> VulkanProgram:
        graph, gpu = self.graph, self._gpu
        return VulkanProgram(
            graph.embed,
            graph.tables,
            list(enumerate(graph.blocks)),
            (*graph.head, Sample(graph.logits, Sample.scratch_buffer("sampling", graph.vocab))),
            limits=self.limits,
            arena=gpu.arena,
            staging=gpu.staging,
            pipelines=gpu.pipelines,
            weight_address=self._address,
            page_tokens=page_tokens,
            kv_element=kv_element,
            has_passes=has_passes,
        )

    def _put(self, data: bytes) -> DeviceSpan:
        span = self._gpu.arena.take(len(data))
        assert span is not None
        self._spans.append(span)
        self._gpu.staging.upload([(span, data)])
        return span

    def _address(self, weight: Weight) -> int:
        return self._weights[weight.role, weight.block, weight.expert or 0].address

    def step(
        self, tokens: Sequence[int], splits: Sequence[int] = (), passes: Sequence[Pass] = ()
    ) -> NDArray[np.float32]:
        """Logits [tokens, vocab] of the next tokens; blocks run in runs that end at `splits`."""
        step, count = self.program.step, len(tokens)
        for i, token in enumerate(tokens):
            step.tokens[i], step.positions[i] = int(token), self._position + i
            step.row_of[i], step.outputs[i] = 0, i
            record = Settings().pack()
            step.records[len(record) * i : len(record) * (i + 1)] = record
        step.tables[0] = self._table.address
        step.set_counts(count, count)
        step.set(Ctx.NUM_THREADS, 1)
        step.upload()
        bucket = self.program.bucket(count, count)
        edges = [0, *splits, self.program.num_blocks]
        for start, stop in zip(edges, edges[1:], strict=False):
            is_first, is_last = start == 0, stop == self.program.num_blocks
            part = [one for one in passes if start <= one.block < stop]
            how = {"embeds": is_first, "begins": is_first, "ends": is_last}
            self.program.run(start, stop, bucket, **how, passes=part)
        self._position += count
        logits = self.graph.logits
        out = np.zeros((count, logits.stride_bytes // 4), np.float32)
        self.program.read(logits, memoryview(out))
        return out[:, : logits.width]

    def move(self, block: int) -> None:
        """Put a block's weights elsewhere, and nonsense where they were."""
        for key, old in list(self._weights.items()):
            if key[1] == block:
                data = bytearray(old.num_bytes)
                self._gpu.staging.download(old, memoryview(data))
                self._weights[key] = self._put(bytes(data))
                self._gpu.staging.upload([(old, b"\xff" * old.num_bytes)])
        self.program.moved(block)

    def reply(self, tokens: Sequence[int], num_tokens: int) -> list[int]:
        """The likeliest next tokens, one by one, as the device samples them."""
        found: list[int] = []
        for _ in range(num_tokens):
            self.step(tokens)
            self.program.step.fetch_records(len(tokens))
            last = self.program.step.records[RECORD_BYTES * (len(tokens) - 1) :]
            tokens = [Sampled.unpack(last).token]
            found += tokens
        return found

    def restart(self) -> None:
        """Forget the sequence."""
        self._position = 0

    def prompt(self, tokens: Sequence[int], chunk_tokens: int) -> NDArray[np.float32]:
        """Logits of all tokens, in steps of `chunk_tokens`."""
        starts = range(0, len(tokens), chunk_tokens)
        return np.concatenate([self.step(tokens[s : s + chunk_tokens]) for s in starts])

    def close(self) -> None:
        """Give all memory back."""
        self.program.close()
        self._give_back()

    def _give_back(self) -> None:
        for span in self._spans:
            self._gpu.arena.give(span)
