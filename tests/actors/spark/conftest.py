"""A bridge in a thread of its own, for tests that block; and one Spark session for all of them."""

from __future__ import annotations

import gc
import math
import subprocess
import sys
import threading
import venv
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from levada.actors.spark.bridge import Bridge
    from levada.framework import ActorSystem


def run_to_the_end(writer: DataStreamWriter, *path: str) -> StreamingQuery:
    """Run a stream over all that there is.

    It goes on from its checkpoint if Spark gave up on one of its Python processes, which have ten seconds to start, on a busy machine too.
    """
    from pyspark.errors import StreamingQueryException

    while True:
        query = writer.trigger(availableNow=True).start(*path)
        try:
            assert query.awaitTermination(1000)
            return query
        except StreamingQueryException as error:
            if "Python worker failed to connect back" not in str(error):
                raise


def without_levada(folder: Path) -> Path:
    """Make a Python that has all packages of this one but levada."""
    packages = folder / "packages"
    packages.mkdir()
    for place in map(Path, sys.path):
        if place.name == "site-packages":
            for entry in place.iterdir():
                if "levada" not in entry.name and not (packages / entry.name).exists():
                    (packages / entry.name).symlink_to(entry)
    venv.create(folder / "python", symlinks=True)
    [site] = (folder / "python" / "lib").glob("*/site-packages")
    (site / "packages.pth").write_text(f"{packages}\n")
    return folder / "python" / "bin" / "python"


class Actors:
    """The actors' side: a system and a bridge, in trio in another thread."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.directory = directory
        self.settings = settings
        self.mailboxes: dict[str, Any] = {}
        """What `mailbox` has made, by name."""
        self.system: ActorSystem
        self.bridge: Bridge
        self.bridge_gone: trio.Event
        self._token: trio.lowlevel.TrioToken | None = None
        self._failure: BaseException | None = None
        self.start()

    def start(self) -> None:
        """Begin, again after `stop`."""
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._ready.wait(250)
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            trio.run(self._serve)
        except BaseException as error:  # noqa: BLE001 - raised in the thread of the test
            self._failure = error
            self._ready.set()

    async def _serve(self) -> None:
        from levada.actors.spark.bridge import serve_bridge
        from levada.framework import ActorSystem

        self._token = trio.lowlevel.current_trio_token()
        self._stop, self.bridge_gone = trio.Event(), trio.Event()
        async with ActorSystem("bridge", seed=0) as self.system:
            async with serve_bridge(self.system, self.directory, **self.settings) as self.bridge:
                self._ready.set()
                await self._stop.wait()
            self.bridge_gone.set()

    def stop(self) -> None:
        """End in order."""
        if self._thread.is_alive():
            self.do(self._stop.set)
            self._thread.join(50)
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def do(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function, and await what it gives, on the actors' side."""

        async def run() -> Any:
            result: Any = function(*args)
            return await result if isinstance(result, Awaitable) else result

        return trio.from_thread.run(run, trio_token=self._token)

    def mailbox(self, name: str, columns: Any = None, **settings: Any) -> Any:
        """`Bridge.mailbox`."""

        async def make() -> Any:
            return await self.bridge.mailbox(name, columns, **settings)

        made = self.mailboxes[name] = self.do(make)
        return made

    def ask(self, mailbox: Any, question: Any) -> Any:
        """Ask the journal."""

        async def ask() -> Any:
            return await mailbox.ref.ask(question, timeout=250)

        return self.do(ask)


@pytest.fixture
def make_actors(tmp_path: Path) -> Iterator[Callable[..., Actors]]:
    """Make the actors' side, in a directory of its own by name."""
    made: list[Actors] = []

    def make(name: str = "bridge", **settings: Any) -> Actors:
        made.append(Actors(tmp_path / name, **settings))
        return made[-1]

    yield make
    for each in made:
        each.stop()


@pytest.fixture
def actors(make_actors: Callable[..., Actors]) -> Actors:
    """The actors' side."""
    return make_actors()


class VirtualTime:
    """Stands for the module `time` where code blocks: sleeping takes no time, and one thing may happen at some second."""

    def __init__(self) -> None:
        self.now = 0.0
        self.due = math.inf
        self.happens: Callable[[], object] = lambda: None

    def at(self, seconds: float, happens: Callable[[], object]) -> None:
        """Have something happen so many seconds from now."""
        self.due, self.happens = self.now + seconds, happens

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now >= self.due:
            self.due = math.inf
            self.happens()


@pytest.fixture
def virtual_time(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    """Time in Spark's processes, of which the test is one."""
    from levada.actors.spark import asks, worker

    virtual = VirtualTime()
    monkeypatch.setattr(worker, "time", virtual)
    monkeypatch.setattr(asks, "time", virtual)
    return virtual


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """One session for all tests: starting one takes six seconds.

    Java compiles in haste only: most of its code runs a few times here, and its start takes 10 s of processor time instead of 17.
    """
    pytest.importorskip("pyspark")
    from levada.actors.spark.session import session

    spark = session(master="local[2,2]", spark_driver_extraJavaOptions="-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
    gc.collect()
    gc.freeze()  # what came with it stays, as what all tests share (see the root's conftest)
    yield spark
    spark.stop()


class Server:
    """A bridge in a process that can be killed."""

    def __init__(self, directory: Path, count: int) -> None:
        script = Path(__file__).with_name("bridge_server.py")
        self.process = subprocess.Popen(
            [sys.executable, script, directory, str(count)], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        assert self.address.startswith("unix://")

    def kill(self) -> None:
        self.process.kill()
        self.ended()

    def ended(self) -> int:
        code = self.process.wait(500)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def make(count: int) -> Server:
        servers.append(Server(tmp_path / "bridge", count))
        return servers[-1]

    yield make
    for server in servers:
        if server.process.poll() is None:
            server.kill()
