"""Actors by unique name, and by topic."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from trio.testing import wait_all_tasks_blocked

from levada.framework import (
    Actor,
    ActorSystem,
    Asks,
    Joined,
    Left,
    Ref,
    Shutdown,
    bounded,
    conflate,
    handles,
    message,
    restart,
)
from levada.framework.errors import ActorStopped, ConfigurationError, NameTaken


@message
class Get(Asks[int]):
    pass


@message
class Fail:
    pass


class Member(Actor[Any]):
    number: int = 0
    seen: list[Any] = attrs.field(factory=list)

    @handles
    def get(self, m: Get) -> int:
        return self.number

    @handles
    def fail(self, m: Fail) -> None:
        raise ValueError("told to")

    @handles
    def anything(self, m: object) -> None:
        self.seen.append(m)


# ---------------------------------------------------------------- registry


async def test_a_registered_actor_is_found_by_its_name(system: ActorSystem) -> None:
    registry = system.registry
    one, two = system.spawn(Member, 1), system.spawn(Member, 2)
    registry.register("one", one)
    registry.register("two", two)
    registry.register("also one", one)
    assert registry.get("one") is one
    assert registry["two"] is two
    assert registry.get("three") is None
    with pytest.raises(KeyError):
        registry["three"]
    assert ("one" in registry, "three" in registry, 1 in registry) == (True, False, False)
    assert (list(registry), len(registry)) == (["one", "two", "also one"], 3)
    assert await registry["also one"].ask(Get()) == 1


async def test_a_name_taken_twice_is_refused_and_names_the_holder(system: ActorSystem) -> None:
    one, two = system.spawn(Member, name="one"), system.spawn(Member)
    system.registry.register("name", one)
    system.registry.register("name", one)
    with pytest.raises(NameTaken) as caught:
        system.registry.register("name", two)
    assert str(caught.value) == "the name 'name' belongs to /one"
    assert (caught.value.name, caught.value.actor) == ("name", "/one")
    assert isinstance(caught.value, LookupError)
    assert system.registry["name"] is one


async def test_a_name_that_is_no_text_is_refused(system: ActorSystem) -> None:
    one = system.spawn(Member)
    with pytest.raises(TypeError, match="name is 1, wanted a str"):
        system.registry.register(1, one)  # type: ignore[arg-type]
    assert len(system.registry) == 0


async def test_a_name_is_free_as_soon_as_its_actor_has_ended_for_good(system: ActorSystem) -> None:
    ref = system.spawn(Member, supervise=restart())
    system.registry.register("name", ref)
    ref.tell(Fail())
    await wait_all_tasks_blocked()
    assert system.statistics().restarts == 1
    assert system.registry["name"] is ref
    ref.stop()
    await ref.terminated()
    assert "name" not in system.registry
    system.registry.register("name", system.spawn(Member))


async def test_a_dead_actor_takes_no_name(system: ActorSystem) -> None:
    ref = system.spawn(Member, name="dead")
    ref.stop()
    await ref.terminated()
    with pytest.raises(ActorStopped, match=r"^/dead has ended and takes no name$"):
        system.registry.register("name", ref)
    assert len(system.registry) == 0


async def test_a_name_taken_back_and_given_to_another_stays_with_the_other(system: ActorSystem) -> None:
    one, two = system.spawn(Member), system.spawn(Member)
    system.registry.register("name", one)
    system.registry.unregister("name")
    system.registry.unregister("name")
    system.registry.register("name", two)
    one.kill()
    await one.terminated()
    assert system.registry["name"] is two


async def test_two_systems_share_nothing(system: ActorSystem) -> None:
    system.registry.register("name", system.spawn(Member))
    async with ActorSystem() as other:
        assert "name" not in other.registry
        other.registry.register("name", other.spawn(Member))


# ---------------------------------------------------------------- groups


async def test_members_join_once_in_order_and_leave(system: ActorSystem) -> None:
    groups = system.groups
    one, two, three = (system.spawn(Member, n) for n in range(3))
    for ref in (one, two, one, three):
        groups.join("topic", ref)
    groups.join(("any", "hashable"), one)
    assert groups.members("topic") == [one, two, three]
    assert groups.topics() == ["topic", ("any", "hashable")]
    groups.leave("topic", two)
    groups.leave("topic", two)
    groups.leave("none", two)
    assert groups.members("topic") == [one, three]
    one.kill()
    await one.terminated()
    assert groups.members("topic") == [three]
    assert groups.topics() == ["topic"]
    groups.join("topic", one)
    groups.join("dead only", one)
    assert groups.members("topic") == [three]
    assert groups.members("dead only") == []
    assert groups.topics() == ["topic"]


async def test_publish_tells_all_members_and_counts_those_who_took_it(system: ActorSystem) -> None:
    logs: list[list[Any]] = [[], [], []]
    for number, log in enumerate(logs):
        system.groups.join("topic", system.spawn(Member, number, log))
    full = system.spawn(Member, mailbox=bounded(1))
    system.groups.join("topic", full)
    full.tell("filler")
    assert system.groups.publish("topic", "news") == 3
    assert system.groups.publish("nobody", "news") == 0
    await wait_all_tasks_blocked()
    assert logs == [["news"]] * 3
    assert system.statistics().dead_letters == 1


async def test_subscribers_hear_of_members_now_and_later(system: ActorSystem) -> None:
    log: list[Any] = []
    subscriber = system.spawn(Member, 0, log)
    one, two = system.spawn(Member), system.spawn(Member)
    system.groups.join("topic", one)
    system.groups.subscribe("topic", subscriber)
    system.groups.subscribe("topic", subscriber)
    system.groups.join("topic", two)
    system.groups.leave("topic", one)
    two.kill()
    await two.terminated()
    await wait_all_tasks_blocked()
    assert [(type(m), m.topic, m.ref) for m in log] == [
        (Joined, "topic", one),
        (Joined, "topic", two),
        (Left, "topic", one),
        (Left, "topic", two),
    ]
    system.groups.unsubscribe("topic", subscriber)
    system.groups.unsubscribe("topic", subscriber)
    system.groups.join("topic", one)
    await wait_all_tasks_blocked()
    assert len(log) == 4


async def test_a_subscriber_that_has_ended_is_forgotten_and_a_dead_one_never_taken(system: ActorSystem) -> None:
    subscriber = system.spawn(Member)
    system.groups.subscribe("topic", subscriber)
    subscriber.stop()
    assert await subscriber.terminated() == Shutdown()
    system.groups.subscribe("topic", subscriber)
    system.groups.join("topic", system.spawn(Member))
    await wait_all_tasks_blocked()
    assert system.statistics().dead_letters == 0


async def test_a_subscriber_that_cannot_take_it_misses_it_and_harms_nobody(
    system: ActorSystem, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither a full mailbox nor a key that fails may reach those whose coming and going is told."""

    def key(m: Any) -> Any:
        raise AttributeError("no such field")

    full = system.spawn(Member, mailbox=bounded(1))
    full.tell("filler")
    broken = system.spawn(Member, mailbox=bounded(5, overflow=conflate(key)), name="broken")
    log: list[Any] = []
    well = system.spawn(Member, 0, log)
    for ref in (full, broken, well):
        system.groups.subscribe("topic", ref)
    member: Ref[Any] = system.spawn(Member)
    system.groups.join("topic", member)
    member.kill()
    await member.terminated()
    await wait_all_tasks_blocked()
    assert [type(m) for m in log] == [Joined, Left]
    assert full.is_alive
    assert system.statistics().failures == 0
    assert system.statistics().dead_letters >= 3


