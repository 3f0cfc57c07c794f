"""The short ways of the engine against aioquic's own long ones: the same packets, the same events, the same recovery."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import trio
from aioquic import tls
from aioquic._buffer import Buffer
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnectionError, QuicNetworkPath, QuicReceiveContext
from aioquic.quic.crypto import CryptoPair
from aioquic.quic.packet import QuicErrorCode, QuicPacketType
from aioquic.quic.packet_builder import QuicDeliveryState, QuicPacketBuilder, QuicPacketBuilderStop
from aioquic.quic.rangeset import RangeSet
from aioquic.quic.recovery import QuicPacketRecovery, QuicPacketSpace
from aioquic.quic.stream import QuicStreamReceiver
from aioquic.tls import CipherSuite
from hypothesis import given
from hypothesis import strategies as st
from tests.simnet import SimNet, SimPacket
from trio.testing import MockClock

from levada.framework.errors import ConnectionLost, IdleTimeout
from levada.transports.quic.config import EngineSettings
from levada.transports.quic.congestion import make_controller
from levada.transports.quic.engine import Engine
from levada.transports.quic.packets import SentPacket, ShortPacketBuilder
from levada.transports.quic.recovery import LeanRecovery

# ---------------------------------------------------------------- packets

ACK, PING, STREAM, MAX_DATA = 0x02, 0x01, 0x0A, 0x10


def keys(suite: CipherSuite) -> CryptoPair:
    pair = CryptoPair()
    for context in (pair.recv, pair.send):
        context.setup(cipher_suite=suite, secret=bytes(range(32)), version=1)
    return pair


def build(builder: Any, pair: CryptoPair, packets: list[list[tuple[int, int]]]) -> list[bytes]:
    """Write frames of these kinds and lengths; one that does not fit ends its packet."""
    try:
        for frames in packets:
            builder.start_packet(QuicPacketType.ONE_RTT, pair)
            for kind, length in frames:
                buf = builder.start_frame(kind, 1 + length, print, (kind,))
                buf.push_bytes(bytes([kind]) * min(length, builder.remaining_buffer_space))
    except QuicPacketBuilderStop:
        pass
    datagrams, sent = builder.flush()
    facts = [
        (p.packet_number, p.in_flight, p.is_ack_eliciting, p.is_crypto_packet, p.sent_bytes, p.epoch, p.packet_type)
        for p in sent
    ]
    return [*datagrams, repr((facts, [p.delivery_handlers for p in sent], builder.packet_number)).encode()]


@given(
    packets=st.lists(
        st.lists(st.tuples(st.sampled_from([ACK, PING, STREAM, MAX_DATA, 0x06]), st.integers(0, 900)), max_size=4),
        max_size=6,
    ),
    suite=st.sampled_from([CipherSuite.AES_128_GCM_SHA256, CipherSuite.CHACHA20_POLY1305_SHA256]),
    number=st.integers(0, 1 << 20),
    flight=st.integers(-100, 5_000),
    spin=st.booleans(),
    cid=st.sampled_from([b"", b"12345678", b"x" * 20]),
    update=st.booleans(),
)
def test_packets_are_those_of_aioquic(
    packets: list[list[tuple[int, int]]],
    suite: CipherSuite,
    number: int,
    flight: int,
    spin: bool,
    cid: bytes,
    update: bool,
) -> None:
    theirs = QuicPacketBuilder(
        host_cid=b"",
        peer_cid=cid,
        version=1,
        is_client=True,
        max_datagram_size=1_200,
        packet_number=number,
        spin_bit=spin,
    )
    theirs.max_flight_bytes = flight
    pair, pair_of_theirs = keys(suite), keys(suite)
    ours = ShortPacketBuilder(is_client=True)
    if update:
        pair.update_key()
        pair_of_theirs.update_key()
    ours.begin(keys=pair, peer_cid=cid, packet_number=number, size=1_200, flight=flight, spin_bit=spin)
    assert build(ours, pair, packets) == build(theirs, pair_of_theirs, packets)


# ---------------------------------------------------------------- frames


def varint(value: int) -> bytes:
    buf = Buffer(8)
    buf.push_uint_var(value)
    return buf.data


@st.composite
def frame(draw: st.DrawFn) -> bytes:
    kind = draw(st.sampled_from(["stream"] * 4 + ["ack", "datagram", "ping", "max data", "garbage"]))
    if kind == "stream":
        flags = draw(st.integers(0, 7))
        data = draw(st.sampled_from([b"", b"a", b"bc", b"d" * 60]))
        offset = draw(st.sampled_from([0, 0, 1, 2, 60, 100, 1 << 61]))
        stream_id = draw(st.sampled_from([1, 1, 1, 5, 3, 7, 9, 0, 2, 4]))
        text = bytes([0x08 | flags]) + varint(stream_id)
        text += varint(offset) if flags & 4 else b""
        return text + (varint(len(data)) if flags & 2 else b"") + data
    if kind == "ack":
        largest, first = draw(st.integers(0, 5)), draw(st.integers(0, 6))
        return bytes([ACK]) + varint(largest) + varint(0) + varint(0) + varint(first)
    if kind == "datagram":
        return draw(st.sampled_from([b"\x31\x02hi", b"\x31\x05hi", b"\x30rest", b"\x31\x40\x50" + bytes(80)]))
    if kind == "max data":
        return b"\x10\x40\x80"
    return b"\x01" if kind == "ping" else draw(st.binary(max_size=3))


RECEIVED = tuple(vars(QuicStreamReceiver(0, readable=True)))
"""Fields of the receiving half of a stream."""


def engine() -> Engine:
    """A client's, as after its handshake, with small windows."""
    made = Engine(
        configuration=QuicConfiguration(
            is_client=True, max_data=200, max_stream_data=100, max_datagram_frame_size=60, alpn_protocols=["x"]
        ),
        settings=EngineSettings(max_streams=2, max_streams_unidirectional=1, new_cid=lambda: b"12345678"),
    )
    made._version = 1
    made._initialize(b"87654321")
    made._handshake_confirmed = made._handshake_complete = True
    made._loss.peer_completed_address_validation = True
    made._network_paths = [QuicNetworkPath(("server", 1), is_validated=True)]
    stream_id = made.get_next_available_stream_id()
    made._remote_max_streams_bidi = 10
    made.send_stream_data(stream_id, b"ours")
    return made


