"""Octets that no decent peer sends: the core never raises, never keeps more than its limits, and says which rule was broken."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from levada.transports.reactivesocket import ReactiveSocketConfig, ReactiveSocketCore
from levada.transports.reactivesocket.frames import Frame, FrameType
from levada.transports.rsocket.config import CoreConfig, LeaseGrant
from levada.transports.rsocket.events import (
    ConnectionEnded,
    EndReason,
    Interaction,
    RequestReceived,
    SetupReceived,
    StreamCancelled,
)
from levada.transports.rsocket.frames import Payload

F, C, N, L = 0x2000, 0x1000, 0x0800, 0x2000
LIMITS = CoreConfig(
    max_frame_size=4096, max_payload_size=2000, max_reassembly=5000, max_streams=20, extensions=frozenset({1})
)
VECTORS = json.loads((Path(__file__).parent / "data" / "frame_vectors.json").read_text(encoding="utf-8"))
SETUP = Frame(FrameType.SETUP, 0, 0, (0, 500, 3000), ("text/plain", "a/b")).encode()
FRAMES = [bytes.fromhex(vector["hex"]) for vector in [*VECTORS["valid"], *VECTORS["invalid"]]]


def new_core(role: str, config: CoreConfig = LIMITS) -> ReactiveSocketCore:
    """A client with a request of each kind, or a server whose client is about to send SETUP."""
    core = ReactiveSocketCore(config, client=role == "client", framed=False, now=0.0)
    if role == "client":
        core.send_request_response(Payload(b"x"), 0.0)
        core.send_request_stream(Payload(b"x"), 2, 0.0)
        core.send_request_channel(Payload(b"x"), 2, 0.0)
    return core


def feed(core: ReactiveSocketCore, *pieces: bytes) -> list[Any]:
    """Give octets, accept SETUP, and check what must hold whatever they are."""
    events: list[Any] = []
    for piece in pieces:
        for event in core.receive_data(piece, 0.0):
            events.append(event)
            if isinstance(event, SetupReceived):
                core.accept_setup(0.0)
                events += core.take_events()
        held = core.statistics()
        assert held.bytes_unread <= 4096
        assert held.bytes_gathered <= 5000
        assert held.peer_streams <= 20
    ends = [event for event in events if isinstance(event, ConnectionEnded)]
    assert ends == events[-1:] if ends else True
    if ends and ends[0].reason is EndReason.PROTOCOL:
        assert ends[0].rule in ("RX-4", "RX-9")
        assert 0 <= ends[0].offset <= len(SETUP) + sum(map(len, pieces))
    # What is answered are frames.
    octets = b"".join(core.data_to_send(0.0))
    while octets:
        length = int.from_bytes(octets[:4], "big")
        Frame.decode(octets[:length])
        octets = octets[length:]
    return events


@pytest.mark.parametrize("role", ["client", "server"])
@pytest.mark.parametrize("octets", FRAMES, ids=[vector["id"] for vector in [*VECTORS["valid"], *VECTORS["invalid"]]])
def test_every_cut_of_every_vector(role: str, octets: bytes) -> None:
    before = SETUP if role == "server" else b""
    for cut in range(1, len(octets)):
        whole, pieces = new_core(role), new_core(role)
        if before:
            feed(whole, before)
            feed(pieces, before)
        assert feed(pieces, octets[:cut], octets[cut:]) == feed(whole, octets)
        lost = new_core(role)
        if before:
            feed(lost, before)
        events = feed(lost, octets[:cut])
        if not events:  # else the length is wrong, and that is the end at once
            last = lost.receive_data(b"", 0.0)[-1]
            assert isinstance(last, ConnectionEnded)
            assert last.reason is EndReason.LOST


@pytest.mark.parametrize("role", ["client", "server"])
def test_every_changed_octet_of_a_conversation(role: str) -> None:
    """One octet of SETUP and all vectors is another: named ends and nothing else."""
    octets = (SETUP if role == "server" else b"") + b"".join(FRAMES[:17])
    for at in range(len(octets)):
        for change in (0x01, 0x80, 0xFF):
            changed = bytearray(octets)
            changed[at] ^= change
            feed(new_core(role), bytes(changed))


frames = st.builds(
    Frame,
    st.sampled_from(FrameType),
    st.integers(0, 9) | st.sampled_from([2**31, 2**32 - 1]),
    st.integers(0, 2**16 - 1),
    st.lists(st.integers(0, 4) | st.integers(0, 2**32 - 1), max_size=3).map(tuple),
    st.none(),
    st.none() | st.binary(max_size=9),
    st.binary(max_size=40),
)


@given(st.sampled_from(["client", "server"]), st.lists(frames | st.binary(max_size=30), max_size=40), st.booleans())
def test_any_frames_in_any_order(role: str, given_frames: list[Frame | bytes], leases: bool) -> None:
    config = CoreConfig(
        max_frame_size=4096,
        max_payload_size=2000,
        max_reassembly=5000,
        max_streams=20,
        lease=LeaseGrant(10, 5) if leases else None,
    )
    core = new_core(role, config)
    if role == "server":
        feed(core, Frame(FrameType.SETUP, 0, L if leases else 0, (0, 0, 0), ("x", "")).encode())
    feed(core, *(frame if isinstance(frame, bytes) else frame.encode() for frame in given_frames if frame != b""))
    core.close(0, "", 0.0)
    held = core.statistics()
    assert (held.streams, held.peer_streams, held.requests_waiting, held.bytes_gathered, held.bytes_unread) == (0,) * 5


@pytest.mark.rule("RX-16")
def test_rx16_an_id_is_free_again_when_its_request_is_over() -> None:
    """A peer may use it at once; what comes in fragments is nobody's stream until it is whole."""
    core = new_core("server")
    feed(core, SETUP, Frame(FrameType.REQUEST_FNF, 2, data=b"1").encode())
    assert feed(core, Frame(FrameType.REQUEST_CHANNEL, 2, N | F, (1,), data=b"2").encode()) == []
    assert (core.has_stream(2), core.stream_ids(), core.statistics().streams) == (False, set(), 1)
    assert feed(core, Frame(FrameType.REQUEST_RESPONSE, 2, data=b"3").encode()) == []
    [end] = core.close(0, "", 0.0)
    assert isinstance(end, ConnectionEnded)


