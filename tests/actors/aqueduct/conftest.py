"""A client and a server that keeps what it gets, on the memory carrier or on QUIC over a simulated network."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

import attrs
import pytest
import trio
from tests.actors.carried import CARRIERS, cut, settings
from tests.simnet import SimNet

from levada.actors.aqueduct import Listener, Peer, PeerConfig, connect, serve
from levada.actors.aqueduct.connection import AqueductDriver
from levada.actors.aqueduct.entry import connect_over, serve_over
from levada.framework import (
    Actor,
    ActorSystem,
    Asks,
    Down,
    Exit,
    OneshotReceiver,
    OneshotSender,
    Receiver,
    Ref,
    Sender,
    channel,
    handles,
    message,
)
from levada.transports.quic import QuicConfig, dial, listen


@message("tests.aqueduct.Parcel")
class Parcel:
    """Handles of every kind, at every depth."""

    text: str = ""
    sender: Sender[Any] | None = None
    receiver: Receiver[Any] | None = None
    sends_one: OneshotSender[Any] | None = None
    gets_one: OneshotReceiver[Any] | None = None
    many: list[Any] = attrs.field(factory=list)
    named: dict[str, Sender[int]] = attrs.field(factory=dict)
    inner: Parcel | None = None


@pytest.fixture(autouse=True)
def no_traceback(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing that a peer sends ends in a traceback in a log; the marker `handler_fails` is for what code of the user raises."""
    yield
    if request.node.get_closest_marker("handler_fails"):
        return
    ours = ("levada.actors", "levada.transports", "levada.framework.channel")
    said = [record for record in caplog.get_records("call") if record.name.startswith(ours)]
    assert [record.getMessage() for record in said if record.exc_info] == []


@attrs.frozen
class Ends:
    """Both sides of a connection."""

    system: ActorSystem
    listener: Listener
    peer: Peer[Any]
    got: Receiver[Any]
    """What the server's handler got."""

    @property
    def client(self) -> AqueductDriver:
        return self.peer._connection

    @property
    def server(self) -> AqueductDriver:
        connection: AqueductDriver
        (connection,) = self.listener._actor.connections
        return connection

    def cut(self) -> None:
        """Lose the connection."""
        cut(self.client.carrier)

    def left(self) -> tuple[int, ...]:
        """Count what may be left behind, on both sides: halves, unclaimed, tombstones, records, octets, streams but the control stream."""
        return tuple(
            count
            for end in (self.client, self.server)
            for count in (
                len(end.core.halves) - 1,  # the entrypoint
                len(end.core.unclaimed),
                len(end.core.links.tombstones),
                len(end.halves.records) - 1,
                end.core.held,
            )
        )


Start = Callable[..., AbstractAsyncContextManager[Ends]]


class Keeper:
    """The handler: hands on what it gets."""

    def __init__(self) -> None:
        self.sender, self.got = channel(Any)

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, *_: object) -> None:
        self.sender.cancel()
        self.got.close()

    def function(self) -> Callable[[Any], Any]:
        async def keep(m: Any) -> None:
            await self.sender.send(m)

        return keep


@pytest.fixture(params=CARRIERS)
def scheme(request: pytest.FixtureRequest) -> str:
    """The carrier that connections in memory run on."""
    return str(request.param)


@pytest.fixture
def start(scheme: str) -> Start:
    """Begin a connection in memory; keyword arguments are settings of both sides."""

    @asynccontextmanager
    async def begin(item: Any = object, **changes: Any) -> AsyncIterator[Ends]:
        config = PeerConfig(**{**changes, "carrier": settings(scheme, changes.get("carrier"))})
        with Keeper() as keeper:
            async with (
                ActorSystem() as system,
                serve(system, f"aqueduct+{scheme}://desk", keeper.function(), Any, config=config) as listener,
                connect(system, listener.url, item, config=config) as peer,
            ):
                yield Ends(system, listener, peer, keeper.got)

    return begin


@pytest.fixture
def start_on_network(quic: tuple[QuicConfig, QuicConfig]) -> Start:
    """Begin a connection over QUIC on a simulated network."""

    @asynccontextmanager
    async def begin(net: SimNet, item: Any = object, **changes: Any) -> AsyncIterator[Ends]:
        config = PeerConfig(**changes)
        listening = partial(listen, "quic://server:4433", quic[0], port=net.port("server", 4433))
        dialling = partial(dial, "quic://server:4433", quic[1], port=net.port("client"))
        with Keeper() as keeper:
            async with (
                ActorSystem() as system,
                serve_over(system, listening, keeper.function(), Any, config=config) as listener,
                connect_over(system, dialling, item, config=config) as peer,
            ):
                assert listener.url == "aqueduct://server:4433"
                yield Ends(system, listener, peer, keeper.got)

    return begin


