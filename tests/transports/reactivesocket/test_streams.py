"""Rules of ReactiveSocket about stream ids, interactions, credit, fragments and what is ignored."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from levada.framework.errors import LocalProtocolError
from levada.transports.reactivesocket import ReactiveSocketConfig
from levada.transports.reactivesocket.frames import Frame, FrameType
from levada.transports.reactivesocket.state import STREAM
from levada.transports.rsocket.config import CoreConfig
from levada.transports.rsocket.events import (
    CreditGranted,
    FailedBy,
    Interaction,
    PayloadReceived,
    RequestReceived,
    SendingStopped,
    SetupAccepted,
    StreamCancelled,
    StreamCompleted,
    StreamFailed,
)
from levada.transports.rsocket.frames import Payload
from levada.transports.rsocket.state import StreamInput, StreamState

F, C, N, M = 0x2000, 0x1000, 0x0800, 0x4000
HI = Payload(b"hi")
UNLIMITED = 2**31 - 1


def response(stream_id: int, flags: int = 0, data: bytes = b"", metadata: bytes | None = None) -> Frame:
    return Frame(FrameType.RESPONSE, stream_id, flags, metadata=metadata, data=data)


def channel(stream_id: int, flags: int = 0, *n: int, data: bytes = b"", metadata: bytes | None = None) -> Frame:
    return Frame(FrameType.REQUEST_CHANNEL, stream_id, flags | (N if n else 0), n, metadata=metadata, data=data)


def request_n(stream_id: int, n: int) -> Frame:
    return Frame(FrameType.REQUEST_N, stream_id, 0, (n,))


def error(stream_id: int, code: int, data: bytes = b"", metadata: bytes | None = None) -> Frame:
    return Frame(FrameType.ERROR, stream_id, 0, (code,), metadata=metadata, data=data)


def cancel(stream_id: int, metadata: bytes | None = None) -> Frame:
    return Frame(FrameType.CANCEL, stream_id, metadata=metadata)


@pytest.fixture
def client(by_hand: Any) -> Any:
    """A client whose SETUP is known to be accepted."""
    made = by_hand("client")
    assert made.gives_frame("REQUEST_FNF", 1)[0] == SetupAccepted()
    return made


@pytest.fixture
def server(by_hand: Any) -> Any:
    return by_hand("server")


# ---------------------------------------------------------------- ids


@pytest.mark.rule("RX-14")
@pytest.mark.rule("RX-16")
def test_rx14_rx16_client_even_server_odd_rising(client: Any, server: Any) -> None:
    """The client generates 2, 4, 6 …, the server 1, 3, 5 …; ended ones are not used again."""
    for side, ids in ((client, [2, 4, 6]), (server, [1, 3, 5])):
        got = []
        for _ in ids:
            got.append(side.core.send_request_response(HI, 0.0))
            side.core.send_cancel(got[-1])
        assert got == ids


@pytest.mark.rule("RX-15")
@pytest.mark.rule("RX-16")
@pytest.mark.parametrize(("role", "last", "first"), [("client", 2**31 - 2, 2), ("server", 2**31 - 1, 1)])
def test_rx15_rx16_ids_wrap_and_skip_those_in_use(by_hand: Any, role: str, last: int, first: int) -> None:
    """Ids up to 2^31-1 are generated, then those from the beginning that are not in use."""
    side = by_hand(role)
    assert side.core.send_request_response(HI, 0.0) == first
    side.core._ids._next = last  # two thousand million requests later
    assert side.core.send_request_response(HI, 0.0) == last
    assert side.core.send_request_response(HI, 0.0) == first + 2


@pytest.mark.rule("RX-15")
@pytest.mark.rule("RX-16")
def test_rx15_rx16_any_id_of_the_peer_and_again(server: Any) -> None:
    """Any 32-bit id is accepted, a lower one after a higher, and one that ended."""
    for stream_id in (2**32 - 2, 2, 2):
        assert server.gives_frame("REQUEST_RESPONSE", stream_id)[0].stream_id == stream_id
        assert server.gives(cancel(stream_id)) == [StreamCancelled(stream_id)]
    assert server.core.statistics().streams == 0


@pytest.mark.rule("RX-17")
@pytest.mark.parametrize(
    "kind", ["REQUEST_RESPONSE", "REQUEST_FNF", "REQUEST_STREAM", "REQUEST_SUB", "REQUEST_CHANNEL"]
)
def test_rx17_requests_on_0_or_of_the_wrong_parity_are_ignored(server: Any, kind: str) -> None:
    """A request on stream 0 or of the wrong parity is ignored, on an own live stream too."""
    numbers = {"REQUEST_STREAM": (1,), "REQUEST_SUB": (1,), "REQUEST_CHANNEL": (1,)}.get(kind, ())
    flags = N if kind == "REQUEST_CHANNEL" else 0
    own = server.core.send_request_channel(HI, 1, 0.0)
    server.sent()
    for stream_id in (0, 7, own):
        assert server.gives_frame(kind, stream_id, flags, *numbers, data=b"x") == []
    assert server.sent() == []
    assert server.core.statistics().streams == 1


# ---------------------------------------------------------------- interactions


@pytest.mark.rule("RX-50")
def test_rx50_request_response(client: Any, server: Any) -> None:
    """RESPONSE with C, or ERROR; over on both sides then."""
    assert client.core.send_request_response(Payload(b"d", b"m"), 0.0) == 2
    (request,) = client.sent()
    assert request == Frame(FrameType.REQUEST_RESPONSE, 2, metadata=b"m", data=b"d")
    assert server.gives(request) == [RequestReceived(Interaction.REQUEST_RESPONSE, 2, Payload(b"d", b"m"), 0, True)]
    assert server.core.credit(2) == 1
    server.core.send_payload(2, Payload(b"a", b""))
    (answer,) = server.sent()
    assert answer == response(2, C, b"a", b"")
    assert client.gives(answer) == [PayloadReceived(2, Payload(b"a", b""), True)]
    for side in (client, server):
        assert not side.core.has_stream(2)
        with pytest.raises(LocalProtocolError, match="no stream 2"):
            side.core.send_payload(2, HI)


@pytest.mark.rule("RX-50")
def test_rx50_cancel_ends_a_request_response(client: Any, server: Any) -> None:
    """RQ may CANCEL; RS is over on that, and RQ takes no answer any more."""
    client.core.send_request_response(HI, 0.0)
    client.core.send_cancel(2)
    client.core.send_cancel(2)
    assert server.gives(*client.sent())[1:] == [StreamCancelled(2)]
    assert not server.core.has_stream(2)
    assert client.gives(response(2, C, b"late"), error(2, 0x201)) == []
    server.gives_frame("REQUEST_RESPONSE", 4)
    with pytest.raises(LocalProtocolError, match="send an error"):
        server.core.send_cancel(4)


@pytest.mark.rule("RX-50")
@pytest.mark.rule("RX-95")
def test_rx50_rx95_response_without_c_is_taken_as_with(client: Any) -> None:
    """The answer of a request-response ends it, with C or without."""
    client.core.send_request_response(HI, 0.0)
    assert client.gives(response(2, 0, b"a")) == [PayloadReceived(2, Payload(b"a"), True)]
    assert not client.core.has_stream(2)


@pytest.mark.rule("RX-51")
def test_rx51_fire_and_forget(client: Any, server: Any) -> None:
    """Over on sending and on reception; never answered, not even when refused."""
    assert client.core.send_fire_and_forget(HI, 0.0) == 2
    assert not client.core.has_stream(2)
    assert server.gives(*client.sent()) == [RequestReceived(Interaction.FIRE_AND_FORGET, 2, HI, 0, True)]
    assert not server.core.has_stream(2)
    with pytest.raises(LocalProtocolError, match="no stream 2"):
        server.core.send_error(2)
    assert server.sent() == []


@pytest.mark.rule("RX-52")
def test_rx52_stream(client: Any, server: Any) -> None:
    """RESPONSE* then C; REQUEST_N at any time, CANCEL."""
    assert client.core.send_request_stream(HI, 2, 0.0) == 2
    assert server.gives(*client.sent()) == [RequestReceived(Interaction.REQUEST_STREAM, 2, HI, 2, True)]
    server.core.send_payload(2, Payload(b"1"))
    server.core.send_payload(2, Payload(b"2"))
    client.core.send_request_n(2, 1)
    assert server.gives(*client.sent()) == [CreditGranted(2, 1)]
    server.core.send_payload(2, Payload(b"3"))
    server.core.send_complete(2)
    assert client.gives(*server.sent()) == [
        PayloadReceived(2, Payload(b"1"), False),
        PayloadReceived(2, Payload(b"2"), False),
        PayloadReceived(2, Payload(b"3"), False),
        StreamCompleted(2),
    ]
    assert not client.core.has_stream(2)
    assert not server.core.has_stream(2)
    client.core.send_request_stream(HI, 1, 0.0)
    client.core.send_cancel(4)
    assert server.gives(*client.sent())[1:] == [StreamCancelled(4)]


@pytest.mark.rule("RX-53")
def test_rx53_subscription(client: Any, server: Any) -> None:
    """RESPONSE* without end: a source that ends is ERROR[CANCELED], also together with the last payload."""
    assert client.core.send_request_subscription(HI, 3, 0.0) == 2
    assert client.core.send_request_subscription(HI, 3, 0.0) == 4
    (first, second) = client.sent()
    assert first == Frame(FrameType.REQUEST_SUB, 2, 0, (3,), data=b"hi")
    assert server.gives(first, second)[0] == RequestReceived(Interaction.REQUEST_SUBSCRIPTION, 2, HI, 3, True)
    server.core.send_payload(2, Payload(b"1"))
    server.core.send_complete(2)
    server.core.send_payload(4, Payload(b"2"), complete=True)
    frames = server.sent()
    canceled = (b"the source has ended",)
    assert frames == [
        response(2, 0, b"1"),
        error(2, 0x203, *canceled),
        response(4, 0, b"2"),
        error(4, 0x203, *canceled),
    ]
    assert client.gives(*frames[:2]) == [
        PayloadReceived(2, Payload(b"1"), False),
        StreamFailed(2, 0x203, *canceled),
    ]
    assert server.core.statistics().streams == 0


@pytest.mark.rule("RX-53")
def test_rx53_c_on_a_subscription_is_completion(client: Any) -> None:
    """A requester that gets C all the same takes it as completion."""
    client.core.send_request_subscription(HI, 3, 0.0)
    assert client.gives(response(2, C)) == [StreamCompleted(2)]
    assert not client.core.has_stream(2)


@pytest.mark.rule("RX-54")
def test_rx54_channel(client: Any, server: Any) -> None:
    """One initial REQUEST_CHANNEL with N, n and the first payload; further payloads are REQUEST_CHANNEL without N."""
    assert client.core.send_request_channel(Payload(b"1"), 3, 0.0) == 2
    (initial,) = client.sent()
    assert initial == channel(2, 0, 3, data=b"1")
    assert server.gives(initial) == [RequestReceived(Interaction.REQUEST_CHANNEL, 2, Payload(b"1"), 3, False)]
    server.core.send_request_n(2, 2)
    assert client.gives(*server.sent()) == [CreditGranted(2, 2)]
    client.core.send_payload(2, Payload(b"2", b"m"))
    assert client.sent() == [channel(2, data=b"2", metadata=b"m")]
    assert server.gives(channel(2, data=b"2", metadata=b"m")) == [PayloadReceived(2, Payload(b"2", b"m"), False)]
    server.core.send_payload(2, Payload(b"a"))
    assert client.gives(*server.sent()) == [PayloadReceived(2, Payload(b"a"), False)]


@pytest.mark.rule("RX-54")
def test_rx54_the_first_payload_is_always_there(client: Any, server: Any) -> None:
    """An initial frame that is empty and has C brings an empty payload; we send it as two frames (RX-58)."""
    assert server.gives(channel(2, C, 3)) == [RequestReceived(Interaction.REQUEST_CHANNEL, 2, Payload(), 3, True)]
    client.core.send_request_channel(Payload(), 3, 0.0, complete=True)
    frames = client.sent()
    assert frames == [channel(2, 0, 3), channel(2, C)]
    assert server.gives(cancel(2), *frames)[1:] == [
        RequestReceived(Interaction.REQUEST_CHANNEL, 2, Payload(), 3, False),
        StreamCompleted(2),
    ]


@pytest.mark.rule("RX-55")
def test_rx55_request_n_answers_the_channel(client: Any, server: Any) -> None:
    """Credit for the further payloads, none for the first; none is sent if the initial frame had C."""
    client.core.send_request_channel(HI, 3, 0.0)
    assert client.core.credit(2) == 0
    with pytest.raises(LocalProtocolError, match="no credit on stream 2"):
        client.core.send_payload(2, HI)
    client.core.send_request_channel(HI, 3, 0.0, complete=True)
    frames = client.sent()
    assert frames[1] == channel(4, C, 3, data=b"hi")
    assert [event.complete for event in server.gives(*frames)] == [False, True]
    server.core.send_request_n(2, 32)
    server.core.send_request_n(4, 32)
    assert server.sent() == [request_n(2, 32)]


@pytest.mark.rule("RX-56")
def test_rx56_the_requesters_completion_ends_its_direction_only(client: Any, server: Any) -> None:
    """After C no REQUEST_CHANNEL, neither sent nor taken; the responder goes on."""
    client.core.send_request_channel(HI, 3, 0.0)
    client.gives(request_n(2, 5))
    client.core.send_payload(2, HI, complete=True)
    initial, last = client.sent()
    assert last == channel(2, C, data=b"hi")
    sends: list[Callable[[], object]] = [
        lambda: client.core.send_payload(2, HI),
        lambda: client.core.send_complete(2),
    ]
    for send in sends:
        with pytest.raises(LocalProtocolError, match="no more to send"):
            send()
    assert client.core.credit(2) == 0
    assert client.gives(request_n(2, 5)) == []
    assert client.core.credit(2) == 0
    server.gives(initial)
    server.core.send_request_n(2, 5)
    assert server.gives(last) == [PayloadReceived(2, HI, True)]
    assert server.gives(channel(2, data=b"late"), channel(2, C)) == []
    server.sent()
    server.core.send_request_n(2, 5)
    server.core.send_payload(2, HI)
    assert server.sent() == [response(2, 0, b"hi")]
    assert client.gives(response(2, 0, b"hi")) == [PayloadReceived(2, HI, False)]


@pytest.mark.rule("RX-56")
def test_rx56_the_responders_completion_ends_both_directions(client: Any, server: Any) -> None:
    """RS's COMPLETE ends the whole stream on both sides, even if RQ has not completed."""
    client.core.send_request_channel(HI, 3, 0.0)
    client.core.send_request_channel(HI, 3, 0.0)
    server.gives(*client.sent())
    server.core.send_request_n(2, 5)
    server.core.send_complete(2)
    server.core.send_payload(4, HI, complete=True)
    assert server.core.statistics().streams == 0
    assert client.gives(*server.sent()) == [
        CreditGranted(2, 5),
        SendingStopped(2),
        StreamCompleted(2),
        SendingStopped(4),
        PayloadReceived(4, HI, True),
    ]
    assert client.core.statistics().streams == 0
    with pytest.raises(LocalProtocolError, match="no stream 2"):
        client.core.send_payload(2, HI)
    # What was on its way is a late payload of an ended channel (RX-109).
    assert server.gives(channel(2, data=b"late"), channel(4, C)) == []