def take(made: Engine, plain: bytes, *, short: bool) -> object:
    context = QuicReceiveContext(tls.Epoch.ONE_RTT, b"12345678", made._network_paths[0], None, 1.0, None)
    try:
        return made.receiving.receive_frames(context, plain) if short else made._payload_received(context, plain)[0]
    except QuicConnectionError as error:
        return error.error_code, error.frame_type, error.reason_phrase


def state(made: Engine) -> list[object]:
    streams = [
        (
            stream_id,
            {name: getattr(stream.receiver, name) for name in RECEIVED} | {"_ranges": list(stream.receiver._ranges)},
            stream.max_stream_data_local,
        )
        for stream_id, stream in sorted(made._streams.items())
    ]
    limits = [
        (limit.used, limit.value)
        for limit in (made._local_max_data, made._local_max_streams_bidi, made._local_max_streams_uni)
    ]
    return [
        streams,
        limits,
        list(made._events),
        [stream.stream_id for stream in made.ready.done],
        made._remote_max_data,
    ]


@given(packets=st.lists(st.lists(frame(), min_size=1, max_size=4).map(b"".join), min_size=1, max_size=5))
def test_frames_mean_what_they_mean_to_aioquic(packets: list[bytes]) -> None:
    ours, theirs = engine(), engine()
    for plain in packets:
        got = take(ours, plain, short=True)
        assert got == take(theirs, plain, short=False)
        if isinstance(got, tuple):
            return  # the connection is over
        assert state(ours) == state(theirs)


def test_a_packet_without_frames_is_an_error() -> None:
    assert take(engine(), b"", short=True) == (0xA, 0, "Packet contains no frames")


# ---------------------------------------------------------------- recovery


class Recovery(LeanRecovery):
    """Ours, but the mean and the variance of the round trip are aioquic's; `test_recovery` has those of the RFC."""

    def _round_trip_measured(self, measured: float, ack_delay: float, now: float) -> None:
        known, smoothed, variance = self._rtt_initialized, self._rtt_smoothed, self._rtt_variance
        super()._round_trip_measured(measured, ack_delay, now)
        if self._rtt_latest > self._rtt_min + ack_delay:
            self._rtt_latest -= ack_delay
        if known:
            self._rtt_variance = 0.75 * variance + 0.25 * abs(self._rtt_min - self._rtt_latest)
            self._rtt_smoothed = 0.875 * smoothed + 0.125 * self._rtt_latest


