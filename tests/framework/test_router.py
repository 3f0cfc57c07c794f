"""Routers: who gets a message, what becomes of it when routees fail, are full, come and go."""

from __future__ import annotations

import functools
import logging
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import attrs
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.framework import (
    Actor,
    ActorFailed,
    ActorSystem,
    Asks,
    Codec,
    DeadLetter,
    Failed,
    Killed,
    Normal,
    Ref,
    Shutdown,
    Supervision,
    Unhandled,
    bounded,
    handles,
    message,
    restart,
)
from levada.framework.errors import ActorError, ActorStopped, AskCycle, AskTimeout, ConfigurationError, MailboxFull
from levada.framework.router import (
    Resize,
    Routing,
    at_random,
    broadcast,
    consistent_hash,
    group,
    least_mailbox,
    pool,
    pull,
    round_robin,
)
from levada.framework.testing import explore


@message
class Job:
    n: int
    sender: str = ""


@message
class Slow:
    """Takes a while."""

    n: int
    seconds: float = 1.0


@message
class Fail:
    n: int = 0


@message
class Leave:
    pass


@message
class Who(Asks[str]):
    key: str = ""


@message
class Nap(Asks[str]):
    seconds: float = 1.0


Handled = list[tuple[str, Any]]


class Worker(Actor[Job | Slow | Fail | Leave | Who | Nap]):
    """Writes down what it begins with and, of slow jobs, what it has finished."""

    log: Handled

    @handles
    def job(self, m: Job) -> None:
        self.log.append((self.ref.path, m.n))

    @handles
    async def slow(self, m: Slow) -> None:
        self.log.append((self.ref.path, m.n))
        await trio.sleep(m.seconds)

    @handles
    def fail(self, m: Fail) -> None:
        self.log.append((self.ref.path, m.n))
        raise ValueError(m.n)

    @handles
    def leave(self, m: Leave) -> None:
        self.stop()

    @handles
    def who(self, m: Who) -> str:
        return self.ref.path

    @handles
    async def nap(self, m: Nap) -> str:
        await trio.sleep(m.seconds)
        return self.ref.path


class Recorder(Actor[Any]):
    """Keeps what it is told."""

    got: list[Any]

    @handles
    def any(self, m: object) -> None:
        self.got.append(m)


ROUTINGS: list[Callable[[], Routing]] = [
    round_robin,
    at_random,
    least_mailbox,
    functools.partial(consistent_hash, lambda m: getattr(m, "n", 0)),
    broadcast,
    pull,
]
SINGLE = [routing for routing in ROUTINGS if routing is not broadcast]


def named(routing: Callable[[], Routing]) -> str:
    return routing().kind.replace(" ", "_")


def by_worker(log: Handled) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for path, n in log:
        found.setdefault(path, []).append(n)
    return found


# ---------------------------------------------------------------- who gets a message


async def test_round_robin_gives_each_routee_one_in_turn(system: ActorSystem) -> None:
    log: Handled = []
    router = system.spawn(pool(Worker, log, size=3, routing=round_robin()), name="w")
    for n in range(7):
        router.tell(Job(n))
    await wait_all_tasks_blocked()
    assert by_worker(log) == {"/w/0": [0, 3, 6], "/w/1": [1, 4], "/w/2": [2, 5]}


async def test_round_robin_is_the_default_and_goes_on_where_it_was_when_the_pool_changes(system: ActorSystem) -> None:
    log: Handled = []
    router = system.spawn(pool(Worker, log, size=3), name="w")
    asked = [await router.ask(Who()) for _ in range(2)]
    router.tell(Resize(4))
    asked += [await router.ask(Who()) for _ in range(3)]
    assert asked == ["/w/0", "/w/1", "/w/2", "/w/3", "/w/0"]


async def test_random_draws_by_the_systems_seed() -> None:
    async def draw(seed: int) -> list[str]:
        async with ActorSystem(seed=seed) as system:
            router = system.spawn(pool(Worker, [], size=4, routing=at_random()), name="w")
            return [await router.ask(Who()) for _ in range(40)]

    first, again, other = await draw(1), await draw(1), await draw(2)
    assert first == again != other
    assert set(first) == {"/w/0", "/w/1", "/w/2", "/w/3"}


async def test_least_mailbox_goes_round_those_who_wait_or_have_more_to_do(
    system: ActorSystem, autojump_clock: MockClock
) -> None:
    log: Handled = []
    router = system.spawn(pool(Worker, log, size=3, routing=least_mailbox()), name="w")
    await router.ask(Who())
    router.tell(Slow(1))
    await wait_all_tasks_blocked()
    router.tell(Slow(2))
    await wait_all_tasks_blocked()
    assert await router.ask(Who()) == "/w/2"
    for n in range(3, 6):
        router.tell(Slow(n))
    await wait_all_tasks_blocked()
    # 0 and 1 are at work, each counts for one message.
    assert [path for path, n in log] == ["/w/0", "/w/1", "/w/2"]
    workers = {child.path: child for child in router._actor.children}  # type: ignore[attr-defined]
    assert [workers[f"/w/{n}"].depth() for n in range(3)] == [1, 1, 0]


