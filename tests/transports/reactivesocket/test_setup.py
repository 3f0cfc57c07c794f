"""Rules of ReactiveSocket about carriers, frames, set-up, leases, keepalive and the end of a connection."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from levada.framework.errors import ConfigurationError, LocalProtocolError
from levada.transports.reactivesocket import ErrorCode, ReactiveSocketConfig, ReactiveSocketCore
from levada.transports.reactivesocket.frames import Frame, FrameType
from levada.transports.reactivesocket.state import CONNECTION
from levada.transports.rsocket.config import CoreConfig, LeaseGrant
from levada.transports.rsocket.events import (
    ConnectionEnded,
    EndReason,
    ExtensionReceived,
    FailedBy,
    Interaction,
    KeepaliveReceived,
    LeaseGranted,
    MetadataPushed,
    PayloadReceived,
    PeerFellSilent,
    RequestReceived,
    SetupAccepted,
    SetupReceived,
    StreamCancelled,
    StreamFailed,
)
from levada.transports.rsocket.frames import Payload
from levada.transports.rsocket.state import ConnectionState

HI = Payload(b"hi")
LEASES = CoreConfig(lease=LeaseGrant(ttl=10, n=2))


def setup_frame(flags: int = 0, *, version: int = 0, keepalive_ms: int = 500, lifetime_ms: int = 3_000) -> Frame:
    return Frame(FrameType.SETUP, 0, flags, (version, keepalive_ms, lifetime_ms), ("text/plain", "a/b"))


def error(code: int, stream_id: int = 0, data: bytes = b"", metadata: bytes | None = None) -> Frame:
    return Frame(FrameType.ERROR, stream_id, 0, (code,), metadata=metadata, data=data)


def ended(events: list[Any]) -> tuple[EndReason, int, str]:
    """Reason, code and rule of the end, which must be the last event."""
    last = events[-1]
    assert isinstance(last, ConnectionEnded)
    return last.reason, last.code, last.rule


# ---------------------------------------------------------------- carriers and framing


@pytest.mark.rule("RX-1")
@pytest.mark.rule("RX-2")
@pytest.mark.parametrize("framed", [False, True])
def test_rx1_rx2_the_same_connection_on_octets_and_on_messages(by_hand: Any, framed: bool) -> None:
    """With a length field on byte carriers, without on WebSocket, and else alike."""
    client, server = by_hand("client", framed=framed), by_hand("server", framed=framed)
    client.core.send_request_response(HI, 0.0)
    (request,) = client.sent()
    assert server.gives(request) == [RequestReceived(Interaction.REQUEST_RESPONSE, 2, HI, 0, True)]
    server.core.send_payload(2, Payload(b"ho"))
    (response,) = server.sent()
    assert client.gives(response) == [SetupAccepted(), PayloadReceived(2, Payload(b"ho"), True)]


@pytest.mark.rule("RX-3")
@pytest.mark.rule("RX-4")
@pytest.mark.parametrize("length", ["00000000", "0000000b", "80000010", "ffffffff", "01000001"])
def test_rx3_rx4_wrong_length_closes(by_hand: Any, length: str) -> None:
    """A length below 12, with R set, or above max_frame_size ends the connection before anything of that size is kept."""
    server = by_hand("server", ReactiveSocketConfig())
    assert ended(server.gives(length)) == (EndReason.PROTOCOL, 0x101, "RX-4")
    assert [(frame.kind, frame.stream_id, frame.numbers) for frame in server.sent()] == [(FrameType.ERROR, 0, (0x101,))]
    assert server.core.statistics().bytes_unread == 0


@pytest.mark.rule("RX-3")
@pytest.mark.rule("RX-4")
def test_rx3_rx4_default_and_limits_of_the_frame_size() -> None:
    """16 MiB by default, up to 2^31-1."""
    assert ReactiveSocketConfig().max_frame_size == 16 * 1024 * 1024
    assert ReactiveSocketConfig(max_frame_size=2**31 - 1).max_frame_size == 2**31 - 1
    for wrong in (11, 2**31):
        with pytest.raises(ValueError, match="max_frame_size"):
            ReactiveSocketConfig(max_frame_size=wrong)


@pytest.mark.rule("RX-4")
def test_rx4_the_largest_frame_is_taken(by_hand: Any) -> None:
    """A frame of max_frame_size octets, its length field included, is not too long; one more is."""
    server = by_hand("server", CoreConfig(max_frame_size=100))
    (event,) = server.gives_frame("REQUEST_FNF", 2, data=bytes(88))
    assert event.payload == Payload(bytes(88))
    events = server.gives_frame("REQUEST_FNF", 4, data=bytes(89))
    assert ended(events) == (EndReason.PROTOCOL, 0x101, "RX-4")
    assert events[-1].offset == len(setup_frame().encode()) + 100


@pytest.mark.rule("RX-5")
@pytest.mark.parametrize("message", ["00", "000a0000000000", "00" * 97])
def test_rx5_message_of_a_wrong_size_closes(by_hand: Any, message: str) -> None:
    """A message has at least 8 octets, and a limit too."""
    server = by_hand("server", CoreConfig(max_frame_size=100), framed=True)
    assert ended(server.gives(message)) == (EndReason.PROTOCOL, 0x101, "RX-5")
    assert [frame.kind for frame in server.sent()] == [FrameType.ERROR]


@pytest.mark.rule("RX-6")
def test_rx6_any_cutting(by_hand: Any) -> None:
    """Frames are processed whole, octets come in any cutting."""
    wire = b"".join(
        (
            setup_frame().encode(),
            Frame(FrameType.REQUEST_RESPONSE, 2, metadata=b"m", data=b"d").encode(),
            Frame(FrameType.CANCEL, 2).encode(),
            Frame(FrameType.REQUEST_FNF, 4, data=bytes(300)).encode(),
        )
    )
    for size in (1, 2, 3, 5, 7, 11, 12, 13, 50, len(wire)):
        server = by_hand("listening")
        events: list[Any] = []
        for at in range(0, len(wire), size):
            for event in server.gives(wire[at : at + size]):
                events.append(event)
                if isinstance(event, SetupReceived):
                    server.core.accept_setup(0.0)
                    events += server.core.take_events()
        assert events[1:] == [
            RequestReceived(Interaction.REQUEST_RESPONSE, 2, Payload(b"d", b"m"), 0, True),
            StreamCancelled(2),
            RequestReceived(Interaction.FIRE_AND_FORGET, 4, Payload(bytes(300)), 0, True),
        ]


@pytest.mark.rule("RX-7")
def test_rx7_after_the_end_nothing_is_sent_and_nothing_heard(by_hand: Any) -> None:
    """A side that closes sends nothing more and ignores what arrives."""
    server = by_hand("server")
    server.gives_frame("REQUEST_RESPONSE", 2)
    assert server.core.close(0x102, "enough", 0.0) == [  # RSocket's CONNECTION_CLOSE, which is not known here
        StreamCancelled(2),
        ConnectionEnded(EndReason.CLOSED, 0x101, "enough"),
    ]
    assert server.sent() == [error(0x101, data=b"enough")]
    assert server.core.close(ErrorCode.CONNECTION_ERROR, "", 0.0) == []
    assert server.gives_frame("REQUEST_RESPONSE", 4) == []
    assert server.core.connection_lost(0, "", 0.0) == []
    assert server.core.next_deadline() is None
    assert server.core.handle_timeout(1e9) == []
    core = server.core
    calls: list[Callable[[], object]] = [
        lambda: core.send_request_response(HI, 0.0),
        lambda: core.send_payload(2, HI),
        lambda: core.send_request_n(2, 1),
        lambda: core.send_keepalive(),
        lambda: core.send_metadata_push(b"m"),
        lambda: core.send_lease(1, 1, 0.0),
        lambda: core.send_extension(0, 1, b""),
    ]
    for send in calls:
        with pytest.raises(LocalProtocolError):
            send()
    core.send_cancel(2)  # harmless
    assert server.sent() == []


@pytest.mark.rule("RX-8")
def test_rx8_unnamed_flags_mean_nothing(by_hand: Any) -> None:
    """Flag bits not named for a type are not interpreted."""
    server = by_hand("server")
    (event,) = server.gives_frame("REQUEST_RESPONSE", 2, 0x3FFF)
    assert event == RequestReceived(Interaction.REQUEST_RESPONSE, 2, Payload(), 0, True)
    assert server.gives_frame("CANCEL", 2, 0x3FFF) == [StreamCancelled(2)]


@pytest.mark.rule("RX-9")
@pytest.mark.parametrize(
    "frame",
    [
        "0000000c 0000 {} 00000002",
        "0000000c 000e {} 00000002",
        "0000000c ffff {} 00000001",
        "0000000f 0009 {} 00000002 000000",
    ],
)
def test_rx9_not_understood(by_hand: Any, frame: str) -> None:
    """Unknown types, type 0, unknown EXT and known types too short: dropped with I, else CONNECTION_ERROR."""
    server = by_hand("server")
    assert server.gives(frame.format("8000")) == []
    assert server.sent() == []
    assert ended(server.gives(frame.format("0000"))) == (EndReason.PROTOCOL, 0x101, "RX-9")
    assert [(sent.kind, sent.numbers) for sent in server.sent()] == [(FrameType.ERROR, (0x101,))]


@pytest.mark.rule("RX-12")
@pytest.mark.parametrize("size", ["00000006", "00000003", "80000004", "00000000", "ffffffff"])
def test_rx12_impossible_metadata_length_makes_the_frame_ignored(by_hand: Any, size: str) -> None:
    """Greater than what is left, below 4, or with R: the whole frame is ignored, nothing is closed."""
    server = by_hand("server")
    assert server.gives(f"00000011 0004 4000 00000002 {size} 61") == []
    assert server.sent() == []
    # The id was never used.
    assert server.gives_frame("REQUEST_RESPONSE", 2) == [
        RequestReceived(Interaction.REQUEST_RESPONSE, 2, Payload(), 0, True)
    ]


@pytest.mark.rule("RX-12")
def test_rx12_metadata_length_cut_off(by_hand: Any) -> None:
    """M set and fewer than 4 octets left: ignored as well; in a first SETUP it is INVALID_SETUP."""
    server = by_hand("server")
    assert server.gives("0000000e 0004 4000 00000002 0000") == []
    listening = by_hand("listening")
    damaged = "0000001e 0001 4000 00000000 00000000 00000000 00000000 00 00 00000009"
    assert ended(listening.gives(damaged)) == (EndReason.REFUSED, 0x001, "RX-12")
    assert [(frame.stream_id, frame.numbers) for frame in listening.sent()] == [(0, (0x001,))]


@pytest.mark.rule("RX-13")
def test_rx13_metadata_is_handed_on_as_it_came(by_hand: Any) -> None:
    """Empty metadata and none differ, both ways, and no MIME type is looked at."""
    server = by_hand("server")
    payloads = [server.gives_frame("REQUEST_FNF", id_, metadata=m)[0].payload for id_, m in ((2, b""), (4, None))]
    assert [payload.metadata for payload in payloads] == [b"", None]
    server.core.send_fire_and_forget(Payload(b"", b""), 0.0)
    server.core.send_fire_and_forget(Payload(b""), 0.0)
    assert [frame.metadata for frame in server.sent()] == [b"", None]


# ---------------------------------------------------------------- SETUP


@pytest.mark.rule("RX-30")
def test_rx30_the_client_sends_setup_at_once() -> None:
    """SETUP on stream 0 right after connecting, ahead of all else."""
    config = CoreConfig(
        keepalive_interval=0.5,
        max_lifetime=30,
        metadata_mime_type="text/plain",
        data_mime_type="application/cbor",
        setup_payload=Payload(b"hi", b"m"),
    )
    core = ReactiveSocketCore(config, client=True, framed=False, now=0.0)
    core.send_fire_and_forget(HI, 0.0)
    assert b"".join(core.data_to_send(0.0)).hex() == (
        "0000003b" + "00014000" + "00000000" + "00000000" + "000001f4" + "00007530" + "0a746578742f706c61696e"
        "106170706c69636174696f6e2f63626f72"
        + "00000005"
        + "6d"
        + "6869"
        + "0000000e"
        + "00050000"
        + "00000002"
        + "6869"
    )


@pytest.mark.rule("RX-30")
@pytest.mark.parametrize(
    "first",
    [
        Frame(FrameType.KEEPALIVE, 0, 0x2000),
        Frame(FrameType.REQUEST_RESPONSE, 2),
        Frame(FrameType.SETUP, 2, 0, (0, 500, 3000), ("a", "b")),
        error(0x101),
        bytes.fromhex("0000000c 000e 8000 00000000"),
        bytes.fromhex("00000011 0004 4000 00000002 00000009 61"),
    ],
    ids=["keepalive", "request", "setup on a stream", "error", "unknown", "damaged"],
)
def test_rx30_anything_else_first_is_refused(by_hand: Any, first: Frame | bytes) -> None:
    """The server sends ERROR[INVALID_SETUP] and closes."""
    listening = by_hand("listening")
    assert ended(listening.gives(first)) == (EndReason.REFUSED, 0x001, "RX-30")
    assert [(frame.kind, frame.stream_id, frame.numbers) for frame in listening.sent()] == [(FrameType.ERROR, 0, (1,))]


@pytest.mark.rule("RX-31")
@pytest.mark.parametrize("version", [1, 0x10000, 2**32 - 1])
def test_rx31_version_0(by_hand: Any, version: int) -> None:
    """The version is 0; any other is INVALID_SETUP."""
    listening = by_hand("listening")
    assert ended(listening.gives(setup_frame(version=version))) == (EndReason.REFUSED, 0x001, "RX-31")
    client = ReactiveSocketCore(CoreConfig(version=(1, 0)), client=True, framed=True, now=0.0)
    assert Frame.decode(client.data_to_send(0.0)[0], framed=True).numbers[0] == 0


@pytest.mark.rule("RX-32")
def test_rx32_mime_types_reach_the_application_without_nul(by_hand: Any) -> None:
    """A trailing NUL is removed on reception."""
    listening = by_hand("listening")
    (event,) = listening.gives(
        "00000022 0001 3000 00000000 00000000 000001f4 00000bb8 04 612f6200 02 7800 6869".replace("3000", "1000")
    )
    assert event == SetupReceived((0, 0), 0.5, 3.0, "a/b", "x", Payload(b"hi"), strict=True)


@pytest.mark.rule("RX-32")
@pytest.mark.parametrize(
    ("metadata", "data"), [("", "x"), ("\xff", "x"), ("a" * 129, "x"), ("x\x1b[2J", "x"), ("x", "\xff"), ("x", "\n")]
)
def test_rx32_mime_types_that_cannot_be_used_are_refused(by_hand: Any, metadata: str, data: str) -> None:
    """Empty (for metadata), not printable ASCII, or longer than an entry of metadata can name: INVALID_SETUP."""
    listening = by_hand("listening")
    setup = Frame(FrameType.SETUP, 0, 0, (0, 500, 3000), (metadata, data))
    assert ended(listening.gives(setup)) == (EndReason.REFUSED, 0x001, "RX-32")
    [error_frame] = listening.sent()
    assert error_frame.numbers == (0x001,)


@pytest.mark.rule("RX-33")
def test_rx33_strict(by_hand: Any) -> None:
    """S with a MIME type that is not understood is UNSUPPORTED_SETUP; without S types are not checked."""
    config = CoreConfig(strict_mime_types=frozenset({"text/plain"}))
    refusing = by_hand("listening", config)
    assert ended(refusing.gives(setup_frame(0x1000))) == (EndReason.REFUSED, 0x002, "RX-33")
    assert [frame.numbers for frame in refusing.sent()] == [(0x002,)]
    assert isinstance(by_hand("listening", config).gives(setup_frame(0))[0], SetupReceived)
    both = CoreConfig(strict_mime_types=frozenset({"text/plain", "a/b"}))
    assert isinstance(by_hand("listening", both).gives(setup_frame(0x1000))[0], SetupReceived)
    assert isinstance(by_hand("listening").gives(setup_frame(0x1000))[0], SetupReceived)
    client = ReactiveSocketCore(CoreConfig(strict=True), client=True, framed=True, now=0.0)
    assert Frame.decode(client.data_to_send(0.0)[0], framed=True).flags == 0x1000


@pytest.mark.rule("RX-34")
def test_rx34_refusals(by_hand: Any) -> None:
    """The application's refusal is REJECTED_SETUP with its text; L without leases UNSUPPORTED; truncated INVALID."""
    listening = by_hand("listening")
    listening.gives(setup_frame(), Frame(FrameType.REQUEST_RESPONSE, 2))
    listening.core.reject_setup("not you")
    assert listening.core.take_events() == [ConnectionEnded(EndReason.REFUSED, 0x003, "not you")]
    assert listening.sent() == [error(0x003, data=b"not you")]
    no_leases = by_hand("listening")
    assert ended(no_leases.gives(setup_frame(0x2000))) == (EndReason.REFUSED, 0x002, "RX-34")
    truncated = by_hand("listening")
    assert ended(truncated.gives("00000010 0001 0000 00000000 00000000")) == (EndReason.REFUSED, 0x001, "RX-34")
    deciding = by_hand("listening")
    deciding.gives(setup_frame())
    with pytest.raises(LocalProtocolError, match="not one of set-up"):
        deciding.core.reject_setup("", 0x101)
    assert deciding.core.state is ConnectionState.DECIDING
    deciding.core.accept_setup(0.0)
    late_calls: list[Callable[[], object]] = [deciding.core.reject_setup, lambda: deciding.core.accept_setup(0.0)]
    for late in late_calls:
        with pytest.raises(LocalProtocolError, match="no SETUP to decide about"):
            late()


