"""Several prompts at once, with a fake engine."""

from __future__ import annotations

import re

import pytest

from jitllm.errors import JitllmError
from tests.cli.fake import BLOCK_BYTES, BOS, DENSE_BYTES, NUM_BLOCKS, Jitllm, Opener

WEIGHT_BYTES = DENSE_BYTES + NUM_BLOCKS * BLOCK_BYTES


def test_every_prompt_is_a_request_in_every_repetition(jitllm: Jitllm, opener: Opener) -> None:
    done = jitllm("batch", "m.jlm", "-n", "8", "-r", "2", "one", "the other")
    assert done.code == 0
    assert [(bytes(r.prompt[1:]), r.max_tokens) for r in opener.engine.requests] == [
        (b"one", 8),
        (b"the other", 8),
    ] * 3
    assert all(r.prompt[0] == BOS and r.stop_ids == frozenset() for r in opener.engine.requests)
    rates = r"[0-9.]+ / [0-9.]+ tok/s"
    assert re.match(rf"batch 2 x 8 tok   16 steps   {rates}\nmedian ", done.out)
    assert re.search(r"\d% of the [0-9.]+ GB/s read here\n$", done.out)


def test_the_engine_takes_all_of_them_at_once(jitllm: Jitllm, opener: Opener) -> None:
    assert jitllm("batch", "m.jlm", "-n", "1", "-r", "1", "-batch", "70", "a", "b").code == 0
    assert [r.prompt[1] for r in opener.engine.requests] == list(b"ab" * 35) * 2
    assert opener.config
    assert (opener.config.max_batch, opener.config.max_queue) == (70, -1)
    assert not opener.config.share_prefixes


def test_json_has_medians_samples_and_texts(jitllm: Jitllm, opener: Opener) -> None:
    report = jitllm("batch", "m.jlm", "-n", "5", "-json", "a", "b").json
    assert (report["sequences"], report["tokens_per_sequence"], report["steps"]) == (2, 5, 10)
    rates = report["samples"]["tok_s"]
    assert report["tok_s"] == sorted(rates)[1]
    assert report["tok_s_per_sequence"] == report["tok_s"] / 2
    assert report["spread"]["tok_s"] == (max(rates) - min(rates)) / report["tok_s"]
    assert (report["bytes_per_step"], report["bytes_per_token"]) == (WEIGHT_BYTES, WEIGHT_BYTES / 2)
    assert report["gb_s"] == pytest.approx(WEIGHT_BYTES / report["step_ms"] / 1e6)
    assert report["read_share"] == report["gb_s"] / report["read_gb_s"]
    assert report["texts"] == ["Hello"] * 2


def test_logits_are_handed_out_when_asked_for(jitllm: Jitllm, opener: Opener) -> None:
    jitllm("batch", "m.jlm", "-n", "1", "-r", "1", "-logits", "a")
    assert all(request.logits for request in opener.engine.requests)
    jitllm("batch", "m.jlm", "-n", "1", "-r", "1", "a")
    assert not opener.engine.requests[-1].logits


def test_what_the_clock_cannot_see_is_refused(
    jitllm: Jitllm, opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.perf_counter", lambda: 1.0)
    done = jitllm("batch", "m.jlm", "a")
    assert (done.code, done.out) == (1, "")
    assert "raise -n" in done.err


def test_a_reply_that_fails_is_the_failure(jitllm: Jitllm, opener: Opener) -> None:
    opener.engine.fails_at, opener.engine.error = 1, JitllmError("the device is gone")
    done = jitllm("batch", "m.jlm", "a", "b")
    assert (done.code, done.out) == (1, "")
    assert done.err.endswith("jitllm: the device is gone\n")


@pytest.mark.parametrize(
    ("args", "remedy"),
    [
        (("-n", "0", "a"), "choose -batch, -n and -r from 1"),
        (("-r", "0", "a"), "choose -batch, -n and -r from 1"),
        (("-batch", "0", "a"), "choose -batch, -n and -r from 1"),
        (("-batch", "1", "a", "b"), "raise -batch"),
        (("-n", "16", "a"), "raise -ctx"),
        (("-n", "1"), "PROMPT"),
    ],
)
def test_what_makes_no_sense(
    jitllm: Jitllm, opener: Opener, args: tuple[str, ...], remedy: str
) -> None:
    opener.engine.context_tokens = 17
    done = jitllm("batch", "m.jlm", *args)
    assert (done.code, done.out) == (2, "")
    assert remedy in done.err
