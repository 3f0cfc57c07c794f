"""A core with a peer whose bytes the test writes, and two cores wired to each other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from levada.transports.qmux import Established, Event, Parameters, QmuxConfig, QmuxCore
from levada.transports.qmux.frames import Frame, FrameType, encode_frame, encode_int, read_frame, read_int

VECTORS: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "vectors.json").read_text("utf-8"))
PEER = Parameters(
    max_idle_timeout_ms=30_000,
    max_data=1 << 20,
    max_stream_data_bidi_local=1 << 18,
    max_stream_data_bidi_remote=1 << 18,
    max_stream_data_uni=1 << 18,
    max_streams_bidi=100,
    max_streams_uni=100,
    max_datagram_frame_size=16_382,
)
"""What the test declares as the peer."""


@pytest.fixture(autouse=True)
def no_traceback(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing that a peer sends ends in a log: a core writes to none."""
    yield
    assert caplog.get_records("call") == []


def record(*frames: bytes | str) -> bytes:
    """Return a record with its Size; frames in hex or as bytes."""
    body = b"".join(bytes.fromhex(frame) if isinstance(frame, str) else frame for frame in frames)
    return encode_int(len(body)) + body


def stream(stream_id: int, offset: int, data: bytes, *, fin: bool = False) -> bytes:
    """Return a STREAM frame."""
    return encode_frame(0x0F if fin else 0x0E, stream_id, offset, data=data)


def read_frames(data: bytes) -> list[Frame]:
    """Return the frames of records with their Sizes."""
    frames, at = [], 0
    while at < len(data):
        size, at = read_int(data, at, len(data))
        stop = at + size
        while at < stop:
            frame, at = read_frame(data, at, stop)
            frames.append(frame)
    return frames


class Wire:
    """One core; the test is its peer.

    Args:
        client: whether the core is one.
        peer: what the test declares; `None` to declare nothing yet.
        settings: of `QmuxConfig`.
    """

    def __init__(self, *, client: bool = False, peer: Parameters | None = PEER, **settings: Any) -> None:
        self.now = 0.0
        self.core = QmuxCore(client=client, now=0.0, config=QmuxConfig(**settings))
        self.greeting = self.take()
        if peer is not None:
            assert self.give(encode_frame(FrameType.PARAMETERS, data=peer.encode())) == [Established(peer)]

    def octets(self, data: bytes | str) -> list[Event]:
        """Give bytes as they are."""
        return self.core.receive_data(bytes.fromhex(data) if isinstance(data, str) else data, self.now)

    def give(self, *frames: bytes | str) -> list[Event]:
        """Give one record."""
        return self.octets(record(*frames))

    def take(self) -> bytes:
        """Return what the core writes now."""
        written = b""
        while pieces := self.core.data_to_send(self.now):
            written += b"".join(pieces)
        return written

    def frames(self) -> list[Frame]:
        """Return the frames that the core writes now."""
        return read_frames(self.take())


class Pair:
    """Client and server, wired to each other."""

    def __init__(
        self, *, framed: bool = False, client: QmuxConfig | None = None, server: QmuxConfig | None = None
    ) -> None:
        self.now = 0.0
        self.framed = framed
        self.client = QmuxCore(client=True, now=0.0, config=client, framed=framed)
        self.server = QmuxCore(client=False, now=0.0, config=server, framed=framed)
        self.settle()

    def deliver(self, sender: QmuxCore, receiver: QmuxCore) -> tuple[bool, list[Event]]:
        """Move one write; say whether there was one, and what it meant."""
        events: list[Event] = []
        pieces = sender.data_to_send(self.now)
        for piece in pieces:
            events += (
                receiver.receive_message(piece, self.now) if self.framed else receiver.receive_data(piece, self.now)
            )
        return bool(pieces), events

    def settle(self) -> tuple[list[Event], list[Event]]:
        """Deliver until nothing is written; return the events of the client and of the server."""
        of_client, of_server = self.client.take_events(), self.server.take_events()
        moved = True
        while moved:
            to_server, events = self.deliver(self.client, self.server)
            of_server += events
            to_client, events = self.deliver(self.server, self.client)
            of_client += events
            of_client += self.client.take_events()
            of_server += self.server.take_events()
            moved = to_server or to_client
        return of_client, of_server
