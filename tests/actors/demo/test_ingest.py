"""The way of lines into the journal: how they are parsed, and that each is in it once, however often it comes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")

from levada.actors.demo.ingest import LineIntake  # noqa: E402
from levada.actors.demo.numbers import MOST, NumberSet  # noqa: E402
from levada.actors.demo.parsing import Ingest, lines_of  # noqa: E402
from levada.actors.demo.rows import Lines, LogLine  # noqa: E402
from levada.actors.journal import Journal, JournalConfig, Read, columns_of  # noqa: E402
from levada.actors.journal.ipc import rows_of_stream  # noqa: E402
from levada.actors.lumberjack import Origin, Unit, connect, serve  # noqa: E402
from levada.actors.spark.bridge import Mailbox  # noqa: E402
from levada.framework import ActorSystem, Ref, handles  # noqa: E402

ORIGIN = Origin("0" * 32, "192.0.2.7:5044", 2)
WRITER = "0123456789ab"
ACCESS = '1.2.3.4 - - [17/May/2015:10:05:03 +0000] "GET / HTTP/1.1" 200 1 "-" "x"'


def event(line: str, number: int | None = None, **more: str) -> dict[str, Any]:
    stamp = {} if number is None else {"stamp": f"{WRITER}-{number}"}
    return {"line": line, "host": "web", "file": "/log", "offset": "17", **stamp, **more}


def unit(*events: dict[str, Any]) -> Unit:
    return Unit(list(events), ORIGIN, 1)


def rows(lines: Lines) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = rows_of_stream(lines.rows).to_pylist()
    return found


def test_lines_of_each_file_and_writer_go_apart_with_their_numbers() -> None:
    found = lines_of(unit(event(ACCESS, 4), event("b", 5), event("c", 6, file="/other"), event("d", 7), event("e")))
    assert [(each.host, each.file, each.writer, each.numbers) for each in found] == [
        ("web", "/log", WRITER, [(4, 5), (5, 6), (7, 8)]),
        ("web", "/other", WRITER, [(6, 7)]),
        ("web", "/log", "", []),
    ]
    assert rows(found[0])[0] == {"source": "access", "offset": 17, "text": ACCESS}
    assert [row["text"] for row in rows(found[0])] == [ACCESS, "b", "d"]


def test_numbers_that_follow_each_other_are_one_range() -> None:
    [lines] = lines_of(unit(*(event("x", number) for number in range(1000, 1004))))
    assert lines.numbers == [(1000, 1004)]


@pytest.mark.parametrize("stamp", ["2015-05-17", f"{WRITER}-", "0123456789AB-1", f"{WRITER}-{10**18}"])
def test_a_field_that_only_looks_like_a_number_numbers_no_line(stamp: str) -> None:
    [lines] = lines_of(unit(event("x", stamp=stamp)))
    assert (lines.writer, lines.numbers) == ("", [])


def test_what_a_shipper_sends_never_ends_the_way() -> None:
    """Bytes that were not UTF-8, halves of surrogate pairs, offsets that are none, fields of other programs."""
    latin = b"caf\xe9".decode("utf-8", "surrogateescape")
    [lines] = lines_of(unit(event(latin, offset="9" * 19), event("\ud83d", offset="-1"), event("y", offset="seven")))
    assert [(row["text"], row["offset"]) for row in rows(lines)] == [("caf\ufffd", 0), (r"\ud83d", 0), ("y", 0)]
    [lines] = lines_of(unit({"message": "from a Beat", "host": {"name": "h"}, "offset": 3}))
    assert (lines.host, lines.file) == ("192.0.2.7:5044", "")
    assert rows(lines) == [{"source": "other", "offset": 0, "text": "from a Beat"}]


def numbered(*numbers: int) -> Lines:
    [lines] = lines_of(unit(*(event(str(number), number) for number in numbers)))
    return lines


def opened(system: ActorSystem, folder: Path) -> Mailbox[LogLine]:
    journal = system.spawn(partial(Journal, folder, LogLine, config=JournalConfig(sync="never")))
    return Mailbox("logs", journal, columns_of(LogLine))


async def texts(journal: Ref[Any]) -> list[str]:
    found = [row for block in await journal.ask(Read(0, 0)) for row in block.batch().to_pylist()]
    assert {(row["host"], row["file"], row["source"], row["offset"]) for row in found} == {("web", "/log", "other", 17)}
    return [row["text"] for row in found]


async def test_a_line_that_comes_again_is_in_the_journal_once(tmp_path: Path) -> None:
    async with ActorSystem() as system:
        logs = opened(system, tmp_path)
        intake = system.spawn(LineIntake, logs)
        for lines in (
            numbered(0, 1, 2),
            numbered(6, 7),
            numbered(0, 1, 2),
            numbered(2, 3, 4, 5, 6),
            numbered(*range(8)),
        ):
            await intake.ask(lines)
        assert await texts(logs.ref) == ["0", "1", "2", "6", "7", "3", "4", "5"]
        [without] = lines_of(unit(event("x")))
        await intake.ask(without)
        await intake.ask(without)
        assert (await texts(logs.ref))[8:] == ["x", "x"]


async def test_a_window_that_is_sent_again_is_in_the_journal_once(tmp_path: Path) -> None:
    """The reader ends after the lines are on the disk and before they are acknowledged; the next reader gets them again."""
    async with ActorSystem() as system:
        logs = opened(system, tmp_path)
        intake = system.spawn(LineIntake, logs)
        lost = False

        class Losing(Ingest):
            @handles
            async def take(self, unit: Unit) -> None:
                nonlocal lost
                await super().take(unit)
                if not lost:
                    lost = True
                    raise ConnectionResetError("the node was killed")

        async with serve(system, "lumberjack+memory://logs", partial(Losing, intake)) as reader:
            async with connect(system, reader.url, stamp=True) as writer:
                await writer.deliver([event(str(number)) for number in range(3000)])
            assert reader.statistics().sink_failures == 1
        assert lost
        assert sorted(map(int, await texts(logs.ref))) == list(range(3000))


RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 8)).map(lambda each: (each[0], each[0] + each[1])))


@given(st.lists(RANGES))
def test_numbers_are_a_set(many: list[list[tuple[int, int]]]) -> None:
    known, model = NumberSet(), set[int]()
    for ranges in many:
        numbers = [number for first, end in ranges for number in range(first, end)]
        assert known.new(ranges) == [number not in model for number in numbers]
        known.add(ranges)
        model.update(numbers)
    assert [number for first, end in known.ranges for number in range(first, end)] == sorted(model)
    assert all(end < first for (_, end), (first, _) in zip(known.ranges, known.ranges[1:], strict=False))


def test_numbers_with_many_gaps_are_bounded() -> None:
    known = NumberSet()
    known.add((2 * number, 2 * number + 1) for number in range(10 * MOST))
    assert known.ranges[0] == (18 * MOST, 18 * MOST + 1)
    assert len(known.ranges) == MOST


def test_lines_go_in_parts_that_a_connection_carries() -> None:
    """A few lines of a megabyte; the numbers stay with their lines."""
    long = "x" * (1 << 20)
    found = lines_of(unit(*(event(long, number) for number in range(5)), event("y", 5)))
    assert [each.numbers for each in found] == [[(0, 2)], [(2, 4)], [(4, 6)]]
    assert all(len(each.rows) < 9 << 20 for each in found)
