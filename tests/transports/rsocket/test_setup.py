"""How a connection begins (RS-40 to RS-55) and how it drains (RS-31)."""

from __future__ import annotations

import pytest

from levada.framework.errors import ConfigurationError, LocalProtocolError
from levada.transports.rsocket import ConnectionState, CoreConfig, ErrorCode, LeaseGrant, Payload, RSocketCore, Sessions
from levada.transports.rsocket.events import (
    ConnectionDraining,
    ConnectionEnded,
    EndReason,
    Event,
    FailedBy,
    Interaction,
    LeaseGranted,
    PayloadReceived,
    RequestReceived,
    SetupAccepted,
    SetupReceived,
    StreamCancelled,
    StreamFailed,
)
from levada.transports.rsocket.frames import (
    CancelFrame,
    ErrorFrame,
    Frame,
    FrameType,
    KeepaliveFrame,
    LeaseFrame,
    PayloadFrame,
    RequestFrame,
    RequestNFrame,
    ResumeFrame,
    SetupFrame,
)
from levada.transports.testing import CorePair

from .conftest import Feed, Make, Pair, Sent, Setup


def request(stream_id: int, kind: FrameType = FrameType.REQUEST_RESPONSE) -> RequestFrame:
    return RequestFrame(type=kind, stream_id=stream_id, payload=Payload())


def refusal(core: RSocketCore, events: list[Event], sent: Sent) -> int:
    """The code with which a first frame was refused: the one frame sent, and the one event."""
    [end] = events
    assert isinstance(end, ConnectionEnded)
    assert end.reason is EndReason.REFUSED
    [error] = sent(core)
    assert isinstance(error, ErrorFrame)
    assert (error.stream_id, error.code, error.data.decode()) == (0, end.code, end.text)
    assert core.state is ConnectionState.ENDED
    return error.code


@pytest.mark.rule("RS-40")
def test_rs40_setup_is_the_clients_first_frame(core: Make, sent: Sent) -> None:
    """The client sends SETUP before anything else, requests made at once included."""
    made = core(client=True, keepalive_interval=0.5, max_lifetime=30.0, data_mime_type="a/b", lease=LeaseGrant(1, 1))
    made.send_metadata_push(b"m")
    first, second = sent(made)
    assert first == SetupFrame(
        version=(1, 0),
        keepalive_ms=500,
        lifetime_ms=30_000,
        metadata_mime_type="application/octet-stream",
        data_mime_type="a/b",
        payload=Payload(),
        lease=True,
    )
    assert type(second).__name__ == "MetadataPushFrame"


@pytest.mark.rule("RS-41")
def test_rs41_versions(core: Make, feed: Feed, sent: Sent, setup: Setup) -> None:
    """A client sends 1.0, or 0.2 if told so; a server accepts these two and refuses all others by INVALID_SETUP."""
    for version in ((1, 0), (0, 2)):
        [frame] = sent(core(client=True, version=version))
        assert isinstance(frame, SetupFrame)
        assert frame.version == version
        [event] = feed(core(client=False), setup(version=version))
        assert isinstance(event, SetupReceived)
        assert event.version == version
    for version in ((0, 1), (1, 1), (2, 0), (0, 0), (65535, 65535)):
        made = core(client=False)
        assert refusal(made, feed(made, setup(version=version)), sent) == ErrorCode.INVALID_SETUP


@pytest.mark.rule("RS-42")
@pytest.mark.parametrize("field", ["keepalive_ms", "lifetime_ms"])
def test_rs42_times_of_zero_are_refused(core: Make, feed: Feed, sent: Sent, setup: Setup, field: str) -> None:
    """Interval or lifetime 0: ERROR[INVALID_SETUP]."""
    made = core(client=False)
    assert refusal(made, feed(made, setup(**{field: 0})), sent) == ErrorCode.INVALID_SETUP


@pytest.mark.rule("RS-42")
def test_rs42_a_truncated_setup_is_refused(core: Make, feed: Feed, sent: Sent, setup: Setup) -> None:
    """A SETUP cut anywhere before its payload, or with a metadata length that is too long: ERROR[INVALID_SETUP]."""
    whole = setup(payload=Payload(b"", b"meta"), token=b"tok").encode()
    for size in range(6, len(whole)):
        made = core(client=False, resume=True)
        assert refusal(made, feed(made, whole[:size]), sent) == ErrorCode.INVALID_SETUP