@pytest.mark.rule("RX-35")
def test_rx35_zero_is_no_keepalive_and_no_limit(by_hand: Any) -> None:
    """0 for the two times is taken, and given."""
    config = ReactiveSocketConfig(keepalive_interval=0, max_lifetime=0)
    client = ReactiveSocketCore(config, client=True, framed=True, now=0.0)
    assert Frame.decode(client.data_to_send(0.0)[0], framed=True).numbers == (0, 0, 0)
    assert client.next_deadline() is None
    assert client.handle_timeout(1e9) == []
    assert client.data_to_send(0.0) == []
    for keepalive_ms, lifetime_ms in ((0, 0), (0, 3000), (500, 0)):
        listening = by_hand("listening")
        (event,) = listening.gives(setup_frame(keepalive_ms=keepalive_ms, lifetime_ms=lifetime_ms))
        assert (event.keepalive_interval, event.max_lifetime) == (keepalive_ms / 1000, lifetime_ms / 1000)
        listening.core.accept_setup(0.0)
        assert listening.core.next_deadline() is None
    for wrong in (-1, 0.0009, 5_000_000):
        with pytest.raises(ConfigurationError, match="wanted 0 or"):
            ReactiveSocketConfig(keepalive_interval=wrong)


@pytest.mark.rule("RX-36")
def test_rx36_no_first_frame_in_time(by_hand: Any) -> None:
    """Without a first frame within setup_timeout the server closes, without a word."""
    listening = by_hand("listening", CoreConfig(setup_timeout=10))
    assert listening.core.next_deadline() == 10.0
    listening.gives("0000")
    assert listening.core.handle_timeout(9.9) == []
    assert ended(listening.core.handle_timeout(10.0)) == (EndReason.TIMED_OUT, 0, "")
    assert listening.sent() == []
    deciding = by_hand("listening")
    deciding.gives(setup_frame())
    assert deciding.core.next_deadline() is None
    assert deciding.core.handle_timeout(1000.0) == []
    deciding.core.accept_setup(1000.0)
    assert deciding.core.next_deadline() == 1003.0


