"""A foreign thread, or the thread of another trio run, gets an error from what would wake something, and changes nothing."""

from __future__ import annotations

import functools
import inspect
import json
import os
import threading
from collections.abc import Callable
from typing import Any

import attrs
import outcome
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from levada.framework import (
    Actor,
    ActorSystem,
    Asks,
    Killed,
    Receiver,
    Ref,
    Reply,
    Sender,
    Shutdown,
    blocking,
    bounded,
    channel,
    conflate,
    handles,
    message,
    oneshot,
)
from levada.framework.errors import WrongThread
from levada.framework.router import group, pool, pull


@message
class Item:
    n: int


@message
class Total(Asks[int]):
    pass


@message
class Later(Asks[int]):
    pass


class Sink(Actor[Item | Total]):
    """Adds up."""

    total: int = 0

    @handles
    def item(self, m: Item) -> None:
        self.total += m.n

    @handles
    def answer(self, m: Total) -> int:
        return self.total


class Loop(Actor[Item | Total]):
    """Does the same with a loop."""

    total: int = 0

    async def run(self) -> None:
        async for m in self.mailbox:
            if isinstance(m, Item):
                self.total += m.n
            else:
                self.reply_later().send(self.total)


class Holds(Actor[Any]):
    """Gives itself away, so that a thread can misuse it."""

    out: list[Any] = attrs.field(factory=list)

    def started(self) -> None:
        self.out.append(self)

    @handles
    def later(self, m: Later) -> None:
        self.out.append(self.reply_later())


def elsewhere(function: Callable[[], object]) -> BaseException | None:
    """Call in a thread of its own; what it raised."""
    errors: list[BaseException] = []

    def body() -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(50)
    assert not thread.is_alive()
    return errors[0] if errors else None


def refused(function: Callable[[], object]) -> str:
    """Call in a thread of its own, which must be refused; the text of the error."""
    error = elsewhere(function)
    assert isinstance(error, WrongThread)
    assert isinstance(error, RuntimeError)
    assert "from a foreign thread or trio run; use " in str(error)
    return str(error)


def refused_run(function: Callable[[], Any]) -> str:
    """Call an async function in a trio run of its own, in a thread of its own."""
    return refused(lambda: trio.run(function))


