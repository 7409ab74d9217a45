"""Special tokens: what they are for, and how they are known where a file does not say.

Knows texts of tokens, from many models. Knows no file format.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import IntEnum

# Tokens that end a reply, known by their text: files name one of them at best.
_END_OF_TURN_TEXTS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<end_of_utterance>",
)
_STOP_TEXTS = (
    *_END_OF_TURN_TEXTS,
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "</s>",
    "<|eom_id|>",
    "[EOS]",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "[e~[",
    "<|fim_pad|>",
    "<fim-pad>",
    "<fim_pad>",
    "<PAD>",
    "[PAD]",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<fim-repo>",
    "<REPO>",
    "<reponame>",
    "<|file_sep|>",
)
_CONTROL_TEXTS = (  # never text of a prompt, whatever the file says they are
    "<|fim_prefix|>",
    "<fim-prefix>",
    "<fim_prefix>",
    "<\uff5cfim\u2581begin\uff5c>",
    "<PRE>",
    "\u2581<PRE>",
    "<|code_prefix|>",
    "<|prefix|>",
    "<|fim_suffix|>",
    "<fim-suffix>",
    "<fim_suffix>",
    "<\uff5cfim\u2581hole\uff5c>",
    "<SUF>",
    "\u2581<SUF>",
    "<|code_suffix|>",
    "<|suffix|>",
    "<|fim_middle|>",
    "<fim-middle>",
    "<fim_middle>",
    "<\uff5cfim\u2581end\uff5c>",
    "<MID>",
    "\u2581<MID>",
    "<|code_middle|>",
    "<|middle|>",
)
_SHOWN_TEXTS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")


class TokenType(IntEnum):
    """What a token is for, by GGUF's number."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    """Matched in a prompt only where special tokens are asked for; not part of a reply's text."""
    USER_DEFINED = 4
    """Matched in a prompt before everything else."""
    UNUSED = 5
    BYTE = 6
    """Spelled `<0x41>`; stands for that byte."""


class SpecialTokens:
    """The special tokens of a vocabulary that are known by their text; corrects `types`.

    Files are wrong about some: what ends a reply is a control token, whatever they say.
    """

    def __init__(self, texts: Sequence[str], types: bytearray) -> None:
        known = {*_STOP_TEXTS, *_CONTROL_TEXTS, *_SHOWN_TEXTS}
        self._found = {text: token_id for token_id, text in enumerate(texts) if text in known}
        self._types = types
        self._correct((*_STOP_TEXTS, *_CONTROL_TEXTS), TokenType.CONTROL)
        self._correct(_SHOWN_TEXTS, TokenType.USER_DEFINED)

    def end_of_turn(self) -> int | None:
        """The id of what ends a turn of a chat."""
        return next((self._found[text] for text in _END_OF_TURN_TEXTS if text in self._found), None)

    def stop_ids(self, named: set[int]) -> set[int]:
        """All that end a reply, with those that the file has `named`."""
        stop_ids = named | {self._found[text] for text in _STOP_TEXTS if text in self._found}
        for rivals, text, kind in _INNOCENT:
            if self._found.get(text) in stop_ids and all(rival in self._found for rival in rivals):
                stop_ids.discard(self._found[text])
                self._correct((text,), kind)
        return stop_ids

    def _correct(self, texts: Sequence[str], kind: TokenType) -> None:
        for text in texts:
            if text in self._found:
                self._types[self._found[text]] = kind


# Where a vocabulary has the first for it, the second must not end a reply.
_INNOCENT = (
    (("<|return|>", "<|call|>"), "<|end|>", TokenType.USER_DEFINED),
    (("<|calls|>", "<|flush|>"), "<|end|>", TokenType.USER_DEFINED),
    (("<|tool_response>",), "</s>", TokenType.NORMAL),
)

_BYTE_TEXT = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_of(text: str) -> int | None:
    """The byte that a token of type BYTE stands for, or None if it is not spelled like one."""
    match = _BYTE_TEXT.fullmatch(text)
    return int(match[1], 16) if match else None
