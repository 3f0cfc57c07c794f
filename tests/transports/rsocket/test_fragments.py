"""Fragmentation and reassembly (RS-78 to RS-88, RS-117, RS-118)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from levada.transports.rsocket import ConnectionState, CoreConfig, ErrorCode, LeaseGrant, Payload
from levada.transports.rsocket.events import (
    CreditGranted,
    FailedBy,
    Interaction,
    PayloadReceived,
    RequestReceived,
    StreamCancelled,
    StreamFailed,
)
from levada.transports.rsocket.frames import (
    CancelFrame,
    ErrorFrame,
    FrameType,
    PayloadFrame,
    RequestFrame,
    RequestNFrame,
)
from levada.transports.rsocket.streams import Gathering, split

from .conftest import Feed, Make, Pair, Sent

RESPONSE, FNF, STREAM, CHANNEL = (
    FrameType.REQUEST_RESPONSE,
    FrameType.REQUEST_FNF,
    FrameType.REQUEST_STREAM,
    FrameType.REQUEST_CHANNEL,
)


def first(stream_id: int, kind: FrameType = RESPONSE, data: bytes = b"", *, complete: bool = False) -> RequestFrame:
    n = 5 if kind in (STREAM, CHANNEL) else None
    return RequestFrame(type=kind, stream_id=stream_id, n=n, payload=Payload(data), follows=True, complete=complete)


def part(
    stream_id: int, data: bytes = b"", *, last: bool = False, complete: bool = False, n: bool = True
) -> PayloadFrame:
    return PayloadFrame(stream_id=stream_id, payload=Payload(data), next=n, follows=not last, complete=complete)


@given(st.binary(max_size=300), st.none() | st.binary(max_size=300), st.integers(50, 100), st.integers(0, 20))
def test_parts_make_the_payload_again(data: bytes, metadata: bytes | None, room: int, fixed: int) -> None:
    payload = Payload(data, metadata)
    gathering = Gathering(is_request=True, complete=False)
    parts = list(split(payload, room - fixed, room))
    for number, (piece, follows) in enumerate(parts):
        size = len(piece.data) + (0 if piece.metadata is None else 3 + len(piece.metadata))
        allowed = room - fixed if number == 0 else room
        assert size <= allowed
        assert follows is (number < len(parts) - 1)
        assert not follows or size == allowed, "a part that is not the last is full"
        gathering.add(piece)
    assert gathering.payload() == payload
    assert len(gathering) == len(data) + len(metadata or b"")


@pytest.mark.rule("RS-78")
@pytest.mark.rule("RS-80")
def test_rs78_rs80_the_frames_of_a_fragmented_payload(pair: Pair, sent: Sent) -> None:
    """F on all but the last; the first of the original type, then PAYLOAD with N; C on the last one only."""
    link = pair(fragment_size=64)
    sid = link.client.send_request_channel(Payload(bytes(130)), 7, 0.0, complete=True)
    frames = sent(link.client)
    assert [len(frame.encode()) + 3 for frame in frames] == [64, 64, 3 + 6 + 130 - 51 - 55]
    assert frames == [
        RequestFrame(type=CHANNEL, stream_id=sid, n=7, payload=Payload(bytes(51)), follows=True),
        PayloadFrame(stream_id=sid, payload=Payload(bytes(55)), next=True, follows=True),
        PayloadFrame(stream_id=sid, payload=Payload(bytes(24)), next=True, complete=True),
    ]


@pytest.mark.rule("RS-78")
@pytest.mark.parametrize("framed", [False, True])
@pytest.mark.parametrize("size", [54, 55, 56, 1000])
def test_rs78_every_kind_of_payload_arrives_whole(pair: Pair, framed: bool, size: int) -> None:
    """The four requests and PAYLOAD may be fragmented, in both directions."""
    link = pair(fragment_size=64, framed=framed)
    payload = Payload(bytes(range(256)) * 4, b"m" * size)
    link.client.send_fire_and_forget(payload, 0.0)
    answer = link.client.send_request_response(payload, 0.0)
    stream = link.client.send_request_stream(payload, 1, 0.0)
    channel = link.client.send_request_channel(payload, 1, 0.0)
    whole = link.client.send_request_channel(payload, 1, 0.0, complete=True)
    got = [event for event in link.to_server() if isinstance(event, RequestReceived)]
    assert [event.payload for event in got] == [payload] * 5
    assert [event.complete for event in got] == [True, True, True, False, True]
    assert [event.n for event in got] == [0, 0, 1, 1, 1]
    for sid in (answer, stream, channel):
        link.server.send_payload(sid, payload)
    link.server.send_payload(whole, payload, complete=True)
    link.server.send_request_n(channel, 1)
    events = link.to_client()
    assert [event for event in events if isinstance(event, PayloadReceived)] == [
        PayloadReceived(answer, payload, True),
        PayloadReceived(stream, payload, False),
        PayloadReceived(channel, payload, False),
        PayloadReceived(whole, payload, True),
    ]
    link.client.send_payload(channel, payload, complete=True)
    assert link.to_server() == [PayloadReceived(channel, payload, True)]
    assert link.server.statistics().bytes_gathered == link.client.statistics().bytes_gathered == 0
    assert not link.client.has_stream(whole)


@pytest.mark.rule("RS-79")
def test_rs79_metadata_goes_before_data(pair: Pair, sent: Sent, server: Make, feed: Feed) -> None:
    """Each fragment with metadata has its own length; the one that ends the metadata carries the first data; empty metadata stays."""
    link = pair(fragment_size=64)
    sid = link.client.send_request_response(Payload(b"d" * 60, b"m" * 60), 0.0)
    parts = [frame.payload for frame in sent(link.client) if isinstance(frame, RequestFrame | PayloadFrame)]
    assert parts == [Payload(b"", b"m" * 52), Payload(b"d" * 44, b"m" * 8), Payload(b"d" * 16)]
    core = server()
    empty = RequestFrame(type=RESPONSE, stream_id=sid, payload=Payload(b"", b""), follows=True)
    [event] = feed(core, empty, part(sid, b"x", last=True))
    assert event.payload == Payload(b"x", b"")  # type: ignore[union-attr]
    later = PayloadFrame(stream_id=3, payload=Payload(b"", b"late"), next=True)
    [event] = feed(core, first(3, data=b"d"), later)
    assert event.payload == Payload(b"d", b"late")  # type: ignore[union-attr]


@pytest.mark.rule("RS-80")
def test_rs80_continuations_with_or_without_n(server: Make, feed: Feed) -> None:
    """A receiver in reassembly takes continuation frames with and without N."""
    core = server()
    events = feed(core, first(1, STREAM, b"a"), part(1, b"b", n=False), part(1, b"c", n=False, last=True))
    assert events == [RequestReceived(Interaction.REQUEST_STREAM, 1, Payload(b"abc"), 5, True)]


@pytest.mark.rule("RS-61")
def test_rs61_the_last_fragment_of_an_answer_completes(client: Make, feed: Feed) -> None:
    """For a request-response without C this holds for the last fragment."""
    core = client()
    core.send_request_response(Payload(), 0.0)
    assert feed(core, part(1, b"a"), part(1, b"b", last=True)) == [PayloadReceived(1, Payload(b"ab"), True)]
    assert not core.has_stream(1)


@pytest.mark.rule("RS-81")
@pytest.mark.rule("RS-118")
def test_rs81_rs118_f_with_c(client: Make, server: Make, feed: Feed) -> None:
    """PAYLOAD with F and C: F is ignored. REQUEST_CHANNEL with F and C: completion takes effect with the whole payload."""
    core = client()
    core.send_request_stream(Payload(), 5, 0.0)
    assert feed(core, part(1, b"x", complete=True)) == [PayloadReceived(1, Payload(b"x"), True)]
    core.send_request_stream(Payload(), 5, 0.0)
    assert feed(core, part(3, b"a"), part(3, b"b", complete=True)) == [PayloadReceived(3, Payload(b"ab"), True)]
    made = server()
    assert feed(made, first(1, CHANNEL, b"a", complete=True), part(1, b"b", last=True)) == [
        RequestReceived(Interaction.REQUEST_CHANNEL, 1, Payload(b"ab"), 5, True)
    ]
    made.send_complete(1)
    assert not made.has_stream(1)


@pytest.mark.rule("RS-82")
def test_rs82_fragments_of_different_streams_interleave(server: Make, feed: Feed, pair: Pair, sent: Sent) -> None:
    """Those of one stream and direction do not; REQUEST_N, CANCEL, ERROR of the stream may come in between."""
    core = server()
    events = feed(
        core,
        first(1, data=b"a"),
        first(3, STREAM, data=b"x"),
        part(1, b"b"),
        RequestNFrame(3, 2),
        part(3, b"y", last=True),
        part(1, b"c", last=True),
    )
    assert events == [
        RequestReceived(Interaction.REQUEST_STREAM, 3, Payload(b"xy"), 7, True),
        RequestReceived(Interaction.REQUEST_RESPONSE, 1, Payload(b"abc"), 0, True),
    ]
    link = pair(fragment_size=64)
    sid = link.client.send_request_stream(Payload(), 9, 0.0)
    link.to_server()
    for data in (b"1" * 100, b"2" * 100):
        link.server.send_payload(sid, Payload(data))
    link.server.send_complete(sid)
    order = [frame.payload.data[:1] for frame in sent(link.server) if isinstance(frame, PayloadFrame)]
    assert order == [b"1", b"1", b"2", b"2", b""]


@pytest.mark.rule("RS-83")
def test_rs83_cancel_in_the_middle(server: Make, client: Make, feed: Feed, sent: Sent) -> None:
    """What was gathered is dropped; a request so cancelled was never started; an answer so cancelled fails at RQ."""
    core = server()
    for ending in (CancelFrame(1), ErrorFrame(1, 0x201)):
        assert feed(core, first(1, CHANNEL, b"lots"), ending, part(1, b"more", last=True)) == []
        assert core.statistics().bytes_gathered == core.statistics().streams == 0
    feed(core, RequestFrame(type=CHANNEL, stream_id=3, n=1, payload=Payload()))
    core.send_request_n(3, 1)
    assert feed(core, part(3, b"some"), CancelFrame(3)) == [StreamCancelled(3)]
    peer = client()
    peer.send_request_response(Payload(), 0.0)
    peer.data_to_send(0.0)
    assert feed(peer, part(1, b"half"), CancelFrame(1), part(1, b"rest", last=True)) == [
        StreamFailed(1, ErrorCode.CANCELED, b"canceled by the responder", FailedBy.LOCAL)
    ]
    assert (sent(peer), peer.statistics().bytes_gathered) == ([], 0)


@pytest.mark.rule("RS-69")
def test_rs69_a_half_gathered_payload_is_dropped_with_its_direction(server: Make, feed: Feed) -> None:
    """A responder that wants no further payloads gets none, the one under way included."""
    core = server()
    feed(core, RequestFrame(type=CHANNEL, stream_id=1, n=1, payload=Payload()))
    core.send_request_n(1, 5)
    feed(core, part(1, b"half"))
    core.send_cancel(1)
    assert core.statistics().bytes_gathered == 0
    assert feed(core, part(1, b"rest", last=True)) == []


@pytest.mark.rule("RS-84")
def test_rs84_a_request_is_handed_over_whole(server: Make, feed: Feed) -> None:
    """Credit for it adds up meanwhile; nothing of it is reported before."""
    core = server()
    assert feed(core, first(1, STREAM, b"a"), RequestNFrame(1, 3), RequestNFrame(1, 4)) == []
    assert feed(core, part(1, b"b", last=True)) == [
        RequestReceived(Interaction.REQUEST_STREAM, 1, Payload(b"ab"), 12, True)
    ]
    assert feed(core, RequestNFrame(1, 1)) == [CreditGranted(1, 1)]
    assert feed(core, first(3, FNF, b"a"), part(3, b"b", last=True)) == [
        RequestReceived(Interaction.FIRE_AND_FORGET, 3, Payload(b"ab"), 0, True)
    ]
    assert not core.has_stream(3)


@pytest.mark.rule("RS-85")
@pytest.mark.rule("RS-117")
def test_rs85_rs117_endless_fragments(server: Make, client: Make, feed: Feed, sent: Sent) -> None:
    """Above `max_payload_size` a request gets ERROR[INVALID], an answer CANCEL and local failure; the rest is dropped."""
    core = server(max_payload_size=1000)
    assert feed(core, first(1), *[part(1, bytes(100))] * 50) == []
    assert sent(core) == [ErrorFrame(1, ErrorCode.INVALID, b"a payload above max_payload_size")]
    assert feed(core, first(3, FNF), *[part(3, bytes(100))] * 50) == []
    assert sent(core) == []
    assert core.statistics().bytes_gathered == core.statistics().streams == 0
    feed(core, RequestFrame(type=CHANNEL, stream_id=5, n=1, payload=Payload()))
    core.send_request_n(5, 9)
    core.data_to_send(0.0)
    large = StreamFailed(5, ErrorCode.INVALID, b"a payload above max_payload_size", FailedBy.LOCAL)
    assert feed(core, *[part(5, bytes(100))] * 50) == [large]
    assert sent(core) == [ErrorFrame(5, ErrorCode.INVALID, b"a payload above max_payload_size")]
    peer = client(max_payload_size=1000)
    peer.send_request_stream(Payload(), 5, 0.0)
    peer.data_to_send(0.0)
    assert feed(peer, *[part(1, bytes(100))] * 50) == [
        StreamFailed(1, ErrorCode.INVALID, b"a payload above max_payload_size", FailedBy.LOCAL)
    ]
    assert sent(peer) == [CancelFrame(1)]
    assert peer.state is core.state is ConnectionState.OPEN


@pytest.mark.rule("RS-85")
def test_rs85_metadata_counts_and_exactly_the_limit_fits(server: Make, feed: Feed) -> None:
    """`max_payload_size` is metadata and data together."""
    for size, fits in ((900, True), (901, False)):
        core = server(max_payload_size=1000)
        head = RequestFrame(type=RESPONSE, stream_id=1, payload=Payload(b"", bytes(100)), follows=True)
        assert bool(feed(core, head, part(1, bytes(size), last=True))) is fits


def test_unfinished_payloads_of_a_connection_are_bounded_together(server: Make, feed: Feed, sent: Sent) -> None:
    core = server(max_payload_size=1000, max_reassembly=5000)
    for sid in range(1, 200, 2):
        feed(core, first(sid, data=bytes(900)))
        assert core.statistics().bytes_gathered <= 5000
    assert (core.statistics().streams, core.statistics().bytes_gathered) == (5, 4500)
    assert len(sent(core)) == 95
    feed(core, *(CancelFrame(sid) for sid in range(1, 200, 2)))
    assert (core.statistics().streams, core.statistics().bytes_gathered) == (0, 0)


@pytest.mark.rule("RS-86")
def test_rs86_the_size_of_fragments(pair: Pair) -> None:
    """`fragment_size` counts the frame and 3 octets of length, on every carrier; 64 at least; a payload that fits is not cut."""
    with pytest.raises(ValueError, match="64"):
        CoreConfig(fragment_size=63)
    for framed in (False, True):
        link = pair(fragment_size=64, framed=framed)
        link.client.send_fire_and_forget(Payload(bytes(55)), 0.0)
        link.client.send_fire_and_forget(Payload(bytes(56)), 0.0)
        link.collect()
        octets = bytes(link.bytes_in_flight["server"])
        sizes = [len(message) for message in link.messages_in_flight["server"]]
        while octets:
            sizes.append(int.from_bytes(octets[:3], "big"))
            octets = octets[3 + sizes[-1] :]
        assert sizes == [61, 61, 7]


@pytest.mark.rule("RS-87")
def test_rs87_one_permit_and_one_credit_for_all_fragments(pair: Pair) -> None:
    """A request costs one lease permit, a payload one credit, however many fragments."""
    link = pair(fragment_size=64, lease=LeaseGrant(10.0, 1))
    sid = link.client.send_request_stream(Payload(bytes(500)), 1, 0.0)
    assert len(link.to_server()) == 1
    link.server.send_payload(sid, Payload(bytes(500)))
    assert link.server.credit(sid) == 0
    assert link.to_client() == [PayloadReceived(sid, Payload(bytes(500)), False)]


@pytest.mark.rule("RS-88")
def test_rs88_a_request_for_a_stream_under_reassembly(server: Make, feed: Feed, sent: Sent) -> None:
    """It is a request on an id in use: ignored."""
    core = server()
    head = first(1, data=b"a")
    events = feed(core, head, head, first(1, FNF, b"?"), part(1, b"b", last=True))
    assert events == [RequestReceived(Interaction.REQUEST_RESPONSE, 1, Payload(b"ab"), 0, True)]
    assert sent(core) == []
