"""The event stream, dead letters and what is logged."""

from __future__ import annotations

import logging
from typing import Any

import attrs
import pytest
import trio
from tests.surroundings import measure_by
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.framework import (
    Actor,
    ActorFailed,
    ActorRestarted,
    ActorSystem,
    ActorTerminated,
    Asks,
    Behaviour,
    DeadLetter,
    Failed,
    Ref,
    Shutdown,
    SlowHandler,
    Unhandled,
    bounded,
    conflate,
    handles,
    message,
    restart,
)
from levada.framework.embedding import UntracedMessage
from levada.framework.errors import ActorError


@message
class Item:
    n: int = 0


@message
class Special(Item):
    pass


@message
class Fail(Asks[None]):
    pass


class Listener(Actor[Any]):
    seen: list[Any]

    @handles
    def anything(self, m: object) -> None:
        self.seen.append(m)


class Worker(Actor[Item | Fail]):
    @handles
    def item(self, m: Item) -> None:
        pass

    @handles
    def fail(self, m: Fail) -> None:
        raise ValueError("told to")


def listen(system: ActorSystem, *kinds: type, **keywords: Any) -> tuple[Ref[Any], list[Any]]:
    seen: list[Any] = []
    ref = system.spawn(Listener, seen, **keywords)
    for kind in kinds:
        system.events.subscribe(kind, ref)
    return ref, seen


# ---------------------------------------------------------------- the stream


async def test_subscribers_get_a_class_and_its_subclasses_once(system: ActorSystem) -> None:
    _, both = listen(system, Item, Special)
    _, special = listen(system, Special)
    _, everything = listen(system, object)
    item, subclass, other = Item(1), Special(2), "anything is an event"
    for event in (item, subclass, other):
        system.events.publish(event)
    await wait_all_tasks_blocked()
    assert (both, special, everything) == ([item, subclass], [subclass], [item, subclass, other])


async def test_wants_says_whether_anybody_would_hear(system: ActorSystem) -> None:
    events = system.events
    assert not events.wants(Special)
    ref, seen = listen(system, Item)
    assert (events.wants(Special), events.wants(Item), events.wants(str)) == (True, True, False)
    events.unsubscribe(Item, ref)
    events.unsubscribe(Item, ref)
    assert not events.wants(Special)
    events.publish(Special())
    await wait_all_tasks_blocked()
    assert seen == []


async def test_a_subscriber_that_has_ended_is_forgotten(system: ActorSystem) -> None:
    ref, _ = listen(system, Item)
    ref.stop()
    await ref.terminated()
    assert not system.events.wants(Item)
    system.events.subscribe(Item, ref)
    assert not system.events.wants(Item)
    system.events.publish(Special())
    assert system.statistics().dead_letters == 0


async def test_a_subscription_that_is_undone_leaves_nothing_with_the_actor(system: ActorSystem) -> None:
    ref, _ = listen(system, Item)
    system.events.subscribe(Item, ref)
    assert system.observe.detail(ref).watchers == 1  # type: ignore[arg-type]  # every local ref is a cell
    system.events.unsubscribe(Item, ref)
    assert system.observe.detail(ref).watchers == 0  # type: ignore[arg-type]  # as above


async def test_a_full_subscriber_misses_an_event(system: ActorSystem) -> None:
    _, seen = listen(system, Item, mailbox=bounded(1))
    system.events.publish(Item(1))
    system.events.publish(Item(2))
    await wait_all_tasks_blocked()
    assert seen == [Item(1)]


