"""Datagrams of an enemy: whatever comes, the endpoint serves others all the while, and gives no more than it gets."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import attrs
import pytest
import trio
from aioquic._buffer import Buffer
from aioquic.quic.packet import QuicPacketType
from aioquic.quic.packet_builder import QuicPacketBuilder
from aioquic.tls import Epoch
from tests.simnet import SimNet, SimPacket, SimPort
from trio.testing import MockClock

from levada.framework.errors import CarrierError, ConnectionLost
from levada.transports.quic import QuicConnection, QuicListener, QuicStream

SERVER = ("server", 4433)


@attrs.frozen
class Siege:
    """A server with one good client, and a stranger."""

    net: SimNet
    listener: QuicListener
    client: QuicConnection
    stranger: SimPort

    async def is_served(self) -> None:
        """The good client is answered, and a new one is too."""
        assert await ask(self.client, b"still there?") == b"STILL THERE?"
        assert self.listener.endpoint.counters["engine failures"] == 0

    def answered(self, who: SimPort) -> int:
        return sum(size for _, source, to, size in self.net.trace if source == SERVER and to == who.address)

    def sent(self, who: SimPort) -> int:
        return sum(size for _, source, _, size in self.net.trace if source == who.address)


async def ask(connection: QuicConnection, data: bytes) -> bytes:
    stream = await connection.open_stream()
    stream.send_nowait(data, fin=True)
    return await read_all(stream)


async def read_all(stream: QuicStream) -> bytes:
    parts = []
    while data := await stream.receive_some():
        parts.append(data)
    return b"".join(parts)


async def serve(listener: QuicListener) -> None:
    async def one(connection: QuicConnection) -> None:
        try:
            while True:
                stream = await connection.accept_stream()
                if not stream.unidirectional:
                    stream.send_nowait((await read_all(stream)).upper(), fin=True)
        except CarrierError:
            pass

    async with trio.open_nursery() as nursery:
        while True:
            nursery.start_soon(one, (await listener.accept()).accept())


@asynccontextmanager
async def siege(lab: Any, net: SimNet | None = None, **server: Any) -> AsyncIterator[Siege]:
    net = net or SimNet(1)
    async with lab.listening(net, **server) as listener, trio.open_nursery() as nursery:
        nursery.start_soon(serve, listener)
        async with lab.dialling(net, keepalive_interval=5.0) as client:
            yield Siege(net, listener, client, net.port("stranger"))
        nursery.cancel_scope.cancel()


async def record(lab: Any, data: bytes = b"hello") -> list[bytes]:
    """Return what a client sends in one short exchange."""
    net = SimNet(2)
    packets: list[bytes] = []
    async with siege(lab, net) as other:
        net.fault(lambda p: packets.append(p.data) if p.source[0] == "recorded" else None)
        async with lab.dialling(net, host="recorded") as client:
            assert await ask(client, data) == data.upper()
        await other.is_served()
    return packets


@pytest.mark.parametrize("seed", range(3))
async def test_random_octets(lab: Any, autojump_clock: MockClock, seed: int) -> None:
    chance = random.Random(seed)
    async with siege(lab) as s:
        for first in (None, 0x40, 0xC0, 0x80, 0xF0):
            for _ in range(100):
                data = bytearray(chance.randbytes(chance.choice((1, 2, 5, 6, 7, 20, 21, 40, 300, 1_200, 1_452))))
                if first is not None:
                    data[0] = first | chance.randrange(16)
                if chance.random() < 0.5:
                    data[1:5] = b"\x00\x00\x00\x01"
                s.stranger.send([(bytes(data), SERVER)])
        s.stranger.send([(b"", SERVER)])
        await trio.sleep(0.1)
        await s.is_served()
        assert s.answered(s.stranger) < s.sent(s.stranger)


async def test_every_octet_of_a_first_packet_changed(lab: Any, autojump_clock: MockClock) -> None:
    first = (await record(lab))[0]
    assert len(first) == 1_200
    async with siege(lab, retry="never", max_handshakes=5_000) as s:
        for at in range(1_200):
            spoilt = bytearray(first)
            spoilt[at] ^= 1 << at % 8
            s.stranger.send([(bytes(spoilt), SERVER)])
        await trio.sleep(0.1)
        await s.is_served()
        await trio.sleep(15)
        assert s.listener.unfinished == 0
        await s.is_served()
        assert s.answered(s.stranger) <= 3 * s.sent(s.stranger)


async def test_every_octet_of_every_later_packet_changed(lab: Any, autojump_clock: MockClock) -> None:
    """Of a live connection, from its own address: spoilt packets are dropped and the true ones count."""
    net = SimNet(1)
    async with siege(lab, net) as s:
        genuine: list[bytes] = []

        def spoil(packet: Any) -> None:
            if packet.source == s.client._endpoint.address and len(genuine) < 60:
                genuine.append(packet.data)
                for at in range(0, len(packet.data), 3):
                    spoilt = bytearray(packet.data)
                    spoilt[at] ^= 0x10
                    net._deliver(attrs.evolve(packet, data=bytes(spoilt)), packet.time + 0.001)

        net.fault(spoil)
        for n in range(10):
            assert await ask(s.client, b"question %d" % n) == b"QUESTION %d" % n
        await s.is_served()
        assert len(genuine) > 10


async def test_truncated_first_packets(lab: Any, autojump_clock: MockClock) -> None:
    first = (await record(lab))[0]
    async with siege(lab) as s:
        s.stranger.send([(first[:length], SERVER) for length in range(1, 1_200, 3)])
        await trio.sleep(0.1)
        assert s.listener.unfinished == 0
        await s.is_served()


async def test_replayed_packets(lab: Any, autojump_clock: MockClock) -> None:
    """Of another connection from elsewhere, and of the live one again and again from its own address."""
    packets = await record(lab)
    net = SimNet(1)
    async with siege(lab, net) as s:
        for _ in range(3):
            s.stranger.send([(data, SERVER) for data in packets])
        await trio.sleep(0.5)
        seen: list[Any] = []

        def replay(packet: Any) -> None:
            if packet.source == s.client._endpoint.address:
                for again in (0.0, 0.01, 0.3):
                    net._deliver(attrs.evolve(packet), packet.time + 0.001 + again)
                seen.append(packet)

        net.fault(replay)
        for n in range(10):
            assert await ask(s.client, b"%d" % n) == b"%d" % n
        await s.is_served()
        assert seen


async def test_packets_with_the_connection_ids_of_others(lab: Any, autojump_clock: MockClock) -> None:
    chance = random.Random(1)
    async with siege(lab) as s:
        await trio.sleep(1)
        cids = list(s.listener.endpoint._routes)
        for cid in cids:
            for size in (10, 21, 40, 1_200):
                s.stranger.send([(bytes([0x40 | chance.randrange(64)]) + cid + chance.randbytes(size), SERVER)])
                s.stranger.send([(b"\xc0\x00\x00\x00\x01\x08" + cid + b"\x08" + chance.randbytes(8 + size), SERVER)])
        await trio.sleep(1)
        await s.is_served()
        assert s.answered(s.stranger) == 0
        assert all(connection.peer_address != s.stranger.address for connection in s.listener.endpoint.connections)


async def test_an_address_that_proves_nothing_gets_three_times_what_it_sent(
    lab: Any, autojump_clock: MockClock
) -> None:
    first = (await record(lab))[0]
    async with siege(lab, retry="never", handshake_timeout=20.0) as s:
        s.stranger.send([(first, SERVER)])
        await trio.sleep(25)
        assert 1_200 < s.answered(s.stranger) <= 3 * 1_200
        await s.is_served()


@pytest.mark.ci
async def test_slow_handshakes_are_bounded_in_number_and_time(lab: Any, autojump_clock: MockClock) -> None:
    """A hundred clients that never go on."""
    net = SimNet(1)

    async def dawdle(n: int) -> None:
        with pytest.raises(ConnectionLost):
            async with lab.dialling(net, host=f"slow{n}", handshake_timeout=2.0):
                pass

    async with siege(lab, net, retry_threshold=10, max_handshakes=20, handshake_timeout=5.0) as s:
        # Nothing of the server reaches them, nothing but the first flight of theirs reaches it.
        net.drop(lambda p: p.destination[0].startswith("slow"))
        async with trio.open_nursery() as nursery:
            for n in range(100):
                nursery.start_soon(dawdle, n)
            await trio.sleep(1)
            assert s.listener.unfinished <= 20
            assert s.listener.endpoint.counters["retries"] > 50
            await s.is_served()
            async with lab.dialling(net, host="newcomer") as late:
                assert await ask(late, b"me too") == b"ME TOO"
        await trio.sleep(10)
        assert s.listener.unfinished == 0


async def test_slow_handshakes_of_one_address_make_room_for_other_addresses(
    lab: Any, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Of one address, the newest stay; another address completes its handshake beside them, and its slow one stays, too."""
    net = SimNet(1)

    async def dawdle(host: str) -> None:
        with suppress(CarrierError):
            async with lab.dialling(net, host=host) as connection:
                await connection.wait_closed()

    async with siege(lab, net, retry="always", max_handshakes=4, handshake_timeout=5.0) as s:
        sent: Counter[tuple[str, int]] = Counter()

        def is_late(packet: SimPacket) -> bool:
            """Whether the server has its hello, with and without a token."""
            sent[packet.source] += packet.source[0] in ("slow", "patient")
            return sent[packet.source] > 2

        net.drop(is_late)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(dawdle, "patient")
            await trio.sleep(0.5)
            for _ in range(10):
                nursery.start_soon(dawdle, "slow")
            await trio.sleep(0.5)
            left = sorted(c.info.peer.partition(":")[0] for c in s.listener.endpoint.connections)
            assert left == ["client", "patient", "slow", "slow", "slow"]
            async with lab.dialling(net, host="newcomer") as late:
                assert await ask(late, b"me too") == b"ME TOO"
            nursery.cancel_scope.cancel()
    assert s.listener.admission.refused >= 8
    assert warnings(caplog)[0].endswith("away: its handshake made room for others")


