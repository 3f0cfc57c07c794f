"""The driver of connections, as a protocol that is not levada's sees it: which carriers it refuses, and how a block ends."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest
import trio
from tests.simnet import SimNet
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.actors import aqueduct, lumberjack, maop, rsocket
from levada.actors.authentication import Credentials
from levada.actors.authenticators import BearerTokens
from levada.actors.driver import Phase
from levada.actors.listening import HURRY, Accepted, Acceptor, refuse, running
from levada.actors.single import SingleDriver, accept_single, dial_single, listen_single
from levada.framework import ActorSystem, Identity, Lost, Normal
from levada.framework.errors import ConfigurationError, ConnectionLost
from levada.transports import carriers
from levada.transports.carriers import MemoryConfig, MessageStream, dial, listen
from levada.transports.quic import QuicConfig
from levada.transports.quic import dial as dial_quic
from levada.transports.quic import listen as listen_quic

MESSAGES = MemoryConfig(shape="messages")


@attrs.frozen
class Ended:
    code: int
    reason: str


class Core:
    """Sends what it is given, and ignores what comes."""

    def __init__(self) -> None:
        self.out: list[bytes] = []
        self.events: list[Ended] = []
        self.ended = False

    def take_events(self) -> list[Ended]:
        self.events, events = [], self.events
        return events

    def data_to_send(self, now: float) -> list[bytes]:
        self.out, out = [], self.out
        return out

    def next_deadline(self) -> None:
        return None

    def handle_timeout(self, now: float) -> list[Ended]:
        return self.take_events()

    def drain(self, now: float) -> list[Ended]:
        return self.close(0, "drained", now)

    def close(self, code: int, reason: str, now: float) -> list[Ended]:
        if not self.ended:
            self.ended = True
            self.events.append(Ended(code, reason))
        return self.take_events()

    connection_lost = close


class BytesCore(Core):
    def receive_data(self, data: bytes, now: float) -> list[Ended]:
        return self.take_events() if data else self.close(1, "the peer has gone", now)


class MessagesCore(Core):
    def receive_message(self, message: bytes, now: float) -> list[Ended]:
        return self.take_events()


class Connection(SingleDriver[Core]):
    opening: Callable[[], AbstractAsyncContextManager[Any]]
    make_core: type[Core]
    protocol = "plain"

    async def carry(self) -> None:
        async with self.opening() as carrier:
            self.core = self.make_core()
            self.attach(carrier)
            self.connected(carrier.info)
            self.greeted()
            await self.read(carrier)

    events: ClassVar = {Ended: lambda self, event: self.ended(event, event.reason)}


class Listener(Acceptor[Connection]):
    url_: str
    config: MemoryConfig
    make_core: type[Core]

    def listening(self) -> AbstractAsyncContextManager[Any]:
        return listen_single(self.url_, self.config, alpn="plain")

    def url_of(self, carrier_url: str) -> str:
        return carrier_url

    @property
    def max_connections(self) -> int:
        return 10

    def make(self, accepted: Accepted) -> Connection:
        return Connection(lambda: accept_single(accepted), self.make_core)


@asynccontextmanager
async def client(system: ActorSystem, url: str, make_core: type[Core]) -> AsyncIterator[Connection]:
    async with running(system, Connection(lambda: dial_single(url, alpn="plain"), make_core)) as connection:
        yield connection


REFUSALS = [
    (BytesCore, MESSAGES, "plain needs a carrier of a byte stream; memory:// carries messages"),
    (MessagesCore, MemoryConfig(), "plain needs a carrier of messages; memory:// carries a byte stream"),
]


@pytest.mark.parametrize(("make_core", "config", "text"), REFUSALS)
async def test_a_carrier_that_does_not_fit_the_core_is_refused(
    make_core: type[Core], config: MemoryConfig, text: str
) -> None:
    async with listen("memory://desk", config), ActorSystem("test") as system:
        with pytest.raises(ConfigurationError, match=f"^{text}$"):
            async with client(system, "memory://desk", make_core):
                raise AssertionError("it must not connect")


@pytest.mark.parametrize(("make_core", "config", "text"), REFUSALS)
async def test_a_server_warns_of_a_carrier_that_does_not_fit(
    make_core: type[Core], config: MemoryConfig, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with (
        ActorSystem("test") as system,
        running(system, Listener("memory://desk", config, make_core)) as listener,
        dial(listener.url, config) as carrier,
    ):
        with suppress(ConnectionLost):
            assert not isinstance(carrier, carriers.Connection)
            assert not await (carrier.receive() if isinstance(carrier, MessageStream) else carrier.receive_some())
        assert not listener.connections
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [text]


@pytest.mark.parametrize("side", ["client", "server"])
async def test_a_peer_that_does_not_read_cannot_hold_up_a_block_that_failed(
    side: str, autojump_clock: MockClock
) -> None:
    """The bytes that are queued get a second; then the carrier is closed without them."""

    def stuff(connection: Connection) -> None:
        connection.core.out.append(bytes(10_000_000))
        connection.flush()

    async def fail_as_client(system: ActorSystem) -> None:
        async with client(system, "memory://desk", BytesCore) as connection:
            stuff(connection)
            raise ZeroDivisionError

    async def fail_as_server(system: ActorSystem) -> None:
        async with (
            AsyncExitStack() as peer,
            running(system, Listener("memory://other", MemoryConfig(), BytesCore)) as listener,
        ):
            await peer.enter_async_context(dial(listener.url))
            await wait_all_tasks_blocked()
            stuff(*listener.connections)
            raise ZeroDivisionError

    async with listen("memory://desk"), ActorSystem("test") as system:
        began = trio.current_time()
        with pytest.raises(ZeroDivisionError):
            await (fail_as_client if side == "client" else fail_as_server)(system)
        assert trio.current_time() - began == pytest.approx(HURRY)


def served(protocol: str, system: ActorSystem) -> AbstractAsyncContextManager[Any]:
    url = f"{protocol}+memory://young"

    async def handler(m: Any) -> None:
        raise AssertionError("there are no requests")

    match protocol:
        case "rsocket" | "reactivesocket":
            return rsocket.serve(system, url, handler)
        case "aqueduct":
            return aqueduct.serve(system, url, handler, Any)
        case "maop":
            return maop.serve(system, url, {}, authenticate=BearerTokens.of({b"secret": Identity("client")}))
        case _:
            return lumberjack.serve(system, url, handler)


@pytest.mark.parametrize("protocol", ["rsocket", "aqueduct", "maop", "lumberjack"])
async def test_a_listener_ends_at_once_however_young_its_connection_is(
    protocol: str, autojump_clock: MockClock
) -> None:
    """The connection is closed before it has a carrier, a reader, or anything else that comes one step later."""
    shape: Any = "connection" if protocol in ("aqueduct", "maop") else "bytes"
    for turns in range(16):
        async with (
            ActorSystem() as system,
            served(protocol, system) as listener,
            dial("memory://young", MemoryConfig(shape=shape)),
        ):
            for _ in range(turns):
                await trio.lowlevel.checkpoint()
            began = trio.current_time()
            await listener.aclose()
            assert trio.current_time() - began < 0.1, turns


async def test_a_client_that_has_waited_too_long_for_a_place_is_refused(
    autojump_clock: MockClock, certificate: Path
) -> None:
    """Its listener may be ending just then."""
    net = SimNet(1)
    serving = QuicConfig(certificate=certificate, key=certificate, handshake_timeout=3.0)
    async with (
        listen_quic("quic://server:4433", serving, port=net.port("server", 4433)) as listener,
        trio.open_nursery() as nursery,
    ):

        async def come() -> None:
            with suppress(ConnectionLost):
                async with dial_quic("quic://server:4433", QuicConfig(ca=certificate), port=net.port("client")):
                    raise AssertionError("it was let in")

        nursery.start_soon(come)
        accepted = await listener.accept()
        await trio.sleep(4.0)
        with trio.move_on_after(0.1):
            await listener.accept()  # notices it
        assert accepted.decided
        refuse(accepted)
        nursery.cancel_scope.cancel()


async def test_a_connection_that_is_closed_just_when_it_gets_a_carrier_ends_in_order(autojump_clock: MockClock) -> None:
    there, ends = trio.Event(), list[type[BaseException]]()

    @asynccontextmanager
    async def opening() -> AsyncIterator[Any]:
        async with dial_single("memory://desk", alpn="plain") as carrier:
            await there.wait()
            try:
                yield carrier
            except BaseException as error:
                ends.append(type(error))
                raise

    async with listen("memory://desk", MemoryConfig()) as listener, ActorSystem("test") as system:
        connection = Connection(opening, BytesCore)
        ref = system.spawn(lambda: connection)
        accepted = await listener.accept()
        await wait_all_tasks_blocked()
        there.set()  # its task goes on in the next step, whatever is cancelled now
        connection.shut()
        assert (await ref.terminated(), connection.phase) == (Normal(), Phase.CLOSED)
        assert not isinstance(accepted, carriers.Incoming)
        accepted.abort()
    assert [issubclass(end, Exception) for end in ends] == [False]  # only the cancellation


class LeavingCore(BytesCore):
    """Its open work takes longer than the drain."""

    def drain(self, now: float) -> list[Ended]:
        return []


class Greeting(Connection):
    """Lets the client in when the listener's hook says so."""

    let_in: list[Identity | None]

    async def carry(self) -> None:
        async with self.opening() as carrier:
            self.core = self.make_core()
            self.attach(carrier)
            self.connected(carrier.info)
            self.authenticate(self.credentials)
            await self.read(carrier)

    def admitted(self, identity: Identity | None) -> None:
        self.let_in.append(identity)
        super().admitted(identity)


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_decision_about_a_client_that_is_leaving_comes_too_late(
    autojump_clock: MockClock, leaves: bool
) -> None:
    """It is not let in, and counts for no identity."""
    decide, let_in = trio.Event(), list[Identity | None]()

    async def hook(_: Credentials) -> Identity:
        await decide.wait()
        return Identity("ada")

    class Gate(Listener):
        def make(self, accepted: Accepted) -> Connection:
            self.made = Greeting(lambda: accept_single(accepted), self.make_core, let_in=let_in)
            return self.made

    gate = Gate("memory://desk", MemoryConfig(), LeavingCore, authenticate=hook)
    async with ActorSystem("test") as system, running(system, gate), dial("memory://desk"):
        await wait_all_tasks_blocked()
        async with trio.open_nursery() as nursery:
            if leaves:
                nursery.start_soon(gate.made.aclose)
                await wait_all_tasks_blocked()
            assert gate.made.phase is (Phase.DRAINING if leaves else Phase.GREETING)
            decide.set()
            await wait_all_tasks_blocked()
            assert let_in == ([] if leaves else [Identity("ada")])
            assert gate.made.identity == (None if leaves else Identity("ada"))
            gate.made.shut()


