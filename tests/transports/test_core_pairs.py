"""The contract of `levada.transports.core` between two cores wired to each other. A protocol is one entry of `CORES`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Literal

import attrs
import pytest

from levada.framework.errors import LocalProtocolError
from levada.transports.reactivesocket import ReactiveSocketCore
from levada.transports.rsocket import CoreConfig, Payload, RSocketCore
from levada.transports.rsocket.events import ConnectionEnded, SetupReceived

Side = Literal["client", "server"]
BOTH_WAYS: tuple[tuple[Side, Side], ...] = (("client", "server"), ("server", "client"))


@attrs.frozen(kw_only=True)
class Entry:
    """What the tests must know of a protocol."""

    name: str
    make: Callable[[Side], Any]
    """Make the core of one side, at the time 0.0; it must do the same each time."""
    end: type
    """The event that says that the core has ended."""
    answer: Callable[[Any, Any], None]
    """Do what the owner of a core does about one of its events, to open the connection."""
    begin: Callable[[Any], object]
    """Let a client whose connection is open begin work that stays open."""
    deliver: Callable[[Any, Any, float], list[Any]]
    """Give a core one piece of what the other has sent."""
    cut: Callable[[Any, int], list[Any]] | None
    """Cut a piece into those of at most so many bytes; `None` if the carrier keeps boundaries."""


def cut_bytes(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


def accept(core: Any, event: Any) -> None:
    if isinstance(event, SetupReceived):
        core.accept_setup(0.0)


def reactive_streams(name: str, core: Callable[..., Any], *, framed: bool) -> Entry:
    return Entry(
        name=f"{name}, {'messages' if framed else 'bytes'}",
        make=lambda side: core(CoreConfig(), client=side == "client", framed=framed, now=0.0, random_bytes=bytes),
        end=ConnectionEnded,
        answer=accept,
        begin=lambda client: client.send_request_stream(Payload(b"data", b"metadata"), 3, 0.0),
        deliver=lambda core, piece, now: (core.receive_message if framed else core.receive_data)(piece, now),
        cut=None if framed else cut_bytes,
    )


CORES = [
    reactive_streams("rsocket", RSocketCore, framed=False),
    reactive_streams("rsocket", RSocketCore, framed=True),
    reactive_streams("reactivesocket", ReactiveSocketCore, framed=False),
    reactive_streams("reactivesocket", ReactiveSocketCore, framed=True),
]


class Pair:
    """Both ends of a connection."""

    def __init__(self, entry: Entry, *, size: int | None = None, takes: bool = True) -> None:
        self.entry = entry
        self.size = size
        self.takes = takes
        """Whether what the owner's calls leave behind is taken at once, or comes with the next input."""
        self.cores: dict[Side, Any] = {"client": entry.make("client"), "server": entry.make("server")}
        self.events: dict[Side, list[Any]] = {"client": [], "server": []}
        self.sent: dict[Side, list[Any]] = {"client": [], "server": []}
        self.now = 0.0

    def note(self, side: Side, events: list[Any]) -> None:
        """Keep events, and answer them."""
        self.events[side] += events
        for event in events:
            self.entry.answer(self.cores[side], event)
        if events and self.takes:
            self.note(side, self.cores[side].take_events())

    def settle(self) -> None:
        """Deliver until nothing is queued."""
        moved = True
        while moved:
            moved = False
            for side, to in BOTH_WAYS:
                events: list[Any] = []
                for piece in self.cores[side].data_to_send(self.now):
                    moved = True
                    self.sent[side].append(piece)
                    parts = [piece] if self.size is None or self.entry.cut is None else self.entry.cut(piece, self.size)
                    for part in parts:
                        events += self.entry.deliver(self.cores[to], part, self.now)
                self.note(to, events)

    def ended(self, side: Side) -> bool:
        return any(isinstance(event, self.entry.end) for event in self.events[side])

    def end(self, side: Side, way: str) -> None:
        """End one side, as far as that is its own doing, and take what it still sends."""
        core = self.cores[side]
        if way == "drain":
            self.note(side, core.drain(self.now))
            while not self.ended(side):  # what the protocol says to the peer before the end
                self.settle()
                deadline = core.next_deadline()
                if not self.ended(side) and deadline is not None:
                    self.now = max(self.now, deadline)
                    self.note(side, core.handle_timeout(self.now))
        elif way == "close":
            self.note(side, core.close(0, "enough", self.now))
        else:
            self.note(side, core.connection_lost(0, "gone", self.now))
        core.data_to_send(self.now)


@pytest.fixture(params=CORES, ids=lambda entry: entry.name)
def entry(request: pytest.FixtureRequest) -> Entry:
    made: Entry = request.param
    return made


@pytest.fixture(params=["client", "server"])
def side(request: pytest.FixtureRequest) -> Side:
    made: Side = request.param
    return made


def opened(entry: Entry) -> Pair:
    pair = Pair(entry)
    pair.settle()
    return pair


@pytest.mark.parametrize("way", ["connection_lost", "close", "drain"])
def test_the_last_event_says_that_it_ended_and_then_nothing_happens(entry: Entry, side: Side, way: str) -> None:
    """Input is ignored, there is no deadline, nothing is queued, and no second call changes anything."""
    pair, other = opened(entry), opened(entry)
    pair.end(side, way)
    core, events = pair.cores[side], pair.events[side]
    assert [isinstance(event, entry.end) for event in events].count(True) == 1
    assert isinstance(events[-1], entry.end)
    # Input that means something on a connection that is open.
    entry.begin(other.cores["client"])
    other.settle()
    for piece in other.sent["server" if side == "client" else "client"]:
        assert entry.deliver(core, piece, pair.now) == []
    seconds: tuple[Callable[[], object], ...] = (
        lambda: core.connection_lost(0, "again", pair.now),
        lambda: core.close(0, "again", pair.now),
        lambda: core.drain(pair.now),
        lambda: core.handle_timeout(pair.now + 1e9),
        core.take_events,
    )
    for second in seconds:
        assert second() == []
        assert core.next_deadline() is None
        assert core.data_to_send(pair.now) == []


@pytest.mark.parametrize("way", ["connection_lost", "close"])
def test_work_that_is_open_ends_before_the_last_event(entry: Entry, side: Side, way: str) -> None:
    pair = opened(entry)
    entry.begin(pair.cores["client"])
    pair.settle()
    before = len(pair.events[side])
    pair.end(side, way)
    assert len(pair.events[side]) > before + 1
    assert [isinstance(event, entry.end) for event in pair.events[side]].index(True) == len(pair.events[side]) - 1


def test_each_event_is_returned_once_and_in_order(entry: Entry) -> None:
    """What a call of the owner left behind comes from `take_events`, or before what the next input means."""
    taken, left = Pair(entry), Pair(entry, takes=False)
    for pair in (taken, left):
        with contextlib.suppress(LocalProtocolError):  # a protocol may have no work before the connection is open
            entry.begin(pair.cores["client"])
        pair.settle()
        entry.begin(pair.cores["client"])
        pair.settle()
        assert pair.cores["client"].take_events() == pair.cores["server"].take_events() == []
    assert left.events == taken.events


@pytest.mark.parametrize("entry", [entry for entry in CORES if entry.cut], ids=lambda entry: entry.name)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 50])
def test_bytes_that_are_cut_mean_the_same(entry: Entry, size: int) -> None:
    whole, cut = Pair(entry), Pair(entry, size=size)
    for pair in (whole, cut):
        pair.settle()
        entry.begin(pair.cores["client"])
        pair.settle()
        pair.note("client", pair.cores["client"].close(0, "", 0.0))
        pair.settle()
    assert cut.events == whole.events
    assert cut.sent == whole.sent
