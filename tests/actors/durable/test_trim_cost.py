"""What a trimmed log costs at a restart."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa
from tests.actors.durable.accounts import EVENTS, Account, Balance, Deposit

from levada.actors.durable import log_columns, log_config, shards
from levada.actors.journal import Store, TrimRows
from levada.framework import ActorSystem

ENTITIES = 100
BATCH = 10_000


def fill(folder: Path, events: int) -> None:
    """Write deposits of all entities in turn."""
    columns = log_columns(EVENTS)
    names = [f"entity-{number}" for number in range(ENTITIES)]
    with Store.open(folder, columns, log_config(1)) as store:
        for first in range(0, events, BATCH):
            values = {
                "entity": pa.array(names * (BATCH // ENTITIES)),
                "sequence": pa.array([1 + (first + place) // ENTITIES for place in range(BATCH)], pa.int64()),
                "time": pa.repeat(pa.scalar(1, columns.field("time").type), BATCH),
                "kind": pa.repeat(pa.scalar("test.durable.deposited"), BATCH),
                "_version": pa.repeat(pa.scalar(1, pa.int32()), BATCH),
                "amount": pa.repeat(pa.scalar(1, pa.int64()), BATCH),
            }
            arrays = [values.get(field.name, pa.nulls(BATCH, field.type)) for field in columns]
            store.append([(0, pa.RecordBatch.from_arrays(arrays, schema=columns))])


async def command(folder: Path, *, snapshots: bool) -> list[int]:
    """Start the actors; ask some of them, or have all write snapshots."""
    async with ActorSystem("test", ask_timeout=1e6, shutdown_timeout=1e6) as system:
        accounts = await shards(system, Account, events=EVENTS, journal=folder, shards=1, snapshot_every=50)
        if snapshots:
            return [await accounts[f"entity-{number}"].ask(Deposit(1)) for number in range(ENTITIES)]
        return [await accounts[f"entity-{number}"].ask(Balance()) for number in range(5)]


def trim(folder: Path) -> int:
    with Store.open(folder, None, log_config(1)) as store:
        return sum(store.trim(0, store.rows_to_go(TrimRows(0, 1e12))))


async def restart_times(folder: Path, events: int) -> list[float]:
    found = []
    for _ in range(7):
        before = time.process_time()
        assert await command(folder, snapshots=False) == [events // ENTITIES + 1] * 5
        found.append(time.process_time() - before)
    return found


@pytest.mark.release
async def test_a_trimmed_log_restarts_as_quickly_as_a_small_one(tmp_path: Path) -> None:
    times = {}
    for events in (10_000, 10_000_000):
        fill(tmp_path / str(events), events)
        await command(tmp_path / str(events), snapshots=True)
        assert trim(tmp_path / str(events)) == events + ENTITIES
        times[events] = await restart_times(tmp_path / str(events), events)
    small, large = (statistics.median(each) for each in times.values())
    assert large < 1.5 * small, f"{large:.3f} s of CPU, and {small:.3f} s with a thousandth of the events"
