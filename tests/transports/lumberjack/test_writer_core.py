"""The writer without I/O: windows, acks, clocks, and the queue that outlives connections."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import pytest

from levada.framework.errors import ConfigurationError, LocalProtocolError
from levada.transports.lumberjack import (
    AckTimedOut,
    Batch,
    BatchDone,
    EventRejected,
    EventsAcked,
    Finished,
    KeepaliveReceived,
    PeerClosed,
    Refused,
    SendQueue,
    WriterConfig,
    WriterCore,
    WriterEvent,
    WriterState,
    encode_event,
    flatten,
)


def ack(version: int, number: int) -> bytes:
    return b"%dA" % version + struct.pack(">I", number)


class Ends:
    """A core and a queue with events that are numbers."""

    def __init__(self, *, first_sequence: int = 1, **settings: Any) -> None:
        self.config = WriterConfig(**{"compression": 0, "queue": 1000, **settings})
        self.queue = SendQueue(self.config)
        self.core = WriterCore(self.config, now=0.0, first_sequence=first_sequence)
        self.count = 0

    def put(self, count: int, now: float = 0.0) -> None:
        for _ in range(count):
            self.queue.put(encode_event({"n": str(self.count)}, self.config), self.count, now)
            self.count += 1

    def send(self, now: float = 0.0, *, flush: bool = True) -> bytes:
        while (batch := self.queue.next_batch(now, self.core.room, flush=flush)) is not None:
            self.core.send_batch(batch, now)
        return b"".join(self.core.data_to_send(now))

    def hear(self, number: int, now: float = 0.0) -> list[WriterEvent]:
        events = self.core.receive_data(ack(self.config.version, number), now)
        for event in events:
            if isinstance(event, EventsAcked):
                self.queue.acked(event)
        return events

    def acked(self, number: int, now: float = 0.0) -> list[int]:
        return [token for event in self.hear(number, now) if isinstance(event, EventsAcked) for token in event.tokens]

    def lose(self) -> list[int]:
        """End the connection; begin another one."""
        self.core.close(0, "", 0.0)
        rejected = self.queue.give_back(self.core.unacked())
        self.core = WriterCore(self.config, now=0.0)
        return rejected


def windows(data: bytes) -> list[tuple[int, list[int]]]:
    """Taken apart: each window's size and the numbers of the frames behind it."""
    found: list[tuple[int, list[int]]] = []
    at = 0
    while at < len(data):
        kind, number = data[at + 1 : at + 2], int.from_bytes(data[at + 2 : at + 6], "big")
        at += 6
        if kind == b"W":
            found.append((number, []))
        elif kind == b"J":
            found[-1][1].append(number)
            at += 4 + int.from_bytes(data[at : at + 4], "big")
        else:
            found[-1][1].append(number)
            pairs = int.from_bytes(data[at : at + 4], "big")
            at += 4
            for _ in range(2 * pairs):
                at += 4 + int.from_bytes(data[at : at + 4], "big")
    return found


@pytest.mark.rule("LJ-9")
def test_lj9_values_that_are_not_text() -> None:
    """LJ-9: numbers by `str`, booleans as words, maps joined by a dot, None left out, lists as JSON."""
    event = {"line": "x", "i": 7, "f": 1.5, "t": True, "no": None, "m": {"a": {"b": False}, "c": None}, "l": [1, "é"]}
    assert flatten(event) == {"line": "x", "i": "7", "f": "1.5", "t": "true", "m.a.b": "false", "l": '[1,"é"]'}
    for bad in ({"x": object()}, {1: "x"}, {"x": [float("nan")]}):
        with pytest.raises(EventRejected):
            encode_event(bad, WriterConfig(version=1))  # type: ignore[arg-type]  # one has a key that is no text


@pytest.mark.rule("LJ-7")
def test_lj7_halves_of_surrogate_pairs_are_escaped() -> None:
    """LJ-7: escaped bytes leave as bytes; a half of a surrogate pair, which JSON can hold, leaves as its escape and is not refused."""
    event = {"\udbff": "caf\udce9 \ud83d\udc80\udc7f\udd00", "l": ["\ud83d"]}
    pairs = {rb"\udbff": b"caf" + b"\xe9" + rb" \ud83d" + b"\x80" + rb"\udc7f\udd00", b"l": rb'["\ud83d"]'}
    texts = [text for pair in pairs.items() for text in pair]
    body = struct.pack(">I", 2) + b"".join(struct.pack(">I", len(text)) + text for text in texts)
    assert encode_event(event, WriterConfig(version=1)) == body


