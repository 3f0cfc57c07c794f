"""Carriers, frame lengths, header, metadata (RS-1 to RS-30)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from levada.framework.errors import ConfigurationError, LocalProtocolError
from levada.transports.rsocket import (
    ConnectionState,
    ErrorCode,
    Payload,
    RSocketCore,
    StreamIdsExhausted,
)
from levada.transports.rsocket.events import (
    ConnectionEnded,
    EndReason,
    Event,
    ExtensionReceived,
    FailedBy,
    Interaction,
    KeepaliveReceived,
    MetadataPushed,
    PayloadReceived,
    RequestReceived,
    StreamCancelled,
    StreamCompleted,
    StreamFailed,
)
from levada.transports.rsocket.frames import (
    CancelFrame,
    ErrorFrame,
    ExtensionFrame,
    FrameType,
    KeepaliveFrame,
    LeaseFrame,
    MetadataPushFrame,
    PayloadFrame,
    RequestFrame,
    RequestNFrame,
    ResumeOkFrame,
    SetupFrame,
    UnknownFrame,
)
from levada.transports.rsocket.streams import StreamIds
from levada.transports.testing import CorePair

from .conftest import Feed, Make, Pair, Sent

ECHO = RequestFrame(type=FrameType.REQUEST_RESPONSE, stream_id=1, payload=Payload(b"hi"))


def request(stream_id: int, payload: Payload | None = None) -> RequestFrame:
    return RequestFrame(type=FrameType.REQUEST_RESPONSE, stream_id=stream_id, payload=payload or Payload())


def ended(events: list[Event]) -> tuple[str, int]:
    """The rule and the code of the end, which must be there and last."""
    end = events[-1]
    assert isinstance(end, ConnectionEnded)
    return end.rule, end.code


@pytest.mark.rule("RS-1")
def test_rs1_the_two_directions_have_no_order(pair: Pair) -> None:
    """Nothing is assumed about the order between the directions, and the order within each is all that counts."""
    link = pair()
    first = link.client.send_request_response(Payload(b"1"), 0.0)
    link.server.send_request_response(Payload(b"2"), 0.0)
    assert [event.stream_id for event in link.to_client() if isinstance(event, RequestReceived)] == [2]
    link.client.send_payload(2, Payload(b"two"))
    assert [type(event) for event in link.to_server()] == [RequestReceived, PayloadReceived]
    link.server.send_payload(first, Payload(b"one"))
    assert link.to_client() == [PayloadReceived(first, Payload(b"one"), True)]


@pytest.mark.rule("RS-2")
def test_rs2_a_length_on_byte_carriers_and_none_on_message_carriers(core: Make) -> None:
    """24 bits of frame length before each frame, not counting themselves, where the carrier may merge messages."""
    plain, framed = core(client=True), core(client=True, framed=True)
    octets = b"".join(plain.data_to_send(0.0))
    [message] = framed.data_to_send(0.0)
    assert octets == len(message).to_bytes(3, "big") + message
    plain.send_request_response(Payload(b"data", b"meta"), 0.0)
    framed.send_request_response(Payload(b"data", b"meta"), 0.0)
    assert b"".join(plain.data_to_send(0.0)).hex() == "000011000000011100000004" + b"metadata".hex()
    assert [m.hex() for m in framed.data_to_send(0.0)] == ["000000011100000004" + b"metadata".hex()]


@pytest.mark.rule("RS-3")
def test_rs3_no_frame_is_longer_than_24_bits_can_say(pair: Pair) -> None:
    """A frame must not be longer than 16,777,215 octets on any carrier: larger payloads are cut, other frames refused."""
    for framed in (False, True):
        link = pair(framed=framed)
        link.client.send_request_response(Payload(bytes(2**24)), 0.0)
        assert max(sizes_in_flight(link, framed)) < 2**24
        [event] = link.to_server()
        assert isinstance(event, RequestReceived)
        assert len(event.payload.data) == 2**24
        too_much = bytes(2**24)
        with pytest.raises(LocalProtocolError):
            link.client.send_metadata_push(too_much)
        with pytest.raises(LocalProtocolError):
            link.client.send_keepalive(too_much)
        with pytest.raises(LocalProtocolError):
            link.server.send_error(1, data=too_much)
        with pytest.raises(LocalProtocolError):
            link.client.send_extension(0, 1, too_much)
    with pytest.raises(ConfigurationError):
        pair(setup_payload=Payload(bytes(2**24)))


def sizes_in_flight(link: CorePair[RSocketCore], framed: bool) -> list[int]:
    """Sizes of the frames on their way to the server, without their length fields."""
    link.collect()
    if framed:
        return [len(message) for message in link.messages_in_flight["server"]]
    octets, sizes, at = link.bytes_in_flight["server"], [], 0
    while at < len(octets):
        sizes.append(int.from_bytes(octets[at : at + 3], "big"))
        at += 3 + sizes[-1]
    return sizes


@pytest.mark.rule("RS-86")
@pytest.mark.parametrize("framed", [False, True])
@pytest.mark.parametrize("metadata", [None, pytest.param(b"m" * 100, marks=pytest.mark.ci, id="metadata")])
def test_rs86_frames_that_a_peer_would_drop_are_cut_into_fragments_of_a_mebibyte(
    pair: Pair, framed: bool, metadata: bytes | None
) -> None:
    """One peer counts the 3 octets of the length field and drops what is larger then: 16,777,212 octets is the most in one frame."""
    largest, fragment = 16_777_212, 2**20 - 3
    room = largest - 6 - (0 if metadata is None else 3 + len(metadata))
    link = pair(framed=framed)
    for size, sizes in ((room, [largest]), (room + 1, [fragment] * 16)):
        link.client.send_fire_and_forget(Payload(bytes(size), metadata), 0.0)
        assert sizes_in_flight(link, framed)[:16] == sizes
        [event] = link.to_server()
        assert isinstance(event, RequestReceived)
        assert (len(event.payload.data), event.payload.metadata) == (size, metadata)
    small = pair(framed=framed, fragment_size=64)
    small.client.send_fire_and_forget(Payload(bytes(room + 1)), 0.0)
    assert sizes_in_flight(small, framed)[:2] == [61, 61]


@pytest.mark.rule("RS-86")
def test_rs86_what_cannot_be_cut_is_refused_where_a_peer_would_drop_it(pair: Pair) -> None:
    """METADATA_PUSH and the like: 16,777,212 octets with the header are sent, one more is the caller's mistake."""
    link = pair()
    core, room = link.client, 16_777_212
    sid = core.send_request_channel(Payload(), 1, 0.0)
    link.settle()
    for send, header in (
        (core.send_metadata_push, 6),
        (core.send_keepalive, 14),
        (lambda data: core.send_extension(0, 1, data), 10),
        (lambda data: core.send_error(sid, data=data), 10),
    ):
        with pytest.raises(LocalProtocolError):
            send(b"x" * (room - header + 1))
        send(b"x" * (room - header))
        assert room in sizes_in_flight(link, False)
        link.bytes_in_flight["server"].clear()
    with pytest.raises(ConfigurationError):
        pair(setup_payload=Payload(bytes(room)))


