"""What waits for what: async handlers, commits, messages after a commit, asks inside handlers, and failures."""

from __future__ import annotations

import contextvars
import logging
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

pytest.importorskip("pyarrow")

from tests.actors.durable.accounts import EVENTS, Account, Balance, Deposit, Deposited, Withdraw
from tests.actors.durable.memory_journal import MemoryJournal, no_rows

from levada.actors.durable import Durable, applies, shards
from levada.actors.durable.rows import ShardLog, log_config
from levada.actors.journal import Append, Journal
from levada.framework import Actor, ActorSystem, Asks, Reason, Ref, bounded, conflate, handles, message
from levada.framework.errors import ActorError, ActorStopped
from levada.framework.testing import Probe, StrictViolation, strict

TIMES: dict[str, Any] = {"ask_timeout": 60.0, "shutdown_timeout": 20.0}


class Slow(Journal):
    """A journal whose appends wait for leave."""

    gate: Any = None

    @handles
    async def append(self, m: Append) -> None:
        """Wait, then append."""
        self.gate.appends += 1
        self.gate.waiting += 1
        await self.gate.open.wait()
        self.gate.waiting -= 1
        waiting = super().append(m)
        if waiting is not None:
            await waiting


class Gate:
    def __init__(self) -> None:
        self.open = trio.Event()
        self.open.set()
        self.waiting = self.appends = 0

    async def until_one_waits(self) -> None:
        while not self.waiting:
            await trio.lowlevel.checkpoint()


def slow_journal(system: ActorSystem, folder: Path, gate: Gate, events: Any = EVENTS) -> Ref[Any]:
    from levada.framework.handlers import flatten

    return system.spawn(lambda: Slow(folder, ShardLog(flatten(events)).schema, config=log_config(1), gate=gate))


@message("test.durable.step")
class Step(Asks[int]):
    name: str
    times: int = 1


@message("test.durable.stepped")
class Stepped:
    name: str


class Walker(Durable[Step]):
    """Its handler records, waits, asks and fails as it is told."""

    steps: int = 0

    @handles
    async def step(self, m: Step) -> int:
        self.record(Stepped(m.name))
        match m.name:
            case "commit":
                await self.commit()
                self.record(Stepped("half"))
                raise ValueError("after the commit")
            case "twice":
                await self.commit()
                with trio.testing.assert_checkpoints():
                    await self.commit()
            case "fail":
                await trio.lowlevel.checkpoint()
                raise ValueError("no commit")
            case "wait":
                await trio.sleep_forever()
        return self.steps

    @applies
    def stepped(self, e: Stepped) -> None:
        self.steps += 1


async def test_an_answer_waits_for_the_disk_and_a_question_for_earlier_events(tmp_path: Path) -> None:
    gate = Gate()
    async with ActorSystem("test", **TIMES) as system:
        journal = slow_journal(system, tmp_path, gate)
        accounts = await shards(system, Account, events=EVENTS, journal=journal, shards=1)
        await accounts["anna"].ask(Balance())
        await accounts["bert"].ask(Balance())
        answers: list[tuple[str, int]] = []

        async def ask(name: str, question: Asks[int]) -> None:
            answers.append((name, await accounts[name].ask(question)))

        gate.open = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, "anna", Deposit(5))
            await gate.until_one_waits()
            nursery.start_soon(ask, "anna", Balance())
            nursery.start_soon(ask, "bert", Balance())
            while not answers:
                await trio.lowlevel.checkpoint()
            await trio.testing.wait_all_tasks_blocked()
            assert answers == [("bert", 0)]  # nothing of bert is under way
            gate.open.set()
        assert answers[1:] == [("anna", 5), ("anna", 5)]


async def test_a_commit_without_events_is_a_checkpoint(tmp_path: Path) -> None:
    async with ActorSystem("test", **TIMES) as system:
        walkers = await shards(system, Walker, events=Stepped, journal=tmp_path, shards=1)
        assert await walkers["a"].ask(Step("twice")) == 1


