"""Where each tensor of a source goes in a container: its extent, its offset, its shape there.

Knows names, shapes and sizes. Reads no weight, and knows no file offset. Names that no graph has a
use for, and shapes that no container can hold, are refused here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from jitllm.errors import BadSource, UnsupportedModel, shown
from jitllm.formats.fused import is_fused, parts_of
from jitllm.formats.ggml import GgmlType
from jitllm.formats.gguf import Gguf, GgufTensor
from jitllm.formats.jlm_head import TENSOR_ALIGNMENT, TensorEntry, round_up, tensor_bytes
from jitllm.formats.names import EXPERT_ROLES, ROW_ROLES, role_of
from jitllm.kernels.layout import FormatCode
from jitllm.models.hparams import Hparams

_VECTOR_TYPES = (GgmlType.F32, GgmlType.F16, GgmlType.BF16)


class Source(NamedTuple):
    """Where a tensor comes from; first: its first row (of a vector: element) in there."""

    tensor: GgufTensor
    first: int = 0


class Placed:
    """The tensors of a file in the order of the container, each with its place.

    read_hparams: called where a tensor must be taken apart by the model's numbers.
    """

    def __init__(self, gguf: Gguf, read_hparams: Callable[[], Hparams]) -> None:
        self.entries: list[TensorEntry] = []
        self.sources: list[Source] = []
        self._path = gguf.path
        self._read_hparams = read_hparams
        found = [(*role_of(name), tensor) for name, tensor in gguf.tensors.items()]
        self.num_blocks = max((b + 1 for _, b, _ in found if b is not None), default=0)
        _check_blocks(gguf, {b for _, b, _ in found if b is not None}, self.num_blocks)
        self.dense_bytes = 0
        self.block_bytes = [0] * self.num_blocks
        self.expert_bytes: dict[int, int] = {}
        """Of one expert of a block, where there are some."""
        self.num_experts: dict[int, int] = {}
        parts = [part for one in found for part in self._parts(*one)]
        dense = [p for p in parts if p.is_dense]
        in_blocks = sorted((p for p in parts if not p.is_dense), key=lambda p: p.block or 0)
        for part in (*dense, *in_blocks):
            self._place(part)

    def _parts(self, role: str, block: int | None, tensor: GgufTensor) -> Iterator[_Part]:
        """A tensor as the graph wants it: whole, or taken apart."""
        shape, first = _shape(self._path, role, tensor), 0
        parts = parts_of(role, self._read_hparams()) if is_fused(role) else ()
        total = shape.rows or shape.cols
        if parts and total != sum(rows for _, rows in parts):
            wanted = " + ".join(str(rows) for _, rows in parts)
            name = shown(tensor.name)
            raise BadSource(self._path, f"tensor {name} has {total} rows, not {wanted}")
        for part, rows in parts or ((role, total),):
            own = shape._replace(rows=rows) if shape.rows else shape._replace(cols=rows)
            yield _Part(part, block, own, Source(tensor, first))
            first += rows

    def _place(self, part: _Part) -> None:
        """Add a tensor behind what lies in its extent already."""
        block, shape = part.block, part.shape
        size = tensor_bytes(shape.format, shape.rows, shape.cols)
        if block is None or part.is_dense:
            offset = round_up(self.dense_bytes, TENSOR_ALIGNMENT)
            self.dense_bytes = offset + size
        elif shape.experts:
            offset = round_up(self.expert_bytes.get(block, 0), TENSOR_ALIGNMENT)
            self.expert_bytes[block] = offset + size
            self.num_experts[block] = shape.experts
        else:
            offset = round_up(self.block_bytes[block], TENSOR_ALIGNMENT)
            self.block_bytes[block] = offset + size
        form, rows, cols, experts = shape
        self.entries.append(
            TensorEntry(part.role, block, form, rows, cols, part.is_dense, offset, size, experts)
        )
        self.sources.append(part.source)


class _Shape(NamedTuple):
    """A tensor as the container has it; experts: 0 for a single matrix, rows: 0 for a vector."""

    format: FormatCode
    rows: int
    cols: int
    experts: int = 0


class _Part(NamedTuple):
    """A tensor of the container."""

    role: str
    block: int | None
    shape: _Shape
    source: Source

    @property
    def is_dense(self) -> bool:
        """It lies in the dense region."""
        return self.block is None or not self.shape.rows


def _check_blocks(gguf: Gguf, blocks: set[int], num_blocks: int) -> None:
    # One name may say a number in the millions: count what there is before making a list of it.
    if num_blocks != len(blocks):
        first = next(number for number in range(num_blocks) if number not in blocks)
        raise BadSource(gguf.path, f"block {first} of {num_blocks} is missing")


def _shape(path: Path, role: str, tensor: GgufTensor) -> _Shape:
    if 0 in tensor.shape:
        raise BadSource(path, f"tensor {shown(tensor.name)} is empty")
    match tensor.shape:
        case (cols,) if role not in ROW_ROLES:
            if tensor.type not in _VECTOR_TYPES:
                raise UnsupportedModel(
                    "vector type", tensor.type.name, (known.name for known in _VECTOR_TYPES)
                )
            return _Shape(FormatCode.F32, 0, cols)
        case (cols,):
            return _Shape(_format(tensor), 1, cols)
        case (cols, rows) if role not in EXPERT_ROLES:
            return _Shape(_format(tensor), rows, cols)
        case (cols, rows, experts) if role in EXPERT_ROLES:
            return _Shape(_format(tensor), rows, cols, experts)
        case _:
            raise BadSource(path, f"tensor {shown(tensor.name)} has {len(tensor.shape)} dimensions")


def _format(tensor: GgufTensor) -> FormatCode:
    if tensor.type.name not in FormatCode.__members__:
        raise UnsupportedModel("weight type", tensor.type.name, FormatCode.__members__)
    return FormatCode[tensor.type.name]