class Sides:
    """The same packets and acknowledgements for aioquic's recovery and for ours, both with our controller."""

    def __init__(self) -> None:
        self.all: list[tuple[QuicPacketRecovery, QuicPacketSpace, list[Any]]] = []
        for kind in (QuicPacketRecovery, Recovery):
            recovery = kind(
                congestion_control_algorithm="cubic",
                initial_rtt=0.1,
                max_datagram_size=1_200,
                peer_completed_address_validation=True,
                send_probe=lambda: None,
            )
            recovery._cc = make_controller("cubic", max_datagram_size=1_200)
            space = QuicPacketSpace(is_application_data=True)
            recovery.spaces = [space]
            recovery.handshake_confirmed = True
            self.all.append((recovery, space, []))

    def send(self, number: int, now: float, *, eliciting: bool) -> None:
        for recovery, space, log in self.all:
            packet: Any = SentPacket(number)
            packet.is_ack_eliciting = packet.in_flight = eliciting
            packet.sent_time, packet.sent_bytes = now, 1_000 + number
            packet.delivery_handlers.append((lambda *facts, log=log: log.append(facts), (number,)))
            recovery.on_packet_sent(packet=packet, space=space)

    def ack(self, numbers: RangeSet, now: float, delay: float) -> None:
        """Acknowledge packets but those given up, whose late arrival means nothing to aioquic."""
        for _, _, log in self.all:
            for delivery, number in log:
                if delivery is QuicDeliveryState.LOST:
                    numbers.subtract(number, number + 1)
        if not len(numbers):
            return
        for recovery, space, _ in self.all:
            recovery.on_ack_received(ack_rangeset=numbers, ack_delay=delay, now=now, space=space)

    def facts(self) -> list[object]:
        shared = vars(self.all[0][0]).keys() - {"_cc", "_pacer", "spaces", "_send_probe"}
        return [
            (
                {name: value for name, value in vars(recovery).items() if name in shared},
                {name: value for name, value in vars(recovery._cc).items() if name not in ("_monitor", "_before")},
                list(space.sent_packets),
                (space.ack_eliciting_in_flight, space.largest_acked_packet, space.loss_time),
                log,
            )
            for recovery, space, log in self.all
        ]


@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("send"), st.integers(1, 12), st.booleans()),
            st.tuples(st.just("ack"), st.lists(st.integers(0, 60), min_size=1, max_size=8), st.floats(0, 0.05)),
        ),
        max_size=25,
    )
)
def test_acknowledgements_mean_what_they_mean_to_aioquic(steps: list[Any]) -> None:
    sides, now, number = Sides(), 100.0, 0
    for kind, what, more in steps:
        now += 0.01
        if kind == "send":
            for _ in range(what):
                sides.send(number, now, eliciting=more)
                number += 1
        elif number:
            sides.ack(RangeSet(range(n % number, n % number + 1) for n in what), now, more)
        theirs, ours = sides.facts()
        assert ours == theirs


def test_an_acknowledgement_of_everything_costs_no_more_than_what_is_in_flight() -> None:
    """A peer may say that it has 2**60 packets; a loop over them would never end."""
    sides = Sides()
    for number in (5, 6, 1 << 40):
        sides.send(number, 1.0, eliciting=True)
    recovery, space, log = sides.all[1]
    del space.sent_packets[1 << 40]
    recovery.on_ack_received(ack_rangeset=RangeSet([range(1 << 60)]), ack_delay=0.0, now=1.1, space=space)
    assert [facts[1] for facts in log] == [5, 6]


# ---------------------------------------------------------------- keys


