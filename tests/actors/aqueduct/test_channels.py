"""Channels in messages: every kind of handle, at any depth, in every mode, to every end."""

from __future__ import annotations

import gc
import logging
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from levada.actors.aqueduct import PeerConfig, RawMessage, connect, serve
from levada.framework import (
    ActorSystem,
    OneshotReceiver,
    OneshotSender,
    Receiver,
    Sender,
    TerminalState,
    channel,
    message,
    oneshot,
)
from levada.framework.errors import (
    ChannelCancelled,
    ChannelError,
    ConfigurationError,
    DecodeError,
    EndOfChannel,
    HandleMoved,
    HandleNotForwardable,
    NoValue,
    ReceiverClosed,
    Undelivered,
)
from levada.framework.testing import FakeRef
from levada.transports.aqueduct import AqueductConfig, SenderHalf

from .conftest import Parcel, Start, settled

NOTHING = (0,) * 10


@message("tests.aqueduct.Narrow")
class Narrow:
    number: int


async def test_a_sender_travels_and_its_messages_come_back(
    start: Start, autojump_clock: trio.testing.MockClock
) -> None:
    async with start() as ends:
        sender, receiver = channel(int)
        await ends.peer.send(Parcel("give me numbers", sender=sender))
        got = await ends.got.receive()
        assert got.text == "give me numbers"
        assert isinstance(got.sender, Sender)
        async with got.sender as numbers:
            for number in range(1000):  # more than windows hold
                await numbers.send(number)
                if number == 500:
                    assert [await receiver.receive() for _ in range(400)] == list(range(400))

            async def take() -> None:
                assert [number async for number in receiver] == list(range(400, 1000))

            ends.system.start_task(take, name="take")
        await settled()
        assert numbers.state is receiver.state is TerminalState.FINISHED
        assert ends.left() == NOTHING


async def test_a_receiver_travels_with_what_was_queued(start: Start, autojump_clock: trio.testing.MockClock) -> None:
    async with start() as ends:
        sender, receiver = channel(str)
        sender.send_nowait("first")
        sender.send_nowait("second")
        await ends.peer.send(Parcel(receiver=receiver))
        sender.send_nowait("third")
        sender.finish_nowait()
        got = await ends.got.receive()
        assert [text async for text in got.receiver] == ["first", "second", "third"]
        assert await sender.terminated() is TerminalState.FINISHED
        await settled()
        assert ends.left() == NOTHING


async def test_a_channel_that_was_finished_before_it_travelled(
    start: Start, autojump_clock: trio.testing.MockClock
) -> None:
    async with start() as ends:
        full, with_rest = channel(int)
        full.send_nowait(1)
        full.finish_nowait()
        empty, without = channel(int)
        empty.finish_nowait()
        given_up, cancelled = channel(int)
        given_up.cancel()
        await ends.peer.send(Parcel(many=[with_rest, without, cancelled]))
        got = await ends.got.receive()
        assert [number async for number in got.many[0]] == [1]
        assert [number async for number in got.many[1]] == []
        with pytest.raises(ChannelCancelled):
            await got.many[2].receive()
        await settled()
        assert ends.left() == NOTHING


async def test_oneshots_both_ways(start: Start, autojump_clock: trio.testing.MockClock) -> None:
    async with start() as ends:
        answer, asked = oneshot(int)
        told, news = oneshot(str)
        never, nothing = oneshot(int)
        await ends.peer.send(Parcel(sends_one=answer, gets_one=news, inner=Parcel(sends_one=never)))
        got = await ends.got.receive()
        assert isinstance(got.sends_one, OneshotSender)
        assert isinstance(got.gets_one, OneshotReceiver)
        told.send("hello")
        assert await got.gets_one == "hello"
        got.sends_one.send(7)
        assert await asked == 7
        await told.finish()  # raises if it was not delivered
        got.inner.sends_one.finish_nowait()
        with pytest.raises(NoValue):
            await nothing
        await settled()
        assert ends.left() == NOTHING


