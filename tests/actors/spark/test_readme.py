"""The two pieces of program about Spark in README.md, run as they stand there."""

from __future__ import annotations

import re
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from queue import Queue
from typing import TYPE_CHECKING, Any

import pytest
import trio

pytest.importorskip("pyarrow")
pytest.importorskip("levada.actors.spark", exc_type=ImportError)

from levada.actors.spark import Delivery, serve_bridge
from levada.framework import Actor, ActorSystem, handles, message

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from levada.actors.spark import Bridge

ROOT = Path(__file__).resolve().parents[3]


@message("tests.readme.Reading")
class Reading:
    sensor: str
    value: float


class Siren(Actor[Delivery]):
    heard: Callable[[Any], None]

    @handles
    def ring(self, m: Delivery) -> None:
        self.heard(m.message)


def piece(beginning: str) -> str:
    """The block of README.md that begins so."""
    blocks: list[str] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    (found,) = [block for block in blocks if block.startswith(beginning)]
    return found


@pytest.mark.release
def test_the_readme_brings_an_alarm_from_actors_through_spark_to_actors(spark: SparkSession, tmp_path: Path) -> None:
    program = piece("async with ActorSystem() as system, serve_bridge").replace("/var/lib/weather", str(tmp_path / "b"))
    alarms: Queue[Any] = Queue()
    address: Queue[str] = Queue()
    done = threading.Event()

    async def rest(bridge: Bridge) -> None:
        address.put(bridge.address)
        await trio.to_thread.run_sync(done.wait)

    names: dict[str, Any] = {
        "ActorSystem": ActorSystem,
        "Reading": Reading,
        "Siren": lambda: Siren(alarms.put),
        "serve_bridge": serve_bridge,
        "rest": rest,
    }
    exec(f"async def main():\n{textwrap.indent(program, '    ')}        await rest(bridge)\n", names)
    actors = threading.Thread(target=trio.run, args=(names["main"],))
    actors.start()
    try:
        # The session that the first line makes is there already.
        stream = "\n".join(piece("spark = ").splitlines()[1:])
        exec(stream, {"spark": spark, "address": address.get(timeout=500), "folder": str(tmp_path / "checkpoint")})
        assert alarms.get(timeout=1000) == Reading("north", 41.5)
        for query in spark.streams.active:
            query.stop()
    finally:
        done.set()
        actors.join()
