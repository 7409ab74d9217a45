from __future__ import annotations

from pathlib import Path

import pytest

from jitllm.engine import Sampling
from jitllm.errors import PageError
from jitllm.schedule.placement import Placement
from jitllm.schedule.seam_trial import SeamTrial
from tests.cli.fake import BOS, EOS, NUM_BLOCKS, Jitllm, Opener, Stdin


def test_the_prompt_is_continued_on_stdout(jitllm: Jitllm, opener: Opener) -> None:
    done = jitllm("run", "m.jlm", "one", "two", "-n", "5")
    assert (done.code, done.out) == (0, "one twoHello\n")
    request = opener.engine.requests[0]
    assert request.prompt == (BOS, *b"one two")
    assert request.max_tokens == 5
    assert request.stop_ids == {EOS}
    assert request.sampling == Sampling()
    assert opener.engine.is_closed


def test_without_n_it_goes_on_until_the_end(jitllm: Jitllm, opener: Opener) -> None:
    assert jitllm("run", "m.jlm", "?").out == "?Hello, world\n"
    assert opener.engine.requests[0].max_tokens is None


def test_chat_shows_only_the_answer(jitllm: Jitllm, opener: Opener) -> None:
    done = jitllm("run", "m.jlm", "-chat", "-system", "be kind", "hi")
    assert done.out == "Hello, world\n"
    rendered = b"system: be kind|user: hi|assistant: "
    assert opener.engine.requests[0].prompt == (BOS, *rendered)


def test_system_needs_chat(jitllm: Jitllm, opener: Opener) -> None:
    done = jitllm("run", "m.jlm", "-system", "be kind", "hi")
    assert (done.code, done.out) == (2, "")
    assert done.err == "jitllm: -system needs -chat; add -chat\n"


def test_a_base_model_cannot_chat(jitllm: Jitllm, opener: Opener) -> None:
    opener.template = ""
    done = jitllm("run", "m.jlm", "-chat", "hi")
    assert done.code == 1
    assert "no chat template" in done.err
    assert "-chat-template" in done.err


def test_json_has_every_key(jitllm: Jitllm, opener: Opener) -> None:
    report = jitllm("run", "m.jlm", "-json", "-n", "5", "hi").json
    assert report["text"] == "Hello"
    assert report["prompt_ids"] == [BOS, *b"hi"]
    assert report["ids"] == list(b"Hello")
    assert report["finish"] == "length"
    assert report["prefill_tok_s"] == 3 / 0.25
    assert report["decode_tok_s"] == 4 / 0.5
    assert report["ttft_ms"] == 125
    assert report["pages"].keys() >= {
        "blocks",
        "resident",
        "frames",
        "page_ins",
        "evictions",
        "bytes_read",
        "page_ins_per_token",
        "budget_bytes",
        "fixed_bytes",
    }


def test_page_ins_are_counted_per_step(jitllm: Jitllm, opener: Opener) -> None:
    opener.engine.frames = 1
    done = jitllm("run", "m.jlm", "-json", "-n", "9", "hi")
    pages = done.json["pages"]
    assert pages["page_ins_per_token"] == NUM_BLOCKS - 1
    assert pages["page_ins"] == 9 * (NUM_BLOCKS - 1)


def test_the_report_is_on_stderr(jitllm: Jitllm, opener: Opener) -> None:
    lines = jitllm("run", "m.jlm", "-n", "5", "hi").err.splitlines()
    assert [line.split()[0] for line in lines] == ["model", "memory", "prompt", "pages"]
    assert "64.00 MiB" in lines[1]
    assert lines[2] == "prompt 3 tok in 250 ms (12.0 tok/s)   decode 4 tok in 500 ms (8.0 tok/s)"


def test_cached_tokens_do_not_count_as_computed(jitllm: Jitllm, opener: Opener) -> None:
    opener.engine.cached_tokens = 2
    done = jitllm("run", "m.jlm", "-n", "5", "-json", "hi")
    assert done.json["prefill_tok_s"] == 1 / 0.25
    assert done.json["cached_tokens"] == 2
    assert "prompt 1 tok in 250 ms" in done.err
    assert "2 tok of the prompt cached" in done.err


