"""Watching and linking to handles of networked channels: each way to end is told, the loss of a message included."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import trio
from tests.actors import carried
from trio.testing import MockClock

from levada.actors.aqueduct import connect, serve
from levada.framework import Actor, ActorSystem, Down, Exit, channel, handles
from levada.framework.errors import ChannelCancelled, ChannelConnectionLost, ChannelLost, ReceiverClosed
from levada.transports.carriers import MemoryConfig

from .conftest import Clerk, Do, Parcel, Start, Trapper, settled

DEAF = MemoryConfig(shape="connection", datagram_loss=1.0)

# What the other side or the network does, what the handle that stayed here says, and what an actor linked to it ends of.
ENDS = [
    ("sender", "finish", None, "Normal"),
    ("sender", "cancel", ChannelCancelled, "Failed"),
    ("receiver", "close", ReceiverClosed, "Failed"),
    ("sender", "cut", ChannelConnectionLost, "Lost"),
    ("receiver", "cut", ChannelConnectionLost, "Lost"),
    ("sender", "lose", ChannelLost, "Lost"),
    ("receiver", "lose", ChannelLost, "Lost"),
]
ENDS_ON_CARRIERS = [
    *(pytest.param("memory", *end) for end in ENDS),
    # Only the memory carrier loses datagrams.
    *(pytest.param("qmux+memory", *end, marks=pytest.mark.ci) for end in ENDS if end[1] != "lose"),
]


@pytest.mark.rule("AQ-55")
@pytest.mark.parametrize(
    ("scheme", "travels", "how", "error", "reason"),
    ENDS_ON_CARRIERS,
    indirect=["scheme"],
    ids=lambda value: getattr(value, "__name__", value),
)
@pytest.mark.parametrize("kind", [Clerk, Trapper])
async def test_aq55_ends_are_told_to_who_watches_and_who_is_linked(
    start: Start, autojump_clock: MockClock, travels: str, how: str, error: Any, reason: str, kind: Any
) -> None:
    """A nacked message loses what it carries: `Down` with the `ChannelError`, and an exit signal `Lost`, as for all other ends."""
    async with start(carrier=DEAF if how == "lose" else None) as ends:
        sender, receiver = channel(int)
        stays: Any = receiver if travels == "sender" else sender
        watcher: Any = ends.system.spawn(Clerk)
        linked: Any = ends.system.spawn(kind)
        actor = linked._actor
        await watcher.ask(Do("watch", 7, stays))
        await linked.ask(Do("link", who=stays))
        if how == "lose":
            ends.peer.entry.unreliable()
        await ends.peer.send(Parcel(sender=sender) if travels == "sender" else Parcel(receiver=receiver))
        if how != "lose":
            got = getattr(await ends.got.receive(), travels)
            match how:
                case "finish":
                    got.finish_nowait()
                case "cancel":
                    got.cancel()
                case "close":
                    got.close()
                case "cut":
                    ends.cut()
        await settled()
        (down,) = watcher._actor.notes
        assert isinstance(down, Down)
        assert (down.ref, down.tag) == (stays, 7)
        assert down.reason is None if error is None else type(down.reason) is error
        if kind is Trapper:
            (exit_,) = actor.notes
            assert isinstance(exit_, Exit)
            assert (exit_.ref, type(exit_.reason).__name__) == (stays, reason)
        elif reason == "Normal":
            assert linked.is_alive
        else:
            assert type(await linked.terminated()).__name__ == reason


@pytest.mark.rule("AQ-55")
@carried.memory_only
async def test_aq55_a_whole_tree_is_told(start: Start, autojump_clock: MockClock) -> None:
    """Channels in messages on channels of the lost message: whoever is linked to any of them ends as lost."""
    async with start(carrier=DEAF) as ends:
        ends.peer.entry.unreliable()
        outer, travelling = channel(Parcel)
        linked: list[Any] = [ends.system.spawn(Clerk) for _ in range(3)]
        pairs = [channel(int) for _ in range(2)]
        await linked[0].ask(Do("link", who=outer))
        for actor, (_, receiver) in zip(linked[1:], pairs, strict=True):
            await actor.ask(Do("link", who=receiver))
        await ends.peer.send(Parcel(receiver=travelling))
        for sender, _ in pairs:
            await outer.send(Parcel(sender=sender))
        await settled()
        assert [type(await actor.terminated()).__name__ for actor in linked] == ["Lost"] * 3


async def test_the_end_of_a_linked_actor_is_seen_over_there(start: Start, autojump_clock: MockClock) -> None:
    async with start() as ends:
        (sender, at_peer), (from_peer, receiver) = channel(int), channel(int)
        await ends.peer.send(Parcel(sender=from_peer, receiver=at_peer))
        got = await ends.got.receive()
        linked = ends.system.spawn(Clerk)
        for handle in (sender, receiver):
            await linked.ask(Do("link", who=handle))
        linked.kill()
        with pytest.raises(ChannelCancelled):
            await got.receiver.receive()
        await settled()
        with pytest.raises(ReceiverClosed):
            await got.sender.send(1)


class Fragile(Actor[Parcel]):
    """Keeps the sender it gets, and fails at the next message."""

    out: Any = None

    @handles
    def parcel(self, m: Parcel) -> None:
        assert self.out is None, "broken"
        self.out = m.sender


async def test_the_end_of_an_actor_that_holds_a_handle_is_told_over_the_network(autojump_clock: MockClock) -> None:
    kept: list[Any] = []
    gc.collect()
    gc.disable()
    try:
        async with (
            ActorSystem() as system,
            serve(system, "aqueduct+memory://fragile", Fragile, Any) as listener,
            connect(system, listener.url, Parcel) as peer,
        ):
            (connection,) = listener._actor.connections
            sender, receiver = channel(int)
            await peer.send(Parcel(sender=sender))
            await settled()
            kept += connection.children
            await peer.send(Parcel())
            with trio.fail_after(20), pytest.raises(ChannelCancelled):
                await receiver.receive()
    finally:
        gc.enable()
    assert kept
