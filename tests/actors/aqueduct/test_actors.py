"""Halves and streams are actors: which there are, what ends them, what their end does, and why they end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import pytest
import trio
from tests.actors import carried
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.actors.aqueduct import connect, serve
from levada.actors.aqueduct.connection import AqueductDriver
from levada.actors.aqueduct.streams import MAX_IDLE
from levada.framework import (
    Actor,
    ActorSystem,
    ActorTerminated,
    Killed,
    Lost,
    Reason,
    Ref,
    Sender,
    Shutdown,
    channel,
    handles,
    oneshot,
)
from levada.framework.errors import (
    ChannelCancelled,
    ChannelConnectionLost,
    ChannelLost,
    ReceiverClosed,
)
from levada.transports.aqueduct import AqueductConfig, SenderHalf
from levada.transports.carriers import MemoryConfig

from .conftest import Do, Ends, Note, Parcel, Start, Two, settled

NOTHING = (0,) * 10
DEAF = MemoryConfig(shape="connection", datagram_loss=1.0)


def halves(connection: AqueductDriver) -> Counter[str]:
    """Count the actors of halves by their kinds."""
    kinds: Counter[str] = Counter(type(child._actor).__name__ for child in connection.children)  # type: ignore[attr-defined]
    del kinds["StreamActor"]
    return kinds


def wires(connection: AqueductDriver) -> list[Any]:
    """List the actors of streams that are in use."""
    actors = [child._actor for child in connection.children]  # type: ignore[attr-defined]
    return [actor for actor in actors if type(actor).__name__ == "StreamActor" and actor.stream_id >= 0]


def actor_of(connection: AqueductDriver, kind: str) -> Any:
    """Find the one half of a kind."""
    (found,) = [child for child in connection.children if type(child._actor).__name__ == kind]  # type: ignore[attr-defined]
    return found


class Coroner(Actor[ActorTerminated]):
    """Notes of which kind the actors were that have ended, and why."""

    notes: list[tuple[str, Reason]]
    kinds: dict[Ref[Any], str]

    @handles
    def ended(self, m: ActorTerminated) -> None:
        if m.ref in self.kinds:
            self.notes.append((self.kinds[m.ref], m.reason))


def watch_ends(system: ActorSystem, *connections: AqueductDriver) -> list[tuple[str, Reason]]:
    """Note the ends of all children that there are now."""
    notes: list[tuple[str, Reason]] = []
    kinds = {child: type(child._actor).__name__ for one in connections for child in one.children}  # type: ignore[attr-defined]
    system.events.subscribe(ActorTerminated, system.spawn(Coroner, notes, kinds))
    return notes


# ---------------------------------------------------------------- which there are


async def test_halves_and_streams_are_children_of_their_connection(start: Start, autojump_clock: MockClock) -> None:
    """One for each half, and for each stream; when a channel has ended, nothing of it is left but streams that rest."""
    async with start() as ends:
        await ends.peer.send(Parcel())
        await ends.got.receive()
        await settled()
        before = len(wires(ends.client)), len(wires(ends.server))
        assert before == (3, 3)  # the control streams of connection and entrypoint, and the messages of that
        sender, there = channel(int)
        theirs, receiver = channel(int)
        await ends.peer.send(Parcel(receiver=there, sender=theirs))
        got = await ends.got.receive()
        await sender.send(1)
        await settled()
        assert halves(ends.client) == {"EntryOutbound": 1, "Outbound": 1, "Inbound": 1}
        assert halves(ends.server) == {"EntryInbound": 1, "Outbound": 1, "Inbound": 1}
        for connection in (ends.client, ends.server):
            in_use = wires(connection)
            assert len(in_use) == connection.stream_count == 6  # two control streams more, and the messages of one
            assert {wire.stream_id for wire in in_use} >= {0}
        assert await got.receiver.receive() == 1
        sender.finish_nowait()
        got.sender.cancel()
        receiver.close()
        await settled()
        assert halves(ends.client) == {"EntryOutbound": 1}
        assert halves(ends.server) == {"EntryInbound": 1}
        assert (len(wires(ends.client)), len(wires(ends.server))) == before
        assert ends.left() == NOTHING


async def test_oneshots_of_the_program_are_actors_and_those_of_asks_are_records(
    two: Callable[..., AbstractAsyncContextManager[Two]], autojump_clock: MockClock
) -> None:
    """The refs of a connection have an actor at each side; a question and its answer have none."""
    async with two() as both:
        await settled()  # the lookup was a oneshot of the program
        assert halves(both.client) == {"EntryOutbound": 1, "_RefOutbound": 1}
        assert halves(both.server) == {"EntryInbound": 1, "Export": 1}
        spawned = both.here.statistics().spawned - len(both.client.children)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(both.ref.ask, Do("wait"))
            await wait_all_tasks_blocked()
            assert halves(both.client) == {"EntryOutbound": 1, "_RefOutbound": 1}
            both.clerk.gate.set()
        assert both.here.statistics().spawned - len(both.client.children) == spawned
        value, answer = oneshot(int)
        await both.peer.send(value)
        got = await both.got.receive()
        assert halves(both.client)["Inbound"] == halves(both.server)["Outbound"] == 1
        got.send(7)
        assert await answer == 7
        await settled()
        assert halves(both.client) == {"EntryOutbound": 1, "_RefOutbound": 1}
        assert halves(both.server) == {"EntryInbound": 1, "Export": 1}


@pytest.mark.parametrize("count", [MAX_IDLE, pytest.param(10_000, marks=pytest.mark.soak)])
async def test_many_channels_leave_nothing(start: Start, autojump_clock: MockClock, count: int) -> None:
    """Neither actors, nor records, nor links; of streams as many rest as may."""
    async with start(core=AqueductConfig(max_channels=3 * count)) as ends:
        actors = ends.system.statistics().actors
        for at in range(0, count, 64):
            pairs = [channel(int) for _ in range(min(64, count - at))]
            await ends.peer.send(Parcel(many=[there for _, there in pairs]))
            got = await ends.got.receive()
            for number, (sender, _) in enumerate(pairs):
                await sender.send(number)
                sender.finish_nowait()
            for number, receiver in enumerate(got.many):
                assert [item async for item in receiver] == [number]
        await settled()
        assert ends.left() == NOTHING
        assert not ends.client.halves.links
        assert not ends.server.halves.links
        assert ends.system.statistics().actors <= actors + 2 * MAX_IDLE
        assert len(ends.client.children) <= MAX_IDLE + 4


# ---------------------------------------------------------------- ended by somebody else


@pytest.mark.parametrize("now", ["kill", "stop"])
async def test_who_ends_the_actor_of_a_sender_cancels_it(start: Start, autojump_clock: MockClock, now: str) -> None:
    """Both programs learn of it; other channels, and the connection, go on."""
    async with start() as ends:
        sender, there = channel(int)
        await ends.peer.send(Parcel(receiver=there))
        remote = (await ends.got.receive()).receiver
        half = actor_of(ends.client, "Outbound")
        getattr(half, now)()
        reason = await half.terminated()
        assert type(reason) is (Killed if now == "kill" else Shutdown)
        with pytest.raises(ChannelCancelled, match=f"its half was ended .{type(reason).__name__.lower()}"):
            await sender.send(1)
        with pytest.raises(ChannelCancelled):
            await remote.receive()
        await settled()
        await unharmed(ends)


@pytest.mark.parametrize("now", ["kill", "stop"])
async def test_who_ends_the_actor_of_a_receiver_closes_it(start: Start, autojump_clock: MockClock, now: str) -> None:
    """What has arrived is given up; both programs learn of it, and the connection goes on."""
    async with start() as ends:
        sender, there = channel(int)
        await ends.peer.send(Parcel(receiver=there))
        remote = (await ends.got.receive()).receiver
        await sender.send(1)
        await settled()
        getattr(actor_of(ends.server, "Inbound"), now)()
        await wait_all_tasks_blocked()
        with pytest.raises(ReceiverClosed, match="its half was ended"):
            await remote.receive()
        await settled()
        with pytest.raises(ReceiverClosed):
            await sender.send(2)
        await unharmed(ends)


async def unharmed(ends: Ends) -> None:
    """The connection works, and has nothing left of what was before."""
    assert ends.left() == NOTHING
    sender, there = channel(int)
    await ends.peer.send(Parcel(receiver=there))
    remote = (await ends.got.receive()).receiver
    await sender.send(3)
    sender.finish_nowait()
    assert [item async for item in remote] == [3]


@pytest.mark.parametrize(("side", "kind"), [("client", "_RefOutbound"), ("server", "Export")])
async def test_who_ends_the_actor_of_a_ref_loses_it(
    two: Callable[..., AbstractAsyncContextManager[Two]], autojump_clock: MockClock, side: str, kind: str
) -> None:
    """The ref is lost; the actor that it was of is not, and can be looked up again."""
    async with two() as both:
        actor_of(getattr(both, side), kind).kill()
        assert isinstance(await both.ref.terminated(), Lost)
        assert both.cell.is_alive
        again = await both.peer.lookup("clerk", object)
        again.tell(Note("again"))
        assert await again.ask(Do()) == 1


@pytest.mark.rule("AQ-48")
@pytest.mark.parametrize("side", ["client", "server"])
async def test_aq48_who_ends_the_actor_of_a_control_stream_loses_its_channel(
    start: Start, autojump_clock: MockClock, side: str
) -> None:
    """A control stream that is given up is reset with `lost`, on both sides; the rest goes on."""
    async with start() as ends:
        await ends.peer.send(Parcel())
        await ends.got.receive()
        await settled()
        before = {wire.stream_id for wire in wires(ends.client)}
        sender, there = channel(int)
        await ends.peer.send(Parcel(receiver=there))
        remote = (await ends.got.receive()).receiver
        await settled()
        notes = watch_ends(ends.system, ends.client, ends.server)
        (wire,) = [wire for wire in wires(getattr(ends, side)) if wire.stream_id not in before]
        wire.ref.kill()
        await settled()
        with pytest.raises(ChannelLost):
            await sender.send(1)
        with pytest.raises(ChannelLost):
            await remote.receive()
        peers = {ends.client.halves.peer, ends.server.halves.peer}
        reasons = {kind: reason for kind, reason in notes if kind != "StreamActor"}
        assert {kind: type(reason) for kind, reason in reasons.items()} == {"Outbound": Lost, "Inbound": Lost}
        assert {reason.peer for reason in reasons.values() if isinstance(reason, Lost)} == peers
        await unharmed(ends)


@pytest.mark.rule("AQ-20a")
@pytest.mark.parametrize("side", ["client", "server"])
async def test_aq20a_who_ends_the_actor_of_a_message_stream_ends_the_connection_late(
    start: Start, autojump_clock: MockClock, side: str
) -> None:
    """Its channel cannot complete any more: unless that ends in time, the connection does."""
    async with start() as ends:
        sender, there = channel(int)
        await ends.peer.send(Parcel(receiver=there))
        remote = (await ends.got.receive()).receiver
        await sender.send(1)
        await settled()
        (wire,) = [wire for wire in wires(getattr(ends, side)) if wire.stream_id == 6]  # 2: the entrypoint's
        began = trio.current_time()
        wire.ref.kill()
        await ends.client.ref.terminated()
        assert trio.current_time() - began == pytest.approx(10, abs=0.1)
        assert await remote.receive() == 1
        for use in (sender.send(2), remote.receive()):
            with pytest.raises(ChannelConnectionLost, match="AQ-20a"):
                await use


@pytest.mark.rule("AQ-20a")
async def test_aq20a_a_channel_that_ends_in_time_keeps_the_connection(start: Start, autojump_clock: MockClock) -> None:
    """Whose stream of messages was given up may be cancelled, or closed by its receiver."""
    async with start() as ends:
        sender, there = channel(int)
        await ends.peer.send(Parcel(receiver=there))
        remote = (await ends.got.receive()).receiver
        await sender.send(1)
        await settled()
        (wire,) = [wire for wire in wires(ends.client) if wire.stream_id == 6]
        wire.ref.kill()
        sender.cancel()
        remote.close()
        await trio.sleep(20)
        await unharmed(ends)


@pytest.mark.rule("AQ-15")
@pytest.mark.parametrize("side", ["client", "server"])
async def test_aq15_who_ends_the_actor_of_the_connection_control_stream_ends_the_connection(
    start: Start, autojump_clock: MockClock, side: str
) -> None:
    """It lives as long as the connection does."""
    async with start() as ends:
        sender, there = channel(int)
        await ends.peer.send(Parcel(receiver=there))
        remote = (await ends.got.receive()).receiver
        await settled()
        (wire,) = [wire for wire in wires(getattr(ends, side)) if wire.stream_id == 0]
        wire.ref.kill()
        await ends.client.ref.terminated()
        for use in (sender.send(2), remote.receive()):
            with pytest.raises(ChannelConnectionLost, match="control stream was ended"):
                await use


async def test_who_ends_an_actor_that_rests_does_no_harm(start: Start, autojump_clock: MockClock) -> None:
    """It has no stream; the next one gets another."""
    async with start() as ends:
        await unharmed(ends)
        await settled()
        for connection in (ends.client, ends.server):
            idle = [child for child in connection.children if getattr(child._actor, "stream_id", 0) < 0]  # type: ignore[attr-defined]
            assert len(idle) >= 2
            for child in idle:
                child.kill()
        await wait_all_tasks_blocked()
        await unharmed(ends)


# ---------------------------------------------------------------- links


@pytest.mark.rule("AQ-53", "AQ-55")
@carried.memory_only
async def test_aq53_aq55_what_a_nacked_message_carried_ends_as_lost(start: Start, autojump_clock: MockClock) -> None:
    """A half hangs on the actor and the message that made it; the core says who is lost, of any depth, and so they end."""
    async with start(carrier=DEAF) as ends:
        ends.peer.entry.unreliable()
        await ends.peer.entry.send(Parcel())  # a datagram, number 0
        one, first = channel(Parcel)
        receipt = await ends.peer.send(Parcel(receiver=first), receipt=True)
        two, second = channel(Parcel)
        await one.send(Parcel("without"))
        await one.send(Parcel(receiver=second))
        three, third = channel(int)
        await two.send(Parcel(receiver=third))
        client = ends.client
        links = client.halves.links
        actors = {half.id: record for half, record in client.halves.records.items() if isinstance(half, SenderHalf)}
        entry, *chain = actors.values()
        made: list[Any] = [(links[record.half].source, links[record.half].number) for record in chain]
        assert made == [
            (entry, ~1),
            (chain[0], 1),
            (chain[1], 0),
        ]
        notes = watch_ends(ends.system, client)
        assert not await receipt
        await settled()
        assert notes == [("Outbound", Lost(client.halves.peer))] * 3
        for handle in (one, two):
            with pytest.raises(ChannelLost):
                await handle.send(Parcel())
        with pytest.raises(ChannelLost):
            await three.send(1)
        assert not links
        assert halves(client) == {"EntryOutbound": 1}
        assert ends.left() == NOTHING


@pytest.mark.rule("AQ-54")
async def test_aq54_an_ack_resolves_the_link(start: Start, autojump_clock: MockClock) -> None:
    """What the peer's program has got hangs on nothing here any more, however deep it was attached."""
    async with start() as ends:
        one, first = channel(Parcel)
        two, second = channel(Parcel)
        await ends.peer.send(Parcel(receiver=first))
        await one.send(Parcel(receiver=second))
        assert len(ends.client.halves.links) == 2
        await settled()
        assert not ends.client.halves.links
        assert halves(ends.client) == {"EntryOutbound": 1, "Outbound": 2}
        actor_of(ends.client, "EntryOutbound").kill()
        await settled()
        assert halves(ends.client) == {"Outbound": 2}
        got = (await ends.got.receive()).receiver
        inner = (await got.receive()).receiver
        await two.send(Parcel("still"))
        assert (await inner.receive()).text == "still"
        for sender in (one, two):
            sender.cancel()


