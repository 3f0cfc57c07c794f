"""Carriers of many streams against each other, CPU seconds of client and server: ``levada bench carriers``.

Both ends run in processes of their own on loopback, with 1,200-byte packets.  In each round a workload runs on aioquic's own asyncio
classes and on levada's carrier, in turns of a fraction of a second, over one connection each; the figure is the ratio of the CPU seconds
(client plus server) of all turns but the first, in which the interpreters warm up.  (One whole run after the other measured the machine's
mood: 0.6 to 1.2 for one row within a minute.)
The rows of QMux compare it, over a Unix socket, with levada's QUIC on loopback, and with an echo of trio's own streams over a Unix socket.
In the row of the echo all processes share one core, and QMux's server answers in the calls of the carrier, as the connection actors do;
the echo has one stream, QMux one for each request.
The row of idle streams compares the carrier with itself: two connections between the same two processes, used in turn.

The rows of paths count seconds and not CPU: one transfer of 4 MiB over a proxy (`_lossy.py`) that passes 40 Mbit/s, delays by 10 ms
each way, and loses packets or lets them come late.  They compare the carrier with itself over a clean path.  Where Go is installed, they
also compare it with quic-go over the same path (``quicgo/``; its module comes from the Go module proxy).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import os
import resource
import shutil
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import attrs
import trio
from aioquic.asyncio.client import connect
from aioquic.asyncio.protocol import QuicConnectionProtocol
from aioquic.asyncio.server import serve
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.events import DatagramFrameReceived, QuicEvent
from benchmarks._measure import verdict
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from levada.framework.errors import CarrierError
from levada.transports import qmux
from levada.transports.carriers import Connection, Incoming, Listener, Stream
from levada.transports.quic import QuicConfig, dial, listen

__all__ = ["run"]

ALPN = "bench"
ROOT = Path(__file__).parents[1]
SINK, ECHO, CPU, IDLE = b"s", b"e", b"c", b"i"
"""First byte of a stream: swallow and answer one byte; send back; CPU seconds of the server as text; keep open."""
ECHO_SIZE = 64
DATAGRAMS = b"d"  # answers the number of datagrams received since the last time


def cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def answer(data: bytes, datagrams: list[int]) -> bytes:
    match data[:1]:
        case b"s":
            return b"k"
        case b"c":
            return str(cpu()).encode()
        case b"d":
            count, datagrams[0] = datagrams[0], 0
            return str(count).encode()
        case _:
            return data


# ---------------------------------------------------------------- clients


class Client(Protocol):
    """The operations that a workload needs."""

    async def ask(self, data: bytes) -> bytes: ...
    async def ask_many(self, requests: Sequence[bytes], at_once: int) -> None: ...
    async def datagrams(self, size: int, count: int) -> None: ...


class LevadaClient:
    def __init__(self, connection: Connection):
        self.connection = connection

    async def ask(self, data: bytes) -> bytes:
        stream = await self.connection.open_stream()
        for at in range(0, len(data), 65_536):
            await stream.send_all(memoryview(data)[at : at + 65_536])
        stream.send_nowait(b"", fin=True)
        return await read_all(stream)

    async def ask_many(self, requests: Sequence[bytes], at_once: int) -> None:
        waiting = list(requests)

        async def some() -> None:
            while waiting:
                data = waiting.pop()
                if len(data) > 1_000:
                    await self.ask(data)
                    continue
                stream = await self.connection.open_stream()
                stream.send_nowait(data, fin=True)
                await read_all(stream)

        async with trio.open_nursery() as nursery:
            for _ in range(at_once):
                nursery.start_soon(some)

    async def idle(self, count: int) -> None:
        for _ in range(count):
            (await self.connection.open_stream()).send_nowait(IDLE)
        await trio.sleep(0.1)

    async def datagrams(self, size: int, count: int) -> None:
        data = bytes(size)
        for _ in range(count):
            await self.connection.send_datagram(data)


async def read_all(stream: Stream) -> bytes:
    data = await stream.receive_some()
    while more := await stream.receive_some():
        data += more
    return data


class EchoClient:
    """Messages of `ECHO_SIZE` bytes on one byte stream of trio; each is answered by one."""

    def __init__(self, stream: trio.SocketStream):
        self.stream = stream

    async def ask(self, data: bytes) -> bytes:
        await self.stream.send_all(data.ljust(ECHO_SIZE))
        answer = await self.stream.receive_some()
        while len(answer) < ECHO_SIZE:
            answer += await self.stream.receive_some()
        return bytes(answer)

    async def ask_many(self, requests: Sequence[bytes], at_once: int) -> None:
        for data in requests:
            await self.ask(data)

    async def datagrams(self, size: int, count: int) -> None:
        raise NotImplementedError


class AsyncioClient(QuicConnectionProtocol):
    """aioquic's own stream API; datagrams have none, so they are sent one transmit for each group."""

    async def ask(self, data: bytes) -> bytes:
        reader, writer = await self.create_stream()
        writer.write(data)
        writer.write_eof()
        return await reader.read()

    async def ask_many(self, requests: Sequence[bytes], at_once: int) -> None:
        waiting = list(requests)

        async def some() -> None:
            while waiting:
                await self.ask(waiting.pop())

        await asyncio.gather(*(some() for _ in range(at_once)))

    async def datagrams(self, size: int, count: int) -> None:
        data = bytes(size)
        for _ in range(0, count, 64):
            for _ in range(64):
                self._quic.send_datagram_frame(data)
            self.transmit()
            while self._quic._datagrams_pending:  # noqa: ASYNC110 - aioquic has nothing to wait for
                await asyncio.sleep(0)