@pytest.mark.rule("RX-37")
@pytest.mark.rule("RX-39")
def test_rx37_rx39_who_may_send_when(by_hand: Any) -> None:
    """Without L the client sends requests behind SETUP, the server as soon as it accepts and not before."""
    client = ReactiveSocketCore(CoreConfig(), client=True, framed=False, now=0.0)
    assert client.send_request_response(HI, 0.0) == 2
    listening = by_hand("listening")
    calls: list[Callable[[], object]] = [
        lambda: listening.core.send_request_response(HI, 0.0),
        lambda: listening.core.send_keepalive(),
        lambda: listening.core.send_metadata_push(b""),
    ]
    wire = b"".join(client.data_to_send(0.0))
    for octets in (wire[:2], wire[2:]):
        for send in calls:
            with pytest.raises(LocalProtocolError, match="while the connection is"):
                send()
        listening.gives(octets)
    assert listening.core.state is ConnectionState.DECIDING
    assert listening.sent() == []
    listening.core.accept_setup(0.0)
    assert listening.core.take_events() == [RequestReceived(Interaction.REQUEST_RESPONSE, 2, HI, 0, True)]
    assert listening.core.send_request_response(HI, 0.0) == 1


@pytest.mark.rule("RX-39")
@pytest.mark.parametrize("framed", [False, True])
def test_rx39_what_comes_behind_setup_waits_in_order_and_in_bounds(by_hand: Any, framed: bool) -> None:
    """What a client sends while the server decides is handled when it accepts; too much of it ends the connection."""
    listening = by_hand("listening", CoreConfig(max_setup_backlog=100), framed=framed)
    listening.gives(setup_frame())
    fnf = [Frame(FrameType.REQUEST_FNF, id_, data=bytes(20)) for id_ in (2, 4, 6)]
    assert listening.gives(*fnf) == []
    assert listening.core.statistics().bytes_unread == 96
    listening.core.accept_setup(0.0)
    assert [event.stream_id for event in listening.core.take_events()] == [2, 4, 6]
    full = by_hand("listening", CoreConfig(max_setup_backlog=95), framed=framed)
    full.gives(setup_frame())
    assert ended(full.gives(*fnf)) == (EndReason.PROTOCOL, 0x101, "RX-39")
    assert full.core.statistics().bytes_unread == 0
    in_one_piece = by_hand("listening", CoreConfig(max_setup_backlog=95), framed=framed)
    assert ended(in_one_piece.gives(setup_frame(), *fnf)) == (EndReason.PROTOCOL, 0x101, "RX-39")


