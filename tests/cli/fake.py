"""A model that costs nothing: it says its letters, and can be told to fail, wait or page.

A program of its own too: `python fake.py ARGS` is `jitllm ARGS` with this engine, for tests that
need a process.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
from array import array
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jitllm.config import EngineConfig, Probe, ResolvedConfig, resolve
from jitllm.engine import (
    Delta,
    EngineStats,
    Finish,
    Logits,
    Outputs,
    Pages,
    Request,
    Usage,
)
from jitllm.errors import ContextOverflow
from jitllm.schedule.placement import Placement
from jitllm.text.chat import ChatTemplate
from jitllm.text.tokenizer import StreamDecoder

Jitllm = Callable[..., Any]
"""The fixture `jitllm`: arguments to what they led to."""
Stdin = Callable[..., None]
"""The fixture `stdin`: (bytes, whether from a terminal)."""

VOCAB = 258
BOS, EOS = 256, 257
NUM_BLOCKS = 4
BLOCK_BYTES = 1 << 20
DENSE_BYTES = 3 << 20


class ByteTokenizer:
    """A token is a byte; two more are special."""

    bos_id, eos_id, num_tokens = BOS, EOS, VOCAB

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        return [BOS] * add_special + list(text.encode())

    def encode_rendered(self, text: str) -> list[int]:
        return self.encode(text)

    def piece(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else {BOS: b"<bos>", EOS: b"<eos>"}[token_id]

    def decode(self, ids: Iterable[int], *, special: bool = False) -> bytes:
        return b"".join(self.piece(i) for i in ids if i < (self.num_tokens if special else 256))

    def stream(self, *, special: bool = False) -> StreamDecoder:
        return StreamDecoder(self, special=special)  # type: ignore[arg-type]


TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}|{% endfor %}assistant: "


def fake_stats(pages: Pages, steps: int, context_tokens: int, **more: Any) -> EngineStats:
    """Statistics of two threads that hold a MiB of keys and values. more: other fields, or others
    than these."""
    about = {
        "running": 0,
        "waiting": 0,
        "kv_bytes": 1 << 20,
        "scratch_bytes": 0,
        "threads": 2,
        "tier": "plain",
    }
    return EngineStats(pages=pages, steps=steps, context_tokens=context_tokens, **about | more)


@dataclass
class FakeEngine:
    """Answers every request with `says` and EOS, over and over if EOS does not stop it.

    delay_s: between two tokens. fails_at: the error comes instead of that token. frames: a budget
    that holds so many blocks pages the others in every step. more: other fields of its `stats`.
    """

    says: bytes = b"Hello, world"
    delay_s: float = 0.0
    fails_at: int | None = None
    error: Exception | None = None
    frames: int = NUM_BLOCKS
    over_budget_bytes: int = 0
    context_tokens: int = 4096
    cached_tokens: int = 0
    requests: list[Request] = field(default_factory=list)
    num_cancelled: int = 0
    steps: int = 0
    more: dict[str, Any] = field(default_factory=dict)
    page_ins: int = 0
    is_closed: bool = False

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        self.requests.append(request)
        if len(request.prompt) >= self.context_tokens:
            raise ContextOverflow(len(request.prompt), self.context_tokens)
        try:
            for delta in self._prompt(request):
                self._step()
                yield delta
            async for delta in self._reply(request):
                yield delta
        except (asyncio.CancelledError, GeneratorExit):
            self.num_cancelled += 1
            if marker := os.environ.get("FAKE_CANCELLED"):
                _write(marker, str(self.steps))
            raise

    def _step(self) -> None:
        self.steps += 1
        self.page_ins += NUM_BLOCKS - self.frames

    def _prompt(self, request: Request) -> Iterable[Delta]:
        if request.outputs is not Outputs.ALL:
            return
        chunk = request.chunk_tokens or 512
        for start in range(0, len(request.prompt), chunk):
            stop = min(start + chunk, len(request.prompt))
            rows = [logit for p in range(start, stop) for logit in logits_of(request.prompt[p])]
            yield Delta(
                prompt_logprobs=tuple(-float(p) / 100 for p in range(max(start, 1), stop)),
                logits=Logits(array("f", rows).tobytes(), stop - start, VOCAB)
                if request.logits
                else None,
            )

    async def _reply(self, request: Request) -> AsyncIterator[Delta]:
        most = 10**9 if request.max_tokens is None else request.max_tokens
        finish, num = Finish.LENGTH, 0
        while num < most:
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            self._step()
            if num == self.fails_at:
                yield Delta(finish=Finish.ERROR, error=self.error)
                return
            index = num % (len(self.says) + 1)
            token_id = self.says[index] if index < len(self.says) else EOS
            if token_id in request.stop_ids:
                finish = Finish.STOP
                break
            num += 1
            usage = self._usage(request, 1, 0.0) if num == 1 else None
            yield Delta(tokens=(token_id,), logprobs=(math.log(0.5),), usage=usage)
        yield Delta(finish=finish, usage=self._usage(request, num, 0.5))

    def _usage(self, request: Request, num_tokens: int, decode_s: float) -> Usage:
        return Usage(
            prompt_tokens=len(request.prompt),
            generated_tokens=num_tokens,
            cached_tokens=self.cached_tokens,
            prefill_s=0.25,
            decode_s=decode_s,
            ttft_s=0.125,
        )

    async def stats(self) -> EngineStats:
        pages = Pages(
            blocks=NUM_BLOCKS,
            resident=self.frames,
            frames=self.frames,
            page_ins=self.page_ins,
            evictions=self.page_ins,
            bytes_read=self.page_ins * BLOCK_BYTES,
            budget_bytes=64 << 20,
            fixed_bytes=DENSE_BYTES,
            over_budget_bytes=self.over_budget_bytes,
        )
        placed = {"placement": Placement.all_on("cpu:0", NUM_BLOCKS)}
        return fake_stats(pages, self.steps, self.context_tokens, **placed | self.more)

    async def set_budget(self, budget_bytes: int) -> Pages:
        return (await self.stats()).pages

    async def close(self) -> None:
        self.is_closed = True


def _write(path: str, text: str) -> None:
    Path(path).write_text(text)


def logits_of(token_id: int) -> list[float]:
    """What the fake model thinks after a token."""
    return [float(token_id)] * VOCAB


def header(template: str = "") -> Any:
    """As much of a container's header as reports look at."""
    extent = SimpleNamespace(offset=4096, length=BLOCK_BYTES, xxh3=0)
    return SimpleNamespace(
        arch="fake",
        config={"attention.head_count": 4, "feed_forward_length": 64},
        tensors=(),
        stop_ids=(EOS,),
        dense=SimpleNamespace(offset=4096, length=DENSE_BYTES, xxh3=0),
        blocks=(extent,) * NUM_BLOCKS,
        frame_bytes=(BLOCK_BYTES,) * NUM_BLOCKS,
        weight_bytes=DENSE_BYTES + NUM_BLOCKS * BLOCK_BYTES,
        runs=lambda: ((extent,),) * NUM_BLOCKS,
        chat_templates={"default": template} if template else {},
    )


