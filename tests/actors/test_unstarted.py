"""Every kind of actor of the library ends without an error, and lets go of everything, if it ends before it started or while it starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

pytest.importorskip("pyarrow")

from tests.actors.durable.accounts import EVENTS, Account, Deposit, Deposited
from tests.actors.durable.test_placement import APP, Placed
from tests.actors.nodes.conftest import nodes_here

from levada.actors import aqueduct, lumberjack, maop, rsocket
from levada.actors.authenticators import BearerTokens
from levada.actors.durable import shards
from levada.actors.lumberjack import SpoolConfig, tail
from levada.framework import Actor, ActorSystem, Asks, Identity, Ref, handles, message
from levada.framework.errors import LevadaError

Scenario = Callable[[ActorSystem, Path], Awaitable[None]]


@message("tests.unstarted.Hello")
class Hello(Asks[str]):
    friend: Ref[Any]


class Desk(Actor[Hello]):
    @handles
    def on_hello(self, m: Hello) -> str:
        return "hello"


class Injected(Exception):
    """The failure of a `started`."""


def fail(*_: Any, **__: Any) -> Any:
    raise Injected


class Trial(ActorSystem):
    """Ends the first actor of one class in the moment when it is spawned, or has its `started` fail half-way."""

    def __init__(self, kind: type[Any] | None = None, way: str = "") -> None:
        super().__init__("trial", shutdown_timeout=100.0, ask_timeout=150.0, stop_timeout=1.0)
        self.kind = kind
        self.way = way
        self.kinds: dict[type[Any], None] = {}
        self.chosen = trio.Event()
        self.scope = trio.CancelScope()

    def install(self, parent: Any, actor: Any, *args: Any, **options: Any) -> Any:
        self.kinds[type(actor)] = None
        chosen = type(actor) is self.kind and not self.chosen.is_set()
        if chosen and self.way == "fail":
            actor.start_soon = actor.spawn = actor.enter = fail
        cell = super().install(parent, actor, *args, **options)
        if chosen:
            self.chosen.set()
            match self.way:
                case "stop":
                    cell.stop(now=True)
                case "kill":
                    cell.kill()
                case "cancel":
                    self.scope.cancel()
        return cell


async def over_aqueduct(system: ActorSystem, folder: Path) -> None:
    desk = system.spawn(Desk)
    system.registry.register("desk", desk)
    async with (
        aqueduct.serve(system, "aqueduct+memory://desk", Desk, Hello, expose={"desk"}) as listener,
        aqueduct.connect(system, listener.url, Hello) as peer,
    ):
        there = await peer.lookup("desk", Hello)
        assert await there.ask(Hello(desk)) == "hello"
        await peer.send(Hello(desk), receipt=True)


async def over_rsocket(system: ActorSystem, folder: Path) -> None:
    async def echo(request: Any) -> bytes:
        return bytes(request.data)

    async with (
        rsocket.serve(system, "rsocket+memory://desk", echo) as listener,
        rsocket.connect(system, listener.url) as requester,
    ):
        await requester.fire_and_forget(b"x")
        assert await requester.request_response(b"x") is not None


async def over_maop(system: ActorSystem, folder: Path) -> None:
    async def echo(call: Any) -> bytes:
        return b"x"

    admits = BearerTokens.of({b"secret": Identity("client")})
    async with (
        maop.serve(system, "maop+memory://desk", {7: maop.Handler(echo)}, authenticate=admits) as listener,
        maop.connect(system, listener.url, token=b"secret") as client,
    ):
        await client.request(7)


async def over_lumberjack(system: ActorSystem, folder: Path) -> None:
    async def sink(unit: Any) -> None:
        pass

    (folder / "a.log").write_text("one\ntwo\n")
    spool = SpoolConfig(folder=folder / "spool")
    async with (
        lumberjack.serve(system, "lumberjack+memory://desk", sink) as reader,
        lumberjack.connect(system, reader.url, spool=spool) as writer,
        tail(system, [str(folder / "*.log")], writer.deliver, registry=folder / "registry"),
    ):
        await writer.flush()


async def durable_here(system: ActorSystem, folder: Path) -> None:
    accounts = await shards(system, Account, events=EVENTS, journal=folder, shards=2)
    assert await accounts["anna"].ask(Deposit(5)) == 5


async def durable_on_nodes(system: ActorSystem, folder: Path) -> None:
    folder = folder / "journal"
    async with nodes_here(system, 1, APP) as (nodes, _):
        accounts = await shards(system, Placed, events=Deposited, journal=folder, shards=2, nodes=nodes)
        assert await accounts["anna"].ask(Deposit(5)) == 5


SCENARIOS: dict[str, Scenario] = {
    each.__name__: each
    for each in (over_aqueduct, over_rsocket, over_maop, over_lumberjack, durable_here, durable_on_nodes)
}


EXPECTED = {
    "over_aqueduct": {"AqueductDriver", "ServerConnection", "ListenerActor", "Outbound", "Export"},
    "over_rsocket": {"ClientConnection", "ServerConnection", "ListenerActor", "Answer", "Fired"},
    "over_maop": {
        "ClientActor",
        "ClientConnection",
        "ServerConnection",
        "ListenerActor",
        "ControlKeeper",
        "OwnOperation",
        "Execution",
    },
    "over_lumberjack": {"ReaderActor", "LumberjackDriver", "SpoolPump", "Scanner", "FileReader"},
    "durable_here": {"Journal", "Shard"},
    "durable_on_nodes": {"Placement", "Follower", "Coordinator", "Node"},
}
"""Kinds that each scenario has, among others."""


async def end_one(scenario: Scenario, kind: type[Any] | None, way: str, folder: Path) -> Trial:
    """Run a scenario until the actor has been spawned and everything waits again; without a `kind`, to its end."""
    system = Trial(kind, way)
    with trio.fail_after(150), system.scope:
        try:
            async with system, trio.open_nursery() as nursery:
                nursery.start_soon(scenario, system, folder)
                if kind is not None:
                    await system.chosen.wait()
                    await wait_all_tasks_blocked(0.001)
                    nursery.cancel_scope.cancel()
        except* (LevadaError, OSError, Injected):
            assert kind is not None  # part of it was gone
    return system


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd")) if sys.platform == "linux" else set()


@pytest.mark.parametrize("way", ["stop", "kill", "cancel", "fail"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.ci if "durable" in name else ()) for name in SCENARIOS]
)
async def test_an_actor_that_never_started_ends_in_order(
    name: str, way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No traceback but of the injected failure is logged, and no file and no socket stays open."""
    folders = [tmp_path / str(number) for number in range(50)]
    for folder in folders:
        folder.mkdir()
    whole = await end_one(SCENARIOS[name], None, "", folders.pop())
    kinds = [kind for kind in whole.kinds if kind.__module__.startswith("levada.")]
    assert {kind.__name__ for kind in kinds} >= EXPECTED[name]
    for kind in kinds:
        if way == "fail" and kind.started is Actor.started:
            continue
        caplog.clear()
        before = descriptors()
        await end_one(SCENARIOS[name], kind, way, folders.pop())
        assert descriptors() == before
        assert [
            record.getMessage()
            for record in caplog.records
            if record.exc_info is not None and not (way == "fail" and isinstance(record.exc_info[1], Injected))
        ] == [], kind
