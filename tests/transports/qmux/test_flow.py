"""Windows, stream credit and forward progress: QX-27 to QX-31."""

from __future__ import annotations

import attrs
import pytest

from levada.framework.errors import LocalProtocolError
from levada.transports.qmux import (
    DatagramReceived,
    DatagramRoom,
    Ended,
    QmuxConfig,
    StreamData,
    StreamOpened,
    StreamOver,
    StreamRoom,
    StreamsAllowed,
    TransportError,
)
from levada.transports.qmux.frames import Frame, FrameType, encode_frame

from .conftest import PEER, Pair, Wire, stream

FLOW, LIMIT = TransportError.FLOW_CONTROL_ERROR, TransportError.STREAM_LIMIT_ERROR
MAX_DATA, MAX_STREAM_DATA = FrameType.MAX_DATA, FrameType.MAX_STREAM_DATA


def code(wire: Wire, *frames: bytes | str) -> int:
    """Give a record that ends the connection; return the code."""
    last = wire.give(*frames)[-1]
    assert isinstance(last, Ended)
    return last.code


@pytest.mark.rule("QX-27")
def test_qx27_limits_of_the_receiver() -> None:
    """Each stream, and all together."""
    wire = Wire(stream_window=10, connection_window=15)
    wire.give(stream(0, 0, bytes(10)), stream(4, 0, bytes(5)))
    assert code(wire, stream(4, 5, b"x")) == FLOW
    wire = Wire(stream_window=10)
    assert code(wire, stream(0, 0, bytes(11))) == FLOW


@pytest.mark.rule("QX-12", "QX-27")
def test_qx12_limits_of_data_stay_below_2_62() -> None:
    """Resets may count more bytes than any peer could send."""
    largest = (1 << 62) - 1
    wire = Wire(stream_window=largest, connection_window=largest)
    wire.give(encode_frame(FrameType.RESET_STREAM, 0, 7, largest - 1))
    assert [frame.fields for frame in wire.frames() if frame.kind == MAX_DATA] == [(largest,)]
    assert code(wire, stream(4, 0, b"ab")) == FLOW


@pytest.mark.rule("QX-27")
def test_qx27_limits_of_the_sender() -> None:
    """The peer's are kept, for each kind of stream its own; a smaller one is ignored."""
    peer = attrs.evolve(
        PEER, max_data=30, max_stream_data_bidi_local=5, max_stream_data_bidi_remote=7, max_stream_data_uni=9
    )
    wire = Wire(client=True, peer=peer)
    wire.give(stream(1, 0, b""))
    bidi, uni = wire.core.open_stream(), wire.core.open_stream(unidirectional=True)
    assert bidi is not None
    assert uni is not None
    for stream_id in (1, bidi, uni):
        wire.core.send(stream_id, bytes(20))
    assert [len(frame.data) for frame in wire.frames() if frame.kind == 0x0E] == [5, 7, 9]
    wire.give(encode_frame(MAX_STREAM_DATA, bidi, 6), encode_frame(MAX_DATA, 2))
    assert wire.frames() == []
    wire.give(encode_frame(MAX_STREAM_DATA, bidi, 20))
    assert [frame for frame in wire.frames() if frame.kind == 0x0E] == [Frame(0x0E, (bidi, 7), bytes(9))]
    wire.give(encode_frame(MAX_DATA, 31))
    assert [frame for frame in wire.frames() if frame.kind == 0x0E] == [Frame(0x0E, (bidi, 16), bytes(1))]
    assert wire.core.unsent(bidi) == 3


@pytest.mark.rule("QX-30", "D-16")
def test_d16_blocked_is_said_once_for_each_limit() -> None:
    """Of a stream, of the connection, of the number of streams."""
    peer = attrs.evolve(PEER, max_data=10, max_stream_data_bidi_remote=5, max_streams_bidi=3)
    wire = Wire(client=True, peer=peer)
    ids = [wire.core.open_stream() for _ in range(3)]
    assert [wire.core.open_stream(), wire.core.open_stream()] == [None, None]
    for stream_id in ids:
        assert stream_id is not None
        wire.core.send(stream_id, bytes(6))
    blocked = [frame for frame in wire.frames() if frame.kind != 0x0E]
    assert blocked == [
        Frame(FrameType.STREAMS_BLOCKED_BIDI, (3,), b""),
        Frame(FrameType.STREAM_DATA_BLOCKED, (0, 5), b""),
        Frame(FrameType.STREAM_DATA_BLOCKED, (4, 5), b""),
        Frame(FrameType.DATA_BLOCKED, (10,), b""),
    ]
    wire.core.send(0, b"x")
    wire.core.send(8, b"x")
    assert wire.core.open_stream() is None
    assert wire.frames() == []
    wire.give(encode_frame(FrameType.MAX_STREAMS_BIDI, 4), encode_frame(MAX_DATA, 12))
    assert wire.core.open_stream() == 12
    assert wire.core.open_stream(unidirectional=True) == 2
    assert wire.core.open_stream() is None
    assert [frame.kind for frame in wire.frames()] == [
        FrameType.STREAMS_BLOCKED_BIDI,
        0x0E,
        FrameType.DATA_BLOCKED,
    ]
    wire.give(encode_frame(FrameType.MAX_STREAMS_BIDI, 5))
    assert [wire.core.open_stream(), wire.core.open_stream()] == [16, None]
    wire.give(encode_frame(FrameType.MAX_STREAMS_BIDI, 6))  # before it is said
    assert wire.frames() == []


