"""The checks of the questions that a `levada.actors.journal.TailedLog` answers besides."""

from __future__ import annotations

import trio

from levada.actors.journal import AwaitRows, Extent, GetExtent, GetReach, Reach

from ._log_checks import COLUMNS, append, ask, row
from ._promises import Maker, promise


@promise
async def rows_that_come_answer_those_who_wait(make: Maker) -> None:
    """As many as were asked for, in all partitions together; at once, if they are there."""
    async with make(COLUMNS, 2) as made:
        if not made.tailed:
            return
        found: list[Extent] = []

        async def wait(rows: int) -> None:
            found.append(await ask(made.ref, AwaitRows({0: 1, 1: 0}, rows)))

        await append(made.ref, [row("anna", 1)], 0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait, 2)
            await append(made.other or made.ref, [row("anna", 2)], 1)
            await append(made.other or made.ref, [row("bert", 1)], 0, partition=1)
        await wait(1)
        assert [dict(each.end) for each in found] == [{0: 2, 1: 1}] * 2


@promise
async def an_opening_names_the_rows_of_its_time(make: Maker) -> None:
    """They are all the same, also after a kill; an opening that the log does not know is from a newer copy."""
    async with make(COLUMNS, 2) as made:
        if not made.tailed:
            return
        await append(made.ref, [row("anna", 1), row("anna", 2)], 0)
        extent: Extent = await ask(made.ref, GetExtent())
        assert extent.opening
        if made.restart is not None:
            await made.restart()
        await append(made.ref, [row("anna", 3)], 2)
        reach: Reach = await ask(made.ref, GetReach(extent.opening))
        assert reach.known
        assert all(reach.ends[number] >= end for number, end in extent.end.items())
        reach = await ask(made.ref, GetReach("another"))
        assert not reach.known
