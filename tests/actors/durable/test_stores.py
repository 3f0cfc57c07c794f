"""Logs that grow while they are open, and stores that every process opens for itself."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest
from trio.testing import MockClock

pytest.importorskip("pyarrow")

import pyarrow as pa
from tests.actors.durable.accounts import EVENTS, Account, Balance, Deposit, Deposited, Withdraw
from tests.actors.durable.memory_journal import MemoryJournal, Row, no_rows
from tests.actors.durable.test_placement import APP
from tests.actors.nodes.conftest import nodes_here

from levada.actors.durable import log_columns, shards
from levada.actors.journal import (
    Append,
    Appended,
    Fenced,
    GetSchema,
    Journal,
    JournalLocked,
    LogStore,
    MailboxLog,
    SchemaMismatch,
)
from levada.framework import ActorSystem, Ref, handles, message
from levada.framework.errors import ConfigurationError


@attrs.define
class Kept:
    """A log of a store."""

    rows: list[list[Row]] = attrs.field(factory=no_rows)
    columns: pa.Schema = attrs.field(factory=lambda: pa.schema([]))
    opened: list[str] = attrs.field(factory=list)
    """The systems that have opened it, in their order."""
    written: list[str] = attrs.field(factory=list)
    """The systems whose appends came."""
    refused: bool = False


LOGS: dict[str, Kept] = {}


class Opened(MemoryJournal):
    """Grows."""

    log: Kept = attrs.field(kw_only=True)

    @handles
    def columns(self, m: GetSchema) -> bytes:
        if m.wanted is not None:
            self.log.columns = self.schema = pa.ipc.read_schema(pa.py_buffer(m.wanted))
        return super().columns(m)

    @handles
    async def append(self, m: Append) -> Appended | Fenced:
        self.log.written.append(self.system.name)
        return await super().append(m)


@message("test.stores.store", frozen=True)
class MemoryStore:
    """The logs of `LOGS`."""

    log: str

    @asynccontextmanager
    async def open(self, system: ActorSystem, shards: int) -> AsyncIterator[Ref[Any]]:
        log = LOGS[self.log]
        log.opened.append(system.name)
        if log.refused:
            raise JournalLocked("it is open elsewhere", path=self.log)
        journal = system.spawn(lambda: Opened(log.columns, log.rows, log=log))
        yield journal
        journal.stop()


STORE: LogStore = MemoryStore("one")  # for the type checker
JOURNAL: type[MailboxLog] = Journal


@pytest.fixture
def kept() -> Iterator[Kept]:
    found = LOGS["one"] = Kept()
    yield found
    del LOGS["one"]


async def test_a_new_log_takes_the_columns_of_its_events_and_grows_with_them(
    autojump_clock: MockClock, kept: Kept
) -> None:
    class Older(Account):
        appliers: ClassVar[dict[type, Any]] = {Deposited: Account.appliers[Deposited]}

    async with ActorSystem("test", ask_timeout=1000.0) as system:
        accounts: Any = await shards(system, Older, events=Deposited, journal=STORE, shards=1)
        assert await accounts["anna"].ask(Deposit(5)) == 5
    assert kept.columns == log_columns(Deposited)
    async with ActorSystem("test", ask_timeout=1000.0) as system:
        accounts = await shards(system, Account, events=EVENTS, journal=STORE, shards=1)
        assert await accounts["anna"].ask(Withdraw(2)) == 3
    assert kept.columns == log_columns(EVENTS, log_columns(Deposited))
    assert kept.opened == ["test"] * 2
    async with ActorSystem("test", ask_timeout=1000.0) as system:
        kept.columns = pa.schema([*list(log_columns(Deposited))[:-1], pa.field("amount", pa.string())])
        with pytest.raises(SchemaMismatch, match="amount: int64, in the journal string"):
            await shards(system, Account, events=EVENTS, journal=STORE, shards=1)


async def test_every_node_opens_the_store_for_itself(autojump_clock: MockClock, kept: Kept) -> None:
    kept.rows = no_rows(8)
    async with (
        ActorSystem("driver", shutdown_timeout=100.0, ask_timeout=150.0) as system,
        nodes_here(system, 2, APP) as (nodes, _),
    ):
        accounts = await shards(system, Account, events=EVENTS, journal=STORE, shards=8, nodes=nodes)
        names = [f"e{number}" for number in range(16)]
        assert [await accounts[name].ask(Deposit(1)) for name in names] == [1] * 16
        assert [await accounts[name].ask(Balance()) for name in names] == [1] * 16
        assert sorted(kept.opened) == ["driver", "n0", "n1"]
        assert set(kept.written) == {"n0", "n1"}
        assert await shards(system, Account, events=EVENTS, journal=STORE, shards=8, nodes=nodes)
        with pytest.raises(ConfigurationError, match=r"journal=MemoryStore\(log='one'\), now MemoryStore\(log='two'\)"):
            await shards(system, Account, events=EVENTS, journal=MemoryStore("two"), shards=8, nodes=nodes)
        accounts.ref.stop()
        await accounts.ref.terminated()


async def test_a_store_that_cannot_be_opened_says_why(autojump_clock: MockClock, kept: Kept) -> None:
    kept.refused = True
    async with (
        ActorSystem("driver", shutdown_timeout=100.0, ask_timeout=150.0) as system,
        nodes_here(system, 1, APP) as (nodes, _),
    ):
        for name, where in (("far", nodes), ("near", None), ("near", None)):
            with pytest.raises(JournalLocked, match=r"^one: it is open elsewhere$"):
                await shards(system, Account, events=EVENTS, journal=STORE, shards=1, nodes=where, name=name)


async def test_a_keeper_is_for_folders(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with ActorSystem("test") as system:
        with pytest.raises(
            ConfigurationError, match="keeper=True needs a folder as journal=, and got a ref or a store"
        ):
            await shards(system, Account, events=EVENTS, journal=STORE, shards=1, keeper=True)