@pytest.mark.rule("RX-56")
def test_rx56_error_and_cancel_end_both_directions(client: Any, server: Any) -> None:
    """ERROR from the responder and CANCEL from the requester end a channel."""
    client.core.send_request_channel(HI, 3, 0.0)
    client.core.send_request_channel(HI, 3, 0.0)
    server.gives(*client.sent())
    server.core.send_error(2, 0x201, b"boom")
    assert client.gives(*server.sent()) == [StreamFailed(2, 0x201, b"boom")]
    client.core.send_cancel(4)
    assert server.gives(*client.sent()) == [StreamCancelled(4)]
    assert (client.core.statistics().streams, server.core.statistics().streams) == (0, 0)


@pytest.mark.rule("RX-56")
def test_rx56_table_of_stream_states() -> None:
    """The responder's completion ends a stream from every live state; the requester's only its own direction."""
    live = set(StreamState) - {StreamState.ENDED}
    assert {state for state, by in STREAM if by is StreamInput.RESPONDER_COMPLETE} == live
    ends = (
        StreamInput.RESPONDER_COMPLETE,
        StreamInput.SEND_ERROR,
        StreamInput.RECEIVE_ERROR,
        StreamInput.SEND_CANCEL,
        StreamInput.RECEIVE_CANCEL,
    )
    assert {to for (_, by), to in STREAM.items() if by in ends} == {StreamState.ENDED}
    assert STREAM[StreamState.BOTH, StreamInput.SEND_COMPLETE] is StreamState.RECEIVING
    assert STREAM[StreamState.BOTH, StreamInput.RECEIVE_COMPLETE] is StreamState.SENDING