async def test_commands_that_come_while_the_disk_is_busy_share_the_next_append(tmp_path: Path) -> None:
    gate = Gate()
    async with ActorSystem("test", **TIMES) as system:
        journal = slow_journal(system, tmp_path, gate)
        accounts = await shards(system, Account, events=EVENTS, journal=journal, shards=1)
        names = [f"a{n}" for n in range(50)]
        for name in names:
            await accounts[name].ask(Balance())
        gate.open = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(accounts["a0"].ask, Deposit(1))
            await gate.until_one_waits()
            before = gate.appends
            for name in names:
                nursery.start_soon(accounts[name].ask, Deposit(1))
            await trio.testing.wait_all_tasks_blocked()
            gate.open.set()
        assert gate.appends == before + 1
        assert [await accounts[name].ask(Balance()) for name in names] == [2] + [1] * 49


async def test_committed_events_stay_though_the_handler_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "levada")
    async with ActorSystem("test", **TIMES) as system:
        walkers = await shards(system, Walker, events=Stepped, journal=tmp_path, shards=1)
        for name in ("commit", "fail"):
            with pytest.raises(ActorStopped) as caught:
                await walkers["w"].ask(Step(name))
            assert isinstance(caught.value.__cause__, ValueError)
        assert await walkers["w"].ask(Step("plain")) == 2  # "commit" and "plain"


class Leaver(Durable[Step]):
    """Leaves memory at a command, or before its first one."""

    steps: int = 0

    def started(self) -> None:
        if self.entity == "never":
            self.stop()

    @handles
    def step(self, m: Step) -> int:
        self.record(Stepped(m.name))
        if m.name == "leave":
            self.stop()
        return self.steps

    @applies
    def stepped(self, e: Stepped) -> None:
        self.steps += 1


async def test_commands_behind_one_that_stops_the_entity_are_for_its_next_life(tmp_path: Path) -> None:
    async with ActorSystem("test", **TIMES) as system:
        leavers = await shards(system, Leaver, events=Stepped, journal=tmp_path, shards=1)
        assert await leavers["a"].ask(Step("first")) == 1
        answers: list[int] = []

        async def ask(name: str, id: str | None = None) -> None:
            answers.append(await leavers["a"].ask(Step(name), command=id))

        async with trio.open_nursery() as nursery:
            for name in ("leave", "leave", "plain", "plain", "leave", "plain"):
                nursery.start_soon(ask, name)
            nursery.start_soon(ask, "plain", "once")
            nursery.start_soon(ask, "plain", "once")
        assert len(answers) == 8
        assert sorted(set(answers)) == list(range(2, 9))  # the two with one id have one answer
        assert await leavers["a"].ask(Step("plain"), command="last") == 9
        assert (await leavers.statistics()).under_way == 0
        with pytest.raises(ActorStopped):  # a class that never handles anything is not read again and again
            await leavers["never"].ask(Step("plain"))


class Closing(Leaver):
    async def stopping(self, reason: Reason) -> None:
        ENDED.append((self.entity, self.steps, type(reason).__name__))
        if self.entity == "bad":
            raise ValueError("cannot close")


ENDED: list[tuple[str, int, str]] = []


async def test_an_entity_that_leaves_memory_runs_its_hook(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "levada")
    ENDED.clear()
    async with ActorSystem("test", **TIMES) as system:
        found = await shards(system, Closing, events=Stepped, journal=tmp_path, shards=1, max_live=1)
        for entity in ("bad", "a", "bad", "a"):
            await found[entity].ask(Step("plain"))
        assert ENDED == [("bad", 1, "Normal"), ("a", 1, "Normal"), ("bad", 2, "Normal")]
        assert await found["a"].ask(Step("plain")) == 3
        assert (await found.statistics()).replayed == 4  # the shard has gone on


