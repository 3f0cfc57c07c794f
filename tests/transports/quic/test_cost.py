"""What a peer can cost: floods of well-formed frames under good keys are answered by no more than they are, and nothing grows with them."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import trio
from aioquic._buffer import Buffer
from aioquic.quic.packet import QuicPacketType
from aioquic.quic.packet_builder import QuicPacketBuilder
from aioquic.tls import Epoch
from tests.simnet import SimNet
from trio.testing import MockClock

from levada.transports.quic.ranges import MAX_GAPS, MAX_RANGES

ROOM = 1_150  # octets of frames in a packet
PACKETS = 30


def numbers(*values: int) -> bytes:
    buf = Buffer(8 * len(values))
    for value in values:
        buf.push_uint_var(value)
    return buf.data


def packed(frames: Iterable[bytes]) -> Iterator[bytes]:
    payload = b""
    for frame in frames:
        if len(payload) + len(frame) > ROOM:
            yield payload
            payload = b""
        payload += frame
    yield payload


def seal(ends: Any, payloads: Iterable[bytes], *, step: int = 1) -> list[bytes]:
    """Return packets of the client's, each with a number `step` above the one before."""
    engine, sealed = ends.client.engine, []
    for count, payload in enumerate(payloads):
        builder = QuicPacketBuilder(
            host_cid=b"",
            peer_cid=engine._peer_cid.cid,
            version=1,
            is_client=True,
            max_datagram_size=1_252,
            packet_number=engine._packet_number + 1_000 + count * step,
        )
        builder.start_packet(QuicPacketType.ONE_RTT, engine._cryptos[Epoch.ONE_RTT])
        builder._buffer.push_bytes(payload)
        sealed += builder.flush()[0]
    return sealed


async def flood(ends: Any, datagrams: list[bytes]) -> tuple[int, int]:
    """Let the server have datagrams from the client's address; return how many it sends for them, and how many octets."""
    before = len(ends.net.trace)
    ends.client._endpoint.send([(datagram, ("server", 4433)) for datagram in datagrams])
    await trio.sleep(0.5)
    answers = [size for _, source, _, size in ends.net.trace[before:] if source[0] == "server"]
    return len(answers), sum(answers)


Frames = Callable[[int], bytes]

FLOODS: dict[str, tuple[Frames, int]] = {
    # what the n-th frame is, and its octets at least
    "PING": (lambda n: b"\x01", 1),
    "ACK of one range": (lambda n: b"\x02" + numbers(0, 0, 0, 0), 5),
    "ACK of many ranges": (lambda n: b"\x02" + numbers(1_200, 0, 500, 0) + bytes(1_000), 1_008),
    "RESET_STREAM": (lambda n: b"\x04" + numbers(4, 0, 12), 4),
    "STOP_SENDING": (lambda n: b"\x05" + numbers(4, 0), 3),
    "STREAM without data": (lambda n: b"\x0a" + numbers(4, 0), 3),
    "MAX_DATA": (lambda n: b"\x10" + numbers(10**8 + n), 5),
    "MAX_STREAM_DATA": (lambda n: b"\x11" + numbers(4, 10**8 + n), 6),
    "MAX_STREAMS": (lambda n: b"\x12" + numbers(1_000 + n), 3),
    "DATA_BLOCKED": (lambda n: b"\x14" + numbers(n), 2),
    "STREAMS_BLOCKED": (lambda n: b"\x16" + numbers(n), 2),
    "PATH_CHALLENGE": (lambda n: b"\x1a" + n.to_bytes(8, "big"), 9),
    "PATH_RESPONSE": (lambda n: b"\x1b" + n.to_bytes(8, "big"), 9),
    "DATAGRAM without data": (lambda n: b"\x31\x00", 2),
}


