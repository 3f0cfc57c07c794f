"""Compare and append: of two writers of a partition, one is refused, whatever else is in the same group."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

pytest.importorskip("levada.actors.journal", exc_type=ImportError)

from levada.actors.journal import (
    Append,
    Appended,
    CommitGroup,
    DeclareGroup,
    Fenced,
    GetJournalStatistics,
    Journal,
    JournalConfig,
    JournalError,
    SchemaMismatch,
    Store,
    columns_of,
)
from levada.framework import ActorSystem, Ref, bounded, message


@message("compare.Line")
class Line:
    number: int
    text: str = ""


COLUMNS = columns_of(Line)


def lines(*numbers: int) -> list[Line]:
    return [Line(n) for n in numbers]


@pytest.fixture
async def system() -> AsyncIterator[ActorSystem]:
    async with ActorSystem("test", seed=0, shutdown_timeout=5.0, ask_timeout=None) as system:
        yield system


class Held:
    """A clock that the writing thread reads before each write, and that can hold it up there."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()

    def __call__(self) -> float:
        assert self.open.wait(30)
        return time.time()


def spawn(system: ActorSystem, directory: Path, columns: Any = Line, **options: Any) -> Ref[Any]:
    options.setdefault("clean_every", 3600.0)
    return system.spawn(partial(Journal, directory, columns, **options), mailbox=bounded(256))


def written(directory: Path, config: JournalConfig | None = None) -> dict[int, list[int]]:
    """What is in the log, once the journal is closed."""
    with Store.open(directory, config=config) as store:
        return {
            number: [line.number for _, batch in store.batches(number, 0) for line in COLUMNS.decode(batch)]
            for number in store.extent().end
        }


async def together(journal: Ref[Any], clock: Held, questions: list[Any]) -> list[Any]:
    """Ask all while the writer is held up with an append of its own, so that they are one group; return the answers in order."""
    answers: list[Any] = [None] * len(questions)

    async def ask(place: int, question: Any) -> None:
        try:
            answers[place] = await journal.ask(question)
        except JournalError as error:
            answers[place] = error

    clock.open.clear()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(journal.ask, Append(lines(-1), partition=0))
        await wait_all_tasks_blocked()
        for place, question in enumerate(questions):
            nursery.start_soon(ask, place, question)
            await wait_all_tasks_blocked()
        clock.open.set()
    return answers


async def test_the_end_that_was_expected(system: ActorSystem, tmp_path: Path) -> None:
    journal = spawn(system, tmp_path)
    assert await journal.ask(Append(lines(1, 2), partition=0, at=0)) == Appended(0, 0, 2)
    assert await journal.ask(Append(lines(9), partition=0, at=0)) == Fenced(0, 2)
    assert await journal.ask(Append(lines(9), partition=0, at=3)) == Fenced(0, 2)
    assert await journal.ask(Append(COLUMNS.encode(lines(3)), key="any", at=2)) == Appended(0, 2, 1)
    assert (await journal.ask(GetJournalStatistics())).appends == 2
    journal.stop()
    await journal.terminated()
    assert written(tmp_path) == {0: [1, 2, 3]}


async def test_without_rows_it_only_compares(system: ActorSystem, tmp_path: Path) -> None:
    journal = spawn(system, tmp_path)
    await journal.ask(Append(lines(1)))
    syncs = (await journal.ask(GetJournalStatistics())).store.syncs
    assert await journal.ask(Append([], partition=0, at=1)) == Appended(0, 1, 0)
    assert await journal.ask(Append([], partition=0, at=0)) == Fenced(0, 1)
    assert (await journal.ask(GetJournalStatistics())).store.syncs == syncs
    with pytest.raises(JournalError, match="the partition is 1, wanted 0 to 0"):
        await journal.ask(Append([], partition=1, at=0))


def test_it_needs_a_partition() -> None:
    with pytest.raises(ValueError, match="say which, by partition= or key="):
        Append(lines(1), at=0)


async def test_of_one_group_one_wins(system: ActorSystem, tmp_path: Path) -> None:
    clock = Held()
    journal = spawn(system, tmp_path, clock=clock)
    answers = await together(journal, clock, [Append(lines(n), partition=0, at=1) for n in range(50)])
    assert answers == [Appended(0, 1, 1), *[Fenced(0, 2)] * 49]
    journal.stop()
    await journal.terminated()
    assert written(tmp_path) == {0: [-1, 0]}


