"""A model's weights in the memory of a device that has its own: what is there, and where it lies.

A part is a block, or the head, whose number comes after the last block. The matrices of a block
have a frame each; of the dense region only those tensors are there that some part reads, small ones
always. Blocks that only pass through have no frame, but turns in slots (`jitllm.memory.slots`).
Knows spans and addresses. Knows no pager: whoever fills a span says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from jitllm.devices.vulkan.arena import Arena, DeviceSpan
from jitllm.formats.jlm import TensorEntry
from jitllm.kernels.op import Op, Weight
from jitllm.memory.device_experts import DeviceExperts
from jitllm.memory.slots import Slots
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

    block_bytes: what is held of each block, with its experts or without. experts: where a block's
    experts begin in it, and bytes from one to the next. give_back: where a span goes that is not
    used any more. carded: blocks whose experts come one by one; used: how many of them a token
    needs.
    """

    def __init__(
        self,
        graph: Graph,
        tensors: Iterable[TensorEntry],
        block_bytes: Sequence[int],
        experts: Mapping[int, tuple[int, int]],
        arena: Arena,
        give_back: Callable[[DeviceSpan], None],
        carded: Iterable[int] = (),
        used: int = 0,
    ) -> None:
        tensors = tuple(tensors)
        self._tensors = {(tensor.role, tensor.block): tensor for tensor in tensors}
        self._block_bytes = tuple(block_bytes)
        self._experts = experts
        self._arena = arena
        self._give_back = give_back
        self._spans: dict[_Key, DeviceSpan] = {}
        self._filled: set[_Key] = set()
        self.slots = Slots(arena, block_bytes, give_back)
        """Where blocks pass through."""
        sizes = {block: experts[block][1] for block in carded}
        self.experts = DeviceExperts(arena, sizes, _counts(tensors), used, give_back)
        """Where experts come one by one."""
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
        held = sum(span.num_bytes for span in self._spans.values())
        return held + self.slots.num_bytes + self.experts.num_bytes

    @property
    def num_blocks(self) -> int:
        """Blocks that are there."""
        return sum(isinstance(key, int) for key in self._filled) + self.slots.num_inside

    def hold(self, parts: Iterable[int], passing: Iterable[int] = ()) -> int:
        """Have room for these parts, and for no others; how many bytes are missing, and then
        nothing was taken. passing: blocks of them that have turns in slots instead of frames."""
        passing = sorted(passing)
        if tuple(passing) != self.slots.blocks:
            self.slots.close()
        wanted_blocks = frozenset(parts)
        wanted: frozenset[_Key] = frozenset().union(*(self._needs[part] for part in wanted_blocks))
        wanted -= frozenset(passing)
        for key in self._spans.keys() - wanted:
            self._filled.discard(key)
            self._give_back(self._spans.pop(key))
        added = sorted(wanted - self._spans.keys(), key=self._size, reverse=True)
        carded = wanted_blocks & self.experts.expert_bytes.keys()
        missing = self._take(added) or self.slots.serve(passing) or self.experts.serve(carded)
        if missing:
            for key in added:
                if (span := self._spans.pop(key, None)) is not None:
                    self._give_back(span)
        return missing

    def _take(self, keys: Iterable[_Key]) -> int:
        """Room for these; how many bytes are missing for the rest, once there is none for one."""
        lacking = list(keys)
        while lacking:
            size = self._size(lacking[0])
            while (span := self._arena.take(size)) is None:
                if not self.experts.narrow(size) and not self.slots.narrow(1):
                    missing = sum(map(self._size, lacking)) - self._arena.room_bytes
                    return missing if missing > 0 else size  # there is room, but not in one piece
            self._spans[lacking.pop(0)] = span
        return 0

    def loads(self, part: int) -> list[Load]:
        """What a part lacks, of what there is room for."""
        lacking = self._needs[part] & self._spans.keys() - self._filled
        return [self._load(key) for key in sorted(lacking, key=self._size)]

    def filled(self, load: Load) -> None:
        """It is there."""
        if isinstance(load.key, int) and load.key in self.slots.blocks:
            self.slots.filled(load.key)
        else:
            self._filled.add(load.key)

    def has(self, parts: Iterable[int]) -> bool:
        """Whether everything of these parts is there."""
        passing = frozenset(self.slots.blocks)
        return all(self._needs[part] - passing <= self._filled for part in parts)

    def stays(self, parts: Iterable[int]) -> bool:
        """Whether everything of these parts is there, and nothing of it makes way for others."""
        parts, slots = tuple(parts), self.slots
        passing = [part for part in slots.blocks if part in parts]
        return self.has(parts) and all(
            slots.has(block) and not slots.takes_turns(block) for block in passing
        )

    def pass_through(self, block: int) -> Load:
        """What brings a block into its slot, which is empty from now on."""
        self.slots.empty(block)
        return Load(self.slots.span(block), block, block, 0)

    def address(self, weight: Weight) -> int:
        """Where a weight lies; 0 while it is not there."""
        tensor = self._tensors[weight.role, weight.block]
        if _is_dense(tensor):
            span = self._spans.get((weight.role, weight.block))
            return 0 if span is None else span.address
        assert tensor.block is not None
        span = self._spans.get(tensor.block)
        begin = self.slots.address(tensor.block) if span is None else span.address
        if not begin:
            return 0
        start = begin + tensor.offset
        if weight.expert is not None and tensor.block in self.experts.expert_bytes:
            found = self.experts.address(tensor.block, weight.expert)
            return found + tensor.offset if found else 0
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


def _counts(tensors: Iterable[TensorEntry]) -> dict[int, int]:
    """How many experts each block has."""
    return {t.block: t.experts for t in tensors if t.block is not None and t.experts}


def _is_dense(tensor: TensorEntry) -> bool:
    return tensor.dense or tensor.block is None
