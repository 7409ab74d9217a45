"""Move the blocks of a model to another device and back while it replies, and see what that took.

python examples/relocate.py MODEL.jlm "The capital of France is"
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import jitllm
from jitllm.config import EngineConfig
from jitllm.engine import Moved
from jitllm.handle import Handle
from jitllm.units import format_duration, format_size

DEVICES = ("cpu:0", "cpu:1")


async def main(path: Path, prompt: str, max_tokens: int) -> None:
    """The same reply twice: at rest, and with blocks that go from device to device."""
    config = EngineConfig(devices=",".join(DEVICES), placement=f"*={DEVICES[0]}")
    async with jitllm.connect(path, config=config) as model:
        quiet = await model.complete(prompt, max_tokens=max_tokens, ignore_eos=True)
        has_begun = asyncio.Event()
        moving = asyncio.create_task(wander(model, has_begun))
        tokens: list[int] = []
        async for delta in model.generate(prompt, max_tokens=max_tokens, ignore_eos=True):
            print(delta.text, end="", flush=True)
            tokens += delta.tokens
            has_begun.set()
        print("\n")
        for moved in await moving:
            print(line(moved))
        print("the same tokens" if tuple(tokens) == quiet.tokens else "OTHER TOKENS")


async def wander(model: Handle, has_begun: asyncio.Event) -> list[Moved]:
    """Every other block to the second device, then everything, then everything back."""
    await has_begun.wait()
    num_blocks = (await model.stats()).placement.num_blocks
    here, there = DEVICES
    return [
        await model.move(range(0, num_blocks, 2), to=there),
        *await model.place(f"*={there}"),
        *await model.place(f"*={here}"),
    ]


def line(moved: Moved) -> str:
    """What one move came to."""
    return (
        f"{moved.blocks} to {moved.to}: {format_duration(moved.pause_s)} of pause after "
        f"{format_duration(moved.prepare_s)} beside {moved.tokens_meanwhile} tokens; history "
        f"{format_size(moved.bytes_before)} before, {format_size(moved.bytes_paused)} in the pause"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("prompt")
    parser.add_argument("--max-tokens", type=int, default=256)
    arguments = parser.parse_args()
    asyncio.run(main(arguments.model, arguments.prompt, arguments.max_tokens))
