"""A job for ``spark-submit``: rows go through an actor that only TLS and a shipped token lead to. Prints what it found as JSON.

Started by ``test_cluster.py`` with the bridge's address, and the name of the token file as it was shipped.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql import SparkSession

from levada.actors.spark.asks import RemoteActor, ask_batches


def main(address: str, token_file: str) -> None:
    there = RemoteActor("doubler", address, token_file)

    def doubled(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import os

        import levada.actors.spark.asks as here

        for answer in ask_batches(there, batches):
            rows = answer.num_rows
            yield answer.append_column("executor", pa.array([os.getcwd()] * rows)).append_column(
                "package", pa.array([here.__file__] * rows)
            )

    spark = SparkSession.builder.getOrCreate()
    found = (
        spark.range(0, 1000, numPartitions=8)
        .mapInArrow(doubled, "doubled long, executor string, package string")
        .collect()
    )
    sys.stdout.write(
        json.dumps(
            {
                "sum": sum(row.doubled for row in found),
                "rows": len(found),
                "executors": sorted({row.executor for row in found}),
                "packages": sorted({row.package for row in found}),
            }
        )
        + "\n"
    )
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
