"""What a peer can cost a server within the default limits: octets held, and time that others wait."""

from __future__ import annotations

import tracemalloc

from trio.testing import MockClock, wait_all_tasks_blocked

from levada.actors.maop import TestPlan, connect
from levada.transports.maop.frames import Block, BlockEnd, Request

from .conftest import Start, echo
from .test_limits import raw

MIB = 2**20


async def test_a_burst_of_requests_is_read_in_turns(start: Start) -> None:
    """Another client is answered long before the last of 4,000 requests that came at once has been read."""
    async with (
        start({101: echo}) as ends,
        connect(ends.system, ends.listener.url, token=b"secret") as other,
        raw(ends, listening=False) as attacker,
    ):
        (hostile,) = [c for c in ends.listener._actor.connections if c.peer.vendor == "raw"]
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
