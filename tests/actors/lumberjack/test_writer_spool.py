"""Events on disk before they are sent: what survives what, and what is cut off."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.actors.lumberjack import LumberjackHandler
from levada.actors.lumberjack.disk_spool import Segments, SpoolConfig, open_segments
from levada.actors.lumberjack.writer import connect
from levada.framework import ActorSystem
from levada.framework.errors import ConfigurationError
from levada.transports.lumberjack import WriterConfig

Readers = Callable[..., AbstractAsyncContextManager[Any]]


def bodies(start: int, count: int) -> list[bytes]:
    return [b"event %d" % number for number in range(start, start + count)]


def read_all(segments: Segments) -> list[bytes]:
    found: list[bytes] = []
    while True:
        part, _ = segments.read()
        if not part:
            return found
        found += part


# ---------------------------------------------------------------- the files


def test_what_was_appended_is_read_in_order_over_segments_and_starts(tmp_path: Path) -> None:
    config = SpoolConfig(folder=tmp_path, segment=100)
    segments = Segments(config, b"J")
    for start in range(0, 40, 4):
        segments.append(bodies(start, 4))
    assert len(list(tmp_path.glob("*.spool"))) == 10
    assert read_all(segments) == bodies(0, 40)
    segments.close()
    again = Segments(config, b"J")
    assert read_all(again) == bodies(0, 40), "nothing was acked"
    again.close()


def test_what_is_acked_does_not_come_again_and_its_files_are_removed(tmp_path: Path) -> None:
    config = SpoolConfig(folder=tmp_path, segment=60)
    segments = Segments(config, b"J")
    for start in range(0, 12, 3):
        segments.append(bodies(start, 3))
    full = segments.octets
    first, place = segments.read()
    segments.note_acked(place)
    assert segments.octets < full
    second, place = segments.read()
    segments.note_acked(place)
    assert first + second == bodies(0, 6)
    assert [path.name for path in sorted(tmp_path.glob("*.spool"))] == [
        "00000002.spool",
        "00000003.spool",
        "00000004.spool",
    ]
    segments.close()
    again = Segments(config, b"J")
    assert read_all(again) == bodies(6, 6)
    again.append(bodies(12, 1))
    assert read_all(again) == bodies(12, 1)
    again.note_acked(again.end)
    assert again.octets == 0
    again.close()
    for path in tmp_path.glob("*.spool"):
        path.unlink()
    bare = Segments(config, b"J")
    bare.append(bodies(13, 1))
    assert read_all(bare) == bodies(13, 1), "a place behind the end of the files hides nothing"
    bare.close()


def test_a_disk_that_is_full_when_a_segment_begins_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments = Segments(SpoolConfig(folder=tmp_path, segment=60), b"J")
    segments.append(bodies(0, 3))

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        for _ in range(2):
            with pytest.raises(OSError, match="No space"):
                segments.append(bodies(3, 3))
    segments.append(bodies(3, 3))
    assert read_all(segments) == bodies(0, 6)
    assert len(list(tmp_path.glob("*.spool"))) == 2
    segments.close()


@given(st.integers(0, 120), st.booleans())
def test_a_torn_end_is_cut_off_and_nothing_before_it(
    tmp_path_factory: pytest.TempPathFactory, cut: int, flip: bool
) -> None:
    folder = tmp_path_factory.mktemp("spool")
    config = SpoolConfig(folder=folder)
    segments = Segments(config, b"J")
    segments.append(bodies(0, 5))
    segments.close()
    path = folder / "00000001.spool"
    data = path.read_bytes()
    head = len(data) - 5 * (8 + 7)
    at = min(cut, len(data) - 1)
    if flip and at >= head:
        path.write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
    else:
        at = max(at, head)
        path.write_bytes(data[:at])
    whole = (at - head) // 15
    again = Segments(config, b"J")
    again.append([b"after"])
    assert read_all(again) == [*bodies(0, whole), b"after"]
    again.close()


def test_a_large_record_is_read_whole(tmp_path: Path) -> None:
    segments = Segments(SpoolConfig(folder=tmp_path), b"J")
    large = [b"x" * 3_000_000, b"y", b"z" * 1_500_000]
    segments.append(large)
    assert read_all(segments) == large
    segments.close()


def test_a_spool_is_for_one_writer_and_one_kind(tmp_path: Path) -> None:
    config = SpoolConfig(folder=tmp_path)
    with open_segments(config, b"J") as segments:
        segments.append([b"json"])
        with pytest.raises(ConfigurationError, match="another writer uses"), open_segments(config, b"J"):
            pass
    with pytest.raises(ConfigurationError, match="for the other version"), open_segments(config, b"D"):
        pass
    (tmp_path / "00000001.spool").write_bytes(b"something else that is long enough")
    with pytest.raises(ConfigurationError, match="is no spool"), open_segments(config, b"J"):
        pass


def test_a_folder_that_cannot_be_made_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigurationError, match="cannot keep a spool"),
        open_segments(SpoolConfig(folder=tmp_path / "file"), b"J"),
    ):
        pass


# ---------------------------------------------------------------- before a writer


@pytest.fixture
def quick() -> MockClock:
    """Files are used in threads, which a clock that jumps does not wait for; so time just runs faster."""
    return MockClock(rate=50.0)


# What is under way goes to the disk at the end; on the quick clock the 5 s that an actor has for that would be a tenth of a second.
PATIENT: dict[str, Any] = {"shutdown": 600.0, "stop_timeout": 600.0}


async def test_events_survive_the_writer_and_the_absence_of_the_reader(
    tmp_path: Path, small_reader: Readers, quick: MockClock
) -> None:
    spool = SpoolConfig(folder=tmp_path, segment=200)
    async with ActorSystem(**PATIENT) as system:
        async with connect(system, "lumberjack+memory://small", spool=spool, close_timeout=0.5) as writer:
            for number in range(30):
                await writer.send({"n": number})
            await writer.deliver([{"n": 30}, {"n": 31}])  # safe: on the disk
        async with small_reader() as reader, connect(system, reader.url, spool=spool) as writer:
            await writer.send({"n": 32})
            await writer.flush()
            assert [event["n"] for event in reader.events] == list(range(33))
        async with small_reader() as reader, connect(system, reader.url, spool=spool) as writer:
            await writer.send({"n": 33})
            await writer.flush()
            assert [event["n"] for event in reader.events] == [33], "what was acked does not come again"


async def test_flush_waits_for_what_is_being_written(
    tmp_path: Path, small_reader: Readers, quick: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if nothing is written after it."""
    entered, leave = trio.Event(), threading.Event()
    append = Segments.append
    token = trio.lowlevel.current_trio_token()

    def slow_disk(self: Segments, bodies: list[bytes]) -> None:
        token.run_sync_soon(entered.set)
        leave.wait()
        append(self, bodies)

    monkeypatch.setattr(Segments, "append", slow_disk)
    spool = SpoolConfig(folder=tmp_path)
    async with (
        ActorSystem(**PATIENT) as system,
        small_reader() as reader,
        connect(system, reader.url, spool=spool) as writer,
    ):
        await writer.send({"n": 1})
        await entered.wait()
        with trio.fail_after(200.0):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(writer.flush)
                await trio.sleep(1.0)
                leave.set()
        assert [event["n"] for event in reader.events] == [1]


