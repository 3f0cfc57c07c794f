"""A channel whose message is not handled, or cannot go on, ends at the follower in another system: at once, not when it is collected."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from levada.actors.aqueduct import connect, serve
from levada.framework import Actor, ActorSystem, Asks, Sender, bounded, channel, conflate, handles, message, restart
from levada.framework.embedding import Forwarder
from levada.framework.errors import ActorError, ActorStopped, ChannelCancelled


@message("tests.aqueduct.refused.Follow")
class Follow(Asks[int]):
    """Follow something; also sent without an answer."""

    to: Sender[int]


class Owner(Actor[Any]):
    """Takes a follower, and lets it go."""

    @handles
    async def follow(self, m: Follow) -> int:
        await trio.sleep(0.1)
        return 1


class Passing(Owner):
    """Sends the follower on, which only `forward` can."""

    house: Any

    @handles
    async def follow(self, m: Follow) -> int:
        return int(await self.house.ask(m))


class Telling(Owner):
    """Sends the follower on, without waiting."""

    house: Any

    @handles
    async def follow(self, m: Follow) -> int:
        self.house.tell(m)
        return 1


class Failing(Owner):
    """Fails."""

    @handles
    async def follow(self, m: Follow) -> int:
        raise ValueError("no")


class Fronting(Forwarder):
    """Passes everything on, as the front of a singleton does."""

    def __init__(self, house: Any) -> None:
        super().__init__()
        self.point_at = house

    def started(self) -> None:
        self.point(self.point_at)


class Mute(Actor[Any]):
    """Has no handler."""


def no_key(_: object) -> int:
    raise LookupError("no key")


KINDS: dict[str, Callable[[ActorSystem, Any], Any]] = {
    "owner": lambda system, house: system.spawn(Owner),
    "passing": lambda system, house: system.spawn(Passing, house, supervise=restart()),
    "telling": lambda system, house: system.spawn(Telling, house, supervise=restart()),
    "failing": lambda system, house: system.spawn(Failing, supervise=restart()),
    "fronting": lambda system, house: system.spawn(Fronting, house),
    "mute": lambda system, house: system.spawn(Mute),
    "stop": lambda system, house: system.spawn(Owner, mailbox=bounded(1, overflow="stop"), supervise=restart()),
    "stop_for_good": lambda system, house: system.spawn(Owner, mailbox=bounded(1, overflow="stop")),
    "drop_new": lambda system, house: system.spawn(Owner, mailbox=bounded(1, overflow="drop_new")),
    "drop_old": lambda system, house: system.spawn(Owner, mailbox=bounded(1, overflow="drop_old")),
    "conflate": lambda system, house: system.spawn(Owner, mailbox=bounded(1, overflow=conflate(lambda m: 1))),
    "no_key": lambda system, house: system.spawn(Owner, mailbox=bounded(1, overflow=conflate(no_key))),
}


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is freed in the test is freed by reference counting alone. Pytest keeps the log records, as some handlers do."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:<Sender of channel:ResourceWarning")
@pytest.mark.handler_fails
@pytest.mark.parametrize("kind", KINDS)
async def test_a_follower_learns_that_no_one_has_its_channel(
    kind: str, autojump_clock: MockClock, no_collector: None
) -> None:
    async def ignore(_: object) -> None:
        pass

    async with (
        ActorSystem("house") as house,
        ActorSystem("front") as front,
        ActorSystem("third") as third,
        serve(house, "aqueduct+memory://house", ignore, Follow, expose={"owner"}),
        connect(front, "aqueduct+memory://house", Follow) as to_house,
        serve(front, "aqueduct+memory://front", ignore, Follow, expose={"front"}),
        connect(third, "aqueduct+memory://front", Follow) as peer,
    ):
        house.registry.register("owner", house.spawn(Owner))
        front.registry.register("front", KINDS[kind](front, await to_house.lookup("owner")))
        ref = await peer.lookup("front")
        followed = []
        for _ in range(3):
            sender, prices = channel(int)
            followed.append(prices)
            with suppress(ActorStopped):
                await ref.send(Follow(sender))
            del sender
        sender, prices = channel(int)
        followed.append(prices)
        try:
            assert await ref.ask(Follow(sender)) == 1
        except ActorError:
            assert kind not in ("owner", "drop_old", "conflate")
        for prices in followed:
            with trio.fail_after(1), pytest.raises(ChannelCancelled):
                await prices.receive()
