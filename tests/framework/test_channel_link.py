"""Links between actors and channels, both ways."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.framework import (
    Actor,
    ActorSystem,
    Asks,
    Exit,
    Failed,
    Killed,
    Lost,
    Normal,
    Shutdown,
    TerminalState,
    channel,
    handles,
    message,
    oneshot,
)
from levada.framework.errors import ChannelCancelled, HandleMoved, ReceiverClosed


@message
class Do(Asks[Any]):
    """Call a function with the actor."""

    function: Callable[[Any], Any]


class Holder(Actor[Any]):
    """Does what it is asked; ends with what it is linked to."""

    @handles
    def do(self, m: Do) -> Any:
        return m.function(self)


def link_to(handle: Any, actor: Any) -> None:
    actor.link(handle)


class Trapper(Holder):
    """The same; notes the ends."""

    trap_exits = True

    def __attrs_post_init__(self) -> None:
        self.exits: list[Exit] = []

    @handles
    def exit(self, m: Exit) -> None:
        self.exits.append(m)


def pair(which: str) -> tuple[Any, Any]:
    """A handle to link to, and the other one."""
    kind, _, side = which.partition(" ")
    make: Any = channel if kind == "channel" else oneshot
    sender, receiver = make(int, name="numbers")
    return (sender, receiver) if side == "sender" else (receiver, sender)


WHICH = ["channel sender", "channel receiver", "oneshot sender", "oneshot receiver"]
ENDS: dict[str, tuple[Callable[[Any, Any], object], str]] = {
    "lost": (lambda core, other: core.end(TerminalState.LOST), "Lost"),
    "connection lost": (lambda core, other: core.end(TerminalState.CONNECTION_LOST), "Lost"),
    "given up over there": (
        lambda core, other: other.close() if hasattr(other, "receive") else other.cancel(),
        "Failed",
    ),
    "finished": (lambda core, other: core.finish_producer(), "Normal"),
}


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("late", [False, True], ids=["linked before", "linked after"])
async def test_the_end_of_a_channel_is_an_exit(which: str, how: str, late: bool, autojump_clock: MockClock) -> None:
    """Of the one that traps a message, of the other one the end; `Normal` ends nobody."""
    end, kind = ENDS[how]
    async with ActorSystem() as system:
        for trap in (True, False):
            handle, other = pair(which)
            holder: Any = system.spawn(Trapper if trap else Holder)
            actor = holder._actor
            if late:
                end(handle._core, other)

            def link(actor: Any, handle: Any = handle) -> None:
                for _ in range(2):
                    actor.link(handle)

            await holder.ask(Do(link))
            if not late:
                end(handle._core, other)
            await wait_all_tasks_blocked()
            if trap:
                ends = [(exit_.ref, type(exit_.reason).__name__) for exit_ in actor.exits]
                assert ends == [(handle, kind)] * (2 if late else 1)  # a link to what has ended is no link
                reason = actor.exits[0].reason
                if kind == "Lost":
                    assert reason == Lost("numbers")
                if kind == "Failed":
                    assert type(reason.error) is (ReceiverClosed if "sender" in which else ChannelCancelled)
            elif kind == "Normal":
                assert holder.is_alive
            else:
                assert type(await holder.terminated()).__name__ == kind
            assert not holder._extras or not holder._extras.links
            for each in (handle, other):
                each.close() if hasattr(each, "receive") else each.cancel()


@pytest.mark.parametrize("which", WHICH)
async def test_ending_it_oneself_ends_nobody(which: str, autojump_clock: MockClock) -> None:
    async with ActorSystem() as system:
        handle, _ = pair(which)
        holder: Any = system.spawn(Trapper)
        await holder.ask(Do(lambda actor: actor.link(handle)))
        handle.close() if hasattr(handle, "receive") else handle.cancel()
        await wait_all_tasks_blocked()
        assert [exit_.reason for exit_ in holder._actor.exits] == [Normal()]


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("end", ["stop", "kill", "return"])
async def test_the_end_of_the_actor_gives_the_channel_up(which: str, end: str, autojump_clock: MockClock) -> None:
    async with ActorSystem() as system:
        handle, other = pair(which)
        holder: Any = system.spawn(Holder)
        await holder.ask(Do(lambda actor: actor.link(handle)))
        if end == "return":
            await holder.ask(Do(lambda actor: actor.stop()))
        else:
            getattr(holder, end)()
        reason = await holder.terminated()
        assert reason == {"stop": Shutdown(), "kill": Killed(), "return": Normal()}[end]
        wanted = TerminalState.RECEIVER_CLOSED if "receiver" in which else TerminalState.CANCELLED
        assert handle.state is (TerminalState.OPEN if end == "return" else wanted)
        for each in (handle, other):
            each.close() if hasattr(each, "receive") else each.cancel()


async def test_unlink_and_handles_that_went_away(autojump_clock: MockClock) -> None:
    async with ActorSystem() as system:
        sender, receiver = channel(int)
        holder: Any = system.spawn(Holder)
        await holder.ask(Do(lambda actor: actor.link(sender)))
        await holder.ask(Do(lambda actor: actor.unlink(sender)))
        await holder.ask(Do(lambda actor: actor.unlink(sender)))
        receiver.close()
        await wait_all_tasks_blocked()
        assert holder.is_alive
        going, staying = channel(int)
        await holder.ask(Do(lambda actor: actor.link(going)))
        going.take_over("a message")
        holder.kill()
        await holder.terminated()
        assert staying.state is TerminalState.OPEN
        staying.close()
        moved: Any = system.spawn(Holder)

        def link(actor: Any) -> None:
            with pytest.raises(HandleMoved):
                actor.link(going)

        await moved.ask(Do(link))
        assert moved.is_alive
        assert not moved._extras.links


async def test_links_to_channels_outlive_a_restart(autojump_clock: MockClock) -> None:
    from levada.framework import restart

    async with ActorSystem() as system:
        sender, receiver = channel(int)
        holder: Any = system.spawn(Trapper, supervise=restart())
        await holder.ask(Do(lambda actor: actor.link(receiver)))

        def fail(actor: Any) -> None:
            raise KeyError

        holder.tell(Do(fail))
        await wait_all_tasks_blocked()
        sender.cancel()
        await wait_all_tasks_blocked()
        (exit_,) = holder._actor.exits
        assert isinstance(exit_.reason, Failed)


async def test_links_to_several_channels_are_links_of_their_own(system: ActorSystem) -> None:
    (one, one_reader), (other, other_reader) = channel(int), channel(int)
    holder: Any = system.spawn(Trapper)
    actor = holder._actor
    for handle in (system.spawn(Trapper), one, other):
        await holder.ask(Do(partial(link_to, handle)))
    await holder.ask(Do(lambda actor: actor.unlink(other)))
    other_reader.close()
    await wait_all_tasks_blocked()
    assert actor.exits == []
    one_reader.close()
    await wait_all_tasks_blocked()
    assert [exit_.ref for exit_ in actor.exits] == [one]


async def test_a_channel_whose_link_was_cut_outlives_the_actor(system: ActorSystem) -> None:
    sender, receiver = channel(int)
    holder = system.spawn(Holder)
    await holder.ask(Do(lambda actor: actor.link(receiver)))
    await holder.ask(Do(lambda actor: actor.unlink(receiver)))
    holder.kill()
    assert await holder.terminated() == Killed()
    assert (sender.state, receiver.state) == (TerminalState.OPEN, TerminalState.OPEN)
    sender.cancel()


async def test_a_channel_keeps_no_actor_that_was_linked_to_it_and_has_ended(system: ActorSystem) -> None:
    sender, _receiver = channel(int)
    holder: Any = system.spawn(Holder)
    kept = weakref.ref(holder)
    await holder.ask(Do(lambda actor: actor.link(sender)))
    await holder.ask(Do(lambda actor: actor.stop()))
    assert await holder.terminated() == Normal()
    del holder
    await wait_all_tasks_blocked()
    gc.collect()
    assert kept() is None
    assert sender.state is TerminalState.OPEN
    sender.cancel()