async def test_consistent_hash_keeps_a_key_with_one_routee(system: ActorSystem) -> None:
    router = system.spawn(pool(Worker, [], size=5, routing=consistent_hash(lambda m: m.key)), name="w")
    places = {key: await router.ask(Who(key)) for key in map(str, range(50))}
    assert {key: await router.ask(Who(key)) for key in reversed(places)} == places
    assert len(set(places.values())) == 5


@pytest.mark.ci
@given(keys=st.sets(st.text(max_size=8), min_size=60, max_size=100), before=st.integers(1, 6), after=st.integers(1, 6))
def test_consistent_hash_moves_no_more_keys_than_it_must(keys: set[str], before: int, after: int) -> None:
    async def main() -> tuple[dict[str, str], dict[str, str]]:
        async with ActorSystem() as system:
            router = system.spawn(pool(Worker, [], size=before, routing=consistent_hash(lambda m: m.key)), name="w")
            old = {key: await router.ask(Who(key)) for key in keys}
            router.tell(Resize(after))
            return old, {key: await router.ask(Who(key)) for key in keys}

    old, new = trio.run(main)
    moved = {key for key in keys if old[key] != new[key]}
    if after >= before:
        assert {new[key] for key in moved} <= {f"/w/{place}" for place in range(before, after)}
    else:
        assert moved == {key for key in keys if int(old[key][3:]) >= after}


async def test_consistent_hash_spreads_keys_and_is_the_same_in_every_run(system: ActorSystem) -> None:
    router = system.spawn(pool(Worker, [], size=4, routing=consistent_hash(lambda m: m.key)), name="w")
    counts = Counter([await router.ask(Who(f"user{n}")) for n in range(1000)])
    assert counts == {"/w/0": 220, "/w/1": 266, "/w/2": 257, "/w/3": 257}


@pytest.mark.parametrize(
    ("key", "error"),
    [(lambda m: m.nothing, AttributeError), (lambda m: 1.5, TypeError), (lambda m: [m], TypeError)],
    ids=["raises", "a float", "a list"],
)
async def test_a_key_function_that_fails_costs_one_message_and_not_the_pool(
    system: ActorSystem, caplog: pytest.LogCaptureFixture, key: Any, error: type[Exception]
) -> None:
    letters: list[DeadLetter] = []
    system.events.subscribe(DeadLetter, system.spawn(Recorder, letters))
    router = system.spawn(pool(Worker, [], size=2, routing=consistent_hash(key)), name="w")
    with pytest.raises(error):
        await router.ask(Who())
    router.tell(Job(1))
    await wait_all_tasks_blocked()
    assert [(letter.message, letter.why) for letter in letters] == [(Job(1), "no key")]
    assert router.is_alive
    assert "/w: the key function failed" in caplog.text


async def test_broadcast_tells_all_and_refuses_an_ask(system: ActorSystem) -> None:
    log: Handled = []
    router = system.spawn(pool(Worker, log, size=3, routing=broadcast()), name="w")
    router.tell(Job(1))
    await wait_all_tasks_blocked()
    assert log == [("/w/0", 1), ("/w/1", 1), ("/w/2", 1)]
    with pytest.raises(ActorError, match="/w broadcasts, so the ask of Who has no single answer"):
        await router.ask(Who())


@pytest.mark.parametrize("routing", SINGLE, ids=named)
async def test_messages_of_one_sender_keep_their_order_at_each_routee(
    system: ActorSystem, routing: Callable[[], Routing]
) -> None:
    log: Handled = []
    router = system.spawn(pool(Worker, log, size=3, routing=routing()))

    async def send(first: int) -> None:
        for n in range(first, first + 100):
            await router.send(Job(n))
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        for first in (0, 100, 200):
            nursery.start_soon(send, first)
    await wait_all_tasks_blocked()
    assert sorted(n for _, n in log) == list(range(300))
    for numbers in by_worker(log).values():
        for first in (0, 100, 200):
            mine = [n for n in numbers if first <= n < first + 100]
            assert mine == sorted(mine)


@pytest.mark.parametrize("routing", SINGLE, ids=named)
async def test_an_ask_is_answered_by_a_routee_straight_away(
    system: ActorSystem, routing: Callable[[], Routing]
) -> None:
    router = system.spawn(pool(Worker, [], size=2, routing=routing()), name="w")
    assert await router.ask(Who()) in ("/w/0", "/w/1")
    answer = await trio.to_thread.run_sync(router.from_thread.ask, Who())
    assert answer in ("/w/0", "/w/1")
    assert system.statistics().late_replies == 0


@pytest.mark.parametrize("routing", SINGLE, ids=named)
async def test_an_ask_fails_at_once_when_its_routee_ends(
    system: ActorSystem, autojump_clock: MockClock, routing: Callable[[], Routing]
) -> None:
    router = system.spawn(pool(Worker, [], size=1, routing=routing(), supervise="stop"), name="w")

    async def kill() -> None:
        await trio.sleep(1)
        worker = system.lookup("/w/0")
        assert worker is not None
        worker.kill()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(kill)
        with pytest.raises(ActorStopped) as stopped:
            await router.ask(Nap(100.0), timeout=None)
    assert trio.current_time() == pytest.approx(1.0)
    assert (stopped.value.actor, stopped.value.reason) == ("/w/0", Killed())