@pytest.mark.rule("RS-5")
@pytest.mark.parametrize("length", [0, 1, 5, 1001, 2**24 - 1])
def test_rs5_a_wrong_length_is_judged_before_the_frame_is_there(server: Make, sent: Sent, length: int) -> None:
    """A frame length below 6 or above `max_frame_size`: ERROR[CONNECTION_ERROR], before the body is read."""
    core = server(max_frame_size=1000)
    events = core.receive_data(length.to_bytes(3, "big"), 0.0)
    assert ended(events) == ("RS-5", ErrorCode.CONNECTION_ERROR)
    [error] = sent(core)
    assert isinstance(error, ErrorFrame)
    assert (error.stream_id, error.code) == (0, ErrorCode.CONNECTION_ERROR)
    assert core.statistics().bytes_unread == 0


@pytest.mark.rule("RS-5")
def test_rs5_the_end_names_the_octet(core: Make, feed: Feed, setup: Callable[..., SetupFrame]) -> None:
    """The place of the fault is told: octets received before the frame at fault."""
    made = core(client=False)
    feed(made, setup())
    made.accept_setup(0.0)
    events = feed(made, ECHO, KeepaliveFrame(False, 0), UnknownFrame(0, 0, 0, b""))
    end = events[-1]
    assert isinstance(end, ConnectionEnded)
    assert end.offset == (3 + len(setup().encode())) + (3 + 8) + (3 + 14)


