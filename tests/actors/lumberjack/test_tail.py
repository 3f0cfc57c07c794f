"""Files that grow, are rotated, truncated and written over; what is delivered, and where a second run goes on."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from tests.surroundings import surrounded
from trio.testing import MockClock

from levada.actors.lumberjack.tail import Tail, TailConfig, tail
from levada.actors.lumberjack.tail_delivery import TailState
from levada.actors.lumberjack.tail_file import OpenFile
from levada.actors.lumberjack.tail_reader import FileReader
from levada.actors.lumberjack.tail_registry import FileEntry, FileRegistry, open_registry
from levada.actors.lumberjack.tail_scanner import Scanner
from levada.framework import ActorSystem, Ref, Shutdown
from levada.framework.errors import ActorStopped, ConfigurationError
from levada.framework.files import Files

CONFIG = TailConfig(host="web-01", drain_timeout=600.0)
# The registry is written at the end; on the quick clock the 5 s that an actor has for that would be a twentieth of a second.
PATIENT: dict[str, Any] = {"shutdown_timeout": 600.0, "stop_timeout": 600.0}


class Sink:
    """Takes events; acknowledges them at once unless it is held."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.acked: list[dict[str, Any]] = []
        self.open = trio.Event()
        self.open.set()
        self.failures = 0
        self._changed = trio.Event()

    def hold(self) -> None:
        self.open = trio.Event()

    async def deliver(self, events: list[dict[str, Any]]) -> None:
        self.events += events
        self._changed.set()
        if self.failures:
            self.failures -= 1
            raise OSError("the sink has no room")
        await self.open.wait()
        self.acked += events

    @property
    def lines(self) -> list[str]:
        return [event["line"] for event in self.events]

    async def has(self, *lines: str) -> None:
        """Wait until exactly these have come since the last time."""
        while len(self.events) < len(lines):
            self._changed = trio.Event()
            await self._changed.wait()
        assert self.lines == list(lines)
        self.events.clear()


async def until(condition: Callable[[], object]) -> None:
    # On a quick clock; what is waited for tells nobody.
    while not condition():  # noqa: ASYNC110
        await trio.sleep(0.1)


@pytest.fixture
def sink() -> Sink:
    return Sink()


@pytest.fixture
def quick() -> MockClock:
    """Reading happens in threads, which a clock that jumps does not wait for; so time just runs faster."""
    return MockClock(rate=100.0)


@asynccontextmanager
async def following(
    sink: Sink, *patterns: Path | str, registry: Path | None = None, config: TailConfig = CONFIG
) -> AsyncIterator[Tail]:
    async with (
        ActorSystem(seed=0, **PATIENT) as system,
        tail(system, map(str, patterns), sink.deliver, registry=registry, config=config) as followed,
    ):
        yield followed


async def ship_once(sink: Sink, *patterns: Path | str, registry: Path | None = None, **settings: Any) -> list[str]:
    config = TailConfig(once=True, drain_timeout=600.0, **settings)
    async with following(sink, *patterns, registry=registry, config=config) as followed:
        await followed.finished()
    lines = sink.lines
    sink.events.clear()
    return lines


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def offsets(registry: Path) -> dict[str, int]:
    return {
        Path(entry["path"]).name: entry["offset"]
        for entry in json.loads((registry / "registry.json").read_text())["files"]
        if entry["inode"]
    }


LONG = "".join(f"{number:06} a line of a log that is long enough to be known by its head\n" for number in range(40))
LONG_LINES = LONG.splitlines()


async def test_whoever_waits_for_the_end_is_told_that_the_block_was_left(
    tmp_path: Path, sink: Sink, quick: MockClock
) -> None:
    """A tail that goes on for ever never finishes; the wait ends with it, also one that begins later."""
    (tmp_path / "app.log").write_text("one\n")
    errors: list[str] = []

    async def wait() -> None:
        with pytest.raises(ActorStopped) as caught:
            await followed.finished()
        errors.append(str(caught.value))

    async with trio.open_nursery() as nursery, following(sink, tmp_path / "app.log") as followed:
        nursery.start_soon(wait)
    await wait()
    assert errors == ["the block of tail() was left before all files were read to their end and delivered"] * 2


