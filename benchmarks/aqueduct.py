"""Aqueduct channels against bare QUIC streams, and over QMux against QUIC: ``levada bench aqueduct``.

Client and server run in this process, QUIC on loopback with 1,200-byte packets and QMux on a Unix socket, so that a rate is work per
second of CPU time of both ends together.  In each round every workload runs on its base (a bare stream of QUIC, or a channel over QUIC)
and on the contender (a channel over QUIC, or over QMux), one right after the other; the figure is the ratio of the rates of a round.
"""

from __future__ import annotations

import gc
import resource
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import trio
from benchmarks._measure import verdict
from benchmarks.carriers import certify

from levada.actors.aqueduct import AqueductConfig, Peer, PeerConfig, connect, serve
from levada.framework import ActorSystem, OneshotSender, Receiver, channel, message, oneshot
from levada.framework.codec import Codec
from levada.framework.errors import CarrierError
from levada.transports.quic import QuicConfig, QuicConnection, QuicStream, dial, listen

__all__ = ["run"]

MANY = 10_000
"""Channels that are open at once in the last workload."""


@message("bench.aqueduct.Swallow")
class Swallow:
    items: Receiver[bytes]


@message("bench.aqueduct.Ask")
class Ask:
    data: bytes
    answer: OneshotSender[bytes]


@message("bench.aqueduct.Keep")
class Keep:
    items: Receiver[bytes]


@message("bench.aqueduct.Order")
class Order:
    number: int
    item: str
    tags: list[str]
    price: float


ORDER = Order(12_345, "a book", ["new", "large"], 9.5)


@message("bench.aqueduct.SwallowOrders")
class SwallowOrders:
    items: Receiver[Order]


UNDER_WAY = 1_024
"""Messages that a channel may have under way: 100 KiB of the small ones. A bare stream queues 256 KiB before it waits."""


Work = Callable[[Any], Awaitable[int]]
"""Does the workload on a connection; returns how many messages it was."""


Side = tuple[Callable[[Path], AbstractAsyncContextManager[Any]], Work]
"""Connects, with the files in a folder; and what is done on the connection."""


@attrs.frozen
class Workload:
    """One row of the table."""

    title: str
    budget: float | None
    """Rate of what is measured divided by the rate of the base, at least."""
    base: Side | None
    ours: Side


def sending(item: Any, swallows: Any, count: int) -> tuple[Work, Work]:
    """Send a message again and again, or its bytes on a bare stream, until the other end has all of them."""
    data = item if isinstance(item, bytes) else Codec().encode(item)

    async def over_stream(connection: QuicConnection) -> int:
        stream = await connection.open_stream()
        for _ in range(count):
            await stream.send_all(data)
        await stream.send_eof()
        assert await stream.receive_some() == b"k"
        return count

    async def over_channel(peer: Peer[Any]) -> int:
        sender, receiver = channel(type(item))
        sender.ordered(UNDER_WAY)
        await peer.send(swallows(receiver))
        async with sender:
            for _ in range(count):
                await sender.send(item)
        return count

    return over_stream, over_channel


ROUND_TRIPS = 500


async def bare_requests(connection: QuicConnection) -> int:
    for _ in range(ROUND_TRIPS):
        stream = await connection.open_stream()
        stream.send_nowait(b"r" + bytes(63), fin=True)
        assert await stream.receive_some()
        assert not await stream.receive_some()
    return ROUND_TRIPS


async def oneshot_requests(peer: Peer[Any]) -> int:
    """Ask one after the other; also note how long one takes by the clock."""
    took = []
    for _ in range(ROUND_TRIPS):
        began = time.perf_counter()
        answer, asked = oneshot(bytes)
        await peer.send(Ask(bytes(64), answer))
        assert await asked
        took.append(time.perf_counter() - began)
    NOTES["one round trip with a oneshot, µs by the clock"].append(1e6 * statistics.median(took))
    return ROUND_TRIPS


