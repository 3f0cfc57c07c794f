"""Our octets read by the frame parser of PyPI's `rsocket`, which knows nothing of this project."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from levada.transports.rsocket import CoreConfig, LeaseGrant, Payload, RSocketCore
from levada.transports.rsocket.frames import (
    CancelFrame,
    ErrorFrame,
    Frame,
    FrameType,
    KeepaliveFrame,
    LeaseFrame,
    PayloadFrame,
    RequestFrame,
    RequestNFrame,
    ResumeFrame,
    ResumeOkFrame,
    SetupFrame,
)

theirs = pytest.importorskip("rsocket.frame", reason="PyPI rsocket is not installed")

streams = st.integers(1, 2**31 - 1)
u31 = st.integers(0, 2**31 - 1)
u63 = st.integers(0, 2**63 - 1)
octets = st.binary(max_size=40)
payloads = st.builds(Payload, octets, st.none() | octets)
names = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=60)
frames: st.SearchStrategy[Frame] = st.one_of(
    st.builds(
        SetupFrame,
        version=st.tuples(st.integers(0, 65_535), st.integers(0, 65_535)),
        keepalive_ms=u31,
        lifetime_ms=u31,
        token=st.none() | octets,
        metadata_mime_type=names,
        data_mime_type=names,
        payload=payloads,
        lease=st.booleans(),
    ),
    st.builds(LeaseFrame, u31, u31),
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
        type=st.just(FrameType.REQUEST_CHANNEL),
        stream_id=streams,
        n=u31,
        payload=payloads,
        follows=st.booleans(),
        complete=st.booleans(),
    ),
    st.builds(RequestNFrame, streams, u31),
    st.builds(CancelFrame, streams),
    st.builds(PayloadFrame, stream_id=streams, payload=payloads, next=st.booleans(), complete=st.booleans()),
    st.builds(ErrorFrame, streams, st.sampled_from([0x101, 0x201, 0x202, 0x203, 0x204]), octets),
    st.builds(ResumeFrame, version=st.just((1, 0)), token=octets, server_position=u63, client_position=u63),
    st.builds(ResumeOkFrame, u63),
)


def check(frame: Frame, read: Any) -> None:
    """Compare field by field."""
    assert read.stream_id == frame.stream_id
    match frame:
        case SetupFrame():
            assert (read.major_version, read.minor_version) == frame.version
            assert (read.keep_alive_milliseconds, read.max_lifetime_milliseconds) == (
                frame.keepalive_ms,
                frame.lifetime_ms,
            )
            assert (read.flags_resume, read.flags_lease) == (frame.token is not None, frame.lease)
            assert frame.token is None or read.resume_identification_token == frame.token
            assert read.metadata_encoding == frame.metadata_mime_type.encode()
            assert read.data_encoding == frame.data_mime_type.encode()
        case LeaseFrame():
            assert (read.time_to_live, read.number_of_requests) == (frame.ttl_ms, frame.n)
        case KeepaliveFrame():
            assert (read.flags_respond, read.last_received_position) == (frame.respond, frame.position)
            assert read.data == frame.data
        case RequestFrame() | PayloadFrame():
            assert read.flags_follows == frame.follows
            if frame.complete:
                assert read.flags_complete
            if isinstance(frame, PayloadFrame):
                assert read.flags_next == frame.next
            elif frame.n is not None:
                assert read.initial_request_n == frame.n
        case RequestNFrame():
            assert read.request_n == frame.n
        case ErrorFrame():
            assert (read.error_code, read.data) == (frame.code, frame.data)
        case ResumeFrame():
            assert read.resume_identification_token == frame.token
            assert (read.last_server_position, read.first_client_position) == (
                frame.server_position,
                frame.client_position,
            )
        case ResumeOkFrame():
            assert read.last_received_client_position == frame.client_position
        case _:
            pass
    if isinstance(frame, SetupFrame | RequestFrame | PayloadFrame):
        assert (read.metadata or b"") == (frame.payload.metadata or b"")
        assert (read.data or b"") == frame.payload.data


@given(frames)
def test_each_frame_reads_there_as_it_was_written_here(frame: Frame) -> None:
    read = theirs.parse_or_ignore(frame.encode())
    assert read is not None
    check(frame, read)


def test_what_a_core_sends_reads_there() -> None:
    """The frames that the core builds with structs of its own, not by the classes."""
    core = RSocketCore(
        CoreConfig(fragment_size=64, lease=LeaseGrant(1.0, 5)),
        client=True,
        framed=True,
        now=0.0,
        random_bytes=bytes,
    )
    lease = LeaseFrame(1000, 5).encode()
    core.receive_message(lease, 0.0)
    core.data_to_send(0.0)
    channel = core.send_request_channel(Payload(b"d" * 100, b"m" * 100), 7, 0.0)
    core.receive_message(RequestNFrame(channel, 5).encode(), 0.0)
    core.send_payload(channel, Payload(b"x", b"y"))
    core.send_request_n(channel, 9)
    core.send_complete(channel)
    core.send_cancel(channel)
    read = [theirs.parse_or_ignore(message) for message in core.data_to_send(0.0)]
    assert [type(frame).__name__ for frame in read] == [
        "RequestChannelFrame",
        "PayloadFrame",
        "PayloadFrame",
        "PayloadFrame",
        "PayloadFrame",
        "RequestNFrame",
        "PayloadFrame",
        "CancelFrame",
    ]
    assert b"".join(frame.metadata or b"" for frame in read[:4]) == b"m" * 100
    assert b"".join(frame.data or b"" for frame in read[:4]) == b"d" * 100
    assert [frame.flags_follows for frame in read[:5]] == [True, True, True, False, False]
    assert (read[4].data, read[4].metadata, read[6].flags_complete) == (b"x", b"y", True)
