"""A job for ``spark-submit``: rows go through an actor, and on demand from mailbox to mailbox, with only TLS, a shipped zip and a shipped token.

Prints what it found as JSON.

Started by `submit` with the addresses of bridges, the name of the token file as it was shipped, and ``mailboxes`` if there are any.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator

import pyarrow as pa

from levada.actors.spark.asks import RemoteActor, ask_batches
from levada.actors.spark.session import session


def main(address: str, token_file: str, mailboxes: str = "") -> None:
    there = RemoteActor("doubler", address, token_file)

    def doubled(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import os

        import levada.actors.spark.asks as here

        for answer in ask_batches(there, batches):
            rows = answer.num_rows
            yield answer.append_column("executor", pa.array([os.getcwd()] * rows)).append_column(
                "package", pa.array([here.__file__] * rows)
            )

    spark = session()
    found = (
        spark.range(0, 1000, numPartitions=8)
        .mapInArrow(doubled, "doubled long, executor string, package string")
        .collect()
    )
    if mailboxes:
        options = {"address": address, "tokenFile": token_file}
        lines = spark.readStream.format("mailbox").options(mailbox="lines", **options).load()
        writer = lines.writeStream.format("mailbox").options(mailbox="out", **options)
        query = writer.option("checkpointLocation", tempfile.mkdtemp(dir=".")).trigger(availableNow=True).start()
        query.awaitTermination()
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
