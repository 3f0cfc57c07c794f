"""Sessions that outlive their carriers (RS-90 to RS-104)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from levada.framework.errors import ConfigurationError, LocalProtocolError
from levada.transports.rsocket import ConnectionState, ErrorCode, LeaseGrant, Payload, RSocketCore, Sessions
from levada.transports.rsocket.events import (
    ConnectionEnded,
    EndReason,
    Event,
    FailedBy,
    PayloadReceived,
    RequestReceived,
    ResumeReceived,
    SessionResumed,
    SessionSuspended,
    SetupAccepted,
    StreamCancelled,
    StreamFailed,
)
from levada.transports.rsocket.frames import (
    CancelFrame,
    ErrorFrame,
    FrameType,
    KeepaliveFrame,
    LeaseFrame,
    PayloadFrame,
    RequestFrame,
    RequestNFrame,
    ResumeFrame,
    ResumeOkFrame,
    SetupFrame,
)
from levada.transports.rsocket.resumption import Replay

from .conftest import Feed, Make, Pair, Sent

V3 = RequestFrame(type=FrameType.REQUEST_RESPONSE, stream_id=1, payload=Payload(b"hello", b"echo"))


class Net:
    """A session and its carriers: cut, and come back on a new one."""

    def __init__(self, pair: Pair, core: Make, **config: object) -> None:
        self.sessions = Sessions[RSocketCore]()
        self.core, self.config = core, config
        self.link = pair(resume=True, sessions=self.sessions, **config)
        self.client, self.server = self.link.client, self.link.server

    def cut(self) -> None:
        self.link.cut()
        for end in (self.client, self.server):
            assert isinstance(end.connection_lost(0, "cut", self.link.now)[-1], SessionSuspended)

    def dial(self, *, framed: bool = False) -> tuple[RSocketCore, list[Event]]:
        """Open a new carrier and deliver RESUME; return the server's core of that carrier, and what it reports."""
        self.client.resume(framed=framed, now=self.link.now)
        door = self.core(client=False, framed=framed, sessions=self.sessions, resume=True, **self.config)
        self.link.framed = framed
        events: list[Event] = []
        for message in self.client.data_to_send(self.link.now):
            events += (door.receive_message if framed else door.receive_data)(message, self.link.now)
        return door, events

    def resume(self, *, framed: bool = False) -> tuple[list[Event], list[Event]]:
        """Come back; return the events of the server and of the client when all is delivered."""
        door, events = self.dial(framed=framed)
        assert events == [ResumeReceived(self.server)]
        self.server.resume_on(door, self.link.now)
        of_server = self.server.take_events()
        of_client, more = self.link.settle()
        return of_server + more, of_client


@pytest.fixture
def net(pair: Pair, core: Make) -> Callable[..., Net]:
    def make(**config: object) -> Net:
        return Net(pair, core, **config)

    return make


@pytest.mark.rule("RS-90")
@pytest.mark.rule("RS-91")
@pytest.mark.rule("RS-92")
def test_rs90_rs91_rs92_positions(server: Make, feed: Feed, sent: Sent) -> None:
    """Octets of whole frames of streams, without the length field: V3 (18), V13 (10) and a KEEPALIVE make 28."""
    core = server(resume=True)
    ask = KeepaliveFrame(True, 0)
    feed(core, V3, RequestNFrame(3, 5), ask)
    assert sent(core) == [KeepaliveFrame(False, 28)]
    feed(core, CancelFrame(1), ErrorFrame(77, 1), PayloadFrame(stream_id=9, payload=Payload(b"xx"), next=True), ask)
    assert sent(core) == [KeepaliveFrame(False, 28 + 6 + 10 + 8)]
    half = V3.encode()
    core.receive_data(len(half).to_bytes(3, "big") + half[:-1], 0.0)
    core.connection_lost(0, "", 0.0)
    assert core._received == 52, "a frame cut off is not received"


