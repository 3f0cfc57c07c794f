"""Pings, acknowledgements, the idle time-out: QX-10, QX-34, QX-35, D-23."""

from __future__ import annotations

import attrs
import pytest

from levada.transports.qmux import Ended, Event, StreamAcked, StreamFlushed, StreamOver, StreamStopped, TransportError
from levada.transports.qmux.frames import Frame, FrameType, encode_frame

from .conftest import PEER, Pair, Wire, stream

PING, ANSWER = FrameType.PING, FrameType.PING_ANSWER
IDLE = Ended(1, "the peer was silent for too long", False, True, idle=True)


def ping(number: int) -> bytes:
    return encode_frame(PING, number)


def answer(number: int) -> bytes:
    return encode_frame(ANSWER, number)


def opened(wire: Wire, data: bytes = b"") -> int:
    """Open a stream and write to it."""
    stream_id = wire.core.open_stream()
    assert stream_id is not None
    wire.core.send(stream_id, data)
    return stream_id


@pytest.mark.rule("QX-10")
def test_qx10_only_the_largest_request_is_answered() -> None:
    """However many wait."""
    wire = Wire()
    for number in (0, 1, 5, 1 << 61):
        wire.give(ping(number))
    assert wire.frames() == [Frame(ANSWER, (1 << 61,), b"")]
    assert wire.frames() == []


@pytest.mark.rule("QX-10")
@pytest.mark.parametrize("number", [0, 4, 5])
def test_qx10_requests_increase(number: int) -> None:
    wire = Wire()
    wire.give(ping(5))
    (end,) = wire.give(ping(number))
    assert isinstance(end, Ended)
    assert end.code == TransportError.PROTOCOL_VIOLATION


@pytest.mark.rule("QX-10", "D-7")
def test_d7_answers() -> None:
    """Greater than any ping of ours: a violation. Never sent, or answered already: ignored."""
    wire = Wire(client=True)
    stream_id = opened(wire, b"x")
    for number in (1, 2):
        wire.core.want_acked(stream_id)
        assert wire.frames()[-1] == Frame(PING, (number,), b"")
        assert wire.give(answer(number)) == [StreamAcked(stream_id)]
    assert wire.give(answer(0), answer(1), answer(2)) == []
    wire.core.want_acked(stream_id)
    wire.take()
    assert wire.give(answer(0), answer(2)) == []
    assert wire.give(answer(3)) == [StreamAcked(stream_id)]
    (end,) = wire.give(answer(4))
    assert isinstance(end, Ended)
    assert end.code == TransportError.PROTOCOL_VIOLATION


@pytest.mark.rule("D-23")
def test_d23_an_acknowledgement_follows_everything_queued() -> None:
    """One ping is under way at a time; the next covers all streams that waited meanwhile; the round trip is measured."""
    wire = Wire(client=True)
    first, second, third = opened(wire, b"1"), opened(wire, b"2"), opened(wire)
    wire.core.want_acked(first)
    assert [frame.kind for frame in wire.frames()] == [0x0E, 0x0E, PING]
    wire.core.want_acked(second)
    wire.core.send(third, b"3", True)
    wire.core.want_acked(third)
    assert [frame.kind for frame in wire.frames()] == [0x0F]
    wire.now = 0.25
    assert wire.give(answer(1)) == [StreamAcked(first)]
    assert wire.core.round_trip == 0.25
    assert wire.frames() == [Frame(PING, (2,), b"")]
    assert wire.give(answer(2)) == [StreamAcked(second), StreamAcked(third)]
    assert not wire.core.has_output


@pytest.mark.rule("D-23")
def test_d23_what_cannot_be_written_is_not_acknowledged() -> None:
    """A stream without credit waits; others do not wait for it."""
    wire = Wire(client=True, peer=attrs.evolve(PEER, max_stream_data_bidi_remote=3))
    stuck, free = opened(wire, b"12345"), opened(wire, b"abc")
    wire.core.want_acked(stuck)
    wire.core.want_flushed(stuck)
    wire.core.want_acked(free)
    wire.take()
    assert wire.give(answer(1)) == [StreamAcked(free)]
    wire.give(encode_frame(FrameType.MAX_STREAM_DATA, stuck, 5))
    assert [frame.kind for frame in wire.frames()] == [0x0E, PING]
    assert wire.core.take_events() == [StreamFlushed(stuck)]
    assert wire.give(answer(2)) == [StreamAcked(stuck)]


