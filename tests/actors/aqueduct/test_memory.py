"""A connection that is over frees its memory by itself: none of it waits for the garbage collector."""

from __future__ import annotations

import gc
import tracemalloc
from collections import Counter
from collections.abc import Iterator

import pytest
import trio
from trio.testing import MockClock

from levada.actors.aqueduct import connect, serve
from levada.framework import ActorSystem, channel
from levada.framework.errors import LevadaError

from .conftest import Clerk, Do, Ends, Keeper, Note, Parcel

OURS = ("levada.actors.aqueduct", "levada.transports.aqueduct")


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def objects() -> Counter[str]:
    """Count what the connections are made of, by class."""
    return Counter(type(each).__qualname__ for each in gc.get_objects() if str(type(each).__module__).startswith(OURS))


def buffers() -> int:
    """Count blocks above 1 kB that were allocated by the code of connections, or by what it called."""
    taken = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/aqueduct/*", all_frames=True)])
    return sum(trace.size > 1000 for trace in taken.traces)


async def use(ends: Ends, how: str) -> None:
    """Have channels and refs in flight in both directions, with octets in all of them, and end the connection."""
    ends.system.registry.register("clerk", clerk := ends.system.spawn(Clerk))
    outward, inward = channel(bytes), channel(bytes)
    await ends.peer.send(Parcel("x", sender=outward[0], receiver=inward[1], many=[bytes(5000)]))
    got = await ends.got.receive()
    await inward[0].send(bytes(100_000))
    await got.sender.send(bytes(50_000))
    ref = await ends.peer.lookup("clerk")
    ref.tell(Note("n" * 5000))

    async def ask() -> None:
        with pytest.raises(LevadaError):
            await ref.ask(Do("wait"), timeout=None)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await trio.sleep(1)
        unread = channel(bytes)
        await ends.peer.send(Parcel("unread", sender=unread[0], many=[bytes(20_000)]))
        match how:
            case "here":
                ends.peer.abort()
            case "there":
                ends.listener.peers[0].abort()
            case _:
                ends.cut()
    await ends.peer.terminated()
    clerk.stop(now=True)
    clerk._actor.gate.set()  # type: ignore[attr-defined]
    await clerk.terminated()
    for sender, receiver in (outward, inward, unread):
        if sender._moved is None:
            sender.cancel()
        if receiver._moved is None:
            receiver.close()
    got.sender.cancel()
    got.receiver.close()


async def once(system: ActorSystem, how: str) -> None:
    with Keeper() as keeper:
        async with (
            serve(system, "aqueduct+memory://desk", keeper.function(), expose={"clerk"}) as listener,
            connect(system, listener.url, object) as peer,
        ):
            await use(Ends(system, listener, peer, keeper.got), how)


@pytest.mark.parametrize("how", ["here", "there", "cut"])
async def test_it_frees_all_objects_without_the_collector(
    how: str, no_collector: None, autojump_clock: MockClock
) -> None:
    async with ActorSystem() as system:
        await once(system, how)  # what is made once
        gc.collect()
        before = objects()
        for _ in range(3):
            await once(system, how)
        await trio.sleep(60)
        listeners = Counter(ListenerActor=3, PeerConfig=3, AqueductConfig=3)  # one each, with all it serves
        assert objects() - before - listeners == Counter()


@pytest.mark.ci
@pytest.mark.parametrize("how", ["here", "there", "cut"])
async def test_it_frees_all_buffers_without_the_collector(
    how: str, no_collector: None, autojump_clock: MockClock
) -> None:
    async with ActorSystem() as system:
        await once(system, how)
        gc.collect()
        tracemalloc.start(10)
        try:
            for _ in range(3):
                await once(system, how)
            await trio.sleep(60)
            assert buffers() < 6  # the random generator of each link in memory is one
        finally:
            tracemalloc.stop()