@pytest.mark.rule("RS-90")
def test_rs90_items_count_whichever_way_they_are_read(client: Make, feed: Feed, sent: Sent) -> None:
    """Items with and without metadata, fragments, the last one: all have their octets in the position."""
    core = client(resume=True)
    sid = core.send_request_stream(Payload(), 9, 0.0)
    core.data_to_send(0.0)
    before = core._received
    items = [
        PayloadFrame(stream_id=sid, payload=Payload(b"plain"), next=True),
        PayloadFrame(stream_id=sid, payload=Payload(b"with", b"metadata"), next=True),
        PayloadFrame(stream_id=sid, payload=Payload(b"frag"), next=True, follows=True),
        PayloadFrame(stream_id=sid, payload=Payload(b"ment"), next=True),
        PayloadFrame(stream_id=sid, payload=Payload(b"last"), next=True, complete=True),
    ]
    assert len(feed(core, *items, KeepaliveFrame(True, 0))) == 4
    assert sent(core) == [KeepaliveFrame(False, before + sum(len(item.encode()) for item in items))]


@pytest.mark.rule("RS-91")
def test_rs91_no_ext_on_a_stream_of_a_session(net: Callable[..., Net]) -> None:
    """We send no EXT on a stream above 0 in a session that can be resumed."""
    made = net()
    with pytest.raises(LocalProtocolError):
        made.client.send_extension(1, 5, b"")
    made.client.send_extension(0, 5, b"")


@pytest.mark.rule("RS-93")
def test_rs93_a_keepalive_releases_what_the_peer_has(net: Callable[..., Net]) -> None:
    """Frames that end at or before the position are dropped."""
    made = net()
    made.client.send_request_response(Payload(bytes(94)), 0.0)
    assert made.client.statistics().bytes_kept == 100
    made.link.settle()
    made.client.send_keepalive()
    made.link.settle()
    assert made.client.statistics().bytes_kept == 0


@pytest.mark.rule("RS-93")
@pytest.mark.parametrize("position", [99, 101, 250, 2**63 - 1])
def test_rs93_positions_that_cannot_be(net: Callable[..., Net], feed: Feed, position: int) -> None:
    """Below one reported earlier, above what was sent, inside a frame: ERROR[CONNECTION_ERROR], session over."""
    made = net()
    for _ in range(2):
        made.client.send_request_response(Payload(bytes(94)), 0.0)
    assert len(feed(made.client, KeepaliveFrame(False, 100))) == 1
    events = feed(made.client, KeepaliveFrame(False, position))
    end = events[-1]
    assert isinstance(end, ConnectionEnded)
    assert (end.reason, end.rule, end.code) == (EndReason.PROTOCOL, "RS-93", ErrorCode.CONNECTION_ERROR)


@pytest.mark.rule("RS-94")
def test_rs94_the_buffer_is_bounded(net: Callable[..., Net]) -> None:
    """When it is full the oldest frames go, and resuming may be refused; at half the peer is asked for its position."""
    replay = Replay(2 * (10 + 48))
    for _ in range(4):
        replay.keep(bytes(10))
    assert (replay.first, replay.sent, replay.kept, len(replay.frames())) == (20, 40, 20, 2)
    assert replay.release(5)
    assert replay.release(30)
    assert not replay.release(35)
    made = net(resume_buffer=1000)
    kept = []
    for _ in range(30):
        made.client.send_fire_and_forget(Payload(bytes(94)), 0.0)
        assert made.client.statistics().bytes_kept <= 1000
        made.link.settle()
        kept.append(made.client.statistics().bytes_kept)
    assert max(kept) == 300, "with 48 bytes more for each, four frames are more than half"
    for _ in range(11):
        made.client.send_fire_and_forget(Payload(bytes(94)), 0.0)
    made.cut()
    door, events = made.dial()
    assert events == [ResumeReceived(made.server)]
    made.server.resume_on(door, 0.0)
    [refused] = made.server.take_events()
    assert isinstance(refused, ConnectionEnded)
    assert refused.code == ErrorCode.REJECTED_RESUME


