"""The archive of a log in PostgreSQL: old rows are in it before they are deleted, by its shards or by another program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("psycopg")

import pyarrow as pa
import trio
from tests.actors.durable.accounts import EVENTS, Account, Deposit
from tests.actors.durable.test_archive import archived, one_table
from tests.actors.postgres.cluster import Cluster
from tests.actors.postgres.test_questions import table_of

from levada.actors.durable import Keep, shards, trim_log
from levada.actors.journal import JournalError, JournalLocked
from levada.actors.journal.archive import Archive
from levada.actors.postgres import PostgresStore
from levada.actors.postgres.copying import locked_postgres
from levada.actors.postgres.errors import DatabaseAway
from levada.framework import ActorSystem
from levada.framework.files import Files


async def test_rows_are_archived_before_they_are_deleted(url: str, server: Cluster, tmp_path: Path) -> None:
    place = tmp_path / "archive"
    options: dict[str, Any] = {
        "events": EVENTS, "journal": url, "shards": 1, "snapshot_every": 5, "remember": 3, "keep": Keep(1e9, place),
    }  # fmt: skip
    async with ActorSystem("test", ask_timeout=60.0) as system:
        accounts = await shards(system, Account, **options)
        for number in range(12):
            for name in ("anna", "bert"):
                await accounts[name].ask(Deposit(1), command=f"{name} {number}")
        before = await one_table(accounts, place)
        (tmp_path / "file").touch()
        with pytest.raises(JournalError, match="file"):
            await trim_log(system, url, keep=0, remember=3, archive=tmp_path / "file")
        assert await trim_log(system, url, keep=3600.0, remember=3, archive=place) == 0
        with pytest.raises(JournalError, match="is not named"):
            await trim_log(system, url, keep=0, remember=3)
        assert not place.exists()
        assert await trim_log(system, url, keep=0, remember=3, archive=place) == 20
        assert await trim_log(system, url, keep=0, remember=3, archive=place) == 0
        assert await one_table(accounts, place) == before
        for number in range(12, 18):
            await accounts["anna"].ask(Deposit(1), command=f"anna {number}")
        with pytest.raises(JournalError, match="and the files here end before row 0"):
            await trim_log(system, url, keep=0, remember=3, archive=tmp_path / "other")
        assert await trim_log(system, url, keep=0, remember=3, archive=place) > 0
        assert len(list(place.glob("shard-0/*.parquet"))) == 2
        events = [row for row in (await one_table(accounts, place)).values() if row[2] == "test.durable.deposited"]
        assert [sequence for name, sequence, _ in events if name == "anna"] == [*range(1, 19)]
        with pytest.raises(JournalError, match="is not named"):
            await trim_log(system, url, keep=0, remember=3)
        await accounts.erase("anna")
        assert {"bert"} == {name for name, *_ in archived(place).values()}
    async with ActorSystem("forgetful", ask_timeout=60.0) as system:
        options["keep"] = None
        forgetful = await shards(system, Account, **options)
        with pytest.raises(JournalError, match=r"takes no commands any more.*is not named"):
            await forgetful.erase("bert")
        assert {"bert"} == {name for name, *_ in archived(place).values()}
        await trim_log(system, url, keep=0, remember=3, forget_archive=True)
        await forgetful.erase("bert")
    left = server.execute(f"SELECT DISTINCT kind FROM {table_of(url)} WHERE entity = 'anna'")
    assert left == [("$erased",)]


async def test_rows_of_a_process_that_died_behind_its_archive_are_in_both(url: str, tmp_path: Path) -> None:
    async with ActorSystem("test", ask_timeout=60.0) as system:
        accounts = await shards(system, Account, events=EVENTS, journal=url, shards=1, snapshot_every=5, remember=3)
        for _ in range(12):
            await accounts["anna"].ask(Deposit(1))
        before = await one_table(accounts, tmp_path)
        with locked_postgres(PostgresStore.at(url, "").address, 0) as log:
            Archive.at(str(tmp_path), Files()).add(log, 0, 0, 1e12)
        assert await one_table(accounts, tmp_path) == before
        assert await trim_log(system, url, keep=0, remember=3, archive=tmp_path) > 0
        assert await one_table(accounts, tmp_path) == before
        assert archived(tmp_path) == before


@pytest.mark.parametrize("reads", [False, True])
async def test_a_connection_that_is_lost_behind_the_lock_of_an_archive_is_named(
    url: str, server: Cluster, reads: bool
) -> None:
    async with ActorSystem("test", ask_timeout=60.0) as system:
        accounts = await shards(system, Account, events=EVENTS, journal=url, shards=1)
        await accounts["anna"].ask(Deposit(1))
    kill = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND state = 'idle in transaction'"
    with (
        pytest.raises(DatabaseAway, match=r"terminating connection|server closed the connection"),
        locked_postgres(PostgresStore.at(url, "").address, 0) as log,
    ):
        assert server.execute(kill) == [(True,)]
        if reads:
            list(log.pages(0, 0, 10))


@pytest.mark.parametrize("erases", [False, True])
async def test_rows_do_not_pass_by_an_archive_that_another_process_begins_meanwhile(
    url: str, server: Cluster, tmp_path: Path, erases: bool
) -> None:
    async with ActorSystem("test", ask_timeout=60.0) as system:
        options: dict[str, Any] = {
            "events": EVENTS,
            "journal": url,
            "shards": 1,
            "snapshot_every": 5,
        }
        accounts = await shards(system, Account, **options)
        for _ in range(12):
            await accounts["anna"].ask(Deposit(1))
        before, table = await one_table(accounts, tmp_path), table_of(url)
        waits = "SELECT count(*)::text FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        async with trio.open_nursery() as nursery:
            with locked_postgres(PostgresStore.at(url, "").address, 0) as log:

                async def change() -> None:
                    with pytest.raises(JournalError, match="is not named"):
                        await (accounts.erase("anna") if erases else trim_log(system, url, keep=0, remember=3))

                nursery.start_soon(change)
                while server.execute(waits) != [("1",)]:
                    await trio.lowlevel.checkpoint()
                end = Archive.at(str(tmp_path), Files()).add(log, 0, 0, 1e12)
                server.execute(
                    f"INSERT INTO {table}_trims (shard, archive, archived) VALUES (0, '{tmp_path}', {end}) RETURNING shard"
                )
        assert archived(tmp_path) == before
        rows = server.execute(f"SELECT count(*)::text FROM {table} WHERE entity = 'anna' AND kind <> '$erased'")
        assert rows == [(str(len(before)),)]


async def test_one_process_at_a_time_changes_the_archive_of_a_shard(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ActorSystem("test", ask_timeout=60.0) as system:
        accounts = await shards(system, Account, events=EVENTS, journal=url, shards=2, snapshot_every=5)
        for _ in range(7):
            await accounts["anna"].ask(Deposit(1))
            await accounts["carl"].ask(Deposit(1))
        store = PostgresStore.at(url, "")
        monkeypatch.setattr("levada.actors.postgres.opening.LOCKED_WITHIN", "10ms")
        with locked_postgres(store.address, 1) as log:
            assert isinstance(log.columns, pa.Schema)
            with pytest.raises(JournalLocked, match="another process changes the archive of shard 1"):
                await trim_log(system, url, keep=0, archive=tmp_path)
        assert await trim_log(system, url, keep=0, archive=tmp_path) > 0