@pytest.mark.rule("QX-27")
def test_qx27_a_larger_limit_alone_writes_nothing() -> None:
    """The stream has used its limit, and has nothing queued."""
    wire = Wire(client=True, peer=attrs.evolve(PEER, max_stream_data_bidi_remote=5))
    stream_id = wire.core.open_stream()
    assert stream_id is not None
    wire.core.send(stream_id, bytes(5))
    wire.take()
    wire.give(encode_frame(MAX_STREAM_DATA, stream_id, 8))
    assert not wire.core.has_output
    assert wire.take() == b""


@pytest.mark.rule("QX-30", "D-16")
def test_d16_a_stream_at_its_limit_is_blocked_by_the_next_send() -> None:
    """Not before there is something to send."""
    wire = Wire(client=True, peer=attrs.evolve(PEER, max_stream_data_bidi_remote=5))
    stream_id = wire.core.open_stream()
    assert stream_id is not None
    wire.core.send(stream_id, bytes(5))
    assert [frame.kind for frame in wire.frames()] == [0x0E]
    wire.core.send(stream_id, b"x")
    wire.core.send(stream_id, b"y")
    assert wire.frames() == [Frame(FrameType.STREAM_DATA_BLOCKED, (stream_id, 5), b"")]
    wire.give(encode_frame(MAX_STREAM_DATA, stream_id, 7))
    assert wire.frames() == [Frame(0x0E, (stream_id, 5), b"xy")]
    wire.core.send(stream_id, b"z")
    # A hint that the peer's new limit has made needless is not written.
    wire.give(encode_frame(MAX_STREAM_DATA, stream_id, 8))
    assert wire.frames() == [Frame(0x0E, (stream_id, 7), b"z")]


@pytest.mark.rule("QX-30")
def test_qx30_blocked_frames_of_the_peer_are_hints() -> None:
    wire = Wire()
    assert wire.give("1443e8", "150005", "1607", "1708") == [StreamOpened(0)]
    assert wire.frames() == []


@pytest.mark.rule("QX-29", "D-15")
def test_d15_new_limits_go_out_when_half_is_taken() -> None:
    """As one value, however often they change before they are written."""
    wire = Wire(stream_window=100, connection_window=200)
    wire.give(stream(0, 0, bytes(100)))
    wire.core.consumed(0, 49)
    assert wire.frames() == []
    wire.core.consumed(0, 1)
    assert wire.core.has_output
    wire.core.consumed(0, 10)
    assert wire.frames() == [Frame(MAX_STREAM_DATA, (0, 160), b"")]
    wire.core.consumed(0, 40)
    assert wire.frames() == [Frame(MAX_DATA, (300,), b"")]


@pytest.mark.rule("QX-27", "QX-29")
def test_qx29_no_window_for_a_stream_that_has_ended() -> None:
    """The connection's is given back."""
    wire = Wire(stream_window=100, connection_window=100)
    wire.give(stream(2, 0, bytes(60)))
    wire.core.consumed(2, 60)
    wire.give(stream(2, 60, b"", fin=True))
    assert wire.frames() == [Frame(MAX_DATA, (160,), b"")]


@pytest.mark.rule("QX-27")
def test_qx27_what_comes_for_a_forgotten_stream_is_given_back() -> None:
    """Else a peer is strangled slowly."""
    wire = Wire(connection_window=100)
    wire.give(encode_frame(FrameType.RESET_STREAM, 2, 0, 0))
    for at in range(100):
        assert wire.give(stream(2, at * 10, bytes(10))) == []
        wire.take()
    assert wire.give(stream(6, 0, bytes(60)))[1:] == [StreamData(6, bytes(60), False)]
    assert code(wire, stream(2, 0, bytes(101))) == FLOW  # it counts all the same


