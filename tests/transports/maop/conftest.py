"""A core with a peer whose octets the test writes, and two cores wired to each other."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any

import pytest

from levada.transports.maop import (
    Capability,
    CloseConnection,
    Event,
    HandlerSpec,
    MaopConfig,
    MaopCore,
    OpenStream,
    Operation,
    Output,
    ResetStream,
    RoomWanted,
    SetPriority,
    StopStream,
    StreamData,
    Version,
    decode_operations,
)
from levada.transports.maop.authentication import Authentication, Result

SESSION = bytes(range(16))


@pytest.fixture(autouse=True)
def no_traceback(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing that a peer sends ends in a traceback in a log: a core writes to none."""
    yield
    assert caplog.get_records("call") == []


PLAIN = {100: HandlerSpec(), 101: HandlerSpec(responses={0, 42})}


def random_bytes(size: int) -> bytes:
    """Octets that are the same each time."""
    return bytes(i % 256 for i in range(size))


def authentication(**changes: Any) -> Authentication:
    """What a plain client sends."""
    fields: dict[str, Any] = {
        "auth_type": "Bearer",
        "token": b"secret",
        "pairs": {},
        "version": Version(1, 0, 0),
        "vendor": "acme",
    }
    return Authentication(**fields | changes)


def give_room(core: MaopCore, events: list[Event], now: float) -> bool:
    """Give the streams room that the core waits for; say whether there were any."""
    wanted = [event for event in events if isinstance(event, RoomWanted)]
    events[:] = [event for event in events if not isinstance(event, RoomWanted)]
    for event in wanted:
        events += core.has_room(event.stream_id, now=now)
    return bool(wanted)


class Wire:
    """One core; the test is its peer, octet by octet.

    Args:
        client: whether the core is one.
        capabilities: what the test announces as the peer.
        approve: whether authentication is over when the constructor returns.
    """

    def __init__(
        self,
        *,
        client: bool = False,
        config: MaopConfig | None = None,
        capabilities: Capability | None = None,
        approve: bool = True,
        roles: frozenset[str] = frozenset(),
        **options: Any,
    ) -> None:
        options.setdefault("handlers", PLAIN)
        self.core = MaopCore(client=client, config=config, random_bytes=random_bytes, **options)
        self.now = 0.0
        self.events: list[Event] = []
        self.octets: dict[int, bytes] = defaultdict(bytes)
        self.finished: set[int] = set()
        self.resets: dict[int, int] = {}
        self.stops: dict[int, int] = {}
        self.opened: list[OpenStream] = []
        self.priorities: dict[int, int] = {}
        self.closed: CloseConnection | None = None
        self._next = {"uni": 3 if client else 2, "bidi": 1 if client else 4}
        self._read: dict[int, int] = defaultdict(int)
        self.idempotency = bool(self.core.config.capabilities & (capabilities or 0) & Capability.IDEMPOTENCY)
        self.events += self.core.handshake_completed(token=b"secret", now=0.0) if client else []
        if not client:
            self.events += self.core.handshake_completed(now=0.0)
        self.flush()
        if approve:
            build = "" if capabilities is None else f"cap.{capabilities:016x}"
            if client:
                self.give(0, Result(Version(1, 0, 0, "", build), "acme", SESSION, "c-42").encode(), fin=True)
            else:
                pairs = {} if capabilities is None else {"maop-capabilities": f"{capabilities:x}"}
                self.give(0, authentication(pairs=pairs).encode(), fin=True)
                self.events += self.core.approve_client("c-42", roles=roles, now=self.now)
                self.flush()
            self.events.clear()
        self.control = self.bidi() if approve else -1

    def uni(self) -> int:
        """Number of the peer's next unidirectional stream."""
        self._next["uni"] += 4
        return self._next["uni"] - 4

    def bidi(self) -> int:
        """Number of the peer's next bidirectional stream."""
        self._next["bidi"] += 4
        return self._next["bidi"] - 4

    def flush(self) -> None:
        """End a turn; streams have room at once."""
        self._write()
        while give_room(self.core, self.events, self.now):
            self._write()

    def _write(self) -> None:
        self.events += self.core.take_events()
        outs: list[Output] = self.core.data_to_send(self.now)
        self.events += self.core.take_events()
        for out in outs:
            match out:
                case OpenStream():
                    self.opened.append(out)
                case SetPriority(stream_id, priority):
                    self.priorities[stream_id] = priority
                case StreamData(stream_id, data, fin):
                    assert stream_id not in self.finished, f"octets behind the end of {stream_id}"
                    assert stream_id not in self.resets, f"octets behind the reset of {stream_id}"
                    self.octets[stream_id] += data
                    if fin:
                        self.finished.add(stream_id)
                case ResetStream(stream_id, code):
                    self.resets[stream_id] = code
                case StopStream(stream_id, code):
                    assert stream_id not in self.stops, f"{stream_id} stopped twice"
                    self.stops[stream_id] = code
                case CloseConnection():
                    self.closed = out

    def give(self, stream_id: int, *pieces: Operation | bytes, fin: bool = False, turn: bool = True) -> list[Event]:
        """Send operations to the core; return its events. Without `turn` it does not get to write."""
        data = b"".join(piece if isinstance(piece, bytes) else piece.encode() for piece in pieces)
        before = len(self.events)
        self.events += self.core.receive_stream_data(stream_id, data, fin, now=self.now)
        if turn:
            self.flush()
        return self.events[before:]

    def signal(self, *pieces: Operation | bytes) -> list[Event]:
        """Send signals to the core."""
        return self.give(self.control, *pieces)

    def wait(self, seconds: float) -> list[Event]:
        """Let time pass, in the steps that the core asks for."""
        before = len(self.events)
        end = self.now + seconds
        for _ in range(100_000):
            at = self.core.next_deadline()
            if at is None or at > end:
                break
            self.now = max(self.now, at)
            self.events += self.core.handle_timeout(self.now)
            self.flush()
        else:
            raise AssertionError("the core does not rest")
        self.now = end
        return self.events[before:]

    def signals(self) -> list[Operation]:
        """Take the signals that the core has written since the last call."""
        found: list[Operation] = []
        for stream_id in list(self.core.pool.streams):
            data = self.octets[stream_id][self._read[stream_id] :]
            self._read[stream_id] += len(data)
            found += decode_operations(data)
        return found

    def body(self, stream_id: int) -> list[Operation]:
        """Return the operations that the core has written on a data stream."""
        return list(decode_operations(self.octets[stream_id], idempotency=self.idempotency))


