"""Why a channel was cancelled is told on the other side, in words that are for peers: `ChannelCancelled.reason`."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from levada.actors.aqueduct import Peer, PeerConfig, RawMessage, connect, serve
from levada.actors.aqueduct.entry import connect_over
from levada.framework import (
    Actor,
    ActorSystem,
    Down,
    OneshotSender,
    Receiver,
    Sender,
    channel,
    forward,
    handles,
    message,
    oneshot,
)
from levada.framework.channel import TerminalState
from levada.framework.codec import AttachmentKind, Codec
from levada.framework.errors import AskTimeout, ChannelCancelled
from levada.transports.carriers import MemoryConfig, dial


@message("tests.reasons.Follow")
class Follow:
    how: str
    to: Sender[int]


@message("tests.reasons.Wanted")
class Wanted:
    answer: OneshotSender[int]


@message("tests.reasons.Numbers")
class Numbers:
    numbers: Receiver[int]


async def follow(m: Follow) -> None:
    match m.how:
        case "says why":
            await m.to.send(1)
            m.to.cancel("sold out\n" + 2000 * "x")
        case "says nothing":
            await m.to.send(1)
            m.to.cancel()
        case "loses an actor":
            raise AskTimeout("/hidden/desk did not answer")
        case "loses an actor in its block":
            async with m.to as to:
                await to.send(1)
                raise AskTimeout("/hidden/desk did not answer")
        case "fails":
            raise ValueError("hidden")
        case "fails in its block":
            async with m.to:
                raise ValueError("hidden")
        case "fails beside its block":
            async with m.to, trio.open_nursery() as nursery:
                nursery.start_soon(fail)
                await trio.sleep_forever()
        case "is cancelled in its block":
            with trio.CancelScope() as scope:
                async with m.to:
                    await m.to.send(1)
                    scope.cancel("hidden")
                    await trio.sleep_forever()


async def fail() -> None:
    raise ValueError("hidden")


class First:
    """The sender is the first attachment of its message."""

    def attach(self, handle: Any) -> tuple[AttachmentKind, int]:
        return AttachmentKind.SENDER, 0

    def rollback(self) -> None:
        raise AssertionError("nothing is given back")


@asynccontextmanager
async def desk(handler: Any = follow, kind: Any = Follow, **client: Any) -> AsyncIterator[Peer[Any]]:
    async with (
        ActorSystem() as system,
        serve(system, "aqueduct+memory://desk", handler, kind) as listener,
        connect(system, listener.url, client.pop("item", kind), config=PeerConfig(**client)) as peer,
    ):
        yield peer


async def end_of(receiver: Receiver[int]) -> ChannelCancelled:
    """Return the error of a channel, after its messages; it stays."""
    with pytest.raises(ChannelCancelled) as first:
        async for _ in receiver:
            pass
    with pytest.raises(ChannelCancelled) as second:
        await receiver.receive()
    assert (str(second.value), second.value.reason) == (str(first.value), first.value.reason)
    assert receiver.state is TerminalState.CANCELLED
    assert "hidden" not in str(first.value)
    return first.value


@pytest.mark.handler_fails
@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("says why", r"sold out\\nx{989}…"),  # 1,000 characters
        ("says nothing", ""),
        ("loses an actor", r"an actor did not answer in time \[[0-9a-f]{8}\]"),
        ("loses an actor in its block", "an actor did not answer in time"),
        ("fails", r"the handler failed \[[0-9a-f]{8}\]"),
        ("fails in its block", "the sender has failed"),
        ("fails beside its block", "the sender has failed"),
        ("is cancelled in its block", "its task was cancelled"),
    ],
)
async def test_the_reader_is_told_why(how: str, reason: str) -> None:
    async with desk() as peer:
        sender, numbers = channel(int)
        await peer.send(Follow(how, sender))
        error = await end_of(numbers)
        assert re.fullmatch(reason, error.reason)
        text = "channel int: the sender cancelled the channel"
        assert str(error) == (f"{text}: {error.reason}" if reason else text)


async def test_the_one_who_waits_for_an_answer_is_told_why() -> None:
    async def refuse(m: Wanted) -> None:
        m.answer.cancel("closed today")

    async with desk(refuse, Wanted) as peer:
        answer, answered = oneshot(int)
        await peer.send(Wanted(answer))
        with pytest.raises(ChannelCancelled) as cancelled:
            await answered
        assert cancelled.value.reason == "closed today"


@pytest.mark.parametrize("kind", ["clone", "unreliable"])
async def test_each_kind_of_sender_tells_why(kind: str) -> None:
    async def refuse(m: Follow) -> None:
        to = m.to.clone() if kind == "clone" else m.to.unreliable(4)
        await to.send(1)
        to.cancel("sold out")

    async with desk(refuse) as peer:
        sender, numbers = channel(int)
        await peer.send(Follow("", sender))
        assert (await end_of(numbers)).reason == "sold out"


async def test_an_actor_that_watches_the_receiver_of_its_mailbox_is_told_why() -> None:
    """Behind the last message."""
    got: list[Any] = []

    class Reader(Actor[int | Down | Receiver[int]]):
        @handles
        def begin(self, m: Receiver[int]) -> None:
            m.to_mailbox(self.ref)
            self.watch(m, "numbers")

        @handles
        def number(self, m: int) -> None:
            got.append(m)

        @handles
        def down(self, m: Down) -> None:
            got.append((m.tag, type(m.reason), m.reason.reason))
            self.stop()

    async with ActorSystem() as here, desk() as peer:
        sender, numbers = channel(int)
        reader = here.spawn(Reader)
        await reader.send(numbers)
        await peer.send(Follow("is cancelled in its block", sender))
        await reader.terminated()
    assert got == [1, ("numbers", ChannelCancelled, "its task was cancelled")]


async def test_in_one_process_too() -> None:
    sender, numbers = channel(int)
    sender.send_nowait(1)
    sender.cancel("sold out")
    assert (await end_of(numbers)).reason == "sold out"


async def test_a_program_that_ends_inside_a_block_is_no_failure_of_the_sender() -> None:
    sender, numbers = channel(int)
    with pytest.raises(SystemExit, match="3"), sender:
        raise SystemExit(3)
    assert (await end_of(numbers)).reason == "its task was cancelled"


@pytest.mark.parametrize("deep", [False, True])
async def test_a_block_that_is_left_by_a_group_of_one_cancellation(deep: bool) -> None:
    sender, numbers = channel(int)
    with trio.CancelScope() as scope, sender:
        scope.cancel()
        try:
            await trio.lowlevel.checkpoint()
        except trio.Cancelled as cancelled:
            group = BaseExceptionGroup("", [cancelled])
            raise BaseExceptionGroup("", [group]) if deep else group from None
    assert (await end_of(numbers)).reason == "its task was cancelled"


async def test_a_channel_that_is_cancelled_before_the_peer_has_greeted_tells_no_reason() -> None:
    """Nobody knows yet whether the peer can read it."""
    got: list[Any] = []

    async def take(m: Numbers) -> None:
        got.append(await end_of(m.numbers))

    early = partial(dial, "memory://desk", MemoryConfig(shape="connection"))
    async with (
        ActorSystem() as system,
        serve(system, "aqueduct+memory://desk", take, Numbers),
        connect_over(system, early, Numbers, config=PeerConfig(early=True)) as peer,
    ):
        sender, numbers = channel(int)
        await peer.send(Numbers(numbers))
        assert not peer.headers
        sender.cancel("sold out")
        await wait_all_tasks_blocked()
        assert peer.headers
        assert [error.reason for error in got] == [""]


@pytest.mark.handler_fails
@pytest.mark.parametrize("how", ["fails", "loses an actor", "killed"])
async def test_an_actor_that_ends_with_a_sender(how: str) -> None:
    """What it raised is no text for peers."""

    class Holder(Actor[Follow]):
        @handles
        async def follow(self, m: Follow) -> None:
            self.to = m.to
            await m.to.send(1)
            if how == "fails":
                raise ValueError("hidden")
            if how == "loses an actor":
                raise AskTimeout("/hidden/desk did not answer")
            self.ref.kill()

    async with desk(Holder) as peer:
        sender, numbers = channel(int)
        await peer.send(Follow(how, sender))
        error = await end_of(numbers)
        assert (
            error.reason
            == {
                "fails": "its actor has failed",
                "loses an actor": "an actor did not answer in time",
                "killed": "its actor has stopped (killed)",
            }[how]
        )


@pytest.mark.parametrize("how", ["stop", "kill", "kill in its handler"])
async def test_an_actor_that_ends_while_its_task_or_handler_sends(how: str) -> None:
    """It ends in order, as with its node, and its block is left by a cancellation."""

    class House(Actor[Follow]):
        @handles
        async def follow(self, m: Follow) -> None:
            if how == "kill in its handler":
                await self.count(m.to)
            self.start_soon(self.count, m.to)

        async def count(self, to: Sender[int]) -> None:
            async with to:
                await to.send(1)
                self.ref.stop() if how == "stop" else self.ref.kill()
                await trio.sleep_forever()

    async with desk(House) as peer:
        sender, numbers = channel(int)
        await peer.send(Follow(how, sender))
        error = await end_of(numbers)
        assert error.reason == "its actor has stopped" + ("" if how == "stop" else " (killed)")


async def test_a_reason_passes_through_fronts() -> None:
    """Two nodes in a row: the follower is told what the owner said, not that a front has cancelled."""
    async with desk() as owner:

        def front_of(peer: Peer[Any]) -> Any:
            async def front(m: Follow) -> None:
                sender, receiver = channel(int)
                with receiver:
                    await peer.send(Follow(m.how, sender))
                    assert await forward(receiver, m.to) is TerminalState.CANCELLED

            return front

        async with (
            ActorSystem() as system,
            serve(system, "aqueduct+memory://first", front_of(owner), Follow) as first,
            connect(system, first.url, Follow) as one,
            serve(system, "aqueduct+memory://second", front_of(one), Follow) as second,
            connect(system, second.url, Follow) as two,
        ):
            sender, numbers = channel(int)
            await two.send(Follow("says why", sender))
            assert (await end_of(numbers)).reason.startswith(r"sold out\nxxx")


@pytest.mark.parametrize(
    ("ends", "reason"),
    [
        ("cancelled", "its task was cancelled"),
        ("says nothing", ""),
        ("forgotten", "it was forgotten"),
        ("finished", None),
    ],
)
async def test_what_a_front_tells_that_ends_before_its_reader(ends: str, reason: str | None) -> None:
    inner, numbers = channel(int)
    outer, read = channel(int)
    scope = trio.CancelScope()

    async def front() -> None:
        with scope:
            await forward(numbers, outer)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(front)
        await inner.send(1)
        assert await read.receive() == 1
        match ends:
            case "cancelled":
                scope.cancel("hidden")
            case "says nothing":
                inner.cancel()
            case "forgotten":
                with pytest.warns(ResourceWarning, match="was forgotten before the channel ended"):
                    del inner
            case "finished":
                inner.finish_nowait()
        if reason is None:
            assert [number async for number in read] == []
        else:
            assert (await end_of(read)).reason == reason


async def test_a_front_whose_owner_is_lost_says_so() -> None:
    async def front(m: Follow) -> None:
        sender, receiver = channel(int)
        async with desk(wait) as owner:
            with receiver:
                await owner.send(Follow("", sender))
                await m.to.send(await receiver.receive())
                owner.abort()
                assert await forward(receiver, m.to) is TerminalState.CONNECTION_LOST

    async def wait(m: Follow) -> None:
        await m.to.send(1)
        await m.to.terminated()

    async with (
        ActorSystem() as system,
        serve(system, "aqueduct+memory://front", front, Follow) as listener,
        connect(system, listener.url, Follow) as peer,
    ):
        sender, numbers = channel(int)
        await peer.send(Follow("", sender))
        assert (await end_of(numbers)).reason == "the connection under a channel was lost"


async def test_a_full_window_has_no_room_for_a_reason() -> None:
    """A reader that takes nothing holds up no one: the stream is reset."""
    full = trio.Event()

    async def fill(m: Follow) -> None:
        with pytest.raises(trio.TooSlowError), trio.fail_after(0.05):
            while True:
                await m.to.send(1)
        m.to.cancel("too slow")
        full.set()

    async with desk(fill) as peer:
        sender, numbers = channel(int)
        await peer.send(Follow("", sender))
        await full.wait()
        await wait_all_tasks_blocked()
        assert (await end_of(numbers)).reason == ""


async def test_a_peer_that_does_not_read_reasons_gets_none() -> None:
    async with desk(item=RawMessage) as peer:
        sender: Sender[Any]
        sender, numbers = channel(RawMessage)
        data = Codec().encode(Follow("says why", sender), Follow, attachments=First())
        await peer.send(RawMessage(bytes(data), [sender]))
        with pytest.raises(ChannelCancelled, match=r"the sender cancelled the channel$"):
            async for _ in numbers:
                pass


async def test_an_actor_that_gets_the_messages_is_told_nothing_of_it(caplog: pytest.LogCaptureFixture) -> None:
    """The receiver's channel ends as after any cancellation, and nothing is logged."""
    got: list[int] = []

    class Reader(Actor[int]):
        @handles
        def number(self, m: int) -> None:
            got.append(m)

    async with ActorSystem() as here, desk() as peer:
        sender, numbers = channel(int)
        numbers.to_mailbox(here.spawn(Reader))
        await peer.send(Follow("says why", sender))
        await wait_all_tasks_blocked()
        assert got == [1]
    assert [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []
