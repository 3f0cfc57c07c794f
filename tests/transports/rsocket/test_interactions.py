"""The interaction models, credit and leases (RS-60 to RS-77, RS-130 to RS-135), and what is ignored (RS-113 to RS-129)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from levada.framework.errors import LocalProtocolError
from levada.transports.rsocket import ConnectionState, ErrorCode, LeaseGrant, Payload, RSocketCore
from levada.transports.rsocket.events import (
    ConnectionEnded,
    CreditGranted,
    EndReason,
    FailedBy,
    Interaction,
    LeaseGranted,
    PayloadReceived,
    RequestReceived,
    SendingStopped,
    StreamCancelled,
    StreamCompleted,
    StreamFailed,
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
    SetupFrame,
)
from levada.transports.testing import CorePair

from .conftest import Feed, Make, Pair, Sent

MAX = 2**31 - 1


def request(stream_id: int, kind: FrameType = FrameType.REQUEST_RESPONSE, n: int | None = None) -> RequestFrame:
    return RequestFrame(type=kind, stream_id=stream_id, n=n, payload=Payload())


def item(stream_id: int, data: bytes = b"") -> PayloadFrame:
    return PayloadFrame(stream_id=stream_id, payload=Payload(data), next=True)


def nothing_left(link: CorePair[RSocketCore]) -> bool:
    both = (link.client.statistics(), link.server.statistics())
    return all((s.streams, s.peer_streams, s.bytes_gathered, s.bytes_unread, s.bytes_unsent) == (0,) * 5 for s in both)


@pytest.mark.rule("RS-60")
def test_rs60_request_response_is_over_with_its_answer(pair: Pair) -> None:
    """RS is done on sending its answer, RQ on receiving it; the answer may be a payload, nothing, or an error."""
    link = pair()
    sids = [link.client.send_request_response(Payload(b"?"), 0.0) for _ in range(3)]
    assert link.to_server() == [
        RequestReceived(Interaction.REQUEST_RESPONSE, sid, Payload(b"?"), 0, True) for sid in sids
    ]
    link.server.send_payload(1, Payload(b"!"))
    link.server.send_complete(3)
    link.server.send_error(5, ErrorCode.APPLICATION_ERROR, b"no")
    assert link.server.statistics().streams == 0
    assert link.to_client() == [
        PayloadReceived(1, Payload(b"!"), True),
        StreamCompleted(3),
        StreamFailed(5, ErrorCode.APPLICATION_ERROR, b"no"),
    ]
    assert nothing_left(link)
    with pytest.raises(LocalProtocolError):
        link.server.send_payload(1, Payload())


@pytest.mark.rule("RS-60")
def test_rs60_cancel_ends_both_sides(pair: Pair) -> None:
    """RQ is done on sending CANCEL, RS on receiving it; an answer that crosses it is ignored."""
    link = pair()
    sid = link.client.send_request_response(Payload(), 0.0)
    link.to_server()
    link.client.send_cancel(sid)
    link.server.send_payload(sid, Payload(b"late"))
    assert link.to_client() == []
    assert link.to_server() == []
    sid = link.client.send_request_response(Payload(), 0.0)
    link.client.send_cancel(sid)
    link.client.send_cancel(sid)
    assert link.to_server()[1:] == [StreamCancelled(sid)]
    assert nothing_left(link)


@pytest.mark.rule("RS-61")
@pytest.mark.rule("RS-116")
@pytest.mark.rule("RS-24")
def test_rs61_rs116_an_answer_without_c_completes(client: Make, feed: Feed) -> None:
    """A PAYLOAD for a request-response is taken as having C; without N it is an empty answer. No credit is involved."""
    core = client()
    for _ in range(2):
        core.send_request_response(Payload(), 0.0)
    assert feed(core, item(1, b"x"), item(1, b"y")) == [PayloadReceived(1, Payload(b"x"), True)]
    assert feed(core, PayloadFrame(stream_id=3, payload=Payload())) == [StreamCompleted(3)]


@pytest.mark.rule("RS-62")
def test_rs62_fire_and_forget_is_never_answered(server: Make, feed: Feed, sent: Sent) -> None:
    """It is over when it is sent, or received; no frame answers it, not for a refusal either."""
    core = server(max_streams=0)
    assert feed(core, request(1, FrameType.REQUEST_FNF)) == []
    assert sent(core) == []
    core = server()
    assert feed(core, request(1, FrameType.REQUEST_FNF)) == [
        RequestReceived(Interaction.FIRE_AND_FORGET, 1, Payload(), 0, True)
    ]
    assert not core.has_stream(1)
    sid = core.send_fire_and_forget(Payload(), 0.0)
    assert not core.has_stream(sid)
    core.send_cancel(sid)
    assert sent(core) == [request(2, FrameType.REQUEST_FNF)]


@pytest.mark.rule("RS-63")
def test_rs63_request_stream(pair: Pair) -> None:
    """Payloads as far as credit goes, then completion or an error, which need none; N and C together cost 1."""
    link = pair()
    sid = link.client.send_request_stream(Payload(b"?"), 1, 0.0)
    assert link.to_server() == [RequestReceived(Interaction.REQUEST_STREAM, sid, Payload(b"?"), 1, True)]
    link.server.send_payload(sid, Payload(b"1"))
    with pytest.raises(LocalProtocolError):
        link.server.send_payload(sid, Payload(b"2"), complete=True)
    link.server.send_complete(sid)
    assert link.to_client() == [PayloadReceived(sid, Payload(b"1"), False), StreamCompleted(sid)]
    sid = link.client.send_request_stream(Payload(), 1, 0.0)
    link.to_server()
    link.server.send_payload(sid, Payload(b"last"), complete=True)
    assert link.to_client() == [PayloadReceived(sid, Payload(b"last"), True)]
    sid = link.client.send_request_stream(Payload(), 1, 0.0)
    link.to_server()
    link.client.send_cancel(sid)
    assert link.to_server() == [StreamCancelled(sid)]
    assert nothing_left(link)


@pytest.mark.rule("RS-64")
@pytest.mark.rule("RS-65")
def test_rs64_rs65_request_channel(pair: Pair) -> None:
    """Each direction completes on its own; the requester's first payload needs no credit, its others do."""
    link = pair()
    sid = link.client.send_request_channel(Payload(b"0"), 2, 0.0)
    assert link.to_server() == [RequestReceived(Interaction.REQUEST_CHANNEL, sid, Payload(b"0"), 2, False)]
    assert link.client.credit(sid) == 0
    with pytest.raises(LocalProtocolError):
        link.client.send_payload(sid, Payload(b"1"))
    link.server.send_request_n(sid, 1)
    assert link.to_client() == [CreditGranted(sid, 1)]
    link.client.send_payload(sid, Payload(b"1"))
    link.client.send_complete(sid)
    assert link.to_server() == [PayloadReceived(sid, Payload(b"1"), False), StreamCompleted(sid)]
    assert link.client.has_stream(sid)
    link.server.send_payload(sid, Payload(b"a"))
    link.server.send_payload(sid, Payload(b"b"), complete=True)
    assert link.to_client() == [PayloadReceived(sid, Payload(b"a"), False), PayloadReceived(sid, Payload(b"b"), True)]
    assert nothing_left(link)


