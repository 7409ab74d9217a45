"""Ask a server several things at once.

jitllmd serve -load MODEL.jlm
python examples/client.py http://127.0.0.1:8080 "Once upon a time" "The capital of France is"
"""

from __future__ import annotations

import argparse
import asyncio

import jitllm
from jitllm.handle import Handle


async def main(url: str, prompts: list[str], max_tokens: int) -> None:
    """All prompts together; the server computes their tokens in the same steps."""
    async with jitllm.connect(url) as model:
        print(f"{model.name} on {url}")
        await asyncio.gather(*(answer(model, prompt, max_tokens) for prompt in prompts))
        stats = await model.stats()
        print(f"{stats.steps} steps, {stats.pages.page_ins} page-ins")


async def answer(model: Handle, prompt: str, max_tokens: int) -> None:
    """A line for each reply: how long it waited, how fast it was, what it says."""
    reply = await model.complete(prompt, max_tokens=max_tokens, temperature=0.7, seed=1)
    usage = reply.usage
    rate = usage.generated_tokens / max(usage.prefill_s + usage.decode_s, 1e-9)
    print(f"{usage.queued_s * 1e3:.0f} ms queued, {rate:.0f} tokens/s: {prompt}{reply.text!r}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--max-tokens", type=int, default=32)
    arguments = parser.parse_args()
    asyncio.run(main(arguments.url, arguments.prompts, arguments.max_tokens))
