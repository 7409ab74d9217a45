"""`jitllm score`: how likely a model finds a text, token by token."""

from __future__ import annotations

import asyncio
import json as jsonlib
import math
import re
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jitllm.cli import report
from jitllm.cli.asking import text_ids
from jitllm.cli.command import INTERRUPTED, AsJson, verb
from jitllm.cli.interrupts import finished
from jitllm.cli.loading import opened
from jitllm.cli.options import Model, TextFile, Words, engine_flags, given_text
from jitllm.cli.reply import answered
from jitllm.cli.screen import note, print_json, say
from jitllm.config import EngineConfig
from jitllm.engine import Engine, Outputs, Request
from jitllm.errors import UsageError
from jitllm.units import counted, format_duration, format_rate

if TYPE_CHECKING:
    from jitllm.cli.npz import LogitsFile
    from jitllm.compose import Loaded

EXAMPLES = """
    jitllm score model.jlm "The capital of France is Paris."
    jitllm score model.jlm -f book.txt -ctx 4096
    jitllm score model.jlm -ids ids.txt -step 1        (token by token)
    jitllm score model.jlm -ids ids.json -out logits.npz
"""

_INT = re.compile(r"-?[0-9]{1,18}", re.ASCII)


@engine_flags
def score(
    model: Model,
    text: Words = None,
    *,
    file: TextFile = None,
    ids: Annotated[
        Path | None,
        typer.Option(
            "-ids",
            metavar="FILE",
            help="Token ids instead of a text: a JSON list, or numbers between spaces or commas.",
            show_default=False,
        ),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option("-step", metavar="N", help="Compute N tokens at a time; default: many."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "-out",
            metavar="FILE.npz",
            help="Write `tokens` [n] and `logits` [n, vocabulary], f32: 4 bytes for each word "
            "of the vocabulary and each token.",
            show_default=False,
        ),
    ] = None,
    json: AsJson = False,
    config: EngineConfig,
) -> int:
    """Say how likely a text is, token by token.

    That is the negative log-likelihood of every token after the first, and perplexity.
    The text is the words after the model, or -f FILE, or what is piped in, byte for byte; with
    -ids it is token ids, and nothing is added to them. The logits of a position are about the
    token after it.
    """
    if step is not None and step < 1:
        raise UsageError(f"-step {step} is too small", "the least is 1")
    if ids is not None:
        if text or file:
            raise UsageError("-ids takes the place of a text", "leave one of them out")
        given: list[int] | str | None = parse_ids(ids.read_text(errors="replace"), str(ids))
    else:
        given = given_text(text, file, keep_newline=True)
    if given is None:
        raise UsageError("there is no text to score", "write it after the model, or use -f or -ids")
    return asyncio.run(_score(model, config, given, step, out, json))


def parse_ids(text: str, name: str) -> list[int]:
    """The token ids in `text`. Raises UsageError for anything else."""
    words = text.split() if "," not in text else text.replace(",", " ").split()
    if text.lstrip().startswith("["):
        try:
            values = jsonlib.loads(text)
        except (ValueError, RecursionError):
            values = [None]
        if not all(type(value) is int for value in values):
            raise UsageError(f"{name} is not a JSON list of token ids", "write it like [1, 2, 3]")
        words = [str(value) for value in values]
    wrong = next((word for word in words if not _INT.fullmatch(word)), None)
    if wrong is not None or not words:
        problem = f"{wrong!r} is no token id" if wrong else "it is empty"
        raise UsageError(f"{name}: {problem}", "write numbers between spaces or commas")
    return [int(word) for word in words]


async def _score(
    path: Path,
    config: EngineConfig,
    given: list[int] | str,
    step: int | None,
    out: Path | None,
    json: bool,
) -> int:
    async with opened(path, config) as loaded:
        ids = text_ids(loaded, given) if isinstance(given, str) else given
        _check_ids(ids, loaded.graph.vocab)
        for line in report.before(loaded, await loaded.engine.stats()):
            note(line)
        request = Request(
            tuple(ids),
            max_tokens=0,
            outputs=Outputs.ALL,
            logits=out is not None,
            chunk_tokens=step,
        )
        scored = Scored()
        with _logits_file(out, ids, loaded.graph.vocab) as file:
            is_finished = await finished(scored.run(loaded.engine, request, file))
            if file is not None and is_finished:
                file.finish()
        if json:
            print_json(_json(ids, scored))
        else:
            say(_table(loaded, ids, scored))
        note(_summary(len(ids), scored))
        return 0 if is_finished else INTERRUPTED


class Scored:
    """Log-probabilities of tokens 1, 2, ... of a text, and the seconds they took."""

    def __init__(self) -> None:
        self.logprobs: list[float] = []
        self.prefill_s = 0.0

    @property
    def mean_nll(self) -> float:
        """Mean negative log-likelihood in nats; NaN without a token."""
        return -math.fsum(self.logprobs) / len(self.logprobs) if self.logprobs else math.nan

    @property
    def perplexity(self) -> float:
        """exp of `mean_nll`."""
        return math.exp(min(self.mean_nll, 700.0)) if self.logprobs else math.nan

    async def run(self, engine: Engine, request: Request, file: LogitsFile | None) -> None:
        """Follow the scoring to its end, logits into `file`."""
        async with answered(engine, request) as deltas:
            async for delta in deltas:
                self.logprobs += delta.prompt_logprobs
                if delta.usage is not None:
                    self.prefill_s = delta.usage.prefill_s
                if file is not None and delta.logits is not None:
                    file.append(delta.logits.view())


def _check_ids(ids: list[int], vocab: int) -> None:
    for index, token_id in enumerate(ids):
        if not 0 <= token_id < vocab:
            raise UsageError(
                f"token {index} is {token_id}", f"this model's ids run from 0 to {vocab - 1}"
            )


def _logits_file(out: Path | None, ids: list[int], vocab: int) -> Any:
    if out is None:
        return nullcontext()
    from jitllm.cli.npz import LogitsFile

    return LogitsFile(out, ids, vocab)


def _json(ids: list[int], scored: Scored) -> dict[str, Any]:
    return {
        "ids": ids,
        "nll": [-logprob for logprob in scored.logprobs],
        "mean_nll": scored.mean_nll,
        "perplexity": scored.perplexity,
        "prefill_s": scored.prefill_s,
    }


def _table(loaded: Loaded, ids: list[int], scored: Scored) -> str:
    """A line for each token: place, id, piece, negative log-likelihood."""
    lines = []
    for index, token_id in enumerate(ids[: len(scored.logprobs) + 1]):
        text = loaded.tokenizer.decode([token_id], special=True).decode(errors="replace")
        piece = jsonlib.dumps(text, ensure_ascii=False)
        nll = f"{-scored.logprobs[index - 1]:.4f}" if index else "-"
        lines.append(f"{index:6} {token_id:8} {nll:>9}  {piece}\n")
    return "".join(lines)


def _summary(num_tokens: int, scored: Scored) -> str:
    rate = num_tokens / scored.prefill_s if scored.prefill_s > 0 else 0.0
    if not scored.logprobs:
        return f"no perplexity: nothing stands before any of {counted(num_tokens, 'token')}"
    return (
        f"perplexity {scored.perplexity:.4f}   mean nll {scored.mean_nll:.5f} over "
        f"{len(scored.logprobs)} of {counted(num_tokens, 'token')}   "
        f"{format_duration(scored.prefill_s)} ({format_rate(rate, 'tok')})"
    )


command = verb(score, EXAMPLES)
