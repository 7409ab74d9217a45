"""`jitllm verify`: whether a device computes what the CPU does."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jitllm.cli import report
from jitllm.cli.agreement import Agreement
from jitllm.cli.asking import text_ids
from jitllm.cli.command import INTERRUPTED, AsJson, verb
from jitllm.cli.interrupts import finished
from jitllm.cli.loading import opened
from jitllm.cli.options import Model, TextFile, Words, engine_flags, given_text
from jitllm.cli.reply import answered
from jitllm.cli.screen import note, print_json, say
from jitllm.cli.speed import SENTENCE
from jitllm.config import EngineConfig
from jitllm.devices.grammar import SETS, parse_devices
from jitllm.engine import Delta, Engine, EngineStats, Outputs, Request
from jitllm.errors import JitllmError, UsageError
from jitllm.units import counted, format_size

if TYPE_CHECKING:
    from jitllm.compose import Loaded

EXAMPLES = """
    jitllm verify model.jlm -devices vulkan:0
    jitllm verify model.jlm -devices vulkan:0 -n 64 -dlogit 0.5
    jitllm verify model.jlm -devices vulkan:0 -migrate     (blocks go home and back meanwhile)
    jitllm verify model.jlm -devices vulkan:0 -prefill 256
    jitllm verify model.jlm -devices cuda -json
"""

HOST = "cpu:0"
STEPS_BETWEEN_MOVES = 4

_STOPS = (0.5, 0.0, 0.5, 1.0)
"""Of the blocks, how many are on the device after each move."""

Row = Sequence[float]


@dataclass(slots=True)
class Found:
    """What a run has shown. `ids`: what the CPU said; its rows stand beside the device's."""

    agreement: Agreement
    ids: tuple[int, ...] = ()
    cpu_s: float = 0.0
    device_s: float = 0.0
    devices: tuple[str, ...] = ()
    """Those that took blocks and are not the CPU, in words."""
    weight_bytes: int = 0
    placements: tuple[str, ...] = ()
    """Where the blocks were in turn, with -migrate."""
    prefill: dict[str, Any] | None = None


@engine_flags
def verify(
    model: Model,
    text: Words = None,
    *,
    file: TextFile = None,
    num_decode: Annotated[
        int, typer.Option("-n", metavar="N", help="Tokens to decode and compare.")
    ] = 32,
    band: Annotated[
        float,
        typer.Option(
            "-dlogit",
            metavar="X",
            help="Most that a logit may be off; another likeliest token is a tie where the CPU has "
            "the two no further apart. 0: no limit, and every position must have the same one.",
        ),
    ] = 0.0,
    prefill: Annotated[
        int,
        typer.Option(
            "-prefill",
            metavar="N",
            help="Compute a prompt of N tokens on the device at once and one by one, and twice "
            "the same: the logits must be equal.",
        ),
    ] = 0,
    migrate: Annotated[
        bool,
        typer.Option(
            "-migrate",
            help="Move blocks between the device and the CPU meanwhile: half of them, all, half, "
            "none, a move every 4 tokens.",
        ),
    ] = False,
    json: AsJson = False,
    config: EngineConfig,
) -> int:
    """Compare a device with the CPU, logit by logit.

    The CPU continues the text (a sentence of its own if there is none) by -n tokens. The device
    then computes the same tokens one by one, so that one difference does not lead to another, and
    its logits are compared with the CPU's at every position. The exit code is 1 for a disagreement,
    for a logit that is no number, and for a device that took nothing.
    """
    if num_decode < 1 or prefill < 0 or not 0 <= band < math.inf:
        raise UsageError(
            "there is nothing to compare", "choose -n from 1, -prefill and -dlogit from 0"
        )
    given = given_text(text, file, keep_newline=True) if text or file else SENTENCE
    assert given is not None
    found = Found(Agreement(band))
    is_finished = asyncio.run(_verify(model, config, given, num_decode, prefill, migrate, found))
    if not is_finished:
        return INTERRUPTED
    if json:
        print_json(_json(found))
    else:
        say("".join(f"{line}\n" for line in _lines(found)))
    _judge(found)
    return 0


