"""Logs copied to PostgreSQL, from it, and within it: the same rows at the same offsets, of one moment, whatever is killed."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import trio

pytest.importorskip("pyarrow")
pytest.importorskip("psycopg")

from tests.actors.durable.accounts import EVENTS, Account, Balance, Deposit
from tests.actors.durable.test_copy_log import Stop, copied, fill, rows_of, stop_after
from tests.actors.postgres.cluster import Cluster
from tests.actors.postgres.test_questions import table_of, terminate

from levada.actors.durable import EntityErased, copy_log, log_config, shards, trim_log
from levada.actors.durable.testing import _fault_checks
from levada.actors.journal import CopyUnfinished, Store, still
from levada.framework import ActorSystem
from levada.framework.errors import ConfigurationError

APP = Path(__file__).with_name("copying_app.py")


async def balances(journal: Any, *commands: tuple[str, Any, str]) -> list[int]:
    """Ask durable accounts over a log."""
    async with ActorSystem("test", ask_timeout=60.0) as system:
        accounts = await shards(system, Account, events=EVENTS, journal=journal, shards=2, snapshot_every=4)
        return [await accounts[name].ask(m, command=command) for name, m, command in commands]


@pytest.mark.ci
async def test_a_log_goes_to_postgresql_and_back(tmp_path: Path, server: Cluster) -> None:
    """Command ids, snapshots and erasures are the same, and rows have the same offsets."""
    one, two = (server.url(f"{server.schema()}.log") for _ in range(2))
    await fill(tmp_path / "a")
    async with ActorSystem("trim") as system:
        assert await trim_log(system, tmp_path / "a", keep=0, remember=3, archive=tmp_path / "archive") > 0
    found = await copied(tmp_path / "a", one, verify=True)
    assert found.target == f"postgresql://levada@{server.folder}:5432/postgres?table={table_of(one)}"
    for source, target in ((one, two), (two, tmp_path / "b")):
        assert (await copied(source, target, verify=True)).rows == found.rows
    assert rows_of(tmp_path / "b") == rows_of(tmp_path / "a")
    with (
        Store.open(tmp_path / "a", None, log_config(2)) as first,
        Store.open(tmp_path / "b", None, log_config(2)) as last,
    ):
        assert first.extent().trimmed == last.extent().trimmed != {}
        assert first.archives == last.archives != {}
    wanted = [("bert", Deposit(1), "c2"), ("anna", Deposit(2), "last"), ("anna", Deposit(2), "new")]
    for place in (one, two, tmp_path / "b"):
        assert await balances(place, *wanted) == [3, 7, 9]
        with pytest.raises(EntityErased):
            await balances(place, ("carl", Balance(), "x"))


@pytest.mark.ci
async def test_every_type_of_value_is_copied(tmp_path: Path, url: str) -> None:
    async with ActorSystem("test", ask_timeout=60.0) as system:
        options: dict[str, Any] = {"events": _fault_checks.Noted, "shards": 1}
        books = await shards(system, _fault_checks.Book, journal=tmp_path / "a", **options)
        events = [*_fault_checks.EVENTS, _fault_checks.event(9, text="a\0b", names={"a\0": 1})]
        for each in events:
            await books["a\0b"].ask(_fault_checks.Note(each))
    await copied(tmp_path / "a", url, verify=True)
    await copied(url, tmp_path / "b", verify=True)
    async with ActorSystem("test", ask_timeout=60.0) as system:
        for journal in (url, tmp_path / "b"):
            books = await shards(system, _fault_checks.Book, journal=journal, name=str(len(str(journal))), **options)
            assert await books["a\0b"].ask(_fault_checks.GetNotes()) == events


@pytest.mark.ci
async def test_a_copy_that_was_cut_short_is_no_log(
    tmp_path: Path, url: str, server: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on where it stopped, also with lost connections, and takes no other log."""
    monkeypatch.setattr(still, "PAGE_ROWS", 5)
    source, other = tmp_path / "a", tmp_path / "other"
    await fill(source)
    await fill(other)
    with pytest.raises(Stop):
        await copied(source, url, progress=stop_after(2))
    for journal, kind, says in (
        (None, CopyUnfinished, "it is not whole: run levada journal copy again"),
        (url, CopyUnfinished, "the source is a copy of another log, and is not whole"),
        (other, ConfigurationError, "is an unfinished copy of another log"),
    ):
        with pytest.raises(kind, match=says):
            if journal is None:
                await balances(url)
            else:
                await copied(journal, tmp_path / "c" if journal == url else url)

    def lose(*_: int) -> None:
        terminate(server)

    await copied(source, url, verify=True, progress=lose)
    await copied(url, tmp_path / "b", verify=True)
    assert rows_of(tmp_path / "b") == rows_of(source)
    assert (await copied(source, url)).rows == 0
    with pytest.raises(ConfigurationError, match="Nothing is overwritten: give the copy another name"):
        await copied(other, url)


