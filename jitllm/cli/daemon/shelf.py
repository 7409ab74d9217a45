"""The models of a server: opened through `compose`, dividing the host budget among them.

Knows engines and files. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from jitllm.api.models import Load, Served
from jitllm.config import EngineConfig
from jitllm.engine import Pages
from jitllm.errors import UsageError
from jitllm.log import logger

if TYPE_CHECKING:
    from jitllm.compose import Loaded, Member
    from jitllm.compose import Progress as Report

    class ShowProgress(Protocol):
        """Makes what shows the progress of one opening."""

        def __call__(self) -> AbstractContextManager[Report]: ...


_log = logger(__name__)


@dataclass(eq=False, slots=True)
class _Place:
    """A model and its share of memory. has_own_budget: somebody chose it; it is not divided."""

    loaded: Loaded
    served: Served
    budget_bytes: int
    has_own_budget: bool


class Shelf:
    """Implements `Models`.

    config: what holds for every model that says nothing else; its budget is for all together.
    ray: on which cluster actors live, which this process is part of; in this process without it.
    member: as whom it serves models there, so that others find them.
    """

    def __init__(
        self,
        config: EngineConfig,
        show_progress: ShowProgress,
        ray: str | None = None,
        member: Member | None = None,
    ) -> None:
        self._config = config
        self._ray = ray
        self._member = member
        self._show_progress = show_progress
        self._places: dict[str, _Place] = {}
        self._lock = asyncio.Lock()
        self._total_bytes: int | None = config.maxmem_bytes

    def list(self) -> Sequence[Served]:
        """Every model, in the order of loading."""
        return [place.served for place in self._places.values()]

    def get(self, model_id: str) -> Served | None:
        """By id, or else by alias."""
        if place := self._places.get(model_id):
            return place.served
        return next((s for s in self.list() if model_id in s.aliases), None)

    async def load(self, load: Load) -> Served:
        """Open a container. Those that share a budget move together first."""
        from jitllm import compose

        async with self._lock:
            model_id = load.id or load.path.stem
            if self.get(model_id) is not None:
                raise UsageError(f"the id {model_id!r} is taken", "choose another with -id")
            budget_bytes = load.maxmem_bytes
            if budget_bytes is None:
                budget_bytes = await self._room_for(load.path)
            config = replace(
                self._config,
                maxmem_bytes=budget_bytes,
                ctx_tokens=load.ctx_tokens or self._config.ctx_tokens,
                kv_type=load.kv_type or self._config.kv_type,
            )
            with self._show_progress() as progress:
                loaded = await compose.open_engine(
                    load.path,
                    config,
                    progress=progress,
                    ray=self._ray,
                    name=load.id,
                    member=self._member,
                )
            model_id = loaded.name
            try:
                served = await self._served(loaded, load.path, model_id)
            except BaseException:
                await loaded.close()
                raise
            self._say(loaded.notes)
            own = load.maxmem_bytes is not None
            self._places[model_id] = _Place(loaded, served, loaded.config.maxmem_bytes, own)
            gc.freeze()  # a model stays for long: the garbage collector need not go over it
            return served

    async def unload(self, model_id: str) -> None:
        """Close a model; what it leaves goes to those that share."""
        place = self._places.pop(model_id)
        async with self._lock:
            await place.loaded.close()
            await self._divide(None)
        del place
        gc.unfreeze()
        gc.collect()
        gc.freeze()

    async def place(self, model_id: str, budget_bytes: int) -> Pages:
        """Give a model a budget of its own."""
        async with self._lock:
            place = self._places[model_id]
            place.has_own_budget, place.budget_bytes = True, budget_bytes
            return await place.loaded.engine.set_budget(budget_bytes)

    async def devices(self) -> Sequence[Mapping[str, Any]]:
        """Those of this machine and of other nodes, and why -devices leaves some of them out."""
        from jitllm.cli.daemon.nodes import device_reports

        about = {"runtime": self._runtime, "notes": self.notes()}
        found = await device_reports(self._config, self._in_reach, list(self._places))
        return [report | about for report in found]

    def notes(self) -> Sequence[str]:
        """What makes replies of some model slower than they could be, and what is wrong with the
        cluster; each once."""
        notes = [note for served in self.list() for note in served.notes]
        if self._member is not None:
            notes += [f"the node {name} has left the cluster" for name in self._member.health.lost]
            if self._in_reach is None:
                notes.append("the manager of the cluster is out of reach: nobody finds our models")
        return list(dict.fromkeys(notes))

    async def cluster(self) -> Sequence[Mapping[str, Any]]:
        """Models of all members, as far as a manager knows them."""
        from jitllm.cli.daemon.nodes import model_reports

        return await model_reports(self._in_reach) if self._in_reach else []

    async def drain(self, model_id: str, is_draining: bool) -> None:
        """Have a model of any member refuse requests, or take them again."""
        if self._member is None:
            raise UsageError(f"there is no model {model_id!r}")
        await self._member.drain(model_id, is_draining=is_draining)

    async def close(self) -> None:
        """Close every model."""
        gc.unfreeze()
        for model_id in list(self._places):
            place = self._places.pop(model_id)
            await place.loaded.close()

    @property
    def _in_reach(self) -> Member | None:
        """As whom the manager of the cluster can be asked, while it can."""
        return self._member if self._member and self._member.is_in_reach else None

    @property
    def _runtime(self) -> str:
        return "embedded" if self._ray is None else "ray"

    def _say(self, notes: Sequence[str]) -> None:
        """Write notes of a model to come into the log, unless another one brought them."""
        for note in notes:
            if note not in self.notes():
                _log.warning("%s", note)

    async def _room_for(self, path: Path) -> int | None:
        """The share of a model to come, made free; None while nothing is to be shared."""
        if self._total_bytes is None and not self._places:
            return None
        if self._total_bytes is None:  # what the first one took is for all
            self._total_bytes = next(iter(self._places.values())).loaded.config.maxmem_bytes
        return await self._divide(_weight_bytes(path))

    async def _divide(self, newcomer_bytes: int | None) -> int | None:
        """Share the budget in proportion to weights; returns the newcomer's part."""
        if self._total_bytes is None:
            return None
        sharing = [place for place in self._places.values() if not place.has_own_budget]
        rest = self._total_bytes - sum(
            place.budget_bytes for place in self._places.values() if place.has_own_budget
        )
        parts = shares(
            max(rest, 0),
            [*(_bytes_of(place.loaded) for place in sharing), newcomer_bytes or 0],
        )
        for place, part in zip(sharing, parts[:-1], strict=True):
            if part != place.budget_bytes:
                place.budget_bytes = part
                await place.loaded.engine.set_budget(part)
        return parts[-1]

    async def _served(self, loaded: Loaded, path: Path, model_id: str) -> Served:
        await asyncio.to_thread(_prepare, loaded)
        stats = await loaded.engine.stats()
        alias = () if path.stem == model_id or self.get(path.stem) else (path.stem,)
        return Served(
            id=model_id,
            aliases=alias,
            path=path,
            engine=loaded.engine,
            tokenizer=loaded.tokenizer,
            chat=loaded.chat,
            header=loaded.header,
            context_tokens=stats.context_tokens,
            vocab_tokens=loaded.graph.vocab,
            loaded_at_s=time.time(),
            where={
                "runtime": self._runtime,
                "devices": ["cpu"],
                "tier": stats.tier,
                "threads": stats.threads,
            },
            notes=loaded.notes,
        )


def shares(total: int, weights: Sequence[int]) -> list[int]:
    """`total` in proportion to `weights`; never more than `total` in all."""
    whole = sum(weights)
    return [total * weight // whole if whole else 0 for weight in weights]


def _prepare(loaded: Loaded) -> None:
    """Make what the first request would have to wait for."""
    loaded.tokenizer.prepare()
    _ = loaded.chat


def _bytes_of(loaded: Loaded) -> int:
    return loaded.header.weight_bytes


def _weight_bytes(path: Path) -> int:
    return path.stat().st_size
