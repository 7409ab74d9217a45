from __future__ import annotations

import re

import pytest

from tests.cli.fake import BLOCK_BYTES, BOS, DENSE_BYTES, NUM_BLOCKS, Jitllm, Opener

WEIGHT_BYTES = DENSE_BYTES + NUM_BLOCKS * BLOCK_BYTES


def test_every_repetition_is_a_request_and_one_warms_up(jitllm: Jitllm, opener: Opener) -> None:
    done = jitllm("speed", "m.jlm", "-p", "100", "-n", "8", "-r", "2")
    assert done.code == 0
    requests = opener.engine.requests
    assert [(len(r.prompt), r.max_tokens) for r in requests] == [(100, 0), (1, 8)] * 3
    assert requests[0].prompt[0] == BOS
    assert all(r.stop_ids == frozenset() for r in requests)
    rates = r"[0-9.]+ / [0-9.]+ tok/s"
    assert re.match(rf"pp100 {rates}   tg8 {rates}\nmedian ", done.out)


def test_decoding_behind_a_history_times_the_tokens_after_it(
    jitllm: Jitllm, opener: Opener
) -> None:
    done = jitllm("speed", "m.jlm", "-p", "0", "-n", "8", "-depth", "50", "-r", "1")
    assert [(len(r.prompt), r.max_tokens) for r in opener.engine.requests] == [(50, 9)] * 2
    assert done.out.startswith("tg8 @ d50 ")
    beyond = jitllm("speed", "m.jlm", "-p", "0", "-n", "8", "-depth", "4090")
    assert beyond.code == 2
    assert "-depth takes 4099 tokens and the context holds 4096" in beyond.err


def test_json_has_medians_and_samples(jitllm: Jitllm, opener: Opener) -> None:
    report = jitllm("speed", "m.jlm", "-p", "9", "-n", "8", "-json").json
    samples = report["samples"]
    assert len(samples["prefill_tok_s"]) == len(samples["decode_tok_s"]) == 3
    assert report["prefill_tok_s"] == sorted(samples["prefill_tok_s"])[1]
    assert report["decode_tok_s"] == sorted(samples["decode_tok_s"])[1]
    assert report["bytes_per_token"] == WEIGHT_BYTES
    assert report["gb_s"] == pytest.approx(report["decode_tok_s"] * WEIGHT_BYTES / 1e9)


def test_the_weights_that_are_read_stand_beside_a_plain_read_loop(
    jitllm: Jitllm, opener: Opener
) -> None:
    report = jitllm("speed", "m.jlm", "-p", "0", "-n", "8", "-json").json
    walls = report["samples"]["read_gb_s"]
    assert len(walls) == 5
    assert min(walls) > 0
    assert report["read_gb_s"] == sorted(walls)[2]
    assert report["read_share"] == report["gb_s"] / report["read_gb_s"]
    out = jitllm("speed", "m.jlm", "-p", "0", "-n", "8").out
    assert re.search(r"7.00 MiB of weights per token, [0-9.]+ GB/s, \d+% of the [0-9.]+ GB/s", out)
    assert jitllm("speed", "m.jlm", "-n", "0", "-json").json["read_share"] is None


def test_medians_come_with_their_spread(jitllm: Jitllm, opener: Opener) -> None:
    report = jitllm("speed", "m.jlm", "-p", "9", "-n", "8", "-json").json
    for name in ("prefill_tok_s", "decode_tok_s"):
        rates = report["samples"][name]
        assert report["spread"][name] == (max(rates) - min(rates)) / report[name]
    done = jitllm("speed", "m.jlm", "-p", "9", "-n", "8")
    assert len(re.findall(r"tok/s \(spread [0-9.]+%\)", done.out)) == 2
    once = jitllm("speed", "m.jlm", "-p", "9", "-n", "8", "-r", "1")
    assert "spread" not in once.out


def test_cached_tokens_do_not_count(jitllm: Jitllm, opener: Opener) -> None:
    opener.engine.cached_tokens = 9
    report = jitllm("speed", "m.jlm", "-p", "9", "-n", "0", "-json").json
    assert report["samples"]["prefill_tok_s"] == [0, 0, 0]


def test_a_phase_can_be_left_out(jitllm: Jitllm, opener: Opener) -> None:
    report = jitllm("speed", "m.jlm", "-p", "0", "-n", "3", "-json").json
    assert report["prefill_tok_s"] is None
    assert [r.max_tokens for r in opener.engine.requests] == [3] * 4
    assert jitllm("speed", "m.jlm", "-p", "3", "-n", "0").out.startswith("pp3 ")


def test_what_the_clock_cannot_see_is_refused(
    jitllm: Jitllm, opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.perf_counter", lambda: 1.0)
    done = jitllm("speed", "m.jlm", "-p", "9")
    assert (done.code, done.out) == (1, "")
    assert "raise -p" in done.err


@pytest.mark.parametrize("args", [("-p", "-1"), ("-r", "0"), ("-p", "0", "-n", "0")])
def test_nothing_to_measure(jitllm: Jitllm, opener: Opener, args: tuple[str, ...]) -> None:
    assert jitllm("speed", "m.jlm", *args).code == 2


@pytest.mark.parametrize(("flag", "most"), [("-p", 16), ("-n", 15)])
def test_what_the_context_would_cut_short_is_not_measured(
    jitllm: Jitllm, opener: Opener, flag: str, most: int
) -> None:
    opener.engine.context_tokens = 17  # the fake one wants room for a token after the prompt
    other = ("-n", "0") if flag == "-p" else ("-p", "0")
    assert jitllm("speed", "m.jlm", flag, str(most), *other, "-r", "1").code == 0
    done = jitllm("speed", "m.jlm", flag, "18", *other, "-r", "1")
    assert (done.code, done.out) == (2, "")
    assert f"lower {flag} or raise -ctx" in done.err
