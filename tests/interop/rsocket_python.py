"""A program on PyPI's ``rsocket`` that serves, or calls, the contract of ``levada interop rsocket``; run by `test_rsocket_peers`.

``rsocket_python.py server tcp|ws`` prints ``LISTENING <port>`` and serves until its standard input ends.
``rsocket_python.py client tcp|ws PORT`` calls every route and prints what came back, a JSON line for each.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Awaitable
from datetime import timedelta
from typing import Any

from reactivestreams.publisher import Publisher
from reactivestreams.subscriber import DefaultSubscriber, Subscriber
from reactivestreams.subscription import Subscription
from rsocket.awaitable.awaitable_rsocket import AwaitableRSocket
from rsocket.helpers import single_transport_provider
from rsocket.payload import Payload
from rsocket.request_handler import BaseRequestHandler
from rsocket.rsocket_client import RSocketClient
from rsocket.rsocket_server import RSocketServer
from rsocket.streams.error_stream import ErrorStream
from rsocket.streams.stream_from_generator import StreamFromGenerator
from rsocket.transports.tcp import TransportTCP

FRAGMENT = 64 * 1024
BIG = 5_000_000


def route(payload: Payload) -> str:
    return (payload.metadata or b"").decode()


def numbers(count: int) -> StreamFromGenerator:
    return StreamFromGenerator(lambda: ((Payload(b"%d" % i), i == count - 1) for i in range(count)))


def blobs(text: str) -> StreamFromGenerator:
    count, size = map(int, text.split())
    return StreamFromGenerator(lambda: ((Payload(bytes(size)), i == count - 1) for i in range(count)))


class Returning(StreamFromGenerator, DefaultSubscriber):  # type: ignore[misc]  # the library is untyped
    """Gives back what the requester of a channel sends."""

    def __init__(self, first: Payload) -> None:
        self.waiting: asyncio.Queue[tuple[Payload, bool]] = asyncio.Queue()
        self.waiting.put_nowait((first, False))
        super().__init__(lambda: iter(()))

    async def _start_generator(self) -> None:
        self._generator = iter(())

    async def _generate_next_n(self, n: int) -> AsyncIterator[tuple[Payload, bool]]:
        for _ in range(n):
            payload, last = await self.waiting.get()
            yield payload, last
            if last:
                return

    def on_subscribe(self, subscription: Subscription) -> None:
        subscription.request(0x7FFFFFFF)

    def on_next(self, value: Payload, is_complete: bool = False) -> None:
        self.waiting.put_nowait((value, is_complete))

    def on_complete(self) -> None:
        self.waiting.put_nowait((Payload(None, None), True))

    def _cancel_generator(self) -> None:
        pass


class Contract(BaseRequestHandler):  # type: ignore[misc]
    """The routes; one object for each connection, the counts are the program's."""

    slow = 0
    forgotten = 0

    async def request_response(self, payload: Payload) -> Awaitable[Payload]:
        future: asyncio.Future[Payload] = asyncio.get_running_loop().create_future()
        name = route(payload)
        if name == "echo":
            future.set_result(payload)
        elif name == "fail":
            future.set_exception(RuntimeError((payload.data or b"").decode()))
        elif name == "slow":
            Contract.slow += 1
            future.add_done_callback(Contract.slow_ended)
        elif name == "slow-open":
            future.set_result(Payload(b"%d" % Contract.slow))
        elif name == "fnf-count":
            future.set_result(Payload(b"%d" % Contract.forgotten))
        elif name == "len":
            future.set_result(Payload(b"%d" % len(payload.data or b"")))
        else:
            future.set_exception(RuntimeError(f"unknown route: {name}"))
        return future

    @staticmethod
    def slow_ended(_: object) -> None:
        Contract.slow -= 1

    async def request_fire_and_forget(self, payload: Payload) -> None:
        if route(payload) == "fnf":
            Contract.forgotten += 1

    async def request_stream(self, payload: Payload) -> Publisher:
        name, text = route(payload), (payload.data or b"").decode()
        if name == "count":
            return numbers(int(text))
        if name == "blob":
            return blobs(text)
        if name == "fail":
            return ErrorStream(RuntimeError(text))
        return ErrorStream(RuntimeError(f"unknown route: {name}"))

    async def request_channel(self, payload: Payload) -> tuple[Publisher | None, Subscriber | None]:
        returning = Returning(payload)
        return returning, returning


