"""`explore`: the same seed is the same interleaving; other seeds find what one order hides."""

from __future__ import annotations

import functools
import gc
import pickle
from typing import Any

import pytest
import trio
import trio.testing

from levada.framework import Actor, ActorSystem, Asks, Killed, Ref, bounded, handles, message
from levada.framework.router import pool, pull
from levada.framework.testing import ScheduleFailure, Turn, explore, strict
from levada.framework.testing.clock import deterministic


@message
class Get(Asks[int]):
    pass


@message
class Put:
    value: int


@message
class Add:
    n: int


@message
class Pay(Asks[None]):
    amount: int


class Account(Actor[Get | Put | Add]):
    balance: int = 0

    @handles
    def get(self, m: Get) -> int:
        return self.balance

    @handles
    def put(self, m: Put) -> None:
        self.balance = m.value

    @handles
    def add(self, m: Add) -> None:
        self.balance += m.n


class Hasty(Actor[Pay]):
    """Reads, then writes what follows from what it has read: the planted race."""

    account: Ref[Any]

    @handles
    async def pay(self, m: Pay) -> None:
        balance = await self.account.ask(Get())
        self.account.tell(Put(balance + m.amount))


class Careful(Actor[Pay]):
    """Says what to change."""

    account: Ref[Any]

    @handles
    async def pay(self, m: Pay) -> None:
        await self.account.ask(Get())
        self.account.tell(Add(m.amount))


async def two_pay(teller: type[Actor[Pay]], system: ActorSystem) -> None:
    account = system.spawn(Account, name="account")
    async with trio.open_nursery() as nursery:
        for n in range(2):
            nursery.start_soon(system.spawn(teller, account, name=f"teller{n}").ask, Pay(10))
    assert await account.ask(Get()) == 20


def test_a_lost_update_is_found_and_repeated_by_its_seed() -> None:
    scenario = functools.partial(two_pay, Hasty)
    with pytest.raises(
        ScheduleFailure, match=r"failed under schedule seed (\d+) \(repeat it: explore\(…, seeds=\[\1\]\)\)"
    ) as found:
        explore(scenario, seeds=range(20))
    seed = found.value.seed
    assert isinstance(found.value.__cause__, AssertionError)
    with pytest.raises(ScheduleFailure) as again:
        explore(scenario, seeds=[seed])
    assert (again.value.seed, again.value.trace) == (seed, found.value.trace)
    assert Turn("/account", ("Put",)) in found.value.trace
    assert "/account: Put" in str(found.value)


def test_what_has_no_race_passes_under_all_of_them() -> None:
    explored = explore(functools.partial(two_pay, Careful), seeds=range(50))
    assert list(explored.traces) == list(range(50))
    assert explored.interleavings > 10


# ---------------------------------------------------------------- the same seed, the same interleaving


class Chatter(Actor[Add | Get]):
    """Sleeps, sends, asks: everything that lets somebody else go first."""

    others: list[Ref[Any]]
    log: list[Any]
    lot: Any
    left: int = 20

    @handles
    async def add(self, m: Add) -> None:
        self.log.append((self.ref.path, m.n, trio.current_time()))
        if self.left:
            self.left -= 1
            await self.others[m.n % len(self.others)].send(Add(m.n + 1))
            if m.n % 3 == 0:
                await trio.sleep(self.lot.random())
            if m.n % 5 == 0:
                self.start_soon(trio.sleep, self.lot.random())

    @handles
    def get(self, m: Get) -> int:
        return len(self.log)


async def chat(logs: list[list[Any]], system: ActorSystem) -> None:
    log: list[Any] = []
    logs.append(log)
    others: list[Ref[Any]] = []
    for n in range(4):
        others.append(system.spawn(Chatter, others, log, system.random, name=f"chatter{n}"))
    jobs: list[Any] = []
    workers = system.spawn(pool(Chatter, others, jobs, system.random, size=2, routing=pull()), mailbox=bounded(2))
    for n in range(5):
        others[n % 4].tell(Add(n))
        await workers.send(Add(n))
        log.append(await others[0].ask(Get()))
    await trio.sleep(2)
    others[1].kill()
    assert await others[1].terminated() == Killed()


def test_the_same_seed_is_the_same_interleaving_down_to_the_last_message() -> None:
    first: list[list[Any]] = []
    second: list[list[Any]] = []
    explored = explore(functools.partial(chat, first), seeds=range(15))
    # Other objects, other addresses, another state of trio's own generator, of the collector, of the clock.
    garbage = [object() for _ in range(12345)]
    trio.run(trio.sleep, 0)
    again = explore(functools.partial(chat, second), seeds=range(15))
    assert again.traces == explored.traces
    assert first == second
    assert explored.interleavings == 15
    assert len({str(log) for log in first}) == 15
    del garbage


