"""Text to token ids and back.

Knows vocabularies and the `tokenizers` library. Special tokens are cut out of a text here; the
library does what lies between them. Decoding needs no library at all. The library is set up at the
first `encode`, because that is the slow part of a start: for 262k tokens with 236k merges it takes
0.4 s and 120 MiB (0.6 s and 190 MiB with every merge that is possible; as JSON 1.2 s).
"""

from __future__ import annotations

import codecs
from collections.abc import Container, Iterable
from functools import cached_property
from typing import TYPE_CHECKING

from jitllm.errors import JitllmError
from jitllm.text.merges import unpack_ids
from jitllm.text.special import TokenType, byte_of
from jitllm.text.splits import SPLITS
from jitllm.text.vocabulary import SPACE, VocabularyData

if TYPE_CHECKING:
    import tokenizers

__all__ = ["StreamDecoder", "TokenType", "Tokenizer", "VocabularyData"]

_ALWAYS_MATCHED = (TokenType.USER_DEFINED,)
_SPECIAL = (TokenType.USER_DEFINED, TokenType.CONTROL, TokenType.UNKNOWN)
_HIDDEN = (TokenType.CONTROL, TokenType.UNKNOWN)


class Tokenizer:
    """One vocabulary at work. Several threads may use it."""

    def __init__(self, vocabulary: VocabularyData) -> None:
        self.vocabulary = vocabulary
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.stop_ids = frozenset(vocabulary.stop_ids)
        self.num_tokens = vocabulary.num_tokens
        self._pieces: dict[int, bytes] = {}
        self._said: dict[int, bytes] = {}
        self._byte_level = vocabulary.kind == "bpe" and SPLITS[vocabulary.split].byte_level

    def prepare(self) -> None:
        """Do now what the first `encode` would have to do."""
        _ = self._library, self._specials

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Token ids of `text`.

        `add_special`: with the BOS and EOS that this vocabulary adds. `parse_special`: what is
        spelled like a control token is that token; otherwise it is text, as in a user's message.
        Raises `JitllmError` if the vocabulary's parts do not fit together.
        """
        vocabulary = self.vocabulary
        ids: list[int] = []
        if add_special and vocabulary.add_bos and vocabulary.bos_id is not None:
            ids.append(vocabulary.bos_id)
        is_after_special = True
        for fragment in self._cut(_sound(text), parse_special):
            if isinstance(fragment, int):
                ids.append(fragment)
            else:
                prefix = " " if vocabulary.add_space_prefix and is_after_special else ""
                ids += self._merge(prefix + fragment)
            is_after_special = isinstance(fragment, int)
        if add_special and vocabulary.add_eos and vocabulary.eos_id is not None:
            ids.append(vocabulary.eos_id)
        return ids

    def encode_rendered(self, text: str) -> list[int]:
        """Token ids of a rendered chat template, with one BOS whether or not it wrote that."""
        ids = self.encode(text, add_special=False, parse_special=True)
        if self.vocabulary.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def piece(self, token_id: int) -> bytes:
        """The bytes that a token stands for; a special token's name. Raises IndexError."""
        piece = self._pieces.get(token_id)
        if piece is None:
            if not 0 <= token_id < self.num_tokens:
                raise IndexError(f"token {token_id} of {self.num_tokens}")
            piece = self._pieces[token_id] = self._spell(token_id)
        return piece

    def decode(self, ids: Iterable[int], *, special: bool = False) -> bytes:
        """The bytes of a reply; the names of special tokens only if `special`.

        A model may have rows beyond its last token; their ids stand for nothing.
        """
        return b"".join(map(self._named if special else self._shown, ids))

    def text(self, ids: Iterable[int], *, special: bool = False) -> str:
        """As `decode`, as text; bytes that are no UTF-8 become U+FFFD."""
        return self.decode(ids, special=special).decode(errors="replace")

    def stream(self, *, special: bool = False) -> StreamDecoder:
        """A decoder for ids that come one by one."""
        return StreamDecoder(self, special=special)

    def _named(self, token_id: int) -> bytes:
        """The bytes of a token, or nothing for an id that is none."""
        return self.piece(token_id) if 0 <= token_id < self.num_tokens else b""

    def _shown(self, token_id: int) -> bytes:
        """The same without the names of special tokens."""
        said = self._said.get(token_id)
        if said is None:
            said = self._named(token_id)
            if said and self.vocabulary.types[token_id] in _HIDDEN:
                said = b""
            self._said[token_id] = said
        return said

    @cached_property
    def _texts(self) -> list[str]:
        return self.vocabulary.texts()

    def _spell(self, token_id: int) -> bytes:
        text, kind = self._texts[token_id], self.vocabulary.types[token_id]
        if kind in _SPECIAL:
            return text.encode()
        if kind == TokenType.BYTE and (byte := byte_of(text)) is not None:
            return bytes([byte])
        if self._byte_level:
            return b"".join(_BYTES.get(c) or c.encode() for c in text)
        return text.replace(SPACE, " ").encode()

    # Special tokens: the longest are cut out first, each from left to right.

    @cached_property
    def _specials(self) -> dict[bool, dict[str, list[tuple[int, str, int]]]]:
        """By `parse_special` and the first two characters: (order, text, id)."""
        return {False: self._find_specials(_ALWAYS_MATCHED), True: self._find_specials(_SPECIAL)}

    def _find_specials(self, kinds: Iterable[int]) -> dict[str, list[tuple[int, str, int]]]:
        texts, wanted = self._texts, frozenset(kinds)
        by_start: dict[str, list[tuple[int, str, int]]] = {}
        for token_id, kind in enumerate(self.vocabulary.types):
            if kind in wanted and (text := texts[token_id]):
                special = -len(text.encode()), text, token_id
                by_start.setdefault(text[:2], []).append(special)
        return by_start

    def _cut(self, text: str, parse_special: bool) -> list[str | int]:
        """`text` as pieces of plain text and ids of special tokens."""
        present = [
            special
            for start, specials in self._specials[parse_special].items()
            if start in text
            for special in specials
            if special[1] in text
        ]
        fragments: list[str | int] = [text] if text else []
        for _, name, token_id in sorted(present, key=lambda special: (special[0], special[2])):
            fragments = [
                piece
                for fragment in fragments
                for piece in (
                    _cut_one(fragment, name, token_id) if isinstance(fragment, str) else (fragment,)
                )
            ]
        return fragments

    # What the library does

    def _merge(self, text: str) -> list[int]:
        """Ids of plain text."""
        if not self._byte_level:
            text = text.replace(" ", SPACE)
        ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        if max(ids, default=0) < self.num_tokens:
            return ids
        return [
            token_id
            for piece_id in ids
            for token_id in (
                (piece_id,) if piece_id < self.num_tokens else self._spelled_out[piece_id]
            )
        ]

    @cached_property
    def _library(self) -> tokenizers.Tokenizer:
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers

        vocabulary = self.vocabulary
        pieces = self._texts + vocabulary.fragment_texts()
        row = SPLITS[vocabulary.split] if vocabulary.kind == "bpe" else None
        merges = unpack_ids(vocabulary.merges)
        text_of = pieces.__getitem__
        ids = dict(zip(pieces, range(len(pieces)), strict=True))
        ids.pop("", None)
        unknown = _absent(ids)
        ids[unknown] = len(pieces)
        try:
            model = models.BPE(
                ids,
                list(zip(map(text_of, merges[0::2]), map(text_of, merges[1::2]), strict=True)),
                unk_token=unknown,
                byte_fallback=not self._byte_level,
                ignore_merges=row is not None and row.ignore_merges,
            )
        except Exception as error:  # the library has no class of its own
            raise JitllmError(f"the tokenizer's merges do not fit its tokens: {error}") from error
        library = Tokenizer(model)
        if row is not None:
            steps: list[pre_tokenizers.PreTokenizer] = [
                pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in row.patterns
            ]
            if row.byte_level:
                steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
            library.pre_tokenizer = pre_tokenizers.Sequence(steps)
        return library

    @cached_property
    def _spelled_out(self) -> dict[int, list[int]]:
        """What stands for a piece that is no token: its bytes, as far as they are tokens."""
        vocabulary = self.vocabulary
        ids = {text: token_id for token_id, text in enumerate(self._texts)}
        spelled = {self.num_tokens + len(vocabulary.fragment_texts()): self._unknown_ids()}
        for index, text in enumerate(vocabulary.fragment_texts()):
            names = (
                [c for c in text if c.isascii()]
                if self._byte_level
                else [f"<0x{byte:02X}>" for byte in text.encode()]
            )
            spelled[self.num_tokens + index] = [ids[name] for name in names if name in ids]
        return spelled

    def _unknown_ids(self) -> list[int]:
        """What stands for a character that the vocabulary cannot spell."""
        unk_id = self.vocabulary.unk_id
        return [unk_id] if self.vocabulary.kind == "spm" and unk_id is not None else []


class StreamDecoder:
    """Gives the text of ids as they come, and never a part of a character."""

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, ids: Iterable[int]) -> str:
        """The text that is complete now; bytes of an incomplete character wait."""
        return self._utf8.decode(self._tokenizer.decode(ids, special=self._special))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that never became complete."""
        return self._utf8.decode(b"", final=True)


def _cut_one(text: str, name: str, token_id: int) -> list[str | int]:
    """`text` around every `name`, without empty pieces."""
    fragments: list[str | int] = []
    for piece in text.split(name):
        if piece:
            fragments.append(piece)
        fragments.append(token_id)
    fragments.pop()
    return fragments


def _sound(text: str) -> str:
    """`text` with U+FFFD for lone surrogates, which no encoding has."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _absent(taken: Container[str]) -> str:
    """A text that is not in `taken`."""
    name = "<unknown>"
    while name in taken:
        name += ">"
    return name


def _byte_chars() -> dict[str, bytes]:
    """GPT-2's printable characters and the bytes that they stand for."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): bytes([byte]) for byte in shown} | {
        chr(256 + index): bytes([byte]) for index, byte in enumerate(hidden)
    }


_BYTES = _byte_chars()
