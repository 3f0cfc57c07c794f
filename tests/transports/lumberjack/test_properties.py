"""Two cores and a wire that is cut at any octet: every event at least once, none acked and lost, order kept per connection."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from levada.transports.lumberjack import (
    EventsAcked,
    PeerClosed,
    ReaderConfig,
    ReaderCore,
    ReaderEvent,
    ReaderState,
    Refused,
    SendQueue,
    UnitReady,
    WriterConfig,
    WriterCore,
    WriterEvent,
    encode_event,
    encode_window,
)

TEXT = st.text(max_size=8)


class Wire(RuleBasedStateMachine):
    """A queue that outlives its connections, a sink that commits when it likes, and losses anywhere."""

    @initialize(
        mode=st.sampled_from(["batch 1", "batch 2", "stream"]),
        window=st.integers(1, 5),
        compression=st.sampled_from([0, 3]),
        partial=st.sampled_from([None, 1, 2]),
        max_cost=st.sampled_from([1_000, 2_500, 10**6]),
        max_window=st.sampled_from([2, 1000]),
    )
    def begin(
        self, mode: str, window: int, compression: int, partial: int | None, max_cost: int, max_window: int
    ) -> None:
        self.writer_config = WriterConfig(
            version=2 if mode == "batch 2" else 1,
            mode="stream" if mode == "stream" else "batch",
            window=window,
            compression=compression,
            queue=10_000,
        )
        self.reader_config = ReaderConfig(partial_ack_every=partial, max_cost=max_cost, max_window=max_window)
        self.now = 0.0
        self.queue = SendQueue(self.writer_config)
        self.sent = 0
        self.acked: list[int] = []
        self.stored: set[int] = set()
        self.connect()

    def connect(self) -> None:
        self.writer = WriterCore(self.writer_config, now=self.now, first_sequence=2**32 - 3)
        self.reader = ReaderCore(self.reader_config, now=self.now)
        self.to_reader = bytearray()
        self.to_writer = bytearray()
        self.at_sink: list[UnitReady] = []
        self.seen: list[int] = []

    def hear_reader(self, events: list[ReaderEvent]) -> None:
        for event in events:
            assert not isinstance(event, Refused), event
            if isinstance(event, UnitReady):
                self.at_sink.append(event)
                self.seen += [int(item["n"]) for item in event.events]
        self.to_writer += b"".join(self.reader.data_to_send(self.now))
        if self.reader.wants_data:
            self.reader.reading(self.now)

    def hear_writer(self, events: list[WriterEvent]) -> None:
        for event in events:
            assert not isinstance(event, Refused), event
            if isinstance(event, EventsAcked):
                self.acked += event.tokens
                self.queue.acked(event)

    @rule(count=st.integers(1, 7), text=TEXT)
    def take_events(self, count: int, text: str) -> None:
        for _ in range(count):
            event = {"n": str(self.sent), "text": text}
            self.queue.put(encode_event(event, self.writer_config), self.sent, self.now)
            self.sent += 1

    @rule(flush=st.booleans())
    def send(self, flush: bool) -> None:
        batch = self.queue.next_batch(self.now, self.writer.room, flush=flush)
        if batch is not None:
            self.writer.send_batch(batch, self.now)
            self.to_reader += b"".join(self.writer.data_to_send(self.now))

    @precondition(lambda self: self.to_reader and self.reader.wants_data)
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, len(self.to_reader)), label="octets")
        part = bytes(self.to_reader[:count])
        del self.to_reader[:count]
        self.hear_reader(self.reader.receive_data(part, self.now))

    @precondition(lambda self: self.reader.has_work)
    @rule()
    def work(self) -> None:
        self.hear_reader(self.reader.work(self.now))

    @precondition(lambda self: self.at_sink)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        unit = self.at_sink.pop(data.draw(st.integers(0, len(self.at_sink) - 1), label="unit"))
        self.stored |= {int(item["n"]) for item in unit.events}
        self.reader.commit(unit.number, self.now)
        self.hear_reader(self.reader.take_events())

    @precondition(lambda self: self.to_writer)
    @rule(data=st.data())
    def deliver_acks(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, len(self.to_writer)), label="octets")
        part = bytes(self.to_writer[:count])
        del self.to_writer[:count]
        self.hear_writer(self.writer.receive_data(part, self.now))

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 3.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.hear_reader(self.reader.handle_timeout(self.now))
        if self.reader.state is ReaderState.CLOSED:
            self.lose(0)

    @rule(part=st.integers(0, 10_000))
    def lose(self, part: int) -> None:
        """The connection is lost; a part of what was under way arrives, then both sides know."""
        count = part % (len(self.to_reader) + 1)
        if self.reader.wants_data and count:
            self.hear_reader(self.reader.receive_data(bytes(self.to_reader[:count]), self.now))
        events = self.reader.connection_lost(0, "", self.now)
        self.hear_reader(events)
        while self.reader.has_work:
            self.hear_reader(self.reader.work(self.now))
        for unit in self.at_sink:  # the sink may well go on with what it has
            if part % 2:
                self.stored |= {int(item["n"]) for item in unit.events}
        self.writer.close(0, "", self.now)
        self.queue.give_back(self.writer.unacked())
        self.connect()

    @invariant()
    def what_is_acked_is_stored(self) -> None:
        if hasattr(self, "acked"):
            assert set(self.acked) <= self.stored

    @invariant()
    def order_is_kept_on_a_connection(self) -> None:
        if hasattr(self, "seen"):
            assert self.seen == sorted(set(self.seen))

    def teardown(self) -> None:
        """With a good wire everything gets through."""
        if not hasattr(self, "queue"):
            return
        for _ in range(100_000):
            if not self.queue:
                break
            self.send(flush=True)
            if self.reader.has_work:
                self.work()
            elif self.to_reader and self.reader.wants_data:
                self.hear_reader(self.reader.receive_data(bytes(self.to_reader), self.now))
                self.to_reader.clear()
            elif self.at_sink:
                unit = self.at_sink.pop(0)
                self.stored |= {int(item["n"]) for item in unit.events}
                self.reader.commit(unit.number, self.now)
                self.hear_reader(self.reader.take_events())
            elif self.to_writer:
                self.hear_writer(self.writer.receive_data(bytes(self.to_writer), self.now))
                self.to_writer.clear()
            else:
                self.wait(1.0)
        assert sorted(set(self.acked)) == list(range(self.sent)) == sorted(self.stored)
        assert len(self.acked) == self.sent
        assert self.reader.held == 0 or self.reader.state is ReaderState.OPEN


TestWire = Wire.TestCase


VALUES: Any = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.rule("LJ-7")
@given(pairs=st.dictionaries(st.binary(max_size=20), st.binary(max_size=40), max_size=6))
def test_lj7_any_octets_come_back(pairs: dict[bytes, bytes]) -> None:
    """LJ-7: keys and values survive, whatever octets they are."""
    event = {
        key.decode("utf-8", "surrogateescape"): value.decode("utf-8", "surrogateescape") for key, value in pairs.items()
    }
    config = WriterConfig(version=1)
    assert exchange(config, [event]) == [event]


@pytest.mark.ci
@pytest.mark.rule("LJ-11")
@given(events=st.lists(st.dictionaries(st.text(), VALUES, max_size=4), min_size=1, max_size=5))
def test_lj11_any_objects_come_back(events: list[dict[str, Any]]) -> None:
    """LJ-11: an object is an event, whatever is in it."""
    assert exchange(WriterConfig(version=2), events) == events


def exchange(config: WriterConfig, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Send events over two cores and a perfect wire; return what arrived."""
    queue, writer, reader = SendQueue(config), WriterCore(config, now=0.0), ReaderCore(ReaderConfig(), now=0.0)
    for event in events:
        queue.put(encode_event(event, config), None, 0.0)
    batch = queue.next_batch(0.0, writer.room, flush=True)
    assert batch is not None
    writer.send_batch(batch, 0.0)
    found = reader.receive_data(b"".join(writer.data_to_send(0.0)), 0.0)
    while reader.has_work:
        found += reader.work(0.0)
    (unit,) = found
    assert isinstance(unit, UnitReady)
    reader.commit(unit.number, 0.0)
    (acked, _) = writer.receive_data(b"".join(reader.data_to_send(0.0)), 0.0)
    assert isinstance(acked, EventsAcked)
    assert len(acked.tokens) == len(events)
    return unit.events


