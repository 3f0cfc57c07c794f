"""A job of commands with ids, one task of which runs twice at the same time, by speculation. Prints the answers as JSON.

Started by ``test_entities_cluster.py`` with the URL of a cluster, the bridge's address and a folder. The first attempt of one task sends a part of
its commands, and goes on when the second attempt has begun, so both send the same ids.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import SparkSession

from levada.actors.spark.asks import RemoteActor, ask_batches

ROWS = 800
PARTITIONS = 4
SETTINGS = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.executor.memory": "512m",
    "spark.speculation": "true",
    "spark.speculation.interval": "50ms",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.multiplier": "1",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "50",
}


def main(master: str, address: str, folder: str) -> None:
    there = RemoteActor("deposits", address)

    def paced(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task = TaskContext.get()
        assert task is not None
        again = Path(folder) / "again"
        for place, batch in enumerate(batches):
            if task.partitionId() == PARTITIONS - 1:
                (Path(folder) / f"attempt-{task.attemptNumber()}-{place}").touch()
                if task.attemptNumber() > 0:
                    again.touch()
                while place == 1 and not again.exists():
                    time.sleep(0.01)
            yield batch

    def answered(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return ask_batches(there, paced(batches), window=1, idempotent=True)

    builder = SparkSession.builder.master(master)
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    orders = spark.range(0, ROWS, numPartitions=PARTITIONS).selectExpr(
        "concat('account-', id % 20) AS entity", "concat('order-', id) AS command", "id AS amount"
    )
    answers = [row[0] for row in orders.mapInArrow(answered, "answer long").collect()]
    sys.stdout.write(json.dumps(answers) + "\n")
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
