"""Octets of ints, header data, ranges and frames, against vectors that other programs can read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from levada.framework.errors import RemoteProtocolError
from levada.transports.aqueduct import Incomplete, LimitExceeded, decode_frame
from levada.transports.aqueduct.frames import (
    LARGEST,
    VERSION,
    AckNackUnreliable,
    AckReliable,
    ChannelControl,
    ClosedChannelLost,
    CloseReceiver,
    ConnectionControl,
    FinishSender,
    Frame,
    FrameType,
    Message,
    SentUnreliable,
    Version,
    decode_int,
    encode_int,
    split_runs,
)

VECTORS: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "vectors.json").read_text("utf-8"))
KINDS = {kind.__name__: kind for kind in Frame.__args__}


def frame_of(vector: dict[str, Any]) -> Frame:
    """Build the frame that a vector describes."""
    kind = KINDS[vector["frame"]]
    fields = {}
    for field in attrs.fields(kind):
        value = vector[field.name]
        match field.name:
            case "payload":
                value = bytes.fromhex(value)
            case "headers":
                value = tuple((key, bytes.fromhex(octets)) for key, octets in value)
            case "attachments" | "runs":
                value = tuple(value)
        fields[field.name] = value
    frame: Frame = kind(**fields)
    return frame


FRAMES = [(bytes.fromhex(vector["hex"]), frame_of(vector)) for vector in VECTORS["frames"]]
ids = st.integers(0, LARGEST)
runs = st.lists(st.integers(1, 2**40), max_size=6).map(tuple)
frames = st.one_of(
    st.just(Version()),
    st.builds(
        ConnectionControl,
        st.lists(
            st.tuples(st.text(st.characters(max_codepoint=127), min_size=1, max_size=9), st.binary(max_size=9)),
            max_size=3,
        ).map(tuple),
    ),
    st.builds(ChannelControl, ids),
    st.builds(Message, ids, ids, st.lists(ids, max_size=4).map(tuple), st.binary(max_size=300)),
    st.builds(SentUnreliable, ids),
    st.builds(AckReliable, runs),
    st.builds(AckNackUnreliable, runs),
    st.builds(FinishSender, ids),
    st.builds(CloseReceiver, runs),
    st.builds(ClosedChannelLost, ids),
)


@pytest.mark.rule("AQ-1")
def test_aq1_ints_are_little_endian() -> None:
    """The least significant group comes first."""
    assert encode_int(1 | 2 << 7 | 3 << 14) == bytes((0x81, 0x82, 0x03))


@pytest.mark.rule("AQ-2")
@pytest.mark.parametrize("vector", VECTORS["ints"], ids=lambda v: v["hex"])
def test_aq2_ints(vector: dict[str, Any]) -> None:
    """A var-len int has one form, the shortest, and is below 2^64."""
    octets, value = bytes.fromhex(vector["hex"]), int(vector["value"])
    assert encode_int(value) == octets
    assert decode_int(octets + b"\xff", 0) == (value, len(octets))
    assert decode_int(memoryview(b"x" + octets), 1) == (value, len(octets) + 1)


@pytest.mark.rule("E-1")
@pytest.mark.parametrize("vector", VECTORS["bad_ints"], ids=lambda v: v["hex"])
def test_e1_ints_that_are_not_minimal_or_too_large(vector: dict[str, Any]) -> None:
    """An int with an octet too many, or over 64 bits, is a protocol error."""
    with pytest.raises(RemoteProtocolError) as caught:
        decode_int(bytes.fromhex(vector["hex"]), 0)
    assert caught.value.rule == "E-1"


@pytest.mark.rule("AQ-2")
@pytest.mark.parametrize("octets", VECTORS["cut_ints"])
def test_aq2_a_cut_int_wants_more(octets: str) -> None:
    """A continuation bit on the last octet means that another is to come."""
    with pytest.raises(IndexError):
        decode_int(bytes.fromhex(octets), 0)


@pytest.mark.rule("AQ-8", "AQ-9")
@pytest.mark.parametrize(
    ("octets", "frame"), FRAMES, ids=lambda v: v.hex()[:24] if isinstance(v, bytes) else type(v).__name__
)
def test_aq8_frames(octets: bytes, frame: Frame) -> None:
    """Each frame has exactly these octets, both ways."""
    assert frame.encode() == octets
    assert decode_frame(octets + b"\xff") == (frame, len(octets))
    assert decode_frame(memoryview(b"xy" + octets), 2) == (frame, len(octets) + 2)


@pytest.mark.rule("AQ-8")
def test_aq8_every_type_has_a_vector() -> None:
    """Ten frame types."""
    assert {octets[0] for octets, _ in FRAMES} == {kind.value for kind in FrameType}
    assert len(FrameType) == len(KINDS) == 10
    assert len(VERSION) == 28


def decoded(octets: bytes) -> Any:
    """What octets are: those of a frame, none of an incomplete one, or the rule that they break."""
    try:
        frame, end = decode_frame(octets)
    except Incomplete:
        return b""
    except RemoteProtocolError as error:
        return error.rule
    return frame.encode() if end <= len(octets) else None


@pytest.mark.rule("E-2", "E-3", "E-4", "E-6", "E-7", "AQ-4", "AQ-5", "AQ-9")
@pytest.mark.parametrize("vector", VECTORS["bad_frames"], ids=lambda v: f"{v['rule']}-{v['why']}")
def test_e2_e3_e4_e6_e7_malformed_frames(vector: dict[str, Any]) -> None:
    """Each malformed frame is refused, by the rule that it breaks."""
    with pytest.raises(RemoteProtocolError) as caught:
        decode_frame(bytes.fromhex(vector["hex"]))
    assert caught.value.rule == vector["rule"]


@pytest.mark.rule("AQ-11")
@pytest.mark.parametrize(
    ("octets", "frame"), FRAMES, ids=lambda v: v.hex()[:24] if isinstance(v, bytes) else type(v).__name__
)
def test_aq11_every_cut_wants_more_and_says_no_more_than_is_needed(octets: bytes, frame: Frame) -> None:
    """A frame cut anywhere is incomplete, and the number of octets asked for never passes its end."""
    for cut in range(len(octets)):
        with pytest.raises(Incomplete) as caught:
            decode_frame(octets[:cut])
        assert cut < caught.value.need <= len(octets)


@pytest.mark.rule("I-12")
@pytest.mark.parametrize(
    ("octets", "frame"), FRAMES, ids=lambda v: v.hex()[:24] if isinstance(v, bytes) else type(v).__name__
)
def test_i12_every_changed_octet_gives_a_frame_or_a_named_error(octets: bytes, frame: Frame) -> None:
    """Whatever one octet becomes: another frame, a wish for more, or a rule that is broken."""
    for at in range(min(len(octets), 40)):
        for value in range(256):
            changed = octets[:at] + bytes((value,)) + octets[at + 1 :]
            outcome = decoded(changed)
            assert outcome in ("AQ-3", "E-1", "E-2", "E-3", "E-4", "E-6", "E-7") or changed.startswith(outcome)


@pytest.mark.rule("AQ-3")
@pytest.mark.parametrize(
    "octets",
    [
        b"\x01" + encode_int(2**16 + 1),
        b"\x05" + encode_int(2**40),
        b"\x03\x00\x00" + encode_int(2**24 + 1),
        b"\x03\x00\x00\x00" + encode_int(2**24 + 1),
        b"\x03\x00\x00\x00" + encode_int(LARGEST),
    ],
)
def test_aq3_lengths_are_checked_before_anything_is_kept(octets: bytes) -> None:
    """A length over the limit is refused as soon as it is known."""
    with pytest.raises(LimitExceeded) as caught:
        decode_frame(octets)
    assert caught.value.rule == "AQ-3"


@pytest.mark.rule("AQ-4")
def test_aq4_headers_keep_order_and_repetition() -> None:
    """Header data is a multimap in order; a value may be empty."""
    headers = (("b", b"2"), ("a", b""), ("b", b"1"))
    assert decode_frame(ConnectionControl(headers).encode())[0] == ConnectionControl(headers)


@pytest.mark.rule("AQ-5")
@given(st.sets(st.integers(0, 40)), st.integers(0, 5))
def test_aq5_runs_say_which_numbers(numbers: set[int], start: int) -> None:
    """Runs alternate from the start, positive first, and none but the first is empty."""
    wanted = sorted(n for n in numbers if n >= start)
    lengths = split_runs(wanted, start)
    got: list[int] = []
    at = start
    for index, run in enumerate(lengths):
        assert run or (index == 0 and len(lengths) > 1)
        if index % 2 == 0:
            got += range(at, at + run)
        at += run
    assert got == wanted
    assert decode_frame(AckReliable(tuple(lengths)).encode())[0] == AckReliable(tuple(lengths))


@pytest.mark.rule("AQ-8")
@given(frames, st.binary(max_size=3))
def test_aq8_generated_frames_come_back(frame: Frame, rest: bytes) -> None:
    """Encoding and decoding are each other's inverse, whatever follows."""
    octets = frame.encode()
    assert decode_frame(octets + rest) == (frame, len(octets))


@given(st.binary(max_size=40))
def test_any_octets_give_a_frame_or_a_named_error(octets: bytes) -> None:
    try:
        frame, end = decode_frame(octets)
    except (Incomplete, RemoteProtocolError):
        return
    assert frame.encode() == octets[:end]
