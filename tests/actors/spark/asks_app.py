"""An app for nodes that executors ask, and the function that asks; child processes and Spark's workers import it."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pyarrow as pa

from levada.actors.spark.asks import AskRows, RemoteActor, ask_batches
from levada.actors.spark.desk import BridgeConfig, serve_asks
from levada.framework import Actor, ActorSystem, Ref, handles
from levada.transports.carriers import TlsConfig

FOLDER = "LEVADA_TEST_ASKS"
"""The variable with the folder."""
DEADLY = 777
"""An id that kills the first node that gets it, if the file ``deadly`` is in the folder."""


class Scorer(Actor[AskRows]):
    """Answers with twice the ids, and its process."""

    @handles
    def score(self, m: AskRows) -> pa.RecordBatch:
        ids = m.rows.column("id").to_pylist()
        mark = Path(os.environ[FOLDER], "deadly")
        if DEADLY in ids and mark.exists():
            mark.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return pa.record_batch({"double": [2 * n for n in ids], "pid": [os.getpid()] * len(ids)})


class Doubler(Actor[AskRows]):
    """Answers the questions of ``cluster_job.py``, and counts their rows in a file."""

    @handles
    def rows(self, m: AskRows) -> pa.RecordBatch:
        with Path(os.environ[FOLDER], f"{self.system.name}.rows").open("a") as file:
            file.write(f"{m.rows.num_rows}\n")
        return pa.record_batch({"doubled": [2 * n for n in m.rows.column("id").to_pylist()]})


def actors_of(system: ActorSystem) -> dict[str, Ref[AskRows]]:
    return {"scores": system.spawn(Scorer), "doubler": system.spawn(Doubler)}


async def app(system: ActorSystem) -> AsyncIterator[None]:
    async with serve_asks(system, os.environ[FOLDER], actors_of(system)):
        yield


async def app_over_tls(system: ActorSystem) -> AsyncIterator[None]:
    """As on a machine of its own: a folder of its own with a copy of the token. Its address is in a file."""
    folder = Path(os.environ[FOLDER])
    config = BridgeConfig(tls=TlsConfig(certificate=folder / "cert.pem", key=folder / "key.pem"))
    own = folder / system.name
    async with serve_asks(system, own, actors_of(system), url="tls://127.0.0.1:0", config=config) as desk:
        (own / "address").write_text(desk.address)
        yield


def scored(address: str, *, idempotent: bool = False) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Make the function of a data frame."""
    scores = RemoteActor("scores", address)

    def function(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return ask_batches(scores, batches, window=2, idempotent=idempotent)

    return function