# ---------------------------------------------------------------- what comes


async def test_lines_come_with_their_place(tmp_path: Path, sink: Sink, quick: MockClock) -> None:
    log = tmp_path / "app.log"
    log.write_bytes(b"one\r\nt\xe9o\n\nlast")
    config = TailConfig(once=True, host="web-01", fields={"env": "test"})
    async with following(sink, log, config=config) as followed:
        await followed.finished()
        status = followed.status()
    base = {"host": "web-01", "file": str(log), "env": "test"}
    assert sink.events == [
        {"line": "one", "offset": "0", **base},
        {"line": "t\udce9o", "offset": "5", **base},
        {"line": "", "offset": "9", **base},
        {"line": "last", "offset": "10", **base},
    ]
    assert (status.lines_read, status.lines_acked, status.bytes_acked, status.files) == (4, 4, 14, 0)


async def test_new_lines_and_new_files_come_while_it_runs(tmp_path: Path, sink: Sink, quick: MockClock) -> None:
    log = tmp_path / "a.log"
    log.write_text("one\n")
    async with following(sink, tmp_path / "*.log"):
        await sink.has("one")
        append(log, "two\nthr")
        await sink.has("two")
        append(log, "ee\n")
        await sink.has("three")
        (tmp_path / "b.log").write_text("other\n")
        (tmp_path / "c.log.gz").write_bytes(b"\x1f\x8b")
        (tmp_path / "d.txt").write_text("of no pattern\n")
        await sink.has("other")


async def test_patterns_may_name_folders_below(tmp_path: Path, sink: Sink, quick: MockClock) -> None:
    (tmp_path / "x" / "y").mkdir(parents=True)
    (tmp_path / "x" / "y" / "deep.log").write_text("deep\n")
    (tmp_path / "[odd].log").write_text("odd\n")
    lines = await ship_once(sink, tmp_path / "**" / "*.log", tmp_path / "[odd].log")
    assert sorted(lines) == ["deep", "odd"]  # each once, though two patterns name one of them


async def test_long_lines_are_cut_and_marked(tmp_path: Path, sink: Sink, quick: MockClock) -> None:
    log = tmp_path / "app.log"
    log.write_text("x" * 1000 + "\nshort\n")
    config = TailConfig(once=True, max_line=10, read_size=64)
    async with following(sink, log, config=config) as followed:
        await followed.finished()
        assert followed.status().lines_cut == 1
    assert [(event["line"], event.get("cut")) for event in sink.events] == [("x" * 10, "true"), ("short", None)]


async def test_records_of_several_lines_are_given_up_after_a_while(
    tmp_path: Path, sink: Sink, quick: MockClock
) -> None:
    log = tmp_path / "app.log"
    log.write_text("[1] boom\n  at a\n")
    config = TailConfig(multiline=r"^\[", multiline_timeout=3.0, drain_timeout=600.0)
    async with following(sink, log, config=config):
        await sink.has("[1] boom\n  at a")
        append(log, "[2] bang\n  at b\n[3] end\n")
        await sink.has("[2] bang\n  at b", "[3] end")


async def test_reading_stops_while_too_much_is_under_way(tmp_path: Path, sink: Sink, quick: MockClock) -> None:
    log = tmp_path / "app.log"
    log.write_text("".join(f"{number}\n" for number in range(5000)))
    sink.hold()
    config = TailConfig(max_lines=100, read_size=300, drain_timeout=600.0)
    async with following(sink, log, config=config) as followed:
        await until(lambda: len(sink.events) >= 70)
        await trio.sleep(20)
        status = followed.status()
        assert status.lines_read == len(sink.events) <= 100
        assert (status.lines_acked, status.bytes_behind) == (0, log.stat().st_size)
        sink.open.set()
        await until(lambda: len(sink.acked) == 5000)
    assert [event["line"] for event in sink.acked] == [str(number) for number in range(5000)]


