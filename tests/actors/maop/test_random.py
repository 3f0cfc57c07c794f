"""Random operations, bodies, cancellations, failures and timeouts, in both directions at once: nothing is left behind, nothing is mixed up."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from levada.actors.maop import Call, Handler, HandlerSpec, MaopError, OperationActor, OperationError, Peer, Refuse
from levada.transports.carriers import MemoryConfig

from .conftest import NOTHING, Start

NO_HANDLER = 103
OUTCOMES = {
    "worked",
    "cancelled",  # by their callers
    "CAPACITY_LIMIT",  # `decide`
    "UNKNOWN_ERROR(1024)",  # the same
    "EXECUTION_ERROR",  # a handler with a bug
    "UNKNOWN_ERROR(2000)",  # one that fails on purpose
    "TIMEOUT",
}


class World:
    """Handlers that do anything, and callers that do too."""

    def __init__(self, seed: int) -> None:
        self.lot = random.Random(seed)
        self.outcomes: Counter[str] = Counter()
        self.misdirected: Counter[str] = Counter()
        """Outcomes of calls for which there is no handler."""
        self.running: Counter[int] = Counter()

    async def some_time(self, most: float = 3.0) -> None:
        await trio.sleep(self.lot.choice((0.0, 0.0, self.lot.random() * most)))

    async def decide(self, call: Call) -> None:
        await self.some_time()
        if self.lot.random() < 0.1:
            raise Refuse(self.lot.choice((14, 1024)), self.lot.choice((None, 1.0)))
        if self.lot.random() < 0.05:
            raise KeyError("gate")

    async def work(self, call: Call) -> Any:
        self.running[call.stream_id] += 1
        body = b""
        async for chunk in call:
            body += chunk
            await self.some_time(0.1)
        await self.some_time()
        if self.lot.random() < 0.1:
            raise OperationError(2000, "as it happens")
        if self.lot.random() < 0.05:
            raise KeyError("work")
        return self.pieces(body) if self.lot.random() < 0.3 and body else body or None

    async def undo(self, call: Call, reason: str) -> None:
        await self.some_time()

    async def pieces(self, body: bytes) -> AsyncIterator[bytes]:
        while body:
            size = self.lot.randrange(1, len(body) + 1)
            yield body[:size]
            body = body[size:]
            await self.some_time(0.3)

    def handlers(self) -> dict[int, Any]:
        world = self

        class Acts(OperationActor):
            async def before_execute(self, call: Call) -> None:
                await world.decide(call)

            async def execute(self, call: Call) -> Any:
                return await world.work(call)

            async def on_cancel(self, call: Call, reason: str) -> None:
                await world.undo(call, reason)

        streaming = HandlerSpec(streaming=True, allow_undefined_length=True)
        return {
            100: Handler(self.work, on_cancel=self.undo, spec=HandlerSpec(allow_undefined_length=True)),
            101: Handler(self.work, before_execute=self.decide, on_cancel=self.undo, spec=streaming),
            102: Handler(Acts, spec=HandlerSpec(allow_undefined_length=True)),
        }

    async def call(self, peer: Peer) -> None:
        await self.some_time(10)
        msg_id = self.lot.choice((100, 101, 102, NO_HANDLER))
        outcomes = self.misdirected if msg_id == NO_HANDLER else self.outcomes
        octets = self.lot.randbytes(self.lot.choice((0, 1, 1000, 200_000)))
        body: Any = self.pieces(octets) if self.lot.random() < 0.3 else octets
        options: dict[str, Any] = {"priority": self.lot.randrange(256)}
        kind = self.lot.choice(("message", "request", "open"))
        with trio.move_on_after(self.lot.choice((30, 60, self.lot.random() * 4))) as scope:
            try:
                if kind == "message":
                    await peer.message(msg_id, body, **options)
                elif kind == "request":
                    assert (
                        await peer.request(msg_id, body, timeout=self.lot.choice((0.5, 5.0, None)), **options) == octets
                    )
                else:
                    async with peer.open_request(msg_id, body, **options) as reply:
                        got = b"".join([bytes(chunk) async for chunk in reply])
                        assert got == octets
                outcomes["worked"] += 1
            except MaopError as error:
                outcomes[error.name] += 1
        if scope.cancelled_caught:
            outcomes["cancelled"] += 1


@pytest.mark.handler_fails
@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(4, 200))])
async def test_whatever_happens_nothing_is_left(start: Start, seed: int, autojump_clock: MockClock) -> None:
    world = World(seed)
    carrier = MemoryConfig(
        shape="connection",
        latency=world.lot.choice((0.0, 0.05)),
        chunk=world.lot.choice((None, (500, 5000))),
        max_streams=world.lot.choice((4, 20, 100)),
        max_streams_unidirectional=world.lot.choice((2, 100)),
    )
    client = {"handlers": world.handlers()}
    options = {"carrier": carrier, "max_running": world.lot.choice((2, 1024))}
    async with start(world.handlers(), client=client, **options) as ends:
        async with trio.open_nursery() as nursery:
            for _ in range(60):
                nursery.start_soon(world.call, ends.peer)
                nursery.start_soon(world.call, ends.caller)
        await trio.sleep(200)  # Messages that have arrived are executed, two at a time perhaps
        assert ends.left() == NOTHING
        assert (world.outcomes + world.misdirected).total() == 120  # each caller heard once how it ended
        assert world.outcomes.keys() <= OUTCOMES
        assert world.misdirected.keys() <= {"INCOMPATIBLE_MESSAGE", "cancelled"}
        assert world.outcomes["worked"]
        assert world.outcomes["cancelled"]
        assert world.misdirected["INCOMPATIBLE_MESSAGE"]
