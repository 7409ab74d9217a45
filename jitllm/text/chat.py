"""Chat templates: a conversation becomes the text that a model was trained to go on with.

Knows what templates expect, and the places where they are published. Knows no tokens: BOS and EOS
are texts here.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jitllm.errors import BadSource, UsageError
from jitllm.text.sandbox import Sandbox

Message = Mapping[str, Any]
"""`role` and `content`, and whatever else a template knows (`tool_calls`, ..)."""

DEFAULT = "default"
"""The name of a template that has none."""

_MAX_FILE_BYTES = 16 << 20
_IN_FOLDER = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")


class ChatTemplate:
    """One template, compiled, in a process of its own.

    `bos` and `eos` are the texts of those tokens. Raises `JitllmError` if it is no template.
    """

    def __init__(
        self,
        source: str,
        bos: str = "",
        eos: str = "",
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._tokens = {"bos_token": bos, "eos_token": eos}
        self._now = now
        self._sandbox = Sandbox(source)
        self._turn = asyncio.Lock()

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
        it fails, or takes more time or memory than any text should.
        """
        values = self._tokens | variables
        values |= {"messages": messages, "tools": tools, "now": self._now().isoformat()}
        values["add_generation_prompt"] = add_generation_prompt
        return self._sandbox.render(values)

    async def rendered(self, messages: Sequence[Message]) -> str:
        """As `render`, beside an event loop; conversations that wait for others take no thread."""
        async with self._turn:
            return await asyncio.to_thread(self.render, messages)


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
