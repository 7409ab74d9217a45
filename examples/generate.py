"""Stream a reply from Python: open a model, ask, lower its memory budget half way, read the bill.

python examples/generate.py MODEL.jlm "The capital of France is"
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from jitllm.compose import open_engine
from jitllm.config import EngineConfig
from jitllm.engine import Request
from jitllm.units import format_size


async def main(model: Path, prompt: str, max_tokens: int) -> None:
    """One prompt, one reply; after half of it the engine must do with a third of its blocks."""
    loaded = await open_engine(model, EngineConfig())
    try:
        text = loaded.tokenizer.stream()
        ids = tuple(loaded.tokenizer.encode(prompt))
        request = Request(ids, max_tokens=max_tokens, stop_ids=frozenset(loaded.header.stop_ids))
        num_tokens = 0
        async for delta in loaded.engine.generate(request):
            if delta.error is not None:
                raise delta.error
            print(text.feed(delta.tokens), end="", flush=True)
            num_tokens += len(delta.tokens)
            if num_tokens == max_tokens // 2:
                pages = (await loaded.engine.stats()).pages
                largest = max(extent.length for extent in loaded.header.blocks)
                await loaded.engine.set_budget(pages.fixed_bytes + pages.blocks // 3 * largest)
        print(text.flush())
        pages = (await loaded.engine.stats()).pages
        print(
            f"{pages.resident} of {pages.blocks} blocks resident, {pages.page_ins} page-ins, "
            f"{format_size(pages.bytes_read)} read under {format_size(pages.budget_bytes)}"
        )
    finally:
        await loaded.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("prompt")
    parser.add_argument("--max-tokens", type=int, default=32)
    arguments = parser.parse_args()
    asyncio.run(main(arguments.model, arguments.prompt, arguments.max_tokens))