@pytest.mark.rule("RX-40")
@pytest.mark.parametrize(
    "shown",
    [
        Frame(FrameType.RESPONSE, 2, 0x1000),
        error(0x201, 2),
        Frame(FrameType.REQUEST_N, 4, 0, (1,)),
        Frame(FrameType.LEASE, 0, 0, (1, 1)),
        Frame(FrameType.REQUEST_FNF, 1),
        Frame(FrameType.REQUEST_CHANNEL, 1, 0x0800, (1,)),
    ],
    ids=["response", "error", "request_n", "lease", "fnf", "channel"],
)
def test_rx40_what_shows_that_setup_was_accepted(by_hand: Any, shown: Frame) -> None:
    """A response to a request, a LEASE or a REQUEST; once."""
    client = by_hand("client")
    client.core.send_request_response(HI, 0.0)
    client.core.send_request_channel(HI, 1, 0.0)
    assert client.core.state is ConnectionState.OPENING
    assert client.gives_frame("KEEPALIVE", 0) == [KeepaliveReceived(b"")]
    assert client.gives(shown)[0] == SetupAccepted()
    assert client.core.state.value == "open"
    assert SetupAccepted() not in client.gives_frame("REQUEST_FNF", 3)


@pytest.mark.rule("RX-40")
@pytest.mark.parametrize("code", [0x001, 0x002, 0x003, 0x0FF])
def test_rx40_setup_error_refuses(by_hand: Any, code: int) -> None:
    """A SETUP_ERROR ends the connection and its requests."""
    client = by_hand("client")
    client.core.send_request_response(HI, 0.0)
    assert client.gives(error(code, data=b"no")) == [
        StreamFailed(2, code, b"no", FailedBy.CONNECTION),
        ConnectionEnded(EndReason.REFUSED, code, "no"),
    ]
    assert client.sent()[1:] == []