@pytest.mark.rule("RS-95")
def test_rs95_resume_is_the_first_frame_and_alone(net: Callable[..., Net], sent: Sent) -> None:
    """New carrier: RESUME with token and version of SETUP, nothing else until RESUME_OK."""
    made = net(version=(0, 2))
    made.client.send_request_response(Payload(b"lost"), 0.0)
    made.cut()
    made.client.send_request_response(Payload(b"later"), 0.0)
    made.client.resume(framed=False, now=0.0)
    made.client.send_request_response(Payload(b"latest"), 0.0)
    with pytest.raises(LocalProtocolError):
        made.client.send_metadata_push(b"")
    assert sent(made.client) == [
        ResumeFrame(version=(0, 2), token=bytes(range(16)), server_position=0, client_position=0)
    ]


@pytest.mark.rule("RS-95")
def test_rs95_a_stream_frame_before_resume_ok(net: Callable[..., Net], feed: Feed) -> None:
    """It has no position that this side could know; other frames of stream 0 are ignored."""
    made = net()
    made.cut()
    made.client.resume(framed=False, now=0.0)
    assert feed(made.client, KeepaliveFrame(True, 0), ResumeOkFrame(0, stream_id=0).encode()[:6] + b"") != []
    assert made.client.state is ConnectionState.ENDED  # RESUME_OK without its position
    made = net()
    made.cut()
    made.client.resume(framed=False, now=0.0)
    [end] = feed(made.client, PayloadFrame(stream_id=1, payload=Payload(), next=True))
    assert isinstance(end, ConnectionEnded)
    assert end.rule == "RS-95"


@pytest.mark.rule("RS-96")
@pytest.mark.rule("RS-97")
@pytest.mark.parametrize("framed", [False, True])
def test_rs96_rs97_what_was_lost_is_sent_again(net: Callable[..., Net], framed: bool) -> None:
    """RESUME_OK, then all frames that the other side lacks, in order; then it goes on. Nothing twice. Carriers may differ."""
    made = net()
    client, server, link = made.client, made.server, made.link
    sid = client.send_request_stream(Payload(b"?"), 9, 0.0)
    link.settle()
    for number in (b"1", b"2", b"3"):
        server.send_payload(sid, Payload(number))
    link.to_client(10 + 5)  # one item and a part of the next
    client.send_request_n(sid, 5)
    made.cut()
    server.send_payload(sid, Payload(b"4"))
    of_server, of_client = made.resume(framed=framed)
    assert of_server[0] == SessionResumed(7 * 3)
    assert of_client[0] == SessionResumed(10)
    assert [event.payload.data for event in of_client if isinstance(event, PayloadReceived)] == [b"2", b"3", b"4"]
    assert server.credit(sid) == 10
    server.send_payload(sid, Payload(b"5"), complete=True)
    assert link.to_client() == [PayloadReceived(sid, Payload(b"5"), True)]


@pytest.mark.rule("RS-96")
def test_rs96_resume_that_cannot_be(net: Callable[..., Net], core: Make, feed: Feed, sent: Sent) -> None:
    """Unknown token, another version, or no resumption here: ERROR[REJECTED_RESUME], close; the session of that token lives."""
    made = net()
    token = bytes(range(16))
    right = {"version": (1, 0), "token": token, "server_position": 0, "client_position": 0}
    for wrong in ({"token": b"guess"}, {"token": b""}, {"version": (0, 2)}):
        door = core(client=False, sessions=made.sessions, resume=True)
        [end] = feed(door, ResumeFrame(**(right | wrong)))  # type: ignore[arg-type]
        assert end == ConnectionEnded(EndReason.REFUSED, ErrorCode.REJECTED_RESUME, "no such session", "RS-96")
        assert sent(door) == [ErrorFrame(0, ErrorCode.REJECTED_RESUME, b"no such session")]
    without = core(client=False)
    assert feed(without, ResumeFrame(**right))[-1].code == ErrorCode.REJECTED_RESUME  # type: ignore[arg-type,union-attr]
    assert made.server.state is ConnectionState.OPEN
    made.server.drain(0.0)
    door = core(client=False, sessions=made.sessions, resume=True)
    assert feed(door, ResumeFrame(**right))[-1].code == ErrorCode.REJECTED_RESUME  # type: ignore[arg-type,union-attr]


