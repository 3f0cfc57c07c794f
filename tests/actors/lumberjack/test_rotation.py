"""Every way in which a log ends and the next one begins, with a shipper and without, with another text and with the same: which lines come."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import attrs
import pytest
import trio
from tests.actors.lumberjack.test_tail import CONFIG, Sink, append, following, ship_once, until
from trio.testing import MockClock

from levada.actors.descriptors import descriptor_limit, raise_descriptor_limit
from levada.actors.lumberjack.tail_file import SETTLE, OpenFile
from levada.actors.lumberjack.tail_registry import FileEntry, FileRegistry, open_registry

resource = pytest.importorskip("resource")

FIRST = "".join(f"step {number:03} of the nightly job: ok\n" for number in range(40))
OTHER = "".join(f"{number:03} is a line of another night\n" for number in range(40))
LAST = "the last line\n"


@pytest.fixture
def sink() -> Sink:
    return Sink()


@pytest.fixture
def quick() -> MockClock:
    return MockClock(rate=100.0)


# ---------------------------------------------------------------- the table


class Log:
    """A log in a folder of its own, with a writer that has it open."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "app.log"
        self.pattern = folder / "app.log*"
        self.writer: IO[str] | None = None

    def begin(self, text: str, mode: str = "w") -> None:
        self.end()
        self.path.parent.mkdir(exist_ok=True)
        self.writer = self.path.open(mode)
        self.add(text)

    def add(self, text: str) -> None:
        assert self.writer is not None
        self.writer.write(text)
        self.writer.flush()

    def end(self) -> None:
        if self.writer is not None:
            self.writer.close()

    def rotate(self, text: str) -> None:
        """End this log, and begin the next with a text."""
        raise NotImplementedError

    reads_removed = True
    """Whether the last line of the old log can be read although nobody has read it when the log ends."""
    adds = True
    """Whether the old log gets a last line before."""


class Renamed(Log):
    def rotate(self, text: str) -> None:
        self.path.rename(self.folder / "app.log.1")
        self.begin(text)


class RenamedAway(Log):
    """To a name that no pattern matches."""

    def rotate(self, text: str) -> None:
        self.path.rename(self.folder / "old")
        self.begin(text)


class Replaced(Log):
    reads_removed = False

    def rotate(self, text: str) -> None:
        (self.folder / "next").write_text(text)
        (self.folder / "next").replace(self.path)


class Deleted(Log):
    """And created again, often with the same inode."""

    reads_removed = False

    def rotate(self, text: str) -> None:
        self.end()
        self.path.unlink()
        self.begin(text)


class DeletedAndLonger(Deleted):
    """The next log begins with all of the old one."""

    adds = False

    def rotate(self, text: str) -> None:
        super().rotate(text)
        self.add("one more\n")


class Removed(Log):
    reads_removed = False

    def rotate(self, text: str) -> None:
        self.path.unlink()
        (self.folder / "app.log-next").write_text(text)


class Rewritten(Log):
    adds = False

    def rotate(self, text: str) -> None:
        self.begin(text)


class CopiedAndTruncated(Log):
    """The writer appends."""

    def begin(self, text: str, mode: str = "a") -> None:
        super().begin(text, mode)

    def rotate(self, text: str) -> None:
        shutil.copy(self.path, self.folder / "app.log.1")
        os.truncate(self.path, 0)
        self.add(text)


class CopiedAndTruncatedInTheMiddle(CopiedAndTruncated):
    """The writer does not append: it writes on behind the bytes that are gone, and NULs take their place."""

    def begin(self, text: str, mode: str = "w") -> None:
        super().begin(text, mode)


class Compressed(Log):
    reads_removed = False

    def rotate(self, text: str) -> None:
        old = self.path.rename(self.folder / "app.log.1")
        (self.folder / "app.log.1.gz").write_bytes(gzip.compress(old.read_bytes()))
        old.unlink()
        self.begin(text)


class Beside(Log):
    """The next log has a name that a copy may have, and the old one stays."""

    def rotate(self, text: str) -> None:
        (self.folder / "app.log-retry").write_text(text)