@pytest.mark.rule("RS-42")
@pytest.mark.parametrize("wrong", ["", "é", "\udcff", "a\0", "a\nb", "\x1b[2J", "a" * 129, "a" * 255])
def test_rs42_a_metadata_mime_type_that_no_entry_can_name_is_refused(
    core: Make, feed: Feed, sent: Sent, setup: Setup, wrong: str
) -> None:
    """1 to 128 printable ASCII characters: otherwise each request with metadata would be a surprise."""
    made = core(client=False)
    assert refusal(made, feed(made, setup(metadata_mime_type=wrong)), sent) == ErrorCode.INVALID_SETUP
    with pytest.raises(ConfigurationError):
        CoreConfig(metadata_mime_type=wrong)


@pytest.mark.rule("RS-42")
@pytest.mark.parametrize("wrong", ["é", "\udcff", "a\0", "a\nb", "\x1b[2J"])
def test_rs42_a_data_mime_type_that_is_no_text_is_refused(
    core: Make, feed: Feed, sent: Sent, setup: Setup, wrong: str
) -> None:
    """It may be empty and may have 255 characters, but goes into texts of the application, and so has to be one."""
    made = core(client=False)
    assert refusal(made, feed(made, setup(data_mime_type=wrong)), sent) == ErrorCode.INVALID_SETUP
    for right in ("", "a" * 255):
        assert isinstance(feed(core(client=False), setup(data_mime_type=right))[0], SetupReceived)
        CoreConfig(data_mime_type=right)
    for refused in (wrong, "a" * 256):
        with pytest.raises(ConfigurationError):
            CoreConfig(data_mime_type=refused)


@pytest.mark.rule("RS-43")
def test_rs43_resumption_that_is_not_offered_is_refused(core: Make, feed: Feed, sent: Sent, setup: Setup) -> None:
    """R set, and the server does not resume: ERROR[REJECTED_SETUP]."""
    made = core(client=False)
    assert refusal(made, feed(made, setup(token=b"tok")), sent) == ErrorCode.REJECTED_SETUP


@pytest.mark.rule("RS-44")
def test_rs44_a_token_in_use_or_empty_is_refused(core: Make, feed: Feed, sent: Sent, setup: Setup) -> None:
    """A token in use: REJECTED_SETUP. An empty one: INVALID_SETUP. A token is free again when its session is over."""
    sessions = Sessions[RSocketCore](max_sessions=2)
    first = core(client=False, resume=True, sessions=sessions)
    assert len(feed(first, setup(token=b"tok"))) == 1
    second = core(client=False, resume=True, sessions=sessions)
    assert refusal(second, feed(second, setup(token=b"tok")), sent) == ErrorCode.REJECTED_SETUP
    assert sessions.find(b"tok") is first
    empty = core(client=False, resume=True, sessions=sessions)
    assert refusal(empty, feed(empty, setup(token=b"")), sent) == ErrorCode.INVALID_SETUP
    first.reject_setup()
    assert len(sessions) == 0
    for token in (b"tok", b"two"):
        assert len(feed(core(client=False, resume=True, sessions=sessions), setup(token=token))) == 1
    full = core(client=False, resume=True, sessions=sessions)
    assert refusal(full, feed(full, setup(token=b"three")), sent) == ErrorCode.REJECTED_SETUP


@pytest.mark.rule("RS-45")
def test_rs45_leases_that_are_not_offered_are_refused(core: Make, feed: Feed, sent: Sent, setup: Setup) -> None:
    """L set, and the server cannot lease: ERROR[UNSUPPORTED_SETUP]."""
    made = core(client=False)
    assert refusal(made, feed(made, setup(lease=True)), sent) == ErrorCode.UNSUPPORTED_SETUP


@pytest.mark.rule("RS-46")
@pytest.mark.rule("RS-47")
def test_rs46_rs47_the_application_refuses(core: Make, feed: Feed, sent: Sent, setup: Setup) -> None:
    """The application's refusal is REJECTED_SETUP with its text; the ERROR goes out, requests behind SETUP are dropped."""
    made = core(client=False)
    [event] = feed(made, setup(), request(1))
    assert isinstance(event, SetupReceived)
    made.reject_setup("not today")
    assert refusal(made, made.take_events(), sent) == ErrorCode.REJECTED_SETUP
    made = core(client=False)
    feed(made, setup())
    with pytest.raises(LocalProtocolError):
        made.reject_setup("no", code=ErrorCode.CONNECTION_ERROR)
    made.reject_setup("no", code=ErrorCode.UNSUPPORTED_SETUP)
    assert refusal(made, made.take_events(), sent) == 2
    with pytest.raises(LocalProtocolError):
        made.accept_setup(0.0)


