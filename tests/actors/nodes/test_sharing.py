"""Names and groups of a fleet: the driver and its nodes in one process, in virtual time."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import attrs
import pytest
import trio
from tests.seeds import seeds
from trio.testing import MockClock

from levada.actors.nodes import MemberState, Nodes, NodeSettings, nodes_of
from levada.actors.nodes.sharing import Relay
from levada.framework import ActorSystem, Normal, restart
from levada.framework.errors import ActorError, ActorStopped, ConfigurationError, NameTaken, NameUnknown
from levada.framework.events import DeadLetter
from levada.framework.router import consistent_hash, group, pull, round_robin

from . import sharing_app
from .conftest import nodes_here
from .sharing_app import SYSTEMS, Job, Leave, Letters, Listener, Single, Text, Who, Worker

APP = "tests.actors.nodes.sharing_app:app"


@pytest.fixture(autouse=True)
def fresh() -> None:
    """Forget the systems of the test before."""
    for kept in (SYSTEMS, sharing_app.SEEN, sharing_app.RUNNING, sharing_app.MOST, sharing_app.BEGUN):
        kept.clear()


@attrs.define
class Fleet:
    """A driver and its nodes."""

    driver: ActorSystem
    nodes: Nodes
    tasks: list[Any]

    @property
    def systems(self) -> dict[str, ActorSystem]:
        """The systems that are up, by name."""
        up = {m.name: SYSTEMS[m.name] for m in self.nodes.members if m.state is MemberState.UP}
        return {"the driver": self.driver, **up}

    def members(self, topic: Any) -> list[set[str]]:
        """List the labels of a topic's members, as each system has them."""
        return [{s.groups.label(ref) for ref in s.groups.members(topic)} for s in self.systems.values()]

    def agree(self, topic: Any, *labels: str) -> None:
        """Check that all systems have these members."""
        assert self.members(topic) == [set(labels)] * len(self.systems)

    def task(self, name: str) -> Any:
        """Return the present process of a node."""
        return [task for task in self.tasks if task.run.name == name][-1]


@asynccontextmanager
async def fleet(n: int = 2, **settings: Any) -> AsyncIterator[Fleet]:
    policy = restart("permanent", max=1000, initial_backoff=0.5, max_backoff=0.5)
    settings = {"start_timeout": 5.0, "drain_timeout": 2.0, "restart": policy, **settings}
    async with (
        ActorSystem("driver") as system,
        nodes_here(system, n, APP, settings=NodeSettings(**settings)) as (nodes, tasks),
    ):
        yield Fleet(system, nodes, tasks)


def spawn(system: ActorSystem, name: str, kind: Any = Worker) -> Any:
    return system.spawn(kind, name=name)


async def settle() -> None:
    await trio.sleep(1)


# ---------------------------------------------------------------- groups


async def test_who_joins_anywhere_is_a_member_everywhere(autojump_clock: MockClock) -> None:
    async with fleet() as f:
        workers = {name: spawn(system, "w") for name, system in f.systems.items()}
        for name, system in f.systems.items():
            system.groups.join(("prices", 1, b"x", ("deep",)), workers[name])
            assert f.members(("prices", 1, b"x", ("deep",)))[list(f.systems).index(name)] >= {f"/w at {name}"}
        await settle()
        f.agree(("prices", 1, b"x", ("deep",)), "/w at the driver", "/w at n0", "/w at n1")
        for system in f.systems.values():
            assert system.groups.publish(("prices", 1, b"x", ("deep",)), Text(system.name)) == 3
        await settle()
        for worker in workers.values():
            assert sorted(worker._actor.got) == ["driver", "n0", "n1"]
        SYSTEMS["n0"].groups.leave(("prices", 1, b"x", ("deep",)), workers["n0"])
        workers["the driver"].stop()
        await settle()
        f.agree(("prices", 1, b"x", ("deep",)), "/w at n1")
        workers["n1"].kill()
        await settle()
        f.agree(("prices", 1, b"x", ("deep",)))