@pytest.mark.rule("RS-64")
def test_rs64_the_responder_may_complete_first(pair: Pair) -> None:
    """The stream lives until both sides have completed; C may come with REQUEST_CHANNEL already."""
    link = pair()
    sid = link.client.send_request_channel(Payload(), 1, 0.0)
    link.to_server()
    link.server.send_complete(sid)
    link.server.send_request_n(sid, 1)
    assert link.to_client() == [StreamCompleted(sid), CreditGranted(sid, 1)]
    link.client.send_payload(sid, Payload(b"x"), complete=True)
    assert link.to_server() == [PayloadReceived(sid, Payload(b"x"), True)]
    sid = link.client.send_request_channel(Payload(b"only"), 1, 0.0, complete=True)
    assert link.to_server() == [RequestReceived(Interaction.REQUEST_CHANNEL, sid, Payload(b"only"), 1, True)]
    with pytest.raises(LocalProtocolError):
        link.client.send_complete(sid)
    link.server.send_complete(sid)
    link.settle()
    assert nothing_left(link)


@pytest.mark.rule("RS-66")
def test_rs66_the_responders_request_n(pair: Pair, sent: Sent) -> None:
    """RS answers REQUEST_CHANNEL by REQUEST_N when its handler is ready; none if C was set."""
    link = pair()
    sid = link.client.send_request_channel(Payload(), 1, 0.0)
    link.to_server()
    link.server.send_request_n(sid, 32)
    assert sent(link.server) == [RequestNFrame(sid, 32)]
    sid = link.client.send_request_channel(Payload(), 1, 0.0, complete=True)
    link.to_server()
    link.server.send_request_n(sid, 32)
    assert sent(link.server) == []


