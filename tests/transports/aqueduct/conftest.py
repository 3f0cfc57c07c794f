"""A core with a peer whose octets the test writes, and two cores on a network that the test lets through."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, Literal

import attrs
import pytest

from levada.transports.aqueduct import (
    AqueductConfig,
    AqueductCore,
    CloseConnection,
    ConnectionEnded,
    DatagramData,
    Delivery,
    Event,
    Frame,
    OpenStream,
    Output,
    ReceiverHalf,
    ReceiverState,
    ResetStream,
    SenderHalf,
    SenderState,
    StopStream,
    StreamData,
    StreamDone,
    decode_frame,
)
from levada.transports.aqueduct.frames import VERSION, ConnectionControl, Version


def frames_of(data: bytes) -> list[Frame]:
    """Decode octets that hold whole frames."""
    frames = []
    at = 0
    while at < len(data):
        frame, at = decode_frame(data, at)
        frames.append(frame)
    return frames


def state_of(half: SenderHalf | ReceiverHalf) -> SenderState | ReceiverState:
    """Look at a state that a type checker believes to know."""
    return half.state


class Wire:
    """One core; the test is its peer, frame by frame."""

    def __init__(
        self, *, client: bool, config: AqueductConfig | None = None, greet: bool = True, **options: Any
    ) -> None:
        self.core = AqueductCore(client=client, config=config, **options)
        self.now = 0.0
        self.events: list[Event] = []
        self.octets: dict[int, bytes] = defaultdict(bytes)
        self.finished: set[int] = set()
        self.resets: dict[int, int] = {}
        self.stops: dict[int, int] = {}
        self.done: set[int] = set()
        self.datagrams: list[bytes] = []
        self.closed: CloseConnection | None = None
        self._next = {"uni": 3 if client else 2, "bidi": 1 if client else 0}
        if greet:
            self.events += self.core.handshake_completed(1170)
            self.flush()
            if client:
                self.give(0, VERSION, ConnectionControl())
            else:
                self.give(self.bidi(), VERSION, ConnectionControl())
                self.core.accept()
            self.flush()

    def uni(self) -> int:
        """Number of the peer's next unidirectional stream."""
        self._next["uni"] += 4
        return self._next["uni"] - 4

    def bidi(self) -> int:
        """Number of the peer's next bidirectional stream."""
        self._next["bidi"] += 4
        return self._next["bidi"] - 4

    def flush(self) -> None:
        """End a turn."""
        self.events += self.core.take_events()
        for out in self.core.data_to_send(self.now):
            match out:
                case StreamData(stream_id, data, fin):
                    self.octets[stream_id] += data
                    if fin:
                        self.finished.add(stream_id)
                case ResetStream(stream_id, code):
                    self.resets[stream_id] = code
                case StopStream(stream_id, code):
                    self.stops[stream_id] = code
                case StreamDone(stream_id):
                    self.done.add(stream_id)
                case DatagramData(data):
                    self.datagrams.append(data)
                case CloseConnection():
                    self.closed = out
                case OpenStream():
                    pass

    def give(self, stream_id: int, *frames: Frame | bytes, fin: bool = False) -> int:
        """Send frames to the core."""
        data = b"".join(frame if isinstance(frame, bytes) else frame.encode() for frame in frames)
        self.events += self.core.receive_stream_data(stream_id, data, fin, self.now)
        self.flush()
        return stream_id

    def give_datagram(self, *frames: Frame | bytes) -> None:
        data = b"".join(frame if isinstance(frame, bytes) else frame.encode() for frame in frames)
        self.events += self.core.receive_datagram(data, self.now)
        self.flush()

    def reset(self, stream_id: int, code: int) -> None:
        self.events += self.core.stream_reset(stream_id, code, self.now)
        self.flush()

    def stop(self, stream_id: int, code: int = 0) -> None:
        self.events += self.core.stream_stopped(stream_id, code, self.now)
        self.flush()

    def wait(self, seconds: float) -> None:
        """Let time pass; every deadline is met on the way."""
        self.now, end = self.now, self.now + seconds
        while (at := self.core.next_deadline()) is not None and at <= end:
            self.now = max(at, self.now)
            self.events += self.core.handle_timeout(self.now)
            self.flush()
        self.now = end

    def sent(self, stream_id: int) -> list[Frame]:
        """Frames that the core has sent on a stream."""
        return [frame for frame in frames_of(self.octets[stream_id]) if not isinstance(frame, Version)]

    def take_sent(self, stream_id: int) -> list[Frame]:
        """Frames that the core has sent on a stream since the last call."""
        frames = self.sent(stream_id)
        self.octets[stream_id] = b""
        return frames

    def broken(self) -> str:
        """The rule for which the core has closed the connection."""
        self.flush()
        if self.closed is None:
            return "none"
        assert isinstance(self.events[-1], ConnectionEnded)
        error = self.events[-1].error
        assert error is not None
        assert self.closed.reason == f"{error.rule}: {error.detail}"
        assert not self.core.halves
        return error.rule

    @property
    def sender(self) -> SenderHalf:
        """The entrypoint of a client."""
        assert isinstance(self.core.entrypoint, SenderHalf)
        return self.core.entrypoint

    @property
    def receiver(self) -> ReceiverHalf:
        """The entrypoint of a server."""
        assert isinstance(self.core.entrypoint, ReceiverHalf)
        return self.core.entrypoint


