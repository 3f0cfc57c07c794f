"""What a hostile QMux client can cost a server, over a real socket: memory, CPU time, and the answer for an honest client beside it."""

from __future__ import annotations

import logging
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest
import trio
from tests.pace import within

from levada.framework.errors import CarrierError
from levada.transports.qmux import Parameters, QmuxConnection, QmuxListener, dial, listen
from levada.transports.qmux.frames import FrameType, encode_frame, encode_int

pytestmark = [pytest.mark.loopback, pytest.mark.ci]

MB = 1_000_000
ROOM = 16_000  # bytes of frames in a record


@pytest.fixture(autouse=True)
def no_traceback(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing that a peer sends ends in a traceback."""
    yield
    assert [r.getMessage() for r in caplog.get_records("call") if r.exc_info or r.levelno >= logging.ERROR] == []


def records(frames: Iterator[bytes]) -> Iterator[bytes]:
    """Pack frames into full records."""
    body = bytearray()
    for frame in frames:
        if len(body) + len(frame) > ROOM:
            yield encode_int(len(body)) + body
            body.clear()
        body += frame
    yield encode_int(len(body)) + body


def stream(stream_id: int, offset: int, data: bytes) -> bytes:
    return encode_frame(0x0E, stream_id, offset, data=data)


@attrs.frozen
class Attack:
    """What a client sends after its parameters."""

    octets: Callable[[], Iterator[bytes]]
    memory: int
    """Bytes that Python may allocate at most."""
    cpu: float
    """Seconds of both ends."""
    ends: int | None = None
    """Code of the transport error that ends it; `None`: the connection goes on."""


def pings() -> Iterator[bytes]:
    return records(encode_frame(FrameType.PING, number) for number in range(1, 5_001))


def padding() -> Iterator[bytes]:
    return (encode_int(ROOM) + bytes(ROOM) for _ in range(200))


def stale_limits() -> Iterator[bytes]:
    return records(encode_frame(FrameType.MAX_DATA, number & 63) for number in range(10_000))


def crumbs() -> Iterator[bytes]:
    """Pieces of two bytes, on eight streams that no application reads."""
    return records(stream(4 * (at % 8), 2 * (at // 8), b"xx") for at in range(1 << 14))


def opened_and_reset() -> Iterator[bytes]:
    """Streams that no application accepts: they count until it does."""
    return records(encode_frame(FrameType.RESET_STREAM, 4 * number + 2, 0, 0) for number in range(1_000))


def datagrams() -> Iterator[bytes]:
    return records(encode_frame(0x31, data=bytes(100)) for _ in range(10_000))


def credits_of_one_byte() -> Iterator[bytes]:
    return records(encode_frame(FrameType.MAX_STREAM_DATA, 1, number) for number in range(1, 10_001))


def endless_record() -> Iterator[bytes]:
    """A Size of 2^61: refused when the Size is there."""
    yield encode_int(1 << 61)
    yield bytes(ROOM)


def empty_frames() -> Iterator[bytes]:
    return records(stream(0, 0, b"") for _ in range(30_000))


ATTACKS = {
    "pings": Attack(pings, MB, 2),
    "padding": Attack(padding, MB, 1),
    "stale_limits": Attack(stale_limits, MB, 2),
    "crumbs": Attack(crumbs, MB, 4),
    "opened_and_reset": Attack(opened_and_reset, MB, 1, ends=4),
    "datagrams": Attack(datagrams, MB, 3),
    "credits_of_one_byte": Attack(credits_of_one_byte, MB, 3),
    "endless_record": Attack(endless_record, MB, 1, ends=7),
    "empty_frames": Attack(empty_frames, MB, 3),
}


async def echo(connection: QmuxConnection) -> None:
    stream = await connection.accept_stream()
    stream.send_nowait(await stream.receive_some(), fin=True)


async def honest(listener: QmuxListener) -> float:
    """Return the CPU seconds of one question of an honest client."""
    begun = time.process_time()
    async with trio.open_nursery() as nursery:

        async def serve() -> None:
            await echo((await listener.accept()).accept())

        nursery.start_soon(serve)
        async with dial(listener.url) as client:
            stream = await client.open_stream()
            stream.send_nowait(b"ping", fin=True)
            assert await stream.receive_some() == b"ping"
            return time.process_time() - begun


@pytest.mark.rule("QX-43")
@pytest.mark.parametrize("name", ATTACKS)
async def test_qx43_what_a_client_costs(name: str, tmp_path: Path) -> None:
    attack = ATTACKS[name]
    parameters = Parameters(
        max_data=1 << 30, max_stream_data_bidi_remote=0, max_streams_bidi=100, max_datagram_frame_size=16_382
    )
    async with (
        listen(f"qmux+unix://{tmp_path}/socket") as listener,
        await trio.open_unix_socket(tmp_path / "socket") as rude,
    ):
        server = (await listener.accept()).accept()
        greeting = encode_frame(FrameType.PARAMETERS, data=parameters.encode())
        await rude.send_all(encode_int(len(greeting)) + greeting)
        await server.handshake()
        (await server.open_stream()).send_nowait(bytes(20_000))
        parts = list(attack.octets())
        tracemalloc.start()
        begun = time.process_time()
        answered: list[float] = []
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                answered.append(await honest(listener))

            nursery.start_soon(ask)
            try:
                for part in parts:
                    await rude.send_all(part)  # and it reads nothing
            except trio.BrokenResourceError:
                assert attack.ends is not None
        if attack.ends is not None:
            reason = await server.wait_closed()
            assert (reason.code, reason.lost) == (attack.ends, True)
        else:
            await rude.send_eof()
            await server.wait_closed()
        spent = time.process_time() - begun
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < attack.memory
    assert within(spent, attack.cpu)
    assert within(answered[0], 1.0)


async def test_half_a_record_of_many_clients_costs_little(tmp_path: Path) -> None:
    """A partial record grows as its bytes come, not by its Size."""
    greeting = encode_frame(FrameType.PARAMETERS, data=Parameters().encode())
    async with listen(f"qmux+unix://{tmp_path}/socket") as listener:
        tracemalloc.start()
        servers, clients = [], []
        try:
            for _ in range(100):
                client = await trio.open_unix_socket(tmp_path / "socket")
                clients.append(client)
                servers.append((await listener.accept()).accept())
                await client.send_all(encode_int(len(greeting)) + greeting + encode_int(16_382) + bytes(100))
                await servers[-1].handshake()
            assert tracemalloc.get_traced_memory()[1] < 6 * MB
            assert await honest(listener) < 1
        finally:
            tracemalloc.stop()
            for client in clients:
                await client.aclose()
        for server in servers:
            assert (await server.wait_closed()).lost
    with pytest.raises(CarrierError):
        servers[0].send_datagram_nowait(b"")