# ---------------------------------------------------------------- routees that fail, end, are replaced


@pytest.mark.parametrize("routing", ROUTINGS, ids=named)
async def test_a_routee_that_fails_starts_again_and_goes_on(
    system: ActorSystem, routing: Callable[[], Routing]
) -> None:
    log: Handled = []
    router = system.spawn(pool(Worker, log, size=2, routing=routing()), name="w")
    for n in range(4):
        router.tell(Fail(n) if n == 1 else Job(n))
    await wait_all_tasks_blocked()
    assert {n for _, n in log} == {0, 1, 2, 3}
    assert system.statistics().restarts == (2 if routing is broadcast else 1)
    assert [child.path for child in system.observe.tree().children[0].children] == ["/w/0", "/w/1"]


async def test_a_routee_that_stops_leaves_and_the_pool_ends_with_the_last(system: ActorSystem) -> None:
    router = system.spawn(pool(Worker, [], size=2), name="w")
    router.tell(Leave())
    await wait_all_tasks_blocked()
    assert [await router.ask(Who()) for _ in range(2)] == ["/w/1", "/w/1"]
    router.tell(Leave())
    assert await router.terminated() == Normal()
    with pytest.raises(ActorStopped):
        await router.ask(Who())


async def test_a_permanent_routee_is_always_replaced(system: ActorSystem) -> None:
    router = system.spawn(pool(Worker, [], size=1, supervise=restart("permanent")), name="w")
    router.tell(Leave())
    assert await router.ask(Who()) == "/w/0"
    assert system.statistics().restarts == 1


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("routing", [round_robin, pull], ids=named)
async def test_a_routee_that_fails_too_often_is_a_failure_of_the_router(
    system: ActorSystem, size: int, routing: Callable[[], Routing]
) -> None:
    described = pool(Worker, [], size=size, routing=routing(), supervise=restart(max=0))
    router = system.spawn(described, name="w", supervise=restart())
    router.tell(Fail())
    await wait_all_tasks_blocked()
    # The router starts again, with a full set of routees.
    assert router.is_alive
    assert sorted(child.path for child in system.observe.tree().children[0].children) == [
        f"/w/{n}" for n in range(size)
    ]
    assert await router.ask(Who()) in {"/w/0", "/w/1"}


@pytest.mark.parametrize("routing", ROUTINGS, ids=named)
def test_a_failure_of_the_last_routee_is_never_mistaken_for_an_orderly_end(routing: Callable[[], Routing]) -> None:
    async def scenario(system: ActorSystem) -> None:
        described = pool(Worker, [], size=1, routing=routing(), supervise=restart(max=0))
        router = system.spawn(described, supervise=restart())
        router.tell(Fail())
        await wait_all_tasks_blocked()
        assert router.is_alive

    explore(scenario, seeds=range(30))


@pytest.mark.parametrize("routing", [round_robin, pull], ids=named)
async def test_a_factory_that_fails_is_a_failure_of_the_router(
    system: ActorSystem, routing: Callable[[], Routing]
) -> None:
    failures: list[ActorFailed] = []
    system.events.subscribe(ActorFailed, system.spawn(Recorder, failures))
    made = 0

    def make() -> Worker:
        nonlocal made
        made += 1
        if made > 1:
            raise OSError("no more")
        return Worker([])

    router = system.spawn(pool(make, size=1, routing=routing()), name="w")
    assert await router.ask(Who()) == "/w/0"
    router.tell(Resize(2))
    reason = await router.terminated()
    assert isinstance(reason, Failed)
    assert isinstance(reason.error, OSError)
    await wait_all_tasks_blocked()
    assert [event.ref for event in failures] == [router]


async def test_ending_the_router_ends_its_routees_after_what_they_have(
    system: ActorSystem, autojump_clock: MockClock
) -> None:
    for routing in (round_robin(), pull()):
        log: Handled = []
        router = system.spawn(pool(Worker, log, size=2, routing=routing))
        for n in range(6):
            router.tell(Slow(n))
        router.stop()
        assert await router.terminated() == Shutdown()
        assert sorted(n for _, n in log) == [0, 1, 2, 3, 4, 5]
    assert system.statistics().actors == 0


# ---------------------------------------------------------------- full mailboxes


