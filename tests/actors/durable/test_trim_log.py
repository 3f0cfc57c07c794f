"""A log is trimmed once: closed, while its program runs, and by the command line."""

from __future__ import annotations

import contextlib
import errno
import math
import os
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

pytest.importorskip("pyarrow")

from tests.actors.durable.accounts import EVENTS, Account, Balance, Deposit
from tests.actors.durable.test_trimming import accounts_in

from levada.actors import cli
from levada.actors.durable import copy_log, log_columns, log_config, shards, trim_log
from levada.actors.journal import Journal, JournalConfig, JournalError, JournalLocked, Store, TrimRows
from levada.actors.journal.asking import locked
from levada.framework import ActorSystem, bounded
from levada.framework.errors import ConfigurationError
from levada.framework.files import Files
from levada.framework.platform import REAL

FOREVER: dict[str, Any] = {"shutdown_timeout": 1e6, "ask_timeout": 1e6}


async def fill(folder: Path) -> None:
    async with accounts_in(folder, shards=2) as accounts:
        for name in ("anna", "bert"):
            for number in range(7):
                await accounts[name].ask(Deposit(1), command=f"{name} {number}")


async def balances(folder: Path) -> list[int]:
    async with accounts_in(folder, shards=2) as accounts:
        await accounts["anna"].ask(Deposit(1), command="anna 6")  # is known
        return [await accounts[name].ask(Balance()) for name in ("anna", "bert")]


async def test_a_closed_folder_is_trimmed(tmp_path: Path) -> None:
    await fill(tmp_path)
    async with ActorSystem("test", **FOREVER) as system:
        for keep in (3600.0, 1e300, math.inf):
            assert await trim_log(system, tmp_path, keep=keep, remember=3) == 0
        assert await trim_log(system, tmp_path, keep=0, remember=3) == 8
        assert await trim_log(system, tmp_path, keep=0, remember=3) == 0
    assert await balances(tmp_path) == [7, 7]


async def test_a_program_that_starts_while_its_folder_is_trimmed_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(tmp_path)
    real, found = Store.rows_to_go, list[JournalLocked]()

    def meanwhile(store: Store, m: TrimRows) -> list[range]:
        with pytest.raises(JournalLocked, match=r"has this journal open and trims it$") as caught:
            Store.open(tmp_path, None, log_config(2))
        found.append(caught.value)
        return real(store, m)

    monkeypatch.setattr(Store, "rows_to_go", meanwhile)
    async with ActorSystem("test", **FOREVER) as system:
        assert await trim_log(system, tmp_path, keep=0, remember=3) == 8
    assert [each.passing for each in found] == [True, True]
    with Store.open(tmp_path, None, log_config(2)):
        with pytest.raises(JournalLocked, match=r"has this journal open$") as caught:
            Store.open(tmp_path, None, log_config(2))
        assert not caught.value.passing


async def test_a_folder_is_trimmed_while_its_program_runs(tmp_path: Path) -> None:
    async with ActorSystem("test", **FOREVER) as system:
        journal: Any = partial(
            Journal, tmp_path, log_columns(EVENTS), config=log_config(2), clean_every=0.01, reopen_every=1.0
        )
        log = system.spawn(journal, mailbox=bounded(256))
        accounts = await shards(system, Account, events=EVENTS, journal=log, shards=2, snapshot_every=5, remember=3)
        for number in range(7):
            await accounts["anna"].ask(Deposit(1), command=f"anna {number}")
        assert await trim_log(system, tmp_path, keep=0, remember=3) == 4
        assert await accounts["anna"].ask(Deposit(1), command="anna 6") == 7
        assert await accounts["anna"].ask(Deposit(1)) == 8
    assert not list(tmp_path.glob("trim.re*")) + list(tmp_path.glob("trim.an*"))  # noqa: ASYNC240


async def test_a_program_that_does_not_answer_is_named(tmp_path: Path) -> None:
    await fill(tmp_path)
    with Store.open(tmp_path, None, log_config(2)):
        async with ActorSystem("test", **FOREVER) as system:
            with pytest.raises(JournalLocked, match="did not answer for 0 s"):
                await trim_log(system, tmp_path, keep=0, timeout=0.0)
    assert not (tmp_path / "trim.request").exists()


