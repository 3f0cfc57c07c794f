"""The columns of a log whose journal is given as a ref: an existing log keeps its own, and they are checked before the first command."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from trio.testing import MockClock

pytest.importorskip("pyarrow")

import pyarrow as pa
from tests.actors.durable.accounts import EVENTS, Account, Balance, Deposit, Deposited, Withdraw, Withdrawn
from tests.actors.durable.memory_journal import MemoryJournal, no_rows
from tests.actors.durable.test_placement import APP
from tests.actors.nodes.conftest import nodes_here

from levada.actors.durable import log_columns, log_config, shards
from levada.actors.journal import GetSchema, Journal, JournalConfig, JournalLocked, SchemaMismatch, Store
from levada.framework import ActorSystem, handles
from levada.framework.errors import ConfigurationError

NOTE = pa.field("note", pa.string())
AMOUNT = pa.field("amount", pa.int64())
HEAD = list(log_columns(Deposited))[:-1]


@pytest.mark.parametrize(
    "columns",
    [[*HEAD, NOTE, AMOUNT], [*HEAD, AMOUNT, NOTE, pa.field("another", pa.int64())]],
    ids=["other order", "of other events too"],
)
async def test_a_log_keeps_the_columns_that_it_has(autojump_clock: MockClock, columns: list[pa.Field]) -> None:
    rows = no_rows()
    for events in (EVENTS, Withdrawn | Deposited):
        async with ActorSystem("test", ask_timeout=1000.0) as system:
            journal = system.spawn(MemoryJournal, pa.schema(columns), rows)
            accounts = await shards(system, Account, events=events, journal=journal, shards=1)
            await accounts["anna"].ask(Deposit(5))
            await accounts["anna"].ask(Withdraw(2))
    assert [list(row) for row in rows[0]] == [["offset", *(field.name for field in columns)]] * 6
    assert [row["amount"] for row in rows[0]] == [None, 5, 2] * 2
    async with ActorSystem("test", ask_timeout=1000.0) as system:
        journal = system.spawn(MemoryJournal, pa.schema(columns), rows)
        accounts = await shards(system, Account, events=EVENTS, journal=journal, shards=1)
        assert await accounts["anna"].ask(Balance()) == 6


@pytest.mark.parametrize(
    ("columns", "error", "says"),
    [
        (HEAD, ConfigurationError, r"the journal lacks the columns amount, note: open it with log_columns\(events, there\)"),
        ([*HEAD, NOTE], ConfigurationError, "the journal lacks the columns amount: open it"),
        ([*HEAD, AMOUNT, pa.field("note", pa.int64())], SchemaMismatch, "note: string, in the journal int64"),
        ([pa.field("offset", pa.int64()), *HEAD, AMOUNT, NOTE], SchemaMismatch, "entity: column 1, in the journal column 2"),
    ],
    ids=["no events", "fewer events", "another type", "no log"],
)  # fmt: skip
async def test_columns_that_do_not_fit_are_refused_before_the_first_command(
    autojump_clock: MockClock, columns: list[pa.Field], error: type[Exception], says: str
) -> None:
    async with ActorSystem("test", ask_timeout=1000.0) as system:
        journal = system.spawn(MemoryJournal, pa.schema(columns), no_rows())
        with pytest.raises(error, match=says):
            await shards(system, Account, events=EVENTS, journal=journal, shards=1)


async def test_a_journal_without_an_index_is_refused_before_the_first_command(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with ActorSystem("test", ask_timeout=1000.0) as system:
        journal = system.spawn(partial(Journal, tmp_path, log_columns(EVENTS), config=JournalConfig(partitions=2)))
        with pytest.raises(ConfigurationError, match=r"open it with the config log_config\(2\) \(.*no key"):
            await shards(system, Account, events=EVENTS, journal=journal, shards=2)


def test_an_existing_log_grows_at_its_end(tmp_path: Path) -> None:
    with Store.open(tmp_path, pa.schema([*HEAD, NOTE]), log_config(1)) as store:
        there = store.schema
    grown = log_columns(EVENTS, there)
    assert grown == pa.schema([*there, AMOUNT])
    with Store.open(tmp_path, grown, log_config(1)) as store:
        assert store.schema.names == [*there.names, "amount"]


class Locked(MemoryJournal):
    """Is not open."""

    def __init__(self) -> None:
        super().__init__(pa.schema([]), no_rows())

    @handles
    def columns(self, m: GetSchema) -> bytes:
        self.reply_later().fail(JournalLocked("it is open elsewhere", path="/var/log"))
        return b""


async def test_what_a_journal_in_another_process_refuses_is_its_own_error(autojump_clock: MockClock) -> None:
    arguments: dict[str, Any] = {"events": EVENTS, "shards": 1}
    async with (
        ActorSystem("driver", shutdown_timeout=100.0, ask_timeout=150.0) as system,
        nodes_here(system, 1, APP) as (nodes, _),
    ):
        journal = await nodes.spawn(Locked, on=0)
        with pytest.raises(JournalLocked, match=r"^/var/log: it is open elsewhere$"):
            await shards(system, Account, journal=journal, **arguments)
