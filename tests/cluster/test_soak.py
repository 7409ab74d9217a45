"""Everything at once between processes: none of them keeps a file, or memory that others see."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import pytest
from psutil import Process

from actors.cluster import Cluster
from tests.cluster.test_engine import on_ray, process_of
from tests.conftest import TinyModel
from tests.models.test_soak import CHOICES, SOAK_S, at_rest, in_peace, soaked

ACTORS = ("scheduler", "device:cpu:0", "device:cpu:1", "pager:cpu:0", "pager:cpu:1")


class Held(NamedTuple):
    """What a process has of the system. shared: mappings of memory that others see."""

    files: int
    shared: int
    sockets: int


def held() -> dict[str, Held]:
    """By each process of the one engine that runs."""
    return {actor: _held(process_of(actor)) for actor in ACTORS}


def _held(process: Process) -> Held:
    folder = Path(f"/proc/{process.pid}/fd")
    files = [os.readlink(folder / fd) for fd in os.listdir(folder)]
    sockets = sum(file.startswith("socket:") for file in files)
    maps = [each.path for each in process.memory_maps(grouped=False)]
    shared = sum(path.startswith("/memfd:jitllm") for path in maps)
    return Held(len(files) - sockets, shared, sockets)


@pytest.mark.slow
@pytest.mark.timeout(SOAK_S * 4 + 120)
@pytest.mark.parametrize("name", ["gemma3", "llama"])
async def test_every_reply_is_what_it_is_in_peace_and_everything_is_given_back(
    cluster: Cluster, tiny_model: TinyModel, tmp_path: Path, name: str
) -> None:
    path = tiny_model(name, "q8_0")
    expected = await in_peace(path)
    async with on_ray(path, kv_cache=str(tmp_path), **CHOICES) as loaded:
        await at_rest(loaded.engine)  # each process has seen the memory of the others
        before = held()
        await soaked(loaded.engine, expected)
        for actor, after in held().items():
            assert after[:2] == before[actor][:2], actor
            # A pager and its device first speak that way round when leases are wanted back; who
            # is called holds two descriptors of the socket.
            assert after.sockets <= before[actor].sockets + 3, actor
