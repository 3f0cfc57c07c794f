"""Executors as processes of their own: the same asks by ``spark-submit``, over TLS, with the package from a zip."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("levada.actors.spark", exc_type=ImportError)
pytest.importorskip("cryptography")

import pyarrow as pa
import pyspark

from levada.actors.interop.certificates import make_certificates
from levada.actors.journal import Append, Read
from levada.actors.spark.asks import AskRows
from levada.actors.spark.desk import BridgeConfig
from levada.actors.spark.session import find_java
from levada.actors.spark.shipping import DEPENDENCIES, main, make_zip
from levada.framework import Actor, handles
from levada.transports.carriers import TlsConfig

from .conftest import without_levada

LINES = pa.schema([("n", pa.int64())])
JOB = Path(__file__).with_name("cluster_job.py")


class Doubler(Actor[AskRows]):
    tasks: list[int]

    @handles
    def rows(self, m: AskRows) -> pa.RecordBatch:
        self.tasks.append(m.rows.num_rows)
        return pa.record_batch({"doubled": [2 * n for n in m.rows.column("id").to_pylist()]})


@pytest.mark.ci
def test_the_zip_is_importable_where_nothing_else_is(tmp_path: Path) -> None:
    packed = make_zip(tmp_path / "all.zip", dependencies=True)
    # pyarrow cannot be in a zip, so only what does without it is imported here.
    script = "import levada.actors.rsocket.blocking as b, trio; print(b.__file__, trio.__file__)"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(packed)!r}); {script}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [f"{packed}/levada/actors/rsocket/blocking.py", f"{packed}/trio/__init__.py"]


@pytest.mark.ci
def test_the_zip_has_folders_and_nothing_that_is_not_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(tmp_path / "levada.zip")])
    with zipfile.ZipFile(tmp_path / "levada.zip") as archive:
        names = archive.namelist()
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'levada.zip'} (")
    assert names[:2] == ["levada/", "levada/actors/"]
    assert names.count("levada/") == 1
    assert names.count("pyspark_mailbox.py") == 1  # where Spark looks for it
    assert "levada/__init__.py" not in names
    assert {Path(name).suffix for name in names} == {"", ".py", ".typed"}
    assert not [name for name in names if name.split("/")[0] in DEPENDENCIES]
    first = (tmp_path / "levada.zip").read_bytes()
    assert make_zip(tmp_path / "levada.zip").read_bytes() == first
    assert not list(tmp_path.glob("*.new"))


def test_a_zip_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([str(tmp_path / "missing" / "levada.zip")])
    assert exit_.value.code == 2
    assert f"error: cannot write {tmp_path}/missing/levada.zip: No such file" in capsys.readouterr().err


@pytest.mark.ci
def test_a_source_finds_the_zip_and_shipped_files_by_the_path_that_it_brings(tmp_path: Path) -> None:
    """Spark gives the process of a stream's source a folder that does not exist instead of the one with the shipped files."""
    packed = make_zip(tmp_path / "levada.zip", dependencies=True)
    (tmp_path / "bridge.token").touch()
    python = [str(without_levada(tmp_path)), "-c"]
    pickling = """
import sys
sys.path += sys.argv[1:]
from pyspark.serializers import CPickleSerializer
from levada.actors.spark.datasource import MailboxSource
sys.stdout.buffer.write(CPickleSerializer().dumps(MailboxSource({"mailbox": "lines"})))
"""
    loading = """
import sys
from pyspark import SparkFiles
from pyspark.serializers import CPickleSerializer
SparkFiles._root_directory, SparkFiles._is_running_on_worker = "/nowhere/streaming_job", True
source = CPickleSerializer().loads(sys.stdin.buffer.read())
from levada.actors.spark.worker import connection
try:
    connection("tls://localhost:1", "bridge.token")
except ValueError as error:
    print(type(source).__name__, source.options, error)
"""
    made = subprocess.run([*python, pickling, str(tmp_path), str(packed)], capture_output=True, check=True)
    done = subprocess.run([*python, loading], input=made.stdout, capture_output=True, check=True)
    assert done.stdout.decode() == (
        f"MailboxSource {{'mailbox': 'lines'}} {tmp_path}/bridge.token is not a token file of a bridge\n"
    )


@pytest.mark.release
@pytest.mark.loopback
def test_a_submitted_job_on_a_cluster_asks_and_streams_over_tls_with_the_package_from_a_zip(
    make_actors: Any, tmp_path: Path
) -> None:
    """No Python of Spark has levada, and the token has only the name under which it was shipped."""
    made = make_certificates(tmp_path)
    tls = TlsConfig(certificate=made.certificate, key=made.key)
    actors = make_actors(url="tls://127.0.0.1:0", config=BridgeConfig(tls=tls))
    asked: list[int] = []
    lines, out = actors.mailbox("lines", LINES, partitions=2), actors.mailbox("out", LINES)
    for n in range(2):
        actors.ask(lines, Append(pa.record_batch([[n, n + 2]], schema=LINES), partition=n))
    actors.do(lambda: actors.bridge.expose("doubler", actors.system.spawn(partial(Doubler, asked))))
    (address,) = [url for url in actors.bridge.address.split(",") if url.startswith("tls:")]
    packed = make_zip(tmp_path / "levada.zip", dependencies=True)
    done = submit(tmp_path, packed, actors.bridge.token_file, [address, "bridge.token", "mailboxes"])
    assert done["rows"] == 1000
    assert done["sum"] == 2 * sum(range(1000))
    # Two processes, each with a working directory of its own, into which Spark has put the zip.
    assert len(done["executors"]) == 2
    assert done["packages"] == ["./levada.zip/levada/actors/spark/asks.py"]
    assert sum(asked) == 1000
    blocks = actors.ask(out, Read(0, 0))
    assert sorted(n for block in blocks for n in block.batch().column("n").to_pylist()) == [0, 1, 2, 3]


def submit(folder: Path, packed: Path, token: Path, arguments: list[str]) -> Any:
    settings = {
        "spark.ui.enabled": "false",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.local.dir": str(folder / "local"),
    }
    # Executors write below SPARK_HOME, which is not to be where pyspark is installed.
    home = folder / "spark"
    home.mkdir()
    for part in Path(pyspark.__file__).parent.iterdir():
        (home / part.name).symlink_to(part)
    command = [str(home / "bin" / "spark-submit"), "--master", "local-cluster[2,1,1024]"]
    for name, value in settings.items():
        command += ["--conf", f"{name}={value}"]
    command += ["--py-files", str(packed), "--files", str(token), str(JOB), *arguments]
    environment = os.environ | {
        "JAVA_HOME": str(find_java().home),
        "SPARK_HOME": str(home),
        "PYSPARK_PYTHON": str(python := without_levada(folder)),
        "PYSPARK_DRIVER_PYTHON": str(python),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=5500, check=False
    )
    assert done.returncode == 0, (
        done.stderr[-4000:] + done.stdout[-4000:]
    )  # spark-submit writes Python's errors to stdout
    return json.loads(done.stdout.splitlines()[-1])
