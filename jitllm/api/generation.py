"""What all endpoints that generate share: a session, its choices, and a reply, whole or in chunks.

Knows when what is sent. What a choice looks like is said by the `Form` of an endpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from fastapi import Request

from jitllm.api import costs
from jitllm.api.answer import DONE, Answer, Outlet, as_json, event
from jitllm.api.choices import Choice, Piece, Token, run_all
from jitllm.api.models import Served
from jitllm.api.schema import GenerationRequest
from jitllm.api.service import Service, Serving, service_of

Plain = dict[str, Any]
Body = TypeVar("Body", bound=GenerationRequest, contravariant=True)


class Form(Protocol[Body]):
    """What the replies of an endpoint look like.

    prefix: of their ids. param: the field to blame for a prompt that does not fit. kind,
    chunk_kind: what a reply and a part of one call themselves.
    """

    prefix: str
    param: str
    kind: str
    chunk_kind: str

    async def choices(self, served: Served, body: Body, name: str) -> list[Choice]:
        """The choices of a request, to be run; name: what the engine calls it."""

    def whole(self, served: Served, body: Body, text: str, tokens: Sequence[Token]) -> Plain:
        """A choice that has ended, but for its index, its ids and why it ended."""

    def parts(
        self, served: Served, body: Body, piece: Piece, is_first: bool
    ) -> Iterable[tuple[Plain, Sequence[int]]]:
        """What a piece adds to a choice, each part for a chunk of its own, with its token ids.

        The last one says why the choice ends, where the piece is its last.
        """


def answer(form: Form[Body], request: Request, body: Body) -> Answer:
    """The reply to a request, as it was asked for."""
    service = service_of(request)
    make = _stream if body.stream else _whole
    return Answer(
        lambda out: make(out, form, service, request, body),
        is_stream=bool(body.stream),
        send_timeout_s=service.limits.send_timeout_s,
        patience_s=service.limits.patience_s,
        param=form.param,
    )


@dataclass(slots=True)
class _Collected:
    """A choice so far."""

    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)


async def _whole(
    out: Outlet, form: Form[Body], service: Service, request: Request, body: Body
) -> None:
    with service.session(request, body.model, form.prefix) as serving:
        served = serving.served
        choices = await form.choices(served, body, serving.session.id)
        found = [_Collected() for _ in choices]

        async def collect(choice: Choice, piece: Piece) -> None:
            so_far = found[choice.index]
            so_far.text += piece.text
            so_far.tokens += piece.tokens
            so_far.ids += piece.ids

        with service.counts.request(served.id, choices):
            await run_all(choices, serving.session, collect, served.max_together)
        replies = [
            {
                "index": choice.index,
                **form.whole(served, body, one.text, one.tokens),
                "finish_reason": costs.finish_reason(choice),
                **costs.token_ids(body, one.ids),
            }
            for choice, one in zip(choices, found, strict=True)
        ]
        envelope = _envelope(serving, form.kind)
        whole = {**envelope, "choices": replies, **_costs(serving, choices)}
        await out.send(as_json(whole), more=False)


async def _stream(
    out: Outlet, form: Form[Body], service: Service, request: Request, body: Body
) -> None:
    with service.session(request, body.model, form.prefix) as serving:
        served = serving.served
        choices = await form.choices(served, body, serving.session.id)
        envelope = _envelope(serving, form.chunk_kind)
        no_usage = {"usage": None} if body.wants_usage else {}
        begun: set[int] = set()
        num_open, rest = len(choices), b""

        async def send(choice: Choice, piece: Piece) -> None:
            nonlocal num_open, rest
            num_open -= piece.is_last
            parts = list(form.parts(served, body, piece, choice.index not in begun))
            begun.add(choice.index)
            events = []
            for number, (part, ids) in enumerate(parts, 1):
                is_last = piece.is_last and number == len(parts)
                finish = costs.finish_reason(choice) if is_last else None
                entry = {"index": choice.index, **part, "finish_reason": finish}
                entry |= costs.token_ids(body, ids)
                chunk = {**envelope, "choices": [entry], **no_usage}
                if is_last and not num_open and not body.wants_usage:
                    chunk["jitllm"] = costs.about(served, choices)
                events.append(event(chunk))
            data = b"".join(events)
            if num_open:
                await out.send(data)
            else:
                rest = data

        with service.counts.request(served.id, choices):
            await run_all(choices, serving.session, send, served.max_together)
        if body.wants_usage:
            rest += event({**envelope, "choices": [], **_costs(serving, choices)})
        await out.send(rest + DONE, more=False)


def _envelope(serving: Serving, kind: str) -> Plain:
    return {
        "id": serving.session.id,
        "object": kind,
        "created": serving.created_s,
        "model": serving.name,
    }


def _costs(serving: Serving, choices: Sequence[Choice]) -> Plain:
    return {"usage": costs.usage(choices), "jitllm": costs.about(serving.served, choices)}