@pytest.mark.rule("D-23")
@pytest.mark.parametrize("data", [b"", b"x"])
def test_d23_the_end_counts(data: bytes) -> None:
    """Also if it comes alone, and after the stream is over and forgotten."""
    wire = Wire(client=True)
    stream_id = opened(wire, data)
    wire.take()
    wire.core.send(stream_id, b"", True)
    wire.core.want_flushed(stream_id)
    wire.core.want_acked(stream_id)
    assert wire.core.take_events() == []
    assert [frame.kind for frame in wire.frames()] == [0x0F, PING]
    assert wire.core.take_events() == [StreamFlushed(stream_id)]
    wire.give(answer(1), stream(stream_id, 0, b"", fin=True))
    wire.core.want_acked(stream_id)
    wire.core.want_flushed(stream_id)
    assert wire.core.take_events() == [StreamFlushed(stream_id)]
    assert [frame.kind for frame in wire.frames()] == [PING]
    assert wire.give(answer(2)) == [StreamAcked(stream_id)]


@pytest.mark.rule("D-23")
def test_d23_nothing_is_acknowledged_of_a_stream_that_was_stopped() -> None:
    wire = Wire(client=True, peer=attrs.evolve(PEER, max_stream_data_bidi_remote=3))
    stream_id = opened(wire, b"12345")
    wire.core.want_flushed(stream_id)
    wire.core.want_acked(stream_id)
    wire.take()
    assert wire.give(encode_frame(FrameType.STOP_SENDING, stream_id, 9)) == [StreamStopped(stream_id, 9)]
    assert [frame.kind for frame in wire.frames()] == [FrameType.RESET_STREAM]
    assert wire.core.take_events() == []


def test_flushed_is_told_at_once_if_nothing_is_queued() -> None:
    wire = Wire(client=True)
    stream_id = opened(wire)
    wire.core.want_flushed(stream_id)
    assert wire.core.take_events() == [StreamFlushed(stream_id)]


@pytest.mark.rule("QX-34")
@pytest.mark.parametrize(
    ("ours", "theirs", "expected"), [(30, 20_000, 20), (10, 20_000, 10), (0, 20_000, 20), (10, 0, 10)]
)
def test_qx34_the_smaller_time_out_counts(ours: float, theirs: int, expected: float) -> None:
    """Of those that are not 0. It ends without any frame."""
    wire = Wire(idle_timeout=ours, peer=attrs.evolve(PEER, max_idle_timeout_ms=theirs))
    assert wire.core.next_deadline() == expected
    assert wire.core.handle_timeout(expected - 0.001) == []
    assert wire.core.handle_timeout(expected) == [IDLE]
    assert wire.core.data_to_send(expected) == []
    assert wire.core.next_deadline() is None


@pytest.mark.rule("QX-34")
def test_qx34_no_time_out_at_all() -> None:
    wire = Wire(idle_timeout=0, peer=attrs.evolve(PEER, max_idle_timeout_ms=0))
    assert wire.core.next_deadline() is None
    assert wire.core.handle_timeout(1e9) == []


@pytest.mark.rule("QX-34", "D-18")
def test_d18_what_restarts_the_time() -> None:
    """A complete record; a written one only once after each received."""
    wire = Wire()  # 30 s
    wire.now = 5.0
    wire.give("00")
    assert wire.core.next_deadline() == 35.0
    wire.now = 6.0
    wire.octets("4040")  # a record begins
    wire.now = 7.0
    assert wire.core.next_deadline() == 35.0
    for wire.now in (10.0, 12.0):
        assert wire.core.send_datagram(b"x")
        assert wire.take()
    assert wire.core.next_deadline() == 36.0  # the record that began
    wire.octets(bytes(64))
    wire.now = 20.0
    wire.give("00")
    assert wire.core.next_deadline() == 50.0
    wire.now = 21.0
    wire.core.send_datagram(b"x")
    wire.take()
    assert wire.core.next_deadline() == 51.0
    assert wire.core.handle_timeout(51.0) == [IDLE]


@pytest.mark.rule("QX-35", "D-19")
def test_d19_a_silent_peer_is_pinged() -> None:
    """After a third of the time if a stream is open; not again until it answers; not while nothing can be written."""
    wire = Wire(client=True)
    assert wire.core.next_deadline() == 30.0
    opened(wire, b"x")
    wire.take()
    assert wire.core.next_deadline() == 10.0
    assert wire.core.handle_timeout(9.999) == []
    assert not wire.core.has_output
    assert wire.core.handle_timeout(10.0) == []
    assert wire.core.has_output
    assert wire.core.next_deadline() == 30.0  # of a ping that cannot be written no more is due
    wire.now = 11.0
    assert wire.frames() == [Frame(PING, (1,), b"")]
    assert wire.core.next_deadline() == 30.0
    wire.now = 12.0
    wire.give(answer(1))
    assert wire.core.round_trip == 1.0
    assert wire.core.next_deadline() == 22.0
    wire.core.handle_timeout(22.0)
    wire.now = 22.0
    assert wire.frames() == [Frame(PING, (2,), b"")]
    assert wire.core.next_deadline() == 42.0
    assert wire.core.handle_timeout(42.0) == [IDLE]


