"""What a peer can cost a server within the default limits: octets held, and time that others wait."""

from __future__ import annotations

import tracemalloc
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from time import process_time

import pytest
import trio
from tests.actors import carried
from tests.pace import within
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.actors.maop import Handler, HandlerSpec, PeerConfig, TestPlan, connect
from levada.actors.maop.connection import MaopDriver
from levada.transports import carriers
from levada.transports.carriers import MemoryConfig
from levada.transports.maop import AuthenticationConfig, Capability, Incoming, MaopConfig, ReceiverState, Version
from levada.transports.maop.authentication import Authentication
from levada.transports.maop.frames import UNDEFINED, Block, BlockEnd, Message, Request

from .conftest import Ends, Start, echo, nothing
from .test_limits import raw

pytestmark = pytest.mark.ci

MIB = 2**20
MANY_STREAMS = MemoryConfig(shape="connection", max_streams=5000, max_streams_unidirectional=5000)
KEYED = {"maop-capabilities": f"{Capability(0b11111):x}"}


class Attacker:
    """A client that keeps to no limits but the server's."""

    def __init__(self, connection: carriers.Connection, hostile: MaopDriver) -> None:
        self.connection = connection
        self.hostile = hostile
        """The server's side of it."""
        self.sent = 0

    async def begin(self, *operations: Message | Request) -> list[carriers.Stream]:
        """Begin operations, and wait until their bodies may come."""
        streams = []
        for operation in operations:
            stream = await self.connection.open_stream(unidirectional=isinstance(operation, Message))
            await self.send(stream, operation.encode(), fin=operation.payload_len == 0)
            streams.append(stream)
        core = self.hostile.core
        for operation, stream in zip(operations, streams, strict=True):
            while operation.payload_len:
                entry = core.streams.get(stream.stream_id)
                if isinstance(entry, Incoming) and entry.state is ReceiverState.ARMED:
                    break
                await trio.lowlevel.checkpoint()
        return streams

    async def send(self, stream: carriers.Stream, data: bytes, *, fin: bool = False) -> None:
        await stream.send_all(data)
        if fin:
            stream.send_nowait(b"", fin=True)
        self.sent += len(data)

    async def read(self) -> None:
        """Wait until the server has read everything, and has nothing more to do."""
        core = self.hostile.core
        while core.statistic.block_bytes + core.statistic.received < self.sent and self.hostile.end is None:
            before = core.statistic.block_bytes
            for _ in range(100):
                await trio.lowlevel.checkpoint()
            if core.statistic.block_bytes == before:
                break


async def half_bodies(attacker: Attacker) -> None:
    """As many as may be in flight, each with half of what fills the quota."""
    for stream in await attacker.begin(*[Message(100, 65_536, key=b"")] * 1024):
        await attacker.send(stream, Block(bytes(32_768)).encode())


async def crumbs(attacker: Attacker) -> None:
    """Bodies of undefined length in Blocks of 2 octets."""
    for stream in await attacker.begin(*[Message(101, UNDEFINED, key=b"")] * 4):
        for _ in range(2):
            await attacker.send(stream, Block(b"ab").encode() * 10_000)


async def empty_blocks(attacker: Attacker) -> None:
    for stream in await attacker.begin(*[Message(101, UNDEFINED, key=b"")] * 4):
        await attacker.send(stream, Block(b"").encode() * 10_000)


async def keys(attacker: Attacker) -> None:
    """Each operation with a key of its own."""
    await attacker.begin(*(Message(100, 0, key=number.to_bytes(16, "big")) for number in range(2000)))


async def repetitions(attacker: Attacker) -> None:
    """The same key again and again, with another body that shows only at its end."""
    for number in range(4):
        [stream] = await attacker.begin(Message(100, 8 * MIB, key=bytes(16)))
        for _ in range(7):
            await attacker.send(stream, Block(bytes(MIB)).encode())
        await attacker.send(stream, Block(bytes(MIB - 1) + bytes((number,))).encode())
        await attacker.send(stream, BlockEnd(8 * MIB).encode(), fin=True)
        while attacker.hostile.core.operations:
            await trio.lowlevel.checkpoint()
    assert attacker.hostile.core.statistic.failed == {6: 3}


async def answers(attacker: Attacker) -> None:
    """Responses that are kept for their keys."""
    body = bytes(60_000)
    for number in range(200):
        [stream] = await attacker.begin(Request(102, len(body), key=number.to_bytes(16, "big")))
        await attacker.send(stream, Block(body).encode() + BlockEnd(len(body)).encode(), fin=True)


# MiB at its worst, and CPU seconds: several times what was measured on a busy machine.
WORST: list[tuple[Callable[[Attacker], Awaitable[None]], int, float]] = [
    (half_bodies, 80, 6.0),
    (crumbs, 2, 6.0),
    (empty_blocks, 2, 6.0),
    (keys, 10, 6.0),
    (repetitions, 40, 6.0),
    (answers, 40, 6.0),
]
HANDLERS = {
    100: Handler(nothing),
    101: Handler(nothing, spec=HandlerSpec(allow_undefined_length=True)),
    102: echo,
}


