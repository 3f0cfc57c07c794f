"""A journal that is asked through a ref of another system, over the memory carrier."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

pa = pytest.importorskip("pyarrow")
pytest.importorskip("levada.actors.journal", exc_type=ImportError)

from levada.actors.aqueduct import connect, serve  # noqa: E402
from levada.actors.journal import (  # noqa: E402
    Append,
    Appended,
    AwaitRows,
    Fenced,
    FindCommand,
    GetExtent,
    Journal,
    JournalConfig,
    JournalError,
    Keyed,
    ReadEntity,
    ReadRows,
    Rows,
    SchemaMismatch,
    columns_of,
    stream_of,
)
from levada.framework import ActorSystem, Codec, Ref, bounded, message  # noqa: E402
from levada.framework.errors import ActorError, RemoteFailure  # noqa: E402


@message("remote.Line")
class Line:
    number: int
    text: str = ""


@message("remote.Other")
class Other:
    number: int


COLUMNS = columns_of(Line)
CONFIG = JournalConfig(partitions=2, block_bytes=1 << 20)


def lines(*numbers: int) -> list[Line]:
    return [Line(n) for n in numbers]


async def nobody(_: Any) -> None:
    """Takes what comes by the entrypoint, which is nothing."""


@pytest.fixture
async def journal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Ref[Any]]:
    """The ref of a journal in another system."""
    async with ActorSystem("there", ask_timeout=None) as there, ActorSystem("here", ask_timeout=None) as here:
        there.registry.register(
            "log", there.spawn(partial(Journal, tmp_path, Line, config=CONFIG), mailbox=bounded(64))
        )
        async with (
            serve(there, "aqueduct+memory://keeper", nobody, Any, expose={"log"}) as listener,
            connect(here, listener.url, object) as peer,
        ):
            yield await peer.lookup("log", object)
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


async def read(journal: Ref[Any], partition: int, start: int = 0, **options: Any) -> list[int]:
    found: list[int] = []
    while (rows := await journal.ask(ReadRows(partition, start, **options))).count:
        assert isinstance(rows, Rows)
        assert (rows.partition, rows.first) == (partition, start)
        found += [line.number for line in COLUMNS.decode(rows.batch())]
        start = rows.end
    return found


async def test_messages_and_streams_are_appended_and_read(journal: Ref[Any]) -> None:
    assert await journal.ask(Append(lines(1, 2), partition=1)) == Appended(1, 0, 2)
    assert await journal.ask(Append(stream_of(COLUMNS.encode(lines(3, 4, 5))), partition=1, at=2)) == Appended(1, 2, 3)
    assert await journal.ask(Append(lines(6), partition=1, at=2)) == Fenced(1, 5)
    assert await read(journal, 1) == [1, 2, 3, 4, 5]
    assert await read(journal, 1, 3, max_bytes=1) == [4, 5]
    assert await read(journal, 0) == []
    extent = await journal.ask(GetExtent())
    assert (extent.first, extent.end) == ({0: 0, 1: 0}, {0: 0, 1: 5})


@message("remote.Event")
class Event:
    entity: str
    command: str
    number: int


@pytest.fixture
async def keyed(tmp_path: Path) -> AsyncIterator[Ref[Any]]:
    """The ref of a journal with keys in another system."""
    config = JournalConfig(keyed=Keyed(entity="entity", command="command"))
    async with ActorSystem("there", ask_timeout=None) as there, ActorSystem("here", ask_timeout=None) as here:
        there.registry.register(
            "log", there.spawn(partial(Journal, tmp_path, Event, config=config), mailbox=bounded(64))
        )
        async with (
            serve(there, "aqueduct+memory://keeper", nobody, Any, expose={"log"}) as listener,
            connect(here, listener.url, object) as peer,
        ):
            yield await peer.lookup("log", object)


async def test_entities_and_commands(keyed: Ref[Any]) -> None:
    events = [Event("anna", "c1", 1), Event("ben", "c1", 2), Event("anna", "c2", 3)]
    assert await keyed.ask(Append(events, partition=0, at=0)) == Appended(0, 0, 3)
    assert await keyed.ask(Append(events[:2], partition=0, at=0)) == Appended(0, 0, 0, repeated=2)
    found = await keyed.ask(ReadEntity("anna"))
    assert (found.count, found.next) == (2, None)
    assert found.batch().select(["offset", "number"]).to_pylist() == [
        {"offset": 0, "number": 1},
        {"offset": 2, "number": 3},
    ]
    taken = await keyed.ask(FindCommand(0, "c1"))
    assert taken.batch().column("number").to_pylist() == [1, 2]


@pytest.mark.parametrize(
    ("question", "kind"),
    [
        (Append([Event("anna", "c1", 9)], partition=0), "CommandReused"),
        (Append([Event("a", "x", 1), Event("a", "y", 1), Event("a", "x", 1)]), "JournalError"),
        (ReadEntity("anna", partition=-1), "JournalError"),
        (ReadEntity("anna", partition=1 << 60), "JournalError"),
        (FindCommand(5, "c1"), "JournalError"),
    ],
    ids=repr,
)
async def test_bad_keys_are_their_askers_error(keyed: Ref[Any], question: Any, kind: str) -> None:
    await keyed.ask(Append([Event("anna", "c1", 1)]))
    with pytest.raises(ActorError) as failed:
        await keyed.ask(question)
    assert isinstance(failed.value.__cause__, RemoteFailure)
    assert failed.value.__cause__.kind == kind
    assert (await keyed.ask(ReadEntity(b"anna\xff", start=-7))).count == 0
    assert (await keyed.ask(FindCommand(0, b"c1"))).count == 1
    assert (await keyed.ask(GetExtent())).end == {0: 1}


async def test_a_journal_without_keys_says_so(journal: Ref[Any]) -> None:
    with pytest.raises(ActorError, match=r"open it with Keyed\(entity=\)"):
        await journal.ask(ReadEntity("anna"))


async def test_waiting_for_rows(journal: Ref[Any]) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(journal.ask, Append(lines(1), partition=0))
        assert (await journal.ask(AwaitRows({}, 1))).end == {0: 1, 1: 0}


@pytest.mark.parametrize(
    ("question", "kind"),
    [
        (Append([Other(1)]), "SchemaMismatch"),
        (Append([1, 2]), "SchemaMismatch"),
        (Append("text"), "SchemaMismatch"),
        (Append([]), "JournalError"),
        (Append(b""), "SchemaMismatch"),
        (Append(b"\xff" * 1000), "SchemaMismatch"),
        (Append(stream_of(COLUMNS.encode(lines(1)))[:-20]), "SchemaMismatch"),
        (Append(stream_of(columns_of(Other).encode([Other(1)]))), "SchemaMismatch"),
        (Append(stream_of(pa.record_batch([pa.nulls(10**9)], names=["number"]))), "SchemaMismatch"),
        (Append(lines(1), partition=7), "JournalError"),
        (Append([Line(1 << 62, "\0" * 1000)], partition=-1), "JournalError"),
        (ReadRows(2, 0), "JournalError"),
        (ReadRows(0, -5), "JournalError"),
        (ReadRows(0, 1 << 60), "JournalError"),
    ],
    ids=repr,
)
async def test_a_bad_question_is_its_askers_error_and_nobody_elses(journal: Ref[Any], question: Any, kind: str) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(journal.ask, Append(lines(1), partition=0))
        with pytest.raises(ActorError) as failed:
            await journal.ask(question)
        cause = failed.value.__cause__
        assert isinstance(cause, RemoteFailure)
        assert cause.kind == kind
    assert await read(journal, 0) == [1]


async def test_a_question_that_cannot_be_made_is_refused_where_it_arrives(journal: Ref[Any]) -> None:
    """Its class checks its values again at the journal's side."""
    question = Append(lines(1), partition=0)
    object.__setattr__(question, "rows", 7)
    with pytest.raises(ActorError):
        await journal.ask(question)
    assert (await journal.ask(GetExtent())).end == {0: 0, 1: 0}


async def test_a_block_too_large_for_a_message_is_refused_by_name(tmp_path: Path) -> None:
    async with ActorSystem("here", ask_timeout=None) as system:
        journal: Ref[Any] = system.spawn(partial(Journal, tmp_path, Line), mailbox=bounded(4))
        await journal.ask(Append([Line(1, "x" * (9 << 20))]))
        await journal.ask(Append([Line(2, "x" * (16 << 20))]))
        assert (await journal.ask(ReadRows(0, 0))).count == 1
        with pytest.raises(JournalError, match="answers have at most 15728640: lower block_bytes"):
            await journal.ask(ReadRows(0, 1))


def test_rows_of_a_peer_are_checked_when_they_are_used() -> None:
    rows = Codec().decode(Codec().encode(Rows(0, 0, 1, b"nonsense")), Rows)
    with pytest.raises(SchemaMismatch, match="these bytes are not rows"):
        rows.batch()