@pytest.mark.rule("RS-96")
@pytest.mark.parametrize(
    ("server_position", "client_position"), [(0, 1), (1, 0), (12, 0), (8, 0)], ids=["gap", "inside", "beyond", "past"]
)
def test_rs96_positions_that_do_not_meet(
    net: Callable[..., Net], core: Make, feed: Feed, sent: Sent, server_position: int, client_position: int
) -> None:
    """A gap on either side, or a position that cannot be: ERROR[REJECTED_RESUME], and the session ends."""
    made = net()
    made.server.send_request_response(Payload(b"12"), 0.0)
    door = core(client=False, sessions=made.sessions, resume=True)
    frame = ResumeFrame(
        version=(1, 0), token=bytes(range(16)), server_position=server_position, client_position=client_position
    )
    feed(door, frame)
    if (server_position, client_position) == (8, 0):
        feed(made.server, KeepaliveFrame(False, 8))
        made.server.send_request_response(Payload(), 0.0)
        made.server.resume_on(door, 0.0)
        frame_ok = made.server.take_events()
        assert frame_ok == [SessionResumed(6)]
        return
    made.server.resume_on(door, 0.0)
    events = made.server.take_events()
    assert [type(event) for event in events] == [StreamFailed, ConnectionEnded]
    assert sent(made.server)[-1] == ErrorFrame(0, ErrorCode.REJECTED_RESUME, b"what is missing is no longer there")
    assert len(made.sessions) == 0


@pytest.mark.rule("RS-97")
@pytest.mark.parametrize("position", [5, 21, 9])
def test_rs97_a_resume_ok_that_cannot_be(net: Callable[..., Net], feed: Feed, sent: Sent, position: int) -> None:
    """The client cannot send again from there: ERROR[CONNECTION_ERROR], session over."""
    made = net()
    for _ in range(2):
        made.client.send_request_response(Payload(b"1234"), 0.0)
    feed(made.client, KeepaliveFrame(False, 10))
    made.client.connection_lost(0, "", 0.0)
    made.client.resume(framed=False, now=0.0)
    made.client.data_to_send(0.0)
    events = feed(made.client, ResumeOkFrame(position))
    end = events[-1]
    assert isinstance(end, ConnectionEnded)
    assert (end.rule, end.code) == ("RS-97", ErrorCode.CONNECTION_ERROR)
    [error] = sent(made.client)
    assert isinstance(error, ErrorFrame)
    assert error.code == ErrorCode.CONNECTION_ERROR


@pytest.mark.rule("RS-98")
@pytest.mark.rule("RS-99")
def test_rs98_rs99_how_resuming_fails(net: Callable[..., Net], feed: Feed) -> None:
    """REJECTED_RESUME: never again, all streams fail. CONNECTION_ERROR or a lost carrier: it may try again within the session time."""
    made = net(resume_timeout=60.0)
    sid = made.client.send_request_response(Payload(), 0.0)
    made.link.cut()
    assert made.client.connection_lost(0, "cut", 1.0) == [SessionSuspended(61.0, "cut")]
    made.client.resume(framed=False, now=2.0)
    assert feed(made.client, ErrorFrame(0, ErrorCode.CONNECTION_ERROR, b"busy"), now=3.0) == [
        SessionSuspended(61.0, "busy")
    ]
    made.client.resume(framed=False, now=4.0)
    assert made.client.connection_lost(0, "again", 5.0) == [SessionSuspended(61.0, "again")]
    made.client.resume(framed=False, now=6.0)
    assert feed(made.client, ErrorFrame(0, ErrorCode.REJECTED_RESUME, b"gone"), now=7.0) == [
        StreamFailed(sid, ErrorCode.REJECTED_RESUME, b"gone", FailedBy.CONNECTION),
        ConnectionEnded(EndReason.REFUSED, ErrorCode.REJECTED_RESUME, "gone"),
    ]
    with pytest.raises(LocalProtocolError):
        made.client.resume(framed=False, now=8.0)


