"""Random trees of channels over QUIC, on a simulated network and on loopback, and in memory by the million."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock

from levada.actors.aqueduct import AqueductConfig, PeerConfig
from levada.actors.aqueduct.entry import connect_over, serve_over
from levada.framework import ActorSystem
from levada.transports.carriers import MemoryConfig
from levada.transports.carriers.simnet import SimNet
from levada.transports.quic import QuicConfig, dial, listen

from .conftest import Ends, Keeper, Start, settled
from .scenarios import World

# A message that never left takes the handles in it along: they end when they are collected, with a warning, as they should.
pytestmark = pytest.mark.filterwarnings("ignore:.* was forgotten before the channel ended:ResourceWarning")


def small(rng: random.Random) -> AqueductConfig:
    """Windows of all sizes, so that something is always full."""
    return AqueductConfig(
        window=rng.choice((2, 5, 256)),
        mailbox=rng.choice((2, 4, 256)),
        unreliable_window=rng.choice((6, 16_384)),
        max_unacked=rng.choice((200, 2**26)),
        max_untaken=rng.choice((200, 2**25)),
    )


async def live(world: World, seed: int, messages: int, rounds: int = 1) -> None:
    """Let the programs do anything, end everything and look, as often as is wanted."""
    try:
        for _ in range(rounds):
            await world.run(messages)
            await world.wind_up(closing=world.rng.random() < 0.5)
    except BaseException as error:
        error.add_note(f"seed {seed}, after {world.messages} messages")
        raise


@pytest.mark.rule("I-1", "I-2", "I-3", "I-4", "I-5", "I-6", "I-9", "I-10")
@pytest.mark.parametrize("seed", range(12))
async def test_i1_to_i10_over_quic_on_a_bad_network(
    start_on_network: Start, seed: int, autojump_clock: MockClock
) -> None:
    """The invariants hold for handles, receipts and messages when packets are lost, late and in another order."""
    rng = random.Random(seed)
    net = SimNet(seed, delay=0.02, jitter=rng.choice((0.0, 0.03)), loss=rng.choice((0.0, 0.1)), turns=500_000)
    async with start_on_network(net, core=small(rng)) as ends:
        await live(World(ends, rng, (0, 0, 0.01, 0.06, 0.7), settled), seed, 120)


@pytest.mark.loopback
@pytest.mark.rule("I-5", "I-10")
async def test_i5_i10_over_quic_on_loopback(quic: tuple[QuicConfig, QuicConfig]) -> None:
    """The same over real sockets; what is under way is waited for by looking."""
    rng = random.Random(77)
    core = attrs.evolve(small(rng), ack_delay=0.005, declare_delay=0.005, nack_delay=0.05)

    @asynccontextmanager
    async def begin() -> AsyncIterator[Ends]:
        config = PeerConfig(core=core)
        with Keeper() as keeper:
            listening = partial(listen, "quic://127.0.0.1:0", quic[0])
            async with (
                ActorSystem() as system,
                serve_over(system, listening, keeper.function(), Any, config) as listener,
            ):
                url = listener.url.replace("aqueduct:", "quic:")
                dialling = partial(dial, url, attrs.evolve(quic[1], server_name="localhost"))
                async with connect_over(system, dialling, object, config) as peer:
                    yield Ends(system, listener, peer, keeper.got)

    async with begin() as ends:

        def state() -> object:
            return ends.left(), ends.client.turns, ends.server.turns

        async def quiet() -> None:
            before = None
            while before != (now := state()):
                before = now
                await trio.sleep(0.15)  # longer than any delay of the configuration

        with trio.fail_after(60):
            await live(World(ends, rng, (0, 0, 0.001), quiet), 77, 100)


async def trees(start: Start, seed: int, messages: int) -> None:
    """Grow and end random trees in memory, where datagrams are lost, until so many messages have been sent."""
    carrier = MemoryConfig(shape="connection", datagram_loss=0.3)
    async with start(carrier=carrier, core=AqueductConfig(window=64, mailbox=64)) as ends:
        world = World(ends, random.Random(seed), (0, 0, 0, 0.01, 0.06, 0.7), settled, most=200)
        await live(world, seed, 500, messages // 500)
        assert world.messages >= messages
        assert world.made > messages // 20


@pytest.mark.rule("I-5", "I-13")
async def test_i5_i13_nothing_leaks(start: Start, autojump_clock: MockClock, pytestconfig: pytest.Config) -> None:
    """Random trees with random cancels, drops and losses: at rest no halves, links, tombstones, records, octets, streams or tasks are left."""
    await trees(start, 2024, 2_000 if pytestconfig.getoption("--profile") == "fast" else 20_000)


@pytest.mark.soak
@pytest.mark.rule("I-5", "I-13")
@pytest.mark.parametrize("seed", range(10))
async def test_i5_i13_nothing_leaks_of_ten_million_messages(start: Start, autojump_clock: MockClock, seed: int) -> None:
    """The same with a million messages for each of ten connections."""
    await trees(start, seed, 1_000_000)
