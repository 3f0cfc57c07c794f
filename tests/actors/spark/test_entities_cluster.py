"""Commands with ids from Spark's tasks, each done once: while nodes of entities are killed, and when Spark runs two attempts of a task at once."""

from __future__ import annotations

import json
import sys
from functools import partial
from itertools import accumulate, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("levada.actors.spark", exc_type=ImportError)

import attrs
from tests.actors.durable.accounts import Deposit
from tests.actors.durable.log_reader import check_rows, read_log
from tests.actors.durable.purses import Paid, Pay, Purse, Total
from tests.actors.durable.trial_driver import APP, SETTINGS

from levada.actors.durable import Shards, shards
from levada.actors.nodes import Nodes, local_nodes
from levada.actors.spark import ask_batches
from levada.framework import Actor, Asks, handles

from .test_entities import events, expose, open_accounts, table
from .test_nodes_cluster import Cluster, said

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from .conftest import Actors

pytestmark = [pytest.mark.release, pytest.mark.loopback, pytest.mark.timeout(1800)]

JOB = Path(__file__).with_name("commands_job.py")


@attrs.frozen
class Start(Asks[Shards[Any]]):
    """Start purses on nodes in processes of their own, with their log in another one."""

    folder: Path


class Bank(Actor[Start]):
    """Has the nodes."""

    nodes: Nodes = attrs.field(init=False)

    @handles
    async def start(self, m: Start) -> Shards[Any]:
        settings = attrs.evolve(SETTINGS, hang_timeout=20.0)
        self.nodes = await self.enter(local_nodes(self.system, 2, APP, settings=settings))
        return await shards(
            self.system,
            Purse,
            events=Paid,
            journal=m.folder,
            shards=4,
            nodes=self.nodes,
            snapshot_every=10,
            keeper=True,
        )


def test_a_job_whose_commands_kill_the_nodes_does_each_of_them_once(
    spark: SparkSession, actors: Actors, tmp_path: Path
) -> None:
    """Four nodes die in the middle of a command: before its row is written, before its answer leaves, and when that has left."""
    bank = actors.do(lambda: actors.system.spawn(Bank))
    purses: Shards[Any] = actors.do(lambda: bank.ask(Start(tmp_path / "log"), timeout=300))
    actors.do(partial(actors.bridge.log, "accounts", purses))
    pays = expose(actors, purses, Pay)
    strikes = {150: "recorded", 420: "written", 700: "answered", 990: "recorded"}
    cases = " ".join(f"WHEN {number} THEN '{how}'" for number, how in strikes.items())
    orders = spark.range(0, 1200, numPartitions=4).selectExpr(
        "concat('purse-', id % 24) AS entity", "concat('order-', id) AS command", "id AS amount",
        f"CASE id {cases} ELSE '' END AS strike", f"concat('{tmp_path}/struck-', id) AS once",
    )  # fmt: skip

    def paid(batches: Any) -> Any:
        return ask_batches(pays, batches, idempotent=True)

    answers = [row[0] for row in orders.mapInArrow(paid, "answer long").collect()]
    assert {path.name for path in tmp_path.glob("struck-*")} == {f"struck-{number}" for number in strikes}
    assert [row[0] for row in orders.mapInArrow(paid, "answer long").collect()] == answers
    assert table(spark, actors).count() == 1200
    totals = {name: actors.do(partial(ask_total, purses, name)) for name in [f"purse-{n}" for n in range(24)]}
    assert totals == {f"purse-{n}": sum(range(n, 1200, 24)) for n in range(24)}
    actors.stop()
    assert check_rows(read_log(tmp_path / "log"), {f"order-{n}": answer for n, answer in enumerate(answers)}) == totals


async def ask_total(purses: Shards[Any], name: str) -> Any:
    return await purses[name].ask(Total(), timeout=250)


def test_two_attempts_of_a_task_at_the_same_time_do_each_command_once(actors: Actors, tmp_path: Path) -> None:
    """Spark speculates on two hosts only: a second attempt never runs where the first does."""
    accounts = open_accounts(actors, tmp_path / "log")
    expose(actors, accounts, Deposit, "deposits")
    cluster = Cluster(tmp_path)
    try:
        run = str(cluster.home / "bin" / "spark-class")
        ports = ("--port", "0", "--webui-port", "0")
        master = cluster.start(
            run, "org.apache.spark.deploy.master.Master", "--host", "127.0.0.1", *ports, log="master.log"
        )
        url = said(master, tmp_path / "master.log", r"Starting Spark master at (spark://\S+)")
        for n in (2, 3):
            cluster.start(
                run, "org.apache.spark.deploy.worker.Worker", "--host", f"127.0.0.{n}", *ports, "--cores", "2", "--memory", "1g",
                "--work-dir", str(tmp_path / f"work{n}"), url, log=f"worker{n}.log",
            )  # fmt: skip
        job = cluster.start(sys.executable, str(JOB), url, actors.bridge.address, str(tmp_path), log="job.log")
        out, _ = job.communicate(timeout=7500)
        assert job.returncode == 0, (tmp_path / "job.log").read_text()[-4000:]
    finally:
        cluster.close()
    assert {"attempt-0-1", "attempt-1-0"} <= {path.name for path in tmp_path.glob("attempt-*")}
    found = events(actors)
    assert sorted(row[2] for row in found) == sorted(f"order-{n}" for n in range(800))
    sums = {
        row[2]: total
        for rows in by_entity(found)
        for row, total in zip(rows, accumulate(row[4] for row in rows), strict=True)
    }
    assert json.loads(out) == [sums[f"order-{n}"] for n in range(800)]


def by_entity(found: list[tuple[Any, ...]]) -> list[list[tuple[Any, ...]]]:
    return [list(rows) for _, rows in groupby(found, key=lambda row: row[0])]
