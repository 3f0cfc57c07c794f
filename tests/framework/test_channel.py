"""Channels: order, bounds, fairness, every way to end, cancellation at every await, forgotten handles."""

from __future__ import annotations

import contextlib
import gc
import pickle
import weakref
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from levada.framework.channel import (
    Mode,
    Outcome,
    Sender,
    TerminalState,
    channel,
    oneshot,
)
from levada.framework.errors import (
    ChannelCancelled,
    ChannelConnectionLost,
    ChannelError,
    ChannelLost,
    ConfigurationError,
    ConnectionLost,
    EndOfChannel,
    NoValue,
    ReceiverClosed,
    SenderFinished,
    Undelivered,
)

from .conftest import background, queued, rest

T = TypeVar("T")

OPEN, FINISHED, CANCELLED, RECEIVER_CLOSED, LOST, CONNECTION_LOST = TerminalState


# ---------------------------------------------------------------- order, bound, fairness


async def test_messages_arrive_in_the_order_of_sending_and_iteration_ends_with_the_finish() -> None:
    sender, receiver = channel(int)

    async def produce() -> None:
        async with sender:
            for n in range(1000):
                await sender.send(n)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(produce)
        assert await rest(receiver) == list(range(1000))
    assert (sender.state, receiver.state) == (FINISHED, FINISHED)


def test_a_full_window_refuses_without_waiting_and_takes_one_for_each_that_leaves() -> None:
    sender, receiver = channel(int)
    sender.ordered(window=2)
    queued(sender, 1, 2)
    with pytest.raises(trio.WouldBlock):
        sender.send_nowait(3)
    assert receiver.receive_nowait() == 1
    sender.send_nowait(3)
    with pytest.raises(trio.WouldBlock):
        sender.send_nowait(4)
    assert [receiver.receive_nowait(), receiver.receive_nowait()] == [2, 3]
    with pytest.raises(trio.WouldBlock):
        receiver.receive_nowait()
    sender.finish_nowait()


async def test_waiting_senders_are_let_in_in_order_and_nobody_overtakes_them() -> None:
    sender, receiver = channel(int)
    sender.ordered(window=1)
    queued(sender, 0)
    async with background() as run:
        tasks = [await run.start(partial(sender.send, n)) for n in (1, 2, 3)]
        assert receiver.receive_nowait() == 0
        # The place is taken at once by the first that waited, before its task has run.
        with pytest.raises(trio.WouldBlock):
            sender.send_nowait(99)
        await wait_all_tasks_blocked()
        assert [task.result for task in tasks] == [None, "waiting", "waiting"]
        assert [receiver.receive_nowait() for _ in range(3)] == [1, 2, 3]
    sender.finish_nowait()


async def test_waiting_receivers_are_served_in_order() -> None:
    sender, receiver = channel(int)
    async with background() as run:
        tasks = [await run.start(receiver.receive) for _ in range(3)]
        queued(sender, 1, 2)
        await wait_all_tasks_blocked()
        assert [task.result for task in tasks] == [1, 2, "waiting"]
        queued(sender, 3, 4)
        await wait_all_tasks_blocked()
        assert [task.result for task in tasks] == [1, 2, 3]
        assert receiver.receive_nowait() == 4
    sender.finish_nowait()


async def test_with_a_stopped_receiver_no_more_than_the_window_is_held() -> None:
    sender, receiver = channel(int)
    assert sender.window == 256
    sent = 0

    async def produce(producer: Sender[int]) -> None:
        nonlocal sent
        while True:
            await producer.send(sent)
            sent += 1

    async with background() as run:
        producers = [sender.clone() for _ in range(3)]
        for producer in producers:
            await run.start(partial(produce, producer))
        assert sent == 256
    receiver.close()


class Steps(trio.abc.Instrument):
    """Notes `calls` whenever the task that made this is stepped by trio again."""

    def __init__(self) -> None:
        self.task = trio.lowlevel.current_task()
        self.calls = 0
        self.seen: list[int] = []

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self.task:
            self.seen.append(self.calls)


async def test_loops_that_never_wait_let_other_tasks_run_every_128_calls() -> None:
    sender, receiver = channel(int)
    sender.ordered(512)
    steps = Steps()
    trio.lowlevel.add_instrument(steps)
    for n in range(512):
        await sender.send(n)
        steps.calls += 1
    for _ in range(512):
        await receiver.receive()
        steps.calls += 1
    trio.lowlevel.remove_instrument(steps)
    assert steps.seen == [128 * turn - 1 for turn in range(1, 9)]
    sender.finish_nowait()