@pytest.mark.rule("LJ-10")
def test_lj10_version_1_sends_d_unless_asked() -> None:
    """LJ-10: most readers of version 1 refuse J; version 2 has no D."""
    for settings, kind in (
        ({"version": 1}, b"1D"),
        ({"version": 1, "encoding": "json"}, b"1J"),
        ({"version": 2}, b"2J"),
    ):
        ends = Ends(**settings)
        ends.put(1)
        assert ends.send()[6:8] == kind
    with pytest.raises(ConfigurationError, match="LJ-4"):
        WriterConfig(version=2, encoding="data")


@pytest.mark.rule("LJ-33")
@pytest.mark.rule("LJ-34")
def test_lj33_lj34_a_window_is_one_envelope_or_plain() -> None:
    """LJ-33, LJ-34: W before the envelope, all of the window in it, level 3; below 200 octets plain."""
    ends = Ends(version=1, compression=3)
    ends.put(50)
    data = ends.send()
    assert data[:8] == b"1W" + struct.pack(">I", 50) + b"1C"
    (size,) = struct.unpack_from(">I", data, 8)
    assert len(data) == 12 + size
    frames = zlib.decompress(data[12:])
    assert data[12:] == zlib.compress(frames, 3)
    assert windows(data[:6] + frames) == [(50, list(range(1, 51)))]
    ends = Ends(version=1, compression=3)
    ends.put(8)
    assert windows(ends.send()) == [(8, list(range(1, 9)))]


@pytest.mark.rule("LJ-48")
@pytest.mark.rule("LJ-49")
@pytest.mark.rule("LJ-50")
def test_lj48_lj49_lj50_batch_mode_numbers_each_window_from_1() -> None:
    """LJ-48 to LJ-50: W, then 1..n; so many windows in flight as allowed, 2 in version 2 and 1 in version 1."""
    for version, in_flight in ((1, 1), (2, 2)):
        ends = Ends(version=version, window=3)
        ends.put(8)
        assert windows(ends.send()) == [(3, [1, 2, 3])] * in_flight
        assert (ends.core.room, ends.core.in_flight) == (0, 3 * in_flight)
        assert ends.acked(3) == [0, 1, 2]
        assert windows(ends.send()) == [(3, [1, 2, 3]) if in_flight == 1 else (2, [1, 2])]
    with pytest.raises(LocalProtocolError, match="at most 0 may be sent"):
        ends.core.send_batch(Batch([b""], [0]), 0.0)


@pytest.mark.rule("LJ-48")
@pytest.mark.rule("LJ-50")
@pytest.mark.rule("LJ-52")
def test_lj48_lj50_lj52_stream_mode_slides_and_wraps() -> None:
    """LJ-48, LJ-50, LJ-52: one W, numbers run on and wrap to 0, never more than W unacked; acks by distance mod 2**32."""
    ends = Ends(version=1, mode="stream", window=4, first_sequence=2**32 - 2)
    ends.put(10)
    assert windows(ends.send()) == [(4, [2**32 - 2, 2**32 - 1, 0, 1])]
    assert ends.acked(2**32 - 1) == [0, 1]
    assert ends.core.room == 2
    assert ends.acked(2**32 - 1) == []
    assert ends.acked(0) == [2]
    assert [number for _, numbers in windows(b"1W\0\0\0\4" + ends.send()) for number in numbers] == [2, 3, 4]
    assert ends.acked(4) == [3, 4, 5, 6]
    (refused,) = ends.hear(5)
    assert isinstance(refused, Refused)
    assert (refused.error.rule, refused.head) == ("LJ-52", ack(1, 5))
    assert refused.error.detail == "ack 5 is beyond the last event sent, 4"


@pytest.mark.rule("LJ-51")
def test_lj51_when_a_window_is_sent() -> None:
    """LJ-51: full, or as many octets as allowed, or the oldest event has waited long enough."""
    ends = Ends(window=3, linger=0.2)
    ends.put(2, now=1.0)
    assert ends.send(1.1, flush=False) == b""
    assert ends.queue.next_deadline() == 1.2
    assert [size for size, _ in windows(ends.send(1.2, flush=False))] == [2]
    ends.put(3, now=2.0)
    assert [size for size, _ in windows(ends.send(2.0, flush=False))] == [3]
    ends = Ends(max_bytes=60, linger=10)
    ends.put(5)  # of 19 octets
    assert [size for size, _ in windows(ends.send(0.0, flush=False))] == [3]


