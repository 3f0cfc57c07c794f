"""Listeners of all protocols over QUIC: who has too many connections, and who fails the handshake."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import trio

from levada.actors import aqueduct, maop, rsocket
from levada.actors.authenticators import BearerTokens
from levada.framework import ActorSystem, Identity
from levada.framework.errors import LevadaError
from levada.transports.quic import QuicConfig

pytestmark = pytest.mark.loopback
TOKENS = BearerTokens.of({b"secret": Identity("desk")})


async def answer(request: rsocket.Request) -> bytes:
    return b"answer"


async def ignore(m: object) -> None:
    pass


def serve(protocol: str, system: ActorSystem, quic: QuicConfig) -> AbstractAsyncContextManager[Any]:
    match protocol:
        case "aqueduct":
            return aqueduct.serve(
                system, "aqueduct://127.0.0.1:0", ignore, Any, config=aqueduct.PeerConfig(carrier=quic)
            )
        case "maop":
            config = maop.PeerConfig(carrier=quic)
            return maop.serve(system, "maop://127.0.0.1:0", {}, authenticate=TOKENS, config=config)
        case _:
            return rsocket.serve(
                system, "rsocket+quic://127.0.0.1:0", answer, config=rsocket.ServerConfig(carrier=quic)
            )


def connect(protocol: str, system: ActorSystem, url: str, quic: QuicConfig) -> AbstractAsyncContextManager[Any]:
    match protocol:
        case "aqueduct":
            return aqueduct.connect(system, url, object, config=aqueduct.PeerConfig(carrier=quic))
        case "maop":
            return maop.connect(system, url, token=b"secret", config=maop.PeerConfig(carrier=quic))
        case _:
            return rsocket.connect(system, url, config=rsocket.ClientConfig(carrier=quic))


@pytest.mark.parametrize("protocol", ["aqueduct", "maop", "rsocket"])
async def test_too_many_of_one_address_over_quic(
    certificate: Path, caplog: pytest.LogCaptureFixture, protocol: str
) -> None:
    server = QuicConfig(certificate=certificate, key=certificate, max_connections_per_address=1)
    client = QuicConfig(ca=certificate, server_name="localhost")

    async def is_let_in() -> bool:
        try:
            async with connect(protocol, system, listener.url, client) as peer:
                if protocol == "rsocket":  # whose client hears of nothing before it asks
                    assert (await peer.request_response(b"")).data == b"answer"
        except LevadaError:
            return False
        return True

    async with ActorSystem() as system, serve(protocol, system, server) as listener:
        async with connect(protocol, system, listener.url, client):
            while not listener.peers:
                await trio.lowlevel.checkpoint()
            caplog.clear()
            assert not await is_let_in()
            assert len(listener.peers) == 1
            assert "1 connections of its address are open (max_connections_per_address)" in caplog.text
        while listener.peers:
            await trio.lowlevel.checkpoint()
        with trio.fail_after(250):
            while not await is_let_in():  # the server may still be closing its side
                await trio.lowlevel.checkpoint()
        assert system.statistics().failures == 0
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


@pytest.mark.parametrize("protocol", ["aqueduct", "maop", "rsocket"])
async def test_a_handshake_that_fails_over_quic_is_told_of(
    certificate: Path, caplog: pytest.LogCaptureFixture, protocol: str
) -> None:
    stranger = QuicConfig(ca=certificate, server_name="somebody.else")
    async with (
        ActorSystem() as system,
        serve(protocol, system, QuicConfig(certificate=certificate, key=certificate)) as listener,
    ):
        with pytest.raises(LevadaError, match=r"somebody\.else|certificate"):
            async with connect(protocol, system, listener.url, stranger):
                pass
        with trio.fail_after(250):
            while "it broke its handshake off" not in caplog.text:
                await trio.lowlevel.checkpoint()
    (line,) = [record.getMessage() for record in caplog.records if "turned" in record.getMessage()]
    assert line.startswith("quic://127.0.0.1:")
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []
