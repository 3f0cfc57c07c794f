"""Numbers and lives of streams: QX-20 to QX-26."""

from __future__ import annotations

import pytest

from levada.framework.errors import LocalProtocolError
from levada.transports.qmux import (
    Ended,
    StreamData,
    StreamOpened,
    StreamOver,
    StreamReset,
    StreamsAllowed,
    StreamStopped,
    TransportError,
)
from levada.transports.qmux.frames import Frame, FrameType, encode_frame

from .conftest import Pair, Wire, stream

STATE, SIZE, VIOLATION, FLOW, LIMIT = (
    TransportError.STREAM_STATE_ERROR,
    TransportError.FINAL_SIZE_ERROR,
    TransportError.PROTOCOL_VIOLATION,
    TransportError.FLOW_CONTROL_ERROR,
    TransportError.STREAM_LIMIT_ERROR,
)


def code(wire: Wire, *frames: bytes | str) -> int:
    """Give a record that ends the connection; return the code."""
    last = wire.give(*frames)[-1]
    assert isinstance(last, Ended)
    return last.code


def opened(wire: Wire, *, unidirectional: bool = False, data: bytes = b"") -> int:
    """Open a stream and write to it."""
    stream_id = wire.core.open_stream(unidirectional=unidirectional)
    assert stream_id is not None
    wire.core.send(stream_id, data)
    return stream_id


@pytest.mark.rule("QX-20")
def test_qx20_numbers_of_streams() -> None:
    """The opener, the kind, then from 0 on."""
    for client, bidi, uni in ((True, [0, 4, 8], [2, 6]), (False, [1, 5, 9], [3, 7])):
        core = Wire(client=client).core
        assert [core.open_stream() for _ in bidi] == bidi
        assert [core.open_stream(unidirectional=True) for _ in uni] == uni
        assert (core.stream_credit(unidirectional=False), core.stream_credit(unidirectional=True)) == (97, 98)


@pytest.mark.rule("QX-20", "D-11")
def test_d11_each_stream_is_handed_over_with_its_own_first_frame() -> None:
    """A higher number opens the lower ones, which count; their events come later, in the order of their frames."""
    wire = Wire(max_streams=4)
    assert wire.give(stream(12, 0, b"d")) == [StreamOpened(12), StreamData(12, b"d", False)]
    assert wire.give(stream(4, 0, b"b")) == [StreamOpened(4), StreamData(4, b"b", False)]
    assert wire.give(stream(0, 0, b"a")) == [StreamOpened(0), StreamData(0, b"a", False)]
    assert code(wire, stream(16, 0, b"e")) == LIMIT


@pytest.mark.rule("QX-20", "QX-28")
def test_qx20_numbers_are_not_reused() -> None:
    """Frames for a stream that is over are ignored."""
    wire = Wire()
    wire.give(encode_frame(FrameType.RESET_STREAM, 2, 5, 0))
    for frame in (stream(2, 0, b"late", fin=True), encode_frame(FrameType.RESET_STREAM, 2, 6, 9)):
        assert wire.give(frame) == []
    assert wire.give(encode_frame(FrameType.STREAM_DATA_BLOCKED, 2, 6)) == []
    mine = opened(wire, unidirectional=True)
    wire.core.send(mine, b"", True)
    wire.take()
    late = encode_frame(FrameType.MAX_STREAM_DATA, mine, 6), encode_frame(FrameType.STOP_SENDING, mine, 6)
    assert wire.give(*late) == [StreamOver(mine)]
    assert wire.frames() == []


@pytest.mark.rule("QX-20", "D-11")
def test_d11_a_stream_that_was_skipped_is_not_reused_either() -> None:
    """Once it has had its frame and is over."""
    wire = Wire()
    wire.give(stream(6, 0, b"x"))
    reset = encode_frame(FrameType.RESET_STREAM, 2, 5, 0)
    assert wire.give(reset) == [StreamOpened(2), StreamReset(2, 5), StreamOver(2)]
    assert wire.give(reset, stream(2, 0, b"late")) == []


