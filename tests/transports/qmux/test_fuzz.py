"""Hostile input: no exception, bounded memory, constant work, at most one close."""

from __future__ import annotations

import sys
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from levada.framework.errors import LocalProtocolError
from levada.transports.qmux import Ended, Established, Event, QmuxConfig, QmuxCore, StreamData, StreamOpened
from levada.transports.qmux.frames import FrameType, encode_frame, encode_int

from .conftest import PEER, VECTORS, Pair, Wire, read_frames, record, stream

GREETING = record(encode_frame(FrameType.PARAMETERS, data=PEER.encode()))
GOOD = [bytes.fromhex(octets) for _, octets, _, _ in VECTORS["frames"][2:]]
BAD = [bytes.fromhex(octets) for _, octets, _ in VECTORS["bad"]]

numbers = st.one_of(
    st.integers(0, 70), st.integers(0, (1 << 62) - 1), st.sampled_from((1 << 60, 1 << 61, 16_383, 1 << 20))
)
kinds = st.one_of(st.sampled_from([int(kind) for kind in FrameType]), st.integers(8, 15), st.integers(0, 70))


def any_frame(kind: int, fields: list[int], data: bytes | None) -> bytes:
    return encode_frame(kind, *fields, data=data)


frames = st.one_of(
    st.sampled_from(GOOD),
    st.builds(
        lambda kind, fields, data: encode_frame(kind, *fields, data=data),
        kinds,
        st.lists(numbers, max_size=4),
        st.none() | st.binary(max_size=40),
    ),
    st.builds(stream, st.integers(0, 20), st.integers(0, 5), st.binary(max_size=5)),
    st.binary(max_size=20),
)
records = st.one_of(
    st.builds(lambda some: record(*some), st.lists(frames, max_size=5)), st.sampled_from(BAD), st.binary(max_size=30)
)


def play(core: QmuxCore, octets: bytes, size: int) -> list[Event]:
    """Give octets in pieces; do as an owner does that answers everything."""
    events: list[Event] = []
    for at in range(0, len(octets), size):
        events += core.receive_data(octets[at : at + size], at * 1e-6)
    for event in events:
        if isinstance(event, StreamOpened):
            core.accepted(event.stream_id)
            if not event.stream_id & 2:
                core.reset(event.stream_id, 1)
        elif isinstance(event, StreamData):
            core.consumed(event.stream_id, len(event.data))
    return events


def check(core: QmuxCore, events: list[Event]) -> None:
    """Check what must hold whatever the peer sent."""
    ends = [event for event in events if isinstance(event, Ended)]
    assert len(ends) <= 1
    assert not ends or events[-1] is ends[0]
    assert core.ended == bool(ends)
    written = read_frames(b"".join(core.data_to_send(1.0)))
    closes = [frame for frame in written if frame.kind in (FrameType.TRANSPORT_CLOSE, FrameType.APPLICATION_CLOSE)]
    assert len(closes) <= 1
    assert not closes or written[-1] is closes[0]
    core.take_events()
    if ends:
        assert (core.take_events(), core.data_to_send(1.0), core.next_deadline()) == ([], [], None)
        assert core.receive_data(b"more", 2.0) == []


@pytest.mark.rule("QX-43", "D-3")
@given(client=st.booleans(), some=st.lists(records, max_size=12), size=st.integers(1, 50), greet=st.booleans())
def test_qx43_no_octets_raise(client: bool, some: list[bytes], size: int, greet: bool) -> None:
    """Frames of every kind with any numbers, in any pieces."""
    core = QmuxCore(client=client, now=0.0)
    core.data_to_send(0.0)
    events = play(core, (GREETING if greet else b"") + b"".join(some), size)
    check(core, events)


@pytest.mark.rule("QX-43")
@given(client=st.booleans(), some=st.lists(frames, max_size=12))
def test_qx43_no_messages_raise(client: bool, some: list[bytes]) -> None:
    core = QmuxCore(client=client, now=0.0, framed=True)
    events: list[Event] = []
    for message in [GREETING[1:] if GREETING[0] < 64 else GREETING[2:], *some]:
        events += core.receive_message(message, 0.0)
    ends = [event for event in events if isinstance(event, Ended)]
    assert ends == events[-1:] if core.ended else not ends
    assert len(core.data_to_send(0.0)) <= 3


@pytest.mark.rule("QX-4", "QX-8")
@pytest.mark.parametrize("at", range(40))
def test_every_change_of_one_octet_of_an_exchange(at: int) -> None:
    """Named errors or a good meaning, nothing else."""
    octets = GREETING + record(GOOD[1], GOOD[3], GOOD[4]) + record(*GOOD[7:10]) + record(GOOD[-2]) + record(GOOD[-4])
    for place in range(at, len(octets), 40):
        for value in range(0, 256, 5):
            changed = octets[:place] + bytes((value,)) + octets[place + 1 :]
            core = QmuxCore(client=False, now=0.0)
            core.data_to_send(0.0)
            check(core, play(core, changed, 1000))


