"""Chat templates: a conversation becomes the text that a model was trained to go on with.

Knows jinja2 and the places where templates are published. Knows no tokens: BOS and EOS are texts
here. A template comes with a model, from a stranger: it runs in jinja2's sandbox, may not multiply
its way to a huge string, and its errors are ours.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence, Sized
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from jitllm.errors import BadSource, JitllmError, UsageError

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]
"""`role` and `content`, and whatever else a template knows (`tool_calls`, ..)."""

DEFAULT = "default"
"""The name of a template that has none."""

_MAX_FILE_BYTES = 16 << 20
_MAX_PRODUCT = 1 << 20
_IN_FOLDER = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
_REMEDY = "convert the model again with another one: -chat-template FILE"


class ChatTemplate:
    """One template, compiled.

    `bos` and `eos` are the texts of those tokens. Raises `JitllmError` if it is no template.
    """

    def __init__(
        self,
        source: str,
        bos: str = "",
        eos: str = "",
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        from jinja2 import TemplateSyntaxError

        self._variables = {
            "bos_token": bos,
            "eos_token": eos,
            "strftime_now": lambda pattern: now().strftime(pattern),
        }
        try:
            self._template = _environment().from_string(source)
        except TemplateSyntaxError as error:
            problem = f"the chat template is wrong in line {error.lineno}: {error.message}"
            raise JitllmError(problem, _REMEDY) from error
        except Exception as error:  # constants are computed while compiling
            raise JitllmError(f"the chat template is wrong: {error}", _REMEDY) from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: object,
    ) -> str:
        """The text of a conversation, with BOS if the template writes it.

        `add_generation_prompt`: ends where the assistant begins to speak. Further `variables` are
        what the template defines (`enable_thinking`, ..). Raises `UsageError` when the template
        refuses the conversation (a role it does not know, an order it forbids), `JitllmError` when
        it fails.
        """
        values = self._variables | variables
        values |= {"messages": messages, "tools": tools}
        values["add_generation_prompt"] = add_generation_prompt
        try:
            return self._template.render(values)
        except _RefusedError as error:
            raise UsageError(f"the chat template refuses these messages: {error}") from error
        except Exception as error:  # whatever a stranger's template may do
            raise JitllmError(
                f"the chat template failed: {type(error).__name__}: {error}", _REMEDY
            ) from error


def pick_template(templates: Mapping[str, str], name: str = DEFAULT) -> str:
    """The source called `name`. Raises `UsageError` if there is none."""
    if name in templates:
        return templates[name]
    if templates:
        known = ", ".join(templates)
        raise UsageError(f"the model has no chat template {name!r}", f"it has: {known}")
    raise UsageError(
        "the model has no chat template: it is a base model",
        "give it plain text, or convert it again with -chat-template FILE",
    )


def read_templates(path: str | os.PathLike[str]) -> dict[str, str]:
    """The templates by name in a file, or in a model's folder.

    A file is `tokenizer_config.json`, `chat_template.json`, or a template itself. Raises
    `BadSource` when there is no template in it.
    """
    path = Path(path)
    if path.is_dir():
        return _read_folder(path)
    text = _read_text(path)
    if path.suffix != ".json":
        return {DEFAULT: text}
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadSource(path, f"this is no JSON: {error}") from error
    templates = _from_json(config.get("chat_template") if isinstance(config, dict) else config)
    if not templates:
        raise BadSource(path, "there is no chat template in it")
    return templates


def _read_folder(folder: Path) -> dict[str, str]:
    for name in _IN_FOLDER:
        if (folder / name).is_file():
            templates = read_templates(folder / name)
            for more in sorted((folder / "additional_chat_templates").glob("*.jinja")):
                templates.setdefault(more.stem, _read_text(more))
            return templates
    raise BadSource(folder, f"there is none of {', '.join(_IN_FOLDER)} in it")


def _from_json(value: object) -> dict[str, str]:
    """One template, or a list of {"name": .., "template": ..}."""
    if isinstance(value, str):
        return {DEFAULT: value} if value else {}
    entries = value if isinstance(value, list) else []
    return {
        entry["name"]: entry["template"]
        for entry in entries
        if isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("template"), str)
    }


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise BadSource(path, error.strerror or str(error)) from error
    if len(raw) > _MAX_FILE_BYTES:
        raise BadSource(path, f"it is larger than {_MAX_FILE_BYTES >> 20} MiB")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadSource(path, "this is no UTF-8 text") from error


class _RefusedError(Exception):
    """`raise_exception` in a template."""


def _refuse(message: object) -> NoReturn:
    raise _RefusedError(str(message))


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As templates expect it: not escaped for HTML, which is what jinja2's own does."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    """Made at the first template: jinja2 is not imported before."""
    from jinja2.ext import Extension
    from jinja2.nodes import Node
    from jinja2.parser import Parser
    from jinja2.runtime import Context
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what the assistant said, for training; here it is just text."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Environment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
            if _product_size(operator, left, right) > _MAX_PRODUCT:
                raise OverflowError(f"{operator} makes more than {_MAX_PRODUCT} characters or bits")
            return super().call_binop(context, operator, left, right)

    environment = Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", Generation],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    return environment


def _product_size(operator: str, left: object, right: object) -> int:
    """Characters, items or bits of a product or power; 0 where it cannot grow."""
    if isinstance(left, Sized) and isinstance(right, int):
        return len(left) * right
    if isinstance(right, Sized) and isinstance(left, int):
        return len(right) * left
    if isinstance(left, int) and isinstance(right, int) and operator == "**":
        return left.bit_length() * right
    return 0
