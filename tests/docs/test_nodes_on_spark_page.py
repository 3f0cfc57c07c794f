"""The page about nodes on Spark: its program prints what it says, and its table names every setting that is refused."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from levada.actors.nodes import spark_settings

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "nodes-on-spark.md"
TEXT = PAGE.read_text("utf-8")
(OUTPUT,) = re.findall(r"`python main.py` prints\n\n```\n(.*?)```", TEXT, re.DOTALL)
(COUNTED,) = re.findall(r"`python count.py` prints\n\n```\n(.*?)```", TEXT, re.DOTALL)
(ERROR,) = re.findall(r"the error gives the numbers:\n\n```\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.release
def test_the_program_prints_what_the_page_says(tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    pytest.importorskip("cryptography")
    workers, main = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)[:2]
    (tmp_path / "workers.py").write_text(workers, "utf-8")
    (tmp_path / "main.py").write_text(main, "utf-8")
    done = subprocess.run(
        [sys.executable, "main.py"], cwd=tmp_path, capture_output=True, text=True, timeout=5500, check=False
    )
    assert (done.stdout, done.returncode) == (OUTPUT, 0), done.stderr
    assert len(re.findall(r"^n[01]: node \d+$", done.stderr, re.MULTILINE)) == 2


@pytest.mark.release
def test_durable_actors_on_spark_are_counted_once_however_often_the_program_runs(tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    pytest.importorskip("cryptography")
    polls, count = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)[2:4]
    (tmp_path / "polls.py").write_text(polls, "utf-8")
    (tmp_path / "count.py").write_text(count, "utf-8")
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "count.py"], cwd=tmp_path, capture_output=True, text=True, timeout=2500, check=False
        )
        assert (done.stdout, done.returncode) == (COUNTED, 0), done.stderr


@pytest.mark.release
@pytest.mark.loopback
@pytest.mark.timeout(600)
def test_nodes_run_on_a_standalone_cluster_that_is_started_as_the_page_says(tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    pytest.importorskip("cryptography")
    from tests.actors.spark.test_nodes_cluster import said

    setup, start = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    workers, main = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)[:2]
    (tmp_path / "workers.py").write_text(workers, "utf-8")
    (session,) = re.findall(r'session\(master="spark://.*?"\)', TEXT)
    export, *lines, driver = start.splitlines()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with ExitStack() as running:

        def run(line: str, log: str = "") -> subprocess.Popen[str]:
            out = running.enter_context(open(tmp_path / log, "w")) if log else subprocess.PIPE
            command = ["sh", "-ec", f"{export}; exec {line}"]
            process = subprocess.Popen(
                command, cwd=tmp_path, env=os.environ | {"PATH": path}, stdout=out, stderr=out, text=True
            )
            running.callback(process.wait)
            running.callback(process.terminate)
            return process

        assert subprocess.run(["sh", "-ec", setup], cwd=tmp_path, check=False).returncode == 0
        master = run(f"{lines[0].replace('7077', '0')} --webui-port 0", "master")
        port = said(master, tmp_path / "master", r"Starting Spark master at spark://127.0.0.1:(\d+)")
        for number, line in enumerate(lines[1:]):
            worker = run(f"{line.replace('7077', port)} --webui-port 0", f"worker{number}")
            said(worker, tmp_path / f"worker{number}", "(Successfully registered)")
        (tmp_path / "main.py").write_text(
            main.replace('session(master="local[4]")', session.replace("7077", port)), "utf-8"
        )
        out, err = run(driver.replace("python", sys.executable)).communicate()
        assert out == OUTPUT, err


def test_the_table_has_every_setting_that_is_refused() -> None:
    refused = set(re.findall(r"\bspark(?:\.[a-zA-Z]+)+\b", inspect.getsource(spark_settings)))
    written = set(re.findall(r"\bspark(?:\.[a-zA-Z]+)+\b", TEXT))
    assert refused - written == set()


def test_the_error_is_the_one_of_a_node_without_a_slot() -> None:
    late = "n0 did not say hello within 60 s (NodeSettings.start_timeout): "
    no_slot = spark_settings.SparkSlots(slots=2, cores=8, running=2, nodes=0).describe("local[2]")
    assert " ".join(ERROR.split()) == late + no_slot
