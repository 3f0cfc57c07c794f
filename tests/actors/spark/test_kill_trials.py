"""Processes of a running query are killed at moments that a seed chooses; the query goes on, and each row is there once.

Nobody starts the query again but for the trials that kill its driver. `test_kills` has the same without Spark, for every run.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pytest

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")
pytest.importorskip("levada.actors.spark", exc_type=ImportError)

from levada.actors.spark.worker import RemoteMailbox  # noqa: E402

from .bridge_server import MOMENTS  # noqa: E402

if TYPE_CHECKING:
    from .conftest import Server

pytestmark = pytest.mark.loopback

KINDS = (("bridge", "worker", "actors") * 3 + ("driver",)) * 2  # a driver takes ten seconds of processor time to start
RUNS = 10  # 200 trials in all
WAIT = 600.0  # seconds for the rows of one trial


class Driver:
    """Spark in a process group of its own."""

    def __init__(self, address: str, folder: Path, log: IO[bytes]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", Path(__file__).with_name("kill_driver.py"), address, folder],
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
            text=True,
        )
        try:
            assert self.process.stdout is not None
            assert self.process.stdout.readline() == "ready\n"
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        if self.process.returncode is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(250)
        assert self.process.stdout is not None
        self.process.stdout.close()


class Trials:
    """A bridge and a driver, and what has come out so far."""

    def __init__(self, serve: Callable[..., Server], folder: Path) -> None:
        self.serve = serve
        self.folder = folder
        self.server = serve(0)
        self.lines = RemoteMailbox(self.server.address, "lines")
        self.out = RemoteMailbox(self.server.address, "out")
        self.schema = self.out.describe().columns()
        self.log = (folder / "spark.log").open("wb")
        self.driver = self.drive()
        self.count = 0
        self.ends = {0: 0, 1: 0}

    def drive(self) -> Driver:
        return Driver(self.server.address, self.folder, self.log)

    def run(self, kind: str, lot: random.Random) -> str:
        """Append rows, kill what is to be killed, wait until the rows are there; say what was done."""
        rows = lot.randint(150, 600)
        wanted = list(range(self.count, self.count + rows))
        match kind:
            case "bridge":
                detail = lot.choice(MOMENTS)
                (self.server_folder / detail).touch()
                self.append(wanted, lot)
                assert self.server.ended() == -signal.SIGKILL
                self.server = self.serve(0)
            case "worker":
                detail = lot.choice(("self", "others"))
                (self.folder / f"kill-{detail}").touch()
                self.append(wanted, lot)
            case _:
                self.append(wanted, lot)
                come = lot.randint(0, rows - 1)
                detail = f"when {come} rows have come"
                self.require_some(come)
                if kind == "actors":
                    self.server.kill()
                    self.server = self.serve(0)
                else:
                    self.driver.kill()
                    self.driver = self.drive()
        self.count += rows
        self.require(wanted, f"{kind} {detail}, {rows} rows")
        assert kind != "worker" or not (self.folder / f"kill-{detail}").exists()
        return f"{kind} {detail}"

    def append(self, numbers: list[int], lot: random.Random) -> None:
        cut = lot.randint(1, len(numbers) - 1)
        for partition, part in enumerate((numbers[:cut], numbers[cut:])):
            self.lines.append(pa.record_batch([pa.array(part, pa.int64())], schema=self.schema), partition=partition)

    def require_some(self, come: int) -> None:
        """Wait until so many rows of this trial have come out."""
        until = time.monotonic() + WAIT
        while come and time.monotonic() < until:
            found = self.out.wait_for_rows(self.ends, come, 5.0)
            if sum(found.end.values()) - sum(self.ends.values()) >= come:
                return

    def require(self, wanted: list[int], what: str) -> None:
        """Wait for the rows of this trial, and for no others."""
        until = time.monotonic() + WAIT
        while True:
            found = self.out.wait_for_rows(self.ends, len(wanted), 5.0)
            if sum(found.end.values()) >= self.count or time.monotonic() > until:
                break
            assert self.driver.process.poll() is None, f"{what}: the query has failed\n{self.last_errors()}"
        got = [
            number
            for partition, start in self.ends.items()
            for batch in self.out.read(partition, start, found.end[partition], epoch=found.epoch, schema=self.schema)
            for number in batch.column("number").to_pylist()
        ]
        assert sorted(got) == wanted, f"{what}\n{self.last_errors()}"
        self.ends = found.end

    def last_errors(self) -> str:
        """Return the end of what Spark has logged, without the frames of the JVM; the file does not outlive a few runs of tests."""
        lines = Path(self.log.name).read_text(errors="replace").splitlines()
        return "\n".join([line for line in lines if not line.lstrip().startswith("at ")][-60:])

    @property
    def server_folder(self) -> Path:
        return Path(self.server.address.removeprefix("unix://")).parent

    def close(self) -> None:
        self.driver.kill()
        self.log.close()


@pytest.fixture
def trials(serve: Callable[..., Server], tmp_path: Path) -> Iterator[Trials]:
    folder = tmp_path / "driver"
    folder.mkdir()
    made = Trials(serve, folder)
    yield made
    made.close()


@pytest.mark.release
@pytest.mark.timeout(300)
def test_a_query_outlives_its_bridge_and_its_workers(trials: Trials) -> None:
    """One of each, but for the driver, whose start takes ten seconds."""
    for kind in ("bridge", "worker", "actors"):
        trials.run(kind, random.Random(0))


@pytest.mark.release
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(RUNS))
def test_each_row_is_there_once_whatever_is_killed_and_when(
    trials: Trials, seed: int, record_property: Callable[[str, Any], None]
) -> None:
    lot = random.Random(seed)
    for number, kind in enumerate(KINDS):
        begun = time.monotonic()
        what = trials.run(kind, lot)
        record_property(f"trial {number}", what)
        print(f"seed {seed} trial {number}: {what}: {time.monotonic() - begun:.1f} s", flush=True)
