"""What a process knows of the members of its fleet: changes, events for subscribers, a name that no actor ever had."""

from __future__ import annotations

from collections.abc import AsyncIterator

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.actors.nodes import Member, MemberState, NodeDown, NodeUp
from levada.actors.nodes.directory import Directory
from levada.actors.nodes.front import Front
from levada.actors.nodes.messages import Changed, Welcome
from levada.actors.nodes.node_side import NodeSide
from levada.framework import ActorSystem, Killed, Normal, actor
from levada.framework.errors import ConfigurationError

NODE = Member("n0", 0, b"", MemberState.STARTING, 0, "", "", 0.0, 0)


@pytest.fixture
async def system() -> AsyncIterator[ActorSystem]:
    async with ActorSystem("test") as system:
        yield system


def in_state(state: MemberState) -> Member:
    return attrs.evolve(NODE, state=state)  # type: ignore[misc]  # a message class is an attrs class


async def test_subscribers_hear_once_that_a_node_is_up_and_once_that_it_is_down(system: ActorSystem) -> None:
    directory = Directory(system)
    up, down = in_state(MemberState.UP), in_state(MemberState.DOWN)
    async with directory.events() as events:
        for member in (NODE, up, attrs.evolve(up, pid=7), in_state(MemberState.DRAINING)):  # type: ignore[misc]
            directory.change(member)
        directory.change(down, Killed())
        directory.change(down, Normal())
        heard = [events.receive_nowait() for _ in range(2)]
        with pytest.raises(trio.WouldBlock):
            events.receive_nowait()
    assert heard == [NodeUp(up), NodeDown(down, Killed())]


async def test_who_waits_for_a_change_looks_again_after_each_one(system: ActorSystem) -> None:
    directory = Directory(system)
    directory.change(NODE)
    looks: list[list[Member]] = []

    def is_gone() -> bool:
        looks.append(directory.members)
        return "n0" not in directory

    async with trio.open_nursery() as nursery:
        nursery.start_soon(directory.until, is_gone)
        await wait_all_tasks_blocked()
        directory.change(in_state(MemberState.DOWN))
        await wait_all_tasks_blocked()
        directory.remove("n0")
        directory.remove("n0")
    assert looks == [[NODE], [in_state(MemberState.DOWN)], []]
    with pytest.raises(ConfigurationError, match="there is no node 'n0'; there are: none"):
        directory["n0"]


async def test_who_waits_for_what_does_not_come_learns_that_it_has_not(
    system: ActorSystem, autojump_clock: MockClock
) -> None:
    directory = Directory(system)
    directory.change(NODE)
    begin = trio.current_time()
    assert not await directory.until(lambda: "n1" in directory, 3.0)
    assert trio.current_time() - begin == 3.0
    assert await directory.until(lambda: "n0" in directory, 3.0)
    assert trio.current_time() - begin == 3.0


async def test_a_name_that_no_actor_ever_had_is_freed_as_any_other(system: ActorSystem) -> None:
    front = Front("shop", lambda: None)
    ref = system.spawn(lambda: front)
    front.turn()
    await wait_all_tasks_blocked()
    assert front.about == "shop: nowhere now"
    front.free()
    assert await ref.terminated() == Normal()


async def test_changes_that_overtake_the_welcome_come_after_it(system: ActorSystem) -> None:
    """It travels on another channel, and its members are older."""

    @actor
    def coordinator(m: object) -> None:
        pass

    driver = system.spawn(coordinator)
    side = NodeSide(system, b"1" * 16)
    side.changed(Changed(in_state(MemberState.DOWN), "was killed by SIGKILL", signal=9))
    assert side.members == []
    side.welcomed(
        Welcome(
            name="n1",
            index=1,
            app="tests:app",
            path=[],
            log_level=0,
            drain_timeout=1.0,
            silence=4.0,
            beat=1.0,
            nice=0,
            affinity=[],
            rlimits={},
            members=[in_state(MemberState.UP)],
            listen="",
            driver=b"2" * 16,
            driver_url="",
            node=driver,
            coordinator=driver,
        )
    )
    assert side.members == [in_state(MemberState.DOWN)]
    side.changed(Changed(in_state(MemberState.DOWN), "", forgotten=True))
    assert side.members == []
