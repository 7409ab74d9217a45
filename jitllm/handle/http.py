"""A handle of a model that a server has: settings to request bodies, chunks to deltas.

Knows OpenAI's endpoints and our fields in them. Needs the standard library alone.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import fields
from typing import Any, Unpack

from jitllm.engine import (
    DeviceUse,
    EngineStats,
    Finish,
    Moved,
    MoveTotals,
    Pages,
    ParkedIn,
    ParkTotals,
    PrefixTotals,
    Usage,
)
from jitllm.errors import JitllmError, UsageError
from jitllm.handle.base import Asked, Handle, Prompt, Settings, TextDelta, kind_of
from jitllm.memory.use import ExpertUse, PhaseUse
from jitllm.remote import Server, at
from jitllm.schedule.placement import HEAD, Decline, Placement, runs_text
from jitllm.schedule.placement_map import Selection

_NO_LIMIT = 2**31 - 1
"""Tokens: what is asked for where a request without a limit would get OpenAI's 16."""


async def open_remote(url: str, model: str | None = None, api_key: str = "") -> Handle:
    """A handle of `model`, or else of the only one that is there."""
    server = Server(url, api_key)
    if model is not None:
        return HttpHandle(server, (await server.get(at("models", model)))["id"])
    names = [found["id"] for found in (await server.get("models"))["models"]]
    if len(names) != 1:
        here = ", ".join(names) or "none"
        raise UsageError(f"which model of {server.url}?", f"say model=...; loaded: {here}")
    return HttpHandle(server, names[0])


class HttpHandle(Handle):
    """See `Handle`. Every reply has a connection of its own; closing the handle closes nothing."""

    def __init__(self, server: Server, name: str) -> None:
        self.name = name
        self._server = server

    async def generate(
        self, prompt: Prompt, **settings: Unpack[Settings]
    ) -> AsyncGenerator[TextDelta, None]:
        """See `Handle.generate`."""
        asked = Asked.of(settings)
        path, body = self._request(prompt, asked)
        finish: Finish | None = None
        chunks = self._server.events(path, body, {"x-request-id": asked.id})
        async with aclosing(chunks):
            async for chunk in chunks:
                if not chunk["choices"]:
                    usage, finish = _costs(chunk, finish)
                    yield TextDelta(asked.id, finish=finish, usage=usage)
                    return
                choice = chunk["choices"][0]
                text = choice.get("text") or choice.get("delta", {}).get("content") or ""
                tokens = tuple(choice.get("token_ids") or ())
                finish = Finish(choice["finish_reason"]) if choice["finish_reason"] else finish
                if text or tokens:
                    yield TextDelta(asked.id, text, tokens)
        raise JitllmError(f"{self._server.url} ended a reply without saying what it cost")

    async def stats(self) -> EngineStats:
        """See `Handle.stats`."""
        found: dict[str, Any] = (await self._server.get(at("models", self.name)))["stats"]
        return _stats(found)

    async def _move(self, chosen: Selection, to: str) -> Moved:
        move = {"blocks": _written(chosen), "to": to}
        return _moved((await self._changed({"move": move}))["moved"][0])

    async def _place(self, placement: str, strict: bool) -> tuple[Moved, ...]:
        body = {"placement": placement, "strict": strict}
        return tuple(map(_moved, (await self._changed(body))["moved"]))

    async def _set_budget(self, num_bytes: int) -> Pages:
        return _pages((await self._changed({"maxmem": num_bytes}))["pages"])

    async def _changed(self, body: dict[str, Any]) -> dict[str, Any]:
        """The placement, once `body` is done."""
        placed: dict[str, Any] = await self._server.post(at("models", self.name, "placement"), body)
        return placed

    async def cancel(self, id: str) -> None:
        """See `Handle.cancel`."""
        await self._server.post(at("sessions", id, "cancel"))

    async def park(self, id: str, to: ParkedIn = "disk") -> None:
        """See `Handle.park`."""
        await self._server.post(at("sessions", id, "park"), {"to": to})

    async def resume(self, id: str) -> None:
        """See `Handle.resume`."""
        await self._server.post(at("sessions", id, "resume"))

    async def close(self) -> None:
        """See `Handle.close`."""

    def _request(self, prompt: Prompt, asked: Asked) -> tuple[str, dict[str, Any]]:
        """Where to send a request, and what."""
        turns, text_or_ids = kind_of(prompt)
        body: dict[str, Any] = {
            "model": self.name,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "ignore_eos": asked.ignore_eos,
            "jitllm_priority": asked.priority.value,
            **_sampling(asked),
        }
        if asked.cache_salt:
            body["cache_salt"] = asked.cache_salt
        if asked.stops:
            body["stop"] = list(asked.stops)
        if turns is not None:
            limit = {} if asked.max_tokens is None else {"max_tokens": asked.max_tokens}
            return "v1/chat/completions", {**body, "messages": [dict(t) for t in turns], **limit}
        body["max_tokens"] = _NO_LIMIT if asked.max_tokens is None else asked.max_tokens
        return "v1/completions", {**body, "prompt": text_or_ids}


