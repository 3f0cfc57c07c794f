"""What a client of the console can cost: the worst requests within the limits, what they hold, and whether others beside them notice."""

from __future__ import annotations

import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import process_time

import pytest
import trio
from tests.pace import within
from trio.testing import wait_all_tasks_blocked

from levada.actors.console import connect_console, serve_console
from levada.actors.console.server import MOST_CLIENTS, REQUEST_LIMIT
from levada.actors.console.snapshot import MOST_ACTORS
from levada.framework import Actor, ActorSystem, handles, message

pytestmark = [pytest.mark.ci, pytest.mark.loopback]
MB = 1_000_000
ACTORS = 2_000
ASK = b'{"levada-console":1}\n'
ASK_LITTLE = b'{"levada-console":1,"limit":1}\n' * 200
HUGE_LINE = b"x" * (1 << 20)
NESTED = b"[" * (REQUEST_LIMIT - 1) + b"\n"


@message
class Work:
    pass


class Idler(Actor[Work]):
    """One of many that are shown."""

    @handles
    def work(self, m: Work) -> None:
        pass


async def read(stream: trio.abc.ReceiveStream, octets: int) -> None:
    """Take so many octets, or all that there are."""
    while octets > 0 and (data := await stream.receive_some()):
        octets -= len(data)


async def all_actors(stream: trio.SocketStream) -> None:
    for _ in range(2):
        await stream.send_all(ASK)
        await read(stream, ACTORS * 150)


async def slow_reader(stream: trio.SocketStream) -> None:
    """Ask, and leave the answer."""
    await stream.send_all(ASK)
    await trio.sleep(1.0)


async def many_small_requests(stream: trio.SocketStream) -> None:
    await stream.send_all(ASK_LITTLE)
    await stream.send_eof()
    await read(stream, 1 << 30)


async def huge_line(stream: trio.SocketStream) -> None:
    await stream.send_all(HUGE_LINE)
    await read(stream, 1 << 30)


async def nested(stream: trio.SocketStream) -> None:
    await stream.send_all(NESTED)
    await read(stream, 1 << 30)


async def half_request(stream: trio.SocketStream) -> None:
    await stream.send_all(ASK[:-1])
    await trio.sleep(0.5)


# Clients, MB at its worst, and CPU seconds: several times what was measured on a busy machine.
WORST: list[tuple[Callable[[trio.SocketStream], Awaitable[None]], int, int, float]] = [
    (all_actors, MOST_CLIENTS - 1, 20, 8.0),
    (slow_reader, MOST_CLIENTS - 1, 20, 8.0),
    (many_small_requests, MOST_CLIENTS - 1, 10, 8.0),
    (huge_line, 200, 10, 8.0),
    (nested, 200, 10, 8.0),
    (half_request, 200, 10, 8.0),
]


async def attack(path: str, worst: Callable[[trio.SocketStream], Awaitable[None]], clients: int) -> float:
    """Let clients have their way at once; return the most CPU time for which an honest one beside them waited."""
    waited = 0.0

    async def client() -> None:
        async with await trio.open_unix_socket(path) as stream:
            try:
                await worst(stream)
            except trio.BrokenResourceError:
                pass  # it has been cut off

    async with connect_console(path, timeout=300.0) as console, trio.open_nursery() as looking:
        await console.snapshot(limit=1)
        looked = trio.Event()

        @looking.start_soon
        async def look() -> None:
            nonlocal waited
            while True:
                began = process_time()
                snapshot = await console.snapshot(limit=10)
                waited = max(waited, process_time() - began)
                assert len(snapshot.actors) == 10
                looked.set()

        async with trio.open_nursery() as nursery:
            for _ in range(clients):
                nursery.start_soon(client)
        await looked.wait()
        looking.cancel_scope.cancel()
    return waited


@pytest.mark.parametrize(
    ("worst", "clients", "peak", "seconds"),
    [pytest.param(*case, id=case[0].__name__, marks=[pytest.mark.release] * (case[0] is all_actors)) for case in WORST],
)
async def test_what_the_worst_clients_cost(
    tmp_path: Path, worst: Callable[[trio.SocketStream], Awaitable[None]], clients: int, peak: int, seconds: float
) -> None:
    """With a fifth of the actors that one snapshot may have."""
    assert ACTORS * 5 == MOST_ACTORS
    async with ActorSystem() as system, serve_console(system, tmp_path / "c") as path:
        for _ in range(ACTORS):
            system.spawn(Idler)
        await wait_all_tasks_blocked()
        began = process_time()
        waited = await attack(path, worst, clients)
        spent = process_time() - began
        await wait_all_tasks_blocked(0.01)
        tracemalloc.start()
        try:
            await attack(path, worst, clients)
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert system.statistics().failures == 0
    assert (most < peak * MB, within(waited, 1.0), within(spent, seconds)) == (True, True, True), (
        most / MB,
        waited,
        spent,
    )
