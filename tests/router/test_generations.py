"""An instance that is started anew on another machine takes its name with it: there are never two of one name."""

import pytest

from onward.router.instance_registry import MAX_INSTANCES, InstanceRegistry
from tests.router.members import registration


def start(registry: InstanceRegistry, instance: str, generation: int, **fields: object) -> str:
    """Registers a start of `decode-0`, and returns why it is refused."""
    fields = {"name": "decode-0", "generation": generation, **fields}
    return registry.register(registration(instance, **fields), 1.0).error


@pytest.fixture
def registry() -> InstanceRegistry:
    return InstanceRegistry("a-router", wants_kv_events=False)


def registered(registry: InstanceRegistry) -> list[str]:
    return [instance.instance_id for instance in registry.list_instances(1.0)]


def test_a_new_start_replaces_the_old_one_at_once(registry: InstanceRegistry) -> None:
    assert not start(registry, "old", 1)
    assert not start(registry, "new", 2)
    assert registered(registry) == ["new"]
    assert registry.tick(1.0) == ["old"], "its streams must move"


def test_an_old_start_that_is_still_there_is_refused(registry: InstanceRegistry) -> None:
    assert not start(registry, "old", 1)
    assert not start(registry, "new", 2)
    assert start(registry, "old", 1) == "generation 2 of decode-0 has registered, and this is generation 1"
    assert registered(registry) == ["new"]


def test_an_old_start_stays_refused_after_the_new_one_has_gone(registry: InstanceRegistry) -> None:
    assert not start(registry, "new", 2)
    assert not start(registry, "new", 2, state="leaving")
    assert "generation 2" in start(registry, "old", 1)
    assert registered(registry) == []
    assert not start(registry, "third", 3)


def test_two_of_one_generation_are_not_both_taken(registry: InstanceRegistry) -> None:
    assert not start(registry, "one", 2)
    assert start(registry, "two", 2) == "another instance has registered as generation 2 of decode-0"
    assert not start(registry, "adopting", 2, url="http://one"), "a new server at the same address replaces the old one"
    assert registered(registry) == ["adopting"]


def test_a_restart_by_the_same_supervisor_keeps_its_generation(registry: InstanceRegistry) -> None:
    assert not start(registry, "one", 1)
    assert not start(registry, "one", 1, url="http://moved")
    assert registered(registry) == ["one"]


def test_instances_without_a_generation_share_a_name(registry: InstanceRegistry) -> None:
    assert not start(registry, "one", 0)
    assert not start(registry, "two", 0)
    assert registered(registry) == ["one", "two"]
    assert not start(registry, "three", 1)
    assert registered(registry) == ["three"], "a name with generations belongs to one instance"


def test_names_are_bounded(registry: InstanceRegistry) -> None:
    assert "name is" in start(registry, "one", 1, name="n" * 65)
    assert "node is" in start(registry, "one", 1, node="n" * 65)
    assert start(registry, "one", 1, name="") == "generation is given without a name"
    for number in range(MAX_INSTANCES + 5):
        assert not start(registry, "one", 1, name=f"n-{number}")
    assert len(registry._generations) == MAX_INSTANCES
