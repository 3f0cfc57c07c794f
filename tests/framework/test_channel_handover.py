"""Handles: bound to a mailbox, moved away (a small relay stands in for the network), forgotten; what they are as objects."""

from __future__ import annotations

import copy
import gc
import itertools
import logging
import pickle
import signal
import threading
import warnings
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, assert_type, cast

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.framework import Actor, ActorSystem, handles
from levada.framework._runtime.channel_core import ChannelCore, Envelope, Outcome
from levada.framework.channel import OneshotReceiver, OneshotSender, Receiver, Sender, TerminalState, channel, oneshot
from levada.framework.errors import (
    ActorStopped,
    ChannelCancelled,
    ChannelError,
    DecodeError,
    HandleMoved,
    HandleNotForwardable,
    NoValue,
    ReceiverClosed,
    SenderFinished,
    Undelivered,
)

from .conftest import background, queued, rest

OPEN, FINISHED, CANCELLED, RECEIVER_CLOSED, LOST, CONNECTION_LOST = TerminalState


# ---------------------------------------------------------------- into a mailbox


class Inbox:
    """An actor's mailbox, seen from outside: bounded, stoppable, with the three calls that `Destination` asks for."""

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        self.messages: deque[Any] = deque()
        self.rooms: deque[Callable[[], None]] = deque()
        self.stops: dict[int, Callable[[], None]] = {}
        self.stopped = False

    def try_tell(self, message: Any) -> bool:
        if self.stopped:
            raise ActorStopped(message=message)
        if self.capacity is not None and len(self.messages) >= self.capacity:
            return False
        self.messages.append(message)
        return True

    def on_room(self, callback: Callable[[], None]) -> Callable[[], None]:
        self.rooms.append(callback)
        return lambda: self.rooms.remove(callback)

    def on_stopped(self, callback: Callable[[], None]) -> Callable[[], None]:
        if self.stopped:
            callback()
        key = len(self.stops)
        self.stops[key] = callback
        return lambda: self.stops.pop(key, None) and None

    def handle(self) -> Any:
        message = self.messages.popleft()
        if self.rooms:
            self.rooms.popleft()()
        return message

    def stop(self) -> None:
        self.stopped = True
        for callback in list(self.stops.values()):
            callback()


def test_messages_go_into_an_unbounded_mailbox_inside_send() -> None:
    sender, receiver = channel(int)
    queued(sender, 1, 2)
    inbox = Inbox()
    receiver.to_mailbox(inbox, lambda n: ("got", n))
    assert list(inbox.messages) == [("got", 1), ("got", 2)]
    queued(sender, 3)
    assert list(inbox.messages) == [("got", 1), ("got", 2), ("got", 3)]
    for call in (receiver.receive_nowait, lambda: receiver.to_mailbox(inbox), lambda: receiver.take_over("x")):
        with pytest.raises(HandleMoved, match="mailbox"):
            call()
    sender.finish_nowait()
    assert (sender.state, receiver.state, inbox.stops) == (FINISHED, FINISHED, {})


async def test_a_full_mailbox_holds_the_window_back() -> None:
    sender, receiver = channel(int)
    sender.ordered(2)
    inbox = Inbox(capacity=1)
    receiver.to_mailbox(inbox)
    ended: list[TerminalState] = []
    receiver.on_terminated(lambda state, error: ended.append(state))
    receipt = await sender.send(0, receipt=True)
    assert receipt.outcome is Outcome.PROCESSED
    queued(sender, 1, 2)  # one in the mailbox, two in the window: one of these is held by the feed
    with pytest.raises(trio.WouldBlock):
        sender.send_nowait(3)
    assert len(inbox.rooms) == 1
    async with background() as run:
        sends = [await run.start(partial(sender.send, n)) for n in (3, 4)]
        assert inbox.handle() == 0
        await wait_all_tasks_blocked()
        assert [task.result for task in sends] == [None, "waiting"]
        assert [inbox.handle() for _ in range(4)] == [1, 2, 3, 4]
        await wait_all_tasks_blocked()
        assert sends[1].result is None
    queued(sender, 5, 6)
    sender.finish_nowait()
    assert (inbox.handle(), ended) == (5, [FINISHED])
    assert (inbox.handle(), list(inbox.rooms)) == (6, [])