async def test_handles_in_lists_dicts_and_messages_in_messages(
    start: Start, autojump_clock: trio.testing.MockClock
) -> None:
    async with start() as ends:
        pairs = [channel(int) for _ in range(4)]
        senders = [sender for sender, _ in pairs]
        deep = Parcel("inside", many=[[{"here": senders[0]}]], inner=Parcel(sender=senders[1]))
        await ends.peer.send(Parcel(named={"a": senders[2], "b": senders[3]}, inner=deep))
        got = await ends.got.receive()
        arrived = [got.inner.many[0][0]["here"], got.inner.inner.sender, got.named["a"], got.named["b"]]
        for number, sender in enumerate(arrived):
            sender.send_nowait(number)
            sender.finish_nowait()
        assert [[n async for n in receiver] for _, receiver in pairs] == [[0], [1], [2], [3]]
        await settled()
        assert ends.left() == NOTHING


async def test_channels_travel_over_channels_that_travelled(
    start: Start, autojump_clock: trio.testing.MockClock
) -> None:
    """Ten deep, each sent before the one above has arrived; what is used first is what was made last."""
    async with start() as ends:
        outer, travelling = channel(Parcel)
        await ends.peer.send(Parcel(receiver=travelling))
        for depth in range(10):
            inner, next_travelling = channel(Parcel)
            outer.send_nowait(Parcel(str(depth), receiver=next_travelling))
            outer.finish_nowait()
            outer = inner
        outer.send_nowait(Parcel("bottom"))
        outer.finish_nowait()
        got = await ends.got.receive()
        texts = []
        while got.receiver is not None:
            below = await got.receiver.receive()
            with pytest.raises(EndOfChannel):
                await got.receiver.receive()
            got = below
            texts.append(got.text)
        assert texts == [*map(str, range(10)), "bottom"]
        await settled()
        assert ends.left() == NOTHING


@pytest.mark.ci
async def test_a_chain_that_was_queued_is_as_long_as_it_likes(
    start: Start, autojump_clock: trio.testing.MockClock
) -> None:
    """Nothing recurses where channels travel in messages of channels that travel."""
    async with start() as ends:
        head: Any = None
        length = 1000
        for depth in range(length):
            pair: tuple[Sender[Any], Receiver[Any]] = channel(Any)
            pair[0].send_nowait([depth, head])
            pair[0].finish_nowait()
            head = pair[1]
        await ends.peer.send(Parcel(receiver=head))
        head = (await ends.got.receive()).receiver
        seen = []
        while head is not None:
            depth, below = await head.receive()
            seen.append(depth)
            assert [_ async for _ in head] == []
            head = below
        assert seen == [*range(length)][::-1]
        await settled()
        assert ends.left() == NOTHING


@pytest.mark.parametrize("mode", ["ordered", "unordered", "unreliable"])
async def test_modes(start: Start, mode: str, autojump_clock: trio.testing.MockClock) -> None:
    async with start() as ends:
        sender, receiver = channel(int)
        await ends.peer.send(Parcel(receiver=receiver))
        choose = getattr(sender, mode)
        choose(100)
        remote = (await ends.got.receive()).receiver
        for number in range(50):
            await sender.send(number)
        sender.finish_nowait()
        assert sorted([number async for number in remote]) == list(range(50))
        assert await sender.terminated() is TerminalState.FINISHED
        await settled()
        assert ends.left() == NOTHING


async def test_the_window_holds_a_sender_back(start: Start, autojump_clock: trio.testing.MockClock) -> None:
    core = AqueductConfig(window=8, mailbox=8)
    async with start(core=core) as ends:
        sender, receiver = channel(int)
        await ends.peer.send(Parcel(receiver=receiver))
        remote = (await ends.got.receive()).receiver
        sender.ordered(4)
        sent = []

        async def send() -> None:
            for number in range(2000):
                await sender.send(number)
                sent.append(number)
            sender.finish_nowait()

        ends.system.start_task(send, name="send")
        await settled()
        # 256 in the receiver's channel, one that it had no room for, 8 in the mailbox, 4 in the sender's window; acks lag by a few.
        assert 256 <= len(sent) <= 256 + 1 + 8 + 4
        assert [number async for number in remote] == list(range(2000))


