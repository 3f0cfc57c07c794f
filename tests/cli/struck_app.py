"""The app of `test_serve_struck`: a singleton, durable actors and a channel, for clients of HTTP, RSocket and Aqueduct.

What was handled is in the folder that the environment names. Imports nothing of the tests.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import trio

from levada.actors import aqueduct, rsocket
from levada.actors.durable import Durable, applies, shards
from levada.actors.nodes import singleton
from levada.framework import Actor, ActorSystem, Asks, Reason, Sender, channel, forward, handles, message
from levada.framework.errors import ChannelError, LevadaError
from levada.transports.carriers.sockets import ListeningAddress, open_sockets
from levada.transports.rsocket import CoreConfig, LeaseGrant

FOLDER = Path(os.environ.get("STRUCK", "."))
TIMEOUT = 20.0
"""Seconds for a question to the singleton or to a durable actor."""
CONFIG = rsocket.ServerConfig(lease=LeaseGrant(ttl=0.5, n=20), core=CoreConfig(resume=True))
"""For clients with leases and clients that resume; others take no notice."""


@message("struck.Take")
class Take(Asks[int]):
    """Handle a number."""

    number: int


@message("struck.Follow")
class Follow:
    """Send all numbers, from 0."""

    to: Sender[int]


@message("struck.Pay")
class Pay(Asks[int]):
    """Pay an order; the answer is how many were paid."""

    order: str


@message("struck.Orders", frozen=True)
class Orders(Asks[list[str]]):
    """Ask which orders were paid."""


@message("struck.paid", frozen=True)
class Paid:
    """An order was paid."""

    order: str


class House(Actor[Take | Follow]):
    """The singleton. It writes down what it handles, and whether there are two of it."""

    def started(self) -> None:
        """Lock the file; the system unlocks it when this process has ended."""
        self.lock = open(FOLDER / "lock", "w")  # noqa: SIM115 - until the actor ends
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.write("two")

    def stopping(self, reason: Reason) -> None:
        """Unlock the file."""
        self.lock.close()

    def write(self, text: object) -> None:
        """Append a line."""
        with open(FOLDER / "handled", "a") as file:
            file.write(f"{text}\n")

    @handles
    async def take(self, m: Take) -> int:
        """Write it down."""
        self.write(m.number)
        await trio.sleep(0.002)
        return m.number

    @handles
    def follow(self, m: Follow) -> None:
        """Send numbers."""
        self.start_soon(self._count, m.to)

    async def _count(self, to: Sender[int]) -> None:
        number = 0
        try:
            async with to:
                while True:
                    await to.send(number)
                    number += 1
                    await trio.sleep(0.01)
        except ChannelError:
            pass  # the follower has left


class Till(Durable[Pay | Orders]):
    """A durable actor."""

    orders: list[str] = attrs.field(factory=list)

    @handles
    def pay(self, m: Pay) -> int:
        """Record."""
        self.record(Paid(m.order))
        return len(self.orders)

    @handles
    def paid_orders(self, m: Orders) -> list[str]:
        """Tell."""
        return self.orders

    @applies
    def paid(self, e: Paid) -> None:
        """Apply."""
        self.orders.append(e.order)


class Desk(Actor[Pay]):
    """Pays for clients of another system."""

    tills: Any

    @handles
    async def pay(self, m: Pay) -> int:
        """Pay."""
        total: int = await self.tills[till_of(m.order)].ask(m, command=m.order, timeout=TIMEOUT)
        return total


def till_of(order: str) -> str:
    """Return the till of an order ``PROTOCOL-WORKER-NUMBER``."""
    return f"till {int(order.rpartition('-')[2]) % 7}"


@attrs.frozen
class Door:
    """Where HTTP is served."""

    url: str


async def answer_http(stream: trio.SocketStream, answer: Callable[[str], Awaitable[str]]) -> None:
    """Answer one request."""
    try:
        async with stream:
            head = b""
            while b"\r\n\r\n" not in head:
                part = await stream.receive_some(4096)
                if not part:
                    return
                head += part
            try:
                status, text = "200 OK", await answer(head.split()[1].decode())
            except LevadaError as error:
                status, text = "503 Service Unavailable", f"{type(error).__name__}: {error}"
            body = text.encode()
            await stream.send_all(
                f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body
            )
    except trio.BrokenResourceError:
        pass  # the client has gone


async def app(system: ActorSystem) -> AsyncIterator[list[Any]]:
    """Serve."""
    house = await singleton(system, House)
    tills = await shards(system, Till, events=Paid, journal=FOLDER / "tills", shards=6)

    async def answer(path: str) -> str:
        what, _, value = path.strip("/").partition("/")
        if what == "take":
            return str(await house.ask(Take(int(value)), timeout=TIMEOUT))
        if what == "pay":
            return str(await tills[till_of(value)].ask(Pay(value), command=value, timeout=TIMEOUT))
        return " ".join(await tills[f"till {value}"].ask(Orders(), timeout=TIMEOUT))

    async def answer_rsocket(request: rsocket.Request) -> bytes:
        try:
            return (await answer(request.data.decode())).encode()
        except LevadaError as error:
            raise rsocket.ApplicationError(f"{type(error).__name__}: {error}") from error

    async def follow(m: Follow) -> None:
        sender, receiver = channel(int)
        await house.send(Follow(sender))
        await forward(receiver, m.to)

    system.registry.register("desk", system.spawn(Desk, tills))
    sockets = await open_sockets(ListeningAddress(kind="tcp", host="127.0.0.1"))
    listeners = [trio.SocketListener(trio.socket.from_stdlib_socket(each.socket)) for each in sockets]
    port = listeners[0].socket.getsockname()[1]
    async with trio.open_nursery() as work, trio.open_nursery() as accepting:

        async def serve(stream: trio.SocketStream) -> None:
            await answer_http(stream, answer)

        accepting.start_soon(partial(trio.serve_listeners, serve, listeners, handler_nursery=work))
        async with (
            rsocket.serve(system, "rsocket+tcp://127.0.0.1:0", answer_rsocket, config=CONFIG) as one,
            aqueduct.serve(system, "aqueduct+tcp://127.0.0.1:0", follow, Follow, expose={"House", "desk"}) as another,
        ):
            yield [one, another, Door(f"http://127.0.0.1:{port}")]
        accepting.cancel_scope.cancel()