async def test_an_actor_that_stops_closes_the_receiver() -> None:
    sender, receiver = channel(int)
    inbox = Inbox(capacity=1)
    receiver.to_mailbox(inbox)
    receipts = [await sender.send(n, receipt=True) for n in range(3)]
    inbox.stop()
    assert [bool(receipt.outcome) for receipt in receipts] == [True, False, False]
    with pytest.raises(ReceiverClosed, match="the actor that received has stopped"):
        sender.send_nowait(3)
    with pytest.raises(Undelivered) as caught:
        await sender.finish()
    assert (caught.value.count, inbox.stops) == (2, {})
    assert not inbox.rooms  # nobody stands in line any more
    assert list(inbox.messages) == [0]

    sender, receiver = channel(int)
    receiver.to_mailbox(inbox)
    assert sender.state is RECEIVER_CLOSED


@pytest.mark.parametrize("end", ["cancel", "close"])
async def test_a_message_held_for_a_full_mailbox_is_discarded_with_the_channel(end: str) -> None:
    sender, receiver = channel(int)
    inbox = Inbox(capacity=1)
    receiver.to_mailbox(inbox)
    receipts = [await sender.send(n, receipt=True) for n in range(3)]
    (sender.cancel if end == "cancel" else receiver.close)()
    assert [bool(receipt.outcome) for receipt in receipts] == [True, False, False]
    assert (inbox.handle(), list(inbox.messages)) == (0, [])


async def test_a_dropped_receiver_whose_messages_go_to_a_mailbox_goes_on() -> None:
    sender, receiver = channel(int)
    inbox = Inbox()
    receiver.to_mailbox(inbox)
    del receiver
    gc.collect()
    await wait_all_tasks_blocked()
    queued(sender, 1)
    assert list(inbox.messages) == [1]
    sender.finish_nowait()


def test_wrap_may_send_on_the_same_channel_and_the_order_is_kept() -> None:
    sender, receiver = channel(int)
    inbox = Inbox()

    def wrap(n: int) -> int:
        if n < 3:
            sender.send_nowait(n + 10)
        return n

    receiver.to_mailbox(inbox, wrap)
    queued(sender, 1, 2)
    assert list(inbox.messages) == [1, 11, 2, 12]
    sender.finish_nowait()