async def test_a_loop_that_never_waits_notices_a_cancellation_and_has_not_half_sent() -> None:
    sender, receiver = channel(int)
    sent: list[int] = []
    with trio.CancelScope() as scope:
        scope.cancel()
        for n in range(200):
            await sender.send(n)
            sent.append(n)
    assert sent == list(range(127))
    sender.finish_nowait()
    assert await rest(receiver) == sent


# ---------------------------------------------------------------- modes


@pytest.mark.parametrize("mode", [Mode.ORDERED, Mode.UNORDERED])
async def test_reliable_modes_keep_everything(mode: Mode) -> None:
    sender, receiver = channel(int)
    assert (sender.ordered(2) if mode is Mode.ORDERED else sender.unordered(2)) is sender
    assert (sender.mode, sender.window) == (mode, 2)
    async with background() as run:
        queued(sender, 1, 2)
        task = await run.start(lambda: sender.send(3))
        assert task.result == "waiting"
        sender.finish_nowait()
        await wait_all_tasks_blocked()
        assert task.result is SenderFinished
    assert await rest(receiver) == [1, 2]


async def test_a_full_unreliable_channel_drops_the_oldest_and_says_how_many() -> None:
    sender, receiver = channel(int)
    sender.unreliable(buffer=3)
    receipts = [await sender.send(n, receipt=True) for n in range(5)]
    sender.send_nowait(5)
    assert [receipt.outcome for receipt in receipts] == [Outcome.NOT_PROCESSED] * 3 + [None] * 2
    async with background() as run:
        finish = await run.start(sender.finish)
        assert await rest(receiver) == [3, 4, 5]
        await wait_all_tasks_blocked()
        assert finish.result is Undelivered
    with pytest.raises(Undelivered) as caught:
        await sender.finish()
    assert caught.value.count == 3


def test_the_mode_is_chosen_before_the_first_message() -> None:
    sender, receiver = channel(int)
    assert sender.unordered(7).ordered().mode is Mode.ORDERED
    for wrong in (0, -1, 1.5, "9", None):
        with pytest.raises(ConfigurationError):
            sender.ordered(wrong)  # type: ignore[arg-type]  # that is the test
    queued(sender, 1)
    with pytest.raises(ConfigurationError, match="before the first message"):
        sender.unreliable()
    receiver.close()
    assert sender.ordered() is sender  # no error before the first call that needs the reader
    for call in (lambda: sender.send_nowait(2), sender.clone):
        with pytest.raises(ReceiverClosed):
            call()
    sender, receiver = channel(int)
    sender.finish_nowait()
    with pytest.raises(SenderFinished):
        sender.ordered()


# ---------------------------------------------------------------- finish


async def test_finish_returns_when_everything_was_taken() -> None:
    sender, receiver = channel(int)
    queued(sender, 1, 2)
    async with background() as run:
        finish = await run.start(sender.finish)
        ended = await run.start(receiver.terminated)
        assert receiver.receive_nowait() == 1
        await wait_all_tasks_blocked()
        assert (finish.result, ended.result, sender.state, receiver.state) == ("waiting", "waiting", OPEN, OPEN)
        assert receiver.receive_nowait() == 2
        await wait_all_tasks_blocked()
        assert (finish.result, ended.result, sender.state, receiver.state) == (None, FINISHED, FINISHED, FINISHED)
    await sender.finish()
    for _ in range(2):
        with pytest.raises(EndOfChannel):
            await receiver.receive()
        with pytest.raises(EndOfChannel):
            receiver.receive_nowait()
        with pytest.raises(SenderFinished):
            await sender.send(3)
        with pytest.raises(SenderFinished):
            sender.send_nowait(3)


async def test_finish_sends_waiting_receivers_and_waiting_sends_of_that_handle_away() -> None:
    sender, receiver = channel(int)
    async with background() as run:
        tasks = [await run.start(receiver.receive) for _ in range(2)] + [await run.start(lambda: rest(receiver))]
        sender.finish_nowait()
        await wait_all_tasks_blocked()
        assert [task.result for task in tasks] == [EndOfChannel, EndOfChannel, []]


async def test_finish_of_a_channel_whose_receiver_closes_says_how_many_were_not_taken() -> None:
    sender, receiver = channel(int)
    queued(sender, 1, 2, 3)
    assert receiver.receive_nowait() == 1
    async with background() as run:
        finish = await run.start(sender.finish)
        receiver.close()
        await wait_all_tasks_blocked()
        assert finish.result is Undelivered
    with pytest.raises(Undelivered) as caught:
        await sender.finish()
    assert (caught.value.count, sender.state) == (2, RECEIVER_CLOSED)