@pytest.mark.rule("RS-67")
def test_rs67_nothing_behind_ones_own_c(pair: Pair, feed: Feed) -> None:
    """No PAYLOAD after the side's own C; one of a peer that sends it all the same is ignored."""
    link = pair()
    sid = link.client.send_request_channel(Payload(), 5, 0.0)
    link.to_server()
    link.server.send_complete(sid)
    with pytest.raises(LocalProtocolError) as caught:
        link.server.send_payload(sid, Payload())
    assert caught.value.rule == "RS-67"
    with pytest.raises(LocalProtocolError) as caught:
        link.server.send_complete(sid)
    assert caught.value.rule == "RS-67"
    link.settle()
    assert feed(link.client, item(sid)) == []


@pytest.mark.rule("RS-68")
def test_rs68_an_error_ends_both_directions(pair: Pair) -> None:
    """ERROR from either side, and CANCEL from RQ, end both directions on both sides at once."""
    link = pair()
    sids = [link.client.send_request_channel(Payload(), 9, 0.0) for _ in range(3)]
    link.to_server()
    link.server.send_error(sids[0], 0x301, b"server")
    link.client.send_error(sids[1], data=b"source failed")
    link.client.send_cancel(sids[2])
    assert link.to_client() == [StreamFailed(sids[0], 0x301, b"server")]
    assert link.to_server() == [
        StreamFailed(sids[1], ErrorCode.APPLICATION_ERROR, b"source failed"),
        StreamCancelled(sids[2]),
    ]
    assert nothing_left(link)
    sid = link.client.send_request_stream(Payload(), 9, 0.0)
    for wrong in (sid, 99):
        with pytest.raises(LocalProtocolError):
            link.client.send_error(wrong)


@pytest.mark.rule("RS-69")
def test_rs69_cancel_from_the_responder_of_a_channel(pair: Pair, feed: Feed) -> None:
    """It ends only RQ's sending direction, as if RQ had completed; RQ may still send a final C."""
    link = pair()
    sid = link.client.send_request_channel(Payload(), 9, 0.0)
    link.to_server()
    link.server.send_request_n(sid, 5)
    link.server.send_cancel(sid)
    link.server.send_cancel(sid)
    assert link.to_client() == [CreditGranted(sid, 5), SendingStopped(sid)]
    assert link.client.credit(sid) == 0
    late = PayloadFrame(stream_id=sid, payload=Payload(b"late"), next=True, complete=True)
    assert feed(link.server, late) == []
    link.server.send_payload(sid, Payload(b"x"), complete=True)
    assert link.to_client() == [PayloadReceived(sid, Payload(b"x"), True)]
    assert nothing_left(link)


@pytest.mark.rule("RS-69")
def test_rs69_elsewhere_it_is_ignored(client: Make, server: Make, feed: Feed) -> None:
    """On a stream or a request-response, and for a requester that has completed, CANCEL from RS means nothing; ours sends none."""
    core = client()
    core.send_request_response(Payload(), 0.0)
    core.send_request_stream(Payload(), 9, 0.0)
    core.send_request_channel(Payload(), 9, 0.0, complete=True)
    assert feed(core, CancelFrame(1), CancelFrame(3), CancelFrame(5)) == []
    assert all(core.has_stream(sid) for sid in (1, 3, 5))
    made = server()
    feed(made, request(1))
    with pytest.raises(LocalProtocolError):
        made.send_cancel(1)


@pytest.mark.rule("RS-69")
def test_rs69_both_orders_of_the_last_two_frames(pair: Pair) -> None:
    """RS completes, then cancels: with both the stream is over on both sides."""
    link = pair()
    sid = link.client.send_request_channel(Payload(), 9, 0.0)
    link.to_server()
    link.server.send_complete(sid)
    link.server.send_cancel(sid)
    assert link.to_client() == [StreamCompleted(sid), SendingStopped(sid)]
    assert nothing_left(link)


@pytest.mark.rule("RS-70")
def test_rs70_stream_0_goes_first_and_a_stream_keeps_its_order(pair: Pair, sent: Sent) -> None:
    """Frames on stream 0 go ahead of others in the queue; those of one stream stay in order."""
    link = pair()
    sid = link.client.send_request_stream(Payload(), 9, 0.0)
    link.to_server()
    for number in range(3):
        link.server.send_payload(sid, Payload(b"%d" % number))
    link.server.send_metadata_push(b"first")
    link.server.send_complete(sid)
    push, *rest = sent(link.server)
    assert push == MetadataPushFrame(b"first")
    assert [frame.payload.data for frame in rest if isinstance(frame, PayloadFrame)] == [b"0", b"1", b"2", b""]


