"""`jitllmd run`: a prompt for a model that a server has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jitllm.cli.asking import Asked, user
from jitllm.cli.command import INTERRUPTED, AsJson, verb
from jitllm.cli.daemon.remote import DEFAULT_ADDRESS, Address, ApiKey
from jitllm.cli.interrupts import finished
from jitllm.cli.options import Chat, TextFile, Words, given_text, reply_flags
from jitllm.cli.screen import note, print_json, say
from jitllm.engine import Finish
from jitllm.errors import UsageError
from jitllm.remote import base_url
from jitllm.units import counted, format_duration, format_rate

if TYPE_CHECKING:
    from jitllm.engine import Usage
    from jitllm.handle import Handle
    from jitllm.handle.base import Prompt

EXAMPLES = """
    jitllmd run "The capital of France is" -n 8
    jitllmd run -model gemma -chat "Why is the sky blue?" -addr box:8080
    git log -5 | jitllmd run -chat -system "Sum this up."
"""


@reply_flags
def run(
    prompt: Words = None,
    *,
    model: Annotated[
        str | None,
        typer.Option("-model", metavar="ID", help="The model; default: the only one."),
    ] = None,
    file: TextFile = None,
    chat: Chat = False,
    addr: Address = DEFAULT_ADDRESS,
    api_key: ApiKey = "",
    json: AsJson = False,
    asked: Asked,
) -> int:
    """Let a server continue a text or answer a question.

    The prompt is the words, or -f FILE, or what is piped in. Text goes to stdout as it comes, what
    it cost to stderr. Ctrl-C cancels the reply.
    """
    text = given_text(prompt, file, keep_newline=False)
    if text is None:
        raise UsageError("there is no prompt", "write it, or use -f FILE")
    if asked.system and not chat:
        raise UsageError("-system needs -chat", "add -chat")
    said: Prompt = [*asked.turns(), user(text)] if chat else text
    return asyncio.run(_run(base_url(addr), model, api_key, said, asked, json))


class _Reply:
    """What came of a reply so far."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self.text = ""
        self.ids: list[int] = []
        self.finish: Finish | None = None
        self.usage: Usage | None = None
        self._say = say

    async def follow(self, handle: Handle, prompt: Prompt, asked: Asked) -> None:
        """Take it in to its end."""
        sampling: Any = asdict(asked.sampling) | {"logit_bias": {}}
        deltas = handle.generate(
            prompt,
            max_tokens=asked.max_tokens,
            stop=asked.stops,
            ignore_eos=asked.ignore_eos,
            **sampling,
        )
        async with aclosing(deltas):
            async for delta in deltas:
                self.text += delta.text
                self.ids += delta.tokens
                self.finish, self.usage = delta.finish, delta.usage
                self._say(delta.text)


async def _run(
    url: str, model: str | None, api_key: str, prompt: Prompt, asked: Asked, json: bool
) -> int:
    from jitllm.handle.http import open_remote

    handle = await open_remote(url, model, api_key)
    reply = _Reply((lambda text: None) if json else say)
    try:
        is_finished = await finished(reply.follow(handle, prompt, asked))
    finally:
        if reply.text and not json:
            say("\n")
    if not is_finished:
        reply.finish = Finish.CANCELLED
        note(f"cancelled after {counted(len(reply.ids), 'token')}")
    elif reply.usage is not None:
        note(_costs(reply.usage))
    if json:
        print_json(
            {
                "model": handle.name,
                "text": reply.text,
                "ids": reply.ids,
                "finish": reply.finish,
                "usage": None if reply.usage is None else asdict(reply.usage),
            }
        )
    return 0 if is_finished else INTERRUPTED


def _costs(usage: Usage) -> str:
    computed = usage.prompt_tokens - usage.cached_tokens
    decoded = max(usage.generated_tokens - 1, 0)  # the first token comes with the prompt
    parts = [
        f"prompt {computed} tok in {format_duration(usage.prefill_s)} "
        f"({_rate(computed, usage.prefill_s)})",
        f"decode {decoded} tok in {format_duration(usage.decode_s)} "
        f"({_rate(decoded, usage.decode_s)})",
        f"queued {format_duration(usage.queued_s)}",
    ]
    if usage.cached_tokens:
        parts.append(f"{usage.cached_tokens} tok of the prompt cached")
    return "   ".join(parts)


def _rate(num: int, seconds: float) -> str:
    return format_rate(num / seconds if seconds > 0 else 0.0, "tok")


command = verb(run, EXAMPLES)