# ---------------------------------------------------------------- servers


def certify(folder: Path) -> None:
    key = ed25519.Ed25519PrivateKey.generate()
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, None)
    )
    (folder / "certificate.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").touch(mode=0o600)
    (folder / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )


async def serve_levada(folder: Path, carrier: str) -> None:
    async def one_stream(stream: Stream, datagrams: list[int]) -> None:
        data = await stream.receive_some()
        if data == IDLE:
            await trio.sleep_forever()
        if data[:1] == SINK:
            while await stream.receive_some():
                pass
        else:
            while more := await stream.receive_some():
                data += more
        stream.send_nowait(answer(data, datagrams), fin=True)

    def answer_in_calls(connection: Connection, datagrams: list[int]) -> None:
        def opened() -> None:
            while (stream := connection.accept_stream_nowait()) is not None:
                stream.on_readable(partial(readable, stream, bytearray()))

        def readable(stream: Stream, request: bytearray, _: int) -> None:
            request += stream.receive_nowait() or b""
            if stream.at_end:
                stream.send_nowait(answer(bytes(request), datagrams), fin=True)

        connection.on_stream(opened)

    async def count(connection: Connection, datagrams: list[int]) -> None:
        while True:
            await connection.receive_datagram()
            datagrams[0] += 1

    async def one(connection: Connection) -> None:
        datagrams = [0]
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(count, connection, datagrams)
                if carrier == "qmux-calls":
                    answer_in_calls(connection, datagrams)
                    await trio.sleep_forever()
                while True:
                    nursery.start_soon(one_stream, await connection.accept_stream(), datagrams)
        except* CarrierError:
            pass

    async def accept(listener: Listener[Incoming]) -> None:
        async with trio.open_nursery() as nursery:
            while True:
                nursery.start_soon(one, (await listener.accept()).accept())

    if carrier.startswith("qmux"):
        listening: Any = qmux.listen(unix_url(folder, carrier), qmux.QmuxConfig(max_streams=4_096))
    else:
        config = QuicConfig(
            alpn=(ALPN,),
            certificate=folder / "certificate.pem",
            key=folder / "key.pem",
            max_streams=4_096,
            max_packet_size=1_200,
            datagram_queue=65_536,
        )
        listening = listen("quic://127.0.0.1:0", config)
    async with listening as listener:
        print(0 if carrier.startswith("qmux") else listener.url.rpartition(":")[2], flush=True)
        with trio.move_on_after(600):
            await accept(listener)


def unix_url(folder: Path, carrier: str) -> str:
    return f"qmux+unix://{folder}/{carrier}.socket"


