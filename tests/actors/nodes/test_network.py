"""Names, groups and singletons of a fleet whose members are hosts of a network that loses, delays and parts, in virtual time."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from tests.simnet import SimNet
from trio.testing import MockClock

from levada.actors.nodes import MemberState, NodeDown, NodeLost, nodes_of
from levada.actors.nodes.heartbeat import LAST, MARGIN
from levada.framework import ActorSystem, Failed, Lost, restart
from levada.framework.errors import ActorError, AskTimeout
from levada.transports.quic import QuicConfig

from . import sharing_app
from .network import DRIVER, SILENCE, nodes_on_network
from .sharing_app import SYSTEMS, Single, Text, Who
from .test_sharing import Fleet, fresh, spawn  # noqa: F401 - a fixture

APP = "tests.actors.nodes.sharing_app:app"
Sides = tuple[QuicConfig, QuicConfig]


@asynccontextmanager
async def fleet(sides: Sides, seed: int = 1, **link: Any) -> AsyncIterator[tuple[Fleet, Any]]:
    """A driver and two nodes, each a host."""
    net = SimNet(seed, turns=500_000, **({"delay": 0.01, "jitter": 0.01, "loss": 0.01} | link))
    async with (
        ActorSystem("driver", ask_timeout=5.0) as system,
        nodes_on_network(system, 2, APP, net, sides) as (nodes, hosts),
    ):
        yield Fleet(system, nodes, hosts.tasks), hosts


async def test_a_short_partition_changes_nothing(quic: Sides, autojump_clock: MockClock) -> None:
    """Of a node from all others, for less than `silence`: news is late, and none is lost."""
    async with fleet(quic) as (f, hosts):
        ids = [member.node_id for member in f.nodes.members]
        single = await f.nodes.spawn(Single, name="single", on="n0", supervise=restart("permanent"))
        hosts.divide("n0.0", "n1.0", DRIVER)
        joined = spawn(SYSTEMS["n0"], "w")
        SYSTEMS["n0"].groups.join("g", joined)
        await trio.sleep(SILENCE - 3)
        assert f.members("g") == [set(), {"/w at n0"}, set()]
        hosts.heal()
        await trio.sleep(10)
        f.agree("g", "/w at n0")
        assert [member.node_id for member in f.nodes.members] == ids
        assert await single.ask(Who()) == "n0"
        assert single.is_alive
        assert sharing_app.MOST == [1]


async def test_a_node_beyond_silence_ends_before_its_singleton_starts_elsewhere(
    quic: Sides, autojump_clock: MockClock
) -> None:
    """Its members leave, its name is free, its refs are lost; and nothing of it is left when the successor starts."""
    async with fleet(quic) as (f, hosts), f.nodes.events() as events:
        single = await f.nodes.spawn(Single, name="single", on="any", supervise=restart("permanent"))
        home = await single.ask(Who())
        other = "n1" if home == "n0" else "n0"
        SYSTEMS[home].groups.join("g", spawn(SYSTEMS[home], "w"))
        kept = spawn(SYSTEMS[other], "w")
        SYSTEMS[other].groups.join("g", kept)
        await trio.sleep(5)
        f.agree("g", "/w at n0", "/w at n1")
        began = trio.current_time()
        task = hosts.task(home)
        hosts.divide(task.host, DRIVER)
        hosts.divide(task.host, hosts.task(other).host)
        await task.gone.wait()
        assert SILENCE - 2 < trio.current_time() - began <= SILENCE + LAST
        assert sharing_app.RUNNING == []
        assert single.is_alive  # nobody knows yet
        down = await events.receive()
        assert isinstance(down, NodeDown)
        assert isinstance(down.reason, Failed)
        assert isinstance(down.reason.error, NodeLost)
        assert f"{home} hangs: no heartbeat for" in str(down.reason.error)
        assert SILENCE + MARGIN - 2 < trio.current_time() - began <= SILENCE + MARGIN + 3
        assert isinstance(await single.terminated(), Lost)
        for system in (f.driver, SYSTEMS[other]):
            found = await nodes_of(system).lookup("single", timeout=20)
            assert await found.ask(Who()) == other
            assert {system.groups.label(ref) for ref in system.groups.members("g")} == {f"/w at {other}"}
        assert sharing_app.MOST == [1, 1]
        await trio.sleep(30)  # the successor of the node is on a host that all reach
        assert f.nodes[home].state is MemberState.UP
        f.agree("g", f"/w at {other}")
        hosts.heal()
        await trio.sleep(30)
        assert [other] == sharing_app.RUNNING


async def test_two_nodes_that_cannot_reach_each_other_wait(quic: Sides, autojump_clock: MockClock) -> None:
    """Both reach the driver, so neither ends: questions end by their timeouts, and the rest arrives when the network heals."""
    async with fleet(quic) as (f, hosts):
        worker = spawn(SYSTEMS["n1"], "w")
        await nodes_of(SYSTEMS["n1"]).register("worker", worker)
        ref: Any = await nodes_of(SYSTEMS["n0"]).lookup("worker", timeout=5)
        assert await ref.ask(Who()) == "n1"
        hosts.divide(hosts.task("n0").host, hosts.task("n1").host)
        ref.tell(Text("during"))
        with pytest.raises(AskTimeout):
            await ref.ask(Who(), timeout=5)
        await trio.sleep(60)
        assert [(member.state, member.restarts) for member in f.nodes.members] == [(MemberState.UP, 0)] * 2
        assert ref.is_alive
        hosts.heal()
        await trio.sleep(120)
        assert worker._actor.got == ["during"]
        assert await ref.ask(Who()) == "n1"


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.ci) for seed in range(1, 6))])
async def test_whatever_partitions_there_are_all_members_agree_in_the_end(
    quic: Sides, autojump_clock: MockClock, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Joins, leaves, names and a singleton; hosts are cut off from each other for a while, and killed. Never two singletons."""
    caplog.set_level("CRITICAL", "levada")
    rng = random.Random(seed)
    async with fleet(quic, seed, loss=0.03) as (f, hosts), trio.open_nursery() as nursery:
        await f.nodes.spawn(Single, name="single", on="any", supervise=restart("permanent", max=1000))

        async def register(system: ActorSystem, name: str, worker: Any) -> None:
            try:
                await nodes_of(system).register(name, worker)
            except ActorError:
                pass

        for made in range(30):
            await trio.sleep(rng.choice([0.0, 0.1, 1.0, 4.0]))
            # A node may have ended that the driver still takes for one out of reach.
            name, system = rng.choice(
                [(n, s) for n, s in f.systems.items() if n == "the driver" or not hosts.task(n).gone.is_set()]
            )
            refs = system.groups.members("g")
            match rng.choice(["join", "join", "leave", "end", "name", "part", "part", "heal", "kill"]):
                case "join":
                    system.groups.join("g", spawn(system, f"w{made}"))
                case "leave" if refs:
                    system.groups.leave("g", rng.choice(refs))
                case "end" if refs:
                    ref: Any = rng.choice(refs)
                    if hasattr(ref, "_actor"):
                        ref.kill()
                case "name":
                    nursery.start_soon(register, system, rng.choice("xy"), spawn(system, f"w{made}"))
                case "part":
                    hosts.divide(*rng.sample(hosts.living(), k=min(len(hosts.living()), rng.choice([2, 2, 3]))))
                case "heal":
                    hosts.heal()
                case "kill" if name != "the driver" and rng.random() < 0.4:
                    hosts.task(name).die()
                case _:
                    pass
        await trio.sleep(rng.choice([0.0, 30.0]))
        hosts.heal()
        await trio.sleep(120)
        assert max(sharing_app.MOST) == 1
        systems = f.systems
        assert len(systems) == 3
        own = [
            f"{ref.path} at {name}"
            for name, system in systems.items()
            for ref in system.groups.members("g")
            if hasattr(ref, "_actor")
        ]
        f.agree("g", *own)
        for system in systems.values():
            for ref in system.groups.members("g"):
                assert await ref.ask(Who()) in ("driver", "n0", "n1")
        for wanted in ("x", "y", "single"):
            found: list[Any] = [system.registry.get(wanted) for system in systems.values()]
            homes = {(_path(wanted, ref), await ref.ask(Who())) if ref is not None else None for ref in found}
            assert len(homes) == 1
        assert [await systems["n0"].registry["single"].ask(Who())] == sharing_app.RUNNING


def _path(name: str, ref: Any) -> str:
    """Return the path of an actor; a kept name has another one in each process."""
    path: str = ref.path
    return "" if name == "single" else path
