"""Lumberjack with other people's shippers at the other end, Filebeat among them, plain and over TLS."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from tests.output import heard

from levada.actors.interop.certificates import SelfSigned, make_certificates
from levada.actors.lumberjack import Unit, serve
from levada.framework import ActorSystem
from levada.transports.carriers import TlsConfig

pytestmark = [pytest.mark.loopback, pytest.mark.ci]

HERE = Path(__file__).parent
COUNT = 250
PATIENCE = 40.0  # seconds


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> SelfSigned:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@attrs.define(eq=False)
class Sink:
    """Keeps the texts of events as they come."""

    other: Sink | None = None
    """Gets them too."""
    got: list[str] = attrs.field(factory=list)
    versions: set[int] = attrs.field(factory=set)
    subjects: set[str | None] = attrs.field(factory=set)
    changed: trio.Event = attrs.field(factory=trio.Event)

    async def take(self, unit: Unit) -> None:
        for event in unit.events:
            line = event.get("line", "")
            if line.startswith("{"):  # bunyan's record
                event = json.loads(line)
            self.got.append(event.get("message") or line)
        self.versions.add(unit.origin.version)
        self.subjects.add(unit.origin.subject)
        if self.other is not None:
            await self.other.take(unit)
        self.changed.set()
        self.changed = trio.Event()

    async def until(self, count: int) -> None:
        """Wait until so many different texts have come."""
        with trio.move_on_after(PATIENCE):
            while len(set(self.got)) < count:
                await self.changed.wait()
            return
        raise AssertionError(f"{len(set(self.got))} of {count} texts have come within {PATIENCE:.0f} s")


@asynccontextmanager
async def reading(sink: Sink, certificates: SelfSigned | None, **tls: Any) -> AsyncIterator[str]:
    """A reader; gives its port."""
    carrier = None
    if certificates is not None:
        carrier = TlsConfig(certificate=certificates.certificate, key=certificates.key, **tls)
    scheme = "lumberjack" if carrier is None else "lumberjack+tls"
    async with ActorSystem() as system, serve(system, f"{scheme}://127.0.0.1:0", sink.take, carrier=carrier) as reader:
        yield reader.url.rpartition(":")[2]


@asynccontextmanager
async def running(*command: str, environment: dict[str, str] | None = None) -> AsyncIterator[trio.Process]:
    """A program that runs as long as the block; one that fails ends the block with its exit code.

    It is killed at the end: SIGTERM does not always end Filebeat.
    """

    async def kill(process: trio.Process) -> None:
        process.kill()

    async with trio.open_nursery() as nursery:
        run = functools.partial(
            trio.run_process,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            deliver_cancel=kill,
        )
        process: trio.Process = await nursery.start(run, command)
        yield process
        nursery.cancel_scope.cancel()


EVENTS = [f"event {i}" for i in range(COUNT)]


# ---------------------------------------------------------------- packages of Python and Node


@pytest.mark.parametrize("secure", [False, True], ids=["tcp", "tls"])
@pytest.mark.parametrize("kind", ["pylogbeat", "logstash_async", "timbersnake", "stashward"])
async def test_python_shippers(
    kind: str, secure: bool, certificates: SelfSigned, python_packages: Callable[..., Path]
) -> None:
    """Each event comes once, and the shipper ends content."""
    if kind == "stashward":
        if not secure:
            pytest.skip("stashward speaks over TLS only")
        if sys.version_info >= (3, 12):
            pytest.skip("stashward needs ssl.wrap_socket, which Python 3.12 has no more")
    packages = python_packages(
        "pylogbeat==2.1.0", "python-logstash-async==4.1.0", "timbersnake==0.1.0", "stashward==0.1.4"
    )
    sink = Sink()
    ca = [str(certificates.ca)] if secure else []
    async with reading(sink, certificates if secure else None) as port:
        await trio.run_process(
            [sys.executable, "-W", "ignore", str(HERE / "lumberjack_python.py"), kind, port, str(COUNT), *ca],
            env={**os.environ, "PYTHONPATH": str(packages)},
        )
        await sink.until(COUNT)
    if kind == "logstash_async":  # its thread takes them out of its queue in another order now and then
        sink.got.sort(key=EVENTS.index)
    assert sink.got == EVENTS
    assert sink.versions == {1 if kind == "stashward" else 2}


@pytest.mark.parametrize(
    ("kind", "secure"),
    [
        ("lumberjack-protocol", True),
        ("bunyan-lumberjack", True),
        ("lumberjack-client", False),
        ("lumberjack-client", True),
    ],
)
async def test_node_shippers(
    kind: str, secure: bool, certificates: SelfSigned, node_packages: Callable[..., Path]
) -> None:
    """Each event comes once and in order; two of them speak over TLS only."""
    modules = node_packages("lumberjack-protocol@1.0.7", "bunyan-lumberjack@1.1.3", "lumberjack-client@1.0.3")
    sink = Sink()
    async with reading(sink, certificates if secure else None) as port:
        ca = [str(certificates.ca)] if secure else []
        script = str(HERE / "node" / "lumberjack.cjs")
        async with running(
            "node", "--no-deprecation", script, kind, port, str(COUNT), *ca, environment={"NODE_PATH": str(modules)}
        ):
            await sink.until(COUNT)
    assert sink.got == EVENTS
    assert sink.versions == {2 if kind == "lumberjack-client" else 1}


# ---------------------------------------------------------------- Filebeat


@attrs.frozen
class Beat:
    """Filebeat, set up to ship one file."""

    program: Path
    folder: Path

    def write(self, *hosts: str, lines: int, compression: int = 0, extra: str = "") -> list[str]:
        """Write a log and the settings; gives the lines."""
        expected = [f"line {i} {'x' * (i % 50)}" for i in range(lines)]
        (self.folder / "in.log").write_text("\n".join(expected) + "\n")
        (self.folder / "filebeat.yml").write_text(
            f"""