@pytest.mark.rule("RX-56")
def test_rx56_a_responder_that_wants_no_more(server: Any) -> None:
    """There is no frame for it: what still comes is dropped, with what was gathered; its own payloads go on."""
    server.gives(channel(2, 0, 3))
    server.core.send_request_n(2, 5)
    server.gives(channel(2, F, data=b"part"))
    server.sent()
    server.core.send_cancel(2)
    server.core.send_cancel(2)
    assert server.sent() == []
    assert server.core.statistics().bytes_gathered == 0
    assert server.gives(channel(2, data=b"x"), channel(2, C)) == []
    server.core.send_payload(2, HI, complete=True)
    assert server.sent() == [response(2, C, b"hi")]


@pytest.mark.rule("RX-57")
def test_rx57_initial_frame_without_n(server: Any) -> None:
    """Accepted with credit 0 if the id is above all that the peer has used."""
    assert server.gives(channel(2, data=b"x")) == [
        RequestReceived(Interaction.REQUEST_CHANNEL, 2, Payload(b"x"), 0, False)
    ]
    assert server.core.credit(2) == 0
    assert server.gives(request_n(2, 4)) == [CreditGranted(2, 4)]


@pytest.mark.rule("RX-57")
def test_rx57_n_on_a_later_frame_is_skipped(server: Any) -> None:
    """N on a later REQUEST_CHANNEL: the value is skipped, not added."""
    server.gives(channel(2, 0, 1))
    server.core.send_request_n(2, 5)
    assert server.gives(channel(2, 0, 100, data=b"x")) == [PayloadReceived(2, Payload(b"x"), False)]
    assert server.core.credit(2) == 1


