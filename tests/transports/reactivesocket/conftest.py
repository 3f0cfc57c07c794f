"""A core under test, and on its other side a peer that writes each frame by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from levada.transports.reactivesocket import ReactiveSocketCore
from levada.transports.reactivesocket.frames import Frame, FrameType
from levada.transports.rsocket.config import CoreConfig
from levada.transports.rsocket.events import Event


class ByHand:
    """A core, the frames that it sends, and frames for it."""

    def __init__(self, config: CoreConfig, *, client: bool, framed: bool = False) -> None:
        self.core = ReactiveSocketCore(config, client=client, framed=framed, now=0.0)
        self.framed = framed
        self.now = 0.0

    def gives(self, *frames: Frame | bytes | str) -> list[Event]:
        """Let the peer send frames, octets, or octets in hex, all in one chunk; return the events."""
        octets = [
            bytes.fromhex(frame)
            if isinstance(frame, str)
            else frame
            if isinstance(frame, bytes)
            else frame.encode(framed=self.framed)
            for frame in frames
        ]
        if self.framed:
            return [event for message in octets for event in self.core.receive_message(message, self.now)]
        return self.core.receive_data(b"".join(octets), self.now)

    def gives_frame(self, kind: str, stream_id: int, flags: int = 0, *numbers: int, **parts: Any) -> list[Event]:
        """Let the peer send one frame."""
        return self.gives(Frame(FrameType[kind], stream_id, flags, numbers, **parts))

    def sent(self) -> list[Frame]:
        """Take what the core wants to send, as frames."""
        if self.framed:
            return [Frame.decode(message, framed=True) for message in self.core.data_to_send(0.0)]
        octets = b"".join(self.core.data_to_send(0.0))
        frames = []
        while octets:
            length = int.from_bytes(octets[:4], "big")
            frames.append(Frame.decode(octets[:length]))
            octets = octets[length:]
        return frames


def setup_frame(flags: int = 0, *, version: int = 0, keepalive_ms: int = 500, lifetime_ms: int = 3_000) -> Frame:
    return Frame(FrameType.SETUP, 0, flags, (version, keepalive_ms, lifetime_ms), ("text/plain", "a/b"))


@pytest.fixture
def by_hand() -> Callable[..., ByHand]:
    """Make a core: ``by_hand("client")``, ``by_hand("server")`` set up, ``by_hand("listening")`` before SETUP."""

    def make(role: str, config: CoreConfig | None = None, *, framed: bool = False, leases: bool = False) -> ByHand:
        made = ByHand(config or CoreConfig(), client=role == "client", framed=framed)
        if role == "client":
            made.core.data_to_send(0.0)
        if role == "server":
            made.gives(setup_frame(0x2000 if leases else 0))
            made.core.accept_setup(0.0)
        return made

    return make
