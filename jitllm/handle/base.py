"""What a program holds of a model, wherever that is: prompts and settings in, text out.

Knows the values of the Engine port. Knows neither engines nor servers.
"""

from __future__ import annotations

import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack, overload

from jitllm.engine import EngineStats, Finish, Moved, Pages, ParkedIn, Priority, Sampling, Usage
from jitllm.errors import UsageError, shown
from jitllm.schedule.placement_map import Selection, parse_blocks, parse_map
from jitllm.units import parse_size

Blocks = str | Iterable[int]
"""Blocks that are named one by one, or in a text like "0:9" or "3,5-7,head"."""

Conversation = Sequence[Mapping[str, Any]]
"""Turns with a `role` and a `content`."""

Prompt = str | Sequence[int] | Conversation
"""A text or token ids that the model continues, or a conversation in which it speaks next."""

_ID = re.compile(r"[A-Za-z0-9._:+=-]{1,128}")


class Settings(TypedDict, total=False):
    """How a reply is made. Without any it is greedy, and goes on until the model ends it.

    The meaning is that of `jitllm.engine.Sampling` and `Request`. stop: texts that end the reply
    and are not part of it. ignore_eos: go on after the model has ended it. id: a name for the
    reply that `cancel` will know, of letters, digits and `._:+=-`. cache_salt: share what prompts
    begin with only with replies of the same one.
    """

    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    repeat_last_n: int
    frequency_penalty: float
    presence_penalty: float
    seed: int
    logit_bias: Mapping[int, float]
    stop: str | Sequence[str]
    ignore_eos: bool
    priority: str
    id: str
    cache_salt: str


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What became known of a reply since the last delta.

    id: of the reply. text: what is certain now, never a part of a character. tokens: ids that were
    generated, with those that a stop string was cut out of. finish and usage come with the last.
    """

    id: str
    text: str = ""
    tokens: tuple[int, ...] = ()
    finish: Finish | None = None
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole reply; see `TextDelta`."""

    id: str
    text: str
    tokens: tuple[int, ...]
    finish: Finish
    usage: Usage


@dataclass(frozen=True, slots=True)
class Asked:
    """Settings that were looked at."""

    id: str
    max_tokens: int | None
    sampling: Sampling
    stops: tuple[str, ...]
    ignore_eos: bool
    priority: Priority
    cache_salt: str

    @classmethod
    def of(cls, settings: Settings) -> Asked:
        """Raises UsageError for what no setting is called, and for what none can be."""
        given: dict[str, Any] = dict(settings)
        if unknown := given.keys() - Settings.__annotations__.keys():
            known = ", ".join(Settings.__annotations__)
            raise UsageError(f"there is no setting {min(unknown)!r}", f"there are {known}")
        biases: Mapping[int, float] = given.pop("logit_bias", {})
        given["logit_bias"] = tuple(biases.items())
        sampled = {field.name for field in fields(Sampling)} & given.keys()
        return cls(
            id=_id(given.get("id")),
            max_tokens=given.get("max_tokens"),
            sampling=Sampling(**{name: given[name] for name in sampled}),
            stops=_stops(given.get("stop", ())),
            ignore_eos=given.get("ignore_eos", False),
            priority=_priority(given.get("priority", Priority.NORMAL)),
            cache_salt=given.get("cache_salt", ""),
        )


