"""The ASGI app of a server: every endpoint, put together.

Knows all of this package. Starts nothing and closes nothing: the models belong to the caller.
"""

from __future__ import annotations

from fastapi import APIRouter, FastAPI, Request

from jitllm import __version__
from jitllm.api import chat, completions, control, errors, health, parking, placement
from jitllm.api.direct import Direct
from jitllm.api.edge import Edge
from jitllm.api.models import Models, Served
from jitllm.api.openapi import REPLIES
from jitllm.api.schema import FIELD_NAMES, ModelCard, ModelList
from jitllm.api.service import Limits, Service, service_of

router = APIRouter(tags=["openai"], responses=REPLIES)


def create_app(models: Models, limits: Limits | None = None) -> FastAPI:
    """An app that serves `models`; `app.state.service` is its `Service`, which drains."""
    app = FastAPI(
        title="jitllm",
        version=__version__,
        summary="Models behind OpenAI's endpoints, and the control plane.",
        docs_url="/docs",
        redoc_url=None,
    )
    limits = limits or Limits()
    app.state.service = Service(models=models, limits=limits)
    app.state.pulse = health.Pulse(limits.stats_timeout_s, limits.stuck_after_s)
    errors.install(app, FIELD_NAMES)
    app.add_middleware(Direct, routers=(chat.router, completions.router), field_names=FIELD_NAMES)
    app.add_middleware(Edge, limits=limits)
    # What is below a model comes before the model: its name may have slashes.
    below = (placement.router, control.router)
    for part in (router, chat.router, completions.router, *below, parking.router, health.router):
        app.include_router(part)
    return app


@router.get("/v1/models")
async def list_models(request: Request) -> ModelList:
    """Every name that a request may give for a model."""
    cards = [
        _card(name, served)
        for served in service_of(request).models.list()
        for name in (served.id, *served.aliases)
    ]
    return ModelList(object="list", data=cards)


@router.get("/v1/models/{model_id:path}")
async def retrieve_model(model_id: str, request: Request) -> ModelCard:
    """One of them."""
    return _card(model_id, service_of(request).served(model_id))


def _card(name: str, served: Served) -> ModelCard:
    return ModelCard(
        id=name,
        object="model",
        created=int(served.loaded_at_s),
        owned_by="jitllm",
        max_model_len=served.context_tokens,
    )