@pytest.mark.parametrize("drain_timeout", [0.0, 600.0])
async def test_a_file_that_was_not_even_begun_is_behind(
    quick: MockClock, tmp_path: Path, sink: Sink, drain_timeout: float
) -> None:
    log = tmp_path / "app.log"
    log.write_text("one\ntwo\n")
    async with following(sink, log, config=attrs.evolve(CONFIG, drain_timeout=drain_timeout)) as followed:
        assert followed.status().bytes_behind == 8
    status = followed.status()
    assert (status.lines_acked, status.bytes_behind) == (len(sink.acked), 8 - 4 * len(sink.acked))


# ---------------------------------------------------------------- going on


async def test_a_second_run_goes_on_behind_what_was_acked(tmp_path: Path, sink: Sink, quick: MockClock) -> None:
    log = tmp_path / "app.log"
    registry = tmp_path / "registry"
    log.write_text("one\ntwo\n")
    assert await ship_once(sink, log, registry=registry) == ["one", "two"]
    append(log, "three\n")
    assert await ship_once(sink, log, registry=registry) == ["three"]
    assert await ship_once(sink, log, registry=registry) == []
    assert offsets(registry) == {"app.log": 14}


async def test_the_place_moves_only_over_what_is_acked_in_order(tmp_path: Path, sink: Sink, quick: MockClock) -> None:
    log = tmp_path / "app.log"
    registry = tmp_path / "registry"
    log.write_text("one\n")
    first = trio.Event()
    calls: list[list[str]] = []

    async def deliver(events: list[dict[str, Any]]) -> None:
        calls.append([event["line"] for event in events])
        if len(calls) == 1:
            await first.wait()

    async with (
        ActorSystem(**PATIENT) as system,
        tail(system, [str(log)], deliver, registry=registry, config=CONFIG) as followed,
    ):
        await until(lambda: calls)
        append(log, "two\n")
        await until(lambda: len(calls) == 2)
        await trio.sleep(10)
        # The second batch is done, the first is not.
        assert offsets(registry) == {"app.log": 0}
        first.set()
        await until(lambda: followed.status().lines_acked == 2)
    assert calls == [["one"], ["two"]]
    assert offsets(registry) == {"app.log": 8}


async def test_what_is_not_acked_in_time_comes_again(tmp_path: Path, sink: Sink, quick: MockClock) -> None:
    log = tmp_path / "app.log"
    registry = tmp_path / "registry"
    log.write_text("one\ntwo\n")
    sink.hold()
    async with following(sink, log, registry=registry, config=TailConfig(drain_timeout=0.5)):
        await sink.has("one", "two")
    assert offsets(registry) == {"app.log": 0}
    sink.open.set()
    assert await ship_once(sink, log, registry=registry) == ["one", "two"]


@pytest.mark.usefixtures("user_code_fails")
async def test_a_delivery_that_fails_is_tried_again(tmp_path: Path, sink: Sink, quick: MockClock) -> None:
    (tmp_path / "app.log").write_text("one\ntwo\n")
    sink.failures = 1
    async with following(sink, tmp_path / "app.log") as followed:
        await sink.has("one", "two", "one", "two")
        assert followed.status().failures == 1


async def test_from_the_end_only_what_is_new(tmp_path: Path, sink: Sink, quick: MockClock) -> None:
    log = tmp_path / "app.log"
    registry = tmp_path / "registry"
    log.write_text("old\nhalf")
    config = TailConfig(start="end", drain_timeout=600.0)
    async with following(sink, tmp_path / "*.log", registry=registry, config=config) as followed:
        await until(lambda: followed.status().files)
        append(log, " and half\n")
        await sink.has("half and half")
        (tmp_path / "new.log").write_text("whole\n")
        await sink.has("whole")
    # What was written while nobody looked is no longer old.
    (tmp_path / "later.log").write_text("while away\n")
    async with following(sink, tmp_path / "*.log", registry=registry, config=config):
        await sink.has("while away")