async def test_subscribers_everywhere_hear_who_joins_and_leaves(autojump_clock: MockClock) -> None:
    async with fleet() as f:
        listeners = {name: spawn(system, "l", Listener) for name, system in f.systems.items()}
        spawned = spawn(SYSTEMS["n1"], "w")
        SYSTEMS["n1"].groups.join("g", spawned)
        for name, system in f.systems.items():
            system.groups.subscribe("g", listeners[name])
        await settle()
        spawned.stop()
        await settle()
        for listener in listeners.values():
            assert listener._actor.heard == [("joined", "/w"), ("left", "/w")]


async def test_a_node_begins_with_all_members_and_names(autojump_clock: MockClock) -> None:
    """What was there before the fleet, too; its app finds them at once."""
    async with ActorSystem("driver") as system:
        early = spawn(system, "early")
        system.groups.join("early", early)
        system.registry.register("early", early)
        async with nodes_here(system, 1, APP):
            assert sharing_app.SEEN == {"n0": [["/early"], True]}


async def test_members_of_a_node_that_ended_leave_at_once_and_its_successors_join(autojump_clock: MockClock) -> None:
    async with fleet() as f:
        for name in ("n0", "n1"):
            SYSTEMS[name].groups.join("g", spawn(SYSTEMS[name], "w"))
        await settle()
        f.agree("g", "/w at n0", "/w at n1")
        f.task("n0").kill()
        await trio.sleep(0.2)
        f.agree("g", "/w at n1")
        await trio.sleep(5)
        assert f.nodes["n0"].state is MemberState.UP
        SYSTEMS["n0"].groups.join("g", spawn(SYSTEMS["n0"], "w"))
        await settle()
        f.agree("g", "/w at n0", "/w at n1")


async def test_an_actor_of_a_node_that_drains_joins_no_group(autojump_clock: MockClock) -> None:
    """A router would send messages to it until its node ends."""
    async with fleet() as f:
        late: list[Any] = []

        async def join() -> None:
            ref = spawn(SYSTEMS["n0"], "late")
            SYSTEMS["n0"].groups.join("g", ref)
            await settle()
            late.append([system.groups.members("g") for system in (f.driver, SYSTEMS["n1"])])

        async with nodes_of(SYSTEMS["n0"]).before_leaving(join):
            await f.nodes.drain("n0")
        assert late == [[[], []]]


async def test_a_node_that_drains_reaches_actors_of_a_node_that_came_up_meanwhile(autojump_clock: MockClock) -> None:
    """Its last work may need them."""
    async with fleet(drain_timeout=8.0) as f:
        answers: list[str] = []

        async def ask() -> None:
            f.task("n1").kill()
            await trio.sleep(2)
            assert f.nodes["n1"].state is MemberState.UP
            late = spawn(SYSTEMS["n1"], "late")
            await nodes_of(SYSTEMS["n1"]).register("late", late)
            ref = await nodes_of(SYSTEMS["n0"]).lookup("late")
            answers.append(await ref.ask(Who(), timeout=4))

        async with nodes_of(SYSTEMS["n0"]).before_leaving(ask):
            await f.nodes.drain("n0")
        assert answers == ["n1"]


async def test_an_actor_of_another_process_joins_and_leaves_by_its_own(autojump_clock: MockClock) -> None:
    """Asked for by the driver, and by another node."""
    async with fleet() as f:
        worker = await f.nodes.spawn(Worker, on="n1")
        for system in (f.driver, SYSTEMS["n0"]):
            await f.nodes.register("worker", worker)
            await settle()
            ref: Any = system.registry["worker"]
            system.groups.join("g", ref)
            assert system.groups.members("g") == []
            await settle()
            f.agree("g", SYSTEMS["n1"].groups.label(SYSTEMS["n1"].registry["worker"]))
            system.groups.leave("g", ref)
            await settle()
            f.agree("g")
        own = spawn(f.driver, "own")
        f.driver.registry.register("own", own)
        await settle()
        SYSTEMS["n0"].groups.join("g", SYSTEMS["n0"].registry["own"])
        await settle()
        f.agree("g", "/own at the driver")


