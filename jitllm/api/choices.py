"""The sequences of a request at work: tokens become text, until a stop string or the end.

Knows the Engine port, the stream decoder and stop strings. Knows no HTTP and no field of a reply.
What comes out does not depend on how the engine cut it into deltas, so a streamed reply and a
whole one say the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jitllm.api.sessions import Progress, Session
from jitllm.engine import Delta, Finish, Request, TopLogprobs, Usage
from jitllm.errors import QueueFull
from jitllm.text.stop import StopStrings

if TYPE_CHECKING:
    from jitllm.api.models import Served
    from jitllm.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Token:
    """What is told about a token. logprob: None for the first of a prompt, which follows nothing.
    start: characters of the choice's text before it."""

    id: int
    logprob: float | None
    top: TopLogprobs
    start: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that is certain now, and the tokens that begin in it, if anybody wants them told.

    ids: those generated since the last piece, whether their text is certain or not.
    """

    text: str = ""
    tokens: tuple[Token, ...] = ()
    ids: tuple[int, ...] = ()
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that stands before its continuation."""

    text: str
    wants_logprobs: bool


Emit = Callable[["Choice", Piece], Awaitable[None]]


class Choice:
    """One sequence: `run` it once, then read how it ended."""

    def __init__(
        self,
        served: Served,
        request: Request,
        *,
        index: int = 0,
        prompt_index: int = 0,
        stops: Iterable[str] = (),
        echo: Echo | None = None,
    ) -> None:
        self.index = index
        self.prompt_index = prompt_index
        self.request = request
        self.finish = Finish.LENGTH
        self.usage: Usage | None = None
        self.num_tokens = 0
        """Generated tokens, with those that a stop string was cut out of."""
        self.is_cancelled = False
        self._is_whole = False  # whether it ended by itself
        self._served = served
        self._decoder = served.tokenizer.stream()
        self._stops = StopStrings(stops)
        self._echo = echo
        self._prompt_logprobs: list[float] = []
        self._prompt_top: list[TopLogprobs] = []
        self._pending: deque[Token] = deque()
        self._ids: list[int] = []
        self._raw = self._shown = 0  # characters: decoded, handed out
        self._task: asyncio.Task[None] | None = None
        self._is_waiting = False  # for the engine, and for nothing else
        self._began_s = self._first_s = self._last_s = 0.0
        self.progress = Progress(len(request.prompt), self.cancel)

    def cancel(self) -> None:
        """End with what there is; nothing happens to a choice that has ended. A piece that is on
        its way to a slow reader gets there."""
        self.is_cancelled = True
        if self._is_waiting and self._task is not None:
            self._is_waiting = False
            self._task.cancel()

    async def run(self, emit: Emit) -> None:
        """Follow the reply to its end. Raises what the engine raises; closing frees its pages."""
        self._task, self.progress.is_done = asyncio.current_task(), False
        self._began_s = self._first_s = self._last_s = time.perf_counter()
        try:
            if not self.is_cancelled:
                await self._follow(emit)
        finally:
            self.progress.is_done = True
        if self.is_cancelled:
            self.finish = Finish.CANCELLED
        await emit(self, self._rest())

    async def _follow(self, emit: Emit) -> None:
        stream = self._served.engine.generate(self.request)
        try:
            while (delta := await self._next(stream)) is not None:
                for piece in self._take(delta):
                    await emit(self, piece)
                if self._stops.matched is not None or delta.finish is not None:
                    break
        finally:
            if close := getattr(stream, "aclose", None):
                await close()

    async def _next(self, stream: AsyncIterator[Delta]) -> Delta | None:
        """What the engine says next; None after its end, and once this is cancelled."""
        if self.is_cancelled:
            return None
        self._is_waiting = True
        try:
            return await anext(stream)
        except StopAsyncIteration:
            return None
        except asyncio.CancelledError:
            if not self.is_cancelled or self._task is None or self._task.uncancel() > 0:
                raise
            return None
        finally:
            self._is_waiting = False

    def costs(self) -> Usage:
        """What the engine measured, and of a reply that was cut the rest as it was seen here."""
        if self._is_whole and self.usage is not None:
            return self.usage
        first_s = self._first_s - self._began_s
        begun = self.usage or Usage(len(self.request.prompt), prefill_s=first_s, ttft_s=first_s)
        decode_s = self._last_s - self._first_s
        return replace(begun, generated_tokens=self.num_tokens, decode_s=decode_s)

    def _take(self, delta: Delta) -> Iterable[Piece]:
        """What `delta` adds."""
        self._last_s = time.perf_counter()
        if not self.progress.is_started:
            self.progress.is_started = True
            self._first_s = self._last_s
        self.usage, self._is_whole = delta.usage or self.usage, delta.finish is not None
        if delta.error is not None:
            raise delta.error
        if self._echo is not None and (piece := self._take_prompt(delta)):
            yield piece
        if delta.tokens and (piece := self._take_tokens(delta)):
            yield piece
        if self._stops.matched is not None:
            self.finish = Finish.STOP
        elif delta.finish is not None:
            self.finish = delta.finish
            if delta.finish is Finish.CANCELLED:
                self.is_cancelled = True

    def _take_prompt(self, delta: Delta) -> Piece | None:
        """The prompt, once everything about it is known."""
        echo, prompt = self._echo, self.request.prompt
        assert echo is not None
        tokens: tuple[Token, ...] = ()
        if echo.wants_logprobs:
            self._prompt_logprobs += delta.prompt_logprobs
            self._prompt_top += delta.prompt_top_logprobs
            if len(self._prompt_logprobs) < len(prompt) - 1:
                return None
            starts = starts_of(self._served.tokenizer, prompt, echo.text)
            tops = [(), *self._prompt_top] if self._prompt_top else [()] * len(prompt)
            tokens = tuple(map(Token, prompt, (None, *self._prompt_logprobs), tops, starts))
        self._echo = None
        self._raw = self._shown = len(echo.text)
        return Piece(echo.text, tokens)

    def _take_tokens(self, delta: Delta) -> Piece | None:
        text = ""
        tops = delta.top_logprobs or ((),) * len(delta.tokens)
        for at, token_id in enumerate(delta.tokens):
            if self.request.logprobs:
                token = Token(token_id, delta.logprobs[at], tops[at], self._raw)
                self._pending.append(token)
            self.num_tokens += 1
            self._ids.append(token_id)
            text += self._decoded(self._decoder.feed((token_id,)))
            if self._stops.matched is not None:
                break
        self.progress.generated_tokens = self.num_tokens
        return self._piece(text)

    def _decoded(self, text: str) -> str:
        self._raw += len(text)
        return self._stops.feed(text)

    def _piece(self, text: str) -> Piece | None:
        self._shown += len(text)
        tokens = []
        while self._pending and self._pending[0].start < self._shown:
            tokens.append(self._pending.popleft())
        return Piece(text, tuple(tokens), self._take_ids()) if text or tokens else None

    def _take_ids(self) -> tuple[int, ...]:
        ids, self._ids = tuple(self._ids), []
        return ids

    def _rest(self) -> Piece:
        """What was held back, and the tokens that nothing came of."""
        if self._echo is not None:
            return Piece(ids=self._take_ids(), is_last=True)
        text = self._decoded(self._decoder.flush()) + self._stops.flush()
        if self._stops.matched is not None and not self.is_cancelled:
            self.finish = Finish.STOP
        piece = self._piece(text) or Piece(ids=self._take_ids())
        left = () if self._stops.matched is not None else tuple(self._pending)
        self._pending.clear()
        return Piece(piece.text, piece.tokens + left, piece.ids, is_last=True)


