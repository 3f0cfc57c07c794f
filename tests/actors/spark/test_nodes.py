"""Nodes as tasks of Spark, on the session of all tests: it has two slots, and Spark tries a task twice."""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio

pytest.importorskip("pyspark")
pytest.importorskip("cryptography")

from py4j.protocol import Py4JJavaError
from pyspark import InheritableThread
from tests.actors.nodes.processes import gone

from levada.actors.nodes import NodeDown, NodeLost, NodeSettings, NodeUp, spark_nodes
from levada.framework import ActorSystem, Failed, restart
from levada.framework.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.ci, pytest.mark.loopback, pytest.mark.timeout(180)]

SETTINGS = NodeSettings(start_timeout=300.0)
MODULES = Path(__file__).parents[1] / "nodes" / "single.py", Path(__file__).with_name("node_app.py")


@pytest.fixture
def shipped(spark: SparkSession) -> Any:
    """The app's module, which executors have."""
    for module in MODULES:
        spark.sparkContext.addPyFile(str(module))
    return importlib.import_module("node_app")


@pytest.fixture
def spark_log(spark: SparkSession) -> Iterator[Callable[[], str]]:
    """Returns what Spark has logged meanwhile."""
    jvm: Any = spark.sparkContext._jvm
    log4j = jvm.org.apache.logging.log4j
    text = jvm.java.io.StringWriter()
    layout = log4j.core.layout.PatternLayout.newBuilder().withPattern("%c{1}: %m%n").build()
    appender = log4j.core.appender.WriterAppender.createAppender(layout, None, text, "test", False, True)
    appender.start()
    root = log4j.LogManager.getContext(False).getConfiguration().getRootLogger()
    root.addAppender(appender, None, None)
    yield text.toString
    root.removeAppender("test")


def command_of_parent(pid: int) -> str:
    _state, parent, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return Path(f"/proc/{parent}/cmdline").read_text()


