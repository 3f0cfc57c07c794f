"""The promises of every carrier, kept by QMux over memory, Unix sockets, TCP, TLS and WebSockets."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import pytest
import trio
import trio.testing

from levada.framework.errors import ConnectionLost
from levada.transports.carriers import TlsConfig
from levada.transports.carriers.contracts import Connection, Incoming, Listener, Stream
from levada.transports.carriers.memory import MemoryLink, memory_streams
from levada.transports.carriers.websocket_config import WebSocketConfig
from levada.transports.qmux import QmuxConfig, QmuxConnection, QmuxListener, dial, listen
from levada.transports.qmux.below import OverBytes
from levada.transports.testing import CarrierCheck, CarrierTraits, carrier_checks
from levada.transports.testing.traits import Carrier

if TYPE_CHECKING:
    from tests.transports.conftest import Authority


@pytest.fixture(autouse=True)
def no_traceback(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing that a peer does ends in a traceback."""
    yield
    assert [r.getMessage() for r in caplog.get_records("call") if r.exc_info or r.levelno >= logging.ERROR] == []


# A stopped reader: the window, what waits above the watermark at the sender, and one write.
BUFFERED = (1 << 20) + (256 << 10) + (1 << 20)
MEMORY = CarrierTraits(shape="connection", buffered=BUFFERED, max_open=128, datagram_queue=512)


async def settle() -> None:
    await trio.testing.wait_all_tasks_blocked(0.01)


SOCKETS = attrs.evolve(MEMORY, settle=settle, streams=1_000, timeout=20)

Settings = Callable[[str], tuple[QmuxConfig, QmuxConfig]]
"""Makes the settings of a server and its client, for the scheme of the carrier below."""


@pytest.fixture
def settings(authority: Authority) -> Settings:
    serving, dialling = TlsConfig(certificate=authority.issue("server")), TlsConfig(ca=authority.ca)

    def make(scheme: str) -> tuple[QmuxConfig, QmuxConfig]:
        match scheme:
            case "tls":
                return QmuxConfig(below=serving), QmuxConfig(below=dialling)
            case "wss":
                return QmuxConfig(below=WebSocketConfig(tls=serving)), QmuxConfig(below=WebSocketConfig(tls=dialling))
            case _:
                return QmuxConfig(), QmuxConfig()

    return make


@asynccontextmanager
async def pair(
    url: str, server: QmuxConfig | None = None, client: QmuxConfig | None = None
) -> AsyncIterator[tuple[QmuxConnection, QmuxConnection, QmuxListener]]:
    async with listen(url, server) as listener, trio.open_nursery() as nursery:
        accepted: list[QmuxConnection] = []

        async def accept() -> None:
            accepted.append((await listener.accept()).accept())

        nursery.start_soon(accept)
        async with dial(listener.url, client) as connection:
            await accepted[0].handshake()
            yield connection, accepted[0], listener
        with trio.CancelScope(shield=True):
            await accepted[0].wait_closed()


@asynccontextmanager
async def ends_in_memory() -> AsyncIterator[tuple[Connection, Connection]]:
    one, other = memory_streams()
    LINKS.append(one.link)
    client, server = (
        QmuxConnection(OverBytes(stream), stream.info, QmuxConfig(), is_client=stream is one, since=trio.current_time())
        for stream in (one, other)
    )
    async with server, client:
        await client.handshake()
        await server.handshake()
        yield client, server
    LINKS.pop()


LINKS: list[MemoryLink] = []
"""What lies between the ends of the pair in use."""


def cut(one: Carrier, other: Carrier) -> None:
    """Lose the transport, as a network would."""
    LINKS[-1].cut()


CUT = attrs.evolve(MEMORY, cut=cut)


@pytest.mark.parametrize("check", carrier_checks(CUT), ids=str)
async def test_memory(check: CarrierCheck, autojump_clock: trio.testing.MockClock) -> None:
    await check(ends_in_memory)


@pytest.mark.loopback
@pytest.mark.parametrize(
    "scheme",
    [
        "unix",
        *(pytest.param(name, marks=pytest.mark.ci) for name in ("tcp", "wss")),
        *(pytest.param(name, marks=pytest.mark.release) for name in ("tls", "ws")),
    ],
)
@pytest.mark.parametrize("check", carrier_checks(SOCKETS), ids=str)
async def test_sockets(check: CarrierCheck, scheme: str, settings: Settings, tmp_path: Path) -> None:
    @asynccontextmanager
    async def ends() -> AsyncIterator[tuple[Connection, Connection]]:
        where = f"{tmp_path}/socket" if scheme == "unix" else "127.0.0.1:0"
        async with pair(f"qmux+{scheme}://{where}", *settings(scheme)) as (client, server, _):
            yield client, server

    await check(ends)


async def test_a_stream_is_not_opened_in_a_cancelled_scope(autojump_clock: trio.testing.MockClock) -> None:
    async with pair("qmux+memory://cancelled") as (client, _, _):
        await client.handshake()
        credit = client.stream_credit(unidirectional=False)
        with trio.CancelScope() as scope:
            scope.cancel()
            await client.open_stream()
        assert scope.cancelled_caught
        assert client.stream_credit(unidirectional=False) == credit


async def test_the_classes_fit_the_contracts(autojump_clock: trio.testing.MockClock) -> None:
    async with pair("qmux+memory://") as (client, _, listener):
        assert isinstance(client, Connection)
        assert isinstance(listener, Listener)
        assert isinstance(await client.open_stream(), Stream)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_look, listener)
            with pytest.raises(ConnectionLost):
                async with dial(listener.url):
                    pass


async def _look(listener: QmuxListener) -> None:
    incoming = await listener.accept()
    assert isinstance(incoming, Incoming)
    assert incoming.validated
    incoming.refuse()