# ---------------------------------------------------------------- leases


@pytest.mark.rule("RX-38")
@pytest.mark.rule("RX-66")
def test_rx38_rx66_requests_wait_for_a_lease(by_hand: Any) -> None:
    """With L each side waits for the other's LEASE before it requests, and each sends one; excess waits in order."""
    client, server = by_hand("client", LEASES), by_hand("server", LEASES, leases=True)
    assert [client.core.send_request_response(Payload(b"%d" % i), 0.0) for i in range(4)] == [2, 4, 6, 8]
    assert client.sent() == []
    assert client.core.statistics().requests_waiting == 4
    (lease,) = server.sent()
    assert lease == Frame(FrameType.LEASE, 0, 0, (10_000, 2))
    assert client.gives(lease) == [SetupAccepted(), LeaseGranted(10.0, 2, None)]
    own_lease, *requests = client.sent()
    assert own_lease == lease
    assert [(frame.stream_id, frame.data) for frame in requests] == [(2, b"0"), (4, b"1")]
    server.core.send_fire_and_forget(HI, 0.0)
    assert server.sent() == []
    assert server.gives(own_lease, *requests)[0] == LeaseGranted(10.0, 2, None)
    assert [frame.kind for frame in server.sent()] == [FrameType.REQUEST_FNF]
    client.core.send_cancel(6)  # never heard of there
    assert client.gives_frame("LEASE", 0, 0, 1000, 1) == [LeaseGranted(1.0, 1, None)]
    assert [(frame.kind, frame.stream_id) for frame in client.sent()] == [(FrameType.REQUEST_RESPONSE, 8)]


@pytest.mark.parametrize("payload", [Payload("text"), Payload(b"", "text"), Payload(bytearray(1))])  # type: ignore[arg-type]
def test_a_payload_that_is_not_bytes_is_refused_at_the_call_and_not_when_a_lease_comes(
    by_hand: Any, payload: Payload
) -> None:
    client, server = by_hand("client", LEASES), by_hand("server")
    with pytest.raises(TypeError, match="bytes"):
        client.core.send_request_response(payload, 0.0)
    assert client.gives_frame("LEASE", 0, 0, 1000, 1)[1:] == [LeaseGranted(1.0, 1, None)]
    server.gives_frame("REQUEST_STREAM", 2, 0, 1)
    with pytest.raises(TypeError, match="bytes"):
        server.core.send_payload(2, payload)
    assert (server.core.credit(2), server.sent()) == (1, [])


@pytest.mark.rule("RX-65")
def test_rx65_the_last_lease_counts_from_reception(by_hand: Any) -> None:
    """N requests within ttl ms of reception; the last replaces earlier ones; 0 in either stops requests."""
    client = by_hand("client", LEASES)

    def lease(ttl_ms: int, n: int) -> None:
        client.gives_frame("LEASE", 0, 0, ttl_ms, n)
        client.sent()

    def may_request() -> bool:
        stream_id = client.core.send_fire_and_forget(HI, client.now)
        client.core.send_cancel(stream_id)
        return bool(client.sent())

    client.now = 100.0
    lease(1000, 5)
    assert may_request()
    lease(1000, 1)
    assert [may_request(), may_request()] == [True, False]
    lease(1000, 1)
    client.now = 100.999
    assert may_request()
    lease(1000, 1)
    client.now = 101.999
    assert not may_request()
    for ttl_ms, n in ((0, 5), (1000, 0)):
        lease(1000, 5)
        lease(ttl_ms, n)
        assert not may_request()


@pytest.mark.rule("RX-66")
def test_rx66_waiting_requests_are_bounded_and_what_is_free(by_hand: Any) -> None:
    """Excess waits up to max_pending, 0 fails at once; REQUEST_N, CANCEL, payloads, METADATA_PUSH and KEEPALIVE are free."""
    client = by_hand("client", CoreConfig(lease=LeaseGrant(), max_pending=2))
    client.gives_frame("LEASE", 0, 0, 1000, 1)
    client.core.send_request_channel(HI, 1, 0.0)
    client.gives_frame("REQUEST_N", 2, 0, 1)
    client.sent()
    client.core.send_request_n(2, 1)
    client.core.send_payload(2, HI)
    client.core.send_metadata_push(b"m")
    client.core.send_keepalive()
    client.core.send_cancel(2)
    assert len(client.sent()) == 5
    assert client.core.send_request_stream(HI, 1, 0.0) == 4
    assert client.core.send_fire_and_forget(HI, 0.0) == 6
    with pytest.raises(LocalProtocolError, match="2 requests wait for a lease"):
        client.core.send_request_response(HI, 0.0)
    assert client.core.has_stream(4)
    assert client.core.credit(4) == 0
    failing = by_hand("client", CoreConfig(lease=LeaseGrant(), max_pending=0))
    with pytest.raises(LocalProtocolError, match="0 requests wait"):
        failing.core.send_request_response(HI, 0.0)


@pytest.mark.rule("RX-66")
def test_rx66_a_waiting_channel_can_be_changed(by_hand: Any) -> None:
    """Credit and completion given while it waits go with the request."""
    client = by_hand("client", LEASES)
    client.core.send_request_channel(HI, 1, 0.0)
    client.core.send_request_n(2, 4)
    with pytest.raises(LocalProtocolError, match="no credit on stream 2"):
        client.core.send_payload(2, HI)
    client.core.send_complete(2)
    with pytest.raises(LocalProtocolError, match="stream 2"):
        client.core.send_complete(2)
    client.core.send_request_channel(HI, 1, 0.0)
    client.core.send_error(4, 0x201, b"source failed")
    client.gives_frame("LEASE", 0, 0, 1000, 2)
    assert client.sent()[1:] == [Frame(FrameType.REQUEST_CHANNEL, 2, 0x1800, (5,), data=b"hi")]
    assert not client.core.has_stream(4)


