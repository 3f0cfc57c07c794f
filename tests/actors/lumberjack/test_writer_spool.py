"""Events on disk before they are sent: what survives what, and what is cut off."""

from __future__ import annotations

import errno
import os
import shutil
import struct
import threading
import zlib
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from tests.pace import every
from tests.surroundings import surrounded
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.actors.lumberjack import LumberjackHandler
from levada.actors.lumberjack.disk_spool import DiskSpool, Segments, SpoolConfig, SpoolPump, open_segments
from levada.actors.lumberjack.writer import connect
from levada.actors.lumberjack.writer_queue import Hub
from levada.framework import ActorSystem, Shutdown
from levada.framework.errors import ConfigurationError, ConnectionClosed
from levada.framework.files import Files
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
    full = segments.unacked_bytes
    first, place = segments.read()
    segments.note_acked(place)
    assert segments.unacked_bytes < full
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
    assert again.unacked_bytes == 0
    again.close()
    for path in tmp_path.glob("*.spool"):
        path.unlink()
    bare = Segments(config, b"J")
    bare.append(bodies(13, 1))
    assert read_all(bare) == bodies(13, 1), "a place behind the end of the files hides nothing"
    bare.close()


def test_a_disk_that_is_full_when_a_segment_begins_is_tried_again(tmp_path: Path) -> None:
    class Disk(Files):
        full = False

        def fsync(self, fd: int) -> None:
            if self.full:
                raise OSError(errno.ENOSPC, "No space left on device")

    disk = Disk()
    with surrounded(files=disk):
        segments = Segments(SpoolConfig(folder=tmp_path, segment=60), b"J")
    segments.append(bodies(0, 3))
    disk.full = True
    for _ in range(2):
        with pytest.raises(OSError, match="No space"):
            segments.append(bodies(3, 3))
    disk.full = False
    segments.append(bodies(3, 3))
    assert read_all(segments) == bodies(0, 6)
    assert len(list(tmp_path.glob("*.spool"))) == 2
    segments.close()


