"""A connection that is over is freed at once with all that belonged to it, buffers above all: the collector finds nothing of it."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio
from tests.simnet import SimNet
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.actors.maop import Call, Handler, HandlerSpec, MaopError, TestPlan, connect, serve
from levada.actors.maop.entry import connect_over, serve_over
from levada.framework import ActorSystem
from levada.framework.errors import LevadaError
from levada.transports.quic import QuicConfig, dial, listen

from .conftest import TOKENS, Ends, echo, settled

STREAMING = HandlerSpec(allow_undefined_length=True, streaming=True, max_payload=2**40)
BODY = bytes(300_000)


async def slow(call: Call) -> bytes:
    """Have the body, and wait."""
    body = await call.body()
    await trio.sleep(60)
    return body


async def slow_reader(call: Call) -> None:
    """Take a first piece, and wait."""
    async for _ in call:
        await trio.sleep(60)


async def broken(call: Call) -> None:
    """Fail."""
    await call.body()
    raise ValueError("no")


HANDLERS: dict[int, Any] = {101: echo, 102: slow, 103: Handler(slow_reader, spec=STREAMING), 104: broken}


async def quiet(work: Callable[[], Awaitable[object]]) -> None:
    try:
        await work()
    except (MaopError, LevadaError):
        pass


async def requests_that_end(ends: Ends) -> None:
    for caller in (ends.peer, ends.caller):
        for msg_id in (101, 104, 999):
            await quiet(lambda caller=caller, msg_id=msg_id: caller.request(msg_id, BODY))  # type: ignore[misc]
    assert await ends.peer.test(TestPlan(mode=1, exp=9)) is None


async def requests_that_are_cancelled(ends: Ends) -> None:
    with trio.move_on_after(1):
        async with trio.open_nursery() as nursery:
            for msg_id in (101, 102, 103) * 3:
                nursery.start_soon(ends.peer.request, msg_id, BODY)


async def a_connection_that_is_lost(ends: Ends) -> None:
    async with trio.open_nursery() as nursery:
        for msg_id in (102, 103) * 3:
            nursery.start_soon(quiet, lambda msg_id=msg_id: ends.peer.request(msg_id, BODY))
        await trio.sleep(0.5)
        assert ends.server.carrier is not None
        ends.server.carrier.close(0x10B, "that is all")


SCENARIOS = [requests_that_end, requests_that_are_cancelled, a_connection_that_is_lost]


@pytest.fixture
def collector_off() -> Iterator[Callable[[], Counter[str]]]:
    """Give a function that counts the objects of levada that only the collector would free, by class."""

    def left() -> Counter[str]:
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            gc.collect()
            kinds = (type(found) for found in gc.garbage)
            return Counter(
                f"{kind.__module__}.{kind.__name__}" for kind in kinds if str(kind.__module__).startswith("levada.")
            )
        finally:
            gc.set_debug(0)
            gc.garbage.clear()

    gc.collect()
    gc.disable()
    try:
        yield left
    finally:
        gc.enable()


Connecting = Callable[[ActorSystem], AbstractAsyncContextManager[Ends]]


async def check(
    scenario: Callable[[Ends], Awaitable[None]], connecting: Connecting, left: Callable[[], Counter[str]]
) -> None:
    async with ActorSystem() as system:
        async with connecting(system) as ends:
            await scenario(ends)
        del ends
        await settled()
        await wait_all_tasks_blocked()
        assert left() == {}


@pytest.mark.handler_fails
@pytest.mark.parametrize("scenario", SCENARIOS)
async def test_a_connection_in_memory_is_freed(
    scenario: Callable[[Ends], Awaitable[None]],
    autojump_clock: MockClock,
    collector_off: Callable[[], Counter[str]],
) -> None:
    @asynccontextmanager
    async def connecting(system: ActorSystem) -> AsyncIterator[Ends]:
        async with (
            serve(system, "maop+memory://desk", HANDLERS, authenticate=TOKENS) as listener,
            connect(system, listener.url, token=b"secret", handlers=HANDLERS) as peer,
        ):
            yield Ends(system, listener, peer)

    await check(scenario, connecting, collector_off)


@pytest.mark.ci
@pytest.mark.handler_fails
@pytest.mark.parametrize("scenario", SCENARIOS)
async def test_a_connection_over_quic_is_freed(
    scenario: Callable[[Ends], Awaitable[None]],
    quic: tuple[QuicConfig, QuicConfig],
    autojump_clock: MockClock,
    collector_off: Callable[[], Counter[str]],
) -> None:
    @asynccontextmanager
    async def connecting(system: ActorSystem) -> AsyncIterator[Ends]:
        net = SimNet(1, delay=0.01, turns=200_000)
        listening = partial(listen, "quic://server:4433", quic[0], port=net.port("server", 4433))
        dialling = partial(dial, "quic://server:4433", quic[1], port=net.port("client"))
        async with (
            serve_over(system, listening, HANDLERS, authenticate=TOKENS) as listener,
            connect_over(system, dialling, token=b"secret", handlers=HANDLERS) as peer,
        ):
            yield Ends(system, listener, peer)

    await check(scenario, connecting, collector_off)