def test_cached_tokens_are_known_of_a_reply_that_a_stop_string_ended(
    jitllm: Jitllm, opener: Opener
) -> None:
    opener.engine.cached_tokens = 2
    report = jitllm("run", "m.jlm", "-json", "-stop", ", ", "hi").json
    assert (report["finish"], report["cached_tokens"]) == ("stop", 2)
    assert report["prefill_tok_s"] == 1 / 0.25
    assert report["decode_tok_s"] > 0


def test_a_tight_budget_is_announced(jitllm: Jitllm, opener: Opener) -> None:
    opener.engine.frames = 2
    opener.engine.over_budget_bytes = 3 << 20
    opener.compiled_kernels = 40
    lines = jitllm("run", "m.jlm", "-n", "5", "hi").err.splitlines()
    starts = [line.split()[0] for line in lines]
    assert starts == ["compiling", "model", "memory", "memory", "pages", "prompt", "pages"]
    assert lines[0] == "compiling kernels 40/40 took 1.50 s"
    assert "* OVER BUDGET by 3.00 MiB" in lines[3]
    assert "2 of 4 blocks fit" in lines[4]
    assert "about 2.7 page-ins per token" in lines[4]


def test_blocks_that_moved_are_reported(jitllm: Jitllm, opener: Opener) -> None:
    trial = SeamTrial("vulkan:0", 2, 4, 1.5, 0.03)
    opener.engine.more = {
        "moves": 3,
        "sent_home": 2,
        "brought_back": 1,
        "seam_trials": (trial,),
        "placement": Placement(("vulkan:0", "cpu:0"), "vulkan:0"),
    }
    *_, moves, seam = jitllm("run", "m.jlm", "-n", "5", "hi").err.splitlines()
    assert moves == (
        "moves    3 moves   blocks are at 0=vulkan:0,1=cpu:0,head=vulkan:0   "
        "2 blocks went to the host for room   1 came back"
    )
    assert seam == (
        "seam     2 blocks on vulkan:0 instead of 4: 1.50 times as fast, within 3%; it stays so"
    )
    report = jitllm("run", "m.jlm", "-n", "5", "-json", "hi").json
    assert (report["moves"], report["sent_home"], report["brought_back"]) == (3, 2, 1)


@pytest.mark.parametrize(("flag", "field"), [("-top-p", "top_p"), ("-temp", "temperature")])
def test_zero_is_a_value_like_others(jitllm: Jitllm, opener: Opener, flag: str, field: str) -> None:
    jitllm("run", "m.jlm", flag, "0", "hi")
    assert getattr(opener.engine.requests[0].sampling, field) == 0


@pytest.mark.parametrize("temp", ["inf", "nan", "-1", "1e31"])
def test_a_temperature_that_is_none_is_refused_before_the_model(
    jitllm: Jitllm, opener: Opener, temp: str
) -> None:
    done = jitllm("run", "m.jlm", "-temp", temp, "hi")
    assert (done.code, done.out, opener.config) == (2, "", None)
    assert "choose from 0 to 1e+30" in done.err