async def serve_echo(folder: Path) -> None:
    async def one(stream: trio.SocketStream) -> None:
        data = b""
        async for part in stream:
            data += part
            while len(data) >= ECHO_SIZE:
                await stream.send_all(answer(data[:ECHO_SIZE], [0]).ljust(ECHO_SIZE))
                data = data[ECHO_SIZE:]

    socket = trio.socket.socket(trio.socket.AF_UNIX)
    (folder / "echo.socket").unlink(missing_ok=True)
    await socket.bind(str(folder / "echo.socket"))
    socket.listen()
    print(0, flush=True)
    with trio.move_on_after(600):
        await trio.serve_listeners(one, [trio.SocketListener(socket)])


class AsyncioServer(QuicConnectionProtocol):
    def __init__(self, *args: Any, **named: Any):
        named["stream_handler"] = self.opened
        super().__init__(*args, **named)
        self.count = [0]
        self.tasks: set[asyncio.Task[None]] = set()

    def opened(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self.one_stream(reader, writer))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def one_stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = await reader.read(65_536)
        if data[:1] == SINK:
            while await reader.read(65_536):
                pass
        else:
            data += await reader.read()
        writer.write(answer(data, self.count))
        writer.write_eof()

    def quic_event_received(self, event: QuicEvent) -> None:
        if isinstance(event, DatagramFrameReceived):
            self.count[0] += 1
        else:
            super().quic_event_received(event)


async def serve_asyncio(folder: Path) -> None:
    configuration = QuicConfiguration(is_client=False, alpn_protocols=[ALPN], max_datagram_frame_size=65_535)
    configuration.load_cert_chain(folder / "certificate.pem", folder / "key.pem")
    server = await serve("127.0.0.1", 0, configuration=configuration, create_protocol=AsyncioServer)
    assert server._transport is not None
    print(server._transport.get_extra_info("sockname")[1], flush=True)
    await asyncio.sleep(600)


# ---------------------------------------------------------------- runs

Work = Callable[[Client], Awaitable[None]]
TURNS = 6  # of each carrier in a round; the first one is not counted


@attrs.frozen
class Trouble:
    """The trouble on a path."""

    loss: float = 0.0
    late: float = 0.0


CLEAN = Trouble()
OVER_A_PATH = 4 << 20
# Made once: to make 2 MiB takes 1.4 ms, as long as half of sending it over a Unix socket.
BULK = SINK + bytes(2 << 20)
PART = SINK + bytes(65_535)
LONG = SINK + bytes(OVER_A_PATH - 1)


@attrs.frozen
class Workload:
    """One row of the table."""

    key: str
    title: str
    budget: float | None
    run: Work | None
    """``None``: the row of idle streams, see `crowd`."""
    trouble: Trouble | None = None
    """Of a row that is about a path."""
    beside_go: bool = False
    """Whether it is compared with quic-go on the same path, and not with itself on a clean one."""
    base: str = "asyncio"
    """The carrier that it is compared with."""
    carrier: str = "levada"
    """The carrier. ``"qmux-calls"`` answers in the calls of the carrier, as the connection actors do; the others have a task for each stream."""


async def bulk(client: Client) -> None:
    await client.ask(BULK)


async def bulk_100(client: Client) -> None:
    await client.ask_many([PART] * 100, 100)


async def over_a_path(client: Client) -> None:
    await client.ask(LONG)


async def datagrams_large(client: Client) -> None:
    await client.datagrams(1_100, 2_048)


async def datagrams_small(client: Client) -> None:
    await client.datagrams(100, 8_192)


async def requests_64(client: Client) -> None:
    await client.ask_many([ECHO + bytes(63)] * 1_000, 64)


async def requests_1(client: Client) -> None:
    await client.ask_many([ECHO + bytes(63)] * 300, 1)


