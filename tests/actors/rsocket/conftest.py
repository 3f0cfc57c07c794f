"""The settings of each carrier; and in each test of this folder: the core's table of streams and the actors' agree at every turn."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import attrs
import pytest
import trio

from levada.actors import rsocket
from levada.actors.rsocket import ConnectedPeer, Listener, Peer
from levada.actors.rsocket.connection import RSocketDriver
from levada.transports.carriers import TlsConfig
from levada.transports.carriers.websocket import WebSocketConfig
from levada.transports.quic import QuicConfig


@attrs.frozen
class CarrierSettings:
    """What a URL and two configurations need to use one carrier."""

    url: str
    serving: Any = None
    dialling: Any = None


@pytest.fixture
def settings(certificate: Path, tmp_path: Path) -> Callable[[str], CarrierSettings]:
    """Make the settings of a carrier by its scheme."""
    serving = TlsConfig(certificate=certificate)
    dialling = TlsConfig(ca=certificate)

    def make(scheme: str) -> CarrierSettings:
        match scheme:
            case "memory":
                return CarrierSettings("memory://desk")
            case "unix":
                return CarrierSettings(f"unix://{tmp_path}/desk.socket")
            case "tls":
                return CarrierSettings("tls://127.0.0.1:0", serving, dialling)
            case "ws":
                return CarrierSettings("ws://127.0.0.1:0/desk")
            case "wss":
                return CarrierSettings(
                    "wss://127.0.0.1:0/", WebSocketConfig(tls=serving), WebSocketConfig(tls=dialling)
                )
            case "quic":
                return CarrierSettings(
                    "quic://127.0.0.1:0",
                    QuicConfig(certificate=certificate, key=certificate),
                    QuicConfig(ca=certificate),
                )
        return CarrierSettings("tcp://127.0.0.1:0")

    return make


class Tables(trio.abc.Instrument):
    """Compares the two tables of each connection whenever a task has made a step."""

    def __init__(self) -> None:
        self.entries: list[Listener | Peer] = []
        self.left_out: list[ConnectedPeer] = []
        self.differences: list[str] = []
        self._runs: set[trio.lowlevel.TrioToken] = set()

    def watch(self, entry: Listener | Peer) -> None:
        token = trio.lowlevel.current_trio_token()
        if token not in self._runs:
            self._runs.add(token)
            trio.lowlevel.add_instrument(self)
        self.entries.append(entry)

    def leave_out(self, peer: ConnectedPeer) -> None:
        """For a test that uses the core beneath a connection: then only the core has the stream."""
        self.left_out.append(peer)

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        for entry in self.entries:
            for peer in entry.peers if isinstance(entry, Listener) else [entry]:
                if isinstance(peer, ConnectedPeer) and peer not in self.left_out and not peer.closed:
                    connection = below(peer)
                    if connection.info is None:
                        continue
                    # A stream that only one side has forgotten is a leak, and its users wait forever.
                    ids = connection.streams.keys() ^ connection.core.stream_ids()
                    if ids and len(self.differences) < 3:
                        self.differences.append(f"{peer!r}, streams {sorted(ids)[:9]}, after a step of {task.name}")


_checked: list[Tables] = []


@pytest.fixture(autouse=True)
def tables() -> Iterator[Tables]:
    """What is checked in each test of this folder, of the listeners and peers that it gets from here."""
    _checked.append(Tables())
    yield _checked[-1]
    assert _checked.pop().differences == []


def below(peer: Peer) -> RSocketDriver:
    """The connection of a peer, for tests of what a peer does not show."""
    assert isinstance(peer, ConnectedPeer)
    assert isinstance(peer._connection, RSocketDriver)
    return peer._connection


Entry = TypeVar("Entry", bound="Listener | Peer")
Settings = ParamSpec("Settings")


def watched(
    enter: Callable[Settings, AbstractAsyncContextManager[Entry]],
) -> Callable[Settings, AbstractAsyncContextManager[Entry]]:
    @asynccontextmanager
    async def entered(*arguments: Settings.args, **settings: Settings.kwargs) -> AsyncIterator[Entry]:
        async with enter(*arguments, **settings) as entry:
            _checked[-1].watch(entry)
            try:
                yield entry
            finally:
                _checked[-1].entries.remove(entry)

    return entered


connect, serve = watched(rsocket.connect), watched(rsocket.serve)