@pytest.mark.parametrize("topic", [1.5, None, object(), ("a", 1.5), frozenset(), 1 << 64, True, "\udc80"])
async def test_topics_that_cannot_travel_are_refused(autojump_clock: MockClock, topic: Any) -> None:
    """When somebody joins, on the driver and on nodes; and when nodes are started in a system that has such a topic."""
    async with fleet(1) as f:
        for system in f.systems.values():
            with pytest.raises(ConfigurationError, match="cannot travel between nodes: use str, int, bytes and tuples"):
                system.groups.join(topic, spawn(system, "w"))
            assert topic not in system.groups.topics()
    async with ActorSystem("driver") as system:
        system.groups.join(topic, spawn(system, "w"))
        with pytest.raises(ConfigurationError, match="cannot travel between nodes"):
            async with nodes_here(system, 1, APP):
                pass


async def test_a_name_that_cannot_be_encoded_is_the_drivers_only(autojump_clock: MockClock) -> None:
    """And holds up no other names."""
    async with fleet(1) as f:
        odd = spawn(f.driver, "odd")
        f.driver.registry.register("\udc80", odd)
        await settle()
        f.driver.registry.register("desk", spawn(f.driver, "desk"))
        await settle()
        assert f.driver.registry["\udc80"] is odd
        assert SYSTEMS["n0"].registry.get("\udc80") is None
        assert "desk" in SYSTEMS["n0"].registry


async def test_routers_on_every_member_route_to_members_of_all(autojump_clock: MockClock) -> None:
    """Pull, round robin; consistent hash gives a key to the same member wherever the router is, also after a restart of the node."""
    async with fleet() as f:
        for system in f.systems.values():
            system.groups.join("g", spawn(system, "w"))
        await settle()
        for routing in (pull(), round_robin()):
            for system in f.systems.values():
                router = system.spawn(group("g", routing=routing))
                answers = [await router.ask(Who()) for _ in range(6)]
                assert sorted(set(answers)) == ["driver", "n0", "n1"]

        async def homes(system: ActorSystem) -> list[str]:
            router = system.spawn(group("g", routing=consistent_hash(lambda m: next(keys))))
            keys = iter(range(40))
            return [await router.ask(Who()) for _ in range(40)]

        before = [await homes(system) for system in f.systems.values()]
        assert before[0] == before[1] == before[2]
        assert set(before[0]) == {"driver", "n0", "n1"}
        f.task("n1").kill()
        await trio.sleep(5)
        SYSTEMS["n1"].groups.join("g", spawn(SYSTEMS["n1"], "w"))
        await settle()
        assert [await homes(system) for system in f.systems.values()] == before


async def test_a_member_whose_connection_is_lost_is_reached_again(autojump_clock: MockClock) -> None:
    """The node lives: only the connection between two nodes is cut."""
    async with fleet():
        worker = spawn(SYSTEMS["n1"], "w")
        SYSTEMS["n1"].groups.join("g", worker)
        await nodes_of(SYSTEMS["n1"]).register("worker", worker)
        await settle()
        n0 = SYSTEMS["n0"]
        (lost,) = n0.groups.members("g")
        assert await lost.ask(Who()) == "n1"
        for link in [*nodes_of(n0).refs._links.values()]:
            link.cut()
        await settle()
        assert not lost.is_alive
        (found,) = n0.groups.members("g")
        assert found is not lost
        assert await found.ask(Who()) == "n1"
        assert await n0.registry["worker"].ask(Who()) == "n1"