@pytest.mark.rule("QX-27", "QX-31")
@pytest.mark.parametrize("way", ["stopped", "reset", "taken"])
def test_qx27_the_connection_never_runs_dry(way: str) -> None:
    """A thousand windows pass, however streams end."""
    config = QmuxConfig(stream_window=1000, connection_window=2000, max_streams=2)
    pair = Pair(server=config)
    for _ in range(200):
        stream_id = pair.client.open_stream()
        assert stream_id is not None
        pair.client.send(stream_id, bytes(900))
        received = [event for event in pair.settle()[1] if isinstance(event, StreamData)]
        assert sum(len(event.data) for event in received) == 900
        pair.server.accepted(stream_id)
        if way == "stopped":
            pair.server.stop(stream_id, 1)
        elif way == "reset":
            pair.client.reset(stream_id, 1)
        else:
            pair.client.send(stream_id, b"", True)
            pair.server.consumed(stream_id, 900)
        pair.server.send(stream_id, b"", True)
        of_client, of_server = pair.settle()
        assert StreamOver(stream_id) in of_client
        assert StreamOver(stream_id) in of_server


@pytest.mark.rule("QX-28", "D-14")
def test_d14_a_stream_is_granted_when_it_is_over_and_written() -> None:
    """Not when our last frame is only queued; nor before the application has the stream."""
    wire = Wire(max_streams=1)
    wire.give(encode_frame(FrameType.RESET_STREAM, 0, 1, 0))
    wire.core.accepted(0)
    wire.core.reset(0, 2)
    # Not written yet: a second stream is one too many.
    assert wire.frames() == [
        Frame(FrameType.RESET_STREAM, (0, 2, 0), b""),
        Frame(FrameType.MAX_STREAMS_BIDI, (2,), b""),
    ]
    wire.give(encode_frame(FrameType.RESET_STREAM, 4, 1, 0))
    wire.core.reset(4, 2)
    assert wire.frames() == [Frame(FrameType.RESET_STREAM, (4, 2, 0), b"")]
    wire.core.accepted(4)
    assert wire.frames() == [Frame(FrameType.MAX_STREAMS_BIDI, (3,), b"")]
    wire.give(encode_frame(FrameType.RESET_STREAM, 8, 1, 0))
    wire.core.accepted(8)
    wire.core.reset(8, 2)
    assert code(wire, stream(12, 0, b"x")) == LIMIT


@pytest.mark.rule("QX-28", "QX-43")
def test_qx28_a_peer_that_does_not_read_is_bounded() -> None:
    """It opens and resets until it has no credit: at most one frame for each stream of the limit is queued."""
    wire = Wire(max_streams=8, max_streams_unidirectional=8)
    ids = iter(range(0, 4000, 4))
    ended = False
    count = 0
    while not ended:
        stream_id = next(ids)
        events = wire.give(stream(stream_id, 0, b"x"), encode_frame(FrameType.RESET_STREAM, stream_id, 1, 1))
        ended = isinstance(events[-1], Ended)
        if not ended:
            count += 1
            wire.core.accepted(stream_id)
            wire.core.send(stream_id, b"answer")
            wire.give(encode_frame(FrameType.STOP_SENDING, stream_id, 1))
    assert count == 8


@pytest.mark.rule("QX-28")
def test_qx28_streams_are_granted_in_few_frames() -> None:
    """Half of the limit at a time where the peer uses one stream after another; one at a time where it has none left."""
    pair = Pair(server=QmuxConfig(max_streams=100))
    allowed = 0
    for _ in range(1000):
        stream_id = pair.client.open_stream()
        assert stream_id is not None
        pair.client.send(stream_id, b"", True)
        pair.server.accepted(stream_id)
        pair.deliver(pair.client, pair.server)
        pair.server.accepted(stream_id)
        pair.server.send(stream_id, b"", True)
        allowed += pair.settle()[0].count(StreamsAllowed(False))
    assert 19 <= allowed <= 21
    wire = Wire(max_streams=3)
    wire.give(stream(0, 0, b"long"), stream(4, 0, b"long"), stream(8, 0, b"", fin=True))
    wire.core.accepted(8)
    wire.core.send(8, b"", True)
    assert wire.frames()[-1] == Frame(FrameType.MAX_STREAMS_BIDI, (4,), b"")


@pytest.mark.rule("QX-28", "QX-30")
def test_qx30_a_peer_that_wants_more_streams_is_told_of_each() -> None:
    """It may have opened all that it knows of, and not used them yet. The hint counts once."""
    wire = Wire(max_streams=10)

    def end(stream_id: int) -> list[Frame]:
        wire.give(stream(stream_id, 0, b"", fin=True))
        wire.core.accepted(stream_id)
        wire.core.send(stream_id, b"", True)
        return [frame for frame in wire.frames() if frame.kind == FrameType.MAX_STREAMS_BIDI]

    assert end(0) == []
    wire.give("160a", "160a")
    assert wire.frames() == [Frame(FrameType.MAX_STREAMS_BIDI, (11,), b"")]
    wire.give("160b")
    assert wire.frames() == []
    assert end(4) == [Frame(FrameType.MAX_STREAMS_BIDI, (12,), b"")]
    assert end(8) == []