async def serve(carrier: str) -> None:
    options = {"handler_factory": Contract, "fragment_size_bytes": FRAGMENT}
    if carrier == "tcp":

        def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            RSocketServer(TransportTCP(reader, writer, read_buffer_size=FRAGMENT), **options)

        server = await asyncio.start_server(accepted, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
    else:
        from aiohttp import web
        from rsocket.transports.aiohttp_websocket import websocket_handler_factory

        app = web.Application()
        app.add_routes([web.get("/", websocket_handler_factory(**options))])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
    print(f"LISTENING {port}", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


@contextlib.asynccontextmanager
async def client(carrier: str, port: int) -> AsyncIterator[Any]:
    options = {
        "metadata_encoding": "text/plain",
        "data_encoding": "application/octet-stream",
        "fragment_size_bytes": FRAGMENT,
        "keep_alive_period": timedelta(seconds=1),
        "max_lifetime_period": timedelta(seconds=30),
    }
    if carrier == "tcp":
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        transport = TransportTCP(reader, writer, read_buffer_size=FRAGMENT)
        async with RSocketClient(single_transport_provider(transport), **options) as connected:
            yield connected
    else:
        from rsocket.transports.aiohttp_websocket import websocket_client

        async with websocket_client(f"ws://127.0.0.1:{port}/", **options) as connected:
            yield connected


def say(name: str, got: object) -> None:
    print(json.dumps({"check": name, "got": got}), flush=True)


async def failure(answer: Awaitable[object]) -> str:
    try:
        await answer
    except Exception as error:  # noqa: BLE001  # whatever the library raises is the result
        return str(error)
    return "no error"


async def call(carrier: str, port: int) -> None:
    async with client(carrier, port) as connected:
        peer = AwaitableRSocket(connected)

        async def ask(name: bytes, data: bytes = b"") -> str:
            return bytes((await peer.request_response(Payload(data, name))).data).decode()

        async def settled(name: bytes, wanted: str) -> str:
            """Ask until the answer is the wanted one: the server counts in tasks of its own."""
            got = ""
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(5):
                    while got != wanted:
                        got = await ask(name)
            return got

        echoed = await peer.request_response(Payload(b"hello", b"echo"))
        say("echo", [bytes(echoed.data).decode(), bytes(echoed.metadata).decode()])
        for limit in (7, 0x7FFFFFFF):
            items = await peer.request_stream(Payload(b"100", b"count"), limit_rate=limit)
            say(f"count {limit}", [int(item.data) for item in items])
        further = StreamFromGenerator(lambda: ((Payload(b"%d" % i), i == 9) for i in range(1, 10)))
        items = await peer.request_channel(Payload(b"0", b"chan"), further, limit_rate=4)
        say("chan", [int(item.data) for item in items if item.data])
        say("fail", await failure(peer.request_response(Payload(b"boom", b"fail"))))
        say("fail stream", await failure(peer.request_stream(Payload(b"boom", b"fail"))))
        say("unknown", await failure(peer.request_response(Payload(b"", b"nowhere"))))
        pending = [connected.request_response(Payload(b"", b"slow")) for _ in range(3)]
        say("slow", await settled(b"slow-open", "3"))
        for future in pending:
            future.cancel()
        say("cancelled", await settled(b"slow-open", "0"))
        for _ in range(5):
            await peer.fire_and_forget(Payload(b"x", b"fnf"))
        say("fnf", await settled(b"fnf-count", "5"))
        say("len", await ask(b"len", bytes(BIG)))
        items = await peer.request_stream(Payload(b"3 %d" % BIG, b"blob"), limit_rate=1)
        say("blob", [len(item.data) for item in items])


if __name__ == "__main__":
    if sys.argv[1] == "server":
        asyncio.run(serve(sys.argv[2]))
    else:
        asyncio.run(asyncio.wait_for(call(sys.argv[2], int(sys.argv[3])), 40))
