"""Spools and the tail of files on a simulated disk, which keeps after a power failure only what was synced."""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.surroundings import surrounded
from trio.testing import MockClock

from levada.actors.lumberjack import Origin, SpoolConfig, SpoolSink, TailConfig, Unit, tail
from levada.actors.lumberjack.disk_spool import open_segments
from levada.actors.lumberjack.tail_file import find_files
from levada.framework import ActorSystem
from levada.framework.testing.simulation import Crashed, SimulatedDisk, SimulatedFiles

pytestmark = pytest.mark.skipif(os.name != "posix", reason="files of POSIX")


def append(files: SimulatedFiles, path: str, data: bytes) -> None:
    with files.opened(path, os.O_WRONLY | os.O_CREAT) as descriptor:
        files.pwrite(descriptor, data, files.fstat(descriptor).st_size)


@pytest.mark.parametrize("seed", range(5))
async def test_a_unit_that_was_answered_outlives_a_power_failure(seed: int, autojump_clock: MockClock) -> None:
    disk = SimulatedDisk()
    with surrounded(files=SimulatedFiles(disk)):
        async with ActorSystem() as system:
            name = await system.spawn(SpoolSink, Path("/var/spool")).ask(Unit([{"n": 1}], Origin("0123", "here", 1), 1))
    disk.power_failure(seed)
    after = SimulatedFiles(disk)
    assert after.read(f"/var/spool/{name}") == b'{"n":1}\n'


@pytest.mark.parametrize("seed", range(5))
def test_appended_events_outlive_a_power_failure(seed: int) -> None:
    disk, config = SimulatedDisk(), SpoolConfig(folder="/spool", segment=100)
    with (
        surrounded(files=SimulatedFiles(disk)),
        pytest.raises(Crashed),  # as it is closed: the process is dead
        open_segments(config, b"J") as segments,
    ):
        for number in range(10):
            segments.append([b"event %d" % number])
        disk.power_failure(seed)
    with surrounded(files=SimulatedFiles(disk)), open_segments(config, b"J") as segments:
        found: list[bytes] = []
        while bodies := segments.read()[0]:
            found += bodies
    assert found == [b"event %d" % number for number in range(10)]


async def test_lines_of_a_simulated_disk_are_shipped_once(autojump_clock: MockClock) -> None:
    files = SimulatedFiles(SimulatedDisk())
    files.make_folder("/var/log/app")
    append(files, "/var/log/app/1.log", b"one\n")
    shipped: list[Any] = []

    async def deliver(events: list[dict[str, Any]]) -> None:
        shipped.extend(event["line"] for event in events)

    for line in (b"two\n", b"three\n"):
        with surrounded(files=files):
            async with ActorSystem() as system:
                config = TailConfig(once=True)
                async with tail(system, ["/var/**/*.log"], deliver, registry="/var/lib", config=config) as followed:
                    await followed.finished()
        append(files, "/var/log/app/1.log", line)
    assert shipped == ["one", "two"]


@given(
    st.lists(st.sampled_from(["a", "b.log", ".c", "d", "**", "*", "*.log", "?", "[ab]*", ".*"]), min_size=1, max_size=4)
)
def test_patterns_match_what_glob_finds(tmp_path_factory: pytest.TempPathFactory, parts: list[str]) -> None:
    root = tmp_path_factory.getbasetemp() / "patterns"
    if not root.exists():
        for folder in ("a", "a/d", "a/.c", "d/a/b", ".c/a"):
            (root / folder).mkdir(parents=True, exist_ok=True)
            for name in ("b.log", "a1", ".log"):
                (root / folder / name).write_text(folder)
        (root / "d" / "link.log").symlink_to(root / "a" / "b.log")
        (root / "d" / "d").symlink_to(root / "a")
    pattern = str(root.joinpath(*parts))
    wanted = {os.stat(path).st_ino for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)}
    assert {file.inode for file in find_files([pattern], ())} == wanted
