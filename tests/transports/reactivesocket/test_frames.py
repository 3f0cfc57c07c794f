"""ReactiveSocket frames: vectors, cuts, changed octets, round trips."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from levada.framework.errors import DecodeError
from levada.transports.reactivesocket.frames import Frame, FrameError, FrameType

VECTORS = json.loads((Path(__file__).parent / "data" / "frame_vectors.json").read_text(encoding="utf-8"))


def named(vector: dict[str, Any]) -> str:
    return str(vector["id"])


def frame_of(vector: dict[str, Any]) -> Frame:
    metadata, mime_types = vector.get("metadata"), vector.get("mime_types")
    return Frame(
        FrameType[vector["kind"]],
        vector["stream"],
        vector["flags"],
        tuple(vector.get("numbers", ())),
        None if mime_types is None else (mime_types[0], mime_types[1]),
        None if metadata is None else metadata.encode(),
        vector.get("data", "").encode(),
    )


def read_or_refuse(octets: bytes) -> None:
    """Any octets are a frame, which is then written and read the same, or a DecodeError."""
    for framed in (False, True):
        try:
            frame = Frame.decode(octets, framed=framed)
        except DecodeError:
            continue
        assert Frame.decode(frame.encode(framed=framed), framed=framed) == frame


@pytest.mark.rule("RX-3")
@pytest.mark.rule("RX-10")
@pytest.mark.rule("RX-11")
@pytest.mark.parametrize("vector", VECTORS["valid"], ids=named)
def test_rx3_rx10_rx11_vectors_both_ways(vector: dict[str, Any]) -> None:
    """Frame length and metadata length count themselves, the latter also where only metadata follows."""
    octets = bytes.fromhex(vector["hex"])
    frame = frame_of(vector)
    assert frame.encode() == octets
    assert Frame.decode(octets) == frame
    assert int.from_bytes(octets[:4], "big") == len(octets)


@pytest.mark.rule("RX-2")
@pytest.mark.rule("RX-5")
@pytest.mark.parametrize("vector", VECTORS["valid"], ids=named)
def test_rx2_rx5_messages_have_no_length_field(vector: dict[str, Any]) -> None:
    """On WebSocket the first four octets are left out."""
    octets = bytes.fromhex(vector["hex"])[4:]
    frame = frame_of(vector)
    assert frame.encode(framed=True) == octets
    assert Frame.decode(octets, framed=True) == frame


@pytest.mark.rule("RX-4")
@pytest.mark.rule("RX-9")
@pytest.mark.rule("RX-12")
@pytest.mark.parametrize("vector", VECTORS["invalid"], ids=named)
def test_rx4_rx9_rx12_wrong_octets_name_their_rule(vector: dict[str, Any]) -> None:
    """A wrong length, a frame not understood and a metadata length that cannot be are three different things."""
    with pytest.raises(FrameError) as refused:
        Frame.decode(bytes.fromhex(vector["hex"]))
    assert refused.value.rule == vector["rule"]


@pytest.mark.rule("RX-13")
def test_rx13_empty_metadata_is_not_none() -> None:
    """Empty metadata and none are told apart."""
    empty = Frame(FrameType.RESPONSE, 2, metadata=b"")
    none = Frame(FrameType.RESPONSE, 2)
    assert empty.encode().hex() == "00000010" + "000b4000" + "00000002" + "00000004"
    assert none.encode().hex() == "0000000c" + "000b0000" + "00000002"
    assert Frame.decode(empty.encode()).metadata == b""
    assert Frame.decode(none.encode()).metadata is None


@pytest.mark.rule("RX-15")
def test_rx15_any_32_bit_id() -> None:
    """The stream id has 32 bits, of which none is reserved."""
    assert Frame.decode(bytes.fromhex("0000000c 000a 0000 ffffffff")).stream_id == 2**32 - 1


@pytest.mark.rule("RX-18")
def test_rx18_m_means_nothing_on_keepalive_and_request_n() -> None:
    """M on KEEPALIVE and REQUEST_N is never set and ignored on reception."""
    assert Frame.decode(bytes.fromhex("00000010 0003 6000 00000000 70696e67")).data == b"ping"
    assert Frame.decode(bytes.fromhex("00000010 0009 4000 00000004 00000005")).numbers == (5,)


@pytest.mark.rule("RX-20")
def test_rx20_extended_type_in_the_place_of_the_stream_id() -> None:
    """EXT has type, flags and a 32-bit extended type where others have the stream id; M is not interpreted."""
    frame = Frame.decode(bytes.fromhex("00000010 ffff c000 00001234 00000001"))
    assert (frame.kind, frame.stream_id, frame.flags, frame.data) == (FrameType.EXT, 0x1234, 0xC000, b"\0\0\0\x01")
    assert frame.encode() == bytes.fromhex("00000010 ffff c000 00001234 00000001")


@pytest.mark.rule("RX-21")
def test_rx21_trailing_octets_are_no_error() -> None:
    """Octets behind REQUEST_N and behind the metadata of LEASE, CANCEL, METADATA_PUSH are ignored."""
    assert Frame.decode(bytes.fromhex("00000011 0009 0000 00000004 00000005 ff")).numbers == (5,)
    assert Frame.decode(bytes.fromhex("00000012 000a 4000 00000002 00000005 6d ff")).metadata == b"m"


@pytest.mark.rule("RX-32")
def test_rx32_a_nul_behind_a_mime_type_does_not_count() -> None:
    """A trailing NUL is removed on reception, never sent."""
    octets = bytes.fromhex("0000001e 0001 0000 00000000 00000000 00000000 00000000 02 6100 02 6200")
    frame = Frame.decode(octets)
    assert frame.mime_types == ("a", "b")
    assert frame.encode().hex().endswith("01610162")


def test_frames_say_what_they_are() -> None:
    frame = Frame(FrameType.SETUP, 0, 0x2000, (0, 1, 2), ("a", "b"), b"", b"x")
    assert repr(frame) == (
        "Frame(SETUP, stream 0, flags 0x2000, numbers=(0, 1, 2), mime_types=('a', 'b'), metadata=b'', data=b'x')"
    )


@pytest.mark.parametrize("vector", VECTORS["valid"], ids=named)
def test_every_cut_is_refused(vector: dict[str, Any]) -> None:
    octets = bytes.fromhex(vector["hex"])
    for cut in range(len(octets)):
        with pytest.raises(FrameError):
            Frame.decode(octets[:cut])
        read_or_refuse(octets[:cut])


@pytest.mark.ci
@pytest.mark.parametrize("vector", VECTORS["valid"], ids=named)
def test_every_changed_octet_is_read_or_refused(vector: dict[str, Any]) -> None:
    octets = bytes.fromhex(vector["hex"])
    for at in range(len(octets)):
        for octet in range(256):
            changed = octets[:at] + bytes((octet,)) + octets[at + 1 :]
            read_or_refuse(changed)
            read_or_refuse(changed[4:])


NUMBERS = {"REQUEST_STREAM": 1, "REQUEST_SUB": 1, "REQUEST_N": 1, "ERROR": 1, "LEASE": 2}
u32 = st.integers(0, 2**32 - 1)
mime_types = st.text(st.characters(min_codepoint=1, max_codepoint=255), max_size=40)


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    kind = draw(st.sampled_from(FrameType))
    flags = draw(st.integers(0, 2**16 - 1)) & ~0x4800
    numbers = tuple(draw(u32) for _ in range(NUMBERS.get(kind.name, 0)))
    metadata, mimes = draw(st.none() | st.binary(max_size=30)), None
    if kind is FrameType.SETUP:
        numbers, mimes = (draw(u32), draw(u32), draw(u32)), (draw(mime_types), draw(mime_types))
    elif kind is FrameType.REQUEST_CHANNEL and draw(st.booleans()):
        numbers, flags = (draw(u32),), flags | 0x0800
    elif kind in (FrameType.KEEPALIVE, FrameType.REQUEST_N, FrameType.EXT):
        metadata = None
    return Frame(kind, draw(u32), flags, numbers, mimes, metadata, draw(st.binary(max_size=30)))


@given(frames(), st.booleans())
def test_round_trip(frame: Frame, framed: bool) -> None:
    octets = frame.encode(framed=framed)
    assert Frame.decode(octets, framed=framed) == frame
    assert Frame.decode(octets, framed=framed).encode(framed=framed) == octets


@given(st.binary(max_size=60))
def test_any_octets_are_read_or_refused(data: bytes) -> None:
    read_or_refuse(data)
    read_or_refuse((len(data) + 4).to_bytes(4, "big") + data)


@pytest.mark.rule("RX-9")
def test_rx9_errors_say_what_is_wrong() -> None:
    """Known types too short for their fields are not understood."""
    text = re.escape("REQUEST_N of 3 bytes behind the header, 4 wanted")
    with pytest.raises(FrameError, match=text):
        Frame.decode(bytes.fromhex("0000000f 0009 0000 00000002 000000"))
