"""URLs of protocols over many streams, and the carriers that they name."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from levada.actors import aqueduct, maop
from levada.actors.authenticators import BearerTokens
from levada.actors.stream_carriers import carrier_url, url_of
from levada.framework import ActorSystem, Identity, OneshotSender, oneshot
from levada.framework.errors import ConfigurationError, ConnectionLost
from levada.transports import carriers
from levada.transports.carriers import Carrier, MemoryConfig, memory

CLIENTS = BearerTokens.of({b"secret": Identity("client-1")})
URLS = {
    "maop://h:1": "quic://h:1",
    "maop+memory://desk": "memory://desk",
    "maop+unix:///run/desk": "qmux+unix:///run/desk",
    "maop+tls://h:1": "qmux+tls://h:1",
    "maop+tcp://127.0.0.1:1": "qmux+tcp://127.0.0.1:1",
    "maop+ws://h/path": "qmux+ws://h/path",
    "maop+wss://h/path": "qmux+wss://h/path",
    "maop+own.one://h": "own.one://h",
}


@pytest.mark.parametrize(("url", "carrier"), URLS.items())
def test_a_scheme_names_a_carrier_and_the_carrier_the_scheme(url: str, carrier: str) -> None:
    assert (carrier_url("maop", url), url_of("maop", carrier)) == (carrier, url)


@pytest.mark.parametrize("url", ["http://h", "aqueduct://h", "maop", "quic://h", ""])
def test_a_url_of_another_protocol(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^expected maop://host:port, or maop\+CARRIER://…"):
        carrier_url("maop", url)


@asynccontextmanager
async def dial(url: str, config: MemoryConfig | None) -> AsyncIterator[Any]:
    async with memory.dial(url.replace("meadow", "memory"), config) as carrier:
        yield carrier


@asynccontextmanager
async def listen(url: str, config: MemoryConfig) -> AsyncIterator[Any]:
    async with memory.listen(url.replace("meadow", "memory"), config) as listener:
        yield listener


@pytest.fixture
def meadow() -> MemoryConfig:
    """A carrier that levada does not know, and settings with which it has connections of many streams."""
    carriers.register("meadow", Carrier(dial=dial, listen=listen, config=MemoryConfig))
    return MemoryConfig(shape="connection")


async def test_aqueduct_over_a_registered_carrier(meadow: MemoryConfig) -> None:
    async def answer(sender: OneshotSender[str]) -> None:
        sender.send("here")

    config = aqueduct.PeerConfig(carrier=meadow)
    kind = OneshotSender[str]
    async with (
        ActorSystem() as system,
        aqueduct.serve(system, "aqueduct+meadow://field", answer, kind, config=config),
        aqueduct.connect(system, "aqueduct+meadow://field", kind, config=config) as peer,
    ):
        sender, receiver = oneshot(str)
        await peer.send(sender)
        assert await receiver == "here"


async def test_maop_over_a_registered_carrier(meadow: MemoryConfig) -> None:
    async def shout(call: maop.Call) -> bytes:
        return (await call.body()).upper()

    config = maop.PeerConfig(carrier=meadow)
    async with (
        ActorSystem() as system,
        maop.serve(system, "maop+meadow://field", {101: shout}, authenticate=CLIENTS, config=config),
        maop.connect(system, "maop+meadow://field", token=b"secret", config=config) as peer,
    ):
        assert await peer.request(101, b"hello") == b"HELLO"


@pytest.mark.parametrize("protocol", ["aqueduct", "maop"])
async def test_a_carrier_of_one_stream_is_named(
    protocol: str, meadow: MemoryConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """The client gets the error. The server logs it, and goes on."""

    async def ignore(_: Any) -> None:
        pass

    def serve() -> AbstractAsyncContextManager[Any]:
        if protocol == "maop":
            of_maop = maop.PeerConfig(carrier=one)
            return maop.serve(system, url, {}, authenticate=CLIENTS, config=of_maop)
        return aqueduct.serve(system, url, ignore, object, config=aqueduct.PeerConfig(carrier=one))

    def connect() -> AbstractAsyncContextManager[Any]:
        if protocol == "maop":
            return maop.connect(system, url, token=b"secret", config=maop.PeerConfig(carrier=one))
        return aqueduct.connect(system, url, object, config=aqueduct.PeerConfig(carrier=one))

    url, one = f"{protocol}+meadow://lane", MemoryConfig(shape="bytes")
    caplog.set_level(logging.WARNING, "levada")
    async with ActorSystem() as system, serve():
        for _ in range(2):
            with pytest.raises(ConfigurationError, match=r"^needs a carrier of many streams; memory:// has one$"):
                async with connect():
                    pass
        async with dial("meadow://lane", None) as stream:
            with pytest.raises(ConnectionLost):
                await stream.receive_some()
    said = [record.getMessage() for record in caplog.records]
    assert said
    assert all("needs a carrier of many streams; memory:// has one" in text for text in said)


@pytest.mark.loopback
async def test_clients_at_a_unix_socket_have_no_address_to_be_limited_by(tmp_path: Path) -> None:
    """`max_attempts` counts network addresses; all users of a machine would share one."""

    async def echo(call: maop.Call) -> bytes:
        return await call.body()

    config = maop.PeerConfig(max_attempts=1.0)
    url = f"maop+unix://{tmp_path}/desk"
    async with (
        ActorSystem() as system,
        maop.serve(system, url, {101: echo}, authenticate=CLIENTS, config=config) as listener,
    ):
        assert listener.url == url
        for _ in range(3):
            async with maop.connect(system, url, token=b"secret") as peer:
                assert await peer.request(101, b"again") == b"again"