@pytest.mark.rule("RS-71")
def test_rs71_the_end_of_the_carrier_ends_all_streams(pair: Pair) -> None:
    """When the carrier ends every RQ stream fails with a connection error, every RS handler is cancelled."""
    link = pair()
    mine = link.client.send_request_stream(Payload(), 1, 0.0)
    theirs = link.server.send_request_channel(Payload(), 1, 0.0)
    link.settle()
    lost = ConnectionEnded(EndReason.LOST, 0, "the peer ended the carrier")
    failed = StreamFailed(mine, ErrorCode.CONNECTION_ERROR, b"the peer ended the carrier", FailedBy.CONNECTION)
    assert link.client.receive_data(b"", 0.0) == [failed, StreamCancelled(theirs), lost]
    assert b"".join(link.client.data_to_send(0.0)) == b""
    assert link.server.connection_lost(0, "reset", 0.0) == [
        StreamFailed(theirs, ErrorCode.CONNECTION_ERROR, b"reset", FailedBy.CONNECTION),
        StreamCancelled(mine),
        ConnectionEnded(EndReason.LOST, 0, "reset"),
    ]
    assert link.server.connection_lost(0, "", 0.0) == []


# ---------------------------------------------------------------- credit


@pytest.mark.rule("RS-72")
def test_rs72_credit_adds_up(pair: Pair) -> None:
    """n=3 then n=2 allows 5; nothing is revoked."""
    link = pair()
    sid = link.client.send_request_stream(Payload(), 3, 0.0)
    link.client.send_request_n(sid, 2)
    assert link.to_server()[1:] == [CreditGranted(sid, 2)]
    assert link.server.credit(sid) == 5
    for _ in range(5):
        link.server.send_payload(sid, Payload())
    assert link.server.credit(sid) == 0


@pytest.mark.rule("RS-73")
def test_rs73_no_payload_beyond_credit(pair: Pair) -> None:
    """Sending beyond the credit is the caller's mistake, and changes nothing; a fragmented payload costs 1."""
    link = pair(fragment_size=64)
    sid = link.client.send_request_stream(Payload(), 2, 0.0)
    link.to_server()
    link.server.send_payload(sid, Payload(bytes(1000)))
    link.server.send_payload(sid, Payload(b"2"))
    link.server.data_to_send(0.0)
    with pytest.raises(LocalProtocolError) as caught:
        link.server.send_payload(sid, Payload(b"3"))
    assert caught.value.rule == "RS-73"
    assert b"".join(link.server.data_to_send(0.0)) == b""
    assert link.server.has_stream(sid)


@pytest.mark.rule("RS-74")
def test_rs74_n_must_be_above_0(pair: Pair, server: Make, feed: Feed, sent: Sent) -> None:
    """Initial n = 0: ERROR[INVALID]; REQUEST_N with 0 is ignored; neither can be sent."""
    core = server()
    wrong = [request(1, FrameType.REQUEST_STREAM, 0), request(3, FrameType.REQUEST_CHANNEL, 0)]
    assert feed(core, *wrong) == []
    assert [(e.stream_id, e.code) for e in sent(core) if isinstance(e, ErrorFrame)] == [(1, 0x204), (3, 0x204)]
    feed(core, request(5, FrameType.REQUEST_STREAM, 1))
    assert feed(core, RequestNFrame(5, 0)) == []
    assert core.credit(5) == 1
    link = pair()
    sid = link.client.send_request_stream(Payload(), 1, 0.0)
    for n in (0, -1, MAX + 1):
        with pytest.raises(LocalProtocolError):
            link.client.send_request_stream(Payload(), n, 0.0)
        with pytest.raises(LocalProtocolError):
            link.client.send_request_n(sid, n)