MAILBOXES = {
    "unbounded": None,
    "wait": bounded(4),
    "raise": bounded(4, overflow="raise"),
    "drop_new": bounded(4, overflow="drop_new"),
    "drop_old": bounded(4, overflow="drop_old"),
    "stop": bounded(4, overflow="stop"),
    "conflate": bounded(4, overflow=conflate(lambda m: type(m).__name__)),
}
KINDS: dict[str, Any] = {
    "handlers": Sink,
    "loop": Loop,
    "pool": pool(Sink, size=1),
    "pull": pool(Sink, size=1, routing=pull()),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mailbox", MAILBOXES)
async def test_a_tell_in_a_foreign_thread_is_refused_and_not_put_in(
    system: ActorSystem, kind: str, mailbox: str
) -> None:
    ref = system.spawn(KINDS[kind], name="sink", mailbox=MAILBOXES[mailbox])
    ref.tell(Item(1))
    await wait_all_tasks_blocked()
    text = refused(lambda: ref.tell(Item(10)))
    assert text == "tell to /sink from a foreign thread or trio run; use ref.from_thread"
    assert await ref.ask(Total()) == 1
    ref.tell(Item(2))
    await wait_all_tasks_blocked()
    assert await ref.ask(Total()) == 3


async def test_the_actors_of_a_system_go_on_after_a_refused_tell(system: ActorSystem) -> None:
    one, two = system.spawn(Sink), system.spawn(Sink)
    await wait_all_tasks_blocked()
    refused(lambda: one.tell(Item(1)))
    two.tell(Item(5))
    await wait_all_tasks_blocked()
    assert (await one.ask(Total()), await two.ask(Total())) == (0, 5)


class Hands(Actor[Item]):
    """Hands on from a thread."""

    sink: Ref[Any]
    errors: list[BaseException]

    @handles
    @blocking
    def item(self, m: Item) -> None:
        try:
            self.sink.tell(m)
        except RuntimeError as error:
            self.errors.append(error)
            self.sink.from_thread.tell(m)


async def test_a_blocking_handler_that_tells_gets_the_error_and_can_do_it_right(system: ActorSystem) -> None:
    errors: list[BaseException] = []
    sink = system.spawn(Sink, name="sink")
    hands = system.spawn(Hands, sink, errors)
    hands.tell(Item(3))
    hands.stop()
    await hands.terminated()
    with trio.fail_after(150):
        while await sink.ask(Total()) != 3:
            await trio.lowlevel.checkpoint()
    assert [str(error) for error in errors] == ["tell to /sink from a foreign thread or trio run; use ref.from_thread"]


@pytest.mark.parametrize("mailbox", MAILBOXES)
async def test_another_trio_run_can_neither_send_nor_ask_nor_wait(system: ActorSystem, mailbox: str) -> None:
    ref = system.spawn(Sink, mailbox=MAILBOXES[mailbox])
    await wait_all_tasks_blocked()
    refused_run(lambda: ref.send(Item(1)))
    refused_run(lambda: ref.ask(Total()))
    refused_run(ref.terminated)
    assert await ref.ask(Total()) == 0


async def test_another_trio_run_does_not_stand_in_line_for_room(system: ActorSystem) -> None:
    gate = trio.Event()
    handled: list[int] = []

    class Waits(Actor[Item]):
        @handles
        async def item(self, m: Item) -> None:
            await gate.wait()
            handled.append(m.n)

    ref = system.spawn(Waits, mailbox=bounded(1))
    ref.tell(Item(1))
    await wait_all_tasks_blocked()
    ref.tell(Item(2))
    refused_run(lambda: ref.send(Item(3)))
    gate.set()
    await wait_all_tasks_blocked()
    assert handled == [1, 2]


async def test_an_actor_cannot_be_ended_from_a_foreign_thread(system: ActorSystem) -> None:
    for mailbox in MAILBOXES.values():
        ref = system.spawn(Sink, mailbox=mailbox)
        await wait_all_tasks_blocked()
        refused(ref.stop)
        refused(functools.partial(ref.stop, now=True))
        refused(ref.kill)
        assert await ref.ask(Total()) == 0
        ref.kill()
        assert not isinstance(await ref.terminated(), BaseException)


async def test_nothing_is_spawned_from_a_foreign_thread(system: ActorSystem) -> None:
    got: list[Any] = []
    system.spawn(Holds, got)
    await wait_all_tasks_blocked()
    holder = got[0]
    refused(lambda: system.spawn(Sink, name="x"))
    refused(lambda: holder.spawn(Sink, name="x"))
    assert system.lookup("/x") is None
    assert holder.children == []
    assert system.statistics().actors == 1


async def test_what_an_actor_changes_about_itself_is_refused_in_a_thread(system: ActorSystem) -> None:
    got: list[Any] = []
    ref = system.spawn(Holds, got)
    other = system.spawn(Sink)
    await wait_all_tasks_blocked()
    holder = got[0]
    holder.timers.once("t", 5, Item(1))
    timers = holder.timers
    changes: list[Callable[[], object]] = [
        lambda: holder.watch(other),
        lambda: holder.unwatch(other),
        lambda: holder.link(other),
        lambda: holder.unlink(other),
        lambda: holder.become(None),
        lambda: holder.stash(Item(1)),
        holder.unstash_all,
        holder.reply_later,
        holder.stop,
        lambda: holder.timers,
        lambda: timers.once("t", 0, Item(1)),
        lambda: timers.every("t", 1, Item(1)),
        lambda: timers.cancel("t"),
        lambda: holder.set_receive_timeout(1),
        lambda: holder.start_soon(trio.sleep_forever),
    ]
    for change in changes:
        refused(change)
    assert len(timers) == 1
    assert ref.is_alive


async def test_an_answer_is_not_given_from_a_thread_and_can_still_be_given(system: ActorSystem) -> None:
    got: list[Any] = []
    ref = system.spawn(Holds, got)
    answers: list[int] = []

    async def ask() -> None:
        answers.append(await ref.ask(Later(), timeout=None))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        reply: Reply[int] = got[1]
        refused(lambda: reply.send(1))
        refused(lambda: reply.fail(ValueError()))
        assert reply.wanted
        reply.send(2)
    assert answers == [2]


async def test_names_and_topics_belong_to_the_thread_too(system: ActorSystem) -> None:
    ref = system.spawn(Sink)
    await wait_all_tasks_blocked()
    refused(lambda: system.registry.register("name", ref))
    refused(lambda: system.groups.join("topic", ref))
    assert "name" not in system.registry
    assert system.groups.topics() == []
    system.groups.join("topic", ref)
    refused(lambda: system.groups.publish("topic", Item(1)))
    refused(lambda: system.groups.subscribe("topic", ref))
    refused(lambda: system.groups.leave("topic", ref))
    system.events.subscribe(Item, ref)
    refused(lambda: system.events.publish(Item(1)))
    assert await ref.ask(Total()) == 0
    assert system.groups.members("topic") == [ref]


# ---------------------------------------------------------------- channels


async def test_a_message_sent_in_a_thread_to_a_task_that_waits_is_refused_and_the_next_arrives() -> None:
    sender, receiver = channel(int, name="numbers")
    got: list[int] = []

    async def receive() -> None:
        async for n in receiver:
            got.append(n)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        await wait_all_tasks_blocked()
        text = refused(lambda: sender.send_nowait(1))
        assert text == "use of channel numbers from a foreign thread or trio run; use trio.from_thread.run_sync()"
        refused_run(lambda: sender.send(2))
        refused(sender.finish_nowait)
        refused(sender.cancel)
        refused(receiver.close)
        sender.send_nowait(3)
        sender.finish_nowait()
    assert got == [3]


@pytest.mark.parametrize("how", ["ordered", "unreliable"])
async def test_a_message_sent_in_a_thread_into_a_mailbox_is_refused(system: ActorSystem, how: str) -> None:
    sender, receiver = channel(Item)
    getattr(sender, how)(1)
    ref = system.spawn(Sink)
    receiver.to_mailbox(ref)
    await wait_all_tasks_blocked()
    refused(lambda: sender.send_nowait(Item(1)))
    sender.send_nowait(Item(2))
    await wait_all_tasks_blocked()
    assert await ref.ask(Total()) == 2
    sender.finish_nowait()


async def test_a_message_taken_in_a_thread_does_not_wake_a_sender_that_waits() -> None:
    sender, receiver = channel(int)
    sender.ordered(1)
    async with trio.open_nursery() as nursery:
        await sender.send(1)
        nursery.start_soon(sender.send, 2)
        await wait_all_tasks_blocked()
        refused(receiver.receive_nowait)
        refused_run(receiver.receive)
        assert [await receiver.receive(), await receiver.receive()] == [1, 2]
    sender.finish_nowait()


async def test_another_trio_run_cannot_wait_on_a_channel(system: ActorSystem) -> None:
    sender, receiver = channel(Item)
    refused_run(receiver.receive)
    refused_run(receiver.terminated)
    ref = system.spawn(Sink)
    refused(lambda: receiver.to_mailbox(ref))
    refused(lambda: receiver.on_terminated(lambda *_: None))
    receiver.to_mailbox(ref)
    sender.send_nowait(Item(4))
    sender.finish_nowait()
    await wait_all_tasks_blocked()
    assert await ref.ask(Total()) == 4


async def test_a_oneshot_cannot_be_sent_in_a_thread() -> None:
    done, answer = oneshot(int)
    refused(lambda: done.send(1))
    done.send(2)
    assert await answer == 2


def test_a_channel_made_outside_of_a_run_belongs_to_the_run_that_waits_on_it() -> None:
    made: list[tuple[Sender[int], Receiver[int]]] = [channel(int)]
    sender, receiver = made[0]
    sender.send_nowait(1)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            assert await receiver.receive() == 1
            nursery.start_soon(receiver.receive)
            await wait_all_tasks_blocked()
            refused(lambda: sender.send_nowait(2))
            sender.send_nowait(3)

    trio.run(main)
    sender.finish_nowait()


async def test_a_router_of_a_group_is_told_in_its_thread_only(system: ActorSystem) -> None:
    ref = system.spawn(Sink)
    system.groups.join("sinks", ref)
    router = system.spawn(group("sinks"))
    await wait_all_tasks_blocked()
    refused(lambda: router.tell(Item(1)))
    router.tell(Item(2))
    await wait_all_tasks_blocked()
    assert await ref.ask(Total()) == 2


# ---------------------------------------------------------------- a system in another thread


async def use_a_foreign_ref(use: Callable[[Any], None], ref: Ref[Any]) -> list[int]:
    """Use `ref` in a system of this thread; how many actors end there, and that the system goes on."""
    async with ActorSystem("other") as other:
        got: list[Any] = []
        other.spawn(Holds, got)
        await wait_all_tasks_blocked()
        with pytest.raises(WrongThread, match=f"{ref.path} from a foreign thread or trio run; use "):
            use(got[0])
        sink = other.spawn(Sink)
        sink.tell(Item(3))
        return [await sink.ask(Total()), other.statistics().actors]


FOREIGN_USES: dict[str, Callable[[Any, Ref[Any]], object]] = {
    "watch": lambda holder, ref: holder.watch(ref, "tag"),
    "link": lambda holder, ref: holder.link(ref),
    "registry.register": lambda holder, ref: holder.system.registry.register("name", ref),
    "groups.join": lambda holder, ref: holder.system.groups.join("topic", ref),
    "groups.subscribe": lambda holder, ref: holder.system.groups.subscribe("topic", ref),
    "events.subscribe": lambda holder, ref: holder.system.events.subscribe(Item, ref),
}


@pytest.mark.parametrize("use", FOREIGN_USES)
async def test_an_actor_of_another_thread_is_refused_and_nothing_has_changed(system: ActorSystem, use: str) -> None:
    ref = system.spawn(Sink, name="sink")
    await wait_all_tasks_blocked()
    after: list[object] = []

    def changed(holder: Any) -> None:
        try:
            FOREIGN_USES[use](holder, ref)
        finally:
            other = holder.system
            after.extend([len(other.registry), other.groups.topics(), other.events.wants(Item)])
            other.groups.publish("topic", Item(10))
            holder.unwatch(ref, "tag")
            holder.unlink(ref)

    assert await trio.to_thread.run_sync(lambda: trio.run(use_a_foreign_ref, changed, ref)) == [3, 2]
    assert after == [0, [], False]
    assert await ref.ask(Total()) == 0
    ref.stop()
    assert await ref.terminated() == Shutdown()


async def test_an_actor_of_another_thread_feeds_no_mailbox_and_the_receiver_is_kept(system: ActorSystem) -> None:
    ref = system.spawn(Sink)
    await wait_all_tasks_blocked()

    async def main() -> int:
        sender, receiver = channel(Item)
        with pytest.raises(WrongThread):
            receiver.to_mailbox(ref)
        sender.send_nowait(Item(4))
        sender.finish_nowait()
        return (await receiver.receive()).n

    assert await trio.to_thread.run_sync(lambda: trio.run(main)) == 4


async def test_an_actor_may_watch_and_link_to_an_actor_of_another_system_in_its_thread(system: ActorSystem) -> None:
    got: list[Any] = []
    async with ActorSystem("other") as other:
        ref = system.spawn(Sink)
        other_ref = other.spawn(Holds, got)
        await wait_all_tasks_blocked()
        got[0].watch(ref)
        got[0].link(ref)
        other.registry.register("sink", ref)
        ref.kill()
        assert await other_ref.terminated() == Killed()
        assert "sink" not in other.registry


# ---------------------------------------------------------------- forked processes


class Waits(Actor[Item]):
    """Waits in its handler, so that messages queue up behind it."""

    @handles
    async def item(self, m: Item) -> None:
        await trio.sleep_forever()


def in_forked_process(calls: dict[str, Callable[[], Any]]) -> dict[str, str]:
    """Do calls in a forked process; return the errors. A coroutine is driven by hand past its first checkpoint."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            said = {}
            for name, call in calls.items():
                try:
                    result = call()
                    if inspect.iscoroutine(result):
                        result.send(None)
                        result.send(outcome.Value(None))
                    said[name] = "returned"
                except BaseException as error:  # noqa: BLE001 - it is what the test asks for
                    said[name] = f"{type(error).__name__}: {error}"
            os.write(write, json.dumps(said).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        said = dict(json.load(pipe))
    os.waitpid(child, 0)
    return said


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("forks", ["in a task", "in a handler"])
async def test_in_a_forked_process_each_call_raises_and_says_why(system: ActorSystem, forks: str) -> None:
    """Idle actors and busy ones; the process that was forked goes on."""
    sink: Ref[Any]
    busy: Ref[Any]
    sink, loop, busy, full = (
        system.spawn(Sink, name="sink"),
        system.spawn(Loop, name="loop"),
        system.spawn(Waits, name="busy"),
        system.spawn(Waits, name="full", mailbox=bounded(1)),
    )
    for ref in (busy, full):
        ref.tell(Item(1))
    await wait_all_tasks_blocked()
    for ref in (busy, full):
        ref.tell(Item(2))
    calls: dict[str, Callable[[], Any]] = {
        "tell": lambda: sink.tell(Item(1)),
        "tell a loop": lambda: loop.tell(Item(1)),
        "tell a busy one": lambda: busy.tell(Item(1)),
        "tell a full one": lambda: full.tell(Item(1)),
        "send": lambda: sink.send(Item(1)),
        "send to a busy one": lambda: busy.send(Item(1)),
        "ask": lambda: sink.ask(Total()),
        "ask a busy one": lambda: busy.ask(Total()),
        "spawn": lambda: system.spawn(Sink),
        "stop": sink.stop,
        "kill": sink.kill,
        "from_thread.tell": lambda: sink.from_thread.tell(Item(1)),
        "exit": lambda: system.lookup("/sink").link(busy),  # type: ignore[union-attr]
    }
    said: dict[str, str] = {}

    class Forks(Actor[Item]):
        @handles
        def item(self, m: Item) -> None:
            said.update(in_forked_process(calls))

    if forks == "in a task":
        said = in_forked_process(calls)
    else:
        system.spawn(Forks).tell(Item(1))
        await wait_all_tasks_blocked()
    where = " in a forked process, where its actor system does not run; use a connection, "
    assert {name: text for name, text in said.items() if where not in text or "WrongThread" not in text} == {}
    assert len(said) == len(calls)
    sink.tell(Item(5))
    assert await sink.ask(Total()) == 5
    busy.kill()
    full.kill()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_may_run_a_system_of_its_own() -> None:
    """The parent's system runs, or has run and ended, when it forks."""

    async def own() -> int:
        async with ActorSystem() as system:
            sink = system.spawn(Sink)
            sink.tell(Item(2))
            return await sink.ask(Total())

    def total() -> int:
        result: list[int] = []
        thread = threading.Thread(
            target=lambda: result.append(trio.run(own))
        )  # this thread is in a run of trio already
        thread.start()
        thread.join()
        raise ValueError(result)

    async def main() -> dict[str, str]:
        async with ActorSystem():
            return in_forked_process({"run": total})

    assert trio.run(main) == {"run": "ValueError: [2]"}
    assert in_forked_process({"run": total}) == {"run": "ValueError: [2]"}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_in_a_forked_process_a_system_that_had_ended_has_ended() -> None:
    async def main() -> Ref[Any]:
        async with ActorSystem() as system:
            return system.spawn(Sink, name="sink")

    ref = trio.run(main)
    said = in_forked_process({"tell": lambda: ref.from_thread.tell(Item(1))})
    assert said == {"tell": "ActorStopped: /sink has stopped (shutdown)"}