async def test_receipts_tell_delivered_and_not(start: Start, autojump_clock: trio.testing.MockClock) -> None:
    async with start() as ends:
        receipt = await ends.peer.send(Parcel("seen"), receipt=True)
        assert receipt.outcome is None
        assert await receipt
        sender, receiver = channel(int)
        await ends.peer.send(Parcel(receiver=receiver))
        remote = (await _second(ends.got)).receiver
        first = await sender.send(1, receipt=True)
        assert await first
        remote.close()
        late = await sender.send(2, receipt=True)
        assert not await late
        with pytest.raises(Undelivered) as caught:
            await sender.finish()
        assert caught.value.count == 1


async def _second(got: Receiver[Any]) -> Any:
    await got.receive()
    return await got.receive()


async def test_cancel_and_close_reach_the_other_side(start: Start, autojump_clock: trio.testing.MockClock) -> None:
    async with start() as ends:
        sender, receiver = channel(int)
        sender_of_ours, travelling = channel(int)
        await ends.peer.send(Parcel(sender=sender, receiver=travelling))
        got = await ends.got.receive()
        got.sender.send_nowait(1)
        got.sender.cancel()
        with pytest.raises(ChannelCancelled):
            while True:
                await receiver.receive()
        got.receiver.close()
        assert await sender_of_ours.terminated() is TerminalState.RECEIVER_CLOSED
        with pytest.raises(ReceiverClosed):
            await sender_of_ours.send(1)
        await settled()
        assert ends.left() == NOTHING


async def test_the_near_side_cancels_and_closes(start: Start, autojump_clock: trio.testing.MockClock) -> None:
    async with start() as ends:
        sender, receiver = channel(int)
        sender_of_ours, travelling = channel(int)
        await ends.peer.send(Parcel(sender=sender, receiver=travelling))
        got = await ends.got.receive()
        receiver.close()
        assert await got.sender.terminated() is TerminalState.RECEIVER_CLOSED
        sender_of_ours.cancel()
        with pytest.raises(ChannelCancelled):
            await got.receiver.receive()
        await settled()
        assert ends.left() == NOTHING


async def test_clones_here_and_there_finish_together(start: Start, autojump_clock: trio.testing.MockClock) -> None:
    async with start() as ends:
        sender, receiver = channel(int)
        await ends.peer.send(Parcel(many=[sender.clone(), sender.clone()]))
        one, two = (await ends.got.receive()).many
        one.send_nowait(1)
        one.finish_nowait()
        await settled()
        two.send_nowait(2)
        sender.send_nowait(3)
        sender.finish_nowait()
        await settled()
        assert receiver.state is TerminalState.OPEN
        two.finish_nowait()
        assert sorted([number async for number in receiver]) == [1, 2, 3]
        await settled()
        assert ends.left() == NOTHING


async def test_moved_handles_refuse(start: Start, autojump_clock: trio.testing.MockClock) -> None:
    async with start() as ends:
        sender, receiver = channel(int)
        await ends.peer.send(Parcel(sender=sender))
        with pytest.raises(HandleMoved, match="entrypoint to desk/server"):
            sender.send_nowait(1)
        with pytest.raises(HandleMoved):
            await ends.peer.send(Parcel(sender=sender))
        got = await ends.got.receive()
        with pytest.raises(HandleNotForwardable):  # the other half of both is elsewhere
            await ends.peer.send(Parcel(receiver=receiver))
        with pytest.raises(HandleNotForwardable):
            await ends.peer.send(Parcel(sender=got.sender))
        got.sender.finish_nowait()
        assert [n async for n in receiver] == []