def _sampling(asked: Asked) -> dict[str, Any]:
    sampling = asked.sampling
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repeat_penalty,
        "repeat_last_n": sampling.repeat_last_n,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "seed": sampling.seed,
        "logit_bias": {str(token_id): bias for token_id, bias in sampling.logit_bias},
    }


def _costs(chunk: dict[str, Any], finish: Finish | None) -> tuple[Usage, Finish]:
    """What the last chunk says; a reply that was cancelled has `stopped`, as OpenAI knows it."""
    usage, about = chunk["usage"], chunk["jitllm"]
    queued_s, prefill_s = about["queued_ms"] / 1e3, about["prefill_ms"] / 1e3
    costs = Usage(
        prompt_tokens=usage["prompt_tokens"],
        generated_tokens=usage["completion_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        queued_s=queued_s,
        prefill_s=prefill_s,
        decode_s=about["decode_ms"] / 1e3,
        ttft_s=queued_s + prefill_s,
    )
    return costs, Finish.CANCELLED if about["cancelled"] else finish or Finish.STOP


def _written(chosen: Selection) -> str:
    """As the control plane reads it. Raises UsageError for nothing."""
    parts = ([runs_text(chosen.blocks)] if chosen.blocks else []) + [HEAD] * chosen.head
    if not parts:
        raise UsageError("no block is named", "name some, like 0:9, or head")
    return ",".join(parts)


def _stats(found: dict[str, Any]) -> EngineStats:
    known = _known(EngineStats, found)
    kinds: dict[str, Callable[[Any], Any]] = {
        "pages": _pages,
        "placement": _placement,
        "devices": lambda uses: tuple(DeviceUse(**_known(DeviceUse, use)) for use in uses),
        "declines": lambda declines: tuple(Decline(**_known(Decline, d)) for d in declines),
        "move_totals": lambda totals: MoveTotals(**_known(MoveTotals, totals)),
        "park_totals": lambda totals: ParkTotals(**_known(ParkTotals, totals)),
        "prefix_totals": lambda totals: PrefixTotals(**_known(PrefixTotals, totals)),
        "last_move": lambda moved: moved and _moved(moved),
        "lost": tuple,
    }
    made = {name: make(known[name]) for name, make in kinds.items() if name in known}
    return EngineStats(**known | made)


def _placement(found: dict[str, Any]) -> Placement:
    known = _known(Placement, found)
    marks = {name: frozenset(known[name]) for name in ("pinned", "streamed", "hosted", "carded")}
    return Placement(**known | marks | {"blocks": tuple(known["blocks"])})


def _moved(found: dict[str, Any]) -> Moved:
    return Moved(**_known(Moved, found))


def _pages(found: dict[str, Any]) -> Pages:
    experts = found.get("experts")
    use = None if experts is None else ExpertUse(**_known(ExpertUse, experts))
    phases = {name: PhaseUse(**_known(PhaseUse, one)) for name, one in found["phases"].items()}
    return Pages(**{**_known(Pages, found), "experts": use, "phases": phases})


def _known(kind: Any, found: dict[str, Any]) -> dict[str, Any]:
    """Fields that we know: a server of another version may say more."""
    return {field.name: found[field.name] for field in fields(kind) if field.name in found}