@pytest.mark.rule("AQ-53")
async def test_aq53_what_an_answer_carries_hangs_on_the_connection(
    two: Callable[..., AbstractAsyncContextManager[Two]], autojump_clock: MockClock
) -> None:
    """A oneshot of an ask is no actor, so its connection stands for it."""
    made: list[tuple[Any, int]] = []

    class Recorded(dict[Any, Any]):
        """The link may be resolved by the time that the answer is here."""

        def __setitem__(self, half: Any, link: Any) -> None:
            made.append((link.source, link.number))
            super().__setitem__(half, link)

    async with two() as both:
        links = both.server.halves.links = Recorded()
        numbers = await both.ref.ask(Do("stream", 3))
        assert [number async for number in numbers] == [0, 1, 2]
        assert made == [(both.server, 0)]
        await settled()
        assert not links


# ---------------------------------------------------------------- the end of the connection


@pytest.mark.parametrize("end", ["cut", "abort", "kill"])
async def test_halves_end_with_their_connection_and_leave_it_the_word(
    start: Start, autojump_clock: MockClock, end: str
) -> None:
    """What the program hears is how the connection ended, whichever way that was; the actors end for the same reason."""
    async with start() as ends:
        sender, there = channel(int)
        theirs, receiver = channel(int)
        await ends.peer.send(Parcel(receiver=there, sender=theirs))
        got = await ends.got.receive()
        await settled()
        client, server = ends.client, ends.server
        notes = watch_ends(ends.system, client)
        peer = client.halves.peer
        if end == "cut":
            ends.cut()
        elif end == "abort":
            ends.peer.abort()
        else:
            client.ref.kill()
        await client.ref.terminated()
        await server.ref.terminated()
        await wait_all_tasks_blocked()
        text = "somebody dug" if end == "cut" else "this side closed the connection"
        for use in (sender.send(1), receiver.receive()):
            with pytest.raises(ChannelConnectionLost, match=text):
                await use
        with pytest.raises(ChannelConnectionLost, match="somebody dug" if end == "cut" else "the peer closed it"):
            await got.sender.send(1)
        expected = {"cut": Lost(peer), "abort": Shutdown(), "kill": Killed()}[end]
        assert sorted((kind, reason) for kind, reason in notes if kind != "StreamActor") == [
            ("EntryOutbound", expected),
            ("Inbound", expected),
            ("Outbound", expected),
        ]
        assert not client.children
        assert not client.halves.links


