"""A log that lacks rows which a shard has written: an older copy was put in its place. The shard says so, and does not go on."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import MockClock

pytest.importorskip("pyarrow")

from tests.actors.durable.accounts import EVENTS, Account, Balance, Deposit
from tests.actors.durable.memory_journal import MemoryJournal, no_rows
from tests.actors.durable.test_placement import APP
from tests.actors.nodes.conftest import nodes_here

from levada.actors.durable import Shards, log_columns, shard, shards
from levada.actors.journal import JournalBehind, JournalError, ReadRows, Rows
from levada.framework import ActorSystem, handles

GONE = "shard 0: rows 3 to 5 were on the disk and are gone from the log, which was replaced by an older copy"

pytestmark = pytest.mark.usefixtures("only_what_callers_see")


async def refused(accounts: Shards[Any], question: Any, command: str | None = None) -> JournalBehind:
    with pytest.raises(JournalBehind, match=GONE) as caught:
        await accounts["anna"].ask(question, command=command)
    return caught.value


@pytest.mark.parametrize(
    ("question", "command"),
    [(Deposit(1), None), (Deposit(1), "c4")],
    ids=["a command that writes", "a repetition, whose answer is gone"],
)
async def test_a_shard_without_its_rows_names_them_and_answers_nothing_from_memory(
    autojump_clock: MockClock, question: Any, command: str | None
) -> None:
    rows = no_rows()
    async with ActorSystem("test", ask_timeout=1000.0) as system:
        journal = system.spawn(MemoryJournal, log_columns(EVENTS), rows)
        accounts = await shards(system, Account, events=EVENTS, journal=journal, shards=1)
        assert [await accounts["anna"].ask(Deposit(1), command=f"c{n}") for n in range(5)] == [1, 2, 3, 4, 5]
        newest = list(rows[0])
        del rows[0][3:]

        error = await refused(accounts, question, command)
        assert (error.partition, error.wanted, error.kept) == (0, 6, 3)
        for each in (Balance(), Deposit(1), Balance()):
            await refused(accounts, each)
        await trio.sleep(3 * shard.LAST_DELAY)
        await refused(accounts, Balance())
        assert len(rows[0]) == 3  # nothing was written into the older copy

        rows[0][:] = newest
        await trio.sleep(shard.LAST_DELAY + 0.1)
        assert await accounts["anna"].ask(Deposit(1), command="c4") == 5
        assert await accounts["anna"].ask(Deposit(1)) == 6


class Erased(MemoryJournal):
    """Has lost the rows of answers, and nothing else."""

    @handles
    def read(self, m: ReadRows) -> Rows:
        return Rows(m.partition, m.end or 0, 0, b"")


async def test_an_answer_whose_row_was_erased_is_an_error_that_says_so(autojump_clock: MockClock) -> None:
    async with ActorSystem("test", ask_timeout=1000.0) as system:
        journal = system.spawn(Erased, log_columns(EVENTS), no_rows())
        accounts = await shards(system, Account, events=EVENTS, journal=journal, shards=1)
        assert await accounts["anna"].ask(Deposit(1), command="one") == 1
        with pytest.raises(JournalError, match=r"^row 1 of shard 0, which has the answer, is gone from the log$"):
            await accounts["anna"].ask(Deposit(1), command="one")
        assert await accounts["anna"].ask(Deposit(1)) == 2


async def test_an_older_copy_is_noticed_when_the_shard_starts_again(autojump_clock: MockClock) -> None:
    rows = no_rows()
    async with ActorSystem("test", ask_timeout=1000.0) as system:
        journal = system.spawn(MemoryJournal, log_columns(EVENTS), rows)
        accounts = await shards(system, Account, events=EVENTS, journal=journal, shards=1)
        assert [await accounts["anna"].ask(Deposit(1)) for _ in range(5)] == [1, 2, 3, 4, 5]
        owner = system.lookup("/Account/0")
        assert owner is not None
        del rows[0][3:]
        owner.kill()
        await refused(accounts, Balance())


async def test_on_nodes_the_shard_that_is_opened_again_knows_what_it_had_written(autojump_clock: MockClock) -> None:
    rows = no_rows()
    async with (
        ActorSystem("driver", shutdown_timeout=100.0, ask_timeout=150.0) as system,
        nodes_here(system, 1, APP) as (nodes, _),
    ):
        journal = system.spawn(MemoryJournal, log_columns(EVENTS), rows)
        accounts = await shards(system, Account, events=EVENTS, journal=journal, shards=1, nodes=nodes)
        assert [await accounts["anna"].ask(Deposit(1)) for _ in range(5)] == [1, 2, 3, 4, 5]
        del rows[0][3:]
        for each in (Deposit(1), Balance(), Deposit(1)):
            await refused(accounts, each)
        await trio.sleep(3 * shard.LAST_DELAY)
        await refused(accounts, Balance())
        assert len(rows[0]) == 3
        accounts.ref.stop()
        await accounts.ref.terminated()
