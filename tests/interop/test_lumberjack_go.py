"""Lumberjack with go-lumber at the other end: its client, which speaks version 2 only, and its server, which speaks both."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.output import heard

from levada.actors.lumberjack import Unit, WriterConfig, connect, serve
from levada.framework import ActorSystem

pytestmark = [pytest.mark.loopback, pytest.mark.release]

SOURCES = Path(__file__).parent / "go_lumber"
COUNT = 2_550  # full windows, and a part of one
PATIENCE = 60.0  # seconds


@pytest.fixture(scope="module")
def golumber(peer_folder: Callable[[str, object], Path]) -> str:
    """The program, built with go-lumber 0.2.0 out of the Go module proxy."""
    if shutil.which("go") is None:
        pytest.skip("go is needed to build go-lumber")
    names = ("main.go", "go.mod", "go.sum")
    program = peer_folder("golumber", [(SOURCES / name).read_text() for name in names]) / "golumber"
    if not program.exists():
        fetched = subprocess.run(["go", "mod", "download"], cwd=SOURCES, capture_output=True, text=True)
        if fetched.returncode:
            pytest.skip(f"go-lumber cannot be fetched: {fetched.stderr.strip()[-300:]}")
        subprocess.run(["go", "build", "-o", str(program), "."], cwd=SOURCES, check=True)
    return str(program)


@pytest.mark.parametrize("level", [0, 3], ids=["plain", "packed"])
async def test_the_client_of_go_lumber_sends_to_our_reader(level: int, golumber: str) -> None:
    """Each event once, in order, as it was; the client gets the ack of each of its windows."""
    got: list[dict[str, Any]] = []

    async def take(unit: Unit) -> None:
        got.extend(unit.events)

    async with ActorSystem() as system, serve(system, "lumberjack://127.0.0.1:0", take) as reader:
        address = reader.url.rpartition("/")[2]
        with trio.fail_after(PATIENCE):
            await trio.run_process([golumber, "send", address, str(COUNT), str(level)])
    assert got == [{"message": f"line {i} é", "offset": i, "host": {"name": "web-01"}} for i in range(COUNT)]


@pytest.mark.parametrize("compression", [0, 3], ids=["plain", "packed"])
@pytest.mark.parametrize("version", [1, 2])
async def test_our_writer_sends_to_the_server_of_go_lumber(version: Any, compression: int, golumber: str) -> None:
    """Each event once, in order, as it was; the writer gets the ack of all."""
    events: list[dict[str, Any]] = [{"message": f"line {i} é", "offset": str(i), "": ""} for i in range(COUNT)]
    if version == 2:
        events = [{**event, "host": {"name": "web-01", "cores": [1, None, 2.5]}} for event in events]
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            run = functools.partial(trio.run_process, stdin=subprocess.PIPE, stdout=subprocess.PIPE, check=False)
            process: trio.Process = await nursery.start(run, [golumber, "receive", str(version)])
            address = await heard(process.stdout, lambda said: said.endswith(b"\n"))
            url = f"lumberjack://{address.decode().strip()}"
            config = WriterConfig(version=version, compression=compression, window=1000)
            async with ActorSystem() as system, connect(system, url, config=config) as writer:
                for event in events:
                    await writer.send(event)
                nursery.start_soon(writer.flush)
                printed = await heard(process.stdout, lambda said: said.count(b"\n") >= COUNT)
                await writer.flush()
                assert writer.unacked == 0
            nursery.cancel_scope.cancel()
    assert [json.loads(line) for line in printed.splitlines()] == events