@pytest.mark.rule("RS-75")
@pytest.mark.parametrize("grants", [(MAX,), (1, MAX - 1), (MAX - 1, 1), (2**30, 2**30)])
def test_rs75_very_much_credit_is_never_used_up(pair: Pair, sent: Sent, grants: tuple[int, ...]) -> None:
    """Accumulated credit of 2^31-1 or more is unbounded, on both sides."""
    link = pair()
    sid = link.client.send_request_stream(Payload(), grants[0], 0.0)
    for n in grants[1:]:
        link.client.send_request_n(sid, n)
    link.to_server()
    assert link.server.credit(sid) == MAX
    link.server._streams[sid].credit -= 2**40  # as if so many had been sent
    link.client._streams[sid].demand -= 2**40
    assert link.server.credit(sid) == MAX
    link.server.send_payload(sid, Payload())
    assert link.to_client() == [PayloadReceived(sid, Payload(), False)]
    link.client.send_request_n(sid, 5)
    assert sent(link.client) == []


@pytest.mark.rule("RS-76")
def test_rs76_request_n_that_makes_no_sense_is_ignored(server: Make, client: Make, feed: Feed, sent: Sent) -> None:
    """REQUEST_N on a request-response, or where the sending side is complete."""
    core = server()
    feed(core, request(1), request(3, FrameType.REQUEST_CHANNEL, 5))
    core.send_complete(3)
    assert feed(core, RequestNFrame(1, 5), RequestNFrame(3, 5)) == []
    assert core.credit(3) == 0
    core.send_payload(1, Payload())
    assert not core.has_stream(1)
    mine = client()
    for sid in (mine.send_request_response(Payload(), 0.0), 99):
        mine.send_request_n(sid, 5)
    assert [type(frame) for frame in sent(mine)] == [RequestFrame]


@pytest.mark.rule("RS-77")
def test_rs77_a_peer_that_sends_more_than_was_asked_for(client: Make, server: Make, feed: Feed, sent: Sent) -> None:
    """Overrun: RQ cancels and fails the stream, RS of a channel sends ERROR[INVALID]; the connection lives."""
    core = client()
    core.send_request_stream(Payload(), 1, 0.0)
    core.data_to_send(0.0)
    text = b"more payloads than were requested"
    assert feed(core, item(1), item(1), item(1)) == [
        PayloadReceived(1, Payload(), False),
        StreamFailed(1, ErrorCode.INVALID, text, FailedBy.LOCAL),
    ]
    assert sent(core) == [CancelFrame(1)]
    made = server()
    feed(made, request(1, FrameType.REQUEST_CHANNEL, 5))
    assert feed(made, item(1)) == [StreamFailed(1, ErrorCode.INVALID, text, FailedBy.LOCAL)]
    assert sent(made) == [ErrorFrame(1, ErrorCode.INVALID, text)]
    assert made.state is core.state is ConnectionState.OPEN


@pytest.mark.rule("RS-73")
@pytest.mark.rule("RS-77")
@pytest.mark.parametrize("metadata", [None, b"", b"m"])
@pytest.mark.parametrize("fragments", [False, True])
def test_rs73_rs77_every_way_an_item_comes_is_counted(
    client: Make, feed: Feed, metadata: bytes | None, fragments: bool
) -> None:
    """With metadata or without, in one frame or in two, each item costs the peer 1."""
    core = client()
    sid = core.send_request_stream(Payload(), 2, 0.0)
    frames = [PayloadFrame(stream_id=sid, payload=Payload(b"x", metadata), next=True, follows=fragments)]
    if fragments:
        frames.append(PayloadFrame(stream_id=sid, payload=Payload(b"y"), next=True))
    events = [event for _ in range(3) for event in feed(core, *frames)]
    whole = PayloadReceived(sid, Payload(b"xy" if fragments else b"x", metadata), False)
    assert events[:2] == [whole, whole]
    assert [type(event) for event in events[2:]] == [StreamFailed]


def test_streams_of_the_peer_are_bounded(server: Make, feed: Feed, sent: Sent) -> None:
    core = server(max_streams=2)
    got = feed(core, request(1), request(3), request(5))
    assert len(got) == 2
    assert sent(core) == [ErrorFrame(5, ErrorCode.REJECTED, b"too many streams are open")]
    core.send_payload(1, Payload())
    assert len(feed(core, request(5))) == 1


# ---------------------------------------------------------------- leases


