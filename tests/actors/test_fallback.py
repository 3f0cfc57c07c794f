"""Clients that use QMux over TLS where QUIC does not get through."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from levada.actors import aqueduct, maop
from levada.actors.authentication import Credentials
from levada.actors.fallback import over_tls
from levada.actors.interop.certificates import SelfSigned, make_certificates
from levada.framework import ActorSystem, Identity, OneshotSender, oneshot
from levada.framework.errors import ConfigurationError, ConnectionLost
from levada.transports.carriers import TlsConfig
from levada.transports.carriers.race import Fallback
from levada.transports.qmux import QmuxConfig
from levada.transports.quic import ClientSessions, QuicConfig

PATIENCE = 20.0  # seconds
KIND = OneshotSender[str]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> SelfSigned:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def tls(certificates: SelfSigned) -> QmuxConfig:
    """Of a server over TLS."""
    return QmuxConfig(below=TlsConfig(certificate=certificates.certificate, key=certificates.key))


@pytest.fixture
def quic(certificates: SelfSigned) -> QuicConfig:
    """Of a server over QUIC."""
    return QuicConfig(certificate=certificates.certificate, key=certificates.key)


@pytest.fixture
def config(certificates: SelfSigned) -> aqueduct.PeerConfig:
    """Of a client: it trusts the authority as a file, as QUIC's settings say it."""
    return aqueduct.PeerConfig(carrier=QuicConfig(ca=certificates.ca), fallback="tls")


@asynccontextmanager
async def mute(port: int) -> AsyncIterator[None]:
    """A UDP port that answers nothing, not even that it is closed."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", port))
        yield


async def answer(sender: OneshotSender[str]) -> None:
    sender.send("here")


async def scheme(system: ActorSystem, port: int, config: aqueduct.PeerConfig) -> str | None:
    """Connect and ask; the carrier that it went over."""
    async with aqueduct.connect(system, f"aqueduct://127.0.0.1:{port}", KIND, config=config) as peer:
        sender, receiver = oneshot(str)
        await peer.send(sender)
        assert await receiver == "here"
        info = peer.info
        return None if info is None else info.scheme


@pytest.mark.loopback
async def test_a_udp_port_that_answers_nothing(tls: QmuxConfig, config: aqueduct.PeerConfig) -> None:
    """The first connection waits for the head start, the second one does not: the settings remember."""
    assert config.fallback is not None
    serving = aqueduct.PeerConfig(carrier=tls)
    async with (
        ActorSystem() as system,
        aqueduct.serve(system, "aqueduct+tls://127.0.0.1:0", answer, KIND, config=serving) as listener,
        mute(port := int(listener.url.rpartition(":")[2])),
    ):
        with trio.fail_after(PATIENCE):
            start = trio.current_time()
            assert await scheme(system, port, config) == "qmux+tls"
            assert trio.current_time() - start >= 0.25
            assert config.fallback.preferred(f"127.0.0.1:{port}") == "tls"
            patient = Fallback(head_start=PATIENCE)
            patient.note(f"127.0.0.1:{port}", "tls")
            assert await scheme(system, port, attrs.evolve(config, fallback=patient)) == "qmux+tls"


@pytest.mark.loopback
async def test_quic_where_it_works(tls: QmuxConfig, quic: QuicConfig, config: aqueduct.PeerConfig) -> None:
    """A server that wants both has a listener for each, at one port number."""
    config = attrs.evolve(config, fallback=Fallback(head_start=PATIENCE))
    over = {name: aqueduct.PeerConfig(carrier=carrier) for name, carrier in (("tls", tls), ("quic", quic))}
    async with (
        ActorSystem() as system,
        aqueduct.serve(system, "aqueduct+tls://127.0.0.1:0", answer, KIND, config=over["tls"]) as listener,
        aqueduct.serve(
            system, listener.url.replace("aqueduct+tls:", "aqueduct:"), answer, KIND, config=over["quic"]
        ) as both,
    ):
        with trio.fail_after(PATIENCE):
            assert await scheme(system, int(both.url.rpartition(":")[2]), config) == "quic"


@pytest.mark.loopback
async def test_maop_alike(tls: QmuxConfig, certificates: SelfSigned) -> None:
    async def shout(call: maop.Call) -> bytes:
        return (await call.body()).upper()

    async def admit(credentials: Credentials) -> Identity:
        return Identity("client-1")

    config = maop.PeerConfig(carrier=QuicConfig(ca=certificates.ca), fallback=Fallback(head_start=0.01))
    serving = maop.PeerConfig(carrier=tls)
    async with (
        ActorSystem() as system,
        maop.serve(system, "maop+tls://127.0.0.1:0", {101: shout}, authenticate=admit, config=serving) as listener,
        mute(port := int(listener.url.rpartition(":")[2])),
    ):
        with trio.fail_after(PATIENCE):
            async with maop.connect(system, f"maop://127.0.0.1:{port}", token=b"secret", config=config) as peer:
                assert await peer.request(101, b"hello") == b"HELLO"


@pytest.mark.loopback
async def test_neither_works(config: aqueduct.PeerConfig) -> None:
    """The error has the reasons of both."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        quick = attrs.evolve(config, carrier=attrs.evolve(config.carrier, handshake_timeout=0.2))
        with trio.fail_after(PATIENCE):
            async with ActorSystem() as system:
                with pytest.raises(ConnectionLost) as caught:
                    await scheme(system, port, quick)
    assert caught.value.detail.count("; ") == 1