@pytest.mark.rule("QX-21")
@pytest.mark.parametrize(
    ("client", "frame"),
    [
        (False, stream(3, 0, b"x")),
        (False, stream(1, 0, b"x")),
        (False, encode_frame(FrameType.RESET_STREAM, 3, 0, 0)),
        (False, encode_frame(FrameType.RESET_STREAM, 1, 0, 0)),
        (False, encode_frame(FrameType.STREAM_DATA_BLOCKED, 3, 0)),
        (False, encode_frame(FrameType.STREAM_DATA_BLOCKED, 1, 0)),
        (False, encode_frame(FrameType.STOP_SENDING, 2, 0)),
        (False, encode_frame(FrameType.STOP_SENDING, 1, 0)),
        (False, encode_frame(FrameType.MAX_STREAM_DATA, 2, 0)),
        (False, encode_frame(FrameType.MAX_STREAM_DATA, 3, 0)),
        (True, stream(2, 0, b"x")),
        (True, stream(0, 0, b"x")),
        (True, encode_frame(FrameType.STOP_SENDING, 3, 0)),
        (True, encode_frame(FrameType.MAX_STREAM_DATA, 4, 0)),
    ],
)
def test_qx21_frames_that_a_stream_cannot_have(client: bool, frame: bytes) -> None:
    """The wrong direction, or a stream of ours that we never opened."""
    assert code(Wire(client=client), frame) == STATE


@pytest.mark.rule("QX-21")
def test_qx21_the_direction_counts_on_open_streams_too() -> None:
    wire = Wire()
    opened(wire, unidirectional=True, data=b"x")
    assert code(wire, stream(3, 0, b"x")) == STATE
    wire = Wire()
    wire.give(stream(2, 0, b"x"))
    assert code(wire, encode_frame(FrameType.STOP_SENDING, 2, 0)) == STATE


@pytest.mark.rule("QX-21")
@pytest.mark.parametrize(
    "frame",
    [
        encode_frame(FrameType.RESET_STREAM, 8, 0, 0),
        encode_frame(FrameType.STOP_SENDING, 8, 7),
        encode_frame(FrameType.MAX_STREAM_DATA, 8, 0),
        encode_frame(FrameType.STREAM_DATA_BLOCKED, 8, 0),
        stream(8, 0, b""),
    ],
)
def test_qx21_every_frame_of_a_stream_opens_it(frame: bytes) -> None:
    """Within the limit."""
    assert Wire().give(frame)[0] == StreamOpened(8)
    assert code(Wire(max_streams=2), frame) == LIMIT


@pytest.mark.rule("QX-11", "QX-13")
@pytest.mark.parametrize("offset", [0, 1, 2, 4, 100, 16_384, 1 << 40])
def test_qx11_each_frame_begins_where_the_last_ended(offset: int) -> None:
    """A gap, a repetition or an overlap is a violation."""
    wire = Wire()
    wire.give(stream(0, 0, b"abc"))
    assert code(wire, stream(0, offset, b"de")) in (VIOLATION, FLOW)


@pytest.mark.rule("QX-12")
def test_qx12_offsets_beyond_the_largest_integer() -> None:
    assert code(Wire(), stream(0, (1 << 62) - 1, b"x")) in (VIOLATION, FLOW, TransportError.FRAME_ENCODING_ERROR)


@pytest.mark.rule("QX-12")
@pytest.mark.parametrize("kind", [0x12, 0x13, 0x16, 0x17])
def test_qx12_counts_above_2_60(kind: int) -> None:
    assert code(Wire(), encode_frame(kind, (1 << 60) + 1)) == TransportError.FRAME_ENCODING_ERROR
    assert Wire().give(encode_frame(kind, 1 << 60)) == ([] if kind > 0x13 else [StreamsAllowed(kind == 0x13)])


@pytest.mark.rule("QX-22", "QX-23")
@pytest.mark.parametrize("order", ["peer first", "own first"])
def test_qx23_a_stream_is_over_when_both_parts_are(order: str) -> None:
    """The application took all, and the end was written."""
    wire = Wire()
    wire.give(stream(0, 0, b"ask", fin=True))

    def receive() -> None:
        wire.core.consumed(0, 2)
        wire.core.consumed(0, 1)

    def send() -> None:
        wire.core.send(0, b"answer", True)
        assert StreamOver(0) not in wire.core.take_events()
        wire.take()

    for step in (receive, send) if order == "peer first" else (send, receive):
        assert wire.core.take_events() == []
        step()
    assert wire.core.take_events() == [StreamOver(0)]
    with pytest.raises(LocalProtocolError):
        wire.core.send(0, b"more")


@pytest.mark.rule("QX-22")
def test_qx22_nothing_follows_the_end() -> None:
    """Nor a reset."""
    wire = Wire(client=True)
    first, second = opened(wire), opened(wire)
    wire.core.send(first, b"", True)
    wire.core.reset(second, 1)
    for stream_id in (first, second):
        with pytest.raises(LocalProtocolError):
            wire.core.send(stream_id, b"x")
    assert wire.frames() == [Frame(0x0F, (first, 0), b""), Frame(FrameType.RESET_STREAM, (second, 1, 0), b"")]
    third = opened(wire)
    wire.core.send(third, b"", True)
    wire.core.reset(third, 3)  # before the end was written
    assert wire.frames() == [Frame(FrameType.RESET_STREAM, (third, 3, 0), b"")]
    # After the end was written a reset does nothing, nor is STOP_SENDING answered.
    wire.core.reset(first, 1)
    wire.core.reset(second, 2)
    assert (
        wire.give(encode_frame(FrameType.STOP_SENDING, first, 7), encode_frame(FrameType.STOP_SENDING, second, 7)) == []
    )
    assert wire.frames() == []


