"""Members of a fleet over QUIC on a network that loses and delays packets, and has partitions that heal, in virtual time."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import pytest
import trio
from hypothesis import settings
from tests.actors.simulated import SimConfig
from tests.simnet import SimNet
from trio.testing import MockClock

from levada.framework import Down, Killed, Lost
from levada.framework.errors import ActorStopped, ConnectionLost
from levada.transports.quic import QuicConfig

from .conftest import Do, Trapper, settled
from .members import Fleet, Member
from .test_fleet_model import Fleets

IDLE = 6.0
"""Seconds of silence after which a connection is lost."""

Sides = tuple[QuicConfig, QuicConfig]


class NetworkFleet(Fleet):
    """Members that are hosts of a simulated network."""

    def __init__(self, net: SimNet, sides: Sides, silence: float = IDLE, **changes: Any) -> None:
        super().__init__("simnet", **changes)
        self.net = net
        self.sides = sides
        self.silence = silence

    def settings(self, name: str) -> Any:
        return SimConfig.of(self.net, name, self.sides, idle_timeout=self.silence, keepalive_interval=self.silence / 3)

    def url(self, name: str) -> str:
        return f"aqueduct+simnet://{name}:4433"


# ---------------------------------------------------------------- one partition


@pytest.mark.parametrize("seconds", [2.0, pytest.param(60.0, marks=pytest.mark.ci)])
@pytest.mark.parametrize(
    ("one", "other"), [("c", "a"), pytest.param("c", "b", marks=pytest.mark.ci)], ids=["owner", "giver"]
)
async def test_a_partition_that_heals(
    quic: Sides, seconds: float, one: str, other: str, autojump_clock: MockClock
) -> None:
    """A short one loses nothing. A long one loses the refs between its sides; a later copy is claimed anew."""
    net = SimNet(3, delay=0.02, jitter=0.01, loss=0.02, turns=200_000)
    async with NetworkFleet(net, quic, dial_timeout=5, claim_timeout=5) as f:
        a, b, c = [await f.add(name, Trapper) for name in "abc"]
        ref = await f.hand_over(a, b, c)
        near: Any = c.system.spawn(Trapper, name="near")
        near.tell(Do("watch", who=ref))
        ref.tell("before")
        assert await ref.ask(Do("say", 1)) == 1
        net.partition(one, other)
        ref.tell("during")
        answers: list[Any] = []

        async def ask() -> None:
            try:
                answers.append(await ref.ask(Do("say", 2), timeout=100))
            except ActorStopped as error:
                answers.append(error.reason)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.sleep(seconds)
            net.heal()
        await settled()
        texts = [note for note in a.actor.notes if isinstance(note, str)]
        notes = [note for note in near._actor.notes if isinstance(note, Down)]
        if seconds > IDLE and other == "a":
            assert texts == ["before"]
            assert [type(answer) for answer in answers] == [Lost]
            assert [type(note.reason) for note in notes] == [Lost]
        else:
            assert texts == ["before", "during"]
            assert answers == [2]
            assert notes == []
        again = await f.hand_over(a, b, c)
        assert (again is ref) is ref.is_alive
        assert await again.ask(Do("say", 3)) == 3
        a.clerk.kill()
        await settled()
        assert await again.terminated() == Killed()


async def test_a_ref_is_claimed_through_loss_and_given_up_in_a_partition(
    quic: Sides, autojump_clock: MockClock
) -> None:
    """Packets of the handshake and of the claim are lost, and sent again; with no way to the owner, the claim ends in time."""
    net = SimNet(8, delay=0.05, jitter=0.05, loss=0.1, turns=200_000)
    # Each lost flight of a handshake doubles the time to the next attempt: one of a thousand handshakes takes more than 5 s.
    client, server = (attrs.evolve(side, handshake_timeout=90.0) for side in quic)
    async with NetworkFleet(net, (client, server), dial_timeout=60, claim_timeout=60, silence=90) as f:
        a, b, c = [await f.add(name) for name in "abc"]
        ref = await f.hand_over(a, b, c)
        assert await ref.ask(Do("say", 1), timeout=100) == 1
        d = await f.add("d")
        cut_off = await f.hand_over(a, b, d)
        net.partition("a", "d")
        began = trio.current_time()
        with pytest.raises(ActorStopped):
            await cut_off.ask(Do("say", 2), timeout=100)
        assert trio.current_time() - began == pytest.approx(60, abs=0.1)
        net.heal()
        again = await f.hand_over(a, b, d)
        assert again is not cut_off
        assert await again.ask(Do("say", 3), timeout=100) == 3


# ---------------------------------------------------------------- the model


class FleetsOverQuic(Fleets):
    """The model of the memory carrier, where trouble is a partition: a short one delays, and a long one loses connections."""

    sides: ClassVar[Sides]
    fleet: NetworkFleet

    def make_fleet(self) -> Fleet:
        net = SimNet(7, delay=0.02, jitter=0.02, loss=0.02, duplicate=0.01, reorder=0.02, turns=200_000)
        return NetworkFleet(net, self.sides, dial_timeout=5, claim_timeout=5, idle=15)

    def trouble(self, here: Member, there: Member, how: str) -> None:
        pair = frozenset((here.name, there.name))
        if len(pair) < 2:
            return
        if how in ("cut", "stall", "close"):
            self.blocked[pair] = how
        else:
            self.blocked.pop(pair, None)
        self.divide()

    def open_all(self) -> None:
        self.blocked.clear()
        self.divide()

    def divide(self) -> None:
        """Let the network have the partitions of the model."""
        self.fleet.net.heal()
        for pair in self.blocked:
            self.fleet.net.partition(*pair)

    async def road(self, source: Member, target: Member) -> Any:
        try:
            return await super().road(source, target)
        except (ConnectionLost, ActorStopped):
            return None


@pytest.fixture(autouse=True)
def _sides(quic: Sides) -> None:
    FleetsOverQuic.sides = quic


TestFleetsOverQuic = pytest.mark.ci(pytest.mark.timeout(600)(FleetsOverQuic.TestCase))
# One takes 4.5 s of CPU.
EXAMPLES = 2 if settings.get_current_profile_name() in ("fast", "ci") else 20
TestFleetsOverQuic.settings = settings(settings.default, max_examples=EXAMPLES, stateful_step_count=20)