@pytest.mark.rule("RS-48")
@pytest.mark.parametrize(
    "frame",
    [request(1), KeepaliveFrame(True, 0), LeaseFrame(1, 1), ErrorFrame(0, 1), CancelFrame(1), b"\0\0\0\0\0\0"],
    ids=lambda frame: type(frame).__name__,
)
def test_rs48_any_other_first_frame_is_refused(core: Make, feed: Feed, sent: Sent, frame: Frame | bytes) -> None:
    """Anything but SETUP or RESUME first: ERROR[INVALID_SETUP]."""
    made = core(client=False)
    assert refusal(made, feed(made, frame), sent) == ErrorCode.INVALID_SETUP


@pytest.mark.rule("RS-48")
def test_rs48_on_a_stream_it_is_no_first_frame(core: Make, feed: Feed, sent: Sent, setup: Setup) -> None:
    """SETUP or RESUME on a stream above 0 as the first frame: ERROR[INVALID_SETUP]."""
    resume = ResumeFrame(version=(1, 0), token=b"t", server_position=0, client_position=0, stream_id=1)
    for frame in (setup(stream_id=1), resume):
        made = core(client=False, resume=True)
        assert refusal(made, feed(made, frame), sent) == ErrorCode.INVALID_SETUP


@pytest.mark.rule("RS-49")
def test_rs49_no_first_frame_in_time(core: Make) -> None:
    """Without a first frame within `setup_timeout` the server closes without a word."""
    made = core(client=False, setup_timeout=10.0)
    made.receive_data(b"\0\0", 9.0)
    assert made.next_deadline() == 10.0
    assert made.handle_timeout(9.9) == []
    assert made.handle_timeout(10.0) == [ConnectionEnded(EndReason.TIMED_OUT, 0, "no first frame in time")]
    assert b"".join(made.data_to_send(0.0)) == b""


@pytest.mark.rule("RS-50")
def test_rs50_requests_right_behind_setup(core: Make, sent: Sent) -> None:
    """Without L the client may send requests without waiting."""
    made = core(client=True)
    made.send_request_response(Payload(b"early"), 0.0)
    assert [type(frame) for frame in sent(made)] == [SetupFrame, RequestFrame]
    assert made.state is ConnectionState.OPENING


@pytest.mark.rule("RS-51")
@pytest.mark.rule("RS-52")
def test_rs51_rs52_a_server_sends_nothing_before_it_accepts(core: Make, feed: Feed, sent: Sent, setup: Setup) -> None:
    """Requests from the server only after it accepted; what came in the meantime waits, in order."""
    made = core(client=False)
    with pytest.raises(LocalProtocolError):
        made.send_request_response(Payload(), 0.0)
    feed(made, setup(), request(3), KeepaliveFrame(True, 0, b"k"))
    feed(made, request(1))
    with pytest.raises(LocalProtocolError):
        made.send_request_response(Payload(), 0.0)
    assert sent(made) == []
    made.accept_setup(0.0)
    got = made.take_events()
    assert [event.stream_id for event in got if isinstance(event, RequestReceived)] == [3, 1]
    assert sent(made) == [KeepaliveFrame(False, 0, b"k")]
    assert made.send_request_response(Payload(), 0.0) == 2


@pytest.mark.rule("RS-52")
def test_rs52_messages_wait_like_octets(core: Make, setup: Setup) -> None:
    """On a message carrier too; what comes behind the frame that ends the connection is ignored."""
    made = core(client=False, framed=True)
    for frame in (setup(), request(1), request(3), ErrorFrame(0, ErrorCode.CONNECTION_ERROR), request(5)):
        made.receive_message(frame.encode(), 0.0)
    made.accept_setup(0.0)
    events = made.take_events()
    assert [type(event) for event in events] == [
        RequestReceived,
        RequestReceived,
        StreamCancelled,
        StreamCancelled,
        ConnectionEnded,
    ]


