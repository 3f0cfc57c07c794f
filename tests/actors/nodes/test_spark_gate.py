"""The driver's listener for nodes that Spark starts: tokens, certificates, the socket of heartbeats. No Spark runs here."""

from __future__ import annotations

import errno
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

pytest.importorskip("cryptography")

from levada.actors.aqueduct import Peer, PeerConfig, connect
from levada.actors.authentication import Credentials, Refused
from levada.actors.nodes import spark_gate
from levada.actors.nodes.certificates import Authority, Carrier, MemberKey, carrier_settings, member_name
from levada.actors.nodes.spark_gate import CertificateRefused, Certified, Certify, Gate, listening_in, open_gate
from levada.framework import ActorSystem, Identity, oneshot
from levada.framework.errors import ConfigurationError, ConnectionLost
from levada.transports.carriers import CarrierInfo

pytestmark = pytest.mark.loopback

DRIVER, NODE = b"D" * 16, b"N" * 16


@asynccontextmanager
async def gates(
    carrier: Carrier = "tls", ports: range = range(1)
) -> AsyncIterator[tuple[ActorSystem, Gate, PeerConfig]]:
    """A gate, and the settings of its clients."""
    authority, key = Authority(), MemberKey()
    with key.with_certificate(authority.sign(key.public, DRIVER)) as certificate:
        serves = PeerConfig(carrier=carrier_settings(carrier, authority.certificate, certificate=certificate))
        dials = PeerConfig(carrier=carrier_settings(carrier, authority.certificate, dials=DRIVER))
        async with (
            ActorSystem() as system,
            open_gate(system, authority, serves, carrier, "127.0.0.1", "127.0.0.1", ports) as gate,
        ):
            yield system, gate, dials


def shows(node_id: bytes | None) -> Credentials:
    """Credentials of a client that has shown the certificate of a node, or none."""
    names = () if node_id is None else (f"DNS:{member_name(node_id)}",)
    info = CarrierInfo(scheme="tls", local="127.0.0.1:1", peer="127.0.0.1:2", peer_names=names)
    return Credentials(protocol="aqueduct", listener="", info=info)


async def certify(peer: Peer[Any], node_id: bytes = NODE, public: bytes | None = None, attempt: int = 0) -> Any:
    answer, found = oneshot(Certified | CertificateRefused)
    with found:
        await peer.send(Certify(node_id, MemberKey().public if public is None else public, attempt, answer))
        return await found


@pytest.mark.parametrize("carrier", ["tls", "quic"])
async def test_a_node_with_its_token_gets_a_certificate_and_is_known_by_it(carrier: Carrier) -> None:
    if carrier == "quic":
        pytest.importorskip("aioquic")
    async with gates(carrier) as (system, gate, config):
        with gate.expect("n0#0") as ticket:
            async with connect(system, gate.url, object, token=ticket.token, config=config) as peer:
                certified = await certify(peer)
                assert isinstance(certified, Certified)
                assert ticket.node_id == NODE
            assert await gate.by_certificate(shows(NODE)) == Identity("n0#0")
            assert isinstance(await gate.by_certificate(shows(DRIVER)), Refused)
            assert isinstance(await gate.by_certificate(shows(None)), Refused)
        assert isinstance(await gate.by_certificate(shows(NODE)), Refused)
    assert certified.certificate.startswith(b"-----BEGIN CERTIFICATE-----")
    assert certified.heart == ticket.heart_token
    assert "heart" not in repr(certified)


async def test_a_wrong_token_and_one_that_is_over_are_refused() -> None:
    async with gates() as (system, gate, config):
        with gate.expect("n0#0") as ticket:
            pass
        for token in (b"guess", ticket.token, None):
            with pytest.raises(ConnectionLost, match="No node is expected with this token"):
                async with connect(system, gate.url, object, token=token, config=config):
                    pass


