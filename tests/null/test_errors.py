import pickle

import pytest

from jitllm import errors
from jitllm.errors import JitllmError

EXAMPLES: list[JitllmError] = [
    JitllmError("it broke", "mend it"),
    errors.UsageError("-threads 0 is too small"),
    errors.BadContainer("a.jlm", "the header is cut short"),
    errors.BadSource("a.gguf", "tensor 3 ends beyond the file"),
    errors.UnsupportedModel("architecture", "nosuch", ["llama", "qwen3"]),
    errors.NotConverted("my model.gguf", "a GGUF file"),
    errors.ContextOverflow(5000, 4096),
    errors.PageError("a.jlm", 8192, "wrong checksum"),
    errors.OverBudget("the KV history", 3 << 20, 1 << 20),
    errors.OutOfPages("device vulkan:0", 3, 70, "KV of 70 positions", 3 << 20, 1 << 20, "more"),
    errors.QueueFull(64, retry_after_s=2.0),
    errors.PlacementError("block 3 is pinned"),
    errors.DiskFull("a.jlm", 3 << 30, 1 << 30),
    errors.HistoryError((3, 5), errors.DiskFull("kv", 3 << 30, 1 << 30), is_lost=False),
    errors.UnknownSession("reply-1"),
    errors.Draining(),
]


def test_every_error_has_an_example() -> None:
    kinds = {v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, Exception)}
    assert kinds == {type(error) for error in EXAMPLES}


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_an_error_survives_pickling_with_its_fields(error: JitllmError) -> None:
    twin = pickle.loads(pickle.dumps(error))
    assert type(twin) is type(error)
    assert str(twin) == str(error)
    assert vars(twin) == vars(error)


def test_what_files_say_is_quoted_and_cut() -> None:
    assert errors.shown("a\nb") == "'a\\nb'"
    assert errors.shown(["x"] * 1000, 20) == "['x', 'x', 'x', '..."
    error = errors.UnsupportedModel("architecture", "x" * 5000, ["llama"])
    assert len(str(error)) < 200


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_only_usage_errors_exit_with_two(error: JitllmError) -> None:
    assert error.exit_code == (2 if isinstance(error, errors.UsageError) else 1)


def test_messages_name_the_values_and_the_remedy() -> None:
    assert str(errors.ContextOverflow(5000, 4096)) == (
        "the prompt has 5000 tokens and the context holds 4096; shorten the prompt or raise -ctx"
    )
    assert str(errors.PageError("a.jlm", 8192, "wrong checksum")) == (
        "a.jlm at byte 8192: wrong checksum; check the file: jitllm info -check a.jlm"
    )
    unsupported = str(errors.UnsupportedModel("weight type", "IQ1_S", ["F32", "Q4_K"]))
    assert unsupported == "weight type 'IQ1_S' is not supported; supported: F32, Q4_K"


def test_the_convert_command_can_be_pasted() -> None:
    error = errors.NotConverted("my model.gguf", "a GGUF file")
    assert error.command == "jitllm convert 'my model.gguf'"
    assert str(error).endswith(error.command)
    assert errors.convert_command("a.gguf", "b.jlm") == "jitllm convert a.gguf b.jlm"


def test_a_hostile_name_cannot_write_to_the_terminal() -> None:
    text = str(errors.BadSource("a.gguf", "tensor 'x\x1b[2J\n\u202ey' is odd"))
    assert text == r"a.gguf: tensor 'x\x1b[2J\n\u202ey' is odd"