@pytest.mark.rule("QX-43", "D-24")
@pytest.mark.parametrize(
    ("name", "frame"),
    [
        ("padding", b"\0"),
        ("empty frames", stream(0, 0, b"")),
        ("stale limits", encode_frame(FrameType.MAX_DATA, 1)),
        ("stale limits of a stream", encode_frame(FrameType.MAX_STREAM_DATA, 0, 1)),
        ("stale numbers of streams", encode_frame(FrameType.MAX_STREAMS_BIDI, 1)),
        ("hints", encode_frame(FrameType.STREAM_DATA_BLOCKED, 0, 1)),
        ("stops", encode_frame(FrameType.STOP_SENDING, 0, 1)),
        ("answers", encode_frame(FrameType.PING_ANSWER, 0)),
        ("late data", stream(2, 0, b"x")),
    ],
)
def test_d24_a_flood_costs_its_octets(name: str, frame: bytes) -> None:
    """Neither punished nor kept: after two records of it, no memory, no event and no frame for each."""
    wire = Wire()
    wire.give(stream(0, 0, b""), encode_frame(FrameType.RESET_STREAM, 2, 0, 0))
    flood = record(*[frame] * (4_000 // len(frame)))
    wire.octets(flood)
    wire.take()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    events = [event for _ in range(2) for event in wire.octets(flood)]
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert events == []
    assert after - before < 1000
    assert len(wire.take()) < 30


@pytest.mark.rule("QX-10", "QX-43")
def test_qx43_a_flood_of_pings_has_one_answer() -> None:
    wire = Wire()
    for number in range(2000):
        wire.give(encode_frame(FrameType.PING, number))
    (frame,) = wire.frames()
    assert (frame.kind, frame.fields) == (FrameType.PING_ANSWER, (1999,))


@pytest.mark.rule("QX-43")
def test_qx43_a_partial_record_grows_as_octets_come() -> None:
    """Not by its Size; and it costs no more if its octets come one at a time."""
    wire = Wire()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    wire.octets(encode_int(16_382))
    after, _ = tracemalloc.get_traced_memory()
    assert after - before < 2000
    body = b"\x0a\x00" + encode_int(16_379) + bytes(16_378)
    for octet in body[:16_381]:
        assert wire.octets(bytes((octet,))) == []
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 16_382 * 3
    assert isinstance(wire.octets(b"\0")[-1], Ended)  # the length leads beyond the record


@pytest.mark.rule("QX-43")
def test_qx43_no_work_for_numbers() -> None:
    """A stream number opens lower ones without a step for each."""
    wire = Wire(max_streams=1 << 40)
    steps = 0

    def count(frame: object, event: str, argument: object) -> object:
        nonlocal steps
        steps += 1
        return count

    before = sys.gettrace()
    sys.settrace(count)  # type: ignore[arg-type]
    try:
        events = wire.give(
            stream(4 << 38, 0, b"x"), stream(4 << 30, 0, b"x"), encode_frame(FrameType.MAX_STREAMS_BIDI, 1 << 60)
        )
    finally:
        sys.settrace(before)
    assert [type(event).__name__ for event in events] == ["StreamOpened", "StreamData"] * 2 + ["StreamsAllowed"]
    assert steps < 500


@pytest.mark.rule("QX-43")
def test_qx43_every_second_stream_stays_bounded() -> None:
    """A peer that skips streams loses credit for each, so the record of them is bounded."""
    pair = Wire(max_streams_unidirectional=50)
    index = 0
    last: list[Event] = []
    while not last or not isinstance(last[-1], Ended):
        last = pair.give(encode_frame(FrameType.RESET_STREAM, 8 * index + 2, 0, 0))
        pair.core.accepted(8 * index + 2)
        pair.take()
        index += 1
    assert index <= 51


@pytest.mark.rule("QX-43")
def test_qx43_what_a_core_holds_for_a_peer_that_does_not_read() -> None:
    """Limits and answers do not pile up; data does not stay in the core."""
    config = QmuxConfig(stream_window=10_000, connection_window=10_000)
    core = QmuxCore(client=False, now=0.0, config=config)
    assert isinstance(core.receive_data(GREETING, 0.0)[0], Established)
    core.data_to_send(0.0)
    given = 0
    for number in range(100):
        events = core.receive_data(record(encode_frame(FrameType.PING, number), stream(0, given, bytes(100))), 0.0)
        given += 100
        for event in events:
            if isinstance(event, StreamData):
                core.consumed(0, len(event.data))
    # The window grew in our books, but nothing of that was written: the peer has spent what it knew of.
    assert isinstance(core.receive_data(record(stream(0, given, b"x")), 0.0)[-1], Ended)


def test_a_pair_survives_what_owners_do_wrong() -> None:
    """A mistake of the owner changes nothing for the peer."""
    pair = Pair()
    stream_id = pair.client.open_stream()
    assert stream_id is not None
    with pytest.raises(LocalProtocolError):
        pair.client.consumed(stream_id, 1)
    pair.client.send(stream_id, b"x", True)
    with pytest.raises(LocalProtocolError):
        pair.client.send(stream_id, b"y")
    assert pair.settle()[1] == [StreamOpened(0), StreamData(0, b"x", True)]
