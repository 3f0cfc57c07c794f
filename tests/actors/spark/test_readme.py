"""The two pieces of program about Spark in README.md, run as they stand there."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio

pytest.importorskip("pyarrow")
pytest.importorskip("levada.actors.spark", exc_type=ImportError)

from levada.actors.spark import Delivery, serve_bridge  # noqa: E402
from levada.framework import Actor, ActorSystem, handles, message  # noqa: E402

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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


@pytest.mark.soak
def test_the_readme_brings_an_alarm_from_actors_through_spark_to_actors(spark: SparkSession, tmp_path: Path) -> None:
    actors = piece("async with ActorSystem() as system, serve_bridge").replace("/var/lib/weather", str(tmp_path / "bridge"))
    heard: list[Any] = []
    done = trio.Event()

    def siren() -> Siren:
        return Siren(lambda m: (heard.append(m), done.set()))

    names: dict[str, Any] = {
        "ActorSystem": ActorSystem,
        "Reading": Reading,
        "Siren": siren,
        "serve_bridge": serve_bridge,
        "rest": lambda bridge: rest(bridge),
    }

    def stream(address: str) -> None:
        # The session that the first line makes is there already.
        program = "\n".join(piece("spark = ").splitlines()[1:])
        exec(program, {"spark": spark, "address": address, "folder": str(tmp_path / "checkpoint")})

    async def rest(bridge: Any) -> None:
        await trio.to_thread.run_sync(stream, bridge.address)
        await done.wait()
        for query in spark.streams.active:
            await trio.to_thread.run_sync(query.stop)

    exec(f"async def main():\n{textwrap.indent(actors, '    ')}        await rest(bridge)\n", names)
    trio.run(names["main"])
    assert heard == [Reading("north", 41.5)]