@pytest.mark.parametrize("dashes", ["-", "--"])
@pytest.mark.parametrize("is_before", [True, False])
def test_flags_work_in_both_spellings_everywhere(
    jitllm: Jitllm, opener: Opener, dashes: str, is_before: bool
) -> None:
    flags = "n=7 temp=0.5 top-k=3 top-p=0.9 min-p=0.1 repeat-penalty=1.5 repeat-last-n=8 seed=4"
    flags += " ctx=99 devices=cpu maxmem=1.5M threads=1 tier=plain kv-type=f32 read-ahead=off"
    flags += " gpu-layers=5 relocate=off"
    words = [word for flag in flags.split() for word in f"{dashes}{flag}".split("=")]
    words += [f"{dashes}ignore-eos", f"{dashes}stop=zzz", f"{dashes}page-size=16"]
    words += [f"{dashes}placement=0-2=cpu:0,head=host!", f"{dashes}placement-strict"]
    words += [f"{dashes}no-fallback", f"{dashes}no-gpu-fallback"]
    words += [f"{dashes}gpu-grow", f"{dashes}tune-seam"]
    args = [*words, "m.jlm", "hi"] if is_before else ["m.jlm", "hi", *words]
    done = jitllm("run", *args)
    assert (done.code, done.out) == (0, "hiHello, \n")
    request, config = opener.engine.requests[0], opener.config
    assert request.stop_ids == frozenset()
    assert request.sampling == Sampling(0.5, 3, 0.9, 0.1, 1.5, 8, seed=4)
    assert (config.ctx_tokens, config.maxmem_bytes, config.threads) == (99, 3 << 19, 1)
    assert (config.tier, config.kv_type, config.read_ahead) == ("plain", "f32", "off")
    assert (config.devices, config.page_size_tokens) == ("cpu", 16)
    assert (config.placement, config.placement_strict) == ("0-2=cpu:0,head=host!", True)
    assert (config.gpu_layers, config.fallback, config.gpu_fallback) == (5, False, False)
    assert (config.relocate, config.gpu_grow, config.tune_seam) == ("off", True, True)


def test_what_follows_two_dashes_is_text(jitllm: Jitllm, opener: Opener) -> None:
    done = jitllm("run", "m.jlm", "-n", "1", "--", "-1", "-n", "--", "x")
    assert done.out == "-1 -n -- xH\n"


def test_the_value_of_a_flag_may_look_like_a_flag(jitllm: Jitllm, opener: Opener) -> None:
    jitllm("run", "m.jlm", "-chat", "-system", "--json", "hi")
    assert bytes(opener.engine.requests[0].prompt[1:]).startswith(b"system: --json|")


def test_stop_strings_end_the_text(jitllm: Jitllm, opener: Opener) -> None:
    report = jitllm("run", "m.jlm", "-json", "-stop", ", ", "-stop", "zzz", "hi").json
    assert (report["text"], report["finish"]) == ("Hello", "stop")
    assert report["decode_tok_s"] >= 0
    assert opener.engine.num_cancelled == 1
    assert jitllm("run", "m.jlm", "-stop", "world!", "hi").out == "hiHello, world\n"


def test_characters_are_never_split(
    jitllm: Jitllm, opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[str] = []
    monkeypatch.setattr("jitllm.cli.run.say", parts.append)
    opener.engine.says = "né☕🙂".encode()
    jitllm("run", "m.jlm", "?")
    assert parts == ["?", "n", "é", "☕", "🙂", "\n"]
    parts.clear()
    jitllm("run", "m.jlm", "-n", "4", "?")  # ends inside a character
    assert parts == ["?", "n", "é", "�", "\n"]


def test_the_prompt_comes_from_a_file_or_from_stdin(
    jitllm: Jitllm, opener: Opener, stdin: Stdin, tmp_path: Path
) -> None:
    (tmp_path / "prompt").write_text("a\nb\n")
    assert jitllm("run", "m.jlm", "-n", "1", "-f", tmp_path / "prompt").out == "a\nbH\n"
    stdin(b"piped\n")
    assert jitllm("run", "m.jlm", "-n", "1").out == "pipedH\n"


def test_text_that_is_not_utf_8_is_refused(jitllm: Jitllm, opener: Opener, stdin: Stdin) -> None:
    stdin(b"abc\xff")
    done = jitllm("run", "m.jlm")
    assert done.code == 2
    assert "standard input is not UTF-8: byte 3" in done.err


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(
    jitllm: Jitllm, opener: Opener
) -> None:
    opener.engine.context_tokens = 3
    done = jitllm("run", "m.jlm", "long prompt")
    assert done.code == 1
    assert done.err.splitlines()[-1].startswith("jitllm: the prompt has 12 tokens")
    assert "context holds 3" in done.err
    assert done.out == ""


def test_a_failure_in_the_middle_shows_what_came_before(jitllm: Jitllm, opener: Opener) -> None:
    opener.engine.fails_at = 3
    opener.engine.error = PageError("m.jlm", 4096, "its checksum is wrong")
    done = jitllm("run", "m.jlm", "hi")
    assert (done.code, done.out) == (1, "hiHel\n")
    assert done.err.splitlines()[-1].startswith("jitllm: m.jlm at byte 4096: its checksum is wrong")
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    "args",
    [
        ("-n", "-1"),
        ("-temp", "-0.5"),
        ("-temp", "nan"),
        ("-top-p", "1.5"),
        ("-seed", "-1"),
        ("-seed", str(2**64)),
        ("-top-k", str(2**31)),
        ("-repeat-last-n", str(2**31)),
        ("-threads", "100000"),
        ("-ctx", "0"),
        ("-maxmem", "lots"),
        ("-devices", "npu"),
        ("-devices", "cpu,cpu:0"),
        ("-placement", "0-8"),
        ("-placement", "0=cpu,0=host"),
        ("-placement-strict",),
        ("-gpu-layers", "-2"),
        ("-read-ahead", "maybe"),
        ("-page-size", "17"),
        ("-n", "x"),
        ("-n",),
        ("-nope",),
        ("-chat=1",),
        ("-f", "no such file", "-n"),
    ],
)
def test_a_senseless_command_line_is_one_line_and_2(
    jitllm: Jitllm, opener: Opener, args: tuple[str, ...]
) -> None:
    done = jitllm("run", "m.jlm", "hi", *args)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("jitllm: ")
    assert done.err.count("\n") == 1
    assert opener.engine.requests == []


