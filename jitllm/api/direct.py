"""Endpoints that take a JSON body and send their answer themselves, called without a framework.

FastAPI has their routes: it documents them, and finds everything else. Between a request and its
endpoint it did what is done here, in half a millisecond that compute threads wait for. Knows HTTP
and bodies. Knows no endpoint.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.types import ASGIApp, Receive, Scope, Send

from jitllm.api.errors import bad_request, invalid_body

_JSON = re.compile(r"application/(.+\+)?json")

Endpoint = Callable[[Any, Request], Awaitable[ASGIApp]]


class Direct:
    """The layer below `Edge`, whose it is to answer what is raised here.

    routers: of endpoints that are called with a body and the request. field_names: of their bodies.
    """

    def __init__(
        self, app: ASGIApp, routers: Iterable[APIRouter], field_names: frozenset[str]
    ) -> None:
        self._app = app
        self._field_names = field_names
        routes = [r for router in routers for r in router.routes if isinstance(r, APIRoute)]
        self._endpoints = {("POST", route.path): _of(route) for route in routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; what goes to no endpoint of ours passes."""
        found = self._endpoints.get((scope.get("method", ""), scope.get("path", "")))
        if found is None:
            await self._app(scope, receive, send)
            return
        model, endpoint = found
        request = Request(scope, receive, send)
        answer = await endpoint(self._validated(model, await self._value(request)), request)
        await answer(scope, receive, send)

    async def _value(self, request: Request) -> Any:
        """What a body says; the body itself, which no model is made from, where there is none or
        it is not said to be JSON."""
        body = await request.body()
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if not body or not _JSON.fullmatch(kind):
            return body
        try:
            return json.loads(body)
        except json.JSONDecodeError as error:
            first = {"type": "json_invalid", "ctx": {"error": error.msg}}
            raise invalid_body(first, (error.pos,), self._field_names) from None
        except (ValueError, RecursionError):
            raise bad_request("There was an error parsing the body") from None

    def _validated(self, model: type[BaseModel], value: Any) -> BaseModel:
        try:
            return model.model_validate(value, from_attributes=True)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise invalid_body(first, first["loc"], self._field_names) from None


def _of(route: APIRoute) -> tuple[type[BaseModel], Endpoint]:
    """What a route says that its endpoint wants, and the endpoint."""
    assert route.body_field is not None
    assert route.methods == {"POST"}
    model = route.body_field.field_info.annotation
    assert isinstance(model, type)
    assert issubclass(model, BaseModel)
    return model, route.endpoint
