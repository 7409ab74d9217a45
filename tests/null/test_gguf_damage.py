"""Damaged GGUF files by the hundred: refused or read soundly, and never a large allocation."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from jitllm.errors import JitllmError
from jitllm.formats.gguf import GgmlType, Gguf
from jitllm.text.vocabulary import VocabularyData
from tests.null.gguf_files import ARRAY, STRING, Raw, TensorBytes, gguf_bytes, string, write

MAX_BYTES = 4 << 20
NUMBERS = [0, 1, 2, 7, 8, 9, 31, 32, 255, 256, 1 << 16, 1 << 31, (1 << 32) - 1]
LONG_NUMBERS = [*NUMBERS, 1 << 32, (1 << 62) - 1, 1 << 62, 1 << 63, (1 << 64) - 1]


def sound_file() -> bytes:
    """A small model with a vocabulary of each kind of value."""
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *(chr(97 + index) for index in range(26)),
        "ab",
        "abc",
        "\u2581a",
    ]
    nested = Raw(
        ARRAY,
        struct.pack("<IQ", ARRAY, 2) + (struct.pack("<IQ", STRING, 1) + string("deep")) * 2,
    )
    return gguf_bytes(
        {
            "general.architecture": "tiny",
            "general.alignment": 32,
            "tiny.block_count": 2,
            "tiny.rope.freq_base": 10000.0,
            "nested": nested,
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": words,
            "tokenizer.ggml.scores": [float(-index) for index in range(len(words))],
            "tokenizer.ggml.token_type": [2, 3, 3] + [1] * (len(words) - 3),
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.add_bos_token": True,
            "tokenizer.chat_template": "{{ messages }}",
        },
        {
            "token_embd.weight": TensorBytes((32, 32), GgmlType.Q8_0, bytes(34 * 32)),
            "blk.0.attn_q.weight": TensorBytes((256, 2), GgmlType.Q4_K, bytes(288)),
            "blk.0.attn_norm.weight": TensorBytes((32,), GgmlType.F32, bytes(128)),
            "output.weight": TensorBytes((32, 4), 99, bytes(128)),
        },
    )


def flip(rng: random.Random, data: bytearray) -> None:
    for _ in range(rng.choice([1, 1, 2, 8])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def set_number(rng: random.Random, data: bytearray) -> None:
    code, choices = rng.choice([("<I", NUMBERS), ("<Q", LONG_NUMBERS)])
    at = rng.randrange(len(data) - 8)
    struct.pack_into(code, data, at, rng.choice(choices))


def cut(rng: random.Random, data: bytearray) -> None:
    start = rng.randrange(len(data))
    del data[start : rng.choice([start + rng.randrange(1, 40), len(data)])]


def repeat(rng: random.Random, data: bytearray) -> None:
    start, at = rng.randrange(len(data)), rng.randrange(len(data))
    data[at:at] = data[start : start + rng.randrange(1, 200)]


DAMAGES: list[Callable[[random.Random, bytearray], None]] = [
    flip,
    set_number,
    set_number,
    cut,
    repeat,
]


def damaged(seed: int, sound: bytes) -> bytes:
    """Mostly damage in the header, where it matters."""
    rng = random.Random(seed)
    head_bytes = sound.index(b"output.weight") + 40
    data = bytearray(sound)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        head, rest = data[:head_bytes], data[head_bytes:]
        if len(head) > 16:
            rng.choice(DAMAGES)(rng, head)
        data = head + rest
    if rng.random() < 0.1:
        del data[rng.randrange(len(data)) :]
    return bytes(data)


def use(path: Path) -> bool:
    """Read all there is; True if nothing was refused."""
    is_sound = True
    try:
        with Gguf.open(path) as file:
            for tensor in file.tensors.values():
                try:
                    assert len(file.read(tensor)) == tensor.size_bytes
                except JitllmError:
                    is_sound = False
            VocabularyData.from_gguf(file.metadata, path)
        return is_sound
    except JitllmError as error:
        message = str(error)
    assert message.isprintable()
    assert len(message) < 3000
    return False


def use_damaged(folder: Path, seeds: range) -> None:
    sound = sound_file()
    path = folder / "m.gguf"
    num_sound = 0
    tracemalloc.start()
    try:
        for seed in seeds:
            write(path, damaged(seed, sound))
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            num_sound += use(path)
            assert tracemalloc.get_traced_memory()[1] - before < MAX_BYTES, f"seed {seed}"
    finally:
        tracemalloc.stop()
    assert num_sound < len(seeds) / 2


def test_the_sound_file_is_read(tmp_path: Path) -> None:
    with Gguf.open(write(tmp_path / "m.gguf", sound_file())) as file:
        assert file.metadata["nested"] == [["deep"], ["deep"]]
        assert VocabularyData.from_gguf(file.metadata).num_tokens == 32
        assert [tensor.type.name for tensor in file.tensors.values()] == [
            "Q8_0",
            "Q4_K",
            "F32",
            "type 99",
        ]


def test_every_length_of_file_is_refused_or_read(tmp_path: Path) -> None:
    sound = sound_file()
    for length in range(0, len(sound), 7):
        assert not use(write(tmp_path / "m.gguf", sound[:length]))


def test_damaged_files(tmp_path: Path) -> None:
    use_damaged(tmp_path, range(400))


@pytest.mark.slow
def test_many_damaged_files(tmp_path: Path) -> None:
    use_damaged(tmp_path, range(1000, 21_000))
