"""Client certificates by the same settings for every protocol over every carrier with TLS; tokens, replaced meanwhile; users.

Lumberjack, which has neither answers nor tokens, has its own test: `tests.actors.lumberjack.test_authentication`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest

from levada.actors import aqueduct, maop, protocols, rsocket
from levada.actors.authentication import Authenticate
from levada.actors.authenticators import BearerTokens, CertificateNames, UnixUsers, new_token
from levada.actors.interop.certificates import SelfSigned, make_certificates
from levada.framework import ActorSystem, Identity, OneshotSender, current_peer, oneshot
from levada.framework.errors import LevadaError
from levada.framework.testing.simulation import World, simulate
from levada.transports.carriers import TlsConfig
from levada.transports.rsocket.extensions import BearerAuthentication, CompositeMetadata

pytestmark = pytest.mark.loopback

Ask = Callable[[], Awaitable[bytes]]


async def who(_: Any) -> bytes:
    peer = current_peer()
    assert peer is not None
    assert peer.identity is not None
    return f"{peer.identity.name} by {peer.info.scheme}".encode()


def serve(system: ActorSystem, url: str, authenticate: Authenticate, carrier: Any) -> AbstractAsyncContextManager[Any]:
    """Serve the name of each client."""
    if url.startswith("aqueduct"):

        async def answer(sender: OneshotSender[bytes]) -> None:
            sender.send(await who(sender))

        own = aqueduct.PeerConfig(carrier=carrier)
        return aqueduct.serve(system, url, answer, OneshotSender[bytes], authenticate=authenticate, config=own)
    if url.startswith("maop"):
        config = maop.PeerConfig(carrier=carrier)
        return maop.serve(system, url, {101: who}, authenticate=authenticate, config=config)
    return rsocket.serve(system, url, who, authenticate=authenticate, config=rsocket.ServerConfig(carrier=carrier))


@asynccontextmanager
async def connect(system: ActorSystem, url: str, carrier: Any, token: bytes | None = None) -> AsyncIterator[Ask]:
    """Connect, and yield a function that asks for this client's name."""
    if url.startswith("aqueduct"):
        own = aqueduct.PeerConfig(carrier=carrier)
        async with aqueduct.connect(system, url, OneshotSender[bytes], token=token, config=own) as entry:

            async def question() -> bytes:
                sender, receiver = oneshot(bytes)
                with sender, receiver:
                    await entry.send(sender)
                    return await receiver

            yield question
        return
    if url.startswith("maop"):
        shown: dict[str, Any] = {"auth_type": "Basic"} if token is None else {"token": token}
        async with maop.connect(system, url, config=maop.PeerConfig(carrier=carrier), **shown) as peer:

            async def ask() -> bytes:
                return bytes(await peer.request(101))

            yield ask
        return
    metadata = None if token is None else CompositeMetadata.of(BearerAuthentication(token.decode())).encode()
    core = rsocket.CoreConfig(metadata_mime_type=rsocket.COMPOSITE, setup_payload=rsocket.Payload(b"", metadata))
    async with rsocket.connect(system, url, config=rsocket.ClientConfig(carrier=carrier, core=core)) as client:

        async def request() -> bytes:
            return (await client.request_response(b"")).data

        yield request


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> SelfSigned:
    return make_certificates(tmp_path_factory.mktemp("ours"))


URLS = {
    "rsocket+tls": "tls",
    "rsocket+wss": "wss",
    "rsocket+quic": "quic",
    "reactivesocket+tls": "tls",
    "aqueduct": "quic",
    "aqueduct+tls": "qmux+tls",
    "aqueduct+wss": "qmux+wss",
    "maop": "quic",
    "maop+tls": "qmux+tls",
    "maop+wss": "qmux+wss",
}


async def check(made: SelfSigned, strange: SelfSigned, scheme: str, carrier: str) -> None:
    """Check that a client is known by its certificate, and clients with none or another authority's are refused."""
    serving = TlsConfig(certificate=made.certificate, key=made.key, ca=made.ca, client_certificates="required")
    known = TlsConfig(ca=made.ca, certificate=made.certificate, key=made.key)
    refused = [TlsConfig(ca=made.ca), attrs.evolve(known, certificate=strange.certificate, key=strange.key)]

    def settings(tls: TlsConfig) -> Any:
        return protocols.carrier_settings(carrier, tls)

    async with (
        ActorSystem() as system,
        serve(system, f"{scheme}://127.0.0.1:0", CertificateNames(), settings(serving)) as listener,
    ):
        async with connect(system, listener.url, settings(known)) as ask:
            assert await ask() == f"CN=localhost by {carrier}".encode()
        for tls in refused:
            with pytest.raises((LevadaError, ExceptionGroup)):
                async with connect(system, listener.url, settings(tls)) as ask:
                    await ask()


@pytest.mark.parametrize(("scheme", "carrier"), URLS.items())
async def test_clients_are_known_by_their_certificates(
    made: SelfSigned, tmp_path: Path, scheme: str, carrier: str
) -> None:
    await check(made, make_certificates(tmp_path), scheme, carrier)


@pytest.mark.ci
@pytest.mark.parametrize(("scheme", "carrier"), URLS.items())
def test_clients_are_known_by_their_certificates_in_worlds(
    made: SelfSigned, tmp_path: Path, scheme: str, carrier: str
) -> None:
    strange = make_certificates(tmp_path)

    async def scenario(world: World) -> None:
        main = await world.start("main", lambda: check(made, strange, scheme, carrier))
        assert await main.wait() == 0

    simulate(scenario, seeds=[1])


@pytest.mark.parametrize("scheme", ["rsocket+tcp", "reactivesocket+tcp", "aqueduct+tcp", "maop+tcp"])
async def test_tokens_are_replaced_while_clients_stay(tmp_path: Path, scheme: str) -> None:
    file = tmp_path / "tokens"
    file.touch(mode=0o600)
    first, old_line = new_token(Identity("ada"))
    second, new_line = new_token(Identity("ada"))
    file.write_text(old_line)
    async with (
        ActorSystem() as system,
        serve(system, f"{scheme}://127.0.0.1:0", BearerTokens(file), None) as listener,
        connect(system, listener.url, None, first) as old,
    ):
        file.write_text(f"{old_line}\n{new_line}\n")
        listener.reload()
        for token in (first, second):
            async with connect(system, listener.url, None, token) as ask:
                assert (await ask()).startswith(b"ada by ")
        file.write_text(new_line)
        listener.reload()
        async with connect(system, listener.url, None, second) as ask:
            assert (await ask()).startswith(b"ada by ")
        for wrong in (first, b"", None):
            with pytest.raises((LevadaError, ExceptionGroup)):
                async with connect(system, listener.url, None, wrong) as ask:
                    await ask()
        assert (await old()).startswith(b"ada by "), "a client that is connected stays"
        assert listener.refused == 3


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the user at the other end")
@pytest.mark.parametrize("scheme", ["rsocket+unix", "aqueduct+unix", "maop+unix"])
async def test_users_of_a_unix_socket(tmp_path: Path, scheme: str) -> None:
    for uid, name in ((os.getuid(), b"me by "), (os.getuid() + 1, None)):
        async with (
            ActorSystem() as system,
            serve(system, f"{scheme}://{tmp_path}/desk", UnixUsers({uid: Identity("me")}), None) as listener,
        ):
            if name is not None:
                async with connect(system, listener.url, None) as ask:
                    assert (await ask()).startswith(name)
                continue
            with pytest.raises((LevadaError, ExceptionGroup)):
                async with connect(system, listener.url, None) as ask:
                    await ask()
            assert listener.refused == 1