async def open_many(peer: Peer[Any]) -> int:
    """Open channels, send one message on each while all are open, end them."""
    senders = []
    gc.collect()
    before = resident()
    for _ in range(MANY):
        sender, receiver = channel(bytes)
        await peer.send(Keep(receiver))
        senders.append(sender)
    receipts = [await sender.send(b"x", receipt=True) for sender in senders]
    for receipt in receipts:
        assert await receipt
    NOTES[OPEN].append((resident() - before) / MANY / 1000)
    for sender in senders:
        sender.finish_nowait()
    for sender in senders:
        await sender.terminated()
    return MANY


def resident() -> int:
    """Bytes of memory that this process has now."""
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * resource.getpagesize()


NOTES: defaultdict[str, list[float]] = defaultdict(list)
"""What workloads have measured beyond a rate, in each round."""
OPEN = "one open channel, kB: both ends, the handles, a task that receives"
MOST = {OPEN: 12.5}
"""Budgets of notes: at most."""


# ---------------------------------------------------------------- the other ends


async def swallow(stream: QuicStream) -> None:
    """Echo requests; answer everything else with one byte at the end."""
    data = await stream.receive_some()
    answer = data if data[:1] == b"r" else b"k"
    while await stream.receive_some():
        pass
    stream.send_nowait(answer, fin=True)


async def handle(m: Any) -> None:
    if isinstance(m, Ask):
        m.answer.send(m.data)
    else:
        async for _ in m.items:
            pass


def quic_server(folder: Path) -> QuicConfig:
    return QuicConfig(
        alpn=("aqueduct",), certificate=folder / "certificate.pem", key=folder / "key.pem", max_packet_size=1_200
    )


def quic_client() -> QuicConfig:
    return QuicConfig(alpn=("aqueduct",), verify=False, max_packet_size=1_200)


@asynccontextmanager
async def bare(folder: Path) -> AsyncIterator[QuicConnection]:
    async def accept() -> None:
        connection = (await listener.accept()).accept()
        try:
            while True:
                nursery.start_soon(swallow, await connection.accept_stream())
        except CarrierError:
            pass

    async with trio.open_nursery() as nursery, listen("quic://127.0.0.1:0", quic_server(folder)) as listener:
        nursery.start_soon(accept)
        async with dial(listener.url, quic_client()) as connection:
            yield connection
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def channels(url: str, serving: Any, calling: Any) -> AsyncIterator[Peer[Any]]:
    core = AqueductConfig(max_channels=3 * MANY, window=UNDER_WAY, mailbox=UNDER_WAY)
    async with ActorSystem() as system:
        config = PeerConfig(carrier=serving, core=core, max_handlers=2 * MANY)
        async with (
            serve(system, url, handle, Any, config=config) as listener,
            connect(system, listener.url, object, config=PeerConfig(carrier=calling, core=core)) as peer,
        ):
            yield peer


def over_quic(folder: Path) -> AbstractAsyncContextManager[Peer[Any]]:
    return channels("aqueduct://127.0.0.1:0", quic_server(folder), quic_client())


def over_unix(folder: Path) -> AbstractAsyncContextManager[Peer[Any]]:
    return channels(f"aqueduct+unix://{folder}/socket", None, None)


async def rate(connected: Any, work: Work) -> float:
    """Messages per second of CPU time."""
    async with connected as carrier:
        began = time.process_time()
        count = await work(carrier)
        return count / (time.process_time() - began)