@pytest.mark.rule("RS-99")
def test_rs99_giving_up_while_resuming(net: Callable[..., Net], sent: Sent) -> None:
    """ERROR frames in this phase are CONNECTION_ERROR or REJECTED_RESUME, also when the client drains."""
    made = net()
    made.cut()
    made.client.resume(framed=False, now=0.0)
    [end] = made.client.drain(0.0)
    assert isinstance(end, ConnectionEnded)
    assert sent(made.client)[1:] == [ErrorFrame(0, ErrorCode.CONNECTION_ERROR, b"")]
    [end] = made.server.drain(0.0)
    assert isinstance(end, ConnectionEnded)
    assert sent(made.server) == []


@pytest.mark.rule("RS-100")
def test_rs100_resume_on_a_carrier_that_has_a_connection(
    net: Callable[..., Net], server: Make, feed: Feed, sent: Sent
) -> None:
    """ERROR[CONNECTION_ERROR] and the carrier closes; the session survives. Without a session it is the end."""
    made = net()
    frame = ResumeFrame(version=(1, 0), token=bytes(range(16)), server_position=0, client_position=0)
    [suspended] = feed(made.server, frame)
    assert isinstance(suspended, SessionSuspended)
    [error] = sent(made.server)
    assert isinstance(error, ErrorFrame)
    assert error.code == ErrorCode.CONNECTION_ERROR
    made.client.connection_lost(0, "", 0.0)
    assert made.resume()[0] == [SessionResumed(0)]
    core = server()
    [end] = feed(core, frame)
    assert isinstance(end, ConnectionEnded)
    assert end.rule == "RS-100"


@pytest.mark.rule("RS-101")
@pytest.mark.parametrize("code", [ErrorCode.CONNECTION_ERROR, ErrorCode.CONNECTION_CLOSE])
def test_rs101_an_error_of_the_connection_ends_the_session(
    net: Callable[..., Net], feed: Feed, code: ErrorCode
) -> None:
    """CONNECTION_ERROR or CONNECTION_CLOSE, sent or received, right after RESUME_OK too: no resumption."""
    made = net()
    made.client.send_request_response(Payload(), 0.0)
    made.link.settle()
    made.cut()
    made.resume()
    feed(made.client, ErrorFrame(0, code))
    events = made.client.connection_lost(0, "", 0.0) if code is ErrorCode.CONNECTION_CLOSE else []
    assert made.client.state is ConnectionState.ENDED
    assert not any(isinstance(event, SessionSuspended) for event in events)
    if code is ErrorCode.CONNECTION_CLOSE:
        made.server.drain(0.0)
        made.server.connection_lost(0, "", 0.0)
    else:
        made.server.close(ErrorCode.CONNECTION_ERROR, "", 0.0)
    assert made.server.state is ConnectionState.ENDED
    assert len(made.sessions) == 0


@pytest.mark.rule("RS-102")
def test_rs102_a_session_lives_for_its_time(net: Callable[..., Net]) -> None:
    """Streams stay alive and new frames are kept; after `resume_timeout` everything is given up, on both sides."""
    made = net(resume_timeout=60.0)
    mine = made.client.send_request_response(Payload(), 0.0)
    made.link.settle()
    made.link.now = 10.0
    made.cut()
    for end in (made.client, made.server):
        assert end.next_deadline() == 70.0
        assert end.handle_timeout(69.9) == []
        assert end.has_stream(mine)
    later = made.client.send_request_response(Payload(b"later"), 11.0)
    made.server.send_payload(mine, Payload(b"kept"))
    events = made.client.handle_timeout(70.0)
    assert [(e.stream_id, e.by) for e in events if isinstance(e, StreamFailed)] == [
        (mine, FailedBy.CONNECTION),
        (later, FailedBy.CONNECTION),
    ]
    assert isinstance(events[-1], ConnectionEnded)
    assert events[-1].reason is EndReason.TIMED_OUT
    assert [type(event) for event in made.server.handle_timeout(70.0)] == [ConnectionEnded]
    assert len(made.sessions) == 0


