"""A small reader that acks what it gets, for tests of what writes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, cast

import pytest
import trio

from levada.framework.errors import CarrierError
from levada.transports.carriers import ByteStream, Listener, listen
from levada.transports.lumberjack import ReaderConfig, ReaderCore, UnitReady


class SmallReader:
    """Takes whatever comes, of any number of writers, and acks it unless it is held."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.events: list[dict[str, Any]] = []
        self.acks = trio.Event()
        self.acks.set()
        self._changed = trio.Event()

    async def read(self, stream: ByteStream) -> None:
        core = ReaderCore(ReaderConfig(), now=trio.current_time())
        try:
            async with stream:
                while data := await stream.receive_some():
                    found = core.receive_data(data, trio.current_time())
                    while found or core.has_work:
                        for event in found:
                            if isinstance(event, UnitReady):
                                self.events += event.events
                                self._changed.set()
                                await self.acks.wait()
                                core.commit(event.number, trio.current_time())
                        found = core.work(trio.current_time())
                    await stream.send_all(core.data_to_send())
        except CarrierError:
            pass

    async def has(self, count: int) -> list[dict[str, Any]]:
        """Wait for so many events since the last time, and take them."""
        while len(self.events) < count:
            self._changed = trio.Event()
            await self._changed.wait()
        events, self.events = self.events, []
        return events


@asynccontextmanager
async def open_small_reader(url: str = "memory://small", config: Any = None) -> AsyncIterator[SmallReader]:
    async with listen(url, config) as found, trio.open_nursery() as nursery:
        listener = cast("Listener[ByteStream]", found)

        async def accept() -> None:
            while True:
                nursery.start_soon(reader.read, await listener.accept())

        reader = SmallReader(
            listener.url.replace("tcp://", "lumberjack://")
            .replace("memory", "lumberjack+memory")
            .replace("tls://", "lumberjack+tls://")
        )
        nursery.start_soon(accept)
        yield reader
        nursery.cancel_scope.cancel()


@pytest.fixture
def small_reader() -> Callable[..., AbstractAsyncContextManager[SmallReader]]:
    return open_small_reader
