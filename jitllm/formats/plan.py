"""What a conversion will write: every tensor, its place and its size, by arithmetic alone.

Knows the source's header and the container's. Reads no weight but rotary frequency factors, and
writes nothing. All that can be refused is refused here, before there is a file: architecture,
weight types, tensors that the model does not have or lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import jitllm
from jitllm.errors import AnyPath, BadContainer, BadSource, UnsupportedModel, UsageError, shown
from jitllm.formats import layout
from jitllm.formats.ggml import GgmlType
from jitllm.formats.gguf import Gguf, GgufTensor
from jitllm.formats.jlm_head import (
    EXTENT_ALIGNMENT,
    PROLOGUE,
    TENSOR_ALIGNMENT,
    VERSION,
    Extent,
    Header,
    TensorEntry,
    Value,
    decode,
    encode,
    is_plain,
    round_up,
    tensor_bytes,
)
from jitllm.formats.names import role_of
from jitllm.kernels.layout import FormatCode
from jitllm.models.hparams import BadModel
from jitllm.models.registry import make_graph, spec_of

_TEMPLATE_KEY = "tokenizer.chat_template"
_VECTOR_TYPES = (GgmlType.F32, GgmlType.F16, GgmlType.BF16)


class Vocabulary(Protocol):
    """What a plan needs to know of `text.vocabulary.VocabularyData`."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def stop_ids(self) -> tuple[int, ...]: ...

    def to_plain(self) -> dict[str, Any]: ...


ReadVocabulary = Callable[[Mapping[str, object], AnyPath], Vocabulary]
"""`VocabularyData.from_gguf`; passed in, because files know nothing of text."""


@dataclass(frozen=True, slots=True)
class TypeCount:
    """Tensors of one weight type, and the bytes they will take."""

    num_tensors: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A container before it is written: its header, without sums, and each tensor's source."""

    source: Path
    header: Header
    sources: tuple[GgufTensor, ...]
    """In the order of `header.tensors`."""
    header_bytes: int
    """With the prologue."""
    file_bytes: int

    @property
    def dense_bytes(self) -> int:
        """Bytes that are always resident."""
        return self.header.dense.length

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """Bytes of each block."""
        return tuple(extent.length for extent in self.header.blocks)

    @property
    def weight_types(self) -> dict[str, TypeCount]:
        """By name of the format, the largest share first; vectors count as F32."""
        sizes: dict[str, list[int]] = {}
        for tensor in self.header.tensors:
            sizes.setdefault(tensor.format.name, []).append(tensor.size_bytes)
        counts = {name: TypeCount(len(all_), sum(all_)) for name, all_ in sizes.items()}
        return dict(sorted(counts.items(), key=lambda item: -item[1].size_bytes))


def plan(
    source: AnyPath,
    *,
    read_vocabulary: ReadVocabulary,
    chat_template: str | None = None,
    stop_ids: Sequence[int] = (),
) -> Plan:
    """The plan of a conversion (`convert.py` has the arguments); writes nothing."""
    with Gguf.open(source) as gguf:
        return make_plan(gguf, read_vocabulary, chat_template, stop_ids)


def make_plan(
    gguf: Gguf,
    read_vocabulary: ReadVocabulary,
    chat_template: str | None = None,
    stop_ids: Sequence[int] = (),
) -> Plan:
    """The plan of converting an open file.

    Raises UnsupportedModel, which names what is not supported and lists what is; BadSource for a
    model that does not fit together; UsageError for a stop id that is no token.
    """
    arch = gguf.metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise BadSource(gguf.path, "it names no architecture")
    spec_of(arch)
    config = _config(gguf, arch)
    placed = _Placed(gguf)
    _check_model(gguf, arch, config, placed)
    vocabulary = read_vocabulary(gguf.metadata, gguf.path)
    header = Header(
        version=VERSION,
        arch=arch,
        config=config,
        tensors=tuple(placed.entries),
        vocabulary=vocabulary.to_plain(),
        chat_templates=_chat_templates(gguf.metadata, chat_template),
        stop_ids=_stop_ids(vocabulary, stop_ids),
        fingerprint=_fingerprint(gguf),
        dense=Extent(0, placed.dense_bytes, 0),
        blocks=tuple(Extent(0, size, 0) for size in placed.block_bytes),
    )
    header = _with_offsets(header)
    file_bytes = max(extent.end for _, extent in header.extents())
    front = encode(header)
    try:
        decode(gguf.path, front[: PROLOGUE.size], front[PROLOGUE.size :], file_bytes)
    except BadContainer as error:  # better now than after writing it
        raise BadSource(gguf.path, error.problem.removeprefix(f"{error.path}: ")) from error
    return Plan(gguf.path, header, tuple(placed.sources), len(front), file_bytes)


