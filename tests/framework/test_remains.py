"""What an actor leaves behind: the channels whose handles it held end with it, and its error keeps no frames."""

from __future__ import annotations

import gc
import logging
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.framework import (
    Actor,
    ActorFailed,
    ActorSystem,
    Asks,
    Down,
    Failed,
    Killed,
    Normal,
    Receiver,
    Ref,
    Sender,
    Shutdown,
    TerminalState,
    blocking,
    channel,
    handles,
    message,
    oneshot,
    restart,
)
from levada.framework.errors import ActorStopped, ChannelCancelled, ReceiverClosed


@message
class Fail:
    pass


@message
class AskToFail(Asks[None]):
    blob: Any = None


@message
class Hang:
    pass


@message
class End:
    pass


@message
class Follow:
    out: Sender[int]


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is freed in the test is freed by reference counting alone."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.fixture
def no_records() -> Iterator[None]:
    """Pytest keeps log records, which keep the traceback of a failure, and its last frame the callers of the actor."""
    log = logging.getLogger("levada")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    yield
    log.setLevel(level)


class Source(Actor[Any]):
    """Holds what it is given, and fails, hangs or ends as it is told."""

    out: Any = None

    @handles
    def fail(self, m: Fail) -> None:
        raise ValueError("on purpose")

    @handles
    async def hang(self, m: Hang) -> None:
        await trio.sleep_forever()

    @handles
    def end(self, m: End) -> None:
        self.stop()

    @handles
    def asked(self, m: AskToFail) -> None:
        raise ValueError("on purpose")


class Polite(Source):
    """Finishes what it can, whatever happened."""

    def stopping(self, reason: object) -> None:
        for sender in self.out:
            sender.finish_nowait()


class Dispatcher(Source):
    """Has tasks that use its handles."""

    source: Any = None

    def started(self) -> None:
        self.start_soon(self.copy)

    async def copy(self) -> None:
        async for n in self.source:
            await self.out.send(n)


async def outcome_of(receiver: Receiver[int]) -> BaseException | None:
    """Read to the end; how that was."""
    with trio.fail_after(30):
        try:
            async for _ in receiver:
                pass
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            return error
    return None


@message
class Job:
    reply_to: Sender[int]


PLACES: dict[str, Callable[[Any], Any]] = {
    "a field": lambda handle: handle,
    "a list": lambda handle: [handle],
    "a tuple": lambda handle: (1, handle),
    "the values of a dict": lambda handle: {"a": 1, "b": handle},
    "a set": lambda handle: {handle},
    "a deque": lambda handle: deque([handle]),
    "a list in a dict": lambda handle: {"a": [[handle]]},
    "a message": Job,
    "a list of messages": lambda handle: [Job(handle)],
}


@pytest.mark.parametrize("place", PLACES)
async def test_a_reader_learns_that_the_actor_failed_while_its_ref_is_kept(
    system: ActorSystem, no_collector: None, place: str
) -> None:
    sender, receiver = channel(int, name="numbers")
    ref = system.spawn(Source, PLACES[place](sender))
    del sender
    ref.tell(Fail())
    error = await outcome_of(receiver)
    assert isinstance(error, ChannelCancelled)
    assert str(error) == "channel numbers: the actor that sent failed: ValueError('on purpose')"
    assert isinstance(error.__cause__, ValueError)
    assert isinstance(await ref.terminated(), Failed)


ENDS: dict[str, tuple[Callable[[Ref[Any]], None], str]] = {
    "fails": (lambda ref: ref.tell(Fail()), "failed: ValueError('on purpose')"),
    "is killed": (lambda ref: ref.kill(), "has stopped (killed)"),
    "is killed while it waits": (lambda ref: (ref.tell(Hang()), ref.kill())[1], "has stopped (killed)"),
    "ends itself": (lambda ref: ref.tell(End()), "has stopped"),
    "is stopped": (lambda ref: ref.stop(), "has stopped"),
    "is stopped now": (lambda ref: ref.stop(now=True), "has stopped"),
}


