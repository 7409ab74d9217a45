import json
from datetime import datetime
from pathlib import Path

import pytest

from jitllm.errors import BadSource, JitllmError, UsageError
from jitllm.text.chat import ChatTemplate, pick_template, read_templates

TURNS = """
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role not in ["user", "assistant"] %}
        {{- raise_exception("Only user and assistant speak, not " + message.role) }}
    {%- endif %}
    {{- "<|" + message.role + "|>" + message.content + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|assistant|>" }}{% endif %}
"""
HELLO = [{"role": "user", "content": "Hello <b>"}]


def test_a_conversation_becomes_text() -> None:
    template = ChatTemplate(TURNS, "<s>", "</s>")
    asked = "<s><|user|>Hello <b></s>"
    assert template.render(HELLO) == asked + "<|assistant|>"
    assert template.render(HELLO, add_generation_prompt=False) == asked


def render(source: str, **variables: object) -> str:
    now = datetime(2024, 2, 29, 12)
    return ChatTemplate(source, now=lambda: now).render(HELLO, **variables)


def test_what_templates_expect_of_their_environment() -> None:
    assert (
        render("{% if true %}\n  {% set x = 1 %}\nA\n{% endif %}\n") == "A\n"
    )  # blocks are trimmed
    assert render("{{ messages[0] | tojson }}") == '{"role": "user", "content": "Hello <b>"}'
    assert render("{{ ['\u00e9'] | tojson(indent=1) }}") == '[\n "\u00e9"\n]'
    assert render("{{ strftime_now('%d %b %Y') }}") == "29 Feb 2024"
    assert render("{% for x in [1, 2] %}{{ x }}{% break %}{% endfor %}") == "1"
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}") == "Hello <b>"
    assert render("{{ tools is none }}{{ thinking is defined }}") == "TrueFalse"
    assert render("{{ tools[0].name }}{{ thinking }}", tools=[{"name": "x"}], thinking=1) == "x1"


def test_a_refusal_of_the_template_is_told() -> None:
    with pytest.raises(UsageError) as caught:
        ChatTemplate(TURNS).render([{"role": "tool", "content": ""}])
    assert "refuses these messages: Only user and assistant speak, not tool" in str(caught.value)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("a\n{% if %}", "wrong in line 2"),
        ("{{ x | no_such }}", "No filter named 'no_such'"),
        ("{% include 'x' %}", "failed"),
        ("{{ messages[0].x.y }}", "no attribute 'x'"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ 'a' * 10 ** 10 }}", "takes too much memory"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% for x in range(1000000) %}{% endfor %}", "OverflowError"),
    ],
)
def test_a_bad_template_is_an_error_of_ours(source: str, problem: str) -> None:
    with pytest.raises(JitllmError, match=problem.replace("*", r"\*")) as caught:
        render(source)
    assert not isinstance(caught.value, UsageError)
    assert "-chat-template FILE" in str(caught.value)


def test_products_of_everyday_size_are_fine() -> None:
    assert render("{{ '-' * 3 }}{{ 2 * 1.5 }}{{ 2 ** 10 }}{{ 3 * [1] }}") == "---3.01024[1, 1, 1]"


def test_templates_are_picked_by_name() -> None:
    templates = {"default": "a", "tool_use": "b"}
    assert pick_template(templates) == "a"
    assert pick_template(templates, "tool_use") == "b"
    with pytest.raises(UsageError, match="no chat template 'rag'; it has: default, tool_use"):
        pick_template(templates, "rag")
    with pytest.raises(UsageError, match="base model; .*-chat-template FILE"):
        pick_template({})


NAMED = [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}]


@pytest.mark.parametrize(
    ("name", "content", "templates"),
    [
        ("x.jinja", "{{ x }}", {"default": "{{ x }}"}),
        ("x.txt", "\ufeff{{ x }}", {"default": "{{ x }}"}),
        ("chat_template.json", {"chat_template": "a"}, {"default": "a"}),
        ("tokenizer_config.json", {"chat_template": NAMED}, {"default": "a", "rag": "b"}),
        ("list.json", NAMED, {"default": "a", "rag": "b"}),
    ],
)
def test_templates_of_a_file(
    tmp_path: Path, name: str, content: object, templates: dict[str, str]
) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert read_templates(tmp_path / name) == templates


def test_templates_of_a_folder(tmp_path: Path) -> None:
    with pytest.raises(BadSource, match="none of chat_template.jinja, chat_template.json, tok"):
        read_templates(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "a"}))
    assert read_templates(tmp_path) == {"default": "a"}
    (tmp_path / "chat_template.jinja").write_text("b")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("c")
    assert read_templates(tmp_path) == {"default": "b", "rag": "c"}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"{", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"{}", "no chat template in it"),
        (b"7", "no chat template in it"),
        (b'{"chat_template": [{"name": 1, "template": "a"}, 2]}', "no chat template in it"),
        (b"\xff", "no UTF-8"),
        (b" " * (17 << 20), "larger than 16 MiB"),
    ],
)
def test_a_file_without_a_template_is_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(BadSource, match=problem):
        read_templates(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadSource, match="No such file"):
        read_templates(tmp_path / "none.jinja")
