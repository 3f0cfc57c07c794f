"""Durable actors and Spark: their log as a table and as a stream, and commands from Spark's tasks."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio

pa = pytest.importorskip("pyarrow")
pytest.importorskip("levada.actors.spark", exc_type=ImportError)

from pyspark import TaskContext  # noqa: E402
from tests.actors.durable.accounts import EVENTS, Account, Balance, Deposit, Move, Withdraw  # noqa: E402
from tests.actors.durable.test_placement import Slow, placed  # noqa: E402

from levada.actors.durable import Shards, shards  # noqa: E402
from levada.actors.journal import OffsetGone, SchemaMismatch, TrimRows  # noqa: E402
from levada.actors.nodes import nodes_of  # noqa: E402
from levada.actors.spark import ActorFailed, AskRows, EachCommand, RemoteActor, ask_batches  # noqa: E402
from levada.actors.spark.protocol import DeliverBatch, StageHead  # noqa: E402
from levada.actors.spark.worker import RemoteMailbox  # noqa: E402
from levada.framework import Asks, message  # noqa: E402
from levada.framework.errors import ConfigurationError  # noqa: E402

from .conftest import Actors, run_to_the_end  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession


pytestmark = pytest.mark.loopback

WHERE = [pytest.param(False, id="here"), pytest.param(True, id="keeper", marks=pytest.mark.release)]
"""Whether the journal is in a keeper."""

DEPOSITED, WITHDRAWN = "test.durable.deposited", "test.durable.withdrawn"


def open_accounts(actors: Actors, folder: Path, **settings: Any) -> Shards[Any]:
    """Start accounts, and let Spark read their log."""

    async def start() -> Shards[Any]:
        accounts = await shards(actors.system, Account, events=EVENTS, journal=folder, shards=2, **settings)
        await actors.bridge.log("accounts", accounts)
        return accounts

    made: Shards[Any] = actors.do(start)
    return made


def ask(actors: Actors, accounts: Shards[Any], entity: str, question: Any, command: str | None = None) -> Any:
    return actors.do(lambda: accounts[entity].ask(question, command=command, timeout=250))


def log_of(actors: Actors) -> RemoteMailbox:
    return RemoteMailbox(actors.bridge.address, "accounts")


def events(actors: Actors) -> list[tuple[Any, ...]]:
    """All events but their times, those of each entity in order."""
    log = log_of(actors)
    found = log.describe()
    rows = [
        row
        for partition, end in found.end.items()
        for batch in log.read(partition, 0, end, epoch=found.epoch, schema=found.columns())
        for row in batch.drop_columns(["time"]).to_pylist()
    ]
    return [tuple(row.values()) for row in sorted(rows, key=lambda row: (row["entity"], row["sequence"]))]


def test_the_events_of_a_durable_class_are_read_without_the_bookkeeping(actors: Actors, tmp_path: Path) -> None:
    accounts = open_accounts(actors, tmp_path / "log", snapshot_every=2)
    for entity in ("anna", "bert", "cleo"):
        assert ask(actors, accounts, entity, Move([1, 2, 3]), f"move-{entity}") == 6
    assert ask(actors, accounts, "anna", Withdraw(2)) == 4
    assert ask(actors, accounts, "anna", Balance(), "look") == 4
    columns = log_of(actors).describe().columns()
    assert columns.names == ["entity", "sequence", "command", "time", "kind", "amount", "note"]
    anna = [
        ("anna", 1, "move-anna", DEPOSITED, 1, None),
        ("anna", 2, "move-anna", DEPOSITED, 2, None),
        ("anna", 3, "move-anna", DEPOSITED, 3, None),
        ("anna", 4, None, WITHDRAWN, 2, ""),
    ]
    found = events(actors)
    assert found[:4] == anna
    assert [row[0] for row in found] == ["anna"] * 4 + ["bert"] * 3 + ["cleo"] * 3
    assert actors.do(lambda: accounts.erase("bert")) > 0
    assert [row[0] for row in events(actors)] == ["anna"] * 4 + ["cleo"] * 3


@pytest.mark.parametrize("kept", WHERE)
def test_readers_of_a_trimmed_log_begin_behind_it_or_are_told(actors: Actors, tmp_path: Path, *, kept: bool) -> None:
    """The rows that are left before are not taken for all."""
    accounts = open_accounts(actors, tmp_path / "log", snapshot_every=3, keeper=kept)
    for name in ("anna", "bert"):
        for _ in range(7):
            ask(actors, accounts, name, Deposit(1))
    log = log_of(actors)
    before = log.describe()
    journal = accounts.journal
    assert journal is not None
    for partition in before.end:
        actors.do(lambda number=partition: journal.ask(TrimRows(number, 1e12), timeout=250))
    after = log.describe()
    left = [
        row
        for number, end in after.end.items()
        for batch in log.read(number, after.first[number], end, epoch=after.epoch, schema=after.columns())
        for row in batch.column("sequence").to_pylist()
    ]
    assert left == [7, 7]
    number = max(after.first, key=after.first.__getitem__)
    with pytest.raises(
        OffsetGone, match=rf"rows 0 to {after.first[number] - 1} have been deleted .*, or trimmed"
    ) as gone:
        list(log.read(number, 0, after.end[number], epoch=after.epoch, schema=after.columns()))
    assert gone.value.first == after.first[number]


def test_only_entities_write_their_log(actors: Actors, tmp_path: Path) -> None:
    open_accounts(actors, tmp_path / "log")
    log = log_of(actors)
    rows = pa.record_batch({"entity": ["anna"]})
    for write in (
        lambda: log.append(rows),
        lambda: log.stage(StageHead("q", 0, 0, 1, 0), [rows]),
        lambda: log.ask(DeliverBatch("q", 0, {}, {})),
    ):
        with pytest.raises(
            ConfigurationError, match="accounts is the log of a durable class, which only its entities write"
        ):
            write()
    assert events(actors) == []


def test_what_is_no_log_is_refused(actors: Actors, tmp_path: Path) -> None:
    accounts = open_accounts(actors, tmp_path / "log")
    other = actors.mailbox("other", pa.schema([("n", pa.int64())]))
    for name, of, says in (
        ("log", other.ref, "not the log of a durable class: it has the columns n"),
        ("accounts", accounts, "has a mailbox 'accounts' already"),
        ("a/b", accounts, "wanted up to 100 letters"),
        ("there", Shards(Account, accounts.ref, []), "where shards"),
    ):
        with pytest.raises(ConfigurationError, match=says):
            actors.do(partial(actors.bridge.log, name, of))


@pytest.mark.ci
def test_a_log_behind_a_keeper_is_read(actors: Actors, tmp_path: Path) -> None:
    """Erased rows at the start, within and at the end of a partition; and a keeper that is killed while it is read."""
    accounts = open_accounts(actors, tmp_path / "log", keeper=True, snapshot_every=2)
    for entity in ("anna", "bert", "cleo", "dora"):
        ask(actors, accounts, entity, Move([1, 2, 3]), f"move-{entity}")
    found = [
        (entity, n, f"move-{entity}", DEPOSITED, n, None)
        for entity in ("anna", "bert", "cleo", "dora")
        for n in (1, 2, 3)
    ]
    assert events(actors) == found
    assert actors.do(lambda: accounts.erase("anna")) > 0
    assert actors.do(lambda: accounts.erase("dora")) > 0
    assert events(actors) == found[3:9]
    before = log_of(actors).describe()
    os.kill(actors.do(lambda: nodes_of(actors.system)["Account-keeper"].pid), signal.SIGKILL)
    assert events(actors) == found[3:9]
    after = log_of(actors).describe()
    assert after.epoch == before.epoch
    assert after.opening != before.opening


def test_a_restarted_bridge_is_waited_for_until_it_has_the_log(
    make_actors: Callable[..., Actors], tmp_path: Path
) -> None:
    actors = make_actors()
    ask(actors, open_accounts(actors, tmp_path / "log"), "anna", Deposit(7))
    before = log_of(actors).describe()
    actors.stop()
    actors.start()
    found: list[Any] = []
    reader = threading.Thread(target=lambda: found.append(log_of(actors).describe()))
    reader.start()
    open_accounts(actors, tmp_path / "log")
    reader.join(50)
    assert found[0].epoch == before.epoch
    assert events(actors) == [("anna", 1, None, DEPOSITED, 7, None)]


# ---------------------------------------------------------------- commands


def expose(actors: Actors, accounts: Shards[Any], question: type[Asks[Any]], name: str = "commands") -> RemoteActor:
    def make() -> None:
        actors.bridge.expose(name, actors.system.spawn(EachCommand, accounts, question))

    actors.do(make)
    return RemoteActor(name, actors.bridge.address)


def commands(*rows: tuple[str, str, int]) -> Any:
    entities, ids, amounts = zip(*rows, strict=True)
    return pa.record_batch({"entity": entities, "command": ids, "amount": amounts})


def test_a_batch_of_commands_is_done_once(actors: Actors, tmp_path: Path) -> None:
    accounts = open_accounts(actors, tmp_path / "log")
    deposits = expose(actors, accounts, Deposit)
    batch = commands(*((f"e{n % 7}", f"c{n}", n) for n in range(100)))
    answers = [[rows.column("answer").to_pylist() for rows in ask_batches(deposits, [batch])] for _ in range(2)]
    assert answers[0] == answers[1]
    assert answers[0][0][-7:] == [sum(range(n % 7, n + 1, 7)) for n in range(93, 100)]
    found = events(actors)
    assert [row[4] for row in found if row[0] == "e3"] == list(range(3, 100, 7))
    assert len(found) == 100
    looks = pa.record_batch({"entity": ["e0", "e1"], "command": ["look", "look"]})
    [balances] = ask_batches(expose(actors, accounts, Balance, "looks"), [looks])
    assert balances.column("answer").to_pylist() == [sum(range(0, 100, 7)), sum(range(1, 100, 7))]


def test_a_command_that_fails_is_named_and_its_batch_fails(actors: Actors, tmp_path: Path) -> None:
    accounts = open_accounts(actors, tmp_path / "log")
    withdrawals = expose(actors, accounts, Withdraw)
    with pytest.raises(ActorFailed, match=r"row 1: entity 'anna': ValueError\('anna has -5'\)"):
        list(ask_batches(withdrawals, [commands(("anna", "a", 0), ("anna", "b", 5))]))
    with pytest.raises(ActorFailed, match="row 0: entity 'anna': CommandReused"):
        list(ask_batches(withdrawals, [commands(("anna", "a", 1))]))
    assert [row[:3] for row in events(actors)] == [("anna", 1, "a")]


@pytest.mark.ci
async def test_a_batch_is_done_once_over_the_loss_of_a_node(tmp_path: Path) -> None:
    rows = commands(*((f"e{n % 7}", f"c{n}", n) for n in range(30)))
    async with placed(tmp_path) as (accounts, nodes, tasks), trio.open_nursery() as nursery:
        sent = nodes.system.spawn(EachCommand, accounts, Slow)
        answers: list[Any] = []

        async def send() -> None:
            answers.append(await sent.ask(AskRows(rows)))

        nursery.start_soon(send)
        assert await accounts["e0"].ask(Balance()) >= 0
        tasks[0].kill()
        await send()
        assert answers[0].equals(answers[1])
        balances = [await accounts[f"e{n}"].ask(Balance()) for n in range(7)]
        assert balances == [sum(range(n, 30, 7)) for n in range(7)]


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"command": ["a"], "amount": [1]}, "entity: missing"),
        ({"entity": ["anna"], "command": [1], "amount": [1]}, "command: int64 with 0 nulls, wanted text"),
        ({"entity": ["anna", "anna"], "command": ["a", None], "amount": [1, 1]}, "command: string with 1 nulls"),
        ({"entity": ["anna"], "command": ["a"], "sum": [1]}, "sum: column 1, wanted amount"),
    ],
)
def test_rows_that_are_no_commands_are_refused(
    actors: Actors, tmp_path: Path, columns: dict[str, Any], says: str
) -> None:
    deposits = expose(actors, open_accounts(actors, tmp_path / "log"), Deposit)
    with pytest.raises(SchemaMismatch, match=says):
        list(ask_batches(deposits, [pa.record_batch(columns)]))
    assert events(actors) == []


@message("test.entities.listed")
class Listed(Asks[list[int]]):
    pass


def test_an_answer_that_fits_no_column_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="Listed and its answer, list"):
        EachCommand(None, Listed)  # type: ignore[arg-type]


# ---------------------------------------------------------------- Spark


def table(spark: SparkSession, actors: Actors, **more: str) -> Any:
    options = {"address": actors.bridge.address, "mailbox": "accounts", **more}
    return spark.read.format("mailbox").options(**options).load()


@pytest.mark.ci
@pytest.mark.timeout(180)
@pytest.mark.parametrize("keeper", WHERE)
def test_a_job_sends_commands_and_reads_what_they_did(
    spark: SparkSession, actors: Actors, tmp_path: Path, keeper: bool
) -> None:
    """A job that runs twice changes nothing the second time."""
    accounts = open_accounts(actors, tmp_path / "log", snapshot_every=10, keeper=keeper)
    deposits = expose(actors, accounts, Deposit)

    def sent(batches: Any) -> Any:
        return ask_batches(deposits, batches, idempotent=True)

    orders = spark.range(0, 400, numPartitions=2).selectExpr(
        "concat('account-', id % 20) AS entity", "concat('order-', id) AS command", "id AS amount"
    )
    first = orders.mapInArrow(sent, "answer long").collect()
    before = table(spark, actors).count()
    assert orders.mapInArrow(sent, "answer long").collect() == first
    rows = table(spark, actors)
    assert (before, rows.count()) == (400, 400)
    assert rows.columns == ["entity", "sequence", "command", "time", "kind", "amount", "note"]
    balances = {row[0]: row[1] for row in rows.groupBy("entity").sum("amount").collect()}
    assert balances == {f"account-{n}": sum(range(n, 400, 20)) for n in range(20)}
    assert balances["account-3"] == ask(actors, accounts, "account-3", Balance())
    kinds = table(spark, actors, schema="kind string, entity string").where("entity = 'account-0'").distinct()
    assert [tuple(row) for row in kinds.collect()] == [(DEPOSITED, "account-0")]


@pytest.mark.ci
@pytest.mark.timeout(180)
def test_a_task_that_fails_after_its_commands_and_runs_again_adds_none(
    spark: SparkSession, actors: Actors, tmp_path: Path
) -> None:
    """The process of the journal is killed between the two attempts. While it is away the second may be told to ask again, and does."""
    accounts = open_accounts(actors, tmp_path / "log", keeper=True)
    deposits = expose(actors, accounts, Deposit)
    keeper = actors.do(lambda: nodes_of(actors.system)["Account-keeper"].pid)

    def sent(batches: Any) -> Any:
        task = TaskContext.get()
        batches = list(batches)
        while True:
            try:
                answers = list(ask_batches(deposits, batches, idempotent=True))
                break
            except ActorFailed as error:
                if "OutcomeUnknown" not in str(error):
                    raise
        if task is not None and task.attemptNumber() == 0 and task.partitionId() == 0:
            os.kill(keeper, signal.SIGKILL)
            raise RuntimeError("the first attempt fails when all its commands are done")
        return iter(answers)

    orders = spark.range(0, 100, numPartitions=1).selectExpr(
        "concat('account-', id % 10) AS entity", "concat('order-', id) AS command", "id AS amount"
    )
    answers = [row[0] for row in orders.mapInArrow(sent, "answer long").collect()]
    assert answers == [sum(range(n % 10, n + 1, 10)) for n in range(100)]
    assert sorted(row[2] for row in events(actors)) == sorted(f"order-{n}" for n in range(100))
    assert actors.do(lambda: nodes_of(actors.system)["Account-keeper"].pid) != keeper
    assert ask(actors, accounts, "account-3", Balance()) == sum(range(3, 100, 10))


@pytest.mark.ci
@pytest.mark.timeout(180)
@pytest.mark.parametrize("keeper", WHERE)
def test_a_stream_of_events_goes_on_behind_erased_ones(
    spark: SparkSession, actors: Actors, tmp_path: Path, keeper: bool
) -> None:
    accounts = open_accounts(actors, tmp_path / "log", snapshot_every=3, keeper=keeper)

    def run() -> list[tuple[Any, ...]]:
        options = {"address": actors.bridge.address, "mailbox": "accounts", "maxRowsPerBatch": "10"}
        stream = spark.readStream.format("mailbox").options(**options).load().select("entity", "sequence", "amount")
        to = stream.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "checkpoint"))
        run_to_the_end(to, str(tmp_path / "out"))
        return sorted(tuple(row) for row in spark.read.parquet(str(tmp_path / "out")).collect())

    for entity in ("anna", "bert"):
        ask(actors, accounts, entity, Move([1, 2, 3, 4]))
    seen = [(entity, n, n) for entity in ("anna", "bert") for n in (1, 2, 3, 4)]
    assert run() == seen
    ask(actors, accounts, "cleo", Move([9, 8]))
    ask(actors, accounts, "bert", Deposit(5))
    assert actors.do(lambda: accounts.erase("bert")) > 0
    ask(actors, accounts, "cleo", Deposit(7), "late")
    assert run() == [*seen, ("cleo", 1, 9), ("cleo", 2, 8), ("cleo", 3, 7)]
