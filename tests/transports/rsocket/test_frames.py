"""Frames alone: golden vectors, round trips, and what damage does."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from levada.transports.rsocket import ConnectionState, LeaseGrant, Payload, RSocketCore
from levada.transports.rsocket.codes import InvalidFrame
from levada.transports.rsocket.events import (
    ConnectionEnded,
    EndReason,
    Event,
    RequestReceived,
    ResumeReceived,
    SetupReceived,
)
from levada.transports.rsocket.frames import (
    CancelFrame,
    ErrorFrame,
    ExtensionFrame,
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
    UnknownFrame,
    decode,
)

DATA = json.loads((Path(__file__).parent / "data" / "vectors.json").read_text("utf-8"))
VECTORS = {vector["name"]: bytes.fromhex(vector["octets"]) for vector in DATA["vectors"]}

MEANING: dict[str, list[Frame]] = {
    "V1": [
        SetupFrame(
            version=(1, 0),
            keepalive_ms=500,
            lifetime_ms=30_000,
            metadata_mime_type="text/plain",
            data_mime_type="application/cbor",
            payload=Payload(b"hi", b"m"),
            lease=True,
        )
    ],
    "V2": [
        SetupFrame(
            version=(0, 2),
            keepalive_ms=500,
            lifetime_ms=30_000,
            token=b"tok1",
            metadata_mime_type="a/b",
            data_mime_type="text/plain",
            payload=Payload(),
        )
    ],
    "V3": [RequestFrame(type=FrameType.REQUEST_RESPONSE, stream_id=1, payload=Payload(b"hello", b"echo"))],
    "V4": [RequestFrame(type=FrameType.REQUEST_STREAM, stream_id=3, n=2, payload=Payload(b"10", b"count"))],
    "V5": [
        RequestFrame(type=FrameType.REQUEST_CHANNEL, stream_id=5, n=1, payload=Payload(b"a", b"chan"), complete=True)
    ],
    "V6": [PayloadFrame(stream_id=1, payload=Payload(b"hello", b"echo"), next=True, complete=True)],
    "V7": [KeepaliveFrame(respond=True, position=300, data=b"ping")],
    "V8": [ErrorFrame(1, 0x201, b"boom")],
    "V9": [LeaseFrame(5000, 100, b"md")],
    "V10": [ResumeFrame(version=(1, 0), token=b"tok1", server_position=300, client_position=20)],
    "V11": [ResumeOkFrame(258)],
    "V12": [MetadataPushFrame(b"md")],
    "V13": [RequestNFrame(3, 5)],
    "V14": [
        RequestFrame(type=FrameType.REQUEST_RESPONSE, stream_id=9, payload=Payload(b"AB", b"abc"), follows=True),
        PayloadFrame(stream_id=9, payload=Payload(b"CDE"), next=True),
    ],
}


def split_frames(octets: bytes) -> list[bytes]:
    frames = []
    while octets:
        size = int.from_bytes(octets[:3], "big")
        frames.append(octets[3 : 3 + size])
        octets = octets[3 + size :]
    return frames


def test_each_vector_has_a_meaning_here() -> None:
    assert list(VECTORS) == list(MEANING) == [f"V{number}" for number in range(1, 15)]


@pytest.mark.parametrize("name", VECTORS)
def test_a_vector_is_read_and_written(name: str) -> None:
    frames = split_frames(VECTORS[name])
    assert [decode(frame) for frame in frames] == MEANING[name]
    assert [frame.encode() for frame in MEANING[name]] == frames


streams = st.integers(1, 2**31 - 1)
u31 = st.integers(0, 2**31 - 1)
u32 = st.integers(0, 2**32 - 1)
u63 = st.integers(0, 2**63 - 1)
octets = st.binary(max_size=40)
payloads = st.builds(Payload, octets, st.none() | octets)
versions = st.tuples(st.integers(0, 65_535), st.integers(0, 65_535))
mime_types = st.text(st.characters(max_codepoint=127), max_size=60)
frames: st.SearchStrategy[Frame] = st.one_of(
    st.builds(
        SetupFrame,
        version=versions,
        keepalive_ms=u31,
        lifetime_ms=u31,
        token=st.none() | octets,
        metadata_mime_type=mime_types,
        data_mime_type=mime_types,
        payload=payloads,
        lease=st.booleans(),
    ),
    st.builds(LeaseFrame, u31, u31, st.none() | octets),
    st.builds(KeepaliveFrame, st.booleans(), u63, octets),
    st.builds(
        RequestFrame,
        type=st.sampled_from([FrameType.REQUEST_RESPONSE, FrameType.REQUEST_FNF]),
        stream_id=streams,
        payload=payloads,
        follows=st.booleans(),
    ),
    st.builds(
        RequestFrame,
        type=st.just(FrameType.REQUEST_STREAM),
        stream_id=streams,
        n=u31,
        payload=payloads,
        follows=st.booleans(),
    ),
    st.builds(
        RequestFrame,
        type=st.just(FrameType.REQUEST_CHANNEL),
        stream_id=streams,
        n=u31,
        payload=payloads,
        follows=st.booleans(),
        complete=st.booleans(),
    ),
    st.builds(RequestNFrame, streams, u31),
    st.builds(CancelFrame, streams),
    st.builds(
        PayloadFrame,
        stream_id=streams,
        payload=payloads,
        next=st.booleans(),
        complete=st.booleans(),
        follows=st.booleans(),
    ),
    st.builds(ErrorFrame, u31, u32, octets),
    st.builds(MetadataPushFrame, octets),
    st.builds(ResumeFrame, version=versions, token=octets, server_position=u63, client_position=u63),
    st.builds(ResumeOkFrame, u63),
    st.builds(
        ExtensionFrame,
        stream_id=u31,
        extended_type=u31,
        data=octets,
        ignore=st.booleans(),
        metadata=st.booleans(),
    ),
    st.builds(UnknownFrame, u31, st.sampled_from([0, 0x0F, 0x20, 0x3E]), st.integers(0, 0x3FF), octets),
)


@given(frames)
def test_what_is_written_is_read_back(frame: Frame) -> None:
    encoded = frame.encode()
    assert decode(encoded) == frame
    assert decode(encoded).encode() == encoded


@given(st.binary(max_size=80))
def test_any_octets_are_a_frame_or_an_invalid_one(data: bytes) -> None:
    with contextlib.suppress(InvalidFrame):
        frame = decode(data)
        assert decode(frame.encode()) == frame


@pytest.mark.parametrize("name", VECTORS)
def test_every_octet_changed_to_every_value_is_a_frame_or_an_invalid_one(name: str) -> None:
    texts: list[str] = []
    for whole in split_frames(VECTORS[name]):
        for at in range(len(whole)):
            for value in range(256):
                changed = whole[:at] + bytes([value]) + whole[at + 1 :]
                try:
                    decode(changed)
                except InvalidFrame as error:
                    texts.append(str(error))
    assert all(texts)


# ---------------------------------------------------------------- vectors given to cores

NewCore = Callable[..., RSocketCore]


def ready(name: str, core: NewCore, setup: Callable[..., SetupFrame]) -> tuple[RSocketCore, list[Event]]:
    """Return a core for which the vector is the next thing to come, and an empty list for events."""
    if name in ("V1", "V2", "V10"):
        return core(client=False, resume=True, lease=LeaseGrant(1, 1)), []
    if name in ("V3", "V4", "V5", "V7", "V12", "V14"):
        made = core(client=False)
        made.receive_data(prefix(setup()), 0.0)
        made.accept_setup(0.0)
    elif name == "V11":
        made = core(client=True, resume=True)
        made.connection_lost(0, "", 0.0)
        made.resume(framed=False, now=0.0)
    else:
        made = core(client=True, lease=LeaseGrant(1, 1))
        made.receive_data(prefix(LeaseFrame(1000, 10)), 0.0)
        made.send_request_response(Payload(b"?"), 0.0)
        made.send_request_channel(Payload(b"?"), 5, 0.0)
    made.data_to_send(0.0)
    return made, []


def prefix(frame: Frame) -> bytes:
    encoded = frame.encode()
    return len(encoded).to_bytes(3, "big") + encoded


@pytest.mark.rule("RS-4")
@pytest.mark.parametrize("name", VECTORS)
def test_rs4_every_cut_of_every_vector_means_the_same(
    name: str, core: NewCore, setup: Callable[..., SetupFrame]
) -> None:
    """A frame is processed when it is complete; octets may arrive in any cutting."""
    octets = VECTORS[name]
    whole, expected = ready(name, core, setup)
    expected += whole.receive_data(octets, 0.0)
    answer = b"".join(whole.data_to_send(0.0))
    assert expected or answer
    for cut in range(1, len(octets)):
        made, events = ready(name, core, setup)
        first = made.receive_data(octets[:cut], 0.0)
        events += first + made.receive_data(octets[cut:], 0.0)
        assert (name == "V14") or first == [], "something was reported before the frame was whole"
        assert events == expected
        assert b"".join(made.data_to_send(0.0)) == answer
    made, events = ready(name, core, setup)
    for at in range(len(octets)):
        events += made.receive_data(octets[at : at + 1], 0.0)
    assert events == expected
    assert made.statistics().bytes_unread == 0


@pytest.mark.parametrize("name", VECTORS)
def test_every_octet_of_every_vector_changed_does_nothing_worse_than_end_the_connection(
    name: str, core: NewCore, setup: Callable[..., SetupFrame]
) -> None:
    octets = VECTORS[name]
    for at in range(len(octets)):
        for value in {octets[at] ^ (1 << bit) for bit in range(8)} | {0, 255}:
            made, events = ready(name, core, setup)
            events += made.receive_data(octets[:at] + bytes([value]) + octets[at + 1 :], 0.0)
            ends = [event for event in events if isinstance(event, ConnectionEnded)]
            assert ends == events[-len(ends) :] if ends else True
            if ends:
                assert len(ends) == 1
                assert ends[0].reason in (EndReason.PROTOCOL, EndReason.REFUSED, EndReason.FAILED_BY_PEER)
                assert made.state is ConnectionState.ENDED
                assert ends[0].reason is EndReason.FAILED_BY_PEER or b"".join(made.data_to_send(0.0)) != b""
            else:
                assert made.state is not ConnectionState.ENDED


def test_vectors_mean_what_they_say_to_a_server(core: NewCore, setup: Callable[..., SetupFrame]) -> None:
    got: dict[str, Any] = {}
    for name in ("V1", "V2", "V14"):
        made, events = ready(name, core, setup)
        got[name] = events + made.receive_data(VECTORS[name], 0.0)
    [accepted] = got["V1"]
    assert isinstance(accepted, SetupReceived)
    assert (accepted.lease, accepted.payload, accepted.data_mime_type) == (
        True,
        Payload(b"hi", b"m"),
        "application/cbor",
    )
    [accepted] = got["V2"]
    assert isinstance(accepted, SetupReceived)
    assert (accepted.version, accepted.resume_token, accepted.max_lifetime) == ((0, 2), b"tok1", 30.0)
    [request] = got["V14"]
    assert isinstance(request, RequestReceived)
    assert request.payload == Payload(b"ABCDE", b"abc")
    assert not any(isinstance(event, ResumeReceived) for events in got.values() for event in events)
