"""What a closed connection leaves behind: nothing, and without the garbage collector."""

from __future__ import annotations

import gc
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import trio
import trio.testing

from levada.actors.lumberjack import HostConfig, Unit, connect, serve
from levada.framework import ActorSystem
from levada.transports.carriers import TlsConfig

pytestmark = pytest.mark.loopback


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def ours() -> Counter[str]:
    """Objects of levada by class."""
    return Counter(
        f"{type(each).__module__}.{type(each).__qualname__}"
        for each in gc.get_objects()
        if str(type(each).__module__).startswith("levada.")
    )


@pytest.mark.ci
@pytest.mark.parametrize("scheme", ["tcp", "tls"])
async def test_a_closed_connection_is_freed_by_reference_counting(
    scheme: str, authorities: Any, no_collector: None
) -> None:
    """Both sides: no object of levada, and no buffer of a window, is left once a writer has gone."""
    one, _ = authorities
    serving = TlsConfig(certificate=one.issue("reader")) if scheme == "tls" else None
    hosts = HostConfig(tls=TlsConfig(ca=one.ca))
    url = "lumberjack+tls://127.0.0.1:0" if scheme == "tls" else "lumberjack://127.0.0.1:0"
    taken = 0

    async def take(unit: Unit) -> None:
        nonlocal taken
        taken += len(unit.events)

    async with ActorSystem() as system, serve(system, url, take, carrier=serving) as reader:

        async def ship() -> None:
            async with connect(system, reader.url, hosts=hosts) as writer:
                for _ in range(200):
                    await writer.send({"line": "x" * 1000})
                await writer.flush()
            while reader.statistics().connections:
                await trio.testing.wait_all_tasks_blocked(0.01)

        await ship()  # what is made once is made now
        gc.collect()
        before = ours()
        tracemalloc.start()
        for _ in range(10):
            await ship()
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        # Timers that were cancelled stay in the heap until they are due, and the last actor may still be ending.
        left = {name for name, count in (ours() - before).items() if count >= 10}
        assert left <= {"levada.framework.timers.Timer"}
        assert held < 200_000  # a connection sends as much in a window
    assert taken == 2_200
