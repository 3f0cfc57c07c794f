"""Step 6: readings that outlive the program: a durable actor for each place, whose events are rows of a table."""

from __future__ import annotations

import tempfile

import pyarrow as pa
import trio

from levada.actors.durable import Durable, Shards, applies, shards
from levada.actors.journal import GetExtent, ReadRows
from levada.framework import ActorSystem, Asks, handles, message


@message("tutorial.take")
class Take(Asks[None]):
    celsius: float


@message("tutorial.mean")
class Mean(Asks[float]):
    """The mean of all readings of a place."""


@message("tutorial.taken")
class Taken:
    celsius: float


class Place(Durable[Take | Mean]):
    count: int = 0
    total: float = 0.0

    @handles
    def take(self, m: Take) -> None:
        self.record(Taken(m.celsius))

    @handles
    def mean(self, m: Mean) -> float:
        return self.total / self.count

    @applies
    def taken(self, e: Taken) -> None:
        self.count += 1
        self.total += e.celsius


READINGS = [("roof", 11.0), ("cellar", 8.0), ("roof", 12.0), ("cellar", 9.0), ("roof", 16.0)]


async def life(folder: str, first: int, last: int) -> None:
    """Take some of the readings, in a system that ends behind them."""
    async with ActorSystem() as system:
        places = await shards(system, Place, events=Taken, journal=folder, shards=2)
        for number in range(first, last):
            place, celsius = READINGS[number]
            await places[place].ask(Take(celsius), command=f"reading {number}")
        print(await places["roof"].ask(Mean()), await table(places))


async def table(places: Shards[Take | Mean]) -> dict[str, float]:
    """The means of all places, from the log."""
    assert places.journal is not None
    extent = await places.journal.ask(GetExtent())
    found = [await places.journal.ask(ReadRows(partition, 0)) for partition in extent.end]
    rows = pa.Table.from_batches(each.batch() for each in found).select(["entity", "celsius"]).drop_null()
    means = rows.group_by("entity").aggregate([("celsius", "mean")]).sort_by("entity")
    return dict(zip(means["entity"].to_pylist(), means["celsius_mean"].to_pylist(), strict=True))


async def main(folder: str) -> None:
    await life(folder, 0, 3)
    await life(folder, 2, 5)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        trio.run(main, folder)
