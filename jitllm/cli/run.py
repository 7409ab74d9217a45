"""`jitllm run`: continue a text, answer a question, or hold a small conversation."""

from __future__ import annotations

import asyncio
from pathlib import Path

from jitllm.cli import report
from jitllm.cli.asking import Asked, chat_ids, text_ids, user
from jitllm.cli.command import INTERRUPTED, AsJson, verb
from jitllm.cli.interrupts import finished
from jitllm.cli.loading import opened
from jitllm.cli.options import Chat, Model, TextFile, Words, engine_flags, given_text, reply_flags
from jitllm.cli.reply import Reply
from jitllm.cli.screen import note, print_json, say
from jitllm.config import EngineConfig
from jitllm.errors import UsageError

EXAMPLES = """
    jitllm run model.jlm "The capital of France is"
    jitllm run model.jlm -chat "Why is the sky blue?" -n 200
    jitllm run model.jlm -maxmem 200M -n 50 Once upon a time
    jitllm run model.jlm -f question.txt -chat -temp 0.8 -top-p 0.95 -seed 7
    git log -5 | jitllm run model.jlm -chat -system "Sum this up."
    jitllm run model.jlm -- "-1 is a prompt that begins with a dash"
    jitllm run model.jlm                       (a conversation; /exit or Ctrl-D ends it)
"""


@engine_flags
@reply_flags
def run(
    model: Model,
    prompt: Words = None,
    *,
    file: TextFile = None,
    chat: Chat = False,
    json: AsJson = False,
    asked: Asked,
    config: EngineConfig,
) -> int:
    """Generate text.

    The prompt is the words after the model, or -f FILE, or what is piped in. Text goes to stdout
    as it comes, after the prompt itself unless -chat is given; the report goes to stderr. Ctrl-C
    ends the reply and still reports.
    """
    text = given_text(prompt, file, keep_newline=False)
    if text is None:
        if json:
            raise UsageError("--json needs a prompt", "write it after the model, or use -f FILE")
        from jitllm.cli.conversation import converse

        return asyncio.run(converse(model, config, asked))
    if asked.system and not chat:
        raise UsageError("-system needs -chat", "add -chat")
    return asyncio.run(_answer(model, config, asked, text, chat, json))


async def _answer(
    path: Path, config: EngineConfig, asked: Asked, text: str, chat: bool, json: bool
) -> int:
    async with opened(path, config) as loaded:
        turns = [*asked.turns(), user(text)]
        prompt_ids = chat_ids(loaded, turns) if chat else text_ids(loaded, text)
        start = await loaded.engine.stats()
        _note_all(report.before(loaded, start))
        is_echoed = not (chat or json) and len(prompt_ids) <= start.context_tokens
        if is_echoed:
            say(text)
        reply = Reply(loaded.tokenizer, asked.stops, (lambda text: None) if json else say)
        try:
            is_finished = await finished(
                reply.run(loaded.engine, asked.request(loaded, prompt_ids))
            )
        finally:
            if is_echoed or (reply.ids and not json):
                say("\n")
        stop = await loaded.engine.stats()
        per_token = report.page_ins_per_token(start, stop)
        _note_all(report.after(reply.rates(), stop, per_token))
        if json:
            pages = report.pages_json(stop.pages, per_token)
            print_json(
                {**_json(prompt_ids, reply), "pages": pages, **report.engine_json(loaded, stop)}
            )
        return 0 if is_finished else INTERRUPTED


def _json(prompt_ids: list[int], reply: Reply) -> dict[str, object]:
    rates = reply.rates()
    return {
        "text": reply.text,
        "prompt_ids": prompt_ids,
        "ids": reply.ids,
        "finish": reply.finish,
        "cached_tokens": rates.cached_tokens,
        "prefill_tok_s": rates.prefill_tok_s,
        "decode_tok_s": rates.decode_tok_s,
        "ttft_ms": rates.ttft_s * 1e3,
    }


def _note_all(lines: list[str]) -> None:
    for line in lines:
        note(line)


command = verb(run, EXAMPLES)
