"""Records cut anywhere, good ones that are seldom seen, and bad ones."""

from __future__ import annotations

import attrs
import pytest

from levada.transports.qmux import (
    DatagramReceived,
    Ended,
    Established,
    Event,
    QmuxCore,
    StreamData,
    StreamOpened,
    StreamOver,
    StreamReset,
    TransportError,
)
from levada.transports.qmux.frames import Frame, FrameType, encode_frame, encode_int, read_int

from .conftest import PEER, VECTORS, Pair, Wire, read_frames, record, stream

EMPTY = bytes.fromhex("ff5153300d0a0d0a00")
VIOLATION = TransportError.PROTOCOL_VIOLATION
ENCODING = TransportError.FRAME_ENCODING_ERROR


def ended(events: list[Event]) -> Ended:
    """Return the last event, which says how the connection ended."""
    assert [type(event) for event in events].count(Ended) == 1
    last = events[-1]
    assert isinstance(last, Ended)
    return last


@pytest.mark.rule("QX-2", "QX-3", "QX-4", "QX-7", "QX-8", "QX-10", "QX-11", "QX-12", "QX-21", "D-1", "D-2")
@pytest.mark.parametrize("framed", [False, True])
@pytest.mark.parametrize(("name", "octets", "codes"), VECTORS["bad"])
def test_bad_records_of_the_vectors(name: str, octets: str, codes: list[int], framed: bool) -> None:
    """Each ends the connection with its code, in one CONNECTION_CLOSE, and no exception."""
    wire = Wire()
    if framed:
        wire.core = QmuxCore(client=False, now=0.0, framed=True)
        wire.core.receive_message(EMPTY, 0.0)
        wire.core.data_to_send(0.0)
        message = bytes.fromhex(octets)[1:] if octets != "7fff" else bytes(16_383)
        events = wire.core.receive_message(message, 0.0)
        (sent,) = wire.core.data_to_send(0.0)
        (close,) = read_frames(record(sent))
    else:
        events = wire.octets(octets)
        (close,) = wire.frames()
    end = ended(events)
    assert end.code in codes
    assert (end.by_peer, end.lost) == (False, True)
    assert (close.kind, close.fields[0]) == (FrameType.TRANSPORT_CLOSE, end.code)
    assert wire.core.data_to_send(0.0) == []


@pytest.mark.rule("QX-9", "D-5")
@pytest.mark.parametrize(("name", "octets", "codes"), VECTORS["bad_first"])
def test_bad_first_records_of_the_vectors(name: str, octets: str, codes: list[int]) -> None:
    """The first frame is QX_TRANSPORT_PARAMETERS, and nothing else."""
    wire = Wire(peer=None)
    assert ended(wire.octets(octets)).code in codes


@pytest.mark.rule("QX-12", "QX-14", "QX-15")
@pytest.mark.parametrize("octets", VECTORS["bad_parameters"])
def test_bad_parameters_end_the_connection(octets: str) -> None:
    """TRANSPORT_PARAMETER_ERROR."""
    wire = Wire(peer=None)
    end = ended(wire.give(encode_frame(FrameType.PARAMETERS, data=bytes.fromhex(octets))))
    assert end.code == TransportError.TRANSPORT_PARAMETER_ERROR


@pytest.mark.rule("D-5")
@pytest.mark.parametrize("octets", [b"GET", b"\x16\x03", b"PRI", b"\x40\x40\xfe", b"\x0aff"])
def test_d5_another_protocol_is_refused_at_its_first_octets(octets: bytes) -> None:
    """The record is not waited for."""
    wire = Wire(peer=None)
    events = [event for octet in octets for event in wire.octets(bytes((octet,)))]
    assert ended(events).code == VIOLATION


@pytest.mark.rule("QX-3")
@pytest.mark.parametrize("size", ["7fff", "80003fff", "bfffffff", "c000000000003fff", "ffffffffffffffff"])
def test_qx3_size_is_judged_before_the_octets_come(size: str) -> None:
    """FRAME_ENCODING_ERROR as soon as Size is there, whichever way it is cut."""
    wire = Wire()
    octets = bytes.fromhex(size)
    assert wire.octets(octets[:1]) == []
    assert ended(wire.octets(octets[1:])).code == ENCODING