async def test_a_killed_entity_fails_its_command_and_comes_back(tmp_path: Path) -> None:
    async with ActorSystem("test", **TIMES) as system:
        walkers = await shards(system, Walker, events=Stepped, journal=tmp_path, shards=1)
        failed: list[str] = []

        async def ask(name: str) -> None:
            try:
                await walkers["w"].ask(Step(name))
            except ActorStopped as error:
                failed.append(error.actor)

        for earlier in (0, 1):  # it is the first command of its life, and the second one
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, "wait")
                while (ref := system.lookup("/Walker/0/w")) is None or not (await walkers.statistics()).under_way:
                    await trio.lowlevel.checkpoint()
                await trio.testing.wait_all_tasks_blocked()
                ref.kill()
            assert failed == ["/Walker/0/w"] * (earlier + 1)
            assert await walkers["w"].ask(Step("plain")) == earlier + 1


class Sum(Actor[Deposit]):
    """Says how many appends were through when it was asked."""

    gate: Gate

    @handles
    def add(self, m: Deposit) -> int:
        return self.gate.appends - self.gate.waiting


@message("test.durable.relay")
class Relay(Asks[int]):
    by: str = "ask"


class Relayer(Durable[Relay]):
    steps: int = 0

    @handles
    async def relay(self, m: Relay) -> int:
        self.record(Stepped("relay"))
        self.after_commit(TARGETS["probe"], "after")
        if m.by == "ask":
            return int(await TARGETS["sum"].ask(Deposit(self.steps)))
        if m.by == "nursery":
            answers: list[int] = []

            async def ask() -> None:
                answers.append(await TARGETS["sum"].ask(Deposit(self.steps)))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
            return answers[0]
        TARGETS["probe"].tell("at once")
        return 0

    @applies
    def stepped(self, e: Stepped) -> None:
        self.steps += 1


TARGETS: dict[str, Any] = {}