@given(st.integers(0, 120), st.booleans())
def test_only_what_is_damaged_at_the_end_is_lost(
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
    at = max(min(cut, len(data) - 1), head)
    kept = bodies(0, 5)
    if flip:
        path.write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
        del kept[(at - head) // 15]
    else:
        path.write_bytes(data[:at])
        del kept[(at - head) // 15 :]
    again = Segments(config, b"J")
    again.append([b"after"])
    assert read_all(again) == [*kept, b"after"]
    again.close()


def letters(start: int, count: int) -> list[bytes]:
    return [b"event %c" % (97 + number) for number in range(start, start + count)]


def four_files(folder: Path) -> SpoolConfig:
    """Three events of 15 bytes in each file, behind 40 bytes."""
    config = SpoolConfig(folder=folder, segment=60)
    segments = Segments(config, b"J")
    for start in range(0, 12, 3):
        segments.append(letters(start, 3))
    segments.close()
    return config


def opened(config: SpoolConfig, caplog: pytest.LogCaptureFixture) -> tuple[list[bytes], list[str]]:
    """Return what a spool holds, and the errors and warnings about it."""
    caplog.clear()
    segments = Segments(config, b"J")
    found = read_all(segments)
    segments.close()
    return found, [text.replace(f"{config.folder}/", "") for text in caplog.messages]


def overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


GONE = "{}.spool: {} bytes from {} on are gone, and the events in them"
DAMAGED = "{}.spool: {} bytes from {} on are damaged, and the events in them are lost"


@pytest.mark.parametrize("number", [2, 4])
@pytest.mark.parametrize(
    ("at", "data", "lost", "text"),
    [
        (40 + 8, b"X", [0], DAMAGED.format("{}", 15, 40)),
        (40 + 15, b"\x70", [1], DAMAGED.format("{}", 15, 55)),
        (40 + 30, bytes(15), [2], DAMAGED.format("{}", 15, 70)),
        (40, bytes(45), [0, 1, 2], DAMAGED.format("{}", 45, 40)),
    ],
    ids=["an event", "a length", "zeros at the end", "zeros"],
)
def test_damage_costs_only_the_damaged_events_and_is_logged(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    number: int,
    at: int,
    data: bytes,
    lost: list[int],
    text: str,
) -> None:
    config = four_files(tmp_path)
    overwrite(tmp_path / f"{number:08}.spool", at, data)
    left = [body for index, body in enumerate(letters(0, 12)) if index - 3 * (number - 1) not in lost]
    assert opened(config, caplog) == (left, [text.format(f"{number:08}")])


@pytest.mark.parametrize("number", [2, 4])
@pytest.mark.parametrize(
    ("size", "left", "text"),
    [
        (None, 0, GONE.format("{}", 45, 40)),
        (0, 0, GONE.format("{}", 45, 40)),
        (40, 0, GONE.format("{}", 45, 40)),
        (70, 2, GONE.format("{}", 15, 70)),
    ],
    ids=["file", "all bytes", "all events", "last event"],
)
def test_files_that_are_gone_or_cut_off_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, number: int, size: int | None, left: int, text: str
) -> None:
    config = four_files(tmp_path)
    path = tmp_path / f"{number:08}.spool"
    if size is None:
        path.unlink()
    else:
        os.truncate(path, size)
    there = letters(0, 12)
    del there[3 * (number - 1) + left : 3 * number]
    assert opened(config, caplog) == (there, [text.format(f"{number:08}")])
    if number == 4:
        assert opened(config, caplog) == (there, []), "the end is that of what is left now"


@pytest.mark.ci
def test_no_changed_byte_loses_an_event_in_silence(
    tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    """Each byte of each file, and each length of it; refused, logged, or harmless."""
    source = tmp_path_factory.mktemp("source")
    config = four_files(source)
    segments = Segments(config, b"J")
    segments.read()
    segments.note_acked(segments.read()[1])
    segments.close()
    folder = source.with_name("damaged")
    tried = 0
    for path in sorted([*source.glob("*.spool"), source / "acked"]):
        whole = path.read_bytes()
        for at in range(0, len(whole), every(3)):
            for data in whole[:at], whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]:
                shutil.copytree(source, folder)
                (folder / path.name).write_bytes(data)
                try:
                    events, messages = opened(SpoolConfig(folder=folder), caplog)
                except ConfigurationError:
                    pass
                else:
                    assert events == letters(6, 6) or messages, (path.name, at)
                shutil.rmtree(folder)
                tried += every(3)
    assert tried >= 2 * (3 * 85 + 40 + len((source / "acked").read_bytes()))


def test_several_files_that_are_gone_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = four_files(tmp_path)
    (tmp_path / "00000002.spool").unlink()
    (tmp_path / "00000003.spool").unlink()
    assert opened(config, caplog) == (
        letters(0, 3) + letters(9, 3),
        [
            "the files between 00000001.spool and 00000003.spool are gone, and the events in them",
            GONE.format("00000003", 45, 40),
        ],
    )


def test_a_file_with_a_damaged_head_is_refused_and_can_be_moved_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = four_files(tmp_path)
    path = tmp_path / "00000002.spool"
    overwrite(path, 35, b"\1")
    with pytest.raises(ConfigurationError, match=r"00000002\.spool is not a spool .* damaged; move it away"):
        Segments(config, b"J")
    path.rename(tmp_path / "kept")
    assert opened(config, caplog) == (letters(0, 3) + letters(6, 6), [GONE.format("00000002", 45, 40)])


def test_a_record_that_was_not_safe_is_cut_off_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = four_files(tmp_path)
    with (tmp_path / "00000004.spool").open("ab") as file:
        file.write(b"\0\0\0\7torn")
    assert opened(config, caplog) == (
        letters(0, 12),
        ["00000004.spool: the last 8 bytes are not a whole record and are cut off"],
    )
    assert opened(config, caplog) == (letters(0, 12), [])


@pytest.mark.parametrize("change", ["flip", "cut", "empty", "gone"])
def test_without_the_place_that_is_acked_everything_is_sent_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: str
) -> None:
    config = four_files(tmp_path)
    segments = Segments(config, b"J")
    segments.read()
    first, place = segments.read()
    segments.note_acked((place[0], place[1] - 15))
    segments.close()
    assert first == letters(3, 3)
    assert opened(config, caplog) == (letters(5, 7), [])
    path = tmp_path / "acked"
    whole = path.read_bytes()
    if change == "gone":
        path.unlink()
    else:
        path.write_bytes({"flip": whole.replace(b"70", b"85", 1), "cut": whole[:6], "empty": b""}[change])
    events, messages = opened(config, caplog)
    assert events == letters(3, 9), "the oldest file that is there is the second"
    assert len(messages) == 1
    assert messages[0].startswith(
        f"acked is {'gone' if change in ('gone', 'empty') else 'damaged'}: all remaining events"
    )
    assert opened(config, caplog) == (letters(3, 9), [])


def test_what_was_acked_may_be_taken_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = four_files(tmp_path)
    segments = Segments(config, b"J")
    segments.note_acked(segments.end)
    segments.close()
    for path in tmp_path.glob("*.spool"):
        path.unlink()
    assert opened(config, caplog) == ([], [])


def version_1(folder: Path, number: int, events: list[bytes]) -> None:
    records = [struct.pack(">II", len(event), zlib.crc32(event)) + event for event in events]
    (folder / f"{number:08}.spool").write_bytes(b"levada lumberjack spool 1 J\n" + b"".join(records))


def test_a_spool_of_version_1_is_read_and_continued_in_a_new_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = SpoolConfig(folder=tmp_path)
    version_1(tmp_path, 3, bodies(0, 3))
    version_1(tmp_path, 4, bodies(3, 3))
    (tmp_path / "acked").write_text("3 43")
    segments = Segments(config, b"J")
    segments.append(bodies(6, 2))
    assert read_all(segments) == bodies(1, 7)
    segments.close()
    assert opened(config, caplog) == (bodies(1, 7), [])
    os.truncate(tmp_path / "00000004.spool", 58)
    assert opened(config, caplog) == (bodies(1, 4) + bodies(6, 2), [GONE.format("00000004", 15, 58)])


@pytest.mark.parametrize("size", [0, 5, 28, 34])
@pytest.mark.parametrize("version", [b"1", b"2"])
def test_a_file_in_which_nothing_is_yet_is_no_damage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, version: bytes, size: int
) -> None:
    """A crash may leave it, and 0.1 left one when nothing had been sent."""
    start = b"levada lumberjack spool " + version + b" J\n" + bytes(6)
    (tmp_path / "00000001.spool").write_bytes(start[:size])
    segments = Segments(SpoolConfig(folder=tmp_path), b"J")
    segments.append(bodies(0, 2))
    assert read_all(segments) == bodies(0, 2)
    segments.close()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(list(tmp_path.glob("*.spool"))) == 1