@pytest.mark.rule("RS-130")
def test_rs130_the_last_lease_replaces_all_earlier_ones(pair: Pair, feed: Feed) -> None:
    """N requests within ttl of reception; after that none."""
    link = pair(lease=LeaseGrant(10.0, 5))
    feed(link.client, LeaseFrame(1000, 1), now=0.0)
    first = link.client.send_request_response(Payload(), 0.5)
    second = link.client.send_request_response(Payload(), 0.5)
    assert [event.stream_id for event in link.to_server() if isinstance(event, RequestReceived)] == [first]
    link.client.send_cancel(second)
    feed(link.client, LeaseFrame(1000, 5), now=1.0)
    third = link.client.send_request_response(Payload(), 2.0)
    assert link.to_server() == []
    assert link.client.has_stream(third)


@pytest.mark.rule("RS-131")
@pytest.mark.parametrize("lease", [LeaseFrame(0, 5), LeaseFrame(1000, 0)])
def test_rs131_0_in_either_stops_all_requests(pair: Pair, feed: Feed, lease: LeaseFrame) -> None:
    """0 is accepted and means stop."""
    link = pair(lease=LeaseGrant(10.0, 5))
    assert feed(link.client, lease) == [LeaseGranted(lease.ttl_ms / 1000, lease.n, None)]
    link.client.send_request_response(Payload(), 0.0)
    assert link.to_server() == []


@pytest.mark.rule("RS-132")
def test_rs132_what_a_lease_counts(pair: Pair) -> None:
    """The four kinds of request, at their first frame; nothing else."""
    link = pair(lease=LeaseGrant(10.0, 4), fragment_size=64)
    link.client.send_fire_and_forget(Payload(), 0.0)
    link.client.send_request_response(Payload(bytes(500)), 0.0)
    stream = link.client.send_request_stream(Payload(), 1, 0.0)
    link.client.send_request_n(stream, 5)
    link.client.send_metadata_push(b"")
    link.client.send_keepalive()
    link.client.send_cancel(stream)
    channel = link.client.send_request_channel(Payload(), 1, 0.0)
    assert len([event for event in link.to_server() if isinstance(event, RequestReceived)]) == 4
    assert link.client.statistics().requests_waiting == 0
    link.server.send_request_n(channel, 1)
    link.to_client()
    link.client.send_payload(channel, Payload())
    link.client.send_request_response(Payload(), 0.0)
    assert link.client.statistics().requests_waiting == 1
    assert link.to_server() == [PayloadReceived(channel, Payload(), False)]


@pytest.mark.rule("RS-133")
def test_rs133_excess_requests_wait_in_order(pair: Pair, sent: Sent) -> None:
    """They wait, at most `max_pending` of them; cancelling one that waits sends nothing; what is done to one while it waits holds."""
    link = pair(lease=LeaseGrant(10.0, 0), max_pending=5)
    client = link.client
    sids = [
        client.send_request_response(Payload(b"0"), 0.0),
        client.send_request_stream(Payload(b"1"), 3, 0.0),
        client.send_request_channel(Payload(b"2"), 1, 0.0),
        client.send_fire_and_forget(Payload(b"3"), 0.0),
        client.send_request_channel(Payload(b"4"), 1, 0.0),
    ]
    with pytest.raises(LocalProtocolError) as caught:
        client.send_request_response(Payload(b"5"), 0.0)
    assert caught.value.rule == "RS-133"
    client.send_request_n(sids[1], 4)
    client.send_complete(sids[2])
    client.send_cancel(sids[0])
    client.send_error(sids[4])
    assert (client.has_stream(sids[0]), client.credit(sids[2]), client.has_stream(sids[3])) == (False, 0, True)
    assert sent(client) == []
    link.server.send_lease(10.0, 2, 0.0)
    link.to_client()
    assert [(e.stream_id, e.n, e.complete) for e in link.to_server() if isinstance(e, RequestReceived)] == [
        (sids[1], 7, True),
        (sids[2], 1, True),
    ]
    last = client.send_request_response(Payload(b"6"), 0.0)
    link.server.send_lease(10.0, 2, 0.0)
    link.to_client()
    assert [e.stream_id for e in link.to_server() if isinstance(e, RequestReceived)] == [sids[3], last]


@pytest.mark.rule("RS-133")
def test_rs133_or_fail_at_once(pair: Pair) -> None:
    """With `max_pending` of 0 nothing waits."""
    link = pair(lease=LeaseGrant(10.0, 0), max_pending=0)
    with pytest.raises(LocalProtocolError):
        link.client.send_request_response(Payload(), 0.0)


def test_requests_that_wait_fail_with_the_connection(pair: Pair) -> None:
    link = pair(lease=LeaseGrant(10.0, 0))
    sid = link.client.send_request_response(Payload(), 0.0)
    assert link.client.close(ErrorCode.CONNECTION_ERROR, "over", 0.0)[0] == StreamFailed(
        sid, 0x101, b"over", FailedBy.CONNECTION
    )
    assert link.client.statistics().requests_waiting == 0


