"""Two thousand damaged files, each converted, opened, paged and run in a process of its own.

The process has 1 GiB of address space and 5 s. It prints an answer or one line that says what is
wrong. A container whose checksums were not mended gives the sound one's answer, or none.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf
import pytest

from jitllm.formats.convert import convert
from jitllm.text.vocabulary import VocabularyData
from tests.cli import damage_server
from tests.oracle import make_models

ROOT = Path(__file__).parents[2]
SERVER = Path(__file__).with_name("damage_server.py")

MODELS = [
    ("llama", "q4_0"),
    ("gemma3", "q8_0"),
    ("qwen2", "q5_1"),
    ("mistral3", "f16"),
    ("llama-yarn", "f32"),
    ("qwen3", "q5_0"),
    ("qwen2moe", "q8_0"),
    ("deepseek", "q4_0"),
]
CHAT = (
    "{{ bos_token }}{% for m in messages %}{{ m.role | trim }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def add_bpe_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """Bytes as GPT-2 prints them, a chain of merges, and two special tokens."""
    hidden = [byte for byte in range(256) if not chr(byte).isprintable() or byte in (32, 160)]
    chars = [chr(256 + hidden.index(b)) if b in hidden else chr(b) for b in range(256)]
    words = ["the", "\u0120the", "ello", "Hello", "\u0120there", "ing", "and", "\u0120a"]
    merged = dict.fromkeys(word[:end] for word in words for end in range(2, len(word) + 1))
    tokens = [*chars, *merged, "<|end|>", "<|start|>"]
    tokens += [f"<extra{i}>" for i in range(size - len(tokens))]
    types = [1] * (len(tokens) - 2) + [3, 3]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([f"{text[:-1]} {text[-1]}" for text in merged])
    writer.add_eos_token_id(tokens.index("<|end|>"))


def make_pair(folder: Path, name: str, weight_type: str) -> tuple[Path, Path]:
    """A sound GGUF file with a chat template, and its container."""
    source = folder / f"{name}-{weight_type}.gguf"
    add_vocabulary = add_bpe_vocabulary if name.startswith("qwen") else make_models.add_vocabulary

    def with_chat(writer: gguf.GGUFWriter, size: int) -> None:
        add_vocabulary(writer, size)
        writer.add_chat_template(CHAT)

    with patch.object(make_models, "add_vocabulary", with_chat):
        make_models.write(name, source, weight_type)
    container = source.with_suffix(".jlm")
    convert(source, container, read_vocabulary=VocabularyData.from_gguf)
    return source, container


def answer(container: Path) -> list[int]:
    """Token ids of a sound container; compiles what there is to compile."""
    command = [sys.executable, "-m", "jitllm.cli.main", "run", container]
    done = subprocess.run(
        [*command, "-n", "1", "-json", "Hello there"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    ids: list[int] = json.loads(done.stdout)["ids"]
    assert len(ids) == 1
    return ids


Try = Callable[[str, range], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def try_damaged(tmp_path_factory: pytest.TempPathFactory) -> Try:
    """Tries damaged files of a kind, those of `seeds`; how each went. Two servers share them."""
    folder = tmp_path_factory.mktemp("damage")
    pairs = [make_pair(folder, *model) for model in MODELS]
    answers = [answer(container) for _, container in pairs]

    def try_damaged(kind: str, seeds: range) -> list[dict[str, Any]]:
        middle = (seeds.start + seeds.stop) // 2
        jobs = [
            {
                "models": [[str(path) for path in pair] for pair in pairs],
                "answers": answers,
                "kind": kind,
                "seeds": half,
                "folder": str(folder / str(number)),
            }
            for number, half in enumerate([(seeds.start, middle), (middle, seeds.stop)])
        ]
        servers = [
            subprocess.Popen(
                [sys.executable, SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for _ in jobs
        ]
        for server, job in zip(servers, jobs, strict=True):
            assert server.stdin is not None
            server.stdin.write(json.dumps(job))
            server.stdin.close()
        found = []
        for server in servers:
            with server:
                assert server.stdout is not None
                found += [json.loads(line) for line in server.stdout]
            assert server.returncode == 0
        return found

    return try_damaged


def check(found: list[dict[str, Any]], seeds: range) -> None:
    """Nothing went wrong, and something went each way."""
    assert [one for one in found if one["fault"]] == []
    assert [one["seed"] for one in found] == list(seeds)
    outcomes = Counter(one["outcome"] for one in found)
    assert min(outcomes["run 0"], len(seeds) - outcomes["run 0"]) > len(seeds) / 10, outcomes


@pytest.mark.parametrize("kind", ["gguf", "jlm"])
def test_damaged_files_end_in_an_answer_or_a_line(try_damaged: Try, kind: str) -> None:
    check(try_damaged(kind, range(60)), range(60))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "seeds"), [("gguf", range(60, 660)), ("jlm", range(60, 1460))])
def test_many_damaged_files(try_damaged: Try, kind: str, seeds: range) -> None:
    check(try_damaged(kind, seeds), seeds)


@pytest.mark.parametrize(
    ("code", "out", "err", "fault"),
    [
        (0, '{"ids": [1]}', "memory\n", None),
        (1, "", "memory\njitllm: no\n", None),
        (0, '{"ids": [1]}', "jitllm: no\n", "exit code 0"),
        (1, '{"ids": [1]}', "jitllm: no\n", "not one line"),
        (1, "", "jitllm: no\njitllm: again\n", "not one line"),
        (1, "", "jitllm: no\nmemory\n", "not one line"),
        (1, "", "", "not one line"),
        (1, "", "Traceback (most recent call last):\njitllm: no\n", "Traceback"),
        (1, "", "jitllm: KeyError: 1 (a bug: JITLLM_DEBUG=1 shows where)\n", "a bug"),
        (1, "", "jitllm: out of memory; lower -maxmem or -ctx\n", "out of memory"),
        (1, "", f"jitllm: {'x' * 2000}\n", "clear"),
        (130, "", "jitllm: no\n", "exit code 130"),
    ],
)
def test_a_command_line_is_judged(code: int, out: str, err: str, fault: str | None) -> None:
    found = damage_server.judge(code, out, err)["fault"]
    assert found is None if fault is None else fault in found


@pytest.mark.parametrize(
    ("deed", "fault"),
    [
        ("pass", None),
        ("import os; os.abort()", "killed by SIGABRT"),
        ("import time; time.sleep(60)", "it hung"),
    ],
)
def test_a_child_is_watched(monkeypatch: pytest.MonkeyPatch, deed: str, fault: str | None) -> None:
    if fault == "it hung":
        monkeypatch.setattr(damage_server, "SECONDS", 0.1)
    child = os.posix_spawn(sys.executable, [sys.executable, "-c", deed], os.environ)
    found = damage_server.watch(child)
    assert found is None if fault is None else fault in str(found)