WORKLOADS = (
    Workload("bulk", "2 MiB on one stream", 0.5, bulk),
    Workload("bulk100", "64 KiB on each of 100 streams", 0.25, bulk_100),
    Workload("datagrams1100", "datagrams of 1,100 bytes", 0.4, datagrams_large),
    Workload("datagrams100", "datagrams of 100 bytes", 0.75, datagrams_small),
    Workload("rr64", "requests of 64 bytes, 64 at a time", 0.75, requests_64),
    Workload("rr1", "requests of 64 bytes, 1 at a time", 0.9, requests_1),
    Workload("qmux-bulk", "QMux to QUIC: 2 MiB on one stream", 0.125, bulk, base="levada", carrier="qmux"),
    Workload(
        "qmux-bulk100", "QMux to QUIC: 64 KiB on each of 100 streams", 0.2, bulk_100, base="levada", carrier="qmux"
    ),
    Workload(
        "qmux-rr64",
        "QMux to QUIC: requests of 64 bytes, 64 at a time",
        None,
        requests_64,
        base="levada",
        carrier="qmux",
    ),
    Workload(
        "qmux-rr1", "QMux to QUIC: requests of 64 bytes, 1 at a time", 0.5, requests_1, base="levada", carrier="qmux"
    ),
    Workload(
        "qmux-echo",
        "QMux to an echo of trio: requests of 64 bytes, 1 at a time",
        1.67,
        requests_1,
        base="echo",
        carrier="qmux-calls",
    ),
    Workload("idle", "6 MiB on one stream beside 1,000 idle ones, to itself without", 1.2, None),
    Workload("late1", "seconds of 4 MiB, 1 % late, to a clean path", 1.6, over_a_path, Trouble(late=0.01)),
    Workload("late10", "seconds of 4 MiB, 10 % late, to a clean path", 2.0, over_a_path, Trouble(late=0.1)),
    Workload("go-late1", "seconds of 4 MiB, 1 % late, to quic-go", 1.5, over_a_path, Trouble(late=0.01), True),
    Workload("go-late10", "seconds of 4 MiB, 10 % late, to quic-go", 1.5, over_a_path, Trouble(late=0.1), True),
    Workload("go-loss1", "seconds of 4 MiB, 1 % lost, to quic-go", 1.5, over_a_path, Trouble(loss=0.01), True),
    Workload("go-loss5", "seconds of 4 MiB, 5 % lost, to quic-go", 1.5, over_a_path, Trouble(loss=0.05), True),
)


@contextlib.asynccontextmanager
async def levada_client(port: int, *, max_packet_size: int = 1_200) -> AsyncIterator[Client]:
    config = QuicConfig(alpn=(ALPN,), verify=False, max_packet_size=max_packet_size)
    async with dial(f"quic://127.0.0.1:{port}", config) as connection:
        yield LevadaClient(connection)


@contextlib.asynccontextmanager
async def qmux_client(folder: Path, carrier: str) -> AsyncIterator[Client]:
    async with qmux.dial(unix_url(folder, carrier)) as connection:
        yield LevadaClient(connection)


@contextlib.asynccontextmanager
async def echo_client(folder: Path) -> AsyncIterator[Client]:
    async with await trio.open_unix_socket(folder / "echo.socket") as stream:
        yield EchoClient(stream)


@contextlib.asynccontextmanager
async def asyncio_client(port: int) -> AsyncIterator[Client]:
    configuration = QuicConfiguration(
        is_client=True, alpn_protocols=[ALPN], max_datagram_frame_size=65_535, verify_mode=ssl.CERT_NONE
    )
    async with connect("127.0.0.1", port, configuration=configuration, create_protocol=AsyncioClient) as client:
        assert isinstance(client, AsyncioClient)
        yield client


async def drive(
    dialled: contextlib.AbstractAsyncContextManager[Client], work: Work, line: Callable[[], Awaitable[str]]
) -> None:
    """Run a workload once for each line that comes in, and print what it took."""
    async with dialled as client:
        while await line():
            await client.ask(DATAGRAMS)
            theirs, ours, start = float(await client.ask(CPU)), cpu(), time.perf_counter()
            await work(client)
            await client.ask(DATAGRAMS)
            wall, ours = time.perf_counter() - start, cpu() - ours
            theirs = float(await client.ask(CPU)) - theirs
            print(json.dumps({"wall": wall, "cpu": ours + theirs}), flush=True)


