"""A model's weights in the memory of a device that has its own: what is there, and where it lies.

A part is a block, or the head, whose number comes after the last block. The matrices of a block
have a frame each; of the dense region only those tensors are there that some part reads, small ones
always. Knows spans and addresses. Knows no pager: whoever fills a span says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from jitllm.devices.vulkan.arena import Arena, DeviceSpan
from jitllm.formats.jlm import TensorEntry
from jitllm.kernels.op import Op, Weight
from jitllm.models.graph import Graph

_Key = tuple[str, int | None] | int
"""A tensor of the dense region by role and block, or a block's frame by its number."""


@dataclass(frozen=True, slots=True)
class Load:
    """Bytes to be brought into a span. block: whose extent they are; None: `offset` bytes into the
    dense region."""

    span: DeviceSpan
    key: _Key
    block: int | None
    offset: int


class DeviceWeights:
    """The weights of one model on one device.

    block_bytes: of each block's extent. experts: where a block's experts begin in it, and bytes
    from one to the next. give_back: where a span goes that is not used any more.
    """

    def __init__(
        self,
        graph: Graph,
        tensors: Iterable[TensorEntry],
        block_bytes: Sequence[int],
        experts: Mapping[int, tuple[int, int]],
        arena: Arena,
        give_back: Callable[[DeviceSpan], None],
    ) -> None:
        self._tensors = {(tensor.role, tensor.block): tensor for tensor in tensors}
        self._block_bytes = tuple(block_bytes)
        self._experts = experts
        self._arena = arena
        self._give_back = give_back
        self._spans: dict[_Key, DeviceSpan] = {}
        self._filled: set[_Key] = set()
        self._needs = [frozenset(keys) for keys in self._by_part(graph)]

    def _by_part(self, graph: Graph) -> Iterator[set[_Key]]:
        """What each part needs. Whoever has the first block makes hidden states of tokens."""
        small: set[_Key] = {key for key, t in self._tensors.items() if _is_dense(t) and not t.rows}
        sections: list[Sequence[Op]] = [*graph.blocks, graph.head]
        sections[0] = (*graph.embed, *sections[0])
        for part, ops in enumerate(sections):
            keys = {(w.role, w.block) for op in (*graph.tables, *ops) for w in op.weights}
            needs = small | {key for key in keys if _is_dense(self._tensors[key])}
            yield needs | ({part} if part < graph.num_blocks else set())

    @property
    def num_bytes(self) -> int:
        """What all of it takes."""
        return sum(span.num_bytes for span in self._spans.values())

    @property
    def num_blocks(self) -> int:
        """Blocks that are there."""
        return sum(isinstance(key, int) for key in self._filled)

    def hold(self, parts: Iterable[int]) -> int:
        """Have room for these parts, and for no others; how many bytes are missing, and then
        nothing was taken."""
        wanted: frozenset[_Key] = frozenset().union(*(self._needs[part] for part in parts))
        for key in self._spans.keys() - wanted:
            self._filled.discard(key)
            self._give_back(self._spans.pop(key))
        taken: list[_Key] = []
        for key in sorted(wanted - self._spans.keys(), key=self._size, reverse=True):
            if (span := self._arena.take(self._size(key))) is None:
                need = sum(map(self._size, wanted - self._spans.keys()))
                for one in taken:
                    self._give_back(self._spans.pop(one))
                return max(need - self._arena.room_bytes, 1)
            self._spans[key] = span
            taken.append(key)
        return 0

    def loads(self, part: int) -> list[Load]:
        """What a part lacks, of what there is room for."""
        lacking = self._needs[part] & self._spans.keys() - self._filled
        return [self._load(key) for key in sorted(lacking, key=self._size)]

    def filled(self, load: Load) -> None:
        """It is there."""
        self._filled.add(load.key)

    def has(self, parts: Iterable[int]) -> bool:
        """Whether everything of these parts is there."""
        return all(self._needs[part] <= self._filled for part in parts)

    def address(self, weight: Weight) -> int:
        """Where a weight lies; 0 while it is not there."""
        tensor = self._tensors[weight.role, weight.block]
        if _is_dense(tensor):
            span = self._spans.get((weight.role, weight.block))
            return 0 if span is None else span.address
        assert tensor.block is not None
        if (span := self._spans.get(tensor.block)) is None:
            return 0
        start = span.address + tensor.offset
        if weight.expert is not None:
            first, stride = self._experts[tensor.block]
            start += first + weight.expert * stride
        return start

    def _size(self, key: _Key) -> int:
        return self._block_bytes[key] if isinstance(key, int) else self._tensors[key].size_bytes

    def _load(self, key: _Key) -> Load:
        if isinstance(key, int):
            return Load(self._spans[key], key, key, 0)
        return Load(self._spans[key], key, None, self._tensors[key].offset)

    def close(self) -> None:
        """Give everything back."""
        self.hold(())


def _is_dense(tensor: TensorEntry) -> bool:
    return tensor.dense or tensor.block is None