class Handle(ABC):
    """A model at work; `close` it, or use it in an `async with`.

    One handle serves any number of replies at a time.
    """

    name: str
    """What the model is called."""

    @abstractmethod
    def generate(
        self, prompt: Prompt, **settings: Unpack[Settings]
    ) -> AsyncGenerator[TextDelta, None]:
        """Stream the reply to `prompt`. Closing the iterator cancels the reply.

        Raises UsageError for settings that mean nothing, JitllmError for a prompt that the model
        cannot take and for what goes wrong on the way.
        """

    async def complete(self, prompt: Prompt, **settings: Unpack[Settings]) -> Completion:
        """The whole reply to `prompt`; see `generate`."""
        text, tokens = "", list[int]()
        async with aclosing(self.generate(prompt, **settings)) as deltas:
            async for delta in deltas:
                text += delta.text
                tokens += delta.tokens
                if delta.finish is not None and delta.usage is not None:
                    return Completion(delta.id, text, tuple(tokens), delta.finish, delta.usage)
        raise AssertionError("a reply without an end")

    async def chat(self, messages: str | Conversation, **settings: Unpack[Settings]) -> Completion:
        """What the model says next in a conversation; a text is what the user says first."""
        turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        return await self.complete(turns, **settings)

    @abstractmethod
    async def stats(self) -> EngineStats:
        """What the engine holds and did."""

    async def move(self, blocks: Blocks, *, to: str, head: bool = False) -> Moved:
        """Move blocks to a device while replies go on; returns what that took, once it is done.

        blocks: numbers, or a text: "0:9" without 9, "0-8" with 8, "head", or several with commas.
        to: a device, or "host". head: the output head too. Raises UsageError for what can be no
        blocks, JitllmError for a move that is refused; nothing has changed then.
        """
        chosen = selected(blocks, head=head)
        return await self._move(chosen, to)

    @overload
    async def place(self, *, maxmem: str | int) -> Pages: ...

    @overload
    async def place(self, placement: str, *, strict: bool = False) -> tuple[Moved, ...]: ...

    async def place(
        self,
        placement: str | None = None,
        *,
        maxmem: str | int | None = None,
        strict: bool = False,
    ) -> Pages | tuple[Moved, ...]:
        """Change where the blocks of the model are, or the memory that it may take.

        placement: a map like "0-8=cpu:0,*=cpu:1!" to go to with as few moves as that takes; returns
        what they took. What it does not name stays; what cannot be is in `stats().declines`, or
        with `strict` an error that leaves everything as it was. maxmem: "12G", "512M", "400K", or
        bytes; returns what was reached.
        """
        if placement is not None and maxmem is None:
            parse_map(placement)
            return await self._place(placement, strict)
        if maxmem is None or placement is not None or strict:
            raise UsageError("a placement or maxmem?", "give one of them")
        return await self._set_budget(size_of(maxmem))

    @abstractmethod
    async def _move(self, chosen: Selection, to: str) -> Moved: ...

    @abstractmethod
    async def _place(self, placement: str, strict: bool) -> tuple[Moved, ...]: ...

    @abstractmethod
    async def _set_budget(self, num_bytes: int) -> Pages: ...

    @abstractmethod
    async def cancel(self, id: str) -> None:
        """End the reply of that id: its stream gets what there is. Raises JitllmError when there
        is none."""

    @abstractmethod
    async def park(self, id: str, to: ParkedIn = "disk") -> None:
        """Let the reply of that id wait until it is resumed; its keys and values leave the devices.

        Answered once they are on disk, or in the memory of the host. Its stream pauses. Raises
        JitllmError when there is no such reply, and for what hinders it; then it goes on.
        """

    @abstractmethod
    async def resume(self, id: str) -> None:
        """Let the reply of that id go on when it is its turn; nothing is computed again."""

    @abstractmethod
    async def close(self) -> None:
        """Let go; an engine that this handle opened ends. Twice is fine."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


def kind_of(prompt: Prompt) -> tuple[Conversation | None, str | Sequence[int]]:
    """A conversation, or else what is to be continued. Raises UsageError for what is neither."""
    if isinstance(prompt, str):
        return None, prompt
    turns = [item for item in prompt if isinstance(item, Mapping)]
    ids = [item for item in prompt if isinstance(item, int)]
    if not prompt:
        raise UsageError("the prompt is empty", "give at least one token")
    if len(prompt) not in (len(turns), len(ids)):
        raise UsageError("a prompt is a text, token ids, or the turns of a conversation")
    return turns or None, ids


def selected(blocks: Blocks, *, head: bool = False) -> Selection:
    """What somebody named. Raises UsageError for what can be no blocks."""
    if isinstance(blocks, str):
        chosen = parse_blocks(blocks, "blocks")
        return Selection(chosen.blocks, chosen.head or head)
    numbers = sorted(set(blocks))
    if numbers and numbers[0] < 0:
        raise UsageError(f"there is no block {numbers[0]}", "blocks count from 0")
    return Selection(tuple(numbers), head)


def size_of(maxmem: str | int) -> int:
    """Bytes. Raises UsageError for what is no size."""
    return parse_size(maxmem, "maxmem") if isinstance(maxmem, str) else maxmem


def _id(given: str | None) -> str:
    if given is None:
        return f"reply-{secrets.token_hex(8)}"
    if not _ID.fullmatch(given):
        raise UsageError(f"{shown(given)} is no id of a reply", "use letters, digits and ._:+=-")
    return given


def _stops(given: str | Iterable[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _priority(given: str) -> Priority:
    if given not in tuple(Priority):
        raise UsageError(f"{given!r} is no priority", f"choose {' or '.join(Priority)}")
    return Priority(given)