@pytest.mark.rule("RS-52")
@pytest.mark.parametrize("framed", [False, True])
def test_rs52_what_waits_is_bounded(core: Make, setup: Setup, framed: bool) -> None:
    """A client that sends too much behind SETUP is refused; what waits on message carriers is whole messages."""
    made = core(client=False, framed=framed, max_setup_backlog=100)
    receive = made.receive_message if framed else made.receive_data
    frame = setup().encode()
    assert len(receive(frame if framed else len(frame).to_bytes(3, "big") + frame, 0.0)) == 1
    item = request(1).encode()
    message = item if framed else len(item).to_bytes(3, "big") + item
    events: list[Event] = []
    count = 0
    while not events:
        events = receive(message, 0.0)
        count += 1
    assert count == 100 // (3 + len(item)) + 1
    [end] = events
    assert isinstance(end, ConnectionEnded)
    assert (end.reason, end.code) == (EndReason.REFUSED, ErrorCode.REJECTED_SETUP)
    assert made.statistics().bytes_unread == 0


@pytest.mark.rule("RS-53")
@pytest.mark.parametrize(
    "frame",
    [
        PayloadFrame(stream_id=1, payload=Payload(), next=True, complete=True),
        ErrorFrame(1, 0x201),
        RequestNFrame(3, 1),
        CancelFrame(3),
        request(2),
        request(2, FrameType.REQUEST_FNF),
    ],
    ids=lambda frame: type(frame).__name__,
)
def test_rs53_how_the_client_sees_that_it_was_accepted(core: Make, feed: Feed, frame: Frame) -> None:
    """By PAYLOAD, ERROR, REQUEST_N or CANCEL for one of its requests, or by a request of the server."""
    made = core(client=True)
    made.send_request_response(Payload(), 0.0)
    made.send_request_channel(Payload(), 1, 0.0)
    assert feed(made, KeepaliveFrame(False, 0), PayloadFrame(stream_id=5, payload=Payload(), next=True)) != []
    before = made.state
    first, *others = feed(made, frame)
    assert first == SetupAccepted()
    assert len(others) == 1
    assert (before, made.state) == (ConnectionState.OPENING, ConnectionState.OPEN)


@pytest.mark.rule("RS-53")
@pytest.mark.parametrize("code", [1, 2, 3, 4])
def test_rs53_how_the_client_sees_that_it_was_refused(core: Make, feed: Feed, code: int) -> None:
    """By an ERROR with a setup code on stream 0 before that."""
    made = core(client=True)
    made.send_request_response(Payload(), 0.0)
    assert feed(made, ErrorFrame(0, code, b"no")) == [
        StreamFailed(1, code, b"no", FailedBy.CONNECTION),
        ConnectionEnded(EndReason.REFUSED, code, "no"),
    ]


@pytest.mark.rule("RS-54")
@pytest.mark.rule("RS-55")
def test_rs54_rs55_with_leases_both_sides_wait(core: Make, sent: Sent) -> None:
    """The client waits for the server's LEASE, the server for the client's; each sends its own as soon as it may."""
    link = CorePair(
        core(client=True, lease=LeaseGrant(2.0, 3, b"c")), core(client=False, lease=LeaseGrant(1.0, 5, b"s"))
    )
    early = link.client.send_request_response(Payload(b"early"), 0.0)
    [setup] = link.to_server()
    assert isinstance(setup, SetupReceived)
    assert setup.lease
    link.server.accept_setup(0.0)
    other = link.server.send_request_response(Payload(b"other"), 0.0)
    assert link.to_client() == [SetupAccepted(), LeaseGranted(1.0, 5, b"s")]
    assert link.to_server() == [
        LeaseGranted(2.0, 3, b"c"),
        RequestReceived(Interaction.REQUEST_RESPONSE, early, Payload(b"early"), 0, True),
    ]
    assert link.to_client() == [RequestReceived(Interaction.REQUEST_RESPONSE, other, Payload(b"other"), 0, True)]


@pytest.mark.rule("RS-55")
def test_rs55_a_client_without_responder_allows_nothing(core: Make, sent: Sent, feed: Feed) -> None:
    """It sends LEASE(0, 0); and it does so once, not for each LEASE of the server."""
    made = core(client=True, lease=LeaseGrant())
    feed(made, LeaseFrame(1000, 1), LeaseFrame(1000, 1))
    assert [frame for frame in sent(made) if isinstance(frame, LeaseFrame)] == [LeaseFrame(0, 0)]


