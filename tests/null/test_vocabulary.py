from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitllm.errors import BadContainer, BadSource, UnsupportedModel
from jitllm.text.tokenizer import Tokenizer, TokenType, VocabularyData
from tests.null.vocabularies import bpe_metadata, metadata, spm_metadata

SPM = spm_metadata({"a": -1.0, "ab": -2.0}, with_bytes=False)
BPE = bpe_metadata(["a", "b", "ab"], ["a b", "b abb"], bos_token_id=1)


@pytest.mark.parametrize("source", [SPM, BPE])
def test_the_plain_form_survives_msgpack(source: dict[str, object]) -> None:
    vocabulary = VocabularyData.from_gguf(source)
    packed = msgpack.packb(vocabulary.to_plain())
    assert VocabularyData.from_plain(msgpack.unpackb(packed), "m.jlm") == vocabulary
    assert vocabulary.texts() == source["tokenizer.ggml.tokens"]


@given(st.lists(st.text(), min_size=1))
def test_any_texts_are_kept(texts: list[str]) -> None:
    vocabulary = VocabularyData.from_gguf(bpe_metadata(texts, ["a b"]))
    assert vocabulary.texts() == texts
    assert VocabularyData.from_plain(vocabulary.to_plain(), "m.jlm") == vocabulary


@pytest.mark.parametrize(
    ("source", "kind", "name", "supported"),
    [
        (metadata(model="bert"), "tokenizer", "bert", "llama, gpt2"),
        (metadata(), "tokenizer", "", "llama"),
        (bpe_metadata(["a"], ["a a"], "no-such"), "pre-tokenizer", "no-such", "tekken"),
    ],
)
def test_what_is_not_supported_is_named(
    source: dict[str, object], kind: str, name: str, supported: str
) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        VocabularyData.from_gguf(source)
    assert (caught.value.kind, caught.value.name) == (kind, name)
    assert supported in str(caught.value)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (metadata(model="llama"), "it has no tokens"),
        (metadata(model="llama", tokens=[1]), "it has no tokens"),
        (metadata(model=7), "model is no text"),
        (metadata(model="llama", tokens=["a"]), "it has no scores"),
        (metadata(model="llama", tokens=["a"], scores=[]), "fewer scores than tokens"),
        (metadata(model="llama", tokens=["a"], scores=["x"]), "scores are of the wrong kind"),
        (metadata(model="llama", tokens=["a"], token_type=[0.5]), "token_type are of the wrong"),
        (bpe_metadata(["a"], []), "it has no merges"),
        (bpe_metadata(["a"], ["aa"]), "the merge 'aa' is not of two pieces"),
        (bpe_metadata(["a"], ["a a"], add_bos_token=True), "it adds a token that it does not have"),
        (bpe_metadata(["a"], ["a a"], add_eos_token=1), "neither true nor false"),
        (bpe_metadata(["a"], ["a a"], bos_token_id="a"), "bos_token_id is no token id"),
    ],
)
def test_what_does_not_fit_together_is_named(source: dict[str, object], problem: str) -> None:
    with pytest.raises(BadSource, match=problem) as caught:
        VocabularyData.from_gguf(source, "m.gguf")
    assert str(caught.value).startswith("m.gguf: its tokenizer makes no sense: ")


def test_defaults_of_a_sentencepiece_vocabulary() -> None:
    source = dict(SPM)
    del source["tokenizer.ggml.add_bos_token"], source["tokenizer.ggml.add_space_prefix"]
    vocabulary = VocabularyData.from_gguf(source)
    assert (vocabulary.bos_id, vocabulary.eos_id, vocabulary.unk_id) == (1, 2, 0)
    assert vocabulary.add_bos
    assert vocabulary.add_space_prefix
    assert vocabulary.stop_ids == (2,)


def test_an_id_beyond_the_vocabulary_is_no_id() -> None:
    vocabulary = VocabularyData.from_gguf(
        bpe_metadata(["a"], ["a a"], padding_token_id=1, eos_token_id=(1 << 32) - 1)
    )
    assert (vocabulary.pad_id, vocabulary.eos_id, vocabulary.stop_ids) == (None, None, ())


