"""A connection that is over frees its memory by itself: none of it waits for the garbage collector."""

from __future__ import annotations

import gc
import logging
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import trio
from tests.simnet import SimNet
from trio.testing import MockClock

from levada.actors.aqueduct import PeerConfig, connect, serve
from levada.actors.aqueduct.entry import connect_over, serve_over
from levada.framework import ActorSystem, channel
from levada.framework.errors import LevadaError
from levada.transports.quic import QuicConfig, dial, listen

from .conftest import Clerk, Do, Ends, Keeper, Note, Parcel

OURS = ("levada.", "aioquic.")
Quic = tuple[QuicConfig, QuicConfig]


@pytest.fixture
def no_collector(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.CRITICAL)  # records would be kept, with what is in them
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def objects() -> Counter[str]:
    """Count what the connections are made of, by class."""
    return Counter(type(each).__qualname__ for each in gc.get_objects() if str(type(each).__module__).startswith(OURS))


def buffers() -> list[str]:
    """Tell where blocks above 1 kB are from that were allocated by our code, or by what it called.

    The sets in which trio keeps running tasks have exactly 1 kB.
    """
    taken = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/levada/*", all_frames=True)])
    return [f"{trace.size} bytes: {trace.traceback}" for trace in taken.traces if trace.size > 1024]


async def use(ends: Ends, how: str, cut: Callable[[], None]) -> None:
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
                cut()
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


async def once(system: ActorSystem, how: str, quic: Quic | None) -> None:
    """Begin a connection, in memory or over QUIC on a simulated network, and end it."""
    config = PeerConfig()
    with Keeper() as keeper:
        if quic is None:
            async with (
                serve(system, "aqueduct+memory://desk", keeper.function(), Any, expose={"clerk"}) as listener,
                connect(system, listener.url, object) as peer,
            ):
                ends = Ends(system, listener, peer, keeper.got)
                await use(ends, how, ends.cut)
            return
        net = SimNet(1)
        listening = partial(listen, "quic://server:4433", quic[0], port=net.port("server", 4433))
        dialling = partial(dial, "quic://server:4433", quic[1], port=net.port("client"))
        async with (
            serve_over(system, listening, keeper.function(), Any, expose={"clerk"}, config=config) as listener,
            connect_over(system, dialling, object, config=config) as peer,
        ):
            await use(Ends(system, listener, peer, keeper.got), how, lambda: net.partition("client", "server"))


CARRIERS = pytest.mark.parametrize("carrier", ["memory", "quic"])
ENDS = pytest.mark.parametrize("how", ["here", "there", "cut"])


@CARRIERS
@ENDS
async def test_it_frees_all_objects_without_the_collector(
    carrier: str, how: str, quic: Quic, no_collector: None, autojump_clock: MockClock
) -> None:
    async with ActorSystem() as system:
        await once(system, how, quic if carrier == "quic" else None)  # what is made once
        gc.collect()
        before = objects()
        for _ in range(3):
            await once(system, how, quic if carrier == "quic" else None)
        await trio.sleep(60)
        assert objects() - before == Counter()


@pytest.mark.ci
@CARRIERS
@ENDS
async def test_it_frees_all_buffers_without_the_collector(
    carrier: str, how: str, quic: Quic, no_collector: None, autojump_clock: MockClock
) -> None:
    async with ActorSystem() as system:
        await once(system, how, quic if carrier == "quic" else None)
        gc.collect()
        tracemalloc.start(10)
        try:
            for _ in range(3):
                await once(system, how, quic if carrier == "quic" else None)
            await trio.sleep(60)
            assert buffers() == []
        finally:
            tracemalloc.stop()


@pytest.mark.ci
async def test_an_open_channel_takes_at_most_18_kilobytes_with_both_ends(
    quic: Quic, no_collector: None, autojump_clock: MockClock
) -> None:
    """It has handles at both ends, and a task that receives. A queue in each core, and aioquic's streams, would take 6 kB more."""
    count, received = 80, 0

    async def keep(item: Parcel) -> None:
        nonlocal received
        assert item.receiver is not None
        async for _ in item.receiver:
            received += 1

    net = SimNet(1)
    listening = partial(listen, "quic://server:4433", quic[0], port=net.port("server", 4433))
    dialling = partial(dial, "quic://server:4433", quic[1], port=net.port("client"))
    async with (
        ActorSystem() as system,
        serve_over(system, listening, keep, Parcel, config=PeerConfig()),
        connect_over(system, dialling, object, config=PeerConfig()) as peer,
    ):
        senders = []

        async def open_some(number: int) -> None:
            for _ in range(number):
                sender, receiver = channel(bytes)
                await peer.send(Parcel("x", receiver=receiver))
                await (await sender.send(b"x", receipt=True))
                senders.append(sender)
            await trio.sleep(5)

        await open_some(20)
        tracemalloc.start()
        try:
            await open_some(count)
            taken, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert received == count + 20
        assert taken / count <= 18_000
        for sender in senders:
            sender.finish_nowait()