async def test_a_node_runs_where_spark_places_it_and_comes_back_after_a_kill(
    spark: SparkSession, spark_log: Callable[[], str], shipped: Any
) -> None:
    """The log has no traceback of Java for a killed node, and one for a user's task that fails."""
    async with ActorSystem("driver") as system:
        async with spark_nodes(system, spark, 1, "node_app:app", settings=SETTINGS) as nodes:
            [first] = nodes.members
            assert "pyspark.daemon" in command_of_parent(first.pid)
            counter = await nodes.spawn(shipped.Counter, on="n0")
            assert [await counter.ask(shipped.Add(n)) for n in (3, 4)] == [3, 7]
            assert await counter.ask(shipped.Where()) == first.pid
            async with nodes.events() as events:
                os.kill(first.pid, signal.SIGKILL)
                down = await anext(events)
                up = await anext(events)
            assert isinstance(down, NodeDown)
            assert isinstance(down.reason, Failed)
            assert isinstance(down.reason.error, NodeLost)
            assert "Spark" in str(down.reason.error)
            assert isinstance(up, NodeUp)
            assert up.member.name == "n0"
            assert up.member.restarts == 1
            assert up.member.node_id != first.node_id
            assert await gone(first.pid, 20.0)
            await counter.terminated()
            again = await nodes.lookup("counter", on="n0")
            assert await again.ask(shipped.Add(1)) == 1
            second = up.member
            await nodes.restart()  # a fresh process, though Spark would use the drained one again
            assert nodes["n0"].pid != second.pid
            assert await gone(second.pid, 20.0)
            third = nodes["n0"]
        assert await gone(third.pid, 20.0)
    assert await trio.to_thread.run_sync(lambda: spark.range(10).count()) == 10
    assert "\tat org.apache.spark" not in spark_log()
    with pytest.raises(Exception, match="modulo by zero"):
        await trio.to_thread.run_sync(lambda: spark.sparkContext.parallelize([0], 1).map(lambda n: 1 // n).collect())
    assert "Executor: Exception in task" in spark_log()
    assert "\tat org.apache.spark" in spark_log()


@pytest.mark.timeout(400)
async def test_a_node_that_is_reached_by_quic(spark: SparkSession, shipped: Any) -> None:
    """Actors are spawned on it and asked; one with a name moves when it restarts."""
    async with ActorSystem("driver") as system:
        settings = spark_nodes(system, spark, 1, "node_app:app", settings=SETTINGS, carrier="quic")
        async with settings as nodes:
            assert nodes["n0"].url.startswith("aqueduct://127.0.0.1:")  # where the other members reach it
            counter = await nodes.spawn(shipped.Counter, on="n0")
            assert [await counter.ask(shipped.Add(n)) for n in (3, 4)] == [3, 7]
            named = await nodes.spawn(shipped.Counter, name="named", supervise=restart("permanent"))
            first = await named.ask(shipped.Where())
            await nodes.restart()
            again = await nodes.lookup("named")
            assert await again.ask(shipped.Where()) == nodes["n0"].pid != first


@pytest.mark.release
@pytest.mark.timeout(400)
def test_a_singleton_durable_actors_and_names_are_the_fleets_under_spark(tmp_path: Path) -> None:
    """The node with the singleton is killed, and all nodes restart; nothing of the durable actors is lost."""
    ended = subprocess.run(
        [sys.executable, "-c", "import whole_app; whole_app.main()"],
        cwd=Path(__file__).parent,
        env={**os.environ, "WHOLE_APP": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    before, first, moved, after, second, *last = json.loads(ended.stdout.splitlines()[-1])
    assert moved is True
    assert [house for house, _ in (before, first)] == [1, 2]
    assert [house for house, _ in (after, second)] == [1, 2]  # another one, which starts anew
    assert [paid for _, paid in (before, first, after, second, *last)] == [1, 2, 3, 4, 5, 6]


async def test_an_app_that_executors_cannot_import_is_told_with_the_remedy(spark: SparkSession) -> None:
    async with ActorSystem("driver") as system:
        with pytest.raises(NodeLost, match=r"no module named 'nowhere'.*spark\.sparkContext\.addPyFile"):
            async with spark_nodes(system, spark, 1, "nowhere:app", settings=SETTINGS):
                pass


def hold_slot(place: str) -> None:
    """In a task: say that it runs, and run until the test ends."""
    with socket.socket(socket.AF_UNIX) as slot:
        slot.connect(place)
        slot.recv(1)


@pytest.fixture
def full(spark: SparkSession, tmp_path: Path) -> Iterator[None]:
    """Both slots are taken."""
    context = spark.sparkContext
    place = str(tmp_path / "slots")

    def hold() -> None:
        context.setJobGroup("held", "tasks that hold the slots")
        with pytest.raises(Py4JJavaError, match="cancelled"):
            context.parallelize(range(2), 2).map(lambda _: hold_slot(place)).collect()

    holding: threading.Thread = InheritableThread(target=hold)
    with ExitStack() as stack:
        slots = stack.enter_context(socket.socket(socket.AF_UNIX))
        slots.bind(place)
        slots.listen()
        holding.start()
        for _ in range(2):
            stack.enter_context(slots.accept()[0])
        yield
        context.cancelJobGroup("held")
        holding.join(50)


async def test_a_node_without_a_slot_is_told_in_numbers(spark: SparkSession, full: None, shipped: Any) -> None:
    async with ActorSystem("driver") as system:
        with pytest.raises(NodeLost) as caught:
            async with spark_nodes(system, spark, 1, "node_app:app", settings=NodeSettings(start_timeout=2.0)):
                pass
    text = str(caught.value)
    assert "n0 did not say hello within 2 s" in text
    assert "no free slot: local[2,2] has 2 slots and" in text
    assert "2 tasks are running, 0 of them nodes" in text
    assert text.endswith("set the master to local[nodes + cores]")


async def test_more_nodes_than_slots_are_refused_at_once(spark: SparkSession) -> None:
    async with ActorSystem("driver") as system:
        with pytest.raises(ConfigurationError, match=r"local\[2,2\] has 2 slots, and 2 nodes would hold all of them"):
            async with spark_nodes(system, spark, 2, "node_app:app"):
                pass


async def test_a_session_of_spark_connect_is_refused(spark: SparkSession) -> None:
    from pyspark.errors import PySparkAttributeError

    class Remote:
        @property
        def sparkContext(self) -> object:  # noqa: N802 - Spark's name
            raise PySparkAttributeError(errorClass="JVM_ATTRIBUTE_NOT_SUPPORTED", messageParameters={"attr_name": "x"})

    remote: Any = Remote()
    async with ActorSystem("driver") as system:
        with pytest.raises(ConfigurationError, match="this is a session of Spark Connect"):
            async with spark_nodes(system, remote, 1, "node_app:app"):
                pass