@pytest.mark.rule("LJ-52")
def test_lj52_acks_of_batches() -> None:
    """LJ-52: 0 restarts the clock, old ones are ignored, partial ones count, beyond the window is an error."""
    ends = Ends(window=4, pipelining=2)
    ends.put(8)
    ends.send()
    assert [type(event) for event in ends.hear(0)] == [KeepaliveReceived]
    assert ends.acked(2) == [0, 1]
    assert ends.hear(2) == []
    assert ends.hear(1) == []
    assert [type(event) for event in ends.hear(4)] == [EventsAcked, BatchDone]
    assert ends.acked(4) == [4, 5, 6, 7]
    assert ends.hear(4) == []
    assert ends.hear(0) == []
    assert len(ends.queue) == 0
    (refused,) = ends.hear(3)
    assert isinstance(refused, Refused)
    assert ends.core.state is WriterState.CLOSED
    ends = Ends(window=4)
    ends.put(4)
    ends.send()
    (refused,) = ends.hear(5)
    assert isinstance(refused, Refused)
    assert len(ends.core.unacked()[0].bodies) == 4


@pytest.mark.rule("LJ-52")
@pytest.mark.parametrize("data", [b"1A\0\0\0\1", b"2W\0\0\0\1", b"2", b"x", b"2B", b"2AXX", b""])
def test_lj52_what_is_no_ack_of_our_version(data: bytes) -> None:
    """LJ-52: anything that is no A frame of our version is an error, as soon as it can be seen; an end is an end."""
    core = WriterCore(WriterConfig(version=2), now=0.0)
    events = core.receive_data(data, 0.0)
    if data in (b"2", b"2AXX"):
        assert (events, core.receive_data(b"", 0.0)) == ([], [PeerClosed(clean=False)])
    elif not data:
        assert events == [PeerClosed(clean=True)]
    else:
        (refused,) = events
        assert isinstance(refused, Refused)
        assert refused.head == data
    assert core.state is WriterState.CLOSED
    assert core.receive_data(b"x", 0.0) == []


@pytest.mark.rule("LJ-58")
def test_lj58_a_drained_connection_ends_with_its_last_ack() -> None:
    """LJ-58: no window is sent any more, those in flight are acked, then it ends."""
    ends = Ends(window=2, pipelining=2)
    ends.put(4)
    ends.send()
    with pytest.raises(LocalProtocolError):
        ends.core.unacked()
    assert (ends.core.drain(0.0), ends.core.drain(0.0), ends.core.room) == ([], [], 0)
    assert len(ends.hear(2)) == 2
    assert ends.core.next_deadline() == 30.0
    assert ends.hear(2)[-1] == Finished("drained", 0)
    assert (ends.core.state, ends.core.unacked(), ends.core.next_deadline()) == (WriterState.CLOSED, [], None)
    idle = WriterCore(WriterConfig(), now=0.0)
    assert (idle.drain(0.0), idle.drain(0.0)) == ([Finished("drained", 0)], [])


@pytest.mark.rule("LJ-55")
def test_lj55_a_closed_connection_gives_back_what_is_in_flight() -> None:
    """LJ-55: it ends at once, draining or not, and only once."""
    for drained in (False, True):
        ends = Ends(window=2, pipelining=2)
        ends.put(3)
        ends.send()
        if drained:
            ends.core.drain(0.0)
        ends.hear(1)
        assert ends.core.close(0, "", 0.0) == [Finished("closed", 2)]
        assert (ends.core.close(0, "", 0.0), ends.core.connection_lost(0, "", 0.0), ends.hear(1)) == ([], [], [])
        assert [batch.tokens for batch in ends.core.unacked()] == [[1], [2]]


@pytest.mark.rule("LJ-53")
def test_lj53_the_clock_of_acks() -> None:
    """LJ-53: 30 s without an ack while something is in flight; octets taken of the oldest window start it again."""
    ends = Ends(window=2, pipelining=2)
    assert ends.core.next_deadline() is None
    ends.put(4)
    data = ends.send(10.0)
    half = len(data) // 2
    assert ends.core.next_deadline() == 40.0
    ends.core.bytes_taken(half, 20.0)
    assert ends.core.next_deadline() == 50.0
    ends.core.bytes_taken(half, 30.0)  # of the second window
    assert ends.core.next_deadline() == 50.0
    ends.hear(0, 45.0)
    ends.hear(1, 60.0)
    assert (ends.core.handle_timeout(89.9), ends.core.next_deadline()) == ([], 90.0)
    assert ends.core.handle_timeout(90.0) == [AckTimedOut(30.0)]
    assert (ends.core.state, ends.core.room, ends.core.next_deadline()) == (WriterState.CLOSED, 0, None)