async def test_a_subscriber_whose_key_fails_misses_it_and_harms_nobody(
    system: ActorSystem, caplog: pytest.LogCaptureFixture
) -> None:
    """The runtime publishes in the middle of its own work: it must never hear of a subscriber's mistake."""

    def key(m: Any) -> Any:
        raise AttributeError("no such field")

    listen(system, ActorFailed, ActorTerminated, DeadLetter, mailbox=bounded(5, overflow=conflate(key)), name="broken")
    _, seen = listen(system, ActorFailed, ActorTerminated, DeadLetter)
    ref = system.spawn(Worker)
    ref.tell(Fail())
    ref.tell(Item())
    assert isinstance(await ref.terminated(), Failed)
    await wait_all_tasks_blocked()
    assert [type(event) for event in seen] == [ActorFailed, DeadLetter, ActorTerminated]
    assert "/broken misses ActorFailed: its mailbox refuses it" in caplog.messages


# ---------------------------------------------------------------- what the runtime tells


async def test_failure_restart_and_end_are_told_with_their_particulars(system: ActorSystem) -> None:
    _, seen = listen(system, ActorFailed, ActorRestarted, ActorTerminated)
    ref = system.spawn(Worker, supervise=restart(max=1))
    first, second = Fail(), Fail()
    ref.tell(first)
    ref.tell(Item())
    await wait_all_tasks_blocked()
    failed, restarted = seen
    assert isinstance(failed, ActorFailed)
    assert (failed.ref, failed.message, repr(failed.error)) == (ref, first, "ValueError('told to')")
    assert isinstance(restarted, ActorRestarted)
    assert (restarted.ref, restarted.restarts) == (ref, 1)
    seen.clear()
    quiet = system.spawn(Worker)
    quiet.stop()
    await quiet.terminated()
    await wait_all_tasks_blocked()
    assert [(type(event), event.ref, event.reason) for event in seen] == [(ActorTerminated, quiet, Shutdown())]
    assert second is not first


async def test_a_failed_ask_is_told_with_the_question(system: ActorSystem) -> None:
    _, seen = listen(system, ActorFailed)
    question = Fail()
    with pytest.raises(Exception, match="ValueError"):
        await system.spawn(Worker).ask(question)
    await wait_all_tasks_blocked()
    assert [event.message for event in seen] == [question]


async def test_a_failure_is_logged_once_with_its_traceback(
    system: ActorSystem, caplog: pytest.LogCaptureFixture
) -> None:
    ref = system.spawn(Worker, name="worker")
    ref.tell(Fail())
    await ref.terminated()
    (record,) = (r for r in caplog.records if r.levelno == logging.ERROR)
    assert record.getMessage() == "/worker failed while it handled Fail"
    assert record.name == "levada.framework.lifecycle"
    assert (vars(record)["actor"], vars(record)["event"]) == ("/worker", "failed")
    assert record.exc_info is not None
    assert repr(record.exc_info[1]) == "ValueError('told to')"


