"""Durable actors in one process: what survives, what is answered when, and what is refused."""

from __future__ import annotations

import logging
import math
import os
import re
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

pytest.importorskip("pyarrow")

from tests.actors.durable.accounts import EVENTS, Account, Balance, Deposit, Deposited, Move, Withdraw, Withdrawn

from levada.actors.durable import CommandReused, Durable, EntityErased, Shards, applies, shards
from levada.actors.durable.rows import ShardLog, log_config
from levada.actors.journal import Journal, JournalLocked, Store, asking
from levada.actors.journal.asking import locked
from levada.actors.journal.inspection import inspect
from levada.framework import ActorSystem, Asks, Ref, Sender, channel, handles, message
from levada.framework.errors import ActorStopped, ConfigurationError
from levada.framework.files import Files
from levada.framework.platform import REAL


@message("test.durable.follow")
class Follow(Asks[int]):
    to: Sender[int]


class Ledger(Account):
    @handles
    def follow(self, m: Follow) -> int:
        self.start_soon(self._count, m.to)
        return self.balance

    async def _count(self, to: Sender[int]) -> None:
        async with to:
            for number in (1, 2, 3):
                await to.send(number)


@asynccontextmanager
async def accounts_in(folder: Path, **settings: Any) -> AsyncIterator[Shards[Any]]:
    async with ActorSystem("test", seed=0, shutdown_timeout=100.0, ask_timeout=300.0) as system:
        cls = settings.pop("cls", Account)
        yield await shards(system, cls, **{"events": EVENTS, "journal": folder, "shards": 2, **settings})


def rows_of(folder: Path, *columns: str, shards: int = 2) -> list[tuple[Any, ...]]:
    """The rows of the log but for the shards' own, shard by shard."""
    found = []
    with Store.open(folder, None, log_config(shards)) as store:
        for number in range(shards):
            for _, batch in store.batches(number, 0):
                found += [tuple(row[name] for name in columns) for row in batch.to_pylist() if row["entity"]]
    return found


async def test_state_survives_its_process(tmp_path: Path) -> None:
    async with accounts_in(tmp_path) as accounts:
        assert await accounts["anna"].ask(Deposit(5)) == 5
        assert await accounts["anna"].ask(Withdraw(2)) == 3
        assert await accounts["bert"].ask(Move([1, 2, 3])) == 6
    async with accounts_in(tmp_path) as accounts:
        assert [await accounts[name].ask(Balance()) for name in ("anna", "bert", "cleo")] == [3, 6, 0]
    columns = ("entity", "sequence", "kind", "amount", "note", "_version", "command")
    assert sorted(rows_of(tmp_path, *columns)) == [
        ("anna", 1, "test.durable.deposited", 5, None, 1, None),
        ("anna", 2, "test.durable.withdrawn", 2, "", 1, None),
        ("bert", 1, "test.durable.deposited", 1, None, 1, None),
        ("bert", 2, "test.durable.deposited", 2, None, 1, None),
        ("bert", 3, "test.durable.deposited", 3, None, 1, None),
    ]


@message("test.durable.noted")
class Noted(Asks[str]):
    """A command, and an event, whose fields have common names."""

    offset: int
    version: str
    reply: str
    body: str
    snapshot: str
    data: str


class Notes(Durable[Noted]):
    text: str = ""

    @handles
    def note(self, m: Noted) -> str:
        self.record(m)
        return self.text

    @applies
    def noted(self, e: Noted) -> None:
        self.text += f"{e.offset}{e.version}{e.reply}{e.body}{e.snapshot}{e.data} "


async def test_events_may_have_fields_of_common_names(tmp_path: Path) -> None:
    first, second = Noted(7, "a", "b", "c", "d", "e"), Noted(8, "f", "g", "h", "i", "j")
    async with accounts_in(tmp_path, cls=Notes, events=Noted, snapshot_every=2) as notes:
        assert await notes["x"].ask(first, command="one") == "7abcde "
    for life in (1, 2):
        async with accounts_in(tmp_path, cls=Notes, events=Noted, snapshot_every=2) as notes:
            assert await notes["x"].ask(first, command="one") == "7abcde "
            assert await notes["x"].ask(second, command="two") == "7abcde 8fghij "
            assert await notes["y"].ask(first) == "7abcde " * life
    assert ("x", 2, "test.durable.noted", 8, "f", 1) in rows_of(
        tmp_path, "entity", "sequence", "kind", "offset", "version", "_version"
    )