@pytest.mark.rule("RX-57")
def test_rx57_errors_of_a_requester(client: Any, server: Any) -> None:
    """A requester whose source fails sends CANCEL; an ERROR from a requester ends a channel and nothing else."""
    client.core.send_request_channel(HI, 1, 0.0)
    client.sent()
    client.core.send_error(2, 0x201, b"source")
    assert client.sent() == [cancel(2)]
    assert not client.core.has_stream(2)
    server.gives(channel(2, 0, 1), Frame(FrameType.REQUEST_STREAM, 4, 0, (1,)))
    assert server.gives(error(2, 0x201, b"x"), error(4, 0x201, b"x")) == [StreamFailed(2, 0x201, b"x")]
    assert [server.core.has_stream(id_) for id_ in (2, 4)] == [False, True]


@pytest.mark.rule("RX-58")
@pytest.mark.parametrize(
    ("flags", "data", "metadata", "delivers"),
    [(0, b"", None, True), (0, b"x", None, True), (C, b"x", None, True), (C, b"", b"", True), (C, b"", None, False)],
)
def test_rx58_what_c_carries(
    client: Any, server: Any, flags: int, data: bytes, metadata: bytes | None, delivers: bool
) -> None:
    """With C a payload is delivered if there is data or M is set; without C it always is."""
    payload = Payload(data, metadata)
    event = PayloadReceived(2, payload, bool(flags)) if delivers else StreamCompleted(2)
    client.core.send_request_stream(HI, 1, 0.0)
    assert client.gives(response(2, flags, data, metadata)) == [event]
    server.gives(channel(2, 0, 1))
    server.core.send_request_n(2, 1)
    assert server.gives(channel(2, flags, data=data, metadata=metadata)) == [event]


@pytest.mark.rule("RX-58")
def test_rx58_an_empty_last_payload_is_sent_as_two_frames(client: Any, server: Any) -> None:
    """A frame without C, and a bare C; for request-response a bare C is an empty payload."""
    client.core.send_request_channel(HI, 1, 0.0)
    client.gives(request_n(2, 2))
    client.sent()
    client.core.send_payload(2, Payload(), complete=True)
    assert client.sent() == [channel(2), channel(2, C)]
    server.gives(Frame(FrameType.REQUEST_STREAM, 2, 0, (1,)), Frame(FrameType.REQUEST_RESPONSE, 4))
    server.core.send_payload(2, Payload(), complete=True)
    server.core.send_payload(4, Payload())
    assert server.sent() == [response(2), response(2, C), response(4, C)]
    client.core.send_request_response(HI, 0.0)
    assert client.gives(response(4, C)) == [PayloadReceived(4, Payload(), True)]


@pytest.mark.rule("RX-59")
def test_rx59_cancel_may_carry_metadata(client: Any, server: Any) -> None:
    """CANCEL may carry metadata for the application."""
    client.core.send_request_stream(HI, 1, 0.0)
    client.core.send_cancel(2, b"enough")
    assert server.gives(*client.sent())[1:] == [StreamCancelled(2, b"enough")]


# ---------------------------------------------------------------- errors on streams