async def test_waiting_clients_are_forgotten_and_make_room_above_the_limit(lab: Any, autojump_clock: MockClock) -> None:
    first = (await record(lab))[0]
    net = SimNet(1)
    async with lab.listening(net, retry="never", max_handshakes=5, handshake_timeout=3.0) as listener:
        stranger = net.port("stranger")
        for n in range(9):
            stranger.send([(first[:6] + bytes([first[6] ^ (n + 1)]) + first[7:], SERVER)])
        await trio.sleep(0.1)
        assert (listener.unfinished, listener.admission.refused) == (5, 4)
        assert [(await listener.accept()).destination_cid[0] for _ in range(5)] == [first[6] ^ n for n in range(5, 10)]
        await trio.sleep(4)
        stranger.send([(first, SERVER)])
        await trio.sleep(0.1)
        assert listener.unfinished == 1


async def test_version_negotiation_is_never_answered_and_small_probes_are_not_either(
    lab: Any, autojump_clock: MockClock
) -> None:
    async with siege(lab) as s:
        cids = b"\x08" + b"d" * 8 + b"\x08" + b"s" * 8
        s.stranger.send([(b"\xc0\x00\x00\x00\x00" + cids + b"\x00\x00\x00\x01" * 300, SERVER)])
        s.stranger.send([(b"\xc0\x1a\x2a\x3a\x4a" + cids + b"x" * 100, SERVER)])
        await trio.sleep(0.1)
        assert s.answered(s.stranger) == 0
        s.stranger.send([(b"\xc0\x1a\x2a\x3a\x4a" + cids + b"x" * 1_200, SERVER)])
        await trio.sleep(0.1)
        assert 0 < s.answered(s.stranger) < 100
        await s.is_served()


