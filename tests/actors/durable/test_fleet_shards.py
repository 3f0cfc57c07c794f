"""Durable actors of a fleet: the same line on every node, whichever comes first, and what survives which loss."""

from __future__ import annotations

import errno
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

pytest.importorskip("pyarrow")

from tests.actors.nodes.apps import Counter, Leave
from tests.actors.nodes.conftest import Task, nodes_here

from levada.actors.durable import ShardLost, log_columns, log_config, opening, shard, shards, shards_of
from levada.actors.durable.access import Access
from levada.actors.journal import Journal, JournalFull, JournalLocked
from levada.actors.nodes import NodeLost, Nodes, NodeSettings, NodeUp
from levada.framework import ActorSystem, restart
from levada.framework.embedding import restart_actor
from levada.framework.errors import ConfigurationError, NameTaken

from . import sums
from .sums import LATE, SUMS, SYSTEMS, Add, Added, Double, Doubled, Open, Opener, Sum, Where
from .test_refusals import Disk

APP = "tests.actors.durable.sums:app"
PLAIN = "tests.actors.durable.sums:plain"
AGAIN = restart("permanent", max=1000, initial_backoff=0.01, max_backoff=0.01)


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path) -> None:
    """Forget the shards of the test before."""
    for kept in (SUMS, SYSTEMS, LATE, sums.SETTINGS):
        kept.clear()
    sums.SETTINGS.update(journal=tmp_path / "log", shards=4)


@asynccontextmanager
async def fleet(n: int = 2, app: str = APP) -> AsyncIterator[tuple[Nodes, list[Task]]]:
    settings = NodeSettings(start_timeout=30.0, drain_timeout=5.0, restart=AGAIN)
    async with (
        ActorSystem("driver", shutdown_timeout=100.0, ask_timeout=60.0) as system,
        nodes_here(system, n, app, settings=settings) as (nodes, tasks),
    ):
        SYSTEMS["driver"] = system
        yield nodes, tasks


async def test_the_same_line_opens_the_same_shards_on_every_node_before_its_yield_and_in_the_driver() -> None:
    async with fleet(3) as (nodes, _):
        SUMS["driver"] = await shards(SYSTEMS["driver"], Sum, events=Added, nodes=nodes, **sums.SETTINGS)
        assert [await each["x"].ask(Add(1)) for each in SUMS.values()] == [1, 2, 3, 4]
        assert await SUMS["n0"]["early"].ask(Add(0)) == 3
        assert {await SUMS["n1"][f"e{i}"].ask(Where()) for i in range(20)} == {"n0", "n1", "n2"}
        for name, system in SYSTEMS.items():
            more: dict[str, Any] = {"nodes": nodes} if name == "driver" else {}
            assert await shards(system, Sum, events=Added, **sums.SETTINGS, **more) is SUMS[name]
            assert await shards_of(system, Sum) is SUMS[name]
        opener = await nodes.spawn(Opener, on="n1")
        assert await opener.ask(Open()) == 1


async def test_the_shards_survive_the_loss_of_every_node_and_of_the_one_that_opened_them() -> None:
    async with fleet(2) as (nodes, tasks), nodes.events() as events:
        total = 0
        for name in ("n0", "n1", "n0"):
            [task] = [task for task in tasks if task.run.name == name and not task.gone.is_set()]
            task.kill()
            other = SUMS["n1" if name == "n0" else "n0"]
            for number in range(3):
                total += 1
                assert await other["x"].ask(Add(1), command=f"{total} {number}") == total
            while not isinstance(await events.receive(), NodeUp):
                pass
        assert await SUMS["n0"]["x"].ask(Add(0)) == total
        assert await SUMS["n0"]["early"].ask(Add(0)) == 5


async def test_an_app_that_is_told_to_end_uses_the_shards_to_its_end() -> None:
    async with fleet(2, "tests.actors.durable.sums:late") as (nodes, _):
        await nodes.drain("n0")
        assert LATE == [1] * 10
    assert LATE == [1] * 10 + [2] * 10  # on the only node


