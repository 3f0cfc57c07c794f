"""Two cores over pipes that cut anywhere, against a model of twenty lines: what was sent arrives, in order, once."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from levada.transports.qmux import (
    DatagramReceived,
    Ended,
    QmuxConfig,
    QmuxCore,
    StreamAcked,
    StreamData,
    StreamOpened,
    StreamOver,
    StreamReset,
    StreamStopped,
)

SIDES = ("client", "server")


@attrs.define(eq=False)
class Direction:
    """One direction of a stream, as both ends see it."""

    sent: bytearray = attrs.field(factory=bytearray)
    """What the sender has queued."""
    finished: bool = False
    reset: bool = False
    """The sender gave up, or was stopped."""
    stopped: bool = False
    """The receiver wants no more."""
    got: bytearray = attrs.field(factory=bytearray)
    ended: bool = False
    """The receiver has seen the end or a reset."""
    taken: int = 0
    acked_to: int = -1
    """Bytes that the sender has asked an acknowledgement for; -1 for none."""


class PairMachine(RuleBasedStateMachine):
    """Both owners do what owners do; the pipes deliver what they like."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.cores: dict[str, QmuxCore] = {}
        self.pipes = {"client": bytearray(), "server": bytearray()}
        """Bytes on their way to a side."""
        self.streams: dict[tuple[str, int], Direction] = {}
        """By the side that sends, and the number."""
        self.datagrams: dict[str, list[bytes]] = {"client": [], "server": []}
        self.known: dict[str, set[int]] = {"client": set(), "server": set()}
        """Streams that a side has opened or seen."""
        self.over: dict[str, set[int]] = {"client": set(), "server": set()}

    @initialize(
        window=st.integers(1, 3000), connection=st.integers(1, 4000), streams=st.integers(0, 3), largest=st.booleans()
    )
    def connect(self, window: int, connection: int, streams: int, largest: bool) -> None:
        config = QmuxConfig(
            stream_window=window,
            connection_window=connection,
            max_streams=streams,
            max_streams_unidirectional=3 - streams,
            datagram_queue=3,
            keepalive_without_streams=True,
        )
        self.cores = {
            "client": QmuxCore(client=True, now=0.0, config=config),
            "server": QmuxCore(client=False, now=0.0, config=QmuxConfig() if largest else config),
        }

    def other(self, side: str) -> str:
        return "server" if side == "client" else "client"

    def note(self, side: str, events: list[Any]) -> None:
        """Apply the events of a core to the model."""
        other = self.other(side)
        for event in events:
            assert not isinstance(event, Ended), event
            if isinstance(event, StreamOpened):
                self.cores[side].accepted(event.stream_id)
                self.known[side].add(event.stream_id)
            elif isinstance(event, StreamData):
                direction = self.streams[other, event.stream_id]
                assert not direction.ended
                assert not direction.stopped
                direction.got += event.data
                direction.ended = event.fin
                assert direction.sent.startswith(direction.got)
                if event.fin:
                    assert direction.finished
                    assert direction.got == direction.sent
            elif isinstance(event, StreamReset):
                direction = self.streams[other, event.stream_id]
                assert direction.reset
                assert event.code == 7
                direction.ended = True
            elif isinstance(event, StreamStopped):
                direction = self.streams[side, event.stream_id]
                assert direction.stopped
                direction.reset = True
            elif isinstance(event, StreamAcked):
                direction = self.streams[side, event.stream_id]
                assert direction.acked_to >= 0
                if not direction.stopped and not direction.reset:
                    assert len(direction.got) >= direction.acked_to
                direction.acked_to = -1
            elif isinstance(event, StreamOver):
                assert event.stream_id not in self.over[side]
                self.over[side].add(event.stream_id)
            elif isinstance(event, DatagramReceived):
                assert event.data == self.datagrams[other].pop(0)

    @rule(side=st.sampled_from(SIDES), unidirectional=st.booleans(), priority=st.integers(0, 2))
    def open(self, side: str, unidirectional: bool, priority: int) -> None:
        core = self.cores[side]
        credit = core.stream_credit(unidirectional=unidirectional)
        stream_id = core.open_stream(unidirectional=unidirectional, priority=priority)
        assert (stream_id is None) == (credit == 0)
        if stream_id is not None:
            self.known[side].add(stream_id)
            self.streams[side, stream_id] = Direction()
            if not unidirectional:
                self.streams[self.other(side), stream_id] = Direction()

    def sending(self, data: st.DataObject) -> tuple[str, int, Direction] | None:
        """Choose a direction in which its sender may still send."""
        open_ones = [
            (side, number)
            for (side, number), direction in self.streams.items()
            if not direction.finished and not direction.reset and number in self.known[side]
        ]
        if not open_ones:
            return None
        side, number = data.draw(st.sampled_from(open_ones))
        return side, number, self.streams[side, number]

    @rule(data=st.data(), size=st.integers(0, 5000), fin=st.booleans())
    def send(self, data: st.DataObject, size: int, fin: bool) -> None:
        chosen = self.sending(data)
        if chosen is not None:
            side, number, direction = chosen
            octets = bytes((len(direction.sent) + i) % 251 for i in range(size))
            self.cores[side].send(number, octets, fin)
            direction.sent += octets
            direction.finished = fin

    @rule(data=st.data())
    def reset(self, data: st.DataObject) -> None:
        chosen = self.sending(data)
        if chosen is not None:
            side, number, direction = chosen
            self.cores[side].reset(number, 7)
            direction.reset = True

    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        chosen = self.sending(data)
        if chosen is not None and chosen[2].acked_to < 0:
            side, number, direction = chosen
            direction.acked_to = len(direction.sent)
            self.cores[side].want_acked(number)

    @rule(data=st.data(), all_of_it=st.booleans())
    def take(self, data: st.DataObject, all_of_it: bool) -> None:
        held = [key for key, direction in self.streams.items() if len(direction.got) > direction.taken]
        if held:
            side, number = data.draw(st.sampled_from(held))
            direction = self.streams[side, number]
            left = len(direction.got) - direction.taken
            size = left if all_of_it else data.draw(st.integers(1, left))
            self.cores[self.other(side)].consumed(number, size)
            direction.taken += size

    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        seen = [
            key
            for key, direction in self.streams.items()
            if direction.got and not direction.ended and not direction.stopped
        ]
        if seen:
            side, number = data.draw(st.sampled_from(seen))
            self.streams[side, number].stopped = True
            self.cores[self.other(side)].stop(number, 7)

    @rule(side=st.sampled_from(SIDES), octets=st.binary(max_size=50))
    def datagram(self, side: str, octets: bytes) -> None:
        core = self.cores[side]
        if core.max_datagram_size and core.send_datagram(octets):
            self.datagrams[side].append(octets)

    @rule(side=st.sampled_from(SIDES), budget=st.integers(1, 100_000))
    def write(self, side: str, budget: int) -> None:
        had = self.cores[side].has_output
        pieces = self.cores[side].data_to_send(self.now, budget)
        assert had or not pieces
        self.pipes[self.other(side)] += b"".join(pieces)
        self.note(side, self.cores[side].take_events())

    @rule(side=st.sampled_from(SIDES), data=st.data())
    def deliver(self, side: str, data: st.DataObject) -> None:
        pipe = self.pipes[side]
        if pipe:
            size = data.draw(st.integers(1, len(pipe)))
            octets = bytes(pipe[:size])
            del pipe[:size]
            self.note(side, self.cores[side].receive_data(octets, self.now))

    @rule()
    def wake(self) -> None:
        """Time passes up to the next deadline of either side; a pair that is delivered is never idle."""
        self.settle()
        deadlines = [core.next_deadline() for core in self.cores.values()]
        self.now = max(self.now, min(deadline for deadline in deadlines if deadline is not None))
        for side, core in self.cores.items():
            self.note(side, core.handle_timeout(self.now))
        self.settle()

    def settle(self) -> None:
        """Deliver everything."""
        moved = True
        while moved:
            moved = False
            for side, core in self.cores.items():
                octets = b"".join(core.data_to_send(self.now))
                self.note(side, core.take_events())
                pipe = self.pipes[self.other(side)]
                pipe += octets
                if pipe:
                    moved = True
                    data = bytes(pipe)
                    pipe.clear()
                    self.note(self.other(side), self.cores[self.other(side)].receive_data(data, self.now))

    @invariant()
    def what_arrived_is_a_prefix(self) -> None:
        for direction in self.streams.values():
            assert direction.sent.startswith(direction.got)

    def teardown(self) -> None:
        """All streams come to an end, everything arrives, every credit comes back."""
        if not self.cores:
            return
        self.settle()
        for (side, number), direction in list(self.streams.items()):
            if not direction.finished and not direction.reset and number in self.known[side]:
                direction.finished = True
                self.cores[side].send(number, b"", True)
        progress = True
        while progress:
            self.settle()
            progress = False
            for (side, number), direction in self.streams.items():
                if len(direction.got) > direction.taken:
                    progress = True
                    self.cores[self.other(side)].consumed(number, len(direction.got) - direction.taken)
                    direction.taken = len(direction.got)
        for direction in self.streams.values():
            assert direction.ended or direction.stopped or not (direction.finished or direction.reset)
            if direction.finished and not direction.reset and not direction.stopped:
                assert direction.got == direction.sent
            assert direction.acked_to < 0 or direction.reset
        for side in SIDES:
            assert self.cores[side].queued == 0


TestPairMachine = pytest.mark.rule("QX-2", "QX-11", "QX-23", "QX-27", "QX-28", "QX-31", "D-11", "D-12", "D-14", "D-23")(
    PairMachine.TestCase
)