async def test_a_writer_that_ends_while_the_disk_is_slow_keeps_everything(
    tmp_path: Path, quick: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, leave = trio.Event(), threading.Event()
    append = Segments.append
    token = trio.lowlevel.current_trio_token()

    def slow_disk(self: Segments, bodies: list[bytes]) -> None:
        token.run_sync_soon(entered.set)
        leave.wait()
        append(self, bodies)

    async def finish_when_the_writer_waits() -> None:
        await wait_all_tasks_blocked()
        leave.set()

    monkeypatch.setattr(Segments, "append", slow_disk)
    spool = SpoolConfig(folder=tmp_path)
    async with (
        ActorSystem(**PATIENT) as system,
        trio.open_nursery() as nursery,
        connect(system, "lumberjack+memory://nobody", spool=spool, close_timeout=0.0) as writer,
    ):
        await writer.send({"n": 1})
        await entered.wait()
        await writer.send({"n": 2})
        nursery.start_soon(finish_when_the_writer_waits)
    with open_segments(spool, b"J") as segments:
        assert len(read_all(segments)) == 2


async def test_a_spool_cannot_drop_the_oldest(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"spool": SpoolConfig(folder=tmp_path), "config": WriterConfig(drop="oldest")}
    async with ActorSystem() as system:
        with pytest.raises(ConfigurationError, match="cannot drop its oldest events"):
            async with connect(system, "lumberjack+memory://small", **settings):
                pass
    with pytest.raises(ConfigurationError, match="cannot drop its oldest events"):
        LumberjackHandler("lumberjack+memory://small", **settings)


async def test_a_full_spool_makes_senders_wait_or_drops(
    tmp_path: Path, small_reader: Readers, quick: MockClock
) -> None:
    async with ActorSystem(**PATIENT) as system:
        spool = SpoolConfig(folder=tmp_path / "waits", max_octets=500, segment=100)
        async with connect(system, "lumberjack+memory://small", spool=spool, close_timeout=0.5) as writer:
            sent = 0
            with trio.CancelScope() as scope:
                while True:
                    scope.deadline = trio.current_time() + 50  # for each
                    await writer.send({"n": sent})
                    sent += 1
            assert 10 < sent < 30
            with pytest.raises(trio.WouldBlock):
                writer.send_nowait({"n": -1})
            async with small_reader() as reader:
                await writer.send({"n": sent})
                assert [event["n"] for event in await reader.has(sent + 1)] == list(range(sent + 1))
                await writer.flush()
        spool = SpoolConfig(folder=tmp_path / "drops", max_octets=500, segment=100)
        config = WriterConfig(drop="newest")
        async with connect(
            system, "lumberjack+memory://small", spool=spool, config=config, close_timeout=0.5
        ) as writer:
            for number in range(100):
                writer.send_nowait({"n": number})
                await trio.sleep(0.05)
            assert writer.statistics().events_dropped > 50