@pytest.mark.parametrize("supervise", ["stop", restart(max=5), restart("permanent", max=5)])
@pytest.mark.parametrize("end", ENDS)
async def test_both_kinds_of_handle_end_with_the_actor(
    autojump_clock: MockClock, system: ActorSystem, no_collector: None, end: str, supervise: Any
) -> None:
    sender, receiver = channel(int, name="one")
    back, there = channel(int, name="two")
    done, answer = oneshot(int, name="three")
    made = iter([[sender, there, done], None])  # the next object gets none
    ref: Ref[Any] = system.spawn(lambda: Source(next(made)), supervise=supervise)
    del sender, there, done
    function, how = ENDS[end]
    function(ref)
    error = await outcome_of(receiver)
    assert isinstance(error, ChannelCancelled)
    assert str(error) == f"channel one: the actor that sent {how}"
    with pytest.raises(ReceiverClosed) as closed:
        await back.send(1)
    assert str(closed.value) == f"channel two: the actor that received {how}"
    with pytest.raises(ChannelCancelled):
        await answer


async def test_a_handle_in_a_slot_is_a_field_too(system: ActorSystem, no_collector: None) -> None:
    class Slotted(Source):
        __slots__ = ("kept",)

        def started(self) -> None:
            self.kept = self.out
            self.out = None

    sender, receiver = channel(int)
    ref = system.spawn(Slotted, sender)
    del sender
    ref.tell(Fail())
    assert isinstance(await outcome_of(receiver), ChannelCancelled)


async def test_what_stopping_finished_on_a_normal_end_stays_finished(system: ActorSystem) -> None:
    sender, receiver = channel(int)
    ref = system.spawn(Polite, [sender])
    await sender.send(1)
    ref.stop()
    await ref.terminated()
    assert [n async for n in receiver] == [1]
    assert receiver.state is TerminalState.FINISHED


async def test_on_a_failure_stopping_cannot_pretend_that_all_went_well(system: ActorSystem) -> None:
    sender, receiver = channel(int)
    ref = system.spawn(Polite, [sender])
    ref.tell(Fail())
    assert isinstance(await outcome_of(receiver), ChannelCancelled)
    await ref.terminated()


async def test_what_was_finished_before_the_failure_stays_finished(system: ActorSystem) -> None:
    sender, receiver = channel(int)
    await sender.send(1)
    sender.finish_nowait()
    ref = system.spawn(Source, [sender])
    ref.tell(Fail())
    await ref.terminated()
    assert [n async for n in receiver] == [1]


async def test_a_handle_that_went_away_is_left_alone(system: ActorSystem) -> None:
    sender, receiver = channel(int)
    sender.take_over("a message")
    ref = system.spawn(Source, [sender])
    ref.tell(Fail())
    await ref.terminated()
    assert receiver.state is TerminalState.OPEN
    sender.give_back()
    sender.cancel()


async def test_a_receiver_that_feeds_the_mailbox_outlives_a_restart(system: ActorSystem) -> None:
    got: list[int] = []

    class Sink(Actor[Any]):
        feed: Any

        def started(self) -> None:
            if self.feed.state is TerminalState.OPEN and not got:
                self.feed.to_mailbox(self.ref)

        @handles
        def number(self, n: int) -> None:
            got.append(n)
            if n == 1:
                raise ValueError("on purpose")

    sender, receiver = channel(int)
    system.spawn(Sink, receiver, supervise=restart())
    await wait_all_tasks_blocked()
    for n in (1, 2):
        await sender.send(n)
    await wait_all_tasks_blocked()
    assert got == [1, 2]
    sender.finish_nowait()


async def test_the_next_object_is_told_that_the_watched_channel_of_the_first_ended(
    system: ActorSystem, no_collector: None
) -> None:
    downs: list[Down] = []

    class Watches(Source):
        def started(self) -> None:
            if self.out.state is TerminalState.OPEN:
                self.watch(self.out)

        @handles
        def down(self, m: Down) -> None:
            downs.append(m)

    sender, receiver = channel(int)
    ref = system.spawn(Watches, sender, supervise=restart())
    ref.tell(Fail())
    assert isinstance(await outcome_of(receiver), ChannelCancelled)
    await wait_all_tasks_blocked()
    assert [type(m.reason) for m in downs] == [ChannelCancelled]
    assert ref.is_alive