async def test_a_message_moves_on_where_there_is_room_and_is_a_dead_letter_if_there_is_none(
    system: ActorSystem, autojump_clock: MockClock
) -> None:
    log: Handled = []
    letters: list[DeadLetter] = []
    system.events.subscribe(DeadLetter, system.spawn(Recorder, letters))
    router = system.spawn(pool(Worker, log, size=2, mailbox=bounded(1)), name="w")
    await router.ask(Who())
    await router.ask(Who())
    router.tell(Slow(0))
    router.tell(Job(1))
    await wait_all_tasks_blocked()
    # 0 sleeps, and 2 waits for it; 3 sleeps beside, and 4, whose turn it is behind 2, moves on to wait for that.
    for n in (2, 3, 4, 5):
        router.tell(Slow(n))
        await wait_all_tasks_blocked()
    assert [(letter.message, letter.to, letter.why) for letter in letters] == [(Slow(5), router, "mailbox full")]
    await trio.sleep(5)
    assert sorted(by_worker(log).items()) == [("/w/0", [0, 2]), ("/w/1", [1, 3, 4])]


async def test_consistent_hash_never_moves_a_message_on(system: ActorSystem, autojump_clock: MockClock) -> None:
    log: Handled = []
    letters: list[DeadLetter] = []
    system.events.subscribe(DeadLetter, system.spawn(Recorder, letters))
    router = system.spawn(pool(Worker, log, size=4, routing=consistent_hash(lambda m: "x"), mailbox=bounded(1)))
    router.tell(Slow(0))
    await wait_all_tasks_blocked()
    router.tell(Slow(1))
    router.tell(Slow(2))
    await trio.sleep(5)
    assert [letter.message for letter in letters] == [Slow(2)]
    assert len({path for path, _ in log}) == 1


async def test_an_ask_waits_for_room_moves_on_or_fails_as_the_routees_mailbox_says(
    system: ActorSystem, autojump_clock: MockClock
) -> None:
    waiting = system.spawn(pool(Worker, [], size=1, mailbox=bounded(1)), name="waiting")
    raising = system.spawn(pool(Worker, [], size=2, mailbox=bounded(1, overflow="raise")), name="raising")
    for router in (waiting, raising):
        await router.ask(Who())
        router.tell(Slow(1))
        await wait_all_tasks_blocked()
        router.tell(Slow(2))
    assert await waiting.ask(Who()) == "/waiting/0"
    assert trio.current_time() == pytest.approx(2.0)
    for n in range(2):
        for _ in range(2):
            raising.tell(Slow(n))
        await wait_all_tasks_blocked()
    with pytest.raises(MailboxFull) as full:
        await raising.ask(Who())
    assert full.value.message == Who()
    await trio.sleep(5)
    assert await raising.ask(Who()) in ("/raising/0", "/raising/1")


# ---------------------------------------------------------------- who waits for whom


@message
class Again(Asks[str]):
    """Ask the router from inside a routee."""

    router: Ref[Any]


class Delegate(Actor[Again | Who]):
    @handles
    async def again(self, m: Again) -> str:
        return await m.router.ask(Who())

    @handles
    def who(self, m: Who) -> str:
        return self.ref.path


@pytest.mark.parametrize("routing", [round_robin, pull], ids=named)
async def test_a_routee_that_asks_its_router_is_answered_by_another_one(
    system: ActorSystem, routing: Callable[[], Routing]
) -> None:
    router = system.spawn(pool(Delegate, size=2, routing=routing()), name="w")
    for _ in range(4):
        assert await router.ask(Again(router)) in ("/w/0", "/w/1")
    assert system.observe.waits() == []


async def test_a_circle_through_a_router_is_refused_with_all_its_members(system: ActorSystem) -> None:
    alone: Ref[Any] = system.spawn(pool(Delegate, size=1), name="w")
    with pytest.raises(ActorStopped) as stopped:
        await alone.ask(Again(alone))
    assert isinstance(stopped.value.__cause__, AskCycle)
    assert stopped.value.__cause__.cycle == ("/w/0", "/w/0")

    class Friend(Actor[Who]):
        router: Ref[Any]
        question: Callable[[Friend], Any]

        @handles
        async def who(self, m: Who) -> str:
            return await self.router.ask(self.question(self))

    # The routee's ask of its asker's closes the circle.
    friend = system.spawn(Friend, alone, lambda self: Again(self.ref), name="friend")
    with pytest.raises(ActorStopped) as stopped:
        await friend.ask(Who())
    assert stopped.value.__cause__ is not None
    circle = stopped.value.__cause__.__cause__
    assert isinstance(circle, AskCycle)
    assert circle.cycle == ("/w/0", "/friend", "/w/0")

    # The router's handing on closes it.
    alone = system.spawn(pool(Delegate, size=1), name="v")
    other = system.spawn(Friend, alone, lambda self: Who(), name="other")
    with pytest.raises(ActorStopped) as stopped:
        await alone.ask(Again(other))
    assert stopped.value.__cause__ is not None
    circle = stopped.value.__cause__.__cause__
    assert isinstance(circle, AskCycle)
    assert circle.cycle == ("/other", "/v/0", "/other")


# ---------------------------------------------------------------- resize


