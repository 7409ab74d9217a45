"""The models of a server: opened through `compose`, dividing the host budget among them.

Knows engines and files. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from jitllm.api.models import Load, Served
from jitllm.config import EngineConfig
from jitllm.engine import Pages
from jitllm.errors import JitllmError, UsageError
from jitllm.log import logger

if TYPE_CHECKING:
    from jitllm.compose import Listed, Loaded, Member, NodeListed
    from jitllm.compose import Progress as Report
    from jitllm.devices.choose import AvailableDevice

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
        from jitllm.devices.choose import DeclinedDevice, choose_devices, reports
        from jitllm.devices.grammar import parse_devices
        from jitllm.jit import threads, tiers
        from jitllm.memory.host import host_devices

        member = self._in_reach
        nodes = {node.node_id: node for node in await member.nodes()} if member else {}
        own = nodes.pop(member.node_id, None) if member else None
        here = own.name if own else ""
        others = {node.name: node for node in nodes.values()}
        available = [
            *host_devices(self._config.threads or threads.default_threads()),
            *_devices_of(others.values()),
        ]
        try:
            entries = parse_devices(self._config.devices)
            _, declined = choose_devices(entries, available, here)
        except JitllmError as error:  # a list that asks for what there is not takes nothing
            declined = tuple(DeclinedDevice(device.name, str(error)) for device in available)
        listed = await member.models() if member else None
        cpu = tiers.cpu_name(), tiers.choose().name
        found = []
        for report, device in zip(reports(available, declined), available, strict=True):
            node = others.get(device.node, own)
            processor, tier = cpu
            if device.node and node and node.host:
                processor, tier = node.host.processor, node.host.tier
            if listed is None:
                models = [] if report["declined"] else list(self._places)
            else:
                models = _on(node, device, listed)
            found.append(
                report
                | {
                    "node": device.node or here,
                    "processor": processor,
                    "tier": tier,
                    "models": models,
                    "runtime": self._runtime,
                    "notes": self.notes(),
                }
            )
        return found

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
        member = self._in_reach
        if member is None:
            return []
        return [
            {
                "id": model.name,
                "path": str(model.path),
                "state": model.state,
                "member": model.member,
                "is_here": model.member == member.name,
                "placement": model.placement,
                "devices": [
                    f"{near.node}/{_bare(near.name)}"
                    for near in (model.working.devices if model.working else ())
                ],
            }
            for model in await member.models()
        ]

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


def _on(node: NodeListed | None, device: AvailableDevice, models: Iterable[Listed]) -> list[str]:
    """Models that may use a device of a node."""
    place = (node.node_id if node else "", _bare(device.name))
    return [
        model.name
        for model in models
        if model.working
        and place in [(near.node_id, _bare(near.name)) for near in model.working.devices]
    ]


def _bare(name: str) -> str:
    """What a device is called on its own node."""
    return name.rpartition("/")[2]


def _devices_of(nodes: Iterable[NodeListed]) -> Iterable[AvailableDevice]:
    """What other nodes offer, called as placements have it."""
    for node in nodes:
        for device in node.host.devices if node.host else ():
            yield replace(device, node=node.name)


def _prepare(loaded: Loaded) -> None:
    """Make what the first request would have to wait for."""
    loaded.tokenizer.prepare()
    _ = loaded.chat


def _bytes_of(loaded: Loaded) -> int:
    return loaded.header.weight_bytes


def _weight_bytes(path: Path) -> int:
    return path.stat().st_size