filebeat.inputs:
- {{type: filestream, id: shipped, paths: ["{self.folder}/in.log"], prospector.scanner.check_interval: 100ms}}
logging.level: error
output.logstash:
  hosts: {list(hosts)}
  compression_level: {compression}
  backoff.init: 100ms
  backoff.max: 500ms
{extra}
"""
        )
        return expected

    def running(self) -> Any:
        """Run it as long as the block."""
        paths = [f"--path.{kind}={self.folder / kind}" for kind in ("data", "logs")]
        return running(str(self.program), "-e", "--strict.perms=false", "-c", str(self.folder / "filebeat.yml"), *paths)


@pytest.fixture
def beat(filebeat: Path, tmp_path: Path) -> Beat:
    return Beat(filebeat, tmp_path)


@pytest.mark.parametrize("compression", [0, 3])
async def test_filebeat_plain(beat: Beat, compression: int) -> None:
    """10,000 lines, in windows of 2,048, packed and not: each once and in order."""
    sink = Sink()
    async with reading(sink, None) as port:
        lines = beat.write(f"127.0.0.1:{port}", lines=10_000, compression=compression)
        async with beat.running():
            await sink.until(len(lines))
    assert sink.got == lines
    assert sink.versions == {2}


async def test_filebeat_shows_its_certificate(beat: Beat, certificates: SelfSigned) -> None:
    """TLS both ways: the reader asks for a certificate, and the sink is told whose it was."""
    sink = Sink()
    ssl = f"""  ssl.certificate_authorities: ["{certificates.ca}"]
  ssl.certificate: "{certificates.certificate}"
  ssl.key: "{certificates.key}"
"""
    async with reading(sink, certificates, ca=certificates.ca, client_certificates="required") as port:
        lines = beat.write(f"localhost:{port}", lines=3_000, extra=ssl)
        async with beat.running():
            await sink.until(len(lines))
    assert sink.got == lines
    assert sink.subjects == {"CN=localhost"}


async def test_filebeat_does_not_trust_a_stranger(beat: Beat, certificates: SelfSigned) -> None:
    """Without the authority's certificate nothing is sent, and the reader serves on."""
    sink = Sink()
    async with reading(sink, certificates) as port:
        beat.write(f"localhost:{port}", lines=10)
        (beat.folder / "filebeat.yml").write_text((beat.folder / "filebeat.yml").read_text() + "  ssl.enabled: true\n")
        async with beat.running():
            with trio.move_on_after(2):
                await sink.until(1)
    assert sink.got == []


async def test_filebeat_balances_over_two_readers(beat: Beat) -> None:
    """Both get their share, and together everything."""
    both = Sink()
    first, second = Sink(both), Sink(both)
    async with reading(first, None) as one, reading(second, None) as two:
        lines = beat.write(
            f"127.0.0.1:{one}", f"127.0.0.1:{two}", lines=20_000, extra="  loadbalance: true\n  bulk_max_size: 512\n"
        )
        async with beat.running():
            await both.until(len(lines))
    assert sorted(set(both.got)) == sorted(lines)
    assert first.got
    assert second.got


