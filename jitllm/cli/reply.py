"""A reply while it comes: tokens to text, text to the screen, and what it cost.

Knows the Engine port, the stream decoder and stop strings.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jitllm.engine import Delta, Engine, Finish, Request, Usage
from jitllm.text.stop import StopStrings

if TYPE_CHECKING:
    from jitllm.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens and seconds of the two parts of a reply. The first token comes with the prompt.

    prompt_tokens: those that were computed. cached_tokens: those that the engine held already.
    """

    prompt_tokens: int
    prefill_s: float
    decode_tokens: int
    decode_s: float
    ttft_s: float
    cached_tokens: int = 0

    @property
    def prefill_tok_s(self) -> float:
        """Tokens a second, 0 if there were none."""
        return self.prompt_tokens / self.prefill_s if self.prefill_s > 0 else 0.0

    @property
    def decode_tok_s(self) -> float:
        """Tokens a second, 0 if there were none."""
        return self.decode_tokens / self.decode_s if self.decode_s > 0 else 0.0


class Reply:
    """Collects a reply and hands its text to `say` as it becomes certain."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Iterable[str],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.ids: list[int] = []
        self.finish: Finish | None = None
        self.usage: Usage | None = None
        self._text: list[str] = []
        self._decoder = tokenizer.stream()
        self._stops = StopStrings(stops)
        self._say = say
        self._clock = clock
        self._num_prompt = 0
        self._is_whole = False  # whether the engine ended it
        self._started = self._first_at = self._last_at = 0.0

    @property
    def text(self) -> str:
        """All that was shown."""
        return "".join(self._text)

    async def run(self, engine: Engine, request: Request) -> None:
        """Follow the reply to its end, or to a stop string; cancel it and it says what it has.

        Raises what the engine failed with, after showing what came before.
        """
        self._num_prompt = len(request.prompt)
        self._started = self._first_at = self._last_at = self._clock()
        stream = engine.generate(request)
        try:
            async for delta in stream:
                if self._take(delta):
                    self.finish = Finish.STOP
                    break
        except BaseException:
            self.finish = self.finish or Finish.CANCELLED
            raise
        finally:
            await close_stream(stream)
            self._end()

    def rates(self) -> Rates:
        """What the engine measured, and of a reply that was cut the rest as it was seen here."""
        usage = self.usage
        num_steps = max(len(self.ids) - 1, 0)
        decode_s = self._last_at - self._first_at
        if usage is None:
            prefill_s = self._first_at - self._started
            return Rates(self._num_prompt, prefill_s, num_steps, decode_s, prefill_s)
        if self._is_whole:
            decode_s = usage.decode_s
            if self.finish is Finish.STOP and self.ids:
                num_steps += 1  # the step that drew the stop id
        return Rates(
            prompt_tokens=self._num_prompt - usage.cached_tokens,
            prefill_s=usage.prefill_s,
            decode_tokens=num_steps,
            decode_s=decode_s,
            ttft_s=usage.ttft_s,
            cached_tokens=usage.cached_tokens,
        )

    def _take(self, delta: Delta) -> bool:
        """Show what `delta` adds; True once a stop string is complete."""
        self._last_at = self._clock()
        if not self.ids:
            self._first_at = self._last_at
        self.ids += delta.tokens
        self.finish, self.usage = delta.finish or self.finish, delta.usage or self.usage
        self._is_whole = delta.finish is not None
        self._show(self._stops.feed(self._decoder.feed(delta.tokens)))
        if delta.error is not None:
            raise delta.error
        return self._stops.matched is not None

    def _end(self) -> None:
        self._show(self._stops.feed(self._decoder.flush()) + self._stops.flush())

    def _show(self, text: str) -> None:
        if text:
            self._text.append(text)
            self._say(text)


@asynccontextmanager
async def answered(engine: Engine, request: Request) -> AsyncIterator[AsyncIterator[Delta]]:
    """The deltas of a request, which ends with the block; what it failed with is raised there."""
    stream = engine.generate(request)
    try:
        yield _checked(stream)
    finally:
        await close_stream(stream)


async def _checked(stream: AsyncIterator[Delta]) -> AsyncIterator[Delta]:
    async for delta in stream:
        if delta.error is not None:
            raise delta.error
        yield delta


async def close_stream(stream: AsyncIterator[Any]) -> None:
    """Close a reply's stream, which cancels a reply that still runs."""
    if close := getattr(stream, "aclose", None):
        await close()
