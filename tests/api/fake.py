"""A served model that costs nothing: it says its letters, and can be told to wait, fail or refuse.

Every token's log-probability and its rivals are functions of the token, so that a test knows them.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jitllm.api.models import Load, Served
from jitllm.engine import (
    Delta,
    DeviceUse,
    EngineStats,
    Finish,
    Moved,
    MoveTotals,
    Outputs,
    Pages,
    ParkedIn,
    Request,
    SequenceState,
    SessionState,
    TopLogprobs,
    Usage,
)
from jitllm.errors import (
    ContextOverflow,
    Draining,
    JitllmError,
    QueueFull,
    UnknownSession,
    UsageError,
)
from jitllm.schedule.placement import Decline, Placement
from jitllm.schedule.placement_map import attached, parse_map
from jitllm.text.chat import ChatTemplate
from tests.cli.fake import BOS, EOS, VOCAB, ByteTokenizer, fake_stats

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system comes first') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}|{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


class Tokenizer(ByteTokenizer):
    """A token is a byte."""

    def encode_rendered(self, text: str) -> list[int]:
        return self.encode(text)

    def text(self, ids: Sequence[int]) -> str:
        return self.decode(ids).decode(errors="replace")

    def prepare(self) -> None:
        pass


def logprob_of(token_id: int) -> float:
    """What the fake model thinks of a token, wherever it stands."""
    return -math.log(2 + token_id)


def rivals_of(token_id: int, num: int) -> TopLogprobs:
    """The likeliest in its place."""
    return tuple(((token_id + i) % VOCAB, logprob_of(token_id) - i) for i in range(num))


DEVICES = ("cpu:0", "cpu:1")


@dataclass
class FakeEngine:
    """Says `says` and EOS, from the seed's place on if it samples.

    width: tokens of a delta. gate: a reply waits for it before every delta but the first `free`.
    fails_at: `error` comes instead of that token. max_queue: more requests at once are refused.
    """

    says: bytes = b"Hello, world"
    width: int = 1
    context_tokens: int = 256
    gate: asyncio.Event | None = None
    free: int = 0
    fails_at: int | None = None
    error: Exception | None = None
    max_queue: int = 1000
    cached_tokens: int = 0
    requests: list[Request] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    num_cancelled: int = 0
    steps: int = 0
    budget_bytes: int = 64 << 20
    states: list[SessionState] = field(default_factory=list)
    park_error: Exception | None = None
    is_closed: bool = False
    is_dead: bool = False
    placement: Placement = field(default_factory=lambda: Placement.all_on("cpu:0", 4))
    moves: list[Moved] = field(default_factory=list)
    declines: tuple[Decline, ...] = ()
    sent_home: int = 0
    brought_back: int = 0
    losses: int = 0
    lost: tuple[str, ...] = ()
    move_gate: asyncio.Event | None = None
    move_waiting: bool = False
    is_draining: bool = False

    async def drain(self, *, is_draining: bool = True) -> None:
        self.is_draining = is_draining

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        if self.is_draining:
            raise Draining()
        if len(request.prompt) > self.context_tokens:
            raise ContextOverflow(len(request.prompt), self.context_tokens)
        if self.running >= self.max_queue:
            raise QueueFull(self.max_queue, retry_after_s=2.5)
        self.requests.append(request)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        state = SessionState(request.name, SequenceState.RUNNING, len(request.prompt), 0, 1 << 20)
        self.states.append(state)
        is_finished = False
        try:
            for number, delta in enumerate(self._deltas(request)):
                await asyncio.sleep(0)
                if self.gate is not None and number >= self.free:
                    await self.gate.wait()
                self.steps += 1
                is_finished = delta.finish is not None
                yield delta
        finally:
            self.running -= 1
            self.states.remove(next(s for s in self.states if s.name == request.name))
            self.num_cancelled += not is_finished

    def reply(self, request: Request) -> tuple[list[int], Finish]:
        """All tokens of a reply, and why it ends."""
        room = self.context_tokens - len(request.prompt)
        most = room if request.max_tokens is None else min(request.max_tokens, room)
        start = random.Random(request.sampling.seed).randrange(len(self.says))
        turn = start if request.sampling.temperature else 0
        source = [*self.says[turn:], *self.says[:turn], EOS]
        biased = {id for id, bias in request.sampling.logit_bias if bias == -100}
        ids: list[int] = []
        while len(ids) < most:
            token_id = source[len(ids) % len(source)]
            if token_id in request.stop_ids:
                return ids, Finish.STOP
            ids.append(ord("_") if token_id in biased else token_id)
        return ids, Finish.LENGTH

    def _deltas(self, request: Request) -> Iterator[Delta]:
        prompt, num_top = request.prompt, request.top_logprobs
        if request.outputs is Outputs.ALL:
            for start in range(0, len(prompt), 4):
                part = prompt[max(start, 1) : start + 4]
                yield Delta(
                    prompt_logprobs=tuple(map(logprob_of, part)),
                    prompt_top_logprobs=tuple(rivals_of(i, num_top) for i in part if num_top),
                )
        ids, finish = self.reply(request)
        cached = min(self.cached_tokens, len(prompt))
        for start in range(0, len(ids), self.width):
            if self.fails_at is not None and start >= self.fails_at:
                yield Delta(finish=Finish.ERROR, error=self.error)
                return
            part = ids[start : start + self.width]
            yield Delta(
                tokens=tuple(part),
                logprobs=tuple(map(logprob_of, part)) if request.logprobs else (),
                top_logprobs=tuple(rivals_of(i, num_top) for i in part if num_top),
                usage=None if start else Usage(len(prompt), len(part), cached, 0.125, 0.25, 0),
            )
        if self.error is not None and self.fails_at is not None:
            yield Delta(finish=Finish.ERROR, error=self.error)
            return
        yield Delta(finish=finish, usage=Usage(len(prompt), len(ids), cached, 0.125, 0.25, 0.5))

    async def stats(self) -> EngineStats:
        if self.is_dead:
            raise RuntimeError("the scheduler is gone")
        pages = Pages(4, 4, 4, 4, 0, 4 << 20, self.budget_bytes, 1 << 20, 0)
        totals = MoveTotals()
        for moved in self.moves:
            totals = totals.plus(moved)
        return fake_stats(
            pages,
            self.steps,
            self.context_tokens,
            running=self.running,
            placement=self.placement,
            devices=tuple(map(self._use, self._living)),
            declines=self.declines,
            moves=len(self.moves),
            moved_blocks=2 * len(self.moves),
            move_totals=totals,
            last_move=self.moves[-1] if self.moves else None,
            sent_home=self.sent_home,
            brought_back=self.brought_back,
            losses=self.losses,
            lost=self.lost,
        )

    @property
    def _living(self) -> tuple[str, ...]:
        return tuple(name for name in DEVICES if name not in self.lost)

    def _use(self, name: str) -> DeviceUse:
        """A MiB for each block, keys and values of as much."""
        blocks = len(self.placement.blocks_on(name))
        num_bytes = blocks << 20
        has_head = self.placement.head == name
        return DeviceUse(
            *(name, "", 1, "plain", blocks, has_head, blocks, num_bytes, blocks, blocks),
            *(16, 3 * blocks, num_bytes, 0, 0, self.budget_bytes // 2, 1 << 19),
        )

    async def move(
        self, blocks: Iterable[int], to: str, *, head: bool = False, is_live: bool = True
    ) -> Moved:
        if self.move_gate is not None:
            self.move_waiting = True
            await self.move_gate.wait()
        if self.is_closed:
            raise JitllmError("the scheduler has stopped")
        self.placement = self.placement.moved(list(blocks), attached(to, self._living), head=head)
        self.moves.append(self._moved(str(blocks), to))
        return self.moves[-1]

    async def place(self, placement: str, *, strict: bool = False) -> tuple[Moved, ...]:
        target, self.declines = parse_map(placement).resolve(
            4, self._living, self.placement, strict=strict
        )
        moves = [self._moved(str(m), m.to) for m in self.placement.moves_to(target)]
        self.placement = replace(target, epoch=self.placement.epoch + len(moves))
        self.moves += moves
        return tuple(moves)

    def _moved(self, blocks: str, to: str) -> Moved:
        sizes = {"bytes_before": 3 << 20, "bytes_paused": 1 << 10, "weight_bytes": 1 << 20}
        return Moved(
            blocks,
            to,
            str(self.placement),
            self.placement.epoch,
            pause_s=0.0025,
            prepare_s=0.5,
            **sizes,
            weights_from={"frames": 1},
            pages=12,
            rounds=2,
            tokens_meanwhile=7,
        )

    async def park(self, name: str, to: ParkedIn = "disk") -> tuple[SessionState, ...]:
        return self._parked(name, to)

    async def resume(self, name: str) -> tuple[SessionState, ...]:
        return self._parked(name, None)

    def _parked(self, name: str, to: ParkedIn | None) -> tuple[SessionState, ...]:
        if self.park_error is not None:
            raise self.park_error
        if not any(state.name == name for state in self.states):
            raise UnknownSession(name)
        for at, state in enumerate(self.states):
            if state.name == name and to is not None:
                self.states[at] = replace(
                    state, state=SequenceState.PARKED, parked_in=to, parked_bytes=state.kv_bytes
                )
            elif state.name == name:
                self.states[at] = replace(
                    state, state=SequenceState.WAITING, parked_in="", parked_bytes=0
                )
        return tuple(state for state in self.states if state.name == name)

    async def sessions(self) -> tuple[SessionState, ...]:
        return tuple(self.states)

    async def set_budget(self, budget_bytes: int) -> Pages:
        self.budget_bytes = budget_bytes
        return (await self.stats()).pages

    async def close(self) -> None:
        self.is_closed = True


def header() -> Any:
    """As much of a container's header as is looked at."""
    extent = SimpleNamespace(offset=4096, length=1 << 20, xxh3=0)
    return SimpleNamespace(
        arch="fake",
        config={"attention.head_count": 4},
        stop_ids=(EOS,),
        dense=extent,
        blocks=(extent,) * 4,
        weight_bytes=5 * extent.length,
        frame_bytes=(extent.length,) * 4,
        chat_templates={"default": TEMPLATE},
    )