@pytest.mark.rule("RS-102")
def test_rs102_a_resume_replaces_a_carrier_that_looks_alive(net: Callable[..., Net]) -> None:
    """What was half read and half sent on the old carrier is forgotten."""
    made = net()
    sid = made.client.send_request_response(Payload(b"whole"), 0.0)
    made.link.to_server(7)
    made.server.send_fire_and_forget(Payload(b"from the server"), 0.0)
    made.link.cut()
    made.client.connection_lost(0, "", 0.0)
    of_server, of_client = made.resume()
    assert [e.stream_id for e in of_server if isinstance(e, RequestReceived)] == [sid]
    assert [e.payload.data for e in of_client if isinstance(e, RequestReceived)] == [b"from the server"]


@pytest.mark.rule("RS-102")
def test_rs102_no_answer_to_resume(net: Callable[..., Net]) -> None:
    """A server that takes the carrier and says nothing: another attempt, within the session's time."""
    made = net(resume_timeout=60.0, max_lifetime=20.0, keepalive_interval=5.0)
    made.cut()
    made.client.resume(framed=False, now=1.0)
    assert made.client.next_deadline() == 21.0
    assert made.client.handle_timeout(21.0) == [SessionSuspended(60.0, "no answer to RESUME")]


@pytest.mark.rule("RS-103")
def test_rs103_leases_do_not_carry_over(net: Callable[..., Net]) -> None:
    """Both sides send a LEASE on the new carrier; requests wait for it; keepalive starts afresh."""
    made = net(lease=LeaseGrant(100.0, 5), keepalive_interval=10.0)
    made.link.now = 8.0
    made.cut()
    waiting = made.client.send_request_response(Payload(b"waits"), 8.0)
    assert made.client.statistics().requests_waiting == 1
    door, _ = made.dial()
    made.server.resume_on(door, 8.0)
    made.link.collect()
    octets = bytes(made.link.bytes_in_flight["client"])
    assert (
        octets
        == bytes.fromhex("00000e")
        + ResumeOkFrame(0).encode()
        + bytes.fromhex("00000e")
        + LeaseFrame(100_000, 5).encode()
    )
    of_client, of_server = made.link.settle()
    assert [type(event).__name__ for event in of_client] == ["SessionResumed", "LeaseGranted"]
    assert [type(event).__name__ for event in of_server] == ["SessionResumed", "LeaseGranted", "RequestReceived"]
    assert made.server.has_stream(waiting)
    assert made.client.next_deadline() == 18.0


@pytest.mark.rule("RS-103")
def test_rs103_requests_that_are_sent_again_use_up_the_old_lease(net: Callable[..., Net]) -> None:
    """Also after its time; the new lease counts whole beside them."""
    made = net(lease=LeaseGrant(2.0, 2), lease_grace=1.0)
    again = [made.client.send_request_response(Payload(b"lost"), 1.0) for _ in range(2)]
    made.link.now = 8.0
    made.cut()
    of_server, _ = made.resume()
    new = [made.client.send_request_response(Payload(b"new"), 8.0) for _ in range(2)]
    of_client, more = made.link.settle()
    seen = [event.stream_id for event in (*of_server, *more) if isinstance(event, RequestReceived)]
    assert seen == again + new
    assert not [event for event in of_client if isinstance(event, StreamFailed)]


