"""An append of many blocks is in the log whole or not at all, wherever it was cut short."""

from __future__ import annotations

import shutil
from pathlib import Path

import attrs
import pytest

pa = pytest.importorskip("pyarrow")
pytest.importorskip("levada.actors.journal", exc_type=ImportError)

from tests.actors.journal.test_journal_files import SCHEMA, SMALL, numbers, segment_files, span  # noqa: E402

from levada.actors.journal import JournalConfig, JournalDamaged, OffsetGone, Store  # noqa: E402
from levada.actors.journal.ends import Ends  # noqa: E402
from levada.actors.journal.inspection import inspect  # noqa: E402
from levada.framework.platform import REAL  # noqa: E402

LARGE = attrs.evolve(SMALL, segment_bytes=8192, block_bytes=512)
TINY = attrs.evolve(SMALL, block_bytes=512)
CONFIGS = pytest.mark.parametrize("config", [LARGE, TINY], ids=["in one segment", "over several segments"])


def places(path: Path) -> list[int]:
    """Return where the blocks of a segment begin, and its end."""
    octets = path.read_bytes()
    return [*(at for at in range(0, len(octets), 8) if octets[at : at + 4] == b"LvB1"), len(octets)]


def appended(directory: Path, config: JournalConfig) -> tuple[Path, Path]:
    """Make a journal of three rows, and append a hundred in several blocks; return copies from before and behind that append."""
    before, behind = directory / "before", directory / "behind"
    with Store.open(directory / "journal", SCHEMA, config) as store:
        store.append([(0, span(0, 3))])
        shutil.copytree(store.directory, before)
        store.append([(0, span(3, 103))])
        shutil.copytree(store.directory, behind)
    return before, behind


def cut_short(before: Path, behind: Path, target: Path, file: int, size: int) -> Path:
    """Make the journal that a process leaves which is killed when it has written so much of a file, and those before."""
    shutil.copytree(before, target)
    for path in segment_files(behind)[: file + 1]:
        shutil.copy(path, segment_files(target)[0].with_name(path.name))
    last = segment_files(target)[file]
    last.write_bytes(last.read_bytes()[:size])
    return target


@CONFIGS
def test_an_append_without_its_last_block_was_never_written(tmp_path: Path, config: JournalConfig) -> None:
    before, behind = appended(tmp_path, config)
    files = segment_files(behind)
    assert (len(files) == 1) == (config is LARGE)
    ends = [(file, at) for file, path in enumerate(files) for at in places(path)]
    begins = ends.index((0, segment_files(before)[0].stat().st_size))
    assert len(ends) - begins == (5 if config is LARGE else 7)
    for number, (file, at) in enumerate(ends[begins:-1]):
        for size in (at, at + 20):
            left = cut_short(before, behind, tmp_path / f"{number}-{size}", file, size)
            with inspect(left, blocks=True) as found:
                assert [each.kind for each in found.findings] == ["cut"] * ((file, size) != (0, at) or number > 0)
            with Store.open(left, SCHEMA, config) as store:
                assert numbers(store) == [0, 1, 2]
                store.append([(0, span(3, 103))])
                assert numbers(store) == list(range(103))
            with Store.open(left, SCHEMA, config) as store:
                assert (numbers(store), store.statistics().bytes_cut) == (list(range(103)), 0)


@CONFIGS
def test_a_finished_append_is_whole_to_an_inspection(tmp_path: Path, config: JournalConfig) -> None:
    """Also if a sealed segment ends in the middle of it, and nothing promised its rows yet."""
    before, behind = appended(tmp_path, config)
    for name in ("ends", "ledger.sqlite"):
        shutil.copy(before / name, behind / name)
    with inspect(behind, blocks=True) as found:
        assert found.findings == []
        assert found.partitions[0].end == 103


@CONFIGS
def test_rows_of_an_append_that_were_promised_are_not_cut_off_with_its_damaged_end(
    tmp_path: Path, config: JournalConfig
) -> None:
    _, behind = appended(tmp_path, config)
    last = segment_files(behind)[-1]
    last.write_bytes(last.read_bytes()[:-8])
    octets = [path.read_bytes() for path in segment_files(behind)]
    with pytest.raises(JournalDamaged, match="rows up to 103 were promised"):
        Store.open(behind, SCHEMA, config)
    assert [path.read_bytes() for path in segment_files(behind)] == octets
    with Store.open(behind, SCHEMA, attrs.evolve(config, accept_loss=True)) as store:
        assert numbers(store, 0, 0, 87) == list(range(87))
        with pytest.raises(OffsetGone, match="rows 87 to 102 were lost"):
            numbers(store, 0, 87)
        assert store.extent().end == {0: 103}


def test_an_append_is_promised_when_all_of_it_is_synced(tmp_path: Path) -> None:
    """Segments in the middle of it are synced when they are full, which says nothing about the rest."""
    config = attrs.evolve(TINY, sync="never")
    with Store.open(tmp_path, SCHEMA, config) as store:
        store.append([(0, span(0, 3))])
        store.append([(0, span(3, 103))])
        assert len(segment_files(tmp_path)) > 2
        assert Ends.read(REAL.files, tmp_path / "ends").end == [3]
        store.append([(0, span(103, 203))])
        assert Ends.read(REAL.files, tmp_path / "ends").end == [103]


def test_staged_rows_are_staged_whole_or_not_at_all(tmp_path: Path) -> None:
    """Else the task that sends them again is refused: some of them are there."""
    with Store.open(tmp_path, SCHEMA, LARGE) as store:
        stage = store.stage("q", 0, 0, 1)
        stage.append(span(0, 3))
        size = stage.size
        stage.append(span(3, 103))
        [path] = (tmp_path / "staging").iterdir()
    ends = places(path)
    assert len(ends) == 6
    octets = path.read_bytes()
    for end in ends[1:-1]:
        path.write_bytes(octets[:end])
        with Store.open(tmp_path, SCHEMA, LARGE) as store:
            stage = store.staged("q", 0)[0, 1]
            assert (stage.rows, stage.size) == (3, size)


def test_damage_in_a_synced_append_takes_its_own_block_and_what_is_behind(tmp_path: Path) -> None:
    """That it was synced is known from the append behind it, though nothing promised its rows yet."""
    with Store.open(tmp_path / "journal", SCHEMA, LARGE) as store:
        store.append([(0, span(0, 3))])
        shutil.copytree(store.directory, tmp_path / "before")
        store.append([(0, span(3, 103))])
        store.append([(0, span(103, 110))])
        behind = shutil.copytree(store.directory, tmp_path / "behind")
    for name in ("ends", "ledger.sqlite"):
        shutil.copy(tmp_path / "before" / name, behind / name)
    [path] = segment_files(behind)
    octets = bytearray(path.read_bytes())
    third = places(path)[3]
    octets[third + 60] ^= 1
    path.write_bytes(octets)
    with pytest.raises(JournalDamaged, match=f"the block at byte {third}, offset 59, is damaged"):
        Store.open(behind, SCHEMA, LARGE)
    with Store.open(behind, SCHEMA, attrs.evolve(LARGE, accept_loss=True)) as store:
        assert numbers(store) == list(range(59))