@pytest.mark.rule("QX-12", "QX-28")
def test_qx12_no_limit_of_streams_above_2_60() -> None:
    wire = Wire(max_streams_unidirectional=1 << 60)
    wire.give(stream(2, 0, b"", fin=True), encode_frame(FrameType.STREAMS_BLOCKED_UNI, 1))
    wire.core.accepted(2)
    assert wire.frames() == [Frame(FrameType.MAX_STREAMS_UNI, (1 << 60,), b"")]


@pytest.mark.rule("QX-28")
def test_qx28_more_streams_are_an_event() -> None:
    wire = Wire(client=True, peer=attrs.evolve(PEER, max_streams_uni=1))
    assert (wire.core.open_stream(unidirectional=True), wire.core.open_stream(unidirectional=True)) == (2, None)
    assert wire.give("1301", "1300") == []
    assert wire.give("1303") == [StreamsAllowed(True)]
    assert wire.core.stream_credit(unidirectional=True) == 2


@pytest.mark.rule("QX-31")
def test_qx31_streams_do_not_stop_one_another() -> None:
    """A stream whose window is full, and that nobody takes, leaves the others going."""
    pair = Pair(client=QmuxConfig(stream_window=100), server=QmuxConfig(stream_window=100, connection_window=1000))
    stuck, other = pair.client.open_stream(), pair.client.open_stream()
    assert stuck is not None
    assert other is not None
    pair.client.send(stuck, bytes(500))
    pair.settle()
    assert pair.client.unsent(stuck) == 400
    for _ in range(50):
        pair.client.send(other, bytes(60))
        received = [event for event in pair.settle()[1] if isinstance(event, StreamData)]
        assert sum(len(event.data) for event in received if event.stream_id == other) == 60
        pair.server.consumed(other, 60)


def test_room_is_told_at_the_low_mark() -> None:
    """Once, when the queue falls to it."""
    wire = Wire(client=True, low_watermark=20_000)
    stream_id = wire.core.open_stream()
    assert stream_id is not None
    wire.core.send(stream_id, bytes(60_000))
    told = []
    while wire.core.data_to_send(0.0, 1):
        told.append((wire.core.unsent(stream_id) <= 20_000, wire.core.take_events()))
    assert [events for _, events in told].count([StreamRoom(stream_id)]) == 1
    assert next(low for low, events in told if events)
    wire.core.send(stream_id, bytes(20_000))
    wire.take()
    assert wire.core.take_events() == []


@pytest.mark.rule("QX-7", "QX-19", "D-10")
def test_d10_datagrams() -> None:
    """Alone in a record, without a length; as large as the peer takes."""
    wire = Wire(client=True, peer=attrs.evolve(PEER, max_datagram_frame_size=101))
    assert wire.core.max_datagram_size == 100
    assert wire.core.send_datagram(bytes(100))
    assert wire.core.send_datagram(b"")
    with pytest.raises(LocalProtocolError):
        wire.core.send_datagram(bytes(101))
    assert wire.take() == b"\x40\x65\x30" + bytes(100) + b"\x01\x30"
    for declared, largest in ((0, 0), (1, 0), (1 << 40, 16_381)):
        core = Wire(peer=attrs.evolve(PEER, max_datagram_frame_size=declared)).core
        assert core.max_datagram_size == largest
    with pytest.raises(LocalProtocolError):
        Wire(peer=attrs.evolve(PEER, max_datagram_frame_size=0)).core.send_datagram(b"")


@pytest.mark.rule("QX-7", "QX-31", "QX-43")
def test_qx43_the_queue_of_datagrams() -> None:
    """Full: refused; room is an event."""
    wire = Wire(client=True, datagram_queue=2)
    assert [wire.core.send_datagram(b"x") for _ in range(3)] == [True, True, False]
    assert wire.core.queued == 2
    wire.take()
    assert wire.core.take_events() == [DatagramRoom()]
    assert wire.core.send_datagram(b"x")
    assert wire.give("3001") == [DatagramReceived(b"\1")]
    assert code(Wire(datagrams=False), "3001") == TransportError.PROTOCOL_VIOLATION
    assert code(Wire(datagrams=False), "310101") == TransportError.PROTOCOL_VIOLATION