async def waiting(ends: Ends, attack: Callable[[], Awaitable[None]]) -> float:
    """Return the most CPU time for which an honest request waited beside an attack."""
    waited = 0.0

    async def ask() -> None:
        nonlocal waited
        while True:
            began = process_time()
            await ends.peer.request(102, b"honest")
            waited = max(waited, process_time() - began)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await attack()
        await ends.peer.request(102, b"after it")
        nursery.cancel_scope.cancel()
    return waited


@pytest.mark.timeout(300)  # CPU time decides
@pytest.mark.parametrize(("worst", "peak", "seconds"), WORST, ids=[case[0].__name__ for case in WORST])
async def test_what_the_worst_operations_cost(
    start: Start, worst: Callable[[Attacker], Awaitable[None]], peak: int, seconds: float
) -> None:
    async def attack() -> None:
        async with raw(ends, MANY_STREAMS, pairs=KEYED) as peer:
            [hostile] = [c for c in ends.listener._actor.connections if c.handle.vendor == "raw"]
            attacker = Attacker(peer.connection, hostile)
            await worst(attacker)
            await attacker.read()

    server = {"config": PeerConfig(carrier=MANY_STREAMS)}
    async with start(HANDLERS, server=server) as ends:
        began = process_time()
        waited = await waiting(ends, attack)
        spent = process_time() - began
    async with start(HANDLERS, server=server) as ends:
        tracemalloc.start()
        try:
            await attack()
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert (most < peak * MIB, within(waited, 1.0), within(spent, seconds)) == (True, True, True), (
        most / MIB,
        waited,
        spent,
    )


@carried.memory_only
async def test_what_a_flood_of_authentications_costs(start: Start) -> None:
    """The largest tokens and pairs, of 100 clients at once, none of which is let in; in memory no rate of attempts bounds them."""
    pairs = {f"key-{number}": "x" * 240 for number in range(255)}
    data = Authentication("Bearer", bytes(65_535), pairs, Version(1, 0, 0), "flood").encode()

    async def attack() -> None:
        async with AsyncExitStack() as stack:
            streams = []
            for _ in range(100):
                connection = await stack.enter_async_context(
                    carriers.dial(url, carried.settings(url.partition(":")[0], MANY_STREAMS))
                )
                assert isinstance(connection, carriers.Connection)
                stream = await connection.open_stream()
                await stream.send_all(data[:-1])
                streams.append(stream)
            for stream in streams:
                await stream.send_all(data[-1:])
            for stream in streams:
                assert (await stream.receive_some())[0] == 0  # not approved

    patient = MaopConfig(
        authentication=AuthenticationConfig(auth_timeout=60.0)
    )  # the limit is of real time, and tracing slows all of this down
    async with start(HANDLERS, core=patient) as ends:
        url = ends.listener.url.removeprefix("maop+")
        began = process_time()
        waited = await waiting(ends, attack)
        spent = process_time() - began
        tracemalloc.start()
        try:
            await attack()
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert (most < 60 * MIB, within(waited, 1.0), within(spent, 8.0)) == (True, True, True), (most / MIB, waited, spent)


@carried.memory_only
async def test_a_burst_of_requests_is_read_in_turns(start: Start) -> None:
    """Another client is answered long before the last of 4,000 requests that came at once has been read."""
    async with (
        start({101: echo}) as ends,
        connect(ends.system, ends.listener.url, token=b"secret") as other,
        raw(ends, listening=False) as attacker,
    ):
        (hostile,) = [c for c in ends.listener._actor.connections if c.handle.vendor == "raw"]
        for _ in range(4000):
            stream = attacker.connection.try_open_stream()
            assert stream is not None
            stream.send_nowait(Request(101, 0).encode(), fin=True)
        assert await other.request(101, b"honest") == b"honest"
        assert hostile.core.statistic.received < 2500
        await wait_all_tasks_blocked()
        assert hostile.core.statistic.received == 4000


async def test_tests_whose_answers_nobody_reads_hold_little(start: Start, autojump_clock: MockClock) -> None:
    """60 Tests, 2,880 octets, asked for 1.9 GiB at once; now each has a window of its stream and one piece."""
    async with start({101: echo}) as ends, raw(ends, listening=False) as attacker:
        tracemalloc.start()
        try:
            streams = []
            for _ in range(60):
                streams.append(await attacker.open(Request(1, 2, timeout_ms=60_000), uni=False))
            await wait_all_tasks_blocked()
            before = tracemalloc.get_traced_memory()[0]
            for stream in streams:
                body = TestPlan(mode=1, exp=15).encode()
                stream.send_nowait(Block(body).encode() + BlockEnd(2).encode(), fin=True)
            await wait_all_tasks_blocked()
            assert tracemalloc.get_traced_memory()[0] - before < 40 * MIB
        finally:
            tracemalloc.stop()
        assert await ends.peer.request(101, b"honest") == b"honest"
