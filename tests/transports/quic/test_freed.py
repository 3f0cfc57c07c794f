"""What has ended is gone at once: nothing of a connection waits for the garbage collector, which stays off here."""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import trio
from tests.simnet import SimNet
from trio.testing import MockClock

from levada.framework.errors import CarrierError, ConnectionLost
from levada.transports.quic import QuicConnection, QuicListener


@pytest.fixture(autouse=True)
def without_collector(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(
        logging.CRITICAL, "quic"
    )  # aioquic logs errors, and `caplog` would keep them with all that they came through
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def alive() -> Counter[str]:
    """Count the objects of QUIC by their classes."""
    modules = ("levada.transports.quic", "aioquic")
    kinds = [type(thing) for thing in gc.get_objects()]
    return Counter(kind.__qualname__ for kind in kinds if str(kind.__module__).startswith(modules))


async def echo(listener: QuicListener) -> None:
    async def one(connection: QuicConnection) -> None:
        try:
            while True:
                stream = await connection.accept_stream()
                data = b""
                while more := await stream.receive_some():
                    data += more
                stream.send_nowait(data, fin=True)
        except CarrierError:
            pass

    async with trio.open_nursery() as nursery:
        while True:
            nursery.start_soon(one, (await listener.accept()).accept())


async def use(connection: QuicConnection) -> None:
    stream = await connection.open_stream()
    stream.send_nowait(b"x" * 50_000, fin=True)
    while await stream.receive_some():
        pass
    (await connection.open_stream()).send_nowait(b"y" * 50_000)
    await trio.sleep(0.05)


@pytest.mark.ci
@pytest.mark.parametrize("end", ["closed", "lost", "refused", "uncertified", "broken"])
async def test_connections_leave_nothing_behind(lab: Any, autojump_clock: MockClock, end: str) -> None:
    net = SimNet(1)
    asks = {"client_certificates": "required", "ca": lab.certificate.certificate} if end == "uncertified" else {}

    async def once() -> None:
        if end == "uncertified":
            with pytest.raises(ConnectionLost):
                async with lab.dialling(net) as connection:
                    await connection.accept_stream()
            return
        if end == "refused":
            with pytest.raises(ConnectionLost):
                async with lab.dialling(net, alpn=("another",)):
                    pass
            return
        async with lab.dialling(net) as connection:
            await use(connection)
            if end == "lost":
                net.partition("client", "server")
                assert (await connection.wait_closed()).lost
                net.heal()
            elif end == "broken":
                connection.fail("no reason")

    async with lab.listening(net, **asks) as listener, trio.open_nursery() as nursery:
        nursery.start_soon(echo, listener)
        await once()
        await trio.sleep(60)
        before = alive()
        for _ in range(3):
            await once()
        await trio.sleep(60)
        assert alive() - before == Counter()
        nursery.cancel_scope.cancel()


async def test_streams_that_nobody_accepted_leave_with_their_connection(lab: Any, autojump_clock: MockClock) -> None:
    """They can be taken after its end, and then tell how it ended; they do not keep it."""
    before = alive()
    async with lab.connected() as ends:
        server = ends.server
        for _ in range(3):
            (await ends.client.open_stream()).send_nowait(b"x" * 5_000)
        await trio.sleep(0.1)
        ends.client.close(7, "enough")
        await trio.sleep(30)
        assert server not in ends.listener.endpoint.connections
        stream = await server.accept_stream()
        assert await stream.receive_some() == b"x" * 5_000
        with pytest.raises(ConnectionLost, match="code 7: enough"):
            await stream.receive_some()
    del ends, server, stream
    assert alive() - before == Counter()


async def test_endpoints_leave_nothing_behind(lab: Any, autojump_clock: MockClock) -> None:
    """Also in the midst of a transfer, and with clients that wait to be accepted."""
    before = alive()
    net = SimNet(1)
    async with lab.listening(net) as listener, trio.open_nursery() as nursery:

        async def dial(n: int) -> None:
            async with lab.dialling(net, host=f"host{n}") as connection:
                (await connection.open_stream()).send_nowait(b"x" * 200_000)
                await trio.sleep_forever()

        for n in range(3):
            nursery.start_soon(dial, n)
        (await listener.accept()).accept()
        await trio.sleep(0.1)
        assert listener.unfinished == 2
        nursery.cancel_scope.cancel()
    del listener, nursery
    assert alive() - before == Counter()
