"""Who serves which model in a cluster, under which name, and what its nodes have to offer.

Plain values, and no await. Knows no runtime. It is true as far as members say: each of them tells
again what it serves when the one who knew is gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import chain, count

from actors.messages.manager import Claim, Health, Listed, ModelState, NodeListed
from jitllm.errors import JitllmError, UsageError
from jitllm.memory.host import HostReport


class Directory:
    """Models by name, and nodes by id."""

    def __init__(self) -> None:
        self._models: dict[str, Listed] = {}
        self._nodes: dict[str, NodeListed] = {}
        self._lost: dict[str, str] = {}

    # --- models ------------------------------------------------------------------------------

    def claim(self, claim: Claim) -> str:
        """Keep a name that nobody has. Raises `UsageError` when only a taken one would do."""
        name = claim.name
        if name in self._models and claim.is_exact:
            raise UsageError(
                f"the cluster has a model {name!r} already, served by {self._models[name].member}",
                "attach to it, or choose another name",
            )
        tried = chain([name], (f"{name}-{number}" for number in count(2)))
        name = next(name for name in tried if name not in self._models)
        self._models[name] = Listed(name, claim.path, claim.member)
        return name

    def join(self, models: Iterable[Listed]) -> tuple[str, ...]:
        """Take in what a member served before; names that somebody else has by now."""
        taken = []
        for model in models:
            if self._is_of_another(model):
                taken.append(model.name)
            else:
                self._models[model.name] = model
        return tuple(taken)

    def publish(self, model: Listed) -> None:
        """A model is open. Raises `JitllmError` when its name is somebody else's by now."""
        if self._is_of_another(model):
            raise JitllmError(f"the name {model.name!r} was given to another model meanwhile")
        self._models[model.name] = model

    def withdraw(self, member: str, name: str) -> None:
        """A name is free, if it was the member's."""
        if name in self._models and self._models[name].member == member:
            del self._models[name]

    def leave(self, member: str) -> None:
        """A member is gone, and its models with it."""
        self._models = {name: m for name, m in self._models.items() if m.member != member}

    def update(self, name: str, state: ModelState, placement: str | None = None) -> None:
        """How a model is by now, if it is still there."""
        if name in self._models:
            model = self._models[name]
            placement = model.placement if placement is None else placement
            self._models[name] = replace(model, state=state, placement=placement)

    def model(self, name: str) -> Listed:
        """By name. Raises `UsageError` when there is none."""
        if name not in self._models:
            there = f"there are {', '.join(self._models)}" if self._models else "there is none"
            raise UsageError(f"the cluster has no model {name!r}", there)
        return self._models[name]

    @property
    def models(self) -> tuple[Listed, ...]:
        """In the order in which their names were given."""
        return tuple(self._models.values())

    def _is_of_another(self, model: Listed) -> bool:
        return self._models.get(model.name, model).member != model.member

    # --- nodes -------------------------------------------------------------------------------

    def see(self, up: Mapping[str, str]) -> None:
        """These nodes are up, names by id, and no others. Who comes back is not lost."""
        gone = {node_id: node.name for node_id, node in self._nodes.items() if node_id not in up}
        lost = {**self._lost, **gone}.items()
        self._lost = {node_id: name for node_id, name in lost if name not in up.values()}
        self._nodes = {
            node_id: NodeListed(name, node_id, node.host if node else None)
            for node_id, name in up.items()
            for node in [self._nodes.get(node_id)]
        }

    def report(self, node_id: str, host: HostReport) -> None:
        """What a node has to offer, if it is still there."""
        if node_id in self._nodes:
            self._nodes[node_id] = replace(self._nodes[node_id], host=host)

    @property
    def nodes(self) -> tuple[NodeListed, ...]:
        """Those that are up."""
        return tuple(self._nodes.values())

    @property
    def health(self) -> Health:
        """Lost nodes, as long as a model is there that had a device on one.

        A cluster grows and shrinks, and nodes that nobody missed are no news.
        """
        used = {
            device.node_id
            for model in self._models.values()
            if model.working
            for device in model.working.devices
        }
        self._lost = {node_id: name for node_id, name in self._lost.items() if node_id in used}
        return Health(tuple(sorted(set(self._lost.values()))))
