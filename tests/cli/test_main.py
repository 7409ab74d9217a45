from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jitllm import __version__
from jitllm.cli.main import VERBS
from tests.cli.fake import Jitllm, Opener

HERE = Path(__file__).parent
FAKE = [sys.executable, str(HERE / "fake.py")]


def test_no_verb_is_a_usage_error(jitllm: Jitllm) -> None:
    done = jitllm()
    assert (done.code, done.out) == (2, "")
    assert all(verb in done.err for verb in VERBS)


def test_an_unknown_verb_is_a_usage_error(jitllm: Jitllm) -> None:
    done = jitllm("rnu", "m.jlm")
    assert done.code == 2
    assert done.err == "jitllm: there is no verb 'rnu'; did you mean run?\n"
    done = jitllm("-nope")
    assert done.code == 2
    assert done.err == "jitllm: jitllm has no flag -nope before a verb; see jitllm -help\n"


@pytest.mark.parametrize("flag", ["-help", "--help", "-h", "help"])
def test_help_lists_the_verbs(jitllm: Jitllm, flag: str) -> None:
    done = jitllm(flag)
    assert done.code == 0
    assert all(f"  {verb} " in done.out for verb in VERBS)
    assert "..." not in done.out.partition("Commands:")[2], "a summary does not fit its line"


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("flag", ["-help", "--help"])
def test_every_verb_explains_itself(jitllm: Jitllm, verb: str, flag: str) -> None:
    done = jitllm(verb, flag)
    assert done.code == 0
    assert f"jitllm {verb}" in done.out.split("Examples:")[1]
    assert "-json" in done.out
    assert jitllm(verb, "-h").out == done.out
    assert jitllm("help", verb).out == done.out


@pytest.mark.parametrize("verb", VERBS)
def test_help_names_arguments_in_our_words_alone(jitllm: Jitllm, verb: str) -> None:
    usage, _, rest = jitllm(verb, "-help").out.partition("\n")
    assert re.fullmatch(rf"Usage: jitllm {verb} \[OPTIONS\]( [^<>{{}}:]+)?", usage)
    assert "......" not in usage
    flags = rest.partition("Examples:")[0]
    assert not re.search(r"<\w+>|\{|\b(PATH|INTEGER|FLOAT|BOOLEAN|RANGE)\b", flags)


@pytest.mark.parametrize("spelling", ["version", "-version", "--version"])
def test_version(jitllm: Jitllm, spelling: str) -> None:
    assert jitllm(spelling).out.startswith(f"jitllm {__version__} ")


@pytest.mark.parametrize("flag", ["-json", "--json"])
def test_version_as_json(jitllm: Jitllm, flag: str) -> None:
    assert jitllm("version", flag).json["version"] == __version__


def test_version_imports_nothing_heavy() -> None:
    program = (
        "import sys; from jitllm.cli.main import main; main(['version']);"
        "print(*sorted({m.split('.')[0] for m in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    loaded = set(done.stdout.splitlines()[1].split())
    assert "typer" in loaded
    assert loaded & {"numpy", "llvmlite", "tokenizers", "jinja2", "rich", "msgpack"} == set()


def test_what_nobody_foresaw_is_one_line(
    jitllm: Jitllm, opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    opener.error = RuntimeError("two\nlines")
    done = jitllm("run", "m.jlm", "hi")
    assert done.code == 1
    assert done.err == "jitllm: RuntimeError: two\\nlines (a bug: JITLLM_DEBUG=1 shows where)\n"
    assert "Traceback" in jitllm("run", "m.jlm", "hi", "-debug").err
    monkeypatch.setenv("JITLLM_DEBUG", "1")
    assert "Traceback" in jitllm("run", "m.jlm", "hi").err


def test_no_memory_is_a_message(jitllm: Jitllm, opener: Opener) -> None:
    opener.error = MemoryError()
    done = jitllm("run", "m.jlm", "hi")
    assert (done.code, done.err) == (1, "jitllm: out of memory; lower -maxmem or -ctx\n")


@pytest.mark.parametrize("verb", ["run", "info", "tokenize", "score", "speed"])
def test_a_gguf_file_is_refused_with_the_command(jitllm: Jitllm, verb: str, tmp_path: Path) -> None:
    path = tmp_path / "a model.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    done = jitllm(verb, path, *(["x"] if verb in ("run", "tokenize", "score") else []))
    assert (done.code, done.out) == (1, "")
    assert done.err.splitlines()[-1].endswith(f"convert it: jitllm convert '{path}'")


@pytest.mark.parametrize("verb", ["run", "info", "tokenize", "score", "speed", "convert"])
def test_a_missing_file_is_named(jitllm: Jitllm, verb: str, tmp_path: Path) -> None:
    path = tmp_path / "none.jlm"
    done = jitllm(verb, path, *(["x"] if verb in ("run", "tokenize", "score") else []))
    assert done.code == 1
    assert str(path) in done.err
    assert done.err.count("\n") == 1


# In a process of its own


def start(*args: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*FAKE, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env=os.environ | environment,
        cwd=HERE.parents[1],
    )


def wait_for(child: subprocess.Popen[str], text: str) -> str:
    """Reads stdout until `text` has come."""
    assert child.stdout is not None
    seen = ""
    while text not in seen:
        seen += (got := child.stdout.read(1))
        assert got, f"ended after {seen!r}"
    return seen


def test_ctrl_c_ends_the_reply_and_reports(tmp_path: Path) -> None:
    marker = tmp_path / "cancelled"
    with start("run", "m.jlm", "hi", "-ignore-eos", FAKE_CANCELLED=str(marker)) as child:
        seen = wait_for(child, "hitick")
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=30)
    assert child.returncode == 130
    assert (seen + out).endswith("\n")
    assert err.splitlines()[-2].startswith("prompt 3 tok in ")
    assert err.splitlines()[-1].startswith("pages ")
    assert "Traceback" not in err
    assert marker.exists()


def test_ctrl_c_gives_json_too() -> None:
    with start("run", "m.jlm", "hi", "-json", "-ignore-eos") as child:
        assert child.stderr is not None
        while not child.stderr.readline().startswith("memory"):
            pass
        time.sleep(0.5)
        child.send_signal(signal.SIGINT)
        out, _ = child.communicate(timeout=30)
    assert child.returncode == 130
    assert json.loads(out)["finish"] == "cancelled"


def test_ctrl_c_in_speed_reports_what_there_is() -> None:
    with start("speed", "m.jlm", "-p", "0", "-n", "5", "-r", "100000") as child:
        assert child.stderr is not None
        while not child.stderr.readline().startswith("memory"):
            pass
        time.sleep(0.5)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=30)
    assert child.returncode == 130, err
    assert out.startswith("tg5 ")


def test_a_reader_that_leaves_is_no_drama() -> None:
    with start("run", "m.jlm", "hi", "-ignore-eos") as child:
        wait_for(child, "hi")
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        err = child.stderr.read()
        code = child.wait(timeout=30)
    assert code == 0
    assert "Traceback" not in err
    assert "BrokenPipe" not in err


def test_a_terminal_without_the_character_shows_its_escape() -> None:
    environment = {"PYTHONIOENCODING": "ascii", "FAKE_SAYS": "☕", "FAKE_DELAY": "0"}
    with start("run", "m.jlm", "hi", **environment) as child:
        out, err = child.communicate(timeout=30)
    assert (child.returncode, out) == (0, "hi\\u2615\n"), err