@pytest.mark.parametrize("routing", ROUTINGS, ids=named)
async def test_resize_adds_at_once_and_lets_the_last_ones_finish(
    system: ActorSystem, autojump_clock: MockClock, routing: Callable[[], Routing]
) -> None:
    log: Handled = []
    router = system.spawn(pool(Worker, log, size=1, routing=routing()), name="w")

    def places() -> list[str]:
        return sorted(child.path for child in system.observe.tree().children[0].children)

    router.tell(Resize(4))
    await wait_all_tasks_blocked()
    assert places() == ["/w/0", "/w/1", "/w/2", "/w/3"]
    for n in range(8):
        router.tell(Slow(n))
    await wait_all_tasks_blocked()
    router.tell(Resize(2))
    router.tell(Resize(3))
    await trio.sleep(20)
    # A place that was just given up is not free before its routee has gone.
    assert places() == ["/w/0", "/w/1", "/w/4"]
    assert Counter(n for _, n in log) == dict.fromkeys(range(8), 4 if routing is broadcast else 1)
    router.tell(Resize(4))
    await wait_all_tasks_blocked()
    assert places() == ["/w/0", "/w/1", "/w/2", "/w/4"]


@pytest.mark.parametrize("routing", ROUTINGS, ids=named)
def test_a_resize_costs_the_same_for_each_routee(routing: Callable[[], Routing]) -> None:
    """Counted in lines of levada that run, which are the same on any machine."""

    def lines(size: int) -> int:
        count = 0

        def trace(frame: FrameType, event: str, _: object) -> Any:
            nonlocal count
            if "levada" not in frame.f_code.co_filename:
                return None
            count += event == "line"
            return trace

        async def main() -> None:
            async with ActorSystem() as system:
                router = system.spawn(pool(Worker, [], size=1, routing=routing()))
                await wait_all_tasks_blocked()
                before = sys.gettrace()
                sys.settrace(trace)
                try:
                    for wanted in (size, 1):
                        router.tell(Resize(wanted))
                        await wait_all_tasks_blocked()
                finally:
                    sys.settrace(before)
                assert len(system.observe.tree().children[0].children) == 1

        trio.run(main)
        return count

    few, many = lines(20), lines(60)
    assert 20 < few < many < 3.5 * few


def test_what_makes_no_sense_is_refused_where_it_is_written() -> None:
    with pytest.raises(ConfigurationError, match="is 0, wanted 1 routee or more"):
        pool(Worker, [], size=0)
    with pytest.raises(ConfigurationError, match="got 5, wanted an Actor class or a factory"):
        pool(5, size=1)  # type: ignore[call-overload]
    with pytest.raises(ConfigurationError, match="wanted round_robin"):
        pool(Worker, [], size=1, routing=round_robin)  # type: ignore[call-overload]
    with pytest.raises(ConfigurationError, match="virtual_nodes is 0, wanted 1 or more"):
        consistent_hash(str, virtual_nodes=0)
    with pytest.raises(ConfigurationError, match="function of a message"):
        consistent_hash("key")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="size"):
        Resize(0)
    with pytest.raises(TypeError):
        Resize("4")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Resize cannot travel"):  # a peer that holds the ref of a pool cannot tell it
        Codec().encode(Resize(4))


# ---------------------------------------------------------------- groups


async def test_a_group_routes_to_whoever_is_a_member_now(system: ActorSystem) -> None:
    log: Handled = []
    letters: list[DeadLetter] = []
    system.events.subscribe(DeadLetter, system.spawn(Recorder, letters))
    router = system.spawn(group("topic"), name="r")
    router.tell(Job(0))
    with pytest.raises(ActorError, match="/r has no routees now"):
        await router.ask(Who())
    workers = [system.spawn(Worker, log, name=name) for name in ("a", "b", "c")]
    for worker in workers:
        system.groups.join("topic", worker)
    assert [await router.ask(Who()) for _ in range(4)] == ["/a", "/b", "/c", "/a"]
    system.groups.leave("topic", workers[0])
    workers[1].kill()
    await workers[1].terminated()
    assert [await router.ask(Who()) for _ in range(2)] == ["/c", "/c"]
    assert [(letter.message, letter.why) for letter in letters] == [(Job(0), "no routee")]


@pytest.mark.parametrize("routing", ROUTINGS, ids=named)
async def test_a_member_that_has_left_or_ended_gets_no_more_messages(
    system: ActorSystem, routing: Callable[[], Routing]
) -> None:
    log: Handled = []
    letters: list[DeadLetter] = []
    system.events.subscribe(DeadLetter, system.spawn(Recorder, letters))
    router = system.spawn(group("topic", routing=routing()))
    workers = [system.spawn(Worker, log, name=name) for name in ("a", "b", "c")]
    for worker in workers:
        system.groups.join("topic", worker)
    router.tell(Job(0))
    await wait_all_tasks_blocked()
    log.clear()
    system.groups.leave("topic", workers[0])
    workers[1].kill()
    await workers[1].terminated()
    for n in range(20):
        router.tell(Job(n))
    await wait_all_tasks_blocked()
    assert by_worker(log) == {"/c": list(range(20))}
    assert letters == []


async def test_a_group_cannot_be_resized(system: ActorSystem) -> None:
    unhandled: list[Unhandled] = []
    system.events.subscribe(Unhandled, system.spawn(Recorder, unhandled))
    router = system.spawn(group("topic"))
    router.tell(Resize(2))
    await wait_all_tasks_blocked()
    assert [(event.message, event.to) for event in unhandled] == [(Resize(2), router)]


