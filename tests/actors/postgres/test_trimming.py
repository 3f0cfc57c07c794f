"""A log in PostgreSQL is trimmed: by its shards, by another program, and in several transactions."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("psycopg")

import pyarrow as pa
from tests.actors.durable.accounts import EVENTS, Account, Balance, Deposit
from tests.actors.postgres.cluster import Cluster
from tests.actors.postgres.test_questions import log_at, rows_for, table_of

from levada.actors.durable import shards, trim_log
from levada.actors.journal import (
    Append,
    CopyRows,
    EraseEntity,
    Fenced,
    GetExtent,
    JournalDamaged,
    ReadRows,
    Trimmed,
    TrimRows,
    stream_of,
)
from levada.actors.postgres import log as postgres_log
from levada.framework import ActorSystem
from levada.framework.errors import ConfigurationError


@pytest.mark.ci
async def test_rows_behind_snapshots_are_deleted_in_batches(
    url: str, server: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_log, "MOST_TRIMMED", 3)
    async with ActorSystem("test", ask_timeout=60.0) as system:
        with pytest.raises(ConfigurationError, match="no log of this name"):
            await trim_log(system, url, keep=0)  # there is none, and none is made
        options: dict[str, Any] = {"events": EVENTS, "journal": url, "shards": 2, "snapshot_every": 5, "remember": 3}
        accounts = await shards(system, Account, **options)
        for name in ("anna", "bert"):
            for number in range(12):
                await accounts[name].ask(Deposit(1), command=f"{name} {number}")
        assert await trim_log(system, url, keep=3600.0, remember=3) == 0
        assert await trim_log(system, url, keep=0, remember=3) == 20
        assert await trim_log(system, url, keep=0, remember=3) == 0
        assert await accounts["anna"].ask(Deposit(1), command="anna 9") == 10
    table = table_of(url)
    left = server.execute(f"SELECT sequence FROM {table} WHERE entity = 'anna' AND kind NOT LIKE '$%' ORDER BY _offset")
    assert [sequence for (sequence,) in left] == [10, 11, 12]
    async with ActorSystem("test", ask_timeout=60.0) as system:
        accounts = await shards(system, Account, **options)
        assert await accounts["bert"].ask(Deposit(1), command="bert 11") == 12
        assert [await accounts[name].ask(Balance()) for name in ("anna", "bert")] == [12, 12]


@pytest.mark.ci
async def test_a_trim_forgets_erased_rows_of_its_shard_only_and_only_before_its_end(url: str, server: Cluster) -> None:
    """The others are still told from rows that were deleted by hand."""
    async with log_at(url) as log:
        for shard, entities in enumerate(("aeaeeab", "beb")):
            await log.ask(Append(rows_for(*entities), partition=shard, at=0))
            await log.ask(EraseEntity("e", partition=shard))
        table = table_of(url)
        server.execute(f"UPDATE {table} SET kind = '$snapshot' WHERE _shard = 0 AND _offset = 5")
        assert await log.ask(TrimRows(0, 1e12)) == Trimmed(0, 2)
        assert (await log.ask(GetExtent())).trimmed == {0: 3, 1: 0}
        noted = server.execute(f'SELECT shard, first, "end" FROM {table}_erased ORDER BY 1')
        assert noted == [(0, 3, 5), (1, 1, 2)]
        assert [(await log.ask(ReadRows(shard, start))).count for shard, start in ((0, 3), (1, 0), (1, 1))] == [2, 1, 1]
    async with log_at(url) as log:
        assert (await log.ask(GetExtent())).end == {0: 7, 1: 3}


@pytest.mark.ci
async def test_rows_of_a_copy_that_come_too_late_note_nothing_as_gone(url: str, server: Cluster) -> None:
    async with log_at(url, 1) as log:
        await log.ask(Append(rows_for("a", "b", "c"), partition=0, at=0))
        late = rows_for("d").add_column(0, "offset", pa.array([3]))
        assert await log.ask(CopyRows(stream_of(late), 0, 0, 4)) == Fenced(0, 3)
        assert await log.ask(CopyRows(b"", 0, 0, 4)) == Fenced(0, 3)
        server.execute(f"DELETE FROM {table_of(url)} WHERE _offset = 1")
        with pytest.raises(JournalDamaged, match="1 of the rows 1 to 1 of shard 0 are gone"):
            await log.ask(ReadRows(0, 1))
