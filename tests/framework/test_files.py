"""What `Files` makes of the calls of the operating system."""

from __future__ import annotations

import mmap
import os
import sqlite3
import sys
from contextlib import closing, suppress
from pathlib import Path

import pytest

from levada.framework.files import Files
from levada.framework.testing.simulation import Call, Crashed, Fault, SimulatedDisk, SimulatedFiles

pytestmark = pytest.mark.skipif(os.name != "posix", reason="files of POSIX")

FILES = Files()


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_folder_is_made_with_those_above_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        FILES.make_folder(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert (mode(tmp_path / "a"), mode(tmp_path / "a" / "b")) == (0o777, 0o700)
    FILES.make_folder(tmp_path / "a" / "b")
    assert FILES.names(tmp_path / "a") == ["b"]


def test_no_folder_is_made_in_the_place_of_another_thing(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "nowhere").symlink_to("missing")
    with pytest.raises(FileExistsError):
        FILES.make_folder(tmp_path / "file")
    with pytest.raises(NotADirectoryError):
        FILES.make_folder(tmp_path / "file" / "b")
    with pytest.raises(FileNotFoundError):
        FILES.make_folder(tmp_path / "nowhere" / "b")


def test_names_are_found_by_a_pattern_in_order(tmp_path: Path) -> None:
    for name in ("b.new", "a.new", "a.newer"):
        (tmp_path / name).touch()
    assert FILES.glob(tmp_path, "*.new") == [tmp_path / "a.new", tmp_path / "b.new"]
    assert FILES.glob(tmp_path / "missing", "*") == []
    assert FILES.glob(tmp_path / "a.new", "*") == []


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell who has a lock")
def test_who_has_a_file_locked_is_told(tmp_path: Path) -> None:
    with FILES.opened(tmp_path / "a", os.O_RDWR | os.O_CREAT) as first, FILES.opened(tmp_path / "a") as second:
        assert FILES.lockers(second) == []
        FILES.lock(first)
        assert FILES.lockers(second) == [os.getpid()]
        with FILES.opened(tmp_path / "b", os.O_RDWR | os.O_CREAT) as other:
            assert FILES.lockers(other) == []


def test_a_copy_has_all_bytes_also_if_writes_are_short(tmp_path: Path) -> None:
    class Short(Files):
        @staticmethod
        def pwrite(descriptor: int, data: bytes | memoryview, offset: int) -> int:  # type: ignore[override]
            return os.pwrite(descriptor, data[:300_000], offset)

    octets = bytes(range(256)) * 10_000
    (tmp_path / "source").write_bytes(octets)
    (tmp_path / "target").write_bytes(bytes(3_000_000))
    Short().copy(tmp_path / "source", tmp_path / "target")
    assert FILES.read(tmp_path / "target") == octets
    Short().copy(tmp_path / "source", tmp_path / "private")
    assert (FILES.read(tmp_path / "private"), mode(tmp_path / "private")) == (octets, 0o600)


def test_an_error_says_of_which_file(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError) as caught:
        FILES.read(tmp_path)
    assert str(caught.value) == f"[Errno 21] Is a directory: '{tmp_path}'"


def test_a_mapped_part_of_a_deleted_file_stays(tmp_path: Path) -> None:
    path, page = tmp_path / "file", mmap.ALLOCATIONGRANULARITY
    path.write_bytes(b"a" * page + b"bcd")
    descriptor = FILES.open(path, os.O_RDONLY)
    part = FILES.map(descriptor, 2, page)
    FILES.close(descriptor)
    FILES.discard(path)
    FILES.discard(path)
    assert (part[:], FILES.exists(path), FILES.exists(path / "b")) == (b"bc", False, False)


def test_a_lock_keeps_others_out_until_its_file_is_closed(tmp_path: Path) -> None:
    first, second = (FILES.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT) for _ in range(2))
    FILES.lock(first, shared=True)
    FILES.lock(second, shared=True)
    with pytest.raises(BlockingIOError):
        FILES.lock(first)
    FILES.close(second)
    FILES.lock(first)
    FILES.close(first)


def test_a_database_may_be_opened_for_reading_only(tmp_path: Path) -> None:
    with closing(FILES.database(tmp_path / "a?b")) as database:
        database.execute("CREATE TABLE t (v)")
        database.execute("INSERT INTO t VALUES (1)")
    with closing(FILES.database(tmp_path / "a?b", "mode=ro")) as database:
        assert database.execute("SELECT v FROM t").fetchall() == [(1,)]
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            database.execute("INSERT INTO t VALUES (2)")


def test_a_temporary_folder_goes_with_its_files() -> None:
    with FILES.temporary_folder() as folder:
        (folder / "file").touch()
        assert mode(folder) == 0o700
    assert not folder.exists()


def test_a_durable_folder_outlives_a_power_failure_if_a_process_that_made_it_was_killed() -> None:
    for count in range(1, 8):
        disk, calls = SimulatedDisk("lax"), list[Call]()

        def happens(call: Call, calls: list[Call] = calls, count: int = count) -> Fault | None:
            calls.append(call)
            return Fault(crash=True) if len(calls) == count else None

        with suppress(Crashed):
            SimulatedFiles(disk, faults=happens).make_durable_folder("/a/b/c")
        SimulatedFiles(disk).make_durable_folder("/a/b/c")
        disk.power_failure(0, share=0)
        assert SimulatedFiles(disk).exists("/a/b/c")
