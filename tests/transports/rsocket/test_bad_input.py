"""Peers that are broken or mean it: what a core holds stays bounded, and it ends as the rules say or not at all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from levada.transports.rsocket import ConnectionState, CoreConfig, Payload, RSocketCore, Sessions
from levada.transports.rsocket.events import (
    ConnectionEnded,
    EndReason,
    Event,
    Interaction,
    RequestReceived,
    ResumeReceived,
    StreamCancelled,
)
from levada.transports.rsocket.frames import (
    CancelFrame,
    ErrorFrame,
    Frame,
    FrameType,
    KeepaliveFrame,
    LeaseFrame,
    MetadataPushFrame,
    PayloadFrame,
    RequestFrame,
    RequestNFrame,
    ResumeFrame,
    ResumeOkFrame,
)

from .conftest import Feed, Make, Pair, Sent

MANY = 30_000


def held(core: RSocketCore) -> int:
    """Everything that a core keeps, in octets or entries."""
    s = core.statistics()
    return s.streams + s.requests_waiting + s.bytes_gathered + s.bytes_unread + s.bytes_unsent + s.bytes_kept


@given(st.binary(max_size=200), st.booleans(), st.booleans())
def test_any_octets_end_in_events(data: bytes, client: bool, framed: bool) -> None:
    core = RSocketCore(CoreConfig(), client=client, framed=framed, now=0.0, random_bytes=bytes)
    events = core.receive_message(data, 0.0) if framed else core.receive_data(data, 0.0)
    assert (core.state is ConnectionState.ENDED) == any(isinstance(event, ConnectionEnded) for event in events)
    assert core.statistics().bytes_unread <= len(data)


ids = st.integers(0, 6)
small = st.builds(Payload, st.binary(max_size=5), st.none() | st.binary(max_size=5))
any_frame: st.SearchStrategy[Frame] = st.one_of(
    st.builds(
        RequestFrame,
        type=st.sampled_from([FrameType.REQUEST_RESPONSE, FrameType.REQUEST_FNF]),
        stream_id=ids,
        payload=small,
        follows=st.booleans(),
    ),
    st.builds(
        RequestFrame,
        type=st.sampled_from([FrameType.REQUEST_STREAM, FrameType.REQUEST_CHANNEL]),
        stream_id=ids,
        n=st.integers(0, 3),
        payload=small,
        follows=st.booleans(),
    ),
    st.builds(
        PayloadFrame, stream_id=ids, payload=small, next=st.booleans(), complete=st.booleans(), follows=st.booleans()
    ),
    st.builds(RequestNFrame, ids, st.integers(0, 3)),
    st.builds(CancelFrame, ids),
    st.builds(ErrorFrame, st.integers(1, 6), st.integers(0, 0x300)),
    st.builds(KeepaliveFrame, st.booleans(), st.integers(0, 5)),
    st.builds(LeaseFrame, st.integers(0, 5), st.integers(0, 5)),
    st.builds(MetadataPushFrame, st.binary(max_size=5), ids),
    st.builds(ResumeOkFrame, st.integers(0, 5)),
)


@given(st.lists(any_frame, max_size=40), st.booleans())
def test_any_frames_in_any_order(frames: list[Frame], framed: bool) -> None:
    """Only events come out of it; the streams that are left are known to the caller, and end with the connection."""
    core = RSocketCore(CoreConfig(), client=True, framed=framed, now=0.0, random_bytes=bytes)
    reported = {
        core.send_request_response(Payload(), 0.0),
        core.send_request_stream(Payload(), 2, 0.0),
        core.send_request_channel(Payload(), 2, 0.0),
    }
    for frame in frames:
        octets = frame.encode()
        for event in (
            core.receive_message(octets, 0.0)
            if framed
            else core.receive_data(len(octets).to_bytes(3, "big") + octets, 0.0)
        ):
            assert not isinstance(event, ConnectionEnded)
            if isinstance(event, RequestReceived) and event.kind is not Interaction.FIRE_AND_FORGET:
                reported.add(event.stream_id)
    live = core.stream_ids()
    assert live == {sid for sid in reported if core.has_stream(sid)}
    events = core.close(0, "", 0.0)
    assert {event.stream_id for event in events[:-1]} == live  # type: ignore[union-attr]
    core.data_to_send(0.0)
    assert held(core) == 0


@pytest.mark.rule("RS-21")
@pytest.mark.rule("RS-84")
@pytest.mark.parametrize("first", [FrameType.REQUEST_FNF, FrameType.REQUEST_RESPONSE])
def test_rs21_an_id_is_free_again_when_its_request_is_over(server: Make, feed: Feed, first: FrameType) -> None:
    """A peer may use it at once; what comes in fragments is nobody's stream until it is whole."""
    core = server()
    [request] = feed(core, RequestFrame(type=first, stream_id=1, payload=Payload(b"1")))
    assert isinstance(request, RequestReceived)
    if first is FrameType.REQUEST_RESPONSE:
        core.send_payload(1, Payload())
    assert feed(core, RequestFrame(type=first, stream_id=1, payload=Payload(b"2"), follows=True)) == []
    assert (core.has_stream(1), core.stream_ids(), core.statistics().streams) == (False, set(), 1)
    # RS-88: one more request on it, while it is in use.
    assert feed(core, RequestFrame(type=first, stream_id=1, payload=Payload(b"3"))) == []
    [end] = core.close(0, "", 0.0)
    assert isinstance(end, ConnectionEnded)