class Cutting:
    """A relay that cuts its first connections after so many octets of the shipper, by a reset."""

    def __init__(self, port: int, *, after: list[int]) -> None:
        self.port = port
        self.after = after
        self.cuts = 0

    async def handle(self, shipper: trio.SocketStream) -> None:
        left = self.after.pop(0) if self.after else None
        async with await trio.open_tcp_stream("127.0.0.1", self.port) as reader, trio.open_nursery() as nursery:
            nursery.start_soon(self.acks, reader, shipper)
            try:
                async for data in shipper:
                    part = data if left is None else data[:left]
                    await reader.send_all(part)
                    if left is not None:
                        left -= len(part)
                        if not left:
                            self.cuts += 1
                            shipper.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                            break
            except trio.BrokenResourceError:
                pass
            nursery.cancel_scope.cancel()

    async def acks(self, reader: trio.SocketStream, shipper: trio.SocketStream) -> None:
        async for data in reader:
            await shipper.send_all(data)


async def test_filebeat_sends_again_after_resets(beat: Beat) -> None:
    """Connections are reset in mid-window three times: every line comes at least once."""
    sink = Sink()
    async with reading(sink, None) as port, trio.open_nursery() as nursery:
        relay = Cutting(int(port), after=[50_000, 300_000, 120_000])
        (listener,) = await nursery.start(functools.partial(trio.serve_tcp, relay.handle, 0, host="127.0.0.1"))
        relayed = listener.socket.getsockname()[1]
        lines = beat.write(f"127.0.0.1:{relayed}", lines=10_000)
        async with beat.running():
            await sink.until(len(lines))
        nursery.cancel_scope.cancel()
    assert relay.cuts == 3
    assert sorted(set(sink.got)) == sorted(lines)
    assert len(sink.got) > len(lines)  # a window that was cut off had been taken in part, or its ack was lost


async def test_filebeat_outlives_a_restart_of_the_reader(beat: Beat) -> None:
    """A reader that ends in the middle, and another one on its port: every line comes at least once."""
    sink, ended = Sink(), trio.Event()
    async with ActorSystem() as system, trio.open_nursery() as nursery:

        async def first(task_status: trio.TaskStatus[str]) -> None:
            async with serve(system, "lumberjack://127.0.0.1:0", sink.take) as reader:
                task_status.started(reader.url)
                await sink.until(2_000)
            ended.set()

        url: str = await nursery.start(first)
        lines = beat.write(url.partition("://")[2], lines=20_000)
        async with beat.running():
            await ended.wait()
            before = len(sink.got)
            async with serve(system, url, sink.take):
                await sink.until(len(lines))
    assert before < len(lines)
    assert sorted(set(sink.got)) == sorted(lines)


# ---------------------------------------------------------------- the command


async def line(process: trio.Process) -> bytes:
    """Read one line of its output."""
    return await heard(process.stdout, lambda said: said.endswith(b"\n"), most=1)


async def test_interop_counts_and_spools(tmp_path: Path, python_packages: Callable[..., Path]) -> None:
    """`levada interop lumberjack --spool`: the count on SIGUSR1 and at the end, and files of JSON lines."""
    packages = python_packages(
        "pylogbeat==2.1.0", "python-logstash-async==4.1.0", "timbersnake==0.1.0", "stashward==0.1.4"
    )
    command = (sys.executable, "-m", "levada.actors", "interop", "lumberjack", "--spool", str(tmp_path / "spool"))
    async with running(*command) as process:
        word, _, port, carrier = (await line(process)).split()
        assert (word, carrier) == (b"LISTENING", b"tcp")
        await trio.run_process(
            [sys.executable, str(HERE / "lumberjack_python.py"), "pylogbeat", port.decode(), str(COUNT)],
            env={**os.environ, "PYTHONPATH": str(packages)},
        )
        process.send_signal(signal.SIGUSR1)
        assert await line(process) == b"%d\n" % COUNT
        process.send_signal(signal.SIGTERM)
        assert await line(process) == b"%d\n" % COUNT
        assert await process.wait() == 0
    files = sorted((tmp_path / "spool").glob("*.jsonl"))
    assert sum(len(file.read_text().splitlines()) for file in files) == COUNT
