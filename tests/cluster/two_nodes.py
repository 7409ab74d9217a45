"""What `test_two_nodes` runs within a cluster of two nodes.

`python -m` with the name of a function, a model, the address of the cluster and the name of the
other node.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from jitllm.compose import attach, membership, open_engine
from jitllm.config import EngineConfig
from tests.models.native import reply
from tests.models.test_moves import REQUESTS, bits, moving, quiet


async def moves(model: Path, address: str, other: str) -> None:
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
        assert bits(replies) == [{answer} for answer in expected], "moved between two nodes"
        assert all(moved.bytes_before + moved.bytes_paused for moved in done), done
        print(*done, sep="\n")
    finally:
        await loaded.close()


async def loses(model: Path, address: str, other: str) -> None:
    """Both nodes offer their devices, and one that leaves is missed; it leaves after "ready"."""
    expected = [answer.bits for answer in await quiet(model, REQUESTS[:1])]
    config = EngineConfig(devices=f"cpu:0,{other}/cpu:0,{other}/cpu:1", threads=1)
    async with membership(address) as member:
        nodes = {node.name: node for node in await member.nodes()}
        assert len(nodes) == 2, nodes
        assert nodes[other].node_id != member.node_id, nodes
        for node in nodes.values():
            assert node.host is not None, node
            assert node.host.devices[0].free_bytes > 0, node
        loaded = await open_engine(model, config, ray=address, name="wide", member=member)
        attached = await attach(address, "wide")
        try:
            threads = {use.name: use.threads for use in (await loaded.engine.stats()).devices}
            ours = [threads[f"{other}/cpu:{number}"] for number in range(2)]
            host = nodes[other].host
            assert host is not None
            assert sum(ours) == host.threads, "two devices share the cores of their node"
            print("ready", flush=True)
            while other not in member.health.lost:  # noqa: ASYNC110 - the test's own limit ends it
                await asyncio.sleep(0.1)
            assert [node.node_id for node in await member.nodes()] == [member.node_id]
            for engine in (loaded.engine, attached.engine):
                assert [(await reply(engine, REQUESTS[0])).bits] == expected, "on what is left"
        finally:
            await attached.close()
            await loaded.close()
        while member.health.lost:  # noqa: ASYNC110 - no model misses it
            await asyncio.sleep(0.1)


if __name__ == "__main__":
    what = {"moves": moves, "loses": loses}[sys.argv[1]]
    asyncio.run(what(Path(sys.argv[2]), sys.argv[3], sys.argv[4]))