@pytest.mark.rule("RX-23")
def test_rx23_the_reason_of_rejected_is_data_and_metadata(client: Any, server: Any) -> None:
    """Sent as both, read from either; one NUL at the end is removed."""
    for stream_id in (2, 4, 6):
        server.gives_frame("REQUEST_RESPONSE", stream_id)
    server.core.send_error(2, 0x202, b"busy")
    server.core.send_error(4, 0x201, b"boom")
    server.core.send_error(6, 0x202, b"busy", b"own")
    assert server.sent() == [
        error(2, 0x202, b"busy", b"busy"),
        error(4, 0x201, b"boom"),
        error(6, 0x202, b"busy", b"own"),
    ]
    for _ in range(3):
        client.core.send_request_response(HI, 0.0)
    assert client.gives(error(2, 0x202, b"", b"why\0"), error(4, 0x202, b"a\0\0", b"b"), error(6, 0x201, b"\xff")) == [
        StreamFailed(2, 0x202, b"why", FailedBy.PEER, b"why\0"),
        StreamFailed(4, 0x202, b"a\0", FailedBy.PEER, b"b"),
        StreamFailed(6, 0x201, b"\xff"),
    ]


@pytest.mark.rule("RX-25")
@pytest.mark.parametrize("code", [0, 0x003, 0x101, 0x205, 0x12345, 0xFFFFFFFF])
def test_rx25_unknown_code_on_a_stream_ends_the_stream(client: Any, code: int) -> None:
    """As APPLICATION_ERROR with that code; the connection goes on."""
    client.core.send_request_response(HI, 0.0)
    assert client.gives(error(2, code, b"x")) == [StreamFailed(2, code, b"x")]
    assert client.core.send_request_response(HI, 0.0) == 4


@pytest.mark.rule("RX-22")
def test_rx22_codes_of_streams(server: Any) -> None:
    """0x201 to 0xFFFFFFFE are the application's on streams; others are refused here."""
    server.gives_frame("REQUEST_RESPONSE", 2)
    for code in (0, 0x101, 0x200, 0xFFFFFFFF):
        with pytest.raises(LocalProtocolError, match="not one of a stream"):
            server.core.send_error(2, code)
    server.core.send_error(2, 0xFFFFFFFE)
    assert server.sent() == [error(2, 0xFFFFFFFE)]


# ---------------------------------------------------------------- credit


@pytest.mark.rule("RX-61")
def test_rx61_credit_counts_payloads(client: Any, server: Any) -> None:
    """It adds up; a bare C and ERROR need none; a C frame with a payload costs 1."""
    server.gives(Frame(FrameType.REQUEST_STREAM, 2, 0, (1,)), request_n(2, 1))
    assert server.core.credit(2) == 2
    server.core.send_payload(2, HI)
    server.core.send_payload(2, HI)
    for last in (False, True):
        with pytest.raises(LocalProtocolError, match="wait for CreditGranted"):
            server.core.send_payload(2, HI, complete=last)
    server.core.send_complete(2)
    assert len(server.sent()) == 3
    client.core.send_request_stream(HI, 0, 0.0)
    assert client.gives(response(2, C)) == [StreamCompleted(2)]
    client.core.send_request_stream(HI, 0, 0.0)
    assert client.gives(response(4, C, b"x"))[0].by is FailedBy.LOCAL


@pytest.mark.rule("RX-61")
def test_rx61_a_fragmented_payload_costs_one(client: Any, server: Any) -> None:
    """However many fragments."""
    client.core.send_request_stream(HI, 1, 0.0)
    assert client.gives(response(2, F, b"a"), response(2, F, b"b"), response(2, 0, b"c")) == [
        PayloadReceived(2, Payload(b"abc"), False)
    ]
    assert client.gives(response(2, F, b"d"))[0].code == 0x204


@pytest.mark.rule("RX-62")
def test_rx62_overrun(client: Any, server: Any) -> None:
    """RQ cancels and fails the stream; RS of a channel sends ERROR[INVALID]."""
    for stream_id, send in ((2, client.core.send_request_stream), (4, client.core.send_request_subscription)):
        send(HI, 1, 0.0)
        client.sent()
        assert client.gives(response(stream_id), response(stream_id))[1:] == [
            StreamFailed(stream_id, 0x204, b"a payload without credit", FailedBy.LOCAL)
        ]
        assert client.sent() == [cancel(stream_id)]
    server.gives(channel(2, 0, 1))
    assert server.gives(channel(2, data=b"x")) == [StreamFailed(2, 0x204, b"a payload without credit", FailedBy.LOCAL)]
    assert server.sent() == [error(2, 0x204, b"a payload without credit")]
    assert server.core.statistics().streams == 0


@pytest.mark.rule("RX-63")
def test_rx63_numbers_of_credit(client: Any, server: Any) -> None:
    """0 in REQUEST_N is ignored, 0 as initial n allowed, 2^31-1 and more is never used up."""
    server.gives(Frame(FrameType.REQUEST_STREAM, 2, 0, (0,)), Frame(FrameType.REQUEST_STREAM, 4, 0, (2**32 - 1,)))
    assert server.core.credit(2) == 0
    assert server.gives(request_n(2, 0)) == []
    assert server.gives(request_n(2, UNLIMITED - 1), request_n(2, 1)) == [
        CreditGranted(2, UNLIMITED - 1),
        CreditGranted(2, 1),
    ]
    for stream_id in (2, 4):
        for _ in range(10):
            server.core.send_payload(stream_id, HI)
        assert server.core.credit(stream_id) >= UNLIMITED
    client.core.send_request_stream(HI, UNLIMITED, 0.0)
    assert len(client.gives(*[response(2)] * 10)) == 10
    client.core.send_request_n(2, UNLIMITED)
    sends: list[Callable[[], object]] = [
        lambda: client.core.send_request_n(2, 0),
        lambda: client.core.send_request_n(2, 2**31),
        lambda: client.core.send_request_stream(HI, -1, 0.0),
        lambda: client.core.send_request_channel(HI, 2**31, 0.0),
    ]
    for send in sends:
        with pytest.raises(LocalProtocolError, match=r"n is .*, wanted"):
            send()


