from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from jitllm.cli.score import parse_ids
from jitllm.engine import Outputs
from jitllm.errors import UsageError
from tests.cli.fake import BOS, VOCAB, Jitllm, Opener, Stdin


def test_score_of_a_text(jitllm: Jitllm, opener: Opener) -> None:
    report = jitllm("score", "m.jlm", "-json", "abc").json
    assert report["ids"] == [BOS, *b"abc"]
    assert report["nll"] == pytest.approx([0.01, 0.02, 0.03])
    assert report["mean_nll"] == pytest.approx(0.02)
    assert report["perplexity"] == pytest.approx(math.exp(0.02))
    request = opener.engine.requests[0]
    assert (request.max_tokens, request.outputs, request.logits) == (0, Outputs.ALL, False)


def test_score_in_words(jitllm: Jitllm, opener: Opener) -> None:
    done = jitllm("score", "m.jlm", "a\n")
    assert [line.split() for line in done.out.splitlines()] == [
        ["0", "256", "-", '"<bos>"'],
        ["1", "97", "0.0100", '"a"'],
        ["2", "10", "0.0200", r'"\n"'],
    ]
    assert done.err.splitlines()[-1].startswith("perplexity 1.0151")


@pytest.mark.parametrize("step", [None, 1, 3])
def test_logits_of_every_position_are_written(
    jitllm: Jitllm, opener: Opener, tmp_path: Path, step: int | None
) -> None:
    ids = [5, 0, 7, 250]
    (tmp_path / "ids").write_text("5 0\n7, 250")
    out = tmp_path / "out.npz"
    flags = [] if step is None else ["-step", str(step)]
    done = jitllm("score", "m.jlm", "-ids", tmp_path / "ids", "-out", out, *flags, "-json")
    assert done.json["ids"] == ids
    assert opener.engine.requests[0].chunk_tokens == step
    with np.load(out) as arrays:
        assert arrays["tokens"].tolist() == ids
        assert arrays["logits"].dtype == np.float32
        assert arrays["logits"].shape == (4, VOCAB)
        assert (arrays["logits"] == np.array(ids)[:, None]).all()
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".part"] == []


def test_a_failure_leaves_no_file(jitllm: Jitllm, opener: Opener, tmp_path: Path) -> None:
    opener.engine.context_tokens = 2
    done = jitllm("score", "m.jlm", "abc", "-out", tmp_path / "out.npz")
    assert done.code == 1
    assert list(tmp_path.iterdir()) == []


def test_logits_that_do_not_fit_are_refused_first(
    jitllm: Jitllm, opener: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    done = jitllm("score", "m.jlm", "abc", "-out", tmp_path / "out.npz")
    assert done.code == 1
    assert "free some space" in done.err
    assert opener.engine.requests == []


def test_one_token_has_no_perplexity(jitllm: Jitllm, opener: Opener, tmp_path: Path) -> None:
    (tmp_path / "ids").write_text("[7]")
    report = jitllm("score", "m.jlm", "-ids", tmp_path / "ids", "-json").json
    assert (report["nll"], report["perplexity"]) == ([], None)
    assert "no perplexity" in jitllm("score", "m.jlm", "-ids", tmp_path / "ids").err


def test_logits_into_a_folder_are_refused_first(
    jitllm: Jitllm, opener: Opener, tmp_path: Path
) -> None:
    done = jitllm("score", "m.jlm", "abc", "-out", tmp_path)
    assert done.code == 2
    assert f"{tmp_path} is a folder" in done.err
    assert opener.engine.requests == []


def test_ids_of_another_vocabulary_are_refused(
    jitllm: Jitllm, opener: Opener, tmp_path: Path
) -> None:
    (tmp_path / "ids").write_text("5 258")
    done = jitllm("score", "m.jlm", "-ids", tmp_path / "ids")
    assert done.code == 2
    assert "token 1 is 258; this model's ids run from 0 to 257" in done.err


@pytest.mark.parametrize(
    ("text", "ids"),
    [("1 2\n3", [1, 2, 3]), ("1,2, 3\n", [1, 2, 3]), (" [1, 2]\n", [1, 2]), ("7", [7])],
)
def test_ids_in_every_spelling(text: str, ids: list[int]) -> None:
    assert parse_ids(text, "ids") == ids


@pytest.mark.parametrize("text", ["", "one", "1.5", "[1, [2]]", "[1", "[true]", "1;2", "[]"])
def test_what_is_no_list_of_ids(text: str) -> None:
    with pytest.raises(UsageError, match="ids"):
        parse_ids(text, "ids")


@pytest.mark.parametrize("args", [("-step", "0", "x"), ("-ids", "f", "x")])
def test_senseless_scores(jitllm: Jitllm, opener: Opener, args: tuple[str, ...]) -> None:
    assert jitllm("score", "m.jlm", *args).code == 2


def test_there_must_be_a_text(jitllm: Jitllm, opener: Opener, stdin: Stdin) -> None:
    stdin(b"", True)
    assert jitllm("score", "m.jlm").code == 2
