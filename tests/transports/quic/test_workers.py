"""Several workers at one port, each with connections of its own: the seam at which they pass packets on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import trio
from tests.simnet import SimAddress, SimNet, SimPort
from trio.testing import MockClock

from levada.transports.quic import QuicConnection, QuicEndpoint, QuicListener, QuicStream, dial


class SharedPort:
    """One worker's view of a port that several have open; the kernel gives each datagram to one of them."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self.send_queue, self._queue = trio.open_memory_channel[list[tuple[bytes, SimAddress]]](1_000)

    @property
    def address(self) -> SimAddress:
        return self._kernel.port.address

    async def receive(self) -> list[tuple[bytes, SimAddress]]:
        return await self._queue.receive()

    def send(self, datagrams: Sequence[tuple[bytes, SimAddress]]) -> int:
        return self._kernel.port.send(datagrams)

    async def writable(self) -> None:
        await self._kernel.port.writable()

    def close(self) -> None:
        self.send_queue.close()


class Kernel:
    """Gives what arrives at a port to the worker of its choice."""

    def __init__(self, port: SimPort) -> None:
        self.port = port
        self.ports = [SharedPort(self) for _ in range(2)]
        self.choice = 0

    async def run(self) -> None:
        while True:
            batch = await self.port.receive()
            self.ports[self.choice].send_queue.send_nowait(batch)


async def echo(listener: QuicListener) -> None:
    async def one(connection: QuicConnection) -> None:
        while True:
            stream = await connection.accept_stream()
            stream.send_nowait(await read_all(stream), fin=True)

    async with trio.open_nursery() as nursery:
        while True:
            nursery.start_soon(one, (await listener.accept()).accept())


async def read_all(stream: QuicStream) -> bytes:
    parts = []
    while data := await stream.receive_some():
        parts.append(data)
    return b"".join(parts)


async def ask(connection: QuicConnection, data: bytes) -> bytes:
    stream = await connection.open_stream()
    stream.send_nowait(data, fin=True)
    return await read_all(stream)


async def test_a_connection_lives_on_when_its_packets_come_to_another_worker(
    lab: Any, autojump_clock: MockClock
) -> None:
    net = SimNet(1)
    kernel = Kernel(net.port("server", 4433))
    configs = [lab.server(worker=number, secret=b"s" * 32) for number in (1, 2)]
    async with (
        QuicEndpoint(kernel.ports[0], configs[0]) as one,
        QuicEndpoint(kernel.ports[1], configs[1]) as two,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(kernel.run)
        workers = [one, two]
        for endpoint in workers:
            endpoint.foreign = lambda number, data, address: workers[number - 1].take_in([(data, address)])
            nursery.start_soon(echo, QuicListener(endpoint))
        async with dial("quic://server:4433", lab.client(), port=net.port("client")) as first:
            assert await ask(first, b"to the first") == b"to the first"
            await trio.sleep(1)
            kernel.choice = 1
            assert await ask(first, b"x" * 50_000) == b"x" * 50_000
            async with dial("quic://server:4433", lab.client(), port=net.port("client")) as second:
                assert await ask(second, b"to the second") == b"to the second"
                await trio.sleep(1)
                kernel.choice = 0
                assert await ask(second, b"still") == b"still"
                assert [len(endpoint.connections) for endpoint in workers] == [1, 1]
        assert workers[1].counters["foreign"] > 20
        assert workers[0].counters["foreign"] > 0
        nursery.cancel_scope.cancel()
