"""MAOP against bare QUIC streams of the same carrier, and over QMux against QUIC: ``levada bench maop``.

Client and server run in processes of their own: QUIC on loopback with 1,200-byte packets, QMux on a Unix socket; all serve and call both
ways over one connection each.  In each round a workload runs on its base (bare streams, or MAOP over QUIC) and on the contender (MAOP over
QUIC, or over QMux), in turns of a fraction of a second; the figure is the ratio of the operations per CPU second (client plus server)
of all turns but the first, in which the interpreters warm up.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import trio
from benchmarks._measure import verdict
from benchmarks.carriers import certify, cpu, read_all

from levada.actors.authenticators import BearerTokens
from levada.actors.maop import Call, Handler, HandlerSpec, Peer, PeerConfig, connect, serve
from levada.framework import ActorSystem, Identity
from levada.framework.errors import CarrierError
from levada.transports.quic import QuicConfig, QuicConnection, QuicListener, QuicStream, dial, listen

__all__ = ["run"]

TOKEN = b"bench"
HEADER = bytes(17)  # a Request's header has 18 bytes; the first byte of a bare stream says what it is for
RESPONSE = bytes(21)
UPLOAD = 4 << 20
ANSWER, SINK, CPU, MEMORY = b"a", b"s", b"c", b"m"
"""First byte of a bare stream: answer like a Response; swallow and answer one byte; CPU seconds; most memory in KiB."""

NOTHING, TAKE = 101, 100
"""msg_ids: a Request with an empty answer; a Message whose body is thrown away as it arrives."""


# ---------------------------------------------------------------- the server's process


async def one_stream(stream: QuicStream) -> None:
    data = await stream.receive_some()
    while await stream.receive_some():
        pass
    answers = {
        ANSWER: RESPONSE,
        SINK: b"k",
        CPU: str(cpu()).encode(),
        MEMORY: str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss).encode(),
    }
    stream.send_nowait(answers[data[:1]], fin=True)


async def one_connection(connection: QuicConnection) -> None:
    try:
        async with trio.open_nursery() as nursery:
            while True:
                nursery.start_soon(one_stream, await connection.accept_stream())
    except* CarrierError:
        pass


async def accept(listener: QuicListener) -> None:
    async with trio.open_nursery() as nursery:
        while True:
            nursery.start_soon(one_connection, (await listener.accept()).accept())


async def nothing(call: Call) -> None:
    pass


async def take(call: Call) -> None:
    async for _ in call:
        pass


HANDLERS = {NOTHING: Handler(nothing), TAKE: Handler(take, spec=HandlerSpec(streaming=True, max_payload=2**40))}


def unix_url(folder: Path) -> str:
    return f"maop+unix://{folder}/socket"


async def serve_all(folder: Path) -> None:
    quic = QuicConfig(
        alpn=("bench",),
        certificate=folder / "certificate.pem",
        key=folder / "key.pem",
        max_streams=4_096,
        max_packet_size=1_200,
    )
    config = PeerConfig(carrier=quic)
    clients = BearerTokens.of({TOKEN: Identity("bench")})
    async with (
        ActorSystem() as system,
        listen("quic://127.0.0.1:0", quic) as bare,
        serve(system, "maop://127.0.0.1:0", HANDLERS, authenticate=clients, config=config) as listener,
        serve(system, unix_url(folder), HANDLERS, authenticate=clients),
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(accept, bare)
        print(bare.url.rpartition(":")[2], listener.url.rpartition(":")[2], flush=True)
        with trio.move_on_after(600):
            await trio.sleep_forever()
        nursery.cancel_scope.cancel()


@contextlib.contextmanager
def server(folder: Path) -> Iterator[tuple[int, int]]:
    command = [sys.executable, "-m", "benchmarks.maop", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]) as process:
        try:
            assert process.stdout is not None
            bare, maop = process.stdout.readline().split()
            yield int(bare), int(maop)
        finally:
            process.kill()


# ---------------------------------------------------------------- this process


class Bare:
    """Requests and uploads on bare streams."""

    def __init__(self, connection: QuicConnection):
        self.connection = connection

    async def request(self, kind: bytes = ANSWER) -> bytes:
        stream = await self.connection.open_stream()
        stream.send_nowait(kind + HEADER, fin=True)
        return await read_all(stream)

    async def upload(self) -> None:
        stream = await self.connection.open_stream()
        data = memoryview(bytes(131_072))
        await stream.send_all(SINK)
        for _ in range(0, UPLOAD, len(data)):
            await stream.send_all(data)
        stream.send_nowait(b"", fin=True)
        await read_all(stream)


class Maop:
    """The same by MAOP."""

    def __init__(self, peer: Peer):
        self.peer = peer

    async def request(self) -> bytes:
        return await self.peer.request(NOTHING)

    async def upload(self) -> None:
        async def chunks() -> AsyncIterator[bytes]:
            data = bytes(131_072)
            for _ in range(0, UPLOAD, len(data)):
                yield data

        await self.peer.message(TAKE, chunks(), length=UPLOAD)


async def many(request: Callable[[], Awaitable[object]], count: int, at_once: int) -> None:
    left = count

    async def some() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await request()

    async with trio.open_nursery() as nursery:
        for _ in range(at_once):
            nursery.start_soon(some)


Side = Bare | Maop
Work = Callable[[Side], Awaitable[None]]
TURNS = 5  # of each side in a round; the first one is not counted


@attrs.frozen
class Workload:
    """One row of the table."""

    title: str
    unit: str
    count: float
    """Units in one turn."""
    budget: float | None
    """Rate of what is measured divided by the rate of the base, at least."""
    work: Work
    base: str = "bare"
    """``"bare"``: what is measured is MAOP over QUIC; ``"quic"``: it is MAOP over QMux."""


WORKLOADS = (
    Workload("requests with an empty body, 64 at a time", "/s", 768, 0.61, lambda side: many(side.request, 768, 64)),
    Workload("requests with an empty body, 1 at a time", "/s", 200, None, lambda side: many(side.request, 200, 1)),
    Workload(
        f"upload of {UPLOAD >> 20} MiB in blocks of 128 KiB", "MiB/s", UPLOAD >> 20, 0.8, lambda side: side.upload()
    ),
    Workload("QMux on a Unix socket: 64 at a time", "/s", 768, 1.15, lambda side: many(side.request, 768, 64), "quic"),
    Workload("QMux on a Unix socket: 1 at a time", "/s", 200, None, lambda side: many(side.request, 200, 1), "quic"),
)
"""The last rows compare with MAOP over QUIC."""


@attrs.frozen
class Row:
    """One workload, measured in all rounds."""

    workload: Workload
    rates: list[float]
    """Per CPU second of both ends."""
    ratios: list[float]
    """The same, divided by the figure of the base."""

    @property
    def missed(self) -> bool:
        return self.workload.budget is not None and statistics.median(self.ratios) < self.workload.budget


@attrs.frozen
class Report:
    """All rows."""

    rows: list[Row]
    memory: int
    """The most bytes of the server's memory."""

    @property
    def missed(self) -> list[str]:
        """Titles of the rows below their budgets."""
        return [row.workload.title for row in self.rows if row.missed]

    def text(self, *, judged: bool) -> str:
        """Lay it out as a table."""
        lines = [f"{'':52} {'per CPU s':>16} {'ratio':>6} {'budget':>7}"]
        for row in self.rows:
            work = row.workload
            end = "" if work.budget is None else verdict(row.missed, judged)
            rate = f"{statistics.median(row.rates):,.0f} {work.unit}"
            lines.append(
                f"{work.title:52} {rate:>16} {statistics.median(row.ratios):6.2f} {work.budget or '':>7} {end}"
            )
        lines.append(f"memory of the server at the most: {self.memory / 2**20:,.0f} MiB")
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
            "memory": self.memory,
        }


