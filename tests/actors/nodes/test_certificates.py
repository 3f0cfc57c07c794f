"""Certificates of a fleet: who may be whom, over the carriers themselves."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import pytest
import trio

pytest.importorskip("cryptography")

from levada.actors.aqueduct import PeerConfig, connect, serve
from levada.actors.nodes.certificates import (
    Authority,
    Carrier,
    MemberKey,
    carrier_settings,
    member_name,
    node_id_of,
)
from levada.actors.nodes.messages import Member, MemberState
from levada.actors.nodes.node_side import NodeSide
from levada.actors.nodes.spark_links import NEWS, SparkLinks
from levada.framework import ActorSystem
from levada.framework.errors import ConfigurationError, ConnectionLost
from levada.framework.testing.simulation import World, simulate

pytestmark = pytest.mark.loopback

A, B = b"A" * 16, b"B" * 16


async def meets(
    carrier: Carrier, shown: str | None, authority: bytes, wanted: bytes, client: str | None
) -> bytes | None:
    """Have a client dial a member; return the node id that the listener sees."""
    seen: list[bytes | None] = []

    async def admit(credentials: Any) -> Any:
        from levada.framework import Identity

        seen.append(node_id_of(credentials.info.peer_names))
        return Identity("member")

    async def nothing(message: object) -> None: ...

    serves = PeerConfig(carrier=carrier_settings(carrier, authority, certificate=shown, clients="required"))
    dials = PeerConfig(carrier=carrier_settings(carrier, authority, certificate=client, dials=wanted))
    scheme = "aqueduct" if carrier == "quic" else "aqueduct+tls"
    async with (
        ActorSystem() as system,
        serve(system, f"{scheme}://127.0.0.1:0", nothing, object, config=serves, authenticate=admit) as listener,
        connect(system, listener.url, object, config=dials),
    ):
        pass
    return seen[0]


@pytest.mark.parametrize("carrier", ["tls", "quic"])
async def test_members_of_one_fleet_know_each_other_by_node_id(carrier: Carrier) -> None:
    if carrier == "quic":
        pytest.importorskip("aioquic")
    authority, first, second = Authority(), MemberKey(), MemberKey()
    with (
        first.with_certificate(authority.sign(first.public, A)) as of_a,
        second.with_certificate(authority.sign(second.public, B)) as of_b,
    ):
        assert await meets(carrier, of_a, authority.certificate, A, of_b) == B
        with pytest.raises(ConnectionLost):
            await meets(carrier, of_a, authority.certificate, B, of_b)
        with pytest.raises(ConnectionLost):
            await meets(carrier, of_a, authority.certificate, A, None)


async def test_a_certificate_of_another_fleet_is_no_proof() -> None:
    authority, other, first, second = Authority(), Authority(), MemberKey(), MemberKey()
    with (
        first.with_certificate(authority.sign(first.public, A)) as of_a,
        second.with_certificate(other.sign(second.public, B)) as of_b,
    ):
        with pytest.raises(ConnectionLost):
            await meets("tls", of_a, authority.certificate, A, of_b)
        with pytest.raises(ConnectionLost):
            await meets("tls", of_a, other.certificate, A, of_b)


@pytest.mark.parametrize("public", [b"", b"no key", bytes(1 << 16)])
def test_a_key_that_cannot_be_read_is_refused_with_a_text(public: bytes) -> None:
    with pytest.raises(ConfigurationError, match="the public key of a node"):
        Authority().sign(public, A)


def test_a_key_of_another_kind_is_refused() -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ed25519

    other = ed25519.Ed25519PrivateKey.generate().public_key()
    der = other.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    with pytest.raises(ConfigurationError, match=r"not a P-256 key"):
        Authority().sign(der, A)


def test_names_of_members_and_nothing_else_are_node_ids() -> None:
    name = f"DNS:{member_name(A)}"
    assert node_id_of((name,)) == A
    for names in ((), (name, name), ("DNS:localhost",), (name + ".example.org",), (name.upper(),)):
        assert node_id_of(names) is None


def test_the_file_of_a_key_is_gone_with_its_block() -> None:
    authority, key = Authority(), MemberKey()
    before = set(os.listdir("/proc/self/fd"))
    with key.with_certificate(authority.sign(key.public, A)) as path:
        with open(path) as file:
            assert file.read().count("BEGIN") == 2
        assert os.stat(path).st_mode & 0o777 == 0o600
    assert set(os.listdir("/proc/self/fd")) == before
    assert not os.path.exists(path)


@pytest.mark.parametrize(
    ("state", "announced", "is_driver", "admitted"),
    [
        (None, 0.0, True, True),
        (None, 0.0, False, False),
        (MemberState.UP, 0.0, False, True),
        (MemberState.STARTING, 1.0, False, True),
        (MemberState.UP, 2 * NEWS, False, False),
        (MemberState.DOWN, 0.0, False, False),
    ],
)
def test_a_certificate_admits_a_member_as_long_as_it_is_one(
    state: MemberState | None, announced: float, is_driver: bool, admitted: bool
) -> None:
    """The news of a new member may come after its first connection."""
    authority, first, second = Authority(), MemberKey(), MemberKey()

    def links(certificate: str) -> SparkLinks:
        return SparkLinks(
            kind="tls",
            authority=authority.certificate,
            certificate=certificate,
            driver=B if is_driver else b"D" * 16,
            bind="machine",
            ports=range(4000, 4001),
        )

    async def main() -> None:
        async with ActorSystem() as system, ActorSystem() as other, trio.open_nursery() as nursery:
            ours, theirs = NodeSide(system, A), NodeSide(other, B)
            ours.links["aqueduct+tls"], theirs.links["aqueduct+tls"] = links(of_a), links(of_b)

            async def announce(member: Member) -> None:
                await trio.sleep(announced)
                ours.directory.change(member)

            async with ours.listen("aqueduct+tls://") as listener:
                if state is not None:
                    nursery.start_soon(announce, Member("n1", 1, B, state, 0, "", "", 0.0, 0))
                with nullcontext() if admitted else pytest.raises(ConnectionLost, match="not a member of the fleet"):
                    async with connect(other, listener.url, object, config=theirs.config(links(of_b).carrier(A))):
                        pass

    async def scenario(world: World) -> None:
        await (await world.start("members", main)).wait()

    with (
        first.with_certificate(authority.sign(first.public, A)) as of_a,
        second.with_certificate(authority.sign(second.public, B)) as of_b,
    ):
        simulate(scenario, seeds=[1])
