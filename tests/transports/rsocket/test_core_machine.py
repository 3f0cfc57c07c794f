"""Two cores wired to each other under random schedules: credit holds, payloads arrive once and in order, nothing is left."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from levada.framework.errors import LocalProtocolError
from levada.transports.rsocket import ConnectionState, CoreConfig, Payload, RSocketCore, Sessions
from levada.transports.rsocket.events import (
    ConnectionEnded,
    CreditGranted,
    Event,
    FailedBy,
    Interaction,
    PayloadReceived,
    RequestReceived,
    ResumeReceived,
    SendingStopped,
    SetupReceived,
    StreamFailed,
)
from levada.transports.testing import CorePair

ends = st.sampled_from(["client", "server"])
picks = st.integers(0, 1000)
sizes = st.integers(1, 200)
payloads = st.builds(
    Payload, st.sampled_from([b"", b"a", bytes(55), bytes(300)]), st.sampled_from([None, b"", b"m" * 70])
)


class Narrow(CorePair[RSocketCore]):
    """Two cores whose owners have room for a fragment or two at a time, so that other frames come in between."""

    def __init__(self, client: RSocketCore, server: RSocketCore, *, framed: bool) -> None:
        super().__init__(client, server, framed=framed)
        client.room = server.room = 0

    def collect(self) -> None:
        self.client.room = self.server.room = 100
        super().collect()


class Wired(RuleBasedStateMachine):
    """What both ends do to their streams, in any order, while octets trickle."""

    resume: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.sessions = Sessions[RSocketCore]()
        self.sent: dict[tuple[str, int], list[Payload]] = defaultdict(list)  # by sender
        self.got: dict[tuple[str, int], list[Payload]] = defaultdict(list)  # by receiver
        self.asked: dict[tuple[str, int], int] = defaultdict(int)  # by receiver
        self.allowed: dict[tuple[str, int], int] = defaultdict(int)  # by sender, as its events told
        self.known: dict[str, list[int]] = {"client": [], "server": []}
        self.answers: set[int] = set()  # request-responses, which need no credit
        self.broken: set[int] = set()  # a cancel or an error may have swallowed payloads

    @initialize(fragment=st.sampled_from([None, 64]), framed=st.booleans(), narrow=st.booleans())
    def connect(self, fragment: int | None, framed: bool, narrow: bool) -> None:
        self.config = CoreConfig(
            fragment_size=fragment,
            resume=self.resume,
            keepalive_interval=1e6,
            max_lifetime=1e6,
            resume_buffer=10_000_000,
        )
        self.framed = framed
        self.server = self.new_core(client=False)
        kind = Narrow if narrow else CorePair
        self.link = kind(self.new_core(client=True), self.server, framed=framed)
        [setup] = self.link.to_server()
        assert isinstance(setup, SetupReceived)
        self.server.accept_setup(0.0)

    def new_core(self, *, client: bool) -> RSocketCore:
        return RSocketCore(
            self.config, client=client, framed=self.framed, now=0.0, random_bytes=bytes, sessions=self.sessions
        )

    def core(self, end: str) -> RSocketCore:
        return self.link.client if end == "client" else self.server

    def pick(self, end: str, pick: int) -> int | None:
        live = [sid for sid in self.known[end] if self.core(end).has_stream(sid)]
        return live[pick % len(live)] if live else None

    # ------------------------------------------------------------ what the ends do

    @rule(end=ends, kind=st.sampled_from(Interaction), payload=payloads, n=st.integers(1, 5), complete=st.booleans())
    def request(self, end: str, kind: Interaction, payload: Payload, n: int, complete: bool) -> None:
        core = self.core(end)
        match kind:
            case Interaction.REQUEST_RESPONSE:
                sid = core.send_request_response(payload, 0.0)
                self.answers.add(sid)
                n = 1
            case Interaction.FIRE_AND_FORGET:
                sid, n = core.send_fire_and_forget(payload, 0.0), 0
            case Interaction.REQUEST_CHANNEL:
                sid = core.send_request_channel(payload, n, 0.0, complete=complete)
            case _:
                sid = core.send_request_stream(payload, n, 0.0)
        self.known[end].append(sid)
        self.sent[end, sid].append(payload)
        self.asked[end, sid] += n

    @rule(end=ends, pick=picks, n=st.integers(1, 5))
    def ask_for_more(self, end: str, pick: int, n: int) -> None:
        sid = self.pick(end, pick)
        if sid is not None:
            self.core(end).send_request_n(sid, n)
            self.asked[end, sid] += n

    @rule(end=ends, pick=picks, payload=payloads, complete=st.booleans())
    def send(self, end: str, pick: int, payload: Payload, complete: bool) -> None:
        sid = self.pick(end, pick)
        if sid is None:
            return
        core = self.core(end)
        if core.credit(sid) == 0:
            with pytest.raises(LocalProtocolError):
                core.send_payload(sid, payload)
            return
        core.send_payload(sid, payload, complete=complete)
        self.sent[end, sid].append(payload)
        if sid not in self.answers:
            self.allowed[end, sid] -= 1
            assert self.allowed[end, sid] >= 0, "more was allowed to be sent than the events said"

    @rule(end=ends, pick=picks)
    def complete(self, end: str, pick: int) -> None:
        sid = self.pick(end, pick)
        if sid is not None:
            with contextlib.suppress(LocalProtocolError):
                self.core(end).send_complete(sid)

    @rule(end=ends, pick=picks, error=st.booleans())
    def give_up(self, end: str, pick: int, error: bool) -> None:
        sid = self.pick(end, pick)
        if sid is not None:
            with contextlib.suppress(LocalProtocolError):
                if error:
                    self.core(end).send_error(sid, data=b"given up")
                else:
                    self.core(end).send_cancel(sid)
                self.broken.add(sid)

    # ------------------------------------------------------------ what the wire does

    @rule(end=ends, size=sizes)
    def deliver(self, end: str, size: int) -> None:
        size = 1 + size // 100 if self.framed else size
        events = self.link.to_client(size) if end == "client" else self.link.to_server(size)
        self.take(end, events)

    def take(self, end: str, events: list[Event]) -> None:
        for event in events:
            assert not isinstance(event, ConnectionEnded), event
            match event:
                case RequestReceived():
                    assert event.stream_id not in self.known[end], "a request arrived twice"
                    self.known[end].append(event.stream_id)
                    self.got[end, event.stream_id].append(event.payload)
                    self.allowed[end, event.stream_id] += event.n
                case PayloadReceived():
                    self.got[end, event.stream_id].append(event.payload)
                case CreditGranted():
                    self.allowed[end, event.stream_id] += event.n
                case StreamFailed():
                    assert event.by is FailedBy.PEER, event
                case SendingStopped():
                    self.broken.add(event.stream_id)
                case ResumeReceived():
                    door, self.link.server = self.link.server, self.server
                    self.server.resume_on(door, 0.0)
                    self.take("server", self.server.take_events())
                case _:
                    pass

    @invariant()
    def payloads_arrive_in_order_and_once(self) -> None:
        for (end, sid), got in self.got.items():
            sender = "server" if end == "client" else "client"
            assert got == self.sent[sender, sid][: len(got)]

    @invariant()
    def no_more_arrives_than_was_asked_for(self) -> None:
        for (end, sid), got in self.got.items():
            first = 1 if (sid % 2 == 0) == (end == "client") else 0  # the request itself
            assert len(got) - first <= self.asked[end, sid]

    def settle(self) -> None:
        while True:
            of_client, of_server = self.link.to_client(), self.link.to_server()
            self.take("client", of_client)
            self.take("server", of_server)
            if not (of_client or of_server):
                self.link.collect()
                wires = (*self.link.bytes_in_flight.values(), *self.link.messages_in_flight.values())
                if not any(wires):
                    return

    def teardown(self) -> None:
        if not hasattr(self, "link"):
            return
        self.settle()
        for (sender, sid), sent in self.sent.items():
            receiver = "server" if sender == "client" else "client"
            if sid not in self.broken:
                assert self.got[receiver, sid] == sent, "something was lost"
        for end in ("client", "server"):
            for sid in self.known[end]:
                with contextlib.suppress(LocalProtocolError):
                    self.core(end).send_cancel(sid)
        self.settle()
        for core in (self.link.client, self.server):
            assert core.state in (ConnectionState.OPEN, ConnectionState.OPENING)
            held = core.statistics()
            assert (held.streams, held.peer_streams, held.bytes_gathered, held.bytes_unread) == (0, 0, 0, 0)


class Cut(Wired):
    """The same with carriers that are lost at any octet, and come back."""

    resume = True

    def down(self) -> bool:
        return hasattr(self, "link") and self.link.client.state is ConnectionState.SUSPENDED

    @precondition(lambda self: not self.down())
    @rule(server_notices=st.booleans())
    def cut(self, server_notices: bool) -> None:
        self.link.cut()
        self.take("client", self.link.client.connection_lost(0, "cut", 0.0))
        if server_notices:
            self.take("server", self.server.connection_lost(0, "cut", 0.0))

    @precondition(lambda self: self.down())
    @rule(framed=st.booleans())
    def come_back(self, framed: bool) -> None:
        self.framed = self.link.framed = framed
        self.link.cut()
        self.link.client.resume(framed=framed, now=0.0)
        self.link.server = self.new_core(client=False)  # of the new carrier, until it has the RESUME

    @precondition(lambda self: hasattr(self, "link"))
    @rule(end=ends)
    def say_what_was_received(self, end: str) -> None:
        with contextlib.suppress(LocalProtocolError):
            self.core(end).send_keepalive()

    def settle(self) -> None:
        if self.down():
            self.come_back(framed=False)
        super().settle()

    @invariant()
    def what_is_kept_is_what_the_peer_may_lack(self) -> None:
        if not hasattr(self, "link"):
            return
        for core, peer in ((self.link.client, self.server), (self.server, self.link.client)):
            replay: Any = core._replay
            assert replay.first <= peer._received <= replay.sent


TestWired = pytest.mark.rule("RS-1")(pytest.mark.rule("RS-73")(Wired.TestCase))
TestCut = pytest.mark.rule("RS-96")(pytest.mark.rule("RS-97")(Cut.TestCase))