async def measure(
    folder: Path,
    ports: tuple[int, int],
    workloads: list[Workload],
    rounds: int,
    turns: int,
    progress: Callable[[str], None],
) -> Report:
    quic = QuicConfig(alpn=("bench",), verify=False, max_packet_size=1_200)
    rows = [Row(workload, [], []) for workload in workloads]
    async with (
        ActorSystem() as system,
        dial(f"quic://127.0.0.1:{ports[0]}", quic) as connection,
        connect(system, f"maop://127.0.0.1:{ports[1]}", token=TOKEN, config=PeerConfig(carrier=quic)) as peer,
        connect(system, unix_url(folder), token=TOKEN) as unix_peer,
    ):
        bare, over_quic, over_unix = Bare(connection), Maop(peer), Maop(unix_peer)

        async def spent() -> float:
            return cpu() + float(await bare.request(CPU))

        for number in range(rounds):
            for row in rows:
                progress(f"{row.workload.title}, round {number + 1} of {rounds}")
                base, ours = (bare, over_quic) if row.workload.base == "bare" else (over_quic, over_unix)
                costs: dict[Side, float] = {base: 0.0, ours: 0.0}
                gc.collect()
                for turn in range(turns):
                    for side in costs:
                        began = await spent()
                        await row.workload.work(side)
                        costs[side] += await spent() - began if turn or turns == 1 else 0.0
                row.rates.append(row.workload.count * max(1, turns - 1) / costs[ours])
                row.ratios.append(costs[base] / costs[ours])
        memory = 1024 * int(await bare.request(MEMORY))
    return Report(rows, memory)


def run(*, rounds: int, quick: bool, only: str, progress: Callable[[str], None]) -> Report:
    """Measure all workloads whose title contains `only`; `quick`: one turn of each, to show that it runs."""
    workloads = [workload for workload in WORKLOADS if only in workload.title]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        certify(folder)
        with server(folder) as ports:
            return trio.run(measure, folder, ports, workloads, rounds, 1 if quick else TURNS, progress)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    trio.run(serve_all, parser.parse_args().folder)