@pytest.mark.parametrize("kind", FLOODS)
async def test_a_flood_of_frames(lab: Any, autojump_clock: MockClock, kind: str) -> None:
    frame, size = FLOODS[kind]
    async with lab.connected(SimNet(1)) as ends:
        await trio.sleep(0.5)
        (await ends.client.open_stream()).send_nowait(b"the stream 0")
        (await ends.client.open_stream()).send_nowait(b"the stream 4")
        await trio.sleep(0.1)
        datagrams = seal(ends, packed(frame(n) for n in range(PACKETS * ROOM // size)))
        packets, octets = await flood(ends, datagrams)
        assert packets <= len(datagrams)
        assert octets <= sum(map(len, datagrams)) / 2
        engine = ends.server.engine
        assert not ends.server.closed
        assert len(engine._streams) == len(ends.server.streams) == 2
        assert len(engine._network_paths[0].remote_challenges) <= 32
        assert len(engine.space.sent_packets) <= len(datagrams)
        assert len(engine._peer_cid_available) <= 8
        assert len(ends.server._datagrams) <= 256
        assert ends.server.statistics().bytes_received < 100_000


@pytest.mark.parametrize("downwards", [False, True])
@pytest.mark.parametrize("kind", [b"\x0e\x04", b"\x06"], ids=["STREAM", "CRYPTO"])
async def test_octets_with_gaps_between_them(lab: Any, autojump_clock: MockClock, kind: bytes, downwards: bool) -> None:
    """RFC 9000 section 21.7: a window of 1 MiB would hold 500,000 of them, each of 100 octets here, to be put together one by one."""
    async with lab.connected(SimNet(1)) as ends:
        await trio.sleep(0.5)
        order = reversed(range(2 * MAX_GAPS)) if downwards else range(2 * MAX_GAPS)
        datagrams = seal(ends, packed(kind + numbers(20_000 + 2 * n, 1) + b"x" for n in order))
        await flood(ends, datagrams)
        reason = await ends.server.wait_closed()
        assert (reason.code, reason.text) == (0xA, "Too many gaps in the received data")


async def test_gaps_of_streams_that_ended_are_not_counted(lab: Any, autojump_clock: MockClock) -> None:
    """Each stream here has 100 gaps, which close or are given up."""
    async with lab.connected(SimNet(1), max_streams=1_000) as ends, trio.open_nursery() as nursery:

        async def accept() -> None:
            while True:
                await ends.server.accept_stream()

        nursery.start_soon(accept)
        await trio.sleep(0.5)
        for stream_id in range(0, 4 * 2 * MAX_GAPS // 100, 4):
            name = b"\x0e" + numbers(stream_id)
            frames = [name + numbers(2 * n + 1, 1) + b"x" for n in range(100)]
            if stream_id % 8:
                frames.append(b"\x04" + numbers(stream_id, 0, 1_000))
            else:
                frames += [name + numbers(2 * n, 1) + b"x" for n in range(101)]
            await flood(ends, seal(ends, packed(frames), step=1))
            ends.client.engine._packet_number += 10
        assert not ends.server.closed
        nursery.cancel_scope.cancel()


async def test_packets_with_gaps_between_them(lab: Any, autojump_clock: MockClock) -> None:
    """Every other packet number: what is kept of them, and said of them in each acknowledgement, is bounded."""
    async with lab.connected(SimNet(1)) as ends:
        await trio.sleep(0.5)
        datagrams = seal(ends, [b"\x01" * 4] * 2_000, step=2)
        packets, octets = await flood(ends, datagrams)
        assert packets <= 4
        assert octets <= 2_400
        assert len(ends.server.engine.space.ack_queue) <= MAX_RANGES
        assert not ends.server.closed


async def test_ids_that_were_never_sent_cannot_be_retired(lab: Any, autojump_clock: MockClock) -> None:
    """RFC 9000 section 19.16. Each makes another one, so that one packet could have a thousand made."""
    async with lab.connected(SimNet(1)) as ends:
        await trio.sleep(0.5)
        await flood(ends, seal(ends, packed(b"\x19" + numbers(n) for n in range(1, 20))))
        reason = await ends.server.wait_closed()
        assert (reason.code, reason.text) == (0xA, "Cannot retire a connection ID that was not sent")


async def test_connection_ids_without_end(lab: Any, autojump_clock: MockClock) -> None:
    """Each retires those before it; what is to be said of them is bounded."""
    async with lab.connected(SimNet(1)) as ends:
        await trio.sleep(0.5)
        ids = (b"\x18" + numbers(9 + n, 9 + n) + b"\x08" + n.to_bytes(24, "big") for n in range(1_000))
        await flood(ends, seal(ends, packed(ids)))
        assert "pending retired connection IDs" in (await ends.server.wait_closed()).text


@pytest.mark.ci
async def test_silent_handshakes_hold_little(lab: Any, autojump_clock: MockClock) -> None:
    """The hellos of 100 clients, answered and never heard of again: what the server holds for each until it is too late."""
    net = SimNet(1)
    hellos: list[bytes] = []
    net.fault(lambda packet: hellos.append(packet.data) if packet.source[0] == "recorded" else None)
    for _ in range(100):
        with trio.move_on_after(0.1):
            async with lab.dialling(net, host="recorded"):
                pass
    async with lab.listening(net, retry="never", handshake_timeout=5.0) as listener, trio.open_nursery() as nursery:

        async def accept() -> None:
            while True:
                (await listener.accept()).accept()

        nursery.start_soon(accept)
        tracemalloc.start()
        try:
            for number, hello in enumerate(hellos[::2]):  # the other packets take the hellos back
                net.port(f"silent{number}").send([(hello, ("server", 4433))])
            await trio.sleep(0.5)
            held = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        assert listener.unfinished == 100
        assert held < 100 * 200_000, held
        await trio.sleep(5.0)
        assert listener.unfinished == 0
        nursery.cancel_scope.cancel()