@pytest.mark.rule("RX-64")
@pytest.mark.rule("RX-93")
def test_rx64_rx93_missing_request_n_is_no_error(server: Any) -> None:
    """A stream without credit waits for as long as the connection lives."""
    server.gives(Frame(FrameType.REQUEST_STREAM, 2, 0, (0,)), channel(4, 0, 0))
    server.now = 2.9
    assert server.core.handle_timeout(2.9) == []
    assert [server.core.has_stream(id_) for id_ in (2, 4)] == [True, True]
    assert server.sent() == []


# ---------------------------------------------------------------- fragments


@pytest.mark.rule("RX-70")
def test_rx70_only_response_and_request_channel_have_f(by_hand: Any, server: Any) -> None:
    """0x2000 on other requests is ignored; they go whole, or not at all."""
    for stream_id, kind, numbers in (
        (2, "REQUEST_RESPONSE", ()),
        (4, "REQUEST_FNF", ()),
        (6, "REQUEST_STREAM", (1,)),
        (8, "REQUEST_SUB", (1,)),
    ):
        assert server.gives_frame(kind, stream_id, F, *numbers, data=b"x")[0].payload == Payload(b"x")
    small = by_hand("client", CoreConfig(fragment_size=64, max_frame_size=1000))
    small.core.send_request_stream(Payload(bytes(500)), 1, 0.0)
    (whole,) = small.sent()
    assert (whole.flags, len(whole.data)) == (0, 500)
    with pytest.raises(LocalProtocolError, match="a request of 1001 bytes cannot be fragmented"):
        small.core.send_request_response(Payload(bytes(981)), 0.0)
    small.core.send_request_channel(Payload(bytes(5000)), 1, 0.0)


@pytest.mark.rule("RX-71")
@pytest.mark.rule("RX-75")
def test_rx71_rx75_fragments_as_sent(by_hand: Any) -> None:
    """Metadata first, each part with its own length; n and N on the first only; no frame above fragment_size."""
    client = by_hand("client", CoreConfig(fragment_size=64))
    payload = Payload(bytes(range(100)), bytes(reversed(range(90))))
    client.core.send_request_channel(payload, 7, 0.0, complete=True)
    frames = client.sent()
    assert all(len(frame.encode()) <= 64 for frame in frames)
    assert [frame.flags & N for frame in frames] == [N] + [0] * (len(frames) - 1)
    assert [frame.numbers for frame in frames] == [(7,)] + [()] * (len(frames) - 1)
    assert [frame.flags & (F | C) for frame in frames] == [F] * (len(frames) - 1) + [C]
    assert {frame.kind for frame in frames} == {FrameType.REQUEST_CHANNEL}
    assert b"".join(frame.metadata or b"" for frame in frames) == payload.metadata
    assert b"".join(frame.data for frame in frames) == payload.data
    with_metadata = [frame.metadata is not None for frame in frames]
    assert with_metadata == sorted(with_metadata, reverse=True)
    assert not any(frame.data for frame, after in pairwise(frames) if after.metadata is not None)
    server = by_hand("server")
    assert server.gives(*frames) == [RequestReceived(Interaction.REQUEST_CHANNEL, 2, payload, 7, True)]


@pytest.mark.rule("RX-75")
@pytest.mark.parametrize("size", range(30, 80))
def test_rx75_what_fits_is_not_cut(by_hand: Any, size: int) -> None:
    """fragment_size counts the whole frame; 64 at least; off by default."""
    server = by_hand("server", CoreConfig(fragment_size=64))
    server.gives_frame("REQUEST_RESPONSE", 2)
    payload = Payload(bytes(size - 16), b"")
    server.core.send_payload(2, payload)
    frames = server.sent()
    assert (len(frames) == 1) is (size <= 64)
    assert all(len(frame.encode()) <= 64 for frame in frames)
    client = by_hand("client")
    client.core.send_request_response(HI, 0.0)
    assert client.gives(*frames)[-1] == PayloadReceived(2, payload, True)
    with pytest.raises(ValueError, match="fragment_size"):
        CoreConfig(fragment_size=63)


@pytest.mark.rule("RX-75")
def test_rx75_payloads_above_the_frame_limit_are_cut_anyway(by_hand: Any) -> None:
    """A peer like this one would not take the frame, so it is fragmented although fragment_size is off."""
    server = by_hand("server", ReactiveSocketConfig(max_frame_size=1000))
    server.gives_frame("REQUEST_RESPONSE", 2)
    server.core.send_payload(2, Payload(bytes(989)))
    assert [frame.flags for frame in server.sent()] == [F, C]
    usual = by_hand("server", ReactiveSocketConfig())
    usual.gives_frame("REQUEST_RESPONSE", 2)
    usual.core.send_payload(2, Payload(bytes(16 * 2**20)))
    assert max(len(frame.encode()) for frame in usual.sent()) == 2**20 - 1  # 4 octets are left for a metadata length
    tiny = by_hand("server", CoreConfig(max_frame_size=60, fragment_size=1000))
    tiny.gives_frame("REQUEST_RESPONSE", 2)
    tiny.core.send_payload(2, Payload(bytes(100)))
    assert [len(frame.encode()) <= 64 for frame in tiny.sent()] == [True] * 2