@given(st.lists(st.binary(min_size=1, max_size=80), max_size=8))
def test_any_octets_instead_of_setup(pieces: list[bytes]) -> None:
    feed(new_core("server"), *pieces)


@pytest.mark.ci
@pytest.mark.rule("RX-74")
def test_rx74_fragments_without_end_take_no_room() -> None:
    """Reassembly assumes endless streams: neither full nor empty fragments add up."""
    core = new_core("server", ReactiveSocketConfig(max_payload_size=100_000))
    feed(core, SETUP)
    empty = Frame(FrameType.REQUEST_CHANNEL, 2, F, metadata=b"").encode() * 1000
    core.receive_data(Frame(FrameType.REQUEST_CHANNEL, 2, F | N, (1,)).encode(), 0.0)
    tracemalloc.start()
    for _ in range(30):
        assert core.receive_data(empty, 0.0) == []
    assert tracemalloc.get_traced_memory()[0] < 20_000
    full = Frame(FrameType.REQUEST_CHANNEL, 2, F, data=bytes(10_000)).encode()
    for _ in range(30):
        assert core.receive_data(full, 0.0) == []
    assert tracemalloc.get_traced_memory()[1] < 600_000
    tracemalloc.stop()
    assert core.statistics().bytes_gathered == 0
    assert Frame.decode(b"".join(core.data_to_send(0.0))).numbers == (0x204,)


@pytest.mark.rule("RX-4")
def test_rx4_an_announced_length_allocates_nothing() -> None:
    """The length is judged and kept, not believed: memory grows with what came."""
    core = new_core("server", ReactiveSocketConfig(max_frame_size=2**31 - 1))
    feed(core, SETUP)
    tracemalloc.start()
    core.receive_data(bytes.fromhex("7fffffff 000b 4000 00000002 7ffffff3"), 0.0)
    assert tracemalloc.get_traced_memory()[1] < 10_000
    tracemalloc.stop()
    assert core.statistics().bytes_unread == 16


@pytest.mark.rule("RX-6")
def test_rx6_a_large_frame_octet_by_octet_is_linear() -> None:
    """A frame of 200,000 octets in as many pieces, and one of 8 MB in 16 KiB pieces: no copy for each piece."""
    core = new_core("server", ReactiveSocketConfig())
    feed(core, SETUP)
    frame = Frame(FrameType.REQUEST_FNF, 2, data=bytes(200_000)).encode()
    events = [event for at in range(len(frame)) for event in core.receive_data(frame[at : at + 1], 0.0)]
    assert events == [RequestReceived(Interaction.FIRE_AND_FORGET, 2, Payload(bytes(200_000)), 0, True)]
    frame = Frame(FrameType.REQUEST_FNF, 4, data=bytes(8_000_000)).encode()
    tracemalloc.start()
    events = [event for at in range(0, len(frame), 16_384) for event in core.receive_data(frame[at : at + 16_384], 0.0)]
    assert tracemalloc.get_traced_memory()[1] < 30_000_000
    tracemalloc.stop()
    assert events == [RequestReceived(Interaction.FIRE_AND_FORGET, 4, Payload(bytes(8_000_000)), 0, True)]


@pytest.mark.ci
@pytest.mark.rule("RX-16")
@pytest.mark.rule("RX-101")
def test_rx16_rx101_a_hundred_thousand_opens_and_cancels() -> None:
    """No memory of ended ids: a flood of requests and CANCELs leaves nothing."""
    core = new_core("server")
    feed(core, SETUP)
    cancelled = 0
    for start in range(0, 100_000, 1000):
        flood = b"".join(
            Frame(FrameType.REQUEST_CHANNEL, id_, N | (F if id_ % 4 else 0), (1,), data=b"x").encode()
            + Frame(FrameType.CANCEL, id_).encode()
            for id_ in range(2 * start + 2, 2 * start + 2002, 2)
        )
        cancelled += sum(isinstance(event, StreamCancelled) for event in core.receive_data(flood, 0.0))
    assert cancelled == 50_000
    held = core.statistics()
    assert (held.streams, held.bytes_gathered, held.bytes_unread, held.bytes_unsent) == (0, 0, 0, 0)