@pytest.mark.rule("QX-3")
def test_qx3_the_largest_record() -> None:
    """A Size of 16382 is fine."""
    wire = Wire()
    data = bytes(16_382 - 3)
    assert wire.give(b"\x0a\x00" + encode_int(len(data) - 2) + data[2:], b"\x00")[-1] == StreamData(0, data[2:], False)
    assert wire.give(bytes(16_382)) == []


@pytest.mark.rule("QX-2", "QX-4", "QX-5", "QX-11")
@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
def test_qx2_octets_cut_anywhere_mean_the_same(size: int) -> None:
    """All good vectors, in pieces."""
    octets = b"".join(
        [
            bytes.fromhex(VECTORS["other_implementation"]),
            bytes.fromhex("c0000000000000130fc00000000000000080000000400477696465"),
            record(bytes(1000)),
            record("0410090300"),
            record(*["0a040000"] * 2000),
            record("1000"),
            record("0e040000", stream(4, 0, b"x" * 300), stream(8, 0, b"y")),
            encode_int(5) + bytes.fromhex("080c307879"),
            record("3103686579"),
        ]
    )
    wire = Wire(peer=None)
    events = [event for at in range(0, len(octets), size) for event in wire.octets(octets[at : at + size])]
    assert type(events.pop(0)) is Established
    assert events == [
        StreamOpened(0),
        StreamData(0, b"wide", True),
        StreamOpened(16),
        StreamReset(16, 9),
        StreamOpened(4),
        StreamData(4, b"x" * 300, False),
        StreamOpened(8),
        StreamData(8, b"y", False),
        StreamOpened(12),
        StreamData(12, b"0xy", False),
        DatagramReceived(b"hey"),
    ]


@pytest.mark.rule("QX-4")
@pytest.mark.parametrize("kind", range(8, 16))
@pytest.mark.parametrize("fields", [(0, 0, 0), (70, 70, 70), (20_000, 0, 0), (0, 20_000, 0), (0, 0, 20_000)])
def test_qx4_a_stream_frame_never_reads_on_in_the_next_record(kind: int, fields: tuple[int, int, int]) -> None:
    """It is cut in each of its integers, whether more records are at hand or not."""
    stream_id, offset, size = fields
    integers = [stream_id, *([offset] if kind & 4 else []), *([size] if kind & 2 else [])]
    header = bytes((kind,)) + b"".join(map(encode_int, integers))
    for cut in range(1, len(header)):
        for more in (b"", record(bytes(50)) * 3):
            wire = Wire(max_streams=20_000)
            assert ended(wire.octets(record(header[:cut]) + more)).code == ENCODING
            assert wire.frames()[0].fields == (ENCODING, kind)


@pytest.mark.rule("QX-5")
def test_qx5_frames_share_a_record_and_the_last_needs_no_length() -> None:
    """A frame without a length takes the rest of its record."""
    wire = Wire()
    assert wire.give("0f00000161", "0a04026263", "0c0402646566") == [
        StreamOpened(0),
        StreamData(0, b"a", True),
        StreamOpened(4),
        StreamData(4, b"bc", False),
        StreamData(4, b"def", False),
    ]
    assert wire.give("30686579") == [DatagramReceived(b"hey")]
    assert wire.give("3101783000") == [DatagramReceived(b"x"), DatagramReceived(b"\0")]


@pytest.mark.rule("D-3")
def test_d3_nothing_after_a_bad_frame_counts() -> None:
    """What came before it may."""
    wire = Wire()
    events = wire.octets(record("0a000161", "01", "0a040162") + record("0a080163"))
    assert [event.stream_id for event in events if isinstance(event, StreamData)] == [0]
    assert ended(events).code == ENCODING