@pytest.mark.parametrize("lock", ["lock", "trim.lock", "backup.lock"])
async def test_who_waits_for_another_process_can_be_cancelled(tmp_path: Path, lock: str) -> None:
    """For the one that has the log open, and for others that want it to do something."""
    await fill(tmp_path / "log")
    before = {path.name for path in (tmp_path / "log").iterdir()} | {"trim.lock", "backup.lock"}
    waiting: dict[str, Callable[[ActorSystem], Awaitable[Any]]] = {
        "trim.lock": partial(trim_log, source=tmp_path / "log", keep=0, timeout=1e9),
        "backup.lock": partial(copy_log, source=tmp_path / "log", target=tmp_path / "copy", timeout=1e9),
    }
    with locked(Files(), tmp_path / "log" / lock):
        async with ActorSystem("test", **FOREVER) as system:
            for name, wait in waiting.items():
                if lock in ("lock", name):
                    with trio.move_on_after(0.02) as scope:
                        await wait(system)
                    assert scope.cancelled_caught
    assert {path.name for path in (tmp_path / "log").iterdir()} <= before
    assert await balances(tmp_path / "log") == [7, 7]


async def test_a_journal_that_is_no_log_is_refused(tmp_path: Path) -> None:
    Store.open(tmp_path / "mailbox", None, JournalConfig()).close()
    async with ActorSystem("test", **FOREVER) as system:
        with pytest.raises(ConfigurationError, match="is not a log"):
            await trim_log(system, tmp_path, keep=0)
        for use in (
            partial(trim_log, system, tmp_path / "mailbox", keep=0),
            partial(shards, system, Account, events=EVENTS, journal=tmp_path / "mailbox", shards=1),
        ):
            with pytest.raises(
                ConfigurationError, match="mailbox is not the log of a durable class: it has the columns"
            ):
                await use()
        wrongs: list[dict[str, Any]] = [{"keep": -1}, {"keep": 0, "remember": 0}]
        for wrong in wrongs:
            with pytest.raises(ConfigurationError, match="wanted"):
                await trim_log(system, tmp_path, **wrong)


def test_a_folder_that_only_reads_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trio.run(fill, tmp_path / "log")
    real = os.open

    def refuse(path: Any, flags: int, *mode: Any) -> int:
        if flags & os.O_CREAT and Path(path).is_relative_to(tmp_path):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real(path, flags, *mode)

    monkeypatch.setattr(REAL.files, "open", refuse)
    log, copy = str(tmp_path / "log"), str(tmp_path / "copy")
    for command in (
        ["trim", log, "--keep", "0"],
        ["backup", log, copy],
        ["export", log, copy + ".csv"],
        ["copy", log, copy],
    ):
        assert cli.main(["journal", *command]) == 2
        out, error = capsys.readouterr()
        assert (out, error.count("\n")) == ("", 1)
        assert "the disk refuses ([Errno 30] Read-only file system: " in error
        assert "see whether this user may write there" in error


def test_the_command_line_trims(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trio.run(fill, tmp_path)
    assert cli.main(["journal", "trim", str(tmp_path), "--keep", "1"]) == 0
    assert cli.main(["journal", "trim", str(tmp_path), "--keep", "0", "--remember", "3"]) == 0
    assert capsys.readouterr().out == "0 rows were trimmed\n8 rows were trimmed\n"
    assert cli.main(["journal", "verify", str(tmp_path)]) == 0
    capsys.readouterr()
    assert cli.main(["journal", "trim", str(tmp_path / "nowhere"), "--keep", "0"]) == 2
    assert "is not a log" in capsys.readouterr().err
    with contextlib.suppress(SystemExit):
        cli.main(["journal", "trim", str(tmp_path)])
    assert "--keep" in capsys.readouterr().err
    assert trio.run(balances, tmp_path) == [7, 7]


def one_of_two(store: Store) -> int:
    """Trim a shard; of the two entities of `fill`, each is in one of its own."""
    return sum(store.trim(0, store.rows_to_go(TrimRows(0, 1e12, 3))))


async def test_a_program_that_dies_meanwhile_finds_its_folder_free(tmp_path: Path) -> None:
    """What starts it again needs the folder, so the trim does not take it."""
    await fill(tmp_path)
    store = Store.open(tmp_path, None, log_config(2))
    async with ActorSystem("test", **FOREVER) as system, trio.open_nursery() as nursery:

        async def trim() -> None:
            with pytest.raises(JournalError, match=r"has ended before it answered.*run this again.*goes on from there"):
                await trim_log(system, tmp_path, keep=0, remember=3)

        nursery.start_soon(trim)
        while not (tmp_path / "trim.request").exists():
            await trio.lowlevel.checkpoint()
        assert await system.platform.run_in_thread(one_of_two, store) == 4
        store.close()
    async with ActorSystem("test", **FOREVER) as system:
        assert await trim_log(system, tmp_path, keep=0, remember=3) == 4
    assert await balances(tmp_path) == [7, 7]
