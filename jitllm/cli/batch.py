"""`jitllm batch`: several prompts at once, and how many tokens a second that gives."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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

if TYPE_CHECKING:
    from jitllm.compose import Loaded

EXAMPLES = """
    jitllm batch model.jlm "The capital of France is" "Once upon a time"
    jitllm batch model.jlm -batch 16 -n 128 "Once upon a time"
    jitllm batch model.jlm -batch 8 -r 5 -threads 2 -json -- "A prompt" "-another-"
"""


@dataclass(slots=True)
class Rounds:
    """What repetitions took, and what the last one said.

    rates: generated tokens a second. steps: of each repetition. elapsed_s: likewise, from the first
    request to the end of the last reply.
    """

    rates: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    elapsed_s: list[float] = field(default_factory=list)
    replies: list[list[int]] = field(default_factory=list)


@engine_flags
def batch(
    model: Model,
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT...", show_default=False)],
    *,
    num_sequences: Annotated[
        int | None,
        typer.Option(
            "-batch",
            metavar="N",
            help="Sequences at once; default: as many as there are prompts. Fewer prompts are "
            "taken again.",
        ),
    ] = None,
    num_decode: Annotated[
        int, typer.Option("-n", metavar="N", help="Tokens that each sequence generates.")
    ] = 128,
    repetitions: Annotated[int, typer.Option("-r", metavar="N", help="Repetitions.")] = 3,
    logits: Annotated[
        bool,
        typer.Option("-logits", help="Hand out the logits of every token.", show_default=False),
    ] = False,
    json: AsJson = False,
    config: EngineConfig,
) -> int:
    """Continue several prompts at once and measure it.

    All sequences begin together and generate -n tokens each, whatever the model says. The rate is
    all generated tokens over all of the time, prompts included. One round warms up and is not
    counted. What the steps read a second is shown beside what a plain loop reads of as much memory
    with as many threads. The machine should have nothing else to do.
    """
    count = len(prompts) if num_sequences is None else num_sequences
    if min(count, num_decode, repetitions) < 1:
        raise UsageError("there is nothing to measure", "choose -batch, -n and -r from 1")
    if count < len(prompts):
        raise UsageError(f"-batch {count} is fewer than {len(prompts)} prompts", "raise -batch")
    texts = list(islice(cycle(prompts), count))
    return asyncio.run(_measure(model, config, texts, num_decode, repetitions, logits, json))


async def _measure(
    path: Path,
    config: EngineConfig,
    texts: list[str],
    num_decode: int,
    repetitions: int,
    logits: bool,
    json: bool,
) -> int:
    # A prompt that is remembered from the last repetition, or a neighbour's, measures nothing.
    config = replace(config, share_prefixes=False, max_batch=len(texts), max_queue=-1)
    async with opened(path, config) as loaded:
        start = await loaded.engine.stats()
        for line in report.before(loaded, start):
            note(line)
        requests = [
            _request(loaded, text, num_decode, logits, start.context_tokens) for text in texts
        ]
        found = Rounds()
        is_finished = await finished(_repeat(loaded.engine, requests, repetitions, found))
        stats = await loaded.engine.stats()
        decoder = loaded.tokenizer
    bytes_per_step = report.weight_bytes_per_token(loaded.header)
    wall = samples.read_wall(bytes_per_step, stats) if found.rates and is_finished else []
    result = _result(len(texts), num_decode, bytes_per_step, found, wall)
    if json:
        said = [decoder.decode(ids).decode(errors="replace") for ids in found.replies]
        pages = report.pages_json(stats.pages, report.page_ins_per_token(start, stats))
        print_json({**result, "texts": said, "pages": pages, **report.engine_json(loaded, stats)})
    elif found.rates:
        say(_lines(result))
    return 0 if is_finished else INTERRUPTED


def _request(
    loaded: Loaded, text: str, num_decode: int, logits: bool, context_tokens: int
) -> Request:
    """A request whose reply the context does not cut short: those tokens would be counted."""
    ids = tuple(text_ids(loaded, text))
    if len(ids) + num_decode > context_tokens:
        raise UsageError(
            f"a prompt of {counted(len(ids), 'token')} and {num_decode} more are too many: the "
            f"context holds {context_tokens}",
            "lower -n or raise -ctx",
        )
    return Request(ids, max_tokens=num_decode, logits=logits)


async def _repeat(engine: Engine, requests: list[Request], repetitions: int, found: Rounds) -> None:
    for repetition in range(repetitions + 1):
        steps = (await engine.stats()).steps
        began_s = time.perf_counter()
        found.replies = await _replies(engine, requests)
        elapsed_s = time.perf_counter() - began_s
        num_tokens = sum(map(len, found.replies))
        rate = samples.rate(num_tokens, elapsed_s, counted(num_tokens, "token"), "raise -n")
        if repetition:
            found.rates.append(rate)
            found.elapsed_s.append(elapsed_s)
            found.steps.append((await engine.stats()).steps - steps)


async def _replies(engine: Engine, requests: list[Request]) -> list[list[int]]:
    """The tokens of all replies, computed together. Raises the first error of any."""
    try:
        async with asyncio.TaskGroup() as group:
            replies = [group.create_task(_reply(engine, request)) for request in requests]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [reply.result() for reply in replies]


async def _reply(engine: Engine, request: Request) -> list[int]:
    """The tokens of a reply."""
    async with answered(engine, request) as deltas:
        return [token async for delta in deltas for token in delta.tokens]


def _result(
    num_sequences: int, num_decode: int, bytes_per_step: int, found: Rounds, wall: list[float]
) -> dict[str, Any]:
    """Medians, spreads, and every sample behind them; null for what was not measured."""
    tok_s = samples.middle(found.rates)
    step_ms = [1e3 * s / n for s, n in zip(found.elapsed_s, found.steps, strict=True)]
    gb_s = [bytes_per_step / ms / 1e6 for ms in step_ms]
    return {
        "sequences": num_sequences,
        "tokens_per_sequence": num_decode,
        "steps": samples.middle([float(n) for n in found.steps]),
        "tok_s": tok_s,
        "tok_s_per_sequence": None if tok_s is None else tok_s / num_sequences,
        "step_ms": samples.middle(step_ms),
        "bytes_per_token": bytes_per_step / num_sequences,
        "bytes_per_step": bytes_per_step,
        **samples.against_the_wall(gb_s, wall),
        "spread": {"tok_s": samples.spread(found.rates), "read_gb_s": samples.spread(wall)},
        "samples": {"tok_s": found.rates, "step_ms": step_ms, "gb_s": gb_s, "read_gb_s": wall},
    }


def _lines(result: dict[str, Any]) -> str:
    rates = result["samples"]["tok_s"]
    measured = [
        f"batch {result['sequences']} x {result['tokens_per_sequence']} tok",
        f"{result['steps']:.0f} steps",
        f"{' / '.join(f'{rate:.1f}' for rate in rates)} tok/s",
    ]
    medians = [
        samples.with_spread(f"{result['tok_s']:.1f} tok/s", rates),
        f"{result['tok_s_per_sequence']:.1f} tok/s a sequence",
        f"{result['step_ms']:.2f} ms a step",
        samples.weights_line(result["bytes_per_step"], "step", result),
    ]
    return f"{'   '.join(measured)}\nmedian {'   '.join(medians)}\n"


command = verb(batch, EXAMPLES)
