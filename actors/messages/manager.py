"""What the manager of a cluster is told and asked, and what it answers: members, models, nodes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from actors.actor import Message, Ref
from actors.parts import Parts
from jitllm.config import ResolvedConfig
from jitllm.memory.host import HostReport


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A device of a model as others reach it: its name in placements, its node, its actors.

    node: as it was called when the model was opened: the names of nodes depend on each other.
    """

    name: str
    node: str
    node_id: str
    device: Ref
    pager: Ref


@dataclass(frozen=True, slots=True)
class Working:
    """What a model that is open works with: all that others need to use it too."""

    scheduler: Ref
    devices: tuple[Neighbour, ...]
    config: ResolvedConfig
    fingerprint: tuple[tuple[str, str | int], ...]
    """Of the container, so that another file under the same path is noticed."""


ModelState = Literal["loading", "ready", "draining", "lost"]
"""lost: its scheduler is dead, and whoever serves it has not closed it yet."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A model of the cluster. member: who serves it. placement: where its blocks are."""

    name: str
    path: Path
    member: str
    state: ModelState = "loading"
    placement: str = ""
    working: Working | None = None
    """None while it loads."""


@dataclass(frozen=True, slots=True)
class NodeListed:
    """A node of the cluster, and what it offers; None before it said so, or when it is gone."""

    name: str
    node_id: str
    host: HostReport | None


@dataclass(frozen=True, slots=True)
class Listing:
    """Every model of the cluster, in the order of loading."""

    models: tuple[Listed, ...]


@dataclass(frozen=True, slots=True)
class NodeListing:
    """Every node that is up."""

    nodes: tuple[NodeListed, ...]


@dataclass(frozen=True, slots=True)
class Health:
    """What is wrong with a cluster. lost: nodes that are gone and had devices of models."""

    lost: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Join(Message[Parts[Health]]):
    """Be a member until this is followed no more: what a member serves is forgotten then.

    models: what it serves already, because the manager that knew them is gone. Answered at once
    with how the cluster is, and then whenever that changes.
    """

    member: str
    models: tuple[Listed, ...] = ()


@dataclass(frozen=True, slots=True)
class Claim(Message[str]):
    """Keep a name for a model that a member is about to load; which one it is.

    is_exact: this name or none, refused with `UsageError`; otherwise a number makes it unique.
    """

    member: str
    name: str
    path: Path
    is_exact: bool


@dataclass(frozen=True, slots=True)
class Publish(Message[None]):
    """A model is open: others may use it. Twice is as good as once."""

    model: Listed


@dataclass(frozen=True, slots=True)
class Withdraw(Message[None]):
    """A model is closed, or will not be opened: its name is free. Twice does no harm."""

    member: str
    name: str


@dataclass(frozen=True, slots=True)
class DrainModel(Message[None]):
    """Have the scheduler of a model `Drain`. Raises `UsageError` for a model that there is not."""

    name: str
    is_draining: bool = True


@dataclass(frozen=True, slots=True)
class ModelsRequest(Message[Listing]):
    """Say which models there are, and where their blocks are by now."""


@dataclass(frozen=True, slots=True)
class NodesRequest(Message[NodeListing]):
    """Say which nodes there are, and what they have to offer by now."""


ManagerMessage = Join | Claim | Publish | Withdraw | DrainModel | ModelsRequest | NodesRequest
