"""`jitllm speed`: tokens a second of a prompt and of decoding, each a few times."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, Any

import typer

from jitllm.cli import report, samples
from jitllm.cli.asking import text_ids
from jitllm.cli.command import INTERRUPTED, AsJson, verb
from jitllm.cli.interrupts import finished
from jitllm.cli.loading import opened
from jitllm.cli.options import Model, engine_flags
from jitllm.cli.reply import answered
from jitllm.cli.screen import note, print_json, say
from jitllm.config import EngineConfig
from jitllm.engine import Engine, Request
from jitllm.errors import UsageError
from jitllm.units import counted

SENTENCE = "The quick brown fox jumps over the lazy dog while the old clock ticks on. "

EXAMPLES = """
    jitllm speed model.jlm
    jitllm speed model.jlm -p 512 -n 128 -r 5 -threads 2
    jitllm speed model.jlm -maxmem 200M -n 32
    jitllm speed model.jlm -p 0 -depth 4096
    jitllm speed model.jlm -json
"""


@dataclass(frozen=True, slots=True)
class Work:
    """What one repetition computes, in tokens, and how many there are."""

    num_prompt: int
    num_decode: int
    depth: int
    repetitions: int


@dataclass(slots=True)
class Samples:
    """Tokens a second, one for each repetition, and what a plain loop reads a second."""

    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    read_gb_s: list[float] = field(default_factory=list)


@engine_flags
def speed(
    model: Model,
    *,
    num_prompt: Annotated[
        int, typer.Option("-p", metavar="N", help="Tokens of the prompt; 0 leaves it out.")
    ] = 512,
    num_decode: Annotated[
        int, typer.Option("-n", metavar="N", help="Tokens to decode; 0 leaves it out.")
    ] = 128,
    depth: Annotated[
        int, typer.Option("-depth", metavar="N", help="Tokens of history before those of -n.")
    ] = 0,
    repetitions: Annotated[int, typer.Option("-r", metavar="N", help="Repetitions.")] = 3,
    json: AsJson = False,
    config: EngineConfig,
) -> int:
    """Measure how fast a model runs here.

    One round of each kind warms up and is not counted. Every repetition is a request of its own:
    a prompt of -p tokens, then -n tokens decoded one by one behind a history of -depth tokens,
    which is not timed. The weights that decoding reads a second are shown beside what a plain loop
    reads of as much memory with as many threads. The spread is the largest rate less the smallest,
    over the median. The machine should have nothing else to do.
    """
    if min(num_prompt, num_decode, depth) < 0 or repetitions < 1 or num_prompt == num_decode == 0:
        raise UsageError(
            "there is nothing to measure", "choose -p, -n and -depth from 0, -r from 1"
        )
    work = Work(num_prompt, num_decode, depth, repetitions)
    return asyncio.run(_measure(model, config, work, json))


async def _measure(path: Path, config: EngineConfig, work: Work, json: bool) -> int:
    # A prompt that is remembered from the last repetition measures nothing.
    async with opened(path, replace(config, share_prefixes=False)) as loaded:
        start = await loaded.engine.stats()
        for line in report.before(loaded, start):
            note(line)
        _check_fit(work, start.context_tokens)
        found = Samples()
        ids = text_ids(loaded, SENTENCE)
        is_finished = await finished(_repeat(loaded.engine, ids, work, found))
        stats = await loaded.engine.stats()
    bytes_per_token = report.weight_bytes_per_token(loaded.header)
    if found.decode and is_finished:
        found.read_gb_s = samples.read_wall(bytes_per_token, stats)
    result = _result(bytes_per_token, found)
    if json:
        pages = report.pages_json(stats.pages, report.page_ins_per_token(start, stats))
        print_json({**result, "pages": pages, **report.engine_json(loaded, stats)})
    else:
        say(_lines(result, work))
    return 0 if is_finished else INTERRUPTED


def _check_fit(work: Work, ctx_tokens: int) -> None:
    """A run that the context cuts short would count tokens that nobody computed."""
    decoded = work.num_decode and work.depth + work.num_decode + 1
    for flag, num_tokens in (("-p", work.num_prompt), ("-depth" if work.depth else "-n", decoded)):
        if num_tokens > ctx_tokens:
            raise UsageError(
                f"{flag} takes {counted(num_tokens, 'token')} and the context holds {ctx_tokens}",
                f"lower {flag} or raise -ctx",
            )


async def _repeat(engine: Engine, ids: Sequence[int], work: Work, found: Samples) -> None:
    prompt = tuple(islice(cycle(ids), work.num_prompt))
    history = tuple(islice(cycle(ids), work.depth))
    for repetition in range(work.repetitions + 1):
        if prompt:
            rate = await _rate(engine, Request(prompt, max_tokens=0), len(prompt), "-p")
            if repetition:
                found.prefill.append(rate)
        if work.num_decode:
            if history:
                rate = await _rate_behind(engine, history, work.num_decode)
            else:
                # The one token of the prompt is a step like every other.
                request = Request((ids[0],), max_tokens=work.num_decode)
                rate = await _rate(engine, request, work.num_decode, "-n")
            if repetition:
                found.decode.append(rate)


async def _rate(engine: Engine, request: Request, num_tokens: int, flag: str) -> float:
    """Tokens a second, from submitting a request to its end; a cached token was not computed.

    Raises `JitllmError` for a run that the clock cannot see.
    """
    started = time.perf_counter()
    num_cached = 0
    async with answered(engine, request) as deltas:
        async for delta in deltas:
            if delta.usage is not None:
                num_cached = delta.usage.cached_tokens
    elapsed_s = time.perf_counter() - started
    return samples.rate(
        num_tokens - num_cached, elapsed_s, counted(num_tokens, "token"), f"raise {flag}"
    )


async def _rate_behind(engine: Engine, history: tuple[int, ...], num_tokens: int) -> float:
    """Tokens a second of `num_tokens` decoded behind a history, from the token that ends it on.

    Raises `JitllmError` for a run that the clock cannot see.
    """
    started = None
    async with answered(engine, Request(history, max_tokens=num_tokens + 1)) as deltas:
        async for delta in deltas:
            if started is None and delta.tokens:
                started = time.perf_counter()
    elapsed_s = time.perf_counter() - (started or 0)
    return samples.rate(num_tokens, elapsed_s, counted(num_tokens, "token"), "raise -n")


def _result(bytes_per_token: int, found: Samples) -> dict[str, Any]:
    """Medians, spreads, and every sample behind them; null for what was not measured."""
    gb_s = [rate * bytes_per_token / 1e9 for rate in found.decode]
    return {
        "prefill_tok_s": samples.middle(found.prefill),
        "decode_tok_s": samples.middle(found.decode),
        "bytes_per_token": bytes_per_token,
        **samples.against_the_wall(gb_s, found.read_gb_s),
        "spread": {
            "prefill_tok_s": samples.spread(found.prefill),
            "decode_tok_s": samples.spread(found.decode),
            "read_gb_s": samples.spread(found.read_gb_s),
        },
        "samples": {
            "prefill_tok_s": found.prefill,
            "decode_tok_s": found.decode,
            "gb_s": gb_s,
            "read_gb_s": found.read_gb_s,
        },
    }


def _lines(result: dict[str, Any], work: Work) -> str:
    taken = result["samples"]
    behind = f" @ d{work.depth}" if work.depth else ""
    phases = (
        (f"pp{work.num_prompt}", "prompt", "prefill_tok_s"),
        (f"tg{work.num_decode}{behind}", "decode", "decode_tok_s"),
    )
    measured, medians = [], []
    for short, name, key in phases:
        if rates := taken[key]:
            measured.append(f"{short} {' / '.join(f'{rate:.1f}' for rate in rates)} tok/s")
            medians.append(samples.with_spread(f"{name} {result[key]:.1f} tok/s", rates))
    if result["gb_s"] is not None:
        medians.append(samples.weights_line(result["bytes_per_token"], "token", result))
    if not measured:
        return ""
    return f"{'   '.join(measured)}\nmedian {'   '.join(medians)}\n"


command = verb(speed, EXAMPLES)
