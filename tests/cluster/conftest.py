"""One Ray cluster a session; every test of this folder needs it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

pytest.importorskip("ray", reason="needs the extra `ray`")

from actors.cluster import Cluster
from actors.ray import RayRuntime


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/cluster/" in str(item.path):
            item.add_marker(pytest.mark.ray)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    with Cluster("local", dashboard=False) as cluster:
        yield cluster


@pytest.fixture
async def runtime(cluster: Cluster) -> AsyncIterator[RayRuntime]:
    async with RayRuntime(cluster, "test") as runtime:
        yield runtime
