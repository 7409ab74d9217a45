"""The header of a container: what is in it, its bytes, and every check that they are put to.

Knows bytes, shapes and extents. Knows no architecture and no source format. A container is
untrusted: nothing is allocated from a length, and no offset leaves this module, before it has been
compared with the bytes that there are.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NoReturn, cast

import msgpack
import xxhash

from jitllm.errors import AnyPath, BadContainer, shown
from jitllm.kernels.layout import FORMATS, FormatCode
from jitllm.units import counted

MAGIC = b"JITLLM\0\0"
VERSION = 2
EXTENT_ALIGNMENT = 4096
TENSOR_ALIGNMENT = 64
MAX_HEADER_BYTES = 256 << 20
MAX_DIM = 1 << 31
MAX_BYTES = 1 << 63

PROLOGUE = struct.Struct("<8sIIQQ")
"""Magic, version, zero, bytes of the msgpack that follows, xxh3 of all this before it and of it."""
_SUMMED_BYTES = 24
"""Of the prologue: what stands before the sum."""

# msgpack allocates an array when it meets its length, and nests up to 1024 deep: these keep a
# hostile header under 128 MiB. Long lists of numbers and texts travel as one string of bytes.
_MAX_ITEMS = 1 << 14
_MAX_CONTAINERS = 1 << 16
_MAX_DEPTH = 4

Value = int | float | str | bool | list[Any]
Plain = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies and what it is.

    rows: 0 for a plain f32 vector of `cols` elements. dense: it lies in the dense region, as all
    vectors and all tensors without a block do; any other lies in its block's extent.
    offset: bytes from the start of that extent, a multiple of 64.
    experts: there is one such matrix in the extent of each of so many experts of the block, all at
    the same offset; 0 for a single one.
    """

    role: str
    block: int | None
    format: FormatCode
    rows: int
    cols: int
    dense: bool
    offset: int
    size_bytes: int
    experts: int = 0

    @property
    def name(self) -> str:
        """For messages: `attn_q of block 3`."""
        return self.role if self.block is None else f"{self.role} of block {self.block}"


@dataclass(frozen=True, slots=True)
class Extent:
    """A span of the file: absolute offset (a multiple of 4096), bytes used, and their xxh3.

    The file goes on to the next multiple of 4096, so that whole pages can be read.
    """

    offset: int
    length: int
    xxh3: int

    @property
    def end(self) -> int:
        """Where the last page of the extent ends."""
        return round_up(self.offset + self.length, EXTENT_ALIGNMENT)


@dataclass(frozen=True, slots=True)
class ExpertExtent:
    """The extent of one expert of one block."""

    block: int
    expert: int
    extent: Extent


@dataclass(frozen=True, slots=True)
class Header:
    """Everything about a model but its weights.

    config: the source's keys of its architecture, without the prefix. vocabulary: plain data of
    `text.vocabulary.VocabularyData`. chat_templates: by name; "default" is the unnamed one.
    stop_ids: tokens that end a reply. fingerprint: what was converted, and by what.
    """

    version: int
    arch: str
    config: dict[str, Value]
    tensors: tuple[TensorEntry, ...]
    vocabulary: Plain
    chat_templates: dict[str, str]
    stop_ids: tuple[int, ...]
    fingerprint: dict[str, str | int]
    dense: Extent
    blocks: tuple[Extent, ...]
    experts: tuple[ExpertExtent, ...] = ()
    vision: tuple[Extent, ...] = ()

    def extents(self) -> Iterator[tuple[str, Extent]]:
        """Every extent with its name, in the order of the file."""
        yield "dense region", self.dense
        for number, (block, *experts) in enumerate(self.runs()):
            yield f"block {number}", block
            for expert, extent in enumerate(experts):
                yield f"expert {expert} of block {number}", extent
        for number, extent in enumerate(self.vision):
            yield f"vision block {number}", extent

    @property
    def weight_bytes(self) -> int:
        """All weights."""
        return sum(extent.length for _, extent in self.extents())

    @property
    def frame_bytes(self) -> tuple[int, ...]:
        """Of each block with its experts, from its start in the file to its end."""
        return tuple(run[-1].offset + run[-1].length - run[0].offset for run in self.runs())

    def with_extents(self, extents: Iterable[Extent]) -> Header:
        """The same with other extents, given in the order of `extents`."""
        found = iter(extents)
        dense = next(found)
        blocks, experts = [], []
        for number, (_, *present) in enumerate(self.runs()):
            blocks.append(next(found))
            experts += [ExpertExtent(number, e, next(found)) for e in range(len(present))]
        return replace(
            self,
            dense=dense,
            blocks=tuple(blocks),
            experts=tuple(experts),
            vision=tuple(found),
        )

    def runs(self) -> tuple[tuple[Extent, ...], ...]:
        """Of each block its extent, then those of its experts, one behind the other."""
        return runs(self.blocks, self.experts)

    def extent_of(self, tensor: TensorEntry, expert: int = 0) -> Extent:
        """The extent in which a tensor lies, or that of an expert."""
        if tensor.dense or tensor.block is None:
            return self.dense
        if not tensor.experts:
            return self.blocks[tensor.block]
        place = (tensor.block, expert)
        return next(e.extent for e in self.experts if (e.block, e.expert) == place)