# ---------------------------------------------------------------- names


async def test_names_of_the_fleet_are_found_everywhere(autojump_clock: MockClock) -> None:
    """Registered on the driver, or from any member; a node's own names come first, and stay its own."""
    async with fleet() as f:
        f.driver.registry.register("desk", spawn(f.driver, "desk"))
        on_n0 = spawn(SYSTEMS["n0"], "other")
        await nodes_of(SYSTEMS["n0"]).register("other", on_n0)
        await settle()
        for system in f.systems.values():
            assert await system.registry["desk"].ask(Who()) == "driver"
            assert "other" in system.registry
            assert await system.registry["other"].ask(Who()) == "n0"
            assert await (await nodes_of(system).lookup("other")).ask(Who()) == "n0"
        assert SYSTEMS["n0"].registry["other"] is on_n0
        own = spawn(SYSTEMS["n1"], "own")
        SYSTEMS["n1"].registry.register("desk", own)
        assert SYSTEMS["n1"].registry["desk"] is own
        assert await (await nodes_of(SYSTEMS["n1"]).lookup("desk")).ask(Who()) == "driver"
        await nodes_of(SYSTEMS["n1"]).unregister("other")
        await settle()
        for system in f.systems.values():
            assert system.registry.get("other") is None
            with pytest.raises(KeyError):
                system.registry["other"]


async def test_a_node_knows_a_name_when_its_call_returns(autojump_clock: MockClock) -> None:
    """The change and the answer travel on different channels."""
    async with fleet(1):
        system = SYSTEMS["n0"]
        nodes, ref = nodes_of(system), spawn(SYSTEMS["n0"], "w")
        for _ in range(20):
            await nodes.register("desk", ref)
            assert system.registry["desk"] is ref
            await nodes.unregister("desk")
            assert system.registry.get("desk") is None
            single = await nodes.spawn(Worker, on="n0", name="desk")
            assert system.registry["desk"] is single
            await nodes.unregister("desk")


