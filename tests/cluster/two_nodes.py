"""What `test_two_nodes` runs within a cluster of two nodes: `python -m` with a model, the address
of the cluster and the name of the other node."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from jitllm.compose import open_engine
from jitllm.config import EngineConfig
from tests.models.native import reply
from tests.models.test_moves import REQUESTS, moving, quiet


async def main(model: Path, address: str, other: str) -> None:
    """Replies over both nodes, and blocks that go from one to the other in the middle of them."""
    requests = REQUESTS[:2]
    expected = [answer.bits for answer in await quiet(model, requests)]
    here, there = "cpu:0", f"{other}/cpu:0"
    config = EngineConfig(
        devices=f"{here},{there}",
        placement=f"0={here},1={there},*={here}",
        page_sizes=((here, 16), (there, 4)),
        threads=1,
        move_share=0.9,
    )
    loaded = await open_engine(model, config, ray=address, name="two-nodes")
    try:
        engine = loaded.engine
        split = [await reply(engine, request) for request in requests]
        assert [answer.bits for answer in split] == expected, "split over two nodes"
        blocks = range(loaded.graph.num_blocks)
        moves = [(blocks, there, True), ([1], here, False), ([0, 2], here, True)]
        replies, done = await moving(engine, requests, moves)
        assert [answer.bits for answer in replies] == expected, "moved between two nodes"
        assert len(done) == 3, done
        assert all(moved.bytes_before + moved.bytes_paused for moved in done), done
        print(*done, sep="\n")
    finally:
        await loaded.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
