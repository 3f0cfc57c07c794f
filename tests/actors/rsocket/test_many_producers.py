"""Reading, and beginning what was read, go on whatever those who produce do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from trio.testing import wait_all_tasks_blocked

from levada.actors.rsocket import Payload, Request, ServerConfig
from levada.framework import ActorSystem
from levada.transports.carriers import dial
from levada.transports.carriers.memory import MemoryByteStream
from levada.transports.rsocket import CoreConfig, RSocketCore
from levada.transports.rsocket.events import PayloadReceived

from .conftest import connect, serve

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