async def test_tasks_that_use_the_handles_do_not_fail_because_their_actor_did(
    system: ActorSystem, caplog: pytest.LogCaptureFixture
) -> None:
    out, receiver = channel(int)
    sender, source = channel(int)
    ref = system.spawn(Dispatcher, out, source)
    await sender.send(1)
    assert await receiver.receive() == 1
    with caplog.at_level(logging.ERROR, "levada"):
        ref.tell(Fail())
        assert isinstance(await outcome_of(receiver), ChannelCancelled)
        await ref.terminated()
    assert [record.getMessage() for record in caplog.records] == [f"{ref.path} failed while it handled Fail"]
    with pytest.raises(ReceiverClosed):
        await sender.send(2)


async def test_the_handles_of_a_big_container_end_and_big_data_is_not_looked_through(system: ActorSystem) -> None:
    """A hub has thousands of senders; thousands of actors may share one list of thousands of numbers."""

    class Watched(list[Any]):
        looks = 0

        def __iter__(self) -> Iterator[Any]:
            for each in super().__iter__():
                Watched.looks += 1
                yield each

    class Holds(Actor[Fail]):
        held: Any

        @handles
        def fail(self, m: Fail) -> None:
            raise ValueError

    halves = [channel(int) for _ in range(1500)]
    hub = system.spawn(Holds, {n: sender for n, (sender, _) in enumerate(halves)})
    hub.tell(Fail())
    await hub.terminated()
    assert {receiver.state for _, receiver in halves} == {TerminalState.CANCELLED}
    data = Watched(range(20_000))
    for ref in [system.spawn(Holds, data) for _ in range(100)]:
        ref.kill()
        await ref.terminated()
    assert 0 < Watched.looks <= 100 * 10


async def test_a_big_container_without_handles_is_not_searched_item_by_item(system: ActorSystem) -> None:
    looked: list[int] = []

    class Item:
        @property
        def attachments(self) -> Any:
            looked.append(1)
            return ()

    ref = system.spawn(Source, [Item() for _ in range(1000)])
    ref.tell(Fail())
    await ref.terminated()
    assert looked == []


# ---------------------------------------------------------------- errors


def lines_of(error: BaseException) -> list[tuple[str, str]]:
    return [(entry.name, entry.line or "") for entry in traceback.extract_tb(error.__traceback__)]


def frames_of(error: BaseException) -> list[Any]:
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)]


class Deep(Source):
    @handles
    def fail(self, m: Fail) -> None:
        self.dig(bytearray(5000))

    def dig(self, octets: bytearray) -> None:
        try:
            raise KeyError("inner")
        except KeyError as inner:
            raise ValueError("outer") from inner


async def test_the_log_has_the_whole_traceback_and_the_reason_its_lines(
    system: ActorSystem, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "levada"):
        ref = system.spawn(Deep)
        ref.tell(Fail())
        reason = await ref.terminated()
    assert isinstance(reason, Failed)
    text = caplog.text
    assert 'raise KeyError("inner")' in text
    assert 'raise ValueError("outer") from inner' in text
    assert "self.dig(bytearray(5000))" in text
    assert lines_of(reason.error)[-2:] == [
        ("fail", "self.dig(bytearray(5000))"),
        ("dig", 'raise ValueError("outer") from inner'),
    ]
    cause = reason.error.__cause__
    assert cause is not None
    assert lines_of(cause) == [("dig", 'raise KeyError("inner")')]
    for frame in (*frames_of(reason.error), *frames_of(cause)):
        assert frame.f_locals == {}
        assert frame.f_back is None


async def test_errors_that_are_each_others_cause_lose_their_frames(system: ActorSystem) -> None:
    one, other = ValueError("one"), KeyError("other")

    class Round(Source):
        @handles
        def fail(self, m: Fail) -> None:
            try:
                raise other from one
            except KeyError:
                raise one from other

    ref = system.spawn(Round)
    ref.tell(Fail())
    assert await ref.terminated() == Failed(one)
    for error in (one, other):
        assert lines_of(error)
        assert all(frame.f_locals == {} and frame.f_back is None for frame in frames_of(error))


async def test_the_parts_of_a_group_lose_their_frames_too(system: ActorSystem) -> None:
    class Many(Source):
        @handles
        async def fail(self, m: Fail) -> None:  # type: ignore[override]
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.part, bytearray(5000))
                nursery.start_soon(self.part, bytearray(5000))

        async def part(self, octets: bytearray) -> None:
            raise ValueError("part")

    ref = system.spawn(Many)
    ref.tell(Fail())
    reason = await ref.terminated()
    assert isinstance(reason, Failed)
    assert isinstance(reason.error, ExceptionGroup)
    for part in (reason.error, *reason.error.exceptions):
        assert all(frame.f_locals == {} and frame.f_back is None for frame in frames_of(part))
        assert lines_of(part)


async def test_a_generator_that_the_error_passed_goes_on(system: ActorSystem) -> None:
    kept: list[Any] = []

    def numbers() -> Iterator[int]:
        try:
            raise ValueError("kept")
        except ValueError as error:
            kept.append(error)
        yield 1
        yield 2

    class Raises(Source):
        @handles
        def fail(self, m: Fail) -> None:
            raise kept[0]

    running = numbers()
    assert next(running) == 1
    ref = system.spawn(Raises)
    ref.tell(Fail())
    await ref.terminated()
    assert next(running) == 2


def told(error: BaseException) -> dict[str, Any]:
    """The variables of all frames that an error holds, by the names of their functions."""
    return {frame.f_code.co_name: dict(frame.f_locals) for frame in frames_of(error)}


@pytest.mark.parametrize("levels", [1, 2, 3])
async def test_an_error_that_comes_out_of_the_block_is_whole(levels: int) -> None:
    class Level(Source):
        depth: int = 0

        def started(self) -> None:
            if self.depth:
                self.spawn(Level, None, self.depth - 1, name="x", supervise="escalate")
            else:
                self.ref.tell(Fail())

        @handles
        def fail(self, m: Fail) -> None:
            octets = b"kept"
            raise ValueError(octets)

    class Linked(Source):
        to: Any = None

        def started(self) -> None:
            self.link(self.to)

    with pytest.raises(ValueError, match="kept") as caught:
        async with ActorSystem() as system:
            top = system.spawn(Level, None, levels - 1, supervise="escalate")
            system.spawn(Linked, None, top)
            await trio.sleep_forever()
    assert told(caught.value)["fail"]["octets"] == b"kept"


async def test_an_error_that_the_parent_deals_with_loses_its_frames(system: ActorSystem) -> None:
    errors: list[BaseException] = []

    class Parent(Source):
        def started(self) -> None:
            self.spawn(Deep, name="child", supervise="escalate").tell(Fail())

        def stopping(self, reason: object) -> None:
            assert isinstance(reason, Failed)
            errors.append(reason.error)

    ref = system.spawn(Parent)
    await ref.terminated()
    assert told(errors[0])["dig"] == {}


async def test_an_error_to_resume_from_loses_its_frames(system: ActorSystem) -> None:
    events: list[ActorFailed] = []

    class Listener(Actor[ActorFailed]):
        @handles
        def failed(self, m: ActorFailed) -> None:
            events.append(m)

    system.events.subscribe(ActorFailed, system.spawn(Listener))
    ref = system.spawn(Deep, supervise=restart(resume=[ValueError]))
    ref.tell(Fail())
    await wait_all_tasks_blocked()
    assert ref.is_alive
    assert told(events[0].error)["dig"] == {}


async def test_so_does_that_of_a_task_while_a_handler_waits(system: ActorSystem) -> None:
    events: list[ActorFailed] = []

    class Listener(Actor[ActorFailed]):
        @handles
        def failed(self, m: ActorFailed) -> None:
            events.append(m)

    class Beside(Deep):
        @handles
        async def hang(self, m: Hang) -> None:
            self.start_soon(self.work)
            await trio.sleep_forever()

        async def work(self) -> None:
            self.dig(bytearray(5000))

    system.events.subscribe(ActorFailed, system.spawn(Listener))
    ref = system.spawn(Beside, supervise=restart(resume=[ValueError]))
    ref.tell(Hang())
    await wait_all_tasks_blocked()
    assert ref.is_alive
    assert told(events[0].error)["dig"] == {}


async def test_normal_and_shutdown_are_no_failures(system: ActorSystem) -> None:
    one, two = system.spawn(Source), system.spawn(Source)
    one.tell(End())
    two.stop()
    assert (await one.terminated(), await two.terminated()) == (Normal(), Shutdown())


# ---------------------------------------------------------------- memory