@pytest.mark.parametrize(("held", "taken"), [(0.1, True), (3.0, False)])
async def test_the_previous_key_is_kept_for_three_probe_timeouts(
    lab: Any, autojump_clock: MockClock, held: float, taken: bool
) -> None:
    """RFC 9001, section 6.5: for packets that were under way, and then no longer."""
    net = SimNet(1)
    async with lab.connected(net, max_packet_size=1_200, client={"max_packet_size": 1_200}) as ends:
        await trio.sleep(1)
        assert 3 * ends.client.engine._loss.get_probe_timeout() < 2
        late: list[int] = []

        def the_first(packet: SimPacket) -> bool:
            if packet.source[0] == "server" and not late:
                late.append(packet.n)
            return packet.n in late

        net.hold(the_first, held)
        assert ends.server.send_datagram_nowait(b"under the old key")
        await trio.sleep(0.01)
        ends.server.update_keys()
        got: list[bytes] = []

        async def receive() -> None:
            while True:
                got.append((await ends.client.receive_datagram()).data)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            for number in range(40):
                assert ends.server.send_datagram_nowait(b"%d" % number)
                await trio.sleep(0.1)
            nursery.cancel_scope.cancel()
        assert (b"under the old key" in got) is taken
        assert [data for data in got if data.isdigit()] == [b"%d" % number for number in range(40)]
        assert ends.client.engine._crypto.previous is None


async def test_the_first_packet_under_a_new_key_is_acknowledged_after_the_same_time(
    lab: Any, autojump_clock: MockClock
) -> None:
    """It takes aioquic's long path."""
    net = SimNet(1, delay=0.01)
    async with lab.connected(net, max_packet_size=1_200, client={"max_packet_size": 1_200, "ack_delay": 0.02}) as ends:
        await trio.sleep(1)
        sent: list[float] = []
        net.fault(lambda packet: sent.append(packet.time) if packet.source[0] == "client" else None)
        start = trio.current_time()
        ends.server.update_keys()
        assert ends.server.send_datagram_nowait(b"under the new key")
        await trio.sleep(0.2)
        assert sent == [pytest.approx(start + 0.01 + 0.02, abs=1e-4)]


async def test_an_old_key_after_a_new_one_is_an_error(lab: Any, autojump_clock: MockClock) -> None:
    """RFC 9001, section 6.4: a packet of a higher number under an older key than one before it."""
    async with lab.connected(SimNet(1)) as ends:
        await trio.sleep(1)
        engine = ends.server.engine
        send = engine._crypto.send
        old = SimpleNamespace(
            _update_key_requested=False,
            recv=SimpleNamespace(key_phase=send.key_phase),
            send=SimpleNamespace(aead=send.aead, hp=send.hp),
        )
        ends.server.update_keys()
        for _ in range(3):
            assert ends.server.send_datagram_nowait(b"x")
            await trio.sleep(0.02)
        builder = ShortPacketBuilder(is_client=False)
        builder.begin(
            keys=old,  # type: ignore[arg-type]  # has what is used of it
            peer_cid=ends.client.engine.host_cid,
            packet_number=engine._packet_number + 5,
            size=1_200,
            flight=1_200,
            spin_bit=False,
        )
        builder.start_packet(QuicPacketType.ONE_RTT, engine._crypto)
        builder.start_frame(PING)
        (datagram,), _ = builder.flush()
        ends.client._endpoint.take_in([(datagram, ("server", 4433))])
        with pytest.raises(ConnectionLost, match=f"{int(QuicErrorCode.KEY_UPDATE_ERROR):#x}"):
            await ends.client.accept_stream()


# ---------------------------------------------------------------- path MTU and idleness


async def test_a_search_to_be_repeated_does_not_keep_a_connection_alive(lab: Any, autojump_clock: MockClock) -> None:
    """Path MTU discovery looks again every ten minutes, but only along with something that is sent."""
    net = SimNet(1, mtu=1_300)
    async with lab.connected(net, idle_timeout=1_000.0, client={"idle_timeout": 1_000.0}) as ends:
        await trio.sleep(30)
        start, sent = trio.current_time(), net.sent
        with pytest.raises(IdleTimeout):
            await ends.client.accept_stream()
        assert trio.current_time() - start < 1_000
        assert net.sent == sent


async def test_a_search_is_repeated_where_there_is_traffic(lab: Any, autojump_clock: MockClock) -> None:
    net = SimNet(1, mtu=1_300)
    async with lab.connected(net, idle_timeout=2_000.0, client={"idle_timeout": 2_000.0}) as ends:
        await trio.sleep(30)
        assert 1_284 <= ends.client.details().packet_size <= 1_300
        net.link("client", "server", mtu=1_500)
        await trio.sleep(600)
        assert ends.client.send_datagram_nowait(b"x")
        await trio.sleep(10)
        assert ends.client.details().packet_size == 1_452