def test_nothing_from_stdin_is_no_prompt(jitllm: Jitllm, opener: Opener, stdin: Stdin) -> None:
    stdin(b"")
    done = jitllm("run", "m.jlm")
    assert done.code == 2
    assert "standard input is empty" in done.err


def test_json_needs_a_prompt(jitllm: Jitllm, opener: Opener, stdin: Stdin) -> None:
    stdin(b"", True)
    assert jitllm("run", "m.jlm", "-json").code == 2


def test_a_conversation_keeps_its_history(
    jitllm: Jitllm, opener: Opener, monkeypatch: pytest.MonkeyPatch, stdin: Stdin
) -> None:
    stdin(b"", True)
    lines = iter(["hi", "", "and?", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    done = jitllm("run", "m.jlm", "-system", "x")
    assert (done.code, done.out) == (0, "Hello, world\nHello, world\n")
    assert bytes(opener.engine.requests[1].prompt[1:]) == (
        b"system: x|user: hi|assistant: Hello, world|user: and?|assistant: "
    )


def test_a_conversation_ends_with_its_input(
    jitllm: Jitllm, opener: Opener, monkeypatch: pytest.MonkeyPatch, stdin: Stdin
) -> None:
    def end(prompt: str) -> str:
        raise EOFError

    stdin(b"", True)
    monkeypatch.setattr("builtins.input", end)
    assert jitllm("run", "m.jlm").code == 0


def test_a_conversation_survives_a_refused_question(
    jitllm: Jitllm, opener: Opener, monkeypatch: pytest.MonkeyPatch, stdin: Stdin
) -> None:
    stdin(b"", True)
    lines = iter(["x" * 100, "hi", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    opener.engine.context_tokens = 50
    done = jitllm("run", "m.jlm")
    assert (done.code, done.out) == (0, "Hello, world\n")
    assert "jitllm: the prompt has" in done.err


def test_ctrl_c_between_questions_ends_with_130(
    jitllm: Jitllm, opener: Opener, monkeypatch: pytest.MonkeyPatch, stdin: Stdin
) -> None:
    def interrupt(prompt: str) -> str:
        raise KeyboardInterrupt

    stdin(b"", True)
    monkeypatch.setattr("builtins.input", interrupt)
    assert jitllm("run", "m.jlm").code == 130
    assert opener.engine.is_closed


def test_a_file_that_is_not_there_is_named(jitllm: Jitllm, opener: Opener, tmp_path: Path) -> None:
    done = jitllm("run", "m.jlm", "-f", tmp_path / "none")
    assert done.code == 1
    assert "No such file" in done.err
