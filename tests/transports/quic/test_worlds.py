"""QUIC in simulated worlds: a real handshake over datagrams that are lost, late and cut off; and seeds that repeat what happens."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import trio
from tests.transports.quic.conftest import Certificate
from tests.transports.quic.worlds import FAULTS, Echoes

from levada.framework.errors import ConfigurationError, ConnectionLost
from levada.framework.testing.simulation import Faults, World, simulate
from levada.transports.quic import QuicConfig, QuicConnection, QuicListener, dial, listen

ROOT = Path(__file__).parents[3]
MACHINES = ["server", "client"]


def test_data_arrives_over_datagrams_that_are_lost_and_overtake_each_other(ecdsa_certificate: Certificate) -> None:
    echoes = Echoes(ecdsa_certificate)
    simulate(echoes.run, seeds=[2], machines=MACHINES, faults=Faults(strikes=0, loss=0.3))
    assert echoes.errors == []


def test_a_client_whose_server_was_killed_connects_again(ecdsa_certificate: Certificate) -> None:
    echoes = Echoes(ecdsa_certificate)

    async def scenario(world: World) -> None:
        world.network.later(2.5, lambda: world["echo"].kill())
        await echoes.run(world)

    simulate(scenario, seeds=[1], machines=MACHINES)
    # The new process has the old one's secret, so it can tell the client that it knows nothing of the connection.
    assert [re.sub(r"^.*: ", "", error) for error in echoes.errors] == ["stateless reset"]


@pytest.mark.parametrize("one_way", [False, True])
def test_a_short_cut_is_bridged_and_a_long_one_ends_the_connection(
    one_way: bool, ecdsa_certificate: Certificate
) -> None:
    echoes = Echoes(ecdsa_certificate)

    async def scenario(world: World) -> None:
        world.network.later(2.5, lambda: world.cut("client", "server", one_way=one_way, seconds=2))
        world.network.later(7.5, lambda: world.cut("client", "server", one_way=one_way, seconds=8))
        await echoes.run(world)

    simulate(scenario, seeds=[1], machines=MACHINES)
    assert echoes.errors[0].startswith("nothing from server:4433 within the idle timeout")
    assert all("no handshake within 3.0 s" in error for error in echoes.errors[1:])


def test_names_and_certificates_are_checked(ecdsa_certificate: Certificate) -> None:
    server = QuicConfig(certificate=ecdsa_certificate.certificate, key=ecdsa_certificate.private_key)
    client = QuicConfig(ca=ecdsa_certificate.certificate)

    async def main() -> None:
        async with (
            listen("quic://localhost:0", server) as listener,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(accept_all, listener)
            assert listener.url == "quic://localhost:49152"
            async with dial(listener.url, client) as connection:
                assert connection.info.peer_subject == "CN=server"
            with pytest.raises(ConfigurationError, match="another process or listener has this address"):
                async with listen("quic://0.0.0.0:49152", server):
                    pass
            for url, config, why in (
                ("quic://machine:49152", client, "'machine'"),  # the certificate is for other names
                ("quic://localhost:49152", QuicConfig(), "self-signed certificate"),
                ("quic://localhost:1", client, "no handshake within 10.0 s"),
                ("quic://nowhere:1", client, "no machine has the name 'nowhere'"),
            ):
                with pytest.raises(ConnectionLost, match=re.escape(why)):
                    async with dial(url, config):
                        pass
            nursery.cancel_scope.cancel()

    async def accept_all(listener: QuicListener) -> None:
        async with trio.open_nursery() as nursery:
            while True:
                nursery.start_soon(shake_hands, (await listener.accept()).accept())

    async def shake_hands(connection: QuicConnection) -> None:
        try:
            async with connection:
                await connection.handshake()
                await trio.sleep_forever()
        except ConnectionLost:
            pass

    async def scenario(world: World) -> None:
        assert await (await world.start("main", main)).wait() == 0

    simulate(scenario, seeds=[1])


@pytest.mark.ci
def test_all_data_comes_back_whatever_strikes(ecdsa_certificate: Certificate) -> None:
    echoes = Echoes(ecdsa_certificate)
    done = simulate(echoes.run, seeds=range(20), machines=MACHINES, faults=FAULTS, limit=300.0)
    assert done.strikes > 40
    assert echoes.errors


@pytest.mark.ci
def test_the_same_seed_repeats_sizes_and_times_in_another_process_with_other_keys(
    ecdsa_certificate: Certificate,
) -> None:
    def lines(hash_seed: int) -> list[str]:
        ended = subprocess.run(
            [sys.executable, "-m", "tests.transports.quic.worlds", str(ecdsa_certificate.certificate.parent), "0", "8"],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout.splitlines()

    first = lines(1)
    assert len({line.split()[1] for line in first}) == 8
    assert lines(2) == first
