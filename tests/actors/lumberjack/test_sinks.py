"""The spool: what is acked is on disk, whatever happens when."""

from __future__ import annotations

import errno
import functools
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import trio
from tests.surroundings import surrounded
from trio.testing import MockClock

from levada.actors.lumberjack import Origin, SpoolSink, Unit, serve
from levada.framework import ActorSystem
from levada.framework.files import Files
from levada.transports.carriers import ByteStream, TcpConfig, dial
from levada.transports.lumberjack import encode_data, encode_json, encode_window

ORIGIN = Origin("0123", "here", 1)


def lines(folder: Path) -> list[dict[str, Any]]:
    """All events of a spool, files in order of their names."""
    return [
        json.loads(line)
        for file in sorted(folder.glob("*.jsonl"))
        for line in file.read_text(encoding="ascii").splitlines()
    ]


async def test_a_unit_is_a_file_of_lines(tmp_path: Path) -> None:
    async with ActorSystem() as system:
        spool = system.spawn(SpoolSink, tmp_path / "deep" / "spool")
        events: list[dict[str, Any]] = [
            {"line": "héllo\nwörld", "raw": b"caf\xe9".decode("utf-8", "surrogateescape")},
            {"n": [1, {"x": None}]},
            {},
        ]
        assert await spool.ask(Unit(events, ORIGIN, 7)) == "0123-000007.jsonl"
        folder = tmp_path / "deep" / "spool"
        assert sorted(os.listdir(folder)) == [".writing", "0123-000007.jsonl"]
        assert os.listdir(folder / ".writing") == []
        modes = [path.stat().st_mode & 0o777 for path in (folder, folder / ".writing", folder / "0123-000007.jsonl")]
        assert modes == [0o700, 0o700, 0o600]
        assert lines(folder) == events
        assert (folder / "0123-000007.jsonl").read_bytes().count(b"\n") == 3
        line = (folder / "0123-000007.jsonl").read_text(encoding="ascii").splitlines()[0]
        assert json.loads(line)["raw"].encode("utf-8", "surrogateescape") == b"caf\xe9"


async def test_numbers_that_json_cannot_hold_become_text(tmp_path: Path) -> None:
    async with ActorSystem() as system:
        spool = system.spawn(SpoolSink, tmp_path)
        await spool.ask(Unit([{"a": float("inf"), "b": [1.5, {"c": float("-inf")}]}, {"ok": 1}], ORIGIN, 1))
    assert lines(tmp_path) == [{"a": "inf", "b": [1.5, {"c": "-inf"}]}, {"ok": 1}]