async def test_all_or_nothing(start: Start, autojump_clock: trio.testing.MockClock) -> None:
    """A message that cannot be written gives every handle back, and nothing was sent."""
    async with start() as ends:
        sender, receiver = channel(int)
        other, still_here = channel(int)
        with pytest.raises(TypeError, match=r"Parcel\.text: expected str, got int"):
            await ends.peer.send(Parcel(text=7, sender=sender, many=[still_here]))  # type: ignore[arg-type]
        with pytest.raises(HandleNotForwardable):
            await ends.peer.send(Parcel(many=[still_here, other]))  # both halves of one
        with pytest.raises(HandleNotForwardable, match="cannot travel"):
            await ends.peer.send(Parcel(many=[still_here, FakeRef()]))
        sender.send_nowait(1)
        other.send_nowait(2)
        assert (receiver.receive_nowait(), still_here.receive_nowait()) == (1, 2)
        assert ends.left() == NOTHING
        await ends.peer.send(Parcel(sender=sender, receiver=still_here))
        got = await ends.got.receive()
        assert got.text == ""
        got.sender.finish_nowait()
        other.finish_nowait()
        assert [n async for n in got.receiver] == [n async for n in receiver] == []


async def test_too_many_channels_are_refused_to_the_sender(
    start: Start, autojump_clock: trio.testing.MockClock
) -> None:
    async with start(core=AqueductConfig(max_channels=3)) as ends:
        pairs = [channel(int) for _ in range(3)]
        with pytest.raises(ChannelError, match="more than 3 channels"):
            await ends.peer.send(Parcel(many=[sender for sender, _ in pairs]))
        await ends.peer.send(Parcel(many=[sender for sender, _ in pairs[:2]]))
        for sender in (await ends.got.receive()).many:
            sender.finish_nowait()
        pairs[2][0].finish_nowait()


async def test_a_send_that_waits_learns_that_its_message_cannot_travel(
    start: Start, autojump_clock: trio.testing.MockClock
) -> None:
    async with start(core=AqueductConfig(window=2, mailbox=2)) as ends:
        sender, receiver = channel(int)
        await ends.peer.send(Parcel(receiver=receiver))
        remote = (await ends.got.receive()).receiver
        sender.ordered(1)
        errors = []

        async def send() -> None:
            for number in range(300):
                await sender.send(number)
            try:
                await sender.send("no number")  # type: ignore[call-overload]
            except TypeError as error:
                errors.append(str(error))
            await sender.send(300)
            sender.finish_nowait()

        ends.system.start_task(send, name="send")
        await settled()
        assert errors == []
        assert [number async for number in remote] == list(range(301))
        assert errors == ["expected int, got str"]