async def crowd(port: int) -> list[dict[str, float]]:
    """Send 6 MiB over one connection and over another with 1,000 idle streams, in turn by the MiB; return the CPU seconds of each."""
    async with levada_client(port) as lonely, levada_client(port) as crowded:
        assert isinstance(crowded, LevadaClient)
        await crowded.idle(1_000)
        spent = [{"wall": 0.0, "cpu": 0.0} for _ in range(2)]
        for _ in range(6):
            for client, figures in ((lonely, spent[0]), (crowded, spent[1])):
                before, start = float(await lonely.ask(CPU)) + cpu(), time.perf_counter()
                await client.ask(SINK + bytes(1 << 20))
                figures["wall"] += time.perf_counter() - start
                figures["cpu"] += float(await lonely.ask(CPU)) + cpu() - before
        return spent


def compare(workload: Workload, folder: Path) -> tuple[float, float]:
    """Return the carrier's CPU seconds divided by the base's, and how many times as fast it is."""
    if workload.trouble is not None:
        other = seconds_of("quic-go" if workload.beside_go else "levada", workload, folder)
        ratio = seconds_of("levada", workload, folder, workload.trouble) / other
        return ratio, 1 / ratio
    with contextlib.ExitStack() as stack:
        if workload.run is None:
            base, mine = json.loads(stack.enter_context(pair("levada", workload, folder))())
        else:
            take_turns = [
                stack.enter_context(pair(carrier, workload, folder)) for carrier in (workload.base, workload.carrier)
            ]
            turns = [[json.loads(take_turn()) for take_turn in take_turns] for _ in range(TURNS)]
            # A machine that stalls for a moment spoils one turn, not the sum.
            base, mine = (
                {key: statistics.median(turn[n][key] for turn in turns[1:]) for key in ("wall", "cpu")}
                for n in range(2)
            )
    return mine["cpu"] / base["cpu"], base["wall"] / mine["wall"]


@contextlib.contextmanager
def pair(carrier: str, workload: Workload, folder: Path) -> Iterator[Callable[[], str]]:
    """Start a server and a client; the yielded function lets them take a turn and returns their figures."""
    command = [sys.executable, "-m", "benchmarks.carriers", "--folder", str(folder), "--carrier", carrier]
    pipe = subprocess.PIPE
    with subprocess.Popen([*command, "--role", "server"], stdout=pipe, text=True, cwd=ROOT) as server:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        command += ["--role", "client", "--port", port, "--workload", workload.key]
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as client:

            def take_turn() -> str:
                assert client.stdin is not None
                assert client.stdout is not None
                client.stdin.write("go\n")
                client.stdin.flush()
                return client.stdout.readline()

            try:
                yield take_turn
            finally:
                client.kill()
                server.kill()


def seconds_of(carrier: str, workload: Workload, folder: Path, trouble: Trouble | None = None) -> float:
    """Return the seconds of one transfer over a path with the workload's trouble, or with another one."""
    if trouble is None:
        assert workload.trouble is not None
        trouble = workload.trouble if workload.beside_go else CLEAN
    here = Path(__file__).parent
    program = str(folder / "quicgo")
    if carrier == "quic-go":
        if not (folder / "quicgo").exists():
            subprocess.run(["go", "build", "-o", program, "."], cwd=here / "quicgo", check=True)
        server = [program, "serve", str(folder)]
    else:
        server = [
            sys.executable,
            "-m",
            "benchmarks.carriers",
            "--folder",
            str(folder),
            "--carrier",
            carrier,
            "--role",
            "server",
        ]
    with contextlib.ExitStack() as stack:

        def start(*command: str) -> subprocess.Popen[str]:
            process = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
            )
            stack.callback(process.kill)
            return process

        def line(process: subprocess.Popen[str]) -> str:
            assert process.stdout is not None
            return process.stdout.readline().strip()

        port = line(start(*server))
        path = (str(1), str(trouble.loss), str(trouble.late))
        port = line(start(sys.executable, str(here / "_lossy.py"), port, *path))
        if carrier == "quic-go":
            client = start(program, "call", port, str(OVER_A_PATH))
        else:
            client = start(*server[:-1], "client", "--port", port, "--workload", workload.key)
        assert client.stdin is not None
        client.stdin.write("go\n")
        client.stdin.flush()
        answer = json.loads(line(client))
        return float(answer if carrier == "quic-go" else answer["wall"])


