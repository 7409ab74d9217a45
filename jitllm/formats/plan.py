"""What a conversion will write: every tensor, its place and its size, by arithmetic alone.

Knows the source's header and the container's. Reads no weight but rotary frequency factors, and
writes nothing. All that can be refused is refused here, before there is a file: architecture,
weight types, tensors that the model does not have or lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jitllm
from jitllm.errors import AnyPath, BadContainer, BadSource, UsageError
from jitllm.formats import layout
from jitllm.formats.gguf import Gguf
from jitllm.formats.jlm_head import (
    EXTENT_ALIGNMENT,
    PROLOGUE,
    VERSION,
    ExpertExtent,
    Extent,
    Header,
    Value,
    decode,
    encode,
    is_plain,
    round_up,
)
from jitllm.formats.placing import Placed, Source
from jitllm.models.hparams import BadModel, Hparams
from jitllm.models.registry import make_graph, spec_of
from jitllm.units import counted

_TEMPLATE_KEY = "tokenizer.chat_template"


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
    sources: tuple[Source, ...]
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
        """Bytes of each block, without its experts."""
        return tuple(extent.length for extent in self.header.blocks)

    @property
    def expert_bytes(self) -> int:
        """Bytes of all experts of all blocks."""
        return sum(expert.extent.length for expert in self.header.experts)

    @property
    def weight_types(self) -> dict[str, TypeCount]:
        """By name of the format, the largest share first; vectors count as F32."""
        sizes: dict[str, list[int]] = {}
        for tensor in self.header.tensors:
            matrices = max(tensor.experts, 1)
            sizes.setdefault(tensor.format.name, []).append(tensor.size_bytes * matrices)
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
    placed = Placed(gguf, lambda: _hparams(gguf, config))
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
        experts=tuple(
            ExpertExtent(block, expert, Extent(0, size, 0))
            for block, size in sorted(placed.expert_bytes.items())
            for expert in range(placed.num_experts[block])
        ),
    )
    header = _with_offsets(header)
    file_bytes = max(extent.end for _, extent in header.extents())
    front = encode(header)
    try:
        decode(gguf.path, front[: PROLOGUE.size], front[PROLOGUE.size :], file_bytes)
    except BadContainer as error:  # better now than after writing it
        raise BadSource(gguf.path, error.problem.removeprefix(f"{error.path}: ")) from error
    return Plan(gguf.path, header, tuple(placed.sources), len(front), file_bytes)


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


def _hparams(gguf: Gguf, config: dict[str, Value]) -> Hparams:
    try:
        return Hparams.read(config)
    except BadModel as error:
        raise BadSource(gguf.path, str(error)) from error


def _check_model(gguf: Gguf, arch: str, config: dict[str, Value], placed: Placed) -> None:
    """Wire the model once, as loading it will."""
    factors = next(
        (
            layout.vector(source.tensor.type, gguf.read(source.tensor)).tolist()
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
                f"the stop id {stop_id} is no token",
                f"the vocabulary has {counted(vocabulary.num_tokens, 'token')}",
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
    for _, extent in header.extents():
        placed.append(Extent(end, extent.length, 0))
        end = placed[-1].end
    return header.with_extents(placed)