async def test_an_engine_that_fails_takes_nothing_with_it(
    lab: Any, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with siege(lab) as s:
        async with lab.dialling(s.net, host="victim") as victim:
            assert await ask(victim, b"x") == b"X"
            (theirs,) = [c for c in s.listener.endpoint.connections if c.info.peer.startswith("victim")]

            def fail(*_: Any) -> None:
                raise RuntimeError("a fault of ours")

            monkeypatch.setattr(theirs.engine, "receive_datagram", fail)
            (await victim.open_stream()).send_nowait(b"x")
            reason = await theirs.wait_closed()
            assert "a fault of ours" in reason.text
            assert s.listener.endpoint.counters["engine failures"] == 1
        assert await ask(s.client, b"and you?") == b"AND YOU?"


async def test_a_peer_that_breaks_the_protocol_loses_its_own_connection(lab: Any, autojump_clock: MockClock) -> None:
    async with siege(lab) as s:
        async with lab.dialling(s.net, host="rude") as rude:
            rude.engine._remote_max_streams_bidi = 1 << 40
            rude.engine._local_next_stream_id_bidi = 4 * 100_000
            (await rude.open_stream()).send_nowait(b"x")
            with pytest.raises(ConnectionLost, match="transport error 0x4"):
                await rude.accept_stream()
        await s.is_served()


def rude_frames(chance: random.Random) -> bytes:
    """Frames of any kind with any numbers in them, some cut short; most are wrong in one way or another."""
    octets = b""
    for _ in range(chance.randint(1, 6)):
        kind = chance.choice((*range(0x1F), 0x30, 0x31, 0x3F, 0x40FF))
        numbers = [
            chance.choice((0, 1, 2, 3, 7, 64, 16_384, 1 << 30, (1 << 62) - 1)) for _ in range(chance.randint(0, 5))
        ]
        buf = Buffer(80)
        for number in (kind, *numbers):
            buf.push_uint_var(number)
        octets += buf.data + chance.randbytes(chance.choice((0, 0, 1, 8, 50)))
    return octets[: chance.choice((len(octets), len(octets), chance.randint(1, len(octets))))]


@pytest.mark.parametrize("seed", range(2))
async def test_rude_frames_under_good_keys_end_no_more_than_their_connection(
    lab: Any, autojump_clock: MockClock, seed: int
) -> None:
    """A client that has shaken hands, and then seals whatever it likes."""
    chance = random.Random(seed)
    async with siege(lab) as s:
        ends: list[bool] = []
        for _ in range(20):
            async with lab.dialling(s.net, host="rude") as rude:
                assert await ask(rude, b"hello") == b"HELLO"
                engine = rude.engine
                for number in range(3):
                    builder = QuicPacketBuilder(
                        host_cid=b"",
                        peer_cid=engine._peer_cid.cid,
                        version=1,
                        is_client=True,
                        max_datagram_size=1_200,
                        packet_number=engine._packet_number + 100 + number,
                    )
                    builder.start_packet(QuicPacketType.ONE_RTT, engine._cryptos[Epoch.ONE_RTT])
                    builder._buffer.push_bytes(rude_frames(chance))
                    datagrams, _ = builder.flush()
                    rude._endpoint.send([(datagram, SERVER) for datagram in datagrams])
                await trio.sleep(0.2)
                ends.append(rude.closed)
        await s.is_served()
        assert any(ends), "none of it was wrong"


@pytest.mark.ci
async def test_a_flood_of_data_beyond_the_window_is_refused(lab: Any, autojump_clock: MockClock) -> None:
    async with siege(lab, stream_window=65_536, connection_window=65_536) as s:
        async with lab.dialling(s.net, host="rude") as rude:
            stream = await rude.open_stream()
            rude.engine._remote_max_data = 1 << 40
            rude.engine._streams[stream.stream_id].max_stream_data_remote = 1 << 40
            accepted = [c for c in s.listener.endpoint.connections if c.info.peer.startswith("rude")]
            assert len(accepted) == 1
            stream.send_nowait(b"x" * 30_000_000)
            # The server's echo takes what comes, so the window moves on: an honest window is 65,536 ahead of it.
            reason = await rude.wait_closed()
            assert reason.lost
            assert reason.code == 3  # FLOW_CONTROL_ERROR
        await s.is_served()


# ---------------------------------------------------------------- who is turned away


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    assert [record.exc_info for record in caplog.records] == [None] * len(caplog.records)
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


async def test_connections_of_one_address_are_bounded(
    lab: Any, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Those that prove their address by the handshake only are ended then; the end of one lets another one in."""
    net = SimNet(1)
    async with siege(lab, net, max_connections_per_address=2) as s:
        async with lab.dialling(net, host="many") as first, lab.dialling(net, host="many") as second:
            async with lab.dialling(net, host="many") as third:
                assert (await third.wait_closed()).code == 0x2  # CONNECTION_REFUSED
            assert await ask(first, b"first") == b"FIRST"
            assert await ask(second, b"second") == b"SECOND"
        await trio.sleep(0.1)
        async with lab.dialling(net, host="many") as fourth:
            assert await ask(fourth, b"fourth") == b"FOURTH"
        await s.is_served()
        assert s.listener.admission.refused == 1
        (line,) = warnings(caplog)
        assert line.startswith("quic://server:4433 turned many:")
        assert line.endswith(" away: 2 connections of its address are open (max_connections_per_address)")


async def test_half_open_connections_count_for_the_address_that_they_have_proved(
    lab: Any, autojump_clock: MockClock
) -> None:
    """Who comes back from a Retry and does not go on holds places of its own address only, and no longer than a handshake may take."""
    net = SimNet(1)
    refused: list[str] = []

    async def dawdle() -> None:
        with pytest.raises(ConnectionLost) as caught:
            async with lab.dialling(net, host="slow", handshake_timeout=4.0):
                pass
        refused.append(str(caught.value))

    async with siege(lab, net, retry="always", max_connections_per_address=3, handshake_timeout=5.0) as s:
        sizes: dict[str, int] = {}

        def after_the_retry(packet: Any) -> bool:
            """Lose the server's second packet, which is the first one of the handshake, unless it is a close."""
            if not packet.destination[0].startswith("slow"):
                return False
            key = str(packet.destination)
            sizes[key] = sizes.get(key, 0) + 1
            return sizes[key] > 1 and len(packet.data) >= 1_200

        net.drop(after_the_retry)
        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(dawdle)
            await trio.sleep(1)
            assert s.listener.unfinished == 3
            await s.is_served()
            async with lab.dialling(net, host="other") as other:
                assert await ask(other, b"other") == b"OTHER"
        assert sum("0x2" in why for why in refused) == 7
        await trio.sleep(10)
        assert (s.listener.unfinished, s.listener.admission.refused) == (0, 7 + 3)
        net.clear_faults()
        async with lab.dialling(net, host="slow") as late:
            assert await ask(late, b"late") == b"LATE"


async def test_packets_under_a_forged_address_take_no_place_of_it(lab: Any, autojump_clock: MockClock) -> None:
    first = (await record(lab))[0]
    net = SimNet(1)
    async with siege(lab, net, retry="never", max_connections_per_address=1, handshake_timeout=3.0) as s:
        forger = net.port("victim")
        for n in range(5):
            forger.send([(first[:6] + bytes([first[6] ^ (n + 1)]) + first[7:], SERVER)])
        await trio.sleep(0.1)
        async with lab.dialling(net, host="victim") as client:
            assert await ask(client, b"it is me") == b"IT IS ME"
        await s.is_served()


@pytest.mark.ci
async def test_handshakes_that_fail_are_counted_and_told_of_once(
    lab: Any, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A hundred clients of another protocol, then of those that do not trust the certificate."""
    net = SimNet(1)
    async with siege(lab, net) as s:

        async def fail(**changes: Any) -> None:
            with pytest.raises(ConnectionLost):
                async with lab.dialling(net, host="wrong", **changes):
                    pass

        for _ in range(100):
            await fail(alpn=("another",))
        assert s.listener.admission.refused == 100
        (line,) = warnings(caplog)
        assert line.startswith("quic://server:4433 turned wrong:")
        assert "its handshake was not finished: " in line
        assert "(code 0x178)" in line
        await trio.sleep(10)
        await fail(server_name="somebody.else")
        await trio.sleep(0.1)  # until the server has heard of it
        line = warnings(caplog)[1]
        assert "it broke its handshake off: " in line
        assert line.endswith(" (99 more since the last such line)")
        await s.is_served()


async def test_clients_that_nobody_accepts_are_told_of(
    lab: Any, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    net = SimNet(1)
    first = (await record(lab))[0]
    async with lab.listening(net, retry="never", max_handshakes=2, handshake_timeout=3.0) as listener:
        stranger = net.port("stranger")
        caplog.clear()
        for n in range(3):
            stranger.send([(first[:6] + bytes([first[6] ^ (n + 1)]) + first[7:], SERVER)])
        await trio.sleep(11)
        with trio.move_on_after(0.1):
            await listener.accept()
        assert listener.admission.refused == 3
        replaced, expired = warnings(caplog)
        assert replaced.endswith("away: its handshake made room for others")
        assert expired.endswith("away: it was not accepted within 3.0 s")
