"""Nodes on clusters of Spark: every kind of process is killed, and nothing is left of them afterwards.

The driver is a program of its own, `nodes_trial.py`. All its processes, Spark's and the nodes, inherit a variable of its environment; a process
that still has it when the program has ended is left over.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

pytest.importorskip("pyspark")
pytest.importorskip("cryptography")

import pyspark
from tests.actors.nodes.processes import gone

from levada.actors.spark.session import find_java

pytestmark = [pytest.mark.release, pytest.mark.loopback, pytest.mark.timeout(3600)]

TRIAL = Path(__file__).with_name("nodes_trial.py")
MARK = "LEVADA_TRIAL"
LOOPBACK = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.executor.memory": "512m",
}
GONE = 20.0
"""Seconds for all processes of a program that was killed to end."""


class Cluster:
    """Programs of Spark, and what is left of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = secrets.token_hex(8)
        home = folder / "spark"  # executors write below SPARK_HOME, which is not to be where pyspark is installed
        home.mkdir()
        for part in Path(pyspark.__file__).parent.iterdir():
            (home / part.name).symlink_to(part)
        self.home = home
        self.environment = os.environ | {
            MARK: self.mark,
            "JAVA_HOME": str(find_java().home),
            "SPARK_HOME": str(home),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(TRIAL.parent), os.environ.get("PYTHONPATH")])),
        }
        self.started: list[subprocess.Popen[str]] = []
        self.shown: set[str] = set()
        """Command lines of all processes that were seen."""

    def start(self, *command: str, log: str) -> subprocess.Popen[str]:
        with (self.folder / log).open("w") as errors:
            process = subprocess.Popen(
                command, env=self.environment, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=self.folder
            )
        self.started.append(process)
        return process

    def driver(
        self, master: str, count: int, settings: dict[str, Any], *steps: str, cores: int = 0
    ) -> subprocess.Popen[str]:
        numbers = str(count), str(cores), json.dumps(LOOPBACK | settings)
        return self.start(sys.executable, str(TRIAL), master, *numbers, *steps, log="driver.log")

    def trial(
        self, master: str, count: int, settings: dict[str, Any], *steps: str, cores: int = 0
    ) -> list[dict[str, Any]]:
        """Run a driver to its end, and return its steps."""
        process = self.driver(master, count, settings, *steps, cores=cores)
        assert process.stdout is not None
        told = []
        for line in process.stdout:
            told.append(json.loads(line))
            print(line.strip()[:1000], flush=True)
            self.shown.update(self.living().values())
        assert process.wait() == 0, (self.folder / "driver.log").read_text()[-4000:]
        assert [step["step"] for step in told[-1:]] == ["drained"]
        assert told[-1]["answered"] > len(steps)
        return told

    def living(self) -> dict[int, str]:
        """Processes with the mark, and their command lines."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                marked = f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes().split(b"\0")
                if marked and (folder / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
            except OSError:
                pass  # it has ended meanwhile
        return found

    def nothing_is_left(self, *but: int) -> None:
        until = time.monotonic() + GONE
        while left := {pid: what for pid, what in self.living().items() if pid not in but}:
            for pid in left:
                assert trio.run(gone, pid, until - time.monotonic()), left

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        for pid in self.living():
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.close()


EVERY = ("query", "worker", "term", "stop", "daemon", "executor", "restart", "drain", "query")


def test_on_a_local_cluster_every_kind_of_process_is_killed(cluster: Cluster) -> None:
    told = cluster.trial("local-cluster[2,3,1024]", 2, {"spark.task.maxFailures": "1"}, *EVERY)
    steps = {step["step"]: step for step in told}
    assert steps["up"]["hosts"] == 2  # no executor has two
    assert re.search("n0: .*Spark says: .*Python worker exited unexpectedly", steps["worker"]["reasons"][0])
    assert "its log is in the stderr of its executor, in lines that begin with n0:" in steps["worker"]["reasons"][0]
    assert re.search("n0: .*SIGTERM", steps["term"]["reasons"][0])
    assert re.search("n0 hangs: no heartbeat for", steps["stop"]["reasons"][0])
    assert steps["restart"]["reasons"] == []
    cluster.nothing_is_left()


def test_on_threads_every_kind_of_process_is_killed(cluster: Cluster) -> None:
    cluster.trial("local[5]", 3, {}, *(step for step in EVERY if step != "executor"))
    cluster.nothing_is_left()


@pytest.mark.parametrize("who", ["python", "java"])
def test_nodes_end_with_their_driver(cluster: Cluster, who: str) -> None:
    driver = cluster.driver("local-cluster[2,3,1024]", 2, {}, "wait")
    assert driver.stdout is not None
    told = [json.loads(driver.stdout.readline()) for _ in range(2)]
    assert told[1]["step"] == "wait"
    assert set(told[1]["pids"]) <= cluster.living().keys()
    os.kill(driver.pid if who == "python" else told[1]["gateway"], signal.SIGKILL)
    if who == "java":  # the driver cannot start nodes again, and is told to end
        for pid in told[1]["pids"]:
            assert trio.run(gone, pid, GONE)
        driver.terminate()
    driver.wait()
    cluster.nothing_is_left()


def test_twenty_random_kills_on_a_local_cluster(cluster: Cluster) -> None:
    seed = secrets.randbelow(1 << 32)
    print(f"seed {seed}")
    cluster.trial("local-cluster[2,3,1024]", 2, {"spark.task.maxFailures": "1"}, f"random:20:{seed}")
    cluster.nothing_is_left()


@pytest.fixture
def standalone(cluster: Cluster) -> tuple[str, subprocess.Popen[str], list[subprocess.Popen[str]]]:
    """A master and two workers, with encryption: the URL and the processes."""
    folder = cluster.folder / "conf"
    folder.mkdir()
    (cluster.folder / "events").mkdir()
    defaults = folder / "spark-defaults.conf"
    defaults.touch(mode=0o600)
    defaults.write_text(
        f"spark.authenticate true\nspark.authenticate.secret {secrets.token_hex(32)}\nspark.network.crypto.enabled true\n"
        "spark.executor.cores 3\nspark.task.maxFailures 1\n"
        f"spark.eventLog.enabled true\nspark.eventLog.dir file:{cluster.folder / 'events'}\n"
    )
    cluster.environment["SPARK_CONF_DIR"] = str(folder)
    run = str(cluster.home / "bin" / "spark-class")
    place = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
    master = cluster.start(run, "org.apache.spark.deploy.master.Master", *place, log="master.log")
    url = said(master, cluster.folder / "master.log", r"Starting Spark master at (spark://\S+)")
    workers = [
        cluster.start(
            run, "org.apache.spark.deploy.worker.Worker", *place, "--cores", "3", "--memory", "1g",
            "--work-dir", str(cluster.folder / f"work{n}"), url, log=f"worker{n}.log",
        )
        for n in range(2)
    ]  # fmt: skip
    for n, worker in enumerate(workers):
        said(worker, cluster.folder / f"worker{n}.log", "(Successfully registered)")
    return url, master, workers


def said(process: subprocess.Popen[str], log: Path, pattern: str) -> str:
    """Wait until the log of a process has a line, and return the group."""
    follow = ["timeout", "180", "tail", "--lines=+1", "--follow", f"--pid={process.pid}", str(log)]
    with subprocess.Popen(follow, stdout=subprocess.PIPE, text=True) as lines:
        assert lines.stdout is not None
        try:
            for line in lines.stdout:
                if (found := re.search(pattern, line)) is not None:
                    return found[1]
        finally:
            lines.terminate()  # and `timeout` ends what it runs
    raise AssertionError(f"{log} does not say {pattern!r}: {log.read_text()[-3000:]}")


def test_on_a_standalone_cluster_every_kind_of_process_is_killed(cluster: Cluster, standalone: Any) -> None:
    """And no secret is in Spark's logs, event logs or command lines."""
    url, master, workers = standalone
    steps = (
        "query",
        "worker",
        "daemon",
        "executor",
        "restart",
        f"kill:{workers[0].pid}",
        f"kill:{master.pid}",
        "worker",
    )
    told = cluster.trial(url, 2, {}, *steps, "secrets", cores=1)  # so that one worker has room for both
    cluster.nothing_is_left(*(process.pid for process in (master, *workers)))
    made = told[-2]["secrets"]
    assert len(made) > 10
    texts = {str(path): path.read_bytes() for path in cluster.folder.rglob("*") if is_log(path)}
    assert any("events" in path for path in texts)
    assert any(path.endswith("stderr") and b"n0: the app begins" in text for path, text in texts.items())
    assert any("org.apache.spark.executor" in line for line in cluster.shown)
    texts["command lines"] = "\n".join(cluster.shown).encode()
    # The last four bytes of a job's group are random, too, and no secret.
    found = [
        (path, value) for path, text in texts.items() for value in made if len(value) > 16 and value_in(value, text)
    ]
    assert found == []


def is_log(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and path.suffix not in (".jar", ".py", ".pyc", ".conf")


def value_in(value: str, text: bytes) -> bool:
    return value.encode() in text or bytes.fromhex(value) in text


def test_twenty_random_kills_on_a_standalone_cluster(cluster: Cluster, standalone: Any) -> None:
    seed = secrets.randbelow(1 << 32)
    print(f"seed {seed}")
    url, master, workers = standalone
    cluster.trial(url, 2, {}, f"random:20:{seed}")
    cluster.nothing_is_left(*(process.pid for process in (master, *workers)))