async def test_finish_after_the_receiver_took_all_and_closed_is_content() -> None:
    sender, receiver = channel(int)
    queued(sender, 1)
    assert receiver.receive_nowait() == 1
    receiver.close()
    await sender.finish()
    assert sender.state is RECEIVER_CLOSED


async def test_a_channel_finishes_with_the_last_of_its_clones() -> None:
    sender, receiver = channel(int)
    twin = sender.clone()
    third = twin.clone()
    assert [handle.window for handle in (sender, twin, third)] == [256] * 3
    queued(sender, 1)
    queued(twin, 2)
    await sender.finish()  # returns at once: others are open
    with pytest.raises(SenderFinished):
        sender.clone()
    third.finish_nowait()
    third.finish_nowait()
    queued(twin, 3)
    async with background() as run:
        last = await run.start(twin.finish)
        assert last.result == "waiting"
        assert await rest(receiver) == [1, 2, 3]
        await wait_all_tasks_blocked()
        assert last.result is None
    await sender.finish()


async def test_finish_of_one_clone_leaves_the_waiting_sends_of_the_others() -> None:
    sender, receiver = channel(int)
    sender.ordered(1)
    twin = sender.clone()
    queued(sender, 0)
    async with background() as run:
        mine = await run.start(lambda: sender.send(1))
        other = await run.start(lambda: twin.send(2))
        sender.finish_nowait()
        await wait_all_tasks_blocked()
        assert (mine.result, other.result) == (SenderFinished, "waiting")
        twin_done = await run.start(twin.terminated)
        assert [receiver.receive_nowait(), receiver.receive_nowait()] == [0, 2]
        twin.finish_nowait()
        await wait_all_tasks_blocked()
        assert (other.result, twin_done.result) == (None, FINISHED)


# ---------------------------------------------------------------- cancel, close, loss


async def test_cancel_discards_and_everybody_learns_of_it() -> None:
    sender, receiver = channel(int)
    sender.ordered(1)
    twin = sender.clone()
    receipt = await sender.send(1, receipt=True)
    async with background() as run:
        tasks = [
            await run.start(call)
            for call in (lambda: sender.send(2), lambda: twin.send(3), twin.terminated, receiver.terminated)
        ]
        sender.cancel()
        await wait_all_tasks_blocked()
        assert [task.result for task in tasks] == [SenderFinished, ChannelCancelled, CANCELLED, CANCELLED]
    assert (receipt.outcome, sender.state, receiver.state) == (Outcome.NOT_PROCESSED, CANCELLED, CANCELLED)
    for _ in range(2):
        with pytest.raises(ChannelCancelled):
            await receiver.receive()
        with pytest.raises(ChannelCancelled):
            await rest(receiver)
        with pytest.raises(SenderFinished):
            sender.send_nowait(4)
        with pytest.raises(ChannelCancelled):
            twin.send_nowait(4)
        with pytest.raises(ChannelCancelled):
            await sender.finish()
        sender.cancel()
        receiver.close()


async def test_cancel_reaches_waiting_receivers_and_a_waiting_finish() -> None:
    sender, receiver = channel(int)
    async with background() as run:
        taker = await run.start(receiver.receive)
        sender.cancel()
        await wait_all_tasks_blocked()
        assert taker.result is ChannelCancelled
    sender, receiver = channel(int)
    queued(sender, 1)
    async with background() as run:
        finish = await run.start(sender.finish)
        sender.cancel()  # allowed after finish(): what is queued is given up
        await wait_all_tasks_blocked()
        assert finish.result is ChannelCancelled
    assert receiver.state is CANCELLED


async def test_close_discards_and_everybody_learns_of_it() -> None:
    sender, receiver = channel(int)
    sender.ordered(1)
    twin = sender.clone()
    receipt = await sender.send(1, receipt=True)
    async with background() as run:
        tasks = [
            await run.start(call)
            for call in (lambda: sender.send(2), lambda: twin.send(3), sender.terminated, receiver.terminated)
        ]
        receiver.close()
        await wait_all_tasks_blocked()
        assert [task.result for task in tasks] == [ReceiverClosed, ReceiverClosed, RECEIVER_CLOSED, RECEIVER_CLOSED]
    assert (receipt.outcome, sender.state, receiver.state) == (Outcome.NOT_PROCESSED, RECEIVER_CLOSED, RECEIVER_CLOSED)
    for _ in range(2):
        for handle in (sender, twin):
            with pytest.raises(ReceiverClosed):
                await handle.send(4)
            with pytest.raises(ReceiverClosed):
                handle.send_nowait(4)
            with pytest.raises(ReceiverClosed):
                handle.clone()
        with pytest.raises(ReceiverClosed):
            receiver.receive_nowait()
        receiver.close()
        sender.cancel()
        twin.finish_nowait()
    with pytest.raises(Undelivered):
        await sender.finish()