class Blob:
    """Stands for a buffer that somebody would miss."""


class Carries(Source):
    blob: Any = None
    watch_blob: Callable[[Any], None] = lambda _: None

    @handles
    def asked(self, m: AskToFail) -> None:
        local = Blob()
        self.watch_blob(local)
        raise ValueError("on purpose")

    @handles
    async def hang(self, m: Hang) -> None:
        local = Blob()
        self.watch_blob(local)
        await trio.lowlevel.checkpoint()
        raise ValueError("on purpose")


@pytest.mark.parametrize("supervise", ["stop", restart()])
@pytest.mark.parametrize("how", ["inline", "queued", "waiting"])
async def test_a_failed_actor_keeps_nothing_alive(
    system: ActorSystem, no_collector: None, no_records: None, how: str, supervise: Any
) -> None:
    watched: list[weakref.ref[Any]] = []
    objects: list[weakref.ref[Any]] = []

    def watch_blob(blob: Any) -> None:
        watched.append(weakref.ref(blob))

    def make() -> Carries:
        blob = Blob()
        watch_blob(blob)
        actor = Carries(None, blob, watch_blob)
        objects.append(weakref.ref(actor))
        return actor

    async def ask(ref: Ref[Any], mine: Blob) -> None:
        try:  # `pytest.raises` would keep the error
            await ref.ask(AskToFail(mine))
        except ActorStopped:
            pass

    async def use() -> Ref[Any]:
        ref: Ref[Any] = system.spawn(make, supervise=supervise)
        mine = Blob()
        watch_blob(mine)
        if how == "inline":
            await ask(ref, mine)
        elif how == "waiting":
            ref.tell(Hang())
        else:
            ref.tell(Fail())
            await ask(ref, mine)
        return ref

    ref = await use()
    await wait_all_tasks_blocked()
    assert ref.is_alive is (supervise != "stop")
    assert objects[0]() is None
    # The newest object has a blob, if the actor lives on.
    assert sum(blob() is not None for blob in watched) == ref.is_alive
    assert len(watched) >= 2 + (how != "queued")
    del ref


async def test_nor_does_one_whose_failure_is_in_a_kept_log_record(
    system: ActorSystem, no_collector: None, caplog: pytest.LogCaptureFixture
) -> None:
    watched: list[weakref.ref[Any]] = []

    def make() -> Carries:
        actor = Carries(None, Blob(), lambda blob: watched.append(weakref.ref(blob)))
        watched.append(weakref.ref(actor))
        return actor

    for how in (Fail(), Hang()):
        ref = system.spawn(make)
        ref.tell(how)
        await ref.terminated()
    await wait_all_tasks_blocked()
    assert len(caplog.records) == 2
    assert all(record.exc_info is not None for record in caplog.records)
    assert [each() for each in watched] == [None] * 3


@pytest.mark.parametrize(
    ("hook", "supervise"), [("stopping", "stop"), ("undelivered", "stop"), ("restarting", restart())]
)
async def test_nor_does_one_whose_hook_fails_too(
    system: ActorSystem, no_collector: None, caplog: pytest.LogCaptureFixture, hook: str, supervise: Any
) -> None:
    """The frames that called the hook had the message of the handler."""

    def fails(self: Any, *arguments: Any) -> None:
        raise LookupError("on purpose, too")

    hooked: Any = type("Hooked", (Source,), {hook: fails, "__module__": __name__})
    ref = system.spawn(hooked, supervise=supervise)
    blob = Blob()
    watched = weakref.ref(blob)
    ref.tell(AskToFail(blob))
    ref.tell(AskToFail(blob))
    del blob
    await wait_all_tasks_blocked()
    assert [type(record.exc_info[1]).__name__ for record in caplog.records if record.exc_info] == (
        ["ValueError", "LookupError"] * (2 if hook == "restarting" else 1)
    )
    assert "in fails" in (caplog.records[1].exc_text or "")
    assert watched() is None


async def test_nor_does_one_that_failed_in_a_thread(
    system: ActorSystem, no_collector: None, caplog: pytest.LogCaptureFixture
) -> None:
    """The frames of the thread below the handler's had its message."""

    class Blocks(Actor[AskToFail]):
        @handles
        @blocking
        def fail(self, m: AskToFail) -> None:
            raise ValueError("on purpose")

    blob = Blob()
    watched = weakref.ref(blob)
    ref = system.spawn(Blocks)
    ref.tell(AskToFail(blob))
    del blob
    await ref.terminated()
    await wait_all_tasks_blocked()
    (record,) = caplog.records
    assert record.exc_info is not None
    assert "raise ValueError" in (record.exc_text or "")
    assert watched() is None


