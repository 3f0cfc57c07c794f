"""A ledger behind each protocol at each kind of URL: the server as an app for ``levada serve``, its clients, and the check of their history."""

from __future__ import annotations

import argparse
import os
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import count
from pathlib import Path
from signal import SIGTERM
from typing import Any, Final

import attrs
import trio
from tests.simulation import bank
from tests.simulation.bank import SETTINGS, Account, Added, Reminded

from levada.actors import aqueduct, lumberjack, maop, protocols, rsocket
from levada.actors.authentication import Credentials
from levada.actors.cli.serve import add_parser
from levada.actors.cli.serve_nodes import NodesRun
from levada.actors.durable import shards, shards_of
from levada.actors.nodes import local_nodes
from levada.framework import Actor, ActorSystem, Asks, Identity, Sender, channel, handles, message, restart
from levada.framework.errors import LevadaError
from levada.framework.platform import PLATFORM
from levada.framework.testing.simulation import Faults, Process, SimulatedFiles, World, check_linear
from levada.transports.carriers import TlsConfig
from levada.transports.carriers.shared_sockets import share_sockets
from levada.transports.qmux import QmuxConfig
from levada.transports.rsocket import CoreConfig

__all__ = ["FAULTS", "MACHINES", "SCHEMES", "Counters", "Ledgers", "Served", "Sessions", "leaves"]

SCHEMES: Final = [
    *(f"{name}{carrier}" for name in ("aqueduct", "maop") for carrier in ("", "+tcp", "+tls", "+unix", "+ws", "+wss")),
    *(
        f"{name}+{carrier}"
        for name in ("rsocket", "reactivesocket")
        for carrier in ("tcp", "tls", "unix", "ws", "wss", "quic")
    ),
    "lumberjack",
    "lumberjack+tls",
]
MACHINES: Final = ("server", "client")
FAULTS: Final = Faults(strikes=8, every=1.0)
_ENTRIES: Final = 8
"""Entries of each client."""
_NUMBERS: Final = 20
"""Items of a stream."""
_ADD, _COUNT = 101, 102  # operations of MAOP

Add = Callable[[str], Awaitable[int | None]]
Count = Callable[[], AbstractAsyncContextManager[AsyncIterator[int]]]


class Book:
    """The ids of entries, in a file. An entry that is there already keeps its number.

    Args:
        asked: counts how often each question has come.
    """

    PATH = "/ledger"

    def __init__(self, asked: Counter[str]) -> None:
        self._asked = asked
        files = PLATFORM.get().files
        self._files = files
        self._ids: list[str] = []
        self._end = 0
        if files.exists(self.PATH):
            whole, _, _ = files.read(self.PATH).rpartition(b"\n")
            self._ids = whole.decode().split("\n") if whole else []
            self._end = len(whole) + 1 if whole else 0
        self._file = files.open(self.PATH, os.O_RDWR | os.O_CREAT)
        files.fsync(self._file)
        files.sync_folder("/")

    def add(self, question: str) -> int:
        """Add an entry, on the disk; return its number, from 1.

        Args:
            question: the id of the entry, and perhaps a blank and the number of the attempt.
        """
        self._asked[question] += 1
        id = question.partition(" ")[0]
        if id not in self._ids:
            line = f"{id}\n".encode()
            self._files.pwrite(self._file, line, self._end)
            self._files.fsync(self._file)
            self._end += len(line)
            self._ids.append(id)
        return self._ids.index(id) + 1


@message("simulation.apps.Add")
class AddEntry(Asks[int]):
    """Add an entry; the answer is its number."""

    id: str


@message("simulation.apps.Numbers")
class Numbers:
    """Send numbers."""

    to: Sender[int]


class Desk(Actor[AddEntry | Numbers]):
    """The ledger as an actor."""

    book: Book

    @handles
    def add(self, m: AddEntry) -> int:
        """Add an entry."""
        return self.book.add(m.id)

    @handles
    async def numbers(self, m: Numbers) -> None:
        """Send numbers, beside other messages."""
        self.start_soon(self._send, m.to.ordered(window=4))

    async def _send(self, to: Sender[int]) -> None:
        async with to:
            for number in range(_NUMBERS):
                await to.send(number)
                await trio.sleep(0.05)


async def numbers() -> AsyncIterator[bytes]:
    """Make numbers, as items of a stream."""
    for number in range(_NUMBERS):
        yield bytes([number])
        await trio.sleep(0.05)


