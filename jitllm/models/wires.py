"""What a graph is put together from: the tensor table, and a list of ops under way.

Knows shapes, and what a weight format wants of its activations. Knows no architecture and not which
op follows which. Tensors are untrusted: each one's shape is compared with what is asked for, and
one that nobody asked for is refused, because leaving it out would silently be another model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from jitllm.formats.names import source_name
from jitllm.kernels.expert_matmul import ExpertMatMul
from jitllm.kernels.layout import FORMATS
from jitllm.kernels.matmul import MatMul
from jitllm.kernels.norm import Norm
from jitllm.kernels.op import Buffer, Element, Op, Weight
from jitllm.kernels.quantize import Quantize
from jitllm.models.hparams import BadModel


class Tensors:
    """The tensor table; remembers what was asked for."""

    def __init__(self, weights: Iterable[Weight]) -> None:
        self.table: dict[tuple[str, int | None], Weight] = {}
        for weight in weights:
            if (weight.role, weight.block) in self.table:
                raise BadModel(f"tensor {tensor_name(weight)} occurs twice")
            self.table[weight.role, weight.block] = weight
        self.used: set[tuple[str, int | None]] = set()

    def matrix(
        self, role: str, block: int | None, rows: int, cols: int, experts: int = 0
    ) -> Weight:
        """A matrix of exactly this shape, or one for each of so many experts; `rows` 0 stands for
        as many as there are."""
        found = self._take(role, block)
        if found is None:
            raise BadModel(f"tensor {source_name(role, block)} is missing")
        shape = (found.experts, found.rows, found.cols)
        if not found.rows or shape != (experts, rows or found.rows, cols):
            wanted = _sizes(experts, rows or "any", cols)
            raise BadModel(f"tensor {tensor_name(found)} has shape {_shape(found)}, not {wanted}")
        return found

    def vector(self, role: str, block: int | None, size: int) -> Weight:
        """A vector of exactly this size."""
        found = self.optional_vector(role, block, size)
        if found is None:
            raise BadModel(f"tensor {source_name(role, block)} is missing")
        return found

    def optional_vector(self, role: str, block: int | None, size: int) -> Weight | None:
        """A vector of exactly this size, or None where there is none."""
        found = self._take(role, block)
        if found is not None and (found.rows or found.cols != size):
            raise BadModel(f"tensor {tensor_name(found)} has shape {_shape(found)}, not [{size}]")
        return found

    def has(self, role: str, block: int | None = None) -> bool:
        """Is there a tensor of this role?"""
        return (role, block) in self.table

    def rows(self, role: str, block: int) -> int:
        """How many rows a matrix has, 0 where it is missing."""
        found = self.table.get((role, block))
        return found.rows if found else 0

    @property
    def blocks(self) -> set[int]:
        """Blocks that have tensors."""
        return {block for _, block in self.table if block is not None}

    def refuse_unused(self) -> None:
        """Every tensor must have been asked for."""
        for key, weight in self.table.items():
            if key not in self.used:
                raise BadModel(f"tensor {tensor_name(weight)} is no part of this architecture")

    def _take(self, role: str, block: int | None) -> Weight | None:
        self.used.add((role, block))
        return self.table.get((role, block))


def tensor_name(weight: Weight) -> str:
    return source_name(weight.role, weight.block)


def _shape(weight: Weight) -> str:
    return _sizes(weight.experts, weight.rows, weight.cols)


def _sizes(*sizes: int | str) -> str:
    return f"[{', '.join(str(size) for size in sizes if size)}]"


class Ops:
    """Collects the ops of one part; quantises a source at most once, and only on demand."""

    def __init__(self, tensors: Tensors, block: int | None = None) -> None:
        self.tensors = tensors
        self.block = block
        self.ops: list[Op] = []
        self.quantized: set[Buffer] = set()

    def has(self, role: str) -> bool:
        """Has the block a tensor of this role?"""
        return self.tensors.has(role, self.block)

    def add(self, op: Op) -> None:
        """Append an op; what it writes is quantised afresh by its next reader."""
        self.ops.append(op)
        self.quantized -= set(op.writes)

    def norm(
        self,
        role: str,
        src: Buffer,
        dst: Buffer,
        eps: float,
        *,
        segment: int = 0,
        add: Buffer | None = None,
    ) -> None:
        """Normalise rows, or the segments of them."""
        segment = segment or src.width
        gain = self.tensors.vector(role, self.block, segment)
        self.add(Norm(src, dst, gain, eps, segment, add))

    def product(
        self, role: str, src: Buffer, dst: Buffer, add: Buffer | None = None, scale: float = 1.0
    ) -> None:
        """Multiply by a matrix of the block, with its bias if it has one."""
        weight = self.tensors.matrix(role, self.block, dst.width, src.width)
        self.product_with(weight, src, dst, self._bias(role, dst), add, scale)

    def product_with(
        self,
        weight: Weight,
        src: Buffer,
        dst: Buffer,
        bias: Weight | None = None,
        add: Buffer | None = None,
        scale: float = 1.0,
    ) -> None:
        """Multiply by `weight`: its format decides whether it meets f32 or quantised rows."""
        self.add(MatMul(self._as_wanted(weight, src), dst, weight, bias, add, scale))

    def expert_product(
        self, role: str, src: Buffer, dst: Buffer, shape: tuple[int, int, int], table: Buffer
    ) -> None:
        """Multiply each row by the matrices of its experts; shape: (experts, rows, cols)."""
        experts, rows, cols = shape
        weight = self.tensors.matrix(role, self.block, rows, cols, experts)
        src, used = self._as_wanted(weight, src), dst.width // rows
        self.add(ExpertMatMul(src, dst, weight, table, used))

    def _as_wanted(self, weight: Weight, src: Buffer) -> Buffer:
        return self._quantized(src) if FORMATS[weight.format].is_quantized else src

    def _bias(self, role: str, dst: Buffer) -> Weight | None:
        return self.tensors.optional_vector(f"{role}.bias", self.block, dst.width)

    def _quantized(self, src: Buffer) -> Buffer:
        twin = replace(src, name=f"{src.name}q", element=Element.Q8)
        if src not in self.quantized:
            self.add(Quantize(src, twin))
            self.quantized.add(src)
        return twin