def _role(options: argparse.Namespace) -> None:
    folder = Path(options.folder)
    if options.carrier in ("qmux-calls", "echo") and hasattr(os, "sched_setaffinity"):
        # Both ends on one core, to compare work: to wake an idle core costs more than such a request on a virtual machine.
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    if options.role == "server":
        with contextlib.suppress(KeyboardInterrupt):
            if options.carrier in ("levada", "qmux", "qmux-calls"):
                trio.run(serve_levada, folder, options.carrier)
            elif options.carrier == "echo":
                trio.run(serve_echo, folder)
            else:
                asyncio.run(serve_asyncio(folder))
        return
    workload = next(workload for workload in WORKLOADS if workload.key == options.workload)
    if workload.run is None:
        print(json.dumps(trio.run(crowd, options.port)), flush=True)
    elif options.carrier != "asyncio":
        dialled = {
            "levada": lambda: levada_client(options.port, max_packet_size=1_452 if workload.trouble else 1_200),
            "qmux": lambda: qmux_client(folder, "qmux"),
            "qmux-calls": lambda: qmux_client(folder, "qmux-calls"),
            "echo": lambda: echo_client(folder),
        }[options.carrier]()
        trio.run(drive, dialled, workload.run, lambda: trio.to_thread.run_sync(sys.stdin.readline))
    else:
        asyncio.run(drive(asyncio_client(options.port), workload.run, lambda: asyncio.to_thread(sys.stdin.readline)))


@attrs.frozen
class Row:
    """One workload, measured in all rounds."""

    workload: Workload
    ratios: list[float]
    """CPU seconds, ours to the base's."""
    wall: list[float]
    """How many times as fast."""

    @property
    def missed(self) -> bool:
        return self.workload.budget is not None and statistics.median(self.ratios) > self.workload.budget


@attrs.frozen
class Report:
    """All rows."""

    rows: list[Row]

    @property
    def missed(self) -> list[str]:
        """Titles of the rows above their budgets."""
        return [row.workload.title for row in self.rows if row.missed]

    def text(self, *, judged: bool) -> str:
        """Lay it out as a table."""
        lines = [
            f"{'CPU seconds of client and server, unless it says seconds':62} {'ratio':>8} {'best':>6} {'budget':>7}        times as fast"
        ]
        lines += [
            f"{row.workload.title:62} {statistics.median(row.ratios):6.2f} × {min(row.ratios):6.2f} {row.workload.budget or '':>7} "
            f"{verdict(row.missed, judged):6} {statistics.median(row.wall):6.1f}"
            for row in self.rows
        ]
        return "\n".join(lines) + "\n"

    def to_json(self) -> dict[str, Any]:
        """Turn it into what the `json` module writes."""
        return {
            "rows": [
                {
                    "key": row.workload.key,
                    "ratios": row.ratios,
                    "budget": row.workload.budget,
                    "missed": row.missed,
                    "wall": row.wall,
                }
                for row in self.rows
            ]
        }


def run(*, rounds: int, quick: bool, only: str, progress: Callable[[str], None]) -> Report:
    """Measure all workloads whose title contains `only`; `quick`: the first of them, to show that it runs."""
    go = shutil.which("go") is not None
    workloads = [workload for workload in WORKLOADS if only in workload.title and (go or not workload.beside_go)]
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        certify(folder)
        for workload in workloads[:1] if quick else workloads:
            row = Row(workload, [], [])
            for number in range(rounds):
                progress(f"{workload.title}, round {number + 1} of {rounds}")
                ratio, wall = compare(workload, folder)
                row.ratios.append(ratio)
                row.wall.append(wall)
            rows.append(row)
    return Report(rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Be one of the processes of a measurement."""
    parser = argparse.ArgumentParser()
    for option in ("--role", "--carrier", "--folder", "--workload"):
        parser.add_argument(option)
    parser.add_argument("--port", type=int)
    _role(parser.parse_args(argv))


if __name__ == "__main__":
    main()
