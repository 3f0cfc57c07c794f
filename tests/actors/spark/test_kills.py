"""Processes that are killed as a kernel out of memory does it, without Spark; `test_sink` has the same with Spark in the profile soak."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pa = pytest.importorskip("pyarrow")
pytest.importorskip("levada.actors.spark", exc_type=ImportError)

from levada.actors.spark.protocol import DeliverBatch, StageHead  # noqa: E402
from levada.actors.spark.worker import RemoteMailbox  # noqa: E402

if TYPE_CHECKING:
    from .conftest import Server

pytestmark = pytest.mark.loopback


def numbers(mailbox: RemoteMailbox, partition: int) -> list[int]:
    found = mailbox.describe()
    batches = mailbox.read(partition, 0, found.end[partition], epoch=found.epoch, schema=found.columns())
    return [number for batch in batches for number in batch.column("number").to_pylist()]


def all_numbers(mailbox: RemoteMailbox) -> list[int]:
    return sorted(numbers(mailbox, 0) + numbers(mailbox, 1))


@pytest.mark.ci
def test_a_reader_outlives_the_actors_side(serve: Callable[..., Server]) -> None:
    """Killed in the middle of a stream of blocks and started again: each row comes once, in its order."""
    server = serve(5_000)
    lines = RemoteMailbox(server.address, "lines")
    found = lines.describe()
    batches = lines.read(0, 0, found.end[0], epoch=found.epoch, schema=found.columns())
    got = next(batches).column("number").to_pylist()
    server.kill()
    serve(5_000)
    got += [number for batch in batches for number in batch.column("number").to_pylist()]
    assert got == numbers(lines, 0)
    assert all_numbers(lines) == list(range(5_000))


WRITER = """
import os, signal, sys
import pyarrow as pa
from levada.actors.spark.protocol import StageHead
from levada.actors.spark.worker import RemoteMailbox
out = RemoteMailbox(sys.argv[1], "out")
columns = out.describe().columns()
def blocks():
    for number in range(100):
        yield pa.record_batch([pa.array([number], pa.int64())], schema=columns)
        if number == 50:
            os.kill(os.getpid(), signal.SIGKILL)
out.stage(StageHead("query", 0, 0, 1), blocks())
"""


@pytest.mark.ci
def test_rows_of_a_writer_that_is_killed_are_never_seen(serve: Callable[..., Server]) -> None:
    """Those of its second try are, once."""
    server = serve(0)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", WRITER, server.address], check=False, timeout=250)
    assert done.returncode == -signal.SIGKILL
    out = RemoteMailbox(server.address, "out")
    assert all_numbers(out) == []
    batch = pa.record_batch([pa.array(range(100), pa.int64())], schema=out.describe().columns())
    assert out.stage(StageHead("query", 0, 0, 2), [batch]) == 100
    assert not out.ask(DeliverBatch("query", 0, {0: 2})).already
    assert all_numbers(out) == list(range(100))


@pytest.mark.ci
def test_a_batch_is_delivered_though_the_bridge_is_killed_after_it_was_staged(serve: Callable[..., Server]) -> None:
    """And in the middle of staging, with blocks under way: the task goes on where it was."""
    servers = [serve(0)]
    out = RemoteMailbox(servers[0].address, "out")
    columns = out.describe().columns()

    def blocks() -> Iterator[Any]:
        for number in range(100):
            if number == 50:
                servers[-1].kill()
                servers.append(serve(0))
            yield pa.record_batch([pa.array([number], pa.int64())], schema=columns)

    assert out.stage(StageHead("query", 0, 0, 1), blocks()) == 100
    servers[-1].kill()
    serve(0)
    assert not out.ask(DeliverBatch("query", 0, {0: 1}, {0: 100})).already
    assert all_numbers(out) == list(range(100))


@pytest.mark.ci
def test_a_delivery_that_only_the_ledger_knows_of_is_not_done_twice(
    serve: Callable[..., Server], tmp_path: Path
) -> None:
    """The actors' side is killed behind the line of the ledger and before its answer; who asked asks again by itself."""
    server = serve(0)
    (tmp_path / "bridge" / "delivered").touch()
    out = RemoteMailbox(server.address, "out")
    batch = pa.record_batch([pa.array(range(100), pa.int64())], schema=out.describe().columns())
    out.stage(StageHead("query", 0, 0, 1), [batch])
    codes: list[int] = []

    def follow() -> None:
        codes.append(server.ended())
        serve(0)

    following = threading.Thread(target=follow)
    following.start()
    assert out.ask(DeliverBatch("query", 0, {0: 1})).already
    following.join(50)
    assert codes == [-signal.SIGKILL]
    assert all_numbers(out) == list(range(100))