async def test_shards_of_a_node_that_has_ended_are_an_error_at_once_when_all_nodes_end() -> None:
    async with fleet(2, "tests.actors.durable.sums:last"):
        there = [await (await shards_of(SYSTEMS["n1"], Sum))[f"e{i}"].ask(Where()) for i in range(10)]
        assert {*there} == {"n0", "n1"}
    gone = r"shard \d has ended, because all nodes are ending"
    assert all(re.fullmatch(gone, str(said)) if at == "n0" else said == 1 for at, said in zip(there, LATE, strict=True))


async def test_a_journal_that_has_ended_in_another_process_is_not_asked_again(autojump_clock: MockClock) -> None:
    async with ActorSystem() as system, nodes_here(system, 1) as (nodes, _):
        journal = await nodes.spawn(Counter)
        began = trio.current_time()
        journal.tell(Leave())
        with pytest.raises(ShardLost, match="has stopped"):
            await Access(journal, shard=0, streams=True, patience=30.0).end()
        assert trio.current_time() - began < 1


@pytest.mark.ci
async def test_shards_whose_root_fails_open_again_and_nothing_else_ends(caplog: pytest.LogCaptureFixture) -> None:
    async with fleet(2):
        assert await SUMS["n0"]["x"].ask(Add(1)) == 1
        root: Any = SYSTEMS["driver"].registry["levada.durable/Sum"]
        restart_actor(root)
        assert [await SUMS[name]["x"].ask(Add(1), command=name, timeout=60) for name in ("n0", "n1")] == [2, 3]
        assert await shards(SYSTEMS["n0"], Sum, events=Added, **sums.SETTINGS) is SUMS["n0"]
    assert "took longer" not in caplog.text  # for shards that wait for a journal that is gone


async def test_other_arguments_are_refused_by_name_with_both_values(tmp_path: Path) -> None:
    async with fleet(1) as (nodes, _):
        for system in SYSTEMS.values():
            more: dict[str, Any] = {"nodes": nodes} if system is SYSTEMS["driver"] else {}
            for changed, says in (
                ({"shards": 8}, "shards=4, now 8"),
                ({"idle": 5.0}, "idle=60.0, now 5.0"),
                ({"remember": 1, "snapshot_every": 7}, "remember=256, now 1, snapshot_every=1000, now 7"),
                ({"keeper": True}, "keeper=False, now True"),
                ({"journal": tmp_path / "other"}, r"journal=\S+log, now \S+other"),
                ({"max_live": 8}, "max_live=100000, now 8"),
            ):
                with pytest.raises(ConfigurationError, match=f"'Sum' were started with other arguments: {says}$"):
                    await shards(system, Sum, events=Added, **{**sums.SETTINGS, **more, **changed})
            with pytest.raises(
                ConfigurationError,
                match=r"cls=\S+:Sum, now \S+:Double, events= \(their columns differ: .*; to change events, start .* again\)",
            ):
                await shards(system, Double, events=Doubled, name="Sum", **{**sums.SETTINGS, **more})
        assert await SUMS["n0"]["x"].ask(Add(1)) == 1
        with pytest.raises(ConfigurationError, match="leave out clock=, or give nodes=None"):
            await shards(SYSTEMS["n0"], Sum, events=Added, clock=lambda: 1.0, **sums.SETTINGS)


async def test_in_the_driver_a_name_that_is_taken_says_how_to_join_the_nodes(tmp_path: Path) -> None:
    async with fleet(1):
        driver, node = SYSTEMS["driver"], SYSTEMS["n0"]
        with pytest.raises(NameTaken, match="/Sum lives already: to join the shards of the nodes, give nodes=nodes; "):
            await shards(driver, Sum, events=Added, **sums.SETTINGS)
        await shards(driver, Double, events=Doubled, journal=tmp_path / "own", shards=1)
        with pytest.raises(NameTaken, match=r"^in the driver, /Double lives already: .*, then with nodes=nodes; "):
            await shards(node, Double, events=Doubled, journal=tmp_path / "theirs", shards=1)