async def test_without_file_descriptors_it_waits_and_says_so_once(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def accept(listener: trio.SocketListener) -> trio.SocketStream:
        await trio.lowlevel.checkpoint()
        raise OSError(errno.EMFILE, "too many")

    monkeypatch.setattr(trio.SocketListener, "accept", accept)
    async with gates():
        await trio.sleep(50.0)
    assert caplog.messages == 2 * [
        "cannot accept: [Errno 24] too many"
    ]  # of the listener for certificates, and of the socket


async def test_a_second_process_of_a_start_is_refused_and_the_first_counts_as_lost() -> None:
    async with gates() as (system, gate, config):
        with gate.expect("n0#0") as ticket:
            async with connect(system, gate.url, object, token=ticket.token, config=config) as first:
                await certify(first)
                assert not ticket.superseded.is_set()
                async with connect(system, gate.url, object, token=ticket.token, config=config) as second:
                    refusal = await certify(second, b"M" * 16, attempt=1)
            assert refusal == CertificateRefused(
                "n0#0 was admitted before: the driver restarts nodes, not Spark (attempt 1)"
            )
            assert ticket.superseded.is_set()
            assert ticket.node_id == NODE


async def test_what_cannot_be_certified_is_refused_with_a_text() -> None:
    async with gates() as (system, gate, config):
        with gate.expect("n0#0") as ticket:
            async with connect(system, gate.url, object, token=ticket.token, config=config) as peer:
                assert await certify(peer, b"short") == CertificateRefused("the node id has 5 bytes, wanted 16")
                refusal = await certify(peer, NODE, b"no key")
                assert refusal.text.startswith("the public key of a node cannot be read")
                assert isinstance(await certify(peer), Certified)


async def heart(gate: Gate, token: bytes) -> trio.SocketStream:
    stream = await trio.open_tcp_stream(*gate.heart)
    await stream.send_all(token)
    return stream


async def test_the_heartbeat_of_a_certified_node_is_taken_once() -> None:
    async with gates() as (system, gate, config):
        with gate.expect("n0#0") as ticket:
            async with await heart(gate, ticket.heart_token) as early:
                assert await early.receive_some() == b""  # it has no certificate yet
            async with connect(system, gate.url, object, token=ticket.token, config=config) as peer:
                certified = await certify(peer)
                stream = await heart(gate, certified.heart)
                await ticket.came.wait()
                async with await heart(gate, certified.heart) as again:
                    assert await again.receive_some() == b""
        assert ticket.heart is not None
        with ticket.heart:
            await stream.send_all(b"beat")
            await trio.lowlevel.wait_readable(ticket.heart)
            assert ticket.heart.recv(10) == b"beat"
        await stream.aclose()


@pytest.mark.parametrize("shown", [b"", b"short", b"x" * 32])
async def test_a_connection_without_the_token_of_a_heartbeat_is_closed(shown: bytes) -> None:
    async with gates() as (_, gate, _), await heart(gate, shown) as stream:
        await stream.send_eof()
        assert await stream.receive_some() == b""


async def test_connections_that_show_nothing_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark_gate, "UNPROVED", 2)
    async with gates() as (_, gate, _):
        silent = [await heart(gate, b"") for _ in range(2)]
        await trio.testing.wait_all_tasks_blocked()
        async with await heart(gate, b"") as third:
            assert await third.receive_some() == b""
        for stream in silent:
            await stream.aclose()


async def test_ports_are_taken_from_a_range() -> None:
    with socket.socket() as taken, socket.socket() as also:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"127.0.0.1:{number}"):
            async with gates(ports=range(number, number + 1)):
                pass
        also.bind(("127.0.0.1", 0))
        also.listen()
        other = also.getsockname()[1]
        tried: list[int] = []

        @asynccontextmanager
        async def listen(port: int) -> AsyncIterator[int]:
            tried.append(port)
            if port in (number, other):
                raise ConfigurationError(f"{port} is taken")
            yield port

        low, high = sorted((number, other))
        with pytest.raises(ConfigurationError, match=f"no port from {low} to {high} is free: give `ports` a larger"):
            async with listening_in(range(low, high + 1, high - low), listen):
                pass
        assert tried == [low, high]
        async with listening_in(range(low, high + 2), listen) as found:
            assert found not in (low, high)


class TwoAddresses(trio.abc.HostnameResolver):
    """Knows one name, of a machine with two addresses."""

    async def getaddrinfo(
        self, host: Any, port: Any, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0
    ) -> Any:
        assert host in (b"desk.test", "desk.test")
        kind = socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, ""
        return [(*kind, (f"127.0.0.{last}", int(port))) for last in (1, 2)]

    async def getnameinfo(self, sockaddr: Any, flags: int) -> Any:
        raise NotImplementedError


async def test_of_a_name_with_two_addresses_heartbeats_use_the_first_alone() -> None:
    trio.socket.set_custom_hostname_resolver(TwoAddresses())
    authority, key = Authority(), MemberKey()
    with key.with_certificate(authority.sign(key.public, DRIVER)) as certificate:
        serves = PeerConfig(carrier=carrier_settings("tls", authority.certificate, certificate=certificate))
        async with (
            ActorSystem() as system,
            open_gate(system, authority, serves, "tls", "desk.test", "desk.test", range(1)) as gate,
        ):
            _, port = gate.heart
            await (await trio.open_tcp_stream("127.0.0.1", port)).aclose()
            with pytest.raises(OSError, match=f"127.0.0.2:{port}"):
                await trio.open_tcp_stream("127.0.0.2", port)
