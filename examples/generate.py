"""Stream a reply from Python: open a model, ask, lower its memory budget half way, read the bill.

python examples/generate.py MODEL.jlm "The capital of France is"
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import jitllm
from jitllm.units import format_size


async def main(path: Path, prompt: str, max_tokens: int) -> None:
    """One prompt, one reply; after half of it the engine must do with one block at a time."""
    async with jitllm.connect(path) as model:
        num_tokens = 0
        async for delta in model.generate(prompt, max_tokens=max_tokens):
            print(delta.text, end="", flush=True)
            was_first_half = num_tokens < max_tokens // 2
            num_tokens += len(delta.tokens)
            if was_first_half and num_tokens >= max_tokens // 2:
                fixed_bytes = (await model.stats()).pages.fixed_bytes
                await model.place(maxmem=fixed_bytes + 1)
        print()
        pages = (await model.stats()).pages
        print(
            f"{pages.resident} of {pages.blocks} blocks resident, {pages.page_ins} page-ins, "
            f"{format_size(pages.bytes_read)} read under {format_size(pages.budget_bytes)}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("prompt")
    parser.add_argument("--max-tokens", type=int, default=32)
    arguments = parser.parse_args()
    asyncio.run(main(arguments.model, arguments.prompt, arguments.max_tokens))
