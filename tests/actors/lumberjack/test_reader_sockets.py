"""The reader on real sockets: closing without a reset, TLS, client certificates, reload."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import attrs
import pytest
import trio

from levada.actors.lumberjack import Reader, ReaderConfig, Unit, serve
from levada.framework import ActorSystem
from levada.framework.errors import ConfigurationError, ConnectionLost
from levada.transports.carriers import ByteStream, TcpConfig, TlsConfig, dial
from levada.transports.lumberjack import encode_data, encode_json, encode_window

pytestmark = pytest.mark.loopback

WINDOW = encode_window(2, 1) + encode_json(2, 1, {"n": 1})
ACK = b"2A\0\0\0\1"


@asynccontextmanager
async def reading(carrier: TcpConfig | TlsConfig, **settings: Any) -> AsyncIterator[tuple[Reader, list[Unit]]]:
    units: list[Unit] = []

    async def take(unit: Unit) -> None:
        units.append(unit)

    scheme = "lumberjack+tls" if isinstance(carrier, TlsConfig) else "lumberjack"
    async with (
        ActorSystem() as system,
        serve(system, f"{scheme}://127.0.0.1:0", take, config=ReaderConfig(**settings), carrier=carrier) as reader,
    ):
        yield reader, units


def carrier_url(reader: Reader) -> str:
    return reader.url.replace("lumberjack+tls", "tls").replace("lumberjack", "tcp")


@asynccontextmanager
async def raw(reader: Reader) -> AsyncIterator[trio.SocketStream]:
    async with await trio.open_tcp_stream("127.0.0.1", int(reader.url.rpartition(":")[2])) as stream:
        yield stream


async def read_all(stream: trio.abc.Stream | ByteStream) -> bytes:
    data = b""
    while part := await stream.receive_some():
        data += part
    return data


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(250):
        while not condition():  # a counter tells nobody; each turn lets the reader take what has come
            await trio.lowlevel.checkpoint()


@pytest.mark.rule("LJ-28a")
async def test_lj28a_acks_survive_a_close_with_octets_unread() -> None:
    """LJ-28a: acks, FIN, then what comes is read and thrown away: no reset destroys the acks under way."""
    async with reading(TcpConfig(), linger=50.0) as (reader, _), raw(reader) as stream:
        rubbish = b"x" * 3_000_000
        async with trio.open_nursery() as nursery:

            async def send() -> None:
                await stream.send_all(WINDOW + b"9")
                await until(lambda: reader.statistics().protocol_errors == {"LJ-2": 1})
                await stream.send_all(rubbish)
                await stream.send_eof()

            nursery.start_soon(send)
        assert await read_all(stream) == ACK


@pytest.mark.rule("LJ-28")
@pytest.mark.rule("LJ-16")
async def test_lj16_lj28_a_reset_in_mid_window_delivers_what_came_whole() -> None:
    """LJ-28: whole events of the open unit are handed on after a reset, without ack."""
    async with reading(TcpConfig()) as (reader, units):
        async with raw(reader) as stream:
            await stream.send_all(encode_window(1, 2) + encode_data(1, 1, {"n": "1"}))
            await until(lambda: reader.statistics().events == 1)
            stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            stream.socket.close()
        await until(lambda: bool(units))
        assert ([unit.events for unit in units], units[0].whole) == ([[{"n": "1"}]], False)
        assert reader.statistics().acks == 0


@pytest.fixture
def tls(authorities: Any) -> tuple[TlsConfig, TlsConfig]:
    """Settings of a reader, and of a writer with a certificate."""
    ours, _ = authorities
    return (
        TlsConfig(certificate=ours.issue("reader"), ca=ours.ca, client_certificates="optional"),
        TlsConfig(ca=ours.ca, certificate=ours.issue("writer", "web-01", "web-01.example.org")),
    )


@pytest.mark.rule("LJ-61")
async def test_lj61_who_the_writer_is(tls: tuple[TlsConfig, TlsConfig], authorities: Any) -> None:
    """LJ-61: subject and names of a verified certificate go to the sink; none, optional, required."""
    serving, dialling = tls
    anonymous = attrs.evolve(dialling, certificate=None)
    stranger = attrs.evolve(dialling, certificate=authorities[1].issue("stranger"))
    async with reading(serving) as (reader, units):
        for config in (dialling, anonymous):
            async with dial(carrier_url(reader), config) as stream:
                await stream.send_all(WINDOW)
                assert await stream.receive_some() == ACK
        known, unknown = (unit.origin for unit in units)
        assert (known.subject, known.names) == ("CN=writer", ("DNS:web-01", "DNS:web-01.example.org"))
        assert (unknown.subject, unknown.names) == (None, ())
    async with reading(attrs.evolve(serving, client_certificates="required")) as (reader, units):
        for config in (anonymous, stranger):
            with pytest.raises(ConnectionLost):
                async with dial(carrier_url(reader), config) as stream:
                    await stream.send_all(WINDOW)
                    await stream.receive_some()
        async with dial(carrier_url(reader), dialling) as stream:
            await stream.send_all(WINDOW)
            assert await stream.receive_some() == ACK
        assert len(units) == 1


@pytest.mark.rule("LJ-6")
@pytest.mark.rule("LJ-63")
@pytest.mark.parametrize("part", [b"", b"2J"])
async def test_lj6_lj63_the_end_of_tls_without_close_notify(
    part: bytes, tls: tuple[TlsConfig, TlsConfig], caplog: pytest.LogCaptureFixture
) -> None:
    """LJ-6, LJ-63: on a boundary a normal end, so that the open unit is acked; inside a frame an error."""
    serving, dialling = tls
    async with reading(serving) as (reader, units):
        context = ssl.create_default_context(cafile=str(dialling.ca))
        async with raw(reader) as below:
            stream = trio.SSLStream(below, context, server_hostname="127.0.0.1")
            await stream.send_all(encode_window(2, 2) + encode_json(2, 1, {"n": 1}) + part)
            await until(lambda: reader.statistics().events == 1)
            await below.send_eof()
            await until(lambda: reader.statistics().connections == 0)
        assert [unit.events for unit in units] == [[{"n": 1}]]
        assert units[0].whole is (part == b"")
        assert [vars(record)["event"] for record in caplog.records if record.levelname == "ERROR"] == ["cut"] * bool(
            part
        )


@pytest.mark.rule("LJ-62")
async def test_lj62_plain_octets_on_a_tls_port_and_the_reverse(tls: tuple[TlsConfig, TlsConfig]) -> None:
    """LJ-62: both just close that connection; certificates are reloaded without dropping connections."""
    serving, dialling = tls
    async with reading(serving) as (reader, _), dial(carrier_url(reader), dialling) as stream:
        async with raw(reader) as plain:
            await plain.send_all(WINDOW)
            heard = b""
            with contextlib.suppress(trio.BrokenResourceError):  # an alert of TLS, then the end or a reset
                while part := await plain.receive_some():
                    heard += part
            assert ACK not in heard
        reader.reload()
        await stream.send_all(WINDOW)
        assert await stream.receive_some() == ACK
    async with reading(TcpConfig()) as (reader, _):
        with pytest.raises(ConnectionLost):
            async with dial(f"tls://127.0.0.1:{reader.url.rpartition(':')[2]}", dialling):
                pass
        await until(lambda: reader.statistics().protocol_errors == {"LJ-2": 1})


@pytest.mark.rule("LJ-62")
async def test_lj62_new_connections_see_the_new_certificate(tls: tuple[TlsConfig, TlsConfig], authorities: Any) -> None:
    """LJ-62: certificates can be reloaded without dropping connections."""
    serving, dialling = tls
    async with reading(serving) as (reader, _):
        subjects = []
        async with dial(carrier_url(reader), dialling) as old:
            for name in ("reader", "renewed"):
                assert serving.certificate is not None
                authorities[0].issue(name).rename(cast("Any", serving.certificate))
                reader.reload()
                async with dial(carrier_url(reader), dialling) as stream:
                    subjects.append(stream.info.peer_subject)
            await old.send_all(WINDOW)
            assert await old.receive_some() == ACK
        assert subjects == ["CN=reader", "CN=renewed"]


@pytest.mark.rule("LJ-44")
async def test_lj44_a_handshake_has_its_time(tls: tuple[TlsConfig, TlsConfig]) -> None:
    """LJ-44: 10 s by default; then the connection is closed, and nobody else waits for it."""
    serving, dialling = tls
    assert serving.handshake_timeout == 10.0
    async with reading(serving) as (reader, _), raw(reader):
        async with dial(carrier_url(reader), dialling) as stream:
            await stream.send_all(WINDOW)
            assert await stream.receive_some() == ACK
        assert reader.statistics().connections_accepted == 1
    async with reading(attrs.evolve(serving, handshake_timeout=0.05)) as (reader, _), raw(reader) as silent:
        with trio.fail_after(250):
            assert await read_all(silent) == b""
        assert reader.statistics().connections_accepted == 0


@pytest.mark.rule("LJ-60")
async def test_lj60_a_reader_needs_a_certificate() -> None:
    """LJ-60: TLS 1.2 or later, with a certificate and a key."""
    assert TlsConfig().minimum_version is ssl.TLSVersion.TLSv1_2
    with pytest.raises(ConfigurationError, match="certificate"):
        async with reading(TlsConfig()):
            pass
