"""The promises of every carrier, kept by QUIC on the simulated network and on real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import trio
from tests.simnet import SimNet
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.transports.carriers.contracts import ByteStream, Connection, Incoming, Listener, MessageStream, Stream
from levada.transports.quic import QuicConnection, dial, listen
from levada.transports.testing import CarrierCheck, CarrierTraits, carrier_checks

# A stopped reader: the window, what waits above the watermark at the sender, and one write.
BUFFERED = (1 << 20) + (256 << 10) + (1 << 20)


async def a_virtual_second() -> None:
    await trio.sleep(1)


def cut(one: ByteStream | MessageStream | Connection, other: ByteStream | MessageStream | Connection) -> None:
    assert isinstance(one, QuicConnection)
    one._endpoint._port._net.partition("client", "server")  # type: ignore[attr-defined]  # the factory made it a SimPort


SIMULATED = CarrierTraits(
    shape="connection",
    buffered=BUFFERED,
    streams=10_000,
    max_open=128,
    datagram_queue=512,
    settle=a_virtual_second,
    cut=cut,
    timeout=300,
)


async def a_moment() -> None:
    await wait_all_tasks_blocked(0.02)


LOOPBACK = attrs.evolve(SIMULATED, settle=a_moment, cut=None, streams=1_000, timeout=30)


@pytest.mark.ci
@pytest.mark.parametrize("check", carrier_checks(SIMULATED), ids=str)
async def test_simulated(check: CarrierCheck, lab: Any, autojump_clock: MockClock) -> None:
    @asynccontextmanager
    async def pair() -> AsyncIterator[tuple[Connection, Connection]]:
        async with lab.connected(SimNet(1)) as ends:
            yield ends.client, ends.server

    await check(pair)


@pytest.mark.loopback
@pytest.mark.parametrize("check", carrier_checks(LOOPBACK), ids=str)
async def test_loopback(check: CarrierCheck, lab: Any) -> None:
    @asynccontextmanager
    async def pair() -> AsyncIterator[tuple[Connection, Connection]]:
        async with listen("quic://127.0.0.1:0", lab.server()) as listener, trio.open_nursery() as nursery:
            accepted: list[QuicConnection] = []

            async def accept() -> None:
                accepted.append((await listener.accept()).accept())

            nursery.start_soon(accept)
            async with dial(listener.url, lab.client(server_name="localhost")) as client:
                yield client, accepted[0]

    await check(pair)


@pytest.mark.loopback
@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
async def test_a_client_knows_the_address_from_which_it_reaches_its_server(host: str, lab: Any) -> None:
    async with listen(f"quic://{host}:0", lab.server()) as listener, trio.open_nursery() as nursery:

        async def accept() -> None:
            (await listener.accept()).accept()

        nursery.start_soon(accept)
        async with dial(listener.url, lab.client(server_name="localhost")) as client:
            address, _, port = client.info.local.rpartition(":")
            assert address == host
            assert int(port) > 0


async def test_the_classes_fit_the_contracts(lab: Any, autojump_clock: MockClock) -> None:
    async with lab.connected() as ends:
        assert isinstance(ends.client, Connection)
        assert isinstance(ends.listener, Listener)
        assert isinstance(await ends.client.open_stream(), Stream)

    async def look(listener: Any) -> None:
        assert isinstance(await listener.accept(), Incoming)

    async with lab.listening(net := SimNet(1)) as listener, trio.open_nursery() as nursery:
        nursery.start_soon(look, listener)
        with trio.move_on_after(1):
            async with lab.dialling(net):
                pass