class Pair:
    """Two cores on a network that the test lets through, stream by stream."""

    def __init__(
        self, *, client: MaopConfig | None = None, server: MaopConfig | None = None, handlers: Any = PLAIN
    ) -> None:
        self.now = 0.0
        self.cores = (
            MaopCore(client=True, config=client, random_bytes=random_bytes, handlers=handlers),
            MaopCore(client=False, config=server, random_bytes=random_bytes, handlers=handlers),
        )
        self.client, self.server = self.cores
        self.events: tuple[list[Event], list[Event]] = ([], [])
        self.closed: list[CloseConnection | None] = [None, None]
        # By receiver and stream: what is on its way, each stream in order.
        self.wires: tuple[dict[int, deque[Any]], dict[int, deque[Any]]] = ({}, {})
        self.over: set[tuple[int, int]] = set()
        """By sender and stream: directions that have ended."""
        for side, core in enumerate(self.cores):
            self.events[side].extend(core.handshake_completed(now=0.0))
        self.pump()
        self.events[1].extend(self.server.approve_client("c-42", now=0.0))
        self.pump()
        for events in self.events:
            events.clear()

    def flush(self, side: int) -> None:
        """End a turn of one side; its streams have room at once."""
        self._write(side)
        while give_room(self.cores[side], self.events[side], self.now):
            self._write(side)

    def _write(self, side: int) -> None:
        core, wires = self.cores[side], self.wires[1 - side]
        self.events[side].extend(core.take_events())
        outs = core.data_to_send(self.now)
        self.events[side].extend(core.take_events())
        for out in outs:
            match out:
                case StreamData(stream_id, data, fin):
                    if (side, stream_id) not in self.over:
                        wires.setdefault(stream_id, deque()).append((bytes(data), fin))
                        if fin:
                            self.over.add((side, stream_id))
                case ResetStream(stream_id, code):
                    if (side, stream_id) in self.over and stream_id not in wires:
                        continue
                    self.over.add((side, stream_id))
                    queue = wires.setdefault(stream_id, deque())
                    # QUIC drops what was not delivered, and an end that was delivered stays one.
                    stops = [item for item in queue if item[0] == "stop"]
                    queue.clear()
                    queue.extend([*stops, ("reset", code)])
                case StopStream(stream_id, code):
                    wires.setdefault(stream_id, deque()).append(("stop", code))
                case CloseConnection():
                    self.closed[side] = out
                    wires.clear()
                    wires[-1] = deque([("close", out.code)])
                case _:
                    pass

    def step(self, side: int, rng: random.Random) -> bool:
        """Deliver one piece to a side, of a stream that chance picks, cut where chance cuts."""
        wires = self.wires[side]
        if not wires:
            return False
        stream_id = rng.choice(list(wires))
        queue = wires[stream_id]
        what, rest = queue.popleft()
        core = self.cores[side]
        if what == "stop":
            events = core.stream_stopped(stream_id, rest, now=self.now)
            if (side, stream_id) not in self.over:
                # QUIC answers STOP_SENDING by itself.
                self.over.add((side, stream_id))
                self.wires[1 - side].setdefault(stream_id, deque()).append(("reset", rest))
        elif what == "reset":
            events = core.stream_reset(stream_id, rest, now=self.now)
        elif what == "close":
            events = core.connection_lost(rest, "", now=self.now)
        else:
            cut = rng.randint(1, len(what)) if what else 0
            if cut < len(what):
                queue.appendleft((what[cut:], rest))
                rest = False
            events = core.receive_stream_data(stream_id, what[:cut], rest, now=self.now)
        if not queue:
            del wires[stream_id]
        self.events[side].extend(events)
        return True

    def pump(self) -> None:
        """Deliver everything until nobody has anything to say."""
        rng = random.Random(0)
        for _ in range(1000):
            for side in (0, 1):
                self.flush(side)
            if not self.wires[0] and not self.wires[1]:
                return
            for side in (0, 1):
                while self.step(side, rng):
                    pass
        raise AssertionError("the cores do not rest")

    def wait(self, seconds: float) -> None:
        """Let time pass for both."""
        end = self.now + seconds
        for _ in range(10_000):
            times = [at for at in (core.next_deadline() for core in self.cores) if at is not None]
            if not times or min(times) > end:
                break
            self.now = max(self.now, min(times))
            for side, core in enumerate(self.cores):
                self.events[side].extend(core.handle_timeout(self.now))
            self.pump()
        else:
            raise AssertionError("the cores do not rest")
        self.now = end