async def test_from_the_end_also_if_files_wait(tmp_path: Path, sink: Sink, quick: MockClock) -> None:
    """They may have grown before it is their turn."""
    for number in range(6):
        append(tmp_path / f"{number}.log", "old\nha")
    sink.hold()
    config = TailConfig(start="end", max_files=1, drain_timeout=600.0)
    async with following(sink, tmp_path / "*.log", config=config) as followed:
        for number in range(6):
            append(tmp_path / f"{number}.log", f"lf {number}\n")
        sink.open.set()
        await until(lambda: len(sink.acked) == 6)
        assert followed.status().failures == 0
    assert sorted(sink.lines) == [f"half {number}" for number in range(6)]


async def test_a_file_whose_end_was_not_read_is_still_begun_at_its_end(
    tmp_path: Path, sink: Sink, quick: MockClock
) -> None:
    log = tmp_path / "app.log"
    log.write_text("old\n" * 100)
    failures = iter([True])

    class FailsOnce(Files):
        def pread(self, fd: int, length: int, offset: int, /) -> bytes:
            if offset and next(failures, False):
                raise OSError(errno.EIO, "Input/output error")
            return os.pread(fd, length, offset)

    before = set(os.listdir("/proc/self/fd")) if sys.platform == "linux" else set()
    config = TailConfig(start="end", max_line=64, drain_timeout=600.0)
    with surrounded(files=FailsOnce()):
        async with following(sink, log, config=config) as followed:
            await until(lambda: followed.status().files)
            append(log, "new\n")
            await sink.has("new")  # and no old line
    assert list(failures) == []
    if sys.platform == "linux":
        assert {each for each in os.listdir("/proc/self/fd") if each not in before and is_file(each, log)} == set()


def is_file(descriptor: str, path: Path) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}") == str(path)
    except OSError:
        return False


async def test_a_file_that_cannot_be_read_disturbs_no_other(tmp_path: Path, sink: Sink, quick: MockClock) -> None:
    (tmp_path / "good.log").write_text("good\n")
    (tmp_path / "dangling.log").symlink_to(tmp_path / "nowhere")
    (tmp_path / "folder.log").mkdir()
    os.mkfifo(tmp_path / "pipe.log")
    assert await ship_once(sink, tmp_path / "*.log") == ["good"]


# ---------------------------------------------------------------- rotation


async def test_renamed_and_begun_anew(tmp_path: Path, sink: Sink, quick: MockClock) -> None:
    log = tmp_path / "app.log"
    log.write_text("one\n")
    # Five seconds would be a twentieth of a second, in which a busy machine reads nothing.
    async with following(sink, log, config=attrs.evolve(CONFIG, rotate_wait=3600.0, close_inactive=1e9)) as followed:
        await sink.has("one")
        log.rename(tmp_path / "app.log.1")
        append(tmp_path / "app.log.1", "two, by a writer that has it open\n")
        await sink.has("two, by a writer that has it open")
        log.write_text("three\n")
        await sink.has("three")
        append(tmp_path / "app.log.1", "four\nfive without end")
        await sink.has("four")
        # When nothing has come for a while the old file is let go, its last line included.
        quick.jump(3600.0)
        await sink.has("five without end")
        await until(lambda: followed.status().files == 1)


async def test_a_renamed_file_that_is_still_named_is_not_read_again(
    tmp_path: Path, sink: Sink, quick: MockClock
) -> None:
    log = tmp_path / "app.log"
    registry = tmp_path / "registry"
    log.write_text("one\n")
    async with following(sink, tmp_path / "app.log*", registry=registry):
        await sink.has("one")
        log.rename(tmp_path / "app.log.1")
        log.write_text("two\n")
        await sink.has("two")
    assert offsets(registry) == {"app.log.1": 4, "app.log": 4}
    append(tmp_path / "app.log.1", "late\n")
    assert await ship_once(sink, tmp_path / "app.log*", registry=registry) == ["late"]


async def test_renamed_while_no_shipper_ran(tmp_path: Path, sink: Sink, quick: MockClock) -> None:
    log = tmp_path / "app.log"
    registry = tmp_path / "registry"
    log.write_text("one\n")
    assert await ship_once(sink, log, registry=registry) == ["one"]
    append(log, "two\n")
    log.rename(tmp_path / "app.log.1")
    log.write_text("three\n")
    # The pattern does not name app.log.1: it is found by its inode.
    assert sorted(await ship_once(sink, log, registry=registry)) == ["three", "two"]