def test_settings_over_tls_are_those_for_quic(tmp_path: Path) -> None:
    quic = QuicConfig(
        ca=b"pem", certificate="c", key="k", key_password="p", verify=False, server_name="desk", idle_timeout=9.0,
        max_streams=7, max_streams_unidirectional=8, stream_window=9, connection_window=10, datagrams=False, handshake_timeout=3.0,
    )  # fmt: skip
    tls = TlsConfig(
        ca=b"pem", certificate="c", key="k", key_password="p", verify=False, server_name="desk", handshake_timeout=3.0
    )
    assert over_tls(quic) == QmuxConfig(
        below=tls, idle_timeout=9.0, max_streams=7, max_streams_unidirectional=8, stream_window=9, connection_window=10, datagrams=False,
        handshake_timeout=3.0,
    )  # fmt: skip
    assert over_tls(None) == QmuxConfig(below=TlsConfig())


@pytest.mark.parametrize(
    ("url", "changes", "complaint"),
    [
        ("aqueduct+tls://127.0.0.1:9", {}, r"^a fallback is for QUIC: leave it out for aqueduct\+tls://$"),
        ("aqueduct+memory://desk", {"carrier": None}, "^a fallback is for QUIC"),
        (
            "aqueduct://127.0.0.1:9",
            {"early": True, "carrier": QuicConfig(sessions=ClientSessions())},
            "^early data goes before it is known",
        ),
    ],
)
async def test_where_there_is_no_fallback(url: str, changes: dict[str, Any], complaint: str) -> None:
    config = aqueduct.PeerConfig(fallback="tls", **changes)
    async with ActorSystem() as system:
        with pytest.raises(ConfigurationError, match=complaint):
            async with aqueduct.connect(system, url, object, config=config):
                pass


async def test_a_bound_token_needs_quic() -> None:
    async with ActorSystem() as system:
        with pytest.raises(ConfigurationError, match=r"wanted maop:// without a fallback: bind=True needs QUIC"):
            async with maop.connect(system, "maop://127.0.0.1:9", bind=True, config=maop.PeerConfig(fallback="tls")):
                pass


def test_other_values_are_no_fallback() -> None:
    with pytest.raises(TypeError):
        aqueduct.PeerConfig(fallback="tcp")