@pytest.mark.rule("QX-22")
def test_qx22_an_end_without_data_needs_no_credit() -> None:
    """The windows of the peer are full."""
    import attrs

    from .conftest import PEER

    wire = Wire(client=True, peer=attrs.evolve(PEER, max_data=3))
    first, second = opened(wire, data=b"abc"), opened(wire)
    wire.core.send(second, b"", True)
    assert Frame(0x0F, (second, 0), b"") in wire.frames()
    wire.core.send(first, b"", True)
    assert Frame(0x0F, (first, 3), b"") in wire.frames()


@pytest.mark.rule("QX-24")
@pytest.mark.parametrize(
    "frame",
    [
        stream(0, 3, b"x"),
        stream(0, 3, b"x", fin=True),
        stream(0, 2, b"", fin=True),
        encode_frame(FrameType.RESET_STREAM, 0, 1, 2),
        encode_frame(FrameType.RESET_STREAM, 0, 1, 4),
    ],
)
@pytest.mark.parametrize("first", [stream(0, 0, b"abc", fin=True), encode_frame(FrameType.RESET_STREAM, 0, 1, 3)])
@pytest.mark.parametrize("taken", [False, True])
def test_qx24_the_final_size_never_changes(first: bytes, frame: bytes, taken: bool) -> None:
    """Data beyond it, another end, another size of a reset."""
    wire = Wire()
    wire.give(first)
    if taken:
        wire.core.consumed(0, 3)
    assert code(wire, frame) == SIZE


@pytest.mark.rule("QX-24")
def test_qx24_a_reset_with_less_than_has_come() -> None:
    wire = Wire()
    wire.give(stream(0, 0, b"abc"))
    assert code(wire, encode_frame(FrameType.RESET_STREAM, 0, 1, 2)) == SIZE


@pytest.mark.rule("QX-24", "D-12")
def test_d12_a_reset_with_more_than_has_come() -> None:
    """It counts in full against both limits, and is given back at once."""
    wire = Wire(stream_window=1000, connection_window=1000)
    wire.give(stream(2, 0, b"abc"))
    assert wire.give(encode_frame(FrameType.RESET_STREAM, 2, 1, 1000)) == [StreamReset(2, 1), StreamOver(2)]
    assert wire.frames() == [Frame(FrameType.MAX_DATA, (2000,), b"")]
    assert code(Wire(stream_window=1000), encode_frame(FrameType.RESET_STREAM, 2, 1, 1001)) == FLOW
    assert code(Wire(connection_window=1000), encode_frame(FrameType.RESET_STREAM, 2, 1, 1001)) == FLOW


@pytest.mark.rule("QX-24")
def test_qx24_a_reset_after_the_end() -> None:
    """It is ignored if everything was taken, else it ends the stream early."""
    reset = encode_frame(FrameType.RESET_STREAM, 0, 9, 3)
    wire = Wire()
    wire.give(stream(0, 0, b"abc", fin=True))
    assert wire.give(reset) == [StreamReset(0, 9)]
    wire = Wire()
    wire.give(stream(0, 0, b"abc", fin=True))
    wire.core.consumed(0, 3)
    assert wire.give(reset) == []
    assert wire.give(stream(0, 3, b"", fin=True)) == []


@pytest.mark.rule("QX-24")
def test_qx24_the_final_size_of_ours_is_what_was_written() -> None:
    """Not what was queued."""
    wire = Wire(client=True)
    stream_id = opened(wire, data=bytes(200_000))
    wire.core.data_to_send(0.0, 1)
    assert wire.core.unsent(stream_id) < 200_000
    written = 200_000 - wire.core.unsent(stream_id)
    wire.core.reset(stream_id, 7)
    assert wire.core.unsent(stream_id) == 0
    assert wire.frames() == [Frame(FrameType.RESET_STREAM, (stream_id, 7, written), b"")]


@pytest.mark.rule("QX-25")
@pytest.mark.parametrize("queued", [b"", b"queued"])
def test_qx25_stop_sending_is_answered_at_once(queued: bytes) -> None:
    """With the same code; what is queued is dropped; the application learns the code."""
    wire = Wire(client=True)
    stream_id = opened(wire, data=queued)
    assert wire.give(encode_frame(FrameType.STOP_SENDING, stream_id, 77)) == [StreamStopped(stream_id, 77)]
    assert wire.frames() == [Frame(FrameType.RESET_STREAM, (stream_id, 77, 0), b"")]
    assert wire.give(encode_frame(FrameType.STOP_SENDING, stream_id, 78)) == []
    with pytest.raises(LocalProtocolError):
        wire.core.send(stream_id, b"x")


@pytest.mark.rule("QX-25")
def test_qx25_what_arrives_after_a_stop_is_dropped_and_given_back() -> None:
    """The peer's answer still comes."""
    wire = Wire(stream_window=100, connection_window=100)
    wire.give(stream(2, 0, bytes(40)))
    wire.core.stop(2, 5)
    assert wire.frames() == [Frame(FrameType.STOP_SENDING, (2, 5), b"")]
    assert wire.give(stream(2, 40, bytes(40))) == []
    assert wire.frames() == [Frame(FrameType.MAX_DATA, (180,), b"")]
    wire.core.consumed(2, 40)  # a call that crossed the stop
    assert wire.give(encode_frame(FrameType.RESET_STREAM, 2, 5, 90)) == [StreamReset(2, 5), StreamOver(2)]
    assert wire.frames() == []  # 90 of 180 are used, so no more than half
    assert wire.give(stream(6, 0, bytes(90)))[1:] == [StreamData(6, bytes(90), False)]
    assert code(wire, stream(6, 90, b"x")) == FLOW


@pytest.mark.rule("QX-25", "QX-27")
def test_qx25_a_stopped_stream_keeps_its_limit() -> None:
    """Only the window of the connection grows."""
    wire = Wire(stream_window=100)
    wire.give(stream(2, 0, bytes(40)))
    wire.core.stop(2, 5)
    wire.give(stream(2, 40, bytes(60)))
    assert code(wire, stream(2, 100, b"x")) == FLOW


@pytest.mark.rule("QX-25")
def test_qx25_a_stop_after_the_end_is_not_sent() -> None:
    """Only a part in recv is stopped; what was not taken is given back."""
    wire = Wire(connection_window=10)
    wire.give(stream(2, 0, bytes(8), fin=True))
    wire.core.stop(2, 5)
    assert wire.core.take_events() == [StreamOver(2)]
    assert wire.frames() == [Frame(FrameType.MAX_DATA, (18,), b"")]


@pytest.mark.rule("QX-25")
def test_qx25_a_stopped_stream_that_ends() -> None:
    """With its end instead of a reset."""
    wire = Wire()
    wire.give(stream(2, 0, b"x"))
    wire.core.stop(2, 5)
    assert wire.give(stream(2, 1, b"y", fin=True)) == [StreamOver(2)]
    assert wire.frames() == []  # nobody needs the STOP_SENDING any more


@pytest.mark.rule("QX-26", "D-13")
def test_d13_reset_stream_at_is_not_declared() -> None:
    assert code(Wire(), encode_frame(FrameType.RESET_STREAM_AT, 0, 1, 2, 3)) == VIOLATION


@pytest.mark.rule("QX-1")
def test_calls_that_make_no_sense_change_nothing() -> None:
    """Codes of more than 62 bits, the wrong direction, unknown streams, priorities out of range, too much taken."""
    wire = Wire(client=True)
    mine, theirs = opened(wire, unidirectional=True), 3
    wire.give(stream(theirs, 0, b"abc"))
    core = wire.core
    for call in (
        lambda: core.reset(theirs, 0),
        lambda: core.stop(mine, 0),
        lambda: core.reset(mine, 1 << 62),
        lambda: core.stop(theirs, -1),
        lambda: core.close(1 << 62, "", 0.0),
        lambda: core.send(theirs, b"x"),
        lambda: core.send(400, b"x"),
        lambda: core.open_stream(priority=256),
        lambda: core.set_priority(mine, -1),
        lambda: core.consumed(theirs, 4),
        lambda: core.send_datagram(bytes(16_382)),
    ):
        with pytest.raises(LocalProtocolError):
            call()
    assert core.take_events() == []
    assert wire.frames() == []
    core.reset(400, 1)
    core.stop(400, 1)
    core.consumed(400, 1)
    core.set_priority(400, 1)
    core.accepted(400)
    assert core.unsent(400) == 0
    assert wire.frames() == []


def test_what_is_queued_does_not_change_with_the_callers_buffer() -> None:
    """Bytes are kept, anything else is copied."""
    pair = Pair()
    stream_id = pair.client.open_stream()
    assert stream_id is not None
    buffer = bytearray(b"before")
    pair.client.send(stream_id, buffer)
    pair.client.send(stream_id, memoryview(buffer)[::2])
    buffer[:] = b"after!"
    assert pair.settle()[1] == [StreamOpened(0), StreamData(0, b"beforebfr", False)]
