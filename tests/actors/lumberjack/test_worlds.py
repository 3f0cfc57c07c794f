"""A shipper and its reader in simulated worlds: each line of a log arrives, whatever is killed and whichever machine loses its power."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path

import pytest
import trio

from levada.actors import lumberjack
from levada.framework import ActorSystem
from levada.framework.platform import PLATFORM
from levada.framework.testing.simulation import Faults, SimulatedFiles, World, simulate

pytestmark = pytest.mark.skipif(os.name != "posix", reason="files of POSIX")

LINES = [f"line {number}" for number in range(30)]


async def store() -> None:
    """Keep what comes in files."""
    sink = functools.partial(lumberjack.SpoolSink, Path("/var/spool"))
    async with ActorSystem() as system, lumberjack.serve(system, "lumberjack+tcp://0.0.0.0:5044", sink):
        await trio.sleep_forever()


async def ship() -> None:
    """Ship the logs, until this process is killed."""
    async with (
        ActorSystem() as system,
        lumberjack.connect(system, "lumberjack+tcp://store:5044") as writer,
        lumberjack.tail(system, ["/var/log/*.log"], writer.deliver, registry="/var/lib/ship"),
    ):
        await trio.sleep_forever()


async def log() -> None:
    """Write a log, with half of its lines in a second file."""
    files = PLATFORM.get().files
    files.make_durable_folder("/var/log")
    for number, line in enumerate(LINES):
        with files.opened(f"/var/log/{number // 15}.log", os.O_WRONLY | os.O_CREAT) as descriptor:
            files.pwrite(descriptor, f"{line}\n".encode(), files.fstat(descriptor).st_size)
            files.fsync(descriptor)
        files.sync_folder("/var/log")
        await trio.sleep(1)


async def scenario(world: World) -> None:
    """Wait until every line is in the spool; the machine with the log loses its power when the log is written."""
    await world.start("store", store, machine="store", restart=1.0)
    await world.start("shipper", ship, machine="web", restart=1.0)
    await (await world.start("log", log, machine="web")).wait()
    world["shipper"].power_failure()
    found: set[str] = set()
    while found != set(LINES):
        await trio.sleep(10)
        files = SimulatedFiles(world.disk("store"))
        units = [files.read(path) for path in files.glob("/var/spool", "*.jsonl")]
        found = {json.loads(event)["line"] for unit in units for event in unit.splitlines()}


@pytest.mark.ci
@pytest.mark.usefixtures("user_code_fails")  # closing fails in a process that is dead
def test_every_line_arrives_whatever_is_killed() -> None:
    done = simulate(
        scenario, seeds=range(5), machines=["store", "web"], faults=Faults(strikes=12, every=3.0), limit=300.0
    )
    assert done.strikes > 10
