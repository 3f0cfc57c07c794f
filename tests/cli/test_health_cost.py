"""What a peer can cost at the health port: the worst that clients send, what it holds, and whether a probe beside them notices."""

from __future__ import annotations

import tracemalloc
from collections.abc import Awaitable, Callable
from time import process_time

import pytest
import trio
from tests.pace import within

from levada.actors import health_server as answering
from levada.actors.cli.health import serve_health

pytestmark = [pytest.mark.ci, pytest.mark.loopback]
KB = 1_000
CLIENTS = 2 * answering.AT_ONCE
# Made once, as the clients are not what is measured.
LARGE_HEAD = b"GET / HTTP/1.1\r\nX: " + b"x" * (answering.REQUEST - 20)
HUGE_LINE = b"x" * (1 << 20)
LONG_REQUEST = b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 1_000 + b"\r\n"
MANY_REQUESTS = b"GET / HTTP/1.1\r\n\r\n" * 10_000


async def talk(port: int, *parts: bytes) -> None:
    """Send parts, and read nothing before the last one is sent."""
    try:
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            for part in parts:
                await stream.send_all(part)
            async for _ in stream:
                pass
    except trio.BrokenResourceError:
        pass  # it has been cut off


async def large_heads(port: int) -> None:
    """As large as they may be, and never whole."""
    await talk(port, LARGE_HEAD)


async def huge_lines(port: int) -> None:
    await talk(port, HUGE_LINE)


async def octet_by_octet(port: int) -> None:
    await talk(port, *[b"\r\n\r"[n % 3 : n % 3 + 1] for n in range(200)])


async def half_requests(port: int) -> None:
    await talk(port, b"GET / HT")


async def whole_requests(port: int) -> None:
    for _ in range(4):
        await talk(port, LONG_REQUEST)


async def many_requests(port: int) -> None:
    """In one connection, which has one answer."""
    await talk(port, MANY_REQUESTS)


async def no_reader(port: int) -> None:
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(b"GET / HTTP/1.1\r\n\r\n")
        await trio.sleep(0.01)


# KB at its worst, and CPU seconds, for 128 clients at once: several times what was measured on a busy machine.
WORST: list[tuple[Callable[[int], Awaitable[None]], int, float]] = [
    (large_heads, 8_000, 5.0),
    (huge_lines, 8_000, 8.0),
    (octet_by_octet, 8_000, 8.0),
    (half_requests, 8_000, 5.0),
    (whole_requests, 8_000, 8.0),
    (many_requests, 8_000, 8.0),
    (no_reader, 8_000, 5.0),
]


async def attack(port: int, worst: Callable[[int], Awaitable[None]]) -> float:
    """Let all clients have their way at once; return the most CPU time for which a probe waited."""
    waited = 0.0
    answered = trio.Event()

    async def probe() -> None:
        nonlocal waited
        while True:
            began = process_time()
            async with await trio.open_tcp_stream("127.0.0.1", port, local_address="127.0.0.2") as stream:
                await stream.send_all(b"GET / HTTP/1.1\r\n\r\n")
                assert (await stream.receive_some(12)) == b"HTTP/1.1 200"
            waited = max(waited, process_time() - began)
            answered.set()

    async with trio.open_nursery() as probing:
        probing.start_soon(probe)
        with trio.move_on_after(1.0):  # of those that are waited for until their time is over
            async with trio.open_nursery() as nursery:
                for _ in range(CLIENTS):
                    nursery.start_soon(worst, port)
        await answered.wait()
        probing.cancel_scope.cancel()
    return waited


async def well() -> tuple[bool, dict[str, object]]:
    return True, {"state": "serving"}


@pytest.mark.parametrize(("worst", "peak", "seconds"), WORST, ids=[case[0].__name__ for case in WORST])
async def test_what_the_worst_clients_cost(worst: Callable[[int], Awaitable[None]], peak: int, seconds: float) -> None:
    async with trio.open_nursery() as nursery:
        url = await nursery.start(serve_health, "127.0.0.1", 0, well, lambda: None)
        port = int(url.rpartition(":")[2].rstrip("/"))
        began = process_time()
        waited = await attack(port, worst)
        spent = process_time() - began
        tracemalloc.start()
        try:
            await attack(port, worst)
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        nursery.cancel_scope.cancel()
    assert (most < peak * KB, within(waited, 1.0), within(spent, seconds)) == (True, True, True), (
        most / KB,
        waited,
        spent,
    )
