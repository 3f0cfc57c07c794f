"""`Actor.peer` and `current_peer` in handlers of every protocol: the other end of the connection that brought the message."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.actors import aqueduct, lumberjack, maop, rsocket
from levada.actors.authenticators import BearerTokens
from levada.framework import (
    Actor,
    ActorSystem,
    Asks,
    Identity,
    Receiver,
    Ref,
    RemotePeer,
    channel,
    current_peer,
    handles,
    message,
)


@message("tests.peers.Hello")
class Hello(Asks[str]):
    text: str


@message("tests.peers.Feed")
class Feed:
    hellos: Receiver[Hello]
    done: Ref[Hello]


CLIENT = Identity("client")

Seen = list[RemotePeer | None]


class Desk(Actor[Any]):
    """Takes what the protocols bring."""

    seen: Seen

    def note(self, *_: Any) -> str:
        assert self.peer == current_peer()
        self.seen.append(self.peer)
        return "noted"

    @handles
    def on_hello(self, m: Hello) -> str:
        return self.note()

    @handles
    async def on_unit(self, m: lumberjack.Unit) -> None:
        self.note()

    @rsocket.route("hello")
    async def hello(self, data: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        return self.note().encode()


class Operation(maop.OperationActor):
    seen: Seen

    async def execute(self, call: maop.Call) -> bytes:
        await trio.lowlevel.checkpoint()
        assert self.peer == current_peer()
        self.seen.append(self.peer)
        return b"noted"


def handler(kind: str, seen: Seen, system: ActorSystem) -> Any:
    async def note(_: Any) -> bytes:
        await trio.lowlevel.checkpoint()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(inside, seen)
        return b"noted"

    async def inside(seen: Seen) -> None:
        seen.append(current_peer())

    return {"function": note, "actor": partial(Desk, seen), "ref": system.spawn(Desk, seen)}[kind]


def serve(protocol: str, kind: str, seen: Seen, system: ActorSystem) -> AbstractAsyncContextManager[Any]:
    url, taker = f"{protocol}+memory://desk", handler(kind, seen, system)
    match protocol:
        case "aqueduct":
            return aqueduct.serve(system, url, taker, Hello)
        case "maop":
            table = {7: maop.Handler(taker if kind == "function" else partial(Operation, seen))}
            return maop.serve(system, url, table, authenticate=BearerTokens.of({b"secret": CLIENT}))
        case "lumberjack":
            return lumberjack.serve(system, url, taker)
        case _:
            return rsocket.serve(system, url, taker)


async def send(protocol: str, kind: str, system: ActorSystem, url: str) -> str | None:
    """Send one message over a connection of its own; return this side's address, if it is known."""
    match protocol:
        case "aqueduct":
            async with aqueduct.connect(system, url, Hello) as peer:
                await peer.send(Hello("x"), receipt=True)
                await wait_all_tasks_blocked()
                return peer.info.local
        case "maop":
            async with maop.connect(system, url, token=b"secret") as client:
                await client.request(7)
                return client.info.local
        case "lumberjack":
            async with lumberjack.connect(system, url) as writer:
                await writer.send({"line": "x"})
                await writer.flush()
                return None
        case _:
            async with rsocket.connect(system, url) as requester:
                if kind == "ref":
                    assert await requester.request_response(Hello("x")) == "noted"
                else:
                    await requester.request_response(b"x", route="hello")
                return requester.info.local


CASES = [
    (protocol, kind)
    for protocol in ("aqueduct", "maop", "lumberjack", "rsocket", "reactivesocket")
    for kind in ("function", "actor", "ref")
    if (protocol, kind) != ("maop", "ref")
]


@pytest.mark.parametrize(("protocol", "kind"), CASES)
async def test_a_handler_knows_whose_message_it_handles(protocol: str, kind: str, autojump_clock: MockClock) -> None:
    seen: Seen = []
    async with ActorSystem() as system, serve(protocol, kind, seen, system) as listener:
        addresses = [await send(protocol, kind, system, listener.url) for _ in range(2)]
        await wait_all_tasks_blocked()
    peers = [peer for peer in seen if peer is not None]
    name = "rsocket" if protocol == "reactivesocket" else protocol  # two dialects of one driver
    identity = CLIENT if protocol == "maop" else None
    assert [(peer.protocol, peer.identity) for peer in peers] == [(name, identity)] * 2
    assert len(seen) == 2
    assert [peer.info.peer for peer in peers] == [peer.address for peer in peers]
    assert protocol == "lumberjack" or [peer.address for peer in peers] == addresses


async def test_refs_and_channels_bring_the_peer_in_both_directions(autojump_clock: MockClock) -> None:
    seen: Seen = []
    theirs: Seen = []

    async def serve_feed(m: Feed) -> None:
        desk = system.spawn(Desk, seen)
        m.hellos.to_mailbox(desk)
        assert await m.done.ask(Hello("back")) == "noted"

    async with ActorSystem() as system, ActorSystem() as far:
        desk = system.spawn(Desk, seen)
        system.registry.register("desk", desk)
        async with (
            aqueduct.serve(system, "aqueduct+memory://desk", serve_feed, Feed, expose={"desk"}) as listener,
            aqueduct.connect(far, listener.url, Feed) as peer,
        ):
            there = await peer.lookup("desk", Hello)
            there.tell(Hello("1"))
            assert await there.ask(Hello("2")) == "noted"
            desk.tell(Hello("local"))
            hellos, fed = channel(Hello)
            async with hellos:
                await peer.send(Feed(fed, far.spawn(Desk, theirs)))
                await hellos.send(Hello("3"))
            await wait_all_tasks_blocked()
            client, server = peer.info, listener.peers[0].info
    assert [peer and peer.address for peer in seen] == [server.peer, server.peer, None, server.peer]
    assert [peer and (peer.address, peer.protocol) for peer in theirs] == [(client.peer, "aqueduct")]


async def test_a_message_that_came_before_the_end_keeps_its_peer(autojump_clock: MockClock) -> None:
    seen: Seen = []

    class Slow(Desk):
        @handles
        async def on_hello(self, m: Hello) -> str:  # type: ignore[override]
            await trio.sleep(1)
            return self.note()

    async with ActorSystem() as system, ActorSystem() as far:
        slow = system.spawn(Slow, seen)
        async with (
            aqueduct.serve(system, "aqueduct+memory://desk", slow, Hello) as listener,
            aqueduct.connect(far, listener.url, Hello) as peer,
        ):
            for _ in range(3):
                await peer.send(Hello("x"))
            await wait_all_tasks_blocked()
            address = listener.peers[0].info.peer
            peer.abort()
        await trio.sleep(5)
    assert [peer and peer.address for peer in seen] == [address] * 3
