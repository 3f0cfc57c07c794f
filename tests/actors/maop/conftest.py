"""A client and a server, on the memory carrier or on QUIC over a simulated network; and a server whose peer is a bare core."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from tests.actors.carried import CARRIERS, settings
from tests.simnet import SimNet

from levada.actors.authenticators import BearerTokens
from levada.actors.maop import Call, Listener, Peer, PeerConfig, connect, serve
from levada.actors.maop.connection import MaopDriver
from levada.actors.maop.entry import connect_over, serve_over
from levada.framework import ActorSystem, Identity, message
from levada.transports.quic import QuicConfig, dial, listen

CLIENT = Identity("client-1")
TOKENS = BearerTokens.of({b"secret": CLIENT})


@message("tests.maop.Question")
class Question:
    """A body that is a message."""

    number: int


@message("tests.maop.Answer")
class Answer:
    """What is answered to it."""

    number: int
    text: str = ""


async def echo(call: Call) -> bytes:
    """Answer with the body."""
    return await call.body()


async def nothing(call: Call) -> None:
    """Answer without body."""


@attrs.frozen
class Ends:
    """Both sides of a connection."""

    system: ActorSystem
    listener: Listener
    peer: Peer

    @property
    def client(self) -> MaopDriver:
        return self.peer._connection

    @property
    def server(self) -> MaopDriver:
        connection: MaopDriver
        (connection,) = self.listener._actor.connections
        return connection

    @property
    def caller(self) -> Peer:
        """What the server calls the client by."""
        return self.server.handle

    def left(self) -> list[int]:
        """Count what may be left behind, on both sides: operations, records, waiting callers, streams but those of signals, places."""
        return [
            count
            for end in (self.client, self.server)
            for count in (
                end.core.operations,
                len(end.operations),
                len(end.executions),
                *map(len, end.credit.values()),
                end.stream_count - control_streams(end),
                end.shared.limiter.running + end.shared.limiter.waiting,
                end.core.quota.operations + end.core.quota.buffered,
            )
        ]


def control_streams(end: MaopDriver) -> int:
    """Count the streams of signals, of both sides."""
    from levada.transports.maop.control import ControlIn

    return len(end.core.pool.streams.keys() | {i for i, e in end.core.streams.items() if isinstance(e, ControlIn)})


NOTHING = [0] * 16

Start = Callable[..., AbstractAsyncContextManager[Ends]]


@pytest.fixture(params=CARRIERS)
def scheme(request: pytest.FixtureRequest) -> str:
    """The carrier that connections in memory run on."""
    return str(request.param)


@pytest.fixture
def start(scheme: str) -> Start:
    """Begin a connection in memory.

    `handlers` are the server's, `client` holds keyword arguments of `connect`, `server` those of `serve`; others are settings of both.
    """

    @asynccontextmanager
    async def begin(
        handlers: Any = None,
        *,
        client: dict[str, Any] | None = None,
        server: dict[str, Any] | None = None,
        **changes: Any,
    ) -> AsyncIterator[Ends]:
        config = PeerConfig(**changes)
        serving = {"authenticate": TOKENS, "config": config, **(server or {})}
        calling = {"token": b"secret", "config": config, **(client or {})}
        for side in (serving, calling):
            side["config"] = attrs.evolve(side["config"], carrier=settings(scheme, side["config"].carrier))
        async with (
            ActorSystem() as system,
            serve(system, f"maop+{scheme}://desk", handlers or {}, **serving) as listener,
            connect(system, listener.url, **calling) as peer,
        ):
            yield Ends(system, listener, peer)

    return begin


@pytest.fixture(scope="session")
def quic(certificate: Path) -> tuple[QuicConfig, QuicConfig]:
    """Settings of a server and of a client that trusts it."""
    server = QuicConfig(alpn=("maop/1",), certificate=certificate, key=certificate)
    return server, QuicConfig(alpn=("maop/1",), ca=certificate)


@pytest.fixture
def start_on_network(quic: tuple[QuicConfig, QuicConfig]) -> Start:
    """Begin a connection over QUIC on a simulated network."""

    @asynccontextmanager
    async def begin(net: SimNet, handlers: Any, *, carrier: Any = None, **changes: Any) -> AsyncIterator[Ends]:
        config = PeerConfig(**changes)
        listening = partial(
            listen, "quic://server:4433", attrs.evolve(quic[0], **(carrier or {})), port=net.port("server", 4433)
        )
        dialling = partial(dial, "quic://server:4433", quic[1], port=net.port("client"))
        async with (
            ActorSystem() as system,
            serve_over(system, listening, handlers, authenticate=TOKENS, config=config) as listener,
            connect_over(system, dialling, token=b"secret", config=config) as peer,
        ):
            assert listener.url == "maop://server:4433"
            yield Ends(system, listener, peer)

    return begin


@pytest.fixture(autouse=True)
def no_traceback(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing that a peer sends ends in a traceback in a log; the marker `handler_fails` is for what code of the user raises."""
    caplog.set_level(logging.INFO, "levada")
    yield
    if request.node.get_closest_marker("handler_fails") is None:
        assert [record.getMessage() for record in caplog.get_records("call") if record.exc_info] == []


async def settled() -> None:
    """Let all signals and timeouts of ended operations pass."""
    await trio.sleep(5)