SMALL, LARGE = sending(bytes(100), Swallow, 20_000), sending(bytes(65_536), Swallow, 150)
ORDERS = sending(ORDER, SwallowOrders, 20_000)
WORKLOADS = (
    Workload("ordered messages of 100 bytes", 0.47, (bare, SMALL[0]), (over_quic, SMALL[1])),
    Workload("ordered messages of 4 fields; bare: their bytes", 0.27, (bare, ORDERS[0]), (over_quic, ORDERS[1])),
    Workload("ordered messages of 64 KiB", 0.8, (bare, LARGE[0]), (over_quic, LARGE[1])),
    Workload(
        "round trips with a oneshot, one at a time; bare: a stream each",
        0.31,
        (bare, bare_requests),
        (over_quic, oneshot_requests),
    ),
    Workload(f"channels, {MANY:,} open at once", None, None, (over_quic, open_many)),
    Workload("QMux on a Unix socket: messages of 100 bytes", 1.5, (over_quic, SMALL[1]), (over_unix, SMALL[1])),
    Workload("QMux on a Unix socket: messages of 64 KiB", 5.0, (over_quic, LARGE[1]), (over_unix, LARGE[1])),
    Workload("QMux on a Unix socket: round trips", 1.3, (over_quic, oneshot_requests), (over_unix, oneshot_requests)),
)
"""The last rows compare with channels over QUIC."""


# ---------------------------------------------------------------- report


@attrs.frozen
class Row:
    """One workload, measured in all rounds."""

    workload: Workload
    rates: list[float]
    """Messages per CPU second."""
    ratios: list[float]
    """Those divided by the ones of the base."""

    @property
    def missed(self) -> bool:
        return self.workload.budget is not None and statistics.median(self.ratios) < self.workload.budget


@attrs.frozen
class Report:
    """All rows."""

    rows: list[Row]
    notes: dict[str, list[float]]
    """What else was measured, in all rounds."""
    memory: int
    """The most bytes of memory."""

    @property
    def missed(self) -> list[str]:
        """Titles of the rows below their budgets, and of notes above theirs."""
        return [row.workload.title for row in self.rows if row.missed] + [
            title for title, most in MOST.items() if title in self.notes and statistics.median(self.notes[title]) > most
        ]

    def text(self, *, judged: bool) -> str:
        """Lay it out as a table."""
        lines = [f"{'':64} {'per CPU s':>10} {'ratio':>6} {'budget':>7}"]
        for row in self.rows:
            ratio = f"{statistics.median(row.ratios):6.2f}" if row.ratios else " " * 6
            end = "" if row.workload.budget is None else verdict(row.missed, judged)
            lines.append(
                f"{row.workload.title:64} {statistics.median(row.rates):10,.0f} {ratio} {row.workload.budget or '':>7} {end}"
            )
        for title, figures in self.notes.items():
            most = f", at most {MOST[title]:g} {verdict(title in self.missed, judged)}" if title in MOST else ""
            lines.append(f"{title}: {statistics.median(figures):,.1f}{most}")
        lines.append(f"memory of both ends at the most: {self.memory / 2**20:,.0f} MiB")
        return "\n".join(lines) + "\n"

    def to_json(self) -> dict[str, Any]:
        """Turn it into what the `json` module writes."""
        return {
            "rows": [
                {
                    "title": row.workload.title,
                    "rates": row.rates,
                    "ratios": row.ratios,
                    "budget": row.workload.budget,
                    "missed": row.missed,
                }
                for row in self.rows
            ],
            "notes": self.notes,
            "memory": self.memory,
        }


def run(*, rounds: int, quick: bool, only: str, progress: Callable[[str], None]) -> Report:
    """Measure all workloads whose title contains `only`; `quick`: the first of them, to show that it runs."""
    workloads = [workload for workload in WORKLOADS if only in workload.title]
    rows = []
    NOTES.clear()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        certify(folder)
        for workload in workloads[:1] if quick else workloads:
            row = Row(workload, [], [])
            times = rounds if workload.base is not None else 1  # rows without a comparison take long
            for number in range(times):
                progress(f"{workload.title}, round {number + 1} of {times}")
                base = 0.0
                if workload.base is not None:
                    base = trio.run(rate, workload.base[0](folder), workload.base[1])
                gc.collect()
                row.rates.append(trio.run(rate, workload.ours[0](folder), workload.ours[1]))
                if base:
                    row.ratios.append(row.rates[-1] / base)
            rows.append(row)
    return Report(rows, dict(NOTES), 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