@pytest.mark.rule("QX-34", "QX-35", "D-18", "D-19")
@pytest.mark.parametrize(
    ("opens_at", "expected"),
    [(0.0, 30.0), (5.0, 30.0), (25.0, 45.0)],
    ids=["a stream is open", "a stream opens soon", "a stream opens late"],
)
def test_d18_a_silent_peer_is_lost_within_the_time_out(opens_at: float, expected: float) -> None:
    """Whatever this side writes meanwhile. A peer that was not pinged before has two thirds of the time for its answer."""
    wire = Wire(client=True)
    wire.now = opens_at
    stream_id = opened(wire, b"x")
    wire.take()
    happened: list[Event] = []
    while not happened:
        deadline = wire.core.next_deadline()
        assert deadline is not None
        wire.now = max(deadline, wire.now)
        happened = wire.core.handle_timeout(wire.now)
        if not happened:
            wire.core.send(stream_id, b"y")
            wire.take()
    assert happened == [IDLE]
    assert wire.now == expected


@pytest.mark.rule("QX-35", "D-19")
def test_d19_the_settings_ask_for_it() -> None:
    """Without a stream."""
    wire = Wire(keepalive_without_streams=True)
    assert wire.core.next_deadline() == 10.0
    wire.core.handle_timeout(10.0)
    assert wire.frames() == [Frame(PING, (1,), b"")]


@pytest.mark.ci
@pytest.mark.rule("QX-35")
def test_two_idle_ends_stay_together_for_a_day() -> None:
    """A stream is open; each answers the other's pings."""
    pair = Pair()
    stream_id = pair.client.open_stream()
    assert stream_id is not None
    pair.client.send(stream_id, b"x")
    pair.settle()
    turns = 0
    while pair.now < 86_400:
        deadline = min(filter(None, (pair.client.next_deadline(), pair.server.next_deadline())))
        assert deadline > pair.now
        pair.now = deadline
        turns += 1
        assert pair.client.handle_timeout(pair.now) == pair.server.handle_timeout(pair.now) == []
        assert pair.settle() == ([], [])
    assert turns <= 86_400 / 10 + 1


@pytest.mark.rule("QX-43")
@pytest.mark.parametrize("sent", ["", "40", "4040ff51"])
def test_qx43_the_first_record_has_its_time(sent: str) -> None:
    """10 s from the beginning, however much of it has come; then nothing is written any more."""
    wire = Wire(peer=None)
    wire.now = 9.0
    wire.octets(sent) if sent else None
    assert wire.core.next_deadline() == 10.0
    assert wire.core.handle_timeout(9.9) == []
    (end,) = wire.core.handle_timeout(10.0)
    assert end == Ended(1, "no transport parameters within 10 s", False, True)
    assert wire.take() == b""


@pytest.mark.rule("QX-43")
def test_qx43_the_settings_say_how_long_a_record_takes() -> None:
    """4 s from its first octet."""
    wire = Wire(idle_timeout=0, record_timeout=4.0, peer=attrs.evolve(PEER, max_idle_timeout_ms=0))
    wire.now = 5.0
    assert wire.octets("0100404000") == []
    assert wire.core.next_deadline() == 9.0
    assert wire.core.handle_timeout(8.9) == []
    assert wire.core.handle_timeout(9.0) == [Ended(1, "a record was not complete within 4 s", False, True)]


@pytest.mark.rule("QX-43")
def test_qx43_a_record_that_has_begun_has_its_time() -> None:
    """30 s, even if its octets trickle in; then the connection is lost."""
    wire = Wire(idle_timeout=0, peer=attrs.evolve(PEER, max_idle_timeout_ms=0))
    wire.now = 5.0
    assert wire.octets("00 4040".replace("00 ", "0100") + "00") == []
    for wire.now in (6.0, 20.0, 34.9):
        assert wire.octets(b"\0") == []
        assert wire.core.next_deadline() == 35.0
        assert wire.core.handle_timeout(wire.now) == []
    (end,) = wire.core.handle_timeout(35.0)
    assert end == Ended(1, "a record was not complete within 30 s", False, True)
    # A Size that is cut counts from its first octet; the next record counts anew.
    wire = Wire(idle_timeout=0, peer=attrs.evolve(PEER, max_idle_timeout_ms=0))
    wire.octets("40")
    wire.now = 3.0
    wire.octets("40")
    assert wire.core.next_deadline() == 30.0
    wire.octets(bytes(64) + b"\x05")
    assert wire.core.next_deadline() == 33.0


@pytest.mark.rule("QX-22", "QX-34")
def test_streams_that_are_over_need_no_pings() -> None:
    wire = Wire()
    wire.give(stream(2, 0, b"x", fin=True))
    assert wire.core.next_deadline() == 10.0
    wire.core.consumed(2, 1)
    assert wire.core.take_events() == [StreamOver(2)]
    assert wire.core.next_deadline() == 30.0