@pytest.mark.parametrize("routing", ROUTINGS, ids=named)
async def test_a_group_router_that_ended_hears_nothing_more(
    system: ActorSystem, routing: Callable[[], Routing]
) -> None:
    log: Handled = []
    router = system.spawn(group("topic", routing=routing()), supervise=restart())
    worker = system.spawn(Worker, log)
    system.groups.join("topic", worker)
    router.tell(Job(1))
    await wait_all_tasks_blocked()
    router.kill()  # starts again
    router.tell(Job(2))
    await wait_all_tasks_blocked()
    router.stop()
    assert await router.terminated() == Shutdown()
    assert [n for _, n in log] == [1, 2]
    system.groups.leave("topic", worker)
    assert system.groups._subscribers == {}


async def test_a_pull_group_keeps_messages_until_there_is_a_member(system: ActorSystem) -> None:
    log: Handled = []
    router = system.spawn(group("topic", routing=pull()))
    for n in range(3):
        router.tell(Job(n))
    await wait_all_tasks_blocked()
    worker = system.spawn(Worker, log)
    system.groups.join("topic", worker)
    await wait_all_tasks_blocked()
    assert [n for _, n in log] == [0, 1, 2]
    system.groups.leave("topic", worker)
    system.groups.join("topic", worker)
    router.tell(Job(3))
    await wait_all_tasks_blocked()
    assert [n for _, n in log] == [0, 1, 2, 3]
    system.groups.leave("topic", worker)
    router.tell(Job(4))
    router.stop()
    assert await router.terminated() == Shutdown()
    assert [n for _, n in log] == [0, 1, 2, 3]


# ---------------------------------------------------------------- pull


async def test_pull_gives_the_oldest_message_to_whoever_is_free(system: ActorSystem, autojump_clock: MockClock) -> None:
    log: Handled = []
    router = system.spawn(pool(Worker, log, size=2, routing=pull()), name="w")
    for n, seconds in enumerate([5.0, 1.0, 1.0, 1.0, 1.0]):
        router.tell(Slow(n, seconds))
    await trio.sleep(4.5)
    first, second = (path for path, n in log if n in (0, 1))
    assert log == [(first, 0), (second, 1), (second, 2), (second, 3), (second, 4)]


async def test_pull_holds_senders_back_by_the_routers_own_bound(system: ActorSystem, autojump_clock: MockClock) -> None:
    log: Handled = []
    router = system.spawn(pool(Worker, log, size=2, routing=pull()), mailbox=bounded(3))
    sent: list[tuple[int, float]] = []
    for n in range(9):
        await router.send(Slow(n))
        sent.append((n, trio.current_time()))
        await wait_all_tasks_blocked()
    # Two at work, three in the mailbox; senders that wait are let in together when those three have been taken.
    assert sent == [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (5, 2), (6, 2), (7, 2), (8, 2)]
    with pytest.raises(MailboxFull):
        router.tell(Job(9))
    await trio.sleep(10)
    assert [n for _, n in log] == list(range(9))


async def test_pull_loses_only_the_message_in_hand_when_a_routee_dies(
    system: ActorSystem, autojump_clock: MockClock
) -> None:
    log: Handled = []
    router = system.spawn(pool(Worker, log, size=2, routing=pull(), supervise="stop"), name="w")
    for n in range(6):
        router.tell(Slow(n, 10.0 if n == 0 else 1.0))
    await trio.sleep(0.5)
    victim = system.lookup(next(path for path, n in log if n == 0))
    assert victim is not None
    victim.kill()
    await trio.sleep(10)
    assert [n for _, n in log] == [0, 1, 2, 3, 4, 5]
    assert len({path for path, n in log if n}) == 1


async def test_pull_passes_over_a_routee_that_waits_for_its_new_start(
    system: ActorSystem, autojump_clock: MockClock
) -> None:
    log: Handled = []
    patient = restart(initial_backoff=60.0, max_backoff=60.0, jitter=0.0)
    router = system.spawn(pool(Worker, log, size=2, routing=pull(), supervise=patient), name="w")
    await wait_all_tasks_blocked()
    first = system.lookup("/w/0")
    assert first is not None
    for _ in range(2):  # its second restart in a row comes after a minute
        first.kill()
        await wait_all_tasks_blocked()
    for n in range(4):
        router.tell(Job(n))
    await wait_all_tasks_blocked()
    assert log == [("/w/1", 0), ("/w/1", 1), ("/w/1", 2), ("/w/1", 3)]