async def test_each_of_a_group_sees_the_rows_before_it(system: ActorSystem, tmp_path: Path) -> None:
    """Also a record batch among messages, a wrong append, and one that compares nothing."""
    clock = Held()
    journal = spawn(system, tmp_path, clock=clock)
    *right, wrong, last = await together(
        journal,
        clock,
        [
            Append(lines(0, 1), partition=0, at=1),
            Append(lines(2), partition=0),
            Append(lines(7), partition=0, at=3),
            Append(COLUMNS.encode(lines(3, 4)), partition=0, at=4),
            Append([], partition=0, at=6),
            Append(["no row"], partition=0, at=6),
            Append(lines(5), partition=0, at=6),
        ],
    )
    assert right == [Appended(0, 1, 2), Appended(0, 3, 1), Fenced(0, 4), Appended(0, 4, 2), Appended(0, 6, 0)]
    assert isinstance(wrong, SchemaMismatch)
    assert last == Appended(0, 6, 1)
    journal.stop()
    await journal.terminated()
    assert written(tmp_path) == {0: [-1, 0, 1, 2, 3, 4, 5]}


async def test_an_append_that_waits_for_room_fences_nobody_before_it_is_written(
    system: ActorSystem, tmp_path: Path
) -> None:
    """Its asker may give up, and then the partition still ends where it did."""
    config = JournalConfig(segment_bytes=2048, block_bytes=1024, max_bytes=6144, retain_bytes=None)
    journal = spawn(system, tmp_path, config=config)
    await journal.ask(DeclareGroup("g"))
    answers: dict[int, Any] = {}

    async def ask(number: int, at: int) -> None:
        answers[number] = await journal.ask(Append([Line(number, "x" * 500)], partition=0, at=at))

    for end in range(4):  # there is room for as many
        await ask(end, end)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, 4, 4)
        await wait_all_tasks_blocked()
        nursery.start_soon(ask, 5, 4)
        while not (await journal.ask(GetJournalStatistics())).full:
            pass
        assert answers == {n: Appended(0, n, 1) for n in range(4)}
        await journal.ask(CommitGroup("g", {0: 4}))
    assert (answers[4], answers[5]) == (Appended(0, 4, 1), Fenced(0, 5))


async def test_rows_that_were_told_and_refused_are_logged(
    system: ActorSystem, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = spawn(system, tmp_path)
    with caplog.at_level(logging.ERROR, "levada.actors.journal"):
        journal.tell(Append(lines(1), partition=0, at=5))
        await journal.ask(Append(lines(2)))
    assert [record.getMessage() for record in caplog.records] == [
        "rows were told, not asked, and are lost: Fenced(partition=0, end=0)"
    ]


CONFIG = JournalConfig(partitions=2, segment_bytes=1 << 20, block_bytes=1 << 19)
QUESTIONS = st.tuples(
    st.integers(0, 1),  # the partition
    st.integers(0, 3),  # rows
    st.none() | st.integers(-1, 2),  # how far beyond the end as it should be
    st.sampled_from(["messages", "batch", "wrong"]),
)


@pytest.mark.ci
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(groups=st.lists(st.lists(QUESTIONS, max_size=8), max_size=3))
def test_groups_write_what_one_append_after_the_other_would(
    groups: list[list[tuple[int, int, int | None, str]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("journal")
    clock = Held()
    model: dict[int, list[int]] = {0: [], 1: []}

    async def main() -> None:
        async with ActorSystem("test", seed=0, ask_timeout=None) as system:
            journal = spawn(system, directory, config=CONFIG, clock=clock)
            for group in groups:
                model[0].append(-1)  # which held up the writer
                questions: list[Any] = []
                wanted: list[Any] = []
                for number, count, ahead, form in group:
                    rows = lines(*range(len(model[number]), len(model[number]) + count))
                    at = None if ahead is None else max(0, len(model[number]) + ahead)
                    sent = {"messages": rows, "batch": COLUMNS.encode(rows), "wrong": [object(), *rows]}[form]
                    questions.append(Append(sent, partition=number, at=at))
                    if form == "wrong" or (not count and (at is None or form == "batch")):
                        wanted.append(None)
                    elif at not in (None, len(model[number])):
                        wanted.append(Fenced(number, len(model[number])))
                    else:
                        wanted.append(Appended(number, len(model[number]), count))
                        model[number] += [row.number for row in rows]
                answers = await together(journal, clock, questions)
                assert [None if isinstance(answer, JournalError) else answer for answer in answers] == wanted

    trio.run(main)
    assert written(directory, CONFIG) == model
