"""Frames of a WebSocket: our short path and wsproto's long one say and mean the same; what is wrong is refused by its header."""

from __future__ import annotations

import os
import struct
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wsproto.connection import Connection, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, TextMessage
from wsproto.events import Ping as WsprotoPing
from wsproto.events import Pong as WsprotoPong

from levada.transports.carriers.websocket_frames import (
    CloseReceived,
    Control,
    Ping,
    Pong,
    WebSocketCore,
    WebSocketFrameError,
    encode_binary,
    mask,
)

KEY = b"\x37\xfa\x21\x3d"
SIZES = st.one_of(st.integers(0, 300), st.sampled_from([125, 126, 127, 1023, 1024, 65_535, 65_536, 70_001]))
PAYLOADS = st.builds(lambda size, seed: (bytes(range(seed, 256)) * (size // 64 + 2))[:size], SIZES, st.integers(0, 200))


def core(*, client: bool, max_message: int = 1 << 20, accept_text: bool = False) -> WebSocketCore:
    return WebSocketCore(client=client, max_message=max_message, random=lambda n: KEY[:n], accept_text=accept_text)


def far_end(*, of_client: bool) -> Connection:
    """The peer of a core: wsproto alone."""
    return Connection(ConnectionType.SERVER if of_client else ConnectionType.CLIENT)


def feed(end: WebSocketCore, octets: bytes, cuts: list[int] | None = None) -> list[Control]:
    edges = [0, *sorted(set(cuts or [])), len(octets)]
    return [control for a, b in pairwise(edges) for control in end.receive_data(octets[a:b])]


def frame(first: int, payload: bytes, *, masked: bool, length: int | None = None) -> bytes:
    """One frame by the book (RFC 6455, 5.2), with any first octet and any claimed length."""
    size = len(payload) if length is None else length
    bit = 0x80 if masked else 0
    if size < 126:
        header = bytes((first, bit | size))
    elif size < 1 << 16:
        header = struct.pack(">BBH", first, bit | 126, size)
    else:
        header = struct.pack(">BBQ", first, bit | 127, size)
    return header + (KEY + mask(payload, KEY) if masked else payload)


def test_every_frame_of_a_client_has_a_mask_of_its_own_random_bytes() -> None:
    end = core(client=True)
    frames = {
        0x82: end.message(bytes(2_000)),
        0x89: end.ping(b"there?"),
        0x8A: end.pong(b"here"),
        0x88: end.close(1000, "enough"),
    }
    for first, payload in ((0x89, b"there?"), (0x8A, b"here"), (0x88, b"\x03\xe8enough"), (0x82, bytes(2_000))):
        assert frames[first] == frame(first, payload, masked=True)
    assert core(client=True).close(1005) == frame(0x88, b"", masked=True)


# ---------------------------------------------------------------- golden vectors: RFC 6455, 5.7


def test_masking_example_of_the_rfc() -> None:
    assert mask(b"Hello", KEY) == bytes.fromhex("7f9f4d5158")
    assert mask(mask(b"Hello", KEY), KEY) == b"Hello"


@pytest.mark.parametrize(
    ("octets", "accept_text", "expected", "controls"),
    [
        ("810548656c6c6f", True, [b"Hello"], []),  # a single-frame unmasked text message
        ("010348656c80026c6f", True, [b"Hello"], []),  # the same in two frames
        ("890548656c6c6f", False, [], [Ping(b"Hello")]),
        ("827e0100" + "ab" * 256, False, [b"\xab" * 256], []),
        ("827f0000000000010000" + "cd" * 65536, False, [b"\xcd" * 65536], []),
    ],
)
def test_examples_of_the_rfc(octets: str, accept_text: bool, expected: list[bytes], controls: list[Control]) -> None:
    for cut in (1, 2, 3, 5, 9):
        end = core(client=True, accept_text=accept_text)
        assert feed(end, bytes.fromhex(octets), [cut]) == controls
        assert list(end.messages) == expected


def test_masked_pong_of_the_rfc() -> None:
    assert feed(core(client=False), bytes.fromhex("8a8537fa213d7f9f4d5158")) == [Pong(b"Hello")]


# ---------------------------------------------------------------- our path and wsproto's


@given(payload=PAYLOADS, key=st.binary(min_size=4, max_size=4), client=st.booleans())
def test_both_paths_give_the_same_octets(payload: bytes, key: bytes, client: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "urandom", lambda n: key[:n])
        theirs = Connection(ConnectionType.CLIENT if client else ConnectionType.SERVER).send(BytesMessage(data=payload))
        ours = WebSocketCore(client=client, max_message=125, random=lambda n: key[:n]).message(payload)
    assert ours == theirs
    assert encode_binary(payload, key if client else None) == theirs


@given(data=st.binary(max_size=2100), key=st.binary(min_size=4, max_size=4))
def test_both_masks_are_the_same(data: bytes, key: bytes) -> None:
    expected = bytes(octet ^ key[i % 4] for i, octet in enumerate(data))
    assert mask(data, key) == mask(bytearray(data), key) == mask(memoryview(data), key) == expected


ITEMS = st.one_of(
    st.tuples(st.just("plain"), PAYLOADS),
    st.tuples(st.just("fragments"), st.lists(st.binary(max_size=40), min_size=2, max_size=4)),
    st.tuples(st.just("text"), st.text(max_size=30)),
    st.tuples(st.just("ping"), st.binary(max_size=125)),
    st.tuples(st.just("pong"), st.binary(max_size=125)),
    st.tuples(
        st.just("split by ping"), st.tuples(st.binary(max_size=40), st.binary(max_size=10), st.binary(max_size=40))
    ),
)


@given(items=st.lists(ITEMS, max_size=8), client=st.booleans(), data=st.data())
def test_any_traffic_cut_anywhere_means_the_same_as_to_wsproto(
    items: list[tuple[str, object]], client: bool, data: st.DataObject
) -> None:
    """What wsproto alone writes and reads, a core reads as the same messages and control frames, wherever the stream is cut."""
    peer = far_end(of_client=client)
    octets = b""
    messages: list[bytes] = []
    controls: list[Control] = []
    for kind, value in items:
        match kind, value:
            case "plain", bytes(payload):
                octets += peer.send(BytesMessage(data=payload))
                messages.append(payload)
            case "fragments", list(parts):
                for i, part in enumerate(parts):
                    octets += peer.send(BytesMessage(data=part, message_finished=i == len(parts) - 1))
                messages.append(b"".join(parts))
            case "text", str(text):
                octets += peer.send(TextMessage(data=text))
                messages.append(text.encode())
            case "ping", bytes(payload):
                octets += peer.send(WsprotoPing(payload))
                controls.append(Ping(payload))
            case "pong", bytes(payload):
                octets += peer.send(WsprotoPong(payload))
                controls.append(Pong(payload))
            case "split by ping", (bytes(before), bytes(ping), bytes(after)):
                octets += peer.send(BytesMessage(data=before, message_finished=False))
                octets += peer.send(WsprotoPing(ping))
                octets += peer.send(BytesMessage(data=after))
                messages.append(before + after)
                controls.append(Ping(ping))
            case _:
                raise AssertionError(kind)
    octets += peer.send(CloseConnection(4321, "bye"))
    controls.append(CloseReceived(4321, "bye"))
    cuts = data.draw(st.lists(st.integers(0, len(octets)), max_size=20), label="cuts")
    end = core(client=client, accept_text=True)
    assert feed(end, octets, cuts) == controls
    assert list(end.messages) == messages


@pytest.mark.parametrize("client", [True, False])
def test_every_cut_of_a_stream_and_octet_by_octet(client: bool) -> None:
    peer = far_end(of_client=client)
    wanted = [b"", b"a", b"b" * 125, b"c" * 126, b"", b"d" * 1100, b"e" * 30]
    octets = b"".join(peer.send(BytesMessage(data=payload)) for payload in wanted[:5])
    octets += peer.send(WsprotoPing(b"?")) + peer.send(BytesMessage(data=b"d" * 600, message_finished=False))
    octets += peer.send(BytesMessage(data=b"d" * 500)) + peer.send(BytesMessage(data=wanted[6]))
    octets += peer.send(CloseConnection(1000))
    for cuts in [[cut] for cut in range(len(octets))] + [list(range(len(octets)))]:
        end = core(client=client)
        assert feed(end, octets, cuts) == [Ping(b"?"), CloseReceived(1000, "")]
        assert list(end.messages) == wanted


@given(payloads=st.lists(PAYLOADS, max_size=6), client=st.booleans())
def test_wsproto_reads_what_a_core_writes(payloads: list[bytes], client: bool) -> None:
    end, peer = core(client=client), far_end(of_client=client)
    octets = (
        b"".join(end.message(payload) for payload in payloads)
        + end.ping(b"p")
        + end.pong(b"q")
        + end.close(1001, "ü" * 100)
    )
    peer.receive_data(octets)
    got: list[bytes] = []
    for event in peer.events():
        match event:
            case BytesMessage():
                got.append(bytes(event.data))
                assert event.message_finished
            case WsprotoPing():
                assert event.payload == b"p"
            case WsprotoPong():
                assert event.payload == b"q"
            case CloseConnection():
                assert (event.code, event.reason) == (1001, "ü" * 61)  # 123 octets hold 61 of them
            case _:
                raise AssertionError(event)
    assert got == payloads
    assert not end.may_send
    assert (end.ping(), end.pong(b""), end.close(1000)) == (b"", b"", b"")


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
@pytest.mark.parametrize("client", [True, False])
@pytest.mark.parametrize("size", [0, 5, 200, 5000])
def test_any_kind_of_octets_may_be_sent(kind: type, client: bool, size: int) -> None:
    octets = core(client=client).message(kind(b"x" * size))
    assert type(octets) is bytes
    end = core(client=not client)
    assert feed(end, octets) == []
    assert list(end.messages) == [b"x" * size]
    assert type(end.messages[0]) is bytes


# ---------------------------------------------------------------- what is refused


def refused(end: WebSocketCore, octets: bytes) -> WebSocketFrameError:
    with pytest.raises(WebSocketFrameError) as caught:
        feed(end, octets)
    return caught.value


@pytest.mark.parametrize("client", [True, False])
@pytest.mark.parametrize(
    ("first", "payload", "words"),
    [
        (0x80, b"x", "unexpected CONTINUATION"),
        (0xC2, b"x", "Reserved bit"),  # as permessage-deflate would set it
        (0xA2, b"x", "Reserved bit"),
        (0x92, b"x", "Reserved bit"),
        (0x83, b"x", "Invalid opcode"),
        (0x8B, b"x", "Invalid opcode"),
        (0x09, b"x", "fragment control frame"),
        (0x08, b"", "fragment control frame"),
        (0x89, b"x" * 126, "Control frame with payload len > 125"),
        (0x88, b"x", "CLOSE with 1 byte payload"),
        (0x88, struct.pack(">H", 999), "invalid code"),
        (0x88, struct.pack(">H", 5000), "invalid code"),
        (0x88, struct.pack(">H", 1004), "unknown reserved code"),
        (0x88, struct.pack(">H", 1005), "local-only"),
        (0x88, struct.pack(">H", 1006), "local-only"),
        (0x88, struct.pack(">H", 1015), "local-only"),
        (0x88, struct.pack(">H", 2000), "unknown reserved code"),
    ],
)
def test_broken_frames_are_protocol_errors(client: bool, first: int, payload: bytes, words: str) -> None:
    end = core(client=client)
    before = encode_binary(b"kept", None if client else KEY)
    error = refused(end, before + frame(first, payload, masked=not client))
    assert (error.code, error.rule, error.offset) == (1002, "RFC 6455 5", len(before))
    assert words in error.detail
    assert list(end.messages) == [b"kept"]
    assert end.receive_data(before) == []  # nothing counts any more
    assert list(end.messages) == [b"kept"]


@pytest.mark.parametrize("client", [True, False])
def test_masking_of_the_wrong_side_is_refused(client: bool) -> None:
    """RFC 6455, 5.1: a client masks every frame, a server none."""
    error = refused(core(client=client), frame(0x82, b"hello", masked=client))
    assert error.code == 1002
    assert "masked frame" in error.detail


@pytest.mark.parametrize("header", ["827e007d", "827f000000000000ffff"])
def test_lengths_have_their_shortest_form(header: str) -> None:
    """RFC 6455, 5.2: the minimal number of octets encodes the length."""
    assert refused(core(client=True), bytes.fromhex(header)).code == 1002


def test_a_message_may_not_begin_inside_another() -> None:
    octets = frame(0x02, b"first", masked=False) + frame(0x82, b"second", masked=False)
    error = refused(core(client=True), octets)
    assert (error.code, error.offset) == (1002, 7)


def test_invalid_utf8_in_a_close_reason_is_refused() -> None:
    error = refused(core(client=True), frame(0x88, struct.pack(">H", 1000) + b"\xff\xfe", masked=False))
    assert error.code == 1007


def test_text_is_refused_unless_it_is_wanted() -> None:
    error = refused(core(client=True), frame(0x81, b"hello", masked=False))
    assert (error.code, error.rule) == (1003, "RFC 6455 5.6")


def test_invalid_utf8_in_a_text_message_is_refused() -> None:
    error = refused(core(client=True, accept_text=True), frame(0x81, b"\xc3\x28", masked=False))
    assert error.code == 1007


@pytest.mark.parametrize("first", [0x82, 0x02])
def test_a_large_message_is_refused_by_its_header(first: int) -> None:
    """The header alone ends it: no octet of the payload has come, none is kept."""
    end = core(client=True, max_message=1000)
    error = refused(end, frame(first, b"", masked=False, length=1001))
    assert (error.code, error.offset) == (1009, 0)
    assert error.detail == "message of 1001 bytes or more, at most 1000 (raise max_message)"
    error = refused(core(client=True, max_message=1000), frame(first, b"", masked=False, length=2**64 - 1))
    assert error.code == 1009
    end = core(client=True, max_message=1000)
    assert feed(end, frame(first, b"x" * 1000, masked=False)) == []


def test_the_sum_of_fragments_is_limited() -> None:
    end = core(client=True, max_message=1000)
    for _ in range(10):
        assert feed(end, frame(0x02 if end._plain else 0x00, b"x" * 100, masked=False)) == []
    error = refused(end, frame(0x00, b"", masked=False, length=1))
    assert (error.code, error.detail) == (1009, "message of 1001 bytes or more, at most 1000 (raise max_message)")


def test_after_a_refusal_the_close_frame_of_the_peer_is_still_found() -> None:
    """Where frames begin is still known when a message was too large or text: its payload is skipped, not kept."""
    big = frame(0x82, b"y" * 3000, masked=False)
    tail = (
        frame(0x82, b"more", masked=False)
        + frame(0x89, b"", masked=False)
        + frame(0x88, struct.pack(">H", 1009), masked=False)
    )
    for cut in (2, 4, 100, len(big), len(big) + 3):
        end = core(client=True, max_message=1000)
        octets = frame(0x82, b"kept", masked=False) + big + tail
        error = refused(end, octets[: 6 + max(cut, 4)])
        assert error.offset == 6
        assert end.may_send
        assert end.close(1009, "too large")
        assert [c for c in feed(end, octets[6 + max(cut, 4) :]) if isinstance(c, CloseReceived)] == [
            CloseReceived(1009, "")
        ]
        assert list(end.messages) == [b"kept"]


@pytest.mark.ci
@pytest.mark.parametrize("client", [True, False])
def test_discarding_finds_the_close_frame_behind_whatever_comes(client: bool) -> None:
    peer = far_end(of_client=client)
    octets = peer.send(BytesMessage(data=b"a" * 3000)) + peer.send(BytesMessage(data=b"b", message_finished=False))
    octets += (
        peer.send(BytesMessage(data=b"c" * 2000)) + peer.send(WsprotoPing(b"")) + peer.send(BytesMessage(data=b"d"))
    )
    octets += peer.send(CloseConnection(4000, "done"))
    for cut in range(len(octets)):
        end = core(client=client)
        before = feed(end, octets[:cut])
        end.discard()
        after = feed(end, octets[cut:])
        assert [c for c in before + after if isinstance(c, CloseReceived)] == [CloseReceived(4000, "done")]
        assert not end.messages


def outcome(end: WebSocketCore, octets: bytes, cuts: list[int] | None = None) -> int | None:
    """The code of the error, if it is one."""
    try:
        feed(end, octets, cuts)
    except WebSocketFrameError as error:
        return error.code
    return None


@given(st.binary(max_size=200), st.booleans(), st.lists(st.integers(0, 200), max_size=5))
def test_any_octets_give_messages_or_a_named_error(octets: bytes, client: bool, cuts: list[int]) -> None:
    end = core(client=client, max_message=125)
    if code := outcome(end, octets, [cut for cut in cuts if cut < len(octets)]):
        assert code in (1002, 1003, 1007, 1009)
        assert end.receive_data(b"\x88\x00" * 50) is not None
    assert all(len(message) <= 125 for message in end.messages)


@given(data=st.data())
def test_every_single_octet_change_gives_messages_or_a_named_error(data: st.DataObject) -> None:
    octets = bytearray(b"".join(frame(first, b"payload", masked=True) for first in (0x82, 0x02, 0x89, 0x80, 0x82)))
    at = data.draw(st.integers(0, len(octets) - 1))
    octets[at] ^= data.draw(st.integers(1, 255))
    assert outcome(core(client=False), bytes(octets)) in (None, 1002, 1003, 1009)


def test_close_without_a_code_counts_as_1005() -> None:
    """RFC 6455, 7.1.5, and no code goes back either."""
    end = core(client=False)
    assert feed(end, frame(0x88, b"", masked=True)) == [CloseReceived(1005, "")]
    assert not end.may_send
    assert end.close(1005) == b"\x88\x00"
    assert end.close(1005) == b""


@pytest.mark.parametrize("client", [True, False])
def test_a_view_of_wide_items_is_sent_by_its_octets(client: bool) -> None:
    octets = bytes(range(200)) * 8
    for view in (memoryview(octets).cast("Q"), memoryview(octets)[::2]):
        sender = WebSocketCore(client=client, max_message=1 << 20, random=lambda n: b"mask"[:n])
        receiver = WebSocketCore(client=not client, max_message=1 << 20, random=lambda n: b"mask"[:n])
        assert receiver.receive_data(sender.message(view)) == []
        assert list(receiver.messages) == [view.tobytes()]