async def _verify(
    path: Path,
    config: EngineConfig,
    text: str,
    num_decode: int,
    prefill: int,
    migrate: bool,
    found: Found,
) -> bool:
    config = replace(config, share_prefixes=False)  # what is remembered is not computed
    host = replace(config, devices=HOST, placement=None, gpu_layers=-1)
    rows: list[Row] = []
    async with opened(path, host) as loaded:
        prompt = tuple(text_ids(loaded, text))
        note(f"cpu: {counted(num_decode, 'token')} after {counted(len(prompt), 'token')}")
        if not await finished(_continue(loaded.engine, prompt, num_decode, rows, found)):
            return False
    if migrate:
        config = replace(config, devices=_with_host(config.devices))
    async with opened(path, config) as loaded:
        start = await loaded.engine.stats()
        for line in report.before(loaded, start):
            note(line)
        _take(start, found)
        if not found.devices:
            return True
        if not await finished(_follow(loaded, prompt, rows, migrate, found)):
            return False
        return prefill == 0 or await finished(_prefill(loaded, prompt, prefill, found))


async def _continue(
    engine: Engine, prompt: tuple[int, ...], num_decode: int, rows: list[Row], found: Found
) -> None:
    """What the CPU says after a prompt, and with which logits."""
    ids: list[int] = []
    first_s = 0.0
    request = Request(prompt, max_tokens=num_decode, logits=True)
    async with answered(engine, request) as deltas:
        async for delta in deltas:
            ids += delta.tokens
            first_s = first_s or time.perf_counter()
            rows += _rows(delta)
    found.ids = tuple(ids)
    found.cpu_s = (time.perf_counter() - first_s) / max(len(ids) - 1, 1)


async def _follow(
    loaded: Loaded, prompt: tuple[int, ...], rows: list[Row], migrate: bool, found: Found
) -> None:
    """The same positions on the device, each a step of its own; again until the walk was made."""
    walk = _Walk(loaded) if migrate else None
    try:
        await _pass(loaded.engine, prompt, rows, walk, found)
        while walk is not None and not walk.is_over:
            await _pass(loaded.engine, prompt, rows, walk, found)
    finally:
        if walk is not None:
            found.placements = await walk.end()


async def _pass(
    engine: Engine, prompt: tuple[int, ...], rows: list[Row], walk: _Walk | None, found: Found
) -> None:
    request = Request(
        (*prompt, *found.ids[:-1]), max_tokens=0, logits=True, outputs=Outputs.ALL, chunk_tokens=1
    )
    position = 1 - len(prompt)  # what comes after the prompt is 0
    began_s = time.perf_counter()
    compared_s = 0.0
    async with answered(engine, request) as deltas:
        async for delta in deltas:
            compare_s = time.perf_counter()
            for row in _rows(delta):
                if position >= 0:
                    found.agreement.add(position, rows[position], row)
                position += 1
            compared_s += time.perf_counter() - compare_s
            if walk is not None and position % STEPS_BETWEEN_MOVES == 0:
                await walk.on()
    found.device_s = (time.perf_counter() - began_s - compared_s) / len(request.prompt)


def _with_host(devices: str) -> str:
    """A device list with the CPU in it, for blocks to move to; `auto` and `all` have it already."""
    has_host = any(e.backend in SETS or e.name == HOST for e in parse_devices(devices))
    return devices if has_host else f"{devices},{HOST}"


class _Walk:
    """Moves the border between the device and the CPU, one move after the other."""

    def __init__(self, loaded: Loaded) -> None:
        self._engine = loaded.engine
        self._num_blocks = loaded.graph.num_blocks
        self._stop = 0
        self._moving: asyncio.Task[str] | None = None
        self._been: list[str] = []

    async def on(self) -> None:
        """Begin the next move, unless one is under way."""
        if self._moving is not None and not self._moving.done():
            return
        await self._land()
        num_blocks = int(_STOPS[self._stop % len(_STOPS)] * self._num_blocks)
        self._stop += 1
        self._moving = asyncio.create_task(self._place(num_blocks))

    @property
    def is_over(self) -> bool:
        """Whether it was everywhere once."""
        return self._stop >= len(_STOPS)

    async def _place(self, num_blocks: int) -> str:
        stats = await self._engine.stats()
        device = next(use.name for use in stats.devices if use.name != HOST)
        others = device if num_blocks == self._num_blocks else HOST
        first = f"0-{num_blocks - 1}={device}," if 0 < num_blocks < self._num_blocks else ""
        await self._engine.place(f"{first}*={others},head={others}", strict=True)
        return str((await self._engine.stats()).placement)

    async def _land(self) -> None:
        if self._moving is not None:
            moving, self._moving = self._moving, None
            self._been.append(await moving)

    async def end(self) -> tuple[str, ...]:
        """Where the blocks were in turn, after the last move has ended."""
        await self._land()
        return tuple(self._been)


