"""Files to a reader over the whole way: real logs, and shippers that are killed at the worst moments."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import trio

from levada.actors.lumberjack.tail import TailConfig, tail
from levada.actors.lumberjack.writer import connect
from levada.framework import ActorSystem
from levada.transports.lumberjack import WriterConfig

Readers = Callable[..., AbstractAsyncContextManager[Any]]
ANY = "tcp://127.0.0.1:0"


def real_log(name: str, folder: Path) -> Path:
    path = folder / name
    path.write_bytes(gzip.decompress((files("levada.actors.demo") / "data" / f"{name}.gz").read_bytes()))
    return path


async def ship_once(
    reader: Any, log: Path, version: int = 2, registry: Path | None = None, **settings: Any
) -> list[dict[str, Any]]:
    config = TailConfig(once=True, drain_timeout=600.0, **settings)
    protocol = WriterConfig(version=1 if version == 1 else 2)
    async with (
        ActorSystem() as system,
        connect(system, reader.url, config=protocol) as writer,
        tail(system, [str(log)], writer.deliver, registry=registry, config=config) as followed,
    ):
        await followed.finished()
        status = followed.status()
    assert status.lines_read == status.lines_acked == len(reader.events)
    events: list[dict[str, Any]] = reader.events
    return events


@pytest.mark.ci
@pytest.mark.parametrize("version", [1, 2])
async def test_a_real_access_log_arrives_whole(version: int, tmp_path: Path, small_reader: Readers) -> None:
    log = real_log("apache-access-2015.log", tmp_path)
    async with small_reader() as reader:
        events = await ship_once(reader, log, version)
    assert "".join(event["line"] + "\n" for event in events) == log.read_text()
    assert {event["file"] for event in events} == {str(log)}
    data = log.read_bytes()
    assert all(data.startswith(event["line"].encode(), int(event["offset"])) for event in events)
    # Known facts about this log; the damaged line has status 200 too.
    statuses = Counter(re.findall(r'" (\d{3}) ', " ".join(event["line"] for event in events)))
    assert (statuses["304"], statuses["404"], statuses["301"], statuses["206"]) == (445, 213, 164, 45)


async def test_stack_traces_of_a_real_log_stay_together(tmp_path: Path, small_reader: Readers) -> None:
    log = real_log("kafka-controller-2016.log", tmp_path)
    async with small_reader() as reader:
        events = await ship_once(reader, log, multiline=r"^\[")
    assert len(events) == 803
    assert all(event["line"].startswith("[") for event in events)
    assert "".join(event["line"] + "\n" for event in events) == log.read_text()
    assert sum(event["line"].count("\n") for event in events) == 229


# ---------------------------------------------------------------- killed shippers


@asynccontextmanager
async def shipper(*arguments: str) -> AsyncIterator[trio.Process]:
    """A shipper in a process of its own, killed at the end of the block at the latest."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = await trio.lowlevel.open_process(
        [sys.executable, "-m", "levada.actors", "ship", *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()


def lines_of(reader: Any) -> list[str]:
    return [event["line"] for event in reader.events]


@pytest.mark.ci
@pytest.mark.loopback
async def test_killed_between_send_and_ack_and_between_ack_and_registry(tmp_path: Path, small_reader: Readers) -> None:
    log = tmp_path / "app.log"
    lines = [f"line {number}" for number in range(3000)]
    log.write_text("".join(line + "\n" for line in lines))
    registry = tmp_path / "registry"
    async with small_reader(ANY) as reader:
        arguments = (str(log), "--to", reader.url, "--registry", str(registry))
        reader.acks = trio.Event()
        async with shipper(*arguments) as process:
            await reader.has(1000)
            process.kill()  # sent, not acked
            await process.wait()
        reader.acks.set()
        reader.events.clear()
        async with shipper(*arguments) as process:
            await reader.has(3000)
            process.kill()  # acked just now; the registry is written once a second
            await process.wait()
        async with shipper(*arguments, "--once") as process:
            assert await process.wait() == 0
        assert set(lines_of(reader)) <= set(lines)
        reader.events.clear()
        with log.open("a") as file:
            file.write("one more\n")
        await ship_once(reader, log, registry=registry)
        assert lines_of(reader) == ["one more"], "what is in the registry is not sent again"
    entry = json.loads((registry / "registry.json").read_text())["files"][0]
    assert entry["offset"] == log.stat().st_size


@pytest.mark.loopback
@pytest.mark.ci
async def test_killed_again_and_again_while_the_log_is_rotated_loses_nothing(
    tmp_path: Path, small_reader: Readers
) -> None:
    log = tmp_path / "app.log"
    written: list[str] = []

    def write(count: int) -> None:
        with log.open("a") as file:
            for _ in range(count):
                written.append(f"line {len(written)} {'x' * (len(written) % 40)}")
                file.write(written[-1] + "\n")

    write(500)
    async with small_reader(ANY) as reader:
        arguments = (str(log), "--to", reader.url, "--registry", str(tmp_path / "registry"), "--window", "64")
        for round in range(3):
            async with shipper(*arguments) as process:
                while len(reader.events) < 300 * (round + 1):
                    write(20)
                    await reader.grows()
                process.kill()
                await process.wait()
            write(100)
            if round % 2:
                log.rename(tmp_path / f"app.log.{round}")  # of a name that is not shipped
                write(100)
        async with shipper(*arguments, "--once") as process:
            assert await process.wait() == 0
        assert set(lines_of(reader)) == set(written)


@pytest.mark.loopback
@pytest.mark.ci
async def test_the_reader_may_come_and_go(tmp_path: Path, small_reader: Readers) -> None:
    log = tmp_path / "app.log"
    log.write_text("one\n")
    async with small_reader(ANY) as reader:
        port = reader.url.rpartition(":")[2]
        async with shipper(str(log), "--to", reader.url) as process:
            assert [event["line"] for event in await reader.has(1)] == ["one"]
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
    arguments = (str(log), "--to", f"lumberjack://127.0.0.1:{port}", "--once")
    async with shipper(*arguments) as process, small_reader(f"tcp://127.0.0.1:{port}") as reader:
        assert [event["line"] for event in await reader.has(1)] == ["one"]
        assert await process.wait() == 0