def runs(
    blocks: Sequence[Extent], experts: Iterable[ExpertExtent]
) -> tuple[tuple[Extent, ...], ...]:
    """Of each block its extent, then those of its experts in order."""
    found = [[extent] for extent in blocks]
    for expert in experts:
        found[expert.block].append(expert.extent)
    return tuple(map(tuple, found))


def expert_places(tensors: Iterable[TensorEntry]) -> dict[int, tuple[int, int]]:
    """Of each block with experts: bytes from its start to the first of them, and from one expert to
    the next, in the file and in memory alike."""
    own: dict[int, int] = {}
    each: dict[int, int] = {}
    for tensor in tensors:
        if tensor.block is not None and not tensor.dense:
            ends = each if tensor.experts else own
            ends[tensor.block] = max(ends.get(tensor.block, 0), tensor.offset + tensor.size_bytes)
    return {
        block: (round_up(own.get(block, 0), EXTENT_ALIGNMENT), round_up(end, EXTENT_ALIGNMENT))
        for block, end in each.items()
    }


def round_up(number: int, multiple: int) -> int:
    """The next multiple."""
    return -(-number // multiple) * multiple


def is_plain(value: object, depth: int = 0) -> bool:
    """Whether a value is a number, a text, a truth value, or a list of such (lists in lists)."""
    if isinstance(value, list):
        return depth < _MAX_DEPTH and all(is_plain(item, depth + 1) for item in value)
    return isinstance(value, int | float | str)


# --- to bytes and back ------------------------------------------------------------------------

_EXTENT = struct.Struct("<QQQ")
_EXPERT = struct.Struct("<IIQQQ")
# Fixed-size records: a header is as long before the sums are known as after.


def encode(header: Header) -> bytes:
    """The front of a container: prologue and msgpack. Its length does not depend on the sums."""
    plain = {
        "arch": header.arch,
        "config": header.config,
        "tensors": [list(_cells(tensor)) for tensor in header.tensors],
        "vocabulary": header.vocabulary,
        "chat_templates": header.chat_templates,
        "stop_ids": list(header.stop_ids),
        "fingerprint": header.fingerprint,
        "dense": _pack_extents([header.dense]),
        "blocks": _pack_extents(header.blocks),
        "experts": b"".join(
            _EXPERT.pack(e.block, e.expert, *_cells(e.extent)) for e in header.experts
        ),
        "vision": _pack_extents(header.vision),
    }
    body = cast("bytes", msgpack.packb(plain))
    front = PROLOGUE.pack(MAGIC, header.version, 0, len(body), 0)[:_SUMMED_BYTES]
    return front + checksum(front, body).to_bytes(8, "little") + body


def checksum(front: bytes, body: bytes) -> int:
    """The header's sum: of the first 24 bytes of the file and of the msgpack."""
    digest = xxhash.xxh3_64(front[:_SUMMED_BYTES])
    digest.update(body)
    return digest.intdigest()


def _cells(record: Any) -> Iterable[Any]:
    return (getattr(record, field.name) for field in fields(record))


def _pack_extents(extents: Iterable[Extent]) -> bytes:
    return b"".join(_EXTENT.pack(*_cells(extent)) for extent in extents)


def decode(path: AnyPath, front: bytes, body: bytes, file_bytes: int) -> Header:
    """The header in a prologue and its msgpack, checked against the size of the file.

    Raises BadContainer, naming the field.
    """
    return _Decoder(path, file_bytes).header(front, body)


class _Decoder:
    """Takes plain data apart; `fail` says where it makes no sense."""

    def __init__(self, path: AnyPath, file_bytes: int) -> None:
        self.path = path
        self.file_bytes = file_bytes
        self.num_containers = 0

    def fail(self, problem: str) -> NoReturn:
        raise BadContainer(self.path, problem)

    def header(self, front: bytes, body: bytes) -> Header:
        _, version, zero, _, stated = PROLOGUE.unpack(front)
        if stated != checksum(front, body):
            self.fail("the checksum of its header is wrong")
        if zero:
            self.fail("its reserved field is not zero")
        plain = self.mapping(self.unpack(body), "the header")
        names = {field.name for field in fields(Header)} - {"version"}
        if plain.keys() != names:
            self.fail(f"its header lacks or adds {shown(sorted(plain.keys() ^ names))}")
        header = Header(
            version=version,
            arch=self.text(plain["arch"], "arch"),
            config=self.config(plain["config"]),
            tensors=tuple(self.tensor(cells) for cells in self.items(plain["tensors"], "tensors")),
            vocabulary=self.mapping(plain["vocabulary"], "vocabulary"),
            chat_templates=self.templates(plain["chat_templates"]),
            stop_ids=tuple(
                self.number(i, "a stop id", MAX_DIM)
                for i in self.items(plain["stop_ids"], "stop_ids")
            ),
            fingerprint=self.fingerprint(plain["fingerprint"]),
            dense=self.dense(plain["dense"]),
            blocks=self.extents(plain["blocks"], "blocks"),
            experts=tuple(
                ExpertExtent(block, expert, Extent(*span))
                for block, expert, *span in self.records(_EXPERT, plain["experts"], "experts")
            ),
            vision=self.extents(plain["vision"], "vision"),
        )
        self.check_experts(header)
        self.check_extents(header, PROLOGUE.size + len(body))
        self.check_tensors(header)
        self.check_tokens(header)
        return header

    # --- values -------------------------------------------------------------------------------

    def unpack(self, body: bytes) -> object:
        try:
            return msgpack.unpackb(
                body,
                object_hook=self.count,
                list_hook=self.count,
                max_array_len=_MAX_ITEMS,
                max_map_len=_MAX_ITEMS,
                max_ext_len=0,
            )
        except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
            self.fail(f"its header is no sound msgpack: {error or type(error).__name__}")

    def count(self, container: Any) -> Any:
        self.num_containers += 1
        if self.num_containers > _MAX_CONTAINERS:
            raise ValueError(f"more than {_MAX_CONTAINERS} lists and maps")
        return container

    def mapping(self, value: object, what: str) -> Plain:
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            self.fail(f"{what} is no map of names")
        return value

    def items(self, value: object, what: str) -> list[Any]:
        if not isinstance(value, list):
            self.fail(f"{what} is no list")
        return value

    def text(self, value: object, what: str) -> str:
        if not isinstance(value, str):
            self.fail(f"{what} is no text")
        return value

    def number(self, value: object, what: str, stop: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < stop:
            self.fail(f"{what} is {shown(value)}, not a number below {stop}")
        return value

    def config(self, value: object) -> dict[str, Value]:
        config = self.mapping(value, "config")
        for key, item in config.items():
            if not is_plain(item):
                self.fail(f"config {shown(key)} is a {type(item).__name__}")
        return config

    def templates(self, value: object) -> dict[str, str]:
        templates = self.mapping(value, "chat_templates")
        return {
            name: self.text(text, f"chat template {shown(name)}")
            for name, text in templates.items()
        }

    def fingerprint(self, value: object) -> dict[str, str | int]:
        prints = self.mapping(value, "fingerprint")
        for key, item in prints.items():
            if not isinstance(item, str | int):
                self.fail(f"fingerprint {shown(key)} is a {type(item).__name__}")
        return prints

    def records(self, kind: struct.Struct, value: object, what: str) -> Iterator[tuple[int, ...]]:
        if not isinstance(value, bytes) or len(value) % kind.size:
            self.fail(f"{what} is not a number of records of {kind.size} bytes")
        if len(value) // kind.size > self.file_bytes // EXTENT_ALIGNMENT:
            self.fail(f"it has more {what} than pages")
        return kind.iter_unpack(value)

    def extents(self, value: object, what: str) -> tuple[Extent, ...]:
        return tuple(Extent(*record) for record in self.records(_EXTENT, value, what))

    def dense(self, value: object) -> Extent:
        found = self.extents(value, "dense")
        if len(found) != 1:
            self.fail(f"it has {len(found)} dense regions")
        return found[0]

    def tensor(self, value: object) -> TensorEntry:
        cells = self.items(value, "a tensor")
        if len(cells) != len(fields(TensorEntry)):
            self.fail(f"a tensor has {len(cells)} fields, not {len(fields(TensorEntry))}")
        role, block, code, rows, cols, dense, offset, size, experts = cells
        if not isinstance(role, str) or not _ROLE.fullmatch(role):
            self.fail(f"a tensor has the role {shown(role)}")
        if block is not None:
            block = self.number(block, f"the block of {role}", MAX_DIM)
        if isinstance(code, bool) or not isinstance(code, int) or code not in FORMATS:
            self.fail(f"{role} has the unknown weight format {shown(code)}")
        if not isinstance(dense, bool):
            self.fail(f"the place of {role} is {shown(dense)}")
        return TensorEntry(
            role,
            block,
            FormatCode(code),
            self.number(rows, f"the rows of {role}", MAX_DIM),
            self.number(cols, f"the columns of {role}", MAX_DIM),
            dense,
            self.number(offset, f"the offset of {role}", MAX_BYTES),
            self.number(size, f"the size of {role}", MAX_BYTES),
            self.number(experts, f"the experts of {role}", MAX_DIM),
        )

    # --- what must hold between them ----------------------------------------------------------

    def check_experts(self, header: Header) -> None:
        """Each block's in order, as many as it has tensors for, as long as these, behind it."""
        counts: dict[int, int] = {}
        for expert in header.experts:
            if expert.block >= len(header.blocks):
                self.fail(f"an expert belongs to block {expert.block} of {len(header.blocks)}")
            if expert.expert != counts.get(expert.block, 0):
                self.fail(f"expert {expert.expert} of block {expert.block} is out of order")
            counts[expert.block] = expert.expert + 1
        for tensor in header.tensors:
            block = -1 if tensor.block is None else tensor.block
            if tensor.experts and tensor.experts != counts.get(block):
                self.fail(f"{tensor.name} is of {counted(tensor.experts, 'expert')}, not there")
        places = expert_places(header.tensors)
        if places.keys() != counts.keys():
            self.fail("there are experts without tensors")
        for index, (own, *experts) in enumerate(header.runs()):
            first, stride = places.get(index, (0, 0))
            for number, extent in enumerate(experts):
                begin = own.offset + first + number * stride
                if extent.offset != begin or extent.end != begin + stride:
                    self.fail(f"expert {number} of block {index} is not where it must be")

    def check_extents(self, header: Header, header_bytes: int) -> None:
        """Aligned, inside the file, behind the header, and apart from each other."""
        for name, extent in header.extents():
            if extent.offset % EXTENT_ALIGNMENT:
                self.fail(
                    f"the {name} begins at {extent.offset}, no multiple of {EXTENT_ALIGNMENT}"
                )
            if extent.length == 0:
                self.fail(f"the {name} is empty")
            if extent.end > self.file_bytes:
                self.fail(f"the {name} ends at byte {extent.end} and the file at {self.file_bytes}")
        end, before = header_bytes, "header"
        for name, extent in sorted(header.extents(), key=lambda named: named[1].offset):
            if extent.offset < end:
                self.fail(f"the {name} begins inside the {before}")
            end, before = extent.end, name

    def check_tensors(self, header: Header) -> None:
        """Each where it must be, as long as it must be, and only once."""
        seen: set[tuple[str, int | None]] = set()
        runs = header.runs()
        for tensor in header.tensors:
            if (tensor.role, tensor.block) in seen:
                self.fail(f"{tensor.name} stands there twice")
            seen.add((tensor.role, tensor.block))
            if tensor.block is not None and tensor.block >= len(header.blocks):
                self.fail(f"{tensor.name}: the model has {counted(len(header.blocks), 'block')}")
            if problem := _shape_problem(tensor):
                self.fail(f"{tensor.name} {problem}")
            if tensor.dense or tensor.block is None:
                extents: tuple[Extent, ...] = (header.dense,)
            else:
                block, *experts = runs[tensor.block]
                extents = tuple(experts) if tensor.experts else (block,)
            length = min(extent.length for extent in extents)
            if tensor.offset + tensor.size_bytes > length:
                end = tensor.offset + tensor.size_bytes
                self.fail(f"{tensor.name} ends at {end} of {length} bytes")
        self.check_overlaps(header)

    def check_overlaps(self, header: Header) -> None:
        end: dict[tuple[int | None, bool], int] = {}
        for tensor in sorted(header.tensors, key=lambda t: t.offset):
            place = (None if tensor.dense else tensor.block, tensor.experts > 0)
            if tensor.offset < end.get(place, 0):
                self.fail(f"{tensor.name} overlaps another tensor")
            end[place] = tensor.offset + tensor.size_bytes

    def check_tokens(self, header: Header) -> None:
        """Every id that the tokenizer can make has a row in the embedding matrix."""
        types = header.vocabulary.get("types")
        if not isinstance(types, bytes):
            self.fail("its vocabulary has no types")
        for tensor in header.tensors:
            if tensor.role == "token_embd" and tensor.rows < len(types):
                self.fail(f"it has {counted(len(types), 'token')} and rows for {tensor.rows}")
        for stop_id in header.stop_ids:
            self.number(stop_id, "a stop id", len(types))


_ROLE = re.compile(r"[a-z][a-z0-9_]{0,63}(\.[a-z]{1,16})?")


def _shape_problem(tensor: TensorEntry) -> str:
    """What is wrong with a tensor's place, shape and size; empty when nothing is."""
    form = FORMATS[tensor.format]
    if tensor.dense != (tensor.block is None or tensor.rows == 0):
        return "lies in the wrong extent"
    if tensor.cols == 0 or tensor.cols % form.col_multiple:
        return f"has {counted(tensor.cols, 'column')}, which {form.name} cannot have"
    if tensor.rows == 0 and tensor.format is not FormatCode.F32:
        return f"is a vector in {form.name}"
    if tensor.experts and tensor.dense:
        return "is of experts and in the dense region"
    if tensor.offset % TENSOR_ALIGNMENT:
        return f"begins at {tensor.offset}, no multiple of {TENSOR_ALIGNMENT}"
    needed = tensor_bytes(tensor.format, tensor.rows, tensor.cols)
    if tensor.size_bytes != needed:
        return f"has {tensor.size_bytes} bytes and needs {needed}"
    return ""


def tensor_bytes(code: FormatCode, rows: int, cols: int) -> int:
    """Bytes of a matrix in its tiles, or (rows 0) of an f32 vector."""
    return FORMATS[code].matrix_bytes(rows, cols) if rows else 4 * cols
