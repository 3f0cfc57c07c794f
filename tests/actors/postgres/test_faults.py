"""What is killed, cut, full or replaced below durable actors: nothing that was answered is lost or done twice."""

from __future__ import annotations

import logging
import random
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

pytest.importorskip("pyarrow")
pytest.importorskip("psycopg")

from tests.actors.durable.accounts import EVENTS, Account, Balance, Deposit
from tests.actors.postgres.cluster import Cluster, cluster, programs
from tests.actors.postgres.proxy import Proxy, proxy_to
from tests.actors.postgres.test_questions import log_at, rows_for, store, terminate

from levada.actors.durable import EntityErased, OutcomeUnknown, Shards, shards
from levada.actors.durable.commits import LEAST_HALVED
from levada.actors.journal import Append, Appended, GetExtent, JournalBehind, JournalFull
from levada.framework import ActorSystem
from levada.framework.errors import ActorStopped

pytestmark = [pytest.mark.release, pytest.mark.usefixtures("quiet")]

TRIALS = range(20)
ASKERS, EACH = 32, 80
"""50,000 commands in the trials of one fault."""


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Leave out the log of what the tests do on purpose."""
    caplog.set_level(logging.CRITICAL, "levada")


@asynccontextmanager
async def accounts_at(url: str, *, count: int = 4, name: str = "test") -> AsyncIterator[Shards[Any]]:
    async with ActorSystem(name, ask_timeout=110.0, shutdown_timeout=30.0) as system:
        yield await shards(system, Account, events=EVENTS, journal=url, shards=count, snapshot_every=50)


async def under_fire(
    url: str,
    server: Cluster,
    disturb: Callable[[int], Awaitable[None]],
    *,
    after: int = 100,
    look: Cluster | None = None,
    count: int = 4,
    askers: int = ASKERS,
    each: int = EACH,
) -> None:
    """Ask many commands with ids while something is disturbed again and again; then look at the answers, and at the table.

    The first time is after so many answers, so there is one however quick the machine is. Each third time waits for an answer, however slow it is:
    on a busy machine to connect takes longer than the next disturbance, again and again.
    """
    answers: dict[int, list[int]] = {number: [] for number in range(askers)}
    many, more, disturbed = trio.Event(), trio.Event(), 0
    async with accounts_at(url, count=count) as accounts, trio.open_nursery() as nursery:
        left = askers

        async def ask(number: int) -> None:
            nonlocal left
            entity = accounts[f"a{number}"]
            for n in range(each):
                answers[number].append(await entity.ask(Deposit(1), command=f"c{n}"))
                more.set()
                if sum(map(len, answers.values())) == after:
                    many.set()
            left -= 1
            if not left:
                nursery.cancel_scope.cancel()

        for number in range(askers):
            nursery.start_soon(ask, number)
        await many.wait()
        while True:
            disturbed += 1
            await disturb(disturbed - 1)
            if disturbed % 3 == 0:
                more = trio.Event()
                await more.wait()
    assert disturbed > 0
    assert answers == {number: list(range(1, each + 1)) for number in range(askers)}
    table = store(url).table
    done = askers * each
    look = look or server
    assert look.execute(
        f"SELECT count(*), count(DISTINCT (entity, command)) FROM {table} WHERE command IS NOT NULL"
    ) == [(done, done)]
    assert (
        look.execute(
            f'SELECT shard FROM {table}_shards WHERE "end" <> (SELECT count(*) FROM {table} WHERE _shard = shard)'
        )
        == []
    )


@pytest.mark.parametrize("trial", TRIALS)
async def test_killed_backends_cost_no_command_its_answer(url: str, server: Cluster, trial: int) -> None:
    random_ = random.Random(trial)

    async def kill(number: int) -> None:
        await trio.sleep(random_.uniform(0.02, 0.3) if number else 0)
        await trio.to_thread.run_sync(terminate, server)

    await under_fire(url, server, kill)


@pytest.mark.parametrize("trial", range(3))
async def test_appends_of_half_of_the_commands_survive_killed_backends(url: str, server: Cluster, trial: int) -> None:
    """As above, with so many commands of one shard under way that appends of half of them are tried."""
    random_ = random.Random(trial)

    async def kill(number: int) -> None:
        await trio.sleep(random_.uniform(0.1, 0.5) if number else 0)
        await trio.to_thread.run_sync(terminate, server)

    await under_fire(url, server, kill, after=1000, count=1, askers=2 * LEAST_HALVED, each=60)


@pytest.mark.parametrize("trial", TRIALS)
async def test_servers_that_crash_and_start_again_cost_no_command_its_answer(
    url: str, server: Cluster, trial: int
) -> None:
    random_ = random.Random(trial)

    def crash() -> None:
        server.stop(signal.SIGQUIT)
        server.start()

    async def disturb(number: int) -> None:
        await trio.sleep(random_.uniform(0.1, 0.4) if number else 0)
        await trio.to_thread.run_sync(crash)

    await under_fire(url, server, disturb)


@pytest.fixture
async def proxy(server: Cluster) -> AsyncIterator[Proxy]:
    async with proxy_to(server.folder / ".s.PGSQL.5432") as made:
        yield made


def through(proxy: Proxy, url: str) -> str:
    return f"postgresql://levada@127.0.0.1:{proxy.port}/postgres?table={store(url).table}&sslmode=disable&gssencmode=disable"


@pytest.mark.parametrize("trial", TRIALS)
async def test_cut_connections_cost_no_command_its_answer(url: str, server: Cluster, proxy: Proxy, trial: int) -> None:
    random_ = random.Random(trial)

    async def cut(number: int) -> None:
        # To connect takes some thousand bytes, so later cuts leave more.
        most = (200_000 if trial % 2 else 20_000) if number else 300
        up, down = (random_.randrange(most), None) if trial % 2 else (None, random_.randrange(most))
        proxy.left = {"up": up, "down": down}
        await proxy.next_cut.wait()

    await under_fire(through(proxy, url), server, cut)
    assert proxy.cuts > 0


@pytest.mark.parametrize("way", ["up", "down"])
async def test_an_append_is_written_once_whichever_byte_is_the_last_to_pass(
    url: str, server: Cluster, proxy: Proxy, way: str
) -> None:
    rows = rows_for("a", "b")
    async with log_at(through(proxy, url), 1) as log:
        await log.ask(Append(rows, partition=0, at=0))
        before = proxy.passed[way]
        await log.ask(Append(rows, partition=0, at=2))
        size = proxy.passed[way] - before
        assert size > 20
        for last in range(size + 1):
            at = 4 + 2 * last
            proxy.left[way] = last
            assert await log.ask(Append(rows, partition=0, at=at)) == Appended(0, at, 2)
        assert proxy.cuts >= size
    [(count,)] = server.execute(f"SELECT count(*) FROM {store(url).table}")
    assert count == 4 + 2 * (size + 1)


@pytest.fixture
def pair() -> Iterator[tuple[Cluster, Cluster]]:
    """A primary and its standby."""
    found = programs()
    if found is None:
        pytest.skip("initdb is needed: install the package postgresql")
    with cluster(found) as primary:
        standby = primary.standby("standby")
        standby.start()
        try:
            yield primary, standby
        finally:
            standby.stop(signal.SIGQUIT)


def hosts(*clusters: Cluster) -> str:
    return clusters[0].url("log", host=",".join(str(each.folder) for each in clusters))


@pytest.mark.parametrize("trial", TRIALS)
async def test_a_primary_that_is_killed_loses_nothing_if_its_standby_is_synchronous(
    pair: tuple[Cluster, Cluster], trial: int
) -> None:
    primary, standby = pair
    primary.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
    primary.execute("SELECT pg_reload_conf()")
    after = random.Random(trial).randrange(ASKERS * EACH // 2)

    def fail_over() -> None:
        primary.stop(signal.SIGKILL)
        standby.promote()

    async def disturb(number: int) -> None:
        if number:
            await trio.sleep_forever()
        await trio.to_thread.run_sync(fail_over)

    await under_fire(hosts(primary, standby), primary, disturb, after=after + 1, look=standby)


@pytest.mark.parametrize("turns", [0, 3, 10, 30, 100])
async def test_an_erasure_outlives_a_fail_over(pair: tuple[Cluster, Cluster], turns: int) -> None:
    primary, standby = pair
    primary.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
    primary.execute("SELECT pg_reload_conf()")
    async with accounts_at(hosts(primary, standby), count=1) as accounts:
        for _ in range(20):
            for name in ("anna", "bert"):
                await accounts[name].ask(Deposit(1))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(accounts.erase, "anna")
            for _ in range(turns):
                await trio.lowlevel.checkpoint()
            await trio.to_thread.run_sync(primary.stop, signal.SIGKILL)
            await trio.to_thread.run_sync(standby.promote)
        with pytest.raises(EntityErased):
            await accounts["anna"].ask(Balance())
        assert await accounts["bert"].ask(Deposit(1)) == 21
    assert standby.execute("SELECT kind FROM log WHERE entity = 'anna'") == [("$erased",)]


@pytest.mark.parametrize("trial", TRIALS)
async def test_a_fail_over_that_loses_rows_is_noticed(pair: tuple[Cluster, Cluster], trial: int) -> None:
    primary, standby = pair
    count = 3 + trial % 5
    async with accounts_at(hosts(primary, standby), count=1) as accounts:
        for number in range(5):
            assert await accounts["anna"].ask(Deposit(1), command=f"c{number}") == number + 1
        await trio.to_thread.run_sync(standby.catch_up, primary)
        standby.stop()  # from now on it lags behind
        for number in range(5, 5 + count):
            assert await accounts["anna"].ask(Deposit(1), command=f"c{number}") == number + 1
        primary.stop(signal.SIGKILL)
        await trio.to_thread.run_sync(standby.start)
        await trio.to_thread.run_sync(standby.promote)
        for question in (Deposit(1), Balance(), Deposit(1)):
            with pytest.raises(
                JournalBehind, match=f"rows 6 to {5 + count} were on the disk and are gone from the log"
            ):
                await accounts["anna"].ask(question)
    assert standby.execute("SELECT count(*) FROM log")[0][0] == 6
    async with accounts_at(hosts(primary, standby), count=1) as accounts:  # an operator who starts again accepts it
        assert await accounts["anna"].ask(Balance()) == 5


@pytest.mark.parametrize("trial", TRIALS)
async def test_two_programs_on_one_log_do_each_command_once(url: str, server: Cluster, trial: int) -> None:
    random_ = random.Random(trial)
    async with accounts_at(url, name="one") as one, accounts_at(url, name="two") as two:

        async def ask(number: int) -> None:
            for n in range(10):
                while True:
                    accounts = random_.choice((one, two))
                    try:
                        assert await accounts[f"a{number}"].ask(Deposit(1), command=f"c{n}") == n + 1
                        break
                    except (OutcomeUnknown, ActorStopped):
                        await trio.sleep(random_.uniform(0, 0.1))

        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(ask, number)
    table = store(url).table
    assert server.execute(
        f"SELECT count(*), count(DISTINCT (entity, command)) FROM {table} WHERE command IS NOT NULL"
    ) == [(80, 80)]


@pytest.fixture
def small(url: str, server: Cluster) -> Iterator[str]:
    """The URL of a log on a disk of 3 MiB."""
    folder = server.folder / "small"
    folder.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size=3m,mode=0700,uid={server.folder.stat().st_uid}", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small disk cannot be mounted here: this needs root")
    server.execute(f"CREATE TABLESPACE small LOCATION '{folder}'")
    yield f"{url}&options=-c%20default_tablespace%3Dsmall"
    server.execute(f"DROP SCHEMA {store(url).table.partition('.')[0]} CASCADE")
    server.execute("DROP TABLE IF EXISTS filler")
    server.execute("DROP TABLESPACE small")
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("trial", TRIALS)
async def test_a_full_disk_refuses_commands_and_room_lets_them_go_on(small: str, server: Cluster, trial: int) -> None:
    server.execute("CREATE TABLE filler TABLESPACE small AS SELECT repeat('x', 1000) FROM generate_series(1, 1000)")
    done: list[int] = []
    async with accounts_at(small, count=1) as accounts:

        async def ask(command: str) -> None:
            done.append(await accounts["a"].ask(Deposit(1), command=command))

        with pytest.raises(ExceptionGroup) as caught:
            for group in range(1000):
                async with trio.open_nursery() as nursery:
                    for number in range(64 + trial):
                        nursery.start_soon(ask, f"{group}-{number}")
        assert {type(error) for error in caught.value.exceptions} == {JournalFull}
        assert "the disk of the database is full, and nothing of this was written" in str(caught.value.exceptions[0])
        assert await accounts["a"].ask(Balance()) == len(done)
        server.execute("DROP TABLE filler")
        while True:
            try:
                assert await accounts["a"].ask(Deposit(1), command="last") == len(done) + 1
                break
            except JournalFull:
                await trio.sleep(0.1)
    assert sorted(done) == list(range(1, len(done) + 1))


async def test_a_shard_waits_for_a_database_that_is_away_for_seconds(
    url: str, server: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has a line about that, and one when it is over, whatever waits."""
    caplog.set_level("WARNING", "levada")

    def events() -> list[str]:
        return [vars(each)["event"] for each in caplog.records if each.name == "levada.actors.postgres"]

    async with accounts_at(url) as accounts:
        assert await accounts["anna"].ask(Deposit(1)) == 1
        server.stop(signal.SIGINT)
        async with trio.open_nursery() as nursery:
            answers: list[int] = []

            async def ask(name: str) -> None:
                answers.append(await accounts[name].ask(Deposit(1)))

            for number in range(8):
                nursery.start_soon(ask, f"a{number}")
            while not events():
                await trio.lowlevel.checkpoint()
            assert answers == []
            await trio.to_thread.run_sync(server.start)
        assert answers == [1] * 8
        assert events() == ["database_away", "database_back"]
        assert accounts.journal is not None
        assert (await accounts.journal.ask(GetExtent())).first == dict.fromkeys(range(4), 0)