@pytest.mark.parametrize("by", ["ask", "nursery"])
async def test_an_ask_inside_a_handler_waits_for_what_was_recorded(tmp_path: Path, by: str) -> None:
    gate = Gate()
    async with ActorSystem("test", **TIMES) as system:
        TARGETS["probe"], TARGETS["sum"] = Probe(system).ref, system.spawn(Sum, gate)
        journal = slow_journal(system, tmp_path, gate, Stepped)
        relays = await shards(system, Relayer, events=Stepped, journal=journal, shards=1)
        await relays["r"].ask(Relay("tell"))
        before, gate.open = gate.appends, trio.Event()
        answers: list[int] = []

        async def ask() -> None:
            answers.append(await relays["r"].ask(Relay(by)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await gate.until_one_waits()
            await trio.testing.wait_all_tasks_blocked()
            assert not answers
            gate.open.set()
        assert answers == [before + 1]  # the append of what was recorded was through when the sum was asked


VAR: contextvars.ContextVar[str] = contextvars.ContextVar("VAR", default="unset")
SEEN: list[tuple[trio.lowlevel.Task, str]] = []


class Watched(Account):
    @handles
    def look(self, _: Balance) -> int:
        SEEN.append((trio.lowlevel.current_task(), VAR.get()))
        VAR.set(f"of {self.entity}")
        return self.balance


async def test_an_entity_in_memory_answers_in_its_askers_task_with_a_context_of_its_own(tmp_path: Path) -> None:
    SEEN.clear()
    async with ActorSystem(**TIMES) as system:
        accounts = await shards(system, Watched, events=EVENTS, journal=tmp_path, shards=1)
        for name in "ab":
            await accounts[name].ask(Deposit(1))
        VAR.set("of the asker")
        await accounts["a"].ask(Balance())
        await accounts["a"].ask(Balance(), command="look-1")
        await accounts["b"].ask(Balance())
        assert [own for _, own in SEEN] == ["unset", "of a", "unset"]
        assert {task for task, _ in SEEN} == {trio.lowlevel.current_task()}
        # What was told before comes first, so an ask behind it takes the way of all messages.
        accounts["a"].tell(Deposit(4))
        assert await accounts["a"].ask(Balance()) == 5
        assert SEEN[3][0] is not trio.lowlevel.current_task()
        assert VAR.get() == "of the asker"


async def test_messages_after_a_commit_come_behind_it(tmp_path: Path) -> None:
    gate = Gate()
    async with ActorSystem("test", **TIMES) as system:
        probe = Probe(system)
        TARGETS["probe"] = probe.ref
        journal = slow_journal(system, tmp_path, gate, Stepped)
        relays = await shards(system, Relayer, events=Stepped, journal=journal, shards=1)
        await relays["r"].ask(Relay("tell"))
        assert [await probe.expect(), await probe.expect()] == ["at once", "after"]


class Herald(Durable[Step]):
    """Counts its rows on the disk behind a commit."""

    @handles
    async def step(self, m: Step) -> int:
        if m.name == "record":
            self.record(Stepped(m.name))
            return 0
        if m.name == "tell":
            self.after_commit(TARGETS["probe"], "after the commit")
        await self.commit()
        TARGETS["probe"].tell("at once")
        return sum(row["entity"] == self.entity for row in TARGETS["rows"][0])

    @applies
    def stepped(self, e: Stepped) -> None: ...


async def test_a_commit_without_events_sends_messages_and_waits_for_rows_of_earlier_commands(
    autojump_clock: MockClock,
) -> None:
    async with ActorSystem("test", **TIMES) as system:
        probe, rows = Probe(system), no_rows()
        TARGETS.update(probe=probe.ref, rows=rows)
        journal = system.spawn(MemoryJournal, ShardLog([Stepped]).schema, rows)
        heralds = await shards(system, Herald, events=Stepped, journal=journal, shards=1)
        assert await heralds["h"].ask(Step("tell")) == 0
        assert [await probe.expect(), await probe.expect()] == ["after the commit", "at once"]
        heralds["h"].tell(Step("record"))
        assert await heralds["h"].ask(Step("look")) == 1


class Notes(Actor[Step]):
    """Its mailbox cannot tell the key of an empty name."""

    told: list[str]

    @handles
    def note(self, m: Step) -> None:
        self.told.append(m.name)


class Notifier(Durable[Step]):
    steps: int = 0

    @handles
    async def step(self, m: Step) -> int:
        self.record(Stepped(m.name))
        for name in ("", f"{self.entity} {m.name}"):
            self.after_commit(TARGETS["notes"], Step(name))
        if m.name == "commit":
            await self.commit()
        return self.steps

    @applies
    def stepped(self, e: Stepped) -> None:
        self.steps += 1


async def test_a_message_that_cannot_be_told_after_a_commit_is_lost_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "levada")
    told: list[str] = []
    async with ActorSystem("test", **TIMES) as system:
        mailbox = bounded(100, overflow=conflate(lambda m: m.name[0] + m.name))
        TARGETS["notes"] = system.spawn(lambda: Notes(told), name="notes", mailbox=mailbox)
        found = await shards(system, Notifier, events=Stepped, journal=tmp_path, shards=1)
        answers: list[int] = []

        async def ask(entity: str, name: str) -> None:
            answers.append(await found[entity].ask(Step(name)))

        async with trio.open_nursery() as nursery:
            for entity in "ab":
                nursery.start_soon(ask, entity, "return")
        for entity in "ab":
            await ask(entity, "commit")
        await trio.testing.wait_all_tasks_blocked()
        assert answers == [1, 1, 2, 2]
        assert sorted(told) == ["a commit", "a return", "b commit", "b return"]
    why = f"Step to {TARGETS['notes']!r} after a commit of 'a' is lost: IndexError('string index out of range')"
    assert [text for text in caplog.messages if "'a'" in text] == [f"/Notifier/0: {why}"] * 2
    assert len(caplog.messages) == 4


class Stubborn(Durable[Step]):
    """Does everything that a durable actor may not do."""

    steps: int = 0

    @handles
    def step(self, m: Step) -> Any:
        match m.name:
            case "later":
                return self.reply_later()
            case "stash":
                return self.stash(m)
            case "become":
                return self.become(None)
            case "unknown":
                return self.record(Deposited(1))
            case "misfit":
                return self.record(Stepped(5))  # type: ignore[arg-type]
            case "huge":
                return self.record(*[Stepped("x" * (1 << 20)) for _ in range(9)])
            case "huge in UTF-8":
                return self.record(*[Stepped("\N{SNOWMAN}" * (1 << 20)) for _ in range(3)])
            case "huge reminder":
                return self.remind(2e9, Step("x" * (9 << 20)))
            case "unkept":
                return object()
            case "no ref":
                return self.after_commit(None, m)  # type: ignore[arg-type]
            case "caught":
                try:
                    self.record(Stepped("bad"))
                except ValueError:
                    return 1
        self.record(Stepped(m.name))
        return self.steps

    @handles
    def tick(self, m: Withdraw) -> None:
        self.record(Stepped("outside"))

    @applies
    def stepped(self, e: Stepped) -> None:
        if e.name == "bad":
            raise ValueError("bad")
        if e.name == "nested":
            self.record(Stepped("inner"))
        self.steps += 1


async def test_misuse_in_a_handler_fails_its_command_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "levada")
    async with ActorSystem("test", **TIMES) as system:
        found = await shards(system, Stubborn, events=Stepped, journal=tmp_path, shards=1)
        causes = {}
        for name in (
            "later",
            "stash",
            "become",
            "unknown",
            "misfit",
            "huge",
            "huge in UTF-8",
            "huge reminder",
            "unkept",
            "no ref",
            "caught",
            "nested",
        ):
            with pytest.raises(ActorStopped) as caught:
                await found["s"].ask(Step(name), command=name)
            causes[name] = str(caught.value.__cause__)
        unfinished = Step("x")
        del unfinished.name
        for command in (None, "unfinished"):
            with pytest.raises(AttributeError, match="name"):
                await found["s"].ask(unfinished, command=command)
        assert await found["s"].ask(Step("fine")) == 1
        ref = system.lookup("/Stubborn/0/s")
        assert ref is not None
        with pytest.raises(ActorStopped) as caught:
            await ref.ask(Withdraw(1))
        causes["outside"] = str(caught.value.__cause__)
        assert await found["s"].ask(Step("fine")) == 2
    assert {name: text.partition(":")[0] for name, text in causes.items()} == {
        "later": "Stubborn is durable",
        "stash": "Stubborn is durable",
        "become": "Stubborn is durable",
        "unknown": "Stubborn records Deposited, which shards(events=…) does not name",
        "misfit": "Stepped.name",
        "huge": "one command recorded more than 8388608 bytes",
        "huge in UTF-8": "one command recorded more than 8388608 bytes",
        "huge reminder": "one command recorded more than 8388608 bytes",
        "unkept": "expected int, got object",
        "no ref": "after_commit() got None, wanted the ref of an actor",
        "caught": "bad",
        "nested": "record() in an @applies method, or outside a command of entity 's'",
        "outside": "record() in an @applies method, or outside a command of entity 's'",
    }


def test_a_durable_actor_without_shards_says_so() -> None:
    with pytest.raises(ActorError, match=r"record\(\): this Walker belongs to no shards\(\)"):
        Walker().record(Stepped("x"))


async def test_durable_actors_run_in_strict_systems_which_check_what_is_the_apps(tmp_path: Path) -> None:
    """Rows and the shards' own messages do not leave the process; commands do."""
    async with strict(codec=True)(**TIMES) as system:
        accounts = await shards(system, Account, events=EVENTS, journal=tmp_path, shards=1)
        assert await accounts["anna"].ask(Deposit(5)) == 5
        assert await accounts["anna"].ask(Withdraw(2), command="once") == 3
        accounts["anna"].tell(Deposit(1))
        await accounts.erase("bert")
        assert await accounts["anna"].ask(Balance()) == 4
    with pytest.raises(StrictViolation, match=r"Deposit for /Account/0 cannot travel: Deposit\.amount: expected int"):
        async with strict(codec=True)(**TIMES) as system:
            accounts = await shards(system, Account, events=EVENTS, journal=tmp_path, shards=1)
            await accounts["anna"].ask(Deposit("five"))  # type: ignore[arg-type]