async def test_a_dropped_channel_is_freed_with_all_that_is_in_it(system: ActorSystem, no_collector: None) -> None:
    watched: list[weakref.ref[Any]] = []

    def use() -> None:
        sender, receiver = channel(Blob)
        for _ in range(3):
            blob = Blob()
            watched.append(weakref.ref(blob))
            sender.send_nowait(blob)
        watched.append(weakref.ref(sender))
        watched.append(weakref.ref(receiver))
        receiver.close()

    use()
    await wait_all_tasks_blocked()
    assert [each() for each in watched] == [None] * 5


@attrs.define
class Held:
    """Is no message and no container: what is in it is not looked for."""

    sender: Any


async def test_a_handle_in_an_object_of_ones_own_ends_when_that_is_freed(
    system: ActorSystem, no_collector: None
) -> None:
    sender, receiver = channel(int)
    ref = system.spawn(Source, Held(sender))
    del sender
    ref.tell(Fail())
    with pytest.warns(ResourceWarning, match="was forgotten before the channel ended"):
        error = await outcome_of(receiver)
    assert isinstance(error, ChannelCancelled)


class Busy(Actor[Any]):
    """Its task uses a channel."""

    half: Sender[int] | Receiver[int]
    early: bool = False

    def started(self) -> None:
        self.start_soon(self.work)
        if self.early:
            self.ref.kill()

    async def work(self) -> None:
        async with trio.open_nursery():
            while True:
                if isinstance(self.half, Receiver):
                    await self.half.receive()
                else:
                    await self.half.send(1)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("end", [Sender, Receiver])
async def test_a_killed_actor_has_not_failed_because_its_task_was_about_to_use_a_channel(
    end: type, early: bool
) -> None:
    async with ActorSystem() as system:
        for _ in range(50):  # the tasks of one step run in random order
            sender, receiver = channel(int)
            ref = system.spawn(Busy, sender if end is Sender else receiver, early)
            if not early:
                await wait_all_tasks_blocked()  # the task waits in send() or receive()
                if end is Sender:
                    receiver.receive_nowait()
                else:
                    sender.send_nowait(1)
                ref.kill()
            assert await ref.terminated() == Killed()
        assert system.statistics().failures == 0


async def test_another_error_of_a_task_of_a_killed_actor_is_a_failure(system: ActorSystem) -> None:
    class Odd(Actor[Any]):
        half: Sender[int]

        def started(self) -> None:
            self.start_soon(self.work)

        async def work(self) -> None:
            try:
                await trio.sleep_forever()
            finally:
                raise LookupError("on purpose")

    sender, _receiver = channel(int)
    ref = system.spawn(Odd, sender)
    await wait_all_tasks_blocked()
    ref.kill()
    reason = await ref.terminated()
    assert isinstance(reason, Failed)
    assert isinstance(reason.error, LookupError)


@pytest.mark.parametrize("how", ["runs", "ends"])
async def test_a_channel_that_a_task_finds_ended_is_a_failure_unless_its_own_actor_ended_it(
    system: ActorSystem, autojump_clock: MockClock, how: str
) -> None:
    """Of an actor that runs, and of one that has failed and waits for its child."""

    class Reads(Source):
        def started(self) -> None:
            self.start_soon(self.out.receive)
            self.spawn(Waits, name="child").tell(Hang())

    class Waits(Source):
        @handles
        async def hang(self, m: Hang) -> None:
            await trio.sleep(1.0)

    sender, receiver = channel(int)
    ref = system.spawn(Reads, receiver)
    await wait_all_tasks_blocked()
    if how == "ends":
        ref.tell(Fail())
        await wait_all_tasks_blocked()
    sender.cancel()
    reason = await ref.terminated()
    assert isinstance(reason, Failed)
    assert isinstance(reason.error, ChannelCancelled if how == "runs" else ValueError)
    assert system.statistics().failures == (1 if how == "runs" else 2)