@pytest.mark.rule("RS-6")
@pytest.mark.parametrize("message", [b"", bytes(5)])
def test_rs6_a_message_is_one_frame_and_an_empty_one_is_malformed(pair: Pair, message: bytes) -> None:
    """WebSocket: one frame in each binary message; an empty message is a malformed frame."""
    link = pair(framed=True)
    link.client.send_request_response(Payload(b"1"), 0.0)
    link.client.send_fire_and_forget(Payload(b"2"), 0.0)
    link.collect()
    assert len(link.messages_in_flight["server"]) == 2
    assert len(link.to_server(1)) == 1
    events = link.server.receive_message(message, 0.0)
    assert events[0] == StreamCancelled(1)
    assert ended(events) == ("RS-5", ErrorCode.CONNECTION_ERROR)


@pytest.mark.rule("RS-7")
def test_rs7_after_the_end_nothing_is_sent_and_what_arrives_is_ignored(server: Make, feed: Feed, sent: Sent) -> None:
    """A side that closed for protocol reasons sends nothing more and ignores what still arrives."""
    core = server()
    assert ended(core.receive_data(b"\0\0\1", 0.0))[0] == "RS-5"
    assert len(sent(core)) == 1
    assert feed(core, ECHO, KeepaliveFrame(True, 0)) == []
    assert core.receive_data(b"", 0.0) == []
    assert (b"".join(core.data_to_send(0.0)), core.next_deadline()) == (b"", None)
    with pytest.raises(LocalProtocolError):
        core.send_request_response(Payload(), 0.0)
    with pytest.raises(LocalProtocolError):
        core.send_metadata_push(b"")
    assert core.close(ErrorCode.CONNECTION_ERROR, "", 0.0) == []


@pytest.mark.rule("RS-9")
def test_rs9_reserved_bits_are_masked_off(client: Make, server: Make) -> None:
    """The top bit of stream id, u31 and u63 fields is 0 on sending and not looked at on reception."""
    core = server()
    events = core.receive_data(bytes.fromhex("00000b 80000003 1800 80000005 61"), 0.0)
    assert events == [RequestReceived(Interaction.REQUEST_STREAM, 3, Payload(b"a"), 5, True)]
    peer = client(resume=True)
    peer.send_request_stream(Payload(), 2, 0.0)
    item = bytes.fromhex("000007 80000001 2820 62")
    assert peer.receive_data(item, 0.0) == [PayloadReceived(1, Payload(b"b"), False)]
    keepalive = bytes.fromhex("00000e 80000000 0c00 8000000000000000")
    assert peer.receive_data(keepalive, 0.0) == [KeepaliveReceived(b"")]


@pytest.mark.rule("RS-10")
@pytest.mark.rule("RS-119")
def test_rs10_rs119_unknown_flags_are_ignored(server: Make, sent: Sent) -> None:
    """Flags that a type does not have are ignored: M on ERROR, CANCEL, KEEPALIVE, REQUEST_N brings no metadata."""
    core = server()
    core.receive_data(bytes.fromhex("00000a 00000001 1860 00000001"), 0.0)  # REQUEST_STREAM with 0x060
    assert core.receive_data(bytes.fromhex("00000a 00000001 21ff 00000003"), 0.0) != []
    assert core.credit(1) == 4
    core.receive_data(bytes.fromhex("000011 00000000 0d80 0000000000000000 000001"), 0.0)
    [answer] = sent(core)
    assert answer == KeepaliveFrame(False, 0, b"\0\0\1")
    assert core.receive_data(bytes.fromhex("00000d 00000001 2dff 00000201 000001"), 0.0) == [
        StreamFailed(1, 0x201, b"\0\0\1")
    ]
    assert core.state is ConnectionState.OPEN