def stops(*texts: str, **values: object) -> tuple[set[str], dict[str, TokenType]]:
    """What ends a reply, and the types of all, in a vocabulary with these tokens."""
    source = bpe_metadata(["a", *texts], ["a a"], token_type=[1] * (len(texts) + 1), **values)
    vocabulary = VocabularyData.from_gguf(source)
    found = vocabulary.texts()
    kinds = {text: TokenType(kind) for text, kind in zip(found, vocabulary.types, strict=True)}
    return {found[token_id] for token_id in vocabulary.stop_ids}, kinds


def test_tokens_that_end_a_reply_are_known_by_their_text() -> None:
    ends, kinds = stops("<|im_end|>", "<|endoftext|>", "<|fim_middle|>", "<x>", eos_token_id=4)
    assert ends == {"<|im_end|>", "<|endoftext|>", "<x>"}
    assert kinds["<|im_end|>"] == kinds["<|fim_middle|>"] == TokenType.CONTROL
    assert kinds["<x>"] == TokenType.NORMAL


def test_the_end_of_a_turn_is_found() -> None:
    source = bpe_metadata(["a", "<|endoftext|>", "<|im_end|>"], ["a a"], eos_token_id=1)
    assert VocabularyData.from_gguf(source).eot_id == 2


@pytest.mark.parametrize(
    ("texts", "innocent"),
    [
        (("<|return|>", "<|call|>", "<|end|>"), "<|end|>"),
        (("<|calls|>", "<|flush|>", "<|end|>"), "<|end|>"),
        (("<|tool_response>", "</s>"), "</s>"),
    ],
)
def test_an_innocent_token_does_not_end_a_reply(texts: tuple[str, ...], innocent: str) -> None:
    ends, kinds = stops(*texts)
    assert ends == set(texts) - {innocent}
    assert kinds[innocent] != TokenType.CONTROL
    assert stops(innocent)[0] == {innocent}


# The plain form is untrusted

WRONG: list[Callable[[dict[str, Any]], object]] = [
    lambda plain: None,
    lambda plain: list(plain),
    lambda plain: {**plain, "more": 1},
    lambda plain: {key: plain[key] for key in plain if key != "merges"},
    lambda plain: plain | {"kind": "wordpiece"},
    lambda plain: plain | {"split": "no-such"},
    lambda plain: plain | {"tokens": b"xx"},
    lambda plain: plain | {"tokens": ""},
    lambda plain: plain | {"tokens": plain["tokens"] + plain["tokens"][0]},
    lambda plain: plain | {"types": plain["types"] + b"\1"},
    lambda plain: plain | {"merges": plain["merges"][:-1]},
    lambda plain: plain | {"merges": plain["merges"][:-4] + b"\xff\xff\xff\xff"},
    lambda plain: plain | {"fragments": ""},
    lambda plain: plain | {"bos_id": 3},
    lambda plain: plain | {"bos_id": -1},
    lambda plain: plain | {"bos_id": "a"},
    lambda plain: plain | {"bos_id": None, "add_bos": True},
    lambda plain: plain | {"add_bos": 1},
    lambda plain: plain | {"stop_ids": [0, 3]},
    lambda plain: plain | {"stop_ids": [None, "a"]},
    lambda plain: plain | {"stop_ids": 1},
]


@pytest.mark.parametrize("spoil", WRONG)
def test_a_wrong_plain_form_is_refused(spoil: Callable[[dict[str, Any]], object]) -> None:
    plain = VocabularyData.from_gguf(BPE).to_plain()
    with pytest.raises(BadContainer, match="^m.jlm: its tokenizer makes no sense: "):
        VocabularyData.from_plain(spoil(plain), "m.jlm")


def test_an_empty_vocabulary_can_be_held() -> None:
    plain = VocabularyData.from_gguf(SPM).to_plain()
    plain |= {"tokens": "", "types": b"", "merges": b"", "fragments": "", "stop_ids": []}
    plain |= {"bos_id": None, "eos_id": None, "unk_id": None}
    assert Tokenizer(VocabularyData.from_plain(plain, "m.jlm")).encode("a") == []