async def test_shards_of_one_node_are_never_taken_for_those_of_all(tmp_path: Path) -> None:
    async with fleet(1) as (nodes, _):
        driver, node = SYSTEMS["driver"], SYSTEMS["n0"]
        own: dict[str, Any] = {"journal": tmp_path / "own", "shards": 1}
        with pytest.raises(
            NameTaken, match=r"^the shards 'Sum' of the nodes are known here: .*, leave out nodes=None; "
        ):
            await shards(node, Sum, events=Added, nodes=None, **own)
        await shards(driver, Sum, events=Added, nodes=nodes, **sums.SETTINGS)
        with pytest.raises(NameTaken, match=r"^the shards 'Sum' of the nodes are known here: .*, give nodes=nodes; "):
            await shards(driver, Sum, events=Added, **own)
        assert await shards(node, Sum, events=Added, **sums.SETTINGS) is SUMS["n0"]
        here = await shards(node, Double, events=Doubled, nodes=None, **own)
        theirs: dict[str, Any] = {"journal": tmp_path / "theirs", "shards": 1}
        with pytest.raises(
            NameTaken, match=r"^this process has shards 'Double' of its own: give those of the nodes an"
        ):
            await shards(node, Double, events=Doubled, **theirs)
        everywhere = await shards(node, Double, events=Doubled, name="everywhere", **theirs)
        assert await here["x"].ask(Add(1)) == await everywhere["x"].ask(Add(1)) == 1


async def test_alone_the_line_joins_too_from_handlers_and_at_the_same_time(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with ActorSystem("alone") as system:
        opener = system.spawn(Opener)
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(opener.ask, Open())
            found = await shards(system, Sum, events=Added, **sums.SETTINGS)
        assert await opener.ask(Open()) == 3
        assert await shards_of(system, Sum) is found
        for changed, says in (
            ({"shards": 8, "max_live": 8}, "shards=4, now 8, max_live=100000, now 8"),
            ({"idle": 5.0, "keeper": True}, "idle=60.0, now 5.0, keeper=False, now True"),
            ({"journal": tmp_path / "other"}, r"journal=\S+log, now \S+other"),
            ({"clock": trio.current_time}, r"clock= \(another function\)"),
        ):
            with pytest.raises(ConfigurationError, match=f"'Sum' were started with other arguments: {says}$"):
                await shards(system, Sum, events=Added, **{**sums.SETTINGS, **changed})
        with pytest.raises(
            ConfigurationError,
            match=r"cls=\S+:Sum, now \S+:Double, events= \(their columns differ: .*; to change events, start .* again\)",
        ):
            await shards(system, Double, events=Doubled, name="Sum", **sums.SETTINGS)
        system.spawn(Opener, name="Double")
        with pytest.raises(NameTaken, match=r"^/Double lives already: shards of this process need another name=$"):
            await shards(system, Double, events=Doubled, journal=tmp_path / "other", shards=1)
        found.ref.stop()
        await found.ref.terminated()
        again = await shards(system, Sum, events=Added, idle=5.0, **sums.SETTINGS)
        assert await again["handler"].ask(Add(1)) == 4


async def test_a_search_for_shards_does_not_hold_up_the_line_that_opens_them() -> None:
    async with fleet(1, PLAIN), trio.open_nursery() as nursery:
        nursery.start_soon(partial(shards_of, SYSTEMS["n0"], Sum, timeout=None))
        await wait_all_tasks_blocked()
        found = await shards(SYSTEMS["n0"], Sum, events=Added, **sums.SETTINGS)
        assert await found["x"].ask(Add(1)) == 1


async def test_what_cannot_be_opened_is_an_error_of_the_caller_and_the_name_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "UNLOCKED_WITHIN", 0.0)
    async with fleet(2, PLAIN) as (nodes, _):
        (tmp_path / "file").write_text("no folder")
        for system in SYSTEMS.values():
            more: dict[str, Any] = {"nodes": nodes} if system is SYSTEMS["driver"] else {}
            with pytest.raises(Exception, match="file"):
                await shards(system, Sum, events=Added, journal=tmp_path / "file", **more)
        async with ActorSystem("alone") as alone:
            holds = await shards(alone, Double, events=Doubled, name="Sum", **sums.SETTINGS)
            await holds["held"].ask(Add(1))  # an answer: its journal is open
            with pytest.raises(JournalLocked):
                await shards(SYSTEMS["n0"], Sum, events=Added, **sums.SETTINGS)
        with pytest.raises(ConfigurationError, match="give it as shards="):
            await shards(SYSTEMS["n0"], Sum, events=Added, journal=tmp_path / "log", shards=5)
        # Its columns grow, and the other class keeps its own.
        found = await shards(SYSTEMS["n0"], Sum, events=Added, **sums.SETTINGS)
        assert await found["x"].ask(Add(3)) == 3
        own = await shards(SYSTEMS["n1"], Double, events=Doubled, journal=tmp_path / "own", shards=1, nodes=None)
        assert await own["x"].ask(Add(3)) == 3
        await shards(SYSTEMS["driver"], Double, events=Doubled, journal=tmp_path / "here", shards=1)
        with pytest.raises(NameTaken):
            await shards(SYSTEMS["n0"], Double, events=Doubled, journal=tmp_path / "there", shards=1)