@pytest.mark.rule("RS-11")
@pytest.mark.parametrize("frame", [UnknownFrame(0, 0x00, 0, b""), UnknownFrame(7, 0x20, 0, b"?")])
def test_rs11_a_frame_that_is_not_understood(server: Make, feed: Feed, sent: Sent, frame: UnknownFrame) -> None:
    """An unknown type, 0x00 included: dropped if I is set, else ERROR[CONNECTION_ERROR]."""
    core = server()
    ignorable = UnknownFrame(frame.stream_id, frame.type, 0x200, frame.rest)
    assert feed(core, ignorable) == []
    assert ended(feed(core, frame)) == ("RS-11", ErrorCode.CONNECTION_ERROR)
    assert len(sent(core)) == 1


@pytest.mark.rule("RS-11")
def test_rs11_extensions(pair: Pair, server: Make, feed: Feed) -> None:
    """EXT: a type that the application knows is reported, others are dropped with I and end the connection without."""
    link = pair(extensions=frozenset({5}))
    link.client.send_extension(3, 5, b"data", ignorable=False)
    link.client.send_extension(0, 6, b"other")
    assert link.to_server() == [ExtensionReceived(3, 5, b"data", False)]
    for stream_id, wrong in ((0, 0), (0, 2**31), (-1, 6), (2**31, 6)):
        with pytest.raises(LocalProtocolError, match="no such stream or extended type"):
            link.client.send_extension(stream_id, wrong, b"")
    link.client.send_extension(0, 6, b"other", ignorable=False)
    assert ended(link.to_server()) == ("RS-11", ErrorCode.CONNECTION_ERROR)
    zero = ExtensionFrame(stream_id=0, extended_type=0, data=b"")
    assert ended(feed(server(), zero)) == ("RS-11", ErrorCode.CONNECTION_ERROR)


SHORT = {
    "LEASE": "00000000 0800 0000000100000",
    "KEEPALIVE": "00000000 0c00 00000000000000",
    "REQUEST_STREAM": "00000001 1800 000000",
    "REQUEST_CHANNEL": "00000001 1c00 000000",
    "REQUEST_N": "00000001 2000 000000",
    "ERROR": "00000001 2c00 000000",
    "ERROR 0": "00000000 2c00 000000",
    "RESUME": "00000000 3400 0001",
    "RESUME_OK": "00000000 3800 00000000000000",
    "EXT": "00000000 fc00 000000",
    "SETUP": "00000000 0400 0001",
}


