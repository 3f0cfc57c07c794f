"""Blocks that were read for rows here and there are kept for the next reader: within bounds, never unchecked, and not behind a file that is gone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

pa = pytest.importorskip("pyarrow")
pytest.importorskip("levada.actors.journal", exc_type=ImportError)

from levada.actors.journal import (  # noqa: E402
    Append,
    Found,
    Journal,
    JournalConfig,
    JournalDamaged,
    JournalError,
    Keyed,
    ReadEntity,
    Store,
    columns_of,
    kept_blocks,
    reading,
)
from levada.framework import ActorSystem, message  # noqa: E402


@message("kept_blocks.Event")
class Event:
    entity: str
    amount: int
    text: str


COLUMNS = columns_of(Event)
ENTITIES = 5
CONFIG = JournalConfig(
    keyed=Keyed(entity="entity"), segment_bytes=16_384, block_bytes=2048, retain_bytes=None, sync="never"
)


def open_store(folder: Path, config: JournalConfig = CONFIG) -> Store:
    return Store.open(folder, COLUMNS.schema, config)


def fill(store: Store, groups: int, at: int = 0, size: int = 50) -> None:
    """Append groups with a row of each entity, so that the rows of each are scattered."""
    for group in range(groups):
        rows = [Event(f"e{entity}", ENTITIES * (at + group) + entity, "x" * size) for entity in range(ENTITIES)]
        store.append([(0, COLUMNS.encode(rows))])


def amounts(store: Store, entity: int, **more: Any) -> list[int]:
    return [
        amount
        for _, rows in store.rows_of(f"e{entity}", partition=0, **more)
        for amount in rows.column("amount").to_pylist()
    ]


def mapped(folder: Path) -> set[str]:
    """The segments that this process has mapped, as Linux names them: files without a name are ``(deleted)``."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {
        line.split(maxsplit=5)[5] for line in lines if str(folder / "partition-0000") in line and ".index" not in line
    }


@pytest.mark.parametrize("bound", ["usual", "few blocks", "one file"])
def test_readers_see_the_same_rows_whatever_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    if bound == "few blocks":
        monkeypatch.setattr(kept_blocks, "MOST_BYTES", 10_000)
    if bound == "one file":
        monkeypatch.setattr(kept_blocks, "MOST_FILES", 1)
    monkeypatch.setattr(kept_blocks, "GROWTH", 1000)
    choice = random.Random(0)
    with open_store(tmp_path) as store:
        wanted: dict[int, list[int]] = {entity: [] for entity in range(ENTITIES)}
        for at in range(24):
            fill(store, 3, 3 * at)
            for entity in range(ENTITIES):
                wanted[entity] += range(ENTITIES * 3 * at + entity, ENTITIES * 3 * (at + 1), ENTITIES)
            if at % 10 == 9:
                gone = choice.randrange(ENTITIES)
                assert sum(store.erase(f"e{gone}", partition=0)) == len(wanted[gone])
                wanted[gone] = []
            for entity in choice.sample(range(ENTITIES), 2):
                assert amounts(store, entity) == wanted[entity]
        for entity in range(ENTITIES):
            assert amounts(store, entity) == wanted[entity]
        assert store.statistics().segments > 2


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux tells what is mapped")
def test_a_file_that_is_erased_from_or_deleted_is_let_go_at_once(tmp_path: Path) -> None:
    # Smaller files are not mapped, but copied.
    config = attrs.evolve(CONFIG, segment_bytes=200_000)
    with open_store(tmp_path, config) as store:
        store.declare_group("reader")
        fill(store, 100, size=2000)
        assert len(amounts(store, 1)) == 100
        kept = mapped(tmp_path)
        assert len(kept) >= store.statistics().segments - 1 > 2  # the last one is small
        assert sum(store.erase("e2", partition=0)) == 100
        assert amounts(store, 2) == []
        assert not [path for path in mapped(tmp_path) if "deleted" in path or ".old" in path]
        assert len(amounts(store, 1)) == 100
        assert len(mapped(tmp_path)) == len(kept)
        store.commit_group("reader", {0: store.end(0)})
        assert store.statistics().segments == 1
        assert len(mapped(tmp_path)) <= 1
    assert mapped(tmp_path) == set()


@pytest.mark.parametrize("read_before", [False, True])
def test_a_damaged_block_is_never_believed(tmp_path: Path, read_before: bool) -> None:
    with open_store(tmp_path) as store:
        fill(store, 100)
    path = min((tmp_path / "partition-0000").glob("*.segment"))
    data = bytearray(path.read_bytes())
    at = data.rindex(b"x" * 50)  # of the last entity, in the last block of the first segment
    data[at] ^= 1
    path.write_bytes(data)
    with open_store(tmp_path) as store:
        if read_before:
            assert amounts(store, 1, start=store.extent().end[0] - 50)  # a later segment is sound
        for _ in range(2):
            with pytest.raises(JournalDamaged, match="is damaged"):
                amounts(store, 0)


def test_the_memory_of_kept_blocks_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = kept_blocks.KeptBlocks()
    monkeypatch.setattr("levada.actors.journal.recovery.KeptBlocks", lambda: memory)
    with open_store(tmp_path) as store:
        fill(store, 100)
        assert len(amounts(store, 1)) == 100
        whole = memory.bytes
        assert whole > 50 * 512
        monkeypatch.setattr(kept_blocks, "MOST_BYTES", whole // 4)
        assert sum(store.erase("e2", partition=0)) == 100  # each file has another one in its place
        assert memory.bytes == 0
        assert len(amounts(store, 1)) == 100
        assert 0 < memory.bytes <= whole // 4
    assert memory.bytes == 0


async def test_entities_that_are_read_together_get_their_own_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[int] = []
    real = reading.entities_of

    def noted(store: Store, questions: Any) -> Any:
        turns.append(len(questions))
        return real(store, questions)

    monkeypatch.setattr("levada.actors.journal.actor.entities_of", noted)
    monkeypatch.setattr(reading, "ENOUGH", 1500)  # bytes: three entities or so
    answers: dict[int, list[int] | str] = {}
    async with ActorSystem() as system:
        journal = system.spawn(lambda: Journal(tmp_path, Event, config=CONFIG))
        for group in range(8):
            await journal.ask(Append([Event(f"e{entity}", 30 * group + entity, "x" * 50) for entity in range(30)]))

        async def read(number: int) -> None:
            since = "text" if number % 7 == 3 else None  # no column of offsets
            try:
                found: Found = await journal.ask(
                    ReadEntity(f"e{number}", partition=0, stream=number % 2 == 0, since=since)
                )
                answers[number] = found.batch().column("amount").to_pylist()
            except JournalError as error:
                answers[number] = error.detail

        async with trio.open_nursery() as nursery:
            for number in range(30):
                nursery.start_soon(read, number)
    wanted: dict[int, Any] = {number: [30 * group + number for group in range(8)] for number in range(30)}
    wanted |= dict.fromkeys(range(3, 30, 7), "since is 'text', wanted a column of whole numbers")
    assert answers == wanted
    assert max(turns) > 1