@pytest.mark.parametrize("supervise", ["stop", restart()], ids=["replaced by nobody", "restarted"])
@given(data=st.data())
def test_pull_handles_each_message_at_most_once_and_loses_none_that_was_not_begun(
    supervise: Supervision, data: st.DataObject
) -> None:
    kinds = data.draw(st.lists(st.sampled_from(["job", "slow", "fail"]), min_size=1, max_size=25), label="messages")
    kills = data.draw(st.lists(st.tuples(st.floats(0, 5), st.integers(0, 2)), max_size=4), label="kills")
    capacity = data.draw(st.sampled_from([1, 3, 100]), label="capacity")

    async def main() -> tuple[Handled, int, int]:
        log: Handled = []
        async with ActorSystem(seed=0) as system:
            policy = restart(max=100) if supervise != "stop" else supervise
            # One worker never dies, so that there is always somebody.
            router = system.spawn(group("g", routing=pull()), mailbox=bounded(capacity), name="r")
            immortal = system.spawn(Worker, log, supervise=restart(max=100))
            system.groups.join("g", immortal)
            workers = [system.spawn(Worker, log, supervise=policy) for _ in range(3)]
            for worker in workers:
                system.groups.join("g", worker)

            async def kill(after: float, which: int) -> None:
                await trio.sleep(after)
                workers[which].kill()

            async with trio.open_nursery() as nursery:
                for after, which in kills:
                    nursery.start_soon(kill, after, which)
                for n, kind in enumerate(kinds):
                    await router.send({"job": Job, "slow": Slow, "fail": Fail}[kind](n))
            router.stop()
            await router.terminated()
            await trio.sleep(60)
            dead = system.statistics().dead_letters
            return log, dead, system.statistics().actors

    logging.getLogger("levada").setLevel(logging.CRITICAL)
    try:
        log, dead, _ = trio.run(main, clock=MockClock(autojump_threshold=0))
    finally:
        logging.getLogger("levada").setLevel(logging.NOTSET)
    assert sorted(n for _, n in log) == list(range(len(kinds)))
    assert [n for _, n in log] == sorted(n for _, n in log)
    assert dead == 0


def test_pull_keeps_its_promise_under_every_schedule() -> None:
    class Chatty(Worker):
        """Gives way in the middle of a job, sometimes for good."""

        @handles
        async def slow(self, m: Slow) -> None:
            self.log.append((self.ref.path, m.n))
            await trio.sleep(m.seconds)
            self.log.append(("done", m.n))

    async def scenario(system: ActorSystem) -> None:
        log: Handled = []
        lot = system.random
        router = system.spawn(
            pool(Chatty, log, size=3, routing=pull(), supervise=restart("permanent", max=100)), mailbox=bounded(2)
        )
        begun_by_the_dead: set[int] = set()
        for n in range(30):
            await router.send(Slow(n, lot.choice([0.0, 0.0, 1.0])))
            if n % 5 == 4:
                await router.send(Resize(lot.randint(1, 4)))
                victims = router._actor.children  # type: ignore[attr-defined]
                if victims:
                    begun_by_the_dead |= {m for where, m in log if where != "done"} - {
                        m for where, m in log if where == "done"
                    }
                    lot.choice(victims).kill()
        router.stop()
        await router.terminated()
        begun = [n for where, n in log if where != "done"]
        done = [n for where, n in log if where == "done"]
        assert begun == list(range(30))
        assert len(done) == len(set(done))
        assert set(begun) - set(done) <= begun_by_the_dead

    assert (
        explore(scenario, seeds=range(40), system=functools.partial(ActorSystem, shutdown_timeout=100.0)).interleavings
        == 40
    )


async def test_pull_serves_loops_too(system: ActorSystem, autojump_clock: MockClock) -> None:
    got: list[tuple[str, int, float]] = []

    class Loop(Actor[Slow | Who]):
        async def run(self) -> None:
            async for m in self.mailbox:
                if isinstance(m, Who):
                    self.reply_later().send(self.ref.path)
                else:
                    got.append((self.ref.path, m.n, trio.current_time()))
                    await trio.sleep(m.seconds)

    router = system.spawn(pool(Loop, size=2, routing=pull()), name="w")
    for n in range(4):
        router.tell(Slow(n))
    assert await router.ask(Who()) in ("/w/0", "/w/1")
    assert [(n, at) for _, n, at in got] == [(0, 0.0), (1, 0.0), (2, 1.0), (3, 1.0)]
    assert len({path for path, n, _ in got if n < 2}) == 2
    router.stop()
    await router.terminated()


async def test_pull_takes_a_resize_before_what_is_queued(system: ActorSystem, autojump_clock: MockClock) -> None:
    log: Handled = []
    router = system.spawn(pool(Worker, log, size=1, routing=pull()), mailbox=bounded(100), name="w")
    for n in range(10):
        router.tell(Slow(n))
    await wait_all_tasks_blocked()
    router.tell(Resize(10))
    await trio.sleep(0.5)
    assert len(log) == 10
    assert len({path for path, _ in log}) == 10