# ---------------------------------------------------------------- sharing


class Toy:
    """Shares with nobody, and keeps what it is told."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []
        self.names: dict[str, Any] = {}
        self.foreign: list[Any] = []

    def named(self, name: str, ref: Any) -> None:
        self.heard.append(("named", name, ref))

    def unnamed(self, name: str) -> None:
        self.heard.append(("unnamed", name))

    def find(self, name: str) -> Any:
        return self.names.get(name)

    def takes(self, topic: Any, ref: Any, *, member: bool) -> bool:
        if not isinstance(topic, str):
            raise ConfigurationError("no such topics here")
        if ref in self.foreign:
            self.heard.append(("wish", topic, ref, member))
            return False
        return True

    def joined(self, topic: Any, ref: Any) -> None:
        self.heard.append(("joined", topic, ref))

    def left(self, topic: Any, ref: Any) -> None:
        self.heard.append(("left", topic, ref))

    def label(self, ref: Any) -> str:
        return f"{ref.path} of the toy"


async def test_a_sharer_hears_of_names_and_is_asked_for_unknown_ones(system: ActorSystem) -> None:
    """Those that are there when it comes, too."""
    first, second, third = (system.spawn(Member) for _ in range(3))
    system.registry.register("first", first)
    toy = Toy()
    system.registry.share(toy)
    system.registry.register("second", second)
    system.registry.unregister("first")
    second.stop()
    await wait_all_tasks_blocked()
    assert toy.heard == [
        ("named", "first", first),
        ("named", "second", second),
        ("unnamed", "first"),
        ("unnamed", "second"),
    ]
    toy.names["third"] = third
    assert system.registry.get("third") is third
    assert system.registry["third"] is third
    assert "third" in system.registry
    assert "fourth" not in system.registry
    assert list(system.registry) == []
    with pytest.raises(KeyError):
        system.registry["fourth"]


async def test_a_sharer_decides_on_memberships_and_brings_its_own(system: ActorSystem) -> None:
    here, there, subscriber = (system.spawn(Member) for _ in range(3))
    system.groups.join("old", here)
    toy = Toy()
    toy.foreign.append(there)
    system.groups.share(toy)
    system.groups.subscribe("t", subscriber)
    system.groups.join("t", here)
    system.groups.join("t", there)
    assert system.groups.members("t") == [here]
    system.groups.admit("t", there)
    assert system.groups.members("t") == [here, there]
    system.groups.leave("t", there)
    assert system.groups.members("t") == [here, there]
    system.groups.dismiss("t", there)
    here.stop()
    await wait_all_tasks_blocked()
    assert system.groups.members("t") == []
    assert toy.heard == [
        ("joined", "old", here),
        ("joined", "t", here),
        ("wish", "t", there, True),
        ("wish", "t", there, False),
        ("left", "old", here),
        ("left", "t", here),
    ]
    assert system.groups.label(there) == f"{there.path} of the toy"
    with pytest.raises(ConfigurationError, match="no such topics"):
        system.groups.join(1, there)


async def test_a_system_with_a_topic_that_cannot_be_shared_stays_as_it_is(system: ActorSystem) -> None:
    member = system.spawn(Member)
    system.groups.join("good", member)
    system.groups.join(1, member)
    toy = Toy()
    with pytest.raises(ConfigurationError):
        system.groups.share(toy)
    system.groups.join(2, member)
    assert toy.heard == []