async def test_copied_and_truncated(tmp_path: Path, sink: Sink, quick: MockClock) -> None:
    log = tmp_path / "app.log"
    log.write_text(LONG)
    async with following(sink, tmp_path / "app.log*") as followed:
        await sink.has(*LONG_LINES)
        append(log, "before the copy\n")
        shutil.copy(log, tmp_path / "app.log.1")
        os.truncate(log, 0)
        append(log, "after\n")
        await until(lambda: followed.status().replacements and len(sink.events) >= 2)
        await trio.sleep(10)
        # The copy is known by its content: of the lines before, only what was not acked may come twice.
        assert set(sink.lines) == {"before the copy", "after"}
        assert len(sink.lines) <= 3


async def test_a_copy_that_is_still_being_made_waits(tmp_path: Path, sink: Sink, quick: MockClock) -> None:
    log = tmp_path / "app.log"
    log.write_text(LONG)
    async with following(sink, tmp_path / "app.log*") as followed:
        await sink.has(*LONG_LINES)
        # It is never empty where it can be seen, and only grows.
        (tmp_path / "part").write_text(LONG[:1500])
        copy = (tmp_path / "part").rename(tmp_path / "app.log.1")
        await trio.sleep(1)
        append(copy, LONG[1500:] + "and one more\n")
        os.truncate(log, 0)
        await sink.has("and one more")
        assert followed.status().files == 2


async def test_another_file_with_the_same_beginning_is_read_whole(tmp_path: Path, sink: Sink, quick: MockClock) -> None:
    (tmp_path / "app.log").write_text(LONG)
    async with following(sink, tmp_path / "*"):
        await sink.has(*LONG_LINES)
        (tmp_path / "other.log").write_text(LONG)  # a name that no rotation makes
        await sink.has(*LONG_LINES)
        different = LONG[:1500] + "x" * (len(LONG) - 1500) + "\n"
        (tmp_path / "app.log.1").write_text(different)
        await sink.has(*different.splitlines())


async def test_written_over_by_more_than_was_there(tmp_path: Path, sink: Sink, quick: MockClock) -> None:
    log = tmp_path / "app.log"
    log.write_text("one\n")
    async with following(sink, log):
        await sink.has("one")
        log.write_text("another\nfile\n")  # the same inode, longer, another beginning
        await sink.has("another", "file")


async def test_a_new_file_with_an_inode_that_was_used_before(tmp_path: Path, sink: Sink, quick: MockClock) -> None:
    log = tmp_path / "app.log"
    registry = tmp_path / "registry"
    log.write_text("one\ntwo\n")
    assert await ship_once(sink, log, registry=registry) == ["one", "two"]
    log.write_text("three\nfour\nfive\n")
    assert await ship_once(sink, log, registry=registry) == ["three", "four", "five"]


async def test_only_so_many_files_are_open(tmp_path: Path, sink: Sink, quick: MockClock) -> None:
    for number in range(20):
        (tmp_path / f"{number:02}.log").write_text(f"{number}\n")
    assert sorted(map(int, await ship_once(sink, tmp_path / "*.log", max_files=3))) == list(range(20))
    config = TailConfig(max_files=3, rotate_wait=1.0, drain_timeout=600.0)
    async with following(sink, tmp_path / "*.log", config=config) as followed:
        while len(sink.events) < 20:
            assert followed.status().files <= 3
            await trio.sleep(0.5)
        append(tmp_path / "07.log", "more\n")
        await until(lambda: sink.lines[-1] == "more")
    assert len(sink.lines) == 21