@pytest.mark.ci
async def test_the_rows_of_one_moment_are_copied(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a program writes and erases meanwhile is not in the copy. The next attempt has it, and finishes erasures."""
    monkeypatch.setattr(still, "PAGE_ROWS", 5)
    async with ActorSystem("test", ask_timeout=60.0) as system:
        accounts = await shards(system, Account, events=EVENTS, journal=url, shards=2)

        async def work(number: int) -> None:
            for name in ("anna", "bert", "carl", "dora"):
                await accounts[name].ask(Deposit(number))

        for number in range(5):
            await work(number)
        changed = trio.Event()

        async def change() -> None:
            await work(100)
            await accounts.erase("bert")
            changed.set()

        changes = iter([change])

        def progress(*_: int) -> None:
            for each in changes:
                nursery.start_soon(each)

        async with trio.open_nursery() as nursery:
            await copy_log(system, url, tmp_path / "one", verify=True, progress=progress)
            await changed.wait()
        with pytest.raises(Stop):
            await copy_log(system, url, tmp_path / "two", progress=stop_after(1))
        await accounts.erase("anna")
        await copy_log(system, url, tmp_path / "two", verify=True)
    assert await balances(tmp_path / "one", *((name, Balance(), "x") for name in ("anna", "bert"))) == [10, 10]
    for name in ("anna", "bert"):
        with pytest.raises(EntityErased):
            await balances(tmp_path / "two", (name, Balance(), "x"))
    left = {row["entity"] for row in rows_of(tmp_path / "two").values() if row["kind"] != "$erased"}
    assert left == {"", "carl", "dora"}


@pytest.mark.ci
async def test_mistakes(tmp_path: Path, url: str, server: Cluster) -> None:
    assert await balances(url, ("anna", Deposit(1), "first")) == [1]
    await fill(tmp_path / "a")
    mistakes = [
        (tmp_path / "a", url, "has rows, and is no unfinished copy of the log"),
        (url, url, "the source and the target are the same log"),
        (server.url("nothing"), tmp_path / "b", r"there is no log of this name: give the name of its table, \?table="),
        (server.url(), tmp_path / "b", r"'' is no name for the table of a log: give one in the URL, \?table="),
    ]
    for source, target, says in mistakes:
        with pytest.raises(ConfigurationError, match=says):
            await copied(source, target)
    assert not await trio.Path(tmp_path / "b").exists()


@pytest.mark.release
async def test_a_dump_of_the_database_opens_as_the_log(url: str, server: Cluster) -> None:
    commands = [("anna", Deposit(n), f"c{n}") for n in (1, 2, 3)]
    assert await balances(url, *commands) == [1, 3, 6]
    schema = table_of(url).partition(".")[0]
    server.execute(f"CREATE DATABASE dump_{schema}")
    dump, there = str(server.folder / f"{schema}.sql"), server.url().replace("/postgres?", f"/dump_{schema}?")
    server.run("pg_dump", "-n", schema, "-f", dump, "-d", server.url())
    server.run("psql", "-q", "-f", dump, "-d", there)
    restored = url.replace("/postgres?", f"/dump_{schema}?")
    assert await balances(restored, *commands, ("anna", Deposit(4), "c4")) == [1, 3, 6, 10]


@pytest.mark.release
@pytest.mark.timeout(300)
async def test_a_copy_that_is_killed_again_and_again_is_whole_in_the_end(tmp_path: Path, server: Cluster) -> None:
    one, two = (server.url(f"{server.schema()}.log") for _ in range(2))
    await fill(tmp_path / "a")
    for source, target in ((tmp_path / "a", one), (one, two), (two, tmp_path / "b")):
        codes = [-signal.SIGKILL]
        while codes[-1] == -signal.SIGKILL:
            pages = str(1 + len(codes) % 2)
            done = await trio.run_process(
                [sys.executable, APP, str(source), str(target), pages], check=False, capture_stderr=True
            )
            assert done.returncode in (0, -signal.SIGKILL), done.stderr
            codes.append(done.returncode)
        assert len(codes) > 3
    assert rows_of(tmp_path / "b") == rows_of(tmp_path / "a")