@pytest.mark.rule("RS-134")
def test_rs134_requests_beyond_the_lease_are_rejected(server: Make, feed: Feed, sent: Sent) -> None:
    """The count is strict, the time has a grace; also before the first LEASE; fire-and-forget is dropped."""
    core = server(lease=LeaseGrant(10.0, 2), lease_grace=1.0)
    assert len(feed(core, request(1), request(3), now=10.9)) == 2
    assert feed(core, request(5), request(7, FrameType.REQUEST_FNF), now=10.9) == []
    assert sent(core) == [ErrorFrame(5, ErrorCode.REJECTED, b"no lease for this request")]
    core.send_lease(1.0, 5, 20.0)
    core.data_to_send(0.0)
    assert feed(core, request(9), now=22.0) == []
    assert sent(core) == [ErrorFrame(9, ErrorCode.REJECTED, b"no lease for this request")]


@pytest.mark.rule("RS-134")
def test_rs134_requests_that_cross_a_new_lease(server: Make, feed: Feed, sent: Sent) -> None:
    """What was left of a replaced lease counts for the time of the grace, beside the new one."""
    core = server(lease=LeaseGrant(10.0, 3), lease_grace=1.0)
    assert len(feed(core, request(1), now=9.0)) == 1
    core.send_lease(0.0, 0, 10.0)
    core.send_lease(10.0, 2, 10.0)
    core.data_to_send(0.0)
    assert len(feed(core, *map(request, (3, 5, 7, 9)), now=10.9)) == 4
    assert feed(core, request(11), now=10.9) == []
    assert sent(core) == [ErrorFrame(11, ErrorCode.REJECTED, b"no lease for this request")]
    core.send_lease(10.0, 2, 20.0)
    core.send_lease(10.0, 0, 30.0)
    core.data_to_send(0.0)
    assert feed(core, request(13), now=31.0) == []
    assert sent(core) == [ErrorFrame(13, ErrorCode.REJECTED, b"no lease for this request")]


@pytest.mark.rule("RS-134")
def test_rs134_before_the_first_lease(core: Make, feed: Feed, sent: Sent) -> None:
    """A client that asked for leases and has sent none yet refuses the server's requests."""
    made = core(client=True, lease=LeaseGrant(10.0, 2))
    made.data_to_send(0.0)
    feed(made, request(2))
    assert sent(made) == [ErrorFrame(2, ErrorCode.REJECTED, b"no lease for this request")]


@pytest.mark.rule("RS-135")
def test_rs135_a_lease_that_nobody_asked_for(pair: Pair, client: Make, feed: Feed) -> None:
    """LEASE without L in SETUP is ignored, and cannot be sent."""
    core = client()
    assert feed(core, LeaseFrame(1000, 0)) == []
    assert core.send_request_response(Payload(), 0.0) == 1
    with pytest.raises(LocalProtocolError):
        core.send_lease(1.0, 1, 0.0)
    link = pair(lease=LeaseGrant(1.0, 1))
    for ttl, n in ((-1.0, 1), (1.0, -1), (1.0, MAX + 1), (3e6, 1)):
        with pytest.raises(LocalProtocolError):
            link.server.send_lease(ttl, n, 0.0)


# ---------------------------------------------------------------- what is ignored


@pytest.mark.rule("RS-113")
@pytest.mark.rule("RS-120")
def test_rs113_rs120_what_makes_no_sense_is_ignored(server: Make, client: Make, feed: Feed, sent: Sent) -> None:
    """Nothing comes of it: no event, no frame, no end."""
    senseless: tuple[Frame, ...] = (CancelFrame(77), ErrorFrame(77, 0x201), item(77), RequestNFrame(77, 1), item(0))
    for core in (server(), client()):
        assert feed(core, *senseless) == []
        assert sent(core) == []
        assert core.state is ConnectionState.OPEN


@pytest.mark.rule("RS-114")
@pytest.mark.rule("RS-115")
def test_rs114_rs115_missing_credit_or_leases_are_never_an_error(pair: Pair) -> None:
    """Lack of REQUEST_N or LEASE is not handled by the protocol: nothing times out but the peer's silence."""
    link = pair(lease=LeaseGrant(10.0, 1), keepalive_interval=1000.0, max_lifetime=2000.0)
    link.client.send_request_channel(Payload(), 1, 0.0)
    link.client.send_request_response(Payload(), 0.0)
    link.settle()
    assert link.client.next_deadline() == 1000.0
    assert link.client.handle_timeout(999.0) == []
    assert link.server.next_deadline() == 2000.0


