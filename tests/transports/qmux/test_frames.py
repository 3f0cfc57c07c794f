"""Integers, frames and parameters, by the vectors and as round trips."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from levada.transports.qmux import Parameters
from levada.transports.qmux.codes import ConnectionFault, TransportError
from levada.transports.qmux.frames import (
    LARGEST,
    PARAMETERS_PREFIX,
    Frame,
    FrameType,
    encode_close,
    encode_frame,
    encode_int,
    read_frame,
    read_int,
)

from .conftest import VECTORS, Wire

ALL = Parameters(
    max_idle_timeout_ms=30_000,
    max_data=1 << 20,
    max_stream_data_bidi_local=1 << 18,
    max_stream_data_bidi_remote=1 << 18,
    max_stream_data_uni=1 << 18,
    max_streams_bidi=100,
    max_streams_uni=100,
    max_datagram_frame_size=16_382,
    max_record_size=16_382,
    reset_stream_at=True,
)


def all_frames(data: bytes) -> list[Frame]:
    frames, at = [], 0
    while at < len(data):
        frame, at = read_frame(data, at, len(data))
        frames.append(frame)
    return frames


@pytest.mark.rule("QX-1")
@pytest.mark.parametrize(("number", "octets"), VECTORS["integers"].items())
def test_qx1_integers_of_the_vectors(number: str, octets: str) -> None:
    """The top two bits give the length; the shortest form is written."""
    data = bytes.fromhex(octets)
    assert encode_int(int(number)) == data
    assert read_int(data, 0, len(data)) == (int(number), len(data))


@pytest.mark.rule("QX-1")
def test_qx1_any_length_is_read() -> None:
    """Eight octets for 5 are legal."""
    assert read_int(bytes.fromhex("c000000000000005"), 0, 8) == (5, 8)


@pytest.mark.rule("QX-1")
@given(number=st.integers(0, LARGEST))
def test_qx1_integers_come_back(number: int) -> None:
    octets = encode_int(number)
    assert read_int(octets, 0, len(octets)) == (number, len(octets))


@pytest.mark.rule("QX-7", "D-6")
@pytest.mark.parametrize(("name", "octets", "size", "expected"), VECTORS["frames"])
def test_qx7_frames_of_the_vectors(name: str, octets: str, size: str, expected: list[list[object]]) -> None:
    """Each type has its fields in order."""
    data = bytes.fromhex(octets)
    assert encode_int(len(data)).hex() == size
    frames = [Frame(int(str(kind), 16), tuple(fields), bytes.fromhex(str(text))) for kind, fields, text in expected]  # type: ignore[arg-type]
    assert all_frames(data) == frames
    written = b"".join(
        encode_frame(
            f.kind,
            *f.fields,
            data=None if not f.data and f.kind & ~7 != 8 and f.kind not in (0x1C, FrameType.PARAMETERS) else f.data,
        )
        for f in frames
    )
    assert written == data or name in ("stream without length", "datagram")


@pytest.mark.rule("QX-4")
@pytest.mark.parametrize(("name", "octets", "size", "expected"), VECTORS["frames"])
def test_qx4_every_cut_of_a_frame_is_an_error(name: str, octets: str, size: str, expected: list[object]) -> None:
    """A frame lies in one record as a whole."""
    data = bytes.fromhex(octets)
    boundaries = {len(data)}
    at = 0
    while at < len(data):
        _, at = read_frame(data, at, len(data))
        boundaries.add(at)
    last = len(data) if "without length" in name or name == "datagram" else 0
    for cut in range(1, len(data)):
        if cut in boundaries or (last and cut >= (6 if name == "stream without length" else 1)):
            continue
        with pytest.raises(ConnectionFault) as caught:
            all_frames(data[:cut])
        assert caught.value.code == TransportError.FRAME_ENCODING_ERROR


@pytest.mark.rule("QX-8")
@pytest.mark.parametrize("kind", [0x01, 0x02, 0x03, 0x06, 0x07, 0x18, 0x19, 0x1A, 0x1B, 0x1E, 0x21, 0x40, 1 << 40])
def test_qx8_prohibited_and_unknown_types(kind: int) -> None:
    """FRAME_ENCODING_ERROR."""
    with pytest.raises(ConnectionFault) as caught:
        read_frame(encode_int(kind) + bytes(16), 0, 24)
    assert caught.value.code == TransportError.FRAME_ENCODING_ERROR
    events = Wire().give(encode_int(kind) + bytes(16))
    assert events[-1].code == TransportError.FRAME_ENCODING_ERROR  # type: ignore[union-attr]


@pytest.mark.rule("D-1")
@pytest.mark.parametrize("octets", ["4000", "400a000178", "8000000a000178", "c00000000000001080000001"])
def test_d1_a_type_in_a_longer_form(octets: str) -> None:
    """PROTOCOL_VIOLATION."""
    with pytest.raises(ConnectionFault) as caught:
        all_frames(bytes.fromhex(octets))
    assert caught.value.code == TransportError.PROTOCOL_VIOLATION


@pytest.mark.rule("QX-14", "QX-18")
def test_qx14_parameters_of_the_vectors() -> None:
    """Each is read and written."""
    octets = bytes.fromhex(VECTORS["frames"][1][1])
    frame, end = read_frame(octets, 0, len(octets))
    assert (frame.kind, end) == (FrameType.PARAMETERS, len(octets))
    assert Parameters.decode(frame.data) == ALL
    # The default of max_record_size is not written.
    assert ALL.encode() == frame.data.replace(bytes.fromhex("c571c59429cd0845027ffe"), b"")
    assert Parameters.decode(b"") == Parameters()
    assert PARAMETERS_PREFIX.hex() == "ff5153300d0a0d0a"


@pytest.mark.rule("QX-14")
@given(
    numbers=st.lists(st.integers(0, LARGEST), min_size=6, max_size=6),
    streams=st.integers(0, 1 << 60),
    record=st.integers(16_382, LARGEST),
    reset=st.booleans(),
)
def test_qx14_parameters_come_back(numbers: list[int], streams: int, record: int, reset: bool) -> None:
    parameters = Parameters(
        max_idle_timeout_ms=numbers[0],
        max_data=numbers[1],
        max_stream_data_bidi_local=numbers[2],
        max_stream_data_bidi_remote=numbers[3],
        max_stream_data_uni=numbers[4],
        max_streams_bidi=streams,
        max_streams_uni=streams // 2,
        max_datagram_frame_size=numbers[5],
        max_record_size=record,
        reset_stream_at=reset,
    )
    assert Parameters.decode(parameters.encode()) == parameters


@pytest.mark.rule("QX-12", "QX-14", "QX-15")
@pytest.mark.parametrize("octets", VECTORS["bad_parameters"])
def test_qx15_bad_parameters(octets: str) -> None:
    """Prohibited, repeated, cut, too large, too small: TRANSPORT_PARAMETER_ERROR."""
    with pytest.raises(ConnectionFault) as caught:
        Parameters.decode(bytes.fromhex(octets))
    assert caught.value.code == TransportError.TRANSPORT_PARAMETER_ERROR


@pytest.mark.rule("QX-14")
def test_qx14_an_unknown_parameter_twice() -> None:
    """Repetition is an error, known or not."""
    with pytest.raises(ConnectionFault, match="twice"):
        Parameters.decode(bytes.fromhex("1b00 1b00"))


@pytest.mark.rule("QX-16", "D-25")
def test_qx16_unknown_parameters_are_ignored() -> None:
    """Reserved ids, and the private one of another implementation."""
    private = encode_frame(0x3D4F9C2A8B1E6075, data=b"\x04echo")
    assert Parameters.decode(bytes.fromhex("1b00 3a01ff 040105") + private) == Parameters(max_data=5)


@pytest.mark.rule("D-8", "D-10", "D-25", "QX-18")
def test_d8_what_is_declared() -> None:
    """Nothing reserved or private; datagrams as large as a record; the default size of records."""
    settings = {"idle_timeout": 1.5, "stream_window": 5, "connection_window": 7, "max_streams": 2}
    listed = "010245dc 040107 050105 060105 070105 080102 090103"
    greeting = Wire(**settings, max_streams_unidirectional=3).greeting  # type: ignore[arg-type]
    assert greeting == bytes.fromhex("23ff5153300d0a0d0a1a" + listed + "20027ffe")
    greeting = Wire(**settings, max_streams_unidirectional=3, datagrams=False).greeting  # type: ignore[arg-type]
    assert greeting == bytes.fromhex("1fff5153300d0a0d0a16" + listed)


@pytest.mark.rule("D-9", "QX-17")
def test_d9_the_number_of_parameters() -> None:
    """At most 256."""

    def many(count: int) -> bytes:
        return b"".join(encode_frame(31 * n + 27, data=b"") for n in range(count))

    assert Parameters.decode(many(256)) == Parameters()
    with pytest.raises(ConnectionFault, match="256"):
        Parameters.decode(many(257))


@pytest.mark.rule("QX-36")
def test_qx36_a_reason_is_cut_at_a_character() -> None:
    """At most 1024 octets of UTF-8."""
    (frame,) = all_frames(encode_close(1, "é" * 600, cause=None))
    assert frame.data.decode() == "é" * 512
    (frame,) = all_frames(encode_close(1, "x" + "é" * 600, cause=8))
    assert (frame.fields, frame.data.decode()) == ((1, 8), "x" + "é" * 511)


@pytest.mark.rule("QX-17")
def test_qx17_parameters_larger_than_a_record() -> None:
    """A record of parameters is bounded as every record is."""
    wire = Wire(peer=None)
    events = wire.octets(encode_int(16_383) + PARAMETERS_PREFIX)
    assert events[-1].code == TransportError.FRAME_ENCODING_ERROR  # type: ignore[union-attr]
