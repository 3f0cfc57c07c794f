"""A driver that copies mailbox ``lines`` to mailbox ``out``, to be killed by tests: ``kill_driver.py ADDRESS FOLDER``.

Prints ``ready`` when the query runs, and ends with its error if it fails. One of its workers kills itself, or all others that the same daemon
started, when there is a file ``kill-self`` or ``kill-others`` in FOLDER.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def killing(folder: str) -> Callable[[Iterator[Any]], Iterator[Any]]:
    def through(batches: Iterator[Any]) -> Iterator[Any]:
        for number, batch in enumerate(batches):
            yield batch
            if number == 1:
                for kill, victims in (("kill-self", lambda: [os.getpid()]), ("kill-others", others)):
                    try:
                        os.unlink(f"{folder}/{kill}")
                    except FileNotFoundError:
                        continue
                    for victim in victims():
                        os.kill(victim, signal.SIGKILL)

    def others() -> Iterator[int]:
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    parent = entry.joinpath("stat").read_text().rpartition(")")[2].split()[1]
                except OSError:
                    continue
                if parent == str(os.getppid()):
                    yield int(entry.name)

    return through


def main(address: str, folder: str) -> None:
    from levada.actors.spark import session

    spark = session(
        master="local[1,4]",
        log_level="warn",
        spark_driver_extraJavaOptions="-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        spark_sql_execution_arrow_maxRecordsPerBatch=50,
    )
    lines = spark.readStream.format("mailbox").options(address=address, mailbox="lines").load()
    query = (
        lines.mapInArrow(killing(folder), "number bigint")
        .writeStream.format("mailbox")
        .options(address=address, mailbox="out", checkpointLocation=f"{folder}/checkpoint")
        .start()
    )
    print("ready", flush=True)
    query.awaitTermination()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