@pytest.mark.rule("RS-121")
def test_rs121_a_request_on_an_id_in_use(server: Make, feed: Feed, sent: Sent) -> None:
    """It is ignored, and the live stream is not disturbed."""
    core = server()
    feed(core, request(1, FrameType.REQUEST_STREAM, 5))
    assert feed(core, request(1), request(1, FrameType.REQUEST_FNF), request(1, FrameType.REQUEST_CHANNEL, 9)) == []
    assert (sent(core), core.credit(1)) == ([], 5)


@pytest.mark.rule("RS-122")
@pytest.mark.rule("RS-123")
@pytest.mark.rule("RS-124")
@pytest.mark.parametrize(
    "frame", [CancelFrame(9), CancelFrame(0), ErrorFrame(9, 1), ErrorFrame(9, 0x101), item(9), item(0)]
)
def test_rs122_rs123_rs124_frames_of_unknown_streams(server: Make, client: Make, feed: Feed, frame: Frame) -> None:
    """CANCEL, ERROR, PAYLOAD on an unknown stream, CANCEL and PAYLOAD on stream 0: ignored."""
    for core in (server(), client()):
        assert feed(core, frame) == []
        assert core.state is ConnectionState.OPEN


@pytest.mark.rule("RS-126")
@pytest.mark.rule("RS-127")
@pytest.mark.rule("RS-129")
def test_rs126_rs127_rs129_what_a_server_ignores(
    server: Make, feed: Feed, sent: Sent, setup: Callable[..., SetupFrame]
) -> None:
    """A SETUP after an accepted one, ERROR with setup codes, RESUME_OK, RESUME on a stream; and what both sides ignore."""
    core = server()
    resume = ResumeFrame(version=(1, 0), token=b"t", server_position=0, client_position=0, stream_id=3)
    assert feed(core, setup(), setup(stream_id=3), ResumeOkFrame(0), resume) == []
    assert feed(core, *(ErrorFrame(0, code) for code in (1, 2, 3, 4))) == []
    assert feed(core, LeaseFrame(1, 1, stream_id=3), KeepaliveFrame(True, 0, stream_id=3), ResumeOkFrame(0, 3)) == []
    assert feed(core, RequestNFrame(0, 1), RequestNFrame(9, 1)) == []
    assert (sent(core), core.state) == ([], ConnectionState.OPEN)


@pytest.mark.rule("RS-128")
@pytest.mark.rule("RS-129")
def test_rs128_rs129_what_a_client_ignores(
    client: Make, feed: Feed, sent: Sent, setup: Callable[..., SetupFrame]
) -> None:
    """ERROR with setup codes after establishment, SETUP, RESUME, a RESUME_OK that it did not ask for; and what both ignore."""
    core = client()
    resume = ResumeFrame(version=(1, 0), token=b"t", server_position=0, client_position=0)
    assert feed(core, *(ErrorFrame(0, code) for code in (1, 2, 3, 4)), setup(), resume, ResumeOkFrame(0)) == []
    assert feed(core, LeaseFrame(1, 1, stream_id=3), KeepaliveFrame(True, 0, stream_id=3), ResumeOkFrame(0, 3)) == []
    assert (sent(core), core.state) == ([], ConnectionState.OPEN)


def test_a_subscription_belongs_to_the_other_dialect(client: Make) -> None:
    with pytest.raises(LocalProtocolError):
        client().send_request_subscription(Payload(), 1, 0.0)


@pytest.mark.parametrize("payload", [Payload("text"), Payload(b"", "text"), Payload(bytearray(1))])  # type: ignore[arg-type]
def test_what_is_not_octets_is_refused_at_the_call(pair: Pair, payload: Payload) -> None:
    link = pair()
    with pytest.raises(TypeError, match="bytes"):
        link.client.send_request_response(payload, 0.0)
    sid = link.client.send_request_stream(Payload(), 1, 0.0)
    link.settle()
    with pytest.raises(TypeError, match="bytes"):
        link.server.send_payload(sid, payload)
    assert link.server.credit(sid) == 1
    assert b"".join(link.server.data_to_send(0.0)) == b""