async def test_close_sends_other_tasks_inside_receive_away() -> None:
    sender, receiver = channel(int)
    async with background() as run:
        tasks = [await run.start(receiver.receive) for _ in range(2)]
        receiver.close()
        await wait_all_tasks_blocked()
        assert [task.result for task in tasks] == [ReceiverClosed, ReceiverClosed]
    assert sender.state is RECEIVER_CLOSED


@pytest.mark.parametrize(("state", "error"), [(LOST, ChannelLost), (CONNECTION_LOST, ChannelConnectionLost)])
async def test_after_a_loss_what_was_queued_is_readable_and_then_the_error_comes(
    state: TerminalState, error: type[ChannelError]
) -> None:
    sender, receiver = channel(int)
    cause = OSError("cable")
    core = sender.clone().take_over("a message")  # a network stands for the sending side
    queued(sender, 1, 2)
    told: list[TerminalState] = []
    sender.on_terminated(lambda state, error: told.append(state))
    async with background() as run:
        sending, receiving = await run.start(sender.terminated), await run.start(receiver.terminated)
        core.end(state, discard=False, detail="gone", cause=cause)
        await wait_all_tasks_blocked()
        assert (sending.result, receiving.result, receiver.state) == (state, "waiting", OPEN)
        with pytest.raises(error):
            sender.send_nowait(3)
        with pytest.raises(error):
            await sender.finish()
        assert [await receiver.receive(), await receiver.receive()] == [1, 2]
        await wait_all_tasks_blocked()
        assert (receiving.result, receiver.state, told) == (state, state, [state])
    for _ in range(2):
        with pytest.raises(error, match="channel int: gone") as caught:
            await rest(receiver)
        assert (caught.value.__cause__, caught.value.channel) == (cause, "int")


async def test_a_loss_that_discards_leaves_nothing() -> None:
    sender, receiver = channel(int)
    queued(sender, 1)
    core = sender.take_over("a message")
    core.end(CONNECTION_LOST)
    with pytest.raises(ConnectionLost):
        receiver.receive_nowait()


def test_a_half_that_ended_stays_as_it_is() -> None:
    sender, receiver = channel(int)
    queued(sender, 1)
    core = sender.take_over("a message")
    core.end(LOST, discard=False)
    receiver.close()
    core.end(CANCELLED)
    assert (core.sender.state, receiver.state) == (LOST, RECEIVER_CLOSED)


def test_errors_name_the_channel_and_do_not_collect_tracebacks() -> None:
    sender, receiver = channel(int, name="hits")
    sender.cancel()
    errors = []
    for _ in range(2):
        with pytest.raises(ChannelCancelled, match="channel hits: the sender cancelled") as caught:
            receiver.receive_nowait()
        errors.append(caught.value)
    assert errors[0] is not errors[1]
    assert errors[0].channel == "hits"


# ---------------------------------------------------------------- context managers


async def test_leaving_a_block_finishes_and_an_exception_cancels() -> None:
    sender, receiver = channel(int)
    with sender, receiver:
        queued(sender, 1)
    assert (sender.state, receiver.state) == (RECEIVER_CLOSED, RECEIVER_CLOSED)
    sender, receiver = channel(int)
    with sender:
        queued(sender, 1)
    assert await rest(receiver) == [1]
    for use_async in (False, True):
        sender, receiver = channel(int)
        with pytest.raises(KeyError):
            if use_async:
                async with sender:
                    raise KeyError
            else:
                with sender:
                    raise KeyError
        assert receiver.state is CANCELLED
    sender, receiver = channel(int)
    async with receiver:
        pass
    assert sender.state is RECEIVER_CLOSED


async def test_leaving_async_with_waits_for_the_receiver() -> None:
    sender, receiver = channel(int)

    async def produce() -> str:
        async with sender:
            await sender.send(1)
        return "left"

    async with background() as run:
        producer = await run.start(produce)
        assert producer.result == "waiting"
        assert await rest(receiver) == [1]
        await wait_all_tasks_blocked()
        assert producer.result == "left"