async def test_a_file_stays_open_at_its_end_when_no_other_waits_any_more(
    tmp_path: Path, sink: Sink, quick: MockClock
) -> None:
    busy, waiting = tmp_path / "a.log", tmp_path / "b.log"
    busy.write_text("one\ntwo\n")
    sink.hold()
    config = TailConfig(max_files=1, max_lines=1, scan=0.5, drain_timeout=600.0)
    async with following(sink, tmp_path / "*.log", config=config) as followed:
        await sink.has("one")
        waiting.write_text("")
        await until(lambda: followed.status().waiting == 1)
        waiting.unlink()
        await until(lambda: followed.status().waiting == 0)
        sink.open.set()
        await until(lambda: len(sink.acked) == 2)
        await trio.sleep(5.0)
        assert followed.status().files == 1


async def test_moved_files_wait_for_a_place_too(tmp_path: Path, sink: Sink, quick: MockClock) -> None:
    """Files that were left unfinished and renamed to names that nobody ships, more of them than may be open."""
    registry = tmp_path / "registry"
    for number in range(6):
        append(tmp_path / f"{number}.log", f"a{number}\n")
    assert len(await ship_once(sink, tmp_path / "*.log", registry=registry)) == 6
    for number in range(6):
        append(tmp_path / f"{number}.log", f"b{number}\n")
        (tmp_path / f"{number}.log").rename(tmp_path / f"{number}.moved")
    config = TailConfig(max_files=2, rotate_wait=1.0, drain_timeout=600.0)
    async with following(sink, tmp_path / "*.log", registry=registry, config=config):
        await until(lambda: len(sink.events) >= 6)
    assert sorted(sink.lines) == [f"b{number}" for number in range(6)]


async def test_a_file_that_was_let_go_grows_and_is_renamed(tmp_path: Path, sink: Sink, quick: MockClock) -> None:
    log = tmp_path / "app.log"
    log.write_text("one\n")
    config = TailConfig(close_inactive=1.0, scan=20.0, drain_timeout=600.0)
    async with following(sink, log, config=config) as followed:
        await sink.has("one")
        await until(lambda: followed.status().files == 0)
        await trio.sleep(5.0)  # the place that it gave up lets the tailer look once more
        append(log, "two\n")
        log.rename(tmp_path / "app.moved")
        await sink.has("two")


async def test_rotation_races_lose_nothing(tmp_path: Path, sink: Sink, quick: MockClock) -> None:
    log = tmp_path / "app.log"
    written: list[str] = []
    async with following(sink, tmp_path / "app.log*", config=TailConfig(drain_timeout=600.0, scan=0.5, poll=0.05)):
        for rotation in range(6):
            with log.open("a", buffering=1) as file:
                for number in range(200):
                    written.append(f"{rotation} {number} {'x' * (number % 50)}")
                    file.write(written[-1] + "\n")
                    if number % 20 == rotation:
                        await trio.sleep(0.3)
            log.rename(tmp_path / f"app.log.{rotation}")
        await until(lambda: len(set(sink.lines)) == len(written))
    assert set(sink.lines) == set(written)


# ---------------------------------------------------------------- the registry


async def test_a_registry_is_for_one_shipper(tmp_path: Path) -> None:
    with (
        open_registry(tmp_path / "r"),
        pytest.raises(ConfigurationError, match="another shipper uses"),
        open_registry(tmp_path / "r"),
    ):
        pass


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"version": 2, "files": []}',
        '{"version": 3, "files": []}',
        '{"version": 4, "files": []}',
        '{"version": 1, "files": [{"a": 1}]}',
        "\x00",
    ],
)
async def test_a_damaged_registry_is_not_taken_for_an_empty_one(tmp_path: Path, content: str) -> None:
    (tmp_path / "registry.json").write_text(content)
    with pytest.raises(ConfigurationError, match="is not a registry"), open_registry(tmp_path):
        pass
    assert (tmp_path / "registry.json").read_text() == content


