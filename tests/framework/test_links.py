"""Links and monitors: who hears of an end, how, and in what order."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.framework import (
    Actor,
    ActorSystem,
    Asks,
    Behaviour,
    Down,
    Exit,
    Failed,
    Killed,
    Lost,
    MailboxPolicy,
    Normal,
    Reason,
    Ref,
    Shutdown,
    bounded,
    handles,
    message,
    restart,
    unbounded,
)

Log = list[Any]


@message
class Do(Asks[Any]):
    """Call a function with the actor."""

    function: Callable[[Any], Any]


@message
class Wait:
    """Wait forever."""


@message
class Raise:
    error: BaseException


class Peer(Actor[Do | Wait | Raise]):
    log: Log

    def stopping(self, reason: Reason) -> None:
        self.log.append(("stopping", reason))

    @handles
    def do(self, m: Do) -> Any:
        return m.function(self)

    @handles
    async def wait(self, m: Wait) -> None:
        await trio.sleep_forever()

    @handles
    def fail(self, m: Raise) -> None:
        raise m.error


class Trapper(Peer):
    trap_exits = True

    @handles
    def exit(self, m: Exit) -> None:
        self.log.append(("exit", m.ref, m.reason))

    @handles
    def down(self, m: Down) -> None:
        self.log.append(("down", m.ref, m.reason, m.tag))


async def link(one: Ref[Any], two: Ref[Any]) -> None:
    await one.ask(Do(lambda actor: actor.link(two)))


async def watch(one: Ref[Any], two: Any, tag: Any = None) -> None:
    await one.ask(Do(lambda actor: actor.watch(two, tag)))


async def end(ref: Ref[Any], reason: Reason) -> Reason:
    """End an actor for a reason."""
    if isinstance(reason, Failed):
        ref.tell(Raise(reason.error))
    elif isinstance(reason, Normal):
        ref.tell(Do(lambda actor: actor.stop()))
    else:
        ref.system.lifecycle.request(ref, reason, cancel=isinstance(reason, Killed))  # type: ignore[attr-defined]
    await wait_all_tasks_blocked()
    return await ref.terminated()


def note(log: Log, n: int, _: Any) -> None:
    log.append(n)


def unlink(other: Ref[Any], actor: Any) -> None:
    actor.unlink(other)


REASONS = [Normal(), Shutdown(), Killed(), Lost("peer"), Failed(ValueError("x"))]
BY_NAME = pytest.mark.parametrize("reason", REASONS, ids=lambda reason: type(reason).__name__)


# ---------------------------------------------------------------- links


@BY_NAME
@pytest.mark.parametrize("way", ["there", "back"])
async def test_a_link_ends_both_for_the_same_reason_unless_it_is_normal(
    system: ActorSystem, reason: Reason, way: str
) -> None:
    one, two = system.spawn(Peer, []), system.spawn(Peer, [])
    await link(one, two)
    first, second = (one, two) if way == "there" else (two, one)
    assert await end(first, reason) == reason
    if isinstance(reason, Normal):
        assert second.is_alive
    else:
        assert await second.terminated() == reason


@BY_NAME
@pytest.mark.parametrize("way", ["there", "back"])
async def test_trap_exits_makes_every_end_a_message(system: ActorSystem, reason: Reason, way: str) -> None:
    log: Log = []
    trapper, peer = system.spawn(Trapper, log), system.spawn(Peer, [])
    await (link(trapper, peer) if way == "there" else link(peer, trapper))
    await end(peer, reason)
    assert trapper.is_alive
    assert log == [("exit", peer, reason)]


@BY_NAME
async def test_a_link_to_the_dead_sends_its_signal_at_once(system: ActorSystem, reason: Reason) -> None:
    log: Log = []
    peer = system.spawn(Peer, [])
    await end(peer, reason)
    trapper, plain = system.spawn(Trapper, log), system.spawn(Peer, [])
    await link(trapper, peer)
    await link(plain, peer)
    await wait_all_tasks_blocked()
    assert log == [("exit", peer, reason)]
    assert plain.is_alive == isinstance(reason, Normal)


async def test_unlink_from_either_side(system: ActorSystem) -> None:
    for side in (0, 1):
        pair = system.spawn(Peer, []), system.spawn(Peer, [])
        await link(*pair)
        other = pair[1 - side]
        await pair[side].ask(Do(functools.partial(unlink, other)))
        pair[0].kill()
        await wait_all_tasks_blocked()
        assert pair[1].is_alive


async def test_linking_twice_is_one_link_and_to_oneself_none(system: ActorSystem) -> None:
    log: Log = []
    trapper, peer = system.spawn(Trapper, log), system.spawn(Peer, [])
    await link(trapper, peer)
    await link(peer, trapper)
    await link(trapper, trapper)
    peer.kill()
    await wait_all_tasks_blocked()
    assert log == [("exit", peer, Killed())]


async def test_unlink_of_a_stranger_is_harmless(system: ActorSystem) -> None:
    one, two = system.spawn(Peer, []), system.spawn(Peer, [])
    await one.ask(Do(lambda actor: actor.unlink(two)))
    assert one.is_alive


async def test_an_exit_cancels_the_running_handler_and_overtakes_what_is_queued(system: ActorSystem) -> None:
    log: Log = []
    one, two = system.spawn(Peer, log), system.spawn(Peer, [])
    await link(one, two)
    one.tell(Wait())
    one.tell(Do(lambda actor: log.append("never")))
    await wait_all_tasks_blocked()
    two.kill()
    assert await one.terminated() == Killed()
    assert log == [("stopping", Killed())]


async def test_a_supervised_actor_starts_again_after_an_exit_and_is_linked_still(system: ActorSystem) -> None:
    one: Ref[Any] = system.spawn(Peer, [], supervise=restart())
    two, three = system.spawn(Peer, []), system.spawn(Peer, [])
    await link(one, two)
    await link(one, three)
    two.kill()
    await wait_all_tasks_blocked()
    assert one._extras.restarts == 1  # type: ignore[attr-defined]
    assert three.is_alive  # a restart is not an end
    one.stop()
    assert await three.terminated() == Shutdown()


async def test_a_ring_ends_once(system: ActorSystem) -> None:
    logs: list[Log] = [[] for _ in range(5)]
    ring = [system.spawn(Peer, log) for log in logs]
    for one, two in zip(ring, [*ring[1:], ring[0]], strict=True):
        await link(one, two)
    error = ValueError()
    await end(ring[2], Failed(error))
    assert [await ref.terminated() for ref in ring] == [Failed(error)] * 5
    assert logs == [[("stopping", Failed(error))]] * 5


@pytest.mark.ci
async def test_a_chain_of_100_000_linked_actors_ends_without_recursion(system: ActorSystem) -> None:
    class Link(Actor[Any]):
        pass

    refs: list[Any] = [system.spawn(Link) for _ in range(100_000)]
    for one, two in itertools.pairwise(refs):
        one.link(two)
    refs[0].kill()
    assert await refs[-1].terminated() == Killed()
    assert system.statistics().actors == 0


async def test_exit_signals_of_one_actor_come_before_messages_that_were_queued_later(system: ActorSystem) -> None:
    log: Log = []
    trapper, peer = system.spawn(Trapper, log), system.spawn(Peer, [])
    await link(trapper, peer)
    peer.kill()
    for n in range(3):
        trapper.tell(Do(functools.partial(note, log, n)))
    await wait_all_tasks_blocked()
    assert [entry for entry in log if entry == ("exit", peer, Killed())] == log[:1]
    assert log[1:] == [0, 1, 2]


# ---------------------------------------------------------------- monitors


@BY_NAME
async def test_down_carries_ref_reason_and_tag_once(system: ActorSystem, reason: Reason) -> None:
    log: Log = []
    watcher, target = system.spawn(Trapper, log), system.spawn(Peer, [])
    await watch(watcher, target, "first")
    await watch(watcher, target, ("second", 2))
    await watch(watcher, target, "first")
    await end(target, reason)
    assert log == [("down", target, reason, "first"), ("down", target, reason, ("second", 2))]
    assert watcher.is_alive


@BY_NAME
async def test_watching_the_dead_is_answered_at_once(system: ActorSystem, reason: Reason) -> None:
    log: Log = []
    watcher, target = system.spawn(Trapper, log), system.spawn(Peer, [])
    await end(target, reason)
    await watch(watcher, target, "late")
    await watch(watcher, target, "late")
    await wait_all_tasks_blocked()
    assert log == [("down", target, reason, "late")] * 2
    assert not watcher._extras.watched  # type: ignore[attr-defined]


async def test_the_end_of_the_watcher_is_no_business_of_the_watched(system: ActorSystem) -> None:
    watcher, target = system.spawn(Trapper, []), system.spawn(Peer, [])
    await watch(watcher, target)
    assert len(target._extras.watchers) == 1  # type: ignore[attr-defined]
    watcher.kill()
    await wait_all_tasks_blocked()
    assert target.is_alive
    assert not target._extras.watchers  # type: ignore[attr-defined]


async def test_unwatch_takes_one_tag_back(system: ActorSystem) -> None:
    log: Log = []
    watcher, target = system.spawn(Trapper, log), system.spawn(Peer, [])
    for tag in "ab":
        await watch(watcher, target, tag)
    await watcher.ask(Do(lambda actor: actor.unwatch(target, "a")))
    await watcher.ask(Do(lambda actor: actor.unwatch(target, "never")))
    await end(target, Killed())
    assert log == [("down", target, Killed(), "b")]
    await watcher.ask(Do(lambda actor: actor.unwatch(target, "b")))


async def test_a_down_that_is_queued_stays_after_unwatch(system: ActorSystem) -> None:
    log: Log = []
    watcher, target = system.spawn(Trapper, log), system.spawn(Peer, [])
    await end(target, Killed())

    def both(actor: Trapper) -> None:
        actor.watch(target, "x")
        actor.unwatch(target, "x")

    await watcher.ask(Do(both))
    await wait_all_tasks_blocked()
    assert log == [("down", target, Killed(), "x")]


async def test_a_watch_survives_a_restart_of_both(system: ActorSystem) -> None:
    log: Log = []
    watcher: Ref[Any] = system.spawn(Trapper, log, supervise=restart())
    target: Ref[Any] = system.spawn(Peer, [], supervise=restart())
    await watch(watcher, target)
    watcher.kill()
    target.kill()
    await wait_all_tasks_blocked()
    log.clear()
    target.stop()
    await wait_all_tasks_blocked()
    assert log == [("down", target, Shutdown(), None)]


async def test_the_tag_must_be_hashable(system: ActorSystem) -> None:
    watcher: Ref[Any] = system.spawn(Trapper, [], supervise=restart(resume=[TypeError]))
    target = system.spawn(Peer, [])
    watcher.tell(Do(lambda actor: actor.watch(target, [])))
    await wait_all_tasks_blocked()
    assert system.statistics().failures == 1
    assert target._extras is None or not target._extras.watchers  # type: ignore[attr-defined]


async def test_down_overtakes_what_is_queued_and_downs_keep_their_order(system: ActorSystem) -> None:
    log: Log = []
    watcher = system.spawn(Trapper, log)
    targets = [system.spawn(Peer, []) for _ in range(3)]
    for target in targets:
        await watch(watcher, target)
    for target in targets:
        target.kill()
    for n in range(3):
        watcher.tell(Do(functools.partial(note, log, n)))
    await wait_all_tasks_blocked()
    assert log == [*(("down", target, Killed(), None) for target in targets), 0, 1, 2]


async def test_down_comes_before_messages_but_after_started(system: ActorSystem) -> None:
    log: Log = []

    class Starting(Trapper):
        target: Ref[Any]

        async def started(self) -> None:
            self.watch(self.target)
            await trio.lowlevel.checkpoint()
            self.log.append("started")

    target = system.spawn(Peer, [])
    await end(target, Killed())
    watcher = system.spawn(Starting, log, target)
    watcher.tell(Do(lambda actor: log.append("message")))
    await wait_all_tasks_blocked()
    assert log == ["started", ("down", target, Killed(), None), "message"]


async def test_a_down_that_comes_between_two_incarnations_waits_for_started(
    system: ActorSystem, autojump_clock: MockClock
) -> None:
    log: Log = []

    class Starting(Trapper):
        def started(self) -> None:
            self.log.append("started")

    target = system.spawn(Peer, [])
    watcher: Ref[Any] = system.spawn(Starting, log, supervise=restart(initial_backoff=1.0, max_backoff=1.0))
    await watch(watcher, target)
    watcher.tell(Raise(ValueError()))
    watcher.tell(Raise(ValueError()))
    await wait_all_tasks_blocked()
    target.kill()
    await trio.sleep(2)
    assert log == ["started", "started", "started", ("down", target, Killed(), None)]


async def test_a_down_after_become_is_for_the_new_handlers(system: ActorSystem) -> None:
    log: Log = []

    class Other(Behaviour):
        @handles
        def down(self, m: Down) -> None:
            log.append("other")

    target = system.spawn(Peer, [])
    await end(target, Killed())
    watcher: Ref[Any] = system.spawn(Trapper, log)

    def change(actor: Trapper) -> None:
        actor.become(Other)
        actor.watch(target)

    watcher.tell(Do(change))
    watcher.tell(Down(target, None))
    await wait_all_tasks_blocked()
    assert log == ["other", "other"]


async def test_a_loop_gets_down_and_exit_as_messages(system: ActorSystem) -> None:
    log: Log = []

    class Loop(Actor[Any]):
        trap_exits = True
        target: Ref[Any]

        async def run(self) -> None:
            self.watch(self.target, "w")
            self.link(self.target)
            async for m in self.mailbox:
                log.append((type(m), m.reason))

    target = system.spawn(Peer, [])
    loop = system.spawn(Loop, target)
    await wait_all_tasks_blocked()
    target.kill()
    await wait_all_tasks_blocked()
    assert sorted(log, key=repr) == [(Down, Killed()), (Exit, Killed())]
    loop.stop()
    assert await loop.terminated() == Shutdown()


async def test_an_untrapped_exit_ends_a_loop(system: ActorSystem) -> None:
    class Loop(Actor[Any]):
        target: Ref[Any]

        async def run(self) -> None:
            self.link(self.target)
            await trio.sleep_forever()

    target = system.spawn(Peer, [])
    loop = system.spawn(Loop, target)
    await wait_all_tasks_blocked()
    target.kill()
    assert await loop.terminated() == Killed()


@pytest.mark.ci
async def test_an_actor_with_20_000_watchers(system: ActorSystem) -> None:
    class Counter(Actor[Down]):
        seen: Log

        @handles
        def down(self, m: Down) -> None:
            self.seen.append(1)

    seen: Log = []
    target = system.spawn(Peer, [])
    watchers: list[Any] = [system.spawn(Counter, seen) for _ in range(20_000)]
    for watcher in watchers:
        watcher._actor.watch(target)
    target.kill()
    await wait_all_tasks_blocked()
    assert len(seen) == 20_000


# ---------------------------------------------------------------- very many


@pytest.mark.parametrize("many", [100, pytest.param(30_000, marks=pytest.mark.release)])
@pytest.mark.parametrize("how", ["watch", "link"])
async def test_many_ends_at_once_are_heard_of_in_order(system: ActorSystem, how: str, many: int) -> None:
    """Ahead of what is queued, and at a cost that does not grow with their number: it took 15 s for 8,000."""

    class Mourner(Trapper):
        others: list[Ref[Any]]

        def started(self) -> None:
            for other in self.others:
                (self.watch if how == "watch" else self.link)(other)

    log: Log = []
    others = [system.spawn(Peer, []) for _ in range(many)]
    mourner = system.spawn(Mourner, log, others)
    await wait_all_tasks_blocked()
    for other in others:
        other.kill()
    mourner.tell(Do(lambda actor: actor.log.append("message")))
    await wait_all_tasks_blocked()
    assert [entry[1] for entry in log[:-1]] == others
    assert log[-1] == "message"


@pytest.mark.parametrize("policy", [unbounded(), bounded(1), bounded(1, overflow="drop_old")], ids=repr)
async def test_signals_take_no_place_in_a_mailbox(system: ActorSystem, policy: MailboxPolicy) -> None:
    class Mourner(Trapper):
        others: list[Ref[Any]]

        def started(self) -> None:
            for other in self.others:
                self.watch(other)

        @handles
        async def wait(self, m: Wait) -> None:
            await gate.wait()

    gate = trio.Event()
    log: Log = []
    others = [system.spawn(Peer, []) for _ in range(3)]
    mourner = system.spawn(Mourner, log, others, mailbox=policy)
    mourner.tell(Wait())
    await wait_all_tasks_blocked()
    for other in others:
        other.kill()
    await wait_all_tasks_blocked()
    mourner.tell(Do(lambda actor: actor.log.append("message")))
    gate.set()
    await wait_all_tasks_blocked()
    assert [entry[1] for entry in log[:-1]] == others
    assert log[-1] == "message"
    assert system.statistics().dead_letters == 0


async def test_signals_that_nobody_heard_are_handed_back_in_order(system: ActorSystem) -> None:
    class Deaf(Trapper):
        others: list[Ref[Any]]

        def started(self) -> None:
            for other in self.others:
                self.watch(other)

        def undelivered(self, messages: list[Any]) -> None:
            left.extend(messages)

    left: list[Any] = []
    others = [system.spawn(Peer, []) for _ in range(3)]
    deaf = system.spawn(Deaf, [], others)
    deaf.tell(Wait())
    await wait_all_tasks_blocked()
    deaf.tell(Raise(ValueError()))
    for other in others:
        other.kill()
    await wait_all_tasks_blocked()
    deaf.kill()
    await deaf.terminated()
    assert [getattr(message, "ref", None) for message in left] == [*others, None]