LEFT = [RECEIVER_CLOSED, CONNECTION_LOST]


@pytest.mark.parametrize("left", LEFT)
@pytest.mark.parametrize("use_async", [False, True])
@pytest.mark.parametrize("waits", [False, True])
async def test_a_block_ends_quietly_when_its_reader_leaves(left: TerminalState, use_async: bool, waits: bool) -> None:
    """In the middle of a send, and before everything was taken."""
    sender, receiver = channel(int)
    steps = []

    async def send() -> None:
        await sender.ordered(1).send(1)
        if waits:
            await sender.send(2)
            steps.append("sent")

    async def produce() -> str:
        if use_async:
            async with sender:
                await send()
        else:
            with sender:
                await send()
        return "left"

    async with background() as run:
        producer = await run.start(produce)
        receiver._core.end(left)
        await wait_all_tasks_blocked()
        assert (producer.result, steps) == ("left", [])
    assert sender.state is left


async def test_a_block_ends_quietly_for_its_own_reader_only() -> None:
    """Whichever block is the outer one; the other channel is cancelled, as after any error."""
    for leaves in ("outer", "inner"):
        outer, of_outer = channel(int)
        inner, of_inner = channel(int)
        (of_outer if leaves == "outer" else of_inner).close()
        steps = []
        async with outer:
            async with inner:
                (outer if leaves == "outer" else inner).send_nowait(1)
                steps.append("sent")
            steps.append("behind the inner block")
            outer.send_nowait(2)
            assert of_outer.receive_nowait() == 2
        steps.append("behind both")
        if leaves == "outer":
            assert (steps, of_inner.state) == (["behind both"], CANCELLED)
        else:
            assert (steps, of_outer.state) == (["behind the inner block", "behind both"], FINISHED)


async def test_a_block_passes_on_the_end_of_another_channel_and_an_error_that_it_causes() -> None:
    for make in (
        lambda mine, other: other.send_nowait(1),
        lambda mine, other: raise_from(KeyError(), lambda: mine.send_nowait(1)),
        lambda mine, other: raise_(ReceiverClosed("of somewhere else", channel="int")),
    ):
        mine, of_mine = channel(int)
        other, of_other = channel(int)
        of_mine.close()
        of_other.close()
        with pytest.raises((ReceiverClosed, KeyError)):
            async with mine:
                make(mine, other)
        with pytest.raises((ReceiverClosed, KeyError)), mine:
            make(mine, other)


def raise_(error: BaseException) -> None:
    raise error


def raise_from(error: BaseException, call: Callable[[], None]) -> None:
    try:
        call()
    except ChannelError as cause:
        raise error from cause


async def test_a_block_ends_quietly_after_a_group_of_errors_that_all_say_that_its_reader_left() -> None:
    sender, receiver = channel(int)
    clone = sender.clone()
    receiver.close()
    async with sender, trio.open_nursery() as nursery:
        nursery.start_soon(sender.send, 1)
        nursery.start_soon(clone.send, 2)
    other, of_other = channel(int)
    of_other.close()
    sender, receiver = channel(int)
    receiver.close()
    with pytest.raises(ExceptionGroup) as caught:
        async with sender, trio.open_nursery() as nursery:
            nursery.start_soon(sender.send, 1)
            nursery.start_soon(other.send, 2)
    assert [type(error) for error in caught.value.exceptions] == [ReceiverClosed, ReceiverClosed]


async def test_a_block_passes_on_a_cancellation_and_the_other_ends_of_its_channel() -> None:
    for end, kind in ((CANCELLED, ChannelCancelled), (LOST, ChannelLost)):
        sender, receiver = channel(int)
        receiver._core.end(end)
        with pytest.raises(kind):
            async with sender:
                sender.send_nowait(1)
        with pytest.raises(kind):
            async with sender:
                pass
        del receiver
    sender, receiver = channel(int)
    with trio.CancelScope() as scope:
        async with sender.ordered(1):
            await sender.send(1)
            scope.cancel()
            await sender.send(2)
    assert scope.cancelled_caught
    assert receiver.state is CANCELLED
    unreliable, receiver = channel(int)
    with pytest.raises(Undelivered):
        async with unreliable.unreliable(1):
            queued(unreliable, 1, 2)
            receiver.receive_nowait()