class _Placed:
    """The tensors of a file in the order of the container, each with its place."""

    def __init__(self, gguf: Gguf) -> None:
        self.entries: list[TensorEntry] = []
        self.sources: list[GgufTensor] = []
        found = [(*role_of(name), tensor) for name, tensor in gguf.tensors.items()]
        self.num_blocks = max((b + 1 for _, b, _ in found if b is not None), default=0)
        _check_blocks(gguf, {b for _, b, _ in found if b is not None}, self.num_blocks)
        self.dense_bytes = 0
        self.block_bytes = [0] * self.num_blocks
        in_dense = [t for t in found if t[1] is None or len(t[2].shape) == 1]
        in_blocks = [t for t in found if t[1] is not None and len(t[2].shape) != 1]
        for role, block, tensor in in_dense:
            self.dense_bytes = self._place(gguf.path, role, block, tensor, self.dense_bytes, True)
        for role, block, tensor in sorted(in_blocks, key=lambda t: t[1] or 0):
            number = block or 0
            self.block_bytes[number] = self._place(
                gguf.path, role, block, tensor, self.block_bytes[number], False
            )

    def _place(
        self, path: Path, role: str, block: int | None, tensor: GgufTensor, end: int, dense: bool
    ) -> int:
        """Add a tensor behind `end`; returns where it ends."""
        code, rows, cols = _shape(path, tensor)
        offset = round_up(end, TENSOR_ALIGNMENT)
        size = tensor_bytes(code, rows, cols)
        self.entries.append(TensorEntry(role, block, code, rows, cols, dense, offset, size))
        self.sources.append(tensor)
        return offset + size


def _check_blocks(gguf: Gguf, blocks: set[int], num_blocks: int) -> None:
    # One name may say a number in the millions: count what there is before making a list of it.
    if num_blocks != len(blocks):
        first = next(number for number in range(num_blocks) if number not in blocks)
        raise BadSource(gguf.path, f"block {first} of {num_blocks} is missing")


def _shape(path: Path, tensor: GgufTensor) -> tuple[FormatCode, int, int]:
    """Format, rows and columns in the container."""
    if 0 in tensor.shape:
        raise BadSource(path, f"tensor {shown(tensor.name)} is empty")
    match tensor.shape:
        case (cols,):
            if tensor.type not in _VECTOR_TYPES:
                raise UnsupportedModel(
                    "vector type", tensor.type.name, (known.name for known in _VECTOR_TYPES)
                )
            return FormatCode.F32, 0, cols
        case (cols, rows):
            if tensor.type.name not in FormatCode.__members__:
                raise UnsupportedModel("weight type", tensor.type.name, FormatCode.__members__)
            return FormatCode[tensor.type.name], rows, cols
        case _:
            raise BadSource(path, f"tensor {shown(tensor.name)} has {len(tensor.shape)} dimensions")


def _config(gguf: Gguf, arch: str) -> dict[str, Value]:
    prefix = f"{arch}."
    found = {
        key.removeprefix(prefix): value
        for key, value in gguf.metadata.items()
        if key.startswith(prefix)
    }
    if bad := next((key for key, value in found.items() if not is_plain(value)), None):
        raise BadSource(gguf.path, f"the value of {prefix}{bad} is not plain")
    return found


def _check_model(gguf: Gguf, arch: str, config: dict[str, Value], placed: _Placed) -> None:
    """Wire the model once, as loading it will."""
    factors = next(
        (
            layout.vector(source.type, gguf.read(source)).tolist()
            for entry, source in zip(placed.entries, placed.sources, strict=True)
            if entry.role == "rope_freqs" and entry.rows == 0
        ),
        None,
    )
    try:
        make_graph(arch, config, placed.entries, factors)
    except BadModel as error:
        raise BadSource(gguf.path, str(error)) from error


def _chat_templates(metadata: Mapping[str, object], given: str | None) -> dict[str, str]:
    found = {
        key.removeprefix(_TEMPLATE_KEY).removeprefix(".") or "default": value
        for key, value in metadata.items()
        if (key == _TEMPLATE_KEY or key.startswith(f"{_TEMPLATE_KEY}.")) and isinstance(value, str)
    }
    return found if given is None else found | {"default": given}


def _stop_ids(vocabulary: Vocabulary, added: Sequence[int]) -> tuple[int, ...]:
    for stop_id in added:
        if not 0 <= stop_id < vocabulary.num_tokens:
            raise UsageError(
                f"the stop id {stop_id} is no token", f"there are {vocabulary.num_tokens} tokens"
            )
    return tuple(sorted({*vocabulary.stop_ids, *added}))


def _fingerprint(gguf: Gguf) -> dict[str, str | int]:
    name = gguf.metadata.get("general.name")
    return {
        "source": gguf.path.name,
        "source_bytes": sum(path.stat().st_size for path in gguf.paths),
        "name": name if isinstance(name, str) else "",
        "writer": f"jitllm {jitllm.__version__}",
    }


def _with_offsets(header: Header) -> Header:
    """The header with its extents behind it and behind one another."""
    end = round_up(len(encode(header)), EXTENT_ALIGNMENT)
    placed: list[Extent] = []
    for extent in (header.dense, *header.blocks):
        placed.append(Extent(end, extent.length, 0))
        end = placed[-1].end
    return replace(header, dense=placed[0], blocks=tuple(placed[1:]))