async def test_a_node_that_does_not_learn_of_a_name_says_so(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What was asked is done; only the news does not come."""
    async with fleet(1) as f:
        system = SYSTEMS["n0"]
        monkeypatch.setattr(Relay, "put", lambda *_: None)
        await nodes_of(system).register("desk", spawn(system, "w"))
        assert f.driver.registry["desk"].path == "/w"
        assert system.registry.get("desk") is None
        [said] = [record for record in caplog.records if getattr(record, "event", "") == "names_late"]
        assert said.getMessage() == (
            "the driver has changed the name 'desk', but this node did not learn of it within 5 s: lookups here do not know it yet"
        )


async def test_a_name_has_one_holder(autojump_clock: MockClock) -> None:
    """Of two that register at the same time one wins; the other gets `NameTaken`."""
    async with fleet() as f:
        won: list[str] = []
        refused: list[str] = []

        async def register(name: str, system: ActorSystem) -> None:
            try:
                await nodes_of(system).register("boss", spawn(system, "w"))
                won.append(name)
            except NameTaken as error:
                refused.append(str(error))

        async with trio.open_nursery() as nursery:
            for name, system in f.systems.items():
                nursery.start_soon(register, name, system)
        await settle()
        assert len(won) == 1
        assert all("the name 'boss' belongs to /w" in text for text in refused)
        expected = "driver" if won == ["the driver"] else won[0]
        for system in f.systems.values():
            assert await system.registry["boss"].ask(Who()) == expected


async def test_the_error_of_a_taken_name_says_where_its_actor_lives(autojump_clock: MockClock) -> None:
    """Actors of two nodes may have the same path."""
    async with fleet() as f:
        await nodes_of(SYSTEMS["n0"]).register("boss", spawn(SYSTEMS["n0"], "w"))
        with pytest.raises(NameTaken, match="the name 'boss' belongs to /w at n0"):
            await nodes_of(SYSTEMS["n1"]).register("boss", spawn(SYSTEMS["n1"], "w"))
        with pytest.raises(NameTaken, match="the name 'boss' belongs to /w at n0"):
            f.driver.registry.register("boss", spawn(f.driver, "w"))


async def test_errors_of_the_driver_have_their_classes_on_nodes_too(autojump_clock: MockClock) -> None:
    async with fleet() as f:
        ended = spawn(SYSTEMS["n0"], "ended")
        ended.stop()
        await ended.terminated()
        for nodes in map(nodes_of, f.systems.values()):
            with pytest.raises(NameUnknown, match="nothing"):
                await nodes.lookup("nothing", on="n1")
            with pytest.raises(ConfigurationError, match="there is no node 'n9'"):
                await nodes.lookup("nothing", on="n9")
            with pytest.raises(ConfigurationError, match="there is no node 'n9'"):
                await nodes.drain("n9")
            with pytest.raises(ConfigurationError, match="there is no node 'n9'"):
                await nodes.restart("n9")
        with pytest.raises(ActorStopped):
            await nodes_of(SYSTEMS["n0"]).register("ended", ended)


async def test_the_end_of_an_actor_or_of_its_node_frees_its_name(autojump_clock: MockClock) -> None:
    async with fleet() as f:
        first = spawn(SYSTEMS["n0"], "first")
        await nodes_of(SYSTEMS["n0"]).register("first", first)
        await nodes_of(SYSTEMS["n0"]).register("second", spawn(SYSTEMS["n0"], "second"))
        await settle()
        first.stop()
        await settle()
        for system in f.systems.values():
            assert system.registry.get("first") is None
            assert system.registry.get("second") is not None
        f.task("n0").kill()
        await trio.sleep(0.2)
        for system in f.systems.values():
            assert system.registry.get("second") is None
        await nodes_of(SYSTEMS["n1"]).register("second", spawn(SYSTEMS["n1"], "second"))
        await settle()
        assert await f.driver.registry["second"].ask(Who()) == "n1"


async def test_lookup_waits_for_a_name(autojump_clock: MockClock) -> None:
    async with fleet(1) as f:
        for system in f.systems.values():
            with pytest.raises(NameUnknown, match=r"'late'.* within 3 s"):
                await nodes_of(system).lookup("late", timeout=3)

            async def register() -> None:
                await trio.sleep(2)
                f.driver.registry.register("late", spawn(f.driver, f"late{len(SYSTEMS)}{trio.current_time():g}"))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(register)
                began = trio.current_time()
                assert await (await nodes_of(system).lookup("late", timeout=3)).ask(Who()) == "driver"
                assert trio.current_time() - began == pytest.approx(2, abs=0.1)
            f.driver.registry.unregister("late")
            await settle()


async def test_a_singleton_moves_with_its_name_and_never_runs_twice(autojump_clock: MockClock) -> None:
    async with fleet() as f:
        ref = await f.nodes.spawn(Single, name="single", on="any", supervise=restart("permanent"))
        for _ in range(4):
            home = await ref.ask(Who())
            assert [home] == sharing_app.RUNNING
            f.task(home).kill()
            # From the node that is left: the old one is found no more, the new one when it is there.
            await trio.sleep(0.1)
            left = SYSTEMS["n1" if home == "n0" else "n0"]
            ref = await nodes_of(left).lookup("single", timeout=20)
            assert await ref.ask(Who()) in ("n0", "n1")
            assert ref.is_alive
            await trio.sleep(5)
        assert max(sharing_app.MOST) == 1


@pytest.mark.parametrize("supervise", ["stop", restart("permanent")])
async def test_of_two_singletons_with_the_same_name_only_one_starts(autojump_clock: MockClock, supervise: Any) -> None:
    async with fleet() as f:
        refused: list[NameTaken] = []

        async def start(on: str) -> None:
            try:
                await f.nodes.spawn(Single, name="single", on=on, supervise=supervise)
            except NameTaken as error:
                refused.append(error)

        async with trio.open_nursery() as nursery:
            for on in ("n0", "n1"):
                nursery.start_soon(start, on)
        await settle()
        [error] = refused
        assert str(error) == "the name 'single' belongs to an actor that is starting"
        assert [await f.driver.registry["single"].ask(Who())] == sharing_app.RUNNING
        with pytest.raises(NameTaken, match=r"^the name 'single' belongs to /\S+ at n\d#0$"):
            await f.nodes.spawn(Single, name="single", supervise=supervise)
        assert sharing_app.MOST == [1]


async def test_a_kept_name_is_free_when_its_actor_has_ended_for_good(autojump_clock: MockClock) -> None:
    async with fleet() as f:
        first = await f.nodes.spawn(Single, name="single", on="n0", supervise=restart("transient"))
        for nodes in map(nodes_of, f.systems.values()):
            with pytest.raises(ConfigurationError, match=r"the name 'single' is kept .*: end the actor"):
                await nodes.unregister("single")
            with pytest.raises(NameTaken, match=r"the name 'single' belongs to /\S+ at n0"):
                await nodes.register("single", spawn(f.driver, f"w{nodes.node_id.hex()}"))
        f.driver.registry.unregister("single")
        assert await (await f.nodes.lookup("single")).ask(Who()) == "n0"
        fronts = [system.registry["single"] for system in f.systems.values()]
        first.tell(Leave())
        assert [await front.terminated() for front in fronts] == [Normal()] * 3
        for system in f.systems.values():
            assert system.registry.get("single") is None
        await f.nodes.spawn(Single, name="single", on="n1")
        assert await f.driver.registry["single"].ask(Who()) == "n1"


async def test_a_block_that_ends_does_not_stop_a_restart_of_all_nodes(autojump_clock: MockClock) -> None:
    async with fleet(1) as f, trio.open_nursery() as nursery:
        async with nodes_here(f.driver, 1, APP):
            assert [member.name for member in f.nodes.members] == ["n0", "n1"]
            nursery.start_soon(f.nodes.restart)
            await trio.sleep(0.01)
            assert f.nodes["n0"].state is MemberState.DRAINING
        assert [member.restarts for member in f.nodes.members] in ([0], [1])
        nursery.start_soon(f.nodes.restart)
        await trio.sleep(30)
        assert [(member.name, member.state, member.restarts) for member in f.nodes.members] == [
            ("n0", MemberState.UP, 2)
        ]


async def test_a_singleton_whose_caller_has_left_is_killed(autojump_clock: MockClock) -> None:
    async with fleet() as f:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(f.nodes.spawn, Single, name="single", supervise=restart("permanent")))
            await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        await settle()
        assert sharing_app.MOST == [1]
        assert sharing_app.RUNNING == []
        assert f.driver.registry.get("single") is None


# ---------------------------------------------------------------- models


@pytest.mark.parametrize("routing", [pull, round_robin])
async def test_a_rolling_restart_loses_no_job(autojump_clock: MockClock, routing: Any) -> None:
    """The actors of a node that drains leave their groups before they end."""
    async with fleet(2) as f, trio.open_nursery() as nursery:
        letters: list[tuple[Any, str]] = []
        f.driver.events.subscribe(DeadLetter, f.driver.spawn(Letters, letters))
        router: Any = f.driver.spawn(group("toil", routing=routing()))
        await settle()
        nursery.start_soon(f.nodes.restart)
        for number in range(40):
            router.tell(Job(number))
            await trio.sleep(0.15)
        await trio.sleep(30)
        assert sorted(sharing_app.BEGUN) == list(range(40))
        assert [why for m, why in letters if isinstance(m, Job)] == []
        assert [member.restarts for member in f.nodes.members] == [1, 1]


@pytest.mark.ci
@seeds(3, 12)
async def test_jobs_for_workers_on_nodes_are_done_once_or_said_to_be_lost(
    autojump_clock: MockClock, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A pull router on the driver; the app of each node has a worker; nodes are killed and drained at any moment."""
    caplog.set_level("CRITICAL", "levada")
    rng = random.Random(seed)
    async with fleet(2) as f:
        letters: list[tuple[Any, str]] = []
        f.driver.events.subscribe(DeadLetter, f.driver.spawn(Letters, letters))
        router: Any = f.driver.spawn(group("toil", routing=pull()))
        for number in range(100):
            router.tell(Job(number))
            if rng.random() < 0.3:
                await trio.sleep(rng.random() * 2)
            if rng.random() < 0.1:
                f.task(rng.choice(["n0", "n1"])).kill()
            elif rng.random() < 0.03:
                await f.nodes.restart()
        await trio.sleep(60)
        begun = sharing_app.BEGUN
        lost = [m.number for m, why in letters if isinstance(m, Job)]
        assert {why for m, why in letters if isinstance(m, Job)} <= {"lost"}
        assert len(begun) == len(set(begun))
        assert set(begun) | set(lost) == set(range(100))
        assert len(lost) <= len(f.tasks)
        assert router.depth() == 0


@pytest.mark.ci
@seeds(6, 25)
async def test_in_any_trouble_all_members_agree_in_the_end(
    autojump_clock: MockClock, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Joins, leaves, names and ends on three members; nodes are killed and cut off from each other at any moment."""
    caplog.set_level("CRITICAL", "levada")
    rng = random.Random(seed)
    async with fleet(2) as f:
        made = 0
        holders: dict[str, Any] = {}
        for _ in range(60):
            await trio.sleep(rng.choice([0.0, 0.0, 0.001, 0.2, 1.0]))
            name, system = rng.choice([*f.systems.items()])
            refs = system.groups.members("g")
            match rng.choice(
                ["join", "join", "join", "foreign", "leave", "end", "name", "free", "kill", "cut", "route"]
            ):
                case "join":
                    made += 1
                    system.groups.join("g", spawn(system, f"w{made}"))
                case "foreign" if refs:
                    system.groups.join("h", rng.choice(refs))
                case "leave" if refs:
                    system.groups.leave(rng.choice(["g", "h"]), rng.choice(refs))
                case "end" if refs:
                    ref = rng.choice(refs)
                    if hasattr(ref, "_actor"):
                        ref.kill()
                case "name":
                    made += 1
                    worker = spawn(system, f"w{made}")
                    wanted = rng.choice("xy")
                    try:
                        with trio.move_on_after(2):
                            await nodes_of(system).register(wanted, worker)
                            holders[wanted] = worker
                    except ActorError:
                        pass
                case "free":
                    try:
                        with trio.move_on_after(2):
                            await nodes_of(system).unregister(rng.choice("xy"))
                    except ActorError:
                        pass
                case "kill" if name != "the driver":
                    f.task(name).kill()
                case "cut":
                    for link in [*nodes_of(system).refs._links.values()]:
                        link.cut()
                case "route" if refs:
                    rng.choice(refs).tell(Text("hi"))
        await trio.sleep(30)
        systems = f.systems
        assert len(systems) == 3
        for topic in ("g", "h"):
            own = [
                f"{ref.path} at {name}"
                for name, system in systems.items()
                for ref in system.groups.members(topic)
                if hasattr(ref, "_actor")
            ]
            f.agree(topic, *own)
            for system in systems.values():
                for ref in system.groups.members(topic):
                    assert ref.is_alive
                    assert await ref.ask(Who()) in ("driver", "n0", "n1")
        for wanted in "xy":
            found = [system.registry.get(wanted) for system in systems.values()]
            paths = {(ref.path, await ref.ask(Who())) if ref is not None else None for ref in found}
            assert len(paths) == 1