@pytest.mark.rule("QX-9")
def test_qx9_parameters_go_first_and_once() -> None:
    """Each side sends them at once, before it has the other's; nothing is sent on guessed credit."""
    wire = Wire(client=True, peer=None)
    assert [frame.kind for frame in read_frames(wire.greeting)] == [FrameType.PARAMETERS]
    assert wire.core.open_stream() is None
    assert wire.core.stream_credit(unidirectional=True) == 0
    assert wire.core.max_datagram_size == 0
    assert wire.take() == b""
    assert wire.octets(VECTORS["other_implementation"])[0].parameters.max_streams_bidi == 128  # type: ignore[union-attr]
    assert wire.core.open_stream() == 0
    assert ended(wire.give(EMPTY)).code == VIOLATION


@pytest.mark.rule("QX-9", "QX-36")
def test_qx9_parameters_go_before_a_close() -> None:
    core = QmuxCore(client=True, now=0.0)
    core.close(3, "no", 0.0)
    assert [frame.kind for frame in read_frames(b"".join(core.data_to_send(0.0)))] == [
        FrameType.PARAMETERS,
        FrameType.APPLICATION_CLOSE,
    ]


@pytest.mark.rule("QX-6", "QX-33", "D-4")
def test_d4_small_sends_share_a_frame_and_streams_a_record() -> None:
    """Many small sends of one stream are one frame; small frames share a record."""
    wire = Wire(client=True)
    one, two = wire.core.open_stream(), wire.core.open_stream()
    assert one is not None
    assert two is not None
    for n in range(100):
        wire.core.send(one, bytes((n,)) * 10)
        wire.core.send(two, b"x")
    written = wire.take()
    first = b"".join(bytes((n,)) * 10 for n in range(100))
    assert written == record(stream(one, 0, first), stream(two, 0, b"x" * 100))


@pytest.mark.rule("QX-6", "QX-33", "D-4")
def test_d4_large_sends_take_turns_of_one_record() -> None:
    """No record is larger than 16382 octets; equal streams write one record each; several records share a write."""
    wire = Wire(client=True)
    one, two = wire.core.open_stream(), wire.core.open_stream()
    assert one is not None
    assert two is not None
    data = bytes(range(251)) * 400
    wire.core.send(one, data)
    wire.core.send(two, data)
    (written,) = wire.core.data_to_send(0.0, 65_536)
    assert 65_536 <= len(written) <= 65_536 + 16_384
    frames = read_frames(written)
    assert [frame.fields[0] for frame in frames] == [one, two, one, two, one]
    assert all(len(frame.data) > 16_300 for frame in frames)
    assert (
        b"".join(frame.data for frame in frames if frame.fields[0] == one)
        == data[: frames[4].fields[1] + len(frames[4].data)]
    )


@pytest.mark.rule("QX-3", "QX-6")
def test_qx6_control_frames_fill_records_and_no_more() -> None:
    """Those of 5,000 streams take several."""
    wire = Wire(client=True, peer=attrs.evolve(PEER, max_streams_uni=5000))
    for _ in range(5000):
        stream_id = wire.core.open_stream(unidirectional=True)
        assert stream_id is not None
        wire.core.reset(stream_id, 99)
    written = wire.take()
    assert len(read_frames(written)) == 5000
    at, sizes = 0, []
    while at < len(written):
        size, at = read_int(written, at, len(written))
        sizes.append(size)
        at += size
    assert len(sizes) == len(written) // 16_384 + 1
    assert max(sizes) <= 16_382


@pytest.mark.rule("QX-3", "QX-6", "D-4")
def test_d4_records_of_a_peer_that_takes_more() -> None:
    """Up to 65536 octets."""
    for declared, largest in ((30_000, 30_000), (1 << 20, 65_536)):
        wire = Wire(client=True, peer=attrs.evolve(PEER, max_record_size=declared))
        stream_id = wire.core.open_stream()
        assert stream_id is not None
        wire.core.send(stream_id, bytes(200_000))
        written = wire.take()
        at, sizes = 0, []
        while at < len(written):
            size, at = read_int(written, at, len(written))
            sizes.append(size)
            at += size
        assert largest - 30 < max(sizes) <= largest