@pytest.mark.rule("RX-67")
@pytest.mark.rule("RX-24")
def test_rx67_rx24_requests_beyond_the_lease_are_rejected(by_hand: Any) -> None:
    """REJECTED, before the first LEASE too; a fire-and-forget request is dropped."""
    client = by_hand("client", LEASES)  # has sent no LEASE yet, as the server has not
    assert client.gives_frame("REQUEST_RESPONSE", 1) == [SetupAccepted()]
    rejected = client.sent()
    assert [(frame.stream_id, frame.numbers, frame.data) for frame in rejected] == [
        (1, (0x202,), b"no lease for this request")
    ]
    assert rejected[0].metadata == rejected[0].data  # RX-23
    server = by_hand("server", LEASES, leases=True)
    server.sent()
    for stream_id, kind, numbers in ((2, "REQUEST_FNF", ()), (4, "REQUEST_CHANNEL", (1,))):
        assert len(server.gives_frame(kind, stream_id, 0x0800 if numbers else 0, *numbers)) == 1
    for stream_id, kind, numbers in (
        (6, "REQUEST_STREAM", (1,)),
        (8, "REQUEST_SUB", (1,)),
        (10, "REQUEST_CHANNEL", (1,)),
    ):
        assert server.gives_frame(kind, stream_id, 0x0800 if kind == "REQUEST_CHANNEL" else 0, *numbers) == []
        (error_frame,) = server.sent()
        assert (error_frame.stream_id, error_frame.numbers) == (stream_id, (0x202,))
    assert server.gives_frame("REQUEST_FNF", 12) == []
    assert server.sent() == []


@pytest.mark.rule("RX-67")
def test_rx67_the_time_has_a_grace_the_count_has_not(by_hand: Any) -> None:
    """Ttl and one second more; then nothing. A refused request uses nothing up, an ignored one neither."""
    server = by_hand("server", LEASES, leases=True)
    assert server.gives_frame("REQUEST_FNF", 1) == []  # RX-17: ignored
    server.now = 10.9
    assert len(server.gives_frame("REQUEST_FNF", 2)) == 1
    server.now = 11.0
    assert server.gives_frame("REQUEST_FNF", 4) == []
    server.core.send_lease(5, 1, 11.0, b"m")
    assert server.sent()[-1] == Frame(FrameType.LEASE, 0, 0, (5000, 1), metadata=b"m")
    assert len(server.gives_frame("REQUEST_FNF", 6)) == 1
    assert server.gives_frame("REQUEST_FNF", 8) == []
    server.core.send_lease(0, 9, 11.0)
    assert server.gives_frame("REQUEST_FNF", 10) == []


@pytest.mark.rule("RX-67")
def test_rx67_a_lease_without_l_is_ignored(by_hand: Any) -> None:
    """It shows that SETUP was accepted, and nothing else; and none can be sent."""
    client = by_hand("client")
    assert client.gives_frame("LEASE", 0, 0, 1000, 0) == [SetupAccepted()]
    assert client.core.send_request_response(HI, 0.0) == 2
    assert len(client.sent()) == 1
    with pytest.raises(LocalProtocolError, match="no leases"):
        client.core.send_lease(1, 1, 0.0)
    leasing = by_hand("server", LEASES, leases=True)
    for ttl, n in ((-1, 1), (1, -1), (1, 2**32), (2**32, 1)):
        with pytest.raises(LocalProtocolError, match="does not fit 32 bits"):
            leasing.core.send_lease(ttl, n, 0.0)


@pytest.mark.rule("RX-94")
def test_rx94_a_missing_lease_is_no_error(by_hand: Any) -> None:
    """Requests wait as long as it takes; keepalive is all that a core does about it."""
    client = by_hand("client", CoreConfig(lease=LeaseGrant(), close_when_silent=False))
    client.core.send_request_response(HI, 0.0)
    assert not any(isinstance(event, StreamFailed) for event in client.core.handle_timeout(1e6))
    assert client.core.has_stream(2)


# ---------------------------------------------------------------- keepalive


@pytest.mark.rule("RX-80")
def test_rx80_the_client_sends_keepalive_every_interval(by_hand: Any) -> None:
    """With R, every interval of its SETUP; missed ones are not made up for; the server only when asked."""
    client = by_hand("client", CoreConfig(keepalive_interval=0.5, max_lifetime=100))
    alive = Frame(FrameType.KEEPALIVE, 0, 0x2000)
    assert client.core.next_deadline() == 0.5
    assert client.core.handle_timeout(0.4) == []
    assert client.sent() == []
    assert client.core.handle_timeout(0.5) == []
    assert client.sent() == [alive]
    assert client.core.next_deadline() == 1.0
    client.core.handle_timeout(3.2)
    assert client.sent() == [alive]
    assert client.core.next_deadline() == 3.7
    server = by_hand("server")
    server.core.handle_timeout(2.9)
    assert server.sent() == []
    server.core.send_keepalive(b"x")
    assert server.sent() == [Frame(FrameType.KEEPALIVE, 0, 0x2000, data=b"x")]


@pytest.mark.rule("RX-81")
def test_rx81_keepalive_is_answered_with_the_same_data(by_hand: Any) -> None:
    """R set: the same data with R clear, ahead of other frames; R clear: nothing is sent."""
    server = by_hand("server")
    server.core.send_fire_and_forget(HI, 0.0)
    assert server.gives_frame("KEEPALIVE", 0, 0x2000, data=b"ping") == []
    assert server.sent()[0] == Frame(FrameType.KEEPALIVE, 0, data=b"ping")
    assert server.gives_frame("KEEPALIVE", 0, data=b"pong") == [KeepaliveReceived(b"pong")]
    assert server.sent() == []


@pytest.mark.rule("RX-82")
@pytest.mark.parametrize("role", ["client", "server"])
def test_rx82_silence_for_the_lifetime(by_hand: Any, role: str) -> None:
    """Every octet counts as life; after max lifetime of silence ERROR[CONNECTION_ERROR] and the end."""
    side = by_hand(role, CoreConfig(keepalive_interval=0.5, max_lifetime=3))
    side.now = 2.0
    side.gives("0000")  # half a length field
    side.core.handle_timeout(4.9)
    assert side.core.state is not ConnectionState.ENDED
    side.core.touch(4.0)
    assert side.core.handle_timeout(6.9) == []
    side.sent()
    assert ended(side.core.handle_timeout(7.0)) == (EndReason.TIMED_OUT, 0x101, "")
    assert [(frame.kind, frame.numbers) for frame in side.sent()] == [(FrameType.ERROR, (0x101,))]