def test_messages_of_one_sender_stay_in_order_under_every_schedule() -> None:
    async def scenario(system: ActorSystem) -> None:
        got: list[int] = []

        class Sink(Actor[Add]):
            @handles
            def add(self, m: Add) -> None:
                got.append(m.n)

        sink = system.spawn(Sink, mailbox=bounded(3))
        for n in range(20):
            await sink.send(Add(n))
        sink.stop()
        await sink.terminated()
        assert got == list(range(20))

    explore(scenario, seeds=range(30))


def test_a_kill_still_overtakes_everything() -> None:
    async def scenario(system: ActorSystem) -> None:
        handled: list[int] = []

        class Sink(Actor[Add]):
            @handles
            def add(self, m: Add) -> None:
                handled.append(m.n)

        sinks = [system.spawn(Sink) for _ in range(5)]
        for sink in sinks:
            sink.tell(Add(1))
        for sink in sinks:
            sink.kill()
        for sink in sinks:
            await sink.terminated()
        assert handled == []

    explore(scenario, seeds=range(30))


# ---------------------------------------------------------------- the edges


def test_a_scenario_that_hangs_is_a_failure_after_virtual_time() -> None:
    async def scenario(system: ActorSystem) -> None:
        await trio.sleep_forever()

    with pytest.raises(ScheduleFailure, match="did not end within 3600 s of virtual time"):
        explore(scenario, seeds=[0])


def test_an_error_that_ends_the_system_is_a_failure_of_the_schedule() -> None:
    async def scenario(system: ActorSystem) -> None:
        class Fragile(Actor[Add]):
            @handles
            def add(self, m: Add) -> None:
                raise OSError("gone")

        system.spawn(Fragile, supervise="escalate").tell(Add(1))
        await trio.sleep(1)

    with pytest.raises(ScheduleFailure, match=r"seed 7.*gone") as failure:
        explore(scenario, seeds=[7])
    assert isinstance(failure.value.__cause__, OSError)


def test_the_system_may_have_settings_and_be_strict() -> None:
    seen: list[Any] = []

    async def scenario(system: ActorSystem) -> None:
        seen.append((system.name, system.ask_timeout))
        await two_pay(Careful, system)

    explore(scenario, seeds=range(3), system=functools.partial(strict(codec=True), "mine", ask_timeout=1.0))
    assert seen == [("mine", 1.0)] * 3


def test_trio_and_the_collector_are_as_before_afterwards() -> None:
    run: Any = trio._core._run
    before = (run._r.getstate(), run._ALLOW_DETERMINISTIC_SCHEDULING, run.CancelStatus, gc.isenabled())
    explore(functools.partial(two_pay, Careful), seeds=[1])
    with pytest.raises(ScheduleFailure):
        explore(functools.partial(two_pay, Hasty), seeds=range(20))
    assert (run._r.getstate(), run._ALLOW_DETERMINISTIC_SCHEDULING, run.CancelStatus, gc.isenabled()) == before


def test_the_tasks_of_a_scope_are_cancelled_in_the_order_of_their_start() -> None:
    cancelled: list[int] = []

    async def wait(number: int) -> None:
        def abort(_: Any) -> trio.lowlevel.Abort:
            cancelled.append(number)
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for number in range(100):
                nursery.start_soon(wait, number)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()

    with deterministic(0):
        trio.run(main)
    assert cancelled == list(range(100))


def test_scopes_with_the_same_deadline_end_in_the_order_of_their_start() -> None:
    ended: list[int] = []

    async def wait(number: int) -> None:
        def abort(_: Any) -> trio.lowlevel.Abort:
            ended.append(number)
            return trio.lowlevel.Abort.SUCCEEDED

        with trio.CancelScope(deadline=1.0):
            started.append(number)
            await trio.lowlevel.wait_task_rescheduled(abort)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for number in range(100):
                nursery.start_soon(wait, number)

    started: list[int] = []
    with deterministic(0):
        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert len(ended) == 100
    assert ended == started


def test_a_trio_without_the_seam_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(trio._core._run, "_r")
    with pytest.raises(RuntimeError, match=rf"trio {trio.__version__} offers no way"), deterministic(0):
        pass


def test_a_failure_survives_pickle() -> None:
    failure = ScheduleFailure(3, ValueError("x"), (Turn("/a", ("Add",)),))
    failure.__cause__ = ValueError("x")
    copy = pickle.loads(pickle.dumps(failure))
    assert (copy.seed, copy.trace, str(copy)) == (failure.seed, failure.trace, str(failure))