@attrs.define(eq=False)
class Ledgers:
    """A server and two clients in one world.

    Args:
        scheme: of the server's URL.
        certificate: a file with a certificate for ``server``, its own authority, and its key.
    """

    scheme: str
    certificate: Path
    errors: list[str] = attrs.field(factory=list)
    """Why connections have ended."""
    streams: int = 0
    """Streams that came to their end."""
    _asked: Counter[str] = attrs.field(factory=Counter)
    _attempts: Iterator[int] = attrs.field(factory=count)

    @property
    def _url(self) -> str:
        port = 5044
        return f"{self.scheme}://" + ("/ledger.socket" if self.scheme.endswith("+unix") else f"server:{port}")

    def _settings(self, tls: TlsConfig) -> Any:
        carrier = protocols.of_url(self._url)[1]
        if carrier in ("qmux+tcp", "qmux+ws"):
            return QmuxConfig(plaintext_off_loopback=True)
        return protocols.carrier_settings(carrier, tls)

    async def run(self, world: World) -> None:
        """Run until each entry of each client is in the ledger, and check the history."""
        self.errors, self.streams = [], 0
        self._asked.clear()
        self._attempts = count()
        await world.start("server", self.app, machine="server", restart=0.5)
        where = "server" if self.scheme.endswith("+unix") else "client"
        done: list[trio.Event] = []
        for number in range(2):
            todo = deque(f"{number}.{n}" for n in range(_ENTRIES))
            done.append(trio.Event())
            await world.start(f"client {number}", self._client(world, todo, done[-1]), machine=where, restart=0.5)
        for each in done:
            await each.wait()
        ids = SimulatedFiles(world.disk("server")).read(Book.PATH).decode().split()
        assert sorted(ids) == sorted(f"{number}.{n}" for number in range(2) for n in range(_ENTRIES))
        if not self.scheme.startswith("lumberjack"):  # which acks, and answers nothing
            check_linear(world.history, _apply, ())
            assert max(self._asked.values()) == 1, "a request was carried out twice"

    async def app(self, system: ActorSystem) -> AsyncIterator[None]:
        """Serve, as an app for ``levada serve``."""
        book = Book(self._asked)
        url = self._url.replace("//server", "//0.0.0.0")
        carrier = self._settings(TlsConfig(certificate=self.certificate))
        serving: AbstractAsyncContextManager[Any]
        if self.scheme.startswith("aqueduct"):
            system.registry.register(
                "desk", system.spawn(Desk, book, supervise=restart())
            )  # the disk may refuse a line

            async def entry(_: object) -> None:
                pass

            config = aqueduct.PeerConfig(carrier=carrier)
            serving = aqueduct.serve(system, url, entry, Any, expose=["desk"], config=config)
        elif self.scheme.startswith("maop"):

            async def add(call: maop.Call) -> bytes:
                return bytes([book.add((await call.body()).decode())])

            async def count(call: maop.Call) -> AsyncIterator[bytes]:
                return numbers()

            async def admit(credentials: Credentials) -> Identity:
                return Identity("client")

            handlers = {_ADD: add, _COUNT: count}
            serving = maop.serve(system, url, handlers, authenticate=admit, config=maop.PeerConfig(carrier=carrier))
        elif self.scheme.startswith("lumberjack"):

            async def sink(unit: lumberjack.Unit) -> None:
                for event in unit.events:
                    book.add(event["line"])

            serving = lumberjack.serve(system, url, sink, carrier=carrier)
        else:

            async def answer(request: rsocket.Request) -> Any:
                return numbers() if request.data == b"count" else bytes([book.add(request.data.decode())])

            serving = rsocket.serve(system, url, answer, config=rsocket.ServerConfig(carrier=carrier))
        async with serving:
            yield

    def _client(self, world: World, todo: deque[str], done: trio.Event) -> Callable[[], Awaitable[None]]:
        async def main() -> None:
            while todo:
                try:
                    async with ActorSystem() as system, self._connect(system) as (add, count):
                        while todo:
                            await world.history.call("ledger", todo[0], lambda id: add(self._question(id)))
                            todo.popleft()
                            await self._count(count)
                            await trio.sleep(0.2)
                except* LevadaError as group:
                    self.errors += [repr(error) for error in leaves(group)]
                    await trio.sleep(0.2)
            done.set()

        return main

    def _question(self, id: str) -> str:
        return id if self.scheme.startswith("lumberjack") else f"{id} {next(self._attempts)}"

    async def _count(self, count: Count) -> None:
        async with count() as items:
            found = [item async for item in items]
        assert found == list(range(len(found)))
        self.streams += len(found) == _NUMBERS

    @asynccontextmanager
    async def _connect(self, system: ActorSystem) -> AsyncIterator[tuple[Add, Count]]:
        carrier = self._settings(TlsConfig(ca=self.certificate))
        async with getattr(self, f"_by_{self.scheme.partition('+')[0]}")(system, carrier) as calls:
            yield calls

    @asynccontextmanager
    async def _by_aqueduct(self, system: ActorSystem, carrier: Any) -> AsyncIterator[tuple[Add, Count]]:
        config = aqueduct.PeerConfig(carrier=carrier)
        async with aqueduct.connect(system, self._url, object, config=config) as peer:
            desk: Any = await peer.lookup("desk", AddEntry | Numbers)

            @asynccontextmanager
            async def count() -> AsyncIterator[AsyncIterator[int]]:
                sender, receiver = channel(int)
                desk.tell(Numbers(sender))
                with receiver:
                    yield receiver

            yield (lambda id: desk.ask(AddEntry(id), timeout=100)), count

    @asynccontextmanager
    async def _by_maop(self, system: ActorSystem, carrier: Any) -> AsyncIterator[tuple[Add, Count]]:
        async with maop.connect(system, self._url, token=b"client", config=maop.PeerConfig(carrier=carrier)) as peer:

            async def add(id: str) -> int:
                return bytes(await peer.request(_ADD, id.encode()))[0]

            @asynccontextmanager
            async def count() -> AsyncIterator[AsyncIterator[int]]:
                async with peer.open_request(_COUNT, b"") as reply:
                    yield (number async for chunk in reply for number in bytes(chunk))

            yield add, count

    @asynccontextmanager
    async def _by_rsocket(self, system: ActorSystem, carrier: Any) -> AsyncIterator[tuple[Add, Count]]:
        async with rsocket.connect(system, self._url, config=rsocket.ClientConfig(carrier=carrier)) as peer:

            async def add(id: str) -> int:
                return (await peer.request_response(id.encode())).data[0]

            @asynccontextmanager
            async def count() -> AsyncIterator[AsyncIterator[int]]:
                async with await peer.request_stream(b"count", window=4) as items:
                    yield (item.data[0] async for item in items)

            yield add, count

    _by_reactivesocket = _by_rsocket

    @asynccontextmanager
    async def _by_lumberjack(self, system: ActorSystem, carrier: Any) -> AsyncIterator[tuple[Add, Count]]:
        hosts = lumberjack.HostConfig() if carrier is None else lumberjack.HostConfig(tls=carrier)
        async with lumberjack.connect(system, self._url, hosts=hosts) as writer:

            async def add(id: str) -> None:
                await writer.deliver([{"line": id}])

            @asynccontextmanager
            async def count() -> AsyncIterator[AsyncIterator[int]]:
                yield _none()

            yield add, count