async def test_a_block_that_is_cancelled_just_when_its_reader_leaves_passes_on_the_cancellation() -> None:
    sender, receiver = channel(int)
    with trio.CancelScope() as scope:
        async with sender.ordered(1), trio.open_nursery() as nursery:
            await sender.send(1)
            nursery.start_soon(sender.send, 2)
            nursery.start_soon(trio.sleep_forever)
            await wait_all_tasks_blocked()
            receiver.close()
            scope.cancel()
    assert scope.cancelled_caught
    assert sender.state is RECEIVER_CLOSED


async def test_a_block_that_is_cancelled_just_when_its_reader_leaves_keeps_no_sender(
    request: pytest.FixtureRequest,
) -> None:
    """It is free at once, without the garbage collector."""
    gc.disable()
    request.addfinalizer(gc.enable)

    async def block() -> weakref.ref[Sender[int]]:
        sender, receiver = channel(int)
        receiver.close()
        with trio.CancelScope() as scope:
            async with sender, trio.open_nursery() as nursery:
                nursery.start_soon(sender.send, 1)
                nursery.start_soon(trio.sleep_forever)
                scope.cancel()
        assert scope.cancelled_caught
        return weakref.ref(sender)

    assert (await block())() is None


async def test_a_block_that_is_cancelled_when_its_reader_leaves_and_something_fails_passes_on_the_failure() -> None:
    sender, receiver = channel(int)
    receiver.close()

    async def fail() -> None:
        raise KeyError("tea")

    with pytest.raises(ExceptionGroup) as caught, trio.CancelScope() as scope:
        async with sender, trio.open_nursery() as nursery:
            nursery.start_soon(sender.send, 1)
            nursery.start_soon(fail)
            nursery.start_soon(trio.sleep_forever)
            scope.cancel()
    assert {type(error) for error in caught.value.exceptions} == {KeyError, ReceiverClosed}


async def test_a_block_leaves_a_sender_alone_that_was_sent_away_inside() -> None:
    for fails in (False, True):
        sender, receiver = channel(int)
        with pytest.raises(KeyError) if fails else contextlib.nullcontext():
            async with sender:
                core = sender.take_over("message 1")
                if fails:
                    raise KeyError
        assert receiver.state is OPEN
        core.end(CANCELLED)


async def test_a_block_of_a_oneshot_ends_quietly_when_its_reader_left() -> None:
    done, answer = oneshot(int)
    answer.close()
    with done:
        done.send(1)
    assert done.state is RECEIVER_CLOSED


async def test_an_error_tells_its_sender_that_the_reader_left() -> None:
    sender, receiver = channel(int)
    other, of_other = channel(int)
    receiver.close()
    of_other.close()
    errors = []
    for each in (sender, sender, other):
        with pytest.raises(ReceiverClosed) as caught:
            await each.send(1)
        errors.append(caught.value)
    assert [sender.says_reader_left(error) for error in errors] == [True, True, False]
    assert not sender.says_reader_left(ExceptionGroup("", errors))
    assert sender.says_reader_left(ExceptionGroup("", errors[:2]))
    assert not sender.says_reader_left(pickle.loads(pickle.dumps(errors[0])))


# ---------------------------------------------------------------- receipts


async def test_a_receipt_tells_what_became_of_its_message() -> None:
    done, dropped = Outcome.PROCESSED, Outcome.NOT_PROCESSED
    sender, receiver = channel(int)
    first = await sender.send(1, receipt=True)
    second = await sender.send(2, receipt=True)
    third = await sender.send(3, receipt=True)
    async with background() as run:
        waiting = [await run.start(partial(_of, r)) for r in (first, first, second, third)]
        assert await receiver.receive() == 1
        await wait_all_tasks_blocked()
        assert [task.result for task in waiting] == [done, done, "waiting", "waiting"]
        assert receiver.receive_nowait() == 2
        receiver.close()
        await wait_all_tasks_blocked()
        assert [task.result for task in waiting] == [done, done, done, dropped]
    assert [await first, await third] == [done, dropped]
    assert [bool(outcome) for outcome in Outcome] == [True, False, False]


async def _of(awaitable: Awaitable[T]) -> T:
    return await awaitable