async def test_a_command_with_an_id_is_done_once_and_answered_alike(tmp_path: Path) -> None:
    async with accounts_in(tmp_path) as accounts:
        anna = accounts["anna"]
        assert await anna.ask(Deposit(5), command="order-1") == 5
        assert await anna.ask(Deposit(7), command="order-2") == 12
        assert await anna.ask(Deposit(5), command="order-1") == 5
        assert await anna.ask(Balance(), command="question") == 12
        assert await accounts["bert"].ask(Deposit(1), command="order-1") == 1  # ids belong to the entity
    async with accounts_in(tmp_path) as accounts:
        anna = accounts["anna"]
        assert await anna.ask(Deposit(5), command="order-1") == 5
        assert await anna.ask(Deposit(1)) == 13
        assert await anna.ask(Balance(), command="question") == 12  # the answer of then
        with pytest.raises(CommandReused, match="'order-2' of entity 'anna' was another message"):
            await anna.ask(Deposit(8), command="order-2")
        assert await anna.ask(Balance()) == 13


async def test_a_command_with_an_id_has_no_channel_in_it(tmp_path: Path) -> None:
    async with accounts_in(tmp_path, cls=Ledger) as accounts:
        sender, receiver = channel(int)
        with pytest.raises(TypeError, match=r"Follow\.to: Sender cannot travel here"):
            await accounts["anna"].ask(Follow(sender), command="follow-1")
        assert await accounts["anna"].ask(Follow(sender)) == 0
        async with receiver:
            assert [number async for number in receiver] == [1, 2, 3]


async def test_the_newest_ids_are_remembered(tmp_path: Path) -> None:
    for _ in range(2):
        async with accounts_in(tmp_path, remember=2) as accounts:
            for number in range(3):
                await accounts["anna"].ask(Deposit(1), command=f"order-{number}")
    async with accounts_in(tmp_path, remember=2) as accounts:
        assert await accounts["anna"].ask(Balance()) == 6  # 0, 1, 2, then 0 again and so 1 and 2 again


async def test_a_repeated_id_waits_for_the_command_under_way(tmp_path: Path) -> None:
    async with accounts_in(tmp_path) as accounts:
        answers: list[int] = []

        async def ask() -> None:
            answers.append(await accounts["anna"].ask(Deposit(5), command="order-1"))

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(ask)
        assert answers == [5] * 20
        assert (await accounts.statistics()).repeated == 19


async def test_a_failing_handler_has_recorded_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "levada")
    async with accounts_in(tmp_path) as accounts:
        anna = accounts["anna"]
        answers: list[Any] = []

        async def ask(question: Any, command: str | None = None) -> None:
            try:
                answers.append(await anna.ask(question, command=command))
            except ActorStopped as error:
                answers.append(repr(error.__cause__))

        await anna.ask(Deposit(5))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, Withdraw(9), "order-1")
            nursery.start_soon(ask, Withdraw(9), "order-1")
        assert answers == ["ValueError('anna has -4')"] * 2
        assert await anna.ask(Deposit(6)) == 11
        assert await anna.ask(Withdraw(9), command="order-1") == 2  # it was not taken
    assert [row[0] for row in rows_of(tmp_path, "amount")] == [5, 6, 9]


async def test_commands_behind_a_failing_one_are_handled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "levada")
    async with accounts_in(tmp_path) as accounts:
        anna = accounts["anna"]
        await anna.ask(Deposit(1))
        for amount in (1, 100, 2):
            anna.tell(Deposit(amount) if amount < 100 else Withdraw(amount))
        assert await anna.ask(Balance()) == 4


async def test_a_told_command_is_done(tmp_path: Path) -> None:
    async with accounts_in(tmp_path) as accounts:
        accounts["anna"].tell(Deposit(5))
        await accounts["anna"].send(Deposit(6), command="order-1")
        assert await accounts["anna"].ask(Balance()) == 11
    assert [row[0] for row in rows_of(tmp_path, "amount")] == [5, 6]


