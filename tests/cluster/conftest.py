"""One Ray cluster a session; every test of this folder needs it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

pytest.importorskip("ray", reason="needs the extra `ray`")

from actors.cluster import Cluster
from actors.ray import RayRuntime
from jitllm.devices.memory import POISON_VARIABLE


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/cluster/" in str(item.path):
            item.add_marker(pytest.mark.ray)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Its actors overwrite what they give back: processes have the environment that it began in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(POISON_VARIABLE, "1")
        cluster = Cluster("local", dashboard=False)
    with cluster:
        yield cluster


@pytest.fixture
async def runtime(cluster: Cluster) -> AsyncIterator[RayRuntime]:
    async with RayRuntime(cluster, "test") as runtime:
        yield runtime