class Copied(Log):
    """The copy is as long as the old log, which stays."""

    adds = False

    def rotate(self, text: str) -> None:
        (self.folder / "part").write_text(text)
        (self.folder / "part").rename(self.folder / "app.log.copy")


class Linked(Log):
    """The pattern matches a symbolic link, and its target is renamed."""

    links = 1

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.path = folder / "real" / "container.log"
        self.pattern = folder / "link.log"
        self.point(self.path)

    def point(self, target: Path) -> None:
        for number in range(self.links - 1):
            place = self.folder / f"between{number}"
            place.mkdir(exist_ok=True)
            (place / "link").unlink(missing_ok=True)
            (place / "link").symlink_to(target)
            target = place / "link"
        self.pattern.unlink(missing_ok=True)
        self.pattern.symlink_to(target)

    def rotate(self, text: str) -> None:
        self.path.rename(self.path.with_suffix(".old"))
        self.begin(text)


class LinkedTwice(Linked):
    links = 2


class Switched(Linked):
    """The link gets another target, and the old one another name."""

    def rotate(self, text: str) -> None:
        self.path.rename(self.path.with_suffix(".old"))
        self.path = self.folder / "next" / "container.log"
        self.begin(text)
        self.point(self.path)


class SwitchedTwice(Switched):
    links = 2


KINDS: list[type[Log]] = [
    Renamed, RenamedAway, Replaced, Deleted, DeletedAndLonger, Removed, Rewritten, CopiedAndTruncated,
    CopiedAndTruncatedInTheMiddle, Compressed, Beside, Copied, Linked, LinkedTwice, Switched, SwitchedTwice,
]  # fmt: skip


