"""Messages that the other side cannot read: who learns the cause, and what goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import trio

from levada.actors.aqueduct import PeerConfig, RawMessage, connect, serve
from levada.framework import Actor, ActorSystem, OneshotSender, Receiver, Sender, channel, handles, message, oneshot
from levada.framework.channel import TerminalState
from levada.framework.errors import ChannelCancelled

UNCHECKED = PeerConfig(schema="off")


@message("tests.unreadable.Wanted")
class Wanted:
    answer: OneshotSender[str]


@message("tests.unreadable.Other")
class Other:
    text: str
    many: Sender[int]
    one: OneshotSender[int]
    back: Receiver[int]


CAUSE = "Other: expected Wanted, got Other"


async def function(m: Wanted) -> None:
    m.answer.send("read")


class Reader(Actor[Wanted]):
    @handles
    def read(self, m: Wanted) -> None:
        m.answer.send("read")


@pytest.mark.parametrize("handler", [function, Reader])
async def test_the_senders_in_it_say_why_and_the_next_message_is_read(
    handler: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The client's receivers raise the cause; the server has one line in its log; the entrypoint stays open."""
    async with (
        ActorSystem() as system,
        serve(system, "aqueduct+memory://desk", handler, message_type=Wanted, config=UNCHECKED) as listener,
        connect(system, listener.url, object, config=UNCHECKED) as peer,
    ):
        many, numbers = channel(int)
        one, number = oneshot(int)
        back, receiver = channel(int)
        await peer.send(Other("x", many, one, receiver))
        for waiting in (numbers.receive, number.receive):
            with pytest.raises(ChannelCancelled, match=f"could not read the message .*: {CAUSE}$"):
                await waiting()
        assert await back.terminated() is TerminalState.RECEIVER_CLOSED
        answer, answered = oneshot(str)
        await peer.send(Wanted(answer))
        assert await answered == "read"
    said = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.getMessage().partition(" cannot be read: ")[2] for record in said] == [CAUSE]


async def test_it_is_read_late_and_its_senders_say_why_at_once(autojump_clock: trio.testing.MockClock) -> None:
    """Behind a handler that takes its time, and leaves nothing to write."""

    async def slow(m: Wanted) -> None:
        held.append(m.answer)
        await trio.sleep(100)

    held: list[OneshotSender[str]] = []
    one_at_a_time = PeerConfig(schema="off", max_handlers=1)
    async with (
        ActorSystem() as system,
        serve(system, "aqueduct+memory://desk", slow, message_type=Wanted, config=one_at_a_time) as listener,
        connect(system, listener.url, object, config=UNCHECKED) as peer,
    ):
        answer, answered = oneshot(str)
        many, numbers = channel(int)
        one, number = oneshot(int)
        back, receiver = channel(int)
        began = trio.current_time()
        await peer.send(Wanted(answer))
        await peer.send(Other("x", many, one, receiver))
        with trio.fail_after(200):
            for waiting in (numbers.receive, number.receive):
                with pytest.raises(ChannelCancelled, match=f"could not read the message .*: {CAUSE}$"):
                    await waiting()
            assert await back.terminated() is TerminalState.RECEIVER_CLOSED
        assert trio.current_time() - began == 100
        held[0].send("late")
        assert await answered == "late"


@pytest.mark.ci
async def test_a_client_that_has_no_message_classes_sees_its_senders_cancelled() -> None:
    """One that does not say that it writes messages of the codec may not know what the explanation is."""
    async with (
        ActorSystem() as system,
        serve(system, "aqueduct+memory://desk", function, message_type=Wanted) as listener,
        connect(system, listener.url, RawMessage) as peer,
    ):
        sender, receiver = channel(RawMessage)
        await peer.send(RawMessage(b"\xc0", [sender]))
        with pytest.raises(ChannelCancelled, match="the sender cancelled the channel"):
            await receiver.receive()


async def test_a_flood_of_senders_in_nonsense_gets_few_explanations(autojump_clock: trio.testing.MockClock) -> None:
    """Eight of them are told, the others cancelled: what is sent for a message does not grow with it."""
    raw = PeerConfig(headers=[("levada-codec", b"1")])
    async with (
        ActorSystem() as system,
        serve(system, "aqueduct+memory://desk", function, message_type=Wanted) as listener,
        connect(system, listener.url, RawMessage, config=raw) as peer,
    ):
        pairs = [channel(RawMessage) for _ in range(50)]
        await peer.send(RawMessage(b"\xc0", [sender for sender, _ in pairs]))
        told = 0
        for _, receiver in pairs:
            try:
                assert b"levada.unreadable" in (await receiver.receive()).payload
                told += 1
            except ChannelCancelled:
                pass
        assert told == 8
