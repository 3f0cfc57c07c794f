"""Spark Connect: `session`, and a server whose Python processes have no levada."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")
pytest.importorskip("grpc", reason="Spark Connect needs levada[connect]")
pytest.importorskip("grpc_status", reason="Spark Connect needs levada[connect]")
pytest.importorskip("levada.actors.spark", exc_type=ImportError)

from levada.actors.journal import Append, Read  # noqa: E402
from levada.actors.spark.asks import AskRows  # noqa: E402
from levada.actors.spark.shipping import make_zip  # noqa: E402
from levada.framework import Actor, handles  # noqa: E402

from .conftest import without_levada  # noqa: E402

if TYPE_CHECKING:
    from .conftest import Actors

pytestmark = [pytest.mark.release, pytest.mark.loopback]

ROWS = pa.schema([("n", pa.int64())])
JOB = """
import json, os, sys, tempfile

from levada.actors.spark.asks import RemoteActor, ask_batches
from levada.actors.spark.session import session
from levada.actors.spark.shipping import ship

address, token, how = sys.argv[1:]
if how == "active":
    from pyspark.sql import SparkSession
    SparkSession.builder.remote("local[2]").getOrCreate()
else:
    os.environ["SPARK_REMOTE"] = "local[2]"
spark = session(spark_sql_shuffle_partitions=3)
again = session()
found = {"kind": type(spark).__module__, "same": again is spark, "partitions": spark.conf.get("spark.sql.shuffle.partitions")}
options = {"address": address}
if how == "shipped":
    ship(spark, token_file=token)
    options["tokenFile"] = os.path.basename(token)
found["rows"] = spark.read.format("mailbox").options(mailbox="lines", **options).load().count()
actor = RemoteActor("doubling", address, options.get("tokenFile"))
doubled = spark.range(0, 5).selectExpr("id AS n").mapInArrow(lambda batches: ask_batches(actor, batches), "n long")
found["doubled"] = sorted(row.n for row in doubled.collect())
spark.range(10, 12).selectExpr("id AS n").write.format("mailbox").options(mailbox="out", **options).mode("append").save()
if how in ("active", "zip"):
    lines = spark.readStream.format("mailbox").options(mailbox="lines", **options).load()
    writer = lines.writeStream.format("mailbox").options(mailbox="out", **options)
    query = writer.option("checkpointLocation", tempfile.mkdtemp(dir=".")).trigger(availableNow=True).start()
    query.awaitTermination()
print(json.dumps(found))
spark.stop()
"""


class Doubling(Actor[AskRows]):
    @handles
    def double(self, m: AskRows) -> Any:
        return pa.record_batch([pa.array([2 * n for n in m.rows.column(0).to_pylist()], pa.int64())], names=["n"])


@pytest.mark.parametrize("how", ["active", "SPARK_REMOTE", "shipped", "zip"])
def test_a_session_of_spark_connect_reads_writes_asks_and_streams(actors: Actors, tmp_path: Path, how: str) -> None:
    """Two with levada on the server; one whose server gets it and the token from the client, without streams; one with a zip on its path."""
    lines, out = actors.mailbox("lines", ROWS), actors.mailbox("out", ROWS)
    actors.do(lambda: actors.bridge.expose("doubling", actors.system.spawn(Doubling)))
    actors.ask(lines, Append(pa.record_batch([[0, 1, 2]], schema=ROWS)))
    bare = how in ("shipped", "zip")
    python = str(without_levada(tmp_path)) if bare else sys.executable
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SPARK_REMOTE")}
    paths = [place for place in sys.path if place and not (bare and (Path(place) / "levada").is_dir())]
    if how == "zip":
        paths.insert(0, str(make_zip(tmp_path / "levada.zip", dependencies=True)))
    done = subprocess.run(
        [sys.executable, "-c", JOB, actors.bridge.address, str(actors.bridge.token_file), how],
        env=environment
        | {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": python, "PYTHONPATH": os.pathsep.join(paths)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[:3000] + done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "kind": "pyspark.sql.connect.session",
        "same": True,
        "partitions": "3",
        "rows": 3,
        "doubled": [0, 2, 4, 6, 8],
    }
    blocks = actors.ask(out, Read(0, 0))
    assert sorted(n for block in blocks for n in block.batch().column("n").to_pylist()) == [
        *([0, 1, 2] if how in ("active", "zip") else []),
        10,
        11,
    ]
