"""Connections that break anywhere, and cancellation at every step: nothing acked is lost, nothing is left behind."""

from __future__ import annotations

import functools
import random
import zlib
from collections.abc import Callable
from typing import Any, cast

import pytest
import trio
import trio.testing

from levada.actors.lumberjack import ReaderConfig, Unit, serve
from levada.actors.lumberjack.connection import LumberjackDriver
from levada.actors.lumberjack.load import Load
from levada.framework import ActorSystem, actor
from levada.framework.errors import CarrierError
from levada.transports.carriers import ByteStream, dial
from levada.transports.carriers.memory import memory_streams
from levada.transports.lumberjack import (
    EventsAcked,
    PeerClosed,
    Refused,
    SendQueue,
    WriterConfig,
    WriterCore,
    encode_data,
    encode_envelope,
    encode_event,
    encode_window,
)
from levada.transports.testing import FaultyNetwork


class Shipper:
    """A writer over whatever streams it is given, one after another, until everything is acked."""

    def __init__(self, config: WriterConfig, count: int) -> None:
        self.config = config
        self.queue = SendQueue(config)
        self.acked: list[int] = []
        for number in range(count):
            self.queue.put(encode_event({"n": str(number)}, config), number, 0.0)

    async def ship(self, stream: ByteStream) -> None:
        """Send until all is acked or the connection ends."""
        core = WriterCore(self.config, now=trio.current_time())
        try:
            async with stream:
                while self.queue:
                    while (batch := self.queue.next_batch(trio.current_time(), core.room, flush=True)) is not None:
                        core.send_batch(batch, trio.current_time())
                        await stream.send_all(b"".join(core.data_to_send(trio.current_time())))
                    for event in core.receive_data(await stream.receive_some(), trio.current_time()):
                        if isinstance(event, EventsAcked):
                            self.acked += event.tokens
                            self.queue.acked(event)
                        elif isinstance(event, PeerClosed | Refused):
                            return
        except CarrierError:
            pass
        finally:
            core.close(0, "", trio.current_time())
            self.queue.give_back(core.unacked())


@pytest.mark.rule("LJ-55")
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.usefixtures("user_code_fails")
async def test_lj55_every_event_at_least_once_over_a_network_that_fails(
    version: int, seed: int, autojump_clock: trio.testing.MockClock
) -> None:
    """LJ-55: all unacked events are sent again, oldest first; none is acked and lost."""
    lot = random.Random(seed)
    shipper = Shipper(WriterConfig(version=version, window=7, queue=100, compression=lot.choice([0, 3])), 120)  # type: ignore[arg-type]  # 1 or 2
    stored: list[int] = []

    async def store(unit: Unit) -> None:
        await trio.sleep(lot.choice([0.0, 0.0, 0.1, 4.0]))
        if lot.random() < 0.05:
            raise OSError("disk full")
        stored.extend(int(event["n"]) for event in unit.events)

    load = Load(ReaderConfig(partial_ack_every=lot.choice([None, 3])))
    network = FaultyNetwork(seed, within=1500)
    async with ActorSystem() as system:
        for _ in range(400):
            client, server = network.pair(*memory_streams())
            system.spawn(functools.partial(LumberjackDriver, server, actor(store), load))
            with network:
                await shipper.ship(client)
            assert set(shipper.acked) <= set(stored)
            if not shipper.queue:
                break
        await trio.sleep(100.0)
        assert sorted(shipper.acked) == list(range(120))
        assert (len(load), load.statistics(0.0).bytes_held, system.statistics().actors) == (0, 0, 0)


class CancelAtStep(trio.abc.Instrument):
    """Cancels a scope before the n-th step of any task."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.scope = trio.CancelScope()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.step -= 1
        if self.step == 0:
            self.scope.cancel()


async def serve_and_ship(version: int, stored: list[int], acked: list[int], cut: Callable[[], None]) -> None:
    async def store(unit: Unit) -> None:
        await trio.lowlevel.checkpoint()
        stored.extend(int(event["n"]) for event in unit.events)

    async with ActorSystem() as system, serve(system, "lumberjack+memory://cancel", store):
        config = WriterConfig(version=version, window=4)  # type: ignore[arg-type]  # 1 or 2
        shipper = Shipper(config, 10)
        shipper.acked = acked
        async with dial("memory://cancel") as stream:
            await shipper.ship(cast("ByteStream", stream))
        cut()


@pytest.mark.parametrize("version", [1, 2])
def test_cancellation_at_every_step_leaves_nothing_behind(version: int) -> None:
    """At each step of each task the whole is cancelled; what is acked is stored, and trio's run ends by itself."""
    step = 0
    ended = False
    acked: list[int] = []
    while not ended:
        step += 3 if step > 60 else 1
        stored: list[int] = []
        acked = []

        def done() -> None:
            nonlocal ended
            ended = True

        async def main(instrument: CancelAtStep, stored: list[int] = stored, acked: list[int] = acked) -> None:
            with instrument.scope:
                await serve_and_ship(version, stored, acked, done)

        instrument = CancelAtStep(step)
        trio.run(main, instrument, instruments=[instrument], clock=trio.testing.MockClock(autojump_threshold=0))
        assert set(acked) <= set(stored)
        assert step < 2_000
    assert acked == list(range(10))