@pytest.mark.parametrize("place", ["3 88", "7 0", "91 28", "3"])
def test_a_place_of_version_1_that_is_not_there_is_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    version_1(tmp_path, 3, bodies(0, 3))
    (tmp_path / "acked").write_text(place)
    events, messages = opened(SpoolConfig(folder=tmp_path), caplog)
    assert events == bodies(0, 3)
    assert len(messages) == 1
    assert messages[0].startswith("acked is damaged: all remaining events are sent again")


@pytest.mark.parametrize("again", [False, True])
def test_nothing_is_safe_in_a_folder_that_was_removed(tmp_path: Path, again: bool) -> None:
    folder = tmp_path / "spool"
    folder.mkdir()
    segments = Segments(SpoolConfig(folder=folder), b"J")
    segments.append(bodies(0, 1))
    shutil.rmtree(folder)
    if again:
        folder.mkdir()
        (folder / "00000001.spool").touch()
    with pytest.raises(FileNotFoundError):
        segments.append(bodies(1, 1))
    segments.close()


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
    with pytest.raises(ConfigurationError, match="is not a spool"), open_segments(config, b"J"):
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
PATIENT: dict[str, Any] = {"shutdown_timeout": 600.0, "stop_timeout": 600.0}


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


async def test_flush_ends_behind_damage_at_the_end(
    tmp_path: Path, small_reader: Readers, quick: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    spool = SpoolConfig(folder=tmp_path)
    async with ActorSystem(**PATIENT) as system, small_reader() as reader:
        async with connect(system, "lumberjack+memory://nobody", spool=spool, close_timeout=0.0) as writer:
            await writer.deliver([{"n": 0}, {"n": 1}])
        path = tmp_path / "00000001.spool"
        overwrite(path, path.stat().st_size - 1, b"?")
        async with connect(system, reader.url, spool=spool) as writer:
            with trio.fail_after(3000.0):
                await writer.flush()
        assert [event["n"] for event in reader.events] == [0]
    assert [record.__dict__["event"] for record in caplog.records if record.levelname == "ERROR"] == ["spool_damaged"]
    assert not path.exists()


async def test_calls_that_wait_when_the_writer_is_closed_fail(tmp_path: Path, quick: MockClock) -> None:
    """The waiting tasks are not in the block of the writer, so that leaving it does not cancel them."""
    outcomes: list[str] = []

    async def call(function: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        with pytest.raises(ConnectionClosed, match="closed before these events were acked"):
            await function(*arguments)
        outcomes.append(function.__name__)

    spool = SpoolConfig(folder=tmp_path, max_bytes=1)
    async with (
        ActorSystem(**PATIENT) as system,
        trio.open_nursery() as nursery,
        connect(system, "lumberjack+memory://nobody", spool=spool, close_timeout=0.0) as writer,
    ):
        await writer.deliver([{"n": 0}])
        for function, *arguments in ((writer.flush,), (writer.send, {"n": 1}), (writer.deliver, [{"n": 2}])):
            nursery.start_soon(call, function, *arguments)
        await wait_all_tasks_blocked()
        assert outcomes == []
    assert sorted(outcomes) == ["deliver", "flush", "send"]


async def test_a_pump_that_is_stopped_before_it_has_started_writes_nothing(tmp_path: Path) -> None:
    config = SpoolConfig(folder=tmp_path)
    segments = Segments(config, b"J")
    async with ActorSystem() as system:
        pump = system.spawn(SpoolPump, DiskSpool(segments, config, Hub(WriterConfig())))
        pump.stop(now=True)
        assert await pump.terminated() == Shutdown()
    segments.close()


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


@pytest.mark.ci
async def test_a_full_spool_makes_senders_wait_or_drops(
    tmp_path: Path, small_reader: Readers, quick: MockClock
) -> None:
    async with ActorSystem(**PATIENT) as system:
        spool = SpoolConfig(folder=tmp_path / "waits", max_bytes=500, segment=100)
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
        spool = SpoolConfig(folder=tmp_path / "drops", max_bytes=500, segment=100)
        config = WriterConfig(drop="newest")
        async with connect(
            system, "lumberjack+memory://small", spool=spool, config=config, close_timeout=0.5
        ) as writer:
            for number in range(100):
                writer.send_nowait({"n": number})
                await trio.sleep(0.05)
            assert writer.statistics().events_dropped > 50