@pytest.mark.rule("RX-90")
@pytest.mark.rule("RX-91")
def test_rx90_rx91_closing_is_the_applications_decision(by_hand: Any) -> None:
    """With close_when_silent off the silence is reported, again after another lifetime, and nothing ends; no request times out."""
    client = by_hand("client", CoreConfig(keepalive_interval=5, max_lifetime=3, close_when_silent=False))
    client.core.send_request_response(HI, 0.0)
    assert client.core.handle_timeout(3.0) == [PeerFellSilent(3.0)]
    assert client.core.handle_timeout(4.0) == []
    assert client.core.next_deadline() == 5.0
    assert client.core.handle_timeout(6.5) == [PeerFellSilent(6.5)]
    assert client.core.has_stream(2)


# ---------------------------------------------------------------- errors, extensions, the end


@pytest.mark.rule("RX-19")
@pytest.mark.rule("RX-104")
def test_rx19_rx104_metadata_push(by_hand: Any) -> None:
    """M is always set; with M clear, or on a stream other than 0, it is ignored."""
    server = by_hand("server")
    server.core.send_metadata_push(b"")
    assert b"".join(server.core.data_to_send(0.0)).hex() == "00000010" + "000d4000" + "00000000" + "00000004"
    assert server.gives_frame("METADATA_PUSH", 0, metadata=b"md") == [MetadataPushed(b"md")]
    assert server.gives_frame("METADATA_PUSH", 0, data=b"md") == []
    assert server.gives_frame("METADATA_PUSH", 2, metadata=b"md") == []


@pytest.mark.rule("RX-20")
def test_rx20_extensions(by_hand: Any) -> None:
    """A known extended type is handed on, an unknown one is dropped with I; there is no stream id."""
    server = by_hand("server", CoreConfig(extensions=frozenset({0x1234})))
    assert server.gives_frame("EXT", 0x1234, 0x4000, data=b"e") == [ExtensionReceived(0, 0x1234, b"e", True)]
    assert server.gives_frame("EXT", 0x1235, 0x8000, data=b"e") == []
    server.core.send_extension(0, 7, b"x")
    server.core.send_extension(0, 7, b"x", ignorable=False)
    assert [(frame.stream_id, frame.flags) for frame in server.sent()] == [(7, 0x8000), (7, 0)]
    with pytest.raises(LocalProtocolError, match="stream_id is"):
        server.core.send_extension(2, 7, b"x")


@pytest.mark.rule("RX-21")
def test_rx21_trailing_octets_are_ignored(by_hand: Any) -> None:
    """Behind the metadata of LEASE, CANCEL and METADATA_PUSH, and behind REQUEST_N."""
    server = by_hand("server")
    server.gives_frame("REQUEST_STREAM", 2, 0, 1)
    assert server.gives_frame("REQUEST_N", 2, 0, 3, data=b"x")[0].n == 3
    assert server.gives_frame("CANCEL", 2, metadata=b"m", data=b"x") == [StreamCancelled(2, b"m")]
    assert server.gives_frame("METADATA_PUSH", 0, metadata=b"m", data=b"x") == [MetadataPushed(b"m")]
    client = by_hand("client", LEASES)
    assert client.gives_frame("LEASE", 0, 0, 1000, 1, metadata=b"m", data=b"x")[1] == LeaseGranted(1.0, 1, b"m")


@pytest.mark.rule("RX-22")
def test_rx22_error_codes() -> None:
    """The table of section 3.1."""
    assert {code.name: code.value for code in ErrorCode} == {
        "INVALID_SETUP": 0x001,
        "UNSUPPORTED_SETUP": 0x002,
        "REJECTED_SETUP": 0x003,
        "CONNECTION_ERROR": 0x101,
        "APPLICATION_ERROR": 0x201,
        "REJECTED": 0x202,
        "CANCELED": 0x203,
        "INVALID": 0x204,
    }


@pytest.mark.rule("RX-23")
def test_rx23_error_data_is_text(by_hand: Any) -> None:
    """One trailing NUL is removed, bad UTF-8 is replaced, a control character is shown as an escape."""
    client = by_hand("client")
    (failed,) = client.gives(error(0x101, data=b"a\xffb\0\0"))
    assert failed == ConnectionEnded(EndReason.FAILED_BY_PEER, 0x101, "a\N{REPLACEMENT CHARACTER}b\\x00")


@pytest.mark.rule("RX-25")
@pytest.mark.rule("RX-26")
@pytest.mark.parametrize("code", [0x101, 0x102, 0x1FF, 0x201, 0x204, 0, 0x77777777, 0xFFFFFFFF])
def test_rx25_rx26_any_other_code_on_stream_0_ends_the_connection(by_hand: Any, code: int) -> None:
    """Unknown or stream code on stream 0 = CONNECTION_ERROR: requests fail, responders are cancelled."""
    client = by_hand("client")
    client.core.send_request_stream(HI, 1, 0.0)
    client.gives_frame("REQUEST_STREAM", 1, 0, 1)
    client.sent()
    assert client.gives(error(code, data=b"bye")) == [
        StreamFailed(2, code or 0x101, b"bye", FailedBy.CONNECTION),
        StreamCancelled(1),
        ConnectionEnded(EndReason.FAILED_BY_PEER, code, "bye"),
    ]
    assert client.sent() == []


