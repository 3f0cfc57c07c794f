"""The promises of every carrier, kept by QMux over memory, Unix sockets, TCP, TLS and WebSockets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import pytest
import trio
import trio.testing

from levada.transports.carriers.contracts import Connection
from levada.transports.qmux import QmuxConfig, dial, listen
from levada.transports.testing import CarrierCheck, CarrierTraits, carrier_checks

if TYPE_CHECKING:
    pass

# A stopped reader: the window, what waits above the watermark at the sender, and one write.
BUFFERED = (1 << 20) + (256 << 10) + (1 << 20)
MEMORY = CarrierTraits(shape="connection", buffered=BUFFERED, streams=10_000, max_open=128, datagram_queue=512)


async def settle() -> None:
    await trio.testing.wait_all_tasks_blocked(0.01)


SOCKETS = attrs.evolve(MEMORY, settle=settle, streams=1_000, timeout=20)


@asynccontextmanager
async def pair(
    url: str, server: QmuxConfig, client: QmuxConfig | None = None
) -> AsyncIterator[tuple[Connection, Connection]]:
    async with listen(url, server) as listener, trio.open_nursery() as nursery:
        accepted: list[Connection] = []

        async def accept() -> None:
            accepted.append((await listener.accept()).accept())

        nursery.start_soon(accept)
        async with dial(listener.url, client or server) as connection:
            await accepted[0].handshake()
            yield connection, accepted[0]
            await accepted[0].aclose()


@pytest.mark.parametrize("check", carrier_checks(MEMORY), ids=str)
async def test_memory(check: CarrierCheck, autojump_clock: trio.testing.MockClock) -> None:
    await check(lambda: pair("qmux+memory://", QmuxConfig()))


@pytest.mark.loopback
@pytest.mark.parametrize("check", carrier_checks(SOCKETS), ids=str)
async def test_unix(check: CarrierCheck, tmp_path: Path) -> None:
    await check(lambda: pair(f"qmux+unix://{tmp_path}/socket", QmuxConfig()))