class Late(Actor[Parcel]):
    """Sends one more channel when it is to end."""

    show: Callable[[list[Any]], None]

    @handles
    def parcel(self, m: Parcel) -> None:
        assert m.sender is not None
        self.out: Sender[Any] = m.sender

    async def stopping(self, reason: Reason) -> None:
        sender, there = channel(int)
        await self.out.send(Parcel(receiver=there))
        connection: Any = self._cell._parent._actor
        self.show([dict(halves(connection)), sender, self.out])


async def test_halves_that_come_while_the_connection_ends_are_records(autojump_clock: MockClock) -> None:
    """They are no actors any more, and end with the connection as the others do."""
    seen: list[Any] = []
    async with (
        ActorSystem() as system,
        serve(system, "aqueduct+memory://late", partial(Late, seen.extend), Any) as listener,
        connect(system, listener.url, Parcel) as peer,
    ):
        theirs, receiver = channel(Parcel)
        await peer.send(Parcel(sender=theirs))
        await settled()
        (connection,) = listener._actor.connections
        connection.ref.stop(now=True)
        await connection.ref.terminated()
        kinds, sender, _ = seen
        assert kinds == {"EntryInbound": 1, "Late": 1}  # those that began before it end after it
        with pytest.raises(ChannelConnectionLost, match="this side closed the connection"):
            await sender.send(1)
        await peer.terminated()
        receiver.close()
