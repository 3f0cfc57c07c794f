"""Random trees of channels over QUIC, on a simulated network and on loopback, and in memory by the million."""

from __future__ import annotations

import gc
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import attrs
import pytest
import trio
from tests.simnet import SimNet
from trio.testing import MockClock

from levada.actors.aqueduct import AqueductConfig, Listener, PeerConfig, connect, serve
from levada.actors.aqueduct.entry import connect_over, serve_over
from levada.framework import ActorSystem, Receiver
from levada.transports.carriers import MemoryConfig
from levada.transports.quic import QuicConfig, dial, listen

from .conftest import Ends, Keeper, Start, settled
from .scenarios import World, tasks


def small(rng: random.Random) -> AqueductConfig:
    """Windows of all sizes, so that something is always full."""
    return AqueductConfig(
        window=rng.choice((2, 5, 256)),
        mailbox=rng.choice((2, 4, 256)),
        unreliable_window=rng.choice((6, 16_384)),
        max_unacked=rng.choice((200, 2**26)),
        max_untaken=rng.choice((200, 2**25)),
    )


async def live(world: World, seed: int, messages: int) -> None:
    """Let the programs do anything, end everything and look."""
    try:
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


@pytest.mark.ci
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
                serve_over(system, listening, keeper.function(), Any, config=config) as listener,
            ):
                url = listener.url.replace("aqueduct:", "quic:")
                dialling = partial(dial, url, attrs.evolve(quic[1], server_name="localhost"))
                async with connect_over(system, dialling, object, config=config) as peer:
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


class Forest:
    """Connections one after the other in one system; on each, random trees of channels grow and end, until it is closed, given up or lost.

    Args:
        seed: of chance.
        messages: to be sent on all of them together.
        say: is told how far it is.
    """

    def __init__(self, seed: int, messages: int, say: Callable[[str], None] = lambda _: None) -> None:
        self.rng = random.Random(seed)
        self.seed = seed
        self.messages = messages
        self.say = say
        self.round = max(200, min(10_000, messages // 8))
        """Messages, on average, until everything is ended and looked at."""
        self.sent = self.channels = self.refs = self.connections = 0
        self.rest: tuple[int, int, Counter[str]] | None = None
        """Actors, tasks and objects that were left when the first connection was gone."""

    async def grow(self) -> None:
        """Do all of it."""
        carrier = MemoryConfig(shape="connection", datagram_loss=0.3)
        config = PeerConfig(carrier=carrier, core=AqueductConfig(window=64, mailbox=64))
        with Keeper() as keeper:
            async with (
                ActorSystem() as system,
                serve(system, "aqueduct+memory://forest", keeper.function(), Any, config=config) as listener,
            ):
                try:
                    # The first connection may live for all the messages; `look` compares a later one with it.
                    while self.sent < self.messages or self.connections < 2:
                        await self.connection(system, listener, keeper.got, config)
                        self.look(system)
                        self.say(
                            f"{self.sent} messages on {self.channels} channels and {self.refs} refs over {self.connections} connections"
                        )
                except BaseException as error:
                    error.add_note(
                        f"seed {self.seed}, after {self.sent} messages and those of connection {self.connections}"
                    )
                    raise

    async def connection(self, system: ActorSystem, listener: Listener, got: Receiver[Any], config: PeerConfig) -> None:
        """Grow trees on a connection."""
        rng = self.rng
        self.connections += 1
        async with connect(system, listener.url, object, config=config) as peer:
            ends = Ends(system, listener, peer, got)
            world = World(ends, rng, (0, 0, 0, 0.01, 0.06, 0.7), settled, most=200, run=30)
            while not peer.closed:
                await world.run(1 + int(rng.expovariate(1 / self.round)))
                what = rng.choice(("end", "end", "end", "lose", "give up", "leave", "go on"))
                if peer.closed:
                    break
                if what == "end":
                    await world.wind_up(closing=rng.random() < 0.5)
                elif what == "lose":
                    ends.cut()
                elif what == "give up":
                    peer.abort()
                elif what == "leave":
                    break  # it waits for the channels in vain, and then closes
        await world.after()
        self.sent += world.messages
        self.channels += world.made
        self.refs += world.actors

    def look(self, system: ActorSystem) -> None:
        """Count what is left between two connections."""
        gc.collect()
        modules = (f"{kind.__module__}.{kind.__qualname__}" for kind in map(type, gc.get_objects()))
        objects = Counter(name for name in modules if name.startswith("levada."))
        rest = system.statistics().actors, tasks(), objects
        if self.rest is None:
            self.rest = rest
        assert rest[:2] == self.rest[:2], f"I-5: {rest[:2]} actors and tasks, were {self.rest[:2]}"
        assert not objects - self.rest[2], f"I-5: {objects - self.rest[2]} are left"


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Say nothing of dead letters: refs whose actors have stopped are part of it."""
    caplog.set_level(logging.ERROR, "levada")


@pytest.mark.ci
@pytest.mark.rule("I-5", "I-13")
@pytest.mark.usefixtures("quiet")
async def test_i5_i13_nothing_leaks(autojump_clock: MockClock, pytestconfig: pytest.Config) -> None:
    """Random trees with random cancels, drops and losses: at rest no halves, links, tombstones, streams, tasks, actors or exports are left."""
    forest = Forest(2024, 10_000 if pytestconfig.getoption("--profile") == "fast" else 25_000)
    await forest.grow()
    assert forest.channels > forest.sent // 100


@pytest.mark.soak
@pytest.mark.rule("I-5", "I-13")
@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("seed", range(10))
async def test_i5_i13_nothing_leaks_of_ten_million_messages(
    seed: int, autojump_clock: MockClock, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same with ten times a million messages."""

    def say(text: str) -> None:
        with capsys.disabled():
            print(f"seed {seed}: {text}", flush=True)

    forest = Forest(seed, 1_000_000, say)
    await forest.grow()
    assert forest.connections > 10