async def run_all(choices: Sequence[Choice], session: Session, emit: Emit, together: int) -> None:
    """Run every choice, at most `together` of them at a time. The first failure ends all.

    A full queue refuses the request if none of its choices got in; otherwise those that did not
    try again.
    """
    session.sequences += [choice.progress for choice in choices]
    places = asyncio.Semaphore(together)
    num_in_flight, ended = 0, asyncio.Event()

    async def run(choice: Choice) -> None:
        nonlocal num_in_flight, ended
        async with places:
            while True:
                num_in_flight += 1
                try:
                    await choice.run(emit)
                    break
                except QueueFull as full:
                    if num_in_flight == 1 and not any(c.progress.is_started for c in choices):
                        raise
                    retry_s = full.retry_after_s
                finally:
                    num_in_flight -= 1
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(retry_s):
                        await ended.wait()
        ended.set()
        ended = asyncio.Event()

    try:
        async with asyncio.TaskGroup() as group:
            for choice in choices:
                group.create_task(run(choice))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


def starts_of(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> list[int]:
    """Where in `text` each of its tokens begins. A space that the vocabulary put before the text
    is not in it."""
    decoder, starts, end = tokenizer.stream(), [], 0
    for token_id in ids:
        starts.append(end)
        end += len(decoder.feed((token_id,)))
    end += len(decoder.flush())
    added = max(end - len(text), 0)
    return [min(max(start - added, 0), len(text)) for start in starts]
