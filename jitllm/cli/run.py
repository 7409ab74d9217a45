"""`jitllm run`: continue a text, answer a question, or hold a small conversation."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jitllm.cli import report
from jitllm.cli.asking import Asked, chat_ids, text_ids, user
from jitllm.cli.command import INTERRUPTED, AsJson, verb
from jitllm.cli.interrupts import finished
from jitllm.cli.loading import opened
from jitllm.cli.options import Model, TextFile, Words, engine_flags, given_text
from jitllm.cli.reply import Reply
from jitllm.cli.screen import note, print_json, say
from jitllm.config import EngineConfig
from jitllm.engine import EngineStats, Sampling
from jitllm.errors import UsageError

if TYPE_CHECKING:
    from jitllm.compose import Loaded

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
def run(
    model: Model,
    prompt: Words = None,
    *,
    num: Annotated[
        int | None,
        typer.Option("-n", metavar="N", help="Tokens to generate; default: until the end."),
    ] = None,
    file: TextFile = None,
    chat: Annotated[bool, typer.Option("-chat", help="Use the model's chat template.")] = False,
    system: Annotated[
        str, typer.Option("-system", metavar="TEXT", help="What the model is to be; with -chat.")
    ] = "",
    temp: Annotated[
        float, typer.Option("-temp", metavar="F", help="Temperature; 0 takes the likeliest token.")
    ] = 0.0,
    top_k: Annotated[
        int, typer.Option("-top-k", metavar="N", help="Draw from the N likeliest; 0: from all.")
    ] = 0,
    top_p: Annotated[
        float,
        typer.Option("-top-p", metavar="F", help="Draw from the likeliest that make up F."),
    ] = 1.0,
    min_p: Annotated[
        float,
        typer.Option("-min-p", metavar="F", help="Leave out what is F times less likely."),
    ] = 0.0,
    repeat_penalty: Annotated[
        float, typer.Option("-repeat-penalty", metavar="F", help="Above 1: repeat less.")
    ] = 1.0,
    repeat_last_n: Annotated[
        int, typer.Option("-repeat-last-n", metavar="N", help="Tokens that count as repeated.")
    ] = 64,
    seed: Annotated[
        int, typer.Option("-seed", metavar="N", help="The same seed gives the same reply.")
    ] = 0,
    stop: Annotated[
        list[str] | None,
        typer.Option("-stop", metavar="TEXT", help="End before this text; may be repeated."),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("-ignore-eos", help="Go on after the model has ended its reply.")
    ] = False,
    json: AsJson = False,
    config: EngineConfig,
) -> int:
    """Generate text.

    The prompt is the words after the model, or -f FILE, or what is piped in. Text goes to stdout
    as it comes, after the prompt itself unless -chat is given; the report goes to stderr. Ctrl-C
    ends the reply and still reports.
    """
    asked = Asked(
        max_tokens=_at_least(num, 0, "-n"),
        system=system,
        stops=tuple(stop or ()),
        ignore_eos=ignore_eos,
        sampling=Sampling(
            temperature=_within(temp, 0, float("inf"), "-temp"),
            top_k=_at_least(top_k, 0, "-top-k") or 0,
            top_p=_within(top_p, 0, 1, "-top-p") or 1.0,
            min_p=_within(min_p, 0, 1, "-min-p"),
            repeat_penalty=_within(repeat_penalty, 1e-3, 1e3, "-repeat-penalty"),
            repeat_last_n=_at_least(repeat_last_n, 0, "-repeat-last-n") or 0,
            seed=_at_least(seed, 0, "-seed") or 0,
        ),
    )
    text = given_text(prompt, file, keep_newline=False)
    if text is None:
        if json:
            raise UsageError("--json needs a prompt", "write it after the model, or use -f FILE")
        from jitllm.cli.conversation import converse

        return asyncio.run(converse(model, config, asked))
    if system and not chat:
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
        _note_all(_costs(reply, stop))
        if json:
            print_json(_json(loaded, prompt_ids, reply, stop))
        return 0 if is_finished else INTERRUPTED


def _costs(reply: Reply, stop: EngineStats) -> list[str]:
    per_token = report.page_ins_per_token(reply.at_first_token, stop)
    return report.after(reply.rates(), stop.pages, per_token)


def _json(
    loaded: Loaded, prompt_ids: list[int], reply: Reply, stop: EngineStats
) -> dict[str, object]:
    rates = reply.rates()
    per_token = report.page_ins_per_token(reply.at_first_token, stop)
    return {
        "text": reply.text,
        "prompt_ids": prompt_ids,
        "ids": reply.ids,
        "finish": reply.finish,
        "cached_tokens": rates.cached_tokens,
        "prefill_tok_s": rates.prefill_tok_s,
        "decode_tok_s": rates.decode_tok_s,
        "ttft_ms": rates.ttft_s * 1e3,
        "pages": report.pages_json(stop.pages, per_token),
        **report.engine_json(loaded, stop),
    }


def _note_all(lines: list[str]) -> None:
    for line in lines:
        note(line)


def _at_least(value: int | None, least: int, flag: str) -> int | None:
    if value is not None and value < least:
        raise UsageError(f"{flag} {value} is too small", f"the least is {least}")
    return value


def _within(value: float, least: float, most: float, flag: str) -> float:
    if not least <= value <= most:
        raise UsageError(f"{flag} {value} makes no sense", f"choose from {least} to {most}")
    return value


command = verb(run, EXAMPLES)