async def test_a_receipt_of_a_message_handed_to_a_waiting_task_or_from_a_waiting_send() -> None:
    sender, receiver = channel(int)
    sender.ordered(1)
    async with background() as run:
        taker = await run.start(receiver.receive)
        receipt = await sender.send(1, receipt=True)
        assert await receipt is Outcome.PROCESSED
        assert taker.result == 1
        queued(sender, 2)
        waiting = await run.start(lambda: sender.send(3, receipt=True))
        assert [receiver.receive_nowait(), receiver.receive_nowait()] == [2, 3]
        await wait_all_tasks_blocked()
        assert waiting.result.outcome is Outcome.PROCESSED
    sender.finish_nowait()


# ---------------------------------------------------------------- cancellation at every await


async def test_a_cancelled_send_has_sent_nothing_and_keeps_the_order_of_the_others() -> None:
    sender, receiver = channel(int)
    sender.ordered(1)
    queued(sender, 0)
    async with background() as run:
        tasks = [await run.start(partial(sender.send, n)) for n in (1, 2, 3)]
        tasks[1].scope.cancel()
        await wait_all_tasks_blocked()
        assert [task.result for task in tasks] == ["waiting", "cancelled", "waiting"]
        assert [receiver.receive_nowait() for _ in range(3)] == [0, 1, 3]
    sender.finish_nowait()


async def test_a_send_that_was_let_in_is_sent_although_its_task_is_cancelled_before_it_runs() -> None:
    sender, receiver = channel(int)
    sender.ordered(1)
    queued(sender, 0)
    async with background() as run:
        task = await run.start(lambda: sender.send(1))
        assert receiver.receive_nowait() == 0
        task.scope.cancel()
        await wait_all_tasks_blocked()
        assert task.result is None
        assert receiver.receive_nowait() == 1
    sender.finish_nowait()


async def test_a_cancelled_receive_has_taken_nothing() -> None:
    sender, receiver = channel(int)
    async with background() as run:
        tasks = [await run.start(receiver.receive) for _ in range(3)]
        tasks[0].scope.cancel()
        await wait_all_tasks_blocked()
        queued(sender, 1)
        await wait_all_tasks_blocked()
        assert [task.result for task in tasks] == ["cancelled", 1, "waiting"]
        tasks[2].scope.cancel()
        await wait_all_tasks_blocked()
        queued(sender, 2)
        assert receiver.receive_nowait() == 2
    sender.finish_nowait()


async def test_a_message_given_to_a_task_that_is_cancelled_before_it_runs_is_not_lost() -> None:
    sender, receiver = channel(int)
    async with background() as run:
        task = await run.start(receiver.receive)
        queued(sender, 1)
        task.scope.cancel()
        await wait_all_tasks_blocked()
        assert task.result == 1
    sender.finish_nowait()


async def test_cancelled_waits_for_an_end_change_nothing() -> None:
    sender, receiver = channel(int)
    receipt = await sender.send(1, receipt=True)
    calls: list[Callable[[], Awaitable[Any]]] = [
        sender.finish,
        sender.terminated,
        receiver.terminated,
        lambda: _of(receipt),
    ]
    async with background() as run:
        cancelled = [await run.start(call) for call in calls]
        patient = [await run.start(call) for call in calls]
        for task in cancelled:
            task.scope.cancel()
        await wait_all_tasks_blocked()
        assert [task.result for task in cancelled] == ["cancelled"] * 4
        assert [task.result for task in patient] == ["waiting"] * 4
        with pytest.raises(SenderFinished):
            sender.send_nowait(2)
        assert receiver.receive_nowait() == 1
        await wait_all_tasks_blocked()
        assert [task.result for task in patient] == [None, FINISHED, FINISHED, Outcome.PROCESSED]


async def test_cancelled_waits_leave_nothing_in_the_channel() -> None:
    sender, receiver = channel(int)
    sender.ordered(1)
    queued(sender, 1)
    twin = sender.clone()
    async with background() as run:
        for call in (partial(sender.send, 2), sender.finish, twin.terminated, receiver.terminated):
            (await run.start(call)).scope.cancel()
            await wait_all_tasks_blocked()
    core = receiver.take_over("a look inside")
    assert (core.putters, core.taker, core.takers) == ({}, None, {})
    assert [(half.watcher, half.watchers or {}) for half in (core.sender, core.receiver)] == [(None, {}), (None, {})]
    twin.cancel()


# ---------------------------------------------------------------- watching


