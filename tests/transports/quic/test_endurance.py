"""Much at once, for long: loss, reordering, spoilt packets, small paths, and new keys or new connection ids under many streams."""

from __future__ import annotations

import random
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from levada.transports.carriers.simnet import SimNet
from levada.transports.quic import QuicStream


async def read_all(stream: QuicStream) -> bytes:
    parts = []
    while data := await stream.receive_some():
        parts.append(data)
    return b"".join(parts)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(30))
async def test_many_troubles_together_leave_nothing_behind(
    lab: Any, autojump_clock: MockClock, tuned: None, seed: int
) -> None:
    dice = random.Random(seed)
    net = SimNet(
        seed,
        loss=dice.choice((0, 0.02, 0.1)),
        duplicate=dice.choice((0, 0.05)),
        reorder=dice.choice((0, 0.1)),
        jitter=dice.choice((0, 0.02)),
        mtu=dice.choice((1_200, 1_300, 1_500)),
    )
    if seed % 3 == 0:
        net.corrupt(lambda packet: packet.n % 37 == 5 and packet.n > 30)
    new_keys = bool(seed % 2)
    after = {"key_update_after": dice.choice((70, 1 << 22)) if new_keys else 1 << 22}
    servers = dice.choice((50, 200, 1 << 22)) if new_keys else 1 << 22
    async with lab.connected(net, key_update_after=servers, client=after) as ends:

        async def serve() -> None:
            while True:
                nursery.start_soon(answer, await ends.server.accept_stream())

        async def answer(stream: QuicStream) -> None:
            await stream.send_all(await read_all(stream))
            await stream.send_eof()

        async def call() -> None:
            for _ in range(3):
                data = dice.randbytes(dice.choice((0, 1, 100, 5_000, 100_000)))
                stream = await ends.client.open_stream(priority=dice.choice((1, 128)))
                await stream.send_all(data)
                await stream.send_eof()
                assert await read_all(stream) == data

        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            async with trio.open_nursery() as calls:
                for _ in range(12):
                    calls.start_soon(call)
                for _ in range(5):
                    await trio.sleep(dice.uniform(0, 2))
                    if new_keys:
                        dice.choice((ends.client, ends.server)).update_keys()
                    else:
                        ends.client.change_path()
            await trio.sleep(5)
            for end in (ends.client, ends.server):
                assert not end.is_over
                assert (len(end.streams), len(end.engine._streams), end.engine.total_unacked()) == (0, 0, 0)
                assert end.engine._loss._cc.bytes_in_flight == 0
            nursery.cancel_scope.cancel()