def test_an_error_in_wrap_is_logged_and_closes_the_receiver(caplog: pytest.LogCaptureFixture) -> None:
    sender, receiver = channel(int, name="hits")
    receiver.to_mailbox(Inbox(), lambda n: 1 // n)
    sender.send_nowait(1)
    with caplog.at_level(logging.ERROR, logger="levada.framework.channel"):
        sender.send_nowait(0)
    assert "channel hits: a message cannot be put into a mailbox" in caplog.text
    assert "ZeroDivisionError" in caplog.text
    with pytest.raises(ReceiverClosed, match="could not be put into the receiver's mailbox"):
        sender.send_nowait(1)


class Reader(Actor[int]):
    @handles
    def read(self, m: int) -> None: ...


async def test_a_message_that_cannot_be_put_into_a_mailbox_was_not_processed(caplog: pytest.LogCaptureFixture) -> None:
    sender, receiver = channel(int)
    receipts = [await sender.send(n, receipt=True) for n in (1, 0, 2)]
    inbox = Inbox()
    receiver.to_mailbox(inbox, lambda n: 6 // n)
    assert [*inbox.messages] == [6]
    assert [await receipt for receipt in receipts] == [
        Outcome.PROCESSED,
        Outcome.NOT_PROCESSED,
        Outcome.NOT_PROCESSED,
    ]
    assert ["a message cannot be put into a mailbox" in text for text in caplog.messages] == [True]


def test_a_mailbox_that_refuses_a_message_because_its_actor_has_stopped_closes_the_receiver() -> None:
    """Also one that has not called back, as it promised."""
    sender, receiver = channel(int)
    inbox = Inbox()
    receiver.to_mailbox(inbox)
    sender.send_nowait(1)
    inbox.stopped = True
    sender.send_nowait(2)
    assert ([*inbox.messages], receiver.state, sender.state) == ([1], RECEIVER_CLOSED, RECEIVER_CLOSED)


def test_what_cannot_be_read_holds_up_none_of_the_messages_behind_it() -> None:
    """They had come before the receiver was given to the mailbox, so nothing else moves them."""
    sender, receiver = channel(int)
    inbox, unreadable, core = Inbox(), Undecoded(b"x"), sender.take_over("m")
    for entry in (unreadable, 1, 2):
        core.offer(entry, lambda: None)
    receiver.to_mailbox(inbox)
    assert ([*inbox.messages], unreadable.settled) == ([1, 2], [Outcome.PROCESSED])


@pytest.mark.parametrize("waiting", [0, 3])
async def test_a_loop_over_a_receiver_that_is_bound_to_a_mailbox_gets_no_message(waiting: int) -> None:
    """Whether messages wait for room in the mailbox or not."""
    sender, receiver = channel(int)
    inbox = Inbox(0)
    receiver.to_mailbox(inbox)
    for n in range(waiting):
        sender.send_nowait(n)
    with pytest.raises(HandleMoved, match="the messages of this receiver go to a mailbox"):
        await anext(receiver)
    sender.cancel()


async def test_messages_that_no_mailbox_takes_have_ten_lines_in_a_system(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A peer may send them on as many channels as it likes."""
    unreadable = [Undecoded(b"x") for _ in range(20)]
    async with ActorSystem() as system:
        reader = system.spawn(Reader)
        for envelope in unreadable:
            sender, receiver = channel(int)
            receiver.to_mailbox(reader, lambda n: 1 // n)
            sender.take_over("m").offer(envelope, lambda: None)
            sender, receiver = channel(int)
            receiver.to_mailbox(reader, lambda n: 1 // n)
            sender.send_nowait(0)
    lines = [message.partition(": ")[2].partition(";")[0] for message in caplog.messages]
    unread = "a message cannot be read: b'x' is not a number"
    assert lines == 10 * [unread, "a message cannot be put into a mailbox"]
    assert [envelope.settled for envelope in unreadable] == [[Outcome.PROCESSED]] * 20


@pytest.mark.parametrize(
    "name", ["send_nowait", "send", "receive_nowait", "receive", "finish_nowait", "cancel", "close"]
)
def test_ctrl_c_strikes_before_or_after_a_change_and_never_inside(name: str) -> None:
    """The interrupt comes while the channel calls back, in the middle of the change; it is raised when the caller waits next."""
    inbox = Inbox()
    after: list[Any] = []

    def interrupt(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)
        inbox.messages.append("whole")

    async def main() -> None:
        sender, receiver = channel(int)
        if "send" in name:
            receiver.to_mailbox(inbox, interrupt)
        else:
            sender.on_terminated(interrupt)
        if "receive" in name:
            sender.send_nowait(1)
            sender.finish_nowait()
        call = getattr(receiver if name in ("receive", "receive_nowait", "close") else sender, name)
        result = call(1) if "send" in name else call()
        after.append(await result if name in ("send", "receive") else result)
        after.append(inbox.messages[0])
        sender.cancel()
        await trio.lowlevel.checkpoint()

    with pytest.raises(KeyboardInterrupt):
        trio.run(main)
    assert after == [1 if "receive" in name else None, "whole"]


# ---------------------------------------------------------------- moved handles and a network in their place


class Wire:
    """Stands in for a network: a channel here, a channel there, and messages that travel when `carry` is called."""

    def __init__(self, away: ChannelCore, home: ChannelCore) -> None:
        self.away, self.home = away, home
        self.flying: deque[Any] = deque()
        self.blocked = False
        away.consume(self._collect)
        away.receiver.on_terminated(lambda: self._end(home, away.receiver.state))
        home.sender.on_terminated(lambda: self._end(away, home.sender.state))

    def _collect(self) -> None:
        while self.away.queue:
            self.flying.append(self.away.take())
        self._finish()

    def carry(self) -> None:
        self.blocked = False
        while self.flying and not self.blocked:
            entry = self.flying[0]
            message = entry.open() if isinstance(entry, Envelope) else entry
            if self.home.offer(message, self.carry):
                self.flying.popleft()
                self.away.settle(entry, outcome=Outcome.PROCESSED)
            else:
                self.blocked = True
        self._finish()

    def _finish(self) -> None:
        if self.away.pending is not None and not self.flying and not self.away.queue and self.home.producers:
            self.home.finish_producer()

    def _end(self, core: ChannelCore, state: TerminalState) -> None:
        if state is FINISHED:
            if core.pending is not None:
                core.end_pending()
        else:
            core.end(state)


async def test_a_moved_receiver_hands_over_what_was_queued_and_the_sender_works_on() -> None:
    sender, receiver = channel(int)
    sender.ordered(4)
    there, far = channel(int)
    queued(sender, 1, 2)
    wire = Wire(receiver.take_over("message 3"), there.take_over("message 3"))
    queued(sender, 3)
    receipt = await sender.send(4, receipt=True)
    with pytest.raises(trio.WouldBlock):  # what flies keeps its place in the window
        sender.send_nowait(5)
    async with background() as run:
        waiting = await run.start(lambda: sender.send(5))
        assert (waiting.result, receipt.outcome) == ("waiting", None)
        wire.carry()
        await wait_all_tasks_blocked()
        assert (waiting.result, receipt.outcome) == (None, Outcome.PROCESSED)
        finish = await run.start(sender.finish)
        wire.carry()
        assert [far.receive_nowait() for _ in range(4)] == [1, 2, 3, 4]
        await wait_all_tasks_blocked()
        assert finish.result == "waiting"
        assert await rest(far) == [5]
        await wait_all_tasks_blocked()
        assert finish.result is None
    with pytest.raises(HandleMoved, match="went away with message 3"):
        await receiver.receive()


async def test_a_moved_sender_feeds_the_receiver_that_stays_in_turn_with_local_clones() -> None:
    sender, receiver = channel(int)
    sender.ordered(1)
    far, there = channel(int)
    twin = sender.clone()
    async with background() as run:
        queued(sender, 0)
        early = await run.start(lambda: sender.send(1))  # began before the move, so it is still sent
        wire = Wire(there.take_over("m"), sender.take_over("m"))
        queued(far, 2, 3)
        wire.carry()
        local = await run.start(lambda: twin.send(4))
        assert receiver.receive_nowait() == 0
        assert [receiver.receive_nowait() for _ in range(2)] == [1, 2]
        twin_done = await run.start(twin.finish)
        far.finish_nowait()
        assert await rest(receiver) == [4, 3]
        await wait_all_tasks_blocked()
        assert [task.result for task in (early, local, twin_done)] == [None, None, None]
        assert far.state is FINISHED


@pytest.mark.parametrize("end", ["cancel", "close"])
async def test_ends_cross_the_network(end: str) -> None:
    sender, receiver = channel(int)
    there, far = channel(int)
    Wire(receiver.take_over("m"), there.take_over("m"))
    async with background() as run:
        sending, receiving = await run.start(sender.terminated), await run.start(far.receive)
        if end == "cancel":
            sender.cancel()
        else:
            far.close()
        await wait_all_tasks_blocked()
        expected = (CANCELLED, ChannelCancelled) if end == "cancel" else (RECEIVER_CLOSED, ReceiverClosed)
        assert (sending.result, receiving.result) == expected


def calls_of(handle: Any) -> list[Callable[[], Any]]:
    common: list[Callable[[], Any]] = [
        lambda: handle.state,
        lambda: handle.on_terminated(print),
        lambda: handle.take_over("x"),
    ]
    if isinstance(handle, Sender):
        names = ["clone", "ordered", "unordered", "unreliable", "finish_nowait", "cancel"]
        return [*common, lambda: handle.send_nowait(1), *(getattr(handle, name) for name in names)]
    if isinstance(handle, Receiver | OneshotReceiver):
        return [*common, handle.receive_nowait, handle.close, lambda: handle.to_mailbox(Inbox())]
    return [*common, lambda: handle.send(1), handle.finish_nowait, handle.cancel]


async def test_a_moved_handle_refuses_every_use_and_give_back_restores_it() -> None:
    for make in (channel, oneshot):
        for which in (0, 1):
            pair = make(int)
            handle: Any = pair[which]
            handle.take_over("message 7")
            for call in calls_of(handle):
                with pytest.raises(HandleMoved, match="message 7"):
                    call()
            for name in ("send", "finish", "receive", "terminated"):
                if hasattr(handle, name) and not (make is oneshot and name == "send"):
                    with pytest.raises(HandleMoved, match="message 7"):
                        await (getattr(handle, name)(1) if name == "send" else getattr(handle, name)())
            assert "went away with message 7" in repr(handle)
            with handle:
                pass  # leaving a block leaves a moved handle alone
            handle.give_back()
            assert ": open, 0 of " in repr(handle)
            pair[0].cancel()


async def test_after_a_failed_encode_everything_is_as_before() -> None:
    sender, receiver = channel(int)
    queued(sender, 1)
    receiver.take_over("a message that cannot be encoded")
    queued(sender, 2)
    receiver.give_back()
    async with background() as run:
        assert [receiver.receive_nowait(), receiver.receive_nowait()] == [1, 2]
        taker = await run.start(receiver.receive)
        sender.take_over("another")
        sender.give_back()
        queued(sender, 3)
        await wait_all_tasks_blocked()
        assert taker.result == 3
    sender.finish_nowait()
    assert receiver.state is FINISHED


async def test_a_task_inside_receive_is_sent_away_when_a_network_takes_the_receiver_over() -> None:
    sender, receiver = channel(int)
    async with background() as run:
        taker = await run.start(receiver.receive)
        receiver.take_over("m").consume(lambda: None)
        await wait_all_tasks_blocked()
        assert taker.result is HandleMoved
    sender.cancel()


async def test_a_network_prepares_each_message_as_it_is_sent() -> None:
    """What cannot travel is refused to whoever sends it, also if that had to wait; what was queued before is not touched."""
    sender, receiver = channel(int)
    sender.ordered(2)
    sender.send_nowait(1)
    core = receiver.take_over("m")

    def prepare(entry: Any) -> str:
        if not isinstance(entry, int):
            raise ChannelError("no number")
        return f"<{entry}>"

    core.consume(lambda: None, prepare)
    with pytest.raises(ChannelError, match="no number"):
        sender.send_nowait("two")  # type: ignore[arg-type]
    sender.send_nowait(2)
    assert list(core.queue) == [1, "<2>"]
    async with background() as run:
        refused = await run.start(partial(cast("Any", sender.send), "three"))
        waits = await run.start(partial(sender.send, 4))
        core.settle(core.take(), outcome=Outcome.PROCESSED)
        await wait_all_tasks_blocked()
        assert (refused.result, waits.result) == (ChannelError, None)
    assert list(core.queue) == ["<2>", "<4>"]
    sender.cancel()


def test_one_half_stays_here() -> None:
    sender, receiver = channel(int)
    twin = sender.clone()
    sender.take_over("m")
    twin.take_over("m")  # a second sender may leave as well
    with pytest.raises(HandleNotForwardable, match="the other half is in another system"):
        receiver.take_over("n")
    twin.give_back()
    sender.give_back()
    receiver.take_over("n")
    with pytest.raises(HandleNotForwardable):
        sender.take_over("m")
    receiver.give_back()
    sender.finish_nowait()
    with pytest.raises(SenderFinished):
        sender.take_over("m")
    receiver.close()
    twin.cancel()
    with pytest.raises(ReceiverClosed):
        receiver.take_over("n")


async def test_moved_handles_may_be_dropped() -> None:
    sender, receiver = channel(int)
    core = receiver.take_over("m")
    del receiver
    gc.collect()
    await wait_all_tasks_blocked()
    queued(sender, 1)
    assert core.take() == 1
    sender.cancel()


class Undecoded(Envelope):
    """A message as it came from a network."""

    def __init__(self, octets: bytes) -> None:
        self.octets = octets
        self.settled: list[Outcome] = []

    def open(self) -> int:
        if not self.octets.isdigit():
            raise DecodeError(f"{self.octets!r} is not a number")
        return int(self.octets)

    def settle(self, outcome: Outcome) -> None:
        self.settled.append(outcome)


async def test_an_envelope_is_opened_when_it_is_taken_and_its_error_goes_to_that_receive() -> None:
    sender, receiver = channel(int)
    core = sender.take_over("m")
    envelopes = [Undecoded(octets) for octets in (b"1", b"x", b"3", b"4")]

    def never() -> None:
        raise AssertionError

    async with background() as run:
        taker = await run.start(receiver.receive)
        assert core.offer(envelopes[0], never)
        await wait_all_tasks_blocked()
        assert taker.result == 1
    for envelope in envelopes[1:]:
        assert core.offer(envelope, never)
    with pytest.raises(DecodeError):
        await receiver.receive()
    assert await receiver.receive() == 3
    assert [envelope.settled for envelope in envelopes] == [[Outcome.PROCESSED]] * 3 + [[]]
    receiver.close()
    assert envelopes[3].settled == [Outcome.NOT_PROCESSED]


@pytest.mark.parametrize(("clones", "left"), [(0, 2), (1, 3)])
def test_a_network_that_waits_comes_back_when_half_the_window_is_free_unless_others_send_too(
    clones: int, left: int
) -> None:
    """So it puts many messages at once; beside a clone here it takes its turn at the first place, or the clone would never let it in."""
    sender, receiver = channel(int)
    sender.ordered(4)
    others = [sender.clone() for _ in range(clones)]
    core = sender.take_over("m")
    room: list[int] = []
    for n in range(4):
        assert core.offer(n, lambda: None)
    assert not core.offer(4, lambda: room.append(receiver.queued))
    for n in range(4):
        assert receiver.receive_nowait() == n
    assert room == [left]
    for each in others:
        each.finish_nowait()
    receiver.close()


class Large(Undecoded):
    """Takes 0.2 s to decode, on the clock of the test."""

    clock: MockClock
    large = True

    def open(self) -> int:
        self.clock.jump(0.2)
        return super().open()


@pytest.mark.parametrize("kind", [Undecoded, Large])
async def test_after_a_large_message_receive_lets_others_run_for_as_long(
    autojump_clock: MockClock, kind: type[Undecoded]
) -> None:
    """Also one that cannot be decoded; small ones follow each other at once."""
    Large.clock = autojump_clock
    sender, receiver = channel(int)
    core = sender.take_over("m")
    for octets in (b"0", b"1", b"x", b"3"):
        assert core.offer(kind(octets), lambda: None)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await trio.sleep(0.01)
            ticks += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(tick)
        await wait_all_tasks_blocked()
        seen = []
        for _ in range(4):
            try:
                await receiver.receive()
            except DecodeError:
                pass
            seen.append(ticks)
        nursery.cancel_scope.cancel()
    steps = [after - before for before, after in itertools.pairwise(seen)]
    assert all(step >= 15 for step in steps) if kind is Large else steps == [0, 0, 0]
    receiver.close()


async def test_a_mailbox_gets_large_messages_with_as_much_time_between_them(autojump_clock: MockClock) -> None:
    Large.clock = autojump_clock
    sender, receiver = channel(int)
    core, began, taken = sender.take_over("m"), trio.current_time(), list[tuple[int, float]]()
    for envelope in (Large(b"1"), Large(b"2"), Undecoded(b"3"), Undecoded(b"4")):
        assert core.offer(envelope, lambda: None)
    receiver.to_mailbox(Inbox(), lambda n: taken.append((n, round(trio.current_time() - began, 6))))
    await trio.sleep(2.0)
    assert taken == [(1, 0.2), (2, 0.6), (3, 0.8), (4, 0.8)]
    receiver.close()


async def test_cancelled_while_others_run_receive_has_taken_nothing(autojump_clock: MockClock) -> None:
    Large.clock = autojump_clock
    sender, receiver = channel(int)
    core = sender.take_over("m")
    for octets in (b"0", b"1"):
        assert core.offer(Large(octets), lambda: None)
    assert await receiver.receive() == 0
    with trio.move_on_after(0.1) as scope:
        await receiver.receive()
    assert scope.cancelled_caught
    assert await receiver.receive() == 1
    receiver.close()


# ---------------------------------------------------------------- forgotten handles


async def test_a_forgotten_sender_warns_and_cancels_its_channel() -> None:
    sender, receiver = channel(int, name="hits")
    queued(sender, 1)
    async with background() as run:
        task = await run.start(receiver.terminated)
        with pytest.warns(
            ResourceWarning, match=r"<Sender of channel hits: open, 1 of 256 queued> was forgotten .* cancelled"
        ):
            del sender
            gc.collect()
        await wait_all_tasks_blocked()
        assert task.result is CANCELLED
        with pytest.raises(ChannelCancelled):
            receiver.receive_nowait()


async def test_a_forgotten_receiver_warns_and_closes_its_channel() -> None:
    sender, receiver = channel(int)
    sender.ordered(1)
    queued(sender, 1)
    async with background() as run:
        task = await run.start(lambda: sender.send(2))
        with pytest.warns(ResourceWarning, match="Receiver .* closed"):
            del receiver
            gc.collect()
        await wait_all_tasks_blocked()
        assert task.result is ReceiverClosed


async def test_a_forgotten_oneshot_sender_warns_and_gives_no_value() -> None:
    done, answer = oneshot(int)
    async with background() as run:
        task = await run.start(answer.receive)
        with pytest.warns(ResourceWarning, match="OneshotSender .* without a value"):
            del done
            gc.collect()
        await wait_all_tasks_blocked()
        assert task.result is NoValue


async def test_handles_of_ended_channels_and_both_halves_at_once_do_not_nag() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for end in ("finish_nowait", "cancel"):
            sender, receiver = channel(int)
            getattr(sender, end)()
            del sender, receiver
        sender, receiver = channel(int)
        receiver.close()
        del sender, receiver
        done, answer = oneshot(int)
        with answer as entered:
            assert entered is answer
        del done, answer, entered
        done, answer = oneshot(int)
        done.take_over("a message")
        del done
        gc.collect()
        answer.close()
        assert caught == []
        pair = channel(int)
        del pair
        gc.collect()
        assert [warning.category for warning in caught] == [ResourceWarning]


async def test_a_handle_that_another_thread_drops_ends_its_channel_in_the_trio_thread() -> None:
    sender, receiver = channel(int)
    holder = [sender]
    del sender
    ended_in: list[int] = []
    receiver.on_terminated(lambda state, error: ended_in.append(threading.get_ident()))
    with pytest.warns(ResourceWarning, match="Sender"):
        await trio.to_thread.run_sync(holder.clear)
    assert await receiver.terminated() is CANCELLED
    assert ended_in == [threading.get_ident()]


def test_handles_dropped_without_or_after_a_trio_run() -> None:
    sender, receiver = channel(int)
    with pytest.warns(ResourceWarning, match="Sender"):
        del sender
        gc.collect()
    assert receiver.state is CANCELLED

    async def make() -> tuple[Sender[int], Receiver[int]]:
        return channel(int)

    sender, receiver = trio.run(make)
    with pytest.warns(ResourceWarning, match="Sender"):
        del sender
        gc.collect()
    receiver.close()


@pytest.mark.parametrize("dropped", ["sender", "receiver"])
async def test_a_channel_made_outside_of_trio_wakes_its_waiting_tasks_in_the_trio_thread(dropped: str) -> None:
    made: list[tuple[Sender[int], Receiver[int]]] = []
    thread = threading.Thread(target=lambda: made.append(channel(int)))
    thread.start()
    thread.join()
    sender, receiver = made.pop()
    sender.ordered(1)
    holder: list[object] = [sender if dropped == "sender" else receiver]
    async with background() as run:
        if dropped == "sender":
            del sender
            task = await run.start(receiver.receive)
        else:
            del receiver
            queued(sender, 1)
            task = await run.start(partial(sender.send, 2))
        with pytest.warns(ResourceWarning, match="was forgotten"):
            await trio.to_thread.run_sync(holder.clear)
        await wait_all_tasks_blocked()
        assert task.result is (ChannelCancelled if dropped == "sender" else ReceiverClosed)


# ---------------------------------------------------------------- handles as objects


def test_types_follow_the_item() -> None:
    sender, receiver = channel(int)
    assert_type(sender, Sender[int])
    assert_type(receiver, Receiver[int])
    narrower: Sender[bool] = sender
    wider: Receiver[object] = receiver
    narrower.send_nowait(True)
    assert wider.receive_nowait() is True
    done, answer = oneshot(str)
    assert_type(done, OneshotSender[str])
    assert_type(answer, OneshotReceiver[str])
    stop, stopped = channel(None)
    assert_type(stop, Sender[None])
    for handle in (sender, done, stop):
        handle.finish_nowait()
    assert [half.state for half in (receiver, answer, stopped)] == [FINISHED] * 3


def test_handles_know_their_type_and_name_and_cannot_be_copied() -> None:
    sender, receiver = channel(int | str, name="both")
    done, answer = oneshot(None)
    handles = [sender, receiver, done, answer]
    assert [handle.attachment_kind for handle in handles] == [
        "sender",
        "receiver",
        "oneshot_sender",
        "oneshot_receiver",
    ]
    assert [handle.item_type for handle in handles] == [int | str, int | str, None, None]
    assert (sender.name, receiver.name, done.name) == ("both", "both", "None")
    assert repr(receiver) == "<Receiver of channel both: open, 0 of 256 queued>"
    for handle in handles:
        for misuse in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="one owner"):
                misuse(handle)
    sender.finish_nowait()
    done.finish_nowait()