async def greet(system: ActorSystem, protocol: str, url: str, stack: AsyncExitStack) -> Any:
    match protocol:
        case "aqueduct":
            return await stack.enter_async_context(aqueduct.connect(system, url, object))
        case "maop":
            return await stack.enter_async_context(maop.connect(system, url, token=b"secret"))
        case _:
            return await stack.enter_async_context(rsocket.connect(system, url))


def cut(peer: Any) -> None:
    carrier = peer._connection.carrier
    getattr(carrier, "stream", carrier).link.cut("somebody dug")


@pytest.mark.parametrize("end", ["client", "server", "client aborts", "server aborts", "network"])
@pytest.mark.parametrize("protocol", ["aqueduct", "maop", "rsocket", "reactivesocket"])
async def test_both_sides_are_told_who_ended_a_connection(protocol: str, end: str, autojump_clock: MockClock) -> None:
    async with ActorSystem() as system, served(protocol, system) as listener, AsyncExitStack() as stack:
        client = await greet(system, protocol, listener.url, stack)
        await wait_all_tasks_blocked()
        (server,) = listener.peers
        lost = {"client": Lost(server.info.peer), "server": Lost(client.info.peer)}
        match end:
            case "client" | "server":
                await (client if end == "client" else server).aclose()
            case "client aborts" | "server aborts":
                (client if end == "client aborts" else server).abort()
            case _:
                cut(client)
        ours = Normal() if end.startswith("client") else lost["server"]
        theirs = Normal() if end.startswith("server") else lost["client"]
        assert (await client.terminated(), await server.terminated()) == (ours, theirs)
