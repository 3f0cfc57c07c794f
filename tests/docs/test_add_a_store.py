"""The log of ``docs/how-to/add-a-store.md``: it keeps its promises, and `check_log` finds each mistake in it."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.packages import modules_of, run

pytest.importorskip("pyarrow")

import pyarrow as pa

from levada.actors.durable.testing import MadeLog, log_checks
from levada.actors.journal import JournalError
from levada.framework import ActorSystem

MODULES = modules_of("add-a-store.md")
CHECKS = {check.name: check for check in log_checks(timeout=300.0)}
MISTAKES = [
    ("an_append_elsewhere_is_fenced_and_writes_nothing", "if stop != at:", "if stop < at:"),
    ("an_append_elsewhere_is_fenced_and_writes_nothing", "return Fenced(shard, stop)", "return Fenced(shard, at)"),
    ("an_append_that_is_sent_again_is_written_once", "if stop != at:", "if False:"),
    ("of_appends_for_one_place_one_is_written", "stop FROM ends WHERE shard = ?\", (shard,)", "?\", [vars(self).setdefault('', at)]"),
    ("appends_get_offsets_without_gaps_in_each_partition", "(end, shard))", "(end + 1, shard))"),
    ("appends_get_offsets_without_gaps_in_each_partition", "WHERE shard = ? AND {where}", "WHERE shard <> ? + 9 AND {where}"),
    ("the_rows_of_an_entity_are_found", "places[::-1], rows[::-1], None", "places, rows, None"),
    ("the_rows_of_an_entity_are_found", "if m.since is not None:", "if False:"),
    ("the_rows_of_an_entity_are_found", "entity = ? AND place >= ? ORDER BY place\"", "entity >= ? AND place >= ? ORDER BY place\""),
    ("large_appends_are_whole_and_are_read_in_pages", "return places, rows, place", "return places, rows, None"),
    ("ranges_of_rows_are_exact", "AND place < ? ORDER BY", "AND place <= ? ORDER BY"),
    ("rows_of_other_columns_are_refused_and_not_written", "if not rows.schema.equals(self.columns):", "if False:"),
    ("erased_rows_are_gone_and_the_others_keep_their_offsets", " if places[n] == places[0] + n]", "]"),
    ("erased_rows_are_gone_and_the_others_keep_their_offsets", "entity = ? AND place < ?\"", "entity = ? AND place <= ?\""),
    ("copied_rows_keep_their_offsets", "m.end, places, ", "m.end, range(m.at, m.end), "),
    ("copied_rows_keep_their_offsets", "m.at, m.end, places", "m.at, m.end - 1, places"),
    ("a_copy_elsewhere_is_fenced_and_writes_nothing", "if stop != at:", "if stop < at:"),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, (text, _) in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def test_the_page_has_a_log_and_two_programs() -> None:
    assert list(MODULES) == ["sqlite_log", "check_store", "use_store"]
    assert len(MODULES["sqlite_log"][0].splitlines()) < 200


@pytest.mark.ci
@pytest.mark.parametrize("program", ["check_store", "use_store"])
def test_a_program_prints_what_the_page_says(program: str, folder: Path) -> None:
    done = run(folder, f"{program}.py")
    assert (done.stdout, done.stderr, done.returncode) == (MODULES[program][1], "", 0)


@pytest.fixture
def module() -> Iterator[ModuleType]:
    found = sys.modules["sqlite_log_with_a_mistake"] = ModuleType("sqlite_log_with_a_mistake")
    yield found
    del sys.modules[found.__name__]


@pytest.mark.ci
@pytest.mark.parametrize(("name", "right", "wrong"), MISTAKES)
async def test_a_mistake_in_a_store_is_found(
    name: str, right: str, wrong: str, tmp_path: Path, module: ModuleType
) -> None:
    text = MODULES["sqlite_log"][0]
    assert text.count(right) >= 1

    async def check(code: str) -> None:
        exec(compile(code, "<sqlite_log>", "exec"), vars(module))
        log: Any = module.SqliteLog

        @asynccontextmanager
        async def make(columns: pa.Schema, partitions: int) -> AsyncIterator[MadeLog]:
            async with ActorSystem("test", ask_timeout=60.0) as system:
                file = tmp_path / f"{len(code)}.db"
                one, two = (system.spawn(log, str(file), columns, partitions) for _ in range(2))
                yield MadeLog(system=system, ref=one, other=two, copied=True)

        await CHECKS[name](make)

    await check(text)
    with pytest.raises((AssertionError, JournalError, ExceptionGroup)):
        await check(text.replace(right, wrong))