@pytest.mark.ci
def test_opens_and_cancels_of_the_peer_leave_nothing(server: Make, feed: Feed) -> None:
    core = server()
    seen = 0
    for start in range(1, 2 * MANY, 2000):
        frames: list[Frame] = []
        for sid in range(start, start + 2000, 2):
            frames += (
                RequestFrame(type=FrameType.REQUEST_STREAM, stream_id=sid, n=1, payload=Payload(b"x")),
                CancelFrame(sid),
            )
        events = feed(core, *frames)
        seen += sum(isinstance(event, StreamCancelled) for event in events)
    assert seen == MANY
    assert held(core) == 0
    assert core.state is ConnectionState.OPEN


@pytest.mark.ci
def test_opens_and_cancels_of_this_side_leave_nothing(pair: Pair) -> None:
    link = pair()
    for _ in range(MANY // 100):
        for _ in range(100):
            link.client.send_cancel(link.client.send_request_channel(Payload(b"x"), 1, 0.0))
        link.to_server()
    assert held(link.client) == held(link.server) == 0


def test_opens_and_cancels_without_a_lease_leave_nothing(client: Make) -> None:
    from levada.transports.rsocket import LeaseGrant

    core = client(lease=LeaseGrant())
    for _ in range(MANY // 10):
        core.send_cancel(core.send_request_response(Payload(b"x"), 0.0))
    assert held(core) == 0


def test_requests_that_are_never_finished_are_bounded(server: Make, feed: Feed, sent: Sent) -> None:
    core = server(max_streams=100)
    for sid in range(1, 20_000, 2):
        feed(core, RequestFrame(type=FrameType.REQUEST_FNF, stream_id=sid, payload=Payload(b"x"), follows=True))
    assert (core.statistics().streams, core.statistics().bytes_gathered) == (100, 100)
    assert sent(core) == []


def test_fragments_without_end_and_without_octets(server: Make, feed: Feed) -> None:
    core = server()
    feed(core, RequestFrame(type=FrameType.REQUEST_RESPONSE, stream_id=1, payload=Payload(), follows=True))
    nothing = PayloadFrame(stream_id=1, payload=Payload(), next=True, follows=True)
    for _ in range(100):
        assert feed(core, *[nothing] * 100) == []
    assert (held(core), core.statistics().bytes_gathered) == (1, 0)


@pytest.mark.parametrize("frame", ["SETUP", "METADATA_PUSH", "REQUEST_RESPONSE"])
def test_giant_metadata_is_refused_by_its_announcement(core: Make, server: Make, frame: str) -> None:
    made = core(client=False, max_frame_size=1000) if frame == "SETUP" else server(max_frame_size=1000)
    octets = {"SETUP": "ffffff 00000000 0500", "METADATA_PUSH": "ffffff 00000000 3100"}
    [end] = made.receive_data(bytes.fromhex(octets.get(frame, "ffffff 00000001 1100 fffff0")), 0.0)
    assert isinstance(end, ConnectionEnded)
    assert (end.reason, end.rule) == (EndReason.PROTOCOL, "RS-5")
    made.data_to_send(0.0)
    assert held(made) == 0


def test_a_large_frame_in_small_pieces_is_gathered_in_linear_time(server: Make) -> None:
    core = server()
    octets = RequestFrame(type=FrameType.REQUEST_FNF, stream_id=1, payload=Payload(bytes(2_000_000))).encode()
    octets = len(octets).to_bytes(3, "big") + octets
    events: list[Event] = []
    # 20,000 pieces; joining them anew for each would copy 20 GB.
    for at in range(0, len(octets), 100):
        events += core.receive_data(octets[at : at + 100], 0.0)
    assert [type(event) for event in events] == [RequestReceived]
    assert held(core) == 0


def test_tokens_are_not_guessed(core: Make, pair: Pair, feed: Feed) -> None:
    sessions = Sessions[RSocketCore]()
    link = pair(resume=True, sessions=sessions)
    sid = link.client.send_request_response(Payload(b"safe"), 0.0)
    link.settle()
    link.cut()
    link.client.connection_lost(0, "", 0.0)
    token = bytes(range(16))
    guesses = [token[:at] + bytes([token[at] ^ 1]) + token[at + 1 :] for at in range(16)] + [
        b"",
        token + b"\0",
        token[:-1],
    ]
    for guess in guesses:
        door = core(client=False, sessions=sessions, resume=True)
        [end] = feed(door, ResumeFrame(version=(1, 0), token=guess, server_position=0, client_position=0))
        assert isinstance(end, ConnectionEnded)
        assert door.state is ConnectionState.ENDED
    assert len(sessions) == 1
    link.client.resume(framed=False, now=0.0)
    door = core(client=False, sessions=sessions, resume=True)
    assert door.receive_data(b"".join(link.client.data_to_send(0.0)), 0.0) == [ResumeReceived(link.server)]
    link.server.resume_on(door, 0.0)
    link.settle()
    assert link.server.has_stream(sid)


def test_sessions_without_carriers_are_bounded(core: Make, feed: Feed, setup: Callable[..., Frame]) -> None:
    sessions = Sessions[RSocketCore](max_sessions=50)
    accepted = 0
    for number in range(200):
        made = core(client=False, sessions=sessions, resume=True)
        [event] = feed(made, setup(token=b"%d" % number))
        accepted += not isinstance(event, ConnectionEnded)
        if not isinstance(event, ConnectionEnded):
            made.accept_setup(0.0)
            made.connection_lost(0, "", 0.0)
    assert accepted == len(sessions) == 50


def test_a_flood_of_keepalives_is_answered_octet_by_octet(server: Make, feed: Feed) -> None:
    core = server()
    ask = KeepaliveFrame(True, 0, bytes(50))
    for _ in range(10):
        feed(core, *[ask] * 100)
        assert core.statistics().bytes_unsent <= 100 * 67, "no more goes out than came in"
        core.data_to_send(0.0)
    assert held(core) == 0


def test_credit_that_overflows_does_no_harm(server: Make, feed: Feed) -> None:
    core = server()
    feed(core, RequestFrame(type=FrameType.REQUEST_STREAM, stream_id=1, n=2**31 - 1, payload=Payload()))
    feed(core, *[RequestNFrame(1, 2**31 - 1)] * 1000)
    assert core.credit(1) == 2**31 - 1
