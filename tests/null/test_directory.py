"""The directory of a cluster: names, members, nodes that come and go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actors.directory import Directory
from actors.messages.manager import Claim, Health, Listed, Neighbour, Working
from jitllm.devices.choose import AvailableDevice
from jitllm.errors import JitllmError, UsageError
from jitllm.memory.host import HostReport

PATH = Path("/models/small.jlm")
HOST = HostReport(2, (), (AvailableDevice("cpu", 0, num_cores=2, free_bytes=1 << 30),))
NOBODY: Any = None


def claim(directory: Directory, name: str, member: str = "one", *, is_exact: bool = False) -> str:
    return directory.claim(Claim(member, name, PATH, is_exact))


def listed(name: str, member: str = "one", nodes: tuple[str, ...] = ("here",)) -> Listed:
    """A model that is open, with a device on each of some nodes."""
    devices = tuple(
        Neighbour(f"{node}/cpu:0", node, f"id of {node}", NOBODY, NOBODY) for node in nodes
    )
    return Listed(name, PATH, member, "ready", "*=cpu:0", Working(NOBODY, devices, NOBODY, ()))


def names(directory: Directory) -> list[str]:
    return [model.name for model in directory.models]


def test_a_name_that_is_taken_gets_a_number_or_is_refused() -> None:
    directory = Directory()
    assert [claim(directory, "small") for _ in range(3)] == ["small", "small-2", "small-3"]
    with pytest.raises(UsageError, match="has a model 'small' already, served by one; attach"):
        claim(directory, "small", "two", is_exact=True)
    assert claim(directory, "large", "two", is_exact=True) == "large"
    assert {model.state for model in directory.models} == {"loading"}
    directory.withdraw("one", "small")
    assert claim(directory, "small", "two", is_exact=True) == "small"


def test_a_model_is_found_from_its_claim_until_it_is_withdrawn() -> None:
    directory = Directory()
    claim(directory, "small")
    assert directory.model("small").working is None
    directory.publish(listed("small"))
    assert directory.model("small").state == "ready"
    directory.withdraw("two", "small")  # it is not theirs
    assert names(directory) == ["small"]
    directory.withdraw("one", "small")
    directory.withdraw("one", "small")
    with pytest.raises(UsageError, match="no model 'small'; there is none"):
        directory.model("small")


def test_a_member_that_leaves_takes_its_models_along() -> None:
    directory = Directory()
    for name, member in (("a", "one"), ("b", "two"), ("c", "one")):
        claim(directory, name, member)
    directory.leave("one")
    assert names(directory) == ["b"]
    with pytest.raises(UsageError, match="no model 'a'; there are b"):
        directory.model("a")


def test_what_is_served_is_told_to_the_next_one_unless_the_name_went_to_another() -> None:
    directory = Directory()
    claim(directory, "small", "two")
    assert directory.join((listed("small"), listed("large"))) == ("small",)
    assert directory.model("small").member == "two"
    assert directory.model("large").member == "one"
    with pytest.raises(JitllmError, match="the name 'small' was given to another model"):
        directory.publish(listed("small"))


def test_what_is_heard_of_a_model_that_is_gone_changes_nothing() -> None:
    directory = Directory()
    directory.publish(listed("small"))
    directory.update("small", "draining", "*=cpu:1")
    directory.update("gone", "ready", "*=cpu:1")
    directory.update("small", "lost")
    [model] = directory.models
    assert (model.state, model.placement) == ("lost", "*=cpu:1")


def test_nodes_keep_what_they_reported_under_whatever_name() -> None:
    directory = Directory()
    directory.see({"a": "vm"})
    directory.report("a", HOST)
    directory.report("gone", HOST)
    directory.see({"a": "10.0.0.1", "b": "10.0.0.2"})  # two machines of one name
    assert [(node.name, node.host) for node in directory.nodes] == [
        ("10.0.0.1", HOST),
        ("10.0.0.2", None),
    ]


@pytest.mark.parametrize("ends", ["comes back", "comes back as another", "its model goes"])
def test_a_node_that_models_had_devices_on_is_missed_until_it_does_not_matter(ends: str) -> None:
    directory = Directory()
    directory.see({"id of here": "here", "id of there": "there", "id of idle": "idle"})
    directory.publish(listed("wide", nodes=("here", "there")))
    directory.publish(listed("small", "two"))
    assert directory.health == Health()
    directory.see({"id of here": "here"})
    assert directory.health == Health(("there",))
    assert [node.name for node in directory.nodes] == ["here"]
    match ends:
        case "comes back":
            directory.see({"id of here": "here", "id of there": "there"})
        case "comes back as another":
            directory.see({"id of here": "here", "d": "there"})
        case _:
            directory.withdraw("one", "wide")
    assert directory.health == Health()