def test_callbacks_learn_of_the_end_once_even_when_they_come_late() -> None:
    sender, receiver = channel(int)
    seen: list[tuple[str, TerminalState, type | None]] = []

    def note(who: str) -> Callable[[TerminalState, ChannelError | None], None]:
        return lambda state, error: seen.append((who, state, type(error) if error else None))

    sender.on_terminated(note("sender"))
    receiver.on_terminated(note("receiver"))
    remove = receiver.on_terminated(note("removed"))
    remove()
    remove()
    queued(sender, 1)
    sender.finish_nowait()
    assert seen == []
    receiver.receive_nowait()
    sender.cancel()
    receiver.on_terminated(note("late"))()
    assert seen == [("sender", FINISHED, None), ("receiver", FINISHED, None), ("late", FINISHED, None)]

    sender, receiver = channel(int)
    seen.clear()
    sender.on_terminated(note("sender"))
    receiver.on_terminated(note("receiver"))
    receiver.close()
    assert seen == [("sender", RECEIVER_CLOSED, ReceiverClosed), ("receiver", RECEIVER_CLOSED, ReceiverClosed)]


def test_callbacks_are_called_in_the_order_in_which_they_came() -> None:
    """Also when the first one has been taken out."""
    sender, receiver = channel(int)
    seen: list[int] = []
    removers = [sender.on_terminated(lambda state, error, n=n: seen.append(n)) for n in range(3)]  # type: ignore[misc]
    removers[0]()
    sender.on_terminated(lambda state, error: seen.append(3))
    receiver.close()
    assert seen == [1, 2, 3]


def test_a_callback_may_take_another_one_out_and_use_the_channel() -> None:
    sender, receiver = channel(int)
    seen: list[str] = []
    removers: list[Callable[[], None]] = []

    def first(state: TerminalState, error: ChannelError | None) -> None:
        removers[0]()
        sender.cancel()
        with pytest.raises(ChannelCancelled):
            receiver.receive_nowait()
        seen.append("first")

    sender.on_terminated(first)
    removers.append(sender.on_terminated(lambda state, error: seen.append("second")))
    sender.cancel()
    assert seen == ["first"]


# ---------------------------------------------------------------- oneshot


async def test_a_oneshot_carries_one_value() -> None:
    done, answer = oneshot(int, name="answer")
    async with background() as run:
        task = await run.start(lambda: _of(answer))
        done.send(7)
        await wait_all_tasks_blocked()
        assert task.result == 7
    await done.finish()
    assert (done.state, answer.state) == (FINISHED, FINISHED)
    with pytest.raises(SenderFinished):
        done.send(8)
    for _ in range(2):
        with pytest.raises(EndOfChannel):
            await answer


async def test_a_oneshot_without_a_value_says_so() -> None:
    for end in ("finish", "leave"):
        done, answer = oneshot(int)
        async with background() as run:
            task = await run.start(answer.receive)
            if end == "finish":
                done.finish_nowait()
            else:
                with done:
                    pass
            await wait_all_tasks_blocked()
            assert task.result is NoValue
        for _ in range(2):
            with pytest.raises(NoValue):
                answer.receive_nowait()
            with pytest.raises(NoValue):
                await answer


async def test_a_oneshot_is_cancelled_or_closed_like_a_channel() -> None:
    done, answer = oneshot(int)
    done.send(1)
    done.cancel()
    with pytest.raises(ChannelCancelled):
        await answer
    done, answer = oneshot(int)
    with pytest.raises(KeyError), done:
        raise KeyError
    assert answer.state is CANCELLED
    done, answer = oneshot(int)
    with answer:
        pass
    with pytest.raises(ReceiverClosed):
        done.send(1)
    done, answer = oneshot(int)
    done.send(1)
    answer.close()
    with pytest.raises(Undelivered):
        await done.finish()


async def test_only_the_first_of_several_waiting_tasks_gets_the_value_of_a_oneshot() -> None:
    done, answer = oneshot(int)
    async with background() as run:
        tasks = [await run.start(answer.receive) for _ in range(2)]
        done.send(1)
        await wait_all_tasks_blocked()
        assert [task.result for task in tasks] == [1, EndOfChannel]


@pytest.mark.parametrize("many", [100, pytest.param(30_000, marks=pytest.mark.release)])
async def test_many_producers_that_finish_while_others_wait(many: int) -> None:
    """Each of them looked through all that waited: it took 15 s for 8,000."""
    sender, receiver = channel(int)
    sender.ordered(window=1)

    async def produce(number: int, clone: Sender[int]) -> None:
        async with clone:
            await clone.send(number)

    async with trio.open_nursery() as nursery:
        for number in range(many):
            nursery.start_soon(produce, number, sender.clone())
        await wait_all_tasks_blocked()
        sender.finish_nowait()
        assert sorted([number async for number in receiver]) == list(range(many))