@attrs.define
class _Direction:
    """What one side has sent on one stream and the other has not got."""

    data: bytearray = attrs.Factory(bytearray)
    fin: bool = False
    reset: int | None = None
    over: bool = False


class Side:
    """One core and the ways out of it: streams independent of each other, datagrams, stops."""

    def __init__(self, core: AqueductCore) -> None:
        self.core = core
        self.events: list[Event] = []
        self.streams: dict[int, _Direction] = {}
        self.stops: list[tuple[int, int]] = []
        self.datagrams: deque[bytes] = deque()
        self.closed: CloseConnection | None = None
        self.opened: set[int] = set()
        self.done: set[int] = set()
        self.all_sent: dict[tuple[int, str], bytearray] = defaultdict(bytearray)


class Pair:
    """A client and a server. Nothing arrives until the test, or chance, says so."""

    def __init__(
        self,
        *,
        client: AqueductConfig | None = None,
        server: AqueductConfig | None = None,
        greet: bool = True,
        delivery: type[Delivery] = Delivery,
    ) -> None:
        self.client = Side(AqueductCore(client=True, config=client, delivery=delivery))
        self.server = Side(AqueductCore(client=False, config=server, delivery=delivery))
        self.sides = (self.client, self.server)
        self.now = 0.0
        self.first: bool | None = None
        """Whether unidirectional streams, or the others, mostly go first."""
        for side in self.sides:
            side.events += side.core.handshake_completed(1170)
        if greet:
            self.run()
            self.server.core.accept()
            self.run()

    def peer(self, side: Side) -> Side:
        return self.server if side is self.client else self.client

    def flush(self, side: Side) -> list[Output]:
        """Put on the way what a core has to send."""
        outputs = side.core.data_to_send(self.now)
        for out in outputs:
            match out:
                case OpenStream(stream_id, unidirectional, _):
                    kind = (0 if side is self.client else 1) + (2 if unidirectional else 0)
                    assert stream_id % 4 == kind
                    assert stream_id not in side.opened
                    side.opened.add(stream_id)
                case StreamData(stream_id, data, fin):
                    ours = (stream_id & 1) == (side is self.server)
                    assert stream_id in (side.opened if ours else self.peer(side).opened)
                    assert stream_id not in side.done
                    way = side.streams.setdefault(stream_id, _Direction())
                    assert not way.fin
                    assert data or fin
                    way.data += data
                    way.fin = fin
                    side.all_sent[stream_id, "stream"] += data
                case ResetStream(stream_id, code):
                    assert stream_id not in side.done
                    way = side.streams.setdefault(stream_id, _Direction())
                    if not way.over:
                        way.reset = code
                case StopStream(stream_id, code):
                    side.stops.append((stream_id, code))
                case DatagramData(data):
                    assert len(data) <= side.core.datagram_limit
                    side.datagrams.append(data)
                case StreamDone(stream_id):
                    assert stream_id not in side.done
                    side.done.add(stream_id)
                case CloseConnection():
                    side.closed = out
        return outputs

    def deliver_stream(self, side: Side, stream_id: int, octets: int | None = None) -> None:
        """Let octets of a stream arrive, its end with the last of them."""
        way = side.streams[stream_id]
        data = bytes(way.data[:octets])
        del way.data[:octets]
        fin = way.fin and not way.data
        way.over = way.over or fin
        other = self.peer(side)
        if data or fin:
            other.events += other.core.receive_stream_data(stream_id, data, fin, self.now)

    def deliver_reset(self, side: Side, stream_id: int) -> None:
        """Let the reset of a stream arrive; what had not arrived never does."""
        way = side.streams[stream_id]
        assert way.reset is not None
        code, way.reset, way.over = way.reset, None, True
        way.data.clear()
        other = self.peer(side)
        other.events += other.core.stream_reset(stream_id, code, self.now)

    def deliver_stop(self, side: Side) -> None:
        """Let the oldest request to stop arrive; the peer's QUIC resets the direction with the same code."""
        stream_id, code = side.stops.pop(0)
        other = self.peer(side)
        way = other.streams.setdefault(stream_id, _Direction())
        if not way.over:
            way.reset = code if way.reset is None else way.reset
        other.events += other.core.stream_stopped(stream_id, code, self.now)

    def pending(self, side: Side) -> list[tuple[Literal["data", "reset", "stop", "datagram"], int]]:
        """What could arrive next."""
        found: list[tuple[Literal["data", "reset", "stop", "datagram"], int]] = []
        for stream_id, way in side.streams.items():
            if way.over:
                continue
            if way.data or way.fin:
                found.append(("data", stream_id))
            if way.reset is not None:
                found.append(("reset", stream_id))
        if side.stops:
            found.append(("stop", 0))
        if side.datagrams:
            found.append(("datagram", 0))
        return found

    def step(self, side: Side, rng: random.Random | None = None) -> bool:
        """Let one thing arrive; data before the reset of its stream, unless chance wants it otherwise."""
        pending = self.pending(side)
        if not pending:
            return False
        if rng and self.first is not None and rng.random() < 0.8:
            pending = [item for item in pending if bool(item[1] & 2) == self.first] or pending
        what, stream_id = rng.choice(pending) if rng else pending[0]
        match what:
            case "data":
                size = len(side.streams[stream_id].data)
                self.deliver_stream(side, stream_id, rng.randint(0, size) if rng and rng.random() < 0.5 else None)
            case "reset":
                self.deliver_reset(side, stream_id)
            case "stop":
                self.deliver_stop(side)
            case "datagram":
                other = self.peer(side)
                if rng:
                    side.datagrams.rotate(rng.randrange(len(side.datagrams)))
                data = side.datagrams.popleft()
                if not (rng and rng.random() < 0.3):
                    other.events += other.core.receive_datagram(data, self.now)
        return True

    def collect(self) -> None:
        for side in self.sides:
            side.events += side.core.take_events()

    def run(self) -> None:
        """Let everything arrive, without time passing."""
        moved = True
        while moved:
            moved = False
            for side in self.sides:
                moved = bool(self.flush(side)) or moved
                while self.step(side):
                    moved = True
        self.collect()

    def wait(self, seconds: float) -> None:
        """Let time pass and everything arrive."""
        end = self.now + seconds
        self.run()
        while (
            at := min((t for s in self.sides if (t := s.core.next_deadline()) is not None), default=None)
        ) is not None:
            if at > end:
                break
            self.now = max(at, self.now)
            for side in self.sides:
                side.events += side.core.handle_timeout(self.now)
            self.run()
        self.now = end

    @property
    def sender(self) -> SenderHalf:
        """The client's entrypoint."""
        assert isinstance(self.client.core.entrypoint, SenderHalf)
        return self.client.core.entrypoint

    @property
    def receiver(self) -> ReceiverHalf:
        """The server's entrypoint."""
        assert isinstance(self.server.core.entrypoint, ReceiverHalf)
        return self.server.core.entrypoint

    def leftovers(self) -> dict[str, object]:
        """What there is apart from the connection itself and the entrypoint's halves while it is open."""
        left: dict[str, object] = {}
        for name, side in (("client", self.client), ("server", self.server)):
            core = side.core
            left |= {
                f"{name} {what}": value
                for what, value in {
                    "halves": core.halves,
                    "unclaimed": core.unclaimed,
                    "tombstones": core.links.tombstones,
                    "streams": {k: v for k, v in core.streams.table.items() if k},
                    "held": core.held,
                    "unacked": core.unacked,
                    "crowded": core.crowded,
                    "closed": side.closed,
                    "to do": core.links.todo,
                    "ended streams": core.streams.done,
                }.items()
                if value
            }
        return left


@pytest.fixture
def wire() -> Callable[..., Wire]:
    """Make a `Wire`."""
    return Wire


@pytest.fixture
def pair() -> Callable[..., Pair]:
    """Make a `Pair`."""
    return Pair