async def _prefill(loaded: Loaded, prompt: tuple[int, ...], num_tokens: int, found: Found) -> None:
    """A prompt at once and again, and one by one: one arithmetic, so the same logits."""
    ids = tuple(islice(cycle(prompt), num_tokens))
    request = Request(ids, max_tokens=0, logits=True, outputs=Outputs.ALL)
    whole = await _logits(loaded.engine, request)
    again = await _logits(loaded.engine, request)
    single = await _logits(loaded.engine, replace(request, chunk_tokens=1))
    together = Agreement()
    for position, (many, one) in enumerate(zip(whole, single, strict=True)):
        together.add(position, one, many)
    found.prefill = {
        "tokens": num_tokens,
        "repeats": whole == again,
        "equal": whole == single,
        "worst_dlogit": together.largest,
        "not_finite": together.not_finite,
    }


async def _logits(engine: Engine, request: Request) -> list[Row]:
    rows: list[Row] = []
    async with answered(engine, request) as deltas:
        async for delta in deltas:
            rows += _rows(delta)
    return rows


def _rows(delta: Delta) -> list[Row]:
    """The rows of a delta's logits."""
    if delta.logits is None:
        return []
    flat, vocab = delta.logits.view().cast("B").cast("f"), delta.logits.vocab
    return [flat[row * vocab : (row + 1) * vocab] for row in range(delta.logits.rows)]


def _take(stats: EngineStats, found: Found) -> None:
    """Which devices took something."""
    taken = [use for use in stats.devices if use.name != HOST and (use.blocks or use.has_head)]
    found.devices = tuple(
        f"{use.name}: {counted(use.blocks, 'block')}{' + head' * use.has_head}" for use in taken
    )
    found.weight_bytes = sum(use.placed_bytes for use in taken)


def _judge(found: Found) -> None:
    """Raises for everything but agreement."""
    if not found.devices:
        raise JitllmError(
            "no device but the CPU took a block",
            "name one that `jitllm hardware` lists, with -devices",
        )
    remedy = "compare other models and prompts, and report the device with its driver"
    if found.agreement.problem:
        raise JitllmError(f"the device disagrees: {found.agreement.problem}", remedy)
    if found.prefill is not None:
        if (position := found.prefill["not_finite"]) is not None:
            raise JitllmError(f"a logit of position {position} of a prompt is not a number", remedy)
        if not found.prefill["repeats"]:
            raise JitllmError("the same prompt twice gave other logits", remedy)
        if not found.prefill["equal"]:
            off = found.prefill["worst_dlogit"]
            raise JitllmError(
                f"a prompt at once is not what it is token by token: off by {off:.4g}", remedy
            )


def _lines(found: Found) -> list[str]:
    if not found.devices:
        return []
    cpu, device = 1 / found.cpu_s if found.cpu_s else 0.0, 1 / found.device_s
    ratio = f"   {device / cpu:.2f}x" if cpu else ""
    lines = [
        f"cpu {cpu:.1f} tok/s   device {device:.1f} tok/s{ratio}   {', '.join(found.devices)}, "
        f"{format_size(found.weight_bytes)} of weights"
    ]
    lines += [f"moved: {placement}" for placement in found.placements]
    lines += found.agreement.lines()
    if (prefill := found.prefill) is not None:
        verdict = "equal" if prefill["equal"] else f"off by {prefill['worst_dlogit']:.4g}"
        lines.append(
            f"prompt of {prefill['tokens']} at once and one by one: {verdict}; twice the same: "
            f"{'yes' if prefill['repeats'] else 'no'}"
        )
    return lines


def _json(found: Found) -> dict[str, Any]:
    return {
        "cpu_tok_s": 1 / found.cpu_s if found.cpu_s else None,
        "device_tok_s": 1 / found.device_s if found.device_s else None,
        "devices": list(found.devices),
        "weight_bytes": found.weight_bytes,
        "ids": list(found.ids),
        "placements": list(found.placements),
        "prefill": found.prefill,
        **found.agreement.as_json(),
    }


command = verb(verify, EXAMPLES)