@pytest.mark.rule("QX-33")
def test_qx33_the_order_of_writing() -> None:
    """Answers and limits, then datagrams, then streams by priority."""
    wire = Wire(client=True)
    low, high, reset = (wire.core.open_stream(priority=priority) for priority in (200, 7, 0))
    assert low is not None
    assert high is not None
    assert reset is not None
    wire.core.send(low, b"low")
    wire.core.send(high, b"high")
    wire.core.send(reset, b"never")
    wire.core.send_datagram(b"datagram")
    wire.core.reset(reset, 5)
    wire.give("f48c67529ef8c7bd07")
    assert [(frame.kind, frame.fields) for frame in wire.frames()] == [
        (FrameType.RESET_STREAM, (reset, 5, 0)),
        (FrameType.PING_ANSWER, (7,)),
        (FrameType.DATAGRAM, ()),
        (0x0E, (high, 0)),
        (0x0E, (low, 0)),
    ]


@pytest.mark.rule("QX-33")
def test_qx33_a_priority_that_changes() -> None:
    """It counts for what is queued too."""
    wire = Wire(client=True)
    first, second = wire.core.open_stream(), wire.core.open_stream()
    assert first is not None
    assert second is not None
    wire.core.send(first, b"1")
    wire.core.send(second, b"2")
    wire.core.set_priority(second, 0)
    assert [frame.fields[0] for frame in wire.frames()] == [second, first]


@pytest.mark.rule("QX-41")
def test_qx41_messages_are_records_without_size() -> None:
    """The same frames; each message is one record."""
    pair = Pair(framed=True)
    stream_id = pair.client.open_stream()
    assert stream_id is not None
    pair.client.send(stream_id, b"hi", True)
    assert pair.client.data_to_send(0.0) == [bytes.fromhex("0f0000026869")]
    pair.client.send_datagram(b"a")
    pair.client.send_datagram(b"b")
    assert pair.client.data_to_send(0.0) == [b"\x30a", b"\x30b"]


@pytest.mark.rule("QX-1", "QX-9", "QX-10", "QX-11", "QX-22", "QX-23", "QX-28", "D-23")
@pytest.mark.parametrize("size", [1, 4, 1000])
def test_the_scenario_on_a_unix_socket(size: int) -> None:
    """A stream is echoed, a ping is answered, the client closes."""
    greeting = record(bytes.fromhex(VECTORS["frames"][1][1]))
    server = Wire(peer=None, max_streams=100)

    def give(octets: bytes) -> list[Event]:
        return [event for at in range(0, len(octets), size) for event in server.octets(octets[at : at + size])]

    assert [type(event) for event in give(greeting)] == [Established]
    assert give(bytes.fromhex("060f0000026869")) == [StreamOpened(0), StreamData(0, b"hi", True)]
    server.core.accepted(0)
    server.core.consumed(0, 2)
    server.core.send(0, b"hi", True)
    assert server.take().hex() == "060f0000026869"
    assert server.core.take_events() == [StreamOver(0)]
    assert give(bytes.fromhex("09f48c67529ef8c7bd01")) == []
    assert server.take().hex() == "09f48c67529ef8c7be01"
    assert give(bytes.fromhex("031d0000")) == [Ended(0, "", True, False)]
    assert server.take() == b""
    assert give(b"anything") == server.octets(b"") == []


@pytest.mark.rule("QX-1", "QX-11")
def test_seldom_seen_forms() -> None:
    """Size in eight octets, wide integers, a record of padding, a reset as first frame, thousands of empty frames."""
    wire = Wire()
    assert wire.octets("c0000000000000130fc00000000000000080000000400477696465") == [
        StreamOpened(0),
        StreamData(0, b"wide", True),
    ]
    assert wire.give(bytes(1000)) == []
    assert wire.give(*["0a0400"] * 2000) == [StreamOpened(4)]
    assert [type(event).__name__ for event in wire.give("04080300")] == ["StreamOpened", "StreamReset"]
    assert wire.give("1000") == []
    assert [frame for frame in wire.frames() if isinstance(frame, Frame)] == []