async def _none() -> AsyncIterator[int]:
    for number in list[int]():
        yield number


async def counter(system: ActorSystem) -> AsyncIterator[Any]:
    """Serve accounts of a bank on a node, at an address that all nodes share."""

    async def answer(request: rsocket.Request) -> bytes:
        entity, id = request.data.decode().split()
        accounts = await shards_of(system, Account)
        return bytes([await accounts[entity].ask(bank.Add(id), command=id, timeout=5.0)])

    async with rsocket.serve(system, "rsocket+tcp://0.0.0.0:7000", answer) as server:
        yield server


async def whole_counter(system: ActorSystem) -> AsyncIterator[Any]:
    """Serve accounts of a bank, with the shards: an app for ``levada serve --nodes``."""
    events = Added | Reminded
    await shards(system, Account, events=events, journal="/accounts", shards=4, keeper=True)
    async with asynccontextmanager(counter)(system) as server:
        yield server


class Counters:
    """As ``levada serve --nodes 2``: nodes that share the address of a listener, with shards over them, and a keeper of the journal."""

    def __init__(self) -> None:
        self.served = 0
        """Entries of all worlds."""

    async def run(self, world: World) -> None:
        """Run until each entry of each client is in its account, and check the history."""
        await world.start("driver", self._drive, machine="server", restart=0.5)
        todo = [deque((f"e{n % 3}", f"{client}.{n}") for n in range(_ENTRIES)) for client in range(2)]
        async with trio.open_nursery() as clients:
            for number, mine in enumerate(todo):
                process = await world.start(
                    f"client {number}", self._client(world, mine), machine="client", restart=0.5
                )
                clients.start_soon(self._wait, world, process)
        check_linear(world.history, _apply, ())
        assert {operation.question for operation in world.history.operations if operation.answer is not None} == {
            f"{client}.{n}" for client in range(2) for n in range(_ENTRIES)
        }
        self.served += 2 * _ENTRIES

    async def _wait(self, world: World, process: Process) -> None:
        while await process.wait():
            await trio.sleep(1)
            process = world[process.name]

    async def _drive(self) -> object:
        async with (
            ActorSystem("driver", ask_timeout=10.0) as system,
            share_sockets() as sockets,
            local_nodes(system, 2, counter, settings=SETTINGS, sockets=sockets) as nodes,
        ):
            events = Added | Reminded
            await shards(system, Account, events=events, journal="/accounts", shards=4, nodes=nodes, keeper=True)
            await trio.sleep_forever()

    def _client(self, world: World, todo: deque[tuple[str, str]]) -> Callable[[], Awaitable[None]]:
        async def main() -> None:
            while todo:
                try:
                    async with ActorSystem() as system, rsocket.connect(system, "rsocket+tcp://server:7000") as peer:
                        while todo:
                            entity, id = todo[0]

                            async def ask(id: str, entity: str = entity) -> int:
                                return (await peer.request_response(f"{entity} {id}".encode())).data[0]

                            await world.history.call(entity, id, ask)
                            todo.popleft()
                            await trio.sleep(0.2)
                except* LevadaError:
                    await trio.sleep(0.2)

        return main