@given(
    data=st.binary(max_size=200),
    head=st.sampled_from([b"", b"1", b"2", b"1D", b"1J", b"2J", b"1C", b"2C", b"1W\0\0\0\1"]),
)
def test_any_octets_are_understood_or_refused(data: bytes, head: bytes) -> None:
    reader = ReaderCore(ReaderConfig(), now=0.0)
    found = reader.receive_data(head + data or b"\0", 0.0)
    while reader.has_work:
        found += reader.work(0.0)
    assert all(isinstance(event, UnitReady) or reader.state is not ReaderState.OPEN for event in found)
    assert reader.held <= 64 * 1024


@given(data=st.binary(min_size=1, max_size=40))
def test_a_writer_understands_or_refuses_any_octets(data: bytes) -> None:
    writer = WriterCore(WriterConfig(), now=0.0)
    found = writer.receive_data(data, 0.0)
    assert all(isinstance(event, Refused | PeerClosed) for event in found)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 9) | st.sampled_from(["", "{[:,", '"', "x" * 300]),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.sampled_from("abcdefgh"), inner, max_size=8),
    max_leaves=30,
)


def least_cost(value: object) -> int:
    """What LJ-42 says of a value without its text: 72 for each comma and each list, 256 for each object, 128 for each field."""
    if isinstance(value, dict):
        return 256 + 128 * len(value) + 72 * max(0, len(value) - 1) + sum(map(least_cost, value.values()))
    if isinstance(value, list):
        return 72 * max(1, len(value)) + sum(map(least_cost, value))
    return 0


@pytest.mark.ci
@pytest.mark.rule("LJ-42")
@given(st.lists(JSON, min_size=1, max_size=12), st.booleans())
def test_lj42_events_of_a_read_cost_no_less_than_each_by_itself(values: list[Any], compact: bool) -> None:
    """LJ-42: however objects with lists and objects in them, and those without, are mixed in it."""
    texts = [json.dumps(value, separators=(",", ":") if compact else None).encode() for value in values]
    data = encode_window(2, len(texts))
    data += b"".join(struct.pack(">2sII", b"2J", 1, len(text)) + text for text in texts)
    (unit,) = ReaderCore(ReaderConfig(), now=0.0).receive_data(data, 0.0)
    assert isinstance(unit, UnitReady)
    least = sum(256 + 4 * len(text) + least_cost(value) for text, value in zip(texts, values, strict=True))
    assert unit.cost > least - len(values)  # shares are rounded
    assert unit.events == [value if isinstance(value, dict) else {"value": value} for value in values]