async def test_a_journal_may_be_given_as_a_ref(tmp_path: Path) -> None:
    async with ActorSystem("test", ask_timeout=300.0) as system:
        journal: Ref[Any] = system.spawn(
            lambda: Journal(tmp_path, ShardLog([Deposited, Withdrawn]).schema, config=log_config(2))
        )
        accounts = await shards(system, Account, events=EVENTS, journal=journal, shards=2)
        assert await accounts["anna"].ask(Deposit(5)) == 5
        with pytest.raises(ConfigurationError, match="shards is 3, wanted 2, as many as the journal has partitions"):
            await shards(system, Account, events=EVENTS, journal=journal, shards=3, name="other")
        await trio.lowlevel.checkpoint()


async def test_another_writer_ends_the_shard_and_its_rows_are_seen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A second owner fences the first: nothing of the first is written after the second one's rows."""
    caplog.set_level(logging.CRITICAL, "levada")
    async with ActorSystem("test", ask_timeout=300.0) as system:
        log = ShardLog([Deposited, Withdrawn])
        journal: Ref[Any] = system.spawn(lambda: Journal(tmp_path, log.schema, config=log_config(1)))
        one = await shards(system, Account, events=EVENTS, journal=journal, shards=1, name="one")
        assert await one["anna"].ask(Deposit(5)) == 5
        two = await shards(system, Account, events=EVENTS, journal=journal, shards=1, name="two")
        assert await two["anna"].ask(Deposit(6)) == 11
        from levada.actors.durable import OutcomeUnknown

        with pytest.raises(OutcomeUnknown, match="not done, or not known to be: ask again with the same command id"):
            await one["anna"].ask(Deposit(7), command="order-1")
        assert await one["anna"].ask(Deposit(7), command="order-1") == 18
    assert [row[0] for row in rows_of(tmp_path, "amount", shards=1)] == [5, 6, 7]