@pytest.mark.rule("RS-12")
@pytest.mark.parametrize("name", SHORT)
def test_rs12_too_short_for_its_type(server: Make, sent: Sent, name: str) -> None:
    """A known type without room for its fixed fields: dropped if I is set, else ERROR[CONNECTION_ERROR]."""
    digits = SHORT[name].replace(" ", "")
    frame = bytearray.fromhex(digits[: len(digits) // 2 * 2])
    core = server()
    core.receive_data(bytes.fromhex("00000a 00000001 1800 00000001"), 0.0)
    ignorable = bytearray(frame)
    ignorable[4] |= 0x02
    assert core.receive_data(len(frame).to_bytes(3, "big") + ignorable, 0.0) == []
    assert ended(core.receive_data(len(frame).to_bytes(3, "big") + frame, 0.0)) == ("RS-12", ErrorCode.CONNECTION_ERROR)
    assert len(sent(core)) == 1


@pytest.mark.rule("RS-12")
def test_rs12_a_short_first_frame_is_refused_in_its_own_words(core: Make, sent: Sent) -> None:
    """As the first frame a truncated SETUP gets INVALID_SETUP, a truncated RESUME gets REJECTED_RESUME."""
    for octets, code in (("000008 00000000 0400 0001", 1), ("000008 00000000 3400 0001", 4)):
        made = core(client=False, resume=True)
        assert ended(made.receive_data(bytes.fromhex(octets), 0.0))[1] == code
        [error] = sent(made)
        assert isinstance(error, ErrorFrame)
        assert error.code == code


@pytest.mark.rule("RS-13")
@pytest.mark.rule("RS-16")
@pytest.mark.parametrize("metadata", [None, b"", b"meta"])
@pytest.mark.parametrize("data", [b"", b"data"])
def test_rs13_rs16_metadata_and_data_arrive_as_they_were(pair: Pair, metadata: bytes | None, data: bytes) -> None:
    """With M: 24-bit metadata length, metadata, data. Empty metadata and none are told apart; empty and no data are the same."""
    payload = Payload(data, metadata)
    link = pair(setup_payload=payload)
    sid = link.client.send_request_channel(payload, 9, 0.0)
    assert link.to_server() == [RequestReceived(Interaction.REQUEST_CHANNEL, sid, payload, 9, False)]
    link.server.send_payload(sid, payload)
    link.server.send_payload(sid, payload, complete=True)
    assert link.to_client() == [PayloadReceived(sid, payload, False), PayloadReceived(sid, payload, True)]
    for ask in (link.client.send_request_response, link.client.send_fire_and_forget):
        ask(payload, 0.0)
        [event] = link.to_server()
        assert isinstance(event, RequestReceived)
        assert event.payload == payload


@pytest.mark.rule("RS-14")
def test_rs14_metadata_alone_has_no_length(core: Make) -> None:
    """LEASE and METADATA_PUSH have no metadata length: the rest of the frame is metadata."""
    assert MetadataPushFrame(b"md").encode().hex() == "0000000031006d64"
    assert LeaseFrame(1, 2, b"md").encode().hex() == "00000000090000000001000000026d64"
    assert LeaseFrame(1, 2).encode().hex() == "0000000008000000000100000002"


@pytest.mark.rule("RS-15")
@pytest.mark.parametrize(
    "frame", ["00000001 1100 000003 6161", "00000001 1d00 00000001 000001", "00000001 2960 0000", "00000001 2920 00"]
)
def test_rs15_metadata_longer_than_its_frame(server: Make, sent: Sent, frame: str) -> None:
    """A metadata length beyond the frame: ERROR[CONNECTION_ERROR], unless I is set."""
    octets = bytearray.fromhex(frame)
    core = server()
    ignorable = bytearray(octets)
    ignorable[4] |= 0x02
    prefix = len(octets).to_bytes(3, "big")
    assert core.receive_data(prefix + ignorable, 0.0) == []
    assert ended(core.receive_data(prefix + octets, 0.0)) == ("RS-15", ErrorCode.CONNECTION_ERROR)
    [error] = sent(core)
    assert isinstance(error, ErrorFrame)


@pytest.mark.rule("RS-15")
def test_rs15_in_the_middle_of_a_stream(client: Make) -> None:
    """The same for an item of a stream that is otherwise expected."""
    core = client()
    core.send_request_stream(Payload(), 10, 0.0)
    events = core.receive_data(bytes.fromhex("000009 00000001 2920 0000ff"), 0.0)
    assert [type(event) for event in events] == [StreamFailed, ConnectionEnded]
    assert ended(events) == ("RS-15", ErrorCode.CONNECTION_ERROR)


@pytest.mark.rule("RS-17")
def test_rs17_mime_types_are_not_interpreted(core: Make, feed: Feed, setup: Callable[..., SetupFrame]) -> None:
    """MIME types are the application's: own names and strange ones arrive as they were sent."""
    made = core(client=False)
    [event] = feed(made, setup(metadata_mime_type="x~own name", data_mime_type=""))
    assert (event.metadata_mime_type, event.data_mime_type) == ("x~own name", "")  # type: ignore[union-attr]
    made.accept_setup(0.0)
    assert feed(made, request(1, Payload(b"\xff", b"\xfe"))) == [
        RequestReceived(Interaction.REQUEST_RESPONSE, 1, Payload(b"\xff", b"\xfe"), 0, True)
    ]


@pytest.mark.rule("RS-18")
def test_rs18_odd_ids_for_the_client_even_ones_for_the_server(pair: Pair) -> None:
    """0 is the connection; the client uses 1, 3, 5, …, the server 2, 4, 6 and so on."""
    link = pair()
    assert [link.client.send_request_response(Payload(), 0.0) for _ in range(3)] == [1, 3, 5]
    assert [link.server.send_request_response(Payload(), 0.0) for _ in range(3)] == [2, 4, 6]
    assert link.client.send_fire_and_forget(Payload(), 0.0) == 7


@pytest.mark.rule("RS-19")
@pytest.mark.rule("RS-20")
def test_rs19_rs20_ids_end_at_31_bits_or_begin_again(pair: Pair) -> None:
    """After 2^31-1 there is no new stream, or with re-use the lowest free id."""
    link = pair()
    link.client._ids = StreamIds(1, reuse=False, start=2**31 - 1)
    assert link.client.send_request_response(Payload(), 0.0) == 2**31 - 1
    with pytest.raises(StreamIdsExhausted):
        link.client.send_request_response(Payload(), 0.0)
    link = pair(reuse_stream_ids=True)
    used = [link.client.send_request_response(Payload(), 0.0) for _ in range(3)]
    link.client._ids = StreamIds(1, reuse=True, start=2**31 - 1)
    link.settle()
    link.client.send_cancel(3)
    assert used == [1, 3, 5]
    assert [link.client.send_request_response(Payload(), 0.0) for _ in range(4)] == [2**31 - 1, 3, 7, 9]
    ids = StreamIds(2, reuse=True, start=2**31)
    assert ids.take() == 2


@pytest.mark.rule("RS-20")
def test_rs20_when_all_ids_are_in_use_there_is_none() -> None:
    """If all are in use a new connection is needed."""

    class All:
        def __contains__(self, _: object) -> bool:
            return True

    ids = StreamIds(2**31 - 5, reuse=True, start=2**31)
    with pytest.raises(StreamIdsExhausted):
        ids.take(All())


@pytest.mark.rule("RS-21")
def test_rs21_a_responder_remembers_no_ids(server: Make, feed: Feed) -> None:
    """Ids may come again after their stream has ended, and in any order."""
    core = server()
    for stream_id in (9, 1, 9, 1):
        assert len(feed(core, request(stream_id))) == 1
        core.send_payload(stream_id, Payload())
    assert core.statistics().streams == 0


@pytest.mark.rule("RS-22")
def test_rs22_wrong_parity_and_stream_0_are_ignored(server: Make, client: Make, feed: Feed, sent: Sent) -> None:
    """A request with an id of the other side, or on stream 0, is ignored without an answer."""
    core = server()
    assert feed(core, request(2), request(0)) == []
    peer = client()
    assert feed(peer, request(1), request(0)) == []
    assert sent(core) == sent(peer) == []


@pytest.mark.rule("RS-23")
def test_rs23_octets_behind_frames_of_fixed_size_are_ignored(server: Make, feed: Feed) -> None:
    """REQUEST_N, CANCEL, RESUME and RESUME_OK with something behind are what they are without."""
    core = server()
    feed(core, RequestFrame(type=FrameType.REQUEST_STREAM, stream_id=1, n=1, payload=Payload()))
    feed(core, RequestNFrame(1, 2).encode() + b"more")
    assert core.credit(1) == 3
    assert feed(core, CancelFrame(1).encode() + b"more") == [StreamCancelled(1)]
    assert feed(core, ResumeOkFrame(0).encode() + b"more") == []


@pytest.mark.rule("RS-24")
@pytest.mark.rule("RS-25")
def test_rs24_rs25_next_and_complete(client: Make, feed: Feed) -> None:
    """N: payload; N and C: payload and completion; C: completion, octets ignored; neither: ignored. N without octets is a payload."""
    core = client()
    for _ in range(3):
        core.send_request_stream(Payload(), 9, 0.0)
    nothing = PayloadFrame(stream_id=1, payload=Payload(b"?"))
    empty = PayloadFrame(stream_id=1, payload=Payload(), next=True)
    bare = PayloadFrame(stream_id=1, payload=Payload(b"ignored"), complete=True)
    assert feed(core, nothing, empty, bare) == [PayloadReceived(1, Payload(), False), StreamCompleted(1)]
    both = PayloadFrame(stream_id=3, payload=Payload(b"x"), next=True, complete=True)
    assert feed(core, both) == [PayloadReceived(3, Payload(b"x"), True)]
    assert (core.has_stream(1), core.has_stream(3), core.has_stream(5)) == (False, False, True)


@pytest.mark.rule("RS-26")
@pytest.mark.rule("RS-125")
def test_rs26_rs125_metadata_push(pair: Pair, server: Make, feed: Feed) -> None:
    """METADATA_PUSH is for stream 0; on others it is ignored; M clear is read as set."""
    link = pair()
    link.client.send_metadata_push(b"pushed")
    assert link.to_server() == [MetadataPushed(b"pushed")]
    core = server()
    assert feed(core, MetadataPushFrame(b"x", stream_id=1)) == []
    assert core.receive_data(bytes.fromhex("000007 00000000 3000 6d"), 0.0) == [MetadataPushed(b"m")]


@pytest.mark.rule("RS-27")
def test_rs27_codes_of_applications_and_reserved_ones(pair: Pair) -> None:
    """0x301 to 0xFFFFFFFE are free for applications; what is reserved, or meant for the connection, is refused here."""
    link = pair()
    for code in (0x301, 0xFFFFFFFE):
        sid = link.client.send_request_response(Payload(), 0.0)
        link.to_server()
        link.server.send_error(sid, code, b"x")
        assert link.to_client() == [StreamFailed(sid, code, b"x")]
    sid = link.client.send_request_response(Payload(), 0.0)
    link.to_server()
    for code in (0, 0x001, 0x101, 0x205, 0x300, 0xFFFFFFFF):
        with pytest.raises(LocalProtocolError):
            link.server.send_error(sid, code)
    assert link.server.has_stream(sid)


@pytest.mark.rule("RS-28")
def test_rs28_error_data_is_text_that_ends_in_no_nul(pair: Pair, feed: Feed) -> None:
    """Error data must not end in NUL; what is not UTF-8 is replaced, a control character is shown as an escape."""
    link = pair()
    sid = link.client.send_request_response(Payload(), 0.0)
    link.to_server()
    link.server.send_error(sid, data=b"bo\0om\0\0")
    [event] = link.to_client()
    assert event == StreamFailed(sid, ErrorCode.APPLICATION_ERROR, b"bo\0om")
    assert StreamFailed(1, 2, b"\xff\x1b[2J!").text == "\N{REPLACEMENT CHARACTER}\\x1b[2J!"
    assert StreamFailed(1, 2, "\N{WINKING FACE}".encode() * 5000).text == "\N{WINKING FACE}" * 511 + "…"
    [end] = feed(link.client, ErrorFrame(0, ErrorCode.CONNECTION_ERROR, b"\xff!"))
    assert end == ConnectionEnded(EndReason.FAILED_BY_PEER, 0x101, "\N{REPLACEMENT CHARACTER}!")


@pytest.mark.rule("RS-29")
@pytest.mark.parametrize("code", [0, 0x101, 0x102, 0x123, 0xFFFFFFFF])
def test_rs29_any_code_on_a_stream_ends_just_that_stream(client: Make, feed: Feed, code: int) -> None:
    """Unknown codes, and those of the connection, end a live stream like APPLICATION_ERROR; the code is kept."""
    core = client()
    core.send_request_response(Payload(), 0.0)
    assert feed(core, ErrorFrame(1, code, b"x")) == [StreamFailed(1, code, b"x", FailedBy.PEER)]
    assert core.state is ConnectionState.OPEN


@pytest.mark.rule("RS-29")
@pytest.mark.rule("RS-30")
@pytest.mark.parametrize("code", [0x101, 0x201, 0x204, 0x999])
def test_rs29_rs30_an_error_of_the_connection_ends_everything(pair: Pair, feed: Feed, code: int) -> None:
    """CONNECTION_ERROR, and any other code on stream 0: requests fail, responders are cancelled, the carrier closes."""
    link = pair()
    link.client.send_request_response(Payload(), 0.0)
    link.server.send_request_response(Payload(), 0.0)
    link.settle()
    assert feed(link.client, ErrorFrame(0, code, b"gone")) == [
        StreamFailed(1, code, b"gone", FailedBy.CONNECTION),
        StreamCancelled(2),
        ConnectionEnded(EndReason.FAILED_BY_PEER, code, "gone"),
    ]
    assert b"".join(link.client.data_to_send(0.0)) == b""
    assert link.server.close(ErrorCode.CONNECTION_ERROR, "bye", 0.0) == [
        StreamFailed(2, ErrorCode.CONNECTION_ERROR, b"bye", FailedBy.CONNECTION),
        StreamCancelled(1),
        ConnectionEnded(EndReason.CLOSED, ErrorCode.CONNECTION_ERROR, "bye"),
    ]
