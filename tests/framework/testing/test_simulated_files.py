"""A simulated disk answers as the real one does, as long as nothing fails."""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from levada.framework.files import Files
from levada.framework.testing.simulation import SimulatedDisk, SimulatedFiles

pytestmark = pytest.mark.skipif(os.name != "posix", reason="files of POSIX")

MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
PATHS = st.sampled_from(["", "a", "b", "c", "a/a", "a/b", "b/a", "a/a/a", "c/a"])
FLAGS = st.sampled_from(
    [
        os.O_RDONLY,
        os.O_RDWR,
        os.O_RDWR | os.O_CREAT,
        os.O_RDWR | os.O_CREAT,
        os.O_RDWR | os.O_CREAT | os.O_TRUNC,
        os.O_RDWR | os.O_CREAT | os.O_EXCL,
        os.O_WRONLY | os.O_CREAT | os.O_APPEND,
        os.O_RDONLY | os.O_DIRECTORY,
    ]
)
PLACES = st.integers(0, 20) | st.sampled_from([4000, 4096, 9000])


class SameAnswers(RuleBasedStateMachine):
    """Random calls get the same answers, or the same errors, from both."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=MEMORY))
        self.real, self.simulated = Files(), SimulatedFiles(SimulatedDisk())
        self.simulated.make_folder(self.folder)
        self.opened: list[tuple[int, int]] = []
        self.inodes: dict[int, int] = {}

    def teardown(self) -> None:
        for real, _ in self.opened:
            self.real.close(real)
        self.real.sync_folder(self.folder)
        shutil.rmtree(self.folder)

    def both(self, do: Callable[[Files], Any], look: Callable[[Any], Any] = lambda found: found) -> list[Any]:
        """Do something on both; both must succeed or fail in the same way. Return the answers; none after an error."""
        found, told = [], []
        for files in (self.real, self.simulated):
            try:
                answer = do(files)
            except (OSError, ValueError) as error:
                told.append((type(error), getattr(error, "errno", None)))
            else:
                found.append(answer)
                told.append(look(answer))
        assert told[0] == told[1]
        return found

    def state(self, state: os.stat_result) -> tuple[Any, ...]:
        """What a state says; the real inodes are known by the simulated ones."""
        is_folder = stat.S_ISDIR(state.st_mode)
        return stat.S_IFMT(state.st_mode), state.st_nlink if not is_folder else 0, 0 if is_folder else state.st_size

    @rule(path=PATHS, flags=FLAGS)
    def opens(self, path: str, flags: int) -> None:
        found = self.both(lambda files: files.open(self.folder / path, flags, 0o600), lambda _: None)
        if found:
            self.opened.append((found[0], found[1]))

    @precondition(lambda self: self.opened)
    @rule(data=st.data())
    def closes(self, data: st.DataObject) -> None:
        pair = self.opened.pop(data.draw(st.integers(0, len(self.opened) - 1)))
        for _ in range(2):  # the second time there is no such descriptor
            self.both(lambda files: files.close(pair[files is self.simulated]))

    @precondition(lambda self: self.opened)
    @rule(data=st.data(), at=PLACES, size=PLACES, kind=st.sampled_from(["read", "write", "map", "cut", "sync", "look"]))
    def uses(self, data: st.DataObject, at: int, size: int, kind: str) -> None:
        pair = data.draw(st.sampled_from(self.opened))
        octets = bytes([size % 251 + 1]) * size

        def use(files: Files) -> Any:
            descriptor = pair[files is self.simulated]
            match kind:
                case "read":
                    return files.pread(descriptor, size, at)
                case "write":
                    return files.pwritev(descriptor, [octets[:3], memoryview(octets)[3:]], at)
                case "map":
                    return files.map(descriptor, size + 1, at // 4096 * 4096)[:]
                case "cut":
                    return files.ftruncate(descriptor, size)
                case "sync":
                    files.fdatasync(descriptor)
                    return files.fsync(descriptor)
                case _:
                    return self.state(files.fstat(descriptor))

        self.both(use)

    @precondition(lambda self: self.opened)
    @rule(data=st.data(), shared=st.booleans())
    def locks(self, data: st.DataObject, shared: bool) -> None:
        pair = data.draw(st.sampled_from(self.opened))
        self.both(lambda files: files.lock(pair[files is self.simulated], shared=shared))

    @rule(
        path=PATHS,
        kind=st.sampled_from(["mkdir", "unlink", "rmdir", "names", "stat", "sync", "read", "discard", "make"]),
    )
    def names(self, path: str, kind: str) -> None:
        where = self.folder / path

        def use(files: Files) -> Any:
            match kind:
                case "mkdir":
                    return files.mkdir(where)
                case "unlink":
                    return files.unlink(where)
                case "rmdir":
                    return files.rmdir(where) if path else None
                case "names":
                    return files.names(where)
                case "stat":
                    return self.state(files.stat(where)), files.exists(where)
                case "sync":
                    return files.sync_folder(where)
                case "read":
                    return files.read(where)
                case "discard":
                    return files.discard(where)
                case _:
                    return files.make_folder(where)

        self.both(use)

    @rule(source=PATHS, new=PATHS, kind=st.sampled_from(["rename", "link", "copy"]))
    def two_names(self, source: str, new: str, kind: str) -> None:
        if kind != "copy" and not (source and new):
            return
        self.both(lambda files: getattr(files, kind)(self.folder / source, self.folder / new))


TestSameAnswers = SameAnswers.TestCase


@pytest.mark.parametrize("simulated", [False, True])
def test_a_lock_whose_change_is_refused_is_given_up(tmp_path: Path, simulated: bool) -> None:
    """As flock(2) says: the change of a lock is not one step."""
    files = SimulatedFiles(SimulatedDisk()) if simulated else Files()
    path = "/file" if simulated else tmp_path / "file"
    one, other = files.open(path, os.O_RDWR | os.O_CREAT), files.open(path, os.O_RDWR)
    files.lock(one, shared=True)
    files.lock(other, shared=True)
    with pytest.raises(BlockingIOError):
        files.lock(one)
    files.lock(other)
    files.close(one)
    files.close(other)


def test_a_database_holds_what_was_committed() -> None:
    disk = SimulatedDisk()
    for files in (SimulatedFiles(disk), SimulatedFiles(disk)):
        with closing(files.database("/ledger")) as database:
            database.execute("PRAGMA journal_mode=WAL")
            assert "ledger-wal" in files.names("/")
            if files.dead or not database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                database.execute("CREATE TABLE facts (value)")
            database.execute("BEGIN IMMEDIATE")
            database.executemany("INSERT INTO facts VALUES (?)", [(1,), (2,)])
            database.execute("COMMIT")
            database.execute("BEGIN IMMEDIATE")
            database.execute("INSERT INTO facts VALUES (3)")
            with closing(files.database("/ledger")) as other:
                assert other.execute("SELECT count(*) FROM facts").fetchone()[0] in (2, 4)
                with pytest.raises(sqlite3.OperationalError, match="locked"):
                    other.execute("BEGIN IMMEDIATE")
            with closing(database.cursor()) as cursor:
                cursor.execute("ROLLBACK")
        assert files.names("/") == ["ledger"]
    with closing(SimulatedFiles(disk).database("/ledger", "mode=ro")) as database:
        assert database.execute("SELECT value FROM facts ORDER BY value").fetchall() == [(1,), (1,), (2,), (2,)]
        with pytest.raises(sqlite3.OperationalError) as caught:
            database.execute("INSERT INTO facts VALUES (4)")
        assert caught.value.sqlite_errorcode == sqlite3.SQLITE_READONLY
    with pytest.raises(sqlite3.OperationalError) as caught:
        SimulatedFiles(disk).database("/missing", "mode=ro")
    assert caught.value.sqlite_errorcode == sqlite3.SQLITE_CANTOPEN


def test_a_temporary_folder_goes_with_its_files() -> None:
    files = SimulatedFiles(SimulatedDisk())
    with files.temporary_folder() as folder, files.temporary_folder() as other:
        assert folder != other
        files.make_folder(folder / "more")
        files.close(files.open(folder / "more" / "file", os.O_RDWR | os.O_CREAT))
    assert files.names("/tmp") == []