async def settled() -> None:
    """Let all acks, declarations and nacks pass."""
    await trio.sleep(10)


@message("tests.aqueduct.Do")
class Do(Asks[Any]):
    """Do something, wait for something, and answer."""

    what: str = "count"
    value: Any = None
    who: Any = None


@message("tests.aqueduct.Note")
class Note:
    """To be noted."""

    text: str = ""
    refs: list[Ref[Any]] = attrs.field(factory=list)
    named: dict[str, Ref[Any]] = attrs.field(factory=dict)
    inner: Note | None = None


class Clerk(Actor[Any]):
    """Notes what it is told, and does what it is asked."""

    accept_remote_links = True

    def __attrs_post_init__(self) -> None:
        self.notes: list[Any] = []
        self.gate = trio.Event()

    @handles
    def note(self, m: Note) -> None:
        self.notes.append(m)

    @handles
    def down(self, m: Down) -> None:
        self.notes.append(m)

    @handles
    def exit(self, m: Exit) -> None:
        self.notes.append(m)

    @handles(str)
    def text(self, m: str) -> None:
        self.notes.append(m)

    @handles
    async def do(self, m: Do) -> Any:
        match m.what:
            case "count":
                return len(self.notes)
            case "texts":
                return [note if isinstance(note, str) else getattr(note, "text", None) for note in self.notes]
            case "say":
                return m.value
            case "fail":
                raise KeyError(m.value)
            case "stop":
                self.stop()
                return "stopping"
            case "wait":
                await self.gate.wait()
                return "waited"
            case "sleep":
                await trio.sleep(m.value)
                return "slept"
            case "me":
                return self.ref
            case "last":
                return self.notes[-1].refs[0]
            case "watch":
                self.watch(m.who, m.value)
            case "unwatch":
                self.unwatch(m.who, m.value)
            case "link":
                self.link(m.who)
            case "unlink":
                self.unlink(m.who)
            case "tell":
                m.who.tell(m.value)
            case "send":
                await m.who.send(m.value)
            case "ask":
                return await m.who.ask(m.value)
            case "refuse":
                self.reply_later().fail(ValueError(m.value))
            case "stream":
                sender, receiver = channel(int)
                with sender:
                    for number in range(m.value):
                        sender.send_nowait(number)
                return receiver
            case "into":
                with m.value as sender:
                    sender.send_nowait(len(self.notes))
            case "forget":
                self.reply_later()
        return None


class Trapper(Clerk):
    """The same; the ends of linked actors are notes."""

    trap_exits = True


class Private(Clerk):
    """The same; not to be linked to from elsewhere."""

    accept_remote_links = False


@attrs.define
class Two:
    """Two systems with a connection between them, and an actor of the second that the first has looked up."""

    here: ActorSystem
    there: ActorSystem
    listener: Listener
    peer: Peer[Any]
    got: Receiver[Any]
    cell: Any
    """The actor, in its own system."""
    ref: Any
    """The actor, from the other system."""

    @property
    def client(self) -> AqueductDriver:
        return self.peer._connection

    @property
    def server(self) -> AqueductDriver:
        connection: AqueductDriver
        (connection,) = self.listener._actor.connections
        return connection

    @property
    def clerk(self) -> Any:
        """What the actor is."""
        return self.cell._actor

    def cut(self) -> None:
        """Lose the connection."""
        cut(self.client.carrier)

    def left(self) -> tuple[int, ...]:
        """Count what is left on both sides but the entrypoint: halves, records, idle ones."""
        return tuple(
            count
            for end in (self.client, self.server)
            for count in (
                len(end.core.halves) - 1,
                len(end.core.unclaimed) + len(end.core.links.tombstones) + end.core.held,
                len(end.halves.records) - 1,
                len(end.core.background),
            )
        )


@pytest.fixture
def two(scheme: str) -> Callable[..., AbstractAsyncContextManager[Two]]:
    """Begin two systems; arguments are the class of the actor and its mailbox, keyword arguments settings of both sides."""

    @asynccontextmanager
    async def begin(kind: type[Clerk] = Clerk, mailbox: Any = None, **changes: Any) -> AsyncIterator[Two]:
        config = PeerConfig(**{**changes, "carrier": settings(scheme, changes.get("carrier"))})
        with Keeper() as keeper:
            async with ActorSystem("there") as there, ActorSystem("here") as here:
                cell = there.spawn(kind, name="clerk", mailbox=mailbox)
                there.registry.register("clerk", cell)
                async with (
                    serve(
                        there, f"aqueduct+{scheme}://office", keeper.function(), Any, expose={"clerk"}, config=config
                    ) as listener,
                    connect(here, listener.url, object, config=config) as peer,
                ):
                    both = Two(here, there, listener, peer, keeper.got, cell, await peer.lookup("clerk", object))
                    del cell  # what the test does not hold, nobody does
                    yield both

    return begin
