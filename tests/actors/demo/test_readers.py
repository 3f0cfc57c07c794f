"""Readers on nodes: they share the lines, and each line is in the journal once, also if a node is killed."""

from __future__ import annotations

import os
import signal
from collections import Counter
from functools import partial
from pathlib import Path

import attrs
import pytest
import trio

pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")
pytest.importorskip("cryptography")

import pyarrow as pa

from levada.actors.demo.ingest import LineIntake, Pace, ship
from levada.actors.demo.readers import readers
from levada.actors.demo.rows import LogLine
from levada.actors.demo.scoring import score_by, scorers
from levada.actors.interop.certificates import make_certificates
from levada.actors.journal import Journal, JournalConfig, Read, columns_of
from levada.actors.nodes import NodeDown, NodeLost, nodes_of
from levada.actors.spark.asks import RemoteActor
from levada.actors.spark.bridge import Mailbox
from levada.framework import ActorSystem, Failed, Reason, bounded

pytestmark = [pytest.mark.ci, pytest.mark.loopback, pytest.mark.timeout(170)]
LINES = 60_000
PROBE = '1.2.3.4 - - [17/May/2015:10:05:03 +0000] "GET /wp-admin/ HTTP/1.1" 404 1 "-" "x"'


class Shipped:
    """What came through: the offsets of the lines in the journal, and how many each node read."""

    def __init__(self) -> None:
        self.offsets = list[int]()
        self.read = Counter[str]()
        self.scored = Counter[str]()
        """Lines that each node scored."""
        self.reason: Reason | None = None
        """Why the first node went down; None: it did not."""


async def points(scorer: RemoteActor, columns: int) -> list[int]:
    """How many scores executors get for columns of ten lines."""
    asked = [pa.array([PROBE] * 10)] * columns
    return await trio.to_thread.run_sync(lambda: [len(each) for each in score_by(scorer)(iter(asked))])


async def shipped(folder: Path, *, kill: bool) -> Shipped:
    """Ship a file through two nodes; kill one of them when it has read a quarter of the lines."""
    log, found = folder / "long.log", Shipped()
    log.write_text("".join(f"line {number:06d}\n" for number in range(LINES)))
    pems = make_certificates(folder / "tls")
    async with ActorSystem("driver", ask_timeout=300.0) as system:
        journal = system.spawn(
            partial(Journal, folder / "logs", LogLine, config=JournalConfig(sync="never")), mailbox=bounded(256)
        )
        intake = system.spawn(LineIntake, Mailbox("logs", journal, columns_of(LogLine)), found.read)
        pace = Pace()
        async with (
            readers(system, "lumberjack+tls://127.0.0.1:0", intake, pems.certificate, pems.key, nodes=2) as urls,
            scorers(system, folder / "asks", found.scored, on_nodes=True) as scorer,
            trio.open_nursery() as nursery,
        ):
            nodes = nodes_of(system)
            assert len(set(urls)) == 2

            async def kill_first() -> None:
                async with nodes.events() as events:
                    while found.read["n0"] < LINES // 4:
                        await trio.lowlevel.checkpoint()
                    os.kill(nodes["n0"].pid, signal.SIGKILL)
                    down = await events.receive()
                    assert isinstance(down, NodeDown)
                    found.reason = down.reason

            if kill:
                nursery.start_soon(kill_first)
            await ship(system, urls, pems.ca, [log], pace)
            assert await points(scorer, 20) == [10] * 20
            for member in nodes.members:  # also one that was lost: its scorer is at the same socket again
                address = scorer.address.replace("*", member.name)
                assert await points(attrs.evolve(scorer, address=address), 1) == [10]
        assert pace.shipped == LINES
        at = 0
        while blocks := await journal.ask(Read(0, at)):
            for block in blocks:
                found.offsets += block.batch().column("offset").to_pylist()
                at = block.end
    return found


async def test_two_nodes_share_the_lines_of_one_file(tmp_path: Path) -> None:
    found = await shipped(tmp_path, kill=False)
    assert sorted(found.offsets) == [12 * number for number in range(LINES)]
    assert found.read.total() == LINES
    # Of fifteen windows, on a machine that may be busy; of a hundred, test_demo.py requires 40 to 60 %.
    assert 0.25 <= found.read["n0"] / LINES <= 0.75
    assert found.scored == {"n0": 110, "n1": 110}


async def test_each_line_counts_once_though_a_node_is_killed(tmp_path: Path) -> None:
    found = await shipped(tmp_path, kill=True)
    assert sorted(found.offsets) == [12 * number for number in range(LINES)]
    assert set(found.read) == {"n0", "n1"}
    assert isinstance(found.reason, Failed)
    assert isinstance(found.reason.error, NodeLost)
    assert found.reason.error.signal == signal.SIGKILL
