"""What a simulated disk keeps of a crash, and how it fails."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing

import pytest

from levada.framework.testing.simulation import Call, Crashed, DiskFaults, Fault, SimulatedDisk, SimulatedFiles

pytestmark = pytest.mark.skipif(os.name != "posix", reason="files of POSIX")

MODELS = pytest.mark.parametrize("model", ["ordered", "lax"])
SEEDS = range(40)


def write(files: SimulatedFiles, path: str, octets: bytes, *, sync: bool = False) -> None:
    descriptor = files.open(path, os.O_RDWR | os.O_CREAT)
    files.pwrite(descriptor, octets, 0)
    if sync:
        files.fsync(descriptor)
    files.close(descriptor)


def at(kind: str, path: str, count: int, fault: Fault) -> DiskFaults:
    return {Call(kind, path, count): fault}.get


def outcomes(model: str, do: Callable[[SimulatedFiles], object]) -> set[tuple[tuple[str, bytes], ...]]:
    """Return all files that are left after power failures behind the same work."""
    found = set()
    for seed in SEEDS:
        disk = SimulatedDisk(model)  # type: ignore[arg-type]
        do(SimulatedFiles(disk))
        disk.power_failure(seed)
        files = SimulatedFiles(disk)
        found.add(tuple((path, files.read(path)) for path in disk.paths()))
    return found


@MODELS
def test_a_kill_loses_nothing_and_a_dead_process_does_nothing(model: str) -> None:
    disk = SimulatedDisk(model)  # type: ignore[arg-type]
    files = SimulatedFiles(disk, faults=at("write", "/a", 2, Fault(crash=True, done=0.5)))
    descriptor = files.open("/a", os.O_RDWR | os.O_CREAT)
    files.lock(descriptor)
    files.pwrite(descriptor, b"1" * 10, 0)
    with pytest.raises(Crashed):
        files.pwrite(descriptor, b"2" * 10_000, 0)
    for call in (lambda: files.close(descriptor), lambda: files.unlink("/a"), lambda: files.names("/")):
        with pytest.raises(Crashed):
            call()
    after = SimulatedFiles(disk)
    assert after.read("/a") == b"2" * 8192
    after.lock(after.open("/a", os.O_RDWR))


@MODELS
def test_what_was_not_synced_survives_by_sector(model: str) -> None:
    def work(files: SimulatedFiles) -> None:
        write(files, "/a", b"0" * 1024, sync=True)
        files.sync_folder("/")
        write(files, "/a", b"1" * 1024)

    old, new = b"0" * 512, b"1" * 512
    assert outcomes(model, work) == {(("/a", first + second),) for first in (old, new) for second in (old, new)}


@MODELS
def test_a_name_that_was_not_synced_may_be_lost(model: str) -> None:
    def work(files: SimulatedFiles) -> None:
        write(files, "/a", b"1", sync=True)
        files.sync_folder("/")
        files.rename("/a", "/b")
        files.mkdir("/folder")

    assert outcomes(model, work) == {(("/a", b"1"),), (("/b", b"1"),)}


@MODELS
def test_a_synced_name_is_not_lost(model: str) -> None:
    def work(files: SimulatedFiles) -> None:
        write(files, "/a", b"1", sync=True)
        files.rename("/a", "/b")
        files.sync_folder("/")

    assert outcomes(model, work) == {(("/b", b"1"),)}


def test_an_ordered_disk_keeps_changes_up_to_one_and_a_lax_disk_any() -> None:
    def work(files: SimulatedFiles) -> None:
        for name in "abc":
            write(files, f"/{name}", b"")

    def names(model: str) -> set[str]:
        return {"".join(path[1:] for path, _ in found) for found in outcomes(model, work)}

    assert names("ordered") <= {"", "a", "ab", "abc"}
    assert {"c", "ac"} <= names("lax")


def test_a_sync_of_a_file_brings_its_name_to_an_ordered_disk_only() -> None:
    def work(files: SimulatedFiles) -> None:
        write(files, "/first", b"")
        write(files, "/a", b"1", sync=True)

    assert outcomes("ordered", work) == {(("/a", b"1"), ("/first", b""))}
    assert () in outcomes("lax", work)


@MODELS
def test_a_cut_that_was_not_synced_may_be_undone(model: str) -> None:
    def work(files: SimulatedFiles) -> None:
        write(files, "/a", b"1" * 8, sync=True)
        files.sync_folder("/")
        files.ftruncate(files.open("/a", os.O_RDWR), 4)

    assert outcomes(model, work) == {(("/a", b"1" * 8),), (("/a", b"1" * 4),)}


@MODELS
def test_a_failed_sync_leaves_pages_that_count_as_written(model: str) -> None:
    disk = SimulatedDisk(model)  # type: ignore[arg-type]
    files = SimulatedFiles(disk, faults=at("fdatasync", "/a", 1, Fault(errno.EIO)))
    descriptor = files.open("/a", os.O_RDWR | os.O_CREAT)
    files.pwrite(descriptor, b"1" * 8, 0)
    with pytest.raises(OSError, match="Input/output error"):
        files.fdatasync(descriptor)
    files.pwrite(descriptor, b"2" * 8, 8)
    files.fdatasync(descriptor)
    files.sync_folder("/")
    assert files.pread(descriptor, 16, 0) == b"1" * 8 + b"2" * 8
    disk.power_failure(1, share=1)
    assert SimulatedFiles(disk).read("/a") == bytes(8) + b"2" * 8


def test_a_full_disk_takes_what_fits_until_files_are_deleted() -> None:
    disk = SimulatedDisk(size=5 * 4096)  # the root and three files
    files = SimulatedFiles(disk)
    descriptor = files.open("/a", os.O_RDWR | os.O_CREAT)
    assert files.pwrite(descriptor, bytes(9000), 0) == 9000
    for call in (lambda: files.pwrite(descriptor, b"1", 3 * 4096), lambda: files.mkdir("/b")):
        with pytest.raises(OSError, match="No space left"):
            call()
    assert files.pwrite(descriptor, bytes(9000), 9000) == 3 * 4096 - 9000
    with pytest.raises(OSError, match="No space left"):
        files.pwrite(descriptor, b"1", 3 * 4096)
    files.ftruncate(descriptor, 0)
    files.mkdir("/b")
    disk.full()
    with pytest.raises(sqlite3.OperationalError, match="database or disk is full"):
        files.database("/c")
    files.rmdir("/b")
    with closing(files.database("/c")) as database, pytest.raises(sqlite3.OperationalError) as caught:
        database.execute("CREATE TABLE facts (value)")
    assert caught.value.sqlite_errorcode == sqlite3.SQLITE_FULL


def test_a_process_has_so_many_descriptors() -> None:
    files = SimulatedFiles(SimulatedDisk(), descriptors=2)
    first = files.open("/a", os.O_RDWR | os.O_CREAT)
    with closing(files.database("/b")):
        with pytest.raises(OSError, match="Too many open files"):
            files.open("/a", os.O_RDWR)
        with pytest.raises(sqlite3.OperationalError, match="unable to open"):
            files.database("/b")
    files.close(first)
    files.open("/a", os.O_RDWR)


def test_a_short_write_ends_between_pages() -> None:
    files = SimulatedFiles(SimulatedDisk(), faults=at("write", "/a", 1, Fault(done=0.5)))
    descriptor = files.open("/a", os.O_RDWR | os.O_CREAT)
    assert files.pwrite(descriptor, bytes(10_000), 0) == 8192
    assert files.pwrite(descriptor, bytes(100), 0) == 100


def test_a_short_write_is_no_fault_of_a_sync() -> None:
    disk = SimulatedDisk()
    files = SimulatedFiles(disk, faults=lambda call: Fault(done=0.5))
    write(files, "/a", b"1", sync=True)
    disk.power_failure(0, share=0)
    assert SimulatedFiles(disk).read("/a") == b"1"


def test_the_root_is_kept_when_it_was_synced_and_closed() -> None:
    files = SimulatedFiles(SimulatedDisk())
    for _ in range(2):
        files.sync_folder("/")
    files.mkdir("/a")
    assert files.names("/") == ["a"]


def test_a_bit_that_turned_at_rest_is_turned_for_all() -> None:
    disk = SimulatedDisk()
    files = SimulatedFiles(disk)
    write(files, "/a", b"\0\0", sync=True)
    disk.rot("/a", 1, bit=3)
    assert files.read("/a") == b"\0\x08"
    disk.power_failure(0, share=0)
    assert SimulatedFiles(disk).read("/a") == b"\0\x08"


def test_syncs_take_time_that_a_simulated_thread_waits() -> None:
    files = SimulatedFiles(SimulatedDisk(sync_time=0.25))
    write(files, "/a", b"1", sync=True)
    files.sync_folder("/")
    assert (files.take_waiting(), files.take_waiting()) == (0.5, 0.0)


def commits(fault: Fault, count: int) -> tuple[SimulatedDisk, SimulatedFiles]:
    """Commit one row after the other until the fault comes."""
    disk = SimulatedDisk()
    files = SimulatedFiles(disk, faults=at("commit", "/ledger", count, fault))
    database = files.database("/ledger")
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("CREATE TABLE facts (value)")
    with pytest.raises((Crashed, sqlite3.OperationalError)):
        for number in range(5):
            database.execute("BEGIN IMMEDIATE")
            database.execute("INSERT INTO facts VALUES (?)", (number,))
            database.execute("COMMIT")
    return disk, files


def rows(files: SimulatedFiles) -> int:
    with closing(files.database("/ledger", "mode=ro")) as database:
        return int(database.execute("SELECT count(*) FROM facts").fetchone()[0])


def test_a_process_that_dies_in_a_commit_does_not_learn_it_from_its_database() -> None:
    database = SimulatedFiles(SimulatedDisk(), faults=at("commit", "/ledger", 1, Fault(crash=True))).database("/ledger")
    database.execute("BEGIN IMMEDIATE")
    assert database.in_transaction
    with pytest.raises(Crashed):
        database.execute("COMMIT")
    with pytest.raises(Crashed):
        print(database.in_transaction)


@pytest.mark.parametrize(("done", "left"), [(0.0, 1), (1.0, 2)])
def test_a_crash_in_a_commit_leaves_all_of_it_or_nothing(done: float, left: int) -> None:
    disk, _ = commits(Fault(crash=True, done=done), 3)
    assert SimulatedFiles(disk).exists("/ledger-wal")
    disk.power_failure(0, share=0)
    assert rows(SimulatedFiles(disk)) == left


def test_a_failed_commit_may_be_found_after_a_kill_and_be_lost_again() -> None:
    disk, files = commits(Fault(errno.EIO, done=1.0), 3)
    assert rows(files) == 2  # another connection recovers the log, as another process does
    files.kill()
    assert rows(SimulatedFiles(disk)) == 2
    disk.power_failure(0, share=0)
    assert rows(SimulatedFiles(disk)) == 1


def test_the_same_crash_leaves_the_same_when_calls_come_around_it() -> None:
    left = []
    for more in (False, True):
        disk = SimulatedDisk("lax")
        files = SimulatedFiles(disk)
        if more:
            write(files, "/other", b"2" * 5000)
        for name in "abcdef":
            write(files, f"/{name}", b"1" * 2048)
        disk.power_failure(7)
        after = SimulatedFiles(disk)
        left.append({path: after.read(path) for path in disk.paths() if path != "/other"})
    assert left[0] == left[1]
    assert 0 < len(left[0]) < 6
