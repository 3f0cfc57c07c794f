"""Many partitions cost little: opening syncs only what may not have been synced."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

pytest.importorskip("levada.actors.journal", exc_type=ImportError)

from levada.actors.journal import JournalConfig, Store, columns_of
from levada.framework import message
from levada.framework.platform import REAL


@message("partitions.Line")
class Line:
    number: int


COLUMNS = columns_of(Line)


def append(store: Store) -> None:
    batch = COLUMNS.encode([Line(1)])
    store.append([(number, batch) for number in store.extent().end])


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are synced from now on."""
    names: list[str] = []
    real = os.fdatasync

    def sync(descriptor: int) -> None:
        names.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        real(descriptor)

    monkeypatch.setattr(REAL.files, "fdatasync", sync)
    return names


@pytest.mark.parametrize("partitions", [1, 64])
def test_opening_syncs_no_partition_that_was_closed_in_order(
    tmp_path: Path, synced: list[str], partitions: int
) -> None:
    config = JournalConfig(partitions=partitions)  # no other setting is needed
    with Store.open(tmp_path, COLUMNS.schema, config) as store:
        append(store)
    synced.clear()
    with Store.open(tmp_path, COLUMNS.schema, config) as store:
        assert [name for name in synced if name.endswith(".segment")] == []
        assert store.extent().end == dict.fromkeys(range(partitions), 1)


def test_rows_that_are_not_known_to_be_synced_are_synced_before_readers_see_them(
    tmp_path: Path, synced: list[str]
) -> None:
    with Store.open(tmp_path, COLUMNS.schema) as store:
        append(store)
    shutil.copy(tmp_path / "ends", tmp_path / "before")
    with Store.open(tmp_path, COLUMNS.schema) as store:
        append(store)
    (tmp_path / "before").replace(tmp_path / "ends")
    synced.clear()
    with Store.open(tmp_path, COLUMNS.schema) as store:
        assert [name for name in synced if name.endswith(".segment")] == ["00000000000000000000.segment"]
        assert store.extent().end == {0: 2}