@pytest.mark.rule("RX-60")
def test_rx60_carrier_gone(by_hand: Any) -> None:
    """Requests fail, those that wait for a lease too, responders are cancelled; no state outlives a connection."""
    client = by_hand("client", LEASES)
    client.gives_frame("LEASE", 0, 0, 1000, 1)
    client.core.send_request_response(HI, 0.0)
    client.core.send_request_response(HI, 0.0)
    client.gives_frame("REQUEST_RESPONSE", 1)
    client.gives("0000")
    assert client.core.receive_data(b"", 1.0) == [
        StreamFailed(2, 0x101, b"the peer ended the carrier", FailedBy.CONNECTION),
        StreamCancelled(1),
        StreamFailed(4, 0x101, b"the peer ended the carrier", FailedBy.CONNECTION),
        ConnectionEnded(EndReason.LOST, 0, "the peer ended the carrier"),
    ]
    held = client.core.statistics()
    assert (held.streams, held.requests_waiting, held.bytes_unread) == (0, 0, 0)
    calls: list[Callable[[], object]] = [
        lambda: client.core.resume(framed=False, now=0.0),
        lambda: client.core.resume_on(client.core, 0.0),
    ]
    for resume in calls:
        with pytest.raises(LocalProtocolError, match="no resumption"):
            resume()


@pytest.mark.rule("RX-60")
def test_rx60_no_transition_of_resumption() -> None:
    """The table of connection states has no state of resumption, and none for an end that is told: there is no frame for it."""
    states = {state for state, _ in CONNECTION} | set(CONNECTION.values())
    assert states == set(ConnectionState) - {
        ConnectionState.SUSPENDED,
        ConnectionState.RESUMING,
        ConnectionState.HANDED_OVER,
        ConnectionState.CLOSING,
    }


@pytest.mark.rule("RX-105")
def test_rx105_a_second_setup_is_ignored(by_hand: Any) -> None:
    """Server: SETUP after an accepted SETUP, in whatever form."""
    server = by_hand("server")
    assert server.gives(setup_frame(), setup_frame(version=7), "0000000c 0001 0000 00000000") == []
    assert server.sent() == []


@pytest.mark.rule("RX-106")
@pytest.mark.rule("RX-107")
@pytest.mark.parametrize("role", ["client", "server"])
def test_rx106_rx107_late_setup_errors_are_ignored(by_hand: Any, role: str) -> None:
    """Server: SETUP_ERROR; client: SETUP_ERROR after establishment."""
    side = by_hand(role)
    side.gives_frame("REQUEST_FNF", 1 if role == "client" else 2)
    assert side.gives(error(0x001), error(0x002), error(0x003)) == []
    assert side.core.state is ConnectionState.OPEN


@pytest.mark.rule("RX-108")
def test_rx108_setup_at_a_client_is_ignored(by_hand: Any) -> None:
    """Client: SETUP."""
    client = by_hand("client")
    assert client.gives(setup_frame()) == []
    assert client.core.state is ConnectionState.OPENING


@pytest.mark.rule("RX-109")
def test_rx109_lease_and_keepalive_on_a_stream_are_ignored(by_hand: Any) -> None:
    """LEASE, KEEPALIVE on a stream other than 0."""
    client = by_hand("client", LEASES)
    assert client.gives_frame("LEASE", 2, 0, 1000, 1) == []
    assert client.gives_frame("KEEPALIVE", 2, 0x2000) == []
    assert client.sent() == []


def test_drain_ends_with_the_last_stream(by_hand: Any) -> None:
    """Nothing announces a drain in this dialect; requests are rejected, and the last stream's end is the connection's."""
    server = by_hand("server", CoreConfig(drain_timeout=5))
    server.gives_frame("REQUEST_RESPONSE", 2)
    assert server.core.drain(1.0) == []
    assert server.core.drain(2.0) == []
    assert server.sent() == []
    assert server.gives(Frame(FrameType.REQUEST_RESPONSE, 4), Frame(FrameType.REQUEST_FNF, 6)) == []
    assert [(frame.stream_id, frame.numbers) for frame in server.sent()] == [(4, (0x202,))]
    with pytest.raises(LocalProtocolError, match="no requests while the connection is draining"):
        server.core.send_request_response(HI, 2.0)
    server.core.send_payload(2, HI)
    assert server.core.next_deadline() == -math.inf
    assert ended(server.core.handle_timeout(2.0)) == (EndReason.CLOSED, 0, "")
    assert [frame.kind for frame in server.sent()] == [FrameType.RESPONSE]


def test_drain_in_every_other_state(by_hand: Any) -> None:
    waiting = by_hand("client", LEASES)
    waiting.core.send_request_response(HI, 0.0)
    assert waiting.core.drain(0.0) == [
        StreamFailed(2, 0x202, b"the connection is draining", FailedBy.LOCAL),
        ConnectionEnded(EndReason.CLOSED, 0, "the connection has drained: every stream has ended"),
    ]
    slow = by_hand("server", CoreConfig(drain_timeout=2))
    slow.gives_frame("REQUEST_RESPONSE", 2)
    slow.core.drain(0.0)
    assert slow.core.next_deadline() == 2.0
    assert slow.core.handle_timeout(2.0)[0] == StreamCancelled(2)
    last = by_hand("server")
    last.gives_frame("REQUEST_RESPONSE", 2)
    last.core.drain(0.0)
    assert ended(last.gives_frame("CANCEL", 2)) == (EndReason.CLOSED, 0, "")
    listening = by_hand("listening")
    assert ended(listening.core.drain(0.0)) == (EndReason.CLOSED, 0, "")
    assert listening.sent() == []
    deciding = by_hand("listening")
    deciding.gives(setup_frame())
    assert ended(deciding.core.drain(0.0)) == (EndReason.REFUSED, 0x003, "")
    assert deciding.sent() == [error(0x003)]


def test_what_fits_no_frame_is_refused_here(by_hand: Any) -> None:
    with pytest.raises(ConfigurationError, match="SETUP of 174 bytes"):
        by_hand("client", CoreConfig(max_frame_size=170, setup_payload=Payload(bytes(100))))
    server = by_hand("server", CoreConfig(max_frame_size=100))
    calls: list[Callable[[], object]] = [
        lambda: server.core.send_metadata_push(bytes(77)),
        lambda: server.core.send_keepalive(bytes(77)),
        lambda: server.core.send_extension(0, 1, bytes(77)),
    ]
    for send in calls:
        with pytest.raises(LocalProtocolError, match="77 bytes do not fit into a frame"):
            send()
    server.core.send_metadata_push(bytes(76))
    assert len(b"".join(server.core.data_to_send(0.0))) == 92