async def test_a_registry_in_which_a_digit_has_changed_is_refused(tmp_path: Path, sink: Sink, quick: MockClock) -> None:
    """The same lines again and again: the digest of the bytes before a wrong place is right."""
    log, registry = tmp_path / "app.log", tmp_path / "registry"
    log.write_text("line\n" * 1024)
    assert len(await ship_once(sink, log, registry=registry)) == 1024
    append(log, "line\n" * 1000)
    file = registry / "registry.json"
    whole = file.read_text()
    changed = whole.replace('"offset": 5120', '"offset": 9120')
    assert changed != whole
    file.write_text(changed)
    with pytest.raises(ConfigurationError, match=r"its checksum is wrong.*move it away"), open_registry(registry):
        pass
    file.write_text(whole)
    assert len(await ship_once(sink, log, registry=registry)) == 1000


async def test_a_registry_of_version_1_is_read(tmp_path: Path, sink: Sink, quick: MockClock) -> None:
    log, registry = tmp_path / "app.log", tmp_path / "registry"
    log.write_text("one\n")
    assert await ship_once(sink, log, registry=registry) == ["one"]
    file = registry / "registry.json"
    data = json.loads(file.read_text())
    assert data.pop("crc32")
    assert data["version"] == 3
    for name in ("target", "born", "size", "changed"):
        del data["files"][0][name]
    file.write_text(json.dumps(data | {"version": 1}))
    append(log, "two\n")
    assert await ship_once(sink, log, registry=registry) == ["two"]
    assert json.loads(file.read_text())["version"] == 3


async def test_a_registry_that_is_gone_is_no_first_start(
    tmp_path: Path, sink: Sink, quick: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    log, registry = tmp_path / "app.log", tmp_path / "registry"
    log.write_text("old\n")
    assert await ship_once(sink, log, registry=registry, start="end") == []
    append(log, "one\n")
    assert await ship_once(sink, log, registry=registry, start="end") == ["one"]
    assert caplog.messages == []
    append(log, "two\n")
    (registry / "registry.json").unlink()
    assert await ship_once(sink, log, registry=registry, start="end") == ["old", "one", "two"], "none is left out"
    assert caplog.messages == [f"{registry / 'registry.json'} is gone: all files are shipped from their beginning"]


async def test_a_registry_that_cannot_be_written_is_tried_again(tmp_path: Path, sink: Sink, quick: MockClock) -> None:
    log = tmp_path / "app.log"
    registry = tmp_path / "registry"
    log.write_text("one\n")
    async with following(sink, log, registry=registry) as followed:
        (registry / "registry.new").mkdir()  # in the way of the next write
        append(log, "two\n")
        await until(lambda: followed.status().save_errors)
        (registry / "registry.new").rmdir()
        await until(lambda: followed.status().lines_acked == 2)
    assert offsets(registry) == {"app.log": 8}


async def test_files_that_are_gone_are_forgotten_in_the_end(tmp_path: Path, sink: Sink, quick: MockClock) -> None:
    log = tmp_path / "app.log"
    registry = tmp_path / "registry"
    log.write_text("one\n")
    assert await ship_once(sink, log, registry=registry) == ["one"]
    log.unlink()
    with open_registry(registry) as entries:
        now = entries.entries[0].seen
        entries.forget_old(now + 6 * 86400)
        assert len(entries.entries) == 1
        assert entries.snapshot() is None
        entries.forget_old(now + 8 * 86400)
        assert entries.entries == []
        assert entries.snapshot() is not None


async def test_actors_that_are_stopped_before_they_have_started_end_without_an_error(
    tmp_path: Path, sink: Sink
) -> None:
    path = tmp_path / "a.log"
    path.write_text("one\n")
    shared = TailState(CONFIG, FileRegistry(None), sink.deliver)
    file = OpenFile(str(path))
    entry = FileEntry(path=str(path), device=file.device, inode=file.inode)
    async with ActorSystem() as system:
        actors: list[Ref[Any]] = [
            system.spawn(Scanner, (str(path),), shared, trio.Event()),
            system.spawn(FileReader, file, entry, shared),
        ]
        for actor in actors:  # both, before any of them runs
            actor.stop(now=True)
        assert [await actor.terminated() for actor in actors] == [Shutdown(), Shutdown()]
    assert sink.events == []


async def test_a_pattern_that_is_none_is_a_mistake() -> None:
    with pytest.raises(ConfigurationError, match="is not a regular expression"):
        TailConfig(multiline="[")
