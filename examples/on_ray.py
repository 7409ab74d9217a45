"""A model whose scheduler, device and pager are processes of a Ray cluster.

python examples/on_ray.py MODEL.jlm "The capital of France is"              (starts a cluster)
python examples/on_ray.py MODEL.jlm "The capital of France is" --ray auto   (joins the one here)
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import jitllm


async def main(path: Path, prompt: str, max_tokens: int, ray: str) -> None:
    """One reply, token by token, with the engine in other processes."""
    async with jitllm.connect(f"ray:{ray}", model=path) as model:
        num_tokens = 0
        async for delta in model.generate(prompt, max_tokens=max_tokens):
            print(delta.text, end="", flush=True)
            num_tokens += len(delta.tokens)
        print(f"\n{num_tokens} tokens, on a cluster")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("prompt")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--ray", default="local", help="local, auto or HOST:PORT")
    arguments = parser.parse_args()
    asyncio.run(main(arguments.model, arguments.prompt, arguments.max_tokens, arguments.ray))