@pytest.mark.usefixtures("user_code_fails")
async def test_a_full_disk_fails_the_unit_and_leaves_nothing(tmp_path: Path, autojump_clock: MockClock) -> None:
    class Full(Files):
        def fsync(self, fd: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    with surrounded(files=Full()):
        async with (
            ActorSystem() as system,
            serve(system, "lumberjack+memory://spool", functools.partial(SpoolSink, tmp_path)) as reader,
            dial("memory://spool") as dialled,
        ):
            stream = cast("ByteStream", dialled)
            await stream.send_all(encode_window(1, 1) + encode_data(1, 1, {"n": "1"}))
            assert await stream.receive_some() == b""
            assert reader.statistics().sink_failures == 1
    assert os.listdir(tmp_path) == [".writing"]
    assert os.listdir(tmp_path / ".writing") == []


async def test_what_a_dead_process_left_half_written_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / ".writing"
    folder.mkdir()
    long_ago = time.time() - 4000
    for name in ("old-000001.jsonl", "new-000001.jsonl", "no unit of ours"):
        (folder / name).write_text("{")
        if name != "new-000001.jsonl":
            os.utime(folder / name, (long_ago, long_ago))
    (tmp_path / "old-000001.jsonl").write_text("{}\n")
    os.utime(tmp_path / "old-000001.jsonl", (long_ago, long_ago))
    async with ActorSystem() as system:
        await system.spawn(SpoolSink, tmp_path).ask(Unit([{}], ORIGIN, 1))
    assert sorted(os.listdir(folder)) == ["new-000001.jsonl", "no unit of ours"], "somebody may be writing the new one"
    assert sorted(os.listdir(tmp_path)) == [".writing", "0123-000001.jsonl", "old-000001.jsonl"]


# The reader as a process of its own, which can be killed.
SERVER = """
    import os, signal, sys, functools, itertools, trio
    from pathlib import Path
    from levada.actors.lumberjack import SpoolSink, Unit, serve
    from levada.framework import ActorSystem, blocking, handles

    folder, deadly = Path(sys.argv[1]), int(sys.argv[2])
    units = itertools.count(1)

    class Deadly(SpoolSink):
        @handles
        @blocking
        def store(self, unit: Unit) -> str:
            name = super().store.__wrapped__(self, unit)
            if next(units) == deadly:
                os.kill(os.getpid(), signal.SIGKILL)  # the file is there, the ack is not
            return name

    async def main():
        async with ActorSystem() as system:
            async with serve(system, "lumberjack://127.0.0.1:0", functools.partial(Deadly, folder)) as reader:
                print(reader.url.removeprefix("lumberjack://"), flush=True)
                await trio.sleep_forever()

    trio.run(main)
"""


@contextmanager
def serving(folder: Path, deadly: int = 0) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SERVER), str(folder), str(deadly)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield "tcp://" + process.stdout.readline().strip(), process
    finally:
        process.kill()
        process.communicate()


async def ship(url: str, todo: list[int], size: int) -> list[int]:
    """Send windows until all is acked or the reader is gone; return what was acked."""
    acked: list[int] = []
    async with dial(url, TcpConfig()) as stream:
        try:
            for at in range(0, len(todo), size):
                batch = todo[at : at + size]
                frames = b"".join(encode_json(2, number, {"n": value}) for number, value in enumerate(batch, 1))
                await stream.send_all(encode_window(2, len(batch)) + frames)
                data, ack = b"", b"2A" + len(batch).to_bytes(4, "big")
                while len(data) % 6 or not data.endswith(ack):
                    part = await stream.receive_some()
                    if not part:
                        return acked
                    data += part
                assert data.replace(b"2A\0\0\0\0", b"") == ack  # an ack of 0 says that more time is needed
                acked += batch
        except ConnectionError:
            pass
    return acked


@pytest.mark.ci
@pytest.mark.loopback
@pytest.mark.rule("LJ-25")
async def test_lj25_kill_9_between_rename_and_ack_loses_nothing(tmp_path: Path) -> None:
    """LJ-25: what was acked is on disk after a kill at the worst moment; what was not acked comes again."""
    todo = list(range(60))
    acked: list[int] = []
    for deadly in (3, 1, 0):
        with serving(tmp_path, deadly) as (url, process):
            acked += await ship(url, [number for number in todo if number not in acked], 10)
            if deadly:
                assert await trio.to_thread.run_sync(process.wait) == -signal.SIGKILL
        stored = [event["n"] for event in lines(tmp_path)]
        assert set(acked) <= set(stored)
    assert sorted(acked) == todo
    assert len(stored) == 60 + 2 * 10  # the two units that were on disk and not acked are there twice


@pytest.mark.loopback
@pytest.mark.ci
async def test_kill_9_at_any_moment_loses_nothing_that_was_acked(tmp_path: Path) -> None:
    todo = list(range(400))
    acked: list[int] = []
    for _ in range(3):
        with serving(tmp_path) as (url, process):
            async with trio.open_nursery() as nursery:

                async def kill(victim: subprocess.Popen[str] = process, rest: int = len(acked)) -> None:
                    while len(lines(tmp_path)) <= rest + 50:
                        await trio.lowlevel.checkpoint()
                    victim.kill()

                nursery.start_soon(kill)
                acked += await ship(url, [number for number in todo if number not in acked], 5)
                nursery.cancel_scope.cancel()
        assert set(acked) <= {event["n"] for event in lines(tmp_path)}
    assert acked
