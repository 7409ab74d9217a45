"""`jitllm tokenize`: a text as a model's tokens."""

from __future__ import annotations

import json as jsonlib
from typing import TYPE_CHECKING, Annotated

import typer

from jitllm.cli.command import AsJson, verb
from jitllm.cli.options import Model, TextFile, Words, given_text
from jitllm.cli.screen import note, print_json, say
from jitllm.errors import UsageError
from jitllm.units import counted

if TYPE_CHECKING:
    from jitllm.text.tokenizer import Tokenizer

EXAMPLES = """
    jitllm tokenize model.jlm "Hello, world"
    jitllm tokenize model.jlm -special "<start_of_turn>user"
    jitllm tokenize model.jlm -f README.md -json
    echo "Hello" | jitllm tokenize model.jlm
"""


def tokenize(
    model: Model,
    text: Words = None,
    *,
    file: TextFile = None,
    special: Annotated[
        bool,
        typer.Option("-special", help="What is spelled like a special token is that token."),
    ] = False,
    plain: Annotated[
        bool, typer.Option("-plain", help="Add nothing at the beginning and the end.")
    ] = False,
    json: AsJson = False,
) -> int:
    """Show the tokens of a text.

    How many there are, their ids, and the piece that each stands for.
    The text is the words after the model, or -f FILE, or what is piped in, byte for byte.
    """
    given = given_text(text, file, keep_newline=True)
    if given is None:
        raise UsageError("there is no text", "write it after the model, or use -f FILE")
    from jitllm.formats.jlm import Container
    from jitllm.text.tokenizer import Tokenizer, VocabularyData

    with Container.open(model) as container:
        vocabulary = VocabularyData.from_plain(container.header.vocabulary, model)
    tokenizer = Tokenizer(vocabulary)
    ids = tokenizer.encode(given, add_special=not plain, parse_special=special)
    pieces = [tokenizer.piece(token_id).decode(errors="replace") for token_id in ids]
    if json:
        print_json(
            {"ids": ids, "pieces": pieces, "is_lossless": _is_lossless(tokenizer, ids, given)}
        )
        return 0
    rows = [
        f"{token_id:8} -> {jsonlib.dumps(piece, ensure_ascii=False)}\n"
        for token_id, piece in zip(ids, pieces, strict=True)
    ]
    say(f"{counted(len(ids), 'token')}\n{' '.join(map(str, ids))}\n{''.join(rows)}")
    if not _is_lossless(tokenizer, ids, given):
        note("decoding these tokens gives another text")
    return 0


def _is_lossless(tokenizer: Tokenizer, ids: list[int], text: str) -> bool:
    """Whether the tokens spell the text, apart from a space that the vocabulary puts before it."""
    spelled = tokenizer.text(
        [i for i in ids if i not in (tokenizer.bos_id, tokenizer.eos_id)], special=True
    )
    return text in (spelled, spelled.removeprefix(" "))


command = verb(tokenize, EXAMPLES)