@pytest.mark.rule("RX-71")
def test_rx71_reassembly(client: Any, server: Any) -> None:
    """Both parts are concatenated; an empty metadata in any fragment makes metadata present."""
    client.core.send_request_response(HI, 0.0)
    assert client.gives(response(2, F, b"", b"m1"), response(2, F, b"d1", b"m2"), response(2, C, b"d2")) == [
        PayloadReceived(2, Payload(b"d1d2", b"m1m2"), True)
    ]
    client.core.send_request_stream(HI, 5, 0.0)
    assert client.gives(response(4, F), response(4, 0, b"", b"")) == [PayloadReceived(4, Payload(b"", b""), False)]
    assert client.gives(response(4, F), response(4)) == [PayloadReceived(4, Payload(), False)]
    # The initial n of the first fragment counts, on a later one it is skipped.
    assert server.gives(channel(2, F, 3, data=b"a")) == []
    assert server.gives(channel(2, C, 9, data=b"b")) == [
        RequestReceived(Interaction.REQUEST_CHANNEL, 2, Payload(b"ab"), 3, True)
    ]


@pytest.mark.rule("RX-72")
@pytest.mark.rule("RX-98")
def test_rx72_rx98_f_with_c_is_ignored(client: Any, server: Any) -> None:
    """F and C together: the frame is the last fragment."""
    client.core.send_request_stream(HI, 5, 0.0)
    assert client.gives(response(2, F, b"a"), response(2, F | C, b"b")) == [PayloadReceived(2, Payload(b"ab"), True)]
    assert server.gives(channel(2, F | C, 1, data=b"x"))[0].complete is True
    server.gives(channel(4, 0, 1))
    server.core.send_request_n(4, 1)
    assert server.gives(channel(4, F | C, data=b"x")) == [PayloadReceived(4, Payload(b"x"), True)]


@pytest.mark.rule("RX-72")
def test_rx72_the_whole_payload_counts_for_c(client: Any) -> None:
    """A bare last fragment with C still delivers what came before; nothing but empty fragments delivers nothing."""
    client.core.send_request_stream(HI, 1, 0.0)
    assert client.gives(response(2, F, b"a"), response(2, C)) == [PayloadReceived(2, Payload(b"a"), True)]
    client.core.send_request_stream(HI, 1, 0.0)
    assert client.gives(response(4, F), response(4, C)) == [StreamCompleted(4)]
    client.core.send_request_response(HI, 0.0)
    assert client.gives(response(6, F), response(6, C)) == [PayloadReceived(6, Payload(), True)]


@pytest.mark.rule("RX-73")
def test_rx73_what_may_come_between_fragments(client: Any, server: Any) -> None:
    """Fragments of other streams, and REQUEST_N; ERROR or CANCEL drops what was gathered."""
    client.core.send_request_stream(HI, 5, 0.0)
    client.core.send_request_stream(HI, 5, 0.0)
    assert client.gives(response(2, F, b"a"), response(4, F, b"x"), response(2, 0, b"b"), response(4, 0, b"y")) == [
        PayloadReceived(2, Payload(b"ab"), False),
        PayloadReceived(4, Payload(b"xy"), False),
    ]
    client.gives(response(2, F, b"gone"))
    assert client.gives(error(2, 0x201)) == [StreamFailed(2, 0x201, b"")]
    assert client.core.statistics().bytes_gathered == 0
    server.gives(channel(2, 0, 1))
    server.core.send_request_n(2, 5)
    assert server.gives(channel(2, F, data=b"a"), request_n(2, 2), channel(2, data=b"b")) == [
        CreditGranted(2, 2),
        PayloadReceived(2, Payload(b"ab"), False),
    ]
    server.gives(channel(2, F, data=b"gone"))
    assert server.gives(cancel(2)) == [StreamCancelled(2)]
    assert server.core.statistics().bytes_gathered == 0


@pytest.mark.rule("RX-73")
def test_rx73_a_request_that_is_not_whole(server: Any) -> None:
    """REQUEST_N adds to its n; CANCEL and ERROR drop it, and nobody has heard of it."""
    assert server.gives(channel(2, F, 1, data=b"a"), request_n(2, 4), channel(2, data=b"b")) == [
        RequestReceived(Interaction.REQUEST_CHANNEL, 2, Payload(b"ab"), 5, False)
    ]
    for ending in (cancel(4), error(4, 0x201)):
        assert server.gives(channel(4, F, 1, data=b"a"), ending) == []
        assert server.core.statistics().bytes_gathered == 0
        assert not server.core.has_stream(4)
    server.gives(channel(6, F, 1, data=b"a"))
    assert [type(event).__name__ for event in server.core.connection_lost(0, "", 0.0)] == [
        "StreamCancelled",
        "ConnectionEnded",
    ]


