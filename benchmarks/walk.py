"""How far a message walks: calls into levada, and files, for one operation of both ends: ``python -m benchmarks.walk [--json]``.

Both ends run in this process, RSocket on TCP, the others on the memory carrier. A call is each start of a function of levada, and each
time that a coroutine or generator of levada goes on (`sys.setprofile`); a file counts once. When all is warm, `OPERATIONS` operations run
one after the other. The median counts, so a timer that falls into one of them does not. Calls in other threads do not count.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import UTC, datetime
from types import FrameType
from typing import Any

import trio

from levada.actors import aqueduct, lumberjack, maop, rsocket
from levada.actors.authenticators import BearerTokens
from levada.framework import Actor, ActorSystem, Identity, Receiver, actor, channel, handles, message

__all__ = ["LIMITS", "OPERATIONS", "Walk", "measure"]

LIMITS = {"rsocket": (76, 13), "aqueduct": (93, 16), "maop": (284, 24)}
"""Calls and files of a walk, at most."""

WARM_UP, OPERATIONS = 200, 101

Operation = Callable[[], Awaitable[object]]
Walk = tuple[int, int]
"""Calls and files."""


class Counter:
    """Counts while it is the profile hook."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            path = frame.f_code.co_filename
            if "/levada/" in path and "/site-packages/" not in path:
                self.calls.append(path)


async def count(operation: Operation) -> Walk:
    """Count the calls and files of an operation."""
    for _ in range(WARM_UP):
        await operation()
    walks = []
    for _ in range(OPERATIONS):
        counter = Counter()
        sys.setprofile(counter)
        try:
            await operation()
        finally:
            sys.setprofile(None)
        walks.append((len(counter.calls), len(set(counter.calls))))
    return statistics.median_low(walks)


# ---------------------------------------------------------------- the operations


@message("bench.walk.Hit")
class Hit:
    pass


class Sink(Actor[Hit]):
    """Counts what it is told."""

    done: list[trio.Event]

    @handles
    def hit(self, m: Hit) -> None:
        self.done.pop().set()


@asynccontextmanager
async def tell(system: ActorSystem) -> AsyncIterator[Operation]:
    """Tell an actor, and wait until it has handled that."""
    done: list[trio.Event] = []
    ref = system.spawn(Sink, done)

    async def operation() -> None:
        done.append(trio.Event())
        ref.tell(Hit())
        await done[0].wait()

    yield operation


@asynccontextmanager
async def rsocket_request(system: ActorSystem) -> AsyncIterator[Operation]:
    """A request-response of 64 bytes each way."""

    async def echo(request: rsocket.Request) -> rsocket.Payload:
        return request.payload

    async with (
        rsocket.serve(system, "rsocket+tcp://127.0.0.1:0", echo) as listener,
        rsocket.connect(system, listener.url) as peer,
    ):
        yield lambda: peer.request_response(bytes(64))


@message("bench.walk.Items")
class Items:
    items: Receiver[bytes]


@asynccontextmanager
async def aqueduct_item(system: ActorSystem) -> AsyncIterator[Operation]:
    """An item of a channel, until it is received."""
    items: list[Receiver[bytes]] = []
    opened = trio.Event()

    @actor
    async def keep(m: Items) -> None:
        items.append(m.items)
        opened.set()

    async with (
        aqueduct.serve(system, "aqueduct+memory://walk", keep, message_type=Items) as listener,
        aqueduct.connect(system, listener.url, Items) as peer,
    ):
        sender, receiver = channel(bytes)
        await peer.send(Items(receiver))
        await opened.wait()

        async def operation() -> None:
            await sender.send(bytes(64))
            await items[0].receive()

        yield operation


@asynccontextmanager
async def maop_request(system: ActorSystem) -> AsyncIterator[Operation]:
    """A Request with an empty body, answered by nothing."""

    async def nothing(call: maop.Call) -> None:
        pass

    clients = BearerTokens.of({b"bench": Identity("bench")})
    async with (
        maop.serve(system, "maop+memory://walk", {101: nothing}, authenticate=clients) as listener,
        maop.connect(system, listener.url, token=b"bench") as peer,
    ):
        yield lambda: peer.request(101)


@asynccontextmanager
async def lumberjack_event(system: ActorSystem) -> AsyncIterator[Operation]:
    """An event, until it is in the journal and acked."""
    from levada.actors.journal import Append, Envelope, Journal

    with tempfile.TemporaryDirectory() as directory:
        journal = system.spawn(Journal, directory)

        async def take(unit: lumberjack.Unit) -> None:
            now = datetime.now(UTC)
            await journal.ask(Append([Envelope(now, value=json.dumps(event).encode()) for event in unit.events]))

        async with (
            lumberjack.serve(system, "lumberjack+memory://walk", take) as reader,
            lumberjack.connect(system, reader.url, config=lumberjack.WriterConfig(linger=0.0, window=1)) as writer,
        ):

            async def operation() -> None:
                await writer.send({"line": "GET / 200", "host": "web-01", "file": "access.log", "offset": "7"})
                await writer.flush()

            yield operation
        journal.stop()
        await journal.terminated()


WALKS: dict[str, tuple[str, Callable[[ActorSystem], AbstractAsyncContextManager[Operation]]]] = {
    "tell": ("tell an actor", tell),
    "rsocket": ("RSocket request-response", rsocket_request),
    "aqueduct": ("Aqueduct item", aqueduct_item),
    "maop": ("MAOP request", maop_request),
    "lumberjack": ("Lumberjack event to the journal", lumberjack_event),
}


def measure(key: str) -> Walk:
    """Count one of `WALKS`."""

    async def main() -> Walk:
        async with ActorSystem(ask_timeout=60.0) as system, WALKS[key][1](system) as operation:
            return await count(operation)

    return trio.run(main)


def main() -> None:
    """Count all walks and print them."""
    walks = {key: measure(key) for key in WALKS}
    if "--json" in sys.argv[1:]:
        rows: dict[str, Any] = {
            key: {"calls": calls, "files": files, "limit": LIMITS.get(key)} for key, (calls, files) in walks.items()
        }
        print(json.dumps(rows, indent=1))
        return
    print(f"{'one operation, both ends':34}{'calls':>7}{'files':>7}   at most")
    for key, (calls, files) in walks.items():
        limit = "{} / {}".format(*LIMITS[key]) if key in LIMITS else ""
        print(f"{WALKS[key][0]:34}{calls:7}{files:7}   {limit}")


if __name__ == "__main__":
    main()
