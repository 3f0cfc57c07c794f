"""The settings of each carrier; and in each test of this folder: the core's table of streams and the actors' agree at every turn."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from levada.actors.rsocket.connection import Connection
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
        self.connections: weakref.WeakSet[Connection] = weakref.WeakSet()
        self.differences: list[str] = []
        self.steps = 0
        self._runs: set[trio.lowlevel.TrioToken] = set()

    def watch(self, connection: Connection) -> None:
        self.connections.add(connection)
        token = trio.lowlevel.current_trio_token()
        if token not in self._runs:
            self._runs.add(token)
            trio.lowlevel.add_instrument(self)

    def leave_out(self, connection: Connection) -> None:
        """For a test that uses the core beneath a connection: then only the core has the stream."""
        self.connections.discard(connection)

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self.steps += 1
        for connection in self.connections:
            ids = connection.unmatched()
            if ids and len(self.differences) < 3:
                self.differences.append(f"{connection!r}, streams {sorted(ids)[:9]}, after a step of {task.name}")


@pytest.fixture(autouse=True)
def tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tables]:
    """What is checked in each test of this folder."""
    tables = Tables()
    begin = Connection.__attrs_post_init__

    def begun(self: Connection) -> None:
        begin(self)
        tables.watch(self)

    monkeypatch.setattr(Connection, "__attrs_post_init__", begun)
    yield tables
    assert tables.differences == []