async def test_pull_works_behind_every_kind_of_mailbox(system: ActorSystem, autojump_clock: MockClock) -> None:
    log: Handled = []
    router = system.spawn(pool(Worker, log, size=1, routing=pull()), mailbox=bounded(2, overflow="drop_old"))
    router.tell(Slow(0))
    await wait_all_tasks_blocked()
    for n in range(1, 5):
        router.tell(Slow(n))
    await trio.sleep(5)
    assert [n for _, n in log] == [0, 3, 4]
    inner: Handled = []
    dropping = system.spawn(
        pool(Worker, inner, size=1, routing=pull(), mailbox=bounded(1, overflow="drop_old")), name="d"
    )
    for n in range(3):
        dropping.tell(Slow(n))
    await trio.sleep(5)
    assert [n for _, n in inner] == [0, 1, 2]


async def test_a_question_withdrawn_in_a_pull_router_is_never_begun(
    system: ActorSystem, autojump_clock: MockClock
) -> None:
    log: Handled = []
    router = system.spawn(pool(Worker, log, size=1, routing=pull()))
    router.tell(Slow(1, 5.0))
    await wait_all_tasks_blocked()
    with trio.move_on_after(1) as scope:
        await router.ask(Nap(50.0), timeout=None)
    assert scope.cancelled_caught
    await trio.sleep(5)
    start = trio.current_time()
    await router.ask(Who())
    assert trio.current_time() == start


async def test_killing_a_pull_router_ends_everything_and_hands_back_what_waits(
    system: ActorSystem, autojump_clock: MockClock
) -> None:
    letters: list[DeadLetter] = []
    system.events.subscribe(DeadLetter, system.spawn(Recorder, letters))
    log: Handled = []
    router = system.spawn(pool(Worker, log, size=2, routing=pull()))
    for n in range(5):
        router.tell(Slow(n))
    await wait_all_tasks_blocked()
    router.kill()
    assert await router.terminated() == Killed()
    await wait_all_tasks_blocked()
    assert [letter.message.n for letter in letters] == [2, 3, 4]
    assert system.statistics().actors == 1


@attrs.frozen
class NotAMessage:
    """Any object will do."""

    n: int


async def test_anything_can_be_routed(system: ActorSystem) -> None:
    for routing in (round_robin(), pull(), broadcast()):
        got: list[Any] = []
        router: Ref[Any] = system.spawn(pool(Recorder, got, size=1, routing=routing))
        things = [1, "two", None, NotAMessage(4), (5,), {"six": 6}]
        for thing in things:
            router.tell(thing)
        await wait_all_tasks_blocked()
        assert got == things


# ---------------------------------------------------------------- everything at once


def trouble(routing: Callable[[], Routing]) -> Callable[[ActorSystem], Any]:
    """Make a scenario of 40 random steps: messages, asks, failures, kills, resizes, ends of routees and of the router."""

    async def scenario(system: ActorSystem) -> None:
        lot = system.random
        log: Handled = []
        policies: list[Supervision] = [
            "stop",
            restart(max=50),
            restart("permanent", max=50),
            restart(initial_backoff=0.1, max_backoff=1.0),
        ]
        described = pool(
            Worker,
            log,
            size=lot.randint(1, 3),
            routing=routing(),
            supervise=lot.choice(policies),
            mailbox=lot.choice([None, bounded(1), bounded(1, overflow="raise")]),
        )
        mailbox = lot.choice([None, bounded(2), bounded(2, overflow="drop_old")])
        router: Ref[Any] = system.spawn(described, mailbox=mailbox, supervise=lot.choice(policies[:2]))
        asked: list[int] = []
        settled: list[int] = []

        async def ask(n: int) -> None:
            try:
                await router.ask(lot.choice([Who(), Nap(0.3)]), timeout=60)
            except AskTimeout:
                return
            except ActorError:
                pass  # stopped, full, no routee, refused: an outcome all the same
            settled.append(n)

        async def step(n: int, nursery: trio.Nursery) -> None:
            match lot.randint(0, 7):
                case 0:
                    await router.send(Resize(lot.randint(1, 4)))
                case 1 if router.is_alive and router._actor.children:  # type: ignore[attr-defined]
                    lot.choice(router._actor.children).kill()  # type: ignore[attr-defined]
                case 2:
                    await router.send(Fail(n))
                case 3 if lot.random() < 0.3:
                    await router.send(Leave())
                case 4:
                    asked.append(n)
                    nursery.start_soon(ask, n)
                case 5:
                    await router.send(Slow(n, lot.random()))
                case 6 if lot.random() < 0.2:
                    router.kill()
                case _:
                    router.tell(Job(n))

        async with trio.open_nursery() as nursery:
            for n in range(40):
                try:
                    await step(n, nursery)
                except (ActorStopped, MailboxFull):
                    pass
                if lot.random() < 0.2:
                    await trio.sleep(lot.random())
        assert sorted(settled) == asked  # none hung
        router.stop()
        await router.terminated()
        await wait_all_tasks_blocked()
        assert system.statistics().actors == 0
        if routing is not broadcast:
            assert max(Counter(n for _, n in log).values(), default=1) == 1

    return scenario


@pytest.mark.parametrize("routing", ROUTINGS, ids=named)
def test_in_any_trouble_no_ask_hangs_nothing_is_handled_twice_and_nobody_is_left_over(
    routing: Callable[[], Routing], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "levada")
    explore(trouble(routing), seeds=range(15))
