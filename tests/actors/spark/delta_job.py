"""A mailbox streams into Delta tables, directly and by ``foreachBatch``: ``delta_job.py ADDRESS FOLDER JARS``. Prints their rows as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from pyspark.errors import StreamingQueryException

from levada.actors.spark import session


def main(address: str, folder: str, jars: str) -> None:
    conf: dict[str, Any] = {
        "spark.jars": jars,
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.sql.shuffle.partitions": 2,
    }
    spark = session(master="local[2]", **conf)
    lines = spark.readStream.format("mailbox").options(address=address, mailbox="lines").load()

    def add(rows: Any, batch: int) -> None:
        table = rows.write.format("delta").mode("append").option("txnAppId", "lines").option("txnVersion", batch)
        table.save(f"{folder}/each")
        table.save(f"{folder}/each")  # as Spark does after a crash

    def finish(writer: Any, name: str) -> None:
        while True:
            try:
                writer.option("checkpointLocation", f"{folder}/{name}-checkpoint").trigger(availableNow=True).start(
                    *([f"{folder}/table"] if name == "table" else [])
                ).awaitTermination()
                return
            except StreamingQueryException as error:
                if "Python worker failed to connect back" not in str(error):
                    raise

    for _ in range(2):  # the second one finds nothing new
        finish(lines.writeStream.format("delta"), "table")
        finish(lines.writeStream.foreachBatch(add), "each")

    def rows(name: str) -> list[int]:
        return sorted(row.n for row in spark.read.format("delta").load(f"{folder}/{name}").collect())

    sys.stdout.write(json.dumps({name: rows(name) for name in ("table", "each")}) + "\n")
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