@pytest.mark.parametrize(
    "text", [pytest.param(FIRST, id="same"), pytest.param(OTHER, id="other", marks=pytest.mark.ci)]
)
@pytest.mark.parametrize("running", [True, False], ids=["running", "down"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
async def test_each_line_comes_once(
    kind: type[Log], running: bool, text: str, tmp_path: Path, sink: Sink, quick: MockClock
) -> None:
    registry = tmp_path / "registry"
    log = kind(tmp_path)
    log.begin(FIRST)
    wanted = (FIRST + (LAST if log.adds else "")).splitlines()
    extra = ["one more"] if kind is DeletedAndLonger else []
    if running:
        async with following(sink, log.pattern, registry=registry):
            await until(lambda: len(sink.acked) == 40)
            if log.adds:
                log.add(LAST)
            await until(lambda: len(sink.acked) == len(wanted))
            log.rotate(text)
            wanted += text.splitlines() + extra
            await until(lambda: len(sink.acked) >= len(wanted))
        lines, sink.events = sink.lines, []
    else:
        lines = await ship_once(sink, log.pattern, registry=registry)
        if log.adds:
            log.add(LAST)
        log.rotate(text)
        wanted = [line for line in wanted if log.reads_removed or line != LAST.strip()] + text.splitlines() + extra
        lines += await ship_once(sink, log.pattern, registry=registry)
        if kind is CopiedAndTruncated and text == FIRST:
            # The log looks as it was before, so nothing shows that the other file is a copy of it.
            wanted += FIRST.splitlines()
    assert sorted(lines) == sorted(wanted)
    assert await ship_once(sink, log.pattern, registry=registry) == []
    log.end()


# ---------------------------------------------------------------- one file


def test_a_file_counts_as_rewritten_when_it_was_changed_and_has_not_grown(tmp_path: Path) -> None:
    """The system sets the time of change before it adds the bytes of an append; and ``touch`` cannot be told from a rewrite."""
    log = tmp_path / "app.log"
    log.write_text(FIRST)
    os.utime(log, ns=(1, 1))
    file = OpenFile(str(log))
    try:
        file.go_to(0)
        assert file.look(1 << 20, 0.0).data == FIRST.encode()
        os.utime(log, ns=(2, 2))
        for now in (10.0, 10.0 + SETTLE - 0.1):
            look = file.look(1 << 20, now)
            assert (look.data, look.replaced, file.is_suspected) == (b"", False, True)
        append(log, LAST)
        assert file.look(1 << 20, 20.0).data == LAST.encode()
        look = file.look(1 << 20, 30.0)
        assert (look.data, look.replaced, file.is_suspected) == (b"", False, False)
        os.utime(log, ns=(3, 3))
        assert not file.look(1 << 20, 40.0).replaced
        assert file.look(1 << 20, 40.0 + SETTLE).replaced
        file.go_to(0)
        assert file.look(1 << 20, 50.0).data == (FIRST + LAST).encode()
    finally:
        file.close()


async def test_a_file_that_is_shorter_than_it_was_seen_begins_anew(
    tmp_path: Path, sink: Sink, quick: MockClock
) -> None:
    """It is longer than the part that was acknowledged, and begins with that. So a copy of it is known as one."""
    log, registry = tmp_path / "app.log", tmp_path / "registry"
    pattern = tmp_path / "app.log*"
    log.write_text(FIRST)
    await ship_once(sink, pattern, registry=registry)
    append(log, OTHER)
    sink.hold()
    async with following(sink, pattern, registry=registry, config=attrs.evolve(CONFIG, drain_timeout=0.0)):
        await until(lambda: len(sink.events) == 40)
    sink.events.clear()
    sink.open.set()
    shutil.copy(log, tmp_path / "app.log.1")
    text = FIRST + OTHER[:200] + "\n"
    log.write_text(text)
    lines = await ship_once(sink, pattern, registry=registry)
    assert sorted(lines) == sorted(OTHER.splitlines() + text.splitlines())


async def test_of_several_originals_with_the_same_text_the_least_shipped_is_copied(
    tmp_path: Path, sink: Sink, quick: MockClock
) -> None:
    log, registry = tmp_path / "app.log", tmp_path / "registry"
    pattern = tmp_path / "app.log*"
    for _ in range(2):
        log.write_text(FIRST)
        assert len(await ship_once(sink, pattern, registry=registry)) == 40
        os.truncate(log, 0)
        assert await ship_once(sink, pattern, registry=registry) == []
    (tmp_path / "app.log.1").write_text(FIRST + LAST)
    assert await ship_once(sink, pattern, registry=registry) == [LAST.strip()]
    (tmp_path / "app.log.2").write_text(FIRST)
    assert await ship_once(sink, pattern, registry=registry) == [], "two originals, two copies"
    (tmp_path / "app.log.3").write_text(FIRST)
    assert await ship_once(sink, pattern, registry=registry) == FIRST.splitlines()


async def test_a_text_of_which_only_a_part_was_shipped_may_be_the_original(
    tmp_path: Path, sink: Sink, quick: MockClock
) -> None:
    log, registry = tmp_path / "app.log", tmp_path / "registry"
    pattern = tmp_path / "app.log*"
    log.write_text(FIRST)
    assert len(await ship_once(sink, pattern, registry=registry)) == 40
    log.write_text(FIRST[:320])  # the next night
    assert len(await ship_once(sink, pattern, registry=registry)) == 10
    append(log, FIRST[320:])
    shutil.copy(log, tmp_path / "app.log.1")
    os.truncate(log, 0)
    lines = await ship_once(sink, pattern, registry=registry)
    assert set(lines) == set(FIRST.splitlines()), "too little is known of the second night, so its copy comes whole"


@pytest.mark.parametrize("running", [True, False], ids=["running", "down"])
async def test_a_writer_goes_on_in_a_closed_file_that_was_renamed(
    running: bool, tmp_path: Path, sink: Sink, quick: MockClock
) -> None:
    """Rotation renames the file first, and tells the writer later."""
    log, registry = tmp_path / "app.log", tmp_path / "registry"
    old = tmp_path / "old"
    log.write_text(FIRST)
    config = attrs.evolve(CONFIG, close_inactive=1.0, scan=0.5, rotate_wait=3600.0)
    if not running:
        assert len(await ship_once(sink, log, registry=registry)) == 40
        log.rename(old)
    async with following(sink, log, registry=registry, config=config) as followed:
        if running:
            await until(lambda: len(sink.acked) == 40 and not followed.status().files)
            sink.events.clear()
            log.rename(old)
        await trio.sleep(5.0)
        append(old, LAST)
        await until(lambda: len(sink.acked) > 40)
        assert [(event["line"], event["file"]) for event in sink.acked[40:]] == [(LAST.strip(), str(old))]


def test_a_file_that_is_truncated_to_more_than_was_read_is_noticed(tmp_path: Path) -> None:
    log = tmp_path / "app.log"
    log.write_text(FIRST)
    file = OpenFile(str(log))
    try:
        file.go_to(0)
        assert file.look(100, 0.0).data == FIRST[:100].encode()
        os.truncate(log, 200)
        assert file.look(100, 0.0).replaced
    finally:
        file.close()


async def test_a_text_that_was_rewritten_and_renamed_while_no_shipper_ran_comes_again(
    tmp_path: Path, sink: Sink, quick: MockClock
) -> None:
    log, registry = tmp_path / "app.log", tmp_path / "registry"
    log.write_text(FIRST)
    assert len(await ship_once(sink, log, registry=registry)) == 40
    log.write_text(FIRST)
    log.rename(tmp_path / "old")
    assert await ship_once(sink, log, registry=registry) == FIRST.splitlines()


def test_a_removed_file_whose_inode_is_used_again_is_no_original() -> None:
    registry = FileRegistry(None)
    for born, path in ((1, "/a"), (2, "/b"), (2, "/b"), (0, "/c")):
        registry.add(FileEntry(path=path, device=1, inode=1, born=born))
    assert [(entry.path, entry.inode) for entry in registry.entries] == [("/b", 0), ("/b", 0), ("/c", 1)]


def test_a_file_whose_birth_was_not_known_may_be_the_original() -> None:
    registry = FileRegistry(None)
    for born in (0, 2, 0):
        registry.add(FileEntry(path="/a", device=1, inode=1, born=born))
    assert [(entry.born, entry.inode) for entry in registry.entries] == [(0, 0), (2, 0), (0, 1)]


def test_a_registry_is_written_only_if_it_has_changed() -> None:
    registry = FileRegistry(None)
    entry = registry.add(FileEntry(path="/a", device=1, inode=1))
    for left in ([entry], []):
        snapshot = registry.snapshot()
        assert snapshot is not None
        assert len(snapshot) == len(left)
        assert registry.by_inode(1, 1) is (entry if left else None)
        assert registry.snapshot() is None
        registry.remove(entry)


async def test_records_of_several_lines_are_finished_before_files_take_turns(
    tmp_path: Path, sink: Sink, quick: MockClock
) -> None:
    for number in range(3):
        (tmp_path / f"{number}.log").write_text(f"[{number}] boom\n at desk\n")
    config = attrs.evolve(CONFIG, max_files=1, multiline=r"^\[")
    async with following(sink, tmp_path / "*.log", config=config):
        await until(lambda: len(sink.events) == 3)
    assert sorted(sink.lines) == [f"[{number}] boom\n at desk" for number in range(3)]


def test_only_a_few_contents_that_are_gone_are_kept_for_each_path() -> None:
    registry = FileRegistry(None)
    for number in range(100):
        registry.add(FileEntry(path="/a", device=1, inode=1, offset=number))
    registry.add(FileEntry(path="/b", device=1, inode=2))
    assert [(entry.path, entry.inode, entry.offset) for entry in registry.entries] == [
        *(("/a", 0, number) for number in range(91, 99)),
        ("/a", 1, 99),
        ("/b", 2, 0),
    ]


async def test_a_device_with_a_new_number_is_the_same(tmp_path: Path, sink: Sink, quick: MockClock) -> None:
    """Systems may number their devices anew at each start."""
    log, registry = tmp_path / "app.log", tmp_path / "registry"
    log.write_text(FIRST)
    assert len(await ship_once(sink, log, registry=registry)) == 40
    with open_registry(registry) as entries:
        entry = entries.entries[0]
        if not entry.born:
            pytest.skip("this file system does not tell when a file was born")
        moved = attrs.evolve(entry, device=entry.device + 1)
        entries.remove(entry)
        entries.add(moved)
        snapshot = entries.snapshot()
        assert snapshot is not None
        entries.write(snapshot)
    append(log, LAST)
    assert await ship_once(sink, log, registry=registry) == [LAST.strip()]
    assert [
        (each["device"], each["inode"]) for each in json.loads((registry / "registry.json").read_text())["files"]
    ] == [(log.stat().st_dev, log.stat().st_ino)]


@pytest.mark.parametrize("links", [0, 1, 2])
async def test_a_registry_of_version_2_is_read(links: int, tmp_path: Path, sink: Sink, quick: MockClock) -> None:
    """It has neither sizes nor times nor targets of links."""
    real, registry = tmp_path / "real", tmp_path / "registry"
    real.mkdir()
    log = path = real / "app.log"
    for number in range(links):
        (tmp_path / str(number)).mkdir()
        path = tmp_path / str(number) / "app.log"
        path.symlink_to(real / "app.log" if number == 0 else tmp_path / str(number - 1) / "app.log")
    log.write_text(FIRST)
    assert len(await ship_once(sink, path, registry=registry)) == 40
    file = registry / "registry.json"
    data = json.loads(file.read_text())
    for entry in data["files"]:
        for name in ("target", "born", "size", "changed"):
            del entry[name]
    octets = f'{{"version": 2, "files": {json.dumps(data["files"])},\n'.encode()
    file.write_bytes(octets + b'"crc32": %d}\n' % zlib.crc32(octets))
    append(log, LAST)
    log.rename(real / "app.log.1")
    log.write_text(OTHER)
    assert sorted(await ship_once(sink, path, registry=registry)) == sorted([LAST.strip(), *OTHER.splitlines()])
    data = json.loads(file.read_text())
    assert data["version"] == 3
    assert {entry["target"] for entry in data["files"]} == {str(log) if links else "", ""}


async def test_nuls_in_place_of_bytes_that_are_gone_are_left_out(tmp_path: Path, sink: Sink, quick: MockClock) -> None:
    log = tmp_path / "app.log"
    with log.open("wb", buffering=0) as writer:
        writer.write(b"x" * 2_000_000 + b"\nold\n")
        async with following(sink, log) as followed:
            await until(lambda: len(sink.acked) == 2)
            sink.events.clear()
            os.truncate(log, 0)
            await until(lambda: followed.status().replacements)
            append(log, "of another writer\n")
            writer.write(b"new\n\0of a new line\nn\0l\n")
            await sink.has("of another writer", "new", "of a new line", "n\0l")
            await until(lambda: len(sink.acked) == 6)
            assert [event["offset"] for event in sink.acked[2:]] == ["0", "2000005", "2000010", "2000024"]


# ---------------------------------------------------------------- what cannot be done


async def test_what_was_not_shipped_of_a_file_that_is_gone_is_said_once(
    tmp_path: Path, sink: Sink, quick: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    log, registry = tmp_path / "app.log", tmp_path / "registry"
    log.write_text("one\n")
    sink.hold()
    async with following(sink, log, registry=registry, config=attrs.evolve(CONFIG, drain_timeout=0.0)):
        await until(lambda: sink.events)
    sink.open.set()
    sink.events.clear()
    log.unlink()
    for _ in range(2):
        assert await ship_once(sink, tmp_path / "*.log", registry=registry) == []
    assert caplog.messages == [f"{log} is gone, and its last 4 bytes were not shipped"]


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file that cannot be read")
async def test_a_file_that_cannot_be_read_is_told_once(
    tmp_path: Path, sink: Sink, quick: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "good.log").write_text("good\n")
    (tmp_path / "bad.log").symlink_to("/proc/self/mem")
    async with following(sink, tmp_path / "*.log", config=attrs.evolve(CONFIG, scan=0.1)) as followed:
        await sink.has("good")
        await trio.sleep(3)
        assert followed.status().failures == 1
    assert caplog.messages == [f"cannot read {tmp_path / 'bad.log'}: Input/output error"]


async def test_a_registry_that_cannot_be_written_is_told_once(
    tmp_path: Path, sink: Sink, quick: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    log, registry = tmp_path / "app.log", tmp_path / "registry"
    log.write_text("one\n")
    async with following(sink, log, registry=registry) as followed:
        for number in range(2):
            await until(
                lambda: json.loads((registry / "registry.json").read_text())["files"][0]["offset"] == log.stat().st_size
            )
            (registry / "registry.new").mkdir()
            append(log, "two\n")
            await until(lambda: followed.status().save_errors >= 3 * number + 3)  # noqa: B023 - called before the next
            (registry / "registry.new").rmdir()
            assert len(caplog.messages) == number + 1, "once until it can be written again"
    assert {message.partition(":")[0] for message in caplog.messages} == {"the registry of files cannot be written"}


# ---------------------------------------------------------------- few descriptors


@contextmanager
def descriptors(free: int) -> Iterator[list[int]]:
    """Leave this process so many descriptors; yields those that a test may use up or give back."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    held: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + free, hard))
    try:
        yield held
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in held:
            os.close(descriptor)


def take_all(held: list[int]) -> None:
    while True:
        try:
            held.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            return


needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors in /proc")


@needs_proc
async def test_files_take_half_of_the_descriptors(tmp_path: Path, sink: Sink, quick: MockClock) -> None:
    """Those that grow all the time take turns."""
    logs = [tmp_path / f"{number:03}.log" for number in range(80)]
    for log in logs:
        log.write_text("one\n")
    with descriptors(60):  # this test opens files, too
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        async with following(sink, tmp_path / "*.log") as followed:
            for line in ("one", "two", "three"):
                while sink.lines.count(line) < 80:
                    assert followed.status().files <= most
                    append(logs[-1], "more\n")
                    await trio.sleep(0.1)
                for log in logs:
                    append(log, {"one": "two\n", "two": "three\n"}.get(line, "end\n"))
            await until(lambda: sink.lines.count("end") == 80)
    assert sink.lines.count("one") == sink.lines.count("two") == sink.lines.count("three") == 80


@needs_proc
async def test_without_a_free_descriptor_files_wait_and_are_behind(
    tmp_path: Path, sink: Sink, quick: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "1.log").write_text("one\n")
    sink.hold()
    with descriptors(10) as held:
        async with following(sink, tmp_path / "*.log") as followed:
            await sink.has("one")
            (tmp_path / "2").write_text("two\n")
            (tmp_path / "3").write_text("three\n")
            os.utime(tmp_path / "2", (1, 1))
            while not caplog.messages:  # a look for files that is under way gives its descriptor back later
                take_all(held)
                await trio.sleep(0.1)
            for name in ("2", "3"):
                (tmp_path / name).rename(tmp_path / f"{name}.log")
            os.close(held.pop())
            await sink.has("two")
            await until(lambda: followed.status().waiting)
            assert followed.status().bytes_behind == len("one\ntwo\nthree\n")
            assert followed.status().failures == 0
            sink.open.set()  # files that are read to their end make room
            await sink.has("three")
    # Each comes again if a look fails behind one that did not: the file that was taken in has the only descriptor.
    assert list(dict.fromkeys(caplog.messages)) == [
        f"no descriptor is free to look for files: [Errno 24] Too many open files: '{tmp_path}'",
        f"files wait, because no descriptor is free: [Errno 24] Too many open files: '{tmp_path / '3.log'}'",
    ]


@needs_proc
def test_the_limit_of_descriptors_is_raised() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with descriptors(10):
        assert descriptor_limit() < soft
        raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, 1 << 20), hard)