async def test_a_shard_waits_for_a_journal_here_as_long_as_its_disk_takes(
    tmp_path: Path, mock_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, syncing, goes_on = os.fdatasync, threading.Event(), threading.Event()

    def sync(descriptor: int) -> None:
        syncing.set()
        assert goes_on.wait(20)
        real(descriptor)

    async with accounts_in(tmp_path) as accounts:
        assert await accounts["anna"].ask(Deposit(1)) == 1
        balances: list[int] = []

        async def deposit() -> None:
            balances.append(await accounts["anna"].ask(Deposit(2), timeout=None))

        with monkeypatch.context() as patch:
            patch.setattr(REAL.files, "fdatasync", sync)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(deposit)
                await trio.to_thread.run_sync(syncing.wait, 20)
                mock_clock.jump(3600)
                await trio.testing.wait_all_tasks_blocked()
                assert balances == []
                goes_on.set()
        assert balances == [3]
        assert await accounts["anna"].ask(Balance()) == 3


async def test_entities_leave_memory_and_come_back(tmp_path: Path, mock_clock: trio.testing.MockClock) -> None:
    async with accounts_in(tmp_path, idle=60.0) as accounts:
        for name in ("anna", "bert", "cleo"):
            await accounts[name].ask(Deposit(5), command="order-1")
        assert (await accounts.statistics()).live == 3
        mock_clock.jump(50)
        await accounts["bert"].ask(Balance())
        mock_clock.jump(30)
        while (await accounts.statistics()).live > 1:
            await trio.lowlevel.checkpoint()
        mock_clock.jump(16)  # a round in which none leaves
        await trio.testing.wait_all_tasks_blocked()
        mock_clock.jump(60)
        while (await accounts.statistics()).live > 0:
            await trio.lowlevel.checkpoint()
        assert await accounts["anna"].ask(Deposit(5), command="order-1") == 5
        assert await accounts["anna"].ask(Deposit(6)) == 11
        found = await accounts.statistics()
        assert (found.live, found.replayed) == (1, 4)


async def test_the_least_recently_used_leave_first(tmp_path: Path) -> None:
    async with accounts_in(tmp_path, shards=1, max_live=3) as accounts:
        for name in ("a", "b", "c", "d", "e", "a"):
            await accounts[name].ask(Deposit(1))
        found = await accounts.statistics()
        assert (found.live, found.replayed) == (3, 6)
        assert await accounts["b"].ask(Balance()) == 1


async def test_a_handler_that_sets_state_without_an_event_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Forgets(Durable[Deposit]):
        balance: int = 0
        asked: int = attrs.field(default=0, init=False)

        @handles
        async def deposit(self, m: Deposit) -> int:
            self.asked += 1  # no state
            await self.commit()
            self.balance += m.amount
            return self.balance

        @applies
        def one(self, e: Deposited) -> None:
            self.balance += e.amount

    async with ActorSystem("test") as system:
        await shards(system, Forgets, events=Deposited, journal=tmp_path, shards=2)
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [text.partition(":")[0] for text in warned] == [
        "the handler Forgets.deposit sets self.balance, which is lost when the entity leaves memory"
    ]


async def test_a_method_that_applies_an_event_to_what_no_snapshot_has_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Forgets(Durable[Deposit]):
        count: int = 0
        balance: int = attrs.field(default=0, init=False)
        shown: str | None = attrs.field(default=None, init=False)

        @handles
        def deposit(self, m: Deposit) -> int:
            self.record(Deposited(m.amount))
            self.shown = f"{self.balance}"
            return self.balance

        @applies
        def one(self, e: Deposited | Withdrawn) -> None:
            self.count += 1
            self.balance += e.amount
            self.shown = None  # it is made again

    async with ActorSystem("test") as system:
        await shards(system, Forgets, events=EVENTS, journal=tmp_path, shards=1)
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [text.partition(":")[0] for text in warned] == [
        "the @applies method Forgets.one sets self.balance, which is no state, so it is lost when the entity is loaded from a snapshot"
    ]


async def test_an_entity_is_an_actor_below_its_shard(tmp_path: Path) -> None:
    async with ActorSystem("test", ask_timeout=300.0) as system:
        accounts = await shards(system, Account, events=EVENTS, journal=tmp_path, shards=2)
        await accounts["anna"].ask(Deposit(1))
        await accounts["$x/y%"].ask(Deposit(1))
        await accounts["ü\n\x1b[31m\u2028"].ask(Deposit(1))
        assert system.lookup("/Account/1/anna") is not None
        assert any(system.lookup(f"/Account/{shard}/%24x%2Fy%25") for shard in range(2))
        assert any(system.lookup(f"/Account/{shard}/ü%0A%1B[31m%E2%80%A8") for shard in range(2))


def test_misuse_is_refused_where_it_is_given(tmp_path: Path) -> None:
    @message("test.durable.unapplied")
    class Unapplied:
        amount: int

    @message("test.durable.clash")
    class Clash:
        amount: str

    @message("test.durable.kind")
    class Kind:
        kind: str

    @message("test.durable.under")
    class Under:
        _version: int

    class Plain(Asks[int]):
        pass

    class Taken(Durable[Any]):
        @applies
        def one(self, e: Kind) -> None: ...

    class Hidden(Durable[Any]):
        @applies
        def one(self, e: Under) -> None: ...

    class Both(Durable[Any]):
        @applies
        def one(self, e: Deposited | Clash | Kind) -> None: ...

    class Handles(Durable[Any]):
        @handles
        def plain(self, m: Plain) -> None: ...

        @applies
        def one(self, e: Deposited) -> None: ...

    class Needs(Durable[Any]):
        balance: int

        @applies
        def one(self, e: Deposited) -> None: ...

    class Takes(Durable[Any]):
        def __init__(self, currency: str) -> None:
            self.currency = currency

        @applies
        def one(self, e: Deposited) -> None: ...

    async def refused(cls: Any, events: Any, match: str, **settings: Any) -> None:
        async with ActorSystem("test") as system:
            with pytest.raises(ConfigurationError, match=match):
                await shards(system, cls, **{"events": events, "journal": tmp_path, "shards": 2, **settings})

    async def main() -> None:
        await refused(Account, EVENTS | Unapplied, "Account has no @applies method for Unapplied")
        await refused(Account, Deposited, "applies Withdrawn, which shards\\(events=…\\) does not name")
        await refused(Both, Deposited | Clash | Kind, "Clash.amount is string, and .*Deposited.amount is int64")
        for cls, events, name in ((Taken, Kind, "Kind.kind"), (Hidden, Under, "Under._version")):
            await refused(
                cls, events, rf"{name}: .* entity, sequence, command, time, kind, and others that begin with _"
            )
        await refused(Handles, Deposited, "Handles handles Plain: commands are messages")
        await refused(Needs, Deposited, "Needs.balance: a field of a durable actor is state")
        await refused(Account, (Deposited, Withdrawn), "wanted the classes of the events, as in Deposited | Withdrawn")
        await refused(Account, None, "events is None, wanted the classes of the events")
        await refused(Account, [Deposited], "wanted the classes of the events, as in Deposited | Withdrawn")
        await refused(
            Takes, Deposited, r"Takes needs arguments \(missing a required argument: 'currency'\), and an entity"
        )
        await refused(Durable, Deposited, "Durable has no @applies")
        await refused(str, Deposited, "wanted a class derived from Durable")
        await refused(Account, EVENTS, "wanted a number from 1 to 4096", shards=0)
        await refused(Account, EVENTS, "shards is True, wanted a number", shards=True)
        await refused(Account, EVENTS, "keeper is 1, wanted True or False", keeper=1)
        await refused(Account, EVENTS, "the name of a folder is empty", journal="")
        await refused(Account, EVENTS, "no name has a null character", journal="a\0b")
        for url in ("postgresql//host/bank", " postgresql://host/bank", "jdbc:postgresql://host", "POSTGRES://host"):
            await refused(
                Account, EVENTS, "wanted is the path of a folder .*; a database is postgresql://", journal=url
            )
        with pytest.raises(TypeError, match="the name of a folder is b'accounts', and wanted is a str or a Path"):
            await refused(Account, EVENTS, "never", journal=b"accounts")
        for tilde in ("~/accounts", "~bert", Path("~")):
            await refused(Account, EVENTS, "begins with ~, which only a shell replaces", journal=tilde)
        for idle in (0, math.inf, math.nan, "x"):
            await refused(Account, EVENTS, "idle is .*, wanted seconds", idle=idle)
        for setting in ("remember", "snapshot_every", "max_live"):
            for value in (0, 0.5, math.inf):
                await refused(
                    Account, EVENTS, f"{setting} is .*, wanted a whole number of 1 or more", **{setting: value}
                )
        await refused(Account, EVENTS, "clock is 5, wanted a function", clock=5)

    trio.run(main)


async def test_misuse_of_an_entity_is_refused(tmp_path: Path) -> None:
    async with accounts_in(tmp_path) as accounts:
        for wrong in ("", "x" * 1001, "\ud800", 5):
            with pytest.raises(ConfigurationError, match="wanted text of 1 to 1000 bytes"):
                accounts[wrong]  # type: ignore[index]
        with pytest.raises(ConfigurationError, match="Account has no handler for Deposited"):
            await accounts["anna"].ask(Deposited(1))  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match=r"the command is .*, wanted text"):
            await accounts["anna"].ask(Deposit(1), command="")
    with pytest.raises(ConfigurationError, match=r"2 partitions, which cannot change to 3.*shards="):
        async with accounts_in(tmp_path, shards=3):
            pass