@dataclass
class Opener:
    """Takes the place of `compose.open_engine`."""

    engine: FakeEngine
    template: str = ""
    compiled_kernels: int = 0
    error: Exception | None = None
    config: ResolvedConfig | None = None

    async def __call__(
        self,
        path: Path,
        config: EngineConfig,
        *,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> Any:
        if self.error:
            raise self.error
        if progress:
            progress("compiling kernels", 0, 2)
            progress("compiling kernels", 2, 2)
            progress("reading weights", DENSE_BYTES, DENSE_BYTES)
        self.config = resolve(config, Probe(num_cores=2, memory_bytes=1 << 30, tiers=("plain",)))
        return SimpleNamespace(
            engine=self.engine,
            tokenizer=ByteTokenizer(),
            header=header(self.template),
            chat=ChatTemplate(self.template) if self.template else None,
            config=self.config,
            graph=SimpleNamespace(width=8, vocab=VOCAB, num_blocks=NUM_BLOCKS, context_length=4096),
            compiled_kernels=self.compiled_kernels,
            compile_s=1.5 if self.compiled_kernels else 0.0,
            open_s=0.25,
            close=self.engine.close,
        )


def main() -> int:
    """`jitllm` with a slow fake engine; `FAKE_SAYS` and `FAKE_DELAY` set it."""
    from jitllm.cli.main import main as jitllm

    says = os.environ.get("FAKE_SAYS", "tick ").encode()
    engine = FakeEngine(says=says, delay_s=float(os.environ.get("FAKE_DELAY", "0.01")))
    compose: Any = stand_in(Opener(engine, TEMPLATE))
    sys.modules["jitllm.compose"] = compose
    return jitllm()


def stand_in(opener: Opener) -> Any:
    """What takes the place of the module `jitllm.compose`."""
    return SimpleNamespace(open_engine=opener)


if __name__ == "__main__":
    sys.exit(main())
