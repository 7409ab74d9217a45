"""Where the blocks of a model are: the report, and what people change of it while it works.

Knows the Engine port and maps of blocks. A part of the control plane.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterator
from itertools import groupby
from typing import TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel

from jitllm.api.errors import ApiError, bad_request, explained
from jitllm.api.models import Served
from jitllm.api.openapi import REPLIES
from jitllm.api.schema import MoveRequest, PlaceRequest
from jitllm.api.service import Service, service_of
from jitllm.engine import DeviceUse, EngineStats, Moved, MoveTotals, Pages
from jitllm.errors import JitllmError, UsageError
from jitllm.schedule.placement import HEAD, Decline, runs_text
from jitllm.schedule.placement_map import Selection, parse_blocks, parse_map
from jitllm.units import parse_size

router = APIRouter(prefix="/jitllm/v1", tags=["control"], responses=REPLIES)

T = TypeVar("T")


class Run(BaseModel):
    """Blocks in a row on one device, or the head. `what` is "0-8" or "head"; blocks: how many.

    experts: "%host" where the host computes routed ones, "%card" where they come one by one.
    """

    what: str
    device: str
    blocks: int
    weight_bytes: int
    pinned: bool
    streamed: bool
    experts: str


class PlacementReply(BaseModel):
    """Where a model is, what that takes, and what became of what was asked for.

    moved: the moves of this very request. moves, moved_blocks and move_totals count all so far.
    sent_home: blocks that went to the host because a GPU had no room for keys and values;
    brought_back: of those, how many came back. declines: what was asked for and is not so. lost:
    devices that died and did not come back.
    """

    id: str
    placement: str
    epoch: int
    fits: bool
    pages: Pages
    runs: list[Run]
    devices: list[DeviceUse]
    moved: list[Moved]
    moves: int
    moved_blocks: int
    sent_home: int
    brought_back: int
    move_totals: MoveTotals
    last_move: Moved | None
    declines: list[Decline]
    lost: list[str]


@router.get("/models/{model_id:path}/placement")
async def get_placement(model_id: str, request: Request) -> PlacementReply:
    """Where the blocks of a model are and what memory it may take."""
    served = service_of(request).served(model_id)
    return _report(served, await served.engine.stats())


@router.post("/models/{model_id:path}/placement")
async def place_model(model_id: str, body: PlaceRequest, request: Request) -> PlacementReply:
    """Move blocks of a model, or change its memory budget, while it works.

    Answers when that is done. What is refused with 409 has changed nothing.
    """
    service = service_of(request)
    service.refuse_leaving(model_id)
    served = service.served(model_id)
    moved: tuple[Moved, ...] = ()
    if body.maxmem is not None:
        budget_bytes = size_of(body.maxmem)
        await _done(service, served, service.models.place(served.id, budget_bytes), "maxmem")
    if body.move is not None:
        chosen = _selection(body.move)
        move = served.engine.move(chosen.blocks, body.move.to, head=chosen.head)
        moved = (await _done(service, served, move, "move"),)
    if body.placement is not None:
        _check_map(body.placement)
        place = served.engine.place(body.placement, strict=bool(body.strict))
        moved = await _done(service, served, place, "placement")
    return _report(served, await _done(service, served, served.engine.stats(), None), moved)


def size_of(maxmem: str | int) -> int:
    """Bytes of a budget. Raises ApiError for what is no size."""
    if not isinstance(maxmem, str):
        return maxmem
    try:
        return parse_size(maxmem, "maxmem")
    except UsageError as error:
        raise bad_request(str(error), "maxmem") from error


def _selection(move: MoveRequest) -> Selection:
    try:
        return parse_blocks(move.blocks, "move.blocks")
    except UsageError as error:
        raise bad_request(str(error), "move.blocks") from error


def _check_map(text: str) -> None:
    try:
        parse_map(text)
    except UsageError as error:
        raise bad_request(str(error), "placement") from error


async def _done(service: Service, served: Served, work: Awaitable[T], param: str | None) -> T:
    """What `work` comes to. Raises ApiError; of a model that is unloaded meanwhile, it says so."""
    try:
        return await work
    except JitllmError as error:
        service.refuse_leaving(served.id)
        if service.models.get(served.id) is not served:
            raise ApiError(409, f"{served.id} was unloaded", "model", "unloading") from error
        raise explained(error, param) from error


def _report(served: Served, stats: EngineStats, moved: tuple[Moved, ...] = ()) -> PlacementReply:
    return PlacementReply(
        id=served.id,
        placement=str(stats.placement),
        epoch=stats.placement.epoch,
        fits=stats.pages.fits,
        pages=stats.pages,
        runs=list(_runs(served, stats)),
        devices=list(stats.devices),
        moved=list(moved),
        moves=stats.moves,
        moved_blocks=stats.moved_blocks,
        sent_home=stats.sent_home,
        brought_back=stats.brought_back,
        move_totals=stats.move_totals,
        last_move=stats.last_move,
        declines=list(stats.declines),
        lost=list(stats.lost),
    )


def _runs(served: Served, stats: EngineStats) -> Iterator[Run]:
    placement, header = stats.placement, served.header

    def where(index: int) -> tuple[str, bool, bool, str]:
        is_pinned, is_streamed = index in placement.pinned, index in placement.streamed
        return placement.owner(index), is_pinned, is_streamed, placement.experts_mark(index)

    for (device, pinned, streamed, experts), run in groupby(range(placement.num_blocks), where):
        blocks = list(run)
        yield Run(
            what=runs_text(blocks),
            device=device,
            blocks=len(blocks),
            weight_bytes=sum(header.frame_bytes[block] for block in blocks),
            pinned=pinned,
            streamed=streamed,
            experts=experts,
        )
    device, pinned, streamed, experts = where(placement.num_blocks)
    yield Run(
        what=HEAD,
        device=device,
        blocks=0,
        weight_bytes=header.dense.length,
        pinned=pinned,
        streamed=streamed,
        experts=experts,
    )
