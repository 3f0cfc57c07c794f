"""How far a message walks: calls into levada, and files, for one operation of both ends: ``levada bench walk``.

Both ends run in this process, RSocket on TCP, the others on the memory carrier. A call is each start of a function of levada, and each
time that a coroutine or generator of levada goes on (`sys.setprofile`); a file counts once. When all is warm, `OPERATIONS` operations run
one after the other. The shortest counts: no timer falls into it. Calls in other threads do not count.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from types import FrameType
from typing import Any

import attrs
import trio
import trio.testing

from levada.actors import aqueduct, lumberjack, maop, rsocket
from levada.actors.authenticators import BearerTokens
from levada.framework import Actor, ActorSystem, Asks, Identity, Receiver, Sender, actor, channel, handles, message
from levada.framework.platform import PLATFORM, REAL

__all__ = ["LIMITS", "OPERATIONS", "WALKS", "Counter", "Step", "Walk", "measure", "run"]

LIMITS = {
    "rsocket": (63, 13),
    "aqueduct": (56, 13),
    "aqueduct-run": (1616, 13),
    "aqueduct-sender": (500, 34),
    "maop": (212, 19),
    "durable": (109, 18),
    "spark": (209, 26),
}
"""Calls and files of a walk, at most."""

WARM_UP, OPERATIONS = 200, 101
ON_THREADS = ("durable", "lumberjack", "spark")

Operation = Callable[[], Awaitable[object]]
Step = tuple[str, str]
"""A file, as a path below ``levada``, and the name of a function in it with its class."""
Walk = tuple[int, int]
"""Calls and files."""


class Counter:
    """Counts while it is the profile hook."""

    def __init__(self) -> None:
        self.calls: list[Step] = []

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            path = frame.f_code.co_filename
            if "/levada/" in path and "/site-packages/" not in path:
                self.calls.append((path.rpartition("/levada/")[2], frame.f_code.co_qualname))

    @property
    def walk(self) -> Walk:
        """The calls and files so far."""
        return len(self.calls), len({file for file, _ in self.calls})


async def count(operation: Operation) -> Counter:
    """Count the calls of the shortest of all operations."""
    for _ in range(WARM_UP):
        await operation()
    counters = []
    for _ in range(OPERATIONS):
        counter = Counter()
        sys.setprofile(counter)
        try:
            await operation()
        finally:
            sys.setprofile(None)
        counters.append(counter)
    return min(counters, key=lambda each: each.walk)


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


RUN = 128
"""Items that are sent, and then received, without a wait between."""


@asynccontextmanager
async def aqueduct_item(system: ActorSystem, count: int = 1) -> AsyncIterator[Operation]:
    """An item of a channel, or so many, until they are received."""
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
            for _ in range(count):
                await sender.send(bytes(64))
            for _ in range(count):
                await items[0].receive()

        yield operation


@message("bench.walk.Take")
class Take:
    items: Sender[bytes]


@asynccontextmanager
async def aqueduct_sender(system: ActorSystem) -> AsyncIterator[Operation]:
    """A message with a `Sender`, one item back on it, and its finish."""

    @actor
    async def give(m: Take) -> None:
        async with m.items:
            await m.items.send(bytes(64))

    async with (
        aqueduct.serve(system, "aqueduct+memory://walk", give, message_type=Take) as listener,
        aqueduct.connect(system, listener.url, Take) as peer,
    ):

        async def operation() -> None:
            sender, receiver = channel(bytes)
            await peer.send(Take(sender))
            async for _ in receiver:
                pass
            await trio.testing.wait_all_tasks_blocked()  # else its end falls into the next operation, or not

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


@message("bench.walk.Add")
class Add(Asks[int]):
    pass


@message("bench.walk.Added")
class Added:
    pass


@asynccontextmanager
async def durable_command(system: ActorSystem) -> AsyncIterator[Operation]:
    """A command of a durable actor, until it is on disk and answered."""
    from levada.actors.durable import Durable, applies, shards

    class Count(Durable[Add]):
        n: int = 0

        @handles
        def add(self, m: Add) -> int:
            self.record(Added())
            return self.n

        @applies
        def added(self, e: Added) -> None:
            self.n += 1

    with tempfile.TemporaryDirectory() as directory:
        counts = await shards(system, Count, events=Added, journal=directory, shards=1, snapshot_every=100_000)
        count = counts["a"]
        yield lambda: count.ask(Add())
        counts.ref.stop()
        await counts.ref.terminated()


@asynccontextmanager
async def spark_read(system: ActorSystem) -> AsyncIterator[Operation]:
    """Spark describes a mailbox and reads its 10 rows; the bridge's side only, since the other side runs in a thread."""
    import pyarrow as pa

    from levada.actors.spark import serve_bridge
    from levada.actors.spark.worker import RemoteMailbox

    rows = pa.RecordBatch.from_pydict({"number": list(range(10))})

    def read(remote: RemoteMailbox) -> int:
        there = remote.describe()
        found = remote.read(0, 0, 10, epoch=there.epoch, schema=there.columns(), opening=there.opening)
        return sum(batch.num_rows for batch in found)

    with tempfile.TemporaryDirectory() as directory:
        async with serve_bridge(system, directory) as bridge:
            mailbox = await bridge.mailbox("walk", rows.schema, partitions=1)
            await mailbox.append(rows)
            remote = RemoteMailbox(bridge.address, "walk")
            yield lambda: trio.to_thread.run_sync(read, remote)


