"""Reading, and beginning what was read, go on whatever those who produce do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from levada.actors.rsocket import Payload, Request, ServerConfig
from levada.actors.rsocket.connection import RSocketDriver
from levada.framework import ActorSystem
from levada.transports.carriers import MemoryConfig, dial
from levada.transports.carriers.memory import MemoryByteStream
from levada.transports.rsocket import CoreConfig, RSocketCore
from levada.transports.rsocket.events import PayloadReceived

from .conftest import below, connect, serve

MANY = 667
UNBOUNDED = 2**31 - 1


async def handler(request: Request) -> Any:
    async def numbers() -> AsyncIterator[bytes]:
        number = 0
        while True:
            number += 1
            yield b"%d" % number

    return request.payload if request.data == b"echo" else numbers()


class ByHand:
    """A client without anything that could wait."""

    def __init__(self, stream: MemoryByteStream) -> None:
        self.stream = stream
        self.core = RSocketCore(CoreConfig(), client=True, framed=False, now=0.0, random_bytes=bytes)

    def open_streams(self) -> list[int]:
        return [self.core.send_request_stream(Payload(b"count"), UNBOUNDED, 0.0) for _ in range(MANY)]

    async def until(self, streams: set[int]) -> int:
        """Send what is queued and read until each of these streams has had a payload; return the octets read."""
        await self.stream.send_all(b"".join(self.core.data_to_send(0.0)))
        octets = 0
        while streams:
            data = await self.stream.receive_some()
            octets += len(data)
            events = self.core.receive_data(data, 0.0)
            streams -= {event.stream_id for event in events if isinstance(event, PayloadReceived)}
        return octets


@pytest.mark.ci
async def test_cancels_and_requests_are_read_while_many_produce() -> None:
    """667 streams without bounds begin, and an echo behind as many CANCELs comes before many of them have had another turn.

    What they send meanwhile is counted, which a slow machine makes less, not more.
    """
    async with (
        ActorSystem() as system,
        serve(system, "rsocket+memory://desk", handler) as listener,
        dial("memory://desk") as stream,
    ):
        assert isinstance(stream, MemoryByteStream)
        client = ByHand(stream)
        ids = client.open_streams()
        # Each has had its turn. With one slice of each producer for one beginning it would be a hundred times this.
        assert await client.until(set(ids)) < 20_000_000
        for stream_id in ids:
            client.core.send_cancel(stream_id)
        # 3 kB; a turn of each is 3 MB.
        assert await client.until({client.core.send_request_response(Payload(b"echo"), 0.0)}) < 500_000
        assert listener.peers[0].statistics().open_streams == 0


@pytest.mark.ci
async def test_a_burst_that_cancels_itself() -> None:
    """Requests, CANCELs and the echo in one write."""
    async with (
        ActorSystem() as system,
        serve(system, "rsocket+memory://desk", handler),
        dial("memory://desk") as stream,
    ):
        assert isinstance(stream, MemoryByteStream)
        client = ByHand(stream)
        for stream_id in client.open_streams():
            client.core.send_cancel(stream_id)
        # 1.5 MB; it would be 16 times as much if the beginners waited for the producers.
        assert await client.until({client.core.send_request_response(Payload(b"echo"), 0.0)}) < 10_000_000


@pytest.mark.parametrize("high_watermark", [1, 1 << 20])
async def test_all_have_their_turn(high_watermark: int) -> None:
    """Those who wait for the carrier, and those whose slice is over, go on in the order in which they came."""
    config = ServerConfig(high_watermark=high_watermark)
    async with (
        ActorSystem() as system,
        serve(system, "rsocket+memory://desk", handler, config=config) as listener,
        connect(system, listener.url) as peer,
    ):
        receivers = [await peer.request_stream(b"count", window=10_000) for _ in range(8)]
        for receiver in receivers:
            with receiver:
                for number in range(1, 500):
                    assert int((await receiver.receive()).data) == number
        await wait_all_tasks_blocked()
        assert listener.peers[0].statistics().open_streams == 0


class Unbegun(trio.abc.Instrument):
    """Notes how many requests of a connection are read and have not begun, after each step of a task."""

    def __init__(self, connection: RSocketDriver) -> None:
        self.connection = connection
        self.most = 0

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self.most = max(self.most, self.connection.unbegun)


@pytest.mark.parametrize("chunk", [None, (200, 200)], ids=["at once", "in small pieces"])
@pytest.mark.parametrize("kind", ["response", "forget"])
async def test_requests_are_read_as_they_begin(chunk: tuple[int, int] | None, kind: str) -> None:
    """A peer that sends 2,000 requests at once has `most_unbegun` of them in memory, and what one piece, of 8 KiB at most, adds."""
    began = 0

    async def count(_: Request) -> bytes:
        nonlocal began
        began += 1
        return b""

    config = ServerConfig(
        carrier=MemoryConfig(chunk=chunk, window=1 << 20),
        core=CoreConfig(max_streams=10_000),
        max_fire_and_forget=10_000,
    )
    async with (
        ActorSystem() as system,
        serve(system, "rsocket+memory://desk", count, config=config) as listener,
        dial("memory://desk") as stream,
    ):
        assert isinstance(stream, MemoryByteStream)
        client = RSocketCore(CoreConfig(), client=True, framed=False, now=0.0, random_bytes=bytes)
        send = client.send_request_response if kind == "response" else client.send_fire_and_forget
        await stream.send_all(b"".join(client.data_to_send(0.0)))
        await wait_all_tasks_blocked()
        connection = below(listener.peers[0])
        unbegun = Unbegun(connection)
        trio.lowlevel.add_instrument(unbegun)
        for _ in range(2_000):
            send(Payload(b""), 0.0)
        await stream.send_all(b"".join(client.data_to_send(0.0)))
        await wait_all_tasks_blocked()
        trio.lowlevel.remove_instrument(unbegun)
        assert began == 2_000
        assert 0 < unbegun.most <= connection.most_unbegun + (8192 if chunk is None else chunk[1]) // 9
