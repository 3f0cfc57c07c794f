"""Reminders: kept with the events, fired after restarts, handled once."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

pytest.importorskip("pyarrow")

from levada.actors.durable import Durable, Shards, applies, entity, shards
from levada.actors.durable.reminders import Reminder, Reminders
from levada.framework import ActorSystem, Asks, Codec, handles, message
from levada.framework.errors import ActorStopped, ConfigurationError


@message("test.reminders.plan")
class Plan(Asks[list[str]]):
    at: float
    text: str
    key: str | None = None


@message("test.reminders.drop")
class Drop(Asks[bool]):
    key: str | None = None


@message("test.reminders.seen")
class Seen(Asks[list[str]]):
    pass


@message("test.reminders.ring")
class Ring(Asks[None]):
    text: str


@message("test.reminders.rang")
class Rang:
    text: str


BROKEN: set[str] = set()
FAILED: list[str] = []
"""What came while it was broken."""


class Clock(Durable[Plan | Ring | Seen | Drop]):
    rung: list[str] = attrs.field(factory=list)

    @handles
    def plan(self, m: Plan) -> list[str]:
        self.remind(m.at, Ring(m.text), key=m.key)
        if m.text == "fail":
            raise ValueError("after remind()")
        if m.text == "both":
            self.remind(m.at, Ring("other"), key="other")
            forgotten = [self.forget_reminder(key) for key in ("neither", "both", "both")]
            return [str(each) for each in forgotten]
        return self.rung

    @handles
    def drop(self, m: Drop) -> bool:
        return self.forget_reminder(m.key or Ring)

    @handles
    def ring(self, m: Ring) -> None:
        if m.text in BROKEN:
            FAILED.append(m.text)
            raise ValueError("broken")
        if m.text != "silent":
            self.record(Rang(m.text))
        if m.text == "again":
            self.remind(datetime.fromtimestamp(1200, UTC), Ring("twice"))

    @handles
    def seen(self, _: Seen) -> list[str]:
        return self.rung

    @applies
    def rang(self, e: Rang) -> None:
        self.rung.append(e.text)


class World(trio.abc.Clock):
    """A clock that the tests set, and trio's with it: pytest-trio takes a test's argument for that."""

    def __init__(self, rate: float = 0.0) -> None:
        self.now = 1000.0
        self._clock = trio.testing.MockClock(rate)

    def start_clock(self) -> None:
        self._clock.start_clock()

    def current_time(self) -> float:
        return self._clock.current_time()

    def deadline_to_sleep_time(self, deadline: float) -> float:
        return self._clock.deadline_to_sleep_time(deadline)

    def __call__(self) -> float:
        return self.now

    def jump(self, seconds: float) -> None:
        self.now += seconds
        self._clock.jump(seconds)


@pytest.fixture
def world() -> World:
    return World()


@asynccontextmanager
async def clocks_in(folder: Path, world: World, **settings: Any) -> AsyncIterator[Shards[Any]]:
    async with ActorSystem("test", ask_timeout=1e6, shutdown_timeout=1e6) as system:
        yield await shards(system, Clock, events=Rang, journal=folder, shards=1, clock=world, **settings)


async def rung(clocks: Shards[Any], *wanted: str, entity: str = "c") -> bool:
    """Whether an entity was reminded of this, once it is."""
    while (found := await clocks[entity].ask(Seen())) != list(wanted) and len(found) < len(wanted):
        await trio.lowlevel.checkpoint()
    return found == list(wanted)


async def test_a_reminder_comes_at_its_time(tmp_path: Path, world: World) -> None:
    async with clocks_in(tmp_path, world) as clocks:
        assert await clocks["c"].ask(Plan(1010, "tea")) == []
        assert await clocks["c"].ask(Plan(1005, "egg", key="egg")) == []
        world.jump(4)
        assert await clocks["c"].ask(Seen()) == []
        world.jump(2)
        assert await rung(clocks, "egg")
        world.jump(5)
        assert await rung(clocks, "egg", "tea")


async def test_a_late_reminder_comes_after_a_restart_and_only_once(tmp_path: Path, world: World) -> None:
    async with clocks_in(tmp_path, world) as clocks:
        await clocks["c"].ask(Plan(1010, "tea"))
        await clocks["d"].ask(Plan(1010, "silent"))
    world.jump(100)
    for _ in range(2):
        async with clocks_in(tmp_path, world) as clocks:
            assert await rung(clocks, "tea")
            world.jump(100)
            await trio.testing.wait_all_tasks_blocked()
            assert await rung(clocks, "tea")
            assert await clocks["d"].ask(Drop()) is False


async def test_reminders_outlive_snapshots_of_their_shard(tmp_path: Path, world: World) -> None:
    async with clocks_in(tmp_path, world, snapshot_every=4) as clocks:
        for number in range(20):
            await clocks["c"].ask(Plan(1010 + number, f"n{number}", key=f"k{number % 7}"))
    async with clocks_in(tmp_path, world, snapshot_every=4) as clocks:
        world.jump(100)
        assert await rung(clocks, *(f"n{number}" for number in range(13, 20)))


async def test_a_reminder_replaces_another_with_its_key_and_may_be_forgotten(tmp_path: Path, world: World) -> None:
    async with clocks_in(tmp_path, world) as clocks:
        await clocks["c"].ask(Plan(1010, "tea"))
        await clocks["c"].ask(Plan(1020, "coffee"))
        await clocks["c"].ask(Plan(1015, "egg", key="egg"))
        assert await clocks["c"].ask(Drop("egg")) is True
        assert await clocks["c"].ask(Drop("egg")) is False
        world.jump(100)
        assert await rung(clocks, "coffee")


async def test_a_reminder_of_this_command_is_forgotten_by_its_own_key_alone(tmp_path: Path, world: World) -> None:
    async with clocks_in(tmp_path, world) as clocks:
        assert await clocks["c"].ask(Plan(1010, "both", key="both")) == ["False", "True", "False"]
        world.jump(100)
        assert await rung(clocks, "other")


async def test_a_reminder_may_set_the_next_one(tmp_path: Path, world: World) -> None:
    async with clocks_in(tmp_path, world) as clocks:
        await clocks["c"].ask(Plan(1010, "again"))
        world.jump(100)
        assert await rung(clocks, "again")
        world.jump(200)
        assert await rung(clocks, "again", "twice")


async def test_a_reminder_of_a_failing_handler_is_not_set(
    tmp_path: Path, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "levada")
    async with clocks_in(tmp_path, world) as clocks:
        with pytest.raises(ActorStopped):
            await clocks["c"].ask(Plan(1010, "fail"))
        assert await clocks["c"].ask(Drop()) is False


async def failed(clocks: Shards[Any], world: World, *, ahead: float) -> None:
    """Set a reminder, and have it come while its handler fails."""
    FAILED.clear()
    BROKEN.add("tea")
    await clocks["c"].ask(Plan(1010, "tea"))
    world.now += ahead
    while not FAILED:
        world.jump(10)
        assert await clocks["c"].ask(Seen()) == []
    await trio.testing.wait_all_tasks_blocked()
    BROKEN.clear()


async def test_a_reminder_whose_handler_fails_comes_again(
    tmp_path: Path, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "levada")
    async with clocks_in(tmp_path, world) as clocks:
        await failed(clocks, world, ahead=0.0)
        world.jump(2)
        assert await rung(clocks, "tea")


async def test_a_reminder_that_failed_while_the_clock_was_ahead_is_not_put_off_for_as_long(
    tmp_path: Path, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "levada")
    async with clocks_in(tmp_path, world) as clocks:
        await failed(clocks, world, ahead=1e8)
        world.now -= 1e8
        world.jump(10)
        assert await rung(clocks, "tea")


async def test_misuse_is_refused(tmp_path: Path, world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "levada")

    class Wrong(Clock):
        @handles
        def plan(self, m: Plan) -> list[str]:
            wrong: dict[str, Any] = {"nan": float("nan"), "text": "5", "none": None, "huge": 10**400, "span": 30.0}
            keys: dict[str, Any] = {"number": 5, "surrogate": "\udc80"}
            if m.text in wrong:
                self.remind(wrong[m.text], Ring("x"))
            if m.text in keys:
                self.remind(0.0, Ring("x"), key=keys[m.text])
            self.remind(datetime(2020, 1, 1) if m.text == "naive" else 0.0, Rang("x"))  # noqa: DTZ001
            return []

    async with ActorSystem("test", ask_timeout=1e6) as system:
        found = await shards(system, Wrong, events=Rang, journal=tmp_path, shards=1)
        with pytest.raises(ActorStopped) as caught:
            await found["w"].ask(Plan(1, "x"))
        assert isinstance(caught.value.__cause__, ConfigurationError)
        assert "Wrong has no handler for Rang" in str(caught.value.__cause__)
        for text, says in {
            "nan": "at is nan, wanted seconds since 1970", "text": "at is '5', wanted", "none": "at is None", "huge": "at is 1000",
            "span": "at is 30.0, a moment before 1980: from now on, that is self.system.platform.time() + 30.0",
            "number": "the key of a reminder is 5, wanted Unicode text", "surrogate": r"is '\udc80', wanted",
        }.items():  # fmt: skip
            with pytest.raises(ActorStopped) as caught:
                await found["w"].ask(Plan(1, text))
            assert isinstance(caught.value.__cause__, ConfigurationError)
            assert says in str(caught.value.__cause__)
            assert "failed: ConfigurationError(" in str(caught.value)
            assert "detail=" not in str(caught.value)


async def test_the_pending_reminders_of_a_shard_have_a_bound(
    tmp_path: Path, world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.CRITICAL, "levada")
    monkeypatch.setattr(entity, "REMINDER_BYTES", 1000)
    async with clocks_in(tmp_path, world) as clocks:
        assert await clocks["c"].ask(Plan(1100, "x" * 300, key="long")) == []
        for number in range(3):
            await clocks["c"].ask(Plan(1100, "x" * 30, key=f"{number}"))
        with pytest.raises(ActorStopped) as caught:
            await clocks["d"].ask(Plan(1100, "tea"))
        assert "shard 0 would have more than 1000 bytes of pending reminders" in str(caught.value.__cause__)
        assert await clocks["c"].ask(Drop("0"))
        assert await clocks["c"].ask(Drop("long"))
        await clocks["c"].ask(Plan(1100, "y", key="1"))  # replaces a longer one
    async with clocks_in(tmp_path, world) as clocks:
        await clocks["d"].ask(Plan(1100, "tea"))
        world.jump(100)
        assert await rung(clocks, "tea", entity="d")


async def test_as_many_bytes_as_the_bound_are_no_more_than_it(
    tmp_path: Path, world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.CRITICAL, "levada")
    one = Reminder("c", "1", "", 1100.0, Codec().encode(Ring("tea")))
    monkeypatch.setattr(entity, "REMINDER_BYTES", 2 * one.size)
    async with clocks_in(tmp_path, world) as clocks:
        for number in range(2):
            assert await clocks["c"].ask(Plan(1100, "tea", key=f"{number}")) == []
        with pytest.raises(ActorStopped):
            await clocks["c"].ask(Plan(1100, "tea", key="2"))


async def test_reminders_that_are_not_on_the_disk_yet_count(
    tmp_path: Path, world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.CRITICAL, "levada")
    monkeypatch.setattr(entity, "REMINDER_BYTES", 1000)
    async with clocks_in(tmp_path, world) as clocks:
        for _ in range(20):  # what a failing handler has set does not count
            with pytest.raises(ActorStopped):
                await clocks["c"].ask(Plan(1100, "fail"))
        results: list[bool] = []

        async def plan(number: int) -> None:
            try:
                await clocks[f"c{number}"].ask(Plan(1100, "x" * 100))
            except ActorStopped:
                results.append(False)
            else:
                results.append(True)

        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(plan, number)
        assert sorted(results) == [False] * 16 + [True] * 4


@pytest.mark.ci
async def test_an_entity_is_erased_though_many_reminders_of_others_are_pending(
    tmp_path: Path, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "levada")
    async with clocks_in(tmp_path, world, keeper=True) as clocks:
        await clocks["anna"].ask(Plan(1e9, "a"))
        set_ones = 0
        for number in range(4):
            try:
                await clocks["bert"].ask(Plan(1e9, "x" * (5 << 20), f"{number}"))
                set_ones += 1
            except ActorStopped:
                pass
        assert set_ones == 2
        assert await clocks.erase("anna") >= 0
        assert await clocks["bert"].ask(Seen()) == []


def test_a_reminder_that_is_replaced_again_and_again_is_due_once() -> None:
    reminders = Reminders(Codec())
    other = Reminder("bert", "key", "of bert", 1500.5, b"x")
    reminders.set(other)
    replaced = [Reminder("anna", "key", f"of anna {n}", 2000.0 - n, b"x") for n in range(1000)]
    for reminder in replaced:
        reminders.set(reminder)
    last = replaced[-1]
    assert (reminders.next(), reminders.size) == (1001.0, last.size + other.size)
    assert reminders.take(1000.9) is None
    assert [reminders.take(2000.0) for _ in range(3)] == [last, other, None]


@pytest.mark.ci
def test_a_snapshot_holds_more_reminders_than_a_message_has_items() -> None:
    reminders = Reminders(Codec())
    for number in range(90_000):
        reminders.set(Reminder(f"e{number}", "k", f"{number}", 1e9, b""))
    found = Reminders(Codec())
    found.restore(reminders.pack())
    assert found.pending == reminders.pending
    assert found.size == reminders.size > 90_000 * 64


async def test_the_clock_is_looked_at_again_within_ten_seconds(tmp_path: Path, world: World) -> None:
    async with clocks_in(tmp_path, world) as clocks:
        await clocks["c"].ask(Plan(5000, "tea"))
        world.now += 4000 - 10  # it is set
        assert await clocks["c"].ask(Seen()) == []
        world.jump(10)
        assert await rung(clocks, "tea")


async def test_a_reminder_of_a_week_comes_at_once_in_virtual_time(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """Nothing looks at the world in between, so hardly a task runs."""
    steps = Steps()
    async with ActorSystem("test") as system:
        clocks = await shards(system, Clock, events=Rang, journal=tmp_path, shards=4)
        await clocks["c"].ask(Plan(system.platform.time() + 7 * 86_400, "week"))
        trio.lowlevel.add_instrument(steps)
        await trio.sleep(7 * 86_400 - 1.0)
        assert steps.count < 300
        trio.lowlevel.remove_instrument(steps)
        assert await clocks["c"].ask(Seen()) == []
        await trio.sleep(2.0)
        assert await clocks["c"].ask(Seen()) == ["week"]


class Steps(trio.abc.Instrument):
    """Counts the steps of all tasks."""

    def __init__(self) -> None:
        self.count = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += 1


async def test_commands_are_right_in_virtual_time_on_a_real_disk(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """The clock does not pass the time-outs of commands while the journal writes in its thread."""
    async with ActorSystem("test") as system:
        clocks = await shards(system, Clock, events=Rang, journal=tmp_path, shards=2, idle=30.0)
        began = system.platform.time()
        for hour in range(20):
            await clocks[f"c{hour % 3}"].ask(Plan(began + 3600.0 * (hour + 1), f"{hour}", key=f"{hour}"))
        await trio.sleep(3600.0 * 20 + 1.0)
        found = [await clocks[f"c{entity}"].ask(Seen()) for entity in range(3)]
        assert found == [[f"{hour}" for hour in range(20) if hour % 3 == entity] for entity in range(3)]