# ---------------------------------------------------------------- drain


@pytest.mark.rule("RS-31")
def test_rs31_open_streams_end_and_then_the_connection(pair: Pair, feed: Feed, sent: Sent) -> None:
    """A side that drains refuses requests; when its last stream has ended, and not before, it says CONNECTION_CLOSE."""
    link = pair()
    sid = link.client.send_request_response(Payload(), 0.0)
    link.settle()
    assert link.server.drain(0.0) == []
    assert link.server.drain(0.0) == []
    assert sent(link.server) == []
    with pytest.raises(LocalProtocolError):
        link.server.send_request_response(Payload(), 0.0)
    assert feed(link.server, request(7), request(9, FrameType.REQUEST_FNF)) == []
    link.server.send_payload(sid, Payload(b"last"))
    assert link.server.next_deadline() == float("-inf")
    assert link.server.handle_timeout(0.0) == []
    frames = sent(link.server)
    rejected, answer, close = frames
    assert isinstance(rejected, ErrorFrame)
    assert (rejected.stream_id, rejected.code) == (7, ErrorCode.REJECTED)
    assert isinstance(answer, PayloadFrame)
    assert close == ErrorFrame(0, ErrorCode.CONNECTION_CLOSE, b"")
    assert feed(link.client, *frames) == [
        SetupAccepted(),
        PayloadReceived(sid, Payload(b"last"), True),
        ConnectionDraining(""),
        ConnectionEnded(
            EndReason.CLOSED_BY_PEER, ErrorCode.CONNECTION_CLOSE, "the connection has drained: every stream has ended"
        ),
    ]
    [end] = link.server.connection_lost(0, "", 0.5)
    assert end == ConnectionEnded(
        EndReason.CLOSED, ErrorCode.CONNECTION_CLOSE, "the connection has drained: every stream has ended"
    )


@pytest.mark.rule("RS-31")
def test_rs31_a_request_that_crosses_connection_close_is_rejected(pair: Pair) -> None:
    """So the client knows that it was not done, and the server does not wait any longer than for this."""
    link = pair()
    assert link.server.drain(0.0) == []
    stream_id = link.client.send_request_response(Payload(b"crossing"), 0.0)
    link.client.send_fire_and_forget(Payload(b"crossing, too"), 0.0)
    assert link.to_client() == [ConnectionDraining("")]
    assert link.to_server() == []
    assert link.to_client() == [
        StreamFailed(stream_id, ErrorCode.REJECTED, b"the connection is draining", FailedBy.PEER),
        ConnectionEnded(
            EndReason.CLOSED_BY_PEER, ErrorCode.CONNECTION_CLOSE, "the connection has drained: every stream has ended"
        ),
    ]
    [end] = link.server.connection_lost(0, "", 0.5)
    assert end == ConnectionEnded(
        EndReason.CLOSED, ErrorCode.CONNECTION_CLOSE, "the connection has drained: every stream has ended"
    )


@pytest.mark.rule("RS-31")
@pytest.mark.parametrize(("drain_timeout", "seconds"), [(30.0, 1.0), (0.25, 0.25)])
def test_rs31_a_client_that_stays_behind_connection_close_is_left_after_a_second(
    pair: Pair, sent: Sent, drain_timeout: float, seconds: float
) -> None:
    link = pair(drain_timeout=drain_timeout, keepalive_interval=100.0, max_lifetime=1000.0)
    assert link.server.drain(5.0) == []
    assert link.server.drain(5.0) == []
    assert link.server.next_deadline() == 5.0 + seconds
    assert link.server.handle_timeout(5.0 + seconds / 2) == []
    [end] = link.server.handle_timeout(5.0 + seconds)
    assert end == ConnectionEnded(EndReason.CLOSED, ErrorCode.CONNECTION_CLOSE, "the client did not close the carrier")
    assert sent(link.server) == [ErrorFrame(0, ErrorCode.CONNECTION_CLOSE, b"")]


@pytest.mark.rule("RS-31")
def test_rs31_sides_that_drain_at_the_same_time_do_not_wait_for_each_other(pair: Pair) -> None:
    link = pair()
    assert link.server.drain(0.0) == []
    [end] = link.client.drain(0.0)
    assert end == ConnectionEnded(
        EndReason.CLOSED, ErrorCode.CONNECTION_CLOSE, "the connection has drained: every stream has ended"
    )
    [end] = link.to_server()
    assert end == ConnectionEnded(EndReason.CLOSED, ErrorCode.CONNECTION_CLOSE, "both sides have ended the connection")


