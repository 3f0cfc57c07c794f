"""The processes of ``levada bench rsocket``: a server and a client of each contender, and a raw echo.

``python -m benchmarks._rsocket_peers CONTENDER server`` prints its port and serves until it is killed; ``… CONTENDER client PORT KEY COUNT
SERVER`` does one workload and prints how many operations it made in a second of CPU time of both processes, where ``SERVER`` is the id of
the other one. In each protocol the metadata is the route.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from typing import Any

import trio
from benchmarks._measure import cpu_of

from levada.actors.rsocket import ClientConfig, CoreConfig, Payload, Request, connect, serve
from levada.framework import ActorSystem

DATA = bytes(64)
ITEM = bytes(256)
WINDOW = 64

Clock = Callable[[], float]
"""Seconds of CPU time of both processes; outside Linux, of the wall clock."""
Send = Callable[[bytes], Awaitable[object]]


def clock_of(server: int) -> Clock:
    if sys.platform != "linux":
        return time.perf_counter
    return lambda: time.process_time() + cpu_of(server)


async def one_at_a_time(send: Send, count: int) -> None:
    for _ in range(count):
        await send(DATA)


# ---------------------------------------------------------------- levada


class Server:
    counted = 0

    async def handle(self, request: Request) -> Any:
        match request.route:
            case "echo":
                return request.payload
            case "items":
                return self.items(int(request.data))
            case "count":
                return b"%d" % self.counted
            case _:
                self.counted += 1
                return None

    async def items(self, count: int) -> AsyncIterator[Payload]:
        item = Payload(ITEM)
        for _ in range(count):
            yield item


async def levada_server() -> None:
    async with ActorSystem() as system, serve(system, "rsocket+tcp://127.0.0.1:0", Server().handle) as listener:
        print(listener.url.rpartition(":")[2], flush=True)
        await trio.sleep_forever()


async def levada_client(port: int, key: str, count: int, clock: Clock) -> float:
    config = ClientConfig(core=CoreConfig(metadata_mime_type="text/plain"))
    async with ActorSystem() as system, connect(system, f"rsocket+tcp://127.0.0.1:{port}", config=config) as peer:

        async def echo(data: bytes) -> object:
            return await peer.request_response(data, route="echo")

        began = clock()
        if key == "rr1":
            await one_at_a_time(echo, count)
        elif key == "rr64":
            async with trio.open_nursery() as nursery:
                for _ in range(64):
                    nursery.start_soon(one_at_a_time, echo, count // 64)
        elif key == "items":
            async with await peer.request_stream(b"%d" % count, route="items", window=WINDOW) as receiver:
                got = 0
                async for _ in receiver:
                    got += 1
            assert got == count
        else:
            for _ in range(count):
                await peer.fire_and_forget(DATA, route="fnf")
            while int((await peer.request_response(b"", route="count")).data) < count:
                pass
        return count / (clock() - began)


# ---------------------------------------------------------------- raw echo


async def echo_server() -> None:
    async def echo(stream: trio.SocketStream) -> None:
        while data := await stream.receive_some(65_536):
            await stream.send_all(data)

    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    print(listeners[0].socket.getsockname()[1], flush=True)
    await trio.serve_listeners(echo, listeners)


async def echo_client(port: int, key: str, count: int, clock: Clock) -> float:
    stream = await trio.open_tcp_stream("127.0.0.1", port)

    async def send(data: bytes) -> None:
        await stream.send_all(data)
        await stream.receive_some(65_536)

    began = clock()
    await one_at_a_time(send, count)
    return count / (clock() - began)


# ---------------------------------------------------------------- PyPI rsocket


async def pypi_server() -> None:
    from rsocket.helpers import create_future, utf8_decode
    from rsocket.payload import Payload as Their
    from rsocket.request_handler import BaseRequestHandler
    from rsocket.rsocket_server import RSocketServer
    from rsocket.streams.stream_from_generator import StreamFromGenerator
    from rsocket.transports.tcp import TransportTCP

    class Handler(BaseRequestHandler):  # type: ignore[misc]  # the package has no types
        counted = 0

        async def request_response(self, payload: Any) -> Any:
            if utf8_decode(payload.metadata) == "count":
                return create_future(Their(b"%d" % self.counted))
            return create_future(payload)

        async def request_fire_and_forget(self, payload: Any) -> None:
            self.counted += 1

        async def request_stream(self, payload: Any) -> Any:
            count = int(payload.data or 0)

            def items() -> Generator[Any, None, None]:
                item = Their(ITEM)
                for number in range(count):
                    yield item, number == count - 1

            return StreamFromGenerator(items)

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        RSocketServer(TransportTCP(reader, writer, read_buffer_size=65_536), handler_factory=Handler)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def pypi_client(port: int, key: str, count: int, clock: Clock) -> float:
    from reactivestreams.subscriber import DefaultSubscriber
    from rsocket.helpers import single_transport_provider
    from rsocket.payload import Payload as Their
    from rsocket.rsocket_client import RSocketClient
    from rsocket.transports.tcp import TransportTCP

    class Items(DefaultSubscriber):  # type: ignore[misc]  # the package has no types
        """Tops its window up at half, as ours does."""

        got = taken = 0

        def __init__(self) -> None:
            super().__init__()
            self.done = asyncio.Event()

        def on_next(self, value: Any, is_complete: bool = False) -> None:
            self.got += 1
            self.taken += 1
            if self.taken == WINDOW // 2 and not is_complete:
                self.subscription.request(self.taken)  # pyright: ignore[reportOptionalMemberAccess]
                self.taken = 0
            if is_complete:
                self.done.set()

        def on_complete(self) -> None:
            self.done.set()

    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    transport = TransportTCP(reader, writer, read_buffer_size=65_536)
    async with RSocketClient(single_transport_provider(transport)) as client:

        async def echo(data: bytes) -> object:
            return await client.request_response(Their(data, b"echo"))

        began = clock()
        if key == "rr1":
            await one_at_a_time(echo, count)
        elif key == "rr64":
            await asyncio.gather(*(one_at_a_time(echo, count // 64) for _ in range(64)))
        elif key == "items":
            items = Items()
            requested: Any = client.request_stream(Their(b"%d" % count, b"items"))
            requested.initial_request_n(WINDOW).subscribe(items)
            await items.done.wait()
            assert items.got == count
        else:
            for _ in range(count):
                client.fire_and_forget(Their(DATA, b"fnf"))
            while int((await client.request_response(Their(b"", b"count"))).data or 0) < count:
                pass
        return count / (clock() - began)


ROLES: dict[tuple[str, str], Any] = {
    ("levada", "server"): levada_server,
    ("levada", "client"): levada_client,
    ("echo", "server"): echo_server,
    ("echo", "client"): echo_client,
    ("rsocket", "server"): pypi_server,
    ("rsocket", "client"): pypi_client,
}


def main(contender: str, role: str, *arguments: str) -> None:
    """Be one of the processes."""
    if hasattr(os, "sched_setaffinity"):
        # Both on one core, to compare work. To wake an idle core costs more than a request on a virtual machine,
        # and a contender just fast enough to keep the core awake would not pay for that (the echo: 5 times as fast).
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    function = ROLES[contender, role]
    run = asyncio.run if contender == "rsocket" else None
    if role == "server":
        trio.run(function) if run is None else run(function())
        return
    port, key, count, clock = int(arguments[0]), arguments[1], int(arguments[2]), clock_of(int(arguments[3]))
    print(trio.run(function, port, key, count, clock) if run is None else run(function(port, key, count, clock)))


if __name__ == "__main__":
    main(*sys.argv[1:])
