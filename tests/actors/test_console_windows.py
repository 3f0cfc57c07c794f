"""Snapshots and views of the console tell the flow-control window of each connection, for every protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.actors import aqueduct, lumberjack, maop, rsocket
from levada.actors.authenticators import BearerTokens
from levada.actors.console import Snapshot, View, Viewer, take_snapshot
from levada.framework import Actor, ActorSystem, Identity, handles
from levada.transports.carriers import MemoryConfig
from levada.transports.lumberjack import WriterConfig

Window = dict[str, Any]


async def windows(system: ActorSystem) -> list[Window]:
    """Return those of a snapshot that has gone through JSON, the same that a dashboard gets; the listener's side first."""
    await wait_all_tasks_blocked()
    rows = Snapshot.from_json(take_snapshot(system).to_json()).actors
    found = {row.path: dict(row.window) for row in rows if row.window is not None}
    viewer = Viewer(system)
    seen = (await viewer.look(View(page="connections")))["rows"]
    viewer.close()
    assert {row["path"]: row["window"] for row in seen if row["window"] is not None} == found
    sides = {row["path"]: row["report"].get("side", "") for row in seen}
    return [found[path] for path in sorted(found, key=lambda path: sides[path], reverse=True)]


@pytest.mark.parametrize("scheme", ["rsocket", "reactivesocket"])
async def test_payloads_of_all_open_streams(scheme: str, autojump_clock: MockClock) -> None:
    async def answer(request: rsocket.Request) -> AsyncIterator[bytes]:
        async def items() -> AsyncIterator[bytes]:
            for _ in range(3):
                yield b"x"
            await trio.sleep_forever()

        return items()

    async with (
        ActorSystem() as system,
        rsocket.serve(system, f"{scheme}+memory://desk", answer) as listener,
        rsocket.connect(system, listener.url) as peer,
    ):
        idle = {"send": 0, "receive": 0, "queued": 0, "unit": "payloads"}
        assert await windows(system) == [idle, idle]
        streams = [await peer.request_stream(b"", window=window) for window in (10, 20)]
        await wait_all_tasks_blocked()
        assert await windows(system) == [{**idle, "send": 24}, {**idle, "receive": 24}]
        for stream in streams:
            stream.close()
        await wait_all_tasks_blocked()
        assert await windows(system) == [idle, idle]


class Desk(Actor[str]):
    @handles
    def work(self, m: str) -> None:
        pass


async def read(request: object) -> bytes:
    return b""


async def test_bytes_of_the_whole_connection(autojump_clock: MockClock) -> None:
    carrier = MemoryConfig(shape="connection", connection_window=5000)
    tokens = BearerTokens.of({b"secret": Identity("desk")})
    idle = {"send": 5000, "receive": 5000, "queued": 0, "unit": "bytes"}
    aqueducts, maops = aqueduct.PeerConfig(carrier=carrier), maop.PeerConfig(carrier=carrier)
    async with ActorSystem() as system:
        async with (
            aqueduct.serve(system, "aqueduct+memory://desk", Desk, str, config=aqueducts) as listener,
            aqueduct.connect(system, listener.url, str, config=aqueducts) as peer,
        ):
            await peer.send("x" * 100)
            assert await windows(system) == [idle, idle]
        async with (
            maop.serve(system, "maop+memory://desk", {101: read}, authenticate=tokens, config=maops) as serving,
            maop.connect(system, serving.url, token=b"secret", config=maops),
        ):
            assert await windows(system) == [idle, idle]


class Sink(Actor[lumberjack.Unit]):
    commits: trio.Event

    @handles
    async def take(self, m: lumberjack.Unit) -> None:
        await self.commits.wait()


async def test_lines_of_a_window(autojump_clock: MockClock) -> None:
    url, commits = "lumberjack+memory://logs", trio.Event()
    config = WriterConfig(window=10, version=1, mode="stream", linger=0.0)
    async with ActorSystem() as system:
        sink = system.spawn(Sink, commits)
        async with lumberjack.serve(system, url, sink), lumberjack.connect(system, url, config=config) as writer:
            for number in range(4):
                await writer.send({"line": number})
            reader = {"send": None, "receive": 6, "queued": 0, "unit": "lines"}
            lines = {"send": 6, "receive": None, "queued": 0, "unit": "lines"}
            assert await windows(system) == [reader, lines]
            commits.set()
            await writer.flush()


async def test_no_window_without_a_carrier(autojump_clock: MockClock) -> None:
    async with ActorSystem() as system, lumberjack.connect(system, "lumberjack+memory://nobody"):
        assert await windows(system) == []
