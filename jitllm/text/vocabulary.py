"""A tokenizer's data: the words, how they merge, and what the special ones are for.

Knows the keys of GGUF metadata and the plain form that travels in a container. Knows no library.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from os import PathLike
from typing import Any, Literal, NoReturn, Self, cast, get_args

from jitllm.errors import BadContainer, BadSource, UnsupportedModel, shown
from jitllm.text.merges import derive_merges, number_merges, pack_ids, unpack_ids
from jitllm.text.special import SpecialTokens, TokenType
from jitllm.text.splits import SPLITS, find_split

Kind = Literal["spm", "bpe"]
AnyPath = str | PathLike[str]

SPACE = "\u2581"
"""What SentencePiece writes for a space."""

_KINDS: dict[str, Kind] = {"llama": "spm", "gpt2": "bpe"}  # by `tokenizer.ggml.model`


@dataclass(frozen=True, slots=True)
class VocabularyData:
    """Everything a tokenizer is made of, as plain values. A token's id is its place."""

    kind: Kind
    tokens: str
    """All texts behind one another, each behind the separator that is the first character."""
    types: bytes
    """One `TokenType` each."""
    merges: bytes
    """Pairs of ids, u32, little endian, best first. Ids from `num_tokens` on are of `fragments`."""
    fragments: str
    """Texts that merges make and need but that are no tokens; joined as `tokens`, or empty."""
    split: str
    """The pre-tokenizer's name, a row of `splits.py`; empty for "spm", which has none."""
    bos_id: int | None
    eos_id: int | None
    eot_id: int | None
    """Ends a turn of a chat."""
    unk_id: int | None
    pad_id: int | None
    stop_ids: tuple[int, ...]
    """All that end a reply, ascending; `eos_id` and `eot_id` are among them."""
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    """"spm" only: a text begins with a space that nobody wrote."""

    @property
    def num_tokens(self) -> int:
        return len(self.types)

    def texts(self) -> list[str]:
        """The tokens' texts; 262k of them take 10 ms, so keep the list."""
        return _split(self.tokens)

    def fragment_texts(self) -> list[str]:
        return _split(self.fragments)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object], path: AnyPath = "the source file") -> Self:
        """The tokenizer of a GGUF file with this `metadata`; merges are derived if need be.

        Raises `UnsupportedModel` for a kind or a pre-tokenizer without a row, `BadSource` (with
        `path`) for what is missing or does not fit together.
        """
        return cls(**_read_gguf(_Metadata(metadata, path)))

    def to_plain(self) -> dict[str, Any]:
        """As msgpack can write it."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        return plain | {"stop_ids": list(self.stop_ids)}

    @classmethod
    def from_plain(cls, plain: object, path: AnyPath) -> Self:
        """What `to_plain` gave. Raises `BadContainer` (with `path`) for anything else."""
        try:
            if not isinstance(plain, dict):
                raise ValueError(f"it is a {type(plain).__name__}")
            data = cls(**plain | {"stop_ids": tuple(plain["stop_ids"])})
            _check(data)
        except (KeyError, TypeError, ValueError) as error:
            raise BadContainer(path, f"its tokenizer makes no sense: {error}") from error
        return data


def _join(texts: Sequence[str]) -> str:
    if not texts:
        return ""
    taken = set().union(*texts)
    separator = next(c for code in range(0x110000) if (c := chr(code)) not in taken)
    return separator + separator.join(texts)


def _split(joined: str) -> list[str]:
    return joined[1:].split(joined[0]) if joined else []


def _check(data: VocabularyData) -> None:
    """Raise ValueError unless types and ids hold together."""
    for field in fields(data):
        value = getattr(data, field.name)
        wanted = {
            "kind": str,
            "tokens": str,
            "types": bytes,
            "merges": bytes,
            "fragments": str,
            "split": str,
            "stop_ids": tuple,
        }.get(field.name, bool if field.name.startswith("add_") else int | None)
        if not isinstance(value, cast("type", wanted)):
            raise ValueError(f"{field.name} is a {type(value).__name__}")
    if data.kind not in get_args(Kind):
        raise ValueError(f"it is of the unknown kind {shown(data.kind)}")
    if data.kind == "bpe" and data.split not in SPLITS:
        raise ValueError(f"its pre-tokenizer {shown(data.split)} is unknown")
    num_texts = data.tokens.count(data.tokens[0]) if data.tokens else 0
    if num_texts != data.num_tokens:
        raise ValueError("it has not as many texts as types")
    ids = (data.bos_id, data.eos_id, data.eot_id, data.unk_id, data.pad_id, *data.stop_ids)
    for token_id in ids:
        if token_id is not None and not (
            isinstance(token_id, int) and 0 <= token_id < data.num_tokens
        ):
            raise ValueError(f"token {shown(token_id)} of {data.num_tokens}")
    if (data.add_bos and data.bos_id is None) or (data.add_eos and data.eos_id is None):
        raise ValueError("it adds a token that it does not have")
    if len(data.merges) % 8:
        raise ValueError("its merges are not pairs")
    if data.merges:
        num_pieces = data.num_tokens + len(data.fragment_texts())
        if max(unpack_ids(data.merges)) >= num_pieces:
            raise ValueError(f"a merge names a piece beyond the last of {num_pieces}")


# How a GGUF file describes its tokenizer


class _Metadata:
    """Typed access to `tokenizer.ggml.*`."""

    def __init__(self, values: Mapping[str, object], path: AnyPath) -> None:
        self._values = values
        self.path = path

    def fail(self, problem: str) -> NoReturn:
        raise BadSource(self.path, f"its tokenizer makes no sense: {problem}")

    def get(self, key: str) -> object:
        return self._values.get(f"tokenizer.ggml.{key}")

    def text(self, key: str, default: str) -> str:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            self.fail(f"{key} is no text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fail(f"{key} is neither true nor false")
        return value

    def id(self, key: str, num_tokens: int, default: int | None = None) -> int | None:
        """A token's id; one beyond the vocabulary means that there is no such token."""
        value = self.get(key)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int | None):
            self.fail(f"{key} is no token id")
        return value if value is not None and 0 <= value < num_tokens else None

    def texts(self, key: str) -> list[str]:
        value = self.get(key)
        if not isinstance(value, list) or not value or not isinstance(value[0], str):
            self.fail(f"it has no {key}")
        return cast("list[str]", value)

    def numbers(self, key: str, count: int, *kinds: type) -> list[Any] | None:
        """The first `count` of a list of numbers, or None if there is no such list."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < count:
            self.fail(f"it has fewer {key} than tokens")
        if value and not isinstance(value[0], kinds):
            self.fail(f"its {key} are of the wrong kind")
        return value[:count]


def _read_gguf(metadata: _Metadata) -> dict[str, Any]:
    model = metadata.text("model", "")
    if model not in _KINDS:
        raise UnsupportedModel("tokenizer", model, _KINDS)
    kind = _KINDS[model]
    texts = metadata.texts("tokens")
    types = _read_types(metadata, len(texts))
    if kind == "spm":
        split, has_bos, add_bos = "", True, True
        merges, fragments = derive_merges(texts, _read_scores(metadata, len(texts)))
    else:
        split = metadata.text("pre", "default")
        row = find_split(split)
        has_bos, add_bos = row.has_bos, row.add_bos
        merges, fragments = _read_merges(metadata, texts)
    special = _read_special(metadata, kind, texts, types, has_bos)
    add_bos = metadata.flag("add_bos_token", add_bos)
    add_eos = metadata.flag("add_eos_token", False)
    if (add_bos and special["bos_id"] is None) or (add_eos and special["eos_id"] is None):
        metadata.fail("it adds a token that it does not have")
    return special | {
        "kind": kind,
        "tokens": _join(texts),
        "types": bytes(types),
        "merges": pack_ids(merges),
        "fragments": _join(fragments),
        "split": split,
        "add_bos": add_bos,
        "add_eos": add_eos,
        "add_space_prefix": kind == "spm" and metadata.flag("add_space_prefix", True),
    }


def _read_types(metadata: _Metadata, num_tokens: int) -> bytearray:
    numbers = metadata.numbers("token_type", num_tokens, int)
    if numbers is None:
        return bytearray([TokenType.NORMAL]) * num_tokens
    known = {int(kind): int(kind) for kind in TokenType}
    return bytearray(known.get(number, TokenType.UNDEFINED) for number in numbers)


def _read_scores(metadata: _Metadata, num_tokens: int) -> list[float]:
    scores = metadata.numbers("scores", num_tokens, int, float)
    if scores is None:
        metadata.fail("it has no scores")
    return scores


def _read_special(
    metadata: _Metadata, kind: Kind, texts: list[str], types: bytearray, has_bos: bool
) -> dict[str, Any]:
    """The ids of special tokens; corrects `types`."""
    num_tokens = len(texts)
    special = SpecialTokens(texts, types)
    defaults = (1, 2, 0) if kind == "spm" else (None, None, None)
    bos_id = metadata.id("bos_token_id", num_tokens, defaults[0])
    eos_id = metadata.id("eos_token_id", num_tokens, defaults[1])
    eot_id = metadata.id("eot_token_id", num_tokens)
    if eot_id is None:
        eot_id = special.end_of_turn()
    others = ("eom_token_id", "fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id")
    ends = (eos_id, eot_id, *(metadata.id(key, num_tokens) for key in others))
    stop_ids = special.stop_ids({token_id for token_id in ends if token_id is not None})
    return {
        "bos_id": bos_id if has_bos or metadata.get("bos_token_id") is not None else None,
        "eos_id": eos_id,
        "eot_id": eot_id,
        "unk_id": metadata.id("unknown_token_id", num_tokens, defaults[2]),
        "pad_id": metadata.id("padding_token_id", num_tokens),
        "stop_ids": tuple(sorted(stop_ids)),
    }


def _read_merges(metadata: _Metadata, texts: list[str]) -> tuple[array[int], list[str]]:
    try:
        return number_merges(metadata.texts("merges"), texts)
    except ValueError as error:
        metadata.fail(str(error))
