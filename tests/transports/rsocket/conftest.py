"""Cores for the tests: pairs that are set up, and single ones that are fed frame by frame."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from levada.transports.rsocket import ConnectionState, CoreConfig, RSocketCore, Sessions
from levada.transports.rsocket.events import Event, SetupAccepted
from levada.transports.rsocket.frames import Frame, Payload, SetupFrame, decode
from levada.transports.testing import CorePair

Make = Callable[..., RSocketCore]
Feed = Callable[..., list[Event]]
Sent = Callable[[RSocketCore], list[Frame]]
Pair = Callable[..., CorePair[RSocketCore]]
Setup = Callable[..., SetupFrame]


def token_bytes(size: int) -> bytes:
    return bytes(range(size))


def new_core(*, client: bool, framed: bool = False, sessions: Any = None, **config: Any) -> RSocketCore:
    if config.get("resume") and not client and sessions is None:
        sessions = Sessions[RSocketCore]()
    settings = CoreConfig(**config)
    return RSocketCore(settings, client=client, framed=framed, now=0.0, random_bytes=token_bytes, sessions=sessions)


@pytest.fixture
def core() -> Callable[..., RSocketCore]:
    """A core by itself; keyword arguments beside `client`, `framed` and `sessions` are its configuration."""
    return new_core


@pytest.fixture
def pair() -> Callable[..., CorePair[RSocketCore]]:
    """Two cores, set up and accepted; keyword arguments are the configuration of both. `SetupAccepted` is left out of the events."""

    def make(*, framed: bool = False, sessions: Any = None, **config: Any) -> CorePair[RSocketCore]:
        client = new_core(client=True, framed=framed, **config)
        server = new_core(client=False, framed=framed, sessions=sessions, **config)
        made = CorePair(client, server, framed=framed, ignore=(SetupAccepted,))
        made.to_server()
        made.server.accept_setup(0.0)
        made.settle()
        return made

    return make


def prefixed(*frames: Frame | bytes) -> bytes:
    """The octets of frames on a byte carrier."""
    octets = [frame if isinstance(frame, bytes) else frame.encode() for frame in frames]
    return b"".join(len(frame).to_bytes(3, "big") + frame for frame in octets)


@pytest.fixture
def feed() -> Callable[..., list[Event]]:
    """Hand frames to a core on a byte carrier."""

    def feed(core: RSocketCore, *frames: Frame | bytes, now: float = 0.0) -> list[Event]:
        return core.receive_data(prefixed(*frames), now)

    return feed


@pytest.fixture
def sent() -> Callable[[RSocketCore], list[Frame]]:
    """Take what a core on a byte carrier has queued, as frames."""

    def sent(core: RSocketCore) -> list[Frame]:
        octets = b"".join(core.data_to_send(0.0))
        frames = []
        at = 0
        while at < len(octets):
            size = int.from_bytes(octets[at : at + 3], "big")
            frames.append(decode(octets[at + 3 : at + 3 + size]))
            at += 3 + size
        assert at == len(octets)
        return frames

    return sent


@pytest.fixture
def server(core: Callable[..., RSocketCore], feed: Callable[..., list[Event]]) -> Callable[..., RSocketCore]:
    """A server's core that has accepted a SETUP; keyword arguments are its configuration."""

    def make(*, lease: Any = None, resume: bool = False, **config: Any) -> RSocketCore:
        made = core(client=False, lease=lease, resume=resume, **config)
        feed(made, SETUP(lease=lease is not None, token=b"tok1" if resume else None))
        made.accept_setup(0.0)
        made.data_to_send(0.0)
        return made

    return make


@pytest.fixture
def client(core: Callable[..., RSocketCore], feed: Callable[..., list[Event]]) -> Callable[..., RSocketCore]:
    """A client's core that was accepted: the server has sent a request, which was answered; its next own id is 1."""

    def make(**config: Any) -> RSocketCore:
        from levada.transports.rsocket.frames import CancelFrame, FrameType, RequestFrame

        made = core(client=True, **config)
        feed(made, RequestFrame(type=FrameType.REQUEST_FNF, stream_id=2, payload=Payload()), CancelFrame(2))
        made.data_to_send(0.0)
        assert made.state is ConnectionState.OPEN
        return made

    return make


def SETUP(**changes: Any) -> SetupFrame:  # noqa: N802 - a frame as the text writes it
    fields: dict[str, Any] = {
        "version": (1, 0),
        "keepalive_ms": 500,
        "lifetime_ms": 30_000,
        "metadata_mime_type": "text/plain",
        "data_mime_type": "text/plain",
        "payload": Payload(),
    }
    return SetupFrame(**(fields | changes))


@pytest.fixture
def setup() -> Callable[..., SetupFrame]:
    """A SETUP frame; keyword arguments change its fields."""
    return SETUP
