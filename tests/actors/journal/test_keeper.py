"""A journal in a process of its own."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio

pa = pytest.importorskip("pyarrow")
pytest.importorskip("levada.actors.journal", exc_type=ImportError)

from tests.actors.nodes.processes import is_alive  # noqa: E402

from levada.actors.journal import (  # noqa: E402
    Append,
    Appended,
    Erased,
    EraseEntity,
    Fenced,
    GetExtent,
    JournalConfig,
    JournalLocked,
    Keeper,
    Keyed,
    ReadEntity,
    ReadRows,
    SchemaMismatch,
    Store,
    columns_of,
    keeper,
    stream_of,
)
from levada.actors.metrics import Metrics  # noqa: E402
from levada.actors.nodes import NodeDown, NodeUp, local_nodes  # noqa: E402
from levada.actors.nodes.fleet import Fleet  # noqa: E402
from levada.framework import ActorSystem, Ref, message  # noqa: E402
from levada.framework.errors import ActorError  # noqa: E402

pytestmark = pytest.mark.ci


@message("kept.Row")
class Row:
    entity: str
    number: int


COLUMNS = columns_of(Row)
CONFIG = JournalConfig(partitions=2, keyed=Keyed(entity="entity", body=("number",)))


def rows(*numbers: int) -> bytes:
    return stream_of(COLUMNS.encode([Row(f"e{n % 3}", n) for n in numbers]))


async def numbers(journal: Ref[Any], partition: int) -> list[int]:
    found: list[int] = []
    at = 0
    while (answer := await journal.ask(ReadRows(partition, at))).count:
        found += answer.batch().column("number").to_pylist()
        at = answer.end
    return found


@pytest.fixture
async def keep() -> AsyncIterator[Keeper]:
    async with ActorSystem(ask_timeout=150.0) as system, keeper(system) as keep:
        yield keep


async def test_it_is_asked_as_a_journal_of_this_process(keep: Keeper, tmp_path: Path) -> None:
    journal = await keep.open(tmp_path / "one", Row, config=CONFIG, name="one")
    other = await keep.open(tmp_path / "two", Row)
    assert journal.path == "/one"
    assert await journal.ask(Append(rows(1, 2, 3, 4), partition=1, at=0)) == Appended(1, 0, 4)
    assert await journal.ask(Append(rows(5), partition=1, at=0)) == Fenced(1, 4)
    assert (await journal.ask(ReadEntity("e1", partition=1, newest=1))).batch().column("number").to_pylist() == [4]
    assert await journal.ask(EraseEntity("e1", partition=1)) == Erased(1, 2)
    assert await numbers(journal, 1) == [2, 3]
    assert await other.ask(Append(rows(7))) == Appended(0, 0, 1)
    found = {metric.name: values for metric, values in (await Metrics(keep.nodes.system).collect()).items()}
    assert found["levada_journal_appended_rows_total"] == {("keeper", "one"): 4, ("keeper", "two"): 1}
    assert found["levada_journal_rows"] == {("keeper", "one"): 4, ("keeper", "two"): 1}
    assert found["levada_node_up"] == {("keeper",): 1}
    with pytest.raises(JournalLocked):
        Store.open(tmp_path / "one", COLUMNS.schema, CONFIG)
    with pytest.raises(JournalLocked):
        await keep.open(tmp_path / "one", Row, config=CONFIG)
    closed = tmp_path / "closed"
    Store.open(closed, COLUMNS.schema).close()
    with pytest.raises(SchemaMismatch):
        await keep.open(closed, pa.schema([("other", pa.string())]))
    if sys.platform == "linux":
        libraries = await trio.Path(f"/proc/{keep.nodes[keep.name].pid}/maps").read_text()
        assert "/pyarrow/" in libraries
        assert "/pandas/" not in libraries


async def test_appends_of_one_sender_stay_in_order(keep: Keeper, tmp_path: Path) -> None:
    journal = await keep.open(tmp_path, Row)
    for n in range(100):
        await journal.send(Append(rows(n)))
    assert await journal.ask(Append(rows(100))) == Appended(0, 100, 1)
    assert await numbers(journal, 0) == list(range(101))


async def test_after_a_kill_the_same_ref_goes_on_and_every_answered_row_is_there(keep: Keeper, tmp_path: Path) -> None:
    """One writer that appends by compare-and-append, and finds out after each failure what was written."""
    journal = await keep.open(tmp_path, Row)
    written = failures = 0

    async with keep.nodes.events() as events, trio.open_nursery() as nursery:

        async def kill() -> None:
            for _ in range(3):
                pid = keep.nodes[keep.name].pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
                while not isinstance(await events.receive(), NodeUp):
                    pass
            nursery.cancel_scope.cancel()

        nursery.start_soon(kill)
        while True:
            try:
                answer = await journal.ask(Append(rows(written), partition=0, at=written))
            except ActorError:
                failures += 1
                await trio.sleep(0.05)
                continue
            assert answer == Appended(0, written, 1) or answer == Fenced(0, written + 1)
            written += 1
    with trio.move_on_after(30):
        while True:
            try:
                extent = await journal.ask(GetExtent())
                break
            except ActorError:
                await trio.sleep(0.05)
    assert failures > 0
    assert extent.end[0] in (written, written + 1)
    assert await numbers(journal, 0) == list(range(extent.end[0]))


async def test_while_it_is_away_questions_fail_with_a_text(keep: Keeper, tmp_path: Path) -> None:
    journal = await keep.open(tmp_path, Row, name="log")
    async with keep.nodes.events() as events:
        pid = keep.nodes[keep.name].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert isinstance(await events.receive(), NodeDown)
        with pytest.raises(ActorError, match="/log has no routees now"):
            await journal.ask(Append(rows(1)))
        assert isinstance(await events.receive(), NodeUp)


async def test_leaving_the_block_writes_what_was_told_and_ends_the_process(tmp_path: Path) -> None:
    async with ActorSystem(ask_timeout=150.0) as system:
        async with keeper(system, name="k1") as keep:
            journal = await keep.open(tmp_path, Row)
            pid = keep.nodes["k1"].pid
            assert pid is not None
            assert await journal.ask(Append(rows(0))) == Appended(0, 0, 1)
            for n in range(1, 20):
                journal.tell(Append(rows(n)))
        assert not is_alive(pid)
    with Store.open(tmp_path) as store:
        found = [n for _, batch in store.batches(0, 0) for n in batch.column("number").to_pylist()]
    assert found == list(range(20))


async def test_leaving_the_block_can_be_cancelled_while_the_process_stands_still(tmp_path: Path) -> None:
    async with ActorSystem(ask_timeout=150.0) as system, trio.open_nursery() as nursery:
        left: list[tuple[Ref[Any], int]] = []
        with trio.CancelScope() as scope:

            async def cancel() -> None:
                await trio.testing.wait_all_tasks_blocked(0.01)
                scope.cancel()

            async with keeper(system, name="k1") as keep:
                journal = await keep.open(tmp_path, Row)
                pid = keep.nodes["k1"].pid
                assert pid is not None
                assert await journal.ask(Append(rows(0))) == Appended(0, 0, 1)
                os.kill(pid, signal.SIGSTOP)
                journal.tell(Append(rows(1)))
                left += [(journal, pid)]
                nursery.start_soon(cancel)
        assert scope.cancelled_caught
        [(ref, number)] = left
        assert not ref.is_alive
        assert not is_alive(number)
    with Store.open(tmp_path) as store:
        assert store.extent().end[0] >= 1


async def test_any_node_is_no_keeper(tmp_path: Path) -> None:
    async with (
        ActorSystem(ask_timeout=150.0) as system,
        keeper(system) as keep,
        local_nodes(system, 1, "levada.actors.journal.keeper_process:app", names=["worker"]) as nodes,
    ):
        assert isinstance(nodes, Fleet)
        assert {nodes.choose("any").name for _ in range(4)} == {"worker"}
        assert nodes.choose(keep.name).name == "keeper"


async def test_a_restart_of_all_nodes_leaves_keepers_alone(tmp_path: Path) -> None:
    async with (
        ActorSystem(ask_timeout=150.0) as system,
        keeper(system) as keep,
        local_nodes(system, 1, "levada.actors.journal.keeper_process:app", names=["worker"]) as nodes,
    ):
        journal = await keep.open(tmp_path, Row)
        before = {member.name: member.pid for member in nodes.members}
        await nodes.restart()
        after = {member.name: member.pid for member in nodes.members}
        assert after["keeper"] == before["keeper"]
        assert after["worker"] != before["worker"]
        await nodes.restart(rolling=False)
        assert nodes["keeper"].pid == before["keeper"]
        assert await journal.ask(Append(rows(0))) == Appended(0, 0, 1)
        await nodes.restart("keeper")
        assert nodes["keeper"].pid != before["keeper"]
