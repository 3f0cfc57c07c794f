"""The archive of a log in an object store: a process that dies at any call to it leaves no row missing, and none twice."""

from __future__ import annotations

import io
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.fs
from tests.actors.journal.test_archive import ALL, COLUMNS, ROWS, append, erase, one_table, rows_from, trim
from tests.surroundings import surrounded

from levada.actors.durable import log_config
from levada.actors.journal import JournalError, Store
from levada.actors.journal import archive as archiving
from levada.framework.testing.simulation import SimulatedDisk, SimulatedFiles

PLACE = "s3://bucket/accounts"


class Died(BaseException):
    """The process is dead."""


class Objects(pyarrow.fs.FileSystemHandler):  # type: ignore[misc]  # Arrow has no types
    """A store whose objects are there when they are whole. A process dies at a call, which is done before or not at all."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        """The name that Arrow has for such a file system."""
        self.objects: dict[str, bytes] = {}
        self.calls = 0
        self.dies_at = 0
        self.is_done = False

    def change(self, name: str, data: bytes | None) -> None:
        """Make or delete an object."""
        self.calls += 1
        dies = self.calls == self.dies_at
        if not dies or self.is_done:
            if data is None:
                del self.objects[name]
            else:
                self.objects[name] = data
        if dies:
            raise Died

    def get_type_name(self) -> str:
        return self.kind

    def get_file_info(self, paths: list[str]) -> list[pyarrow.fs.FileInfo]:
        return [
            pyarrow.fs.FileInfo(path, pyarrow.fs.FileType.File, size=len(self.objects[path]))
            if path in self.objects
            else pyarrow.fs.FileInfo(path, pyarrow.fs.FileType.NotFound)
            for path in paths
        ]

    def get_file_info_selector(self, selector: pyarrow.fs.FileSelector) -> list[pyarrow.fs.FileInfo]:
        return self.get_file_info([name for name in self.objects if name.startswith(f"{selector.base_dir}/")])

    def open_input_file(self, path: str) -> pa.PythonFile:
        return pa.PythonFile(io.BytesIO(self.objects[path]), mode="r")

    def open_output_stream(self, path: str, metadata: Any) -> pa.PythonFile:
        return pa.PythonFile(_Upload(self, path), mode="w")

    def create_dir(self, path: str, recursive: bool) -> None:
        pass

    def move(self, src: str, dest: str) -> None:
        self.change(dest, self.objects[src])
        self.change(src, None)

    def _refuse(self, *_: Any) -> Any:
        raise NotImplementedError

    copy_file = delete_dir = delete_dir_contents = delete_file = delete_root_dir_contents = normalize_path = _refuse
    open_append_stream = open_input_stream = _refuse


class _Upload(io.BytesIO):
    def __init__(self, store: Objects, path: str) -> None:
        super().__init__()
        self._store, self._path = store, path

    def close(self) -> None:
        if not self.closed:
            data = self.getvalue()
            super().close()
            self._store.change(self._path, data)


@pytest.fixture(params=["s3", "hdfs"])
def objects(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Objects:
    made = Objects(request.param)

    def from_uri(uri: str) -> tuple[pyarrow.fs.FileSystem, str]:
        return pyarrow.fs.PyFileSystem(made), uri.partition("://")[2]

    monkeypatch.setattr(archiving, "_from_uri", from_uri)
    monkeypatch.setattr(archiving, "_ATOMIC", ("py::s3",))
    return made


@pytest.mark.ci
@pytest.mark.parametrize("erases", [False, True])
@pytest.mark.parametrize("is_done", [False, True])
def test_a_process_that_dies_at_any_call_leaves_each_row_once(
    objects: Objects, monkeypatch: pytest.MonkeyPatch, erases: bool, is_done: bool
) -> None:
    monkeypatch.setattr(archiving, "FILE_BYTES", 1000)
    monkeypatch.setattr("levada.actors.journal.still.PAGE_ROWS", 10)
    objects.is_done = is_done
    left = [each for each in ALL if not erases or each[0] % 4 != 1]
    tried, finished = 0, False
    while not finished:
        tried += 1
        objects.objects.clear()
        objects.dies_at = 0
        with surrounded(files=SimulatedFiles(SimulatedDisk())):
            with Store.open("/log", COLUMNS, log_config(1)) as store:
                append(store, rows_from(0, ROWS))
                trim(store, PLACE, 25.0)
            objects.calls, objects.dies_at = 0, tried
            with suppress(Died), Store.open("/log", None, log_config(1)) as store:
                if erases:
                    erase(store, PLACE, "bert")
                trim(store, PLACE)
                finished = True
            with Store.open("/log", None, log_config(1)) as store:
                if erases:
                    erase(store, PLACE, "bert")
                assert one_table(store, PLACE) == left
                trim(store, PLACE)
                assert one_table(store, PLACE) == left
                assert store.archives[0].end == ROWS
    assert tried > (3 if erases else 2)


def test_a_file_that_the_store_has_not_whole_keeps_the_rows_in_the_log(
    tmp_path: Path, objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = objects.change
    monkeypatch.setattr(objects, "change", lambda name, data: real(name, data and data[:-1]))
    with Store.open(tmp_path / "log", COLUMNS, log_config(1)) as store:
        append(store, rows_from(0, ROWS))
        with pytest.raises(JournalError, match=r"a file of \d+ bytes has \d+ in the archive"):
            trim(store, PLACE)
        assert not store.extent().trimmed