class Served(Counters):
    """``levada serve --nodes 2`` itself, which ends at SIGTERM when all is done."""

    async def run(self, world: World) -> None:
        """Run to the end of the server."""
        await super().run(world)
        world.strikes.stop()
        while True:
            server = world["driver"]
            await trio.sleep(30.0)  # it may be starting
            if server is world["driver"] and not server.ended.is_set():
                break
        server.terminate()
        assert await server.wait() == 0

    async def _drive(self) -> int:
        parser = argparse.ArgumentParser()
        commands: Any = parser.add_subparsers()
        add_parser(commands)
        target = f"{whole_counter.__module__}:{whole_counter.__name__}"
        return await NodesRun(parser.parse_args(["serve", target, "--nodes", "2"])).main([SIGTERM])


class Sessions:
    """An RSocket server and a client whose session outlives its connections."""

    CORE = CoreConfig(resume=True, keepalive_interval=0.2, max_lifetime=0.6)

    def __init__(self) -> None:
        self.resumed = 0
        """Sessions that went on over another connection, in all worlds."""
        self.streams = 0
        """Streams that came to their end."""

    async def run(self, world: World) -> None:
        """Run to the end of the client."""
        await world.start("server", self.app, machine="server", restart=0.5)
        assert await (await world.start("client", self._ask, machine="client")).wait() == 0

    async def app(self, system: ActorSystem) -> AsyncIterator[None]:
        """Serve streams."""

        async def answer(_: rsocket.Request) -> AsyncIterator[bytes]:
            return numbers()

        config = rsocket.ServerConfig(core=self.CORE)
        async with rsocket.serve(system, "rsocket+tcp://0.0.0.0:7000", answer, config=config):
            yield

    async def _ask(self) -> None:
        config = rsocket.ClientConfig(core=self.CORE)
        for _ in range(8):
            try:
                async with (
                    ActorSystem() as system,
                    rsocket.connect(system, "rsocket+tcp://server:7000", config=config) as peer,
                ):
                    async with await peer.request_stream(b"", window=4) as items:
                        found = [item.data[0] async for item in items]
                    assert found == list(range(_NUMBERS))
                    self.resumed += peer.statistics().sessions_resumed
                    self.streams += 1
            except* LevadaError:
                await trio.sleep(0.3)


def leaves(group: BaseExceptionGroup[Any]) -> list[BaseException]:
    """Return the errors in a group and in the groups in it."""
    return [
        leaf for each in group.exceptions for leaf in (leaves(each) if isinstance(each, BaseExceptionGroup) else [each])
    ]


def _apply(ids: tuple[str, ...], id: str) -> tuple[tuple[str, ...], int]:
    after = ids if id in ids else (*ids, id)
    return after, after.index(id) + 1
