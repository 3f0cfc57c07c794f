"""Messages that nobody will get, with channels inside: those end, nobody is warned, and no place in a mailbox's line is left."""

from __future__ import annotations

import gc
from typing import Any

import attrs
import pytest
import trio
import trio.testing
from trio.testing import MockClock

from levada.framework import (
    Actor,
    ActorSystem,
    Asks,
    OneshotReceiver,
    OneshotSender,
    Receiver,
    Sender,
    TerminalState,
    bounded,
    channel,
    handles,
    message,
    oneshot,
)
from levada.framework._runtime.channel_core import handles_in
from levada.framework.errors import AskTimeout


@message("tests.framework.Bundle")
class Bundle:
    """Handles at every depth."""

    sender: Sender[int] | None = None
    many: list[Any] = attrs.field(factory=list)
    named: dict[str, Receiver[int]] = attrs.field(factory=dict)
    inner: Bundle | None = None


def bundle() -> tuple[Bundle, list[Any], list[Any]]:
    """Make a message with four handles; return it, them, and their other halves, which stay."""
    (a, a2), (b2, b), (c, c2), (d2, d) = channel(int), channel(int), oneshot(int), oneshot(int)
    made = Bundle(a, [(c, d), 1, "text", None], inner=Bundle(named={"b": b}))
    return made, [a, b, c, d], [a2, b2, c2, d2]


def end(halves: list[Any]) -> None:
    for half in halves:
        half.cancel() if isinstance(half, Sender | OneshotSender) else half.close()


def test_handles_in_a_message_are_found_at_every_depth() -> None:
    made, inside, others = bundle()
    made.many += [made.many, Sleeper]
    assert set(handles_in(made)) == set(inside)
    assert [type(handle) for handle in handles_in([inside[2], inside[3]])] == [OneshotReceiver, OneshotSender]
    end(inside + others)


@pytest.mark.parametrize("ending", ["cancel", "close"])
async def test_handles_in_what_a_local_channel_drops_end_with_their_last_holder_and_without_a_warning(
    ending: str,
) -> None:
    sender, receiver = channel(Bundle)
    made, inside, others = bundle()
    await sender.send(made, receipt=True)
    await sender.send(made)
    del made
    sender.cancel() if ending == "cancel" else receiver.close()
    await trio.testing.wait_all_tasks_blocked()
    assert {half.state for half in others} == {TerminalState.OPEN}  # this test has them still, and so may any program
    inside.clear()
    await trio.testing.wait_all_tasks_blocked()
    assert [half.state for half in others] == [
        TerminalState.CANCELLED,
        TerminalState.RECEIVER_CLOSED,
        TerminalState.FINISHED,
        TerminalState.RECEIVER_CLOSED,
    ]


async def test_handles_in_what_a_full_unreliable_channel_drops_end_without_a_warning() -> None:
    sender, receiver = channel(Bundle)
    sender.unreliable(1)
    others = []
    for _ in range(3):
        made, _, left = bundle()
        sender.send_nowait(made)
        others.append(left)
        del made, _
    await trio.testing.wait_all_tasks_blocked()
    assert [half.state is TerminalState.OPEN for half in (others[0][0], others[1][0], others[2][0])] == [
        False,
        False,
        True,
    ]
    receiver.close()
    await trio.testing.wait_all_tasks_blocked()
    assert others[2][0].state is TerminalState.CANCELLED


async def test_handles_in_what_never_left_are_lost_at_once() -> None:
    """Where the receiver's half is in another system, nobody can have the handles that were to travel."""
    sender, receiver = channel(Bundle)
    made, inside, others = bundle()
    inside[0].send_nowait(1)
    await sender.send(made)
    receiver.take_over("a message of this test")
    sender.cancel()
    await trio.testing.wait_all_tasks_blocked()
    assert [half.state for half in others[1:]] == [TerminalState.LOST] * 3
    assert await others[0].receive() == 1  # what was sent before the loss
    assert others[0].state is TerminalState.LOST
    assert all("went away with a message that was dropped" in repr(handle) for handle in inside)


@message("tests.framework.Numbers")
class Numbers(Asks[Receiver[int]]):
    """Ask for a channel."""


class Slow(Actor[Any]):
    """Answers with a channel, late."""

    @handles
    async def stream(self, m: Numbers) -> Receiver[int]:
        await trio.sleep(2)
        self.sender, receiver = channel(int)
        return receiver


async def test_a_handle_in_an_answer_that_comes_too_late_ends_without_a_warning(autojump_clock: MockClock) -> None:
    async with ActorSystem() as system:
        actor = Slow()
        ref = system.spawn(lambda: actor)
        with pytest.raises(AskTimeout):
            await ref.ask(Numbers(), timeout=1)
        await trio.sleep(2)
        assert actor.sender.state is TerminalState.RECEIVER_CLOSED
        assert system.statistics().late_replies == 1


class Sleeper(Actor[Any]):
    """Handles nothing until the gate is open."""

    gate: trio.Event

    @handles(int)
    async def wait(self, m: int) -> None:
        await self.gate.wait()


async def test_a_channel_that_ends_while_it_waits_for_a_mailbox_leaves_its_place_in_the_line() -> None:
    gate = trio.Event()
    async with ActorSystem() as system:
        ref = system.spawn(Sleeper, gate, mailbox=bounded(1))
        await ref.send(0)
        await trio.testing.wait_all_tasks_blocked()
        await ref.send(1)

        def feed(number: int) -> None:
            sender, receiver = channel(int)
            receiver.to_mailbox(ref)
            sender.send_nowait(number)
            sender.cancel()

        async def use(count: int) -> int:
            """Feed the full mailbox from channels that are cancelled then; count what is left."""
            for number in range(count):
                feed(number)
            await trio.testing.wait_all_tasks_blocked()
            gc.collect()
            return sum(str(type(thing).__module__).startswith("levada.") for thing in gc.get_objects())

        first = await use(20)
        assert await use(40) == first
        with trio.CancelScope() as scope:
            scope.cancel()
            await ref.send(2)  # the line is in order
        gate.set()
        await ref.send(3)