class Clock:
    """A clock that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.slow_handler
@pytest.mark.parametrize("way", ["sync", "async", "after a wait", "and ends", "and raises"])
async def test_a_slow_handler_gives_the_alarm(way: str, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()

    class Slow(Actor[Item]):
        @handles
        async def item(self, m: Item) -> None:
            if way not in ("sync", "async"):
                await trio.lowlevel.checkpoint()
            clock.now += 0.25
            if way == "after a wait":
                await trio.lowlevel.checkpoint()
            if way == "and raises":
                raise ValueError("as well")

    class SlowSync(Actor[Item]):
        @handles
        def item(self, m: Item) -> None:
            clock.now += 0.25

    measure_by(clock)
    async with ActorSystem(slow_handler=0.2) as system:
        _, seen = listen(system, SlowHandler)
        ref = system.spawn(SlowSync if way == "sync" else Slow, name="slow")
        ref.tell(Item())
        await wait_all_tasks_blocked()
        assert [(e.ref, e.message, e.seconds, e.count) for e in seen] == [(ref, Item, 0.25, 1)]
        assert system.statistics().slow_turns == 1
    (text,) = (r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and "held" in r.getMessage())
    assert text == "/slow held everything up for 0.250 s with 1 message, last Item (use @blocking, or await something)"


async def test_a_handler_that_waits_long_is_not_slow() -> None:
    clock = Clock()

    class Waits(Actor[Item]):
        @handles
        async def item(self, m: Item) -> None:
            await trio.lowlevel.checkpoint()
            await gate.wait()

    gate = trio.Event()
    measure_by(clock)
    async with ActorSystem(slow_handler=0.2) as system:
        ref = system.spawn(Waits)
        ref.tell(Item())
        await wait_all_tasks_blocked()
        clock.now += 100.0
        gate.set()
        await wait_all_tasks_blocked()
        assert system.statistics().slow_turns == 0


# ---------------------------------------------------------------- dead letters


async def test_a_dead_letter_names_message_addressee_and_cause(system: ActorSystem) -> None:
    _, seen = listen(system, DeadLetter)
    dead = system.spawn(Worker)
    dead.stop()
    await dead.terminated()
    full = system.spawn(Worker, mailbox=bounded(1, overflow="drop_new"))
    for n, ref in ((1, dead), (2, full), (3, full)):
        ref.tell(Item(n))
    await wait_all_tasks_blocked()
    assert [(letter.message, letter.to, letter.why) for letter in seen] == [
        (Item(1), dead, "stopped"),
        (Item(3), full, "mailbox full"),
    ]
    assert system.statistics().dead_letters == 2


async def test_a_message_of_levadas_own_to_an_ended_actor_is_no_dead_letter(caplog: pytest.LogCaptureFixture) -> None:
    class Internal(UntracedMessage):
        pass

    async with ActorSystem() as system:
        _, seen = listen(system, DeadLetter)
        ref: Ref[Any] = system.spawn(Actor)
        ref.kill()
        await ref.terminated()
        ref.tell(Internal())
        ref.tell("of a user")
        await wait_all_tasks_blocked()
        assert [event.message for event in seen] == ["of a user"]
        assert system.statistics().dead_letters == 1
    assert [record.getMessage() for record in caplog.records] == [f"dead letter: str to {ref.path} (stopped)"]


async def test_at_most_ten_dead_letters_a_second_are_logged(
    system: ActorSystem, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    _, seen = listen(system, DeadLetter)
    dead = system.spawn(Worker, name="dead")
    dead.stop()
    await dead.terminated()
    for _ in range(25):
        dead.tell(Item())
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warnings == ["dead letter: Item to /dead (stopped)"] * 10
    await trio.sleep(1)
    dead.tell(Item())
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warnings[10:] == ["15 more dead letters were not logged", "dead letter: Item to /dead (stopped)"]
    await wait_all_tasks_blocked()
    assert (len(seen), system.statistics().dead_letters) == (26, 26)


async def test_a_dead_letter_about_a_dead_letter_is_only_counted(system: ActorSystem) -> None:
    listener, _ = listen(system, DeadLetter, mailbox=bounded(1, overflow="drop_new"))
    dead = system.spawn(Worker)
    dead.stop()
    await dead.terminated()
    for _ in range(3):
        dead.tell(Item())
    # Three letters, two of which the listener had no room for.
    assert system.statistics().dead_letters == 5
    await wait_all_tasks_blocked()
    assert listener.is_alive


async def test_at_shutdown_dead_letters_are_counted_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Tells(Actor[Item]):
        other: Ref[Any]

        @handles
        def item(self, m: Item) -> None:
            pass

        def stopping(self, reason: Any) -> None:
            for _ in range(20):
                self.other.tell(Item())

    caplog.set_level(logging.INFO)
    async with ActorSystem("counted") as system:
        first = system.spawn(Tells, system.spawn(Worker))
        last = system.spawn(Worker)
        last.stop()
        await last.terminated()
        system.spawn(Tells, last)
        assert first.is_alive
    assert [r.getMessage() for r in caplog.records if "dead letter" in r.getMessage()] == [
        "counted ended with 0 unsupervised failures and 20 dead letters"
    ]


async def test_unhandled_messages_are_told_and_are_no_dead_letters(system: ActorSystem) -> None:
    _, seen = listen(system, Unhandled, DeadLetter)
    ref: Ref[Any] = system.spawn(Worker)
    ref.tell("what is this")
    await wait_all_tasks_blocked()
    assert [(type(event), event.message, event.to) for event in seen] == [(Unhandled, "what is this", ref)]
    assert (system.statistics().unhandled, system.statistics().dead_letters) == (1, 0)


async def test_statistics_count_what_happened(system: ActorSystem) -> None:
    refs = [system.spawn(Worker) for _ in range(3)]
    refs[0].tell(Fail())
    refs[1].stop()
    refs[1].tell(Item())
    await refs[0].terminated()
    await refs[1].terminated()
    statistics = system.statistics()
    assert attrs.asdict(statistics) == {
        "actors": 1,
        "spawned": 3,
        "stopped": 2,
        "failures": 1,
        "unsupervised": 1,
        "restarts": 0,
        "dead_letters": 1,
        "unhandled": 0,
        "late_replies": 0,
        "slow_turns": 0,
        "waiting": 0,
        "workers": 1,
        "ready": 0,
        "timers": 0,
    }


# ---------------------------------------------------------------- messages without a handler


class Deaf(Actor[Any]):
    """Handles nothing."""


class Tolerant(Actor[Any]):
    """Takes what it does not know in silence."""

    got: list[Any]

    def unhandled(self, message: Any) -> None:
        self.got.append(message)


async def test_a_told_message_without_a_handler_is_a_warning_with_class_and_path(
    system: ActorSystem, caplog: pytest.LogCaptureFixture
) -> None:
    ref = system.spawn(Deaf, name="deaf")
    ref.tell("word")
    await wait_all_tasks_blocked()
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "unhandled message: str to /deaf (Deaf has no handler for it)")
    ]
    assert ref.is_alive
    assert system.statistics().unhandled == 1


async def test_ten_unhandled_messages_a_second_are_logged_and_the_rest_is_counted(
    system: ActorSystem, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    ref = system.spawn(Deaf)
    for n in range(25):
        ref.tell(n)
    await trio.sleep(1)
    ref.tell("one more")
    await wait_all_tasks_blocked()
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(" (")[0] for line in lines] == [
        *["unhandled message: int to /$1"] * 10,
        "15 more unhandled messages were not logged",
        "unhandled message: str to /$1",
    ]


async def test_an_actor_that_takes_what_it_does_not_know_is_not_warned_of(
    strict_system: ActorSystem, caplog: pytest.LogCaptureFixture
) -> None:
    got: list[Any] = []
    strict_system.spawn(Tolerant, got).tell("word")
    await wait_all_tasks_blocked()
    assert got == ["word"]
    assert caplog.records == []


@pytest.mark.parametrize("mailbox", [None, bounded(4), bounded(4, overflow="drop_old")])
async def test_strict_telling_a_message_without_a_handler_is_an_error_of_the_tell(
    strict_system: ActorSystem, mailbox: Any
) -> None:
    ref = strict_system.spawn(Deaf, name="deaf", mailbox=mailbox)
    with pytest.raises(ActorError) as caught:
        ref.tell("word")
    assert str(caught.value) == "/deaf (Deaf) has no handler for str"
    await wait_all_tasks_blocked()
    assert strict_system.statistics().unhandled == 0


async def test_strict_a_handler_of_the_behaviour_taken_on_is_a_handler(strict_system: ActorSystem) -> None:
    got: list[int] = []

    class Other(Behaviour):
        @handles
        def number(self, n: int) -> None:
            got.append(n)

    class Changes(Actor[Any]):
        @handles
        def text(self, m: str) -> None:
            self.become(Other)

    ref = strict_system.spawn(Changes)
    with pytest.raises(ActorError):
        ref.tell(1)
    ref.tell("change")
    await wait_all_tasks_blocked()
    ref.tell(2)
    ref.tell("for the actor's own handlers")
    await wait_all_tasks_blocked()
    assert got == [2]