async def test_a_folder_that_is_open_elsewhere_is_refused(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    started = trio.current_time()
    with Store.open(tmp_path, ShardLog([Deposited, Withdrawn]).schema, log_config(2)), pytest.raises(JournalLocked):
        async with accounts_in(tmp_path):
            pass
    assert 5.0 <= trio.current_time() - started < 6.0


async def test_a_start_that_was_refused_or_cancelled_can_be_tried_again_at_once(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with ActorSystem("test") as system:
        start = partial(shards, system, Account, events=EVENTS, journal=tmp_path, shards=2)
        with Store.open(tmp_path, ShardLog([Deposited, Withdrawn]).schema, log_config(2)):
            with pytest.raises(JournalLocked):
                await start()
            with trio.move_on_after(1.0) as scope:
                await start()
            assert scope.cancelled_caught
        accounts = await start()
        assert await accounts["anna"].ask(Deposit(1)) == 1


async def test_a_start_opens_the_log_once(tmp_path: Path) -> None:
    for opened in 1, 2:
        async with accounts_in(tmp_path) as accounts:
            await accounts["anna"].ask(Deposit(1))
        with inspect(tmp_path) as found:
            assert found.openings == opened


@contextmanager
def passing_by(folder: Path, does: str) -> Iterator[None]:
    """What `levada journal` does with a log for a block."""
    store = Store.open(folder, ShardLog([Deposited, Withdrawn]).schema, log_config(2))
    if does == "trims":
        with store, locked(Files(), folder / "trim.lock"):
            yield
    else:
        store.close()
        with inspect(folder):
            yield


@pytest.mark.parametrize("does", ["reads", "trims"])
async def test_a_folder_that_another_process_reads_or_trims_is_waited_for(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture, does: str
) -> None:
    with ExitStack() as held:
        held.enter_context(passing_by(tmp_path, does))

        async def leave() -> None:
            await trio.sleep(60.0)
            held.close()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(leave)
            started = trio.current_time()
            async with accounts_in(tmp_path) as accounts:
                assert await accounts["anna"].ask(Deposit(5)) == 5
            assert 60.0 <= trio.current_time() - started < 62.0
    assert re.findall(r"has this journal open and (\w+) it; waiting until it is free", caplog.text) == [does]


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


@pytest.mark.parametrize("keeper", [False, True], ids=["folder", "keeper"])
@pytest.mark.parametrize("does", ["reads", "trims"])
async def test_a_start_that_is_cancelled_while_it_waits_for_a_folder_leaves_nothing_behind(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, does: str, keeper: bool
) -> None:
    """It ends at once; no actor of it lives on, and the folder has the files of the other process."""
    with passing_by(tmp_path, does):
        before = files_in(tmp_path)
        async with ActorSystem() as system:
            started, actors = trio.current_time(), system.statistics().actors
            with trio.move_on_after(60.0) as scope:
                await shards(system, Account, events=Deposited | Withdrawn, journal=tmp_path, shards=2, keeper=keeper)
            assert scope.cancelled_caught
            assert trio.current_time() - started == 60.0
            await trio.testing.wait_all_tasks_blocked()
            assert system.statistics().actors == actors
            assert files_in(tmp_path) == before
    async with accounts_in(tmp_path) as accounts:
        assert await accounts["anna"].ask(Deposit(5)) == 5


@pytest.mark.parametrize("does", ["reads", "trims"])
async def test_a_folder_that_another_process_reads_or_trims_without_end_is_refused(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch, does: str
) -> None:
    monkeypatch.setattr(asking, "PASSED_WITHIN", 8.0)
    started = trio.current_time()
    with passing_by(tmp_path, does), pytest.raises(JournalLocked, match=f"and {does} it$") as caught:
        async with accounts_in(tmp_path):
            pass
    assert caught.value.passing
    assert 8.0 <= trio.current_time() - started < 9.0


async def test_a_folder_that_another_process_leaves_meanwhile_is_waited_for(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async def leave(store: Store) -> None:
        await trio.sleep(3.0)
        store.close()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(leave, Store.open(tmp_path, ShardLog([Deposited, Withdrawn]).schema, log_config(2)))
        started = trio.current_time()
        async with accounts_in(tmp_path) as accounts:
            assert 3.0 <= trio.current_time() - started < 5.0
            assert await accounts["anna"].ask(Deposit(5)) == 5


async def test_an_erased_entity_is_gone_from_the_files(tmp_path: Path) -> None:
    async with accounts_in(tmp_path, shards=1) as accounts:
        for name in ("anna-of-the-hill", "bert"):
            await accounts[name].ask(Deposit(5), command="order-1")
        assert await accounts.erase("anna-of-the-hill") == 1
        with pytest.raises(EntityErased, match="'anna-of-the-hill' was erased, and takes no commands"):
            await accounts["anna-of-the-hill"].ask(Balance())
        assert await accounts.erase("cleo") == 0
        assert await accounts["bert"].ask(Deposit(1)) == 6
    async with accounts_in(tmp_path, shards=1) as accounts:
        with pytest.raises(EntityErased):
            await accounts["anna-of-the-hill"].ask(Deposit(1))
        assert await accounts["bert"].ask(Balance()) == 6
    kinds = {row for row in rows_of(tmp_path, "entity", "kind", shards=1) if row[0] != "bert"}
    assert kinds == {("anna-of-the-hill", "$erased"), ("cleo", "$erased")}