def served(engine: FakeEngine, id: str = "fake", **more: Any) -> Served:
    """A model at work."""
    fields: dict[str, Any] = {
        "id": id,
        "path": Path("/models/fake.jlm"),
        "engine": engine,
        "tokenizer": Tokenizer(),
        "chat": ChatTemplate(TEMPLATE),
        "header": header(),
        "context_tokens": engine.context_tokens,
        "vocab_tokens": VOCAB,
        "loaded_at_s": 1e9,
        "where": {"runtime": "fake", "devices": ["cpu"]},
    }
    return Served(**fields | more)


class FakeModels:
    """Implements `Models` without files."""

    def __init__(self, *loaded: Served) -> None:
        self.loaded = {served.id: served for served in loaded}
        self.elsewhere: dict[str, bool] = {}
        """Models of others, and whether they drain."""

    def list(self) -> Sequence[Served]:
        return list(self.loaded.values())

    def get(self, model_id: str) -> Served | None:
        found = self.loaded.get(model_id)
        return found or next((s for s in self.list() if model_id in s.aliases), None)

    async def load(self, load: Load) -> Served:
        model_id = load.id or load.path.stem
        if model_id in self.loaded:
            raise UsageError(f"the id {model_id!r} is taken")
        if not load.path.name.endswith(".jlm"):
            raise FileNotFoundError(2, "No such file or directory", str(load.path))
        self.loaded[model_id] = replace(served(FakeEngine(), model_id), path=load.path)
        return self.loaded[model_id]

    async def unload(self, model_id: str) -> None:
        await self.loaded.pop(model_id).engine.close()

    async def place(self, model_id: str, budget_bytes: int) -> Pages:
        return await self.loaded[model_id].engine.set_budget(budget_bytes)

    async def devices(self) -> Sequence[Mapping[str, Any]]:
        return [{"name": "cpu:0", "kind": "cpu", "free_bytes": 1 << 30, "declined": None}]

    async def cluster(self) -> Sequence[Mapping[str, Any]]:
        return [{"id": model_id, "is_here": False} for model_id in self.elsewhere]

    async def drain(self, model_id: str, is_draining: bool) -> None:
        self.elsewhere[model_id] = is_draining

    def notes(self) -> Sequence[str]:
        return [note for served in self.list() for note in served.notes]


__all__ = ["BOS", "EOS", "VOCAB", "FakeEngine", "FakeModels", "served"]