@pytest.mark.rule("RS-104")
def test_rs104_tokens(core: Make, sent: Sent) -> None:
    """16 random octets by default; the application may supply its own; valid only for the session's life."""
    for config, token in (({}, bytes(range(16))), ({"resume_token": b"own"}, b"own")):
        [setup] = sent(core(client=True, resume=True, **config))
        assert isinstance(setup, SetupFrame)
        assert setup.token == token
    with pytest.raises(ConfigurationError):
        RSocketCore(core(client=True, resume=True)._config, client=False, framed=False, now=0.0, random_bytes=bytes)


def test_a_client_that_was_never_answered_may_resume(core: Make, feed: Feed, sent: Sent) -> None:
    made = core(client=True, resume=True)
    sid = made.send_request_response(Payload(b"x"), 0.0)
    made.connection_lost(0, "", 0.0)
    made.resume(framed=False, now=0.0)
    made.data_to_send(0.0)
    assert feed(made, ResumeOkFrame(0)) == [SetupAccepted(), SessionResumed(7)]
    [request] = sent(made)
    assert isinstance(request, RequestFrame)
    assert request.stream_id == sid


def test_a_door_whose_session_ended_meanwhile(net: Callable[..., Net]) -> None:
    made = net()
    made.cut()
    door, _ = made.dial()
    made.server.close(ErrorCode.CONNECTION_ERROR, "gone", 0.0)
    with pytest.raises(LocalProtocolError):
        made.server.resume_on(door, 0.0)
    [end] = door.close(ErrorCode.REJECTED_RESUME, "the session is over", 0.0)
    assert isinstance(end, ConnectionEnded)
    assert made.client.receive_data(b"".join(door.data_to_send(0.0)), 0.0)[-1] == ConnectionEnded(
        EndReason.REFUSED, ErrorCode.REJECTED_RESUME, "the session is over"
    )


def test_only_a_door_can_be_taken_over(net: Callable[..., Net], server: Make) -> None:
    made = net()
    with pytest.raises(LocalProtocolError):
        made.server.resume_on(server(), 0.0)
    made.cut()
    with pytest.raises(LocalProtocolError):
        made.server.resume(framed=False, now=0.0)
    assert made.server.state is ConnectionState.SUSPENDED


def test_what_came_behind_resume_is_not_lost(net: Callable[..., Net], feed: Feed) -> None:
    """A client that does not wait for RESUME_OK breaks RS-95, but its octets arrive in order all the same."""
    made = net()
    made.cut()
    door, _ = made.dial()
    assert feed(door, V3) == []
    made.server.resume_on(door, 0.0)
    events = made.server.take_events()
    assert [type(event) for event in events] == [SessionResumed, RequestReceived]
    door.connection_lost(0, "", 0.0)
    assert door.state is ConnectionState.ENDED


def test_cancelled_while_there_is_no_carrier(net: Callable[..., Net]) -> None:
    made = net()
    sid = made.client.send_request_response(Payload(), 0.0)
    made.link.settle()
    made.cut()
    made.client.send_cancel(sid)
    of_server, _ = made.resume()
    assert of_server == [SessionResumed(0), StreamCancelled(sid)]


@pytest.mark.rule("RS-94")
def test_rs94_the_sessions_of_a_listener_share_a_bound() -> None:
    """Where they pass it, the one that keeps the most loses what it keeps: never one that keeps little. What is over is free again."""
    sessions = Sessions[RSocketCore](max_bytes=100_000)
    honest = Replay(1_000_000, sessions.room)
    for _ in range(5):
        honest.keep(bytes(952))  # and 48 for each
    greedy = [Replay(1_000_000, sessions.room) for _ in range(3)]
    for replay in greedy:
        for _ in range(60):
            replay.keep(bytes(952))
            assert sessions.room.used <= 100_000
    assert [len(replay.frames()) for replay in greedy] == [0, 0, 60]
    assert (honest.first, len(honest.frames())) == (0, 5)
    assert honest.release(honest.sent)
    assert greedy[0].first == greedy[0].sent == 60 * 952
    for replay in greedy:
        replay.close()
    assert sessions.room.used == 0
