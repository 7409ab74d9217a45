"""The models of a server, as the HTTP edge sees them.

Knows what a request needs of a model. How models are opened is up to whoever implements `Models`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from jitllm.config import KvType
from jitllm.engine import Engine, Pages

if TYPE_CHECKING:
    from jitllm.formats.jlm import Header
    from jitllm.text.chat import ChatTemplate
    from jitllm.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, eq=False)
class Served:
    """A model at work.

    id, aliases: what requests call it. chat: None for a base model. context_tokens: longest
    history. vocab_tokens: ids below it may be in a prompt. loaded_at_s: unix time. max_together:
    sequences of one request that are submitted together. where: what a reply says about the place
    that it was computed at. notes: what about that place makes replies slower than they could be.
    """

    id: str
    path: Path
    engine: Engine
    tokenizer: Tokenizer
    chat: ChatTemplate | None
    header: Header
    context_tokens: int
    vocab_tokens: int
    loaded_at_s: float
    aliases: tuple[str, ...] = ()
    max_together: int = 16
    where: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Load:
    """A model that is to be opened; None leaves a choice to the server's own flags.

    path: a container. id: by default the file's name.
    """

    path: Path
    id: str | None = None
    maxmem_bytes: int | None = None
    ctx_tokens: int | None = None
    kv_type: KvType | None = None


class Models(Protocol):
    """The models of one server."""

    def list(self) -> Sequence[Served]:
        """Every model that answers requests."""

    def get(self, model_id: str) -> Served | None:
        """The model of that id or alias."""

    async def load(self, load: Load) -> Served:
        """Open a model. Raises UsageError for an id that is taken, and what opening raises."""

    async def unload(self, model_id: str) -> None:
        """Close a model that nobody uses; from here on `get` does not find it."""

    async def place(self, model_id: str, budget_bytes: int) -> Pages:
        """Give a model that is loaded another host budget; returns what was reached."""

    async def devices(self) -> Sequence[Mapping[str, Any]]:
        """What could compute here: name, kind, label, cores, free_bytes, total_bytes, models, and
        `declined`, the reason why it does not."""

    async def cluster(self) -> Sequence[Mapping[str, Any]]:
        """Models of the cluster that the server is in, its own too: id, path, state, member (who
        serves it), is_here, placement, devices. None where there is no cluster."""

    async def drain(self, model_id: str, is_draining: bool) -> None:
        """Have a model of the cluster refuse requests, or take them again."""

    def notes(self) -> Sequence[str]:
        """What makes replies slower than they could be, and what is wrong around the server."""