async def test_a_journal_of_one_node_serves_the_shards_of_all(tmp_path: Path) -> None:
    async with fleet(2, PLAIN):
        journal = SYSTEMS["n0"].spawn(lambda: Journal(tmp_path / "own", log_columns(Added), config=log_config(2)))
        found = await shards(SYSTEMS["n0"], Sum, events=Added, journal=journal, shards=2)
        assert found.journal is not None
        assert {await found[f"e{i}"].ask(Where()) for i in range(20)} == {"n0", "n1"}
        assert await found["x"].ask(Add(2)) == 2
        narrow = SYSTEMS["n0"].spawn(lambda: Journal(tmp_path / "narrow", log_columns(Doubled), config=log_config(2)))
        with pytest.raises(ConfigurationError, match="the journal lacks the columns n"):
            await shards(SYSTEMS["n1"], Sum, events=Added, journal=narrow, shards=2, name="narrow")


@pytest.mark.ci
async def test_a_full_disk_of_the_node_with_the_journal_is_the_error_of_commands_on_all_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    monkeypatch.setattr(shard, "LAST_DELAY", 0.05)
    async with fleet(2, PLAIN):
        journal = SYSTEMS["n0"].spawn(lambda: Journal(tmp_path / "own", log_columns(Added), config=log_config(2)))
        found = await shards(SYSTEMS["n1"], Sum, events=Added, journal=journal, shards=2)
        entities = {await found[f"e{i}"].ask(Where()): f"e{i}" for i in range(20)}
        assert entities.keys() == {"n0", "n1"}
        disk.refuses = errno.ENOSPC
        for entity in entities.values():
            with pytest.raises(JournalFull, match="the disk is full"):
                await found[entity].ask(Add(1), command="first")
        disk.refuses = 0
        for entity in entities.values():
            while True:
                try:
                    assert await found[entity].ask(Add(1), command="second") == 1
                    break
                except JournalFull:
                    await trio.lowlevel.checkpoint()


@pytest.mark.ci
async def test_a_keeper_that_cannot_start_is_an_error_of_the_caller_and_the_next_call_may_do_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with fleet(2, PLAIN):
        with monkeypatch.context() as broken:
            broken.setattr(sys, "executable", "/bin/false")
            for node in ("n0", "n1"):
                with pytest.raises(NodeLost, match="Sum-keeper ended with exit code 1"):
                    await shards(SYSTEMS[node], Sum, events=Added, keeper=True, **sums.SETTINGS)
        found = await shards(SYSTEMS["n1"], Sum, events=Added, **sums.SETTINGS)
        assert await found["x"].ask(Add(1)) == 1


@pytest.mark.ci
async def test_a_keeper_keeps_the_journal_of_the_fleet() -> None:
    sums.SETTINGS.update(keeper=True)
    async with fleet(2) as (nodes, _):
        assert "Sum-keeper" in [member.name for member in nodes.members]
        assert [await each["x"].ask(Add(1)) for each in SUMS.values()] == [1, 2]
