"""Fragments of an owner that has room for some only: frames of other streams, and of stream 0, come in between; both dialects (RS-70, RS-82)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from levada.transports.reactivesocket import ReactiveSocketCore
from levada.transports.rsocket import ConnectionState, CoreConfig, ErrorCode, Payload, RSocketCore, Sessions
from levada.transports.rsocket.events import (
    KeepaliveReceived,
    PayloadReceived,
    RequestReceived,
    SessionSuspended,
    SetupAccepted,
    StreamCancelled,
    StreamCompleted,
    StreamFailed,
)
from levada.transports.testing import CorePair

DIALECTS: dict[str, Callable[[CoreConfig, bool], Any]] = {
    "rsocket": lambda config, client: RSocketCore(
        config, client=client, framed=True, now=0.0, random_bytes=bytes, sessions=Sessions()
    ),
    "reactivesocket": lambda config, client: ReactiveSocketCore(config, client=client, framed=True, now=0.0),
}
BIG = Payload(bytes(range(100)) * 5)

Made = Callable[..., CorePair[Any]]


@pytest.fixture(params=DIALECTS)
def pair(request: pytest.FixtureRequest) -> Made:
    """Two cores with frames of 64 bytes at most, one frame to a message; their owners have no room for more than the first of a payload."""

    def make(**changes: Any) -> CorePair[Any]:
        config = CoreConfig(fragment_size=64, **changes)
        cores = [DIALECTS[request.param](config, client) for client in (True, False)]
        made: CorePair[Any] = CorePair(*cores, framed=True, ignore=(SetupAccepted,))
        made.to_server()
        made.server.accept_setup(0.0)
        made.settle()
        for core in cores:
            core.room = 0
        return made

    return make


def requested(link: CorePair[Any], count: int = 1) -> list[int]:
    """Let the client request streams; return their ids."""
    for _ in range(count):
        link.client.send_request_stream(Payload(b"?"), 100, 0.0)
    return [event.stream_id for event in link.to_server() if isinstance(event, RequestReceived)]


def arrives(link: CorePair[Any]) -> list[Any]:
    """Give the server room, a frame at a time, until everything has arrived at the client; return the events."""
    events = link.to_client()
    while link.server.backlog:
        link.server.room = 1
        before = link.server.backlog
        events += link.to_client()
        assert 0 < before - link.server.backlog <= 64
    assert link.server.statistics().bytes_unsent == 0
    return events


@pytest.mark.rule("RS-82")
def test_rs82_other_streams_overtake_a_large_payload(pair: Made) -> None:
    """One frame goes at once, the others when there is room; small payloads and KEEPALIVE do not wait for them."""
    link = pair()
    large, small = requested(link, 2)
    link.server.send_payload(large, BIG)
    link.server.send_payload(small, Payload(b"small"))
    assert len(link.server.data_to_send(0.0)) == 2
    assert link.server.backlog == link.server.statistics().bytes_unsent > 400
    link.server.room = 1
    link.server.send_keepalive()
    assert [len(frame) > 50 for frame in link.server.data_to_send(0.0)] == [False, True]  # RS-70: stream 0 first


@pytest.mark.rule("RS-82")
def test_rs82_large_payloads_take_turns(pair: Made) -> None:
    link = pair()
    one, other, third = requested(link, 3)
    link.server.send_payload(one, BIG, complete=True)
    link.server.send_payload(other, BIG, complete=True)
    link.to_client()
    link.server.room = 1
    link.to_client()
    link.server.send_payload(third, Payload(b"late"), complete=True)
    assert link.to_client() == [PayloadReceived(third, Payload(b"late"), True)]
    events: list[Any] = []
    while not events:
        link.server.room = 1
        events = link.to_client()
    assert events == [PayloadReceived(one, BIG, True)]
    assert 0 < link.server.backlog <= 128, "the other is nearly there"
    assert arrives(link) == [PayloadReceived(other, BIG, True)]


@pytest.mark.rule("RS-82")
def test_rs82_nothing_of_a_stream_overtakes_its_fragments(pair: Made) -> None:
    """Neither a small payload nor the end."""
    link = pair()
    (stream_id,) = requested(link)
    for payload in (BIG, Payload(b"small", b"meta"), BIG, Payload(b"last")):
        link.server.send_payload(stream_id, payload)
    link.server.send_complete(stream_id)
    events = arrives(link)
    assert [e.payload for e in events if isinstance(e, PayloadReceived)] == [
        BIG,
        Payload(b"small", b"meta"),
        BIG,
        Payload(b"last"),
    ]
    assert events[-1] == StreamCompleted(stream_id)


def test_an_error_comes_behind_the_payloads_before_it(pair: Made) -> None:
    link = pair()
    (stream_id,) = requested(link)
    link.server.send_payload(stream_id, BIG)
    link.server.send_error(stream_id, ErrorCode.APPLICATION_ERROR, b"broken")
    received, failed = arrives(link)
    assert received == PayloadReceived(stream_id, BIG, False)
    assert isinstance(failed, StreamFailed)
    assert failed.data == b"broken"


@pytest.mark.rule("RS-83")
def test_rs83_the_rest_of_a_payload_that_is_not_wanted_is_not_sent(pair: Made) -> None:
    """CANCEL drops it, also that of an answer which this side has completed."""
    link = pair()
    one, done = requested(link, 2)
    link.server.send_payload(one, BIG)
    link.server.send_payload(done, BIG, complete=True)
    link.to_client()
    for stream_id in (one, done):
        link.client.send_cancel(stream_id)
    assert link.to_server() == [StreamCancelled(one)]
    assert (link.server.backlog, link.server.is_cut(one), link.server.is_cut(done)) == (0, False, False)
    assert link.to_client() == []


def test_a_request_that_is_given_up_is_not_sent_to_its_end(pair: Made) -> None:
    """The responder knows of it by then, so it gets a CANCEL, and an error of the responder ends it as well."""
    link = pair(max_streams=1)
    first = link.client.send_request_channel(BIG, 5, 0.0)
    assert link.client.backlog > 400
    link.client.send_cancel(first)
    assert (link.client.backlog, link.to_server()) == (0, [])
    assert link.server.statistics().bytes_gathered == link.server.statistics().streams == 0
    link.client.send_request_stream(Payload(b"taken"), 1, 0.0)
    link.client.send_request_channel(BIG, 5, 0.0)
    link.to_server()
    (refused,) = link.to_client()
    assert isinstance(refused, StreamFailed)
    assert (refused.code, link.client.backlog) == (ErrorCode.REJECTED, 0)


def test_a_stream_that_passes_a_limit_gets_no_more_answers(pair: Made) -> None:
    link = pair(max_payload_size=1_000)
    stream_id = link.client.send_request_channel(Payload(b"?"), 100, 0.0)
    link.to_server()
    link.server.send_request_n(stream_id, 5)
    link.server.send_payload(stream_id, BIG)
    link.to_client()
    assert link.server.backlog > 400
    link.client.room = float("inf")
    link.client.send_payload(stream_id, Payload(bytes(2_000)))
    [failed] = link.to_server()
    assert isinstance(failed, StreamFailed)
    assert (failed.code, link.server.backlog) == (ErrorCode.INVALID, 0)


def test_a_drain_waits_for_the_last_fragment(pair: Made) -> None:
    link = pair()
    (stream_id,) = requested(link)
    link.server.send_payload(stream_id, BIG, complete=True)
    link.server.drain(0.0)
    deadline = link.server.next_deadline()
    assert deadline is not None
    assert deadline > 0
    assert arrives(link) == [PayloadReceived(stream_id, BIG, True)]
    link.server.handle_timeout(0.0)
    link.server.connection_lost(0, "", 0.0)
    assert link.server.state is ConnectionState.ENDED


def test_the_end_of_a_connection_drops_what_waits(pair: Made) -> None:
    link = pair()
    (stream_id,) = requested(link)
    link.server.send_payload(stream_id, BIG)
    link.server.close(0, "", 0.0)
    link.server.room = 1000
    assert link.server.backlog == 0
    assert len(link.server.data_to_send(0.0)) == 2  # the first fragment, and ERROR


def test_without_a_bound_all_fragments_go_at_once(pair: Made) -> None:
    link = pair()
    (stream_id,) = requested(link)
    link.server.room = float("inf")
    link.server.send_payload(stream_id, BIG)
    assert link.server.backlog == 0
    assert link.to_client() == [PayloadReceived(stream_id, BIG, False)]


def test_fragments_wait_for_the_next_carrier_of_their_session() -> None:
    """Nothing of them is sent before RESUME is answered, and nothing is lost."""
    config = CoreConfig(fragment_size=64, resume=True)
    sessions: Sessions[RSocketCore] = Sessions()
    client, server, other = (
        RSocketCore(config, client=side, framed=True, now=0.0, random_bytes=bytes, sessions=sessions)
        for side in (True, False, False)
    )
    link = CorePair(client, server, framed=True)
    link.to_server()
    server.accept_setup(0.0)
    client.room = 0
    client.send_fire_and_forget(BIG, 0.0)
    link.to_server()
    [suspended] = client.connection_lost(0, "", 0.0)
    assert isinstance(suspended, SessionSuspended)
    client.resume(framed=True, now=0.0)
    client.room = 1000
    [resume] = client.data_to_send(0.0)
    assert client.backlog > 400
    other.receive_message(resume, 0.0)
    server.resume_on(other, 0.0)
    link.settle()
    assert client.backlog == 0
    client.send_keepalive()
    assert any(isinstance(event, KeepaliveReceived) for event in link.settle()[0])
    assert server.statistics().bytes_gathered == 0