async def test_killing_the_reader_closes_its_connections(autojump_clock: trio.testing.MockClock) -> None:
    async def never(unit: Unit) -> None:
        await trio.sleep_forever()

    async with ActorSystem() as system, trio.open_nursery() as nursery:

        async def reader() -> None:
            async with serve(system, "lumberjack+memory://killed", never):
                await trio.sleep_forever()

        nursery.start_soon(reader)
        await trio.testing.wait_all_tasks_blocked()
        shipper = Shipper(WriterConfig(window=4), 8)
        nursery.start_soon(shipper.ship, await nursery.start(held, "killed"))
        await trio.testing.wait_all_tasks_blocked()
        began = trio.current_time()
        nursery.cancel_scope.cancel()
    assert shipper.acked == []
    assert trio.current_time() == began + 1.0  # the sink is given that to end by itself


async def held(name: str, task_status: trio.TaskStatus[Any]) -> None:
    async with dial(f"memory://{name}") as stream:
        task_status.started(stream)
        await trio.sleep_forever()


HOSTILE = {
    "giant J": b"1J\0\0\0\1\xff\xff\xff\xff",
    "giant envelope": b"2C\xff\xff\xff\xff",
    "giant pairs": b"1D\0\0\0\1\xff\xff\xff\xff",
    "giant key": b"1D\0\0\0\1\0\0\0\1\xff\xff\xff\xff",
    "just below the limits": b"2C\x01\xff\xff\xff" + bytes(20_000),
    "bomb": encode_envelope(1, zlib.compress(bytes(40 * 2**20))),
    "many small events": encode_envelope(1, zlib.compress(encode_data(1, 1, {}) * 30_000)),
    "deep JSON": encode_window(2, 1) + b"2J\0\0\0\1\0\x01\x86\xa0" + b"[" * 100_000,
    "garbage": bytes(range(256)) * 100,
    "windows": encode_window(2, 0) * 5_000,
}


@pytest.mark.rule("LJ-35")
@pytest.mark.rule("LJ-45")
@pytest.mark.rule("LJ-46")
async def test_lj35_lj45_lj46_a_flood_of_bad_peers_leaves_a_good_one_its_turn(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """LJ-35, LJ-45, LJ-46: bombs and giant lengths of many peers cost little, and nobody else waits for them."""
    stored: list[int] = []
    sizes: list[int] = []

    async def store(unit: Unit) -> None:
        stored.extend(int(event["n"]) for event in unit.events if "n" in event)

    async with ActorSystem() as system, serve(system, "lumberjack+memory://flood", store) as reader:
        async with trio.open_nursery() as nursery:

            async def attack(data: bytes) -> None:
                async with dial("memory://flood") as dialled:
                    stream = cast("ByteStream", dialled)
                    try:
                        await stream.send_all(data)
                        while await stream.receive_some():
                            pass
                    except CarrierError:
                        pass

            for _ in range(3):
                for data in HOSTILE.values():
                    nursery.start_soon(attack, data)
            shipper = Shipper(WriterConfig(window=5, queue=100), 100)
            async with dial("memory://flood") as dialled:
                await shipper.ship(cast("ByteStream", dialled))
            sizes.append(reader.statistics().bytes_held)
            nursery.cancel_scope.cancel()
        await trio.sleep(100)
        assert (shipper.acked, stored) == (list(range(100)), list(range(100)))
        assert sizes[0] < 64 * 2**20
        numbers = reader.statistics()
        assert (numbers.bytes_held, numbers.connections) == (0, 0)
        assert numbers.protocol_errors["LJ-40"] == numbers.protocol_errors["LJ-36"] == 3
