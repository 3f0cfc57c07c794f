"""Channels and actors: feeding a mailbox, watching a handle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.framework import Actor, ActorSystem, Asks, Down, Ref, bounded, conflate, handles, message, restart
from levada.framework.channel import TerminalState, channel, oneshot
from levada.framework.errors import (
    ActorStopped,
    ChannelCancelled,
    ChannelError,
    ConfigurationError,
    HandleMoved,
    MailboxFull,
    ReceiverClosed,
    Undelivered,
)

Log = list[Any]


@message
class Item:
    n: int


@message
class Do(Asks[Any]):
    """Call a function with the actor."""

    function: Callable[[Any], Any]


@message
class Hold:
    """Wait for the event."""

    event: trio.Event


class Sink(Actor[Item | Do | Hold | Down]):
    log: Log

    @handles
    def item(self, m: Item) -> None:
        if m.n < 0:
            raise ValueError(m.n)
        self.log.append(m.n)

    @handles
    def do(self, m: Do) -> Any:
        return m.function(self)

    @handles
    async def hold(self, m: Hold) -> None:
        await m.event.wait()

    @handles
    def down(self, m: Down) -> None:
        self.log.append((m.ref, None if m.reason is None else type(m.reason), m.tag))


# ---------------------------------------------------------------- the three calls


async def test_try_tell_of_an_unbounded_mailbox_always_takes(system: ActorSystem) -> None:
    log: Log = []
    ref = system.spawn(Sink, log)
    for n in range(1000):
        assert ref.try_tell(Item(n)) is True
    await wait_all_tasks_blocked()
    assert log == list(range(1000))


@pytest.mark.parametrize("overflow", ["wait", "raise"])
async def test_try_tell_of_a_full_mailbox_does_nothing(system: ActorSystem, overflow: Any) -> None:
    log: Log = []
    ref = system.spawn(Sink, log, mailbox=bounded(2, overflow=overflow))
    assert [ref.try_tell(Item(n)) for n in range(4)] == [True, True, False, False]
    await wait_all_tasks_blocked()
    assert log == [0, 1]
    assert system.statistics().dead_letters == 0


@pytest.mark.parametrize(
    ("overflow", "kept"),
    [("drop_new", [0, 1]), ("drop_old", [2, 3]), (conflate(lambda m: "same"), [3])],
    ids=["drop_new", "drop_old", "conflate"],
)
async def test_try_tell_of_a_mailbox_that_drops_answers_true(
    system: ActorSystem, overflow: Any, kept: list[int]
) -> None:
    log: Log = []
    ref = system.spawn(Sink, log, mailbox=bounded(2, overflow=overflow))
    assert all(ref.try_tell(Item(n)) for n in range(4))
    await wait_all_tasks_blocked()
    assert log == kept


@pytest.mark.parametrize("mailbox", [None, bounded(2), bounded(2, overflow="drop_old")], ids=["plain", "wait", "old"])
async def test_the_dead_take_nothing_and_say_so_at_once(system: ActorSystem, mailbox: Any) -> None:
    ref = system.spawn(Sink, [], mailbox=mailbox)
    calls: Log = []
    forget = ref.on_stopped(lambda: calls.append("forgotten"))
    forget()
    ref.on_stopped(lambda: calls.append("stopped"))
    ref.kill()
    await ref.terminated()
    assert calls == ["stopped"]
    with pytest.raises(ActorStopped) as caught:
        ref.try_tell(Item(1))
    assert caught.value.message == Item(1)
    ref.on_stopped(lambda: calls.append("at once"))
    assert calls == ["stopped", "at once"]
    forget()


async def test_on_room_stands_in_line_with_senders(system: ActorSystem) -> None:
    log: Log = []
    ref: Ref[Any] = system.spawn(Sink, log, mailbox=bounded(1))
    event = trio.Event()
    await ref.send(Hold(event))
    await wait_all_tasks_blocked()
    await ref.send(Item(0))
    assert ref.try_tell(Item(99)) is False
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ref.send, Item(1))
        await wait_all_tasks_blocked()
        ref.on_room(lambda: log.append(ref.try_tell(Item(2))))
        nursery.start_soon(ref.send, Item(3))
        await wait_all_tasks_blocked()
        event.set()
    await wait_all_tasks_blocked()
    assert log == [0, 1, True, 2, 3]


async def test_one_callback_is_one_place(system: ActorSystem) -> None:
    log: Log = []
    ref: Ref[Any] = system.spawn(Sink, log, mailbox=bounded(1))
    event = trio.Event()
    await ref.send(Hold(event))
    await wait_all_tasks_blocked()
    await ref.send(Item(0))
    answers: Log = []

    def take_two() -> None:
        answers.extend([ref.try_tell(Item(1)), ref.try_tell(Item(2))])

    ref.on_room(take_two)
    event.set()
    await wait_all_tasks_blocked()
    assert answers == [True, False]
    assert log == [0, 1]


async def test_senders_that_give_up_leave_no_marks_in_the_mailbox(system: ActorSystem) -> None:
    ref: Any = system.spawn(Sink, [], mailbox=bounded(1))
    event = trio.Event()
    await ref.send(Hold(event))
    await wait_all_tasks_blocked()
    await ref.send(Item(0))
    for _ in range(50):
        with trio.move_on_after(0):
            await ref.send(Item(1))
    assert len(ref._box) + len(ref._batch) <= 2
    event.set()
    await wait_all_tasks_blocked()
    assert ref._actor.log == [0]
    await ref.send(Item(2))


async def test_a_ref_of_another_system_feeds_no_mailbox(system: ActorSystem) -> None:
    class Elsewhere(Ref[Any]):
        @property
        def path(self) -> str:
            return "/there"

        @property
        def incarnation(self) -> int:
            return 7

        @property
        def is_alive(self) -> bool:
            return True

        @property
        def from_thread(self) -> Any:
            return None

        def tell(self, message: Any) -> None: ...
        async def send(self, message: Any) -> None: ...
        async def ask(self, message: Any, *, timeout: float | None = None) -> Any: ...
        def stop(self, *, now: bool = False) -> None: ...
        def kill(self) -> None: ...
        async def terminated(self) -> Any: ...

    sender, receiver = channel(Item)
    with pytest.raises(ConfigurationError, match="no mailbox in this process"):
        receiver.to_mailbox(Elsewhere())
    sender.cancel()
    assert Ref.attachment_kind == "ref"


# ---------------------------------------------------------------- a channel into a mailbox


async def test_what_was_queued_comes_first_then_everything_in_order(system: ActorSystem) -> None:
    log: Log = []
    ref = system.spawn(Sink, log)
    sender, receiver = channel(Item)
    for n in range(3):
        sender.send_nowait(Item(n))
    receiver.to_mailbox(ref)
    for n in range(3, 6):
        await sender.send(Item(n))
    await sender.finish()
    await wait_all_tasks_blocked()
    assert log == [0, 1, 2, 3, 4, 5]


async def test_wrap_makes_the_message(system: ActorSystem) -> None:
    log: Log = []
    ref = system.spawn(Sink, log)
    sender, receiver = channel(int)
    receiver.to_mailbox(ref, Item)
    for n in range(3):
        await sender.send(n)
    await sender.finish()
    await wait_all_tasks_blocked()
    assert log == [0, 1, 2]


async def test_a_full_mailbox_makes_the_channels_senders_wait(system: ActorSystem) -> None:
    log: Log = []
    ref: Ref[Any] = system.spawn(Sink, log, mailbox=bounded(2))
    event = trio.Event()
    await ref.send(Hold(event))
    await wait_all_tasks_blocked()
    sender, receiver = channel(Item)
    sender.ordered(window=3)
    receiver.to_mailbox(ref)
    for n in range(5):  # two in the mailbox, three in the window
        sender.send_nowait(Item(n))
    with pytest.raises(trio.WouldBlock):
        sender.send_nowait(Item(99))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sender.send, Item(5))
        await wait_all_tasks_blocked()
        assert log == []
        event.set()
    await sender.finish()
    await wait_all_tasks_blocked()
    assert log == [0, 1, 2, 3, 4, 5]


async def test_two_channels_and_a_sender_share_a_small_mailbox_fairly(system: ActorSystem) -> None:
    log: Log = []
    ref: Ref[Any] = system.spawn(Sink, log, mailbox=bounded(1))
    event = trio.Event()
    await ref.send(Hold(event))
    await wait_all_tasks_blocked()
    pairs = [channel(Item) for _ in range(2)]
    for base, (sender, receiver) in zip((100, 200), pairs, strict=True):
        receiver.to_mailbox(ref)
        for n in range(4):
            sender.send_nowait(Item(base + n))
        await sender.clone().finish()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ref.send, Item(300))
        await wait_all_tasks_blocked()
        event.set()
    for sender, _ in pairs:
        await sender.finish()
    await wait_all_tasks_blocked()
    assert [n for n in log if n < 200] == [100, 101, 102, 103]
    assert [n for n in log if 200 <= n < 300] == [200, 201, 202, 203]
    assert log == [100, 101, 200, 300, 102, 201, 103, 202, 203]  # one each, as they stood in line


async def test_the_end_of_the_actor_closes_the_receiver(system: ActorSystem) -> None:
    ref: Ref[Any] = system.spawn(Sink, [], mailbox=bounded(1))
    event = trio.Event()
    await ref.send(Hold(event))
    await wait_all_tasks_blocked()
    sender, receiver = channel(Item)
    receiver.to_mailbox(ref)
    for n in range(3):
        sender.send_nowait(Item(n))
    ref.kill()
    await ref.terminated()
    assert receiver.state is TerminalState.RECEIVER_CLOSED
    with pytest.raises(ReceiverClosed):
        await sender.send(Item(9))
    with pytest.raises(Undelivered) as caught:
        await sender.finish()
    assert caught.value.count == 2  # what is in the mailbox counts as taken: it is a dead letter
    assert system.statistics().dead_letters == 1


async def test_a_dead_actor_closes_the_receiver_at_once(system: ActorSystem) -> None:
    ref = system.spawn(Sink, [])
    ref.kill()
    await ref.terminated()
    sender, receiver = channel(Item)
    receiver.to_mailbox(ref)
    assert receiver.state is TerminalState.RECEIVER_CLOSED
    with pytest.raises(ReceiverClosed):
        sender.send_nowait(Item(1))


async def test_a_restart_keeps_the_channel(system: ActorSystem) -> None:
    log: Log = []
    ref: Ref[Any] = system.spawn(Sink, log, mailbox=bounded(1), supervise=restart())
    sender, receiver = channel(Item)
    receiver.to_mailbox(ref)
    for n in (0, -1, 1, 2):
        await sender.send(Item(n))
    await sender.finish()
    await wait_all_tasks_blocked()
    assert log == [0, 1, 2]
    assert ref.is_alive


async def test_the_end_of_the_channel_forgets_the_actor(system: ActorSystem) -> None:
    ref: Any = system.spawn(Sink, [])
    for _ in range(10):
        sender, receiver = channel(Item)
        receiver.to_mailbox(ref)
        await sender.finish()
    assert not ref._extras.watchers


async def test_tell_raises_for_others_while_a_channel_waits(system: ActorSystem) -> None:
    log: Log = []
    ref: Ref[Any] = system.spawn(Sink, log, mailbox=bounded(1))
    event = trio.Event()
    await ref.send(Hold(event))
    await wait_all_tasks_blocked()
    sender, receiver = channel(Item)
    receiver.to_mailbox(ref)
    for n in range(2):
        sender.send_nowait(Item(n))
    with pytest.raises(MailboxFull):
        ref.tell(Item(99))
    event.set()
    await sender.finish()
    await wait_all_tasks_blocked()
    assert log == [0, 1]


@given(
    capacity=st.integers(1, 5),
    window=st.integers(1, 5),
    counts=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    told=st.integers(0, 12),
    slow=st.booleans(),
)
def test_every_message_arrives_once_and_each_channels_in_order(
    capacity: int, window: int, counts: list[int], told: int, slow: bool
) -> None:
    async def main() -> None:
        log: Log = []

        class Slow(Actor[tuple[Any, ...]]):
            @handles(tuple)
            async def item(self, m: tuple[int, int]) -> None:
                if slow:
                    await trio.sleep(0.1)
                log.append(m)

        async with ActorSystem() as system:
            ref = system.spawn(Slow, mailbox=bounded(capacity))

            async def feed(number: int, count: int) -> None:
                sender, receiver = channel(tuple)
                sender.ordered(window=window)
                receiver.to_mailbox(ref)
                for n in range(count):
                    await sender.send((number, n))
                await sender.finish()

            async def send() -> None:
                for n in range(told):
                    await ref.send((-1, n))

            async with trio.open_nursery() as nursery:
                for number, count in enumerate(counts):
                    nursery.start_soon(feed, number, count)
                nursery.start_soon(send)
        for number, count in [*enumerate(counts), (-1, told)]:
            assert [n for who, n in log if who == number] == list(range(count))
        assert len(log) == sum(counts) + told

    trio.run(main, clock=MockClock(autojump_threshold=0))


# ---------------------------------------------------------------- watching a handle


async def watch(ref: Ref[Any], target: Any, tag: Any = None) -> None:
    await ref.ask(Do(lambda actor: actor.watch(target, tag)))


async def test_a_finished_channel_is_down_without_an_error(system: ActorSystem) -> None:
    log: Log = []
    ref = system.spawn(Sink, log)
    sender, receiver = channel(Item)
    await watch(ref, sender, "s")
    await watch(ref, receiver, "r")
    sender.finish_nowait()
    await wait_all_tasks_blocked()
    assert sorted(log, key=lambda entry: str(entry[2])) == [(receiver, None, "r"), (sender, None, "s")]


async def test_a_receivers_down_comes_when_everything_was_taken(system: ActorSystem) -> None:
    log: Log = []
    ref = system.spawn(Sink, log)
    sender, receiver = channel(Item)
    await watch(ref, receiver)
    await sender.send(Item(1))
    sender.finish_nowait()
    await wait_all_tasks_blocked()
    assert log == []
    await receiver.receive()
    await wait_all_tasks_blocked()
    assert log == [(receiver, None, None)]


async def test_a_cancelled_channel_is_down_with_the_error_of_each_side(system: ActorSystem) -> None:
    log: Log = []
    ref = system.spawn(Sink, log)
    sender, receiver = channel(Item)
    await watch(ref, receiver)
    sender.cancel()
    await wait_all_tasks_blocked()
    assert log == [(receiver, ChannelCancelled, None)]


async def test_a_closed_receiver_is_down_for_the_sender(system: ActorSystem) -> None:
    log: Log = []
    ref = system.spawn(Sink, log)
    sender, receiver = channel(Item)
    await watch(ref, sender, 1)
    await watch(ref, sender, 2)
    await watch(ref, sender, 1)
    receiver.close()
    await wait_all_tasks_blocked()
    assert log == [(sender, ReceiverClosed, 1), (sender, ReceiverClosed, 2)]


async def test_down_carries_the_very_error_that_the_next_use_raises(system: ActorSystem) -> None:
    seen: Log = []

    class Watcher(Actor[Down]):
        target: Any

        def started(self) -> None:
            self.watch(self.target)

        @handles
        def down(self, m: Down) -> None:
            seen.append(m.reason)

    sender, receiver = channel(Item)
    system.spawn(Watcher, sender)
    await wait_all_tasks_blocked()
    receiver.close()
    await wait_all_tasks_blocked()
    (error,) = seen
    assert isinstance(error, ChannelError)
    with pytest.raises(ReceiverClosed) as caught:
        sender.send_nowait(Item(1))
    assert str(caught.value) == str(error)


async def test_watching_a_handle_that_has_ended_is_answered_at_once(system: ActorSystem) -> None:
    log: Log = []
    ref = system.spawn(Sink, log)
    sender, receiver = channel(Item)
    sender.cancel()
    await watch(ref, receiver, "late")
    await wait_all_tasks_blocked()
    assert log == [(receiver, ChannelCancelled, "late")]
    assert not ref._extras.watched  # type: ignore[attr-defined]


async def test_oneshots_are_watched_too(system: ActorSystem) -> None:
    log: Log = []
    ref = system.spawn(Sink, log)
    sender, receiver = oneshot(int)
    await watch(ref, receiver)
    sender.cancel()
    await wait_all_tasks_blocked()
    assert log == [(receiver, ChannelCancelled, None)]


async def test_unwatch_and_the_end_of_the_watcher_take_the_callback_out(system: ActorSystem) -> None:
    log: Log = []
    ref, other = system.spawn(Sink, log), system.spawn(Sink, log)
    sender, receiver = channel(Item)
    await watch(ref, sender, "t")
    await watch(other, sender, "t")
    await ref.ask(Do(lambda actor: actor.unwatch(sender, "t")))
    other.kill()
    await other.terminated()
    receiver.close()
    await wait_all_tasks_blocked()
    assert log == []


async def test_a_handle_that_went_away_cannot_be_watched(system: ActorSystem) -> None:
    errors: Log = []

    def try_(actor: Sink) -> None:
        try:
            actor.watch(sender)
        except HandleMoved as error:
            errors.append(error)

    ref = system.spawn(Sink, [])
    sender, receiver = channel(Item)
    sender.take_over("a test")
    await ref.ask(Do(try_))
    assert len(errors) == 1
    assert not ref._extras.watched  # type: ignore[attr-defined]
    sender.give_back()
    sender.cancel()
    assert receiver.state is TerminalState.CANCELLED


async def test_an_actor_that_is_fed_by_a_channel_and_watches_it_gets_down_last(system: ActorSystem) -> None:
    log: Log = []
    ref: Ref[Any] = system.spawn(Sink, log, mailbox=bounded(4))
    sender, receiver = channel(Item)
    await watch(ref, receiver, "end")
    receiver.to_mailbox(ref)
    for n in range(10):
        await sender.send(Item(n))
    await sender.finish()
    await wait_all_tasks_blocked()
    assert log == [*range(10), (receiver, None, "end")]


async def test_a_restart_keeps_the_watch_of_a_handle(system: ActorSystem) -> None:
    log: Log = []
    ref = system.spawn(Sink, log, supervise=restart())
    sender, receiver = channel(Item)
    await watch(ref, receiver)
    ref.tell(Item(-1))
    await wait_all_tasks_blocked()
    sender.cancel()
    await wait_all_tasks_blocked()
    assert log == [(receiver, ChannelCancelled, None)]