@pytest.mark.rule("LJ-53")
def test_lj53_the_settings_say_how_long_an_ack_takes() -> None:
    """LJ-53: 4 s after the window was sent."""
    ends = Ends(window=2, ack_timeout=4.0)
    ends.put(2)
    ends.send(10.0)
    assert (ends.core.handle_timeout(13.9), ends.core.next_deadline()) == ([], 14.0)
    assert ends.core.handle_timeout(14.0) == [AckTimedOut(4.0)]


@pytest.mark.rule("LJ-55")
def test_lj55_what_is_unacked_goes_first_in_new_windows_from_1() -> None:
    """LJ-55: after a fault all unacked events are sent again, oldest first, before any newer one."""
    ends = Ends(window=3, pipelining=2)
    ends.put(6)
    ends.send()
    assert ends.acked(2) == [0, 1]
    ends.put(3)
    ends.lose()
    assert windows(ends.send()) == [(1, [1]), (3, [1, 2, 3])]
    assert ends.acked(1) == [2]
    assert windows(ends.send()) == [(3, [1, 2, 3])]
    assert (ends.acked(3), ends.acked(3), len(ends.queue)) == ([3, 4, 5], [6, 7, 8], 0)


@pytest.mark.rule("LJ-57")
def test_lj57_a_full_queue_waits_or_drops_what_was_never_sent() -> None:
    """LJ-57: events and octets are bounded; drop oldest or newest with a counter, never one that was sent."""
    ends = Ends(window=2, queue=2)
    ends.put(4)
    assert ends.queue.full
    with pytest.raises(LocalProtocolError, match="full"):
        ends.put(1)
    for drop, dropped in (("oldest", (2,)), ("newest", (4,))):
        ends = Ends(version=1, window=2, queue=2, drop=drop)
        ends.put(4)
        ends.send()
        assert ends.queue.put(encode_event({"n": "4"}, ends.config), 4, 0.0) == dropped
        assert (ends.queue.dropped, len(ends.queue)) == (1, 4)
    ends = Ends(max_bytes=90, queue=1)
    ends.put(5)  # of 19 octets
    assert ends.queue.full
    ends.send()
    ends.acked(4)
    assert not ends.queue.full


@pytest.mark.rule("LJ-59")
def test_lj59_what_cannot_be_sent_is_rejected_at_once() -> None:
    """LJ-59: an event that cannot be encoded or is too large never enters a window."""
    for event in ({"x": float("inf")}, {"x": object()}, {"x": "y" * 100}):
        with pytest.raises(EventRejected, match=r"cannot be encoded|max_frame"):
            encode_event(event, WriterConfig(max_frame=100))
    body = encode_event({"x": "y" * 82}, WriterConfig(max_frame=100))
    assert len(body) + 6 == 100


@pytest.mark.rule("LJ-57")
def test_lj57_events_that_were_dropped_fill_no_window() -> None:
    """LJ-57: the next event waits for its time, however much was dropped before it."""
    ends = Ends(queue=2, drop="oldest", max_bytes=200, linger=1.0)
    ends.put(50)
    while ends.queue:
        for size, _ in windows(ends.send()):
            ends.acked(size)
    ends.put(1)
    assert ends.send(0.5, flush=False) == b""
    assert windows(ends.send(1.0, flush=False)) == [(1, [1])]
    assert (ends.acked(1), ends.queue.dropped) == ([50], 29)


@pytest.mark.rule("LJ-59")
@pytest.mark.parametrize("on_stuck", ["keep", "reject"])
def test_lj59_a_window_that_ends_five_connections_is_sent_in_halves(on_stuck: str) -> None:
    """LJ-59: counted, then halved, one in flight, until the next ack; nothing is dropped unless the settings say so."""
    ends = Ends(window=4, pipelining=1, on_stuck=on_stuck)
    ends.put(8)
    sizes, rejected = [], []
    for _ in range(13):
        sizes.append([size for size, _ in windows(ends.send())])
        rejected += ends.lose()
    assert sizes == [[4]] * 5 + [[2]] + [[1]] * 5 + ([[1]] * 2 if on_stuck == "keep" else [[1], [1]])
    assert ends.queue.stuck_windows == 2, "the window, and the first event alone"
    assert rejected == ([0] if on_stuck == "reject" else [])
    assert ends.queue.stuck
    ends.send()
    ends.acked(1)
    assert not ends.queue.stuck
    left = []
    while ends.queue:
        ends.send()
        left += ends.acked(1) or ends.acked(2) or ends.acked(3) or ends.acked(4)
    assert left == [1, 2, 3, 4, 5, 6, 7] if on_stuck == "keep" else left == [2, 3, 4, 5, 6, 7]
