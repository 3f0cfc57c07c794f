"""Old rows of durable actors go into an archive: by the shards, by another program, and by the command line; erasing reaches it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

pytest.importorskip("pyarrow")

import pyarrow.dataset
from tests.actors.durable.accounts import EVENTS, Account, Balance, Deposit
from tests.actors.durable.test_reminders import World, world
from tests.actors.durable.test_trim_log import FOREVER
from tests.actors.durable.test_trimming import accounts_in, kinds_in

from levada.actors import cli
from levada.actors.durable import EntityErased, Keep, Shards, log_columns, log_config, shards, trim_log
from levada.actors.journal import Extent, GetExtent, Journal, JournalError
from levada.actors.journal.archive import Archive
from levada.framework import ActorSystem, bounded
from levada.framework.errors import ConfigurationError
from levada.framework.files import Files

__all__ = ["world"]  # a fixture

Kind = tuple[str, int, str]


def archived(place: Path) -> dict[int, Kind]:
    """The entity, the sequence and the kind of each row of shard 0 that is archived, by its offset."""
    table = pyarrow.dataset.dataset(place).to_table(["_offset", "entity", "sequence", "kind"])
    return {row["_offset"]: (row["entity"], row["sequence"], row["kind"]) for row in table.to_pylist()}


async def one_table(accounts: Shards[Any], place: Path) -> dict[int, Kind]:
    """The rows of entities in both, as a reader finds them."""
    assert accounts.journal is not None
    extent: Extent = await accounts.journal.ask(GetExtent())
    whole = extent.whole[0]
    columns, found = log_columns(EVENTS), dict[int, Kind]()
    for first, rows in Archive.at(str(place), Files()).rows(0, 0, whole, columns):
        for offset, row in enumerate(rows.to_pylist(), first):
            found[offset] = row["entity"], row["sequence"], row["kind"]
    hot = await kinds_in(accounts.journal)
    return {offset: row for offset, row in (found | {n: hot[n] for n in hot if n >= whole}).items() if row[0]}


async def test_shards_archive_what_they_trim(tmp_path: Path, world: World) -> None:
    place = tmp_path / "archive"
    async with accounts_in(tmp_path / "log", clock=world, keep=Keep(100.0, place)) as accounts:
        for turn in range(2):
            for number in range(6):
                await accounts["anna"].ask(Deposit(1), command=f"{turn} {number}")
                await accounts["bert"].ask(Deposit(1))
            rows = await kinds_in(accounts.journal)
            all_rows = {offset: row for offset, row in rows.items() if row[0]} | await one_table(accounts, place)
            while (await kinds_in(accounts.journal)).keys() >= rows.keys():
                world.jump(50.0)
                await trio.testing.wait_all_tasks_blocked()
            left = await kinds_in(accounts.journal)
            gone = archived(place)
            assert all(gone[offset] == row for offset, row in rows.items() if offset not in left and row[0])
            assert await one_table(accounts, place) == all_rows
        assert len(list(place.glob("shard-0/*.parquet"))) == 2
        assert await accounts["anna"].ask(Deposit(1), command="1 5") == 12


async def test_an_archive_that_is_out_of_reach_keeps_the_rows_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with accounts_in(tmp_path / "log") as accounts:
        for _ in range(7):
            await accounts["anna"].ask(Deposit(1))
    (tmp_path / "file").touch()
    async with ActorSystem("test", **FOREVER) as system:
        for where in (tmp_path / "file", "nothing://bucket/accounts"):
            with pytest.raises(JournalError):
                await trim_log(system, tmp_path / "log", keep=0, archive=where)
        with pytest.raises(ConfigurationError, match="has a password") as caught:
            await trim_log(system, tmp_path / "log", keep=0, archive="s3://me:secret@bucket/accounts")
        assert "secret" not in str(caught.value)
        with pytest.raises(ConfigurationError, match="is inside its log"):
            await trim_log(system, tmp_path / "log", keep=0, archive=tmp_path / "log" / "old")
        for log, where in ((tmp_path / "log", tmp_path / "log" / "old"), (tmp_path / "a" / "log", tmp_path / "a")):
            with pytest.raises(ConfigurationError, match=r"is inside its (log|archive)"):
                await shards(system, Account, events=EVENTS, journal=log, shards=1, keep=Keep(1.0, where))
        assert not (tmp_path / "a").exists()
        with pytest.raises(ConfigurationError, match="wanted seconds"):
            Keep(-1.0, tmp_path)
    async with accounts_in(tmp_path / "log") as accounts:
        extent: Extent = await accounts.journal.ask(GetExtent())  # type: ignore[union-attr]
        assert not extent.trimmed


async def test_a_log_is_archived_closed_and_while_its_program_runs(tmp_path: Path) -> None:
    log, place = tmp_path / "log", tmp_path / "archive"
    async with ActorSystem("test", **FOREVER) as system:
        async with accounts_in(log) as accounts:
            for number in range(7):
                await accounts["anna"].ask(Deposit(1), command=f"anna {number}")
        assert await trim_log(system, log, keep=0, remember=3, archive=place) == 4
        journal: Any = partial(
            Journal, log, log_columns(EVENTS), config=log_config(1), clean_every=0.01, reopen_every=1.0
        )
        ref = system.spawn(journal, mailbox=bounded(256))
        accounts = await shards(system, Account, events=EVENTS, journal=ref, shards=1, snapshot_every=5, remember=3)
        for number in range(7, 12):
            await accounts["anna"].ask(Deposit(1), command=f"anna {number}")
        assert await trim_log(system, log, keep=0, remember=3, archive=place) > 0
        events = [row for row in (await one_table(accounts, place)).values() if not row[2].startswith("$")]
        assert [sequence for _, sequence, _ in events] == [*range(1, 13)]
        assert len(list(place.glob("shard-0/*.parquet"))) == 2


async def test_an_erased_entity_is_gone_from_the_archive(tmp_path: Path) -> None:
    place = tmp_path / "archive"
    keep = Keep(1e9, place)
    async with accounts_in(tmp_path / "log", keep=keep) as accounts:
        for _ in range(7):
            await accounts["anna"].ask(Deposit(1))
            await accounts["bert"].ask(Deposit(1))
    async with ActorSystem("test", **FOREVER) as system:
        await trim_log(system, tmp_path / "log", keep=0, archive=place)
    async with accounts_in(tmp_path / "log", keep=keep) as accounts:
        assert {"anna", "bert"} == {name for name, *_ in archived(place).values()}
        before = await one_table(accounts, place)
        await accounts.erase("anna")
        assert {"bert"} == {name for name, *_ in archived(place).values()}
        after = await one_table(accounts, place)
        [erased] = after.keys() - before.keys()
        assert after.pop(erased)[::2] == ("anna", "$erased")
        assert after == {offset: row for offset, row in before.items() if row[0] == "bert"}
        with pytest.raises(EntityErased):
            await accounts["anna"].ask(Balance())
        [file] = place.glob("shard-0/*.parquet")
        whole = file.read_bytes()
        file.write_bytes(b"damaged")
        with pytest.raises(JournalError, match=r"takes no commands any more.*call erase\(\) again.*archive"):
            await accounts.erase("bert")
        file.unlink()
        with pytest.raises(JournalError, match="mount the archive"):
            await accounts.erase("bert")
        file.write_bytes(whole)
    async with accounts_in(tmp_path / "log") as accounts:
        with pytest.raises(JournalError, match=r"takes no commands any more.*is not named"):
            await accounts.erase("bert")
        assert {"bert"} == {name for name, *_ in archived(place).values()}
    async with accounts_in(tmp_path / "log", keep=keep) as accounts:
        await accounts.erase("bert")
        assert not archived(place)


def test_the_command_line_archives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def fill() -> None:
        async with accounts_in(tmp_path / "log") as accounts:
            for number in range(7):
                await accounts["anna"].ask(Deposit(1), command=f"anna {number}")

    trio.run(fill)
    arguments = ["journal", "trim", str(tmp_path / "log"), "--keep", "0", "--remember", "3", "--archive"]
    assert cli.main([*arguments, "s3://key:secret@bucket"]) == 2
    assert "has a password" in capsys.readouterr().err
    assert cli.main([*arguments, str(tmp_path / "archive")]) == 0
    assert capsys.readouterr().out == "4 rows were trimmed\n"
    assert len(archived(tmp_path / "archive")) == 8
    assert cli.main(["journal", "ls", str(tmp_path / "log")]) == 0
    assert f"  archive   {tmp_path / 'archive'}: rows before 0: 9\n" in capsys.readouterr().out
    assert cli.main(["journal", "ls", str(tmp_path / "log"), "--json"]) == 0
    archives = json.loads(capsys.readouterr().out)["archives"]
    assert archives == {"0": {"place": str(tmp_path / "archive"), "end": 9}}


def test_an_export_has_the_rows_of_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, place = tmp_path / "log", tmp_path / "archive"

    async def fill() -> None:
        async with accounts_in(log) as accounts:
            for number in range(14):
                await accounts["anna"].ask(Deposit(1), command=f"anna {number}")
        async with ActorSystem("test", **FOREVER) as system:
            assert await trim_log(system, log, keep=0, remember=3, archive=place) > 0

    trio.run(fill)
    arguments = ["journal", "export", str(log), "--events"]
    assert cli.main([*arguments, str(tmp_path / "left.parquet")]) == 0
    assert cli.main([*arguments, str(tmp_path / "all.parquet"), "--archive", str(place)]) == 0
    capsys.readouterr()
    left, both = (
        pyarrow.dataset.dataset(tmp_path / name).to_table(["sequence"]).column("sequence").to_pylist()
        for name in ("left.parquet", "all.parquet")
    )
    assert both == [*range(1, 15)]
    assert 0 < len(left) < 14
