"""Two cores wired to each other: whatever both do, in whatever pieces it arrives, nothing is lost, doubled or out of order."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import attrs
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from levada.transports.reactivesocket import ReactiveSocketCore
from levada.transports.rsocket.config import CoreConfig, LeaseGrant
from levada.transports.rsocket.events import (
    ConnectionEnded,
    CreditGranted,
    FailedBy,
    Interaction,
    LeaseGranted,
    PayloadReceived,
    RequestReceived,
    SendingStopped,
    SetupAccepted,
    SetupReceived,
    StreamCancelled,
    StreamCompleted,
    StreamFailed,
)
from levada.transports.rsocket.frames import Payload
from levada.transports.testing.core_pair import CorePair

REJECTED, CANCELED = 0x202, 0x203
SIDES = ("client", "server")
sides = st.sampled_from(SIDES)
kinds = st.sampled_from([*Interaction, Interaction.REQUEST_CHANNEL, Interaction.REQUEST_CHANNEL])
payloads = st.builds(Payload, st.binary(max_size=150), st.none() | st.binary(max_size=90))


@attrs.define
class Half:
    """What one side of a stream should see, kept by the test alone."""

    sent: list[Payload] = attrs.field(factory=list)
    got: list[Payload] = attrs.field(factory=list)
    may_send: bool = False
    credit: int = 0
    """Granted by events and not used."""
    over: bool = False
    """This side has ended the stream, or has been told of its end."""


@attrs.define
class Known:
    """One stream, by the side that opened it and its id."""

    kind: Interaction
    requester: str
    halves: dict[str, Half]
    lossy: bool = False
    """Ended by an error, a cancel or a refusal: what was on its way may be dropped."""
    answered: bool = False
    """The responder has completed: what the requester still had on its way may be dropped."""
    reported: bool = False


class Wired(RuleBasedStateMachine):
    """A client and a server, requester and responder at once, and 40 lines of a model."""

    @initialize(
        framed=st.booleans(), fragment_size=st.sampled_from([None, 64]), leases=st.sampled_from([False, False, True])
    )
    def connect(self, framed: bool, fragment_size: int | None, leases: bool) -> None:
        config = CoreConfig(lease=LeaseGrant(100, 20) if leases else None, fragment_size=fragment_size)
        self.pair = CorePair(
            ReactiveSocketCore(config, client=True, framed=framed, now=0.0),
            ReactiveSocketCore(config, client=False, framed=framed, now=0.0),
            framed=framed,
        )
        self.leases = leases
        self.streams: dict[tuple[str, int], Known] = {}
        self.by_side: dict[str, list[int]] = defaultdict(list)
        (setup,) = self.pair.to_server()
        assert isinstance(setup, SetupReceived)
        assert setup.lease is leases
        self.pair.server.accept_setup(0.0)
        assert self.pair.server.take_events() == []

    def core(self, side: str) -> ReactiveSocketCore:
        return self.pair.client if side == "client" else self.pair.server

    def known(self, side: str, stream_id: int) -> tuple[Known, Half]:
        stream = self.streams["server" if stream_id & 1 else "client", stream_id]
        return stream, stream.halves[side]

    def may_open(self, side: str) -> bool:
        return self.core(side).state.value in ("opening", "open")

    def pick(self, data: st.DataObject, side: str, *, credit: bool = False) -> int | None:
        core = self.core(side)
        live = [id_ for id_ in self.by_side[side] if core.has_stream(id_) and (core.credit(id_) or not credit)]
        return data.draw(st.sampled_from(live), label="stream") if live else None

    # ------------------------------------------------------------ what the sides do

    @rule(side=sides, kind=kinds, n=st.integers(0, 9), payload=payloads, complete=st.booleans())
    def request(self, side: str, kind: Interaction, n: int, payload: Payload, complete: bool) -> None:
        if not self.may_open(side):
            return
        core = self.core(side)
        if kind is Interaction.REQUEST_RESPONSE:
            stream_id, n = core.send_request_response(payload, 0.0), 1
        elif kind is Interaction.FIRE_AND_FORGET:
            stream_id = core.send_fire_and_forget(payload, 0.0)
        elif kind is Interaction.REQUEST_STREAM:
            stream_id = core.send_request_stream(payload, n, 0.0)
        elif kind is Interaction.REQUEST_CHANNEL:
            stream_id = core.send_request_channel(payload, n, 0.0, complete=complete)
        else:
            stream_id = core.send_request_subscription(payload, n, 0.0)
        assert stream_id % 2 == (0 if side == "client" else 1)
        assert (side, stream_id) not in self.streams
        stream = Known(kind, side, {name: Half() for name in SIDES})
        stream.halves[side].sent.append(payload)
        stream.halves[side].may_send = kind is Interaction.REQUEST_CHANNEL and not complete
        self.streams[side, stream_id] = stream
        self.by_side[side].append(stream_id)

    @rule(data=st.data(), side=sides, payload=payloads, complete=st.sampled_from([False, False, False, True]))
    def payload(self, data: st.DataObject, side: str, payload: Payload, complete: bool) -> None:
        stream_id = self.pick(data, side, credit=True)
        if stream_id is None:
            return
        stream, half = self.known(side, stream_id)
        assert half.may_send
        if stream.kind is Interaction.REQUEST_RESPONSE:
            complete = True
        else:
            assert half.credit > 0
            half.credit -= 1
        self.core(side).send_payload(stream_id, payload, complete=complete)
        half.sent.append(payload)
        if complete:
            self.completed(stream, side, stream_id)

    @rule(data=st.data(), side=sides)
    def complete(self, data: st.DataObject, side: str) -> None:
        stream_id = self.pick(data, side)
        if stream_id is None:
            return
        stream, half = self.known(side, stream_id)
        if half.may_send and stream.kind is not Interaction.REQUEST_RESPONSE:
            self.core(side).send_complete(stream_id)
            self.completed(stream, side, stream_id)

    def completed(self, stream: Known, side: str, stream_id: int) -> None:
        stream.halves[side].may_send = False
        if side != stream.requester:
            stream.answered = stream.halves[side].over = True
            assert not self.core(side).has_stream(stream_id)

    @rule(data=st.data(), side=sides, metadata=st.none() | st.binary(max_size=9))
    def give_up(self, data: st.DataObject, side: str, metadata: bytes | None) -> None:
        stream_id = self.pick(data, side)
        if stream_id is None:
            return
        stream, half = self.known(side, stream_id)
        if side == stream.requester:
            self.core(side).send_cancel(stream_id, metadata)
        else:
            self.core(side).send_error(stream_id, 0x201, b"x", metadata)
        stream.lossy, half.over, half.may_send = True, True, False
        assert not self.core(side).has_stream(stream_id)

    @rule(data=st.data(), side=sides, n=st.integers(1, 5))
    def more(self, data: st.DataObject, side: str, n: int) -> None:
        stream_id = self.pick(data, side)
        if stream_id is not None:
            self.core(side).send_request_n(stream_id, n)

    @precondition(lambda self: self.leases)
    @rule(side=sides, n=st.integers(0, 4))
    def lease(self, side: str, n: int) -> None:
        if self.may_open(side):
            self.core(side).send_lease(100, n, 0.0)

    # ------------------------------------------------------------ what arrives

    @rule()
    def deliver_all(self) -> None:
        self.deliver("server", None)
        self.deliver("client", None)

    @rule(side=sides, size=st.none() | st.integers(1, 100))
    def deliver(self, side: str, size: int | None) -> None:
        events = self.pair.to_client(size) if side == "client" else self.pair.to_server(size)
        for event in events:
            self.judge(side, event)

    def judge(self, side: str, event: Any) -> None:
        assert not isinstance(event, ConnectionEnded)
        if isinstance(event, SetupAccepted | LeaseGranted):
            return
        stream, half = self.known(side, event.stream_id)
        assert not half.over, event
        match event:
            case RequestReceived(kind=kind, payload=payload, n=n):
                assert kind is stream.kind
                assert side != stream.requester
                assert not stream.reported
                stream.reported = True
                half.got.append(payload)
                half.credit += n
                half.may_send = kind is not Interaction.FIRE_AND_FORGET
                half.over = kind is Interaction.FIRE_AND_FORGET
                if not half.over:
                    self.by_side[side].append(event.stream_id)
            case PayloadReceived(payload=payload, complete=complete):
                half.got.append(payload)
                half.over = complete and side == stream.requester
            case StreamCompleted():
                half.over = side == stream.requester
            case CreditGranted(n=n):
                half.credit += n
            case SendingStopped():
                half.may_send = False
            case StreamCancelled() | StreamFailed():
                if isinstance(event, StreamFailed):
                    assert event.by is FailedBy.PEER
                    ended = stream.kind is Interaction.REQUEST_SUBSCRIPTION and event.code == CANCELED
                    if not ended:
                        stream.lossy = True
                        assert event.code in (0x201, REJECTED)
                half.over, half.may_send = True, False

    @invariant()
    def what_arrived_is_a_prefix_of_what_was_sent(self) -> None:
        for stream in getattr(self, "streams", {}).values():
            for to, by in (SIDES, SIDES[::-1]):
                got, sent = stream.halves[to].got, stream.halves[by].sent
                assert got == sent[: len(got)]

    def teardown(self) -> None:
        if not hasattr(self, "pair"):
            return
        of_client, of_server = self.pair.settle()
        for side, events in zip(SIDES, (of_client, of_server), strict=True):
            for event in events:
                self.judge(side, event)
        self.what_arrived_is_a_prefix_of_what_was_sent()
        for (opener, stream_id), stream in self.streams.items():
            responder = SIDES[opener == "client"]
            waits = self.core(opener).has_stream(stream_id) and not stream.reported
            if waits or stream.kind is Interaction.FIRE_AND_FORGET:
                assert self.leases or stream.reported  # one that a newer lease no longer allows is dropped
                continue
            assert self.core(opener).has_stream(stream_id) == self.core(responder).has_stream(stream_id)
            if stream.lossy:
                continue
            assert stream.halves[opener].got == stream.halves[responder].sent
            if not stream.answered:
                assert stream.halves[responder].got == stream.halves[opener].sent
        for side in SIDES:
            held = self.core(side).statistics()
            assert (held.bytes_gathered, held.bytes_unread, held.bytes_unsent) == (0, 0, 0)


TestWired = Wired.TestCase
# Short runs hardly get past the requests.
TestWired.settings = settings(
    max_examples=20 if settings.get_current_profile_name() == "fast" else max(60, settings().max_examples),
    stateful_step_count=max(60, settings().stateful_step_count),
)


@pytest.mark.parametrize("framed", [False, True])
def test_all_interactions_in_both_directions_at_once(framed: bool) -> None:
    """The same ids' halves on both sides never meet: client and server do the same at the same time."""
    config = CoreConfig(fragment_size=64)
    pair = CorePair(
        ReactiveSocketCore(config, client=True, framed=framed, now=0.0),
        ReactiveSocketCore(config, client=False, framed=framed, now=0.0),
        framed=framed,
    )
    pair.to_server()
    pair.server.accept_setup(0.0)
    big = Payload(bytes(500), bytes(100))
    for core in (pair.client, pair.server):
        core.send_request_response(Payload(b"rr"), 0.0)
        core.send_fire_and_forget(Payload(b"fnf"), 0.0)
        core.send_request_stream(Payload(b"st"), 3, 0.0)
        core.send_request_subscription(Payload(b"sub"), 3, 0.0)
        core.send_request_channel(big, 3, 0.0)
    of_client, of_server = pair.settle()
    assert of_client.pop(0) == SetupAccepted()
    requests = [
        Interaction.REQUEST_RESPONSE,
        Interaction.FIRE_AND_FORGET,
        Interaction.REQUEST_STREAM,
        Interaction.REQUEST_SUBSCRIPTION,
        Interaction.REQUEST_CHANNEL,
    ]
    for events, core in ((of_client, pair.client), (of_server, pair.server)):
        assert [event.kind for event in events] == requests
        assert events[-1].payload == big
        for event in events:
            if core.has_stream(event.stream_id):
                core.send_payload(event.stream_id, big, complete=True)
    of_client, of_server = pair.settle()
    for events in (of_client, of_server):
        received = [event.payload for event in events if isinstance(event, PayloadReceived)]
        assert received == [big] * 4
        assert [type(event) for event in events if not isinstance(event, PayloadReceived)] == [
            StreamFailed,
            SendingStopped,
        ]
    assert pair.client.statistics().streams == pair.server.statistics().streams == 0