@pytest.mark.rule("RS-31")
def test_rs31_connection_close_of_a_peer_with_open_streams(pair: Pair, feed: Feed, sent: Sent) -> None:
    """They end in order, there are no new ones on either side, and the connection ends with the last of them."""
    link = pair()
    sid = link.client.send_request_response(Payload(), 0.0)
    link.settle()
    assert feed(link.server, ErrorFrame(0, ErrorCode.CONNECTION_CLOSE, b"bye")) == [ConnectionDraining("bye")]
    with pytest.raises(LocalProtocolError):
        link.server.send_request_response(Payload(), 0.0)
    assert feed(link.server, request(7)) == []
    link.server.send_payload(sid, Payload(b"last"))
    [end] = link.server.handle_timeout(0.0)
    assert end == ConnectionEnded(
        EndReason.CLOSED_BY_PEER, ErrorCode.CONNECTION_CLOSE, "the connection has drained: every stream has ended"
    )
    assert [frame.stream_id for frame in sent(link.server)] == [7, sid]


@pytest.mark.rule("RS-31")
def test_rs31_without_streams_it_is_over_at_once(pair: Pair, sent: Sent) -> None:
    """With no stream open both sides end at once, and the frame that says so is sent behind what was queued."""
    link = pair()
    link.client.send_fire_and_forget(Payload(b"before"), 0.0)
    [end] = link.client.drain(0.0)
    assert isinstance(end, ConnectionEnded)
    assert end.reason is EndReason.CLOSED
    events = link.to_server()
    assert [type(event) for event in events] == [RequestReceived, ConnectionDraining, ConnectionEnded]


@pytest.mark.rule("RS-31")
@pytest.mark.parametrize(
    ("cut", "reason", "code", "text"),
    [
        (
            "",
            EndReason.CLOSED_BY_PEER,
            ErrorCode.CONNECTION_CLOSE,
            "the peer closed the connection: streams were open after the drain timeout",
        ),
        ("somebody dug", EndReason.LOST, 0, "somebody dug"),
    ],
)
def test_rs31_the_drain_timeout(pair: Pair, cut: str, reason: EndReason, code: int, text: str) -> None:
    """Streams that do not end within `drain_timeout` are failed. The peer is told why, unless the carrier fails before it ends."""
    link = pair(drain_timeout=30.0, keepalive_interval=100.0)
    link.client.send_request_response(Payload(), 0.0)
    link.settle()
    link.client.drain(5.0)
    link.to_server()
    assert link.client.next_deadline() == 35.0
    events = link.client.handle_timeout(35.0)
    assert [type(event) for event in events] == [StreamFailed, ConnectionEnded]
    # The server hears of it now; its own time to drain is the carrier's.
    assert link.to_server() == [ConnectionDraining("streams were open after the drain timeout")]
    cancelled, end = link.server.connection_lost(0, cut, 35.0)
    assert isinstance(cancelled, StreamCancelled)
    assert end == ConnectionEnded(reason, code, text)


@pytest.mark.rule("RS-31")
def test_rs31_requests_that_wait_for_a_lease_are_new_ones(pair: Pair, feed: Feed) -> None:
    """A request that was not sent yet is refused when a drain begins."""
    link = pair(lease=LeaseGrant(1.0, 1))
    sids = [link.client.send_request_response(Payload(), 0.0) for _ in range(2)]
    link.settle()
    events = feed(link.client, ErrorFrame(0, ErrorCode.CONNECTION_CLOSE, b"bye"))
    assert events == [
        ConnectionDraining("bye"),
        StreamFailed(sids[1], ErrorCode.REJECTED, b"the connection is draining", FailedBy.LOCAL),
    ]


def test_draining_before_anything_was_set_up_refuses(core: Make, feed: Feed, sent: Sent, setup: Setup) -> None:
    for frames in ((), (setup(),)):
        made = core(client=False)
        if frames:
            feed(made, *frames)
        [end] = made.drain(0.0)
        assert isinstance(end, ConnectionEnded)
        assert (end.reason, end.code) == (EndReason.CLOSED, ErrorCode.REJECTED_SETUP)
        [error] = sent(made)
        assert error == ErrorFrame(0, ErrorCode.REJECTED_SETUP, b"")
