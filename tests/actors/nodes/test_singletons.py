"""Singletons and kept names: one actor in a fleet, refs that follow it, and what waits while it moves. In virtual time."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import msgpack
import pytest
import trio
import trio.lowlevel
from trio.testing import MockClock

from levada.actors import aqueduct
from levada.actors.nodes import MemberState, NodeLost, Nodes, NodeSettings, nodes_of, singleton
from levada.actors.nodes.front import HELD
from levada.actors.nodes.messages import Spawn
from levada.actors.nodes.node_side import run_node
from levada.actors.nodes.orders import spawn_order
from levada.framework import ActorSystem, Cancelled, Failed, Lost, Normal, bounded, restart
from levada.framework.errors import (
    ActorError,
    ActorStopped,
    AskTimeout,
    ConfigurationError,
    ConnectionLost,
    MailboxFull,
    NameTaken,
)
from levada.framework.events import DeadLetter

from . import house
from .conftest import nodes_here
from .house import (
    BUILT,
    HANDLED,
    HOUSES,
    MADE,
    MOST,
    RUNNING,
    SYSTEMS,
    Burn,
    Cutter,
    House,
    Leave,
    Number,
    Pass,
    Plan,
    Planned,
    Shed,
    Where,
)  # fmt: skip
from .sharing_app import Letters

APP = "tests.actors.nodes.house:app"
PLAIN = "tests.actors.nodes.house:plain"
SETTINGS = NodeSettings(
    start_timeout=5.0, drain_timeout=4.0, restart=restart("permanent", max=1000, initial_backoff=0.5, max_backoff=0.5)
)


@pytest.fixture(autouse=True)
def fresh() -> None:
    """Forget the houses of the test before."""
    for kept in (HOUSES, SYSTEMS, RUNNING, MOST, HANDLED, house.BEGIN, MADE, BUILT):
        kept.clear()


@asynccontextmanager
async def fleet(n: int = 2, app: str = APP, **more: Any) -> AsyncIterator[tuple[Nodes, list[Any]]]:
    async with ActorSystem("driver") as system, nodes_here(system, n, app, settings=SETTINGS, **more) as (nodes, tasks):
        SYSTEMS["driver"] = system
        yield nodes, tasks


def task_of(tasks: list[Any], node: str) -> Any:
    """Return the present process of a node."""
    return [task for task in tasks if task.run.name == node][-1]


async def test_the_same_line_gives_one_actor_to_every_node_before_its_yield_and_to_the_driver(
    autojump_clock: MockClock,
) -> None:
    async with fleet(3):
        HOUSES["driver"] = await singleton(SYSTEMS["driver"], House)
        assert sorted(HOUSES) == ["driver", "n0", "n1", "n2"]
        homes = {await ref.ask(Where()) for ref in HOUSES.values()}
        assert [*homes] == RUNNING
        assert MOST == [1]
        for name, system in SYSTEMS.items():
            assert await singleton(system, House) is HOUSES[name]
            assert await nodes_of(system).lookup("House") is HOUSES[name]
            assert system.registry["House"] is HOUSES[name]


async def test_the_same_line_without_nodes_is_an_ordinary_actor(autojump_clock: MockClock) -> None:
    async with ActorSystem("alone") as system:
        ref = await singleton(system, House, 7)
        assert ref.path == "/House"
        assert system.registry["House"] is ref
        assert await singleton(system, House, 7) is ref
        with pytest.raises(ConfigurationError, match=r"'House' .*these differ: argument 1$"):
            await singleton(system, House, 8)
        with pytest.raises(ConfigurationError, match=r"'House' is a \S+:House, and a \S+:Shed was asked for"):
            await singleton(system, Shed, name="House")
        ref.tell(Burn())
        assert await ref.ask(Where()) == "alone"
        system.registry.register("other", system.spawn(Shed))
        with pytest.raises(NameTaken, match="the name 'other' belongs to"):
            await singleton(system, House, name="other")
        system.spawn(Shed, name="plain")
        with pytest.raises(
            NameTaken, match=r"^/plain lives already, .* 'plain' was asked for: give one of them another name=$"
        ):
            await singleton(system, House, name="plain")
        passing = await singleton(system, Shed, name="passing", supervise=restart("temporary"))
        passing.tell(Leave())
        await passing.terminated()
        assert await singleton(system, Shed, 3, name="passing") is not passing


async def test_what_cannot_be_a_singleton_is_refused_where_it_was_asked_for(autojump_clock: MockClock) -> None:
    async with fleet(2) as (nodes, _):
        await nodes.spawn(House, name="taken", supervise=restart())
        for system in SYSTEMS.values():
            with pytest.raises(
                ConfigurationError, match=r"'House' .*these differ: the number of arguments \(0, now 1\)"
            ):
                await singleton(system, House, 1)
            with pytest.raises(ConfigurationError, match=r"these differ: on \('any', now 'n1'\), mailbox \(None, now"):
                await singleton(system, House, on="n1", mailbox=bounded(3))
            with pytest.raises(ConfigurationError, match=r"'House' is a \S+:House, and a \S+:Shed was asked for"):
                await singleton(system, Shed, name="House")
            with pytest.raises(NameTaken, match=r"the name 'taken' belongs to /\S+ at n\d"):
                await singleton(system, House, name="taken")
            with pytest.raises(ConfigurationError, match="there is no node 'n9'; there are: n0, n1"):
                await singleton(system, House, on="n9", name="nowhere")
            with pytest.raises(ActorError, match="ValueError: no house is below the ground"):
                await singleton(system, House, -1, name="cellar")
            with pytest.raises(ConfigurationError, match=r"the mailbox is 5, wanted bounded\(…\) or unbounded\(\)"):
                await singleton(system, House, mailbox=5, name="crowded")  # type: ignore[arg-type]
            with pytest.raises(ConfigurationError, match="supervise is 'stop', wanted restart"):
                await singleton(system, House, supervise="stop")  # type: ignore[arg-type]
            with pytest.raises(ConfigurationError, match=r"name is 3, wanted a str"):
                await singleton(system, House, name=3)  # type: ignore[arg-type]
            with pytest.raises(ConfigurationError, match="wanted an Actor class"):
                await singleton(system, house.app)  # type: ignore[arg-type]
            # A name is free again after a start that failed.
            assert await (await singleton(system, House, 1, name=f"late {system.name}")).ask(Where()) in ("n0", "n1")


def of_older_code(order: Spawn, fields: int) -> Spawn:
    """Return an order as code would give it whose class of the message in the first argument has only so many fields."""
    [packed] = order.args
    row = msgpack.unpackb(msgpack.unpackb(packed.data).data)
    data = msgpack.packb(msgpack.ExtType(2, msgpack.packb(row[: 1 + fields])))
    return attrs.evolve(order, args=[attrs.evolve(packed, data=data)])  # type: ignore[misc]  # a message class is an attrs class


async def test_an_argument_is_decoded_by_the_node_of_the_actor_alone(autojump_clock: MockClock) -> None:
    async with fleet(2, PLAIN):
        for system in SYSTEMS.values():
            BUILT.clear()
            plan = Plan(3, await singleton(system, House, on="n0"), {"red": 0.5})
            MADE.clear()
            built = await nodes_of(system).spawn(Planned, plan, on="n1")
            assert await built.ask(Where()) == "n0"
            assert MADE == BUILT
            assert [(each.rooms, each.colours) for each in BUILT] == [(3, {"red": 0.5})]


async def test_code_whose_message_classes_have_grown_joins_and_its_arguments_count_from_the_next_start(
    autojump_clock: MockClock,
) -> None:
    async with fleet(2, PLAIN) as (nodes, tasks):
        house = await singleton(SYSTEMS["driver"], House, on="n0")

        def order_of(*fields: Any) -> Spawn:
            return spawn_order(Planned, (Plan(*fields),), restart("permanent"), None)

        new = order_of(3, house, {"red": 0.5, "blue": 2})
        turned = order_of(3, house, {"blue": 2, "red": 0.5})
        other = order_of(3, house, {"red": 0.5, "blue": 1})
        ref = await nodes.join(of_older_code(new, 1), "n1", "Planned")
        for order in (of_older_code(new, 2), new, turned, of_older_code(other, 2), of_older_code(new, 1)):
            assert await nodes.join(order, "n1", "Planned") is ref
        for order in (other, order_of(3, None, {"red": 0.5, "blue": 2}), of_older_code(order_of(4), 1)):
            with pytest.raises(ConfigurationError, match=r"these differ: argument 1$"):
                await nodes.join(order, "n1", "Planned")
        assert await ref.ask(Where()) == "n1"
        task_of(tasks, "n1").kill()
        await trio.sleep(0.05)  # the end of the node is known
        assert await ref.ask(Where(), timeout=20) == "n0"
        assert [each.colours for each in BUILT] == [{}, {"red": 0.5, "blue": 2}]


async def test_an_argument_that_the_node_cannot_read_is_an_error_of_the_caller(autojump_clock: MockClock) -> None:
    async with fleet(1, PLAIN) as (nodes, _):
        order = of_older_code(spawn_order(Planned, (Plan(1),), restart(), None), 0)
        for system in SYSTEMS.values():
            with pytest.raises(ConfigurationError, match=r"n0: argument 1 of \S+:Planned cannot be read: .*rooms"):
                await nodes_of(system).join(order, "any", "odd")
        with pytest.raises(TypeError, match=r"^argument 2: Plan.rooms: expected int, got str"):
            await nodes.spawn(Planned, 1, Plan("three"))  # type: ignore[arg-type]


async def test_two_apps_that_name_the_same_singleton_are_an_error_of_the_second(autojump_clock: MockClock) -> None:
    async with fleet(1):
        with pytest.raises(NodeLost, match=r"n1 has failed: .*'House' is a \S+:House, and a \S+:Shed was asked for"):
            async with nodes_here(SYSTEMS["driver"], 1, "tests.actors.nodes.house:other", settings=SETTINGS):
                pass
        assert await HOUSES["n0"].ask(Where()) == "n0"


async def test_actors_of_nodes_that_start_are_reached_by_each_other_before_either_is_up(
    autojump_clock: MockClock,
) -> None:
    async with fleet(2, "tests.actors.nodes.house:crosswise") as (nodes, _):
        assert [member.state for member in nodes.members] == [MemberState.UP] * 2


async def test_an_app_that_fails_on_one_node_is_the_error_of_the_fleet_and_nothing_hangs(
    autojump_clock: MockClock,
) -> None:
    began = trio.current_time()
    with pytest.raises(NodeLost, match="n1 has failed: RuntimeError: no shelf is free"):
        async with fleet(2, "tests.actors.nodes.house:fails_on_one"):
            pass
    assert trio.current_time() - began < 10


async def test_many_that_ask_at_once_start_one(autojump_clock: MockClock) -> None:
    async with fleet(2, PLAIN), trio.open_nursery() as nursery:
        found: list[Any] = []

        async def ask(system: ActorSystem) -> None:
            found.append(await (await singleton(system, House)).ask(Where()))

        for system in [*SYSTEMS.values()] * 4:
            nursery.start_soon(ask, system)
        await trio.sleep(1)
        assert len(found) == 12
        assert {*found} == {*RUNNING}
        assert MOST == [1]


async def test_a_ref_follows_its_actor_from_node_to_node_and_what_was_asked_meanwhile_is_done_once(
    autojump_clock: MockClock,
) -> None:
    async with fleet(2) as (_, tasks):
        house = await singleton(SYSTEMS["driver"], House)
        for turn in range(3):
            home = await house.ask(Where())
            task_of(tasks, home).kill()
            await trio.lowlevel.checkpoint()
            answers: list[int] = []

            async def ask(ref: Any, number: int, into: list[int]) -> None:
                into.append(await ref.ask(Number(number), timeout=20))

            left = "n1" if home == "n0" else "n0"
            await trio.sleep(0.05)  # the end of the node is known
            async with trio.open_nursery() as nursery:
                for number in range(5):
                    nursery.start_soon(ask, house, 100 * turn + number, answers)
                    nursery.start_soon(ask, HOUSES[left], 100 * turn + 10 + number, answers)
            assert sorted(answers) == sorted(HANDLED)
            assert sorted(HANDLED) == [100 * turn + n for n in (*range(5), *range(10, 15))]
            HANDLED.clear()
            await trio.sleep(5)
        assert house.is_alive
        assert max(MOST) == 1


async def test_a_question_that_was_lost_with_its_node_fails_and_is_not_asked_again(autojump_clock: MockClock) -> None:
    async with fleet(2) as (_, tasks):
        house = await singleton(SYSTEMS["driver"], House)
        home = await house.ask(Where())

        async def kill() -> None:
            await trio.sleep(1)
            task_of(tasks, home).kill()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill)
            with pytest.raises(ActorStopped) as caught:
                await house.ask(Number(1, seconds=3), timeout=60)
        assert isinstance(caught.value.reason, Lost)
        await trio.sleep(10)
        assert HANDLED == [1]


@pytest.mark.ci
async def test_a_move_in_order_loses_nothing(autojump_clock: MockClock) -> None:
    """Questions and messages from the driver and from each node, while all nodes restart one after the other, three times."""
    async with fleet(3) as (nodes, _), trio.open_nursery() as nursery:
        letters: list[tuple[Any, str]] = []
        HOUSES["driver"] = await singleton(SYSTEMS["driver"], House)
        answered: list[int] = []
        told: list[int] = []
        failed: list[tuple[str, Any]] = []
        over = False

        async def load(name: str, first: int) -> None:
            for number in range(first, first + 10**5):
                ref = HOUSES[name]
                try:
                    answered.append(await ref.ask(Number(number, seconds=0.01), timeout=30))
                except ActorStopped:
                    failed.append((name, name != "driver" and nodes[name].state))
                    await trio.sleep(0.2)
                if over:
                    return
                if name == "driver":
                    told.append(-number - 1)
                    await ref.send(Pass(-number - 1))

        SYSTEMS["driver"].events.subscribe(DeadLetter, SYSTEMS["driver"].spawn(Letters, letters))
        for index, name in enumerate(HOUSES):
            nursery.start_soon(load, name, index * 10**5)
        for _ in range(3):
            await trio.sleep(0.5)
            await nodes.restart()
        over = True
        await trio.sleep(2)
        assert len(MOST) >= 4
        assert max(MOST) == 1
        assert len(answered) > 100
        assert {state for _, state in failed} <= {MemberState.DRAINING, MemberState.DOWN}  # of the asker's own node
        assert {*answered, *told} <= {*HANDLED}
        assert len(HANDLED) == len({*HANDLED})
        assert [m for m, _ in letters if isinstance(m, Pass | Number)] == []


async def test_an_actor_moves_before_the_process_of_its_node_has_ended(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with fleet(2) as (nodes, _), trio.open_nursery() as nursery:
        house = await singleton(SYSTEMS["driver"], House)
        home = await house.ask(Where())

        async def linger() -> None:
            await trio.sleep(3)

        async with nodes_of(SYSTEMS[home]).before_leaving(linger):
            nursery.start_soon(nodes.drain, home)
            await trio.sleep(1)
            assert nodes[home].state is MemberState.DRAINING
            assert await house.ask(Where()) not in (home, "driver")
            await trio.sleep(4)
        assert max(MOST) == 1
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_while_all_nodes_drain_the_actor_answers_to_the_end(autojump_clock: MockClock) -> None:
    """There is no other node for it, and the last work of the others may need it."""
    answers: list[str] = []

    async def last(name: str) -> None:
        await trio.sleep(1)
        answers.append(await HOUSES[name].ask(Where(), timeout=2))

    async with (
        fleet(2),
        nodes_of(SYSTEMS["n0"]).before_leaving(lambda: last("n0")),
        nodes_of(SYSTEMS["n1"]).before_leaving(lambda: last("n1")),
    ):
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for name in ("n0", "n1"):
                nursery.start_soon(nodes_of(SYSTEMS["driver"]).drain, name)
        assert trio.current_time() - began < 3
    assert len(answers) == 2
    assert len({*answers}) == 1


async def test_a_ref_ends_with_its_actor_when_that_is_not_started_again(autojump_clock: MockClock) -> None:
    async with fleet(2, PLAIN) as (_, tasks):
        refs = [
            await singleton(system, House, name="brief", supervise=restart("permanent", max=1))
            for system in SYSTEMS.values()
        ]
        refs[0].tell(Burn())
        assert await refs[1].ask(Where()) in ("n0", "n1")
        refs[0].tell(Burn())
        for ref in refs:
            reason = await ref.terminated()
            assert isinstance(reason, Failed)
            assert "on fire" in str(reason.error)
        lone = [
            await singleton(system, House, name="lone", on="n0", supervise=restart("temporary"))
            for system in SYSTEMS.values()
        ]
        assert await lone[0].ask(Where()) == "n0"
        task_of(tasks, "n0").kill()
        await trio.sleep(0.1)
        for ref in (lone[0], lone[2]):
            with pytest.raises(ActorStopped):
                await ref.ask(Where(), timeout=50)
            assert isinstance(await ref.terminated(), Lost | Cancelled)
        leaver = await singleton(SYSTEMS["driver"], House, name="leaver", supervise=restart("transient"))
        leaver.tell(Leave())
        assert await leaver.terminated() == Normal()
        assert await (await singleton(SYSTEMS["driver"], House, 5, name="leaver")).ask(Where()) in ("n0", "n1")


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_a_ref_that_is_stopped_ends_in_its_process_alone(autojump_clock: MockClock, how: str) -> None:
    async with fleet(2):
        home = await HOUSES["n0"].ask(Where())
        for system in SYSTEMS.values():
            ref = await singleton(system, House)
            getattr(ref, how)()
            await ref.terminated()
            again = await singleton(system, House)
            assert again is not ref
            assert await again.ask(Where()) == home
        assert MOST == [1]


async def test_what_waits_for_an_actor_is_bounded(autojump_clock: MockClock) -> None:
    async with fleet(1) as (nodes, _), trio.open_nursery() as nursery:
        house = await singleton(SYSTEMS["driver"], House)
        await nodes.drain("n0")
        for number in range(HELD):
            house.tell(Pass(number))
        with pytest.raises(MailboxFull, match=f"holds {HELD} messages"):
            house.tell(Pass(-1))
        with pytest.raises(AskTimeout):
            await house.ask(Where(), timeout=0.1)
        nursery.start_soon(house.send, Pass(HELD))
        await nodes.restart("n0")
        await trio.sleep(1)
        assert [*range(HELD + 1)] == HANDLED
        # A burst through a small mailbox arrives whole, because senders wait for room.
        small = await singleton(SYSTEMS["driver"], House, name="small", mailbox=bounded(2))
        HANDLED.clear()
        nursery.start_soon(small.ask, Number(0, 1))
        await trio.sleep(0.1)
        for number in range(1, 3 * HELD):
            await small.send(Pass(number))
        await small.ask(Where())
        assert [*range(3 * HELD)] == HANDLED


async def test_an_actor_that_may_have_started_is_not_started_elsewhere_before_its_process_has_ended(
    autojump_clock: MockClock,
) -> None:
    """The connection to its node is lost while the node starts it, and the process of the node ends seconds later."""

    async def lingers(opens: Any, **more: Any) -> None:
        try:
            await run_node(opens, **more)
        except* ConnectionLost:
            await trio.sleep(3)
            raise

    async with fleet(2, PLAIN, body=lingers) as (_, tasks):
        begun: list[Any] = []

        def begin(node: str) -> None:
            assert all(task.gone.is_set() for task in begun)
            begun.append(task_of(tasks, node))
            if len(begun) == 1:
                begun[0].connection.shutdown(socket.SHUT_RDWR)

        house.BEGIN.append(begin)
        ref = await singleton(SYSTEMS["driver"], Cutter)
        assert len(begun) == 2
        assert await ref.ask(Where()) in ("n0", "n1")


async def test_other_systems_get_a_ref_that_follows_at_every_node(autojump_clock: MockClock) -> None:
    async with fleet(2, PLAIN) as (_, tasks), ActorSystem("outside") as outside:
        for name, system in SYSTEMS.items():
            HOUSES[name] = await singleton(system, House, on="n1")

        async def ignore(_: object) -> None:
            pass

        async with (
            aqueduct.serve(SYSTEMS["n0"], "aqueduct+memory://front0", ignore, object, expose={"House", "plain"}),
            aqueduct.serve(SYSTEMS["driver"], "aqueduct+memory://front", ignore, object, expose={"House", "plain"}),
        ):
            plain = SYSTEMS["n1"].spawn(House)
            await nodes_of(SYSTEMS["n1"]).register("plain", plain)
            await trio.sleep(1)
            assert await HOUSES["n1"].ask(Where()) == "n1"
            for url in ("aqueduct+memory://front0", "aqueduct+memory://front"):
                async with aqueduct.connect(outside, url, object) as peer:
                    found = await peer.lookup("House")
                    assert await found.ask(Where()) == "n1"
                    named = await peer.lookup("plain")
                    assert await named.ask(Where()) == "n1"
                    assert await peer.lookup("plain") is named
                    if url.endswith("front"):
                        task_of(tasks, "n1").kill()
                        assert isinstance(await named.terminated(), Lost | Cancelled)
                        assert await found.ask(Where(), timeout=20) == "n1"