@pytest.mark.rule("RX-74")
@pytest.mark.rule("RX-96")
def test_rx74_rx96_reassembly_is_bounded(by_hand: Any) -> None:
    """Above max_payload_size RQ cancels and fails, RS sends ERROR[INVALID]; nothing of it is kept."""
    config = CoreConfig(max_payload_size=100, max_reassembly=250)
    client = by_hand("client", config)
    for _ in range(2):
        client.core.send_request_stream(HI, 5, 0.0)
    client.sent()
    reason = b"a payload above max_payload_size"
    assert client.gives(response(2, F, bytes(60), bytes(40)))[1:] == []
    assert client.gives(response(2, F, b"x")) == [StreamFailed(2, 0x204, reason, FailedBy.LOCAL)]
    assert client.sent() == [cancel(2)]
    assert client.gives(response(4, 0, bytes(101)))[0].payload == Payload(bytes(101))  # in one frame: RX-4 bounds it
    server = by_hand("server", config)
    assert server.gives(channel(2, F, 1, data=bytes(101))) == []
    assert server.sent() == [error(2, 0x204, reason)]
    assert server.gives(channel(2, F, data=b"more"), channel(2, C)) == []
    server.gives(channel(4, 0, 1))
    server.core.send_request_n(4, 1)
    server.sent()
    assert server.gives(channel(4, F, data=bytes(101))) == [StreamFailed(4, 0x204, reason, FailedBy.LOCAL)]
    assert server.sent() == [error(4, 0x204, reason)]
    for stream_id in (6, 8, 10):
        server.gives(channel(stream_id, F, 1, data=bytes(90)))
    assert [frame.stream_id for frame in server.sent()] == [10]
    assert server.core.statistics().bytes_gathered == 180
    for side in (client, server):
        side.core.close(0, "", 0.0)
        assert side.core.statistics().bytes_gathered == 0


@pytest.mark.rule("RX-74")
def test_rx74_default_limit() -> None:
    """64 MiB."""
    assert ReactiveSocketConfig().max_payload_size == 64 * 1024 * 1024


# ---------------------------------------------------------------- the ignore list


@pytest.mark.rule("RX-97")
def test_rx97_ids_may_be_used_again(server: Any) -> None:
    """After termination an id may be used again."""
    for _ in range(3):
        assert server.gives_frame("REQUEST_RESPONSE", 2)[0].stream_id == 2
        server.core.send_payload(2, HI)


@pytest.mark.rule("RX-99")
@pytest.mark.rule("RX-100")
@pytest.mark.rule("RX-101")
@pytest.mark.rule("RX-102")
@pytest.mark.rule("RX-103")
@pytest.mark.rule("RX-109")
def test_rx99_to_rx103_rx109_what_makes_no_sense_is_ignored(server: Any) -> None:
    """Request on a stream in use; CANCEL, ERROR, RESPONSE, REQUEST_N on an unknown stream or 0; frames in the wrong direction."""
    server.gives(Frame(FrameType.REQUEST_STREAM, 2, 0, (5,)), Frame(FrameType.REQUEST_RESPONSE, 4), channel(8, 0, 5))
    own = server.core.send_request_stream(HI, 5, 0.0)
    server.sent()
    ignored = [
        Frame(FrameType.REQUEST_STREAM, 2, 0, (5,)),
        Frame(FrameType.REQUEST_RESPONSE, 2),
        Frame(FrameType.REQUEST_FNF, 2),
        Frame(FrameType.REQUEST_SUB, 8, 0, (5,)),
        channel(2, 0, 5),
        channel(4),
        cancel(0),
        cancel(6),
        cancel(own),
        error(6, 0x201),
        error(4, 0x201),
        response(0, C, b"x"),
        response(6, C, b"x"),
        response(2, C, b"x"),
        request_n(0, 1),
        request_n(6, 1),
        request_n(4, 1),
        request_n(own, 1),
    ]
    for frame in ignored:
        assert server.gives(frame) == [], frame
    assert server.sent() == []
    assert server.core.statistics().streams == 4
    assert server.core.credit(2) == 5


@pytest.mark.rule("RX-102")
def test_rx102_errors_of_waiting_and_unknown_streams(client: Any) -> None:
    """ERROR on an unknown stream does nothing, and shows nothing about SETUP."""
    assert client.gives(error(2, 0x201), error(1, 0x201)) == []


@pytest.mark.rule("RX-109")
@pytest.mark.rule("RX-57")
def test_rx109_rx57_late_payloads_of_an_ended_channel(server: Any) -> None:
    """REQUEST_CHANNEL without N opens a channel only if its id is above every one that the peer used."""
    server.gives(channel(4, 0, 1), cancel(4), Frame(FrameType.REQUEST_FNF, 6))
    assert server.gives(channel(4, data=b"late"), channel(6, data=b"late"), channel(2, data=b"late")) == []
    assert server.gives(channel(4, 0, 1))[0].stream_id == 4
    assert server.gives(channel(8, data=b"new"))[0].stream_id == 8
    assert server.sent() == []


def test_a_stream_too_many_is_rejected(by_hand: Any) -> None:
    server = by_hand("server", CoreConfig(max_streams=2))
    for stream_id in (2, 4, 6):
        server.gives_frame("REQUEST_RESPONSE", stream_id)
    assert server.sent() == [error(6, 0x202, b"too many streams are open", b"too many streams are open")]
    assert len(server.gives_frame("REQUEST_FNF", 8)) == 0
    server.core.send_payload(2, HI)
    assert server.gives_frame("REQUEST_RESPONSE", 10)[0].stream_id == 10


def test_misuse_changes_nothing(server: Any) -> None:
    server.gives(Frame(FrameType.REQUEST_STREAM, 2, 0, (1,)))
    before = server.core.statistics()
    calls: list[Callable[[], object]] = [
        lambda: server.core.send_payload(4, HI),
        lambda: server.core.send_complete(4),
        lambda: server.core.send_error(4),
        lambda: server.core.send_error(2, 0x201, bytes(2**24)),
        lambda: server.core.send_cancel(2),
    ]
    for call in calls:
        with pytest.raises(LocalProtocolError):
            call()
    server.core.send_request_n(4, 1)
    server.core.send_cancel(4)
    assert server.core.statistics() == before
    assert server.core.credit(2) == 1