WALKS: dict[str, tuple[str, Callable[[ActorSystem], AbstractAsyncContextManager[Operation]]]] = {
    "tell": ("tell an actor", tell),
    "rsocket": ("RSocket request-response", rsocket_request),
    "aqueduct": ("Aqueduct item", aqueduct_item),
    "aqueduct-run": (f"{RUN} Aqueduct items in a run", partial(aqueduct_item, count=RUN)),
    "aqueduct-sender": ("Aqueduct message with a Sender, an item", aqueduct_sender),
    "maop": ("MAOP request", maop_request),
    "lumberjack": ("Lumberjack event to the journal", lumberjack_event),
    "durable": ("durable command", durable_command),
    "spark": ("Spark describes and reads, the bridge's side", spark_read),
}


def measure(key: str) -> Counter:
    """Count one of `WALKS`; in virtual time, so no timer comes due on a busy machine. A durable command has threads; its slices do not end."""

    async def main() -> Counter:
        if key == "durable":
            PLATFORM.set(attrs.evolve(REAL, perf_counter=lambda: 0.0))
        async with ActorSystem(ask_timeout=60.0) as system, WALKS[key][1](system) as operation:
            return await count(operation)

    return trio.run(main, clock=None if key in ON_THREADS else trio.testing.MockClock(autojump_threshold=0))


@attrs.frozen
class Report:
    """Calls and files of walks."""

    walks: dict[str, Walk]

    @property
    def missed(self) -> list[str]:
        """The walks that are longer than their limits."""
        return [
            WALKS[key][0]
            for key, (calls, files) in self.walks.items()
            if key in LIMITS and (calls > LIMITS[key][0] or files > LIMITS[key][1])
        ]

    def text(self, *, judged: bool) -> str:
        """Return a table, with verdicts if it is `judged`."""
        lines = [f"{'one operation, both ends':46}{'calls':>7}{'files':>7}   at most"]
        for key, (calls, files) in self.walks.items():
            title = WALKS[key][0]
            limit = "{} / {}".format(*LIMITS[key]) if key in LIMITS else ""
            verdict = " pass" if title not in self.missed else " MISS"
            lines.append(f"{title:46}{calls:7}{files:7}   {limit}{verdict if judged and limit else ''}".rstrip())
        return "\n".join(lines) + "\n"

    def to_json(self) -> dict[str, Any]:
        """Return values that the `json` module writes."""
        rows = [
            {
                "key": key,
                "calls": calls,
                "files": files,
                "limit": LIMITS.get(key),
                "missed": WALKS[key][0] in self.missed,
            }
            for key, (calls, files) in self.walks.items()
        ]
        return {"rows": rows}


def run(*, rounds: int, quick: bool, only: str, progress: Callable[[str], None]) -> Report:
    """Count: the same in each round, and in all its length also if `quick`."""
    walks = {}
    for key, (title, _) in WALKS.items():
        if only in title:
            progress(title)
            walks[key] = measure(key).walk
    return Report(walks)
