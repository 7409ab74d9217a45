"""The small conversation of `jitllm run` on a terminal: one history, kept until the end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jitllm.cli import report
from jitllm.cli.asking import Asked, Turn, chat_ids, user
from jitllm.cli.interrupts import finished, raised
from jitllm.cli.loading import opened
from jitllm.cli.reply import Reply
from jitllm.cli.screen import note, say
from jitllm.config import EngineConfig
from jitllm.errors import JitllmError

if TYPE_CHECKING:
    from jitllm.compose import Loaded

EXIT = "/exit"


async def converse(path: Path, config: EngineConfig, asked: Asked) -> int:
    """Ask and answer until `/exit` or the end of the input.

    Ctrl-C ends a reply, which stays in the history as far as it came; between replies it ends
    the program, by KeyboardInterrupt.
    """
    async with opened(path, config) as loaded:
        turns = asked.turns()
        chat_ids(loaded, [*turns, user("?")])  # refuses a model that cannot hold a conversation
        for line in report.before(loaded, await loaded.engine.stats()):
            note(line)
        note(f"{EXIT} or Ctrl-D ends, Ctrl-C stops a reply")
        while (question := _question()) is not None:
            if question:
                turns += await _exchange(loaded, asked, turns, user(question))
        return 0


def _question() -> str | None:
    """The next line; None at the end."""
    import readline  # noqa: F401  (gives `input` its line editing and history)

    with raised():
        try:
            line = input("> ").strip()
        except EOFError:
            say("\n")
            return None
    return None if line == EXIT else line


async def _exchange(loaded: Loaded, asked: Asked, turns: list[Turn], question: Turn) -> list[Turn]:
    """The question and its answer; nothing if the model could not answer."""
    reply = Reply(loaded.tokenizer, asked.stops, say)
    start = await loaded.engine.stats()
    try:
        request = asked.request(loaded, chat_ids(loaded, [*turns, question]))
        await finished(reply.run(loaded.engine, request))
    except JitllmError as error:
        note(f"jitllm: {error}")
        return []
    say("\n")
    stop = await loaded.engine.stats()
    per_token = report.page_ins_per_token(start, stop)
    note(report.after(reply.rates(), stop, per_token)[0])
    return [question, {"role": "assistant", "content": reply.text}]