async def test_what_was_queued_and_cannot_travel_counts_as_not_delivered(
    start: Start, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with start() as ends:
        sender, receiver = channel(int)
        for item in (1, *["two"] * 12, 3):
            sender.send_nowait(item)  # type: ignore[arg-type]
        await ends.peer.send(Parcel(receiver=receiver))
        remote = (await ends.got.receive()).receiver
        assert [await remote.receive(), await remote.receive()] == [1, 3]
        with pytest.raises(Undelivered) as caught:
            await sender.finish()
        assert caught.value.count == 12
        assert caplog.text.count("a message that was queued cannot travel") == 10  # see FailureLog
        caplog.clear()


async def test_what_cannot_be_decoded_is_told_to_whoever_takes_it(
    start: Start, autojump_clock: trio.testing.MockClock
) -> None:
    """The handles in it are given up, the messages behind it arrive, the connection lives on."""
    async with start() as ends:
        ends_of: tuple[Sender[Any], Receiver[Any]] = channel(Narrow)
        sender, receiver = ends_of
        await ends.peer.send(Parcel(named={"numbers": sender}))
        numbers = (await ends.got.receive()).named["numbers"]
        mine, theirs = channel(int)
        outbound: Any = next(each for half, each in ends.server.halves.records.items() if isinstance(half, SenderHalf))
        outbound.channel.item_type = Any  # a peer that keeps to no types
        numbers.send_nowait(Parcel(sender=mine, many=[1]))
        numbers.send_nowait(Narrow(5))
        with pytest.raises(DecodeError):
            await receiver.receive()
        narrow: object = await receiver.receive()
        assert narrow == Narrow(5)
        with pytest.raises(ChannelCancelled):
            await theirs.receive()
        numbers.finish_nowait()
        assert [_ async for _ in receiver] == []
        await settled()
        assert ends.left() == NOTHING


async def test_the_mode_is_chosen_before_the_first_message(
    start: Start, autojump_clock: trio.testing.MockClock
) -> None:
    async with start() as ends:
        await ends.peer.send(Parcel())
        with pytest.raises(ConfigurationError):
            ends.peer.entry.unordered()


async def test_a_forgotten_handle_is_noticed_at_the_other_side(
    start: Start, autojump_clock: trio.testing.MockClock
) -> None:
    async with start() as ends:
        sender, receiver = channel(int)
        kept, travelling = channel(int)
        await ends.peer.send(Parcel(sender=sender, receiver=travelling))
        got = await ends.got.receive()
        with pytest.warns(ResourceWarning, match="forgotten"):
            del got
            await wait_all_tasks_blocked()
            gc.collect()
        await wait_all_tasks_blocked()
        with pytest.raises(ChannelCancelled):
            await receiver.receive()
        assert await kept.terminated() is TerminalState.RECEIVER_CLOSED
        await settled()
        assert ends.left() == NOTHING


@pytest.mark.handler_fails
async def test_a_handler_that_fails_gives_up_the_handles_of_its_message(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(m: Parcel) -> None:
        raise ValueError("no such thing")

    with caplog.at_level(logging.ERROR):
        async with (
            ActorSystem() as system,
            serve(system, "aqueduct+memory://desk", fail, Any) as listener,
            connect(system, listener.url, Parcel) as peer,
        ):
            began = trio.current_time()
            sender, receiver = channel(int)
            await peer.send(Parcel(sender=sender))
            with pytest.raises(ChannelCancelled):
                await receiver.receive()
            assert trio.current_time() == began, "the sender's side waits for no timer"
    assert [record.getMessage().split(": ")[-1] for record in caplog.records] == ["a handler failed"]


@pytest.mark.parametrize("raw", [False, True])
async def test_a_channel_that_fills_up_before_its_message_is_opened_goes_on_when_it_is(raw: bool) -> None:
    """The sender, who waits, is told that there is room, though nothing else is written then."""
    opens, got = trio.Event(), list[Any]()

    async def handler(m: Any) -> None:
        receivers = m.attachments if raw else [m.receiver] if m.receiver is not None else []
        if not receivers:
            await opens.wait()
        for receiver in receivers:
            async for each in receiver:
                got.append(each)

    config = PeerConfig(max_handlers=1, core=AqueductConfig(mailbox=4))
    kind = RawMessage if raw else Parcel
    async with (
        ActorSystem() as system,
        serve(system, "aqueduct+memory://desk", handler, kind, config=config) as listener,
        connect(system, listener.url, Parcel) as peer,
        trio.open_nursery() as nursery,
    ):
        await peer.send(Parcel())
        sender, receiver = channel(int)
        await peer.send(Parcel(receiver=receiver))

        async def produce() -> None:
            async with sender:
                for number in range(400):
                    await sender.send(number)

        nursery.start_soon(produce)
        await wait_all_tasks_blocked()
        assert (got, sender.state) == ([], TerminalState.OPEN)
        opens.set()
        await wait_all_tasks_blocked()
        assert len(got) == 400
        assert sender.state is TerminalState.FINISHED
